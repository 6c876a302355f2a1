"""The command line. Exit status: 0 done, 1 a check failed, 2 the input or the call is wrong.

Whatever is printed for people has `--json` for programs; refusals go to standard error, without a traceback, and leave no file.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import click
import numpy as np

from .. import face
from ..algebra import costs
from ..algebra.dims import show
from ..algebra.errors import PullbackError, PullbackWarning, Refusal
from ..algebra.graph import Graph
from ..algebra.primitives import PRIMITIVES
from ..algebra.training.losses import LOSSES
from ..algebra.training.optimizers import OPTIMIZERS
from ..algebra.training.schedules import SCHEDULES
from ..algebra.types import TensorType
from ..backends.onnx_export.targets import TARGETS

WIDTH = 110


class _Command(click.Command):
    """A command whose help shows its options in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(option, "section", "Options"), []).append(record)
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl(rows)


class _Option(click.Option):
    """An option that belongs to a section of its command's help."""

    def __init__(self, *args: Any, section: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section
        if self.multiple and self.help:
            self.help += " Repeatable."


def _option(*names: str, **settings: Any) -> Callable[[Any], Any]:
    return click.option(*names, cls=_Option, **settings)


class _Commands(click.Group):
    """A group that turns every refusal into one message and exit status 2, and warnings into lines on standard error."""

    command_class = _Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order in which they are met, not by name

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always", PullbackWarning)
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except PullbackError as error:
            notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
            click.echo(f"pullback: {error}{notes}", err=True)
            ctx.exit(2)
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of a pipe has gone
                raise
            click.echo(f"pullback: {error}", err=True)
            ctx.exit(2)


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    click.echo(f"pullback: warning: {message}", err=True)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH})
@click.version_option(package_name="pullback", prog_name="pullback")
def main() -> None:
    """Any ONNX inference model in, one explicit ONNX training step out.

    \b
    pullback train-step model.onnx -o train.onnx --loss cross_entropy --optimizer adamw
    pullback fit train.onnx --data data.npz -o trained.onnx

    Exit status: 0 done, 1 a check failed, 2 the input or the call is wrong.
    """


# ---- shared options --------------------------------------------------------------------------------------------------------------------


def _pairs(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in values:
        name, mark, value = text.partition("=")
        if not mark or not name:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE")
        if name in found:
            raise click.BadParameter(f"{name!r} is given twice")
        found[name] = value
    return found


def _sizes(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    pairs = _pairs(ctx, option, values)
    for name, value in pairs.items():
        if not value.isdecimal() or int(value) < 1:
            raise click.BadParameter(f"the size of {name!r} must be a positive integer, found {value!r}")
    return {name: int(value) for name, value in pairs.items()}


def _literals(pairs: Mapping[str, str]) -> dict[str, Any]:
    """Option values as JSON where they are (numbers, lists with or without brackets, true, null), a file of numbers where they end in .npy, else text."""
    return {name: _numbers_of(text) if text.endswith(".npy") else _literal(text) for name, text in pairs.items()}


def _literal(text: str) -> Any:
    with suppress(json.JSONDecodeError):
        return json.loads(text)
    if "," in text:
        items = [_literal(item.strip()) for item in text.split(",")]
        return text if any(isinstance(item, str) for item in items) else items
    with suppress(ValueError):
        return float(text)  # .5, which is no JSON
    return text


def _numbers_of(path: str) -> np.ndarray:
    try:
        array: np.ndarray = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise Refusal(f"cannot read {path!r}", [f"a .npy of numbers is required ({error})"]) from error
    return array


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


FILE = click.Path(dir_okay=False)
MODEL = click.argument("model", type=FILE)
OUTPUT = _option("-o", "--out", "path", required=True, type=FILE, help="File to write.")
CHOSEN = "pullback.reading"  # where a context keeps the options with which a model is read


def _reading(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value and parameter.name:
        context.meta.setdefault(CHOSEN, {})[parameter.name] = value


def _load(model: str, dims: Mapping[str, int]) -> face.Model:
    """The model, read with the options of the command that runs."""
    return face.load(model, dims=dims, **click.get_current_context().meta.get(CHOSEN, {}))


READ = "How MODEL is read"
READING = _options(
    _option("--dim", "dims", multiple=True, metavar="NAME=SIZE", callback=_sizes, section=READ, help="Give a symbolic dim a size."),
    _option("--max-trips", type=click.IntRange(min=1), callback=_reading, expose_value=False, metavar="N", section=READ,
            help="The most steps of loops that stop on a condition, which gives them a gradient."),
    _option("--unroll", is_flag=True, callback=_reading, expose_value=False, section=READ,
            help="Write loops of known length step after step."),
    _option("--straight-through", is_flag=True, callback=_reading, expose_value=False, section=READ,
            help="Let gradients pass through quantisation as if it were not there."),
    _option("--untie", multiple=True, callback=_reading, expose_value=False, metavar="GLOB", section=READ,
            help="Make each use of a stored tensor a parameter of its own, where an exporter merged equal ones."),
)  # fmt: skip
JSON = _option("--json", "as_json", is_flag=True, help="Print JSON.")
WRITING = "What is written"
EMISSION = _options(
    _option("--profile", type=click.Choice(["explicit", "native"]), default="explicit", show_default=True, section=WRITING,
            help="Plain numerical ops only, or raised to ops that runtimes have kernels for."),
    _option("--target", type=click.Choice(["onnxruntime", "onnx-mlir", "torch-mlir", "iree"]), default="onnxruntime",
            show_default=True, section=WRITING, help="Use only forms that this one takes."),
    _option("--embed", type=click.Choice(["all", "frozen", "none"]), section=WRITING,
            help="Which values the file holds; the others go into a .safetensors beside it. The target decides by default."),
    _option("--opset", type=int, metavar="N", section=WRITING, help="Operator set to write; the target decides by default."),
)  # fmt: skip


def _emission(profile: str, target: str, embed: str | None, opset: int | None) -> dict[str, Any]:
    return {"profile": profile, "target": target, "embed": embed, "opset": opset}


def _print_json(data: Any) -> None:
    click.echo(json.dumps(_without_nan(data), indent=1, default=str, allow_nan=False))


def _without_nan(data: Any) -> Any:
    """The same with null for NaN and infinities, which JSON does not have (RFC 8259)."""
    if isinstance(data, Mapping):
        return {k: _without_nan(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [_without_nan(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns padded to their widest cell and never broken, so that a line is a row in a pipe too."""
    cells = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    click.secho(title, bold=True)
    for n, line in enumerate(cells):
        if any(line):
            text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            click.secho(f"  {text}", dim=n == 0)


@contextmanager
def _together(*paths: str | Path | None, source: str | None = None) -> Iterator[Callable[[str | Path], Path]]:
    """Where to write files that belong together: each into a folder beside its place, moved there when all are written; on failure none is left."""
    places = [Path(path) for path in paths if path is not None]
    reasons = [f"there is no directory {str(p.parent)!r}" for p in places if not p.parent.is_dir()]
    reasons += [f"{str(p)!r} is a directory" for p in places if p.is_dir()]
    twice = Counter(p.resolve() for p in places)
    reasons += [f"{str(p)!r} is asked for more than once" for p in places if twice[p.resolve()] > 1]
    if source is not None:
        reasons += [f"{str(p)!r} is the model that is read" for p in places if p.resolve() == Path(source).resolve()]
    if reasons:
        raise Refusal("cannot write what is asked for", reasons)
    with ExitStack() as stack:
        aside: dict[Path, Path] = {}
        for folder in dict.fromkeys(p.parent for p in places):
            try:
                aside[folder] = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".pullback-", dir=folder)))
            except OSError as error:
                raise Refusal(f"cannot write into {str(folder)!r}", [error.strerror or str(error)]) from error
        yield lambda path: aside[Path(path).parent] / Path(path).name
        for folder, temporary in aside.items():
            for file in sorted(temporary.iterdir()):
                os.replace(file, folder / file.name)


def _written(path: str, graph: face.Model, as_json: bool, more: Mapping[str, Any] | None = None) -> None:
    if as_json:
        _print_json({"file": path, "signature": json.loads(graph.signature.to_json()), **(more or {})})
        return
    click.echo(f"wrote {path}: {len(graph.inputs)} inputs, {len(graph.outputs)} outputs")
    for constraint in graph.constraints:
        click.echo(f"  requires {constraint} ({constraint.reason})")


# ---- train-step ------------------------------------------------------------------------------------------------------------------------


def _loss(texts: tuple[str, ...], options: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """The loss as `training_step` takes it, from `NAME`, `FILE.onnx`, `none`, or `OUTPUT=NAME[:WEIGHT]` once per output."""
    if len(texts) == 1 and "=" not in texts[0]:
        if texts[0].endswith(".onnx"):
            return face.load(texts[0]), options
        return (None if texts[0] == "none" else texts[0]), options
    losses: dict[str, Any] = {}
    for text in texts:
        output, mark, rest = text.rpartition("=")
        if not mark or not output:
            raise click.BadParameter(
                f"several losses are given as OUTPUT=NAME[:WEIGHT], found {text!r}", param_hint="--loss"
            )
        if output in losses:
            raise click.BadParameter(f"the output {output!r} is given two losses", param_hint="--loss")
        name, _, weight = rest.partition(":")
        losses[output] = (name, _number(weight, text, "--loss") if weight else 1.0, options)
    return losses, {}


def _number(text: str, whole: str, hint: str) -> float:
    try:
        return float(text)
    except ValueError:
        where = "" if text == whole else f" in {whole!r}"
        raise click.BadParameter(f"{text!r}{where} is no number", param_hint=hint) from None


def _named(text: str, hint: str) -> dict[str, Any]:
    """`OPTION=VALUE,...` as a mapping."""
    pairs = {}
    for item in re.split(r",(?=[^,=]*=)", text):  # a list's own commas are followed by no name
        name, mark, value = item.partition("=")
        if not mark or not name:
            raise click.BadParameter(f"{item!r} in {text!r} is not OPTION=VALUE", param_hint=hint)
        pairs[name] = value
    return _literals(pairs)


def _groups(texts: tuple[str, ...]) -> list[dict[str, Any]]:
    """Parameter groups from `GLOB:OPTION=VALUE,...`; `GLOB:frozen` freezes."""
    groups = []
    for text in texts:
        glob, mark, rest = text.rpartition(":")
        if not mark or not glob:
            raise click.BadParameter(f"{text!r} is not GLOB:OPTION=VALUE,... or GLOB:frozen", param_hint="--group")
        own: dict[str, Any] = {"frozen": True} if rest == "frozen" else _named(rest, "--group")
        groups.append({"params": glob, **own})
    return groups


def _schedule(text: str | None) -> Any:
    """A schedule from `NAME` or `NAME:OPTION=VALUE,...`."""
    if text is None:
        return None
    name, _, rest = text.partition(":")
    return (name, _named(rest, "--schedule")) if rest else name


def _dropout(text: str | None) -> Any:
    """`model`, a ratio, or `GLOB=RATIO,...`."""
    if text is None:
        return False
    if text == "model":
        return True
    if "=" not in text:
        return _number(text, text, "--dropout")
    pairs = (item.rpartition("=") for item in text.split(","))
    return {glob: _number(ratio, text, "--dropout") for glob, _, ratio in pairs}


UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def _checkpoint(text: str | None) -> Any:
    """What is recomputed: `auto`, a number of segments, a budget (`500MB`, `2GB`, `4096B`), or globs."""
    if text is None or text == "auto":
        return text
    if text.isdecimal():
        return int(text)
    if budget := re.fullmatch(r"(\d+)(B|kB|MB|GB)", text):
        return {"budget": int(budget[1]) * UNITS[budget[2]]}
    return text.split(",")


def _lora(text: str | None) -> Any:
    """Adapters from `RANK` or `RANK:GLOB,...`."""
    if text is None:
        return None
    rank, _, globs = text.partition(":")
    if not rank.isdecimal() or int(rank) < 1:
        raise click.BadParameter(f"RANK or RANK:GLOB,... is required, found {text!r}", param_hint="--lora")
    return {"rank": int(rank), "alpha": 2.0 * int(rank), **({"targets": globs.split(",")} if globs else {})}


def _loss_scale(text: str | None) -> Any:
    return text if text in (None, "dynamic", "off") else _number(str(text), str(text), "--loss-scale")


LOSS, UPDATE, TRAINED, MODE = "Loss", "Update", "What is trained", "Training mode, precision, memory"
PARTS = "Parts, each in a file of its own"


@main.command("train-step", short_help="Write a training step: forward, loss, backward, update.")
@MODEL
@OUTPUT
@READING
@_option(
    "--loss",
    "losses",
    multiple=True,
    default=("cross_entropy",),
    show_default=True,
    section=LOSS,
    metavar="NAME | OUTPUT=NAME[:WEIGHT] | FILE.onnx | none",
    help="As in torch.nn.functional (`pullback ops losses`); once per output for several; a model that is a loss; "
    "none where --output is the loss itself.",
)
@_option(
    "--loss-option",
    "loss_options",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_pairs,
    section=LOSS,
    help="Option of the loss: a number, a list, true, a word, or a .npy file.",
)
@_option(
    "--output", metavar="NAME", section=LOSS, help="The model's output that the loss takes; the first one by default."
)
@_option("--class-axis", type=int, metavar="N", section=LOSS, help="Axis of the classes, where it is not 1.")
@_option(
    "--optimizer",
    default="sgd",
    show_default=True,
    metavar="NAME",
    section=UPDATE,
    help="As in torch.optim, in lower case (`pullback ops optimizers`).",
)
@_option(
    "--optimizer-option",
    "optimizer_options",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_pairs,
    section=UPDATE,
    help="Option of the optimizer.",
)
@_option("--lr", type=float, section=UPDATE, help="First value of the learning rate, which is an input of the step.")
@_option(
    "--schedule",
    metavar="NAME[:OPTION=VALUE,...]",
    section=UPDATE,
    help="Learning-rate schedule, computed from the step counter (`pullback ops schedules`).",
)
@_option(
    "--group",
    "groups",
    multiple=True,
    metavar="GLOB:OPTION=VALUE,...",
    section=UPDATE,
    help="Optimizer options for some parameters; GLOB:frozen freezes them.",
)
@_option("--no-decay", is_flag=True, section=UPDATE, help="No weight decay on norms and biases.")
@_option("--clip-value", type=float, section=UPDATE, help="Clip each element of the gradients.")
@_option("--clip-norm", type=float, section=UPDATE, help="Clip each gradient's norm.")
@_option("--clip-global-norm", type=float, section=UPDATE, help="Clip the norm of all gradients together.")
@_option(
    "--ema", type=float, metavar="DECAY", section=UPDATE, help="Keep an exponential moving average of the weights."
)
@_option("--train", multiple=True, metavar="GLOB", section=TRAINED, help="Train only these parameters.")
@_option("--freeze", multiple=True, metavar="GLOB", section=TRAINED, help="Do not train these.")
@_option(
    "--lora", metavar="RANK[:GLOB,...]", section=TRAINED, help="Train low-rank adapters beside these matrices instead."
)
@_option(
    "--batch-norm",
    type=click.Choice(["batch", "frozen"]),
    default="batch",
    show_default=True,
    section=MODE,
    help="Batch statistics and updated running ones, or the running ones as they are.",
)
@_option(
    "--running-variance",
    type=click.Choice(["unbiased", "population"]),
    default="unbiased",
    show_default=True,
    section=MODE,
    help="Which variance of the batch enters the running one: PyTorch's, or ONNX's.",
)
@_option(
    "--dropout",
    metavar="model | RATIO | GLOB=RATIO,...",
    section=MODE,
    help="Switch dropout on: as the model has it, with this ratio, or put it at these tensors.",
)
@_option(
    "--precision",
    type=click.Choice(["float16", "bfloat16"]),
    section=MODE,
    help="Compute the products of a float32 model in 16 bits; weights and updates stay in float32.",
)
@_option(
    "--loss-scale",
    metavar="dynamic | off | NUMBER",
    section=MODE,
    help="Scale of the loss; dynamic with float16 by default.",
)
@_option(
    "--checkpoint",
    metavar="auto | SEGMENTS | GLOB,... | 500MB",
    section=MODE,
    help="Compute forward values anew in the backward pass instead of keeping them: chosen automatically, in so many segments, "
    "of these nodes, or within a budget in B, kB, MB or GB.",
)
@_option("--gradients", "gradients_path", type=FILE, section=PARTS, help="Also write loss and gradients alone.")
@_option("--apply", "apply_path", type=FILE, section=PARTS, help="Also write the update alone.")
@_option("--eval", "eval_path", type=FILE, section=PARTS, help="Also write loss and outputs in inference mode.")
@_option(
    "--standard-form",
    "standard_path",
    type=FILE,
    section=PARTS,
    help="Also write the forward graph with ONNX's TrainingInfoProto.",
)
@EMISSION
@JSON
def train_step(model: str, path: str, losses: tuple[str, ...], loss_options: dict[str, str], optimizer_options: dict[str, str],
               schedule: str | None, groups: tuple[str, ...], dropout: str | None, loss_scale: str | None, checkpoint: str | None,
               lora: str | None, gradients_path: str | None, apply_path: str | None, eval_path: str | None,
               standard_path: str | None, dims: dict[str, int], 
               profile: str, target: str, embed: str | None, opset: int | None, as_json: bool, **settings: Any) -> None:  # fmt: skip
    """Write the training step of MODEL: forward, loss, backward and update in one graph."""
    loss, options = _loss(losses, _literals(loss_options))
    chosen = {
        "schedule": _schedule(schedule), "groups": _groups(groups), "dropout": _dropout(dropout), "loss_scale": _loss_scale(loss_scale),
        "checkpoint": _checkpoint(checkpoint), "lora": _lora(lora), "optimizer_options": _literals(optimizer_options),
    }  # fmt: skip
    emission = _emission(profile, target, embed, opset)
    with _together(path, gradients_path, apply_path, eval_path, standard_path, source=model) as at:
        graph = _load(model, dims)
        step = face.training_step(graph, loss=loss, loss_options=options, **chosen, **settings)
        step.save(at(path), **emission)
        if gradients_path is not None:
            step.gradients.save(at(gradients_path), **emission)
        if apply_path is not None:
            step.apply.save(at(apply_path), **emission)
        if eval_path is not None:
            step.evaluation.save(at(eval_path), **emission)
        if standard_path is not None:
            step.save_standard_form(at(standard_path), **emission)
    parts = {"gradients": gradients_path, "apply": apply_path, "evaluation": eval_path, "standard_form": standard_path}
    also = {part: file for part, file in parts.items() if file is not None}
    left_out = dict(step.selection.left_out)
    _written(path, step.graph, as_json, {"parts": also, "trained": step.selection.trained, "left_out": left_out})
    if not as_json:
        for part, file in also.items():
            click.echo(f"wrote {file}: {part.replace('_', ' ')}")
        for term in step.signature.loss.get("terms", [step.signature.loss]):
            click.echo(f"loss: {_said(term)}")
        click.echo(str(step.selection))


def _said(term: Mapping[str, Any]) -> str:
    """One loss of the signature in words."""
    output = term.get("output")
    text = str(term.get("name"))
    text += f" on {output}" if isinstance(output, str) and output != text else ""
    text += f", weight {term['weight']:g}" if "weight" in term else ""
    text += f", computed on what enters its {term['fused']}" if term.get("fused") else ""
    return text


# ---- fit -------------------------------------------------------------------------------------------------------------------------------


def _held_out(data: str) -> tuple[Any, dict[str, np.ndarray] | None]:
    """Training data and, where an `.npz` has arrays named `test_{input}`, validation data."""
    if not data.endswith(".npz"):
        return data, None
    arrays = _arrays(data)
    held = {k.removeprefix("test_"): v for k, v in arrays.items() if k.startswith("test_")}
    return {k: v for k, v in arrays.items() if not k.startswith("test_")}, held or None


def _arrays(path: str) -> dict[str, np.ndarray]:
    """The arrays of an `.npz`."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (OSError, ValueError, TypeError, AttributeError, EOFError, BadZipFile) as error:
        raise Refusal(f"cannot read {path!r}", [f"a .npz of named arrays is required ({error})"]) from error


@main.command(short_help="Run a training step on data; write the trained model.")
@click.argument("train", type=FILE)
@_option(
    "--data",
    required=True,
    type=click.Path(exists=True),
    help=".npz, folder of .npy, .csv or .parquet; arrays are named as the step's inputs, test_{input} are held out.",
)
@_option("-o", "--out", "path", required=True, type=FILE, help="The trained inference model.")
@_option("--validation", type=click.Path(exists=True), help="Held-out data.")
@_option("--epochs", default=1, show_default=True, type=click.IntRange(min=0), help="Passes over the data.")
@_option("--batch-size", default=32, show_default=True, type=click.IntRange(min=1), help="Samples in a batch.")
@_option("--seed", default=0, show_default=True, help="Of the order of samples.")
@_option("--no-shuffle", is_flag=True, help="Take the samples in the order of the data.")
@_option(
    "--accumulate", default=1, show_default=True, type=click.IntRange(min=1), help="Batches per update; needs --apply."
)
@_option("--metric", "metrics", multiple=True, metavar="NAME", help="accuracy, mae, mse or rmse, on the held-out data.")
@_option(
    "--early-stopping", type=click.IntRange(min=1), metavar="EPOCHS", help="Stop where the held-out loss does not fall."
)
@_option("--checkpoint", type=FILE, help=".safetensors written after each epoch.")
@_option("--checkpoint-every", type=click.IntRange(min=1), metavar="UPDATES", help="And after so many updates.")
@_option("--resume", is_flag=True, help="Go on from the checkpoint, to the same bits.")
@_option("--model", type=FILE, help="The inference model, where the step does not carry it.")
@_option("--gradients", type=FILE, help="The step's gradients file, for --accumulate.")
@_option("--apply", "apply_path", type=FILE, help="The step's apply file, for --accumulate.")
@_option("--eval", "evaluation", type=FILE, help="The step's evaluation file: held-out data in inference mode.")
@_option("--threads", type=click.IntRange(min=1), help="Threads that one operator may use; all by default.")
@_option("--no-progress", is_flag=True, help="Show nothing while it runs.")
@JSON
def fit(train: str, data: str, path: str, validation: str | None, epochs: int, batch_size: int, seed: int, no_shuffle: bool,
        accumulate: int, metrics: tuple[str, ...], early_stopping: int | None, checkpoint: str | None,
        checkpoint_every: int | None, resume: bool, model: str | None, gradients: str | None, apply_path: str | None,
        evaluation: str | None, threads: int | None, no_progress: bool, as_json: bool) -> None:  # fmt: skip
    """Run the training step TRAIN on data, and write the trained inference model."""
    from ..backends.runtime import Trainer

    if resume and checkpoint is None:
        raise click.BadParameter("it needs --checkpoint, the file to go on from", param_hint="--resume")
    if checkpoint_every is not None and checkpoint is None:
        raise click.BadParameter("it needs --checkpoint, the file to write", param_hint="--checkpoint-every")
    if checkpoint is not None and not Path(checkpoint).parent.is_dir():
        raise Refusal(f"cannot write {checkpoint!r}", [f"there is no directory {str(Path(checkpoint).parent)!r}"])
    with _together(path, source=train) as at:
        trainer = Trainer.from_file(
            train, gradients=gradients, apply=apply_path, evaluation=evaluation, threads=threads
        )
        arrays, held_out = _held_out(data)
        history = trainer.fit(
            arrays, epochs=epochs, batch_size=batch_size, shuffle=not no_shuffle, seed=seed, accumulate=accumulate,
            validation=validation or held_out, metrics=list(metrics), early_stopping=early_stopping, checkpoint=checkpoint,
            checkpoint_every=checkpoint_every, resume=resume, progress=not no_progress and not as_json,
        )  # fmt: skip
        trainer.export(at(path), model=model)
    if as_json:
        _print_json({"file": path, "epochs": history.epochs, "stopped": history.stopped, "steps": trainer.steps})
        return
    for row in history.epochs if no_progress else ():
        click.echo("  ".join(f"{k} {v:.4g}" for k, v in row.items()))
    click.echo(f"wrote {path}")


# ---- lower, grad -----------------------------------------------------------------------------------------------------------------------


@main.command(short_help="Write the forward graph in explicit primitives.")
@MODEL
@OUTPUT
@READING
@EMISSION
@JSON
def lower(model: str, path: str, dims: dict[str, int],  as_json: bool,
          **emission: Any) -> None:  # fmt: skip
    """Write the forward graph of MODEL in explicit primitives."""
    with _together(path, source=model) as at:
        graph = face.lower(_load(model, dims))
        graph.save(at(path), **_emission(**emission))
    _written(path, graph, as_json)


@main.command(short_help="Write a gradient graph: seeds in, gradients out.")
@MODEL
@OUTPUT
@_option(
    "--of",
    multiple=True,
    metavar="NAME",
    help="Outputs or inner tensors to differentiate; all floating outputs by default.",
)
@_option(
    "--wrt",
    multiple=True,
    metavar="NAME",
    help="Inputs, parameters or inner tensors; all parameters by default (inputs where there are none).",
)
@READING
@EMISSION
@JSON
def grad(model: str, path: str, of: tuple[str, ...], wrt: tuple[str, ...], dims: dict[str, int],  as_json: bool, **emission: Any) -> None:  # fmt: skip
    """Write the gradient graph of MODEL: seeds in, gradients out.

    The result is a model like any other, so that `pullback grad` takes it again for second derivatives.
    """
    with _together(path, source=model) as at:
        graph = face.gradient(_load(model, dims), of=list(of) or None, wrt=list(wrt) or None)
        graph.save(at(path), **_emission(**emission))
    _written(path, graph, as_json)


# ---- shapes ----------------------------------------------------------------------------------------------------------------------------


@main.command(short_help="Show symbols, constraints, every tensor's shape, and the cost.")
@MODEL
@READING
@JSON
def shapes(model: str, dims: dict[str, int], as_json: bool) -> None:
    """Show the symbols of MODEL, its constraints, every tensor's symbolic shape, and its symbolic cost."""
    graph = _load(model, dims)
    total = costs.cost(graph)
    symbols = {
        s.name: [f"{v.params['name']}[{i}]" for v in graph.inputs for i, d in enumerate(v.shape) if d == s]
        for s in graph.symbols
    }
    tensors = {v.params["name"]: (v.params["role"], v) for v in graph.inputs}
    tensors |= {name: ("tensor", v) for name, v in graph.tensors.items()} | {
        n: ("output", v) for n, v in graph.outputs.items()
    }
    if as_json:
        _print_json({
            "symbols": symbols,
            "constraints": [{"constraint": str(c), "reason": c.reason} for c in graph.constraints],
            "tensors": {n: {"role": r, "dtype": v.dtype.name, "shape": [d if isinstance(d, int) else show(d) for d in v.shape]}
                        for n, (r, v) in tensors.items() if isinstance(v.type, TensorType)},
            "cost": {"flops": show(total.flops), "parameters": show(total.parameters), "parameter_bytes": show(total.parameter_bytes),
                     "activation_bytes": show(total.activation_bytes)},
        })  # fmt: skip
        return
    at = [(n, ", ".join(places) or "data, when it runs") for n, places in symbols.items()]
    _table("symbols", ("symbol", "read from"), at or [("none", "every size is known")])
    if graph.constraints:
        _table("constraints", ("what must hold", "because"), [(str(c), c.reason) for c in graph.constraints])
    _table("tensors", ("name", "role", "type"), [(n, r, repr(v.type)) for n, (r, v) in tensors.items()])
    _table("cost of the forward pass", ("", ""), [
        ("floating operations", show(total.flops)), ("weights", show(total.parameters)),
        ("bytes of weights", show(total.parameter_bytes)), ("bytes of all intermediates", show(total.activation_bytes)),
    ])  # fmt: skip


# ---- inspect ---------------------------------------------------------------------------------------------------------------------------


def _metadata(node: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in node.metadata_props}


def _facts(node: Any) -> dict[str, Any]:
    return {
        "name": node.name,
        "op_type": node.op_type,
        "inputs": list(node.input),
        "outputs": list(node.output),
        **_metadata(node),
    }


@main.command(short_help="Show roles, phases and counts of a file that pullback wrote.")
@click.argument("file", type=FILE)
@_option("--nodes", is_flag=True, help="Every node with its phase, source and primitive.")
@JSON
def inspect(file: str, nodes: bool, as_json: bool) -> None:
    """Show roles, phases and counts of FILE, a model that pullback wrote."""
    from .onnx_import.reader import open_model

    model, _, _ = open_model(file)
    text = _metadata(model).get("pullback.signature")
    if text is None:
        raise Refusal(
            f"cannot inspect {file!r}",
            ["it was not written by pullback: it carries no signature (`pullback shapes` shows any model)"],
        )
    signature = json.loads(text)
    phases = Counter(_metadata(n).get("pullback.phase", "none") for n in model.graph.node)
    ops = Counter(n.op_type for n in model.graph.node)
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    if as_json:
        data = {"signature": signature, "phases": phases, "ops": ops, "opset": opset, "ir_version": model.ir_version}
        _print_json(data | ({"nodes": [_facts(n) for n in model.graph.node]} if nodes else {}))
        return
    click.echo(f"{file}: {signature.get('kind', 'graph')}, opset {opset}, IR version {model.ir_version}")
    for side in ("inputs", "outputs"):
        _table(side, ("name", "role", "type", "parameter"), [
            (e["name"], e["role"], f"{e['dtype']}[{', '.join(map(str, e['shape']))}]", e.get("parameter") or "") for e in signature[side]
        ])  # fmt: skip
    if signature.get("constraints"):
        _table("constraints", ("what must hold", "because"), [_constraint(c) for c in signature["constraints"]])
    if signature.get("frozen"):
        _table("not trained", ("name", "because"), list(signature["frozen"].items()))
    _table("nodes", ("phase", "count"), [*phases.items(), ("all", sum(phases.values()))])
    _table("operators", ("op", "count"), ops.most_common())
    if nodes:
        _table("every node", ("name", "op", "phase", "source", "primitive"), [
            (n.name, n.op_type, *(_metadata(n).get(f"pullback.{k}", "") for k in ("phase", "source", "primitive"))) for n in model.graph.node
        ])  # fmt: skip


def _constraint(entry: Any) -> tuple[str, str]:
    return (
        (str(entry.get("constraint", entry)), str(entry.get("reason", "")))
        if isinstance(entry, dict)
        else (str(entry), "")
    )


# ---- check -----------------------------------------------------------------------------------------------------------------------------


def _feeds(graph: Graph, data: str | None, seed: int) -> dict[str, np.ndarray]:
    """Given arrays, and random ones for the other inputs: normal floats (deviation 0.5), integers 0 and 1; unbound dims are small.

    No row is all 0: it may be a mask, and where everything is left out by sums with numbers as large as a dtype has, no difference can be measured.
    """
    from ..algebra.dims import evaluate as size_of
    from ..algebra.sizes import small_sizes

    given = _arrays(data) if data else {}
    named = {v.params["name"]: v for v in graph.inputs}
    if unknown := sorted(set(given) - set(named)):
        raise Refusal(f"cannot use {data!r}", [f"the model has no input {n!r}" for n in unknown])
    rng = np.random.default_rng(seed)
    known = {d: n for name, array in given.items() for d, n in zip(named[name].shape, array.shape, strict=False)}
    sizes = small_sizes(graph, {s.name: known[s] for s in graph.symbols if s in known})
    feeds: dict[str, np.ndarray] = {}
    for v in graph.inputs:
        name = v.params["name"]
        if name in given:
            feeds[name] = given[name]
        elif name not in graph.data:
            shape = tuple(size_of(d, sizes) for d in v.shape)
            drawn = rng.standard_normal(shape) * 0.5 if v.dtype.floating else rng.integers(0, 2, shape)
            if not v.dtype.floating and v.rank > 1:
                drawn[..., :1] = 1
            feeds[name] = np.asarray(drawn).astype(v.dtype.numpy)
    return feeds


@main.command(short_help="Hold gradients against finite differences, in double.")
@MODEL
@_option("--of", multiple=True, metavar="NAME", help="Outputs to differentiate; all floating ones by default.")
@_option("--wrt", multiple=True, metavar="NAME", help="Inputs and parameters; all floating ones by default.")
@_option(
    "--data", type=click.Path(exists=True, dir_okay=False), help=".npz with values of inputs; random ones otherwise."
)
@_option("--tolerance", default=1e-6, show_default=True, help="Largest relative difference.")
@_option("--seed", default=0, show_default=True, help="Of the random inputs and directions.")
@READING
@JSON
def check(model: str, of: tuple[str, ...], wrt: tuple[str, ...], data: str | None, tolerance: float, seed: int, dims: dict[str, int],
          as_json: bool) -> None:  # fmt: skip
    """Hold the gradients of MODEL against directional finite differences, in double. Exit status 1 where they disagree.

    Symbolic dims that --dim does not give become 2, 3 or 4, or larger where the model needs it.
    """
    from ..algebra.calculus.check import check_gradient

    graph = _load(model, dims)
    rows = check_gradient(
        graph, _feeds(graph, data, seed), of=list(of) or None, wrt=list(wrt) or None, seed=seed, tolerance=tolerance
    )
    if not rows:
        raise Refusal(f"nothing to check in {model!r}", ["it has no floating input or parameter"])
    failed = [r for r in rows if not r.passed]
    if as_json:
        _print_json({"passed": not failed, "checked": [
            {"name": r.name, "by_rule": r.by_rule, "by_differences": r.by_differences, "error": r.error, "passed": r.passed} for r in rows
        ]})  # fmt: skip
    else:
        _table("derivative along a random direction", ("tensor", "by rule", "by differences", "relative error", ""), [
            (r.name, f"{r.by_rule:.9g}", f"{r.by_differences:.9g}", f"{r.error:.1e}", "ok" if r.passed else "WRONG") for r in rows
        ])  # fmt: skip
        click.echo(f"{len(rows) - len(failed)} of {len(rows)} agree")
    if failed and click.get_current_context().meta.get(CHOSEN, {}).get("straight_through"):
        click.echo(
            "--straight-through takes 1 for the derivative of rounding, which differences do not: behind rounding the two disagree",
            err=True,
        )
    if failed:
        sys.exit(1)


# ---- ops -------------------------------------------------------------------------------------------------------------------------------


def _operators(domain: str | None) -> list[dict[str, Any]]:
    from .onnx_import.coverage import coverage

    rows = coverage()
    domains = list(dict.fromkeys(r.domain for r in rows))
    wanted = "" if domain == "ai.onnx" else domain
    if wanted is not None and wanted not in domains:
        raise Refusal(
            f"no operator of the domain {domain!r}", [f"there are {', '.join(d or 'ai.onnx' for d in domains)}"]
        )
    return [
        {
            "operator": r.op_type,
            "domain": r.domain or "ai.onnx",
            "since": list(r.since),
            "state": r.state,
            "formula": r.formula,
            "reason": r.reason,
        }
        for r in rows
        if wanted is None or r.domain == wanted
    ]


def _losses() -> list[dict[str, Any]]:
    return [
        {"loss": r.name, "aliases": list(r.aliases), "formula": r.formula, "options": dict(r.options)}
        for r in dict.fromkeys(LOSSES.values())
    ]


def _rules(word: str, table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Optimizers or schedules: their options are the fields of their classes, those without a default are required."""
    return [
        {
            word: name,
            "formula": cls.formula,
            "options": {f.name: "required" if f.default is MISSING else f.default for f in fields(cls)},
        }
        for name, cls in table.items()
    ]


def _primitives() -> list[dict[str, Any]]:
    return [{"primitive": q.name, "meaning": q.formula} for q in PRIMITIVES]


def _targets() -> list[dict[str, Any]]:
    return [
        {"target": t.name, "measured on": t.measured, "opset": t.opset, "values in the file": t.embed, "scatter-add as": t.scatter,
         "compiler flags": list(t.flags.values())}
        for t in TARGETS.values()
    ]  # fmt: skip


def _cell(value: Any) -> str:
    match value:
        case dict():
            return ", ".join(f"{k} ({v})" if v == "required" else f"{k}={v}" for k, v in value.items())
        case list():
            return ", ".join(map(str, value))
    return str(value)


@main.command(short_help="List what is covered: operators, losses, optimizers, ...")
@click.argument(
    "what",
    default="operators",
    type=click.Choice(["operators", "primitives", "losses", "optimizers", "schedules", "targets"]),
)
@_option("--domain", help="Operators of one domain only; ai.onnx is ONNX's own.")
@JSON
def ops(what: str, domain: str | None, as_json: bool) -> None:
    """List what is covered, from the tables that the code works with.

    Of each operator it says what becomes of the gradient there; of losses, optimizers and schedules the formula and the options.
    """
    if domain is not None and what != "operators":
        raise click.BadParameter(f"{what} have no domain", param_hint="--domain")
    rows = {
        "operators": lambda: _operators(domain),
        "primitives": _primitives,
        "losses": _losses,
        "optimizers": lambda: _rules("optimizer", OPTIMIZERS),
        "schedules": lambda: _rules("schedule", SCHEDULES),
        "targets": _targets,
    }[what]()
    if as_json:
        _print_json(rows)
        return
    if what != "operators":
        _table(what, list(rows[0]), [[_cell(v) for v in row.values()] for row in rows])
        return
    _table("operators", ("operator", "domain", "since", "state", "formula or reason"), [
        (r["operator"], r["domain"], _cell(r["since"]), r["state"], r["reason"] or r["formula"]) for r in rows
    ])  # fmt: skip
    click.echo(", ".join(f"{n} {state}" for state, n in Counter(r["state"] for r in rows).items()))


# ---- view ------------------------------------------------------------------------------------------------------------------------------


@main.command(short_help="Write a graph as a page to look at.")
@MODEL
@OUTPUT
@_option(
    "--gradient", "with_gradient", is_flag=True, help="Show the gradient graph of the parameters instead of the model."
)
@READING
@JSON
def view(model: str, path: str, with_gradient: bool, dims: dict[str, int], as_json: bool) -> None:
    """Write MODEL as a page to look at; the ending of the file chooses the form: .html, .dot, .tex or .txt.

    A file that pullback wrote (a training step, a gradient graph) is shown with its phases, sources and roles.
    """
    from ..backends import views
    from ..backends.onnx_export.metadata import as_told

    if Path(path).suffix not in views.VIEWS:
        raise Refusal(f"cannot write a view to {path!r}", [f"the ending must be one of {', '.join(views.VIEWS)}"])
    with _together(path, source=model) as at:
        graph = _load(model, dims)
        shown = face.gradient(graph) if with_gradient else as_told(graph, graph.info["model"])
        views.write(shown, at(path))
    if as_json:
        _print_json({"file": path, "nodes": len(shown.nodes)})
        return
    click.echo(f"wrote {path}: {len(shown.nodes)} nodes")


# ---- demo ------------------------------------------------------------------------------------------------------------------------------


@main.command(short_help="Train a classifier of handwritten digits that ships with pullback.")
@_option(
    "--folder",
    default="pullback-demo",
    show_default=True,
    type=click.Path(file_okay=False),
    help="Where files are left.",
)
@_option("--epochs", default=12, show_default=True, type=click.IntRange(min=1), help="Passes over the data.")
@_option(
    "--profile",
    type=click.Choice(["explicit", "native"]),
    default="explicit",
    show_default=True,
    help="Plain numerical ops only, or raised to ops that runtimes have kernels for.",
)
@_option("--no-progress", is_flag=True, help="Show nothing while it runs.")
@JSON
def demo(folder: str, epochs: int, profile: str, no_progress: bool, as_json: bool) -> None:
    """Train a small classifier of handwritten digits, from its inference model, on onnxruntime."""
    from ..backends.runtime import Trainer
    from ..demo import DATA, MODEL

    def say(text: str) -> None:
        if not as_json:
            click.echo(text)

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    say(f"model: {MODEL} (random weights)\ndata:  {DATA}")
    step = face.training_step(face.load(MODEL), loss="cross_entropy", optimizer="adamw", lr=2e-3)
    written = step.save(place / "train.onnx", profile=profile)
    kinds = Counter(node.phase for node in step.nodes())
    say(f"step:  {written} ({', '.join(f'{n} {phase}' for phase, n in kinds.items())} nodes)")
    arrays, held_out = _held_out(str(DATA))
    trainer = Trainer(step, profile=profile)
    history = trainer.fit(
        arrays,
        epochs=epochs,
        batch_size=32,
        validation=held_out,
        metrics=["accuracy"],
        progress=not no_progress and not as_json,
    )
    trained = trainer.export(place / "trained.onnx")
    if as_json:
        _print_json({"step": str(written), "trained": str(trained), "epochs": history.epochs})
        return
    first, last = history.epochs[0], history.epochs[-1]
    say(
        f"loss {first['loss']:.3f} -> {last['loss']:.3f}, test accuracy {first['val_accuracy']:.1%} -> {last['val_accuracy']:.1%}"
    )
    say(f"the trained inference model: {trained}")


__all__ = ["main"]
