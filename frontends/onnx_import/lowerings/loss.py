"""The two losses that ONNX has as operators.

A label is picked by comparison with 0, 1, ..., never by an index into memory, so one that names no class reads nothing; and where it is ignored
the scores get no cotangent at all.
"""

from __future__ import annotations

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.graph import Value
from ....algebra.types import i64
from ..context import Unsupported, require_equal
from ..registry import lowers


def picked(x: Value, chosen: Value) -> Value:
    """`x[n, c, ...]` at the class that is chosen."""
    return p.reduce_sum(p.select(chosen, x, p.number(0, x)), axes=(1,))


def negative_log_likelihood(
    log_p: Value, target: Value, weight: Value | None, ignore_index: int | None, reduction: str
) -> Value:
    """`-weight[t] log_p[n, t, ...]`, 0 where `t == ignore_index`; the mean is over the sum of the weights that count."""
    if log_p.rank != target.rank + 1:
        raise Unsupported(
            f"labels {target.type!r} do not fit scores {log_p.type!r}: they lack the class axis, and nothing else"
        )
    for a, b in zip((log_p.shape[0], *log_p.shape[2:]), target.shape, strict=True):
        require_equal(a, b, "there is one label for each row of scores")
    labels = p.cast(target, dtype=i64)
    chosen = c.one_hot(labels, log_p.shape[1], 1)
    losses = p.neg(picked(log_p, chosen))
    weights = None
    if weight is not None:
        require_equal(weight.shape[0], log_p.shape[1], "there is one weight for each class")
        weights = picked(p.broadcast(weight, shape=log_p.shape, axes=(1,)), chosen)
        losses = p.mul(weights, losses)
    if ignore_index is not None:
        ignored = p.equal(labels, p.number(ignore_index, labels))
        losses = p.select(ignored, p.number(0, losses), losses)
        weights = p.select(ignored, p.number(0, losses), p.number(1, losses) if weights is None else weights)
    everything = tuple(range(losses.rank))
    match reduction:
        case "none":
            return losses
        case "sum":
            return p.reduce_sum(losses, axes=everything)
        case "mean":
            if weights is None:
                return c.mean(losses, everything)
            return p.div(p.reduce_sum(losses, axes=everything), p.reduce_sum(weights, axes=everything))
    raise Unsupported(f"reduction={reduction!r} is none of none, sum, mean")


@lowers("NegativeLogLikelihoodLoss", since=12)
def negative_log_likelihood_loss(input: Value, target: Value, weight: Value | None = None, *, ignore_index: int | None = None,
                                 reduction: str = "mean") -> Value:  # fmt: skip
    """-weight[t] x[n, t], reduced"""
    return negative_log_likelihood(input, target, weight, ignore_index, reduction)


@lowers("SoftmaxCrossEntropyLoss", since=12)
def softmax_cross_entropy_loss(scores: Value, labels: Value, weights: Value | None = None, *, ignore_index: int | None = None,
                               reduction: str = "mean") -> tuple[Value, Value]:  # fmt: skip
    """-weight[t] ln(softmax(x))[n, t], reduced; and ln(softmax(x))"""
    log_p = c.log_softmax(scores, (1,))
    return negative_log_likelihood(log_p, labels, weights, ignore_index, reduction), log_p
