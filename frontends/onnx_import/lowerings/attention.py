"""Attention, rotary positions, and the recurrences that stand in for attention."""

from __future__ import annotations

import math

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.dims import Dim, Shape, at_least, is_one, simplest
from ....algebra.errors import InconclusiveDim
from ....algebra.graph import Value
from ....algebra.primitives.control import body_of
from ....algebra.types import DType, TensorType, bool_, f32, f64, i64
from ..broadcasting import broadcast_to
from ..context import Node, Unsupported, require_divides, require_equal
from ..registry import lowers
from ..tensors import dtype_of_onnx
from .convolution import padded, with_bias


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


# ---- recurrences -------------------------------------------------------------------------------------------------------------------------


def by_step(x: Value, heads: int, what: str, size: Dim | None = None) -> Value:
    """`[B, T, heads size]` as `[T, B, heads, size]`."""
    if x.rank != 3:
        raise Unsupported(f"{what} needs 3 axes, found {x.type!r}")
    if size is None:
        size = require_divides(x.shape[2], heads, f"the number of heads divides the last axis of {what}")
    require_equal(x.shape[2], simplest(size * heads), f"the last axis of {what} holds its heads")
    return p.transpose(p.reshape(x, shape=(*x.shape[:2], heads, size)), perm=(1, 0, 2, 3))


def decay_by_step(decay: Value, heads: int, width: Dim) -> Value:
    """The decay of each row of the state, `[T, B, heads, width]`; given for each row, or one for each head."""
    last = decay.shape[2]
    if isinstance(last, int) and last == heads:
        each = p.transpose(decay, perm=(1, 0, 2))
        return p.broadcast(each, shape=(*each.shape, width), axes=(0, 1, 2))
    if not isinstance(last, int) and last != simplest(width * heads):
        raise Unsupported(
            f"whether decay {decay.type!r} is one for each head depends on its last size; bind it with dims"
        )
    return by_step(decay, heads, "decay", width)


def recurrence(
    query: Value, key: Value, value: Value, decay: Value | None, beta: Value | None, state: Value
) -> tuple[Value, Value]:
    """Step by step `S' = e ** g S`, `S = S' + k (beta (v - S' k))` (or `S' + k v`) and `o = q S`; the last state and all o.

    Everything but the state has its steps first; heads of the state serve groups of consecutive heads of the query.
    """
    xs = [v for v in (query, key, value, decay, beta) if v is not None]

    def step(s: Value, *slices: Value) -> tuple[Value, Value]:
        rest = list(slices)
        q, k, v = rest.pop(0), rest.pop(0), rest.pop(0)
        if decay is not None:
            s = p.mul(s, p.broadcast(p.exp(rest.pop(0)), shape=s.shape, axes=(0, 1, 2)))
        if beta is not None:
            kept = p.dot(s, k, contract=((2,), (2,)), batch=((0, 1), (0, 1)))
            v = p.mul(rest.pop(0), c.sub(v, kept))
        s = p.add(
            s, p.mul(p.broadcast(k, shape=s.shape, axes=(0, 1, 2)), p.broadcast(v, shape=s.shape, axes=(0, 1, 3)))
        )
        groups = require_divides(q.shape[1], s.shape[1], "the heads of keys divide those of queries")
        parted = p.reshape(q, shape=(q.shape[0], s.shape[1], groups, q.shape[2]))
        o = p.dot(parted, s, contract=((3,), (2,)), batch=((0, 1), (0, 1)))
        return s, p.reshape(o, shape=(*q.shape[:2], v.shape[2]))

    inputs = [("state", state), *((f"x{i}", v) for i, v in enumerate(xs))]
    types = [(n, TensorType(v.dtype, v.shape if n == "state" else v.shape[1:])) for n, v in inputs]
    body = body_of(step, types, outputs=("state", "output"))
    last, outputs = p.scan([state], xs, [], body, length=query.shape[0])
    return last, outputs


@lowers("LinearAttention", since=27)
def linear_attention(query: Value, key: Value, value: Value, past_state: Value | None = None, decay: Value | None = None,
                     beta: Value | None = None, *, chunk_size: int = 64, kv_num_heads: int, q_num_heads: int, scale: float = 0.0,
                     update_rule: str = "gated_delta") -> tuple[Value, Value]:  # fmt: skip
    """o = scale q S, where S = e ** g S + k v, step by step; or + k (beta (v - e ** g S k)), by `update_rule`"""
    rules = {"linear": (False, False), "gated": (True, False), "delta": (False, True), "gated_delta": (True, True)}
    if update_rule not in rules:
        raise Unsupported(f"update_rule={update_rule!r} is none of {', '.join(rules)}")
    for name, given, wanted in zip(("decay", "beta"), (decay, beta), rules[update_rule], strict=True):
        if (given is not None) != wanted:
            raise Unsupported(f"update_rule={update_rule!r} {'needs' if wanted else 'has no'} {name}")
    dtype, batch = query.dtype, query.shape[0]
    wide = f64 if dtype is f64 else f32
    for other in (key, value, decay, beta):
        if other is not None:
            require_equal(other.shape[0], batch, "all operands have the same batch")
            require_equal(other.shape[1], query.shape[1], "all operands have as many steps")
    q = by_step(p.cast(query, dtype=wide), q_num_heads, "query")
    k = by_step(p.cast(key, dtype=wide), kv_num_heads, "key", q.shape[3])
    v = by_step(p.cast(value, dtype=wide), kv_num_heads, "value")
    if scale:
        q = c.scale(q, scale)
    else:
        root = p.sqrt(p.cast(p.dim(q.shape[3]), dtype=wide))
        q = p.div(q, p.broadcast(root, shape=q.shape, axes=()))
    state_type = dtype if past_state is None else past_state.dtype
    shape = (batch, kv_num_heads, k.shape[3], v.shape[3])
    if past_state is not None:
        for a, b in zip(past_state.shape, shape, strict=True):
            require_equal(a, b, "the past state has one matrix for each head of each sample")
    state = p.full(0, wide, shape) if past_state is None else p.cast(past_state, dtype=wide)
    g = None if decay is None else decay_by_step(p.cast(decay, dtype=wide), kv_num_heads, k.shape[3])
    rate = None
    if beta is not None:
        each = p.transpose(p.cast(beta, dtype=wide), perm=(1, 0, 2))
        if is_one(each.shape[2]):
            rate = p.broadcast(p.reshape(each, shape=each.shape[:2]), shape=v.shape, axes=(0, 1))
        else:
            require_equal(each.shape[2], kv_num_heads, "beta is one number, or one for each head")
            rate = p.broadcast(each, shape=v.shape, axes=(0, 1, 2))
    last, outputs = recurrence(q, k, v, g, rate, state)
    y = c.flatten_axes(p.transpose(outputs, perm=(1, 0, 2, 3)), 2, 4)
    return p.cast(y, dtype=dtype), p.cast(last, dtype=state_type)


@lowers("CausalConvWithState", since=27)
def causal_conv_with_state(input: Value, weight: Value, bias: Value | None = None, past_state: Value | None = None, *,
                           activation: str = "none") -> tuple[Value, Value]:  # fmt: skip
    """sum over k of w[c, k] x[n, c, t + k - (K - 1)] + b[c], with the past (or zeros) before; and the last K - 1 of x"""
    if input.rank != 3 or weight.rank != 3 or activation not in ("none", "silu", "swish"):
        raise Unsupported(f"input {input.type!r}, weight {weight.type!r}, activation={activation!r}")
    kernel, length = weight.shape[2], input.shape[2]
    before = simplest(kernel - 1)
    require_equal(weight.shape[0], input.shape[1], "there is one kernel for each channel")
    if past_state is None:
        longer = padded(input, (before,), (0,))
    else:
        for axis, d in enumerate((*input.shape[:2], before)):
            require_equal(past_state.shape[axis], d, "the past holds K - 1 places of each channel")
        longer = p.concat(past_state, input, axis=2)
    patches = p.window(longer, axes=(2,), sizes=(kernel,), strides=(1,), dilations=(1,))
    taps = p.reshape(weight, shape=(weight.shape[0], kernel))
    y = p.transpose(p.dot(patches, taps, contract=((3,), (1,)), batch=((1,), (0,))), perm=(1, 0, 2))
    y = with_bias(y, bias)
    if activation != "none":
        y = p.mul(y, c.sigmoid(y))
    present = p.slice(longer, start=(0, 0, length), limit=longer.shape)
    return y, present
