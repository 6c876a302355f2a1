"""Dims: an `int`, or a sympy expression over positive integer symbols.

The only module that compares dims. A comparison has three answers: yes, no, or `InconclusiveDim`; it is never guessed.
Ints stay ints and structural equality is tried first, so static graphs never enter sympy.
"""

from __future__ import annotations

import ast
import json
import keyword
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import sympy
from sympy.printing.precedence import PRECEDENCE
from sympy.printing.str import StrPrinter

from .errors import DimError, InconclusiveDim

__all__ = [
    "Dim", "Shape", "at_least", "ceildiv", "dim", "dmax", "dmin", "equal", "evaluate", "exact_div", "floordiv", "is_dim", "is_one",
    "is_static", "is_zero", "maybe_equal", "mod", "parse", "product", "quote", "same_shape", "show", "show_shape", "simplest", "solve",
    "substitute", "symbols", "unquote", "walk",
]  # fmt: skip

Dim = int | sympy.Expr
Shape = tuple[Dim, ...]


class FloorDiv(sympy.Function):  # type: ignore[misc]
    """`floor(a / b)` of integers, `b > 0`."""

    nargs = 2
    precedence = PRECEDENCE["Add"]  # printed in parentheses inside products
    is_integer = True

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if a.is_Integer and b.is_Integer:
            return sympy.Integer(int(a) // int(b))
        if b == 1:
            return a
        if (q := _exact(a, b)) is not None:
            return q
        if isinstance(a, FloorDiv):
            return FloorDiv(a.args[0], a.args[1] * b)
        if b.is_Integer and a.is_Add:  # (b*x + y) // b == x + y // b, of the constant term its quotient too
            whole = {t: q for t in a.args if (q := _exact(t, b)) is not None}
            constant = next((t for t in a.args if t.is_Integer and t not in whole and not 0 <= t < b), None)
            if constant is not None:
                whole[constant] = sympy.Integer(int(constant) // int(b))
            if whole:
                rest = a - sympy.Add(*whole) + (0 if constant is None else int(constant) % int(b))
                return sympy.Add(*whole.values()) + FloorDiv(rest, b)
            inner = [t for t in a.args if isinstance(t, FloorDiv)]
            if len(inner) == 1 and all(t.is_Integer for t in a.args if t is not inner[0]):  # (x // c + n) // b == (x + n*c) // (b*c)
                x, c = inner[0].args
                return FloorDiv(sympy.expand(x + (a - inner[0]) * c), b * c)
        return None

    def _eval_is_nonnegative(self) -> bool | None:
        return True if _lower(self.args[0]) is not None and (_lower(self.args[0]) or 0) >= 0 else None


class Mod(sympy.Function):  # type: ignore[misc]
    """`a - b * floor(a / b)` of integers, `b > 0`."""

    nargs = 2
    precedence = PRECEDENCE["Add"]  # printed in parentheses inside products
    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if a.is_Integer and b.is_Integer:
            return sympy.Integer(int(a) % int(b))
        if _exact(a, b) is not None:
            return sympy.Integer(0)
        return None


class DimMax(sympy.Function):  # type: ignore[misc]
    """The larger of two dims."""

    nargs = 2
    is_integer = True

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        order = _order(a, b)
        return None if order is None else (a if order >= 0 else b)


class DimMin(sympy.Function):  # type: ignore[misc]
    """The smaller of two dims."""

    nargs = 2
    is_integer = True

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        order = _order(a, b)
        return None if order is None else (b if order >= 0 else a)


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
            return int(d) if d.is_Integer else d
        return d
    return int(d)


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
            if factor.is_Integer or factor.is_Symbol or isinstance(factor, FloorDiv | Mod | DimMax | DimMin):
                continue
            if factor.is_Pow and factor.exp.is_Integer and factor.exp > 0:
                continue
            return False
    return True


@lru_cache(maxsize=65536)
def _lower(d: sympy.Expr) -> int | None:
    """A lower bound of `d`, or None. Exact for a polynomial whose coefficients in `symbol - least` have one sign."""
    d = sympy.sympify(d)
    if d.is_Integer:
        return int(d)
    shift: dict[sympy.Basic, sympy.Expr] = {}
    for atom in d.atoms(sympy.Symbol, FloorDiv, Mod, DimMax, DimMin):
        if atom.is_Symbol:
            if atom.is_positive:
                shift[atom] = sympy.Dummy(nonnegative=True) + 1
            else:
                shift[atom] = sympy.Dummy(nonnegative=True)
            continue
        if atom == d:
            return _lower_of_function(d)
        low = _lower_of_function(atom)
        if low is None:
            shift[atom] = sympy.Dummy(real=True)
        else:
            shift[atom] = sympy.Dummy(nonnegative=True) + low
    outer = [
        a for a in shift if not any(a != o and not o.is_Symbol and o.has(a) and not _outside(d, a, o) for o in shift)
    ]
    moved = sympy.expand(d.xreplace({a: shift[a] for a in outer}))
    total = 0
    for term in sympy.Add.make_args(moved):
        if term.is_Integer:
            total += int(term)
        elif not term.is_nonnegative:
            return None
    return total


def _outside(d: sympy.Expr, inner: sympy.Basic, outer: sympy.Basic) -> bool:
    return bool(d.xreplace({outer: sympy.Dummy()}).has(inner))


def _lower_of_function(d: sympy.Expr) -> int | None:
    if isinstance(d, Mod):
        return 0
    a, b = (_lower(x) for x in d.args)
    match d:
        case FloorDiv():
            if a is None:
                return None
            return a // int(d.args[1]) if d.args[1].is_Integer else (0 if a >= 0 else None)
        case DimMax():
            return max((x for x in (a, b) if x is not None), default=None)
        case DimMin():
            return None if a is None or b is None else min(a, b)
    return None


def _order(a: sympy.Expr, b: sympy.Expr) -> int | None:
    """1 where `a >= b` always, -1 where `a < b` always, None where it depends."""
    if a == b:
        return 1
    difference = _expand(a - b)
    low = _lower(difference)
    if low is not None and low >= 0:
        return 1
    for piece, other, sign in ((a, b, 1), (b, a, -1)):
        if isinstance(piece, DimMax) and other in piece.args:
            return sign
        if isinstance(piece, DimMin) and other in piece.args:
            return None if sign == 1 else 1
    high = _lower(_expand(-difference))
    if high is not None and high > 0:
        return -1
    return None


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
    if (low is not None and low > 0) or (high is not None and high > 0):
        return False
    raise InconclusiveDim(f"whether {show(a)} == {show(b)} depends on the sizes")


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
    order = _order(sympy.sympify(a), sympy.sympify(b))
    if order is None:
        raise InconclusiveDim(f"whether {show(a)} >= {show(b)} depends on the sizes")
    return order >= 0


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
    q = simplest(FloorDiv(a, b))
    if isinstance(q, sympy.Expr) and isinstance(b, int):
        q = simplest(q.replace(_small_quotient, lambda _: sympy.Integer(0)))
    return q


def _small_quotient(d: sympy.Basic) -> bool:
    return isinstance(d, FloorDiv) and d.args[0].is_Integer and d.args[1].is_Integer and 0 <= d.args[0] < d.args[1]


def ceildiv(a: Dim, b: Dim) -> Dim:
    """`ceil(a / b)`."""
    return floordiv(simplest(a + b - 1), b)


def mod(a: Dim, b: Dim) -> Dim:
    """`a - b * floor(a / b)`."""
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    return simplest(Mod(a, b))


def exact_div(a: Dim, b: Dim) -> Dim | None:
    """`a / b` where `b` divides `a` for every assignment, else None.

    >>> exact_div(6 * dim("N"), 3), exact_div(dim("N"), 3)
    (2*N, None)
    """
    if isinstance(a, int) and isinstance(b, int):
        return None if b == 0 or a % b else a // b
    q = _exact(sympy.sympify(a), sympy.sympify(b))
    return None if q is None else simplest(q)


def dmax(a: Dim, b: Dim) -> Dim:
    """The larger of two dims, symbolic where it depends."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return simplest(DimMax(a, b))


def dmin(a: Dim, b: Dim) -> Dim:
    """The smaller of two dims, symbolic where it depends.

    >>> dmin(dim("N") + 4, 3)
    3
    """
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return simplest(DimMin(a, b))


def solve(a: Dim, b: Dim) -> tuple[sympy.Symbol, Dim] | None:
    """A symbol and what it must be for `a == b`, or None where no symbol stands alone with a whole solution.

    >>> solve(dim("M"), dim("N")), solve(2 * dim("N"), 6)
    ((N, M), (N, 3))
    """
    difference = sympy.expand(sympy.sympify(a) - sympy.sympify(b))
    for symbol in sorted(difference.free_symbols, key=lambda s: s.name, reverse=True):
        inside = any(f.has(symbol) for f in difference.atoms(FloorDiv, Mod, DimMax, DimMin))
        if inside or sympy.degree(difference, symbol) != 1:
            continue
        slope = difference.coeff(symbol, 1)
        value = _exact(sympy.expand(-(difference - slope * symbol)), slope)
        if value is not None and ((low := _lower(value)) is not None and low >= (1 if symbol.is_positive else 0)):
            return symbol, simplest(value)
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


class _Printer(StrPrinter):  # type: ignore[misc]
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
    return str(d) if isinstance(d, int) else str(_printer.doprint(d))


def show_shape(shape: Sequence[Dim]) -> str:
    """A shape as text: `[N, 4]`."""
    return "[" + ", ".join(map(show, shape)) + "]"


def parse(text: str) -> Dim:
    """The dim that `show` printed. Nothing is evaluated: names become symbols.

    >>> parse("2*N + M//3")
    2*N + FloorDiv(M, 3)
    """
    try:
        return _from_ast(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError) as error:
        raise DimError(f"not a dim: {text!r}") from error


def _from_ast(node: ast.expr) -> Dim:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Constant(value=str(value)):
            return dim(value)
        case ast.Name(id=name):
            return dim(name)
        case ast.UnaryOp(op=ast.USub(), operand=x):
            return simplest(-_from_ast(x))
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _from_ast(left), _from_ast(right)
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
            return dmax(_from_ast(x), _from_ast(y))
        case ast.Call(func=ast.Name(id="min"), args=[x, y]):
            return dmin(_from_ast(x), _from_ast(y))
    raise DimError(f"not a dim: {ast.unparse(node)!r}")


def walk(value: object) -> Iterator[sympy.Expr]:
    """Every symbolic dim inside a parameter value (nested tuples)."""
    if isinstance(value, sympy.Expr):
        yield value
    elif isinstance(value, tuple):
        for x in value:
            yield from walk(x)
