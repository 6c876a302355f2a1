"""Rules of elementwise primitives. Values stay equal, NaN and infinity included; the sign of a zero and the last bit of a rounded number may change."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import primitives as p
from ..graph import Value, bind, current
from ..types import DType
from .matching import FOLDED, constant, is_splat, negated, op, small, splat
from .rewriting import rules

__all__ = ["ARITHMETIC", "FOLDING"]


def _operand_beside(v: Value, number: float) -> Value | None:
    """The other operand of a commutative node one of whose operands is this number everywhere."""
    x, y = v.operands
    if is_splat(y, number):
        return x
    return y if is_splat(x, number) else None


def _scaled(v: Value) -> tuple[Value, Any] | None:
    """`(x, c)` of a value `x * c` with a literal number c."""
    if op(v) != "mul":
        return None
    x, y = v.operands
    if (c := splat(y)) is not None:
        return x, c
    return (y, c) if (c := splat(x)) is not None else None


def _signed(v: Value) -> bool:
    return v.dtype.kind in "fi"


# ---- sums and products -----------------------------------------------------------------------------------------------------------------


def add_zero(v: Value) -> Value | None:
    """x + 0 -> x"""
    return _operand_beside(v, 0)


def mul_one(v: Value) -> Value | None:
    """x * 1 -> x"""
    return _operand_beside(v, 1)


def mul_minus_one(v: Value) -> Value | None:
    """x * -1 -> -x"""
    x = _operand_beside(v, -1) if _signed(v) else None
    return None if x is None else p.neg(x)


def mul_zero_of_integers(v: Value) -> Value | None:
    """x * 0 -> 0, of integers: a float may be infinite or NaN"""
    if v.dtype.integral and _operand_beside(v, 0) is not None:
        return p.number(0, v)
    return None


def div_one(v: Value) -> Value | None:
    """x / 1 -> x"""
    return v.operands[0] if is_splat(v.operands[1], 1) else None


def div_power_of_two(v: Value) -> Value | None:
    """x / 2**k -> x * 2**-k, which is exact"""
    c = splat(v.operands[1]) if v.dtype.floating else None
    if c is None or not math.isfinite(float(c)) or c == 0:
        return None
    inverse = 1 / float(c)
    if math.frexp(float(c))[0] not in (0.5, -0.5) or not 2.0**-14 <= abs(inverse) <= 2.0**14:
        return None
    return p.mul(v.operands[0], p.number(inverse, v))


def neg_neg(v: Value) -> Value | None:
    """-(-x) -> x"""
    return negated(v.operands[0])


def neg_of_difference(v: Value) -> Value | None:
    """-(x - y) -> y - x"""
    inner = v.operands[0]
    if op(inner) != "add" or not _signed(v):
        return None
    x, y = inner.operands
    if (b := negated(y)) is not None:
        return p.add(b, p.neg(x))
    return p.add(a, p.neg(y)) if (a := negated(x)) is not None else None


def neg_of_scaled(v: Value) -> Value | None:
    """-(x * c) -> x * -c"""
    found = _scaled(v.operands[0]) if _signed(v) else None
    return None if found is None else p.mul(found[0], p.number(-_plain(found[1]), v))


def mul_neg(v: Value) -> Value | None:
    """-x * y -> -(x * y)"""
    x, y = v.operands
    a, b = negated(x), negated(y)
    if a is not None and b is not None:
        return p.mul(a, b)
    if a is not None:
        return p.neg(p.mul(a, y))
    return p.neg(p.mul(x, b)) if b is not None else None


def div_neg(v: Value) -> Value | None:
    """-x / y -> -(x / y)"""
    x, y = v.operands
    if not v.dtype.floating:
        return None
    a, b = negated(x), negated(y)
    if a is not None and b is not None:
        return p.div(a, b)
    if a is not None:
        return p.neg(p.div(a, y))
    return p.neg(p.div(x, b)) if b is not None else None


def add_negs(v: Value) -> Value | None:
    """-x + -y -> -(x + y)"""
    a, b = (negated(o) for o in v.operands)
    return None if a is None or b is None else p.neg(p.add(a, b))


def mul_of_scaled(v: Value) -> Value | None:
    """(x * b) * c -> x * (b * c), where the product of the literals is an ordinary number"""
    outer = _scaled(v)
    inner = None if outer is None else _scaled(outer[0])
    if outer is None or inner is None:
        return None
    product = _plain(inner[1]) * _plain(outer[1])
    return p.mul(inner[0], p.number(product, v)) if _ordinary(product, v.dtype) else None


def commuted(v: Value) -> Value | None:
    """x * y -> y * x, x + y -> y + x, where that stands already"""
    x, y = v.operands
    before = None if x is y else current().made(v.primitive, (y, x), v.params)
    return bind(v.primitive, y, x) if before is not None and before.index < v.index else None


def scaled_broadcast(v: Value) -> Value | None:
    """(x * broadcast(s)) * c -> x * broadcast(s * c): the literal meets the smaller tensor"""
    outer = _scaled(v)
    if outer is None or op(outer[0]) != "mul" or not _ordinary(_plain(outer[1]), v.dtype):
        return None
    for x, s in (outer[0].operands, outer[0].operands[::-1]):
        if op(s) == "broadcast" and op(x) != "broadcast" and splat(s) is None:
            small = s.operands[0]
            factor = p.mul(small, p.number(_plain(outer[1]), small))
            return p.mul(x, p.broadcast(factor, shape=s.shape, axes=s.params["axes"]))
    return None


def added_twice(v: Value) -> Value | None:
    """(y + t) + t -> y + x * broadcast(2 * s), where t is x * broadcast(s): the cotangent of a square"""
    for before, t in (v.operands, v.operands[::-1]):
        if op(before) != "add" or op(t) != "mul" or not v.dtype.floating:
            continue
        for y, again in (before.operands, before.operands[::-1]):
            if again is t and any(op(o) == "broadcast" for o in t.operands):
                return p.add(y, p.mul(t, p.number(2, t)))
    return None


def neg_of_negated_factor(v: Value) -> Value | None:
    """-(x * broadcast(-s)) -> x * broadcast(s)"""
    inner = v.operands[0]
    if op(inner) not in ("mul", "div"):
        return None
    for i, s in enumerate(inner.operands):
        if op(s) == "broadcast" and (small := negated(s.operands[0])) is not None:
            factor = p.broadcast(small, shape=s.shape, axes=s.params["axes"])
            operands = [factor if j == i else o for j, o in enumerate(inner.operands)]
            return bind(inner.primitive, *operands)
    return None


def _plain(number: Any) -> Any:
    return int(number) if np.asarray(number).dtype.kind in "iu" else float(number)


def _ordinary(number: float, dtype: DType) -> bool:
    """Whether a product neither overflows nor loses bits below the smallest normal number."""
    if dtype.integral:
        return abs(number) < 2 ** (dtype.bits - 1)
    return dtype.bits >= 32 and (2.0**-100 <= abs(number) <= 2.0**100)


# ---- powers, extremes, selection -------------------------------------------------------------------------------------------------------


def pow_literal(v: Value) -> Value | None:
    """x ** c -> 1, x, x*x, x*x*x, sqrt x, 1/x, 1/sqrt x for c = 0, 1, 2, 3, 1/2, -1, -1/2 (as PyTorch: at -inf the roots are NaN)"""
    x, y = v.operands
    c = splat(y)
    if c is None:
        return None
    match float(c):
        case 0.0:
            return p.number(1, v)
        case 1.0:
            return x
        case 2.0:
            return p.mul(x, x)
        case 3.0:
            return p.mul(p.mul(x, x), x)
        case 0.5:
            return p.sqrt(x)
        case -1.0:
            return p.div(p.number(1, x), x)
        case -0.5:
            return p.div(p.number(1, x), p.sqrt(x))
    return None


def extreme_of_itself(v: Value) -> Value | None:
    """max(x, x) -> x, and of min, and, or"""
    x, y = v.operands
    return x if x is y else None


def select_literal(v: Value) -> Value | None:
    """select(true, x, y) -> x, select(false, x, y) -> y"""
    c, x, y = v.operands
    found = splat(c)
    return None if found is None else (x if found else y)


def select_same(v: Value) -> Value | None:
    """select(c, x, x) -> x"""
    _, x, y = v.operands
    return x if x is y else None


def select_not(v: Value) -> Value | None:
    """select(not c, x, y) -> select(c, y, x)"""
    c, x, y = v.operands
    return p.select(c.operands[0], y, x) if op(c) == "logical_not" else None


def select_nested(v: Value) -> Value | None:
    """select(c, select(c, x, _), y) -> select(c, x, y), and on the other side"""
    c, x, y = v.operands
    a = x.operands[1] if op(x) == "select" and x.operands[0] is c else x
    b = y.operands[2] if op(y) == "select" and y.operands[0] is c else y
    return p.select(c, a, b) if a is not x or b is not y else None


def logical_not_not(v: Value) -> Value | None:
    """not not x -> x"""
    inner = v.operands[0]
    return inner.operands[0] if op(inner) == "logical_not" else None


def logical_literal(v: Value) -> Value | None:
    """x and true -> x, x and false -> false, x or true -> true, x or false -> x"""
    x, y = v.operands
    for a, b in ((x, y), (y, x)):
        found = splat(b)
        if found is not None:
            return a if bool(found) == (op(v) == "logical_and") else b
    return None


def abs_of_abs(v: Value) -> Value | None:
    """||x|| -> |x|, |-x| -> |x|"""
    inner = v.operands[0]
    if op(inner) == "abs":
        return inner
    return p.abs(inner.operands[0]) if op(inner) == "neg" and v.dtype.floating else None


def rounding_twice(v: Value) -> Value | None:
    """floor(floor x) -> floor x, and of round"""
    return v.operands[0] if op(v.operands[0]) in ("floor", "round") else None


def sub_itself_of_integers(v: Value) -> Value | None:
    """x - x -> 0, of integers"""
    x, y = v.operands
    if not v.dtype.integral:
        return None
    return p.number(0, v) if negated(x) is y or negated(y) is x else None


# ---- casts -----------------------------------------------------------------------------------------------------------------------------

_MANTISSA = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8}


def holds(wide: DType, narrow: DType) -> bool:
    """Whether every value of one dtype is a value of another."""
    if narrow.kind == "b":
        return True
    if narrow.floating:
        return wide.name in ("f32", "f64") and narrow.bits < wide.bits
    bits = narrow.bits - (narrow.kind == "i")
    if wide.floating:
        return bits <= _MANTISSA.get(wide.name, 0)
    return (wide.kind == narrow.kind or wide.kind == "i") and wide.bits - (wide.kind == "i") >= bits


def cast_of_cast(v: Value) -> Value | None:
    """cast(cast(x, wide), any) -> cast(x, any), where wide holds every x"""
    inner = v.operands[0]
    if op(inner) != "cast" or not holds(inner.dtype, inner.operands[0].dtype):
        return None
    return p.cast(inner.operands[0], dtype=v.dtype)


# ---- constants -------------------------------------------------------------------------------------------------------------------------


def fold(v: Value) -> Value | None:
    """f(constants) -> constant, where the result has at most 1024 elements, or no more than the operands"""
    operands = []
    for o in v.operands:
        array = constant(o)
        if array is None:
            return None
        operands.append(array)
    if not operands or not small(v.shape, max(FOLDED, *(o.size for o in operands))):
        return None
    if any(_symbolic(x) for x in v.params.values()):
        return None
    with np.errstate(all="ignore"):
        return p.literal(np.asarray(v.primitive.numpy(*operands, **v.params)))


def _symbolic(value: Any) -> bool:
    from ..dims import symbols

    return bool(symbols(value))


_SEVERAL = tuple(e.name for e in p.PRIMITIVES if isinstance(e.vjp, p.Joint))
_NOT_FOLDED = ("input", "literal", "dim", "iota", "broadcast", "item", "stop_gradient", *_SEVERAL)

FOLDING = rules((" ".join(name for name in p.BY_NAME if name not in _NOT_FOLDED), fold))

ARITHMETIC = rules(
    ("add", add_zero),
    ("add", add_negs),
    ("add", sub_itself_of_integers),
    ("mul", mul_one),
    ("mul", mul_zero_of_integers),
    ("mul", mul_minus_one),
    ("mul", mul_neg),
    ("mul", mul_of_scaled),
    ("mul", scaled_broadcast),
    ("add mul", commuted),
    ("add", added_twice),
    ("div", div_one),
    ("div", div_neg),
    ("div", div_power_of_two),
    ("neg", neg_neg),
    ("neg", neg_of_scaled),
    ("neg", neg_of_negated_factor),
    ("neg", neg_of_difference),
    ("pow", pow_literal),
    ("max min logical_and logical_or bit_and bit_or", extreme_of_itself),
    ("logical_and logical_or", logical_literal),
    ("logical_not", logical_not_not),
    ("select", select_literal),
    ("select", select_same),
    ("select", select_not),
    ("select", select_nested),
    ("abs", abs_of_abs),
    ("floor round", rounding_twice),
    ("cast", cast_of_cast),
)
