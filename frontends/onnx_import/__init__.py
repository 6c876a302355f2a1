"""ONNX in: models become graphs of the algebra."""

from . import lowerings
from .reader import load
from .registry import Gradient, Static, Tensors, lowers, outside

__all__ = ["Gradient", "Static", "Tensors", "load", "lowerings", "lowers", "outside"]
