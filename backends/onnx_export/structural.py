"""Emission of the primitives that make tensors or move their elements. Broadcasts and transposes are views: no operator until someone needs one."""

from __future__ import annotations

from collections.abc import Callable

from ...algebra.dims import Shape, is_one, is_zero, product, simplest
from ...algebra.graph import Value
from ...algebra.types import TupleType
from .emission import Emission
from .ops import groups, known_at_least, same
from .program import Tensor
from .view import View, whole

__all__ = ["STRUCTURAL"]


def _input(e: Emission, v: Value) -> View:
    return e.views[id(v)]


def _literal(e: Emission, v: Value) -> View:
    return whole(e.ops.program.constant(v.params["value"]))


def _dim(e: Emission, v: Value) -> View:
    return whole(e.ops.dims.scalar(v.params["value"]))


def _iota(e: Emission, v: Value) -> View:
    return whole(e.ops.iota(v.params["size"]))


def _broadcast(e: Emission, v: Value) -> View:
    x, axes = e.view(v.operands[0]), v.params["axes"]
    places = tuple(x.places[axes.index(a)] if a in axes else None for a in range(v.rank))
    return View(x.tensor, places, v.shape)


def _transpose(e: Emission, v: Value) -> View:
    x = e.view(v.operands[0])
    return View(x.tensor, tuple(x.places[i] for i in v.params["perm"]), v.shape)


def _reshape(e: Emission, v: Value) -> View:
    """Runs of axes that only repeat stay out of it; the others are reshaped in order."""
    x, shape = e.view(v.operands[0]), v.shape
    if not x.order:
        return View(x.tensor, (None,) * len(shape), shape)
    if any(is_zero(d) for d in (*x.shape, *shape)):
        return whole(e.ops.reshape(e.real(x), shape))
    runs: list[tuple[list[int], list[int]]] = []
    for before, after in groups(x.shape, shape):
        if before and all(x.places[a] is None for a in before):
            continue  # repeated before, repeated after
        # an axis of size 1 is as good as one that repeats
        taken = [a for a in before if x.places[a] is not None or not is_one(x.shape[a])]
        runs.append((taken, [a for a in after if not is_one(shape[a])]))
    if id(v) not in e.pinned:  # runs may stay in the order in which they lie
        runs.sort(key=lambda run: min((x.places[a] or 0 for a in run[0] if x.places[a] is not None), default=-1))
    given = [a for _, run in runs for a in run]
    tensor = e.full(x, [a for run, _ in runs for a in run])
    return View.of(e.ops.reshape(tensor, tuple(shape[a] for a in given)), given, shape)


def _slice(e: Emission, v: Value) -> View:
    x = e.view(v.operands[0])
    axes = x.order
    spans = [[v.params[k][a] for a in axes] for k in ("start", "limit", "stride")]
    return View(e.ops.slice(x.tensor, range(len(axes)), *spans), x.places, v.shape)


def _reverse(e: Emission, v: Value) -> View:
    x = e.view(v.operands[0])
    places = [x.places[a] for a in v.params["axes"]]
    return View(e.ops.reverse(x.tensor, [a for a in places if a is not None]), x.places, v.shape)


def _pad(e: Emission, v: Value) -> View:
    low, high, interior = v.params["low"], v.params["high"], v.params["interior"]
    touched = [a for a in range(v.rank) if not all(same(d, 0) for d in (low[a], high[a], interior[a]))]
    x = e.expanded(e.view(v.operands[0]), touched)
    places = {axis: place for place, axis in enumerate(x.order)}
    tensor = x.tensor
    for a in touched:
        if not same(interior[a], 0):
            tensor, high = _interleaved(e, tensor, places[a], interior[a], v.params["value"], high, a)
    order = x.order
    padded = e.ops.pad(tensor, [low[a] for a in order], [high[a] for a in order], v.params["value"])
    return View(padded, x.places, v.shape)


def _interleaved(
    e: Emission, x: Tensor, place: int, interior: int, value: float, high: Shape, axis: int
) -> tuple[Tensor, Shape]:
    """`value` between the elements of an axis: a new axis after it is padded and joined to it.

    That leaves `interior` of them behind the last element too, which the pad at the end need not add, or which a Slice takes away.
    """
    n = x.shape[place]
    if is_zero(n):
        return x, high
    ops = e.ops
    last = place == x.rank - 1 and ops.target.slow_moves  # onnxruntime pads single elements slowly, whole tensors not
    at = 0 if last else place + 1
    wide = ops.unsqueeze(x, [at])
    wide = ops.pad(wide, [0] * wide.rank, [interior if i == at else 0 for i in range(wide.rank)], value)
    if last:
        wide = ops.transpose(wide, (*range(1, wide.rank), 0))
    joined = ops.reshape(wide, (*x.shape[:place], product((n, interior + 1)), *x.shape[place + 1 :]))
    if known_at_least(high[axis], interior):
        return joined, (*high[:axis], simplest(high[axis] - interior), *high[axis + 1 :])
    return ops.slice(joined, [place], [0], [simplest(n + (n - 1) * interior)], [1]), high


def _concat(e: Emission, v: Value) -> View:
    axis = v.params["axis"]
    views = [e.view(o) for o in v.operands if not is_zero(o.shape[axis])] or [e.view(v.operands[0])]
    real = [a for a in range(v.rank) if a == axis or any(x.places[a] is not None for x in views)]
    order = e.layout(views, real, id(v) in e.pinned)
    parts = [e.full(x, order) for x in views]
    return View.of(e.ops.concat(parts, order.index(axis)), order, v.shape)


def _item(e: Emission, v: Value) -> View:
    index: int = v.params["index"]
    return e.results[id(v.operands[0])][index]


def _raised(e: Emission, v: Value) -> View | tuple[View, ...]:
    """A node that is one ONNX operator already (of the native profile)."""
    inputs = [e.tensor(o) for o in v.operands]
    types = v.type.items if isinstance(v.type, TupleType) else (v.type,)
    results = [(t.dtype, t.shape) for t in types]
    tensors = e.ops.program.many(v.params["op"], inputs, results, **dict(v.params["attributes"]))
    views = tuple(map(whole, tensors))
    return views if isinstance(v.type, TupleType) else views[0]


STRUCTURAL: dict[str, Callable[[Emission, Value], View | tuple[View, ...]]] = {
    "input": _input,
    "literal": _literal,
    "dim": _dim,
    "iota": _iota,
    "broadcast": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "slice": _slice,
    "reverse": _reverse,
    "pad": _pad,
    "concat": _concat,
    "item": _item,
    "onnx": _raised,
}
