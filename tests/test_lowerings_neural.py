"""Activations, normalisations, losses and attention: derivatives, special points, and what PyTorch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from lowered import check, gradients, model_of, run, text_model
from pullback.algebra.errors import Refusal
from pullback.algebra.evaluate import evaluate
from pullback.algebra.training.step import training_step
from pullback.frontends.onnx_import import load

RNG = np.random.default_rng(0)
TORCH = "torch is not installed (pip install pullback[torch])"


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def between(low: float, high: float, *shape: int) -> np.ndarray:
    return RNG.uniform(low, high, shape)


# ---- activations -------------------------------------------------------------------------------------------------------------------------

ACTIVATIONS: list[tuple[str, dict[str, Any]]] = [
    ("Relu", {}), ("LeakyRelu", {"alpha": 0.1}), ("ThresholdedRelu", {"alpha": 0.3}), ("Elu", {"alpha": 0.7}), ("Celu", {"alpha": 0.7}),
    ("Selu", {}), ("Sigmoid", {}), ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}), ("HardSwish", {}), ("Softplus", {}), ("Softsign", {}),
    ("Gelu", {}), ("Gelu", {"approximate": "tanh"}), ("Mish", {}), ("Swish", {"alpha": 1.5}), ("Shrink", {"lambd": 0.2, "bias": 0.1}),
]  # fmt: skip
AWAY_FROM_KINKS = np.array([[-2.3, -0.7, -0.45], [0.4, 1.1, 2.9]])


@pytest.mark.parametrize(("op", "attributes"), ACTIVATIONS, ids=lambda v: str(v))
def test_derivatives_of_activations_agree_with_differences(op: str, attributes: dict[str, Any]) -> None:
    check(op, {"x": AWAY_FROM_KINKS}, tolerance=1e-6, **attributes)
    check(op, {"x": np.zeros((0, 2))}, **attributes)
    check(op, {"x": np.array(0.8)}, tolerance=1e-6, **attributes)


LARGE = np.array([-1e30, -800.0, -90.0, 0.0, 90.0, 800.0, 1e30])


@pytest.mark.parametrize(("op", "attributes"), ACTIVATIONS, ids=lambda v: str(v))
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_activations_have_no_nan_far_out(op: str, attributes: dict[str, Any], dtype: type) -> None:
    with np.errstate(over="ignore"):
        x = np.clip(LARGE, np.finfo(dtype).min / 4, np.finfo(dtype).max / 4).astype(dtype)
    graph = load(model_of(op, {"x": x}, **attributes))
    value = evaluate(graph, {"x": x})["y"]
    slope = gradients(graph, {"x": x})["x"]
    assert value.dtype == slope.dtype == dtype
    assert np.isfinite(value).all()
    assert np.isfinite(slope).all()


KINKS = np.array([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0])


def _torch_of(op: str) -> Callable[[Any], Any]:
    import torch.nn.functional as f

    table: dict[str, Callable[[Any], Any]] = {
        "Relu": f.relu, "LeakyRelu": lambda x: f.leaky_relu(x, 0.01), "ThresholdedRelu": lambda x: f.threshold(x, 1.0, 0.0), "Elu": f.elu,
        "Celu": f.celu, "Selu": f.selu, "Sigmoid": f.sigmoid, "HardSwish": f.hardswish, "Softplus": f.softplus, "Softsign": f.softsign,
        "Gelu": f.gelu, "Mish": f.mish, "Swish": f.silu,
    }  # fmt: skip
    return table[op]


@pytest.mark.parametrize(
    "op",
    [
        "Relu",
        "LeakyRelu",
        "ThresholdedRelu",
        "Elu",
        "Celu",
        "Selu",
        "Sigmoid",
        "HardSwish",
        "Softplus",
        "Softsign",
        "Gelu",
        "Mish",
        "Swish",
    ],
)
def test_activations_are_those_of_pytorch_at_kinks_too(op: str) -> None:
    torch = pytest.importorskip("torch", reason=TORCH)
    x = torch.tensor(KINKS, requires_grad=True)
    y = _torch_of(op)(x)
    y.sum().backward()
    graph = load(model_of(op, {"x": KINKS}))
    np.testing.assert_allclose(evaluate(graph, {"x": KINKS})["y"], y.detach().numpy(), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(gradients(graph, {"x": KINKS})["x"], x.grad.numpy(), rtol=1e-6, atol=1e-7)


def test_hard_sigmoid_passes_nothing_at_its_bounds() -> None:
    x = np.array([-2.5, 0.0, 2.5])
    assert gradients(load(model_of("HardSigmoid", {"x": x})), {"x": x})["x"].tolist() == pytest.approx([0, 0.2, 0])


def test_shrink_of_integers_stays_one() -> None:
    x = np.array([-3, -1, 0, 1, 3], np.int32)
    assert run("Shrink", {"x": x}, lambd=1.5, bias=1.0).tolist() == [-2, 0, 0, 0, 2]


@pytest.mark.parametrize("slope", [(), (1,), (3, 1), (3, 4), (2, 3, 4)])
def test_prelu_broadcasts_its_slope(slope: tuple[int, ...]) -> None:
    check("PRelu", {"x": normal(2, 3, 4), "slope": between(0.1, 0.5, *slope)}, tolerance=1e-6)


def test_swiglu_is_a_gate_times_a_value() -> None:
    check("SwiGLU", {"a": normal(2, 3), "b": normal(2, 3)}, alpha=1.7, tolerance=1e-6)


# ---- softmax -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(("opset", "axis"), [(13, -1), (13, 0), (13, 1), (11, 1), (11, 0), (11, 2), (7, 1)])
def test_softmax_of_every_version_agrees_with_differences(op: str, opset: int, axis: int) -> None:
    check(op, {"x": normal(2, 3, 4)}, opset=opset, axis=axis, tolerance=1e-6)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
def test_softmax_before_13_flattens_from_its_axis(op: str) -> None:
    x = normal(2, 3, 4)
    flat = run(op, {"x": x.reshape(2, 12)}, opset=13)
    np.testing.assert_allclose(run(op, {"x": x}, opset=11), flat.reshape(2, 3, 4))
    np.testing.assert_allclose(run(op, {"x": x}, opset=11, axis=-2), flat.reshape(2, 3, 4))


def test_softmax_is_stable_far_out() -> None:
    x = np.array([[1000.0, 0.0, -np.inf], [-1000.0, -1000.0, -1000.0]], np.float32)
    graph = load(model_of("LogSoftmax", {"x": x}))
    assert evaluate(graph, {"x": x})["y"][1].tolist() == pytest.approx([-np.log(3)] * 3)
    graph = load(model_of("Softmax", {"x": x}))
    assert evaluate(graph, {"x": x})["y"][0].tolist() == [1, 0, 0]
    assert np.isfinite(gradients(graph, {"x": x})["x"]).all()


def test_hardmax_takes_the_first_of_equal_elements() -> None:
    assert run("Hardmax", {"x": np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 1.0]])}).tolist() == [[0, 1, 0], [1, 0, 0]]


# ---- dropout -----------------------------------------------------------------------------------------------------------------------------

HALF, TRUE, FALSE = np.float32(0.5), np.array(True), np.array(False)


@pytest.mark.parametrize("opset", [7, 10, 12, 13, 22])
def test_dropout_in_inference_is_the_identity_with_a_gradient_of_one(opset: int) -> None:
    x = normal(3, 4).astype(np.float32)
    inputs: dict[str, Any] = {"x": x} if opset < 12 else {"x": x, "ratio": HALF}
    options: dict[str, Any] = {"ratio": 0.5} if opset < 12 else {"fixed": ["ratio"]}
    graph = load(model_of("Dropout", inputs, opset=opset, outputs=2, **options))
    values = evaluate(graph, {"x": x})
    np.testing.assert_array_equal(values["y0"], x)
    assert values["y1"].dtype == (np.float32 if opset < 10 else np.bool_)
    assert values["y1"].all()
    assert graph.info["dropouts"][0].ratio == 0.5
    seeds = {"ct_y0": np.ones_like(x)}
    if opset >= 10:
        np.testing.assert_array_equal(gradients(graph, {"x": x}, seeds={"y0": seeds["ct_y0"]})["x"], np.ones_like(x))


def test_dropout_in_training_uses_one_mask_forward_and_backward() -> None:
    x = (2 + RNG.random((40, 50))).astype(np.float32)
    inputs = {"x": x, "ratio": np.float32(0.25), "training_mode": TRUE}
    graph = load(model_of("Dropout", inputs, opset=13, fixed=["ratio", "training_mode"]))
    feeds = {"x": x, "seed": np.int64(7)}
    y, slope = evaluate(graph, feeds)["y"], gradients(graph, feeds, wrt=["x"])["x"]
    kept = y != 0
    assert 0.7 < kept.mean() < 0.8
    np.testing.assert_allclose(y[kept], x[kept] / 0.75, rtol=1e-6)
    np.testing.assert_allclose(slope, kept / np.float32(0.75), rtol=1e-6)
    other = evaluate(graph, {"x": x, "seed": np.int64(8)})["y"]
    assert ((other != 0) != kept).any()
    np.testing.assert_array_equal(evaluate(graph, {"x": x})["y"], evaluate(graph, {"x": x})["y"])


def test_a_training_step_of_a_model_with_its_own_dropout_draws_anew_at_each_step() -> None:
    model = text_model(
        """model (float[8, 6] x) => (float[8, 3] y) <float[6, 3] w, float ratio = {0.5}, bool training = {1}> {
             d = Dropout(x, ratio, training)
             y = MatMul(d, w)
           }""",
        opset=13,
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(normal(6, 3).astype(np.float32), "w"))
    step = training_step(load(model), loss="mse_loss", optimizer="sgd", lr=0.1)
    feeds = {"x": normal(8, 6), "target": normal(8, 3)}
    first, again, second = (evaluate(step.graph, {**feeds, "step": np.int64(n)})["loss"] for n in (0, 0, 1))
    assert first == again
    assert first != second
    assert {e.name: e.role for e in step.signature.inputs}["seed"] == "seed"


@pytest.mark.parametrize(("ratio", "mode"), [(np.float32(0), TRUE), (HALF, FALSE), (HALF, None)])
def test_dropout_without_a_ratio_or_outside_training_is_the_identity(ratio: Any, mode: Any) -> None:
    x = normal(2, 3).astype(np.float32)
    inputs = {"x": x, "ratio": ratio, "training_mode": mode}
    fixed = [n for n, a in inputs.items() if n != "x" and a is not None]
    np.testing.assert_array_equal(run("Dropout", inputs, opset=13, fixed=fixed), x)


def test_dropout_of_the_first_opsets_is_the_identity_where_it_is_a_test() -> None:
    x = normal(2, 3).astype(np.float32) + 5
    y, mask = run("Dropout", {"x": x}, opset=6, outputs=2, is_test=1)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(mask, np.ones_like(x))
    y, mask = run("Dropout", {"x": x}, opset=6, outputs=2, ratio=0.75)
    np.testing.assert_allclose(y, x * mask * 4, rtol=1e-6)


def test_dropout_with_a_mode_that_is_fed_is_refused_by_name() -> None:
    with pytest.raises(Refusal, match=r"'node' \(Dropout.*training_mode must be known"):
        load(model_of("Dropout", {"x": normal(2), "r": HALF, "training_mode": TRUE}, opset=13, fixed=["r"]))


# ---- normalisations ----------------------------------------------------------------------------------------------------------------------


def norm_inputs(*shape: int) -> dict[str, np.ndarray]:
    c = shape[1]
    return {"x": normal(*shape), "scale": normal(c), "b": normal(c), "mean": normal(c), "var": between(0.5, 2, c)}


@pytest.mark.parametrize("opset", [7, 9, 14, 15])
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 2, 2), (2, 1, 3)])
def test_batch_normalization_agrees_with_differences(opset: int, shape: tuple[int, ...]) -> None:
    check("BatchNormalization", norm_inputs(*shape), opset=opset, tolerance=1e-6)


def test_batch_normalization_in_training_uses_the_batch_and_moves_its_statistics() -> None:
    inputs = norm_inputs(4, 3, 5)
    y, mean, var = run("BatchNormalization", inputs, opset=15, outputs=3, training_mode=1, momentum=0.8)
    x = inputs["x"]
    batch_mean, batch_var = x.mean((0, 2)), x.var((0, 2))
    expected = (x - batch_mean[:, None]) / np.sqrt(batch_var[:, None] + 1e-5) * inputs["scale"][:, None] + inputs["b"][
        :, None
    ]
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    np.testing.assert_allclose(mean, 0.8 * inputs["mean"] + 0.2 * batch_mean, rtol=1e-6)
    np.testing.assert_allclose(var, 0.8 * inputs["var"] + 0.2 * batch_var, rtol=1e-6)
    check("BatchNormalization", inputs, opset=15, outputs=3, training_mode=1, tolerance=1e-5)
    check("BatchNormalization", inputs, opset=9, outputs=5, tolerance=1e-5)


def test_batch_normalization_in_inference_leaves_a_record_and_its_statistics_alone() -> None:
    inputs = norm_inputs(2, 3, 4, 4)
    graph = load(model_of("BatchNormalization", inputs, opset=15, fixed=["scale", "b", "mean", "var"]))
    roles = {v.params["name"]: v.params["role"] for v in graph.inputs}
    assert roles == {"x": "input", "scale": "parameter", "b": "parameter", "mean": "state", "var": "state"}
    (record,) = graph.info["batch_norms"]
    assert (record.x, record.scale, record.bias, record.mean, record.var, record.y) == (
        "x",
        "scale",
        "b",
        "mean",
        "var",
        "y",
    )
    inverse = 1 / np.sqrt(inputs["var"] + np.float32(1e-5))
    found = gradients(graph, {"x": inputs["x"]}, wrt=["x", "scale", "b", "mean"])
    centred = inputs["x"] - inputs["mean"][:, None, None]
    np.testing.assert_allclose(found["x"], np.broadcast_to((inputs["scale"] * inverse)[:, None, None], (2, 3, 4, 4)))
    np.testing.assert_allclose(found["scale"], (centred * inverse[:, None, None]).sum((0, 2, 3)))
    np.testing.assert_allclose(found["b"], [32, 32, 32])
    np.testing.assert_allclose(found["mean"], -32 * inputs["scale"] * inverse)


def test_batch_normalization_without_spatial_statistics_has_one_for_each_element() -> None:
    inputs = {
        "x": normal(2, 3, 4),
        "scale": normal(3, 4),
        "b": normal(3, 4),
        "mean": normal(3, 4),
        "var": between(0.5, 2, 3, 4),
    }
    check("BatchNormalization", inputs, opset=7, spatial=0, tolerance=1e-6)


@pytest.mark.parametrize(("axis", "scale"), [(-1, (4,)), (1, (3, 4)), (0, (2, 3, 4)), (2, (1,))])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_normalization_agrees_with_differences(
    axis: int, scale: tuple[int, ...], outputs: int, bias: bool
) -> None:
    inputs = {"x": normal(2, 3, 4), "scale": normal(*scale), "b": normal(*scale) if bias else None}
    check("LayerNormalization", inputs, opset=17, axis=axis, outputs=outputs, tolerance=1e-5)


@pytest.mark.parametrize(("axis", "scale"), [(-1, (4,)), (1, (3, 4))])
def test_layer_normalization_has_the_gradient_of_the_formula(axis: int, scale: tuple[int, ...]) -> None:
    x, s, ct = normal(2, 3, 4), normal(*scale), normal(2, 3, 4)
    graph = load(model_of("LayerNormalization", {"x": x, "scale": s}, opset=17, axis=axis))
    found = gradients(graph, {"x": x, "scale": s}, seeds={"y": ct})
    axes = tuple(range(axis % 3, 3))
    inverse = 1 / np.sqrt(x.var(axes, keepdims=True) + np.float32(1e-5))
    xh, g = (x - x.mean(axes, keepdims=True)) * inverse, ct * s
    expected = inverse * (g - g.mean(axes, keepdims=True) - xh * (g * xh).mean(axes, keepdims=True))
    np.testing.assert_allclose(found["x"], expected, atol=1e-12)
    np.testing.assert_allclose(found["scale"], (ct * xh).sum(tuple(range(axis % 3))), atol=1e-12)


@pytest.mark.parametrize("op", ["LayerNormalization", "RMSNormalization"])
def test_statistics_of_half_floats_are_computed_in_single(op: str) -> None:
    x = (300 * np.ones((1, 512)) + np.arange(512)).astype(np.float16)
    y = run(op, {"x": x, "scale": np.ones(512, np.float16)})
    assert y.dtype == np.float16
    assert np.isfinite(y).all()


@pytest.mark.parametrize(
    ("op", "inputs", "attributes"),
    [
        ("RMSNormalization", {"x": normal(2, 3, 4), "scale": normal(4)}, {}),
        ("RMSNormalization", {"x": normal(2, 3, 4), "scale": normal(3, 4)}, {"axis": 1}),
        ("InstanceNormalization", {"x": normal(2, 3, 4, 2), "scale": normal(3), "b": normal(3)}, {}),
        ("MeanVarianceNormalization", {"x": normal(2, 3, 4, 2)}, {}),
        ("MeanVarianceNormalization", {"x": normal(2, 3, 4)}, {"axes": [1, 2]}),
        ("LpNormalization", {"x": normal(2, 3, 4)}, {"p": 2, "axis": 1}),
        ("LpNormalization", {"x": normal(2, 3, 4) + 3}, {"p": 1}),
        ("LRN", {"x": normal(2, 5, 3, 2)}, {"size": 3, "alpha": 0.5, "beta": 0.6, "bias": 1.5}),
        ("LRN", {"x": normal(2, 5, 3)}, {"size": 4, "alpha": 0.5}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_other_normalizations_agree_with_differences(
    op: str, inputs: dict[str, np.ndarray], attributes: dict[str, Any]
) -> None:
    check(op, inputs, tolerance=1e-5, **attributes)


@pytest.mark.parametrize(("opset", "count"), [(18, 2), (21, 4)])
def test_group_normalization_scales_groups_before_21_and_channels_since(opset: int, count: int) -> None:
    inputs = {"x": normal(2, 4, 3, 2), "scale": normal(count), "bias": normal(count)}
    check("GroupNormalization", inputs, opset=opset, num_groups=2, tolerance=1e-5, keep=[("x", 1)])
    x = inputs["x"].reshape(2, 2, 2, 3, 2)
    standard = (x - x.mean((2, 3, 4), keepdims=True)) / np.sqrt(x.var((2, 3, 4), keepdims=True) + 1e-5)
    shape = (1, 2, 1, 1, 1) if opset == 18 else (1, 2, 2, 1, 1)
    expected = standard * inputs["scale"].reshape(shape) + inputs["bias"].reshape(shape)
    np.testing.assert_allclose(
        run("GroupNormalization", inputs, opset=opset, num_groups=2), expected.reshape(2, 4, 3, 2), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("op", "attributes"),
    [("LpNormalization", {"p": 2}), ("LpNormalization", {"p": 1}), ("MeanVarianceNormalization", {"axes": [0, 1]})],
)
def test_normalizations_of_zeros_have_a_finite_gradient(op: str, attributes: dict[str, Any]) -> None:
    x = np.zeros((2, 3))
    graph = load(model_of(op, {"x": x}, **attributes))
    assert (evaluate(graph, {"x": x})["y"] == 0).all()
    assert np.isfinite(gradients(graph, {"x": x})["x"]).all()


# ---- losses ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignore", [None, 1, -7])
@pytest.mark.parametrize("extra", [(), (3,), (2, 2)])
def test_losses_agree_with_pytorch(
    op: str, reduction: str, weighted: bool, ignore: int | None, extra: tuple[int, ...]
) -> None:
    torch = pytest.importorskip("torch", reason=TORCH)
    x, labels = normal(4, 3, *extra), RNG.integers(0, 3, (4, *extra))
    labels.reshape(-1)[0] = 0
    if ignore == -7:
        labels.reshape(-1)[1] = ignore
    weight = between(0.5, 2, 3) if weighted else None
    options: dict[str, Any] = {} if ignore is None else {"ignore_index": ignore}
    graph = load(
        model_of(op, {"x": x, "labels": labels, "weight": weight}, fixed=["weight"], reduction=reduction, **options)
    )
    t = torch.tensor(x, requires_grad=True)
    function = torch.nn.functional.cross_entropy if op.startswith("Softmax") else torch.nn.functional.nll_loss
    expected = function(
        t, torch.tensor(labels), weight=None if weight is None else torch.tensor(weight), reduction=reduction, **options
    )
    expected.sum().backward()
    feeds = {"x": x, "labels": labels}
    np.testing.assert_allclose(evaluate(graph, feeds)["y"], expected.detach().numpy(), rtol=1e-9)
    np.testing.assert_allclose(gradients(graph, feeds, wrt=["x"])["x"], t.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_losses_agree_with_differences_for_weights_and_log_probabilities() -> None:
    inputs = {"x": normal(4, 3, 2), "labels": RNG.integers(0, 3, (4, 2)), "weight": between(0.5, 2, 3)}
    check("SoftmaxCrossEntropyLoss", inputs, outputs=2, tolerance=1e-5)
    check("NegativeLogLikelihoodLoss", inputs, tolerance=1e-5)


# ---- attention ---------------------------------------------------------------------------------------------------------------------------


def heads(
    b: int = 2, hq: int = 2, hk: int = 2, s: int = 3, t: int = 4, d: int = 2, v: int = 3
) -> dict[str, np.ndarray | None]:
    return {"q": normal(b, hq, s, d), "k": normal(b, hk, t, d), "v": normal(b, hk, t, v)}


MASK = np.array([[True, False, True, True], [True, True, False, False], [False, True, True, True]])
ATTENTION: dict[str, tuple[dict[str, np.ndarray | None], dict[str, Any]]] = {
    "plain": (heads(), {}),
    "grouped": (heads(hq=4), {"scale": 0.3}),
    "causal": (heads(t=3), {"is_causal": 1}),
    "softcap": (heads(), {"softcap": 1.5}),
    "float mask": ({**heads(), "mask": normal(3, 4)}, {}),
    "boolean mask": ({**heads(), "mask": MASK}, {"is_causal": 1}),
    "mask of each head": ({**heads(), "mask": normal(2, 2, 3, 4)}, {}),
    "past": (
        {**heads(t=2), "mask": None, "past_key": normal(2, 2, 2, 2), "past_value": normal(2, 2, 2, 3)},
        {"is_causal": 1},
    ),
    "lengths": ({**heads(), "mask": None, "pk": None, "pv": None, "nonpad": np.array([2, 4])}, {}),
    "window": (heads(), {"left_window_size": 1, "right_window_size": 1}),
}


BLOCKING = ("causal", "boolean mask", "past", "lengths", "window")
MODES = [
    (n, m) for n in ATTENTION for m in range(4) if m != 2 or n not in BLOCKING
]  # blocked scores are infinite: no differences


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_attention_agrees_with_differences(name: str, mode: int) -> None:
    inputs, attributes = ATTENTION[name]
    outputs = 4 if "past_key" in inputs or mode else 1
    check(
        "Attention",
        inputs,
        opset=25,
        outputs=outputs,
        qk_matmul_output_mode=mode,
        orders=1,
        tolerance=1e-5,
        **attributes,
    )


def test_attention_agrees_with_differences_at_second_order() -> None:
    check("Attention", heads(hq=4), opset=23, is_causal=1, tolerance=1e-4)


def test_attention_on_three_axes_splits_its_heads() -> None:
    inputs = {"q": normal(2, 3, 8), "k": normal(2, 4, 4), "v": normal(2, 4, 6)}
    check(
        "Attention",
        inputs,
        opset=23,
        q_num_heads=4,
        kv_num_heads=2,
        orders=1,
        tolerance=1e-5,
        keep=[("q", 2), ("k", 2), ("v", 2)],
    )


def test_attention_of_a_row_that_sees_nothing_is_zero_with_a_finite_gradient() -> None:
    inputs = {**heads(), "mask": np.array([[True] * 4, [False] * 4, [True] * 4])}
    graph = load(model_of("Attention", inputs, opset=23))
    feeds = {k: v for k, v in inputs.items() if v is not None}
    assert (evaluate(graph, feeds)["y"][:, :, 1] == 0).all()
    assert all(np.isfinite(g).all() for g in gradients(graph, feeds).values())


def test_attention_is_that_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason=TORCH)
    inputs = heads(hq=4, t=3, v=2)
    tensors = [torch.tensor(a, requires_grad=True) for a in inputs.values()]
    y = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    y.sum().backward()
    graph = load(model_of("Attention", inputs, opset=23, is_causal=1))
    feeds = {k: v for k, v in inputs.items() if v is not None}
    np.testing.assert_allclose(evaluate(graph, feeds)["y"], y.detach().numpy(), rtol=1e-9)
    found = gradients(graph, feeds)
    for name, t in zip(inputs, tensors, strict=True):
        np.testing.assert_allclose(found[name], t.grad.numpy(), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("width", [0, 4])
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("rank", [3, 4])
def test_rotary_embedding_agrees_with_differences(interleaved: int, width: int, ids: bool, rank: int) -> None:
    half = (width or 6) // 2
    angles = normal(5, half) if ids else normal(2, 3, half)
    inputs = {
        "x": normal(2, 2, 3, 6) if rank == 4 else normal(2, 3, 12), "cos": np.cos(angles), "sin": np.sin(angles),
        "ids": RNG.integers(0, 5, (2, 3)) if ids else None,
    }  # fmt: skip
    options: dict[str, Any] = {"num_heads": 2} if rank == 3 else {}
    check("RotaryEmbedding", inputs, opset=23, interleaved=interleaved, rotary_embedding_dim=width, orders=1, tolerance=1e-6,
          keep=[("x", rank - 1), ("cos", angles.ndim - 1), ("sin", angles.ndim - 1)], **options)  # fmt: skip


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("past", [True, False])
def test_linear_attention_agrees_with_differences(rule: str, past: bool) -> None:
    inputs = {
        "q": normal(2, 3, 8), "k": 0.5 * normal(2, 3, 4), "v": normal(2, 3, 6), "past": normal(2, 2, 2, 3) if past else None,
        "decay": -between(0.1, 1, 2, 3, 2 if past else 4) if "gated" in rule else None,
        "beta": between(0.1, 1, 2, 3, 1 if past else 2) if "delta" in rule else None,
    }  # fmt: skip
    check("LinearAttention", inputs, opset=27, outputs=2, q_num_heads=4, kv_num_heads=2, update_rule=rule, orders=1, tolerance=1e-5,
          keep=[("decay", 2), ("beta", 2), ("q", 2), ("k", 2), ("v", 2)])  # fmt: skip


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("past", [True, False])
def test_causal_convolution_agrees_with_differences(activation: str, past: bool) -> None:
    inputs = {"x": normal(2, 3, 5), "w": normal(3, 1, 4), "b": normal(3), "past": normal(2, 3, 3) if past else None}
    check("CausalConvWithState", inputs, opset=27, outputs=2, activation=activation, orders=1, tolerance=1e-5)
