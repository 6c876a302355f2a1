"""The faces of graphs and training steps that reach a backend: what `import pullback` gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeAlias

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
ModelLike: TypeAlias = "Graph | str | os.PathLike[str] | onnx.ModelProto | bytes"
"""A graph, or what `load` makes one of."""


class Model(Graph):
    """A graph that can be written as ONNX.

    `print` shows it as text, a node a line with its type; `inputs`, `outputs`, `nodes` and `dag` (a `networkx` graph) are for programs, `signature` says
    what each input and output is for, `constraints` what the model forces upon its sizes, and `parameters` what could be trained.
    """

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
        `onnxruntime onnx-mlir torch-mlir iree`, which takes what its row of `docs/tables/targets.md` says. `embed` says which values the file holds:
        `all` (the default for onnxruntime: an initializer that is an input too can be fed), `frozen` (what is never fed) or `none`. `opset` is that
        of the target unless given. Raises `Refusal` naming everything that the target does not take.

        >>> import onnx
        >>> graph = load(onnx.parser.parse_model('''
        ... <ir_version: 8, opset_import: ["" : 17]> squares (float[N] x) => (float[N] y) { y = Mul (x, x) }'''))
        >>> [node.op_type for node in graph.to_onnx().graph.node]
        ['Mul']
        """
        return onnx_export.to_onnx(self._ready(profile), profile=profile, target=target, embed=embed, opset=opset)

    @paused()
    def save(self, path: str | os.PathLike[str], *, profile: str = "explicit", target: str = "onnxruntime",
             embed: str | None = None, opset: int | None = None) -> Path:  # fmt: skip
        """Write the graph as ONNX, whole or not at all; options as `to_onnx`.

        Values that the file does not hold go beside it, into a `.safetensors` of the same name; those of a model of over 2 GB into external data.
        """
        onnx_export.save(self._ready(profile), path, profile=profile, target=target, embed=embed, opset=opset)
        return Path(path)


@dataclass(frozen=True, eq=False)
class Step:
    """A training step: the whole, its parts, and what is trained.

    `gradients` (loss and gradients) and `apply` (the update alone) are the halves between which an all-reduce or an accumulation fits;
    `evaluation` is loss and outputs in inference mode, `weight` what the loss divides by. Each is a `Model`. `signature` says what each input and output
    is for, `selection` what is trained and why the rest is not.
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

    def to_onnx(self, *, profile: str = "explicit", target: str = "onnxruntime", embed: str | None = None,
                opset: int | None = None) -> onnx.ModelProto:  # fmt: skip
        """The whole step as an ONNX model; options as `Model.to_onnx`."""
        return self.graph.to_onnx(profile=profile, target=target, embed=embed, opset=opset)

    def save(self, path: str | os.PathLike[str], *, profile: str = "explicit", target: str = "onnxruntime",
             embed: str | None = None, opset: int | None = None) -> Path:  # fmt: skip
        """Write the whole step; options as `Model.to_onnx`. For onnxruntime the one file is complete: `Trainer` and `pullback fit` train with it."""
        return self.graph.save(path, profile=profile, target=target, embed=embed, opset=opset)

    def save_standard_form(self, path: str | os.PathLike[str], *, profile: str = "explicit", target: str = "onnxruntime",
                           embed: str | None = None, opset: int | None = None) -> Path:  # fmt: skip
        """Write the inference graph with ONNX's own `TrainingInfoProto`, every value embedded; it is for tools that read that, none of the targets."""
        return training_info.save_standard_form(
            self.parts.graph, self.parts.evaluation, Path(path), profile=profile, opset=opset
        )


@paused()
def load(model: str | os.PathLike[str] | onnx.ModelProto | bytes, *, dims: Mapping[str, int] | None = None, straight_through: bool = False,
         max_trips: int | None = None, unroll: bool = False, untie: Sequence[str] = ()) -> Model:  # fmt: skip
    """An ONNX model (a path, a `ModelProto` or its bytes) as a graph of primitives.

    Inputs, outputs and stored tensors keep the model's names; floating weights become inputs of role `parameter`, running statistics of role `state`.

    - `dims` gives symbolic sizes a number: `{"batch": 8}`.
    - `straight_through` lets gradients pass through rounding to integers as if it were not there.
    - `max_trips` bounds loops that stop on a condition, which gives them a gradient.
    - `unroll` writes loops of known length step after step.
    - `untie` names stored tensors (globs too) of which each use becomes a parameter of its own.

    Raises `Refusal`, which names every node that stands in the way of an output.

    >>> import onnx
    >>> print(load(onnx.parser.parse_model('''
    ... <ir_version: 8, opset_import: ["" : 17]>
    ... line (float[N, 2] x) => (float[N, 3] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}> { y = MatMul (x, w) }'''), dims={"N": 4}))
    graph line(x: f32[4, 2], @parameter w: f32[2, 3]) {
      y: f32[4, 3] = dot x, w contract=[[1],[0]]
      return y=y
    }
    """
    return Model.of(
        onnx_import.load(
            model, dims=dims, straight_through=straight_through, max_trips=max_trips, unroll=unroll, untie=untie
        )
    )


def _graph(model: Any) -> Graph:
    return model if isinstance(model, Graph) else load(model)


def lower(model: ModelLike) -> Model:
    """The forward graph in explicit primitives, simplified: what an exported file holds node for node.

    >>> import onnx
    >>> print(lower(onnx.parser.parse_model('''
    ... <ir_version: 8, opset_import: ["" : 17]> rectified (float[N] x) => (float[N] y) { y = Relu (x) }''')))
    graph rectified(x: f32[N]) {
      y.0: f32[] = literal 0.0
      y.1: f32[N] = broadcast y.0 axes=[]
      y.2: bool[N] = less_equal x, y.1
      y: f32[N] = select y.2, y.1, x
      return y=y
    }
    """
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
def gradient(model: ModelLike, of: Sequence[str] | None = None, wrt: Sequence[str] | None = None, *,
             seeds: Mapping[str, str] | None = None) -> Model:  # fmt: skip
    """The gradient graph: for each `w` of `wrt` the output `grad_{w} = sum over y of J(y, w)^T seed_y`, of the shape of `w`.

    `of` are outputs or inner tensors (by default every floating output), `wrt` inputs, parameters or inner tensors (by default the parameters, or
    the inputs where there are none). The model's inputs and outputs stay; an input `seed_{y}` of the shape of `y` is added for each `y`, but for a
    scalar, whose seed is 1. `seeds` gives seeds other names, or asks for that of a scalar. A `w` on which no `y` depends gets zeros, and a warning; a
    name that there is not is refused with near ones. The result is a model: it can be differentiated again.

    >>> import onnx
    >>> squares = onnx.parser.parse_model('''
    ... <ir_version: 8, opset_import: ["" : 17]> squares (float[N] x) => (float[N] y) { y = Mul (x, x) }''')
    >>> print(lower(gradient(squares)))
    graph squares_gradient(x: f32[N], @seed(y) seed_y: f32[N]) {
      y: f32[N] = mul x, x
      grad_x.0: f32[N] = mul seed_y, x
      grad_x: f32[N] = add grad_x.0, grad_x.0
      return y=y, @gradient(x) grad_x=grad_x
    }
    """
    return Model.of(calculus.gradient(_graph(model), of=of, wrt=wrt, seeds=seeds))


def jvp(model: ModelLike, of: Sequence[str] | None = None, wrt: Sequence[str] | None = None) -> Model:
    """The pushforward: for each `y` of `of` the output `tangent_{y} = sum over x of J(y, x) tangent_x`, of the shape of `y`.

    An input `tangent_{x}` of the shape of `x` is added for each `x` of `wrt`. `of` and `wrt` as `gradient`.

    >>> import onnx
    >>> squares = onnx.parser.parse_model('''
    ... <ir_version: 8, opset_import: ["" : 17]> squares (float[N] x) => (float[N] y) { y = Mul (x, x) }''')
    >>> jvp(squares).signature.outputs[-1].name
    'tangent_y'
    """
    return Model.of(calculus.jvp(_graph(model), of=of, wrt=wrt))


def jacobian(model: ModelLike, of: Sequence[str] | None = None, wrt: Sequence[str] | None = None) -> Model:
    """The Jacobian graph: outputs `jacobian_{y}_{x}` of shape `(*y.shape, *x.shape)`, the derivative of each element of `y` by each of `x`.

    It runs one pullback for each element of `y`. `of` and `wrt` as `gradient`.

    >>> import onnx
    >>> squares = onnx.parser.parse_model('''
    ... <ir_version: 8, opset_import: ["" : 17]> squares (float[N] x) => (float[N] y) { y = Mul (x, x) }''')
    >>> jacobian(squares).outputs["jacobian_y_x"].type
    f32[N, N]
    """
    return Model.of(calculus.jacobian(_graph(model), of=of, wrt=wrt))


@paused()
def hessian(model: ModelLike, of: Sequence[str] | None = None, wrt: Sequence[str] | None = None) -> Model:
    """The Hessian graph of one scalar: outputs `hessian_{a}_{b}` of shape `(*a.shape, *b.shape)` for all `a` and `b` of `wrt`.

    `of` names the scalar, by default the model's only output; what is no scalar is refused. `wrt` as `gradient`.

    >>> import onnx
    >>> energy = onnx.parser.parse_model('''
    ... <ir_version: 8, opset_import: ["" : 17]> energy (float[3] x) => (float y) { s = Mul (x, x) y = ReduceSum <keepdims = 0> (s) }''')
    >>> hessian(energy).outputs["hessian_x_x"].type
    f32[3, 3]
    """
    return Model.of(calculus.hessian(_graph(model), of=of, wrt=wrt))
