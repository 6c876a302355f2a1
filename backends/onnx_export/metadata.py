"""What a written model says of itself: of each node its phase, source and primitive, of the whole its signature."""

from __future__ import annotations

from collections.abc import Mapping

from ...algebra.graph import Graph, Value
from ...algebra.passes import default as simplified
from ...algebra.signature import Signature
from ...algebra.types import DType, TupleType
from ..restore import EVALUATION, OTHERWISE, carried, packed
from .targets import Target, all_nodes

__all__ = [
    "PHASE",
    "PRIMITIVE",
    "SIGNATURE",
    "SOURCE",
    "model_metadata",
    "node_metadata",
    "original_metadata",
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


def original_metadata(graph: Graph) -> dict[str, str]:
    """The inference model that a training step came from, so that trained weights can go back into it; and, where the step computes otherwise than
    inference, its evaluation graph without the weights."""
    info = graph.info
    if info.get("kind") != "step":
        return {}
    props: dict[str, str] = {}
    if "model" in info:
        held = {v.params["name"] for v in graph.inputs if v.params["name"] in graph.data}
        props |= carried(info["model"], held, split=info.get("split", ()), base=info.get("base"))
    evaluation = info.get("evaluation")
    training = info.get("training", {})
    if isinstance(evaluation, Graph) and any(training.get(k) for k in OTHERWISE):
        from .emit import to_onnx

        props |= packed(EVALUATION, to_onnx(simplified(evaluation), embed="none"))
    return props
