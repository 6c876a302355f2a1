"""Functions: those of the model are inlined before reading, those of ONNX's schemas stand in for an operator without a lowering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import onnx.inliner
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, TypeProto

from ...algebra.dims import show
from ...algebra.errors import Refusal
from .context import Node, Unsupported
from .registry import OUTSIDE, Argument, Tensors, lookup, schema_of

__all__ = ["body_of", "call", "inlined"]

# domains whose operators have no meaning outside of one program, and the way out
FOREIGN = {
    "com.microsoft.nchwc": "in a layout of one processor, as onnxruntime's highest optimisation level writes it; save the model at ORT_ENABLE_EXTENDED",
}


def inlined(model: ModelProto, name: str) -> onnx.GraphProto:
    """The model's graph with its local functions put in place of their calls. The stored tensors stay where they are.

    Without functions it is the model's own graph, of which nothing is copied.
    """
    if not model.functions:
        return model.graph
    light = ModelProto(ir_version=model.ir_version, producer_name=model.producer_name)
    light.opset_import.extend(model.opset_import)
    light.graph.name = model.graph.name or "graph"
    light.graph.node.extend(model.graph.node)
    light.graph.input.extend(model.graph.input)
    light.graph.output.extend(model.graph.output)
    light.functions.extend(model.functions)
    try:
        return onnx.inliner.inline_local_functions(light, convert_version=True).graph
    except (RuntimeError, ValueError, onnx.checker.ValidationError) as error:
        raise Refusal(f"cannot read {name!r}", [f"its local functions cannot be inlined: {error}"]) from error


def unknown(proto: NodeProto, domain: str, opset: int) -> str | None:
    """Why no operands could make this operator one that is lowered, or None."""
    if (domain, proto.op_type) == ("", "Constant") or lookup(proto.op_type, domain, opset) is not None:
        return None
    if (reason := OUTSIDE.get((domain, proto.op_type))) is not None:
        return reason
    schema: Any = schema_of(proto.op_type, domain, opset)
    known = schema is not None and (schema.function_opset_versions or schema.context_dependent_function_opset_versions)
    where = f", {FOREIGN[domain]}" if domain in FOREIGN else ""
    return None if known else f"no lowering for {proto.op_type} at opset {opset}{where}"


def body_of(proto: NodeProto, node: Node, arguments: Sequence[Argument]) -> FunctionProto | None:
    """The function body that ONNX's schema gives an operator, for these operand types; None where there is none."""
    schema: Any = schema_of(node.op_type, node.domain, node.opset)  # onnx's type hints lack some of its methods
    if schema is None:
        return None

    def newest(versions: Sequence[int]) -> int:
        return max((v for v in versions if v <= node.opset), default=0)

    if version := newest(schema.function_opset_versions):
        text = schema.get_function_with_opset_version(version)
    elif version := newest(schema.context_dependent_function_opset_versions):
        types = [_type_proto(a).SerializeToString() for a in arguments]
        text = schema.get_context_dependent_function_with_opset_version(version, proto.SerializeToString(), types)
    else:
        return None
    if isinstance(text, FunctionProto):
        return text
    body = FunctionProto()
    body.ParseFromString(text)
    return body


def _type_proto(argument: Argument) -> TypeProto:
    if argument is None:
        return TypeProto()
    if isinstance(argument, Tensors):
        raise Unsupported("a function body over sequences is not expanded")
    code = onnx.helper.np_dtype_to_tensor_dtype(argument.dtype.numpy)
    return onnx.helper.make_tensor_type_proto(code, [d if isinstance(d, int) else show(d) for d in argument.shape])


def call(body: FunctionProto, proto: NodeProto, node: Node, arguments: Sequence[Argument]) -> tuple[Any, ...]:
    """Lower a function body in place of its call."""
    opsets = {o.domain: o.version for o in body.opset_import} or {node.domain: node.opset}
    inner = node.scope.isolated(node.name, opsets)
    for name, argument in zip(body.input, arguments, strict=False):
        inner.entries[name] = argument
    for name in body.input[len(arguments) :]:
        inner.entries[name] = None
    given = {a.name: a for a in proto.attribute}
    given |= {a.name: a for a in body.attribute_proto if a.name not in given}
    schema = schema_of(node.op_type, node.domain, node.opset)
    if schema is not None:
        given |= {k: a.default_value for k, a in schema.attributes.items() if k not in given and a.default_value.name}
    for statement in body.node:
        bound = NodeProto()
        bound.CopyFrom(statement)
        del bound.attribute[:]
        for attribute in statement.attribute:
            if not attribute.ref_attr_name:
                bound.attribute.append(attribute)
            elif attribute.ref_attr_name in given:
                renamed = AttributeProto()
                renamed.CopyFrom(given[attribute.ref_attr_name])
                renamed.name = attribute.name
                bound.attribute.append(renamed)
        inner.lower(bound)
    return tuple(inner.argument(name) if name in inner else None for name in body.output)
