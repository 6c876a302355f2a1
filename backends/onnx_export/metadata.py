"""What a written model says of itself: of each node its phase, source and primitive, of the whole its signature."""

from __future__ import annotations

from collections.abc import Mapping

from ...algebra.graph import Graph, Value
from ...algebra.signature import Signature
from ...algebra.types import DType, TupleType
from .targets import Target, all_nodes

__all__ = [
    "PHASE",
    "PRIMITIVE",
    "SIGNATURE",
    "SOURCE",
    "model_metadata",
    "node_metadata",
    "source_of",
]

PHASE, SOURCE, PRIMITIVE = "pullback.phase", "pullback.source", "pullback.primitive"
SIGNATURE, FLAGS = "pullback.signature", "pullback.flags"


def source_of(value: Value | None, graph_name: str) -> str:
    """`name, op type` of the ONNX node, loss or optimizer that a value serves; the graph's name where it serves none."""
    source = None if value is None else value.origin.source
    if source is None:
        return graph_name
    return f"{source.name}, {source.op_type}" if source.op_type else source.name


def node_metadata(value: Value | None, graph_name: str) -> dict[str, str]:
    """The metadata of a node that computes `value`, alone or with others."""
    return {
        PHASE: "forward" if value is None else value.origin.phase,
        SOURCE: source_of(value, graph_name),
        PRIMITIVE: "dim" if value is None else value.primitive.name,
    }


def model_metadata(graph: Graph, tensors: Mapping[str, str], target: Target) -> dict[str, str]:
    """The metadata of the whole; `tensors` maps the model's own tensor names to those in the file.

    A dtype that is right only where the compiler is told so adds the flags it needs.
    """
    told = {SIGNATURE: Signature.of(graph, tensors).to_json()}
    flags = [target.flags[d] for d in sorted(_dtypes(graph) & set(target.flags), key=repr)]
    return {**told, FLAGS: "; ".join(flags)} if flags else told


def _dtypes(graph: Graph) -> set[DType]:
    types = [t for v in all_nodes(graph) for t in (v.type.items if isinstance(v.type, TupleType) else (v.type,))]
    return {t.dtype for t in types}
