"""Unique legal names: the model's own tensors keep theirs letter for letter, other values are named after what they serve."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...algebra.graph import Value

__all__ = ["Names", "node_stem"]

_PLAIN = re.compile(r"[^A-Za-z0-9]+")


class Names:
    """Hands out names, each once."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._taken: set[str] = set(reserved)
        self._next: dict[str, int] = {}

    def unique(self, wanted: str) -> str:
        """`wanted`, or `wanted_2`, `wanted_3`, ... where that is taken."""
        name = wanted
        if name in self._taken:
            number = self._next.get(wanted, 2)
            while f"{wanted}_{number}" in self._taken:
                number += 1
            self._next[wanted] = number + 1
            name = f"{wanted}_{number}"
        self._taken.add(name)
        return name


def plain(text: str) -> str:
    """Letters, digits and single underscores."""
    return _PLAIN.sub("_", text).strip("_")


def node_stem(value: Value | None, graph_name: str) -> str:
    """What the names of the nodes of a value begin with: phase, source, primitive (`backward_conv1_dot`)."""
    if value is None:
        return f"forward_{plain(graph_name) or 'graph'}"
    source = value.origin.source.name if value.origin.source else graph_name
    return "_".join(part for part in (value.origin.phase, plain(source) or "node", value.primitive.name) if part)
