"""Where onnxruntime is wrong: each case pinned with version and symptom. A test that fails here says that a workaround can go."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from pullback.algebra import primitives as p
from pullback.algebra.graph import Graph, building
from pullback.algebra.types import f32, tensor
from pullback.backends.onnx_export import to_onnx

onnxruntime.set_default_logger_severity(4)


def run(model: onnx.ModelProto, *arrays: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip([i.name for i in session.get_inputs()], arrays, strict=True)))[0]


X = np.arange(6, dtype=np.float32).reshape(2, 3)
V = np.array([1, 10], np.float32)


@pytest.mark.skipif(not onnxruntime.__version__.startswith("1.32."), reason="pins a fault of onnxruntime 1.32")
def test_transposed_matrix_times_vector_is_wrong_in_onnxruntime_1_32() -> None:
    """`MatmulTransposeFusion` (level extended) makes a FusedMatMul with `transA` of a matrix and a vector, which reads the matrix wrongly."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[2, 3] x, float[2] v) => (float[3] y)'
        " { t = Transpose <perm = [1, 0]> (x) y = MatMul (t, v) }"
    )
    assert run(model, X, V).tolist() != (X.T @ V).tolist()


def test_transposed_matrix_times_vector_is_right_as_emitted() -> None:
    with building():
        x, v = p.input("x", tensor(f32, (2, 3))), p.input("v", tensor(f32, (2,)))
        y = p.dot(p.transpose(x, perm=(1, 0)), v, contract=((1,), (0,)))
    assert run(to_onnx(Graph((x, v), {"y": y})), X, V).tolist() == (X.T @ V).tolist()
