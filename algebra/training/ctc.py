"""Connectionist temporal classification: the likelihood of a sequence of labels summed over all its alignments to time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import primitives as p
from ..composites import clamp, log_softmax, not_equal, one_hot, sub, unsqueeze
from ..dims import Dim, dim, simplest, symbols
from ..errors import TypeMismatch
from ..graph import Value
from ..primitives.control import body_of, scan
from ..types import TensorType, f32, f64, i64
from .loss import Loss, divided, reduced, total

__all__ = ["CTC", "ctc_loss", "ctc_loss_with_logits"]

NEVER = -1e30  # the logarithm of no probability, finite so that no difference of two is NaN
UNROLLED = 16  # a loop of at most this many steps is written out


def ctc_loss(input: Value, target: Value, input_lengths: Value | int, target_lengths: Value | int, *, blank: int = 0,
             zero_infinity: bool = False, reduction: str = "mean", batch_first: bool = False,
             max_target_length: int | None = None) -> Value:  # fmt: skip
    """`-ln P(target)` of log probabilities [time, batch, classes] (or [time, classes]); `batch_first` takes [batch, time, classes].

    Targets are padded, [batch, longest]; with `max_target_length` they stand one after the other in one vector instead. A target that does not
    fit its input gives infinity, or 0 with `zero_infinity`. The mean divides each loss by its target's length first.
    """
    batched = input.rank == 3
    if input.rank not in (2, 3):
        raise TypeMismatch(
            f"log probabilities [time, batch, classes] or [time, classes] are required, found {input.type!r}"
        )
    x = input if batched else unsqueeze(input, (1,))
    x = p.transpose(x, perm=(1, 0, 2)) if batched and batch_first else x
    dtype = f64 if input.dtype is f64 else f32
    batch = x.shape[1]
    times, sizes = (_lengths(v, batch) for v in (input_lengths, target_lengths))
    labels = p.cast(target, dtype=i64)
    labels = labels if batched else unsqueeze(labels, (0,))
    if batched and labels.rank == 1:
        labels = _padded(labels, sizes, batch, max_target_length)
    path = _with_blanks(labels, blank)
    losses = _negative_log_likelihood(p.cast(x, dtype=dtype), path, times, sizes, blank)
    infinite = p.less(p.number(-NEVER / 2, losses), losses)
    losses = p.select(infinite, p.number(0.0 if zero_infinity else float("inf"), losses), losses)
    losses = p.cast(losses, dtype=input.dtype)
    if reduction == "mean":
        longer = p.cast(p.max(sizes, p.number(1, sizes)), dtype=input.dtype)
        return divided(total(p.div(losses, longer)), batch)
    return reduced(losses, reduction) if batched or reduction == "sum" else p.reshape(losses, shape=())


def ctc_loss_with_logits(input: Value, target: Value, input_lengths: Value | int, target_lengths: Value | int, *, blank: int = 0,
                         zero_infinity: bool = False, reduction: str = "mean", batch_first: bool = False,
                         max_target_length: int | None = None) -> Value:  # fmt: skip
    """`ctc_loss` of the log-softmax over the last axis, the classes."""
    return ctc_loss(
        log_softmax(input, (input.rank - 1,)), target, input_lengths, target_lengths, blank=blank, zero_infinity=zero_infinity,
        reduction=reduction, batch_first=batch_first, max_target_length=max_target_length,
    )  # fmt: skip


def _lengths(value: Value | int, batch: Dim) -> Value:
    """One length for each sample."""
    if not isinstance(value, Value):
        return p.full(value, i64, (batch,))
    length = p.cast(value, dtype=i64)
    return p.broadcast(length, shape=(batch,), axes=()) if length.rank == 0 else length


def _padded(flat: Value, sizes: Value, batch: Dim, longest: int | None) -> Value:
    """Targets that stand one after the other, as rows; what lies behind a row's end is never read as a label."""
    if longest is None:
        raise TypeMismatch(
            f"max_target_length is required for targets in one vector {flat.type!r} (or padded targets [batch, longest])"
        )
    before = sub(p.cumsum(sizes, axis=0), sizes)
    shape = (batch, longest)
    place = p.add(p.broadcast(before, shape=shape, axes=(0,)), p.broadcast(p.iota(longest), shape=shape, axes=(1,)))
    last = p.broadcast(p.dim(simplest(flat.shape[0] - 1)), shape=shape, axes=())
    return p.gather(flat, p.min(place, last), axis=0)


def _with_blanks(labels: Value, blank: int) -> Value:
    """`blank, l0, blank, l1, ..., blank`."""
    batch, longest = labels.shape
    if isinstance(longest, int) and longest == 0:
        return p.full(blank, i64, (batch, 1))
    return p.pad(labels, low=(0, 1), high=(0, 1), interior=(0, 1), value=blank)


def _moved(alpha: Value, by: int) -> Value:
    """`alpha[n, l - by]`, NEVER before the start."""
    length = alpha.shape[1]
    longer = p.pad(alpha, low=(0, by), high=(0, 0), value=NEVER)
    return p.slice(longer, start=(0, 0), limit=(alpha.shape[0], length))


def _log_sum(*xs: Value) -> Value:
    """`ln(sum(e ** x))` of finite tensors."""
    top = xs[0]
    for x in xs[1:]:
        top = p.max(top, x)
    top = p.stop_gradient(top)
    parts = [p.exp(sub(x, top)) for x in xs]
    result = parts[0]
    for part in parts[1:]:
        result = p.add(result, part)
    return p.add(p.log(result), top)


def _negative_log_likelihood(x: Value, path: Value, times: Value, sizes: Value, blank: int) -> Value:
    steps, batch, classes = x.shape
    length = path.shape[1]
    # log probabilities along the path: a one-hot product picks them, and finite ones only, as 0 * inf is NaN
    finite = clamp(x, p.number(NEVER, x), None)
    chosen = one_hot(path, classes, 2)
    picks = p.select(chosen, p.full(1, x.dtype, chosen.shape), p.full(0, x.dtype, chosen.shape))
    along_path = p.transpose(p.dot(finite, picks, contract=((2,), (2,)), batch=((1,), (0,))), perm=(1, 0, 2))
    place = p.broadcast(p.iota(length), shape=(batch, length), axes=(1,))
    leaps = p.logical_and(not_equal(path, p.number(blank, path)), not_equal(path, _moved_labels(path, blank)))
    running = p.less(
        p.broadcast(p.iota(steps), shape=(steps, batch), axes=(0,)), p.broadcast(times, shape=(steps, batch), axes=(1,))
    )
    never = p.full(NEVER, x.dtype, (batch, length))
    alpha = p.select(p.equal(place, p.number(0, place)), p.number(0, never), never)
    alpha = _run(alpha, along_path, running, leaps)
    end = p.broadcast(p.add(sizes, sizes), shape=(batch, length), axes=(0,))
    final = p.logical_or(p.equal(place, end), p.equal(place, p.add(end, p.number(-1, end))))
    last = p.select(final, alpha, never)
    top = p.stop_gradient(p.reduce_max(last, axes=(1,)))
    spread = p.exp(sub(last, p.broadcast(top, shape=last.shape, axes=(0,))))
    return p.neg(p.add(p.log(p.reduce_sum(spread, axes=(1,))), top))


def _moved_labels(path: Value, blank: int) -> Value:
    """The label two places before; blank before the start."""
    longer = p.pad(path, low=(0, 2), high=(0, 0), value=blank)
    return p.slice(longer, start=(0, 0), limit=path.shape)


def _step(alpha: Value, scores: Value, running: Value, leaps: Value) -> Value:
    """One step of time: stay, come from the place before, or leap over a blank between different labels."""
    never = p.number(NEVER, alpha)
    reached = _log_sum(alpha, _moved(alpha, 1), p.select(leaps, _moved(alpha, 2), never))
    return p.select(p.broadcast(running, shape=alpha.shape, axes=(0,)), p.add(reached, scores), alpha)


def _run(alpha: Value, scores: Value, running: Value, leaps: Value) -> Value:
    """The forward variable after the last step; a short loop of known length is written out."""
    steps = scores.shape[0]
    if isinstance(steps, int) and steps <= UNROLLED:
        for t in range(steps):
            alpha = _step(alpha, _slice_of(scores, t), _slice_of(running, t), leaps)
        return alpha
    inputs = [
        ("alpha", _type(alpha)), ("scores", _without_first(scores)), ("running", _without_first(running)), ("leaps", _type(leaps)),
    ]  # fmt: skip
    body = body_of(
        lambda alpha, scores, running, leaps: (_step(alpha, scores, running, leaps),), inputs, name="ctc_step"
    )
    return scan((alpha,), (scores, running), (leaps,), body, length=steps)[0]


def _type(x: Value) -> TensorType:
    return TensorType(x.dtype, x.shape)


def _without_first(x: Value) -> TensorType:
    return TensorType(x.dtype, x.shape[1:])


def _slice_of(x: Value, t: int) -> Value:
    row = p.slice(x, start=(t,) + (0,) * (x.rank - 1), limit=(t + 1, *x.shape[1:]))
    return p.reshape(row, shape=x.shape[1:])


def _fresh(name: str, types: Sequence[TensorType]) -> Dim:
    """A symbolic dim that the outputs do not have."""
    taken = {s.name for t in types for s in symbols(t.shape)}
    while name in taken:
        name += "_"
    return dim(name)


def _targets(types: Sequence[TensorType], options: Mapping[str, Any]) -> dict[str, TensorType]:
    shape = types[0].shape
    batch: tuple[Dim, ...] = () if len(shape) == 2 else (shape[0] if options.get("batch_first") else shape[1],)
    together = bool(batch) and options.get("max_target_length") is not None
    labels = (_fresh("target_total", types),) if together else (*batch, _fresh("target_length", types))
    lengths = TensorType(i64, batch)
    return {"target": TensorType(i64, labels), "input_lengths": lengths, "target_lengths": lengths}


_FORMULA = "-ln sum over alignments of prod_t P(label_t)"
_REFERENCE = "torch.nn.CTCLoss; Graves et al. 2006"

CTC: tuple[Loss, ...] = (
    Loss("ctc_loss", ctc_loss, ("input",), _targets, _FORMULA, _REFERENCE, ("ctc",), {"softmax": "ctc_loss_with_logits"}),
    Loss(
        "ctc_loss_with_logits", ctc_loss_with_logits, ("input",), _targets, f"{_FORMULA}, P = softmax(x)", _REFERENCE, (),
        {"softmax": "ctc_loss_with_logits", "log_softmax": "ctc_loss_with_logits"},
    ),
)  # fmt: skip
