"""What runtimes lack or do wrong, each with version and symptom. A test tries every entry and notices when it can go.

onnxruntime's CPU provider has no double kernels for a number of functions. They are written here in those that it has, to within a few units in
the last place, so that models in double (and gradient checks, which want double) run there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ...algebra.types import DType, bool_, f16, f32, f64
from .ops import Ops
from .program import Tensor
from .targets import Target

__all__ = ["WORKAROUNDS", "Workaround", "composite"]


def _mul(ops: Ops, x: Tensor, y: Tensor | float) -> Tensor:
    return ops.binary("Mul", x, ops.number(y, x.dtype) if isinstance(y, float) else y)


def _add(ops: Ops, x: Tensor, y: Tensor | float) -> Tensor:
    return ops.binary("Add", x, ops.number(y, x.dtype) if isinstance(y, float) else y)


def _sub(ops: Ops, x: Tensor | float, y: Tensor) -> Tensor:
    return ops.binary("Sub", ops.number(x, y.dtype) if isinstance(x, float) else x, y)


def _div(ops: Ops, x: Tensor | float, y: Tensor) -> Tensor:
    return ops.binary("Div", ops.number(x, y.dtype) if isinstance(x, float) else x, y)


def _below(ops: Ops, x: Tensor, y: float) -> Tensor:
    return ops.binary("Less", x, ops.number(y, x.dtype), bool_)


def _horner(ops: Ops, x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """The polynomial with these coefficients, the constant one first."""
    total = _add(ops, _mul(ops, x, coefficients[-1]), coefficients[-2])
    for c in coefficients[-3::-1]:
        total = _add(ops, _mul(ops, total, x), c)
    return total


def _signed(ops: Ops, x: Tensor, magnitude: Tensor) -> Tensor:
    """The magnitude with the sign of x; NaN where the magnitude is."""
    return ops.where(_below(ops, x, 0.0), ops.unary("Neg", magnitude), magnitude)


# `exp(x * x) * erfc(x)` on [0.5, 6] as a polynomial in s, where `(x - 3) / (x + 3) = (4 / 21) * (11 * s / 4 - 1)` runs from -5/7 to 1/3:
# its Chebyshev interpolant of degree 17, computed with 60 digits. The relative error is below 1e-15.
_ERFCX = (
    0.25118972650284, -0.22957722398080121, 0.0956889167966117, -0.030773151360238192, 0.007301880534331633, -0.0011237792326725246,
    5.600763655987811e-05, 1.7524317104028864e-05, -3.1799278602312426e-06, -2.6411880431952943e-07, 1.0805506959220278e-07,
    6.480785221569964e-09, -3.7264108380817245e-09, -3.2054196877560953e-10, 1.2921131447123232e-10, 1.9948627777635414e-11,
    -3.620911923661046e-12, -9.734158494161399e-13,
)  # fmt: skip
_ERF_SERIES = tuple(2 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(12))


def erf(ops: Ops, x: Tensor) -> Tensor:
    """The power series below 0.5, `1 - exp(-x * x) * erfcx(x)` above."""
    near = _mul(ops, x, _horner(ops, _mul(ops, x, x), _ERF_SERIES))
    size = ops.unary("Abs", x)
    a = ops.binary("Min", ops.binary("Max", size, ops.number(0.5, x.dtype)), ops.number(6.0, x.dtype))
    t = _div(ops, _add(ops, a, -3.0), _add(ops, a, 3.0))
    s = _mul(ops, _add(ops, t, 4 / 21), 21 / 11)
    tail = _mul(ops, ops.unary("Exp", ops.unary("Neg", _mul(ops, a, a))), _horner(ops, s, _ERFCX))
    return ops.where(_below(ops, size, 0.5), near, _signed(ops, x, _sub(ops, 1.0, tail)))


def _halves(ops: Ops, size: Tensor) -> tuple[Tensor, Tensor]:
    """`e ** size / 2` and `e ** -size / 2`, the first without overflow before its time."""
    h = ops.unary("Exp", _mul(ops, size, 0.5))
    return _mul(ops, _mul(ops, h, 0.5), h), _div(ops, _div(ops, 0.5, h), h)


def cosh(ops: Ops, x: Tensor) -> Tensor:
    """`e ** |x| / 2 + e ** -|x| / 2`."""
    return _add(ops, *_halves(ops, ops.unary("Abs", x)))


def sinh(ops: Ops, x: Tensor) -> Tensor:
    """The difference of those; below 1 it is `2 t / (1 - t * t)` with `t = tanh(x / 2)`."""
    size = ops.unary("Abs", x)
    t = ops.unary("Tanh", _mul(ops, x, 0.5))
    near = _div(ops, _mul(ops, t, 2.0), _sub(ops, 1.0, _mul(ops, t, t)))
    return ops.where(_below(ops, size, 1.0), near, _signed(ops, x, _sub(ops, *_halves(ops, size))))


def atan(ops: Ops, x: Tensor) -> Tensor:
    """The float kernel's angle y, and the angle that is left: its tangent is `(x cos y - sin y) / (cos y + x sin y)`, tiny, so it is its own angle."""
    x = ops.binary("Min", ops.binary("Max", x, ops.number(-1e300, x.dtype)), ops.number(1e300, x.dtype))
    y = ops.cast(ops.unary("Atan", ops.cast(x, f32)), f64)
    sin, cos = ops.unary("Sin", y), ops.unary("Cos", y)
    left = _div(ops, _sub(ops, _mul(ops, x, cos), sin), _add(ops, cos, _mul(ops, x, sin)))
    return _add(ops, y, left)


def asin(ops: Ops, x: Tensor) -> Tensor:
    """`atan(x / sqrt((1 - x) (1 + x)))`."""
    return atan(ops, _div(ops, x, ops.unary("Sqrt", _mul(ops, _sub(ops, 1.0, x), _add(ops, x, 1.0)))))


def acos(ops: Ops, x: Tensor) -> Tensor:
    """`2 atan(sqrt((1 - x) / (1 + x)))`."""
    return _mul(ops, atan(ops, ops.unary("Sqrt", _div(ops, _sub(ops, 1.0, x), _add(ops, x, 1.0)))), 2.0)


def _log1p(ops: Ops, u: Tensor) -> Tensor:
    """`ln(1 + u)`: `w = 1 + u` as rounded, then `ln(w) * u / (w - 1)`; u itself where w is 1."""
    w = _add(ops, u, 1.0)
    one = ops.binary("Equal", w, ops.number(1.0, u.dtype), bool_)
    over = ops.where(one, ops.number(1.0, u.dtype), _add(ops, w, -1.0))
    return ops.where(one, u, _mul(ops, ops.unary("Log", w), _div(ops, u, over)))


def _capped(ops: Ops, x: Tensor) -> tuple[Tensor, Tensor]:
    """`min(x, 1e150)`, whose square is finite, and the logarithm of what that leaves out."""
    a = ops.binary("Min", x, ops.number(1e150, x.dtype))
    return a, ops.unary("Log", _div(ops, x, ops.binary("Max", a, ops.number(1e-300, x.dtype))))


def asinh(ops: Ops, x: Tensor) -> Tensor:
    """`ln(1 + |x| + x * x / (1 + sqrt(1 + x * x)))`, with the sign of x."""
    size = ops.unary("Abs", x)
    a, rest = _capped(ops, size)
    square = _mul(ops, a, a)
    more = _div(ops, square, _add(ops, ops.unary("Sqrt", _add(ops, square, 1.0)), 1.0))
    large = ops.binary("Less", ops.number(1e150, x.dtype), size, bool_)
    found = _add(ops, _log1p(ops, _add(ops, a, more)), ops.where(large, rest, ops.number(0.0, x.dtype)))
    return _signed(ops, x, found)


def acosh(ops: Ops, x: Tensor) -> Tensor:
    """`ln(1 + t + sqrt(2 t + t * t))` with `t = x - 1`."""
    a, rest = _capped(ops, x)
    t = _add(ops, a, -1.0)
    found = _log1p(ops, _add(ops, t, ops.unary("Sqrt", _mul(ops, t, _add(ops, t, 2.0)))))
    large = ops.binary("Less", ops.number(1e150, x.dtype), x, bool_)
    return _add(ops, found, ops.where(large, rest, ops.number(0.0, x.dtype)))


def atanh(ops: Ops, x: Tensor) -> Tensor:
    """`ln(1 + 2 x / (1 - x)) / 2` below 0.5, `ln((1 + x) / (1 - x)) / 2` above."""
    near = _below(ops, ops.unary("Abs", x), 0.5)
    u = ops.where(near, x, ops.number(0.0, x.dtype))
    small = _log1p(ops, _div(ops, _mul(ops, u, 2.0), _sub(ops, 1.0, u)))
    large = ops.unary("Log", _div(ops, _add(ops, x, 1.0), _sub(ops, 1.0, x)))
    return _mul(ops, ops.where(near, small, large), 0.5)


def power(ops: Ops, x: Tensor, y: Tensor) -> Tensor:
    """`|x| ** y`, negated where x is negative and y odd, NaN where x is negative and y no integer."""
    if y.array is not None and y.rank == 0:
        return ops.binary("Pow", x, y)
    zero = ops.number(0.0, x.dtype)
    size = ops.binary("Pow", ops.unary("Abs", x), y)
    half = _mul(ops, y, 0.5)
    whole = ops.binary("Equal", ops.unary("Floor", y), y, bool_)
    even = ops.binary("Equal", ops.unary("Floor", half), half, bool_)
    signed = ops.where(even, size, ops.unary("Neg", size))
    below = ops.where(whole, signed, ops.number(math.nan, x.dtype))
    return ops.where(ops.binary("Less", x, zero, bool_), below, size)


@dataclass(frozen=True, slots=True)
class Workaround:
    """An operator that a runtime has no kernel for in a dtype, and the composite that stands in for it."""

    target: str
    version: str
    op: str
    dtype: DType
    symptom: str
    composite: Callable[..., Tensor]


_NO_KERNEL = "NOT_IMPLEMENTED: Could not find an implementation"

WORKAROUNDS: tuple[Workaround, ...] = (
    *(Workaround("onnxruntime", "1.32.0", op, f64, _NO_KERNEL, made)
    for op, made in (
        ("Erf", erf), ("Sinh", sinh), ("Cosh", cosh), ("Asin", asin), ("Acos", acos), ("Atan", atan), ("Asinh", asinh), ("Acosh", acosh),
        ("Atanh", atanh),
    )),
    *(
        Workaround(target, version, "Pow", dtype, "a negative base gives NaN, unless the exponent is a constant of rank 0", power)
        for target, version in (("iree", "3.13.0"), ("torch-mlir", "20261001"))
        for dtype in (f64, f32, f16)
    ),
)  # fmt: skip
_BY_OP = {(w.target, w.op, w.dtype): w.composite for w in WORKAROUNDS}


def composite(target: Target, op: str, dtype: DType) -> Callable[..., Tensor] | None:
    """The operator written in others, where the target has no kernel for this dtype."""
    return _BY_OP.get((target.name, op, dtype))
