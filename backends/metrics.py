"""Metrics of outputs against targets, for validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..algebra.errors import Refusal
from ..algebra.signature import Signature

__all__ = ["METRICS", "Metric", "metric_named"]

Metric = Callable[[Mapping[str, np.ndarray], Mapping[str, np.ndarray]], float]
"""`f(outputs, batch)`: the mean over the batch; outputs, inputs and targets are by name."""


def accuracy(output: np.ndarray, target: np.ndarray, class_axis: int, threshold: float = 0.0) -> float:
    """The share of right labels: those of the largest score; where outputs and targets have one shape, yes or no by a threshold."""
    if output.shape == target.shape and target.dtype.kind == "f" and output.ndim > 1 and output.shape[class_axis] > 1:
        target = target.argmax(class_axis)
    if output.shape == target.shape:
        return float(np.mean((output > threshold) == (target > 0.5)))
    return float(np.mean(output.argmax(class_axis) == target))


def mae(output: np.ndarray, target: np.ndarray, class_axis: int) -> float:
    """The mean absolute error."""
    return float(np.mean(np.abs(output - target)))


def mse(output: np.ndarray, target: np.ndarray, class_axis: int) -> float:
    """The mean squared error."""
    return float(np.mean(np.square(output - target)))


def rmse(output: np.ndarray, target: np.ndarray, class_axis: int) -> float:
    """The root of the mean squared error of each batch."""
    return float(np.sqrt(np.mean(np.square(output - target))))


METRICS: dict[str, Callable[[np.ndarray, np.ndarray, int], float]] = {
    "accuracy": accuracy,
    "mae": mae,
    "mse": mse,
    "rmse": rmse,
}


def metric_named(metric: str | Metric, signature: Signature) -> Metric:
    """A metric as a function of outputs and batch; one by name compares the output that the loss is on with its target."""
    if not isinstance(metric, str):
        return metric
    if metric not in METRICS:
        raise Refusal(
            f"no metric {metric!r}", [f"there are {', '.join(METRICS)}; a function f(outputs, batch) is one too"]
        )
    loss: Mapping[str, Any] = signature.loss
    targets = loss.get("targets", ())
    output = loss.get("output")
    if not isinstance(output, str) or len(targets) != 1:
        raise Refusal(f"the metric {metric!r} needs one output and one target", ["give a function f(outputs, batch)"])
    axis = int(loss.get("options", {}).get("class_axis", 1))
    function = METRICS[metric]
    if metric == "accuracy" and (loss.get("fused") == "sigmoid" or loss.get("name") == "binary_cross_entropy"):
        function = partial(accuracy, threshold=0.5)

    def compared(outputs: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray]) -> float:
        y = outputs[output]
        return function(y, batch[targets[0]], axis if y.ndim > 1 else 0)

    return compared
