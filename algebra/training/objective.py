"""The scalar that a step descends: a loss by name on an output, a weighted sum of several, a function, a graph, or an output itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sympy

from .. import primitives as p
from ..composites import scale
from ..dims import Dim, is_one, maybe_equal, show_shape, substitute
from ..errors import Refusal
from ..graph import Constant, Graph, Value, bind, map_params, phase, values_of
from ..origin import Source
from ..types import DType, TensorType, f64
from .fusion import Probabilities, trace
from .losses import Loss
from .losses import loss as loss_named
from .naming import Names
from .options import mistyped

__all__ = ["LossLike", "Objective", "TargetMaker", "objective"]

Term = Any  # a name, a (name, weight) or (name, weight, options), a function, a graph
LossLike = str | None | Callable[..., Value] | Graph | Mapping[str | tuple[str, ...], Term]


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """The scalar, the inputs that it reads besides the model's, their data, and what the signature says of it."""

    value: Value
    targets: tuple[Value, ...]
    info: Mapping[str, Any]
    data: Mapping[str, Constant] = field(default_factory=dict)


@dataclass(slots=True)
class TargetMaker:
    """Declares what a loss function reads besides outputs: `target("target", like=y)` or `target("mask", dtype=f32, shape=(n,))`."""

    names: Names
    made: dict[str, Value] = field(default_factory=dict)

    def __call__(self, name: str = "target", *, like: Value | None = None, dtype: DType | None = None,
                 shape: Sequence[Dim] | None = None) -> Value:  # fmt: skip
        """The input of this name; the same one when it is asked for again."""
        if name not in self.made:
            if like is None and (dtype is None or shape is None):
                raise Refusal(f"the target {name!r} has no type", ["give like=, or dtype= and shape="])
            kind = dtype if dtype is not None else like.dtype  # type: ignore[union-attr]
            dims = tuple(shape) if shape is not None else like.shape  # type: ignore[union-attr]
            self.made[name] = p.input(self.names(name), TensorType(kind, dims), "target")
        return self.made[name]


@dataclass(frozen=True, slots=True)
class _Asked:
    """One term of the sum: what, on which outputs, how heavy, with which options; `suffix` goes behind the names of its targets."""

    what: Term
    outputs: tuple[str, ...]
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    suffix: str = ""


def objective(graph: Graph, loss: LossLike, *, output: str | Sequence[str] | None, class_axis: int | None, options: Mapping[str, Any],
              fuse: bool, names: Names) -> Objective:  # fmt: skip
    """What `training_step` minimises. Builds in the current builder."""
    target = TargetMaker(names)
    asked = _asked(graph, loss, output, options)
    values, infos = [], []
    for term in asked:
        value, info = _term(graph, term, class_axis, fuse, target)
        values.append(value)
        infos.append(info)
    if len(values) == 1 and asked[0].weight == 1:
        return Objective(values[0], tuple(target.made.values()), infos[0])
    with phase("loss", Source("weighted_sum", "weighted_sum")):
        total = _sum([scale(v, t.weight) for v, t in zip(values, asked, strict=True)])
    terms = [{**info, "weight": t.weight} for info, t in zip(infos, asked, strict=True)]
    return Objective(total, tuple(target.made.values()), {"name": "weighted_sum", "terms": terms})


def _asked(
    graph: Graph, loss: LossLike, output: str | Sequence[str] | None, options: Mapping[str, Any]
) -> list[_Asked]:
    if isinstance(loss, Mapping):
        if not loss:
            raise Refusal("no loss", ["the mapping from outputs to losses is empty"])
        return [_one(key, term, len(loss) > 1, options) for key, term in loss.items()]
    outputs = (output,) if isinstance(output, str) else tuple(output or ())
    return [_Asked(loss, outputs, 1.0, options)]


def _one(key: str | tuple[str, ...], term: Term, several: bool, options: Mapping[str, Any]) -> _Asked:
    outputs = (key,) if isinstance(key, str) else tuple(key)
    suffix = f"_{outputs[0]}" if several else ""
    if not isinstance(term, tuple):
        return _Asked(term, outputs, 1.0, options, suffix)
    if not 1 <= len(term) <= 3:
        raise Refusal(
            f"cannot read the loss of {key!r}", [f"a name, (name, weight) or (name, weight, options), found {term!r}"]
        )
    what = term[0]
    weight = term[1] if len(term) > 1 else 1.0
    if wrong := mistyped({"the weight": weight}, {"the weight": "float"}):
        raise Refusal(f"cannot read the loss of {key!r}", wrong)
    own = term[2] if len(term) > 2 else {}
    return _Asked(what, outputs, float(weight), {**options, **own}, suffix)


def _term(
    graph: Graph, term: _Asked, class_axis: int | None, fuse: bool, target: TargetMaker
) -> tuple[Value, dict[str, Any]]:
    match term.what:
        case None | "output":
            return _output_itself(graph, term)
        case Graph():
            return _from_graph(graph, term.what, term, target)
        case str():
            return _named(graph, loss_named(term.what), term, class_axis, fuse, target)
        case Loss():
            return _named(graph, term.what, term, class_axis, fuse, target)
        case what if callable(what):
            name = getattr(what, "__name__", "function")
            with phase("loss", Source(name, name)):
                value = what({**graph.outputs, **{o: graph[o] for o in term.outputs}}, target)
                return _scalar(value, f"the loss function {name!r}"), {"name": name, "custom": True}
    raise Refusal("cannot use this as a loss", [f"a name, mapping, function or graph is required, found {term.what!r}"])


# ---- outputs ---------------------------------------------------------------------------------------------------------------------------


def _chosen(graph: Graph, term: _Asked, count: int) -> tuple[list[str], list[Value]]:
    """The outputs that a loss consumes: those named, or the model's first ones."""
    names = list(term.outputs) or list(graph.outputs)[:count]
    if len(names) != count:
        have = ", ".join(graph.outputs)
        raise Refusal(
            f"the loss {term.what!r} takes {count} outputs",
            [f"found {', '.join(names) or 'none'}; the model has {have}"],
        )
    values = values_of(graph, names)
    bad = [n for n, v in zip(names, values, strict=True) if not v.dtype.floating]
    if bad:
        floating = [n for n, v in graph.outputs.items() if v.dtype.floating]
        way = (
            f"; choose another with output=: {', '.join(floating)}"
            if floating
            else "; the model has no floating output, so it cannot be trained"
        )
        types = {n: v.type for n, v in zip(names, values, strict=True)}
        raise Refusal(
            "a loss needs a floating output, as no gradient flows through integers",
            [f"output {n!r} is {types[n]!r}{way}" for n in bad],
        )
    return names, values


def _output_itself(graph: Graph, term: _Asked) -> tuple[Value, dict[str, Any]]:
    (name,), (value,) = _chosen(graph, term, 1)
    with phase("loss", Source("output", "output")):
        return _scalar(value, f"output {name!r}, which is the loss itself,"), {"name": "output", "output": name}


def _scalar(value: Value, what: str) -> Value:
    if not isinstance(value, Value) or not value.dtype.floating or not all(map(is_one, value.shape)):
        found = repr(value.type) if isinstance(value, Value) else repr(value)
        raise Refusal("a loss is one number", [f"{what} is {found}: reduce it to a floating scalar"])
    return p.reshape(value, shape=()) if value.rank else value


def _sum(values: Sequence[Value]) -> Value:
    dtype = max((v.dtype for v in values), key=lambda d: (d.bits, d is f64))
    total: Value | None = None
    for v in values:
        v = v if v.dtype is dtype else p.cast(v, dtype=dtype)
        total = v if total is None else p.add(total, v)
    assert total is not None
    return total


# ---- losses by name --------------------------------------------------------------------------------------------------------------------


def _named(
    graph: Graph, record: Loss, term: _Asked, class_axis: int | None, fuse: bool, target: TargetMaker
) -> tuple[Value, dict[str, Any]]:
    options = dict(term.options)
    if class_axis is not None and "class_axis" in record.options:
        options.setdefault("class_axis", class_axis)
    record.check(options)
    names, values = _chosen(graph, term, len(record.consumed(options)))
    info: dict[str, Any] = {"name": record.name, "output": names[0] if len(names) == 1 else names}
    with phase("loss", Source(record.name, record.name)):
        if fuse and len(values) == 1 and record.on_logits:
            record, values, fused = _on_logits(record, values[0], names[0], options)
            info.update(fused)
        types = [TensorType(v.dtype, v.shape) for v in values]
        needed = record.needed(types, options)
        made = {n: target(f"{n}{term.suffix}", dtype=t.dtype, shape=t.shape) for n, t in needed.items()}
        value = _scalar(record(values, made, options), f"the loss {record.name!r} of output {names[0]!r}")
    info["targets"] = [v.params["name"] for v in made.values()]
    if options:
        info["options"] = {k: _json(v) for k, v in options.items()}
    return value, info


def _on_logits(record: Loss, y: Value, name: str, options: dict[str, Any]) -> tuple[Loss, list[Value], dict[str, Any]]:
    """The loss on the logits, where the output is a known activation of some; sets the class axis to that of a softmax."""
    found = trace(y)
    if found is None or found.kind not in record.on_logits:
        return record, [y], {}
    if found.kind != "sigmoid" and "class_axis" in record.options and not _settle_axis(found, y, name, options):
        return record, [y], {}
    stable = loss_named(record.on_logits[found.kind])
    return stable, [found.logits], {"fused": found.kind, "on_logits": stable.name}


def _settle_axis(found: Probabilities, y: Value, name: str, options: dict[str, Any]) -> bool:
    """Whether the activation runs over one axis; that is then the axis of the classes."""
    axes = [a for a in found.axes if not is_one(y.shape[a])] or list(found.axes)
    if len(axes) != 1:
        return False
    given = options.get("class_axis")
    if given is not None and given % y.rank != axes[0]:
        raise Refusal(
            "the classes are not along class_axis",
            [
                f"output {name!r} is a {found.kind} over axis {axes[0]}, but class_axis is {given}; leave it out, or pass fuse=False"
            ],
        )
    options["class_axis"] = axes[0]
    return True


def _json(value: Any) -> Any:
    match value:
        case Value():
            return repr(value.type)
        case np.ndarray() | np.generic():
            return value.tolist()
        case tuple():
            return [_json(v) for v in value]
        case _:
            return value


# ---- losses from graphs ----------------------------------------------------------------------------------------------------------------


def _from_graph(graph: Graph, loss: Graph, term: _Asked, target: TargetMaker) -> tuple[Value, dict[str, Any]]:
    """A loss given as a graph: inputs bind by name to the model's outputs and tensors, the others are targets; stored values are constants."""
    if len(loss.outputs) != 1 and "loss" not in loss.outputs:
        raise Refusal(
            f"the loss graph {loss.name!r} has {len(loss.outputs)} outputs", ["one is required, or one called 'loss'"]
        )
    name = "loss" if "loss" in loss.outputs else next(iter(loss.outputs))
    bound = {v.params["name"]: v for v in loss.by_role("input") if v.params["name"] in graph}
    if not bound:
        have = ", ".join(v.params["name"] for v in loss.by_role("input"))
        raise Refusal(
            f"the loss graph {loss.name!r} reads no output of the model",
            [f"its inputs: {have}; the outputs: {', '.join(graph.outputs)}"],
        )
    sizes = _unified(graph, loss, bound)
    new: dict[int, Value] = {}
    with phase("loss", Source(loss.name, loss.name)):
        for node in loss.nodes:
            params = {k: map_params(v, lambda d: substitute(d, sizes)) for k, v in node.params.items()}
            if node.primitive.name != "input":
                new[id(node)] = bind(node.primitive, *(new[id(o)] for o in node.operands), **params)
            elif node.params["name"] in bound:
                new[id(node)] = graph[node.params["name"]]
            elif node.params["name"] in loss.data:
                new[id(node)] = p.literal(loss.data[node.params["name"]])
            else:
                new[id(node)] = target(node.params["name"], dtype=node.dtype, shape=params["shape"])
        value = _scalar(new[id(loss.outputs[name])], f"output {name!r} of the loss graph {loss.name!r}")
    targets = [v.params["name"] for v in target.made.values()]
    return value, {"name": loss.name, "custom": True, "outputs": list(bound), "targets": targets}


def _unified(graph: Graph, loss: Graph, bound: Mapping[str, Value]) -> dict[sympy.Symbol, Dim]:
    """What the symbols of a loss graph are in the model's dims."""
    sizes: dict[sympy.Symbol, Dim] = {}
    reasons = []
    for name, v in bound.items():
        given = graph[name]
        if given.dtype is not v.dtype or given.rank != v.rank:
            reasons.append(f"its input {name!r} is {v.type!r}, the model's {name!r} is {given.type!r}")
            continue
        for mine, theirs in zip(v.shape, given.shape, strict=True):
            if isinstance(mine, sympy.Symbol):
                sizes.setdefault(mine, theirs)
            elif not maybe_equal(mine, theirs):
                reasons.append(
                    f"its input {name!r} is {show_shape(v.shape)}, the model's {name!r} is {show_shape(given.shape)}"
                )
    if reasons:
        raise Refusal(f"the loss graph {loss.name!r} does not fit the model", reasons)
    return sizes
