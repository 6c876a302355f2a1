"""Writes the demo's model and data. Needs scikit-learn, for the images only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from . import DATA, MODEL

TEXT = """
<ir_version: 10, opset_import: ["" : 17]>
digits (float[batch, 1, 8, 8] image) => (float[batch, 10] logits) {
  [conv1] c1 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (image, conv1.weight, conv1.bias)
  [relu1] r1 = Relu (c1)
  [pool1] p1 = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r1)
  [conv2] c2 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (p1, conv2.weight, conv2.bias)
  [relu2] r2 = Relu (c2)
  [flatten] f = Flatten <axis = 1> (r2)
  [fc1] h = Gemm <transB = 1> (f, fc1.weight, fc1.bias)
  [relu3] r3 = Relu (h)
  [fc2] logits = Gemm <transB = 1> (r3, fc2.weight, fc2.bias)
}
"""
WEIGHTS = {"conv1": (16, 1, 3, 3), "conv2": (32, 16, 3, 3), "fc1": (64, 512), "fc2": (10, 64)}


def model() -> onnx.ModelProto:
    """The classifier, its weights drawn as PyTorch draws a fresh layer's (uniform within 1 / sqrt(fan in))."""
    rng = np.random.default_rng(0)
    made = onnx.parser.parse_model(TEXT.replace(".weight", "_weight").replace(".bias", "_bias"))
    for name, shape in WEIGHTS.items():
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        for suffix, size in (("weight", shape), ("bias", shape[:1])):
            array = rng.uniform(-bound, bound, size).astype(np.float32)
            made.graph.initializer.append(numpy_helper.from_array(array, f"{name}.{suffix}"))
    for node in made.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = name.replace("_weight", ".weight").replace("_bias", ".bias")
    onnx.checker.check_model(made, full_check=True)
    return made


def data() -> dict[str, np.ndarray]:
    """The images as float32 in 0 to 1, in a fixed random order, the last 360 for testing."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order] * 16).clip(0, 255).astype(np.uint8)[:, None]
    labels = digits.target[order].astype(np.int64)
    return {"image": images[:-360], "target": labels[:-360], "test_image": images[-360:], "test_target": labels[-360:]}


if __name__ == "__main__":
    onnx.save(model(), MODEL)
    arrays: dict[str, Any] = {k: v.astype(np.float32) / 256 if "image" in k else v for k, v in data().items()}
    np.savez_compressed(DATA, **arrays)
    print(MODEL.stat().st_size, DATA.stat().st_size)
