"""Training on stock onnxruntime.

Weights, slots, the step counter and state live in two sets of buffers that onnxruntime reads and writes in place: a step reads one and writes
the other, and nothing passes through Python but the batch and the loss.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NotImplementedByRuntime

from ..algebra.errors import PullbackError, PullbackWarning, Refusal
from ..algebra.graph import Constant, Graph
from ..algebra.passes import default as simplified
from ..algebra.signature import Entry, Signature
from .data import Arrays, Axes, Batch, Data, open_data, samples_of
from .entering import Entrance, converted, numpy_dtype
from .labels import check_labels, labels_of
from .metrics import Metric, measures
from .onnx_export import to_onnx
from .progress import Progress, progress_for
from .restore import (
    EVALUATION,
    LARGEST,
    OTHERWISE,
    WEIGHT,
    array_of,
    larger,
    opened,
    original_of,
    restored,
    splits_of,
    unpacked,
    written,
)
from .tensorfile import load_tensors, save_tensors
from .trim import trimmed

__all__ = ["EarlyStopping", "History", "Trainer"]

Arrangement = dict[str, np.ndarray]
FED = ("input", "target")
GOLDEN = 0x9E3779B97F4A7C15  # 2 ** 64 over the golden ratio: its multiples are far apart


class Parts(Protocol):
    """What a trainer needs of a training step: its graphs."""

    @property
    def graph(self) -> Graph: ...
    @property
    def gradients(self) -> Graph: ...
    @property
    def apply(self) -> Graph: ...
    @property
    def evaluation(self) -> Graph: ...
    @property
    def weight(self) -> Graph | None: ...


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """Stop when `monitor` (lower is better; `-name` where higher is) has not improved by `min_delta` for `patience` epochs."""

    patience: int = 5
    monitor: str = "val_loss"
    min_delta: float = 0.0
    restore_best: bool = True


@dataclass(slots=True)
class History:
    """The loss of every update, and one row for each epoch."""

    losses: list[float] = field(default_factory=list)
    epochs: list[dict[str, float]] = field(default_factory=list)
    stopped: str | None = None


# ---- where the parts come from ---------------------------------------------------------------------------------------------------------


class _Models:
    """The ONNX models of a step's parts, made or read when first needed, and first values."""

    def __init__(self, signature: Signature, initial: Callable[[str], np.ndarray | None], make: Callable[[str], ModelProto | None],
                 original: Callable[[Collection[str]], tuple[ModelProto, Path | None] | None]) -> None:  # fmt: skip
        self.signature, self.initial, self.original, self._make = signature, initial, original, make
        self.split: Sequence[Any] = ()  # tensors that the reader took apart
        self.constants: tuple[str, ...] = ()  # frozen values that enter as inputs, where a file does not hold them
        self.fresh = False  # whether `original` makes a new model each time
        self._made: dict[str, ModelProto | None] = {}

    def get(self, kind: str) -> ModelProto | None:
        if kind not in self._made:
            self._made[kind] = self._make(kind)
        return self._made[kind]


def _from_parts(parts: Parts, profile: str) -> _Models:
    lacking = [name for name in ("graph", "gradients", "apply", "evaluation") if not hasattr(parts, name)]
    if lacking:
        raise PullbackError(
            f"a training step (`pullback.training_step` makes one) or the path of a written one is required, found {type(parts).__name__}"
        )
    data: Mapping[str, Constant] = {**parts.evaluation.data, **parts.graph.data}

    def make(kind: str) -> ModelProto | None:
        graph: Graph | None = getattr(parts, "graph" if kind == "step" else kind)
        return (
            None
            if graph is None
            else to_onnx(
                graph if profile == "native" else simplified(graph),
                profile=profile,
                target="onnxruntime",
                embed="frozen",
            )
        )

    def original(but: Collection[str]) -> tuple[ModelProto, Path | None] | None:
        info = parts.graph.info
        return (info["model"], info.get("base")) if "model" in info else None

    models = _Models(Signature.of(parts.graph), lambda name: data[name].array if name in data else None, make, original)
    models.split = parts.graph.info.get("split", ())
    return models


def _from_files(path: str | Path, others: Mapping[str, str | Path]) -> _Models:
    source = Path(path)
    model = opened(source)
    signature = signature_of(model, str(path))
    beside = source.with_suffix(".safetensors")
    tensors = load_tensors(beside)[0] if beside.exists() else {}
    stored = {t.name: t for t in model.graph.initializer}

    def initial(name: str) -> np.ndarray | None:
        if name in stored:
            return array_of(stored[name], source.parent)
        return tensors.get(name)

    def make(kind: str) -> ModelProto | None:
        if kind == "step":
            return model
        if kind in others:
            return opened(others[kind])
        if kind == "weight":
            return unpacked(model, WEIGHT)
        if kind == "evaluation" and any(signature.training.get(k) for k in OTHERWISE):
            return _filled(unpacked(model, EVALUATION), signature, initial)
        return None if kind == "apply" else model

    models = _Models(signature, initial, make, lambda but: original_of(model, initial, but))
    known = {e.name for e in signature.inputs}
    models.constants = tuple(i.name for i in model.graph.input if i.name not in known)
    models.split, models.fresh = splits_of(model), True
    return models


def signature_of(model: ModelProto, name: str) -> Signature:
    """The signature that a written model carries."""
    for prop in model.metadata_props:
        if prop.key == "pullback.signature":
            return Signature.from_json(prop.value)
    raise PullbackError(
        f"{name!r} has no signature: it was not written by pullback (`pullback train-step` makes a step of an inference model)"
    )


def _filled(
    model: ModelProto | None, signature: Signature, initial: Callable[[str], np.ndarray | None]
) -> ModelProto | None:
    """A part that a file carries without weights, its frozen values put in."""
    if model is None:
        return None
    known = {e.name for e in signature.inputs}
    for info in [i for i in model.graph.input if i.name not in known]:
        value = initial(info.name)
        if value is not None:
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), info.name))
            model.graph.input.remove(info)
    return model


# ---- sessions --------------------------------------------------------------------------------------------------------------------------


class _Session:
    """One part on onnxruntime, with bindings to buffers."""

    def __init__(
        self, model: ModelProto, outputs: Sequence[str], options: ort.SessionOptions, providers: Sequence[str]
    ) -> None:
        part = trimmed(model, outputs)
        held = {i.name for i in part.graph.input}
        initializers = [t for t in part.graph.initializer if t.name not in held]
        del part.graph.initializer[:]
        part.graph.initializer.extend(initializers)
        self.inputs = [i.name for i in part.graph.input]
        self.outputs = [o.name for o in part.graph.output]
        self.session = _opened(part, options, providers)
        self._bindings: dict[int, ort.IOBinding] = {}

    def run(
        self,
        key: int,
        stored: Mapping[str, ort.OrtValue],
        into: Mapping[str, ort.OrtValue],
        fed: Mapping[str, ort.OrtValue],
    ) -> list[Any]:
        """Run with stored inputs and outputs bound (once for each key) and the batch fed; what is not bound comes back as arrays."""
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = self.session.io_binding()
            for name in self.inputs:
                if name in stored:
                    binding.bind_ortvalue_input(name, stored[name])
            for name in self.outputs:
                if name in into:
                    binding.bind_ortvalue_output(name, into[name])
        for name in self.inputs:
            if name in fed:
                binding.bind_ortvalue_input(name, fed[name])
        free = [name for name in self.outputs if name not in into]
        for name in free:
            binding.bind_output(name)
        try:
            self.session.run_with_iobinding(binding)
        except RuntimeError as error:
            raise PullbackError(f"onnxruntime {ort.__version__} could not run this batch: {error}") from error
        if not free:
            return []
        produced = dict(zip(self.outputs, binding.get_outputs(), strict=True))
        return [produced[name] for name in free]


def _opened(model: ModelProto, options: ort.SessionOptions, providers: Sequence[str]) -> ort.InferenceSession:
    try:
        if not larger(model, LARGEST):
            return ort.InferenceSession(model.SerializeToString(), options, providers=list(providers))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "part.onnx"
            onnx.save_model(model, path, save_as_external_data=True, all_tensors_to_one_file=True, location="part.data")
            return ort.InferenceSession(str(path), options, providers=list(providers))
    except NotImplementedByRuntime as error:
        raise PullbackError(f"onnxruntime {ort.__version__} has no kernel for a part of this step: {error}") from error


_SPECIAL = {"bfloat16": onnx.TensorProto.BFLOAT16}


def _wrapped(array: np.ndarray) -> ort.OrtValue:
    """An OrtValue upon the array's own memory."""
    if array.dtype.name in _SPECIAL:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _SPECIAL[array.dtype.name])
    return ort.OrtValue.ortvalue_from_numpy(array)


def _unwrapped(value: ort.OrtValue) -> np.ndarray:
    array: np.ndarray = value.numpy()
    return array


# ---- the trainer -----------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Place:
    """Where a run stands: the epoch, the batches of it that are done, and the sums of their losses and weights."""

    epoch: int = 0
    batch: int = 0
    total: float = 0.0
    count: float = 0.0
    best: float | None = None
    waited: int = 0


class Trainer:
    """Trains a step on stock onnxruntime.

    `step` is a training step or the path of a written one. A step is emitted for onnxruntime in the `native` profile, which its kernels are fast
    for; `threads` is the number that one operator may use, `providers` are onnxruntime's. What is wrong with a step, data or options is a `PullbackError`.

    >>> import onnx, pullback
    >>> line = onnx.parser.parse_model('''
    ... <ir_version: 8, opset_import: ["" : 17]> line (float[N, 1] x) => (float[N, 1] y) <float[1, 1] w = {0}> { y = MatMul (x, w) }''')
    >>> trainer = pullback.Trainer(pullback.training_step(line, loss="mse", lr=0.1), threads=1)
    >>> x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(-1, 1)
    >>> history = trainer.fit({"x": x, "target": 3 * x}, epochs=50, batch_size=16, progress=False)
    >>> trainer.parameters()["w"].round(2).item()
    3.0
    >>> trainer.steps, round(trainer.evaluate({"x": x, "target": 3 * x})["loss"], 3)
    (200, 0.0)
    >>> trainer.predict({"x": x[-1:]})["y"].round(2).item()
    3.0
    """

    def __init__(self, step: Parts | str | Path, *, profile: str = "native", threads: int | None = None,
                 providers: Sequence[str] = ("CPUExecutionProvider",)) -> None:  # fmt: skip
        self._setup(
            _from_files(step, {}) if isinstance(step, str | Path) else _from_parts(step, profile), threads, providers
        )

    @classmethod
    def from_file(cls, path: str | Path, *, gradients: str | Path | None = None, apply: str | Path | None = None,
                  evaluation: str | Path | None = None, threads: int | None = None,
                  providers: Sequence[str] = ("CPUExecutionProvider",)) -> Trainer:  # fmt: skip
        """A trainer of a written step. Accumulation needs the `apply` file; validation of a step with batch statistics or dropout the `evaluation` one."""
        others = {
            k: v for k, v in (("gradients", gradients), ("apply", apply), ("evaluation", evaluation)) if v is not None
        }
        trainer = cls.__new__(cls)
        trainer._setup(_from_files(path, others), threads, providers)
        return trainer

    def _setup(self, models: _Models, threads: int | None, providers: Sequence[str]) -> None:
        self._models = models
        self.signature = models.signature
        if self.signature.kind != "step":
            raise PullbackError(f"a training step is required, found a graph of kind {self.signature.kind!r}")
        self._options = ort.SessionOptions()
        self._options.log_severity_level = 4  # what goes wrong is raised
        if threads is not None:
            self._options.intra_op_num_threads = threads
        known = ort.get_available_providers()
        if wrong := [name for q in providers if (name := q if isinstance(q, str) else q[0]) not in known]:
            raise Refusal(
                f"onnxruntime {ort.__version__} lacks providers",
                [f"no {n!r}; there are {', '.join(known)}" for n in wrong],
            )
        self._providers = tuple(providers)
        self._sessions: dict[str, _Session] = {}
        self._stored = [e for e in self.signature.inputs if e.role not in FED]
        self.entries = tuple(e for e in self.signature.inputs if e.role in FED)
        self._labels = labels_of(self.signature)
        self._enter = Entrance(self.entries, self.signature.constraints)
        self._arrays: tuple[Arrangement, Arrangement] = ({}, {})
        self._values: tuple[dict[str, ort.OrtValue], dict[str, ort.OrtValue]] = ({}, {})
        self._constants: Arrangement = {}
        self._current = 0
        carried = set(self.signature.carried.values())
        missing = []
        for e in self._stored:
            value = models.initial(e.name)
            if value is None:
                missing.append(f"{e.role} {e.name!r} ({e.dtype} {list(e.shape)})")
                continue
            first = np.array(value, numpy_dtype(e.dtype), order="C", copy=True)
            second = np.empty_like(first) if e.name in carried else first
            for i, array in enumerate((first, second)):
                self._arrays[i][e.name] = array
            wrapped = _wrapped(first)
            self._values[0][e.name] = wrapped
            self._values[1][e.name] = wrapped if second is first else _wrapped(second)
        for name in models.constants:
            value = models.initial(name)
            if value is None:
                missing.append(f"constant {name!r}")
                continue
            self._constants[name] = np.array(value, order="C")
            self._values[0][name] = self._values[1][name] = _wrapped(self._constants[name])
        if missing:
            raise Refusal("the training step lacks first values", [f"none for {m}" for m in missing])
        self._loss_name = self.signature.outputs_of("loss")[0].name
        loss = self.signature.outputs_of("loss")[0]
        self._loss = np.zeros((), numpy_dtype(loss.dtype))
        self._loss_value = _wrapped(self._loss)
        self._gradients: Arrangement = {}
        self._gradient_values: dict[str, ort.OrtValue] = {}
        self._place = _Place()
        self._said: set[str] = set()
        self.history = History()

    # ---- values ----

    def values(self, *roles: str) -> dict[str, np.ndarray]:
        """Copies of the stored inputs of these roles (all of them without any), as they now are."""
        return {name: array.copy() for name, array in self._now(*roles).items()}

    def _now(self, *roles: str) -> dict[str, np.ndarray]:
        return {e.name: self._arrays[self._current][e.name] for e in self._stored if not roles or e.role in roles}

    def parameters(self) -> dict[str, np.ndarray]:
        """Copies of the trained parameters."""
        return self.values("parameter")

    def state(self) -> dict[str, np.ndarray]:
        """Copies of the running statistics."""
        return self.values("state")

    def assign(self, values: Mapping[str, Any]) -> None:
        """Give stored inputs new values by name: weights, slots, `lr`, `seed`, ...; of the input's shape, and refused where its dtype cannot hold them."""
        known = {e.name: e for e in self._stored}
        unknown = [n for n in values if n not in known]
        if unknown:
            raise Refusal("values for inputs that the step does not store", [f"no stored input {n!r}" for n in unknown])
        for name, value in values.items():
            target = self._arrays[self._current][name]
            given = converted(value, known[name])
            if given.shape != target.shape:
                raise PullbackError(f"{name!r} has shape {list(target.shape)}, found {list(given.shape)}")
            target[...] = given

    @property
    def steps(self) -> int:
        """The number of updates so far."""
        (entry,) = self.signature.inputs_of("step")
        return int(self._arrays[self._current][entry.name])

    # ---- one step ----

    def _session(self, kind: str, outputs: Sequence[str], key: str) -> _Session:
        if key not in self._sessions:
            model = self._models.get(kind)
            if model is None:
                raise PullbackError(self._lacking(kind))
            self._sessions[key] = _Session(model, outputs, self._options, self._providers)
        return self._sessions[key]

    def _lacking(self, kind: str) -> str:
        why = "batch statistics or dropout" if kind == "evaluation" else "the update apart from the gradients"
        return (
            f"this needs the step's {kind} graph ({why}), which the one file does not hold: give {kind}= to from_file "
            f"(--{'eval' if kind == 'evaluation' else kind} to fit)"
        )

    def step(self, batch: Mapping[str, Any]) -> float:
        """One update by a batch (arrays by the names of the inputs and targets); the loss before it.

        Sizes that the model calls by one name must be equal in all arrays, and a batch must hold samples; else `Refusal`.
        """
        outputs = [self._loss_name, *self.signature.carried]
        session = self._session("step", outputs, "step")
        here, there = self._values[self._current], self._values[1 - self._current]
        into = {self._loss_name: self._loss_value, **{o: there[i] for o, i in self.signature.carried.items()}}
        session.run(self._current, here, into, self._fed(batch))
        self._current = 1 - self._current
        return float(self._loss)

    def accumulated(self, batches: Sequence[Mapping[str, Any]], *, axes: Axes | None = None) -> float:
        """One update by the gradients of several batches, which are those of all of them in one; the loss likewise.

        Each batch counts by its `weight`. Where a loss has none, batches count by their numbers of samples (along `axes`, the first by default), and a
        warning says that this is not the gradient of one batch. Statistics of batch normalisations are each batch's own.
        """
        if not batches:
            raise PullbackError("there is no batch to make an update of")
        if len(batches) > 1 and self._parts is None:
            self._warn(
                f"the loss {self.signature.loss.get('name')!r} is neither a mean nor a sum over samples: the gradients of {len(batches)} batches are "
                "averaged by their numbers of samples, which is not the gradient of all in one batch"
            )
        shares = self._shares([self._share(b, axes or {}) for b in batches])
        sums: dict[str, np.ndarray] = {}
        loss = 0.0
        with self._seeds() as reseed:
            for i, (batch, share) in enumerate(zip(batches, shares, strict=True)):
                if share == 0:
                    continue
                reseed(i)
                part, gradients = self.gradients(batch)
                loss += part * share
                for name, gradient in gradients.items():
                    term = gradient * gradient.dtype.type(share)
                    sums[name] = sums[name] + term if name in sums else term
        self.apply(sums)
        return loss

    def _warn(self, text: str) -> None:
        """Say something once."""
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, PullbackWarning, stacklevel=4)

    def weight(self, batch: Mapping[str, Any]) -> float:
        """What the loss of this batch divides a sum over its samples by: elements, rows that are not ignored, the sum of class weights; 1 of a sum.

        Losses and gradients of parts `i` of a batch make those of the whole: `sum_i weight_i x_i / sum_i weight_i`, or `sum_i x_i` where
        `signature.loss["parts"]` is `"sum"`. Refused where a loss is neither, as the root of a mean is.
        """
        if self._parts is None:
            raise PullbackError(
                f"the loss {self.signature.loss.get('name')!r} is neither a mean nor a sum over samples"
            )
        return self._share(batch, {})

    @property
    def _parts(self) -> str | None:
        """How parts of a batch make the whole: by a `mean`, a `sum`, or not at all."""
        parts: str | None = self.signature.loss.get("parts")
        return parts

    def _share(self, batch: Mapping[str, Any], axes: Axes) -> float:
        """How much a batch counts among others."""
        if self._parts == "sum":
            return 1.0
        if self._parts is None or self._models.get("weight") is None:
            return float(samples_of(batch, axes))
        session = self._session("weight", [], "weight")
        (found,) = session.run(self._current, self._values[self._current], {}, self._fed(batch))
        return float(_unwrapped(found))

    def _shares(self, weights: Sequence[float]) -> list[float]:
        """What losses and gradients are multiplied by before they are added up; where nothing counts, they are averaged."""
        total = sum(weights)
        if self._parts == "sum":
            return list(weights)
        return [w / total for w in weights] if total else [1 / len(weights)] * len(weights)

    @contextmanager
    def _seeds(self) -> Iterator[Callable[[int], None]]:
        """Another seed for each part of an update, so that no two see the same dropout mask; the seed itself afterwards."""
        arrays = [self._arrays[self._current][e.name] for e in self.signature.inputs_of("seed")]
        before = [int(a) for a in arrays]

        def reseed(part: int) -> None:
            for array, seed in zip(arrays, before, strict=True):
                array[...] = (seed + part * GOLDEN) % (1 << 63) if part else seed

        try:
            yield reseed
        finally:
            reseed(0)

    def gradients(self, batch: Mapping[str, Any]) -> tuple[float, dict[str, np.ndarray]]:
        """The loss and the gradients by parameter, without an update; running statistics move on.

        The arrays are the trainer's own: the next call overwrites them. What is done to them (an all-reduce, a sum) goes to `apply`.
        """
        names = self.signature.gradients
        if not self._gradients:
            entries = {e.name: e for e in self.signature.outputs_of("gradient")}
            self._gradients = {
                p: np.empty(_static(entries[n]), numpy_dtype(entries[n].dtype)) for p, n in names.items()
            }
            self._gradient_values = {names[p]: _wrapped(array) for p, array in self._gradients.items()}
        states = self._updated_states()
        forward = self._session("gradients", [self._loss_name, *names.values(), *states], "gradients")
        here, there = self._values[self._current], self._values[1 - self._current]
        moved = {o: there[i] for o, i in states.items()}
        forward.run(
            self._current, here, {self._loss_name: self._loss_value, **self._gradient_values, **moved}, self._fed(batch)
        )
        for i in states.values():
            self._arrays[self._current][i][...] = self._arrays[1 - self._current][i]
        return float(self._loss), dict(self._gradients)

    def apply(self, gradients: Mapping[str, np.ndarray]) -> None:
        """One update by these gradients, by parameter: as `gradients` gives them, of the parameters' shapes."""
        names = self.signature.gradients
        reasons = [f"none for {p!r}" for p in names if p not in gradients]
        reasons += [f"{p!r} is no parameter that is trained" for p in gradients if p not in names]
        entries = {e.parameter: e for e in self.signature.outputs_of("gradient")}
        given = {p: np.asarray(converted(g, entries[p]), order="C") for p, g in gradients.items() if p in names}
        reasons += [
            f"that of {p!r} has shape {list(_static(entries[p]))}, found {list(g.shape)}"
            for p, g in given.items()
            if g.shape != _static(entries[p])
        ]
        if reasons:
            raise Refusal("these gradients make no update", reasons)
        states = self._updated_states()
        carried = {o: i for o, i in self.signature.carried.items() if o not in states}
        update = self._session("apply", list(carried), "apply")
        here, there = self._values[self._current], self._values[1 - self._current]
        fed = {n: _wrapped(given[p]) for p, n in names.items()}
        update.run(self._current, here, {o: there[i] for o, i in carried.items()}, fed)
        for i in states.values():
            self._arrays[1 - self._current][i][...] = self._arrays[self._current][i]
        self._current = 1 - self._current

    def _updated_states(self) -> dict[str, str]:
        """The model's own state (running statistics): output -> input. The scale of the loss is state too, but of the update."""
        return {
            e.name: e.replaces for e in self.signature.outputs_of("state") if e.replaces and e.parameter == e.replaces
        }

    def _fed(self, batch: Mapping[str, Any]) -> dict[str, ort.OrtValue]:
        arrays = self._enter(batch)
        check_labels(arrays, self._labels)
        return {name: _wrapped(array) for name, array in arrays.items()}

    # ---- evaluation ----

    def evaluate(self, data: Any, *, batch_size: int = 256, metrics: Sequence[str | Metric] = (),
                 axes: Axes | None = None) -> dict[str, float]:  # fmt: skip
        """The loss and metrics of data in inference mode, as if all of it were one batch (where the loss is a mean or a sum over samples; otherwise
        the mean of the batches' losses, weighted by samples).

        `metrics` are `accuracy` (rows of the ignored index do not count), `mae`, `mse` and `rmse`, or functions `f(outputs, batch)` whose values are
        averaged by samples.
        """
        axes = axes or {}
        source = open_data(data, self.entries, axes=axes)
        named = measures(metrics, self.signature)
        outputs = [e.name for e in self.signature.outputs_of("output")] if named else []
        session = self._session("evaluation", [self._loss_name, *outputs], f"evaluation {bool(named)}")
        size = _batch_size(source, batch_size)
        drop = self._leaves_out(source, "held-out")
        losses, shares = [], []
        sums = dict.fromkeys(named, (0.0, 0.0))
        for batch in source.batches(size, shuffle=False, seed=0, epoch=0, drop_last=drop):
            found = session.run(
                self._current, self._values[self._current], {self._loss_name: self._loss_value}, self._fed(batch)
            )
            results = dict(
                zip([o for o in session.outputs if o != self._loss_name], map(_unwrapped, found), strict=True)
            )
            losses.append(float(self._loss))
            shares.append(self._share(batch, axes))
            for name, measure in named.items():
                value, count = measure.of(results, batch, samples_of(batch, axes))
                sums[name] = (sums[name][0] + value, sums[name][1] + count)
        if not losses:
            raise PullbackError(_too_little(source, "evaluate"))
        loss = sum(x * share for x, share in zip(losses, self._shares(shares), strict=True) if share)
        return {"loss": loss, **{name: measure.whole(*sums[name]) for name, measure in named.items()}}

    def predict(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The model's outputs by name, in inference mode, with the weights as they now are; targets are not needed."""
        outputs = [e.name for e in self.signature.outputs_of("output")]
        session = self._session("evaluation", outputs, "predict")
        known = {e.name: e for e in self.entries}
        missing = [n for n in session.inputs if n in known and n not in inputs]
        if missing:
            raise Refusal("inputs are missing", [f"no {n!r}" for n in missing])
        arrays = self._enter(inputs, [n for n in session.inputs if n in known])
        fed = {name: _wrapped(array) for name, array in arrays.items()}
        found = session.run(self._current, self._values[self._current], {}, fed)
        return dict(zip(session.outputs, map(_unwrapped, found), strict=True))

    # ---- many steps ----

    def fit(
        self,
        data: Any,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int = 0,
        accumulate: int = 1,
        validation: Any = None,
        metrics: Sequence[str | Metric] = (),
        callbacks: Iterable[Callback] = (),
        early_stopping: EarlyStopping | int | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_every: int | None = None,
        resume: bool = False,
        progress: bool | Progress = True,
        axes: Axes | None = None,
    ) -> History:
        """Train until `epochs` epochs are done; the losses of all updates, and a row for each epoch.

        - `data` and `validation`: arrays by name, the path of a `.npz`, `.csv`, `.parquet` or a folder of `.npy`; or an iterable of batches, or a function
          that gives one for each epoch. `axes` names the axis of samples of an input where that is not the first, or None where all samples share it.
        - `shuffle`, `seed`: the order of an epoch depends on the seed and the epoch's number alone.
        - `accumulate`: so many batches make one update (see `accumulated`).
        - `metrics`: of the validation data (see `evaluate`), in the rows as `val_{name}`.
        - `early_stopping`: a number of epochs in which the held-out loss may fail to fall, or `EarlyStopping`.
        - `callbacks`: `f(trainer, row)` after each epoch; one stops the run by returning True.
        - `checkpoint` is written after each epoch, and every `checkpoint_every` updates. With `resume` a run that was cut short goes on from it, to the same
          bits that it would have reached undisturbed; where there is no such file yet, it begins.

        A weight that becomes NaN or infinite stops the run with an error, before it is written anywhere.
        """
        stopping = EarlyStopping(early_stopping) if isinstance(early_stopping, int) else early_stopping
        patience = None if stopping is None else getattr(stopping, "patience", stopping)
        _check_run(
            {"epochs": (epochs, 0), "batch_size": (batch_size, 1), "accumulate": (accumulate, 1), "seed": (seed, 0),
             "checkpoint_every": (checkpoint_every, 1), "the patience of early_stopping": (patience, 1)},
            checkpoint, {"resume": resume, "checkpoint_every": checkpoint_every}, metrics, validation,
        )  # fmt: skip
        source = open_data(data, self.entries, axes=axes)
        size = _batch_size(source, batch_size)
        held_out = None if validation is None else open_data(validation, self.entries, axes=axes)
        if stopping is not None and stopping.monitor.lstrip("-").startswith("val_") and held_out is None:
            raise PullbackError(f"early stopping watches {stopping.monitor!r}, but there is no validation data")
        held = source.size if isinstance(source, Arrays) else None
        drawn = {"batch_size": size, "shuffle": shuffle, "seed": seed, "accumulate": accumulate, "samples": held}
        self._place, self.history = _Place(), History()
        best: Arrangement = {}
        if resume and checkpoint is not None and Path(checkpoint).exists():
            best = self.load(checkpoint, drawn)
        drop = self._leaves_out(source, "training")
        shown = progress_for(progress)
        with shown.run(epochs, source.count(size, drop)):
            while self._place.epoch < epochs and self.history.stopped is None:
                started = time.perf_counter()
                self._epoch(source, drawn, drop, shown, checkpoint, checkpoint_every, best)
                self._sound()
                row = self._row(held_out, metrics, size, time.perf_counter() - started)
                shown.epoch(row)
                self.history.epochs.append(row)
                self._place = _Place(self._place.epoch + 1, best=self._place.best, waited=self._place.waited)
                if stopping is not None:
                    self._watch(stopping, row, best)
                answers = [callback(self, row) for callback in callbacks]
                if any(answers):
                    self.history.stopped = "a callback asked for it"
                if checkpoint is not None:
                    self.save(checkpoint, drawn, best)
        if best and stopping is not None and stopping.restore_best:
            self.assign(best)
        return self.history

    def _leaves_out(self, source: Data, which: str) -> bool:
        """Whether samples are left that make no batch, where the model fixes its size."""
        fixed = source.fixed_batch() if isinstance(source, Arrays) else None
        if fixed is None or not isinstance(source, Arrays) or not (left := source.size % fixed):
            return False
        others = ", others in each epoch that is shuffled" if which == "training" else ""
        self._warn(f"the model takes batches of {fixed}: {left} of {source.size} {which} samples are left out{others}")
        return True

    def _epoch(self, source: Data, drawn: Mapping[str, Any], drop: bool, shown: Progress, checkpoint: str | Path | None,
               every: int | None, best: Arrangement) -> None:  # fmt: skip
        place, waiting = self._place, []
        batches = source.batches(
            drawn["batch_size"],
            shuffle=drawn["shuffle"],
            seed=drawn["seed"],
            epoch=place.epoch,
            start=place.batch,
            drop_last=drop,
        )
        for batch in batches:
            waiting.append(batch)
            if len(waiting) == drawn["accumulate"]:
                self._one(waiting, source.axes, shown)
                waiting = []
                if every and checkpoint is not None and self.steps % every == 0:
                    self._sound()
                    self.save(checkpoint, drawn, best)
        if waiting:
            self._one(waiting, source.axes, shown)
        if not place.batch:
            raise PullbackError(_too_little(source, "train"))

    def _one(self, batches: Sequence[Batch], axes: Axes, shown: Progress) -> None:
        weight = sum(self._share(b, axes) for b in batches)
        loss = self.step(batches[0]) if len(batches) == 1 else self.accumulated(batches, axes=axes)
        if not np.isfinite(loss):
            self._sound(batches)
        place = self._place
        place.batch += len(batches)
        if weight:  # where nothing counts, the loss is NaN
            place.total += loss * weight
            place.count += weight
        self.history.losses.append(loss)
        shown.step(loss, len(batches))

    def _sound(self, batches: Sequence[Batch] = ()) -> None:
        """Raise where a weight or a statistic that was finite at first is so no longer; a loss alone that is not may come from a step that was skipped."""
        broken = [k for k, v in self._now("parameter", "state").items() if self._broke(k, v)]
        if not broken:
            return
        names = ", ".join(broken[:4]) + (f" and {len(broken) - 4} more" if len(broken) > 4 else "")
        held = [f"{k!r} holds {n} of them" for k, n in _not_finite(batches).items() if n]
        why = "; in the data of this step " + ", ".join(held) if held else ": lower the rate, or clip the gradients"
        raise PullbackError(f"after step {self.steps}, {names} hold NaN or infinite numbers{why}")

    def _broke(self, name: str, value: np.ndarray) -> bool:
        if np.isfinite(value).all():
            return False
        initial = self._models.initial(name)
        return initial is None or bool((np.isfinite(initial) & ~np.isfinite(value)).any())

    def _row(
        self, held_out: Data | None, metrics: Sequence[str | Metric], size: int, seconds: float
    ) -> dict[str, float]:
        place = self._place
        row: dict[str, float] = {
            "epoch": place.epoch + 1,
            "loss": place.total if self._parts == "sum" else place.total / (place.count or math.nan),
        }
        if held_out is not None:
            found = self.evaluate(held_out, batch_size=size, metrics=metrics, axes=held_out.axes)
            row.update({f"val_{k}": v for k, v in found.items()})
        row["seconds"] = seconds
        return row

    def _watch(self, stopping: EarlyStopping, row: Mapping[str, float], best: Arrangement) -> None:
        monitor, sign = stopping.monitor.removeprefix("-"), -1 if stopping.monitor.startswith("-") else 1
        if monitor not in row:
            raise PullbackError(f"early stopping watches {monitor!r}; there are {', '.join(row)}")
        value, place = sign * row[monitor], self._place
        if place.best is None or value < place.best - stopping.min_delta:
            place.best, place.waited = value, 0
            if stopping.restore_best:
                best.update(self.values("parameter", "state"))
            return
        place.waited += 1
        if place.waited >= stopping.patience:
            self.history.stopped = f"{monitor} has not improved for {stopping.patience} epochs"

    # ---- checkpoints ----

    def save(self, path: str | Path, drawn: Mapping[str, Any] | None = None, best: Arrangement | None = None) -> Path:
        """Write a checkpoint: weights, slots, step, state and numbers under their names, and where the run stands. The file is whole or the old one."""
        place = {
            "place": asdict(self._place),
            "drawn": dict(drawn or {}),
            "history": asdict(self.history),
            "step": self._made_of(),
        }
        tensors = {e.name: self._arrays[self._current][e.name] for e in self._stored}
        tensors |= {f"best/{k}": v for k, v in (best or {}).items()}
        return save_tensors(path, tensors, {"pullback.checkpoint": json.dumps(place), "format": "pt"})

    def _made_of(self) -> dict[str, Any]:
        """What a step descends by, as JSON holds it: two steps that differ there go on differently from the same values."""
        return {k: json.loads(json.dumps(getattr(self.signature, k))) for k in ("loss", "optimizer", "training")}

    def load(self, path: str | Path, drawn: Mapping[str, Any] | None = None) -> Arrangement:
        """Take up a checkpoint. A run that goes on (`drawn` given) must draw its data as the one before did."""
        tensors, metadata = load_tensors(path)
        try:
            place = json.loads(metadata["pullback.checkpoint"])
        except KeyError:
            raise PullbackError(f"{str(path)!r} is no checkpoint of a training run") from None
        names = {e.name for e in self._stored}
        reasons = [f"no value for {n!r}" for n in sorted(names - tensors.keys())]
        before = place["drawn"]
        if drawn is not None and before:
            now = {**drawn, **self._made_of()}
            before = {**before, **place.get("step", {})}
            reasons += [f"{k} was {before[k]!r}, now {v!r}" for k, v in now.items() if k in before and before[k] != v]
        if reasons:
            raise Refusal(f"cannot go on from {str(path)!r}", reasons)
        self.assign({n: tensors[n] for n in names})
        self._place, self.history = _Place(**place["place"]), History(**place["history"])
        return {k.removeprefix("best/"): np.array(v) for k, v in tensors.items() if k.startswith("best/")}

    # ---- the trained model ----

    def export(self, path: str | Path, *, model: ModelProto | str | Path | None = None, average: bool = False) -> Path:
        """Write the original inference model with the trained weights and statistics in place, node for node as it was.

        `model` is the original where the step does not carry it (a file carries one of up to 64 MB besides its weights); `average` writes the moving
        average of the weights (`ema`) instead. Low-rank adapters are merged into their matrices.
        """
        split, base, fresh = self._models.split, None, False
        trained = self._trained(average)
        for own, stored, *_ in split:  # what shares a tensor with a weight, but is not trained, stays as it was
            if stored in trained and own not in trained and (first := self._models.initial(stored)) is not None:
                trained[own] = first
        if model is None:
            found = self._models.original(trained)
            if found is None:
                raise PullbackError(
                    "the step does not carry the inference model, into which trained weights go back: give model= (--model to fit)"
                )
            model, base = found
            fresh = self._models.fresh
        elif not isinstance(model, ModelProto):
            model, base = opened(model), Path(model).parent
        return written(restored(model, trained, split=split, base=base, fresh=fresh), path)

    def _trained(self, average: bool) -> dict[str, np.ndarray]:
        updated = set(self._updated_states().values())
        values = {**self._now("parameter"), **{k: v for k, v in self._now("state").items() if k in updated}}
        if average:
            means = {e.parameter: e.name for e in self.signature.inputs_of("slot") if e.slot == "ema"}
            if not means:
                raise PullbackError("the step keeps no moving average of weights: make it with ema=0.999")
            values |= {str(p): self._arrays[self._current][name] for p, name in means.items()}
        return self._merged(values)

    def _merged(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Low-rank adapters added to their matrices."""
        lora: Mapping[str, Any] = self.signature.training.get("lora", {})
        for name, (a, b) in lora.get("pairs", {}).items():
            matrix = self._models.initial(name)
            if matrix is None:
                raise PullbackError(f"the training step lacks the matrix {name!r} that its adapters belong to")
            values[name] = np.asarray(matrix + lora["factor"] * (values.pop(a) @ values.pop(b)), matrix.dtype)
        return values


Callback = Callable[[Trainer, Mapping[str, float]], Any]


def _not_finite(batches: Sequence[Batch]) -> dict[str, int]:
    """How many numbers of each array are NaN or infinite."""
    arrays = [(k, np.asarray(v)) for batch in batches for k, v in batch.items()]
    floats = [(k, v) for k, v in arrays if v.dtype.kind in "fV"]
    return {k: sum(int((~np.isfinite(v)).sum()) for other, v in floats if other == k) for k, _ in floats}


def _static(entry: Entry) -> tuple[int, ...]:
    """The shape of a parameter or of its gradient."""
    return tuple(int(d) for d in entry.shape)


def _check_run(numbers: Mapping[str, tuple[Any, int]], checkpoint: str | Path | None, needing: Mapping[str, Any],
               metrics: Sequence[Any], validation: Any) -> None:  # fmt: skip
    """Raise one refusal for every option of a run that cannot be meant."""
    wrong = [
        f"{k} must be an integer of at least {least}, found {v!r}"
        for k, (v, least) in numbers.items()
        if v is not None and (isinstance(v, bool) or not isinstance(v, Integral) or int(v) < least)
    ]
    if checkpoint is None:
        wrong += [f"{k} needs checkpoint=" for k, given in needing.items() if given]
    elif not Path(checkpoint).parent.is_dir():
        wrong.append(f"cannot write {str(checkpoint)!r}: there is no directory {str(Path(checkpoint).parent)!r}")
    if metrics and validation is None:
        wrong.append("metrics are of validation data, and there is none")
    if wrong:
        raise Refusal("options of the run", wrong)


def _batch_size(source: Data, wanted: int) -> int:
    """The batch size: that of the model where it is fixed."""
    fixed = source.fixed_batch() if isinstance(source, Arrays) else None
    return wanted if fixed is None else fixed


def _too_little(source: Data, purpose: str) -> str:
    fixed = source.fixed_batch() if isinstance(source, Arrays) else None
    why = (
        ""
        if fixed is None or not isinstance(source, Arrays)
        else f": {source.size} samples do not fill a batch of {fixed}"
    )
    return f"there is no data to {purpose} on{why}"
