"""Composites against closed forms and against PyTorch, in value and in first and second derivatives, at ordinary and at
special points.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numerics import check_pullback
from pullback.algebra import composites as c
from pullback.algebra import primitives as p
from pullback.algebra.calculus import gradient
from pullback.algebra.dims import dim
from pullback.algebra.errors import PullbackWarning, TypeMismatch
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Graph, Value, building
from pullback.algebra.types import DType, bf16, bool_, f16, f32, f64, i64, tensor

N, M = dim("N"), dim("M")
INF = np.inf
SPECIAL = np.array([0.0, -0.0, 1e-300, -1e-300, 1e-12, -1e-12, 1.0, -1.0, 30.0, -30.0, 1e4, -1e4, INF, -INF])


def graph_of(build: Callable[..., Value | Sequence[Value]], *types: Any) -> Graph:
    with building():
        xs = [p.input(f"x{i}", t) for i, t in enumerate(types)]
        made = build(*xs)
    ys = [made] if isinstance(made, Value) else list(made)
    return Graph(tuple(xs), {"y" if len(ys) == 1 else f"y{i}": y for i, y in enumerate(ys)})


def again(first: Graph, **options: Any) -> Graph:
    """The gradient of a gradient; that of a piecewise linear function is zeros, which is no surprise here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PullbackWarning)
        return gradient(first, of="grad_x0", wrt="x0", **options)


def derivatives(build: Callable[[Value], Value], at: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Value, first and second derivative of an elementwise function, for each element of a vector."""
    first = gradient(graph_of(build, tensor(f64, (N,))), of="y", wrt="x0")
    second = again(first)
    found = evaluate(second, {"x0": at, "seed_y": np.ones_like(at), "seed_grad_x0": np.ones_like(at)})
    return found["y"], found["grad_x0"], found["grad_x0_1"]


def sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def bump(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return e / (1 + e) ** 2


CLOSED: dict[
    str, tuple[Callable[[Value], Value], Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]]
] = {
    "sigmoid": (c.sigmoid, lambda x: (sigmoid(x), bump(x), bump(x) * (1 - 2 * sigmoid(x)))),
    "softplus": (c.softplus, lambda x: (np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), sigmoid(x), bump(x))),
    "log_sigmoid": (
        c.log_sigmoid,
        lambda x: (np.minimum(x, 0) - np.log1p(np.exp(-np.abs(x))), sigmoid(-x), -bump(x)),
    ),
    "expm1": (c.expm1, lambda x: (np.expm1(x), np.exp(x), np.exp(x))),
    "square": (c.square, lambda x: (x * x, 2 * x, 2 + 0 * x)),
    "relu": (c.relu, lambda x: (np.maximum(x, 0), (x > 0) * 1.0, 0 * x)),
    "scale": (lambda x: c.scale(x, -2.5), lambda x: (-2.5 * x, -2.5 + 0 * x, 0 * x)),
    "plus": (lambda x: c.plus(x, 0.25), lambda x: (x + 0.25, 1 + 0 * x, 0 * x)),
    "clamp": (
        lambda x: c.clamp(x, p.number(-1, x), p.number(1, x)),
        lambda x: (np.clip(x, -1, 1), (np.abs(x) <= 1) * 1.0, 0 * x),
    ),
}


@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms_at_ordinary_points(name: str) -> None:
    build, closed = CLOSED[name]
    at = np.random.default_rng(0).standard_normal(50) * 3
    for found, expected in zip(derivatives(build, at), closed(at), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["sigmoid", "softplus", "log_sigmoid", "relu", "clamp", "expm1"])
def test_closed_forms_at_special_points(name: str) -> None:
    build, closed = CLOSED[name]
    at = SPECIAL[SPECIAL < 1e3] if name == "expm1" else SPECIAL
    with np.errstate(all="ignore"):
        value, first, second = closed(at)
    if name in ("relu", "clamp"):
        second = np.zeros_like(at)
    if name == "relu":
        first = (at > 0) * 1.0
    finite = np.isfinite(at)
    found = derivatives(build, at)
    np.testing.assert_allclose(found[0], value, rtol=1e-14, atol=3e-16)  # a softplus near 0 is exact to an ulp of 1
    np.testing.assert_allclose(found[1], first, rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(found[2][finite], second[finite], rtol=1e-9, atol=1e-16)


def test_log1p_near_zero_and_at_its_edges() -> None:
    at = np.array(
        [0.0, -0.0, 1e-300, 1e-17, -1e-17, 1e-9, -1e-9, 0.3, -0.3, 0.5, -0.5, 0.499999, 2.0, 1e4, -0.999999, INF, -1.0]
    )
    value, first, second = derivatives(c.log1p, at)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(value, np.log1p(at), rtol=1e-14)
        np.testing.assert_allclose(first, 1 / (1 + at), rtol=1e-12)
        np.testing.assert_allclose(second[:-2], -1 / (1 + at[:-2]) ** 2, rtol=1e-10)


def test_expm1_keeps_small_numbers() -> None:
    at = np.array([1e-18, -1e-18, 1e-10, 0.25, -0.25, 0.49999, 0.5, -0.5])
    np.testing.assert_allclose(derivatives(c.expm1, at)[0], np.expm1(at), rtol=4e-16)


def test_nan_stays_nan() -> None:
    for build in (
        c.relu,
        c.sigmoid,
        c.softplus,
        c.expm1,
        c.log1p,
        lambda x: c.clamp(x, p.number(0, x), p.number(1, x)),
    ):
        assert np.isnan(derivatives(build, np.array([np.nan]))[0]).all()


def test_ceil_and_comparisons() -> None:
    x, y = np.array([-1.5, -0.0, 0.2, 2.0, np.nan]), np.array([-1.5, 0.0, 0.3, 1.0, 1.0])
    f = graph_of(
        lambda a, b: [c.ceil(a), c.greater(a, b), c.greater_equal(a, b), c.not_equal(a, b), c.is_inf(a), c.sub(a, b)],
        tensor(f64, (5,)), tensor(f64, (5,)),
    )  # fmt: skip
    found = list(evaluate(f, {"x0": x, "x1": y}).values())
    for value, expected in zip(found, (np.ceil(x), x > y, x >= y, x != y, np.isinf(x), x - y), strict=True):
        np.testing.assert_array_equal(value, expected)


# ---- along axes ------------------------------------------------------------------------------------------------------


def reference(x: np.ndarray, axes: tuple[int, ...]) -> dict[str, np.ndarray]:
    top = x.max(axes, keepdims=True)
    e = np.exp(x - top)
    total = e.sum(axes, keepdims=True)
    return {
        "softmax": e / total, "log_softmax": x - top - np.log(total), "logsumexp": (np.log(total) + top).squeeze(axes),
        "mean": x.mean(axes), "variance": x.var(axes),
    }  # fmt: skip


ALONG: dict[str, Callable[[Value, tuple[int, ...]], Value]] = {
    "softmax": c.softmax,
    "log_softmax": c.log_softmax,
    "logsumexp": c.logsumexp,
    "mean": c.mean,
    "variance": lambda x, axes: c.variance(x, axes)[2],
}


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1), (2, 0)])
@pytest.mark.parametrize("n", [1, 4])
def test_functions_along_axes(name: str, axes: tuple[int, ...], n: int) -> None:
    graph = graph_of(lambda x: ALONG[name](x, axes), tensor(f64, (N, 3, M)))
    rng = np.random.default_rng(n)
    x = rng.standard_normal((n, 3, 2))
    np.testing.assert_allclose(evaluate(graph, {"x0": x})["y"], reference(x, axes)[name], rtol=1e-12, atol=1e-13)
    check_pullback(graph, {"x0": x}, ("x0",), rng)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_large_logits_do_not_overflow(name: str) -> None:
    x = np.array([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [1e4, 1e4, 1e4], [3.0, -INF, 1.0]])
    graph = gradient(graph_of(lambda v: ALONG[name](v, (1,)), tensor(f64, (N, 3))))
    shape = (4, 3) if name != "logsumexp" else (4,)
    seed = np.arange(12.0).reshape(4, 3)[:, : 3 if name != "logsumexp" else 1].reshape(shape)
    found = evaluate(graph, {"x0": x, "seed_y": seed})
    with np.errstate(all="ignore"):
        expected = reference(x, (1,))
    np.testing.assert_allclose(found["y"], expected[name], rtol=1e-12)
    s = expected["softmax"]
    match name:
        case "softmax":
            slope = s * (seed - (seed * s).sum(1, keepdims=True))
        case "log_softmax":
            slope = seed - s * seed.sum(1, keepdims=True)
        case _:
            slope = seed[:, None] * s
    np.testing.assert_allclose(found["grad_x0"], slope, rtol=1e-12, atol=1e-15)


def test_the_logsumexp_of_minus_infinities_is_minus_infinity() -> None:
    graph = graph_of(lambda v: c.logsumexp(v, (1,)), tensor(f64, (N, 3)))
    found = evaluate(graph, {"x0": np.array([[-INF] * 3, [0.0, -INF, -INF], [INF, 0.0, 1.0]])})["y"]
    assert found.tolist() == [-INF, 0.0, INF]


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize("shape", [(0, 3), (2, 1)])
def test_empty_tensors_and_axes_of_size_1(name: str, shape: tuple[int, int]) -> None:
    graph = gradient(graph_of(lambda v: ALONG[name](v, (1,)), tensor(f64, shape)))
    out = graph.outputs["y"].shape
    found = evaluate(graph, {"x0": np.full(shape, 2.5), "seed_y": np.ones(out)})
    assert found["grad_x0"].shape == shape
    slope = {"softmax": 0.0, "log_softmax": 0.0, "logsumexp": 1.0, "mean": 1.0, "variance": 0.0}[name]
    assert (found["grad_x0"] == slope).all()


@pytest.mark.parametrize("dtype", [f16, bf16, f32])
def test_composites_keep_the_dtype_in_value_and_gradient(dtype: DType) -> None:
    def everything(x: Value) -> Value:
        parts = [c.sigmoid(x), c.softplus(x), c.log_sigmoid(x), c.expm1(x), c.log1p(c.square(x)), c.relu(x),
        c.softmax(x, (1,)),
                 c.log_softmax(x, (1,)), c.along(c.logsumexp(x, (1,)), x.shape, (1,)),
                 c.along(c.mean(x, (0,)), x.shape, (0,)),
                 c.variance(x, (1,))[1], c.clamp(x, p.number(0, x), None),
                     c.reciprocal(c.plus(c.square(x), 1))]  # fmt: skip
        return p.concat(*parts, axis=0)

    graph = gradient(graph_of(everything, tensor(dtype, (2, 3))))
    assert {v.dtype for v in graph.nodes if v.dtype.floating} == {dtype}


# ---- shapes and indices ----------------------------------------------------------------------------------------------


def test_a_size_is_a_number_of_the_dtype() -> None:
    with building():
        x = p.input("x", tensor(f16, (N, 3)))
        y = c.size_of(x.shape, f16)
        z = c.size_of((2, 3), f16)
    found = evaluate(Graph((x,), {"y": y, "z": z}), {"x": np.zeros((4, 3), np.float16)})
    assert found["y"] == 12
    assert found["z"] == 6
    assert found["y"].dtype == found["z"].dtype == np.float16


def test_pieces_of_an_axis_put_together_are_the_whole() -> None:
    graph = graph_of(lambda x: p.concat(*c.split(x, (1, N, 2), 0), axis=0), tensor(f64, (N + 3, 2)))
    x = np.random.default_rng(0).standard_normal((7, 2))
    np.testing.assert_array_equal(evaluate(graph, {"x0": x})["y"], x)


def test_unsqueeze_and_flatten() -> None:
    graph = graph_of(lambda x: [c.unsqueeze(x, (0, 3)), c.flatten_axes(x, 0, 2),
        c.drop_ones(c.unsqueeze(x, (1,)), (1,))],
                     tensor(f64, (N, 3)))  # fmt: skip
    assert [repr(v.type) for v in graph.outputs.values()] == ["f64[1, N, 3, 1]", "f64[3*N]", "f64[N, 3]"]


def test_one_hot_is_true_at_the_index() -> None:
    graph = graph_of(lambda i: c.one_hot(i, 4, 1), tensor(i64, (N, 2)))
    i = np.array([[0, 3], [2, 2], [9, -1]])
    found = evaluate(graph, {"x0": i})["y"]
    np.testing.assert_array_equal(found, np.arange(4)[None, :, None] == i[:, None, :])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_take_along_agrees_with_numpy_and_its_pullback_adds_up_repeats(axis: int) -> None:
    graph = graph_of(
        lambda x, i: c.take_along(x, i, axis),
        tensor(f64, (N, 3, M)),
        tensor(i64, (4, 3, M) if axis == 0 else (N, 3, M)),
    )
    rng = np.random.default_rng(axis)
    x = rng.standard_normal((4, 3, 2))
    i = rng.integers(0, x.shape[axis], x.shape)
    np.testing.assert_array_equal(evaluate(graph, {"x0": x, "x1": i})["y"], np.take_along_axis(x, i, axis))
    check_pullback(graph, {"x0": x, "x1": i}, ("x0",), rng)


def test_take_along_may_leave_out_the_end_of_other_axes() -> None:
    graph = graph_of(lambda x, i: c.take_along(x, i, 1), tensor(f64, (4, 3)), tensor(i64, (2, 5)))
    x, i = np.arange(12.0).reshape(4, 3), np.array([[0, 1, 2, 2, 0], [1, 1, 1, 0, 2]])
    np.testing.assert_array_equal(evaluate(graph, {"x0": x, "x1": i})["y"], np.take_along_axis(x[:2], i, 1))
    with pytest.raises(TypeMismatch, match="ranks differ"):
        graph_of(lambda x, i: c.take_along(x, i, 1), tensor(f64, (4, 3)), tensor(i64, (2,)))


def test_bools_become_numbers() -> None:
    graph = graph_of(lambda b: [c.as_number(b, f32), c.as_number(b, i64)], tensor(bool_, (3,)))
    found = evaluate(graph, {"x0": np.array([True, False, True])})
    assert found["y0"].tolist() == found["y1"].tolist() == [1, 0, 1]
    assert found["y0"].dtype == np.float32


# ---- PyTorch ---------------------------------------------------------------------------------------------------------

PYTORCH: dict[str, tuple[Callable[[Value], Value], Callable[[Any, Any], Any]]] = {
    "sigmoid": (c.sigmoid, lambda t, x: t.sigmoid(x)),
    "softplus": (c.softplus, lambda t, x: t.nn.functional.softplus(x)),
    "log_sigmoid": (c.log_sigmoid, lambda t, x: t.nn.functional.logsigmoid(x)),
    "relu": (c.relu, lambda t, x: t.relu(x)),
    "expm1": (c.expm1, lambda t, x: t.expm1(x)),
    "clamp": (lambda x: c.clamp(x, p.number(-1, x), p.number(1, x)), lambda t, x: t.clamp(x, -1, 1)),
    "abs": (p.abs, lambda t, x: t.abs(x)),
    "maximum": (lambda x: p.max(x, p.number(0, x)), lambda t, x: t.maximum(x, t.zeros_like(x))),
    "minimum": (lambda x: p.min(x, p.number(1, x)), lambda t, x: t.minimum(x, t.ones_like(x))),
    "amax": (lambda x: p.reduce_max(x, axes=(0,)), lambda t, x: t.amax(x, 0)),
    "amin": (lambda x: p.reduce_min(x, axes=(0,)), lambda t, x: t.amin(x, 0)),
    "prod": (lambda x: p.reduce_prod(x, axes=(0,)), lambda t, x: t.prod(x, 0)),
    "square root of squares": (lambda x: p.sqrt(c.plus(c.square(x), 1)), lambda t, x: t.sqrt(x * x + 1)),
    "pow": (lambda x: p.pow(x, p.number(3, x)), lambda t, x: t.pow(x, 3.0)),
    "tanh": (p.tanh, lambda t, x: t.tanh(x)),
    "erf": (p.erf, lambda t, x: t.erf(x)),
    "softmax": (lambda x: c.softmax(x, (0,)), lambda t, x: t.softmax(x, 0)),
    "log_softmax": (lambda x: c.log_softmax(x, (0,)), lambda t, x: t.log_softmax(x, 0)),
    "logsumexp": (lambda x: c.logsumexp(x, (0,)), lambda t, x: t.logsumexp(x, 0)),
    "cumsum": (lambda x: p.cumsum(x, axis=0), lambda t, x: t.cumsum(x, 0)),
    "variance": (lambda x: c.variance(x, (0,))[2], lambda t, x: t.var(x, 0, correction=0)),
}


@pytest.mark.parametrize("name", PYTORCH)
@pytest.mark.parametrize(
    "at",
    [
        [0.3, -1.2, 2.5, 0.9, -0.1], [0.0, 1.0, -1.0, 0.0, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0],
        [25.0, -25.0, 3.0, 0.0, 1.0],
    ],
    ids=str,
)  # fmt: skip
def test_values_and_first_and_second_derivatives_are_those_of_pytorch(name: str, at: list[float]) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    build, theirs = PYTORCH[name]
    rng = np.random.default_rng(1)
    graph = graph_of(build, tensor(f64, (5,)))
    first = gradient(graph, of="y", wrt="x0", seeds={"y": "u"})
    second = again(first, seeds={"grad_x0": "v"})
    y_shape = evaluate(graph, {"x0": np.array(at)})["y"].shape
    u, v = rng.standard_normal(y_shape), rng.standard_normal(5)
    found = evaluate(second, {"x0": np.array(at), "u": u, "v": v})
    x = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    y = theirs(torch, x)
    (g,) = torch.autograd.grad(y, x, torch.from_numpy(u), create_graph=True)
    np.testing.assert_allclose(found["y"], y.detach().numpy(), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found["grad_x0"], g.detach().numpy(), rtol=1e-10, atol=1e-13)
    (h,) = torch.autograd.grad(g, x, torch.from_numpy(v), allow_unused=True) if g.requires_grad else (None,)
    expected = np.zeros(5) if h is None else h.numpy(force=True)
    np.testing.assert_allclose(found["grad_x0_1"], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("shape", [(300, 300), (N, M), (90000,)])
def test_a_mean_of_more_half_floats_than_they_can_count(shape: tuple[Any, ...]) -> None:
    graph = gradient(graph_of(lambda x: c.mean(x, range(x.rank)), tensor(f16, shape)))
    x = np.full((300, 300) if len(shape) == 2 else (90000,), 0.125, np.float16)
    found = evaluate(graph, {"x0": x})
    assert found["y"] == 0.125
    np.testing.assert_allclose(found["grad_x0"].astype(np.float64), 1 / 90000, rtol=0.01)
