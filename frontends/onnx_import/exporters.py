"""What PyTorch's exporters tell of the tensors that they stored: which are parameters, and which of them were merged.

Both exporters merge tensors that are equal when they export. In a network as its constructor left it, the scales of all norms are ones and their biases
zeros, which then come out as one tensor each, and would be trained as one. The older exporter leaves an `Identity` under each name that it took away. The
newer one leaves the network's signature, what each folded tensor was computed from, and in every node the call that the node was made from.

Only tensors whose elements are all equal are told apart here: others that are equal are the same weight, used in several places.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto

from ...algebra.copies import NO_NAME
from ...algebra.graph import Constant

__all__ = ["Record", "Split", "recorded"]

SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
CALL = "pkg.torch.onnx.fx_node"
FOLDED = "pkg.onnxscript.optimizer.folded_from"
_LINE = re.compile(r"^(\w+): (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']*)'", re.MULTILINE)
_ARGUMENT = re.compile(r"%(\w+)")
_NETWORK = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_REASONS = {
    "BUFFER": "a buffer of the network, by its exporter's record",
    "CONSTANT_TENSOR": "a constant in the network's code, by its exporter's record",
}


class Split(NamedTuple):
    """One use of a stored tensor under a name of its own: that name, the stored tensor's, the first output of the node that uses it, and where."""

    own: str
    stored: str
    output: str
    place: int


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of a graph's stored tensors: uses to be told apart, names that are no weights and why, and what of the network is not in the file.

    `weights` are sure to be parameters, or computed from some; `merged` has tensors that stand for several parameters, or seem to, and for what; `lost`
    parameters that the network uses and the file lacks. `places` has the tensors that hold a parameter or were computed from it, where there are several.
    """

    splits: tuple[Split, ...] = ()
    no_weights: Mapping[str, str] = field(default_factory=dict)
    merged: Mapping[str, str] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    weights: frozenset[str] = frozenset()
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def recorded(model: ModelProto, stored: Mapping[str, Constant], untied: Collection[str] = ()) -> Record:
    """What the exporter of a model recorded of these tensors, and of those in `untied` each use by itself.

    Where another program wrote the file, or the record was lost, what looks merged is in `merged`.
    """
    uniform = _Uniform({n: c for n, c in stored.items() if n not in untied})
    record = _record(model, uniform)
    apart = tuple(_uses_apart(model.graph, untied))
    return replace(record, splits=(*record.splits, *apart))


def _record(model: ModelProto, uniform: _Uniform) -> Record:
    signature = next((p.value for p in model.graph.metadata_props if p.key == SIGNATURE), None)
    if signature is None:
        splits = tuple(_identities(model.graph, uniform))
        suspects = {} if splits else _suspects(model.graph, uniform)  # where one name is left, all are
        return Record(splits, merged=suspects, weights=frozenset(_numbers(model, uniform.stored)))
    functions = {(f.domain, f.name) for f in model.functions}
    nodes = [n for n in model.graph.node if (n.domain, n.op_type) not in functions]
    return _Signature(signature, model.graph, nodes, uniform).record()


class _Uniform:
    """Whether all elements of a stored tensor are equal; each is read at most once."""

    def __init__(self, stored: Mapping[str, Constant]) -> None:
        self.stored = stored
        self.found: dict[str, bool] = {}

    def __call__(self, name: str) -> bool:
        if name not in self.found:
            self.found[name] = False
            with suppress(ValueError):  # a damaged tensor is blamed where it is used
                array = np.asarray(self.stored[name].array) if name in self.stored else np.zeros(0)
                self.found[name] = array.ndim > 0 and array.size > 0 and bool((array == array.flat[0]).all())
        return self.found[name]


def _identities(graph: GraphProto, uniform: _Uniform) -> Iterator[Split]:
    """The parameters of which the older exporter left the name."""
    outputs = {o.name for o in graph.output}
    for node in graph.node:
        if node.op_type == "Identity" and node.domain in ("", "ai.onnx") and uniform(node.input[0]):
            (name,) = node.output
            if name not in outputs:
                yield Split(name, node.input[0], name, 0)


# scales and biases, of which a layer has its own
_OWN = {
    "BatchNormalization": (1, 2), "Conv": (2,), "ConvTranspose": (2,), "Gemm": (2,), "GroupNormalization": (1, 2), "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2), "RMSNormalization": (1,), "SimplifiedLayerNormalization": (1,),
}  # fmt: skip


def _suspects(graph: GraphProto, uniform: _Uniform) -> dict[str, str]:
    """Tensors that several layers share and whose elements are all equal. Nodes with one matrix are one layer, used again."""
    layers: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for node in graph.node:
        for i in _OWN.get(node.op_type, ()):
            if i < len(node.input) and node.input[i] in uniform.stored:
                matrices = tuple(n for n in node.input if n in uniform.stored and len(uniform.stored[n].shape) > 1)
                layers[node.input[i]].add(matrices or tuple(node.output))
    return {
        name: f"a scale or a bias of {len(of)} layers" for name, of in layers.items() if len(of) > 1 and uniform(name)
    }


def _uses_apart(graph: GraphProto, untied: Collection[str]) -> Iterator[Split]:
    """Every use of these tensors but the first, each under a name of its own."""
    seen: set[str] = set()
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name in seen:
                yield Split(f"{node.name or node.output[0]}.{name}", name, node.output[0], i)
            elif name in untied:
                seen.add(name)


def _numbers(model: ModelProto, stored: Mapping[str, Constant]) -> Iterator[str]:
    """Parameters of one number: the older exporter gives names of the network to nothing else. Nodes of the newer one have names of their own kind."""
    if model.producer_name == "pytorch" and not any(node.name.startswith("node_") for node in model.graph.node):
        yield from (n for n, c in stored.items() if not c.shape and _NETWORK.fullmatch(n) and not NO_NAME.fullmatch(n))


@dataclass(slots=True)
class _Signature:
    """The newer exporter's record of one graph."""

    text: str
    graph: GraphProto
    nodes: Sequence[NodeProto]
    uniform: _Uniform

    def record(self) -> Record:
        found = [m.groups() for m in _LINE.finditer(self.text)]
        target = {placeholder: name for placeholder, _, name in found}
        kinds = {name: kind for _, kind, name in found}
        folded = {
            v.name: names
            for v in self.graph.value_info
            if (names := _folded(v)) is not None and v.name in self.uniform.stored
        }
        gone = set(kinds) - set(self.uniform.stored) - {n for names in folded.values() for n in names}
        taken = {o for node in self.graph.node for o in node.output} | {i.name for i in self.graph.input}
        splits: list[Split] = []
        merged: dict[str, set[str]] = defaultdict(set)
        lost: set[str] = set()
        constants: list[str] = []
        for call, nodes in self._calls().items():
            wanted = list(dict.fromkeys(target[a] for a in _ARGUMENT.findall(call) if a in target))
            missing = [w for w in wanted if w in gone]
            uses = [
                Split("", name, node.output[0], i)
                for node in nodes
                for i, name in enumerate(node.input)
                if name in self.uniform.stored
            ]
            neutral = _neutral(uses, nodes) if ".group_norm." in call else []
            uses = [u for u in uses if u not in neutral]
            for use in neutral:
                if use.stored in kinds:
                    own = f"{use.output}.{use.place}"
                    splits.append(use._replace(own=own))
                    constants.append(own)
            if not missing:
                continue
            pairs = [(use, name) for use, name in self._matched(uses, wanted, missing) if name not in taken]
            splits += [use._replace(own=name) for use, name in pairs if name in gone]
            unsaid = {m for m in missing if kinds[m] == "PARAMETER"} - {name for _, name in pairs}
            known = {use for use, _ in pairs}
            candidates = {
                u.stored for u in uses if u not in known and u.stored not in wanted and self.uniform(u.stored)
            }
            for name in candidates:
                merged[name] |= unsaid
            lost |= set() if candidates else unsaid
        no_weights = {n: _REASONS[k] for n, k in kinds.items() if k in _REASONS}
        for name, names in folded.items():
            if not any(kinds.get(n) == "PARAMETER" for n in names):
                no_weights[name] = "computed from no parameter, by its exporter's record"
        no_weights.update(
            dict.fromkeys(constants, "a neutral scale or bias, where a group norm is written with an instance norm")
        )
        merged = {n: names for n, names in merged.items() if names}
        made: dict[str, list[str]] = defaultdict(list)
        for stored in self.uniform.stored:
            for name in {stored, *folded.get(stored, ())}:
                made[name].append(stored)
        places = {n: tuple(made[n]) for n, kind in kinds.items() if kind == "PARAMETER"}
        return Record(
            tuple(splits),
            {n: reason for n, reason in no_weights.items() if n not in merged},
            {n: f"parameters of its network ({', '.join(sorted(names))})" for n, names in merged.items()},
            tuple(sorted(lost - {s.own for s in splits} - {n for names in merged.values() for n in names})),
            frozenset(
                n for n in self.uniform.stored if "PARAMETER" in (kinds.get(n), *map(kinds.get, folded.get(n, ())))
            ),
            {n: found for n, found in places.items() if len(found) > 1},
        )

    def _calls(self) -> dict[str, list[NodeProto]]:
        """The nodes that were made from each call in the network."""
        found: dict[str, list[NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for p in node.metadata_props:
                if p.key == CALL:
                    found[p.value].append(node)
        return found

    def _matched(self, uses: Sequence[Split], wanted: Sequence[str], missing: Sequence[str]) -> list[tuple[Split, str]]:
        """Which tensor of the call each use is, where that is sure: nodes take what the call was given in the call's order."""
        uses = [u for u in uses if u.stored in wanted or self.uniform(u.stored)]
        present = [w for w in wanted if w in missing or w in self.uniform.stored]
        if len(uses) == len(present):
            pairs = list(zip(uses, present, strict=True))
            if all(name in missing or name == use.stored for use, name in pairs):
                return [(use, name) for use, name in pairs if self.uniform(use.stored)]
        others = [u for u in uses if u.stored not in wanted]
        if len({u.stored for u in others}) == len(missing) == 1:
            return [(use, missing[0]) for use in others]
        return []


def _neutral(uses: Sequence[Split], nodes: Sequence[NodeProto]) -> list[Split]:
    """The uses in a group norm that are no tensors of the network.

    It is written as an instance norm over the groups, with ones and zeros for its scale and bias, and the network's own come after it.
    """
    inner = {n.output[0] for n in nodes if n.op_type == "InstanceNormalization"}
    return [u for u in uses if u.output in inner and u.place in (1, 2)]


def _folded(value: ValueInfoProto) -> list[str] | None:
    """The names of what a folded tensor was computed from; None where it was not."""
    for p in value.metadata_props:
        if p.key == FOLDED:
            with suppress(ValueError, SyntaxError):
                return [str(n) for n in ast.literal_eval(p.value)]
    return None
