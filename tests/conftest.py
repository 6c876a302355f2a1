"""Fixtures that several files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pullback.frontends.onnx_import import registry


@pytest.fixture
def own_lowerings() -> Iterator[None]:
    """What a test registers with `pullback.lowers` goes with it."""
    before = {key: list(rows) for key, rows in registry.TABLE.items()}
    yield
    registry.TABLE.clear()
    registry.TABLE.update(before)
