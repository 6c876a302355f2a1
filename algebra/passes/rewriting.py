"""Rewriting: a builder whose every new value is first offered to named rules.

A rule looks at one value whose operands are settled (no rule fires on them) and gives an equal one, or None. As values are made bottom-up and each
is settled once, a pass costs time linear in the graph, whatever the number of rules that fire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..collection import paused
from ..graph import Builder, Graph, Value, reachable, using
from ..origin import Origin
from ..primitives.record import Primitive

__all__ = ["Rewriter", "Rule", "rewrite", "rules"]


@dataclass(frozen=True, slots=True)
class Rule:
    """`apply(value)` gives an equal value, or None where the rule does not hold; tried on values of these primitives."""

    primitives: tuple[str, ...]
    apply: Callable[[Value], Value | None]

    @property
    def name(self) -> str:
        return self.apply.__name__

    @property
    def formula(self) -> str:
        """The first line of the rule's docstring: `before -> after`."""
        return (self.apply.__doc__ or "").strip().split("\n")[0]


def rules(*functions: tuple[str, Callable[[Value], Value | None]]) -> tuple[Rule, ...]:
    """A table of rules; each entry's primitives are one string, separated by spaces."""
    return tuple(Rule(tuple(names.split()), function) for names, function in functions)


class Rewriter(Builder):
    """Builds settled values: what `add` returns, and all that it depends on, no rule can change further."""

    def __init__(self, table: Iterable[Rule], label: str) -> None:
        self._trail: list[str] = []
        super().__init__()
        self._label = label
        self._settled: dict[int, Value] = {}
        self.readers: dict[int, int] = {}
        self.notes: dict[int, bool] = {}
        self._rules: dict[str, list[Rule]] = {}
        for rule in table:
            for name in rule.primitives:
                self._rules.setdefault(name, []).append(rule)

    @property
    def origin(self) -> Origin:
        """The origin of new values: that of the node being rebuilt, and the rules that are at work."""
        origin = self._origin
        for name in self._trail[:3]:
            origin = origin.then(f"{self._label}:{name}")
        return origin

    @origin.setter
    def origin(self, origin: Origin) -> None:
        self._origin = origin

    def add(self, primitive: Primitive, operands: tuple[Value, ...], params: Mapping[str, Any]) -> Value:
        value = super().add(primitive, operands, params)
        table = self._rules.get(primitive.name)
        if table is None:
            return value
        settled = self._settled.get(id(value))
        if settled is None:
            settled = self._settled[id(value)] = self._settle(value, table)
        return settled

    def read_once(self, value: Value) -> bool:
        """Whether a value stands for a node of the old graph that one other reads."""
        return self.readers.get(id(value)) == 1

    def _settle(self, value: Value, table: list[Rule]) -> Value:
        for rule in table:
            self._trail.append(rule.name)
            try:
                result = rule.apply(value)
            finally:
                self._trail.pop()
            if result is not None:
                assert _same_kind(value, result), f"{rule.name} changed {value!r} to {result!r}"
                return result
        return value


def _same_kind(a: Value, b: Value) -> bool:
    return a.type == b.type or (a.dtype is b.dtype and a.rank == b.rank)


@paused()
def rewrite(graph: Graph, table: Iterable[Rule], label: str) -> Graph:
    """The graph built anew with rules; nested graphs in parameters likewise. Names are kept, those of tensors that vanish dropped."""
    table = tuple(table)
    new: dict[int, Value] = {}
    nested: dict[int, Graph] = {}
    builder = Rewriter(table, label)
    builder.assume(graph.constraints)
    read = _readers(graph)
    with using(builder):
        for node in graph.nodes:
            builder.origin = node.origin
            params = {k: _inside(v, table, label, nested) for k, v in node.params.items()}
            made = builder.add(node.primitive, tuple(new[id(o)] for o in node.operands), params)
            builder.readers[id(made)] = builder.readers.get(id(made), 0) + read.get(id(node), 0)
            new[id(node)] = made
    outputs = {k: new[id(v)] for k, v in graph.outputs.items()}
    inputs = tuple(new[id(v)] for v in graph.inputs)
    alive = {id(v) for v in (*inputs, *reachable(outputs.values()))}
    return replace(
        graph,
        inputs=inputs,
        outputs=outputs,
        tensors={k: new[id(v)] for k, v in graph.tensors.items() if id(v) in new and id(new[id(v)]) in alive},
    )


def _readers(graph: Graph) -> dict[int, int]:
    """How many operands and outputs each node is."""
    read: dict[int, int] = {}
    for node in graph.nodes:
        for operand in node.operands:
            read[id(operand)] = read.get(id(operand), 0) + 1
    for output in graph.outputs.values():
        read[id(output)] = read.get(id(output), 0) + 1
    return read


def _inside(value: Any, table: tuple[Rule, ...], label: str, nested: dict[int, Graph]) -> Any:
    if isinstance(value, Graph):
        if id(value) not in nested:
            nested[id(value)] = rewrite(value, table, label)
        return nested[id(value)]
    if isinstance(value, tuple) and any(isinstance(v, Graph) for v in value):
        return tuple(_inside(v, table, label, nested) for v in value)
    return value
