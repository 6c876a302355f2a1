"""Resampling: Resize and Upsample along axes, GridSample and AffineGrid at points.

Resizing is separable. Along one axis each new element is a weighted sum of a few old ones; places and weights are written once, as arithmetic on
`iota` in double, and evaluated at once where the sizes are known: then the axis is a `dot` with a constant matrix, or a plain repetition or slice.
Otherwise the arithmetic stays in the graph, around a `gather`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import sympy

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.dims import Dim, Shape, equal, floordiv, maybe_equal, product, simplest
from ....algebra.errors import InconclusiveDim
from ....algebra.graph import Value
from ....algebra.types import DType, bool_, f32, f64, i64
from ..context import Unsupported, require_equal
from ..registry import Static, known, lowers
from .activation import axis_of

DENSE = 1 << 22  # elements of the largest constant matrix


def same(a: Dim, b: Dim) -> bool:
    """Whether two sizes are equal for every assignment."""
    try:
        return equal(a, b)
    except InconclusiveDim:
        return False


# ---- arithmetic on vectors of places -----------------------------------------------------------------------------------------------------


def size_as(d: Dim, shape: Shape, dtype: DType = f64) -> Value:
    """A size repeated over a shape."""
    if isinstance(d, int):
        return p.full(d, dtype, shape)
    return p.broadcast(p.cast(p.dim(d), dtype=dtype), shape=shape, axes=())


def places(size: Dim) -> Value:
    """0, 1, ... in double."""
    return p.cast(p.iota(size), dtype=f64)


def within(x: Value, low: Value, high: Value) -> Value:
    """`x` between two bounds, its derivative 0 at and outside them."""
    return p.select(p.less_equal(x, low), low, p.select(p.less_equal(high, x), high, x))


@dataclass(frozen=True, slots=True)
class Axis:
    """How one axis is resized: its old and new size, `new / old` as it counts, the new size as a fraction, and the crop (start and end)."""

    axis: int
    old: Dim
    new: Dim
    scale: Value
    width: Value
    crop: tuple[Value, Value] | None

    def over(self, scalar: Value, shape: Shape | None = None) -> Value:
        return p.broadcast(scalar, shape=(self.new,) if shape is None else shape, axes=())

    @property
    def factor(self) -> float | None:
        """The scale, where it is a known number."""
        found = known(self.scale)
        return None if found is None or found.dtype == object else float(found)


def half_pixel(a: Axis, o: Value) -> Value:
    return c.plus(p.div(c.plus(o, 0.5), a.over(a.scale)), -0.5)


def half_pixel_symmetric(a: Axis, o: Value) -> Value:
    adjustment = p.div(size_as(a.new, (a.new,)), a.over(a.width))
    offset = p.mul(c.scale(size_as(a.old, (a.new,)), 0.5), c.plus(p.neg(adjustment), 1))
    return p.add(offset, half_pixel(a, o))


def tf_half_pixel_for_nn(a: Axis, o: Value) -> Value:
    return p.div(c.plus(o, 0.5), a.over(a.scale))


def pytorch_half_pixel(a: Axis, o: Value) -> Value:
    single = p.equal(size_as(a.new, (a.new,)), p.number(1, o))
    return p.select(single, p.number(0, o), half_pixel(a, o))


def align_corners(a: Axis, o: Value) -> Value:
    spread = c.plus(a.over(a.width), -1)
    single = p.equal(spread, p.number(0, o))
    ends = c.plus(size_as(a.old, (a.new,)), -1)
    return p.select(single, p.number(0, o), p.div(p.mul(o, ends), p.select(single, p.number(1, o), spread)))


def asymmetric(a: Axis, o: Value) -> Value:
    return p.div(o, a.over(a.scale))


def tf_crop_and_resize(a: Axis, o: Value) -> Value:
    if a.crop is None:
        raise Unsupported("tf_crop_and_resize needs the input roi")
    start, end = (a.over(v) for v in a.crop)
    ends = c.plus(size_as(a.old, (a.new,)), -1)
    spread = c.plus(a.over(a.width), -1)
    single = p.equal(spread, p.number(0, o))
    span = p.mul(c.sub(end, start), ends)
    moved = p.div(p.mul(o, span), p.select(single, p.number(1, o), spread))
    return p.add(p.mul(start, ends), p.select(single, c.scale(span, 0.5), moved))


COORDINATES: dict[str, Callable[[Axis, Value], Value]] = {
    "half_pixel": half_pixel,
    "half_pixel_symmetric": half_pixel_symmetric,
    "pytorch_half_pixel": pytorch_half_pixel,
    "align_corners": align_corners,
    "asymmetric": asymmetric,
    "tf_half_pixel_for_nn": tf_half_pixel_for_nn,
    "tf_crop_and_resize": tf_crop_and_resize,
}

NEAREST: dict[str, Callable[[Value], Value]] = {
    "round_prefer_floor": lambda x: c.ceil(c.plus(x, -0.5)),
    "round_prefer_ceil": lambda x: p.floor(c.plus(x, 0.5)),
    "floor": p.floor,
    "ceil": c.ceil,
}


# ---- weights -----------------------------------------------------------------------------------------------------------------------------


def triangle(t: Value) -> Value:
    """`max(1 - |t|, 0)`."""
    return c.relu(c.plus(p.neg(p.abs(t)), 1))


def cubic(t: Value, a: float) -> Value:
    """The cubic convolution kernel (Keys 1981, equation 4)."""
    t = p.abs(t)
    near = c.plus(p.mul(c.square(t), c.plus(c.scale(t, a + 2), -(a + 3))), 1)
    far = c.plus(p.mul(t, c.plus(p.mul(t, c.plus(c.scale(t, a), -5 * a)), 8 * a)), -4 * a)
    one, two = p.number(1, t), p.number(2, t)
    return p.select(p.less_equal(t, one), near, p.select(p.less(t, two), far, p.number(0, t)))


@dataclass(frozen=True, slots=True)
class Taps:
    """For each new element the places (int64, inside the axis) and weights of old ones: `[new, taps]` both."""

    places: Value
    weights: Value


def taps_of(a: Axis, x: Value, kernel: Callable[[Value], Value], radius: int, antialias: bool, exclude: bool) -> Taps:
    """The elements around x within the kernel's radius, stretched where `antialias` makes smaller; the edge repeats, or is left out."""
    stretch = 1.0
    if antialias:
        if a.factor is None:
            raise Unsupported("antialias needs a scale that is known when the model is read; bind the sizes with dims")
        stretch = min(a.factor, 1.0)
    first = math.floor(-radius / stretch) + 1
    count = 2 - 2 * first if antialias else 2 * radius
    shape = (a.new, count)
    offsets = p.broadcast(p.literal(np.arange(first, first + count, dtype=np.float64)), shape=shape, axes=(1,))
    floor = p.floor(x)
    ratio = p.broadcast(c.sub(x, floor), shape=shape, axes=(0,))
    weights = kernel(c.scale(c.sub(offsets, ratio), stretch))
    at = p.add(p.broadcast(floor, shape=shape, axes=(0,)), offsets)
    zero, last = p.number(0, at), c.plus(size_as(a.old, shape), -1)
    if antialias:
        weights = p.div(weights, c.along(p.reduce_sum(weights, axes=(1,)), shape, (1,)))
    if exclude:
        inside = p.logical_and(p.less_equal(zero, at), p.less_equal(at, last))
        weights = p.select(inside, weights, zero)
        weights = p.div(weights, c.along(p.reduce_sum(weights, axes=(1,)), shape, (1,)))
    return Taps(p.cast(within(at, zero, last), dtype=i64), weights)


def number_of(value: Value) -> np.ndarray | None:
    """The array of a value where it is plain numbers."""
    found = known(value)
    return None if found is None or found.dtype == object else found


def weighted(x: Value, a: Axis, taps: Taps) -> Value:
    """`x` resized along an axis by taps."""
    at, weights = number_of(taps.places), number_of(taps.weights)
    if at is not None and weights is not None and isinstance(a.old, int) and at.shape[0] * a.old <= DENSE:
        matrix = np.zeros((at.shape[0], a.old))
        np.add.at(matrix, (np.arange(at.shape[0])[:, None], at), weights)
        y = p.dot(x, p.literal(matrix.astype(x.dtype.numpy)), contract=((a.axis,), (1,)))
        rest = list(range(x.rank - 1))
        return p.transpose(y, perm=(*rest[: a.axis], x.rank - 1, *rest[a.axis :]))
    taken = p.gather(x, taps.places, axis=a.axis)
    factor = p.broadcast(p.cast(taps.weights, dtype=x.dtype), shape=taken.shape, axes=(a.axis, a.axis + 1))
    return p.reduce_sum(p.mul(taken, factor), axes=(a.axis + 1,))


# ---- nearest -----------------------------------------------------------------------------------------------------------------------------


def repeats(a: Axis, mode: str, nearest: str) -> int | None:
    """How often each element is repeated, where element o of the result is element `o // k`, with nothing between."""
    found = None if isinstance(a.old, int) and isinstance(a.new, int) else a.factor
    if found is None or found != int(found) or not same(a.new, simplest(a.old * int(found))):
        return None
    centred = mode in ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel") and nearest.startswith("round")
    return int(found) if centred or (mode == "asymmetric" and nearest == "floor") else None


def picked(x: Value, a: Axis, mode: str, nearest: str) -> Value:
    """`x` with the nearest elements along an axis: repeated or sliced where they are regular, gathered elsewhere."""
    if (k := repeats(a, mode, nearest)) is not None:
        return repeated(x, a.axis, k)
    at = NEAREST[nearest](COORDINATES[mode](a, places(a.new)))
    last = c.plus(size_as(a.old, (a.new,)), -1)
    index = p.cast(within(at, p.number(0, at), last), dtype=i64)
    found = number_of(index)
    if found is not None and isinstance(a.old, int) and found.size:
        k = found.size // a.old
        if k * a.old == found.size and (found == np.arange(found.size) // k).all():
            return repeated(x, a.axis, k)
        step = int(found[1] - found[0]) if found.size > 1 else 1
        if step > 0 and (found == found[0] + step * np.arange(found.size)).all():
            return p.slice(
                x,
                start=tuple(int(found[0]) if i == a.axis else 0 for i in range(x.rank)),
                limit=tuple(int(found[-1]) + 1 if i == a.axis else d for i, d in enumerate(x.shape)),
                stride=tuple(step if i == a.axis else 1 for i in range(x.rank)),
            )
    return p.gather(x, index, axis=a.axis)


def repeated(x: Value, axis: int, k: int) -> Value:
    """Each element along an axis k times in a row."""
    if k == 1:
        return x
    wide = (*x.shape[: axis + 1], k, *x.shape[axis + 1 :])
    y = p.broadcast(x, shape=wide, axes=tuple(i for i in range(x.rank + 1) if i != axis + 1))
    return p.reshape(y, shape=(*x.shape[:axis], simplest(x.shape[axis] * k), *x.shape[axis + 1 :]))


# ---- sizes and scales --------------------------------------------------------------------------------------------------------------------


def scaled_size(old: Dim, scale: Any) -> Dim:
    """`floor(old * scale)`."""
    if isinstance(scale, sympy.Expr):
        size = sympy.simplify(scale * old)
        if not (size.is_Integer or size.is_polynomial()):
            raise Unsupported(f"the scale {scale} gives no whole size; give sizes instead")
        return simplest(size)
    ratio = meant(scale)
    return floordiv(simplest(old * ratio.numerator), ratio.denominator)


def meant(scale: float | Fraction) -> Fraction:
    """The number that a float32 was written for: a ratio of small numbers that rounds to it, else its shortest decimal.

    Runtimes compute places in float32, where 1.5 / 0.6 is 2.5; in double with what float32 holds of 0.6 it would fall short of it.
    """
    if isinstance(scale, Fraction):
        return scale
    near = Fraction(float(scale)).limit_denominator(64)
    held = np.float32(scale)
    return near if np.float32(near.numerator / near.denominator) == held else Fraction(str(held))


def scalar_of(number: Any) -> Value:
    """A number, or an expression of sizes, in double."""
    if isinstance(number, sympy.Expr):
        above, below = sympy.together(number).as_numer_denom()
        return p.div(*(p.cast(p.dim(simplest(v)), dtype=f64) for v in (above, below)))
    return p.literal(float(meant(number)), f64)


def as_double(d: Dim) -> Value:
    return p.literal(float(d), f64) if isinstance(d, int) else p.cast(p.dim(d), dtype=f64)


def entries(array: np.ndarray | None) -> list[Any] | None:
    """The entries of an operand; None where it is absent or empty."""
    if array is None or array.size == 0:
        return None
    return [e if isinstance(e, sympy.Expr) else e.item() if hasattr(e, "item") else e for e in array.ravel()]


def kept_ratio(x: Value, axes: Sequence[int], sizes: list[Any], policy: str) -> tuple[list[Any], list[Any]]:
    """The sizes and the common scale that keep the aspect ratio."""
    olds = [x.shape[a] for a in axes]
    if not all(isinstance(n, int) for n in (*olds, *sizes)):
        raise Unsupported(f"keep_aspect_ratio_policy={policy!r} needs static sizes; bind them with dims")
    ratios = [Fraction(s, d) for s, d in zip(sizes, olds, strict=True)]
    scale = min(ratios) if policy == "not_larger" else max(ratios)
    return [math.floor(scale * d + Fraction(1, 2)) for d in olds], [scale] * len(olds)


def crops(roi: Value | None, count: int) -> list[tuple[Value, Value] | None]:
    """Start and end of each axis."""
    if roi is None or same(roi.shape[0], 0):
        return [None] * count
    require_equal(roi.shape[0], 2 * count, "roi has a start and an end for each axis")

    def entry(i: int) -> Value:
        return p.cast(p.reshape(p.slice(roi, start=(i,), limit=(i + 1,)), shape=()), dtype=f64)

    return [(entry(i), entry(i + count)) for i in range(count)]


def resized_axes(x: Value, axes: Sequence[int], roi: Value | None, scales: np.ndarray | None, sizes: np.ndarray | None,
                 policy: str) -> list[Axis]:  # fmt: skip
    """The axes that change, with their new sizes and scales."""
    given_scales, given_sizes = entries(scales), entries(sizes)
    if (given_scales is None) == (given_sizes is None):
        raise Unsupported("exactly one of scales and sizes must be given")
    given = given_scales if given_scales is not None else given_sizes
    assert given is not None
    if len(given) != len(axes):
        raise Unsupported(f"{len(given)} scales or sizes are given for {len(axes)} axes")
    if given_sizes is not None and policy != "stretch":
        if policy not in ("not_larger", "not_smaller"):
            raise Unsupported(f"keep_aspect_ratio_policy={policy!r} is none of stretch, not_larger, not_smaller")
        given_sizes, given_scales = kept_ratio(x, axes, given_sizes, policy)
    result = []
    for i, (axis, crop) in enumerate(zip(axes, crops(roi, len(axes)), strict=True)):
        old = x.shape[axis]
        new = simplest(given_sizes[i]) if given_sizes is not None else scaled_size(old, given_scales[i])  # type: ignore[index]
        if given_scales is not None:
            scale = scalar_of(given_scales[i])
            width = p.mul(scale, as_double(old))
        else:
            scale, width = p.div(as_double(new), as_double(old)), as_double(new)
        if same(new, old) and not (given_scales is not None and given_scales[i] != 1) and crop is None:
            continue
        result.append(Axis(axis, old, new, scale, width, crop))
    return result


def resized(x: Value, changes: Sequence[Axis], *, mode: str, coordinates: str, nearest: str = "round_prefer_floor", cubic_a: float = -0.75,
            exclude_outside: bool = False, antialias: bool = False, extrapolation: float = 0.0) -> Value:  # fmt: skip
    """`x` resized along axes, one after the other."""
    if coordinates not in COORDINATES:
        raise Unsupported(f"coordinate_transformation_mode={coordinates!r} is none of {', '.join(COORDINATES)}")
    if mode not in ("nearest", "linear", "cubic"):
        raise Unsupported(f"mode={mode!r} is none of nearest, linear, cubic")
    dtype = x.dtype
    y = x if dtype.floating or mode == "nearest" else p.cast(x, dtype=f32)
    for a in changes:
        if mode == "nearest":
            y = picked(y, a, coordinates, nearest)
            continue
        at = COORDINATES[coordinates](a, places(a.new))
        kernel = triangle if mode == "linear" else lambda t: cubic(t, cubic_a)
        y = weighted(y, a, taps_of(a, at, kernel, 1 if mode == "linear" else 2, antialias, exclude_outside))
    if coordinates == "tf_crop_and_resize" and changes:
        y = p.select(outside_crop(changes, y.shape), p.number(extrapolation, y), y)
    return p.cast(y, dtype=dtype)


def outside_crop(changes: Sequence[Axis], shape: Shape) -> Value:
    """Where any coordinate lies outside the old tensor."""
    result = p.full(False, bool_, shape)
    for a in changes:
        at = tf_crop_and_resize(a, places(a.new))
        outside = p.logical_or(p.less(at, p.number(0, at)), p.less(c.plus(size_as(a.old, (a.new,)), -1), at))
        result = p.logical_or(result, p.broadcast(outside, shape=shape, axes=(a.axis,)))
    return result


@lowers("Resize", since=11)
def resize(x: Value, roi: Value | None = None, scales: Static | None = None, sizes: Static | None = None, *, antialias: int = 0,
           axes: tuple[int, ...] | None = None, coordinate_transformation_mode: str = "half_pixel", cubic_coeff_a: float = -0.75,
           exclude_outside: int = 0, extrapolation_value: float = 0.0, keep_aspect_ratio_policy: str = "stretch",
           mode: str = "nearest", nearest_mode: str = "round_prefer_floor") -> Value:  # fmt: skip
    """each element a weighted sum of x's around its place, axis by axis"""
    over = [axis_of(a, x.rank) for a in axes] if axes else list(range(x.rank))
    if nearest_mode not in NEAREST:
        raise Unsupported(f"nearest_mode={nearest_mode!r} is none of {', '.join(NEAREST)}")
    changes = resized_axes(x, over, roi if coordinate_transformation_mode == "tf_crop_and_resize" else None, scales, sizes,
                           keep_aspect_ratio_policy)  # fmt: skip
    return resized(x, changes, mode=mode, coordinates=coordinate_transformation_mode, nearest=nearest_mode, cubic_a=cubic_coeff_a,
                   exclude_outside=bool(exclude_outside), antialias=bool(antialias), extrapolation=extrapolation_value)  # fmt: skip


def resized_simply(x: Value, scales: np.ndarray, mode: str) -> Value:
    """The older form: places are `o / scale`; the nearest is the next above where an axis shrinks, below where it grows."""
    kind = {"linear": "linear", "bilinear": "linear", "nearest": "nearest"}.get(mode)
    if kind is None:
        raise Unsupported(f"mode={mode!r} is neither nearest nor linear")
    y = x
    for a in resized_axes(x, range(x.rank), None, scales, None, "stretch"):
        shrinks = a.factor is not None and a.factor < 1
        y = resized(y, [a], mode=kind, coordinates="asymmetric", nearest="ceil" if shrinks else "floor")
    return y


@lowers("Resize", since=10)
def resize_10(x: Value, scales: Static, *, mode: str = "nearest") -> Value:
    """each element taken, or interpolated, at `o / scale`, axis by axis"""
    return resized_simply(x, scales, mode)


@lowers("Upsample", since=9)
def upsample_9(x: Value, scales: Static, *, mode: str = "nearest") -> Value:
    """each element taken, or interpolated, at `o / scale`, axis by axis"""
    return resized_simply(x, scales, mode)


@lowers("Upsample", since=7)
def upsample_7(x: Value, *, scales: tuple[float, ...], mode: str = "nearest") -> Value:
    """each element taken, or interpolated, at `o / scale`, axis by axis"""
    return resized_simply(x, np.asarray(scales), mode)


# ---- sampling at points ------------------------------------------------------------------------------------------------------------------


def rows_at(x: Value, index: Value) -> Value:
    """`y[n, ..., c] = x[n, c, index[n, ...]]`, the spatial axes of x counted as one."""
    n, space = x.shape[0], product(x.shape[2:])
    rows = p.reshape(p.transpose(x, perm=(0, *range(2, x.rank), 1)), shape=(simplest(n * space), x.shape[1]))
    sample = p.broadcast(p.iota(n), shape=index.shape, axes=(0,))
    start = p.mul(sample, p.broadcast(p.dim(space), shape=index.shape, axes=()))
    return p.gather(rows, p.add(start, index), axis=0)


def flat_place(at: Sequence[Value], spatial: Shape) -> Value:
    """The place of a point in row-major order, from its integer coordinates (as floats, inside the axes)."""
    place: Value | None = None
    for i, value in enumerate(at):
        step = product(spatial[i + 1 :])
        index = p.cast(value, dtype=i64)
        term = index if same(step, 1) else p.mul(index, p.broadcast(p.dim(step), shape=index.shape, axes=()))
        place = term if place is None else p.add(place, term)
    assert place is not None
    return place


@dataclass(frozen=True, slots=True)
class Line:
    """The taps of points along one axis: for each tap the integer coordinate (a float inside the axis) and the weight."""

    places: tuple[Value, ...]
    weights: tuple[Value, ...]


def sampled(x: Value, lines: Sequence[Line]) -> Value:
    """`y[n, ..., c]`: the sum over all combinations of taps of the product of their weights times x there."""
    total: Value | None = None
    for combination in itertools.product(*(range(len(line.places)) for line in lines)):
        at = [line.places[i] for line, i in zip(lines, combination, strict=True)]
        weight = c.times(*(line.weights[i] for line, i in zip(lines, combination, strict=True)))
        rows = rows_at(x, flat_place(at, x.shape[2:]))
        term = p.mul(rows, p.broadcast(p.cast(weight, dtype=x.dtype), shape=rows.shape, axes=tuple(range(weight.rank))))
        total = term if total is None else p.add(total, term)
    assert total is not None
    return total


def reflected(x: Value, low: Value, span: Value) -> Value:
    """`x` mirrored at `low` and `low + span` until it lies between; 0 spans give `low`."""
    empty = p.equal(span, p.number(0, span))
    safe = p.select(empty, p.number(1, span), span)
    y = c.sub(x, low)
    y = p.select(p.less(y, p.number(0, y)), p.neg(y), y)
    rest = p.rem(y, safe)
    flips = p.floor(p.div(p.stop_gradient(y), safe))
    odd = p.equal(p.rem(flips, p.number(2, flips)), p.number(1, flips))
    folded = p.select(odd, c.sub(safe, rest), rest)
    return p.add(p.select(empty, p.number(0, folded), folded), low)


def inside_axis(at: Value, last: Value) -> Value:
    return p.logical_and(p.less_equal(p.number(0, at), at), p.less_equal(at, last))


def mirrored(at: Value, size: Value, align: bool) -> Value:
    """Coordinates reflected at the centres (`align`) or the outer edges of the first and the last element."""
    low = p.number(0 if align else -0.5, at)
    return reflected(at, low, c.plus(size, -1) if align else size)


def grid_line(g: Value, old: Dim, mode: str, padding: str, align: bool) -> Line:
    """The taps along one axis of points at normalised coordinates: -1 and 1 are the centres (`align`) or outer edges of the outermost elements."""
    size, unit = size_as(old, g.shape, g.dtype), c.plus(g, 1)
    last = c.plus(size, -1)
    at = c.scale(p.mul(unit, last), 0.5) if align else c.scale(c.plus(p.mul(unit, size), -1), 0.5)
    return point_line(at, old, mode, padding, align)


def point_line(at: Value, old: Dim, mode: str, padding: str, align: bool = True) -> Line:
    """The taps along one axis of points at coordinates that count its elements."""
    size = size_as(old, at.shape, at.dtype)
    last = c.plus(size, -1)
    zero = p.number(0, at)
    if mode != "cubic":
        if padding == "reflection":
            at = mirrored(at, size, align)
        if padding in ("border", "reflection"):
            at = within(at, zero, last)
    found: tuple[tuple[Value, Value], ...]
    match mode:
        case "nearest":
            found = ((p.round(at), p.number(1, at)),)
        case "linear":
            low = p.floor(at)
            ratio = c.sub(at, low)
            found = ((low, c.plus(p.neg(ratio), 1)), (c.plus(low, 1), ratio))
        case "cubic":
            low = p.floor(at)
            ratio = c.sub(at, low)
            found = tuple((c.plus(low, i), cubic(c.plus(p.neg(ratio), i), -0.75)) for i in (-1, 0, 1, 2))
        case _:
            raise Unsupported(f"mode={mode!r} is none of linear, nearest, cubic")
    kept_places, weights = [], []
    for place, weight in found:
        if mode == "cubic" and padding == "reflection":
            place = mirrored(place, size, align)
        if padding == "zeros":
            weight = p.select(inside_axis(place, last), weight, zero)
        kept_places.append(p.stop_gradient(p.min(p.max(place, zero), last)))
        weights.append(weight)
    return Line(tuple(kept_places), tuple(weights))


def grid_sampled(x: Value, grid: Value, mode: str, padding_mode: str, align_corners: int) -> Value:
    r = x.rank - 2
    if grid.rank != x.rank or not maybe_equal(grid.shape[-1], r):
        raise Unsupported(
            f"the grid of {x.type!r} needs rank {x.rank} and {r} coordinates a point, found {grid.type!r}"
        )
    if padding_mode not in ("zeros", "border", "reflection"):
        raise Unsupported(f"padding_mode={padding_mode!r} is none of zeros, border, reflection")
    require_equal(x.shape[0], grid.shape[0], "one grid per sample")
    wide = x if x.dtype.floating else p.cast(x, dtype=f32)
    lines = []
    for i in range(r):  # the last coordinate is of the first spatial axis
        at = r - 1 - i
        g = p.slice(grid, start=(*(0,) * (r + 1), at), limit=(*grid.shape[:-1], at + 1))
        lines.append(
            grid_line(p.reshape(g, shape=grid.shape[:-1]), x.shape[2 + i], mode, padding_mode, bool(align_corners))
        )
    y = sampled(wide, lines)
    return p.cast(p.transpose(y, perm=(0, r + 1, *range(1, r + 1))), dtype=x.dtype)


@lowers("GridSample", since=16)
def grid_sample_16(
    x: Value, grid: Value, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"
) -> Value:
    """x interpolated at the points of the grid"""
    names = {"bilinear": "linear", "bicubic": "cubic"}
    return grid_sampled(x, grid, names.get(mode, mode), padding_mode, align_corners)


@lowers("GridSample", since=20)
def grid_sample(
    x: Value, grid: Value, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Value:
    """x interpolated at the points of the grid"""
    return grid_sampled(x, grid, mode, padding_mode, align_corners)


@lowers("AffineGrid", since=20)
def affine_grid(theta: Value, size: Static, *, align_corners: int = 0) -> Value:
    """theta (x, y, 1) at places spread evenly from -1 to 1: the centres of the outermost elements (`align_corners`), or their outer edges"""
    shape = tuple(simplest(d) for d in entries(size) or [])
    spatial, r = shape[2:], len(shape) - 2
    if r not in (2, 3):
        raise Unsupported(f"size has {len(shape)} entries, where 4 or 5 are needed")
    require_equal(theta.shape[0], shape[0], "one matrix per sample")
    columns = []
    for i in reversed(range(r)):
        place = p.cast(p.iota(spatial[i]), dtype=theta.dtype)
        extent = size_as(spatial[i], place.shape, theta.dtype)
        if align_corners:
            steps = c.plus(extent, -1)
            single = p.equal(steps, p.number(0, steps))
            spread = c.plus(p.div(c.scale(place, 2), p.select(single, p.number(1, steps), steps)), -1)
            line = p.select(single, p.number(0, spread), spread)
        else:
            line = c.plus(p.div(c.plus(c.scale(place, 2), 1), extent), -1)
        columns.append(p.broadcast(line, shape=(*spatial, 1), axes=(i,)))
    columns.append(p.full(1, theta.dtype, (*spatial, 1)))
    y = p.dot(theta, p.concat(*columns, axis=r), contract=((2,), (r,)))
    return p.transpose(y, perm=(0, *range(2, r + 2), 1))
