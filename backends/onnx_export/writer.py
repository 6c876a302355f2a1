"""Writing models to disk."""

from __future__ import annotations

from os import PathLike

import onnx

from ...algebra.graph import Graph
from .emit import to_onnx

__all__ = ["save"]


def save(graph: Graph, path: str | PathLike[str], *, profile: str = "explicit", target: str = "onnxruntime",
         embed: str | None = None, opset: int | None = None) -> None:  # fmt: skip
    """Write the graph as an ONNX model."""
    onnx.save(to_onnx(graph, profile=profile, target=target, embed=embed, opset=opset), path)
