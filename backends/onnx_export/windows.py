"""Emission of `window` and `fold`: slices, one per tap of the kernel, along one axis after the other.

The taps of a window come to lie before its places: `[.., kernel.., .., places..]`, which is how a convolution multiplies by them without moving
them again. A fold adds one slice per tap; with a stride the taps are added by phase and the phases interleaved, so no zeros are added.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...algebra.dims import Dim, ceildiv, product, simplest
from ...algebra.graph import Value
from ...algebra.types import i64
from .contraction import one_hot_sum
from .emission import Emission
from .ops import Ops, same
from .program import Tensor
from .view import View

__all__ = ["WINDOWS"]

LARGEST_KERNEL = 64  # taps of one axis that are sliced one by one; beyond, they are gathered


def _window(e: Emission, v: Value) -> View:
    axes, sizes = v.params["axes"], v.params["sizes"]
    strides, dilations = v.params["strides"], v.params["dilations"]
    x = e.expanded(e.view(v.operands[0]), axes)
    rank = len(x.shape)
    tensor, order = x.tensor, list(x.order)  # names of the tensor's axes: the value's, its kernel axes from `rank` on
    for i, a in enumerate(axes):
        if same(sizes[i], 1) and strides[i] == 1:
            continue
        place = order.index(a)
        first = min(order.index(b) for b in axes)
        if _is_tiling(sizes[i], strides[i], dilations[i]):
            tensor = _tiles(e.ops, tensor, place, sizes[i], v.shape[a])
            order.insert(place + 1, rank + i)
        elif isinstance(sizes[i], int) and sizes[i] <= LARGEST_KERNEL:
            taps = [_tap(e.ops, tensor, place, k, sizes[i], strides[i], dilations[i]) for k in range(sizes[i])]
            tensor = e.ops.concat([e.ops.unsqueeze(t, [first]) for t in taps], first)
            order.insert(first, rank + i)
        else:
            tensor = _gathered(e.ops, tensor, place, v.shape[a], sizes[i], strides[i], dilations[i])
            order[place : place + 1] = [rank + i, a]
    return View.of(tensor, order, v.shape)


def _is_tiling(size: Dim, stride: int, dilation: int) -> bool:
    return isinstance(size, int) and size > 1 and size == stride and dilation == 1


def _tiles(ops: Ops, x: Tensor, place: int, size: int, count: Dim) -> Tensor:
    """Windows that touch and do not overlap: the axis cut in pieces."""
    whole = ops.slice(x, [place], [0], [simplest(count * size)], [1])
    return ops.reshape(whole, (*x.shape[:place], count, size, *x.shape[place + 1 :]))


def _tap(ops: Ops, x: Tensor, place: int, k: int, size: int, stride: int, dilation: int) -> Tensor:
    """The elements under one tap of every window. The limit is a constant counted from the end, whatever the extent is."""
    reach = dilation * (size - 1) + 1
    start = k * dilation
    return ops.slice(x, [place], [start], [simplest(x.shape[place] - reach + start + 1)], [stride])


def _gathered(ops: Ops, x: Tensor, place: int, count: Dim, size: Dim, stride: int, dilation: int) -> Tensor:
    """Taps at computed places: `[.., size, count, ..]`."""
    starts = ops.binary("Mul", ops.iota(count), ops.number(stride, i64))
    steps = ops.binary("Mul", ops.unsqueeze(ops.iota(size), [1]), ops.number(dilation, i64))
    if isinstance(count, int) and isinstance(size, int):
        at = ops.constant(np.arange(count)[None, :] * stride + np.arange(size)[:, None] * dilation)
    else:
        at = ops.binary("Add", steps, starts)
    return ops.gather(x, at, place)


def _fold(e: Emission, v: Value) -> View:
    axes, strides, dilations = v.params["axes"], v.params["strides"], v.params["dilations"]
    extents = v.params["extents"]
    rank = v.rank
    x = e.view(v.operands[0])
    x = e.expanded(x, [*axes, *range(rank, len(x.shape))])
    tensor, order = x.tensor, list(x.order)
    for i in reversed(range(len(axes))):
        place, taps = order.index(axes[i]), order.index(rank + i)
        size = x.shape[rank + i]
        if not isinstance(size, int):
            tensor, order = _scattered(e.ops, tensor, order, axes[i], rank + i, strides[i], dilations[i], extents[i])
            continue
        if _is_tiling(size, strides[i], dilations[i]) and taps == place + 1:
            tensor = _untiled(e.ops, tensor, place, size, extents[i])
        else:
            tensor = _added(e.ops, tensor, place, taps, size, strides[i], dilations[i], extents[i])
        order.pop(taps)
    return View.of(tensor, order, v.shape)


def _untiled(ops: Ops, x: Tensor, place: int, size: int, extent: Dim) -> Tensor:
    """Tiles side by side, and zeros for what no tile reached."""
    count = x.shape[place]
    joined = ops.reshape(x, (*x.shape[:place], simplest(count * size), *x.shape[place + 2 :]))
    return _lengthened(ops, joined, place, extent)


def _lengthened(ops: Ops, x: Tensor, place: int, extent: Dim) -> Tensor:
    missing = simplest(extent - x.shape[place])
    if same(missing, 0):
        return x
    zeros = [0] * x.rank
    return ops.pad(x, zeros, [missing if a == place else 0 for a in range(x.rank)])


def _added(ops: Ops, x: Tensor, place: int, taps: int, size: int, stride: int, dilation: int, extent: Dim) -> Tensor:
    """The sum over taps of the elements put back at `place * stride + tap * dilation`."""
    at = place - (taps < place)
    pieces = [ops.squeeze(ops.slice(x, [taps], [k], [k + 1], [1]), [taps]) for k in range(size)]
    count = pieces[0].shape[at] if pieces else 0
    length = ceildiv(extent, stride)  # of one phase
    phases: list[Tensor | None] = [None] * stride
    for k, piece in enumerate(pieces):
        shift, phase = divmod(k * dilation, stride)
        low = [shift if a == at else 0 for a in range(piece.rank)]
        high = [simplest(length - count - shift) if a == at else 0 for a in range(piece.rank)]
        moved = ops.pad(piece, low, high)
        before = phases[phase]
        phases[phase] = moved if before is None else ops.binary("Add", before, moved)
    if stride == 1 and phases[0] is not None:
        return phases[0]
    filled = next(t for t in phases if t is not None)
    none = ops.expand(ops.number(0, x.dtype), filled.shape)
    lined = ops.concat([ops.unsqueeze(none if t is None else t, [at + 1]) for t in phases], at + 1)
    joined = ops.reshape(lined, (*filled.shape[:at], product((length, stride)), *filled.shape[at + 1 :]))
    result = ops.slice(joined, [at], [0], [extent], [1])
    return result


def _scattered(
    ops: Ops, x: Tensor, order: list[int], axis: int, kernel: int, stride: int, dilation: int, extent: Dim
) -> tuple[Tensor, list[int]]:
    """Where the number of taps is symbolic: a MatMul with the matrix that says which place each tap adds to."""
    rest = [a for a in order if a not in (axis, kernel)]
    x = ops.transpose(x, [order.index(a) for a in (*rest, axis, kernel)])
    count, size = x.shape[-2:]
    starts = ops.binary("Mul", ops.unsqueeze(ops.iota(count), [1]), ops.number(stride, i64))
    at = ops.binary("Add", starts, ops.binary("Mul", ops.iota(size), ops.number(dilation, i64)))
    flat = ops.reshape(x, (*x.shape[:-2], product((count, size))))
    return one_hot_sum(ops, flat, ops.reshape(at, (product((count, size)),)), extent), [*rest, axis]


WINDOWS: dict[str, Callable[[Emission, Value], View]] = {"window": _window, "fold": _fold}
