"""Values, the append-only builder, and graphs.

A `Value` is one node and one tensor: a primitive applied to operands. A `Builder` appends values and is hash-consed: building the same
expression twice gives the same node. A `Graph` is what its outputs reach, held as a frozen `networkx.MultiDiGraph`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
import sympy

from .dims import Dim, Shape, assuming, simplest, symbols
from .errors import InconclusiveDim, PullbackError
from .origin import Origin, Source
from .types import DType, TensorType, TupleType, Type

if TYPE_CHECKING:
    from .primitives.record import Primitive

__all__ = [
    "Builder",
    "Constant",
    "Constraint",
    "Graph",
    "Role",
    "Value",
    "at",
    "bind",
    "building",
    "current",
    "inline",
    "reachable",
    "using",
]


class Constant:
    """An array inside a node's parameters. Small ones compare by content, large ones by identity and are never copied.

    `load` may stand for the array, so that weights are read when first needed.
    """

    __slots__ = ("_array", "_key", "_load", "dtype", "shape")

    def __init__(self, array: np.ndarray | None = None, *, load: Callable[[], np.ndarray] | None = None,
                 shape: tuple[int, ...] = (), dtype: np.dtype | None = None) -> None:  # fmt: skip
        self._array = array
        self._load = load
        self.shape: tuple[int, ...] = tuple(array.shape) if array is not None else shape
        self.dtype: np.dtype = array.dtype if array is not None else np.dtype(dtype)
        small = array is not None and array.nbytes <= 4096
        self._key: object = (self.dtype, self.shape, array.tobytes()) if small and array is not None else id(self)

    @property
    def array(self) -> np.ndarray:
        if self._array is None:
            assert self._load is not None
            self._array = self._load()
        return self._array

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Constant) and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return (
            f"Constant({self.array.tolist()})"
            if self.size <= 8
            else f"Constant(shape={self.shape}, dtype={self.dtype})"
        )


class Value:
    """One node of a graph, and the tensor it computes. Immutable; compared by identity, as the builder never makes one twice."""

    __slots__ = ("index", "operands", "origin", "params", "primitive", "type")

    primitive: Primitive
    operands: tuple[Value, ...]
    params: Mapping[str, Any]
    type: Type
    origin: Origin
    index: int

    def __init__(self, primitive: Primitive, operands: tuple[Value, ...], params: Mapping[str, Any], type: Type, origin: Origin,
                 index: int) -> None:  # fmt: skip
        put = object.__setattr__
        put(self, "primitive", primitive)
        put(self, "operands", operands)
        put(self, "params", params)
        put(self, "type", type)
        put(self, "origin", origin)
        put(self, "index", index)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Value is immutable: cannot set {name!r}")

    @property
    def shape(self) -> Shape:
        assert isinstance(self.type, TensorType), f"{self!r} has several results"
        return self.type.shape

    @property
    def dtype(self) -> DType:
        assert isinstance(self.type, TensorType), f"{self!r} has several results"
        return self.type.dtype

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def phase(self) -> str:
        return self.origin.phase

    @property
    def name(self) -> str | None:
        """The name of an input node; None for other nodes."""
        return self.params.get("name") if self.primitive.name == "input" else None

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.operands

    def __repr__(self) -> str:
        label = f" {self.params['name']}" if self.primitive.name == "input" else ""
        return f"<{self.primitive.name}{label} #{self.index}: {self.type!r}>"


def _key(value: object) -> object:
    """A hashable form in which `1`, `1.0` and `True` differ."""
    if isinstance(value, bool | float):
        return (type(value).__name__, repr(value))
    if isinstance(value, tuple):
        return tuple(_key(v) for v in value)
    return value


class Builder:
    """Appends values; the same expression gives the same value."""

    def __init__(self) -> None:
        self._table: dict[object, Value] = {}
        self._next = 0
        self.origin = Origin()
        self.assumed: dict[sympy.Expr, sympy.Expr] = dict(_stack[-1].assumed) if _stack else {}

    def assume(self, constraints: Iterable[Constraint]) -> None:
        """Take what a model forces upon expressions of its dims as given in every type that is inferred."""
        for c in constraints:
            if c.relation == "==" and not isinstance(c.left, int) and not c.left.is_Symbol:
                self.assumed[c.left] = sympy.sympify(c.right)

    @classmethod
    def extending(cls, *graphs: Graph) -> Builder:
        """A builder whose table already holds the nodes of graphs that were made in one builder, to build further upon them."""
        builder = cls()
        for graph in graphs:
            builder.assume(graph.constraints)
            for node in graph.nodes:
                builder._table.setdefault(_expression(node.primitive, node.operands, node.params), node)
                builder._next = max(builder._next, node.index + 1)
        return builder

    def made(self, primitive: Primitive, operands: tuple[Value, ...], params: Mapping[str, Any]) -> Value | None:
        """The value of an expression, where it stands already."""
        return self._table.get(_expression(primitive, operands, params))

    def add(self, primitive: Primitive, operands: tuple[Value, ...], params: Mapping[str, Any]) -> Value:
        key = _expression(primitive, operands, params)
        found = self._table.get(key)
        if found is not None:
            return found
        try:
            type_ = primitive.type_rule(*(v.type for v in operands), **params)
        except PullbackError as error:
            shown = ", ".join(repr(v.type) for v in operands)
            error.add_note(f"in {primitive.name}({shown})")
            if isinstance(error, InconclusiveDim):
                error.forced = True
            raise
        if self.assumed:
            type_ = _simplest_type(type_)
        value = Value(primitive, operands, params, type_, self.origin, self._next)
        self._next += 1
        self._table[key] = value
        return value


def _simplest_type(type_: Type) -> Type:
    match type_:
        case TensorType():
            return TensorType(type_.dtype, tuple(map(simplest, type_.shape)))
        case TupleType():
            return TupleType(tuple(TensorType(t.dtype, tuple(map(simplest, t.shape))) for t in type_.items))


def _expression(primitive: Primitive, operands: tuple[Value, ...], params: Mapping[str, Any]) -> object:
    ids = tuple(map(id, operands))
    if not params:
        return (primitive.name, ids)
    return (primitive.name, ids, tuple((k, _key(params[k])) for k in sorted(params)))


_stack: list[Builder] = []


def current() -> Builder:
    """The builder that `bind` appends to."""
    if not _stack:
        raise RuntimeError("no builder: build values inside `with building():`")
    return _stack[-1]


@contextmanager
def building(*graphs: Graph) -> Iterator[Builder]:
    """Make a new builder current, one that extends the given graphs."""
    with using(Builder.extending(*graphs)) as builder:
        yield builder


@contextmanager
def using(builder: Builder) -> Iterator[Builder]:
    """Make a builder current."""
    _stack.append(builder)
    try:
        with assuming(builder.assumed):
            yield builder
    finally:
        _stack.pop()


@contextmanager
def at(origin: Origin) -> Iterator[None]:
    """Give new values this origin."""
    builder = current()
    before, builder.origin = builder.origin, origin
    try:
        yield
    finally:
        builder.origin = before


@contextmanager
def phase(name: str, source: Source | None = None) -> Iterator[None]:
    """Give new values this phase, and source where one is given."""
    origin = current().origin
    with at(Origin(name, source or origin.source, ())):
        yield


def bind(primitive: Primitive, *operands: Value, **params: Any) -> Value:
    """Apply a primitive: the one way to make a value."""
    return current().add(primitive, operands, params)


def reachable(roots: Iterable[Value]) -> tuple[Value, ...]:
    """Every node that the roots depend on, themselves included, in topological order (of their making)."""
    seen: dict[int, Value] = {}
    stack = list(roots)
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            stack.extend(node.operands)
    return tuple(sorted(seen.values(), key=lambda v: v.index))


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a model forces upon its sizes: `left == right`, or `left % right == 0` (relation `divides`), or `left >= right`."""

    left: Dim
    relation: str
    right: Dim
    reason: str = ""

    def __str__(self) -> str:
        from .dims import show

        match self.relation:
            case "divides":
                left, right = (
                    show(d) if isinstance(d, int) or d.is_Symbol else f"({show(d)})" for d in (self.left, self.right)
                )
                return f"{left} % {right} == 0"
            case relation:
                return f"{show(self.left)} {relation} {show(self.right)}"

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is so at these sizes of the symbols, by name."""
        from .dims import evaluate

        left, right = evaluate(self.left, sizes), evaluate(self.right, sizes)
        match self.relation:
            case "divides":
                return left % right == 0
            case "==":
                return left == right
            case _:
                return left >= right


@dataclass(frozen=True, slots=True)
class Role:
    """What an input or output is for, and the parameter it belongs to (a gradient's, a slot's, an update's)."""

    role: str
    parameter: str | None = None


@dataclass(frozen=True, eq=False)
class Graph:
    """Inputs, named outputs, and all that the outputs reach.

    `inputs` are input nodes in the order of the signature; their `role` parameter says what enters there. `roles` says the same of outputs,
    by name, and which parameter an input or output belongs to. `tensors` maps the names of the model's own tensors to nodes. `data` holds
    initial values of inputs (parameters, state), by name. `constraints` are what the model forces upon its dims. `info` carries what only a
    border knows (the model it was read from), untouched by passes.
    """

    inputs: tuple[Value, ...]
    outputs: Mapping[str, Value]
    name: str = "graph"
    tensors: Mapping[str, Value] = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=dict)
    data: Mapping[str, Constant] = field(default_factory=dict)
    constraints: tuple[Constraint, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> tuple[Value, ...]:
        """Every node in topological order: the inputs first, then what the outputs reach."""
        reached = reachable(self.outputs.values())
        known = {id(v) for v in self.inputs}
        return self.inputs + tuple(v for v in reached if id(v) not in known)

    @cached_property
    def dag(self) -> nx.MultiDiGraph:
        """The graph as networkx holds it: nodes are values, an edge's key is the operand's position. Frozen.

        A node's attributes are `primitive`, `type`, `phase` and `operands` (their order); `mul(e, e)` has two edges.
        """
        dag = nx.MultiDiGraph(name=self.name)
        dag.add_nodes_from(
            (v, {"primitive": v.primitive.name, "type": v.type, "phase": v.origin.phase, "operands": v.operands})
            for v in self.nodes
        )
        dag.add_edges_from((operand, v, i) for v in self.nodes for i, operand in enumerate(v.operands))
        return nx.freeze(dag)

    @cached_property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """The symbolic dims of the inputs' shapes, in order of appearance."""
        found: dict[sympy.Symbol, None] = {}
        for v in self.inputs:
            for d in v.shape:
                found.update(dict.fromkeys(sorted(symbols(d), key=lambda s: s.name)))
        return tuple(found)

    @cached_property
    def parameters(self) -> tuple[Value, ...]:
        """The inputs that can be trained (role `parameter`)."""
        return self.by_role("parameter")

    def by_role(self, *roles: str) -> tuple[Value, ...]:
        return tuple(v for v in self.inputs if v.params["role"] in roles)

    @cached_property
    def _inputs_by_name(self) -> dict[str, Value]:
        return {v.params["name"]: v for v in self.inputs}

    def __getitem__(self, name: str) -> Value:
        """An input, output or inner tensor by name."""
        for table in (self._inputs_by_name, self.outputs, self.tensors):
            if name in table:
                return table[name]
        raise KeyError(f"no tensor {name!r} in {self.name}")

    def __contains__(self, name: str) -> bool:
        return name in self._inputs_by_name or name in self.outputs or name in self.tensors

    def with_(self, **changes: Any) -> Graph:
        """This graph with some fields replaced."""
        return replace(self, **changes)

    def labels(self) -> dict[Value, str]:
        """One readable, unique name for every node: an input's, an output's or a tensor's own, else numbered inside what it serves."""
        from .text import labels

        return labels(self)

    def __str__(self) -> str:
        from .text import show

        return show(self)


def map_params(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every dim (sympy expression) inside a parameter value."""
    if isinstance(value, sympy.Expr):
        return change(value)
    if isinstance(value, tuple):
        return tuple(map_params(v, change) for v in value)
    return value


def rebuild(graph: Graph, make: Callable[[Value, tuple[Value, ...]], Value], *, name: str | None = None,
            keep_unreached_tensors: bool = False) -> Graph:  # fmt: skip
    """The graph with each node made anew by `make(node, new operands)` in a fresh builder, in topological order."""
    new: dict[int, Value] = {}
    with building() as builder:
        builder.assume(graph.constraints)
        for node in graph.nodes:
            builder.origin = node.origin
            new[id(node)] = make(node, tuple(new[id(o)] for o in node.operands))
    return replace(
        graph,
        name=name or graph.name,
        inputs=tuple(new[id(v)] for v in graph.inputs),
        outputs={k: new[id(v)] for k, v in graph.outputs.items()},
        tensors={k: new[id(v)] for k, v in graph.tensors.items() if id(v) in new},
    )


def inline(graph: Graph, values: Sequence[Value]) -> tuple[Value, ...]:
    """The outputs of a graph on given values as its inputs, its nodes built in the current builder."""
    new = {id(v): given for v, given in zip(graph.inputs, values, strict=True)}
    phase = current().origin.phase
    for node in graph.nodes:
        if id(node) not in new:
            with at(node.origin.in_phase(phase)):
                new[id(node)] = bind(node.primitive, *(new[id(o)] for o in node.operands), **node.params)
    return tuple(new[id(v)] for v in graph.outputs.values())


def values_of(graph: Graph, names: Sequence[str]) -> list[Value]:
    """Tensors by name, or one error naming every unknown one with near names."""
    import difflib

    from .errors import Refusal

    known = [*(v.params["name"] for v in graph.inputs), *graph.outputs, *graph.tensors]
    missing = [n for n in names if n not in graph]
    if missing:
        reasons = []
        for n in missing:
            near = difflib.get_close_matches(n, sorted(set(known)), n=3)
            reasons.append(f"no tensor {n!r}" + (f"; near names: {', '.join(near)}" if near else ""))
        raise Refusal(f"unknown tensors in {graph.name!r}", reasons)
    return [graph[n] for n in names]
