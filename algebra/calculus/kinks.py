"""The choices where the mathematics leaves one: kinks, ties, jumps and edges of domains.

Each has an example that is tested.
Where PyTorch differentiates the operation, the choice is PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .. import composites as c
from .. import primitives as p
from ..graph import Value

__all__ = ["KINKS", "Kink"]


@dataclass(frozen=True, slots=True)
class Kink:
    """One choice: the function `build` at the points `at` (one tuple per operand), and the gradients chosen there.

    `seed` is the cotangent of the result (ones by default). `torch` is the same function in PyTorch, an expression over
    `t` (the module) and `x`, `y` (the operands), where PyTorch has it.
    """

    where: str
    choice: str
    build: Callable[..., Value]
    at: tuple[tuple[float, ...], ...]
    gradients: tuple[tuple[float, ...], ...]
    seed: tuple[float, ...] | None = None
    torch: str | None = None

    @property
    def source(self) -> str:
        """Whose choice it is."""
        return f"PyTorch: `{self.torch}`" if self.torch else "ours"


def _bounds(x: Value) -> Value:
    return c.clamp(x, p.number(-1, x), p.number(1, x))


def _guarded(x: Value) -> Value:
    positive = p.less(p.number(0, x), x)
    return p.select(positive, p.log(p.select(positive, x, p.number(1, x))), p.number(0, x))


INF, NAN = math.inf, math.nan

KINKS: tuple[Kink, ...] = (
    Kink("relu at 0", "0, the left derivative", c.relu, ((-1, -0.0, 0, 2),), ((0, 0, 0, 1),), torch="t.relu(x)"),
    Kink("abs at 0", "0, between the two sides", p.abs, ((-3, -0.0, 0, 2),), ((-1, 0, 0, 1),), torch="t.abs(x)"),
    Kink(
        "clamp at its bounds",
        "the cotangent passes, bounds included",
        _bounds,
        ((-2, -1, 0, 1, 2),),
        ((0, 1, 1, 1, 0),),
        torch="t.clamp(x, -1, 1)",
    ),
    Kink(
        "max of two at a tie",
        "half to each",
        p.max,
        ((1, 2, 0), (1, 3, -1)),
        ((0.5, 0, 1), (0.5, 1, 0)),
        torch="t.maximum(x, y)",
    ),
    Kink(
        "min of two at a tie",
        "half to each",
        p.min,
        ((1, 2, 0), (1, 3, -1)),
        ((0.5, 1, 0), (0.5, 0, 1)),
        torch="t.minimum(x, y)",
    ),
    Kink(
        "reduce_max, ties",
        "split evenly",
        lambda x: p.reduce_max(x, axes=(0,)),
        ((3, 1, 3, 3),),
        ((1 / 3, 0, 1 / 3, 1 / 3),),
        torch="t.amax(x, 0)",
    ),
    Kink(
        "reduce_min, ties",
        "split evenly",
        lambda x: p.reduce_min(x, axes=(0,)),
        ((1, 1, 2),),
        ((0.5, 0.5, 0),),
        torch="t.amin(x, 0)",
    ),
    Kink(
        "reduce_max with ties='first' (max-pooling, max along an axis)",
        "all to the first",
        lambda x: p.reduce_max(x, axes=(0,), ties="first"),
        ((1, 3, 3),),
        ((0, 1, 0),),
        torch="t.max(x, 0).values",
    ),
    Kink(
        "reduce_min with ties='first'",
        "all to the first",
        lambda x: p.reduce_min(x, axes=(0,), ties="first"),
        ((2, 1, 1),),
        ((0, 1, 0),),
        torch="t.min(x, 0).values",
    ),
    Kink(
        "reduce_prod at zeros",
        "the product of the others, exactly",
        lambda x: p.reduce_prod(x, axes=(0,)),
        ((2, 0, 5),),
        ((0, 10, 0),),
        torch="t.prod(x, 0)",
    ),
    Kink(
        "reduce_prod at two zeros",
        "0",
        lambda x: p.reduce_prod(x, axes=(0,)),
        ((2, 0, 0),),
        ((0, 0, 0),),
        torch="t.prod(x, 0)",
    ),
    Kink(
        "sign",
        "0 everywhere",
        lambda x: p.add(p.sign(x), p.mul(x, p.number(0, x))),
        ((-1, 0, 2),),
        ((0, 0, 0),),
        torch="t.sign(x) + x * 0",
    ),
    Kink(
        "floor, ceil and round, at jumps too",
        "0 everywhere",
        lambda x: p.add(p.add(p.floor(x), c.ceil(x)), p.add(p.round(x), p.mul(x, p.number(0, x)))),
        ((-1, 0.5, 2),),
        ((0, 0, 0),),
        torch="t.floor(x) + t.ceil(x) + t.round(x) + x * 0",
    ),
    Kink(
        "rem (fmod), at jumps too",
        "1 for the dividend, -trunc(x / y) for the divisor",
        p.rem,
        ((5, -5, 6), (3, 3, 3)),
        ((1, 1, 1), (-1, 1, -2)),
        torch="t.fmod(x, y)",
    ),
    Kink(
        "pow at base 0",
        "0 for exponents above 1 and for 0; 1 for 1",
        lambda x: p.pow(x, p.literal(np.array([3.0, 2.0, 1.0, 0.0]), x.dtype)),
        ((0, 0, 0, 0),),
        ((0, 0, 1, 0),),
        torch="t.pow(x, t.tensor([3., 2., 1., 0.], dtype=x.dtype))",
    ),
    Kink(
        "pow by its exponent at base 0",
        "0 where the exponent is not negative",
        lambda y: p.pow(p.number(0, y), y),
        ((0, 1, 2),),
        ((0, 0, 0),),
        torch="t.pow(t.zeros_like(x), x)",
    ),
    Kink(
        "pow of a negative base",
        "its base's derivative; no logarithm takes part unless the exponent is differentiated",
        lambda x: p.pow(x, p.number(3, x)),
        ((-3, -0.5),),
        ((27, 0.75),),
        torch="t.pow(x, 3.)",
    ),
    Kink(
        "an infinite cotangent at a max of two",
        "what is not chosen gets 0, never NaN",
        lambda x: p.sqrt(p.max(x, p.number(0, x))),
        ((-1, 4),),
        ((0, 0.25),),
        torch="t.sqrt(t.maximum(x, t.zeros_like(x)))",
    ),
    Kink("sqrt at 0", "infinite, as the mathematics says", p.sqrt, ((0, 4),), ((INF, 0.25),), torch="t.sqrt(x)"),
    Kink("log at 0", "infinite, as the mathematics says", p.log, ((0, 2),), ((INF, 0.5),), torch="t.log(x)"),
    Kink(
        "asin and acosh at the edge of their domain",
        "infinite, as the mathematics says",
        lambda x: p.add(p.asin(x), p.acosh(x)),
        ((1,),),
        ((INF,),),
        torch="t.asin(x) + t.acosh(x)",
    ),
    Kink(
        "select",
        "only the chosen value has a gradient; a NaN or infinity of the other does not reach it",
        _guarded,
        ((-1, 0, 2),),
        ((0, 0, 0.5),),
        torch="t.where(x > 0, t.log(t.where(x > 0, x, t.ones_like(x))), t.zeros_like(x))",
    ),
    Kink(
        "gather at a repeated index",
        "the cotangents add up",
        lambda x: p.gather(x, c.integers([0, 2, 0, -1]), axis=0),
        ((1, 2, 3),),
        ((5, 0, 12),),
        seed=(1, 4, 4, 8),
        torch="x[t.tensor([0, 2, 0, 2])]",
    ),
    Kink(
        "sigmoid at 0 and far out",
        "no kink is left: 1/4 and 0",
        c.sigmoid,
        ((0, 1e4, -1e4),),
        ((0.25, 0, 0),),
        torch="t.sigmoid(x)",
    ),
    Kink(
        "softplus at 0 and far out",
        "no kink is left: 1/2, 1 and 0",
        c.softplus,
        ((0, 1e4, -1e4),),
        ((0.5, 1, 0),),
        torch="t.nn.functional.softplus(x)",
    ),
    Kink(
        "stop_gradient",
        "0: held constant",
        lambda x: p.mul(p.stop_gradient(x), x),
        ((3,),),
        ((3,),),
        torch="x.detach() * x",
    ),
)
