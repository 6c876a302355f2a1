"""What a primitive is: one frozen record of name, type rule, numpy meaning and VJP rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..types import Type

if TYPE_CHECKING:
    from ..graph import Value

__all__ = ["Each", "NoGrad", "Primitive", "Rule"]

Rule = Callable[..., "Value | NoGrad"]


@dataclass(frozen=True, slots=True)
class NoGrad:
    """An operand through which no gradient flows, with the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Each:
    """One rule for every operand of a variadic primitive: `rule(ct, y, *operands, at=position, **params)`."""

    rule: Rule


@dataclass(frozen=True, slots=True)
class Joint:
    """One rule for all operands of a primitive with several results.

    It is called as `rule(cts, y, *operands, wanted=positions, **params)`.

    `cts` has a cotangent or None for each result; the rule returns a cotangent or None for each operand.
    """

    rule: Callable[..., tuple[Value | None, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Primitive:
    """One operation of the algebra.

    `type_rule(*operand types, **params)` gives the result's type or raises `TypeMismatch`; `numpy(*arrays, **params)`
    is its meaning, with every dim in the parameters an int; `vjp` has one rule or `NoGrad` per operand. A rule is
    called as `rule(ct, y, *operands, **params)`.
    """

    name: str
    type_rule: Callable[..., Type]
    numpy: Callable[..., Any]
    vjp: tuple[Rule | NoGrad, ...] | Each | Joint
    formula: str = ""

    def __repr__(self) -> str:
        return f"<primitive {self.name}>"
