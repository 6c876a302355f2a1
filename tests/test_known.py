"""Shape arithmetic, as exporters write it, is known before anything runs, and is what comes out when it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from pullback.algebra import composites as c
from pullback.algebra import primitives as p
from pullback.algebra.dims import Dim, dim, equal, floordiv
from pullback.algebra.dims import evaluate as size_of
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Graph, Value, building
from pullback.algebra.known import Facts
from pullback.algebra.types import DType, bool_, f32, f64, i32, i64, tensor

N, M = dim("N"), dim("M")
SIZES = [{"N": 1, "M": 1}, {"N": 5, "M": 3}, {"N": 8, "M": 7}, {"N": 64, "M": 2}]


def shape(x: Value) -> Value:
    """ONNX's Shape."""
    return p.concat(*(p.reshape(p.dim(d), shape=(1,)) for d in x.shape), axis=0)


def vector(*values: float, dtype: DType = i64) -> Value:
    return p.literal(np.asarray(values), dtype)


def take(x: Value, *at: int) -> Value:
    return p.gather(x, vector(*at), axis=0)


def full_of(value: Value, count: int) -> Value:
    return p.broadcast(p.reshape(value, shape=()), shape=(count,), axes=())


def known_and_computed(build: Callable[[Value], Value], dims: Sequence[Dim] = (N, 4, M)) -> np.ndarray | None:
    """What is known of the value, checked against what comes out at several sizes."""
    with building():
        x = p.input("x", tensor(f32, dims))
        y = build(x)
    known = Facts()(y)
    if known is None:
        return None
    graph = Graph((x,), {"y": y})
    for sizes in SIZES:
        found = evaluate(graph, {"x": np.zeros([size_of(d, sizes) for d in dims], np.float32)}, sizes=sizes)["y"]
        at = [
            size_of(e, sizes) if isinstance(e, sympy.Expr) and not e.has(sympy.Rational) else e for e in known.ravel()
        ]
        at = [float(e.subs({N: sizes["N"], M: sizes["M"]})) if isinstance(e, sympy.Expr) else e for e in at]
        np.testing.assert_array_equal(np.asarray(at, found.dtype).reshape(found.shape), found)
    return known


CASES: dict[str, tuple[Callable[[Value], Value], list[object]]] = {
    "Shape": (shape, [N, 4, M]),
    "Shape, Gather": (lambda x: take(shape(x), 0, -1), [N, M]),
    "Shape, Slice": (lambda x: p.slice(shape(x), start=(1,), limit=(3,), stride=(1,)), [4, M]),
    "Shape, Gather, Mul, Concat": (
        lambda x: p.concat(take(shape(x), 0), p.mul(take(shape(x), 1), take(shape(x), 2)), vector(-1), axis=0),
        [N, 4 * M, -1],
    ),
    "Shape, ReduceProd": (lambda x: p.reduce_prod(shape(x), axes=(0,)), [4 * N * M]),
    "Shape, ReduceSum, ReduceMax": (
        lambda x: p.max(p.reduce_sum(take(shape(x), 0, 1), axes=(0,)), p.reduce_max(take(shape(x), 0, 1), axes=(0,))),
        [N + 4],
    ),
    "integer Div": (lambda x: p.div(shape(x), vector(2, 2, 3)), [floordiv(N, 2), 2, floordiv(M, 3)]),
    "ceiling by Div of Neg": (
        lambda x: p.neg(p.div(p.add(p.neg(take(shape(x), 0)), vector(0)), vector(2))), [floordiv(N, 2)],
    ),
    "Mod by Div, Mul, Sub": (
        lambda x: p.add(take(shape(x), 0), p.neg(p.mul(p.div(take(shape(x), 0), vector(8)), vector(8)))),
        [N - 8 * floordiv(N, 8)],
    ),
    "rem": (lambda x: p.rem(take(shape(x), 0), vector(8)), [N - 8 * floordiv(N, 8)]),
    "a window of stride 2": (
        lambda x: p.add(p.div(p.add(take(shape(x), 0), vector(2 * 1 - 3)), vector(2)), vector(1)), [floordiv(N + 1, 2)],
    ),
    "Cast to float, times 2, Cast back": (
        lambda x: p.cast(p.mul(p.cast(take(shape(x), 0, 2), dtype=f32), vector(2, 0.5, dtype=f32)), dtype=i64),
        [2 * N, floordiv(M, 2)],
    ),
    "Floor of a float product": (
        lambda x: p.floor(p.mul(p.cast(take(shape(x), 0), dtype=f32), vector(1.5, dtype=f32))), [floordiv(3 * N, 2)],
    ),
    "Ceil of a float quotient": (
        lambda x: c.ceil(p.div(p.cast(take(shape(x), 0), dtype=f32), vector(4, dtype=f32))), [floordiv(N + 3, 4)],
    ),
    "Cast to int32 and back": (lambda x: p.cast(p.cast(shape(x), dtype=i32), dtype=i64), [N, 4, M]),
    "Cast of a difference": (lambda x: p.cast(p.add(take(shape(x), 0), vector(-5)), dtype=i32), [N - 5]),
    "Where of a comparison that is decided": (
        lambda x: p.select(p.equal(take(shape(x), 0, 1), vector(-1, 4)), vector(1, 2), take(shape(x), 0, 2)), [N, 2],
    ),
    "Where of Equal to minus one (expand)": (
        lambda x: p.select(p.equal(vector(-1, 2, 3), vector(-1, -1, -1)), shape(x), vector(-1, 2, 3)), [N, 2, 3],
    ),
    "Less and LessOrEqual": (
        lambda x: c.as_number(p.logical_and(p.less(vector(0), take(shape(x), 0)),
            p.less_equal(vector(4), take(shape(x), 1))), i64),
        [1],
    ),
    "Range by iota, plus": (lambda x: p.add(p.iota(3), full_of(take(shape(x), 0), 3)), [N, N + 1, N + 2]),
    "Squeeze, Unsqueeze, Expand": (lambda x: full_of(p.reshape(take(shape(x), 2), shape=()), 2), [M, M]),
    "ConstantOfShape, Mul": (lambda x: p.mul(p.full(1, i64, (2,)), take(shape(x), 0, 0)), [N, N]),
    "Pow": (lambda x: p.pow(p.cast(take(shape(x), 0), dtype=f64), vector(2, dtype=f64)), [N**2]),
    "CumSum": (lambda x: p.cumsum(shape(x), axis=0), [N, N + 4, N + M + 4]),
    "CumSum from the end": (lambda x: p.cumsum(shape(x), axis=0, reverse=True), [N + M + 4, M + 4, M]),
    "Reverse and Transpose": (lambda x: p.reverse(shape(x), axes=(0,)), [M, 4, N]),
    "ScatterElements": (
        lambda x: p.add(p.scatter_add(take(shape(x), 2), vector(1), axis=0, size=3), vector(7, 0, 0)), [7, M, 0],
    ),
    "Max and Min": (
        lambda x: p.concat(p.max(take(shape(x), 0), vector(1)), p.min(take(shape(x), 0), vector(1)), axis=0), [N, 1],
    ),
    "Abs and Sign": (lambda x: p.mul(p.abs(p.neg(take(shape(x), 0))), p.sign(take(shape(x), 2))), [N]),
    "Round": (lambda x: p.round(p.cast(take(shape(x), 0), dtype=f32)), [N]),
    "ArgMax of numbers alone": (lambda x: p.argmax(vector(1, 5, 3), axis=0), [1]),
    "numbers beside symbols are rounded as their dtype is": (
        lambda x: p.concat(p.mul(p.concat(p.cast(take(shape(x), 0), dtype=f32), vector(3, dtype=f32), axis=0),
                                 vector(1, 0.1, dtype=f32)), axis=0), [N, float(np.float32(3) * np.float32(0.1))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_exporters_write_for_sizes_is_known(name: str) -> None:
    build, expected = CASES[name]
    found = known_and_computed(build)
    assert found is not None
    assert len(found.ravel()) == len(expected)
    assert all(a == b or equal(a, b) for a, b in zip(found.ravel(), expected, strict=True)), found


UNKNOWN: dict[str, Callable[[Value], Value]] = {
    "data": lambda x: p.cast(p.reduce_sum(x, axes=(0, 1, 2)), dtype=i64),
    "a comparison that depends on the sizes": lambda x: p.equal(take(shape(x), 0), vector(3)),
    "Where of such a comparison": lambda x: p.select(p.less(take(shape(x), 0), vector(3)), vector(1), vector(2)),
    "an index that depends on the sizes": lambda x: p.gather(vector(1, 2, 3), take(shape(x), 0), axis=0),
    "a product that is rounded": lambda x: p.floor(p.mul(p.cast(take(shape(x), 0), dtype=f32), vector(0.7, dtype=f32))),
    "a quotient of unknown sign": lambda x: p.div(p.add(take(shape(x), 0), vector(-5)), vector(2)),
    "a root": lambda x: p.sqrt(p.cast(take(shape(x), 0), dtype=f32)),
    "an infinite power": lambda x: p.pow(p.cast(take(shape(x), 0), dtype=f32), vector(np.inf, dtype=f32)),
    "a tensor of symbolic size": lambda x: p.iota(x.shape[0]),
    "an index out of range": lambda x: p.gather(vector(1, 2), vector(5), axis=0),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_not_guessed(name: str) -> None:
    with building():
        x = p.input("x", tensor(f32, (N, 4, M)))
        y = UNKNOWN[name](x)
    assert Facts()(y) is None


def test_fractions_on_their_way_are_compared_as_such() -> None:
    with building():
        x = p.input("x", tensor(f32, (N,)))
        half = p.mul(p.cast(p.dim(N), dtype=f32), p.literal(0.5, f32))
        found = [Facts()(v) for v in (p.less(half, p.literal(0.5, f32)), p.less_equal(p.literal(0.5, f32), half),
            p.less(p.literal(0.75, f32), half))]  # fmt: skip
    assert found[0] is not None
    assert not found[0]
    assert found[1] is not None
    assert found[1]
    assert found[2] is None
    assert x.name == "x"


def test_a_static_graph_is_computed_in_its_own_dtype() -> None:
    with building():
        y = p.mul(p.literal(np.float32(0.1)), p.literal(np.float32(3)))
        b = p.less(p.literal(np.int64(1)), p.literal(np.int64(2)))
    facts = Facts()
    assert facts(y) == np.float32(0.1) * np.float32(3)
    assert facts(y).dtype == np.float32
    assert facts(b).dtype == np.bool_
    assert b.dtype is bool_


def test_each_value_is_looked_at_once_and_deep_chains_are_no_recursion() -> None:
    with building():
        y = p.dim(N)
        for _ in range(5000):
            y = p.add(y, p.literal(np.int64(1)))
    assert Facts()(y).item() == N + 5000


def test_what_is_told_is_taken() -> None:
    with building():
        x = p.input("x", tensor(i64, (2,)))
        y = p.add(x, p.literal(np.array([1, 1])))
    facts = Facts()
    facts.tell(x, np.array([N, 3], object))
    found = facts(y)
    assert found is not None
    assert found.tolist() == [N + 1, 4]
    facts.forget([x, y])
    assert facts(y) is None


operations = st.sampled_from(["add", "mul", "div", "max", "min", "rem", "half", "ceil", "neg", "abs", "cast"])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(operations, st.integers(0, 3), st.integers(1, 7)), min_size=1, max_size=6))
def test_random_shape_arithmetic_is_what_comes_out(steps: list[tuple[str, int, int]]) -> None:
    def build(x: Value) -> Value:
        pool = [take(shape(x), 0), take(shape(x), 2), vector(3), p.mul(take(shape(x), 0), take(shape(x), 2))]
        v = pool[0]
        for name, other, number in steps:
            k = vector(number)
            match name:
                case "add" | "mul" | "max" | "min":
                    v = getattr(p, name)(v, pool[other])
                case "div" | "rem":
                    v = getattr(p, name)(v, k)
                case "half":
                    v = p.cast(p.floor(p.mul(p.cast(v, dtype=f64), vector(0.5, dtype=f64))), dtype=i64)
                case "ceil":
                    v = p.cast(c.ceil(p.div(p.cast(v, dtype=f64), vector(4, dtype=f64))), dtype=i64)
                case "neg":
                    v = p.add(p.neg(v), pool[other])
                case "abs":
                    v = p.abs(v)
                case _:
                    v = p.cast(p.cast(v, dtype=f64), dtype=i64)
        return v

    known_and_computed(build)
