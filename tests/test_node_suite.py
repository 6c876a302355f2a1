"""ONNX's own node suite as it is given, by numpy and by onnxruntime: every case passes, or is listed with the reason."""

from __future__ import annotations

import fnmatch

import node_suite
import pytest
from node_suite import KINDS, LISTED, Case, cases, run, selected

SHARDS = 4


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("engine", ["numpy", "onnxruntime"])
def test_every_case_passes_or_is_listed(engine: str, shard: int) -> None:
    found = [run(c, engine) for c in selected()[shard::SHARDS]]
    assert [r for r in found if r.state == "failed"] == []


@pytest.mark.parametrize("engine", ["numpy", "onnxruntime"])
def test_what_is_listed_still_cannot_pass(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {p: r for table in (LISTED[""], LISTED[engine]) for p, r in table.items()}
    chosen = [c for k in KINDS for c in cases(k) if any(fnmatch.fnmatchcase(c.name, p) for p in names)]
    monkeypatch.setattr(node_suite, "LISTED", {"": {}, engine: {}})
    assert [r.case for r in (run(c, engine) for c in chosen) if r.state != "failed"] == []


@pytest.mark.parametrize("table", LISTED)
def test_every_entry_of_the_list_is_about_some_case(table: str) -> None:
    names = [c.name for k in KINDS for c in cases(k)]
    assert [p for p in LISTED[table] if not fnmatch.filter(names, p)] == []


def test_a_wrong_result_is_noticed() -> None:
    case = next(c for c in cases("node") if c.name == "test_add")
    inputs, (expected,) = case.sets[0]
    wrong = Case(case.name, case.kind, case.model, ((inputs, [expected + 1]),), case.rtol, case.atol)
    assert run(wrong).state == "failed"


def test_cases_are_chosen_by_operator_and_name() -> None:
    assert {c.name for c in selected(("node",), ("Add",), "test_add*")} >= {"test_add", "test_add_bcast"}
    assert node_suite.main(["--op", "Add", "--case", "test_add", "--kind", "node", "--failed-only"]) == 0
