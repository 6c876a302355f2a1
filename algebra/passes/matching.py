"""What rules ask of values and dims. A question about dims that depends on the sizes is answered no: a rule then leaves things as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import primitives as p
from ..dims import Dim, at_least, equal, is_one, simplest
from ..errors import InconclusiveDim
from ..graph import Value

__all__ = [
    "FOLDED", "constant", "counted", "is_splat", "negated", "nonunit", "op", "same", "same_dims", "splat", "sure_at_least",
]  # fmt: skip

FOLDED = 1024  # a literal of this many elements is small beside the node that makes it
UNIFORM = 4096


def op(v: Value) -> str:
    """The name of the primitive that made a value."""
    return v.primitive.name


def same(a: Dim, b: Dim) -> bool:
    """Whether two dims are surely equal."""
    if a is b or (isinstance(a, int) and isinstance(b, int)):
        return a == b
    try:
        return equal(a, b)
    except InconclusiveDim:
        return False


def same_dims(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes are surely equal."""
    return len(a) == len(b) and all(map(same, a, b))


def sure_at_least(a: Dim, b: Dim) -> bool:
    """Whether `a >= b` surely."""
    if isinstance(a, int) and isinstance(b, int):
        return a >= b
    try:
        return at_least(a, b)
    except InconclusiveDim:
        return False


def nonunit(shape: Sequence[Dim]) -> tuple[int, ...]:
    """The axes whose size is not the int 1."""
    return tuple(i for i, d in enumerate(shape) if not is_one(d))


def splat(v: Value) -> Any | None:
    """The number that every element of a value is, as a numpy scalar; None where that is not plain to see."""
    while op(v) == "broadcast":
        v = v.operands[0]
    if op(v) != "literal":
        return None
    value = v.params["value"]
    if not 1 <= value.size <= UNIFORM:
        return None
    flat = value.array.reshape(-1)
    if value.size == 1:
        return flat[0]
    return flat[0] if bool((flat == flat[0]).all()) and not (flat[0] == 0 and _signs_differ(flat)) else None


def _signs_differ(flat: np.ndarray) -> bool:
    return flat.dtype.kind not in "iub" and len(set(np.signbit(flat.astype(np.float32)).tolist())) > 1


def is_splat(v: Value, number: float) -> bool:
    """Whether every element of a value is this number."""
    found = splat(v)
    return found is not None and bool(found == number)


def negated(v: Value) -> Value | None:
    """The x of a value `-x`."""
    return v.operands[0] if op(v) == "neg" else None


def constant(v: Value) -> np.ndarray | None:
    """The array of a value made of small constants: a literal, a static iota or dim, or a small broadcast of one."""
    match op(v):
        case "literal":
            value = v.params["value"]
            return np.asarray(value.array) if value.size <= FOLDED * 64 else None
        case "dim":
            return np.asarray(v.params["value"], np.int64) if isinstance(v.params["value"], int) else None
        case "iota":
            size = v.params["size"]
            return np.arange(size, dtype=np.int64) if isinstance(size, int) and size <= FOLDED else None
        case "broadcast":
            if not small(v.shape):
                return None
            inner = constant(v.operands[0])
            return None if inner is None else np.asarray(v.primitive.numpy(inner, **v.params))
    return None


def small(shape: Sequence[Dim], most: int = FOLDED) -> bool:
    """Whether a shape is static and holds at most so many elements."""
    size = 1
    for d in shape:
        if not isinstance(d, int):
            return False
        size *= d
    return size <= most


def counted(count: Dim, like: Value) -> Value:
    """A number of elements as a tensor like another one."""
    from ..composites import size_of

    count = simplest(count)
    scalar = size_of((count,), like.dtype) if like.dtype.floating else p.cast(p.dim(count), dtype=like.dtype)
    return p.broadcast(scalar, shape=like.shape, axes=())
