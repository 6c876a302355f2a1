"""Reductions over axes, places of extremes, and the largest few."""

from __future__ import annotations

from collections.abc import Callable

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.graph import Value
from ....algebra.types import bool_, f64, i32
from ..registry import Gradient, Static, lowers
from .index import at_places, sortable
from .math import axis_of
from .shape import axes_of, dims_of

Axes = tuple[int, ...]


def _in_floats(function: Callable[[Value, Axes], Value]) -> Callable[[Value, Axes], Value]:
    """Integers are computed in double and cast back, toward zero."""

    def apply(x: Value, axes: Axes) -> Value:
        return function(x, axes) if x.dtype.floating else p.cast(function(p.cast(x, dtype=f64), axes), dtype=x.dtype)

    return apply


def _extreme(function: Callable[..., Value]) -> Callable[[Value, Axes], Value]:
    """Of bools through integers, as they are not ordered here."""

    def apply(x: Value, axes: Axes) -> Value:
        if x.dtype is not bool_:
            return function(x, axes=axes)
        found = function(c.as_number(x, i32), axes=axes)
        return p.equal(found, p.number(1, found))

    return apply


def _l1(x: Value, axes: Axes) -> Value:
    return p.reduce_sum(p.abs(x), axes=axes)


def _l2(x: Value, axes: Axes) -> Value:
    """The root of the sum of squares, with derivative 0 where it is 0 (PyTorch's `norm`)."""
    total = p.reduce_sum(c.square(x), axes=axes)
    zero = p.number(0, total)
    nothing = p.equal(total, zero)
    return p.select(nothing, zero, p.sqrt(p.select(nothing, p.number(1, total), total)))


def _log_sum(x: Value, axes: Axes) -> Value:
    return p.log(p.reduce_sum(x, axes=axes))


def _sum_square(x: Value, axes: Axes) -> Value:
    return p.reduce_sum(c.square(x), axes=axes)


REDUCTIONS: dict[str, tuple[Callable[[Value, Axes], Value], str]] = {
    "ReduceSum": (lambda x, axes: p.reduce_sum(x, axes=axes), "the sum over axes"),
    "ReduceMean": (c.mean, "the mean over axes"),
    "ReduceMax": (_extreme(p.reduce_max), "the largest over axes; a tie is shared evenly"),
    "ReduceMin": (_extreme(p.reduce_min), "the smallest over axes; a tie is shared evenly"),
    "ReduceProd": (lambda x, axes: p.reduce_prod(x, axes=axes), "the product over axes"),
    "ReduceL1": (_l1, "the sum of |x| over axes"),
    "ReduceL2": (_in_floats(_l2), "the root of the sum of x ** 2 over axes, with gradient 0 at 0"),
    "ReduceLogSum": (_in_floats(_log_sum), "ln of the sum over axes"),
    "ReduceLogSumExp": (_in_floats(c.logsumexp), "ln of the sum of e ** x over axes"),
    "ReduceSumSquare": (_sum_square, "the sum of x ** 2 over axes"),
}


def reduced(op_type: str, x: Value, axes: Axes, keepdims: int) -> Value:
    """A reduction by ONNX's name; the reduced axes stay with size 1 where asked."""
    y = REDUCTIONS[op_type][0](x, tuple(sorted(axes)))
    return c.unsqueeze(y, tuple(sorted(axes))) if keepdims and axes else y


def _register(op_type: str, moved: int) -> None:
    def by_attribute(data: Value, *, axes: Axes | None = None, keepdims: int = 1) -> Value:
        chosen = axes_of(axes, data.rank) if axes else tuple(range(data.rank))
        return reduced(op_type, data, chosen, keepdims)

    def by_input(data: Value, axes: Static | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Value:
        empty = axes is None or not dims_of(axes)
        if empty:
            chosen = () if noop_with_empty_axes else tuple(range(data.rank))
        else:
            chosen = axes_of(axes, data.rank)
        return reduced(op_type, data, chosen, keepdims)

    by_attribute.__doc__ = by_input.__doc__ = REDUCTIONS[op_type][1]
    lowers(op_type)(by_attribute)
    lowers(op_type, since=moved)(by_input)


for _op_type in REDUCTIONS:
    _register(_op_type, 13 if _op_type == "ReduceSum" else 18)


# ---- places of extremes ----------------------------------------------------------------------------------------------


def _downward(x: Value) -> Value:
    """A tensor ordered the other way; exact for every integer."""
    return p.bit_not(x) if x.dtype.integral else p.neg(x)


def _place(x: Value, axis: int, keepdims: int, last: int) -> Value:
    a, x = axis_of(axis, x.rank), sortable(x)
    if last:
        at = p.argmax(p.reverse(x, axes=(a,)), axis=a)
        end = p.broadcast(p.dim(x.shape[a] - 1), shape=at.shape, axes=())
        at = c.sub(end, at)
    else:
        at = p.argmax(x, axis=a)
    return c.unsqueeze(at, (a,)) if keepdims else at


@lowers("ArgMax", gradient=Gradient.INDEX, reason="a place")
def argmax(data: Value, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Value:
    """The place of the largest along an axis, the first or the last"""
    return _place(data, axis, keepdims, select_last_index)


@lowers("ArgMin", gradient=Gradient.INDEX, reason="a place")
def argmin(data: Value, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Value:
    """The place of the smallest along an axis, the first or the last"""
    return _place(_downward(data), axis, keepdims, select_last_index)


def top(x: Value, k: object, axis: int, largest: int) -> tuple[Value, Value]:
    """The k largest (smallest) along an axis, in order, and their places; of equal ones the first."""
    a = axis_of(axis, x.rank)
    (count,) = dims_of(k)
    order = p.argsort(sortable(x), axis=a, descending=bool(largest))
    limit = tuple(count if i == a else d for i, d in enumerate(x.shape))
    places = order if limit == x.shape else p.slice(order, start=(0,) * x.rank, limit=limit)
    return at_places(x, places, a), places


@lowers("TopK", since=10)
def top_k(x: Value, k: Static, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Value, Value]:
    """The k largest (smallest) along an axis, and their places; the gradient goes to the elements chosen"""
    return top(x, k, axis, largest)


@lowers("TopK")
def top_k_1(x: Value, *, k: int, axis: int = -1) -> tuple[Value, Value]:
    """The k largest along an axis, and their places; the gradient goes to the elements chosen"""
    return top(x, k, axis, 1)
