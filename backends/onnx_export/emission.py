"""The state of one emission: the view of every value emitted so far, and how a rule asks for operands in the layout that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...algebra.dims import Dim
from ...algebra.graph import Graph, Value
from .ops import Ops
from .program import Program, Tensor
from .view import View

__all__ = ["Emission", "Rule", "users_of"]

Rule = Callable[["Emission", Value], "View | tuple[View, ...]"]


def users_of(graph: Graph) -> dict[int, list[Value]]:
    """The consumers of every value, by `id(value)`."""
    users: dict[int, list[Value]] = {}
    for v in graph.nodes:
        for o in v.operands:
            users.setdefault(id(o), []).append(v)
    return users


class Emission:
    """What the rules of the table work on.

    `pinned` holds the values whose tensors keep a name of their own, so that they are computed with their axes in order; `uses` counts the
    consumers of a value, and `users` holds them.
    """

    def __init__(
        self, table: Mapping[str, Rule], ops: Ops, pinned: set[int], users: Mapping[int, Sequence[Value]]
    ) -> None:
        self.table = table
        self.ops = ops
        self.pinned = pinned
        self.users = users
        self.views: dict[int, View] = {}
        self.results: dict[int, tuple[View, ...]] = {}  # of nodes with several

    def walk(self, graph: Graph) -> None:
        """Emit every node of a graph whose inputs have views."""
        for v in graph.nodes:
            if v.primitive.name == "input":
                continue
            self.ops.program.serving = v
            emitted = self.table[v.primitive.name](self, v)
            if isinstance(emitted, tuple):
                self.results[id(v)] = emitted
            else:
                self.views[id(v)] = emitted

    def inside(self, graph: Graph, *, repeated: bool) -> Emission:
        """The emission of a body, into a program of its own; `repeated` where it runs more than once."""
        ops = Ops(Program(self.ops.program, hoists=repeated), self.ops.dims, self.ops.target, self.ops.opset)
        return Emission(self.table, ops, set(), users_of(graph))

    def enter(self, graph: Graph, given: Sequence[View]) -> None:
        """Take these as the views of the graph's inputs."""
        for v, view in zip(graph.inputs, given, strict=True):
            self.views[id(v)] = view

    def inlined(self, graph: Graph, given: Sequence[View]) -> list[View]:
        """The outputs of a nested graph, emitted into this program."""
        here = Emission(self.table, self.ops, set(), users_of(graph))
        serving = self.ops.program.serving
        here.enter(graph, given)
        here.walk(graph)
        self.ops.program.serving = serving
        return [here.view(v) for v in graph.outputs.values()]

    def view(self, value: Value) -> View:
        return self.views[id(value)]

    def place(self, view: View, order: Sequence[int]) -> Tensor:
        """A tensor that broadcasts against one whose axes are the value's axes `order`.

        Axes that the view repeats have size 1, or are left out where they lead. Every real axis of the view must be in `order`.
        """
        present = [a for a in order if view.places[a] is not None]
        tensor = self.ops.transpose(view.tensor, [view.places[a] or 0 for a in present])
        if not present:
            return tensor
        first = list(order).index(present[0])
        inner = list(order)[first:]
        return self.ops.unsqueeze(tensor, [i for i, a in enumerate(inner) if view.places[a] is None])

    def full(self, view: View, order: Sequence[int]) -> Tensor:
        """A tensor whose axes are exactly the value's axes `order`, repeated ones expanded. Every real axis must be in `order`."""
        tensor = self.place(view, order)
        return self.ops.expand(tensor, tuple(view.shape[a] for a in order))

    def real(self, view: View) -> Tensor:
        """The value as one tensor, axes in order."""
        return self.full(view, range(len(view.shape)))

    def tensor(self, value: Value) -> Tensor:
        """A value as one tensor, axes in order."""
        return self.real(self.view(value))

    def expanded(self, view: View, axes: Sequence[int]) -> View:
        """The view with at least these axes real."""
        if all(view.places[a] is not None for a in axes):
            return view
        wanted = sorted({*axes, *view.order})
        return View.of(self.full(view, wanted), wanted, view.shape)

    def layout(self, views: Sequence[View], covered: Sequence[int], pinned: bool) -> tuple[int, ...]:
        """The order of axes in which operands are best combined: that of the operands which lie alike, if they have all axes."""
        ascending = tuple(sorted(covered))
        if pinned:
            return ascending
        orders = [v.order for v in views if len(v.order) == len(ascending)]
        if not orders or ascending in orders:
            return ascending
        return max(orders, key=orders.count)


def covered(views: Sequence[View]) -> list[int]:
    """The axes that some view has for real, ascending."""
    rank = len(views[0].shape)
    return [a for a in range(rank) if any(v.places[a] is not None for v in views)]


def dims_of(view: View, axes: Sequence[int]) -> tuple[Dim, ...]:
    return tuple(view.shape[a] for a in axes)
