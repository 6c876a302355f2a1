"""Shapes as numbers, and operators that move elements to places known when the model is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import sympy

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.dims import (
    Dim,
    Shape,
    at_least,
    ceildiv,
    dmax,
    dmin,
    exact_div,
    floordiv,
    is_one,
    is_zero,
    product,
    show,
    show_shape,
    simplest,
)
from ....algebra.errors import DimError, InconclusiveDim
from ....algebra.graph import Value
from ....algebra.types import bool_, f32, i64
from ..broadcasting import broadcast_shapes, broadcast_to
from ..context import Node, Unsupported, reading, require_divides, require_equal
from ..registry import Gradient, Static, known, lowers
from ..tensors import dtype_of_onnx
from .math import axis_of, cast_to

Ints = tuple[int, ...]
SIZE = "a size, not a number of the model"

# ---- what lowerings of shapes share ----------------------------------------------------------------------------------


def dims_of(array: Any) -> list[Dim]:
    """A static operand, or an attribute, as dims."""
    return [simplest(d) for d in np.asarray(array).reshape(-1).tolist()]


def ints_of(array: Any, what: str) -> list[int]:
    """A static operand that has to be plain integers."""
    dims = dims_of(array)
    bad = [d for d in dims if not isinstance(d, int)]
    if bad:
        raise Unsupported(f"{what} must be plain integers, found {show_shape(dims)}")
    return [int(d) for d in dims]


def axes_of(axes: Any, rank: int) -> Ints:
    """Axes counted from the end where negative, each once."""
    found = tuple(axis_of(a, rank) for a in ints_of(axes, "axes"))
    if len(set(found)) != len(found):
        raise DimError(f"axes {list(found)} repeat one")
    return found


def vector_of(dims: Sequence[Dim]) -> Value:
    """Dims as a vector of int64."""
    if all(isinstance(d, int) for d in dims):
        return p.literal(np.asarray(dims, np.int64))
    return p.concat(*(p.reshape(p.dim(d), shape=(1,)) for d in dims), axis=0)


def is_negative(d: Dim, what: str) -> bool:
    """Whether a number counts from the end; one that depends is taken from the start, and required to be so."""
    try:
        return not at_least(d, 0)
    except InconclusiveDim:
        reading().constrain(d, ">=", 0, f"{what} {show(d)} counts from the start")
        return False


# ---- shapes as numbers -----------------------------------------------------------------------------------------------


@lowers("Shape", gradient=Gradient.INDEX, reason=SIZE)
def shape(data: Value, *, start: int = 0, end: int | None = None) -> Value:
    """The sizes of x from axis start to axis end"""
    return vector_of(data.shape[slice(start, end)])


@lowers("Size", gradient=Gradient.INDEX, reason=SIZE)
def size(data: Value) -> Value:
    """The number of elements of x"""
    return p.dim(product(data.shape))


# ---- the same elements under another shape ---------------------------------------------------------------------------


def reshaped(x: Value, wanted: Sequence[Dim], allowzero: int = 0) -> Value:
    """The elements under a shape in which 0 copies a size (unless allowed as one) and one -1 is what is left."""
    wanted = list(wanted)
    for i, d in enumerate(wanted):
        if is_zero(d) and not allowzero:
            if i >= x.rank:
                raise DimError(f"the shape {show_shape(wanted)} copies size {i} of {x.type!r}, which it lacks")
            wanted[i] = x.shape[i]
    open_places = [i for i, d in enumerate(wanted) if isinstance(d, int) and d == -1]
    if len(open_places) > 1 or any(isinstance(d, int) and d < -1 for d in wanted):
        raise DimError(f"the shape {show_shape(wanted)} has more than one -1, or a negative size")
    if open_places:
        place = open_places[0]
        wanted[place] = _rest(x, [d for i, d in enumerate(wanted) if i != place])
    else:
        require_equal(product(x.shape), product(wanted), f"the number of elements in a reshape to {show_shape(wanted)}")
    return p.reshape(x, shape=tuple(wanted))


def _rest(x: Value, others: Sequence[Dim]) -> Dim:
    total, rest = product(x.shape), product(others)
    if is_zero(rest):
        if not is_zero(total):
            raise DimError(f"a shape with {show_shape(others)} and -1 cannot hold {x.type!r}")
        return _rest_of_nothing(x, others)
    return require_divides(
        total, rest, f"the number of elements in a reshape of {x.type!r} to {show_shape(others)} and the rest"
    )


def _rest_of_nothing(x: Value, others: Sequence[Dim]) -> Dim:
    """What -1 is where both sides are empty: the quotient of the sizes other than 0."""
    quotient = exact_div(product(d for d in x.shape if not is_zero(d)), product(d for d in others if not is_zero(d)))
    if quotient is None:
        raise DimError(f"-1 is not determined in a reshape of the empty {x.type!r}")
    return quotient


@lowers("Reshape", since=5)
def reshape(data: Value, shape: Static, *, allowzero: int = 0) -> Value:
    """The elements of x in row-major order under another shape"""
    return reshaped(data, dims_of(shape), allowzero)


@lowers("Reshape")
def reshape_1(data: Value, *, shape: Ints = ()) -> Value:
    """The elements of x in row-major order under another shape"""
    return reshaped(data, list(shape))


@lowers("Flatten")
def flatten(input: Value, *, axis: int = 1) -> Value:
    """A matrix: the axes before one, and those from it on"""
    axis = axis + input.rank if axis < 0 else axis
    if not 0 <= axis <= input.rank:
        raise DimError(f"axis {axis} does not split {input.type!r}")
    return p.reshape(input, shape=(product(input.shape[:axis]), product(input.shape[axis:])))


def _squeezed(x: Value, axes: Any) -> Value:
    if axes is None:
        dropped = tuple(i for i, d in enumerate(x.shape) if is_one(d))
    else:
        dropped = axes_of(axes, x.rank)
        for a in dropped:
            require_equal(x.shape[a], 1, "a size that is squeezed")
    return p.reshape(x, shape=tuple(d for i, d in enumerate(x.shape) if i not in dropped)) if dropped else x


@lowers("Squeeze", since=13)
def squeeze(data: Value, axes: Static | None = None) -> Value:
    """x without axes of size 1"""
    return _squeezed(data, axes)


@lowers("Squeeze")
def squeeze_1(data: Value, *, axes: Ints | None = None) -> Value:
    """x without axes of size 1"""
    return _squeezed(data, axes)


@lowers("Unsqueeze", since=13)
def unsqueeze(data: Value, axes: Static) -> Value:
    """x with new axes of size 1"""
    count = len(dims_of(axes))
    return c.unsqueeze(data, axes_of(axes, data.rank + count)) if count else data


@lowers("Unsqueeze")
def unsqueeze_1(data: Value, *, axes: Ints) -> Value:
    """x with new axes of size 1"""
    return c.unsqueeze(data, axes_of(axes, data.rank + len(axes)))


@lowers("Transpose")
def transpose(data: Value, *, perm: Ints | None = None) -> Value:
    """Axes permuted, by default reversed"""
    perm = tuple(reversed(range(data.rank))) if perm is None else axes_of(perm, data.rank)
    return data if perm == tuple(range(data.rank)) else p.transpose(data, perm=perm)


def _rearranged(x: Value, inner: Shape, perm: Ints, outer: Shape) -> Value:
    return p.reshape(p.transpose(p.reshape(x, shape=inner), perm=perm), shape=outer)


@lowers("DepthToSpace")
def depth_to_space(input: Value, *, blocksize: int, mode: str = "DCR") -> Value:
    """Channels laid out as blocks of space"""
    n, depth, h, w = input.shape
    b = blocksize
    rest = require_divides(depth, b * b, "channels laid out as blocks of space")
    outer = (n, rest, simplest(h * b), simplest(w * b))
    if mode == "DCR":
        return _rearranged(input, (n, b, b, rest, h, w), (0, 3, 4, 1, 5, 2), outer)
    if mode == "CRD":
        return _rearranged(input, (n, rest, b, b, h, w), (0, 1, 4, 2, 5, 3), outer)
    raise Unsupported(f"mode {mode!r}: DCR or CRD is required")


@lowers("SpaceToDepth")
def space_to_depth(input: Value, *, blocksize: int, mode: str = "DCR") -> Value:
    """Blocks of space as channels"""
    n, depth, h, w = input.shape
    b = blocksize
    rows, columns = (require_divides(d, b, "space cut into blocks") for d in (h, w))
    outer = (n, simplest(depth * b * b), rows, columns)
    perm = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return _rearranged(input, (n, depth, rows, b, columns, b), perm, outer)


# ---- repetition ------------------------------------------------------------------------------------------------------


@lowers("Expand")
def expand(input: Value, shape: Static) -> Value:
    """x broadcast together with a shape"""
    return broadcast_to(input, broadcast_shapes(input.shape, dims_of(shape)))


def _tiled(x: Value, repeats: Sequence[Dim]) -> Value:
    if len(repeats) != x.rank:
        raise DimError(f"{len(repeats)} repeats for {x.type!r}")
    if all(is_one(r) for r in repeats):
        return x
    spread: list[Dim] = []
    axes = []
    for d, r in zip(x.shape, repeats, strict=True):
        if not is_one(r):
            spread.append(r)
        axes.append(len(spread))
        spread.append(d)
    wide = p.broadcast(x, shape=tuple(spread), axes=tuple(axes))
    return p.reshape(wide, shape=tuple(simplest(d * r) for d, r in zip(x.shape, repeats, strict=True)))


@lowers("Tile", since=6)
def tile(input: Value, repeats: Static) -> Value:
    """x repeated along each axis"""
    return _tiled(input, dims_of(repeats))


@lowers("Tile")
def tile_1(input: Value, tiles: Static, axis: Static) -> Value:
    """x repeated along one axis"""
    repeats: list[Dim] = [1] * input.rank
    repeats[axis_of(axis, input.rank)] = dims_of(tiles)[0]
    return _tiled(input, repeats)


# ---- pieces ----------------------------------------------------------------------------------------------------------


def joined(xs: Sequence[Value], axis: int) -> Value:
    """Tensors one after the other along an axis; their other sizes are equal."""
    first = xs[0]
    axis = axis_of(axis, first.rank)
    for x in xs[1:]:
        if x.rank == first.rank:
            for i in range(x.rank):
                if i != axis:
                    require_equal(x.shape[i], first.shape[i], "sizes of concatenated tensors")
    return p.concat(*xs, axis=axis) if len(xs) > 1 else first


@lowers("Concat", since=4)
def concat(*inputs: Value, axis: int) -> Value:
    """Tensors one after the other along an axis"""
    return joined(inputs, axis)


@lowers("Concat")
def concat_1(*inputs: Value, axis: int = 1) -> Value:
    """Tensors one after the other along an axis"""
    return joined(inputs, axis)


def pieces(x: Value, axis: int, sizes: Sequence[Dim]) -> tuple[Value, ...]:
    """Consecutive pieces of an axis, which they fill."""
    require_equal(_total(sizes), x.shape[axis], "the sizes of the pieces of an axis")
    return tuple(c.split(x, sizes, axis))


def _total(sizes: Sequence[Dim]) -> Dim:
    total: Dim = 0
    for d in sizes:
        total = simplest(total + d)
    return total


def _even(x: Value, axis: int, count: int) -> list[Dim]:
    return [require_divides(x.shape[axis], count, f"an axis split in {count}")] * count


def chunks(extent: Dim, chunk: Dim, count: int) -> list[Dim]:
    """Sizes of pieces of `chunk`, of which the last ones have what is left."""
    sizes: list[Dim] = []
    left = extent
    for _ in range(count):
        sizes.append(dmin(chunk, left))
        left = simplest(left - sizes[-1])
    return sizes


@lowers("Split", since=18)
def split(
    input: Value, split: Static | None = None, *, axis: int = 0, num_outputs: int | None = None, node: Node
) -> tuple[Value, ...]:
    """Consecutive pieces of an axis, of given sizes or as equal as can be"""
    a = axis_of(axis, input.rank)
    if split is not None:
        return pieces(input, a, dims_of(split))
    count = num_outputs or len(node.outputs)
    extent = input.shape[a]
    if (even := exact_div(extent, count)) is not None:
        return pieces(input, a, [even] * count)
    return pieces(input, a, chunks(extent, ceildiv(extent, count), count))


@lowers("Split", since=13)
def split_13(input: Value, split: Static | None = None, *, axis: int = 0, node: Node) -> tuple[Value, ...]:
    """Consecutive pieces of an axis, of given or equal sizes"""
    a = axis_of(axis, input.rank)
    return pieces(input, a, _even(input, a, len(node.outputs)) if split is None else dims_of(split))


@lowers("Split", since=2)
def split_2(input: Value, *, axis: int = 0, split: Ints | None = None, node: Node) -> tuple[Value, ...]:
    """Consecutive pieces of an axis, of given or equal sizes"""
    a = axis_of(axis, input.rank)
    return pieces(input, a, _even(input, a, len(node.outputs)) if split is None else list(split))


@lowers("Split")
def split_1(
    input: Value, sizes: Static | None = None, *, axis: int = 0, split: Ints | None = None, node: Node
) -> tuple[Value, ...]:
    """Consecutive pieces of an axis, of given or equal sizes"""
    given = list(split) if split is not None else None if sizes is None else dims_of(sizes)
    a = axis_of(axis, input.rank)
    return pieces(input, a, _even(input, a, len(node.outputs)) if given is None else given)


HUGE = 2**31 - 1


def _bound(value: Dim, extent: Dim, low: Dim, high: Dim) -> Dim:
    """A bound of a slice within `low .. high`, counted from the end where it is negative."""
    if isinstance(value, int) and value >= HUGE:
        return high
    if isinstance(value, int) and value <= -HUGE:
        return low
    if is_negative(value, "the bound of a slice"):
        value = simplest(value + extent)
    return dmax(dmin(value, high), low)


def span(extent: Dim, start: Dim, end: Dim, step: int) -> tuple[Dim, Dim]:
    """Start and limit of the elements that `start:end:step` takes; of a negative step, as places of the reversed axis."""
    if step > 0:
        first, limit = _bound(start, extent, 0, extent), _bound(end, extent, 0, extent)
    else:
        last = simplest(extent - 1)
        first = simplest(last - _bound(start, extent, -1, last))
        limit = simplest(last - _bound(end, extent, -1, last))
    try:
        return (first, limit) if at_least(limit, first) else (first, first)
    except InconclusiveDim:
        return first, dmax(limit, first)


def sliced(x: Value, starts: Sequence[Dim], ends: Sequence[Dim], axes: Sequence[int], steps: Sequence[int]) -> Value:
    """`x[start:end:step]` along axes."""
    if any(s == 0 for s in steps):
        raise DimError("the step of a slice is 0")
    start: list[Dim] = [0] * x.rank
    limit: list[Dim] = list(x.shape)
    stride = [1] * x.rank
    flipped = tuple(a for a, s in zip(axes, steps, strict=True) if s < 0)
    for a, s, e, step in zip(axes, starts, ends, steps, strict=True):
        start[a], limit[a] = span(x.shape[a], s, e, step)
        if abs(step) >= HUGE:  # over any axis: at most one element
            limit[a] = dmin(limit[a], simplest(start[a] + 1))
            continue
        stride[a] = abs(step)
        if isinstance(x.shape[a], int):
            stride[a] = min(stride[a], max(int(x.shape[a]), 1))
    x = p.reverse(x, axes=flipped) if flipped else x
    if all(is_zero(s) for s in start) and tuple(limit) == x.shape and set(stride) <= {1}:
        return x
    return p.slice(x, start=tuple(start), limit=tuple(limit), stride=tuple(stride))


@lowers("Slice", since=10)
def slice_10(
    data: Value, starts: Static, ends: Static, axes: Static | None = None, steps: Static | None = None
) -> Value:
    """x[start:end:step] along axes"""
    first, last = dims_of(starts), dims_of(ends)
    along = axes_of(axes, data.rank) if axes is not None else tuple(range(len(first)))
    stride = ints_of(steps, "steps") if steps is not None else [1] * len(first)
    return sliced(data, first, last, along, stride)


@lowers("Slice")
def slice_1(data: Value, *, starts: Ints, ends: Ints, axes: Ints | None = None) -> Value:
    """x[start:end] along axes"""
    along = axes_of(axes, data.rank) if axes is not None else tuple(range(len(starts)))
    return sliced(data, list(starts), list(ends), along, [1] * len(starts))


# ---- padding ---------------------------------------------------------------------------------------------------------


def padded(x: Value, low: Sequence[Dim], high: Sequence[Dim], mode: str, fill: Value | float = 0) -> Value:
    """Elements before and after along each axis; negative amounts crop."""
    x, low, high = _cropped(x, low, high)
    if all(is_zero(d) for d in (*low, *high)):
        return x
    if mode == "constant":
        return _with_constant(x, low, high, fill)
    if mode not in ("edge", "reflect", "wrap"):
        raise Unsupported(f"mode {mode!r} of Pad")
    for a, (before, after) in enumerate(zip(low, high, strict=True)):
        if not (is_zero(before) and is_zero(after)):
            x = _extended(x, a, before, after, mode)
    return x


def _cropped(x: Value, low: Sequence[Dim], high: Sequence[Dim]) -> tuple[Value, list[Dim], list[Dim]]:
    def cut(d: Dim) -> Dim:
        return simplest(-d) if is_negative(d, "a pad") else 0

    start = [cut(d) for d in low]
    stop = [cut(d) for d in high]
    if any(not is_zero(d) for d in (*start, *stop)):
        limit = tuple(simplest(d - s) for d, s in zip(x.shape, stop, strict=True))
        x = p.slice(x, start=tuple(start), limit=limit)
    kept = [
        [0 if not is_zero(s) else d for d, s in zip(side, crop, strict=True)]
        for side, crop in ((low, start), (high, stop))
    ]
    return x, kept[0], kept[1]


def _with_constant(x: Value, low: Sequence[Dim], high: Sequence[Dim], fill: Value | float) -> Value:
    if isinstance(fill, Value):
        array = known(fill)
        if array is not None and array.dtype != object:
            fill = array.reshape(-1)[0].item() if x.dtype.kind != "b" else bool(array.reshape(-1)[0])
    if not isinstance(fill, Value):
        return p.pad(x, low=tuple(low), high=tuple(high), value=fill)
    inside = p.pad(p.full(True, bool_, x.shape), low=tuple(low), high=tuple(high), value=False)
    around = p.pad(x, low=tuple(low), high=tuple(high))
    scalar = fill if fill.rank == 0 else p.reshape(fill, shape=())
    return p.select(inside, around, p.broadcast(scalar, shape=around.shape, axes=()))


def _cut(x: Value, axis: int, start: Dim, stop: Dim) -> Value:
    return p.slice(
        x,
        start=tuple(start if a == axis else 0 for a in range(x.rank)),
        limit=tuple(stop if a == axis else d for a, d in enumerate(x.shape)),
    )


def _extended(x: Value, axis: int, before: Dim, after: Dim, mode: str) -> Value:
    n = x.shape[axis]
    if isinstance(n, int) and isinstance(before, int) and isinstance(after, int):
        farthest = max(before, after)
        if mode != "edge" and farthest > (n - 1 if mode == "reflect" else n):  # goes round more than once
            places = np.pad(np.arange(n), (before, after), mode=mode)  # type: ignore[call-overload]
            return p.gather(x, p.literal(places.astype(np.int64)), axis=axis)
    else:
        least = 1 if mode == "edge" else simplest(dmax(before, after) + (1 if mode == "reflect" else 0))
        _require_at_least(n, least, f"an axis padded by {mode}")

    def side(start: Dim, stop: Dim, amount: Dim) -> list[Value]:
        if is_zero(amount):
            return []
        part = _cut(x, axis, start, stop)
        if mode == "reflect":
            part = p.reverse(part, axes=(axis,))
        if mode == "edge":
            shape = tuple(amount if a == axis else d for a, d in enumerate(x.shape))
            part = broadcast_to(part, shape)
        return [part]

    match mode:
        case "edge":
            left, right = side(0, 1, before), side(simplest(n - 1), n, after)
        case "reflect":
            left = side(1, simplest(before + 1), before)
            right = side(simplest(n - 1 - after), simplest(n - 1), after)
        case _:
            left, right = side(simplest(n - before), n, before), side(0, after, after)
    return p.concat(*left, x, *right, axis=axis)


def _require_at_least(size: Dim, least: Dim, reason: str) -> None:
    try:
        if at_least(size, least):
            return
    except InconclusiveDim:
        reading().constrain(size, ">=", least, reason)
        return
    raise DimError(f"{show(size)} must be at least {show(least)}: {reason}")


def _pads(x: Value, pads: Sequence[Dim], axes: Ints | None) -> tuple[list[Dim], list[Dim]]:
    along = tuple(range(x.rank)) if axes is None else axes
    if len(pads) != 2 * len(along):
        raise DimError(f"{len(pads)} pads for {len(along)} axes of {x.type!r}: two each are required")
    low: list[Dim] = [0] * x.rank
    high: list[Dim] = [0] * x.rank
    for i, a in enumerate(along):
        low[a], high[a] = pads[i], pads[len(along) + i]
    return low, high


@lowers("Pad", since=11)
def pad(
    data: Value,
    pads: Static,
    constant_value: Value | None = None,
    axes: Static | None = None,
    *,
    mode: str = "constant",
) -> Value:
    """Elements before and after: a constant, the edge, the reflection, or from the other end; negative amounts crop"""
    along = None if axes is None else axes_of(axes, data.rank)
    low, high = _pads(data, dims_of(pads), along)
    return padded(data, low, high, mode, 0 if constant_value is None else constant_value)


@lowers("Pad", since=2)
def pad_2(data: Value, *, pads: Ints, mode: str = "constant", value: float = 0.0) -> Value:
    """Elements before and after: a constant, the edge or the reflection; negative amounts crop"""
    low, high = _pads(data, list(pads), None)
    return padded(data, low, high, mode, value)


@lowers("Pad")
def pad_1(data: Value, *, paddings: Ints, mode: str = "constant", value: float = 0.0) -> Value:
    """Elements before and after: a constant, the edge or the reflection"""
    return pad_2(data, pads=paddings, mode=mode, value=value)


@lowers("CenterCropPad")
def center_crop_pad(input_data: Value, shape: Static, *, axes: Ints | None = None) -> Value:
    """The middle of x, or x in the middle of zeros"""
    along = tuple(range(input_data.rank)) if axes is None else axes_of(axes, input_data.rank)
    start: list[Dim] = [0] * input_data.rank
    limit, low, high = list(input_data.shape), list(start), list(start)
    for a, wanted in zip(along, dims_of(shape), strict=True):
        kept = dmin(input_data.shape[a], wanted)
        start[a] = floordiv(simplest(input_data.shape[a] - kept), 2)
        limit[a] = simplest(start[a] + kept)
        low[a] = floordiv(simplest(wanted - kept), 2)
        high[a] = simplest(wanted - kept - low[a])
    x = input_data
    if any(not is_zero(s) for s in start) or tuple(limit) != x.shape:
        x = p.slice(x, start=tuple(start), limit=tuple(limit))
    return _with_constant(x, low, high, 0) if any(not is_zero(d) for d in (*low, *high)) else x


@lowers("Col2Im")
def col2im(input: Value, image_shape: Static, block_shape: Static, *, dilations: Ints | None = None, pads: Ints | None = None,
           strides: Ints | None = None) -> Value:  # fmt: skip
    """Columns added back as patches of an image"""
    image, block = dims_of(image_shape), dims_of(block_shape)
    r = len(image)
    dilation, stride, amounts = dilations or (1,) * r, strides or (1,) * r, pads or (0,) * 2 * r
    extents = tuple(simplest(d + amounts[i] + amounts[r + i]) for i, d in enumerate(image))
    counts = tuple(p.window_count(e, k, s, d) for e, k, s, d in zip(extents, block, stride, dilation, strict=True))
    n = input.shape[0]
    channels = require_divides(input.shape[1], product(block), "channels of columns, as blocks")
    require_equal(input.shape[2], product(counts), "the number of columns")
    taken = p.reshape(input, shape=(n, channels, *block, *counts))
    taken = p.transpose(taken, perm=(0, 1, *range(2 + r, 2 + 2 * r), *range(2, 2 + r)))
    whole = p.fold(taken, axes=tuple(range(2, 2 + r)), strides=stride, dilations=dilation, extents=extents)
    if not any(amounts):
        return whole
    start = (0, 0, *amounts[:r])
    return p.slice(whole, start=start, limit=(n, channels, *(simplest(amounts[i] + d) for i, d in enumerate(image))))


# ---- tensors made of nothing -----------------------------------------------------------------------------------------


@lowers("ConstantOfShape", gradient=Gradient.PIECEWISE, reason="a constant")
def constant_of_shape(input: Static, *, value: np.ndarray | None = None) -> Value:
    """A tensor of one number"""
    number = np.zeros(1, np.float32) if value is None else value
    shape = dims_of(input)
    if any(isinstance(d, int) and d < 0 for d in shape):
        raise DimError(f"a negative size in {show_shape(shape)}")
    return p.broadcast(p.literal(number.reshape(())), shape=tuple(shape), axes=())


def _ceil_of_quotient(length: Any, step: Any) -> Dim:
    """`ceil(length / step)` of ints, floats or dims, at least 0."""
    if isinstance(length, int | float | np.number) and isinstance(step, int | float | np.number):
        return max(int(np.ceil(length / step)), 0)
    numerator, denominator = sympy.together(sympy.nsimplify(length) / sympy.nsimplify(step)).as_numer_denom()
    return dmax(ceildiv(simplest(numerator), simplest(denominator)), 0)


@lowers("Range", gradient=Gradient.DIFFERENTIABLE)
def range_(start: Value, limit: Value, delta: Value) -> Value:
    """start, start + delta, ... before limit; the number of elements must be known when the model is read"""
    ends = [known(v) for v in (start, limit, delta)]
    missing = [n for n, a in zip(("start", "limit", "delta"), ends, strict=True) if a is None]
    if missing:
        raise Unsupported(f"{', '.join(missing)} must be known when the model is read, but depends on data")
    first, last, step = (np.asarray(a).reshape(-1)[0] for a in ends)
    count = _ceil_of_quotient(last - first, step)
    places = p.cast(p.iota(count), dtype=start.dtype)
    scalar = [
        p.broadcast(v if v.rank == 0 else p.reshape(v, shape=()), shape=(count,), axes=()) for v in (start, delta)
    ]
    if start.dtype is i64 and first == 0 and step == 1:
        return places
    return p.add(scalar[0], p.mul(places, scalar[1]))


@lowers("Range", since=27, gradient=Gradient.DIFFERENTIABLE)
def range_27(start: Value, limit: Value, delta: Value, *, stash_type: int = 1) -> Value:
    """start, start + delta, ... before limit; of 16-bit floats computed in the type that `stash_type` names"""
    if not start.dtype.floating or start.dtype.bits >= 32:
        return range_(start, limit, delta)
    wide = dtype_of_onnx(stash_type)
    return p.cast(range_(*(p.cast(v, dtype=wide) for v in (start, limit, delta))), dtype=start.dtype)


def _diagonal_mask(rows: Dim, columns: Dim) -> tuple[Value, Value]:
    shape = (rows, columns)
    return p.broadcast(p.iota(rows), shape=shape, axes=(0,)), p.broadcast(p.iota(columns), shape=shape, axes=(1,))


@lowers("EyeLike", gradient=Gradient.PIECEWISE, reason="only the shape of x matters")
def eye_like(input: Value, *, dtype: int | None = None, k: int = 0) -> Value:
    """1 on the k-th diagonal, else 0"""
    wanted = input.dtype if dtype is None else dtype_of_onnx(dtype)
    if input.rank != 2:
        raise DimError(f"EyeLike needs a matrix, found {input.type!r}")
    row, column = _diagonal_mask(*input.shape)
    on = p.equal(c.plus(row, k), column)
    return on if wanted is bool_ else cast_to(c.as_number(on, f32), wanted)


@lowers("Trilu")
def trilu(input: Value, k: Value | None = None, *, upper: int = 1) -> Value:
    """x where it is on or above (below) the k-th diagonal, else 0"""
    if input.rank < 2:
        raise DimError(f"Trilu needs rank 2 or more, found {input.type!r}")
    row, column = _diagonal_mask(*input.shape[-2:])
    if k is not None:
        amount = known(k)
        if amount is not None and amount.dtype != object:
            row = c.plus(row, int(amount.reshape(-1)[0]))
        else:
            row = p.add(row, p.broadcast(p.cast(p.reshape(k, shape=()), dtype=i64), shape=row.shape, axes=()))
    keep = p.less_equal(row, column) if upper else p.less_equal(column, row)
    return p.select(c.at_last(keep, input.shape), input, p.full(0, input.dtype, input.shape))
