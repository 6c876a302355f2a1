"""Whether a written model keeps the rules of its profile and target: the list of operators, the forms, the metadata.

It reads the model and knows nothing of how it was made, so it holds for any file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import onnx
from onnx import TensorProto, numpy_helper

from .metadata import PHASE, PRIMITIVE, SOURCE
from .tables import ALLOWED
from .targets import Target, target_named

__all__ = ["FORBIDDEN", "NEVER", "check"]

# What the explicit profile is there to avoid; not in ALLOWED either, listed for a clearer message.
NEVER = frozenset(
    {
        "AveragePool", "BatchNormalization", "Clip", "Conv", "ConvTranspose", "Dropout", "Einsum", "GatherElements", "Gelu", "Gemm", "GroupNormalization",
        "LayerNormalization", "LogSoftmax", "MaxPool", "ReduceMean", "Relu", "Sigmoid", "Softmax", "SoftmaxCrossEntropyLoss",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scope:
    """What a node can see: constants by name, element types by name."""

    constants: Mapping[str, TensorProto]
    types: Mapping[str, int]
    inputs: frozenset[str]


Form = Callable[[onnx.NodeProto, Scope], bool]


def _attribute(node: onnx.NodeProto, name: str, default: object = None) -> object:
    for a in node.attribute:
        if a.name == name:
            return onnx.helper.get_attribute_value(a)
    return default


def _values(node: onnx.NodeProto, at: int, scope: Scope) -> list[int] | None:
    """The numbers of an operand that is a constant; empty where it is not given, None where it is computed."""
    if len(node.input) <= at or not node.input[at]:
        return []
    held = scope.constants.get(node.input[at])
    return None if held is None else [int(x) for x in numpy_helper.to_array(held).ravel()]


def _adding_scatter(node: onnx.NodeProto, scope: Scope) -> bool:
    return node.op_type in ("ScatterND", "ScatterElements") and _attribute(node, "reduction", b"none") != b"none"


def _negative_pad(node: onnx.NodeProto, scope: Scope) -> bool:
    return node.op_type == "Pad" and any(n < 0 for n in _values(node, 1, scope) or ())


def _pad_axes(node: onnx.NodeProto, scope: Scope) -> bool:
    return node.op_type == "Pad" and len(node.input) > 3 and bool(node.input[3])


def _squeeze_all(node: onnx.NodeProto, scope: Scope) -> bool:
    return node.op_type == "Squeeze" and len(node.input) < 2


def _computed_axes(node: onnx.NodeProto, scope: Scope) -> bool:
    at = {"Slice": 3, "Squeeze": 1, "Unsqueeze": 1}.get(node.op_type, 1 if node.op_type.startswith("Reduce") else None)
    return at is not None and _values(node, at, scope) is None


def _negative_step(node: onnx.NodeProto, scope: Scope) -> bool:
    return node.op_type == "Slice" and any(n < 0 for n in _values(node, 4, scope) or ())


def _bool_cast(node: onnx.NodeProto, scope: Scope) -> bool:
    return node.op_type == "Cast" and scope.types.get(node.input[0]) == TensorProto.BOOL


def _self_comparison(node: onnx.NodeProto, scope: Scope) -> bool:
    return node.op_type in ("Equal", "LessOrEqual", "Less") and node.input[0] == node.input[1]


def _overridable(node: onnx.NodeProto, scope: Scope) -> bool:
    return any(name in scope.constants and name in scope.inputs for name in node.input)


def _ambiguous_reshape(node: onnx.NodeProto, scope: Scope) -> bool:
    return node.op_type == "Reshape" and (_values(node, 1, scope) or []).count(-1) > 1


def _backward_scan(node: onnx.NodeProto, scope: Scope) -> bool:
    directions = (_attribute(node, f"scan_{end}_directions") for end in ("input", "output"))
    return node.op_type == "Scan" and any(isinstance(d, list) and any(d) for d in directions)


def _bfloat16(node: onnx.NodeProto, scope: Scope) -> bool:
    return any(scope.types.get(name) == TensorProto.BFLOAT16 for name in (*node.input, *node.output))


EVERYWHERE: dict[str, Form] = {
    "Pad with a negative amount": _negative_pad,
    "axes that are computed": _computed_axes,
    "Squeeze without axes": _squeeze_all,
    "Reshape with more than one -1": _ambiguous_reshape,
}
_COMPILERS: dict[str, Form] = {
    "an initializer that is also an input": _overridable,
    "Cast of a bool": _bool_cast,
    "Scan that runs backwards": _backward_scan,
}

# Forms that a target must not get, each with the function that finds it.
FORBIDDEN: dict[str, dict[str, Form]] = {
    "onnxruntime": {},
    "onnx-mlir": {
        **_COMPILERS,
        "Scatter with a reduction": _adding_scatter,
        "Pad with axes": _pad_axes,
        "bfloat16": _bfloat16,
    },
    "torch-mlir": {
        **_COMPILERS,
        "Scatter with a reduction": _adding_scatter,
        "Slice with a negative step": _negative_step,
        "a comparison with itself": _self_comparison,
    },
    "iree": {
        **_COMPILERS,
        "Slice with a negative step": _negative_step,
        "a comparison with itself": _self_comparison,
    },
}


def check(model: onnx.ModelProto, profile: str = "explicit", target: str = "onnxruntime") -> list[str]:
    """Everything in which a model breaks the rules; empty where it breaks none."""
    chosen = target_named(target)
    problems = list(_model_problems(model, chosen))
    forms = {**EVERYWHERE, **FORBIDDEN[chosen.name]}
    problems += _graph_problems(model.graph, profile, forms, Scope({}, {}, frozenset()), set())
    return problems


def _model_problems(model: onnx.ModelProto, target: Target) -> Iterator[str]:
    domains = [o.domain for o in model.opset_import]
    if domains != [""]:
        yield f"the default domain alone is required, found opsets of {domains}"
    if model.functions:
        yield f"no local functions are allowed, found {[f.name for f in model.functions]}"


def _graph_problems(
    graph: onnx.GraphProto, profile: str, forms: Mapping[str, Form], around: Scope, named: set[str]
) -> Iterator[str]:
    infos = {v.name: v for v in (*graph.value_info, *graph.input, *graph.output)}
    types = {name: v.type.tensor_type.elem_type for name, v in infos.items()}
    scope = Scope(
        {**around.constants, **{t.name: t for t in graph.initializer}},
        {**around.types, **{t.name: t.data_type for t in graph.initializer}, **types},
        around.inputs | {v.name for v in graph.input},
    )
    for node in graph.node:
        yield from _node_problems(node, profile, forms, scope, named)
        for name in node.output:
            if name and (name not in infos or not infos[name].type.tensor_type.HasField("shape")):
                yield f"node {node.name!r} ({node.op_type}): {name!r} has no value_info with a shape"
        for a in node.attribute:
            if a.type == onnx.AttributeProto.GRAPH:
                yield from _graph_problems(a.g, profile, forms, scope, named)


def _node_problems(
    node: onnx.NodeProto, profile: str, forms: Mapping[str, Form], scope: Scope, named: set[str]
) -> Iterator[str]:
    where = f"node {node.name!r} ({node.op_type})"
    if not node.name or node.name in named:
        yield f"{where}: a name of its own is required"
    named.add(node.name)
    if node.domain not in ("", "ai.onnx"):
        yield f"{where}: domain {node.domain!r}"
    if profile == "explicit" and node.op_type not in ALLOWED:
        yield f"{where}: not an operator of the explicit profile"
    told = {p.key for p in node.metadata_props}
    for key in (PHASE, SOURCE, PRIMITIVE):
        if key not in told:
            yield f"{where}: no {key} in its metadata"
    for form, present in forms.items():
        if present(node, scope):
            yield f"{where}: {form}"
