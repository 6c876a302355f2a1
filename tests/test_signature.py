"""The signature of a graph: what enters, what leaves, and that its JSON says the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pullback.algebra import primitives as p
from pullback.algebra.dims import dim
from pullback.algebra.errors import PullbackError
from pullback.algebra.graph import Constant, Constraint, Graph, Role, building
from pullback.algebra.signature import Entry, Signature
from pullback.algebra.types import f32, i64, tensor


def little() -> Graph:
    n = dim("N")
    with building():
        x = p.input("x", tensor(f32, (n, 3)))
        w = p.input("w", tensor(f32, (3, 4)), "parameter")
        k = p.input("k", tensor(f32, (4,)), "frozen")
        m = p.input("exp_avg_w", tensor(f32, (3, 4)), "slot")
        t = p.input("step", tensor(i64), "step")
        h = p.dot(x, w, contract=((1,), (0,)))
        y = p.add(h, p.broadcast(k, shape=(n, 4), axes=(1,)))
        new = p.add(w, m)
        t1 = p.add(t, p.literal(np.int64(1)))
    return Graph(
        inputs=(x, w, k, m, t),
        outputs={"y": y, "new_w": new, "new_exp_avg_w": m, "new_step": t1},
        tensors={"h": h, "y": y, "gone": x},
        roles={"exp_avg_w": Role("slot", "w"), "new_w": Role("update", "w"), "new_exp_avg_w": Role("state", "w"), "new_step": Role("state")},
        data={"w": Constant(np.zeros((3, 4), np.float32))},
        constraints=(Constraint(n, "divides", 4, "a reshape"),),
        info={
            "frozen": {"ids": "integer tensor"},
            "slots": {"exp_avg_w": "exp_avg"},
            "replaces": {"new_w": "w", "new_exp_avg_w": "exp_avg_w", "new_step": "step"},
            "kind": "step",
        },
    )  # fmt: skip


def test_entries_say_role_dtype_shape_and_parameter() -> None:
    s = Signature.of(little())
    assert s.inputs[0] == Entry("x", "input", "float32", ("N", 3))
    assert s.inputs[1] == Entry("w", "parameter", "float32", (3, 4), "w")
    assert s.inputs[2] == Entry("exp_avg_w", "slot", "float32", (3, 4), "w", "exp_avg")
    assert s.outputs[1] == Entry("new_w", "update", "float32", (3, 4), "w", replaces="w")
    assert s.outputs[2] == Entry("new_exp_avg_w", "state", "float32", (3, 4), "w", "exp_avg", "exp_avg_w")
    assert [e.name for e in s.by_role("state")] == ["new_exp_avg_w", "new_step"]


def test_frozen_values_are_no_inputs_and_have_a_reason() -> None:
    s = Signature.of(little())
    assert "k" not in [e.name for e in s.inputs]
    assert s.frozen == {"ids": "integer tensor", "k": "constant"}


def test_conveniences_are_by_parameter() -> None:
    s = Signature.of(little())
    assert s.parameters == ("w",)
    assert s.updates == {"w": "new_w"}
    assert s.slots == {"w": ["exp_avg_w"]}
    assert s.carried == {"new_w": "w", "new_exp_avg_w": "exp_avg_w", "new_step": "step"}


def test_activations_are_computed_tensors_under_the_models_names() -> None:
    assert [e.name for e in Signature.of(little()).activations] == ["h", "y"]
    renamed = Signature.of(little(), tensors={"h": "forward_h", "y": "y"}).activations
    assert [(e.name, e.tensor) for e in renamed] == [("h", "forward_h"), ("y", None)]


def test_dims_say_where_they_are_read() -> None:
    assert Signature.of(little()).dims == {"N": {"input": "x", "axis": 0}}


def test_json_gives_the_same_signature_back() -> None:
    s = Signature.of(little())
    text = s.to_json()
    assert json.loads(text)["inputs"][0] == {
        "name": "x", "role": "input", "dtype": "float32", "shape": ["N", 3], "parameter": None,
    }  # fmt: skip
    assert Signature.from_json(text) == s
    assert Signature.from_json(text).to_json() == text


def test_text_that_is_no_signature_is_refused() -> None:
    with pytest.raises(PullbackError, match="not a signature"):
        Signature.from_json("[1")
    with pytest.raises(PullbackError, match="format version 99"):
        Signature.from_json('{"version": 99}')
    with pytest.raises(PullbackError, match="not a signature"):
        Signature.from_json('{"version": 1}')
