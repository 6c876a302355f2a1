"""Loops of known length written out, step after step, for those who take no loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import primitives as p
from ..composites import unsqueeze
from ..dims import Dim
from ..graph import Graph, Value, current, inline, rebuild

__all__ = ["MOST", "unroll", "unrolled"]

MOST = 1024  # steps that are written out


def _steps(
    init: Sequence[Value], xs: Sequence[Value], consts: Sequence[Value], body: Graph, length: int, reverse: bool
) -> tuple[tuple[Value, ...], list[tuple[Value, ...]]]:
    """The last carries, and what each step gives to stack, in the order of the slices."""
    state: tuple[Value, ...] = tuple(init)
    stacked: list[tuple[Value, ...]] = []
    for t in reversed(range(length)) if reverse else range(length):
        results = inline(body, (*state, *(_slice(x, t) for x in xs), *consts))
        state = results[: len(init)]
        stacked.append(results[len(init) :])
    return state, stacked[::-1] if reverse else stacked


def _slice(x: Value, t: int) -> Value:
    """`x[t]`."""
    whole = p.slice(x, start=(t, *(0,) * (x.rank - 1)), limit=(t + 1, *x.shape[1:]))
    return p.reshape(whole, shape=x.shape[1:])


def _stack(pieces: Sequence[Value], like: Value) -> Value:
    """Results along a new first axis; an empty tensor of no results."""
    if not pieces:
        return p.full(0, like.dtype, (0, *like.shape))
    return p.concat(*(unsqueeze(v, (0,)) for v in pieces), axis=0)


def unrolled(
    init: Sequence[Value], xs: Sequence[Value], consts: Sequence[Value], body: Graph, *, length: int, reverse: bool = False
) -> tuple[Value, ...]:  # fmt: skip
    """What `scan` gives, its steps one after the other."""
    last, stacked = _steps(init, xs, consts, body, length, reverse)
    ys = list(body.outputs.values())[len(init) :]
    return (*last, *(_stack([step[k] for step in stacked], y) for k, y in enumerate(ys)))


def unroll(graph: Graph, most: int = MOST, *, only: Callable[[Value], bool] = lambda scan: True) -> Graph:
    """The graph with every scan of a known number of steps, at most so many, written out; those inside other loops and branches too.

    `only` chooses among them.
    """
    found: dict[int, tuple[tuple[Value, ...], list[tuple[Value, ...]]]] = {}
    bodies: dict[int, Graph] = {}

    def inner(value: Any) -> Any:
        if isinstance(value, Graph):
            if id(value) not in bodies:
                bodies[id(value)] = unroll(value, most, only=only)
            return bodies[id(value)]
        return value

    def make(node: Value, operands: tuple[Value, ...]) -> Value:
        if node.primitive.name == "item" and id(node.operands[0]) in found:
            return _item(node.operands[0].params, *found[id(node.operands[0])], node.params["index"])
        params = {k: inner(v) for k, v in node.params.items()}
        if node.primitive.name != "scan" or not _fits(params["length"], most) or not only(node):
            return current().add(node.primitive, operands, params)
        cut, end = params["carries"], params["carries"] + params["xs"]
        found[id(node)] = _steps(operands[:cut], operands[cut:end], operands[end:], params["body"], params["length"], params["reverse"])  # fmt: skip
        return p.literal(0)  # stands for the node with its several results, which nobody asks for any more

    return rebuild(graph, make)


def _fits(length: Dim, most: int) -> bool:
    return isinstance(length, int) and length <= most


def _item(params: Mapping[str, Any], last: tuple[Value, ...], stacked: list[tuple[Value, ...]], index: int) -> Value:
    carries = params["carries"]
    if index < carries:
        return last[index]
    like = list(params["body"].outputs.values())[index]
    return _stack([step[index - carries] for step in stacked], like)
