"""Reading and writing at places that are data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.dims import Dim, equal, product, simplest
from ....algebra.errors import DimError, InconclusiveDim
from ....algebra.graph import Value
from ....algebra.types import bool_, f32, i32, i64, u64
from ..context import Node, Unsupported, reading, require_equal, require_same_shape
from ..registry import Gradient, Static, known, lowers
from .math import axis_of
from .shape import dims_of, joined

# ---- places ----------------------------------------------------------------------------------------------------------


def sortable(x: Value) -> Value:
    """Numbers in the same order that runtimes can sort: of uint64, of which they cannot, int64 with the sign bit turned."""
    if x.dtype is not u64:
        return x
    return p.cast(p.bit_xor(x, p.number(1 << 63, x)), dtype=i64)


def plain_known(x: Value) -> np.ndarray | None:
    """What is known of a value, where that is plain numbers."""
    array = known(x)
    return None if array is None or array.dtype == object else array


def _literal(places: np.ndarray) -> Value:
    return p.literal(places.astype(np.int64))


def from_start(i: Value, size: Dim) -> Value:
    """Places in int64, those counted from the end made to count from the start."""
    i = p.cast(i, dtype=i64)
    array = plain_known(i)
    if array is not None and (array >= 0).all():
        return i
    if array is not None and isinstance(size, int):
        return _literal(np.where(array < 0, array + size, array))
    return p.select(p.less(i, p.number(0, i)), p.add(i, p.broadcast(p.dim(size), shape=i.shape, axes=())), i)


def at_places(x: Value, places: Value, axis: int) -> Value:
    """One element of x along an axis for each place."""
    return c.take_along(x, places, axis)


def flat_places(places: Value, data: Sequence[Dim], axis: int) -> Value:
    """Row-major places in a tensor of sizes `data`, of elements that stand at `places` along an axis and where they are along the others."""
    total: Value | None = None
    for a in range(places.rank):
        at = places if a == axis else p.broadcast(p.iota(places.shape[a]), shape=places.shape, axes=(a,))
        step = product(data[a + 1 :])
        term = at if step == 1 else p.mul(at, p.broadcast(p.dim(step), shape=places.shape, axes=()))
        total = term if total is None else p.add(total, term)
    assert total is not None
    return total


def _rows(indices: Value, sizes: Sequence[Dim]) -> Value:
    """Row-major places in `sizes`, of the tuples along the last axis of `indices`."""
    lead = indices.shape[:-1]
    total = p.full(0, i64, lead)
    for j, size in enumerate(sizes):
        start = (*(0 for _ in lead), j)
        part = p.reshape(p.slice(indices, start=start, limit=(*lead, j + 1)), shape=lead)
        term, step = from_start(part, size), product(sizes[j + 1 :])
        term = term if step == 1 else p.mul(term, p.broadcast(p.dim(step), shape=lead, axes=()))
        total = term if j == 0 else p.add(total, term)
    return total


# ---- reading ---------------------------------------------------------------------------------------------------------


@lowers("Gather")
def gather(data: Value, indices: Value, *, axis: int = 0) -> Value:
    """x[.., i, ..] along an axis; the gradient adds up where an index repeats"""
    return p.gather(data, p.cast(indices, dtype=i64), axis=axis_of(axis, data.rank))


@lowers("GatherElements")
def gather_elements(data: Value, indices: Value, *, axis: int = 0) -> Value:
    """One element along an axis for each index"""
    a = axis_of(axis, data.rank)
    return at_places(data, from_start(indices, data.shape[a]), a)


@lowers("GatherND")
def gather_nd(data: Value, indices: Value, *, batch_dims: int = 0) -> Value:
    """x at the tuples along the last axis of the indices"""
    width = indices.shape[-1]
    if not isinstance(width, int) or not 1 <= width <= data.rank - batch_dims:
        raise DimError(f"cannot index {data.type!r} with tuples along the last axis of {indices.type!r}")
    b = batch_dims
    batch = [
        require_equal(x, y, "batch sizes of GatherND") for x, y in zip(data.shape[:b], indices.shape[:b], strict=True)
    ]
    inner = data.shape[b : b + width]
    rows = _rows(indices, inner)
    if b:
        step = p.broadcast(p.dim(product(inner)), shape=rows.shape, axes=())
        own = p.reshape(p.iota(product(batch)), shape=tuple(batch))
        rows = p.add(rows, p.mul(p.broadcast(own, shape=rows.shape, axes=tuple(range(b))), step))
    flat = p.reshape(data, shape=(simplest(product(batch) * product(inner)), *data.shape[b + width :]))
    return p.gather(flat, rows, axis=0)


# ---- writing ---------------------------------------------------------------------------------------------------------


def neutral(reduction: str, x: Value) -> float:
    """What changes nothing: 1 for a product, the least (greatest) number for a maximum (minimum)."""
    if reduction == "mul":
        return 1
    return x.dtype.lowest if reduction == "max" else x.dtype.highest


def _reduce(reduction: str, x: Value, axis: int) -> Value:
    """Over one axis; a tie of a maximum is shared evenly by all that take part, what was there before included (PyTorch's `scatter_reduce`)."""
    match reduction:
        case "mul":
            return p.reduce_prod(x, axes=(axis,))
        case "max":
            return p.reduce_max(x, axes=(axis,))
        case "min":
            return p.reduce_min(x, axes=(axis,))
    raise Unsupported(f"reduction {reduction!r}: none, add, mul, max or min is required")


def written(data: Value, places: Value, updates: Value, reduction: str) -> Value:
    """Rows of `data` (its first axis) with rows of `updates` written at `places`, none negative.

    Of plain writes at one place the last holds where the places are known; ONNX forbids repeated places there.
    """
    if data.dtype is bool_:
        return _written_bools(data, places, updates, reduction)
    size = data.shape[0]
    if reduction == "add":
        return p.add(data, p.scatter_add(updates, places, axis=0, size=size))
    at = plain_known(places)
    if at is not None and isinstance(size, int):
        return _written_known(data, at, updates, reduction)
    if reduction == "none":
        one = p.full(1, f32, places.shape)
        hits = p.scatter_add(one, places, axis=0, size=size)
        return _put(data, c.greater(hits, p.number(0, hits)), p.scatter_add(updates, places, axis=0, size=size))
    count = places.shape[0]
    square = (size, count)
    meet = p.equal(p.broadcast(p.iota(size), shape=square, axes=(0,)), p.broadcast(places, shape=square, axes=(1,)))
    shape = (size, count, *data.shape[1:])
    spread = p.broadcast(updates, shape=shape, axes=tuple(range(1, len(shape))))
    masked = p.select(
        p.broadcast(meet, shape=shape, axes=(0, 1)), spread, p.full(neutral(reduction, data), data.dtype, shape)
    )
    return _reduce(reduction, p.concat(c.unsqueeze(data, (1,)), masked, axis=1), 1)


def _put(data: Value, hit: Value, new: Value) -> Value:
    return p.select(p.broadcast(hit, shape=data.shape, axes=(0,)), new, data)


def _written_bools(data: Value, places: Value, updates: Value, reduction: str) -> Value:
    if reduction not in ("none", "max", "min"):
        raise Unsupported(f"reduction {reduction!r} of bools")
    result = written(c.as_number(data, i32), places, c.as_number(updates, i32), reduction)
    return p.cast(result, dtype=bool_)


def _written_known(data: Value, at: np.ndarray, updates: Value, reduction: str) -> Value:
    """Places known beforehand: one plane for the first write at each place, one for the second, and so on."""
    size = data.shape[0]
    if at.size == 0:
        return data
    planes = _ranks(at if reduction != "none" else at[::-1])
    if reduction == "none":
        planes = [np.sort(at.size - 1 - planes[0])]
    layers = []
    for plane in planes:
        chosen = updates if plane.size == at.size else p.gather(updates, _literal(plane), axis=0)
        new = p.scatter_add(chosen, _literal(at[plane]), axis=0, size=size)
        below = data if reduction == "none" else p.full(neutral(reduction, data), data.dtype, data.shape)
        layers.append(_put(below, _hit(at[plane], size), new))
    if reduction == "none":
        return layers[0]
    return _reduce(reduction, p.concat(*(c.unsqueeze(x, (0,)) for x in (data, *layers)), axis=0), 0)


LARGEST_MASK = 1 << 16  # a larger one is computed, as it would be stored in the model


def _hit(at: np.ndarray, size: int) -> Value:
    """Which of `size` places are among these."""
    if size <= LARGEST_MASK:
        mask = np.zeros(size, np.bool_)
        mask[at] = True
        return p.literal(mask)
    hits = p.scatter_add(p.full(1, f32, at.shape), _literal(at), axis=0, size=size)
    return c.greater(hits, p.number(0, hits))


def _ranks(at: np.ndarray) -> list[np.ndarray]:
    """Positions in `at`: those that meet their place first, those that meet it second, ..."""
    order = np.argsort(at, kind="stable")
    ordered = at[order]
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    start = np.maximum.accumulate(np.where(first, np.arange(at.size), 0))
    rank = np.empty(at.size, np.int64)
    rank[order] = np.arange(at.size) - start
    return [np.flatnonzero(rank == r) for r in range(int(rank.max()) + 1)]


@lowers("ScatterElements")
def scatter_elements(data: Value, indices: Value, updates: Value, *, axis: int = 0, reduction: str = "none") -> Value:
    """x with one update along an axis for each index; a tie of max or min is shared evenly"""
    a = axis_of(axis, data.rank)
    require_same_shape(updates.shape, indices.shape, "one update for each index")
    places = from_start(indices, data.shape[a])
    if reduction in ("mul", "max", "min") and plain_known(places) is None:
        return _written_along(data, places, updates, a, reduction)
    flat = p.reshape(data, shape=(product(data.shape),))
    count = (product(places.shape),)
    at = p.reshape(flat_places(places, data.shape, a), shape=count)
    result = written(flat, at, p.reshape(updates, shape=count), reduction)
    return p.reshape(result, shape=data.shape)


lowers("Scatter")(scatter_elements)


def _written_along(data: Value, places: Value, updates: Value, axis: int, reduction: str) -> Value:
    """Every place of the axis looks at every update of its line. The other axes may be shorter than those of x."""
    rank = data.rank
    part_shape = tuple(d if a == axis else places.shape[a] for a, d in enumerate(data.shape))
    whole = _same(part_shape, data.shape)
    part = data if whole else p.slice(data, start=(0,) * rank, limit=part_shape)
    shape = (*part_shape, places.shape[axis])
    others = tuple(a for a in range(rank) if a != axis)

    def spread(x: Value) -> Value:
        moved = p.transpose(x, perm=(*others, axis))
        return p.broadcast(moved, shape=shape, axes=(*others, rank))

    own = p.broadcast(p.iota(data.shape[axis]), shape=shape, axes=(axis,))
    nothing = p.full(neutral(reduction, data), data.dtype, shape)
    masked = p.select(p.equal(own, spread(places)), spread(updates), nothing)
    result = _reduce(reduction, p.concat(c.unsqueeze(part, (rank,)), masked, axis=rank), rank)
    if whole:
        return result
    high = tuple(simplest(d - e) for d, e in zip(data.shape, part_shape, strict=True))
    inside = p.pad(p.full(True, bool_, part_shape), low=(0,) * rank, high=high, value=False)
    return p.select(inside, p.pad(result, low=(0,) * rank, high=high), data)


def _same(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    try:
        return all(equal(x, y) for x, y in zip(a, b, strict=True))
    except InconclusiveDim:
        return False


@lowers("ScatterND")
def scatter_nd(data: Value, indices: Value, updates: Value, *, reduction: str = "none") -> Value:
    """x with updates at the tuples along the last axis of the indices; a tie of max or min is shared evenly"""
    width = indices.shape[-1]
    if not isinstance(width, int) or width > data.rank:
        raise DimError(f"cannot index {data.type!r} with tuples along the last axis of {indices.type!r}")
    size, rest = product(data.shape[:width]), data.shape[width:]
    count = product(indices.shape[:-1])
    for x, y in zip(updates.shape, (*indices.shape[:-1], *rest), strict=True):
        require_equal(x, y, "sizes of the updates of ScatterND")
    places = p.reshape(_rows(indices, data.shape[:width]), shape=(count,))
    rows = p.reshape(data, shape=(size, *rest))
    return p.reshape(written(rows, places, p.reshape(updates, shape=(count, *rest)), reduction), shape=data.shape)


@lowers("TensorScatter")
def tensor_scatter(
    past_cache: Value, update: Value, write_indices: Value | None = None, *, axis: int = -2, mode: str = "linear"
) -> Value:
    """x with updates written along an axis, for each sample from its own place on; circular goes on at the start"""
    a = axis_of(axis, past_cache.rank)
    size, count = past_cache.shape[a], update.shape[a]
    for i in range(past_cache.rank):
        if i != a:
            require_equal(past_cache.shape[i], update.shape[i], "sizes of what is written into a cache")
    if write_indices is None:
        start = tuple(count if i == a else 0 for i in range(past_cache.rank))
        return joined([update, p.slice(past_cache, start=start, limit=past_cache.shape)], a)
    if a == 0:
        raise Unsupported("axis 0 is the batch, along which nothing can be written")
    if mode not in ("linear", "circular"):
        raise Unsupported(f"mode {mode!r}: linear or circular is required")
    shape = past_cache.shape
    require_equal(write_indices.shape[0], shape[0], "one place for each sample")
    begin = p.broadcast(p.cast(write_indices, dtype=i64), shape=shape, axes=(0,))
    at = c.sub(p.broadcast(p.iota(size), shape=shape, axes=(a,)), begin)
    zero = p.number(0, at)
    if mode == "circular":
        around = p.broadcast(p.dim(size), shape=shape, axes=())
        at = p.rem(at, around)
        at = p.select(p.less(at, zero), p.add(at, around), at)
    valid = p.logical_and(p.less_equal(zero, at), p.less(at, p.broadcast(p.dim(count), shape=shape, axes=())))
    return p.select(valid, at_places(update, p.select(valid, at, zero), a), past_cache)


# ---- classes, order, choice ------------------------------------------------------------------------------------------


@lowers("OneHot")
def one_hot(indices: Value, depth: Static, values: Value, *, axis: int = -1) -> Value:
    """values[1] where the place is the index, else values[0]"""
    (classes,) = dims_of(depth)
    a = axis_of(axis, indices.rank + 1)
    on = c.one_hot(from_start(indices, classes), classes, a)

    def pick(i: int) -> Value:
        one = p.reshape(p.slice(values, start=(i,), limit=(i + 1,)), shape=())
        return p.broadcast(one, shape=on.shape, axes=())

    return p.select(on, pick(1), pick(0))


@lowers("ReverseSequence")
def reverse_sequence(input: Value, sequence_lens: Value, *, batch_axis: int = 1, time_axis: int = 0) -> Value:
    """The first elements of the time axis in reverse order, as many as each sample is long"""
    b, t = axis_of(batch_axis, input.rank), axis_of(time_axis, input.rank)
    shape = input.shape
    require_equal(sequence_lens.shape[0], shape[b], "one length for each sample")
    time = p.broadcast(p.iota(shape[t]), shape=shape, axes=(t,))
    length = p.broadcast(p.cast(sequence_lens, dtype=i64), shape=shape, axes=(b,))
    mirrored = c.plus(c.sub(length, time), -1)
    return at_places(input, p.select(p.less(time, length), mirrored, time), t)


def places_of(mask: Value, hint: str) -> Value:
    """The places where a vector of bools holds. Where it is data, their number is a new symbol, called like `hint`."""
    array = plain_known(mask)
    if array is not None:
        return _literal(np.flatnonzero(array))
    return p.nonzero(mask, size=reading().fresh_dim(hint))


def _flat(x: Value) -> Value:
    return p.reshape(x, shape=(product(x.shape),))


def unravelled(places: Value, shape: Sequence[Dim]) -> list[Value]:
    """Row-major places in a shape as one vector of places for each axis."""
    found = []
    for a, d in enumerate(shape):
        step = product(shape[a + 1 :])
        at = places if step == 1 else p.div(places, p.broadcast(p.dim(step), shape=places.shape, axes=()))
        found.append(at if a == 0 else p.rem(at, p.broadcast(p.dim(d), shape=places.shape, axes=())))
    return found


@lowers("Compress")
def compress(input: Value, condition: Value, *, axis: int | None = None, node: Node) -> Value:
    """The elements along an axis where a condition holds; of a condition that is data their number is a new symbol"""
    x = _flat(input) if axis is None else input
    a = 0 if axis is None else axis_of(axis, x.rank)
    return p.gather(x, places_of(condition, f"{node.outputs[0]}_size"), axis=a)


@lowers("NonZero", gradient=Gradient.INDEX, reason="places")
def nonzero(x: Value, *, node: Node) -> Value:
    """The places of the elements that are not 0, one column each; of data their number is a new symbol"""
    flat = _flat(x)
    mask = flat if x.dtype is bool_ else c.not_equal(flat, p.number(0, flat))
    places = places_of(mask, f"{node.outputs[0]}_size")
    columns = unravelled(places, x.shape or (1,))
    return p.concat(*(c.unsqueeze(at, (0,)) for at in columns), axis=0)


LARGEST_ROW = 64


@lowers("Unique")
def unique(x: Value, *, axis: int | None = None, sorted: int = 1, node: Node) -> tuple[Value, Value, Value, Value]:
    """The distinct elements, where they first stand, which one each is, how many there are of each; their number is a new symbol"""
    source = _flat(x) if axis is None else x
    a = 0 if axis is None else axis_of(axis, x.rank)
    count = source.shape[a]
    rest = product(d for i, d in enumerate(source.shape) if i != a)
    if not isinstance(rest, int) or rest > LARGEST_ROW:
        raise Unsupported(f"slices of {rest} elements are compared, at most {LARGEST_ROW} can be")
    perm = (a, *(i for i in range(source.rank) if i != a))
    rows = p.reshape(p.transpose(source, perm=perm), shape=(count, rest))
    rows = c.as_number(rows, i32) if rows.dtype is bool_ else sortable(rows)
    order = p.iota(count)
    for j in reversed(range(rest)):  # stable sorts by one column after the other, the first one last
        column = p.reshape(p.slice(rows, start=(0, j), limit=(count, j + 1)), shape=(count,))
        order = p.gather(order, p.argsort(p.gather(column, order, axis=0), axis=0), axis=0)
    in_order = p.gather(rows, order, axis=0)
    starts = places_of(_differs_from_the_one_before(in_order), f"{node.outputs[0]}_size")
    first = p.gather(order, starts, axis=0)
    size = starts.shape[0]
    marks = p.scatter_add(p.full(1, i64, starts.shape), starts, axis=0, size=count)
    group = c.plus(p.cumsum(marks, axis=0), -1)
    inverse = p.scatter_add(group, order, axis=0, size=count)
    counts = p.scatter_add(p.full(1, i64, (count,)), group, axis=0, size=size)
    if not sorted:
        by_place = p.argsort(first, axis=0)
        rank = p.scatter_add(p.iota(size), by_place, axis=0, size=size)
        first, counts = p.gather(first, by_place, axis=0), p.gather(counts, by_place, axis=0)
        inverse = p.gather(rank, inverse, axis=0)
    return p.gather(source, first, axis=a), first, inverse, counts


def _differs_from_the_one_before(rows: Value) -> Value:
    """Whether a row is unlike the one before it; the first one is."""
    count, width = rows.shape
    before = p.slice(p.pad(rows, low=(1, 0), high=(0, 0)), start=(0, 0), limit=(count, width))
    unlike = c.as_number(c.not_equal(rows, before), i32)
    some = p.reduce_max(unlike, axes=(1,)) if width != 0 else p.full(0, i32, (count,))
    place = p.iota(count)
    return p.logical_or(c.greater(some, p.number(0, some)), p.equal(place, p.number(0, place)))
