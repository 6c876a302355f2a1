"""Every primitive as ONNX: the same numbers on onnxruntime and on ONNX's reference evaluator as numpy gives, and the forms that are promised."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numerics import pulled_back
from onnx.reference import ReferenceEvaluator
from pullback.algebra import primitives as p
from pullback.algebra.dims import dim
from pullback.algebra.dims import evaluate as size_of
from pullback.algebra.errors import Refusal
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Constant, Graph, Role, Value, at, building
from pullback.algebra.origin import Origin, Source
from pullback.algebra.signature import Signature
from pullback.algebra.types import DType, TensorType, bf16, bool_, f16, f32, f64, i8, i64, tensor, u8
from pullback.backends.onnx_export import to_onnx
from pullback.backends.onnx_export.checker import check
from pullback.backends.onnx_export.legal import illegal
from pullback.backends.onnx_export.tables import ALLOWED, EMIT
from pullback.backends.onnx_export.targets import NEWEST, OLDEST, ORT_DETOURS, TARGETS
from pullback.backends.onnx_export.workarounds import WORKAROUNDS, Workaround
from pullback.backends.onnx_export.writer import verify_model
from samples import SAMPLES, Sample

N, M = dim("N"), dim("M")
TOLERANCE = {"float64": 1e-11, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}

DIFFERENT = ("scatter_add", "gather", "cast", "scan", "reverse", "select", "max", "reduce_max", "pow")  # as to targets
HERE = [w for w in WORKAROUNDS if w.target == "onnxruntime"]

every = pytest.mark.parametrize("sample", SAMPLES, ids=str)


# ---- running ---------------------------------------------------------------------------------------------------------------------------


def on_onnxruntime(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options)
    names = {i.name for i in session.get_inputs()}
    return list(session.run(None, {k: v for k, v in feeds.items() if k in names}))


def on_reference(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    names = {i.name for i in model.graph.input}
    with np.errstate(all="ignore"):
        found = ReferenceEvaluator(model).run(None, {k: v for k, v in feeds.items() if k in names})
    return [np.asarray(x) for x in found]


def has(graph: Graph, dtype: DType) -> bool:
    return any(dtype.name in repr(v.type) for v in graph.nodes)


def same(found: np.ndarray, wanted: np.ndarray, what: str) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), what
    low = TOLERANCE.get(wanted.dtype.name, 0)
    if wanted.dtype.kind in "biu":
        np.testing.assert_array_equal(found, wanted, what)
    else:
        np.testing.assert_allclose(
            found.astype(np.float64), wanted.astype(np.float64), rtol=low, atol=low, err_msg=what
        )


def agrees(
    graph: Graph,
    model: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    sizes: Mapping[str, int],
    *,
    reference: bool = True,
) -> None:
    wanted = evaluate(graph, feeds, sizes=sizes)
    runs = {"reference": on_reference} if reference else {}
    if not has(graph, bf16):  # onnxruntime's CPU provider computes almost nothing in bfloat16
        runs["onnxruntime"] = on_onnxruntime
    for name, run in runs.items():
        for (output, value), found in zip(wanted.items(), run(model, feeds), strict=True):
            same(found, value, f"{output} on {name}")


def runs_backwards(model: onnx.ModelProto) -> bool:
    """The reference evaluator has no backward Scan."""
    return any(a.name.startswith("scan_") for node in model.graph.node for a in node.attribute)


def seeded(
    graph: Graph, feeds: Mapping[str, np.ndarray], sizes: Mapping[str, int], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    seeds = {
        v.params["name"]: np.asarray(rng.standard_normal([size_of(d, sizes) for d in v.shape])).astype(v.dtype.numpy)
        for v in graph.inputs
        if v.params["role"] == "seed"
    }
    return {**feeds, **seeds}


def rng_of(sample: Sample) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(str(sample).encode()))


def ops_of(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


def model_of(output: Value, *inputs: Value, **options: object) -> onnx.ModelProto:
    model = to_onnx(Graph(inputs, {"y": output}, "g"), **options)  # type: ignore[arg-type]
    verify_model(model)
    assert check(model, "explicit", str(options.get("target", "onnxruntime"))) == []
    return model


# ---- every primitive -------------------------------------------------------------------------------------------------------------------


def test_every_primitive_has_an_emission() -> None:
    assert set(p.BY_NAME) <= set(EMIT)
    assert set(EMIT) - set(p.BY_NAME) == {"onnx"}  # what the native profile raises


def test_every_allowed_operator_says_why_and_exists() -> None:
    for op, why in ALLOWED.items():
        assert why
        assert onnx.defs.has(op, "")
    assert not {"Clip", "Relu", "Sigmoid", "ReduceMean", "Einsum", "Softmax", "Conv", "Gemm"} & set(ALLOWED)


@every
def test_a_primitive_computes_what_numpy_does(sample: Sample) -> None:
    graph, rng = sample.graph(), rng_of(sample)
    model = to_onnx(graph)
    verify_model(model)
    assert check(model) == []
    for sizes in (sample.sizes, *sample.also):
        sizes = {**sample.sizes, **sizes}
        agrees(graph, model, sample.feeds(rng, sizes), sizes, reference=not runs_backwards(model))


@every
def test_its_pullback_computes_what_numpy_does(sample: Sample) -> None:
    graph, rng = pulled_back(sample.graph(), sample.wanted()), rng_of(sample)
    if not graph.outputs:
        return  # nothing to differentiate
    model = to_onnx(graph)
    verify_model(model)
    assert check(model) == []
    for sizes in (sample.sizes, *sample.also):
        sizes = {**sample.sizes, **sizes}
        agrees(graph, model, seeded(graph, sample.feeds(rng, sizes), sizes, rng), sizes, reference=False)


@pytest.mark.parametrize("target", [t for t in TARGETS if t != "onnxruntime"])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_compiler_gets_only_forms_that_it_takes(target: str, way: str) -> None:
    written = 0
    for sample in SAMPLES:
        graph = sample.graph() if way == "forward" else pulled_back(sample.graph(), sample.wanted())
        try:
            model = to_onnx(graph, target=target)
        except Refusal:
            continue
        written += 1
        assert check(model, "explicit", target) == [], str(sample)
        feeds = seeded(graph, sample.feeds(rng_of(sample)), sample.sizes, rng_of(sample))
        wanted = evaluate(graph, feeds, sizes=sample.sizes)
        if sample.primitive.name in DIFFERENT and not runs_backwards(model):
            for (name, value), found in zip(wanted.items(), on_reference(model, feeds), strict=True):
                same(found, value, f"{sample}: {name}")
    assert written > 500 if way == "forward" else written > 300


# ---- opsets ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", range(OLDEST, NEWEST + 1))
def test_every_opset_is_written_or_refused(opset: int) -> None:
    for sample in SAMPLES[:: 3 if opset % 2 else 4]:
        try:
            model = to_onnx(sample.graph(), opset=opset)
        except Refusal as error:
            unlike = [r for r in error.reasons if f"opset {opset}" not in r]
            if unlike or opset >= (26 if sample.primitive.name == "bit_cast" else 22):
                pytest.fail(f"{sample}: {error}")
            continue
        verify_model(model)
        assert model.opset_import[0].version == opset
        if not has(sample.graph(), bf16):
            feeds = sample.feeds(rng_of(sample))
            same(on_onnxruntime(model, feeds)[0], evaluate(sample.graph(), feeds, sizes=sample.sizes)["y"], str(sample))


def test_an_opset_without_an_operator_is_refused_with_the_first_that_has_it() -> None:
    with building():
        x = p.input("x", tensor(bf16, (N,)))
        y = p.input("k", tensor(i64, (N,)))
        graph = Graph((x, y), {"a": p.sin(x), "b": p.bit_and(y, y)}, "g")
    with pytest.raises(Refusal) as found:
        to_onnx(graph, opset=13)
    assert len(found.value.reasons) == 2
    assert "Sin takes no bf16 in opset 13, but from 22 on" in str(found.value)
    assert "opset 13 has no BitwiseAnd" in str(found.value)
    assert list(illegal([], 13)) == []


@pytest.mark.parametrize("opset", [12, NEWEST + 1])
def test_an_opset_out_of_range_is_refused(opset: int) -> None:
    with building():
        x = p.input("x", tensor(f32, (N,)))
    with pytest.raises(Refusal, match=f"opset {opset} cannot be written"):
        to_onnx(Graph((x,), {"y": x}, "g"), opset=opset)


# ---- broadcasts and layout -------------------------------------------------------------------------------------------------------------


def _x(name: str = "x", shape: tuple[object, ...] = (N, 3), dtype: DType = f32, role: str = "input") -> Value:
    return p.input(name, TensorType(dtype, shape), role)  # type: ignore[arg-type]


def test_a_bias_is_added_by_implicit_broadcasting() -> None:
    with building():
        x, b = _x(), _x("b", (3,))
        y = p.add(x, p.broadcast(b, shape=(N, 3), axes=(1,)))
        assert ops_of(model_of(y, x, b)) == ["Add"]


def test_a_column_takes_one_unsqueeze() -> None:
    with building():
        x, b = _x(), _x("b", (N,))
        y = p.mul(x, p.broadcast(b, shape=(N, 3), axes=(0,)))
        assert ops_of(model_of(y, x, b)) == ["Unsqueeze", "Mul"]


def test_a_number_is_a_scalar_initializer_shared_by_value() -> None:
    with building():
        x = _x()
        y = p.mul(p.add(x, p.number(0.5, x)), p.broadcast(p.literal(0.5, f32), shape=(N, 3), axes=()))
        model = model_of(y, x)
    assert ops_of(model) == ["Add", "Mul"]
    assert [(t.name, list(t.dims)) for t in model.graph.initializer] == [("f32_0.5", [])]


def test_a_difference_is_a_sub() -> None:
    with building():
        x, z = _x(), _x("z")
        assert ops_of(model_of(p.add(x, p.neg(z)), x, z)) == ["Sub"]
        assert ops_of(model_of(p.add(p.neg(x), z), x, z)) == ["Sub"]
        u = _x("u", (2,), u8)
        assert ops_of(model_of(p.add(u, p.neg(u)), u)) == ["Sub"]


def test_what_is_broadcast_everywhere_is_computed_small() -> None:
    with building():
        x, b = _x(), _x("b", (3,))
        wide = [p.broadcast(v, shape=(N, 3), axes=(1,)) for v in (b, p.exp(b))]
        y = p.mul(x, p.add(*wide))
        model = model_of(y, x, b)
    assert ops_of(model) == ["Exp", "Add", "Mul"]
    shapes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.value_info
    }
    assert sorted(map(str, shapes.values())) == ["[3]", "[3]"]


def test_a_sum_over_a_broadcast_axis_is_a_multiple() -> None:
    with building():
        b, x = _x("b", (3,)), _x()
        y = p.reduce_sum(p.broadcast(b, shape=(N, 3), axes=(1,)), axes=(0,))
        assert "ReduceSum" not in ops_of(model_of(y, x, b))
        z = p.reduce_max(p.broadcast(b, shape=(N, 3), axes=(1,)), axes=(0,))
        assert ops_of(model_of(z, x, b)) == ["Identity"]


def test_transposes_cancel_and_wait_for_a_consumer() -> None:
    with building():
        x = _x()
        y = p.transpose(p.exp(p.transpose(x, perm=(1, 0))), perm=(1, 0))
        assert ops_of(model_of(y, x)) == ["Exp"]


def test_keeping_and_dropping_an_axis_of_size_one_costs_nothing() -> None:
    with building():
        x = _x()
        kept = p.reshape(p.reduce_sum(x, axes=(1,)), shape=(N, 1))
        y = p.mul(x, p.broadcast(p.reshape(kept, shape=(N,)), shape=(N, 3), axes=(0,)))
        assert ops_of(model_of(y, x)) == ["ReduceSum", "Unsqueeze", "Mul"]


@pytest.mark.parametrize("dtype", [f64, f32, f16], ids=repr)
def test_clamps_are_extremes_on_onnxruntime_and_keep_nan(dtype: DType) -> None:
    with building():
        x = _x("x", (N,), dtype)
        zero, six = p.number(0, x), p.number(6, x)
        outputs = {
            "relu": p.select(p.less_equal(x, zero), zero, x),
            "low": p.select(p.less(x, zero), zero, x),
            "high": p.select(p.less(six, x), six, x),
            "step": p.select(p.less(zero, x), p.number(1, x), zero),
            "other": p.select(p.less(x, six), six, zero),
        }
        graph = Graph((x,), outputs, "g")
    model = to_onnx(graph)
    assert ops_of(model).count("Where") == 1
    feeds = {"x": np.array([np.nan, -np.inf, -1, -0.0, 0, 3, 6, 7, np.inf], dtype.numpy)}
    agrees(graph, model, feeds, {})
    assert "Max" not in ops_of(to_onnx(graph, target="iree"))  # which gives 0 for the larger of NaN and 0


# ---- dot -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b", "contract", "batch", "ops"), [
    ((N, 4), (4, 3), ((1,), (0,)), ((), ()), ["MatMul"]),
    ((N, M, 4), (4, 3), ((2,), (0,)), ((), ()), ["MatMul"]),
    ((N, 2, M, 4), (4, 3), ((3,), (0,)), ((), ()), ["MatMul"]),
    ((N, 2, M, 4), (N, 2, 4, M), ((3,), (2,)), ((0, 1), (0, 1)), ["MatMul"]),
    ((N, 4), (3, 4), ((1,), (1,)), ((), ()), ["Transpose", "MatMul"]),
    ((N, 4), (N, 3), ((0,), (0,)), ((), ()), ["Transpose", "MatMul"]),
    ((4,), (4,), ((0,), (0,)), ((), ()), ["MatMul"]),
    ((N, 4), (4,), ((1,), (0,)), ((), ()), ["MatMul"]),
    ((4,), (N, 4, 3), ((0,), (1,)), ((), ()), ["MatMul"]),
    ((N,), (4,), ((), ()), ((), ()), ["Unsqueeze", "Mul"]),
    ((N, 4), (N, 4), ((), ()), ((0, 1), (0, 1)), ["Mul"]),
    ((N, 4), (N, 4), ((1,), (1,)), ((0,), (0,)), ["Mul", "ReduceSum"]),
    ((N, 4, 5), (N, 4, 5), ((1, 2), (1, 2)), ((0,), (0,)), ["Mul", "ReduceSum"]),
    ((3, 4, 5), (N, 4, 5, 6), ((1, 2), (1, 2)), ((), ()), ["Reshape", "Reshape", "MatMul", "Transpose"]),
], ids=str)  # fmt: skip
def test_a_dot_takes_as_few_operators_as_it_can(a: tuple[object, ...], b: tuple[object, ...], contract: tuple[tuple[int, ...], ...],
                                               batch: tuple[tuple[int, ...], ...], ops: list[str]) -> None:  # fmt: skip
    with building():
        x, y, more = _x("x", a), _x("y", b), _x("more", (N, M))
        z = p.dot(x, y, contract=contract, batch=batch)  # type: ignore[arg-type]
        graph = Graph((x, y, more), {"z": z}, "g")
    model = to_onnx(graph)
    verify_model(model)
    assert sorted(ops_of(model)) == sorted(ops)
    for sizes in ({"N": 2, "M": 3}, {"N": 1, "M": 1}):
        rng = np.random.default_rng(0)
        feeds = {
            v.params["name"]: rng.standard_normal([size_of(d, sizes) for d in v.shape]).astype(np.float32)
            for v in graph.inputs
        }
        agrees(graph, model, feeds, sizes)


def test_a_weight_that_is_a_view_is_multiplied_with_one_matmul_for_every_batch() -> None:
    with building():
        x, w = _x("x", (N, M, 4)), _x("w", (4, 5))
        y = p.dot(x, p.broadcast(w, shape=(N, 4, 5), axes=(1, 2)), contract=((2,), (1,)), batch=((0,), (0,)))
        assert ops_of(model_of(y, x, w)) == ["MatMul"]


# ---- symbolic sizes --------------------------------------------------------------------------------------------------------------------


def test_each_symbol_is_read_once() -> None:
    with building():
        x, z = _x("x", (N, M)), _x("z", (N, M))
        flat = p.reshape(x, shape=(N * M,))
        y = p.mul(flat, p.broadcast(p.cast(p.dim(N * M), dtype=f32), shape=(N * M,), axes=()))
        more = p.reshape(p.mul(y, y), shape=(M, N))
        graph = Graph((x, z), {"y": p.reshape(more, shape=(N, M)), "count": p.dim(N)}, "g")
    model = to_onnx(graph)
    assert ops_of(model).count("Shape") == 2
    assert ops_of(model).count("Mul") == 3  # one of sizes


def test_a_reshape_with_one_unknown_is_a_constant() -> None:
    with building():
        x = _x("x", (N, 6, M))
        y = p.reshape(x, shape=(N, 2, 3, M))
        model = model_of(y, x)
    assert ops_of(model) == ["Reshape"]
    (shape,) = (onnx.numpy_helper.to_array(t).tolist() for t in model.graph.initializer)
    assert shape.count(-1) <= 1


def test_a_size_that_no_input_tells_is_refused() -> None:
    with building():
        x = _x()
        graph = Graph((x,), {"a": p.iota(M), "b": p.dim(dim("K"))}, "g")
    with pytest.raises(Refusal) as found:
        to_onnx(graph)
    assert [r.split()[2] for r in found.value.reasons] == ["M", "K"]


# ---- names, metadata, value infos ------------------------------------------------------------------------------------------------------


def _linear() -> Graph:
    with building():
        with at(Origin("forward", Source("/fc1/Gemm", "Gemm", "", 18))):
            x, w = _x("in put", (N, 4)), _x("fc1.weight", (4, 3), role="parameter")
            h = p.dot(x, w, contract=((1,), (0,)))
        with at(Origin("forward", Source("act", "Tanh", "", 18))):
            y = p.tanh(h)
        with at(Origin("loss", Source("mse_loss"))):
            loss = p.reduce_sum(p.mul(y, y), axes=(0, 1))
        with at(Origin("optimizer", Source("sgd", "SGD"))):
            new = p.add(w, p.neg(p.mul(w, p.number(0.5, w))))
    data = {"fc1.weight": Constant(np.ones((4, 3), np.float32))}
    roles = {"loss": Role("loss"), "new_fc1.weight": Role("update", "fc1.weight")}
    outputs = {"loss": loss, "logits:0": y, "new_fc1.weight": new}
    return Graph((x, w), outputs, "net", {"hidden/0": h, "logits:0": y}, roles, data)


def test_names_are_kept_letter_for_letter() -> None:
    model = to_onnx(_linear())
    assert [i.name for i in model.graph.input] == ["in put", "fc1.weight"]
    assert [o.name for o in model.graph.output] == ["loss", "logits:0", "new_fc1.weight"]
    assert "hidden/0" in {o for n in model.graph.node for o in n.output}


def test_node_names_start_with_phase_and_source() -> None:
    model = to_onnx(_linear())
    assert [n.name for n in model.graph.node] == [
        "forward_fc1_Gemm_dot_matmul",
        "forward_act_tanh",
        "loss_mse_loss_mul",
        "loss_mse_loss_reduce_sum_reducesum",
        "optimizer_sgd_mul",
        "optimizer_sgd_add_sub",
    ]


def test_metadata_of_nodes_and_model() -> None:
    model = to_onnx(_linear())
    told = [{q.key: q.value for q in n.metadata_props} for n in model.graph.node]
    assert told[0] == {"pullback.phase": "forward", "pullback.source": "/fc1/Gemm, Gemm", "pullback.primitive": "dot"}
    assert [t["pullback.phase"] for t in told] == ["forward", "forward", "loss", "loss", "optimizer", "optimizer"]
    text = {q.key: q.value for q in model.metadata_props}["pullback.signature"]
    signature = Signature.from_json(text)
    assert signature.parameters == ("fc1.weight",)
    assert signature.updates == {"fc1.weight": "new_fc1.weight"}
    assert [a.name for a in signature.activations] == ["hidden/0", "logits:0"]


def test_inputs_outputs_and_activations_say_their_role() -> None:
    graph = to_onnx(_linear()).graph
    told = {
        v.name: {q.key: q.value for q in v.metadata_props} for v in (*graph.input, *graph.value_info, *graph.output)
    }
    assert told["in put"] == {"pullback.role": "input"}
    assert told["fc1.weight"] == {"pullback.role": "parameter", "pullback.parameter": "fc1.weight"}
    assert told["hidden/0"] == {"pullback.role": "activation"}
    assert told["loss"] == {"pullback.role": "loss"}
    assert told["new_fc1.weight"] == {"pullback.role": "update", "pullback.parameter": "fc1.weight"}
    words = {v.name: v.doc_string for v in (*graph.input, *graph.value_info, *graph.output)}
    assert (words["in put"], words["hidden/0"]) == ("input", "activation")
    assert "nodes: 2 forward, 2 loss, 2 optimizer" in graph.doc_string.splitlines()


def test_every_intermediate_has_a_value_info_with_symbolic_shape() -> None:
    model = to_onnx(_linear())
    infos = {v.name: v for v in model.graph.value_info}
    outputs = {o.name for o in model.graph.output}
    assert set(infos) | outputs == {o for n in model.graph.node for o in n.output}
    assert infos["hidden/0"].type.tensor_type.shape.dim[0].dim_param == "N"


def test_outputs_that_are_inputs_or_each_other_are_identities() -> None:
    with building():
        x, w = _x(), _x("w", (3,))
        y = p.exp(x)
        graph = Graph(
            (x, w), {"a": y, "b": y, "c": x, "d": p.literal(np.float32([1, 2])), "e": p.stop_gradient(y)}, "g"
        )
    model = to_onnx(graph)
    verify_model(model)
    assert ops_of(model) == ["Exp", "Identity", "Identity", "Identity", "Identity"]
    assert [i.name for i in model.graph.input] == ["x", "w"]  # the unused one stays
    feeds = {"x": np.ones((2, 3), np.float32), "w": np.ones(3, np.float32)}
    agrees(graph, model, feeds, {"N": 2})


def test_what_no_output_needs_is_not_written() -> None:
    with building():
        x = _x()
        y = p.tanh(x)
        graph = Graph((x,), {"y": y}, "g", {"unused": p.exp(x), "y": y})
    model = to_onnx(graph)
    assert ops_of(model) == ["Tanh"]
    text = {q.key: q.value for q in model.metadata_props}["pullback.signature"]
    assert [a.name for a in Signature.from_json(text).activations] == ["y"]


# ---- where initial values live ---------------------------------------------------------------------------------------------------------


def _embedded(**options: object) -> tuple[list[str], list[str]]:
    with building():
        x, w, c, lr = (
            _x("x", (N, 3)),
            _x("w", (3,), role="parameter"),
            _x("c", (3,), role="frozen"),
            _x("lr", (), role="hyperparameter"),
        )
        y = p.mul(p.mul(x, p.broadcast(w, shape=(N, 3), axes=(1,))), p.broadcast(c, shape=(N, 3), axes=(1,)))
        y = p.mul(y, p.broadcast(lr, shape=(N, 3), axes=()))
        data = {
            "w": Constant(np.ones(3, np.float32)),
            "c": Constant(np.ones(3, np.float32)),
            "lr": Constant(np.float32(0.1)),
        }
        model = to_onnx(Graph((x, w, c, lr), {"y": y}, "g", data=data), **options)  # type: ignore[arg-type]
    verify_model(model)
    return [i.name for i in model.graph.input], [t.name for t in model.graph.initializer]


def test_initial_values_live_where_embed_says() -> None:
    assert _embedded() == (["x", "w", "lr"], ["w", "c", "lr"])
    assert _embedded(embed="frozen") == (["x", "w", "lr"], ["c"])
    assert _embedded(embed="none") == (["x", "w", "c", "lr"], [])
    assert _embedded(target="iree") == _embedded(embed="frozen")


# ---- bfloat16, float16, double ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [f64, f32, f16, bf16], ids=repr)
def test_constants_have_the_dtype_of_the_graph(dtype: DType) -> None:
    with building():
        x = _x(dtype=dtype)
        y = p.mul(
            p.add(x, p.number(0.1, x)),
            p.broadcast(p.cast(p.cast(p.dim(N), dtype=f32), dtype=dtype), shape=(N, 3), axes=()),
        )
        model = model_of(y, x)
    (constant,) = (t for t in model.graph.initializer if "0.1" in t.name or "0.09" in t.name)
    assert onnx.helper.tensor_dtype_to_np_dtype(constant.data_type) == dtype.numpy


# ---- runtimes --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workaround", HERE, ids=lambda w: f"{w.op} {w.dtype}")
def test_a_workaround_is_still_needed(workaround: Workaround) -> None:
    number = onnx.helper.np_dtype_to_tensor_dtype(workaround.dtype.numpy)
    x, y = (onnx.helper.make_tensor_value_info(n, number, [2]) for n in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node(workaround.op, ["x"], ["y"])], "g", [x], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 22)], ir_version=10)
    with pytest.raises(Exception, match="NOT_IMPLEMENTED") as found:
        on_onnxruntime(model, {"x": np.ones(2, workaround.dtype.numpy)})
    assert "Could not find an implementation" in str(found.value), "the kernel is there: the workaround can go"


@pytest.mark.parametrize("workaround", HERE, ids=lambda w: f"{w.op} {w.dtype}")
def test_a_workaround_is_exact_to_a_few_units_in_the_last_place(workaround: Workaround) -> None:
    import math

    name = workaround.op.lower()
    rng = np.random.default_rng(0)
    low, high = {"asin": (-1, 1), "acos": (-1, 1), "atanh": (-1, 1), "acosh": (1, 50)}.get(name, (-6, 6))
    x = np.concatenate([rng.uniform(low, high, 300), np.clip(rng.standard_normal(100) * 1e-5, low, high)])
    with building():
        value = _x("x", (N,), f64)
        graph = Graph((value,), {"y": getattr(p, name)(value)}, "g")
    (found,) = on_onnxruntime(to_onnx(graph), {"x": x})
    wanted = np.array([getattr(math, name)(v) for v in x])
    np.testing.assert_allclose(found, wanted, rtol=1.5e-15, atol=1e-300)


@pytest.mark.parametrize("target", ["iree", "torch-mlir"])
def test_powers_of_negative_numbers_are_written_out_for_compilers(target: str) -> None:
    with building():
        x, y = _x("x", (N,)), _x("y", (N,))
        graph = Graph((x, y), {"z": p.pow(x, y), "cube": p.pow(x, p.number(3, x))}, "g")
    model = to_onnx(graph, target=target)
    assert ops_of(model).count("Abs") == 1  # an exponent that is a number is taken as it is
    feeds = {"x": np.float32([-2, -2, -2, 2, 0, -1.5, np.nan]), "y": np.float32([3, 2, -1, 3, 2, 0.5, 1])}
    agrees(graph, model, feeds, {})


def test_a_workaround_keeps_infinities_and_nan() -> None:
    with building():
        x = _x("x", (N,), f64)
        outputs = {k: getattr(p, k)(x) for k in ("erf", "sinh", "cosh", "atan", "asinh", "acosh", "atanh", "asin")}
        graph = Graph((x,), outputs, "g")
    feeds = {"x": np.array([np.inf, -np.inf, np.nan, 1.0, -1.0, 0.0, 1e300, 710.0])}
    wanted = evaluate(graph, feeds)
    for (name, value), found in zip(wanted.items(), on_onnxruntime(to_onnx(graph), feeds), strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-14, err_msg=name)


@pytest.mark.parametrize(("op", "dtype"), ORT_DETOURS, ids=str)
def test_a_detour_gives_the_integers_that_numpy_gives(op: str, dtype: DType) -> None:
    """Each cast there and back is right; the samples do not have all of these dtypes."""
    with building():
        x, z = _x("x", (2, 3), dtype), _x("z", (2, 3), dtype)
        made = {
            "Max": lambda: p.max(x, z),
            "Min": lambda: p.min(x, z),
            "Where": lambda: p.select(p.less(x, z), x, z),
            "ReduceSum": lambda: p.reduce_sum(x, axes=(1,)),
            "ReduceProd": lambda: p.reduce_prod(x, axes=(1,)),
            "ReduceMax": lambda: p.reduce_max(x, axes=(1,)),
            "ReduceMin": lambda: p.reduce_min(x, axes=(1,)),
            "ArgMax": lambda: p.argmax(x, axis=1),
            "CumSum": lambda: p.cumsum(x, axis=1),
            "MatMul": lambda: p.dot(x, z, contract=((1,), (1,))),
            "ScatterND": lambda: p.scatter_add(x, p.literal(np.int64([1, 1])), axis=0, size=3),
            "Pad": lambda: p.pad(x, low=(1, 0), high=(0, 2)),
            "TopK": lambda: p.argsort(x, axis=1),
        }[op]()
        graph = Graph((x, z), {"y": made}, "g")
    rng = np.random.default_rng(0)
    feeds = {k: rng.integers(0, 9, (2, 3)).astype(dtype.numpy) for k in "xz"}
    model = to_onnx(graph)
    verify_model(model)
    agrees(graph, model, feeds, {}, reference=False)


def test_bools_are_selected_without_a_kernel_for_them() -> None:
    with building():
        c, x, y = (_x(n, (4,), bool_) for n in "cxy")
        graph = Graph((c, x, y), {"z": p.select(c, x, y)}, "g")
    bits = [np.array([b >> i & 1 for b in range(8)], bool) for i in range(3)]
    for half in (slice(0, 4), slice(4, 8)):
        agrees(graph, to_onnx(graph), dict(zip("cxy", (b[half] for b in bits), strict=True)), {})


def test_shifts_of_signed_integers_and_beyond_the_width() -> None:
    with building():
        x, n = _x("x", (6,), i8), _x("n", (6,), i8)
        graph = Graph((x, n), {"l": p.shift_left(x, n), "r": p.shift_right(x, n)}, "g")
    feeds = {"x": np.int8([-128, -5, -1, 0, 5, 127]), "n": np.int8([1, 2, 7, 3, 8, 100])}
    agrees(graph, to_onnx(graph), feeds, {}, reference=False)
