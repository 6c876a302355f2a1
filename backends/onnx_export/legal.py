"""Whether operators exist in an opset for the dtypes that they get, by ONNX's own schemas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import onnx

from ...algebra.types import DType
from .program import Op

__all__ = ["illegal"]

LATEST = onnx.defs.onnx_opset_version()


def illegal(ops: Sequence[Op], opset: int) -> Iterator[str]:
    """What the opset does not have: an operator, or an operator of a dtype."""
    for op in ops:
        for i, t in enumerate(op.inputs):
            if t is None:
                continue
            taken = _taken(op.type, i, opset)
            if taken is None:
                yield f"{_where(op)}: opset {opset} has no {op.type}"
            elif _type_name(t.dtype) not in taken:
                first = next(
                    (o for o in range(opset + 1, LATEST + 1) if _type_name(t.dtype) in (_taken(op.type, i, o) or ())),
                    None,
                )
                later = f", but from {first} on" if first else ""
                yield f"{_where(op)}: {op.type} takes no {t.dtype} in opset {opset}{later}"
        for body in op.bodies.values():
            yield from illegal(body.ops, opset)


def _where(op: Op) -> str:
    source = None if op.serves is None else op.serves.origin.source
    return str(source) if source else f"node {op.name!r}"


@lru_cache(maxsize=4096)
def _taken(op_type: str, at: int, opset: int) -> frozenset[str] | None:
    """The types that an operator takes as operand `at`; None where there is no such operator."""
    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    if not schema.inputs:
        return frozenset()
    named = schema.inputs[min(at, len(schema.inputs) - 1)].type_str  # a type, or the name of a constraint
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    return frozenset(allowed.get(named, [named]))


_NAMES = {"f64": "double", "f32": "float", "f16": "float16", "bf16": "bfloat16", "bool": "bool"}


@lru_cache(maxsize=64)
def _type_name(dtype: DType) -> str:
    named = _NAMES.get(dtype.name)
    if named is None:
        number = onnx.helper.np_dtype_to_tensor_dtype(dtype.numpy)
        named = onnx.TensorProto.DataType.Name(number).lower()
    return f"tensor({named})"
