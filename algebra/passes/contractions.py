"""Rules of `dot` and of the reductions.

Sums are reassociated and factors taken out of them: the last bits of a rounded number may change, and infinities of both signs may meet that did not.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import primitives as p
from ..dims import Dim, is_one, is_zero, product
from ..graph import Value, bind
from .matching import counted, is_splat, negated, op, splat
from .rewriting import rules

__all__ = ["CONTRACTION"]

Axes = tuple[int, ...]
REDUCTIONS = "reduce_sum reduce_max reduce_min reduce_prod"


# ---- reductions ------------------------------------------------------------------------------------------------------------------------


def _again(v: Value, x: Value, axes: Sequence[int]) -> Value:
    """The reduction of another operand over other axes."""
    return bind(v.primitive, x, **{**v.params, "axes": tuple(sorted(axes))})


def reduce_nothing(v: Value) -> Value | None:
    """reduce(x, no axes) -> x"""
    return v.operands[0] if not v.params["axes"] else None


def reduce_units(v: Value) -> Value | None:
    """reduce(x) over axes of size 1 -> reshape(x)"""
    x, axes = v.operands[0], v.params["axes"]
    units = [a for a in axes if is_one(x.shape[a])]
    if not units:
        return None
    kept = p.kept_axes(x.rank, tuple(units))
    flat = p.reshape(x, shape=tuple(x.shape[i] for i in kept))
    return _again(v, flat, [kept.index(a) for a in axes if a not in units])


def reduce_twice(v: Value) -> Value | None:
    """reduce(reduce(x, a), b) -> reduce(x, a and b)"""
    inner = v.operands[0]
    if inner.primitive is not v.primitive or inner.params.get("ties") != v.params.get("ties"):
        return None
    if op(v) in ("reduce_max", "reduce_min") and v.params["ties"] == "split":
        return None  # a tie of ties is split otherwise when differentiated
    x = inner.operands[0]
    kept = p.kept_axes(x.rank, inner.params["axes"])
    return _again(v, x, [*inner.params["axes"], *(kept[a] for a in v.params["axes"])])


def reduce_of_transpose(v: Value) -> Value | None:
    """reduce(transpose(x)) -> transpose(reduce(x))"""
    inner = v.operands[0]
    if op(inner) != "transpose":
        return None
    if v.params.get("ties") == "first":
        return None  # which is the first depends on the order of axes
    perm, axes = inner.params["perm"], v.params["axes"]
    reduced = [perm[a] for a in axes]
    left = p.kept_axes(inner.rank, tuple(reduced))
    wanted = [perm[i] for i in range(inner.rank) if i not in axes]
    return p.transpose(_again(v, inner.operands[0], reduced), perm=tuple(left.index(a) for a in wanted))


def reduce_of_broadcast(v: Value) -> Value | None:
    """sum(broadcast(x)) -> size * sum(x) over the axes that x lacks; max(broadcast(x)) -> max(x)"""
    inner = v.operands[0]
    if op(inner) != "broadcast" or op(v) == "reduce_prod":
        return None
    x, placed, axes = inner.operands[0], inner.params["axes"], v.params["axes"]
    if any(is_zero(d) for d in inner.shape) or (op(v) != "reduce_sum" and v.params["ties"] == "first"):
        return None
    reduced = [placed.index(a) for a in axes if a in placed]
    left = p.kept_axes(inner.rank, axes)
    small = _again(v, x, reduced)
    if op(v) == "reduce_sum":
        count = product(inner.shape[a] for a in axes if a not in placed)
        if not is_one(count):
            if v.dtype.bits < 32 and not (isinstance(count, int) and count <= 2048):
                return None  # a 16-bit float may not hold the count
            small = p.mul(small, counted(count, small))
    return p.broadcast(small, shape=v.shape, axes=tuple(left.index(a) for a in placed if a in left))


def sum_of_neg(v: Value) -> Value | None:
    """sum(-x) -> -sum(x)"""
    x = negated(v.operands[0])
    return None if x is None else p.neg(p.reduce_sum(x, axes=v.params["axes"]))


def sum_of_scaled(v: Value) -> Value | None:
    """sum(x * c) -> sum(x) * c, of floats of 32 bits or more and an ordinary literal c"""
    inner = v.operands[0]
    if op(inner) != "mul" or not v.dtype.floating or v.dtype.bits < 32:
        return None
    x, y = inner.operands
    for a, b in ((x, y), (y, x)):
        c = splat(b)
        if c is not None and 2.0**-40 <= abs(float(c)) <= 2.0**40:
            return p.mul(p.reduce_sum(a, axes=v.params["axes"]), p.number(float(c), v))
    return None


def sum_of_dot(v: Value) -> Value | None:
    """sum(dot(x, y)) over batch axes -> dot with those axes contracted"""
    inner = v.operands[0]
    if op(inner) != "dot":
        return None
    x, y, cx, cy, bx, by = _sides(inner)
    moved = [a for a in v.params["axes"] if a < len(bx)]
    if not moved:
        return None
    kept = [i for i in range(len(bx)) if i not in moved]
    contract = ((*cx, *(bx[i] for i in moved)), (*cy, *(by[i] for i in moved)))
    z = p.dot(x, y, contract=contract, batch=(tuple(bx[i] for i in kept), tuple(by[i] for i in kept)))
    left = p.kept_axes(inner.rank, tuple(moved))
    return p.reduce_sum(z, axes=tuple(left.index(a) for a in v.params["axes"] if a not in moved))


def _summed(x: Value, axes: Sequence[int]) -> tuple[Value, dict[int, int]]:
    """x summed over axes, and where its other axes are then."""
    kept = p.kept_axes(x.rank, tuple(axes))
    return (p.reduce_sum(x, axes=tuple(axes)) if axes else x), {a: i for i, a in enumerate(kept)}


# ---- dot -------------------------------------------------------------------------------------------------------------------------------


def _sides(v: Value) -> tuple[Value, Value, Axes, Axes, Axes, Axes]:
    (cx, cy), (bx, by) = v.params["contract"], v.params["batch"]
    return *v.operands, cx, cy, bx, by


def dot_ordered(v: Value) -> Value | None:
    """dot with its pairs of contracted axes in the order of x"""
    x, y, cx, cy, bx, by = _sides(v)
    if list(cx) == sorted(cx):
        return None
    pairs = sorted(zip(cx, cy, strict=True))
    return p.dot(x, y, contract=(tuple(a for a, _ in pairs), tuple(b for _, b in pairs)), batch=(bx, by))


def dot_of_transpose(v: Value) -> Value | None:
    """dot(transpose(x), y) -> dot(x, y) with other axes, where the free axes keep their order; the same for y"""
    x, y, cx, cy, bx, by = _sides(v)
    left, right = _untransposed(x, cx, bx), _untransposed(y, cy, by)
    if left is None and right is None:
        return None
    x, cx, bx = left or (x, cx, bx)
    y, cy, by = right or (y, cy, by)
    return p.dot(x, y, contract=(cx, cy), batch=(bx, by))


def _untransposed(x: Value, contract: Axes, batch: Axes) -> tuple[Value, Axes, Axes] | None:
    if op(x) != "transpose":
        return None
    perm = x.params["perm"]
    free = [perm[a] for a in p.free_axes(x.rank, contract, batch)]
    if free != sorted(free):
        return None
    return x.operands[0], tuple(perm[a] for a in contract), tuple(perm[a] for a in batch)


def transpose_of_dot(v: Value) -> Value | None:
    """transpose(dot(x, y)) -> dot(y, x), or with batch axes in another order, where that is all the transpose does"""
    inner, perm = v.operands[0], v.params["perm"]
    if op(inner) != "dot":
        return None
    x, y, cx, cy, bx, by = _sides(inner)
    n = len(bx)
    m = n + len(p.free_axes(x.rank, cx, bx))
    if sorted(perm[:n]) != list(range(n)):
        return None
    batch = (tuple(bx[i] for i in perm[:n]), tuple(by[i] for i in perm[:n]))
    rest = list(perm[n:])
    if rest == list(range(n, v.rank)):
        return p.dot(x, y, contract=(cx, cy), batch=batch)
    if rest == [*range(m, v.rank), *range(n, m)]:
        return p.dot(y, x, contract=(cy, cx), batch=(batch[1], batch[0]))
    return None


def dot_of_units(v: Value) -> Value | None:
    """dot without its contracted and batch axes of size 1"""
    x, y, cx, cy, bx, by = _sides(v)
    contract = [(a, b) for a, b in zip(cx, cy, strict=True) if is_one(x.shape[a])]
    batch = [(a, b) for a, b in zip(bx, by, strict=True) if is_one(x.shape[a])]
    if not contract and not batch:
        return None
    gone = [*contract, *batch]
    sx, mx = _dropped(x, [a for a, _ in gone])
    sy, my = _dropped(y, [b for _, b in gone])
    z = p.dot(
        sx,
        sy,
        contract=(tuple(mx[a] for a in cx if a in mx), tuple(my[b] for b in cy if b in my)),
        batch=(tuple(mx[a] for a in bx if a in mx), tuple(my[b] for b in by if b in my)),
    )
    return p.reshape(z, shape=v.shape)


def _dropped(x: Value, axes: Sequence[int]) -> tuple[Value, dict[int, int]]:
    kept = p.kept_axes(x.rank, tuple(axes))
    return p.reshape(x, shape=tuple(x.shape[a] for a in kept)), {a: i for i, a in enumerate(kept)}


def dot_of_nothing(v: Value) -> Value | None:
    """dot without contracted axes -> broadcast(x) * broadcast(y)"""
    x, y, cx, _, bx, by = _sides(v)
    if cx:
        return None
    n, fx = len(bx), p.free_axes(x.rank, (), bx)
    places_x = {a: i for i, a in enumerate(bx)} | {a: n + i for i, a in enumerate(fx)}
    fy = p.free_axes(y.rank, (), by)
    places_y = {a: i for i, a in enumerate(by)} | {a: n + len(fx) + i for i, a in enumerate(fy)}
    return p.mul(_placed(x, places_x, v.shape), _placed(y, places_y, v.shape))


def _placed(x: Value, places: dict[int, int], shape: Sequence[Dim]) -> Value:
    order = sorted(range(x.rank), key=places.__getitem__)
    moved = p.transpose(x, perm=tuple(order))
    return p.broadcast(moved, shape=tuple(shape), axes=tuple(sorted(places.values())))


def dot_of_broadcast(v: Value) -> Value | None:
    """dot(broadcast(x), y) -> contracted axes that x lacks are summed in y, free axes that it lacks are repeated after"""
    x, y, cx, cy, bx, by = _sides(v)
    if (found := _unbroadcast(x, cx, bx)) is not None:
        small, mx, summed, free = found
        sy, my = _summed(y, [b for a, b in zip(cx, cy, strict=True) if a in summed])
        z = p.dot(
            small,
            sy,
            contract=(tuple(mx[a] for a in cx if a not in summed), tuple(my[b] for b in cy if b in my)),
            batch=(tuple(mx[a] for a in bx), tuple(my[b] for b in by)),
        )
        n = len(bx)
        lost = [n + i for i, a in enumerate(p.free_axes(x.rank, cx, bx)) if a in free]
        return p.broadcast(z, shape=v.shape, axes=p.kept_axes(v.rank, tuple(lost)))
    if (found := _unbroadcast(y, cy, by)) is not None:
        small, my, summed, free = found
        sx, mx = _summed(x, [a for a, b in zip(cx, cy, strict=True) if b in summed])
        z = p.dot(
            sx,
            small,
            contract=(tuple(mx[a] for a in cx if a in mx), tuple(my[b] for b in cy if b not in summed)),
            batch=(tuple(mx[a] for a in bx), tuple(my[b] for b in by)),
        )
        n = v.rank - len(p.free_axes(y.rank, cy, by))
        lost = [n + i for i, b in enumerate(p.free_axes(y.rank, cy, by)) if b in free]
        return p.broadcast(z, shape=v.shape, axes=p.kept_axes(v.rank, tuple(lost)))
    return None


def _unbroadcast(x: Value, contract: Axes, batch: Axes) -> tuple[Value, dict[int, int], set[int], set[int]] | None:
    """x with only its own axes and those of the batch, where they are, and its repeated axes: contracted ones, free ones."""
    if op(x) != "broadcast":
        return None
    placed = x.params["axes"]
    repeated = [a for a in range(x.rank) if a not in placed and a not in batch]
    if not repeated or any(is_zero(d) for d in x.shape):
        return None
    kept = [a for a in range(x.rank) if a not in repeated]
    small = p.broadcast(x.operands[0], shape=tuple(x.shape[a] for a in kept), axes=tuple(kept.index(a) for a in placed))
    summed = {a for a in repeated if a in contract}
    return small, {a: i for i, a in enumerate(kept)}, summed, set(repeated) - summed


# ---- gradients in a stable, shorter form -----------------------------------------------------------------------------------------------


def softmax_cotangent(v: Value) -> Value | None:
    """e * (ct / s - sum(ct * ((e / s) / s))) -> (e / s) * (ct - sum(ct * (e / s))), s a sum of e repeated along the summed axes"""
    for e, difference in (v.operands, v.operands[::-1]):
        if op(e) != "exp" or op(difference) != "add":
            continue
        for a, b in (difference.operands, difference.operands[::-1]):
            if (found := _softmax_parts(e, a, b)) is not None:
                ct, s, axes = found
                y = p.div(e, s)
                total = p.reduce_sum(p.mul(ct, y), axes=axes)
                along = p.broadcast(p.neg(total), shape=v.shape, axes=p.kept_axes(v.rank, axes))
                return p.mul(y, p.add(ct, along))
    return None


def _softmax_parts(e: Value, a: Value, b: Value) -> tuple[Value, Value, Axes] | None:
    """(ct, s, axes) of `a = ct / s` and `b = -sum(ct * ((e / s) / s))` repeated."""
    if op(a) != "div" or op(b) != "broadcast" or op(b.operands[0]) != "neg":
        return None
    ct, s = a.operands
    total = b.operands[0].operands[0]
    if op(total) != "reduce_sum" or op(s) != "broadcast" or op(total.operands[0]) != "mul":
        return None
    axes = total.params["axes"]
    if b.params["axes"] != p.kept_axes(e.rank, axes) or s.params["axes"] != b.params["axes"]:
        return None
    inner = s.operands[0]
    if op(inner) != "reduce_sum" or inner.operands[0] is not e or inner.params["axes"] != axes:
        return None
    for u, w in (total.operands[0].operands, total.operands[0].operands[::-1]):
        if (
            u is ct
            and op(w) == "div"
            and w.operands[1] is s
            and op(w.operands[0]) == "div"
            and w.operands[0].operands == (e, s)
        ):
            return ct, s, axes
    return None


def sigmoid_cotangent(v: Value) -> Value | None:
    """what the rules of min, max and exp make of it -> ct * (a / (a + b)) * (b / (a + b)), with a = exp(min(x, 0)) and b = exp(-max(x, 0))

    At 0 the shares of a tie meet again; where x is NaN the result is NaN, as PyTorch's.
    """
    for right, left in (v.operands, v.operands[::-1]):
        above, below = _shared(right), _shared(left)
        if above is None or below is None:
            continue
        (zero, x, b_part), (x_again, zero_again, a_part) = above, below
        if x is not x_again or zero is not zero_again or not is_splat(zero, 0):
            continue
        if (found := _sigmoid_parts(x, a_part, b_part)) is not None:
            ct, a, b, s = found
            return p.mul(p.mul(ct, p.div(a, s)), p.div(b, s))
    return None


def _shared(v: Value) -> tuple[Value, Value, Value] | None:
    """(u, w, t) of `select(u < w, t, select(u == w, t / 2, 0))`: what an extreme passes on to one operand, ties split."""
    if op(v) != "select" or op(v.operands[0]) != "less" or op(v.operands[2]) != "select":
        return None
    (u, w), t, (tie, half, zero) = v.operands[0].operands, v.operands[1], v.operands[2].operands
    if op(tie) != "equal" or {*map(id, tie.operands)} != {id(u), id(w)} or not is_splat(zero, 0):
        return None
    return (u, w, t) if op(half) == "mul" and half.operands[0] is t and is_splat(half.operands[1], 0.5) else None


def _sigmoid_parts(x: Value, a_part: Value, b_part: Value) -> tuple[Value, Value, Value, Value] | None:
    """(ct, a, b, a + b) of `(ct / s - ct * ((a / s) / s)) * a` and `(ct * ((a / s) / s)) * b`, s = a + b."""
    if op(a_part) != "mul" or op(b_part) != "mul":
        return None
    difference, a = a_part.operands
    share, b = b_part.operands
    if op(difference) != "add" or op(share) != "mul" or op(a) != "exp" or op(b) != "exp":
        return None
    quotient, minus = difference.operands
    if op(quotient) != "div" or negated(minus) is not share:
        return None
    ct, s = quotient.operands
    if op(s) != "add" or {*map(id, s.operands)} != {id(a), id(b)} or share.operands[0] is not ct:
        return None
    twice = share.operands[1]
    if (
        op(twice) != "div"
        or twice.operands[1] is not s
        or op(twice.operands[0]) != "div"
        or twice.operands[0].operands != (a, s)
    ):
        return None
    low, high = a.operands[0], negated(b.operands[0])
    if (
        op(low) != "min"
        or high is None
        or op(high) != "max"
        or low.operands != high.operands
        or low.operands[0] is not x
    ):
        return None
    return (ct, a, b, s) if is_splat(low.operands[1], 0) else None


CONTRACTION = rules(
    (REDUCTIONS, reduce_nothing),
    (REDUCTIONS, reduce_units),
    (REDUCTIONS, reduce_twice),
    (REDUCTIONS, reduce_of_transpose),
    (REDUCTIONS, reduce_of_broadcast),
    ("reduce_sum", sum_of_neg),
    ("reduce_sum", sum_of_scaled),
    ("reduce_sum", sum_of_dot),
    ("dot", dot_ordered),
    ("dot", dot_of_transpose),
    ("dot", dot_of_units),
    ("dot", dot_of_nothing),
    ("dot", dot_of_broadcast),
    ("transpose", transpose_of_dot),
    ("mul", softmax_cotangent),
    ("add", sigmoid_cotangent),
)
