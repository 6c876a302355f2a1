"""What is covered: every operator in exactly one of four states."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from .registry import OUTSIDE, TABLE, Gradient

__all__ = ["Row", "coverage", "missing"]

DOMAINS = ("", "ai.onnx.ml", "ai.onnx.preview.training")
STRUCTURAL = {("", "Constant"): "the tensor that the node holds"}
"""Operators that the reader itself takes care of."""


@dataclass(frozen=True, slots=True)
class Row:
    """One operator: the versions its lowerings hold from, its state, and the reason or the formula."""

    domain: str
    op_type: str
    since: tuple[int, ...]
    state: str
    reason: str
    formula: str


def coverage() -> list[Row]:
    """Every operator that is lowered or declared outside, by domain and name."""
    rows = [Row(d, n, (), "outside", reason, "") for (d, n), reason in OUTSIDE.items()]
    rows += [Row(d, n, (1,), Gradient.DIFFERENTIABLE.value, "", formula) for (d, n), formula in STRUCTURAL.items()]
    for (domain, op_type), lowerings in TABLE.items():
        newest = lowerings[0]
        since = tuple(sorted(r.since for r in lowerings))
        rows.append(Row(domain, op_type, since, newest.gradient.value, newest.reason, newest.formula))
    return sorted(rows, key=lambda r: (r.domain, r.op_type))


def missing() -> list[tuple[str, str]]:
    """Operators of ONNX's domains, deprecated ones included, that stand in no row."""
    have = {(r.domain, r.op_type) for r in coverage()}
    known = {(s.domain, s.name) for s in onnx.defs.get_all_schemas_with_history() if s.domain in DOMAINS}
    return sorted(known - have)
