"""`ai.onnx.preview.training`: `Gradient` becomes the gradient graph itself, the optimizers become arithmetic.

No common runtime executes these operators; a file that has them becomes one that any runtime takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.calculus.vjp import vjp
from ....algebra.graph import Value, phase, reachable
from ....algebra.passes.substitute import Now, substitute
from ..context import Node, Unsupported, require_same_shape
from ..registry import lowers

PREVIEW = "ai.onnx.preview.training"
Strings = tuple[str, ...]


# ---- Gradient --------------------------------------------------------------------------------------------------------------------------


@lowers("Gradient", domain=PREVIEW)
def gradient(*inputs: Value, xs: Strings, y: str, zs: Strings = (), node: Node) -> tuple[Value, ...]:
    """the gradient of sum(y) with respect to each of xs, where xs and zs have the values of the inputs"""
    names = (*xs, *zs)
    if len(inputs) != len(names):
        raise Unsupported(f"{len(inputs)} inputs for the {len(names)} tensors of xs and zs")
    named = [_tensor(node, n) for n in names]
    target = _tensor(node, y)
    if not target.dtype.floating:
        raise Unsupported(f"y {y!r} is {target.type!r}: only floating tensors have gradients")
    for value, tensor, name in zip(inputs, named, names, strict=True):
        if value.dtype is not tensor.dtype:
            raise Unsupported(f"the value of {name!r} is {value.type!r}, the tensor {tensor.type!r}")
        require_same_shape(value.shape, tensor.shape, f"the value of {name!r} has its shape")
    with phase("backward"):
        if _independent(inputs, named):
            leaves = list(named)
        else:  # each named tensor is a variable of its own: what it was computed from does not count
            leaves = [p.stop_gradient(v) for v in inputs]
            places: dict[int, Callable[[Now], Value]] = {
                id(t): lambda _, leaf=leaf: leaf  # type: ignore[misc]
                for t, leaf in zip(named, leaves, strict=True)
            }
            target = substitute([target], places)(target)
        wanted = leaves[: len(xs)]
        cts = vjp([target], [p.number(1, target)], wanted)
        return tuple(p.number(0, w) if ct is None else ct for ct, w in zip(cts, wanted, strict=True))


def _tensor(node: Node, name: str) -> Value:
    value = node.scope.argument(name)
    if not isinstance(value, Value):
        raise Unsupported(f"{name!r} is not a tensor that is known here")
    return value


def _independent(inputs: Sequence[Value], named: Sequence[Value]) -> bool:
    """Whether every value is the tensor itself, and none of the tensors depends on another."""
    if any(a is not b for a, b in zip(inputs, named, strict=True)) or len({id(t) for t in named}) != len(named):
        return False
    ids = {id(t) for t in named}
    return not any(id(v) in ids and v is not t for t in named for v in reachable([t]))


# ---- optimizers ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    """The rate and the step count of an optimizer, both of one element, and its tensors in groups: values, gradients, slots."""

    rate: Value
    count: Value
    groups: tuple[tuple[Value, ...], ...]

    @classmethod
    def of(cls, rate: Value, count: Value, tensors: Sequence[Value], groups: int) -> _Step:
        if not tensors or len(tensors) % groups:
            raise Unsupported(f"{len(tensors)} tensors are not {groups} groups of equal length")
        n = len(tensors) // groups
        parts = tuple(tuple(tensors[i * n : (i + 1) * n]) for i in range(groups))
        for group in parts[1:]:
            for x, other in zip(parts[0], group, strict=True):
                require_same_shape(x.shape, other.shape, "gradients and slots have the shape of the value")
        return cls(_scalar(rate), _scalar(count), parts)

    def spread(self, x: Value, like: Value) -> Value:
        """A scalar for every element of a tensor, in its dtype."""
        return p.broadcast(p.cast(x, dtype=like.dtype), shape=like.shape, axes=())

    @property
    def started(self) -> Value:
        """Whether the count is above 0."""
        return p.less(p.number(0, self.count), self.count)


def _scalar(x: Value) -> Value:
    return x if x.rank == 0 else p.reshape(x, shape=())


def _regularized(x: Value, g: Value, coefficient: float) -> Value:
    """`coefficient x + g`."""
    return g if coefficient == 0 else p.add(c.scale(x, coefficient), g)


@lowers("Adagrad", domain=PREVIEW)
def adagrad(r: Value, t: Value, *inputs: Value, decay_factor: float = 0.0, epsilon: float = 0.0,
            norm_coefficient: float = 0.0) -> tuple[Value, ...]:  # fmt: skip
    """h' = h + g g, x' = x - r / (1 + decay_factor t) g / (sqrt(h') + epsilon)"""
    step = _Step.of(r, t, inputs, 3)
    values, slots = [], []
    for x, g, h in zip(*step.groups, strict=True):
        g = _regularized(x, g, norm_coefficient)
        rate = step.spread(step.rate, x)
        rate = p.div(rate, c.plus(c.scale(step.spread(step.count, x), decay_factor), 1)) if decay_factor else rate
        h = p.add(h, c.square(g))
        values.append(c.sub(x, p.div(p.mul(rate, g), c.plus(p.sqrt(h), epsilon))))
        slots.append(h)
    return (*values, *slots)


@lowers("Momentum", domain=PREVIEW)
def momentum(r: Value, t: Value, *inputs: Value, alpha: float, beta: float, mode: str, norm_coefficient: float) -> tuple[Value, ...]:  # fmt: skip
    """v' = alpha v + beta g, x' = x - r v' (nesterov: x - r (g + alpha v')); beta is 1 in the first step"""
    if mode not in ("standard", "nesterov"):
        raise Unsupported(f"mode {mode!r} is neither standard nor nesterov")
    step = _Step.of(r, t, inputs, 3)
    values, slots = [], []
    for x, g, v in zip(*step.groups, strict=True):
        g = _regularized(x, g, norm_coefficient)
        one = p.full(1, x.dtype, ())
        factor = p.select(step.started, p.full(beta, x.dtype, ()), one)
        v = p.add(c.scale(v, alpha), p.mul(step.spread(factor, x), g))
        moved = p.add(g, c.scale(v, alpha)) if mode == "nesterov" else v
        values.append(c.sub(x, p.mul(step.spread(step.rate, x), moved)))
        slots.append(v)
    return (*values, *slots)


@lowers("Adam", domain=PREVIEW)
def adam(r: Value, t: Value, *inputs: Value, alpha: float = 0.9, beta: float = 0.999, epsilon: float = 0.0,
         norm_coefficient: float = 0.0, norm_coefficient_post: float = 0.0) -> tuple[Value, ...]:  # fmt: skip
    """v' = alpha v + (1 - alpha) g, h' = beta h + (1 - beta) g g, x' = x - r sqrt(1 - beta^t) / (1 - alpha^t) v' / (sqrt(h') + epsilon)"""
    step = _Step.of(r, t, inputs, 4)
    values, first, second = [], [], []
    for x, g, v, h in zip(*step.groups, strict=True):
        g = _regularized(x, g, norm_coefficient)
        v = p.add(c.scale(v, alpha), c.scale(g, 1 - alpha))
        h = p.add(c.scale(h, beta), c.scale(c.square(g), 1 - beta))
        rate = p.cast(step.rate, dtype=x.dtype)
        count = p.select(step.started, step.count, p.number(1, step.count))  # in step 0 the rate is as it is
        corrected = p.div(p.mul(rate, p.sqrt(_complement(beta, count, x))), _complement(alpha, count, x))
        rate = step.spread(p.select(step.started, corrected, rate), x)
        x = c.sub(x, p.div(p.mul(rate, v), c.plus(p.sqrt(h), epsilon)))
        values.append(c.scale(x, 1 - norm_coefficient_post))
        first.append(v)
        second.append(h)
    return (*values, *first, *second)


def _complement(base: float, count: Value, like: Value) -> Value:
    """`1 - base ** count`, exact where the base is near 1."""
    if not 0 < base < 1:
        power = p.pow(p.full(base, like.dtype, ()), p.cast(count, dtype=like.dtype))
        return c.sub(p.full(1, like.dtype, ()), power)
    return p.neg(c.expm1(c.scale(p.cast(count, dtype=like.dtype), math.log(base))))
