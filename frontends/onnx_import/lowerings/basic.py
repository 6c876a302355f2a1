"""The first rows of the table: identity, and the matrix products."""

from __future__ import annotations

from ....algebra import primitives as p
from ....algebra.composites import scale
from ....algebra.graph import Value
from ..broadcasting import broadcast_to, together
from ..registry import lowers


@lowers("Identity")
def identity(input: Value) -> Value:
    """x"""
    return input


@lowers("Add", since=7)
def add(a: Value, b: Value) -> Value:
    """a + b"""
    return p.add(*together(a, b))


@lowers("Gemm", since=7)
def gemm(a: Value, b: Value, c: Value | None = None, *, alpha: float = 1.0, beta: float = 1.0,
         transA: int = 0, transB: int = 0) -> Value:  # fmt: skip
    """alpha * a' @ b' + beta * c"""
    y = scale(p.dot(a, b, contract=((0 if transA else 1,), (1 if transB else 0,))), alpha)
    return y if c is None else p.add(y, scale(broadcast_to(c, y.shape), beta))
