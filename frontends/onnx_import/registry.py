"""The table of lowerings: one function per operator and version, whose signature is the operator's signature.

Operands are positional: `Value` (or `Value | None` where optional), `Static` where the array must be known when the model is read, `*xs: Value`
where variadic, `Sequence_` for a sequence of tensors. Attributes are keywords with ONNX's names and defaults; a `node: Node` keyword receives the
node itself. The result is a `Value`, or a tuple with one entry per output (None where an output cannot be had and nobody may ask for it).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NewType, get_type_hints

import numpy as np
import onnx

from ...algebra.graph import Value
from .context import Node, Unsupported, reading

__all__ = ["TABLE", "Gradient", "Lowering", "Stack", "Static", "Tensors", "lookup", "lowers", "outside"]

Static = NewType("Static", np.ndarray)
"""An operand whose array must be known when the model is read; of objects where symbolic dims are inside."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """A sequence of tensors, known element by element. ONNX sequences are lowered where their use is static."""

    items: tuple[Value, ...]


class Stack(Tensors):
    """A sequence of tensors of one shape, as many as a loop has steps: one tensor, with the place in the sequence as its first axis."""

    __slots__ = ("stacked",)
    stacked: Value

    def __init__(self, stacked: Value) -> None:
        object.__setattr__(self, "stacked", stacked)

    @property
    def items(self) -> tuple[Value, ...]:
        raise Unsupported(
            "the length of this sequence is known only when the model runs; ConcatFromSequence and SequenceLength take such a one"
        )


class Gradient(Enum):
    """What becomes of the gradient at an operator."""

    DIFFERENTIABLE = "differentiable"
    PIECEWISE = "piecewise constant"
    INDEX = "index or shape valued"


@dataclass(frozen=True, slots=True)
class Lowering:
    """One row: operator, the first version it holds for, its function, and what becomes of the gradient (with the reason, unless differentiable)."""

    op_type: str
    domain: str
    since: int
    function: Callable[..., Any]
    gradient: Gradient
    reason: str
    operands: tuple[tuple[str, str], ...]
    attributes: tuple[tuple[str, bool], ...]
    takes_node: bool

    @property
    def formula(self) -> str:
        return (inspect.getdoc(self.function) or "").split("\n\n")[0]


TABLE: dict[tuple[str, str], list[Lowering]] = {}
OUTSIDE: dict[tuple[str, str], str] = {}


def lowers(*op_types: str, since: int = 1, domain: str = "", gradient: Gradient = Gradient.DIFFERENTIABLE,
           reason: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Register the decorated function as the lowering of operators from a version of their domain on.

    Later registrations win, so that a user's replaces the package's. `gradient` and `reason` are what `pullback ops` prints.

    >>> @lowers("Twice", domain="example.org")
    ... def twice(x: Value) -> Value:
    ...     '''2 * x'''
    ...     return p.add(x, x)
    >>> lookup("Twice", "example.org", 1).formula
    '2 * x'
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        operands, attributes, takes_node = _signature(function)
        for op_type in op_types:
            rows = TABLE.setdefault((domain, op_type), [])
            rows[:] = [r for r in rows if r.since != since]
            rows.append(Lowering(op_type, domain, since, function, gradient, reason, operands, attributes, takes_node))
            rows.sort(key=lambda r: -r.since)
        return function

    return register


def outside(reason: str, *op_types: str, domain: str = "") -> None:
    """Declare operators that are not numerical, with the reason."""
    for op_type in op_types:
        OUTSIDE[(domain, op_type)] = reason


def lookup(op_type: str, domain: str, opset: int) -> Lowering | None:
    """The lowering that holds at this version of the domain, or None."""
    for row in TABLE.get((domain, op_type), ()):
        if row.since <= opset:
            return row
    return None


def _signature(function: Callable[..., Any]) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, bool], ...], bool]:
    hints = get_type_hints(function)
    operands, attributes, takes_node = [], [], False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            if name == "node":
                takes_node = True
            else:
                attributes.append((name, parameter.default is parameter.empty))
            continue
        hint = str(hints.get(name, Value))
        kind = (
            "static"
            if "Static" in hint
            else "sequence"
            if "Tensors" in hint and "Value" not in hint
            else "any"
            if "Tensors" in hint
            else "value"
        )
        if parameter.kind is parameter.VAR_POSITIONAL:
            kind = f"*{kind}"
        elif parameter.default is not parameter.empty or "None" in hint:
            kind = f"{kind}?"
        operands.append((name, kind))
    return tuple(operands), tuple(attributes), takes_node


@lru_cache(maxsize=4096)
def schema_of(op_type: str, domain: str, opset: int) -> onnx.defs.OpSchema | None:
    """The operator's schema at this version, or None."""
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None


Argument = Value | Tensors | None


def apply(row: Lowering, node: Node, arguments: Sequence[Argument], attributes: Mapping[str, Any],
          static: Callable[[int, Value], np.ndarray | None]) -> Any:  # fmt: skip
    """Call a lowering with what the node has; raise `Unsupported` where something is missing or not understood."""
    positional = list(_operands(row, node, arguments, static))
    known = dict(row.attributes)
    unknown = [a for a in attributes if a not in known]
    if unknown:
        raise Unsupported(f"attribute {', '.join(map(repr, unknown))} is not handled")
    missing = [a for a, required in row.attributes if required and a not in attributes]
    if missing:
        raise Unsupported(f"required attribute {', '.join(map(repr, missing))} is missing")
    keywords = dict(attributes)
    if row.takes_node:
        keywords["node"] = node
    return row.function(*positional, **keywords)


def _operands(row: Lowering, node: Node, arguments: Sequence[Argument],
              static: Callable[[int, Value], np.ndarray | None]) -> Iterable[Any]:  # fmt: skip
    if len(arguments) > len(row.operands) and not (row.operands and row.operands[-1][1].startswith("*")):
        extra = [a for a in arguments[len(row.operands) :] if a is not None]
        if extra:
            raise Unsupported(f"{len(arguments)} inputs, where at most {len(row.operands)} are understood")
    for i, (name, kind) in enumerate(row.operands):
        if kind.startswith("*"):
            for j, argument in enumerate(arguments[i:], start=i):
                yield _operand(name, kind[1:], j, argument, static)
            return
        argument = arguments[i] if i < len(arguments) else None
        if argument is None:
            if not kind.endswith("?"):
                raise Unsupported(f"required input {i} ({name}) is missing")
            yield None
        else:
            yield _operand(name, kind.rstrip("?"), i, argument, static)


def _operand(
    name: str, kind: str, position: int, argument: Argument, static: Callable[[int, Value], np.ndarray | None]
) -> Any:
    if kind == "any" or argument is None:
        return argument
    if kind == "sequence":
        if not isinstance(argument, Tensors):
            raise Unsupported(f"input {position} ({name}) must be a sequence of tensors")
        return argument
    if not isinstance(argument, Value):
        raise Unsupported(f"input {position} ({name}) is a sequence, where a tensor is required")
    if kind == "static":
        array = static(position, argument)
        if array is None:
            raise Unsupported(f"input {position} ({name}) must be known when the model is read, but it depends on data")
        return array
    return argument


def known(value: Value) -> np.ndarray | None:
    """What is known of a value before anything runs; see `Reading.known`."""
    return reading().known(value)
