"""Models of one operator, made from arrays, for the tests of lowerings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numerics import check_pullback, floats
from onnx import ModelProto, TensorProto, helper, numpy_helper
from pullback.algebra import primitives as p
from pullback.algebra.calculus.vjp import vjp
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Graph, building
from pullback.frontends.onnx_import import load

Arrays = Mapping[str, np.ndarray]
CODES = {
    np.dtype(helper.tensor_dtype_to_np_dtype(c)): c
    for c in TensorProto.DataType.values()
    if c not in (0, TensorProto.STRING)
}


def code_of(array: np.ndarray) -> int:
    return CODES[array.dtype]


def model_of(
    op: str, inputs: Mapping[str, np.ndarray | None], *, opset: int = 28, fixed: Sequence[str] = (), outputs: int = 1, symbols: bool = False,
    keep: Sequence[tuple[str, int]] = (), **attributes: Any,
) -> ModelProto:  # fmt: skip
    """One node. Inputs named in `fixed` are initializers, None leaves one out; with `symbols` each size above 1 is a symbol, save those in `keep`."""
    names = [n if a is not None else "" for n, a in inputs.items()]
    while names and not names[-1]:
        names.pop()
    results = ["y"] if outputs == 1 else [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, names, results, name="node", **attributes)

    def shape_of(name: str, array: np.ndarray) -> list[int | str]:
        return [f"{name}_{i}" if symbols and d > 1 and (name, i) not in keep else d for i, d in enumerate(array.shape)]

    entering = [
        helper.make_tensor_value_info(n, code_of(a), shape_of(n, a)) for n, a in inputs.items() if a is not None and n not in fixed
    ]  # fmt: skip
    stored = [numpy_helper.from_array(np.asarray(a), n) for n, a in inputs.items() if a is not None and n in fixed]
    leaving = [helper.make_tensor_value_info(r, TensorProto.FLOAT, None) for r in results]
    graph = helper.make_graph([node], op, entering, leaving, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def text_model(text: str, opset: int = 17) -> ModelProto:
    """A model in ONNX's textual syntax."""
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]>\n{text}')


def run(op: str, inputs: Mapping[str, np.ndarray | None], **options: Any) -> Any:
    """The result of one node (or the tuple of its results)."""
    fixed = options.get("fixed", ())
    graph = load(model_of(op, inputs, **options))
    found = evaluate(graph, {n: a for n, a in inputs.items() if a is not None and n not in fixed})
    values = tuple(found.values())
    return values[0] if len(values) == 1 else values


def gradients(
    graph: Graph, feeds: Arrays, wrt: Sequence[str] | None = None, seeds: Arrays | None = None
) -> dict[str, np.ndarray]:
    """`J^T ct` of every floating input, with cotangents of ones unless given. Inputs without a path are left out."""
    wrt = tuple(wrt) if wrt is not None else floats(graph)
    with building(graph):
        outputs = {k: v for k, v in graph.outputs.items() if v.dtype.floating}
        given = [p.input(f"ct_{k}", v.type, "seed") for k, v in outputs.items()]
        cts = vjp(list(outputs.values()), given, [graph[n] for n in wrt])
    back = Graph(
        (*graph.inputs, *given), {n: ct for n, ct in zip(wrt, cts, strict=True) if ct is not None}, data=graph.data
    )
    values = evaluate(graph, feeds)
    ones = {f"ct_{k}": np.ones_like(values[k]) for k in outputs}
    return evaluate(back, {**feeds, **ones, **{f"ct_{k}": v for k, v in (seeds or {}).items()}})


def check(
    op: str,
    inputs: Mapping[str, np.ndarray | None],
    *,
    orders: int = 2,
    step: float = 1e-3,
    tolerance: float = 1e-7,
    **options: Any,
) -> None:
    """The pullback of one node agrees with finite differences, with sizes as they are and as symbols."""
    fixed = options.get("fixed", ())
    for symbols in (False, True):
        graph = load(model_of(op, inputs, symbols=symbols, **options))
        feeds = {n: a for n, a in inputs.items() if a is not None and n not in fixed}
        feeds |= {n: c.array for n, c in graph.data.items()}
        check_pullback(
            graph, feeds, floats(graph), np.random.default_rng(1), orders=orders, step=step, tolerance=tolerance
        )
