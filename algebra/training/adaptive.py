"""Optimizers that scale each weight's step by the history of its gradients: the Adam family, Adagrad, Adadelta, RMSprop, Adafactor, LAMB."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import comb, factorial, log
from typing import ClassVar, final

import numpy as np

from .. import primitives as p
from ..composites import along, drop_ones, expm1, mean, scale, sub, times, unsqueeze
from ..graph import Value
from ..types import TensorType, f32, f64
from .optimizer import (
    Context,
    Optimizer,
    Slot,
    complement,
    decayed,
    like,
    minus,
    negative,
    norm,
    outside_unit,
    over,
    power,
    regularized,
    root_mean_square,
    scaled,
    second_moment,
    shifted,
    spread,
    toward,
)  # fmt: skip

__all__ = [
    "LAMB",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "SparseAdam",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Betas(Optimizer):
    """What the Adam family shares."""

    inputs: ClassVar[tuple[str, ...]] = ("lr", "eps")
    optional: ClassVar[tuple[str, ...]] = ("weight_decay",)

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def problems(self) -> list[str]:
        return negative(self, "lr", "eps", "weight_decay") + outside_unit(beta1=self.betas[0], beta2=self.betas[1])

    def slots(self, parameter: TensorType) -> dict[str, Slot]:
        return like(parameter, "exp_avg", "exp_avg_sq")


def _moments(at: Context, grad: Value, betas: tuple[float, float]) -> tuple[Value, Value]:
    """The running means of the gradient and of its square."""
    return toward(at.slots["exp_avg"], grad, 1 - betas[0]), second_moment(at.slots["exp_avg_sq"], grad, betas[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _AdamLike(_Betas):
    amsgrad: bool = False

    def slots(self, parameter: TensorType) -> dict[str, Slot]:
        return like(parameter, "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self.amsgrad else []))

    def _adam(self, at: Context, param: Value, grad: Value) -> tuple[Value, dict[str, Value]]:
        m, v = _moments(at, grad, self.betas)
        new = {"exp_avg": m, "exp_avg_sq": v}
        if self.amsgrad:
            v = new["max_exp_avg_sq"] = p.max(at.slots["max_exp_avg_sq"], v)
        below = shifted(over(p.sqrt(v), p.sqrt(complement(self.betas[1], at.t))), at.hyper["eps"])
        rate = p.div(at.hyper["lr"], complement(self.betas[0], at.t))
        return minus(param, rate, p.div(m, below)), new


_ADAM = "m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g g; w = w - lr m^ / (sqrt(v^) + eps), m^ = m / (1 - beta1 ** t)"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(_AdamLike):
    """Adaptive moments; `amsgrad` divides by the largest second moment so far, `decoupled_weight_decay` makes it AdamW."""

    name: ClassVar[str] = "adam"
    formula: ClassVar[str] = f"{_ADAM}; g includes weight_decay w"
    reference: ClassVar[str] = "torch.optim.Adam; Kingma and Ba 2014; Reddi et al. 2018 (amsgrad)"

    decoupled_weight_decay: bool = False

    def move(self, at: Context) -> tuple[Value, dict[str, Value]]:
        if self.decoupled_weight_decay:
            return self._adam(at, decayed(at), at.grad)
        return self._adam(at, at.param, regularized(at))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(_AdamLike):
    """Adam with weight decay apart from the gradient."""

    name: ClassVar[str] = "adamw"
    formula: ClassVar[str] = f"w = (1 - lr weight_decay) w; {_ADAM}"
    reference: ClassVar[str] = "torch.optim.AdamW; Loshchilov and Hutter 2017"

    weight_decay: float = 1e-2

    def move(self, at: Context) -> tuple[Value, dict[str, Value]]:
        return self._adam(at, decayed(at), at.grad)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SparseAdam(Optimizer):
    """Adam for gradients most rows of which are zero: a row (along the first axis) without a gradient is left as it is, state included.

    PyTorch's takes sparse gradients and leaves rows that these do not name; here a row counts as named where any of its elements is not 0.
    """

    name: ClassVar[str] = "sparse_adam"
    formula: ClassVar[str] = f"rows with a gradient: {_ADAM}; eps is added to sqrt(v), before the bias correction"
    reference: ClassVar[str] = "torch.optim.SparseAdam"
    inputs: ClassVar[tuple[str, ...]] = ("lr", "eps")

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def problems(self) -> list[str]:
        return negative(self, "lr", "eps") + outside_unit(beta1=self.betas[0], beta2=self.betas[1])

    def slots(self, parameter: TensorType) -> dict[str, Slot]:
        return like(parameter, "exp_avg", "exp_avg_sq")

    def move(self, at: Context) -> tuple[Value, dict[str, Value]]:
        m, v = toward(at.slots["exp_avg"], at.grad, 1 - self.betas[0]), at.slots["exp_avg_sq"]
        v = toward(v, p.mul(at.grad, at.grad), 1 - self.betas[1])
        rate = p.div(p.mul(at.hyper["lr"], p.sqrt(complement(self.betas[1], at.t))), complement(self.betas[0], at.t))
        moved = minus(at.param, rate, p.div(m, shifted(p.sqrt(v), at.hyper["eps"])))
        rest = tuple(range(1, at.param.rank))
        named = p.less(p.literal(0, at.dtype) if at.param.rank == 0 else _zeros(at, rest), _largest(at.grad, rest))
        named = along(named, at.param.shape, rest)
        new = {
            "exp_avg": p.select(named, m, at.slots["exp_avg"]),
            "exp_avg_sq": p.select(named, v, at.slots["exp_avg_sq"]),
        }
        return p.select(named, moved, at.param), new


def _zeros(at: Context, reduced: tuple[int, ...]) -> Value:
    return p.full(0, at.dtype, tuple(d for i, d in enumerate(at.param.shape) if i not in reduced))


def _largest(x: Value, axes: tuple[int, ...]) -> Value:
    return p.reduce_max(p.abs(x), axes=axes) if axes else p.abs(x)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Adamax(_Betas):
    """Adam with the infinity norm."""

    name: ClassVar[str] = "adamax"
    formula: ClassVar[str] = (
        "m = beta1 m + (1 - beta1) g; u = max(beta2 u, |g| + eps); w = w - lr / (1 - beta1 ** t) m / u"
    )
    reference: ClassVar[str] = "torch.optim.Adamax; Kingma and Ba 2014, section 7.1"

    lr: float = 2e-3

    def slots(self, parameter: TensorType) -> dict[str, Slot]:
        return like(parameter, "exp_avg", "exp_inf")

    def move(self, at: Context) -> tuple[Value, dict[str, Value]]:
        g = regularized(at)
        m = toward(at.slots["exp_avg"], g, 1 - self.betas[0])
        u = p.max(scaled(at.slots["exp_inf"], self.betas[1]), shifted(p.abs(g), at.hyper["eps"]))
        rate = p.div(at.hyper["lr"], complement(self.betas[0], at.t))
        return minus(at.param, rate, p.div(m, u)), {"exp_avg": m, "exp_inf": u}


@dataclass(frozen=True, slots=True, kw_only=True)
class _EitherDecay(_Betas):
    decoupled_weight_decay: bool = False

    def _decayed(self, at: Context) -> tuple[Value, Value]:
        return (decayed(at), at.grad) if self.decoupled_weight_decay else (at.param, regularized(at))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NAdam(_EitherDecay):
    """Adam with Nesterov momentum whose weight grows with the steps; `mu_product` is the product of the weights so far."""

    name: ClassVar[str] = "nadam"
    formula: ClassVar[str] = (
        "mu_t = beta1 (1 - 0.5 * 0.96 ** (t momentum_decay)); "
        "w = w - lr ((1 - mu_t) g / (1 - prod mu) + mu_t+1 m / (1 - prod mu mu_t+1)) / (sqrt(v^) + eps)"
    )
    reference: ClassVar[str] = "torch.optim.NAdam; Dozat 2016"

    lr: float = 2e-3
    momentum_decay: float = 4e-3

    def slots(self, parameter: TensorType) -> dict[str, Slot]:
        scalar = TensorType(f64 if parameter.dtype is f64 else f32, ())
        return {"mu_product": Slot(scalar, 1.0), **like(parameter, "exp_avg", "exp_avg_sq")}

    def _mu(self, t: Value) -> Value:
        fading = power(0.96, scaled(t, self.momentum_decay))
        return scaled(sub(p.literal(1, t.dtype), scaled(fading, 0.5)), self.betas[0])

    def move(self, at: Context) -> tuple[Value, dict[str, Value]]:
        param, g = self._decayed(at)
        one, lr = at.number(1), at.hyper["lr"]
        mu, following = self._mu(at.t), self._mu(shifted(at.t, 1))
        product = p.mul(at.slots["mu_product"], mu)
        m, v = _moments(at, g, self.betas)
        below = shifted(p.sqrt(over(v, complement(self.betas[1], at.t))), at.hyper["eps"])
        by_gradient = p.div(p.mul(lr, sub(one, mu)), sub(one, product))
        by_momentum = p.div(p.mul(lr, following), sub(one, p.mul(product, following)))
        moved = minus(minus(param, by_gradient, p.div(g, below)), by_momentum, p.div(m, below))
        return moved, {"mu_product": product, "exp_avg": m, "exp_avg_sq": v}


def _bernoulli(count: int) -> list[Fraction]:
    """The Bernoulli numbers B_0 .. B_count, from `sum(binomial(n + 1, k) B_k, k = 0 .. n) = 0`."""
    numbers = [Fraction(1)]
    for n in range(1, count + 1):
        numbers.append(-sum((comb(n + 1, k) * b for k, b in enumerate(numbers)), Fraction(0)) / (n + 1))
    return numbers


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RAdam(_EitherDecay):
    """Adam whose first steps are plain momentum, until the variance of its adaptive rate can be corrected."""

    name: ClassVar[str] = "radam"
    formula: ClassVar[str] = (
        "rho_t = rho_inf - 2 t beta2 ** t / (1 - beta2 ** t); w = w - lr m^ r_t sqrt(1 - beta2 ** t) / (sqrt(v) + eps) "
        "where rho_t > 5, else w - lr m^"
    )
    reference: ClassVar[str] = "torch.optim.RAdam; Liu et al. 2019"

    def move(self, at: Context) -> tuple[Value, dict[str, Value]]:
        param, g = self._decayed(at)
        m, v = _moments(at, g, self.betas)
        corrected = over(m, complement(self.betas[0], at.t))
        rho, limit = _length(self.betas[1], at.t), 2 / (1 - self.betas[1]) - 1
        long = p.less(at.number(5), rho)
        safe = p.select(long, rho, at.number(6))
        above = times(shifted(safe, -4), shifted(safe, -2), at.number(limit / ((limit - 4) * (limit - 2))))
        rectified = p.mul(p.sqrt(p.div(above, safe)), p.sqrt(complement(self.betas[1], at.t)))
        adaptive = p.div(spread(rectified, v), shifted(p.sqrt(v), at.hyper["eps"]))
        factor = p.select(spread(long, v), adaptive, p.number(1, v))
        return minus(param, at.hyper["lr"], p.mul(corrected, factor)), {"exp_avg": m, "exp_avg_sq": v}


def _length(beta: float, t: Value) -> Value:
    """`2 / (1 - beta) - 1 - 2 t beta ** t / (1 - beta ** t)`, the length of the approximated average, without its cancellation.

    With `a = -ln beta` and `x = a t` the last term is `(2 / a) x / (e ** x - 1)`, whose series `1 - x / 2 + sum B_2k x ** 2k / (2k)!` cancels
    the large parts by hand where `x < 1/2`; beyond, the plain form loses nothing.
    """
    a = -log(beta)
    x = scale(t, a)
    limit = 2 / (1 - beta) - 1
    square = p.mul(x, x)
    series = p.literal(0, t.dtype)
    numbers = _bernoulli(16)
    for k in range(8, 0, -1):
        series = p.mul(square, shifted(series, float(numbers[2 * k] / factorial(2 * k))))
    near = shifted(sub(t, scale(series, 2 / a)), limit - 2 / a)
    half = p.literal(0.5, t.dtype)
    fallen = p.neg(p.max(x, half))
    fraction = p.div(p.exp(fallen), p.neg(expm1(fallen)))
    far = sub(p.literal(limit, t.dtype), scale(p.mul(t, fraction), 2))
    return p.select(p.less(x, half), near, far)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad(Optimizer):
    """Steps divided by the root of the sum of all squared gradients."""

    name: ClassVar[str] = "adagrad"
    formula: ClassVar[str] = "s = s + g g; w = w - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)"
    reference: ClassVar[str] = "torch.optim.Adagrad; Duchi et al. 2011"
    inputs: ClassVar[tuple[str, ...]] = ("lr", "eps")
    optional: ClassVar[tuple[str, ...]] = ("lr_decay", "weight_decay")

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def problems(self) -> list[str]:
        return negative(self, "lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")

    def slots(self, parameter: TensorType) -> dict[str, Slot]:
        return like(parameter, "sum", initial=self.initial_accumulator_value)

    def move(self, at: Context) -> tuple[Value, dict[str, Value]]:
        g = regularized(at)
        total = p.add(at.slots["sum"], p.mul(g, g))
        rate = at.hyper["lr"]
        if "lr_decay" in at.hyper:
            rate = p.div(rate, shifted(p.mul(shifted(at.t, -1), at.hyper["lr_decay"]), 1))
        return minus(at.param, rate, p.div(g, shifted(p.sqrt(total), at.hyper["eps"]))), {"sum": total}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Adadelta(Optimizer):
    """Steps of the size of past steps, relative to the size of past gradients."""

    name: ClassVar[str] = "adadelta"
    formula: ClassVar[str] = (
        "v = rho v + (1 - rho) g g; d = sqrt(u + eps) / sqrt(v + eps) g; u = rho u + (1 - rho) d d; w = w - lr d"
    )
    reference: ClassVar[str] = "torch.optim.Adadelta; Zeiler 2012"
    inputs: ClassVar[tuple[str, ...]] = ("lr", "eps")
    optional: ClassVar[tuple[str, ...]] = ("weight_decay",)

    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0

    def problems(self) -> list[str]:
        wrong = negative(self, "lr", "eps", "weight_decay")
        return wrong + ([] if 0 <= self.rho <= 1 else [f"rho must lie in [0, 1], found {self.rho!r}"])

    def slots(self, parameter: TensorType) -> dict[str, Slot]:
        return like(parameter, "square_avg", "acc_delta")

    def move(self, at: Context) -> tuple[Value, dict[str, Value]]:
        g, eps = regularized(at), at.hyper["eps"]
        v = second_moment(at.slots["square_avg"], g, self.rho)
        ratio = p.div(p.sqrt(shifted(at.slots["acc_delta"], eps)), p.sqrt(shifted(v, eps)))
        delta = p.mul(ratio, g)
        new = {"square_avg": v, "acc_delta": second_moment(at.slots["acc_delta"], delta, self.rho)}
        return minus(at.param, at.hyper["lr"], delta), new


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RMSprop(Optimizer):
    """Steps divided by the root of a running mean of squared gradients; `centered` subtracts the squared mean."""

    name: ClassVar[str] = "rmsprop"
    formula: ClassVar[str] = (
        "v = alpha v + (1 - alpha) g g; d = g / (sqrt(v - a a) + eps), a the mean gradient where centered; "
        "b = momentum b + d; w = w - lr b"
    )
    reference: ClassVar[str] = "torch.optim.RMSprop; Hinton 2012, lecture 6e; Graves 2013 (centered)"
    inputs: ClassVar[tuple[str, ...]] = ("lr", "eps")
    optional: ClassVar[tuple[str, ...]] = ("momentum", "weight_decay")

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False

    def problems(self) -> list[str]:
        return negative(self, "lr", "alpha", "eps", "weight_decay", "momentum")

    def slots(self, parameter: TensorType) -> dict[str, Slot]:
        names = ["square_avg"] + ["momentum_buffer"] * (self.momentum > 0) + ["grad_avg"] * self.centered
        return like(parameter, *names)

    def move(self, at: Context) -> tuple[Value, dict[str, Value]]:
        g = regularized(at)
        v = second_moment(at.slots["square_avg"], g, self.alpha)
        new = {"square_avg": v}
        if self.centered:
            average = new["grad_avg"] = toward(at.slots["grad_avg"], g, 1 - self.alpha)
            v = sub(v, p.mul(average, average))
        direction = p.div(g, shifted(p.sqrt(v), at.hyper["eps"]))
        if "momentum" in at.hyper:
            direction = p.add(scaled(at.slots["momentum_buffer"], at.hyper["momentum"]), direction)
            new["momentum_buffer"] = direction
        return minus(at.param, at.hyper["lr"], direction), new


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Adafactor(Optimizer):
    """Second moments of a matrix kept as one row and one column of means (over the last two axes); a vector keeps them all."""

    name: ClassVar[str] = "adafactor"
    formula: ClassVar[str] = (
        "R, C = running means of g g along rows and columns, weight t ** beta2_decay; u = g / sqrt(R C / mean(R)); "
        "w = w - max(eps2, rms(w)) min(lr, 1 / sqrt(t)) u / max(1, rms(u) / d)"
    )
    reference: ClassVar[str] = "torch.optim.Adafactor; Shazeer and Stern 2018"
    optional: ClassVar[tuple[str, ...]] = ("weight_decay",)

    lr: float = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0

    def problems(self) -> list[str]:
        wrong = negative(self, "lr", "weight_decay")
        if self.beta2_decay > 0:
            wrong.append(f"beta2_decay must be at most 0, found {self.beta2_decay!r}")
        if self.d < 1:
            wrong.append(f"d must be at least 1, found {self.d!r}")
        return wrong

    def slots(self, parameter: TensorType) -> dict[str, Slot]:
        if parameter.rank < 2:
            return like(parameter, "variance")
        *batch, rows, columns = parameter.shape
        row, column = (TensorType(parameter.dtype, shape) for shape in ((*batch, rows, 1), (*batch, 1, columns)))
        return {"row_var": Slot(row, 0.0), "col_var": Slot(column, 0.0)}

    def move(self, at: Context) -> tuple[Value, dict[str, Value]]:
        first, second = self.eps
        small = float(np.finfo(at.param.dtype.numpy).eps) if first is None else first
        square, weight, rank = p.mul(at.grad, at.grad), p.pow(at.t, at.number(self.beta2_decay)), at.param.rank
        if rank < 2:
            variance = toward(at.slots["variance"], square, weight)
            new = {"variance": variance}
        else:
            new = {
                name: toward(at.slots[name], _mean_kept(square, axis), weight)
                for name, axis in (("row_var", rank - 1), ("col_var", rank - 2))
            }
            variance = _outer(new["row_var"], new["col_var"], small, at.param)
        update = p.div(at.grad, p.sqrt(p.max(variance, p.number(small * small, variance))))
        rate = p.min(at.hyper["lr"], p.div(at.number(1), p.sqrt(at.t)))
        rate = p.mul(p.max(at.number(second), root_mean_square(at.param)), rate)
        excess = p.max(at.number(1), scale(root_mean_square(update), 1 / self.d))
        return minus(decayed(at), p.div(rate, excess), update), new


def _mean_kept(x: Value, axis: int) -> Value:
    """The mean over an axis, kept with size 1."""
    return unsqueeze(mean(x, (axis,)), (axis,))


def _outer(rows: Value, columns: Value, small: float, like_: Value) -> Value:
    """`rows @ columns / max(mean(rows), small)` over the last two axes."""
    rank = like_.rank
    r, c = drop_ones(rows, (rank - 1,)), drop_ones(columns, (rank - 2,))
    total = mean(r, (rank - 2,))
    total = p.max(total, p.number(small, total))
    product = p.mul(along(r, like_.shape, (rank - 1,)), along(c, like_.shape, (rank - 2,)))
    return p.div(product, along(total, like_.shape, (rank - 2, rank - 1)))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LAMB(_Betas):
    """Adam with a rate for each layer from the ratio of the norms of weights and step; a ratio of 1 where either norm is 0."""

    name: ClassVar[str] = "lamb"
    formula: ClassVar[str] = (
        "r = m^ / (sqrt(v^) + eps) + weight_decay w; w = w - lr phi(|w|) / |r| r, phi(z) = min(z, max_weight_norm)"
    )
    reference: ClassVar[str] = "You et al. 2019, Large Batch Optimization for Deep Learning, algorithm 2"

    eps: float = 1e-6
    weight_decay: float = 1e-2
    bias_correction: bool = True
    max_weight_norm: float | None = None

    def move(self, at: Context) -> tuple[Value, dict[str, Value]]:
        m, v = new_m, new_v = _moments(at, at.grad, self.betas)
        if self.bias_correction:
            m, v = over(m, complement(self.betas[0], at.t)), over(v, complement(self.betas[1], at.t))
        step = p.div(m, shifted(p.sqrt(v), at.hyper["eps"]))
        if "weight_decay" in at.hyper:
            step = p.add(step, scaled(at.param, at.hyper["weight_decay"]))
        weight, size, zero, one = norm(at.param), norm(step), at.number(0), at.number(1)
        if self.max_weight_norm is not None:
            weight = p.min(weight, at.number(self.max_weight_norm))
        both = p.logical_and(p.less(zero, weight), p.less(zero, size))
        ratio = p.select(both, p.div(weight, p.select(both, size, one)), one)
        return minus(at.param, p.mul(at.hyper["lr"], ratio), step), {"exp_avg": new_m, "exp_avg_sq": new_v}
