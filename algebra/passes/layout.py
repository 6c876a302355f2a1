"""Rules of primitives that move elements: transpose, reshape, broadcast, slice, reverse, pad, concat, window and fold."""

from __future__ import annotations

from collections.abc import Sequence

from .. import primitives as p
from ..dims import Dim, is_one, is_zero, simplest
from ..graph import Value, bind
from ..primitives.elementwise import ELEMENTWISE
from .matching import constant, nonunit, op, same, same_dims, splat, sure_at_least
from .rewriting import rules

__all__ = ["LAYOUT", "strided_limit"]

POINTWISE = " ".join(e.name for e in ELEMENTWISE if e.name != "stop_gradient")


_FLAT = 256  # a longer chain of concatenations stays nested, so that flattening one more never costs more than this

# ---- transpose -------------------------------------------------------------------------------------------------------------------------


def transpose_identity(v: Value) -> Value | None:
    """transpose(x, [0, 1, ..]) -> x"""
    return v.operands[0] if v.params["perm"] == tuple(range(v.rank)) else None


def transpose_twice(v: Value) -> Value | None:
    """transpose(transpose(x, p), q) -> transpose(x, p[q])"""
    inner, perm = v.operands[0], v.params["perm"]
    if op(inner) != "transpose":
        return None
    return p.transpose(inner.operands[0], perm=tuple(inner.params["perm"][i] for i in perm))


def transpose_of_broadcast(v: Value) -> Value | None:
    """transpose(broadcast(x)) -> broadcast(transpose(x))"""
    inner, perm = v.operands[0], v.params["perm"]
    if op(inner) != "broadcast":
        return None
    x, axes = inner.operands[0], inner.params["axes"]
    order = sorted(range(x.rank), key=lambda i: perm.index(axes[i]))
    placed = tuple(sorted(perm.index(a) for a in axes))
    return p.broadcast(p.transpose(x, perm=tuple(order)), shape=v.shape, axes=placed)


def transpose_of_units(v: Value) -> Value | None:
    """transpose(x) -> reshape(x), where only axes of size 1 move"""
    perm, x = v.params["perm"], v.operands[0]
    moved = [i for i in perm if not is_one(x.shape[i])]
    plain = sum(not isinstance(d, int) for d in v.shape) <= 1  # more symbols would need their sizes at run time
    return p.reshape(x, shape=v.shape) if plain and moved == sorted(moved) else None


# ---- reshape ---------------------------------------------------------------------------------------------------------------------------


def reshape_identity(v: Value) -> Value | None:
    """reshape(x, shape of x) -> x"""
    x = v.operands[0]
    return x if same_dims(x.shape, v.shape) else None


def reshape_twice(v: Value) -> Value | None:
    """reshape(reshape(x, _), s) -> reshape(x, s)"""
    inner = v.operands[0]
    return p.reshape(inner.operands[0], shape=v.shape) if op(inner) == "reshape" else None


def reshape_of_broadcast(v: Value) -> Value | None:
    """reshape(broadcast(x)) -> broadcast(reshape(x)), where the repeated axes stay or only axes of size 1 come and go"""
    inner = v.operands[0]
    if op(inner) != "broadcast":
        return None
    x, axes = inner.operands[0], inner.params["axes"]
    if x.rank == 0:
        return p.broadcast(x, shape=v.shape, axes=())
    groups = _groups(inner.shape, v.shape)
    if groups is None:
        return None
    kept: list[int] = []
    for old, new in groups:
        inside = [a for a in old if a in axes and not is_one(inner.shape[a])]
        whole = [a for a in old if not is_one(inner.shape[a])]
        if not inside:
            continue
        if inside != whole:
            return None
        kept += new
    return p.broadcast(p.reshape(x, shape=tuple(v.shape[a] for a in kept)), shape=v.shape, axes=tuple(kept))


def _groups(old: Sequence[Dim], new: Sequence[Dim]) -> list[tuple[list[int], list[int]]] | None:
    """Runs of axes of two shapes that hold the same elements, from the left: `[6, N] -> [2, 3, N]` is `([0], [0, 1]), ([1], [2])`."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        a, b, left, right = [], [], simplest(1), simplest(1)
        if i < len(old):
            a, left, i = [i], old[i], i + 1
        if j < len(new):
            b, right, j = [j], new[j], j + 1
        while not same(left, right):
            if (i < len(old) and not _larger(left, right)) or j == len(new):
                if i == len(old):
                    return None
                left, i = simplest(left * old[i]), i + 1
                a.append(i - 1)
            else:
                right, j = simplest(right * new[j]), j + 1
                b.append(j - 1)
        groups.append((a, b))
    return groups


def _larger(a: Dim, b: Dim) -> bool:
    return a > b if isinstance(a, int) and isinstance(b, int) else sure_at_least(a, b)


# ---- broadcast -------------------------------------------------------------------------------------------------------------------------


def broadcast_identity(v: Value) -> Value | None:
    """broadcast(x, shape of x) -> x"""
    return v.operands[0] if len(v.params["axes"]) == v.rank else None


def broadcast_twice(v: Value) -> Value | None:
    """broadcast(broadcast(x, a), b) -> broadcast(x, b[a])"""
    inner, axes = v.operands[0], v.params["axes"]
    if op(inner) != "broadcast":
        return None
    return p.broadcast(inner.operands[0], shape=v.shape, axes=tuple(axes[a] for a in inner.params["axes"]))


def broadcast_of_units(v: Value) -> Value | None:
    """broadcast(reshape(x, [.., 1, ..])) -> broadcast(x): an axis of size 1 is placed by repeating"""
    inner, axes = v.operands[0], v.params["axes"]
    if op(inner) != "reshape":
        return None
    x, kept = inner.operands[0], nonunit(inner.shape)
    if len(kept) == inner.rank or not same_dims(x.shape, [inner.shape[i] for i in kept]):
        return None
    return p.broadcast(x, shape=v.shape, axes=tuple(axes[i] for i in kept))


def pointwise_of_broadcasts(v: Value) -> Value | None:
    """f(broadcast x, broadcast y) -> broadcast(f(x, y)), where all lack an axis: computed before it is repeated"""
    if not v.operands or any(op(o) != "broadcast" for o in v.operands):
        return None
    union = sorted({a for o in v.operands for a in o.params["axes"]})
    if len(union) == v.rank:
        return None
    shape = tuple(v.shape[a] for a in union)
    low = [
        p.broadcast(o.operands[0], shape=shape, axes=tuple(union.index(a) for a in o.params["axes"]))
        for o in v.operands
    ]
    return p.broadcast(bind(v.primitive, *low, **v.params), shape=v.shape, axes=tuple(union))


# ---- slice, reverse --------------------------------------------------------------------------------------------------------------------


def strided_limit(start: Dim, count: Dim, stride: int) -> Dim:
    """The limit of `count` elements from `start` on."""
    return simplest(start + count) if stride == 1 else simplest(start + (count - 1) * stride + 1)


def slice_identity(v: Value) -> Value | None:
    """x[0:size] -> x"""
    x = v.operands[0]
    whole = all(s == 0 for s in v.params["start"]) and all(k == 1 for k in v.params["stride"])
    return x if whole and same_dims(v.params["limit"], x.shape) else None


def slice_twice(v: Value) -> Value | None:
    """x[a:b:k][c:d:l] -> x[a + c*k : .. : k*l]"""
    inner = v.operands[0]
    if op(inner) != "slice":
        return None
    start, limit, stride = [], [], []
    for i in range(v.rank):
        s, k = inner.params["start"][i], inner.params["stride"][i]
        count = v.shape[i]
        if not sure_at_least(count, 1):
            return None
        start.append(simplest(s + v.params["start"][i] * k))
        stride.append(k * v.params["stride"][i])
        limit.append(strided_limit(start[-1], count, stride[-1]))
    return p.slice(inner.operands[0], start=tuple(start), limit=tuple(limit), stride=tuple(stride))


def slice_of_broadcast(v: Value) -> Value | None:
    """broadcast(x)[s] -> broadcast(x[s])"""
    inner = v.operands[0]
    if op(inner) != "broadcast":
        return None
    x, axes = inner.operands[0], inner.params["axes"]
    start, limit, stride = (tuple(v.params[k][a] for a in axes) for k in ("start", "limit", "stride"))
    return p.broadcast(p.slice(x, start=start, limit=limit, stride=stride), shape=v.shape, axes=axes)


def slice_of_pad(v: Value) -> Value | None:
    """pad(x)[s] -> x[s'] padded by what is left, where each end lies surely inside or outside x"""
    inner = v.operands[0]
    if op(inner) != "pad":
        return None
    x, outer, span = inner.operands[0], inner.params, v.params
    found: list[_Axis] = []
    for i in range(v.rank):
        axis = _unpadded(
            x.shape[i], outer["low"][i], outer["high"][i], outer["interior"][i],
            span["start"][i], span["limit"][i], span["stride"][i], v.shape[i],
        )  # fmt: skip
        if axis is None:
            return None
        found.append(axis)
    if not found:
        return x
    start, limit, stride, low, high, interior = zip(*found, strict=True)
    cut = p.slice(x, start=start, limit=limit, stride=stride)
    return p.pad(cut, low=low, high=high, interior=interior, value=inner.params["value"])


_Axis = tuple[Dim, Dim, int, Dim, Dim, int]


def _unpadded(
    n: Dim, low: Dim, high: Dim, interior: int, start: Dim, limit: Dim, stride: int, count: Dim
) -> _Axis | None:
    """One axis of a slice of a pad as (start, limit, stride) of x and (low, high, interior) around it."""
    step = interior + 1
    extent = n if interior == 0 else simplest((n - 1) * step + 1)
    if stride == step and same(start, low) and same(count, n) and sure_at_least(n, 1):
        return 0, n, 1, 0, 0, 0
    if stride != 1:
        return None
    if start == 0 and same(limit, simplest(low + extent + high)):
        return 0, n, 1, low, high, interior
    if interior != 0:
        if sure_at_least(low, start) and sure_at_least(limit, simplest(low + extent)):
            return 0, n, 1, simplest(low - start), simplest(limit - low - extent), interior
        return None
    if sure_at_least(start, low):
        new_low, first = 0, simplest(start - low)
    elif sure_at_least(low, start):
        new_low, first = simplest(low - start), 0
    else:
        return None
    if sure_at_least(simplest(low + n), limit):
        new_high, last = 0, simplest(limit - low)
    elif sure_at_least(limit, simplest(low + n)):
        new_high, last = simplest(limit - low - n), n
    else:
        return None
    return (first, last, 1, new_low, new_high, 0) if sure_at_least(last, first) else None


def slice_of_concat(v: Value) -> Value | None:
    """concat(.., x, ..)[s] -> x[s'], where the slice lies inside one operand"""
    inner = v.operands[0]
    if op(inner) != "concat":
        return None
    axis, offset = inner.params["axis"], simplest(0)
    start, limit = v.params["start"], v.params["limit"]
    for x in inner.operands:
        after = simplest(offset + x.shape[axis])
        if sure_at_least(start[axis], offset) and sure_at_least(after, limit[axis]):
            return p.slice(
                x,
                start=tuple(simplest(s - offset) if i == axis else s for i, s in enumerate(start)),
                limit=tuple(simplest(m - offset) if i == axis else m for i, m in enumerate(limit)),
                stride=v.params["stride"],
            )
        offset = after
    return None


def reverse_few(v: Value) -> Value | None:
    """reverse of no axis, or of axes of size 1 -> x"""
    axes = tuple(a for a in v.params["axes"] if not is_one(v.shape[a]))
    if not axes:
        return v.operands[0]
    return p.reverse(v.operands[0], axes=axes) if len(axes) < len(v.params["axes"]) else None


def reverse_twice(v: Value) -> Value | None:
    """reverse(reverse(x, a), b) -> reverse(x, axes in one of both)"""
    inner = v.operands[0]
    if op(inner) != "reverse":
        return None
    return p.reverse(inner.operands[0], axes=tuple(set(inner.params["axes"]) ^ set(v.params["axes"])))


def reverse_of_broadcast(v: Value) -> Value | None:
    """reverse(broadcast(x)) -> broadcast(reverse(x))"""
    inner = v.operands[0]
    if op(inner) != "broadcast":
        return None
    x, axes = inner.operands[0], inner.params["axes"]
    turned = tuple(axes.index(a) for a in v.params["axes"] if a in axes)
    return p.broadcast(p.reverse(x, axes=turned), shape=v.shape, axes=axes)


# ---- pad, concat -----------------------------------------------------------------------------------------------------------------------


def pad_nothing(v: Value) -> Value | None:
    """pad(x, 0, 0) -> x"""
    amounts = (*v.params["low"], *v.params["high"])
    inside = all(i == 0 or is_one(d) for i, d in zip(v.params["interior"], v.operands[0].shape, strict=True))
    return v.operands[0] if inside and all(is_zero(a) for a in amounts) else None


def pad_twice(v: Value) -> Value | None:
    """pad(pad(x, a), b) -> pad(x, a + b), with one value and no interior in the outer"""
    inner = v.operands[0]
    if op(inner) != "pad" or any(v.params["interior"]) or _differ(inner.params["value"], v.params["value"]):
        return None
    low, high = (
        tuple(simplest(a + b) for a, b in zip(inner.params[k], v.params[k], strict=True)) for k in ("low", "high")
    )
    return p.pad(inner.operands[0], low=low, high=high, interior=inner.params["interior"], value=v.params["value"])


def pad_of_its_value(v: Value) -> Value | None:
    """pad(c, value=c) -> c in the padded shape"""
    found = splat(v.operands[0])
    if found is None or _differ(float(found), float(v.params["value"])):
        return None
    return p.full(found, v.dtype, v.shape)


def pad_of_broadcast(v: Value) -> Value | None:
    """pad(broadcast(x)) -> broadcast(pad(x)), where only axes of x are padded"""
    inner = v.operands[0]
    if op(inner) != "broadcast" or not inner.params["axes"]:
        return None
    axes = inner.params["axes"]
    if not all(same(a, b) for i, (a, b) in enumerate(zip(inner.shape, v.shape, strict=True)) if i not in axes):
        return None
    low, high, interior = (tuple(v.params[k][a] for a in axes) for k in ("low", "high", "interior"))
    padded = p.pad(inner.operands[0], low=low, high=high, interior=interior, value=v.params["value"])
    return p.broadcast(padded, shape=v.shape, axes=axes)


def _differ(a: float, b: float) -> bool:
    return repr(float(a)) != repr(float(b))


def add_of_adjacent_pads(v: Value) -> Value | None:
    """pad(x, 0, b) + pad(y, a, 0) -> concat(x, y), where one begins as the other ends: the cotangent of a split"""
    x, y = v.operands
    if not all(op(o) == "pad" and not any(o.params["interior"]) and o.params["value"] == 0 for o in (x, y)):
        return None
    for first, second in ((x, y), (y, x)):
        differing = [
            i for i in range(v.rank) if not all(same(first.params[k][i], second.params[k][i]) for k in ("low", "high"))
        ]
        if len(differing) != 1:
            return None
        axis = differing[0]
        end = simplest(first.params["low"][axis] + first.operands[0].shape[axis])
        if same(end, second.params["low"][axis]):
            joined = p.concat(first.operands[0], second.operands[0], axis=axis)
            high = tuple(second.params["high"][i] if i == axis else h for i, h in enumerate(first.params["high"]))
            return p.pad(joined, low=first.params["low"], high=high)
    return None


def concat_one(v: Value) -> Value | None:
    """concat(x) -> x"""
    return v.operands[0] if len(v.operands) == 1 else None


def concat_empty(v: Value) -> Value | None:
    """concat(.., empty, ..) -> concat without it"""
    axis = v.params["axis"]
    full = [x for x in v.operands if not is_zero(x.shape[axis])]
    return p.concat(*(full or v.operands[:1]), axis=axis) if len(full) < len(v.operands) > 1 else None


def concat_nested(v: Value) -> Value | None:
    """concat(concat(x, y), z) -> concat(x, y, z)"""
    axis = v.params["axis"]
    if not any(op(x) == "concat" and x.params["axis"] == axis for x in v.operands):
        return None
    flat = [y for x in v.operands for y in (x.operands if op(x) == "concat" and x.params["axis"] == axis else (x,))]
    return p.concat(*flat, axis=axis) if len(flat) <= _FLAT else None


def concat_of_slices(v: Value) -> Value | None:
    """concat(x[a:b], x[b:c]) -> x[a:c]"""
    axis = v.params["axis"]
    done: list[Value] = []
    for x in v.operands:
        before = done[-1] if done else None
        joined = None if before is None else _joined(before, x, axis)
        if joined is None:
            done.append(x)
        else:
            done[-1] = joined
    return p.concat(*done, axis=axis) if len(done) < len(v.operands) else None


def _joined(x: Value, y: Value, axis: int) -> Value | None:
    if op(x) != "slice" or op(y) != "slice" or x.operands[0] is not y.operands[0]:
        return None
    if any(k != 1 for k in (*x.params["stride"], *y.params["stride"])):
        return None
    for i in range(x.rank):
        if i == axis:
            fits = same(x.params["limit"][i], y.params["start"][i])
        else:
            fits = same(x.params["start"][i], y.params["start"][i]) and same(x.params["limit"][i], y.params["limit"][i])
        if not fits:
            return None
    limit = tuple(y.params["limit"][i] if i == axis else m for i, m in enumerate(x.params["limit"]))
    return p.slice(x.operands[0], start=x.params["start"], limit=limit)


# ---- window, fold ----------------------------------------------------------------------------------------------------------------------


def window_of_points(v: Value) -> Value | None:
    """window of size 1 -> a strided slice with axes of size 1 at the end"""
    sizes, x = v.params["sizes"], v.operands[0]
    if not all(map(is_one, sizes)):
        return None
    stride = [1] * x.rank
    for a, s in zip(v.params["axes"], v.params["strides"], strict=True):
        stride[a] = s
    counts = v.shape[: x.rank]
    limit = tuple(d if k == 1 else strided_limit(0, n, k) for d, n, k in zip(x.shape, counts, stride, strict=True))
    return p.reshape(p.slice(x, start=(0,) * x.rank, limit=limit, stride=tuple(stride)), shape=v.shape)


def fold_of_points(v: Value) -> Value | None:
    """fold of windows of size 1 -> pad between the elements"""
    x, rank = v.operands[0], v.rank
    if not all(map(is_one, x.shape[rank:])):
        return None
    high: list[Dim] = [0] * rank
    interior = [0] * rank
    for a, s, e in zip(v.params["axes"], v.params["strides"], v.params["extents"], strict=True):
        if not sure_at_least(x.shape[a], 1):
            return None
        interior[a], high[a] = s - 1, simplest(e - ((x.shape[a] - 1) * s + 1))
    return p.pad(p.reshape(x, shape=x.shape[:rank]), low=(0,) * rank, high=tuple(high), interior=tuple(interior))


# ---- gather, scatter_add ---------------------------------------------------------------------------------------------------------------


def _literal_index(v: Value, size: Dim) -> int | None:
    i = constant(v) if v.rank == 0 else None
    if i is None:
        return None
    index = int(i)
    return index + size if index < 0 and isinstance(size, int) else (index if index >= 0 else None)


def gather_at_literal(v: Value) -> Value | None:
    """x[.., 3, ..] by gather -> by slice"""
    x, i = v.operands
    axis = v.params["axis"]
    index = _literal_index(i, x.shape[axis])
    if index is None or not sure_at_least(x.shape[axis], index + 1):
        return None
    one = p.slice(
        x,
        start=tuple(index if a == axis else 0 for a in range(x.rank)),
        limit=tuple(index + 1 if a == axis else d for a, d in enumerate(x.shape)),
    )
    return p.reshape(one, shape=v.shape)


def gather_everything(v: Value) -> Value | None:
    """gather(x, [0, 1, .., size - 1]) -> x"""
    x, i = v.operands
    return x if op(i) == "iota" and same(i.params["size"], x.shape[v.params["axis"]]) else None


def scatter_at_literal(v: Value) -> Value | None:
    """scatter_add(u, 3) -> pad(u)"""
    u, i = v.operands
    axis, size = v.params["axis"], v.params["size"]
    index = _literal_index(i, size)
    if index is None or not sure_at_least(size, index + 1):
        return None
    one = p.reshape(u, shape=(*u.shape[:axis], 1, *u.shape[axis:]))
    low = tuple(index if a == axis else 0 for a in range(v.rank))
    return p.pad(one, low=low, high=tuple(simplest(size - index - 1) if a == axis else 0 for a in range(v.rank)))


def scatter_everything(v: Value) -> Value | None:
    """scatter_add(u, [0, 1, .., size - 1]) -> u"""
    u, i = v.operands
    return u if op(i) == "iota" and same(i.params["size"], v.params["size"]) else None


LAYOUT = rules(
    ("transpose", transpose_identity),
    ("transpose", transpose_twice),
    ("transpose", transpose_of_broadcast),
    ("transpose", transpose_of_units),
    ("reshape", reshape_identity),
    ("reshape", reshape_twice),
    ("reshape", reshape_of_broadcast),
    ("broadcast", broadcast_identity),
    ("broadcast", broadcast_twice),
    ("broadcast", broadcast_of_units),
    (POINTWISE, pointwise_of_broadcasts),
    ("slice", slice_identity),
    ("slice", slice_twice),
    ("slice", slice_of_broadcast),
    ("slice", slice_of_pad),
    ("slice", slice_of_concat),
    ("reverse", reverse_few),
    ("reverse", reverse_twice),
    ("reverse", reverse_of_broadcast),
    ("pad", pad_nothing),
    ("pad", pad_twice),
    ("pad", pad_of_its_value),
    ("pad", pad_of_broadcast),
    ("add", add_of_adjacent_pads),
    ("concat", concat_one),
    ("concat", concat_empty),
    ("concat", concat_nested),
    ("concat", concat_of_slices),
    ("window", window_of_points),
    ("fold", fold_of_points),
    ("gather", gather_at_literal),
    ("gather", gather_everything),
    ("scatter_add", scatter_at_literal),
    ("scatter_add", scatter_everything),
)
