"""Writing models to disk, weights streamed one after the other.

The model without its weights is checked and serialized; each weight follows as a chunk of its own, for in protobuf's wire format a message that is
repeated is merged, and a repeated field is appended to. So a weight is never copied, and no second model stands in memory. Everything is
written beside its place under another name and moved there at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import TensorProto

from ...algebra.errors import Refusal
from ...algebra.graph import Constant, Graph
from ...algebra.types import dtype_of
from ..place import moved
from .emit import Emitted, emit, onnx_dtype, tensor_proto

__all__ = ["EXTERNAL_FROM", "save", "verify_model", "write_safetensors"]

EXTERNAL_FROM = 1_900_000_000  # bytes of weights that no longer go into one file: protobuf ends at 2 GB
_ALIGNED = 4096  # weights in a file of their own start on a page, so that they can be mapped
_SMALL = 1024  # bytes: what shape inference reads must be in the model that is checked
_MODEL_GRAPH, _GRAPH_INITIALIZER, _TENSOR_RAW = 0x3A, 0x2A, 0x4A  # tags: field number and wire type
_SAFETENSORS = {
    "f64": "F64", "f32": "F32", "f16": "F16", "bf16": "BF16", "i64": "I64", "i32": "I32", "i16": "I16", "i8": "I8", "u64": "U64", "u32": "U32",
    "u16": "U16", "u8": "U8", "bool": "BOOL", "f8e4m3fn": "F8_E4M3", "f8e5m2": "F8_E5M2",
}  # fmt: skip


def save(graph: Graph, path: str | os.PathLike[str], *, profile: str = "explicit", target: str = "onnxruntime", embed: str | None = None,
         opset: int | None = None, external: bool | None = None) -> tuple[Path, ...]:  # fmt: skip
    """Write the graph as an ONNX model; return the files written.

    Initial values that do not stand in the model (see `to_onnx`) go to `x.safetensors` beside `x.onnx`. Weights go to `x.onnx.data` where `external`
    says so, or where they take more than 1.9 GB. On failure nothing is left.
    """
    emitted = emit(graph, profile=profile, target=target, embed=embed, opset=opset)
    return write(emitted, path, external=external)


def write(emitted: Emitted, path: str | os.PathLike[str], *, external: bool | None = None) -> tuple[Path, ...]:
    """Write an emitted model and its weights."""
    place = Path(path)
    _refuse(emitted, place)
    large = {}
    for name, constant in emitted.initializers.items():
        if _nbytes(constant) <= _SMALL:
            emitted.model.graph.initializer.append(tensor_proto(name, constant))
        else:
            large[name] = constant
    verify_model(emitted.model, large)
    if external is None:
        external = sum(map(_nbytes, large.values())) >= EXTERNAL_FROM
    with ExitStack() as stack:
        written = []
        if emitted.beside:
            beside = place.with_suffix(".safetensors")
            write_safetensors(stack.enter_context(moved(beside)), emitted.beside)
            written.append(beside)
        if external and large:
            data = place.with_name(f"{place.name}.data")
            file = stack.enter_context(moved(data))
            for name, constant in large.items():
                emitted.model.graph.initializer.append(_stored(file, data.name, name, constant))
            written.append(data)
            large = {}
        model = stack.enter_context(moved(place))
        model.write(emitted.model.SerializeToString())
        for name, constant in large.items():
            _append(model, name, constant)
        written.append(place)
    return tuple(reversed(written))


def _refuse(emitted: Emitted, place: Path) -> None:
    reasons = [
        f"{name!r} is {constant.dtype}, which safetensors cannot hold"
        for name, constant in emitted.beside.items()
        if dtype_of(constant.dtype).name not in _SAFETENSORS
    ]
    if not place.parent.is_dir():
        reasons.append(f"there is no directory {str(place.parent)!r}")
    if place.is_dir():
        reasons.append(f"{str(place)!r} is a directory")
    if reasons:
        raise Refusal(f"cannot write {place.name!r}", reasons)


def verify_model(model: onnx.ModelProto, apart: Mapping[str, Constant] | None = None) -> None:
    """ONNX's full check and strict shape inference of a model; initializers that are kept `apart` enter as inputs."""
    checked = model
    entered = {v.name for v in model.graph.input}
    missing = {name: c for name, c in (apart or {}).items() if name not in entered}
    if missing:
        checked = onnx.ModelProto()
        checked.CopyFrom(model)
        for name, constant in missing.items():
            number = onnx_dtype(dtype_of(constant.dtype))
            checked.graph.input.append(onnx.helper.make_tensor_value_info(name, number, constant.shape))
    onnx.checker.check_model(checked, full_check=True)
    onnx.shape_inference.infer_shapes(checked, strict_mode=True, data_prop=True)


# ---- weights ---------------------------------------------------------------------------------------------------------------------------


def _nbytes(constant: Constant) -> int:
    return (constant.size * dtype_of(constant.dtype).bits + 7) // 8


def _bytes(constant: Constant) -> memoryview | bytes:
    """The elements in row-major order, not copied where they lie so."""
    if dtype_of(constant.dtype).bits < 8:  # packed
        return bytes(onnx.numpy_helper.from_array(constant.array).raw_data)
    return np.ascontiguousarray(constant.array).reshape(-1).view(np.uint8).data


def _header(name: str, constant: Constant) -> TensorProto:
    return TensorProto(name=name, data_type=onnx_dtype(dtype_of(constant.dtype)), dims=constant.shape)


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def _append(file: BinaryIO, name: str, constant: Constant) -> None:
    """One more initializer at the end of a serialized model."""
    data = _bytes(constant)
    tensor = _header(name, constant).SerializeToString() + bytes([_TENSOR_RAW]) + _varint(len(data))
    initializer = bytes([_GRAPH_INITIALIZER]) + _varint(len(tensor) + len(data)) + tensor
    file.write(bytes([_MODEL_GRAPH]) + _varint(len(initializer) + len(data)) + initializer)
    file.write(data)


def _stored(file: BinaryIO, location: str, name: str, constant: Constant) -> TensorProto:
    """An initializer whose data is appended to another file."""
    file.write(bytes(-file.tell() % _ALIGNED))
    tensor = _header(name, constant)
    tensor.data_location = TensorProto.EXTERNAL
    data = _bytes(constant)
    for key, value in (("location", location), ("offset", str(file.tell())), ("length", str(len(data)))):
        tensor.external_data.add(key=key, value=value)
    file.write(data)
    return tensor


def write_safetensors(file: BinaryIO, arrays: Mapping[str, Constant]) -> None:
    """The format of safetensors: the length of a JSON header, the header, then the tensors."""
    header: dict[str, object] = {}
    end = 0
    for name, constant in arrays.items():
        start, end = end, end + _nbytes(constant)
        kind = _SAFETENSORS[dtype_of(constant.dtype).name]
        header[name] = {"dtype": kind, "shape": list(constant.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for constant in arrays.values():
        file.write(_bytes(constant))
