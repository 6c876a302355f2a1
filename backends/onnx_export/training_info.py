"""The standard's own form of a training step: an inference graph, and a `TrainingInfoProto` that is put behind it.

By `onnx.proto` a training iteration is the inference graph and the `algorithm` graph one after the other: their inputs, initializers, nodes and outputs are
concatenated, and after it each initializer named by an `update_binding` takes the value of its output. So the inference graph holds the forward
pass, the parameters and the state; the algorithm holds loss, backward pass and update, the optimizer's slots, the step counter and the
hyperparameters. Where training computes the forward pass otherwise (batch statistics, dropout), the algorithm has a forward pass of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from ...algebra.errors import PullbackError
from ...algebra.graph import Graph
from ...algebra.passes import default as simplified
from ...algebra.signature import Signature
from ..restore import OTHERWISE
from .emit import to_onnx

__all__ = ["combined", "save_standard_form", "standard_form"]


def standard_form(step: Graph, evaluation: Graph, *, profile: str = "explicit", opset: int | None = None) -> ModelProto:
    """The model that runs as inference, with the training step in `training_info`."""
    signature = Signature.of(step)
    whole = to_onnx(
        step if profile == "native" else simplified(step),
        profile=profile,
        target="onnxruntime",
        embed="all",
        opset=opset,
    )
    outputs = [e.name for e in signature.outputs_of("output")]
    if any(signature.training.get(k) for k in OTHERWISE):
        inference = _inference(evaluation, outputs, profile, opset)
        _rename(whole.graph, _taken(inference.graph), keep=_interface(signature))
        nodes = list(whole.graph.node)
    else:
        inference, nodes = _forward_of(whole, outputs)
    return _assembled(whole, inference, nodes, signature)


def save_standard_form(
    step: Graph, evaluation: Graph, path: str | Path, *, profile: str = "explicit", opset: int | None = None
) -> Path:
    """Write the standard form under a temporary name and move it into place."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        onnx.save(standard_form(step, evaluation, profile=profile, opset=opset), temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def combined(model: ModelProto) -> ModelProto:
    """One training iteration as one graph: the concatenation that `onnx.proto` describes."""
    if len(model.training_info) != 1:
        raise PullbackError(f"one training_info is required, found {len(model.training_info)}")
    whole = ModelProto()
    whole.CopyFrom(model)
    del whole.training_info[:]
    algorithm = model.training_info[0].algorithm
    for field in ("input", "initializer", "sparse_initializer", "node", "output", "value_info"):
        getattr(whole.graph, field).extend(getattr(algorithm, field))
    return whole


# ---- the parts -------------------------------------------------------------------------------------------------


def _reads(nodes: Iterable[NodeProto]) -> Iterator[str]:
    for node in nodes:
        yield from filter(None, node.input)
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _reads(attribute.g.node)
                yield from (o.name for o in attribute.g.output)


def _shell(model: ModelProto) -> ModelProto:
    """A model of the same versions, without a graph."""
    shell = ModelProto(ir_version=model.ir_version, producer_name=model.producer_name)
    shell.opset_import.extend(model.opset_import)
    shell.graph.name = model.graph.name
    return shell


def _forward_of(whole: ModelProto, outputs: Collection[str]) -> tuple[ModelProto, list[NodeProto]]:
    """The part of a step that computes the model's outputs, and the nodes that are left."""
    needed, forward, rest = set(outputs), [], []
    for node in reversed(whole.graph.node):
        if needed.isdisjoint(node.output):
            rest.append(node)
        else:
            forward.append(node)
            needed.update(_reads([node]))
    inference = _shell(whole)
    graph = inference.graph
    graph.node.extend(reversed(forward))
    graph.output.extend(o for o in whole.graph.output if o.name in set(outputs))
    graph.initializer.extend(t for t in whole.graph.initializer if t.name in needed)
    held = {t.name for t in graph.initializer}
    graph.input.extend(i for i in whole.graph.input if i.name in needed and i.name not in held)
    made = {o for node in forward for o in node.output}
    graph.value_info.extend(v for v in whole.graph.value_info if v.name in made)
    return inference, rest[::-1]


def _inference(evaluation: Graph, outputs: Collection[str], profile: str, opset: int | None) -> ModelProto:
    """The forward pass in inference mode, without the loss."""
    graph = evaluation.with_(
        outputs={k: v for k, v in evaluation.outputs.items() if k in outputs},
        inputs=tuple(v for v in evaluation.inputs if v.params["role"] != "target"),
        info={**evaluation.info, "kind": "graph"},
    )
    model = to_onnx(
        graph if profile == "native" else simplified(graph),
        profile=profile,
        target="onnxruntime",
        embed="all",
        opset=opset,
    )
    held = {t.name for t in model.graph.initializer}
    inputs = [i for i in model.graph.input if i.name not in held]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    return model


def _interface(signature: Signature) -> set[str]:
    """Names that stay, as they mean the same in both graphs, or are the step's own."""
    outputs = {e.name for e in signature.outputs if e.role != "output"}
    return outputs | {e.name for e in signature.inputs} | set(signature.frozen)


def _taken(graph: GraphProto) -> set[str]:
    return {n for node in graph.node for n in node.output} | {t.name for t in graph.initializer}


def _rename(graph: GraphProto, taken: set[str], keep: Collection[str]) -> None:
    """Give what the other graph has already another name, `training_{name}`."""
    mine = _taken(graph)
    used = taken | mine
    new: dict[str, str] = {}
    for name in sorted(mine & taken - set(keep)):
        candidates = itertools.chain([f"training_{name}"], (f"training_{name}_{i}" for i in itertools.count(1)))
        new[name] = next(c for c in candidates if c not in used)
        used.add(new[name])
    _renamed_nodes(graph.node, new)
    for named in (*graph.output, *graph.value_info, *graph.initializer):
        named.name = new.get(named.name, named.name)


def _renamed_nodes(nodes: Iterable[NodeProto], new: Mapping[str, str]) -> None:
    for node in nodes:
        for field in (node.input, node.output):
            for i, name in enumerate(field):
                field[i] = new.get(name, name)
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                own = {i.name for i in attribute.g.input} | _taken(attribute.g)
                inner = {k: v for k, v in new.items() if k not in own}
                _renamed_nodes(attribute.g.node, inner)
                for o in attribute.g.output:
                    o.name = inner.get(o.name, o.name)


def _assembled(whole: ModelProto, inference: ModelProto, nodes: list[NodeProto], signature: Signature) -> ModelProto:
    model = inference
    main = model.graph
    carried = signature.carried
    stored = {t.name: t for t in whole.graph.initializer}
    held = {t.name for t in main.initializer}
    for e in signature.inputs_of(
        "parameter", "state"
    ):  # what is updated is always an initializer of the inference graph
        if e.name not in held and e.name in stored:
            main.initializer.append(stored[e.name])
            held.add(e.name)
    info = model.training_info.add()
    algorithm = info.algorithm
    algorithm.name = f"{whole.graph.name}_training"
    algorithm.node.extend(nodes)
    present = held | {i.name for i in main.input}
    read = set(_reads(nodes))
    algorithm.initializer.extend(
        t for n, t in stored.items() if n not in present and (n in read or n in carried.values())
    )
    here = present | {t.name for t in algorithm.initializer}
    algorithm.input.extend(i for i in whole.graph.input if i.name not in here)
    mine = {o for node in nodes for o in node.output}
    own = {e.name for e in signature.outputs if e.role != "output"}
    algorithm.output.extend(o for o in whole.graph.output if o.name in mine and o.name in own)
    algorithm.value_info.extend(v for v in whole.graph.value_info if v.name in mine)
    for output, name in carried.items():
        info.update_binding.add(key=name, value=output)
    _initialization(info, algorithm, signature)
    del model.metadata_props[:]
    helper.set_model_props(model, {"pullback.signature": signature.to_json()})
    return model


def _initialization(info: onnx.TrainingInfoProto, algorithm: GraphProto, signature: Signature) -> None:
    """The graph that sets slots and the step counter to their first values, each a repeated number."""
    names = {e.name for e in signature.inputs_of("slot", "step")}
    graph = info.initialization
    graph.name = f"{algorithm.name}_initialization"
    for tensor in algorithm.initializer:
        value = numpy_helper.to_array(tensor) if tensor.name in names else np.zeros(0)
        if value.size == 0 or not np.all(value == value.reshape(-1)[0]):
            continue
        output, shape = f"initial_{tensor.name}", f"shape_of_{tensor.name}"
        graph.initializer.append(numpy_helper.from_array(np.asarray(value.shape, np.int64), shape))
        fill = TensorProto(data_type=tensor.data_type, dims=[1])
        fill.raw_data = np.ascontiguousarray(value.reshape(-1)[:1]).tobytes()
        graph.node.append(helper.make_node("ConstantOfShape", [shape], [output], name=output, value=fill))
        graph.output.append(helper.make_tensor_value_info(output, tensor.data_type, list(value.shape)))
        info.initialization_binding.add(key=tensor.name, value=output)
