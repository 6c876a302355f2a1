"""Mixed precision: products in a 16-bit dtype, everything else and the weights in float32; and loss scaling, all in the graph.

The policy is that of PyTorch's autocast where it matters: what is contracted (`dot`, hence MatMul, Gemm and convolutions) takes operands of the low
dtype, in the forward and, by the casts' own pullbacks, in the backward pass. Normalisations, softmax, losses, sums and updates stay in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from .. import primitives as p
from ..errors import Refusal
from ..graph import Constant, Graph, Value, bind
from ..passes.substitute import Make, Now, in_graph
from ..types import DType, TensorType, bf16, f16, f32, f64, i64
from .naming import Names
from .options import mistyped_fields

__all__ = ["LossScale", "Scaling", "low_dtype", "mixed"]

_LOW = {"float16": f16, "f16": f16, "fp16": f16, "bfloat16": bf16, "bf16": bf16}


def low_dtype(precision: str | None) -> DType | None:
    """The dtype of products by its name; None for that of the model."""
    if precision is None:
        return None
    if precision not in _LOW:
        raise Refusal(f"no precision {precision!r}", ["'float16' and 'bfloat16' compute products in 16 bits"])
    return _LOW[precision]


def mixed(graph: Graph, dtype: DType) -> Graph:
    """The graph with every float32 product computed in `dtype` and its result made float32 again. Builds in the current builder."""
    places: dict[int, Make] = {
        id(v): _product(v, dtype) for v in graph.nodes if v.primitive.name == "dot" and v.dtype is f32
    }
    if not places:
        raise Refusal(f"{dtype.numpy.name} changes nothing", [f"{graph.name!r} has no product of float32 tensors"])
    return in_graph(graph, places)[0]


def _product(node: Value, dtype: DType) -> Make:
    def make(now: Now) -> Value:
        operands = (p.cast(now(o), dtype=dtype) for o in node.operands)
        return p.cast(bind(node.primitive, *operands, **node.params), dtype=f32)

    return make


# ---- loss scaling ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """How the loss is scaled so that small gradients survive 16 bits; options and defaults of `torch.amp.GradScaler`.

    A step whose gradients are not all finite is skipped, and the scale shrinks by `backoff`; after `interval` good steps it grows by `growth`.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        wrong = mistyped_fields(self) or [
            f"{name} must be {bound}, found {getattr(self, name)!r}"
            for name, bound, good in (
                ("initial", "above 0", self.initial > 0),
                ("growth", "above 1", self.growth > 1),
                ("backoff", "between 0 and 1", 0 < self.backoff < 1),
                ("interval", "at least 1", self.interval >= 1),
            )
            if not good
        ]
        if wrong:
            raise Refusal("cannot scale the loss", wrong)

    @classmethod
    def of(cls, given: LossScale | float | str | None, dtype: DType | None) -> LossScale | None:
        """Scaling as asked for; by default that of float16 products is on and any other off. A number is the first scale."""
        match given:
            case LossScale():
                return given
            case "dynamic" | True:
                return cls()
            case None:
                return cls() if dtype is f16 else None
            case False | "off":
                return None
            case int() | float() if given > 0:
                return cls(initial=float(given))
        raise Refusal("cannot scale the loss", [f"'dynamic', 'off' or a first scale is required, found {given!r}"])


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """The scale and the number of good steps since it changed: two inputs of role `state`."""

    rule: LossScale
    scale: Value
    tracker: Value

    @classmethod
    def enter(cls, rule: LossScale, loss: Value, names: Names, data: dict[str, Constant]) -> Scaling:
        """The inputs `loss_scale` and `growth_tracker`, with first values."""
        scale = p.input(names("loss_scale"), TensorType(f32, ()), "state")
        tracker = p.input(names("growth_tracker"), TensorType(i64, ()), "state")
        # the seed of the backward pass must be finite in the loss's dtype
        first = min(rule.initial, 32768.0) if loss.dtype is f16 else rule.initial
        data[str(scale.params["name"])] = Constant(np.asarray(first, np.float32))
        data[str(tracker.params["name"])] = Constant(np.asarray(0, np.int64))
        return cls(rule, scale, tracker)

    def seed(self, loss: Value) -> Value:
        """What the backward pass starts with."""
        return p.cast(self.scale, dtype=loss.dtype)

    def unscaled(self, gradient: Value) -> Value:
        """The gradient itself, in at least float32."""
        wide = p.cast(gradient, dtype=f64 if gradient.dtype is f64 else f32)
        return p.div(wide, p.broadcast(p.cast(self.scale, dtype=wide.dtype), shape=wide.shape, axes=()))

    def finite(self, gradients: Sequence[Value]) -> Value:
        """Whether every element of every gradient is finite."""
        total: Value | None = None
        for g in gradients:
            limit = p.number(float(ml_dtypes.finfo(g.dtype.numpy).max), g)  # type: ignore[no-untyped-call]
            good = p.less_equal(p.abs(g), limit)  # false where g is NaN
            bad = p.select(good, p.full(0, f32, g.shape), p.full(1, f32, g.shape))
            count = p.reduce_sum(bad, axes=tuple(range(g.rank)))
            total = count if total is None else p.add(total, count)
        assert total is not None
        return p.equal(total, p.literal(0, f32))

    def moved(self, finite: Value) -> tuple[Value, Value]:
        """The next scale and tracker."""
        after = p.add(self.tracker, p.literal(1, i64))
        grows = p.equal(after, p.literal(self.rule.interval, i64))
        larger, smaller = (p.mul(self.scale, p.literal(k, f32)) for k in (self.rule.growth, self.rule.backoff))
        # as PyTorch: a scale that has reached infinity would never come down again
        fits = p.less_equal(larger, p.literal(float(np.finfo(np.float32).max), f32))
        larger = p.select(fits, larger, self.scale)
        scale = p.select(finite, p.select(grows, larger, self.scale), smaller)
        zero = p.literal(0, i64)
        return scale, p.select(finite, p.select(grows, zero, after), zero)


def kept_where(finite: Value, new: Value, old: Value) -> Value:
    """`new`, or `old` where the step is skipped."""
    return p.select(p.broadcast(finite, shape=new.shape, axes=()) if new.rank else finite, new, old)
