"""The command line: every command, what it prints, its exit status, and that a refusal is one message and leaves no file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.numpy
from click.testing import CliRunner, Result
from pullback.algebra.training.losses import LOSSES
from pullback.algebra.training.optimizers import OPTIMIZERS
from pullback.algebra.training.schedules import SCHEDULES
from pullback.backends.views import COLOURS
from pullback.demo import DATA, MODEL
from pullback.frontends import cli
from pullback.frontends.cli import main

COMMANDS = ("train-step", "fit", "lower", "grad", "shapes", "inspect", "check", "ops", "view", "demo")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(MODEL, tmp_path / "digits.onnx")
    shutil.copy(DATA, tmp_path / "digits.npz")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words: str) -> Result:
    return CliRunner().invoke(main, list(words), catch_exceptions=False)


def done(*words: str) -> str:
    """What a call that must succeed prints; with `--json`, it must be JSON."""
    result = call(*words)
    assert result.exit_code == 0, result.output
    if "--json" in words:
        json.loads(result.stdout)
    return result.stdout


def refused(*words: str) -> str:
    """The message of a call that must be refused: on standard error, without a traceback, and no file is left or changed."""
    before = {f: f.read_bytes() for f in Path.cwd().rglob("*") if f.is_file()}
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert {f: f.read_bytes() for f in Path.cwd().rglob("*") if f.is_file()} == before
    assert not list(Path.cwd().rglob(".pullback-*"))
    return result.stderr


def written(text: str, name: str = "model.onnx") -> str:
    onnx.save(onnx.parser.parse_model(text), name)
    return name


def run(path: str, outputs: Sequence[str] | None, feeds: dict[str, Any]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(outputs, feeds)


def signature(path: str) -> dict[str, Any]:
    return json.loads({p.key: p.value for p in onnx.load(path).metadata_props}["pullback.signature"])


def names(path: str, side: str, role: str) -> list[str]:
    return [e["name"] for e in signature(path)[side] if e["role"] == role]


CHAIN = '<ir_version: 8, opset_import: ["" : 17]> chain (float[N, 3] x) => (float[N, 3] y, float[N, 3] z) <float[3] w = {1, 2, 3}>'
TWO = CHAIN + " { y = Mul (x, w)  z = Mul (y, w) }"
SQUARE = '<ir_version: 8, opset_import: ["" : 17]> square (float[N] x) => (float y) { xx = Mul (x, x)  y = ReduceSum <keepdims = 0> (xx) }'


# ---- help ------------------------------------------------------------------------------------------------------------------------------


def test_help_lists_every_command_in_whole_sentences() -> None:
    text = done("-h")
    assert all(f"\n  {command} " in text for command in COMMANDS)
    assert "..." not in text.split("Commands:")[1].replace("optimizers, ...", "")
    assert done("--help") == text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_has_a_help_text(command: str) -> None:
    text = done(command, "-h")
    assert "--json" in text
    for parameter in main.commands[command].params:
        assert not isinstance(parameter, click.Option) or parameter.help, parameter


def test_help_fits_a_terminal() -> None:
    for words in (("-h",), *((command, "-h") for command in COMMANDS)):
        assert max(map(len, done(*words).splitlines())) <= 85


def test_version_is_that_of_the_package() -> None:
    assert done("--version").startswith("pullback, version ")


def test_without_a_command_it_shows_the_help_and_status_2() -> None:
    result = call()
    assert (result.exit_code, "train-step" in result.output) == (2, True)


# ---- train-step ------------------------------------------------------------------------------------------------------------------------


def test_train_step_says_what_it_wrote_and_what_is_trained() -> None:
    text = done("train-step", "digits.onnx", "-o", "train.onnx", "--freeze", "conv*", "--optimizer", "adamw")
    assert text.startswith("wrote train.onnx: ")
    assert "trained: 4\n  fc1.weight\n" in text
    assert "  conv1.bias: named by freeze 'conv*'\n" in text


def test_train_step_says_what_the_loss_is_on() -> None:
    model = written(TWO.replace("Mul (y, w)", "Softmax (y)"))
    assert "loss: mse_loss on y\n" in done("train-step", model, "-o", "t.onnx", "--loss", "mse")
    assert "loss: cross_entropy on z, computed on what enters its softmax\n" in done(
        "train-step", model, "-o", "t.onnx", "--output", "z"
    )
    text = done("train-step", model, "-o", "t.onnx", "--loss", "y=mse", "--loss", "z=l1_loss:0.5")
    assert "loss: mse_loss on y, weight 1\nloss: l1_loss on z, weight 0.5\n" in text


def test_train_step_as_json() -> None:
    data = json.loads(done("train-step", "digits.onnx", "-o", "train.onnx", "--freeze", "conv*", "--json"))
    assert data["file"] == "train.onnx"
    assert data["trained"] == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert data["left_out"]["conv1.bias"] == "named by freeze 'conv*'"
    assert data["signature"] == signature("train.onnx")


def test_parts_are_files_of_their_own() -> None:
    text = done(
        "train-step",
        "digits.onnx",
        "-o",
        "t.onnx",
        "--gradients",
        "g.onnx",
        "--apply",
        "a.onnx",
        "--eval",
        "e.onnx",
        "--standard-form",
        "s.onnx",
    )
    assert [line for line in text.splitlines() if line.startswith("wrote")][1:] == [
        "wrote g.onnx: gradients", "wrote a.onnx: apply", "wrote e.onnx: evaluation", "wrote s.onnx: standard form",
    ]  # fmt: skip
    assert "loss" in {o.name for o in onnx.load("g.onnx").graph.output}
    assert "new_fc1.bias" in {o.name for o in onnx.load("a.onnx").graph.output}
    assert {o.name for o in onnx.load("e.onnx").graph.output} == {"loss", "logits"}
    assert len(onnx.load("s.onnx").training_info) == 1


def test_values_of_a_compiler_stand_beside_each_part() -> None:
    done("train-step", "digits.onnx", "-o", "t.onnx", "--gradients", "g.onnx", "--target", "iree")
    assert {"t.safetensors", "g.safetensors"} <= {f.name for f in Path.cwd().iterdir()}
    assert "conv1.weight" in safetensors.numpy.load_file("t.safetensors")


@pytest.mark.parametrize("profile", ["explicit", "native"])
@pytest.mark.parametrize("target", ["onnxruntime", "onnx-mlir", "torch-mlir", "iree"])
def test_every_target_takes_the_demo(profile: str, target: str) -> None:
    done("train-step", "digits.onnx", "-o", "t.onnx", "--profile", profile, "--target", target, "--json")
    onnx.checker.check_model(onnx.load("t.onnx"), full_check=True)


def test_loss_options_and_optimizer_options_reach_them() -> None:
    done("train-step", "digits.onnx", "-o", "t.onnx", "--loss-option", "label_smoothing=0.1", "--optimizer-option", "momentum=0.9",
         "--optimizer-option", "nesterov=true", "--lr", "0.25")  # fmt: skip
    said = signature("t.onnx")
    assert said["loss"]["options"]["label_smoothing"] == 0.1
    (lr,) = (t for t in onnx.load("t.onnx").graph.initializer if t.name == "lr")
    assert onnx.numpy_helper.to_array(lr) == 0.25
    assert "momentum_buffer_fc1.bias" in names("t.onnx", "inputs", "slot")


def test_an_option_may_be_an_array_in_a_file() -> None:
    np.save("weight.npy", np.linspace(1, 2, 10, dtype=np.float32))
    done("train-step", "digits.onnx", "-o", "t.onnx", "--loss-option", "weight=weight.npy")


def test_several_losses_with_weights() -> None:
    done("train-step", written(TWO), "-o", "t.onnx", "--loss", "y=mse", "--loss", "z=l1_loss:0.5")
    assert names("t.onnx", "inputs", "target") == ["target_y", "target_z"]
    x = np.ones((2, 3), np.float32)
    (loss,) = run("t.onnx", ["loss"], {"x": x, "target_y": 0 * x, "target_z": 0 * x})
    assert loss == pytest.approx(14 / 3 + 0.5 * 14 / 3)


def test_a_model_is_a_loss() -> None:
    written(
        '<ir_version: 8, opset_import: ["" : 17]> cubes (float[N, 3] y, float[N, 3] wanted) => (float cubes)'
        " { d = Sub (y, wanted)  a = Abs (d)  aa = Mul (a, a)  aaa = Mul (aa, a)  cubes = ReduceSum <keepdims = 0> (aaa) }",
        "loss.onnx",
    )
    done("train-step", written(TWO), "-o", "t.onnx", "--loss", "loss.onnx")
    assert names("t.onnx", "inputs", "target") == ["wanted"]
    x = np.ones((1, 3), np.float32)
    assert run("t.onnx", ["loss"], {"x": x, "wanted": 0 * x})[0] == 36


def test_an_output_may_be_the_loss_itself() -> None:
    model = written(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float cost) <float[1] w = {2}> { y = Mul (x, w)  cost = ReduceSum <keepdims = 0> (y) }'
    )
    done("train-step", model, "-o", "t.onnx", "--loss", "none", "--output", "cost")
    assert names("t.onnx", "inputs", "target") == []


def test_groups_schedules_clipping_and_averages() -> None:
    done("train-step", "digits.onnx", "-o", "t.onnx", "--optimizer", "adamw", "--group", "conv*:lr=0.0001,weight_decay=0", "--group", "fc1.*:frozen",
         "--schedule", "cosine:T_max=100,eta_min=1e-5", "--clip-global-norm", "1", "--ema", "0.99", "--no-decay")  # fmt: skip
    said = signature("t.onnx")
    assert said["frozen"]["fc1.weight"] == "frozen by the group of fc1.*"
    assert "lr_1" in names("t.onnx", "inputs", "hyperparameter")
    assert "ema_fc2.bias" in names("t.onnx", "inputs", "slot")


@pytest.mark.parametrize(
    "words",
    [["--precision", "float16"], ["--precision", "float16", "--loss-scale", "128"], ["--checkpoint", "auto"], ["--checkpoint", "3"],
     ["--checkpoint", "1000000000B"], ["--checkpoint", "1GB"], ["--lora", "2"], ["--lora", "2:fc*"], ["--dropout", "r3=0.5"],
     ["--dropout", "model"], ["--dim", "batch=4"], ["--batch-norm", "frozen"], ["--clip-value", "1"], ["--clip-norm", "1"], ["--opset", "17"],
     ["--embed", "none"], ["--unroll"], ["--max-trips", "3"], ["--class-axis", "1"], ["--schedule", "exponential:gamma=0.9"]],
    ids=" ".join,
)  # fmt: skip
def test_option_of_train_step_is_taken(words: list[str]) -> None:
    done("train-step", "digits.onnx", "-o", "t.onnx", *words)
    onnx.checker.check_model(onnx.load("t.onnx"), full_check=True)


@pytest.mark.parametrize("betas", ["0.8,0.9", "[0.8, 0.9]", ".8,.9"])
def test_lists_are_taken_with_and_without_brackets(betas: str) -> None:
    done("train-step", "digits.onnx", "-o", "t.onnx", "--optimizer", "adam", "--optimizer-option", f"betas={betas}", "--group",
         f"fc1.*:lr=0.1,betas={betas},eps=.5", "--schedule", "multi_step:milestones=3,5,gamma=.5")  # fmt: skip
    said = signature("t.onnx")["optimizer"]
    assert said["betas"] == said["groups"][0]["betas"] == [0.8, 0.9]
    assert said["schedule"]["milestones"] == [3, 5]
    assert said["schedule"]["gamma"] == said["groups"][0]["eps"] == 0.5


# ---- what is refused -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--loss", "crossentropy"], "no loss 'crossentropy':\n  - near names: cross_entropy"),
        (["--optimizer", "adm"], "no optimizer 'adm':\n  - near names: adam"),
        (["--optimizer-option", "momentm=0.9"], "no option 'momentm'; near names: momentum"),
        (["--loss-option", "label_smothing=0.9"], "no option 'label_smothing'; near names: label_smoothing"),
        (["--output", "logit"], "no tensor 'logit'; near names: logits"),
        (["--train", "convv1.weight"], "train 'convv1.weight' matches nothing; near names: conv1.weight"),
        (
            ["--freeze", "zzz.*"],
            "freeze 'zzz.*' matches nothing; there are conv1.weight, conv1.bias, conv2.weight, conv2.bias, fc1.weight, ...",
        ),
        (["--group", "head.*:lr=1"], "group 'head.*' matches nothing"),
        (["--group", "fc*:lx=1"], "sgd has no option 'lx'"),
        (["--group", "fc*"], "is not GLOB:OPTION=VALUE"),
        (["--group", "fc*:lr"], "'lr' in 'lr' is not OPTION=VALUE"),
        (["--schedule", "cosin"], "no schedule 'cosin':\n  - near names: cosine"),
        (["--schedule", "cosine:tot=3"], "no option 'tot'"),
        (["--dim", "btch=3"], "no symbolic dim 'btch'; near: batch"),
        (["--dim", "batch=0"], "must be a positive integer"),
        (["--dim", "batch"], "'batch' is not NAME=VALUE"),
        (["--loss-option", "ignore_index=1", "--loss-option", "ignore_index=2"], "'ignore_index' is given twice"),
        (["--loss-option", "weight=1,x"], "weight must be numbers, found '1,x'"),
        (["--loss-option", "weight=none.npy"], "a .npy of numbers is required"),
        (["--dropout", "much"], "'much' is no number"),
        (["--dropout", "r3=much"], "'much' in 'r3=much' is no number"),
        (["--loss-scale", "big"], "'big' is no number"),
        (["--lora", "two"], "RANK or RANK:GLOB,... is required"),
        (["--opset", "3"], "opset 3 cannot be written, only 13 to 28"),
        (["--target", "tvm"], "'tvm' is not one of"),
        (["--loss", "logits=mse:x"], "'x' in 'logits=mse:x' is no number"),
        (["--loss", "mse", "--loss", "l1_loss"], "several losses are given as OUTPUT=NAME[:WEIGHT]"),
        (["--loss", "logits=mse", "--loss", "logits=l1_loss"], "given two losses"),
        (["--loss", "nowhere.onnx"], "nowhere.onnx"),
        (["--lr", "fast"], "'fast' is not a valid float"),
        (["--class-axis", "7"], "class_axis 7 is not an axis"),
        (["--checkpoint", "nothing*"], "nothing*"),
        (["--checkpoint", "1kB"], "the budget 1000"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_call_of_train_step_is_refused(words: list[str], said: str) -> None:
    assert said in refused("train-step", "digits.onnx", "-o", "t.onnx", *words)


@pytest.mark.parametrize("command", ["train-step", "lower", "grad", "view"])
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere/t.onnx", "there is no directory 'nowhere'"),
        ("folder.onnx", "'folder.onnx' is a directory"),
        ("digits.onnx", "is the model that is read"),
        ("/proc/t.onnx", "/proc"),
    ],
)
def test_place_that_cannot_be_written(command: str, path: str, said: str) -> None:
    Path("folder.onnx").mkdir()
    if command == "view":
        shutil.copy("digits.onnx", "digits.html")
        Path("folder.html").mkdir()
        path, said = path.replace(".onnx", ".html"), said.replace("folder.onnx", "folder.html")
    model = "digits.html" if command == "view" else "digits.onnx"
    assert said in refused(command, model, "-o", path)


def test_a_part_that_cannot_be_written_leaves_none_of_them() -> None:
    assert "there is no directory 'nowhere'" in refused(
        "train-step", "digits.onnx", "-o", "t.onnx", "--gradients", "nowhere/g.onnx"
    )
    assert "more than once" in refused("train-step", "digits.onnx", "-o", "t.onnx", "--gradients", "t.onnx")


def test_what_a_target_refuses_leaves_none_of_the_parts() -> None:
    model = written(
        '<ir_version: 8, opset_import: ["" : 17]> g (double[N] x) => (double[N] y) <double[1] w = {2}> { a = Mul (x, w)  y = Tanh (a) }'
    )
    said = refused("train-step", model, "-o", "t.onnx", "--gradients", "g.onnx", "--loss", "mse", "--target", "iree")
    assert "tanh" in said
    assert "double" in said


def _cycle() -> str:
    return written(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] y) { a = Add (x, y)  y = Abs (a) }'
    )


def _undefined() -> str:
    return written(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] y) { a = Add (x, phantom)  y = Abs (a) }'
    )


def _attribute() -> str:
    return written(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] y) { y = LeakyRelu <alfa = 0.5> (x) }'
    )


def _unknown() -> str:
    return written(
        '<ir_version: 8, opset_import: ["" : 17, "acme" : 3, "other" : 1]> g (float[N] x) => (float[N] y)'
        " { a = acme.Mystery (x)  b = other.Riddle (a)  c = StringNormalizer (b)  y = Add (b, c) }"
    )


def _truncated() -> str:
    Path("model.onnx").write_bytes(MODEL.read_bytes()[:3000])
    return "model.onnx"


def _leaving() -> str:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul (x, w) }'
    )
    tensor = model.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret.bin")
    Path("model.onnx").write_bytes(model.SerializeToString())
    return "model.onnx"


BAD: dict[str, tuple[Callable[[], str], list[str]]] = {
    "no such file": (lambda: "nowhere.onnx", ["nowhere.onnx"]),
    "not an ONNX file": (lambda: "digits.npz", ["not an ONNX model"]),
    "truncated": (_truncated, ["cut short"]),
    "cycle": (_cycle, ["cycle"]),
    "undefined input": (_undefined, ["'phantom'"]),
    "wrong attribute": (_attribute, ["LeakyRelu", "'alfa'"]),
    "unknown operators": (
        _unknown,
        ["(Mystery, domain acme, opset 3)", "(Riddle, domain other, opset 1)", "StringNormalizer"],
    ),
    "data outside the folder": (_leaving, ["../secret.bin"]),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("command", ["train-step", "lower", "grad", "shapes", "check", "view"])
def test_bad_model_is_one_clear_error(kind: str, command: str) -> None:
    make, words = BAD[kind]
    model = make()
    place = {
        "train-step": ["-o", "t.onnx"],
        "lower": ["-o", "t.onnx"],
        "grad": ["-o", "t.onnx"],
        "view": ["-o", "t.html"],
    }.get(command, [])
    said = refused(command, model, *place)
    assert said.startswith("pullback: ")
    for word in words:
        assert word in said


def test_an_integer_output_given_to_a_loss() -> None:
    model = written(
        CHAIN.replace("float[N, 3] z", "int64[N] z") + " { y = Mul (x, w)  z = ArgMax <axis = 1, keepdims = 0> (y) }"
    )
    said = refused("train-step", model, "-o", "t.onnx", "--loss", "mse", "--output", "z")
    assert "'z'" in said
    assert "floating" in said


def test_a_model_with_nothing_to_train() -> None:
    assert "nothing to train" in refused(
        "train-step", written(SQUARE), "-o", "t.onnx", "--loss", "none", "--output", "y"
    )


def test_a_process_of_its_own_has_status_and_streams_too() -> None:
    program = [sys.executable, "-m", "pullback"]
    bad = subprocess.run(
        [*program, "lower", "digits.npz", "-o", "t.onnx"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("pullback: cannot read 'digits.npz'")
    good = subprocess.run([*program, "ops", "targets", "--json"], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stderr) == (0, "")
    assert {row["target"] for row in json.loads(good.stdout)} == {"onnxruntime", "onnx-mlir", "torch-mlir", "iree"}


# ---- lower, grad, shapes, view, check, ops -----------------------------------------------------------------------------------------------


def test_lower_writes_what_the_model_computes() -> None:
    data = json.loads(done("lower", "digits.onnx", "-o", "lower.onnx", "--json"))
    assert data["signature"]["outputs"][0]["name"] == "logits"
    image = np.random.default_rng(0).random((2, 1, 8, 8), np.float32)
    found, expected = (run(path, ["logits"], {"image": image})[0] for path in ("lower.onnx", "digits.onnx"))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_grad_of_the_file_that_grad_wrote() -> None:
    model = written(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] y) { xx = Mul (x, x)  y = Mul (xx, x) }'
    )
    done("grad", model, "-o", "first.onnx", "--of", "y", "--wrt", "x")
    done("grad", "first.onnx", "-o", "second.onnx", "--of", "grad_x", "--wrt", "x", "--json")
    (name,) = (o.name for o in onnx.load("second.onnx").graph.output if o.name not in ("y", "grad_x"))
    feeds = {"x": np.array([1, 2], np.float32), "seed_y": np.ones(2, np.float32), "seed_grad_x": np.ones(2, np.float32)}
    np.testing.assert_allclose(run("second.onnx", [name], feeds)[0], [6, 12])
    done("grad", "second.onnx", "-o", "third.onnx", "--of", name, "--wrt", "x")
    (last,) = (o.name for o in onnx.load("third.onnx").graph.output if o.name not in ("y", "grad_x", name))
    np.testing.assert_allclose(run("third.onnx", [last], {**feeds, f"seed_{name}": np.ones(2, np.float32)})[0], [6, 6])


def test_grad_of_names_that_do_not_exist() -> None:
    said = refused("grad", "digits.onnx", "-o", "g.onnx", "--wrt", "imag", "--wrt", "conv1.wight")
    assert "no tensor 'imag'; near names: image" in said
    assert "no tensor 'conv1.wight'; near names: conv1.weight" in said


def test_grad_without_a_path_warns_on_standard_error() -> None:
    model = written(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x, float[N] z) => (float[N] y, float[N] w) { y = Abs (x)  w = Abs (z) }'
    )
    result = call("grad", model, "-o", "g.onnx", "--of", "y", "--wrt", "z")
    assert result.exit_code == 0
    assert result.stderr.startswith("pullback: warning: ")
    assert "'z'" in result.stderr
    assert run(
        "g.onnx",
        ["grad_z"],
        {"x": np.ones(2, np.float32), "z": np.ones(2, np.float32), "seed_y": np.ones(2, np.float32)},
    )[0].tolist() == [0, 0]


def test_shapes_prints_symbols_constraints_types_and_cost() -> None:
    model = written(
        '<ir_version: 8, opset_import: ["" : 18]> halves (float[N, C] x, float[M, C] z) => (float[N, 2, D] y) <int64[3] shape = {0, 2, -1}>'
        " { s = Add (x, z)  y = Reshape (s, shape) }"
    )
    text = done("shapes", model)
    for line in (
        "M       x[0], z[0]",
        "C % 2 == 0",
        "N == M",
        "x     input   f32[",
        "y     output  f32[",
        "floating operations",
    ):
        assert line in text, f"{line}\n{text}"
    data = json.loads(done("shapes", model, "--json"))
    assert data["tensors"]["y"]["shape"][1:] == [2, "C//2"]
    assert "N" in data["cost"]["flops"] or "M" in data["cost"]["flops"]


def test_a_row_of_a_table_is_a_line() -> None:
    assert any(
        line.split() == ["image", "input", "f32[batch,", "1,", "8,", "8]"]
        for line in done("shapes", "digits.onnx").splitlines()
    )


def test_inspect_shows_roles_phases_and_operators() -> None:
    done("train-step", "digits.onnx", "-o", "t.onnx", "--freeze", "conv1.bias", "--optimizer", "adam")
    text = done("inspect", "t.onnx")
    for words in (
        ["image", "input", "float32[batch,"],
        ["exp_avg_fc1.bias", "slot"],
        ["new_step", "state"],
        ["conv1.bias", "named", "by"],
        ["MatMul"],
    ):
        assert any(line.split()[: len(words)] == words for line in text.splitlines()), words
    data = json.loads(done("inspect", "t.onnx", "--json", "--nodes"))
    assert set(data["phases"]) == {"forward", "loss", "backward", "optimizer"}
    assert sum(data["phases"].values()) == len(data["nodes"]) == sum(data["ops"].values())
    assert {"name", "op_type", "pullback.phase", "pullback.source", "pullback.primitive"} <= set(data["nodes"][0])
    assert len(done("inspect", "t.onnx", "--nodes").splitlines()) > len(text.splitlines())


def test_inspect_of_a_model_that_was_not_written_here() -> None:
    assert "carries no signature" in refused("inspect", "digits.onnx")
    assert "not an ONNX model" in refused("inspect", "digits.npz")


def test_check_agrees_and_says_so() -> None:
    text = done("check", "digits.onnx", "--dim", "batch=2")
    assert "9 of 9 agree" in text
    data = json.loads(done("check", "digits.onnx", "--wrt", "fc2.bias", "--json"))
    assert data["passed"]
    assert [row["name"] for row in data["checked"]] == ["fc2.bias"]


def test_check_that_fails_has_status_1() -> None:
    model = written(SQUARE.replace("Mul (x, x)", "Relu (x)"))
    np.savez("kink.npz", x=np.zeros(3, np.float32))
    result = call("check", model, "--data", "kink.npz")
    assert result.exit_code == 1
    assert "WRONG" in result.stdout
    result = call("check", model, "--data", "kink.npz", "--json")
    assert (result.exit_code, json.loads(result.stdout)["passed"]) == (1, False)


def test_check_draws_masks_that_keep_something() -> None:
    model = written("""<ir_version: 8, opset_import: ["" : 17]>
    masked (float[B, L, 4] x, int64[B, L] keep) => (float[B, L] y)
    <float[4] w = {1, -1, 2, 0.5}, float none = {-3.4028234663852886e38}, float all = {0}, int64[1] last = {-1}> {
      z = MatMul (x, w) k = Cast <to = 9> (keep) m = Where (k, all, none) s = Add (z, m) y = Softmax <axis = -1> (s)
    }""")
    for seed in range(8):
        done("check", model, "--seed", str(seed))


def test_check_tells_a_derivative_of_0_from_the_rounding_of_differences() -> None:
    model = written("""<ir_version: 8, opset_import: ["" : 17]>
    shifted (float[B, 5] x) => (float[B, 5] y) <float[1] b = {0.3}> { z = Add (x, b) y = Softmax <axis = -1> (z) }""")
    for seed in range(8):
        done("check", model, "--dim", "B=3", "--seed", str(seed))


SOUND = """<ir_version: 8, opset_import: ["" : 17]>
    sound (float[B, 1, T] x, float[B, S] z) => (float y)
    <float[1, 1, 10] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1}, int64[3] halves = {0, 4, -1}> {
      c = Conv <strides = [5]> (x, w) d = ReduceSum (c)
      f = Reshape (z, halves) e = ReduceMax (f) y = Mul (d, e)
    }"""


def test_check_takes_sizes_that_fit() -> None:
    model = written(SOUND)
    done("check", model)
    np.savez("z.npz", z=np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32))
    done("check", model, "--data", "z.npz")
    np.savez("z.npz", z=np.ones((5, 6), np.float32))
    assert "S % 4 == 0 must hold" in refused("check", model, "--data", "z.npz")


def test_check_of_many_kinks() -> None:
    model = written("""<ir_version: 8, opset_import: ["" : 17]>
    kinks (float[B] x) => (float[B, 1000, 1000] y) <float[1, 1000, 1] a = {0}, float[1, 1, 1000] b = {0}, int64[2] axes = {1, 2}> {
      c = Unsqueeze (x, axes) d = Add (c, a) e = Add (d, b) y = Relu (e)
    }""")
    proto = onnx.load(model)
    for tensor in proto.graph.initializer[:2]:
        values = np.random.default_rng(0).standard_normal(tuple(tensor.dims)).astype(np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    onnx.save(proto, model)
    for seed in range(4):
        done("check", model, "--wrt", "x", "--dim", "B=2", "--seed", str(seed))


def test_check_names_sizes_that_do_not_fit() -> None:
    model = written("""<ir_version: 8, opset_import: ["" : 17]>
    ends (float[B, 4] x) => (float[C, 4] y) <int64[1] first = {90000}, int64[1] last = {100000}, int64[1] axis = {0}> {
      y = Slice (x, first, last, axis)
    }""")
    assert "must be positive" in refused("check", model)


def test_check_of_wrong_data() -> None:
    assert "no input 'test_image'" in refused("check", "digits.onnx", "--data", "digits.npz")
    assert "a .npz of named arrays is required" in refused("check", "digits.onnx", "--data", "digits.onnx")
    Path("nothing.npz").write_bytes(b"")
    assert "a .npz of named arrays is required" in refused("check", "digits.onnx", "--data", "nothing.npz")


def test_check_of_a_model_without_floats() -> None:
    model = written('<ir_version: 8, opset_import: ["" : 17]> g (int64[N] x) => (int64[N] y) { y = Abs (x) }')
    refused("check", model)


@pytest.mark.parametrize(
    ("what", "expected"),
    [("losses", {r.name for r in LOSSES.values()}), ("optimizers", set(OPTIMIZERS)), ("schedules", set(SCHEDULES))],
)
def test_ops_lists_what_there_is(what: str, expected: set[str]) -> None:
    rows = json.loads(done("ops", what, "--json"))
    assert {next(iter(row.values())) for row in rows} == expected
    assert len(done("ops", what).splitlines()) == len(rows) + 2


def test_ops_has_one_of_four_states_for_each_operator() -> None:
    rows = json.loads(done("ops", "--json"))
    assert {r["state"] for r in rows} == {"differentiable", "piecewise constant", "index or shape valued", "outside"}
    assert done("ops").splitlines()[-1].startswith(str(sum(r["state"] == rows[0]["state"] for r in rows)))
    assert {r["domain"] for r in json.loads(done("ops", "--domain", "ai.onnx.ml", "--json"))} == {"ai.onnx.ml"}
    assert "there are ai.onnx, ai.onnx.ml" in refused("ops", "--domain", "acme")
    assert "have no domain" in refused("ops", "losses", "--domain", "ai.onnx")
    assert json.loads(done("ops", "primitives", "--json"))


@pytest.mark.parametrize("ending", ["html", "dot", "tex", "txt"])
def test_view_writes_each_form(ending: str) -> None:
    assert done("view", "digits.onnx", "-o", f"page.{ending}").startswith(f"wrote page.{ending}: ")
    assert "conv1" in Path(f"page.{ending}").read_text()
    done("view", "digits.onnx", "-o", f"gradient.{ending}", "--gradient", "--json")


def test_view_of_a_written_step_shows_its_phases_and_roles() -> None:
    done("train-step", "digits.onnx", "-o", "t.onnx", "--optimizer", "adamw")
    done("view", "t.onnx", "-o", "page.txt")
    text = Path("page.txt").read_text()
    assert "  @slot(fc1.bias) exp_avg_sq_fc1.bias: f32[64],\n" in text
    assert "  @parameter fc1.bias: f32[64],\n" in text
    assert "@gradient(fc1.bias) grad_fc1.bias=grad_fc1.bias" in text
    done("view", "t.onnx", "-o", "page.dot")
    drawn = Path("page.dot").read_text()
    assert all(colour in drawn for colour in COLOURS.values())


def test_view_of_another_ending() -> None:
    assert "the ending must be one of .html, .dot, .tex, .txt" in refused("view", "digits.onnx", "-o", "page.pdf")


# ---- fit, demo ---------------------------------------------------------------------------------------------------------------------------


def test_fit_trains_and_leaves_the_inference_model() -> None:
    done(
        "train-step",
        "digits.onnx",
        "-o",
        "t.onnx",
        "--optimizer",
        "adamw",
        "--lr",
        "0.002",
        "--profile",
        "native",
        "--eval",
        "e.onnx",
    )
    data = json.loads(
        done(
            "fit",
            "t.onnx",
            "--data",
            "digits.npz",
            "-o",
            "trained.onnx",
            "--epochs",
            "2",
            "--eval",
            "e.onnx",
            "--metric",
            "accuracy",
            "--json",
        )
    )
    assert data["epochs"][1]["loss"] < data["epochs"][0]["loss"]
    assert data["epochs"][1]["val_accuracy"] > 0.8
    assert list(onnx.load("trained.onnx").graph.node) == list(onnx.load("digits.onnx").graph.node)


def test_fit_resumes_to_the_same_bits() -> None:
    done("train-step", "digits.onnx", "-o", "t.onnx", "--optimizer", "adam")
    common = ["--data", "digits.npz", "--no-progress", "--batch-size", "64"]
    done("fit", "t.onnx", *common, "-o", "whole.onnx", "--epochs", "2")
    done("fit", "t.onnx", *common, "-o", "half.onnx", "--epochs", "1", "--checkpoint", "run.safetensors")
    text = done(
        "fit", "t.onnx", *common, "-o", "resumed.onnx", "--epochs", "2", "--checkpoint", "run.safetensors", "--resume"
    )
    assert text.endswith("wrote resumed.onnx\n")
    assert Path("resumed.onnx").read_bytes() == Path("whole.onnx").read_bytes()
    assert Path("half.onnx").read_bytes() != Path("whole.onnx").read_bytes()


def test_fit_accumulates_with_the_parts() -> None:
    done("train-step", "digits.onnx", "-o", "t.onnx", "--gradients", "g.onnx", "--apply", "a.onnx")
    done(
        "fit",
        "t.onnx",
        "--data",
        "digits.npz",
        "-o",
        "trained.onnx",
        "--accumulate",
        "2",
        "--gradients",
        "g.onnx",
        "--apply",
        "a.onnx",
        "--no-progress",
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["digits.onnx", "--data", "digits.npz"], "signature"),
        (["t.onnx", "--data", "nowhere.npz"], "nowhere.npz"),
        (["t.onnx", "--data", "digits.onnx"], "digits.onnx"),
        (["t.onnx", "--data", "half.npz"], "target"),
        (["t.onnx", "--data", "text.npz"], "'image' takes float32, but the data holds |S1"),
        (["t.onnx", "--data", "digits.npz", "--metric", "accurcy"], "no metric 'accurcy'"),
        (["t.onnx", "--data", "digits.npz", "--resume"], "needs --checkpoint"),
        (["t.onnx", "--data", "digits.npz", "--checkpoint-every", "3"], "needs --checkpoint"),
        (["t.onnx", "--data", "digits.npz", "--accumulate", "2"], "apply"),
        (
            ["t.onnx", "--data", "digits.npz", "--checkpoint", "nowhere/c.safetensors"],
            "there is no directory 'nowhere'",
        ),
        (["lower.onnx", "--data", "digits.npz"], "a training step is required"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_call_of_fit_is_refused(words: list[str], said: str) -> None:
    done("train-step", "digits.onnx", "-o", "t.onnx")
    done("lower", "digits.onnx", "-o", "lower.onnx")
    np.savez("half.npz", image=np.load("digits.npz")["image"])
    np.savez("text.npz", image=np.full((4, 1, 8, 8), b"1"), target=np.zeros(4, np.int64))
    assert said in refused("fit", *words, "-o", "trained.onnx", "--no-progress")


def test_demo_learns_and_leaves_its_files() -> None:
    data = json.loads(done("demo", "--epochs", "2", "--folder", "here", "--json"))
    assert data["epochs"][1]["val_accuracy"] > 0.8
    assert {f.name for f in Path("here").iterdir()} == {"train.onnx", "trained.onnx"}
    text = done("demo", "--epochs", "1", "--no-progress")
    assert "test accuracy" in text


# ---- names that are odd --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "odd",
    [
        "a:0",
        "/layer/w.1",
        "x;y",
        "two words",
        "größe→",
        '{"a": 1}',
        "-o",
        "a=b",
        "[0]",
        "*",
        "%s",
        "a,b",
        "'",
        '"',
        "\\n",
    ],
)
def test_odd_names_go_the_whole_way(odd: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}, float[2] b = {0, 1}>'
        " { m = Mul (x, w)  y = Add (m, b) }"
    )
    model = onnx.compose.add_prefix(model, odd)
    model.graph.name = odd
    x, w, y, m = (odd + n for n in "xwym")
    onnx.save(model, "model.onnx")
    done(
        "train-step",
        "model.onnx",
        "-o",
        "t.onnx",
        "--loss",
        "mse",
        "--optimizer",
        "adam",
        f"--train={w}",
        f"--output={y}",
    )
    assert names("t.onnx", "inputs", "parameter") == [w]
    assert f"new_exp_avg_{w}" in {o.name for o in onnx.load("t.onnx").graph.output}
    np.savez("data.npz", **{x: np.ones((4, 2), np.float32), "target": np.zeros((4, 2), np.float32)})
    done("fit", "t.onnx", "--data", "data.npz", "-o", "trained.onnx", "--no-progress")
    assert {t.name for t in onnx.load("trained.onnx").graph.initializer} == {w, odd + "b"}
    done("lower", "model.onnx", "-o", "lower.onnx", "--target", "iree")
    done("grad", "model.onnx", "-o", "grad.onnx", f"--of={y}", f"--wrt={m}", f"--wrt={w}")
    assert {f"grad_{m}", f"grad_{w}"} <= {o.name for o in onnx.load("grad.onnx").graph.output}
    assert w in done("shapes", "model.onnx")
    done("inspect", "t.onnx", "--nodes")
    done("check", "model.onnx")
    for ending in ("html", "dot", "tex", "txt"):
        done("view", "t.onnx", "-o", f"page.{ending}")


def test_json_has_null_where_there_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    cli._print_json({"loss": [1.5, float("nan")], "rows": ({"best": float("inf")},)})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "loss": [1.5, None],
        "rows": [{"best": None}],
    }


def test_check_says_why_straight_through_gradients_disagree(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 17]>
    g (float[3] x) => (float[3] y) <float s = {0.1}, int8 z = {0}> { q = QuantizeLinear (x, s, z)  y = DequantizeLinear (q, s, z) }""")
    onnx.save(model, tmp_path / "q.onnx")
    result = call("check", str(tmp_path / "q.onnx"), "--straight-through")
    assert result.exit_code == 1
    assert "WRONG" in result.output
    assert "takes 1 for the derivative of rounding" in result.output
