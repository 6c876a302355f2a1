"""Operators that draw random numbers, as functions of a seed that enters the graph.

The seed is an input of role `seed` with an initial value of 0: the same seed gives the same numbers on every runtime, another seed others. Each
operator draws from a stream of its own, which its attribute `seed` moves.
"""

from __future__ import annotations

import numpy as np

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.dims import Shape, simplest
from ....algebra.graph import Constant, Value
from ....algebra.training.random import bernoulli, normal, uniform
from ....algebra.types import DType, TensorType, bool_, f32, f64, i64
from ..context import Node, Unsupported, reading
from ..registry import Gradient, lowers
from ..tensors import dtype_of_onnx

STREAMS = 1 << 31


def seed_of_graph(node: Node) -> Value:
    """The one seed of the graph, an int64 of rank 0."""
    reader = node.scope.reader
    found = reader.state.records.get("seed")
    if found:
        return reader.stored[found[0]]
    name, n = "seed", 1
    while name in reader.stored or name in node.scope:
        name, n = f"seed_{n}", n + 1
    value = p.input(name, TensorType(i64, ()), role="seed")
    reader.stored[name], reader.data[name] = value, Constant(np.asarray(0, np.int64))
    reading().record("seed", name)
    return value


def stream_of(node: Node, seed: float | None) -> int:
    """The node's own stream, moved by its attribute."""
    reading().record("random", node.name)
    place = len(reading().records["random"]) - 1
    moved = 0 if seed is None else int.from_bytes(np.float32(seed).tobytes(), "little")
    return (place + moved * 8191) % STREAMS


def nothing() -> Value:
    return p.literal(0, i64)


def kept_mask(node: Node, shape: Shape, ratio: float, seed: int) -> Value:
    """A bool tensor, each element true with probability `1 - ratio`."""
    return bernoulli(seed_of_graph(node), nothing(), 1 - ratio, shape=shape, stream=stream_of(node, seed or None))


def drawn_normal(node: Node, shape: Shape, dtype: DType, mean: float, scale: float, seed: float | None) -> Value:
    z = normal(seed_of_graph(node), nothing(), shape=shape, dtype=dtype, stream=stream_of(node, seed))
    return c.plus(c.scale(z, scale), mean)


def drawn_uniform(node: Node, shape: Shape, dtype: DType, low: float, high: float, seed: float | None) -> Value:
    u = uniform(seed_of_graph(node), nothing(), shape=shape, dtype=dtype, stream=stream_of(node, seed))
    return c.plus(c.scale(u, high - low), low)


def shape_of_ints(shape: tuple[int, ...]) -> Shape:
    return tuple(map(simplest, shape))


RANDOM = "random numbers depend on no operand"


@lowers("RandomNormal", since=1, gradient=Gradient.INDEX, reason=RANDOM)
def random_normal(*, dtype: int = 1, mean: float = 0.0, scale: float = 1.0, seed: float | None = None, shape: tuple[int, ...],
                  node: Node) -> Value:  # fmt: skip
    """normal numbers"""
    return drawn_normal(node, shape_of_ints(shape), dtype_of_onnx(dtype), mean, scale, seed)


@lowers("RandomNormalLike", since=1, gradient=Gradient.INDEX, reason=RANDOM)
def random_normal_like(input: Value, *, dtype: int = 0, mean: float = 0.0, scale: float = 1.0, seed: float | None = None,
                       node: Node) -> Value:  # fmt: skip
    """normal numbers in the shape of x"""
    return drawn_normal(node, input.shape, dtype_of_onnx(dtype) if dtype else input.dtype, mean, scale, seed)


@lowers("RandomUniform", since=1, gradient=Gradient.INDEX, reason=RANDOM)
def random_uniform(*, dtype: int = 1, high: float = 1.0, low: float = 0.0, seed: float | None = None, shape: tuple[int, ...],
                   node: Node) -> Value:  # fmt: skip
    """numbers in [low, high)"""
    return drawn_uniform(node, shape_of_ints(shape), dtype_of_onnx(dtype), low, high, seed)


@lowers("RandomUniformLike", since=1, gradient=Gradient.INDEX, reason=RANDOM)
def random_uniform_like(input: Value, *, dtype: int = 0, high: float = 1.0, low: float = 0.0, seed: float | None = None,
                        node: Node) -> Value:  # fmt: skip
    """numbers in [low, high), in the shape of x"""
    return drawn_uniform(node, input.shape, dtype_of_onnx(dtype) if dtype else input.dtype, low, high, seed)


@lowers("Bernoulli", since=15, gradient=Gradient.PIECEWISE, reason="0 or 1")
def bernoulli_(input: Value, *, dtype: int = 0, seed: float | None = None, node: Node) -> Value:
    """1 with probability x, else 0"""
    wide = p.cast(input, dtype=f64 if input.dtype is f64 else f32)
    u = uniform(seed_of_graph(node), nothing(), shape=wide.shape, dtype=wide.dtype, stream=stream_of(node, seed))
    to = dtype_of_onnx(dtype) if dtype else input.dtype
    hit = p.less(u, wide)
    return hit if to is bool_ else c.as_number(hit, to)


@lowers("Multinomial", since=7, gradient=Gradient.INDEX, reason="an index")
def multinomial(input: Value, *, dtype: int = 6, sample_size: int = 1, seed: float | None = None, node: Node) -> Value:
    """class indices, drawn with probabilities softmax(x)"""
    if input.rank != 2:
        raise Unsupported(f"a matrix of unnormalised log-probabilities is required, found {input.type!r}")
    wide = p.cast(input, dtype=f64 if input.dtype is f64 else f32)
    below = p.cumsum(c.softmax(wide, (1,)), axis=1)
    shape = (input.shape[0], sample_size)
    u = uniform(seed_of_graph(node), nothing(), shape=shape, dtype=wide.dtype, stream=stream_of(node, seed))
    square = (*shape, input.shape[1])
    passed = p.less_equal(p.broadcast(below, shape=square, axes=(0, 2)), p.broadcast(u, shape=square, axes=(0, 1)))
    place = p.reduce_sum(c.as_number(passed, i64), axes=(2,))
    last = p.add(p.broadcast(p.dim(input.shape[1]), shape=shape, axes=()), p.number(-1, place))
    return p.cast(p.min(place, last), dtype=dtype_of_onnx(dtype))
