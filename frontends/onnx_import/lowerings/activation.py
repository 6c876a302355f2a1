"""Activations, and the softmax family.

At a kink the derivative is PyTorch's: 0 at relu's zero, the negative side's at the zero of LeakyRelu, PRelu, Elu, Celu and Selu, 0 at the
bounds of HardSigmoid.
The branch of a `select` that is not taken computes on a safe operand, so that neither its value nor its derivative can overflow.
"""

from __future__ import annotations

import math

import numpy as np

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.dims import is_one, product
from ....algebra.graph import Value
from ....algebra.training.modes import Dropout, passing
from ....algebra.types import bool_, f32
from ..broadcasting import broadcast_to
from ..context import Node, Unsupported, reading, require_equal
from ..registry import Gradient, known, lowers
from .random import kept_mask


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the start; ONNX lets it count from the end.

    >>> axis_of(-1, 3)
    2
    """
    if not -rank <= axis < rank:
        raise Unsupported(f"axis {axis} is not one of a tensor of rank {rank}")
    return axis % rank


def tensor_name(node: Node, position: int, value: Value, *, output: bool = False) -> Value | str:
    """A tensor as a record keeps it: by name, which outlives every pass, where the graph knows it by name."""
    names = node.outputs if output else node.inputs
    inside = bool(node.scope.path)
    return value if inside or position >= len(names) or not names[position] else names[position]


def not_positive(x: Value) -> tuple[Value, Value]:
    """Whether `x <= 0`, and x where so, else 0."""
    zero = p.number(0, x)
    below = p.less_equal(x, zero)
    return below, p.select(below, x, zero)


def exponential_below(x: Value, alpha: float, width: float = 1.0) -> Value:
    """`alpha (e ** (x / width) - 1)` where `x <= 0`, else x; of 16-bit floats in float32, as the difference cancels near 0."""
    if x.dtype.bits < 32:
        return p.cast(exponential_below(p.cast(x, dtype=f32), alpha, width), dtype=x.dtype)
    below, safe = not_positive(x)
    if width != 1:
        safe = p.div(safe, p.number(width, safe))
    return p.select(below, c.scale(c.plus(p.exp(safe), -1), alpha), x)


# ---- piecewise linear ------------------------------------------------------------------------------------------------------------------


@lowers("Relu", since=1)
def relu(x: Value) -> Value:
    """max(x, 0)"""
    return c.relu(x)


@lowers("LeakyRelu", since=1)
def leaky_relu(x: Value, *, alpha: float = 0.01) -> Value:
    """x where x > 0, else alpha x"""
    return p.select(p.less_equal(x, p.number(0, x)), c.scale(x, alpha), x)


@lowers("PRelu", since=1)
def prelu_1(x: Value, slope: Value) -> Value:
    """x where x > 0, else slope x; one slope, or one for each channel"""
    if slope.rank == 1 and not is_one(slope.shape[0]):
        require_equal(slope.shape[0], x.shape[1], "one slope per channel")
        slope = p.broadcast(slope, shape=x.shape, axes=(1,))
    return prelu(x, slope)


@lowers("PRelu", since=7)
def prelu(x: Value, slope: Value) -> Value:
    """x where x > 0, else slope x; the slope is broadcast to x"""
    return p.select(p.less_equal(x, p.number(0, x)), p.mul(broadcast_to(slope, x.shape), x), x)


@lowers("ThresholdedRelu", since=1)
def thresholded_relu(x: Value, *, alpha: float = 1.0) -> Value:
    """x where x > alpha, else 0"""
    return p.select(p.less(p.number(alpha, x), x), x, p.number(0, x))


def hard_sigmoid_of(x: Value, alpha: float, beta: float) -> Value:
    """`max(0, min(1, alpha x + beta))`, with derivative 0 at both bounds."""
    y = c.plus(c.scale(x, alpha), beta)
    zero, one = p.number(0, y), p.number(1, y)
    return p.select(p.less_equal(y, zero), zero, p.select(p.less_equal(one, y), one, y))


@lowers("HardSigmoid", since=1)
def hard_sigmoid(x: Value, *, alpha: float = 0.2, beta: float = 0.5) -> Value:
    """max(0, min(1, alpha x + beta))"""
    return hard_sigmoid_of(x, alpha, beta)


@lowers("HardSwish", since=14)
def hard_swish(x: Value) -> Value:
    """x max(0, min(1, x / 6 + 1 / 2))"""
    return p.mul(x, hard_sigmoid_of(x, 1 / 6, 0.5))


@lowers("Shrink", since=9)
def shrink(x: Value, *, lambd: float = 0.5, bias: float = 0.0) -> Value:
    """x + bias where x < -lambd, x - bias where x > lambd, else 0"""
    wide = x if x.dtype.floating else p.cast(x, dtype=f32)
    below, above = p.less(wide, p.number(-lambd, wide)), p.less(p.number(lambd, wide), wide)
    y = p.select(below, c.plus(wide, bias), p.select(above, c.plus(wide, -bias), p.number(0, wide)))
    return p.cast(y, dtype=x.dtype)


# ---- exponential -----------------------------------------------------------------------------------------------------------------------


@lowers("Elu", since=1)
def elu(x: Value, *, alpha: float = 1.0) -> Value:
    """x where x > 0, else alpha (e ** x - 1)"""
    return exponential_below(x, alpha)


@lowers("Celu", since=12)
def celu(x: Value, *, alpha: float = 1.0) -> Value:
    """max(0, x) + min(0, alpha (e ** (x / alpha) - 1))"""
    return exponential_below(x, alpha, alpha)


@lowers("Selu", since=1)
def selu_1(x: Value, *, alpha: float = 1.6732, gamma: float = 1.0507) -> Value:
    """gamma x where x > 0, else gamma alpha (e ** x - 1)"""
    return c.scale(exponential_below(x, alpha), gamma)


@lowers("Selu", since=6)
def selu(x: Value, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Value:
    """gamma x where x > 0, else gamma alpha (e ** x - 1)"""
    return c.scale(exponential_below(x, alpha), gamma)


@lowers("Sigmoid", since=1)
def sigmoid(x: Value) -> Value:
    """1 / (1 + e ** -x)"""
    return c.sigmoid(x)


@lowers("Softplus", since=1)
def softplus(x: Value) -> Value:
    """ln(1 + e ** x)"""
    return c.softplus(x)


@lowers("Softsign", since=1)
def softsign(x: Value) -> Value:
    """x / (1 + |x|)"""
    return p.div(x, c.plus(p.abs(x), 1))


@lowers("Mish", since=18)
def mish(x: Value) -> Value:
    """x tanh(ln(1 + e ** x))"""
    return p.mul(x, p.tanh(c.softplus(x)))


@lowers("Swish", since=24)
def swish(x: Value, *, alpha: float = 1.0) -> Value:
    """x / (1 + e ** (-alpha x))"""
    return p.mul(x, c.sigmoid(c.scale(x, alpha)))


def gelu_exact(x: Value) -> Value:
    """`x (1 + erf(x / sqrt 2)) / 2`."""
    return p.mul(c.scale(x, 0.5), c.plus(p.erf(c.scale(x, math.sqrt(0.5))), 1))


def gelu_tanh(x: Value) -> Value:
    """`x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x ** 3))) / 2`.

    The cube would overflow where tanh has long been 1, so it is taken of x within -16 and 16.
    """
    inner = c.clamp(x, p.number(-16, x), p.number(16, x))
    cubic = p.mul(inner, c.plus(c.scale(c.square(inner), 0.044715), 1))
    return p.mul(c.scale(x, 0.5), c.plus(p.tanh(c.scale(cubic, math.sqrt(2 / math.pi))), 1))


@lowers("Gelu", since=20)
def gelu(x: Value, *, approximate: str = "none") -> Value:
    """x (1 + erf(x / sqrt 2)) / 2, or its form with tanh"""
    match approximate:
        case "none":
            return gelu_exact(x)
        case "tanh":
            return gelu_tanh(x)
    raise Unsupported(f"approximate={approximate!r} is neither 'none' nor 'tanh'")


@lowers("SwiGLU", since=28)
def swiglu(a: Value, b: Value, *, alpha: float = 1.0) -> Value:
    """a b / (1 + e ** (-alpha a))"""
    if a.rank != b.rank:
        raise Unsupported(f"A {a.type!r} and B {b.type!r} must have the same shape")
    for left, right in zip(a.shape, b.shape, strict=True):
        require_equal(left, right, "the gate and the value of SwiGLU have the same shape")
    return p.mul(p.mul(a, c.sigmoid(c.scale(a, alpha))), b)


# ---- softmax family --------------------------------------------------------------------------------------------------------------------


def trailing(x: Value, axis: int) -> tuple[int, ...]:
    """The axes from `axis` on, which ONNX before 13 flattens into one."""
    if not -x.rank <= axis <= x.rank:
        raise Unsupported(f"axis {axis} is not one of {x.type!r}")
    return tuple(range(axis if axis >= 0 else axis + x.rank, x.rank))


@lowers("Softmax", since=1)
def softmax_1(x: Value, *, axis: int = 1) -> Value:
    """e ** x / sum(e ** x) over the axes from `axis` on"""
    return c.softmax(x, trailing(x, axis))


@lowers("Softmax", since=13)
def softmax(x: Value, *, axis: int = -1) -> Value:
    """e ** x / sum(e ** x) along `axis`"""
    return c.softmax(x, (axis_of(axis, x.rank),))


@lowers("LogSoftmax", since=1)
def log_softmax_1(x: Value, *, axis: int = 1) -> Value:
    """x - ln(sum(e ** x)) over the axes from `axis` on"""
    return c.log_softmax(x, trailing(x, axis))


@lowers("LogSoftmax", since=13)
def log_softmax(x: Value, *, axis: int = -1) -> Value:
    """x - ln(sum(e ** x)) along `axis`"""
    return c.log_softmax(x, (axis_of(axis, x.rank),))


def first_largest(x: Value, axis: int) -> Value:
    """1 at the first largest element along an axis, 0 elsewhere."""
    return c.as_number(c.one_hot(p.argmax(x, axis=axis), x.shape[axis], axis), x.dtype)


@lowers("Hardmax", since=1, gradient=Gradient.PIECEWISE, reason="1 at the largest, 0 elsewhere")
def hardmax_1(x: Value, *, axis: int = 1) -> Value:
    """1 at the first largest over the axes from `axis` on, 0 elsewhere"""
    axes = trailing(x, axis)
    kept = x.shape[: x.rank - len(axes)]
    flat = p.reshape(x, shape=(*kept, product(x.shape[len(kept) :])))
    return p.reshape(first_largest(flat, len(kept)), shape=x.shape)


@lowers("Hardmax", since=13, gradient=Gradient.PIECEWISE, reason="1 at the largest, 0 elsewhere")
def hardmax(x: Value, *, axis: int = -1) -> Value:
    """1 at the first largest along `axis`, 0 elsewhere"""
    return first_largest(x, axis_of(axis, x.rank))


# ---- dropout ---------------------------------------------------------------------------------------------------------------------------


def inference_dropout(x: Value, ratio: float, node: Node) -> Value:
    """x under a node of its own, with a record for training."""
    y = passing(x)
    reading().record(
        "dropouts", Dropout(node.name, tensor_name(node, 0, x), tensor_name(node, 0, y, output=True), ratio)
    )
    return y


def drawn_dropout(x: Value, ratio: float, seed: int, node: Node) -> tuple[Value, Value]:
    """`x mask / (1 - ratio)`, and the mask."""
    if not 0 < ratio < 1:
        raise Unsupported(f"ratio {ratio} is not in [0, 1)")
    mask = kept_mask(node, x.shape, ratio, seed)
    return p.select(mask, c.scale(x, 1 / (1 - ratio)), p.number(0, x)), mask


@lowers("Dropout", since=1)
def dropout_1(data: Value, *, ratio: float = 0.5, is_test: int = 0, node: Node) -> tuple[Value, Value]:
    """x where `is_test`, else x mask / (1 - ratio); and the mask (in x's dtype)"""
    if is_test or ratio == 0:
        return inference_dropout(data, ratio, node), p.number(1, data)
    y, mask = drawn_dropout(data, ratio, 0, node)
    return y, c.as_number(mask, data.dtype)


@lowers("Dropout", since=7)
def dropout_7(data: Value, *, ratio: float = 0.5, node: Node) -> tuple[Value, Value]:
    """x; the mask is 1 (in x's dtype)"""
    return inference_dropout(data, ratio, node), p.number(1, data)


@lowers("Dropout", since=10)
def dropout_10(data: Value, *, ratio: float = 0.5, node: Node) -> tuple[Value, Value]:
    """x; the mask is true"""
    return inference_dropout(data, ratio, node), p.full(True, bool_, data.shape)


@lowers("Dropout", since=12)
def dropout(data: Value, ratio: Value | None = None, training_mode: Value | None = None, *, seed: int = 0,
            node: Node) -> tuple[Value, Value]:  # fmt: skip
    """x in inference; in training mode x mask / (1 - ratio), and the mask"""
    training = training_mode is not None and scalar(training_mode, "training_mode") != 0
    rate = 0.5 if ratio is None else scalar(ratio, "ratio")
    if not training or rate == 0:
        return inference_dropout(data, rate, node), p.full(True, bool_, data.shape)
    return drawn_dropout(data, rate, seed, node)


def scalar(value: Value, what: str) -> float:
    """The number that a value is known to be."""
    found = known(value)
    if found is None:
        raise Unsupported(f"{what} must be known when the model is read, but it depends on data; give it a constant")
    return float(np.asarray(found).reshape(()))
