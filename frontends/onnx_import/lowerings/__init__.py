"""The lowerings, a family a file. Importing this package fills the table."""

from . import activation, basic, convolution, normalization, pooling, recurrent

__all__ = ["activation", "basic", "convolution", "normalization", "pooling", "recurrent"]
