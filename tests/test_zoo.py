"""The light model-zoo graphs that ship in the onnx package, with seeded random weights: forward as onnxruntime, gradients as finite differences."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pullback
import pytest
from onnx import numpy_helper
from pullback.algebra.calculus.check import in_double
from pullback.algebra.evaluate import evaluate

onnxruntime.set_default_logger_severity(4)

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NAMES = [
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19", "zfnet512",
]  # fmt: skip


def with_weights(name: str) -> onnx.ModelProto:
    """The graph with each `ConstantOfShape` weight drawn: variance 2 / fan in, small vectors, scales and variances near 1."""
    model = onnx.load(LIGHT / f"light_{name}.onnx")
    shapes = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    near_one = {n.input[i] for n in model.graph.node if n.op_type == "BatchNormalization" for i in (1, 4)}
    rng = np.random.default_rng(0)
    kept = []
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape" or node.input[0] not in shapes:
            kept.append(node)
            continue
        shape, out = [int(d) for d in shapes[node.input[0]]], node.output[0]
        drawn = rng.standard_normal(shape, np.float32)
        if out in near_one:
            drawn = 1 + 0.05 * np.abs(drawn)
        else:
            drawn *= math.sqrt(2 / math.prod(shape[1:])) if len(shape) > 1 else 0.05
        model.graph.initializer.append(numpy_helper.from_array(drawn, out))
    del model.graph.node[:]
    model.graph.node.extend(kept)
    used = {i for n in kept for i in n.input}
    stored = [t for t in model.graph.initializer if t.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(stored)
    names = {t.name for t in stored}
    inputs = [i for i in model.graph.input if i.name in used and i.name not in names]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.ir_version = max(model.ir_version, 4)  # initializers need not be inputs
    return model


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], outputs: list[str] | None = None) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(outputs, feeds)


@pytest.mark.parametrize("name", NAMES)
def test_zoo_model_lowers_and_differentiates(name: str) -> None:
    model = with_weights(name)
    graph = pullback.load(model)
    (x,) = graph.by_role("input")
    rng = np.random.default_rng(1)
    image = rng.standard_normal([int(d) for d in x.shape]).astype(np.float32)
    want = run(model, {x.name: image})[0]
    got = run(pullback.lower(graph).to_onnx(), {x.name: image})[0]
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()
    del model

    step = pullback.training_step(graph, loss=_projection, optimizer="sgd", lr=0.0, batch_norm="frozen")
    feeds = {x.name: image}
    gradients = step.gradients
    loss, *slopes = run(gradients.to_onnx(), feeds, ["loss", *step.signature.gradients.values()])
    direction = {
        n: rng.standard_normal(s.shape).astype(np.float32)
        for n, s in zip(step.signature.parameters, slopes, strict=True)
    }
    # a direction in proportion to each tensor, so that no layer saturates the next
    direction = {n: d * float(np.abs(graph.data[n].array).mean()) for n, d in direction.items()}
    along = sum(float(np.sum(s.astype(np.float64) * direction[n])) for n, s in zip(direction, slopes, strict=True))
    del slopes
    double = in_double(step.evaluation)
    values = []
    for h in (1e-6, -1e-6):
        moved = {n: graph.data[n].array.astype(np.float64) + h * d for n, d in direction.items()}
        values.append(float(evaluate(double, {**feeds, **moved})["loss"]))
    differences = (values[0] - values[1]) / 2e-6
    assert np.isfinite(loss)
    assert abs(along - differences) <= 2e-3 * max(abs(differences), abs(along)), (
        f"{along} by rule, {differences} by differences"
    )


def _projection(outputs: dict[str, object], target: object) -> object:
    """A loss without saturation: the outputs against fixed random numbers."""
    from pullback.algebra import primitives as p

    (y,) = outputs.values()
    weights = np.random.default_rng(2).standard_normal([int(d) for d in y.shape])  # type: ignore[attr-defined]
    return p.reduce_sum(p.mul(y, p.literal(weights, y.dtype)), axes=tuple(range(y.rank)))  # type: ignore[attr-defined]
