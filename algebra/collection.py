"""Python's cyclic garbage collector, paused while a graph is made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused"]


@contextmanager
def paused() -> Iterator[None]:
    """No collection inside: nodes live and hold no cycles, so that the collector would walk all of them again and again for nothing.

    Half the time of a pass went there. Serves as a decorator too.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
