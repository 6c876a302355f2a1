"""Probabilities traced back to their logits, so that a loss can take its stable form.

A loss on `softmax(z)` or `sigmoid(z)` loses everything where the probabilities round to 0 or 1. Both are recognised by their formula, so it does
not matter whether the model has one `Softmax` node or its parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import primitives as p
from ..dims import equal, is_one
from ..errors import InconclusiveDim
from ..graph import Value

__all__ = ["Probabilities", "trace"]


@dataclass(frozen=True, slots=True, eq=False)
class Probabilities:
    """`kind` is `softmax`, `log_softmax` or `sigmoid`; `logits` has the shape of the probabilities; `axes` are those that softmax sums over."""

    kind: str
    logits: Value
    axes: tuple[int, ...] = ()


def trace(y: Value) -> Probabilities | None:
    """What `y` is the softmax, log-softmax or sigmoid of, through reshapes and transposes; None where it is none.

    Builds in the current builder.
    """
    match y.primitive.name:
        case "reshape":
            found = trace(y.operands[0])
            return None if found is None else _reshaped(found, y)
        case "transpose":
            found = trace(y.operands[0])
            if found is None:
                return None
            perm: tuple[int, ...] = y.params["perm"]
            axes = tuple(sorted(perm.index(a) for a in found.axes))
            return Probabilities(found.kind, p.transpose(found.logits, perm=perm), axes)
        case "div":
            return _softmax(y) or _sigmoid(y)
        case "add":
            return _log_softmax(y)
        case _:
            return None


def _reshaped(found: Probabilities, y: Value) -> Probabilities | None:
    logits = p.reshape(found.logits, shape=y.shape)
    if found.kind == "sigmoid":
        return Probabilities("sigmoid", logits)
    inner = [(a, d) for a, d in enumerate(found.logits.shape) if not is_one(d)]
    outer = [(a, d) for a, d in enumerate(y.shape) if not is_one(d)]
    if len(inner) != len(outer):
        return None
    try:
        same = all(equal(d, e) for (_, d), (_, e) in zip(inner, outer, strict=True))
    except InconclusiveDim:
        return None
    if not same:
        return None
    return Probabilities(
        found.kind, logits, tuple(b for (a, _), (b, _) in zip(inner, outer, strict=True) if a in found.axes)
    )


def _is(value: Value, name: str) -> bool:
    return value.primitive.name == name


def _row_sum(value: Value, of: Value) -> tuple[int, ...] | None:
    """The axes over which `value` is the sum of `of`, repeated along them again."""
    if not _is(value, "broadcast"):
        return None
    total = value.operands[0]
    while _is(total, "reshape"):
        total = total.operands[0]
    if not _is(total, "reduce_sum") or total.operands[0] is not of:
        return None
    axes: tuple[int, ...] = total.params["axes"]
    kept = [a for a in range(of.rank) if a not in axes and not is_one(of.shape[a])]
    placed = [a for a in value.params["axes"] if not is_one(value.shape[a])]
    return axes if kept == placed else None


def _softmax(y: Value) -> Probabilities | None:
    e, total = y.operands
    if not _is(e, "exp"):
        return None
    axes = _row_sum(total, e)
    return None if axes is None else Probabilities("softmax", _without_shift(e.operands[0], axes), axes)


def _without_shift(z: Value, axes: tuple[int, ...]) -> Value:
    """`z` without a term that is constant along the axes: softmax is the same with it and without it."""
    if _is(z, "add"):
        for x, shift in (z.operands, z.operands[::-1]):
            inner = shift.operands[0] if _is(shift, "neg") else shift
            if _is(inner, "broadcast") and not set(inner.params["axes"]) & set(axes):
                return x
    return z


def _log_softmax(y: Value) -> Probabilities | None:
    """`z - ln(sum(e ** z))`."""
    z, rest = y.operands
    if not _is(rest, "neg") or not _is(rest.operands[0], "broadcast"):
        return None
    log = rest.operands[0].operands[0]
    while _is(log, "reshape"):
        log = log.operands[0]
    if not _is(log, "log") or not _is(log.operands[0], "reduce_sum"):
        return None
    e, axes = log.operands[0].operands[0], log.operands[0].params["axes"]
    if not _is(e, "exp") or e.operands[0] is not z or set(rest.operands[0].params["axes"]) & set(axes):
        return None
    return Probabilities("log_softmax", _without_shift(z, axes), axes)


def _is_number(value: Value, number: float) -> bool:
    while value.primitive.name in ("broadcast", "reshape"):
        value = value.operands[0]
    if not _is(value, "literal"):
        return False
    constant = value.params["value"]
    return constant.size == 1 and float(constant.array.reshape(())) == number


def _clipped(e: Value, pick: str, sign: int) -> Value | None:
    """The x of `exp(min(x, 0))` or `exp(-max(x, 0))`."""
    if not _is(e, "exp"):
        return None
    inner = e.operands[0]
    if sign < 0:
        if not _is(inner, "neg"):
            return None
        inner = inner.operands[0]
    if not _is(inner, pick) or not _is_number(inner.operands[1], 0):
        return None
    return inner.operands[0]


def _sigmoid(y: Value) -> Probabilities | None:
    above, below = y.operands
    if not _is(below, "add"):
        return None
    first, second = below.operands
    if first is above and (x := _clipped(first, "min", 1)) is not None and _clipped(second, "max", -1) is x:
        return Probabilities("sigmoid", x)
    if not _is_number(above, 1):
        return None
    for one, e in ((first, second), (second, first)):  # 1 / (1 + e ** -x)
        if _is_number(one, 1) and _is(e, "exp"):
            inner = e.operands[0]
            return Probabilities("sigmoid", inner.operands[0] if _is(inner, "neg") else p.neg(inner))
    return None
