"""Models of one node, run by onnxruntime's own kernels and by the algebra: what the tests of lowerings compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper
from pullback.algebra import primitives as p
from pullback.algebra.calculus.vjp import vjp
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Graph, building
from pullback.backends.onnx_export.emit import to_onnx
from pullback.frontends.onnx_import import load

MS = "com.microsoft"
ML = "ai.onnx.ml"


@dataclass(frozen=True)
class Case:
    """One node: operator, inputs (None where left out), attributes, how many results are compared."""

    op: str
    inputs: Sequence[np.ndarray | None]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int | Sequence[int] = 1
    domain: str = MS
    atol: float = 2e-5
    note: str = ""
    fixed: Sequence[int] = ()
    opset: int = 16
    ml: int = 3
    rtol: float = 1e-4

    def __str__(self) -> str:
        return f"{self.op} {self.note}".strip()

    @property
    def wanted(self) -> list[int]:
        return list(range(self.outputs)) if isinstance(self.outputs, int) else list(self.outputs)

    def model(self) -> onnx.ModelProto:
        """One node; the inputs in `fixed` are initializers."""
        model = self.model_unchecked()
        for info, value in zip(model.graph.output, load(model).outputs.values(), strict=True):
            info.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(value.dtype.numpy)
        return model

    def model_unchecked(self) -> onnx.ModelProto:
        """The model without the dtypes of its results."""
        inputs, weights, names = [], [], []
        for i, x in enumerate(self.inputs):
            names.append("" if x is None else f"x{i}")
            if x is None:
                continue
            if i in self.fixed:
                weights.append(onnx.numpy_helper.from_array(x, f"x{i}"))
                continue
            inputs.append(helper.make_tensor_value_info(f"x{i}", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape))
        outputs = [f"y{i}" for i in range(max(self.wanted) + 1)]
        node = helper.make_node(self.op, names, outputs, name="node", domain=self.domain, **self.attributes)
        named = [onnx.ValueInfoProto(name=f"y{i}") for i in self.wanted]
        graph = helper.make_graph([node], "one", inputs, named, weights)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(MS, 1), helper.make_opsetid(ML, self.ml)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)

    def in_double(self) -> Case:
        """The same node on doubles."""
        wide = [x.astype(np.float64) if x is not None and x.dtype == np.float32 else x for x in self.inputs]
        return replace(self, inputs=wide)

    def feeds(self) -> dict[str, np.ndarray]:
        return {f"x{i}": x for i, x in enumerate(self.inputs) if x is not None and i not in self.fixed}


def run_onnxruntime(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The results of the model as it is, without onnxruntime's own rewriting."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def check_values(case: Case) -> None:
    """Ours are those of onnxruntime, integers to one where the real number lies half way."""
    expected = run_onnxruntime(case.model(), case.feeds())
    found = evaluate(load(case.model()), case.feeds())
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        slack = 1 if array.dtype.kind in "iu" else case.atol
        np.testing.assert_allclose(found[name].astype(np.float64), array.astype(np.float64), rtol=case.rtol, atol=slack)
        if array.dtype.kind in "iu":
            assert np.asarray(found[name] != array).mean() < 0.05


def check_emission(case: Case) -> None:
    """The graph in plain operators has the same values on onnxruntime."""
    graph = load(case.model())
    model = to_onnx(graph)
    onnx.checker.check_model(model, full_check=True)
    assert {o.domain for o in model.opset_import} == {""}
    found, expected = run_onnxruntime(model, case.feeds()), evaluate(graph, case.feeds())
    for name, array in expected.items():
        slack = 1 if array.dtype.kind in "iu" else 10 * case.atol
        np.testing.assert_allclose(found[name].astype(np.float64), array.astype(np.float64), rtol=1e-3, atol=slack)


def check_gradients(case: Case, roles: Sequence[str] = ("input", "parameter"), **options: Any) -> int:
    """The gradients of every floating input and parameter (of these roles) agree with differences, in double; how many were compared."""
    case = case.in_double()
    graph = load(case.model(), **options)
    wanted = [v for v in graph.inputs if v.dtype.floating and v.params["role"] in roles]
    outputs = {n: v for n, v in graph.outputs.items() if v.dtype.floating}
    if not wanted or not outputs:
        return 0
    rng = np.random.default_rng(3)
    feeds = {**{n: c.array for n, c in graph.data.items()}, **case.feeds()}
    weights = {
        n: rng.standard_normal(y.shape).astype(y.dtype) for n, y in evaluate(graph, feeds).items() if n in outputs
    }
    with building(graph):
        grads = vjp(list(outputs.values()), [p.literal(weights[n]) for n in outputs], wanted)
    back = Graph(graph.inputs, {f"g{i}": g for i, g in enumerate(grads) if g is not None}, data=graph.data)
    found = evaluate(back, feeds)

    def total(at: Mapping[str, np.ndarray]) -> float:
        return float(
            sum((weights[n].astype(np.float64) * y).sum() for n, y in evaluate(graph, at).items() if n in weights)
        )

    for i, v in enumerate(wanted):
        name = v.params["name"]
        single = any(w.dtype == np.float32 for w in weights.values()) or v.dtype.bits < 64
        step, close = (3e-3, 2e-2) if single else (1e-5, 1e-5)
        direction = rng.standard_normal(feeds[name].shape)
        up, down = (total({**feeds, name: feeds[name] + s * step * direction}) for s in (1, -1))
        slope = 0.0 if grads[i] is None else (found[f"g{i}"] * direction).sum()
        np.testing.assert_allclose(slope, (up - down) / (2 * step), rtol=close, atol=close, err_msg=name)
    return sum(g is not None for g in grads)
