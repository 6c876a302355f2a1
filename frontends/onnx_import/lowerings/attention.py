"""Attention, rotary positions, and the recurrences that stand in for attention."""

from __future__ import annotations

import math

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.dims import Dim, Shape, at_least, is_one, simplest
from ....algebra.errors import InconclusiveDim
from ....algebra.graph import Value
from ....algebra.types import DType, bool_, f32, f64, i64
from ..broadcasting import broadcast_to
from ..context import Node, Unsupported, require_divides, require_equal
from ..registry import lowers
from ..tensors import dtype_of_onnx


def split_heads(x: Value, heads: int | None, what: str) -> Value:
    """`[B, S, heads D]` as `[B, heads, S, D]`; what has four axes already stays."""
    if x.rank == 4:
        return x
    if x.rank != 3 or not heads:
        raise Unsupported(f"{what} {x.type!r} needs 4 axes, or 3 and the number of heads")
    each = require_divides(x.shape[2], heads, f"the number of heads divides the last axis of {what}")
    return p.transpose(p.reshape(x, shape=(*x.shape[:2], heads, each)), perm=(0, 2, 1, 3))


def join_heads(x: Value) -> Value:
    """`[B, H, S, D]` as `[B, S, H D]`."""
    return c.flatten_axes(p.transpose(x, perm=(0, 2, 1, 3)), 2, 4)


def grouped_scores(q: Value, k: Value) -> Value:
    """`sum over d of q[b, h, i, d] k[b, g, j, d]`, where each of the fewer heads g serves a group of consecutive heads h."""
    by_kv = grouped_heads(q, k.shape[1])
    if by_kv is None:
        return p.dot(q, k, contract=((3,), (3,)), batch=((0, 1), (0, 1)))
    scores = p.dot(by_kv, k, contract=((4,), (3,)), batch=((0, 1), (0, 1)))
    return p.reshape(scores, shape=(*q.shape[:3], k.shape[2]))


def grouped_average(weights: Value, v: Value) -> Value:
    """`sum over j of weights[b, h, i, j] v[b, g, j, d]`, heads grouped as in the scores."""
    by_kv = grouped_heads(weights, v.shape[1])
    if by_kv is None:
        return p.dot(weights, v, contract=((3,), (2,)), batch=((0, 1), (0, 1)))
    y = p.dot(by_kv, v, contract=((4,), (2,)), batch=((0, 1), (0, 1)))
    return p.reshape(y, shape=(*weights.shape[:3], v.shape[3]))


def grouped_heads(x: Value, heads: Dim) -> Value | None:
    """`[B, H, S, D]` as `[B, heads, H / heads, S, D]`; None where the heads are as many already."""
    each = require_divides(x.shape[1], heads, "the heads of keys and values divide those of queries")
    if is_one(each):
        return None
    return p.reshape(x, shape=(x.shape[0], heads, each, *x.shape[2:]))


# ---- masks -------------------------------------------------------------------------------------------------------------------------------


def filled(d: Dim, shape: Shape) -> Value:
    """A size, or a difference of sizes, in int64 over a shape."""
    return p.full(d, i64, shape) if isinstance(d, int) else p.broadcast(p.dim(d), shape=shape, axes=())


def frontier(queries: Dim, keys: Dim, offset: Value | Dim, causal: bool, left: int, right: int) -> Value | None:
    """Which keys a query may see by its place `offset + i`: not later ones (`causal`), and only so many before and after.

    The result is `[queries, keys]`, or `[B, 1, queries, keys]` where each sample has its offset.
    """
    if not causal and left < 0 and right < 0:
        return None
    per_sample = isinstance(offset, Value)
    shape: Shape = (offset.shape[0], 1, queries, keys) if isinstance(offset, Value) else (queries, keys)
    i, j = (p.broadcast(p.iota(n), shape=shape, axes=(len(shape) - 2 + a,)) for a, n in enumerate((queries, keys)))
    shift = p.broadcast(offset, shape=shape, axes=(0,)) if isinstance(offset, Value) else filled(offset, shape)
    assert per_sample == (len(shape) == 4)
    ahead = c.sub(j, p.add(i, shift))  # how far a key lies after the query
    bounds = [0] * causal + [right] * (right >= 0)
    allowed = p.less_equal(ahead, p.number(min(bounds), ahead)) if bounds else None
    if left >= 0:
        near = p.less_equal(p.number(-left, ahead), ahead)
        allowed = near if allowed is None else p.logical_and(allowed, near)
    return allowed


def lengthened(mask: Value, keys: Dim, nonpad: Value | None) -> Value:
    """A mask whose last axis may be shorter than the keys, the rest of them blocked."""
    missing = simplest(keys - mask.shape[-1])
    try:
        longer = at_least(missing, 1)
    except InconclusiveDim:
        longer = nonpad is not None
    if not longer:
        return mask
    high = (*(0,) * (mask.rank - 1), missing)
    if mask.dtype is bool_:
        kept = p.pad(p.full(True, bool_, mask.shape), low=(0,) * mask.rank, high=high, value=False)
        return p.logical_and(kept, p.pad(mask, low=(0,) * mask.rank, high=high, value=False))
    return p.pad(mask, low=(0,) * mask.rank, high=high, value=-math.inf)


def guarded_softmax(x: Value) -> Value:
    """The softmax along the last axis; 0 of a row that is `-inf` throughout."""
    axes = (x.rank - 1,)
    top = p.stop_gradient(p.reduce_max(x, axes=axes))
    blocked = p.equal(top, p.number(-math.inf, top))
    safe = p.select(blocked, p.number(0, top), top)
    e = p.exp(c.sub(x, c.along(safe, x.shape, axes)))
    total = p.reduce_sum(e, axes=axes)
    return p.div(e, c.along(p.select(blocked, p.number(1, total), total), x.shape, axes))


def attend(q: Value, k: Value, v: Value, bias: Value | None, allowed: list[Value], scale: float | None, softcap: float, precision: DType,
           mode: int) -> tuple[Value, Value]:  # fmt: skip
    """`softmax(softcap(scale q k) + bias) v` over `[B, H, S, D]`, keys outside `allowed` left out; and the scores that `mode` asks for.

    In float16, q and k both take the root of the scale, so that their product does not overflow; elsewhere q takes all of it.
    """
    q, k = scaled(q, k, scale)
    scores = raw = grouped_scores(q, k)
    if softcap > 0:
        scores = c.scale(p.tanh(c.scale(scores, 1 / softcap)), softcap)
    capped = scores
    if bias is not None:
        scores = p.add(scores, broadcast_to(bias, scores.shape))
    for mask in allowed:
        blocked = p.number(-math.inf, scores)
        scores = p.select(broadcast_to(mask, scores.shape), scores, blocked)
    wide = p.cast(scores, dtype=precision)
    weights = p.cast(
        guarded_softmax(wide) if bias is not None or allowed else c.softmax(wide, (wide.rank - 1,)), dtype=q.dtype
    )
    shown = {0: raw, 1: capped, 2: scores, 3: weights}.get(mode)
    if shown is None:
        raise Unsupported(f"qk_matmul_output_mode={mode} is none of 0, 1, 2, 3")
    return grouped_average(weights, p.cast(v, dtype=q.dtype)), shown


def scaled(q: Value, k: Value, scale: float | None) -> tuple[Value, Value]:
    """q and k so scaled that their product is `scale q k`; by default the scale is one over the root of the size of a head."""
    size = q.shape[3]
    if scale is None and isinstance(size, int):
        scale = 1 / math.sqrt(size)
    if scale is None:
        wide = f64 if q.dtype is f64 else f32
        root = p.sqrt(p.sqrt(p.cast(p.dim(size), dtype=wide)))
        factor = p.cast(c.reciprocal(root), dtype=q.dtype)
        return p.mul(q, p.broadcast(factor, shape=q.shape, axes=())), p.mul(
            k, p.broadcast(factor, shape=k.shape, axes=())
        )
    if q.dtype.bits < 32 and scale >= 0:
        return c.scale(q, math.sqrt(scale)), c.scale(k, math.sqrt(scale))
    return c.scale(q, scale), k


@lowers("Attention", since=23)
def attention(q: Value, k: Value, v: Value, attn_mask: Value | None = None, past_key: Value | None = None,
              past_value: Value | None = None, nonpad_kv_seqlen: Value | None = None, *, is_causal: int = 0, kv_num_heads: int = 0,
              left_window_size: int = -1, q_num_heads: int = 0, qk_matmul_output_mode: int = 0, right_window_size: int = -1,
              scale: float | None = None, softcap: float = 0.0, softmax_precision: int = 0,
              node: Node) -> tuple[Value, Value, Value, Value]:  # fmt: skip
    """softmax(softcap(scale q k) + mask) v, for each head; the keys and values with those of the past; the scores"""
    if (past_key is None) != (past_value is None):
        raise Unsupported("past_key and past_value must be given together")
    if nonpad_kv_seqlen is not None and past_key is not None:
        raise Unsupported("nonpad_kv_seqlen and past_key exclude each other")
    three = q.rank == 3
    q, k, v = (
        split_heads(x, n, what)
        for x, n, what in ((q, q_num_heads, "Q"), (k, kv_num_heads, "K"), (v, kv_num_heads, "V"))
    )
    offset: Value | Dim = 0
    if past_key is not None and past_value is not None:
        for past, new in ((past_key, k), (past_value, v)):
            for axis in (0, 1, 3):
                require_equal(past.shape[axis], new.shape[axis], "the past continues in the keys and values")
        require_equal(past_key.shape[2], past_value.shape[2], "there is one value per key")
        require_equal(k.shape[2], v.shape[2], "there is one value per key")
        offset = past_key.shape[2]
        k, v = p.concat(past_key, k, axis=2), p.concat(past_value, v, axis=2)
    queries, keys = q.shape[2], k.shape[2]
    for other in (k, v):
        require_equal(q.shape[0], other.shape[0], "queries, keys and values have the same batch")
    require_equal(q.shape[3], k.shape[3], "queries and keys have heads of the same size")
    require_equal(keys, v.shape[2], "there is one value per key")
    require_equal(k.shape[1], v.shape[1], "keys and values have as many heads")
    allowed, bias = [], None
    if nonpad_kv_seqlen is not None:
        require_equal(nonpad_kv_seqlen.shape[0], q.shape[0], "one length per sample")
        offset = c.sub(nonpad_kv_seqlen, filled(queries, nonpad_kv_seqlen.shape))
        shape = (q.shape[0], 1, 1, keys)
        place, length = (
            p.broadcast(p.iota(keys), shape=shape, axes=(3,)),
            p.broadcast(nonpad_kv_seqlen, shape=shape, axes=(0,)),
        )
        allowed.append(p.less(place, length))
    seen = frontier(queries, keys, offset, bool(is_causal), left_window_size, right_window_size)
    if seen is not None:
        allowed.append(seen)
    if attn_mask is not None:
        mask = lengthened(attn_mask, keys, nonpad_kv_seqlen) if node.opset >= 24 else attn_mask
        if mask.dtype is bool_:
            allowed.append(mask)
        else:
            bias = p.cast(mask, dtype=q.dtype)
    precision = dtype_of_onnx(softmax_precision) if softmax_precision else q.dtype
    y, scores = attend(q, k, v, bias, allowed, scale, softcap, precision, qk_matmul_output_mode)
    return join_heads(y) if three else y, k, v, scores


# ---- rotary positions --------------------------------------------------------------------------------------------------------------------


def rotated(x: Value, cos: Value, sin: Value, interleaved: bool) -> Value:
    """Each pair of elements of the last axis turned by an angle: neighbours where `interleaved`, else an element of each half."""
    half = cos.shape[-1]
    size = simplest(half * 2)

    def part(start: Dim, limit: Dim, stride: int) -> Value:
        return p.slice(
            x, start=(*(0,) * (x.rank - 1), start), limit=(*x.shape[:-1], limit), stride=(*(1,) * (x.rank - 1), stride)
        )

    a, b = (part(0, size, 2), part(1, size, 2)) if interleaved else (part(0, half, 1), part(half, size, 1))
    real, imaginary = c.sub(p.mul(cos, a), p.mul(sin, b)), p.add(p.mul(sin, a), p.mul(cos, b))
    if interleaved:
        pair = p.concat(c.unsqueeze(real, (x.rank,)), c.unsqueeze(imaginary, (x.rank,)), axis=x.rank)
        return c.flatten_axes(pair, x.rank - 1, x.rank + 1)
    return p.concat(real, imaginary, axis=x.rank - 1)


def rotary(x: Value, cos: Value, sin: Value, sequence_axis: int, width: int, interleaved: bool) -> Value:
    """`x[B, .., .., D]` with the first `width` elements of its last axis (all, where 0) turned by angles `[B, S, width / 2]`."""
    size = x.shape[3]
    part = size if width == 0 else width
    half = require_divides(part, 2, "the rotated part of a head is even")
    head, rest = c.split(x, (part, simplest(size - part)), 3) if width else (x, None)
    shape = (*x.shape[:3], half)

    def spread(v: Value) -> Value:
        require_equal(v.shape[-1], half, "there is one angle for each pair of elements")
        require_equal(v.shape[1], x.shape[sequence_axis], "there are angles for each place of the sequence")
        if is_one(v.shape[0]) and not is_one(x.shape[0]):
            return p.broadcast(p.reshape(v, shape=v.shape[1:]), shape=shape, axes=(sequence_axis, 3))
        require_equal(v.shape[0], x.shape[0], "there are angles for each sample")
        return p.broadcast(v, shape=shape, axes=(0, sequence_axis, 3))

    y = rotated(head, spread(cos), spread(sin), interleaved)
    return y if rest is None else p.concat(y, rest, axis=3)


@lowers("RotaryEmbedding", since=23)
def rotary_embedding(x: Value, cos_cache: Value, sin_cache: Value, position_ids: Value | None = None, *, interleaved: int = 0,
                     num_heads: int = 0, rotary_embedding_dim: int = 0) -> Value:  # fmt: skip
    """pairs (a, b) of each head turned: (cos a - sin b, sin a + cos b), by the angle of their place"""
    if position_ids is not None:
        at = p.cast(position_ids, dtype=i64)
        cos_cache, sin_cache = p.gather(cos_cache, at, axis=0), p.gather(sin_cache, at, axis=0)
    if x.rank == 4:
        return rotary(x, cos_cache, sin_cache, 2, rotary_embedding_dim, bool(interleaved))
    if x.rank != 3 or not num_heads:
        raise Unsupported(f"X {x.type!r} needs 4 axes, or 3 and num_heads")
    each = require_divides(x.shape[2], num_heads, "num_heads divides the last axis of X")
    y = rotary(
        p.reshape(x, shape=(*x.shape[:2], num_heads, each)),
        cos_cache,
        sin_cache,
        1,
        rotary_embedding_dim,
        bool(interleaved),
    )
    return p.reshape(y, shape=x.shape)
