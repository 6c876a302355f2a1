"""The native profile: the right ONNX operators are raised, and what they compute is what the explicit profile computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from pullback.algebra import composites as c
from pullback.algebra import primitives as p
from pullback.algebra.calculus.vjp import vjp
from pullback.algebra.dims import Dim, dim
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Graph, Value, building
from pullback.algebra.passes import default
from pullback.algebra.types import TensorType, f32, f64, i64, tensor
from pullback.backends.onnx_export import native as native_profile
from pullback.backends.onnx_export import to_onnx
from pullback.backends.onnx_export.native import raise_operators

N = dim("N")


def with_gradients(f: Callable[..., Value], **types: TensorType) -> Graph:
    """`f` of its inputs, and the cotangents of those that are floating, for a cotangent from outside."""
    with building():
        inputs = [p.input(name, t) for name, t in types.items()]
        y = f(*inputs)
        ct = p.input("ct", y.type)
        wanted = [v for v in inputs if v.dtype.floating]
        cts = vjp([y], [ct], wanted)
    outputs = {"y": y} | {f"grad_{v.params['name']}": ct for v, ct in zip(wanted, cts, strict=True) if ct is not None}
    return Graph((*inputs, ct), outputs)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = {i.name for i in session.get_inputs()}
    return dict(
        zip(
            (o.name for o in session.get_outputs()),
            session.run(None, {k: v for k, v in feeds.items() if k in names}),
            strict=True,
        )
    )


def draw(g: Graph, batch: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    feeds = {}
    for v in g.inputs:
        shape = [d if isinstance(d, int) else int(d.subs(dict.fromkeys(d.free_symbols, batch))) for d in v.shape]
        drawn = rng.standard_normal(shape) if v.dtype.floating else rng.integers(0, 3, shape)
        feeds[v.params["name"]] = np.asarray(drawn).astype(v.dtype.numpy)
    return feeds


def compare(g: Graph, batch: int = 3, tolerance: float = 2e-4) -> Counter[str]:
    """The operators of the native model, after its outputs were compared with the explicit one's."""
    native = to_onnx(g, profile="native")
    assert {o.domain for o in native.opset_import} == {""}
    feeds = draw(g, batch)
    explicit, found = run(to_onnx(default(g)), feeds), run(native, feeds)
    assert explicit.keys() == found.keys()
    for name, wanted in explicit.items():
        assert found[name].shape == wanted.shape
        scale = max(1.0, float(np.abs(wanted).max(initial=0)))
        np.testing.assert_allclose(found[name], wanted, rtol=tolerance, atol=tolerance * scale, err_msg=name)
    return Counter(n.op_type for n in native.graph.node)


# ---- convolution ------------------------------------------------------------------------------------------------------------------------


def convolution(
    kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], low: Sequence[int], high: Sequence[int], group: int
) -> Callable[..., Value]:  # fmt: skip
    """A convolution as the reader lowers it."""
    n = len(kernel)

    def f(x: Value, w: Value) -> Value:
        if any(low) or any(high):
            x = p.pad(x, low=(0, 0, *low), high=(0, 0, *high))
        if group == 1:
            patches = p.window(x, axes=tuple(range(2, 2 + n)), sizes=kernel, strides=strides, dilations=dilations)
            y = p.dot(patches, w, contract=((1, *range(2 + n, 2 + 2 * n)), tuple(range(1, 2 + n))))
            return p.transpose(y, perm=(0, n + 1, *range(1, n + 1)))
        x = p.reshape(x, shape=(x.shape[0], group, x.shape[1] // group, *x.shape[2:]))
        w = p.reshape(w, shape=(group, w.shape[0] // group, *w.shape[1:]))
        patches = p.window(x, axes=tuple(range(3, 3 + n)), sizes=kernel, strides=strides, dilations=dilations)
        y = p.dot(patches, w, contract=((2, *range(3 + n, 3 + 2 * n)), tuple(range(2, 3 + n))), batch=((1,), (0,)))
        y = p.transpose(y, perm=(1, 0, n + 2, *range(2, n + 2)))
        return p.reshape(y, shape=(y.shape[0], y.shape[1] * y.shape[2], *y.shape[3:]))

    return f


CONVOLUTIONS = {
    # batch, channels, out channels, spatial, kernel, strides, dilations, pads before, pads after, group
    "plain": (N, 3, 5, (8, 8), (3, 3), (1, 1), (1, 1), (0, 0), (0, 0), 1),
    "padded": (N, 3, 5, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 1),
    "wide": (N, 8, 16, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 1),
    "many channels": (N, 16, 20, (7, 8), (3, 3), (1, 1), (1, 1), (1, 0), (1, 2), 1),
    "few places": (N, 8, 6, (9, 9), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 1),
    "many places, strided": (N, 6, 4, (21, 19), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 1),
    "many places, dilated": (N, 6, 4, (14, 15), (3, 2), (1, 1), (2, 3), (1, 1), (1, 1), 1),
    "long kernel": (N, 2, 3, (5, 40), (2, 20), (1, 1), (1, 1), (0, 0), (0, 0), 1),
    "one channel": (N, 1, 4, (9, 9), (5, 5), (1, 1), (1, 1), (2, 2), (2, 2), 1),
    "one out channel": (N, 4, 1, (9, 9), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 1),
    "one sample": (1, 3, 5, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 1),
    "strided": (N, 4, 6, (9, 9), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 1),
    "strided with a rest": (N, 4, 6, (8, 10), (3, 3), (2, 3), (1, 1), (1, 0), (1, 0), 1),
    "kernel of stride": (N, 3, 8, (8, 8), (4, 4), (4, 4), (1, 1), (0, 0), (0, 0), 1),
    "stride beyond the kernel": (N, 3, 8, (11, 11), (2, 2), (4, 3), (1, 1), (0, 0), (0, 0), 1),
    "dilated": (N, 4, 6, (11, 11), (3, 3), (1, 1), (2, 2), (2, 2), (2, 2), 1),
    "dilated and strided": (N, 4, 6, (12, 13), (3, 2), (2, 2), (2, 3), (2, 1), (1, 2), 1),
    "asymmetric pads": (N, 8, 8, (7, 9), (3, 4), (1, 1), (1, 1), (0, 2), (1, 1), 1),
    "pointwise": (N, 8, 5, (6, 6), (1, 1), (1, 1), (1, 1), (0, 0), (0, 0), 1),
    "pointwise strided": (N, 8, 5, (7, 7), (1, 1), (2, 2), (1, 1), (0, 0), (0, 0), 1),
    "all of the image": (N, 3, 7, (5, 5), (5, 5), (1, 1), (1, 1), (0, 0), (0, 0), 1),
    "grouped": (N, 4, 6, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 2),
    "grouped strided": (N, 6, 9, (9, 8), (3, 3), (2, 2), (1, 1), (1, 0), (1, 1), 3),
    "depthwise": (N, 6, 6, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 6),
    "depthwise strided": (N, 6, 12, (8, 8), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 6),
    "line": (N, 8, 8, (12,), (3,), (1,), (1,), (1,), (1,), 1),
    "line strided": (N, 4, 6, (12,), (4,), (3,), (1,), (0,), (2,), 1),
    "line grouped": (N, 4, 6, (12,), (3,), (1,), (2,), (2,), (2,), 2),
    "volume": (N, 3, 4, (6, 5, 4), (3, 2, 2), (1, 1, 1), (1, 1, 1), (1, 0, 1), (1, 1, 0), 1),
    "volume strided": (N, 3, 4, (6, 7, 5), (3, 2, 2), (2, 3, 1), (1, 1, 2), (1, 0, 1), (0, 1, 1), 1),
    "symbolic image": (N, 3, 8, (N + 4, N + 5), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 1),
}  # fmt: skip


def graph_of(name: str, dtype: object = f32) -> Graph:
    batch, channels, outs, spatial, kernel, strides, dilations, low, high, group = CONVOLUTIONS[name]
    f = convolution(kernel, strides, dilations, low, high, group)
    return with_gradients(
        f, x=tensor(dtype, (batch, channels, *spatial)), w=tensor(dtype, (outs, channels // group, *kernel))
    )


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_and_both_its_gradients_are_raised_and_right(name: str) -> None:
    found = compare(graph_of(name))
    assert found["Conv"] >= 1
    assert found["ConvTranspose"] == 1
    left = {v.primitive.name for v in raise_operators(graph_of(name)).nodes} & {"window", "fold"}
    assert left == ({"window"} if name == "kernel of stride" else set())  # side by side, the axes are only split


def test_every_form_of_a_weight_gradient_is_among_the_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    met, chosen = set(), native_profile._few_places

    def noted(ct: Value) -> bool:
        met.add(chosen(ct))
        return chosen(ct)

    monkeypatch.setattr(native_profile, "_few_places", noted)
    convolutions = {name: compare(graph_of(name))["Conv"] for name in CONVOLUTIONS}
    assert met == {True, False}
    assert {name for name, count in convolutions.items() if count > 1} == {"long kernel"}


@pytest.mark.parametrize("batch", [1, 2, 17])
def test_one_file_serves_every_batch(batch: int) -> None:
    for name in ("wide", "many channels", "few places", "line", "one channel"):
        compare(graph_of(name), batch)


def test_a_convolution_in_double_stays_explicit_where_the_runtime_has_no_kernel() -> None:
    assert compare(graph_of("plain", f64), tolerance=1e-9)["Conv"] == 0


def test_a_strided_convolution_of_symbolic_size_is_right() -> None:
    f = convolution((3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 1)
    g = with_gradients(f, x=tensor(f32, (2, 4, N + 4, N + 7)), w=tensor(f32, (6, 4, 3, 3)))
    for size in (2, 3, 4):
        compare(g, size)


def test_the_transpose_of_a_convolution_and_its_gradients_are_right() -> None:
    def f(x: Value, w: Value) -> Value:
        y = p.transpose(p.dot(x, w, contract=((1,), (0,))), perm=(0, 3, 1, 2, 4, 5))
        y = p.fold(y, axes=(2, 3), strides=(2, 2), dilations=(1, 1), extents=(12, 12))
        return p.slice(y, start=(0, 0, 1, 1), limit=(y.shape[0], y.shape[1], 12, 11))

    found = compare(with_gradients(f, x=tensor(f32, (N, 4, 5, 5)), w=tensor(f32, (4, 3, 3, 3))))
    assert found["ConvTranspose"] == 1


def test_bias_and_activation_are_joined_to_a_convolution() -> None:
    conv = convolution((3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 1)

    def f(x: Value, w: Value, b: Value) -> Value:
        y = conv(x, w)
        return c.relu(p.add(y, p.broadcast(b, shape=y.shape, axes=(1,))))

    g = with_gradients(f, x=tensor(f32, (N, 8, 6, 6)), w=tensor(f32, (8, 8, 3, 3)), b=tensor(f32, (8,)))
    compare(g)
    native = raise_operators(g)
    conv_node = next(v for v in native.nodes if v.primitive.name == "onnx" and v.params["op"] == "Conv")
    assert len(conv_node.operands) == 3
    readers = [v for v in native.nodes if conv_node in v.operands]
    assert [v.params.get("op") for v in readers] == ["Relu"]  # the mask reads the Relu, so a runtime can join both


def test_a_sum_that_something_else_reads_is_not_computed_twice() -> None:
    def f(x: Value, w: Value, b: Value) -> Value:
        y = p.dot(x, w, contract=((1,), (0,)))
        return p.mul(p.add(y, p.broadcast(b, shape=y.shape, axes=(1,))), y)

    with building():
        inputs = [p.input(k, tensor(f32, s)) for k, s in {"x": (N, 4), "w": (4, 3), "b": (3,)}.items()]
        y = f(*inputs)
    assert compare(Graph(tuple(inputs), {"y": y}))["Gemm"] == 1


# ---- pooling ----------------------------------------------------------------------------------------------------------------------------


def pooled(
    sizes: Sequence[int], strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int] | None = None
) -> Callable[..., Value]:
    def f(x: Value) -> Value:
        n = len(sizes)
        if any(pads):
            x = p.pad(x, low=(0, 0, *pads), high=(0, 0, *pads), value=-np.inf)
        patches = p.window(
            x,
            axes=tuple(range(2, 2 + n)),
            sizes=tuple(sizes),
            strides=tuple(strides),
            dilations=tuple(dilations or (1,) * n),
        )
        return p.reduce_max(patches, axes=tuple(range(2 + n, 2 + 2 * n)), ties="first")

    return f


POOLINGS: dict[str, tuple[Callable[..., Value], tuple[Dim, ...], str]] = {
    "apart": (pooled((2, 2), (2, 2), (0, 0)), (N, 3, 8, 8), "MaxUnpool"),
    "apart with a rest": (pooled((2, 2), (2, 2), (0, 0)), (N, 3, 7, 9), "MaxUnpool"),
    "apart with a gap": (pooled((2, 2), (3, 3), (0, 0)), (N, 3, 8, 9), "MaxUnpool"),
    "apart padded": (pooled((2, 2), (2, 2), (1, 1)), (N, 3, 8, 8), "MaxUnpool"),
    "apart, few windows": (pooled((2, 2), (3, 4), (0, 1)), (N, 3, 7, 3), "ScatterND"),
    "overlapping": (pooled((3, 3), (2, 2), (1, 1)), (N, 3, 8, 8), "ScatterND"),
    "overlapping, no pads": (pooled((3, 2), (1, 1), (0, 0)), (N, 3, 6, 6), "ScatterND"),
    "dilated": (pooled((2, 2), (1, 1), (0, 0), (2, 2)), (N, 3, 7, 7), "ScatterND"),
    "line": (pooled((2,), (2,), (0,)), (N, 3, 8), "MaxUnpool"),
    "volume": (pooled((2, 2, 2), (2, 2, 2), (0, 0, 0)), (N, 2, 4, 4, 4), "MaxUnpool"),
}


@pytest.mark.parametrize("name", POOLINGS)
def test_a_maximum_pool_and_its_gradient_are_raised_and_right(name: str) -> None:
    f, shape, gradient = POOLINGS[name]
    found = compare(with_gradients(f, x=tensor(f32, shape)))
    assert found["MaxPool"] == 1
    assert found[gradient] == 1


@pytest.mark.parametrize("name", POOLINGS)
def test_ties_of_a_maximum_pool_go_to_the_first(name: str) -> None:
    f, shape, _ = POOLINGS[name]
    g = with_gradients(f, x=tensor(f32, shape))
    feeds = draw(g)
    feeds["x"] = np.round(feeds["x"])
    explicit, native = run(to_onnx(default(g)), feeds), run(to_onnx(g, profile="native"), feeds)
    np.testing.assert_allclose(native["grad_x"], explicit["grad_x"], rtol=1e-6, atol=1e-6)


def test_a_maximum_whose_ties_are_split_is_not_a_maximum_pool() -> None:
    def f(x: Value) -> Value:
        patches = p.window(x, axes=(2, 3), sizes=(2, 2), strides=(2, 2), dilations=(1, 1))
        return p.reduce_max(patches, axes=(4, 5))

    assert compare(with_gradients(f, x=tensor(f32, (N, 3, 4, 4))))["MaxPool"] == 0


@pytest.mark.parametrize("pads", [(0, 0), (1, 1)])
def test_an_average_pool_is_raised(pads: tuple[int, int]) -> None:
    def f(x: Value) -> Value:
        x = p.pad(x, low=(0, 0, *pads), high=(0, 0, *pads)) if any(pads) else x
        return c.mean(p.window(x, axes=(2, 3), sizes=(3, 3), strides=(2, 2), dilations=(1, 1)), [4, 5])

    assert compare(with_gradients(f, x=tensor(f32, (N, 3, 9, 9))))["AveragePool"] == 1


# ---- matrices, softmax ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cx", "cy"), [((1,), (0,)), ((0,), (0,)), ((1,), (1,)), ((0,), (1,))])
def test_a_product_of_matrices_is_one_gemm_however_they_lie(cx: tuple[int], cy: tuple[int]) -> None:
    g = with_gradients(lambda x, w: p.dot(x, w, contract=(cx, cy)), x=tensor(f32, (4, 4)), w=tensor(f32, (4, 4)))
    found = compare(g)
    assert found["Gemm"] == 3
    assert found["Transpose"] == 0


def test_the_weight_gradient_of_a_layer_on_sequences_is_one_gemm() -> None:
    g = with_gradients(lambda x, w: p.dot(x, w, contract=((2,), (1,))), x=tensor(f32, (N, 5, 4)), w=tensor(f32, (3, 4)))
    assert compare(g)["Gemm"] == 1


@pytest.mark.parametrize("dtype", [f32, f64])
@pytest.mark.parametrize("axis", [1, 2])
def test_softmax_and_its_logarithm_are_raised(axis: int, dtype: object) -> None:
    x = tensor(dtype, (N, 5, 6))
    assert compare(with_gradients(lambda v: c.softmax(v, [axis]), x=x))["Softmax"] == 1
    found = compare(with_gradients(lambda v: c.log_softmax(v, [axis]), x=x))
    assert found["LogSoftmax"] == 1
    assert found["Exp"] == 1


def test_a_loss_on_labels_has_neither_maximum_nor_logarithm_of_its_own() -> None:
    def f(x: Value, t: Value) -> Value:
        logs = c.log_softmax(x, [1])
        hot = c.one_hot(t, 6, 1)
        return c.mean(p.reduce_sum(p.select(hot, logs, p.number(0, logs)), axes=(1,)), [0])

    found = compare(with_gradients(f, x=tensor(f32, (N, 6)), t=tensor(i64, (N,))))
    assert found["LogSoftmax"] == 1
    assert found["ReduceMax"] == found["Log"] == 0


# ---- masks ------------------------------------------------------------------------------------------------------------------------------


def test_the_mask_of_a_relu_is_a_product_where_all_is_finite() -> None:
    def f(x: Value, w: Value) -> Value:
        return p.dot(c.relu(p.dot(x, w, contract=((1,), (0,)))), w, contract=((1,), (0,)))

    assert compare(with_gradients(f, x=tensor(f32, (N, 4)), w=tensor(f32, (4, 4))))["Where"] == 0


def test_the_mask_of_a_relu_stays_a_selection_where_the_cotangent_may_be_infinite() -> None:
    """sqrt(relu(x)) has an infinite cotangent at 0, which the mask must keep out."""
    g = with_gradients(lambda x: p.sqrt(c.relu(x)), x=tensor(f32, (N,)))
    feeds = {"x": np.asarray([-1, 0, 4], np.float32), "ct": np.ones(3, np.float32)}
    assert run(to_onnx(g, profile="native"), feeds)["grad_x"].tolist() == [0, 0, 0.25]


@pytest.mark.parametrize("rows", [[[-np.inf, -np.inf], [0, 0]], [[np.inf, 1], [2, -np.inf]], [[1, 2], [3, 4]]])
def test_a_selection_of_the_model_itself_keeps_out_infinite_inputs(rows: list[list[float]]) -> None:
    x = np.asarray(rows, np.float32)
    for f in (
        lambda v: c.logsumexp(v, [1]),
        lambda v: p.select(p.equal(p.abs(v), p.number(np.inf, v)), p.number(0, v), v),
        lambda v: p.select(p.less(v, p.number(3, v)), v, p.number(0, v)),
    ):
        with building():
            v = p.input("x", tensor(f32, (N, 2)))
            g = Graph((v,), {"y": f(v)})
        expected = evaluate(g, {"x": x})["y"]
        np.testing.assert_allclose(run(to_onnx(g, profile="native"), {"x": x})["y"], expected, rtol=1e-6)


def test_relu_is_raised() -> None:
    assert compare(with_gradients(c.relu, x=tensor(f32, (N, 4))))["Relu"] == 1
