"""What enters and leaves a graph, as data: the same JSON stands in every file that is written (`pullback.signature`).

The order of a training step's inputs and outputs is fixed:

- inputs: the model's inputs, the targets (and what else a loss reads), the parameters, the optimizer's slots (parameter by parameter), the
  model's state, the step counter, the hyperparameters, the seed;
- outputs: `loss`, the model's outputs, the gradients, the new parameters, the new slots, the new step, the new state.

Within each group the order is that of the model, except that hyperparameters and slots come in the optimizer's order. Values that are only ever
constants (role `frozen`) are no inputs; they are listed under `frozen`, each with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import sympy

from .dims import Dim, parse, show
from .errors import PullbackError
from .graph import Constraint, Graph, Value
from .types import TupleType

__all__ = ["INPUT_ROLES", "OUTPUT_ROLES", "VERSION", "Entry", "Signature"]

VERSION = 1
INPUT_ROLES = ("input", "target", "parameter", "slot", "state", "step", "hyperparameter", "seed", "gradient")
OUTPUT_ROLES = ("loss", "output", "gradient", "update", "state")


@dataclass(frozen=True, slots=True)
class Entry:
    """One input, output or activation.

    `dtype` is numpy's name, `shape` holds ints and texts of dims. `parameter` is what a gradient, update or slot belongs to; `slot` the
    optimizer's word for it (`exp_avg`); `replaces` the input whose value in the next step an output is; `tensor` the name that an activation
    has in the file, where that differs from the model's own.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int | str, ...]
    parameter: str | None = None
    slot: str | None = None
    replaces: str | None = None
    tensor: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The entry as JSON holds it: fields that say nothing are left out, except `parameter`."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out["shape"] = list(self.shape)
        return {k: v for k, v in out.items() if v is not None or k == "parameter"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Entry:
        known = {f.name for f in fields(cls)}
        given: dict[str, Any] = {k: v for k, v in data.items() if k in known}
        return cls(**{**given, "shape": tuple(data["shape"])})

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The shape as dims again."""
        return tuple(d if isinstance(d, int) else parse(d) for d in self.shape)


def _texts(shape: tuple[Dim, ...]) -> tuple[int | str, ...]:
    return tuple(d if isinstance(d, int) else show(d) for d in shape)


def _entry(name: str, role: str, value: Value, **more: Any) -> Entry:
    return Entry(name, role, value.dtype.numpy.name, _texts(value.shape), **more)


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs, outputs and all else that a program must know to use a written graph.

    `kind` is `step`, `gradients`, `apply`, `evaluation` or `graph`; `dims` says from which input and axis each symbol is read; `frozen` what is
    constant or not trained, and why; `renamed` which fixed names were taken already, and what stands in their place.
    """

    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    activations: tuple[Entry, ...] = ()
    dims: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    constraints: tuple[Constraint, ...] = ()
    frozen: Mapping[str, str] = field(default_factory=dict)
    loss: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    kind: str = "graph"
    version: int = VERSION

    @classmethod
    def of(cls, graph: Graph, tensors: Mapping[str, str] | None = None) -> Signature:
        """The signature of a graph. `tensors` maps the model's tensor names to those in a written file; a name that is missing there is gone."""
        info = graph.info
        slots: Mapping[str, str] = info.get("slots", {})
        replaces: Mapping[str, str] = info.get("replaces", {})
        inputs = tuple(_input_entry(graph, v, slots) for v in graph.inputs if v.params["role"] != "frozen")
        outputs = tuple(_output_entry(graph, name, v, slots, replaces) for name, v in graph.outputs.items())
        return cls(
            inputs=inputs,
            outputs=outputs,
            activations=tuple(_activations(graph, tensors)),
            dims=_dims(graph),
            constraints=tuple(graph.constraints),
            frozen=_frozen(graph),
            loss=dict(info.get("loss", {})),
            optimizer=dict(info.get("optimizer", {})),
            training=dict(info.get("training", {})),
            renamed=dict(info.get("renamed", {})),
            kind=info.get("kind", "graph"),
        )

    # ---- by role ----

    def by_role(self, *roles: str) -> tuple[Entry, ...]:
        """Inputs and outputs of these roles, inputs first."""
        return tuple(e for e in (*self.inputs, *self.outputs) if e.role in roles)

    def inputs_of(self, *roles: str) -> tuple[Entry, ...]:
        """Inputs of these roles."""
        return tuple(e for e in self.inputs if e.role in roles)

    def outputs_of(self, *roles: str) -> tuple[Entry, ...]:
        """Outputs of these roles."""
        return tuple(e for e in self.outputs if e.role in roles)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the trained parameters, in order."""
        return tuple(e.name for e in self.inputs_of("parameter"))

    @property
    def gradients(self) -> dict[str, str]:
        """Parameter (or input, or tensor) -> the output that is its gradient; where a graph takes gradients in, the input."""
        return {e.parameter or e.name: e.name for e in self.by_role("gradient")}

    @property
    def updates(self) -> dict[str, str]:
        """Parameter -> the output that is its new value."""
        return {e.parameter or e.name: e.name for e in self.outputs_of("update")}

    @property
    def slots(self) -> dict[str, list[str]]:
        """Parameter -> the inputs that hold its slots, in the optimizer's order."""
        found: dict[str, list[str]] = {}
        for e in self.inputs_of("slot"):
            found.setdefault(e.parameter or "", []).append(e.name)
        return found

    @property
    def carried(self) -> dict[str, str]:
        """Output -> the input that it becomes in the next step: parameters, slots, step and state."""
        return {e.name: e.replaces for e in self.outputs if e.replaces is not None}

    # ---- JSON ----

    def to_dict(self) -> dict[str, Any]:
        """The signature as plain data."""
        return {
            "version": self.version,
            "kind": self.kind,
            "inputs": [e.to_dict() for e in self.inputs],
            "outputs": [e.to_dict() for e in self.outputs],
            "activations": [e.to_dict() for e in self.activations],
            "dims": {k: None if v is None else dict(v) for k, v in self.dims.items()},
            "constraints": [
                {"left": _text(c.left), "relation": c.relation, "right": _text(c.right), "reason": c.reason}
                for c in self.constraints
            ],
            "frozen": dict(self.frozen),
            "loss": dict(self.loss),
            "optimizer": dict(self.optimizer),
            "training": dict(self.training),
            "renamed": dict(self.renamed),
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """The JSON text that is written into files."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Signature:
        version = data.get("version")
        if version != VERSION:
            raise PullbackError(f"the signature has format version {version!r}; this release reads version {VERSION}")
        return cls(
            inputs=tuple(map(Entry.from_dict, data["inputs"])),
            outputs=tuple(map(Entry.from_dict, data["outputs"])),
            activations=tuple(map(Entry.from_dict, data.get("activations", ()))),
            dims=data.get("dims", {}),
            constraints=tuple(
                Constraint(_dim(c["left"]), c["relation"], _dim(c["right"]), c.get("reason", ""))
                for c in data.get("constraints", ())
            ),
            **{k: data.get(k, {}) for k in ("frozen", "loss", "optimizer", "training", "renamed")},
            kind=data.get("kind", "graph"),
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Signature:
        """The signature that `to_json` wrote; `PullbackError` where the text is none."""
        try:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise PullbackError("not a signature: the JSON text holds no object")
            return cls.from_dict(data)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise PullbackError(f"not a signature: {error}") from error


def _text(d: Dim) -> int | str:
    return d if isinstance(d, int) else show(d)


def _dim(d: int | str) -> Dim:
    return d if isinstance(d, int) else parse(d)


def _input_entry(graph: Graph, v: Value, slots: Mapping[str, str]) -> Entry:
    name, role = v.params["name"], v.params["role"]
    known = graph.roles.get(name)
    parameter = name if role == "parameter" else known.parameter if known else None
    return _entry(name, role, v, parameter=parameter, slot=slots.get(name))


def _output_entry(graph: Graph, name: str, v: Value, slots: Mapping[str, str], replaces: Mapping[str, str]) -> Entry:
    known = graph.roles.get(name)
    replaced = replaces.get(name)
    return _entry(
        name,
        known.role if known else "output",
        v,
        parameter=known.parameter if known else None,
        slot=slots.get(replaced) if replaced else None,
        replaces=replaced,
    )


def _activations(graph: Graph, tensors: Mapping[str, str] | None) -> list[Entry]:
    """The model's own tensors that the graph computes: no inputs, no constants."""
    present = {id(v) for v in graph.nodes}
    entries = []
    for name, v in graph.tensors.items():
        if id(v) not in present or v.primitive.name in ("input", "literal") or isinstance(v.type, TupleType):
            continue
        if tensors is None:
            entries.append(_entry(name, "activation", v))
        elif name in tensors:
            entries.append(_entry(name, "activation", v, tensor=tensors[name] if tensors[name] != name else None))
    return entries


def _dims(graph: Graph) -> dict[str, dict[str, Any] | None]:
    places: dict[str, dict[str, Any] | None] = {s.name: None for s in graph.symbols}
    for v in graph.inputs:
        if v.params["role"] == "frozen":
            continue
        for axis, d in enumerate(v.shape):
            if isinstance(d, sympy.Symbol) and places.get(d.name) is None:
                places[d.name] = {"input": v.params["name"], "axis": axis}
    return places


def _frozen(graph: Graph) -> dict[str, str]:
    reasons: dict[str, str] = dict(graph.info.get("frozen", {}))
    for v in graph.inputs:
        if v.params["role"] == "frozen":
            reasons.setdefault(v.params["name"], "constant")
    return reasons
