"""Random numbers as a function of a seed and a counter: Threefry-2x32, in int64 arithmetic that every runtime has kernels for.

A number depends on the seed, the step, a stream (which use of randomness in the graph) and its place in the tensor, and on nothing else: so the
forward and the backward pass see the same mask, a step can be repeated, and two runtimes give the same bits. Words of 32 bits are kept in
int64, with what goes beyond masked away: compilers lack unsigned arithmetic, and ONNX has no shift of signed integers.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import math

from .. import primitives as p
from ..dims import Dim, Shape, ceildiv, product
from ..graph import Value
from ..types import DType, f16, f32, f64

__all__ = ["bernoulli", "normal", "threefry", "uniform", "words"]

ROUNDS = 13  # the fewest that pass all statistical tests of the paper
MASK = 0xFFFFFFFF
PARITY = 0x1BD11BDA
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)


def _integer(value: int, like: Value) -> Value:
    return p.number(value, like)


def _low(x: Value) -> Value:
    """The low 32 bits."""
    return p.bit_and(x, _integer(MASK, x))


def _sum(x: Value, y: Value) -> Value:
    """`x + y` modulo `2 ** 32`."""
    return _low(p.add(x, y))


def _rotated(x: Value, amount: int) -> Value:
    """The 32 bits of x rotated left."""
    y = p.mul(x, _integer(1 << amount, x))
    return p.add(_low(y), p.div(y, _integer(1 << 32, y)))


def threefry(key: tuple[Value, Value], counter: tuple[Value, Value], rounds: int = ROUNDS) -> tuple[Value, Value]:
    """Two random words for each counter: the block cipher Threefry-2x32. All are int64 in `0 .. 2 ** 32 - 1`; keys are rank 0."""
    parity = p.bit_xor(p.bit_xor(key[0], key[1]), _integer(PARITY, key[0]))
    keys = tuple(p.broadcast(k, shape=counter[0].shape, axes=()) for k in (*key, parity))
    x, y = _sum(counter[0], keys[0]), _sum(counter[1], keys[1])
    for i in range(rounds):
        x = _sum(x, y)
        y = p.bit_xor(_rotated(y, ROTATIONS[i % 8]), x)
        if i % 4 == 3:
            n = i // 4 + 1
            x = _sum(x, keys[n % 3])
            y = _sum(_sum(y, keys[(n + 1) % 3]), _integer(n, y))
    return x, y


def words(seed: Value, step: Value, count: Dim, stream: int = 0) -> tuple[Value, Value]:
    """Two int64 vectors of `count` random words. Seed and step are int64, rank 0.

    The key is the seed, its high word moved on by the stream; the counter is the place and the low 32 bits of the step.
    """
    low = _low(seed)
    high = _low(p.div(p.add(seed, p.neg(low)), _integer(1 << 32, seed)))
    key = (low, _sum(high, _integer(stream, high)) if stream else high)
    place = p.iota(count)
    return threefry(key, (place, p.broadcast(_low(step), shape=place.shape, axes=())))


def _flat(seed: Value, step: Value, count: Dim, stream: int) -> Value:
    """`count` random words, both of each pair used."""
    half = ceildiv(count, 2)
    both = p.concat(*words(seed, step, half, stream), axis=0)
    return both if isinstance(count, int) and count % 2 == 0 else p.slice(both, start=(0,), limit=(count,))


def _fraction(word: Value, bits: int, dtype: DType) -> Value:
    """The highest bits of a word as a number in [0, 1), exact in `dtype`."""
    whole = p.cast(p.div(word, _integer(1 << (32 - bits), word)), dtype=dtype)
    return p.mul(whole, p.number(2.0**-bits, whole))


def uniform(seed: Value, step: Value, *, shape: Shape, dtype: DType = f32, stream: int = 0) -> Value:
    """Uniform numbers in [0, 1), with as many bits as the dtype holds (53 in double, 24 in float32, 11 in float16, 8 in bfloat16)."""
    count = product(shape)
    if dtype is f64:
        first, second = words(seed, step, count, stream)
        coarse, fine = _fraction(first, 32, f64), _fraction(second, 21, f64)
        return p.reshape(p.add(coarse, p.mul(fine, p.number(2.0**-32, fine))), shape=shape)
    bits = 24 if dtype is f32 else 11 if dtype is f16 else 8
    return p.reshape(_fraction(_flat(seed, step, count, stream), bits, dtype), shape=shape)


def bernoulli(seed: Value, step: Value, probability: float, *, shape: Shape, stream: int = 0) -> Value:
    """A bool tensor, each element true with this probability (to within `2 ** -32`). Only integers are compared."""
    word = p.reshape(_flat(seed, step, product(shape), stream), shape=shape)
    return p.less(word, _integer(round(min(max(probability, 0.0), 1.0) * (1 << 32)), word))


def normal(seed: Value, step: Value, *, shape: Shape, dtype: DType = f32, stream: int = 0) -> Value:
    """Standard normal numbers, by the transform of Box and Muller: `sqrt(-2 ln(1 - u)) cos(2 pi v)`."""
    wide = f64 if dtype is f64 else f32
    first, second = words(seed, step, product(shape), stream)
    u, v = _fraction(first, 32 if wide is f64 else 24, wide), _fraction(second, 32 if wide is f64 else 24, wide)
    radius = p.sqrt(p.mul(p.log(p.add(p.number(1, u), p.neg(u))), p.number(-2, u)))
    flat = p.mul(radius, p.cos(p.mul(v, p.number(2 * math.pi, v))))
    return p.cast(p.reshape(flat, shape=shape), dtype=dtype)
