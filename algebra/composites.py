"""Functions composed of primitives; they have no rules of their own.

So their derivatives are those of what they are made of.
Each is written so that its value *and* its derivatives of every order are right where the mathematics has them: at
kinks that cancel, at large magnitudes, at zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from . import primitives as p
from .dims import Dim, Shape, equal, is_one, product, simplest
from .errors import TypeMismatch
from .graph import Value
from .types import DType, bool_, f16, f32, f64, i64

__all__ = [
    "along", "at_last", "ceil", "clamp", "expm1", "flatten_axes", "greater", "greater_equal", "is_inf", "log1p",
    "log_sigmoid", "log_softmax", "logsumexp", "mean", "not_equal", "one_hot", "plus", "reciprocal", "relu",
    "scale", "sigmoid", "size_of", "softmax", "softplus", "split", "square", "sub", "take_along", "times",
    "unsqueeze", "variance",
]  # fmt: skip


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def sub(x: Value, y: Value) -> Value:
    """`x - y`."""
    return p.add(x, p.neg(y))


def scale(x: Value, factor: float) -> Value:
    """`factor * x`; x itself where the factor is 1."""
    return x if factor == 1 else p.mul(x, p.number(factor, x))


def plus(x: Value, amount: float) -> Value:
    """`x + amount`; x itself where the amount is 0."""
    return x if amount == 0 else p.add(x, p.number(amount, x))


def times(*xs: Value) -> Value:
    """The product of its operands."""
    result = xs[0]
    for x in xs[1:]:
        result = p.mul(result, x)
    return result


def reciprocal(x: Value) -> Value:
    """`1 / x`."""
    return p.div(p.number(1, x), x)


def square(x: Value) -> Value:
    """`x * x`."""
    return p.mul(x, x)


def ceil(x: Value) -> Value:
    """The smallest integer at least x, as a float."""
    return p.neg(p.floor(p.neg(x)))


def greater(x: Value, y: Value) -> Value:
    """`x > y`."""
    return p.less(y, x)


def greater_equal(x: Value, y: Value) -> Value:
    """`x >= y`."""
    return p.less_equal(y, x)


def not_equal(x: Value, y: Value) -> Value:
    """`x != y`, true where either is NaN."""
    return p.logical_not(p.equal(x, y))


def is_inf(x: Value) -> Value:
    """Whether x is infinite, of either sign."""
    return p.equal(p.abs(x), p.number(math.inf, x))


def clamp(x: Value, low: Value | None, high: Value | None) -> Value:
    """`min(max(x, low), high)`.

    The cotangent passes where `low <= x <= high`, the bounds included, as PyTorch's `clamp`.
    """
    if low is not None:
        x = p.select(p.less(x, low), low, x)
    if high is not None:
        x = p.select(p.less(high, x), high, x)
    return x


def expm1(x: Value) -> Value:
    """`e ** x - 1`, exact near 0: `2 t / (1 - t)` with `t = tanh(x / 2)`.

    There it is used, elsewhere the difference.
    """
    near = p.less(p.abs(x), p.number(0.5, x))
    t = p.tanh(scale(p.select(near, x, p.number(0, x)), 0.5))
    small = p.div(scale(t, 2), sub(p.number(1, t), t))
    return p.select(near, small, plus(p.exp(p.select(near, p.number(0, x), x)), -1))


def log1p(x: Value) -> Value:
    """`ln(1 + x)`, exact near 0: `2 artanh(x / (2 + x))`."""
    near = p.less(p.abs(x), p.number(0.5, x))
    inner = p.select(near, x, p.number(0, x))
    small = scale(p.atanh(p.div(inner, plus(inner, 2))), 2)
    return p.select(near, small, p.log(plus(p.select(near, p.number(0, x), x), 1)))


# ---- activations -----------------------------------------------------------------------------------------------------


def relu(x: Value) -> Value:
    """`max(x, 0)` with derivative 0 at 0; NaN stays NaN."""
    zero = p.number(0, x)
    return p.select(p.less_equal(x, zero), zero, x)


def _exponentials(x: Value) -> tuple[Value, Value]:
    """`a = e ** min(x, 0)` and `b = e ** -max(x, 0)`: neither overflows, and `a / (a + b)` is the logistic function.

    Where x is 0 both ties are split evenly, so that the halves cancel in every derivative.
    """
    zero = p.number(0, x)
    return p.exp(p.min(x, zero)), p.exp(p.neg(p.max(x, zero)))


def sigmoid(x: Value) -> Value:
    """`1 / (1 + e ** -x)`, without overflow in value or derivative."""
    a, b = _exponentials(x)
    return p.div(a, p.add(a, b))


def softplus(x: Value) -> Value:
    """`ln(1 + e ** x)`, without overflow in value or derivative; a value near 0 is exact to an ulp of 1."""
    a, b = _exponentials(x)
    return p.add(p.max(x, p.number(0, x)), p.log(p.add(a, b)))


def log_sigmoid(x: Value) -> Value:
    """`ln(sigmoid(x))`."""
    return p.neg(softplus(p.neg(x)))


# ---- shapes ----------------------------------------------------------------------------------------------------------


def along(value: Value, shape: Shape, axes: Sequence[int]) -> Value:
    """What a reduction over `axes` of a tensor of `shape` gave, repeated along them again."""
    return p.broadcast(value, shape=shape, axes=p.kept_axes(len(shape), tuple(axes)))


def at_last(value: Value, shape: Shape) -> Value:
    """A tensor that has the last axes of `shape`, repeated along the first."""
    return p.broadcast(value, shape=shape, axes=tuple(range(len(shape) - value.rank, len(shape))))


def unsqueeze(x: Value, axes: Sequence[int]) -> Value:
    """`x` with axes of size 1 at these positions of the result."""
    rank = x.rank + len(axes)
    rest = iter(x.shape)
    return p.reshape(x, shape=tuple(1 if i in axes else next(rest) for i in range(rank)))


def flatten_axes(x: Value, start: int, stop: int) -> Value:
    """Axes `start` to `stop` (exclusive) as one."""
    return p.reshape(x, shape=(*x.shape[:start], product(x.shape[start:stop]), *x.shape[stop:]))


def split(x: Value, sizes: Sequence[Dim], axis: int) -> list[Value]:
    """Consecutive pieces of an axis."""
    pieces, start = [], simplest(0)
    for size in sizes:
        stop = simplest(start + size)
        pieces.append(
            p.slice(
                x,
                start=tuple(start if i == axis else 0 for i in range(x.rank)),
                limit=tuple(stop if i == axis else d for i, d in enumerate(x.shape)),
            )
        )
        start = stop
    return pieces


def size_of(shape: Sequence[Dim], dtype: DType) -> Value:
    """The number of elements of a shape as a scalar of a floating dtype."""
    count = product(shape)
    if isinstance(count, int):
        return p.literal(count, dtype)
    wide = dtype if dtype is f64 else f32  # a 16-bit float cannot hold every size
    return p.cast(p.cast(p.dim(count), dtype=wide), dtype=dtype)


# ---- reductions ------------------------------------------------------------------------------------------------------


def mean(x: Value, axes: Sequence[int]) -> Value:
    """The mean over axes. Of float16, which holds no number above 65504, a larger count is divided by in float32."""
    count = product(x.shape[a] for a in axes)
    if x.dtype is f16 and isinstance(count, int) and count > 65504:
        return p.cast(mean(p.cast(x, dtype=f32), axes), dtype=f16)
    if x.dtype is f16 and len(axes) > 1 and not isinstance(count, int):
        for a in sorted(axes, reverse=True):
            x = mean(x, (a,))
        return x
    total = p.reduce_sum(x, axes=tuple(axes))
    return p.div(total, p.broadcast(size_of([count], x.dtype), shape=total.shape, axes=()))


def variance(x: Value, axes: Sequence[int]) -> tuple[Value, Value, Value]:
    """Mean, centred x, and mean of the squares of the centred x (the biased variance), over axes."""
    mu = mean(x, axes)
    centred = sub(x, along(mu, x.shape, axes))
    return mu, centred, mean(square(centred), axes)


def _shift(x: Value, axes: Sequence[int]) -> Value:
    """The largest over axes, or 0 where that is infinite; a constant for differentiation, as it cancels."""
    top = p.stop_gradient(p.reduce_max(x, axes=tuple(axes)))
    return p.select(is_inf(top), p.number(0, top), top)


def logsumexp(x: Value, axes: Sequence[int]) -> Value:
    """`ln(sum(e ** x))` over axes, without overflow; `-inf` of a row of `-inf`."""
    top = _shift(x, axes)
    return p.add(p.log(p.reduce_sum(p.exp(sub(x, along(top, x.shape, axes))), axes=tuple(axes))), top)


def softmax(x: Value, axes: Sequence[int]) -> Value:
    """`e ** x / sum(e ** x)` over axes, without overflow."""
    top = p.stop_gradient(p.reduce_max(x, axes=tuple(axes)))
    e = p.exp(sub(x, along(top, x.shape, axes)))
    return p.div(e, along(p.reduce_sum(e, axes=tuple(axes)), x.shape, axes))


def log_softmax(x: Value, axes: Sequence[int]) -> Value:
    """`x - ln(sum(e ** x))` over axes, without overflow."""
    top = p.stop_gradient(p.reduce_max(x, axes=tuple(axes)))
    shifted = sub(x, along(top, x.shape, axes))
    total = p.log(p.reduce_sum(p.exp(shifted), axes=tuple(axes)))
    return sub(shifted, along(total, x.shape, axes))


# ---- indexing --------------------------------------------------------------------------------------------------------


def one_hot(indices: Value, classes: Dim, axis: int) -> Value:
    """A bool tensor with a new axis of `classes`, true where its place equals the index."""
    rank = indices.rank + 1
    shape = (*indices.shape[:axis], classes, *indices.shape[axis:])
    places = p.broadcast(p.iota(classes), shape=shape, axes=(axis,))
    return p.equal(p.broadcast(indices, shape=shape, axes=tuple(i for i in range(rank) if i != axis)), places)


def take_along(x: Value, indices: Value, axis: int) -> Value:
    """`y[.., i, ..] = x[.., indices[.., i, ..], ..]`: one index (int64, not negative) for every element of the result.

    The other axes of `indices` may be shorter than those of `x`. Everything is one flat gather at row-major places.
    """
    if x.rank != indices.rank:
        raise TypeMismatch(f"cannot take {indices.type!r} along axis {axis} of {x.type!r}: ranks differ")
    place: Value | None = None
    for a in range(x.rank):
        step = p.broadcast(p.dim(product(x.shape[a + 1 :])), shape=indices.shape, axes=())
        at = indices if a == axis else p.broadcast(p.iota(indices.shape[a]), shape=indices.shape, axes=(a,))
        term = p.mul(at, step)
        place = term if place is None else p.add(place, term)
    if place is None:
        return x
    return p.gather(p.reshape(x, shape=(product(x.shape),)), place, axis=0)


def as_number(x: Value, dtype: DType) -> Value:
    """A bool as 1 and 0 of a dtype; other tensors are cast."""
    if x.dtype is bool_:
        return p.select(x, p.full(1, dtype, x.shape), p.full(0, dtype, x.shape))
    return p.cast(x, dtype=dtype)


def integers(values: Sequence[int]) -> Value:
    """A literal vector of int64."""
    return p.literal(np.asarray(values, np.int64), i64)


def drop_ones(x: Value, axes: Sequence[int]) -> Value:
    """`x` without these axes of size 1."""
    assert all(is_one(x.shape[a]) or equal(x.shape[a], 1) for a in axes)
    return p.reshape(x, shape=tuple(d for i, d in enumerate(x.shape) if i not in axes))
