"""Safetensors files: written whole or not at all, read without a copy.

The format is a length (8 bytes), a JSON header, and the tensors' bytes. It is written here, as the `safetensors` package has no numpy form of bfloat16.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..algebra.errors import PullbackError

__all__ = ["load_tensors", "save_tensors"]

_WORDS: dict[np.dtype[Any], str] = {
    np.dtype(np.float64): "F64", np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.int64): "I64", np.dtype(np.int32): "I32", np.dtype(np.int16): "I16", np.dtype(np.int8): "I8",
    np.dtype(np.uint64): "U64", np.dtype(np.uint32): "U32", np.dtype(np.uint16): "U16", np.dtype(np.uint8): "U8",
    np.dtype(np.bool_): "BOOL",
}  # fmt: skip
_DTYPES = {word: dtype for dtype, word in _WORDS.items()}


def save_tensors(
    path: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write tensors under a temporary name, onto the disk, and move the file into place: a reader sees the old file or the new one."""
    target = Path(path)
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, array in tensors.items():
        if array.dtype not in _WORDS:
            raise PullbackError(f"tensor {name!r} is {array.dtype}, which safetensors cannot hold")
        entries[name] = {
            "dtype": _WORDS[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    header = json.dumps(entries, ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(struct.pack("<Q", len(header)))
            file.write(header)
            for array in tensors.values():
                if array.nbytes:
                    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(target.parent)
    return target


def _sync_folder(folder: Path) -> None:
    """Make the move itself last, where the system lets a folder be synced."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def load_tensors(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors of a file, memory-mapped, and its metadata."""
    source = Path(path)
    try:
        data = np.memmap(source, np.uint8, "r")
        (length,) = struct.unpack("<Q", bytes(data[:8]))
        header = json.loads(bytes(data[8 : 8 + length]))
        metadata = header.pop("__metadata__", {})
        body = data[8 + length :]
        return {name: _array(body, entry) for name, entry in header.items()}, metadata
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise PullbackError(f"cannot read {str(path)!r} as safetensors: {error}") from error


def _array(body: np.ndarray, entry: Mapping[str, Any]) -> np.ndarray:
    start, stop = entry["data_offsets"]
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    if stop > body.size or stop - start != dtype.itemsize * int(np.prod(shape, dtype=np.int64)):
        raise ValueError("a tensor's bytes are not all there")
    if stop == start:
        return np.zeros(shape, dtype)
    array: np.ndarray = body[start:stop].view(dtype).reshape(shape)
    return array
