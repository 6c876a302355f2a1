"""Weights that an exporter wrote twice are one weight again; read as two they would be trained apart."""

from __future__ import annotations

from pathlib import Path

from onnx import ModelProto, TensorProto, helper

from ...algebra.copies import copies
from .tensors import constant_of

__all__ = ["tied"]

FLOATING = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def tied(model: ModelProto, base: Path | None) -> ModelProto:
    """The model with one stored matrix instead of several that are equal or each other's transposes, the others computed from it."""
    given = {i.name for i in model.graph.input}
    stored = {
        t.name: constant_of(t, base)
        for t in model.graph.initializer
        if len(t.dims) == 2 and t.data_type in FLOATING and t.name not in given
    }
    found = copies(stored)
    if not found:
        return model
    new = ModelProto()
    new.CopyFrom(model)
    kept = [t for t in new.graph.initializer if t.name not in found]
    nodes = []
    for copy, (source, turned) in found.items():
        node = helper.make_node("Transpose" if turned else "Identity", [source], [copy], name=f"{copy}/tied")
        if turned:
            node.attribute.append(helper.make_attribute("perm", [1, 0]))
        nodes.append(node)
    nodes += new.graph.node
    del new.graph.initializer[:], new.graph.node[:]
    new.graph.initializer.extend(kept)
    new.graph.node.extend(nodes)
    return new
