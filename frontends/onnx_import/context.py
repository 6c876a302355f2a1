"""What a lowering may ask while a model is read: what is known of a value, and what the model forces upon its dims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import sympy

from ...algebra.dims import (
    Dim,
    dim,
    equal,
    exact_div,
    floordiv,
    lowest_terms,
    maybe_equal,
    mod,
    show,
    solve,
    solve_atom,
)
from ...algebra.errors import DimError, InconclusiveDim, PullbackError
from ...algebra.graph import Constraint, Value
from ...algebra.known import Facts

if TYPE_CHECKING:
    from .reader import Scope

__all__ = ["Node", "Reading", "Unify", "Unsupported", "reading", "require_divides", "require_equal", "session", "unify"]


class Unsupported(PullbackError):
    """Something that this operator cannot be lowered with, and why."""


class Unify(Exception):
    """Raised to read the model again with a symbol, or a quotient or minimum of sizes, replaced by what the model forces it to be."""

    def __init__(self, symbol: sympy.Expr, value: Dim, reason: str) -> None:
        super().__init__(f"{show(symbol)} = {show(value)}: {reason}")
        self.symbol, self.value, self.reason = symbol, value, reason


@dataclass(slots=True)
class Reading:
    """The state of reading one model once: facts, constraints, fresh symbols, and the records that training needs.

    `chosen` names the branches on sizes that could be read either way; `choices` says which of them are to be read the unusual way.
    """

    facts: Facts = field(default_factory=Facts)
    constraints: dict[str, Constraint] = field(default_factory=dict)
    fresh: int = 0
    records: dict[str, list[Any]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    static_uses: dict[str, str] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    choices: dict[str, bool] = field(default_factory=dict)
    chosen: list[str] = field(default_factory=list)

    def known(self, value: Value) -> np.ndarray | None:
        """The array that a value is known to be before anything runs (of objects where symbolic dims are inside), or None."""
        return self.facts(value)

    def constrain(self, left: Dim, relation: str, right: Dim, reason: str) -> None:
        constraint = Constraint(left, relation, right, reason)
        self.constraints.setdefault(str(constraint), constraint)

    def fresh_dim(self, hint: str) -> sympy.Symbol:
        """A new symbol for a size that depends on data; it may be 0."""
        while True:
            name = f"{hint}_{self.fresh}" if self.fresh else hint
            self.fresh += 1
            if name not in self.taken:
                self.taken.add(name)
                return dim(name, least=0)

    def record(self, kind: str, item: Any) -> None:
        """Keep a record for a later pass (`batch_norms`, `dropouts`); it reaches `graph.info[kind]`."""
        self.records.setdefault(kind, []).append(item)


_stack: list[Reading] = []


def reading() -> Reading:
    """The current reading."""
    return _stack[-1]


@contextmanager
def session(state: Reading) -> Iterator[Reading]:
    """Make a reading current."""
    _stack.append(state)
    try:
        yield state
    finally:
        _stack.pop()


@dataclass(frozen=True, slots=True)
class Node:
    """The ONNX node being lowered, for the few lowerings that need more than operands and attributes.

    `opset` is the version imported for the node's domain; `outputs` has the names of the results, "" where one is left out.
    `scope` reaches outer values and lowers nested graphs.
    """

    name: str
    op_type: str
    domain: str
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scope: Scope

    def wants(self, index: int) -> bool:
        """Whether the result at this position is named."""
        return index < len(self.outputs) and self.outputs[index] != ""


def unify(a: Dim, b: Dim, reason: str) -> None:
    """Read again with one of two dims in the place of the other, where that can be done."""
    if (solution := solve(a, b) or solve_atom(a, b)) is not None:
        raise Unify(*solution, reason) from None


def require_equal(a: Dim, b: Dim, reason: str) -> Dim:
    """A dim that the model forces to be both; read again with a symbol replaced where it is not so already."""
    try:
        if equal(a, b):
            return a
    except InconclusiveDim:
        unify(a, b, reason)
        reading().constrain(a, "==", b, reason)
        return a
    raise DimError(f"{show(a)} and {show(b)} must be equal: {reason}")


def require_same_shape(a: Sequence[Dim], b: Sequence[Dim], reason: str) -> tuple[Dim, ...]:
    """`require_equal` of each dim."""
    if len(a) != len(b):
        raise DimError(f"ranks {len(a)} and {len(b)} must be equal: {reason}")
    return tuple(require_equal(x, y, reason) for x, y in zip(a, b, strict=True))


def require_divides(a: Dim, b: Dim, reason: str) -> Dim:
    """`a / b`, where the model forces `b` to divide `a`."""
    quotient = exact_div(a, b)
    if quotient is not None:
        return quotient
    if not maybe_equal(mod(a, b), 0):
        raise DimError(f"{show(b)} must divide {show(a)}: {reason}")
    a, b = lowest_terms(a, b)
    reading().constrain(a, "divides", b, reason)
    return floordiv(a, b)
