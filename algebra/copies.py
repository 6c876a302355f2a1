"""Which stored matrices are copies of others.

A network that uses a matrix and its transpose (an embedding and the logits from it), or one matrix in two layers, has one weight. Exporters that fold
transposes into stored tensors write it two times, the second time under a name of their own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from .errors import PullbackError
from .graph import Constant

__all__ = ["NO_NAME", "copies"]

NO_NAME = re.compile(r"(val_|onnx::\w+_)\d+")
"""What PyTorch's exporters call values that have no name in the network."""
_COPY = re.compile(
    NO_NAME.pattern
    + r"|(t|mT|T|numpy_t|transpose|permute|clone|contiguous|view|reshape|alias|detach|swapaxes)(_\d+)?"  # what a function made of what it was given
)
_TELLING = 256  # different values that are enough to tell a trained matrix from one that was filled by a rule


def copies(stored: Mapping[str, Constant]) -> dict[str, tuple[str, bool]]:
    """Name of a copy -> the matrix that it is a copy of, and whether it is transposed.

    Only tensors under names that an exporter made are taken for copies, and only where their values are too many to be equal by chance.
    """
    alike: dict[tuple[np.dtype, tuple[int, ...]], list[str]] = defaultdict(list)
    for name, constant in stored.items():
        if len(constant.shape) == 2:
            alike[constant.dtype, tuple(sorted(constant.shape))].append(name)
    found: dict[str, tuple[str, bool]] = {}
    for names in alike.values():
        if len(names) > 1 and any(map(_COPY.fullmatch, names)):
            _among({n: stored[n] for n in names}, found)
    return found


def _among(stored: Mapping[str, Constant], found: dict[str, tuple[str, bool]]) -> None:
    sources: dict[tuple[bytes, bytes], list[tuple[str, np.ndarray]]] = defaultdict(list)
    for name in sorted(stored, key=lambda n: _COPY.fullmatch(n) is not None):  # the network's own names first
        try:
            array = np.asarray(stored[name].array)
        except PullbackError:  # is said where the tensor is used
            continue
        if array.size == 0:
            continue
        like = sources[array[0, 0].tobytes(), array[-1, -1].tobytes()]  # transposing leaves these corners
        if _COPY.fullmatch(name) and np.unique(array).size > min(array.size // 2, _TELLING):
            for source, other in like:
                same = np.array_equal(array, other)
                if same or np.array_equal(array, other.T):
                    found[name] = (source, not same)
                    break
        if name not in found:
            like.append((name, array))
