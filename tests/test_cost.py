"""Cost grows with the number of nodes and no faster: counted in calls, which are the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from pullback.algebra import primitives as p
from pullback.algebra.calculus import gradient, jvp
from pullback.algebra.dims import dim
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Graph, building
from pullback.algebra.passes import simplify
from pullback.algebra.text import labels, parse, show
from pullback.algebra.types import f32, tensor
from pullback.algebra.verify import verify

N = dim("N")


def chain(n: int) -> Graph:
    """`h = tanh(h) + x`, over and over."""
    with building():
        h = x = p.input("x", tensor(f32, (N, 2)))
        for _ in range(n // 2):
            h = p.add(p.tanh(h), x)
    return Graph((x,), {"y": h})


def wide(n: int) -> Graph:
    """Many multiples of a square, added up pair by pair."""
    with building():
        x = p.input("x", tensor(f32, (N, 2)))
        parts = [p.mul(x, p.mul(x, p.number(i, x))) for i in range(n // 5)]
        while len(parts) > 1:
            odd = parts[-1:] if len(parts) % 2 else []
            parts = [p.add(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
    return Graph((x,), {"y": parts[0]})


def calls(f: Callable[[], Any]) -> int:
    """How many functions are called."""
    count = 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        f()
    finally:
        sys.setprofile(before)
    return count


def copied(graph: Graph) -> Graph:
    """The same graph without what it remembers of itself."""
    return Graph(graph.inputs, graph.outputs, graph.name)


WORK: dict[str, Callable[[Graph, str], object]] = {
    "nodes": lambda g, _: copied(g).nodes,
    "dag": lambda g, _: copied(g).dag,
    "labels": lambda g, _: labels(g),
    "show": lambda g, _: show(g),
    "parse": lambda _, text: parse(text),
    "verify": lambda g, _: verify(g),
    "gradient": lambda g, _: gradient(g),
    "gradient of the gradient": lambda g, _: gradient(gradient(g), of="grad_x", wrt="x"),
    "jvp": lambda g, _: jvp(g),
    "simplify": lambda g, _: simplify(g),
    "evaluate": lambda g, _: evaluate(g, {"x": np.zeros((1, 2))}),
}


@pytest.mark.parametrize("make", [chain, wide])
@pytest.mark.parametrize("work", WORK)
def test_ten_times_the_nodes_are_ten_times_the_calls(make: Callable[[int], Graph], work: str) -> None:
    counts = []
    for n in (400, 4000):
        graph = make(n)
        text = show(graph)
        counts.append(calls(lambda graph=graph, text=text: WORK[work](graph, text)))
    assert counts[1] <= 11.5 * counts[0], f"{work}: {counts}"


@pytest.mark.parametrize("make", [chain, wide])
def test_building_is_linear_too(make: Callable[[int], Graph]) -> None:
    few, many = (calls(lambda n=n: make(n)) for n in (400, 4000))
    assert many <= 11.5 * few


def test_a_chain_of_many_nodes_needs_no_recursion() -> None:
    graph = chain(20_000)
    assert len(graph.nodes) > 20_000 - 2
    back = gradient(graph)
    assert len(labels(back)) == len(back.nodes)
    assert show(graph).count("\n") > 20_000 - 2
