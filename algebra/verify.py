"""What must hold of every graph, checked from scratch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import sympy

from .dims import maybe_equal, show, simplest, symbols, walk
from .errors import InconclusiveDim, PullbackError, Refusal
from .graph import Builder, Graph, Value, using
from .text import labels
from .types import TensorType, TupleType, Type

__all__ = ["INPUT_ROLES", "OUTPUT_ROLES", "faults", "verify"]

INPUT_ROLES = frozenset(
    {"input", "target", "parameter", "frozen", "slot", "step", "hyperparameter", "seed", "state", "gradient"}
)
OUTPUT_ROLES = frozenset({"output", "loss", "gradient", "update", "state"})


def verify(graph: Graph) -> Graph:
    """The graph itself, if nothing is wrong with it; else one `Refusal` that lists everything.

    Operands precede their nodes, stored types are the inferred ones, names are unique, outputs and roles are those of
    the graph, initial values fit, and every symbolic dim is one of the inputs' (or of the constraints').

    >>> from pullback.algebra.text import parse
    >>> verify(parse("graph g(x: f32[N]) { y: i64[M] = iota return x=x, y=y }"))
    Traceback (most recent call last):
    pullback.algebra.errors.Refusal: graph 'g' is not well formed:
      - y = iota: the dims M are not those of any input
    """
    found = list(faults(graph))
    if found:
        raise Refusal(f"graph {graph.name!r} is not well formed", found)
    return graph


def faults(graph: Graph, outer: Iterable[sympy.Symbol] = ()) -> Iterator[str]:
    """Everything that is wrong with a graph; `outer` are the symbols that a nested graph may use."""
    yield from _names(graph)
    if any(not isinstance(v, Value) for v in graph.outputs.values()):
        return
    known = {*graph.symbols, *outer}
    for constraint in graph.constraints:
        known |= symbols(constraint.left) | symbols(constraint.right)
    named = labels(graph)
    builder = Builder()
    builder.assume(graph.constraints)
    with using(builder):
        found = list(_nodes(graph, named, known))
    yield from found
    yield from _roles(graph)
    yield from _data(graph)


def _names(graph: Graph) -> Iterator[str]:
    seen: set[str] = set()
    for v in graph.inputs:
        if v.primitive.name != "input":
            yield f"the input {v!r} is no input node"
        elif v.params["name"] in seen:
            yield f"two inputs are named {v.params['name']!r}"
        else:
            seen.add(v.params["name"])
    for name, v in graph.outputs.items():
        if not isinstance(v, Value):
            yield f"the output {name!r} is no value"
        elif isinstance(v.type, TupleType):
            yield f"the output {name!r} has several results: {v.type!r} (take an item)"


def _nodes(graph: Graph, named: dict[Value, str], known: set[sympy.Symbol]) -> Iterator[str]:
    declared, before = set(graph.inputs), set()
    for node in graph.nodes:
        where = f"{named[node]} = {node.primitive.name}"
        if any(o not in before for o in node.operands):
            yield f"{where}: an operand does not precede it"
        before.add(node)
        if node.primitive.name == "input" and node not in declared:
            yield f"{where}: the input {node.params['name']!r} is used, but not an input of the graph"
        yield from (f"{where}: {fault}" for fault in _inferred(node))
        if node.primitive.name == "nonzero":  # a size that depends on data is known from here on
            known |= symbols(node.params["size"])
        yield from (f"{where}: {fault}" for fault in _dims(node, known))
        for key, value in node.params.items():
            if isinstance(value, Graph):
                yield from (f"{where}: {key}: {fault}" for fault in faults(value, known))


def _inferred(node: Value) -> Iterator[str]:
    try:
        inferred = node.primitive.type_rule(*(o.type for o in node.operands), **node.params)
    except PullbackError as error:
        yield str(error)
        return
    if _simplest(inferred) != _simplest(node.type):
        yield f"is stored as {node.type!r}, but has type {inferred!r}"
    expected = node.primitive.vjp
    if isinstance(expected, tuple) and len(expected) != len(node.operands):
        yield f"has {len(node.operands)} operands, and rules for {len(expected)}"


def _simplest(type_: Type) -> Type:
    """The type under what the graph's constraints say of its dims."""
    if isinstance(type_, TupleType):
        return TupleType(tuple(TensorType(t.dtype, tuple(map(simplest, t.shape))) for t in type_.items))
    return TensorType(type_.dtype, tuple(map(simplest, type_.shape)))


def _tensors(type_: Type) -> tuple[TensorType, ...]:
    return type_.items if isinstance(type_, TupleType) else (type_,)


def _dims(node: Value, known: set[sympy.Symbol]) -> Iterator[str]:
    used: set[sympy.Symbol] = set()
    for t in _tensors(node.type):
        for d in t.shape:
            used |= symbols(d)
            if isinstance(d, int) and d < 0:
                yield f"the size {d} is negative"
    for value in node.params.values():
        for d in walk(value):
            used |= symbols(d)
    unknown = sorted((s for s in used - known), key=lambda s: str(s.name))
    if unknown:
        yield f"the dims {', '.join(map(show, unknown))} are not those of any input"


def _roles(graph: Graph) -> Iterator[str]:
    inputs = {v.params["name"]: v for v in graph.inputs if v.primitive.name == "input"}
    for name, v in inputs.items():
        if v.params["role"] not in INPUT_ROLES:
            yield f"the input {name!r} has the unknown role {v.params['role']!r}"
    for name, role in graph.roles.items():
        if name in graph.outputs:
            if role.role not in OUTPUT_ROLES and not (name in inputs and role.role == inputs[name].params["role"]):
                yield f"the output {name!r} has the unknown role {role.role!r}"
        elif name in inputs:
            if role.role != inputs[name].params["role"]:
                own = inputs[name].params["role"]
                yield f"the input {name!r} has the role {own!r}, but is said to be {role.role!r}"
        else:
            yield f"a role is given for {name!r}, which is neither input nor output"


def _data(graph: Graph) -> Iterator[str]:
    inputs = {v.params["name"]: v for v in graph.inputs if v.primitive.name == "input"}
    for name, constant in graph.data.items():
        v = inputs.get(name)
        if v is None:
            yield f"an initial value is given for {name!r}, which is no input"
            continue
        try:
            fits = len(constant.shape) == v.rank and all(map(maybe_equal, v.shape, constant.shape))
        except InconclusiveDim:
            fits = True
        if not fits or constant.dtype != v.dtype.numpy:
            given = f"{constant.dtype}{list(constant.shape)}"
            yield f"the initial value of {name!r} is {given}, but the input is {v.type!r}"
