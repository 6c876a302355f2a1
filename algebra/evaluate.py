"""The meaning of a graph: its nodes computed with numpy, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import sympy

from .dims import Dim, show_shape, solve, substitute
from .dims import evaluate as size_of
from .errors import PullbackError
from .graph import Graph, Value, map_params

__all__ = ["Closed", "bind_dims", "evaluate", "evaluate_all"]


def bind_dims(graph: Graph, feeds: Mapping[str, np.ndarray], sizes: Mapping[str, int] | None = None) -> dict[str, int]:
    """The size of every symbolic dim, read from the shapes of what is fed; raise where they disagree.

    `sizes` are known beforehand.
    """
    found = dict(sizes or {})
    open_: list[tuple[Value, Dim, int]] = []
    for v in graph.inputs:
        if v.params["name"] not in feeds:
            continue
        shape = np.shape(feeds[v.params["name"]])
        if len(shape) != v.rank:
            raise PullbackError(
                f"input {v.params['name']!r} is {v.type!r}, but an array of shape {list(shape)} is given"
            )
        for d, n in zip(v.shape, shape, strict=True):
            if isinstance(d, sympy.Symbol):
                found.setdefault(d.name, n)
            open_.append((v, d, n))
    _solve(open_, found)
    for v, d, n in open_:
        if size_of(d, found) != n:
            given = list(np.shape(feeds[v.params["name"]]))
            raise PullbackError(
                f"input {v.params['name']!r} is {v.type!r}, but an array of shape {given} is given "
                f"({show_shape([d])} is {n})"
            )
    return found


def _solve(equations: list[tuple[Value, Dim, int]], found: dict[str, int]) -> None:
    """Symbols that no input has as a size of its own, from sizes that are expressions of one unknown."""
    left = [(d, n) for _, d, n in equations if isinstance(d, sympy.Expr) and not isinstance(d, sympy.Symbol)]
    progress = True
    while progress:
        progress = False
        for d, n in left:
            unknown = [s for s in d.free_symbols if s.name not in found]
            if len(unknown) != 1:
                continue
            bound = substitute(d, {s: found[s.name] for s in d.free_symbols if s.name in found})
            if (solution := solve(bound, n)) is not None:
                found[solution[0].name] = int(solution[1])
                progress = True


def evaluate(
    graph: Graph, feeds: Mapping[str, Any] | None = None, *, sizes: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """The outputs by name. Inputs that are not fed take their value from `graph.data`.

    `sizes` gives symbolic dims that no fed shape tells.

    >>> from pullback.algebra.text import parse
    >>> graph = parse("graph g(x: f64[N]) { y: f64[] = reduce_sum x axes=[0] return y=y }")
    >>> print(evaluate(graph, {"x": [1, 2, 3]})["y"])
    6.0
    """
    values = _run(graph, feeds, sizes, keep=False)
    return {name: values[id(v)] for name, v in graph.outputs.items()}


def evaluate_all(
    graph: Graph, feeds: Mapping[str, Any] | None = None, *, sizes: Mapping[str, int] | None = None
) -> dict[int, Any]:
    """The array of every node, by `id(node)`."""
    return _run(graph, feeds, sizes, keep=True)


def _run(
    graph: Graph, feeds: Mapping[str, Any] | None, sizes: Mapping[str, int] | None, *, keep: bool
) -> dict[int, Any]:
    """The arrays of all nodes, or of the outputs alone: then each array is let go after its last reader."""
    arrays: dict[str, np.ndarray] = {}
    missing = []
    for v in graph.inputs:
        name = v.params["name"]
        if feeds is not None and name in feeds:
            arrays[name] = np.asarray(feeds[name], dtype=v.dtype.numpy)
        elif name in graph.data:
            arrays[name] = graph.data[name].array
        else:
            missing.append(f"{name}: {v.type!r}")
    if missing:
        raise PullbackError(f"no value given for {', '.join(missing)}")
    bound = bind_dims(graph, arrays, sizes)
    values: dict[int, Any] = {}
    done = {} if keep else _last_readers(graph)
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            _learn(node, values, bound)
            values[id(node)] = (
                arrays[node.params["name"]] if node.primitive.name == "input" else compute(node, values, bound)
            )
            for spent in done.get(id(node), ()):
                del values[spent]
    return values


def _last_readers(graph: Graph) -> dict[int, list[int]]:
    """For each node the operands that nothing reads after it."""
    kept = {id(v) for v in graph.outputs.values()}
    last: dict[int, int] = {}
    for node in graph.nodes:
        last.update((id(o), id(node)) for o in node.operands if id(o) not in kept)
    done: dict[int, list[int]] = {}
    for operand, reader in last.items():
        done.setdefault(reader, []).append(operand)
    return done


def compute(node: Value, values: Mapping[int, Any], sizes: Mapping[str, int]) -> Any:
    """One node's array from those of its operands."""
    return node.primitive.numpy(*(values[id(o)] for o in node.operands), **_sized(node, sizes))


def _learn(node: Value, values: Mapping[int, Any], sizes: dict[str, int]) -> None:
    """A size that depends on data is known once the places that it counts are."""
    if node.primitive.name == "nonzero" and isinstance(size := node.params["size"], sympy.Symbol):
        sizes[size.name] = int(np.count_nonzero(values[id(node.operands[0])]))


def _sized(node: Value, sizes: Mapping[str, int]) -> dict[str, Any]:
    """A node's parameters with every dim an int, and every nested graph as something to call."""
    return {
        k: Closed(v, sizes) if isinstance(v, Graph) else map_params(v, lambda d: size_of(d, sizes))
        for k, v in node.params.items()
    }


class Closed:
    """A nested graph, with the sizes of the graph around it.

    Called with the arrays of its inputs it gives those of its outputs.
    """

    __slots__ = ("graph", "sizes", "steps")

    def __init__(self, graph: Graph, sizes: Mapping[str, int]) -> None:
        self.graph, self.sizes = graph, sizes
        self.steps: list[tuple[Value, dict[str, Any]]] | None = None

    def __call__(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        if any(v.primitive.name == "nonzero" for v in self.graph.nodes):
            return self._with_sizes_of_its_own(arrays)
        if self.steps is None:
            inputs = {id(v) for v in self.graph.inputs}
            self.steps = [(v, _sized(v, self.sizes)) for v in self.graph.nodes if id(v) not in inputs]
        values: dict[int, Any] = {id(v): array for v, array in zip(self.graph.inputs, arrays, strict=True)}
        for node, params in self.steps:
            values[id(node)] = node.primitive.numpy(*(values[id(o)] for o in node.operands), **params)
        return tuple(np.asarray(values[id(v)]) for v in self.graph.outputs.values())

    def _with_sizes_of_its_own(self, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        sizes = dict(self.sizes)
        values: dict[int, Any] = {id(v): array for v, array in zip(self.graph.inputs, arrays, strict=True)}
        for node in self.graph.nodes:
            if id(node) not in values:
                _learn(node, values, sizes)
                values[id(node)] = compute(node, values, sizes)
        return tuple(np.asarray(values[id(v)]) for v in self.graph.outputs.values())

    def results(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of each output."""
        return [(tuple(size_of(d, self.sizes) for d in v.shape), v.dtype.numpy) for v in self.graph.outputs.values()]
