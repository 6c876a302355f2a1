"""Random numbers: the published vectors of the generator, and the statistics of what is made of it."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pullback.algebra import primitives as p
from pullback.algebra.dims import dim
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Graph, Value, building
from pullback.algebra.training.random import bernoulli, normal, threefry, uniform
from pullback.algebra.types import DType, bf16, f16, f32, f64, i64, tensor

# Random123, tests/kat_vectors: rounds, counter, key, result
VECTORS = [
    (13, (0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x9D1C5EC6, 0x8BD50731)),
    (13, (0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0xFD36D048, 0x2D17272C)),
    (13, (0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xBA3E4725, 0xF27D669E)),
    (20, (0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    (20, (0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    (20, (0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]
N = dim("N")


def key_inputs() -> tuple[Value, Value]:
    return p.input("seed", tensor(i64), "seed"), p.input("step", tensor(i64), "step")


def draws(make: Callable[[Value, Value], Value], **sizes: int) -> Callable[[int, int], np.ndarray]:
    """A function of seed and step that evaluates what `make(seed, step)` builds."""
    with building():
        seed, step = key_inputs()
        graph = Graph((seed, step), {"y": make(seed, step)})
    return lambda seed, step: evaluate(graph, {"seed": seed, "step": step}, sizes=sizes)["y"]


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), VECTORS)
def test_threefry_gives_the_published_words(
    rounds: int, counter: tuple[int, int], key: tuple[int, int], expected: tuple[int, int]
) -> None:
    with building():
        values = [p.input(n, tensor(i64)) for n in ("k0", "k1", "c0", "c1")]
        x, y = threefry((values[0], values[1]), (values[2], values[3]), rounds)
        graph = Graph(tuple(values), {"x": x, "y": y})
    out = evaluate(graph, dict(zip(("k0", "k1", "c0", "c1"), (*key, *counter), strict=True)))
    assert (int(out["x"]), int(out["y"])) == expected


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_rate_of_a_mask_is_right_to_four_sigma_on_a_million_draws(probability: float) -> None:
    mask = draws(lambda seed, step: bernoulli(seed, step, probability, shape=(1000, 1000)))(7, 3)
    assert mask.dtype == bool
    sigma = math.sqrt(probability * (1 - probability) / mask.size)
    assert abs(mask.mean() - probability) <= 4 * sigma


@pytest.mark.parametrize(("dtype", "bits"), [(f64, 53), (f32, 24), (f16, 11), (bf16, 8)])
def test_uniform_numbers_fill_zero_to_one_with_the_bits_of_their_dtype(dtype: DType, bits: int) -> None:
    u = draws(lambda seed, step: uniform(seed, step, shape=(100_000,), dtype=dtype))(1, 0)
    assert u.dtype == dtype.numpy
    wide = u.astype(np.float64)
    assert wide.min() >= 0
    assert wide.max() < 1
    assert np.array_equal(wide * 2.0**bits, np.floor(wide * 2.0**bits))
    n, half = u.size, 0.5 ** (bits + 1)  # truncation lowers the mean by half a step
    assert abs(wide.mean() + half - 0.5) <= 4 * math.sqrt(1 / 12 / n)
    assert abs(wide.var() - 1 / 12) <= 4 * math.sqrt(1 / 180 / n)
    counts, _ = np.histogram(wide, bins=16, range=(0, 1))
    assert ((counts - n / 16) ** 2 / (n / 16)).sum() < 44.3  # chi-square of 15 degrees at 1e-4


def test_neighbouring_numbers_do_not_correlate() -> None:
    u = draws(lambda seed, step: uniform(seed, step, shape=(100_000,), dtype=f64))(5, 9)
    for lag in (1, 2, 50_000):
        correlation = np.corrcoef(u[:-lag], u[lag:])[0, 1]
        assert abs(correlation) <= 4 / math.sqrt(u.size - lag)


def test_seed_step_and_stream_each_change_every_mask_and_nothing_else_does() -> None:
    def at(stream: int) -> Callable[[int, int], np.ndarray]:
        return draws(lambda seed, step: uniform(seed, step, shape=(N, 4), stream=stream), N=50)

    first, other = at(0), at(1)
    base = first(1, 2)
    assert np.array_equal(base, first(1, 2))
    changed = [first(2, 2), first(1, 3), other(1, 2), first(1 + (1 << 32), 2), first(-1, 2)]
    for u in changed:
        assert np.mean(u == base) < 0.05
        assert abs(np.corrcoef(u.ravel(), base.ravel())[0, 1]) < 4 / math.sqrt(200)


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_a_symbolic_batch_gives_the_numbers_of_the_known_one(n: int) -> None:
    symbolic = draws(lambda seed, step: uniform(seed, step, shape=(dim("N", 0), 3)), N=n)(3, 4)
    known = draws(lambda seed, step: uniform(seed, step, shape=(n, 3)))(3, 4)
    assert symbolic.shape == (n, 3)
    assert np.array_equal(symbolic, known)


@pytest.mark.parametrize("dtype", [f64, f32])
def test_normal_numbers_have_mean_zero_and_variance_one(dtype: DType) -> None:
    z = draws(lambda seed, step: normal(seed, step, shape=(100_000,), dtype=dtype))(11, 0)
    assert z.dtype == dtype.numpy
    assert np.isfinite(z).all()
    assert abs(z.mean()) <= 4 / math.sqrt(z.size)
    assert abs(z.astype(np.float64).var() - 1) <= 4 * math.sqrt(2 / z.size)
    assert abs((np.abs(z) < 1).mean() - math.erf(math.sqrt(0.5))) <= 4 * math.sqrt(0.22 / z.size)


def masks() -> Graph:
    """Uniform numbers, a mask, and double numbers, of a symbolic batch."""
    with building():
        seed, step = key_inputs()
        x = p.input("x", tensor(f32, (N, 5)))
        kept = bernoulli(seed, step, 0.3, shape=x.shape, stream=2)
        outputs = {
            "uniform": p.add(x, uniform(seed, step, shape=x.shape)),
            "masked": p.select(kept, x, p.number(0, x)),
        }
        return Graph((seed, step, x), outputs)


FEEDS = {"seed": np.asarray(-12345678901234), "step": np.asarray(3), "x": np.ones((7, 5), np.float32)}


def test_onnxruntime_draws_the_same_bits() -> None:
    import onnxruntime as ort
    from pullback.backends.onnx_export.emit import to_onnx

    graph = masks()
    session = ort.InferenceSession(to_onnx(graph).SerializeToString(), providers=["CPUExecutionProvider"])
    for step in range(3):
        feeds = {**FEEDS, "step": np.asarray(step)}
        found = dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds), strict=True))
        for name, expected in evaluate(graph, feeds).items():
            assert np.array_equal(found[name], expected)


def test_iree_draws_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("iree.compiler", reason="iree-base-compiler is not installed (pip install pullback[mlir])")
    runtime = pytest.importorskip(
        "iree.runtime", reason="iree-base-runtime is not installed (pip install pullback[mlir])"
    )
    import onnx
    from pullback.backends.onnx_export.emit import to_onnx

    graph = masks()
    model = to_onnx(graph, target="iree")
    onnx.save(model, tmp_path / "masks.onnx")
    programs = Path(sys.executable).parent
    for command in (
        ["iree-import-onnx", "masks.onnx", "-o", "masks.mlir"],
        ["iree-compile", "masks.mlir", "--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu", "-o", "masks.vmfb"],
    ):  # fmt: skip
        done = subprocess.run(
            [programs / command[0], *command[1:]], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    module = runtime.load_vm_flatbuffer_file(str(tmp_path / "masks.vmfb"), driver="local-task")
    (name,) = {n.removesuffix("$async") for n in module.vm_module.function_names if not n.startswith("__")}
    found = getattr(module, name)(*(FEEDS[i.name] for i in model.graph.input))
    for output, expected in zip(found, evaluate(graph, FEEDS).values(), strict=True):
        assert np.array_equal(output.to_host(), expected)
