"""numpy's broadcasting, as ONNX defines it, in terms of the one `broadcast` primitive."""

from __future__ import annotations

from collections.abc import Sequence

from ...algebra import primitives as p
from ...algebra.dims import Dim, Shape, is_one, show_shape
from ...algebra.errors import DimError
from ...algebra.graph import Value
from .context import require_equal

__all__ = ["broadcast_shapes", "broadcast_to", "legacy", "together"]


def broadcast_shapes(*shapes: Sequence[Dim]) -> Shape:
    """The shape that all broadcast to (multidirectional). A symbol is not 1: two sizes that differ and are not 1 must be equal."""
    rank = max(map(len, shapes), default=0)
    result: list[Dim] = []
    for i in range(rank):
        size: Dim = 1
        for shape in shapes:
            at = i - (rank - len(shape))
            if at < 0 or is_one(shape[at]):
                continue
            size = shape[at] if is_one(size) else require_equal(size, shape[at], "sizes that broadcast together")
        result.append(size)
    return tuple(result)


def broadcast_to(x: Value, shape: Sequence[Dim]) -> Value:
    """`x` broadcast to `shape` (unidirectional): its axes aligned at the end, those of size 1 dropped and repeated."""
    shape = tuple(shape)
    if x.rank > len(shape):
        raise DimError(f"cannot broadcast {x.type!r} to {show_shape(shape)}: it has more axes")
    offset = len(shape) - x.rank
    axes, kept = [], []
    for i, d in enumerate(x.shape):
        if is_one(d) and not is_one(shape[offset + i]):
            continue
        require_equal(d, shape[offset + i], "a size that broadcasts to another")
        axes.append(offset + i)
        kept.append(d)
    if len(kept) != x.rank:
        x = p.reshape(x, shape=tuple(kept))
    return x if len(axes) == len(shape) else p.broadcast(x, shape=shape, axes=tuple(axes))


def together(*xs: Value) -> tuple[Value, ...]:
    """Operands broadcast to their common shape."""
    shape = broadcast_shapes(*(x.shape for x in xs))
    return tuple(broadcast_to(x, shape) for x in xs)


def legacy(a: Value, b: Value, broadcast: int, axis: int | None) -> tuple[Value, Value]:
    """Operands as operator sets below 7 broadcast them: `b` onto a run of the axes of `a` that starts at `axis`, by default its last ones."""
    if not broadcast:
        return a, b
    start = a.rank - b.rank if axis is None else axis + (a.rank if axis < 0 else 0)
    after = a.rank - b.rank - start
    if start < 0 or after < 0:
        raise DimError(f"cannot broadcast {b.type!r} onto {a.type!r} from axis {start}")
    return a, broadcast_to(p.reshape(b, shape=(*b.shape, *(1,) * after)), a.shape)
