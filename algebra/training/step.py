"""The training step: forward pass, loss, backward pass and update as one graph.

Names that programs rely on: the targets `target` (or `target_{output}`), `lr` and the optimizer's other numbers, `step` (int64, its value before the
update), `seed`, `{slot}_{parameter}`; outputs `loss`, `grad_{parameter}`, `new_{parameter}`, `new_{slot}_{parameter}`, `new_step`, `new_{state}`. A
name that the model has already gets a suffix, and the signature says so under `renamed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from .. import primitives as p
from ..calculus.vjp import vjp
from ..errors import Refusal
from ..graph import Constant, Graph, Role, Value, building, phase, reachable
from ..origin import Source
from ..passes.substitute import in_graph
from ..signature import Signature
from ..types import DType, TensorType, f32, f64, i64
from .adapters import Lora, adapted
from .clipping import clip_by_global_norm, clip_by_norm, clip_by_value
from .modes import DropoutOption, TrainingMode, dropouts_of, kept_statistics_of, relocated, statistics_of, training_mode
from .naming import Names
from .objective import LossLike, Objective, objective
from .optimizers import Optimizer, Slot
from .optimizers import ema as moving_average
from .optimizers import optimizer as optimizer_named
from .options import mistyped
from .precision import LossScale, Scaling, kept_where, low_dtype, mixed
from .recompute import Checkpoint, Recompute, recompute
from .schedules import Schedule
from .schedules import schedule as schedule_named
from .selection import Selection, match, select
from .weight import LossWeight, weight_of

__all__ = ["Group", "TrainingStep", "training_step"]


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters by name or glob, with options of the optimizer for them alone; the first group that matches counts."""

    params: tuple[str, ...]
    frozen: bool = False
    optimizer: str | Optimizer | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Group | Mapping[str, Any]) -> Group:
        """A group from a mapping, as PyTorch's: `{"params": "encoder.*", "lr": 1e-4}`."""
        if isinstance(given, Group):
            return given
        options = dict(given)
        if "params" not in options:
            raise Refusal("a parameter group without parameters", [f"no 'params' in {dict(given)!r}"])
        params = options.pop("params")
        return cls(
            (params,) if isinstance(params, str) else tuple(params),
            bool(options.pop("frozen", False)),
            options.pop("optimizer", None),
            options,
        )


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """A training step and its parts.

    `graph` is the whole; `gradients` is loss and gradients only, `apply` the update only, so that an all-reduce or an accumulation fits between;
    `evaluation` is the loss and the outputs in inference mode; `weight` what the loss divides a sum over samples by, where that depends on the batch.
    """

    graph: Graph
    gradients: Graph
    evaluation: Graph
    selection: Selection
    make_apply: Callable[[], Graph] = field(repr=False)
    weight: Graph | None = None

    @cached_property
    def apply(self) -> Graph:
        """The update only: gradients, parameters, slots, step and numbers in, new ones out. Made when first asked for."""
        return self.make_apply()

    @cached_property
    def signature(self) -> Signature:
        """Inputs and outputs with their roles."""
        return Signature.of(self.graph)

    def nodes(self) -> Iterator[Value]:
        """Every node but the inputs, in topological order, each with `phase`, `origin`, `primitive`, `type` and `inputs`."""
        return (v for v in self.graph.nodes if v.primitive.name != "input")


# ---- the update ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What `training_step` was asked for, in settled form."""

    rule: Optimizer
    train: tuple[str, ...]
    freeze: tuple[str, ...]
    groups: tuple[Group, ...]
    no_decay: bool
    clip: Mapping[str, float]
    schedule: Schedule | None
    ema: float | None
    batch_norm: str
    running_variance: str
    dropout: DropoutOption
    precision: DType | None
    loss_scale: LossScale | None
    lora: Mapping[str, Any] | None
    checkpoint: Checkpoint | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one parameter is updated: its optimizer, the inputs that hold its numbers, its slots' inputs, its average's, and its group."""

    parameter: Value
    optimizer: Optimizer
    hyper: Mapping[str, Value]
    slots: Mapping[str, Value]
    average: Value | None
    group: int | None

    @property
    def name(self) -> str:
        return str(self.parameter.params["name"])

    @property
    def slot_inputs(self) -> tuple[Value, ...]:
        return (*self.slots.values(), *([self.average] if self.average is not None else []))


@dataclass(frozen=True, slots=True)
class _Update:
    """The update as a function of gradients."""

    plans: Sequence[_Plan]
    step: Value
    words: Mapping[str, str]
    options: _Options

    def apply(self, gradients: Sequence[Value]) -> tuple[list[Value], list[Value], Value]:
        """New parameters, new slots parameter by parameter, and the new step."""
        if self.options.clip:
            with phase("optimizer", Source("clip_gradients", "clip_gradients")):
                gradients = _clipped(gradients, self.options.clip)
        rates = self._rates()
        parameters, slots = [], []
        for plan, gradient in zip(self.plans, gradients, strict=True):
            with phase("optimizer", Source(plan.optimizer.name, plan.optimizer.name)):
                hyper = {k: rates.get(id(v), v) for k, v in plan.hyper.items()}
                new, moved = plan.optimizer.update(plan.parameter, gradient, plan.slots, self.step, hyper)
            parameters.append(new)
            slots += [moved[word] for word in plan.slots]
            if plan.average is not None and self.options.ema is not None:
                with phase("optimizer", Source("ema", "ema")):
                    slots.append(moving_average(plan.average, new, self.step, self.options.ema))
        with phase("optimizer", Source("step", "step")):
            after = p.add(self.step, p.literal(1, i64))
        return parameters, slots, after

    def _rates(self) -> dict[int, Value]:
        """What the schedule makes of each learning rate."""
        if self.options.schedule is None:
            return {}
        rates = {id(v): v for plan in self.plans for k, v in plan.hyper.items() if k == "lr"}
        with phase("optimizer", Source("schedule", "schedule")):
            return {i: self.options.schedule.rate(self.step, v) for i, v in rates.items()}


def _clipped(gradients: Sequence[Value], limits: Mapping[str, float]) -> Sequence[Value]:
    """Gradients clipped by value, then each by its norm, then all by their common norm, as far as limits are given."""
    if "value" in limits:
        gradients = clip_by_value(gradients, limits["value"])
    if "norm" in limits:
        gradients = clip_by_norm(gradients, limits["norm"])
    if "global_norm" in limits:
        gradients, _ = clip_by_global_norm(gradients, limits["global_norm"])
    return gradients


def _plans(parameters: Sequence[Value], options: _Options, members: Mapping[str, int], names: Names, data: dict[str, Constant],
           ) -> tuple[list[_Plan], list[Value], dict[str, str]]:  # fmt: skip
    """Plans of update, the hyperparameter inputs in order, and the slot word of each slot input. First values go into `data`."""
    base = options.rule
    wide = f64 if any(v.dtype is f64 for v in parameters) else f32
    numbers = _Numbers(names, wide, data)
    plans, words, reasons = [], {}, []
    for v in parameters:
        name = v.params["name"]
        index = members.get(name)
        own, given = _optimizer_of(base, None if index is None else options.groups[index])
        if options.no_decay and v.rank <= 1 and getattr(own, "weight_decay", 0) != 0:
            own, given = replace(own, weight_decay=0.0), given - {"weight_decay"}  # type: ignore[call-arg]
        type_ = TensorType(v.dtype, v.shape)
        if reason := own.refusal(type_):
            reasons.append(f"{name!r}: {reason}")
            continue
        wanted = {word: (f"{word}_{name}", slot) for word, slot in own.slots(type_).items()}
        slots = {word: _slot_input(names(full), slot, data.get(name), data) for word, (full, slot) in wanted.items()}
        words.update({u.params["name"]: word for word, u in slots.items()})
        average = None
        if options.ema is not None:
            average = _slot_input(names(f"ema_{name}"), Slot(type_, None), data.get(name), data)
            words[average.params["name"]] = "ema"
        plans.append(_Plan(v, own, numbers.of(own, base, index, given), slots, average, index))
    if reasons:
        raise Refusal("not every parameter can be updated", reasons)
    return plans, numbers.inputs, words


def _optimizer_of(base: Optimizer, group: Group | None) -> tuple[Optimizer, frozenset[str]]:
    """A group's optimizer, and which of its options are the group's own."""
    if group is None:
        return base, frozenset()
    if group.optimizer is None:
        known = {f.name for f in fields(base)}
        unknown = [f"{base.name} has no option {o!r}" for o in group.options if o not in known]
        if unknown:
            raise Refusal(f"cannot use the options of the group of {', '.join(group.params)}", unknown)
        return replace(base, **group.options), frozenset(group.options)
    if isinstance(group.optimizer, Optimizer):
        own = replace(group.optimizer, **group.options)
    else:
        own = optimizer_named(group.optimizer, **group.options)
    return own, frozenset(own.hyperparameters())


class _Numbers:
    """The hyperparameter inputs: the base optimizer's under their own names, those that a group sets under `{name}_{group number}`."""

    def __init__(self, names: Names, dtype: DType, data: dict[str, Constant]) -> None:
        self._names, self._dtype, self._data = names, dtype, data
        self._made: dict[tuple[str, int | None], Value] = {}

    @property
    def inputs(self) -> list[Value]:
        """The base optimizer's inputs, then those of each group."""
        order = sorted(self._made.items(), key=lambda item: -1 if item[0][1] is None else item[0][1])
        return [v for _, v in order]

    def of(
        self, own: Optimizer, base: Optimizer, group: int | None, given: Sequence[str] | frozenset[str]
    ) -> dict[str, Value]:
        shared = base.hyperparameters()
        return {
            name: self._input(name, value, group if name in given or name not in shared else None)
            for name, value in own.hyperparameters().items()
        }

    def _input(self, name: str, value: float, group: int | None) -> Value:
        key = (name, group)
        if key not in self._made:
            full = self._names(name if group is None else f"{name}_{group + 1}")
            self._made[key] = p.input(full, TensorType(self._dtype, ()), "hyperparameter")
            self._data[full] = Constant(np.asarray(value, self._dtype.numpy))
        return self._made[key]


def _slot_input(name: str, slot: Slot, parameter: Constant | None, data: dict[str, Constant]) -> Value:
    """The input of a slot, and its first value where that is known."""
    type_ = slot.type
    if slot.initial is None:
        if parameter is not None:
            data[name] = parameter
    else:
        shape, dtype, number = tuple(int(d) for d in type_.shape), type_.dtype.numpy, slot.initial
        data[name] = Constant(
            load=lambda: np.full(shape, number, dtype) if number else np.zeros(shape, dtype), shape=shape, dtype=dtype
        )
    return p.input(name, type_, "slot")


# ---- the whole -------------------------------------------------------------------------------------------------------------------------


def training_step(
    graph: Graph,
    *,
    loss: LossLike = "cross_entropy",
    optimizer: str | Optimizer = "sgd",
    lr: float | None = None,
    output: str | None = None,
    train: Sequence[str] = (),
    freeze: Sequence[str] = (),
    class_axis: int | None = None,
    loss_options: Mapping[str, Any] | None = None,
    fuse: bool = True,
    optimizer_options: Mapping[str, Any] | None = None,
    groups: Sequence[Group | Mapping[str, Any]] = (),
    no_decay: bool = False,
    clip_value: float | None = None,
    clip_norm: float | None = None,
    clip_global_norm: float | None = None,
    schedule: str | tuple[str, Mapping[str, Any]] | Schedule | None = None,
    ema: float | None = None,
    batch_norm: str = "batch",
    running_variance: str = "unbiased",
    dropout: DropoutOption = False,
    precision: str | None = None,
    loss_scale: LossScale | float | str | None = None,
    lora: Lora | int | Mapping[str, Any] | None = None,
    checkpoint: Checkpoint | bool | int | str | Sequence[str] | Mapping[str, Any] | None = None,
) -> TrainingStep:
    """The training step of a model.

    `loss` is a name as in `torch.nn.functional`; a mapping from outputs to losses (`"mse_loss"`, `("mse_loss", 0.4)` with a weight, or with
    options too); a function `f(outputs, target)` over values; a graph whose inputs bind by name to outputs and targets; or None, where `output` is
    the loss itself. `optimizer` is a name as in `torch.optim` in lower case, with `lr` and `optimizer_options`, or an `Optimizer`.

    `train` and `freeze` choose parameters by name or glob; `groups` gives some their own options; `no_decay` keeps weight decay from norms and
    biases (rank 0 and 1). Gradients as outputs are those before clipping: by value, by each one's norm, by the norm of all. `schedule` (a name as in
    `schedules.SCHEDULES`, that and its options, or a `Schedule`) makes each step's rate from `lr` and `step`; `ema` keeps a moving average of the weights.

    `batch_norm="batch"` normalises by the batch and updates the running statistics, `"frozen"` keeps them. `dropout` is off unless asked for: True
    takes the model's dropouts with their ratios, a number gives them that ratio, a mapping puts dropout at the tensors its globs name.

    `precision="float16"` (or `"bfloat16"`) computes products of a float32 model in 16 bits; `loss_scale` ("dynamic", "off", a first scale, or a
    `LossScale`) is on by itself for float16. A step whose gradients are not finite is then skipped.

    `lora` (a rank, options as of `Lora`, or one) freezes the model and trains low-rank adapters beside the matrices that its `targets` name.

    `checkpoint` lets the backward pass compute forward values anew instead of keeping them: True chooses which, a number says in how many segments,
    patterns name the model's nodes, and `{"budget": bytes}` takes as few segments as a budget allows.

    Raises `Refusal` with everything that stands in the way: options that there are not (with near names), patterns that match nothing, an optimizer
    that a parameter's shape does not suit, nothing to train.

    >>> from pullback.algebra.text import parse
    >>> step = training_step(parse("graph g(x: f32[N, 2], @parameter w: f32[2, 3]) { y: f32[N, 3] = dot x, w contract=[[1],[0]] return y=y }"))
    >>> [entry.name for entry in step.signature.inputs]
    ['x', 'target', 'w', 'step', 'lr']
    >>> [entry.name for entry in step.signature.outputs]
    ['loss', 'y', 'grad_w', 'new_w', 'new_step']
    """
    if not graph.outputs:
        raise Refusal(f"no training step for {graph.name!r}", ["the model has no outputs"])
    clips = {"value": clip_value, "norm": clip_norm, "global_norm": clip_global_norm}
    _check(clips, ema, batch_norm, running_variance)
    low = low_dtype(precision)
    options = _Options(
        rule=_rule(optimizer, lr, optimizer_options or {}),
        train=_patterns(train),
        freeze=_patterns(freeze),
        groups=tuple(map(Group.of, groups)),
        no_decay=no_decay,
        clip={k: v for k, v in clips.items() if v is not None},
        schedule=_schedule(schedule),
        ema=ema,
        batch_norm=batch_norm,
        running_variance=running_variance,
        dropout=dropout,
        precision=low,
        loss_scale=LossScale.of(loss_scale, low),
        lora=None,
        checkpoint=Checkpoint.of(checkpoint),
    )
    names = Names(_taken(graph))
    with building(graph):
        if (adapters := Lora.of(lora)) is not None:
            graph, pairs = adapted(graph, adapters, names)
            own = [name for pair in pairs.values() for name in pair]
            described = {
                "rank": adapters.rank,
                "factor": adapters.factor,
                "pairs": {k: list(v) for k, v in pairs.items()},
            }
            options = replace(options, train=(*own, *options.train), lora=described)
        goal = objective(
            graph, loss, output=output, class_axis=class_axis, options=loss_options or {}, fuse=fuse, names=names
        )
        return _build(graph, goal, options, names)


def _check(clips: Mapping[str, float | None], ema: float | None, batch_norm: str, running_variance: str) -> None:
    """Raise one refusal for every option that has no such value."""
    given = {**{f"clip_{k}": v for k, v in clips.items()}, "ema": ema}
    if wrong := mistyped(given, dict.fromkeys(given, "float | None")):
        raise Refusal("options of the training step", wrong)
    wrong = [f"clip_{k} must be above 0, found {v!r}" for k, v in clips.items() if v is not None and not v > 0]
    if ema is not None and not 0 <= ema < 1:
        wrong.append(f"ema must lie in [0, 1), found {ema!r}")
    for name, value, words in (
        ("batch_norm", batch_norm, ("batch", "frozen")),
        ("running_variance", running_variance, ("unbiased", "population")),
    ):
        if value not in words:
            wrong.append(f"{name} is {' or '.join(map(repr, words))}, found {value!r}")
    if wrong:
        raise Refusal("options of the training step", wrong)


def _patterns(given: Sequence[str] | str) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _rule(optimizer: str | Optimizer, lr: float | None, options: Mapping[str, Any]) -> Optimizer:
    given = {**options, **({} if lr is None else {"lr": lr})}
    if isinstance(optimizer, Optimizer):
        return replace(optimizer, **given) if given else optimizer
    if not isinstance(optimizer, str):
        raise Refusal("cannot use this as an optimizer", [f"a name or an Optimizer is required, found {optimizer!r}"])
    return optimizer_named(optimizer, **given)


def _schedule(given: str | tuple[str, Mapping[str, Any]] | Schedule | None) -> Schedule | None:
    match given:
        case None | Schedule():
            return given
        case str():
            return schedule_named(given)
        case name, options:
            return schedule_named(name, **options)
    raise Refusal("cannot read the schedule", [f"a name, (name, options) or a Schedule is required, found {given!r}"])


def _taken(graph: Graph) -> set[str]:
    return (
        {v.params["name"] for v in graph.inputs}
        | set(graph.outputs)
        | set(graph.tensors)
        | set(graph.info.get("frozen", ()))
    )


def _build(graph: Graph, goal: Objective, options: _Options, names: Names) -> TrainingStep:
    loss_name = names("loss")
    statistics = statistics_of(graph) if options.batch_norm == "batch" else ()
    members = _members(graph, options.groups)
    stopped = {
        n: f"frozen by the group of {', '.join(options.groups[i].params)}"
        for n, i in members.items()
        if options.groups[i].frozen
    }
    selection = select(
        graph, goal.value, train=options.train, freeze=options.freeze, statistics=statistics,
        kept=kept_statistics_of(graph), frozen_groups=stopped,
    )  # fmt: skip
    if not selection.trained:
        reasons = [f"{n}: {why}" for n, why in selection.left_out.items()]
        if any(
            v.primitive.name == "literal" and len(v.shape) > 1 and v.dtype.integral and v.dtype.bits <= 8
            for v in graph.nodes
        ):
            reasons.append(
                "weights stored as integers cannot be trained: train the floating model, and quantise it afterwards"
            )
        raise Refusal(f"nothing to train in {graph.name!r}", reasons)
    base = graph.with_(
        inputs=(*graph.inputs, *goal.targets),
        outputs={loss_name: goal.value, **graph.outputs},
        data={**graph.data, **goal.data},
    )
    base = _with_roles(base, selection.trained, statistics)
    step = p.input(names("step"), TensorType(i64, ()), "step")
    drawing, own = _drawing_anew(base, step)
    dropped = dropouts_of(drawing, options.dropout)
    seed = own or (p.input(names("seed"), TensorType(i64, ()), "seed") if dropped else None)
    mode = training_mode(
        drawing,
        batch_norm=options.batch_norm,
        running_variance=options.running_variance,
        dropout=dropped,
        seed=seed,
        step=step,
    )
    return _assembled(base, mode, selection, goal, options, names, loss_name, step, seed, members)


def _drawing_anew(graph: Graph, step: Value) -> tuple[Graph, Value | None]:
    """The graph with the seed of its own random numbers moved on by the step, so that each step draws others; and that seed, if it has one."""
    own = next((v for v in graph.by_role("seed") if v.type == TensorType(i64, ())), None)
    if own is None:
        return graph, None
    moved = p.add(own, p.mul(step, p.literal(0x9E3779B9, i64)))
    varied, now = in_graph(graph, {id(own): lambda _: moved})
    return relocated(varied.with_(inputs=tuple(v for v in varied.inputs if v is not moved)), now), own


def _members(graph: Graph, groups: Sequence[Group]) -> dict[str, int]:
    """The number of the group that each parameter belongs to; the first that matches counts."""
    candidates = [v.params["name"] for v in graph.by_role("parameter", "frozen", "state") if v.dtype.floating]
    members: dict[str, int] = {}
    for i, group in enumerate(groups):
        for name in match(candidates, group.params, option="group", elsewhere=graph.info.get("frozen", {})):
            members.setdefault(name, i)
    return members


def _with_roles(graph: Graph, trained: Sequence[str], statistics: Sequence[str]) -> Graph:
    """The graph with what is trained in role `parameter`, updated statistics in role `state`, and every other stored value in role `frozen`."""
    places = {}
    for v in graph.by_role("parameter", "frozen", "state"):
        name = v.params["name"]
        role = "parameter" if name in trained else "state" if name in statistics else "frozen"
        if role != v.params["role"]:
            fresh = p.input(name, TensorType(v.dtype, v.shape), role)
            places[id(v)] = lambda now, fresh=fresh: fresh
    changed, now = in_graph(graph, places)
    return relocated(changed, now)


@dataclass(slots=True)
class _Outputs:
    """Outputs by name, with their roles and what each becomes in the next step."""

    names: Names
    roles: dict[str, Role] = field(default_factory=dict)
    replaces: dict[str, str] = field(default_factory=dict)

    def add(self, wanted: str, role: str, of: str | None = None, replaces: str | None = None) -> str:
        name = self.names(wanted)
        self.roles[name] = Role(role, of)
        if replaces is not None:
            self.replaces[name] = replaces
        return name


def _name(v: Value) -> str:
    return str(v.params["name"])


def _assembled(base: Graph, mode: TrainingMode, selection: Selection, goal: Objective, options: _Options, names: Names,
               loss_name: str, step: Value, seed: Value | None, members: Mapping[str, int]) -> TrainingStep:  # fmt: skip
    whole = mode.graph if options.precision is None else mixed(mode.graph, options.precision)
    parameters = whole.by_role("parameter")
    scalars = (step, *([seed] if seed is not None else []))
    data = {**whole.data, **{_name(v): Constant(np.asarray(0, np.int64)) for v in scalars}}
    loss = whole.outputs[loss_name]
    scaling = None if options.loss_scale is None else Scaling.enter(options.loss_scale, loss, names, data)
    view = None if options.checkpoint is None else recompute(whole, loss, options.checkpoint, parameters)
    gradients = _gradients(loss, parameters, scaling, view)
    plans, hyper, words = _plans(parameters, options, members, names, data)
    update = _Update(plans, step, words, options)

    out = _Outputs(names, {loss_name: Role("loss"), **{n: Role("output") for n in whole.outputs if n != loss_name}})
    grads = [out.add(f"grad_{_name(v)}", "gradient", _name(v)) for v in parameters]
    news = [out.add(f"new_{_name(v)}", "update", _name(v), _name(v)) for v in parameters]
    slots = [(v, plan.name) for plan in plans for v in plan.slot_inputs]
    new_slots = [out.add(f"new_{_name(v)}", "state", owner, _name(v)) for v, owner in slots]
    new_step = out.add(f"new_{_name(step)}", "state", None, _name(step))
    new_state = {out.add(f"new_{n}", "state", n, n): v for n, v in mode.state.items()}
    out.roles.update({_name(v): Role("slot", owner) for v, owner in slots})

    if scaling is not None:
        new_scale = [out.add(f"new_{_name(v)}", "state", None, _name(v)) for v in (scaling.scale, scaling.tracker)]

    def updated(gradients: Sequence[Value]) -> dict[str, Value]:
        moved, after, count = update.apply(gradients)
        values = {**dict(zip(news, moved, strict=True)), **dict(zip(new_slots, after, strict=True)), new_step: count}
        if scaling is None:
            return values
        before = dict(zip((*news, *new_slots, new_step), (*parameters, *(v for v, _ in slots), step), strict=True))
        with phase("optimizer", Source("loss_scale", "loss_scale")):
            finite = scaling.finite(gradients)
            kept = {name: kept_where(finite, v, before[name]) for name, v in values.items()}
            return {**kept, **dict(zip(new_scale, scaling.moved(finite), strict=True))}

    slot_inputs = tuple(v for v, _ in slots)
    forward = (*whole.by_role("input", "target"), *parameters)
    state, frozen, numbers = whole.by_role("state"), whole.by_role("frozen"), tuple(hyper)
    scale = () if scaling is None else (scaling.scale, scaling.tracker)
    backward = {**whole.outputs, **dict(zip(grads, gradients, strict=True))}
    divided = weight_of(base, base.outputs[loss_name])
    info = _info(base, selection, goal, options, names, words, out, mode, plans, divided)
    common = whole.with_(data=data, info=info, roles=out.roles)
    seeds = () if seed is None else (seed,)

    entering_types = [TensorType(v.dtype, v.shape) for v in gradients]

    def make_apply() -> Graph:
        stored = (*parameters, *slot_inputs, *scale, step, *numbers)
        with building(common.with_(inputs=stored, outputs={})), phase("optimizer"):
            entering = tuple(p.input(n, t, "gradient") for n, t in zip(grads, entering_types, strict=True))
            return _part(common, "apply", (*entering, *stored), updated(entering))

    evaluation = _part(
        base.with_(info=info, roles=out.roles),
        "evaluation",
        base.by_role("input", "target", "parameter", "state", "frozen"),
        dict(base.outputs),
    )
    total = None if divided is None else divided.value()
    weight = None if total is None else _weight(base.with_(info=info), names("loss_weight"), total)
    return TrainingStep(
        graph=_part(
            common.with_(info={**info, "evaluation": evaluation, "weight": weight}),
            "step",
            (*forward, *slot_inputs, *state, *scale, step, *numbers, *seeds, *frozen),
            {**backward, **updated(gradients), **new_state},
        ),
        gradients=_part(
            common,
            "gradients",
            (*forward, *state, *scale[:1], *(scalars if seed is not None else ()), *frozen),
            {**backward, **new_state},
        ),
        evaluation=evaluation,
        selection=selection,
        make_apply=make_apply,
        weight=weight,
    )


def _weight(base: Graph, name: str, total: Value) -> Graph:
    """The weight of the loss as a graph of its own, of what it reads alone."""
    needed = {id(v) for v in reachable([total])}
    entering = (*base.by_role("input", "target"), *(v for v in base.by_role("state", "frozen") if id(v) in needed))
    return _part(base.with_(roles={name: Role("output")}), "weight", entering, {name: total})


def _gradients(
    loss: Value, parameters: Sequence[Value], scaling: Scaling | None, view: Recompute | None
) -> list[Value]:
    with phase("backward", Source("loss", "loss")):
        seed = p.literal(1, loss.dtype) if scaling is None else scaling.seed(loss)
    found = []
    for ct, v in zip(vjp([loss], [seed], parameters, primal=view), parameters, strict=True):
        assert ct is not None, f"{v!r} was selected, but no path leads from it to the loss"
        with phase("backward", Source("loss_scale", "loss_scale")):
            found.append(ct if scaling is None else scaling.unscaled(ct))
    return found


def _part(common: Graph, kind: str, inputs: Sequence[Value], outputs: Mapping[str, Value]) -> Graph:
    """A graph of the step; stored values that no output reaches are not carried along."""
    reached = {id(v) for v in reachable(outputs.values())}
    kept = tuple(v for v in inputs if v.params["role"] != "frozen" or id(v) in reached)
    known = {_name(v) for v in kept}
    return common.with_(
        inputs=kept,
        outputs=dict(outputs),
        name=common.name if kind == "step" else f"{common.name}_{kind}",
        tensors={} if kind == "apply" else {k: v for k, v in common.tensors.items() if id(v) in reached},
        roles={k: r for k, r in common.roles.items() if k in outputs or k in known},
        data={k: c for k, c in common.data.items() if k in known},
        info={**common.info, "kind": kind},
    )


def _info(base: Graph, selection: Selection, goal: Objective, options: _Options, names: Names, words: Mapping[str, str], out: _Outputs,
          mode: TrainingMode, plans: Sequence[_Plan], divided: LossWeight | None) -> dict[str, Any]:  # fmt: skip
    """What the signature says besides inputs and outputs."""
    optimizer = _plain(options.rule)
    if options.groups:
        optimizer["groups"] = [
            {
                "params": list(g.params),
                "frozen": g.frozen,
                **_settings(g),
                "parameters": [pl.name for pl in plans if pl.group == i],
            }
            for i, g in enumerate(options.groups)
        ]
    extras = {"no_decay": options.no_decay, "clip": dict(options.clip), "ema": options.ema}
    optimizer.update({k: v for k, v in extras.items() if v})
    if options.schedule is not None:
        optimizer["schedule"] = _plain(options.schedule)
    training: dict[str, Any] = {}
    if base.info.get("batch_norms"):
        training["batch_norm"] = options.batch_norm
        training["batch_norms"] = dict(mode.batch_norms)
        if mode.batch_norms:
            training["running_variance"] = options.running_variance
    if base.info.get("dropouts") or mode.dropouts:
        training["dropout"] = dict(mode.dropouts)
    if options.precision is not None:
        training["precision"] = options.precision.numpy.name
    if options.loss_scale is not None:
        training["loss_scale"] = {f.name: getattr(options.loss_scale, f.name) for f in fields(options.loss_scale)}
    if options.checkpoint is not None:
        given = {f.name: _json(getattr(options.checkpoint, f.name)) for f in fields(options.checkpoint)}
        training["checkpoint"] = {k: v for k, v in given.items() if v}
    if options.lora is not None:
        training["lora"] = options.lora
    updated = set(mode.state)
    return {
        **base.info,
        "frozen": {n: why for n, why in selection.left_out.items() if n not in updated},
        "loss": {**goal.info, **({} if divided is None else {"parts": "mean" if divided.mean else "sum"})},
        "optimizer": optimizer,
        "training": training,
        "renamed": dict(names.renamed),
        "slots": dict(words),
        "replaces": dict(out.replaces),
    }


def _plain(options: Optimizer | Schedule) -> dict[str, Any]:
    """A record of options as JSON takes it."""
    return {"name": options.name, **{f.name: _json(getattr(options, f.name)) for f in fields(options)}}


def _json(value: Any) -> Any:
    match value:
        case tuple() | list():
            return [_json(v) for v in value]
        case Schedule():
            return _plain(value)
        case _:
            return value


def _settings(group: Group) -> dict[str, Any]:
    if group.optimizer is None:
        return dict(group.options)
    own = group.optimizer if isinstance(group.optimizer, str) else group.optimizer.name
    return {"optimizer": own, **group.options}
