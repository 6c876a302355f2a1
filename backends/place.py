"""Files put into place whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["moved"]


@contextmanager
def moved(place: Path) -> Iterator[BinaryIO]:
    """A file under another name in the same directory, moved into place when all is well, removed when not."""
    aside = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            yield file
        os.replace(aside, place)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
