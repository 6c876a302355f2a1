"""Parts of a batch and the whole: what a loss divides by, and with it accumulation and evaluation that do not depend on how data is cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pullback
import pytest
from pullback.algebra import composites as c
from pullback.algebra import primitives as p
from pullback.algebra.errors import PullbackError, PullbackWarning, Refusal
from pullback.algebra.graph import Value

Arrays = dict[str, np.ndarray]
RNG = np.random.default_rng(3)
X = RNG.normal(size=(8, 3)).astype(np.float32)
SHARES = RNG.uniform(size=(8, 4)).astype(np.float32)
LABELS = np.array([-100, -100, -100, 2, 1, -100, 0, 3])  # a whole part is ignored
WEIGHTS = [0.1, 2.0, 3.0, 0.5]
CUTS = (3, 1, 4)

PLAIN = """<ir_version: 9, opset_import: ["" : 18]>
plain (float[N, 3] x) => (float[N, 4] y) <float[3, 4] W = {0.1, 0.2, 0.3, -0.4, 0.5, -0.6, 0.2, -0.2, 0.1, -0.1, 0.4, 0.3}> { y = MatMul (x, W) }"""
TIME_FIRST = PLAIN.replace("float[N", "float[T, N")
FIXED = PLAIN.replace("[N", "[4")


def masked(outputs: Mapping[str, Value], target: Any) -> Value:
    """A sum of masked errors over the sum of the mask."""
    y = outputs["y"]
    mask = target("mask", like=y)
    errors = p.mul(p.abs(c.sub(y, target("wanted", like=y))), mask)
    return p.div(p.reduce_sum(errors, axes=(0, 1)), p.reduce_sum(mask, axes=(0, 1)))


def mixing(outputs: Mapping[str, Value], target: Any) -> Value:
    """Each sample's share depends on all of them: no sum over samples."""
    y = outputs["y"]
    mask = target("mask", like=y)
    total = p.broadcast(p.reduce_sum(mask, axes=(0, 1)), shape=y.shape, axes=())
    return p.reduce_sum(p.mul(p.abs(y), p.div(mask, total)), axes=(0, 1))


def step(source: str = PLAIN, **options: Any) -> pullback.Step:
    return pullback.training_step(onnx.parser.parse_model(source), optimizer="sgd", lr=0.1, **options)


def cut(data: Arrays, axis: int = 0) -> list[Arrays]:
    edges = np.cumsum((0, *CUTS))
    return [{k: np.take(v, range(a, b), axis) for k, v in data.items()} for a, b in pairwise(edges)]


INDEXED, FLOATING = {"x": X, "target": LABELS}, {"x": X, "target": SHARES}
MASKED = {"x": X, "wanted": SHARES, "mask": (SHARES > 0.6).astype(np.float32)}
CASES: list[tuple[str | Callable[..., Value], dict[str, Any], Arrays]] = [
    ("cross_entropy", {}, INDEXED),
    ("cross_entropy", {"weight": WEIGHTS, "label_smoothing": 0.2}, INDEXED),
    ("cross_entropy", {"weight": WEIGHTS, "probabilities": True}, FLOATING),
    ("softmax_focal_loss", {"weight": WEIGHTS}, INDEXED),
    ("mse_loss", {}, FLOATING),
    ("l1_loss", {"weight": np.array(WEIGHTS)}, FLOATING),
    ("dice_loss", {}, FLOATING),
    (masked, {}, MASKED),
]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("loss", "options", "data"), CASES)
def test_parts_of_a_batch_make_the_whole(
    loss: str | Callable[..., Value], options: dict[str, Any], data: Arrays, reduction: str
) -> None:
    given = {**options, "reduction": reduction} if isinstance(loss, str) else {}
    made = step(loss=loss, loss_options=given)
    whole, parts = pullback.Trainer(made, threads=1), pullback.Trainer(made, threads=1)
    assert parts.evaluate(cut(data))["loss"] == pytest.approx(whole.evaluate(data)["loss"], rel=1e-5)
    assert parts.accumulated(cut(data)) == pytest.approx(whole.step(data), rel=1e-5)
    for name, value in whole.parameters().items():
        np.testing.assert_allclose(parts.parameters()[name], value, rtol=1e-4, atol=1e-6)


def test_a_weight_is_what_the_loss_divides_by() -> None:
    trainer = pullback.Trainer(step(loss="cross_entropy", loss_options={"weight": WEIGHTS}), threads=1)
    assert trainer.weight(INDEXED) == pytest.approx(3.0 + 2.0 + 0.1 + 0.5)
    assert pullback.Trainer(step(loss="mse"), threads=1).weight(FLOATING) == 8 * 4
    assert pullback.Trainer(step(loss="mse", loss_options={"reduction": "sum"}), threads=1).weight(FLOATING) == 1


def repeated(outputs: Mapping[str, Value], target: Any) -> Value:
    """A mean that is given to each sample before it is averaged again."""
    y = outputs["y"]
    mean = c.mean(p.mul(y, target("mask", like=y)), (0, 1))
    return c.mean(p.broadcast(mean, shape=y.shape, axes=()), (0, 1))


@pytest.mark.parametrize("loss", ["rmse", mixing, repeated])
def test_a_loss_that_is_no_sum_over_samples_says_so(loss: Any) -> None:
    data = FLOATING if loss == "rmse" else {k: MASKED[k] for k in ("x", "mask")}
    trainer = pullback.Trainer(step(loss=loss), threads=1)
    with pytest.warns(PullbackWarning, match="not the gradient of all in one batch"):
        trainer.accumulated(cut(data))
    with pytest.raises(PullbackError, match="neither a mean nor a sum"):
        trainer.weight(data)


def test_losses_over_different_numbers_say_so() -> None:
    source = PLAIN.replace("] y)", "] y, float[N, 4] z)").replace("(x, W)", "(x, W) z = Tanh (y)")
    alike = step(source, loss={"y": ("mse_loss", 0.3), "z": "l1_loss"})
    assert alike.signature.loss["parts"] == "mean"
    assert "parts" not in step(source, loss={"y": "cross_entropy", "z": "l1_loss"}).signature.loss


def test_sizes_that_a_model_computes_do_not_tie_its_samples_together() -> None:
    """As exporters write the scale of an attention: from the last size of a shape."""
    scaled = PLAIN.replace(
        "y = MatMul (x, W)",
        "s = Shape (x) l = Gather (s, last) f = Cast <to = 1> (l) r = Sqrt (f) d = Div (x, r) y = MatMul (d, W)",
    )
    scaled = scaled.replace("<float[3, 4] W", "<int64 last = {1}, float[3, 4] W")
    assert step(scaled, loss="mse").signature.loss["parts"] == "mean"
    tied = scaled.replace("last = {1}", "last = {0}")
    assert "parts" not in step(tied, loss="mse").signature.loss


def test_a_mean_by_a_computed_size_is_a_mean() -> None:
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]>
    g (float[N, 3] x) => (float loss) <float[3, 4] W = {1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3}, int64 rows = {0}> {
      y = MatMul (x, W) q = Mul (y, y) total = ReduceSum <keepdims = 0> (q)
      s = Shape (y) n = Gather (s, rows) f = Cast <to = 1> (n) loss = Div (total, f)
    }""")
    trainer = pullback.Trainer(pullback.training_step(model, loss=None, lr=0.1), threads=1)
    assert trainer.weight({"x": X}) == 8
    assert trainer.evaluate({"x": X}, batch_size=3)["loss"] == pytest.approx(
        trainer.evaluate({"x": X})["loss"], rel=1e-6
    )


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_elements_are_counted_along_every_axis_of_a_symbolic_size(dtype: str) -> None:
    source = f"""<ir_version: 9, opset_import: ["" : 18]>
    g ({dtype}[N, T, 3] x) => ({dtype}[N, T, 3] y) <{dtype}[3] w = {{1, 2, 3}}> {{ y = Mul (x, w) }}"""
    x = np.zeros((2, 5, 3), np.float16)
    means, sums = (
        pullback.Trainer(step(source, loss="mse", loss_options={"reduction": r}), threads=1) for r in ("mean", "sum")
    )
    whole, half = ({"x": a, "target": a} for a in (x, x[:, :2]))
    assert means.weight(whole) / means.weight(half) == 5 / 2
    assert sums.weight(whole) == sums.weight(half) == 1


def test_a_fixed_batch_counts_like_any_other() -> None:
    made = step(FIXED, loss="mse")
    assert made.signature.loss["parts"] == "mean"
    assert made.weight is None
    trainer, twice = pullback.Trainer(made, threads=1), pullback.Trainer(made, threads=1)
    half = {k: v[:4] for k, v in FLOATING.items()}
    assert trainer.step(half) == pytest.approx(twice.accumulated([half, half]))
    np.testing.assert_allclose(trainer.parameters()["W"], twice.parameters()["W"], rtol=1e-5)


def test_samples_that_fill_no_fixed_batch_are_left_out_aloud() -> None:
    trainer = pullback.Trainer(step(FIXED, loss="mse"), threads=1)
    data = {k: v[:6] for k, v in FLOATING.items()}
    with pytest.warns(PullbackWarning) as said:
        history = trainer.fit(data, epochs=3, validation=data, shuffle=False, progress=False)
    assert ["2 of 6 training" in str(w.message) or "2 of 6 held-out" in str(w.message) for w in said] == [True, True]
    assert history.epochs[-1]["val_loss"] == pytest.approx(
        trainer.evaluate({k: v[:4] for k, v in data.items()})["loss"]
    )
    with pytest.raises(PullbackError, match="3 samples do not fill a batch of 4"), pytest.warns(PullbackWarning):
        trainer.fit({k: v[:3] for k, v in data.items()}, progress=False)


def test_parts_are_cut_along_the_axis_of_samples() -> None:
    made = step(TIME_FIRST, loss="rmse")
    data = {"x": np.stack([X, X + 1], 0), "target": np.stack([SHARES, SHARES], 0)}
    trainer = pullback.Trainer(made, threads=1)
    axes = {"x": 1, "target": 1}
    losses = [trainer.evaluate(part)["loss"] for part in cut(data, 1)]
    found = trainer.evaluate(data, batch_size=3, axes=axes)["loss"]
    parts = [trainer.evaluate({k: v[:, a:b] for k, v in data.items()})["loss"] for a, b in ((0, 3), (3, 6), (6, 8))]
    assert found == pytest.approx(np.average(parts, weights=(3, 3, 2)), rel=1e-6)
    with pytest.warns(PullbackWarning):
        mean = trainer.accumulated(cut(data, 1), axes=axes)
    assert mean == pytest.approx(np.average(losses, weights=CUTS), rel=1e-6)


def test_a_written_step_carries_its_weight(tmp_path: Path) -> None:
    made = step(loss="cross_entropy")
    made.save(tmp_path / "step.onnx")
    made.apply.save(tmp_path / "apply.onnx")
    written = pullback.Trainer.from_file(tmp_path / "step.onnx", apply=tmp_path / "apply.onnx", threads=1)
    assert written.weight(INDEXED) == 4
    assert written.accumulated(cut(INDEXED)) == pytest.approx(pullback.Trainer(made, threads=1).step(INDEXED))


def test_metrics_do_not_depend_on_batches_and_leave_out_ignored_rows() -> None:
    trainer = pullback.Trainer(step(loss="cross_entropy"), threads=1)
    right = trainer.predict({"x": X})["y"].argmax(1) == LABELS
    expected = right[LABELS >= 0].mean()
    assert [trainer.evaluate(INDEXED, batch_size=n, metrics=["accuracy"])["accuracy"] for n in (3, 8)] == [expected] * 2
    errors = pullback.Trainer(step(loss="mse"), threads=1)
    root = np.sqrt(np.square(errors.predict({"x": X})["y"] - SHARES).mean())
    assert errors.evaluate(FLOATING, batch_size=3, metrics=["rmse"])["rmse"] == pytest.approx(root, rel=1e-6)


def test_a_loss_with_a_weight_is_measured_like_one_without() -> None:
    heavy, plain = (
        pullback.Trainer(step(loss=loss), threads=1) for loss in ({"y": ("cross_entropy", 2.0)}, "cross_entropy")
    )
    assert (
        heavy.evaluate(INDEXED, metrics=["accuracy"])["accuracy"]
        == plain.evaluate(INDEXED, metrics=["accuracy"])["accuracy"]
    )
    assert heavy.evaluate(cut(INDEXED))["loss"] == pytest.approx(2 * plain.evaluate(INDEXED)["loss"])
    with pytest.raises(PullbackError, match="holds the label 4"):
        heavy.step({**INDEXED, "target": np.where(LABELS < 0, LABELS, LABELS + 1)})


def test_metrics_that_cannot_be_are_refused_together() -> None:
    trainer = pullback.Trainer(step(loss="cross_entropy"), threads=1)
    with pytest.raises(Refusal) as refusal:
        trainer.evaluate(INDEXED, metrics=["mse", "f1", "accuracy", "accuracy"])
    assert len(refusal.value.reasons) == 3
