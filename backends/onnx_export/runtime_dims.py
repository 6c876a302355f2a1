"""Sizes while the program runs: each symbol is read once from an input's `Shape`, each derived size computed once from those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import sympy

from ...algebra.dims import Dim, DimMax, DimMin, FloorDiv, Mod, at_least, show, simplest
from ...algebra.errors import InconclusiveDim, PullbackError
from ...algebra.graph import Graph, Value
from ...algebra.types import i64
from .program import Program, Tensor

__all__ = ["RuntimeDims"]

_PREFERRED = ("input", "target", "seed", "state", "parameter")


class RuntimeDims:
    """Dims as int64 tensors of one element, joined to shapes by `Concat`; constants where they are ints."""

    def __init__(self, program: Program, opset: int) -> None:
        self._program = program
        self._opset = opset
        self._sources: dict[sympy.Symbol, tuple[Tensor, int, Dim]] = {}
        self._memory: dict[Dim, Tensor] = {}
        self._missing: dict[sympy.Symbol, str] = {}

    @property
    def missing(self) -> list[str]:
        """What was asked for and no input tells."""
        return list(self._missing.values())

    def read_from(self, graph: Graph, tensors: Mapping[str, Tensor]) -> None:
        """Note where each symbol can be read: an axis that is the symbol itself, else one that is linear in it, the rest known."""

        def rank(v: Value) -> int:
            role = v.params["role"]
            return _PREFERRED.index(role) if role in _PREFERRED else len(_PREFERRED)

        inputs = sorted((v for v in graph.inputs if tensors[v.params["name"]].constant is None), key=rank)
        later: list[tuple[Tensor, int, sympy.Expr]] = []
        for v in inputs:
            for axis, d in enumerate(v.shape):
                if isinstance(d, sympy.Symbol):
                    self._sources.setdefault(d, (tensors[v.params["name"]], axis, d))
                elif not isinstance(d, int):
                    later.append((tensors[v.params["name"]], axis, d))
        found = True
        while found:
            found = False
            for tensor, axis, d in later:
                unknown = [s for s in d.free_symbols if s not in self._sources]
                if len(unknown) == 1 and _linear(d, unknown[0]) is not None:
                    self._sources[unknown[0]] = (tensor, axis, d)
                    found = True

    def can_read(self, symbol: sympy.Symbol) -> bool:
        """Whether some input tells the size."""
        return symbol in self._sources

    def bind(self, symbol: sympy.Symbol, tensor: Tensor, axis: int) -> None:
        """Read a symbol from an axis of a tensor."""
        self._sources.setdefault(symbol, (tensor, axis, symbol))

    def in_program(self, program: Program) -> bool:
        """Whether sizes are computed in this program, and not in one around it."""
        return program is self._program

    def vector(self, d: Dim) -> Tensor:
        """A dim as an int64 tensor of shape [1]."""
        d = simplest(d)
        if isinstance(d, int):
            return self._program.constant(np.asarray([d], np.int64))
        found = self._memory.get(d)
        if found is None:
            found = self._memory[d] = self._compute(d)
        return found

    def scalar(self, d: Dim) -> Tensor:
        """A dim as an int64 tensor of rank 0."""
        d = simplest(d)
        if isinstance(d, int):
            return self._program.constant(np.asarray(d, np.int64))
        axes = self._program.constant(np.asarray([0], np.int64))
        return self._program.op("Squeeze", (self.vector(d), axes), i64, ())

    def shape(self, shape: Sequence[Dim]) -> Tensor:
        """Dims as an int64 tensor of shape [rank]."""
        shape = [simplest(d) for d in shape]
        if all(isinstance(d, int) for d in shape):
            return self._program.constant(np.asarray(shape, np.int64))
        parts: list[Tensor] = []
        run: list[int] = []
        for d in [*shape, None]:
            if isinstance(d, int):
                run.append(d)
                continue
            if run:
                parts.append(self._program.constant(np.asarray(run, np.int64)))
                run = []
            if d is not None:
                parts.append(self.vector(d))
        if len(parts) == 1:
            return parts[0]
        return self._program.op("Concat", parts, i64, (len(shape),), axis=0)

    # ---- one dim ----

    def _compute(self, d: sympy.Expr) -> Tensor:
        match d:
            case sympy.Symbol():
                return self._read(d)
            case sympy.Add():
                return self._sum(d)
            case sympy.Mul():
                return self._join("Mul", d.args)
            case sympy.Pow():
                return self._join("Mul", (d.base,) * int(d.exp))
            case DimMax():
                return self._join("Max", d.args)
            case DimMin():
                return self._join("Min", d.args)
            case Mod():
                return self._join("Mod", d.args)
            case FloorDiv():
                a, b = (simplest(x) for x in d.args)
                if not _not_negative(a):  # ONNX's Div rounds toward zero, Mod has the sign of the divisor
                    a = self._binary("Sub", self.vector(a), self.vector(Mod(sympy.sympify(a), sympy.sympify(b))))
                    return self._binary("Div", a, self.vector(b))
                return self._join("Div", (a, b))
        raise PullbackError(f"{show(d)} is not a dim that can be computed")

    def _sum(self, d: sympy.Add) -> Tensor:
        """Positive terms first, negative ones subtracted."""
        plus = [t for t in d.args if not t.could_extract_minus_sign()]
        minus = [-t for t in d.args if t.could_extract_minus_sign()]
        plus.sort(key=lambda t: (bool(t.is_Integer), show(t) if not t.is_Integer else ""))
        total = self._join("Add", plus) if plus else self.vector(0)
        for t in minus:
            total = self._binary("Sub", total, self.vector(simplest(t)))
        return total

    def _join(self, op: str, args: Sequence[Dim]) -> Tensor:
        total = self.vector(simplest(args[0]))
        for d in args[1:]:
            total = self._binary(op, total, self.vector(simplest(d)))
        return total

    def _binary(self, op: str, a: Tensor, b: Tensor) -> Tensor:
        return self._program.op(op, (a, b), i64, (1,))

    def _read(self, symbol: sympy.Symbol) -> Tensor:
        if symbol not in self._sources:
            self._missing[symbol] = f"the size {show(symbol)} cannot be read from the shape of any input"
            return self.vector(1)
        tensor, axis, d = self._sources[symbol]
        size = self._size(tensor, axis)
        if d == symbol:
            return size
        slope, offset = _linear(d, symbol) or (1, 0)
        if not _is(offset, 0):
            size = self._binary("Sub", size, self.vector(offset))
        return size if _is(slope, 1) else self._binary("Div", size, self.vector(slope))

    def _size(self, tensor: Tensor, axis: int) -> Tensor:
        if self._opset >= 15:
            return self._program.op("Shape", (tensor,), i64, (1,), start=axis, end=axis + 1)
        shape = self._program.op("Shape", (tensor,), i64, (tensor.rank,))
        at = self._program.constant(np.asarray([axis], np.int64))
        return self._program.op("Gather", (shape, at), i64, (1,), axis=0)


def _linear(d: sympy.Expr, symbol: sympy.Symbol) -> tuple[Dim, Dim] | None:
    """`(a, b)` where `d` is `a * symbol + b` and neither holds the symbol."""
    if any(f.has(symbol) for f in d.atoms(FloorDiv, Mod, DimMax, DimMin)) or sympy.degree(d, symbol) != 1:
        return None
    return simplest(d.coeff(symbol, 1)), simplest(d.coeff(symbol, 0))


def _is(d: Dim, value: int) -> bool:
    return isinstance(d, int) and d == value


def _not_negative(d: Dim) -> bool:
    try:
        return at_least(d, 0)
    except InconclusiveDim:
        return False
