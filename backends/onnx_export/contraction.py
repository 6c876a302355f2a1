"""Emission of contraction, reductions and indexing.

A `dot` becomes one MatMul. Its axes are named where they lie: of the ways to arrange both operands as stacks of matrices, the one that moves
the fewest elements is taken, and the result is left in the order in which it comes out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...algebra import primitives as p
from ...algebra.dims import Dim, is_static, product, simplest
from ...algebra.graph import Value
from ...algebra.types import bool_, i64
from .emission import Emission
from .ops import Ops
from .program import Tensor
from .view import View

__all__ = ["CONTRACTION"]

Label = tuple[str, int]
GUESS = 64  # elements that a symbolic dim is taken for, where layouts are compared


@dataclass(frozen=True, slots=True)
class Side:
    """An operand of a dot: a tensor whose axes are labeled."""

    tensor: Tensor
    labels: tuple[Label, ...]

    def size(self, label: Label) -> Dim:
        return self.tensor.shape[self.labels.index(label)]

    def arranged(self, ops: Ops, order: Sequence[Label]) -> Tensor:
        return ops.transpose(self.tensor, [self.labels.index(k) for k in order])

    def summed(self, ops: Ops, label: Label) -> Side:
        at = self.labels.index(label)
        return Side(ops.reduce("ReduceSum", self.tensor, [at]), self.labels[:at] + self.labels[at + 1 :])


def guess(shape: Sequence[Dim]) -> float:
    """About how many elements."""
    return float(np.prod([d if isinstance(d, int) else GUESS for d in shape], dtype=np.float64))


def _dot(e: Emission, v: Value) -> View:
    x, y = (e.view(o) for o in v.operands)
    (cx, cy), (bx, by) = v.params["contract"], v.params["batch"]
    rank_x, rank_y = len(x.shape), len(y.shape)
    of_x: dict[int, Label] = {a: ("c", k) for k, a in enumerate(cx)} | {a: ("b", k) for k, a in enumerate(bx)}
    of_y: dict[int, Label] = {a: ("c", k) for k, a in enumerate(cy)} | {a: ("b", k) for k, a in enumerate(by)}
    free_x, free_y = p.free_axes(rank_x, cx, bx), p.free_axes(rank_y, cy, by)
    of_x |= {a: ("x", a) for a in free_x}
    of_y |= {a: ("y", a) for a in free_y}
    result: list[Label] = [("b", k) for k in range(len(bx))] + [("x", a) for a in free_x] + [("y", a) for a in free_y]
    left = Side(x.tensor, tuple(of_x[a] for a in x.order))
    right = Side(y.tensor, tuple(of_y[a] for a in y.order))
    repeats: list[Dim] = []
    for k, a in enumerate(
        cx
    ):  # a contracted axis along which an operand only repeats is a sum of the other, or a factor
        label: Label = ("c", k)
        if label in left.labels and label not in right.labels:
            left = left.summed(e.ops, label)
        elif label in right.labels and label not in left.labels:
            right = right.summed(e.ops, label)
        elif label not in left.labels:
            repeats.append(x.shape[a])
    tensor, labels = contract(e.ops, left, right, wanted_order(e, v, result))
    tensor = e.ops.scaled(tensor, product(repeats))
    return View.of(tensor, [result.index(k) for k in labels], v.shape)


def wanted_order(e: Emission, v: Value, result: Sequence[Label]) -> tuple[tuple[Label, ...], bool]:
    """The order in which the result is needed, and whether only that order will do: that of the value, or of its one transpose."""
    users = e.users.get(id(v), ())
    if id(v) not in e.pinned and users and all(u.primitive.name == "transpose" for u in users):
        perms = {u.params["perm"] for u in users}
        if len(perms) == 1:
            return tuple(result[i] for i in next(iter(perms))), id(users[0]) in e.pinned
    return tuple(result), id(v) in e.pinned


@dataclass(frozen=True, slots=True)
class Plan:
    """A way to contract: which side comes first, the order of its groups of axes, and what that costs in moved elements.

    `outer` are the axes before the matrices: of the batch, and free ones of the second side over which the first is repeated. A contracted axis among
    them is summed after the multiplication (`summed`).
    """

    cost: float
    swapped: bool
    outer: tuple[Label, ...]
    rows: tuple[Label, ...]
    inner: tuple[Label, ...]
    columns: tuple[Label, ...]

    @property
    def result(self) -> tuple[Label, ...]:
        return (*self.outer, *self.rows, *self.columns)

    @property
    def summed(self) -> tuple[int, ...]:
        return tuple(i for i, k in enumerate(self.outer) if k[0] == "c")

    @property
    def left(self) -> tuple[Label, ...]:
        """The labels of the result, once the sums are taken."""
        return tuple(k for i, k in enumerate(self.result) if i not in self.summed)


def contract(
    ops: Ops, left: Side, right: Side, wanted: tuple[tuple[Label, ...], bool]
) -> tuple[Tensor, tuple[Label, ...]]:
    """The tensor of the contraction, and the labels of its axes in order."""
    shared = [k for k in left.labels if k in right.labels]
    inner = [k for k in shared if k[0] == "c"]
    batch = [k for k in shared if k[0] != "c"]
    free = [[k for k in side.labels if k not in shared] for side in (left, right)]
    real = {*left.labels, *right.labels} - set(inner)
    order = tuple(k for k in wanted[0] if k in real)
    if not inner:
        order = order if wanted[1] else _interleaved(left, right, order)
        return _multiplied(ops, left, right, order), order
    if not free[0] and not free[1]:
        return _inner_product(ops, left, right, batch, inner)
    if not batch and (not free[0] or not free[1]) and len(inner) == 1:
        return _with_vector(ops, left, right, inner[0])
    plan = min(plans(left, right, order, wanted[1]), key=lambda plan: plan.cost)
    return _multiply(ops, left, right, plan), plan.left


def _interleaved(left: Side, right: Side, order: tuple[Label, ...]) -> tuple[Label, ...]:
    """An order for an elementwise product that keeps the larger side as it lies, the other's own axes after the last that both have."""
    large, small = (left, right) if guess(left.tensor.shape) >= guess(right.tensor.shape) else (right, left)
    shared = [i for i, k in enumerate(large.labels) if k in small.labels]
    if not shared:
        return order
    cut = shared[-1] + 1
    own = tuple(k for k in small.labels if k not in large.labels)
    return (*large.labels[:cut], *own, *large.labels[cut:])


def _multiplied(ops: Ops, left: Side, right: Side, order: Sequence[Label]) -> Tensor:
    """Nothing is contracted: an elementwise product."""
    placed = []
    for side in (left, right):
        present = [k for k in order if k in side.labels]
        tensor = side.arranged(ops, present)
        first = order.index(present[0]) if present else len(order)
        placed.append(ops.unsqueeze(tensor, [i for i, k in enumerate(order[first:]) if k not in side.labels]))
    return ops.binary("Mul", placed[0], placed[1])


def _inner_product(
    ops: Ops, left: Side, right: Side, batch: list[Label], inner: list[Label]
) -> tuple[Tensor, tuple[Label, ...]]:
    """No free axes: a product of vectors, or products summed where there is a batch."""
    x, y = left.tensor, right.arranged(ops, left.labels)
    if not batch:
        flat = (product(x.shape),)
        return ops.matmul(ops.reshape(x, flat), ops.reshape(y, flat)), ()
    axes = [i for i, k in enumerate(left.labels) if k in inner]
    labels = tuple(k for k in left.labels if k not in inner)
    return ops.reduce("ReduceSum", ops.binary("Mul", x, y), axes), labels


def _with_vector(ops: Ops, left: Side, right: Side, inner: Label) -> tuple[Tensor, tuple[Label, ...]]:
    """A vector times a stack of matrices, which MatMul takes as it is."""
    vector, other = (left, right) if len(left.labels) == 1 else (right, left)
    free = tuple(k for k in other.labels if k != inner)
    at = other.labels.index(inner)
    if len(free) >= 1 and at == len(free) - 1:
        return ops.matmul(vector.tensor, other.tensor), free
    return ops.matmul(other.arranged(ops, (*free, inner)), vector.tensor), free


def plans(left: Side, right: Side, wanted: Sequence[Label], only: bool) -> list[Plan]:
    """Every arrangement worth looking at, with its cost."""
    shared = [k for k in left.labels if k in right.labels]
    found = []
    for swapped in (False, True):
        a, b = (right, left) if swapped else (left, right)
        rows = tuple(k for k in a.labels if k not in shared)
        columns = tuple(k for k in b.labels if k not in shared)
        for of, apart in itertools.product((a, b), _apart(a, b, shared)):
            inner = tuple(k for k in of.labels if k in shared and k[0] == "c" and k not in apart)
            stacked = [k for k in shared if k not in inner]
            for outer in _outers(a, b, inner, stacked):
                rest = tuple(k for k in columns if k not in outer)
                found.append(_priced(Plan(0, swapped, outer, rows, inner, rest), a, b, wanted, only))
    return found


def _outers(a: Side, b: Side, inner: Sequence[Label], stacked: Sequence[Label]) -> set[tuple[Label, ...]]:
    """Orders of the axes before the matrices: the batch as either side has it, or all that the second side has before its matrices."""
    orders = {tuple(k for k in side.labels if k in stacked) for side in (a, b)}
    first = min(b.labels.index(k) for k in inner)
    ahead = b.labels[:first]
    late = tuple(k for k in stacked if k not in ahead)
    return orders | {(*ahead, *late)}


def _apart(a: Side, b: Side, shared: Sequence[Label]) -> list[tuple[Label, ...]]:
    """Which contracted axes to sum after the multiplication: none, or one that comes first of them in both operands (a batch)."""
    firsts = [[k for k in side.labels if k in shared and k[0] == "c"] for side in (a, b)]
    if len(firsts[0]) > 1 and firsts[0][0] == firsts[1][0]:
        return [(), (firsts[0][0],)]
    return [()]


def _priced(plan: Plan, a: Side, b: Side, wanted: Sequence[Label], only: bool) -> Plan:
    cost = 0.0
    outer = tuple(k for k in plan.outer if k in a.labels)
    for side, order, turned in (
        (a, (*outer, *plan.rows, *plan.inner), (*outer, *plan.inner, *plan.rows)),
        (b, (*plan.outer, *plan.inner, *plan.columns), (*plan.outer, *plan.columns, *plan.inner)),
    ):
        if side.labels != order:  # onnxruntime multiplies a matrix as it lies, turned or not
            cost += guess(side.tensor.shape) * (0.3 if side.labels == turned else 1) + 8
    cost += 4 * (len(plan.inner) > 1) + 2 * (len(plan.columns) != 1) + (len(plan.rows) != 1 and bool(plan.outer))
    cost += 2 * (len(outer) < len(plan.outer))
    rows, columns = (guess([side.size(k) for k in group]) for side, group in ((a, plan.rows), (b, plan.columns)))
    work = guess([(a if k in a.labels else b).size(k) for k in (*plan.result, *plan.inner)])
    cost += work / max(min(rows, columns, 32), 1)  # a product with a thin matrix is as slow as memory
    shape = [a.size(k) if k in a.labels else b.size(k) for k in plan.result]
    if plan.summed:
        cost += guess(shape) * 2 + 8
    if plan.left != tuple(wanted):
        kept = [d for i, d in enumerate(shape) if i not in plan.summed]
        cost += guess(kept) * (1 if only else 0.6) + 8
    return Plan(cost + 0.5 * plan.swapped, plan.swapped, plan.outer, plan.rows, plan.inner, plan.columns)


def _multiply(ops: Ops, left: Side, right: Side, plan: Plan) -> Tensor:
    a, b = (right, left) if plan.swapped else (left, right)
    shape = [a.size(k) if k in a.labels else b.size(k) for k in plan.result]
    loose = not plan.outer  # the axes of the rows may stay apart
    own = [k for k in plan.outer if k in a.labels]
    x = _matrices(ops, a, own, list(plan.rows), list(plan.inner), keep=loose and bool(plan.rows))
    y = _matrices(ops, b, plan.outer, list(plan.inner), list(plan.columns), keep=False)
    if own:
        first = plan.outer.index(own[0])
        x = ops.unsqueeze(x, [i for i, k in enumerate(plan.outer[first:]) if k not in own])
    stacked = ops.matmul(x, y)
    if plan.summed:  # the batch axes are still apart
        stacked = ops.reduce("ReduceSum", stacked, plan.summed)
        shape = [d for i, d in enumerate(shape) if i not in plan.summed]
    return ops.reshape(stacked, shape)


def _matrices(
    ops: Ops, side: Side, lead: Sequence[Label], rows: list[Label], columns: list[Label], keep: bool
) -> Tensor:
    """A stack of matrices: groups of axes merged, turned after they are merged where that is all it takes."""
    count = [simplest(product([side.size(k) for k in group])) for group in (rows, columns)]
    if side.labels == (*lead, *columns, *rows) and side.labels != (*lead, *rows, *columns) and rows and columns:
        sizes = [side.size(k) for k in lead]
        merged = ops.reshape(side.tensor, (*sizes, count[1], count[0]))
        n = len(lead)
        turned = ops.transpose(merged, (*range(n), n + 1, n))
        return ops.reshape(turned, (*sizes, *(side.size(k) for k in rows), count[1])) if keep else turned
    arranged = side.arranged(ops, (*lead, *rows, *columns))
    ahead_dims = [side.size(k) for k in (*lead, *rows)] if keep else [*(side.size(k) for k in lead), count[0]]
    return ops.reshape(arranged, (*ahead_dims, count[1]))


# ---- reductions ------------------------------------------------------------------------------------------------------------------------


def _reduce(op: str) -> Callable[[Emission, Value], View]:
    """Over axes that repeat, a sum is a factor, and an extreme the value itself."""

    def emit(e: Emission, v: Value) -> View:
        axes, x = v.params["axes"], e.view(v.operands[0])
        repeated = [a for a in axes if x.places[a] is None]
        if repeated and (op == "ReduceProd" or any(d == 0 for d in x.shape if isinstance(d, int))):
            x, repeated = e.expanded(x, repeated), []
        kept = [a for a in x.order if a not in axes]
        tensor = e.ops.reduce(op, x.tensor, sorted(x.places[a] for a in axes if x.places[a] is not None))
        if op == "ReduceSum" and repeated:
            tensor = e.ops.scaled(tensor, product([x.shape[a] for a in repeated]))
        left = p.kept_axes(len(x.shape), axes)
        return View.of(tensor, [left.index(a) for a in kept], v.shape)

    return emit


def _argmax(e: Emission, v: Value) -> View:
    axis = v.params["axis"]
    x = e.expanded(e.view(v.operands[0]), [axis])
    kept = [a for a in x.order if a != axis]
    place = x.places[axis]
    tensor, via = x.tensor, e.ops.target.detour("ArgMax", x.tensor.dtype)
    if via is not None:
        tensor = e.ops.cast(tensor, via)
    shape = tuple(x.shape[a] for a in kept)
    found = e.ops.program.op("ArgMax", (tensor,), i64, shape, axis=place, keepdims=0)
    return View.of(found, [a - (a > axis) for a in kept], v.shape)


def _cumsum(e: Emission, v: Value) -> View:
    axis = v.params["axis"]
    x = e.expanded(e.view(v.operands[0]), [axis])
    place = e.ops.constant(np.asarray(x.places[axis], np.int64))
    attributes = {"reverse": 1} if v.params["reverse"] else {}
    via = e.ops.target.detour("CumSum", v.dtype)
    tensor = x.tensor if via is None else e.ops.cast(x.tensor, via)
    summed = e.ops.program.op("CumSum", (tensor, place), tensor.dtype, tensor.shape, **attributes)
    return View(e.ops.cast(summed, v.dtype), x.places, v.shape)


def _argsort(e: Emission, v: Value) -> View:
    axis = v.params["axis"]
    x = e.expanded(e.view(v.operands[0]), [axis])
    via = e.ops.target.detour("TopK", x.tensor.dtype)
    tensor = x.tensor if via is None else e.ops.cast(x.tensor, via)
    shape = tensor.shape
    inputs = (tensor, e.ops.dims.vector(v.shape[axis]))
    largest = int(v.params["descending"])
    results = ((tensor.dtype, shape), (i64, shape))
    _, order = e.ops.program.many("TopK", inputs, results, axis=x.places[axis], largest=largest, sorted=1)
    return View(order, x.places, v.shape)


# ---- indexing --------------------------------------------------------------------------------------------------------------------------


def _gather(e: Emission, v: Value) -> View:
    axis = v.params["axis"]
    x, at = e.view(v.operands[0]), e.view(v.operands[1])
    new = len(at.shape)

    def moved(a: int) -> int:
        return a if a < axis else a + new - 1

    if x.places[axis] is None:  # the same everywhere along the axis
        return View.of(x.tensor, [moved(a) for a in x.order], v.shape)
    order: list[int] = []
    for a in x.order:
        order += [axis + b for b in at.order] if a == axis else [moved(a)]
    indices = at.tensor
    place = x.places[axis]
    assert place is not None
    return View.of(e.ops.gather(x.tensor, indices, place), order, v.shape)


def _scatter_add(e: Emission, v: Value) -> View:
    axis, size = v.params["axis"], v.params["size"]
    u, at = e.view(v.operands[0]), e.view(v.operands[1])
    n = len(at.shape)
    line = range(axis, axis + n)
    rest = [a for a in u.order if a not in line]
    indices = e.real(at)
    updates = e.full(u, [*line, *rest])
    if not n:  # one index; compilers want a list of them
        indices, updates = e.ops.unsqueeze(indices, [0]), e.ops.unsqueeze(updates, [0])
    shape = (size, *(u.shape[a] for a in rest))
    target = e.ops.target
    if target.scatter == "scatter_nd" and e.ops.opset >= 16 and (is_static(shape) or not target.shares_zeros):
        tensor = _scatter_nd(e.ops, updates, indices, shape)
    else:
        tensor = _scatter_by_one_hot(e.ops, updates, indices, shape)
    return View.of(tensor, [axis, *(a if a < axis else a - n + 1 for a in rest)], v.shape)


def _scatter_nd(ops: Ops, updates: Tensor, indices: Tensor, shape: Sequence[Dim]) -> Tensor:
    via = ops.target.detour("ScatterND", updates.dtype)
    if via is not None:
        return ops.cast(_scatter_nd(ops, ops.cast(updates, via), indices, shape), updates.dtype)
    zeros = ops.expand(ops.number(0, updates.dtype), tuple(shape))
    places = ops.unsqueeze(indices, [indices.rank])
    return ops.program.op("ScatterND", (zeros, places, updates), updates.dtype, tuple(shape), reduction="add")


def _scatter_by_one_hot(ops: Ops, updates: Tensor, indices: Tensor, shape: Sequence[Dim]) -> Tensor:
    """The transposed one-hot matrix of the indices times the updates."""
    size, rest, n = shape[0], tuple(shape[1:]), indices.rank
    count = product(indices.shape)
    matrix = _one_hot(ops, ops.reshape(indices, (count,)), size, updates)
    rows = ops.reshape(updates, (count, product(updates.shape[n:])))
    return ops.reshape(ops.matmul(matrix, rows), (size, *rest))


def _one_hot(ops: Ops, indices: Tensor, size: Dim, like: Tensor) -> Tensor:
    """`[size, indices]` with 1 where an index is the row; a negative index counts from the end."""
    negative = ops.binary("Less", indices, ops.number(0, i64), bool_)
    at = ops.where(negative, ops.binary("Add", indices, ops.size(size, i64)), indices)
    hot = ops.binary("Equal", ops.unsqueeze(ops.iota(size), [1]), at, bool_)
    return ops.where(hot, ops.number(1, like.dtype), ops.number(0, like.dtype))


def one_hot_sum(ops: Ops, x: Tensor, places: Tensor, size: Dim) -> Tensor:
    """The last axis of `x` added up at places of a new last axis of `size`."""
    return ops.matmul(x, ops.transpose(_one_hot(ops, places, size, x), (1, 0)))


CONTRACTION: dict[str, Callable[[Emission, Value], View]] = {
    "dot": _dot,
    "reduce_sum": _reduce("ReduceSum"),
    "reduce_max": _reduce("ReduceMax"),
    "reduce_min": _reduce("ReduceMin"),
    "reduce_prod": _reduce("ReduceProd"),
    "argmax": _argmax,
    "cumsum": _cumsum,
    "argsort": _argsort,
    "gather": _gather,
    "scatter_add": _scatter_add,
}
