"""Derivatives by differences, to compare the calculus with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from pullback.algebra import primitives as p
from pullback.algebra.calculus.vjp import vjp
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Graph, Value, building
from pullback.algebra.text import show
from pullback.algebra.types import DType, TensorType, TupleType

Arrays = Mapping[str, np.ndarray]


def every_node(graph: Graph) -> Iterator[Value]:
    """The nodes of a graph and of the graphs nested in it."""
    for node in graph.nodes:
        yield node
        for value in node.params.values():
            if isinstance(value, Graph):
                yield from every_node(value)


def tensors(node: Value) -> tuple[TensorType, ...]:
    """The types of a node's results."""
    return node.type.items if isinstance(node.type, TupleType) else (node.type,)


def floating_dtypes(graph: Graph) -> set[DType]:
    """The floating dtypes of all results inside a graph."""
    return {t.dtype for node in every_node(graph) for t in tensors(node) if t.dtype.floating}


def slope(f: Callable[[float], float], step: float = 1e-3) -> float:
    """`f'(0)` by central differences at two steps, extrapolated (Richardson).

    The error is of fourth order in the step.
    """

    def central(h: float) -> float:
        return (f(h) - f(-h)) / (2 * h)

    return (4 * central(step / 2) - central(step)) / 3


def floats(graph: Graph) -> tuple[str, ...]:
    """The names of the floating inputs."""
    return tuple(v.params["name"] for v in graph.inputs if v.dtype.floating)


def pulled_back(graph: Graph, wrt: tuple[str, ...]) -> Graph:
    """The graph of `J^T ct`: inputs are the graph's and `ct_{output}`, outputs `ct_{input}`.

    An input without a path has none.
    """
    with building(graph):
        differentiable = {k: v for k, v in graph.outputs.items() if v.dtype.floating}
        seeds = [p.input(f"ct_{k}", v.type, "seed") for k, v in differentiable.items()]
        cts = vjp(list(differentiable.values()), seeds, [graph[n] for n in wrt])
    outputs = {f"ct_{n}": ct for n, ct in zip(wrt, cts, strict=True) if ct is not None}
    return Graph((*graph.inputs, *seeds), outputs, f"{graph.name}_pullback")


def inner(a: np.ndarray, b: np.ndarray) -> float:
    """`<a, b>` in double."""
    return float(np.sum(np.asarray(a, np.float64) * np.asarray(b, np.float64)))


def check_pullback(graph: Graph, feeds: Arrays, wrt: tuple[str, ...], rng: np.random.Generator, *,
sizes: Mapping[str, int] | None = None,
                   orders: int = 2, step: float = 1e-3, tolerance: float = 1e-7) -> None:  # fmt: skip
    """`<ct, J v> = <J^T ct, v>` at a point, for random `ct` and `v`; then the same of the graph of `J^T ct` itself."""
    back = pulled_back(graph, wrt)
    if not back.outputs:
        return
    outputs = evaluate(graph, feeds, sizes=sizes)
    cts = {
        v.params["name"]: np.asarray(rng.standard_normal(outputs[v.params["name"][3:]].shape))
        for v in back.inputs[len(graph.inputs) :]
    }
    directions = {n: np.asarray(rng.standard_normal(np.shape(feeds[n]))) for n in wrt}

    def along(t: float) -> float:
        moved = {**feeds, **{n: feeds[n] + t * directions[n] for n in wrt}}
        values = evaluate(graph, moved, sizes=sizes)
        return sum(inner(ct, values[name[3:]]) for name, ct in cts.items())

    pulled = evaluate(back, {**feeds, **cts}, sizes=sizes)
    found = sum(inner(pulled[f"ct_{n}"], directions[n]) for n in wrt if f"ct_{n}" in pulled)
    expected = slope(along, step)
    scale = 1 + abs(expected) + sum(np.abs(pulled[f"ct_{n}"] * directions[n]).sum() for n in wrt if f"ct_{n}" in pulled)
    assert abs(found - expected) <= tolerance * scale, (
        f"<J^T ct, v> = {found!r}, but <ct, J v> = {expected!r}\nat {dict(feeds)}\nct {cts}\nv {directions}\n{show(graph)}\n{show(back)}"
    )
    if orders > 1:
        more = tuple(v.params["name"] for v in back.inputs[len(graph.inputs) :])
        check_pullback(
            back,
            {**feeds, **cts},
            (*wrt, *more),
            rng,
            sizes=sizes,
            orders=orders - 1,
            step=step,
            tolerance=tolerance * 10,
        )
