"""What training does otherwise than inference: batch statistics, running statistics as state, dropout.

A reader lowers `BatchNormalization` and `Dropout` in their inference form, and leaves a record of each in `graph.info["batch_norms"]` and
`graph.info["dropouts"]`: tuples of `BatchNorm` and of `Dropout`. `training_mode` rewrites the graph by them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from .. import primitives as p
from ..composites import along, plus, scale, size_of, variance
from ..dims import Dim
from ..errors import PullbackWarning, Refusal
from ..graph import Graph, Value, at, bind
from ..origin import Origin, Source
from ..passes.substitute import Make, Now, in_graph
from ..types import DType, f32
from .random import bernoulli

__all__ = [
    "BatchNorm",
    "Dropout",
    "DropoutOption",
    "TrainingMode",
    "dropouts_of",
    "passing",
    "relocated",
    "statistics_of",
    "training_mode",
]

DropoutOption = bool | float | Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class BatchNorm:
    """One normalisation over all axes but `axis`, as lowered for inference.

    Each field that stands for a tensor holds the value, or better the tensor's name in the graph, which outlives every pass. `mean` and `var`
    are the running statistics (inputs of role `state`), `momentum` is ONNX's: `new = momentum * old + (1 - momentum) * batch`.
    """

    name: str
    x: Value | str
    scale: Value | str
    bias: Value | str
    mean: Value | str
    var: Value | str
    y: Value | str
    epsilon: float = 1e-5
    momentum: float = 0.9
    axis: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Dropout:
    """One dropout, as lowered for inference: `y` is `passing(x)`, so that it can be told from x itself."""

    name: str
    x: Value | str
    y: Value | str
    ratio: float = 0.5


def passing(x: Value) -> Value:
    """`x` under a node of its own: a reshape to its own shape, which simplification drops."""
    return p.reshape(x, shape=x.shape)


def _value(graph: Graph, tensor: Value | str) -> Value:
    return graph[tensor] if isinstance(tensor, str) else tensor


def relocated(graph: Graph, now: Now) -> Graph:
    """The graph with its records pointing at what their values have become."""

    def moved(record: Any) -> Any:
        tensors = {f.name: getattr(record, f.name) for f in fields(record)}
        return replace(record, **{k: now(v) for k, v in tensors.items() if isinstance(v, Value)})

    kinds = {k: tuple(map(moved, graph.info[k])) for k in ("batch_norms", "dropouts") if k in graph.info}
    return graph.with_(info={**graph.info, **kinds}) if kinds else graph


# ---- what to do ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainingMode:
    """The rewritten graph; the new value of each running statistic, by the name of its input; what was done, by node name."""

    graph: Graph
    state: Mapping[str, Value] = field(default_factory=dict)
    batch_norms: Mapping[str, str] = field(default_factory=dict)
    dropouts: Mapping[str, float] = field(default_factory=dict)


def _records(graph: Graph) -> list[BatchNorm]:
    """The normalisations whose result the graph computes, each result once."""
    present = {id(v) for v in graph.nodes}
    found: dict[int, BatchNorm] = {}
    for record in graph.info.get("batch_norms", ()):
        if isinstance(record.y, str) and record.y not in graph:
            continue
        y = _value(graph, record.y)
        if id(y) in present:
            found.setdefault(id(y), record)
    return list(found.values())


def _all_known(graph: Graph) -> None:
    reasons = [
        f"node {r.name!r} (BatchNormalization): tensor {t!r} is a constant that the graph does not know by name; batch_norm='frozen' keeps it"
        for r in _records(graph)
        for t in (r.x, r.scale, r.bias, r.mean, r.var)
        if isinstance(t, str) and t not in graph
    ]
    if reasons:
        raise Refusal("cannot normalise by the batch", reasons)


def statistics_of(graph: Graph) -> tuple[str, ...]:
    """Names of the inputs that hold the running statistics of the recorded normalisations."""
    values = [
        graph[t] if isinstance(t, str) else t
        for r in _records(graph)
        for t in (r.mean, r.var)
        if not isinstance(t, str) or t in graph
    ]
    return tuple(dict.fromkeys(v.params["name"] for v in values if v.primitive.name == "input"))


def kept_statistics_of(graph: Graph) -> tuple[str, ...]:
    """Names of the inputs that hold running statistics of any recorded normalisation, those inside loops and branches too."""
    tensors = [t for r in graph.info.get("batch_norms", ()) for t in (r.mean, r.var)]
    names = [t if isinstance(t, str) else t.name for t in tensors]
    return tuple(dict.fromkeys(n for n in names if n is not None))


def dropouts_of(graph: Graph, option: DropoutOption) -> dict[int, tuple[str, Value, float]]:
    """What is dropped: id of the value whose elements are, to its name, itself and the ratio.

    `True` takes the recorded dropouts with their ratios, a number gives all of them that ratio; a mapping gives ratios by glob over the names of
    recorded dropouts, and over those of any floating tensors, which puts a dropout behind them.
    """
    records = [
        (r, _value(graph, r.y)) for r in graph.info.get("dropouts", ()) if not isinstance(r.y, str) or r.y in graph
    ]
    present = {id(v) for v in graph.nodes}
    recorded = [(r, y) for r, y in records if id(y) in present]  # the steps of an unrolled loop have one name
    _none_inside(graph, records, option)
    found: dict[int, tuple[str, Value, float]] = {}
    if not isinstance(option, Mapping):
        if option is not True and not 0 <= option < 1:
            raise Refusal("dropout ratios", [f"ratio {option} is not in [0, 1)"])
        if option and not recorded:
            warnings.warn(
                "dropout is asked for, but the model has none left: a mapping puts it behind tensors that it names, as {'h': 0.1}",
                PullbackWarning,
                stacklevel=2,
            )
        for record, y in recorded:
            ratio = record.ratio if option is True else float(option)
            found.setdefault(id(y), (record.name, y, ratio))
    else:
        reasons = []
        tensors = {k: v for k, v in graph.tensors.items() if id(v) in present and v.dtype.floating}
        for pattern, ratio in option.items():
            hits = [(r.name, y) for r, y in recorded if r.name == pattern or fnmatchcase(r.name, pattern)]
            hits = hits or [(n, v) for n, v in tensors.items() if n == pattern or fnmatchcase(n, pattern)]
            if not hits:
                reasons.append(f"dropout {pattern!r} matches no dropout and no floating tensor")
            for name, y in hits:
                found.setdefault(id(y), (name, y, ratio))
        if reasons:
            raise Refusal("patterns that match nothing", reasons)
    bad = [f"ratio {r} of {n!r} is not in [0, 1)" for n, _, r in found.values() if not 0 <= r < 1]
    if bad:
        raise Refusal("dropout ratios", bad)
    return {i: hit for i, hit in found.items() if hit[2] > 0}


def _none_inside(graph: Graph, records: Sequence[tuple[Dropout, Value]], option: DropoutOption) -> None:
    """Refuse dropouts that are asked for and stand in nested graphs, where no step has a mask of its own."""
    inner = {id(v) for node in graph.nodes for g in node.params.values() if isinstance(g, Graph) for v in _inside(g)}
    patterns = list(option) if isinstance(option, Mapping) else ["*"] if option else []
    reasons = [
        f"dropout {r.name!r} stands inside a loop, or a branch that data decides; read the model with unroll=True where the loop's length is known"
        for r, y in records
        if id(y) in inner and any(fnmatchcase(r.name, pattern) for pattern in patterns)
    ]
    if reasons:
        raise Refusal("cannot switch dropout on", reasons)


def _inside(graph: Graph) -> Iterator[Value]:
    """The nodes of a graph and of those nested in it."""
    for v in graph.nodes:
        yield v
        for g in v.params.values():
            if isinstance(g, Graph):
                yield from _inside(g)


def training_mode(graph: Graph, *, batch_norm: str = "batch", running_variance: str = "unbiased",
                  dropout: Mapping[int, tuple[str, Value, float]] | None = None, seed: Value | None = None,
                  step: Value | None = None) -> TrainingMode:  # fmt: skip
    """The graph as training computes it. Builds in the current builder.

    `batch_norm` is `batch` (the batch's own statistics; running ones are updated) or `frozen`; `running_variance` is `unbiased` (PyTorch,
    TensorFlow) or `population` (ONNX's text). `dropout` is what `dropouts_of` gave; its masks come from `seed`, `step` and their place in the graph.
    """
    places: dict[int, Make] = {}
    state: dict[str, Value] = {}
    norms: dict[str, str] = {}
    if batch_norm == "batch":
        _all_known(graph)
        for record in _records(graph):
            y = _value(graph, record.y)
            places[id(y)] = _batch_form(graph, record, y, state, running_variance)
            norms[record.name] = "batch statistics"
        inside = {id(_value(graph, r.y)) for r in _records(graph)}
        for record in graph.info.get("batch_norms", ()):
            if not isinstance(record.y, str) and id(record.y) not in inside:
                norms[record.name] = "inference form, as it stands inside a loop or branch"
    dropped: dict[str, float] = {}
    for stream, (key, (name, y, ratio)) in enumerate((dropout or {}).items()):
        assert seed is not None
        assert step is not None
        places[key] = _dropped(name, y, ratio, (seed, step), stream, places.get(key))
        dropped[name] = ratio
    for record in graph.info.get("dropouts", ()):
        if not isinstance(record.y, str) or record.y in graph:
            y = _value(graph, record.y)
            x = _value(graph, record.x)
            if y is not x:
                places.setdefault(id(y), _now_of(x))
    moded, _ = in_graph(graph, places)
    return TrainingMode(moded, state, norms, dropped)


def _now_of(x: Value) -> Make:
    return lambda now: now(x)


# ---- batch statistics ------------------------------------------------------------------------------------------------------------------


def _decimal(x: float) -> float:
    """The shortest decimal that rounds to the same float32: 0.9 for an attribute that was written as 0.9."""
    return float(str(np.float32(x)))


def _wide(dtype: DType) -> DType:
    return f32 if dtype.bits < 32 else dtype


def _cast(x: Value, dtype: DType) -> Value:
    return x if x.dtype is dtype else p.cast(x, dtype=dtype)


def _batch_form(graph: Graph, record: BatchNorm, y: Value, state: dict[str, Value], running: str) -> Make:
    """`scale * (x - mean(x)) / sqrt(var(x) + epsilon) + bias` with the biased variance of the batch, in at least float32."""

    def make(now: Now) -> Value:
        x, factor, offset = (now(_value(graph, t)) for t in (record.x, record.scale, record.bias))
        dtype = _wide(x.dtype)
        wide, axis = _cast(x if x.rank > 1 else p.reshape(x, shape=(*x.shape, 1)), dtype), record.axis
        shape = wide.shape
        axes = tuple(a for a in range(wide.rank) if a != axis)
        mu, centred, var = variance(wide, axes)
        inverse = p.div(_cast(factor, dtype), p.sqrt(plus(var, record.epsilon)))
        normal = p.mul(centred, along(inverse, shape, axes))
        result = _cast(p.add(normal, along(_cast(offset, dtype), shape, axes)), y.dtype)
        spread = _unbiased(var, [shape[a] for a in axes]) if running == "unbiased" else var
        for tensor, batch in ((record.mean, mu), (record.var, spread)):
            _update(_value(graph, tensor), now, batch, _decimal(record.momentum), state)
        return p.reshape(result, shape=x.shape) if x.rank < 2 else result

    return make


def _unbiased(var: Value, sizes: Sequence[Dim]) -> Value:
    """`var * n / max(n - 1, 1)`."""
    n = size_of(sizes, var.dtype)
    rest = p.max(plus(n, -1), p.number(1, n))
    return p.mul(var, p.broadcast(p.div(n, rest), shape=var.shape, axes=()))


def _update(old: Value, now: Now, batch: Value, momentum: float, state: dict[str, Value]) -> None:
    """`momentum * old + (1 - momentum) * batch`, after an earlier normalisation that shares the statistic."""
    if old.primitive.name != "input" or old.params["role"] == "input":
        return
    name = old.params["name"]
    before = _cast(state.get(name, now(old)), batch.dtype)
    new = p.add(scale(before, momentum), scale(batch, 1 - momentum))
    state[name] = _cast(new, old.dtype)


# ---- dropout ---------------------------------------------------------------------------------------------------------------------------


def _dropped(name: str, y: Value, ratio: float, key: tuple[Value, Value], stream: int, inner: Make | None) -> Make:
    """`x / (1 - ratio)` with probability `1 - ratio`, else 0."""

    def make(now: Now) -> Value:
        x = inner(now) if inner is not None else _remade(y, now)
        with at(y.origin if y.origin.source is not None else Origin("forward", Source(name, "Dropout"))):
            kept = bernoulli(*key, 1 - ratio, shape=x.shape, stream=stream)
            return p.select(kept, scale(x, 1 / (1 - ratio)), p.number(0, x))

    return make


def _remade(node: Value, now: Now) -> Value:
    """A node upon what its operands have become."""
    return bind(node.primitive, *map(now, node.operands), **node.params) if node.operands else node
