"""Trained values put back into the inference model that they came from, node for node as it was."""

from __future__ import annotations

import base64
import copy
import json
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from google.protobuf.message import EncodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_tensor

from ..algebra.copies import copies
from ..algebra.errors import PullbackError, Refusal
from ..algebra.graph import Constant
from .place import moved

__all__ = [
    "EVALUATION",
    "OTHERWISE",
    "WEIGHT",
    "array_of",
    "carried",
    "larger",
    "opened",
    "original_of",
    "packed",
    "restored",
    "splits_of",
    "unpacked",
    "written",
]

Split = tuple[str, str, str, int]
"""A tensor that the reader took apart: its own name, the stored tensor's, the first output of the node that reads it, and where."""
_DATA = ("raw_data", "float_data", "double_data", "int32_data", "int64_data", "uint64_data")
LARGEST = 1_900_000_000
BESIDE_FROM = 1024  # elements: what shape inference reads stays in the model
PAGE = 4096  # tensors in a file of their own start on a page, so that they can be mapped


def opened(path: str | Path) -> ModelProto:
    """A model with its external data, but for that of initializers that are inputs, which `array_of` reads where it lies."""
    try:
        model = onnx.load(path, load_external_data=False)
        inputs = {i.name for i in model.graph.input}
        _load_rest(model.graph, Path(path).parent, but=inputs)
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise PullbackError(f"cannot read {str(path)!r}: {error}") from error
    return model


def array_of(tensor: TensorProto, base: Path) -> np.ndarray:
    """The numbers of a tensor; those in another file are mapped, not read."""
    if tensor.data_location != TensorProto.EXTERNAL or not all(tensor.dims):
        return np.asarray(numpy_helper.to_array(tensor, str(base)))
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    info = ExternalDataInfo(tensor)
    size = int(np.prod(tensor.dims)) * dtype.itemsize
    if dtype.name in ("int4", "uint4", "int2", "uint2", "float4_e2m1fn") or info.length not in (None, size):
        return np.asarray(numpy_helper.to_array(tensor, str(base)))
    return np.memmap(base / info.location, dtype, "r", info.offset or 0, tuple(tensor.dims))


def restored(
    model: ModelProto,
    values: Mapping[str, np.ndarray],
    *,
    split: Iterable[Split] = (),
    base: Path | None = None,
    fresh: bool = False,
) -> ModelProto:
    """A copy of the model with these values in place of its stored tensors of those names; the model itself where it is `fresh`.

    Initializers, sparse ones, `Constant` nodes and the numbers in attributes are changed where they stand, in nested graphs and functions too, where a
    name is the path to it.
    """
    new = model
    if not fresh:
        new = ModelProto()
        new.CopyFrom(model)
    left = {**_copies(new, values), **values}
    _split_off(new.graph, [s for s in split if s[0] in left])
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
    with ExitStack() as stack:
        if larger(model, LARGEST):
            beside = target.with_name(f"{target.name}.data")
            file = stack.enter_context(moved(beside))
            for tensor in _tensors(model.graph):
                _put_beside(tensor, file, beside.name)
        stack.enter_context(moved(target)).write(model.SerializeToString())
    return target


def larger(model: ModelProto, limit: int) -> bool:
    """Whether a model takes more bytes than the limit. Protobuf copies a model to count it, and cannot count one of over 2 GB."""
    try:
        return sum(map(_nbytes, _tensors(model.graph))) > limit or bool(model.ByteSize() > limit)
    except EncodeError:
        return True


def _nbytes(tensor: TensorProto) -> int:
    """Bytes of a tensor's numbers in the model."""
    if tensor.external_data or tensor.data_type in (TensorProto.STRING, TensorProto.UNDEFINED):
        return 0
    return math.prod(tensor.dims) * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _put_beside(tensor: TensorProto, file: BinaryIO, location: str) -> None:
    """Move a tensor's data to another file, unless it is small."""
    if np.prod(tensor.dims) < BESIDE_FROM or tensor.data_type == TensorProto.STRING:
        return
    data = tensor.raw_data or numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
    for name in _DATA:
        tensor.ClearField(name)
    file.write(bytes(-file.tell() % PAGE))
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(file.tell())), ("length", str(len(data)))):
        tensor.external_data.add(key=key, value=value)
    file.write(data)


def _copies(model: ModelProto, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The new values of stored matrices that are an exporter's copies of these."""
    stored = {
        t.name: Constant(
            load=partial(numpy_helper.to_array, t),
            shape=tuple(t.dims),
            dtype=np.dtype(helper.tensor_dtype_to_np_dtype(t.data_type)),
        )
        for t in model.graph.initializer
        if len(t.dims) == 2 and (t.raw_data or t.float_data or t.double_data)
    }
    found = copies(stored)
    return {
        copy: values[source].T if turned else values[source]
        for copy, (source, turned) in found.items()
        if source in values
    }


def _split_off(graph: GraphProto, splits: Iterable[Split]) -> None:
    """Give operands of nodes stored tensors of their own; a node that only gave one a name makes way for it."""
    stored = {t.name: t for t in graph.initializer}
    nodes = {n.output[0]: n for n in graph.node if n.output}
    for name, node in nodes.items():
        if node.op_type == "Constant":
            stored.update((name, a.t) for a in node.attribute if a.name == "value")
    renamed = set()
    for own, name, output, place in splits:
        if name not in stored or output not in nodes:
            continue
        if own not in stored:
            mine = copy.deepcopy(stored[name])
            mine.name = own
            graph.initializer.append(mine)
            stored[own] = mine
        if own == output:
            renamed.add(own)
        else:
            nodes[output].input[place] = own
    if renamed:
        kept = [n for n in graph.node if renamed.isdisjoint(n.output)]
        del graph.node[:]
        graph.node.extend(kept)


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


def _load_rest(graph: GraphProto, base: Path | None, but: Collection[str] = ()) -> None:
    """Bring external data in, so that the written model is whole wherever it goes."""
    for tensor in _tensors(graph):
        if tensor.data_location == TensorProto.EXTERNAL and not _stubbed(tensor) and tensor.name not in but:
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

MODEL, SPLIT, EVALUATION, WEIGHT = "pullback.model", "pullback.split", "pullback.evaluation", "pullback.weight"
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

    No model where more than 64 MB would be left: then the original must be given when trained weights are to go back into it.
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
    return {**props, SPLIT: json.dumps(records)} if records else props


def splits_of(model: ModelProto) -> list[Split]:
    """The tensors of the original model that the reader of a training step took apart."""
    text = next((prop.value for prop in model.metadata_props if prop.key == SPLIT), "[]")
    return [(a, b, c, int(d)) for a, b, c, d in json.loads(text)]


def packed(key: str, model: ModelProto) -> dict[str, str]:
    """A model as text under a metadata key; nothing where it is larger than 64 MB."""
    if larger(model, LARGEST_CARRIED):
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
    model: ModelProto, value: Callable[[str], np.ndarray | None], but: Collection[str] = ()
) -> tuple[ModelProto, None] | None:
    """The original model that a training step carries, its tensors taken from the step, `but` those; None where it carries none."""
    original = unpacked(model, MODEL)
    if original is None:
        return None
    for tensor in _tensors(original.graph):
        if (name := _stubbed(tensor)) is not None and name not in but:
            found = value(name)
            if found is None:
                raise PullbackError(f"the training step lacks the original model's tensor {name!r}")
            _replace(tensor, np.asarray(found).reshape(tuple(tensor.dims)))
    return original, None
