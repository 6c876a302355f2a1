"""The ONNX program while it is written: tensors, operators and constants, before they have names.

Operators are hash-consed, so that a transpose, a shape or a constant that several places ask for is written once; what no output needs is left out
when the program is closed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...algebra.dims import Shape
from ...algebra.graph import Constant, Graph, Value
from ...algebra.types import DType, dtype_of

__all__ = ["Body", "Op", "Program", "Tensor", "needed"]


@dataclass(eq=False, slots=True)
class Tensor:
    """One ONNX value. `constant` is set where it is known when written, `op` where an operator makes it; a graph input has neither."""

    dtype: DType
    shape: Shape
    op: Op | None = None
    constant: Constant | None = None
    name: str = ""

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def array(self) -> np.ndarray | None:
        """The value, where it is a constant."""
        return None if self.constant is None else self.constant.array

    def __repr__(self) -> str:
        return f"<tensor {self.name or '?'}: {self.dtype}{list(self.shape)}>"


@dataclass(eq=False, slots=True)
class Op:
    """One ONNX node. `serves` is the node of the algebra that it computes, alone or with others."""

    type: str
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    attributes: Mapping[str, Any]
    serves: Value | None
    name: str = ""
    bodies: Mapping[str, Body] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Body:
    """The graph inside a Scan, If or Loop. What its operators read and neither make nor are passed is around it."""

    graph: Graph
    ops: Sequence[Op]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def captured(self) -> list[Tensor]:
        """The tensors of the program around that the body reads."""
        inside = {id(t) for t in self.inputs} | {id(t) for op in self.ops for t in op.outputs}
        read = [t for op in self.ops for t in (*op.inputs, *(c for b in op.bodies.values() for c in b.captured))]
        return [t for t in read if t is not None and id(t) not in inside]


class Program:
    """Appends operators. `serving` is the value of the algebra that new operators compute; `around` the program that a body stands in.

    What a loop body computes from nothing of its own is computed outside, once (`hoists`).
    """

    def __init__(self, around: Program | None = None, *, hoists: bool = False) -> None:
        self.ops: list[Op] = []
        self.around = around
        self.hoists = hoists
        self._own: set[int] = set()
        self.serving: Value | None = None if around is None else around.serving
        self._ops: dict[object, tuple[Tensor, ...]] = {}
        self._constants: dict[object, Tensor] = {}

    def constant(self, value: np.ndarray | Constant) -> Tensor:
        """A tensor that is an initializer, shared by value where it is small."""
        if self.around is not None:
            return self.around.constant(value)
        held = value if isinstance(value, Constant) else Constant(value)
        found = self._constants.get(held)
        if found is None:
            found = self._constants[held] = Tensor(dtype_of(held.dtype), tuple(held.shape), constant=held)
        return found

    def input(self, dtype: DType, shape: Shape) -> Tensor:
        """A tensor that is passed in."""
        tensor = Tensor(dtype, shape)
        self._own.add(id(tensor))
        return tensor

    def op(self, type: str, inputs: Sequence[Tensor | None], dtype: DType, shape: Shape, **attributes: Any) -> Tensor:
        """The result of an operator with one output."""
        return self.many(type, inputs, ((dtype, shape),), **attributes)[0]

    def many(
        self, type: str, inputs: Sequence[Tensor | None], results: Sequence[tuple[DType, Shape]], **attributes: Any
    ) -> tuple[Tensor, ...]:
        """The results of an operator, the same tensors where the same operator stands already."""
        key = (type, tuple(map(id, inputs)), tuple(sorted((k, _frozen(a)) for k, a in attributes.items())))
        found = self._find(key)
        if found is None and self.around is not None and self.hoists and not any(id(t) in self._own for t in inputs):
            return self.around.many(type, inputs, results, **attributes)
        if found is None:
            found = self.append(type, inputs, results, attributes)
            self._ops[key] = found
        return found

    def _find(self, key: object) -> tuple[Tensor, ...] | None:
        """The results of an operator that stands here, or in a program around, already."""
        found = self._ops.get(key)
        return self.around._find(key) if found is None and self.around is not None else found

    def owns(self, tensor: Tensor) -> bool:
        """Whether an operator of this program makes the tensor."""
        return tensor.op is not None and id(tensor) in self._own

    def append(
        self, type: str, inputs: Sequence[Tensor | None], results: Sequence[tuple[DType, Shape]],
        attributes: Mapping[str, Any], bodies: Mapping[str, Body] | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The results of a new operator, even where the same one stands already."""
        outputs = tuple(Tensor(dtype, shape) for dtype, shape in results)
        op = Op(type, tuple(inputs), outputs, attributes, self.serving, bodies=bodies or {})
        for output in outputs:
            output.op = op
        self._own.update(map(id, outputs))
        self.ops.append(op)
        return outputs


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    return (type(value).__name__, value)


def needed(ops: Sequence[Op], outputs: Sequence[Tensor]) -> list[Op]:
    """The operators that the outputs depend on, in order."""
    wanted = {id(t.op) for t in outputs if t.op is not None}
    kept = []
    for op in reversed(ops):
        if id(op) in wanted:
            kept.append(op)
            for t in op.inputs:
                if t is not None and t.op is not None:
                    wanted.add(id(t.op))
            for body in op.bodies.values():
                wanted.update(id(t.op) for t in body.captured if t.op is not None)
    kept.reverse()
    return kept
