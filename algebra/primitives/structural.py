"""Primitives that make tensors, or move elements without computing on them."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import primitives as p
from ..dims import Dim, Shape, at_least, ceildiv, dmax, equal, floordiv, maybe_equal, product, show_shape, simplest
from ..errors import InconclusiveDim, TypeMismatch
from ..graph import Constant, Value, bind
from ..types import DType, TensorType, TupleType, Type, dtype_of, i64, widened
from .record import Each, NoGrad, Primitive

_Span = slice  # numpy's; the name is the primitive's below

# ---- sources ---------------------------------------------------------------------------------------------------------


def _np_input(**params: Any) -> np.ndarray:
    raise AssertionError("an input has no meaning of its own: evaluate binds it")


input_p = Primitive(
    "input", lambda *, name, dtype, shape, role: TensorType(dtype, shape), _np_input, (), "a tensor from outside"
)
literal_p = Primitive(
    "literal",
    lambda *, value: TensorType(dtype_of(value.dtype), value.shape),
    lambda *, value: value.array,
    (),
    "a constant tensor",
)
dim_p = Primitive(
    "dim", lambda *, value: TensorType(i64, ()), lambda *, value: np.asarray(value, np.int64), (), "a dim as a number"
)
iota_p = Primitive(
    "iota",
    lambda *, size: TensorType(i64, (size,)),
    lambda *, size: np.arange(size, dtype=np.int64),
    (),
    "0, 1, ..., size - 1",
)


def input(name: str, type: TensorType, role: str = "input") -> Value:
    """A tensor that enters from outside; `role` says what it is (`input`, `parameter`, `target`, ...)."""
    return bind(input_p, name=name, dtype=type.dtype, shape=type.shape, role=role)


def literal(value: np.ndarray | Constant | float | bool, dtype: DType | None = None) -> Value:
    """A constant tensor."""
    if not isinstance(value, Constant):
        value = Constant(np.asarray(value, dtype=None if dtype is None else dtype.numpy))
    return bind(literal_p, value=value)


def dim(value: Dim) -> Value:
    """A dim as an int64 scalar."""
    return bind(dim_p, value=simplest(value))


def iota(size: Dim) -> Value:
    """`[0, 1, ..., size - 1]` in int64."""
    return bind(iota_p, size=simplest(size))


def full(value: float | bool, dtype: DType, shape: Shape) -> Value:
    """A tensor of one repeated number."""
    return broadcast(literal(value, dtype), shape=shape, axes=())


def number(value: float, like: Value) -> Value:
    """A repeated number with the type of another tensor."""
    return full(value, like.dtype, like.shape)


# ---- broadcast, reshape, transpose -----------------------------------------------------------------------------------


def _broadcast_type(x: TensorType, *, shape: Shape, axes: tuple[int, ...]) -> TensorType:
    if len(axes) != x.rank or list(axes) != sorted(set(axes)) or not all(0 <= a < len(shape) for a in axes):
        raise TypeMismatch(f"axes {list(axes)} do not place {x!r} in {show_shape(shape)}")
    for d, a in zip(x.shape, axes, strict=True):
        if not equal(d, shape[a]):
            raise TypeMismatch(
                f"{x!r} does not fit axes {list(axes)} of {show_shape(shape)}: "
                "broadcast places axes, it never stretches one"
            )
    return TensorType(x.dtype, shape)


def _np_broadcast(x: np.ndarray, *, shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    expanded = x.reshape([x.shape[axes.index(i)] if i in axes else 1 for i in range(len(shape))])
    return np.broadcast_to(expanded, shape)


def _broadcast_vjp(ct: Value, y: Value, x: Value, *, shape: Shape, axes: tuple[int, ...]) -> Value:
    """The sum over the axes along which x was repeated."""
    return p.reduce_sum(ct, axes=tuple(i for i in range(len(shape)) if i not in axes))


def _reshape_type(x: TensorType, *, shape: Shape) -> TensorType:
    if not maybe_equal(
        product(x.shape), product(shape)
    ):  # a relation that only holds for some sizes is a constraint of the graph
        raise TypeMismatch(f"cannot reshape {x!r} to {show_shape(shape)}: the numbers of elements differ")
    return TensorType(x.dtype, shape)


def _transpose_type(x: TensorType, *, perm: tuple[int, ...]) -> TensorType:
    if sorted(perm) != list(range(x.rank)):
        raise TypeMismatch(f"perm {list(perm)} does not permute the axes of {x!r}")
    return TensorType(x.dtype, tuple(x.shape[i] for i in perm))


def _transpose_vjp(ct: Value, y: Value, x: Value, *, perm: tuple[int, ...]) -> Value:
    """The axes permuted back."""
    return p.transpose(ct, perm=tuple(perm.index(i) for i in range(len(perm))))


broadcast_p = Primitive(
    "broadcast",
    _broadcast_type,
    _np_broadcast,
    (_broadcast_vjp,),
    "x placed at `axes` of `shape`, repeated along the others",
)
reshape_p = Primitive(
    "reshape",
    _reshape_type,
    lambda x, *, shape: x.reshape(shape),
    (lambda ct, y, x, *, shape: p.reshape(ct, shape=x.shape),),
    "the same elements in row-major order",
)
transpose_p = Primitive(
    "transpose", _transpose_type, lambda x, *, perm: np.transpose(x, perm), (_transpose_vjp,), "axes permuted"
)


def broadcast(x: Value, *, shape: Shape, axes: tuple[int, ...]) -> Value:
    """`x` with its axes placed at `axes` (ascending) of `shape` and repeated along the others; no axis is stretched."""
    return bind(broadcast_p, x, shape=tuple(map(simplest, shape)), axes=tuple(axes))


def reshape(x: Value, *, shape: Shape) -> Value:
    """The same elements in row-major order under another shape."""
    return bind(reshape_p, x, shape=tuple(map(simplest, shape)))


def transpose(x: Value, *, perm: tuple[int, ...]) -> Value:
    """Axes permuted: axis i of the result is axis `perm[i]` of x."""
    return bind(transpose_p, x, perm=tuple(perm))


# ---- slice, reverse, pad, concat -------------------------------------------------------------------------------------


def _slice_type(x: TensorType, *, start: Shape, limit: Shape, stride: tuple[int, ...]) -> TensorType:
    if not len(start) == len(limit) == len(stride) == x.rank:
        raise TypeMismatch(f"start, limit and stride need one entry per axis of {x!r}")
    for s, lo, d, k in zip(start, limit, x.shape, stride, strict=True):
        if isinstance(k, int) and k < 1:
            raise TypeMismatch(f"strides of a slice are positive, found {list(stride)} (reverse first)")
        for large, small in ((s, 0), (lo, s), (d, lo)):
            try:
                inside = at_least(large, small)
            except InconclusiveDim:
                continue  # a constraint of the graph
            if not inside:
                raise TypeMismatch(f"slice {show_shape(start)} to {show_shape(limit)} leaves {x!r}")
    return TensorType(
        x.dtype,
        tuple(
            ceildiv(lo - s, k) if k != 1 else simplest(lo - s) for s, lo, k in zip(start, limit, stride, strict=True)
        ),
    )


def _slice_vjp(ct: Value, y: Value, x: Value, *, start: Shape, limit: Shape, stride: tuple[int, ...]) -> Value:
    """Zeros of the operand's shape with `ct` at the places that the slice took."""
    spans = [_pad_extent(n, k - 1) for n, k in zip(y.shape, stride, strict=True)]
    high = tuple(d - s - span for d, s, span in zip(x.shape, start, spans, strict=True))
    return p.pad(ct, low=start, high=high, interior=tuple(k - 1 for k in stride))


def _pad_extent(n: Dim, interior: Dim) -> Dim:
    """How long `n` elements are with `interior` more between each two; of none 0."""
    if isinstance(interior, int) and interior == 0:
        return n
    if isinstance(n, int) and n == 0:
        return 0
    extent = simplest(n + (n - 1) * interior)
    try:
        empty = not at_least(n, 1)
    except InconclusiveDim:
        empty = True
    return dmax(extent, 0) if empty else extent


def _pad_type(x: TensorType, *, low: Shape, high: Shape, interior: tuple[int, ...], value: float) -> TensorType:
    if not len(low) == len(high) == len(interior) == x.rank:
        raise TypeMismatch(f"low, high and interior need one entry per axis of {x!r}")
    for amount in (*low, *high, *interior):
        try:
            if not at_least(amount, 0):
                raise TypeMismatch(
                    f"pads are not negative, found low={show_shape(low)} high={show_shape(high)} (slice first)"
                )
        except InconclusiveDim:
            continue  # a constraint of the graph
    return TensorType(
        x.dtype,
        tuple(simplest(lo + _pad_extent(n, i) + h) for lo, n, h, i in zip(low, x.shape, high, interior, strict=True)),
    )


def _np_pad(
    x: np.ndarray, *, low: tuple[int, ...], high: tuple[int, ...], interior: tuple[int, ...], value: float
) -> np.ndarray:
    shape = [lo + (n + (n - 1) * i if n else 0) + h for lo, n, h, i in zip(low, x.shape, high, interior, strict=True)]
    out = np.full(shape, value, x.dtype)
    out[
        tuple(
            _Span(lo, lo + (n - 1) * (i + 1) + 1 if n else lo, i + 1)
            for lo, n, i in zip(low, x.shape, interior, strict=True)
        )
    ] = x
    return out


def _pad_vjp(
    ct: Value, y: Value, x: Value, *, low: Shape, high: Shape, interior: tuple[int, ...], value: float
) -> Value:
    """The places of the operand, sliced out."""
    limit = tuple(simplest(lo + _pad_extent(n, i)) for lo, n, i in zip(low, x.shape, interior, strict=True))
    return p.slice(ct, start=low, limit=limit, stride=tuple(i + 1 for i in interior))


def _concat_type(*xs: TensorType, axis: int) -> TensorType:
    if not xs:
        raise TypeMismatch("concat needs an operand")
    first = xs[0]
    for x in xs:
        if x.dtype is not first.dtype or x.rank != first.rank or not 0 <= axis < x.rank:
            raise TypeMismatch(f"cannot concatenate {x!r} to {first!r} along axis {axis}")
        if not all(i == axis or equal(a, b) for i, (a, b) in enumerate(zip(x.shape, first.shape, strict=True))):
            raise TypeMismatch(f"cannot concatenate {x!r} to {first!r} along axis {axis}: other axes differ")
    total = simplest(sum((x.shape[axis] for x in xs), start=0))
    return TensorType(first.dtype, (*first.shape[:axis], total, *first.shape[axis + 1 :]))


def _concat_vjp(ct: Value, y: Value, *xs: Value, at: int, axis: int) -> Value:
    """The operand's own piece of `ct`."""
    before = simplest(sum((x.shape[axis] for x in xs[:at]), start=0))
    start = tuple(before if i == axis else 0 for i in range(y.rank))
    limit = tuple(simplest(before + d) if i == axis else d for i, d in enumerate(xs[at].shape))
    return p.slice(ct, start=start, limit=limit, stride=(1,) * y.rank)


def _reverse_type(x: TensorType, *, axes: tuple[int, ...]) -> TensorType:
    if len(set(axes)) != len(axes) or not all(0 <= a < x.rank for a in axes):
        raise TypeMismatch(f"cannot reverse axes {list(axes)} of {x!r}")
    return x


def _np_reverse(x: np.ndarray, *, axes: tuple[int, ...]) -> np.ndarray:
    return np.flip(x, axes)


slice_p = Primitive(
    "slice", _slice_type,
    lambda x, *, start, limit, stride: x[tuple(_Span(s, lo, k) for s, lo, k in zip(start, limit, stride, strict=True))],
    (_slice_vjp,), "elements start, start + stride, ... below limit of each axis",
)  # fmt: skip
reverse_p = Primitive(
    "reverse",
    _reverse_type,
    _np_reverse,
    (lambda ct, y, x, *, axes: p.reverse(ct, axes=axes),),
    "axes in reverse order",
)
pad_p = Primitive("pad", _pad_type, _np_pad, (_pad_vjp,), "`value` before, after and between the elements of each axis")
concat_p = Primitive(
    "concat",
    _concat_type,
    lambda *xs, axis: np.concatenate(xs, axis),
    Each(_concat_vjp),
    "operands one after the other along an axis",
)


def slice(x: Value, *, start: Shape, limit: Shape, stride: tuple[int, ...] | None = None) -> Value:
    """Elements `start, start + stride, ...` below `limit` of each axis.

    `0 <= start <= limit <= size`, `stride >= 1`.
    """
    return bind(
        slice_p,
        x,
        start=tuple(map(simplest, start)),
        limit=tuple(map(simplest, limit)),
        stride=tuple(stride or (1,) * x.rank),
    )


def reverse(x: Value, *, axes: tuple[int, ...]) -> Value:
    """The axes in reverse order of their elements."""
    return bind(reverse_p, x, axes=tuple(sorted(axes)))


def pad(x: Value, *, low: Shape, high: Shape, interior: tuple[int, ...] | None = None, value: float = 0) -> Value:
    """`value` placed `low` times before, `high` times after, and `interior` times between the elements of each axis.

    None negative.
    """
    low, high = tuple(map(simplest, low)), tuple(map(simplest, high))
    return bind(pad_p, x, low=low, high=high, interior=tuple(interior or (0,) * x.rank), value=value)


def concat(*xs: Value, axis: int) -> Value:
    """Operands one after the other along an axis."""
    return bind(concat_p, *xs, axis=axis)


# ---- window and fold -------------------------------------------------------------------------------------------------


def window_count(extent: Dim, size: Dim, stride: int, dilation: int) -> Dim:
    """How many windows lie on an axis: `(extent - dilation * (size - 1) - 1) // stride + 1`."""
    return simplest(floordiv(simplest(extent - dilation * (size - 1) - 1), stride) + 1)


def _check_steps(strides: tuple[int, ...], dilations: tuple[int, ...]) -> None:
    if any(s < 1 for s in (*strides, *dilations)):
        raise TypeMismatch(f"strides {list(strides)} and dilations {list(dilations)} must be positive")


def _window_type(
    x: TensorType, *, axes: tuple[int, ...], sizes: Shape, strides: tuple[int, ...], dilations: tuple[int, ...]
) -> TensorType:
    if (
        not len(axes) == len(sizes) == len(strides) == len(dilations)
        or len(set(axes)) != len(axes)
        or not all(0 <= a < x.rank for a in axes)
    ):
        raise TypeMismatch(f"window axes {list(axes)} do not fit {x!r}")
    _check_steps(strides, dilations)
    shape = list(x.shape)
    for a, k, s, d in zip(axes, sizes, strides, dilations, strict=True):
        shape[a] = window_count(shape[a], k, s, d)
        if isinstance(shape[a], int) and shape[a] < 0:
            raise TypeMismatch(f"a window of {show_shape(sizes)} is larger than axis {a} of {x!r}")
    return TensorType(x.dtype, (*shape, *sizes))


def _np_window(
    x: np.ndarray,
    *,
    axes: tuple[int, ...],
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
) -> np.ndarray:
    for a, k, s, d in zip(axes, sizes, strides, dilations, strict=True):
        count = (x.shape[a] - d * (k - 1) - 1) // s + 1
        at = np.arange(count)[:, None] * s + np.arange(k) * d
        x = np.moveaxis(np.take(x, at, axis=a), a + 1, -1)
    return x


def _window_vjp(
    ct: Value,
    y: Value,
    x: Value,
    *,
    axes: tuple[int, ...],
    sizes: Shape,
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
) -> Value:
    """`fold` of `ct`: each patch added back where it was taken."""
    extents = tuple(x.shape[a] for a in axes)
    return p.fold(ct, axes=axes, strides=strides, dilations=dilations, extents=extents)


def _fold_type(
    x: TensorType, *, axes: tuple[int, ...], strides: tuple[int, ...], dilations: tuple[int, ...], extents: Shape
) -> TensorType:
    rank = x.rank - len(axes)
    if not len(axes) == len(strides) == len(dilations) == len(extents) or not all(0 <= a < rank for a in axes):
        raise TypeMismatch(f"fold axes {list(axes)} do not fit {x!r}")
    _check_steps(strides, dilations)
    shape = list(x.shape[:rank])
    for i, (a, s, d, e) in enumerate(zip(axes, strides, dilations, extents, strict=True)):
        if not maybe_equal(window_count(e, x.shape[rank + i], s, d), shape[a]):
            raise TypeMismatch(f"{x!r} does not hold the windows of an axis of {e} (stride {s}, dilation {d})")
        shape[a] = e
    return TensorType(x.dtype, tuple(shape))


def _np_fold(
    x: np.ndarray,
    *,
    axes: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    extents: tuple[int, ...],
) -> np.ndarray:
    rank = x.ndim - len(axes)
    shape = list(x.shape[:rank])
    for a, e in zip(axes, extents, strict=True):
        shape[a] = e
    out = np.zeros(shape, widened(x).dtype)
    for tap in np.ndindex(*x.shape[rank:]):
        where: list[_Span] = [_Span(None)] * rank
        for a, t, s, d in zip(axes, tap, strides, dilations, strict=True):
            where[a] = _Span(t * d, t * d + (x.shape[a] - 1) * s + 1 if x.shape[a] else t * d, s)
        out[tuple(where)] += x[(..., *tap)]
    return out.astype(x.dtype, copy=False)


def _fold_vjp(
    ct: Value,
    y: Value,
    x: Value,
    *,
    axes: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    extents: Shape,
) -> Value:
    """`window` of `ct`: the patches at the places where they were added."""
    return p.window(ct, axes=axes, sizes=x.shape[y.rank :], strides=strides, dilations=dilations)


window_p = Primitive(
    "window",
    _window_type,
    _np_window,
    (_window_vjp,),
    "sliding patches: y[.., o, .., k] = x[.., o * stride + k * dilation, ..]",
)
fold_p = Primitive("fold", _fold_type, _np_fold, (_fold_vjp,), "patches added back in place, the transpose of window")


def window(
    x: Value, *, axes: tuple[int, ...], sizes: Shape, strides: tuple[int, ...], dilations: tuple[int, ...]
) -> Value:
    """Sliding patches of `axes`: `y[.., o, .., k] = x[.., o * stride + k * dilation, ..]`.

    Each axis becomes the number of its windows; one axis of its window's size per entry follows at the end.
    """
    return bind(
        window_p,
        x,
        axes=tuple(axes),
        sizes=tuple(map(simplest, sizes)),
        strides=tuple(strides),
        dilations=tuple(dilations),
    )


def fold(
    x: Value, *, axes: tuple[int, ...], strides: tuple[int, ...], dilations: tuple[int, ...], extents: Shape
) -> Value:
    """Patches added back where `window` took them, onto axes of the sizes `extents`: the transpose of `window`."""
    return bind(
        fold_p,
        x,
        axes=tuple(axes),
        strides=tuple(strides),
        dilations=tuple(dilations),
        extents=tuple(map(simplest, extents)),
    )


# ---- results of nodes with several -----------------------------------------------------------------------------------


def _item_type(x: Type, *, index: int) -> TensorType:
    if not isinstance(x, TupleType) or not 0 <= index < len(x.items):
        raise TypeMismatch(f"{x!r} has no result {index}")
    return x.items[index]


item_p = Primitive(
    "item",
    _item_type,
    lambda x, *, index: x[index],
    (NoGrad("the calculus passes cotangents of results on by itself"),),
    "one of several results",
)


def item(x: Value, *, index: int) -> Value:
    """One result of a node with several."""
    return bind(item_p, x, index=index)


STRUCTURAL = (
    input_p, literal_p, dim_p, iota_p, broadcast_p, reshape_p, transpose_p, slice_p, reverse_p, pad_p, concat_p,
    window_p, fold_p, item_p,
)  # fmt: skip
