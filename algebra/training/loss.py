"""What a loss is: a plain function of values, the outputs that it consumes and the targets that it needs; and what all losses share."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import primitives as p
from ..composites import as_number, mean, size_of
from ..dims import Dim, at_least, is_one, maybe_equal, same_shape, show
from ..errors import InconclusiveDim, Refusal, TypeMismatch
from ..graph import Value
from ..types import TensorType, f32, i64
from .options import mistyped

__all__ = ["Loss", "Number", "Targets"]

Targets = Callable[[Sequence[TensorType], Mapping[str, Any]], dict[str, TensorType]]
Number = float | np.ndarray | Sequence[float] | Value
BOUNDS: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "label_smoothing": ("lie in [0, 1]", lambda v: 0 <= v <= 1),
    "delta": ("be above 0", lambda v: v > 0),
    "beta": ("be at least 0", lambda v: v >= 0),
    "gamma": ("be at least 0", lambda v: v >= 0),
    "smooth": ("be at least 0", lambda v: v >= 0),
    "eps": ("be at least 0", lambda v: v >= 0),
    "alpha": ("be at most 1", lambda v: v <= 1),
    "p": ("be above 0", lambda v: v > 0),
}
"""What the numbers among the options of losses must be, as PyTorch has it; an option of one name means one thing."""


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """One loss.

    `function(**outputs, **targets, **options)` gives a value; its parameters are named as in `torch.nn.functional`. `outputs` are the names of the
    parameters that are model outputs, in order. `targets(types of the outputs, options)` gives the type of each target. An output or target whose
    name stands among the options is the constant given there. `on_logits` says which loss of logits has the same meaning, where the model
    ends in that activation: it is stable where this one is not.
    """

    name: str
    function: Callable[..., Value]
    outputs: tuple[str, ...]
    targets: Targets
    formula: str
    reference: str
    aliases: tuple[str, ...] = ()
    on_logits: Mapping[str, str] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """The options with their defaults."""
        return {
            name: parameter.default
            for name, parameter in inspect.signature(self.function).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }

    def consumed(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The outputs that the model must give; those among the options are constants."""
        return tuple(name for name in self.outputs if name not in options)

    def needed(self, types: Sequence[TensorType], options: Mapping[str, Any]) -> dict[str, TensorType]:
        """The type of each target that enters the step, in order."""
        return {name: t for name, t in self.targets(types, options).items() if name not in options}

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise for options that this loss does not have."""
        signature = inspect.signature(self.function).parameters
        wrong = [f"no option {name!r}; {near(name, self.options)}" for name in options if name not in signature]
        reductions = ("none", "mean", "sum", *(("batchmean",) if self.name == "kl_div" else ()))
        wrong += mistyped(options, {n: str(q.annotation) for n, q in signature.items() if n not in self.outputs})
        wrong += (
            []
            if wrong
            else [
                f"{n} must {bound}, found {options[n]!r}"
                for n, (bound, holds) in BOUNDS.items()
                if n in options and not holds(options[n])
            ]
        )
        if options.get("reduction", "mean") not in reductions:
            wrong.append(f"reduction is one of {', '.join(reductions)}, found {options['reduction']!r}")
        if wrong:
            raise Refusal(f"cannot use the loss {self.name}", wrong)

    def __call__(
        self, outputs: Sequence[Value], targets: Mapping[str, Value], options: Mapping[str, Any] | None = None
    ) -> Value:
        """The loss of these outputs (in the order of `consumed`) and targets (by name)."""
        given = dict(options or {})
        self.check(given)
        names = self.consumed(given)
        if len(names) != len(outputs):
            raise Refusal(
                f"cannot use the loss {self.name}",
                [f"it takes {len(names)} outputs ({', '.join(names)}), {len(outputs)} are given"],
            )
        return self.function(**dict(zip(names, outputs, strict=True)), **targets, **given)


def near(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """A hint at names like this one."""
    close = difflib.get_close_matches(word, list(known), n=3)
    return f"near names: {', '.join(close)}" if close else f"known: {', '.join(known)}"


# ---- reductions ------------------------------------------------------------------------------------------------------------------------


def total(x: Value) -> Value:
    """The sum of all elements."""
    return p.reduce_sum(x, axes=tuple(range(x.rank)))


def average(x: Value) -> Value:
    """The mean of all elements; of nothing NaN, as PyTorch.

    Of 16-bit floats one axis at a time, divided before it is summed: a sum might overflow, and no float32 constant enters the graph.
    """
    if x.dtype.bits > 16:
        return mean(x, tuple(range(x.rank)))
    for axis in reversed(range(x.rank)):
        count = x.shape[axis]  # of nothing, only division after the sum gives NaN
        x = p.reduce_sum(divided(x, count), axes=(axis,)) if _some(count) else mean(x, (axis,))
    return x


def _some(count: Dim) -> bool:
    try:
        return at_least(count, 1)
    except InconclusiveDim:
        return False


def reduced(x: Value, reduction: str) -> Value:
    """`none`, `mean` or `sum` of the elements."""
    match reduction:
        case "none":
            return x
        case "mean":
            return average(x)
        case "sum":
            return total(x)
    raise Refusal("cannot reduce a loss", [f"reduction is none, mean or sum, found {reduction!r}"])


def quotient(x: Value, weight: Value) -> Value:
    """`sum(x) / sum(weight)`, accumulated in float32 where the dtype has 16 bits."""
    if x.dtype.bits > 16:
        return p.div(total(x), total(weight))
    return p.cast(p.div(total(p.cast(x, dtype=f32)), total(p.cast(weight, dtype=f32))), dtype=x.dtype)


def divided(x: Value, count: Dim) -> Value:
    """`x / count`."""
    return p.div(x, p.broadcast(size_of([count], x.dtype), shape=x.shape, axes=()))


# ---- operands --------------------------------------------------------------------------------------------------------------------------


def agreed(target: Value, like: Value) -> Value:
    """A target in the dtype of the output that it belongs to."""
    try:
        fits = same_shape(target.shape, like.shape)
    except InconclusiveDim:
        fits = False
    if not fits:
        raise TypeMismatch(f"a target of the shape of the output {like.type!r} is required, found {target.type!r}")
    return as_number(target, like.dtype)


def constant(value: Number, like: Value) -> Value:
    """An option that is a number, an array or a value, as a tensor of the type of `like`: its axes are the last ones of `like`."""
    v = value if isinstance(value, Value) else p.literal(np.asarray(value, like.dtype.numpy), like.dtype)
    v = p.cast(v, dtype=like.dtype)
    offset = like.rank - v.rank
    if offset < 0 or not all(is_one(d) or maybe_equal(d, like.shape[offset + i]) for i, d in enumerate(v.shape)):
        raise TypeMismatch(f"an option of type {v.type!r} does not fit {like.type!r}")
    kept = tuple(i for i, d in enumerate(v.shape) if not is_one(d) or is_one(like.shape[offset + i]))
    v = p.reshape(v, shape=tuple(v.shape[i] for i in kept)) if len(kept) < v.rank else v
    return p.broadcast(v, shape=like.shape, axes=tuple(offset + i for i in kept))


def per_class(value: Number, like: Value, axis: int) -> Value:
    """An option with one number for each class, along the class axis of `like`."""
    v = value if isinstance(value, Value) else p.literal(np.asarray(value, like.dtype.numpy), like.dtype)
    if v.rank != 1 or not maybe_equal(v.shape[0], like.shape[axis]):
        raise TypeMismatch(f"one weight for each of {show(like.shape[axis])} classes is required, found {v.type!r}")
    return p.broadcast(p.cast(v, dtype=like.dtype), shape=like.shape, axes=(axis,))


def axis_of_classes(rank: int, class_axis: int) -> int:
    """The class axis of a tensor; of an unbatched vector of scores its only one."""
    if rank == 1:
        return 0
    axis = class_axis + rank if class_axis < 0 else class_axis
    if not 0 <= axis < rank:
        found = f"class_axis {class_axis} is not an axis of a tensor of rank {rank}"
        way_out = (
            "; an output that is the loss itself takes loss=None (`--loss none --output NAME`)" if rank == 0 else ""
        )
        raise Refusal("cannot find the classes", [found + way_out])
    return axis


# ---- types of targets ------------------------------------------------------------------------------------------------------------------


def same_as_output(types: Sequence[TensorType], options: Mapping[str, Any]) -> dict[str, TensorType]:
    """One target of the output's type."""
    return {"target": types[0]}


def one_per_row(types: Sequence[TensorType], options: Mapping[str, Any]) -> dict[str, TensorType]:
    """A target for each row: the output's type without its last axis."""
    return {"target": TensorType(types[0].dtype, types[0].shape[:-1])}


def no_targets(types: Sequence[TensorType], options: Mapping[str, Any]) -> dict[str, TensorType]:
    return {}


def class_indices(types: Sequence[TensorType], options: Mapping[str, Any]) -> dict[str, TensorType]:
    """Class indices (int64) of the output's shape without its class axis; with `probabilities`, one number for each class."""
    shape = types[0].shape
    if options.get("probabilities"):
        return {"target": types[0]}
    axis = axis_of_classes(len(shape), options.get("class_axis", 1))
    return {"target": TensorType(i64, (*shape[:axis], *shape[axis + 1 :]))}
