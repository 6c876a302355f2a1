"""The whole algebra: `PRIMITIVES`, and one typed function per primitive.

Used as `from .. import primitives as p`; a rule reaches another primitive at call time (`p.mul`), so there is no import
cycle.
"""

from __future__ import annotations

from .contraction import (
    CONTRACTION,
    argmax,
    argsort,
    cumsum,
    dot,
    free_axes,
    gather,
    kept_axes,
    nonzero,
    reduce_max,
    reduce_min,
    reduce_prod,
    reduce_sum,
    scatter_add,
)
from .control import CONTROL, body_of, cond, scan, while_
from .elementwise import (
    ELEMENTWISE,
    abs,
    acos,
    acosh,
    add,
    asin,
    asinh,
    atan,
    atanh,
    bit_and,
    bit_cast,
    bit_not,
    bit_or,
    bit_xor,
    cast,
    cos,
    cosh,
    div,
    equal,
    erf,
    exp,
    floor,
    is_nan,
    less,
    less_equal,
    log,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    max,
    min,
    mul,
    neg,
    pow,
    rem,
    round,
    select,
    shift_left,
    shift_right,
    sign,
    sin,
    sinh,
    sqrt,
    stop_gradient,
    tanh,
    truncate,
)
from .record import Each, Joint, NoGrad, Primitive
from .structural import (
    STRUCTURAL,
    broadcast,
    concat,
    dim,
    fold,
    full,
    input,
    iota,
    item,
    literal,
    number,
    pad,
    reshape,
    reverse,
    slice,
    transpose,
    window,
    window_count,
)

PRIMITIVES: tuple[Primitive, ...] = (*STRUCTURAL, *CONTRACTION, *ELEMENTWISE, *CONTROL)
BY_NAME: dict[str, Primitive] = {primitive.name: primitive for primitive in PRIMITIVES}

__all__ = [
    "BY_NAME", "ELEMENTWISE", "PRIMITIVES", "Each", "Joint", "NoGrad", "Primitive", "abs", "acos", "acosh", "add",
    "argmax", "argsort", "asin", "asinh", "atan", "atanh", "bit_and", "bit_cast", "bit_not", "bit_or", "bit_xor",
    "body_of", "broadcast", "cast", "concat", "cond", "cos", "cosh", "cumsum", "dim", "div", "dot", "equal", "erf",
    "exp", "floor", "fold", "free_axes", "full", "gather", "input", "iota", "is_nan", "item", "kept_axes", "less",
    "less_equal", "literal", "log", "logical_and", "logical_not", "logical_or", "logical_xor", "max", "min", "mul",
    "neg", "nonzero", "number", "pad", "pow", "reduce_max", "reduce_min", "reduce_prod", "reduce_sum", "rem",
    "reshape", "reverse", "round", "scan", "scatter_add", "select", "shift_left", "shift_right", "sign", "sin",
    "sinh", "slice", "sqrt", "stop_gradient", "tanh", "transpose", "truncate", "while_", "window", "window_count",
]  # fmt: skip
