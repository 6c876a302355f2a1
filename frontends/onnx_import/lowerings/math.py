"""Arithmetic, functions of one number, matrix products, running sums, casts and bits."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence

import numpy as np

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.dims import Dim, at_least, floordiv, is_one, simplest
from ....algebra.errors import DimError, InconclusiveDim
from ....algebra.graph import Value
from ....algebra.types import DType, bool_, f32, f64, i64
from ..broadcasting import broadcast_to, legacy, together
from ..context import Unsupported, require_equal
from ..registry import Gradient, Static, Tensors, known, lowers
from ..straight_through import real_of
from ..tensors import dtype_of_onnx

STEP = "its steps are flat"

# ---- functions of one number -----------------------------------------------------------------------------------------


def tan(x: Value) -> Value:
    """`sin(x) / cos(x)`."""
    return p.div(p.sin(x), p.cos(x))


_DIFFERENTIABLE: dict[str, Callable[[Value], Value]] = {
    "Abs": p.abs, "Acos": p.acos, "Acosh": p.acosh, "Asin": p.asin, "Asinh": p.asinh, "Atan": p.atan, "Atanh": p.atanh, "Cos": p.cos,
    "Cosh": p.cosh, "Erf": p.erf, "Exp": p.exp, "Log": p.log, "Neg": p.neg, "Reciprocal": c.reciprocal, "Sin": p.sin, "Sinh": p.sinh,
    "Sqrt": p.sqrt, "Tan": tan, "Tanh": p.tanh,
}  # fmt: skip
_STEPS: dict[str, Callable[[Value], Value]] = {"Ceil": c.ceil, "Floor": p.floor, "Round": p.round, "Sign": p.sign}

for _name, _function in _DIFFERENTIABLE.items():
    lowers(_name)(_function)
for _name, _function in _STEPS.items():
    lowers(_name, gradient=Gradient.PIECEWISE, reason=STEP)(_function)


@lowers("Identity")
def identity(input: Value | Tensors) -> Value | Tensors:
    """x"""
    return input


# ---- arithmetic of two -----------------------------------------------------------------------------------------------


@lowers("Add", since=7)
def add(a: Value, b: Value) -> Value:
    """a + b"""
    return p.add(*together(a, b))


@lowers("Sub", since=7)
def sub(a: Value, b: Value) -> Value:
    """a - b"""
    return c.sub(*together(a, b))


@lowers("Mul", since=7)
def mul(a: Value, b: Value) -> Value:
    """a * b"""
    return p.mul(*together(a, b))


@lowers("Div", since=7)
def div(a: Value, b: Value) -> Value:
    """a / b; of integers toward zero"""
    return p.div(*together(a, b))


@lowers("Add")
def add_1(a: Value, b: Value, *, axis: int | None = None, broadcast: int = 0) -> Value:
    """a + b"""
    return p.add(*legacy(a, b, broadcast, axis))


@lowers("Sub")
def sub_1(a: Value, b: Value, *, axis: int | None = None, broadcast: int = 0) -> Value:
    """a - b"""
    return c.sub(*legacy(a, b, broadcast, axis))


@lowers("Mul")
def mul_1(a: Value, b: Value, *, axis: int | None = None, broadcast: int = 0) -> Value:
    """a * b"""
    return p.mul(*legacy(a, b, broadcast, axis))


@lowers("Div")
def div_1(a: Value, b: Value, *, axis: int | None = None, broadcast: int = 0) -> Value:
    """a / b"""
    return p.div(*legacy(a, b, broadcast, axis))


@lowers("Pow", since=7)
def pow(x: Value, y: Value) -> Value:
    """x ** y in the dtype of x; an integer exponent has no gradient"""
    small = known(y) if not x.dtype.floating and y.dtype.integral else None
    if small is not None and small.dtype != object and small.size == 1 and 0 <= int(small.reshape(-1)[0]) <= 64:
        return p.reshape(_integer_power(x, int(small.reshape(-1)[0])), shape=together(x, y)[0].shape)
    x_, y_ = together(x, y)
    if x.dtype.floating:
        return p.pow(x_, p.cast(y_, dtype=x.dtype))
    return p.cast(p.pow(p.cast(x_, dtype=f64), p.cast(y_, dtype=f64)), dtype=x.dtype)


@lowers("Pow")
def pow_1(x: Value, y: Value, *, axis: int | None = None, broadcast: int = 0) -> Value:
    """x ** y"""
    return p.pow(*legacy(x, y, broadcast, axis))


def _integer_power(x: Value, exponent: int) -> Value:
    """`x ** exponent` by squaring, exact in integers."""
    result: Value | None = None
    while exponent:
        if exponent & 1:
            result = x if result is None else p.mul(result, x)
        exponent >>= 1
        x = p.mul(x, x) if exponent else x
    return p.number(1, x) if result is None else result


@lowers("Mod")
def mod(a: Value, b: Value, *, fmod: int = 0) -> Value:
    """a - b * floor(a / b); with fmod a - b * trunc(a / b). The quotient is held constant in the gradient of a"""
    x, y = together(a, b)
    remainder = p.rem(x, y)
    if fmod or x.dtype.kind == "u" or _not_negative(a, b):
        return remainder
    if (left := _sizes_left(x, y)) is not None:
        return left
    zero = p.number(0, x)
    other = p.logical_xor(p.less(remainder, zero), p.less(y, zero))
    return p.select(p.logical_and(other, c.not_equal(remainder, zero)), p.add(remainder, y), remainder)


def _not_negative(*xs: Value) -> bool:
    """Whether all are known integers, or dims, and none is negative."""
    return all(x.dtype.integral and (array := known(x)) is not None and _at_least_0(array) for x in xs)


def _sizes_left(x: Value, y: Value) -> Value | None:
    """`x - y * floor(x / y)` where both are known and are sizes, of whatever sign x is; None elsewhere."""
    a, b = (known(v) if v.dtype.integral else None for v in (x, y))
    if a is None or b is None or object not in (a.dtype, b.dtype):
        return None
    pairs = [(simplest(m), simplest(n)) for m, n in zip(a.ravel(), b.ravel(), strict=True)]
    try:
        if not all(at_least(n, 1) for _, n in pairs):
            return None
    except InconclusiveDim:
        return None
    left = [p.reshape(p.dim(simplest(m - n * floordiv(m, n))), shape=(1,)) for m, n in pairs]
    return p.cast(p.reshape(p.concat(*left, axis=0), shape=x.shape), dtype=x.dtype)


def _at_least_0(array: np.ndarray) -> bool:
    if array.dtype != object:
        return bool((array >= 0).all())
    try:
        return all(at_least(simplest(d), 0) for d in array.ravel())
    except InconclusiveDim:
        return False


# ---- arithmetic of many ----------------------------------------------------------------------------------------------


def _extreme(two: Callable[[Value, Value], Value], many: Callable[..., Value], xs: tuple[Value, ...]) -> Value:
    xs = together(*xs)
    if len(xs) <= 2:
        return xs[0] if len(xs) == 1 else two(*xs)
    # one reduction over all, as a chain of pairs would share a tie of three as 1/4, 1/4, 1/2
    return many(p.concat(*(c.unsqueeze(x, (0,)) for x in xs), axis=0), axes=(0,))


@lowers("Max")
def max(*data_0: Value) -> Value:
    """The largest of its operands; a tie is shared evenly"""
    return _extreme(p.max, p.reduce_max, data_0)


@lowers("Min")
def min(*data_0: Value) -> Value:
    """The smallest of its operands; a tie is shared evenly"""
    return _extreme(p.min, p.reduce_min, data_0)


@lowers("Sum")
def sum(*data_0: Value) -> Value:
    """The sum of its operands"""
    first, *rest = together(*data_0)
    for x in rest:
        first = p.add(first, x)
    return first


@lowers("Mean")
def mean(*data_0: Value) -> Value:
    """The mean of its operands"""
    total = sum(*data_0)
    return p.div(total, p.number(len(data_0), total))


# ---- bounds ----------------------------------------------------------------------------------------------------------


def _clip(x: Value, low: Value | None, high: Value | None) -> Value:
    low, high = (None if bound is None else broadcast_to(_scalar(bound), x.shape) for bound in (low, high))
    if x.dtype.floating:
        return c.clamp(x, low, high)
    x = x if low is None else p.max(x, low)
    return x if high is None else p.min(x, high)


def _scalar(x: Value) -> Value:
    return x if x.rank == 0 else p.reshape(x, shape=())


@lowers("Clip", since=11)
def clip(input: Value, min: Value | None = None, max: Value | None = None) -> Value:
    """min(max(x, low), high); the gradient passes at the bounds"""
    return _clip(input, min, max)


@lowers("Clip")
def clip_1(input: Value, *, min: float | None = None, max: float | None = None) -> Value:
    """min(max(x, low), high); the gradient passes at the bounds"""
    low, high = (None if bound is None else p.literal(bound, input.dtype) for bound in (min, max))
    return _clip(input, low, high)


# ---- tests of a number -----------------------------------------------------------------------------------------------


@lowers("IsNaN", gradient=Gradient.INDEX, reason="bool")
def is_nan(x: Value) -> Value:
    """x is not a number"""
    return p.is_nan(x)


@lowers("IsInf", gradient=Gradient.INDEX, reason="bool")
def is_inf(x: Value, *, detect_negative: int = 1, detect_positive: int = 1) -> Value:
    """x is infinite, of the signs asked for"""
    if detect_negative and detect_positive:
        return c.is_inf(x)
    if not (detect_negative or detect_positive):
        return p.full(False, bool_, x.shape)
    return p.equal(x, p.number(math.inf if detect_positive else -math.inf, x))


# ---- matrix products -------------------------------------------------------------------------------------------------


def contract(operands: Sequence[Value], labels: Sequence[Sequence[str]], output: Sequence[str]) -> Value:
    """Einstein's sum: one label per axis, repeated ones run in step, and what the output does not name is summed."""
    named = [_diagonal(x, list(ls)) for x, ls in zip(operands, labels, strict=True)]
    sizes: dict[str, Dim] = {}
    for x, ls in named:
        for d, label in zip(x.shape, ls, strict=True):
            if label not in sizes or is_one(sizes[label]):
                sizes[label] = d
            elif not is_one(d):
                sizes[label] = require_equal(sizes[label], d, f"axes that a product runs over together ({label!r})")
    for label in output:
        if label not in sizes:
            raise Unsupported(f"the output names {label!r}, which no operand has")
    named = [_without_ones(x, ls, sizes) for x, ls in named]
    x, ls = named[0]
    for i, (y, ly) in enumerate(named[1:], start=1):
        wanted = {*output, *(label for _, rest in named[i + 1 :] for label in rest)}
        x, ls = _pair(x, ls, y, ly, wanted)
    x, ls = _summed(x, ls, set(output))
    order = [label for label in output if label in ls]
    x = p.transpose(x, perm=tuple(ls.index(label) for label in order)) if order != ls else x
    shape = tuple(sizes[label] for label in output)
    return x if len(order) == len(output) else p.reshape(x, shape=shape)


def _diagonal(x: Value, labels: list[str]) -> tuple[Value, list[str]]:
    """The axes that repeat a label as one, at the last place of the label."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            i = labels.index(label)
            j = labels.index(label, i + 1)
            size = require_equal(x.shape[i], x.shape[j], f"the sizes of the repeated axes {label!r}")
            rest = [a for a in range(x.rank) if a not in (i, j)]
            x = p.transpose(x, perm=(i, j, *rest))
            flat = p.reshape(x, shape=(simplest(size * size), *x.shape[2:]))
            step = p.broadcast(p.dim(simplest(size + 1)), shape=(size,), axes=())
            x = p.gather(flat, p.mul(p.iota(size), step), axis=0)
            labels = [label, *(labels[a] for a in rest)]
    return x, labels


def _without_ones(x: Value, labels: list[str], sizes: dict[str, Dim]) -> tuple[Value, list[str]]:
    """Axes of size 1 dropped where the label is larger elsewhere, or 1 everywhere."""
    kept = [i for i, d in enumerate(x.shape) if not is_one(d)]
    if len(kept) == x.rank:
        return x, labels
    return p.reshape(x, shape=tuple(x.shape[i] for i in kept)), [labels[i] for i in kept]


def _summed(x: Value, labels: list[str], wanted: set[str]) -> tuple[Value, list[str]]:
    gone = tuple(i for i, label in enumerate(labels) if label not in wanted)
    return (p.reduce_sum(x, axes=gone), [label for label in labels if label in wanted]) if gone else (x, labels)


def _pair(x: Value, lx: list[str], y: Value, ly: list[str], wanted: set[str]) -> tuple[Value, list[str]]:
    """The product of two operands, summed over what nobody needs any more."""
    x, lx = _summed(x, lx, wanted | set(ly))
    y, ly = _summed(y, ly, wanted | set(lx))
    shared = [label for label in lx if label in ly]
    batch, gone = [s for s in shared if s in wanted], [s for s in shared if s not in wanted]
    z = p.dot(
        x, y,
        contract=(tuple(map(lx.index, gone)), tuple(map(ly.index, gone))),
        batch=(tuple(map(lx.index, batch)), tuple(map(ly.index, batch))),
    )  # fmt: skip
    return z, [*batch, *(s for s in lx if s not in shared), *(s for s in ly if s not in shared)]


@lowers("MatMul")
def matmul(a: Value, b: Value) -> Value:
    """a @ b, as numpy's matmul: leading axes broadcast, a vector is a row at the left and a column at the right"""
    if a.rank == 0 or b.rank == 0:
        raise DimError(f"MatMul needs operands of rank 1 or more, found {a.type!r} and {b.type!r}")
    letters = string.ascii_lowercase
    rank = _most(a.rank, b.rank, 2) - 2
    lead = list(letters[:rank])
    la = [*lead[len(lead) - _most(a.rank - 2, 0) :], *(["I"] if a.rank > 1 else []), "K"]
    lb = [*lead[len(lead) - _most(b.rank - 2, 0) :], "K", *(["J"] if b.rank > 1 else [])]
    out = [*lead, *(["I"] if a.rank > 1 else []), *(["J"] if b.rank > 1 else [])]
    return contract([a, b], [la, lb], out)


def _most(*numbers: int) -> int:
    return int(np.max(numbers))


@lowers("Einsum")
def einsum(*Inputs: Value, equation: str) -> Value:
    """Einstein's sum, in numpy's notation"""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(Inputs):
        raise Unsupported(f"the equation {equation!r} has {len(terms)} terms for {len(Inputs)} operands")
    covered = [x.rank - len(t.replace("...", "")) if "..." in t else 0 for x, t in zip(Inputs, terms, strict=True)]
    widest = _most(0, *covered)
    labels = []
    for x, term, count in zip(Inputs, terms, covered, strict=True):
        labels.append(_labels(term, equation, [f"...{i}" for i in range(widest - count, widest)]))
        if len(labels[-1]) != x.rank or count < 0:
            raise Unsupported(f"term {term!r} of the equation {equation!r} does not fit {x.type!r}")
    everything = [f"...{i}" for i in range(widest)]
    if arrow:
        output = _labels(right, equation, everything)
    else:
        named = "".join(terms).replace(".", "")
        output = [*everything, *sorted(s for s in set(named) if named.count(s) == 1)]
    if len(set(output)) != len(output):
        raise Unsupported(f"the output of the equation {equation!r} repeats a label")
    return contract(Inputs, labels, output)


def _labels(term: str, equation: str, ellipsis: list[str]) -> list[str]:
    before, dots, after = term.partition("...")
    if not all(s.isascii() and s.isalpha() for s in before + after):
        raise Unsupported(f"cannot read the equation {equation!r}")
    return [*before, *(ellipsis if dots else []), *after]


@lowers("Gemm", since=7)
def gemm(a: Value, b: Value, c: Value | None = None, *, alpha: float = 1.0, beta: float = 1.0,
         transA: int = 0, transB: int = 0) -> Value:  # fmt: skip
    """alpha * a' @ b' + beta * c"""
    if a.rank != 2 or b.rank != 2:
        raise DimError(f"Gemm multiplies matrices, found {a.type!r} and {b.type!r}")
    require_equal(a.shape[0 if transA else 1], b.shape[1 if transB else 0], "the inner sizes of a matrix product")
    y = _scaled(p.dot(a, b, contract=((0 if transA else 1,), (1 if transB else 0,))), alpha)
    return y if c is None or beta == 0 else p.add(y, _scaled(broadcast_to(c, y.shape), beta))


@lowers("Gemm")
def gemm_1(a: Value, b: Value, c: Value, *, alpha: float = 1.0, beta: float = 1.0, broadcast: int = 0,
           transA: int = 0, transB: int = 0) -> Value:  # fmt: skip
    """alpha * a' @ b' + beta * c; c has the shape of the result unless broadcast"""
    return gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)


def _scaled(x: Value, factor: float) -> Value:
    if not x.dtype.floating and factor != int(factor):
        raise Unsupported(f"a factor of {factor} for integers of {x.dtype}")
    return c.scale(x, factor)


# ---- determinant -----------------------------------------------------------------------------------------------------


@lowers("Det")
def det(x: Value) -> Value:
    """The determinant of the last two axes"""
    n = x.shape[-1]
    if not isinstance(n, int):
        n = x.shape[-2]
    if not isinstance(n, int):
        raise Unsupported("the determinant of matrices whose size is symbolic: give the size with dims")
    require_equal(x.shape[-1], x.shape[-2], "the sizes of a square matrix")
    return determinant(x, n)


def determinant(x: Value, n: int) -> Value:
    """By elimination with complete pivoting, the last block of up to three by its formula.

    Neither divides by zero, so a matrix of rank n - 1 has its right derivative, and one of rank n - 2 its second.
    """
    lead = x.shape[:-2]
    pivots: list[Value] = []
    while n > 3:
        pivot, x = _eliminated(x, n)
        pivots.append(pivot)
        n -= 1
    result = _small_determinant(x, n) if n else p.full(1, x.dtype, lead)
    return c.times(*pivots, result)


def _entry(x: Value, i: int, j: int) -> Value:
    lead = x.shape[:-2]
    part = p.slice(x, start=(*(0 for _ in lead), i, j), limit=(*lead, i + 1, j + 1))
    return p.reshape(part, shape=lead)


def _small_determinant(x: Value, n: int) -> Value:
    """Laplace's expansion along the first row, for n of at most 3."""
    m = [[_entry(x, i, j) for j in range(n)] for i in range(n)]
    if n == 1:
        return m[0][0]

    def two(i: int, j: int, r: int) -> Value:
        return c.sub(p.mul(m[r][i], m[r + 1][j]), p.mul(m[r][j], m[r + 1][i]))

    if n == 2:
        return two(0, 1, 0)
    first = c.sub(p.mul(m[0][0], two(1, 2, 1)), p.mul(m[0][1], two(0, 2, 1)))
    return p.add(first, p.mul(m[0][2], two(0, 1, 1)))


def _eliminated(x: Value, n: int) -> tuple[Value, Value]:
    """The largest entry with the sign of the exchanges that bring it to the front, and what is left when its row and column are cleared."""
    lead = x.shape[:-2]
    r = len(lead)
    axes = tuple(range(r))
    flat = p.reshape(x, shape=(*lead, n * n))
    place = p.argmax(p.abs(flat), axis=r)
    width = p.full(n, i64, lead)
    row, column = p.div(place, width), p.rem(place, width)

    def at(index: Value, axis: int, shape: tuple[Dim, ...]) -> Value:
        own = p.broadcast(p.iota(n), shape=shape, axes=(axis,))
        return p.equal(own, p.broadcast(index, shape=shape, axes=axes))

    zeros = p.number(0, x)
    pivot_row = p.reduce_sum(p.select(at(row, r, x.shape), x, zeros), axes=(r,))
    pivot_column = p.reduce_sum(p.select(at(column, r + 1, x.shape), x, zeros), axes=(r + 1,))
    pivot = p.reduce_sum(p.select(at(column, r, pivot_row.shape), pivot_row, p.number(0, pivot_row)), axes=(r,))
    nothing = p.equal(pivot, p.number(0, pivot))
    safe = p.select(nothing, p.number(1, pivot), pivot)
    ratio = p.div(pivot_column, p.broadcast(safe, shape=pivot_column.shape, axes=axes))
    outer = p.mul(
        p.broadcast(ratio, shape=x.shape, axes=(*axes, r)), p.broadcast(pivot_row, shape=x.shape, axes=(*axes, r + 1))
    )
    cleared = c.sub(x, outer)
    # the first row stands in for the pivot's, the first column likewise; then both firsts go
    small = (*lead, n - 1, n - 1)

    def moved(index: Value, axis: int) -> Value:
        own = p.broadcast(c.plus(p.iota(n - 1), 1), shape=small, axes=(axis,))
        return p.select(p.equal(own, p.broadcast(index, shape=small, axes=axes)), p.number(0, own), own)

    where = p.add(p.mul(moved(row, r), p.full(n, i64, small)), moved(column, r + 1))
    lined = p.reshape(where, shape=(*lead, (n - 1) * (n - 1)))
    rest = p.reshape(c.take_along(p.reshape(cleared, shape=flat.shape), lined, r), shape=small)
    zero = p.number(0, row)
    odd = p.logical_xor(p.equal(row, zero), p.equal(column, zero))
    return p.select(odd, p.neg(pivot), pivot), rest


# ---- running sums and products ---------------------------------------------------------------------------------------


def axis_of(axis: Static | int, rank: int) -> int:
    """An axis, counted from the end where it is negative."""
    value = int(np.asarray(axis).reshape(())) if not isinstance(axis, int) else axis
    if not -rank <= value < rank:
        raise DimError(f"axis {value} is not one of a tensor of rank {rank}")
    return value % rank


def _shifted(x: Value, axis: int, amount: int, fill: float) -> Value:
    """Moved along an axis by `amount`, the first places filled."""
    low = tuple(amount if a == axis else 0 for a in range(x.rank))
    return p.slice(p.pad(x, low=low, high=(0,) * x.rank, value=fill), start=(0,) * x.rank, limit=x.shape)


def _running(x: Value, axis: int, exclusive: int, reverse: int, fill: float, run: Callable[[Value], Value]) -> Value:
    x = p.reverse(x, axes=(axis,)) if reverse else x
    y = run(_shifted(x, axis, 1, fill) if exclusive else x)
    return p.reverse(y, axes=(axis,)) if reverse else y


@lowers("CumSum")
def cumsum(x: Value, axis: Static, *, exclusive: int = 0, reverse: int = 0) -> Value:
    """Running sums along an axis"""
    a = axis_of(axis, x.rank)
    if not exclusive:
        return p.cumsum(x, axis=a, reverse=bool(reverse))
    return _running(x, a, exclusive, reverse, 0, lambda y: p.cumsum(y, axis=a))


@lowers("CumProd")
def cumprod(x: Value, axis: Static, *, exclusive: int = 0, reverse: int = 0) -> Value:
    """Running products along an axis"""
    a = axis_of(axis, x.rank)
    return _running(x, a, exclusive, reverse, 1, lambda y: running_product(y, a))


def running_product(x: Value, axis: int) -> Value:
    """By doubling: each pass multiplies by what stands 1, 2, 4, ... before. No division, so zeros keep their derivative.

    An axis of symbolic size takes the square of its size instead, as the number of passes depends on it.
    """
    n = x.shape[axis]
    if isinstance(n, int):
        step = 1
        while step < n:
            x = p.mul(x, _shifted(x, axis, step, 1))
            step *= 2
        return x
    square = (*x.shape[: axis + 1], n, *x.shape[axis + 1 :])
    own, before = (p.broadcast(p.iota(n), shape=square, axes=(a,)) for a in (axis, axis + 1))
    places = tuple(a for a in range(len(square)) if a != axis)
    rows = p.broadcast(x, shape=square, axes=places)
    return p.reduce_prod(p.select(p.less_equal(before, own), rows, p.number(1, rows)), axes=(axis + 1,))


# ---- casts -----------------------------------------------------------------------------------------------------------


def cast_to(x: Value, dtype: DType, saturate: int = 1, round_mode: str = "up") -> Value:
    """`x` as another dtype; a float of 8 bits saturates at its largest value where asked."""
    if x.dtype is dtype:
        return x
    if dtype.name == "f8e8m0" and x.dtype.floating:
        return _to_power_of_two(x, dtype, saturate, round_mode)
    if dtype.name.startswith("f8") and x.dtype.floating and x.dtype.bits >= 16:
        return _to_float8(x, dtype, saturate)
    if x.dtype.bits < 8 and x.dtype.floating and dtype.bits <= 16:  # no direct way exists everywhere
        return p.cast(p.cast(x, dtype=f32), dtype=dtype)
    return p.cast(x, dtype=dtype)


_LARGEST_FLOAT8 = {"f8e4m3fn": 448.0, "f8e4m3fnuz": 240.0, "f8e5m2": 57344.0, "f8e5m2fnuz": 57344.0}


def _to_float8(x: Value, dtype: DType, saturate: int) -> Value:
    if not saturate:
        return p.cast(x, dtype=dtype)
    wide = p.cast(x, dtype=f32) if x.dtype.bits < 32 else x
    top = _LARGEST_FLOAT8[dtype.name]
    return p.cast(c.clamp(wide, p.number(-top, wide), p.number(top, wide)), dtype=dtype)


def _to_power_of_two(x: Value, dtype: DType, saturate: int, round_mode: str) -> Value:
    """Eight bits of exponent and nothing else: the power of two above, below, or nearest (ties up)."""
    wide = p.cast(x, dtype=f64)
    two = p.number(2, wide)
    tiny, huge = p.number(2.0**-127, wide), p.number(2.0**127, wide)
    positive = p.less(p.number(0, wide), wide)
    finite = p.select(p.logical_and(positive, p.less_equal(wide, p.number(2.0**200, wide))), wide, p.number(1, wide))
    exponent = p.floor(p.div(p.log(finite), p.log(two)))
    low = p.pow(two, exponent)
    low = p.select(
        p.less(finite, low), p.div(low, two), p.select(p.less_equal(p.mul(low, two), finite), p.mul(low, two), low)
    )
    match round_mode:
        case "up":
            rounded = p.select(p.equal(low, finite), low, p.mul(low, two))
        case "down":
            rounded = low
        case "nearest":
            rounded = p.select(p.less(finite, p.mul(low, p.number(1.5, wide))), low, p.mul(low, two))
        case _:
            raise Unsupported(f"round_mode {round_mode!r}")
    rounded = p.select(c.greater(wide, p.number(2.0**200, wide)), p.number(math.inf, wide), rounded)
    rounded = p.select(p.less_equal(wide, p.number(0, wide)), p.number(0, wide), rounded)
    if saturate:
        rounded = c.clamp(rounded, tiny, huge)
    else:
        outside = p.logical_or(p.less(rounded, tiny), p.less(huge, rounded))
        rounded = p.select(outside, p.number(math.nan, wide), rounded)
    rounded = p.select(p.is_nan(wide), wide, rounded)
    return p.cast(p.cast(rounded, dtype=f32), dtype=dtype)


@lowers("Cast")
def cast(input: Value, *, to: int, saturate: int = 1, round_mode: str = "up") -> Value:
    """x as another dtype; between floats the gradient is cast back, elsewhere there is none"""
    dtype = dtype_of_onnx(to)
    if input.dtype.integral and dtype.floating and dtype.bits >= 16:
        return real_of(input, dtype)
    return cast_to(input, dtype, saturate, round_mode)


@lowers("CastLike")
def cast_like(input: Value, target_type: Value, *, saturate: int = 1, round_mode: str = "up") -> Value:
    """x as the dtype of another tensor"""
    return cast_to(input, target_type.dtype, saturate, round_mode)


# ---- bits ------------------------------------------------------------------------------------------------------------

DISCRETE = "integers"


@lowers("BitShift", gradient=Gradient.INDEX, reason=DISCRETE)
def bit_shift(x: Value, y: Value, *, direction: str) -> Value:
    """x * 2 ** y or x / 2 ** y, in bits"""
    if direction not in ("LEFT", "RIGHT"):
        raise Unsupported(f"direction {direction!r}: LEFT or RIGHT is required")
    return (p.shift_left if direction == "LEFT" else p.shift_right)(*together(x, y))


@lowers("BitCast", gradient=Gradient.INDEX, reason="bits")
def bit_cast(input: Value, *, to: int) -> Value:
    """The bits of x as another dtype of the same width"""
    dtype = dtype_of_onnx(to)
    if input.dtype.bits != dtype.bits:
        raise Unsupported(f"the bits of {input.dtype} are none of {dtype}: the widths differ")
    if input.dtype.floating or dtype.floating:
        return p.bit_cast(input, dtype=dtype)
    return p.cast(input, dtype=dtype)  # of integers a cast keeps the bits


@lowers("BitwiseAnd", gradient=Gradient.INDEX, reason=DISCRETE)
def bitwise_and(a: Value, b: Value) -> Value:
    """Bits set in both"""
    return p.bit_and(*together(a, b))


@lowers("BitwiseOr", gradient=Gradient.INDEX, reason=DISCRETE)
def bitwise_or(a: Value, b: Value) -> Value:
    """Bits set in either"""
    return p.bit_or(*together(a, b))


@lowers("BitwiseXor", gradient=Gradient.INDEX, reason=DISCRETE)
def bitwise_xor(a: Value, b: Value) -> Value:
    """Bits set in exactly one"""
    return p.bit_xor(*together(a, b))


@lowers("BitwiseNot", gradient=Gradient.INDEX, reason=DISCRETE)
def bitwise_not(x: Value) -> Value:
    """The bits inverted"""
    return p.bit_not(x)
