"""Optimizers: fifty steps with every option, parameter and all state, against PyTorch; the others against their papers; closed forms without either."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest
from pullback.algebra import primitives as p
from pullback.algebra.errors import Refusal
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Graph, building
from pullback.algebra.training.optimizers import OPTIMIZERS, Optimizer, Slot, compute_dtype, ema, optimizer
from pullback.algebra.types import DType, bf16, f16, f32, f64, i64, tensor

STEPS = 50
TOLERANCE = {"f32": 1e-6, "f64": 1e-12}


@dataclass
class Run:
    """A parameter under an optimizer: one graph, evaluated once a step."""

    rule: Optimizer
    shape: tuple[int, ...]
    dtype: DType
    param: np.ndarray
    slots: dict[str, np.ndarray] = field(init=False)
    graph: Graph = field(init=False)
    step: int = 0

    def __post_init__(self) -> None:
        type_ = tensor(self.dtype, self.shape)
        self.param = self.param.astype(self.dtype.numpy)
        self.slots = {
            name: np.full(s.type.shape, s.initial, s.type.dtype.numpy) for name, s in self.rule.slots(type_).items()
        }
        with building():
            param, grad = p.input("param", type_, "parameter"), p.input("grad", type_)
            step = p.input("step", tensor(i64), "step")
            slots = {name: p.input(name, s.type, "slot") for name, s in self.rule.slots(type_).items()}
            scalar = tensor(compute_dtype(self.dtype))
            hyper = {name: p.input(name, scalar, "hyperparameter") for name in self.rule.hyperparameters()}
            moved, new = self.rule.update(param, grad, slots, step, hyper)
            assert moved.type == type_
            assert list(new) == list(slots)
            assert all(v.type == slots[name].type for name, v in new.items())
            outputs = {"new_param": moved, **{f"new_{name}": v for name, v in new.items()}}
            self.graph = Graph((param, grad, step, *slots.values(), *hyper.values()), outputs)

    def move(self, grad: np.ndarray, **hyper: float) -> None:
        feeds = {"param": self.param, "grad": grad, "step": self.step, **self.slots}
        out = evaluate(self.graph, {**feeds, **self.rule.hyperparameters(), **hyper})
        self.param, self.slots = out["new_param"], {name: out[f"new_{name}"] for name in self.slots}
        self.step += 1


def gradients(shape: tuple[int, ...], dtype: DType, steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """A start, and gradients of very different sizes, some of them zero."""
    rng = np.random.default_rng(sum(shape))
    sizes = 10.0 ** rng.integers(-2, 2, size=(steps, *shape)) * (rng.random((steps, *shape)) > 0.1)
    return rng.normal(size=shape).astype(dtype.numpy), (rng.normal(size=(steps, *shape)) * sizes).astype(dtype.numpy)


def close(found: np.ndarray, expected: Any, tolerance: float, what: str) -> None:
    expected = np.asarray(expected, np.float64)
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}"
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=tolerance, atol=tolerance, err_msg=what)


def variants() -> Iterator[tuple[str, str, dict[str, Any], tuple[int, ...]]]:
    """Name here, class there, options, shape of the parameter."""

    def each(name: str, cls: str, *options: dict[str, Any], shapes: tuple[tuple[int, ...], ...] = ((3, 4),)) -> Any:
        return ((name, cls, o, s) for o in ({}, *options) for s in shapes)

    decay: dict[str, Any] = {"weight_decay": 0.1}
    up: dict[str, Any] = {"maximize": True, "weight_decay": 0.1}
    yield from each(
        "sgd", "SGD", decay, {"momentum": 0.9, "lr": 0.1}, {"momentum": 0.9, "dampening": 0.3, **up},
        {"momentum": 0.8, "nesterov": True, "lr": 0.05, **decay}, shapes=((3, 4), ()),
    )  # fmt: skip
    yield from each(
        "adam", "Adam", decay, up, {"amsgrad": True}, {"amsgrad": True, **up}, {"decoupled_weight_decay": True, **decay},
        {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}, {"betas": (0.0, 0.9)}, shapes=((3, 4), ()),
    )  # fmt: skip
    yield from each("adamw", "AdamW", {"weight_decay": 0.0}, {"lr": 0.1, "amsgrad": True, **up}, {"betas": (0.5, 0.9)})
    yield from each("adamax", "Adamax", decay, up, {"lr": 0.1, "betas": (0.7, 0.9), "eps": 1e-3})
    either = {"decoupled_weight_decay": True, **decay}
    yield from each(
        "nadam", "NAdam", decay, up, either, {"lr": 0.1, "betas": (0.7, 0.9), "eps": 1e-3, "momentum_decay": 0.1}
    )
    yield from each(
        "radam", "RAdam", decay, up, either, {"lr": 0.1, "betas": (0.7, 0.9), "eps": 1e-3}, {"betas": (0.9, 0.99)}
    )
    yield from each(
        "adagrad", "Adagrad", decay, up, {"lr": 0.1, "lr_decay": 0.2, "initial_accumulator_value": 0.3, "eps": 1e-3}
    )
    yield from each("adadelta", "Adadelta", decay, up, {"lr": 0.1, "rho": 0.7, "eps": 1e-3})
    yield from each(
        "rmsprop", "RMSprop", decay, up, {"momentum": 0.9, "lr": 1e-3}, {"centered": True, **decay},
        {"centered": True, "momentum": 0.5, "alpha": 0.9, "eps": 1e-3, **up},
    )  # fmt: skip
    yield from each("rprop", "Rprop", {"maximize": True}, {"lr": 0.1, "etas": (0.4, 1.5), "step_sizes": (1e-3, 0.1)})
    yield from each("asgd", "ASGD", decay, up, {"lr": 0.1, "lambd": 0.01, "alpha": 0.5, "t0": 10})
    yield from each(
        "adafactor", "Adafactor", decay, up, {"lr": 0.1, "beta2_decay": -0.5, "eps": (1e-5, 1e-2), "d": 2.0},
        shapes=((3, 4), (5,), (2, 3, 4)),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize(("name", "cls", "options", "shape"), tuple(variants()), ids=str)
def test_fifty_steps_follow_pytorch(
    name: str, cls: str, options: dict[str, Any], shape: tuple[int, ...], dtype: DType
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    start, grads = gradients(shape, dtype)
    run = Run(optimizer(name, **options), shape, dtype, start)
    before = torch.get_default_dtype()  # PyTorch keeps scalar state in the default dtype
    torch.set_default_dtype(torch.float64 if dtype is f64 else torch.float32)
    try:
        parameter = torch.nn.Parameter(torch.tensor(start))
        reference = getattr(torch.optim, cls)([parameter], **options)
        for grad in grads:
            run.move(grad)
            parameter.grad = torch.tensor(grad)
            reference.step()
    finally:
        torch.set_default_dtype(before)
    state = {k: v for k, v in reference.state[parameter].items() if v is not None and k != "step"}
    assert set(state) == set(run.slots)
    close(run.param, parameter.detach().numpy(), TOLERANCE[dtype.name], "parameter")
    for slot, value in state.items():
        close(run.slots[slot], value.numpy(), TOLERANCE[dtype.name], slot)


def test_options_and_defaults_are_those_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    execution = {"foreach", "fused", "capturable", "differentiable"}
    classes = {
        "sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "adamax": "Adamax", "nadam": "NAdam", "radam": "RAdam", "adagrad": "Adagrad",
        "adadelta": "Adadelta", "rmsprop": "RMSprop", "rprop": "Rprop", "asgd": "ASGD", "adafactor": "Adafactor", "muon": "Muon",
        "sparse_adam": "SparseAdam",
    }  # fmt: skip
    everything = {
        n
        for n, c in vars(torch.optim).items()
        if isinstance(c, type) and issubclass(c, torch.optim.Optimizer) and n[0].isupper()
    }
    assert everything - set(classes.values()) == {"Optimizer", "LBFGS"}  # of second order
    for name, cls in classes.items():
        reference = getattr(torch.optim, cls)([torch.nn.Parameter(torch.zeros(2, 2))]).defaults
        wanted = {k: v for k, v in reference.items() if k not in execution}
        own = {f.name: getattr(optimizer(name), f.name) for f in fields(OPTIMIZERS[name])}
        if name == "adamw":
            assert wanted.pop("decoupled_weight_decay")
        for option, default in wanted.items():
            assert own[option] == default, f"{name}.{option}: {own[option]} != {default}"


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)])
@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0, "lr": 0.01}], ids=str
)
def test_muon_is_its_formula_and_near_pytorch_which_rounds_to_bfloat16(
    options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    start, grads = gradients(shape, f64, 10)
    rule = optimizer("muon", **options)
    run, w, buffer = Run(rule, shape, f64, start), start.copy(), np.zeros(shape)
    a, b, c = 3.4445, -4.7750, 2.0315
    for grad in grads:
        run.move(grad)
        buffer += 0.05 * (grad - buffer)
        x = grad + 0.95 * (buffer - grad) if rule.nesterov else buffer  # type: ignore[attr-defined]
        x = x / np.linalg.norm(x)
        for _ in range(5):  # of the matrix itself: X X' X is the same for X' X'' X'
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        rows, columns = shape
        ratio = 0.2 * math.sqrt(max(shape)) if "adjust_lr_fn" in options else math.sqrt(max(1, rows / columns))
        w = w * (1 - rule.lr * rule.weight_decay) - rule.lr * ratio * x  # type: ignore[attr-defined]
    close(run.param, w, 1e-12, "parameter")
    close(run.slots["momentum_buffer"], buffer, 1e-12, "momentum_buffer")
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    parameter = torch.nn.Parameter(torch.tensor(start))
    reference = torch.optim.Muon([parameter], **options)
    for grad in grads:
        parameter.grad = torch.tensor(grad)
        reference.step()
    moved = np.abs(w - start).max()
    close(run.param, parameter.detach().numpy(), 0.03 * moved, "parameter of PyTorch")
    close(
        run.slots["momentum_buffer"], reference.state[parameter]["momentum_buffer"].numpy(), 1e-12, "buffer of PyTorch"
    )


def test_sparse_adam_moves_only_rows_with_a_gradient() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    start, grads = gradients((6, 3), f64)
    rng = np.random.default_rng(0)
    run = Run(optimizer("sparse_adam", lr=0.01, eps=1e-4, maximize=True), (6, 3), f64, start)
    parameter = torch.nn.Parameter(torch.tensor(start))
    reference = torch.optim.SparseAdam([parameter], lr=0.01, eps=1e-4, maximize=True)
    for grad in grads:
        rows = np.sort(rng.choice(6, size=2, replace=False))
        values = grad[rows] + 0.5 * np.sign(grad[rows]) + (grad[rows] == 0)
        dense = np.zeros((6, 3))
        dense[rows] = values
        run.move(dense)
        parameter.grad = torch.sparse_coo_tensor(
            torch.tensor(rows[None]), torch.tensor(values), (6, 3), check_invariants=True
        )
        reference.step()
    close(run.param, parameter.detach().numpy(), 1e-12, "parameter")
    for slot in ("exp_avg", "exp_avg_sq"):
        close(run.slots[slot], reference.state[parameter][slot].numpy(), 1e-12, slot)


# ---- optimizers that PyTorch does not have: the formulas of their papers -----------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"lr": 0.01, "betas": (0.95, 0.98), "weight_decay": 0.1}, {"maximize": True}], ids=str
)
def test_lion_is_algorithm_2_of_its_paper(options: dict[str, Any]) -> None:
    start, grads = gradients((3, 4), f64)
    run, w, m = Run(optimizer("lion", **options), (3, 4), f64, start), start.copy(), np.zeros((3, 4))
    lr, (b1, b2), wd = options.get("lr", 1e-4), options.get("betas", (0.9, 0.99)), options.get("weight_decay", 0.0)
    for grad in grads:
        run.move(grad)
        g = -grad if "maximize" in options else grad
        w = w - lr * (np.sign(b1 * m + (1 - b1) * g) + wd * w)
        m = b2 * m + (1 - b2) * g
    close(run.param, w, 1e-12, "parameter")
    close(run.slots["exp_avg"], m, 1e-12, "exp_avg")


@pytest.mark.parametrize(
    "options", [{}, {"lr": 0.1, "weight_decay": 0.0, "betas": (0.8, 0.9), "eps": 1e-3}, {"bias_correction": False}, {"max_weight_norm": 0.5}], ids=str
)  # fmt: skip
def test_lamb_is_algorithm_2_of_its_paper(options: dict[str, Any]) -> None:
    start, grads = gradients((3, 4), f64)
    run, w = Run(optimizer("lamb", **options), (3, 4), f64, start), start.copy()
    m, v = np.zeros((3, 4)), np.zeros((3, 4))
    given = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "max_weight_norm": math.inf,
        **options,
    }
    b1, b2 = given["betas"]
    for t, g in enumerate(grads, 1):
        run.move(g)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        corrected = "bias_correction" not in options
        mh, vh = (m / (1 - b1**t), v / (1 - b2**t)) if corrected else (m, v)
        r = mh / (np.sqrt(vh) + given["eps"]) + given["weight_decay"] * w
        w = w - given["lr"] * min(np.linalg.norm(w), given["max_weight_norm"]) / np.linalg.norm(r) * r
    close(run.param, w, 1e-12, "parameter")
    close(run.slots["exp_avg"], m, 1e-12, "exp_avg")
    close(run.slots["exp_avg_sq"], v, 1e-12, "exp_avg_sq")


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1, "momentum": 0.5, "trust_coefficient": 0.02, "eps": 1e-3}, {"momentum": 0.0}, {"nesterov": True}], ids=str
)  # fmt: skip
def test_lars_is_algorithm_1_of_its_paper(options: dict[str, Any]) -> None:
    start, grads = gradients((3, 4), f64)
    run, w, b = Run(optimizer("lars", **options), (3, 4), f64, start), start.copy(), np.zeros((3, 4))
    given = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "trust_coefficient": 1e-3, "eps": 1e-8, **options}
    for g in grads:
        run.move(g)
        below = np.linalg.norm(g) + given["weight_decay"] * np.linalg.norm(w) + given["eps"]
        change = given["lr"] * given["trust_coefficient"] * np.linalg.norm(w) / below * (g + given["weight_decay"] * w)
        b = given["momentum"] * b + change
        w = w - (change + given["momentum"] * b if "nesterov" in options else b)
    close(run.param, w, 1e-12, "parameter")


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_a_layer_of_zeros_moves_with_ratio_one(name: str) -> None:
    run = Run(optimizer(name, lr=0.1), (2,), f64, np.zeros(2))
    run.move(np.array([3.0, 4.0]))
    assert np.isfinite(run.param).all()
    assert run.param[0] != 0
    still = Run(optimizer(name, lr=0.1, weight_decay=0.0), (2,), f64, np.ones(2))
    still.move(np.zeros(2))
    assert np.array_equal(still.param, np.ones(2))


# ---- closed forms ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "first", "second"),
    [
        ("adam", {"lr": 0.1}, [0.9, -1.9], [0.8, -1.8]),
        ("rmsprop", {"lr": 0.1, "eps": 1e-30}, [0.0, -1.0], [-0.708881, -0.291119]),
        ("adagrad", {"lr": 0.1, "eps": 1e-30}, [0.9, -1.9], [0.829289, -1.829289]),
        ("sgd", {"lr": 0.1, "momentum": 0.9}, [0.95, -1.9], [0.855, -1.71]),
    ],
)
def test_two_steps_with_a_constant_gradient(
    name: str, options: dict[str, float], first: list[float], second: list[float]
) -> None:
    run = Run(optimizer(name, **options), (2,), f32, np.array([1.0, -2.0]))
    for expected in (first, second):
        run.move(np.array([0.5, -1.0]))
        np.testing.assert_allclose(run.param, expected, atol=1e-5)


@pytest.mark.parametrize("beta", [0.9, 0.99, 0.999, 0.9999])
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_the_length_of_radams_average_keeps_its_digits(beta: float, dtype: DType) -> None:
    from decimal import Decimal, getcontext

    from pullback.algebra.training.adaptive import _length

    getcontext().prec = 60
    with building():
        t = p.input("t", tensor(dtype))
        graph = Graph((t,), {"rho": _length(beta, t)})
    for n in (1, 2, 3, 5, 6, 10, 49, 499, 500, 501, 5000, 100_000):
        b = Decimal(beta)
        exact = 2 / (1 - b) - 1 - 2 * n * b**n / (1 - b**n)
        found = evaluate(graph, {"t": n})["rho"]
        np.testing.assert_allclose(found, float(exact), rtol=3e-6 if dtype is f32 else 1e-11, err_msg=f"t = {n}")


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS)))
def test_16_bit_parameters_stay_16_bit_finite_and_near_the_double_ones(name: str, dtype: DType) -> None:
    rng = np.random.default_rng(2)
    start, grads = rng.normal(size=(3, 4)), rng.normal(size=(5, 3, 4))
    start, grads = (a.astype(dtype.numpy).astype(float) for a in (start, grads))
    grads[:, 0] = 0  # Adam in float16 proper would divide 0 by an eps that is 0
    low, high = (Run(optimizer(name), (3, 4), d, start) for d in (dtype, f64))
    for grad in grads:
        low.move(grad)
        high.move(grad)
    assert low.param.dtype == dtype.numpy
    assert all(np.isfinite(v.astype(float)).all() for v in (low.param, *low.slots.values()))
    epsilon = 2.0**-11 if dtype is f16 else 2.0**-8
    np.testing.assert_allclose(low.param.astype(float), high.param, atol=5 * epsilon * 3)


def test_hyperparameters_are_inputs_and_change_without_a_new_graph() -> None:
    assert optimizer("adamw").hyperparameters() == {"lr": 1e-3, "eps": 1e-8, "weight_decay": 1e-2}
    assert optimizer("adam").hyperparameters() == {"lr": 1e-3, "eps": 1e-8}
    assert optimizer("sgd", momentum=0.9).hyperparameters() == {"lr": 1e-3, "momentum": 0.9}
    assert optimizer("rprop").hyperparameters() == {}
    run = Run(optimizer("sgd", lr=0.1), (2,), f64, np.zeros(2))
    run.move(np.ones(2), lr=0.5)
    np.testing.assert_allclose(run.param, [-0.5, -0.5])
    with building():  # without values they are literals
        x, g, step = p.input("x", tensor(f64, (2,))), p.input("g", tensor(f64, (2,))), p.input("step", tensor(i64))
        moved, _ = optimizer("sgd", lr=0.25).update(x, g, {}, step)
        graph = Graph((x, g, step), {"x": moved})
    np.testing.assert_allclose(evaluate(graph, {"x": [0, 0], "g": [1, 1], "step": 0})["x"], [-0.25, -0.25])


def test_the_moving_average_of_weights_is_that_of_swa_utils() -> None:
    rng = np.random.default_rng(1)
    weights = rng.normal(size=(6, 3))
    with building():
        average, param, step = (
            p.input("ema", tensor(f64, (3,))),
            p.input("param", tensor(f64, (3,))),
            p.input("step", tensor(i64)),
        )
        graph = Graph((average, param, step), {"ema": ema(average, param, step, 0.9)})
    value = np.zeros(3)
    expected = weights[0]
    for i, w in enumerate(weights):
        value = evaluate(graph, {"ema": value, "param": w, "step": i})["ema"]
        expected = w if i == 0 else 0.9 * expected + 0.1 * w
        np.testing.assert_allclose(value, expected, rtol=1e-14)
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for w in weights:
        model.weight.data = torch.tensor(w[None])
        averaged.update_parameters(model)
    np.testing.assert_allclose(value, averaged.module.weight.detach().numpy()[0], rtol=1e-14)


# ---- contracts -------------------------------------------------------------------------------------------------------------------------


def test_every_optimizer_says_what_it_is() -> None:
    for name, cls in OPTIMIZERS.items():
        assert cls.name == name
        assert cls.formula
        assert cls.reference
        rule = optimizer(name)
        slots = rule.slots(tensor(f32, (3, 4)))
        assert all(isinstance(s, Slot) and s.initial is not None for s in slots.values())


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("adamm", {}, "near names: adam"),
        ("adam", {"beta": (0.9, 0.99)}, "no option 'beta'; near names: betas"),
        ("adam", {"lr": -1.0}, "lr must be at least 0, found -1.0"),
        ("adamw", {"betas": (0.9, 1.0)}, r"beta2 must lie in \[0, 1\), found 1.0"),
        ("sgd", {"nesterov": True}, "nesterov needs a momentum and no dampening"),
        ("rprop", {"etas": (1.5, 2.0)}, "etas must be one factor below 1"),
        ("muon", {"adjust_lr_fn": "none"}, "adjust_lr_fn is 'original' or"),
        (
            "adafactor",
            {"d": 0.5, "beta2_decay": 1.0},
            "beta2_decay must be at most 0, found 1.0\n  - d must be at least 1",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_everything_that_is_wrong(
    name: str, options: Mapping[str, Any], match: str
) -> None:
    with pytest.raises(Refusal, match=match):
        optimizer(name, **options)


def test_muon_says_that_it_takes_matrices_only() -> None:
    rule = optimizer("muon")
    assert rule.refusal(tensor(f32, (3, 4))) is None
    assert "matrices" in str(rule.refusal(tensor(f32, (3,))))
    assert "floating" in str(optimizer("adam").refusal(tensor(i64, (3,))))


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_onnxruntime_moves_parameters_as_the_algebra_says(name: str, dtype: DType) -> None:
    import onnxruntime as ort
    from pullback.backends.onnx_export.emit import to_onnx

    start, grads = gradients((3, 4), dtype, 5)
    run = Run(optimizer(name), (3, 4), dtype, start)
    session = ort.InferenceSession(to_onnx(run.graph).SerializeToString(), providers=["CPUExecutionProvider"])
    entering = {i.name for i in session.get_inputs()}
    hyper = {k: np.asarray(v, compute_dtype(dtype).numpy) for k, v in run.rule.hyperparameters().items()}
    param, slots = run.param, dict(run.slots)
    for i, grad in enumerate(grads):
        feeds = {"param": param, "grad": grad, "step": np.asarray(i), **slots, **hyper}
        values = session.run(None, {k: v for k, v in feeds.items() if k in entering})
        out = dict(zip((o.name for o in session.get_outputs()), values, strict=True))
        param, slots = out["new_param"], {k: out[f"new_{k}"] for k in slots}
        run.move(grad)
    close(param, run.param, 10 * TOLERANCE[dtype.name], "parameter")
    for k, v in slots.items():
        close(v, run.slots[k], 10 * TOLERANCE[dtype.name], k)
