"""The lowerings, a family a file. Importing this package fills the table."""

from . import (
    activation,
    attention,
    control,
    convolution,
    index,
    logic,
    loss,
    math,
    normalization,
    pooling,
    quantized,
    recurrent,
    reduction,
    resize,
    sequence,
    shape,
)

__all__ = [
    "activation",
    "attention",
    "control",
    "convolution",
    "index",
    "logic",
    "loss",
    "math",
    "normalization",
    "pooling",
    "quantized",
    "recurrent",
    "reduction",
    "resize",
    "sequence",
    "shape",
]
