"""What enters a step: numbers that stay what they are, and sizes that agree; what does not fit is refused before anything runs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pullback
import pytest
from pullback.algebra.errors import PullbackError, Refusal
from pullback.algebra.signature import Entry
from pullback.backends.data import open_data
from pullback.backends.entering import Entrance, converted

X, Z, LABELS = np.ones((6, 3), np.float32), np.ones((6, 2), np.float32), np.array([0, 1, 0, 1, 0, 1])
SOURCE = """<ir_version: 9, opset_import: ["" : 18]>
two (float[N, 3] x, float[N, 2] z) => (float[N, 2] y) <float[3, 2] W = {1, 2, 3, 4, 5, 6}> { h = MatMul (x, W) y = Mul (h, z) }"""


def trainer(**options: Any) -> pullback.Trainer:
    return pullback.Trainer(pullback.training_step(onnx.parser.parse_model(SOURCE), **options), threads=1)


def entry(dtype: str, *shape: int | str) -> Entry:
    return Entry("v", "input", dtype, shape or ("N",))


@pytest.mark.parametrize(
    ("array", "dtype", "shown"),
    [
        ([0.5, 1.0], "bool", "cannot hold 0.5"),
        ([1, 2], "bool", "cannot hold 2"),
        ([np.nan], "bool", "cannot hold nan"),
        ([1e300], "float32", "cannot hold 1e[+]300"),
        ([70000.0], "float16", "cannot hold 70000"),
        ([2**24 + 1], "float32", "cannot hold 16777217: make it a float first"),
        ([2**63 - 1], "float64", "cannot hold 9223372036854775807"),
        (np.array([2**64 - 1], np.uint64), "float32", "cannot hold 18446744073709551615"),
        ([257], "bfloat16", "cannot hold 257"),
        ([2**17 + 1], "float16", "cannot hold 131073"),
        ([256], "uint8", "cannot hold 256"),
        ([8], "int4", "cannot hold 8"),
        ([1.0], "int64", "holds float64: cast it first"),
        (np.array([1.0], ml_dtypes.bfloat16), "int64", "holds bfloat16: cast it first"),
        (["1"], "float32", "holds <U1: cast it first"),
        ([1j], "float32", "holds complex128: cast it first"),
        ([None], "float32", "holds object: cast it first"),
        ([[1], [1, 2]], "float32", "is given what is no array"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "float32", "masked array"),
    ],
)
def test_a_number_that_would_become_another_is_refused(array: Any, dtype: str, shown: str) -> None:
    with pytest.raises(PullbackError, match=shown):
        converted(array, entry(dtype))


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        ([0.1], "float32"),
        ([1e-300], "float32"),
        ([np.inf, np.nan], "float32"),
        ([2**24, -(2**24), 2**40], "float32"),
        ([256, 512], "bfloat16"),
        (np.array([255], np.uint8), "float32"),
        ([0.0, 1.0], "bool"),
        ([True], "int64"),
        ([True], "float32"),
        ([-8, 7], "int4"),
    ],
)
def test_other_numbers_enter_rounded_at_most(array: Any, dtype: str) -> None:
    found = converted(array, entry(dtype))
    np.testing.assert_allclose(found.astype(np.float64), np.asarray(array, np.float64), rtol=1e-7, atol=1e-40)


def test_sizes_agree_or_the_batch_is_refused_whole() -> None:
    run = trainer()
    before = run.parameters()["W"]
    for batch, shown in (
        ({"x": X, "z": Z[:1], "target": LABELS}, "axis 0 of 'z' has size 1, but axis 0 of 'x' has 6: both are N"),
        ({"x": X, "z": Z, "target": LABELS[:1]}, "axis 0 of 'target' has size 1"),
        ({"x": X[:0], "z": Z[:0], "target": LABELS[:0]}, "axis 0 of 'x' has size 0"),
        ({"x": X, "z": Z[:, :1], "target": LABELS}, "takes float32"),
    ):
        for use in (run.step, run.gradients, run.weight, lambda b: run.evaluate([b])):
            with pytest.raises(Refusal, match=shown.replace("[", r"\[")):
                use(batch)
    with pytest.raises(Refusal, match="has size 1"):
        run.predict({"x": X, "z": Z[:1]})
    np.testing.assert_array_equal(run.parameters()["W"], before)
    assert run.steps == 0


def test_computed_sizes_and_constraints_hold() -> None:
    entries = [entry("float32", "N", "2*N"), Entry("w", "input", "float32", ("M",))]
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]> agrees (float[N] a, float[M] b) => (float[N] y) { y = Add (a, b) }'
    )
    constraints = pullback.load(model).constraints
    Entrance(entries, constraints)({"v": np.ones((2, 4)), "w": np.ones(2)})
    with pytest.raises(Refusal, match=r"axis 1 of 'v' has size 5, but 2[*]N is 4"):
        Entrance(entries)({"v": np.ones((2, 5)), "w": np.ones(2)})
    with pytest.raises(Refusal, match="the model needs N == M"):
        Entrance(entries, constraints)({"v": np.ones((2, 4)), "w": np.ones(3)})


def test_values_and_gradients_enter_in_the_same_way() -> None:
    run = trainer()
    for values, shown in (
        ({"step": 2.5}, "int64"),
        ({"lr": 1e300}, "cannot hold"),
        ({"lr": "fast"}, "<U4"),
        ({"lr": [0.1]}, "shape"),
    ):
        with pytest.raises(PullbackError, match=shown):
            run.assign(values)
    _, gradients = run.gradients({"x": X, "z": Z, "target": LABELS})
    other = trainer()
    other.apply({k: g.astype(np.float64).tolist() for k, g in gradients.items()})
    run.apply(gradients)
    np.testing.assert_array_equal(run.parameters()["W"], other.parameters()["W"])
    with pytest.raises(Refusal) as refusal:
        run.apply({"W": gradients["W"].ravel(), "V": X})
    assert len(refusal.value.reasons) == 2


def test_what_only_the_runtime_can_see_is_an_error_of_this_package() -> None:
    source = SOURCE.replace("float[N, 2] z", "int64[N] z").replace("y = Mul (h, z)", "r = Gather (W, z) y = Add (h, r)")
    run = pullback.Trainer(pullback.training_step(onnx.parser.parse_model(source)), threads=1)
    with pytest.raises(PullbackError, match=r"could not run this batch.*out of data bounds"):
        run.step({"x": X, "z": LABELS + 2, "target": LABELS})


def test_options_of_a_run_are_refused_together() -> None:
    data = {"x": X, "z": Z, "target": LABELS}
    with pytest.raises(Refusal) as refusal:
        trainer().fit(
            data, batch_size=0, accumulate=0, epochs=-1, seed=-1, resume=True, checkpoint_every=3, metrics=["accuracy"]
        )
    assert len(refusal.value.reasons) == 7
    with pytest.raises(Refusal) as refusal:
        trainer().fit(data, batch_size=2.5, epochs="two", early_stopping=True, validation=data)  # type: ignore[arg-type]
    assert len(refusal.value.reasons) == 3
    with pytest.raises(Refusal, match="there is no directory"):
        trainer().fit(data, checkpoint="nowhere/run.safetensors")


@pytest.mark.parametrize("data", [None, 5, [1, 2], ["text"]])
def test_what_is_no_data_is_refused(data: Any) -> None:
    with pytest.raises(PullbackError, match="batch"):
        trainer().fit(data, progress=False)


def test_axes_are_those_of_inputs_and_an_input_may_have_no_samples() -> None:
    data = {"x": X, "z": Z, "target": LABELS}
    for axes in ({"q": 0}, {"x": 2}, {"x": -3}):
        with pytest.raises(Refusal, match="cannot take samples along these axes"):
            trainer().fit(data, axes=axes, progress=False)
    entries = [entry("float32", "N", 3), Entry("shared", "input", "float32", (5, 5))]
    taken = open_data({"v": X, "shared": np.eye(5)}, entries, axes={"shared": None})
    assert [b["shared"].shape for b in taken.batches(4, shuffle=True, seed=0, epoch=0)] == [(5, 5)] * 2


def test_a_trainer_takes_a_step_and_providers_that_exist() -> None:
    with pytest.raises(PullbackError, match=r"a training step .* is required, found Model"):
        pullback.Trainer(pullback.load(onnx.parser.parse_model(SOURCE)))  # type: ignore[arg-type]
    with pytest.raises(Refusal, match="lacks providers"):
        pullback.Trainer(pullback.training_step(onnx.parser.parse_model(SOURCE)), providers=["Fast"])
