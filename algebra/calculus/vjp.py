"""Pulling cotangents back through values: reverse mode, by the rules of the primitives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .. import primitives as p
from ..errors import TypeMismatch
from ..graph import Value, at, reachable
from ..types import TensorType, TupleType

__all__ = ["Primal", "active_nodes", "vjp"]


def active_nodes(nodes: Sequence[Value], wrt: Sequence[Value]) -> set[int]:
    """Nodes on a differentiable path from a wanted value."""
    active = {id(v) for v in wrt}
    for node in nodes:
        if id(node) in active or not (isinstance(node.type, TupleType) or node.dtype.floating):
            continue
        match node.primitive.vjp:
            case p.Each() | p.Joint():
                passes = any(id(o) in active for o in node.operands)
            case rules if node.primitive.name == "item":
                passes = id(node.operands[0]) in active and bool(rules)
            case rules:
                passes = any(
                    id(o) in active and not isinstance(r, p.NoGrad) for o, r in zip(node.operands, rules, strict=True)
                )
        if passes:
            active.add(id(node))
    return active


class _Cotangents:
    """What has arrived at each node so far; one slot per result for a node with several."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], Value] = {}

    def add(self, node: Value, ct: Value, index: int = 0) -> None:
        key = (id(node), index)
        ct = _fitted(ct, node.type.items[index] if isinstance(node.type, TupleType) else node.type, node)
        before = self._sums.get(key)
        self._sums[key] = ct if before is None else p.add(before, ct)

    def of(self, node: Value, index: int = 0) -> Value | None:
        return self._sums.get((id(node), index))


def _fitted(ct: Value, type_: TensorType, node: Value) -> Value:
    """The cotangent with the type of its primal: a rule may write an equal size in another way (that of the other operand of a `dot`, say)."""
    if ct.type == type_:
        return ct
    assert ct.dtype is type_.dtype, f"a cotangent of {node!r} has type {ct.type!r}"
    assert len(ct.shape) == len(type_.shape), f"a cotangent of {node!r} has type {ct.type!r}"
    return p.reshape(ct, shape=type_.shape)


Primal = Callable[[Value, Value], Value]
"""`f(value, ct)`: what a rule sees of a forward value, given a cotangent that is there by then; another computation of the same tensor."""


def vjp(outputs: Sequence[Value], cotangents: Sequence[Value], wrt: Sequence[Value], *, primal: Primal | None = None,
        ) -> list[Value | None]:  # fmt: skip
    """The cotangents of `wrt`: the sum over outputs of `J(output, w)^T ct`; None where no differentiable path leads to an output.

    Builds in the current builder, so `wrt` may be inputs, parameters or inner values, and the result can be differentiated again. Every node is
    visited once, and its rule is asked only for operands on a path to `wrt`. `primal` lets rules see forward values computed anew.
    """
    nodes = reachable(outputs)
    active = active_nodes(nodes, wrt)
    cotangent = _Cotangents()
    for output, ct in zip(outputs, cotangents, strict=True):
        if ct.type != output.type:
            raise TypeMismatch(f"the cotangent of {output!r} has type {ct.type!r}")
        cotangent.add(output, ct)
    for node in reversed(nodes):
        if id(node) not in active or not node.operands:
            continue
        if node.primitive.name == "item":
            _through_item(node, cotangent)
        elif isinstance(node.primitive.vjp, p.Joint):
            _through_joint(node, cotangent, active, primal)
        else:
            _through(node, cotangent, active, primal)
    return [cotangent.of(v) for v in wrt]


def _seen(node: Value, ct: Value, primal: Primal | None) -> tuple[Value, ...]:
    """A node and its operands as its rule sees them."""
    values = (node, *node.operands)
    return values if primal is None else tuple(primal(v, ct) for v in values)


def _through_item(node: Value, cotangent: _Cotangents) -> None:
    ct = cotangent.of(node)
    if ct is not None:
        with at(node.origin.in_phase("backward")):
            cotangent.add(node.operands[0], ct, node.params["index"])


def _through(node: Value, cotangent: _Cotangents, active: set[int], primal: Primal | None) -> None:
    ct = cotangent.of(node)
    if ct is None:
        return
    rules = node.primitive.vjp
    y, *xs = _seen(node, ct, primal)
    for i, operand in enumerate(node.operands):
        if id(operand) not in active:
            continue
        with at(node.origin.in_phase("backward").then(f"vjp:{node.primitive.name}[{i}]")):
            if isinstance(rules, p.Each):
                passed: Value | p.NoGrad = rules.rule(ct, y, *xs, at=i, **node.params)
            else:
                assert isinstance(rules, tuple)
                rule = rules[i]
                passed = rule if isinstance(rule, p.NoGrad) else rule(ct, y, *xs, **node.params)
            if not isinstance(passed, p.NoGrad):
                cotangent.add(operand, passed)


def _through_joint(node: Value, cotangent: _Cotangents, active: set[int], primal: Primal | None) -> None:
    assert isinstance(node.type, TupleType)
    assert isinstance(node.primitive.vjp, p.Joint)
    cts = tuple(cotangent.of(node, i) for i in range(len(node.type.items)))
    arrived = next((ct for ct in cts if ct is not None), None)
    if arrived is None:
        return
    y, *xs = _seen(node, arrived, primal)
    wanted = tuple(i for i, o in enumerate(node.operands) if id(o) in active)
    with at(node.origin.in_phase("backward").then(f"vjp:{node.primitive.name}")):
        passed = node.primitive.vjp.rule(cts, y, *xs, wanted=wanted, **node.params)
        for i in wanted:
            if (ct := passed[i]) is not None:
                cotangent.add(node.operands[i], ct)
