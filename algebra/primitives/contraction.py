"""Contraction, reductions along axes, and indexing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import primitives as p
from ..dims import Dim, equal, product, show, simplest
from ..errors import PullbackError, TypeMismatch
from ..graph import Value, bind
from ..types import TensorType, bool_, dtype_of, i64, widened
from .record import NoGrad, Primitive

Axes = tuple[int, ...]
Pair = tuple[Axes, Axes]


# ---- dot -------------------------------------------------------------------------------------------------------------


def free_axes(rank: int, contract: Axes, batch: Axes) -> Axes:
    """The axes of an operand of `dot` that are neither contracted nor batch axes, ascending."""
    return tuple(i for i in range(rank) if i not in contract and i not in batch)


def _dot_type(x: TensorType, y: TensorType, *, contract: Pair, batch: Pair) -> TensorType:
    if x.dtype is not y.dtype or x.dtype is bool_:
        raise TypeMismatch(f"cannot contract {x!r} with {y!r}: dtypes differ or are bool")
    for t, at in ((x, contract[0] + batch[0]), (y, contract[1] + batch[1])):
        if len(set(at)) != len(at):
            raise TypeMismatch(f"an axis of {t!r} stands twice in {list(at)}")
        if beyond := [a for a in at if not 0 <= a < t.rank]:
            raise TypeMismatch(f"no axis {beyond[0]} in {t!r}")
    for name, (ax, ay) in (("contract", contract), ("batch", batch)):
        if len(ax) != len(ay):
            raise TypeMismatch(f"cannot {name} axes {list(ax)} of {x!r} with axes {list(ay)} of {y!r}")
        for i, j in zip(ax, ay, strict=True):
            if not equal(x.shape[i], y.shape[j]):
                raise TypeMismatch(
                    f"cannot {name} axis {i} of {x!r} with axis {j} of {y!r}: {show(x.shape[i])} != {show(y.shape[j])}"
                )
    shape = [x.shape[i] for i in batch[0]]
    shape += [x.shape[i] for i in free_axes(x.rank, contract[0], batch[0])]
    shape += [y.shape[i] for i in free_axes(y.rank, contract[1], batch[1])]
    return TensorType(x.dtype, tuple(shape))


def _np_dot(x: np.ndarray, y: np.ndarray, *, contract: Pair, batch: Pair) -> np.ndarray:
    fx, fy = free_axes(x.ndim, contract[0], batch[0]), free_axes(y.ndim, contract[1], batch[1])
    shape = [x.shape[i] for i in batch[0]] + [x.shape[i] for i in fx] + [y.shape[i] for i in fy]
    b, k = [x.shape[i] for i in batch[0]], int(np.prod([x.shape[i] for i in contract[0]], dtype=np.int64))
    left = (
        widened(x)
        .transpose(*batch[0], *fx, *contract[0])
        .reshape(*b, int(np.prod([x.shape[i] for i in fx], dtype=np.int64)), k)
    )
    right = (
        widened(y)
        .transpose(*batch[1], *contract[1], *fy)
        .reshape(*b, k, int(np.prod([y.shape[i] for i in fy], dtype=np.int64)))
    )
    return np.matmul(left, right).reshape(shape).astype(x.dtype, copy=False)


def _arranged(value: Value, order: Axes) -> Value:
    """`value`, whose axis r is axis `order[r]` of the wanted tensor, with its axes in that tensor's order."""
    return p.transpose(value, perm=tuple(order.index(a) for a in range(len(order))))


def _dot_vjp_x(ct: Value, z: Value, x: Value, y: Value, *, contract: Pair, batch: Pair) -> Value:
    """`dot(ct, y)` over the free axes of y, in the order of x's axes."""
    (cx, cy), (bx, by) = contract, batch
    fx, fy = free_axes(x.rank, cx, bx), free_axes(y.rank, cy, by)
    ct_fy = tuple(range(len(bx) + len(fx), len(bx) + len(fx) + len(fy)))
    partial = p.dot(ct, y, contract=(ct_fy, fy), batch=(tuple(range(len(bx))), by))
    return _arranged(partial, (*bx, *fx, *(cx[cy.index(a)] for a in sorted(cy))))


def _dot_vjp_y(ct: Value, z: Value, x: Value, y: Value, *, contract: Pair, batch: Pair) -> Value:
    """`dot(x, ct)` over the free axes of x, in the order of y's axes."""
    (cx, cy), (bx, by) = contract, batch
    fx, fy = free_axes(x.rank, cx, bx), free_axes(y.rank, cy, by)
    ct_fx = tuple(range(len(bx), len(bx) + len(fx)))
    partial = p.dot(x, ct, contract=(fx, ct_fx), batch=(bx, tuple(range(len(bx)))))
    return _arranged(partial, (*by, *(cy[cx.index(a)] for a in sorted(cx)), *fy))


dot_p = Primitive(
    "dot", _dot_type, _np_dot, (_dot_vjp_x, _dot_vjp_y), "sum over contracted axes of x * y, batch axes in step"
)


def dot(x: Value, y: Value, *, contract: Pair, batch: Pair = ((), ())) -> Value:
    """The sum over the `contract` axes of products, `batch` axes running in step.

    The axes of the result: batch, then the other axes of x, then those of y, each in ascending order. For matrices,
    `dot(x, y, contract=((1,), (0,)))` is `x @ y`.
    """
    return bind(
        dot_p, x, y, contract=(tuple(contract[0]), tuple(contract[1])), batch=(tuple(batch[0]), tuple(batch[1]))
    )


# ---- reductions ------------------------------------------------------------------------------------------------------


def kept_axes(rank: int, axes: Axes) -> Axes:
    """The axes that a reduction leaves."""
    return tuple(i for i in range(rank) if i not in axes)


def _reduce_type(x: TensorType, *, axes: Axes, ties: str = "split") -> TensorType:
    if len(set(axes)) != len(axes) or not all(0 <= a < x.rank for a in axes):
        raise TypeMismatch(f"cannot reduce axes {list(axes)} of {x!r}")
    if x.dtype is bool_:
        raise TypeMismatch(f"a number is required, found {x!r} (cast first)")
    if ties not in ("split", "first"):
        raise TypeMismatch(f"ties are 'split' or 'first', found {ties!r}")
    return TensorType(x.dtype, tuple(x.shape[i] for i in kept_axes(x.rank, axes)))


def _along(value: Value, x: Value, axes: Axes) -> Value:
    """What a reduction of `x` gave, repeated along the axes that it reduced."""
    return p.broadcast(value, shape=x.shape, axes=kept_axes(x.rank, axes))


def _np_extreme(name: str) -> Callable[..., np.ndarray]:
    def meaning(x: np.ndarray, *, axes: Axes, ties: str = "split") -> np.ndarray:
        if any(x.shape[a] == 0 for a in axes):  # of nothing: the least (greatest) number of the dtype
            dtype = dtype_of(x.dtype)
            empty = dtype.lowest if name == "max" else dtype.highest
            return np.full([x.shape[i] for i in kept_axes(x.ndim, axes)], empty, x.dtype)
        return np.asarray((np.max if name == "max" else np.min)(x, axis=axes))

    return meaning


def _extreme_vjp(ct: Value, y: Value, x: Value, *, axes: Axes, ties: str) -> Value:
    """`ct` to the extreme elements: split among ties as PyTorch's `amax`, or all to the first as its `max`."""
    if ties == "first":
        return _extreme_vjp_first(ct, y, x, axes)
    chosen = p.equal(x, _along(y, x, axes))
    one = p.select(chosen, p.number(1, x), p.number(0, x))
    share = p.div(ct, p.reduce_sum(one, axes=axes))
    return p.select(chosen, _along(share, x, axes), p.number(0, x))


def _extreme_vjp_first(ct: Value, y: Value, x: Value, axes: Axes) -> Value:
    chosen = p.equal(x, _along(y, x, axes))
    kept = kept_axes(x.rank, axes)
    perm = (*kept, *axes)
    lined = p.transpose(chosen, perm=perm)
    shape, count = lined.shape, product(x.shape[a] for a in axes)
    flat = p.reshape(lined, shape=(*shape[: len(kept)], count))
    score = p.select(flat, p.full(1, x.dtype, flat.shape), p.full(0, x.dtype, flat.shape))
    first = p.argmax(score, axis=len(kept))
    at = p.equal(
        p.broadcast(p.iota(count), shape=flat.shape, axes=(len(kept),)),
        p.broadcast(first, shape=flat.shape, axes=tuple(range(len(kept)))),
    )
    passed = p.select(
        at, p.broadcast(ct, shape=flat.shape, axes=tuple(range(len(kept)))), p.full(0, ct.dtype, flat.shape)
    )
    return _arranged(p.reshape(passed, shape=shape), perm)


def _reduce_prod_vjp(ct: Value, y: Value, x: Value, *, axes: Axes) -> Value:
    """`ct` times the product of the others: each row of a square holds x with one element replaced by 1.

    Exact at zeros, at every order.
    """
    kept = kept_axes(x.rank, axes)
    perm = (*kept, *axes)
    lined = p.transpose(x, perm=perm)
    count = product(x.shape[a] for a in axes)
    flat = p.reshape(lined, shape=(*lined.shape[: len(kept)], count))
    square = (*flat.shape, count)
    n = len(kept)
    rows, columns = (p.broadcast(p.iota(count), shape=square, axes=(a,)) for a in (n, n + 1))
    rest = p.select(
        p.equal(rows, columns), p.full(1, x.dtype, square), p.broadcast(flat, shape=square, axes=(*range(n), n + 1))
    )
    others = p.reduce_prod(rest, axes=(n + 1,))
    passed = p.mul(p.broadcast(ct, shape=flat.shape, axes=tuple(range(n))), others)
    return _arranged(p.reshape(passed, shape=lined.shape), perm)


def _argmax_type(x: TensorType, *, axis: int) -> TensorType:
    return TensorType(i64, _reduce_type(x, axes=(axis,)).shape)


def _axis_type(x: TensorType, *, axis: int, reverse: bool = False, descending: bool = False) -> TensorType:
    _reduce_type(x, axes=(axis,))
    return x


def _np_argmax(x: np.ndarray, *, axis: int) -> np.ndarray:
    if x.shape[axis] == 0:  # there is no place: 0, which nothing reads
        return np.zeros((*x.shape[:axis], *x.shape[axis + 1 :]), np.int64)
    return np.argmax(widened(x), axis=axis).astype(np.int64)


def _np_cumsum(x: np.ndarray, *, axis: int, reverse: bool) -> np.ndarray:
    if reverse:
        return np.flip(np.cumsum(np.flip(widened(x), axis), axis, dtype=widened(x).dtype), axis).astype(
            x.dtype, copy=False
        )
    return np.cumsum(widened(x), axis, dtype=widened(x).dtype).astype(x.dtype, copy=False)


def _np_argsort(x: np.ndarray, *, axis: int, descending: bool) -> np.ndarray:
    if not descending:
        return np.argsort(widened(x), axis=axis, kind="stable").astype(np.int64)
    backward = np.flip(widened(x), axis)  # stable on the flipped array, so that ties keep their first place
    return np.flip(x.shape[axis] - 1 - np.argsort(backward, axis=axis, kind="stable"), axis).astype(np.int64)


reduce_sum_p = Primitive(
    "reduce_sum",
    _reduce_type,
    lambda x, *, axes: np.asarray(np.sum(widened(x), axis=axes, dtype=widened(x).dtype)).astype(x.dtype, copy=False),
    (lambda ct, y, x, *, axes: _along(ct, x, axes),),
    "the sum over axes",
)
reduce_max_p = Primitive("reduce_max", _reduce_type, _np_extreme("max"), (_extreme_vjp,), "the largest over axes")
reduce_min_p = Primitive("reduce_min", _reduce_type, _np_extreme("min"), (_extreme_vjp,), "the smallest over axes")
reduce_prod_p = Primitive(
    "reduce_prod",
    _reduce_type,
    lambda x, *, axes: np.asarray(np.prod(widened(x), axis=axes, dtype=widened(x).dtype)).astype(x.dtype, copy=False),
    (_reduce_prod_vjp,),
    "the product over axes",
)
argmax_p = Primitive(
    "argmax", _argmax_type, _np_argmax, (NoGrad("an index"),),
    "the first place of the largest along an axis",
)  # fmt: skip
cumsum_p = Primitive(
    "cumsum",
    _axis_type,
    _np_cumsum,
    (lambda ct, y, x, *, axis, reverse: p.cumsum(ct, axis=axis, reverse=not reverse),),
    "running sums along an axis, from its end where reverse",
)
argsort_p = Primitive(
    "argsort",
    lambda x, *, axis, descending: TensorType(i64, _axis_type(x, axis=axis).shape),
    _np_argsort,
    (NoGrad("indices"),),
    "the order that sorts an axis, ties by place",
)


def reduce_sum(x: Value, *, axes: Axes) -> Value:
    """The sum over `axes`, which the result lacks; of no axes x itself."""
    return bind(reduce_sum_p, x, axes=tuple(sorted(axes)))


def reduce_max(x: Value, *, axes: Axes, ties: str = "split") -> Value:
    """The largest over `axes`.

    The cotangent is split evenly among ties, or goes to the first in row-major order (`ties="first"`).
    """
    return bind(reduce_max_p, x, axes=tuple(sorted(axes)), ties=ties)


def reduce_min(x: Value, *, axes: Axes, ties: str = "split") -> Value:
    """The smallest over `axes`, ties as in `reduce_max`."""
    return bind(reduce_min_p, x, axes=tuple(sorted(axes)), ties=ties)


def reduce_prod(x: Value, *, axes: Axes) -> Value:
    """The product over `axes`; its VJP takes the square of the number of factors."""
    return bind(reduce_prod_p, x, axes=tuple(sorted(axes)))


def argmax(x: Value, *, axis: int) -> Value:
    """The first place (int64) of the largest element along an axis."""
    return bind(argmax_p, x, axis=axis)


def cumsum(x: Value, *, axis: int, reverse: bool = False) -> Value:
    """Running sums along an axis, from its end where `reverse`."""
    return bind(cumsum_p, x, axis=axis, reverse=reverse)


def argsort(x: Value, *, axis: int, descending: bool = False) -> Value:
    """The indices (int64) that sort an axis; equal elements keep their order."""
    return bind(argsort_p, x, axis=axis, descending=descending)


# ---- gather and scatter_add ------------------------------------------------------------------------------------------


def _gather_type(x: TensorType, i: TensorType, *, axis: int) -> TensorType:
    if not 0 <= axis < x.rank or i.dtype is not i64:
        raise TypeMismatch(f"cannot gather axis {axis} of {x!r} at {i!r} (int64 indices)")
    return TensorType(x.dtype, (*x.shape[:axis], *i.shape, *x.shape[axis + 1 :]))


def _scatter_type(u: TensorType, i: TensorType, *, axis: int, size: Dim) -> TensorType:
    if i.dtype is not i64 or not 0 <= axis <= u.rank - i.rank or u.dtype is bool_:
        raise TypeMismatch(f"cannot add {u!r} along axis {axis} at {i!r} (int64 indices)")
    for a, d in enumerate(i.shape):
        if not equal(u.shape[axis + a], d):
            raise TypeMismatch(f"updates {u!r} do not hold the indices {i!r} at axis {axis}")
    return TensorType(u.dtype, (*u.shape[:axis], size, *u.shape[axis + i.rank :]))


def _np_scatter_add(u: np.ndarray, i: np.ndarray, *, axis: int, size: int) -> np.ndarray:
    moved = np.moveaxis(widened(u), range(axis, axis + i.ndim), range(i.ndim))
    out = np.zeros((size, *moved.shape[i.ndim :]), moved.dtype)
    np.add.at(out, i, moved)
    return np.moveaxis(out, 0, axis).astype(u.dtype, copy=False)


INDEX = NoGrad("an index")

gather_p = Primitive(
    "gather",
    _gather_type,
    lambda x, i, *, axis: np.take(x, i, axis=axis),
    (lambda ct, y, x, i, *, axis: p.scatter_add(ct, i, axis=axis, size=x.shape[axis]), INDEX),
    "x taken at indices along an axis",
)
scatter_add_p = Primitive(
    "scatter_add",
    _scatter_type,
    _np_scatter_add,
    (lambda ct, y, u, i, *, axis, size: p.gather(ct, i, axis=axis), INDEX),
    "zeros with updates added at indices along an axis, the transpose of gather",
)


def _nonzero_type(x: TensorType, *, size: Dim) -> TensorType:
    if x.dtype is not bool_ or x.rank != 1:
        raise TypeMismatch(f"places are found in a vector of bools, not in {x!r}")
    return TensorType(i64, (size,))


def _np_nonzero(x: np.ndarray, *, size: int) -> np.ndarray:
    places = np.flatnonzero(x).astype(np.int64)
    if places.size != size:
        raise PullbackError(f"{places.size} places hold, where {size} were said to")
    return places


nonzero_p = Primitive("nonzero", _nonzero_type, _np_nonzero, (NoGrad("places"),), "the places where x holds, ascending")


def nonzero(x: Value, *, size: Dim) -> Value:
    """The places (int64) where a vector of bools holds, ascending. How many depends on data.

    `size` is the symbol that stands for it.
    """
    return bind(nonzero_p, x, size=simplest(size))


def gather(x: Value, i: Value, *, axis: int = 0) -> Value:
    """`x` taken at the int64 indices `i` along `axis`: `y[.., i.., ..] = x[.., i[..], ..]`. An index lies in `-size ..

    Size - 1`.
    """
    return bind(gather_p, x, i, axis=axis)


def scatter_add(u: Value, i: Value, *, axis: int = 0, size: Dim) -> Value:
    """Zeros of `size` along `axis`, with the updates `u` added at the indices `i`: the transpose of `gather`.

    Repeated indices add up.
    """
    return bind(scatter_add_p, u, i, axis=axis, size=simplest(size))


CONTRACTION = (
    dot_p,
    reduce_sum_p,
    reduce_max_p,
    reduce_min_p,
    reduce_prod_p,
    argmax_p,
    cumsum_p,
    argsort_p,
    gather_p,
    scatter_add_p,
    nonzero_p,
)
