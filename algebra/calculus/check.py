"""Gradients held against directional finite differences, in double."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .. import primitives as p
from ..evaluate import evaluate
from ..graph import Constant, Graph, Value, current, rebuild
from ..types import DType, TensorType, dtype_of, f64

__all__ = ["Checked", "check_gradient", "in_double"]

STEPS = (1e-5, 1e-6)
SHORT = (1e-7, 1e-8)


@dataclass(frozen=True, slots=True)
class Checked:
    """One comparison: the derivative along a random direction of one tensor, by rule and by differences."""

    name: str
    by_rule: float
    by_differences: float
    scale: float
    tolerance: float

    @property
    def error(self) -> float:
        """The difference, relative to the larger of the two and of `scale`, the size that the terms of the derivative have."""
        return abs(self.by_rule - self.by_differences) / max(
            abs(self.by_rule), abs(self.by_differences), self.scale, 1e-300
        )

    @property
    def passed(self) -> bool:
        return bool(self.error <= self.tolerance)


def in_double(graph: Graph) -> Graph:
    """The same graph with every floating tensor in double."""

    def wide(dtype: DType) -> DType:
        return f64 if dtype.floating else dtype

    def make(node: Value, operands: tuple[Value, ...]) -> Value:
        params = dict(node.params)
        match node.primitive.name:
            case "input":
                return p.input(params["name"], TensorType(wide(node.dtype), node.shape), role=params["role"])
            case "literal" if dtype_of(params["value"].dtype).floating:
                return p.literal(params["value"].array.astype(np.float64))
            case "cast":
                return p.cast(operands[0], dtype=wide(params["dtype"]))
        params = {k: in_double(v) if isinstance(v, Graph) else v for k, v in params.items()}
        return current().add(node.primitive, operands, params)

    data = {}
    for name, constant in graph.data.items():
        floating = dtype_of(constant.dtype).floating
        data[name] = Constant(constant.array.astype(np.float64)) if floating else constant
    return rebuild(graph, make).with_(data=data)


def check_gradient(graph: Graph, feeds: Mapping[str, np.ndarray], *, of: list[str] | None = None, wrt: list[str] | None = None,
                   seed: int = 0, tolerance: float = 1e-6) -> list[Checked]:  # fmt: skip
    """For each tensor of `wrt` the derivative of `sum(seed * output)` along a random direction, by the gradient graph and by differences.

    Central differences at steps from `1e-5` down, until one agrees: a kink inside a step, of which a large network has many, does not count. Steps
    below `1e-6` are taken where rounding leaves enough digits. `of` defaults to the floating outputs, `wrt` to all parameters and floating inputs.
    """
    from . import gradient

    double = in_double(graph)
    rng = np.random.default_rng(seed)
    of = of or [n for n, v in double.outputs.items() if v.dtype.floating]
    wrt = wrt or [
        v.params["name"] for v in double.inputs if v.dtype.floating and v.params["role"] in ("input", "parameter")
    ]
    backward = gradient(double, of=of, wrt=wrt)
    base = evaluate(double, feeds)
    seeds = {v.params["name"]: None for v in backward.by_role("seed")}
    fed = dict(feeds)
    weights: dict[str, np.ndarray] = {}
    for name in of:
        key = next((s for s in seeds if s == f"seed_{name}" or s.startswith(f"seed_{name}")), None)
        weights[name] = rng.standard_normal(base[name].shape) if key else np.ones(base[name].shape)
        if key:
            fed[key] = weights[name]
    gradients = evaluate(backward, fed)
    entries = {
        backward.roles[n].parameter: n
        for n in backward.outputs
        if n in backward.roles and backward.roles[n].role == "gradient"
    }

    def value(point: Mapping[str, np.ndarray]) -> float:
        results = evaluate(double, point)
        return float(sum(np.sum(weights[n] * results[n]) for n in of))

    def noise(step: float) -> float:
        """What rounding makes of a derivative that is 0; the errors of many terms are independent."""
        return ulps / (2 * step)

    ulps = 16 * np.finfo(np.float64).eps * float(np.sqrt(sum(np.sum((weights[n] * base[n]) ** 2) for n in of)))
    checked = []
    for name in wrt:
        array = np.asarray(feeds[name] if name in feeds else double.data[name].array, np.float64)
        direction = rng.standard_normal(array.shape)
        slope = gradients[entries.get(name, f"grad_{name}")]
        exact, size = float(np.sum(slope * direction)), float(np.sqrt(np.sum((slope * direction) ** 2)))
        scale = max(size, noise(STEPS[0]) / tolerance if tolerance else 0)
        found: list[Checked] = []
        for step in (*STEPS, *(s for s in SHORT if noise(s) <= tolerance * size)):
            high, low = (value({**feeds, name: array + s * direction}) for s in (step, -step))
            found.append(Checked(name, exact, (high - low) / (2 * step), scale, tolerance))
            if found[-1].passed:
                break
        checked.append(min(found, key=lambda c: c.error))
    return checked
