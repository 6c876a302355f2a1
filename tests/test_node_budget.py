"""How many nodes are written: forward, and the training step with SGD, explicit and native. The numbers may fall, never rise."""

from __future__ import annotations

import pullback
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")

from tests.networks import NETWORKS, build, export  # noqa: E402

BUDGET = {
    "mlp": (5, 11, 73, 56),
    "lenet": (10, 56, 214, 133),
    "resnet": (24, 173, 662, 534),
    "depthwise": (22, 99, 328, 291),
    "bert": (208, 161, 520, 481),
    "gpt2": (230, 164, 510, 475),
    "vit": (221, 167, 514, 466),
}
"""Network -> nodes of the model, of its explicit forward graph, of its explicit and of its native training step.

The native step of `depthwise` was 233 while the weight gradient of a grouped convolution was one `Conv`, which takes three times as long.
"""


def counts(name: str) -> tuple[int, int, int, int]:
    model = export(name, build(name).eval(), "ts", 17, keep_norms=name == "resnet")
    step = pullback.training_step(model, loss="cross_entropy", class_axis=NETWORKS[name].class_axis, optimizer="sgd")
    written = (pullback.lower(model).to_onnx(), step.to_onnx(), step.to_onnx(profile="native"))
    forward, explicit, native = (len(m.graph.node) for m in written)
    return len(model.graph.node), forward, explicit, native


@pytest.mark.parametrize("name", NETWORKS)
def test_no_more_nodes_are_written_than_before(name: str) -> None:
    got, allowed = counts(name), BUDGET[name]
    assert all(a <= b for a, b in zip(got, allowed, strict=True)), f"{got} written, {allowed} allowed"
    assert sum(got) >= 0.9 * sum(allowed), f"only {got} are written now: lower the budget from {allowed}"
