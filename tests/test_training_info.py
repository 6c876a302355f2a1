"""The standard's own form: inference graph and `TrainingInfoProto`, put one after the other, are the training step."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from pullback.algebra.evaluate import evaluate
from pullback.algebra.training.step import training_step
from pullback.algebra.types import f32
from pullback.backends.onnx_export.training_info import combined, save_standard_form, standard_form

from tests.test_step import batches, mlp, normalised

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (mlp, {"optimizer": "adamw"}),
    "batch statistics": (lambda: normalised(f32), {"optimizer": "sgd"}),
    "dropout": (lambda: normalised(f32), {"optimizer": "adam", "dropout": True, "ema": 0.9}),
    "frozen": (mlp, {"freeze": ["fc1.*"], "optimizer": "sgd", "optimizer_options": {"momentum": 0.9}}),
}


@pytest.mark.parametrize("case", CASES)
def test_inference_graph_and_algorithm_together_are_the_step(case: str) -> None:
    make, options = CASES[case]
    step = training_step(make(), **options)
    model = standard_form(step.graph, step.evaluation)
    onnx.checker.check_model(model, full_check=True)
    whole = combined(model)
    onnx.checker.check_model(whole, full_check=True)
    (batch,) = batches(1)
    session = ort.InferenceSession(whole.SerializeToString())
    assert {i.name for i in session.get_inputs()} == {"x", "target"}
    got = dict(zip([o.name for o in session.get_outputs()], session.run(None, batch), strict=True))
    wanted = evaluate(step.graph, batch)
    assert set(got) == set(wanted)
    for name in got.keys() - {"y"}:
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-4, atol=1e-6, err_msg=name)
    inference = evaluate(step.evaluation, batch)["y"]
    np.testing.assert_allclose(got["y"], inference, rtol=1e-5, atol=1e-6)


def test_the_inference_graph_runs_alone() -> None:
    step = training_step(normalised(f32))
    model = standard_form(step.graph, step.evaluation)
    del model.training_info[:]
    (batch,) = batches(1)
    (y,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": batch["x"]})
    np.testing.assert_allclose(y, evaluate(step.evaluation, batch)["y"], rtol=1e-5, atol=1e-6)


def test_bindings_name_what_is_carried_and_first_values(tmp_path: Any) -> None:
    step = training_step(normalised(f32), optimizer="adam")
    save_standard_form(step.graph, step.evaluation, tmp_path / "standard.onnx")
    model = onnx.load(tmp_path / "standard.onnx")
    (info,) = model.training_info
    assert {b.value: b.key for b in info.update_binding} == step.signature.carried
    names = {t.name for t in (*model.graph.initializer, *info.algorithm.initializer)}
    assert {b.key for b in info.update_binding} <= names
    outputs = {o.name for o in info.algorithm.output}
    assert {b.value for b in info.update_binding} <= outputs
    fresh = onnx.helper.make_model(info.initialization, opset_imports=model.opset_import, ir_version=model.ir_version)
    onnx.checker.check_model(fresh, full_check=True)
    first = dict(
        zip(
            [o.name for o in fresh.graph.output],
            ort.InferenceSession(fresh.SerializeToString()).run(None, {}),
            strict=True,
        )
    )
    bound = {b.key: first[b.value] for b in info.initialization_binding}
    assert set(bound) == {e.name for e in step.signature.inputs_of("slot", "step")}
    for name, value in bound.items():
        np.testing.assert_array_equal(value, step.graph.data[name].array)
