"""Normalisations.

The statistics are straight formulas, so that their cotangents are exact; sums of 16-bit floats follow `stash_type`, or float32 where ONNX names none.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.graph import Value
from ....algebra.training.modes import BatchNorm
from ....algebra.types import DType, f32, f64
from ..broadcasting import broadcast_to
from ..context import Node, Unsupported, reading, require_divides, require_equal
from ..registry import lowers
from ..tensors import dtype_of_onnx
from .activation import axis_of, tensor_name


def per_channel(v: Value, x: Value, axis: int = 1) -> Value:
    """A vector repeated along all axes of x but `axis`."""
    require_equal(v.shape[0], x.shape[axis], "one entry per channel")
    return p.broadcast(v, shape=x.shape, axes=(axis,))


def inverse_deviation(variance: Value, epsilon: float) -> Value:
    """`1 / sqrt(variance + epsilon)`."""
    return c.reciprocal(p.sqrt(c.plus(variance, epsilon)))


def standardized(x: Value, axes: Sequence[int], epsilon: float) -> tuple[Value, Value, Value]:
    """`(x - mean) / sqrt(variance + epsilon)` over axes, the mean, and `1 / sqrt(variance + epsilon)`."""
    mean, centred, variance = c.variance(x, axes)
    inverse = inverse_deviation(variance, epsilon)
    return p.mul(centred, c.along(inverse, x.shape, axes)), mean, inverse


def working_dtype(dtype: DType, stash_type: int = 1) -> DType:
    """The dtype that statistics are computed in: that of `stash_type`, but a double stays one."""
    return f64 if dtype is f64 else dtype_of_onnx(stash_type)


def keeping_ones(value: Value, rank: int) -> Value:
    """The result of a reduction over trailing axes, with those axes of size 1."""
    return p.reshape(value, shape=(*value.shape, *(1,) * (rank - value.rank)))


# ---- batch normalisation ---------------------------------------------------------------------------------------------------------------


def common_dtype(*xs: Value) -> DType:
    """The widest dtype of the operands; float32 where float16 and bfloat16 meet."""
    kinds = {x.dtype for x in xs}
    if len(kinds) == 1:
        return kinds.pop()
    return f64 if f64 in kinds else f32


def normalized_by(x: Value, scale: Value, bias: Value, mean: Value, var: Value, epsilon: float, axis: int = 1) -> Value:
    """`(x - mean) scale / sqrt(var + epsilon) + bias`, the factor computed once per channel."""
    wide = common_dtype(x, scale, bias, mean, var)
    for v in (scale, bias, mean, var):
        require_equal(v.shape[0], x.shape[axis], "one entry per channel")
    x, dtype = p.cast(x, dtype=wide), x.dtype
    scale, bias, mean, var = (p.cast(v, dtype=wide) for v in (scale, bias, mean, var))
    factor = p.mul(scale, inverse_deviation(var, epsilon))
    centred = c.sub(x, per_channel(mean, x, axis))
    y = p.add(p.mul(centred, per_channel(factor, x, axis)), per_channel(bias, x, axis))
    return p.cast(y, dtype=dtype)


def as_channels(x: Value) -> Value:
    """A vector counts as one channel."""
    return x if x.rank > 1 else p.reshape(x, shape=(x.shape[0], 1))


def inference_batch_norm(x: Value, scale: Value, bias: Value, mean: Value, var: Value, epsilon: float, momentum: float,
                         node: Node) -> Value:  # fmt: skip
    """The inference form, with a record for training."""
    y = normalized_by(as_channels(x), scale, bias, mean, var, epsilon)
    if x.rank < 2:
        y = p.reshape(y, shape=x.shape)
    record = BatchNorm(
        node.name,
        x=tensor_name(node, 0, x),
        scale=tensor_name(node, 1, scale),
        bias=tensor_name(node, 2, bias),
        mean=tensor_name(node, 3, mean),
        var=tensor_name(node, 4, var),
        y=tensor_name(node, 0, y, output=True),
        epsilon=epsilon,
        momentum=momentum,
    )
    reading().record("batch_norms", record)
    return y


def training_batch_norm(x: Value, scale: Value, bias: Value, mean: Value, var: Value, epsilon: float,
                        momentum: float) -> tuple[Value, Value, Value, Value, Value]:  # fmt: skip
    """The result by batch statistics, the running statistics that follow, and the batch's mean and (biased) variance."""
    shape, x = x.shape, as_channels(x)
    for v in (mean, var):
        require_equal(v.shape[0], x.shape[1], "one entry per channel")
    axes = tuple(a for a in range(x.rank) if a != 1)
    wide = x if x.dtype.bits >= 32 else p.cast(x, dtype=f32)
    batch_mean, _, batch_var = c.variance(wide, axes)
    y = normalized_by(x, scale, bias, batch_mean, batch_var, epsilon)

    def mixed(old: Value, new: Value) -> Value:
        blend = p.add(c.scale(p.cast(old, dtype=new.dtype), momentum), c.scale(new, 1 - momentum))
        return p.cast(blend, dtype=old.dtype)

    saved_mean, saved_var = p.cast(batch_mean, dtype=mean.dtype), p.cast(batch_var, dtype=var.dtype)
    return p.reshape(y, shape=shape), mixed(mean, batch_mean), mixed(var, batch_var), saved_mean, saved_var


@lowers("BatchNormalization", since=6)
def batch_normalization_6(x: Value, scale: Value, b: Value, mean: Value, var: Value, *, epsilon: float = 1e-5, is_test: int = 0,
                          momentum: float = 0.9, spatial: int = 1, node: Node) -> tuple[Value, ...] | Value:  # fmt: skip
    """(x - mean) scale / sqrt(var + epsilon) + b where `is_test`, else by the batch's own statistics"""
    if not spatial:
        raise Unsupported("spatial=0 before opset 7; convert the model to opset 9 or later")
    if is_test:
        return inference_batch_norm(x, scale, b, mean, var, epsilon, momentum, node)
    return training_batch_norm(x, scale, b, mean, var, epsilon, momentum)


@lowers("BatchNormalization", since=7)
def batch_normalization_7(x: Value, scale: Value, b: Value, mean: Value, var: Value, *, epsilon: float = 1e-5,
                          momentum: float = 0.9, spatial: int = 1, node: Node) -> tuple[Value, ...] | Value:  # fmt: skip
    """(x - mean) scale / sqrt(var + epsilon) + b; where more outputs are named, by the batch's own statistics"""
    training = any(node.wants(i) for i in range(1, 5))
    if spatial:
        if training:
            return training_batch_norm(x, scale, b, mean, var, epsilon, momentum)
        return inference_batch_norm(x, scale, b, mean, var, epsilon, momentum, node)
    if training:
        raise Unsupported("spatial=0 in training mode; convert the model to opset 9 or later")
    scale, b, mean, var = (broadcast_to(v, x.shape) for v in (scale, b, mean, var))
    return p.add(p.mul(c.sub(x, mean), p.mul(scale, inverse_deviation(var, epsilon))), b)


@lowers("BatchNormalization", since=9)
def batch_normalization_9(x: Value, scale: Value, b: Value, mean: Value, var: Value, *, epsilon: float = 1e-5,
                          momentum: float = 0.9, node: Node) -> tuple[Value, ...] | Value:  # fmt: skip
    """(x - mean) scale / sqrt(var + epsilon) + b; where more outputs are named, by the batch's own statistics"""
    if any(node.wants(i) for i in range(1, 5)):
        return training_batch_norm(x, scale, b, mean, var, epsilon, momentum)
    return inference_batch_norm(x, scale, b, mean, var, epsilon, momentum, node)


@lowers("BatchNormalization", since=14)
def batch_normalization(x: Value, scale: Value, b: Value, input_mean: Value, input_var: Value, *, epsilon: float = 1e-5,
                        momentum: float = 0.9, training_mode: int = 0, node: Node) -> tuple[Value, ...] | Value:  # fmt: skip
    """(x - mean) scale / sqrt(var + epsilon) + b; in training mode by the batch's own statistics"""
    if training_mode:
        return training_batch_norm(x, scale, b, input_mean, input_var, epsilon, momentum)[:3]
    return inference_batch_norm(x, scale, b, input_mean, input_var, epsilon, momentum, node)


# ---- the others ------------------------------------------------------------------------------------------------------------------------


def layer_norm(x: Value, scale: Value | None, bias: Value | None, axis: int, epsilon: float,
               stash_type: int = 1) -> tuple[Value, Value, Value]:  # fmt: skip
    """`(x - mean) / sqrt(var + epsilon) scale + bias` over the axes from `axis` on; the mean; `1 / sqrt(var + epsilon)`."""
    axes = tuple(range(axis_of(axis, x.rank), x.rank))
    wide = p.cast(x, dtype=working_dtype(x.dtype, stash_type))
    y, mean, inverse = standardized(wide, axes, epsilon)
    y = p.cast(y, dtype=x.dtype)
    if scale is not None:
        y = p.mul(y, broadcast_to(scale, x.shape))
    if bias is not None:
        y = p.add(y, broadcast_to(bias, x.shape))
    return y, keeping_ones(mean, x.rank), keeping_ones(inverse, x.rank)


@lowers("LayerNormalization", since=17)
def layer_normalization(x: Value, scale: Value, b: Value | None = None, *, axis: int = -1, epsilon: float = 1e-5,
                        stash_type: int = 1) -> tuple[Value, Value, Value]:  # fmt: skip
    """(x - mean) / sqrt(var + epsilon) scale + b over the axes from `axis` on"""
    return layer_norm(x, scale, b, axis, epsilon, stash_type)


def rms_norm(x: Value, scale: Value | None, axis: int, epsilon: float, stash_type: int = 1) -> tuple[Value, Value]:
    """`x / sqrt(mean(x x) + epsilon) scale` over the axes from `axis` on, and the inverse root."""
    axes = tuple(range(axis_of(axis, x.rank), x.rank))
    wide = p.cast(x, dtype=working_dtype(x.dtype, stash_type))
    inverse = inverse_deviation(c.mean(c.square(wide), axes), epsilon)
    y = p.cast(p.mul(wide, c.along(inverse, x.shape, axes)), dtype=x.dtype)
    if scale is not None:
        y = p.mul(y, broadcast_to(scale, x.shape))
    return y, keeping_ones(inverse, x.rank)


@lowers("RMSNormalization", since=23)
def rms_normalization(x: Value, scale: Value, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Value:
    """x / sqrt(mean(x x) + epsilon) scale over the axes from `axis` on"""
    return rms_norm(x, scale, axis, epsilon, stash_type)[0]


def grouped(x: Value, groups: int) -> Value:
    """`x[N, C, ...]` as `[N, groups, C / groups, ...]`."""
    each = require_divides(x.shape[1], groups, "the number of groups divides the channels")
    return p.reshape(x, shape=(x.shape[0], groups, each, *x.shape[2:]))


def group_norm(x: Value, groups: int, epsilon: float, dtype: DType) -> Value:
    """`x[N, C, ...]` standardised in each of its groups of channels, in float32 or what `stash_type` says."""
    parts = grouped(p.cast(x, dtype=dtype), groups)
    y, _, _ = standardized(parts, range(2, parts.rank), epsilon)
    return p.cast(y, dtype=x.dtype)


@lowers("GroupNormalization", since=18)
def group_normalization_18(x: Value, scale: Value, bias: Value, *, num_groups: int, epsilon: float = 1e-5) -> Value:
    """(x - mean) / sqrt(var + epsilon) scale + bias in each group of channels; one scale and bias per group"""
    y = group_norm(x, num_groups, epsilon, x.dtype if x.dtype.bits >= 32 else f32)
    return p.reshape(p.add(p.mul(y, per_channel(scale, y)), per_channel(bias, y)), shape=x.shape)


@lowers("GroupNormalization", since=21)
def group_normalization(x: Value, scale: Value, bias: Value, *, num_groups: int, epsilon: float = 1e-5,
                        stash_type: int = 1) -> Value:  # fmt: skip
    """(x - mean) / sqrt(var + epsilon) scale + bias in each group of channels; one scale and bias per channel"""
    y = p.reshape(group_norm(x, num_groups, epsilon, working_dtype(x.dtype, stash_type)), shape=x.shape)
    return p.add(p.mul(y, per_channel(scale, y)), per_channel(bias, y))


@lowers("InstanceNormalization", since=1)
def instance_normalization(input: Value, scale: Value, b: Value, *, epsilon: float = 1e-5) -> Value:
    """(x - mean) / sqrt(var + epsilon) scale + b over the spatial axes of each channel of each sample"""
    wide = input if input.dtype.bits >= 32 else p.cast(input, dtype=f32)
    y = p.cast(standardized(wide, range(2, input.rank), epsilon)[0], dtype=input.dtype)
    return p.add(p.mul(y, per_channel(scale, y)), per_channel(b, y))


def safe_root(square: Value) -> tuple[Value, Value]:
    """`sqrt(square)`, or 1 where the square is 0, and whether it is: at 0 the root has no derivative."""
    zero = p.equal(square, p.number(0, square))
    return p.sqrt(p.select(zero, p.number(1, square), square)), zero


def lp_normalized(x: Value, axis: int, order: int) -> Value:
    """`x` over its norm along an axis; 0, with derivative 0, where the norm is 0."""
    axes = (axis_of(axis, x.rank),)
    match order:
        case 1:
            norm = p.reduce_sum(p.abs(x), axes=axes)
            zero = p.equal(norm, p.number(0, norm))
            norm = p.select(zero, p.number(1, norm), norm)
        case 2:
            norm, zero = safe_root(p.reduce_sum(c.square(x), axes=axes))
        case _:
            raise Unsupported(f"p={order} is neither 1 nor 2")
    y = p.div(x, c.along(norm, x.shape, axes))
    return p.select(c.along(zero, x.shape, axes), p.number(0, x), y)


@lowers("LpNormalization", since=1)
def lp_normalization(input: Value, *, axis: int = -1, p: int = 2) -> Value:
    """x over its norm along `axis`: the sum of magnitudes (p=1) or the root of the sum of squares (p=2); 0 of 0"""
    return lp_normalized(input, axis, p)


@lowers("MeanVarianceNormalization", since=9)
def mean_variance_normalization(x: Value, *, axes: tuple[int, ...] = (0, 2, 3)) -> Value:
    """(x - mean) / (sqrt(var) + 1e-9) over `axes`"""
    over = tuple(axis_of(a, x.rank) for a in axes)
    _, centred, variance = c.variance(x, over)
    root, zero = safe_root(variance)
    deviation = c.plus(p.select(zero, p.number(0, root), root), 1e-9)
    return p.div(centred, c.along(deviation, x.shape, over))


@lowers("LRN", since=1)
def lrn(x: Value, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Value:
    """x / (bias + alpha / size sum(x x over `size` neighbouring channels)) ** beta"""
    low, high = (size - 1) // 2, size - 1 - (size - 1) // 2
    padded = p.pad(
        c.square(x),
        low=tuple(low if a == 1 else 0 for a in range(x.rank)),
        high=tuple(high if a == 1 else 0 for a in range(x.rank)),
    )
    near = p.reduce_sum(p.window(padded, axes=(1,), sizes=(size,), strides=(1,), dilations=(1,)), axes=(x.rank,))
    base = c.plus(c.scale(near, alpha / size), bias)
    return p.div(x, p.pow(base, p.number(beta, base)))
