"""Every primitive of the algebra and the function that emits it."""

from __future__ import annotations

from .contraction import CONTRACTION
from .control import CONTROL
from .dynamic import DYNAMIC
from .elementwise import ELEMENTWISE
from .emission import Rule
from .structural import STRUCTURAL
from .windows import WINDOWS

__all__ = ["ALLOWED", "EMIT"]

EMIT: dict[str, Rule] = {**STRUCTURAL, **CONTRACTION, **WINDOWS, **ELEMENTWISE, **CONTROL, **DYNAMIC}

# The operators that the explicit profile is written in, and why each is there.
ALLOWED: dict[str, str] = {
    "MatMul": "dot",
    "Transpose": "transpose, and the arrangement of a dot",
    "Reshape": "reshape, and axes merged for a dot",
    "Unsqueeze": "axes of size 1 for implicit broadcasting",
    "Squeeze": "axes of size 1 dropped",
    "Expand": "broadcast, where implicit broadcasting does not do",
    "Slice": "slice, reverse, taps of a window",
    "Pad": "pad, taps of a fold; never negative",
    "Concat": "concat, taps of a window, shapes",
    "Gather": "gather",
    "ScatterND": "scatter_add, with reduction=add",
    "Shape": "a symbolic dim, read once",
    "Range": "iota of a symbolic size",
    "Identity": "an output that is an input or another output",
    "Add": "add", "Sub": "add of a negated operand", "Mul": "mul", "Div": "div", "Neg": "neg", "Mod": "rem",
    "Max": "max", "Min": "min", "Pow": "pow", "Abs": "abs", "Sign": "sign", "Floor": "floor", "Round": "round",
    "Exp": "exp", "Log": "log", "Sqrt": "sqrt", "Tanh": "tanh", "Erf": "erf", "Sin": "sin", "Cos": "cos",
    "Sinh": "sinh", "Cosh": "cosh", "Asin": "asin", "Acos": "acos", "Atan": "atan", "Asinh": "asinh",
    "Acosh": "acosh", "Atanh": "atanh",
    "Equal": "equal", "Less": "less", "LessOrEqual": "less_equal", "IsNaN": "is_nan",
    "Not": "logical_not", "And": "logical_and", "Or": "logical_or", "Xor": "logical_xor",
    "BitwiseNot": "bit_not", "BitwiseAnd": "bit_and", "BitwiseOr": "bit_or", "BitwiseXor": "bit_xor",
    "BitShift": "shift_left, shift_right",
    "Where": "select, and a bool as a number", "Cast": "cast",
    "ReduceSum": "reduce_sum", "ReduceMax": "reduce_max", "ReduceMin": "reduce_min", "ReduceProd": "reduce_prod",
    "ArgMax": "argmax", "CumSum": "cumsum", "TopK": "argsort",
    "NonZero": "nonzero", "BitCast": "bit_cast, from opset 26 on",
    "Scan": "scan", "If": "cond", "Loop": "while",
}  # fmt: skip
