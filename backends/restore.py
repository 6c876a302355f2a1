"""Trained values put back into the inference model that they came from, node for node as it was."""

from __future__ import annotations

import base64
import copy
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor

from ..algebra.errors import PullbackError, Refusal

__all__ = ["EVALUATION", "OTHERWISE", "carried", "opened", "original_of", "packed", "restored", "unpacked", "written"]

Split = tuple[str, str, str, int]
"""A tensor that the reader took apart: its own name, the stored tensor's, the first output of the node that reads it, and where."""
_DATA = ("raw_data", "float_data", "double_data", "int32_data", "int64_data", "uint64_data")
LARGEST = 1_900_000_000


def opened(path: str | Path) -> ModelProto:
    """A model with its external data."""
    try:
        return onnx.load(path)
    except (OSError, ValueError) as error:
        raise PullbackError(f"cannot read {str(path)!r}: {error}") from error


def restored(
    model: ModelProto, values: Mapping[str, np.ndarray], *, split: Iterable[Split] = (), base: Path | None = None
) -> ModelProto:
    """A copy of the model with these values in place of its stored tensors of those names.

    Initializers, sparse ones, `Constant` nodes and the numbers in attributes are changed where they stand, in nested graphs and functions too, where a
    name is the path to it.
    """
    new = ModelProto()
    new.CopyFrom(model)
    left = dict(values)
    for own, stored, output, place in split:
        if own in left:
            _split_off(new.graph, own, stored, output, place)
    _in_graph(new.graph, "", left)
    for function in new.functions:
        _in_nodes(function.node, f"{function.name}/", left, by_suffix=True)
    if left:
        raise Refusal("trained tensors that the model does not hold", [f"no stored tensor {name!r}" for name in left])
    _load_rest(new.graph, base)
    return new


def written(model: ModelProto, path: str | Path) -> Path:
    """Write a model under a temporary name and move it into place; one of over 2 GB keeps its weights beside it."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        if model.ByteSize() > LARGEST:
            beside = f"{target.name}.data"
            onnx.save_model(model, temporary, save_as_external_data=True, all_tensors_to_one_file=True, location=beside)
        else:
            onnx.save(model, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _split_off(graph: GraphProto, own: str, stored: str, output: str, place: int) -> None:
    """Give one operand of one node a stored tensor of its own."""
    source = next((t for t in graph.initializer if t.name == stored), None)
    if source is None:
        source = next(
            (
                a.t
                for n in graph.node
                if n.op_type == "Constant" and n.output[0] == stored
                for a in n.attribute
                if a.name == "value"
            ),
            None,
        )
    node = next((n for n in graph.node if n.output and n.output[0] == output), None)
    if source is None or node is None:
        return
    mine = copy.deepcopy(source)
    mine.name = own
    graph.initializer.append(mine)
    node.input[place] = own


def _in_graph(graph: GraphProto, prefix: str, left: dict[str, np.ndarray]) -> None:
    for tensor in graph.initializer:
        if (found := _take(left, prefix, tensor.name)) is not None:
            _replace(tensor, found)
    dense = [s for s in graph.sparse_initializer if prefix + s.values.name in left]
    for sparse in dense:
        graph.initializer.append(numpy_helper.from_array(left.pop(prefix + sparse.values.name), sparse.values.name))
        graph.sparse_initializer.remove(sparse)
    _in_nodes(graph.node, prefix, left)


def _take(left: dict[str, np.ndarray], prefix: str, name: str, by_suffix: bool = False) -> np.ndarray | None:
    if prefix + name in left:
        return left.pop(prefix + name)
    if by_suffix:
        hits = [full for full in left if full == name or full.endswith((f"/{name}", f"_{name}"))]
        if len(hits) == 1:
            return left.pop(hits[0])
    return None


def _in_nodes(nodes: Sequence[NodeProto], prefix: str, left: dict[str, np.ndarray], by_suffix: bool = False) -> None:
    for node in nodes:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            if (found := _take(left, prefix, node.output[0], by_suffix)) is not None:
                _replace_constant(node, found)
            continue
        name = node.name or next(iter(filter(None, node.output)), node.op_type)
        for attribute in node.attribute:
            if attribute.type in (AttributeProto.FLOATS, AttributeProto.TENSOR):
                if (found := _take(left, prefix, f"{name}/{attribute.name}")) is not None:
                    _replace_attribute(attribute, found)
                continue
            graphs = {AttributeProto.GRAPH: [attribute.g], AttributeProto.GRAPHS: list(attribute.graphs)}.get(
                attribute.type, []
            )
            for graph in graphs:
                for path in _paths(node, attribute):
                    _in_graph(graph, f"{prefix}{path}/", left)


def _paths(node: NodeProto, attribute: AttributeProto) -> Iterator[str]:
    """The paths under which a nested graph's tensors may be known."""
    name = node.name or next(iter(filter(None, node.output)), node.op_type)
    yield f"{name}/{attribute.name}"
    yield f"{name}.{attribute.name}"
    yield name


def _replace_constant(node: NodeProto, value: np.ndarray) -> None:
    (attribute,) = node.attribute
    if attribute.name == "value":
        _replace(attribute.t, value)
        return
    del node.attribute[:]
    node.attribute.append(onnx.helper.make_attribute("value", numpy_helper.from_array(value)))


def _replace_attribute(attribute: AttributeProto, value: np.ndarray) -> None:
    """The numbers of an attribute (the leaves of trees, say) replaced."""
    if attribute.type == AttributeProto.TENSOR:
        _replace(attribute.t, value)
        return
    if (len(attribute.floats),) != value.shape:
        raise PullbackError(f"{attribute.name!r} has {len(attribute.floats)} numbers, the trained value {value.size}")
    attribute.floats[:] = value.tolist()


def _replace(tensor: TensorProto, value: np.ndarray) -> None:
    """The tensor's data replaced, all else of it kept."""
    if tuple(tensor.dims) != value.shape:
        raise PullbackError(f"{tensor.name!r} has shape {list(tensor.dims)}, the trained value {list(value.shape)}")
    fresh = numpy_helper.from_array(np.ascontiguousarray(value))
    if fresh.data_type != tensor.data_type:
        wanted, found = (TensorProto.DataType.Name(t.data_type) for t in (tensor, fresh))
        raise PullbackError(f"{tensor.name!r} is {wanted}, the trained value {found}")
    for name in (*_DATA, "external_data", "data_location"):
        tensor.ClearField(name)
    tensor.raw_data = fresh.raw_data


def _load_rest(graph: GraphProto, base: Path | None) -> None:
    """Bring external data in, so that the written model is whole wherever it goes."""
    for tensor in _tensors(graph):
        if tensor.data_location == TensorProto.EXTERNAL and not _stubbed(tensor):
            if base is None:
                raise PullbackError(f"tensor {tensor.name!r} lies in external data, but the model's folder is unknown")
            load_external_data_for_tensor(tensor, str(base))
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]


def _tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield sparse.values
        yield sparse.indices
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            elif attribute.type == AttributeProto.GRAPH:
                yield from _tensors(attribute.g)


# ---- the original inside a training step ----------------------------------------------------------------------

MODEL, SPLIT, EVALUATION = "pullback.model", "pullback.split", "pullback.evaluation"
OTHERWISE = (
    "batch_norms",
    "dropout",
)  # what the signature's `training` holds where a step computes otherwise than inference
STUB = "pullback.tensor"
LARGEST_CARRIED = 64 << 20


def carried(
    model: ModelProto, held: Collection[str], *, split: Iterable[Split] = (), base: Path | None = None
) -> dict[str, str]:
    """Metadata that holds the original model, without the tensors that the training file holds under their names (`held`).

    Nothing where more than 64 MB would be left: then the original must be given when trained weights are to go back into it.
    """
    light = ModelProto()
    for field in ("ir_version", "producer_name", "producer_version", "domain", "model_version", "doc_string"):
        if model.HasField(field):
            setattr(light, field, getattr(model, field))
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    light.metadata_props.extend(model.metadata_props)
    graph = light.graph
    for name in ("name", "doc_string"):
        if model.graph.HasField(name):
            setattr(graph, name, getattr(model.graph, name))
    for repeated in (
        "input",
        "output",
        "value_info",
        "quantization_annotation",
        "metadata_props",
        "sparse_initializer",
    ):
        getattr(graph, repeated).extend(getattr(model.graph, repeated))
    graph.initializer.extend(_stub(t, t.name) if t.name in held else t for t in model.graph.initializer)
    for node in model.graph.node:
        if node.op_type == "Constant" and node.output[0] in held and node.attribute[0].name == "value":
            copied = NodeProto(op_type="Constant")
            for text in ("name", "domain", "doc_string"):
                if node.HasField(text):
                    setattr(copied, text, getattr(node, text))
            copied.output.extend(node.output)
            attribute = copied.attribute.add(name="value", type=AttributeProto.TENSOR)
            attribute.t.CopyFrom(_stub(node.attribute[0].t, node.output[0]))
            copied.metadata_props.extend(node.metadata_props)
            graph.node.append(copied)
        else:
            graph.node.append(node)
    _load_rest(graph, base)
    records = [list(s) for s in split]
    props = packed(MODEL, light)
    return {**props, SPLIT: json.dumps(records)} if props and records else props


def packed(key: str, model: ModelProto) -> dict[str, str]:
    """A model as text under a metadata key; nothing where it is larger than 64 MB."""
    if model.ByteSize() > LARGEST_CARRIED:
        return {}
    return {key: base64.b85encode(zlib.compress(model.SerializeToString())).decode("ascii")}


def unpacked(model: ModelProto, key: str) -> ModelProto | None:
    """The model that another one carries under a metadata key."""
    text = next((prop.value for prop in model.metadata_props if prop.key == key), None)
    if text is None:
        return None
    inner = ModelProto()
    inner.ParseFromString(zlib.decompress(base64.b85decode(text)))
    return inner


def _stub(tensor: TensorProto, name: str) -> TensorProto:
    """The tensor without its data, with the name under which the step holds it."""
    stub = TensorProto(data_type=tensor.data_type, dims=tensor.dims)
    for text in ("name", "doc_string"):
        if tensor.HasField(text):
            setattr(stub, text, getattr(tensor, text))
    stub.metadata_props.extend(tensor.metadata_props)
    stub.external_data.add(key=STUB, value=name)
    return stub


def _stubbed(tensor: TensorProto) -> str | None:
    return next((e.value for e in tensor.external_data if e.key == STUB), None)


def original_of(
    model: ModelProto, value: Callable[[str], np.ndarray | None]
) -> tuple[ModelProto, list[Split], None] | None:
    """The original model that a training step carries, its tensors taken from the step; None where it carries none."""
    props = {prop.key: prop.value for prop in model.metadata_props}
    original = unpacked(model, MODEL)
    if original is None:
        return None
    for tensor in _tensors(original.graph):
        if (name := _stubbed(tensor)) is not None:
            found = value(name)
            if found is None:
                raise PullbackError(f"the training step lacks the original model's tensor {name!r}")
            _replace(tensor, np.asarray(found).reshape(tuple(tensor.dims)))
    return original, [(a, b, c, int(d)) for a, b, c, d in json.loads(props.get(SPLIT, "[]"))], None
