"""Values put in the place of others, and all that depends on them made anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ..graph import Graph, Value, at, bind, reachable

__all__ = ["Make", "Now", "in_graph", "substitute"]

Now = Callable[[Value], Value]
"""What a value has become so far."""
Make = Callable[[Now], Value]
"""Makes what stands in a value's place, from what earlier values have become."""


def substitute(roots: Iterable[Value], places: Mapping[int, Make]) -> Now:
    """Builds in the current builder what the roots become when each node whose id is in `places` is made by its `Make` instead.

    A node that depends on no replaced one stays itself. Returns the map from old values to new ones; a value that no root reaches maps to itself.
    """
    new: dict[int, Value] = {}

    def now(value: Value) -> Value:
        return new.get(id(value), value)

    for node in reachable(roots):
        if (make := places.get(id(node))) is not None:
            with at(node.origin):
                new[id(node)] = make(now)
            continue
        operands = tuple(now(o) for o in node.operands)
        if all(a is b for a, b in zip(operands, node.operands, strict=True)):
            continue
        with at(node.origin):
            new[id(node)] = bind(node.primitive, *operands, **node.params)
    return now


def in_graph(graph: Graph, places: Mapping[int, Make]) -> tuple[Graph, Now]:
    """The graph after `substitute`, and the map from old values to new ones. Its inputs are those it had, or what took their place."""
    if not places:
        return graph, lambda value: value
    now = substitute((*graph.outputs.values(), *graph.tensors.values()), places)
    inputs = tuple(places[id(v)](now) if id(v) in places and now(v) is v else now(v) for v in graph.inputs)
    changed = graph.with_(
        inputs=inputs,
        outputs={k: now(v) for k, v in graph.outputs.items()},
        tensors={k: now(v) for k, v in graph.tensors.items()},
    )
    return changed, now
