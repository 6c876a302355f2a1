"""Reading an ONNX model into a graph of the algebra.

Names are looked up in scopes; a tensor that the file stores becomes a node when it is first used. Every node on the way to an output is lowered by the
table in `registry`; what cannot be is collected, so that one refusal names everything that stands in the way.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import sympy
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from ...algebra import primitives as p
from ...algebra.copies import NO_NAME, copies
from ...algebra.dims import Dim, dim, substitute
from ...algebra.errors import InconclusiveDim, PullbackError, PullbackWarning, Refusal
from ...algebra.graph import (
    Builder,
    Constant,
    Constraint,
    Graph,
    Role,
    Value,
    at,
    building,
    current,
    reachable,
    rebuild,
    using,
)
from ...algebra.known import Facts
from ...algebra.origin import Origin, Source
from ...algebra.training.selection import match
from ...algebra.types import TensorType
from . import functions
from .context import Node, Reading, Unify, Unsupported, session, unify
from .exporters import Record, Split, recorded
from .registry import Argument, Stack, Tensors, apply, lookup, schema_of
from .tensors import constant_of, dtype_of_onnx, external_problems, sparse_constant, type_of

__all__ = ["Nested", "Scope", "load"]

ANONYMOUS = {"", "?", "-1", "None"}
RETRIES = (
    12  # times a model is read with some branches on sizes taken the unusual way, where the usual one does not fit
)
FLOATING = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
FAULTS = (PullbackError, ValueError, TypeError, IndexError, KeyError, ArithmeticError, AttributeError)

SCALES: dict[str, tuple[int, ...]] = {  # where quantised operators take their scales
    "QuantizeLinear": (1,), "DequantizeLinear": (1,), "QLinearMatMul": (1, 4, 6), "QLinearConv": (1, 4, 6), "QGemm": (1, 4, 7), "MatMulNBits": (2,),
    "MatMulIntegerToFloat": (2, 3), "DynamicQuantizeMatMul": (2,), "QAttention": (3, 4), "QLinearAdd": (1, 4, 6), "QLinearMul": (1, 4, 6),
    "QLinearWhere": (2, 5, 7), **dict.fromkeys((
        "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearReduceMean",
    ), (1, 3)),
}  # fmt: skip

# operands whose stored tensors are no weights: (operator, position) -> role, suffix of a tensor that is a weight elsewhere, reason
USES: dict[tuple[str, int], tuple[str, str, str]] = {
    ("BatchNormalization", 3): ("state", "running_mean", "running mean of a normalisation"),
    ("BatchNormalization", 4): ("state", "running_var", "running variance of a normalisation"),
    **{(op, i): ("frozen", "scale", "quantisation scale") for op, places in SCALES.items() for i in places},
    ("OneHot", 2): ("frozen", "values", "values of a one-hot tensor"),
    ("RotaryEmbedding", 1): (
        "frozen",
        "cos",
        "table of a rotary embedding",
    ),  # positions in com.microsoft, from which the tables are one further
    ("RotaryEmbedding", 2): ("frozen", "table", "table of a rotary embedding"),
    ("RotaryEmbedding", 3): ("frozen", "sin", "table of a rotary embedding"),
    ("GroupQueryAttention", 7): ("frozen", "cos", "table of a rotary embedding"),
    ("GroupQueryAttention", 8): ("frozen", "sin", "table of a rotary embedding"),
    ("STFT", 2): ("frozen", "window", "window of a transform"),
    ("Pad", 2): ("frozen", "value", "padding value"),
    ("Clip", 1): ("frozen", "min", "bound"),
    ("Clip", 2): ("frozen", "max", "bound"),
}
USE_DOMAINS = ("", "ai.onnx", "com.microsoft")

# where one number stands for all elements; a sum is left out, as one number may be the bias of one output
BY_ELEMENT = frozenset({
    "Clip", "Div", "Equal", "Expand", "Greater", "GreaterOrEqual", "IsNaN", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Pow", "Sqrt",
    "Sub", "Where",
})  # fmt: skip
# where masks stand, but no tables or matrices
MASKED = BY_ELEMENT | {"Add", "Cast", "Concat", "Identity", "Reshape", "Slice", "Squeeze", "Sum", "Unsqueeze"}
NORMS = frozenset({
    "BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization",
})  # fmt: skip
# what networks call the buffers from which rotary positions come
ROTARY = re.compile(r"(.*\.)?((original_)?inv_freq|(cos|sin)_cached|freqs_(cos|sin))")
# what PyTorch's exporters call constants in a network's code
IN_CODE = re.compile(r"(.*/)?Constant(_\d+)?_output_0|(.*[./])?(c_)?_?lifted_tensor_\d+|clone(_\d+)?")
HUGE = 1e30  # no weight is as large, masks are


class Poison:
    """Stands for a tensor that could not be had; what depends on it is not lowered, and not blamed."""


POISON = Poison()


@dataclass(frozen=True, slots=True)
class Missing:
    """A result that its operator cannot give here; who asks for it is told why."""

    reason: str


Entry = Value | Tensors | Constant | Poison | None


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the file: its full name (with the path of the subgraph it stands in), its data, and the operators that it serves."""

    name: str
    constant: Constant
    serves: frozenset[str] = frozenset()
    anonymous: bool = False
    told: bool = False  # its exporter says that it is a weight, or computed from one

    @property
    def is_number(self) -> bool:
        """Whether it is one number of a formula, as `sqrt(1/d)` in attention, not a weight."""
        if self.told or math.prod(self.constant.shape) != 1:
            return False
        by_element = self.anonymous and bool(self.serves) and self.serves <= BY_ELEMENT
        return not self.constant.shape or by_element or IN_CODE.fullmatch(self.name) is not None

    @property
    def no_weight(self) -> str | None:
        """Why it is no weight though its operators take weights, or None.

        Norms without weights are exported with scales of ones and biases of zeros, masks hold infinities or numbers that stand for them.
        """
        if self.told:
            return None
        if IN_CODE.fullmatch(self.name):
            return "a constant in the network's code, by the name that its exporter gave it"
        if ROTARY.fullmatch(self.name):
            return "a buffer, by its name: rotary positions come from it"
        if self.serves and self.serves <= NORMS and NO_NAME.fullmatch(self.name):
            array = np.asarray(self.constant.array)
            return (
                "stands for a weight that the norm does not have" if np.all(array == 1) or np.all(array == 0) else None
            )
        if self.serves and self.serves <= MASKED:
            array = np.asarray(self.constant.array)
            usual = np.abs(array) < min(HUGE, float(ml_dtypes.finfo(array.dtype).max))  # type: ignore[no-untyped-call]
            return None if np.all(usual) else "a mask: it holds infinities, or numbers that stand for them"
        return None


class Body:
    """A nested graph while it is built apart, and the values from outside that it reads: each is an input of its own."""

    def __init__(self, builder: Builder, outer: Body | None, taken: Iterable[str], state: Reading) -> None:
        self.builder = builder
        self.outer = outer
        self.state = state
        self.names = set(taken)
        self.captured: dict[int, tuple[Value, Value]] = {}

    def capture(self, value: Value, name: str) -> Value:
        """The input that stands for a value of the graph around; a literal or a dim is made again."""
        with using(self.builder):
            if value.primitive.name in ("literal", "dim"):
                return current().add(value.primitive, (), value.params)
            if id(value) not in self.captured:
                own, n = name, 1
                while own in self.names:
                    own, n = f"{name}_{n}", n + 1
                self.names.add(own)
                assert isinstance(value.type, TensorType)
                inner = p.input(own, value.type)
                self.captured[id(value)] = (value, inner)
                if (array := self.state.known(value)) is not None:
                    self.state.facts.tell(inner, array)
            return self.captured[id(value)][1]


@dataclass(frozen=True, slots=True)
class Nested:
    """A nested graph, and the outer values that its last inputs stand for."""

    graph: Graph
    captured: tuple[Value, ...]


class Scope:
    """The names of one graph of the model, inside those of the graphs around it.

    `body` is the nested graph that its nodes are built in; None for the model's own graph.
    """

    def __init__(
        self, reader: Reader, opsets: Mapping[str, int], path: str = "", outer: Scope | None = None, body: Body | None = None
    ) -> None:  # fmt: skip
        self.reader = reader
        self.opsets = opsets
        self.path = path
        self.outer = outer
        self.body = body
        self.entries: dict[str, Any] = {}

    # -- names ---------------------------------------------------------------------------------------------------------------------

    def _home(self, name: str) -> Scope:
        """The scope, this one or one further out, that a name stands in; KeyError where there is none."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.entries:
                return scope
            scope = scope.outer
        raise KeyError(name)

    def find(self, name: str) -> Any:
        """The entry of a name here or further out; KeyError where there is none."""
        return self._home(name).entries[name]

    def __contains__(self, name: str) -> bool:
        try:
            self.find(name)
        except KeyError:
            return False
        return True

    def argument(self, name: str) -> Argument | Poison:
        """The value of a name; a stored tensor becomes a node now."""
        if name == "":
            return None
        try:
            home = self._home(name)
        except KeyError:
            raise Unsupported(f"input {name!r} is not defined before it is used") from None
        entry = home.entries[name]
        if isinstance(entry, Missing):
            raise Unsupported(entry.reason)
        if isinstance(entry, _Stored):
            return self._brought(self.reader.value_of(entry), None, entry.name)
        if isinstance(entry, Stack):
            return Stack(self._brought(entry.stacked, home.body, name))
        if isinstance(entry, Tensors):
            if not entry.items:
                return entry  # the empty optional is known by identity
            return Tensors(tuple(self._brought(v, home.body, name) for v in entry.items))
        return self._brought(entry, home.body, name) if isinstance(entry, Value) else entry

    def brought(self, value: Value, outer: Scope, name: str) -> Value:
        """A value of an outer scope as the nested graph here has it."""
        return self._brought(value, outer.body, name)

    def _brought(self, value: Value, home: Body | None, name: str) -> Value:
        """A value of a graph around as the nested graph here has it, through every border between."""
        borders = []
        body = self.body
        while body is not home:
            assert body is not None, "a value of an inner graph is not visible outside"
            borders.append(body)
            body = body.outer
        for body in reversed(borders):
            value = body.capture(value, name)
        return value

    def stored(self, name: str) -> _Stored | None:
        try:
            entry = self.find(name)
        except KeyError:
            return None
        return entry if isinstance(entry, _Stored) else None

    def child(self, path: str, opsets: Mapping[str, int] | None = None) -> Scope:
        """A scope inside this one, for a nested graph; `path` is put before the names of its stored tensors."""
        return Scope(self.reader, opsets or self.opsets, f"{self.path}{path}/", self, self.body)

    def isolated(self, path: str, opsets: Mapping[str, int]) -> Scope:
        """A scope that sees no outer names, for a function body."""
        return Scope(self.reader, opsets, f"{self.path}{path}/", None, self.body)

    def nested(
        self, path: str, inputs: Sequence[tuple[str, TensorType]], build: Callable[[Scope, tuple[Value, ...]], Iterable[tuple[str, Value]]]
    ) -> Nested:  # fmt: skip
        """A graph built apart, for a primitive's body: `build(scope, inputs)` binds names in the scope and gives the named outputs.

        What it reads of outer names becomes further inputs of the graph, in the order of `captured`.
        """
        origin = current().origin
        with building() as builder:
            builder.origin = origin
            body = Body(builder, self.body, (n for n, _ in inputs), self.reader.state)
            scope = Scope(self.reader, self.opsets, f"{self.path}{path}/", self, body)
            given = tuple(p.input(n, t) for n, t in inputs)
            outputs = dict(build(scope, given))
        reached = {id(v) for v in reachable(outputs.values())}
        captured = [(outer, inner) for outer, inner in body.captured.values() if id(inner) in reached]
        graph = Graph((*given, *(inner for _, inner in captured)), outputs, path)
        return Nested(graph, tuple(outer for outer, _ in captured))

    def parameter(self, name: str, array: np.ndarray) -> Value:
        """An array that a node holds in an attribute, as a weight of this name."""
        return self._brought(self.reader.value_of(_Stored(name, Constant(array))), None, name)

    # -- graphs --------------------------------------------------------------------------------------------------------------------

    def store(self, graph: GraphProto) -> None:
        """Take in the tensors that a graph stores."""
        base = self.reader.base
        for tensor in graph.initializer:
            self._store(tensor.name, partial(constant_of, tensor, base))
        for sparse in graph.sparse_initializer:
            self._store(sparse.values.name, partial(sparse_constant, sparse, base))

    def _store(self, name: str, make: Callable[[], Constant]) -> None:
        try:
            serves = self.reader.serves.get(name, frozenset())
            told = not self.path and name in self.reader.record.weights
            self.entries[name] = _Stored(self.path + name, make(), serves, NO_NAME.fullmatch(name) is not None, told)
        except FAULTS as error:
            self.entries[name] = Missing(f"tensor {name!r}: {error}")

    def run(self, graph: GraphProto, *, stored: bool = True, wanted: Sequence[str] | None = None) -> list[Argument]:
        """Lower the nodes of a graph whose inputs are already bound here; the values of its outputs, or of the tensors that are wanted.

        The nodes are built in the current builder: this is how a branch that is always taken, or an unrolled body, is put in place.
        """
        if stored:
            self.store(graph)
        outputs = [o.name for o in graph.output] if wanted is None else wanted
        made = Counter(o for n in graph.node for o in n.output if o)
        if repeated := [repr(o) for o, n in made.items() if n > 1]:
            self.reader.blame(f"tensor {', '.join(repeated)} is made by more than one node")
            raise Poisoned
        kept = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
        if both := [repr(o) for o in made if o in kept]:
            self.reader.blame(f"tensor {', '.join(both)} is stored in the file and made by a node too")
            raise Poisoned
        for node in _ordered(_needed(graph.node, outputs), self, self.reader):
            self.lower(node)
        results = []
        for name in outputs:
            try:
                value = self.argument(name)
            except Unsupported as error:
                self.reader.blame(f"output {name!r}: {error}")
                value = POISON
            if isinstance(value, Poison):
                if not self.reader.reasons:
                    self.reader.blame(f"output {name!r} cannot be computed")
                raise Poisoned
            results.append(value)
        return results

    # -- nodes ---------------------------------------------------------------------------------------------------------------------

    def lower(self, proto: NodeProto) -> None:
        """Lower one node and bind its outputs; blame it where that fails."""
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        opset = self.opsets.get(domain, self.reader.newest(domain))
        name = self.path + (proto.name or next(iter(filter(None, proto.output)), proto.op_type))
        where = f"node {name!r} ({proto.op_type}, domain {domain or 'ai.onnx'}, opset {opset})"
        arguments: list[Argument | Poison] = []
        try:
            inputs = self.reader.operands(proto)
            arguments = [self.argument(i) for i in inputs]
            if any(isinstance(a, Poison) for a in arguments):
                raise Poisoned
            node = Node(name, proto.op_type, domain, opset, inputs, tuple(proto.output), self)
            with at(Origin(current().origin.phase, Source(name, proto.op_type, domain, opset))):
                results = self._results(proto, node, [a for a in arguments if not isinstance(a, Poison)])
        except Poisoned:
            if reason := functions.unknown(proto, domain, opset):  # said as well, so that all are named at once
                self.reader.blame(f"{where}: {reason}")
            results = (POISON,) * len(proto.output)
        except Unify:
            raise
        except FAULTS as error:
            if isinstance(error, InconclusiveDim) and error.forced and error.sides:
                unify(*error.sides, f"{proto.op_type} node {name!r} computes with both")
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            if arguments and not isinstance(error, Unsupported):
                notes += f" (operands: {', '.join(_shown(a) for a in arguments)})"
            kind = "" if isinstance(error, PullbackError) else f"{type(error).__name__}: "
            self.reader.blame(f"{where}: {kind}{error}{notes}")
            results = (POISON,) * len(proto.output)
        for output, result in zip(proto.output, results, strict=False):
            if output:
                self.entries[output] = result
                if isinstance(result, Value) and not self.path:
                    self.reader.tensors[output] = result

    def _results(self, proto: NodeProto, node: Node, arguments: list[Argument]) -> tuple[Any, ...]:
        if proto.op_type == "Constant" and node.domain == "":
            return (self._constant(proto),)
        row = lookup(node.op_type, node.domain, node.opset)
        if row is None:
            if reason := functions.unknown(proto, node.domain, node.opset):
                raise Unsupported(reason)
            body = functions.body_of(proto, node, arguments)
            if body is None:
                raise Unsupported(f"no lowering for {node.op_type} at opset {node.opset}")
            return functions.call(body, proto, node, arguments)
        attributes = _attributes(proto, node)
        results = apply(row, node, arguments, attributes, lambda i, v: self._static(node, i, v))
        results = results if isinstance(results, tuple) else (results,)
        given = [*results, *(None,) * (len(proto.output) - len(results))]
        return tuple(
            Missing(f"output {i} ({output!r}) of node {node.name!r} ({node.op_type}) is not available")
            if result is None and output
            else result
            for i, (output, result) in enumerate(zip(proto.output, given, strict=False))
        )

    def _static(self, node: Node, position: int, value: Value) -> np.ndarray | None:
        reason = f"its value decides a shape or an attribute of node {node.name!r}"
        stored = self.stored(node.inputs[position]) if position < len(node.inputs) else None
        if stored is not None:
            self.reader.state.static_uses[stored.name] = reason
            return stored.constant.array
        found = self.reader.state.known(value)
        if found is None:
            found = self.reader.known_with_weights(value, reason)
        return found

    def _constant(self, proto: NodeProto) -> Any:
        name = proto.output[0]
        given = {a.name: a for a in proto.attribute}
        if len(given) != 1:
            raise Unsupported(f"a Constant has exactly one value, found {sorted(given)}")
        (kind, attribute), *_ = given.items()
        base = self.reader.base
        match kind:
            case "value":
                if attribute.t.data_location == TensorProto.EXTERNAL and (
                    problem := external_problems(attribute.t, base)
                ):
                    raise Unsupported(problem)
                constant = constant_of(attribute.t, base)
            case "sparse_value":
                constant = sparse_constant(attribute.sparse_tensor, base)
            case "value_float":
                constant = Constant(np.asarray(attribute.f, np.float32))
            case "value_floats":
                constant = Constant(np.asarray(attribute.floats, np.float32))
            case "value_int":
                constant = Constant(np.asarray(attribute.i, np.int64))
            case "value_ints":
                constant = Constant(np.asarray(attribute.ints, np.int64))
            case _:
                raise Unsupported(f"a Constant of {kind} is outside numerical graphs")
        return _Stored(self.path + name, constant, self.reader.serves.get(name, frozenset()), anonymous=True)


def _shown(argument: Argument | Poison) -> str:
    """An operand's type, for messages."""
    match argument:
        case Value():
            return repr(argument.type)
        case Stack():
            return f"sequence of {argument.stacked.shape[0]}"
        case Tensors():
            return f"sequence of {len(argument.items)}"
    return "none"


class Poisoned(Exception):
    """Something upstream was already blamed."""


def _attributes(proto: NodeProto, node: Node) -> dict[str, Any]:
    schema = schema_of(node.op_type, node.domain, node.opset)
    found: dict[str, Any] = {}
    for attribute in proto.attribute:
        if attribute.ref_attr_name:
            raise Unsupported(f"attribute {attribute.name!r} refers to {attribute.ref_attr_name!r} outside a function")
        if schema is not None:
            declared = schema.attributes.get(attribute.name)
            if declared is None:
                raise Unsupported(f"{node.op_type} has no attribute {attribute.name!r} at opset {node.opset}")
            wanted: Any = declared.type  # an enum, which onnx's type hints do not say
            if attribute.type and int(wanted.value) != int(attribute.type):
                kind = AttributeProto.AttributeType.Name(attribute.type)
                raise Unsupported(f"attribute {attribute.name!r} must be {wanted.name}, found {kind}")
        found[attribute.name] = value_of_attribute(attribute)
    return found


def value_of_attribute(attribute: AttributeProto) -> Any:
    """The attribute as Python has it: numbers, strings, tuples of those, numpy arrays, protos of graphs and types."""
    match attribute.type:
        case AttributeProto.FLOAT:
            return float(attribute.f)
        case AttributeProto.INT:
            return int(attribute.i)
        case AttributeProto.STRING:
            return attribute.s.decode("utf-8", "replace")
        case AttributeProto.TENSOR:
            return onnx.numpy_helper.to_array(attribute.t)
        case AttributeProto.GRAPH:
            return attribute.g
        case AttributeProto.SPARSE_TENSOR:
            return attribute.sparse_tensor
        case AttributeProto.TYPE_PROTO:
            return attribute.tp
        case AttributeProto.FLOATS:
            return tuple(map(float, attribute.floats))
        case AttributeProto.INTS:
            return tuple(map(int, attribute.ints))
        case AttributeProto.STRINGS:
            return tuple(s.decode("utf-8", "replace") for s in attribute.strings)
        case AttributeProto.TENSORS:
            return tuple(map(onnx.numpy_helper.to_array, attribute.tensors))
        case AttributeProto.GRAPHS:
            return tuple(attribute.graphs)
    raise Unsupported(f"attribute {attribute.name!r} has no value that is understood")


# ---- order ---------------------------------------------------------------------------------------------------------------------------------


def free_names(node: NodeProto) -> Iterator[str]:
    """The names that a node reads: its inputs, names in the attributes of a Gradient, and outer names inside its nested graphs."""
    yield from (i for i in node.input if i)
    if node.op_type == "Gradient":  # names its tensors in attributes
        for attribute in node.attribute:
            yield from (n.decode() for n in (attribute.s, *attribute.strings) if n)
    for attribute in node.attribute:
        for graph in (
            (attribute.g, *attribute.graphs) if attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) else ()
        ):
            inner = {i.name for i in graph.input} | {i.name for i in graph.initializer}
            inner |= {o for n in graph.node for o in n.output}
            yield from (name for n in graph.node for name in free_names(n) if name not in inner)
            yield from (o.name for o in graph.output if o.name not in inner)


def _needed(nodes: Sequence[NodeProto], outputs: Iterable[str]) -> list[NodeProto]:
    """The nodes that outputs depend on, in the file's order."""
    maker = {o: i for i, n in enumerate(nodes) for o in n.output if o}
    needed: set[int] = set()
    stack = [maker[o] for o in outputs if o in maker]
    while stack:
        i = stack.pop()
        if i not in needed:
            needed.add(i)
            stack.extend(maker[name] for name in free_names(nodes[i]) if name in maker)
    return [nodes[i] for i in sorted(needed)]


def _ordered(nodes: list[NodeProto], scope: Scope, reader: Reader) -> list[NodeProto]:
    """Nodes in an order in which each comes after what it reads; the file's own where that is one. Cycles and undefined names are blamed."""
    made = {o for n in nodes for o in n.output if o}
    done: set[str] = set()
    waiting, ordered = nodes, []
    while waiting:
        later = []
        for node in waiting:
            if all(name in done or name not in made for name in free_names(node)):
                ordered.append(node)
                done.update(filter(None, node.output))
            else:
                later.append(node)
        if len(later) == len(waiting):
            names = ", ".join(repr(n.name or n.output[0]) for n in later[:8])
            reader.blame(f"a cycle, or nodes behind one: {names}{', ...' if len(later) > 8 else ''}")
            raise Poisoned
        if len(later) > 64 and len(ordered) < len(nodes) // 2:
            return _sorted(nodes, made, reader)
        waiting = later
    return ordered


def _sorted(nodes: list[NodeProto], made: set[str], reader: Reader) -> list[NodeProto]:
    """Kahn's algorithm, for files whose nodes are far from sorted."""
    readers: dict[str, list[int]] = {}
    missing = []
    for i, node in enumerate(nodes):
        read = {name for name in free_names(node) if name in made}
        missing.append(len(read))
        for name in read:
            readers.setdefault(name, []).append(i)
    ready = [i for i, n in enumerate(missing) if n == 0]
    order = []
    while ready:
        i = ready.pop()
        order.append(nodes[i])
        for output in filter(None, nodes[i].output):
            for j in readers.get(output, ()):
                missing[j] -= 1
                if missing[j] == 0:
                    ready.append(j)
    if len(order) != len(nodes):
        stuck = [nodes[i] for i, n in enumerate(missing) if n > 0]
        names = ", ".join(repr(n.name or n.output[0]) for n in stuck[:8])
        reader.blame(f"a cycle, or nodes behind one: {names}{', ...' if len(stuck) > 8 else ''}")
        raise Poisoned
    return order


# ---- the reader ----------------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Reader:
    """One reading of one model: its graph with functions inlined, and the model whose tensors it uses."""

    graph: GraphProto
    model: ModelProto
    base: Path | None
    bindings: Mapping[sympy.Symbol, Dim]
    state: Reading = field(default_factory=Reading)
    reasons: list[str] = field(default_factory=list)
    tensors: dict[str, Value] = field(default_factory=dict)
    stored: dict[str, Value] = field(default_factory=dict)
    data: dict[str, Constant] = field(default_factory=dict)
    uses: dict[str, tuple[str, str]] = field(default_factory=dict)
    deep: Facts = field(default_factory=Facts)
    renamed: dict[tuple[str, int], str] = field(default_factory=dict)
    builder: Builder = field(default_factory=Builder)
    copies: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    record: Record = field(default_factory=Record)
    root: Scope | None = None
    serves: Mapping[str, frozenset[str]] = field(init=False)

    def __post_init__(self) -> None:
        found: dict[str, set[str]] = defaultdict(set)
        for node in _every_node(self.graph):
            for name in node.input:
                found[name].add(node.op_type if node.domain in USE_DOMAINS else f"{node.domain}.{node.op_type}")
        self.serves = {name: frozenset(ops) for name, ops in found.items()}

    def blame(self, reason: str) -> None:
        self.reasons.append(reason)

    def operands(self, node: NodeProto) -> tuple[str, ...]:
        """The names of a node's inputs, each use of a tensor that was taken apart under its own."""
        if not self.renamed:
            return tuple(node.input)
        return tuple(self.renamed.get((node.output[0], i), name) for i, name in enumerate(node.input))

    def newest(self, domain: str) -> int:
        """The version assumed for a domain that the model does not import."""
        return {"": onnx.defs.onnx_opset_version()}.get(domain, 1 << 30)

    def value_of(self, stored: _Stored) -> Value:
        """The node of a stored tensor: an input with a role where it is a floating weight, else a literal."""
        found = self.stored.get(stored.name)
        if found is not None:
            return found
        with using(self.builder):
            value = self._stored_value(stored)
        self.stored[stored.name] = value
        return value

    def _stored_value(self, stored: _Stored) -> Value:
        if stored.name in self.copies and self.root is not None:
            name, turned = self.copies[stored.name]
            source = self.root.stored(name)
            if source is not None:
                value = self.value_of(source)
                return p.transpose(value, perm=(1, 0)) if turned else value
        type_ = type_of(stored.constant)
        if type_.dtype.floating and type_.dtype.bits >= 16 and not stored.is_number:
            if stored.name not in self.uses and (reason := stored.no_weight):
                self.uses[stored.name] = ("frozen", reason)
            role, _ = self.uses.get(stored.name, ("parameter", ""))
            value = p.input(stored.name, type_, role=role)
            self.data[stored.name] = stored.constant
            return value
        return p.literal(stored.constant)

    def known_with_weights(self, value: Value, reason: str) -> np.ndarray | None:
        """What a value is known to be when stored floating tensors count as known; those are then no longer trained."""
        used = [v for v in reachable([value]) if v.primitive.name == "input"]
        if not used or any(v.params["name"] not in self.data for v in used):
            return None
        for v in used:
            self.deep.tell(v, self.data[v.params["name"]].array)
        found = self.deep(value)
        if found is not None:
            self.state.static_uses.update((v.params["name"], reason) for v in used)
        return found


def load(model: str | os.PathLike[str] | ModelProto | bytes, *, dims: Mapping[str, int] | None = None, straight_through: bool = False,
         max_trips: int | None = None, unroll: bool = False, untie: Sequence[str] = ()) -> Graph:  # fmt: skip
    """Read an ONNX model (a path, a `ModelProto`, or its bytes) into a graph.

    Inputs keep the model's names; floating weights become inputs with role `parameter`, running statistics `state`. `dims` gives symbolic dims a size.
    `straight_through` lets gradients pass through rounding to integers. `max_trips` bounds loops that stop on a condition, which gives them a
    gradient. `unroll` writes loops of known length step after step. `untie` names stored tensors (globs too) of which each use becomes a parameter
    of its own, `{node}.{tensor}` from the second use on. Raises `Refusal` naming everything that stands in the way.
    """
    if max_trips is not None and max_trips < 1:
        raise Refusal("cannot bound loops", [f"max_trips must be positive, found {max_trips}"])
    options = {"straight_through": straight_through, "max_trips": max_trips, "unroll": unroll}
    proto, base, name = open_model(model)
    try:
        return _loaded(proto, base, name, dims or {}, options, untie)
    except FAULTS as error:
        if isinstance(error, PullbackError):
            raise
        raise Refusal(f"cannot read {name!r}", [f"the file is damaged: {type(error).__name__}: {error}"]) from error


def _loaded(
    proto: ModelProto,
    base: Path | None,
    name: str,
    dims: Mapping[str, int],
    options: Mapping[str, Any],
    untie: Sequence[str],
) -> Graph:
    _check_file(proto, base, name)
    graph = functions.inlined(proto, name)
    bindings: dict[sympy.Symbol, Dim] = {}
    for symbol, size in dims.items():
        if not isinstance(size, int) or size < 1:
            raise Refusal(f"cannot bind dim {symbol!r}", [f"a positive int is required, found {size!r}"])
        bindings[dim(symbol)] = size
    if dims:
        _check_bound(graph, dims, name)
    tied = _written_twice(proto, base)
    reader = partial(Reader, graph, proto, base, copies=tied, record=_recorded(proto, base, name, untie, tied))
    waiting: list[frozenset[str]] = [
        frozenset()
    ]  # branches on sizes to be read the unusual way, the usual way of all first
    refused: Refusal | None = None
    for _ in range(RETRIES):
        if not waiting:
            break
        unusual, chosen = waiting.pop(), list[str]()
        try:
            return _settled(reader, name, bindings, options, unusual, chosen)
        except Refusal as error:
            refused = refused or error
            waiting += [unusual | {branch} for branch in dict.fromkeys(chosen) if branch not in unusual]
    assert refused is not None
    raise refused


def _written_twice(model: ModelProto, base: Path | None) -> dict[str, tuple[str, bool]]:
    """Stored matrices that an exporter wrote a second time, perhaps transposed: one weight, which read as two would be trained apart."""
    given = {i.name for i in model.graph.input}
    matrices: dict[str, Constant] = {}
    for tensor in model.graph.initializer:
        if len(tensor.dims) == 2 and tensor.data_type in FLOATING and tensor.name not in given:
            with suppress(*FAULTS):  # a damaged tensor is blamed where it is used
                matrices[tensor.name] = constant_of(tensor, base)
    return copies(matrices)


def _recorded(
    model: ModelProto, base: Path | None, name: str, untie: Sequence[str], tied: Collection[str]
) -> Record:  # fmt: skip
    """What the exporter recorded of the stored tensors; parameters that it merged, or seems to have merged, are named, and those that it took apart."""
    given = {i.name for i in model.graph.input}
    stored = {}
    for tensor in model.graph.initializer:
        if tensor.data_type in FLOATING and tensor.name not in given:
            with suppress(*FAULTS):  # a damaged tensor is blamed where it is used
                stored[tensor.name] = constant_of(tensor, base)
    record = recorded(model, stored, match(stored, untie, option="untie"))
    for tensor, what in record.merged.items():
        note = f"{tensor!r} of {name!r} stands for {what}: its elements are all equal, so that the exporter may have merged parameters"
        way = f"untie={tensor!r} (--untie) trains each use for itself"
        warnings.warn(f"{note}, which are now trained as one; {way}", PullbackWarning, stacklevel=5)
    for parameter, tensors in record.places.items():
        if len(apart := [t for t in tensors if t not in tied]) > 1:
            note = (
                f"{parameter!r} of {name!r} was computed with by its exporter, so that it is in the file more than once"
            )
            warnings.warn(
                f"{note}: {', '.join(apart)} are trained apart, each by its part of the gradient",
                PullbackWarning,
                stacklevel=5,
            )
    return record


def _settled(
    make: Callable[..., Reader], name: str, bindings: Mapping[sympy.Symbol, Dim],
    options: Mapping[str, Any], unusual: Collection[str], chosen: list[str],
) -> Graph:  # fmt: skip
    """Read again and again, symbols replaced by what the model forces them to be, until nothing more is forced."""
    forced: list[Constraint] = []
    while True:
        reader = make(bindings=bindings)
        reader.state.options.update(options)
        reader.state.choices.update(dict.fromkeys(unusual, True))
        reader.state.chosen = chosen
        try:
            return _read(reader, name, forced)
        except Unify as forced_by:
            found = Constraint(forced_by.symbol, "==", forced_by.value, forced_by.reason)
            if any(str(c) == str(found) for c in forced):
                raise Refusal(f"cannot read {name!r}", [f"its sizes cannot be settled: {forced_by}"]) from None
            if isinstance(forced_by.symbol, sympy.Symbol):
                now = {forced_by.symbol: forced_by.value}
                bindings = {s: substitute(d, now) for s, d in bindings.items()} | now
                forced = [c if isinstance(c.left, sympy.Symbol) else _substituted(c, now) for c in forced]
            forced.append(found)


def _substituted(constraint: Constraint, bindings: Mapping[sympy.Symbol, Dim]) -> Constraint:
    left, right = (substitute(d, bindings) for d in (constraint.left, constraint.right))
    return Constraint(left, constraint.relation, right, constraint.reason)


def open_model(model: str | os.PathLike[str] | ModelProto | bytes) -> tuple[ModelProto, Path | None, str]:
    """The model, the folder of its external data, and what messages call it; `Refusal` where it is no ONNX model."""
    if isinstance(model, ModelProto):
        return model, None, model.graph.name or "model"
    if isinstance(model, bytes):
        data, base, name = model, None, "model"
    else:
        path = Path(model)
        try:
            data, base, name = path.read_bytes(), path.parent, str(path)
        except OSError as error:
            raise Refusal(f"cannot read {str(path)!r}", [error.strerror or str(error)]) from error
    proto = ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise Refusal(
            f"cannot read {name!r}", ["not an ONNX model, or cut short (its protobuf does not parse)"]
        ) from error
    if not proto.HasField("graph") or not proto.ir_version:
        raise Refusal(f"cannot read {name!r}", ["not an ONNX model: it holds no graph"])
    return proto, base, name


def _every_node(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _every_node(attribute.g)


def _every_tensor(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield sparse.values
        yield sparse.indices
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            elif attribute.type == AttributeProto.GRAPH:
                yield from _every_tensor(attribute.g)


def _check_file(proto: ModelProto, base: Path | None, name: str) -> None:
    problems = []
    if not proto.opset_import:
        problems.append("the model imports no operator set")
    newest = onnx.defs.onnx_opset_version()
    for entry in proto.opset_import:
        if entry.domain in ("", "ai.onnx") and not 1 <= entry.version <= newest:
            problems.append(f"operator set {entry.version} is not one of 1 to {newest}, which the onnx package knows")
        elif not 0 <= entry.version < 1 << 31:
            problems.append(f"operator set {entry.version} of {entry.domain} is no version")
    for tensor in _every_tensor(proto.graph):
        if tensor.data_location == TensorProto.EXTERNAL and (problem := external_problems(tensor, base)):
            problems.append(problem)
    if problems:
        raise Refusal(f"cannot read {name!r}", problems)


def _check_bound(graph: GraphProto, dims: Mapping[str, int], name: str) -> None:
    known = {d.dim_param for i in graph.input for d in i.type.tensor_type.shape.dim if d.dim_param}
    known |= {f"{i.name}_{a}" for i in graph.input for a, d in enumerate(i.type.tensor_type.shape.dim) if _anonymous(d)}
    unknown = [d for d in dims if d not in known]
    if unknown:
        have = ", ".join(sorted(known)) or "none"
        reasons = []
        for d in unknown:
            near = difflib.get_close_matches(d, sorted(known), n=3)
            reasons.append(
                f"no symbolic dim {d!r}" + (f"; near: {', '.join(near)}" if near else f" (there are: {have})")
            )
        raise Refusal(f"cannot bind dims of {name!r}", reasons)


def _anonymous(d: onnx.TensorShapeProto.Dimension) -> bool:
    which = d.WhichOneof("value")
    return (
        which is None
        or (which == "dim_value" and d.dim_value < 0)
        or (which == "dim_param" and d.dim_param in ANONYMOUS)
    )


def _read(reader: Reader, name: str, forced: Sequence[Constraint]) -> Graph:
    model, graph = reader.model, reader.graph
    opsets = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import}
    with using(reader.builder), session(reader.state):
        reader.builder.assume(forced)
        scope = reader.root = Scope(reader, opsets)
        scope.store(model.graph)
        _classify(graph, scope, reader)
        for info in graph.input:
            reader.state.taken.update(d.dim_param for d in info.type.tensor_type.shape.dim)
        inputs = [
            v
            for info in graph.input
            if info.name not in scope.entries and (v := _input(info, scope, reader)) is not None
        ]
        results: list[Argument] = []
        wanted, unread = _numerical_outputs(graph)
        with suppress(Poisoned):
            results = scope.run(graph, stored=False, wanted=wanted)
        if not graph.output:
            reader.blame("the model has no outputs")
        elif not wanted:
            reader.reasons += [f"output {o!r}: {why}" for o, why in unread.items()]
        bad = [o for o, r in zip(wanted, results, strict=False) if not isinstance(r, Value)]
        reader.reasons += [f"output {o!r} is a sequence, not a tensor" for o in bad]
        if reader.reasons:
            raise Refusal(f"cannot read {name!r}", reader.reasons)
        outputs = {o: r for o, r in zip(wanted, results, strict=True) if isinstance(r, Value)}
    for output, why in unread.items():
        warnings.warn(f"output {output!r} of {name!r} is left out: {why}", PullbackWarning, stacklevel=4)
    reader.state.records["outputs_left_out"] = [(o, why) for o, why in unread.items()]
    return _graph(reader, name, inputs, outputs, forced, opsets)


def _numerical_outputs(graph: GraphProto) -> tuple[list[str], dict[str, str]]:
    """The outputs that are tensors of numbers, and why the others are left out. The scores before a `ZipMap` take the place of its maps."""
    maker = {o: n for n in graph.node for o in n.output if n.op_type == "ZipMap" and n.domain == "ai.onnx.ml"}
    wanted: dict[str, None] = {}
    unread: dict[str, str] = {}
    for output in graph.output:
        kind = output.type.WhichOneof("value") or "tensor_type"
        if output.name in maker:
            scores = maker[output.name].input[0]
            wanted[scores] = None
            unread[output.name] = (
                f"a sequence of maps is outside numerical graphs; the scores before it, {scores!r}, take its place"
            )
        elif kind != "tensor_type":
            unread[output.name] = f"a {kind.removesuffix('_type')} is no tensor"
        elif output.type.tensor_type.elem_type == TensorProto.STRING:
            unread[output.name] = "strings are outside numerical graphs"
        else:
            wanted[output.name] = None
    return list(wanted), unread


def _graph(reader: Reader, name: str, inputs: list[Value], outputs: dict[str, Value],
           forced: Sequence[Constraint], opsets: Mapping[str, int]) -> Graph:  # fmt: skip
    reached = {id(v) for v in reachable(outputs.values())}
    weights = [v for v in dict.fromkeys(reader.stored.values()) if v.primitive.name == "input" and id(v) in reached]
    frozen = {v.params["name"]: reader.uses[v.params["name"]][1] for v in weights if v.params["name"] in reader.uses}
    frozen.update({n: r for n, r in reader.state.static_uses.items() if n in reader.data})
    frozen.update(
        dict.fromkeys(reader.record.lost, "not in the file: its exporter folded it into others, or dropped it")
    )
    result = Graph(
        inputs=(*inputs, *weights),
        outputs=outputs,
        name=reader.graph.name or "graph",
        tensors={k: v for k, v in reader.tensors.items() if id(v) in reached},
        roles={o: Role("output") for o in outputs},
        data={v.params["name"]: reader.data[v.params["name"]] for v in weights},
        constraints=(*forced, *reader.state.constraints.values()),
        info={
            "model": reader.model, "path": name, "base": reader.base, "opset": opsets.get("", 0), "frozen": frozen,
            "declared_inputs": tuple(i.name for i in reader.graph.input), **reader.state.records,
        },
    )  # fmt: skip
    decided = {n for n in reader.state.static_uses if n in result.data}
    return frozen_inputs(result, decided) if decided else result


def frozen_inputs(graph: Graph, names: set[str]) -> Graph:
    """The graph with these parameters in the role `frozen`."""

    def make(node: Value, operands: tuple[Value, ...]) -> Value:
        if node.primitive.name == "input" and node.params["name"] in names:
            return p.input(node.params["name"], TensorType(node.dtype, node.shape), role="frozen")
        return current().add(node.primitive, operands, node.params)

    return rebuild(graph, make)


def _classify(graph: GraphProto, scope: Scope, reader: Reader) -> None:
    """Which stored tensors are no weights, by the operands they serve. One that is a weight elsewhere is split in two, as exporters merge equal ones."""
    for split in reader.record.splits:
        _split_off(scope, reader, split)
    serves: dict[str, set[tuple[str, str, str]]] = {}
    weights: set[str] = set()
    for node in graph.node:
        for i, name in enumerate(reader.operands(node)):
            if name in scope.entries and name not in node.output:
                use = USES.get((node.op_type, i)) if node.domain in USE_DOMAINS else None
                if use is None:
                    weights.add(name)
                else:
                    serves.setdefault(name, set()).add(use)
        weights.update(n for n in free_names(node) if n not in node.input)
    for name, uses in serves.items():
        if len(uses) == 1 and name not in weights:
            role, _, reason = next(iter(uses))
            reader.uses[name] = (role, reason)
        else:
            _split(graph, scope, reader, name)
    for name, reason in reader.record.no_weights.items():
        reader.uses.setdefault(name, ("frozen", reason))


def _split(graph: GraphProto, scope: Scope, reader: Reader, name: str) -> None:
    """Give each operand that is no weight a tensor of its own."""
    for node in graph.node:
        for i, operand in enumerate(reader.operands(node)):
            use = USES.get((node.op_type, i)) if operand == name and node.domain in USE_DOMAINS else None
            if use is None:
                continue
            role, suffix, reason = use
            own = f"{node.name or node.output[0]}.{suffix}"
            _split_off(scope, reader, Split(own, name, node.output[0], i))
            reader.uses[own] = (role, reason)


def _split_off(scope: Scope, reader: Reader, split: Split) -> None:
    stored = scope.entries.get(split.stored)
    if isinstance(stored, _Stored):
        serves = reader.serves.get(split.own, stored.serves)
        scope.entries[split.own] = _Stored(split.own, stored.constant, serves, NO_NAME.fullmatch(split.own) is not None)
        reader.renamed[split.output, split.place] = split.own
        reader.state.record("split", tuple(split))


def _input(info: onnx.ValueInfoProto, scope: Scope, reader: Reader) -> Value | None:
    kind = info.type.WhichOneof("value")
    if kind != "tensor_type":
        scope.entries[info.name] = POISON
        found = (kind or "value without type").replace("_type", "")
        reader.blame(f"input {info.name!r} is {'an' if found[0] in 'aeiou' else 'a'} {found}, not a tensor")
        return None
    tensor = info.type.tensor_type
    try:
        dtype = dtype_of_onnx(tensor.elem_type)
    except (PullbackError, KeyError, TypeError) as error:
        scope.entries[info.name] = POISON
        reader.blame(f"input {info.name!r}: {error}")
        return None
    if not tensor.HasField("shape"):
        scope.entries[info.name] = POISON
        reader.blame(f"input {info.name!r} has no shape: its rank must be known")
        return None
    shape = []
    for axis, d in enumerate(tensor.shape.dim):
        size: Dim = d.dim_value if d.WhichOneof("value") == "dim_value" else 0
        if _anonymous(d):
            size = dim(f"{info.name}_{axis}")
        elif d.WhichOneof("value") == "dim_param":
            size = dim(d.dim_param)
        shape.append(substitute(size, reader.bindings))
    value = p.input(info.name, TensorType(dtype, tuple(shape)), role="input")
    scope.entries[info.name] = value
    return value
