"""Choosing boxes: non-maximum suppression, whose number of results depends on data."""

from __future__ import annotations

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.graph import Value
from ....algebra.types import TensorType, bool_, i32, i64
from ..context import Node, require_equal
from ..registry import Gradient, lowers
from .index import at_places, places_of, unravelled


def _scalar(x: Value | None, default: float, like: Value) -> Value:
    """An optional operand as a number repeated like a tensor."""
    if x is None:
        return p.number(default, like)
    number = p.cast(p.reshape(x, shape=()), dtype=like.dtype)
    return p.broadcast(number, shape=like.shape, axes=())


def _column(boxes: Value, i: int) -> Value:
    lead = boxes.shape[:-1]
    part = p.slice(boxes, start=(*(0 for _ in lead), i), limit=(*lead, i + 1))
    return p.reshape(part, shape=lead)


def corners(boxes: Value, center_point_box: int) -> tuple[Value, Value, Value, Value]:
    """Low and high ends of boxes along two axes, from two opposite corners in any order or from centre and extent."""
    a, b, d, e = (_column(boxes, i) for i in range(4))
    if center_point_box:
        half = [c.scale(x, 0.5) for x in (d, e)]
        return c.sub(a, half[0]), c.sub(b, half[1]), p.add(a, half[0]), p.add(b, half[1])
    return p.min(a, d), p.min(b, e), p.max(a, d), p.max(b, e)


def overlaps(ends: tuple[Value, Value, Value, Value]) -> tuple[Value, Value]:
    """Intersection and union of each box with each, along the last axis: `[.., N]` to `[.., N, N]`."""
    lead = ends[0].shape
    r = len(lead)
    shape = (*lead, lead[-1])

    def row(x: Value) -> Value:
        return p.broadcast(x, shape=shape, axes=tuple(range(r)))

    def column(x: Value) -> Value:
        return p.broadcast(x, shape=shape, axes=(*range(r - 1), r))

    def extent(low: Value, high: Value) -> Value:
        length = c.sub(high, low)
        return p.max(length, p.number(0, length))

    low_y, low_x, high_y, high_x = ends
    sides = [
        extent(p.max(row(low), column(low)), p.min(row(high), column(high)))
        for low, high in ((low_y, high_y), (low_x, high_x))
    ]
    area = p.mul(extent(low_y, high_y), extent(low_x, high_x))
    common = p.mul(*sides)
    return common, c.sub(p.add(row(area), column(area)), common)


def _greedy(over: Value, valid: Value, limit: Value) -> Value:
    """From first to last: a box is kept if it is valid, no kept one overlaps it, and fewer than the limit are kept.

    `over[B, C, N, N]`, `valid[B, C, N]`, `limit[B, C]`; the result is `[N, B, C]`.
    """
    batch, classes, count = valid.shape
    shape = (batch, classes)

    def step(gone: Value, kept: Value, at: Value, over_i: Value, valid_i: Value, limit: Value) -> list[Value]:
        here = p.equal(
            p.broadcast(p.iota(count), shape=gone.shape, axes=(2,)), p.broadcast(at, shape=gone.shape, axes=())
        )
        hit = p.select(here, c.as_number(gone, i32), p.full(0, i32, gone.shape))
        lost = p.reduce_max(hit, axes=(2,))
        free = p.logical_and(p.equal(lost, p.number(0, lost)), p.less(kept, limit))
        keep = p.logical_and(valid_i, free)
        now = p.logical_and(over_i, p.broadcast(keep, shape=gone.shape, axes=(0, 1)))
        return [p.logical_or(gone, now), p.add(kept, c.as_number(keep, i64)), keep]

    body = p.body_of(
        step,
        [
            ("gone", TensorType(bool_, valid.shape)), ("kept", TensorType(i64, shape)), ("at", TensorType(i64, ())),
            ("over", TensorType(bool_, valid.shape)), ("valid", TensorType(bool_, shape)), ("limit", TensorType(i64, shape)),
        ],
    )  # fmt: skip
    carries = [p.full(False, bool_, valid.shape), p.full(0, i64, shape)]
    xs = [p.iota(count), p.transpose(over, perm=(2, 0, 1, 3)), p.transpose(valid, perm=(2, 0, 1))]
    return p.scan(carries, xs, [limit], body, length=count)[2]


@lowers("NonMaxSuppression", gradient=Gradient.INDEX, reason="places")
def non_max_suppression(
    boxes: Value, scores: Value, max_output_boxes_per_class: Value | None = None, iou_threshold: Value | None = None,
    score_threshold: Value | None = None, *, center_point_box: int = 0, node: Node,
) -> Value:  # fmt: skip
    """Batch, class and place of boxes that no better one of their class overlaps too much; their number is a new symbol"""
    batch, classes, count = scores.shape
    require_equal(boxes.shape[0], batch, "batch sizes of boxes and scores")
    require_equal(boxes.shape[1], count, "one score for each box")
    order = p.argsort(scores, axis=2, descending=True)
    sorted_scores = at_places(scores, order, 2)
    ends = tuple(
        at_places(p.broadcast(x, shape=scores.shape, axes=(0, 2)), order, 2) for x in corners(boxes, center_point_box)
    )
    common, union = overlaps((ends[0], ends[1], ends[2], ends[3]))
    over = p.less(p.mul(_scalar(iou_threshold, 0, union), union), common)
    if score_threshold is None:
        valid = p.full(True, bool_, scores.shape)
    else:
        valid = p.less(_scalar(score_threshold, 0, sorted_scores), sorted_scores)
    limit = _scalar(max_output_boxes_per_class, 0, p.full(0, i64, (batch, classes)))
    keep = p.transpose(_greedy(over, valid, limit), perm=(1, 2, 0))
    places = places_of(p.reshape(keep, shape=(batch * classes * count,)), f"{node.outputs[0]}_size")
    at_batch, at_class, at_rank = unravelled(places, (batch, classes, count))
    chosen = p.gather(p.reshape(order, shape=(batch * classes * count,)), places, axis=0)
    del at_rank
    return p.concat(*(c.unsqueeze(x, (1,)) for x in (at_batch, at_class, chosen)), axis=1)
