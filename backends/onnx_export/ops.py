"""Single ONNX operators with the shapes of their results: what the emission of a primitive is written in.

Each function leaves out what does nothing (a transpose by the identity, a reshape to the same shape) and takes the form that the target wants.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...algebra.dims import Dim, Shape, at_least, ceildiv, equal, is_static, is_zero, simplest
from ...algebra.errors import InconclusiveDim
from ...algebra.types import DType, bool_, f32, i64
from .program import Program, Tensor
from .runtime_dims import RuntimeDims
from .targets import Target

__all__ = ["Ops", "same", "same_dims"]

INT64_MAX, INT64_MIN = np.iinfo(np.int64).max, np.iinfo(np.int64).min


def same(a: Dim, b: Dim) -> bool:
    """Whether two dims are known to be equal."""
    if a is b or a == b:
        return True
    try:
        return equal(a, b)
    except InconclusiveDim:
        return False


def same_dims(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(a) == len(b) and all(map(same, a, b))


def known_at_least(a: Dim, b: Dim) -> bool:
    """Whether `a >= b` for every size."""
    try:
        return at_least(a, b)
    except InconclusiveDim:
        return False


def ints(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, np.int64)


class Ops:
    """Operators appended to a program, for one target and opset."""

    def __init__(self, program: Program, dims: RuntimeDims, target: Target, opset: int) -> None:
        self.program = program
        self.dims = dims
        self.target = target
        self.opset = opset

    # ---- constants ----

    def constant(self, value: np.ndarray) -> Tensor:
        return self.program.constant(value)

    def number(self, value: float, dtype: DType) -> Tensor:
        """A rank-0 constant."""
        return self.program.constant(np.asarray(value).astype(dtype.numpy))

    def axes(self, axes: Sequence[int]) -> Tensor:
        return self.program.constant(ints(axes))

    def size(self, count: Dim, dtype: DType) -> Tensor:
        """A number of elements as a rank-0 tensor."""
        if isinstance(count, int):
            return self.number(count, dtype)
        scalar = self.dims.scalar(count)
        if dtype.floating and dtype.bits < 32:  # a 16-bit float cannot hold every size on the way
            return self.cast(self.cast(scalar, f32), dtype)
        return self.cast(scalar, dtype)

    # ---- elementwise ----

    def apply(self, type: str, inputs: Sequence[Tensor], dtype: DType, shape: Shape, **attributes: object) -> Tensor:
        """An operator in the dtype that the target has a kernel for: operands are cast there and the result back."""
        numeric = next((t.dtype for t in inputs if t.dtype is not bool_), bool_)
        via = self.target.detour(type, numeric)
        if via is None:
            return self.program.op(type, inputs, dtype, shape, **attributes)
        moved = [self.cast(t, via) if t.dtype is numeric else t for t in inputs]
        result = self.program.op(type, moved, via if dtype is numeric else dtype, shape, **attributes)
        return self.cast(result, dtype)

    def unary(self, type: str, x: Tensor, dtype: DType | None = None, **attributes: object) -> Tensor:
        return self.apply(type, (x,), dtype or x.dtype, x.shape, **attributes)

    def binary(self, type: str, x: Tensor, y: Tensor, dtype: DType | None = None, **attributes: object) -> Tensor:
        """An elementwise operator with ONNX's implicit broadcasting."""
        return self.apply(type, (x, y), dtype or x.dtype, broadcast_shape(x.shape, y.shape), **attributes)

    def broadcast(self, x: Tensor, y: Tensor) -> Shape:
        return broadcast_shape(x.shape, y.shape)

    def where(self, c: Tensor, x: Tensor, y: Tensor) -> Tensor:
        shape = broadcast_shape(c.shape, broadcast_shape(x.shape, y.shape))
        return self.apply("Where", (c, x, y), x.dtype, shape)

    def cast(self, x: Tensor, dtype: DType) -> Tensor:
        """`Cast`, or `Where(x, 1, 0)` of a bool where the target wants it; a constant is cast here and now."""
        if x.dtype is dtype:
            return x
        if x.dtype is bool_ and self.target.bool_by_where:
            return self.where(x, self.number(1, dtype), self.number(0, dtype))
        if dtype.name.startswith(
            "f8"
        ):  # the algebra's cast does not saturate: what is too large is infinite, or not a number
            return self.program.op("Cast", (x,), dtype, x.shape, to=dtype, saturate=0)
        return self.program.op("Cast", (x,), dtype, x.shape, to=dtype)

    # ---- layout ----

    def transpose(self, x: Tensor, perm: Sequence[int]) -> Tensor:
        perm = tuple(perm)
        if perm == tuple(range(x.rank)):
            return x
        if x.op is not None and x.op.type == "Transpose":
            before = x.op.inputs[0]
            assert before is not None
            return self.transpose(before, [x.op.attributes["perm"][i] for i in perm])
        return self.program.op("Transpose", (x,), x.dtype, tuple(x.shape[i] for i in perm), perm=perm)

    def reshape(self, x: Tensor, shape: Sequence[Dim]) -> Tensor:
        """`Reshape` in the form with the least arithmetic: none, Squeeze or Unsqueeze, a constant shape with one -1, a shape made at run time."""
        shape = tuple(map(simplest, shape))
        if same_dims(x.shape, shape):
            return x
        if any(is_zero(d) for d in shape):  # no elements: Reshape reads 0 as a size to copy
            return self.expand(self.number(0, x.dtype), shape)
        if x.op is not None and x.op.type in ("Reshape", "Unsqueeze", "Squeeze"):
            before = x.op.inputs[0]
            assert before is not None
            return self.reshape(before, shape)
        if (axes := _inserted(x.shape, shape)) is not None:
            return self.program.op("Unsqueeze", (x, self.axes(axes)), x.dtype, shape)
        if (axes := _inserted(shape, x.shape)) is not None:
            return self.program.op("Squeeze", (x, self.axes(axes)), x.dtype, shape)
        if self._asked(x.shape, shape) is None and (moved := _ones_moved(x.shape, shape)) is not None:
            core, gone, come = moved
            bare = self.program.op("Squeeze", (x, self.axes(gone)), x.dtype, core)
            return self.program.op("Unsqueeze", (bare, self.axes(come)), x.dtype, shape)
        if self.target.merges_apart and (between := _merged_but_for_symbols(x.shape, shape)) is not None:
            x = self.program.op("Reshape", (x, self._target_shape(x.shape, between)), x.dtype, between)
        return self.program.op("Reshape", (x, self._target_shape(x.shape, shape)), x.dtype, shape)

    def _target_shape(self, before: Shape, shape: Shape) -> Tensor:
        asked = self._asked(before, shape)
        return self.dims.shape(shape) if asked is None else self.constant(ints(asked))

    def _asked(self, before: Shape, shape: Shape) -> Sequence[Dim] | None:
        """What a Reshape is asked for where that is constant: sizes, 0 and one -1; None where sizes are needed at run time."""
        if is_static(shape):
            return shape
        if 0 not in shape:
            unknown = [i for i, d in enumerate(shape) if not isinstance(d, int)]
            moved = [i for i in unknown if not (i < len(before) and same(before[i], shape[i]))]
            free = unknown if len(unknown) == 1 else moved
            if len(free) <= 1:  # 0 takes the size that the operand has there, -1 what is left
                return [-1 if i in free else d if isinstance(d, int) else 0 for i, d in enumerate(shape)]
        return None

    def unsqueeze(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        if not axes:
            return x
        rank = x.rank + len(axes)
        rest = iter(x.shape)
        shape = tuple(1 if i in axes else next(rest) for i in range(rank))
        if x.op is not None and x.op.type in ("Reshape", "Squeeze", "Unsqueeze"):
            return self.reshape(x, shape)
        return self.program.op("Unsqueeze", (x, self.axes(axes)), x.dtype, shape)

    def squeeze(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        return self.reshape(x, tuple(d for i, d in enumerate(x.shape) if i not in axes))

    def expand(self, x: Tensor, shape: Shape) -> Tensor:
        """`Expand` to a shape that the operand broadcasts to."""
        lead = len(shape) - x.rank
        if all(isinstance(d, int) and d == 1 for d in shape[:lead]) and same_dims(x.shape, shape[lead:]):
            return self.unsqueeze(x, range(lead))
        return self.apply_expand(x, shape)

    def apply_expand(self, x: Tensor, shape: Shape) -> Tensor:
        via = self.target.detour("Expand", x.dtype)
        if via is not None:
            return self.cast(self.apply_expand(self.cast(x, via), shape), x.dtype)
        return self.program.op("Expand", (x, self.dims.shape(shape)), x.dtype, shape)

    # ---- pieces ----

    def slice(
        self, x: Tensor, axes: Sequence[int], starts: Sequence[Dim], limits: Sequence[Dim], strides: Sequence[int]
    ) -> Tensor:
        """Elements `start, start + stride, ...` below `limit` of some axes."""
        shape = list(x.shape)
        kept: list[tuple[int, Dim, Dim, int]] = []
        for axis, start, limit, stride in zip(axes, starts, limits, strides, strict=True):
            d = x.shape[axis]
            start, limit = simplest(start), simplest(limit)
            span = simplest(limit - start)
            shape[axis] = span if stride == 1 else simplest(ceildiv(span, stride))
            if same(start, 0) and same(limit, d) and stride == 1:
                continue
            kept.append((axis, _from_end(start, d), INT64_MAX if same(limit, d) else _from_end(limit, d), stride))
        if not kept:
            return x
        where = [self.dims.shape([k[i] for k in kept]) for i in (1, 2)]
        inputs = [x, *where, self.axes([k[0] for k in kept])]
        if any(k[3] != 1 for k in kept):
            inputs.append(self.axes([k[3] for k in kept]))
        return self.program.op("Slice", inputs, x.dtype, tuple(shape))

    def reverse(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Axes in reverse order: a Slice with step -1, or a Gather where the target takes none."""
        if not axes:
            return x
        if self.target.negative_steps:
            n = len(axes)
            inputs = (x, self.axes([-1] * n), self.axes([INT64_MIN] * n), self.axes(axes), self.axes([-1] * n))
            return self.program.op("Slice", inputs, x.dtype, x.shape)
        for axis in axes:
            d = x.shape[axis]
            if isinstance(d, int):
                at = self.constant(np.arange(d - 1, -1, -1, dtype=np.int64))
            else:
                at = self.binary("Sub", self.dims.scalar(simplest(d - 1)), self.iota(d))
            x = self.gather(x, at, axis)
        return x

    def concat(self, xs: Sequence[Tensor], axis: int) -> Tensor:
        if len(xs) == 1:
            return xs[0]
        total = simplest(sum((x.shape[axis] for x in xs), start=0))
        shape = (*xs[0].shape[:axis], total, *xs[0].shape[axis + 1 :])
        return self.program.op("Concat", xs, xs[0].dtype, shape, axis=axis)

    def pad(self, x: Tensor, low: Sequence[Dim], high: Sequence[Dim], value: float = 0) -> Tensor:
        """`Pad` with a constant, before and after each axis."""
        low, high = [simplest(d) for d in low], [simplest(d) for d in high]
        if all(same(d, 0) for d in (*low, *high)):
            return x
        shape = tuple(simplest(a + d + b) for a, d, b in zip(low, x.shape, high, strict=True))
        via = self.target.detour("Pad", x.dtype)
        if via is not None:
            return self.cast(self.pad(self.cast(x, via), low, high, value), x.dtype)
        inputs = [x, self.dims.shape([*low, *high])]
        if value != 0:
            inputs.append(self.number(value, x.dtype))
        return self.program.op("Pad", inputs, x.dtype, shape)

    def gather(self, x: Tensor, at: Tensor, axis: int) -> Tensor:
        shape = (*x.shape[:axis], *at.shape, *x.shape[axis + 1 :])
        return self.program.op("Gather", (x, at), x.dtype, shape, axis=axis)

    def iota(self, size: Dim) -> Tensor:
        """`0, 1, ..., size - 1`."""
        if isinstance(size, int) and size <= 65536:
            return self.constant(np.arange(size, dtype=np.int64))
        zero, one = self.number(0, i64), self.number(1, i64)
        return self.program.op("Range", (zero, self.dims.scalar(size), one), i64, (size,))

    # ---- reductions and contraction ----

    def reduce(self, type: str, x: Tensor, axes: Sequence[int], keep: bool = False) -> Tensor:
        if not axes:
            return x
        via = self.target.detour(type, x.dtype)
        if via is not None:
            return self.cast(self.reduce(type, self.cast(x, via), axes, keep), x.dtype)
        shape = tuple(1 if i in axes else d for i, d in enumerate(x.shape) if keep or i not in axes)
        if type != "ReduceSum" and self.opset < 18:
            return self.program.op(type, (x,), x.dtype, shape, axes=tuple(axes), keepdims=int(keep))
        return self.program.op(type, (x, self.axes(axes)), x.dtype, shape, keepdims=int(keep))

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """`x @ y`, the axes before the last two broadcast; an operand of rank 1 is a row on the left, a column on the right.

        A column after a transposed matrix is written as a matrix: onnxruntime 1.32.0 fuses `Transpose(x) @ vector` to wrong numbers.
        """
        via = self.target.detour("MatMul", x.dtype)
        if via is not None:
            return self.cast(self.matmul(self.cast(x, via), self.cast(y, via)), x.dtype)
        apart = self.target.vectors_alone and max(x.rank, y.rank) > 2
        if y.rank == 1 and (apart or (x.op is not None and x.op.type in ("Transpose", "Cast"))):
            return self.squeeze(self.matmul(x, self.unsqueeze(y, (1,))), (x.rank - 1,))
        if x.rank == 1 and apart:
            return self.squeeze(self.matmul(self.unsqueeze(x, (0,)), y), (y.rank - 2,))
        lead = broadcast_shape(x.shape[:-2], y.shape[:-2])
        shape = (*lead, *x.shape[-2:-1], *(y.shape[-1:] if y.rank > 1 else ()))
        return self.program.op("MatMul", (x, y), x.dtype, shape)

    def scaled(self, x: Tensor, factor: Dim) -> Tensor:
        """`factor * x`, the factor a number of elements."""
        return x if same(factor, 1) else self.binary("Mul", x, self.size(factor, x.dtype))


def groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of axes of two shapes that hold the same elements, in order; what is left over ends up in one run.

    >>> groups((2, 3, 4), (6, 4))
    [([0, 1], [0]), ([2], [1])]
    """
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        a, b = ([i], [j]) if i < len(before) and j < len(after) else ([], [])
        if not a:
            found.append((list(range(i, len(before))), list(range(j, len(after)))))
            break
        i, j = i + 1, j + 1
        left: Dim = before[a[0]]
        right: Dim = after[b[0]]
        while not same(left, right):
            grow_left = i < len(before) and (j >= len(after) or known_at_least(right, left))
            if grow_left:
                a.append(i)
                left = simplest(left * before[i])
                i += 1
            elif j < len(after):
                b.append(j)
                right = simplest(right * after[j])
                j += 1
            else:
                break
        found.append((a, b))
    return found


def broadcast_shape(a: Shape, b: Shape) -> Shape:
    """ONNX's broadcasting of shapes that fit: size 1 gives way."""
    rank = max(len(a), len(b))
    a, b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    return tuple(y if isinstance(x, int) and x == 1 else x for x, y in zip(a, b, strict=True))


def _inserted(short: Shape, long: Shape) -> list[int] | None:
    """The axes of `long` that are 1 and, left out, make it `short`; None where there are none."""
    if len(long) <= len(short):
        return None
    axes, rest = [], list(short)
    for i, d in enumerate(long):
        if rest and same(d, rest[0]):
            rest.pop(0)
        elif isinstance(d, int) and d == 1:
            axes.append(i)
        else:
            return None
    return axes if not rest else None


def _ones_moved(before: Shape, after: Shape) -> tuple[Shape, list[int], list[int]] | None:
    """Where axes of size 1 alone differ: the shape without them, and their places before and after; no size is read for that."""
    gone, come = ([i for i, d in enumerate(s) if isinstance(d, int) and d == 1] for s in (before, after))
    core, same_core = (tuple(d for i, d in enumerate(s) if i not in at) for s, at in ((before, gone), (after, come)))
    return (core, gone, come) if gone and come and same_dims(core, same_core) else None


def _merged_but_for_symbols(before: Shape, after: Shape) -> Shape | None:
    """The shape with all runs of axes merged but one of several symbolic axes; None where there is no such run, or only that one.

    torch-mlir merges `[N, M, 2, 8]` to `[N * M, 16]` wrongly when it does both in one step.
    """
    runs = groups(before, after)
    if sum(len(a) > 1 for a, _ in runs) < 2:
        return None
    shape: list[Dim] = []
    found = False
    for a, b in runs:
        several = len(a) > 1 and sum(not isinstance(before[i], int) for i in a) > 1
        found = found or several
        shape += [before[i] for i in a] if several else [after[i] for i in b]
    return tuple(shape) if found else None


def _from_end(place: Dim, size: Dim) -> Dim:
    """A symbolic place as a constant counted from the end, where it is one."""
    if isinstance(place, int):
        return place
    back = simplest(place - size)
    return back if isinstance(back, int) and back < 0 else place
