"""The lowerings, a family a file. Importing this package fills the table."""

from . import activation, basic, control, convolution, normalization, pooling, recurrent

__all__ = ["activation", "basic", "control", "convolution", "normalization", "pooling", "recurrent"]
