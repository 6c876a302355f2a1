"""Regions of interest, and convolution at shifted places."""

from __future__ import annotations

import math

import numpy as np

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.dims import Dim, Shape, product, simplest
from ....algebra.graph import Value
from ....algebra.types import i64
from ..context import Unsupported, require_equal
from ..registry import lowers
from .convolution import Ints, by_group, kernel_of, spatial_rank, weighted_patches, windows, with_bias
from .resize import Line, flat_place, point_line, sampled, size_as, triangle, within


def column(x: Value, at: int) -> Value:
    """One column of a matrix."""
    return p.reshape(p.slice(x, start=(0, at), limit=(x.shape[0], at + 1)), shape=(x.shape[0],))


def counted(size: Dim, shape: Shape, axis: int, like: Value) -> Value:
    """0, 1, ... along an axis of a shape, in the dtype of another tensor."""
    return p.broadcast(p.cast(p.iota(size), dtype=like.dtype), shape=shape, axes=(axis,))


# ---- RoiAlign ----------------------------------------------------------------------------------------------------------------------------


def sample_places(start: Value, extent: Value, bins: int, size: Dim, ratio: int) -> tuple[Value, Value, Value]:
    """Where the bins of a region are sampled along one axis: places `[R, bins, samples]`, which of them count, and how many each region has.

    Without a ratio there are `ceil(extent / bins)`. They lie at least half an element apart, so at most `2 (size + 1) + 1` of a bin can fall
    inside the axis; those before it are skipped, and those behind contribute nothing.
    """
    regions = start.shape[0]
    width = c.scale(extent, 1 / bins)
    number = p.number(ratio, width) if ratio else c.ceil(p.stop_gradient(width))
    samples: Dim = ratio or simplest(2 * size + 4)
    shape = (regions, bins, samples)

    def spread(v: Value) -> Value:
        return p.broadcast(v, shape=shape, axes=(0,))

    first = p.add(spread(start), p.mul(counted(bins, shape, 1, start), spread(width)))
    step = spread(p.div(width, p.select(p.less(p.number(0, number), number), number, p.number(1, number))))
    index = counted(samples, shape, 2, start)
    if not ratio:
        positive = p.less(p.number(0, step), step)
        ahead = p.div(c.sub(p.number(-1, first), first), p.select(positive, step, p.number(1, step)))
        skipped = p.stop_gradient(c.relu(p.floor(c.plus(ahead, -0.5))))
        index = p.add(index, skipped)
    return p.add(first, p.mul(c.plus(index, 0.5), step)), p.less(index, spread(number)), number


def inside(at: Value, size: Dim) -> Value:
    """Which places are sampled at all: those no more than one element before or behind the axis."""
    return p.logical_and(p.less_equal(p.number(-1, at), at), p.less_equal(at, size_as(size, at.shape, at.dtype)))


def on_axis(at: Value, size: Dim) -> Value:
    return within(at, p.number(0, at), c.plus(size_as(size, at.shape, at.dtype), -1))


def averaging(start: Value, extent: Value, bins: int, size: Dim, ratio: int) -> Value:
    """`[R, bins, size]`: the weight of each element of an axis in the mean of a bin's samples, by linear interpolation."""
    at, counts, number = sample_places(start, extent, bins, size, ratio)
    shape = (*at.shape, size)
    place = p.broadcast(on_axis(at, size), shape=shape, axes=(0, 1, 2))
    used = p.broadcast(p.logical_and(counts, inside(at, size)), shape=shape, axes=(0, 1, 2))
    weight = triangle(c.sub(place, counted(size, shape, 3, at)))
    total = p.reduce_sum(p.select(used, weight, p.number(0, weight)), axes=(2,))
    share = p.select(p.less(p.number(1, number), number), number, p.number(1, number))
    return p.div(total, p.broadcast(share, shape=total.shape, axes=(0,)))


def neighbours(start: Value, extent: Value, bins: int, size: Dim, ratio: int) -> tuple[tuple[Value, Value], ...]:
    """The two elements around each sample and their weights, `[R, bins samples]` each."""
    if not ratio:
        raise Unsupported(
            "mode='max' with sampling_ratio=0: how many points are compared depends on data; give a ratio"
        )
    at, _, _ = sample_places(start, extent, bins, size, ratio)
    flat = p.reshape(at, shape=(at.shape[0], product(at.shape[1:])))
    seen, place = inside(flat, size), on_axis(flat, size)
    last = c.plus(size_as(size, flat.shape, flat.dtype), -1)
    low = p.floor(p.stop_gradient(place))
    high = p.min(c.plus(low, 1), last)
    ahead = c.sub(place, low)
    zero = p.number(0, ahead)
    return (low, p.select(seen, c.plus(p.neg(ahead), 1), zero)), (high, p.select(seen, ahead, zero))


def largest(
    x: Value,
    batch: Value,
    rows: tuple[tuple[Value, Value], ...],
    columns: tuple[tuple[Value, Value], ...],
    bins: tuple[int, int],
) -> Value:
    """The largest over each bin of the weighted elements around its samples: `[R, bins, C]`, as ONNX's reference has it (not of interpolated values)."""
    (height, width), regions = x.shape[2:], batch.shape[0]
    shape = (regions, rows[0][0].shape[1], columns[0][0].shape[1])
    flat = p.reshape(p.transpose(x, perm=(0, 2, 3, 1)), shape=(product((x.shape[0], height, width)), x.shape[1]))
    sample = p.broadcast(
        p.mul(batch, p.broadcast(p.dim(product((height, width))), shape=batch.shape, axes=())), shape=shape, axes=(0,)
    )
    best: Value | None = None
    for (row, of_row), (at, of_column) in ((r, k) for r in rows for k in columns):
        y, z = p.broadcast(row, shape=shape, axes=(0, 1)), p.broadcast(at, shape=shape, axes=(0, 2))
        taken = p.gather(flat, p.add(sample, flat_place((y, z), (height, width))), axis=0)
        weight = p.mul(p.broadcast(of_row, shape=shape, axes=(0, 1)), p.broadcast(of_column, shape=shape, axes=(0, 2)))
        term = p.mul(taken, p.broadcast(weight, shape=taken.shape, axes=(0, 1, 2)))
        best = term if best is None else p.max(best, term)
    assert best is not None
    split = tuple(simplest(n) for n in (shape[1] / bins[0], shape[2] / bins[1]))
    parted = p.reshape(best, shape=(regions, bins[0], split[0], bins[1], split[1], x.shape[1]))
    return p.transpose(p.reduce_max(parted, axes=(2, 4), ties="first"), perm=(0, 3, 1, 2))


def roi_aligned(x: Value, rois: Value, batch_indices: Value, mode: str, bins: tuple[int, int], ratio: int, scale: float,
                half_pixel: bool) -> Value:  # fmt: skip
    require_equal(rois.shape[0], batch_indices.shape[0], "each region names its sample")
    batch = p.cast(batch_indices, dtype=i64)
    left, top, right, bottom = (c.plus(c.scale(column(rois, i), scale), -0.5 if half_pixel else 0.0) for i in range(4))
    lines = []
    for start, end, count, size in ((top, bottom, bins[0], x.shape[2]), (left, right, bins[1], x.shape[3])):
        extent = c.sub(end, start)
        if not half_pixel:
            extent = p.max(extent, p.number(1, extent))
        lines.append((start, extent, count, size, ratio))
    if mode == "max":
        return largest(x, batch, neighbours(*lines[0]), neighbours(*lines[1]), bins)
    if mode != "avg":
        raise Unsupported(f"mode={mode!r} is neither 'avg' nor 'max'")
    rows, columns = (p.cast(averaging(*line), dtype=x.dtype) for line in lines)
    taken = p.gather(x, batch, axis=0)
    y = p.dot(taken, columns, contract=((3,), (2,)), batch=((0,), (0,)))
    return p.transpose(p.dot(y, rows, contract=((2,), (2,)), batch=((0,), (0,))), perm=(0, 1, 3, 2))


@lowers("RoiAlign", since=10)
def roi_align_10(x: Value, rois: Value, batch_indices: Value, *, mode: str = "avg", output_height: int = 1, output_width: int = 1,
                 sampling_ratio: int = 0, spatial_scale: float = 1.0) -> Value:  # fmt: skip
    """the mean (or largest) of x at points spread over each bin of each region, by linear interpolation"""
    return roi_aligned(
        x, rois, batch_indices, mode, (output_height, output_width), sampling_ratio, spatial_scale, False
    )


@lowers("RoiAlign", since=16)
def roi_align(x: Value, rois: Value, batch_indices: Value, *, coordinate_transformation_mode: str = "half_pixel", mode: str = "avg",
              output_height: int = 1, output_width: int = 1, sampling_ratio: int = 0, spatial_scale: float = 1.0) -> Value:  # fmt: skip
    """the mean (or largest) of x at points spread over each bin of each region, by linear interpolation"""
    if coordinate_transformation_mode not in ("half_pixel", "output_half_pixel"):
        raise Unsupported(
            f"coordinate_transformation_mode={coordinate_transformation_mode!r} is neither 'half_pixel' nor 'output_half_pixel'"
        )
    half = coordinate_transformation_mode == "half_pixel"
    return roi_aligned(x, rois, batch_indices, mode, (output_height, output_width), sampling_ratio, spatial_scale, half)


# ---- MaxRoiPool --------------------------------------------------------------------------------------------------------------------------


def members(start: Value, end: Value, bins: int, size: Dim) -> Value:
    """`[R, bins, size]`: which elements of an axis lie in each bin of each region, whose bounds are whole numbers, both inside."""
    shape = (start.shape[0], bins, size)
    extent = p.max(c.plus(c.sub(end, start), 1), p.number(1, start))
    width = p.broadcast(c.scale(extent, 1 / bins), shape=shape, axes=(0,))
    first, bin_ = p.broadcast(start, shape=shape, axes=(0,)), counted(bins, shape, 1, start)
    low = p.add(p.floor(p.mul(bin_, width)), first)
    high = p.add(c.ceil(p.mul(c.plus(bin_, 1), width)), first)
    place = counted(size, shape, 2, start)
    return p.logical_and(p.less_equal(low, place), p.less(place, high))


def rounded(x: Value) -> Value:
    """The nearest whole number, halves away from 0."""
    return p.mul(p.sign(x), p.floor(c.plus(p.abs(x), 0.5)))


@lowers("MaxRoiPool", since=1)
def max_roi_pool(x: Value, rois: Value, *, pooled_shape: Ints, spatial_scale: float = 1.0) -> Value:
    """the largest of x in each bin of each region; 0 of an empty bin"""
    batch = p.cast(column(rois, 0), dtype=i64)
    left, top, right, bottom = (rounded(c.scale(column(rois, i), spatial_scale)) for i in range(1, 5))
    (height, width), (rows, columns) = x.shape[2:], pooled_shape
    taken = p.gather(x, batch, axis=0)
    regions, channels = rois.shape[0], x.shape[1]
    lowest = -math.inf
    wide = (regions, channels, height, columns, width)
    in_column = p.broadcast(members(left, right, columns, width), shape=wide, axes=(0, 3, 4))
    spread = p.broadcast(taken, shape=wide, axes=(0, 1, 2, 4))
    best = p.reduce_max(p.select(in_column, spread, p.number(lowest, spread)), axes=(4,), ties="first")
    tall = (regions, channels, rows, height, columns)
    in_row = p.broadcast(members(top, bottom, rows, height), shape=tall, axes=(0, 2, 3))
    spread = p.broadcast(best, shape=tall, axes=(0, 1, 3, 4))
    y = p.reduce_max(p.select(in_row, spread, p.number(lowest, spread)), axes=(3,), ties="first")
    return p.select(p.equal(y, p.number(lowest, y)), p.number(0, y), y)


# ---- DeformConv --------------------------------------------------------------------------------------------------------------------------


@lowers("DeformConv", since=19)
def deform_conv(x: Value, w: Value, offset: Value, b: Value | None = None, mask: Value | None = None, *, dilations: Ints | None = None,
                group: int = 1, kernel_shape: Ints | None = None, offset_group: int = 1, pads: Ints | None = None,
                strides: Ints | None = None) -> Value:  # fmt: skip
    """Conv whose taps are at o stride + k dilation - pad + offset[k, o], by linear interpolation (0 outside), each times mask[k, o]"""
    n = spatial_rank(x, "DeformConv")
    kernel = kernel_of(w, kernel_shape)
    if not all(isinstance(k, int) for k in kernel):
        raise Unsupported("the kernel's sizes must be known; bind them with dims")
    at = windows(x.shape[2:], kernel, strides, dilations, pads, "NOTSET")
    batch, outs = x.shape[0], offset.shape[2:]
    require_equal(offset.shape[0], batch, "there are offsets for each sample")
    require_equal(
        offset.shape[1], offset_group * int(np.prod(kernel)) * n, "there is an offset for each group, tap and axis"
    )
    rows = simplest(batch * offset_group)
    shape = (rows, *kernel, *outs)
    moves = p.reshape(offset, shape=(rows, *kernel, n, *outs))
    lines: list[Line] = []
    for i in range(n):
        move = p.slice(
            moves,
            start=tuple(i if a == n + 1 else 0 for a in range(moves.rank)),
            limit=tuple(i + 1 if a == n + 1 else d for a, d in enumerate(moves.shape)),
        )
        tap = c.scale(counted(kernel[i], shape, 1 + i, offset), at.dilations[i])
        out = c.plus(c.scale(counted(outs[i], shape, 1 + n + i, offset), at.strides[i]), -float(at.low[i]))
        lines.append(
            point_line(p.add(p.reshape(move, shape=shape), p.add(tap, out)), x.shape[2 + i], "linear", "zeros")
        )
    moved = by_group(x, 1, offset_group, "the input channels")
    parts = p.reshape(moved, shape=(rows, *moved.shape[2:]))
    taken = sampled(parts, lines)  # [N offset_group, K.., O.., C / offset_group]
    if mask is not None:
        taken = p.mul(
            taken, p.broadcast(p.reshape(mask, shape=shape), shape=taken.shape, axes=tuple(range(len(shape))))
        )
    patches = p.transpose(taken, perm=(0, 2 * n + 1, *range(n + 1, 2 * n + 1), *range(1, n + 1)))
    patches = p.reshape(patches, shape=(batch, x.shape[1], *outs, *kernel))
    if group > 1:
        patches = by_group(patches, 1, group, "the input channels")
    return with_bias(weighted_patches(patches, w, n, group), b)
