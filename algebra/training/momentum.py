"""Optimizers that follow the gradient itself, its sign or its orthogonal part: SGD, ASGD, Rprop, Lion, LARS, Muon."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

from .. import primitives as p
from ..composites import clamp, sub
from ..graph import Value
from ..types import DTYPES, TensorType, f32, f64
from .optimizer import (
    Context,
    Optimizer,
    Slot,
    decayed,
    like,
    minus,
    negative,
    norm,
    outside_unit,
    over,
    regularized,
    scaled,
    shifted,
    spread,
    toward,
)  # fmt: skip

__all__ = ["ASGD", "LARS", "SGD", "Lion", "Muon", "Rprop"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum."""

    name: ClassVar[str] = "sgd"
    formula: ClassVar[str] = (
        "b = momentum b + (1 - dampening) g (b = g at first); w = w - lr b, or lr (g + momentum b) with nesterov"
    )
    reference: ClassVar[str] = "torch.optim.SGD; Sutskever et al. 2013"
    optional: ClassVar[tuple[str, ...]] = ("momentum", "weight_decay")

    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def problems(self) -> list[str]:
        wrong = negative(self, "lr", "momentum", "weight_decay")
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            wrong.append("nesterov needs a momentum and no dampening")
        return wrong

    def slots(self, parameter: TensorType) -> dict[str, Slot]:
        return like(parameter, "momentum_buffer") if self.momentum else {}

    def move(self, at: Context) -> tuple[Value, dict[str, Value]]:
        g = regularized(at)
        if not self.momentum:
            return minus(at.param, at.hyper["lr"], g), {}
        momentum = at.hyper["momentum"]
        buffer = p.add(
            scaled(at.slots["momentum_buffer"], momentum), g if self.dampening == 0 else scaled(g, 1 - self.dampening)
        )
        if self.dampening != 0:  # without dampening, momentum * 0 + g is g already
            first = spread(p.equal(at.t, at.number(1)), g)
            buffer = p.select(first, g, buffer)
        direction = p.add(g, scaled(buffer, momentum)) if self.nesterov else buffer
        return minus(at.param, at.hyper["lr"], direction), {"momentum_buffer": buffer}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ASGD(Optimizer):
    """Averaged stochastic gradient descent; `ax` is the average of the weights after step `t0`."""

    name: ClassVar[str] = "asgd"
    formula: ClassVar[str] = (
        "w = (1 - lambd eta) w - eta g; ax = ax + mu (w - ax); eta = lr / (1 + lambd lr t) ** alpha; mu = 1 / max(1, t - t0)"
    )
    reference: ClassVar[str] = "torch.optim.ASGD; Polyak and Juditsky 1992"
    inputs: ClassVar[tuple[str, ...]] = ("lr", "lambd")
    optional: ClassVar[tuple[str, ...]] = ("weight_decay",)

    lr: float = 1e-2
    lambd: float = 1e-4
    alpha: float = 0.75
    t0: float = 1e6
    weight_decay: float = 0.0

    def slots(self, parameter: TensorType) -> dict[str, Slot]:
        scalar = TensorType(f64 if parameter.dtype is f64 else f32, ())
        return {"eta": Slot(scalar, self.lr), "mu": Slot(scalar, 1.0), **like(parameter, "ax")}

    def move(self, at: Context) -> tuple[Value, dict[str, Value]]:
        lr, lambd, eta, mu, ax = at.hyper["lr"], at.hyper["lambd"], at.slots["eta"], at.slots["mu"], at.slots["ax"]
        one = at.number(1)
        moved = minus(scaled(at.param, sub(one, p.mul(lambd, eta))), eta, regularized(at))
        average = p.select(spread(p.equal(mu, one), ax), moved, toward(ax, moved, mu))
        growth = p.add(one, p.mul(p.mul(lambd, lr), at.t))
        new = {
            "eta": p.div(lr, p.pow(growth, at.number(self.alpha))),
            "mu": p.div(one, p.max(one, shifted(at.t, -self.t0))),
            "ax": average,
        }
        return moved, new


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rprop(Optimizer):
    """Resilient backpropagation: each weight has its own step, which grows while the gradient's sign holds. `lr` is the first step."""

    name: ClassVar[str] = "rprop"
    formula: ClassVar[str] = (
        "s = clamp(s * (eta+ where g g' > 0, eta- where < 0, else 1)); g = 0 where g g' < 0; w = w - s sign(g)"
    )
    reference: ClassVar[str] = "torch.optim.Rprop; Riedmiller and Braun 1993"
    inputs: ClassVar[tuple[str, ...]] = ()

    lr: float = 1e-2
    etas: tuple[float, float] = (0.5, 1.2)
    step_sizes: tuple[float, float] = (1e-6, 50.0)

    def problems(self) -> list[str]:
        wrong = negative(self, "lr")
        if not 0 < self.etas[0] < 1 < self.etas[1]:
            wrong.append(f"etas must be one factor below 1 and one above, found {self.etas!r}")
        return wrong

    def slots(self, parameter: TensorType) -> dict[str, Slot]:
        return {**like(parameter, "prev"), **like(parameter, "step_size", initial=self.lr)}

    def move(self, at: Context) -> tuple[Value, dict[str, Value]]:
        agreement = p.mul(at.grad, at.slots["prev"])
        zero = p.number(0, agreement)
        turned, kept = p.less(agreement, zero), p.less(zero, agreement)
        shrink, grow = (p.number(eta, agreement) for eta in self.etas)
        factor = p.select(kept, grow, p.select(turned, shrink, p.number(1, agreement)))
        low, high = (p.number(size, agreement) for size in self.step_sizes)
        size = clamp(p.mul(at.slots["step_size"], factor), low, high)
        grad = p.select(turned, zero, at.grad)
        return sub(at.param, p.mul(p.sign(grad), size)), {"prev": grad, "step_size": size}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Lion(Optimizer):
    """The sign of an interpolated momentum, with decoupled weight decay."""

    name: ClassVar[str] = "lion"
    formula: ClassVar[str] = (
        "u = sign(beta1 m + (1 - beta1) g); w = w - lr (u + weight_decay w); m = beta2 m + (1 - beta2) g"
    )
    reference: ClassVar[str] = "Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, algorithm 2"
    optional: ClassVar[tuple[str, ...]] = ("weight_decay",)

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def problems(self) -> list[str]:
        return negative(self, "lr", "weight_decay") + outside_unit(beta1=self.betas[0], beta2=self.betas[1])

    def slots(self, parameter: TensorType) -> dict[str, Slot]:
        return like(parameter, "exp_avg")

    def move(self, at: Context) -> tuple[Value, dict[str, Value]]:
        average, (beta1, beta2) = at.slots["exp_avg"], self.betas
        direction = p.sign(p.add(scaled(average, beta1), scaled(at.grad, 1 - beta1)))
        moved = minus(decayed(at), at.hyper["lr"], direction)
        return moved, {"exp_avg": p.add(scaled(average, beta2), scaled(at.grad, 1 - beta2))}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LARS(Optimizer):
    """Momentum with a rate for each layer from the ratio of the norms of weights and gradient; a ratio of 1 where either norm is 0."""

    name: ClassVar[str] = "lars"
    formula: ClassVar[str] = (
        "q = trust_coefficient |w| / (|g| + weight_decay |w| + eps); b = momentum b + lr q (g + weight_decay w); w = w - b"
    )
    reference: ClassVar[str] = "You et al. 2017, Large Batch Training of Convolutional Networks, algorithm 1"
    inputs: ClassVar[tuple[str, ...]] = ("lr", "eps")
    optional: ClassVar[tuple[str, ...]] = ("momentum", "weight_decay")

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    trust_coefficient: float = 1e-3
    eps: float = 1e-8
    nesterov: bool = False

    def problems(self) -> list[str]:
        wrong = negative(self, "lr", "momentum", "weight_decay", "trust_coefficient", "eps")
        if self.nesterov and self.momentum <= 0:
            wrong.append("nesterov needs a momentum")
        return wrong

    def slots(self, parameter: TensorType) -> dict[str, Slot]:
        return like(parameter, "momentum_buffer") if self.momentum else {}

    def move(self, at: Context) -> tuple[Value, dict[str, Value]]:
        weight, gradient, zero, one = norm(at.param), norm(at.grad), at.number(0), at.number(1)
        below = p.add(gradient, at.hyper["eps"])
        if "weight_decay" in at.hyper:
            below = p.add(below, p.mul(at.hyper["weight_decay"], weight))
        both = p.logical_and(p.less(zero, weight), p.less(zero, gradient))
        ratio = p.select(both, scaled(p.div(weight, below), self.trust_coefficient), one)
        change = scaled(regularized(at), p.mul(at.hyper["lr"], ratio))
        if not self.momentum:
            return sub(at.param, change), {}
        momentum = at.hyper["momentum"]
        buffer = p.add(scaled(at.slots["momentum_buffer"], momentum), change)
        step = p.add(change, scaled(buffer, momentum)) if self.nesterov else buffer
        return sub(at.param, step), {"momentum_buffer": buffer}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Muon(Optimizer):
    """Momentum whose update is made orthogonal by a Newton-Schulz iteration; matrices only.

    PyTorch iterates in bfloat16 whatever the parameter's dtype. Here the iteration is in the computing dtype, which every runtime has kernels
    for; `ns_dtype="bf16"` rounds as PyTorch does.
    """

    name: ClassVar[str] = "muon"
    formula: ClassVar[str] = (
        "b = b + (1 - momentum)(g - b); u = g + momentum (b - g) with nesterov, else b; X = u / |u|, ns_steps times "
        "X = a X + (b A + c A A) X with A = X X'; w = (1 - lr weight_decay) w - lr ratio X"
    )
    reference: ClassVar[str] = "torch.optim.Muon; Jordan et al. 2024"
    optional: ClassVar[tuple[str, ...]] = ("weight_decay",)

    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None
    ns_dtype: str | None = None

    def problems(self) -> list[str]:
        wrong = negative(self, "lr", "weight_decay", "momentum", "eps")
        if self.adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            wrong.append(f"adjust_lr_fn is 'original' or 'match_rms_adamw', found {self.adjust_lr_fn!r}")
        if not 0 <= self.ns_steps < 100:
            wrong.append(f"ns_steps must lie in 0..99, found {self.ns_steps!r}")
        if self.ns_dtype is not None and not (self.ns_dtype in DTYPES and DTYPES[self.ns_dtype].floating):
            wrong.append(f"ns_dtype is a floating dtype such as 'bf16', found {self.ns_dtype!r}")
        return wrong

    def refusal(self, parameter: TensorType) -> str | None:
        if not parameter.dtype.floating:
            return f"a floating parameter is required, found {parameter!r}"
        if parameter.rank != 2 or not all(isinstance(d, int) for d in parameter.shape):
            return f"muon updates matrices of known sizes, found {parameter!r} (give it another optimizer)"
        return None

    def slots(self, parameter: TensorType) -> dict[str, Slot]:
        return like(parameter, "momentum_buffer")

    def move(self, at: Context) -> tuple[Value, dict[str, Value]]:
        buffer = toward(at.slots["momentum_buffer"], at.grad, 1 - self.momentum)
        update = toward(at.grad, buffer, self.momentum) if self.nesterov else buffer
        direction = self._orthogonal(update)
        return minus(decayed(at), scaled(at.hyper["lr"], self._ratio(at.param)), direction), {"momentum_buffer": buffer}

    def _ratio(self, param: Value) -> float:
        rows, columns = (int(d) for d in param.shape)
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))

    def _orthogonal(self, g: Value) -> Value:
        """The quintic Newton-Schulz iteration: singular values go near 1."""
        a, b, c = self.ns_coefficients
        tall = int(g.shape[0]) > int(g.shape[1])
        x = p.cast(g, dtype=DTYPES[self.ns_dtype]) if self.ns_dtype else g
        x = p.transpose(x, perm=(1, 0)) if tall else x
        x = over(x, p.max(norm(x), p.literal(self.eps, x.dtype)))
        for _ in range(self.ns_steps):
            gram = p.dot(x, x, contract=((1,), (1,)))
            mixed = p.add(scaled(gram, b), scaled(p.dot(gram, gram, contract=((1,), (0,))), c))
            x = p.add(scaled(x, a), p.dot(mixed, x, contract=((1,), (0,))))
        return p.cast(p.transpose(x, perm=(1, 0)) if tall else x, dtype=g.dtype)
