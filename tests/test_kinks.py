"""The documented choices at kinks, ties, jumps and edges, each at the exact point.

Those that PyTorch has are PyTorch's.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from pullback.algebra import primitives as p
from pullback.algebra.calculus import gradient
from pullback.algebra.calculus.kinks import KINKS, Kink
from pullback.algebra.errors import PullbackWarning
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Graph, building
from pullback.algebra.types import DType, f16, f32, f64, tensor

every = pytest.mark.parametrize("kink", KINKS, ids=lambda k: k.where)


def found(kink: Kink, dtype: DType) -> tuple[list[np.ndarray], np.ndarray]:
    with building():
        xs = [p.input(f"x{i}", tensor(dtype, (len(at),))) for i, at in enumerate(kink.at)]
        y = kink.build(*xs)
    graph = gradient(Graph(tuple(xs), {"y": y}), wrt=[f"x{i}" for i in range(len(xs))], seeds={"y": "seed"})
    seed = np.ones([int(d) for d in y.shape]) if kink.seed is None else np.array(kink.seed)
    values = evaluate(graph, {**{f"x{i}": np.array(at) for i, at in enumerate(kink.at)}, "seed": seed})
    return [values[f"grad_x{i}"] for i in range(len(xs))], seed


@every
@pytest.mark.parametrize("dtype", [f64, f32, f16])
def test_the_gradient_at_the_point_is_the_documented_one(kink: Kink, dtype: DType) -> None:
    tolerance = {"f64": 1e-15, "f32": 1e-6, "f16": 1e-3}[dtype.name]
    for gradient_, expected in zip(found(kink, dtype)[0], kink.gradients, strict=True):
        np.testing.assert_allclose(gradient_.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


@every
def test_the_choice_is_that_of_pytorch(kink: Kink) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    assert kink.torch is not None
    operands = [torch.tensor(at, dtype=torch.float64, requires_grad=True) for at in kink.at]
    y = eval(kink.torch, {"t": torch, **dict(zip("xy", operands, strict=False))})
    seed = torch.tensor(found(kink, f64)[1], dtype=torch.float64)
    gradients = torch.autograd.grad(y, operands, seed)
    for theirs, expected in zip(gradients, kink.gradients, strict=True):
        np.testing.assert_allclose(theirs.numpy(force=True), expected, rtol=1e-12, atol=1e-12)


def test_second_derivatives_at_kinks_are_finite_where_the_first_are_constant() -> None:
    for kink in KINKS:
        if kink.where.startswith(("relu", "abs", "clamp", "max of", "reduce_max", "sign", "floor")):
            with building():
                x = p.input("x0", tensor(f64, (len(kink.at[0]),)))
                others = [p.literal(np.array(at), f64) for at in kink.at[1:]]
                y = kink.build(x, *others)
            first = gradient(Graph((x,), {"y": y}), seeds={"y": "u"})
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PullbackWarning)
                second = gradient(first, of="grad_x0", wrt="x0", seeds={"grad_x0": "v"})
            feeds = {"x0": np.array(kink.at[0]), "u": np.ones([int(d) for d in y.shape]), "v": np.ones(len(kink.at[0]))}
            assert np.all(evaluate(second, feeds)["grad_x0_1"] == 0), kink.where


def test_no_choice_is_listed_twice() -> None:
    assert len({k.where for k in KINKS}) == len(KINKS)
    assert all(k.source.startswith("PyTorch") for k in KINKS)
