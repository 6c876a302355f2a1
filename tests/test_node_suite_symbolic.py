"""ONNX's own node suite with symbols for sizes: every case passes where some of its sizes can be symbols, or all."""

from __future__ import annotations

import pytest
from node_suite import run, selected

SHARDS = 6


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_case_passes_with_symbols_for_its_sizes(shard: int) -> None:
    found = [run(c, "numpy", symbolic=True) for c in selected()[shard::SHARDS]]
    assert [r for r in found if r.state == "failed"] == []
