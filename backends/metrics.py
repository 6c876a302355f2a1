"""Metrics of outputs against targets, for validation: sums and counts of batches, from which comes what all of them have in one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..algebra.errors import Refusal
from ..algebra.signature import Entry, Signature
from .labels import labels_of

__all__ = ["METRICS", "Measure", "Metric", "measures"]

Arrays = Mapping[str, np.ndarray]
Metric = Callable[[Arrays, Arrays], float]
"""`f(outputs, batch)`: the mean over the batch; outputs, inputs and targets are by name."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric: `of(outputs, batch, samples)` gives a sum and what it is over, `whole` makes the metric of both."""

    of: Callable[[Arrays, Arrays, int], tuple[float, float]]
    root: bool = False

    def whole(self, total: float, count: float) -> float:
        """The metric of all batches; of nothing NaN."""
        mean = total / count if count else math.nan
        return math.sqrt(mean) if self.root else mean


def accuracy(
    output: np.ndarray, target: np.ndarray, class_axis: int, threshold: float, ignored: int | None
) -> tuple[float, float]:
    """The right labels: those of the largest score; where outputs and targets have one shape, yes or no by a threshold."""
    if output.shape == target.shape and target.dtype.kind == "f" and output.ndim > 1 and output.shape[class_axis] > 1:
        target = target.argmax(class_axis)
    if output.shape == target.shape:
        right, counted = (output > threshold) == (target > 0.5), np.ones(target.shape, bool)
    else:
        right, counted = output.argmax(class_axis) == target, target != ignored
    return float((right & counted).sum()), float(counted.sum())


def absolute_errors(output: np.ndarray, target: np.ndarray) -> tuple[float, float]:
    """The sum of the absolute errors, and their number."""
    return float(np.abs(output - target).sum(dtype=np.float64)), output.size


def squared_errors(output: np.ndarray, target: np.ndarray) -> tuple[float, float]:
    """The sum of the squared errors, and their number."""
    return float(np.square(output - target).sum(dtype=np.float64)), output.size


ERRORS = {"mae": absolute_errors, "mse": squared_errors, "rmse": squared_errors}
METRICS = ("accuracy", *ERRORS)


def measures(metrics: Sequence[str | Metric], signature: Signature) -> dict[str, Measure]:
    """Metrics by name: those that this package has compare the output that the loss is on with its target."""
    found: dict[str, Measure] = {}
    reasons = []
    for metric in metrics:
        name = metric if isinstance(metric, str) else getattr(metric, "__name__", str(metric))
        if name in found:
            reasons.append(f"{name!r} stands there twice; a function is called by its __name__")
        try:
            found[name] = _named(metric, signature) if isinstance(metric, str) else Measure(_averaged(metric))
        except Refusal as refusal:
            reasons += refusal.reasons
    if reasons:
        raise Refusal("cannot measure what is asked for", reasons)
    return found


def _averaged(metric: Metric) -> Callable[[Arrays, Arrays, int], tuple[float, float]]:
    return lambda outputs, batch, samples: (float(metric(outputs, batch)) * samples, samples)


def _named(metric: str, signature: Signature) -> Measure:
    function = "a function f(outputs, batch) is a metric too"
    if metric not in METRICS:
        raise Refusal("", [f"no metric {metric!r}; there are {', '.join(METRICS)}; {function}"])
    (loss, *others) = signature.loss.get("terms", [signature.loss])  # one output may have a loss with a weight
    targets = loss.get("targets", ())
    y = loss.get("output")
    if others or not isinstance(y, str) or len(targets) != 1:
        raise Refusal("", [f"the metric {metric!r} needs one output and one target; {function}"])
    target = targets[0]
    output, wanted = _entry(signature, y), _entry(signature, target)
    if metric in ERRORS:
        errors = ERRORS[metric]
        if len(output.shape) != len(wanted.shape) or not wanted.dtype.startswith(("float", "bfloat")):
            raise Refusal(
                "",
                [
                    f"the metric {metric!r} compares numbers with numbers, but {y!r} is {list(output.shape)} and {target!r} "
                    f"{wanted.dtype} {list(wanted.shape)}; {function}"
                ],
            )
        return Measure(lambda outputs, batch, samples: errors(outputs[y], batch[target]), root=metric == "rmse")
    axis = int(loss.get("options", {}).get("class_axis", 1)) if len(output.shape) > 1 else 0
    threshold = 0.5 if loss.get("fused") == "sigmoid" or loss.get("name") == "binary_cross_entropy" else 0.0
    labels = labels_of(signature).get(target)
    ignored = None if labels is None else labels.ignored
    return Measure(lambda outputs, batch, samples: accuracy(outputs[y], batch[target], axis, threshold, ignored))


def _entry(signature: Signature, name: str) -> Entry:
    return next(
        e for e in (*signature.inputs_of("target"), *signature.outputs, *signature.activations) if e.name == name
    )
