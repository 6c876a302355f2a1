"""Parts of a written model: only some outputs, and only what they need."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from onnx import AttributeProto, ModelProto, NodeProto

__all__ = ["trimmed"]


def _reads(node: NodeProto) -> Iterator[str]:
    yield from node.input
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            for inner in attribute.g.node:
                yield from _reads(inner)
            yield from (o.name for o in attribute.g.output)


def trimmed(model: ModelProto, outputs: Collection[str]) -> ModelProto:
    """The model with only these outputs (all of them without any), and the nodes, inputs and initializers on the way to them."""
    outputs = outputs or [o.name for o in model.graph.output]
    needed = set(outputs)
    kept = []
    for node in reversed(model.graph.node):
        if any(o in needed for o in node.output):
            kept.append(node)
            needed.update(_reads(node))
    new = ModelProto(ir_version=model.ir_version, producer_name=model.producer_name)
    new.opset_import.extend(model.opset_import)
    graph = new.graph
    graph.name = model.graph.name
    graph.node.extend(reversed(kept))
    graph.input.extend(i for i in model.graph.input if i.name in needed)
    graph.output.extend(o for o in model.graph.output if o.name in outputs)
    graph.initializer.extend(t for t in model.graph.initializer if t.name in needed)
    return new
