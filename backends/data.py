"""Training data as batches by name: arrays, `.npz`, `.npy` memory maps, CSV, Parquet, or any iterable of batches.

The order of an epoch depends on the seed and the epoch's number alone, so that a run can be resumed anywhere.
"""

from __future__ import annotations

import csv
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..algebra.errors import PullbackError, Refusal
from ..algebra.signature import Entry
from .entering import converted

__all__ = ["Arrays", "Axes", "Batch", "Batches", "Data", "open_data", "samples_of"]

Batch = dict[str, np.ndarray]


Axes = Mapping[str, int | None]
"""The axis of each input that its samples lie along, where that is not the first; None of an input that is the same for all samples."""


def samples_of(batch: Mapping[str, Any], axes: Axes) -> int:
    """The number of samples of a batch."""
    along = ((np.shape(a), axes.get(n, 0)) for n, a in batch.items())
    return next((shape[axis] for shape, axis in along if shape and axis is not None), 1)


@dataclass(frozen=True, slots=True)
class Arrays:
    """Whole arrays by input name, all with the samples along one axis (the first, unless `axes` says otherwise)."""

    arrays: Mapping[str, np.ndarray]
    entries: tuple[Entry, ...]
    axes: Axes = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of samples."""
        return samples_of({e.name: self.arrays[e.name] for e in self.entries}, self.axes)

    def _along(self, e: Entry) -> int | None:
        return self.axes.get(e.name, 0) if e.shape else None

    def fixed_batch(self) -> int | None:
        """The batch size that the signature fixes, if any."""
        sizes = [e.shape[axis] for e in self.entries if (axis := self._along(e)) is not None]
        return next((d for d in sizes if isinstance(d, int)), None)

    def batches(self, batch_size: int, *, shuffle: bool, seed: int, epoch: int, start: int = 0,
                drop_last: bool = False) -> Iterator[Batch]:  # fmt: skip
        """The batches of an epoch from number `start` on."""
        n = self.size
        order = np.random.default_rng([seed, epoch]).permutation(n) if shuffle else np.arange(n)
        stop = n - n % batch_size if drop_last else n
        for at in range(start * batch_size, stop, batch_size):
            yield self.take(order[at : min(at + batch_size, stop)])

    def take(self, rows: np.ndarray) -> Batch:
        """These samples."""
        batch = {}
        for e in self.entries:
            array = self.arrays[e.name]
            if (axis := self._along(e)) is not None:
                consecutive = rows.size > 0 and rows[-1] - rows[0] == rows.size - 1 and bool(np.all(np.diff(rows) == 1))
                index = slice(int(rows[0]), int(rows[-1]) + 1) if consecutive else rows
                array = array[(slice(None),) * axis + (index,)]
            batch[e.name] = np.asarray(converted(array, e), order="C")
        return batch

    def count(self, batch_size: int, drop_last: bool = False) -> int:
        """The number of batches of an epoch."""
        return self.size // batch_size if drop_last else -(-self.size // batch_size)


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches that the caller makes: an iterable of dicts by input name, or of tuples in the signature's order; or a function that gives one."""

    source: Iterable[Any] | Callable[[], Iterable[Any]]
    entries: tuple[Entry, ...]
    axes: Axes = field(default_factory=dict)

    def batches(self, batch_size: int, *, shuffle: bool, seed: int, epoch: int, start: int = 0,
                drop_last: bool = False) -> Iterator[Batch]:  # fmt: skip
        """The batches of an epoch from number `start` on; their size and order are the caller's."""
        given = self.source() if callable(self.source) else self.source
        if not isinstance(given, Iterable) and not hasattr(given, "__getitem__"):
            raise PullbackError(
                f"training data is named arrays, a path, an iterable of batches or a function that gives one, found {given!r}"
            )
        if isinstance(given, Iterator) and not callable(self.source) and epoch > 0:
            raise PullbackError(
                "the data is an iterator, which gives one epoch: pass a list, or a function that makes a new one"
            )
        for i, item in enumerate(given):
            if i >= start:
                yield self._named(item)

    def _named(self, item: Any) -> Batch:
        if isinstance(item, Mapping):
            missing = [e.name for e in self.entries if e.name not in item]
            if missing:
                raise Refusal("a batch lacks inputs", [f"no {n!r}" for n in missing])
            return {e.name: np.asarray(converted(item[e.name], e), order="C") for e in self.entries}
        names = ", ".join(e.name for e in self.entries)
        if not isinstance(item, Sequence) or isinstance(item, str | bytes):
            raise PullbackError(f"a batch is arrays by name, or a tuple of {names}; found {type(item).__name__}")
        if len(item) != len(self.entries):
            raise PullbackError(f"a batch holds {len(item)} arrays, but the step takes {len(self.entries)}: {names}")
        return {e.name: np.asarray(converted(a, e), order="C") for e, a in zip(self.entries, item, strict=True)}

    def count(self, batch_size: int, drop_last: bool = False) -> int | None:
        """The number of batches, where it is known."""
        return len(self.source) if hasattr(self.source, "__len__") else None  # type: ignore[arg-type]


Data = Arrays | Batches


def open_data(source: Any, entries: Sequence[Entry], *, axes: Axes | None = None) -> Data:
    """Data for these inputs (the model's own and the targets).

    A mapping holds arrays or paths of `.npy` files by name. A path is an `.npz`, a folder of `.npy` files (memory-mapped), a `.csv` or a
    `.parquet`. Anything else is taken as an iterable of batches, or a function that gives one. `axes` names the axis of samples where that is not
    the first, or None of an input that all samples share.
    """
    entries, axes = tuple(entries), dict(axes or {})
    _check_axes(axes, entries)
    if isinstance(source, Arrays | Batches):
        return source
    if isinstance(source, Mapping):
        arrays = {k: _array(v) for k, v in source.items()}
    elif isinstance(source, str | Path):
        arrays = _read(Path(source), entries)
    else:
        return Batches(source, entries, axes)
    return _checked(arrays, entries, axes)


def _check_axes(axes: Axes, entries: Sequence[Entry]) -> None:
    ranks = {e.name: len(e.shape) for e in entries}
    reasons = [f"{n!r} is no input of the step; there are {', '.join(ranks)}" for n in axes if n not in ranks]
    reasons += [
        f"{n!r} has rank {ranks[n]}, which has no axis {a}"
        for n, a in axes.items()
        if n in ranks and a is not None and not -ranks[n] <= a < ranks[n]
    ]
    if reasons:
        raise Refusal("cannot take samples along these axes", reasons)


def _array(value: Any) -> np.ndarray:
    if isinstance(value, str | Path):
        return _load_npy(Path(value))
    return value if isinstance(value, np.memmap | np.ma.MaskedArray) else np.asarray(value)


@contextmanager
def _reading(path: Path, kind: str) -> Iterator[None]:
    """What goes wrong while a file is read is said as one error; texts in a wrong encoding and Arrow's complaints are ValueErrors."""
    try:
        yield
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, csv.Error) as error:
        raise PullbackError(f"cannot read {str(path)!r} as {kind}: {error}") from error


def _load_npy(path: Path) -> np.ndarray:
    with _reading(path, ".npy"):
        loaded: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return loaded


def _read(path: Path, entries: tuple[Entry, ...]) -> dict[str, np.ndarray]:
    if not path.exists():
        raise PullbackError(f"no data at {str(path)!r}")
    if path.is_dir():
        return {f.stem: _load_npy(f) for f in sorted(path.glob("*.npy"))}
    match path.suffix.lower():
        case ".npz":
            with _reading(path, ".npz"), path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                return {k: archive[k] for k in archive.files}
        case ".csv" | ".tsv":
            return _from_columns(_csv(path), entries, str(path))
        case ".parquet" | ".pq":
            return _from_columns(_parquet(path), entries, str(path))
        case ".npy" if len(entries) == 1:
            return {entries[0].name: _load_npy(path)}
        case ".npy":
            names = ", ".join(e.name for e in entries)
            raise PullbackError(f"one .npy file cannot hold {names}: pass a folder with one file for each, or an .npz")
        case other:
            raise PullbackError(
                f"cannot read data from {str(path)!r}: .npz, .npy, .csv and .parquet are read, not {other!r}"
            )


def _csv(path: Path) -> dict[str, np.ndarray]:
    with _reading(path, "CSV in UTF-8"), path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        header = next(rows, None)
        if header is None:
            raise PullbackError(f"{str(path)!r} is empty")
        header = [name.strip() for name in header]
        _named_once(header, path)
        columns: list[list[str]] = [[] for _ in header]
        for number, row in enumerate(rows, 2):
            if not row:
                continue
            if len(row) != len(header):
                raise PullbackError(f"line {number} of {str(path)!r} has {len(row)} fields, the header {len(header)}")
            for column, field_ in zip(columns, row, strict=True):
                column.append(field_)
    return {name: _numbers(column, name, path) for name, column in zip(header, columns, strict=True)}


def _named_once(names: Sequence[str], path: Path) -> None:
    twice = [n for n in dict.fromkeys(names) if names.count(n) > 1]
    if twice:
        raise Refusal(
            f"cannot tell columns of {str(path)!r} apart", [f"{n!r} stands there {names.count(n)} times" for n in twice]
        )


def _numbers(column: list[str], name: str, path: Path) -> np.ndarray:
    for kind in (int, float):
        try:
            return np.array([kind(x) for x in column])
        except ValueError:
            continue
    raise PullbackError(f"column {name!r} of {str(path)!r} holds text that is no number")


def _parquet(path: Path) -> dict[str, np.ndarray]:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise PullbackError("reading Parquet needs the package pyarrow: pip install pullback[parquet]") from error
    with _reading(path, "Parquet"):
        table = pq.read_table(path)
    _named_once(table.column_names, path)
    columns = {}
    for name in table.column_names:
        with _reading(path, f"Parquet, column {name!r}"):
            columns[name] = np.array(table.column(name).to_pylist())
    return columns


def _from_columns(columns: dict[str, np.ndarray], entries: tuple[Entry, ...], where: str) -> dict[str, np.ndarray]:
    """Columns as inputs: a column of an input's name; columns `name[0]`, `name[1]`, ... (also `name.0`, `name_0`); what is left over
    belongs to the one input that has found nothing."""
    arrays: dict[str, np.ndarray] = {}
    left = dict(columns)
    waiting = []
    for e in entries:
        if e.name in left:
            arrays[e.name] = _shaped(left.pop(e.name), e, where)
            continue
        pattern = re.compile(re.escape(e.name) + r"(?:\[(\d+)\]|[._](\d+))")
        hits = sorted((int(m[1] or m[2]), n) for n in left if (m := pattern.fullmatch(n)))
        numbers = [i for i, _ in hits]
        if hits and numbers not in (list(range(len(hits))), list(range(1, len(hits) + 1))):
            raise PullbackError(
                f"columns of {e.name!r} in {where!r} are numbered {', '.join(map(str, numbers))}: one of each from 0 or 1 on is required"
            )
        if hits:
            arrays[e.name] = _shaped(np.stack([left.pop(n) for _, n in hits], axis=1), e, where)
        else:
            waiting.append(e)
    if len(waiting) == 1 and left:
        arrays[waiting[0].name] = _shaped(np.stack(list(left.values()), axis=1), waiting[0], where)
    return arrays


def _shaped(array: np.ndarray, entry: Entry, where: str) -> np.ndarray:
    rest = [d for d in entry.shape[1:] if isinstance(d, int)]
    if len(rest) != max(len(entry.shape) - 1, 0):
        return array
    try:
        return array.reshape((array.shape[0], *rest))
    except ValueError as error:
        raise PullbackError(
            f"{array.size // max(array.shape[0], 1)} numbers a row in {where!r} do not fill {entry.name!r} of shape {list(entry.shape)}"
        ) from error


def _checked(arrays: Mapping[str, np.ndarray], entries: tuple[Entry, ...], axes: Axes) -> Arrays:
    reasons = []
    sizes: dict[str, int] = {}
    for e in entries:
        array = arrays.get(e.name)
        if array is None:
            reasons.append(
                f"no array for {e.name!r} ({e.dtype} {list(e.shape)}); the data holds {', '.join(arrays) or 'nothing'}"
            )
        elif array.ndim != len(e.shape):
            reasons.append(f"{e.name!r} takes {e.dtype} {list(e.shape)}, but the array has shape {list(array.shape)}")
        elif array.ndim:
            axis = axes.get(e.name, 0)
            if axis is not None:
                axis %= array.ndim
                sizes[e.name] = array.shape[axis]
            for a, (d, n) in enumerate(zip(e.shape, array.shape, strict=True)):
                if a != axis and isinstance(d, int) and d != n:
                    reasons.append(f"{e.name!r} takes {list(e.shape)}, but the array has shape {list(array.shape)}")
    if len(set(sizes.values())) > 1:
        reasons.append("numbers of samples differ: " + ", ".join(f"{k} {v}" for k, v in sizes.items()))
    if not sizes and not reasons:
        reasons.append("no array has a sample axis")
    if reasons:
        raise Refusal("the data does not fit the training step", reasons)
    return Arrays({e.name: arrays[e.name] for e in entries}, entries, axes)
