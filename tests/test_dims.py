"""Dims: never guessed, never contradicted by numbers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from pullback.algebra import dims
from pullback.algebra.dims import (
    Dim,
    at_least,
    ceildiv,
    dim,
    dmax,
    dmin,
    equal,
    evaluate,
    exact_div,
    floordiv,
    maybe_equal,
    mod,
    parse,
    product,
    show,
    simplest,
    solve,
    substitute,
)
from pullback.algebra.errors import DimError, InconclusiveDim

N, M, K = dim("N"), dim("M"), dim("K", least=0)
NAMES = ("N", "M", "K")
POINTS = [{"N": n, "M": m, "K": k} for n in (1, 2, 3, 5, 8, 13) for m in (1, 2, 3, 7) for k in (0, 1, 4)]

Meaning = Callable[[dict[str, int]], int | None]


def _both(f: Callable[[Dim, Dim], Dim], number: Callable[[int, int], int], x: tuple, y: tuple) -> tuple:
    def meaning(at: dict[str, int]) -> int | None:
        a, b = x[1](at), y[1](at)
        return None if a is None or b is None else number(a, b)

    return f(x[0], y[0]), meaning


def _symbol(s: sympy.Symbol) -> tuple:
    return s, lambda at: at[s.name]


def _number(n: int) -> tuple:
    return n, lambda at: n


def _over(f: Callable[[Dim, Dim], Dim], number: Callable[[int, int], int], x: tuple, n: int) -> tuple:
    return _both(f, number, x, _number(n))


leaves = st.one_of(
    st.sampled_from([_symbol(N), _symbol(M), _symbol(K)]), st.integers(-3, 9).map(_number), st.just(_symbol(N))
)


def _grow(inner: st.SearchStrategy) -> st.SearchStrategy:
    return st.one_of(
        st.builds(lambda x, y: _both(lambda a, b: simplest(a + b), lambda a, b: a + b, x, y), inner, inner),
        st.builds(lambda x, y: _both(lambda a, b: simplest(a - b), lambda a, b: a - b, x, y), inner, inner),
        st.builds(lambda x, y: _both(lambda a, b: simplest(a * b), lambda a, b: a * b, x, y), inner, inner),
        st.builds(lambda x, n: _over(floordiv, lambda a, b: a // b, x, n), inner, st.integers(1, 6)),
        st.builds(lambda x, n: _over(mod, lambda a, b: a % b, x, n), inner, st.integers(1, 6)),
        st.builds(lambda x, n: _over(ceildiv, lambda a, b: -(-a // b), x, n), inner, st.integers(1, 6)),
        st.builds(
            lambda x, s: _both(floordiv, lambda a, b: a // b, x, s), inner, st.sampled_from([_symbol(N), _symbol(M)])
        ),
        st.builds(lambda x, s: _both(mod, lambda a, b: a % b, x, s), inner, st.sampled_from([_symbol(N), _symbol(M)])),
        st.builds(lambda x, y: _both(dmax, max, x, y), inner, inner),
        st.builds(lambda x, y: _both(dmin, min, x, y), inner, inner),
    )


expressions = st.recursive(leaves, _grow, max_leaves=5)
often = settings(max_examples=250, deadline=None)


@often
@given(expressions)
def test_whatever_is_simplified_has_the_same_size(e: tuple) -> None:
    d, meaning = e
    for at in POINTS:
        assert evaluate(d, at) == meaning(at), f"{show(d)} at {at}"


@often
@given(expressions, expressions)
def test_equal_and_at_least_never_contradict_the_numbers(x: tuple, y: tuple) -> None:
    pairs = [(x[1](at), y[1](at)) for at in POINTS]
    for compare, holds in ((equal, lambda a, b: a == b), (at_least, lambda a, b: a >= b)):
        try:
            answer = compare(x[0], y[0])
        except InconclusiveDim:
            continue
        assert all(holds(a, b) == answer for a, b in pairs), (
            f"{compare.__name__}({show(x[0])}, {show(y[0])}) = {answer}"
        )
    if not maybe_equal(x[0], y[0]):
        assert all(a != b for a, b in pairs)


@often
@given(expressions)
def test_lower_bounds_hold(e: tuple) -> None:
    low = dims._lower(sympy.sympify(e[0]))
    assert low is None or all(e[1](at) >= low for at in POINTS), f"{show(e[0])} >= {low}"


@often
@given(expressions)
def test_text_round_trips(e: tuple) -> None:
    d = e[0]
    again = parse(show(d), may_be_empty={"K"})  # the text of a dim does not say which symbols may be 0
    assert again == d, f"{show(d)} is read as {show(again)}"


@often
@given(expressions, st.integers(1, 6))
def test_substitution_agrees_with_evaluation(e: tuple, n: int) -> None:
    bound = substitute(e[0], {N: n})
    for at in POINTS:
        assert evaluate(bound, at) == e[1]({**at, "N": n})


@often
@given(expressions, expressions)
def test_a_solution_solves(x: tuple, y: tuple) -> None:
    found = solve(x[0], y[0])
    if found is None:
        return
    symbol, value = found
    left, right = substitute(x[0], {symbol: value}), substitute(y[0], {symbol: value})
    assert equal(left, right)


@often
@given(expressions, expressions)
def test_an_exact_quotient_is_exact(x: tuple, y: tuple) -> None:
    q = exact_div(x[0], y[0])
    if q is not None:
        assert all(evaluate(q, at) * y[1](at) == x[1](at) for at in POINTS if y[1](at))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (floordiv(N - 1, 2) + 1, floordiv(N + 1, 2)),
        (floordiv(2 * N, 4), floordiv(N, 2)),
        (floordiv(2 * N + 1, 4), floordiv(N, 2)),
        (floordiv(3 * N, 2), N + floordiv(N, 2)),
        (floordiv(4 * N + 3, 4), N),
        (floordiv(-1, N), -1),
        (floordiv(-2, N + 1), -1),
        (floordiv(floordiv(N, 2), 3), floordiv(N, 6)),
        (
            floordiv(floordiv(N - 1, 2) + 1 - 1, 2) + 1,
            floordiv(N + 3, 4),
        ),  # two convolutions of stride 2, kernel 3, pad 1
        (floordiv(M * N, 2 * M), floordiv(N, 2)),
        (floordiv(M * N + K * M, M), N + K),
        (mod(N + 5, 5), mod(N, 5)),
        (mod(mod(N, 6), 3), mod(N, 3)),
        (dmax(N, M), dmax(M, N)),
        (dmax(N, N + M), N + M),
        (dmin(N, N + K), N),
        (dmax(N - floordiv(N, 2), 0), N - floordiv(N, 2)),
        (floordiv(mod(N, 3), 3), 0),
        (floordiv(N, N + 1), 0),
        (product((N, 2, M)), 2 * M * N),
        (N - floordiv(3 * N, 4), floordiv(N + 3, 4)),
        (N - floordiv(N, 2), floordiv(N + 1, 2)),
        (N - 8 * floordiv(N, 8), mod(N, 8)),
        (2 * floordiv(N, 2) + mod(N, 2), N),
        (floordiv(N, 2) * M + M * mod(N, 2), floordiv(N + 1, 2) * M),
        (simplest((N + 1) * (N - 1)), N * N - 1),
    ],
    ids=str,
)
def test_the_same_size_written_in_two_ways_is_equal(a: Dim, b: Dim) -> None:
    assert equal(a, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (N + 1, N),
        (2 * N, 3),
        (N + M, 1),
        (2 * N + 4 * M, 7),
        (mod(N, 3), 3),
        (K, -1),
        (2 * floordiv(N, 2) + 1, 2 * floordiv(N + 1, 2)),
    ],
)
def test_what_is_never_equal_is_said_to_differ(a: Dim, b: Dim) -> None:
    assert not equal(a, b)


@pytest.mark.parametrize(("a", "b"), [(N, 3), (N, M), (K, 0), (floordiv(N, 2), 0), (dmax(N, 4), 4), (N * M, N)])
def test_what_depends_on_the_sizes_is_inconclusive(a: Dim, b: Dim) -> None:
    with pytest.raises(InconclusiveDim, match="depends on the sizes"):
        equal(a, b)
    assert maybe_equal(a, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (N, 1), (K, 0), (N + 2, 3), (N, floordiv(N, 2)), (2 * floordiv(N, 2) + 1, N), (dmax(N, M), M), (N, dmin(N, M)),
        (N, mod(N, 4)),
        (3, mod(N, 4)), (N * M, N), (floordiv(N + 1, 2), floordiv(N, 2)),
    ],
)  # fmt: skip
def test_known_orders(a: Dim, b: Dim) -> None:
    assert at_least(a, b)


def test_an_order_that_holds_with_equality_only_is_not_denied() -> None:
    with pytest.raises(InconclusiveDim):
        at_least(N, dmax(N, M))  # equal where N is the larger
    with pytest.raises(InconclusiveDim):
        at_least(dmin(N, M), N)


@pytest.mark.parametrize(
    "name", ["batch size", "max", "in", "lambda", "it's", 'say "n"', "N", "E", "I", "é", "1x", "a\\b", "inf"]
)
def test_a_name_of_any_letters_round_trips(name: str) -> None:
    assert parse(show(dim(name))) == dim(name)
    assert parse(show(2 * dim(name) + 1)) == 2 * dim(name) + 1


@pytest.mark.parametrize("text", ["N +", "f(N)", "N.x", "[N]", "1.5", "N if M else 2", "__import__('os')", "N @ M", ""])
def test_text_that_is_no_dim_is_refused(text: str) -> None:
    with pytest.raises(DimError):
        parse(text)


def test_errors() -> None:
    with pytest.raises(DimError, match="no size given"):
        evaluate(N + 1, {})
    with pytest.raises(DimError, match="divided by 0"):
        floordiv(N, 0)
    with pytest.raises(DimError, match="divided by 0"):
        mod(N, 0)
    with pytest.raises(DimError, match="no whole number"):
        simplest(2.5)


def test_whole_numbers_of_other_kinds_are_ints() -> None:
    for d in (np.int64(3), sympy.Integer(3), 3.0, True + 2):
        assert type(simplest(d)) is int
        assert simplest(d) == 3


def test_ints_never_enter_sympy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dims, "sympy", SimpleNamespace(Expr=sympy.Expr))  # any other use of sympy is an AttributeError
    for i in range(1, 10_001):
        assert equal(i, i)
        assert not equal(i, i + 1)
        assert at_least(i + 1, i)
        assert floordiv(i, 3) * 3 + mod(i, 3) == i
        assert dmax(i, 7) >= dmin(i, 7)
        assert product((i, 2, 3)) == 6 * i
        assert exact_div(2 * i, 2) == i
        assert ceildiv(i, 1) == i
        assert show(i) == str(i)
        assert simplest(i) == i
        assert substitute(i, {}) == i


def test_structural_equality_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = floordiv(N + 3, 2) * M, floordiv(N + 3, 2) * M
    monkeypatch.setattr(dims, "_expand", None)
    monkeypatch.setattr(dims, "_lower", None)
    assert equal(a, b)
    assert dims.same_shape((a, 3, N), (b, 3, N))
