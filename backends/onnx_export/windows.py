"""Emission of `window` and `fold`: slices, one per tap of the kernel, along one axis after the other.

The kernel's axes come to lie before the places, `[N, kernel.., C, places..]` where a dot contracts them with C: so a convolution multiplies by the patches
as they lie, and whole planes are copied. A fold adds one slice per tap; with a stride the taps are added by phase and the phases interleaved, so
no zeros are added. Gather and ScatterND would do in one operator each, and take three to ten times as long on onnxruntime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ...algebra.dims import Dim, Shape, ceildiv, is_one, product, simplest
from ...algebra.graph import Value
from ...algebra.types import i64
from .contraction import one_hot_sum
from .emission import Emission
from .ops import Ops, groups, same
from .program import Tensor
from .view import View

__all__ = ["WINDOWS"]

LARGEST_KERNEL = 64  # taps of one axis that are sliced one by one; beyond, they are gathered


def _window(e: Emission, v: Value) -> View:
    axes, sizes, strides, dilations = (v.params[k] for k in ("axes", "sizes", "strides", "dilations"))
    x = e.expanded(e.view(v.operands[0]), axes)
    if not axes:
        return x
    rank = len(x.shape)
    tensor, order = x.tensor, list(x.order)  # names of the tensor's axes: the value's, its kernel axes from `rank` on
    front = _front(e, v, order)
    for i in reversed(range(len(axes))):  # the last axis first: what is copied of the others is in long runs
        place = order.index(axes[i])
        if same(sizes[i], 1) and strides[i] == 1:
            continue
        if _is_tiling(sizes[i], strides[i], dilations[i]):
            tensor = _tiles(e.ops, tensor, place, sizes[i], v.shape[axes[i]])
            order.insert(place + 1, rank + i)
        elif isinstance(sizes[i], int) and sizes[i] <= LARGEST_KERNEL:
            tensor = _stacked(e.ops, taps(e.ops, tensor, place, sizes[i], strides[i], dilations[i]), front, place)
            order.insert(front, rank + i)
        else:
            tensor = _gathered(e.ops, tensor, place, v.shape[axes[i]], sizes[i], strides[i], dilations[i])
            order[place : place + 1] = [rank + i, axes[i]]
    return View.of(tensor, order, v.shape)


def _front(e: Emission, v: Value, order: Sequence[int]) -> int:
    """Where the kernel's axes go: before the axes that a dot contracts along with them, at the very front where no dot does."""
    first = min(order.index(a) for a in v.params["axes"])
    dots = list(reached(e, v, "dot"))
    if not dots:
        return 0
    contracted = [{a for a, b in axes.items() if b in u.params["contract"][side]} for u, side, axes in dots]
    while first > 0 and any(order[first - 1] in c for c in contracted) and not _counts(order[first - 1], contracted):
        first -= 1
    return first


def _counts(axis: int, contracted: Sequence[set[int]]) -> bool:
    """Whether the axis is a batch: what a weight gradient sums over and the forward pass does not."""
    return axis == 0 and not all(axis in c for c in contracted)


def reached(e: Emission, v: Value, primitive: str) -> Iterator[tuple[Value, int, dict[int, int]]]:
    """The consumers of a kind, through transposes and reshapes too: each with the operand's place, and its axes by those of `v` where they are whole."""
    stack = [(v, {a: a for a in range(v.rank)})]
    while stack:
        value, axes = stack.pop()
        for u in dict.fromkeys(e.users.get(id(value), ())):
            match u.primitive.name:
                case name if name == primitive:
                    yield from ((u, i, axes) for i, o in enumerate(u.operands) if o is value)
                case "transpose":
                    stack.append((u, {a: u.params["perm"].index(b) for a, b in axes.items()}))
                case "reshape":
                    kept = _kept(value.shape, u.shape)
                    stack.append((u, {a: kept[b] for a, b in axes.items() if b in kept}))


def _kept(before: Shape, after: Shape) -> dict[int, int]:
    """The axes that a reshape leaves whole, axes of size 1 aside."""
    found = {}
    for a, b in groups(before, after):
        a, b = ([i for i in run if not is_one(shape[i])] for run, shape in ((a, before), (b, after)))
        if len(a) == len(b) == 1:
            found[a[0]] = b[0]
    return found


def _stacked(ops: Ops, pieces: Sequence[Tensor], front: int, place: int) -> Tensor:
    """The pieces side by side on a new axis at `front`, joined along the axis that is there, so that none is copied before."""
    x = pieces[0]
    if front == place:
        return ops.concat([ops.unsqueeze(t, [front]) for t in pieces], front)
    joined = ops.concat(pieces, front)
    return ops.reshape(joined, (*x.shape[:front], len(pieces), *x.shape[front:]))


def _is_tiling(size: Dim, stride: int, dilation: int) -> bool:
    return isinstance(size, int) and size > 1 and size == stride and dilation == 1


def _tiles(ops: Ops, x: Tensor, place: int, size: int, count: Dim) -> Tensor:
    """Windows that touch and do not overlap: the axis cut in pieces."""
    whole = ops.slice(x, [place], [0], [simplest(count * size)], [1])
    return ops.reshape(whole, (*x.shape[:place], count, size, *x.shape[place + 1 :]))


def taps(ops: Ops, x: Tensor, place: int, size: int, stride: int, dilation: int) -> list[Tensor]:
    """The elements under each tap of every window. The limits are constants counted from the end, whatever the extent is."""
    reach = dilation * (size - 1)
    starts = [k * dilation for k in range(size)]
    return [ops.slice(x, [place], [s], [simplest(x.shape[place] - reach + s)], [stride]) for s in starts]


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
    for i in range(len(axes)):  # the first axis first: its taps are long runs
        place, tap = order.index(axes[i]), order.index(rank + i)
        size = x.shape[rank + i]
        if not isinstance(size, int):
            tensor, order = _scattered(e.ops, tensor, order, axes[i], rank + i, strides[i], dilations[i], extents[i])
            continue
        if _is_tiling(size, strides[i], dilations[i]) and tap == place + 1:
            tensor = _untiled(e.ops, tensor, place, size, extents[i])
        else:
            tensor = _added(e.ops, tensor, place, tap, size, strides[i], dilations[i], extents[i])
        order.pop(tap)
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


def _added(ops: Ops, x: Tensor, place: int, tap: int, size: int, stride: int, dilation: int, extent: Dim) -> Tensor:
    """The sum over taps of the elements put back at `place * stride + tap * dilation`."""
    at = place - (tap < place)
    pieces = [ops.squeeze(ops.slice(x, [tap], [k], [k + 1], [1]), [tap]) for k in range(size)]
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
    return ops.slice(joined, [at], [0], [extent], [1])


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
