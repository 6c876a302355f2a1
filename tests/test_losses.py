"""Losses: every one with every option, value and gradient, against PyTorch; and against closed forms where PyTorch is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from pullback.algebra import primitives as p
from pullback.algebra.calculus.vjp import vjp
from pullback.algebra.composites import log_softmax
from pullback.algebra.dims import Dim, dim
from pullback.algebra.errors import PullbackError, Refusal
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Graph, building
from pullback.algebra.training.losses import LOSSES, loss
from pullback.algebra.types import DType, TensorType, bf16, f16, f32, f64, i64, tensor

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
        reference = dict(row.options)
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


# ---- CTC -------------------------------------------------------------------------------------------------------------------------------

T, S = dim("T"), dim("S")
LENGTHS = [(6, 3), (5, 1), (6, 0), (2, 2), (1, 3)]  # of input and target; the last target cannot fit


def ctc_feeds(rng: np.random.Generator, dtype: DType, steps: int, classes: int, blank: int) -> dict[str, np.ndarray]:
    batch, longest = len(LENGTHS), 3
    labels = rng.integers(0, classes - 1, size=(batch, longest))
    labels[0] = labels[0, 0]  # repeated labels need a blank between them
    return {
        "input": np.asarray(rng.normal(size=(steps, batch, classes)) * 2, dtype.numpy),
        "target": np.where(labels >= blank, labels + 1, labels),
        "input_lengths": np.array([min(t, steps) for t, _ in LENGTHS]),
        "target_lengths": np.array([s for _, s in LENGTHS]),
    }


def ctc_of_logits(steps: Dim, dtype: DType, options: Mapping[str, Any]) -> Graph:
    """CTC behind a log-softmax, as in a model."""
    record, classes = loss("ctc_loss"), 5
    unbatched, batch_first = options.pop("unbatched", False), options.get("batch_first")
    shape = (steps, classes) if unbatched else (N, steps, classes) if batch_first else (steps, N, classes)
    with building():
        x = p.input("input", tensor(dtype, shape))
        targets = {n: p.input(n, t, "target") for n, t in record.needed([x.type], options).items()}  # type: ignore[list-item]
        y = record([log_softmax(x, (len(shape) - 1,))], targets, options)
        ct = p.input("ct", y.type)  # type: ignore[arg-type]
        (g,) = vjp([y], [ct], [x])
        assert g is not None
        return Graph((x, *targets.values(), ct), {"loss": y, "grad": g})


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("steps", [6, T, 20], ids=["unrolled", "symbolic time", "long"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "options",
    [{}, {"blank": 4}, {"zero_infinity": True}, {"batch_first": True, "zero_infinity": True}, {"max_target_length": 3}],
    ids=str,
)
def test_ctc_is_that_of_pytorch(options: dict[str, Any], reduction: str, steps: Dim, dtype: DType) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    F = torch.nn.functional
    count = steps if isinstance(steps, int) else 6
    feeds = ctc_feeds(np.random.default_rng(1), dtype, count, 5, options.get("blank", 0))
    x = torch.tensor(feeds["input"], requires_grad=True)
    known = {k: options[k] for k in ("blank", "zero_infinity") if k in options}
    lengths = (torch.tensor(feeds["input_lengths"]), torch.tensor(feeds["target_lengths"]))
    expected = F.ctc_loss(F.log_softmax(x, -1), torch.tensor(feeds["target"]), *lengths, reduction=reduction, **known)
    ct = np.ones(tuple(expected.shape), dtype.numpy)
    expected.backward(torch.tensor(ct))
    gradient = x.grad.numpy()
    if options.get("batch_first"):
        feeds["input"], gradient = feeds["input"].swapaxes(0, 1), gradient.swapaxes(0, 1)
    if "max_target_length" in options:
        feeds["target"] = np.concatenate([row[:s] for row, (_, s) in zip(feeds["target"], LENGTHS, strict=True)])
    graph = ctc_of_logits(steps, dtype, {**options, "reduction": reduction})
    found = evaluate(graph, {**feeds, "ct": ct})
    close(found["loss"], expected.detach().numpy(), TOLERANCE[dtype.name], "value")
    fits = slice(None) if options.get("zero_infinity") else slice(0, 4)  # the gradient of infinity is not compared
    axis_first = (lambda a: a) if options.get("batch_first") else (lambda a: a.swapaxes(0, 1))
    if options.get("zero_infinity") or reduction != "mean":
        close(axis_first(found["grad"])[fits], axis_first(gradient)[fits], TOLERANCE[dtype.name], "gradient")


def test_ctc_of_one_sequence_is_that_of_a_batch_of_one() -> None:
    rng = np.random.default_rng(0)
    x, target = rng.normal(size=(6, 5)), np.array([1, 1, 3])
    one = evaluate(
        ctc_of_logits(6, f64, {"unbatched": True}),
        {"input": x, "target": target, "input_lengths": 6, "target_lengths": 3, "ct": 1.0},
    )
    many = evaluate(
        ctc_of_logits(6, f64, {}),
        {"input": x[:, None], "target": target[None], "input_lengths": [6], "target_lengths": [3], "ct": 1.0},
    )
    np.testing.assert_allclose(one["loss"], many["loss"])
    np.testing.assert_allclose(one["grad"], many["grad"][:, 0])


def test_ctc_with_logits_is_that_of_their_log_softmax() -> None:
    feeds = ctc_feeds(np.random.default_rng(2), f64, 6, 5, 0)
    targets = {k: v for k, v in feeds.items() if k != "input"}
    options = {"zero_infinity": True}
    logits = feeds["input"]
    log_p = np.log(softmax(logits, 2))
    found, expected = (
        run_ctc(name, x, targets, options) for name, x in (("ctc_loss_with_logits", logits), ("ctc_loss", log_p))
    )
    np.testing.assert_allclose(found, expected)


def run_ctc(name: str, x: np.ndarray, targets: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> np.ndarray:
    record = loss(name)
    with building():
        v = p.input("input", tensor(f64, x.shape))
        entering = {n: p.input(n, t, "target") for n, t in record.needed([tensor(f64, x.shape)], options).items()}
        graph = Graph((v, *entering.values()), {"loss": record([v], entering, options)})
    return evaluate(graph, {"input": x, **targets})["loss"]


def test_ctc_counts_every_alignment() -> None:
    """All paths of three steps over {blank, a} that collapse to `a`, counted by hand."""
    q = np.array([[0.6, 0.4], [0.3, 0.7], [0.5, 0.5]])
    record = loss("ctc_loss")
    with building():
        x = p.input("input", tensor(f64, (3, 2)))
        target = p.input("target", tensor(i64, (1,)))
        y = record([x], {"target": target}, {"input_lengths": 3, "target_lengths": 1})
        graph = Graph((x, target), {"loss": y})
    paths = ["a__", "_a_", "__a", "aa_", "_aa", "aaa"]
    total = sum(math.prod(q[t, int(c == "a")] for t, c in enumerate(path)) for path in paths)
    np.testing.assert_allclose(evaluate(graph, {"input": np.log(q), "target": [1]})["loss"], -math.log(total))


# ---- losses that PyTorch does not have -------------------------------------------------------------------------------------------------


def run(
    name: str, outputs: Mapping[str, np.ndarray], targets: Mapping[str, Any], dtype: DType = f64, **options: Any
) -> dict[str, np.ndarray]:
    """Value and gradients at known shapes, with a cotangent of ones."""
    made = built(name, [tensor(dtype, np.shape(v)) for v in outputs.values()], options)
    ct = np.ones(sized(made.graph["ct"].shape), dtype.numpy)
    feeds = {k: np.asarray(v, dtype.numpy) for k, v in outputs.items()}
    return evaluate(made.graph, {**feeds, **targets, "ct": ct})


def differences(name: str, outputs: Mapping[str, np.ndarray], targets: Mapping[str, Any], **options: Any) -> None:
    """The gradients against central differences."""
    found, h = run(name, outputs, targets, **options), 1e-6
    for key, value in outputs.items():
        expected = np.zeros_like(value)
        for at in np.ndindex(*value.shape):
            for side in (1, -1):
                moved = value.copy()
                moved[at] += side * h
                expected[at] += side * run(name, {**outputs, key: moved}, targets, **options)["loss"].sum() / (2 * h)
        np.testing.assert_allclose(found[f"grad_{key}"], expected, atol=1e-7, rtol=1e-6)


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(("alpha", "gamma"), [(0.25, 2.0), (-1.0, 1.0), (0.7, 0.0), (0.5, 1.5)])
@pytest.mark.parametrize("target", [bits, unit])
def test_the_sigmoid_focal_loss_is_the_formula_of_its_paper(
    target: Draw, alpha: float, gamma: float, reduction: str
) -> None:
    rng = np.random.default_rng(3)
    x, t = rng.normal(size=(3, 4)) * 2, target(rng, (3, 4))
    q = 1 / (1 + np.exp(-x))
    right = q * t + (1 - q) * (1 - t)
    expected = -(t * np.log(q) + (1 - t) * np.log(1 - q)) * (1 - right) ** gamma
    expected *= 1 if alpha < 0 else alpha * t + (1 - alpha) * (1 - t)
    expected = {"none": expected, "mean": expected.mean(), "sum": expected.sum()}[reduction]
    options = {"alpha": alpha, "gamma": gamma, "reduction": reduction}
    np.testing.assert_allclose(run("sigmoid_focal_loss", {"input": x}, {"target": t}, **options)["loss"], expected)
    differences("sigmoid_focal_loss", {"input": x}, {"target": t}, **options)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.0, 2.5])
@pytest.mark.parametrize("weight", [None, W4])
def test_the_softmax_focal_loss_is_the_formula_of_its_paper(
    weight: np.ndarray | None, gamma: float, reduction: str
) -> None:
    rng = np.random.default_rng(4)
    x, t = rng.normal(size=(5, 4, 2)) * 2, rng.integers(0, 4, size=(5, 2))
    t[0, 0] = -100
    kept, safe = t >= 0, np.where(t >= 0, t, 0)
    q = np.take_along_axis(softmax(x, 1), safe[:, None], 1)[:, 0]
    expected = -((1 - q) ** gamma) * np.log(q) * kept * (1 if weight is None else weight[safe])
    expected = {"none": expected, "mean": expected.sum() / kept.sum(), "sum": expected.sum()}[reduction]
    options = {"gamma": gamma, "weight": weight, "reduction": reduction}
    np.testing.assert_allclose(run("softmax_focal_loss", {"input": x}, {"target": t}, **options)["loss"], expected)
    differences("softmax_focal_loss", {"input": x}, {"target": t}, **options)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("activation", [None, "sigmoid", "softmax"])
def test_the_dice_loss_is_the_formula_of_its_paper(activation: str | None, squared: bool, reduction: str) -> None:
    rng = np.random.default_rng(5)
    x = rng.uniform(0.05, 0.95, size=(3, 4, 5)) if activation is None else rng.normal(size=(3, 4, 5))
    if activation == "softmax":
        labels = rng.integers(0, 4, size=(3, 5))
        q, t, axes, target = softmax(x, 1), np.moveaxis(np.eye(4)[labels], -1, 1), (2,), labels
    else:
        q = x if activation is None else 1 / (1 + np.exp(-x))
        t = target = rng.integers(0, 2, size=x.shape).astype(float)
        axes = (1, 2)
    sizes = q * q + t * t if squared else q + t
    dice = 1 - (2 * (q * t).sum(axis=axes) + 0.5) / (sizes.sum(axis=axes) + 0.5)
    expected = {"none": dice, "mean": dice.mean(), "sum": dice.sum()}[reduction]
    options = {"smooth": 0.5, "squared": squared, "activation": activation, "reduction": reduction}
    np.testing.assert_allclose(run("dice_loss", {"input": x}, {"target": target}, **options)["loss"], expected)
    differences("dice_loss", {"input": x}, {"target": target}, **options)


def test_the_root_of_the_mean_square_has_derivative_zero_at_zero() -> None:
    x = np.array([[1.0, 2.0], [3.0, 5.0]])
    found = run("rmse_loss", {"input": x}, {"target": x})
    assert found["loss"] == 0
    assert np.array_equal(found["grad_input"], np.zeros((2, 2)))
    t = x + np.array([[1.0, -1.0], [2.0, 0.0]])
    np.testing.assert_allclose(run("rmse_loss", {"input": x}, {"target": t})["loss"], math.sqrt(6 / 4))
    np.testing.assert_allclose(run("rmse_loss", {"input": x}, {"target": t}, reduction="sum")["loss"], math.sqrt(6))
    np.testing.assert_allclose(run("rmse_loss", {"input": x}, {"target": t}, reduction="none")["loss"], np.abs(x - t))
    differences("rmse_loss", {"input": x}, {"target": t}, eps=0.1)


@pytest.mark.parametrize("name", ["pairwise", "squared", "cosine", None])
def test_a_triplet_takes_a_distance_by_name_or_as_a_function(name: str | None) -> None:
    rng = np.random.default_rng(6)
    a, b, c = rng.normal(size=(3, 4, 5))
    given = name or (lambda x, y: p.reduce_sum(p.abs(p.add(x, p.neg(y))), axes=(1,)))

    def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        match name:
            case "pairwise":
                return np.sqrt(((x - y + 1e-6) ** 2).sum(axis=1))
            case "squared":
                return ((x - y) ** 2).sum(axis=1)
            case "cosine":
                return 1 - (x * y).sum(axis=1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
        return np.abs(x - y).sum(axis=1)

    expected = np.maximum(distance(a, b) - np.minimum(distance(a, c), distance(b, c)) + 1, 0)
    outputs, options = (
        {"anchor": a, "positive": b, "negative": c},
        {"distance_function": given, "swap": True, "reduction": "none"},
    )
    found = run("triplet_margin_with_distance_loss", outputs, {}, **options)
    np.testing.assert_allclose(found["loss"], expected, atol=1e-12)
    differences("triplet_margin_with_distance_loss", outputs, {}, **options)


# ---- closed forms and contracts --------------------------------------------------------------------------------------------------------


def test_cross_entropy_of_extreme_logits_is_exact_in_value_and_gradient() -> None:
    x = np.array([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]])
    for dtype in (f32, f64):
        found = run("cross_entropy", {"input": x}, {"target": [1, 1]}, dtype, reduction="sum")
        assert found["loss"] == 2e4
        assert np.array_equal(found["grad_input"], [[1, -1, 0], [0, 0, 0]])
    found = run(
        "binary_cross_entropy_with_logits",
        {"input": np.array([1e4, -1e4])},
        {"target": [0.0, 0.0]},
        f32,
        reduction="none",
    )
    assert np.array_equal(found["loss"], np.array([1e4, 0], np.float32))
    assert np.array_equal(found["grad_input"], [1, 0])


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("cross_entropy", classes(4, -100)), ("nll_loss", classes(4)), ("softmax_focal_loss", classes(4)), ("multi_margin_loss", classes(4)),
        ("multilabel_margin_loss", label_lists), ("binary_cross_entropy_with_logits", bits), ("sigmoid_focal_loss", bits),
        ("soft_margin_loss", signs), ("multilabel_soft_margin_loss", bits), ("hinge_embedding_loss", signs), ("l1_loss", extreme),
        ("mse_loss", extreme), ("rmse_loss", extreme), ("huber_loss", extreme), ("smooth_l1_loss", extreme), ("gaussian_nll_loss", extreme),
    ],
)  # fmt: skip
def test_extreme_outputs_give_finite_losses_and_gradients(name: str, target: Draw, dtype: DType) -> None:
    rng = np.random.default_rng(11)
    options = {"var": 0.5} if name == "gaussian_nll_loss" else {}
    x = extreme(rng, (6, 4))
    (key, t) = next(iter(loss(name).needed([tensor(dtype, x.shape)], options).items()))
    found = run(name, {"input": x}, {key: target(rng, sized(t.shape))}, dtype, **options)
    assert np.isfinite(found["loss"])
    assert np.isfinite(found["grad_input"]).all()


def test_the_soft_margin_of_a_great_error_is_linear() -> None:
    found = run("soft_margin_loss", {"input": np.array([1e4, -1e4])}, {"target": [-1.0, -1.0]}, f32, reduction="none")
    assert np.array_equal(found["loss"], np.array([1e4, 0], np.float32))
    assert np.array_equal(found["grad_input"], [1, 0])


def test_small_tails_of_the_logistic_losses_keep_their_digits() -> None:
    found = run(
        "binary_cross_entropy_with_logits",
        {"input": np.array([-30.0, 30.0])},
        {"target": [0.0, 1.0]},
        f32,
        reduction="sum",
    )
    np.testing.assert_allclose(found["grad_input"], [math.exp(-30), -math.exp(-30)], rtol=1e-6)


def test_logits_of_minus_infinity_do_not_disturb_other_classes() -> None:
    x = np.array([[1.0, -np.inf, 2.0]])
    for target in ([2], np.array([[0.0, 0.0, 1.0]])):
        found = run("cross_entropy", {"input": x}, {"target": target}, probabilities=np.ndim(target) == 2)
        np.testing.assert_allclose(found["loss"], math.log1p(math.exp(-1)))
        assert np.isfinite(found["grad_input"]).all()
    found = run("kl_div", {"input": x}, {"target": np.array([[0.5, 0.0, 0.5]])}, reduction="sum")
    np.testing.assert_allclose(found["loss"], math.log(0.5) - 1.5)


def test_ignored_rows_give_exact_zeros_whatever_their_logits_are() -> None:
    x = np.array([[0.0, np.inf], [0.0, 1.0], [np.nan, 0.0]])
    found = run("cross_entropy", {"input": x}, {"target": [-100, 0, -100]})
    np.testing.assert_allclose(found["loss"], math.log1p(math.e))


def test_a_mean_over_no_rows_is_nan_and_a_sum_is_zero() -> None:
    x = np.zeros((2, 3))
    ignored = {"target": [-100, -100]}
    assert np.isnan(run("cross_entropy", {"input": x}, ignored)["loss"])
    assert run("cross_entropy", {"input": x}, ignored, reduction="sum")["loss"] == 0
    empty = {"input": np.zeros((0, 3))}
    assert np.isnan(run("mse_loss", empty, {"target": np.zeros((0, 3))})["loss"])
    assert run("mse_loss", empty, {"target": np.zeros((0, 3))}, reduction="sum")["loss"] == 0
    assert np.isnan(run("cross_entropy", empty, {"target": np.zeros(0, int)})["loss"])


@pytest.mark.parametrize("axis", [1, 2, 3, -1, 0])
def test_the_class_axis_may_be_any(axis: int) -> None:
    rng = np.random.default_rng(7)
    x = rng.normal(size=(2, 4, 3, 5))
    t = rng.integers(0, x.shape[axis], size=np.delete(x.shape, axis))
    options = {"weight": rng.uniform(size=x.shape[axis]), "label_smoothing": 0.1}
    moved = np.moveaxis(x, axis, 1)
    wanted = run("cross_entropy", {"input": moved}, {"target": t}, **options)
    found = run("cross_entropy", {"input": x}, {"target": t}, class_axis=axis, **options)
    np.testing.assert_allclose(found["loss"], wanted["loss"])
    np.testing.assert_allclose(np.moveaxis(found["grad_input"], axis, 1), wanted["grad_input"])


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize(
    ("name", "target", "options"),
    [
        ("cross_entropy", classes(4, -100), {}),
        ("cross_entropy", classes(4), {"weight": W4 + 1, "label_smoothing": 0.1}),
        ("mse_loss", ordinary, {}),
        ("huber_loss", ordinary, {}),
        ("binary_cross_entropy_with_logits", bits, {}),
        ("kl_div", distributions(1), {"reduction": "batchmean"}),
        ("soft_margin_loss", signs, {}),
    ],
)
def test_losses_of_16_bit_models_stay_16_bit_and_near_the_double_ones(
    name: str, target: Draw, options: dict[str, Any], dtype: DType
) -> None:
    rng = np.random.default_rng(8)
    x, t = rng.normal(size=(60, 4)), np.asarray(target(rng, (60, 4)))
    t = t[:, 0] if name == "cross_entropy" else t
    rounded = x.astype(dtype.numpy).astype(float)
    low = run(name, {"input": x}, {"target": t}, dtype, **options)
    high = run(name, {"input": rounded}, {"target": t}, **options)
    assert low["loss"].dtype == low["grad_input"].dtype == dtype.numpy
    np.testing.assert_allclose(low["loss"].astype(float), high["loss"], rtol=4 * TOLERANCE[dtype.name])
    worst = 2 * TOLERANCE[dtype.name] * np.abs(high["grad_input"]).max()
    np.testing.assert_allclose(low["grad_input"].astype(float), high["grad_input"], atol=worst)


def test_a_16_bit_mean_does_not_overflow_where_its_sum_would() -> None:
    x = np.full((300, 300), 1.0)
    found = run("mse_loss", {"input": x}, {"target": x + 100}, f16)
    np.testing.assert_allclose(found["loss"].astype(float), 1e4, rtol=2e-3)
    many = np.tile([[0.0, 10.0]], (9000, 1))
    found = run("cross_entropy", {"input": many}, {"target": np.zeros(9000, int)}, f16)
    np.testing.assert_allclose(found["loss"].astype(float), 10, rtol=2e-3)


def test_no_float32_constant_stands_in_a_double_or_float16_graph() -> None:
    for dtype in (f64, f16):
        for name in ("mse_loss", "binary_cross_entropy_with_logits", "huber_loss"):
            made = built(name, [tensor(dtype, (3, 4))], {})
            literals = [v.dtype for v in made.graph.nodes if v.primitive.name == "literal" and v.dtype.floating]
            assert set(literals) <= {dtype}


def second_gradient(
    record: Any, x: np.ndarray, target: Any, options: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradient, and the gradient of `<gradient, d>` for a direction d."""
    rng = np.random.default_rng(9)
    d = rng.normal(size=x.shape)
    with building():
        v = p.input("input", tensor(f64, x.shape))
        needed = record.needed([v.type], options)
        targets = {n: p.input(n, t, "target") for n, t in needed.items()}
        y = record([v], targets, options)
        (g,) = vjp([y], [p.literal(1.0, f64)], [v])
        (h,) = vjp([g], [p.literal(d)], [v])
        graph = Graph((v, *targets.values()), {"g": g, "h": h})
    out = evaluate(graph, {"input": x, "target": target})
    return out["g"], out["h"], d


@pytest.mark.parametrize(
    ("name", "target", "options"),
    [
        ("cross_entropy", classes(4), {}),
        ("cross_entropy", classes(4, -100), {"label_smoothing": 0.1, "weight": W4}),
        ("binary_cross_entropy_with_logits", bits, {"pos_weight": W4}),
        ("sigmoid_focal_loss", bits, {}),
        ("softmax_focal_loss", classes(4), {}),
        ("huber_loss", ordinary, {}),
        ("poisson_nll_loss", counts, {}),
    ],
)
def test_second_derivatives_are_those_of_differences(name: str, target: Draw, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(10)
    x, h = rng.normal(size=(3, 4)), 1e-6
    t = target(rng, (3,) if name == "cross_entropy" or "softmax" in name else (3, 4))
    _, found, d = second_gradient(loss(name), x, t, options)
    ahead, _, _ = second_gradient(loss(name), x + h * d, t, options)
    behind, _, _ = second_gradient(loss(name), x - h * d, t, options)
    np.testing.assert_allclose(found, (ahead - behind) / (2 * h), atol=1e-7)


def test_every_record_says_what_it_is_and_every_alias_is_its_own() -> None:
    records = {id(r): r for r in LOSSES.values()}.values()
    for record in records:
        assert record.formula
        assert record.reference
        assert record.function.__doc__
        assert record.options["reduction"] == "mean"
        assert LOSSES[record.name] is record
    names = [n for r in records for n in (r.name, *r.aliases)]
    assert len(names) == len(set(names)) == len(LOSSES)
    for activation in (a for r in records for a in r.on_logits.values()):
        assert activation in LOSSES


def test_every_loss_of_torch_nn_functional_has_a_record() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    F = torch.nn.functional
    wanted = {n for n in dir(F) if n.endswith("_loss") and not n.startswith("_")}
    wanted |= {"cross_entropy", "kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits"}
    assert wanted <= set(LOSSES) | {"linear_cross_entropy"}


def test_what_cannot_be_is_refused_with_the_way_out() -> None:
    with pytest.raises(Refusal, match="near names: cross_entropy"):
        loss("cros_entropy")
    with pytest.raises(Refusal, match="no option 'label_smothing'; near names: label_smoothing"):
        loss("cross_entropy").check({"label_smothing": 0.1})
    with pytest.raises(Refusal, match="reduction is one of none, mean, sum, found 'batchmean'"):
        loss("mse").check({"reduction": "batchmean"})
    with pytest.raises(Refusal, match="takes 3 outputs"), building():
        loss("triplet_margin_loss")([p.input("x", tensor(f32, (2, 3)))], {})
    with pytest.raises(PullbackError, match="a target of the shape of the output"), building():
        loss("mse")([p.input("x", tensor(f32, (N, 1)))], {"target": p.input("t", tensor(f32, (N,)), "target")})
    with pytest.raises(PullbackError, match="class_axis 4"):
        loss("cross_entropy").needed([tensor(f32, (2, 3))], {"class_axis": 4})


# ---- onnxruntime -----------------------------------------------------------------------------------------------------------------------

FIRST = {r.loss: r for r in reversed(ROWS) if r.options["reduction"] == "mean"}


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("row", FIRST.values(), ids=lambda r: r.loss)
def test_onnxruntime_computes_what_the_algebra_says(row: Row, dtype: DType) -> None:
    import onnxruntime as ort
    from pullback.backends.onnx_export.emit import to_onnx

    made = built(row.loss, [tensor(dtype, s) for s in row.shapes], row.options)
    session = ort.InferenceSession(to_onnx(made.graph).SerializeToString(), providers=["CPUExecutionProvider"])
    entering = {i.name for i in session.get_inputs()}
    for n in (1, 4):
        feeds = {**drawn(row, made, np.random.default_rng(n), dtype, n), "ct": np.ones((), dtype.numpy)}
        values = session.run(None, {k: v for k, v in feeds.items() if k in entering})
        found = dict(zip((o.name for o in session.get_outputs()), values, strict=True))
        for name, expected in evaluate(made.graph, feeds, sizes={"N": n, "M": 2}).items():
            close(found[name], expected, TOLERANCE[dtype.name], f"{name} at N={n}")
