"""Random graphs of primitives: well formed, printed and parsed, differentiated, never built twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numerics import check_pullback, pulled_back
from pullback.algebra import composites as c
from pullback.algebra import primitives as p
from pullback.algebra.calculus import jvp
from pullback.algebra.dims import Dim, dim, equal, exact_div, is_static, product
from pullback.algebra.dims import evaluate as size_of
from pullback.algebra.errors import InconclusiveDim
from pullback.algebra.evaluate import evaluate, evaluate_all
from pullback.algebra.graph import Graph, Value, building, rebuild
from pullback.algebra.passes import simplify
from pullback.algebra.text import constants, labels, parse, show
from pullback.algebra.types import f64, tensor
from pullback.algebra.verify import verify

N, M = dim("N"), dim("M")

Step = tuple[str, int, int, int]
Make = Callable[[list[Value], Value, int, int], Value | None]


def _partner(pool: Sequence[Value], x: Value, at: int) -> Value:
    """Another value of the same shape; x itself where there is none."""
    same = [v for v in pool if v.type == x.type]
    return same[at % len(same)] if same else x


def _dot(pool: list[Value], x: Value, a: int, b: int) -> Value | None:
    other = pool[a % len(pool)]
    pairs = [(i, j) for i, d in enumerate(x.shape) for j, e in enumerate(other.shape) if d == e]
    if not pairs or x.rank + other.rank > 6:
        return None
    i, j = pairs[b % len(pairs)]
    batch = [(k, m) for k, m in pairs if k != i and m != j][: b % 2]
    y = p.dot(x, other, contract=((i,), (j,)), batch=(tuple(k for k, _ in batch), tuple(m for _, m in batch)))
    return c.scale(y, 0.5)


def _reshape(pool: list[Value], x: Value, a: int, b: int) -> Value:
    flat = p.reshape(x, shape=(product(x.shape),))
    half = exact_div(product(x.shape), 2)
    return flat if half is None or a % 2 else p.reshape(flat, shape=(half, 2))


def _broadcast(pool: list[Value], x: Value, a: int, b: int) -> Value | None:
    if x.rank > 3:
        return None
    at, size = a % (x.rank + 1), (pool[0].shape[0], 2, pool[2].shape[0])[b % 3]
    shape = (*x.shape[:at], size, *x.shape[at:])
    return p.broadcast(x, shape=shape, axes=tuple(i for i in range(len(shape)) if i != at))


def _slice(pool: list[Value], x: Value, a: int, b: int) -> Value | None:
    if not x.rank:
        return None
    at = a % x.rank
    start, limit, stride = [0] * x.rank, list(x.shape), [1] * x.rank
    stride[at] = 1 + b % 3
    if isinstance(x.shape[at], int) and x.shape[at] > 1:
        start[at] = b % 2
    return p.slice(x, start=tuple(start), limit=tuple(limit), stride=tuple(stride))


def _pad(pool: list[Value], x: Value, a: int, b: int) -> Value:
    low, high, interior = ([(n >> i) % 2 for i in range(x.rank)] for n in (a, b, a ^ b))
    return p.pad(x, low=tuple(low), high=tuple(high), interior=tuple(interior), value=0.5 if a % 3 == 0 else 0)


def _concat(pool: list[Value], x: Value, a: int, b: int) -> Value | None:
    return p.concat(x, _partner(pool, x, b), axis=a % x.rank) if x.rank else None


def _window(pool: list[Value], x: Value, a: int, b: int) -> Value | None:
    wide = [i for i, d in enumerate(x.shape) if isinstance(d, int) and d >= 2]
    if not wide or x.rank > 3:
        return None
    return p.window(x, axes=(wide[a % len(wide)],), sizes=(2,), strides=(1 + b % 2,), dilations=(1,))


def _fold(pool: list[Value], x: Value, a: int, b: int) -> Value | None:
    windowed = _window(pool, x, a, b)
    if windowed is None:
        return None
    params = windowed.params
    extents = tuple(x.shape[i] for i in params["axes"])
    return p.fold(
        c.square(windowed),
        axes=params["axes"],
        strides=params["strides"],
        dilations=params["dilations"],
        extents=extents,
    )


def _gather(pool: list[Value], x: Value, a: int, b: int) -> Value | None:
    if not x.rank:
        return None
    i = p.literal(np.array([0, -1, 0] if a % 2 else [[-1], [0]]))
    y = p.gather(x, i, axis=b % x.rank)
    if a % 3:
        return y
    return p.scatter_add(y, i, axis=b % x.rank, size=x.shape[b % x.rank])


def _reduced(f: Callable[..., Value]) -> Make:
    def make(pool: list[Value], x: Value, a: int, b: int) -> Value | None:
        axes = tuple(i for i in range(x.rank) if (a >> i) % 2)
        if any(isinstance(x.shape[i], int) and x.shape[i] == 0 for i in axes):
            return None
        return f(x, axes)

    return make


def _unary(f: Callable[[Value], Value]) -> Make:
    return lambda pool, x, a, b: f(x)


def _binary(f: Callable[[Value, Value], Value]) -> Make:
    return lambda pool, x, a, b: f(x, _partner(pool, x, a))


OPERATIONS: dict[str, Make] = {
    "tanh": _unary(p.tanh), "sin": _unary(p.sin), "cos": _unary(p.cos), "exp": _unary(lambda x: p.exp(p.tanh(x))),
    "neg": _unary(p.neg),
    "erf": _unary(p.erf), "atan": _unary(p.atan), "sqrt": _unary(lambda x: p.sqrt(c.plus(c.square(x), 1))),
    "softplus": _unary(c.softplus),
    "sigmoid": _unary(c.sigmoid), "log": _unary(lambda x: p.log(c.plus(c.square(x), 1))),
    "mul": _binary(lambda x, y: p.mul(x, p.tanh(y))), "add": _binary(p.add), "sub": _binary(c.sub),
    "div": _binary(lambda x, y: p.div(x, c.plus(c.square(y), 1))), "max": _binary(p.max), "min": _binary(p.min),
    "select": _binary(lambda x, y: p.select(p.less(x, y), p.sin(x), y)),
    "pow": _binary(lambda x, y: p.pow(c.plus(c.square(x), 1), p.tanh(y))),
    "reduce_sum": _reduced(lambda x, axes: c.scale(p.reduce_sum(x, axes=axes), 0.25)),
    "reduce_max": _reduced(lambda x, axes: p.reduce_max(x, axes=axes)),
    "reduce_first": _reduced(lambda x, axes: p.reduce_min(x, axes=axes, ties="first")),
    "reduce_prod": _reduced(lambda x, axes: p.reduce_prod(p.tanh(x), axes=axes)),
    "logsumexp": _reduced(c.logsumexp), "softmax": _reduced(c.softmax), "mean": _reduced(c.mean),
    "dot": _dot, "reshape": _reshape, "broadcast": _broadcast, "slice": _slice, "pad": _pad, "concat": _concat,
    "window": _window,
    "fold": _fold, "gather": _gather,
    "transpose": lambda pool, x, a, b: p.transpose(x, perm=tuple(np.roll(range(x.rank), a).tolist())),
    "reverse": lambda pool, x, a, b: p.reverse(x, axes=tuple(i for i in range(x.rank) if (a >> i) % 2)),
    "cumsum": lambda pool, x, a, b: p.cumsum(x, axis=a % x.rank, reverse=b % 2 == 0) if x.rank else None,
}  # fmt: skip

numbers = st.integers(0, 31)
steps = st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), numbers, numbers, numbers), min_size=1, max_size=12)
often = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def grown(inputs: Sequence[Value], program: Sequence[Step]) -> list[Value]:
    pool = list(inputs)
    for name, which, a, b in program:
        x = pool[which % len(pool)]
        try:
            y = OPERATIONS[name](pool, x, a, b)
        except InconclusiveDim:
            continue  # a fit that depends on the sizes is refused, as it should be
        if y is not None and _bounded(y.shape):
            pool.append(y)
    return pool


def _bounded(shape: Sequence[Dim]) -> bool:
    return size_of(product(shape), {"N": 5, "M": 3}) <= 500


def random_graph(program: Sequence[Step], static: bool = False) -> Graph:
    n, m = (3, 2) if static else (N, M)
    with building():
        inputs = [
            p.input("x", tensor(f64, (n, 4))),
            p.input("w", tensor(f64, (4, m)), "parameter"),
            p.input("v", tensor(f64, (m,))),
        ]
        pool = grown(inputs, program)
    outputs = {f"y{i}": v for i, v in enumerate(pool[-2:])}
    return Graph(tuple(inputs), outputs, "random", tensors={f"t{i}": v for i, v in enumerate(pool[3:-2:2])})


def feeds_of(graph: Graph, sizes: dict[str, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {v.params["name"]: rng.standard_normal([size_of(d, sizes) for d in v.shape]) for v in graph.inputs}


@often
@given(steps, st.booleans())
def test_graphs_and_their_pullbacks_are_well_formed_and_round_trip_as_text(program: list[Step], static: bool) -> None:
    graph = verify(random_graph(program, static))
    back = verify(pulled_back(graph, ("x", "w", "v")))
    for g in (graph, back):
        text = show(g)
        again = parse(text, constants(g))
        assert show(again) == text
        assert len(again.nodes) == len(g.nodes)
        assert len(set(labels(g).values())) == len(g.nodes)


@often
@given(steps, st.sampled_from([(1, 1), (2, 3), (5, 2)]))
def test_gradients_agree_with_finite_differences(program: list[Step], sizes: tuple[int, int]) -> None:
    graph = random_graph(program)
    rng = np.random.default_rng(len(program))
    bound = {"N": sizes[0], "M": sizes[1]}
    feeds = feeds_of(graph, bound, rng)
    if not _smooth(graph, feeds):
        return
    check_pullback(
        graph, feeds, ("x", "w", "v"), rng, sizes=bound, orders=2 if len(program) < 5 else 1, step=1e-4, tolerance=1e-6
    )


def _smooth(graph: Graph, feeds: dict[str, np.ndarray]) -> bool:
    """Whether no kink lies within reach of the differences.

    No near ties in max, min, comparisons or extremes, and nothing large or infinite.
    """
    values = evaluate_all(graph, feeds)
    for node in graph.nodes:
        found = values[id(node)]
        if node.dtype.floating and not np.all(np.abs(found) < 1e4):
            return False
        if node.primitive.name in ("max", "min", "less", "equal"):
            a, b = (values[id(o)] for o in node.operands)
            if (np.abs(a - b) < 1e-2).any() and node.operands[0] is not node.operands[1]:
                return False
        if node.primitive.name in ("reduce_max", "reduce_min"):
            ordered = np.sort(_lined(values[id(node.operands[0])], node.params["axes"]), axis=-1)
            gaps = np.diff(ordered, axis=-1)
            if ordered.shape[-1] > 1 and (gaps[..., -1 if node.primitive.name == "reduce_max" else 0] < 1e-2).any():
                return False
    return True


def _lined(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    kept = [i for i in range(x.ndim) if i not in axes]
    return x.transpose(*kept, *axes).reshape(
        *(x.shape[i] for i in kept), int(np.prod([x.shape[i] for i in axes], dtype=np.int64))
    )


@often
@given(steps)
def test_the_pushforward_is_the_transpose_of_the_pullback(program: list[Step]) -> None:
    graph = random_graph(program, static=True)
    rng = np.random.default_rng(7)
    push, back = verify(jvp(graph, wrt=["x", "w", "v"])), pulled_back(graph, ("x", "w", "v"))
    feeds = feeds_of(graph, {}, rng)
    tangents = {f"tangent_{k}": rng.standard_normal(v.shape) for k, v in feeds.items()}
    cts = {f"ct_{k}": rng.standard_normal(v.shape) for k, v in evaluate(graph, feeds).items()}
    pushed, pulled = evaluate(push, {**feeds, **tangents}), evaluate(back, {**feeds, **cts})
    left = sum(float(np.sum(pushed[f"tangent_{k}"] * cts[f"ct_{k}"])) for k in graph.outputs)
    right = sum(float(np.sum(pulled[f"ct_{k}"] * tangents[f"tangent_{k}"])) for k in feeds if f"ct_{k}" in pulled)
    if np.isfinite(left) and np.isfinite(right):
        assert left == pytest.approx(
            right, rel=1e-8, abs=1e-8 * max(1.0, *(np.abs(v).max(initial=0) for v in pulled.values()))
        ), show(graph)


@often
@given(steps)
def test_the_same_expression_is_the_same_node(program: list[Step]) -> None:
    with building() as builder:
        inputs = [p.input("x", tensor(f64, (N, 4))), p.input("w", tensor(f64, (4, M))), p.input("v", tensor(f64, (M,)))]
        first = grown(inputs, program)
        count = len(builder._table)
        second = grown(inputs, program)
        assert len(builder._table) == count
    assert all(a is b for a, b in zip(first, second, strict=True))


@often
@given(steps, st.sampled_from([(1, 1), (3, 2)]))
def test_symbols_and_numbers_give_the_same_values_and_so_do_rebuilt_and_simplified_graphs(
    program: list[Step], sizes: tuple[int, int]
) -> None:
    graph = random_graph(program)
    rng = np.random.default_rng(1)
    feeds = feeds_of(graph, {"N": sizes[0], "M": sizes[1]}, rng)
    expected = evaluate(graph, feeds)
    again = rebuild(graph, lambda node, operands: _copied(node, operands))
    assert show(again) == show(graph)
    for other in (again, verify(simplify(graph))):
        found = evaluate(other, feeds)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-9, err_msg=show(graph))


def _copied(node: Value, operands: tuple[Value, ...]) -> Value:
    from pullback.algebra.graph import bind

    return bind(node.primitive, *operands, **node.params)


def test_every_operation_is_possible_at_some_shape() -> None:
    with building():
        inputs = [p.input("x", tensor(f64, (3, 4))), p.input("w", tensor(f64, (4, 2))), p.input("v", tensor(f64, (2,)))]
        for name, make in OPERATIONS.items():
            assert any(make(inputs, x, a, 1) is not None for x in inputs for a in (1, 2)), name
            assert is_static(inputs[0].shape)
            assert equal(inputs[0].shape[0], 3)
