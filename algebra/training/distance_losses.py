"""Losses of several outputs that are compared with each other: rankings, embeddings, triplets."""

from __future__ import annotations

import math
from collections.abc import Callable

from .. import primitives as p
from ..composites import clamp, plus, square, sub
from ..errors import Refusal
from ..graph import Value
from .loss import Loss, agreed, no_targets, one_per_row, reduced, same_as_output
from .regression_losses import root

__all__ = [
    "DISTANCE", "cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "pairwise_distance", "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
]  # fmt: skip


def _at_least_zero(x: Value) -> Value:
    """`max(x, 0)`, whose derivative is 1 at 0 as that of PyTorch's `clamp`."""
    return clamp(x, p.number(0, x), None)


def _is(target: Value, number: float) -> Value:
    return p.equal(target, p.number(number, target))


def margin_ranking_loss(
    input1: Value, input2: Value, target: Value, *, margin: float = 0.0, reduction: str = "mean"
) -> Value:
    """`max(0, -t (x1 - x2) + margin)`: x1 shall rank higher where t is 1, lower where it is -1."""
    t = agreed(target, input1)
    return reduced(_at_least_zero(plus(p.neg(p.mul(t, sub(input1, input2))), margin)), reduction)


def hinge_embedding_loss(input: Value, target: Value, *, margin: float = 1.0, reduction: str = "mean") -> Value:
    """`x` where t is 1, `max(0, margin - x)` where it is -1."""
    t = agreed(target, input)
    zero = p.number(0, input)
    apart = _at_least_zero(plus(p.neg(input), margin))
    loss = p.add(p.select(_is(t, 1), zero, apart), p.select(_is(t, -1), zero, input))
    return reduced(loss, reduction)


def cosine_embedding_loss(
    input1: Value, input2: Value, target: Value, *, margin: float = 0.0, reduction: str = "mean"
) -> Value:
    """`1 - cos(x1, x2)` where t is 1, `max(0, cos(x1, x2) - margin)` where it is -1; 1e-12 is added to each squared norm."""
    cos = _cosine(input1, input2)
    t = agreed(target, cos)
    zero = p.number(0, cos)
    alike = p.select(_is(t, 1), sub(p.number(1, cos), cos), zero)
    unlike = p.select(_is(t, -1), _at_least_zero(plus(cos, -margin)), zero)
    return reduced(p.add(alike, unlike), reduction)


def _cosine(x: Value, y: Value) -> Value:
    axis = (x.rank - 1,)
    lengths = [p.sqrt(plus(p.reduce_sum(square(v), axes=axis), 1e-12)) for v in (x, y)]
    return p.div(p.div(p.reduce_sum(p.mul(x, y), axes=axis), lengths[0]), lengths[1])


def pairwise_distance(x: Value, y: Value, norm: float = 2.0, eps: float = 1e-6) -> Value:
    """`|x - y + eps|` along the last axis, in the p-norm; its derivative is 0 where the distance is."""
    d, axis = plus(sub(x, y), eps), (x.rank - 1,)
    size = p.abs(d)
    if norm == 2:
        return root(p.reduce_sum(square(d), axes=axis))
    if norm == 1:
        return p.reduce_sum(size, axes=axis)
    if norm == math.inf:
        return p.reduce_max(size, axes=axis)
    if norm == 0:
        return p.reduce_sum(p.abs(p.sign(d)), axes=axis)
    return _power(p.reduce_sum(_power(size, norm), axes=axis), 1 / norm)


def _power(x: Value, exponent: float) -> Value:
    """`x ** exponent` of x >= 0 and a positive exponent, with derivative 0 at 0."""
    zero = p.number(0, x)
    flat = p.equal(x, zero)
    return p.select(flat, zero, p.pow(p.select(flat, p.number(1, x), x), p.number(exponent, x)))


def triplet_margin_loss(anchor: Value, positive: Value, negative: Value, *, margin: float = 1.0, p: float = 2.0, eps: float = 1e-6,
                        swap: bool = False, reduction: str = "mean") -> Value:  # fmt: skip
    """`max(0, d(a, p) - d(a, n) + margin)` in the p-norm; with `swap` the smaller of `d(a, n)` and `d(p, n)`."""
    return _triplet(anchor, positive, negative, lambda x, y: pairwise_distance(x, y, p, eps), margin, swap, reduction)


def triplet_margin_with_distance_loss(anchor: Value, positive: Value, negative: Value, *,
                                      distance_function: Callable[[Value, Value], Value] | str | None = None, margin: float = 1.0,
                                      swap: bool = False, reduction: str = "mean") -> Value:  # fmt: skip
    """The triplet loss of any distance: a function of two values, or `pairwise`, `squared` or `cosine`."""
    if callable(distance_function):
        distance = distance_function
    elif (name := distance_function or "pairwise") in DISTANCES:
        distance = DISTANCES[name]
    else:
        known = ", ".join(DISTANCES)
        raise Refusal(
            "cannot use the loss triplet_margin_with_distance_loss",
            [f"distance_function is one of {known}, found {name!r}"],
        )
    return _triplet(anchor, positive, negative, distance, margin, swap, reduction)


def _triplet(anchor: Value, positive: Value, negative: Value, distance: Callable[[Value, Value], Value], margin: float, swap: bool,
             reduction: str) -> Value:  # fmt: skip
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = p.min(far, distance(positive, negative))
    return reduced(_at_least_zero(plus(sub(near, far), margin)), reduction)


DISTANCES: dict[str, Callable[[Value, Value], Value]] = {
    "pairwise": pairwise_distance,
    "squared": lambda x, y: p.reduce_sum(square(sub(x, y)), axes=(x.rank - 1,)),
    "cosine": lambda x, y: sub(p.number(1, _cosine(x, y)), _cosine(x, y)),
}


_TRIPLET = "max(0, d(a, p) - d(a, n) + margin)"

DISTANCE: tuple[Loss, ...] = (
    Loss(
        "margin_ranking_loss", margin_ranking_loss, ("input1", "input2"), same_as_output, "max(0, -t (x1 - x2) + margin)",
        "torch.nn.MarginRankingLoss", ("margin_ranking",),
    ),
    Loss(
        "hinge_embedding_loss", hinge_embedding_loss, ("input",), same_as_output, "x where t = 1, max(0, margin - x) where t = -1",
        "torch.nn.HingeEmbeddingLoss", ("hinge_embedding",),
    ),
    Loss(
        "cosine_embedding_loss", cosine_embedding_loss, ("input1", "input2"), one_per_row,
        "1 - cos(x1, x2) where t = 1, max(0, cos(x1, x2) - margin) where t = -1", "torch.nn.CosineEmbeddingLoss", ("cosine_embedding",),
    ),
    Loss(
        "triplet_margin_loss", triplet_margin_loss, ("anchor", "positive", "negative"), no_targets, _TRIPLET, "torch.nn.TripletMarginLoss",
        ("triplet_margin", "triplet"),
    ),
    Loss(
        "triplet_margin_with_distance_loss", triplet_margin_with_distance_loss, ("anchor", "positive", "negative"), no_targets, _TRIPLET,
        "torch.nn.TripletMarginWithDistanceLoss", ("triplet_margin_with_distance",),
    ),
)  # fmt: skip
