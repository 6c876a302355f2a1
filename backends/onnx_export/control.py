"""Emission of control flow: `scan` as Scan, `cond` as If, `while` as Loop.

A body is emitted into a program of its own. What is constant for the body (the constants of a scan, the operands of a branch) is not passed in: the
body reads the tensors around it by name, as ONNX allows. Sizes are computed outside, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...algebra.dims import is_zero
from ...algebra.graph import Graph, Value
from ...algebra.types import TensorType, TupleType, bool_, i64
from .emission import Emission
from .program import Body, Tensor, needed
from .view import View, whole

__all__ = ["CONTROL"]


def emit_body(
    e: Emission, graph: Graph, given: Sequence[View], inputs: Sequence[Tensor], results: Sequence[int]
) -> Body:
    """The body of a loop or branch: `given` are the views of the graph's inputs, `inputs` the tensors that ONNX passes in, `results` the outputs kept."""
    e.enter(graph, given)
    e.walk(graph)
    values = list(graph.outputs.values())
    return _closed(e, graph, inputs, [e.tensor(values[i]) for i in results])


def _closed(e: Emission, graph: Graph, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> Body:
    """The body once its outputs are known; an output that the body does not make itself, or gives twice, passes through an Identity."""
    program = e.ops.program
    outputs: list[Tensor] = []
    for t in results:
        if not program.owns(t) or any(t is o for o in outputs):
            (t,) = program.append("Identity", (t,), ((t.dtype, t.shape),), {})
        outputs.append(t)
    return Body(graph, needed(program.ops, outputs), tuple(inputs), tuple(outputs))


def _used(e: Emission, v: Value) -> list[int]:
    """The results that someone takes."""
    return sorted({u.params["index"] for u in e.users.get(id(v), ())})


def _types(v: Value) -> tuple[TensorType, ...]:
    assert isinstance(v.type, TupleType)
    return v.type.items


def _spread(v: Value, kept: Sequence[int], tensors: Sequence[Tensor]) -> tuple[View, ...]:
    """A view for every result; those that nobody takes share one that is never asked for."""
    at = dict(zip(kept, tensors, strict=True))
    filler = next(iter(at.values()), None)
    views = []
    for i, _ in enumerate(_types(v)):
        t = at.get(i, filler)
        assert t is not None
        views.append(whole(t))
    return tuple(views)


def _scan(e: Emission, v: Value) -> tuple[View, ...]:
    body, carries, xs = v.params["body"], v.params["carries"], v.params["xs"]
    length, backwards = v.params["length"], v.params["reverse"]
    init = [e.tensor(o) for o in v.operands[:carries]]
    if is_zero(length):  # onnxruntime's Scan wants at least one step
        nothing = [e.ops.expand(e.ops.number(0, t.dtype), t.shape) for t in _types(v)[carries:]]
        return tuple(map(whole, [*init, *nothing]))
    sequences = [e.tensor(o) for o in v.operands[carries : carries + xs]]
    inside = e.inside(body, repeated=True)
    passed = [inside.ops.program.input(i.dtype, i.shape) for i in body.inputs[: carries + xs]]
    given = [*map(whole, passed), *(e.view(o) for o in v.operands[carries + xs :])]
    if not sequences:  # Scan needs a sequence to know how often
        sequences = [e.ops.iota(length)]
        passed.append(inside.ops.program.input(i64, ()))
    stacked = [i for i in _used(e, v) if i >= carries]
    results = [*range(carries), *stacked]
    inner = emit_body(inside, body, given, passed, results)
    attributes: dict[str, object] = {"num_scan_inputs": len(sequences)}
    turned = backwards and not e.ops.target.scan_backwards
    if turned:
        sequences = [e.ops.reverse(x, [0]) for x in sequences]
    elif backwards:
        attributes["scan_input_directions"] = [1] * len(sequences)
        if stacked:
            attributes["scan_output_directions"] = [1] * len(stacked)
    types = _types(v)
    made = [(types[i].dtype, types[i].shape) for i in results]
    tensors = e.ops.program.append("Scan", [*init, *sequences], made, attributes, {"body": inner})
    if turned:
        tensors = (*tensors[:carries], *(e.ops.reverse(t, [0]) for t in tensors[carries:]))
    return _spread(v, results, tensors)


def _cond(e: Emission, v: Value) -> tuple[View, ...]:
    pred = e.tensor(v.operands[0])
    given = [e.view(o) for o in v.operands[1:]]
    kept = _used(e, v)
    bodies = {
        key: emit_body(e.inside(v.params[name], repeated=False), v.params[name], given, (), kept)
        for key, name in (("then_branch", "then"), ("else_branch", "otherwise"))
    }
    types = _types(v)
    made = [(types[i].dtype, types[i].shape) for i in kept]
    return _spread(v, kept, e.ops.program.append("If", (pred,), made, {}, bodies))


def _while(e: Emission, v: Value) -> tuple[View, ...]:
    """Loop with the greatest trip count: the test decides, once before the loop and at the end of each step."""
    test, body, carries = v.params["test"], v.params["body"], v.params["carries"]
    outside = [e.view(o) for o in v.operands]
    init = [e.real(x) for x in outside[:carries]]
    first = e.inlined(test, outside)[0]
    inside = e.inside(body, repeated=True)
    types = [TensorType(i64, ()), TensorType(bool_, ()), *_types(v)]
    passed = [inside.ops.program.input(t.dtype, t.shape) for t in types]
    inside.enter(body, [*map(whole, passed[2:]), *outside[carries:]])
    inside.walk(body)
    carried = [inside.view(o) for o in body.outputs.values()]
    goes_on = inside.inlined(test, [*carried, *outside[carries:]])[0]
    inner = _closed(inside, body, passed, [inside.real(goes_on), *(inside.real(c) for c in carried)])
    most = e.ops.constant(np.asarray(np.iinfo(np.int64).max, np.int64))
    made = [(t.dtype, t.shape) for t in _types(v)]
    tensors = e.ops.program.append("Loop", [most, e.real(first), *init], made, {}, {"body": inner})
    return _spread(v, range(carries), tensors)


CONTROL: dict[str, Callable[[Emission, Value], View | tuple[View, ...]]] = {
    "scan": _scan,
    "cond": _cond,
    "while": _while,
}
