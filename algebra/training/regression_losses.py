"""Losses of a prediction against a number: absolute and squared errors, and negative log likelihoods of counts and normal variables."""

from __future__ import annotations

import math
from collections.abc import Callable

from .. import primitives as p
from ..composites import plus, scale, square, sub
from ..dims import is_one, maybe_equal
from ..errors import TypeMismatch
from ..graph import Value
from .loss import Loss, Number, agreed, constant, divided, quotient, reduced, same_as_output, total

__all__ = [
    "REGRESSION",
    "gaussian_nll_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "poisson_nll_loss",
    "rmse_loss",
    "smooth_l1_loss",
]


def _weighted(errors: Value, weight: Number | None, reduction: str) -> Value:
    """Errors times weights; their mean is over the sum of the weights."""
    if weight is None:
        return reduced(errors, reduction)
    w = constant(weight, errors)
    scaled = p.mul(errors, w)
    return quotient(scaled, w) if reduction == "mean" else reduced(scaled, reduction)


def l1_loss(input: Value, target: Value, *, weight: Number | None = None, reduction: str = "mean") -> Value:
    """`|x - t|`."""
    return _weighted(p.abs(sub(input, agreed(target, input))), weight, reduction)


def mse_loss(input: Value, target: Value, *, weight: Number | None = None, reduction: str = "mean") -> Value:
    """`(x - t) ** 2`."""
    return _weighted(square(sub(input, agreed(target, input))), weight, reduction)


def rmse_loss(input: Value, target: Value, *, eps: float = 0.0, reduction: str = "mean") -> Value:
    """`sqrt(mean((x - t) ** 2) + eps)`; its derivative is 0 where it is 0. Of `sum` the norm, of `none` the absolute error."""
    inner = plus(reduced(square(sub(input, agreed(target, input))), reduction), eps)
    return root(inner)


def root(x: Value) -> Value:
    """`sqrt(x)` with derivative 0 at 0."""
    zero = p.number(0, x)
    flat = p.equal(x, zero)
    return p.select(flat, zero, p.sqrt(p.select(flat, p.number(1, x), x)))


def huber_loss(
    input: Value, target: Value, *, delta: float = 1.0, weight: Number | None = None, reduction: str = "mean"
) -> Value:
    """`d ** 2 / 2` where `d = |x - t| <= delta`, else `delta (d - delta / 2)`. As in PyTorch, a weighted mean is over the number of elements."""
    d = p.abs(sub(input, agreed(target, input)))
    near = p.less_equal(d, p.number(delta, d))
    errors = p.select(near, scale(square(d), 0.5), scale(plus(d, -0.5 * delta), delta))
    return reduced(errors if weight is None else p.mul(errors, constant(weight, errors)), reduction)


def smooth_l1_loss(input: Value, target: Value, *, beta: float = 1.0, reduction: str = "mean") -> Value:
    """`d ** 2 / (2 beta)` where `d = |x - t| < beta`, else `d - beta / 2`."""
    d = p.abs(sub(input, agreed(target, input)))
    if beta == 0:
        return reduced(d, reduction)
    near = p.less(d, p.number(beta, d))
    return reduced(p.select(near, scale(square(d), 0.5 / beta), plus(d, -0.5 * beta)), reduction)


def poisson_nll_loss(input: Value, target: Value, *, log_input: bool = True, full: bool = False, eps: float = 1e-8,
                     reduction: str = "mean") -> Value:  # fmt: skip
    """`e ** x - t x`, or `x - t ln(x + eps)` without `log_input`; `full` adds Stirling's `t ln t - t + ln(2 pi t) / 2` where `t > 1`."""
    t = agreed(target, input)
    if log_input:
        loss = sub(p.exp(input), p.mul(t, input))
    else:
        loss = sub(input, p.mul(t, p.log(plus(input, eps))))
    if full:
        large = p.less(p.number(1, t), t)
        safe = p.select(large, t, p.number(1, t))
        stirling = p.add(sub(p.mul(safe, p.log(safe)), safe), scale(p.log(scale(safe, 2 * math.pi)), 0.5))
        loss = p.add(loss, p.select(large, stirling, p.number(0, t)))
    return reduced(loss, reduction)


def gaussian_nll_loss(
    input: Value, target: Value, var: Number, *, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Value:
    """`(ln v + (x - t) ** 2 / v) / 2` with `v = max(var, eps)`, through which the derivative passes as if it were `var`; `full` adds `ln(2 pi) / 2`."""
    v = _variance(var, input)
    low = p.number(eps, v)
    v = p.select(p.less(v, low), p.add(low, sub(v, p.stop_gradient(v))), v)
    loss = scale(p.add(p.log(v), p.div(square(sub(input, agreed(target, input))), v)), 0.5)
    return reduced(plus(loss, 0.5 * math.log(2 * math.pi)) if full else loss, reduction)


def _variance(var: Number, x: Value) -> Value:
    """A variance of the shape of x, or one for each row (its last axis missing, or of size 1)."""
    if not isinstance(var, Value):
        return constant(var, x)
    v = p.cast(var, dtype=x.dtype)
    if v.rank == x.rank and x.rank and is_one(v.shape[-1]) and not is_one(x.shape[-1]):
        v = p.reshape(v, shape=v.shape[:-1])
    if v.rank == x.rank - 1 and all(map(maybe_equal, v.shape, x.shape[:-1])):
        return p.broadcast(v, shape=x.shape, axes=tuple(range(v.rank)))
    if v.rank != x.rank:
        raise TypeMismatch(f"a variance of the shape of {x.type!r}, or one for each row, is required, found {v.type!r}")
    return v


def kl_div(input: Value, target: Value, *, log_target: bool = False, reduction: str = "mean") -> Value:
    """`t (ln t - x)`, 0 where `t = 0`; with `log_target` the target is `ln t`. `batchmean` divides the sum by the size of the first axis."""
    t = agreed(target, input)
    zero = p.number(0, t)
    if log_target:
        nothing = p.equal(t, p.number(-math.inf, t))
        loss = p.mul(p.exp(t), sub(p.select(nothing, zero, t), input))
    else:
        nothing = p.equal(t, zero)
        loss = p.mul(t, sub(p.log(p.select(nothing, p.number(1, t), t)), input))
    loss = p.select(nothing, zero, loss)
    if reduction == "batchmean":
        return divided(total(loss), input.shape[0]) if input.rank else loss
    return reduced(loss, reduction)


def _plain(name: str, function: Callable[..., Value], formula: str, reference: str, *aliases: str) -> Loss:
    return Loss(name, function, ("input",), same_as_output, formula, reference, aliases)


REGRESSION: tuple[Loss, ...] = (
    _plain("l1_loss", l1_loss, "|x - t|", "torch.nn.L1Loss", "l1", "mae"),
    _plain("mse_loss", mse_loss, "(x - t)^2", "torch.nn.MSELoss", "mse"),
    _plain("rmse_loss", rmse_loss, "sqrt(mean((x - t)^2) + eps)", "the root of torch.nn.MSELoss", "rmse"),
    _plain("huber_loss", huber_loss, "d^2/2 where d = |x - t| <= delta, else delta (d - delta/2)", "torch.nn.HuberLoss", "huber"),
    _plain("smooth_l1_loss", smooth_l1_loss, "d^2/(2 beta) where d = |x - t| < beta, else d - beta/2", "torch.nn.SmoothL1Loss", "smooth_l1"),
    _plain("poisson_nll_loss", poisson_nll_loss, "exp(x) - t x", "torch.nn.PoissonNLLLoss", "poisson_nll"),
    Loss(
        "gaussian_nll_loss", gaussian_nll_loss, ("input", "var"), same_as_output, "(ln v + (x - t)^2 / v) / 2, v = max(var, eps)",
        "torch.nn.GaussianNLLLoss", ("gaussian_nll",),
    ),
    Loss(
        "kl_div", kl_div, ("input",), same_as_output, "t (ln t - x)", "torch.nn.KLDivLoss", ("kl_divergence",),
    ),
)  # fmt: skip
