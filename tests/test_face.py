"""The public face, sentence by sentence: what programs rely on holds letter for letter."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pullback
import pytest
import safetensors.numpy
from pullback.algebra import calculus
from pullback.algebra.training import step as steps
from pullback.demo import DATA, MODEL
from pullback.frontends import onnx_import

ROLES = {
    "input",
    "target",
    "parameter",
    "slot",
    "step",
    "hyperparameter",
    "output",
    "loss",
    "gradient",
    "update",
    "state",
    "seed",
}
PHASES = ("forward", "loss", "backward", "optimizer")
TINY = """<ir_version: 8, opset_import: ["" : 17]>
tiny (float[N, 3] x) => (float[N, 2] y, int64[N] best) <float[3, 2] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}, float[2] b = {0.0, 0.1}> {
  xw = MatMul (x, w)
  y = Add (xw, b)
  best = ArgMax <axis = 1, keepdims = 0> (y)
}"""
STATISTICS = """<ir_version: 8, opset_import: ["" : 17]>
normalised (float[N, 2, H] x) => (float[N, 2] y)
<float[2] scale = {1.0, 2.0}, float[2] shift = {0.0, 1.0}, float[2] mean = {0.1, 0.2}, float[2] var = {1.0, 2.0}> {
  n = BatchNormalization (x, scale, shift, mean, var)
  y = ReduceMax <axes = [2], keepdims = 0> (n)
}"""


SQUARE = """<ir_version: 8, opset_import: ["" : 17]>
square (float[3] x) => (float y) { xx = Mul (x, x)  y = ReduceSum <keepdims = 0> (xx) }"""


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(text)


def signature_of(model: onnx.ModelProto) -> dict[str, Any]:
    return json.loads({p.key: p.value for p in model.metadata_props}["pullback.signature"])


def facts(node: onnx.NodeProto) -> dict[str, str]:
    return {p.key: p.value for p in node.metadata_props}


def run(model: onnx.ModelProto, outputs: list[str] | None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(outputs, feeds)


@pytest.fixture(scope="module")
def step() -> pullback.Step:
    return pullback.training_step(pullback.load(MODEL), loss="cross_entropy", optimizer="adamw", lr=1e-3)


# ---- load ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form", [lambda: MODEL, lambda: str(MODEL), lambda: onnx.load(MODEL), lambda: MODEL.read_bytes()]
)
def test_load_takes_a_path_a_model_and_its_bytes(form: Any) -> None:
    assert pullback.load(form()).signature.parameters[0] == "conv1.weight"


def test_dims_bind_symbols() -> None:
    assert pullback.load(MODEL, dims={"batch": 8})["logits"].type.shape == (8, 10)


def test_graph_parameters_lists_what_is_trainable() -> None:
    assert [v.name for v in pullback.load(parsed(STATISTICS)).parameters] == ["scale", "shift"]


@pytest.mark.parametrize(
    "wrong",
    [
        b"no model",
        "nowhere.onnx",
        parsed('<ir_version: 8, opset_import: ["" : 17, "a" : 1]> g (float x) => (float y) { y = a.B (x) }'),
    ],
)
def test_load_refuses_with_a_pullback_error(wrong: Any) -> None:
    with pytest.raises(pullback.PullbackError):
        pullback.load(wrong)


def test_only_nodes_on_the_way_to_a_result_count() -> None:
    model = parsed(
        '<ir_version: 8, opset_import: ["" : 17, "a" : 1]> g (float[N] x) => (float[N] y) { unused = a.Mystery (x)  y = Abs (x) }'
    )
    assert list(pullback.load(model).outputs) == ["y"]


# ---- training_step ---------------------------------------------------------------------------------------------------------------------


def test_names_of_inputs_and_outputs_are_the_fixed_ones(step: pullback.Step) -> None:
    inputs = [e.name for e in step.signature.inputs]
    outputs = [e.name for e in step.signature.outputs]
    parameters = list(step.signature.parameters)
    assert inputs[:2] == ["image", "target"]
    assert set(inputs) == {
        "image", "target", "step", "lr", "weight_decay", "eps", *parameters,
        *(f"{slot}_{p}" for p in parameters for slot in ("exp_avg", "exp_avg_sq")),
    }  # fmt: skip
    assert set(outputs) == {
        "loss", "logits", "new_step", *(f"grad_{p}" for p in parameters), *(f"new_{p}" for p in parameters),
        *(f"new_{slot}_{p}" for p in parameters for slot in ("exp_avg", "exp_avg_sq")),
    }  # fmt: skip


def test_parameter_names_are_those_of_the_initializers(step: pullback.Step) -> None:
    assert set(step.signature.parameters) == {
        t.name for t in onnx.load(MODEL).graph.initializer if t.data_type == onnx.TensorProto.FLOAT
    }


def test_output_train_and_freeze_choose() -> None:
    chosen = pullback.training_step(parsed(TINY), loss="mse", output="y", train=["*"], freeze=["b"])
    assert chosen.signature.parameters == ("w",)
    assert chosen.signature.frozen["b"] == "named by freeze 'b'"


@pytest.mark.parametrize(
    ("alias", "name"),
    [("mse", "mse_loss"), ("mse_loss", "mse_loss"), ("bce_with_logits", "binary_cross_entropy_with_logits")],
)
def test_losses_have_aliases(alias: str, name: str) -> None:
    assert pullback.training_step(parsed(TINY), loss=alias, output="y").signature.loss["name"] == name


def test_class_axis_says_where_the_classes_are() -> None:
    model = parsed(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, T, 5] x) => (float[N, T, 5] y) <float[5] w = {1, 2, 3, 4, 5}> { y = Mul (x, w) }'
    )
    step = pullback.training_step(model, loss="cross_entropy", class_axis=-1)
    (target,) = step.signature.inputs_of("target")
    assert target.shape == ("N", "T")


def test_targets_of_several_losses_are_named_after_their_outputs() -> None:
    model = parsed(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 3] x) => (float[N, 3] a, float[N, 3] b) <float[3] w = {1, 2, 3}>'
        " { a = Mul (x, w)  b = Mul (a, w) }"
    )
    step = pullback.training_step(model, loss={"a": "mse", "b": ("mse", 0.5)})
    assert [e.name for e in step.signature.inputs_of("target")] == ["target_a", "target_b"]


def test_step_is_an_int64_scalar_and_counts(step: pullback.Step) -> None:
    (entry,) = step.signature.inputs_of("step")
    assert (entry.name, entry.dtype, entry.shape) == ("step", "int64", ())
    model = step.to_onnx()
    first = next(t for t in model.graph.initializer if t.name == "step")
    assert onnx.numpy_helper.to_array(first) == 0
    feeds = {"image": np.zeros((2, 1, 8, 8), np.float32), "target": np.zeros(2, np.int64)}
    assert run(model, ["new_step"], feeds)[0] == 1
    assert run(model, ["new_step"], {**feeds, "step": np.array(6)})[0] == 7


def test_every_value_can_be_fed(step: pullback.Step) -> None:
    model = step.to_onnx()
    feeds = {"image": np.ones((2, 1, 8, 8), np.float32), "target": np.zeros(2, np.int64)}
    still, moved = (run(model, ["new_fc2.bias"], {**feeds, "lr": np.array(lr, np.float32)})[0] for lr in (0, 0.5))
    assert np.array_equal(
        still, onnx.numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == "fc2.bias"))
    )
    assert not np.array_equal(still, moved)


def test_running_statistics_are_state_that_is_updated_and_frozen_on_request() -> None:
    step = pullback.training_step(parsed(STATISTICS), loss="mse")
    assert [e.name for e in step.signature.inputs_of("state")] == ["mean", "var"]
    assert {"new_mean", "new_var"} <= {e.name for e in step.signature.outputs_of("state")}
    frozen = pullback.training_step(parsed(STATISTICS), loss="mse", batch_norm="frozen")
    assert not {"new_mean", "new_var"} & {e.name for e in frozen.signature.outputs}


def test_parameter_of_a_constant_node_has_its_outputs_name() -> None:
    model = parsed(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 2] x) => (float[N, 2] y)'
        " { w = Constant <value = float[2] {1.0, 2.0}> ()  y = Mul (x, w) }"
    )
    assert pullback.training_step(model, loss="mse").signature.parameters == ("w",)


def test_parameter_inside_a_subgraph_has_the_path_before_its_name() -> None:
    model = parsed(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[N, 2] x, bool c) => (float[N, 2] y) {
          y = If (c) <then_branch = yes () => (float[N, 2] a) <float[2] w = {1.0, 2.0}> { a = Mul (x, w) },
                      else_branch = no () => (float[N, 2] e) { e = Neg (x) }>
        }"""
    )
    (name,) = pullback.training_step(model, loss="mse").signature.parameters
    assert name.endswith("/w"), name


def test_signature_maps_parameters_to_gradients_slots_and_updates(step: pullback.Step) -> None:
    assert step.signature.gradients["conv1.weight"] == "grad_conv1.weight"
    assert step.signature.slots["conv1.weight"] == ["exp_avg_conv1.weight", "exp_avg_sq_conv1.weight"]
    for entry in (*step.signature.inputs, *step.signature.outputs):
        assert entry.role in ROLES
        belongs = (
            entry.role in ("parameter", "slot", "gradient", "update") or entry.slot is not None
        )  # a new slot is state
        assert (entry.parameter is not None) == belongs, entry


def test_a_name_that_is_taken_gets_a_suffix_and_the_signature_says_so() -> None:
    model = parsed(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 2] target) => (float[N, 2] loss) <float[2] lr = {1.0, 2.0}> { loss = Mul (target, lr) }'
    )
    step = pullback.training_step(model, loss="mse")
    names = [e.name for e in step.signature.inputs]
    assert len(set(names)) == len(names)
    assert step.signature.parameters == ("lr",)
    assert set(step.signature.renamed) == {"target", "loss", "lr"}


def test_nodes_say_what_they_are(step: pullback.Step) -> None:
    seen = set()
    for node in step.nodes():
        assert node.phase in PHASES
        assert node.origin is not None
        assert node.primitive.name
        assert node.type is not None
        assert all(operand.index < node.index for operand in node.inputs)
        seen.add(node.phase)
    assert seen == set(PHASES)


def test_three_artifacts_come_from_one_step(step: pullback.Step, tmp_path: Path) -> None:
    gradients, apply = step.gradients.to_onnx(), step.apply.to_onnx()
    assert {o.name for o in gradients.graph.output} >= {"loss", *step.signature.gradients.values()}
    assert not any(o.name.startswith("new_") for o in gradients.graph.output)
    assert {i.name for i in apply.graph.input} >= {*step.signature.gradients.values(), "lr", "step"}
    step.save_standard_form(tmp_path / "standard.onnx")
    standard = onnx.load(tmp_path / "standard.onnx")
    (info,) = standard.training_info
    assert {b.key for b in info.update_binding} >= set(step.signature.parameters)


# ---- writing ---------------------------------------------------------------------------------------------------------------------------


def test_save_and_to_onnx_write_the_same_model(step: pullback.Step, tmp_path: Path) -> None:
    saved, made = onnx.load(step.save(tmp_path / "train.onnx")), step.to_onnx()
    for model in (saved, made):  # large tensors are streamed last
        model.graph.initializer.sort(key=lambda t: t.name)
    assert saved == made
    assert [f.name for f in tmp_path.iterdir()] == ["train.onnx"]


def test_the_file_carries_the_signature_of_the_step(step: pullback.Step) -> None:
    written = signature_of(step.to_onnx())
    assert written == json.loads(step.signature.to_json())
    for entry in (*written["inputs"], *written["outputs"]):
        assert {"name", "role", "parameter"} <= set(entry)
        assert entry["role"] in ROLES


def test_each_role_stands_in_some_file() -> None:
    step = pullback.training_step(parsed(STATISTICS), loss="mse", optimizer="adam", dropout={"n": 0.5})
    written = signature_of(step.to_onnx())
    grad = signature_of(pullback.gradient(parsed(TINY), of=["y"], wrt=["w"]).to_onnx())
    entries = [*written["inputs"], *written["outputs"], *grad["inputs"]]
    assert {e["role"] for e in entries} == ROLES


GRAPHS = {
    "lower": lambda: pullback.lower(MODEL),
    "gradient": lambda: pullback.gradient(MODEL, of=["logits"], wrt=["conv1.weight"]),
    "jvp": lambda: pullback.jvp(MODEL, of=["logits"], wrt=["image"]),
    "jacobian": lambda: pullback.jacobian(pullback.load(MODEL, dims={"batch": 1}), of=["logits"], wrt=["image"]),
    "hessian": lambda: pullback.hessian(parsed(SQUARE)),
    "step": lambda: pullback.training_step(MODEL),
    "gradients": lambda: pullback.training_step(MODEL).gradients,
    "apply": lambda: pullback.training_step(MODEL).apply,
    "evaluation": lambda: pullback.training_step(MODEL).evaluation,
}  # fmt: skip


@pytest.mark.parametrize("kind", GRAPHS)
def test_profile_and_target_hold_for_every_graph(kind: str, tmp_path: Path) -> None:
    graph = GRAPHS[kind]()
    for profile, target in (
        ("explicit", "onnxruntime"),
        ("native", "onnxruntime"),
        ("explicit", "onnx-mlir"),
        ("explicit", "torch-mlir"),
        ("explicit", "iree"),
    ):
        model = graph.to_onnx(profile=profile, target=target)
        onnx.checker.check_model(model, full_check=True)
        path = graph.save(tmp_path / f"{target}_{profile}.onnx", profile=profile, target=target)
        assert [n.op_type for n in onnx.load(path).graph.node] == [n.op_type for n in model.graph.node]
        for node in model.graph.node:
            assert facts(node)["pullback.phase"] in PHASES
            assert {"pullback.source", "pullback.primitive"} <= set(facts(node))
            assert node.name.startswith(facts(node)["pullback.phase"] + "_")


def test_every_intermediate_has_a_type_with_symbolic_sizes(step: pullback.Step) -> None:
    model = step.to_onnx()
    typed = {v.name: v for v in (*model.graph.value_info, *model.graph.output)}
    for node in model.graph.node:
        for name in node.output:
            assert typed[name].type.tensor_type.elem_type
            assert typed[name].type.tensor_type.HasField("shape")
    assert any(d.dim_param == "batch" for v in model.graph.value_info for d in v.type.tensor_type.shape.dim)


def test_explicit_allows_only_plain_operators(step: pullback.Step) -> None:
    composite = {
        "Clip",
        "Relu",
        "Sigmoid",
        "ReduceMean",
        "Einsum",
        "Conv",
        "Gemm",
        "Softmax",
        "MaxPool",
        "LayerNormalization",
    }
    assert not composite & {n.op_type for n in step.to_onnx().graph.node}
    assert {o.domain for o in step.to_onnx().opset_import} <= {"", "ai.onnx"}
    assert {o.domain for o in step.to_onnx(profile="native").opset_import} <= {"", "ai.onnx"}


def test_parameters_are_initializers_and_inputs_for_onnxruntime_and_inputs_alone_for_compilers(
    step: pullback.Step,
) -> None:
    stored = {*step.signature.parameters, "lr", "step"}
    here, there = step.to_onnx(), step.to_onnx(target="iree")
    assert stored <= {t.name for t in here.graph.initializer} & {i.name for i in here.graph.input}
    assert not stored & {t.name for t in there.graph.initializer}
    assert (
        [i.name for i in here.graph.input]
        == [i.name for i in there.graph.input]
        == [e.name for e in step.signature.inputs]
    )


def test_initial_values_beside_x_onnx_are_x_safetensors(step: pullback.Step, tmp_path: Path) -> None:
    step.save(tmp_path / "x.onnx", target="iree")
    values = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert set(values) == {e.name for e in step.signature.inputs} - {"image", "target"}


@pytest.mark.parametrize(("embed", "inside"), [("all", True), ("frozen", False), ("none", False)])
def test_embed_chooses_what_the_file_holds(step: pullback.Step, embed: str, inside: bool) -> None:
    assert ("conv1.weight" in {t.name for t in step.to_onnx(embed=embed).graph.initializer}) == inside


def test_a_dtype_that_a_target_lacks_is_refused(tmp_path: Path) -> None:
    model = parsed('<ir_version: 8, opset_import: ["" : 17]> g (double[N] x) => (double[N] y) { y = Tanh (x) }')
    with pytest.raises(pullback.Refusal, match="tanh"):
        pullback.lower(model).save(tmp_path / "y.onnx", target="iree")
    assert not list(tmp_path.iterdir())


# ---- lower, gradient, jvp, jacobian, hessian ---------------------------------------------------------------------------------------------


def test_lower_computes_what_the_model_computes() -> None:
    image = np.random.default_rng(0).random((3, 1, 8, 8), np.float32)
    (expected,) = run(onnx.load(MODEL), None, {"image": image})
    (found,) = run(pullback.lower(pullback.load(MODEL)).to_onnx(), None, {"image": image})
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_gradient_takes_seeds_and_gives_gradients() -> None:
    g = pullback.gradient(pullback.load(parsed(TINY)), of=["y"], wrt=["x", "w", "xw"])
    assert [v.name for v in g.by_role("seed")] == ["seed_y"]
    assert {"grad_x", "grad_w", "grad_xw"} <= set(g.outputs)


def test_scalar_output_needs_no_seed() -> None:
    model = parsed(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float y) { y = ReduceSum <keepdims = 0> (x) }'
    )
    g = pullback.gradient(model, of=["y"], wrt=["x"])
    assert not g.by_role("seed")
    assert run(g.to_onnx(), ["grad_x"], {"x": np.ones(2, np.float32)})[0].tolist() == [1, 1]


def test_wrt_without_a_path_gets_zeros_and_a_warning() -> None:
    model = parsed(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x, float[N, 2] z) => (float[N] y, float[N, 2] w) { y = Abs (x)  w = Abs (z) }'
    )
    with pytest.warns(UserWarning, match="'z'"):
        g = pullback.gradient(model, of=["y"], wrt=["x", "z"])
    feeds = {"x": np.ones(3, np.float32), "z": np.ones((3, 2), np.float32), "seed_y": np.ones(3, np.float32)}
    assert run(g.to_onnx(), ["grad_z"], feeds)[0].tolist() == [[0, 0]] * 3


def test_gradient_of_a_written_gradient() -> None:
    model = parsed(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] y) { xx = Mul (x, x)  y = Mul (xx, x) }'
    )
    first = pullback.gradient(model, of=["y"], wrt=["x"]).to_onnx()
    second = pullback.gradient(first, of=["grad_x"], wrt=["x"])
    feeds = {"x": np.array([1, 2], np.float32), "seed_y": np.ones(2, np.float32), "seed_grad_x": np.ones(2, np.float32)}
    name = next(n for n in second.outputs if n not in first.graph.output and n.startswith("grad_x_"))
    np.testing.assert_allclose(run(second.to_onnx(), [name], feeds)[0], [6, 12])


def test_jvp_jacobian_and_hessian_of_a_square() -> None:
    model = parsed(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[3] x) => (float y) { xx = Mul (x, x)  y = ReduceSum <keepdims = 0> (xx) }'
    )
    x = np.array([1, 2, 3], np.float32)
    forward = pullback.jvp(model, of=["y"], wrt=["x"]).to_onnx()
    assert run(forward, ["tangent_y"], {"x": x, "tangent_x": np.ones(3, np.float32)})[0] == 12
    jacobian, hessian = pullback.jacobian(model, of=["y"], wrt=["x"]), pullback.hessian(model, of=["y"], wrt=["x"])
    (name,) = (n for n in jacobian.outputs if n != "y")
    assert run(jacobian.to_onnx(), [name], {"x": x})[0].tolist() == [2, 4, 6]
    (name,) = (n for n in hessian.outputs if n != "y")
    assert np.array_equal(run(hessian.to_onnx(), [name], {"x": x})[0], 2 * np.eye(3, dtype=np.float32))


@pytest.mark.parametrize("call", [pullback.gradient, pullback.jvp, pullback.jacobian])
def test_unknown_names_are_refused_with_near_ones(call: Any) -> None:
    with pytest.raises(pullback.Refusal, match=r"no tensor 'logit'; near names: logits(?!, logits)"):
        call(MODEL, of=["logit"], wrt=["image"])


# ---- Trainer ---------------------------------------------------------------------------------------------------------------------------


def test_trainer_fits_and_exports_into_the_original_model(tmp_path: Path) -> None:
    data = np.load(DATA)
    step = pullback.training_step(pullback.load(MODEL), loss="cross_entropy", optimizer="adamw", lr=2e-3)
    trainer = pullback.Trainer(step)
    history = trainer.fit({"image": data["image"], "target": data["target"]}, epochs=3, progress=False)
    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]
    trainer.export(tmp_path / "trained.onnx")
    before, after = onnx.load(MODEL), onnx.load(tmp_path / "trained.onnx")
    assert list(after.graph.node) == list(before.graph.node)
    (logits,) = run(after, None, {"image": data["test_image"]})
    assert np.mean(logits.argmax(1) == data["test_target"]) > 0.9


def test_refusals_are_pullback_errors() -> None:
    errors = (pullback.Refusal, pullback.DimError, pullback.InconclusiveDim, pullback.TypeMismatch)
    assert all(issubclass(error, pullback.PullbackError) for error in errors)


def test_help_and_editors_see_every_option_of_a_training_step() -> None:
    shown, built = inspect.signature(pullback.training_step), inspect.signature(steps.training_step)
    assert list(shown.parameters) == ["model", *list(built.parameters)[1:]]
    assert shown.parameters["loss"].default == "cross_entropy"
    assert pullback.training_step.__doc__ == steps.training_step.__doc__
    assert pullback.training_step(model=MODEL, lr=0.5).signature.optimizer["lr"] == 0.5  # by name as well as by place


def test_a_scalar_where_classes_are_asked_for_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = pullback.training_step(MODEL).save(tmp_path / "train.onnx")
    with pytest.raises(pullback.Refusal, match=r"rank 0; .*loss=None"):
        pullback.training_step(path)


FUNCTIONS = [
    pullback.load,
    pullback.lower,
    pullback.gradient,
    pullback.jvp,
    pullback.jacobian,
    pullback.hessian,
    pullback.training_step,
]
METHODS = [pullback.Model.to_onnx, pullback.Model.save, pullback.Step.to_onnx, pullback.Step.save, pullback.Trainer.fit]


@pytest.mark.parametrize("function", [*FUNCTIONS, *METHODS], ids=lambda f: f.__qualname__)
def test_help_shows_every_option(function: Any) -> None:
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD not in kinds


@pytest.mark.parametrize("function", [*FUNCTIONS, pullback.Trainer], ids=lambda f: f.__qualname__)
def test_help_shows_an_example(function: Any) -> None:
    assert ">>> " in inspect.getdoc(function)


def test_faces_take_what_they_stand_for_takes() -> None:
    for shown, built in (
        (pullback.load, onnx_import.load),
        (pullback.gradient, calculus.gradient),
        (pullback.jvp, calculus.jvp),
        (pullback.jacobian, calculus.jacobian),
        (pullback.hessian, calculus.hessian),
    ):
        (_, *mine), (_, *theirs) = (inspect.signature(f).parameters.values() for f in (shown, built))
        assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs]
    assert list(inspect.signature(pullback.Step.to_onnx).parameters) == list(
        inspect.signature(pullback.Model.to_onnx).parameters
    )
