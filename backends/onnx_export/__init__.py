"""Graphs of the algebra as ONNX models."""

from .emit import to_onnx
from .writer import save

__all__ = ["save", "to_onnx"]
