"""A graph of the algebra as an ONNX model in plain operators.

The nodes are walked once, in topological order; `tables.EMIT` says how each primitive is written. What no output needs is left out when the
program is closed, then everything is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto, helper

from ...algebra.dims import show, symbols
from ...algebra.errors import PullbackError, Refusal
from ...algebra.graph import Constant, Graph, Value
from ...algebra.passes import default as simplified
from ...algebra.passes.unroll import unroll
from ...algebra.signature import Signature
from ...algebra.types import DType
from ..restore import EVALUATION, OTHERWISE, WEIGHT, carried, packed
from .emission import Emission, users_of
from .legal import illegal
from .metadata import mark, model_metadata, node_metadata, roles, summary
from .naming import Names, node_stem
from .ops import Ops
from .program import Body, Op, Program, Tensor, needed
from .runtime_dims import RuntimeDims
from .tables import EMIT
from .targets import NEWEST, OLDEST, Target, all_nodes, refusals, target_named, with_symbols
from .view import whole

__all__ = ["Emitted", "emit", "to_onnx"]

PROFILES = ("explicit", "native")


@dataclass(slots=True)
class Emitted:
    """A model without its weights, and the weights by name: `initializers` stand in the model, `beside` travel in safetensors."""

    model: onnx.ModelProto
    initializers: dict[str, Constant] = field(default_factory=dict)
    beside: dict[str, Constant] = field(default_factory=dict)


def emit(graph: Graph, *, profile: str = "explicit", target: str = "onnxruntime", embed: str | None = None,
         opset: int | None = None) -> Emitted:  # fmt: skip
    """The model of a graph, its weights apart."""
    if profile not in PROFILES:
        raise PullbackError(f"no profile {profile!r}; there are {', '.join(PROFILES)}")
    chosen = target_named(target)
    embed = embed or chosen.embed
    if embed not in ("all", "frozen", "none"):
        raise PullbackError(f"embed is all, frozen or none, found {embed!r}")
    opset = opset or _opset(graph, chosen)
    if "scan" in chosen.static_only and any(map(with_symbols, all_nodes(graph))):
        graph = unroll(graph, only=with_symbols)
    _refuse(graph, chosen, opset)
    if profile == "native":
        from .native import raise_operators

        graph = raise_operators(graph)
    return _Walk(graph, chosen, embed, opset).run()


def to_onnx(graph: Graph, *, profile: str = "explicit", target: str = "onnxruntime", embed: str | None = None,
            opset: int | None = None) -> onnx.ModelProto:  # fmt: skip
    """The graph as an ONNX model, weights included where `embed` says so.

    `target` is whom the model is for (`onnxruntime`, `onnx-mlir`, `torch-mlir`, `iree`), `embed` where initial values live: `all` in the file, every
    input among them overridable; `frozen` only what is never trained; `none` nothing.
    """
    emitted = emit(graph, profile=profile, target=target, embed=embed, opset=opset)
    for name, constant in emitted.initializers.items():
        emitted.model.graph.initializer.append(tensor_proto(name, constant))
    return emitted.model


def _opset(graph: Graph, target: Target) -> int:
    """The target's, or the first that has what the graph needs where the target takes it."""
    newer = target.name == "onnxruntime" and any(v.primitive.name == "bit_cast" for v in all_nodes(graph))
    return max(target.opset, 26) if newer else target.opset


def _refuse(graph: Graph, target: Target, opset: int) -> None:
    """Everything that stands in the way, at once."""
    reasons = [f"no emission of {v.primitive.name}" for v in all_nodes(graph) if v.primitive.name not in EMIT]
    if not OLDEST <= opset <= NEWEST:
        reasons.append(f"opset {opset} cannot be written, only {OLDEST} to {NEWEST}")
    reasons += refusals(graph, target)
    if reasons:
        raise Refusal(f"cannot write {graph.name!r} for {target.name}", reasons)


class _Walk:
    """One emission, from the graph to the model."""

    def __init__(self, graph: Graph, target: Target, embed: str, opset: int) -> None:
        self.graph, self.target, self.embed, self.opset = graph, target, embed, opset
        self.program = Program()
        self.dims = RuntimeDims(self.program, opset)
        pinned = {id(v) for v in graph.outputs.values()} | {id(v) for v in graph.tensors.values()}
        ops = Ops(self.program, self.dims, target, opset)
        self.emission = Emission(EMIT, ops, pinned, users_of(graph))
        self.inputs: dict[str, Tensor] = {}

    def run(self) -> Emitted:
        self._enter()
        self.emission.walk(self.graph)
        outputs = self._leave()
        ops = needed(self.program.ops, list(outputs.values()))
        tensors = self._name(ops, outputs)
        if reasons := [*self.dims.missing, *illegal(ops, self.opset)]:
            raise Refusal(f"cannot write {self.graph.name!r} for {self.target.name}", reasons)
        return self._model(ops, outputs, tensors)

    # ---- inputs and outputs ----

    def _enter(self) -> None:
        for v in self.graph.inputs:
            name = v.params["name"]
            if v.params["role"] == "frozen" and self.embed != "none" and name in self.graph.data:
                tensor = Tensor(v.dtype, v.shape, constant=self.graph.data[name])
            else:
                tensor = self.program.input(v.dtype, v.shape)
            tensor.name = name
            self.inputs[name] = tensor
            self.emission.views[id(v)] = whole(tensor)
        self.dims.read_from(self.graph, self.inputs)

    def _leave(self) -> dict[str, Tensor]:
        """The tensor of each output; one of its own where it would be an input, a constant or another output."""
        outputs: dict[str, Tensor] = {}
        taken: set[int] = set()
        for name, v in self.graph.outputs.items():
            self.program.serving = v
            tensor = self.emission.tensor(v)
            if self.inputs.get(name) is tensor:  # an output that is the input of the same name
                outputs[name] = tensor
                continue
            if tensor.op is None or id(tensor) in taken:
                (tensor,) = self.program.append("Identity", (tensor,), ((tensor.dtype, tensor.shape),), {})
            taken.add(id(tensor))
            tensor.name = name
            outputs[name] = tensor
        return outputs

    # ---- names ----

    def _name(self, ops: Sequence[Op], outputs: dict[str, Tensor]) -> dict[str, str]:
        """Name every tensor and node; return the model's own tensor names with their names in the file."""
        names = Names([*self.inputs, *outputs])
        made = {id(t) for op in ops for t in op.outputs}
        present: dict[str, str] = {}
        for name, v in self.graph.tensors.items():
            tensor = self._whole(v)
            if tensor is not None and not tensor.name and id(tensor) in made:
                tensor.name = names.unique(name)
            if tensor is not None and tensor.name:
                present[name] = tensor.name
        labels = self.graph.labels()
        for v in self.graph.nodes:
            view = self.emission.views.get(id(v))
            if view is not None and view.is_whole and not view.tensor.name and id(view.tensor) in made:
                view.tensor.name = names.unique(labels[v])
        self._name_rest(ops, labels, names, Names())
        return present

    def _whole(self, v: Value) -> Tensor | None:
        """The tensor that is a value as it is, where there is one or can be one: what is not needed is not in the file all the same."""
        view = self.emission.views.get(id(v))
        if view is None or view.is_whole:
            return None if view is None else view.tensor
        return self.emission.real(view) if all(map(self.dims.can_read, symbols(view.shape))) else None

    def _name_rest(self, ops: Sequence[Op], labels: dict[Value, str], names: Names, nodes: Names) -> None:
        for op in ops:
            op.name = nodes.unique(_stem(op, self.graph.name))
            label = op.type.lower() if op.serves is None else labels.get(op.serves, op.serves.primitive.name)
            for output in op.outputs:
                output.name = output.name or names.unique(f"{label}_{op.type.lower()}")
            for read in op.inputs:
                if read is not None and not read.name and read.constant is not None:
                    read.name = names.unique(_constant_name(read))
            for body in op.bodies.values():
                inner = body.graph.labels()
                for i, t in enumerate(
                    body.inputs
                ):  # a Loop passes its counter and condition first, a Scan may pass a mere place
                    at = i - 2 if op.type == "Loop" else i
                    given = inner[body.graph.inputs[at]] if 0 <= at < len(body.graph.inputs) else "place"
                    t.name = names.unique(f"{label}_{given}")
                self._name_rest(body.ops, {v: f"{label}_{text}" for v, text in inner.items()}, names, nodes)

    # ---- protos ----

    def _model(self, ops: Sequence[Op], outputs: dict[str, Tensor], tensors: dict[str, str]) -> Emitted:
        graph = self.graph
        signature = Signature.of(graph, tensors)
        told = roles(signature)
        emitted = Emitted(onnx.ModelProto())
        inputs = []
        for v in graph.inputs:
            name, role = v.params["name"], v.params["role"]
            has_data = name in graph.data
            if not (role == "frozen" and self.embed != "none" and has_data):
                inputs.append(mark(value_info(self.inputs[name]), told.get(name)))
            if has_data:
                inside = self.embed == "all" or (self.embed == "frozen" and role == "frozen")
                (emitted.initializers if inside else emitted.beside)[name] = graph.data[name]
        for t in _constants(ops):
            emitted.initializers.setdefault(t.name, t.constant)  # type: ignore[arg-type]
        nodes = [node_proto(op, graph.name) for op in ops]
        output_ids = {id(t) for t in outputs.values()}
        infos = [mark(value_info(t), told.get(t.name)) for op in ops for t in op.outputs if id(t) not in output_ids]
        emitted.model = helper.make_model(
            helper.make_graph(
                nodes,
                graph.name or "graph",
                inputs,
                [mark(value_info(t), told.get(name)) for name, t in outputs.items()],
                value_info=infos,
                doc_string=summary(signature, graph.name or "graph", nodes),
            ),
            opset_imports=[helper.make_opsetid("", self.opset)],
            ir_version=ir_version(self.opset),
            producer_name="pullback",
        )
        props = model_metadata(graph, signature, self.target)
        if self.embed == "all":
            props |= _original(graph)
        helper.set_model_props(emitted.model, props)
        return emitted


def _original(graph: Graph) -> dict[str, str]:
    """The inference model that a training step came from, so that trained weights can go back into it; what the loss divides by; and, where the step
    computes otherwise than inference, its evaluation graph without the weights."""
    info = graph.info
    if info.get("kind") != "step":
        return {}
    props: dict[str, str] = {}
    if "model" in info:
        held = {v.params["name"] for v in graph.inputs if v.params["name"] in graph.data}
        props |= carried(info["model"], held, split=info.get("split", ()), base=info.get("base"))
    if isinstance(info.get("weight"), Graph):
        props |= packed(WEIGHT, to_onnx(simplified(info["weight"]), embed="none"))
    evaluation = info.get("evaluation")
    training = info.get("training", {})
    if isinstance(evaluation, Graph) and any(training.get(k) for k in OTHERWISE):
        props |= packed(EVALUATION, to_onnx(simplified(evaluation), embed="none"))
    return props


def _constants(ops: Sequence[Op]) -> Iterator[Tensor]:
    """The constants that operators read, those in bodies included."""
    for op in ops:
        yield from (t for t in op.inputs if t is not None and t.constant is not None)
        for body in op.bodies.values():
            yield from _constants(body.ops)


def _stem(op: Op, graph_name: str) -> str:
    stem = node_stem(op.serves, graph_name)
    return (
        stem if op.serves is not None and op.type.lower() == op.serves.primitive.name else f"{stem}_{op.type.lower()}"
    )


def _constant_name(t: Tensor) -> str:
    assert t.constant is not None, f"{t!r} has no name"
    if t.constant.size == 1 and t.rank == 0:
        return f"{t.dtype.name}_{t.constant.array.item()}"
    if t.constant.size <= 8 and t.dtype.name == "i64":
        return "i64_" + "_".join(map(str, t.constant.array.ravel().tolist()))
    return f"constant_{t.dtype.name}"


def node_proto(op: Op, graph_name: str) -> onnx.NodeProto:
    """The node of an operator."""
    node = helper.make_node(
        op.type, ["" if t is None else t.name for t in op.inputs], [t.name for t in op.outputs], name=op.name
    )
    for key, value in op.attributes.items():
        if isinstance(value, DType):
            value = onnx_dtype(value)
        node.attribute.append(helper.make_attribute(key, value))
    for key, body in op.bodies.items():
        node.attribute.append(helper.make_attribute(key, body_proto(body, graph_name)))
    for key, text in node_metadata(op.serves, graph_name).items():
        node.metadata_props.add(key=key, value=text)
    return node


def body_proto(body: Body, graph_name: str) -> onnx.GraphProto:
    """The graph inside a Scan, If or Loop."""
    results = {id(t) for t in body.outputs}
    return helper.make_graph(
        [node_proto(op, graph_name) for op in body.ops],
        body.graph.name or "body",
        [value_info(t) for t in body.inputs],
        [value_info(t) for t in body.outputs],
        value_info=[value_info(t) for op in body.ops for t in op.outputs if id(t) not in results],
    )


def onnx_dtype(dtype: DType) -> int:
    """The number that ONNX has for a dtype."""
    return int(helper.np_dtype_to_tensor_dtype(dtype.numpy))


def value_info(t: Tensor) -> onnx.ValueInfoProto:
    """Name, dtype and symbolic shape."""
    info = onnx.ValueInfoProto(name=t.name)
    tensor = info.type.tensor_type
    tensor.elem_type = onnx_dtype(t.dtype)
    tensor.shape.SetInParent()
    for d in t.shape:
        if isinstance(d, int):
            tensor.shape.dim.add(dim_value=d)
        else:
            tensor.shape.dim.add(dim_param=show(d))
    return info


def tensor_proto(name: str, constant: Constant) -> TensorProto:
    """An initializer, its data in `raw_data`."""
    return onnx.numpy_helper.from_array(constant.array, name)


def ir_version(opset: int) -> int:
    """The IR version that came with an opset, or the first that has metadata of nodes."""
    table = {row[2]: row[1] for row in reversed(helper.VERSION_TABLE)}
    return max(10, table.get(opset, 10))
