"""The real number behind a rounded one, through which a gradient passes where that is asked for (`straight_through`).

Each rounded tensor is remembered together with the number that it was rounded from; what computes on it takes its value from the one and its derivative
from the other (Bengio et al., 2013, "Estimating or propagating gradients through stochastic neurons").
"""

from __future__ import annotations

from ...algebra import composites as c
from ...algebra import primitives as p
from ...algebra.graph import Value, bind
from ...algebra.types import DType
from .context import reading

__all__ = ["has_real", "real_of", "remember", "straight_through", "with_derivative"]


def straight_through() -> bool:
    """Whether a gradient is asked to pass through rounding."""
    return bool(reading().options.get("straight_through"))


def remember(integer: Value, real: Value) -> Value:
    """The integer tensor, remembered with the real number it stands for."""
    if straight_through():
        reading().data.setdefault("rounded", {})[id(integer)] = (integer, real)
    return integer


_MOVES = frozenset(
    {"broadcast", "gather", "reshape", "reverse", "slice", "transpose", "reduce_max", "reduce_min", "window"}
)


def _behind(integer: Value) -> Value | None:
    """The real number behind an integer tensor, through what only moves or chooses elements; None where there is none."""
    table = reading().data.get("rounded", {})
    if id(integer) in table:
        real: Value = table[id(integer)][1]
        return real
    name = integer.primitive.name
    if name in _MOVES:
        real_ = _behind(integer.operands[0])
        if real_ is None:
            return None
        return _again(integer, (real_, *integer.operands[1:]))
    if name == "pad":
        real_ = _behind(integer.operands[0])
        return None if real_ is None else _again(integer, (real_,))
    if name == "concat":
        parts = [_behind(o) for o in integer.operands]
        if all(r is None for r in parts):
            return None
        dtype = next(r.dtype for r in parts if r is not None)
        return _again(integer, tuple(p.cast(o, dtype=dtype) if r is None else r for o, r in zip(integer.operands, parts, strict=True)))  # fmt: skip
    return None


def _again(like: Value, operands: tuple[Value, ...]) -> Value:
    """The node of another one on other operands."""
    return bind(like.primitive, *operands, **like.params)


def has_real(rounded: Value) -> bool:
    """Whether a gradient passes through the rounding behind a tensor."""
    return straight_through() and _behind(rounded) is not None


def with_derivative(value: Value, rounded: Value) -> Value:
    """`value`, made of a rounded tensor; where a gradient passes through rounding, with the derivative of the real number behind that."""
    real = _behind(rounded) if straight_through() else None
    if real is None:
        return value
    real = p.cast(real, dtype=value.dtype)
    return p.add(p.stop_gradient(value), c.sub(real, p.stop_gradient(real)))


def real_of(integer: Value, dtype: DType) -> Value:
    """An integer tensor as floats, differentiable where a gradient passes through rounding."""
    return with_derivative(p.cast(integer, dtype=dtype), integer)
