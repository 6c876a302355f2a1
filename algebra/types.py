"""Types of nodes: a dtype and a symbolic shape, or a tuple of those for a node with several results."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from .dims import Shape, show, simplest

__all__ = [
    "DTYPES", "DType", "TensorType", "TupleType", "bf16", "bool_", "dtype_of", "f16", "f32", "f64", "i4", "i8", "i16", "i32", "i64",
    "tensor", "u4", "u8", "u16", "u32", "u64", "widened",
]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """An element type: its short name, its numpy dtype (from ml_dtypes where numpy has none), its kind and its bits.

    `kind` is `f` (floating), `i` (signed), `u` (unsigned) or `b` (bool). One instance per dtype, so `is` compares.
    """

    name: str
    numpy: np.dtype
    kind: str
    bits: int

    def __repr__(self) -> str:
        return self.name

    @property
    def floating(self) -> bool:
        return self.kind == "f"

    @property
    def integral(self) -> bool:
        return self.kind in "iu"

    @property
    def lowest(self) -> float:
        """What no number of the dtype is below: -infinity of a floating dtype, the least integer of another."""
        if self.floating:
            return -math.inf
        return -(2 ** (self.bits - 1)) if self.kind == "i" else 0

    @property
    def highest(self) -> float:
        """What no number of the dtype is above."""
        if self.floating:
            return math.inf
        return 2 ** (self.bits - (self.kind == "i")) - 1


f64 = DType("f64", np.dtype(np.float64), "f", 64)
f32 = DType("f32", np.dtype(np.float32), "f", 32)
f16 = DType("f16", np.dtype(np.float16), "f", 16)
bf16 = DType("bf16", np.dtype(ml_dtypes.bfloat16), "f", 16)
i64 = DType("i64", np.dtype(np.int64), "i", 64)
i32 = DType("i32", np.dtype(np.int32), "i", 32)
i16 = DType("i16", np.dtype(np.int16), "i", 16)
i8 = DType("i8", np.dtype(np.int8), "i", 8)
i4 = DType("i4", np.dtype(ml_dtypes.int4), "i", 4)
u64 = DType("u64", np.dtype(np.uint64), "u", 64)
u32 = DType("u32", np.dtype(np.uint32), "u", 32)
u16 = DType("u16", np.dtype(np.uint16), "u", 16)
u8 = DType("u8", np.dtype(np.uint8), "u", 8)
u4 = DType("u4", np.dtype(ml_dtypes.uint4), "u", 4)
bool_ = DType("bool", np.dtype(np.bool_), "b", 8)
f8e4m3fn = DType("f8e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn), "f", 8)
f8e4m3fnuz = DType("f8e4m3fnuz", np.dtype(ml_dtypes.float8_e4m3fnuz), "f", 8)
f8e5m2 = DType("f8e5m2", np.dtype(ml_dtypes.float8_e5m2), "f", 8)
f8e5m2fnuz = DType("f8e5m2fnuz", np.dtype(ml_dtypes.float8_e5m2fnuz), "f", 8)
f8e8m0 = DType("f8e8m0", np.dtype(ml_dtypes.float8_e8m0fnu), "f", 8)
f4e2m1 = DType("f4e2m1", np.dtype(ml_dtypes.float4_e2m1fn), "f", 4)
i2 = DType("i2", np.dtype(ml_dtypes.int2), "i", 2)
u2 = DType("u2", np.dtype(ml_dtypes.uint2), "u", 2)

DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        f64, f32, f16, bf16, i64, i32, i16, i8, i4, i2, u64, u32, u16, u8, u4, u2, bool_,
        f8e4m3fn, f8e4m3fnuz, f8e5m2, f8e5m2fnuz, f8e8m0, f4e2m1,
    )
}  # fmt: skip
_BY_NUMPY = {d.numpy: d for d in DTYPES.values()}


def dtype_of(numpy_dtype: np.dtype | type) -> DType:
    """The dtype of a numpy dtype; `KeyError` for strings, objects and complex numbers."""
    return _BY_NUMPY[np.dtype(numpy_dtype)]


def widened(x: np.ndarray) -> np.ndarray:
    """`x` in the dtype that it is computed in: float32 for floats of up to 16 bits, int64 for integers of 2 and 4 bits, otherwise its own.

    Back in its own dtype a float is rounded once, and an integer loses its upper bits, as those that numpy has itself do. Dims (an array of
    objects) stay as they are.
    """
    dtype = _BY_NUMPY.get(x.dtype)
    if dtype is None:
        return x
    if dtype.floating and dtype.bits <= 16:
        return x.astype(np.float32)
    return x.astype(np.int64) if dtype.integral and dtype.bits < 8 else x


@dataclass(frozen=True, slots=True)
class TensorType:
    """`f32[N, 4]`: dtype and shape."""

    dtype: DType
    shape: Shape

    def __repr__(self) -> str:
        return f"{self.dtype.name}[{', '.join(map(show, self.shape))}]"

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class TupleType:
    """The type of a node with several results; `item` takes one."""

    items: tuple[TensorType, ...]

    def __repr__(self) -> str:
        return f"({', '.join(map(repr, self.items))})"


Type = TensorType | TupleType


def tensor(dtype: DType, shape: Iterable[object] = ()) -> TensorType:
    """The type with these dims, each made an int where it is one.

    >>> from pullback.algebra.dims import dim
    >>> tensor(f32, (dim("N"), 4))
    f32[N, 4]
    """
    return TensorType(dtype, tuple(simplest(d) for d in shape))
