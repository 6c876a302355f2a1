"""The operators of `ai.onnx.preview.training`, written out in plain ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from pullback.algebra.errors import Refusal
from pullback.algebra.evaluate import evaluate
from pullback.backends.onnx_export.emit import to_onnx
from pullback.frontends.onnx_import import load

PREVIEW = "ai.onnx.preview.training"
A = np.asarray([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)
B = np.asarray([0.5, -1.0, 2.0], np.float32)


def model(nodes: list[onnx.NodeProto], outputs: list[str], shape_a: Any = (2, 3), stored: dict[str, np.ndarray] | None = None) -> onnx.ModelProto:  # fmt: skip
    inputs = [helper.make_tensor_value_info("a", 1, shape_a), helper.make_tensor_value_info("b", 1, (3,))]
    inputs = [i for i in inputs if i.name not in (stored or {})]
    weights = [numpy_helper.from_array(v, n) for n, v in (stored or {}).items()]
    infos = [helper.make_tensor_value_info(o, 1, None) for o in outputs]
    graph = helper.make_graph(nodes, "g", inputs, infos, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(PREVIEW, 1)])


def gradient(inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node("Gradient", inputs, outputs, name="gradient", domain=PREVIEW, **attributes)


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By the algebra and by onnxruntime on plain operators, which must agree."""
    graph = load(proto)
    found = evaluate(graph, feeds)
    written = to_onnx(graph)
    onnx.checker.check_model(written, full_check=True)
    assert {n.domain for n in written.graph.node} | {o.domain for o in written.opset_import} == {""}
    assert "Gradient" not in {n.op_type for n in written.graph.node}
    session = onnxruntime.InferenceSession(written.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = {i.name for i in session.get_inputs()}
    for name, array in zip(
        found, session.run(list(found), {k: v for k, v in feeds.items() if k in wanted}), strict=True
    ):
        np.testing.assert_allclose(array, found[name], rtol=1e-6)
    return found


@pytest.mark.parametrize(
    ("op", "da", "db"), [("Add", np.ones((2, 3)), [2, 2, 2]), ("Mul", np.broadcast_to(B, (2, 3)), A.sum(0))]
)
@pytest.mark.parametrize("rows", [2, "N"])
def test_a_gradient_is_the_gradient_graph_itself(op: str, da: Any, db: Any, rows: Any) -> None:
    nodes = [helper.make_node(op, ["a", "b"], ["c"]), gradient(["a", "b"], ["da", "db"], xs=["a", "b"], y="c")]
    found = run(model(nodes, ["c", "da", "db"], (rows, 3)), {"a": A, "b": B})
    np.testing.assert_allclose(found["da"], da)
    np.testing.assert_allclose(found["db"], db)


def test_a_tensor_of_zs_counts_as_a_constant() -> None:
    nodes = [
        helper.make_node("Mul", ["a", "a"], ["s"]),
        helper.make_node("Mul", ["s", "a"], ["c"]),
        gradient(["a", "s"], ["da"], xs=["a"], zs=["s"], y="c"),
    ]
    np.testing.assert_allclose(run(model(nodes, ["da"]), {"a": A, "b": B})["da"], A * A)


def test_each_of_xs_is_a_variable_of_its_own() -> None:
    nodes = [
        helper.make_node("Mul", ["a", "a"], ["s"]),
        helper.make_node("Mul", ["s", "a"], ["c"]),
        gradient(["a", "s"], ["da", "ds"], xs=["a", "s"], y="c"),
    ]
    found = run(model(nodes, ["da", "ds"]), {"a": A, "b": B})
    np.testing.assert_allclose(found["da"], A * A)
    np.testing.assert_allclose(found["ds"], A)


def test_the_inputs_say_where_the_gradient_is_taken() -> None:
    nodes = [
        helper.make_node("Mul", ["a", "a"], ["c"]),
        helper.make_node("Add", ["a", "b"], ["elsewhere"]),
        gradient(["elsewhere"], ["da"], xs=["a"], y="c"),
    ]
    found = run(model(nodes, ["da", "c"]), {"a": A, "b": B})
    np.testing.assert_allclose(found["da"], 2 * (A + B))
    np.testing.assert_allclose(found["c"], A * A)


def test_a_gradient_of_a_gradient_is_the_second_derivative() -> None:
    nodes = [
        helper.make_node("Mul", ["a", "a"], ["s"]),
        helper.make_node("Mul", ["s", "a"], ["c"]),
        gradient(["a"], ["da"], xs=["a"], y="c"),
        helper.make_node("Gradient", ["a"], ["dda"], domain=PREVIEW, xs=["a"], y="da"),
    ]
    np.testing.assert_allclose(run(model(nodes, ["da", "dda"]), {"a": A, "b": B})["dda"], 6 * A)


def test_a_weight_is_one_of_xs_and_what_does_not_matter_has_zeros() -> None:
    nodes = [
        helper.make_node("Relu", ["a"], ["c"]),
        helper.make_node("Mul", ["a", "b"], ["d"]),
        gradient(["b", "a"], ["db", "da"], xs=["b", "a"], y="c"),
    ]
    found = run(model(nodes, ["db", "da", "d"], stored={"b": B}), {"a": A})
    np.testing.assert_array_equal(found["db"], np.zeros(3))
    np.testing.assert_array_equal(found["da"], np.ones((2, 3)))


def test_what_is_not_there_is_refused_by_name() -> None:
    nodes = [helper.make_node("Relu", ["a"], ["c"]), gradient(["a"], ["da"], xs=["a"], y="cc")]
    with pytest.raises(Refusal, match=r"node 'gradient' \(Gradient.*'cc' is not defined"):
        load(model(nodes, ["da"]))


def steps(op: str, slots: list[str], count: int, **attributes: Any) -> list[np.ndarray]:
    """The values after each step, from w = [1, -2] with g = [0.5, -1] and a rate of 0.1."""
    names = ["w", "g", *slots]
    inputs = [helper.make_tensor_value_info("r", 1, []), helper.make_tensor_value_info("t", 7, [])]
    inputs += [helper.make_tensor_value_info(n, 1, [2]) for n in names]
    outputs = ["new_w", *(f"new_{s}" for s in slots)]
    node = helper.make_node(op, ["r", "t", *names], outputs, domain=PREVIEW, **attributes)
    infos = [helper.make_tensor_value_info(o, 1, [2]) for o in outputs]
    proto = helper.make_model(
        helper.make_graph([node], "g", inputs, infos), opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(PREVIEW, 1)]
    )  # fmt: skip
    state = {"w": np.asarray([1, -2], np.float32), **{s: np.zeros(2, np.float32) for s in slots}}
    history = []
    for t in range(count):
        feeds = {
            "r": np.asarray(0.1, np.float32),
            "t": np.asarray(t + 1),
            "g": np.asarray([0.5, -1], np.float32),
            **state,
        }
        found = run(proto, feeds)
        state = {n: found[f"new_{n}"] for n in state}
        history.append(state["w"])
    return history


def test_adam_follows_the_field() -> None:
    np.testing.assert_allclose(
        steps("Adam", ["v", "h"], 2, alpha=0.9, beta=0.999, epsilon=1e-8), [[0.9, -1.9], [0.8, -1.8]], atol=1e-5
    )


def test_adagrad_follows_the_field() -> None:
    expected = [[0.9, -1.9], [0.829289, -1.829289]]
    np.testing.assert_allclose(steps("Adagrad", ["h"], 2, epsilon=1e-12), expected, atol=1e-5)


def test_momentum_follows_the_field() -> None:
    found = steps("Momentum", ["v"], 2, alpha=0.9, beta=1.0, mode="standard", norm_coefficient=0.0)
    np.testing.assert_allclose(found, [[0.95, -1.9], [0.855, -1.71]], atol=1e-6)
