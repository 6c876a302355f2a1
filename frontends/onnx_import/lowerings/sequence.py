"""Sequences and optionals, where their use is known when the model is read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.dims import Dim, ceildiv, exact_div, product
from ....algebra.errors import DimError
from ....algebra.graph import Value
from ....algebra.types import bool_
from ..context import Node, Unsupported
from ..registry import Gradient, Stack, Static, Tensors, lowers
from .math import axis_of
from .shape import chunks, dims_of, ints_of, joined, pieces

COUNT = "a number of tensors"
NOTHING = Tensors(())
"""The empty optional, told from the empty sequence by identity."""


def back(x: Value, axis: int) -> Value:
    """`x` with its first axis moved to a place."""
    return x if axis == 0 else p.transpose(x, perm=(*range(1, axis + 1), 0, *range(axis + 1, x.rank)))


def laid_out(stacked: Value, axis: int) -> Value:
    """The tensors along the first axis, one after the other along an axis of their own."""
    moved = back(stacked, axis)
    return p.reshape(
        moved, shape=(*moved.shape[:axis], product(moved.shape[axis : axis + 2]), *moved.shape[axis + 2 :])
    )


def _place(position: Static, length: int, count: int) -> int:
    (at,) = ints_of(position, "the position in a sequence")
    if not -length <= at < count:
        raise DimError(f"position {at} is not in a sequence of {length}")
    return at + length if at < 0 else at


@lowers("SequenceConstruct")
def sequence_construct(*inputs: Value) -> Tensors:
    """A sequence of tensors"""
    return Tensors(tuple(inputs))


@lowers("SequenceEmpty", gradient=Gradient.INDEX, reason="no tensor at all")
def sequence_empty(*, dtype: int = onnx.TensorProto.FLOAT) -> Tensors:
    """A sequence of no tensors"""
    return Tensors(())


@lowers("SequenceAt")
def sequence_at(input_sequence: Tensors, position: Static) -> Value:
    """The tensor at a known position"""
    return input_sequence.items[_place(position, len(input_sequence.items), len(input_sequence.items))]


@lowers("SequenceInsert")
def sequence_insert(input_sequence: Tensors, tensor: Value, position: Static | None = None) -> Tensors:
    """The sequence with a tensor at a known position, by default the end"""
    items = input_sequence.items
    at = len(items) if position is None else _place(position, len(items), len(items) + 1)
    return Tensors((*items[:at], tensor, *items[at:]))


@lowers("SequenceErase")
def sequence_erase(input_sequence: Tensors, position: Static | None = None) -> Tensors:
    """The sequence without the tensor at a known position, by default the last"""
    items = input_sequence.items
    at = len(items) - 1 if position is None else _place(position, len(items), len(items))
    return Tensors((*items[:at], *items[at + 1 :]))


@lowers("SequenceLength", gradient=Gradient.INDEX, reason=COUNT)
def sequence_length(input_sequence: Tensors) -> Value:
    """The number of tensors"""
    if isinstance(input_sequence, Stack):
        return p.dim(input_sequence.stacked.shape[0])
    return p.literal(np.asarray(len(input_sequence.items), np.int64))


@lowers("SplitToSequence")
def split_to_sequence(input: Value, split: Static | None = None, *, axis: int = 0, keepdims: int = 1) -> Tensors:
    """Consecutive pieces of an axis: of one size, of given sizes, or of size 1"""
    a = axis_of(axis, input.rank)
    extent = input.shape[a]
    if split is not None and np.ndim(split) > 0:
        return Tensors(pieces(input, a, dims_of(split)))
    chunk: Dim = 1 if split is None else dims_of(split)[0]
    count = exact_div(extent, chunk)
    if count is None and isinstance(extent, int):
        count = ceildiv(extent, chunk)
    if not isinstance(count, int):
        raise Unsupported("how many pieces there are depends on a symbolic size: give it with dims")
    found = pieces(input, a, chunks(extent, chunk, count))
    if split is None and not keepdims:
        found = tuple(c.drop_ones(x, (a,)) for x in found)
    return Tensors(found)


@lowers("ConcatFromSequence")
def concat_from_sequence(input_sequence: Tensors, *, axis: int, new_axis: int = 0) -> Value:
    """The tensors one after the other along an axis, or along a new one"""
    if isinstance(input_sequence, Stack):
        x = input_sequence.stacked
        return back(x, axis_of(axis, x.rank)) if new_axis else laid_out(x, axis_of(axis, x.rank - 1))
    items: Sequence[Value] = input_sequence.items
    if not items:
        raise Unsupported("an empty sequence has no tensors to concatenate")
    if not new_axis:
        return joined(items, axis)
    a = axis_of(axis, items[0].rank + 1)
    return joined([c.unsqueeze(x, (a,)) for x in items], a)


@lowers("SequenceMap")
def sequence_map(
    input_sequence: Tensors, *additional_inputs: Value | Tensors, body: onnx.GraphProto, node: Node
) -> tuple[Tensors, ...]:
    """A graph applied to each tensor"""
    results: list[list[Value]] = [[] for _ in body.output]
    for i, item in enumerate(input_sequence.items):
        inner = node.scope.child(f"{node.name}.{i}")
        own = [item, *(x.items[i] if isinstance(x, Tensors) else x for x in additional_inputs)]
        for info, value in zip(body.input, own, strict=True):
            inner.entries[info.name] = value
        for column, result in zip(results, inner.run(body), strict=True):
            if not isinstance(result, Value):
                raise Unsupported("the graph of a SequenceMap returns tensors")
            column.append(result)
    return tuple(Tensors(tuple(column)) for column in results)


# ---- optionals -------------------------------------------------------------------------------------------------------


@lowers("Optional")
def optional(input: Value | Tensors | None = None, *, type: onnx.TypeProto | None = None) -> Value | Tensors:
    """x, or nothing"""
    return NOTHING if input is None else input


@lowers("OptionalHasElement", gradient=Gradient.INDEX, reason="bool")
def optional_has_element(input: Value | Tensors | None = None) -> Value:
    """Whether there is something"""
    return p.literal(input is not None and input is not NOTHING, bool_)


@lowers("OptionalGetElement")
def optional_get_element(input: Value | Tensors) -> Value | Tensors:
    """What is there"""
    if input is NOTHING:
        raise Unsupported("the optional holds nothing")
    return input
