"""Convolutions, poolings, resampling, regions and transforms: derivatives in every form, and what PyTorch and onnxruntime give."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from lowered import check, gradients, model_of, run, text_model
from numerics import check_pullback
from pullback.algebra.errors import Refusal
from pullback.algebra.evaluate import evaluate
from pullback.frontends.onnx_import import load

RNG = np.random.default_rng(0)
TORCH = "torch is not installed (pip install pullback[torch])"


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def distinct(*shape: int) -> np.ndarray:
    """Numbers that lie apart, so that differences meet no tie."""
    return RNG.permutation(int(np.prod(shape))).reshape(shape) * 0.1


def channels(*names: str) -> list[tuple[str, int]]:
    """Axes that a grouped convolution decides by."""
    return [(n, a) for n in names for a in (0, 1)]


# ---- convolution -------------------------------------------------------------------------------------------------------------------------

CONV: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 2, 6), (3, 2, 3), {}),
    ((2, 2, 7), (3, 2, 3), {"pads": [2, 0], "strides": [2], "dilations": [2]}),
    ((2, 2, 5, 4), (3, 2, 2, 3), {"pads": [0, 1, 2, 1]}),
    ((2, 2, 5, 6), (3, 2, 3, 2), {"strides": [2, 3], "pads": [1, 1, 0, 2]}),
    ((1, 4, 5, 4), (6, 2, 3, 2), {"group": 2, "pads": [1, 0, 1, 1]}),
    ((1, 3, 4, 4), (6, 1, 2, 2), {"group": 3, "strides": [2, 1]}),
    ((1, 2, 3, 4, 3), (2, 2, 2, 3, 2), {"pads": [1, 1, 0, 0, 1, 1]}),
    ((1, 2, 4, 3, 3), (2, 1, 2, 2, 2), {"group": 2, "strides": [2, 1, 1]}),
]


@pytest.mark.parametrize(("x", "w", "attributes"), CONV)
@pytest.mark.parametrize("bias", [True, False])
def test_conv_agrees_with_differences(
    x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any], bias: bool
) -> None:
    inputs = {"x": normal(*x), "w": normal(*w), "b": normal(w[0]) if bias else None}
    keep = channels("x", "w") if "group" in attributes else []
    check("Conv", inputs, tolerance=1e-6, keep=[*keep, *(("w", a) for a in range(2, len(w)))], **attributes)


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize(
    ("size", "stride", "kernel", "dilation"), list(itertools.product((5, 6), (1, 2, 3), (1, 2, 3), (1, 2)))
)
def test_conv_with_auto_pad_agrees_with_differences_and_its_sizes(
    mode: str, size: int, stride: int, kernel: int, dilation: int
) -> None:
    inputs = {"x": normal(1, 2, size), "w": normal(2, 2, kernel)}
    options: dict[str, Any] = {"auto_pad": mode, "strides": [stride], "dilations": [dilation]}
    check("Conv", inputs, orders=1, tolerance=1e-6, keep=[("w", 2)], **options)
    reach = (kernel - 1) * dilation + 1
    expected = -(-size // stride) if mode != "VALID" else (size - reach) // stride + 1
    assert run("Conv", inputs, **options).shape[2] == expected


def test_sizes_after_strided_layers_with_auto_pad_and_with_pads_are_equal() -> None:
    x, w = normal(1, 2, 8), normal(2, 2, 3)
    one = load(model_of("Conv", {"x": x, "w": w}, symbols=True, keep=[("w", 2)], auto_pad="SAME_UPPER", strides=[2]))
    other = load(model_of("Conv", {"x": x, "w": w}, symbols=True, keep=[("w", 2)], pads=[1, 1], strides=[2]))
    assert one["y"].shape[2] == other["y"].shape[2]


TRANSPOSED: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((1, 2, 4, 4), (2, 3, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
    ((1, 2, 4, 4), (2, 2, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1], "group": 2}),
    ((2, 2, 4), (2, 3, 3), {}),
    ((2, 2, 4), (2, 3, 3), {"strides": [3], "dilations": [2], "pads": [2, 0]}),
    ((1, 4, 3, 2), (4, 2, 2, 3), {"group": 2, "strides": [1, 2], "pads": [1, 0, 0, 1]}),
    ((1, 2, 2, 3, 2), (2, 2, 2, 2, 3), {"strides": [2, 1, 2], "pads": [0, 1, 1, 0, 0, 1]}),
    ((1, 2, 3), (2, 2, 2), {"strides": [3], "output_padding": [2]}),
    ((1, 2, 3), (2, 2, 3), {"strides": [1], "dilations": [3], "output_padding": [2]}),
    ((1, 2, 3, 3), (2, 2, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ((1, 2, 3, 3), (2, 2, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    ((1, 2, 3, 3), (2, 2, 3, 3), {"strides": [3, 2], "output_shape": [10, 8]}),
]


@pytest.mark.parametrize(("x", "w", "attributes"), TRANSPOSED)
def test_conv_transpose_agrees_with_differences(
    x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any]
) -> None:
    inputs = {"x": normal(*x), "w": normal(*w), "b": normal(w[1] * attributes.get("group", 1))}
    keep = [*channels("x", "w"), ("b", 0), *(("w", a) for a in range(2, len(w)))]
    if "output_shape" in attributes:
        keep += [("x", a) for a in range(2, len(x))]
    check("ConvTranspose", inputs, tolerance=1e-6, keep=keep, **attributes)


@pytest.mark.parametrize("case", range(8))
def test_conv_transpose_is_that_of_pytorch(case: int) -> None:
    torch = pytest.importorskip("torch", reason=TORCH)
    x_shape, w_shape, attributes = TRANSPOSED[case]
    n = len(x_shape) - 2
    pads = attributes.get("pads", [0] * 2 * n)
    x, w = normal(*x_shape), normal(*w_shape)
    options = {"strides": "stride", "output_padding": "output_padding", "dilations": "dilation", "group": "groups"}
    given = {theirs: attributes[ours] for ours, theirs in options.items() if ours in attributes}
    y = getattr(torch.nn.functional, f"conv_transpose{n}d")(torch.tensor(x), torch.tensor(w), **given).numpy()
    cut = tuple(slice(pads[i], y.shape[2 + i] - pads[n + i]) for i in range(n))
    np.testing.assert_allclose(
        run("ConvTranspose", {"x": x, "w": w}, **attributes), y[(..., *cut)], rtol=1e-9, atol=1e-12
    )


def test_the_input_gradient_of_a_transposed_convolution_is_a_convolution() -> None:
    for group, w_shape in ((1, (2, 3, 3, 3)), (2, (2, 2, 3, 3))):
        x, w = normal(1, 2, 4, 4), normal(*w_shape)
        options: dict[str, Any] = {"strides": [2, 2], "pads": [1, 1, 1, 1], "group": group}
        graph = load(model_of("ConvTranspose", {"x": x, "w": w}, output_padding=[1, 1], **options))
        ct = normal(*(int(d) for d in graph["y"].shape))
        assert ct.shape == (1, w_shape[1] * group, 8, 8)
        found = gradients(graph, {"x": x, "w": w}, seeds={"y": ct})["x"]
        np.testing.assert_allclose(found, run("Conv", {"x": ct, "w": w}, **options), rtol=1e-9)


def test_a_convolution_that_does_not_fit_is_refused_with_its_reason() -> None:
    with pytest.raises(Refusal, match=r"node 'node' \(Conv.*group 2 divides"):
        load(model_of("Conv", {"x": normal(1, 3, 5), "w": normal(2, 1, 3)}, group=2))
    with pytest.raises(Refusal, match="input channels are those of a group"):
        load(model_of("Conv", {"x": normal(1, 3, 5), "w": normal(2, 2, 3)}))
    with pytest.raises(Refusal, match="SAME"):
        load(model_of("Conv", {"x": normal(1, 2, 5), "w": normal(2, 2, 3)}, auto_pad="SAME"))


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("offset_group", [1, 2])
@pytest.mark.parametrize("mask", [True, False])
def test_deformable_convolution_agrees_with_differences(group: int, offset_group: int, mask: bool) -> None:
    inputs = {
        "x": normal(2, 4, 4, 4), "w": normal(2, 4 // group, 2, 2), "offset": RNG.uniform(0.1, 0.4, (2, offset_group * 8, 3, 3)),
        "b": normal(2), "mask": normal(2, offset_group * 4, 3, 3) if mask else None,
    }  # fmt: skip
    keep = [*channels("x", "w"), ("w", 2), ("w", 3), ("offset", 1), ("mask", 1)]
    check("DeformConv", inputs, group=group, offset_group=offset_group, orders=1, tolerance=1e-6, keep=keep)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_deformable_convolution_without_offsets_is_a_convolution(n: int) -> None:
    x, w = normal(2, 3, *(5,) * n), normal(4, 3, *(2,) * n)
    options: dict[str, Any] = {"pads": [1] * 2 * n, "strides": [2] * n, "dilations": [2] * n}
    y = run("Conv", {"x": x, "w": w}, **options)
    found = run("DeformConv", {"x": x, "w": w, "offset": np.zeros((2, 2**n * n, *y.shape[2:]))}, **options)
    np.testing.assert_allclose(found, y, rtol=1e-9, atol=1e-12)


# ---- pooling -----------------------------------------------------------------------------------------------------------------------------

POOL: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 2, 7), {"kernel_shape": [3]}),
    ((2, 2, 7), {"kernel_shape": [3], "strides": [2], "pads": [0, 2], "dilations": [2]}),
    ((1, 2, 5, 6), {"kernel_shape": [2, 3], "strides": [2, 2], "pads": [1, 0, 0, 2]}),
    ((1, 2, 5, 6), {"kernel_shape": [3, 2], "strides": [2, 3], "ceil_mode": 1}),
    ((1, 1, 4, 4), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1, "pads": [1, 1, 1, 1]}),
    ((1, 1, 5), {"kernel_shape": [1], "strides": [3], "ceil_mode": 1, "pads": [0, 0]}),
    ((1, 1, 2, 2), {"kernel_shape": [1, 1], "strides": [2, 2], "ceil_mode": 1}),
    ((1, 2, 5, 6), {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ((1, 2, 5, 6), {"kernel_shape": [2, 2], "strides": [1, 2], "auto_pad": "SAME_LOWER"}),
    ((1, 2, 5, 6), {"kernel_shape": [2, 2], "auto_pad": "VALID"}),
    ((1, 1, 3, 4, 3), {"kernel_shape": [2, 2, 2], "strides": [1, 2, 1], "pads": [1, 0, 0, 0, 1, 1]}),
]


@pytest.mark.parametrize(("shape", "attributes"), POOL)
def test_max_pool_agrees_with_differences(shape: tuple[int, ...], attributes: dict[str, Any]) -> None:
    check("MaxPool", {"x": distinct(*shape)}, orders=1, **attributes)


@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize(("shape", "attributes"), POOL)
def test_average_pool_agrees_with_differences(shape: tuple[int, ...], attributes: dict[str, Any], include: int) -> None:
    check("AveragePool", {"x": normal(*shape)}, orders=1, count_include_pad=include, **attributes)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize(("shape", "attributes"), POOL[:3])
def test_lp_pool_agrees_with_differences(shape: tuple[int, ...], attributes: dict[str, Any], order: int) -> None:
    check("LpPool", {"x": normal(*shape) + 3}, p=order, tolerance=1e-5, **attributes)


@pytest.mark.parametrize("op", ["GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"])
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 2, 3), (1, 2, 2, 2, 2)])
def test_global_pools_agree_with_differences(op: str, shape: tuple[int, ...]) -> None:
    check(op, {"x": distinct(*shape) + 0.1}, orders=1, tolerance=1e-6)


def test_norm_pools_of_zeros_have_a_finite_gradient() -> None:
    x = np.zeros((1, 1, 4))
    for op, attributes in (
        ("LpPool", {"kernel_shape": [2]}),
        ("LpPool", {"kernel_shape": [2], "p": 3}),
        ("GlobalLpPool", {}),
    ):
        graph = load(model_of(op, {"x": x}, **attributes))
        assert np.isfinite(gradients(graph, {"x": x})["x"]).all()


def pooled_by_torch(torch: Any, x: Any, attributes: dict[str, Any]) -> Any:
    return torch.nn.functional.max_pool2d(
        x, attributes["kernel_shape"], attributes.get("strides", 1), attributes.get("pads", [0, 0])[:2],
        attributes.get("dilations", 1), bool(attributes.get("ceil_mode")), True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        {"kernel_shape": [3, 2], "strides": [2, 1], "ceil_mode": 1},
        {"kernel_shape": [2, 2], "strides": [1, 1], "dilations": [2, 2]},
    ],
)
def test_max_pool_takes_the_first_of_ties_as_pytorch_does(attributes: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason=TORCH)
    x = RNG.integers(0, 3, (2, 2, 5, 5)).astype(np.float64)
    t = torch.tensor(x, requires_grad=True)
    y, indices = pooled_by_torch(torch, t, attributes)
    y.sum().backward()
    found_y, found_indices = run("MaxPool", {"x": x}, outputs=2, **attributes)
    np.testing.assert_array_equal(found_y, y.detach().numpy())
    start = (np.arange(4) * 25).reshape(2, 2, 1, 1)
    np.testing.assert_array_equal(found_indices - start, indices.numpy())
    graph = load(model_of("MaxPool", {"x": x}, **attributes))
    np.testing.assert_array_equal(gradients(graph, {"x": x})["x"], t.grad.numpy())


def test_indices_in_column_order_count_rows_first() -> None:
    x = np.arange(24.0).reshape(1, 2, 3, 4)
    _, rows = run("MaxPool", {"x": x}, outputs=2, kernel_shape=[2, 2])
    _, columns = run("MaxPool", {"x": x}, outputs=2, kernel_shape=[2, 2], storage_order=1)
    c, h, w = rows // 12, rows % 12 // 4, rows % 4
    np.testing.assert_array_equal(columns, c * 12 + w * 3 + h)


def test_max_pool_of_bytes_is_one_of_bytes() -> None:
    x = np.array([[[-3, -5, -128, -1]]], np.int8)
    assert run("MaxPool", {"x": x}, opset=12, kernel_shape=[2], pads=[1, 1]).tolist() == [[[-3, -3, -5, -1, -1]]]


def test_max_unpool_undoes_max_pool_and_the_last_of_equal_places_stays() -> None:
    x = distinct(2, 2, 4, 4)
    y, indices = run("MaxPool", {"x": x}, outputs=2, kernel_shape=[2, 2], strides=[2, 2])
    back = run("MaxUnpool", {"x": y, "i": indices}, kernel_shape=[2, 2], strides=[2, 2])
    np.testing.assert_array_equal(back, np.where(np.isin(np.arange(64).reshape(x.shape), indices), x, 0))
    check("MaxUnpool", {"x": y, "i": indices}, kernel_shape=[2, 2], strides=[2, 2], orders=1)
    places = np.array([[[1, 1, 3]]])
    assert run(
        "MaxUnpool", {"x": np.array([[[5.0, 6.0, 7.0]]]), "i": places}, kernel_shape=[1], strides=[2]
    ).tolist() == [[[0, 6, 0, 7, 0]]]


def by_onnxruntime(model: Any, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    return list(
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    )


@pytest.mark.parametrize(("op", "include"), [("MaxPool", 0), ("AveragePool", 0), ("AveragePool", 1), ("LpPool", 0)])
@pytest.mark.parametrize("ceil_mode", [0, 1])
@pytest.mark.parametrize("dilation", [1, 2])
def test_poolings_are_those_of_onnxruntime(op: str, include: int, ceil_mode: int, dilation: int) -> None:
    for kernel, stride, pads, size in itertools.product((2, 3), (1, 2, 3), ((0, 0), (1, 0), (0, 1), (1, 1)), (5, 6, 7)):
        x = normal(1, 1, size, 3).astype(np.float32)
        options: dict[str, Any] = {"count_include_pad": include} if op == "AveragePool" else {}
        model = model_of(
            op, {"x": x}, opset=22 if op != "LpPool" else 18, kernel_shape=[kernel, 2], strides=[stride, 1], dilations=[dilation, 1],
            pads=[pads[0], 0, pads[1], 0], ceil_mode=ceil_mode, **options,
        )  # fmt: skip
        np.testing.assert_allclose(
            evaluate(load(model), {"x": x})["y"], by_onnxruntime(model, {"x": x})[0], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("auto_pad", ["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])
def test_transposed_convolutions_to_a_given_shape_are_those_of_onnxruntime(auto_pad: str) -> None:
    for kernel, stride, shape in itertools.product((2, 3), (2, 3), (7, 8, 9)):
        if (2 * stride + kernel - shape) < 0:
            continue  # onnxruntime refuses some shapes that are larger than what the windows cover
        feeds = {"x": normal(1, 2, 3).astype(np.float32), "w": normal(2, 1, kernel).astype(np.float32)}
        model = model_of("ConvTranspose", feeds, opset=22, strides=[stride], output_shape=[shape], auto_pad=auto_pad)
        np.testing.assert_allclose(
            evaluate(load(model), feeds)["y"], by_onnxruntime(model, feeds)[0], rtol=1e-5, atol=1e-6
        )


# ---- resampling --------------------------------------------------------------------------------------------------------------------------

COORDINATES = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric"]


def resize(x: np.ndarray, scales: list[float] | None = None, sizes: list[int] | None = None) -> dict[str, Any]:
    return {
        "x": x, "roi": None, "scales": None if scales is None else np.array(scales, np.float32),
        "sizes": None if sizes is None else np.array(sizes, np.int64),
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("scales", [[1, 1, 2, 2], [1, 1, 0.5, 1.5], [1, 1, 0.6, 3]])
def test_resize_by_scales_agrees_with_differences(mode: str, coordinates: str, scales: list[float]) -> None:
    check("Resize", resize(normal(1, 2, 4, 6), scales), fixed=["scales"], mode=mode, coordinate_transformation_mode=coordinates, orders=1,
          tolerance=1e-6)  # fmt: skip


@pytest.mark.parametrize("opset", [11, 12])
@pytest.mark.parametrize(
    ("mode", "nearest"),
    [("nearest", "floor"), ("nearest", "round_prefer_ceil"), ("linear", "floor"), ("cubic", "floor")],
)
@pytest.mark.parametrize("scales", [[1, 1, 2, 2], [1, 1, 0.5, 1.5], [1, 1, 0.6, 3]])
def test_resize_from_edges_as_older_opsets_have_it_agrees_with_onnxruntime(
    mode: str, nearest: str, scales: list[float], opset: int
) -> None:
    inputs = resize(normal(1, 2, 4, 6).astype(np.float32), scales) | {"roi": np.zeros(0, np.float32)}
    options: dict[str, Any] = {
        "mode": mode,
        "nearest_mode": nearest,
        "coordinate_transformation_mode": "tf_half_pixel_for_nn",
        "opset": opset,
    }
    model = model_of("Resize", inputs, fixed=["roi", "scales"], **options)
    np.testing.assert_allclose(
        evaluate(load(model), {"x": inputs["x"]})["y"],
        by_onnxruntime(model, {"x": inputs["x"]})[0],
        rtol=1e-5,
        atol=1e-5,
    )
    check("Resize", inputs | {"x": normal(1, 2, 4, 6)}, fixed=["roi", "scales"], orders=1, tolerance=1e-6, **options)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("sizes", [[1, 2, 8, 3], [1, 2, 5, 1]])
def test_resize_to_sizes_agrees_with_differences(mode: str, coordinates: str, sizes: list[int]) -> None:
    check("Resize", resize(normal(1, 2, 4, 6), sizes=sizes), fixed=["sizes"], mode=mode, coordinate_transformation_mode=coordinates, orders=1,
          tolerance=1e-6, keep=[("x", 1)])  # fmt: skip


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize(
    "options",
    [{"antialias": 1}, {"exclude_outside": 1}, {"antialias": 1, "exclude_outside": 1}, {"cubic_coeff_a": -0.5}],
)
def test_resize_with_its_options_agrees_with_differences(mode: str, options: dict[str, Any]) -> None:
    check(
        "Resize",
        resize(normal(1, 1, 6, 5), [1, 1, 0.4, 0.7]),
        fixed=["scales"],
        mode=mode,
        orders=1,
        tolerance=1e-6,
        **options,
    )


def test_resize_of_a_crop_agrees_with_differences_where_it_leaves_the_tensor_too() -> None:
    inputs = resize(normal(1, 1, 4, 5), sizes=[1, 1, 3, 4])
    inputs["roi"] = np.array([0, 0, 0.1, -0.2, 1, 1, 0.9, 1.3])
    check("Resize", inputs, fixed=["sizes", "roi"], mode="linear", coordinate_transformation_mode="tf_crop_and_resize",
          extrapolation_value=7.0, orders=1, tolerance=1e-6)  # fmt: skip
    assert (run("Resize", inputs, fixed=["sizes", "roi"], mode="linear", coordinate_transformation_mode="tf_crop_and_resize",
                extrapolation_value=7.0)[..., 0] == 7).all()  # fmt: skip


@pytest.mark.parametrize(
    "op", ["bilinear", "bicubic", "nearest", "nearest-exact", "bilinear antialias", "bilinear corners"]
)
@pytest.mark.parametrize("sizes", [(8, 10), (3, 4), (6, 3)])
def test_resize_is_interpolation_of_pytorch(op: str, sizes: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch", reason=TORCH)
    x = normal(1, 2, 4, 5)
    kind, _, option = op.partition(" ")
    theirs = {"align_corners": True} if option == "corners" else {"antialias": True} if option else {}
    t = torch.tensor(x, requires_grad=True)
    y = torch.nn.functional.interpolate(t, sizes, mode=kind, **theirs)
    y.sum().backward()
    ours: dict[str, Any] = {"mode": {"bilinear": "linear", "bicubic": "cubic"}.get(kind, "nearest")}
    if kind == "nearest":
        ours |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    elif kind == "nearest-exact":
        ours |= {"nearest_mode": "round_prefer_ceil"}
    elif option == "corners":
        ours |= {"coordinate_transformation_mode": "align_corners"}
    elif option:
        ours |= {"antialias": 1, "exclude_outside": 1}
    graph = load(model_of("Resize", resize(x, sizes=[1, 2, *sizes]), fixed=["sizes"], **ours))
    np.testing.assert_allclose(evaluate(graph, {"x": x})["y"], y.detach().numpy(), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(gradients(graph, {"x": x})["x"], t.grad.numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("coordinates", ["half_pixel", "pytorch_half_pixel", "asymmetric"])
def test_resize_by_scales_is_that_of_onnxruntime(mode: str, coordinates: str) -> None:
    rounding = (
        ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"] if mode == "nearest" else ["round_prefer_floor"]
    )
    all_scales: list[list[float]] = [[2, 2], [0.5, 0.5], [1.5, 2.5], [0.6, 0.7], [0.3, 3], [1 / 3, 1.2]]
    for scales, nearest in itertools.product(all_scales, rounding):
        inputs = resize(normal(1, 1, 5, 6).astype(np.float32), [1, 1, *scales])
        model = model_of(
            "Resize",
            inputs,
            fixed=["scales"],
            opset=19,
            mode=mode,
            coordinate_transformation_mode=coordinates,
            nearest_mode=nearest,
        )
        feeds = {"x": inputs["x"]}
        np.testing.assert_allclose(
            evaluate(load(model), feeds)["y"], by_onnxruntime(model, feeds)[0], rtol=1e-4, atol=1e-5
        )


def test_resize_to_the_size_of_another_tensor_keeps_its_symbols() -> None:
    model = text_model(
        """model (float[1, 2, H, W] x) => (float[1, 2, I, J] y) <int64[1] two = {2}, int64[1] start = {2}, int64[1] end = {4}, int64[2] lead = {1, 2}> {
             shape = Shape(x)
             part = Slice(shape, start, end)
             more = Mul(part, two)
             sizes = Concat<axis = 0>(lead, more)
             y = Resize<mode = "nearest">(x, , , sizes)
           }""",
        opset=13,
    )
    graph = load(model)
    assert graph["y"].shape[2:] == tuple(2 * d for d in graph["x"].shape[2:])
    x = normal(1, 2, 3, 4)
    np.testing.assert_array_equal(evaluate(graph, {"x": x})["y"], x.astype(np.float32).repeat(2, 2).repeat(2, 3))
    assert "gather" not in {v.primitive.name for v in graph.nodes}


def test_growing_by_whole_factors_repeats_and_gathers_nothing() -> None:
    model = model_of("Resize", resize(normal(1, 2, 4, 5), [1, 1, 2, 3]), fixed=["scales"], symbols=True)
    graph = load(model)
    assert {v.primitive.name for v in graph.nodes} <= {"input", "broadcast", "reshape"}
    x = graph["x"]
    assert graph["y"].shape[2:] == (2 * x.shape[2], 3 * x.shape[3])


@pytest.mark.parametrize(("op", "opset"), [("Upsample", 7), ("Upsample", 9), ("Resize", 10)])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("scales", [[1.0, 1.0, 2.0, 3.0], [1.0, 1.0, 1.5, 2.5], [1.0, 1.0, 0.6, 0.5]])
def test_older_resizing_is_that_of_onnxruntime(op: str, opset: int, mode: str, scales: list[float]) -> None:
    if op == "Upsample":
        scales = [max(s, 1.0) for s in scales]
    x = normal(1, 2, 4, 6).astype(np.float32)
    if opset == 7:
        model = model_of(op, {"x": x}, opset=opset, mode=mode, scales=scales)
    else:
        model = model_of(op, {"x": x, "scales": np.array(scales, np.float32)}, opset=opset, fixed=["scales"], mode=mode)
    found = evaluate(load(model), {"x": x})["y"]
    np.testing.assert_allclose(found, by_onnxruntime(model, {"x": x})[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align", [0, 1])
def test_grid_sample_is_that_of_pytorch_in_its_gradients_too(mode: str, padding: str, align: int) -> None:
    torch = pytest.importorskip("torch", reason=TORCH)
    x, grid = normal(2, 3, 4, 5), RNG.uniform(-1.9, 1.9, (2, 3, 4, 2))
    t, g = torch.tensor(x, requires_grad=True), torch.tensor(grid, requires_grad=True)
    theirs = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    y = torch.nn.functional.grid_sample(t, g, mode=theirs, padding_mode=padding, align_corners=bool(align))
    weights = normal(*y.shape)
    (y * torch.tensor(weights)).sum().backward()
    options: dict[str, Any] = {"mode": mode, "padding_mode": padding, "align_corners": align}
    graph = load(model_of("GridSample", {"x": x, "grid": grid}, **options))
    np.testing.assert_allclose(evaluate(graph, {"x": x, "grid": grid})["y"], y.detach().numpy(), rtol=1e-8, atol=1e-10)
    found = gradients(graph, {"x": x, "grid": grid}, seeds={"y": weights})
    np.testing.assert_allclose(found["x"], t.grad.numpy(), rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(found.get("grid", np.zeros_like(grid)), g.grad.numpy(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample_in_three_dimensions_agrees_with_differences(mode: str, padding: str) -> None:
    inputs = {"x": normal(1, 2, 3, 2, 4), "grid": RNG.uniform(-0.9, 0.9, (1, 2, 2, 2, 3))}
    check(
        "GridSample", inputs, mode=mode, padding_mode=padding, orders=1, step=1e-5, tolerance=1e-5, keep=[("grid", 4)]
    )


@pytest.mark.parametrize("size", [(2, 3, 4, 5), (1, 2, 2, 3, 4)])
@pytest.mark.parametrize("align", [0, 1])
def test_affine_grid_is_that_of_pytorch(size: tuple[int, ...], align: int) -> None:
    torch = pytest.importorskip("torch", reason=TORCH)
    r = len(size) - 2
    theta = normal(size[0], r, r + 1)
    expected = torch.nn.functional.affine_grid(torch.tensor(theta), list(size), align_corners=bool(align)).numpy()
    inputs = {"theta": theta, "size": np.array(size)}
    np.testing.assert_allclose(
        run("AffineGrid", inputs, fixed=["size"], align_corners=align), expected, rtol=1e-9, atol=1e-12
    )
    check("AffineGrid", inputs, fixed=["size"], align_corners=align, orders=1, keep=[("theta", a) for a in range(3)])


# ---- regions -----------------------------------------------------------------------------------------------------------------------------

ROIS = np.array([[0.61, 0.93, 5.32, 6.27], [1.23, 1.12, 3.46, 2.77], [-1.54, 2.23, 9.19, 4.48]])


@pytest.mark.parametrize(("ratio", "mode"), [(0, "avg"), (2, "avg"), (2, "max")])
@pytest.mark.parametrize("coordinates", ["half_pixel", "output_half_pixel"])
def test_roi_align_agrees_with_differences(ratio: int, mode: str, coordinates: str) -> None:
    inputs = {"x": normal(2, 2, 6, 7), "rois": ROIS, "batch": np.array([0, 1, 1])}
    options: dict[str, Any] = {
        "output_height": 2, "output_width": 3, "sampling_ratio": ratio, "mode": mode, "coordinate_transformation_mode": coordinates,
    }  # fmt: skip
    check("RoiAlign", inputs, orders=1, step=1e-4, tolerance=1e-5, keep=[("rois", 1)], **options)


def test_roi_align_with_as_many_points_as_a_region_needs_is_that_of_onnxruntime() -> None:
    rois = np.concatenate([ROIS, np.array([[-40, -30, 60, 50], [3, 3, 3.5, 3.4]])]).astype(np.float32)
    feeds = {"x": normal(2, 2, 6, 7).astype(np.float32), "rois": rois, "batch": np.array([0, 1, 1, 0, 1])}
    for coordinates in ("half_pixel", "output_half_pixel"):
        model = model_of(
            "RoiAlign", feeds, opset=16, output_height=2, output_width=3, coordinate_transformation_mode=coordinates
        )
        np.testing.assert_allclose(
            evaluate(load(model), feeds)["y"], by_onnxruntime(model, feeds)[0], rtol=1e-4, atol=1e-5
        )


def test_roi_align_that_compares_a_number_of_points_from_data_is_refused() -> None:
    with pytest.raises(Refusal, match="depends on data; give a ratio"):
        load(model_of("RoiAlign", {"x": normal(1, 1, 4, 4), "rois": ROIS, "batch": np.array([0, 0, 0])}, mode="max"))


def test_max_roi_pool_agrees_with_differences() -> None:
    feeds = {"x": distinct(2, 2, 6, 7), "rois": np.array([[0, 0.0, 1.0, 4.2, 5.0], [1, 2.6, 0.4, 6.0, 3.0]])}
    for symbols in (False, True):
        graph = load(model_of("MaxRoiPool", feeds, symbols=symbols, keep=[("rois", 1)], pooled_shape=[2, 3]))
        check_pullback(graph, feeds, ("x",), np.random.default_rng(1), orders=1)


# ---- transforms --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "inverse", "onesided"), [(1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 1, 0), (1, 1, 0), (2, 1, 1)]
)
@pytest.mark.parametrize("length", [None, 4, 7])
@pytest.mark.parametrize("axis", [1, -2, 0])
def test_dft_agrees_with_differences_and_numpy(
    parts: int, inverse: int, onesided: int, length: int | None, axis: int
) -> None:
    x = normal(5, 6, 3, parts)
    inputs = {"x": x, "length": None if length is None else np.array(length), "axis": np.array(axis)}
    fixed = [n for n in ("length", "axis") if inputs[n] is not None]
    signal = x[..., 0] if parts == 1 else x[..., 0] + 1j * x[..., 1]
    at = axis if axis >= 0 else axis + 4
    if onesided and inverse:
        expected = np.fft.irfft(signal, length, at)[..., None]
    else:
        spectrum = (np.fft.ifft if inverse else np.fft.rfft if onesided else np.fft.fft)(signal, length, at)
        expected = np.stack([spectrum.real, spectrum.imag], -1)
    np.testing.assert_allclose(
        run("DFT", inputs, fixed=fixed, inverse=inverse, onesided=onesided), expected, atol=1e-12
    )
    check("DFT", inputs, fixed=fixed, inverse=inverse, onesided=onesided, orders=1, tolerance=1e-6, keep=[("x", 3)])


@pytest.mark.parametrize(("parts", "onesided"), [(1, 1), (1, 0), (2, 0)])
@pytest.mark.parametrize("window", [True, False])
def test_stft_agrees_with_differences(parts: int, onesided: int, window: bool) -> None:
    inputs = {
        "x": normal(2, 11, parts), "step": np.array(3), "window": normal(4) if window else None, "length": None if window else np.array(4),
    }  # fmt: skip
    check(
        "STFT",
        inputs,
        opset=17,
        fixed=["step", "length"],
        onesided=onesided,
        orders=1,
        tolerance=1e-6,
        keep=[("x", 2), ("window", 0)],
    )


def test_affine_grid_of_a_single_element_is_its_centre() -> None:
    theta = np.array([[[1.0, 0, 0], [0, 1, 0]]])
    for align in (0, 1):
        assert run(
            "AffineGrid", {"theta": theta, "size": np.array([1, 1, 1, 1])}, fixed=["size"], align_corners=align
        ).tolist() == [[[[0, 0]]]]


@pytest.mark.parametrize(("op", "name"), [("HannWindow", "hann_window"), ("BlackmanWindow", "blackman_window")])
@pytest.mark.parametrize("periodic", [0, 1])
def test_windows_are_those_of_pytorch(op: str, name: str, periodic: int) -> None:
    torch = pytest.importorskip("torch", reason=TORCH)
    found = run(op, {"size": np.array(10)}, opset=17, fixed=["size"], periodic=periodic, output_datatype=11)
    np.testing.assert_allclose(
        found, getattr(torch, name)(10, periodic=bool(periodic), dtype=torch.float64).numpy(), atol=1e-12
    )


# ---- nothing at all ----------------------------------------------------------------------------------------------------------------------

EMPTY: list[tuple[str, dict[str, np.ndarray | None], dict[str, Any]]] = [
    ("Conv", {"x": normal(0, 2, 5, 5), "w": normal(3, 2, 3, 3)}, {}),
    ("Conv", {"x": normal(0, 2, 5, 5), "w": normal(2, 1, 3, 3)}, {"group": 2}),
    ("ConvTranspose", {"x": normal(0, 2, 5, 5), "w": normal(2, 3, 3, 3)}, {}),
    ("DeformConv", {"x": normal(0, 2, 4, 4), "w": normal(2, 2, 2, 2), "offset": normal(0, 8, 3, 3)}, {}),
    ("MaxPool", {"x": normal(0, 2, 5, 5)}, {"kernel_shape": [2, 2]}),
    ("AveragePool", {"x": normal(0, 2, 5, 5)}, {"kernel_shape": [2, 2], "pads": [1, 1, 1, 1]}),
    ("MaxUnpool", {"x": normal(0, 1, 2), "i": np.zeros((0, 1, 2), np.int64)}, {"kernel_shape": [2], "strides": [2]}),
    ("GlobalMaxPool", {"x": normal(0, 2, 5)}, {}),
    (
        "Resize",
        {"x": normal(0, 2, 4), "roi": None, "scales": np.array([1, 1, 1.5], np.float32)},
        {"fixed": ["scales"], "mode": "linear"},
    ),
    ("GridSample", {"x": normal(0, 2, 4, 4), "grid": normal(0, 3, 3, 2)}, {}),
    ("RoiAlign", {"x": normal(1, 2, 4, 4), "rois": normal(0, 4), "batch": np.zeros(0, np.int64)}, {}),
    ("LayerNormalization", {"x": normal(0, 3), "scale": normal(3)}, {}),
    ("Softmax", {"x": normal(3, 0)}, {}),
    ("Attention", {"q": normal(0, 2, 3, 4), "k": normal(0, 2, 5, 4), "v": normal(0, 2, 5, 4)}, {}),
    ("DFT", {"x": normal(0, 4, 1)}, {}),
]


@pytest.mark.parametrize(("op", "inputs", "attributes"), EMPTY, ids=lambda v: v if isinstance(v, str) else "")
def test_of_no_samples_there_is_no_result_and_a_gradient_without_nan(
    op: str, inputs: dict[str, Any], attributes: dict[str, Any]
) -> None:
    feeds = {n: a for n, a in inputs.items() if a is not None and n not in attributes.get("fixed", ())}
    graph = load(model_of(op, inputs, **attributes))
    assert evaluate(graph, feeds)["y"].size == 0
    for name, gradient in gradients(graph, feeds).items():
        np.testing.assert_array_equal(gradient, np.zeros_like(feeds[name]))
