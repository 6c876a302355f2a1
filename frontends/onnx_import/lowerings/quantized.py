"""Quantisation: floats to few integers and back, and the operators that compute on those integers.

Rounding is piecewise constant, so no gradient passes: what stands behind is reported as having no path. With the load option `straight_through` it
passes as if nothing were rounded, and stops where the value was clipped: each integer tensor is remembered together with the real number that it was
rounded from, and what computes on the integer takes its value from the one and its derivative from the other.
"""

from __future__ import annotations

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.dims import ceildiv, is_one, simplest
from ....algebra.graph import Value
from ....algebra.types import DType, f32, i32, u8
from ..context import Unsupported, require_equal
from ..registry import Gradient, lowers
from ..straight_through import has_real, real_of, remember, straight_through, with_derivative
from ..tensors import dtype_of_onnx
from .convolution import conv
from .math import cast_to, matmul

__all__ = ["dequantized", "quantized"]

ROUNDED = "rounding is piecewise constant; straight_through=True (--straight-through) passes the gradient on"
Ints = tuple[int, ...]


# ---- there and back --------------------------------------------------------------------------------------------------------------------


def placed(v: Value, x: Value, axis: int, block: int = 0) -> Value:
    """A scale or zero point for every element of `x`: one for all, one per index of an axis, or one per block along it.

    What few runtimes can move, numbers of fewer than 8 bits and floats of 8, is widened first.
    """
    if v.dtype.bits < 8 or (v.dtype.floating and v.dtype.bits == 8):
        v = cast_to(v, f32 if v.dtype.floating else i32)
    if v.rank == 0 or (v.rank == 1 and is_one(v.shape[0])):
        return p.broadcast(p.reshape(v, shape=()) if v.rank else v, shape=x.shape, axes=())
    if not -x.rank <= axis < x.rank:
        raise Unsupported(f"axis {axis} is outside {x.type!r}")
    axis %= x.rank
    if v.rank == 1 and not block:
        require_equal(v.shape[0], x.shape[axis], "a scale for each index of the quantised axis")
        return p.broadcast(v, shape=x.shape, axes=(axis,))
    if v.rank != x.rank:
        raise Unsupported(f"a scale of {v.type!r} does not fit {x.type!r}")
    if not block:
        if not (isinstance(x.shape[axis], int) and isinstance(v.shape[axis], int)) or x.shape[axis] % v.shape[axis]:
            raise Unsupported(f"a scale of {v.type!r} for {x.type!r} needs block_size")
        block = x.shape[axis] // v.shape[axis]
    require_equal(v.shape[axis], ceildiv(x.shape[axis], block), "a scale for each block of the quantised axis")
    repeated = p.broadcast(
        v, shape=(*v.shape[: axis + 1], block, *v.shape[axis + 1 :]), axes=tuple(i for i in range(v.rank + 1) if i != axis + 1)
    )  # fmt: skip
    flat = c.flatten_axes(repeated, axis, axis + 2)
    if flat.shape[axis] != x.shape[axis]:
        limit = tuple(x.shape[i] if i == axis else d for i, d in enumerate(flat.shape))
        flat = p.slice(flat, start=(0,) * flat.rank, limit=limit)
    shape = [require_equal(a, b, "a scale for each block") for a, b in zip(flat.shape, x.shape, strict=True)]
    return flat if tuple(map(simplest, shape)) == flat.shape else p.reshape(flat, shape=x.shape)


def quantized(ratio: Value, zero: Value | None, dtype: DType, saturate: int = 1) -> Value:
    """`saturate(round(ratio) + zero)`, of the dtype; `zero` is placed already."""
    if not dtype.integral:
        number = ratio if zero is None else p.add(ratio, cast_to(cast_to(zero, f32), ratio.dtype))
        rounded = cast_to(number, dtype, saturate)
        return remember(rounded, number)
    wide = f32 if ratio.dtype.bits < 32 and dtype.bits >= 8 else ratio.dtype
    low, high = dtype.lowest, dtype.highest

    def sum_(x: Value) -> Value:
        x = p.cast(x, dtype=wide)
        return x if zero is None else p.add(x, p.cast(zero, dtype=wide))

    def clamped(x: Value) -> Value:
        return c.clamp(x, p.number(low, x), p.number(high, x))

    return remember(
        p.cast(clamped(sum_(p.round(ratio))), dtype=dtype), clamped(sum_(ratio)) if straight_through() else ratio
    )


def dequantized(x: Value, scale: Value, zero: Value | None, axis: int = 1, block: int = 0, dtype: DType | None = None) -> Value:  # fmt: skip
    """`(x - zero) * scale`."""
    dtype = dtype or scale.dtype
    factor = cast_to(placed(scale, x, axis, block), dtype)
    if not x.dtype.integral or has_real(x):
        value = with_derivative(cast_to(x, dtype), x)
        offset = None if zero is None else cast_to(placed(zero, x, axis, block), dtype)
        return p.mul(value if offset is None else c.sub(value, offset), factor)
    whole = p.cast(x, dtype=i32)
    if zero is not None:
        whole = c.sub(whole, p.cast(placed(zero, x, axis, block), dtype=i32))
    return p.mul(p.cast(whole, dtype=dtype), factor)


@lowers("QuantizeLinear", since=10, gradient=Gradient.PIECEWISE, reason=ROUNDED)
def quantize_linear(x: Value, y_scale: Value, y_zero_point: Value | None = None, *, axis: int = 1, block_size: int = 0,
                    output_dtype: int = 0, precision: int = 0, saturate: int = 1) -> Value:  # fmt: skip
    """saturate(round(x / y_scale) + y_zero_point)"""
    dtype = y_zero_point.dtype if y_zero_point is not None else dtype_of_onnx(output_dtype) if output_dtype else u8
    working = dtype_of_onnx(precision) if precision else y_scale.dtype
    if not working.floating or working.bits < 16:
        working = f32
    ratio = p.div(cast_to(x, working), placed(cast_to(y_scale, working), x, axis, block_size))
    zero = None if y_zero_point is None else placed(y_zero_point, x, axis, block_size)
    return quantized(ratio, zero, dtype, saturate)


@lowers("DequantizeLinear", since=10)
def dequantize_linear(x: Value, x_scale: Value, x_zero_point: Value | None = None, *, axis: int = 1, block_size: int = 0,
                      output_dtype: int = 0) -> Value:  # fmt: skip
    """(x - x_zero_point) * x_scale"""
    return dequantized(
        x, x_scale, x_zero_point, axis, block_size, dtype_of_onnx(output_dtype) if output_dtype else None
    )


@lowers("DynamicQuantizeLinear", since=11, gradient=Gradient.PIECEWISE, reason=ROUNDED)
def dynamic_quantize_linear(x: Value) -> tuple[Value, Value, Value]:
    """y, scale and zero point, with scale = (max(x, 0) - min(x, 0)) / 255 and zero = round(-min(x, 0) / scale)"""
    zero = p.full(0, x.dtype, ())
    axes = tuple(range(x.rank))
    high, low = p.max(p.reduce_max(x, axes=axes), zero), p.min(p.reduce_min(x, axes=axes), zero)
    extent = p.div(c.sub(high, low), p.full(255, x.dtype, ()))
    scale = p.select(p.equal(extent, zero), p.full(1, x.dtype, ()), extent)
    offset = p.round(c.clamp(p.neg(p.div(low, scale)), zero, p.full(255, x.dtype, ())))
    point = p.cast(offset, dtype=u8)
    return quantized(p.div(x, placed(scale, x, 0)), placed(point, x, 0), u8), scale, point


# ---- products of integers --------------------------------------------------------------------------------------------------------------


def _shifted(x: Value, zero: Value | None) -> Value:
    """`x - zero` in int32, the zero point placed already."""
    whole = p.cast(x, dtype=i32)
    return whole if zero is None else c.sub(whole, p.cast(zero, dtype=i32))


def _shifted_real(x: Value, zero: Value | None) -> Value:
    """`x - zero` in floats, with the derivative of what `x` was rounded from."""
    value = real_of(x, f32)
    return value if zero is None else c.sub(value, p.cast(zero, dtype=f32))


def _rows(zero: Value, a: Value) -> Value:
    """The zero point (or scale) of a left operand: one, or one per row."""
    if zero.rank <= 1:
        return placed(zero, a, a.rank - 2 if a.rank > 1 else 0)
    return p.broadcast(p.reshape(zero, shape=zero.shape[:-1]), shape=a.shape, axes=tuple(range(a.rank - 1)))


def _columns(zero: Value, b: Value) -> Value:
    """The zero point (or scale) of a right operand: one, or one per column."""
    if zero.rank <= 1:
        return placed(zero, b, b.rank - 1)
    kept = (*range(b.rank - 2), b.rank - 1)
    return p.broadcast(p.reshape(zero, shape=tuple(zero.shape[i] for i in kept)), shape=b.shape, axes=kept)


def integer_matmul(a: Value, b: Value, a_zero: Value | None, b_zero: Value | None) -> Value:
    """`(a - a_zero) @ (b - b_zero)` in int32."""
    za, zb = None if a_zero is None else _rows(a_zero, a), None if b_zero is None else _columns(b_zero, b)
    y: Value = matmul(_shifted(a, za), _shifted(b, zb))
    if has_real(a) or has_real(b):
        remember(y, matmul(_shifted_real(a, za), _shifted_real(b, zb)))
    return y


@lowers("MatMulInteger", since=10, gradient=Gradient.PIECEWISE, reason=ROUNDED)
def matmul_integer(a: Value, b: Value, a_zero_point: Value | None = None, b_zero_point: Value | None = None) -> Value:
    """(a - a_zero_point) @ (b - b_zero_point) in int32"""
    return integer_matmul(a, b, a_zero_point, b_zero_point)


def integer_conv(
    x: Value, w: Value, x_zero: Value | None, w_zero: Value | None, auto_pad: str, dilations: Ints | None, group: int,
    kernel_shape: Ints | None, pads: Ints | None, strides: Ints | None,
) -> Value:  # fmt: skip
    """The convolution of `x - x_zero` with `w - w_zero` in int32; what lies outside is 0 after the zero point is taken off."""
    zx, zw = None if x_zero is None else placed(x_zero, x, 1), None if w_zero is None else placed(w_zero, w, 0)

    def convolved(left: Value, right: Value) -> Value:
        result: Value = conv(
            left, right, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads, strides=strides
        )  # fmt: skip
        return result

    y = convolved(_shifted(x, zx), _shifted(w, zw))
    if has_real(x) or has_real(w):
        remember(y, convolved(_shifted_real(x, zx), _shifted_real(w, zw)))
    return y


@lowers("ConvInteger", since=10, gradient=Gradient.PIECEWISE, reason=ROUNDED)
def conv_integer(x: Value, w: Value, x_zero_point: Value | None = None, w_zero_point: Value | None = None, *, auto_pad: str = "NOTSET",
                 dilations: Ints | None = None, group: int = 1, kernel_shape: Ints | None = None, pads: Ints | None = None,
                 strides: Ints | None = None) -> Value:  # fmt: skip
    """conv(x - x_zero_point, w - w_zero_point) in int32"""
    return integer_conv(x, w, x_zero_point, w_zero_point, auto_pad, dilations, group, kernel_shape, pads, strides)


def _scaled_down(acc: Value, factor: Value, zero: Value, axis: int) -> Value:
    """An int32 sum times a factor, as the integers of the result."""
    ratio = p.mul(real_of(acc, factor.dtype), factor)
    return quantized(ratio, placed(zero, acc, axis), zero.dtype)


@lowers("QLinearMatMul", since=10, gradient=Gradient.PIECEWISE, reason=ROUNDED)
def qlinear_matmul(a: Value, a_scale: Value, a_zero_point: Value, b: Value, b_scale: Value, b_zero_point: Value, y_scale: Value,
                   y_zero_point: Value) -> Value:  # fmt: skip
    """round(a_scale * b_scale / y_scale * (a - a_zero_point) @ (b - b_zero_point)) + y_zero_point"""
    acc = integer_matmul(a, b, a_zero_point, b_zero_point)
    a_scale, b_scale, y_scale = (p.cast(s, dtype=f32) for s in (a_scale, b_scale, y_scale))
    left = _rows(a_scale, acc) if a.rank > 1 else placed(a_scale, acc, 0)
    right = _columns(b_scale, acc) if b.rank > 1 else placed(b_scale, acc, 0)
    below = _rows(y_scale, acc) if acc.rank > 1 else placed(y_scale, acc, 0)
    zero = _rows(y_zero_point, acc) if acc.rank > 1 else placed(y_zero_point, acc, 0)
    ratio = p.mul(real_of(acc, f32), p.div(p.mul(left, right), below))
    return quantized(ratio, zero, y_zero_point.dtype)


@lowers("QLinearConv", since=10, gradient=Gradient.PIECEWISE, reason=ROUNDED)
def qlinear_conv(x: Value, x_scale: Value, x_zero_point: Value, w: Value, w_scale: Value, w_zero_point: Value, y_scale: Value,
                 y_zero_point: Value, b: Value | None = None, *, auto_pad: str = "NOTSET", dilations: Ints | None = None,
                 group: int = 1, kernel_shape: Ints | None = None, pads: Ints | None = None, strides: Ints | None = None) -> Value:  # fmt: skip
    """round(x_scale * w_scale / y_scale * (conv(x - x_zero_point, w - w_zero_point) + b)) + y_zero_point"""
    acc = integer_conv(x, w, x_zero_point, w_zero_point, auto_pad, dilations, group, kernel_shape, pads, strides)
    if b is not None:
        summed = p.add(acc, p.broadcast(b, shape=acc.shape, axes=(1,)))
        if has_real(acc):
            remember(summed, p.add(real_of(acc, f32), p.cast(p.broadcast(b, shape=acc.shape, axes=(1,)), dtype=f32)))
        acc = summed
    factor = p.div(p.mul(placed(x_scale, acc, 1), placed(w_scale, acc, 1)), placed(y_scale, acc, 1))
    return _scaled_down(acc, factor, y_zero_point, 1)
