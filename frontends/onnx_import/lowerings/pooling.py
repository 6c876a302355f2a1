"""Poolings: reductions over windows.

A maximum goes to the first element in row-major order of its window, in value (`Indices`) and in gradient, as PyTorch's max-pool does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.dims import Dim, Shape, at_least, ceildiv, dmin, floordiv, is_zero, product, show_shape, simplest
from ....algebra.errors import InconclusiveDim
from ....algebra.graph import Value
from ....algebra.types import DType, i64
from ..context import Unsupported, require_same_shape
from ..registry import Static, known, lowers
from .convolution import Ints, Windows, padded, spatial_rank, windowed, windows


def with_ceiling(at: Windows, spatial: Shape, ceil_mode: int) -> tuple[Windows, Shape]:
    """The windows with what `ceil_mode` adds after each axis, and those amounts.

    A last window that would start behind the axis and its first pad is left out.
    """
    if not ceil_mode:
        return at, (0,) * at.rank
    extra: list[Dim] = []
    for i, d in enumerate(spatial):
        stride, reach = at.strides[i], at.reach(i)
        count = simplest(ceildiv(simplest(d + at.low[i] + at.high[i] - reach), stride) + 1)
        if not surely(lambda h=at.high[i], s=stride, r=reach: at_least(r, h + s)):
            count = dmin(count, simplest(floordiv(simplest(d + at.low[i] - 1), stride) + 1))
        extra.append(simplest((count - 1) * stride + reach - d - at.low[i] - at.high[i]))
    more = tuple(extra)
    return replace(at, high=tuple(simplest(h + e) for h, e in zip(at.high, more, strict=True))), more


def surely(test: object) -> bool:
    """Whether a comparison of dims is known to hold."""
    try:
        return bool(test())  # type: ignore[operator]
    except InconclusiveDim:
        return False


def kernel_axes(rank: int, n: int) -> Ints:
    """The axes that `window` appended to a tensor of this rank."""
    return tuple(range(rank, rank + n))


# ---- maximum ---------------------------------------------------------------------------------------------------------------------------


def places_of_maxima(patches: Value, x: Value, at: Windows, column_major: bool) -> Value:
    """The flat place in x of the first maximum of each window. Places count through the whole tensor; `column_major` the spatial axes backwards."""
    n = at.rank
    lead, outs, spatial = patches.shape[: -2 * n], patches.shape[-2 * n : -n], x.shape[2:]
    shape = (*lead, *outs)
    flat = p.reshape(patches, shape=(*shape, product(at.sizes)))
    tap = p.argmax(flat, axis=len(shape))

    def constant(d: Dim) -> Value:
        return p.broadcast(p.dim(d), shape=shape, axes=())

    def counter(axis: int) -> Value:
        return p.broadcast(p.iota(shape[axis]), shape=shape, axes=(axis,))

    steps = [product(spatial[:i]) if column_major else product(spatial[i + 1 :]) for i in range(n)]
    place = p.mul(p.add(p.mul(counter(0), constant(x.shape[1])), counter(1)), constant(product(spatial)))
    for i in reversed(range(n)):
        size = constant(at.sizes[i])
        k, tap = p.rem(tap, size), p.div(tap, size)
        start = p.mul(counter(2 + i), constant(at.strides[i]))
        where = p.add(p.add(start, p.mul(k, constant(at.dilations[i]))), constant(simplest(-at.low[i])))
        place = p.add(place, p.mul(where, constant(steps[i])))
    return place


@lowers("MaxPool", since=1)
def max_pool(x: Value, *, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Ints | None = None, kernel_shape: Ints,
             pads: Ints | None = None, storage_order: int = 0, strides: Ints | None = None) -> tuple[Value, Value]:  # fmt: skip
    """max over k of x[n, c, o stride + k dilation - pad], and the place of the first maximum"""
    n = spatial_rank(x, "MaxPool")
    at = windows(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad)
    at, _ = with_ceiling(at, x.shape[2:], ceil_mode)
    patches = windowed(padded(x, at.low, at.high, x.dtype.lowest), at)
    y = p.reduce_max(patches, axes=kernel_axes(x.rank, n), ties="first")
    return y, places_of_maxima(patches, x, at, bool(storage_order))


@lowers("GlobalMaxPool", since=1)
def global_max_pool(x: Value) -> Value:
    """max over the spatial axes"""
    spatial_rank(x, "GlobalMaxPool")
    return keeping_axes(p.reduce_max(x, axes=tuple(range(2, x.rank)), ties="first"), x)


def keeping_axes(y: Value, x: Value) -> Value:
    """What a reduction over the spatial axes gave, with those axes of size 1."""
    return p.reshape(y, shape=(*y.shape, *(1,) * (x.rank - 2)))


# ---- average and norm ------------------------------------------------------------------------------------------------------------------


def taps_inside(size: Dim, at: Windows, i: int, counted_low: Dim, counted_high: Dim, dtype: DType) -> Value | float:
    """How many taps of each window of axis i lie inside the axis and the pads that count; one number where it is the same for all."""
    low, high = simplest(at.low[i] - counted_low), simplest(at.high[i] - counted_high)
    if is_zero(low) and is_zero(high) and isinstance(at.sizes[i], int):
        return float(at.sizes[i])
    ones = p.full(1, dtype, (simplest(size + counted_low + counted_high),))
    line = padded(ones, (low,), (high,))
    patches = p.window(line, axes=(0,), sizes=(at.sizes[i],), strides=(at.strides[i],), dilations=(at.dilations[i],))
    total = p.reduce_sum(patches, axes=(1,))
    found = known(total)
    return total if found is None or found.dtype == object else p.literal(found)


def averaged(x: Value, at: Windows, extra: Shape, include_pads: bool) -> Value:
    """The sum over each window divided by the number of its taps that count."""
    spatial = x.shape[2:]
    total = p.reduce_sum(windowed(padded(x, at.low, at.high), at), axes=kernel_axes(x.rank, at.rank))
    number, factors = 1.0, []
    for i, d in enumerate(spatial):
        low, high = (at.low[i], simplest(at.high[i] - extra[i])) if include_pads else (0, 0)
        taps = taps_inside(d, at, i, low, high, x.dtype)
        if isinstance(taps, Value):
            factors.append(p.broadcast(taps, shape=total.shape[2:], axes=(i,)))
        else:
            number *= taps
    if not factors:
        return p.div(total, p.number(number, total))
    count = c.scale(c.times(*factors), number)
    found = known(count)
    if found is not None and found.dtype != object:
        count = p.literal(found)
    return p.div(total, c.at_last(count, total.shape))


@lowers("AveragePool", since=1)
def average_pool(x: Value, *, auto_pad: str = "NOTSET", ceil_mode: int = 0, count_include_pad: int = 0, dilations: Ints | None = None,
                 kernel_shape: Ints, pads: Ints | None = None, strides: Ints | None = None) -> Value:  # fmt: skip
    """mean over k of x[n, c, o stride + k dilation - pad]; the pads count where `count_include_pad`"""
    spatial_rank(x, "AveragePool")
    at = windows(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad)
    at, extra = with_ceiling(at, x.shape[2:], ceil_mode)
    return averaged(x, at, extra, bool(count_include_pad))


@lowers("GlobalAveragePool", since=1)
def global_average_pool(x: Value) -> Value:
    """mean over the spatial axes"""
    spatial_rank(x, "GlobalAveragePool")
    return keeping_axes(c.mean(x, range(2, x.rank)), x)


def norm(x: Value, axes: Sequence[int], order: float) -> Value:
    """`(sum |x| ** order) ** (1 / order)` over axes; its derivative is 0 where it is 0."""
    if order < 1:
        raise Unsupported(f"p={order} is below 1, where there is no norm")
    axes = tuple(axes)
    if order == 1:
        return p.reduce_sum(p.abs(x), axes=axes)
    size = p.abs(x)
    total = p.reduce_sum(c.square(x) if order == 2 else p.pow(size, p.number(order, size)), axes=axes)
    zero = p.equal(total, p.number(0, total))
    safe = p.select(zero, p.number(1, total), total)
    root = p.sqrt(safe) if order == 2 else p.pow(safe, p.number(1 / order, safe))
    return p.select(zero, p.number(0, root), root)


@lowers("LpPool", since=1)
def lp_pool(x: Value, *, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Ints | None = None, kernel_shape: Ints,
            p: float = 2, pads: Ints | None = None, strides: Ints | None = None) -> Value:  # fmt: skip
    """(sum over k of |x[n, c, o stride + k dilation - pad]| ** p) ** (1 / p)"""
    n = spatial_rank(x, "LpPool")
    at = windows(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad)
    at, _ = with_ceiling(at, x.shape[2:], ceil_mode)
    return norm(windowed(padded(x, at.low, at.high), at), kernel_axes(x.rank, n), p)


@lowers("GlobalLpPool", since=1)
def global_lp_pool(x: Value, *, p: float = 2) -> Value:
    """(sum |x| ** p) ** (1 / p) over the spatial axes"""
    spatial_rank(x, "GlobalLpPool")
    return keeping_axes(norm(x, range(2, x.rank), p), x)


# ---- unpooling -------------------------------------------------------------------------------------------------------------------------


def last_of_equal(indices: Value) -> tuple[Value, Value]:
    """The order that sorts a vector of indices, and whether each of the sorted ones is the last of those equal to it."""
    order = p.argsort(indices, axis=0)
    ranked = p.gather(indices, order, axis=0)
    count = ranked.shape[0]
    longer = p.pad(ranked, low=(0,), high=(1,), value=-1)
    following = p.slice(longer, start=(1,), limit=(simplest(count + 1),))
    return order, c.not_equal(ranked, following)


def placed(values: Value, indices: Value, size: Dim) -> Value:
    """Zeros of `size` with values put (not added) at indices; of those with one index the last stays."""
    order, last = last_of_equal(indices)
    ranked = p.gather(values, order, axis=0)
    kept = p.select(last, ranked, p.number(0, ranked))
    return p.scatter_add(kept, p.gather(indices, order, axis=0), axis=0, size=size)


@lowers("MaxUnpool", since=9)
def max_unpool(x: Value, i: Value, output_shape: Static | None = None, *, kernel_shape: Ints, pads: Ints | None = None,
               strides: Ints | None = None) -> Value:  # fmt: skip
    """zeros with each x put at the place that MaxPool's indices name, then more zeros up to `output_shape`"""
    n = spatial_rank(x, "MaxUnpool")
    at = windows(x.shape[2:], kernel_shape, strides, None, pads, "NOTSET")
    require_same_shape(x.shape, i.shape, "there is one index for each element")
    plain = tuple(
        simplest((d - 1) * at.strides[a] + at.sizes[a] - at.low[a] - at.high[a]) for a, d in enumerate(x.shape[2:])
    )
    natural, count = (*x.shape[:2], *plain), product(x.shape)
    places = p.reshape(p.cast(i, dtype=i64), shape=(count,))
    y = p.reshape(placed(p.reshape(x, shape=(count,)), places, product(natural)), shape=natural)
    if output_shape is None:
        return y
    wanted = tuple(map(simplest, np.asarray(output_shape).ravel()))
    if len(wanted) != n + 2:
        raise Unsupported(f"output_shape {show_shape(wanted)} needs {n + 2} entries")
    return padded(y, (0,) * y.rank, tuple(simplest(b - a) for a, b in zip(natural, wanted, strict=True)))
