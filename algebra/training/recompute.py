"""Less memory for more time: forward values that the backward pass computes anew instead of keeping (gradient checkpointing).

The forward values are split in those that are *kept* and those that are *recomputed*. Where a rule of the backward pass needs a recomputed value, it
sees a copy made from kept ones, each behind a `barrier`: a selection on a cotangent that has already arrived. So the copy is another expression
than the original (nothing merges them again), and no runtime can compute it before the backward pass has come that far.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

from .. import primitives as p
from ..calculus.vjp import vjp
from ..costs import bytes_of
from ..dims import Dim, evaluate, symbols
from ..errors import Refusal
from ..graph import Graph, Value, at, bind, reachable
from ..types import TupleType, bool_

__all__ = ["Checkpoint", "Recompute", "chosen"]

_VIEWS = frozenset(["reshape", "transpose", "broadcast", "stop_gradient", "item"])
USUAL = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What is recomputed: the nodes whose ONNX name a pattern matches, or all but what is live between `segments` parts of the forward pass.

    Without either, the number of segments is the one with the least estimated peak; with a `budget` in bytes the least number that stays below it.
    `sizes` are the sizes of symbolic dims for the estimate (16 where none is given).
    """

    patterns: tuple[str, ...] = ()
    segments: int | None = None
    budget: int | None = None
    sizes: Mapping[str, int] | None = None

    @classmethod
    def of(
        cls, given: Checkpoint | bool | int | str | Sequence[str] | Mapping[str, object] | None
    ) -> Checkpoint | None:
        """From True (automatic), a number of segments, patterns, or options by name."""
        match given:
            case None | False:
                return None
            case Checkpoint():
                return given
            case True | "auto":
                return cls()
            case int() if given >= 1:
                return cls(segments=given)
            case str():
                return cls(patterns=(given,))
            case Mapping():
                return cls(**given)  # type: ignore[arg-type]
            case list() | tuple():
                return cls(patterns=tuple(given))
        raise Refusal(
            "cannot choose what is recomputed",
            [f"True, a number of segments or patterns are required, found {given!r}"],
        )


def chosen(graph: Graph, loss: Value, checkpoint: Checkpoint, wrt: Sequence[Value]) -> dict[int, Value]:
    """The forward values that are recomputed, by id, where the gradients of `wrt` are wanted."""
    forward = _forward(graph, loss)
    if checkpoint.patterns:
        return _matching(graph, forward, checkpoint.patterns)
    cuts = _Cuts(forward, loss, checkpoint.sizes or {}, _residuals(loss, wrt))
    if checkpoint.segments is not None:
        kept, _ = cuts.kept(checkpoint.segments)
    else:
        kept = cuts.best(checkpoint.budget)
    return {id(v): v for v in forward if id(v) not in kept}


def _forward(graph: Graph, loss: Value) -> list[Value]:
    """The values of the forward pass that depend on what enters with a batch, in order."""
    varying = {id(v) for v in graph.by_role("input", "seed", "step")}
    found = []
    for v in reachable([loss]):
        if v.operands and any(id(o) in varying for o in v.operands):
            varying.add(id(v))
            if v.phase == "forward":
                found.append(v)
    return found


def _residuals(loss: Value, wrt: Sequence[Value]) -> set[int]:
    """Ids of the values that the backward pass reads, and of what those that are mere views look at."""
    found = {id(v) for v in reachable([loss])}
    stack = [v for v in vjp([loss], [p.literal(1, loss.dtype)], wrt) if v is not None]
    stack = [o for v in reachable(stack) if id(v) not in found for o in v.operands if id(o) in found]
    read: set[int] = set()
    while stack:
        v = stack.pop()
        if id(v) not in read:
            read.add(id(v))
            stack += v.operands if v.primitive.name in _VIEWS else ()
    return read


def _matching(graph: Graph, forward: Sequence[Value], patterns: Sequence[str]) -> dict[int, Value]:
    found: dict[int, Value] = {}
    reasons = []
    for pattern in patterns:
        hits = [v for v in forward if v.origin.source and pattern in (v.origin.source.name, "*")]
        hits = hits or [v for v in forward if v.origin.source and fnmatchcase(v.origin.source.name, pattern)]
        found.update((id(v), v) for v in hits)
        if not hits:
            reasons.append(f"checkpoint {pattern!r} matches no node of {graph.name!r}")
    if reasons:
        raise Refusal("patterns that match nothing", reasons)
    return found


class _Cuts:
    """Where the forward pass can be cut, and what is live there."""

    def __init__(self, forward: Sequence[Value], loss: Value, sizes: Mapping[str, int], residuals: set[int]) -> None:
        self._forward = forward
        place = {id(v): i for i, v in enumerate(forward)}
        last = list(range(len(forward)))
        for user in reachable([loss]):
            end = place.get(id(user), len(forward))
            for o in user.operands:
                if (i := place.get(id(o))) is not None:
                    last[i] = max(last[i], end)
        self._last = last
        self._bytes = [_size(v, sizes) for v in forward]
        self._live = self._live_bytes()
        self._before = [0]  # bytes that the backward pass would find kept, of all nodes before each
        for v, b in zip(forward, self._bytes, strict=True):
            self._before.append(self._before[-1] + (b if id(v) in residuals else 0))

    def _live_bytes(self) -> list[int]:
        """Bytes alive behind each node."""
        change = [0] * (len(self._forward) + 2)
        for i, (end, size) in enumerate(zip(self._last, self._bytes, strict=True)):
            change[i] += size
            change[end] -= size
        live, total = [], 0
        for c in change[: len(self._forward)]:
            total += c
            live.append(total)
        return live

    def kept(self, segments: int) -> tuple[set[int], int]:
        """Ids of what is live at the cuts between this many segments of like size, and the estimated peak."""
        whole, n = self._before[-1], len(self._forward)
        places: list[int] = []
        for j in range(1, segments):
            low, high = (whole * (j - 0.5 + shift) / segments for shift in (0.0, 1.0))
            window = [i for i in range(n) if low <= self._before[i + 1] <= high]
            if window:
                places.append(min(window, key=lambda i: self._live[i]))
        kept = {id(v) for i, v in enumerate(self._forward) if any(i <= c < self._last[i] for c in places)}
        stored = sum(b for v, b in zip(self._forward, self._bytes, strict=True) if id(v) in kept)
        bounds = [0, *(c + 1 for c in places), n]
        largest = max(self._before[b] - self._before[a] for a, b in pairwise(bounds))
        # the backward pass begins with the last segment, which is there still
        return kept | {id(v) for v in self._forward[bounds[-2] :]}, stored + largest

    def best(self, budget: int | None) -> set[int]:
        """The cuts with the least peak, or with the fewest segments below a budget."""
        tried = []
        for segments in range(1 if budget is None else 2, min(64, max(2, len(self._forward))) + 1):
            kept, peak = self.kept(segments)
            if budget is not None and peak <= budget:
                return kept
            tried.append((peak, segments, kept))
        peak, _, kept = min(tried, key=lambda t: t[:2])
        if budget is not None:
            raise Refusal(
                "the memory budget cannot be kept",
                [f"the least estimated peak of kept values is {peak} bytes, the budget {budget}"],
            )
        return kept


def _size(v: Value, sizes: Mapping[str, int]) -> int:
    if v.primitive.name in _VIEWS:
        return 0
    size: Dim = bytes_of(v.type)
    return evaluate(size, {s.name: sizes.get(s.name, USUAL) for s in symbols(size)})


class Recompute:
    """What the rules of the backward pass see of forward values: themselves, or copies of those that are recomputed."""

    def __init__(self, values: Mapping[int, Value], varying: Mapping[int, Value]) -> None:
        self._values, self._varying = values, varying
        self._copies: dict[int, Value] = {}
        self._barriers: dict[int, Value] = {}

    def __call__(self, value: Value, ct: Value) -> Value:
        """The value itself where it is kept; else its copy, made from kept values behind a barrier on `ct`."""
        if id(value) not in self._values:
            return value
        stack = [value]
        while stack:
            node = stack[-1]
            if id(node) in self._copies:
                stack.pop()
                continue
            waiting = [o for o in node.operands if id(o) in self._values and id(o) not in self._copies]
            if waiting:
                stack.extend(waiting)
                continue
            with at(node.origin.in_phase("backward").then("recompute")):
                operands = (self._operand(o, ct) for o in node.operands)
                self._copies[id(node)] = bind(node.primitive, *operands, **node.params)
        return self._copies[id(value)]

    def _operand(self, operand: Value, ct: Value) -> Value:
        if id(operand) in self._values:
            return self._copies[id(operand)]
        if id(operand) not in self._varying or isinstance(operand.type, TupleType):
            return operand
        if id(operand) not in self._barriers:
            self._barriers[id(operand)] = _barrier(operand, ct)
        return self._barriers[id(operand)]


def _barrier(x: Value, ct: Value) -> Value:
    """`x`, once `ct` is there. (Zeros where the cotangent's first element is NaN, when nothing right can come any more.)"""
    first = ct
    if ct.rank:
        first = p.reshape(p.slice(ct, start=(0,) * ct.rank, limit=(1,) * ct.rank, stride=(1,) * ct.rank), shape=())
    arrived = p.logical_not(p.is_nan(first))
    zero = p.full(False, bool_, x.shape) if x.dtype is bool_ else p.number(0, x)
    return p.select(p.broadcast(arrived, shape=x.shape, axes=()), x, zero)


def recompute(graph: Graph, loss: Value, checkpoint: Checkpoint, wrt: Sequence[Value]) -> Recompute:
    """The view of the backward pass on a forward graph, where the gradients of `wrt` are wanted."""
    values = chosen(graph, loss, checkpoint, wrt)
    varying = {id(v): v for v in (*graph.by_role("input", "seed", "step"), *_forward(graph, loss))}
    return Recompute(values, varying)
