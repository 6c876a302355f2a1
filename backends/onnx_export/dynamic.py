"""Emission of what few graphs have: places whose number depends on data, and bits read as another dtype."""

from __future__ import annotations

import numpy as np

from ...algebra.errors import PullbackError
from ...algebra.graph import Value
from ...algebra.types import i64
from .emission import Emission, Rule, covered
from .view import View, whole

__all__ = ["DYNAMIC"]


def _nonzero(e: Emission, v: Value) -> View:
    """NonZero of a vector; the size that depends on data is read from its shape."""
    size = v.params["size"]
    if not isinstance(size, int) and not e.ops.dims.in_program(e.ops.program):
        raise PullbackError("a size that depends on data, inside a loop or branch, is not emitted")
    found = e.ops.program.op("NonZero", (e.tensor(v.operands[0]),), i64, (1, size))
    if not isinstance(size, int):
        e.ops.dims.bind(size, found, 1)
    axes = e.ops.constant(np.asarray([0], np.int64))
    return whole(e.ops.program.op("Squeeze", (found, axes), i64, (size,)))


def _bit_cast(e: Emission, v: Value) -> View:
    """BitCast, which ONNX has from opset 26 on."""
    x = e.view(v.operands[0])
    order = e.layout([x], covered([x]), id(v) in e.pinned)
    tensor = e.place(x, order)
    to = v.params["dtype"]
    return View.of(e.ops.program.op("BitCast", (tensor,), to, tensor.shape, to=to), order, v.shape)


DYNAMIC: dict[str, Rule] = {"nonzero": _nonzero, "bit_cast": _bit_cast}
