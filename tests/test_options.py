"""Options that cannot be meant are refused by name, all at once, whoever takes them."""

from __future__ import annotations

from typing import Any

import onnx
import onnx.parser
import pullback
import pytest
from pullback.algebra.errors import PullbackError, PullbackWarning, Refusal
from pullback.algebra.training.precision import LossScale

SOURCE = """<ir_version: 9, opset_import: ["" : 18]>
g (float[N, 3] x) => (float[N, 2] y) <float[3, 2] W = {1, 2, 3, 4, 5, 6}> { h = Tanh (x) y = MatMul (h, W) }"""


def step(**options: Any) -> pullback.Step:
    return pullback.training_step(onnx.parser.parse_model(SOURCE), **options)


@pytest.mark.parametrize(
    ("loss", "options", "said"),
    [
        ("cross_entropy", {"label_smoothing": 1.5}, ["label_smoothing must lie in [0, 1], found 1.5"]),
        ("cross_entropy", {"label_smoothing": float("nan")}, ["label_smoothing must be a number, found nan"]),
        (
            "cross_entropy",
            {"ignore_index": 0.5, "weigth": 1},
            ["no option 'weigth'", "ignore_index must be an integer, found 0.5"],
        ),
        ("huber", {"delta": 0.0}, ["delta must be above 0, found 0.0"]),
        ("smooth_l1", {"beta": -1.0}, ["beta must be at least 0, found -1.0"]),
        (
            "focal",
            {"gamma": -1.0, "alpha": 2.0},
            ["gamma must be at least 0, found -1.0", "alpha must be at most 1, found 2.0"],
        ),
        (
            "poisson_nll",
            {"full": "yes", "eps": "small"},
            ["full must be true or false, found 'yes'", "eps must be a number, found 'small'"],
        ),
        ("cross_entropy", {"weight": "1, 2"}, ["weight must be numbers, found '1, 2'"]),
        ("l1", {"weight": [1.0, float("nan")]}, ["weight must be numbers, found [1.0, nan]"]),
        ("mse", {"reduction": "none "}, ["reduction is one of none, mean, sum"]),
    ],
)
def test_options_of_a_loss(loss: str, options: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(Refusal) as refusal:
        step(loss=loss, loss_options=options)
    assert len(refusal.value.reasons) == len(said)
    for reason, start in zip(sorted(refusal.value.reasons), sorted(said), strict=True):
        assert reason.startswith(start)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"optimizer": "sgd", "optimizer_options": {"momentum": "much", "maximize": 3}},
            "momentum must be a number, found 'much'",
        ),
        (
            {"optimizer": "sgd", "optimizer_options": {"momentum": "much", "maximize": 3}},
            "maximize must be true or false, found 3",
        ),
        ({"optimizer": "adam", "optimizer_options": {"betas": 0.9}}, "betas must be 2 numbers, found 0.9"),
        ({"optimizer": "adam", "optimizer_options": {"betas": (0.9,)}}, "betas must be 2 numbers, found (0.9,)"),
        ({"optimizer": None}, "a name or an Optimizer is required, found None"),
        ({"lr": "fast"}, "lr must be a number, found 'fast'"),
        ({"groups": [{"params": "W", "lr": "fast"}]}, "lr must be a number, found 'fast'"),
        ({"schedule": ("cosine", {"T_max": "long"})}, "T_max must be an integer, found 'long'"),
        ({"schedule": ("multi_step", {"milestones": [1, 2.5]})}, "milestones must be integers"),
        ({"ema": "slow"}, "ema must be a number, found 'slow'"),
        ({"clip_norm": "1"}, "clip_norm must be a number, found '1'"),
        ({"lora": {"rnk": 2}}, "no option 'rnk'; near names: rank"),
        ({"lora": {"rank": 2.5}}, "rank must be an integer, found 2.5"),
        ({"dropout": 1.5}, "ratio 1.5 is not in [0, 1)"),
        ({"loss": {"y": ("mse", "heavy")}}, "the weight must be a number, found 'heavy'"),
        ({"loss": {"y": ("mse", float("nan"))}}, "the weight must be a number, found nan"),
    ],
)
def test_options_of_a_step(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Refusal) as refusal:
        step(**{"loss": "mse", **options})
    assert any(said in reason for reason in refusal.value.reasons), refusal.value


@pytest.mark.parametrize(
    "options", [{"initial": -1.0}, {"growth": 1.0}, {"backoff": 1.0}, {"interval": 0}, {"initial": "large"}]
)
def test_options_of_a_loss_scale(options: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match=next(iter(options))):
        LossScale(**options)


def test_weights_of_other_classes_than_there_are() -> None:
    with pytest.raises(PullbackError, match=r"one weight for each of 2 classes is required, found f32\[3\]"):
        step(loss="cross_entropy", loss_options={"weight": [1, 2, 3]})
    with pytest.raises(PullbackError, match=r"an option of type f32\[3\] does not fit f32\[N, 2\]"):
        step(loss="bce_with_logits", loss_options={"pos_weight": [1, 2, 3]})


def test_dropout_of_a_model_that_has_none_is_said() -> None:
    with pytest.warns(PullbackWarning, match="the model has none left"):
        assert not step(loss="mse", dropout=True).signature.inputs_of("seed")
    assert step(loss="mse", dropout={"h": 0.5}).signature.inputs_of("seed")
