"""Gradient clipping: by value, by the norm of each gradient, by the norm of all of them together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .. import primitives as p
from ..composites import clamp
from ..errors import Refusal
from ..graph import Value
from ..types import DType, f32, f64
from .optimizer import compute_dtype, scaled

__all__ = ["clip_by_global_norm", "clip_by_norm", "clip_by_value", "global_norm"]

EPS = 1e-6  # that of PyTorch's clip_grad_norm_


def _scalar(value: float | Value, dtype: DType) -> Value:
    return p.cast(value, dtype=dtype) if isinstance(value, Value) else p.literal(value, dtype)


def clip_by_value(grads: Sequence[Value], limit: float | Value) -> list[Value]:
    """`min(max(g, -limit), limit)`, as `torch.nn.utils.clip_grad_value_`."""
    clipped = []
    for g in grads:
        bound = p.broadcast(_scalar(limit, g.dtype), shape=g.shape, axes=())
        clipped.append(clamp(g, p.neg(bound), bound))
    return clipped


def _norm_of(x: Value, order: float) -> Value:
    """The norm of the elements, rank 0, in at least float32."""
    size = p.abs(p.cast(x, dtype=compute_dtype(x.dtype)))
    return _combined(size, order)


def _combined(sizes: Value, order: float) -> Value:
    axes = tuple(range(sizes.rank))
    if order == math.inf:
        return p.reduce_max(sizes, axes=axes)
    if order == 1:
        return p.reduce_sum(sizes, axes=axes)
    if order == 2:
        return p.sqrt(p.reduce_sum(p.mul(sizes, sizes), axes=axes))
    if order <= 0:
        raise Refusal("cannot take a norm", [f"its order must be positive, found {order!r}"])
    powers = p.pow(sizes, p.number(order, sizes))
    total = p.reduce_sum(powers, axes=axes)
    return p.pow(total, p.number(1 / order, total))


def global_norm(grads: Sequence[Value], order: float = 2.0) -> Value:
    """The norm of all gradients as one vector, rank 0, in the widest of their computing dtypes."""
    if not grads:
        raise Refusal("cannot take a norm", ["there is no gradient"])
    dtype = f64 if any(g.dtype is f64 for g in grads) else f32
    norms = [p.cast(_norm_of(g, order), dtype=dtype) for g in grads]
    if len(norms) == 1:
        return norms[0]
    return _combined(p.concat(*(p.reshape(n, shape=(1,)) for n in norms), axis=0), order)


def _coefficient(norm: Value, max_norm: float | Value) -> Value:
    """`min(1, max_norm / (norm + 1e-6))`."""
    ratio = p.div(_scalar(max_norm, norm.dtype), p.add(norm, p.literal(EPS, norm.dtype)))
    return p.min(ratio, p.literal(1, norm.dtype))


def _times(g: Value, coefficient: Value) -> Value:
    dtype = compute_dtype(g.dtype)
    return p.cast(scaled(p.cast(g, dtype=dtype), p.cast(coefficient, dtype=dtype)), dtype=g.dtype)


def clip_by_global_norm(
    grads: Sequence[Value], max_norm: float | Value, order: float = 2.0
) -> tuple[list[Value], Value]:
    """All gradients times `min(1, max_norm / (norm + 1e-6))`, and the norm before: `torch.nn.utils.clip_grad_norm_`."""
    norm = global_norm(grads, order)
    coefficient = _coefficient(norm, max_norm)
    return [_times(g, coefficient) for g in grads], norm


def clip_by_norm(grads: Sequence[Value], max_norm: float | Value, order: float = 2.0) -> list[Value]:
    """Each gradient alone times `min(1, max_norm / (its norm + 1e-6))`."""
    return [_times(g, _coefficient(_norm_of(g, order), max_norm)) for g in grads]
