"""Targets: what is refused and why, what the checker finds, and training steps compiled with IREE against onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from pullback.algebra import composites as c
from pullback.algebra import primitives as p
from pullback.algebra.dims import Dim, dim
from pullback.algebra.errors import PullbackError, Refusal
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Constant, Graph, Value, building
from pullback.algebra.passes import default
from pullback.algebra.training.step import training_step
from pullback.algebra.types import DType, bf16, f16, f32, f64, i64, tensor, u32
from pullback.backends.onnx_export import to_onnx
from pullback.backends.onnx_export.checker import FORBIDDEN, check
from pullback.backends.onnx_export.tables import ALLOWED
from pullback.backends.onnx_export.targets import TARGETS
from pullback.backends.onnx_export.writer import verify_model

N = dim("N")
Arrays = dict[str, np.ndarray]


# ---- tables ----------------------------------------------------------------------------------------------------------------------------


def test_every_target_has_its_tables() -> None:
    assert set(TARGETS) == set(FORBIDDEN) == {"onnxruntime", "onnx-mlir", "torch-mlir", "iree"}
    for target in TARGETS.values():
        assert target.measured
        assert target.embed in ("all", "frozen", "none")
        assert target.scatter in ("scatter_nd", "one_hot")


def test_an_unknown_target_profile_or_place_is_an_error() -> None:
    with building():
        x = p.input("x", tensor(f32, (N,)))
        graph = Graph((x,), {"y": x}, "g")
    with pytest.raises(PullbackError, match="there are onnxruntime, onnx-mlir, torch-mlir, iree"):
        to_onnx(graph, target="tvm")
    with pytest.raises(PullbackError, match="there are explicit, native"):
        to_onnx(graph, profile="fast")
    with pytest.raises(PullbackError, match="embed is all, frozen or none"):
        to_onnx(graph, embed="some")


def _one(dtype: DType, f: Any) -> Graph:
    with building():
        x = p.input("x", tensor(dtype, (N, 3)))
        return Graph((x,), {"y": f(x)}, "g")


@pytest.mark.parametrize(("target", "graph", "reason"), [
    ("onnx-mlir", _one(bf16, p.exp), "cannot compile bfloat16"),
    ("onnx-mlir", _one(f64, p.erf), "erf of f64"),
    ("onnx-mlir", _one(u32, lambda x: p.add(x, x)), "unsigned"),
    ("onnx-mlir", _one(u32, lambda x: p.shift_left(x, x)), "no shifts"),
    ("iree", _one(f64, p.tanh), "tanh of f64"),
    ("iree", _one(f32, lambda x: p.argsort(x, axis=0)), "sorting needs static dims"),
    ("torch-mlir", _one(f32, lambda x: p.reduce_prod(x, axes=(0,))), "static dims"),
], ids=str)  # fmt: skip
def test_what_a_target_does_not_take_is_refused_with_the_reason(target: str, graph: Graph, reason: str) -> None:
    with pytest.raises(Refusal, match=f"for {target}") as found:
        to_onnx(graph, target=target)
    assert any(reason in r for r in found.value.reasons), str(found.value)
    verify_model(to_onnx(graph))  # onnxruntime's file is fine


def test_a_gather_pulls_back_as_each_target_takes_it() -> None:
    with building():
        ct, i = p.input("ct", tensor(f32, (N, 4))), p.input("i", tensor(i64, (N,)))
        graph = Graph((ct, i), {"table_ct": p.scatter_add(ct, i, axis=0, size=7)}, "g")
    feeds = {"ct": np.arange(12, dtype=np.float32).reshape(3, 4), "i": np.int64([6, -1, 2])}
    for target in TARGETS:
        model = to_onnx(graph, target=target)
        ops = [n.op_type for n in model.graph.node]
        assert ("ScatterND" in ops) == (target in ("onnxruntime", "iree"))
        assert ("MatMul" in ops) == (target in ("onnx-mlir", "torch-mlir"))
        np.testing.assert_allclose(run(model, feeds)["table_ct"], evaluate(graph, feeds)["table_ct"])


def test_several_symbolic_axes_are_merged_apart_for_torch_mlir() -> None:
    with building():
        x = p.input("x", tensor(f32, (N, dim("M"), 2, 8)))
        graph = Graph((x,), {"y": p.reshape(p.exp(x), shape=(N * dim("M"), 16))}, "g")
    count = {t: [n.op_type for n in to_onnx(graph, target=t).graph.node].count("Reshape") for t in TARGETS}
    assert count == {"onnxruntime": 1, "onnx-mlir": 1, "torch-mlir": 2, "iree": 2}


def test_vectors_are_multiplied_by_stacks_as_matrices_for_the_compilers_that_need_it() -> None:
    with building():
        x, w = p.input("x", tensor(f32, (N, 2, 4))), p.input("w", tensor(f32, (4,)))
        y = p.dot(x, w, contract=((2,), (0,)), batch=((), ()))
        z = p.dot(w, p.transpose(x, perm=(0, 2, 1)), contract=((0,), (1,)), batch=((), ()))
        graph = Graph((x, w), {"y": y, "z": z}, "g")
    feeds = {"x": np.arange(24, dtype=np.float32).reshape(3, 2, 4), "w": np.float32([1, 2, 0, -1])}
    for target in TARGETS:
        model = to_onnx(graph, target=target)
        ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in (*model.graph.input, *model.graph.value_info)}
        products = [n for n in model.graph.node if n.op_type == "MatMul"]
        if target in ("torch-mlir", "iree"):
            assert all(min(ranks[i] for i in n.input) > 1 for n in products)
        got, want = run(model, feeds), evaluate(graph, feeds)
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value)


def test_an_axis_of_size_1_moves_without_reading_a_size() -> None:
    with building():
        x = p.input("x", tensor(f32, (N, 1, dim("M"), dim("K"))))
        graph = Graph((x,), {"y": p.reshape(p.exp(x), shape=(N, dim("M"), dim("K"), 1))}, "g")
    for target in TARGETS:
        model = to_onnx(graph, target=target)
        assert [n.op_type for n in model.graph.node] == ["Exp", "Squeeze", "Unsqueeze"]
        found = run(model, {"x": np.zeros((2, 1, 3, 5), np.float32)})
        assert found["y"].shape == (2, 3, 5, 1)


# ---- the checker -----------------------------------------------------------------------------------------------------------------------


def _told(node: onnx.NodeProto) -> onnx.NodeProto:
    for key in ("phase", "source", "primitive"):
        node.metadata_props.add(key=f"pullback.{key}", value="x")
    return node


def _model(
    *nodes: onnx.NodeProto, inputs: Mapping[str, int] | None = None, overridable: str = "", **constants: Any
) -> onnx.ModelProto:
    infos = [helper.make_tensor_value_info(n, t, ["N", 3]) for n, t in (inputs or {"x": TensorProto.FLOAT}).items()]
    held = [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()]
    infos += [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in held if t.name == overridable]
    outputs = [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, ["N", 3])]
    graph = helper.make_graph(list(nodes), "g", infos, outputs, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def _node(op: str, *inputs: str, name: str = "n", **attributes: Any) -> onnx.NodeProto:
    return _told(helper.make_node(op, list(inputs), ["y"], name=name, **attributes))


EVERY = tuple(TARGETS)
COMPILERS = ("onnx-mlir", "torch-mlir", "iree")


@pytest.mark.parametrize(("model", "problem", "targets"), [
    (_model(_node("Relu", "x")), "not an operator of the explicit profile", EVERY),
    (_model(_node("Foo", "x", domain="mine")), "domain 'mine'", EVERY),
    (_model(_node("Pad", "x", "p"), p=np.int64([0, -1, 0, 0])), "negative amount", EVERY),
    (_model(_node("ReduceSum", "x", "k"), inputs={"x": 1, "k": 7}), "axes that are computed", EVERY),
    (_model(_node("Squeeze", "x")), "Squeeze without axes", EVERY),
    (_model(helper.make_node("Exp", ["x"], ["y"], name="n")), "no pullback.phase", EVERY),
    (_model(_node("Exp", "x", name="")), "a name of its own", EVERY),
    (_model(_node("ScatterND", "x", "i", "x", reduction="add"), i=np.int64([[0]])), "reduction", ("onnx-mlir", "torch-mlir")),
    (_model(_node("Pad", "x", "p", "", "a"), p=np.int64([0, 0]), a=np.int64([0])), "Pad with axes", ("onnx-mlir",)),
    (_model(_node("Cast", "b", to=1), inputs={"b": TensorProto.BOOL}), "Cast of a bool", COMPILERS),
    (_model(_node("Mul", "x", "w"), overridable="w", w=np.float32([1, 2, 3])), "also an input", COMPILERS),
    (_model(_node("Slice", "x", "s", "e", "a", "t"), s=np.int64([-1]), e=np.int64([-9]), a=np.int64([0]), t=np.int64([-1])),
     "negative step", ("torch-mlir", "iree")),
    (_model(_node("Equal", "x", "x")), "comparison with itself", ("torch-mlir", "iree")),
    (_model(_node("Exp", "x"), inputs={"x": TensorProto.BFLOAT16}), "bfloat16", ("onnx-mlir",)),
])  # fmt: skip
def test_the_checker_finds_what_breaks_the_rules(
    model: onnx.ModelProto, problem: str, targets: tuple[str, ...]
) -> None:
    found = {t for t in TARGETS if any(problem in text for text in check(model, "explicit", t))}
    assert found == set(targets)


def test_the_checker_finds_a_missing_value_info_and_what_is_in_bodies() -> None:
    first = _told(helper.make_node("Exp", ["x"], ["h"], name="a"))
    assert any("'h' has no value_info" in text for text in check(_model(first, _node("Exp", "h"))))
    body = helper.make_graph([_node("Relu", "x")], "b", [], [helper.make_tensor_value_info("y", 1, ["N", 3])])
    branch = _told(helper.make_node("If", ["c"], ["z"], name="if", then_branch=body, else_branch=body))
    model = _model(branch, inputs={"x": 1, "c": TensorProto.BOOL})
    assert any("(Relu)" in text for text in check(model))


def test_the_native_profile_may_have_other_operators() -> None:
    model = _model(_node("Relu", "x"))
    assert "Relu" not in ALLOWED
    assert check(model, "native") == []


# ---- compiled with IREE ----------------------------------------------------------------------------------------------------------------


def _input(name: str, *shape: Dim, role: str = "parameter") -> Value:
    return p.input(name, tensor(f32, shape), role)


def _weights(**shapes: tuple[int, ...]) -> dict[str, Constant]:
    rng = np.random.default_rng(0)
    return {k: Constant((rng.standard_normal(s) * 0.3).astype(np.float32)) for k, s in shapes.items()}


def conv_net(n: Dim) -> Graph:
    """A padded 3x3 convolution, relu, 2x2 max-pool, and a dense layer."""
    with building():
        x = _input("x", n, 2, 6, 6, role="input")
        w, b, d = _input("conv.weight", 4, 2, 3, 3), _input("conv.bias", 4), _input("fc.weight", 36, 5)
        padded = p.pad(x, low=(0, 0, 1, 1), high=(0, 0, 1, 1))
        patches = p.window(padded, axes=(2, 3), sizes=(3, 3), strides=(1, 1), dilations=(1, 1))
        h = p.transpose(p.dot(patches, w, contract=((1, 4, 5), (1, 2, 3))), perm=(0, 3, 1, 2))
        h = c.relu(p.add(h, p.broadcast(b, shape=h.shape, axes=(1,))))
        h = p.reduce_max(
            p.window(h, axes=(2, 3), sizes=(2, 2), strides=(2, 2), dilations=(1, 1)), axes=(4, 5), ties="first"
        )
        y = p.dot(p.reshape(h, shape=(n, 36)), d, contract=((1,), (0,)))
    data = _weights(**{"conv.weight": (4, 2, 3, 3), "conv.bias": (4,), "fc.weight": (36, 5)})
    return Graph((x, w, b, d), {"logits": y}, "conv_net", {"logits": y}, data=data)


def attention(n: Dim) -> Graph:
    """Embeddings, one head of attention over six tokens, and classes from the mean."""
    with building():
        ids = p.input("x", tensor(i64, (n, 6)))
        table, q, k, v = _input("table", 9, 8), _input("q", 8, 8), _input("k", 8, 8), _input("v", 8, 8)
        out = _input("out", 8, 5)
        x = p.gather(table, ids, axis=0)
        a, b, d = (p.dot(x, w, contract=((2,), (0,))) for w in (q, k, v))
        scores = c.softmax(c.scale(p.dot(a, b, contract=((2,), (2,)), batch=((0,), (0,))), 8**-0.5), (2,))
        h = c.mean(p.dot(scores, d, contract=((2,), (1,)), batch=((0,), (0,))), (1,))
        y = p.dot(h, out, contract=((1,), (0,)))
    data = _weights(table=(9, 8), q=(8, 8), k=(8, 8), v=(8, 8), out=(8, 5))
    return Graph((ids, table, q, k, v, out), {"logits": y}, "attention", {"logits": y}, data=data)


def batch_of(graph: Graph, n: int, seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    shape = [n, *graph.inputs[0].shape[1:]]
    x = rng.integers(0, 9, shape) if graph.inputs[0].dtype is i64 else rng.standard_normal(shape).astype(np.float32)
    return {"x": np.asarray(x), "target": rng.integers(0, 5, n)}


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Arrays:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = ort.InferenceSession(model.SerializeToString(), options)
    names = {i.name for i in (*session.get_inputs(), *session.get_overridable_initializers())}
    outputs = session.run(None, {k: v for k, v in feeds.items() if k in names})
    return dict(zip([o.name for o in session.get_outputs()], outputs, strict=True))


def compiled(model: onnx.ModelProto) -> Any:
    """The model as a function of its inputs in order."""
    compiler = pytest.importorskip("iree.compiler", reason="IREE is not installed (pip install pullback[mlir])")
    runtime = pytest.importorskip("iree.runtime", reason="IREE is not installed (pip install pullback[mlir])")
    importer = pytest.importorskip(
        "torch_mlir.extras.onnx_importer", reason="torch-mlir is not installed (pip install pullback[mlir])"
    )
    from torch_mlir.dialects import torch as torch_dialect
    from torch_mlir.ir import Context

    context = Context()
    torch_dialect.register_dialect(context)
    info = importer.ModelInfo(onnx.shape_inference.infer_shapes(model, data_prop=True))
    module = info.create_module(context=context)
    importer.NodeImporter.define_function(info.main_graph, module.operation).import_all()
    flags = ["--iree-llvmcpu-target-cpu=host"]
    binary = compiler.compile_str(str(module), input_type="auto", target_backends=["llvm-cpu"], extra_args=flags)
    loaded = runtime.SystemContext(config=runtime.Config("local-sync"))
    vm = runtime.VmModule.copy_buffer(loaded.instance, binary)
    loaded.add_vm_module(vm)
    return loaded.modules[vm.name][model.graph.name]


@pytest.mark.filterwarnings("ignore")  # the importers of MLIR warn of their own deprecations
@pytest.mark.parametrize("size", ["static", "symbolic"])
@pytest.mark.parametrize("network", [conv_net, attention], ids=lambda f: f.__name__)
def test_three_steps_compiled_with_iree_are_those_of_onnxruntime(network: Any, size: str) -> None:
    step = training_step(network(4 if size == "static" else N), loss="cross_entropy", optimizer="sgd", lr=0.1)
    graph = default(step.graph)
    for_iree, for_onnxruntime = to_onnx(graph, target="iree"), to_onnx(graph)
    verify_model(for_iree)
    assert check(for_iree, "explicit", "iree") == []
    function = compiled(for_iree)
    carried = step.signature.carried
    feeds: Arrays = {k: v.array for k, v in graph.data.items()}
    for i in range(3):
        feeds |= batch_of(graph, 4 if size == "static" else (4, 1, 7)[i], i)
        wanted = run(for_onnxruntime, feeds)
        found = dict(
            zip(wanted, map(np.asarray, function(*(feeds[v.params["name"]] for v in graph.inputs))), strict=True)
        )
        for name, value in wanted.items():
            assert found[name].shape == value.shape, name
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=f"{name} of step {i}")
        feeds |= {carried[k]: v for k, v in wanted.items() if k in carried}


@pytest.mark.filterwarnings("ignore")  # the importers of MLIR warn of their own deprecations
def test_two_scatters_into_symbolic_zeros_do_not_meet_in_one_buffer_of_iree() -> None:
    with building():
        u, i, j = p.input("u", tensor(f32, (N, 3))), p.input("i", tensor(i64, (N,))), p.input("j", tensor(i64, (N,)))
        first, second = (p.scatter_add(u, at, axis=0, size=2 * N) for at in (i, j))
        graph = Graph((u, i, j), {"first": first, "second": second, "sum": p.add(p.exp(first), second)}, "g")
    model = to_onnx(graph, target="iree")
    assert "ScatterND" not in [n.op_type for n in model.graph.node]
    feeds = {
        "u": np.arange(12, dtype=np.float32).reshape(4, 3),
        "i": np.int64([0, 7, 0, -1]),
        "j": np.int64([1, 2, 2, 0]),
    }
    wanted = evaluate(graph, feeds)
    for found, value in zip(compiled(model)(*feeds.values()), wanted.values(), strict=True):
        np.testing.assert_allclose(np.asarray(found), value, rtol=1e-5)


def test_a_compiler_is_told_the_flags_that_a_dtype_needs() -> None:
    model = to_onnx(_one(f64, p.exp), target="iree")
    told = {q.key: q.value for q in model.metadata_props}
    assert "--iree-input-demote-f64-to-f32=false" in told["pullback.flags"]
    assert "pullback.flags" not in {q.key for q in to_onnx(_one(f32, p.exp), target="iree").metadata_props}
    assert (
        "F16C"
        in {q.key: q.value for q in to_onnx(_one(f16, p.exp), target="onnx-mlir").metadata_props}["pullback.flags"]
    )
