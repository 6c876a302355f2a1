"""Training steps of networks exported from PyTorch, taken by the MLIR compilers: lowered by torch-mlir, compiled by IREE against onnxruntime."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import pytest
from pullback.algebra.graph import Graph
from pullback.algebra.passes import default
from pullback.algebra.signature import Signature
from pullback.algebra.training.step import training_step
from pullback.backends.onnx_export import to_onnx
from pullback.backends.onnx_export.checker import check
from pullback.frontends.onnx_import import load

from tests.networks import NETWORKS, batch, build, export
from tests.test_targets import Arrays, compiled, run

SIZES = {"static": {"batch": 4, "sequence": 6}, "symbolic": {}}
NETS = ("mlp", "lenet", "gpt2")


@cache
def exported(name: str) -> onnx.ModelProto:
    return export(name, build(name), "torchscript", 17)


def stepped(name: str, size: str) -> tuple[Graph, Signature]:
    """The simplified training step, and its signature."""
    dims = {k: v for k, v in SIZES[size].items() if k in NETWORKS[name].axes}
    graph = load(exported(name), dims=dims)
    step = training_step(
        graph, loss="cross_entropy", optimizer="sgd", lr=0.1, class_axis=NETWORKS[name].class_axis
    )  # fmt: skip
    return default(step.graph), step.signature


@pytest.mark.filterwarnings("ignore")  # the importers of MLIR warn of their own deprecations
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NETS)
def test_three_steps_of_a_network_compiled_with_iree_are_those_of_onnxruntime(name: str, size: str) -> None:
    graph, signature = stepped(name, size)
    for_iree, for_onnxruntime = to_onnx(graph, target="iree"), to_onnx(graph)
    assert check(for_iree, "explicit", "iree") == []
    function = compiled(for_iree)
    feeds: Arrays = {k: v.array for k, v in graph.data.items()}
    for i in range(3):
        n, length = (4, 6) if size == "static" else ((4, 6), (1, 3), (7, 9))[i]
        feeds["x"], feeds["target"] = batch(name, n, length, seed=i)
        wanted = run(for_onnxruntime, feeds)
        results = function(*(feeds[v.params["name"]] for v in graph.inputs))
        for (key, value), found in zip(wanted.items(), map(np.asarray, results), strict=True):
            assert found.shape == value.shape, key
            np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-5, err_msg=f"{key} of step {i}")
        feeds |= {signature.carried[k]: v for k, v in wanted.items() if k in signature.carried}


# the pipelines that take a step; StableHLO and TOSA of this torch-mlir lower no shape arithmetic, and TOSA no moves of symbolic axes
TAKEN = {
    ("mlp", "static"): {"linalg-on-tensors", "stablehlo", "tosa"},
    ("mlp", "symbolic"): {"linalg-on-tensors", "stablehlo", "tosa"},
    ("lenet", "static"): {"linalg-on-tensors", "stablehlo", "tosa"},
    ("lenet", "symbolic"): {"linalg-on-tensors", "stablehlo"},
    ("gpt2", "static"): {"linalg-on-tensors", "stablehlo", "tosa"},
    ("gpt2", "symbolic"): {"linalg-on-tensors"},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "size", "pipeline"), [(*k, p) for k, taken in TAKEN.items() for p in sorted(taken)])
def test_torch_mlir_lowers_a_step(name: str, size: str, pipeline: str) -> None:
    importer = pytest.importorskip(
        "torch_mlir.extras.onnx_importer", reason="torch-mlir is not installed (pip install pullback[mlir])"
    )
    from torch_mlir.dialects import torch as torch_dialect
    from torch_mlir.ir import Context
    from torch_mlir.passmanager import PassManager

    model = to_onnx(stepped(name, size)[0], target="torch-mlir")
    assert check(model, "explicit", "torch-mlir") == []
    context = Context()
    torch_dialect.register_dialect(context)
    info = importer.ModelInfo(onnx.shape_inference.infer_shapes(model, data_prop=True))
    module = info.create_module(context=context)
    importer.NodeImporter.define_function(info.main_graph, module.operation).import_all()
    passes = f"torch-onnx-to-torch-backend-pipeline,torch-backend-to-{pipeline}-backend-pipeline"
    with context:
        PassManager.parse(f"builtin.module({passes})").run(module.operation)
    assert 'torch.operator "onnx.' not in str(module)
