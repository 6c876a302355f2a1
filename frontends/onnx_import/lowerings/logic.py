"""Comparisons, logic, and choice."""

from __future__ import annotations

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.graph import Value
from ..broadcasting import legacy, together
from ..registry import Gradient, lowers

BOOL = "bool"


@lowers("Not", gradient=Gradient.INDEX, reason=BOOL)
def logical_not(x: Value) -> Value:
    """not x"""
    return p.logical_not(x)


_OF_TWO = {
    "And": (p.logical_and, "a and b"),
    "Or": (p.logical_or, "a or b"),
    "Xor": (p.logical_xor, "one of a and b"),
    "Equal": (p.equal, "a == b"),
    "Less": (p.less, "a < b"),
    "Greater": (c.greater, "a > b"),
    "LessOrEqual": (p.less_equal, "a <= b"),
    "GreaterOrEqual": (c.greater_equal, "a >= b"),
}


def _register(op_type: str) -> None:
    function, formula = _OF_TWO[op_type]

    def broadcast_7(a: Value, b: Value) -> Value:
        return function(*together(a, b))

    def broadcast_1(a: Value, b: Value, *, axis: int | None = None, broadcast: int = 0) -> Value:
        return function(*legacy(a, b, broadcast, axis))

    broadcast_7.__doc__ = broadcast_1.__doc__ = formula
    lowers(op_type, since=7, gradient=Gradient.INDEX, reason=BOOL)(broadcast_7)
    if op_type not in ("LessOrEqual", "GreaterOrEqual"):
        lowers(op_type, since=1, gradient=Gradient.INDEX, reason=BOOL)(broadcast_1)


for _op_type in _OF_TWO:
    _register(_op_type)


@lowers("Where")
def where(condition: Value, x: Value, y: Value) -> Value:
    """x where the condition holds, else y"""
    return p.select(*together(condition, x, y))
