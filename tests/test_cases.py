"""Small inputs behind public bug reports of this field, each with what must come out; and the same on neighbouring ops, ranks, dtypes, opsets.

Everything goes the whole way: ONNX in, explicit ONNX out, run by onnxruntime.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pullback
import pytest
from onnx import TensorProto, helper, numpy_helper

onnxruntime.set_default_logger_severity(4)

Arrays = dict[str, np.ndarray]
CODES = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.float64): TensorProto.DOUBLE, np.dtype(np.float16): TensorProto.FLOAT16,
         np.dtype(np.int64): TensorProto.INT64, np.dtype(np.bool_): TensorProto.BOOL}  # fmt: skip


def model(nodes: list[onnx.NodeProto], inputs: Arrays, outputs: list[str], weights: Arrays | None = None, opset: int = 17,
          symbolic: bool = False, domains: tuple[tuple[str, int], ...] = (), types: dict[str, int] | None = None) -> onnx.ModelProto:  # fmt: skip
    """A model whose inputs have the types of these arrays; with symbols for every size above 1 where `symbolic`."""

    def info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
        shape = [f"{name}_{i}" if symbolic and d > 1 else d for i, d in enumerate(array.shape)]
        return helper.make_tensor_value_info(name, CODES[array.dtype], shape)

    outs = []
    for name in outputs:
        out = helper.make_tensor_value_info(name, (types or {}).get(name, TensorProto.FLOAT), None)
        outs.append(out)
    graph = helper.make_graph(
        nodes, "case", [info(n, a) for n, a in inputs.items()], outs,
        [numpy_helper.from_array(a, n) for n, a in (weights or {}).items()],
    )  # fmt: skip
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(*d) for d in domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def run(graph: pullback.Model, feeds: Arrays, target: str = "onnxruntime", opset: int | None = None) -> Arrays:
    written = graph.to_onnx(target=target, opset=opset, embed="all")
    onnx.checker.check_model(written, full_check=True)
    session = onnxruntime.InferenceSession(written.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    known = {i.name for i in session.get_inputs()} | {i.name for i in session.get_overridable_initializers()}
    return dict(zip(names, session.run(None, {k: v for k, v in feeds.items() if k in known}), strict=True))


def gradients(
    proto: onnx.ModelProto, feeds: Arrays, wrt: list[str], dy: Any = None, output: str = "y", **options: Any
) -> list[np.ndarray]:
    """Gradients of `sum(dy * output)`, through the written file."""
    graph = pullback.gradient(pullback.load(proto), of=[output], wrt=wrt)
    seed = {v.name: np.asarray(1 if dy is None else dy, v.dtype.numpy) for v in graph.by_role("seed")}
    got = run(graph, {**feeds, **seed}, **options)
    return [got[graph.signature.gradients[name]] for name in wrt]


def f(*values: Any) -> np.ndarray:
    return np.array(values, np.float32)


RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


# ---- 1: Gemm without C, old opset ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("opset", "with_c"), [(7, True), (9, True), (10, True), (11, False), (13, False), (13, True)])
@pytest.mark.parametrize(("trans_a", "trans_b"), [(0, 1), (0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize("symbolic", [False, True])
def test_gemm_without_c(opset: int, with_c: bool, trans_a: int, trans_b: int, symbolic: bool) -> None:
    a, b, dy = normal(4, 3), normal(5, 3), normal(4, 5)
    feeds = {"a": a.T.copy() if trans_a else a, "b": b if trans_b else b.T.copy()}
    node = helper.make_node(
        "Gemm", ["a", "b", *(["c"] if with_c else [])], ["y"], alpha=0.5, transA=trans_a, transB=trans_b
    )
    proto = model([node], feeds, ["y"], {"c": np.zeros(5, np.float32)} if with_c else None, opset, symbolic)
    da, db = gradients(proto, feeds, ["a", "b"], dy)
    assert np.allclose(da.T if trans_a else da, 0.5 * dy @ b, atol=1e-5)
    assert np.allclose(db if trans_b else db.T, 0.5 * dy.T @ a, atol=1e-5)


@pytest.mark.parametrize("opset", [13, 14, 17, 18, 20, 22])
def test_every_node_is_legal_at_the_opset_of_the_file(opset: int) -> None:
    feeds = {"a": normal(4, 3), "b": normal(5, 3)}
    proto = model([helper.make_node("Gemm", ["a", "b"], ["y"], transB=1)], feeds, ["y"])
    da, _ = gradients(proto, feeds, ["a", "b"], np.ones((4, 5)), opset=opset)
    assert np.allclose(da, np.ones((4, 5)) @ feeds["b"], atol=1e-5)


# ---- 2: LayerNormalization with one output -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("axis", "with_b"), [(-1, True), (1, False), (0, True), (2, False)])
@pytest.mark.parametrize("symbolic", [False, True])
def test_layer_normalization_with_one_output(axis: int, with_b: bool, symbolic: bool) -> None:
    x, dy = normal(2, 3, 4), normal(2, 3, 4)
    start = axis % 3
    s, b = normal(*x.shape[start:]), normal(*x.shape[start:])
    weights = {"s": s, "b": b} if with_b else {"s": s}
    node = helper.make_node("LayerNormalization", ["x", *weights], ["y"], axis=axis, epsilon=1e-5)
    wrt = ["x", *weights]
    proto = model([node], {"x": x}, ["y"], weights, symbolic=symbolic and start == 2)
    dx, ds, *db = gradients(proto, {"x": x}, wrt, dy)
    axes, leading = tuple(range(start, 3)), tuple(range(start))
    x64 = x.astype(np.float64)
    inv = 1 / np.sqrt(x64.var(axes, keepdims=True) + 1e-5)
    xh = (x64 - x64.mean(axes, keepdims=True)) * inv
    g = dy * s
    want = inv * (g - g.mean(axes, keepdims=True) - xh * (g * xh).mean(axes, keepdims=True))
    assert np.allclose(dx, want, atol=1e-4)
    assert np.allclose(ds, (dy * xh).sum(leading), atol=1e-4)
    if with_b:
        assert np.allclose(db[0], dy.sum(leading), atol=1e-4)


# ---- 3: BatchNormalization in inference mode, everything marked trainable ------------------------------------------------------------------


@pytest.mark.parametrize("opset", [7, 9, 14, 15])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_batch_normalization_in_inference_mode(opset: int, rank: int) -> None:
    x = normal(2, 3, *(4,) * rank)
    weights = {"scale": normal(3), "bias": normal(3), "mean": normal(3), "var": np.abs(normal(3)) + 0.5}
    proto = model([helper.make_node("BatchNormalization", ["x", *weights], ["y"])], {"x": x}, ["y"], weights, opset)
    graph = pullback.load(proto)
    assert {v.name for v in graph.parameters} == {"scale", "bias"}
    assert {v.name for v in graph.by_role("state")} == {"mean", "var"}
    dy = normal(*x.shape)
    dx, dscale, dbias, dmean = gradients(proto, {"x": x}, ["x", "scale", "bias", "mean"], dy)
    column = (slice(None), *(None,) * rank)
    inv = 1 / np.sqrt(weights["var"] + 1e-5)
    other = (0, *range(2, x.ndim))
    assert np.allclose(dx, dy * (weights["scale"] * inv)[column], atol=1e-4)
    assert np.allclose(dscale, (dy * (x - weights["mean"][column]) * inv[column]).sum(other), atol=1e-3)
    assert np.allclose(dbias, dy.sum(other), atol=1e-4)
    assert np.allclose(dmean, -(dy * (weights["scale"] * inv)[column]).sum(other), atol=1e-3)


def test_statistics_are_left_alone_when_everything_is_trained() -> None:
    weights = {
        "w": normal(3, 2, 1, 1),
        "scale": normal(3),
        "bias": normal(3),
        "mean": normal(3),
        "var": np.abs(normal(3)),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("BatchNormalization", ["c", *list(weights)[1:]], ["y"]),
    ]
    proto = model(nodes, {"x": normal(2, 2, 4, 4)}, ["y"], weights, 15)
    step = pullback.training_step(proto, loss="mse", train=["*"], batch_norm="frozen")
    assert set(step.signature.parameters) == {"w", "scale", "bias"}
    assert not [e.name for e in step.signature.outputs if e.role == "state" and e.name in ("new_mean", "new_var")]
    moving = pullback.training_step(proto, loss="mse", train=["*"])
    assert {"new_mean", "new_var"} <= {e.name for e in moving.signature.outputs_of("state")}


# ---- 4: ReduceMin / ReduceMax with ties ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["ReduceMin", "ReduceMax"])
@pytest.mark.parametrize(("opset", "keepdims"), [(11, 0), (13, 0), (13, 1), (18, 0), (18, 1), (20, 1)])
def test_extremes_with_ties_split_evenly(op: str, opset: int, keepdims: int) -> None:
    x = f([1, 1, 2], [3, 0, 0]) * (1 if op == "ReduceMin" else -1)
    if opset < 18:
        node, weights = helper.make_node(op, ["x"], ["y"], axes=[1], keepdims=keepdims), None
    else:
        node, weights = helper.make_node(op, ["x", "axes"], ["y"], keepdims=keepdims), {"axes": np.array([1])}
    (dx,) = gradients(
        model([node], {"x": x}, ["y"], weights, opset), {"x": x}, ["x"], np.ones((2, 1) if keepdims else 2)
    )
    assert dx.tolist() == [[0.5, 0.5, 0], [0, 0.5, 0.5]]


@pytest.mark.parametrize(("op", "x"), [("Max", f(1, 2, 3)), ("Min", f(3, 2, 1))])
def test_elementwise_extremes_split_ties_evenly(op: str, x: np.ndarray) -> None:
    feeds = {"a": x, "b": f(2, 2, 2)}
    da, db = gradients(model([helper.make_node(op, ["a", "b"], ["y"])], feeds, ["y"]), feeds, ["a", "b"], np.ones(3))
    assert da.tolist() == [0, 0.5, 1]
    assert db.tolist() == [1, 0.5, 0]


# ---- 5: ConvTranspose, also grouped --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "w_shape"), [(1, (2, 3, 3, 3)), (2, (2, 2, 3, 3)), (2, (2, 1, 3, 3))])
def test_conv_transpose(group: int, w_shape: tuple[int, ...]) -> None:
    x, w = normal(1, 2, 4, 4), normal(*w_shape)
    settings: dict[str, Any] = {"strides": [2, 2], "pads": [1, 1, 1, 1], "group": group}
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], output_padding=[1, 1], **settings)
    feeds = {"x": x, "w": w}
    proto = model([node], feeds, ["y"], opset=11)
    dy = normal(1, w_shape[1] * group, 8, 8)
    dx, dw = gradients(proto, feeds, ["x", "w"], dy)
    forward = model([helper.make_node("Conv", ["dy", "w"], ["y"], **settings)], {"dy": dy, "w": w}, ["y"], opset=11)
    session = onnxruntime.InferenceSession(forward.SerializeToString())
    assert np.allclose(dx, session.run(None, {"dy": dy, "w": w})[0], atol=1e-4)
    runner = onnxruntime.InferenceSession(proto.SerializeToString())
    v = normal(*w_shape)
    along = np.sum(dy.astype(np.float64) * runner.run(None, {"x": x, "w": v})[0])  # linear in w
    assert np.isclose(np.sum(dw.astype(np.float64) * v), along, rtol=1e-4)


# ---- 6: unary ops at their kinks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "attributes", "want"),
    [
        ("Atan", {}, [0.5, 1, 0.2]), ("LeakyRelu", {"alpha": 0.1}, [0.1, 0.1, 1]), ("Abs", {}, [-1, 0, 1]), ("Relu", {}, [0, 0, 1]),
        ("Sign", {}, [0, 0, 0]), ("Floor", {}, [0, 0, 0]), ("Round", {}, [0, 0, 0]), ("Elu", {}, [np.exp(-1), 1, 1]),
        ("Softsign", {}, [0.25, 1, 1 / 9]), ("HardSigmoid", {}, [0.2, 0.2, 0.2]), ("ThresholdedRelu", {"alpha": 2.0}, [0, 0, 0]),
    ],
)  # fmt: skip
def test_unary_op_at_its_kink(op: str, attributes: dict[str, float], want: list[float]) -> None:
    x = f(-1, 0, 2)
    proto = model([helper.make_node(op, ["x"], ["y"], **attributes)], {"x": x}, ["y"])
    if op in ("Sign", "Floor", "Round"):
        with pytest.warns(UserWarning, match="zero"):
            (dx,) = gradients(proto, {"x": x}, ["x"], np.ones(3))
    else:
        (dx,) = gradients(proto, {"x": x}, ["x"], np.ones(3))
    assert np.allclose(dx, want, atol=1e-6)


@pytest.mark.parametrize("opset", [6 + 1, 11, 13])
def test_clip_passes_at_its_bounds(opset: int) -> None:
    x = f(-1, 0, 2, 1)
    if opset < 11:
        node, weights = helper.make_node("Clip", ["x"], ["y"], min=0.0, max=1.0), None
    else:
        node, weights = helper.make_node("Clip", ["x", "lo", "hi"], ["y"]), {"lo": np.float32(0), "hi": np.float32(1)}
        weights = {k: np.asarray(v) for k, v in weights.items()}
    (dx,) = gradients(model([node], {"x": x}, ["y"], weights, opset), {"x": x}, ["x"], np.ones(4))
    assert dx.tolist() == [0, 1, 0, 1]


# ---- 7: Slice backward, and a vector output ------------------------------------------------------------------------------------------------


def test_slice_backward() -> None:
    x = normal(2, 2)
    weights = {"s": np.array([0]), "e": np.array([1])}
    nodes = [helper.make_node("Slice", ["x", "s", "e"], ["t"]), helper.make_node("ReduceSum", ["t"], ["y"], keepdims=0)]
    (dx,) = gradients(model(nodes, {"x": x}, ["y"], weights, 13), {"x": x}, ["x"])
    assert dx.tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("start", "end", "step"), [(0, 9, 2), (1, 9, 3), (-1, -100, -1), (5, 0, -2), (-3, 2**62, 1)])
def test_slice_backward_of_any_step(start: int, end: int, step: int, symbolic: bool) -> None:
    x = normal(7, 3)
    weights = {"s": np.array([start]), "e": np.array([end]), "a": np.array([0]), "k": np.array([step])}
    proto = model([helper.make_node("Slice", ["x", *weights], ["y"])], {"x": x}, ["y"], weights, 13, symbolic)
    places = np.arange(7)[slice(start, None if end < -7 else min(end, 7), step)]
    dy = normal(len(places), 3)
    (dx,) = gradients(proto, {"x": x}, ["x"], dy)
    want = np.zeros((7, 3), np.float32)
    want[places] = dy
    assert np.array_equal(dx, want)


def test_vector_output_gets_a_seed() -> None:
    x = f([0, 1], [2, 3], [4, 5])
    weights = {"zero": np.array(0), "one": np.array(1)}
    nodes = [
        helper.make_node("Gather", ["x", "zero"], ["a"], axis=1), helper.make_node("Gather", ["x", "one"], ["b"], axis=1),
        helper.make_node("Mul", ["a", "a"], ["aa"]), helper.make_node("Add", ["aa", "b"], ["y"]),
    ]  # fmt: skip
    proto = model(nodes, {"x": x}, ["y"], weights, 13)
    graph = pullback.gradient(pullback.load(proto), of=["y"], wrt=["x"])
    assert [v.name for v in graph.by_role("seed")] == ["seed_y"]
    (dx,) = gradients(proto, {"x": x}, ["x"], np.ones(3))
    assert dx.tolist() == [[0, 1], [4, 1], [8, 1]]


# ---- 8: Pow and dtype discipline -----------------------------------------------------------------------------------------------------------


def test_pow_of_double() -> None:
    x = np.array([2.0, -3.0])
    proto = model(
        [helper.make_node("Pow", ["x", "e"], ["y"])], {"x": x}, ["y"], {"e": np.array(3.0)}, 15, types={"y": 11}
    )
    assert gradients(proto, {"x": x}, ["x"], np.ones(2))[0].tolist() == [12, 27]


def test_pow_with_integer_exponent_has_no_gradient_for_it() -> None:
    x = f(2, -3, 0)
    proto = model([helper.make_node("Pow", ["x", "e"], ["y"])], {"x": x, "e": np.array(2)}, ["y"], opset=15)
    assert gradients(proto, {"x": x, "e": np.array(2)}, ["x"], np.ones(3))[0].tolist() == [4, -6, 0]
    with pytest.raises(pullback.PullbackError, match="e"):
        pullback.gradient(pullback.load(proto), of=["y"], wrt=["e"])


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.0])
def test_pow_at_zero_is_finite(exponent: float) -> None:
    feeds = {"x": f(0, -2), "e": f(exponent, exponent)}
    dx, de = gradients(
        model([helper.make_node("Pow", ["x", "e"], ["y"])], feeds, ["y"], opset=15), feeds, ["x", "e"], np.ones(2)
    )
    assert dx.tolist() == [1.0 if exponent == 1 else 0.0, exponent * (-2.0) ** (exponent - 1) if exponent else 0.0]
    assert de[0] == 0


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_no_float32_constant_in_a_graph_of_another_dtype(dtype: type) -> None:
    x, w = normal(3, 2, dtype=dtype), normal(2, 2, dtype=dtype)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Sigmoid", ["h"], ["y"])]
    proto = model(nodes, {"x": x}, ["y"], {"w": w}, types={"y": int(CODES[np.dtype(dtype)])})
    for graph in (pullback.training_step(proto, loss="mse", optimizer="sgd").gradients,):
        written = graph.to_onnx()
        for tensor in written.graph.initializer:
            assert tensor.data_type != TensorProto.FLOAT, tensor.name
        for info in written.graph.value_info:
            assert info.type.tensor_type.elem_type != TensorProto.FLOAT, info.name


# ---- 9: a tied weight ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["onnxruntime", "onnx-mlir"])
def test_tied_weight_is_one_parameter(target: str) -> None:
    w = (np.arange(15) / 10).reshape(5, 3).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["w", "ids"], ["e"]), helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]),
        helper.make_node("MatMul", ["e", "wt"], ["s"]), helper.make_node("ReduceSum", ["s"], ["y"], keepdims=0),
    ]  # fmt: skip
    ids = np.array([0, 2])
    proto = model(nodes, {"ids": ids}, ["y"], {"w": w}, 13)
    (dw,) = gradients(proto, {"ids": ids, "w": w}, ["w"], target=target)
    assert np.allclose(dw[[0, 2]], [3.6, 4.3, 5.0], atol=1e-5)
    assert np.allclose(dw[[1, 3, 4]], [0.6, 0.8, 1.0], atol=1e-5)
    step = pullback.training_step(proto, loss=None, output="y", optimizer="adam")
    assert step.signature.parameters == ("w",)
    assert [e.name for e in step.signature.outputs_of("gradient")] == ["grad_w"]
    assert [e.name for e in step.signature.outputs_of("update") if e.slot is None] == ["new_w"]


# ---- 10: several outputs, weighted sum of losses -------------------------------------------------------------------------------------------


def test_weighted_sum_of_losses_on_several_outputs() -> None:
    x, w, v = normal(4, 3), normal(3, 3), normal(3)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y1"]), helper.make_node("MatMul", ["x", "v"], ["y2"]),
        helper.make_node("ArgMax", ["y1"], ["label"], axis=1, keepdims=0),
    ]  # fmt: skip
    proto = model(
        nodes, {"x": x}, ["y1", "y2", "label"], {"w": w, "v": v}, 13, True, types={"label": TensorProto.INT64}
    )
    step = pullback.training_step(proto, loss={"y1": ("mse_loss", 0.4), "y2": ("mse_loss", 0.6)}, optimizer="sgd")
    assert {e.name for e in step.signature.inputs_of("target")} == {"target_y1", "target_y2"}
    t1, t2 = normal(4, 3), normal(4)
    got = run(step.graph, {"x": x, "target_y1": t1, "target_y2": t2})
    assert got["loss"].shape == ()
    assert np.isclose(got["loss"], 0.4 * np.mean((x @ w - t1) ** 2) + 0.6 * np.mean((x @ v - t2) ** 2), rtol=1e-5)
    assert np.allclose(got["grad_w"], x.T @ (0.4 * 2 * (x @ w - t1) / 12), atol=1e-5)
    assert np.allclose(got["grad_v"], x.T @ (0.6 * 2 * (x @ v - t2) / 4), atol=1e-5)
    assert np.array_equal(got["label"], (x @ w).argmax(1))


# ---- 11: Dropout with one declared output --------------------------------------------------------------------------------------------------


def dropout(
    ratio: float | None, training: bool | None, as_input: bool = False, mask: bool = False
) -> tuple[onnx.ModelProto, Arrays]:
    x = np.ones((4, 4), np.float32)
    weights: Arrays = {}
    inputs: Arrays = {"x": x}
    names = ["x", "", ""]
    if ratio is not None:
        weights["ratio"] = np.asarray(ratio, np.float32)
        names[1] = "ratio"
    if training is not None:
        (inputs if as_input else weights)["training"] = np.asarray(training)
        names[2] = "training"
    node = helper.make_node("Dropout", names, ["y", "m"] if mask else ["y"])
    return model([node], inputs, ["y"], weights, 13), inputs


@pytest.mark.parametrize(("ratio", "training"), [(0.0, True), (None, None), (0.5, None), (0.5, False), (None, False)])
@pytest.mark.parametrize("mask", [False, True])
def test_dropout_that_drops_nothing_is_the_identity(ratio: float | None, training: bool | None, mask: bool) -> None:
    proto, feeds = dropout(ratio, training, mask=mask)
    (dx,) = gradients(proto, feeds, ["x"], np.full((4, 4), 3.0))
    assert (dx == 3).all()


def test_dropout_in_training_mode_has_one_mask_for_both_passes() -> None:
    proto, feeds = dropout(0.5, True)
    graph = pullback.gradient(pullback.load(proto), of=["y"], wrt=["x"])
    got = run(graph, {**feeds, "seed_y": np.ones((4, 4), np.float32), "seed": np.array(7)})
    assert np.array_equal(got["y"], got["grad_x"])
    assert set(np.unique(got["y"])) <= {0.0, 2.0}


def test_dropout_with_training_mode_as_input_is_refused_with_a_clear_error() -> None:
    proto, _ = dropout(0.5, True, as_input=True)
    with pytest.raises(
        pullback.Refusal, match=r"node 'y' \(Dropout, domain ai.onnx, opset 13\): training_mode must be known"
    ):
        pullback.load(proto)


# ---- 12: the Gradient operator -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["Add", "Mul"])
def test_gradient_operator_is_expanded(op: str) -> None:
    a, b = normal(2, 3), normal(3)
    nodes = [
        helper.make_node(op, ["a", "b"], ["c"]),
        helper.make_node("Gradient", ["a", "b"], ["da", "db"], domain="ai.onnx.preview.training", xs=["a", "b"], y="c"),
    ]
    proto = model(nodes, {"a": a, "b": b}, ["c", "da", "db"], opset=13, domains=(("ai.onnx.preview.training", 1),))
    written = pullback.lower(proto).to_onnx()
    assert "Gradient" not in {n.op_type for n in written.graph.node}
    assert {o.domain for o in written.opset_import} <= {"", "ai.onnx"}
    got = run(pullback.load(proto), {"a": a, "b": b})
    want = (np.ones((2, 3)), np.full(3, 2.0)) if op == "Add" else (np.broadcast_to(b, (2, 3)), a.sum(0))
    assert np.allclose(got["da"], want[0], atol=1e-6)
    assert np.allclose(got["db"], want[1], atol=1e-6)


# ---- 13: optimizers as explicit ops --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "first", "second"),
    [
        ("adam", {}, [0.9, -1.9], [0.8, -1.8]),
        ("rmsprop", {"alpha": 0.99, "eps": 1e-12}, [0, -1], [-0.708881, -0.291119]),
        ("adagrad", {"eps": 1e-12}, [0.9, -1.9], [0.829289, -1.829289]),
        ("sgd", {"momentum": 0.9}, [0.95, -1.9], [0.855, -1.71]),
    ],
)
@pytest.mark.parametrize("target", ["onnxruntime", "onnx-mlir", "iree"])
def test_optimizer_as_explicit_ops(
    name: str, options: dict[str, float], first: list[float], second: list[float], target: str
) -> None:
    g, w = f(0.5, -1), f(1, -2)
    nodes = [helper.make_node("Mul", ["x", "w"], ["p"]), helper.make_node("ReduceSum", ["p"], ["y"], keepdims=0)]
    proto = model(nodes, {"x": g}, ["y"], {"w": w})
    step = pullback.training_step(proto, loss=None, output="y", optimizer=name, lr=0.1, optimizer_options=options)
    slots = {e.name for e in step.signature.inputs_of("slot")}
    assert slots
    assert slots <= {e.replaces for e in step.signature.outputs}
    assert "step" in {e.name for e in step.signature.inputs_of("step")}
    carried: Arrays = {}
    for want in (first, second):
        got = run(step.graph, {"x": g, **carried}, target=target)
        carried = {e.replaces: got[e.name] for e in step.signature.outputs if e.replaces}
        assert np.allclose(carried["w"], want, atol=1e-5)
