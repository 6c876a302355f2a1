"""What enters a step: arrays in the dtypes that its inputs take, value for value, and of sizes that agree with one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import sympy

from ..algebra.dims import evaluate, symbols
from ..algebra.errors import PullbackError, Refusal
from ..algebra.graph import Constraint
from ..algebra.signature import Entry

__all__ = ["Entrance", "converted", "numpy_dtype"]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a signature's dtype name."""
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def converted(array: Any, entry: Entry) -> np.ndarray:
    """An array in the dtype that an input takes, every number as it was: only a float may be rounded, to the nearest of a narrower float.

    >>> converted([1, 0], Entry("mask", "input", "bool", ("N",)))
    array([ True, False])
    >>> converted([0.5, 0], Entry("mask", "input", "bool", ("N",)))
    Traceback (most recent call last):
    pullback.algebra.errors.PullbackError: 'mask' takes bool, which cannot hold 0.5
    """
    if np.ma.is_masked(array):
        raise PullbackError(
            f"{entry.name!r} is given a masked array, but a step knows no missing numbers: fill it first"
        )
    try:
        given = np.asarray(array)
    except (
        ValueError,
        TypeError,
        RuntimeError,
    ) as error:  # ragged lists; tensors that need their gradient or lie elsewhere
        raise PullbackError(f"{entry.name!r} is given what is no array: {error}") from error
    wanted = numpy_dtype(entry.dtype)
    if given.dtype == wanted:
        return given
    here, there = _kind(given.dtype), _kind(wanted)
    if here is None or there is None or (here, there) == ("float", "integer"):
        raise PullbackError(f"{entry.name!r} takes {entry.dtype}, but the data holds {given.dtype}: cast it first")
    with np.errstate(over="ignore", invalid="ignore"):
        taken = given.astype(wanted)
        lost = _lost(given, taken, here, there)
    if lost.any():
        way = ": make it a float first, if it may be rounded" if (here, there) == ("integer", "float") else ""
        raise PullbackError(f"{entry.name!r} takes {entry.dtype}, which cannot hold {given[lost].flat[0]}{way}")
    return taken


def _kind(dtype: np.dtype[Any]) -> str | None:
    """`boolean`, `integer` or `float`, also of the dtypes that numpy itself does not know; None of texts, objects and the like."""
    if dtype.kind == "V" and hasattr(ml_dtypes, dtype.name):
        return "integer" if "int" in dtype.name else "float"
    return {"b": "boolean", "i": "integer", "u": "integer", "f": "float"}.get(dtype.kind)


def _lost(given: np.ndarray, taken: np.ndarray, here: str, there: str) -> np.ndarray:
    """Where a number became another one."""
    match here, there:
        case "float", "float":
            return np.isfinite(given) & ~np.isfinite(taken)
        case "integer", "float":
            exact = 1 << (int(ml_dtypes.finfo(taken.dtype).nmant) + 1)  # type: ignore[no-untyped-call]
            if not given.size or (given.max() <= exact and given.min() >= -exact):
                return np.zeros(given.shape, bool)
            return np.vectorize(_differ, otypes=[bool])(given, taken.astype(np.float64))
        case "integer", "integer":
            limits = ml_dtypes.iinfo(taken.dtype)  # type: ignore[no-untyped-call]
            return (given < limits.min) | (given > limits.max)
        case _, "boolean":
            return taken.astype(given.dtype) != given
    return np.zeros(given.shape, bool)


def _differ(a: Any, b: Any) -> bool:
    return not np.isfinite(b) or int(a) != int(b)


class Entrance:
    """Batches as a step takes them: dtypes, ranks, and sizes of which each symbol has one in all inputs; what does not fit is refused whole.

    A graph cannot refuse: an axis of size 1 where others have more would be stretched, and no samples at all would give NaN.
    """

    def __init__(self, entries: Sequence[Entry], constraints: Sequence[Constraint] = ()) -> None:
        self._entries, self._constraints = {e.name: e for e in entries}, tuple(constraints)
        self._fitting: set[tuple[tuple[str, tuple[int, ...]], ...]] = set()

    def __call__(self, batch: Mapping[str, Any], names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """The arrays of these inputs (of all of them), converted."""
        entries = [self._entries[n] for n in (self._entries if names is None else names)]
        missing = [e.name for e in entries if e.name not in batch]
        if missing:
            raise Refusal("a batch lacks inputs", [f"no {n!r}" for n in missing])
        arrays = {e.name: np.asarray(converted(batch[e.name], e), order="C") for e in entries}
        shapes = tuple((n, a.shape) for n, a in arrays.items())
        if shapes not in self._fitting:
            if reasons := self._misfits(dict(shapes)):
                raise Refusal("a batch does not fit the training step", reasons)
            self._fitting.add(shapes)
        return arrays

    def _misfits(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        sizes: dict[str, int] = {}
        first: dict[str, str] = {}
        reasons, computed = [], []
        for name, shape in shapes.items():
            e = self._entries[name]
            if len(shape) != len(e.shape) or any(
                isinstance(d, int) and d != n for d, n in zip(e.shape, shape, strict=True)
            ):
                reasons.append(f"{name!r} takes {e.dtype} {list(e.shape)}, found an array of shape {list(shape)}")
                continue
            for axis, (d, n) in enumerate(zip(e.dims, shape, strict=True)):
                here = f"axis {axis} of {name!r}"
                if not isinstance(d, int) and n == 0:
                    reasons.append(f"{here} has size 0: there is nothing to compute on")
                elif isinstance(d, sympy.Symbol):
                    if sizes.setdefault(d.name, n) != n:
                        reasons.append(
                            f"{here} has size {n}, but {first[d.name]} has {sizes[d.name]}: both are {d.name}"
                        )
                    first.setdefault(d.name, here)
                elif not isinstance(d, int):
                    computed.append((here, d, n))
        if reasons:
            return reasons
        for here, d, n in computed:
            if {s.name for s in symbols(d)} <= sizes.keys() and (wanted := evaluate(d, sizes)) != n:
                reasons.append(f"{here} has size {n}, but {d} is {wanted}")
        for c in self._constraints:
            if {s.name for d in (c.left, c.right) for s in symbols(d)} <= sizes.keys() and not _holds(c, sizes):
                reasons.append(f"the model needs {c}, where " + ", ".join(f"{k} is {v}" for k, v in sizes.items()))
        return reasons


def _holds(constraint: Constraint, sizes: Mapping[str, int]) -> bool:
    left, right = evaluate(constraint.left, sizes), evaluate(constraint.right, sizes)
    match constraint.relation:
        case "==":
            return left == right
        case "divides":
            return left % right == 0
        case _:
            return left >= right
