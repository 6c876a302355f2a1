"""Passes: functions `Graph -> Graph` that keep every output's value."""

from __future__ import annotations

from ..graph import Graph, Value
from .arithmetic import ARITHMETIC, FOLDING
from .contractions import CONTRACTION
from .layout import LAYOUT
from .rewriting import Rule, rewrite, rules

__all__ = ["FINAL", "RULES", "cse", "default", "finish", "fold", "prune", "simplify"]

RULES: tuple[Rule, ...] = (*FOLDING, *ARITHMETIC, *LAYOUT, *CONTRACTION)


def stop_gradient_done(v: Value) -> Value | None:
    """stop_gradient(x) -> x, when nothing will be differentiated any more"""
    return v.operands[0]


FINAL: tuple[Rule, ...] = rules(("stop_gradient", stop_gradient_done))


def prune(graph: Graph) -> Graph:
    """Only what the outputs reach, in a builder of its own."""
    return rewrite(graph, (), "prune")


def cse(graph: Graph) -> Graph:
    """Equal expressions made one: a graph built anew shares them."""
    return rewrite(graph, (), "cse")


def fold(graph: Graph) -> Graph:
    """Constants computed, where the result is small or no larger than what it is made of."""
    return rewrite(graph, FOLDING, "fold")


def simplify(graph: Graph) -> Graph:
    """Every rule of `RULES` applied until none holds. The result can still be differentiated."""
    return rewrite(graph, RULES, "simplify")


def finish(graph: Graph) -> Graph:
    """As `simplify`, and without `stop_gradient`: the graph will not be differentiated any more."""
    return rewrite(graph, (*FINAL, *RULES), "simplify")


def default(graph: Graph) -> Graph:
    """What is done before a graph is written: `finish`."""
    return finish(graph)
