"""The command line. Exit status: 0 done, 1 a check failed, 2 the input or the call is wrong.

Whatever is printed for people has `--json` for programs; refusals go to standard error, without a traceback, and leave no file.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from .. import face
from ..algebra import costs
from ..algebra.dims import show
from ..algebra.errors import PullbackError, Refusal
from ..algebra.graph import Graph, Value
from ..algebra.types import TensorType

console = Console(highlight=False, soft_wrap=True)


class _Commands(click.Group):
    """A group that turns every refusal into one message and exit status 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PullbackError as error:
            notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
            click.echo(f"pullback: {error}{notes}", err=True)
            ctx.exit(2)
        except OSError as error:
            click.echo(f"pullback: {error}", err=True)
            ctx.exit(2)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="pullback")
def main() -> None:
    """Any ONNX inference model in, one explicit ONNX training step out."""


# ---- shared options --------------------------------------------------------------------------------------------------------------------


def _pairs(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in values:
        name, mark, value = text.partition("=")
        if not mark or not name:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE")
        found[name] = value
    return found


def _sizes(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    pairs = _pairs(ctx, option, values)
    for name, value in pairs.items():
        if not value.isdecimal() or int(value) < 1:
            raise click.BadParameter(f"the size of {name!r} must be a positive integer, found {value!r}")
    return {name: int(value) for name, value in pairs.items()}


def _literals(pairs: Mapping[str, str]) -> dict[str, Any]:
    """Option values as JSON where they are (numbers, lists, true, null), a file of numbers where they end in .npy, else text."""
    out: dict[str, Any] = {}
    for name, text in pairs.items():
        if text.endswith(".npy"):
            out[name] = np.load(text)
            continue
        try:
            out[name] = json.loads(text)
        except json.JSONDecodeError:
            out[name] = text
    return out


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


MODEL = click.argument("model", type=click.Path(dir_okay=False))
OUTPUT = click.option(
    "-o", "--output-file", "--out", "path", required=True, type=click.Path(dir_okay=False), help="File to write."
)
READING = "pullback.reading"  # where a context keeps the options with which a model is read


def _reading(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value and parameter.name:
        context.meta.setdefault(READING, {})[parameter.name] = value


def _load(model: str, dims: Mapping[str, int]) -> face.Model:
    """The model, read with the options of the command that runs."""
    return face.load(model, dims=dims, **click.get_current_context().meta.get(READING, {}))


DIM = _options(
    click.option("--dim", "dims", multiple=True, metavar="NAME=SIZE", callback=_sizes, help="Give a symbolic dim a size."),
    click.option("--max-trips", type=click.IntRange(min=1), callback=_reading, expose_value=False, metavar="N",
                 help="The most steps of loops that stop on a condition, which gives them a gradient."),
    click.option("--unroll", is_flag=True, callback=_reading, expose_value=False,
                 help="Write loops of known length step after step."),
    click.option("--straight-through", is_flag=True, callback=_reading, expose_value=False,
                 help="Let gradients pass through quantisation."),
)  # fmt: skip
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
EMISSION = _options(
    click.option("--profile", type=click.Choice(["explicit", "native"]), default="explicit", show_default=True,
                 help="Plain numerical ops only, or raised to ops that runtimes have kernels for."),
    click.option("--target", type=click.Choice(["onnxruntime", "onnx-mlir", "torch-mlir", "iree"]), default="onnxruntime",
                 show_default=True, help="Use only forms that this one takes."),
    click.option("--embed", type=click.Choice(["all", "frozen", "none"]),
                 help="Which values the file holds; the others go into a .safetensors beside it."),
    click.option("--opset", type=int, help="Operator set to write; the target's own by default."),
)  # fmt: skip


def _emission(profile: str, target: str, embed: str | None, opset: int | None) -> dict[str, Any]:
    return {"profile": profile, "target": target, "embed": embed, "opset": opset}


def _type(value: Value) -> str:
    return repr(value.type)


def _print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=1, default=str))


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console.print(table)


def _written(path: Path, graph: Graph, as_json: bool, more: Mapping[str, Any] | None = None) -> None:
    signature = graph.signature if isinstance(graph, face.Model) else None
    if as_json:
        data = json.loads(signature.to_json()) if signature is not None else {}
        _print_json({"file": str(path), "signature": data, **(more or {})})
        return
    console.print(f"wrote {path}: {len(graph.inputs)} inputs, {len(graph.outputs)} outputs", markup=False)
    for constraint in graph.constraints:
        console.print(f"  requires {constraint} ({constraint.reason})", markup=False)


# ---- lower, grad -----------------------------------------------------------------------------------------------------------------------


@main.command()
@MODEL
@OUTPUT
@DIM
@EMISSION
@JSON
def lower(model: str, path: str, dims: dict[str, int], as_json: bool, **emission: Any) -> None:
    """Write the forward graph of MODEL in explicit primitives."""
    graph = face.lower(_load(model, dims))
    _written(graph.save(path, **_emission(**emission)), graph, as_json)


@main.command()
@MODEL
@OUTPUT
@click.option(
    "--of",
    multiple=True,
    metavar="NAME",
    help="Outputs or inner tensors to differentiate; all floating outputs by default.",
)
@click.option("--wrt", multiple=True, metavar="NAME",
              help="Inputs, parameters or inner tensors; all parameters by default (inputs where there are none).")  # fmt: skip
@DIM
@EMISSION
@JSON
def grad(model: str, path: str, of: tuple[str, ...], wrt: tuple[str, ...], dims: dict[str, int], as_json: bool,
         **emission: Any) -> None:  # fmt: skip
    """Write the gradient graph of MODEL: seeds in, gradients out."""
    graph = face.gradient(_load(model, dims), of=list(of) or None, wrt=list(wrt) or None)
    _written(graph.save(path, **_emission(**emission)), graph, as_json)


# ---- shapes ----------------------------------------------------------------------------------------------------------------------------


@main.command()
@MODEL
@DIM
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
    _table(
        "symbols",
        ("symbol", "read from"),
        [(n, ", ".join(at)) for n, at in symbols.items()] or [("none", "every size is known")],
    )
    if graph.constraints:
        _table("constraints", ("what must hold", "because"), [(str(c), c.reason) for c in graph.constraints])
    _table("tensors", ("name", "role", "type"), [(n, r, _type(v)) for n, (r, v) in tensors.items()])
    _table("cost of the forward pass", ("", ""), [
        ("floating operations", show(total.flops)), ("weights", show(total.parameters)),
        ("bytes of weights", show(total.parameter_bytes)), ("bytes of all intermediates", show(total.activation_bytes)),
    ])  # fmt: skip


# ---- inspect ---------------------------------------------------------------------------------------------------------------------------


def _metadata(node: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in node.metadata_props}


@main.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--nodes", is_flag=True, help="Every node with its phase, source and primitive.")
@JSON
def inspect(file: str, nodes: bool, as_json: bool) -> None:
    """Show roles, phases and counts of FILE, a model that pullback wrote."""
    import onnx

    from .onnx_import.reader import open_model

    model, _, _ = open_model(file)
    text = _metadata(model).get("pullback.signature")
    if text is None:
        raise Refusal(
            f"cannot inspect {file!r}",
            ["it was not written by pullback: it carries no signature (see `pullback shapes`)"],
        )
    signature = json.loads(text)
    phases = Counter(_metadata(n).get("pullback.phase", "none") for n in model.graph.node)
    ops = Counter(n.op_type for n in model.graph.node)
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    if as_json:
        data: dict[str, Any] = {
            "signature": signature,
            "phases": phases,
            "ops": ops,
            "opset": opset,
            "ir_version": model.ir_version,
        }
        if nodes:
            data["nodes"] = [
                {
                    "name": n.name,
                    "op_type": n.op_type,
                    "inputs": list(n.input),
                    "outputs": list(n.output),
                    **_metadata(n),
                }
                for n in model.graph.node
            ]
        _print_json(data)
        return
    console.print(f"{file}: opset {opset}, IR {model.ir_version}, onnx {onnx.__version__}", markup=False)
    for side in ("inputs", "outputs"):
        _table(side, ("name", "role", "type", "parameter"), [
            (e["name"], e["role"], f"{e['dtype']}[{', '.join(map(str, e['shape']))}]", e.get("parameter") or "") for e in signature[side]
        ])  # fmt: skip
    if signature.get("frozen"):
        _table("frozen", ("name", "because"), list(signature["frozen"].items()))
    if signature.get("left_out"):
        _table("not trained", ("name", "because"), list(signature["left_out"].items()))
    _table("nodes", ("phase", "count"), [*phases.items(), ("all", sum(phases.values()))])
    _table("operators", ("op", "count"), ops.most_common())
    if nodes:
        _table("every node", ("name", "op", "phase", "source", "primitive"), [
            (n.name, n.op_type, *(_metadata(n).get(f"pullback.{k}", "") for k in ("phase", "source", "primitive"))) for n in model.graph.node
        ])  # fmt: skip


# ---- check -----------------------------------------------------------------------------------------------------------------------------


def _feeds(graph: Graph, dims: Mapping[str, int], data: str | None, seed: int) -> dict[str, np.ndarray]:
    """Given arrays, and random ones for the other inputs: normal floats (deviation 0.5), integers 0 and 1; unbound dims are 2, 3, ..."""
    from ..algebra.dims import evaluate as size_of

    given = dict(np.load(data)) if data else {}
    rng = np.random.default_rng(seed)
    sizes = {s.name: 2 + i % 3 for i, s in enumerate(graph.symbols)}
    feeds: dict[str, np.ndarray] = {}
    for v in graph.inputs:
        name = v.params["name"]
        if name in given:
            feeds[name] = given[name]
        elif name not in graph.data:
            shape = tuple(size_of(d, sizes) for d in v.shape)
            drawn = rng.standard_normal(shape) * 0.5 if v.dtype.floating else rng.integers(0, 2, shape)
            feeds[name] = np.asarray(drawn).astype(v.dtype.numpy)
    unknown = sorted(set(given) - {v.params["name"] for v in graph.inputs})
    if unknown:
        raise Refusal(f"cannot use {data!r}", [f"the model has no input {n!r}" for n in unknown])
    return feeds


@main.command()
@MODEL
@click.option("--of", multiple=True, metavar="NAME", help="Outputs to differentiate; all floating ones by default.")
@click.option("--wrt", multiple=True, metavar="NAME", help="Inputs and parameters; all floating ones by default.")
@click.option(
    "--data", type=click.Path(exists=True, dir_okay=False), help=".npz with values of inputs; random ones otherwise."
)
@click.option("--tolerance", default=1e-6, show_default=True, help="Largest relative difference.")
@click.option("--seed", default=0, show_default=True)
@DIM
@JSON
def check(model: str, of: tuple[str, ...], wrt: tuple[str, ...], data: str | None, tolerance: float, seed: int, dims: dict[str, int],
          as_json: bool) -> None:  # fmt: skip
    """Hold the gradients of MODEL against directional finite differences, in double. Exit status 1 where they disagree."""
    from ..algebra.calculus.check import check_gradient

    graph = _load(model, dims)
    rows = check_gradient(
        graph,
        _feeds(graph, dims, data, seed),
        of=list(of) or None,
        wrt=list(wrt) or None,
        seed=seed,
        tolerance=tolerance,
    )
    failed = [r for r in rows if not r.passed]
    if as_json:
        _print_json({"passed": not failed, "checked": [
            {"name": r.name, "by_rule": r.by_rule, "by_differences": r.by_differences, "error": r.error, "passed": r.passed} for r in rows
        ]})  # fmt: skip
    else:
        _table("derivative along a random direction", ("tensor", "by rule", "by differences", "relative error", ""), [
            (r.name, f"{r.by_rule:.9g}", f"{r.by_differences:.9g}", f"{r.error:.1e}", "ok" if r.passed else "WRONG") for r in rows
        ])  # fmt: skip
        console.print(f"{len(rows) - len(failed)} of {len(rows)} agree")
    if failed or not rows:
        sys.exit(1)


# ---- ops -------------------------------------------------------------------------------------------------------------------------------


@main.command()
@click.option("--domain", default=None, help="One domain only ('' is ONNX's own).")
@JSON
def ops(domain: str | None, as_json: bool) -> None:
    """List the operators that are covered, and what becomes of the gradient at each."""
    from .onnx_import.coverage import coverage

    rows = [r for r in coverage() if domain is None or r.domain == domain]
    if as_json:
        _print_json([{"domain": r.domain, "op_type": r.op_type, "since": r.since, "state": r.state, "reason": r.reason, "formula": r.formula}
                     for r in rows])  # fmt: skip
        return
    _table("operators", ("operator", "domain", "since", "state", "formula or reason"), [
        (r.op_type, r.domain or "ai.onnx", ", ".join(map(str, r.since)), r.state, r.reason or r.formula) for r in rows
    ])  # fmt: skip
    counts = Counter(r.state for r in rows)
    console.print(", ".join(f"{n} {state}" for state, n in counts.items()))


# ---- view ------------------------------------------------------------------------------------------------------------------------------


@main.command()
@MODEL
@OUTPUT
@click.option(
    "--gradient", "with_gradient", is_flag=True, help="Show the gradient graph of the parameters instead of the model."
)
@DIM
def view(model: str, path: str, with_gradient: bool, dims: dict[str, int]) -> None:
    """Write MODEL as a page to look at; the ending of the file chooses the form: .html, .dot, .tex or .txt."""
    from ..backends import views

    graph = _load(model, dims)
    views.write(face.gradient(graph) if with_gradient else graph, path)
    console.print(f"wrote {path}", markup=False)


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
        name, _, weight = rest.partition(":")
        try:
            losses[output] = (name, float(weight) if weight else 1.0, options)
        except ValueError:
            raise click.BadParameter(f"the weight in {text!r} is no number", param_hint="--loss") from None
    return losses, {}


def _groups(texts: tuple[str, ...]) -> list[dict[str, Any]]:
    """Parameter groups from `GLOB:OPTION=VALUE,...`; `GLOB:frozen` freezes."""
    groups = []
    for text in texts:
        glob, mark, rest = text.rpartition(":")
        if not mark:
            raise click.BadParameter(f"{text!r} is not GLOB:OPTION=VALUE,...", param_hint="--group")
        pairs = dict(item.partition("=")[::2] for item in rest.split(","))
        if "frozen" in pairs:
            groups.append({"params": glob, "frozen": True})
        else:
            groups.append({"params": glob, **_literals(pairs)})
    return groups


def _schedule(text: str | None) -> Any:
    """A schedule from `NAME` or `NAME:OPTION=VALUE,...`."""
    if text is None:
        return None
    name, _, rest = text.partition(":")
    options = _literals(dict(item.partition("=")[::2] for item in rest.split(",") if item))
    return (name, options) if options else name


def _dropout(text: str | None) -> Any:
    if text is None:
        return False
    if text == "model":
        return True
    try:
        return float(text)
    except ValueError:
        return {glob: float(ratio) for glob, _, ratio in (item.rpartition("=") for item in text.split(","))}


def _loss_scale(ctx: click.Context, option: click.Parameter, text: str | None) -> Any:
    if text in (None, "dynamic", "off"):
        return text
    try:
        return float(text)
    except ValueError:
        raise click.BadParameter(f"dynamic, off or a number is required, found {text!r}") from None


def _checkpoint(ctx: click.Context, option: click.Parameter, text: str | None) -> Any:
    """What is recomputed: `auto`, a number of segments, `500000000B`, or globs."""
    if text is None or text == "auto":
        return text
    if text.isdecimal():
        return int(text)
    if text.endswith("B") and text[:-1].isdecimal():
        return {"budget": int(text[:-1])}
    return text.split(",")


def _lora(ctx: click.Context, option: click.Parameter, text: str | None) -> Any:
    if text is None:
        return None
    rank, _, globs = text.partition(":")
    if not rank.isdecimal() or int(rank) < 1:
        raise click.BadParameter(f"RANK or RANK:GLOB,... is required, found {text!r}")
    return {"rank": int(rank), "alpha": 2.0 * int(rank), **({"targets": globs.split(",")} if globs else {})}


@main.command("train-step")
@MODEL
@OUTPUT
@click.option(
    "--loss",
    "losses",
    multiple=True,
    default=("cross_entropy",),
    show_default=True,
    metavar="NAME | OUTPUT=NAME[:WEIGHT] | FILE.onnx | none",
    help="As in torch.nn.functional; once per output for several; a model that is a loss; none where --output is the loss.",
)
@click.option(
    "--loss-option", "loss_options", multiple=True, metavar="NAME=VALUE", callback=_pairs, help="Option of the loss."
)
@click.option("--output", metavar="NAME", help="The model's output that the loss takes; the only one by default.")
@click.option("--class-axis", type=int, help="Axis of the classes, where it is not 1.")
@click.option("--optimizer", default="sgd", show_default=True, help="As in torch.optim, in lower case.")
@click.option(
    "--optimizer-option",
    "optimizer_options",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_pairs,
    help="Option of the optimizer.",
)
@click.option("--lr", type=float, help="First value of the learning rate, which is an input of the step.")
@click.option(
    "--schedule", metavar="NAME[:OPTION=VALUE,...]", help="Learning-rate schedule, computed from the step counter."
)
@click.option("--train", multiple=True, metavar="GLOB", help="Train only these parameters.")
@click.option("--freeze", multiple=True, metavar="GLOB", help="Do not train these.")
@click.option(
    "--group", "groups", multiple=True, metavar="GLOB:OPTION=VALUE,...", help="Optimizer options for some parameters."
)
@click.option("--no-decay", is_flag=True, help="No weight decay on norms and biases.")
@click.option("--clip-value", type=float, help="Clip each gradient element.")
@click.option("--clip-norm", type=float, help="Clip each gradient's norm.")
@click.option("--clip-global-norm", type=float, help="Clip the norm of all gradients together.")
@click.option("--ema", type=float, metavar="DECAY", help="Keep an exponential moving average of the weights.")
@click.option(
    "--batch-norm",
    type=click.Choice(["batch", "frozen"]),
    default="batch",
    show_default=True,
    help="Batch statistics and updated running ones, or the running ones as they are.",
)
@click.option(
    "--precision", type=click.Choice(["float16", "bfloat16"]), help="Products in 16 bits, weights in float32."
)
@click.option(
    "--loss-scale", metavar="dynamic | off | FIRST", callback=_loss_scale, help="Loss scaling; dynamic for float16."
)
@click.option(
    "--checkpoint",
    metavar="auto | SEGMENTS | GLOB,... | BYTESB",
    callback=_checkpoint,
    help="Compute forward values anew in the backward pass: chosen automatically, in so many segments, of these nodes, or by a budget.",
)
@click.option(
    "--lora", metavar="RANK[:GLOB,...]", callback=_lora, help="Train low-rank adapters beside these matrices."
)
@click.option("--dropout", metavar="model | RATIO | GLOB=RATIO,...", help="Switch dropout on; off by default.")
@click.option(
    "--gradients", "gradients_path", type=click.Path(dir_okay=False), help="Also write loss and gradients alone."
)
@click.option("--apply", "apply_path", type=click.Path(dir_okay=False), help="Also write the update alone.")
@click.option(
    "--eval", "eval_path", type=click.Path(dir_okay=False), help="Also write loss and outputs in inference mode."
)
@click.option(
    "--standard-form",
    "standard_path",
    type=click.Path(dir_okay=False),
    help="Also write the forward graph with ONNX's TrainingInfoProto.",
)
@DIM
@EMISSION
@JSON
def train_step(
    model: str,
    path: str,
    losses: tuple[str, ...],
    loss_options: dict[str, str],
    output: str | None,
    class_axis: int | None,
    optimizer: str,
    optimizer_options: dict[str, str],
    lr: float | None,
    schedule: str | None,
    train: tuple[str, ...],
    freeze: tuple[str, ...],
    groups: tuple[str, ...],
    dropout: str | None,
    gradients_path: str | None,
    apply_path: str | None,
    eval_path: str | None,
    standard_path: str | None,
    dims: dict[str, int],
    profile: str,
    target: str,
    embed: str | None,
    opset: int | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Write the training step of MODEL: forward, loss, backward and update in one graph."""
    loss, options = _loss(losses, _literals(loss_options))
    graph = _load(model, dims)
    step = face.training_step(
        graph,
        loss=loss,
        loss_options=options,
        output=output,
        class_axis=class_axis,
        optimizer=optimizer,
        lr=lr,
        optimizer_options=_literals(optimizer_options),
        schedule=_schedule(schedule),
        train=list(train),
        freeze=list(freeze),
        groups=_groups(groups),
        dropout=_dropout(dropout),
        **settings,
    )
    emission = _emission(profile, target, embed, opset)
    parts = [
        (path, step.graph),
        (gradients_path, step.gradients),
        (apply_path, step.apply),
        (eval_path, step.evaluation),
    ]
    for file, part in parts:
        if file is not None:
            part.save(file, **emission)
    if standard_path is not None:
        step.save_standard_form(standard_path, **emission)
    _written(Path(path), step.graph, as_json)
    if not as_json:
        console.print(str(step.selection), markup=False)


# ---- fit, demo -------------------------------------------------------------------------------------------------------------------------


def _held_out(data: str) -> tuple[Any, dict[str, np.ndarray] | None]:
    """Training data and, where an `.npz` has arrays named `test_{input}`, validation data."""
    if not data.endswith(".npz"):
        return data, None
    try:
        arrays = dict(np.load(data))
    except (OSError, ValueError) as error:
        raise Refusal(f"cannot read {data!r}", [str(error)]) from error
    held = {k.removeprefix("test_"): v for k, v in arrays.items() if k.startswith("test_")}
    return {k: v for k, v in arrays.items() if not k.startswith("test_")}, held or None


@main.command()
@click.argument("train", type=click.Path(dir_okay=False))
@click.option(
    "--data",
    required=True,
    type=click.Path(exists=True),
    help=".npz, folder of .npy, .csv or .parquet; arrays are named as the step's inputs, test_{input} are held out.",
)
@click.option(
    "-o",
    "--output-file",
    "--out",
    "path",
    required=True,
    type=click.Path(dir_okay=False),
    help="The trained inference model.",
)
@click.option("--validation", type=click.Path(exists=True), help="Held-out data.")
@click.option("--epochs", default=1, show_default=True, type=click.IntRange(min=0))
@click.option("--batch-size", default=32, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=0, show_default=True, help="Of the order of samples.")
@click.option("--no-shuffle", is_flag=True)
@click.option("--accumulate", default=1, show_default=True, type=click.IntRange(min=1), help="Batches per update.")
@click.option(
    "--metric", "metrics", multiple=True, metavar="NAME", help="accuracy, ...: computed on the held-out data."
)
@click.option(
    "--early-stopping", type=click.IntRange(min=1), metavar="EPOCHS", help="Stop where the held-out loss does not fall."
)
@click.option("--checkpoint", type=click.Path(dir_okay=False), help=".safetensors written after each epoch.")
@click.option("--checkpoint-every", type=click.IntRange(min=1), metavar="UPDATES", help="And after so many updates.")
@click.option("--resume", is_flag=True, help="Go on from the checkpoint, to the same bits.")
@click.option("--model", type=click.Path(dir_okay=False), help="The inference model, where the step does not carry it.")
@click.option("--gradients", type=click.Path(dir_okay=False), help="The step's gradients file, for --accumulate.")
@click.option("--apply", "apply_path", type=click.Path(dir_okay=False), help="The step's apply file, for --accumulate.")
@click.option("--eval", "evaluation", type=click.Path(dir_okay=False), help="The step's evaluation file.")
@click.option("--threads", type=click.IntRange(min=1))
@click.option("--no-progress", is_flag=True)
@JSON
def fit(train: str, data: str, path: str, validation: str | None, epochs: int, batch_size: int, seed: int, no_shuffle: bool,
        accumulate: int, metrics: tuple[str, ...], early_stopping: int | None, checkpoint: str | None,
        checkpoint_every: int | None, resume: bool, model: str | None, gradients: str | None, apply_path: str | None,
        evaluation: str | None, threads: int | None, no_progress: bool, as_json: bool) -> None:  # fmt: skip
    """Run the training step TRAIN on data, and write the trained inference model."""
    from ..backends.runtime import Trainer

    trainer = Trainer.from_file(train, gradients=gradients, apply=apply_path, evaluation=evaluation, threads=threads)
    arrays, held_out = _held_out(data)
    history = trainer.fit(
        arrays, epochs=epochs, batch_size=batch_size, shuffle=not no_shuffle, seed=seed, accumulate=accumulate,
        validation=validation or held_out, metrics=list(metrics), early_stopping=early_stopping, checkpoint=checkpoint,
        checkpoint_every=checkpoint_every, resume=resume, progress=not no_progress and not as_json,
    )  # fmt: skip
    trainer.export(path, model=model)
    if as_json:
        _print_json({"file": path, "epochs": history.epochs, "stopped": history.stopped, "steps": trainer.steps})
        return
    for row in history.epochs if no_progress else ():
        console.print("  ".join(f"{k} {v:.4g}" for k, v in row.items()), markup=False)
    console.print(f"wrote {path}", markup=False)


@main.command()
@click.option(
    "--folder",
    default="pullback-demo",
    show_default=True,
    type=click.Path(file_okay=False),
    help="Where files are left.",
)
@click.option("--epochs", default=12, show_default=True, type=click.IntRange(min=1))
@click.option("--profile", type=click.Choice(["explicit", "native"]), default="explicit", show_default=True)
@click.option("--no-progress", is_flag=True)
def demo(folder: str, epochs: int, profile: str, no_progress: bool) -> None:
    """Train a small classifier of handwritten digits, from its inference model, on onnxruntime."""
    from ..backends.runtime import Trainer
    from ..demo import DATA, MODEL

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    console.print(f"model: {MODEL} (random weights)\ndata:  {DATA}", markup=False)
    step = face.training_step(face.load(MODEL), loss="cross_entropy", optimizer="adamw", lr=2e-3)
    written = step.save(place / "train.onnx", profile=profile)
    kinds = Counter(node.phase for node in step.nodes())
    console.print(f"step:  {written} ({', '.join(f'{n} {phase}' for phase, n in kinds.items())} nodes)", markup=False)
    arrays, held_out = _held_out(str(DATA))
    trainer = Trainer(step, profile=profile)
    history = trainer.fit(
        arrays, epochs=epochs, batch_size=32, validation=held_out, metrics=["accuracy"], progress=not no_progress
    )
    trainer.export(place / "trained.onnx")
    first, last = history.epochs[0], history.epochs[-1]
    console.print(
        f"loss {first['loss']:.3f} -> {last['loss']:.3f}, test accuracy {first['val_accuracy']:.1%} -> {last['val_accuracy']:.1%}",
        markup=False,
    )
    console.print(f"the trained inference model: {place / 'trained.onnx'}", markup=False)


__all__ = ["main"]
