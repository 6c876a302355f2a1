"""The faces of graphs and training steps that reach a backend: what `import pullback` gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol

from .algebra import calculus
from .algebra.collection import paused
from .algebra.graph import Graph, Value
from .algebra.passes import default as simplified
from .algebra.signature import Signature
from .algebra.training import step as steps
from .backends import onnx_export
from .backends.onnx_export import training_info
from .frontends import onnx_import

if TYPE_CHECKING:
    import onnx

__all__ = ["Model", "Step", "gradient", "hessian", "jacobian", "jvp", "load", "lower", "training_step"]

P = ParamSpec("P")
ModelLike = "Graph | str | os.PathLike[str] | onnx.ModelProto"


class Model(Graph):
    """A graph that can be written as ONNX."""

    @classmethod
    def of(cls, graph: Graph) -> Model:
        """The same graph with this face."""
        return graph if isinstance(graph, Model) else cls(**{f.name: getattr(graph, f.name) for f in fields(graph)})

    @cached_property
    def signature(self) -> Signature:
        """Inputs, outputs and their roles; the same JSON stands in a file that is written."""
        return Signature.of(self)

    def _ready(self, profile: str) -> Graph:
        """What is written: the graph simplified. The native profile does so itself, after it has recognised operators."""
        return self if profile == "native" else simplified(self)

    @paused()
    def to_onnx(self, *, profile: str = "explicit", target: str = "onnxruntime", embed: str | None = None,
                opset: int | None = None) -> onnx.ModelProto:  # fmt: skip
        """The graph as an ONNX model.

        `profile` is `explicit` (plain numerical ops only) or `native` (raised to what runtimes have kernels for); `target` one of
        `onnxruntime onnx-mlir torch-mlir iree`; `embed` says which values the file holds: `all`, `frozen` or `none`.
        """
        return onnx_export.to_onnx(self._ready(profile), profile=profile, target=target, embed=embed, opset=opset)

    @paused()
    def save(self, path: str | os.PathLike[str], *, profile: str = "explicit", target: str = "onnxruntime",
             embed: str | None = None, opset: int | None = None) -> Path:  # fmt: skip
        """Write the graph as ONNX; values that the file does not hold go beside it, into a `.safetensors` of the same name."""
        onnx_export.save(self._ready(profile), path, profile=profile, target=target, embed=embed, opset=opset)
        return Path(path)


@dataclass(frozen=True, eq=False)
class Step:
    """A training step: the whole, its parts, and what is trained.

    `gradients` (loss and gradients) and `apply` (the update alone) are the halves between which an all-reduce or an accumulation fits;
    `evaluation` is loss and outputs in inference mode. Each is a `Model`.
    """

    parts: steps.TrainingStep

    @cached_property
    def graph(self) -> Model:
        """The whole step."""
        return Model.of(self.parts.graph)

    @cached_property
    def gradients(self) -> Model:
        """Loss and gradients only."""
        return Model.of(self.parts.gradients)

    @cached_property
    def apply(self) -> Model:
        """The update only: gradients, parameters and slots in, new parameters and slots out."""
        return Model.of(self.parts.apply)

    @cached_property
    def evaluation(self) -> Model:
        """Loss and outputs in inference mode."""
        return Model.of(self.parts.evaluation)

    @cached_property
    def weight(self) -> Model | None:
        """What the loss divides a sum over samples by (`loss_weight`), where that depends on the batch: by it parts of a batch make the whole."""
        return None if self.parts.weight is None else Model.of(self.parts.weight)

    @property
    def signature(self) -> Signature:
        """Inputs, outputs and their roles."""
        return self.parts.signature

    @property
    def selection(self) -> Any:
        """What is trained, and why the rest is not."""
        return self.parts.selection

    def nodes(self) -> Iterator[Value]:
        """Every node in topological order; each has `phase`, `origin`, `primitive`, `type` and `inputs`."""
        return iter(self.graph.nodes)

    def to_onnx(self, **options: Any) -> onnx.ModelProto:
        """The whole step as an ONNX model; options as `Model.to_onnx`."""
        return self.graph.to_onnx(**options)

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the whole step; options as `Model.save`."""
        return self.graph.save(path, **options)

    def save_standard_form(self, path: str | os.PathLike[str], *, profile: str = "explicit", target: str = "onnxruntime",
                           embed: str | None = None, opset: int | None = None) -> Path:  # fmt: skip
        """Write the inference graph with ONNX's own `TrainingInfoProto`, every value embedded; it is for tools that read that, none of the targets."""
        return training_info.save_standard_form(
            self.parts.graph, self.parts.evaluation, Path(path), profile=profile, opset=opset
        )


@paused()
def load(model: str | os.PathLike[str] | onnx.ModelProto | bytes, *, dims: Mapping[str, int] | None = None,
         **options: Any) -> Model:  # fmt: skip
    """Read an ONNX model into a graph. `dims` gives symbolic dims a size. `Refusal` names everything that stands in the way."""
    return Model.of(onnx_import.load(model, dims=dims, **options))


def _graph(model: Any) -> Graph:
    return model if isinstance(model, Graph) else load(model)


def lower(model: Any) -> Model:
    """The forward graph in explicit primitives, simplified."""
    return Model.of(simplified(_graph(model)))


class _MakesStep(Protocol[P]):
    def __call__(self, model: Any, *args: P.args, **options: P.kwargs) -> Step: ...


def _step_of(build: Callable[Concatenate[Graph, P], steps.TrainingStep]) -> _MakesStep[P]:
    """`build` for any model, with a `Step` as its result; its options and docstring are what `help` and editors show."""

    @paused()
    def training_step(model: Any, *args: P.args, **options: P.kwargs) -> Step:
        return Step(build(_graph(model), *args, **options))

    shown = signature(build)
    _, *options = shown.parameters.values()
    model = Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, annotation=Any)
    vars(training_step)["__signature__"] = shown.replace(parameters=[model, *options], return_annotation=Step)
    training_step.__qualname__, training_step.__doc__ = build.__qualname__, build.__doc__
    return training_step


training_step = _step_of(steps.training_step)


@paused()
def gradient(model: Any, of: Sequence[str] | None = None, wrt: Sequence[str] | None = None) -> Model:
    """The gradient graph: inputs plus `seed_{output}` (a scalar output needs none), outputs plus `grad_{name}`."""
    return Model.of(calculus.gradient(_graph(model), of=of, wrt=wrt))


def jvp(model: Any, of: Sequence[str] | None = None, wrt: Sequence[str] | None = None) -> Model:
    """The JVP graph: inputs plus `tangent_{name}`, outputs plus `tangent_{output}`."""
    return Model.of(calculus.jvp(_graph(model), of=of, wrt=wrt))


def jacobian(model: Any, of: Sequence[str] | None = None, wrt: Sequence[str] | None = None) -> Model:
    """The Jacobian graph of outputs with respect to tensors."""
    return Model.of(calculus.jacobian(_graph(model), of=of, wrt=wrt))


@paused()
def hessian(model: Any, of: Sequence[str] | None = None, wrt: Sequence[str] | None = None) -> Model:
    """The Hessian graph of a scalar output with respect to tensors."""
    return Model.of(calculus.hessian(_graph(model), of=of, wrt=wrt))
