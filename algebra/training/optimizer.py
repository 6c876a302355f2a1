"""What an optimizer is: options, slots of state, and one pure update of one parameter, written over values.

The names and defaults of options and slots are those of `torch.optim`, so that a `state_dict` maps onto them letter for letter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from .. import primitives as p
from ..composites import expm1, size_of, sub
from ..errors import Refusal
from ..graph import Value
from ..types import DType, TensorType, f32, f64
from .options import mistyped_fields

__all__ = ["Context", "Optimizer", "Slot", "compute_dtype", "ema"]


class Slot(NamedTuple):
    """One tensor of optimizer state: its type, and the number that fills it at first (None: the parameter's own value)."""

    type: TensorType
    initial: float | None


def compute_dtype(dtype: DType) -> DType:
    """The dtype in which an update of a parameter is computed: its own, float32 for 16-bit ones.

    A 16-bit float holds neither `eps=1e-8` (float16) nor `beta2=0.999` (bfloat16); state and parameter stay in the parameter's dtype.
    """
    return f64 if dtype is f64 else f32


@dataclass(frozen=True, slots=True)
class Context:
    """What one update sees, all of the computing dtype: parameter, gradient, slots, the rank-0 hyperparameters, and `t`, the 1-based step."""

    param: Value
    grad: Value
    slots: Mapping[str, Value]
    hyper: Mapping[str, Value]
    t: Value
    dtype: DType

    def number(self, value: float) -> Value:
        """A rank-0 literal."""
        return p.literal(value, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer(ABC):
    """A rule that moves parameters, with its options; the fields are the options, as `torch.optim` names them.

    Options that enter linearly (`lr`, `weight_decay`, `momentum`, `eps`, ...) are inputs of the step, listed by `hyperparameters`. Those that
    enter powers or complements (`betas`, `alpha`, `rho`, `dampening`, ...) are literals, computed in double and then rounded.
    """

    name: ClassVar[str]
    formula: ClassVar[str]
    reference: ClassVar[str]
    inputs: ClassVar[tuple[str, ...]] = ("lr",)
    optional: ClassVar[tuple[str, ...]] = ()  # inputs that are left out, with their terms, where the option is 0

    lr: float = 1e-3
    maximize: bool = False

    def __post_init__(self) -> None:
        if wrong := mistyped_fields(self) or self.problems():
            raise Refusal(f"cannot use the optimizer {self.name}", wrong)

    def problems(self) -> list[str]:
        """What is wrong with the options."""
        return negative(self, "lr", *self.inputs, *self.optional)

    def hyperparameters(self) -> dict[str, float]:
        """The options that are rank-0 inputs of the step, with their values."""
        names = (*self.inputs, *(n for n in self.optional if getattr(self, n) != 0))
        return {n: float(getattr(self, n)) for n in names}

    def refusal(self, parameter: TensorType) -> str | None:
        """Why this optimizer cannot update a parameter of this type, or None."""
        return None if parameter.dtype.floating else f"a floating parameter is required, found {parameter!r}"

    @abstractmethod
    def slots(self, parameter: TensorType) -> dict[str, Slot]:
        """The state kept for a parameter, by the names of `state_dict`."""

    @abstractmethod
    def move(self, at: Context) -> tuple[Value, dict[str, Value]]:
        """The new parameter and the new slots."""

    def update(self, param: Value, grad: Value, slots: Mapping[str, Value], step: Value,
               hyper: Mapping[str, Value] | None = None) -> tuple[Value, dict[str, Value]]:  # fmt: skip
        """The new parameter and new slots. `step` is int64, the number of updates before this one.

        `hyper` holds rank-0 values, of any floating dtype, for names of `hyperparameters()`; those that it lacks are literals.
        """
        dtype = compute_dtype(param.dtype)
        given = hyper or {}
        known = {
            name: p.cast(given[name], dtype=dtype) if name in given else p.literal(value, dtype)
            for name, value in self.hyperparameters().items()
        }
        g = p.cast(grad, dtype=dtype)
        context = Context(
            param=p.cast(param, dtype=dtype),
            grad=p.neg(g) if self.maximize else g,
            slots={name: p.cast(v, dtype=dtype) for name, v in slots.items()},
            hyper=known,
            t=p.cast(p.add(step, p.literal(1, step.dtype)), dtype=dtype),
            dtype=dtype,
        )
        moved, new = self.move(context)
        kept = {name: p.cast(new[name], dtype=slot.dtype) for name, slot in slots.items()}
        return p.cast(moved, dtype=param.dtype), kept


def negative(options: object, *names: str) -> list[str]:
    """A complaint for each of these options that is not a number of at least 0."""
    values: dict[str, Any] = {n: getattr(options, n) for n in names}
    return [f"{n} must be at least 0, found {v!r}" for n, v in values.items() if not v >= 0]


def outside_unit(**values: float) -> list[str]:
    """A complaint for each value that does not lie in [0, 1)."""
    return [f"{n} must lie in [0, 1), found {v!r}" for n, v in values.items() if not 0 <= v < 1]


# ---- arithmetic of tensors with rank-0 values --------------------------------------------------------------------------------------------


def spread(scalar: Value, like: Value) -> Value:
    """A rank-0 value repeated to the shape of another tensor."""
    return scalar if scalar.rank == like.rank else p.broadcast(scalar, shape=like.shape, axes=())


def scaled(x: Value, factor: Value | float) -> Value:
    """`factor * x`, the factor a number or a rank-0 value."""
    return p.mul(x, spread(factor, x) if isinstance(factor, Value) else p.number(factor, x))


def shifted(x: Value, amount: Value | float) -> Value:
    """`x + amount`, the amount a number or a rank-0 value."""
    return p.add(x, spread(amount, x) if isinstance(amount, Value) else p.number(amount, x))


def over(x: Value, divisor: Value) -> Value:
    """`x / divisor`, the divisor rank 0."""
    return p.div(x, spread(divisor, x))


def toward(old: Value, new: Value, weight: Value | float) -> Value:
    """`old + weight * (new - old)`, as PyTorch's `lerp`."""
    return p.add(old, scaled(sub(new, old), weight))


def second_moment(old: Value, grad: Value, beta: float) -> Value:
    """`beta * old + (1 - beta) * grad ** 2`."""
    return p.add(scaled(old, beta), scaled(p.mul(grad, grad), 1 - beta))


def minus(x: Value, step: Value | float, direction: Value) -> Value:
    """`x - step * direction`."""
    return sub(x, scaled(direction, step))


def power(base: float, exponent: Value) -> Value:
    """`base ** exponent` of a constant in [0, 1] and a positive rank-0 value."""
    return p.literal(0, exponent.dtype) if base == 0 else p.exp(scaled(exponent, math.log(base)))


def complement(base: float, exponent: Value) -> Value:
    """`1 - base ** exponent`, without cancellation."""
    if base == 0:
        return p.literal(1, exponent.dtype)
    return p.neg(expm1(scaled(exponent, math.log(base))))


def norm(x: Value) -> Value:
    """`sqrt(sum(x ** 2))`, rank 0."""
    return p.sqrt(p.reduce_sum(p.mul(x, x), axes=tuple(range(x.rank))))


def root_mean_square(x: Value) -> Value:
    """`norm(x) / sqrt(number of elements)`, rank 0."""
    return p.div(norm(x), p.sqrt(size_of(x.shape, x.dtype)))


def decayed(at: Context) -> Value:
    """`param * (1 - lr * weight_decay)`: decay apart from the gradient."""
    if "weight_decay" not in at.hyper:
        return at.param
    factor = sub(at.number(1), p.mul(at.hyper["lr"], at.hyper["weight_decay"]))
    return scaled(at.param, factor)


def regularized(at: Context) -> Value:
    """`grad + weight_decay * param`: decay as part of the gradient."""
    if "weight_decay" not in at.hyper:
        return at.grad
    return p.add(at.grad, scaled(at.param, at.hyper["weight_decay"]))


def like(parameter: TensorType, *names: str, initial: float = 0.0) -> dict[str, Slot]:
    """Slots of the parameter's own type."""
    return {name: Slot(parameter, initial) for name in names}


# ---- moving average of weights -----------------------------------------------------------------------------------------------------------


def ema(average: Value, param: Value, step: Value, decay: float | Value = 0.999) -> Value:
    """The new value of a slot `ema`: `average + (1 - decay) * (param - average)`, `param` itself at step 0.

    As `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`; `param` is the parameter after its update.
    """
    weight = 1 - decay if isinstance(decay, int | float) else sub(p.literal(1, decay.dtype), decay)
    dtype = compute_dtype(average.dtype)
    if isinstance(weight, Value):
        weight = p.cast(weight, dtype=dtype)
    mixed = toward(p.cast(average, dtype=dtype), p.cast(param, dtype=dtype), weight)
    first = spread(p.equal(step, p.literal(0, step.dtype)), average)
    return p.select(first, p.cast(param, dtype=average.dtype), p.cast(mixed, dtype=average.dtype))
