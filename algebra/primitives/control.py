"""Control flow: loops and branches whose bodies are nested graphs.

A node of these has several results, which `item` takes apart. Its bodies are `Graph`s in its parameters, closed: what a body needs from outside is an
operand of the node and an input of the body. Symbolic dims are the exception; a body shares them with the graph around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import primitives as p
from ..dims import Dim, same_shape, show, simplest
from ..errors import PullbackError, TypeMismatch
from ..graph import Builder, Graph, Value, bind, building, current, inline, reachable
from ..types import TensorType, TupleType, Type, bool_
from .record import Joint, Primitive

if TYPE_CHECKING:
    from ..evaluate import Closed


# ---- bodies ----------------------------------------------------------------------------------------------------------------------------


@contextmanager
def _apart() -> Iterator[Builder]:
    """A new builder for a body, whose nodes have the origin of what is being built around it."""
    origin = current().origin
    with building() as builder:
        builder.origin = origin
        yield builder


def body_of(
    build: Callable[..., Sequence[Value]], inputs: Sequence[tuple[str, TensorType]], *, outputs: Sequence[str] = (), name: str = "body"
) -> Graph:  # fmt: skip
    """The body that `build` makes of its inputs; results are called `outputs`, then `result0`, `result1`, ..."""
    with _apart():
        given = tuple(p.input(n, t) for n, t in inputs)
        results = tuple(build(*given))
        names = [*outputs, *(f"result{i}" for i in range(len(outputs), len(results)))]
        return Graph(given, dict(zip(_distinct(names, []), results, strict=True)), name)


def _distinct(names: Sequence[str], taken: Sequence[str]) -> list[str]:
    """The names, each made unlike all before it."""
    seen, found = set(taken), []
    for name in names:
        own, n = name, 1
        while own in seen:
            own, n = f"{name}_{n}", n + 1
        seen.add(own)
        found.append(own)
    return found


def _closed(body: Graph | Closed, arrays: Sequence[np.ndarray]) -> Closed:
    """A body as numpy calls it; sizes come from the graph around it, or from what is fed where there is none."""
    from ..evaluate import Closed, bind_dims

    if isinstance(body, Closed):
        return body
    return Closed(body, bind_dims(body, {v.params["name"]: a for v, a in zip(body.inputs, arrays, strict=True)}))


def _check(kind: str, given: Sequence[Type], wanted: Sequence[TensorType]) -> None:
    """The types that a body has must be those around it, one by one."""
    if len(given) != len(wanted):
        raise TypeMismatch(f"{kind}: {len(wanted)} are required, found {len(given)}")
    for i, (a, b) in enumerate(zip(given, wanted, strict=True)):
        if not isinstance(a, TensorType) or a.dtype is not b.dtype or not same_shape(a.shape, b.shape):
            raise TypeMismatch(f"{kind} {i}: {b!r} is required, found {a!r}")


def _types(values: Sequence[Value]) -> list[TensorType]:
    found = []
    for v in values:
        assert isinstance(v.type, TensorType), "a body takes and gives tensors"
        found.append(v.type)
    return found


def _results(body: Graph) -> list[Value]:
    return list(body.outputs.values())


def _used(bodies: Sequence[Graph], always: int) -> list[int]:
    """The places of inputs that some of the bodies (of equal signatures) read, and of the first `always`."""
    reached = {id(v) for body in bodies for v in reachable(body.outputs.values())}
    return [i for i in range(len(bodies[0].inputs)) if i < always or any(id(b.inputs[i]) in reached for b in bodies)]


def _keeping(body: Graph, places: Sequence[int]) -> Graph:
    return body.with_(inputs=tuple(body.inputs[i] for i in places))


# ---- scan ------------------------------------------------------------------------------------------------------------------------------


def _scan_type(*operands: TensorType, body: Graph, carries: int, xs: int, length: Dim, reverse: bool) -> TupleType:
    if len(operands) < carries + xs:
        raise TypeMismatch(f"{carries} carries and {xs} sequences are required, found {len(operands)} operands")
    slices = []
    for x in operands[carries : carries + xs]:
        if x.rank < 1 or not same_shape(x.shape[:1], (length,)):
            raise TypeMismatch(f"a sequence of {show(length)} slices is required, found {x!r}")
        slices.append(TensorType(x.dtype, x.shape[1:]))
    inner = (*operands[:carries], *slices, *operands[carries + xs :])
    _check("input of the body", inner, _types(body.inputs))
    results = _types(_results(body))
    _check("carry of the body", results[:carries], operands[:carries])
    return TupleType((*operands[:carries], *(TensorType(y.dtype, (length, *y.shape)) for y in results[carries:])))


def _np_scan(
    *operands: np.ndarray, body: Graph | Closed, carries: int, xs: int, length: int, reverse: bool
) -> tuple[np.ndarray, ...]:
    state, sequences, consts = operands[:carries], operands[carries : carries + xs], operands[carries + xs :]
    first = (*state, *(np.zeros(x.shape[1:], x.dtype) for x in sequences), *consts)
    step = _closed(body, first)
    stacked = [np.zeros((length, *shape), dtype) for shape, dtype in step.results()[carries:]]
    for t in reversed(range(length)) if reverse else range(length):
        results = step(*state, *(x[t] for x in sequences), *consts)
        state = results[:carries]
        for whole, y in zip(stacked, results[carries:], strict=True):
            whole[t] = y
    return (*state, *stacked)


def _needed(body: Graph, carries: int) -> list[int]:
    """The carries that a pullback of the body reads: all but the running sums, which are only added to."""
    results, readers = _results(body), dict[int, list[Value]]()
    for node in reachable(results):
        for o in node.operands:
            readers.setdefault(id(o), []).append(node)

    def is_sum(i: int) -> bool:
        total = results[i]
        return readers.get(id(body.inputs[i])) == [total] and total.primitive.name == "add" and id(total) not in readers

    return [i for i in range(carries) if not is_sum(i)]


def _saves(body: Graph, carries: int) -> bool:
    """Whether the last results of a body are the carries it needs, as they came in."""
    results, needed = _results(body), _needed(body, carries)
    tail = results[len(results) - len(needed) :]
    return len(results) >= carries + len(needed) and all(a is body.inputs[i] for a, i in zip(tail, needed, strict=True))


def _saving(body: Graph, carries: int) -> Graph:
    """The body with the carries as they came in as further results: all that its pullback needs of the steps."""
    if _saves(body, carries):
        return body
    entered = [body.inputs[i] for i in _needed(body, carries)]
    names = _distinct([f"saved_{v.params['name']}" for v in entered], [*body.outputs])
    return body.with_(outputs={**body.outputs, **dict(zip(names, entered, strict=True))})


def _active_carries(body: Graph, carries: int, wanted: Sequence[int]) -> list[int]:
    """The carries through which a wanted operand reaches a later step."""
    from ..calculus.vjp import active_nodes

    found = {i for i in wanted if i < carries}
    results = _results(body)
    while True:
        active = active_nodes(body.nodes, [body.inputs[i] for i in {*found, *wanted}])
        grown = {i for i in range(carries) if results[i].dtype.floating and id(results[i]) in active}
        if grown <= found:
            return sorted(found)
        found |= grown


def _scan_vjp(
    cts: tuple[Value | None, ...], y: Value, *operands: Value, wanted: tuple[int, ...], body: Graph, carries: int, xs: int, length: Dim,
    reverse: bool,
) -> tuple[Value | None, ...]:  # fmt: skip
    """The scan in the other direction, over the carries that came into each step; it carries their cotangents and the sums for the constants."""
    from ..calculus.vjp import vjp

    wanted = tuple(i for i in wanted if operands[i].dtype.floating)
    saved = _saved(y, operands, body, carries, xs, length, reverse)
    active = _active_carries(body, carries, wanted)
    ct_ys = [k for k in range(carries, len(cts)) if cts[k] is not None]
    if not wanted or not (ct_ys or any(cts[i] is not None for i in active)):
        return (None,) * len(operands)
    sums = [i for i in wanted if i >= carries + xs]
    slices = [i for i in wanted if carries <= i < carries + xs]
    results = _results(body)
    inner = _types(body.inputs)

    def step(*values: Value) -> list[Value]:
        groups = iter(values)
        ct_carry = [next(groups) for _ in active]
        total = [next(groups) for _ in sums]
        entered = [next(groups) if i in saved else p.input(unread[i], inner[i]) for i in range(carries)]
        slice_ = [next(groups) for _ in range(xs)]
        seeds = [*ct_carry, *(next(groups) for _ in ct_ys)]
        given = [*entered, *slice_, *groups]
        made = inline(body, given)
        got = iter(vjp([made[i] for i in (*active, *ct_ys)], seeds, [given[i] for i in (*active, *sums, *slices)]))
        passed = [_or_zero(next(got), given[i]) for i in active]
        added = [t if (ct := next(got)) is None else p.add(t, ct) for t in total]
        return [*passed, *added, *(_or_zero(next(got), given[i]) for i in slices)]

    names = [v.params["name"] for v in body.inputs]
    inputs = [(f"ct_{names[i]}", inner[i]) for i in active]
    inputs += [(f"sum_{names[i]}", inner[i]) for i in sums]
    inputs += [(names[i], inner[i]) for i in (*saved, *range(carries, carries + xs))]
    inputs += [(f"ct_{list(body.outputs)[k]}", _types([results[k]])[0]) for k in ct_ys]
    inputs += [(names[i], inner[i]) for i in range(carries + xs, len(inner))]
    unique = _distinct([n for n, _ in inputs], [])
    unread = _distinct(names, unique)  # stand for running sums, whose values no rule asks for
    titles = [f"next_ct_{names[i]}" for i in active] + [f"next_sum_{names[i]}" for i in sums]
    titles += [f"grad_{names[i]}" for i in slices]
    backward = body_of(
        step, [(n, t) for n, (_, t) in zip(unique, inputs, strict=True)], outputs=titles, name=f"{body.name}_pullback"
    )

    init = [_or_zero(cts[i], operands[i]) for i in active] + [p.number(0, operands[i]) for i in sums]
    sequences = [*saved.values(), *operands[carries : carries + xs], *(ct for k in ct_ys if (ct := cts[k]) is not None)]
    kept = _used([backward], len(init))
    cut = len(init) + len(sequences)
    everything = [*init, *sequences, *operands[carries + xs :]]
    found = scan(
        init,
        [everything[i] for i in kept if len(init) <= i < cut],
        [everything[i] for i in kept if i >= cut],
        _keeping(backward, kept),
        length=length,
        reverse=not reverse,
    )
    by_operand = dict(zip((*active, *sums, *slices), found, strict=True))
    return tuple(by_operand[i] if i in wanted else None for i in range(len(operands)))


def _saved(
    y: Value, operands: Sequence[Value], body: Graph, carries: int, xs: int, length: Dim, reverse: bool
) -> dict[int, Value]:
    """The stacks of the carries that came into each step, by carry."""
    if not _saves(body, carries):
        full = _saving(body, carries)
        y = bind(scan_p, *operands, body=full, carries=carries, xs=xs, length=length, reverse=reverse)
    assert isinstance(y.type, TupleType)
    needed, count = _needed(body, carries), len(y.type.items)
    return {i: p.item(y, index=count - len(needed) + k) for k, i in enumerate(needed)}


def _or_zero(ct: Value | None, like: Value) -> Value:
    return p.number(0, like) if ct is None else ct


scan_p = Primitive(
    "scan",
    _scan_type,
    _np_scan,
    Joint(_scan_vjp),
    "for each slice: carries, y = body(carries, slice, constants); the last carries, and all y stacked",
)


def scan(
    init: Sequence[Value], xs: Sequence[Value], consts: Sequence[Value], body: Graph, *, length: Dim, reverse: bool = False
) -> tuple[Value, ...]:  # fmt: skip
    """Runs `body` once for each of `length` slices of `xs` (their first axis), from the last to the first where `reverse`.

    The body's inputs are the carries, one slice of each of `xs`, and the constants; its outputs the new carries, then results to stack. Gives the
    last carries and the stacks, where slice t of a stack is the result of the step that saw slice t.
    """
    full = _saving(body, len(init))
    node = bind(scan_p, *init, *xs, *consts, body=full, carries=len(init), xs=len(xs), length=simplest(length), reverse=reverse)  # fmt: skip
    return tuple(p.item(node, index=i) for i in range(len(body.outputs)))


# ---- cond ------------------------------------------------------------------------------------------------------------------------------


def _cond_type(pred: TensorType, *operands: TensorType, then: Graph, otherwise: Graph) -> TupleType:
    if pred.dtype is not bool_ or pred.rank:
        raise TypeMismatch(f"the condition must be bool[], found {pred!r}")
    for branch in (then, otherwise):
        _check("input of a branch", operands, _types(branch.inputs))
    results = _types(_results(then))
    _check("result of the branches", _types(_results(otherwise)), results)
    return TupleType(tuple(results))


def _np_cond(
    pred: np.ndarray, *operands: np.ndarray, then: Graph | Closed, otherwise: Graph | Closed
) -> tuple[np.ndarray, ...]:
    return _closed(then if pred else otherwise, operands)(*operands)


def _cond_vjp(
    cts: tuple[Value | None, ...], y: Value, pred: Value, *operands: Value, wanted: tuple[int, ...], then: Graph, otherwise: Graph
) -> tuple[Value | None, ...]:  # fmt: skip
    """The pullback of the branch that was taken."""
    from ..calculus.vjp import vjp

    places = [i - 1 for i in wanted if i > 0 and operands[i - 1].dtype.floating]
    present = [k for k, ct in enumerate(cts) if ct is not None]
    if not places:
        return (None,) * (1 + len(operands))

    def pulled(branch: Graph) -> Graph:
        def step(*values: Value) -> list[Value]:
            given, seeds = values[: len(operands)], values[len(operands) :]
            made = inline(branch, given)
            got = vjp([made[k] for k in present], seeds, [given[i] for i in places])
            return [_or_zero(ct, given[i]) for ct, i in zip(got, places, strict=True)]

        names = [v.params["name"] for v in branch.inputs]
        titles = list(branch.outputs)
        unique = _distinct([*names, *(f"ct_{titles[k]}" for k in present)], [])
        types = [*_types(branch.inputs), *_types([_results(branch)[k] for k in present])]
        return body_of(
            step, list(zip(unique, types, strict=True)), outputs=[f"grad_{names[i]}" for i in places], name=f"{branch.name}_pullback"
        )  # fmt: skip

    branches = [pulled(then), pulled(otherwise)]
    kept = _used(branches, 0)
    everything = [*operands, *(ct for k in present if (ct := cts[k]) is not None)]
    found = cond(pred, [everything[i] for i in kept], *(_keeping(b, kept) for b in branches))
    by_operand = dict(zip(places, found, strict=True))
    return (None, *(by_operand.get(i) for i in range(len(operands))))


cond_p = Primitive("cond", _cond_type, _np_cond, Joint(_cond_vjp), "then(operands) where the condition holds, else otherwise(operands)")  # fmt: skip


def cond(pred: Value, operands: Sequence[Value], then: Graph, otherwise: Graph) -> tuple[Value, ...]:
    """The results of one of two graphs of the same inputs and result types; only that one runs."""
    node = bind(cond_p, pred, *operands, then=then, otherwise=otherwise)
    return tuple(p.item(node, index=i) for i in range(len(then.outputs)))


# ---- while -----------------------------------------------------------------------------------------------------------------------------


def _while_type(*operands: TensorType, test: Graph, body: Graph, carries: int) -> TupleType:
    for graph in (test, body):
        _check("input of a loop", operands, _types(graph.inputs))
    _check("test of a loop", _types(_results(test)), [TensorType(bool_, ())])
    _check("carry of a loop", _types(_results(body)), operands[:carries])
    return TupleType(operands[:carries])


def _np_while(
    *operands: np.ndarray, test: Graph | Closed, body: Graph | Closed, carries: int
) -> tuple[np.ndarray, ...]:
    state, consts = operands[:carries], operands[carries:]
    goes_on, step = _closed(test, operands), _closed(body, operands)
    while goes_on(*state, *consts)[0]:
        state = step(*state, *consts)
    return tuple(state)


def _while_vjp(
    cts: tuple[Value | None, ...], y: Value, *operands: Value, wanted: tuple[int, ...], **params: Any
) -> tuple[Value | None, ...]:
    """Refused: the steps to go back through are not known before the loop runs."""
    where = f" (node {y.origin.source})" if y.origin.source else ""
    raise PullbackError(
        f"no gradient through a loop whose number of iterations depends on data{where}: the steps to go back through are not known "
        "before it runs; read the model with max_trips=N (--max-trips N) to bound them"
    )


while_p = Primitive("while", _while_type, _np_while, Joint(_while_vjp), "while test(carries): carries = body(carries)")


def while_(init: Sequence[Value], consts: Sequence[Value], test: Graph, body: Graph) -> tuple[Value, ...]:
    """Repeats `body` while `test` holds; both read the carries and the constants. Has no gradient: the number of steps is not known before it runs."""
    node = bind(while_p, *init, *consts, test=test, body=body, carries=len(init))
    return tuple(p.item(node, index=i) for i in range(len(init)))


CONTROL = (scan_p, cond_p, while_p)
