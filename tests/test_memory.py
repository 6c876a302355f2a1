"""Forward values computed anew in the backward pass: the same bits, less memory."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pullback.algebra import primitives as p
from pullback.algebra.dims import dim
from pullback.algebra.errors import Refusal
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Constant, Graph, Value, at, building
from pullback.algebra.origin import Origin, Source
from pullback.algebra.passes import default as simplified
from pullback.algebra.training.step import TrainingStep, training_step
from pullback.algebra.types import DType, f32, f64, tensor
from pullback.backends.runtime import Trainer

N = dim("N")


def chain(layers: int = 12, width: int = 8, dtype: DType = f64) -> Graph:
    """`h = tanh(h W + h)`, again and again, as a model's nodes `layer0`, `layer1`, ..."""
    data: dict[str, Constant] = {}
    with building():
        x = p.input("x", tensor(dtype, (N, width)))
        h, weights = x, list[Value]()
        for i in range(layers):
            w = p.input(f"w{i}", tensor(dtype, (width, width)), "parameter")
            with at(Origin("forward", Source(f"layer{i}", "Tanh"))):
                h = p.tanh(p.add(p.dot(h, w, contract=((1,), (0,))), h))
            weights.append(w)
            values = np.random.default_rng(i).standard_normal((width, width)) / np.sqrt(width)
            data[f"w{i}"] = Constant(values.astype(dtype.numpy))
    return Graph((x, *weights), {"y": h}, "chain", data=data)


def batch(n: int = 5, width: int = 8, dtype: DType = f64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal((n, width)).astype(dtype.numpy), "target": rng.integers(0, width, n)}


def tanhs(step: TrainingStep) -> int:
    return sum(v.primitive.name == "tanh" for v in simplified(step.graph).nodes)


@pytest.mark.parametrize("how", [True, 3, "layer*", ["layer2", "layer3"], {"budget": 6000, "sizes": {"N": 5}}])
def test_gradients_have_the_same_bits(how: Any) -> None:
    plain, spare = training_step(chain()), training_step(chain(), checkpoint=how)
    wanted, got = evaluate(plain.graph, batch()), evaluate(simplified(spare.graph), batch())
    for name, value in wanted.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    assert tanhs(spare) > tanhs(plain) == 12
    again = [v for v in spare.nodes() if "recompute" in v.origin.trail]
    assert {v.phase for v in again} == {"backward"}
    assert spare.signature.training["checkpoint"] is not None


def test_patterns_say_what_is_computed_anew() -> None:
    spare = training_step(chain(), checkpoint=["layer2", "layer3"])
    again = {v.origin.source.name for v in spare.nodes() if "recompute" in v.origin.trail and v.origin.source}
    assert again == {"layer2", "layer3"}
    assert tanhs(spare) == 14
    with pytest.raises(Refusal, match="'layr2' matches no node"):
        training_step(chain(), checkpoint=["layr2"])


def test_a_budget_that_cannot_be_kept_is_refused() -> None:
    with pytest.raises(Refusal, match=r"the least estimated peak of kept values is \d+ bytes, the budget 10"):
        training_step(chain(), checkpoint={"budget": 10})


def test_onnxruntime_computes_the_same_losses() -> None:
    losses = []
    for how in (None, True):
        run = Trainer(training_step(chain(dtype=f32), checkpoint=how, lr=0.1), threads=1)
        losses.append([run.step(batch(dtype=f32)) for _ in range(5)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


STATUS = Path("/proc/self/status")


@pytest.mark.skipif(
    not STATUS.exists(), reason="the peak of a process is read from /proc/self/status, which this system lacks"
)
def test_onnxruntime_needs_less_memory() -> None:
    code = """
    import re, sys
    sys.path.insert(0, {tests!r})
    import test_memory as t
    peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", t.STATUS.read_text())[1])
    run = t.Trainer(t.training_step(t.chain(48, 128, t.f32), checkpoint={how}), threads=1)
    data = t.batch(8192, 128, t.f32)
    before = peak()
    run.step(data)
    print(peak() - before)
    """
    peaks = []
    for how in (None, True):
        text = textwrap.dedent(code).format(tests=str(Path(__file__).parent), how=how)
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=120)
        peaks.append(int(done.stdout))
    assert peaks[1] < 0.6 * peaks[0], f"{peaks[1]} kB with recomputation, {peaks[0]} kB without"
