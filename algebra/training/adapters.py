"""Low-rank adapters (LoRA): chosen matrices stay as they are, and a product of two thin ones beside each is trained.

`W + (alpha / rank) A B` takes the place of `W` (Hu et al. 2021); B starts at 0, so that the first step computes what the model computes. When
trained, the sum goes back into the model as one matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .. import primitives as p
from ..composites import scale
from ..errors import Refusal
from ..graph import Constant, Graph, Value, phase
from ..origin import Source
from ..passes.substitute import Make, in_graph
from ..types import TensorType
from .loss import near
from .modes import relocated
from .naming import Names
from .options import mistyped_fields
from .selection import match

__all__ = ["Lora", "adapted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Adapters of this rank on the matrices that `targets` name (globs); `seed` draws the first A."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("*",)
    seed: int = 0

    @classmethod
    def of(cls, given: Lora | int | Mapping[str, Any] | None) -> Lora | None:
        """Adapters from a rank, or from a mapping of options."""
        match given:
            case None | Lora():
                return given
            case int():
                options: dict[str, Any] = {"rank": given, "alpha": 2.0 * given}
            case _:
                options = dict(given)
        known = [f.name for f in fields(cls)]
        if unknown := [f"no option {o!r}; {near(o, known)}" for o in options if o not in known]:
            raise Refusal("cannot adapt", unknown)
        targets = options.get("targets", ("*",))
        return cls(**{**options, "targets": (targets,) if isinstance(targets, str) else tuple(targets)})

    def __post_init__(self) -> None:
        wrong = mistyped_fields(self) or ([] if self.rank >= 1 else [f"the rank must be at least 1, found {self.rank}"])
        if wrong:
            raise Refusal("cannot adapt", wrong)

    @property
    def factor(self) -> float:
        return self.alpha / self.rank


def adapted(graph: Graph, lora: Lora, names: Names) -> tuple[Graph, dict[str, tuple[str, str]]]:
    """The graph with adapters, and the names of A and B by that of their matrix. Builds in the current builder.

    The adapters are its parameters now; the matrices are frozen.
    """
    matrices = {
        str(v.params["name"]): v for v in graph.by_role("parameter", "frozen") if v.rank == 2 and v.dtype.floating
    }
    chosen = match(matrices, lora.targets, option="lora", elsewhere=_others(graph))
    rng = np.random.default_rng(lora.seed)
    places: dict[int, Make] = {}
    inputs: list[Value] = []
    data: dict[str, Constant] = {}
    pairs: dict[str, tuple[str, str]] = {}
    for name in (n for n in matrices if n in chosen):
        w = matrices[name]
        rows, columns = (int(d) for d in w.shape)
        frozen = p.input(name, TensorType(w.dtype, w.shape), "frozen")
        a = p.input(names(f"lora_A_{name}"), TensorType(w.dtype, (rows, lora.rank)), "parameter")
        b = p.input(names(f"lora_B_{name}"), TensorType(w.dtype, (lora.rank, columns)), "parameter")
        bound = 1 / math.sqrt(rows)
        data[str(a.params["name"])] = Constant(rng.uniform(-bound, bound, (rows, lora.rank)).astype(w.dtype.numpy))
        data[str(b.params["name"])] = Constant(np.zeros((lora.rank, columns), w.dtype.numpy))
        inputs += [a, b]
        pairs[name] = (str(a.params["name"]), str(b.params["name"]))
        with phase("forward", Source(f"lora_{name}", "lora")):
            sum_ = p.add(frozen, scale(p.dot(a, b, contract=((1,), (0,))), lora.factor))
        places[id(w)] = _constantly(sum_)
    changed, now = in_graph(graph, places)
    kept = tuple(_frozen(v) if id(v) in places else u for v, u in zip(graph.inputs, changed.inputs, strict=True))
    result = changed.with_(inputs=(*kept, *inputs), data={**graph.data, **data})
    return relocated(result, now), pairs


def _constantly(value: Value) -> Make:
    return lambda now: value


def _frozen(v: Value) -> Value:
    return p.input(str(v.params["name"]), TensorType(v.dtype, v.shape), "frozen")


def _others(graph: Graph) -> dict[str, str]:
    inputs: Sequence[Value] = graph.by_role("parameter", "frozen", "state")
    return {str(v.params["name"]): f"{v.type!r} is no matrix" for v in inputs if v.rank != 2}
