"""Learning-rate schedules and gradient clipping: against PyTorch, and in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from pullback.algebra import primitives as p
from pullback.algebra.errors import Refusal
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Graph, Value, building
from pullback.algebra.training.clipping import clip_by_global_norm, clip_by_norm, clip_by_value
from pullback.algebra.training.schedules import (
    SCHEDULES,
    Constant,
    Cosine,
    Exponential,
    Linear,
    OneCycle,
    Schedule,
    Sequential,
    schedule,
)  # fmt: skip
from pullback.algebra.types import DType, bf16, f16, f32, f64, i64, tensor

TOLERANCE = {"f32": 1e-5, "f64": 1e-12}
STEPS = 50


def rates(rule: Schedule, dtype: DType, steps: Sequence[int], lr: float = 0.1) -> np.ndarray:
    """The rate of each of these steps."""
    with building():
        step, base = p.input("step", tensor(i64), "step"), p.input("lr", tensor(dtype), "hyperparameter")
        rate = rule.rate(step, base)
        assert rate.type == base.type
        graph = Graph((step, base), {"rate": rate})
    return np.array([evaluate(graph, {"step": t, "lr": lr})["rate"] for t in steps])


CASES = [
    ("constant", "ConstantLR", {"factor": 0.3, "total_iters": 7}),
    ("linear", "LinearLR", {"start_factor": 0.25, "total_iters": 20}),
    ("linear", "LinearLR", {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 30}),
    ("cosine", "CosineAnnealingLR", {"T_max": 49}),
    ("cosine", "CosineAnnealingLR", {"T_max": 15, "eta_min": 0.01}),
    ("cosine_restarts", "CosineAnnealingWarmRestarts", {"T_0": 7, "eta_min": 0.01}),
    ("cosine_restarts", "CosineAnnealingWarmRestarts", {"T_0": 3, "T_mult": 2}),
    ("step", "StepLR", {"step_size": 12, "gamma": 0.5}),
    ("multi_step", "MultiStepLR", {"milestones": [5, 20, 31], "gamma": 0.3}),
    ("multi_step", "MultiStepLR", {"milestones": [5, 5, 31]}),
    ("exponential", "ExponentialLR", {"gamma": 0.93}),
    ("polynomial", "PolynomialLR", {"total_iters": 30}),
    ("polynomial", "PolynomialLR", {"total_iters": 60, "power": 2.5}),
    ("one_cycle", "OneCycleLR", {"total_steps": 50}),
    ("cyclic", "CyclicLR", {"max_lr": 0.5, "step_size_up": 7}),
    ("cyclic", "CyclicLR", {"max_lr": 0.5, "step_size_up": 5, "step_size_down": 11, "mode": "triangular2"}),
    ("cyclic", "CyclicLR", {"max_lr": 0.5, "step_size_up": 5, "mode": "exp_range", "gamma": 0.97}),
    ("one_cycle", "OneCycleLR", {"total_steps": 50, "anneal_strategy": "linear", "pct_start": 0.2, "div_factor": 10.0}),
    ("one_cycle", "OneCycleLR", {"total_steps": 50, "three_phase": True, "final_div_factor": 100.0}),
    ("one_cycle", "OneCycleLR", {"total_steps": 50, "three_phase": True, "anneal_strategy": "linear"}),
]


def of_pytorch(torch: Any, make: Callable[[Any], Any], dtype: DType, lr: float = 0.1) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make(optimizer)
    found = []
    for t in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if t < STEPS - 1:
            scheduler.step()
    return found


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize(("name", "cls", "options"), CASES, ids=str)
def test_fifty_steps_follow_pytorchs_scheduler(name: str, cls: str, options: dict[str, Any], dtype: DType) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    own = {"one_cycle": {"max_lr": 0.1}, "cyclic": {"base_lr": 0.1, "cycle_momentum": False}}
    given = {**own.get(name, {}), **options}
    expected = of_pytorch(torch, lambda o: getattr(torch.optim.lr_scheduler, cls)(o, **given), dtype)
    found = rates(schedule(name, **options), dtype, range(STEPS))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE[dtype.name], atol=1e-8 if dtype is f32 else 1e-15)


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_a_warm_up_goes_before_any_schedule(dtype: DType) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    scheduler = torch.optim.lr_scheduler

    def make(optimizer: Any) -> Any:
        rise = scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=10)
        fall = scheduler.CosineAnnealingLR(optimizer, T_max=40)
        return scheduler.SequentialLR(optimizer, [rise, fall], milestones=[10])

    found = rates(schedule("cosine", T_max=40, warmup_steps=10, warmup_factor=0.2), dtype, range(STEPS))
    np.testing.assert_allclose(found, of_pytorch(torch, make, dtype), rtol=TOLERANCE[dtype.name], atol=1e-8)


def test_closed_forms_of_every_schedule() -> None:
    def at(name: str, step: int, **options: Any) -> float:
        return float(rates(schedule(name, **options), f64, [step])[0])

    close = pytest.approx
    assert at("constant", 1000) == 0.1
    assert at("linear", 2, start_factor=0.0, total_iters=4) == close(0.05)
    assert at("cosine", 25, T_max=50) == close(0.05)
    assert at("cosine_restarts", 10, T_0=10) == close(0.1)
    assert at("step", 30, step_size=10) == close(1e-4)
    assert at("multi_step", 20, milestones=(5, 20)) == close(1e-3)
    assert at("exponential", 3, gamma=0.5) == close(0.0125)
    assert at("polynomial", 5, total_iters=10, power=2.0) == close(0.025)
    assert at("polynomial", 50, total_iters=10, power=2.0) == 0
    assert at("inverse_sqrt", 3, warmup=16) == close(0.025)
    assert at("inverse_sqrt", 63, warmup=16) == close(0.05)
    assert at("one_cycle", 29, total_steps=100) == close(0.1)
    assert at("one_cycle", 99, total_steps=100) == close(0.1 / 25e4)
    assert at("one_cycle", 500, total_steps=100) == close(0.1 / 25e4)
    assert at("step", 0, step_size=10, warmup_steps=4) == 0
    assert at("step", 2, step_size=10, warmup_steps=4) == close(0.05)
    assert at("step", 14, step_size=10, warmup_steps=4) == close(0.01)


def test_schedules_follow_one_another() -> None:
    rule = Sequential(
        schedules=(Linear(start_factor=0.5, total_iters=2), Constant(), Exponential(gamma=0.5)), milestones=(2, 4)
    )
    np.testing.assert_allclose(rates(rule, f64, range(7), 1.0), [0.5, 0.75, 1, 1, 1, 0.5, 0.25])


def test_late_steps_keep_their_digits_in_float32() -> None:
    late = [10_000_000, 10_000_123]
    found = rates(Cosine(T_max=1000), f32, late)
    np.testing.assert_allclose(found, [0.05 * (1 + math.cos(math.pi * (t % 2000) / 1000)) for t in late], rtol=1e-5)
    np.testing.assert_allclose(rates(OneCycle(total_steps=1000), f32, late), 0.1 / 25e4, rtol=1e-5)


def test_every_schedule_says_what_it_is() -> None:
    for name, cls in SCHEDULES.items():
        assert cls.name == name
        assert cls.formula
        assert cls.reference


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("cosin", {}, "near names: cosine"),
        ("cosine", {"t_max": 3}, "no option 't_max'; near names: T_max\n  - option 'T_max' is required"),
        ("step", {"step_size": 0}, "step_size must be above 0, found 0"),
        ("one_cycle", {"total_steps": 10, "anneal_strategy": "sin"}, "anneal_strategy is 'cos' or 'linear'"),
    ],
)
def test_what_cannot_be_is_refused(name: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(Refusal, match=match):
        schedule(name, **options)
    with pytest.raises(Refusal, match="one ascending milestone"):
        Sequential(schedules=(Constant(), Constant()), milestones=(3, 2))


# ---- clipping --------------------------------------------------------------------------------------------------------------------------


def clipped(
    make: Callable[[list[Value]], Sequence[Value]], arrays: Sequence[np.ndarray], dtype: DType
) -> list[np.ndarray]:
    with building():
        grads = [p.input(f"g{i}", tensor(dtype, a.shape)) for i, a in enumerate(arrays)]
        outputs = {f"y{i}": v for i, v in enumerate(make(grads))}
        graph = Graph(tuple(grads), outputs)
    return list(evaluate(graph, {f"g{i}": a for i, a in enumerate(arrays)}).values())


def some_gradients(scale: float) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [scale * rng.normal(size=shape) for shape in ((3, 4), (), (5,))]


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("scale", [0.01, 10.0, 0.0])
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_the_global_norm_is_clipped_as_pytorch_does(order: float, scale: float, dtype: DType) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    arrays = [a.astype(dtype.numpy) for a in some_gradients(scale)]

    def together(grads: list[Value]) -> list[Value]:
        new, norm = clip_by_global_norm(grads, 1.5, order)
        return [*new, norm]

    def each(grads: list[Value]) -> list[Value]:
        return clip_by_norm(grads, 1.5, order)

    for make, groups in ((together, [[0, 1, 2]]), (each, [[0], [1], [2]])):
        parameters = [torch.nn.Parameter(torch.zeros(a.shape, dtype=torch.tensor(a).dtype)) for a in arrays]
        for parameter, a in zip(parameters, arrays, strict=True):
            parameter.grad = torch.tensor(a)
        norms = [torch.nn.utils.clip_grad_norm_([parameters[i] for i in group], 1.5, order) for group in groups]
        found = clipped(make, arrays, dtype)
        for a, parameter in zip(found, parameters, strict=False):
            np.testing.assert_allclose(a, parameter.grad.numpy(), rtol=TOLERANCE[dtype.name] / 10, atol=1e-15)
        if make is together:
            np.testing.assert_allclose(found[-1], norms[0].numpy(), rtol=TOLERANCE[dtype.name] / 10)


def test_values_are_clipped_at_both_ends() -> None:
    (found,) = clipped(lambda g: clip_by_value(g, 0.5), [np.array([-2.0, -0.5, 0.1, 3.0])], f64)
    assert np.array_equal(found, [-0.5, -0.5, 0.1, 0.5])


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_a_norm_of_16_bit_gradients_does_not_overflow(dtype: DType) -> None:
    arrays = [np.full((100,), 1000.0).astype(dtype.numpy)]
    found = clipped(lambda g: clip_by_global_norm(g, 1.0)[0], arrays, dtype)[0]
    assert found.dtype == dtype.numpy
    np.testing.assert_allclose(found.astype(float), 0.1, rtol=1e-2)


def test_without_gradients_there_is_no_norm() -> None:
    with pytest.raises(Refusal, match="there is no gradient"), building():
        clip_by_global_norm([], 1.0)
