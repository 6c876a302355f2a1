"""Class labels held against the number of classes before they are fed: a graph cannot refuse, and would take a wrong one for a row without a class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..algebra.errors import PullbackError
from ..algebra.signature import Signature

__all__ = ["Labels", "check_labels", "labels_of"]

CLASSIFYING = {
    "cross_entropy": -100,
    "nll_loss": -100,
    "softmax_focal_loss": -100,
    "multi_margin_loss": None,
    "dice_loss": None,
}
"""Losses of class indices, and the index that each ignores unless told otherwise."""


class Labels(NamedTuple):
    """What a target of class indices may hold: 0 to `classes - 1`, and the index that is ignored."""

    classes: int
    ignored: int | None


def labels_of(signature: Signature) -> dict[str, Labels]:
    """The targets that are class indices of a known number of classes."""
    found: dict[str, Labels] = {}
    targets = {e.name: e for e in signature.inputs_of("target")}
    outputs = {e.name: e for e in (*signature.activations, *signature.outputs)}
    for term in signature.loss.get("terms", [signature.loss]):
        output = outputs.get(str(term.get("output")))
        if term.get("name") not in CLASSIFYING or output is None:
            continue
        options = term.get("options", {})
        axis = options.get("class_axis", 1 if len(output.shape) > 1 else 0)
        classes = output.shape[axis]
        for name in term.get("targets", ()):
            if isinstance(classes, int) and name in targets and targets[name].dtype.startswith("int"):
                found[name] = Labels(classes, options.get("ignore_index", CLASSIFYING[term["name"]]))
    return found


def check_labels(batch: Mapping[str, Any], labels: Mapping[str, Labels]) -> None:
    """Raise where a label is no class and not the ignored index, as PyTorch does."""
    for name, (classes, ignored) in labels.items():
        array = np.asarray(batch[name])
        if array.size == 0 or (array.min() >= 0 and array.max() < classes):
            continue
        wrong = array[((array < 0) | (array >= classes)) & (array != ignored)]
        if wrong.size:
            raise PullbackError(f"{name!r} holds the label {wrong.flat[0]}, where classes are 0 to {classes - 1}")
