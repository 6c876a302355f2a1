"""Arithmetic, functions of one number, products, reductions and casts: derivatives, special points, and every version's signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from lowered import check, gradients, model_of, run, text_model
from numerics import every_node, floating_dtypes, pulled_back, tensors
from pullback.algebra.errors import Refusal
from pullback.algebra.evaluate import evaluate
from pullback.algebra.types import bf16, f16, f32, f64
from pullback.frontends.onnx_import import load

RNG = np.random.default_rng(0)


def between(low: float, high: float, *shape: int) -> np.ndarray:
    return RNG.uniform(low, high, shape)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


SCALAR = ints(0).reshape(())


# ---- functions of one number -----------------------------------------------------------------------------------------

DOMAINS: dict[str, tuple[float, float]] = {
    "Abs": (0.2, 2), "Acos": (-0.8, 0.8), "Acosh": (1.5, 3), "Asin": (-0.8, 0.8), "Asinh": (-2, 2), "Atan": (-2, 2), "Atanh": (-0.8, 0.8),
    "Cos": (-2, 2), "Cosh": (-2, 2), "Erf": (-2, 2), "Exp": (-2, 2), "Log": (0.5, 3), "Neg": (-2, 2), "Reciprocal": (0.5, 2),
    "Sin": (-2, 2), "Sinh": (-2, 2), "Sqrt": (0.5, 3), "Tan": (-1, 1), "Tanh": (-2, 2), "Identity": (-1, 1),
}  # fmt: skip


@pytest.mark.parametrize("op", DOMAINS)
def test_derivatives_of_functions_of_one_number_agree_with_differences(op: str) -> None:
    check(op, {"x": between(*DOMAINS[op], 2, 3)})
    check(op, {"x": between(*DOMAINS[op])})
    check(op, {"x": between(*DOMAINS[op], 0, 2)})


@pytest.mark.parametrize("op", ["Ceil", "Floor", "Round", "Sign"])
def test_steps_pass_no_gradient(op: str) -> None:
    assert gradients(load(model_of(op, {"x": between(-2, 2, 3)})), {"x": between(-2, 2, 3)}) == {}


def test_round_takes_ties_to_even() -> None:
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    assert run("Round", {"x": x}).tolist() == [-2, -2, 0, 0, 2, 2]


KINKS = np.array([-1.0, 0.0, 2.0], np.float32)


@pytest.mark.parametrize(
    ("op", "inputs", "expected"),
    [
        ("Atan", {}, [0.5, 1, 0.2]),
        ("Abs", {}, [-1, 0, 1]),
        ("Clip", {"low": np.float32(0), "high": np.float32(1)}, [0, 1, 0]),
        ("Erf", {}, [0.4151075, 1.1283792, 0.0206670]),
        ("Tanh", {}, [0.4199743, 1, 0.0706508]),
    ],
)
def test_kinks_have_their_documented_derivative(op: str, inputs: dict[str, Any], expected: list[float]) -> None:
    graph = load(
        model_of(op, {"x": KINKS, **{k: np.asarray(v) for k, v in inputs.items()}}, opset=17, fixed=tuple(inputs))
    )
    np.testing.assert_allclose(gradients(graph, {"x": KINKS}, ["x"])["x"], expected, rtol=1e-5)


# ---- arithmetic ------------------------------------------------------------------------------------------------------

PAIRS = [((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((), (2, 3)), ((2, 1, 3), (4, 1)), ((0, 3), (3,))]


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Mod"])
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_derivatives_of_arithmetic_agree_with_differences_however_shapes_broadcast(
    op: str, a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    attributes = {"fmod": 1} if op == "Mod" else {}
    check(op, {"a": between(0.5, 2, *a), "b": between(2.2, 3, *b)}, **attributes)


@pytest.mark.parametrize("op", ["Sum", "Mean", "Max", "Min"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_derivatives_of_arithmetic_of_many_agree_with_differences(op: str, count: int) -> None:
    check(op, {f"x{i}": between(i, i + 0.8, *((2, 3) if i % 2 == 0 else (3,))) for i in range(count)})


@pytest.mark.parametrize("op", ["Max", "Min"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_ties_of_many_are_shared_evenly(op: str, count: int) -> None:
    feeds = {f"x{i}": np.ones(2) for i in range(count)}
    found = gradients(load(model_of(op, feeds)), feeds)
    for g in found.values():
        np.testing.assert_allclose(g, [1 / count] * 2)


def test_pow_of_an_integer_exponent_has_no_gradient_there() -> None:
    x, e = np.array([2.0, -3.0]), np.array(2, np.int64)
    graph = load(model_of("Pow", {"x": x, "e": e}, opset=15))
    assert graph.outputs["y"].dtype is f64
    found = gradients(graph, {"x": x, "e": e})
    np.testing.assert_allclose(found["x"], [4, -6])


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_pow_at_and_below_zero_has_no_nan(dtype: type) -> None:
    x, e = np.array([2, -3, 0], dtype), np.array(3, dtype)
    graph = load(model_of("Pow", {"x": x, "e": e}, opset=15, fixed=("e",)))
    np.testing.assert_allclose(gradients(graph, {"x": x})["x"], [12, 27, 0])
    assert {d.numpy for d in floating_dtypes(pulled_back(graph, ("x",)))} == {np.dtype(dtype)}


def test_pow_with_a_trained_exponent_keeps_the_gradient_of_its_base() -> None:
    x, e = np.array([-3.0, 0.0, 2.0]), np.array([2.0, 2.0, 2.0])
    found = gradients(load(model_of("Pow", {"x": x, "e": e})), {"x": x, "e": e})
    np.testing.assert_allclose(found["x"], [-6, 0, 4])
    assert found["e"][1] == 0
    assert np.isnan(found["e"][0])


@pytest.mark.parametrize(
    ("base", "exponent"), [(np.int32, np.int64), (np.int64, np.float32), (np.float32, np.int64), (np.float64, np.int32)]
)
def test_pow_has_the_dtype_of_its_base(base: type, exponent: type) -> None:
    x, e = np.array([1, 2, 3], base), np.array([4, 5, 6], exponent)
    found = run("Pow", {"x": x, "e": e})
    assert found.dtype == base
    assert found.tolist() == [1, 32, 729]
    assert run("Pow", {"x": x, "e": np.array(3, exponent)}, fixed=("e",)).tolist() == [1, 8, 27]


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8])
def test_both_kinds_of_mod_agree_with_numpy(dtype: type) -> None:
    low = 0 if np.dtype(dtype).kind == "u" else -100
    a, b = RNG.integers(low, 100, 40).astype(dtype), RNG.integers(1, 100, 40).astype(dtype)
    b = (b * RNG.choice([1, -1], 40)).astype(dtype) if low else b
    np.testing.assert_array_equal(run("Mod", {"a": a, "b": b}), np.mod(a, b))
    np.testing.assert_array_equal(run("Mod", {"a": a, "b": b}, fmod=1), np.fmod(a, b))


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_integer_division_goes_toward_zero(dtype: type) -> None:
    a, b = np.array([7, -7, 7, -7], dtype), np.array([2, 2, -2, -2], dtype)
    expected = [3, -3, -3, 3] if dtype is np.int32 else [3.5, -3.5, -3.5, 3.5]
    assert run("Div", {"a": a, "b": b}).tolist() == expected


# ---- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [6, 7, 10, 11, 12, 13, 28])
def test_clip_is_the_same_in_every_version(opset: int) -> None:
    x = np.array([-1, 0, 0.5, 1, 2], np.float32)
    if opset < 11:
        inputs: dict[str, np.ndarray | None] = {"x": x}
        attributes: dict[str, float] = {"min": 0.0, "max": 1.0}
    else:
        inputs, attributes = {"x": x, "low": np.array(0, np.float32), "high": np.array(1, np.float32)}, {}
    graph = load(model_of("Clip", inputs, opset=opset, fixed=("low", "high"), **attributes))
    assert evaluate(graph, {"x": x})["y"].tolist() == [0, 0, 0.5, 1, 1]
    assert gradients(graph, {"x": x}, ["x"])["x"].tolist() == [
        0,
        1,
        1,
        1,
        0,
    ]  # passes at the bounds, as PyTorch's clamp


@pytest.mark.parametrize("bounds", [("low",), ("high",), ()])
def test_clip_may_lack_bounds(bounds: tuple[str, ...]) -> None:
    x = between(-2, 2, 5)
    low, high = (np.array(v) if n in bounds else None for n, v in (("low", -0.5), ("high", 0.5)))
    check("Clip", {"x": x, "low": low, "high": high})


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8])
def test_clip_of_integers(dtype: type) -> None:
    x = np.array([0, 5, 100], dtype)
    assert run("Clip", {"x": x, "low": np.array(2, dtype), "high": np.array(50, dtype)}).tolist() == [2, 5, 50]


def test_clip_with_bounds_crossed_gives_the_upper() -> None:
    assert run("Clip", {"x": np.array([-1.0, 5.0]), "low": np.array(2.0), "high": np.array(1.0)}).tolist() == [1, 1]


def test_clip_lets_nan_through() -> None:
    assert np.isnan(run("Clip", {"x": np.array([np.nan]), "low": np.array(0.0), "high": np.array(1.0)})).all()


# ---- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3,), (3,)), ((3,), (3, 4)), ((2, 3), (3,)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((2, 3), (5, 3, 4)), ((5, 2, 3), (5, 3, 4)),
        ((5, 1, 2, 3), (4, 3, 2)), ((1, 2, 3), (5, 3, 4)), ((5, 2, 1, 2, 3), (2, 4, 3, 2)), ((3,), (5, 3, 4)), ((5, 2, 3), (3,)), ((1, 1), (1, 1)),
        ((2, 0), (0, 3)), ((0, 3), (3, 2)), ((2, 1), (1, 3)), ((1, 1, 3), (1, 3, 1)),
    ],
)  # fmt: skip
def test_derivatives_of_matmul_agree_with_differences_however_shapes_broadcast(
    a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    x, y = between(-1, 1, *a), between(-1, 1, *b)
    np.testing.assert_allclose(run("MatMul", {"a": x, "b": y}), np.matmul(x, y), atol=1e-12)
    check("MatMul", {"a": x, "b": y})


EQUATIONS = [
    ("ij,jk->ik", [(2, 3), (3, 4)]), ("ij,jk", [(2, 3), (3, 4)]), ("ii->i", [(3, 3)]), ("ii", [(3, 3)]), ("ij->ji", [(2, 3)]),
    ("ij->", [(2, 3)]), ("i,i->", [(3,), (3,)]), ("i,j->ij", [(3,), (2,)]), ("i,i->i", [(3,), (3,)]), ("...ij,...jk->...ik", [(5, 2, 3), (3, 4)]),
    ("...ij,...jk->...ik", [(5, 2, 3), (5, 3, 4)]), ("b...,b...->b...", [(2, 3, 4), (2, 3, 4)]), ("...ii->...i", [(2, 3, 3)]),
    ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 2)]), ("bij,bjk,bk->bi", [(2, 2, 3), (2, 3, 2), (2, 2)]), (",ij->ij", [(), (2, 3)]), ("->", [()]),
    ("iij->j", [(2, 2, 3)]), ("iijj->ij", [(2, 2, 3, 3)]), ("iii->i", [(2, 2, 2)]), ("ij,kj->", [(2, 3), (4, 3)]), ("ij,k->ijk", [(2, 1), (4,)]),
    ("ij,ij->ij", [(2, 1), (2, 3)]), ("...,...->...", [(2, 3), (3,)]), (" i j , j k -> i k ", [(2, 3), (3, 4)]), ("...i->...", [(2, 3, 4)]),
    ("i...->...", [(2, 3, 4)]), ("Ab,bA->A", [(2, 3), (3, 2)]), ("...i,...i", [(2, 3), (2, 3)]),
]  # fmt: skip


@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS)
def test_einsum_agrees_with_numpy_and_its_derivative_with_differences(
    equation: str, shapes: list[tuple[int, ...]]
) -> None:
    inputs = {f"x{i}": between(-1, 1, *s) for i, s in enumerate(shapes)}
    np.testing.assert_allclose(
        run("Einsum", inputs, equation=equation), np.einsum(equation, *inputs.values()), atol=1e-12
    )
    check("Einsum", inputs, equation=equation)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [("ij->k", [(2, 3)]), ("i,j", [(2,)]), ("ij", [(2, 3, 4)]), ("ij->ii", [(2, 3)]), ("i?->i", [(2, 3)])],
)
def test_einsum_refuses_what_it_cannot_read(equation: str, shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(Refusal, match="Einsum"):
        run("Einsum", {f"x{i}": between(-1, 1, *s) for i, s in enumerate(shapes)}, equation=equation)


@pytest.mark.parametrize("transA", [0, 1])
@pytest.mark.parametrize("transB", [0, 1])
@pytest.mark.parametrize("c", [None, (), (1,), (5,), (4, 1), (1, 5), (4, 5)])
def test_gemm_agrees_with_numpy_and_its_derivative_with_differences(
    transA: int, transB: int, c: tuple[int, ...] | None
) -> None:
    a, b = between(-1, 1, 4, 3), between(-1, 1, 3, 5)
    extra = None if c is None else between(-1, 1, *c)
    inputs = {"a": a.T.copy() if transA else a, "b": b.T.copy() if transB else b, "c": extra}
    attributes = {"alpha": 0.5, "beta": 2.0, "transA": transA, "transB": transB}
    expected = 0.5 * (a @ b) + (0 if extra is None else 2 * extra)
    np.testing.assert_allclose(run("Gemm", inputs, **attributes), expected, atol=1e-12)
    check("Gemm", inputs, **attributes)


@pytest.mark.parametrize("opset", [7, 9, 10, 11, 13, 28])
def test_gemm_without_c_has_the_gradients_of_a_product(opset: int) -> None:
    a, b, g = (between(-1, 1, *s).astype(np.float32) for s in ((4, 3), (5, 3), (4, 5)))
    c = np.zeros(5, np.float32) if opset < 11 else None
    graph = load(model_of("Gemm", {"a": a, "b": b, "c": c}, opset=opset, fixed=("c",), alpha=0.5, transB=1))
    found = gradients(graph, {"a": a, "b": b}, ["a", "b"], {"y": g})
    np.testing.assert_allclose(found["a"], 0.5 * g @ b, rtol=1e-5)
    np.testing.assert_allclose(found["b"], 0.5 * g.T @ a, rtol=1e-5)


def test_gemm_of_integers_takes_whole_factors_only() -> None:
    a = np.arange(4, dtype=np.int32).reshape(2, 2)
    np.testing.assert_array_equal(run("Gemm", {"a": a, "b": a}, alpha=2.0), 2 * a @ a)
    with pytest.raises(Refusal, match=r"a factor of 0\.5 for integers"):
        run("Gemm", {"a": a, "b": a}, alpha=0.5)


def test_a_tied_weight_has_one_gradient() -> None:
    graph = load(
        text_model(
            """g (int64[2] ids) => (float y) <float[5, 3] W = {0.0,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.0,1.1,1.2,1.3,1.4}> {
            h = Gather(W, ids)  t = Transpose(W)  z = MatMul(h, t)  y = ReduceSum<keepdims = 0>(z) }""",
            13,
        )
    )
    assert [v.params["name"] for v in graph.parameters] == ["W"]
    found = gradients(graph, {"ids": np.array([0, 2])} | {"W": graph.data["W"].array})["W"]
    expected = np.array([[3.6, 4.3, 5.0] if r in (0, 2) else [0.6, 0.8, 1.0] for r in range(5)])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# ---- determinant -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(7))
@pytest.mark.parametrize("lead", [(), (2,), (2, 2)])
def test_determinant_agrees_with_numpy_and_its_derivative_with_differences(n: int, lead: tuple[int, ...]) -> None:
    x = between(-1, 1, *lead, n, n)
    np.testing.assert_allclose(run("Det", {"x": x}), np.linalg.det(x), atol=1e-10)
    graph_keep = [("x", len(lead)), ("x", len(lead) + 1)]
    check("Det", {"x": x}, keep=graph_keep, orders=2 if n < 5 else 1, tolerance=1e-6)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
@pytest.mark.parametrize("lost", [1, 2])
def test_determinant_of_a_singular_matrix_has_the_cofactors_as_derivative(n: int, lost: int) -> None:
    a, b = RNG.integers(-3, 4, (n, n - lost)).astype(float), RNG.integers(-3, 4, (n - lost, n)).astype(float)
    x = a @ b
    cofactors = np.array([
        [(-1) ** (i + j) * np.linalg.det(np.delete(np.delete(x, i, 0), j, 1)) if n > 1 else 1 for j in range(n)] for i in range(n)
    ])  # fmt: skip
    found = gradients(load(model_of("Det", {"x": x})), {"x": x})["x"]
    np.testing.assert_allclose(found, cofactors, atol=1e-6 * max(1, np.abs(cofactors).max()))


def test_determinant_of_symbolic_size_is_refused() -> None:
    with pytest.raises(Refusal, match="whose size is symbolic"):
        load(model_of("Det", {"x": between(0, 1, 3, 3)}, symbols=True))


# ---- running sums and products ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["CumSum", "CumProd"])
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_running_sums_and_products_agree_with_numpy_and_differences(
    op: str, exclusive: int, reverse: int, axis: int
) -> None:
    x = between(-1, 1, 2, 5)
    x[0, 1] = x[1, 2] = 0
    function, start = (np.cumsum, 0) if op == "CumSum" else (np.cumprod, 1)
    line = np.flip(x, axis) if reverse else x
    if exclusive:
        line = np.concatenate([np.full_like(np.take(line, [0], axis), start), np.delete(line, -1, axis)], axis)
    expected = function(line, axis)
    inputs = {"x": x, "axis": ints(axis).reshape(())}
    options = {"fixed": ("axis",), "exclusive": exclusive, "reverse": reverse}
    np.testing.assert_allclose(run(op, inputs, **options), np.flip(expected, axis) if reverse else expected, atol=1e-12)
    check(op, inputs, **options)


@pytest.mark.parametrize("op", ["CumSum", "CumProd"])
@pytest.mark.parametrize("exclusive", [0, 1])
def test_running_sums_and_products_of_nothing_are_nothing(op: str, exclusive: int) -> None:
    assert run(op, {"x": np.zeros((0, 2)), "axis": SCALAR}, fixed=("axis",), exclusive=exclusive).shape == (0, 2)


# ---- reductions ------------------------------------------------------------------------------------------------------

REDUCTIONS = [
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceSumSquare",
]
NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "ReduceSum": np.sum, "ReduceMean": np.mean, "ReduceMax": np.max, "ReduceMin": np.min, "ReduceProd": np.prod,
    "ReduceL1": lambda x, **k: np.sum(np.abs(x), **k), "ReduceL2": lambda x, **k: np.sqrt(np.sum(x * x, **k)),
    "ReduceLogSum": lambda x, **k: np.log(np.sum(x, **k)), "ReduceLogSumExp": lambda x, **k: np.log(np.sum(np.exp(x), **k)),
    "ReduceSumSquare": lambda x, **k: np.sum(x * x, **k),
}  # fmt: skip


def reduction(op: str, opset: int, axes: tuple[int, ...] | None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Axes as this version has them: an input from 13 (ReduceSum) or 18 on, an attribute before."""
    if axes is None:
        return {}, {}
    if opset >= (13 if op == "ReduceSum" else 18):
        return {"axes": ints(*axes)}, {"fixed": ("axes",)}
    return {}, {"axes": list(axes)}


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("opset", [7, 11, 12, 13, 17, 18, 28])
@pytest.mark.parametrize("axes", [None, (0,), (-1,), (0, 2)])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_reductions_are_the_same_in_every_version(
    op: str, opset: int, axes: tuple[int, ...] | None, keepdims: int
) -> None:
    x = between(0.5, 1.5, 2, 3, 4)
    more, options = reduction(op, opset, axes)
    found = run(op, {"x": x, **more}, opset=opset, keepdims=keepdims, **options)
    np.testing.assert_allclose(found, NUMPY[op](x, axis=axes, keepdims=bool(keepdims)), rtol=1e-12)


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("axes", [None, (0,), (1, 2)])
def test_derivatives_of_reductions_agree_with_differences(op: str, axes: tuple[int, ...] | None) -> None:
    more, options = reduction(op, 18, axes)
    check(op, {"x": between(0.5, 1.5, 2, 3, 2), **more}, opset=18, **options)


@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions_over_no_axes_keep_every_element(op: str) -> None:
    x = between(0.5, 1.5, 2, 3)
    found = run(op, {"x": x, "axes": ints()}, fixed=("axes",), noop_with_empty_axes=1)
    np.testing.assert_allclose(found, NUMPY[op](x[None], axis=0), rtol=1e-12)


@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions_of_nothing_have_the_value_of_nothing(op: str) -> None:
    empty = {
        "ReduceSum": 0, "ReduceMean": np.nan, "ReduceMax": -np.inf, "ReduceMin": np.inf, "ReduceProd": 1, "ReduceL1": 0, "ReduceL2": 0,
        "ReduceLogSum": -np.inf, "ReduceLogSumExp": -np.inf, "ReduceSumSquare": 0,
    }  # fmt: skip
    x = np.zeros((2, 0, 3))
    graph = load(model_of(op, {"x": x, "axes": ints(1)}, fixed=("axes",), keepdims=0))
    np.testing.assert_array_equal(evaluate(graph, {"x": x})["y"], np.full((2, 3), empty[op]))
    assert gradients(graph, {"x": x}, ["x"])["x"].shape == (2, 0, 3)


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_ties_of_extremes_are_shared_evenly(op: str, opset: int, keepdims: int) -> None:
    x = np.array([[1, 1, 2], [3, 0, 0]], np.float32) * (1 if op == "ReduceMin" else -1)
    more, options = reduction(op, opset, (1,))
    graph = load(model_of(op, {"x": x, **more}, opset=opset, keepdims=keepdims, **options))
    np.testing.assert_allclose(gradients(graph, {"x": x}, ["x"])["x"], [[0.5, 0.5, 0], [0, 0.5, 0.5]])


def test_the_norm_of_zeros_has_gradient_zero() -> None:
    x = np.array([[0.0, 0.0], [3.0, 4.0]])
    found = gradients(load(model_of("ReduceL2", {"x": x, "axes": ints(1)}, fixed=("axes",))), {"x": x})["x"]
    np.testing.assert_allclose(found, [[0, 0], [0.6, 0.8]])


def test_logsumexp_neither_overflows_nor_loses_its_gradient() -> None:
    x = np.array([[1000.0, 1000.0], [-1000.0, -1000.0], [-np.inf, 0.0]])
    graph = load(model_of("ReduceLogSumExp", {"x": x, "axes": ints(1)}, fixed=("axes",), keepdims=0))
    np.testing.assert_allclose(evaluate(graph, {"x": x})["y"], [1000 + np.log(2), -1000 + np.log(2), 0])
    np.testing.assert_allclose(gradients(graph, {"x": x})["x"], [[0.5, 0.5], [0.5, 0.5], [0, 1]])


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_the_gradient_of_a_product_is_exact_at_zeros(zeros: int) -> None:
    x = np.array([2.0, 3.0, 4.0])
    x[:zeros] = 0
    found = gradients(load(model_of("ReduceProd", {"x": x, "axes": ints(0)}, fixed=("axes",))), {"x": x})["x"]
    np.testing.assert_allclose(found, [np.prod(np.delete(x, i)) for i in range(3)])


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
def test_extremes_of_bools_are_any_and_all(op: str) -> None:
    x = np.array([[True, False], [False, False], [True, True]])
    found = run(op, {"x": x, "axes": ints(1)}, fixed=("axes",), keepdims=0)
    assert found.dtype == np.bool_
    assert found.tolist() == (x.any(1) if op == "ReduceMax" else x.all(1)).tolist()


def integer_reductions() -> list[tuple[str, type]]:
    """What ONNX lets be reduced."""
    names = {np.int32: "tensor(int32)", np.int64: "tensor(int64)", np.uint8: "tensor(uint8)"}
    return [
        (op, d) for op in REDUCTIONS for d, name in names.items()
        if name in onnx.defs.get_schema(op, 20).type_constraints[0].allowed_type_strs
    ]  # fmt: skip


@pytest.mark.parametrize(("op", "dtype"), integer_reductions())
def test_reductions_of_integers_stay_integers(op: str, dtype: type) -> None:
    x = np.array([[1, 2], [3, 4]], dtype)
    found = run(op, {"x": x, "axes": ints(1)}, opset=20, fixed=("axes",), keepdims=0)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, NUMPY[op](x.astype(float), axis=1).astype(dtype))


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int8, np.uint8])
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_places_of_extremes_are_the_first_or_the_last(op: str, dtype: type, last: int, keepdims: int) -> None:
    least = np.iinfo(dtype).min if np.dtype(dtype).kind in "iu" else -9
    x = np.array([[1, 5, 5, 1], [least, 3, 3, least]], dtype)
    line = x[:, ::-1] if last else x
    expected = getattr(np, op.lower())(line, axis=1)
    expected = x.shape[1] - 1 - expected if last else expected
    found = run(op, {"x": x}, axis=1, select_last_index=last, keepdims=keepdims)
    assert found.reshape(-1).tolist() == expected.tolist()
    assert found.ndim == 1 + keepdims


# ---- casts and tests of a number -------------------------------------------------------------------------------------


def test_casts_between_floats_pass_the_gradient_and_others_none() -> None:
    x = np.array([1.5, -2.5], np.float32)
    half = load(model_of("Cast", {"x": x}, to=onnx.TensorProto.FLOAT16))
    assert half.outputs["y"].dtype is f16
    assert gradients(half, {"x": x})["x"].dtype == np.float32
    assert gradients(load(model_of("Cast", {"x": x}, to=onnx.TensorProto.INT32)), {"x": x}) == {}
    assert load(model_of("Cast", {"x": x}, to=onnx.TensorProto.BFLOAT16)).outputs["y"].dtype is bf16


def test_a_cast_to_8_bits_saturates_unless_told_not_to() -> None:
    x = np.array([1e6, -1e6, np.inf, np.nan, 1.0], np.float32)
    there_and_back = (
        "g (float[5] x) => (float[5] y) {{ h = Cast<to = {code}, saturate = {saturate}>(x)  y = Cast<to = 1>(h) }}"
    )
    code = onnx.TensorProto.FLOAT8E4M3FN
    held, lost = (
        evaluate(load(text_model(there_and_back.format(code=code, saturate=s), 19)), {"x": x})["y"] for s in (1, 0)
    )
    np.testing.assert_array_equal(held, [448, -448, 448, np.nan, 1])
    np.testing.assert_array_equal(lost, [np.nan, np.nan, np.nan, np.nan, 1])


def test_cast_to_text_is_refused() -> None:
    with pytest.raises(Refusal, match="tensors of string are outside numerical graphs"):
        load(model_of("Cast", {"x": np.zeros(2, np.float32)}, to=onnx.TensorProto.STRING))


@pytest.mark.parametrize(("negative", "positive"), [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_infinities_of_either_sign_are_told_apart(negative: int, positive: int) -> None:
    x = np.array([-np.inf, np.inf, np.nan, 1], np.float32)
    found = run("IsInf", {"x": x}, detect_negative=negative, detect_positive=positive)
    assert found.tolist() == [bool(negative), bool(positive), False, False]


@pytest.mark.parametrize("op", ["BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor"])
def test_operators_of_bits_broadcast(op: str) -> None:
    a, b = np.array([[1, 2], [4, 8]], np.uint8), np.array([1, 3], np.uint8)
    functions = {
        "BitShift": np.left_shift,
        "BitwiseAnd": np.bitwise_and,
        "BitwiseOr": np.bitwise_or,
        "BitwiseXor": np.bitwise_xor,
    }
    attributes = {"direction": "LEFT"} if op == "BitShift" else {}
    np.testing.assert_array_equal(run(op, {"a": a, "b": b}, **attributes), functions[op](a, b))


# ---- dtypes and old versions -----------------------------------------------------------------------------------------

ONE_DTYPE = [
    "Abs",
    "Exp",
    "Reciprocal",
    "Tan",
    "ReduceL2",
    "ReduceLogSumExp",
    "ReduceMean",
    "ReduceProd",
    "Det",
    "Clip",
    "CumSum",
    "Mean",
    "Pow",
]


@pytest.mark.parametrize("op", ONE_DTYPE)
@pytest.mark.parametrize("dtype", [f16, f32, f64, bf16])
def test_no_dtype_is_widened_or_narrowed_on_the_way(op: str, dtype: Any) -> None:
    x = np.abs(between(0.5, 1, 4, 4)).astype(dtype.numpy)
    inputs: dict[str, np.ndarray] = {"x": x}
    fixed: tuple[str, ...] = ()
    if op == "Clip":
        inputs |= {"low": np.array(0.6, dtype.numpy)}
    if op in ("Mean", "Pow"):
        inputs |= {"z": x.copy()}
    if op == "CumSum":
        inputs, fixed = inputs | {"axis": SCALAR}, ("axis",)
    graph = load(model_of(op, inputs, fixed=fixed))
    back = pulled_back(graph, ("x",))
    assert floating_dtypes(back) == {dtype}, [
        n for n in every_node(back) for t in tensors(n) if t.dtype.floating and t.dtype is not dtype
    ]


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Less", "Greater"])
@pytest.mark.parametrize(("b", "axis"), [((4,), None), ((3,), 1), ((2, 3), 0), ((3, 4), None), ((1, 1), 0)])
def test_old_broadcasting_places_the_second_operand_at_an_axis(op: str, b: tuple[int, ...], axis: int | None) -> None:
    dtype = np.bool_ if op in ("And", "Or", "Xor") else np.int32 if op in ("Equal",) else np.float32
    x, y = RNG.integers(0, 2, (2, 3, 4)).astype(dtype), RNG.integers(1, 3, b).astype(dtype)
    start = 3 - y.ndim if axis is None else axis
    placed = y.reshape(*y.shape, *(1,) * (3 - start - y.ndim))
    functions: dict[str, Any] = {
        "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power, "And": np.logical_and, "Or": np.logical_or,
        "Xor": np.logical_xor, "Equal": np.equal, "Less": np.less, "Greater": np.greater,
    }  # fmt: skip
    attributes = {} if axis is None else {"axis": axis}
    np.testing.assert_allclose(run(op, {"a": x, "b": y}, opset=6, broadcast=1, **attributes), functions[op](x, placed))


# ---- against PyTorch -------------------------------------------------------------------------------------------------


def test_special_points_have_the_gradients_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    special = np.array([-np.inf, -2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0, np.inf])
    functions = {
        "Abs": torch.abs, "Neg": torch.neg, "Exp": torch.exp, "Erf": torch.erf, "Tanh": torch.tanh, "Atan": torch.atan, "Sqrt": torch.sqrt,
        "Log": torch.log, "Reciprocal": torch.reciprocal, "Asin": torch.asin, "Acos": torch.acos, "Acosh": torch.acosh, "Atanh": torch.atanh,
        "Asinh": torch.asinh, "Sin": torch.sin, "Cos": torch.cos, "Sinh": torch.sinh, "Cosh": torch.cosh, "Tan": torch.tan,
    }  # fmt: skip
    for op, function in functions.items():
        x = torch.tensor(special, requires_grad=True)
        function(x).sum().backward()
        found = gradients(load(model_of(op, {"x": special})), {"x": special})["x"]
        np.testing.assert_allclose(found, x.grad.numpy(), err_msg=op)
