"""Elementwise primitives: operands have equal shapes, as broadcasting is a primitive of its own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import primitives as p
from ..dims import same_shape
from ..errors import TypeMismatch
from ..graph import Value, bind
from ..types import DType, TensorType, bool_, dtype_of, widened
from .record import NoGrad, Primitive

PIECEWISE = NoGrad("piecewise constant")
DISCRETE = NoGrad("takes no floating operand")


# ---- type rules ------------------------------------------------------------------------------------------------------


def check_same(*types: TensorType) -> None:
    first = types[0]
    for t in types[1:]:
        if t.dtype is not first.dtype:
            raise TypeMismatch(f"operands differ in dtype: {first!r} and {t!r} (cast first)")
        if not same_shape(t.shape, first.shape):
            raise TypeMismatch(f"operands differ in shape: {first!r} and {t!r} (broadcast first)")


def number(*types: TensorType) -> TensorType:
    check_same(*types)
    if types[0].dtype is bool_:
        raise TypeMismatch(f"a number is required, found {types[0]!r} (cast first)")
    return types[0]


def floating(*types: TensorType) -> TensorType:
    check_same(*types)
    if not types[0].dtype.floating:
        raise TypeMismatch(f"a floating dtype is required, found {types[0]!r} (cast first)")
    return types[0]


def integral(*types: TensorType) -> TensorType:
    check_same(*types)
    if not types[0].dtype.integral:
        raise TypeMismatch(f"an integer dtype is required, found {types[0]!r} (cast first)")
    return types[0]


def logical(*types: TensorType) -> TensorType:
    check_same(*types)
    if types[0].dtype is not bool_:
        raise TypeMismatch(f"bool is required, found {types[0]!r}")
    return types[0]


def comparison(x: TensorType, y: TensorType) -> TensorType:
    check_same(x, y)
    return TensorType(bool_, x.shape)


# ---- numpy meanings --------------------------------------------------------------------------------------------------


def _keep(f: Any) -> Any:
    """A numpy meaning that computes narrow dtypes in a wider one and returns the operand's dtype."""

    def meaning(*arrays: np.ndarray) -> np.ndarray:
        return np.asarray(f(*map(widened, arrays))).astype(arrays[0].dtype, copy=False)

    return meaning


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _np_erf(x: np.ndarray) -> np.ndarray:
    return _erf(x) if x.size else x


def _np_div(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """True division of floats; of integers the quotient rounded toward zero (0 where the divisor is 0)."""
    if x.dtype.kind in "iu":
        if x.dtype.kind == "u":
            return np.where(y == 0, 0, x // np.where(y == 0, 1, y))
        safe = np.where(y == 0, 1, y)
        q = x // safe
        return np.where(y == 0, 0, q + ((q < 0) & (q * safe != x)))
    return np.divide(x, y)


def _np_rem(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if x.dtype.kind in "iu":
        return np.where(y == 0, 0, np.fmod(x, np.where(y == 0, 1, y)))
    return np.fmod(x, y)


def _np_sign(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), x, np.sign(x)) if x.dtype.kind not in "iu" else np.sign(x)


def _np_shift_left(x: np.ndarray, n: np.ndarray) -> np.ndarray:
    bits = x.dtype.itemsize * 8
    big = n.astype(np.uint64) >= bits
    return np.where(big, 0, np.left_shift(x, np.where(big, 0, n)))


def _np_shift_right(x: np.ndarray, n: np.ndarray) -> np.ndarray:
    bits = x.dtype.itemsize * 8
    big = n.astype(np.uint64) >= bits
    return np.where(big, np.where(x < 0, -1, 0).astype(x.dtype), np.right_shift(x, np.where(big, 0, n)))


def _np_cast(x: np.ndarray, *, dtype: DType) -> np.ndarray:
    to = dtype.numpy
    if dtype.integral and dtype_of(x.dtype).floating:  # toward zero, through int64 so that narrow types wrap as C does
        wide = x.astype(np.float64) if x.dtype.itemsize < 8 else x
        if to == np.uint64:
            return np.where(wide < 2.0**63, np.trunc(wide).astype(np.int64).astype(np.uint64), wide.astype(np.uint64))
        return np.trunc(wide).astype(np.int64).astype(to)
    if x.dtype.itemsize == 1 and x.dtype.kind not in "iub" and to.itemsize <= 2:
        return x.astype(np.float32).astype(to)
    return x.astype(to)


# ---- VJP rules -------------------------------------------------------------------------------------------------------


def _to_larger(ct: Value, x: Value, y: Value) -> Value:
    """`ct` where x > y, half of it where they tie (as PyTorch's `maximum`), else 0, even where `ct` is infinite."""
    tied = p.select(p.equal(x, y), p.mul(ct, p.number(0.5, ct)), p.number(0, ct))
    return p.select(p.less(y, x), ct, tied)


def _pow_vjp_base(ct: Value, z: Value, x: Value, y: Value) -> Value:
    """`ct * y * x ** (y - 1)`, and 0 where `y == 0` (there `x ** -1` may be infinite)."""
    zero = p.number(0, x)
    power = p.mul(y, p.pow(x, p.add(y, p.number(-1, x))))
    return p.mul(ct, p.select(p.equal(y, zero), zero, power))


def _pow_vjp_exponent(ct: Value, z: Value, x: Value, y: Value) -> Value:
    """`ct * x ** y * log(x)`, and 0 where `x == 0` and `y >= 0`."""
    zero = p.number(0, x)
    flat = p.logical_and(p.equal(x, zero), p.less_equal(zero, y))
    log = p.log(p.select(flat, p.number(1, x), x))
    return p.mul(ct, p.select(flat, zero, p.mul(z, log)))


def _cast_vjp(ct: Value, y: Value, x: Value, *, dtype: DType) -> Value | NoGrad:
    """`ct` cast back; nothing where either dtype is discrete."""
    if not (dtype.floating and x.dtype.floating):
        return NoGrad("casts between floating and discrete dtypes are piecewise constant")
    return p.cast(ct, dtype=x.dtype)


def _over_sqrt(ct: Value, square: Value) -> Value:
    return p.div(ct, p.sqrt(square))


def _one_minus_square(x: Value) -> Value:
    return p.add(p.number(1, x), p.neg(p.mul(x, x)))


def _one_plus_square(x: Value) -> Value:
    return p.add(p.number(1, x), p.mul(x, x))


def _square_minus_one(x: Value) -> Value:
    return p.add(p.mul(x, x), p.number(-1, x))


def _scaled(ct: Value, factor: float, value: Value) -> Value:
    return p.mul(ct, p.mul(p.number(factor, value), value))


def _select_vjp_x(ct: Value, z: Value, c: Value, x: Value, y: Value) -> Value:
    """`ct` where `c`, else 0."""
    return p.select(c, ct, p.number(0, ct))


def _select_vjp_y(ct: Value, z: Value, c: Value, x: Value, y: Value) -> Value:
    """0 where `c`, else `ct`."""
    return p.select(c, p.number(0, ct), ct)


def _select_type(c: TensorType, x: TensorType, y: TensorType) -> TensorType:
    check_same(x, y)
    if c.dtype is not bool_ or not same_shape(c.shape, x.shape):
        raise TypeMismatch(f"the condition must be bool{list(x.shape)}, found {c!r}")
    return x


def _bit_cast_type(x: TensorType, *, dtype: DType) -> TensorType:
    if x.dtype.bits != dtype.bits or x.dtype.bits < 8:
        raise TypeMismatch(f"the bits of {x!r} are none of {dtype}: the widths differ, or are below a byte")
    return TensorType(dtype, x.shape)


# ---- the records -----------------------------------------------------------------------------------------------------

add_p = Primitive("add", number, _keep(np.add), (lambda ct, z, x, y: ct, lambda ct, z, x, y: ct), "x + y")
mul_p = Primitive(
    "mul", number, _keep(np.multiply), (lambda ct, z, x, y: p.mul(ct, y), lambda ct, z, x, y: p.mul(x, ct)), "x * y"
)
neg_p = Primitive("neg", number, _keep(np.negative), (lambda ct, y, x: p.neg(ct),), "-x")
div_p = Primitive(
    "div", number, _keep(_np_div),
    (lambda ct, z, x, y: p.div(ct, y), lambda ct, z, x, y: p.neg(p.mul(ct, p.div(z, y)))),
    "x / y (integers: toward zero)",
)  # fmt: skip
rem_p = Primitive(
    "rem", number, _keep(_np_rem),
    (lambda ct, z, x, y: ct, lambda ct, z, x, y: p.mul(ct, p.neg(p.truncate(p.div(x, y))))),
    "x - y * trunc(x / y)",
)  # fmt: skip
max_p = Primitive(
    "max", number, _keep(np.maximum),
    (lambda ct, z, x, y: _to_larger(ct, x, y), lambda ct, z, x, y: _to_larger(ct, y, x)),
    "the larger of x and y",
)  # fmt: skip
min_p = Primitive(
    "min", number, _keep(np.minimum),
    (lambda ct, z, x, y: _to_larger(ct, y, x), lambda ct, z, x, y: _to_larger(ct, x, y)),
    "the smaller of x and y",
)  # fmt: skip
pow_p = Primitive("pow", floating, _keep(np.power), (_pow_vjp_base, _pow_vjp_exponent), "x ** y")
abs_p = Primitive("abs", number, _keep(np.abs), (lambda ct, y, x: p.mul(ct, p.sign(x)),), "|x|")
sign_p = Primitive("sign", number, _keep(_np_sign), (PIECEWISE,), "-1, 0 or 1")
floor_p = Primitive("floor", floating, _keep(np.floor), (PIECEWISE,), "the largest integer <= x")
round_p = Primitive("round", floating, _keep(np.rint), (PIECEWISE,), "the nearest integer, ties to even")
exp_p = Primitive("exp", floating, _keep(np.exp), (lambda ct, y, x: p.mul(ct, y),), "e ** x")
log_p = Primitive("log", floating, _keep(np.log), (lambda ct, y, x: p.div(ct, x),), "ln x")
sqrt_p = Primitive(
    "sqrt", floating, _keep(np.sqrt), (lambda ct, y, x: p.div(ct, p.mul(p.number(2, y), y)),), "x ** 0.5"
)
tanh_p = Primitive("tanh", floating, _keep(np.tanh), (lambda ct, y, x: p.mul(ct, _one_minus_square(y)),), "tanh x")
erf_p = Primitive(
    "erf",
    floating,
    _keep(_np_erf),
    (lambda ct, y, x: _scaled(ct, 2 / math.sqrt(math.pi), p.exp(p.neg(p.mul(x, x)))),),
    "2 / sqrt(pi) * integral of exp(-t*t) from 0 to x",
)
sin_p = Primitive("sin", floating, _keep(np.sin), (lambda ct, y, x: p.mul(ct, p.cos(x)),), "sin x")
cos_p = Primitive("cos", floating, _keep(np.cos), (lambda ct, y, x: p.mul(ct, p.neg(p.sin(x))),), "cos x")
sinh_p = Primitive("sinh", floating, _keep(np.sinh), (lambda ct, y, x: p.mul(ct, p.cosh(x)),), "sinh x")
cosh_p = Primitive("cosh", floating, _keep(np.cosh), (lambda ct, y, x: p.mul(ct, p.sinh(x)),), "cosh x")
asin_p = Primitive(
    "asin", floating, _keep(np.arcsin), (lambda ct, y, x: _over_sqrt(ct, _one_minus_square(x)),), "arcsin x"
)
acos_p = Primitive(
    "acos", floating, _keep(np.arccos), (lambda ct, y, x: p.neg(_over_sqrt(ct, _one_minus_square(x))),), "arccos x"
)
atan_p = Primitive("atan", floating, _keep(np.arctan), (lambda ct, y, x: p.div(ct, _one_plus_square(x)),), "arctan x")
asinh_p = Primitive(
    "asinh", floating, _keep(np.arcsinh), (lambda ct, y, x: _over_sqrt(ct, _one_plus_square(x)),), "arsinh x"
)
acosh_p = Primitive(
    "acosh", floating, _keep(np.arccosh), (lambda ct, y, x: _over_sqrt(ct, _square_minus_one(x)),), "arcosh x"
)
atanh_p = Primitive(
    "atanh", floating, _keep(np.arctanh), (lambda ct, y, x: p.div(ct, _one_minus_square(x)),), "artanh x"
)

equal_p = Primitive("equal", comparison, np.equal, (PIECEWISE, PIECEWISE), "x == y")
less_p = Primitive("less", comparison, np.less, (PIECEWISE, PIECEWISE), "x < y")
less_equal_p = Primitive("less_equal", comparison, np.less_equal, (PIECEWISE, PIECEWISE), "x <= y")
is_nan_p = Primitive(
    "is_nan",
    lambda x: TensorType(bool_, floating(x).shape),
    lambda x: np.isnan(widened(x)),
    (PIECEWISE,),
    "x is not a number",
)
logical_not_p = Primitive("logical_not", logical, np.logical_not, (DISCRETE,), "not x")
logical_and_p = Primitive("logical_and", logical, np.logical_and, (DISCRETE, DISCRETE), "x and y")
logical_or_p = Primitive("logical_or", logical, np.logical_or, (DISCRETE, DISCRETE), "x or y")
logical_xor_p = Primitive("logical_xor", logical, np.logical_xor, (DISCRETE, DISCRETE), "x != y of bools")
bit_not_p = Primitive("bit_not", integral, _keep(np.bitwise_not), (DISCRETE,), "the bits of x inverted")
bit_and_p = Primitive("bit_and", integral, _keep(np.bitwise_and), (DISCRETE, DISCRETE), "bits in both")
bit_or_p = Primitive("bit_or", integral, _keep(np.bitwise_or), (DISCRETE, DISCRETE), "bits in either")
bit_xor_p = Primitive("bit_xor", integral, _keep(np.bitwise_xor), (DISCRETE, DISCRETE), "bits in one")
shift_left_p = Primitive(
    "shift_left", integral, _keep(_np_shift_left), (DISCRETE, DISCRETE), "x * 2 ** y, bits beyond the width lost"
)
shift_right_p = Primitive("shift_right", integral, _keep(_np_shift_right), (DISCRETE, DISCRETE), "floor(x / 2 ** y)")
select_p = Primitive("select", _select_type, np.where, (PIECEWISE, _select_vjp_x, _select_vjp_y), "x where c, else y")
cast_p = Primitive("cast", lambda x, *, dtype: TensorType(dtype, x.shape), _np_cast, (_cast_vjp,), "x as another dtype")
bit_cast_p = Primitive(
    "bit_cast",
    _bit_cast_type,
    lambda x, *, dtype: np.ascontiguousarray(x).view(dtype.numpy).reshape(x.shape),
    (NoGrad("bits, not a number"),),
    "the bits of x as another dtype of the same width",
)
stop_gradient_p = Primitive(
    "stop_gradient",
    lambda x: x,
    lambda x: x,
    (NoGrad("held constant by stop_gradient"),),
    "x, held constant by differentiation",
)

ELEMENTWISE = (
    add_p, mul_p, neg_p, div_p, rem_p, max_p, min_p, pow_p, abs_p, sign_p, floor_p, round_p, exp_p, log_p, sqrt_p,
    tanh_p, erf_p, sin_p, cos_p, sinh_p, cosh_p, asin_p, acos_p, atan_p, asinh_p, acosh_p, atanh_p, equal_p, less_p,
    less_equal_p, is_nan_p, logical_not_p, logical_and_p, logical_or_p, logical_xor_p, bit_not_p, bit_and_p,
    bit_or_p, bit_xor_p, shift_left_p, shift_right_p, select_p, cast_p, bit_cast_p, stop_gradient_p,
)  # fmt: skip


# ---- typed functions -------------------------------------------------------------------------------------------------


def add(x: Value, y: Value) -> Value:
    """`x + y`."""
    return bind(add_p, x, y)


def mul(x: Value, y: Value) -> Value:
    """`x * y`."""
    return bind(mul_p, x, y)


def neg(x: Value) -> Value:
    """`-x`."""
    return bind(neg_p, x)


def div(x: Value, y: Value) -> Value:
    """`x / y`; of integers the quotient rounded toward zero."""
    return bind(div_p, x, y)


def rem(x: Value, y: Value) -> Value:
    """`x - y * trunc(x / y)`, exact: the sign of the dividend, as C's `fmod`."""
    return bind(rem_p, x, y)


def max(x: Value, y: Value) -> Value:
    """The larger; where they tie the cotangent is split evenly."""
    return bind(max_p, x, y)


def min(x: Value, y: Value) -> Value:
    """The smaller; where they tie the cotangent is split evenly."""
    return bind(min_p, x, y)


def pow(x: Value, y: Value) -> Value:
    """`x ** y` of floats."""
    return bind(pow_p, x, y)


def abs(x: Value) -> Value:
    """`|x|`, with derivative 0 at 0."""
    return bind(abs_p, x)


def sign(x: Value) -> Value:
    """-1, 0 or 1."""
    return bind(sign_p, x)


def floor(x: Value) -> Value:
    """The largest integer at most x, as a float."""
    return bind(floor_p, x)


def round(x: Value) -> Value:
    """The nearest integer, ties to even, as a float."""
    return bind(round_p, x)


def exp(x: Value) -> Value:
    """`e ** x`."""
    return bind(exp_p, x)


def log(x: Value) -> Value:
    """The natural logarithm."""
    return bind(log_p, x)


def sqrt(x: Value) -> Value:
    """`x ** 0.5`."""
    return bind(sqrt_p, x)


def tanh(x: Value) -> Value:
    """The hyperbolic tangent."""
    return bind(tanh_p, x)


def erf(x: Value) -> Value:
    """The error function."""
    return bind(erf_p, x)


def sin(x: Value) -> Value:
    """The sine of radians."""
    return bind(sin_p, x)


def cos(x: Value) -> Value:
    """The cosine of radians."""
    return bind(cos_p, x)


def sinh(x: Value) -> Value:
    """The hyperbolic sine."""
    return bind(sinh_p, x)


def cosh(x: Value) -> Value:
    """The hyperbolic cosine."""
    return bind(cosh_p, x)


def asin(x: Value) -> Value:
    """The arcsine, in radians."""
    return bind(asin_p, x)


def acos(x: Value) -> Value:
    """The arccosine, in radians."""
    return bind(acos_p, x)


def atan(x: Value) -> Value:
    """The arctangent, in radians."""
    return bind(atan_p, x)


def asinh(x: Value) -> Value:
    """The inverse hyperbolic sine."""
    return bind(asinh_p, x)


def acosh(x: Value) -> Value:
    """The inverse hyperbolic cosine."""
    return bind(acosh_p, x)


def atanh(x: Value) -> Value:
    """The inverse hyperbolic tangent."""
    return bind(atanh_p, x)


def equal(x: Value, y: Value) -> Value:
    """`x == y`; false where either is NaN."""
    return bind(equal_p, x, y)


def less(x: Value, y: Value) -> Value:
    """`x < y`; false where either is NaN."""
    return bind(less_p, x, y)


def less_equal(x: Value, y: Value) -> Value:
    """`x <= y`; false where either is NaN."""
    return bind(less_equal_p, x, y)


def is_nan(x: Value) -> Value:
    """Whether x is not a number."""
    return bind(is_nan_p, x)


def logical_not(x: Value) -> Value:
    """`not x`."""
    return bind(logical_not_p, x)


def logical_and(x: Value, y: Value) -> Value:
    """`x and y`."""
    return bind(logical_and_p, x, y)


def logical_or(x: Value, y: Value) -> Value:
    """`x or y`."""
    return bind(logical_or_p, x, y)


def logical_xor(x: Value, y: Value) -> Value:
    """`x != y` of bools."""
    return bind(logical_xor_p, x, y)


def bit_not(x: Value) -> Value:
    """The bits of an integer inverted."""
    return bind(bit_not_p, x)


def bit_and(x: Value, y: Value) -> Value:
    """Bits set in both."""
    return bind(bit_and_p, x, y)


def bit_or(x: Value, y: Value) -> Value:
    """Bits set in either."""
    return bind(bit_or_p, x, y)


def bit_xor(x: Value, y: Value) -> Value:
    """Bits set in exactly one."""
    return bind(bit_xor_p, x, y)


def shift_left(x: Value, y: Value) -> Value:
    """Bits moved up by y, those beyond the width lost."""
    return bind(shift_left_p, x, y)


def shift_right(x: Value, y: Value) -> Value:
    """Bits moved down by y (arithmetic for signed integers)."""
    return bind(shift_right_p, x, y)


def select(c: Value, x: Value, y: Value) -> Value:
    """`x` where `c`, else `y`. A value that is not selected does not reach the gradient, NaN and infinity included."""
    return bind(select_p, c, x, y)


def cast(x: Value, *, dtype: DType) -> Value:
    """`x` as another dtype: floats to integers toward zero, anything to bool as `x != 0`."""
    return x if x.dtype is dtype else bind(cast_p, x, dtype=dtype)


def bit_cast(x: Value, *, dtype: DType) -> Value:
    """The bits of `x` as another dtype of the same width, of at least a byte; a bool is a byte of 0 or 1."""
    return x if x.dtype is dtype else bind(bit_cast_p, x, dtype=dtype)


def stop_gradient(x: Value) -> Value:
    """`x`, held constant by differentiation."""
    return bind(stop_gradient_p, x)


def truncate(x: Value) -> Value:
    """`x` rounded toward zero; of integers x itself."""
    if not x.dtype.floating:
        return x
    return mul(sign(x), floor(abs(x)))
