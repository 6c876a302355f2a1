"""Operators of `com.microsoft`, against onnxruntime's own kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one_node import Case, check_emission, check_gradients, check_values
from pullback.algebra.evaluate import evaluate
from pullback.frontends.onnx_import import load


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def bytes_(*shape: int, seed: int = 0, dtype: Any = np.uint8) -> np.ndarray:
    low, high = (0, 256) if dtype is np.uint8 else (-64, 64)  # 7 bits: see test_lowerings_quantized
    return np.random.default_rng(seed + sum(shape)).integers(low, high, shape).astype(dtype)


def ints(*values: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.asarray(values[0] if len(values) == 1 else values, dtype)


def scalar(value: float, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(value, dtype)


def heads(batch: int, count: int, length: int, size: int, seed: int = 0) -> np.ndarray:
    return normal(batch, count, length, size, seed=seed)


X = normal(2, 4, 8)
MASK = ints([[1, 1, 1, 0], [1, 1, 0, 0]])
COS, SIN = np.cos(normal(12, 4)), np.sin(normal(12, 4))
COS16, SIN16 = np.cos(normal(12, 8)), np.sin(normal(12, 8))
QKV = (normal(2, 4, 8), normal(2, 4, 8, seed=1), normal(2, 4, 8, seed=2))
A8, B8 = bytes_(3, 5), bytes_(5, 4, seed=1)
S1, S2, S3 = scalar(0.03), scalar(0.02), scalar(0.05)
Z1, Z2, Z3 = scalar(120, np.uint8), scalar(131, np.uint8), scalar(110, np.uint8)

CASES = [
    Case("Gelu", [X]),
    Case("BiasGelu", [X, normal(8)]),
    Case("FastGelu", [X]),
    Case("FastGelu", [X, normal(8)], note="bias"),
    Case("QuickGelu", [X], dict(alpha=1.3)),
    Case("FusedMatMul", [normal(2, 3, 4), normal(2, 4, 5)], dict(alpha=0.5)),
    Case("FusedMatMul", [normal(2, 4, 3), normal(5, 4)], dict(transA=1, transB=1), note="turned"),
    Case("FusedMatMul", [normal(3, 2, 4), normal(5, 2, 4)], dict(transBatchA=1, transBatchB=1, transB=1), note="batches turned"),
    Case("FusedMatMul", [normal(4), normal(4, 5)], dict(alpha=2.0), note="vector"),
    Case("FusedGemm", [normal(3, 4), normal(5, 4), normal(5)], dict(transB=1, activation="LeakyRelu", activation_alpha=0.2)),
    Case("FusedGemm", [normal(3, 4), normal(4, 5)], dict(activation="Relu", alpha=0.5), note="without c"),
    Case("FusedConv", [normal(1, 2, 5, 5), normal(3, 2, 3, 3), normal(3)], dict(activation="Relu", pads=[1, 1, 1, 1])),
    Case("FusedConv", [normal(1, 2, 5, 5), normal(3, 2, 3, 3), normal(3), normal(1, 3, 3, 3)], dict(activation="Relu"), note="residual"),
    Case("FusedConv", [normal(1, 2, 5, 5), normal(3, 2, 3, 3)], dict(activation="Clip", activation_params=[-0.5, 0.7]), note="Clip"),
    Case("FusedConv", [normal(1, 2, 5, 5), normal(3, 2, 3, 3)], dict(activation="HardSigmoid", activation_params=[0.3, 0.4]), note="HardSigmoid"),
    Case("LayerNormalization", [X, normal(8), normal(8, seed=1)], domain="", outputs=3),
    Case("SimplifiedLayerNormalization", [X, normal(8)], domain=""),
    Case("SkipLayerNormalization", [X, normal(2, 4, 8, seed=1), normal(8), normal(8, seed=1), normal(8, seed=2)], outputs=(0, 3)),
    Case("SkipLayerNormalization", [X, normal(4, 8, seed=1), normal(8)], dict(epsilon=1e-5), note="skip without batch"),
    Case("SkipSimplifiedLayerNormalization", [X, normal(2, 4, 8, seed=1), normal(8), normal(8, seed=2)], outputs=(0, 3)),
    Case("EmbedLayerNormalization", [ints([[1, 2, 3], [4, 0, 2]]), ints([[0, 1, 0], [1, 1, 0]]), normal(6, 8), normal(5, 8), normal(2, 8), normal(8),
         normal(8, seed=1), ints([[1, 1, 0], [1, 1, 1]])], dict(epsilon=1e-6), outputs=2),
    Case("EmbedLayerNormalization", [ints([[1, 2, 3], [4, 0, 2]]), None, normal(6, 8), normal(5, 8), None, normal(8), normal(8, seed=1), None,
         ints([[2, 1, 0], [0, 1, 2]])], outputs=(0, 2), note="positions"),
    Case("Attention", [X, normal(8, 24), normal(24)], dict(num_heads=2)),
    Case("Attention", [X, normal(8, 24), normal(24), MASK], dict(num_heads=2), note="mask"),
    Case("Attention", [X, normal(8, 24), normal(24), ints([3, 2])], dict(num_heads=2), note="lengths"),
    Case("Attention", [X, normal(8, 24), normal(24), ints([3, 4, 1, 0])], dict(num_heads=2), note="ends and starts"),
    Case("Attention", [X, normal(8, 24), normal(24)], dict(num_heads=2, unidirectional=1, scale=0.3), note="causal"),
    Case("Attention", [X, normal(8, 24), normal(24), ints(np.tril(np.ones((2, 4, 4), np.int32)))], dict(num_heads=2), note="mask of pairs"),
    Case("Attention", [X, normal(8, 24), normal(24), None, normal(2, 2, 2, 3, 4)], dict(num_heads=2, unidirectional=1), outputs=2, note="past"),
    Case("Attention", [X, normal(8, 24), normal(24), None, None, normal(2, 2, 4, 4)], dict(num_heads=2), note="bias of pairs"),
    Case("Attention", [X, normal(8, 28), normal(28)], dict(num_heads=2, qkv_hidden_sizes=[8, 8, 12]), note="wide values"),
    Case("MultiHeadAttention", [*QKV], dict(num_heads=2)),
    Case("MultiHeadAttention", [*QKV, normal(24)], dict(num_heads=2), note="biases"),
    Case("MultiHeadAttention", [*QKV, None, MASK], dict(num_heads=2), note="mask"),
    Case("MultiHeadAttention", [*QKV, None, None, normal(1, 2, 4, 4)], dict(num_heads=2, scale=0.7), note="bias of pairs"),
    Case("MultiHeadAttention", [normal(2, 4, 8), normal(2, 6, 8), normal(2, 6, 8, seed=1)], dict(num_heads=2), note="cross"),
    Case("MultiHeadAttention", [normal(2, 4, 8), heads(2, 2, 6, 4), heads(2, 2, 6, 4, 1)], dict(num_heads=2), note="keys of four axes"),
    Case("MultiHeadAttention", [*QKV, None, None, None, heads(2, 2, 3, 4), heads(2, 2, 3, 4, 1)], dict(num_heads=2, unidirectional=1), outputs=3, note="past"),
    Case("RotaryEmbedding", [normal(2, 4, 16), ints([[0, 1, 2, 3], [4, 5, 6, 7]], dtype=np.int64), COS, SIN]),
    Case("RotaryEmbedding", [normal(2, 2, 4, 8), ints([3], dtype=np.int64), COS, SIN], dict(interleaved=1), note="offset"),
    Case("RotaryEmbedding", [normal(2, 4, 24), ints([1], dtype=np.int64), COS, SIN], dict(num_heads=2, rotary_embedding_dim=8), note="in part"),
    Case("GroupQueryAttention", [normal(2, 4, 32), normal(2, 4, 16), normal(2, 4, 16, seed=1), None, None, ints([3, 3]), ints(4)],
         dict(num_heads=4, kv_num_heads=2), outputs=3, fixed=(6,)),
    Case("GroupQueryAttention", [normal(2, 4, 128), None, None, None, None, ints([3, 3]), ints(4), COS16, SIN16],
         dict(num_heads=4, kv_num_heads=2, do_rotary=1), outputs=3, note="packed and rotary", fixed=(6,)),
    Case("GroupQueryAttention", [normal(2, 1, 64), normal(2, 1, 32), normal(2, 1, 32, seed=1), heads(2, 2, 5, 16), heads(2, 2, 5, 16, 1), ints([5, 5]), ints(6),
         COS16, SIN16], dict(num_heads=4, kv_num_heads=2, do_rotary=1, rotary_interleaved=1), outputs=3, note="past", fixed=(6,)),
    Case("GroupQueryAttention", [normal(2, 1, 32), normal(2, 1, 16), normal(2, 1, 16, seed=1), heads(2, 2, 5, 8), heads(2, 2, 5, 8, 1), ints([2, 5]), ints(6)],
         dict(num_heads=4, kv_num_heads=2), outputs=3, note="pasts of two lengths", fixed=(6,)),
    Case("GroupQueryAttention", [normal(2, 4, 32), normal(2, 4, 16), normal(2, 4, 16, seed=1), None, None, ints([3, 3]), ints(4)],
         dict(num_heads=4, kv_num_heads=2, local_window_size=2, softcap=5.0), note="window and cap", fixed=(6,)),
    Case("GroupQueryAttention", [normal(2, 4, 32), normal(2, 4, 16), normal(2, 4, 16, seed=1), None, None, ints([3, 3]), ints(4)],
         dict(num_heads=4, kv_num_heads=2, smooth_softmax=1), note="smooth", fixed=(6,)),
    Case("GroupQueryAttention", [normal(2, 4, 32), normal(2, 4, 16), normal(2, 4, 16, seed=1), None, None, ints([3, 3]), ints(4), None,
        None, None, None, normal(4)],
         dict(num_heads=4, kv_num_heads=2), note="sink", fixed=(6,)),
    Case("MatMulNBits", [normal(2, 20), bytes_(3, 2, 8), normal(6)], dict(K=20, N=3, bits=4, block_size=16), fixed=(1, 2)),
    Case("MatMulNBits", [normal(2, 40), bytes_(3, 3, 8), normal(9), bytes_(6)], dict(K=40, N=3, bits=4, block_size=16), note="zero points", fixed=(1, 2, 3)),
    Case("MatMulNBits", [normal(2, 32), bytes_(3, 2, 16), normal(6), bytes_(6)], dict(K=32, N=3, bits=8, block_size=16), note="8 bits", fixed=(1, 2, 3)),
    Case(
        "MatMulNBits",
        [normal(2, 32), bytes_(3, 2, 8), normal(6), None, ints([0, 1] * 16)],
        dict(K=32, N=3, bits=4, block_size=16),
        note="blocks by index",
        fixed=(1, 2, 4),
    ),
    Case("QLinearAdd", [A8, S1, Z1, bytes_(5), S2, Z2, S3, Z3]),
    Case("QLinearMul", [A8, S1, Z1, A8, S2, Z2, scalar(0.1), Z3]),
    Case("QLinearSigmoid", [A8, S1, Z1, scalar(1 / 256), scalar(0, np.uint8)]),
    Case("QLinearLeakyRelu", [A8, S1, Z1, S1, Z1], dict(alpha=0.1)),
    Case("QLinearSoftmax", [A8, S1, Z1, scalar(1 / 256), scalar(0, np.uint8)], dict(axis=-1, opset=13)),
    Case("QLinearWhere", [np.asarray([[True], [False], [True]]), A8, S1, Z1, A8, S2, Z2, S3, Z3], fixed=(2, 3, 5, 6, 7, 8)),
    Case("QLinearConcat", [S3, Z3, A8, S1, Z1, A8, S2, Z2], dict(axis=1), fixed=(0, 1, 3, 4, 6, 7)),
    Case("QLinearAveragePool", [bytes_(1, 2, 5, 5), S1, Z1, S1, Z1], dict(kernel_shape=[3, 3], pads=[1, 1, 1, 1])),
    Case("QLinearGlobalAveragePool", [bytes_(1, 2, 5, 5), S1, Z1, S1, Z1]),
    Case("MatMulIntegerToFloat", [A8, B8, S1, S2, Z1, Z2, normal(4)]),
    Case("DynamicQuantizeMatMul", [normal(3, 5), bytes_(5, 4, dtype=np.int8), S2, scalar(3, np.int8)], fixed=(1, 2, 3)),
    Case("QGemm", [A8, S1, Z1, B8, S2, Z2, ints(1000, -2000, 3000, 0)]),
    Case("QGemm", [A8, S1, Z1, B8, S2, Z2, None, S3, Z3], note="to integers"),
    Case("QAttention", [bytes_(2, 4, 8), bytes_(8, 24), normal(24), scalar(0.02), scalar(0.01), MASK, Z1, Z2], dict(num_heads=2), atol=1e-4),
    *(
        Case("DynamicQuantizeLSTM", [normal(5, 3, 4), bytes_(n, 4, 8, dtype=np.int8), bytes_(n, 2, 8, dtype=np.int8), normal(n, 16), None,
            normal(n, 3, 2), normal(n, 3, 2, seed=1), None,
             np.full(n, 0.01, np.float32), np.zeros(n, np.int8), np.full(n, 0.012, np.float32), np.zeros(n, np.int8)],
             dict(hidden_size=2, direction=way), outputs=3, note=way, atol=2e-2, fixed=(1, 2, 8, 9, 10, 11))
        for n, way in ((1, "forward"), (2, "bidirectional"))
    ),
    Case("NhwcMaxPool", [bytes_(1, 5, 5, 2)], dict(kernel_shape=[3, 3], strides=[2, 2])),
    Case("Trilu", [normal(3, 4)], dict(upper=0)),
    Case("ExpandDims", [normal(3, 4), ints(1)], fixed=(1,)),
    Case("CDist", [normal(3, 4), normal(5, 4, seed=1)], dict(metric="euclidean")),
    Case("QuantizeLinear", [normal(3, 4), S1, Z1]),
    Case("DequantizeLinear", [A8, S1, Z1]),
]  # fmt: skip

every = pytest.mark.parametrize("case", CASES, ids=str)


@every
def test_values_are_those_of_onnxruntime(case: Case) -> None:
    check_values(case)


@every
def test_in_plain_operators_the_values_are_the_same(case: Case) -> None:
    check_emission(case)


@every
def test_gradients_agree_with_differences(case: Case) -> None:
    if case.op not in (
        "DynamicQuantizeMatMul",
        "DynamicQuantizeLSTM",
        "QuantizeLinear",
    ):  # the range decides the scale, and rounding everything else
        check_gradients(case)


@every
def test_the_first_size_may_be_a_symbol(case: Case) -> None:
    """The batch, or the rows, of the first input; other inputs follow as far as the operator forces it."""
    if case.note == "ends and starts":
        return  # four entries are those of a batch of four as well
    expected = evaluate(load(case.model()), case.feeds())
    model = case.model()
    rows = model.graph.input[0].type.tensor_type.shape.dim[0].dim_value
    for info in model.graph.input[1:]:
        shape = info.type.tensor_type.shape
        if len(shape.dim) and shape.dim[0].dim_value == rows > 1:
            shape.dim[0].dim_param = f"{info.name}_first"
    first = model.graph.input[0].type.tensor_type.shape.dim[0]
    first.dim_param = "N"
    found = evaluate(load(model), case.feeds())
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
