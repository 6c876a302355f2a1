"""If, Loop and Scan.

A branch that is known to be taken is lowered in place. A loop whose number of steps is known before it starts, symbolically too, is a `scan`; one that
also stops early on a condition is a `scan` whose later steps do nothing; one without a bound is a `while`, which has no gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sympy
from onnx import GraphProto

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.dims import Dim, at_least, ceildiv, dim, dmax, dmin, floordiv, simplest
from ....algebra.errors import DimError, InconclusiveDim
from ....algebra.graph import Graph, Value, building, inline, reachable
from ....algebra.known import Facts
from ....algebra.passes.unroll import unrolled
from ....algebra.types import TensorType, bool_, i64
from ..context import Node, Unify, Unsupported, reading, require_equal, require_same_shape
from ..reader import Nested, Poisoned, Scope
from ..registry import Argument, Stack, Tensors, known, lowers
from .sequence import back, laid_out
from .shape import joined

UNROLLED = 1024  # the most steps that are put one after the other
BOUNDED = 4096  # the most steps of a loop that may stop early and is still run as a scan


class _Changes(Unsupported):
    """A tensor that a loop carries has another type after a step than before."""


def _own_name(node: Node) -> str:
    return node.name.removeprefix(node.scope.path)


def _type(x: Value) -> TensorType:
    assert isinstance(x.type, TensorType)
    return x.type


def _scalar(x: Value) -> Value:
    """A tensor of one element as rank 0."""
    return x if x.rank == 0 else p.reshape(x, shape=())


def _known_bool(x: Value) -> bool | None:
    array = known(x)
    return None if array is None or array.dtype == object or array.size != 1 else bool(array.reshape(()))


def _values(arguments: Sequence[Argument], what: str) -> list[Value]:
    found = []
    for a in arguments:
        if not isinstance(a, Value):
            raise Unsupported(
                f"{what} is {'a sequence' if isinstance(a, Tensors) else 'left out'}, where a tensor is required"
            )
        found.append(a)
    return found


def looped(
    init: Sequence[Value], xs: Sequence[Value], consts: Sequence[Value], body: Graph, *, length: Dim, reverse: bool = False
) -> tuple[Value, ...]:  # fmt: skip
    """A scan; its steps one after the other where that is asked for and their number is known."""
    if reading().options.get("unroll") and isinstance(length, int) and length <= UNROLLED:
        return unrolled(init, xs, consts, body, length=length, reverse=reverse)
    return p.scan(init, xs, consts, body, length=length, reverse=reverse)


# ---- If --------------------------------------------------------------------------------------------------------------------------------


@lowers("If")
def if_(condition: Value, *, then_branch: GraphProto, else_branch: GraphProto, node: Node) -> tuple[Argument, ...]:
    """then_branch() where the condition holds, else else_branch()"""
    taken = _known_bool(condition)
    paths = _branch_paths(node, then_branch, else_branch)
    if taken is not None:
        return _in_place(node, then_branch, paths[0]) if taken else _in_place(node, else_branch, paths[1])
    reasons = node.scope.reader.reasons
    before = len(reasons)
    try:
        return _branches(_scalar(condition), (then_branch, else_branch), paths, node)
    except (_Differ, Poisoned, Unify) as error:  # a branch does not hold for all sizes: is it only taken for some?
        usual = _usual_sizes(condition, node.name)
        if usual is None and isinstance(error, _Differ):
            raise Unsupported(f"the branches of If {error}, and which one is taken depends on data") from None
        if usual is None:
            raise
        del reasons[before:]
        return _in_place(node, then_branch, paths[0]) if usual else _in_place(node, else_branch, paths[1])


class _Differ(Exception):
    """Branches whose results do not have one type."""


def _branch_paths(node: Node, a: GraphProto, b: GraphProto) -> tuple[str, str]:
    """The node's name, with the branch's where both store a tensor of the same name."""
    name = _own_name(node)
    return (f"{name}/then_branch", f"{name}/else_branch") if _stored(a) & _stored(b) else (name, name)


def _stored(graph: GraphProto) -> set[str]:
    constants = {o for n in graph.node if n.op_type == "Constant" for o in n.output}
    return constants | {t.name for t in graph.initializer} | {s.values.name for s in graph.sparse_initializer}


def _in_place(node: Node, branch: GraphProto, path: str) -> tuple[Argument, ...]:
    return tuple(node.scope.child(path).run(branch))


def _branches(
    condition: Value, branches: tuple[GraphProto, GraphProto], paths: tuple[str, str], node: Node
) -> tuple[Argument, ...]:
    shapes: list[list[int | None]] = []  # of each result: None for a tensor, the length of a sequence

    def build(branch: GraphProto) -> Any:
        def run(scope: Scope, _: tuple[Value, ...]) -> list[tuple[str, Value]]:
            results = scope.run(branch)
            flat: list[Value] = []
            for r in results:
                if r is None:
                    raise Unsupported(
                        "a branch of If that gives an optional without value needs a condition that is known"
                    )
                flat += r.items if isinstance(r, Tensors) else [r]
            shapes.append([len(r.items) if isinstance(r, Tensors) else None for r in results])
            return [(f"result{i}", v) for i, v in enumerate(flat)]

        return run

    first, second = (node.scope.nested(path, (), build(b)) for b, path in zip(branches, paths, strict=True))
    if shapes[0] != shapes[1]:
        raise _Differ("give sequences of different lengths")
    for a, b in zip(first.graph.outputs.values(), second.graph.outputs.values(), strict=True):
        _check_alike(a, b)
    operands = list({id(v): v for v in (*first.captured, *second.captured)}.values())
    graphs = [_taking(n, operands) for n in (first, second)]
    results = iter(p.cond(condition, operands, *graphs))
    return tuple(next(results) if n is None else Tensors(tuple(next(results) for _ in range(n))) for n in shapes[0])


def _check_alike(a: Value, b: Value) -> None:
    if a.dtype is not b.dtype or a.rank != b.rank:
        raise _Differ(f"give {a.type!r} and {b.type!r}")
    for x, y in zip(a.shape, b.shape, strict=True):
        if isinstance(x, int) != isinstance(y, int) or (isinstance(x, int) and x != y):
            raise _Differ(f"give {a.type!r} and {b.type!r}")
    require_same_shape(a.shape, b.shape, "the branches of If give tensors of one shape")


def _taking(nested: Nested, operands: Sequence[Value]) -> Graph:
    """The branch as a graph of all operands, those of the other branch included."""
    own = {id(outer): inner for outer, inner in zip(nested.captured, nested.graph.inputs, strict=True)}
    taken = {v.params["name"] for v in nested.graph.inputs}
    inputs = []
    with building(nested.graph):
        for i, outer in enumerate(operands):
            name = f"unused{i}"
            while name in taken:
                name += "_"
            inputs.append(own.get(id(outer)) or p.input(name, _type(outer)))
    return nested.graph.with_(inputs=tuple(inputs))


def _usual_sizes(condition: Value, name: str) -> bool | None:
    """What a condition on sizes is where no symbol is 1, as in broadcasting (then `size >= 2` is a constraint); None where it is about more.

    Exporters write `If(size == 1, Squeeze(x), x)`, whose branches have different ranks. Where the model can only be read if the size is 1, that is
    chosen instead (`Reading.choices`, by the name of the node).
    """
    state = reading()
    ones = state.choices.get(name, False)
    sizes = []
    for v in reachable([condition]):
        if v.primitive.name != "equal" or known(v) is not None:
            continue
        operands = [known(o) for o in v.operands]
        if any(o is None or o.size != 1 for o in operands):
            return None
        dims = [simplest(o.reshape(())[()]) for o in operands if o is not None]
        if 1 not in dims:
            return None
        state.facts.tell(v, np.full([1] * v.rank, ones))
        sizes.append(next((d for d in dims if d != 1), 1))
    state.facts.forget([v for v in reachable([condition]) if known(v) is None])
    taken = _known_bool(condition)
    if taken is None:
        return None
    state.chosen.append(name)
    for d in sizes:
        if ones:
            require_equal(d, 1, "the model only fits together where this size is 1")
        else:
            state.constrain(d, ">=", 2, "a symbolic size is not 1")
    return taken


# ---- Loop ------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Loop:
    """A Loop node: its body, the most steps it makes (a dim where known), and its first condition."""

    node: Node
    body: GraphProto
    trips: Dim | None
    count: Value | None
    start: Value | None
    state: tuple[Argument, ...]
    open: bool = False  # whether its condition may stop it at any step

    @property
    def scans(self) -> int:
        return len(self.body.output) - 1 - len(self.state)


@lowers("Loop")
def loop(
    M: Value | None, cond: Value | None, *v_initial: Value | Tensors, body: GraphProto, node: Node
) -> tuple[Argument, ...]:
    """for i below M, while cond: cond, state, slice = body(i, cond, state); the last state, and the slices stacked"""
    start = True if cond is None else _known_bool(cond)
    trips = 0 if start is False else None if M is None else _trips(M)
    if start is False or start is True:
        cond = None
    this = _Loop(node, body, trips, M, cond, v_initial)
    if len(body.input) != 2 + len(v_initial) or this.scans < 0:
        raise Unsupported(
            f"a body of {len(body.input)} inputs and {len(body.output)} outputs does not fit {len(v_initial)} carried tensors"
        )
    known_steps = cond is None and isinstance(trips, int) and trips <= UNROLLED
    if not known_steps and (growing := _growing(body, v_initial)):
        return _collected(M, cond if start is None else p.literal(start), v_initial, body, node, growing)
    static = all(isinstance(v, Value) for v in v_initial)
    if not static or (reading().options.get("unroll") and isinstance(trips, int) and 0 < trips <= UNROLLED):
        return _unrolled(this)
    reasons = node.scope.reader.reasons
    before = len(reasons)
    try:
        return _rolled(this)
    except (_Changes, Poisoned):  # a body may be lowered where the number of the step is known
        if not isinstance(trips, int) or not 0 < trips <= UNROLLED or cond is not None:
            raise
        del reasons[before:]
        return _unrolled(this)


@dataclass(frozen=True, slots=True)
class _Growing:
    """A carried tensor or sequence that nothing but the end of a step reads, where one more piece joins it."""

    grower: str  # the result of the node that joins them
    piece: str
    axis: int | None  # of a tensor; None for a sequence
    in_front: bool


def _growing(body: GraphProto, initial: Sequence[Argument]) -> dict[int, _Growing]:
    """What the steps of a loop only collect, by its place among the carried."""
    makers = {o: n for n in body.node for o in n.output}
    reads = Counter(_names_read(body))
    found = {}
    for i, first in enumerate(initial):
        own, after = body.input[2 + i].name, body.output[1 + i].name
        while after in makers and makers[after].op_type == "Identity" and reads[after] == 1:
            after = makers[after].input[0]
        maker = makers.get(after)
        if (
            maker is None
            or maker.domain not in ("", "ai.onnx")
            or reads[own] != 1
            or reads[after] != 1
            or own not in maker.input
        ):
            continue
        if (
            maker.op_type == "SequenceInsert"
            and len(maker.input) == 2
            and isinstance(first, Tensors)
            and not isinstance(first, Stack)
        ):
            if maker.input[0] == own and not first.items:
                found[i] = _Growing(after, maker.input[1], None, False)
        elif maker.op_type == "Concat" and len(maker.input) == 2 and isinstance(first, Value):
            at = list(maker.input).index(own)
            axis = next(a.i for a in maker.attribute if a.name == "axis")
            found[i] = _Growing(after, maker.input[1 - at], axis + first.rank if axis < 0 else axis, at == 1)
    return found


def _names_read(graph: GraphProto) -> Iterator[str]:
    """Every name that is read, as often as it is, in nested graphs too."""
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            for nested in (attribute.g, *attribute.graphs):
                yield from _names_read(nested)
    yield from (o.name for o in graph.output)


def _collected(
    M: Value | None,
    cond: Value | None,
    initial: Sequence[Argument],
    body: GraphProto,
    node: Node,
    growing: Mapping[int, _Growing],
) -> tuple[Argument, ...]:
    """The loop with what its steps collect as scan outputs, which are put together behind it."""
    count = len(initial)
    kept = [i for i in range(count) if i not in growing]
    inner = GraphProto()
    inner.CopyFrom(body)
    growers = {g.grower for g in growing.values()}
    _keep(inner.node, [k for k, n in enumerate(body.node) if not growers & set(n.output)])
    _keep(inner.input, [0, 1, *(2 + i for i in kept)])
    _keep(inner.output, [0, *(1 + i for i in kept), *range(1 + count, len(body.output))])
    for g in growing.values():
        inner.output.add(name=g.piece)
    found = loop(M, cond, *(initial[i] for i in kept), body=inner, node=node)
    pieces = _values(found[len(found) - len(growing) :], "a piece that a loop collects")
    results: list[Argument] = [None] * count
    for i, value in zip(kept, found, strict=False):
        results[i] = value
    for (i, g), piece in zip(growing.items(), pieces, strict=True):
        first = initial[i]
        if not isinstance(first, Value):
            results[i] = Stack(piece)
            continue
        assert g.axis is not None
        parts = [first, laid_out(p.reverse(piece, axes=(0,)) if g.in_front else piece, g.axis)]
        results[i] = joined(parts[::-1] if g.in_front else parts, g.axis)
    return (*results, *found[len(kept) : len(found) - len(growing)])


def _keep(field: Any, places: Sequence[int]) -> None:
    """Only the entries of a repeated field at these places."""
    left = [field[i] for i in places]
    entries = [type(e).FromString(e.SerializeToString()) for e in left]
    del field[:]
    field.extend(entries)


def _trips(m: Value) -> Dim | None:
    """The trip count where it is known; at least 0."""
    array = known(m)
    if array is None or array.size != 1:
        return None
    count = array.reshape(()).item() if array.dtype != object else simplest(array.reshape(())[()])
    try:
        return count if at_least(count, 0) else 0
    except InconclusiveDim:
        return dmax(count, 0)


def _unrolled(this: _Loop) -> tuple[Argument, ...]:
    """The steps one after the other, in place."""
    if this.start is not None or not isinstance(this.trips, int) or this.trips > UNROLLED:
        raise Unsupported(
            "a loop that carries a sequence, or a tensor whose shape changes, can only be unrolled: its trip count must be known "
            f"when the model is read, and at most {UNROLLED}"
        )
    state, slices = list(this.state), [list[Value]() for _ in range(this.scans)]
    for i in range(this.trips):
        scope = this.node.scope.child(_own_name(this.node))
        names = [v.name for v in this.body.input]
        scope.entries.update(zip(names, [p.literal(i, i64), p.literal(True), *state], strict=True))
        results = scope.run(this.body)
        goes_on = _known_bool(_values(results[:1], "the condition of a loop")[0])
        if goes_on is None:
            raise Unsupported(
                f"unrolling needs a condition that is known at every step; that of step {i} depends on data"
            )
        state = results[1 : 1 + len(state)]
        for pieces, piece in zip(slices, _values(results[1 + len(state) :], "a scan output"), strict=True):
            pieces.append(c.unsqueeze(piece, (0,)))
        if not goes_on:
            break
    if any(not pieces for pieces in slices):
        raise Unsupported("the scan output of a loop without steps has a size only where the loop is not unrolled")
    return (*state, *(p.concat(*pieces, axis=0) for pieces in slices))


def _rolled(this: _Loop) -> tuple[Argument, ...]:
    """The loop as one node. What the body hands on as it is becomes a constant of it."""
    state = _values(this.state, "a carried tensor")
    names = [v.name for v in this.body.input]
    same = _handed_on(this.body, len(state))
    carried = [i for i in range(len(state)) if i not in same]
    inputs = [(names[0], TensorType(i64, ())), *((names[2 + i], _type(state[i])) for i in carried)]
    on: list[bool | None] = []

    def build(scope: Scope, given: tuple[Value, ...]) -> Iterator[tuple[str, Value]]:
        entries: dict[str, Value] = {names[0]: given[0], names[1]: p.literal(True)}
        entries |= {names[2 + i]: v for i, v in zip(carried, given[1:], strict=True)}
        entries |= {names[2 + i]: scope.brought(state[i], this.node.scope, names[2 + i]) for i in same}
        scope.entries.update(entries)
        results = _values(scope.run(this.body), "an output of a loop's body")
        on.append(_known_bool(results[0]))
        for i, before in zip(carried, given[1:], strict=True):
            _unchanged(names[2 + i], before, results[1 + i])
            yield f"next_{names[2 + i]}", results[1 + i]
        yield from ((f"slice{i}", v) for i, v in enumerate(results[1 + len(state) :]))
        yield "goes_on", _scalar(results[0])

    nested = this.node.scope.nested(_own_name(this.node), inputs, build)
    initial = [state[i] for i in carried]
    trips = this.trips
    if on[0] is False:  # the first step is the last
        trips = 1 if trips is None else dmin(trips, 1)
    elif on[0] is None and (counted := _steps_of(nested.graph, initial)) is not None:
        trips = counted if trips is None else dmin(trips, counted)
    elif on[0] is None:
        this = replace(this, open=True)
    this = replace(this, trips=trips)
    if trips is not None and this.start is None and not this.open:
        found = _counted(nested, initial, trips)
    else:
        found = _conditional(this, nested, initial)
    last = dict(zip(carried, found, strict=False))
    return (*(last.get(i, state[i]) for i in range(len(state))), *found[len(carried) :])


def _handed_on(body: GraphProto, count: int) -> list[int]:
    """The carried tensors that the body hands on as they are."""
    source = {n.output[0]: n.input[0] for n in body.node if n.op_type == "Identity"}
    found = []
    for i in range(count):
        name = body.output[1 + i].name
        while name in source:
            name = source[name]
        if name == body.input[2 + i].name:
            found.append(i)
    return found


def _steps_of(graph: Graph, initial: Sequence[Value]) -> Dim | None:
    """How many steps a loop makes whose condition only counts: `while i < n`, in any arithmetic on counters and sizes; None where it does more.

    The first step is made in any case. Counters are tensors that grow by a constant from a known start.
    """
    step, number = dim("step", least=0), _object(dim("step", least=0))
    once = Facts()
    for v in graph.inputs[1 + len(initial) :]:
        if (array := known(v)) is not None:
            once.tell(v, array)
    counters = [
        v for v, first in zip(graph.inputs[1:], initial, strict=False) if v.rank == 0 and known(first) is not None
    ]
    for k, v in enumerate(counters):
        once.tell(v, _object(dim(f"counter {k}", least=0)))
    every = Facts()
    every.tell(graph.inputs[0], number)
    for v in graph.inputs[1 + len(initial) :]:
        if (array := known(v)) is not None:
            every.tell(v, array)
    results = list(graph.outputs.values())
    for j, first in enumerate(initial):
        v, after, start = graph.inputs[1 + j], once(results[j]), known(first)
        if v not in counters or after is None or start is None:
            continue
        slope = simplest(after.reshape(())[()] - dim(f"counter {counters.index(v)}", least=0))
        if isinstance(slope, int):
            every.tell(
                v, _object(simplest(start.reshape(()).item() if start.dtype != object else start[()]) + slope * step)
            )
    found: list[Dim] = []
    for test in _conjuncts(graph.outputs["goes_on"]):
        steps = _first_failure(test, every, step)
        if steps is None:
            return None
        found += steps
    least = None
    for n in found:
        least = n if least is None else dmin(least, n)
    return least


def _object(value: Any) -> np.ndarray:
    array = np.empty((), object)
    array[()] = value
    return array


def _conjuncts(test: Value) -> Iterator[Value]:
    if test.primitive.name == "logical_and":
        for o in test.operands:
            yield from _conjuncts(o)
    elif test.primitive.name == "reshape":
        yield from _conjuncts(test.operands[0])
    else:
        yield test


def _first_failure(test: Value, facts: Facts, step: sympy.Symbol) -> list[Dim] | None:
    """After how many steps a comparison fails first: none where it never does, None where that is not known."""
    held = facts(test)
    if held is not None and held.dtype != object:
        return [] if bool(held.reshape(())) else [1]
    if test.primitive.name not in ("less", "less_equal"):
        return None
    left, right = (facts(o) for o in test.operands)
    if left is None or right is None or left.size != 1 or right.size != 1:
        return None
    gap = sympy.expand(sympy.sympify(right.reshape(())[()]) - sympy.sympify(left.reshape(())[()]))
    slope = simplest(-gap.coeff(step, 1))
    start = sympy.expand(gap + slope * step)
    if not isinstance(slope, int) or slope < 1 or start.has(step):
        return None
    start = simplest(start)
    if not isinstance(start, int | sympy.Expr):
        return None
    holds = ceildiv(start, slope) if test.primitive.name == "less" else floordiv(simplest(start + slope), slope)
    try:
        holds = holds if at_least(holds, 0) else 0
    except InconclusiveDim:
        holds = dmax(holds, 0)
    return [simplest(holds + 1)]


def _unchanged(name: str, before: Value, after: Value) -> None:
    why = f"a loop keeps the shape of {name!r}"
    changes = (
        f"the loop changes {name!r} from {before.type!r} to {after.type!r}: such a loop is unrolled, for which the number of its steps must be known "
        "when the model is read"
    )
    if before.dtype is not after.dtype or before.rank != after.rank:
        raise _Changes(changes)
    try:
        require_same_shape(before.shape, after.shape, why)
    except DimError as error:
        raise _Changes(changes) from error


def _counted(nested: Nested, state: Sequence[Value], trips: Dim) -> tuple[Value, ...]:
    """A scan over the step numbers. Tensors that turn out to be handed on as they are become constants."""
    graph, n = nested.graph, len(state)
    results = list(graph.outputs.items())[:-1]
    index, entered, captured = graph.inputs[0], graph.inputs[1 : 1 + n], graph.inputs[1 + n :]
    kept = [i for i in range(n) if results[i][1] is not entered[i]]
    same = [i for i in range(n) if i not in kept]
    body = graph.with_(
        inputs=(*(entered[i] for i in kept), index, *(entered[i] for i in same), *captured),
        outputs=dict([*(results[i] for i in kept), *results[n:]]),
    )
    found = looped(
        [state[i] for i in kept], [p.iota(trips)], [*(state[i] for i in same), *nested.captured], body, length=trips
    )
    last = dict(zip(kept, found, strict=False))
    return (*(last.get(i, state[i]) for i in range(n)), *found[len(kept) :])


def _conditional(this: _Loop, nested: Nested, state: Sequence[Value]) -> tuple[Value, ...]:
    """A loop that may stop on what it computes: a scan where its steps are bounded, else a `while`."""
    most = reading().options.get("max_trips")
    bound = this.trips
    if bound is not None and not (isinstance(bound, sympy.Expr) or bound <= BOUNDED):
        bound = None
    if most is not None:
        bound = most if bound is None else dmin(bound, most)
    running = p.literal(True) if this.start is None else _scalar(this.start)
    count = None if this.count is None else _scalar(p.cast(this.count, dtype=i64))
    if count is None and this.trips is not None:
        count = p.dim(this.trips)
    if bound is not None:
        return _masked(nested, state, running, count, bound, _own_name(this.node))
    if this.scans:
        raise Unsupported(
            "the scan outputs of a loop whose number of steps depends on data have no size before it runs: read the model with max_trips=N "
            "(--max-trips N), or give the trip count as a constant or as a size, and a condition that stays true"
        )
    return _while(nested, state, running, count)


def _step(graph: Graph, i: Value, state: Sequence[Value], captured: Sequence[Value]) -> tuple[list[Value], Value]:
    *after, goes_on = inline(graph, (i, *state, *captured))
    return after, goes_on


def _while(nested: Nested, state: Sequence[Value], running: Value, count: Value | None) -> tuple[Value, ...]:
    n, graph = len(state), nested.graph
    consts = [*([] if count is None else [count]), *nested.captured]
    inputs = [("step", TensorType(i64, ())), ("running", TensorType(bool_, ()))]
    inputs += [(v.params["name"], _type(v)) for v in graph.inputs[1 : 1 + n]]
    inputs += [] if count is None else [("trips", TensorType(i64, ()))]
    inputs += [(v.params["name"], _type(v)) for v in graph.inputs[1 + n :]]
    inputs = _unlike(inputs)

    def test(i: Value, on: Value, *rest: Value) -> list[Value]:
        return [on if count is None else p.logical_and(on, p.less(i, rest[n]))]

    def step(i: Value, on: Value, *rest: Value) -> list[Value]:
        captured = rest[n:] if count is None else rest[n + 1 :]
        after, goes_on = _step(graph, i, rest[:n], captured)
        return [p.add(i, p.literal(1, i64)), goes_on, *after]

    names = ["next_step", "next_running", *list(graph.outputs)[:n]]
    tests = p.body_of(test, inputs, outputs=["goes_on"], name="test")
    steps = p.body_of(step, inputs, outputs=names, name="step")
    return p.while_([p.literal(0, i64), running, *state], consts, tests, steps)[2:]


def _masked(
    nested: Nested, state: Sequence[Value], running: Value, count: Value | None, bound: Dim, name: str
) -> tuple[Value, ...]:
    """A scan of the most steps, in which the body only runs while the loop goes on. Floats become NaN where it has not ended by then.

    Of the slices those of steps that ran are taken; how many these are is a size that depends on data.
    """
    n, graph = len(state), nested.graph
    slices = list(graph.outputs.values())[n:-1]
    consts = [*([] if count is None else [count]), *nested.captured]
    extra = 0 if count is None else 1
    bodies = _unlike([("i", TensorType(i64, ())), *((v.params["name"], _type(v)) for v in graph.inputs[1:])])
    titles = [*list(graph.outputs)[:-1], "goes_on"]

    def act(i: Value, *rest: Value) -> list[Value]:
        after, goes_on = _step(graph, i, rest[:n], rest[n:])
        return [*after, goes_on]

    def stay(i: Value, *rest: Value) -> list[Value]:
        return [*rest[:n], *(p.full(0, v.dtype, v.shape) for v in slices), p.literal(False)]

    acting, staying = (p.body_of(f, bodies, outputs=titles, name=t) for f, t in ((act, "step"), (stay, "stopped")))

    def step(*given: Value) -> list[Value]:
        on, before, i, rest = given[0], given[1 : 1 + n], given[1 + n], given[2 + n :]
        runs = on if count is None else p.logical_and(on, p.less(i, rest[0]))
        *after, goes_on = p.cond(runs, [i, *before, *rest[extra:]], acting, staying)
        return [goes_on, *after, runs]

    inputs = [("running", TensorType(bool_, ())), *((v.params["name"], _type(v)) for v in graph.inputs[1 : 1 + n])]
    inputs += [("i", TensorType(i64, ())), *([("trips", TensorType(i64, ()))] * extra)]
    inputs += [(v.params["name"], _type(v)) for v in graph.inputs[1 + n :]]
    body = p.body_of(step, _unlike(inputs), outputs=["next_running", *titles[:-1], "ran"], name="bounded")
    on, *found, ran = looped([running, *state], [p.iota(bound)], consts, body, length=bound)
    if slices:
        places = p.nonzero(ran, size=reading().fresh_dim(f"{name}_steps"))
        found[n:] = [p.gather(v, places, axis=0) for v in found[n:]]
    unfinished = on if count is None else p.logical_and(on, p.less(p.dim(bound), count))
    return tuple(_nan_where(unfinished, v) for v in found)


def _nan_where(bad: Value, x: Value) -> Value:
    if not x.dtype.floating:
        return x
    return p.select(p.broadcast(bad, shape=x.shape, axes=()), p.number(float("nan"), x), x)


def _unlike(inputs: Sequence[tuple[str, TensorType]]) -> list[tuple[str, TensorType]]:
    """Inputs with names unlike each other."""
    seen: set[str] = set()
    found = []
    for name, type_ in inputs:
        while name in seen:
            name += "_"
        seen.add(name)
        found.append((name, type_))
    return found


# ---- Scan ------------------------------------------------------------------------------------------------------------------------------


def _axis(axis: int, rank: int, what: str) -> int:
    if not -rank <= axis < rank:
        raise Unsupported(f"{what} axis {axis} is outside rank {rank}")
    return axis % rank


def _front(x: Value, axis: int) -> Value:
    """`x` with an axis moved to the front."""
    return x if axis == 0 else p.transpose(x, perm=(axis, *(a for a in range(x.rank) if a != axis)))


def _each(given: Sequence[int], count: int, what: str) -> Sequence[int]:
    if given and len(given) != count:
        raise Unsupported(f"{what} has {len(given)} entries, {count} are required")
    return given or (0,) * count


def _scan_body(node: Node, body: GraphProto, state: Sequence[TensorType], slices: Sequence[TensorType]) -> Nested:
    names = [v.name for v in body.input]
    if len(names) != len(state) + len(slices):
        raise Unsupported(f"the body has {len(names)} inputs, {len(state) + len(slices)} are required")

    def build(scope: Scope, given: tuple[Value, ...]) -> Iterator[tuple[str, Value]]:
        scope.entries.update(zip(names, given, strict=True))
        results = _values(scope.run(body), "an output of a scan's body")
        for name, before, after in zip(names, given[: len(state)], results, strict=False):
            _unchanged(name, before, after)
        yield from ((f"next_{n}", v) for n, v in zip(names[: len(state)], results, strict=False))
        yield from ((f"slice{i}", v) for i, v in enumerate(results[len(state) :]))

    return node.scope.nested(_own_name(node), list(zip(names, (*state, *slices), strict=True)), build)


@lowers("Scan", since=9)
def scan(
    *initial_state_and_scan_inputs: Value, body: GraphProto, num_scan_inputs: int, scan_input_axes: tuple[int, ...] = (),
    scan_input_directions: tuple[int, ...] = (), scan_output_axes: tuple[int, ...] = (), scan_output_directions: tuple[int, ...] = (),
    node: Node,
) -> tuple[Value, ...]:  # fmt: skip
    """for each slice: state, result = body(state, slice); the last state, and the results stacked"""
    cut = len(initial_state_and_scan_inputs) - num_scan_inputs
    if num_scan_inputs < 1 or cut < 0:
        raise Unsupported(f"num_scan_inputs is {num_scan_inputs}, with {len(initial_state_and_scan_inputs)} inputs")
    state, given = initial_state_and_scan_inputs[:cut], initial_state_and_scan_inputs[cut:]
    axes = [
        _axis(a, x.rank, "scan input")
        for a, x in zip(_each(scan_input_axes, len(given), "scan_input_axes"), given, strict=True)
    ]
    ways = _each(scan_input_directions, len(given), "scan_input_directions")
    backward = all(ways)
    xs = []
    for x, axis, way in zip(given, axes, ways, strict=True):
        x = _front(x, axis)
        xs.append(p.reverse(x, axes=(0,)) if way and not backward else x)
    length = xs[0].shape[0]
    for x in xs[1:]:
        length = require_equal(length, x.shape[0], "the sequences of a Scan have one length")
    nested = _scan_body(node, body, [_type(s) for s in state], [TensorType(x.dtype, x.shape[1:]) for x in xs])
    results = looped(state, xs, nested.captured, nested.graph, length=length, reverse=backward)
    stacks = results[len(state) :]
    out_axes = _each(scan_output_axes, len(stacks), "scan_output_axes")
    out_ways = _each(scan_output_directions, len(stacks), "scan_output_directions")
    placed = []
    for y, axis, way in zip(stacks, out_axes, out_ways, strict=True):
        turned = p.reverse(y, axes=(0,)) if bool(way) != backward else y
        placed.append(back(turned, _axis(axis, y.rank, "scan output")))
    return (*results[: len(state)], *placed)


@lowers("Scan", since=8)
def scan_8(
    sequence_lens: Value | None, *initial_state_and_scan_inputs: Value, body: GraphProto, num_scan_inputs: int,
    directions: tuple[int, ...] = (), node: Node,
) -> tuple[Value, ...]:  # fmt: skip
    """for each batch, for each slice: state, result = body(state, slice)"""
    cut = len(initial_state_and_scan_inputs) - num_scan_inputs
    if num_scan_inputs < 1 or cut < 0:
        raise Unsupported(f"num_scan_inputs is {num_scan_inputs}, with {len(initial_state_and_scan_inputs)} inputs")
    state, xs = initial_state_and_scan_inputs[:cut], initial_state_and_scan_inputs[cut:]
    ways = _each(directions, len(xs), "directions")
    backward = all(ways)
    if sequence_lens is not None and any(ways):
        raise Unsupported(
            "sequence_lens with a reverse direction is not handled: reverse the input with ReverseSequence"
        )
    xs = tuple(p.reverse(x, axes=(1,)) if way and not backward else x for x, way in zip(xs, ways, strict=True))
    batch, length = xs[0].shape[:2]
    for x in (*state, *xs):
        batch = require_equal(batch, x.shape[0], "the inputs of a Scan have one batch size")
    for x in xs:
        length = require_equal(length, x.shape[1], "the sequences of a Scan have one length")
    states = [TensorType(s.dtype, s.shape[1:]) for s in state]
    nested = _scan_body(node, body, states, [TensorType(x.dtype, x.shape[2:]) for x in xs])
    graph = nested.graph if sequence_lens is None else _with_length(nested.graph, len(state), len(xs))
    sequences = [TensorType(x.dtype, x.shape[1:]) for x in xs]
    lens = [] if sequence_lens is None else [p.cast(sequence_lens, dtype=i64)]
    inputs = [(f"state{i}", t) for i, t in enumerate(states)] + [(f"sequence{i}", t) for i, t in enumerate(sequences)]
    inputs += [("length", TensorType(i64, ()))] * len(lens)
    inputs += [(f"captured{i}", _type(v)) for i, v in enumerate(nested.captured)]

    def one(*given: Value) -> Sequence[Value]:
        own, rest = given[: len(state)], given[len(state) + len(xs) :]
        slices = [*given[len(state) : len(state) + len(xs)], *([p.iota(length)] if lens else [])]
        found = looped(own, slices, rest, graph, length=length, reverse=backward)
        return [*found[: len(state)], *(p.reverse(y, axes=(0,)) if backward else y for y in found[len(state) :])]

    outer = p.body_of(one, inputs, name="batch")
    return looped([], [*state, *xs, *lens], nested.captured, outer, length=batch)


def _with_length(graph: Graph, states: int, slices: int) -> Graph:
    """The body with a step number after its slices and a length after that: from there on states stay and results are 0."""
    inputs = [(v.params["name"], _type(v)) for v in graph.inputs]
    cut = states + slices
    inputs = _unlike([*inputs[:cut], ("step", TensorType(i64, ())), ("length", TensorType(i64, ())), *inputs[cut:]])

    def step(*given: Value) -> list[Value]:
        results = inline(graph, (*given[:cut], *given[cut + 2 :]))
        inside = p.less(given[cut], given[cut + 1])
        found = []
        for i, r in enumerate(results):
            other = given[i] if i < states else p.full(0, r.dtype, r.shape)
            found.append(p.select(p.broadcast(inside, shape=r.shape, axes=()), r, other))
        return found

    return p.body_of(step, inputs, outputs=list(graph.outputs), name=graph.name)
