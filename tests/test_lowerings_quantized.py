"""Quantisation: values against onnxruntime, straight-through gradients on request, none otherwise."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from one_node import Case, check_emission, check_values
from onnx import helper, numpy_helper
from pullback.algebra import primitives as p
from pullback.algebra.calculus.vjp import vjp
from pullback.algebra.errors import Refusal
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Graph, Value, building
from pullback.algebra.training.step import training_step
from pullback.frontends.onnx_import import load

RNG = np.random.default_rng(5)
X = RNG.standard_normal((4, 6)).astype(np.float32) * 3
# Signed weights have 7 bits: on processors without VNNI onnxruntime adds pairs of products of u8 and i8 in 16 bits, and saturates
A, B = RNG.integers(0, 256, (3, 5)).astype(np.uint8), RNG.integers(-64, 64, (5, 4)).astype(np.int8)
IMAGE, KERNEL = (
    RNG.integers(0, 256, (1, 2, 6, 6)).astype(np.uint8),
    RNG.integers(-64, 64, (3, 2, 3, 3)).astype(np.int8),
)


def f(*values: float) -> np.ndarray:
    return np.asarray(values[0] if len(values) == 1 else values, np.float32)


def u8(*values: int) -> np.ndarray:
    return np.asarray(values[0] if len(values) == 1 else values, np.uint8)


def i8(*values: int) -> np.ndarray:
    return np.asarray(values[0] if len(values) == 1 else values, np.int8)


def case(op: str, inputs: list[Any], note: str = "", outputs: int = 1, opset: int = 21, **attributes: Any) -> Case:
    return Case(op, inputs, attributes, outputs, "", note=note, opset=opset)


SCALES = np.abs(RNG.standard_normal(6)).astype(np.float32) + 0.1
BLOCKS = np.abs(RNG.standard_normal((4, 3))).astype(np.float32) + 0.1
CASES = [
    *(case("QuantizeLinear", [X, f(0.05), z], str(z.dtype)) for z in (u8(120), i8(-3), np.asarray(200, np.uint16), np.asarray(-9, np.int16))),
    case("QuantizeLinear", [X, SCALES, u8(*range(100, 106))], "per axis", axis=1),
    case("QuantizeLinear", [X, SCALES[:4], i8(1, 2, 3, 4)], "per negative axis", axis=-2),
    case("QuantizeLinear", [X, BLOCKS, RNG.integers(100, 150, (4, 3)).astype(np.uint8)], "blocks", axis=1, block_size=2),
    case("QuantizeLinear", [X, f(0.05)], "without zero point", opset=13),
    case("QuantizeLinear", [X * 1000, f(0.05), u8(3)], "saturated", opset=10),
    case("DequantizeLinear", [A, f(0.05), u8(120)], opset=10),
    case("DequantizeLinear", [B, f(0.05, 0.1, 0.2, 0.3), i8(1, 2, 3, 4)], "per axis", axis=1),
    case("DequantizeLinear", [np.asarray([[70000, -3]], np.int32), f(0.5)], "int32"),
    case("DequantizeLinear", [RNG.integers(0, 255, (4, 6)).astype(np.uint8), BLOCKS, RNG.integers(0, 255, (4, 3)).astype(np.uint8)],
        "blocks", axis=1, block_size=2),
    case("DynamicQuantizeLinear", [X], outputs=3),
    case("DynamicQuantizeLinear", [np.abs(X) + 1], "above zero", outputs=3),
    case("DynamicQuantizeLinear", [np.zeros((2, 2), np.float32)], "of zeros", outputs=3),
    case("MatMulInteger", [A, B, u8(120), i8(3)]),
    case("MatMulInteger", [A, B], "without zero points"),
    case("MatMulInteger", [A, B, u8(120), i8(1, 2, 3, 4)], "zero point per column"),
    case("QLinearMatMul", [A, f(0.02), u8(120), B, f(0.03), i8(3), f(0.1), u8(110)]),
    case("QLinearMatMul", [A, f(0.02), u8(120), B, f(0.03, 0.02, 0.01, 0.05), i8(3, 2, 1, 0), f(0.1), u8(110)], "per column"),
    case("ConvInteger", [IMAGE, KERNEL.astype(np.uint8), u8(120)], pads=[1, 1, 1, 1]),
    case("QLinearConv", [IMAGE, f(0.02), u8(120), KERNEL, f(0.03), i8(0), f(0.3), u8(100)], pads=[1, 1, 1, 1], strides=[2, 2]),
    case("QLinearConv", [IMAGE, f(0.02), u8(120), KERNEL, f(0.03, 0.02, 0.05), i8(0, 0, 0), f(0.3), u8(100), np.asarray([100, -200, 300],
        np.int32)], "per channel with bias"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_are_those_of_onnxruntime(case: Case) -> None:
    check_values(case)


def test_products_of_the_greatest_integers_are_exact() -> None:
    a, b = np.full((2, 64), 255, np.uint8), np.repeat(np.asarray([[-128, 127]], np.int8), 64, axis=0)
    whole = case("MatMulInteger", [a, b])
    expected = a.astype(np.int32) @ b.astype(np.int32)
    np.testing.assert_array_equal(evaluate(load(whole.model()), whole.feeds())["y0"], expected)
    check_emission(whole)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_plain_operators_the_values_are_the_same(case: Case) -> None:
    check_emission(case)


@pytest.mark.parametrize(("dtype", "kind"), [(ml_dtypes.int4, onnx.TensorProto.INT4), (ml_dtypes.uint4, onnx.TensorProto.UINT4),
                                             (ml_dtypes.float8_e4m3fn, onnx.TensorProto.FLOAT8E4M3FN)])  # fmt: skip
def test_narrow_dtypes_go_there_and_back(dtype: Any, kind: int) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"], output_dtype=kind),
        helper.make_node("DequantizeLinear", ["q", "s"], ["y"]),
    ]
    found = evaluate(load(network(nodes, {"s": f(0.5)})), {"x": X})["y"]
    np.testing.assert_array_equal(found, saturated(X / np.float32(0.5), dtype).astype(np.float32) * np.float32(0.5))


def saturated(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Rounded to the nearest number of the dtype, inside its range."""
    info = ml_dtypes.iinfo(dtype) if "int" in dtype.__name__ else ml_dtypes.finfo(dtype)
    x = np.clip(np.rint(x) if "int" in dtype.__name__ else x, float(info.min), float(info.max))
    return x.astype(dtype)


def network(
    nodes: list[onnx.NodeProto], stored: dict[str, np.ndarray], shape: tuple[Any, ...] = (4, 6), output: str = "y"
) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(a, n) for n, a in stored.items()]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, shape)],
        [helper.make_tensor_value_info(output, 1, None)],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


def gradient(graph: Graph, of: str, feeds: dict[str, np.ndarray], seed: np.ndarray | None = None) -> np.ndarray | None:
    with building(graph):
        y: Value = graph.outputs["y"]
        ct = p.number(1, y) if seed is None else p.literal(seed)
        (g,) = vjp([y], [ct], [graph[of]])
    return None if g is None else evaluate(graph.with_(outputs={"g": g}, roles={}), feeds)["g"]


QDQ = [
    helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
    helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
]
STORED = {"s": f(0.02), "z": u8(100)}


def test_no_gradient_passes_through_rounding_by_itself() -> None:
    graph = load(network(QDQ, STORED))
    assert gradient(graph, "x", {"x": X}) is None


def test_straight_through_passes_it_where_nothing_was_clipped() -> None:
    graph = load(network(QDQ, STORED), straight_through=True)
    real = X / np.float32(0.02) + 100
    inside = (real >= 0) & (real <= 255)
    assert 0 < inside.sum() < inside.size
    found = gradient(graph, "x", {"x": X})
    assert found is not None
    np.testing.assert_allclose(found, inside.astype(np.float32), rtol=1e-6)


def test_straight_through_leaves_values_as_they_are_to_the_last_bit() -> None:
    model = network(QDQ, STORED)
    np.testing.assert_array_equal(
        evaluate(load(model, straight_through=True), {"x": X})["y"], evaluate(load(model), {"x": X})["y"]
    )


MOVED = [
    helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
    helper.make_node("Transpose", ["q"], ["qt"], perm=[1, 0]),
    helper.make_node("Reshape", ["qt", "shape"], ["qr"]),
    helper.make_node("Concat", ["qr", "qr"], ["qc"], axis=0),
    helper.make_node("DequantizeLinear", ["qc", "s", "z"], ["y"]),
]


def test_straight_through_follows_integers_that_only_move() -> None:
    graph = load(network(MOVED, {"s": f(0.2), "z": u8(100), "shape": np.asarray([3, 8])}), straight_through=True)
    found = gradient(graph, "x", {"x": X})
    assert found is not None
    np.testing.assert_allclose(found, np.full((4, 6), 2.0), rtol=1e-5)


def test_straight_through_a_quantised_product_is_the_gradient_of_the_product() -> None:
    w = RNG.integers(-20, 20, (6, 3)).astype(np.int8)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("QLinearMatMul", ["q", "s", "z", "w", "ws", "wz", "ys", "yz"], ["p"]),
        helper.make_node("DequantizeLinear", ["p", "ys", "yz"], ["y"]),
    ]
    stored = {"s": f(0.1), "z": u8(128), "w": w, "ws": f(0.05), "wz": i8(0), "ys": f(0.3), "yz": u8(120)}
    graph = load(network(nodes, stored), straight_through=True)
    seed = RNG.standard_normal((4, 3)).astype(np.float32)
    found = gradient(graph, "x", {"x": X}, seed)
    assert found is not None
    np.testing.assert_allclose(found, seed @ (w.T * np.float32(0.05)), rtol=1e-3, atol=1e-4)


def test_straight_through_the_dynamic_product_of_exporters() -> None:
    w = RNG.integers(-20, 20, (6, 3)).astype(np.int8)
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("MatMulInteger", ["q", "w", "z"], ["i"]),
        helper.make_node("Cast", ["i"], ["c"], to=1),
        helper.make_node("Mul", ["s", "ws"], ["scale"]),
        helper.make_node("Mul", ["c", "scale"], ["y"]),
    ]
    model = network(nodes, {"w": w, "ws": f(0.05)})
    assert gradient(load(model), "x", {"x": X}) is not None  # by the range alone, which is not what anyone wants
    seed = RNG.standard_normal((4, 3)).astype(np.float32)
    found = gradient(load(model, straight_through=True), "x", {"x": X}, seed)
    assert found is not None
    expected = seed @ (w.T * np.float32(0.05))
    extreme = (X.max() == X) | (X.min() == X)  # these decide the range; what rounding changed counts for them
    np.testing.assert_allclose(found[~extreme], expected[~extreme], rtol=1e-3, atol=1e-4)


def test_a_convolution_passes_it_too() -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("QLinearConv", ["q", "s", "z", "w", "ws", "wz", "ys", "yz", "b"], ["p"], pads=[1, 1, 1, 1]),
        helper.make_node("DequantizeLinear", ["p", "ys", "yz"], ["y"]),
    ]
    x = RNG.standard_normal((1, 2, 5, 5)).astype(np.float32)
    stored = {
        "s": f(0.05),
        "z": u8(128),
        "w": KERNEL // 2,
        "ws": f(0.02),
        "wz": i8(0),
        "ys": f(0.5),
        "yz": u8(120),
        "b": np.asarray([5, -5, 0], np.int32),
    }
    graph = load(network(nodes, stored, (1, 2, 5, 5)), straight_through=True)
    plain = load(
        network(
            [helper.make_node("Conv", ["x", "wf"], ["y"], pads=[1, 1, 1, 1])],
            {"wf": (KERNEL // 2) * np.float32(0.02)},
            (1, 2, 5, 5),
        )
    )
    seed = RNG.standard_normal((1, 3, 5, 5)).astype(np.float32)
    found, expected = (gradient(g, "x", {"x": x}, seed) for g in (graph, plain))
    assert found is not None
    assert expected is not None
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_a_float_that_is_dequantised_has_its_gradient_by_the_scale() -> None:
    nodes = [helper.make_node("DequantizeLinear", ["q", "x", "z"], ["y"], axis=1)]
    graph = load(network(nodes, {"q": A, "z": u8(1, 2, 3, 4, 5)}, (5,)))
    found = gradient(graph, "x", {"x": SCALES[:5]})
    assert found is not None
    np.testing.assert_allclose(found, (A.astype(np.float32) - np.arange(1, 6)).sum(axis=0), rtol=1e-6)


def test_a_model_of_integer_weights_says_why_nothing_can_be_trained() -> None:
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 17]>
    g (float[N, 2] x) => (float[N, 3] y) <int8[2, 3] w = {1, 2, 3, 4, 5, 6}, float s = {0.1}, int8 z = {0}> {
      d = DequantizeLinear (w, s, z)
      y = MatMul (x, d)
    }""")
    with pytest.raises(Refusal, match="weights stored as integers cannot be trained: train the floating model"):
        training_step(load(model), loss="mse_loss")
