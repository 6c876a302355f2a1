"""Training on onnxruntime: buffers, data, resuming, export."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from google.protobuf.message import EncodeError
from pullback.algebra.errors import PullbackError, Refusal
from pullback.algebra.evaluate import evaluate
from pullback.algebra.passes import default as simplified
from pullback.algebra.signature import Entry
from pullback.algebra.training.step import TrainingStep, training_step
from pullback.backends import restore
from pullback.backends.data import open_data
from pullback.backends.onnx_export import save
from pullback.backends.runtime import EarlyStopping, Trainer
from pullback.demo import DATA, MODEL
from pullback.frontends.onnx_import import load
from safetensors.numpy import load_file

NETWORK = """
<ir_version: 10, opset_import: ["" : 17]>
net (float[N, 6] x) => (float[N, 3] y) {
  h = MatMul (x, W)
  n = BatchNormalization <epsilon = 0.00001, momentum = 0.9> (h, g, b, mean, var)
  r = Relu (n)
  V = Constant <value = float[5, 3] {0.1, -0.2, 0.3, 0.4, -0.5, 0.6, 0.7, -0.8, 0.9, 1.0, 0.1, 0.2, -0.3, 0.4, 0.5}> ()
  y = MatMul (r, V)
}
"""


def network() -> onnx.ModelProto:
    model = onnx.parser.parse_model(NETWORK)
    rng = np.random.default_rng(0)
    values = {
        "W": rng.standard_normal((6, 5)),
        "g": np.ones(5),
        "b": np.zeros(5),
        "mean": np.zeros(5),
        "var": np.ones(5),
    }
    for name, value in values.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    return model


def made(**options: Any) -> TrainingStep:
    return training_step(load(network()), **{"optimizer": "adamw", "lr": 0.01, **options})


def samples(n: int = 100, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 6)).astype(np.float32)
    return {"x": x, "target": (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)}


def trainer(step: TrainingStep | None = None) -> Trainer:
    return Trainer(step or made(), threads=1)


# ---- steps -----------------------------------------------------------------------------------------------------


def test_steps_are_those_of_the_graph() -> None:
    step, batch = made(), samples(16)
    run = trainer(step)
    feeds: dict[str, Any] = {}
    for _ in range(5):
        out = evaluate(step.graph, {**feeds, **batch})
        feeds = {i: out[o] for o, i in step.signature.carried.items()}
        np.testing.assert_allclose(run.step(batch), out["loss"], rtol=1e-5)
    assert run.steps == 5
    for name, value in run.values("parameter", "slot", "state").items():
        np.testing.assert_allclose(value, feeds[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_values_stay_in_the_buffers_that_were_bound() -> None:
    run = trainer()
    before = [{k: a.ctypes.data for k, a in arrays.items()} for arrays in run._arrays]
    for _ in range(3):
        run.step(samples(8))
    assert [{k: a.ctypes.data for k, a in arrays.items()} for arrays in run._arrays] == before


def test_numbers_can_be_changed_between_steps() -> None:
    run = trainer(made(optimizer="sgd"))
    run.assign({"lr": 0.0})
    before = run.parameters()
    run.step(samples(8))
    for name, value in run.parameters().items():
        np.testing.assert_array_equal(value, before[name])
    with pytest.raises(Refusal, match="no stored input 'rate'"):
        run.assign({"rate": 1.0})


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_dtypes_train(dtype: str) -> None:
    kind = {"float64": "double", "float16": "float16"}[dtype]
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 17]> g ({kind}[N, 4] x) => ({kind}[N, 2] y) {{ y = MatMul (x, W) }}'
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 2), dtype), "W"))
    run = trainer(training_step(load(model), loss="mse_loss", lr=0.1))
    batch = {"x": np.ones((3, 4), dtype), "target": np.zeros((3, 2), dtype)}
    losses = [run.step(batch) for _ in range(5)]
    assert losses[-1] < 0.5 * losses[0]
    assert run.parameters()["W"].dtype == dtype


# ---- fit -------------------------------------------------------------------------------------------------------


def test_fit_learns_and_records_what_it_did() -> None:
    data, held_out = samples(400), samples(100, 1)
    run = trainer(made(lr=0.03))
    history = run.fit(data, epochs=8, batch_size=20, validation=held_out, metrics=["accuracy"], progress=False)
    assert len(history.losses) == 8 * 20
    assert history.epochs[-1]["loss"] < 0.6 * history.epochs[0]["loss"]
    assert history.epochs[-1]["val_accuracy"] > 0.7
    scores = run.predict({"x": held_out["x"]})["y"]
    assert np.mean(scores.argmax(1) == held_out["target"]) == pytest.approx(history.epochs[-1]["val_accuracy"])


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    data = samples(96)
    one, many = trainer(made(batch_norm="frozen")), trainer(made(batch_norm="frozen"))
    one.fit(data, batch_size=24, progress=False)
    many.fit(data, batch_size=6, accumulate=4, progress=False)
    assert one.steps == many.steps == 4
    for name, value in one.parameters().items():
        np.testing.assert_allclose(many.parameters()[name], value, rtol=1e-4, atol=1e-6)


def test_accumulation_carries_running_statistics_through_every_batch() -> None:
    data = samples(12)
    step = made()
    run = trainer(step)
    run.fit(data, batch_size=6, accumulate=2, shuffle=False, progress=False)
    feeds: dict[str, Any] = {}
    for rows in (slice(0, 6), slice(6, 12)):
        out = evaluate(step.gradients, {**feeds, **{k: v[rows] for k, v in data.items()}})
        feeds = {"mean": out["new_mean"], "var": out["new_var"]}
    for name, value in run.state().items():
        np.testing.assert_allclose(value, feeds[name], rtol=1e-5, atol=1e-6)


def test_early_stopping_brings_back_the_best_weights() -> None:
    seen = []

    def watch(run: Trainer, row: Any) -> None:
        seen.append((row["val_loss"], run.parameters()["W"]))

    run = trainer(made(lr=0.5))
    history = run.fit(
        samples(64), epochs=200, batch_size=16, validation=samples(64, 5), callbacks=[watch], progress=False,
        early_stopping=EarlyStopping(patience=3),
    )  # fmt: skip
    assert history.stopped == "val_loss has not improved for 3 epochs"
    assert len(seen) < 200
    np.testing.assert_array_equal(run.parameters()["W"], min(seen, key=lambda s: s[0])[1])


def test_a_callback_can_stop_the_run() -> None:
    history = trainer().fit(samples(), epochs=9, progress=False, callbacks=[lambda run, row: row["epoch"] == 2])
    assert len(history.epochs) == 2
    assert history.stopped


# ---- data ------------------------------------------------------------------------------------------------------


def formats(folder: Path) -> list[Any]:
    data = samples(30)
    np.savez(folder / "d.npz", **data)
    (folder / "npy").mkdir()
    for k, v in data.items():
        np.save(folder / "npy" / f"{k}.npy", v)
    header = ",".join([*(f"x[{i}]" for i in range(6)), "target"])
    rows = [",".join([*map(repr, map(float, x)), str(t)]) for x, t in zip(data["x"], data["target"], strict=True)]
    (folder / "d.csv").write_text("\n".join([header, *rows]))
    plain = ",".join([*"abcdef", "target"])
    (folder / "plain.csv").write_text("\n".join([plain, *rows]))
    pieces = [{k: v[i : i + 10] for k, v in data.items()} for i in range(0, 30, 10)]
    return [
        data, folder / "d.npz", folder / "npy", {k: folder / "npy" / f"{k}.npy" for k in data}, str(folder / "d.csv"), folder / "plain.csv",
        pieces, lambda: iter(pieces), [tuple(piece.values()) for piece in pieces],
    ]  # fmt: skip


@pytest.mark.parametrize("which", range(9))
def test_every_form_of_data_gives_the_same_run(tmp_path: Path, which: int) -> None:
    source = formats(tmp_path)[which]
    run, reference = trainer(), trainer()
    run.fit(source, epochs=2, batch_size=10, shuffle=False, progress=False)
    reference.fit(samples(30), epochs=2, batch_size=10, shuffle=False, progress=False)
    for name, value in run.values().items():
        np.testing.assert_array_equal(value, reference.values()[name])


def test_parquet_gives_the_same_run(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install pullback[parquet])")
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed (pip install pullback[parquet])")
    data = samples(30)
    pq.write_table(pa.table({"x": list(data["x"]), "target": data["target"]}), tmp_path / "d.parquet")
    run, reference = trainer(), trainer()
    run.fit(tmp_path / "d.parquet", progress=False)
    reference.fit(data, progress=False)
    np.testing.assert_array_equal(run.parameters()["W"], reference.parameters()["W"])


def test_data_that_does_not_fit_is_refused_with_everything_that_is_wrong() -> None:
    with pytest.raises(Refusal) as error:
        trainer().fit({"x": np.zeros((4, 7), np.float32)}, progress=False)
    assert "[4, 7]" in str(error.value)
    assert "no array for 'target'" in str(error.value)
    with pytest.raises(Refusal, match="numbers of samples differ"):
        trainer().fit({"x": np.zeros((4, 6), np.float32), "target": np.zeros(5, int)}, progress=False)
    with pytest.raises(PullbackError, match="cast it first"):
        trainer().fit({"x": np.zeros((4, 6), np.float32), "target": np.zeros(4)}, progress=False)
    with pytest.raises(PullbackError, match="no data at"):
        trainer().fit("nowhere.npz", progress=False)


# ---- resuming --------------------------------------------------------------------------------------------------


class Cut(Exception):
    """The run is cut short."""


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, accumulate: int) -> None:
    path = tmp_path / "run.safetensors"
    settings: dict[str, Any] = {
        "epochs": 4, "batch_size": 8, "accumulate": accumulate, "progress": False, "validation": samples(20, 3), "early_stopping": 9,
    }  # fmt: skip
    whole = trainer(made(dropout={"r": 0.2}))
    history = whole.fit(samples(), **settings)

    def cut(run: Trainer, row: Any) -> None:
        if row["epoch"] == 3:
            raise Cut

    with pytest.raises(Cut):
        trainer(made(dropout={"r": 0.2})).fit(
            samples(), checkpoint=path, checkpoint_every=3, callbacks=[cut], **settings
        )
    resumed = trainer(made(dropout={"r": 0.2}))
    again = resumed.fit(samples(), checkpoint=path, resume=True, **settings)
    assert again.losses == history.losses
    for name, value in whole.values().items():
        assert value.tobytes() == resumed.values()[name].tobytes(), name


def test_a_run_is_not_resumed_with_other_draws(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    trainer().fit(samples(), batch_size=8, checkpoint=path, progress=False)
    with pytest.raises(Refusal, match="batch_size was 8, now 9"):
        trainer().fit(samples(), batch_size=9, checkpoint=path, resume=True, progress=False)


def test_a_run_is_not_resumed_with_another_loss_or_other_data(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    trainer().fit(samples(), checkpoint=path, progress=False)
    with pytest.raises(Refusal) as refusal:
        trainer(made(loss_options={"label_smoothing": 0.1})).fit(
            samples(99), checkpoint=path, resume=True, progress=False
        )
    assert [reason.split()[0] for reason in refusal.value.reasons] == ["samples", "loss"]


def test_numbered_columns_without_a_gap_are_one_input(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    for numbers, whole in ((range(6), True), (range(1, 7), True), ((0, 1, 2, 3, 4, 6), False), (range(2, 8), False)):
        path.write_text(",".join([*(f"x[{i}]" for i in numbers), "target"]) + "\n" + "1,2,3,4,5,6,0\n" * 3)
        if whole:
            trainer().fit(path, progress=False)
        else:
            with pytest.raises(PullbackError, match="are numbered"):
                trainer().fit(path, progress=False)


def test_a_checkpoint_is_plain_safetensors(tmp_path: Path) -> None:
    run = trainer()
    run.fit(samples(), checkpoint=tmp_path / "run.safetensors", progress=False)
    for name, value in load_file(tmp_path / "run.safetensors").items():
        np.testing.assert_array_equal(value, run.values()[name])


WORKER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_trainer as t
run = t.trainer()
print("ready", flush=True)
run.fit(t.samples(400), epochs=4, batch_size=4, checkpoint=Path({path!r}), checkpoint_every=1, resume=True, progress=False)
"""


def test_a_killed_run_leaves_a_whole_checkpoint_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = trainer()
    whole.fit(samples(400), epochs=4, batch_size=4, progress=False)
    path = tmp_path / "run.safetensors"
    code = textwrap.dedent(WORKER).format(tests=str(Path(__file__).parent), path=str(path))
    rng = np.random.default_rng(int(time.time()))
    for _ in range(4):
        worker = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert worker.stdout is not None
        worker.stdout.readline()
        time.sleep(float(rng.uniform(0.02, 0.4)))
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
        if path.exists():
            load_file(path)  # raises where the file is not whole
    resumed = trainer()
    history = resumed.fit(samples(400), epochs=4, batch_size=4, checkpoint=path, resume=True, progress=False)
    assert len(history.losses) == 400
    for name, value in whole.values().items():
        assert value.tobytes() == resumed.values()[name].tobytes(), name
    assert [f.name for f in tmp_path.iterdir()] == ["run.safetensors"]


# ---- files and export ------------------------------------------------------------------------------------------


def test_a_written_step_trains_as_the_step_in_memory(tmp_path: Path) -> None:
    step = made(batch_norm="frozen")
    save(simplified(step.graph), tmp_path / "train.onnx", profile="native")
    one, two = trainer(step), Trainer.from_file(tmp_path / "train.onnx", threads=1)
    for run in (one, two):
        run.fit(samples(), epochs=2, validation=samples(20, 1), metrics=["accuracy"], progress=False)
        run.export(tmp_path / f"{run is one}.onnx")
    assert one.history.losses == two.history.losses
    assert (tmp_path / "True.onnx").read_bytes() == (tmp_path / "False.onnx").read_bytes()


def test_a_written_step_with_batch_statistics_validates_in_inference_mode(tmp_path: Path) -> None:
    step = made(lora={"rank": 1, "targets": "W"}, train=["g"])
    save(simplified(step.graph), tmp_path / "train.onnx", profile="native")
    one, two = trainer(step), Trainer.from_file(tmp_path / "train.onnx", threads=1)
    for run in (one, two):
        run.fit(samples(), validation=samples(9, 2), metrics=["accuracy"], progress=False)
    assert one.history.epochs[0]["val_loss"] == pytest.approx(two.history.epochs[0]["val_loss"], rel=1e-5)


def test_a_written_step_says_which_file_it_lacks(tmp_path: Path) -> None:
    step = made()
    save(simplified(step.graph), tmp_path / "graph.onnx", embed="none")
    save(simplified(step.apply), tmp_path / "apply.onnx")
    save(simplified(step.evaluation), tmp_path / "evaluation.onnx")
    with pytest.raises(PullbackError, match="give evaluation= to from_file"):
        Trainer.from_file(tmp_path / "graph.onnx").fit(samples(), validation=samples(9), progress=False)
    with pytest.raises(PullbackError, match="give apply= to from_file"):
        Trainer.from_file(tmp_path / "graph.onnx").fit(samples(), accumulate=2, progress=False)
    whole = Trainer.from_file(
        tmp_path / "graph.onnx", threads=1, apply=tmp_path / "apply.onnx", evaluation=tmp_path / "evaluation.onnx"
    )
    whole.fit(samples(), accumulate=2, validation=samples(9), progress=False)
    with pytest.raises(PullbackError, match="no signature"):
        Trainer.from_file(MODEL)


def test_export_changes_the_weights_and_nothing_else(tmp_path: Path) -> None:
    run = trainer()
    run.fit(samples(), epochs=2, progress=False)
    run.export(tmp_path / "trained.onnx")
    before, after = network(), onnx.load(tmp_path / "trained.onnx")
    onnx.checker.check_model(after, full_check=True)
    x = samples(7, 9)["x"]
    (y,) = ort.InferenceSession(after.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(y, run.predict({"x": x})["y"], rtol=1e-4, atol=1e-5)
    assert [t.name for t in after.graph.initializer] == [t.name for t in before.graph.initializer]
    for model in (before, after):
        for tensor in model.graph.initializer:
            tensor.ClearField("raw_data")
        model.graph.node[3].attribute[0].t.ClearField("raw_data")
        model.graph.node[3].attribute[0].t.ClearField("float_data")
    assert before.SerializeToString() == after.SerializeToString()


def test_a_large_model_keeps_its_weights_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "LARGEST", 500)
    monkeypatch.setattr(restore, "BESIDE_FROM", 10)
    run = trainer()
    run.fit(samples(), progress=False)
    x = samples(7, 9)["x"]
    for _ in range(2):  # written again it takes no more place
        run.export(tmp_path / "trained.onnx")
        assert sorted(f.name for f in tmp_path.iterdir()) == ["trained.onnx", "trained.onnx.data"]
        assert (tmp_path / "trained.onnx").stat().st_size < 3000
        sizes = {f.name: f.stat().st_size for f in tmp_path.iterdir()}
        (y,) = ort.InferenceSession(tmp_path / "trained.onnx").run(None, {"x": x})
        np.testing.assert_allclose(y, run.predict({"x": x})["y"], rtol=1e-4, atol=1e-5)
    assert sizes == {f.name: f.stat().st_size for f in tmp_path.iterdir()}


def test_a_model_too_large_to_be_counted_is_large() -> None:
    def byte_size() -> int:
        raise EncodeError("Failed to serialize proto")

    huge: Any = SimpleNamespace(ByteSize=byte_size, graph=onnx.GraphProto())
    assert restore.larger(huge, 10)


def test_weights_that_stand_elsewhere_do_not_count() -> None:
    model = onnx.ModelProto()
    model.graph.initializer.add(name="w", data_type=onnx.TensorProto.FLOAT, dims=[1 << 40])
    assert restore.larger(model, 100)
    model.graph.initializer[0].external_data.add(key="location", value="elsewhere")
    assert not restore.larger(model, 100)


def test_weights_in_a_file_of_their_own_are_trained_and_exported(tmp_path: Path) -> None:
    step = simplified(made().graph)
    save(step, tmp_path / "one.onnx")
    save(step, tmp_path / "two.onnx", external=True)
    runs = [Trainer.from_file(tmp_path / f"{name}.onnx", threads=1) for name in ("one", "two")]
    for name, run in zip(("one", "two"), runs, strict=True):
        run.fit(samples(), progress=False)
        run.export(tmp_path / f"{name}_trained.onnx")
    assert runs[0].history.losses == runs[1].history.losses
    assert (tmp_path / "one_trained.onnx").read_bytes() == (tmp_path / "two_trained.onnx").read_bytes()


def test_merged_weights_are_taken_apart_at_export(tmp_path: Path) -> None:
    model = network()
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == "b":
                node.input[i] = "mean"  # as exporters merge equal tensors: bias and running mean are one
    del model.graph.initializer[2]
    run = Trainer(training_step(load(model), lr=0.1), threads=1)
    run.fit(samples(), progress=False)
    run.export(tmp_path / "trained.onnx")
    x = samples(7, 9)["x"]
    (y,) = ort.InferenceSession(tmp_path / "trained.onnx").run(None, {"x": x})
    np.testing.assert_allclose(y, run.predict({"x": x})["y"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("through_file", [False, True])
def test_parameters_that_an_exporter_merged_are_trained_and_exported_apart(tmp_path: Path, through_file: bool) -> None:
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 17]>
    g (float[N, 3] x) => (float[N, 3] y) <float[3] one_scale = {1, 1, 1}, float[3] one_bias = {0, 0, 0}> {
      two_scale = Identity (one_scale)
      two_bias = Identity (one_bias)
      h = LayerNormalization (x, one_scale, one_bias)
      g = Tanh (h)
      y = LayerNormalization (g, two_scale, two_bias)
    }""")
    step = training_step(load(model), loss="mse_loss", lr=0.1)
    assert set(step.signature.parameters) == {"one_scale", "one_bias", "two_scale", "two_bias"}
    save(step.graph, tmp_path / "step.onnx")
    run = Trainer.from_file(tmp_path / "step.onnx", threads=1) if through_file else Trainer(step, threads=1)
    rng = np.random.default_rng(0)
    x, target = (rng.standard_normal((8, 3)).astype(np.float32) for _ in range(2))
    for _ in range(3):
        run.step({"x": x, "target": target})
    run.export(tmp_path / "trained.onnx")
    trained = onnx.load(tmp_path / "trained.onnx")
    assert [n.op_type for n in trained.graph.node] == ["LayerNormalization", "Tanh", "LayerNormalization"]
    assert len({t.raw_data for t in trained.graph.initializer}) == 4
    (y,) = ort.InferenceSession(tmp_path / "trained.onnx").run(None, {"x": x})
    np.testing.assert_allclose(y, run.predict({"x": x})["y"], rtol=1e-5, atol=1e-6)


def test_weights_inside_branches_go_back_into_their_branch(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 17]>
    g (float[N, 4] x, bool flag) => (float[N, 2] y) {
      [choice] y = If (flag) <
        then_branch = t () => (float[N, 2] a) { [w] W = Constant <value = float[4, 2] {1, 1, 1, 1, 1, 1, 1, 1}> ()  a = MatMul (x, W) },
        else_branch = e () => (float[N, 2] b) { [v] V = Constant <value = float[4, 2] {2, 2, 2, 2, 2, 2, 2, 2}> ()  b = MatMul (x, V) }
      >
    }""")
    step = training_step(load(model), loss="mse_loss", lr=0.1)
    assert set(step.signature.parameters) == {"choice/W", "choice/V"}
    run = Trainer(step, threads=1)
    x = np.ones((3, 4), np.float32)
    run.step({"x": x, "flag": np.array(True), "target": np.zeros((3, 2), np.float32)})
    run.export(tmp_path / "trained.onnx")
    session = ort.InferenceSession(tmp_path / "trained.onnx")
    (a,), (b,) = (session.run(None, {"x": x, "flag": np.array(f)}) for f in (True, False))
    np.testing.assert_allclose(a, x @ run.parameters()["choice/W"], rtol=1e-5)
    assert a[0, 0] < 4
    np.testing.assert_array_equal(b, np.full((3, 2), 8, np.float32))


@pytest.mark.parametrize("options", [{"batch_norm": "frozen"}, {"freeze": ["scale"]}, {"freeze": ["ones"]}])
@pytest.mark.parametrize("given", ["in memory", "in a file", "beside a file"])
def test_what_shares_a_tensor_with_a_weight_but_is_not_trained_stays_as_it_was(
    tmp_path: Path, options: dict[str, Any], given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 17]>
    g (float[N, 2] x) => (float[N, 2] y) <float[2] ones = {1, 1}, float[2] zeros = {0, 0}> {
      mean = Identity (zeros)  var = Identity (ones)  scale = Identity (ones)
      n = BatchNormalization (x, ones, zeros, mean, var)
      y = Mul (n, scale)
    }""")
    step = training_step(load(model), loss="mse_loss", lr=0.5, **options)
    if given == "beside a file":
        monkeypatch.setattr(restore, "LARGEST_CARRIED", 0)
    if given != "in memory":
        save(step.graph, tmp_path / "step.onnx", profile="explicit", target="onnxruntime", embed=None, opset=None)
    run = trainer(step) if given == "in memory" else Trainer.from_file(tmp_path / "step.onnx", threads=1)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((9, 2)).astype(np.float32)
    run.fit({"x": x, "target": 3 * x + 1}, epochs=3, progress=False)
    run.export(tmp_path / "trained.onnx", model=model if given == "beside a file" else None)
    found = ort.InferenceSession(tmp_path / "trained.onnx").run(None, {"x": x})[0]
    expected = (run if given == "in memory" else _with(trainer(step), run)).predict({"x": x})["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def _with(run: Trainer, values: Trainer) -> Trainer:
    run.assign(values.values("parameter", "state"))
    return run


def test_the_moving_average_can_be_exported(tmp_path: Path) -> None:
    run = trainer(made(ema=0.5))
    run.fit(samples(), epochs=2, progress=False)
    run.export(tmp_path / "average.onnx", average=True)
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "average.onnx").graph.initializer}
    np.testing.assert_array_equal(stored["W"], run.values("slot")["ema_W"])
    with pytest.raises(PullbackError, match="no moving average"):
        trainer().export(tmp_path / "x.onnx", average=True)


def test_digits_are_learned_to_97_percent_from_random_weights(tmp_path: Path) -> None:
    with np.load(DATA) as archive:
        data = {k: archive[k] for k in archive.files}
    run = Trainer(training_step(load(MODEL), optimizer="adamw", lr=2e-3), threads=1)
    held_out = {k: data[f"test_{k}"] for k in ("image", "target")}
    history = run.fit(
        {k: data[k] for k in ("image", "target")}, epochs=12, validation=held_out, metrics=["accuracy"], progress=False
    )
    assert history.epochs[-1]["val_accuracy"] > 0.97


@pytest.mark.parametrize("accumulate", [1, 2])
def test_mixed_precision_trains_and_exports(tmp_path: Path, accumulate: int) -> None:
    run = trainer(made(precision="float16", lr=0.03))
    history = run.fit(samples(200), epochs=6 * accumulate, batch_size=10, accumulate=accumulate, progress=False)
    assert history.epochs[-1]["loss"] < 0.7 * history.epochs[0]["loss"]
    run.export(tmp_path / "trained.onnx")
    x = samples(7, 9)["x"]
    (y,) = ort.InferenceSession(tmp_path / "trained.onnx").run(None, {"x": x})
    np.testing.assert_allclose(y, run.predict({"x": x})["y"], rtol=1e-4, atol=1e-5)


def test_adapters_are_merged_at_export(tmp_path: Path) -> None:
    step = made(lora=2, lr=0.05)
    save(simplified(step.graph), tmp_path / "train.onnx")
    for run in (trainer(step), Trainer.from_file(tmp_path / "train.onnx", threads=1)):
        before = run.predict({"x": samples()["x"]})["y"] if run._models.get("evaluation") else None
        run.fit(samples(), epochs=2, progress=False)
        run.export(tmp_path / "trained.onnx")
        after = onnx.load(tmp_path / "trained.onnx")
        assert [t.name for t in after.graph.initializer] == [t.name for t in network().graph.initializer]
        x = samples()["x"]
        (y,) = ort.InferenceSession(after.SerializeToString()).run(None, {"x": x})
        if before is not None:
            assert np.abs(y - before).max() > 1e-2
            np.testing.assert_allclose(y, run.predict({"x": x})["y"], rtol=1e-4, atol=1e-5)


def test_a_batch_of_another_shape_or_kind_is_refused() -> None:
    run, batch = trainer(), samples(4)
    with pytest.raises(PullbackError, match=r"'x' takes float32 \['N', 6\], found an array of shape \[4, 5\]"):
        run.step({**batch, "x": batch["x"][:, :5]})
    with pytest.raises(PullbackError, match="cast it first"):
        run.step({**batch, "target": batch["target"].astype(np.float32)})
    with pytest.raises(Refusal, match="no 'target'"):
        run.step({"x": batch["x"]})


@pytest.mark.parametrize("embed", ["all", "frozen", "none"])
def test_first_values_are_found_wherever_they_are(tmp_path: Path, embed: str) -> None:
    step = made(lora=1)
    save(simplified(step.graph), tmp_path / "train.onnx", profile="native", embed=embed)
    run = Trainer.from_file(tmp_path / "train.onnx", threads=1)
    assert run.step(samples(16)) == trainer(step).step(samples(16))


def test_what_onnxruntime_has_no_kernel_for_is_refused() -> None:
    with pytest.raises(PullbackError, match="has no kernel for a part of this step"):
        trainer(made(precision="bfloat16")).step(samples(4))


def test_accumulated_batches_see_masks_of_their_own() -> None:
    step = made(optimizer="sgd", lr=0.0, batch_norm="frozen", dropout={"r": 0.5})
    run, batch = trainer(step), samples(8)
    alone = run.gradients(batch)[0]
    assert run.gradients(batch)[0] == alone
    assert run.accumulated([batch]) == alone
    alone = run.gradients(batch)[0]  # of the next step
    assert run.accumulated([batch, batch]) != alone
    assert int(run.values("seed")["seed"]) == 0


@pytest.mark.parametrize("label", [-1, 10, 2**40])
def test_a_label_that_is_no_class_is_refused(label: int) -> None:
    step = training_step(load(MODEL), loss="cross_entropy", optimizer="sgd", lr=0.1)
    target = np.array([1, label, -100], np.int64)
    with pytest.raises(PullbackError, match=rf"'target' holds the label {label}, where classes are 0 to 9"):
        Trainer(step).step({"image": np.zeros((3, 1, 8, 8), np.float32), "target": target})


def test_the_ignored_label_is_taken() -> None:
    options = {"ignore_index": 77}
    step = training_step(load(MODEL), loss="cross_entropy", loss_options=options, optimizer="sgd", lr=0.1)
    batch = {"image": np.zeros((2, 1, 8, 8), np.float32), "target": np.array([1, 77], np.int64)}
    assert np.isfinite(Trainer(step).step(batch))


# ---- numbers that are none -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hole", [np.nan, np.inf])
def test_a_number_that_is_none_in_the_data_stops_the_run_and_leaves_the_last_checkpoint(
    tmp_path: Path, hole: float
) -> None:
    data, path = samples(12), tmp_path / "run.safetensors"
    Trainer(made(loss="cross_entropy")).fit(data, batch_size=4, checkpoint=path, progress=False)
    data["x"][7, 2] = hole
    trainer = Trainer(made(loss="cross_entropy"))
    with pytest.raises(PullbackError, match=r"after step \d+, .*'x' holds 1 of them"):
        trainer.fit(data, epochs=2, batch_size=4, checkpoint=path, checkpoint_every=1, resume=True, progress=False)
    assert all(np.isfinite(v).all() for v in load_file(path).values())


def test_a_run_that_diverges_says_so() -> None:
    step = training_step(load(network()), loss="mse", optimizer="sgd", lr=1e12, batch_norm="frozen")
    data = {**samples(12), "target": np.ones((12, 3), np.float32)}
    with np.errstate(all="ignore"), pytest.raises(PullbackError, match="lower the rate, or clip"):
        Trainer(step).fit(data, epochs=20, batch_size=4, progress=False)


def test_holes_in_a_target_are_named() -> None:
    step = training_step(load(network()), loss="mse", optimizer="sgd", lr=0.1)
    target = np.zeros((12, 3), np.float32)
    target[3] = np.nan
    with pytest.raises(PullbackError, match="'target' holds 3 of them"):
        Trainer(step).fit({**samples(12), "target": target}, batch_size=12, progress=False)


# ---- files that cannot be read ---------------------------------------------------------------------------------------------------------

FIELDS = (Entry("x", "input", "uint8", ("N", 2)), Entry("target", "target", "float32", ("N",)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.csv", "x_0,x_1,targ\xe9t\n1,2,3\n".encode("latin1"), "as CSV in UTF-8"),
        ("twice.csv", b"x_0,x_1,target, target\n1,2,3,4\n", "'target' stands there 2 times"),
        ("nothing.npz", b"", "as .npz"),
        ("cut.npz", b"PK\x03\x04 and no more", "as .npz"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_error(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PullbackError, match=message):
        open_data(tmp_path / name, FIELDS)


def test_a_parquet_file_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install pullback[parquet])")
    import pyarrow.parquet as pq

    (tmp_path / "junk.parquet").write_bytes(b"junkjunk")
    for i, second in enumerate(([1], None)):
        pq.write_table(pa.table({"x": [[1, 2], second], "target": [1.0, 2.0]}), tmp_path / f"{i}.parquet")
    for name, message in (("junk", "as Parquet: "), ("0", "column 'x'"), ("1", "column 'x'")):
        with pytest.raises(PullbackError, match=message):
            open_data(tmp_path / f"{name}.parquet", FIELDS)


@pytest.mark.parametrize("number", [-1, 256])
def test_an_integer_that_an_input_cannot_hold_is_not_wrapped(number: int) -> None:
    data = open_data({"x": np.array([[0, 255], [number, 1]]), "target": np.zeros(2, np.float32)}, FIELDS)
    with pytest.raises(PullbackError, match=f"'x' takes uint8, which cannot hold {number}"):
        list(data.batches(2, shuffle=False, seed=0, epoch=0))
