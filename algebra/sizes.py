"""Small sizes for the symbols of a graph, at which it can be run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from .dims import Dim, evaluate, show, symbols
from .errors import Refusal
from .graph import Graph

__all__ = ["small_sizes"]

GROWTH = sorted({k * 2**i for i in range(11) for k in (1, 3)})


@dataclass(frozen=True, slots=True)
class _Need:
    """Something that must hold of the sizes, in words, and the names of the symbols in it."""

    said: str
    names: frozenset[str]
    holds: Callable[[Mapping[str, int]], bool]


def small_sizes(graph: Graph, given: Mapping[str, int] | None = None) -> dict[str, int]:
    """A size for every symbol, 2, 3 or 4 where that will do: the constraints hold and no tensor is empty. Those `given` stay.

    >>> from . import primitives as p
    >>> from .dims import dim
    >>> from .graph import building
    >>> from .types import f32, tensor
    >>> with building():
    ...     x = p.input("x", tensor(f32, (dim("N"), dim("T"))))
    ...     y = p.window(x, axes=(1,), sizes=(10,), strides=(1,), dilations=(1,))
    >>> small_sizes(Graph((x,), {"y": y}))
    {'N': 2, 'T': 12}
    """
    given = dict(given or {})
    least = {s.name: 2 + i % 3 for i, s in enumerate(graph.symbols)}
    needs = [n for n in _needs(graph) if n.names <= least.keys() | given.keys()]
    grown = dict.fromkeys((n for n in least if n not in given), 0)

    def sizes(change: Mapping[str, int] | None = None) -> dict[str, int]:
        return {n: given.get(n, least[n] * GROWTH[{**grown, **(change or {})}.get(n, 0)]) for n in least}

    for _ in range(len(least) * len(GROWTH) + 1):
        now = sizes()
        failing = next((n for n in needs if not n.holds(now)), None)
        if failing is None:
            return now
        free = [n for n in sorted(failing.names) if n in grown]
        single = ({n: i} for i in range(len(GROWTH)) for n in free if i > grown[n] and failing.holds(sizes({n: i})))
        together = {n: grown[n] + 1 for n in free if grown[n] + 1 < len(GROWTH)}
        change = next(single, together)
        if not change:
            break
        grown |= change
    now = sizes()
    raise Refusal(
        f"no sizes found to run this at; tried {', '.join(f'{n}={v}' for n, v in now.items())}",
        [n.said for n in needs if not n.holds(now)],
    )


def _needs(graph: Graph) -> Iterator[_Need]:
    for constraint in graph.constraints:
        found = {s.name for d in (constraint.left, constraint.right) for s in symbols(d)}
        yield _Need(f"{constraint} must hold", frozenset(found), constraint.holds)
    for d in dict.fromkeys(d for v in graph.dag for d in v.shape if not isinstance(d, int)):
        yield _Need(f"{show(d)} must be positive", frozenset(s.name for s in symbols(d)), _positive(d))


def _positive(d: Dim) -> Callable[[Mapping[str, int]], bool]:
    return lambda sizes: evaluate(d, sizes) > 0
