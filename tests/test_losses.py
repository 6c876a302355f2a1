"""Losses: every one with every option, value and gradient, against PyTorch; and against closed forms where PyTorch is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pullback.algebra import primitives as p
from pullback.algebra.calculus.vjp import vjp
from pullback.algebra.dims import Dim, dim
from pullback.algebra.errors import PullbackError, Refusal
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Graph, Value, building
from pullback.algebra.training.losses import LOSSES, loss
from pullback.algebra.types import DType, TensorType, bf16, f16, f32, f64, tensor

N, M = dim("N", 0), dim("M")
TOLERANCE = {"f32": 1e-5, "f64": 1e-10, "f16": 4e-3, "bf16": 3e-2}
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


# ---- draws -----------------------------------------------------------------------------------------------------------------------------


def ordinary(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=shape) * 2


def extreme(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Ordinary numbers, 1e4 and -1e4 and 0, well mixed."""
    return rng.choice([-1e4, -50.0, -1.0, 0.0, 0.5, 30.0, 1e4], size=shape)


def positive(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(0.1, 3, size=shape)


def unit(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(0.02, 0.98, size=shape)


def edges(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice([0.0, 1e-20, 1e-3, 0.5, 1.0], size=shape)


def bits(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 2, size=shape).astype(float)


def counts(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 5, size=shape).astype(float)


def signs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice([-1.0, 1.0], size=shape)


def log_unit(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.log(unit(rng, shape))


def small_variance(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice([1e-9, 0.5, 2.0], size=shape)


def classes(count: int, *others: int) -> Draw:
    """Indices of classes, with some of these others among them."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        labels = rng.integers(0, count, size=shape)
        for other in others:
            labels = np.where(rng.random(shape) < 0.3, other, labels)
        return np.asarray(labels)

    return draw


def distributions(axis: int) -> Draw:
    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        t = rng.uniform(size=shape)
        return t / t.sum(axis=axis, keepdims=True)

    return draw


def corners(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """One-hot rows of probabilities."""
    return np.eye(shape[1])[rng.integers(0, shape[1], size=shape[0])]


def label_lists(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of distinct labels, each ended by -1 somewhere, with something behind it."""
    rows = np.stack([rng.permutation(shape[-1]) for _ in range(int(np.prod(shape[:-1])))] or [np.zeros(shape[-1], int)])
    rows = rows[: int(np.prod(shape[:-1]))]
    for row in rows:
        end = rng.integers(0, shape[-1] + 1)
        row[end : end + 1] = -1
    return np.asarray(rows.reshape(shape))


# ---- rows ------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A loss, the shapes of its outputs, how outputs and targets are drawn, its options, and the batch sizes at which it is evaluated."""

    loss: str
    shapes: tuple[tuple[Dim, ...], ...]
    draws: tuple[Draw, ...] = (ordinary,)
    target: Draw | None = ordinary
    options: Mapping[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = (1, 4)
    note: str = ""

    def __str__(self) -> str:
        shapes = " ".join(str(list(s)) for s in self.shapes)
        options = " ".join(f"{k}={np.shape(v) if isinstance(v, np.ndarray) else v}" for k, v in self.options.items())
        return f"{self.loss} {shapes} {'/'.join(d.__name__ for d in self.draws)} {options} {self.note}".strip()


def each(name: str, shapes: tuple[tuple[Dim, ...], ...], draws: tuple[Draw, ...], target: Draw | None, *variants: Mapping[str, Any],
         batches: tuple[int, ...] = (1, 4), reductions: tuple[str, ...] = ("none", "mean", "sum"), note: str = "") -> Iterator[Row]:  # fmt: skip
    """Every variant of options with every reduction."""
    for options in variants or ({},):
        for reduction in reductions:
            yield Row(name, shapes, draws, target, {**options, "reduction": reduction}, batches, note)


W4, W5 = np.array([0.5, 2.0, 0.0, 1.5]), np.array([0.3, 1.0, 2.0, 0.7, 1.1])
X, SPATIAL, FLAT = ((N, 4),), ((N, 4, 3, M),), ((4,),)
SOME = (0, 1, 4)


def rows() -> Iterator[Row]:
    for target in (ordinary,):
        yield from each("l1_loss", X, (ordinary,), target, {}, {"weight": W4}, batches=SOME)
        yield from each("mse_loss", X, (ordinary,), target, {}, {"weight": W4}, batches=SOME)
        yield from each("mse_loss", ((),), (ordinary,), target)
        yield from each(
            "huber_loss", X, (ordinary,), target, {}, {"delta": 0.3}, {"delta": 2.5, "weight": W4}, batches=SOME
        )
        yield from each("smooth_l1_loss", X, (ordinary,), target, {}, {"beta": 0.3}, {"beta": 0.0}, batches=SOME)
    yield from each("l1_loss", X, (extreme,), extreme)
    yield from each("mse_loss", X, (extreme,), extreme)
    yield from each("huber_loss", X, (extreme,), extreme)
    yield from each("smooth_l1_loss", X, (extreme,), extreme)
    poisson = ({}, {"full": True}, {"log_input": False}, {"log_input": False, "full": True, "eps": 1e-3})
    yield from each("poisson_nll_loss", X, (positive,), counts, *poisson, batches=SOME)
    for var in (X[0], (N, 1), (N,)):
        yield from each("gaussian_nll_loss", (*X, var), (ordinary, positive), ordinary, {}, {"full": True, "eps": 1e-2})
    yield from each("gaussian_nll_loss", (*X, *X), (ordinary, small_variance), ordinary, {}, {"eps": 0.7})
    yield from each("gaussian_nll_loss", X, (ordinary,), ordinary, {"var": 0.5})
    kl = ("none", "mean", "sum", "batchmean")
    yield from each("kl_div", X, (log_unit,), distributions(1), {}, batches=SOME, reductions=kl)
    yield from each("kl_div", X, (log_unit,), log_unit, {"log_target": True}, reductions=kl)
    yield from each("kl_div", X, (log_unit,), corners, {}, reductions=kl)

    cross = ({}, {"weight": W4}, {"label_smoothing": 0.1}, {"weight": W4, "label_smoothing": 0.3}, {"ignore_index": 2})
    for draw in (ordinary, extreme):
        yield from each("cross_entropy", X, (draw,), classes(4), *cross, batches=SOME)
        yield from each("cross_entropy", X, (draw,), classes(4, -100), *cross[:4])
        yield from each("cross_entropy", X, (draw,), distributions(1), *cross[:4], batches=SOME, note="probabilities")
    ignored = ({"ignore_index": 255}, {"ignore_index": -1, "label_smoothing": 0.2}, {"ignore_index": -1, "weight": W4})
    for options, label in zip(ignored, (255, -1, -1), strict=True):
        yield from each("cross_entropy", X, (ordinary,), classes(4, label), options)
    yield from each(
        "cross_entropy",
        X,
        (ordinary,),
        classes(1, -100, -100, -100, -100, -100, -100),
        {},
        batches=(1,),
        note="ignored",
    )
    yield from each("cross_entropy", SPATIAL, (ordinary,), classes(4, -100), *cross[:4])
    yield from each("cross_entropy", SPATIAL, (ordinary,), distributions(1), *cross[:4], note="probabilities")
    yield from each("cross_entropy", FLAT, (ordinary,), classes(4), *cross)
    yield from each("cross_entropy", FLAT, (ordinary,), distributions(0), *cross[:4], note="probabilities")
    yield from each("nll_loss", X, (log_unit,), classes(4, -100), {}, {"weight": W4}, batches=SOME)
    yield from each("nll_loss", X, (log_unit,), classes(4), {"ignore_index": 1})
    yield from each("nll_loss", SPATIAL, (log_unit,), classes(4, -100), {}, {"weight": W4})
    yield from each("nll_loss", FLAT, (log_unit,), classes(4), {}, {"weight": W4})

    yield from each("binary_cross_entropy", X, (unit,), unit, {}, {"weight": W4}, batches=SOME)
    yield from each("binary_cross_entropy", X, (edges,), bits)
    yield from each("binary_cross_entropy", X, (edges,), unit)
    logits = ({}, {"weight": W4}, {"pos_weight": W4}, {"weight": np.array(2.0), "pos_weight": W4})
    for target in (bits, unit):
        yield from each("binary_cross_entropy_with_logits", X, (ordinary,), target, *logits, batches=SOME)
        yield from each("binary_cross_entropy_with_logits", X, (extreme,), target, *logits)
    yield from each("binary_cross_entropy_with_logits", ((N, M, 4),), (ordinary,), bits, *logits)
    yield from each("soft_margin_loss", X, (ordinary,), signs, batches=SOME)
    for shape in (X, FLAT):
        yield from each("multilabel_soft_margin_loss", shape, (ordinary,), bits, {}, {"weight": W4})
        yield from each("multilabel_margin_loss", shape, (ordinary,), label_lists)
        yield from each(
            "multi_margin_loss", shape, (ordinary,), classes(4), {}, {"p": 2, "margin": 0.5}, {"weight": W4}
        )
    yield from each("multilabel_soft_margin_loss", X, (extreme,), bits)
    yield from each("multi_margin_loss", X, (extreme,), classes(4), {}, {"p": 2})

    yield from each("margin_ranking_loss", ((N,), (N,)), (ordinary, ordinary), signs, {}, {"margin": 0.7}, batches=SOME)
    yield from each("hinge_embedding_loss", X, (positive,), signs, {}, {"margin": 2.0}, batches=SOME)
    yield from each("cosine_embedding_loss", (*X, *X), (ordinary, ordinary), signs, {}, {"margin": 0.3}, batches=SOME)
    yield from each("cosine_embedding_loss", (*FLAT, *FLAT), (ordinary, ordinary), signs)
    three = (ordinary, ordinary, ordinary)
    norms = [{"p": norm, "swap": swap} for norm in (1.0, 2.0, 3.5, math.inf) for swap in (False, True)]
    yield from each("triplet_margin_loss", X * 3, three, None, {}, {"margin": 3.0, "eps": 0.1}, *norms, batches=SOME)
    yield from each("triplet_margin_with_distance_loss", X * 3, three, None, {}, {"margin": 2.5, "swap": True})


ROWS = tuple(rows())


@dataclass(frozen=True)
class Built:
    """A loss with the gradients of its outputs, for a given cotangent."""

    graph: Graph
    outputs: tuple[str, ...]
    targets: Mapping[str, TensorType]


def built(name: str, types: list[TensorType], options: Mapping[str, Any]) -> Built:
    record = loss(name)
    names = record.consumed(options)
    with building():
        outputs = [p.input(n, t) for n, t in zip(names, types, strict=True)]
        targets = {n: p.input(n, t, "target") for n, t in record.needed(types, options).items()}
        y = record(outputs, targets, options)
        ct = p.input("ct", y.type)
        gradients = vjp([y], [ct], outputs)
        assert all(g is not None and g.type == x.type for g, x in zip(gradients, outputs, strict=True))
        named = {f"grad_{n}": g for n, g in zip(names, gradients, strict=True) if g is not None}
        graph = Graph((*outputs, *targets.values(), ct), {"loss": y, **named})
    return Built(graph, names, {n: t.type for n, t in targets.items()})


def sized(shape: tuple[Dim, ...], **sizes: int) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) else sizes[str(d)] for d in shape)


def close(found: np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
    found, expected = found.astype(np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}"
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True, err_msg=what)


def drawn(row: Row, made: Built, rng: np.random.Generator, dtype: DType, n: int) -> dict[str, np.ndarray]:
    sizes = {"N": n, "M": 2}
    feeds = {
        name: np.asarray(draw(rng, sized(shape, **sizes))).astype(dtype.numpy)
        for name, shape, draw in zip(made.outputs, row.shapes, row.draws, strict=True)
    }
    for name, t in made.targets.items():
        assert row.target is not None
        feeds[name] = np.asarray(row.target(rng, sized(t.shape, **sizes))).astype(t.dtype.numpy)
    return feeds


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")  # PyTorch's advice to use batchmean
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_value_and_gradient_are_those_of_pytorch(row: Row, dtype: DType) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    options = dict(row.options)
    if row.note == "probabilities":
        options["probabilities"] = True
    made = built(row.loss, [tensor(dtype, s) for s in row.shapes], options)
    rng = np.random.default_rng(len(str(row)))
    for n in row.batches if any(N in s for s in row.shapes) else row.batches[-1:]:
        feeds = drawn(row, made, rng, dtype, n)
        given = {k: torch.tensor(v) for k, v in feeds.items()}
        for name in made.outputs:
            given[name].requires_grad_()
        reference = {k: v for k, v in row.options.items()}
        for k, v in reference.items():
            if isinstance(v, np.ndarray):
                w = torch.tensor(v.astype(dtype.numpy))
                stretch = row.loss in ("l1_loss", "mse_loss", "huber_loss")
                reference[k] = w.expand(given["input"].shape) if stretch else w
        expected = getattr(torch.nn.functional, row.loss)(**given, **reference)
        ct = np.asarray(rng.normal(size=tuple(expected.shape))).astype(dtype.numpy)
        expected.backward(torch.tensor(ct))
        found = evaluate(made.graph, {**feeds, "ct": ct}, sizes={"N": n, "M": 2})
        close(found["loss"], expected.detach().numpy(), TOLERANCE[dtype.name], f"value at N={n}")
        for name in made.outputs:
            close(
                found[f"grad_{name}"], given[name].grad.numpy(), TOLERANCE[dtype.name], f"gradient of {name} at N={n}"
            )
