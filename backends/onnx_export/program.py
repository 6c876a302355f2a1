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
from ...algebra.graph import Constant, Value
from ...algebra.types import DType, dtype_of

__all__ = ["Op", "Program", "Tensor"]


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
    bodies: Mapping[str, Any] = field(default_factory=dict)


class Program:
    """Appends operators. `serving` is the value of the algebra that new operators compute."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.serving: Value | None = None
        self._ops: dict[object, tuple[Tensor, ...]] = {}
        self._constants: dict[object, Tensor] = {}

    def constant(self, value: np.ndarray | Constant) -> Tensor:
        """A tensor that is an initializer, shared by value where it is small."""
        held = value if isinstance(value, Constant) else Constant(value)
        found = self._constants.get(held)
        if found is None:
            found = self._constants[held] = Tensor(dtype_of(held.dtype), tuple(held.shape), constant=held)
        return found

    def input(self, dtype: DType, shape: Shape) -> Tensor:
        """A tensor from outside."""
        return Tensor(dtype, shape)

    def op(self, type: str, inputs: Sequence[Tensor | None], dtype: DType, shape: Shape, **attributes: Any) -> Tensor:
        """The result of an operator with one output."""
        return self.many(type, inputs, ((dtype, shape),), **attributes)[0]

    def many(
        self, type: str, inputs: Sequence[Tensor | None], results: Sequence[tuple[DType, Shape]], **attributes: Any
    ) -> tuple[Tensor, ...]:
        """The results of an operator, the same tensors where the same operator stands already."""
        key = (type, tuple(map(id, inputs)), tuple(sorted((k, _frozen(a)) for k, a in attributes.items())))
        found = self._ops.get(key)
        if found is None:
            found = self.append(type, inputs, results, attributes)
            self._ops[key] = found
        return found

    def append(
        self, type: str, inputs: Sequence[Tensor | None], results: Sequence[tuple[DType, Shape]],
        attributes: Mapping[str, Any], bodies: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The results of a new operator, even where the same one stands already."""
        outputs = tuple(Tensor(dtype, shape) for dtype, shape in results)
        op = Op(type, tuple(inputs), outputs, attributes, self.serving, bodies=bodies or {})
        for output in outputs:
            output.op = op
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
