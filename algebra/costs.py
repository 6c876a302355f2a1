"""Symbolic costs: floating operations and bytes of every node, as expressions in the model's dims."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .dims import Dim, dmax, product, simplest
from .graph import Graph, Value
from .types import TensorType, TupleType

__all__ = ["Cost", "bytes_of", "cost", "flops_of"]

FREE = {
    "input", "literal", "dim", "iota", "broadcast", "reshape", "transpose", "slice", "reverse", "pad", "concat", "window", "gather", "item",
    "cast", "stop_gradient", "select", "argmax", "argsort", "bit_cast", "nonzero",
}  # fmt: skip
"""Primitives that move elements, or compare them, without floating operations."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Totals of a graph. `flops`: floating operations, a multiply-add counts two. `parameters`: trained and frozen elements. `activations`: bytes of
    every intermediate together, so an upper bound of what a step keeps."""

    flops: Dim
    parameters: Dim
    parameter_bytes: Dim
    activation_bytes: Dim


def flops_of(node: Value) -> Dim:
    """Floating operations of one node: `2 * result * contracted` of a dot, one per operand element of a reduction, one per element elsewhere.

    A scan costs as often as it runs what its body does, a cond its dearer branch, a while one step.

    >>> from pullback.algebra import primitives as p
    >>> from pullback.algebra.dims import dim
    >>> from pullback.algebra.graph import building
    >>> from pullback.algebra.types import f32, tensor
    >>> with building():
    ...     x, w = p.input("x", tensor(f32, (dim("N"), 4))), p.input("w", tensor(f32, (4, 3)))
    ...     flops_of(p.dot(x, w, contract=((1,), (0,))))
    24*N
    """
    name, params = node.primitive.name, node.params
    match name:
        case "scan":
            return simplest(params["length"] * _of_all(params["body"]))
        case "cond":
            return dmax(_of_all(params["then"]), _of_all(params["otherwise"]))
        case "while":  # once: how often is not known
            return simplest(_of_all(params["test"]) + _of_all(params["body"]))
    if name in FREE or isinstance(node.type, TupleType) or not node.dtype.floating:
        return 0
    if name == "dot":
        contracted = product(node.operands[0].shape[a] for a in node.params["contract"][0])
        return simplest(2 * product(node.shape) * contracted)
    largest = node.operands[0] if name.startswith("reduce") or name in ("fold", "scatter_add") else node
    return product(largest.shape)


def _of_all(graph: Graph) -> Dim:
    return _total(map(flops_of, graph.nodes))


def bytes_of(type_: TensorType | TupleType) -> Dim:
    """Bytes of a tensor of this type; below a byte per element, packed."""
    if isinstance(type_, TupleType):
        return _total(bytes_of(t) for t in type_.items)
    size = product(type_.shape)
    bits = type_.dtype.bits
    return simplest(size * (bits // 8)) if bits >= 8 else -(-size * bits // 8)


def _total(dims: Iterable[Dim]) -> Dim:
    """The sum; equal terms are added as one, so that a deep model stays cheap."""
    static, counts = 0, dict[Dim, int]()
    for d in dims:
        if isinstance(d, int):
            static += d
        else:
            counts[d] = counts.get(d, 0) + 1
    total: Dim = static
    for d, n in counts.items():
        total = total + n * d
    return simplest(total)


def cost(graph: Graph) -> Cost:
    """The totals of a graph."""
    weights = graph.by_role("parameter", "frozen")
    return Cost(
        flops=_of_all(graph),
        parameters=_total(product(v.shape) for v in weights),
        parameter_bytes=_total(bytes_of(v.type) for v in weights),
        activation_bytes=_total(
            bytes_of(v.type)
            for v in graph.nodes
            if v.primitive.name != "input" and not isinstance(v.type, TupleType)  # its items count
        ),
    )
