"""What training does otherwise than inference: batch statistics, running statistics as state, dropout.

A reader lowers `BatchNormalization` and `Dropout` in their inference form, and leaves a record of each in `graph.info["batch_norms"]` and
`graph.info["dropouts"]`: tuples of `BatchNorm` and of `Dropout`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import primitives as p
from ..graph import Graph, Value

__all__ = ["BatchNorm", "Dropout", "passing"]


@dataclass(frozen=True, slots=True, eq=False)
class BatchNorm:
    """One normalisation over all axes but `axis`, as lowered for inference.

    Each field that stands for a tensor holds the value, or better the tensor's name in the graph, which outlives every pass. `mean` and `var`
    are the running statistics (inputs of role `state`), `momentum` is ONNX's: `new = momentum * old + (1 - momentum) * batch`.
    """

    name: str
    x: Value | str
    scale: Value | str
    bias: Value | str
    mean: Value | str
    var: Value | str
    y: Value | str
    epsilon: float = 1e-5
    momentum: float = 0.9
    axis: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Dropout:
    """One dropout, as lowered for inference: `y` is `passing(x)`, so that it can be told from x itself."""

    name: str
    x: Value | str
    y: Value | str
    ratio: float = 0.5


def passing(x: Value) -> Value:
    """`x` under a node of its own: a reshape to its own shape, which simplification drops."""
    return p.reshape(x, shape=x.shape)


def value_of(graph: Graph, tensor: Value | str) -> Value:
    """The node that a record means."""
    return graph[tensor] if isinstance(tensor, str) else tensor
