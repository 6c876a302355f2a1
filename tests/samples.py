"""The table of samples: every primitive at ordinary and at edge shapes and dtypes.

One row buys every check of the algebra and of emission.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pullback.algebra import primitives as p
from pullback.algebra.dims import Dim, ceildiv, dim, dmax, evaluate, floordiv, mod, parse
from pullback.algebra.graph import Constant, Graph, Value, building
from pullback.algebra.types import DTYPES, DType, TensorType, bf16, bool_, f16, f32, f64, i32, i64, tensor, u8

Draw = Callable[[np.random.Generator, tuple[int, ...], DType, Mapping[str, int]], np.ndarray]

N, M = dim("N"), dim("M")
SIZES: Mapping[str, int] = {"N": 3, "M": 2}
ONES: Mapping[str, int] = {"N": 1, "M": 1}


# ---- what operands hold ----------------------------------------------------------------------------------------------


def usual(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, sizes: Mapping[str, int]) -> np.ndarray:
    """Normal floats, small integers of both signs, coins."""
    if dtype.kind == "f":
        return np.asarray(rng.standard_normal(shape)).astype(dtype.numpy)
    if dtype.kind == "b":
        return np.asarray(rng.integers(0, 2, shape)).astype(np.bool_)
    low, high = (-5, 6) if dtype.kind == "i" else (0, 10)
    return np.asarray(rng.integers(max(low, -(2 ** (dtype.bits - 1))), min(high, 2 ** (dtype.bits - 1)), shape)).astype(
        dtype.numpy
    )


def between(low: float, high: float) -> Draw:
    """Uniform numbers."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, sizes: Mapping[str, int]) -> np.ndarray:
        if dtype.kind in "iu":
            return np.asarray(rng.integers(int(low), int(high) + 1, shape)).astype(dtype.numpy)
        return np.asarray(rng.uniform(low, high, shape)).astype(dtype.numpy)

    return draw


positive = between(0.5, 2.0)
unit = between(-0.8, 0.8)
above_one = between(1.5, 3.0)


def away_from_zero(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, sizes: Mapping[str, int]
) -> np.ndarray:
    """Magnitudes from 0.5 to 2, of both signs."""
    sign = rng.choice([-1.0, 1.0], shape) if dtype.kind != "u" else np.ones(shape)
    top = 2.0 if dtype.kind == "f" else 9.0
    x = sign * rng.uniform(0.5 if dtype.kind == "f" else 1.0, top, shape)
    return np.asarray(x).astype(dtype.numpy)


def distinct(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, sizes: Mapping[str, int]) -> np.ndarray:
    """No two elements closer than 0.3, in random order: no ties within a tensor."""
    count = int(np.prod(shape, dtype=np.int64))
    spaced = (np.arange(count) - count // 2) * 0.5 + rng.uniform(0, 0.2, count)
    return np.asarray(rng.permutation(spaced).reshape(shape)).astype(dtype.numpy)


def fractions(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, sizes: Mapping[str, int]) -> np.ndarray:
    """Numbers from -3.8 to 3.8, none near an integer or a half."""
    return np.asarray(rng.integers(-3, 4, shape) + rng.choice([0.2, 0.3, 0.7, 0.8], shape)).astype(dtype.numpy)


def some_zeros(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, sizes: Mapping[str, int]) -> np.ndarray:
    """Normal floats, about a third of them 0."""
    return np.where(rng.random(shape) < 0.35, 0.0, rng.standard_normal(shape)).astype(dtype.numpy)


def few_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, sizes: Mapping[str, int]) -> np.ndarray:
    """Only 0, 1 and 2, so that there are ties."""
    return np.asarray(rng.integers(0, 3, shape)).astype(dtype.numpy)


def indices(size: Dim) -> Draw:
    """Indices into an axis, some of them negative, some repeated."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, sizes: Mapping[str, int]) -> np.ndarray:
        n = evaluate(size, sizes)
        return np.asarray(rng.integers(-n, n, shape) if n else np.zeros(shape)).astype(dtype.numpy)

    return draw


def exactly(*values: float) -> Draw:
    """These numbers, in turn, repeated as needed."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, sizes: Mapping[str, int]) -> np.ndarray:
        return np.resize(np.asarray(values, dtype.numpy), shape)

    return draw


# ---- rows ------------------------------------------------------------------------------------------------------------


def operand_type(spec: str) -> TensorType:
    """`"f32[N,3]"`, or only the shape (`"N,3"`) of a double; `""` is rank 0."""
    match = re.fullmatch(r"(?:(\w+)\[(.*)\])|(.*)", spec)
    assert match is not None
    shape = match[2] if match[1] else match[3]
    parts = [s for s in re.split(r",(?![^(]*\))", shape) if s.strip()]
    return tensor(DTYPES[match[1] or "f64"], map(parse, parts))


@dataclass(frozen=True)
class Sample:
    """One primitive applied to operands of given types, drawn so that it is smooth there.

    `draw` is for all operands, or one for each. `beside` are inputs that only bring a symbol in. `wrt` limits which
    operands are differentiated. `also` are further sizes to try. `build` replaces the primitive's typed function.
    """

    primitive: p.Primitive
    operands: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    draw: Draw | Sequence[Draw] = usual
    sizes: Mapping[str, int] = field(default_factory=lambda: SIZES)
    also: tuple[Mapping[str, int], ...] = ()
    beside: tuple[str, ...] = ()
    wrt: tuple[int, ...] | None = None
    build: Callable[..., Value] | None = None

    def __str__(self) -> str:
        params = " ".join(f"{k}={v}" for k, v in self.params.items())
        operands = "; ".join(f"[{s}]" if "[" not in s else s for s in self.operands)
        return f"{self.primitive.name} {operands} {params}".strip()

    def graph(self) -> Graph:
        """Inputs `a0`, `a1`, ...; output `y`."""
        with building():
            operands = [p.input(f"a{i}", operand_type(s)) for i, s in enumerate(self.operands)]
            more = [p.input(f"b{i}", operand_type(s)) for i, s in enumerate(self.beside)]
            if self.primitive is p.BY_NAME["input"]:
                y = operands[0]
            else:
                y = (self.build or getattr(p, self.primitive.name))(*operands, **self.params)
        return Graph((*operands, *more), {"y": y}, f"sample_{self.primitive.name}")

    def feeds(self, rng: np.random.Generator, sizes: Mapping[str, int] | None = None) -> dict[str, np.ndarray]:
        """Arrays for the inputs."""
        sizes = self.sizes if sizes is None else sizes
        draws = list(self.draw) if isinstance(self.draw, Sequence) else [self.draw] * len(self.operands)
        assert len(draws) == len(self.operands), f"{self}: one draw for each operand"
        found = {}
        for i, (spec, draw) in enumerate(zip(self.operands, draws, strict=True)):
            t = operand_type(spec)
            found[f"a{i}"] = draw(rng, tuple(evaluate(d, sizes) for d in t.shape), t.dtype, sizes)
        for i, spec in enumerate(self.beside):
            t = operand_type(spec)
            found[f"b{i}"] = usual(rng, tuple(evaluate(d, sizes) for d in t.shape), t.dtype, sizes)
        return found

    def wanted(self) -> tuple[str, ...]:
        """The names of the operands to differentiate."""
        at = range(len(self.operands)) if self.wrt is None else self.wrt
        return tuple(f"a{i}" for i in at if operand_type(self.operands[i]).dtype.floating)


@dataclass(frozen=True)
class Fails:
    """A use of a primitive that is refused, with a part of the message."""

    primitive: p.Primitive
    operands: tuple[str, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    match: str = ""

    def __str__(self) -> str:
        return f"{self.primitive.name} {'; '.join(self.operands)}: {self.match}"

    def build(self) -> None:
        with building():
            operands = [p.input(f"a{i}", operand_type(s)) for i, s in enumerate(self.operands)]
            getattr(p, self.primitive.name)(*operands, **self.params)


P = p.BY_NAME
Row = Sample


def _unary(name: str, draw: Draw = usual) -> list[Sample]:
    """A floating function of one operand: symbolic, rank 0, empty, size 1, and the other dtypes."""
    specs = ("N,3", "", "0,2", "1,N", "f32[N,M]", "f16[4]", "bf16[4]")
    return [Sample(P[name], (s,), draw=draw, also=(ONES,)) for s in specs]


def _binary(name: str, draws: Sequence[Draw], dtypes: Sequence[str] = ("f32", "f16", "bf16")) -> list[Sample]:
    specs = ("N,3", "", "0,2", "1,N", *(f"{d}[N,2]" for d in dtypes))
    return [Sample(P[name], (s, s), draw=draws) for s in specs]


def _discrete(name: str, arity: int, specs: Sequence[str], draw: Draw | Sequence[Draw] = usual) -> list[Sample]:
    return [Sample(P[name], (s,) * arity, draw=draw) for s in specs]


INTEGERS = ("i64[N,3]", "i32[4]", "i8[4]", "u8[4]", "u32[4]", "i64[]", "i64[0]")

SOURCES = [
    *(Row(P["input"], (s,)) for s in ("f32[N,3]", "f64[]", "i64[N]", "bool[2]", "f16[0,2]", "bf16[N]")),
    *(
        Row(P["literal"], (), dict(value=Constant(np.asarray(v))))
        for v in (
            np.float64(0.1), np.float32([[0.1, -0.0, np.inf], [np.nan, -np.inf, 1e-40]]),
                np.float16([0.1, 65504, 6e-8]),
            np.asarray([0.1, 3e38, -1], bf16.numpy), np.int64([[2**62, -1]]), np.asarray([True, False]),
                np.zeros((0, 3), np.float32),
            np.uint8(255), np.int32([-7]), np.arange(100, dtype=np.float32).reshape(4, 25),
        )
    ),
    *(Row(P["dim"], (), dict(value=d), beside=("f32[N,M]",), also=(ONES, {"N": 8, "M": 5})) for d in (
        N, 7, 0, 2 * N + 1, N * M, floordiv(N, 2), ceildiv(N, M), mod(N, 2), dmax(N, M), N - 1,
    )),
    *(Row(P["iota"], (), dict(size=d), beside=("f32[N,M]",), also=(ONES,)) for d in (0, 1, 4, N, 2 * N + M)),
]  # fmt: skip

PLACING = [
    Row(P["broadcast"], ("N,3",), dict(shape=(2, N, 3), axes=(1, 2)), also=(ONES,)),
    Row(P["broadcast"], ("",), dict(shape=(N, 3), axes=()), also=(ONES,), beside=("N",)),
    Row(P["broadcast"], ("",), dict(shape=(), axes=())),
    Row(P["broadcast"], ("N,3",), dict(shape=(N, 3), axes=(0, 1))),
    Row(P["broadcast"], ("3",), dict(shape=(3, N, 2, M), axes=(0,)), beside=("N,M",), also=(ONES,)),
    Row(P["broadcast"], ("2,M",), dict(shape=(N, 2, 1, M), axes=(1, 3)), beside=("N",)),
    Row(P["broadcast"], ("1",), dict(shape=(1, 4), axes=(0,))),
    Row(P["broadcast"], ("3",), dict(shape=(0, 3), axes=(1,))),
    Row(P["broadcast"], ("0,3",), dict(shape=(0, 2, 3), axes=(0, 2))),
    *(Row(P["broadcast"], (f"{d}[3]",), dict(shape=(2, 3), axes=(1,)))
        for d in ("f32", "f16", "bf16", "i64", "i32", "bool", "u8")),
    Row(P["reshape"], ("N,6",), dict(shape=(2 * N, 3)), also=(ONES,)),
    Row(P["reshape"], ("N,M,4",), dict(shape=(N * M, 4)), also=(ONES,)),
    Row(P["reshape"], ("N*M,4",), dict(shape=(N, M, 2, 2)), beside=("N",)),
    Row(P["reshape"], ("",), dict(shape=(1, 1))),
    Row(P["reshape"], ("1,1",), dict(shape=())),
    Row(P["reshape"], ("0,3",), dict(shape=(3, 0, 2))),
    Row(P["reshape"], ("N,3",), dict(shape=(N, 3))),
    Row(P["reshape"], ("N,2",), dict(shape=(N, 1, 2, 1))),
    *(Row(P["reshape"], (f"{d}[2,3]",), dict(shape=(3, 2))) for d in ("f32", "f16", "bf16", "i64", "bool")),
    Row(P["transpose"], ("N,3,2",), dict(perm=(2, 0, 1)), also=(ONES,)),
    Row(P["transpose"], ("N,M,2,3",), dict(perm=(3, 1, 2, 0)), also=(ONES,)),
    Row(P["transpose"], ("",), dict(perm=())),
    Row(P["transpose"], ("0,3",), dict(perm=(1, 0))),
    Row(P["transpose"], ("N",), dict(perm=(0,))),
    *(Row(P["transpose"], (f"{d}[2,3]",), dict(perm=(1, 0))) for d in ("f32", "f16", "bf16", "i64", "bool")),
    Row(P["slice"], ("N,7",), dict(start=(0, 1), limit=(N, 6), stride=(1, 2)), also=(ONES,)),
    Row(P["slice"], ("N,5",), dict(start=(0, 0), limit=(N, 5), stride=(1, 1))),
    Row(P["slice"], ("N+2",), dict(start=(1,), limit=(N + 1,)), also=(ONES,)),
    Row(P["slice"], ("N",), dict(start=(1,), limit=(N,), stride=(2,)),
        also=(ONES, {"N": 2}, {"N": 8})),  # empty where N is 1
    Row(P["slice"], ("2*N",), dict(start=(0,), limit=(2 * N,), stride=(2,)), also=(ONES,)),
    Row(P["slice"], ("2*N",), dict(start=(1,), limit=(2 * N,), stride=(3,)), also=(ONES, {"N": 2}, {"N": 4})),
    Row(P["slice"], ("N,M",), dict(start=(0, floordiv(M, 2)), limit=(N, M), stride=(2, 1)),
        also=(ONES, {"N": 4, "M": 5})),
    Row(P["slice"], ("5",), dict(start=(2,), limit=(2,), stride=(1,))),
    Row(P["slice"], ("5",), dict(start=(4,), limit=(5,), stride=(3,))),
    Row(P["slice"], ("0,4",), dict(start=(0, 1), limit=(0, 3), stride=(2, 2))),
    Row(P["slice"], ("",), dict(start=(), limit=(), stride=())),
    *(Row(P["slice"], (f"{d}[6]",), dict(start=(1,), limit=(6,), stride=(2,)))
        for d in ("f32", "f16", "bf16", "i64", "bool")),
    Row(P["reverse"], ("N,3",), dict(axes=(0,)), also=(ONES,)),
    Row(P["reverse"], ("N,3,2",), dict(axes=(0, 2))),
    Row(P["reverse"], ("N,3",), dict(axes=())),
    Row(P["reverse"], ("0,3",), dict(axes=(0,))),
    Row(P["reverse"], ("",), dict(axes=())),
    *(Row(P["reverse"], (f"{d}[4]",), dict(axes=(0,))) for d in ("f32", "f16", "bf16", "i64", "bool")),
    Row(P["pad"], ("N,3",), dict(low=(1, 0), high=(0, 2)), also=(ONES,)),
    Row(P["pad"], ("N,3",), dict(low=(0, 0), high=(0, 0))),
    Row(P["pad"], ("N,3",), dict(low=(1, 2), high=(2, 1), interior=(1, 2), value=1.5), also=(ONES,)),
    Row(P["pad"], ("N,M",), dict(low=(M, 0), high=(0, N + 1), value=-2.0), also=(ONES,)),
    Row(P["pad"], ("N//2",), dict(low=(1,), high=(1,), interior=(2,)), sizes={"N": 4}, also=({"N": 1}, {"N": 2}),
        beside=("N",)),
    Row(P["pad"], ("1",), dict(low=(0,), high=(1,), interior=(3,))),
    Row(P["pad"], ("0,2",), dict(low=(1, 1), high=(2, 0), interior=(3, 1))),
    Row(P["pad"], ("",), dict(low=(), high=())),
    Row(P["pad"], ("3",), dict(low=(1,), high=(1,), value=float("-inf")), wrt=()),
    Row(P["pad"], ("f32[3]",), dict(low=(1,), high=(1,), value=float("-inf"))),
    *(Row(P["pad"], (f"{d}[3]",), dict(low=(2,), high=(1,), interior=(1,)))
        for d in ("f32", "f16", "bf16", "i64", "i32", "bool")),
    Row(P["concat"], ("N,3", "M,3"), dict(axis=0), also=(ONES,)),
    Row(P["concat"], ("N,3", "N,1", "N,M"), dict(axis=1), also=(ONES,)),
    Row(P["concat"], ("N,3",), dict(axis=1)),
    Row(P["concat"], ("0,3", "2,3", "0,3"), dict(axis=0)),
    Row(P["concat"], ("0,3", "0,2"), dict(axis=1)),
    *(Row(P["concat"], (f"{d}[2]", f"{d}[3]"), dict(axis=0)) for d in ("f32", "f16", "bf16", "i64", "bool", "i32")),
    Row(P["window"], ("N,7",), dict(axes=(1,), sizes=(3,), strides=(1,), dilations=(1,)), also=(ONES,)),
    Row(P["window"], ("N,8",), dict(axes=(1,), sizes=(3,), strides=(2,), dilations=(2,))),
    Row(P["window"], ("N,3,8,9",), dict(axes=(2, 3), sizes=(3, 2), strides=(2, 3), dilations=(1, 2))),
    Row(P["window"], ("2,6,5",), dict(axes=(2, 1), sizes=(2, 3), strides=(2, 1), dilations=(1, 1))),
    Row(P["window"], ("2,N+4",), dict(axes=(1,), sizes=(3,), strides=(2,), dilations=(1,)), also=(ONES, {"N": 2})),
    Row(P["window"], ("N+M",), dict(axes=(0,), sizes=(M,), strides=(1,), dilations=(1,)), beside=("M",), also=(ONES,)),
    Row(P["window"], ("M,2*N+5",), dict(axes=(1,), sizes=(2,), strides=(3,), dilations=(3,)), beside=("N",),
        also=(ONES,)),
    Row(P["window"], ("5",), dict(axes=(0,), sizes=(5,), strides=(1,), dilations=(1,))),
    Row(P["window"], ("4",), dict(axes=(0,), sizes=(1,), strides=(3,), dilations=(2,))),
    Row(P["window"], ("7,2",), dict(axes=(0,), sizes=(2,), strides=(4,), dilations=(1,))),
    Row(P["window"], ("2,3",), dict(axes=(0,), sizes=(3,), strides=(1,), dilations=(1,))),  # no window fits
    Row(P["window"], ("0,4",), dict(axes=(1,), sizes=(2,), strides=(1,), dilations=(1,))),
    Row(P["window"], ("2,3",), dict(axes=(), sizes=(), strides=(), dilations=())),
    *(Row(P["window"], (f"{d}[5]",), dict(axes=(0,), sizes=(2,), strides=(2,), dilations=(1,)))
        for d in ("f32", "f16", "bf16", "i64")),
    Row(P["fold"], ("N,5,3",), dict(axes=(1,), strides=(1,), dilations=(1,), extents=(7,)), also=(ONES,)),
    Row(P["fold"], ("N,2,3",), dict(axes=(1,), strides=(2,), dilations=(2,), extents=(8,))),
    Row(P["fold"], ("N,2,3,3,3,2",), dict(axes=(2, 3), strides=(2, 3), dilations=(1, 2), extents=(8, 9)),
        sizes={"N": 2}),
    Row(P["fold"], ("2,4,2,2,3",), dict(axes=(2, 1), strides=(2, 1), dilations=(1, 1), extents=(5, 6))),
    Row(P["fold"], ("2,N,3",), dict(axes=(1,), strides=(2,), dilations=(1,), extents=(2 * N + 1,)), also=(ONES,)),
    Row(P["fold"], ("N+1,M",), dict(axes=(0,), strides=(1,), dilations=(1,), extents=(N + M,)), also=(ONES,)),
    Row(P["fold"], ("1,5",), dict(axes=(0,), strides=(1,), dilations=(1,), extents=(5,))),
    Row(P["fold"], ("2,2,2",), dict(axes=(0,), strides=(4,), dilations=(1,), extents=(7,))),
    Row(P["fold"], ("0,3,3",), dict(axes=(0,), strides=(1,), dilations=(1,), extents=(2,))),
    Row(P["fold"], ("2,3",), dict(axes=(), strides=(), dilations=(), extents=())),
    *(Row(P["fold"], (f"{d}[2,2]",), dict(axes=(0,), strides=(1,), dilations=(1,), extents=(3,)))
        for d in ("f32", "f16", "bf16", "i64")),
]  # fmt: skip

CONTRACTIONS = [
    Row(P["dot"], ("N,4", "4,3"), dict(contract=((1,), (0,))), also=(ONES,)),
    Row(P["dot"], ("N,M", "N,M"), dict(contract=((0,), (0,))), also=(ONES,)),
    Row(P["dot"], ("N", "N"), dict(contract=((0,), (0,))), also=(ONES,)),
    Row(P["dot"], ("N", "M"), dict(contract=((), ())), also=(ONES,)),
    Row(P["dot"], ("", ""), dict(contract=((), ()))),
    Row(P["dot"], ("", "N,2"), dict(contract=((), ()))),
    Row(P["dot"], ("N,2", "N,2"), dict(contract=((0, 1), (0, 1)))),
    Row(P["dot"], ("2,N,4", "4,3,2"), dict(contract=((2, 0), (0, 2)))),
    Row(P["dot"], ("2,3,4", "4,2,5"), dict(contract=((0, 2), (1, 0)))),
    Row(P["dot"], ("N,2,3", "N,3,4"), dict(contract=((2,), (1,)), batch=((0,), (0,))), also=(ONES,)),
    Row(P["dot"], ("N,2,3", "3,N,4"), dict(contract=((2,), (0,)), batch=((0,), (1,)))),
    Row(P["dot"], ("2,N,M,3", "N,3,2,4"), dict(contract=((3,), (1,)), batch=((0, 1), (2, 0))), also=(ONES,)),
    Row(P["dot"], ("2,3,4,5", "5,4,3"), dict(contract=((3,), (0,)), batch=((2, 1), (1, 2)))),
    Row(P["dot"], ("N,2", "N,2"), dict(contract=((), ()), batch=((0, 1), (0, 1)))),
    Row(P["dot"], ("N,2", "N,3"), dict(contract=((), ()), batch=((0,), (0,)))),
    Row(P["dot"], ("2,3", "3,2"), dict(contract=((0, 1), (1, 0)))),
    Row(P["dot"], ("2,0", "0,3"), dict(contract=((1,), (0,)))),
    Row(P["dot"], ("0,2", "2,3"), dict(contract=((1,), (0,)))),
    Row(P["dot"], ("1,1", "1,1"), dict(contract=((1,), (0,)), batch=((0,), (1,)))),
    *(Row(P["dot"], (f"{d}[N,4]", f"{d}[4,3]"), dict(contract=((1,), (0,))))
        for d in ("f32", "f16", "bf16", "i32", "i64")),
    *(Row(P["dot"], (f"{d}[2,N,4]", f"{d}[2,4,3]"), dict(contract=((2,), (1,)), batch=((0,), (0,))))
        for d in ("f32", "f16")),
    *(
        Row(P["reduce_sum"], (s,), dict(axes=axes), also=(ONES,))
        for s, axes in (
            ("N,3", ()), ("N,3", (0,)), ("N,3", (0, 1)), ("N,M,2", (0, 2)), ("", ()), ("0,3", (0,)), ("0,3", (1,)),
                ("1,3", (0,)),
            ("f32[N,3]", (1,)), ("f16[2,3]", (1,)), ("bf16[2,3]", (1,)), ("i64[N,3]", (0,)), ("i32[2,3]", (1,)),
        )
    ),
    *(
        Row(P[name], (s,), dict(axes=axes, ties=ties), draw=distinct)
        for name in ("reduce_max", "reduce_min")
        for ties in ("split", "first")
        for s, axes in (
            ("N,3", ()), ("N,3", (0,)), ("N,3", (0, 1)), ("N,M,2", (0, 2)), ("", ()), ("2,0,3", (0,)), ("1,3", (0,)),
            ("f32[N,3]", (1,)), ("f16[2,3]", (1,)), ("bf16[2,3]", (1,)), ("i64[2,3]", (1,)),
        )
    ),
    *(Row(P[name], ("0,3",), dict(axes=(0,), ties="split"), draw=distinct, wrt=())
        for name in ("reduce_max", "reduce_min")),
    *(
        Row(P["reduce_prod"], (s,), dict(axes=axes), draw=draw)
        for draw in (usual, some_zeros)
        for s, axes in (
            ("N,3", ()), ("N,3", (0,)), ("N,3", (0, 1)), ("2,M,3", (0, 2)), ("", ()), ("0,3", (0,)), ("2,0,3", (0,)),
                ("1,3", (0,)),
            ("f32[N,3]", (1,)), ("f16[2,3]", (1,)), ("bf16[2,3]", (1,)), ("i64[2,3]", (1,)),
        )
    ),
    *(
        Row(P["argmax"], (s,), dict(axis=axis), draw=draw)
        for draw in (usual, few_values)
        for s, axis in (("N,3", 0), ("N,3", 1), ("N", 0), ("0,3", 1), ("1,3", 0), ("f32[N,3]", 1), ("f16[2,3]", 1),
            ("i64[2,3]", 1))
    ),
    *(
        Row(P["cumsum"], (s,), dict(axis=axis, reverse=reverse), also=(ONES,))
        for reverse in (False, True)
        for s, axis in (("N,3", 0), ("N,3", 1), ("N", 0), ("0,3", 0), ("0,3", 1), ("1,3", 0), ("f32[N,3]", 1),
            ("f16[3]", 0), ("i64[4]", 0))
    ),
    *(
        Row(P["argsort"], (s,), dict(axis=axis, descending=descending), draw=draw)
        for draw in (usual, few_values)
        for descending in (False, True)
        for s, axis in (("N,4", 0), ("N,4", 1), ("N", 0), ("0,3", 0), ("1,3", 0), ("f32[N,5]", 1), ("f16[6]", 0),
            ("i64[7]", 0))
    ),
    *(
        Row(P["gather"], (x, i), dict(axis=axis), draw=(usual, indices(operand_type(x).shape[axis])), also=(ONES,))
        for x, i, axis in (
            ("N,3", "i64[4]", 0), ("N,3", "i64[2,3]", 1), ("N,3", "i64[]", 0), ("2,N,3", "i64[M,2]", 1),
                ("5", "i64[0]", 0),
            ("N,3", "i64[N]", 1), ("3,0", "i64[2]", 0), ("1,2", "i64[3]", 0), ("N,M,2", "i64[1,1]", 2),
            ("f32[N,3]", "i64[4]", 0), ("f16[4]", "i64[3]", 0), ("bf16[4]", "i64[3]", 0), ("i64[4]", "i64[2,2]", 0),
                ("bool[4]", "i64[3]", 0),
        )
    ),
    Row(P["gather"], ("4,2", "i64[5]"), dict(axis=0), draw=(usual, exactly(-1, 3, 0, -4, -1))),
    *(
        Row(P["scatter_add"], (u, i), dict(axis=axis, size=size), draw=(usual, indices(size)), also=(ONES,),
            beside=("N",))
        for u, i, axis, size in (
            ("4,3", "i64[4]", 0, N), ("N,2,3", "i64[2,3]", 1, 5), ("3", "i64[]", 0, 4), ("2,M,2,3", "i64[M,2]", 1, N),
                ("0", "i64[0]", 0, 5),
            ("N,4", "i64[4]", 1, 2 * N), ("2,0", "i64[2]", 0, 3), ("3,2", "i64[3]", 0, 1), ("", "i64[]", 0, 2),
            ("f32[4,3]", "i64[4]", 0, N), ("f16[6]", "i64[6]", 0, 3), ("bf16[6]", "i64[6]", 0, 3),
                ("i64[6]", "i64[6]", 0, 3),
        )
    ),
    Row(P["scatter_add"], ("5,2", "i64[5]"), dict(axis=0, size=4), draw=(usual, exactly(-1, 3, 0, -4, -1))),
]  # fmt: skip

ARITHMETIC = [
    *_binary("add", (usual, usual)), *_binary("mul", (usual, usual)), *_unary("neg"),
    *_binary("div", (usual, away_from_zero)), *_binary("rem", (usual, above_one)),
    *_discrete("add", 2, INTEGERS), *_discrete("mul", 2, INTEGERS),
    *_discrete("neg", 1, ("i64[N,3]", "i32[4]", "i8[4]")),
    *_discrete("div", 2, INTEGERS, (usual, away_from_zero)), *_discrete("rem", 2, INTEGERS, (usual, away_from_zero)),
    *_discrete("max", 2, INTEGERS), *_discrete("min", 2, INTEGERS), *_discrete("abs", 1, ("i64[N,3]", "i32[4]")),
    *_discrete("sign", 1, ("i64[N,3]", "i32[4]")),
    *_binary("max", (distinct, usual)), *_binary("min", (distinct, usual)), *_binary("pow", (positive, usual)),
    Row(P["pow"], ("N,4", "N,4"), draw=(away_from_zero, exactly(3, 2, -1, 1)), wrt=(0,)),
    Row(P["pow"], ("4", "4"), draw=(exactly(0, 0, -2, 2), exactly(2, 3, 3, 0)), wrt=(0,)),
    *_unary("abs", away_from_zero), *_unary("sign", away_from_zero), *_unary("floor", fractions),
    *_unary("round", fractions),
    Row(P["round"], ("8",), draw=exactly(-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.0, 3.5), wrt=()),
    Row(P["floor"], ("4",), draw=exactly(-2.0, -0.0, 3.0, 2.999), wrt=()),
    *_unary("exp"), *_unary("log", positive), *_unary("sqrt", positive), *_unary("tanh"), *_unary("erf"),
    *_unary("sin"), *_unary("cos"),
    *_unary("sinh"), *_unary("cosh"), *_unary("asin", unit), *_unary("acos", unit), *_unary("atan"), *_unary("asinh"),
    *_unary("acosh", above_one), *_unary("atanh", unit),
]  # fmt: skip

LOGIC = [
    *(row for name in ("equal", "less", "less_equal") for row in _discrete(
        name, 2, ("N,3", "", "0,2", "f32[N,2]", "f16[4]", "i64[N,3]", "i32[4]", "u8[4]"), few_values)),
    *_discrete("equal", 2, ("bool[4]",)),
    Row(P["equal"], ("4", "4"), draw=(exactly(np.nan, np.inf, 0.0, 1.0), exactly(np.nan, np.inf, -0.0, np.nan))),
    Row(P["less"], ("4", "4"), draw=(exactly(np.nan, -np.inf, 0.0, 1.0), exactly(np.nan, np.inf, -0.0, np.nan))),
    *(Row(P["is_nan"], (f"{d}[4]",), draw=exactly(np.nan, np.inf, 0.0, -1.0)) for d in ("f64", "f32", "f16", "bf16")),
    Row(P["is_nan"], ("",)), Row(P["is_nan"], ("0,2",)),
    *_discrete("logical_not", 1, ("bool[N,3]", "bool[]", "bool[0]")),
    *(row for name in ("logical_and", "logical_or", "logical_xor")
        for row in _discrete(name, 2, ("bool[N,3]", "bool[]", "bool[0]"))),
    *_discrete("bit_not", 1, INTEGERS),
    *(row for name in ("bit_and", "bit_or", "bit_xor") for row in _discrete(name, 2, INTEGERS)),
    *(row for name in ("shift_left", "shift_right")
        for row in _discrete(name, 2, ("u8[6]", "u32[4]", "u64[N]", "u32[]"), between(0, 7))),
    *(Row(P["select"], (f"bool[{s}]", f"{s}", f"{s}")) for s in ("N,3", "", "0,2", "1,N")),
    *(Row(P["select"], ("bool[N,2]", f"{d}[N,2]", f"{d}[N,2]"))
        for d in ("f32", "f16", "bf16", "i64", "i32", "bool", "u8")),
    *(Row(P["cast"], (f"{a}[N,4]",), dict(dtype=b)) for a, b in (
        ("f64", f32), ("f32", f64), ("f32", f16), ("f16", f32), ("f32", bf16), ("bf16", f32), ("f16", bf16),
            ("f64", f16), ("i64", f32),
        ("i64", f64), ("i32", f32), ("bool", f32), ("bool", i64), ("f32", bool_), ("i64", bool_), ("i64", i32),
            ("i32", i64), ("u8", f32),
    )),
    *(Row(P["cast"], (f"{a}[N,4]",), dict(dtype=b), draw=fractions) for a,
        b in (("f32", i64), ("f64", i32), ("f16", i32), ("f32", f32))),
    Row(P["cast"], ("f32[5]",), dict(dtype=u8), draw=exactly(0.9, 1.5, 200.7, 255.0, 0.0)),
    Row(P["cast"], ("f64[4]",), dict(dtype=bool_), draw=exactly(0.0, -0.0, 0.5, np.nan)),
    Row(P["cast"], ("f64[]",), dict(dtype=i64)), Row(P["cast"], ("f64[0]",), dict(dtype=f32)),
    *(Row(P["bit_cast"], (f"{a}[N,2]",), dict(dtype=b)) for a,
        b in (("f32", i32), ("i64", f64), ("u32", f32), ("f16", DTYPES["i16"]))),
    Row(P["bit_cast"], ("f64[4]",), dict(dtype=i64), draw=exactly(-0.0, 1.5, np.inf, -3.0)),
    Row(P["bit_cast"], ("f32[]",), dict(dtype=i32)),
    Row(P["nonzero"], ("bool[N]",), dict(size=M), draw=exactly(1, 0, 1)),
    Row(P["nonzero"], ("bool[4]",), dict(size=0), draw=exactly(0)),
    Row(P["nonzero"], ("bool[4]",), dict(size=3), draw=exactly(1, 1, 0, 1)),
    *_unary("stop_gradient"), *_discrete("stop_gradient", 1, ("i64[N]", "bool[2]")),
]  # fmt: skip


# ---- control flow ----------------------------------------------------------------------------------------------------


def _cell(h: Value, x: Value, w: Value) -> tuple[Value, Value]:
    """A recurrent step: the new state, and a result of its own."""
    new = p.tanh(p.add(x, p.dot(h, w, contract=((1,), (0,)))))
    return new, p.mul(new, h)


def scanned(h: Value, xs: Value, w: Value, *, length: Dim, reverse: bool) -> Value:
    """The states and results of a recurrent scan, side by side: `h[N, k]`, `xs[T, N, k]`, `w[k, k]`."""
    slice_ = TensorType(xs.dtype, xs.shape[1:])
    inputs = [("h", TensorType(h.dtype, h.shape)), ("x", slice_), ("w", TensorType(w.dtype, w.shape))]
    last, ys = p.scan([h], [xs], [w], p.body_of(_cell, inputs), length=length, reverse=reverse)
    return p.add(last, p.reduce_sum(ys, axes=(0,)))


def counted(x: Value, *, length: Dim) -> Value:
    """A scan without sequences, with an integer among what it carries."""

    def step(i: Value, h: Value) -> list[Value]:
        return [
            p.add(i, p.literal(1, i64)),
            p.add(p.sin(h), p.broadcast(p.cast(i, dtype=h.dtype), shape=h.shape, axes=())),
        ]

    body = p.body_of(step, [("i", TensorType(i64, ())), ("h", TensorType(x.dtype, x.shape))])
    return p.scan([p.literal(0, i64), x], [], [], body, length=length)[1]


def chosen(pred: Value, x: Value, y: Value) -> Value:
    """`x * y` or `sin x`."""
    inputs = [("x", TensorType(x.dtype, x.shape)), ("y", TensorType(y.dtype, y.shape))]
    then = p.body_of(lambda x, y: [p.mul(x, y)], inputs)
    otherwise = p.body_of(lambda x, y: [p.sin(x)], inputs)
    return p.cond(pred, [x, y], then, otherwise)[0]


def halved(x: Value, least: Value) -> Value:
    """`x` halved while its sum is above `least`."""
    inputs = [("x", TensorType(x.dtype, x.shape)), ("least", TensorType(least.dtype, ()))]
    test = p.body_of(lambda x, least: [p.less(least, p.reduce_sum(x, axes=tuple(range(x.rank))))], inputs)
    body = p.body_of(lambda x, least: [p.mul(x, p.number(0.5, x))], inputs)
    return p.while_([x], [least], test, body)[0]


CONTROL = [
    *(
        Row(P["scan"], (f"{h}[N,2]", f"{h}[M,N,2]", f"{h}[2,2]"), dict(length=M, reverse=way), build=scanned,
            also=(ONES,))
        for way in (False, True)
        for h in ("f64", "f32")
    ),
    Row(P["scan"], ("1,2", "0,1,2", "2,2"), dict(length=0, reverse=False), build=scanned),
    Row(P["scan"], ("N,3",), dict(length=4), build=counted),
    Row(P["scan"], ("f16[N]",), dict(length=M), build=counted, beside=("M",)),
    Row(P["item"], ("N,3",), dict(length=2), build=counted),
    *(Row(P["cond"], ("bool[]", "N,3", "N,3"), draw=(exactly(b), usual, usual), build=chosen) for b in (0, 1)),
    Row(P["cond"], ("bool[]", "f32[]", "f32[]"), build=chosen),
    Row(P["while"], ("N,3", ""), draw=(between(3.0, 4.0), between(1.0, 2.0)), build=halved, wrt=()),
    Row(P["while"], ("f32[2]", "f32[]"), draw=(between(0.0, 0.1), between(1.0, 2.0)), build=halved, wrt=()),
]  # fmt: skip

SAMPLES: tuple[Sample, ...] = (*SOURCES, *PLACING, *CONTRACTIONS, *ARITHMETIC, *LOGIC, *CONTROL)

FAILS: tuple[Fails, ...] = (
    Fails(P["add"], ("N,3", "N,4"), match="differ in shape"),
    Fails(P["add"], ("N", "M"), match="depends on the sizes"),
    Fails(P["add"], ("f32[N]", "f64[N]"), match="differ in dtype"),
    Fails(P["add"], ("bool[2]", "bool[2]"), match="a number is required"),
    Fails(P["mul"], ("3", ""), match="differ in shape"),
    Fails(P["exp"], ("i64[2]",), match="floating dtype is required"),
    Fails(P["pow"], ("i64[2]", "i64[2]"), match="floating dtype is required"),
    Fails(P["bit_and"], ("2", "2"), match="integer dtype is required"),
    Fails(P["logical_and"], ("i64[2]", "i64[2]"), match="bool is required"),
    Fails(P["select"], ("2", "2", "2"), match="condition must be bool"),
    Fails(P["select"], ("bool[3]", "2", "2"), match="condition must be bool"),
    Fails(P["broadcast"], ("1,3",), dict(shape=(2, 3), axes=(0, 1)), match="never stretches"),
    Fails(P["broadcast"], ("3,2",), dict(shape=(2, 3), axes=(1, 0)), match="do not place"),
    Fails(P["broadcast"], ("3",), dict(shape=(2, 3), axes=(2,)), match="do not place"),
    Fails(P["reshape"], ("2,3",), dict(shape=(7,)), match="numbers of elements differ"),
    Fails(P["reshape"], ("N,3",), dict(shape=(3, N + 1)), match="numbers of elements differ"),
    Fails(P["transpose"], ("2,3",), dict(perm=(0, 0)), match="does not permute"),
    Fails(P["transpose"], ("2,3",), dict(perm=(0,)), match="does not permute"),
    Fails(P["slice"], ("5",), dict(start=(1,), limit=(6,), stride=(1,)), match="leaves"),
    Fails(P["slice"], ("5",), dict(start=(3,), limit=(2,), stride=(1,)), match="leaves"),
    Fails(P["slice"], ("5",), dict(start=(0,), limit=(5,), stride=(-1,)), match="strides of a slice are positive"),
    Fails(P["slice"], ("5",), dict(start=(0, 0), limit=(5,), stride=(1,)), match="one entry per axis"),
    Fails(P["reverse"], ("5",), dict(axes=(1,)), match="axes"),
    Fails(P["pad"], ("5",), dict(low=(-1,), high=(0,)), match="not negative"),
    Fails(P["pad"], ("5",), dict(low=(0, 0), high=(0, 0)), match="one entry per axis"),
    Fails(P["concat"], ("2,3", "2,4"), dict(axis=0), match="other axes differ"),
    Fails(P["concat"], ("2,3", "2"), dict(axis=0), match="cannot concatenate"),
    Fails(P["concat"], ("f32[2]", "f64[2]"), dict(axis=0), match="cannot concatenate"),
    Fails(P["concat"], ("", ""), dict(axis=0), match="cannot concatenate"),
    Fails(P["concat"], (), dict(axis=0), match="needs an operand"),
    Fails(P["window"], ("2",), dict(axes=(0,), sizes=(5,), strides=(1,), dilations=(1,)), match="is larger than"),
    Fails(P["window"], ("5",), dict(axes=(1,), sizes=(2,), strides=(1,), dilations=(1,)), match="do not fit"),
    Fails(P["window"], ("5",), dict(axes=(0,), sizes=(2,), strides=(0,), dilations=(1,)), match="positive"),
    Fails(
        P["fold"],
        ("3,2",),
        dict(axes=(0,), strides=(1,), dilations=(1,), extents=(9,)),
        match="does not hold the windows",
    ),
    Fails(P["dot"], ("N,4", "3,5"), dict(contract=((1,), (0,))), match="cannot contract axis 1 of"),
    Fails(P["dot"], ("2,4", "3,4"), dict(contract=((1,), (1,)), batch=((0,), (0,))), match="cannot batch axis 0"),
    Fails(P["dot"], ("2,4", "4,3"), dict(contract=((1,), ())), match="cannot contract axes"),
    Fails(P["dot"], ("2,2", "2,2"), dict(contract=((0, 0), (0, 1))), match="twice"),
    Fails(P["dot"], ("2,2", "2,2"), dict(contract=((5,), (0,))), match="no axis 5"),
    Fails(P["dot"], ("f32[2]", "f64[2]"), dict(contract=((0,), (0,))), match="dtypes differ"),
    Fails(P["dot"], ("bool[2]", "bool[2]"), dict(contract=((0,), (0,))), match="bool"),
    Fails(P["reduce_sum"], ("2,3",), dict(axes=(2,)), match="cannot reduce"),
    Fails(P["reduce_sum"], ("2,3",), dict(axes=(0, 0)), match="cannot reduce"),
    Fails(P["reduce_sum"], ("bool[2]",), dict(axes=(0,)), match="a number is required"),
    Fails(P["reduce_max"], ("2",), dict(axes=(0,), ties="last"), match="ties"),
    Fails(P["argmax"], ("",), dict(axis=0), match="cannot reduce"),
    Fails(P["gather"], ("3", "i32[2]"), dict(axis=0), match="int64 indices"),
    Fails(P["gather"], ("3", "i64[2]"), dict(axis=1), match="cannot gather"),
    Fails(P["scatter_add"], ("3", "i64[2]"), dict(axis=0, size=4), match="do not hold"),
    Fails(P["scatter_add"], ("bool[2]", "i64[2]"), dict(axis=0, size=4), match="cannot add"),
)
