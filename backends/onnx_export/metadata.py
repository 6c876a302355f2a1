"""What a written model says of itself: of each node its phase, source and primitive, of what enters, leaves or is the model's own its role, of the
whole its signature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from onnx import ModelProto, NodeProto, ValueInfoProto

from ...algebra import primitives as p
from ...algebra.graph import Graph, Role, Value, current, rebuild
from ...algebra.origin import PHASES, Origin, Source
from ...algebra.signature import Entry, Signature
from ...algebra.types import DType, TensorType, TupleType
from .targets import Target, all_nodes

__all__ = [
    "PARAMETER",
    "PHASE",
    "PRIMITIVE",
    "ROLE",
    "SIGNATURE",
    "SOURCE",
    "as_told",
    "mark",
    "model_metadata",
    "node_metadata",
    "roles",
    "source_of",
    "summary",
]

PHASE, SOURCE, PRIMITIVE = "pullback.phase", "pullback.source", "pullback.primitive"
ROLE, PARAMETER = "pullback.role", "pullback.parameter"
SIGNATURE, FLAGS = "pullback.signature", "pullback.flags"
KINDS = {
    "step": "a training step",
    "gradients": "loss and gradients of a training step",
    "apply": "the update of a training step",
    "evaluation": "loss and outputs in inference mode",
}


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


def roles(signature: Signature) -> dict[str, Entry]:
    """Tensor in the file -> what it is for: inputs, outputs, and the activations between them."""
    inside = {e.tensor or e.name: e for e in signature.activations}
    return inside | {e.name: e for e in (*signature.inputs, *signature.outputs)}


def mark(info: ValueInfoProto, entry: Entry | None) -> ValueInfoProto:
    """The same description of a tensor, which now says its role: in words for people, as metadata for programs."""
    if entry is not None:
        info.doc_string = _words(entry)
        info.metadata_props.add(key=ROLE, value=entry.role)
        if entry.parameter is not None:
            info.metadata_props.add(key=PARAMETER, value=entry.parameter)
    return info


def _words(entry: Entry) -> str:
    match entry.role:
        case "gradient" if entry.parameter is not None:
            return f"gradient of {entry.parameter}"
        case "update" | "state" if entry.replaces is not None:
            return f"{entry.role}: the next {entry.replaces}"
        case "slot" if entry.slot is not None:
            return f"slot: {entry.slot} of {entry.parameter}"
        case "activation" if entry.tensor is not None:
            return f"activation: {entry.name}"
    return entry.role


def summary(signature: Signature, graph_name: str, nodes: Iterable[NodeProto]) -> str:
    """What the graph is, in three lines: kind, losses and optimizer; how many nodes each phase has; where each of them says more."""
    phases = Counter(e.value for node in nodes for e in node.metadata_props if e.key == PHASE)
    losses = [str(term["name"]) for term in signature.loss.get("terms", [signature.loss]) if "name" in term]
    optimizers = [str(signature.optimizer["name"])] if "name" in signature.optimizer else []
    return "\n".join([
        "; ".join([f"{graph_name}: {KINDS.get(signature.kind, 'a graph')}", *(f"loss {n}" for n in losses), *(f"optimizer {n}" for n in optimizers)]),
        f"nodes: {', '.join(f'{phases[phase]} {phase}' for phase in PHASES if phases[phase]) or 'none'}",
        f"metadata: of nodes {PHASE}, {SOURCE}, {PRIMITIVE}; of inputs, outputs and activations {ROLE}; of the model {SIGNATURE}",
    ])  # fmt: skip


def model_metadata(graph: Graph, signature: Signature, target: Target) -> dict[str, str]:
    """The metadata of the whole.

    A dtype that is right only where the compiler is told so adds the flags it needs.
    """
    told = {SIGNATURE: signature.to_json()}
    flags = [target.flags[d] for d in sorted(_dtypes(graph) & set(target.flags), key=repr)]
    return {**told, FLAGS: "; ".join(flags)} if flags else told


def as_told(graph: Graph, model: ModelProto) -> Graph:
    """A graph that was read from a model, with what this one says of itself: the phases and sources of its nodes, the roles of inputs and outputs.

    Read as any other model it would be a forward pass all through, and an optimizer's slots weights. The same graph where the model says nothing.
    """
    text = next((e.value for e in model.metadata_props if e.key == SIGNATURE), None)
    if text is None:
        return graph
    signature = Signature.from_json(text)
    origins = {node.name: _origin(node) for node in model.graph.node}
    entering = {e.name: e.role for e in signature.inputs}

    def make(node: Value, operands: tuple[Value, ...]) -> Value:
        if node.primitive.name == "input":
            name, role = node.params["name"], node.params["role"]
            return p.input(name, TensorType(node.dtype, node.shape), entering.get(name, role))
        source = node.origin.source
        current().origin = origins.get(source.name, node.origin) if source else node.origin
        return current().add(node.primitive, operands, node.params)

    told = {e.name: Role(e.role, e.parameter) for e in signature.inputs if e.parameter not in (None, e.name)}
    told |= {e.name: Role(e.role, e.parameter) for e in signature.outputs if e.name in graph.outputs}
    return replace(rebuild(graph, make), roles={**graph.roles, **told})


def _origin(node: NodeProto) -> Origin:
    said = {e.key: e.value for e in node.metadata_props}
    name, _, op_type = said.get(SOURCE, node.name).rpartition(", ")
    return Origin(said.get(PHASE, "forward"), Source(name or op_type, op_type if name else ""))


def _dtypes(graph: Graph) -> set[DType]:
    types = [t for v in all_nodes(graph) for t in (v.type.items if isinstance(v.type, TupleType) else (v.type,))]
    return {t.dtype for t in types}
