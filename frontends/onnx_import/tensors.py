"""Tensors stored in a model: inline, sparse or external, read when first needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ...algebra.errors import PullbackError
from ...algebra.graph import Constant
from ...algebra.types import DType, TensorType, dtype_of

__all__ = ["constant_of", "dtype_of_onnx", "external_problems", "sparse_constant"]

EAGER = 4096  # bytes: small tensors are read at once, so that equal ones are one node


def dtype_of_onnx(code: int) -> DType:
    """The dtype of an ONNX element type; raise for strings and complex numbers."""
    try:
        return dtype_of(onnx.helper.tensor_dtype_to_np_dtype(code))
    except KeyError:
        if code not in TensorProto.DataType.values():
            raise PullbackError(f"{code} is no element type of ONNX") from None
        name = TensorProto.DataType.Name(code).lower()
        raise PullbackError(f"tensors of {name} are outside numerical graphs") from None


def external_problems(tensor: TensorProto, base: Path | None) -> str | None:
    """Why the tensor's external data cannot be read, or None. A location must stay inside the model's folder (ONNX, external data)."""
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    if base is None:
        return f"tensor {tensor.name!r}: external data {location!r}, but the model was not read from a file"
    path = base / location
    if not location or Path(location).is_absolute() or not path.resolve().is_relative_to(base.resolve()):
        return f"tensor {tensor.name!r}: external data {location!r} leaves the model's folder"
    if not path.is_file():
        return f"tensor {tensor.name!r}: external data {location!r} does not exist"
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", 0))
    except ValueError:
        return f"tensor {tensor.name!r}: offset or length of its external data is no number"
    need = offset + (length or _bytes(tensor))
    if offset < 0 or length < 0 or need > path.stat().st_size:
        return (
            f"tensor {tensor.name!r}: external data {location!r} ends at {path.stat().st_size} bytes, {need} are needed"
        )
    return None


def _bytes(tensor: TensorProto) -> int:
    bits = dtype_of_onnx(tensor.data_type).bits
    return (int(np.prod(tensor.dims, dtype=np.int64)) * bits + 7) // 8


def constant_of(tensor: TensorProto, base: Path | None) -> Constant:
    """The tensor as a constant that is read when first needed; external data is memory-mapped."""
    dtype, shape = dtype_of_onnx(tensor.data_type), tuple(tensor.dims)
    if tensor.data_location == TensorProto.EXTERNAL:
        return Constant(load=lambda: _external(tensor, base, dtype, shape), shape=shape, dtype=dtype.numpy)
    if _bytes(tensor) <= EAGER:
        return Constant(_array(tensor))
    return Constant(load=lambda: _array(tensor), shape=shape, dtype=dtype.numpy)


def _array(tensor: TensorProto) -> np.ndarray:
    try:
        return np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError) as error:
        raise PullbackError(f"tensor {tensor.name!r} does not hold {list(tensor.dims)} elements: {error}") from error


def _external(tensor: TensorProto, base: Path | None, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    assert base is not None
    entries = {e.key: e.value for e in tensor.external_data}
    offset, length = int(entries.get("offset", 0)), _bytes(tensor)
    path = base / entries["location"]
    if dtype.bits < 8:
        with open(path, "rb") as file:
            file.seek(offset)
            inline = TensorProto(
                data_type=tensor.data_type, dims=tensor.dims, raw_data=file.read(length), name=tensor.name
            )
        return _array(inline)
    if length == 0:
        return np.zeros(shape, dtype.numpy)
    little = np.memmap(path, np.uint8, "r", offset, (length,)).view(dtype.numpy)
    return little.reshape(shape)


def sparse_constant(sparse: onnx.SparseTensorProto, base: Path | None) -> Constant:
    """A sparse tensor (COO, linear or one index row per element) as a dense constant."""
    values = constant_of(sparse.values, base).array
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    indices = constant_of(sparse.indices, base).array
    if indices.ndim == 2:
        dense[tuple(indices.T)] = values
    else:
        dense.reshape(-1)[indices] = values
    return Constant(dense)


def type_of(constant: Constant) -> TensorType:
    return TensorType(dtype_of(constant.dtype), constant.shape)
