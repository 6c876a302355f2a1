"""Operators of `com.microsoft` that exporters and onnxruntime's optimizer leave in files.

Their meaning is that of onnxruntime's CPU kernels. Some stand in the default domain, as onnxruntime writes them there: `LayerNormalization` before
opset 17 and `SimplifiedLayerNormalization`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.dims import Dim, ceildiv, dmax, equal, is_zero, simplest
from ....algebra.graph import Value
from ....algebra.types import DType, f32, i32, i64, u8
from ..broadcasting import broadcast_shapes, broadcast_to, together
from ..context import Node, Unsupported, require_divides, require_equal, require_same_shape
from ..registry import Gradient, Static, known, lowers
from ..straight_through import real_of
from . import shape
from .activation import elu, gelu_exact, gelu_tanh, hard_sigmoid_of, leaky_relu, softmax, softmax_1, softplus, softsign
from .attention import (
    filled,
    frontier,
    grouped_average,
    grouped_scores,
    guarded_softmax,
    join_heads,
    rotary,
    scaled,
    split_heads,
)
from .convolution import conv
from .math import gemm, matmul
from .normalization import group_norm, layer_norm, rms_norm
from .pooling import average_pool, global_average_pool, max_pool, surely
from .quantized import (
    ROUNDED,
    Ints,
    dequantize_linear,
    dequantized,
    dynamic_quantize_linear,
    integer_matmul,
    placed,
    quantize_linear,
    quantized,
)
from .recurrent import Layer, activations_of, bias_of, directions_of, lstm_layer, row

MS = "com.microsoft"
PIECEWISE = Gradient.PIECEWISE


# ---- activations -----------------------------------------------------------------------------------------------------------------------


@lowers("Gelu", domain=MS)
def gelu(x: Value) -> Value:
    """x (1 + erf(x / sqrt 2)) / 2"""
    return gelu_exact(x)


@lowers("BiasGelu", domain=MS)
def bias_gelu(a: Value, b: Value) -> Value:
    """gelu(a + b)"""
    return gelu_exact(p.add(*together(a, b)))


@lowers("FastGelu", domain=MS)
def fast_gelu(x: Value, bias: Value | None = None) -> Value:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, of x + bias"""
    return gelu_tanh(x if bias is None else p.add(x, broadcast_to(bias, x.shape)))


@lowers("QuickGelu", domain=MS)
def quick_gelu(x: Value, *, alpha: float = 1.702) -> Value:
    """x sigmoid(alpha x)"""
    return p.mul(x, c.sigmoid(c.scale(x, alpha)))


@lowers("BiasSplitGelu", domain=MS)
def bias_split_gelu(x: Value, bias: Value) -> Value:
    """a gelu(b), where a and b are the halves of x + bias"""
    x = p.add(x, broadcast_to(bias, x.shape))
    half = require_divides(x.shape[-1], 2, "the last axis is split in two")
    a, b = c.split(x, (half, half), x.rank - 1)
    return p.mul(a, gelu_exact(b))


@lowers("BiasAdd", domain=MS)
def bias_add(x: Value, bias: Value, skip: Value) -> Value:
    """x + bias + skip"""
    return p.add(p.add(x, broadcast_to(bias, x.shape)), skip)


@lowers("BiasSoftmax", domain=MS)
def bias_softmax(data: Value, bias: Value, *, axis: int, is_inner_broadcast: int) -> Value:
    """softmax(data + bias) over the axes from `axis` on"""
    x = p.add(data, broadcast_to(bias, data.shape))
    return c.softmax(x, tuple(range(axis % x.rank, x.rank)))


def activated(x: Value, activation: str, alpha: float | None = None, beta: float | None = None) -> Value:
    """What a fused activation makes of x; parameters that are left out have the operator's defaults."""

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    match activation:
        case "":
            return x
        case "Relu":
            return c.relu(x)
        case "Tanh":
            return p.tanh(x)
        case "Sigmoid":
            return c.sigmoid(x)
        case "LeakyRelu":
            result: Value = leaky_relu(x, alpha=given(alpha, 0.01))
        case "Elu":
            result = elu(x, alpha=given(alpha, 1.0))
        case "Softplus":
            result = softplus(x)
        case "Softsign":
            result = softsign(x)
        case "HardSigmoid":
            result = hard_sigmoid_of(x, given(alpha, 0.2), given(beta, 0.5))
        case "Clip":
            low, high = (None if v is None else p.number(v, x) for v in (alpha, beta))
            result = c.clamp(x, low, high)
        case _:
            raise Unsupported(f"the fused activation {activation!r} is not handled")
    return result


# ---- products --------------------------------------------------------------------------------------------------------------------------


def _turned(x: Value, transposed: int, batch: int) -> Value:
    """An operand of FusedMatMul: its first axis moved behind the batch, then the last two swapped."""
    if batch and x.rank > 2:
        x = p.transpose(x, perm=(*range(1, x.rank - 1), 0, x.rank - 1))
    if transposed and x.rank > 1:
        x = p.transpose(x, perm=(*range(x.rank - 2), x.rank - 1, x.rank - 2))
    return x


@lowers("FusedMatMul", "TransposeMatMul", domain=MS)
def fused_matmul(a: Value, b: Value, *, alpha: float = 1.0, transA: int = 0, transB: int = 0, transBatchA: int = 0, transBatchB: int = 0) -> Value:  # fmt: skip
    """alpha a' @ b'"""
    return c.scale(matmul(_turned(a, transA, transBatchA), _turned(b, transB, transBatchB)), alpha)


@lowers("FusedMatMulActivation", domain=MS)
def fused_matmul_activation(
    a: Value, b: Value, *, activation: str, activation_alpha: float | None = None, activation_axis: int | None = None,
    activation_beta: float | None = None, activation_gamma: float | None = None, alpha: float = 1.0, transA: int = 0, transB: int = 0,
    transBatchA: int = 0, transBatchB: int = 0,
) -> Value:  # fmt: skip
    """activation(alpha a' @ b')"""
    y: Value = fused_matmul(
        a, b, alpha=alpha, transA=transA, transB=transB, transBatchA=transBatchA, transBatchB=transBatchB
    )
    return activated(y, activation, activation_alpha, activation_beta)


@lowers("FusedGemm", domain=MS)
def fused_gemm(
    a: Value, b: Value, c_: Value | None = None, *, activation: str = "", activation_alpha: float | None = None,
    activation_beta: float | None = None, activation_gamma: float | None = None, alpha: float = 1.0, beta: float = 1.0, transA: int = 0,
    transB: int = 0,
) -> Value:  # fmt: skip
    """activation(alpha a' @ b' + beta c)"""
    return activated(
        gemm(a, b, c_, alpha=alpha, beta=beta, transA=transA, transB=transB), activation, activation_alpha, activation_beta
    )  # fmt: skip


@lowers("GemmFastGelu", domain=MS)
def gemm_fast_gelu(x: Value, w: Value, bias: Value | None = None) -> Value:
    """fast_gelu(x @ w + bias)"""
    y: Value = fast_gelu(matmul(x, w), bias)
    return y


@lowers("FusedConv", domain=MS)
def fused_conv(
    x: Value, w: Value, b: Value | None = None, z: Value | None = None, *, activation: str = "",
    activation_params: tuple[float, ...] = (), auto_pad: str = "NOTSET", dilations: Ints | None = None, group: int = 1,
    kernel_shape: Ints | None = None, pads: Ints | None = None, strides: Ints | None = None,
) -> Value:  # fmt: skip
    """activation(conv(x, w) + b + z)"""
    y: Value = conv(
        x, w, b, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads, strides=strides
    )  # fmt: skip
    y = y if z is None else p.add(y, broadcast_to(z, y.shape))
    alpha, beta = (*activation_params, None, None)[:2]
    return activated(y, activation, alpha, beta)


def _channels_first(x: Value) -> Value:
    return p.transpose(x, perm=(0, x.rank - 1, *range(1, x.rank - 1)))


def _channels_last(x: Value) -> Value:
    return p.transpose(x, perm=(0, *range(2, x.rank), 1))


@lowers("NhwcFusedConv", "NhwcConv", domain=MS)
def nhwc_fused_conv(
    x: Value, w: Value, b: Value | None = None, z: Value | None = None, *, activation: str = "",
    activation_params: tuple[float, ...] = (), auto_pad: str = "NOTSET", dilations: Ints | None = None, group: int = 1,
    kernel_shape: Ints | None = None, pads: Ints | None = None, strides: Ints | None = None, node: Node,
) -> Value:  # fmt: skip
    """FusedConv with the channels last"""
    w = _channels_first(w) if node.op_type == "NhwcConv" else w
    y: Value = fused_conv(
        _channels_first(x), w, b, None if z is None else _channels_first(z), activation=activation, activation_params=activation_params,
        auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads, strides=strides,
    )  # fmt: skip
    return _channels_last(y)


@lowers("NhwcMaxPool", domain=MS)
def nhwc_max_pool(
    x: Value, *, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Ints | None = None, kernel_shape: Ints,
    pads: Ints | None = None, strides: Ints | None = None,
) -> Value:  # fmt: skip
    """the largest of each window, channels last"""
    y, *_ = max_pool(
        _channels_first(x), auto_pad=auto_pad, ceil_mode=ceil_mode, dilations=dilations, kernel_shape=kernel_shape, pads=pads,
        strides=strides,
    )  # fmt: skip
    return _channels_last(y)


@lowers("CDist", domain=MS)
def cdist(a: Value, b: Value, *, metric: str = "sqeuclidean") -> Value:
    """the distance of every row of a to every row of b"""
    if metric not in ("euclidean", "sqeuclidean"):
        raise Unsupported(f"the metric {metric!r} is neither euclidean nor sqeuclidean")
    full = (a.shape[0], b.shape[0], a.shape[1])
    gap = c.sub(p.broadcast(a, shape=full, axes=(0, 2)), p.broadcast(b, shape=full, axes=(1, 2)))
    square = p.reduce_sum(c.square(gap), axes=(2,))
    if metric == "sqeuclidean":
        return square
    zero = p.equal(square, p.number(0, square))
    return p.select(zero, p.number(0, square), p.sqrt(p.select(zero, p.number(1, square), square)))


lowers("Trilu", domain=MS)(shape.trilu)
lowers("Pad", domain=MS)(shape.pad)
lowers("Range", domain=MS)(shape.range_)


@lowers("ExpandDims", domain=MS)
def expand_dims(x: Value, axis: Static) -> Value:
    """x with an axis of size 1"""
    at = int(np.asarray(axis).reshape(()).item())
    return c.unsqueeze(x, (at % (x.rank + 1),))


# ---- normalisation ---------------------------------------------------------------------------------------------------------------------


@lowers("LayerNormalization", since=1)
def layer_normalization_1(
    x: Value, scale: Value, b: Value | None = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Value, Value, Value]:  # fmt: skip
    """(x - mean) / sqrt(var + epsilon) scale + b, as onnxruntime writes it before opset 17"""
    return layer_norm(x, scale, b, axis, epsilon, stash_type)


@lowers("SimplifiedLayerNormalization")
def simplified_layer_normalization(x: Value, scale: Value, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> tuple[Value, Value]:  # fmt: skip
    """x / sqrt(mean(x x) + epsilon) scale"""
    return rms_norm(x, scale, axis, epsilon, stash_type)


lowers("SimplifiedLayerNormalization", domain=MS)(simplified_layer_normalization)


def _with_skip(x: Value, skip: Value, bias: Value | None) -> Value:
    total = p.add(x, broadcast_to(skip, x.shape))
    return total if bias is None else p.add(total, broadcast_to(bias, x.shape))


@lowers("SkipLayerNormalization", domain=MS)
def skip_layer_normalization(
    input: Value, skip: Value, gamma: Value, beta: Value | None = None, bias: Value | None = None, *, epsilon: float = 1e-12
) -> tuple[Value, Value, Value, Value]:  # fmt: skip
    """layer_norm(input + skip + bias) gamma + beta; mean, inverse deviation and the sum"""
    total = _with_skip(input, skip, bias)
    return (*layer_norm(total, gamma, beta, -1, epsilon), total)


@lowers("SkipSimplifiedLayerNormalization", domain=MS)
def skip_simplified_layer_normalization(
    input: Value, skip: Value, gamma: Value, bias: Value | None = None, *, epsilon: float = 1e-12
) -> tuple[Value | None, ...]:  # fmt: skip
    """rms_norm(input + skip + bias) gamma; the inverse root and the sum"""
    total = _with_skip(input, skip, bias)
    y, inverse = rms_norm(total, gamma, -1, epsilon)
    return y, None, inverse, total


@lowers("GroupNorm", domain=MS)
def group_norm_nhwc(x: Value, gamma: Value, beta: Value, *, activation: int, channels_last: int = 1, epsilon: float = 1e-5, groups: int) -> Value:  # fmt: skip
    """group_norm(x) gamma + beta, then SiLU where `activation` is 1"""
    first = _channels_first(x) if channels_last else x
    y = group_norm(first, groups, epsilon, f32 if first.dtype.bits < 32 else first.dtype)
    y = p.cast(y, dtype=x.dtype)
    scale, bias = (p.broadcast(p.cast(v, dtype=y.dtype), shape=y.shape, axes=(1,)) for v in (gamma, beta))
    y = p.add(p.mul(y, scale), bias)
    y = p.mul(y, c.sigmoid(y)) if activation else y
    return _channels_last(y) if channels_last else y


@lowers("EmbedLayerNormalization", domain=MS)
def embed_layer_normalization(
    input_ids: Value, segment_ids: Value | None, word_embedding: Value, position_embedding: Value, segment_embedding: Value | None,
    gamma: Value, beta: Value, mask: Value | None = None, position_ids: Value | None = None, *, epsilon: float = 1e-12,
    mask_index_type: int = 1,
) -> tuple[Value, Value, Value]:  # fmt: skip
    """layer_norm(words + positions + segments); how many ids of each row the mask keeps; the sum of embeddings"""
    batch, length = input_ids.shape
    for other in (segment_ids, mask):
        if other is not None:
            require_same_shape(input_ids.shape, other.shape, "segments and mask are those of the ids")
    total = p.gather(word_embedding, p.cast(input_ids, dtype=i64), axis=0)
    places = p.iota(length) if position_ids is None else p.cast(position_ids, dtype=i64)
    total = p.add(total, broadcast_to(p.gather(position_embedding, places, axis=0), total.shape))
    if segment_embedding is not None:
        if segment_ids is None:
            segment = p.gather(segment_embedding, p.full(0, i64, (batch, length)), axis=0)
        else:
            segment = p.gather(segment_embedding, p.cast(segment_ids, dtype=i64), axis=0)
        total = p.add(total, segment)
    y, *_ = layer_norm(total, gamma, beta, -1, epsilon)
    kept = p.full(0, i32, (batch,)) if mask is None else p.reduce_sum(p.cast(mask, dtype=i32), axes=(1,))
    return y, kept, total


# ---- attention -------------------------------------------------------------------------------------------------------------------------


def _attend(
    q: Value, k: Value, v: Value, bias: Sequence[Value], allowed: Sequence[Value], scale: float | None, softcap: float = 0.0,
    sink: Value | None = None,
) -> tuple[Value, Value]:  # fmt: skip
    """`softmax(scale q k + bias) v` over `[B, N, S, H]`, and the scaled scores; `sink[N]` is a logit of its own that takes a share and gives nothing."""
    scores = raw = grouped_scores(*scaled(q, k, scale or None))
    if softcap > 0:
        scores = c.scale(p.tanh(c.scale(scores, 1 / softcap)), softcap)
    for b in bias:
        scores = p.add(scores, broadcast_to(p.cast(b, dtype=scores.dtype), scores.shape))
    for mask in allowed:
        scores = p.select(broadcast_to(mask, scores.shape), scores, p.number(-math.inf, scores))
    wide = p.cast(scores, dtype=f32) if scores.dtype.bits < 32 else scores
    if sink is None:
        weights = guarded_softmax(wide) if allowed or bias else c.softmax(wide, (3,))
    else:
        column = p.broadcast(p.cast(sink, dtype=wide.dtype), shape=(*wide.shape[:3], 1), axes=(1,))
        both = guarded_softmax(p.concat(wide, column, axis=3))
        weights = p.slice(both, start=(0,) * 4, limit=wide.shape)
    return grouped_average(p.cast(weights, dtype=v.dtype), v), raw


def _blocking(keep: Value, filler: float, dtype: DType) -> Value:
    """0 where kept, else the filler."""
    return p.select(keep, p.full(0, dtype, keep.shape), p.full(filler, dtype, keep.shape))


def _padding(mask: Value, batch: Dim, keys: Dim, queries: Dim) -> Value:
    """A mask of keys as bool that broadcasts over `[B, N, S, T]`: by length, by start and end, by key, or by query and key."""
    if mask.rank == 1:
        full = (batch, 1, 1, keys)
        place = p.broadcast(p.iota(keys), shape=full, axes=(3,))

        def spread(v: Value) -> Value:
            return p.broadcast(p.cast(v, dtype=i64), shape=full, axes=(0,))

        if surely(lambda: equal(mask.shape[0], simplest(2 * batch))):
            ends, starts = c.split(mask, (batch, batch), 0)
            return p.logical_and(p.less(place, spread(ends)), p.less_equal(spread(starts), place))
        require_equal(mask.shape[0], batch, "a mask by length has an entry for each sample")
        return p.less(place, spread(mask))
    keep = c.not_equal(mask, p.number(0, mask)) if mask.dtype.integral else mask
    if mask.rank == 2:
        require_equal(mask.shape[1], keys, "the mask has an entry for each key")
        return p.reshape(keep, shape=(mask.shape[0], 1, 1, keys))
    if mask.rank == 3:
        return p.reshape(keep, shape=(mask.shape[0], 1, queries, keys))
    if mask.rank == 4:  # [B, 1, longest, longest]: the rows of these queries, the columns of these keys
        start = (0, 0, simplest(keys - queries), 0)
        return p.slice(keep, start=start, limit=(mask.shape[0], mask.shape[1], keys, keys))
    raise Unsupported(f"a mask of {mask.type!r} is not handled")


def _one_batch(*xs: Value | None) -> None:
    """The tensors have one batch size, their first."""
    given = [x for x in xs if x is not None]
    for x in given[1:]:
        require_equal(given[0].shape[0], x.shape[0], "queries, keys and values have the same batch")


def _cached(k: Value, v: Value, past: tuple[Value, Value] | None) -> tuple[Value, Value, Dim]:
    """Keys and values behind those of the past, and how many those are."""
    if past is None:
        return k, v, 0
    _one_batch(k, *past)
    return p.concat(past[0], k, axis=2), p.concat(past[1], v, axis=2), past[0].shape[2]


@lowers("Attention", domain=MS)
def attention(
    input: Value, weights: Value, bias: Value | None = None, mask_index: Value | None = None, past: Value | None = None,
    attention_bias: Value | None = None, past_sequence_length: Value | None = None, *, do_rotary: int = 0,
    mask_filter_value: float = -10000.0, num_heads: int, past_present_share_buffer: int = 0, qkv_hidden_sizes: Ints = (),
    rotary_embedding_dim: int = 0, scale: float = 0.0, unidirectional: int = 0,
) -> tuple[Value, Value | None]:  # fmt: skip
    """softmax(scale q k + mask) v of each head, with q, k and v the thirds of input @ weights + bias"""
    if do_rotary or past_present_share_buffer or past_sequence_length is not None:
        raise Unsupported(
            "rotary positions and a shared buffer of the past are not handled here: use GroupQueryAttention"
        )
    projected = matmul(input, weights)
    if bias is not None:
        projected = p.add(projected, broadcast_to(bias, projected.shape))
    sizes = qkv_hidden_sizes or (require_divides(projected.shape[2], 3, "the weights are three"),) * 3
    q, k, v = (split_heads(x, num_heads, "input") for x in c.split(projected, sizes, 2))
    return _self_attention(q, k, v, mask_index, past, attention_bias, scale, mask_filter_value, unidirectional)


def _self_attention(
    q: Value, k: Value, v: Value, mask: Value | None, past: Value | None, attention_bias: Value | None, scale: float, filler: float,
    unidirectional: int,
) -> tuple[Value, Value | None]:  # fmt: skip
    pair = None
    if past is not None:
        pieces = c.split(past, (1, 1), 0)
        pair = (c.drop_ones(pieces[0], (0,)), c.drop_ones(pieces[1], (0,)))
    k, v, offset = _cached(k, v, pair)
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    extra = [] if attention_bias is None else [attention_bias]
    if mask is not None:
        extra.append(_blocking(_padding(mask, batch, keys, queries), filler, q.dtype))
    seen = frontier(queries, keys, offset, bool(unidirectional), -1, -1)
    y, _ = _attend(q, k, v, extra, [] if seen is None else [seen], scale)
    present = None
    if k.shape == v.shape:
        present = p.concat(c.unsqueeze(k, (0,)), c.unsqueeze(v, (0,)), axis=0)
    return join_heads(y), present


@lowers("MultiHeadAttention", domain=MS)
def multi_head_attention(
    query: Value, key: Value | None = None, value: Value | None = None, bias: Value | None = None, key_padding_mask: Value | None = None,
    attention_bias: Value | None = None, past_key: Value | None = None, past_value: Value | None = None,
    past_sequence_length: Value | None = None, cache_indirection: Value | None = None, *, mask_filter_value: float = -10000.0,
    num_heads: int, scale: float = 0.0, unidirectional: int = 0,
) -> tuple[Value, Value, Value, Value]:  # fmt: skip
    """softmax(scale q k + mask) v of each head"""
    if past_sequence_length is not None or cache_indirection is not None:
        raise Unsupported(
            "a shared buffer of the past is not handled: give past_key and past_value of the length of the past"
        )
    q, k, v = _unpacked(query, key, value, bias, num_heads)
    pair = None if past_key is None or past_value is None else (past_key, past_value)
    _one_batch(q, k, v)
    k, v, offset = _cached(k, v, pair)
    queries, keys = q.shape[2], k.shape[2]
    extra = [] if attention_bias is None else [attention_bias]
    if key_padding_mask is not None:
        keep = _padding(key_padding_mask, q.shape[0], keys, queries)
        extra.append(_blocking(keep, mask_filter_value, q.dtype))
    seen = frontier(queries, keys, offset, bool(unidirectional), -1, -1)
    y, raw = _attend(q, k, v, extra, [] if seen is None else [seen], scale)
    return join_heads(y), k, v, raw


def _unpacked(query: Value, key: Value | None, value: Value | None, bias: Value | None, heads: int) -> tuple[Value, Value, Value]:  # fmt: skip
    """Queries, keys and values as `[B, N, S, H]`, biases added; they may be packed into one tensor."""
    if query.rank == 5:  # [B, S, N, 3, H]
        parts = [p.transpose(c.drop_ones(x, (3,)), perm=(0, 2, 1, 3)) for x in c.split(query, (1, 1, 1), 3)]
    elif key is not None and key.rank == 5:  # [B, L, N, 2, H]
        pairs = [p.transpose(c.drop_ones(x, (3,)), perm=(0, 2, 1, 3)) for x in c.split(key, (1, 1), 3)]
        parts = [split_heads(query, heads, "query"), *pairs]
    elif key is None or value is None:
        raise Unsupported("query, key and value must be given, or packed into one tensor of 5 axes")
    else:
        parts = [split_heads(x, heads, n) for x, n in ((query, "query"), (key, "key"), (value, "value"))]
    if bias is not None:
        sizes = [simplest(x.shape[1] * x.shape[3]) for x in parts]
        biases = c.split(bias, sizes, 0)
        whole = [p.reshape(b, shape=(x.shape[1], x.shape[3])) for b, x in zip(biases, parts, strict=True)]
        crossed = key is not None and key.rank == 4  # keys and values of another model half come with their biases
        parts = [
            x if crossed and i else p.add(x, p.broadcast(b, shape=x.shape, axes=(1, 3)))
            for i, (x, b) in enumerate(zip(parts, whole, strict=True))
        ]
    return parts[0], parts[1], parts[2]


@lowers("RotaryEmbedding", domain=MS)
def rotary_embedding(
    input: Value, position_ids: Value, cos_cache: Value, sin_cache: Value, *, interleaved: int = 0, is_packed_batching: int = 0,
    num_heads: int = 0, rotary_embedding_dim: int = 0, scale: float = 1.0,
) -> Value:  # fmt: skip
    """pairs (a, b) of each head turned: (cos a - sin b, sin a + cos b), by the angle of their place"""
    if is_packed_batching:
        raise Unsupported("packed batches are not handled")
    axis = 2 if input.rank == 4 else 1
    places = p.cast(position_ids, dtype=i64)
    if places.rank == 1:  # one offset for all
        length = input.shape[axis]
        places = p.add(p.iota(length), p.broadcast(p.reshape(places, shape=()), shape=(length,), axes=()))
        places = p.reshape(places, shape=(1, length))
    cos, sin = p.gather(cos_cache, places, axis=0), p.gather(sin_cache, places, axis=0)
    if input.rank == 4:
        return rotary(input, cos, sin, 2, rotary_embedding_dim, bool(interleaved))
    each: Dim = simplest(cos_cache.shape[1] * 2)
    if num_heads:
        each = require_divides(input.shape[2], num_heads, "num_heads divides the last axis of the input")
    heads = num_heads or require_divides(input.shape[2], each, "heads have the size of the angles")
    x = p.reshape(input, shape=(*input.shape[:2], heads, each))
    return p.reshape(rotary(x, cos, sin, 1, rotary_embedding_dim, bool(interleaved)), shape=input.shape)


@lowers("GroupQueryAttention", domain=MS)
def group_query_attention(
    query: Value, key: Value | None, value: Value | None, past_key: Value | None, past_value: Value | None, seqlens_k: Value,
    total_sequence_length: Value, cos_cache: Value | None = None, sin_cache: Value | None = None, position_ids: Value | None = None,
    attention_bias: Value | None = None, head_sink: Value | None = None, *, causal: int = 1, do_rotary: int = 0, kv_num_heads: int,
    local_window_size: int = -1, num_heads: int, rotary_interleaved: int = 0, scale: float = 0.0, smooth_softmax: int = 0,
    softcap: float = 0.0,
) -> tuple[Value, Value, Value]:  # fmt: skip
    """causal softmax(softcap(scale q k)) v, fewer heads of keys and values than of queries; the keys and values with those of the past"""
    if key is None or value is None:
        each = require_divides(query.shape[2], num_heads + 2 * kv_num_heads, "query, key and value packed")
        query, key, value = c.split(query, [simplest(n * each) for n in (num_heads, kv_num_heads, kv_num_heads)], 2)
    q, k, v = (split_heads(x, n, w) for x, n, w in ((query, num_heads, "query"), (key, kv_num_heads, "key"), (value, kv_num_heads, "value")))  # fmt: skip
    _one_batch(q, k, v, seqlens_k, past_key, past_value)
    batch, length = q.shape[0], q.shape[2]
    empty = past_key is None or is_zero(past_key.shape[2])
    ends = p.cast(p.reshape(seqlens_k, shape=(batch,)), dtype=i64)
    start: Value | Dim = 0
    if not empty:
        start = p.add(ends, p.full(1, i64, (batch,)))
        start = c.sub(start, filled(length, (batch,)))
    if do_rotary:
        if cos_cache is None or sin_cache is None:
            raise Unsupported("do_rotary needs cos_cache and sin_cache")
        places = _places(position_ids, start, batch, length)
        cos, sin = p.gather(cos_cache, places, axis=0), p.gather(sin_cache, places, axis=0)
        q, k = (rotary(x, cos, sin, 2, simplest(2 * cos.shape[2]), bool(rotary_interleaved)) for x in (q, k))
    if not empty and past_key is not None and past_value is not None and isinstance(start, Value):
        total = _total(total_sequence_length, past_key.shape[2], length)
        k, v = (_behind(old, new, start, total) for old, new in ((past_key, k), (past_value, v)))
    seen = frontier(length, k.shape[2], start, bool(causal), max(local_window_size, 0) - 1, -1)
    sink = head_sink
    if smooth_softmax and sink is None:
        sink = p.full(0, q.dtype, (num_heads,))
    y, _ = _attend(
        q, k, v, [] if attention_bias is None else [attention_bias], [] if seen is None else [seen], scale, softcap, sink
    )  # fmt: skip
    return join_heads(y), k, v


def _places(given: Value | None, start: Value | Dim, batch: Dim, length: Dim) -> Value:
    """The place of each query, `[B, S]`."""
    if given is not None:
        return p.cast(given, dtype=i64)
    row = p.broadcast(p.iota(length), shape=(batch, length), axes=(1,))
    return p.add(row, p.broadcast(start, shape=(batch, length), axes=(0,))) if isinstance(start, Value) else row


def _total(total: Value, past: Dim, length: Dim) -> Dim:
    """How many keys there are then: the total where it is known, else the past and the new ones."""
    array = known(total)
    if array is None or array.size != 1:
        return simplest(past + length)
    return dmax(past, simplest(array.reshape(())[()]))


def _behind(past: Value, new: Value, start: Value, total: Dim) -> Value:
    """For each sample, what is past up to its `start`, what is new from there on, then 0: `[B, G, total, H]`."""
    both = p.concat(past, new, axis=2)
    shape_ = (both.shape[0], total)
    place = p.broadcast(p.iota(total), shape=shape_, axes=(1,))
    begin = p.broadcast(start, shape=shape_, axes=(0,))
    from_new = p.add(c.sub(place, begin), filled(past.shape[2], shape_))
    at = p.select(p.less(place, begin), place, p.min(from_new, filled(simplest(both.shape[2] - 1), shape_)))
    full = (*both.shape[:2], total, both.shape[3])
    taken = c.take_along(both, p.broadcast(at, shape=full, axes=(0, 2)), 2)
    inside = p.broadcast(p.less(from_new, filled(both.shape[2], shape_)), shape=full, axes=(0, 2))
    return p.select(inside, taken, p.number(0, taken))


# ---- weights of few bits ---------------------------------------------------------------------------------------------------------------


def _bits(packed: Value, bits: int) -> Value:
    """Bytes along the last axis as the numbers of `bits` bits inside, the lowest first."""
    if bits == 8:
        return packed
    each = 8 // bits
    shape_ = (*packed.shape, each)
    shifts = p.broadcast(p.literal(np.arange(0, 8, bits, dtype=np.uint8), u8), shape=shape_, axes=(packed.rank,))
    moved = p.shift_right(p.broadcast(packed, shape=shape_, axes=tuple(range(packed.rank))), shifts)
    return c.flatten_axes(p.bit_and(moved, p.number(2**bits - 1, moved)), packed.rank - 1, packed.rank + 1)


@lowers("MatMulNBits", domain=MS)
def matmul_n_bits(
    a: Value, b: Value, scales: Value, zero_points: Value | None = None, g_idx: Value | None = None, bias: Value | None = None, *, K: int,
    N: int, accuracy_level: int = 0, bits: int = 4, block_size: int, weight_prepacked: int = 0,
) -> Value:  # fmt: skip
    """a @ ((b - zero_points) scales)^T, where b holds numbers of few bits in blocks along K"""
    if bits not in (2, 4, 8) or weight_prepacked:
        raise Unsupported(f"weights of {bits} bits{', prepacked,' if weight_prepacked else ''} are not handled")
    blocks = int(ceildiv(K, block_size))
    numbers = p.cast(_bits(p.reshape(b, shape=(N, blocks, block_size * bits // 8)), bits), dtype=scales.dtype)
    numbers = p.slice(p.reshape(numbers, shape=(N, blocks * block_size)), start=(0, 0), limit=(N, K))
    block_of = p.literal(np.arange(K, dtype=np.int64) // block_size)
    if g_idx is not None:
        block_of = p.slice(p.cast(g_idx, dtype=i64), start=(0,), limit=(K,))

    def spread(v: Value) -> Value:
        """One number per row and block as one per row and input."""
        return p.gather(p.reshape(v, shape=(N, blocks)), block_of, axis=1)

    if zero_points is None:
        zero = p.number(2 ** (bits - 1), numbers)
    else:
        held = zero_points
        if held.dtype is u8:
            held = p.reshape(held, shape=(N, int(ceildiv(blocks * bits, 8))))
            held = p.slice(_bits(held, bits), start=(0, 0), limit=(N, blocks))
        zero = spread(p.cast(held, dtype=scales.dtype))
    weight = p.cast(p.mul(c.sub(numbers, zero), spread(scales)), dtype=a.dtype)
    y = p.dot(a, weight, contract=((a.rank - 1,), (1,)))
    return y if bias is None else p.add(y, broadcast_to(bias, y.shape))


# ---- on integers -----------------------------------------------------------------------------------------------------------------------


lowers("QuantizeLinear", domain=MS, gradient=PIECEWISE, reason=ROUNDED)(quantize_linear)
lowers("DequantizeLinear", domain=MS)(dequantize_linear)


def _to_integers(x: Value, scale: Value, zero: Value | None, dtype: DType) -> Value:
    """`x / scale`, rounded and moved by the zero point."""
    return quantized(p.div(x, placed(scale, x, 0)), None if zero is None else placed(zero, x, 0), zero.dtype if zero is not None else dtype)  # fmt: skip


@lowers("QLinearAdd", "QLinearMul", domain=MS, gradient=PIECEWISE, reason=ROUNDED)
def qlinear_binary(
    a: Value, a_scale: Value, a_zero_point: Value | None, b: Value, b_scale: Value, b_zero_point: Value | None, c_scale: Value,
    c_zero_point: Value | None = None, *, node: Node,
) -> Value:  # fmt: skip
    """a + b, or a b, of what the integers stand for"""
    x, y = together(dequantized(a, a_scale, a_zero_point), dequantized(b, b_scale, b_zero_point))
    return _to_integers(p.add(x, y) if node.op_type == "QLinearAdd" else p.mul(x, y), c_scale, c_zero_point, a.dtype)


@lowers("QLinearSigmoid", domain=MS, gradient=PIECEWISE, reason=ROUNDED)
def qlinear_sigmoid(x: Value, x_scale: Value, x_zero_point: Value | None, y_scale: Value, y_zero_point: Value | None = None) -> Value:  # fmt: skip
    """sigmoid of what the integers stand for"""
    return _to_integers(c.sigmoid(dequantized(x, x_scale, x_zero_point)), y_scale, y_zero_point, x.dtype)


@lowers("QLinearLeakyRelu", domain=MS, gradient=PIECEWISE, reason=ROUNDED)
def qlinear_leaky_relu(
    x: Value, x_scale: Value, x_zero_point: Value | None, y_scale: Value, y_zero_point: Value | None = None, *, alpha: float = 0.01
) -> Value:  # fmt: skip
    """leaky_relu of what the integers stand for"""
    y: Value = leaky_relu(dequantized(x, x_scale, x_zero_point), alpha=alpha)
    return _to_integers(y, y_scale, y_zero_point, x.dtype)


@lowers("QLinearSoftmax", domain=MS, gradient=PIECEWISE, reason=ROUNDED)
def qlinear_softmax(
    x: Value, x_scale: Value, x_zero_point: Value | None, y_scale: Value, y_zero_point: Value, *, axis: int = -1, opset: int
) -> Value:  # fmt: skip
    """softmax of what the integers stand for"""
    real = dequantized(x, x_scale, x_zero_point)
    y: Value = softmax(real, axis=axis) if opset >= 13 else softmax_1(real, axis=axis)
    return _to_integers(y, y_scale, y_zero_point, x.dtype)


@lowers("QLinearWhere", domain=MS, gradient=PIECEWISE, reason=ROUNDED)
def qlinear_where(
    condition: Value, x: Value, x_scale: Value, x_zero_point: Value, y: Value, y_scale: Value, y_zero_point: Value, z_scale: Value,
    z_zero_point: Value,
) -> Value:  # fmt: skip
    """x where the condition holds, else y, of what the integers stand for"""
    a, b = dequantized(x, x_scale, x_zero_point), dequantized(y, y_scale, y_zero_point)
    full = broadcast_shapes(condition.shape, a.shape, b.shape)
    chosen = p.select(broadcast_to(condition, full), broadcast_to(a, full), broadcast_to(b, full))
    return _to_integers(chosen, z_scale, z_zero_point, x.dtype)


@lowers("QLinearConcat", domain=MS, gradient=PIECEWISE, reason=ROUNDED)
def qlinear_concat(y_scale: Value, y_zero_point: Value, *inputs: Value, axis: int) -> Value:
    """tensors of different scales one after the other, in one scale"""
    if len(inputs) % 3:
        raise Unsupported(f"{len(inputs)} inputs are no triples of tensor, scale and zero point")
    reals = [dequantized(inputs[i], inputs[i + 1], inputs[i + 2]) for i in range(0, len(inputs), 3)]
    return _to_integers(shape.joined(reals, axis % reals[0].rank), y_scale, y_zero_point, inputs[0].dtype)


@lowers("QLinearAveragePool", domain=MS, gradient=PIECEWISE, reason=ROUNDED)
def qlinear_average_pool(
    x: Value, x_scale: Value, x_zero_point: Value | None, y_scale: Value, y_zero_point: Value | None = None, *, auto_pad: str = "NOTSET",
    ceil_mode: int = 0, channels_last: int = 0, count_include_pad: int = 0, kernel_shape: Ints, pads: Ints | None = None,
    strides: Ints | None = None,
) -> Value:  # fmt: skip
    """the mean of each window, of what the integers stand for"""
    real = dequantized(x, x_scale, x_zero_point)
    y: Value = average_pool(
        _channels_first(real) if channels_last else real, auto_pad=auto_pad, ceil_mode=ceil_mode, count_include_pad=count_include_pad,
        kernel_shape=kernel_shape, pads=pads, strides=strides,
    )  # fmt: skip
    return _to_integers(_channels_last(y) if channels_last else y, y_scale, y_zero_point, x.dtype)


@lowers("QLinearGlobalAveragePool", domain=MS, gradient=PIECEWISE, reason=ROUNDED)
def qlinear_global_average_pool(
    x: Value, x_scale: Value, x_zero_point: Value, y_scale: Value, y_zero_point: Value, *, channels_last: int = 0
) -> Value:  # fmt: skip
    """the mean over all places, of what the integers stand for"""
    real = dequantized(x, x_scale, x_zero_point)
    y: Value = global_average_pool(_channels_first(real) if channels_last else real)
    return _to_integers(_channels_last(y) if channels_last else y, y_scale, y_zero_point, x.dtype)


@lowers("QLinearReduceMean", domain=MS, gradient=PIECEWISE, reason=ROUNDED)
def qlinear_reduce_mean(
    data: Value, data_scale: Value, data_zero_point: Value | None, reduced_scale: Value, reduced_zero_point: Value | None = None, *,
    axes: Ints = (), keepdims: int = 1,
) -> Value:  # fmt: skip
    """the mean over axes, of what the integers stand for"""
    at = tuple(a % data.rank for a in axes) or tuple(range(data.rank))
    y = c.mean(dequantized(data, data_scale, data_zero_point), at)
    y = c.unsqueeze(y, sorted(at)) if keepdims else y
    return _to_integers(y, reduced_scale, reduced_zero_point, data.dtype)


def _scaled_product(acc: Value, a_scale: Value, b_scale: Value, alpha: float = 1.0) -> Value:
    """An int32 product as the floats that it stands for; the right scale may be one per column."""
    factor = p.mul(placed(a_scale, acc, acc.rank - 1), placed(b_scale, acc, acc.rank - 1))
    return c.scale(p.mul(real_of(acc, factor.dtype), factor), alpha)


@lowers("MatMulIntegerToFloat", domain=MS, gradient=PIECEWISE, reason=ROUNDED)
def matmul_integer_to_float(
    a: Value, b: Value, a_scale: Value, b_scale: Value, a_zero_point: Value | None = None, b_zero_point: Value | None = None,
    bias: Value | None = None,
) -> Value:  # fmt: skip
    """a_scale b_scale (a - a_zero_point) @ (b - b_zero_point) + bias"""
    y = p.cast(_scaled_product(integer_matmul(a, b, a_zero_point, b_zero_point), a_scale, b_scale), dtype=a_scale.dtype)
    return y if bias is None else p.add(y, broadcast_to(bias, y.shape))


@lowers("DynamicQuantizeMatMul", domain=MS, gradient=PIECEWISE, reason=ROUNDED)
def dynamic_quantize_matmul(a: Value, b: Value, b_scale: Value, b_zero_point: Value | None = None, bias: Value | None = None) -> Value:  # fmt: skip
    """a, quantised by its own range, times the integers of b, + bias"""
    integers, scale, zero = dynamic_quantize_linear(a)
    y: Value = matmul_integer_to_float(integers, b, scale, b_scale, zero, b_zero_point, bias)
    return y


@lowers("QGemm", domain=MS, gradient=PIECEWISE, reason=ROUNDED)
def qgemm(
    a: Value, a_scale: Value, a_zero_point: Value, b: Value, b_scale: Value, b_zero_point: Value, c_: Value | None = None,
    y_scale: Value | None = None, y_zero_point: Value | None = None, *, alpha: float = 1.0, transA: int = 0, transB: int = 0,
) -> Value:  # fmt: skip
    """alpha a_scale b_scale ((a - a_zero_point)' @ (b - b_zero_point)') + c, as integers where y_scale is given"""
    a, b = _turned(a, transA, 0), _turned(b, transB, 0)
    acc = integer_matmul(a, b, a_zero_point, b_zero_point)
    if c_ is not None:
        acc = p.add(acc, broadcast_to(c_, acc.shape))
    y = _scaled_product(acc, a_scale, b_scale, alpha)
    return y if y_scale is None else _to_integers(y, y_scale, y_zero_point, a.dtype)


@lowers("QAttention", domain=MS, gradient=PIECEWISE, reason=ROUNDED)
def qattention(
    input: Value, weight: Value, bias: Value, input_scale: Value, weight_scale: Value, mask_index: Value | None = None,
    input_zero_point: Value | None = None, weight_zero_point: Value | None = None, past: Value | None = None, *, do_rotary: int = 0,
    mask_filter_value: float = -10000.0, num_heads: int, past_present_share_buffer: int = 0, scale: float = 0.0,
    unidirectional: int = 0,
) -> tuple[Value, Value | None]:  # fmt: skip
    """Attention whose input and weights are integers"""
    if do_rotary or past_present_share_buffer:
        raise Unsupported("rotary positions and a shared buffer of the past are not handled")
    projected = matmul_integer_to_float(
        input, weight, input_scale, weight_scale, input_zero_point, weight_zero_point, bias
    )
    third = require_divides(projected.shape[2], 3, "the weights are three")
    q, k, v = (split_heads(x, num_heads, "input") for x in c.split(projected, (third,) * 3, 2))
    return _self_attention(q, k, v, mask_index, past, None, scale, mask_filter_value, unidirectional)


@lowers("DynamicQuantizeLSTM", domain=MS, gradient=PIECEWISE, reason=ROUNDED)
def dynamic_quantize_lstm(
    x: Value, w: Value, r: Value, b: Value | None, sequence_lens: Value | None, initial_h: Value | None, initial_c: Value | None,
    p_: Value | None, w_scale: Value, w_zero_point: Value, r_scale: Value, r_zero_point: Value, *,
    activation_alpha: tuple[float, ...] = (), activation_beta: tuple[float, ...] = (), activations: tuple[str, ...] = (),
    clip: float | None = None, direction: str = "forward", hidden_size: int | None = None, input_forget: int = 0,
) -> tuple[Value, ...]:  # fmt: skip
    """LSTM whose weights are integers; the sequence, and the state of each step, are quantised by their own range"""
    hidden = r.shape[1]
    if not isinstance(hidden, int):
        raise Unsupported(f"the recurrence weight {r.type!r} must have a known size")
    lengths = None if sequence_lens is None else p.cast(sequence_lens, dtype=i64)
    layer = Layer(x, directions_of(direction), hidden, False, lengths, clip or 0.0)
    default = ("Sigmoid", "Tanh", "Tanh")
    functions = activations_of(activations, default, len(layer.directions), activation_alpha, activation_beta)

    def gates(d: int) -> Value:
        y = dynamic_quantize_matmul(x, row(w, d), row(w_scale, d), row(w_zero_point, d), None)
        wb, rb = bias_of(b, d, 4, hidden)
        return y if wb is None or rb is None else p.add(y, c.at_last(p.add(wb, rb), y.shape))

    def recur(h: Value, consts: Sequence[Value]) -> Value:
        y: Value = dynamic_quantize_matmul(h, *consts)
        return y

    return lstm_layer(
        layer, functions, gates, lambda d: [row(r, d), row(r_scale, d), row(r_zero_point, d)], recur, initial_h, initial_c, p_, input_forget
    )  # fmt: skip
