"""Losses of scores against classes: cross entropies, margins, focal and Dice losses.

A label is picked by comparing it with 0, 1, ..., never by an index into memory: a label that names no class (an ignored row's -100) picks
nothing, and no runtime reads out of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import primitives as p
from ..composites import along, log_softmax, one_hot, plus, relu, scale, sigmoid, softmax, square, sub
from ..errors import Refusal
from ..graph import Value
from ..types import TensorType, f16, i64
from .loss import (
    Loss,
    Number,
    agreed,
    axis_of_classes,
    class_indices,
    constant,
    divided,
    per_class,
    quotient,
    reduced,
    same_as_output,
)  # fmt: skip

__all__ = [
    "CLASSIFICATION", "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "dice_loss", "multi_margin_loss",
    "multilabel_margin_loss", "multilabel_soft_margin_loss", "nll_loss", "sigmoid_focal_loss", "soft_margin_loss", "softmax_focal_loss",
]  # fmt: skip


# ---- one class of many -----------------------------------------------------------------------------------------------------------------


def _labels(target: Value) -> Value:
    return p.cast(target, dtype=i64)


def _kept(labels: Value, ignore_index: int) -> Value:
    """Which rows count."""
    return p.logical_not(p.equal(labels, p.number(ignore_index, labels)))


def _picked(x: Value, chosen: Value, axis: int) -> Value:
    """`x` at the class of each row, 0 where the label names none."""
    return p.reduce_sum(p.select(chosen, x, p.number(0, x)), axes=(axis,))


def _row_weights(like: Value, chosen: Value, kept: Value, weight: Number | None, axis: int) -> Value:
    """The weight of each row: that of its class, 0 where it is ignored."""
    rows = (
        p.number(1, _picked(like, chosen, axis))
        if weight is None
        else _picked(per_class(weight, like, axis), chosen, axis)
    )
    return p.select(kept, rows, p.number(0, rows))


def _mean_of_rows(losses: Value, weights: Value, reduction: str) -> Value:
    return quotient(losses, weights) if reduction == "mean" else reduced(losses, reduction)


def nll_loss(input: Value, target: Value, *, weight: Number | None = None, ignore_index: int = -100, reduction: str = "mean",
             class_axis: int = 1) -> Value:  # fmt: skip
    """`-weight[t] x[t]` of log probabilities x; the mean is over the sum of the weights, and NaN where every row is ignored."""
    axis, labels = axis_of_classes(input.rank, class_axis), _labels(target)
    chosen, kept = one_hot(labels, input.shape[axis], axis), _kept(labels, ignore_index)
    weights = _row_weights(input, chosen, kept, weight, axis)
    picked = p.neg(_picked(input, chosen, axis))
    losses = p.select(kept, picked if weight is None else p.mul(weights, picked), p.number(0, picked))
    return _mean_of_rows(losses, weights, reduction)


def cross_entropy(input: Value, target: Value, *, weight: Number | None = None, ignore_index: int = -100, label_smoothing: float = 0.0,
                  reduction: str = "mean", class_axis: int = 1, probabilities: bool | None = None) -> Value:  # fmt: skip
    """`-sum(t ln softmax(x))` over classes; t are class indices, or probabilities of every class where they are floating.

    With `label_smoothing` e, t becomes `(1 - e) t + e / classes`. The mean of indexed rows is over the sum of their weights, ignored rows left
    out; that of probabilities is over the number of rows.
    """
    axis = axis_of_classes(input.rank, class_axis)
    log_p = log_softmax(input, (axis,))
    if target.dtype.floating if probabilities is None else probabilities:
        return _cross_entropy_of_probabilities(log_p, agreed(target, input), weight, label_smoothing, reduction, axis)
    if label_smoothing == 0:
        return nll_loss(log_p, target, weight=weight, ignore_index=ignore_index, reduction=reduction, class_axis=axis)
    labels = _labels(target)
    chosen, kept = one_hot(labels, input.shape[axis], axis), _kept(labels, ignore_index)
    weights = _row_weights(input, chosen, kept, weight, axis)
    scored = log_p if weight is None else p.mul(per_class(weight, input, axis), log_p)
    hard = p.neg(_picked(scored, chosen, axis))
    soft = divided(p.neg(p.reduce_sum(scored, axes=(axis,))), input.shape[axis])
    zero = p.number(0, hard)
    hard, soft = (_mean_of_rows(p.select(kept, v, zero), weights, reduction) for v in (hard, soft))
    return p.add(scale(hard, 1 - label_smoothing), scale(soft, label_smoothing))


def _cross_entropy_of_probabilities(
    log_p: Value, t: Value, weight: Number | None, smoothing: float, reduction: str, axis: int
) -> Value:
    if smoothing:
        share = divided(p.number(smoothing, t), t.shape[axis])
        t = p.add(scale(t, 1 - smoothing), share)
    nothing = p.logical_and(p.equal(t, p.number(0, t)), p.equal(log_p, p.number(-math.inf, log_p)))
    terms = p.mul(t, p.select(nothing, p.number(0, log_p), log_p))
    if weight is not None:
        terms = p.mul(per_class(weight, terms, axis), terms)
    return reduced(p.neg(p.reduce_sum(terms, axes=(axis,))), reduction)


def softmax_focal_loss(input: Value, target: Value, *, gamma: float = 2.0, weight: Number | None = None, ignore_index: int = -100,
                       reduction: str = "mean", class_axis: int = 1) -> Value:  # fmt: skip
    """`-weight[t] (1 - q) ** gamma ln q` with `q = softmax(x)[t]`; the mean is over the rows that are not ignored."""
    axis, labels = axis_of_classes(input.rank, class_axis), _labels(target)
    chosen, kept = one_hot(labels, input.shape[axis], axis), _kept(labels, ignore_index)
    others = p.select(chosen, p.number(0, input), softmax(input, (axis,)))
    losses = p.neg(_picked(log_softmax(input, (axis,)), chosen, axis))
    losses = p.mul(_power(p.reduce_sum(others, axes=(axis,)), gamma), losses)
    if weight is not None:
        losses = p.mul(_picked(per_class(weight, input, axis), chosen, axis), losses)
    ones = p.select(kept, p.number(1, losses), p.number(0, losses))
    return _mean_of_rows(p.select(kept, losses, p.number(0, losses)), ones, reduction)


def _power(x: Value, exponent: float) -> Value:
    """`x ** exponent` of x in [0, 1], with derivative 0 at 0."""
    if exponent == 0:
        return p.number(1, x)
    if exponent == 1:
        return x
    if exponent == 2:
        return square(x)
    zero = p.number(0, x)
    flat = p.equal(x, zero)
    return p.select(flat, zero, p.pow(p.select(flat, p.number(1, x), x), p.number(exponent, x)))


# ---- each class yes or no --------------------------------------------------------------------------------------------------------------


def _log_losses(x: Value) -> tuple[Value, Value]:
    """`-ln sigmoid(x)` and `-ln sigmoid(-x)`. They share `ln(e ** min(x, 0) + e ** -max(x, 0))`, so that each derivative is exact in its tail."""
    zero = p.number(0, x)
    above = p.max(x, zero)
    shared = p.log(p.add(p.exp(p.min(x, zero)), p.exp(p.neg(above))))
    return p.add(p.max(p.neg(x), zero), shared), p.add(above, shared)


def _binary(x: Value, t: Value, positive: Value | None = None) -> Value:
    yes, no = _log_losses(x)
    share = t if positive is None else p.mul(positive, t)
    return p.add(p.mul(share, yes), p.mul(sub(p.number(1, t), t), no))


def binary_cross_entropy_with_logits(input: Value, target: Value, *, weight: Number | None = None, pos_weight: Number | None = None,
                                     reduction: str = "mean") -> Value:  # fmt: skip
    """`-(pos_weight t ln sigmoid(x) + (1 - t) ln sigmoid(-x))`, times `weight`."""
    t = agreed(target, input)
    losses = _binary(input, t, None if pos_weight is None else constant(pos_weight, input))
    return reduced(losses if weight is None else p.mul(losses, constant(weight, input)), reduction)


def binary_cross_entropy(
    input: Value, target: Value, *, weight: Number | None = None, reduction: str = "mean"
) -> Value:
    """`-(t ln x + (1 - t) ln(1 - x))` of probabilities x, with logarithms of at least -100, times `weight`.

    As PyTorch, the derivative is `(x - t) / max(x (1 - x), 1e-12)`, finite at 0 and 1 too; the bound is the float32 number nearest to 1e-12.
    """
    t, one = agreed(target, input), p.number(1, input)
    limit = 65504.0 if input.dtype is f16 else 1 / float(np.float32(1e-12))
    edge = p.less(p.mul(input, sub(one, input)), p.number(1 / limit, input))
    safe = p.select(edge, p.number(0.5, input), input)
    inner = p.neg(p.add(p.mul(t, p.log(safe)), p.mul(sub(one, t), p.log(sub(one, safe)))))
    held = p.stop_gradient(input)
    slope = scale(sub(held, t), limit)
    outer = p.add(_clamped(held, t), p.mul(slope, sub(input, held)))
    losses = p.select(edge, outer, inner)
    return reduced(losses if weight is None else p.mul(losses, constant(weight, input)), reduction)


def _clamped(x: Value, t: Value) -> Value:
    """`-(t max(ln x, -100) + (1 - t) max(ln(1 - x), -100))`."""
    one, low = p.number(1, x), p.number(-100, x)
    yes, no = p.max(p.log(x), low), p.max(p.log(sub(one, x)), low)
    return p.neg(p.add(p.mul(t, yes), p.mul(sub(one, t), no)))


def soft_margin_loss(input: Value, target: Value, *, reduction: str = "mean") -> Value:
    """`ln(1 + e ** (-t x))` of targets -1 and 1."""
    return reduced(_log_losses(p.mul(agreed(target, input), input))[0], reduction)


def multilabel_soft_margin_loss(
    input: Value, target: Value, *, weight: Number | None = None, reduction: str = "mean"
) -> Value:
    """The mean over classes (the last axis) of the binary cross entropy of logits, times `weight`."""
    losses = _binary(input, agreed(target, input))
    if weight is not None:
        losses = p.mul(losses, constant(weight, input))
    return reduced(divided(p.reduce_sum(losses, axes=(input.rank - 1,)), input.shape[-1]), reduction)


def sigmoid_focal_loss(
    input: Value, target: Value, *, alpha: float = 0.25, gamma: float = 2.0, reduction: str = "mean"
) -> Value:
    """`-a (1 - q) ** gamma ln q`, q the probability of the right answer, `a = alpha t + (1 - alpha)(1 - t)`; no a where alpha is negative."""
    t = agreed(target, input)
    one = p.number(1, t)
    wrong = p.add(p.mul(sigmoid(input), sub(one, t)), p.mul(sigmoid(p.neg(input)), t))
    losses = p.mul(_power(wrong, gamma), _binary(input, t))
    if alpha >= 0:
        losses = p.mul(losses, p.add(scale(t, alpha), scale(sub(one, t), 1 - alpha)))
    return reduced(losses, reduction)


# ---- margins ---------------------------------------------------------------------------------------------------------------------------


def multi_margin_loss(input: Value, target: Value, *, p: int = 1, margin: float = 1.0, weight: Number | None = None,
                      reduction: str = "mean") -> Value:  # fmt: skip
    """`sum(weight[t] max(0, margin - x[t] + x[i]) ** p, i != t) / classes`."""
    return _multi_margin(input, _labels(target), p, margin, weight, reduction)


def _multi_margin(
    x: Value, labels: Value, exponent: int, margin: float, weight: Number | None, reduction: str
) -> Value:
    if exponent not in (1, 2):
        raise Refusal("cannot use the loss multi_margin_loss", [f"p is 1 or 2, found {exponent!r}"])
    axis = x.rank - 1
    chosen = one_hot(labels, x.shape[axis], axis)
    right = along(_picked(x, chosen, axis), x.shape, (axis,))
    short = relu(plus(sub(x, right), margin))
    terms = p.select(chosen, p.number(0, x), square(short) if exponent == 2 else short)
    if weight is not None:
        terms = p.mul(terms, along(_picked(per_class(weight, x, axis), chosen, axis), x.shape, (axis,)))
    return reduced(divided(p.reduce_sum(terms, axes=(axis,)), x.shape[axis]), reduction)


def multilabel_margin_loss(input: Value, target: Value, *, reduction: str = "mean") -> Value:
    """`sum(max(0, 1 - (x[t_j] - x[i])), j, i not a target) / classes`; a row's targets end at its first negative label."""
    axis, labels, classes = input.rank - 1, _labels(target), input.shape[-1]
    negative = p.less(labels, p.number(0, labels))
    ended = p.cumsum(p.select(negative, p.number(1, labels), p.number(0, labels)), axis=axis)
    valid = p.equal(ended, p.number(0, ended))
    square_shape = (*labels.shape, classes)  # rows, labels, classes
    rows = tuple(range(axis))
    chosen = p.logical_and(one_hot(labels, classes, axis + 1), along(valid, square_shape, (axis + 1,)))
    scores = p.broadcast(input, shape=square_shape, axes=(*rows, axis + 1))
    zero = p.number(0, scores)
    right = p.reduce_sum(p.select(chosen, scores, zero), axes=(axis + 1,))
    is_target = p.less(p.number(0, input), p.reduce_sum(p.select(chosen, p.number(1, scores), zero), axes=(axis,)))
    counted = p.logical_and(
        along(valid, square_shape, (axis + 1,)),
        p.broadcast(p.logical_not(is_target), shape=square_shape, axes=(*rows, axis + 1)),
    )
    short = relu(plus(sub(scores, along(right, square_shape, (axis + 1,))), 1))
    return reduced(divided(p.reduce_sum(p.select(counted, short, zero), axes=(axis, axis + 1)), classes), reduction)


# ---- overlap ---------------------------------------------------------------------------------------------------------------------------


def dice_loss(input: Value, target: Value, *, smooth: float = 1.0, squared: bool = False, activation: str | None = None,
              class_axis: int = 1, reduction: str = "mean") -> Value:  # fmt: skip
    """`1 - (2 sum(x t) + smooth) / (sum(x) + sum(t) + smooth)` of each sample; `squared` sums squares below.

    The sums run over all axes but the first. With `activation="softmax"` the target is class indices, and each class has its own overlap; with
    `"sigmoid"` x is logits; without one x is probabilities.
    """
    axis = axis_of_classes(input.rank, class_axis)
    match activation:
        case None | "sigmoid":
            x = input if activation is None else sigmoid(input)
            t = agreed(target, input)
            axes = tuple(range(1, x.rank)) if x.rank > 1 else (0,)
        case "softmax":
            x = softmax(input, (axis,))
            chosen = one_hot(_labels(target), input.shape[axis], axis)
            t = p.select(chosen, p.number(1, x), p.number(0, x))
            axes = tuple(i for i in range(1, x.rank) if i != axis)
        case _:
            raise Refusal(
                "cannot use the loss dice_loss", [f"activation is sigmoid, softmax or None, found {activation!r}"]
            )
    both = plus(scale(p.reduce_sum(p.mul(x, t), axes=axes), 2), smooth)
    sizes = p.add(square(x), square(t)) if squared else p.add(x, t)
    overlap = p.div(both, plus(p.reduce_sum(sizes, axes=axes), smooth))
    return reduced(sub(p.number(1, overlap), overlap), reduction)


def _dice_target(types: Sequence[TensorType], options: Mapping[str, Any]) -> dict[str, TensorType]:
    return (class_indices if options.get("activation") == "softmax" else same_as_output)(types, options)


def _index_in_last(types: Sequence[TensorType], options: Mapping[str, Any]) -> dict[str, TensorType]:
    return {"target": TensorType(i64, types[0].shape[:-1])}


def _labels_in_last(types: Sequence[TensorType], options: Mapping[str, Any]) -> dict[str, TensorType]:
    return {"target": TensorType(i64, types[0].shape)}


_FOCAL = "Lin et al. 2017, Focal Loss for Dense Object Detection"

CLASSIFICATION: tuple[Loss, ...] = (
    Loss(
        "cross_entropy", cross_entropy, ("input",), class_indices, "-sum(t ln softmax(x))", "torch.nn.CrossEntropyLoss",
        ("ce", "cross_entropy_loss"), {"softmax": "cross_entropy", "log_softmax": "cross_entropy"},
    ),
    Loss(
        "nll_loss", nll_loss, ("input",), class_indices, "-weight[t] x[t]", "torch.nn.NLLLoss", ("nll",), {"log_softmax": "cross_entropy"},
    ),
    Loss(
        "softmax_focal_loss", softmax_focal_loss, ("input",), class_indices, "-weight[t] (1 - q)^gamma ln q, q = softmax(x)[t]", _FOCAL, (),
        {"softmax": "softmax_focal_loss", "log_softmax": "softmax_focal_loss"},
    ),
    Loss(
        "binary_cross_entropy", binary_cross_entropy, ("input",), same_as_output, "-(t ln x + (1 - t) ln(1 - x))", "torch.nn.BCELoss",
        ("bce",), {"sigmoid": "binary_cross_entropy_with_logits"},
    ),
    Loss(
        "binary_cross_entropy_with_logits", binary_cross_entropy_with_logits, ("input",), same_as_output,
        "-(pos_weight t ln sigmoid(x) + (1 - t) ln sigmoid(-x))", "torch.nn.BCEWithLogitsLoss", ("bce_with_logits",),
        {"sigmoid": "binary_cross_entropy_with_logits"},
    ),
    Loss("soft_margin_loss", soft_margin_loss, ("input",), same_as_output, "ln(1 + exp(-t x))", "torch.nn.SoftMarginLoss", ("soft_margin",)),
    Loss(
        "multilabel_soft_margin_loss", multilabel_soft_margin_loss, ("input",), same_as_output,
        "mean over classes of -(t ln sigmoid(x) + (1 - t) ln sigmoid(-x))", "torch.nn.MultiLabelSoftMarginLoss", ("multilabel_soft_margin",),
        {"sigmoid": "multilabel_soft_margin_loss"},
    ),
    Loss(
        "sigmoid_focal_loss", sigmoid_focal_loss, ("input",), same_as_output, "-a (1 - q)^gamma ln q", _FOCAL, ("focal", "focal_loss"),
        {"sigmoid": "sigmoid_focal_loss"},
    ),
    Loss(
        "multi_margin_loss", multi_margin_loss, ("input",), _index_in_last, "sum(weight[t] max(0, margin - x[t] + x[i])^p, i != t) / classes",
        "torch.nn.MultiMarginLoss", ("multi_margin",),
    ),
    Loss(
        "multilabel_margin_loss", multilabel_margin_loss, ("input",), _labels_in_last, "sum(max(0, 1 - x[t_j] + x[i])) / classes",
        "torch.nn.MultiLabelMarginLoss", ("multilabel_margin",),
    ),
    Loss(
        "dice_loss", dice_loss, ("input",), _dice_target, "1 - (2 sum(x t) + smooth) / (sum(x) + sum(t) + smooth)",
        "Milletari et al. 2016, V-Net; Sudre et al. 2017", ("dice",),
    ),
)  # fmt: skip
