"""The lowerings, a family a file. Importing this package fills the table."""

from . import (
    activation,
    control,
    convolution,
    index,
    logic,
    math,
    normalization,
    pooling,
    recurrent,
    reduction,
    resize,
    sequence,
    shape,
)

__all__ = [
    "activation",
    "control",
    "convolution",
    "index",
    "logic",
    "math",
    "normalization",
    "pooling",
    "recurrent",
    "reduction",
    "resize",
    "sequence",
    "shape",
]
