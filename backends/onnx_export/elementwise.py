"""Emission of elementwise primitives: one operator each, in the layout of the operands, repeated axes left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...algebra.graph import Value
from ...algebra.types import DType, bool_, i8, i16, i32, i64, u8, u16, u32, u64
from . import workarounds
from .emission import Emission, covered
from .ops import Ops
from .program import Tensor
from .view import View

__all__ = ["ELEMENTWISE"]

Combine = Callable[..., Tensor]
_UNSIGNED: dict[DType, DType] = {i8: u8, i16: u16, i32: u32, i64: u64}


def combined(e: Emission, v: Value, operands: Sequence[Value], combine: Combine) -> View:
    """`combine(ops, *tensors)` of operands laid out to broadcast against one another."""
    views = [e.view(o) for o in operands]
    order = e.layout(views, covered(views), id(v) in e.pinned)
    return View.of(combine(e.ops, *(e.place(x, order) for x in views)), order, v.shape)


def _simple(combine: Combine) -> Callable[[Emission, Value], View]:
    def emit(e: Emission, v: Value) -> View:
        return combined(e, v, v.operands, combine)

    return emit


def _unary(op: str) -> Callable[[Emission, Value], View]:
    def combine(ops: Ops, x: Tensor) -> Tensor:
        composite = workarounds.composite(ops.target, op, x.dtype)
        return ops.unary(op, x) if composite is None else composite(ops, x)

    return _simple(combine)


def _binary(op: str) -> Callable[[Emission, Value], View]:
    def combine(ops: Ops, x: Tensor, y: Tensor) -> Tensor:
        composite = workarounds.composite(ops.target, op, x.dtype)
        return ops.binary(op, x, y) if composite is None else composite(ops, x, y)

    return _simple(combine)


def _compare(op: str) -> Callable[[Emission, Value], View]:
    def emit(e: Emission, v: Value) -> View:
        x, y = (e.view(o) for o in v.operands)
        if x == y:
            return _compared_with_itself(e.ops, op, x)
        return combined(e, v, v.operands, lambda ops, a, b: ops.binary(op, a, b, bool_))

    return emit


def _compared_with_itself(ops: Ops, op: str, x: View) -> View:
    """IREE counts such comparisons wrongly over a symbolic axis, so none is written: they hold (or not) but for NaN."""
    if op == "Less" or not x.tensor.dtype.floating:
        return View(ops.number(op != "Less", bool_), (None,) * len(x.shape), x.shape)
    number = ops.unary("Not", ops.unary("IsNaN", x.tensor, bool_))
    return View(number, x.places, x.shape)


def _add(e: Emission, v: Value) -> View:
    """`x + y`; `x - y` where an operand is negated."""
    x, y = v.operands
    if y.primitive.name == "neg":
        return combined(e, v, (x, y.operands[0]), lambda ops, a, b: ops.binary("Sub", a, b))
    if x.primitive.name == "neg":
        return combined(e, v, (y, x.operands[0]), lambda ops, a, b: ops.binary("Sub", a, b))
    return combined(e, v, (x, y), lambda ops, a, b: ops.binary("Add", a, b))


def _neg(ops: Ops, x: Tensor) -> Tensor:
    """ONNX's Neg takes no unsigned integers; they wrap in a Sub."""
    return ops.binary("Sub", ops.number(0, x.dtype), x) if x.dtype.kind == "u" else ops.unary("Neg", x)


def _rem(ops: Ops, x: Tensor, y: Tensor) -> Tensor:
    return ops.apply("Mod", (x, y), x.dtype, ops.broadcast(x, y), fmod=1)


def _select(ops: Ops, c: Tensor, x: Tensor, y: Tensor) -> Tensor:
    if x.dtype is bool_ and not ops.target.where_bool:
        kept = ops.binary("And", c, x)
        return ops.binary("Or", kept, ops.binary("And", ops.unary("Not", c), y))
    return ops.where(c, x, y)


def _selected(e: Emission, v: Value) -> View:
    """Where; on onnxruntime, whose Where goes element by element, the larger or smaller of a tensor and a number where it is that."""
    c, x, y = v.operands
    if e.ops.target.slow_moves:
        if (extreme := _extreme(e, c, x, y)) is not None:
            return combined(e, v, c.operands, lambda ops, a, b: ops.binary(extreme, a, b))
        numbers = [_number(e, o) for o in (x, y)]
        if v.dtype.floating and numbers in ([1.0, 0.0], [0.0, 1.0]):
            return combined(e, v, (c,), lambda ops, a: ops.cast(a if numbers[0] else ops.unary("Not", a), v.dtype))
    return combined(e, v, v.operands, _select)


def _extreme(e: Emission, c: Value, x: Value, y: Value) -> str | None:
    """`Max` where `c ? x : y` is `p < q ? q : p` with a number q, `Min` where it is `q < p ? q : p`; a NaN stays one in both forms."""
    if c.primitive.name not in ("less", "less_equal") or not x.dtype.floating:
        return None
    number = _number(e, x)
    if number is None or np.isnan(number):
        return None
    p, q = c.operands
    return "Max" if x is q and y is p else "Min" if x is p and y is q else None


def _number(e: Emission, v: Value) -> float | None:
    """The number that a value repeats, where it is a constant."""
    tensor = e.view(v).tensor
    return None if tensor.array is None or tensor.rank else float(tensor.array)


def _cast(e: Emission, v: Value) -> View:
    to: DType = v.params["dtype"]

    def combine(ops: Ops, x: Tensor) -> Tensor:
        if x.dtype.floating and to.integral and to not in (i64, i32, u64):
            return ops.cast(ops.cast(x, i64), to)  # so that what does not fit wraps, as the primitive says
        return ops.cast(x, to)

    return combined(e, v, v.operands, combine)


def _stop_gradient(e: Emission, v: Value) -> View:
    return e.view(v.operands[0])


def _guarded(ops: Ops, x: Tensor, n: Tensor, shifted: Callable[[Tensor, Tensor], Tensor], beyond: Tensor) -> Tensor:
    """`shifted(x, n)`, and `beyond` where n is no less than the width: ONNX leaves that case open."""
    bits = x.dtype.bits
    if n.array is not None and np.all((n.array.astype(np.uint64)) < bits):
        return shifted(x, n)
    unsigned = ops.cast(n, _UNSIGNED.get(n.dtype, n.dtype))
    fits = ops.binary("Less", unsigned, ops.number(bits, unsigned.dtype), bool_)
    safe = ops.where(fits, n, ops.number(0, n.dtype))
    return ops.where(fits, shifted(x, safe), beyond)


def _bit_shift(direction: str) -> Callable[[Ops, Tensor, Tensor], Tensor]:
    """BitShift, in the unsigned dtype of the same width."""

    def shifted(ops: Ops, x: Tensor, n: Tensor) -> Tensor:
        wide = _UNSIGNED.get(x.dtype, x.dtype)
        a, b = ops.cast(x, wide), ops.cast(n, wide)
        return ops.cast(ops.apply("BitShift", (a, b), wide, ops.broadcast(a, b), direction=direction), x.dtype)

    return shifted


def _shift_left(ops: Ops, x: Tensor, n: Tensor) -> Tensor:
    return _guarded(ops, x, n, lambda a, b: _bit_shift("LEFT")(ops, a, b), ops.number(0, x.dtype))


def _shift_right(ops: Ops, x: Tensor, n: Tensor) -> Tensor:
    """`floor(x / 2 ** n)`: a negative number is shifted with its bits inverted."""
    right = _bit_shift("RIGHT")
    if x.dtype.kind == "u":
        return _guarded(ops, x, n, lambda a, b: right(ops, a, b), ops.number(0, x.dtype))
    negative = ops.binary("Less", x, ops.number(0, x.dtype), bool_)
    mask = ops.where(negative, ops.number(-1, x.dtype), ops.number(0, x.dtype))

    def shifted(a: Tensor, b: Tensor) -> Tensor:
        return ops.binary("BitwiseXor", mask, right(ops, ops.binary("BitwiseXor", mask, a), b))

    return _guarded(ops, x, n, shifted, mask)


ELEMENTWISE: dict[str, Callable[[Emission, Value], View]] = {
    "add": _add,
    "mul": _binary("Mul"),
    "neg": _simple(_neg),
    "div": _binary("Div"),
    "rem": _simple(_rem),
    "max": _binary("Max"),
    "min": _binary("Min"),
    "pow": _binary("Pow"),
    "abs": _unary("Abs"),
    "sign": _unary("Sign"),
    "floor": _unary("Floor"),
    "round": _unary("Round"),
    "exp": _unary("Exp"),
    "log": _unary("Log"),
    "sqrt": _unary("Sqrt"),
    "tanh": _unary("Tanh"),
    "erf": _unary("Erf"),
    "sin": _unary("Sin"),
    "cos": _unary("Cos"),
    "sinh": _unary("Sinh"),
    "cosh": _unary("Cosh"),
    "asin": _unary("Asin"),
    "acos": _unary("Acos"),
    "atan": _unary("Atan"),
    "asinh": _unary("Asinh"),
    "acosh": _unary("Acosh"),
    "atanh": _unary("Atanh"),
    "equal": _compare("Equal"),
    "less": _compare("Less"),
    "less_equal": _compare("LessOrEqual"),
    "is_nan": _simple(lambda ops, x: ops.unary("IsNaN", x, bool_)),
    "logical_not": _unary("Not"),
    "logical_and": _binary("And"),
    "logical_or": _binary("Or"),
    "logical_xor": _binary("Xor"),
    "bit_not": _unary("BitwiseNot"),
    "bit_and": _binary("BitwiseAnd"),
    "bit_or": _binary("BitwiseOr"),
    "bit_xor": _binary("BitwiseXor"),
    "shift_left": _simple(_shift_left),
    "shift_right": _simple(_shift_right),
    "select": _selected,
    "cast": _cast,
    "stop_gradient": _stop_gradient,
}
