"""Learning-rate schedules: the rate as a function of the step counter, inside the graph.

Each is the closed form of a scheduler of `torch.optim.lr_scheduler` that is stepped once after every update. The base rate stays the input `lr`;
a schedule gives the rate of this step from it. `step` is int64, 0 at the first update.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, final

import numpy as np

from .. import primitives as p
from ..composites import greater_equal, scale, sub
from ..errors import Refusal
from ..graph import Value
from ..types import i64
from .loss import near
from .optimizer import power, shifted
from .options import mistyped_fields

__all__ = [
    "SCHEDULES", "Constant", "Cosine", "CosineRestarts", "Cyclic", "Exponential", "InverseSqrt", "Linear", "MultiStep", "OneCycle", "Polynomial",
    "Schedule", "Sequential", "Step", "schedule",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(ABC):
    """A rule for the rate. Its fields are the options, named as in `torch.optim.lr_scheduler`."""

    name: ClassVar[str]
    formula: ClassVar[str]
    reference: ClassVar[str]

    def __post_init__(self) -> None:
        if wrong := mistyped_fields(self) or self.problems():
            raise Refusal(f"cannot use the schedule {self.name}", wrong)

    def problems(self) -> list[str]:
        """What is wrong with the options."""
        return []

    @abstractmethod
    def rate(self, step: Value, lr: Value) -> Value:
        """The rate of this step: rank 0, of the dtype of `lr`."""


def positive(options: object, *names: str) -> list[str]:
    """A complaint for each of these options that is not above 0."""
    values = {n: getattr(options, n) for n in names}
    return [f"{n} must be above 0, found {v!r}" for n, v in values.items() if not v > 0]


def _time(step: Value, lr: Value) -> Value:
    return p.cast(step, dtype=lr.dtype)


def _from(step: Value, first: int) -> Value:
    """Whether `step >= first`."""
    return greater_equal(step, p.literal(first, step.dtype))


def _eased(fraction: Value) -> Value:
    """`(1 + cos(pi fraction)) / 2`."""
    return scale(shifted(p.cos(scale(fraction, math.pi)), 1), 0.5)


def _until(step: Value, lr: Value, total: float) -> Value:
    """`min(step, total) / total`."""
    return scale(p.min(_time(step, lr), p.literal(total, lr.dtype)), 1 / total)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(Schedule):
    """The base rate, times `factor` for the first `total_iters` steps."""

    name: ClassVar[str] = "constant"
    formula: ClassVar[str] = "lr factor while t < total_iters, then lr"
    reference: ClassVar[str] = "torch.optim.lr_scheduler.ConstantLR"

    factor: float = 1.0
    total_iters: int = 0

    def rate(self, step: Value, lr: Value) -> Value:
        if self.factor == 1 or self.total_iters == 0:
            return lr
        return p.select(_from(step, self.total_iters), lr, scale(lr, self.factor))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Schedule):
    """From `start_factor` to `end_factor` of the base rate in `total_iters` steps."""

    name: ClassVar[str] = "linear"
    formula: ClassVar[str] = "lr (start_factor + (end_factor - start_factor) min(t, total_iters) / total_iters)"
    reference: ClassVar[str] = "torch.optim.lr_scheduler.LinearLR"

    start_factor: float = 1 / 3
    end_factor: float = 1.0
    total_iters: int = 5

    def problems(self) -> list[str]:
        return positive(self, "total_iters")

    def rate(self, step: Value, lr: Value) -> Value:
        change = scale(_until(step, lr, self.total_iters), self.end_factor - self.start_factor)
        return p.mul(lr, shifted(change, self.start_factor))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(Schedule):
    """Half a cosine from the base rate to `eta_min` in `T_max` steps; it goes on, up again, as PyTorch's does."""

    name: ClassVar[str] = "cosine"
    formula: ClassVar[str] = "eta_min + (lr - eta_min) (1 + cos(pi t / T_max)) / 2"
    reference: ClassVar[str] = "torch.optim.lr_scheduler.CosineAnnealingLR; Loshchilov and Hutter 2016"

    T_max: int
    eta_min: float = 0.0

    def problems(self) -> list[str]:
        return positive(self, "T_max")

    def rate(self, step: Value, lr: Value) -> Value:
        period = p.literal(2 * self.T_max, step.dtype)  # the angle stays small, so that float32 keeps its digits
        part = scale(_time(p.rem(step, period), lr), 1 / self.T_max)
        return shifted(p.mul(shifted(lr, -self.eta_min), _eased(part)), self.eta_min)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CosineRestarts(Schedule):
    """Half cosines one after the other: the first of `T_0` steps, each next one `T_mult` times as long."""

    name: ClassVar[str] = "cosine_restarts"
    formula: ClassVar[str] = "eta_min + (lr - eta_min) (1 + cos(pi t_i / T_i)) / 2"
    reference: ClassVar[str] = "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts; Loshchilov and Hutter 2016"

    T_0: int
    T_mult: int = 1
    eta_min: float = 0.0

    def problems(self) -> list[str]:
        return positive(self, "T_0", "T_mult")

    def rate(self, step: Value, lr: Value) -> Value:
        if self.T_mult == 1:
            fraction = scale(_time(p.rem(step, p.literal(self.T_0, step.dtype)), lr), 1 / self.T_0)
        else:
            starts, lengths = [0], [self.T_0]
            while starts[-1] < 1 << 31:
                starts.append(starts[-1] + lengths[-1])
                lengths.append(lengths[-1] * self.T_mult)
            begun, length = (_latest(step, starts, values) for values in (starts, lengths))
            fraction = p.div(_time(sub(step, begun), lr), _time(length, lr))
        return shifted(p.mul(shifted(lr, -self.eta_min), _eased(fraction)), self.eta_min)


def _latest(step: Value, starts: Sequence[int], values: Sequence[int]) -> Value:
    """Of ascending values the last whose start is not after this step."""
    first, numbers = (p.literal(np.asarray(v, np.int64), i64) for v in (starts, values))
    reached = p.less_equal(first, p.broadcast(step, shape=first.shape, axes=()))
    return p.reduce_max(p.select(reached, numbers, p.number(0, numbers)), axes=(0,))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Schedule):
    """The rate falls by `gamma` after every `step_size` steps."""

    name: ClassVar[str] = "step"
    formula: ClassVar[str] = "lr gamma ** floor(t / step_size)"
    reference: ClassVar[str] = "torch.optim.lr_scheduler.StepLR"

    step_size: int
    gamma: float = 0.1

    def problems(self) -> list[str]:
        return positive(self, "step_size", "gamma")

    def rate(self, step: Value, lr: Value) -> Value:
        return p.mul(lr, power(self.gamma, _time(p.div(step, p.literal(self.step_size, step.dtype)), lr)))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MultiStep(Schedule):
    """The rate falls by `gamma` at each milestone."""

    name: ClassVar[str] = "multi_step"
    formula: ClassVar[str] = "lr gamma ** (number of milestones <= t)"
    reference: ClassVar[str] = "torch.optim.lr_scheduler.MultiStepLR"

    milestones: tuple[int, ...]
    gamma: float = 0.1

    def rate(self, step: Value, lr: Value) -> Value:
        result = lr
        for milestone in sorted(self.milestones):
            result = p.select(_from(step, milestone), scale(result, self.gamma), result)
        return result


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential(Schedule):
    """The rate falls by `gamma` every step."""

    name: ClassVar[str] = "exponential"
    formula: ClassVar[str] = "lr gamma ** t"
    reference: ClassVar[str] = "torch.optim.lr_scheduler.ExponentialLR"

    gamma: float

    def problems(self) -> list[str]:
        return positive(self, "gamma")

    def rate(self, step: Value, lr: Value) -> Value:
        return p.mul(lr, power(self.gamma, _time(step, lr)))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial(Schedule):
    """From the base rate to 0 in `total_iters` steps, along a power."""

    name: ClassVar[str] = "polynomial"
    formula: ClassVar[str] = "lr (1 - min(t, total_iters) / total_iters) ** power"
    reference: ClassVar[str] = "torch.optim.lr_scheduler.PolynomialLR"

    total_iters: int = 5
    power: float = 1.0

    def problems(self) -> list[str]:
        return positive(self, "total_iters")

    def rate(self, step: Value, lr: Value) -> Value:
        total = p.literal(self.total_iters, step.dtype)
        rest = scale(_time(sub(total, p.min(step, total)), lr), 1 / self.total_iters)
        return p.mul(lr, rest if self.power == 1 else p.pow(rest, p.literal(self.power, lr.dtype)))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InverseSqrt(Schedule):
    """The base rate after `warmup` steps of linear growth, then falling with the root of the step."""

    name: ClassVar[str] = "inverse_sqrt"
    formula: ClassVar[str] = "lr min((t + 1) / warmup, sqrt(warmup / (t + 1)))"
    reference: ClassVar[str] = "Vaswani et al. 2017, Attention Is All You Need, section 5.3"

    warmup: int = 4000

    def problems(self) -> list[str]:
        return positive(self, "warmup")

    def rate(self, step: Value, lr: Value) -> Value:
        part = scale(shifted(_time(step, lr), 1), 1 / self.warmup)
        return p.mul(lr, p.min(part, p.div(p.literal(1, lr.dtype), p.sqrt(part))))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OneCycle(Schedule):
    """Up from `lr / div_factor` to `lr`, then down to `lr / div_factor / final_div_factor`, where it stays. The base rate is the highest."""

    name: ClassVar[str] = "one_cycle"
    formula: ClassVar[str] = (
        "anneal(lr / div_factor, lr) for pct_start of total_steps, then anneal(lr, lr / div_factor / final_div_factor)"
    )
    reference: ClassVar[str] = "torch.optim.lr_scheduler.OneCycleLR; Smith and Topin 2017"

    total_steps: int
    pct_start: float = 0.3
    anneal_strategy: str = "cos"
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False

    def problems(self) -> list[str]:
        wrong = positive(self, "total_steps", "div_factor", "final_div_factor")
        if not 0 <= self.pct_start <= 1:
            wrong.append(f"pct_start must lie in [0, 1], found {self.pct_start!r}")
        if self.anneal_strategy not in ("cos", "linear"):
            wrong.append(f"anneal_strategy is 'cos' or 'linear', found {self.anneal_strategy!r}")
        return wrong

    def _phases(self) -> list[tuple[float, float, float]]:
        """The last step of each phase, and its factors of the base rate at both ends."""
        low = 1 / self.div_factor
        least = low / self.final_div_factor
        peak, last = self.pct_start * self.total_steps - 1, float(self.total_steps - 1)
        if self.three_phase:
            return [(peak, low, 1.0), (2 * self.pct_start * self.total_steps - 2, 1.0, low), (last, low, least)]
        return [(peak, low, 1.0), (last, 1.0, least)]

    def rate(self, step: Value, lr: Value) -> Value:
        t, begun = _time(step, lr), 0.0
        parts: list[tuple[float, Value]] = []
        for end, first, last in self._phases():
            length = end - begun
            fraction = scale(shifted(t, -begun), 1 / length) if length else p.literal(1, lr.dtype)
            fraction = p.min(fraction, p.literal(1, lr.dtype))
            if self.anneal_strategy == "cos":
                factor = shifted(scale(_eased(fraction), first - last), last)
            else:
                factor = shifted(scale(fraction, last - first), first)
            parts.append((end, factor))
            begun = end
        result = parts[-1][1]
        for end, factor in reversed(parts[:-1]):
            result = p.select(p.less_equal(t, p.literal(end, lr.dtype)), factor, result)
        return p.mul(lr, result)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cyclic(Schedule):
    """Up and down between the base rate and `max_lr`; the height halves each cycle (`triangular2`) or falls by `gamma` a step (`exp_range`)."""

    name: ClassVar[str] = "cyclic"
    formula: ClassVar[str] = (
        "lr + (max_lr - lr) max(0, 1 - |2 t' - 1|), t' the part of the cycle that is done, each half of its own length"
    )
    reference: ClassVar[str] = "torch.optim.lr_scheduler.CyclicLR; Smith 2015"

    max_lr: float
    step_size_up: int = 2000
    step_size_down: int | None = None
    mode: str = "triangular"
    gamma: float = 1.0

    def problems(self) -> list[str]:
        wrong = positive(self, "step_size_up", "gamma")
        if self.mode not in ("triangular", "triangular2", "exp_range"):
            wrong.append(f"mode is triangular, triangular2 or exp_range, found {self.mode!r}")
        return wrong

    def rate(self, step: Value, lr: Value) -> Value:
        up = self.step_size_up
        down = self.step_size_down or up
        period = p.literal(up + down, step.dtype)
        place = _time(p.rem(step, period), lr)
        falling = scale(shifted(p.neg(place), up + down), 1 / down)
        height = p.select(p.less_equal(place, p.literal(up, lr.dtype)), scale(place, 1 / up), falling)
        if self.mode == "triangular2":
            height = p.mul(height, power(0.5, _time(p.div(step, period), lr)))
        elif self.mode == "exp_range":
            height = p.mul(height, power(self.gamma, _time(step, lr)))
        return p.add(lr, p.mul(sub(p.literal(self.max_lr, lr.dtype), lr), height))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sequential(Schedule):
    """One schedule after the other: each next one begins, at its own step 0, at its milestone."""

    name: ClassVar[str] = "sequential"
    formula: ClassVar[str] = "schedules[i](t - milestones[i - 1]) where milestones[i - 1] <= t < milestones[i]"
    reference: ClassVar[str] = "torch.optim.lr_scheduler.SequentialLR"

    schedules: tuple[Schedule, ...]
    milestones: tuple[int, ...]

    def problems(self) -> list[str]:
        if len(self.schedules) != len(self.milestones) + 1 or list(self.milestones) != sorted(set(self.milestones)):
            return [f"one ascending milestone between each two schedules is required, found {list(self.milestones)}"]
        return []

    def rate(self, step: Value, lr: Value) -> Value:
        result = self.schedules[0].rate(step, lr)
        for milestone, following in zip(self.milestones, self.schedules[1:], strict=True):
            own = following.rate(sub(step, p.literal(milestone, step.dtype)), lr)
            result = p.select(_from(step, milestone), own, result)
        return result


SCHEDULES: dict[str, type[Schedule]] = {
    cls.name: cls
    for cls in (Constant, Linear, Cosine, CosineRestarts, Step, MultiStep, Exponential, Polynomial, InverseSqrt, OneCycle, Cyclic)
}  # fmt: skip


def schedule(name: str, *, warmup_steps: int = 0, warmup_factor: float = 0.0, **options: Any) -> Schedule:
    """The schedule of this name with these options, after a linear warm-up from `warmup_factor` of the base rate where `warmup_steps` says so.

    >>> schedule("step", step_size=30).gamma
    0.1
    """
    if name not in SCHEDULES:
        raise Refusal(f"no schedule {name!r}", [near(name, SCHEDULES)])
    cls = SCHEDULES[name]
    known = {f.name: f for f in fields(cls)}
    wrong = [f"no option {o!r}; {near(o, known)}" for o in options if o not in known]
    wrong += [f"option {n!r} is required" for n, f in known.items() if f.default is MISSING and n not in options]
    if wrong:
        raise Refusal(f"cannot use the schedule {name}", wrong)
    main = cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})
    if not warmup_steps:
        return main
    rise = Linear(start_factor=warmup_factor, end_factor=1.0, total_iters=warmup_steps)
    return Sequential(schedules=(rise, main), milestones=(warmup_steps,))
