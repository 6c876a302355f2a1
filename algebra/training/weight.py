"""What a loss divides the sum over its samples by: with that, losses and gradients of parts of a batch make those of the whole.

A loss is `sum / weight`, where the sum adds up over samples and the weight (the number of elements, of rows that are not ignored, the sum of class
weights) depends on the batch but on no parameter. Of parts `i` the whole has the loss `sum_i weight_i loss_i / sum_i weight_i`, and gradients
likewise. The weight is read off the loss's own graph, so that losses by name, functions and graphs are treated alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import sympy

from .. import primitives as p
from ..composites import size_of
from ..dims import Dim, product, symbols
from ..graph import Graph, Value, reachable
from ..known import Facts
from ..types import TupleType, f64

__all__ = ["LossWeight", "weight_of"]

LINEAR = ("neg", "cast", "reshape", "transpose", "broadcast", "reduce_sum", "stop_gradient")


@dataclass(frozen=True, slots=True)
class LossWeight:
    """A weight as the sizes and the scalars that it is the product of. `mean` says whether there is a division at all: without, the loss is a sum."""

    mean: bool = False
    size: Dim = 1
    factors: tuple[Value, ...] = ()

    def over(self, divisor: Value, batch: _Batch) -> LossWeight:
        """The weight of what is divided once more, by one number."""
        while divisor.primitive.name in ("broadcast", "cast"):
            (divisor,) = divisor.operands
        known = batch.facts(divisor)
        if known is None:
            return LossWeight(True, self.size, (*self.factors, divisor)) if batch.reads(divisor) else self
        size = known.reshape(-1)[0]
        if not isinstance(size, sympy.Expr):
            return LossWeight(self.mean or batch.counts(float(size)), self.size, self.factors)
        varies = bool(
            symbols(size) & batch.symbols
        )  # other sizes count too (elements are counted), but make no mean of a sum over samples
        return LossWeight(self.mean or varies, product([self.size, size]), self.factors)

    def same(self, other: LossWeight) -> bool:
        """Whether the two differ by a constant factor only."""
        return self.mean == other.mean and _shape(self.size) == _shape(other.size) and self.factors == other.factors

    def value(self) -> Value | None:
        """The weight as a float64 scalar; None where every part of as many samples has the same."""
        if not self.mean or (self.size == 1 and not self.factors):
            return None
        sizes = [] if self.size == 1 else [size_of([self.size], f64)]
        return reduce(p.mul, [*sizes, *(p.cast(f, dtype=f64) for f in self.factors)])


def _shape(size: Dim) -> Dim:
    """A size without its constant factor."""
    return 1 if isinstance(size, int) else size.as_coeff_Mul()[1]


class _Batch:
    """What depends on the batch: the sizes of its inputs' first axes, and their values."""

    def __init__(self, graph: Graph) -> None:
        fed = [v for v in graph.by_role("input", "target") if v.rank]
        first = [v.shape[0] for v in fed]
        self.symbols: set[sympy.Symbol] = set().union(*map(symbols, first))
        self.facts = Facts()
        self._sizes = [d for d in first if isinstance(d, int)]
        self._known = {id(v): True for v in fed}

    def reads(self, v: Value) -> bool:
        """Whether a value depends on the batch."""
        if id(v) not in self._known:
            for u in reachable([v]):
                if id(u) not in self._known:
                    self._known[id(u)] = self._reads(u)
        return self._known[id(v)]

    def _reads(self, u: Value) -> bool:
        known = self.facts(u)
        if known is not None:  # shape arithmetic too, of which only sizes of the batch count
            return known.dtype == object and any(bool(symbols(d) & self.symbols) for d in known.flat)
        shrunk = not self.runs_along(u) and any(self.runs_along(o) for o in u.operands)
        return shrunk or any(self._known[id(o)] for o in u.operands)

    def runs_along(self, v: Value) -> bool:
        """Whether an axis of a value is that of the samples, alone or merged with others."""
        types = v.type.items if isinstance(v.type, TupleType) else (v.type,)
        sizes = [d for t in types for d in t.shape]
        return any(self._may_count(d) if isinstance(d, int) else bool(symbols(d) & self.symbols) for d in sizes)

    def apart(self, v: Value) -> bool:
        """Whether the samples in a value know nothing of one another: nothing on the way to it was reduced over them."""
        seen, stack = set[int](), [v]
        while stack:
            u = stack.pop()
            if id(u) in seen or not self.reads(u):
                continue
            if not self.runs_along(u):
                return False
            seen.add(id(u))
            stack.extend(u.operands)
        return True

    def counts(self, number: float) -> bool:
        """Whether a constant may be a number of elements of the batch, where its size is fixed."""
        return math.isfinite(number) and number > 0 and self._may_count(number)

    def _may_count(self, size: float) -> bool:
        return not self.symbols and any(size % n == 0 for n in self._sizes)


def weight_of(graph: Graph, loss: Value) -> LossWeight | None:
    """The weight of a loss; None where the loss is no such quotient: a root of a mean, a sum of means over different numbers."""
    return _of(loss, _Batch(graph)) if loss.rank == 0 else None


def _of(v: Value, batch: _Batch) -> LossWeight | None:
    """The weight of a value that is linear in sums over samples."""
    match v.primitive.name, v.operands:
        case "div", (a, b) if batch.reads(a) and _held(b):
            inner = _of(a, batch)
            return None if inner is None else inner.over(b, batch)
        case "mul", (a, b) if batch.reads(a) != batch.reads(b):
            return _of(a if batch.reads(a) else b, batch)
        case name, (a,) if name in LINEAR and (batch.runs_along(a) or not batch.runs_along(v)):
            return _of(a, batch)
        case "add", operands if not batch.runs_along(v):
            return _of_sum([_of(o, batch) for o in operands if batch.reads(o)], len(operands))
    return LossWeight() if batch.runs_along(v) and batch.apart(v) else None


def _held(divisor: Value) -> bool:
    """Whether a divisor is one number that no parameter moves."""
    while divisor.primitive.name in ("broadcast", "cast"):
        (divisor,) = divisor.operands
    moved = any(u.primitive.name == "input" and u.params["role"] == "parameter" for u in reachable([divisor]))
    return divisor.rank == 0 and not moved


def _of_sum(weights: Sequence[LossWeight | None], terms: int) -> LossWeight | None:
    """The weight of a sum: that which its terms have in common. What does not depend on the batch goes with a mean alone."""
    first, *others = weights
    if first is None or not all(w is not None and first.same(w) for w in others):
        return None
    return first if first.mean or len(weights) == terms else None
