"""Derivatives of graphs.

Each takes a graph and names, and gives the graph with more inputs (seeds) and outputs (derivatives).

The result is a graph like any other, in which every value of the given one stands as it was, so derivatives can be
taken again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .. import primitives as p
from ..composites import unsqueeze
from ..dims import product
from ..errors import PullbackWarning, Refusal
from ..graph import Graph, Role, Value, at, building, current, reachable, values_of
from ..origin import Origin
from ..primitives.control import body_of
from ..types import TensorType, i64
from .vjp import vjp

__all__ = ["gradient", "hessian", "jacobian", "jvp"]

UNROLLED = 16  # a Jacobian of at most this many rows is one pullback per row; a longer one is a loop over rows

Names = Sequence[str] | str | None


# ---- names -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Growing:
    """A graph to which inputs and outputs are added, under names that are not taken."""

    graph: Graph
    inputs: list[Value] = field(default_factory=list)
    outputs: dict[str, Value] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.taken = {*(v.params["name"] for v in self.graph.inputs), *self.graph.outputs, *self.graph.tensors}

    def free(self, name: str) -> str:
        """The name itself, or with a suffix where it is taken."""
        own, n = name, 1
        while own in self.taken:
            own, n = f"{name}_{n}", n + 1
        if own != name:
            self.renamed[name] = own
        self.taken.add(own)
        return own

    def input(self, name: str, like: Value, of: str) -> Value:
        """A new input of role `seed` with the type of a value."""
        name = self.free(name)
        value = p.input(name, TensorType(like.dtype, like.shape), "seed")
        self.inputs.append(value)
        self.roles[name] = Role("seed", of)
        return value

    def output(self, name: str, value: Value, role: str, of: str) -> None:
        name = self.free(name)
        self.outputs[name] = value
        self.roles[name] = Role(role, of)

    def grown(self, suffix: str) -> Graph:
        graph = self.graph
        info = dict(graph.info)
        if self.renamed:
            info["renamed"] = {**info.get("renamed", {}), **self.renamed}
        return graph.with_(
            inputs=(*graph.inputs, *self.inputs),
            outputs={**graph.outputs, **self.outputs},
            roles={**graph.roles, **self.roles},
            name=f"{graph.name}_{suffix}",
            info=info,
        )


def _chosen(graph: Graph, of: Names, wrt: Names) -> tuple[dict[str, Value], dict[str, Value]]:
    """The values to differentiate, and with respect to what.

    A refusal that names every name that is unknown or no float.
    """
    of, wrt = (([n] if isinstance(n, str) else n) for n in (of, wrt))
    outputs = [n for n, v in graph.outputs.items() if v.dtype.floating] if of is None else list(dict.fromkeys(of))
    if wrt is None:
        inputs = graph.parameters or graph.by_role("input")
        names = [v.params["name"] for v in inputs if v.dtype.floating]
    else:
        names = list(dict.fromkeys(wrt))
    found = values_of(graph, [*outputs, *names])
    ys = dict(zip(outputs, found[: len(outputs)], strict=True))
    xs = dict(zip(names, found[len(outputs) :], strict=True))
    discrete = [
        f"{n!r} is {v.type!r}: only floating tensors have derivatives"
        for n, v in {**ys, **xs}.items()
        if not v.dtype.floating
    ]
    if not ys:
        discrete.append("no floating output to differentiate")
    if not xs:
        discrete.append("no floating parameter or input to differentiate with respect to")
    if discrete:
        raise Refusal(f"cannot differentiate {graph.name!r}", discrete)
    return ys, xs


def _upon(graph: Graph, values: Iterable[Value]) -> Graph:
    """The graph as a builder should know it: inner tensors that no output needs as well."""
    extra = {f"{i}": v for i, v in enumerate(values)}
    outputs = {**{f"output {k}": v for k, v in graph.outputs.items()}, **extra}
    return Graph(graph.inputs, outputs, constraints=graph.constraints)


def _backward() -> Origin:
    return Origin("backward", None, ("seed",))


# ---- gradient --------------------------------------------------------------------------------------------------------


def gradient(graph: Graph, of: Names = None, wrt: Names = None, *, seeds: Mapping[str, str] | None = None) -> Graph:
    """The gradient graph: for each `w` of `wrt` the output `grad_{w}`, which is `sum over y of J(y, w)^T seed_y`.

    `of` are outputs or inner tensors (default: every floating output), `wrt` inputs, parameters or inner tensors
    (default: the parameters, or the inputs where there are none). An input `seed_{y}` is added for each `y`; a scalar
    needs none, its seed is 1. `seeds` names them otherwise, and may name an input that is there already, or ask for the
    seed of a scalar. A name that is taken gets a suffix (`info["renamed"]`). A `w` on which no `y` depends gets zeros,
    and a warning.

    >>> from pullback.algebra.text import parse
    >>> print(gradient(parse("graph g(x: f32[N]) { y: f32[N] = sin x return y=y }")))
    graph g_gradient(x: f32[N], @seed(y) seed_y: f32[N]) {
      y: f32[N] = sin x
      grad_x.0: f32[N] = cos x
      grad_x: f32[N] = mul seed_y, grad_x.0
      return y=y, @gradient(x) grad_x=grad_x
    }
    """
    ys, xs = _chosen(graph, of, wrt)
    growing = _Growing(graph)
    with building(_upon(graph, [*ys.values(), *xs.values()])), at(_backward()):
        cts = [_seed(growing, name, y, (seeds or {}).get(name)) for name, y in ys.items()]
        found = vjp(list(ys.values()), cts, list(xs.values()))
        for (name, x), ct in zip(xs.items(), _or_zeros(graph, ys, xs, found), strict=True):
            growing.output(f"grad_{name}", ct, "gradient", name)
            assert ct.type == x.type
    return growing.grown("gradient")


def _seed(growing: _Growing, name: str, y: Value, own: str | None) -> Value:
    if own is not None and own in growing.graph:
        given = growing.graph[own]
        if given.type != y.type:
            raise Refusal(f"cannot seed {name!r}", [f"the seed {own!r} is {given.type!r}, but {name!r} is {y.type!r}"])
        return given
    if own is None and y.rank == 0:
        return p.number(1, y)
    return growing.input(own or f"seed_{name}", y, name)


def _or_zeros(
    graph: Graph, ys: Mapping[str, Value], xs: Mapping[str, Value], cts: Sequence[Value | None]
) -> list[Value]:
    """Zeros, and a warning, where there is no path."""
    lost = [n for n, ct in zip(xs, cts, strict=True) if ct is None]
    if lost:
        warnings.warn(
            f"no differentiable path leads from {', '.join(map(repr, lost))} to {', '.join(map(repr, ys))} "
            f"in {graph.name!r}: zeros",
            PullbackWarning,
            stacklevel=4,
        )
    return [p.number(0, x) if ct is None else ct for x, ct in zip(xs.values(), cts, strict=True)]


# ---- JVP -------------------------------------------------------------------------------------------------------------


def jvp(graph: Graph, of: Names = None, wrt: Names = None) -> Graph:
    """The pushforward: inputs `tangent_{x}` are added, and outputs `tangent_{y} = sum over x of J(y, x) tangent_x`.

    From VJPs alone: `u -> J^T u` is linear, and its VJP at any `u` is `t -> J t`.

    >>> from pullback.algebra.text import parse
    >>> print(jvp(parse("graph g(x: f32[N]) { y: f32[N] = sin x return y=y }")))
    graph g_jvp(x: f32[N], @seed(x) tangent_x: f32[N]) {
      y: f32[N] = sin x
      tangent_y.0: f32[N] = cos x
      tangent_y: f32[N] = mul tangent_x, tangent_y.0
      return y=y, @output(y) tangent_y=tangent_y
    }
    """
    ys, xs = _chosen(graph, of, wrt)
    growing = _Growing(graph)
    with building(_upon(graph, [*ys.values(), *xs.values()])), at(_backward()):
        tangents = [growing.input(f"tangent_{n}", x, n) for n, x in xs.items()]
        dummies = [p.input(f"dummy cotangent {n}", TensorType(y.dtype, y.shape), "seed") for n, y in ys.items()]
        pulled = vjp(list(ys.values()), dummies, list(xs.values()))
        paths = [(ct, t) for ct, t in zip(pulled, tangents, strict=True) if ct is not None]
        pushed = vjp([ct for ct, _ in paths], [t for _, t in paths], dummies)
        found = [p.number(0, y) if t is None else t for y, t in zip(ys.values(), pushed, strict=True)]
        found = _put(found, {id(v): p.number(0, v) for v in dummies})  # what a loop carries along may still hold them
        for name, tangent in zip(ys, found, strict=True):
            growing.output(f"tangent_{name}", tangent, "output", name)
    return growing.grown("jvp")


# ---- Jacobian and Hessian --------------------------------------------------------------------------------------------


def jacobian(graph: Graph, of: Names = None, wrt: Names = None) -> Graph:
    """Outputs `jacobian_{y}_{x}` of shape `(*y.shape, *x.shape)`: the derivative of each element of `y` by each of `x`.

    One pullback for each element of `y`; where these are many, or their number is symbolic, a `scan` over the rows of
    an identity.
    """
    ys, xs = _chosen(graph, of, wrt)
    growing = _Growing(graph)
    with building(_upon(graph, [*ys.values(), *xs.values()])), at(_backward()):
        for name, y in ys.items():
            for (wanted, _), rows in zip(xs.items(), _rows(graph, name, y, xs), strict=True):
                growing.output(f"jacobian_{name}_{wanted}", rows, "gradient", wanted)
    return growing.grown("jacobian")


def hessian(graph: Graph, of: Names = None, wrt: Names = None) -> Graph:
    """Outputs `hessian_{a}_{b}` of shape `(*a.shape, *b.shape)` for all `a` and `b` of `wrt`.

    The second derivatives of one scalar.
    """
    ys, xs = _chosen(graph, of, wrt)
    (_, y), *more = ys.items()
    if more or y.rank:
        found = ", ".join(f"{n}: {v.type!r}" for n, v in ys.items())
        raise Refusal(
            f"no Hessian of {graph.name!r}", [f"one scalar is required, found {found} (name it, or reduce it first)"]
        )
    growing = _Growing(graph)
    with building(_upon(graph, [y, *xs.values()])), at(_backward()):
        slopes = _or_zeros(graph, ys, xs, vjp([y], [p.number(1, y)], list(xs.values())))
        for (a, _), slope in zip(xs.items(), slopes, strict=True):
            for (b, _), rows in zip(xs.items(), _rows(graph, None, slope, xs), strict=True):
                growing.output(f"hessian_{a}_{b}", rows, "gradient", b)
    return growing.grown("hessian")


def _rows(graph: Graph, name: str | None, y: Value, xs: Mapping[str, Value]) -> list[Value]:
    """For each x the derivatives of all elements of y, in y's shape.

    `name` is None where a missing path is no surprise.
    """
    wanted = list(xs.values())
    seed = p.input("row", TensorType(y.dtype, y.shape), "seed")
    pulled = vjp([y], [seed], wanted)
    if name is not None:
        cts = _or_zeros(graph, {name: y}, xs, pulled)
    else:
        cts = [p.number(0, x) if ct is None else ct for x, ct in zip(wanted, pulled, strict=True)]
    count = product(y.shape)
    if isinstance(count, int) and count <= UNROLLED:
        rows = [_at_row(cts, seed, y, i) for i in range(count)]
        stacked = [_stacked([row[i] for row in rows], x) for i, x in enumerate(wanted)]
    else:
        stacked = _looped(cts, seed, y)
    return [p.reshape(s, shape=(*y.shape, *x.shape)) for s, x in zip(stacked, wanted, strict=True)]


def _stacked(rows: Sequence[Value], x: Value) -> Value:
    return p.concat(*(unsqueeze(r, (0,)) for r in rows), axis=0) if rows else p.full(0, x.dtype, (0, *x.shape))


def _one_hot(y: Value, place: Value) -> Value:
    """Zeros of the type of `y`, with 1 at a row-major place."""
    count = product(y.shape)
    chosen = p.equal(p.iota(count), p.broadcast(place, shape=(count,), axes=()))
    return p.reshape(p.select(chosen, p.full(1, y.dtype, (count,)), p.full(0, y.dtype, (count,))), shape=y.shape)


def _put(values: Sequence[Value], places: Mapping[int, Value]) -> list[Value]:
    """What values become when some nodes are replaced."""
    new = dict(places)
    for node in reachable(values):
        operands = tuple(new.get(id(o), o) for o in node.operands)
        if id(node) not in new and any(a is not b for a, b in zip(operands, node.operands, strict=True)):
            with at(node.origin):
                new[id(node)] = current().add(node.primitive, operands, node.params)
    return [new.get(id(v), v) for v in values]


def _at_row(cts: Sequence[Value], seed: Value, y: Value, row: int) -> list[Value]:
    one = p.number(1, y) if y.rank == 0 else _one_hot(y, p.literal(row, i64))
    return _put(cts, {id(seed): one})


def _looped(cts: Sequence[Value], seed: Value, y: Value) -> list[Value]:
    """A scan over the places of y.

    Its body is the pullback of one row, its constants what the pullback reads of the forward pass.
    """
    count = product(y.shape)
    nodes = reachable(cts)
    inside, made = {id(seed)}, set[int]()  # what depends on the row; what is made of nothing but constants
    for node in nodes:
        if any(id(o) in inside for o in node.operands):
            inside.add(id(node))
        elif node.primitive.name in ("literal", "dim", "iota", "broadcast") and all(
            id(o) in made for o in node.operands
        ):
            made.add(id(node))
    outer = inside | made
    read = {o: None for node in nodes if id(node) in inside for o in node.operands if id(o) not in outer}
    varying = [ct for ct in cts if id(ct) in inside]

    def body(place: Value, *residuals: Value) -> list[Value]:
        new = {id(seed): _one_hot(y, place), **{id(v): own for v, own in zip(read, residuals, strict=True)}}
        for node in nodes:
            if id(node) in outer and id(node) not in new:
                new[id(node)] = current().add(node.primitive, tuple(new[id(o)] for o in node.operands), node.params)
        return [new[id(ct)] for ct in varying]

    types = [(f"residual{i}", TensorType(v.dtype, v.shape)) for i, v in enumerate(read)]
    graph = body_of(body, [("place", TensorType(i64, ())), *types], name="row")
    stacks = iter(p.scan([], [p.iota(count)], list(read), graph, length=count) if varying else ())
    return [
        next(stacks)
        if id(ct) in inside
        else p.broadcast(ct, shape=(count, *ct.shape), axes=tuple(range(1, ct.rank + 1)))
        for ct in cts
    ]
