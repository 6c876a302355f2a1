"""Dims: an `int`, or a sympy expression over positive integer symbols.

The only module that compares dims. A comparison has three answers: yes, no, or `InconclusiveDim`; it is never guessed.
Ints stay ints and structural equality is tried first, so static graphs never enter sympy.
"""

from __future__ import annotations

import ast
import json
import keyword
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
from sympy.core.sorting import default_sort_key
from sympy.printing.precedence import PRECEDENCE
from sympy.printing.str import StrPrinter

from .errors import DimError, InconclusiveDim

__all__ = [
    "Dim", "Shape", "assuming", "at_least", "ceildiv", "dim", "dmax", "dmin", "equal", "evaluate", "exact_div",
    "floordiv", "is_dim", "is_one", "is_static", "is_zero", "lowest_terms", "maybe_equal", "mod", "parse", "product", "quote",
    "same_shape", "show", "show_shape", "simplest", "solve", "solve_atom", "substitute", "symbols", "unquote",
    "walk",
]  # fmt: skip

Dim: TypeAlias = int | sympy.Expr
Shape = tuple[Dim, ...]


class FloorDiv(sympy.Function):
    """`floor(a / b)` of integers, `b > 0`.

    For an integer b in one form: the coefficients of a lie in `0 .. b - 1` and have no divisor in common with b, and
    quotients of quotients are one quotient. So equal sizes that were written in different ways are seen to be equal.
    """

    nargs = 2
    precedence = PRECEDENCE["Add"]  # printed in parentheses inside products
    is_integer = True

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if b == 0:
            raise DimError(f"{show(a)} is divided by 0")
        if a.is_Integer and b.is_Integer:
            return sympy.Integer(int(a) // int(b))
        if (q := _exact(a, b)) is not None:
            return q
        if isinstance(a, FloorDiv):
            return FloorDiv(a.args[0], a.args[1] * b)
        if b.is_Integer and b > 0:
            found = _canonical_quotient(a, int(b))
        else:
            found = _split_quotient(a, b)
        if found is None and _within(a, b):
            return sympy.Integer(0)
        if found is None and a.is_Integer and a < 0 and _within(_expand(a + b), b):
            return sympy.Integer(-1)
        return found

    def _eval_is_nonnegative(self) -> bool | None:
        low = _lower(self)
        return True if low is not None and low >= 0 else None


class Mod(sympy.Function):
    """`a - b * floor(a / b)` of integers, `b > 0`; for an integer b the coefficients of a lie in `0 .. b - 1`."""

    nargs = 2
    precedence = PRECEDENCE["Add"]  # printed in parentheses inside products
    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if b == 0:
            raise DimError(f"{show(a)} is divided by 0")
        if a.is_Integer and b.is_Integer:
            return sympy.Integer(int(a) % int(b))
        if _exact(a, b) is not None:
            return sympy.Integer(0)
        if isinstance(a, Mod) and _exact(a.args[1], b) is not None:
            return Mod(a.args[0], b)
        if b.is_Integer and b > 0 and (terms := _integer_terms(a)) is not None:
            n = int(b)
            reduced = {m: c % n for m, c in terms.items() if c % n}
            common = math.gcd(n, *reduced.values())
            if reduced != terms or common > 1:
                return common * Mod(
                    sympy.Add(*(c // common * m for m, c in reduced.items())), sympy.Integer(n // common)
                )
        return a if _within(a, b) else None


class DimMax(sympy.Function):
    """The larger of two dims."""

    nargs = 2
    is_integer = True

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if _never_less(a, b):
            return a
        if _never_less(b, a):
            return b
        return DimMax(b, a) if default_sort_key(a) > default_sort_key(b) else None

    def _eval_is_nonnegative(self) -> bool | None:
        low = _lower(self)
        return True if low is not None and low >= 0 else None


class DimMin(sympy.Function):
    """The smaller of two dims."""

    nargs = 2
    is_integer = True

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if _never_less(a, b):
            return b
        if _never_less(b, a):
            return a
        return DimMin(b, a) if default_sort_key(a) > default_sort_key(b) else None

    def _eval_is_nonnegative(self) -> bool | None:
        low = _lower(self)
        return True if low is not None and low >= 0 else None


_FUNCTIONS = (FloorDiv, Mod, DimMax, DimMin)


def _integer_terms(a: sympy.Expr) -> dict[sympy.Expr, int] | None:
    """`{monomial: coefficient}` of a polynomial with integer coefficients (the constant is that of 1), or None."""
    terms: dict[sympy.Expr, int] = {}
    for term in sympy.Add.make_args(_expand(a)):
        coefficient, monomial = term.as_coeff_Mul()
        if not coefficient.is_Integer:
            return None
        terms[monomial] = terms.get(monomial, 0) + int(coefficient)
    return terms


def _canonical_quotient(a: sympy.Expr, b: int) -> sympy.Expr | None:
    """`floor(a / b)` with whole parts outside and common divisors gone; None where it is so already."""
    terms = _integer_terms(a)
    if terms is None:
        return None
    one = sympy.Integer(1)
    whole = sympy.Add(*(c // b * m for m, c in terms.items()))
    rest = {m: c % b for m, c in terms.items() if c % b}
    constant = rest.pop(one, 0)
    common = math.gcd(b, *rest.values()) if rest else b
    divisor = b // common
    inner = {m: c // common for m, c in rest.items()}
    if len(inner) == 1:
        (monomial, coefficient), *_ = inner.items()
        if coefficient == 1 and isinstance(monomial, FloorDiv) and monomial.args[1].is_Integer:
            below = monomial.args[1]
            return whole + FloorDiv(monomial.args[0] + constant // common * below, below * divisor)
    if whole == 0 and common == 1:
        return None
    left = sympy.Add(*(c * m for m, c in inner.items()), constant // common)
    return whole + (FloorDiv(left, sympy.Integer(divisor)) if divisor > 1 else left)


def _split_quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """`floor(a / b)` for a symbolic b: terms that b divides outside, common factors gone; None where there are none."""
    whole = [t for t in sympy.Add.make_args(a) if _exact(t, b) is not None]
    if whole and a.is_Add:
        return sympy.Add(*(_exact(t, b) for t in whole)) + FloorDiv(_expand(a - sympy.Add(*whole)), b)
    top, bottom = _cancelled(a, b)
    low = _lower(bottom)
    return FloorDiv(top, bottom) if bottom != b and low is not None and low >= 1 else None


@lru_cache(maxsize=65536)
def _cancelled(a: sympy.Expr, b: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    top, bottom = sympy.fraction(sympy.cancel(a / b))
    return _expand(top), _expand(bottom)


def _within(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Whether `0 <= a < b` always."""
    low = _lower(a)
    return low is not None and low >= 0 and _never_less(b, a + 1)


def _never_less(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Whether `a >= b` is known to hold always."""
    if a == b:
        return True
    low = _lower(_expand(a - b))
    return low is not None and low >= 0


def dim(name: str, least: int = 1) -> sympy.Symbol:
    """The symbolic dim called `name`, a positive integer (or, where a size may be empty, `least=0`).

    >>> dim("N") * 2 + 1
    2*N + 1
    """
    if least:
        return sympy.Symbol(name, integer=True, positive=True)
    return sympy.Symbol(name, integer=True, nonnegative=True)


def is_dim(d: object) -> bool:
    """Whether `d` can be a dim: an int, or a sympy expression."""
    return isinstance(d, int | sympy.Expr) and not isinstance(d, bool)


def simplest(d: Any) -> Dim:
    """`d` as an `int` where it is one (numpy and sympy integers too), else as an expanded expression."""
    if isinstance(d, int):
        return int(d)
    if isinstance(d, sympy.Expr):
        if d.is_Integer:
            return int(d)
        if d.is_Add or d.is_Mul or d.is_Pow:
            d = _expand(d)
        if _assumed:
            d = _under_assumptions(d)
        return int(d) if d.is_Integer else d
    whole = int(d)
    if whole != d:
        raise DimError(f"{d!r} is no whole number")
    return whole


_assumed: Mapping[sympy.Expr, sympy.Expr] = {}


@contextmanager
def assuming(rewrites: Mapping[sympy.Expr, sympy.Expr]) -> Iterator[None]:
    """Take each left expression (a quotient, a minimum, ...) to be the right one.

    It is what a model forces where no symbol can be solved for.

    >>> N = dim("N")
    >>> with assuming({dmin(N, 512): N}):
    ...     equal(dmin(N, 512), N)
    True
    """
    global _assumed
    before, _assumed = _assumed, rewrites
    try:
        yield
    finally:
        _assumed = before


def _under_assumptions(d: sympy.Expr) -> sympy.Expr:
    for _ in range(8):  # a rewrite may bring in what another takes away
        moved = _multiples(d.xreplace(_assumed))
        if moved == d:
            return d
        d = _expand(moved)
    return d


def _multiples(d: sympy.Expr) -> sympy.Expr:
    """`d` with what is assumed of a multiple, `2*(N//2)`, put into the terms that hold it, `6*M*(N//2)`."""
    for left, right in _assumed.items():
        times, atom = left.as_coeff_Mul()
        if times == 1 or not d.has(atom):
            continue
        terms = [t.as_coeff_Mul() for t in sympy.Add.make_args(d)]
        d = sympy.Add(
            *(
                c // times * m / atom * right if atom in sympy.Mul.make_args(m) and c % times == 0 else c * m
                for c, m in terms
            )
        )
    return d


@lru_cache(maxsize=65536)
def _expand(d: sympy.Expr) -> sympy.Expr:
    return sympy.expand(d)


@lru_cache(maxsize=65536)
def _exact(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    if b == 0:
        return None
    q = _expand(a / b)
    if _whole(q):
        return q
    if b.is_Number or not (a.is_Add or b.is_Add):
        return None
    q = _expand(sympy.cancel(a / b))
    return q if _whole(q) else None


def _whole(q: sympy.Expr) -> bool:
    """Whether `q` is a polynomial with integer coefficients."""
    for term in sympy.Add.make_args(q):
        for factor in sympy.Mul.make_args(term):
            if factor.is_Integer or factor.is_Symbol or isinstance(factor, _FUNCTIONS):
                continue
            if factor.is_Pow and factor.exp.is_Integer and factor.exp > 0:
                continue
            return False
    return True


@lru_cache(maxsize=65536)
def _lower(d: sympy.Expr) -> int | sympy.Rational | None:
    """A lower bound of an expression, or None; often, but not always, the greatest. Of a whole number it is whole."""
    d = sympy.sympify(d)
    bound = _bound(d)
    if bound is None or _integer_terms(d) is None:  # sizes on their way through floats are fractions
        return bound
    return int(sympy.ceiling(bound))


@lru_cache(maxsize=65536)
def _bound(d: sympy.Expr) -> sympy.Rational | None:
    """A lower bound of an expression with rational coefficients, or None.

    One function (`//`, `%`, max, min) after the other is replaced by what bounds it; then every symbol by its least
    value and a rest, of which the polynomial must have no negative coefficient.
    """
    functions = _outermost(d)
    if not functions:
        return _bound_of_polynomial(d)
    f = functions[0]
    slope = d.coeff(f, 1)
    rest = _expand(d - slope * f)
    if rest.has(f) or slope.has(f) or len(functions) > 6:
        return _bound_of_polynomial(d)
    if (low := _bound(slope)) is not None and low >= 0:
        return _best(f, slope, rest, above=False)
    if (high := _bound(_expand(-slope))) is not None and high >= 0:
        return _best(f, slope, rest, above=True)
    return None


def _best(f: sympy.Expr, slope: sympy.Expr, rest: sympy.Expr, *, above: bool) -> sympy.Rational | None:
    """A lower bound of `slope * f + rest` from bounds of f: from `above` where the slope is negative."""

    def at(value: sympy.Expr) -> sympy.Rational | None:
        return _bound(_expand(slope * value + rest))

    a, b = f.args
    if isinstance(f, DimMax if above else DimMin):  # it is one of the two: the worse counts
        worse = [x for x in (at(a), at(b)) if x is not None]
        return min(worse) if len(worse) == 2 else None
    if isinstance(f, DimMin if above else DimMax):  # no larger (smaller) than either: the better counts
        return _largest([at(a), at(b)])
    positive = (low := _lower(a)) is not None and low >= 0
    if isinstance(f, Mod):
        return _largest([at(b - 1), at(a) if positive else None]) if above else at(sympy.Integer(0))
    if above:
        return _largest([at(a / b) if b.is_Integer else None, at(a) if positive else None])
    return _largest([at((a - b + 1) / b) if b.is_Integer else None, at(sympy.Integer(0)) if positive else None])


def _largest(bounds: Sequence[sympy.Rational | None]) -> sympy.Rational | None:
    return max((x for x in bounds if x is not None), default=None)


def _outermost(d: sympy.Expr) -> list[sympy.Expr]:
    """The functions in an expression that stand in no other, in a fixed order."""
    found = d.atoms(*_FUNCTIONS)
    inner = {g for f in found for argument in f.args for g in argument.atoms(*_FUNCTIONS)}
    direct = [f for f in found if f not in inner or _stands_alone(d, f)]
    return sorted(direct, key=default_sort_key)


def _stands_alone(d: sympy.Expr, f: sympy.Expr) -> bool:
    return any(f in sympy.Mul.make_args(t) or t.has(sympy.Pow(f, 2)) for t in sympy.Add.make_args(d))


def _bound_of_polynomial(d: sympy.Expr) -> sympy.Rational | None:
    shift: dict[sympy.Basic, sympy.Expr] = {s: _rest(s) + (1 if s.is_positive else 0) for s in d.free_symbols}
    for f in d.atoms(*_FUNCTIONS):
        low = 0 if isinstance(f, Mod) else None if f == d else _lower(f)
        if low is None:
            return None
        shift[f] = _rest(f) + low
    total = sympy.Integer(0)
    for term in sympy.Add.make_args(sympy.expand(d.xreplace(shift))):
        if term.is_Rational:
            total += term
        elif term.as_coeff_Mul()[0].is_negative:
            return None
    return total


@lru_cache(maxsize=65536)
def _rest(atom: sympy.Basic) -> sympy.Dummy:
    """What an atom exceeds its least value by."""
    return sympy.Dummy(nonnegative=True)


def equal(a: Dim, b: Dim) -> bool:
    """Whether `a == b` for every assignment of the symbols; raise `InconclusiveDim` if it depends.

    >>> equal(dim("N") + dim("N"), 2 * dim("N"))
    True
    >>> equal(dim("N") + 1, dim("N"))
    False
    >>> equal(dim("N"), 3)
    Traceback (most recent call last):
    pullback.algebra.errors.InconclusiveDim: whether N == 3 depends on the sizes
    """
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if a is b or a == b:
        return True
    difference = simplest(a - b)
    if isinstance(difference, int):
        return difference == 0
    low, high = _lower(difference), _lower(_expand(-difference))
    if low == 0 and high == 0:
        return True
    if (low is not None and low > 0) or (high is not None and high > 0) or _never_zero(difference):
        return False
    cases = _cases(difference)
    if cases and all(case == 0 for case in cases):
        return True
    if cases and all(_positive(case) or _positive(_expand(-case)) for case in cases):
        return False
    error = InconclusiveDim(f"whether {show(a)} == {show(b)} depends on the sizes")
    error.sides = a, b
    raise error


def _positive(d: sympy.Expr) -> bool:
    low = _lower(d)
    return low is not None and low > 0


_MOST_CASES, _MOST_WORK = 64, 1500  # cases, and operations in all of them


@lru_cache(maxsize=4096)
def _cases(d: sympy.Expr) -> tuple[sympy.Expr, ...]:
    """What `d` is for each remainder of its symbols by the divisors in it, where they are known and few; else nothing.

    With `N = 4*k + r` every `//4` and `%4` of N is a polynomial in k, so that `N - 3*N//4` is seen to be `(N + 3)//4`.
    """
    periods: dict[sympy.Symbol, int] = {}
    for f in d.atoms(FloorDiv, Mod):
        period = _period(f)
        if period is None:
            return ()
        for s in f.free_symbols:
            periods[s] = math.lcm(periods.get(s, 1), period)
    count = math.prod(periods.values())
    if not periods or count > _MOST_CASES or count * d.count_ops() > _MOST_WORK:
        return ()
    found = [d]
    for s, period in periods.items():
        places = []
        for r in range(period):
            k = sympy.Symbol(
                f"_{s.name}", integer=True, **{"positive" if r == 0 and s.is_positive else "nonnegative": True}
            )
            places.append(period * k + r)
        found = [_expand(case.subs(s, place)) for case in found for place in places]
    return tuple(found)


def _period(f: sympy.Expr) -> int | None:
    """The period in its symbols of what a quotient or remainder leaves, or None where a divisor is no number."""
    if not f.args[1].is_Integer:
        return None
    period = 1
    for g in f.args[0].atoms(FloorDiv, Mod):
        inner = _period(g)
        if inner is None:
            return None
        period = math.lcm(period, inner)
    return period * int(f.args[1])


def _never_zero(d: sympy.Expr) -> bool:
    """Whether divisibility alone says that `d` is not 0, as of `2*N + 1`."""
    terms = _integer_terms(d)
    if terms is None:
        return False
    constant = terms.pop(sympy.Integer(1), 0)
    common = math.gcd(*terms.values())
    return common > 1 and constant % common != 0


def maybe_equal(a: Dim, b: Dim) -> bool:
    """Whether some assignment of the symbols makes `a == b`: equal, or inconclusive."""
    try:
        return equal(a, b)
    except InconclusiveDim:
        return True


def at_least(a: Dim, b: Dim) -> bool:
    """Whether `a >= b` for every assignment; raise `InconclusiveDim` if it depends.

    >>> at_least(dim("N") + 2, 3)
    True
    """
    if isinstance(a, int) and isinstance(b, int):
        return a >= b
    low = _lower(_expand(sympy.sympify(a) - sympy.sympify(b)))
    if low is not None and low >= 0:
        return True
    high = _lower(_expand(sympy.sympify(b) - sympy.sympify(a)))
    if high is not None and high > 0:
        return False
    cases = _cases(_expand(sympy.sympify(a) - sympy.sympify(b)))
    if cases and all((low := _lower(case)) is not None and low >= 0 for case in cases):
        return True
    if cases and all(_positive(_expand(-case)) for case in cases):
        return False
    raise InconclusiveDim(f"whether {show(a)} >= {show(b)} depends on the sizes")


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes are equal; raise `InconclusiveDim` if it depends.

    >>> same_shape((2, dim("N")), (2, dim("N")))
    True
    """
    return a is b or (len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True)))


def is_static(shape: Iterable[Dim]) -> bool:
    """Whether every dim is an int."""
    return all(isinstance(d, int) for d in shape)


def is_one(d: Dim) -> bool:
    """Whether a dim is the int 1. A symbol is not 1 when broadcasting."""
    return isinstance(d, int) and d == 1


def is_zero(d: Dim) -> bool:
    """Whether a dim is the int 0."""
    return isinstance(d, int) and d == 0


def product(shape: Iterable[Dim]) -> Dim:
    """The number of elements of a shape.

    >>> product((2, dim("N"), 3))
    6*N
    """
    known, rest = 1, []
    for d in shape:
        if isinstance(d, int):
            known *= d
        else:
            rest.append(d)
    return simplest(sympy.Mul(known, *rest)) if rest and known else known


def floordiv(a: Dim, b: Dim) -> Dim:
    """`floor(a / b)`.

    >>> floordiv(4 * dim("N") + 3, 4), floordiv(7, 2)
    (N, 3)
    """
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if isinstance(b, int) and b < 0:
        a, b = -a, -b
    return simplest(FloorDiv(simplest(a), simplest(b)))


def ceildiv(a: Dim, b: Dim) -> Dim:
    """`ceil(a / b)`."""
    return floordiv(simplest(a + b - 1), b)


def mod(a: Dim, b: Dim) -> Dim:
    """`a - b * floor(a / b)`."""
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    return simplest(Mod(simplest(a), simplest(b)))


def exact_div(a: Dim, b: Dim) -> Dim | None:
    """`a / b` where `b` divides `a` for every assignment, else None.

    >>> exact_div(6 * dim("N"), 3), exact_div(dim("N"), 3)
    (2*N, None)
    """
    if isinstance(a, int) and isinstance(b, int):
        return None if b == 0 or a % b else a // b
    q = _exact(sympy.sympify(a), sympy.sympify(b))
    return None if q is None else simplest(q)


def lowest_terms(a: Dim, b: Dim) -> tuple[Dim, Dim]:
    """The two without their common factors.

    >>> lowest_terms(dim("C") * dim("N"), 2 * dim("N"))
    (C, 2)
    """
    factor = simplest(sympy.gcd(sympy.sympify(a), sympy.sympify(b)))
    left, right = exact_div(a, factor), exact_div(b, factor)
    return (a, b) if left is None or right is None else (left, right)


def dmax(a: Dim, b: Dim) -> Dim:
    """The larger of two dims, symbolic where it depends."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return simplest(DimMax(simplest(a), simplest(b)))


def dmin(a: Dim, b: Dim) -> Dim:
    """The smaller of two dims, symbolic where it depends.

    >>> dmin(dim("N") + 4, 3)
    3
    """
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return simplest(DimMin(simplest(a), simplest(b)))


def solve(a: Dim, b: Dim) -> tuple[sympy.Symbol, Dim] | None:
    """A symbol and what it must be for `a == b`, or None where no symbol stands alone with a whole solution.

    >>> solve(dim("M"), dim("N")), solve(2 * dim("N"), 6)
    ((N, M), (N, 3))
    """
    difference = sympy.expand(sympy.sympify(a) - sympy.sympify(b))
    for symbol in sorted(difference.free_symbols, key=lambda s: s.name, reverse=True):
        inside = any(f.has(symbol) for f in difference.atoms(*_FUNCTIONS))
        if inside or sympy.degree(difference, symbol) != 1:
            continue
        slope = difference.coeff(symbol, 1)
        value = _exact(sympy.expand(-(difference - slope * symbol)), slope)
        if value is not None and ((low := _lower(value)) is not None and low >= (1 if symbol.is_positive else 0)):
            return symbol, simplest(value)
    return None


def solve_atom(a: Dim, b: Dim) -> tuple[sympy.Expr, Dim] | None:
    """A quotient, remainder, minimum or maximum in `a == b`, or a multiple of one, and what it must be; None where none stands alone.

    >>> solve_atom(dmin(dim("N"), 512), dim("N"))
    (DimMin(512, N), N)
    >>> [show(d) for d in solve_atom(dim("N"), 2 * floordiv(dim("N"), 2))]
    ['2*(N//2)', 'N']
    """
    difference = sympy.expand(sympy.sympify(a) - sympy.sympify(b))
    for term in sorted(difference.atoms(FloorDiv, Mod, DimMax, DimMin), key=lambda t: (-t.count_ops(), str(t))):
        hidden = sympy.Dummy(integer=True)
        linear = difference.xreplace({term: hidden})
        nested = any(f.has(hidden) for f in linear.atoms(*_FUNCTIONS))
        if nested or linear.has(term) or sympy.degree(linear, hidden) != 1:
            continue
        slope = linear.coeff(hidden, 1)
        if slope.is_Integer:
            value = sympy.expand(-sympy.sign(slope) * (linear - slope * hidden))
            if not value.has(term, hidden):
                return abs(slope) * term, simplest(value)
    return None


def symbols(d: object) -> set[sympy.Symbol]:
    """The symbols of a dim, or of any nesting of tuples of dims."""
    if isinstance(d, sympy.Expr):
        return set(d.free_symbols)
    if isinstance(d, tuple | list):
        return set().union(*(symbols(x) for x in d)) if d else set()
    return set()


def substitute(d: Dim, bindings: Mapping[sympy.Symbol, Dim]) -> Dim:
    """`d` with symbols replaced, all at once."""
    if isinstance(d, int) or not bindings:
        return d
    return simplest(d.subs({s: sympy.sympify(v) for s, v in bindings.items()}, simultaneous=True))


def evaluate(d: Dim, bindings: Mapping[str, int]) -> int:
    """The size of `d` where symbols have the given sizes, by name.

    >>> evaluate(2 * dim("N") + 1, {"N": 3})
    7
    """
    if isinstance(d, int):
        return d
    match d:
        case sympy.Symbol():
            if d.name not in bindings:
                raise DimError(f"no size given for the symbolic dim {show(d)}")
            return int(bindings[d.name])
        case sympy.Integer():
            return int(d)
        case sympy.Add():
            return sum(evaluate(x, bindings) for x in d.args)
        case sympy.Mul():
            return math.prod(evaluate(x, bindings) for x in d.args)
        case sympy.Pow():
            return evaluate(d.base, bindings) ** int(d.exp)
        case FloorDiv():
            return evaluate(d.args[0], bindings) // evaluate(d.args[1], bindings)
        case Mod():
            return evaluate(d.args[0], bindings) % evaluate(d.args[1], bindings)
        case DimMax():
            return max(evaluate(d.args[0], bindings), evaluate(d.args[1], bindings))
        case DimMin():
            return min(evaluate(d.args[0], bindings), evaluate(d.args[1], bindings))
    raise DimError(f"{d!r} is not a dim")


_RESERVED = frozenset({"max", "min", "inf", "nan", "true", "false", "none"})


def quote(name: str) -> str:
    """The name of a symbol as text, in single quotes where it is no plain identifier.

    >>> print(quote("batch"), quote("batch size"), quote("max"))
    batch 'batch size' 'max'
    """
    plain = name.isascii() and name.isidentifier() and not keyword.iskeyword(name) and name not in _RESERVED
    return name if plain else "'" + json.dumps(name)[1:-1].replace("'", "\\u0027").replace('\\"', '"') + "'"


def unquote(text: str) -> str:
    """The name that `quote` put in quotes."""
    name = ast.literal_eval(text)
    if not isinstance(name, str):
        raise DimError(f"not a name: {text}")
    return name


class _Printer(StrPrinter):
    def _print_Symbol(self, d: sympy.Symbol) -> str:
        return quote(d.name)

    def _print_FloorDiv(self, d: sympy.Expr) -> str:
        return self._binary("//", *d.args)

    def _print_Mod(self, d: sympy.Expr) -> str:
        return self._binary(" % ", *d.args)

    def _binary(self, operator: str, a: sympy.Expr, b: sympy.Expr) -> str:
        left, right = self.parenthesize(a, PRECEDENCE["Mul"]), self.parenthesize(b, PRECEDENCE["Mul"])
        return f"{left}{operator}{right}"

    def _print_DimMax(self, d: sympy.Expr) -> str:
        return "max({}, {})".format(*(self._print(a) for a in d.args))

    def _print_DimMin(self, d: sympy.Expr) -> str:
        return "min({}, {})".format(*(self._print(a) for a in d.args))


_printer = _Printer()


def show(d: Dim) -> str:
    """A dim as text that `parse` reads back; a name that is no identifier is quoted."""
    return str(d) if isinstance(d, int) else _shown(d)


@lru_cache(maxsize=65536)
def _shown(d: sympy.Expr) -> str:
    return str(_printer.doprint(d))


def show_shape(shape: Sequence[Dim]) -> str:
    """A shape as text: `[N, 4]`."""
    return "[" + ", ".join(map(show, shape)) + "]"


def parse(text: str, may_be_empty: Collection[str] = ()) -> Dim:
    """The dim that `show` printed.

    Nothing is evaluated: names become symbols, positive ones unless they `may_be_empty`.

    >>> parse("2*N + M//3")
    2*N + FloorDiv(M, 3)
    """
    try:
        return _from_ast(ast.parse(text.strip(), mode="eval").body, may_be_empty)
    except (SyntaxError, RecursionError) as error:
        raise DimError(f"not a dim: {text!r}") from error


def _from_ast(node: ast.expr, empty: Collection[str]) -> Dim:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Constant(value=str(value)):
            return dim(value, 0 if value in empty else 1)
        case ast.Name(id=name):
            return dim(name, 0 if name in empty else 1)
        case ast.UnaryOp(op=ast.USub(), operand=x):
            return simplest(-_from_ast(x, empty))
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _from_ast(left, empty), _from_ast(right, empty)
            match op:
                case ast.Add():
                    return simplest(a + b)
                case ast.Sub():
                    return simplest(a - b)
                case ast.Mult():
                    return simplest(a * b)
                case ast.Pow() if isinstance(b, int) and 0 <= b < 64:
                    return simplest(a**b)
                case ast.FloorDiv():
                    return floordiv(a, b)
                case ast.Mod():
                    return mod(a, b)
        case ast.Call(func=ast.Name(id="max"), args=[x, y]):
            return dmax(_from_ast(x, empty), _from_ast(y, empty))
        case ast.Call(func=ast.Name(id="min"), args=[x, y]):
            return dmin(_from_ast(x, empty), _from_ast(y, empty))
    raise DimError(f"not a dim: {ast.unparse(node)!r}")


def walk(value: object) -> Iterator[sympy.Expr]:
    """Every symbolic dim inside a parameter value (nested tuples)."""
    if isinstance(value, sympy.Expr):
        yield value
    elif isinstance(value, tuple):
        for x in value:
            yield from walk(x)
