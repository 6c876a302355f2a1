"""Time and peak memory of `train-step` for large models, split by phase, and its cost on graphs of growing size.

    python -m benchmarks.convert [--only resnet50,gpt2,chain,wide] [--profile explicit] [--dir DIRECTORY]

`resnet50` is the light model of the onnx package's own test data with seeded random weights (25.6 M parameters); `gpt2` has 12 layers, 768 wide, 12 heads, a
vocabulary of 50257 and 1024 places (124 M parameters, seeded random weights, batch and sequence symbolic). Each runs in a process of its own: phases are
`read` (file to protobuf), `lower` (to the algebra), `differentiate` (the training step), `simplify`, `emit`, `check` (ONNX's checker and strict
shape inference) and `write`; memory is the peak of the process beyond what its imports take, over the size of the model's file. The peer, measured in
the same way, is the onnx package itself: load, check with shape inference, save.

`chain` and `wide` have 1,000, 10,000 and 50,000 nodes; the time per node of each phase should stay the same, and is given as a ratio to the smallest.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

PHASES = ("read", "lower", "differentiate", "simplify", "emit", "check", "write")
SIZES = (1_000, 10_000, 50_000)


# ---- models ----------------------------------------------------------------------------------------------------------------------------


def resnet50() -> onnx.ModelProto:
    """The light resnet50, each `ConstantOfShape` replaced by random weights of its shape."""
    light = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / "light_resnet50.onnx"
    model = onnx.load(light)
    graph = model.graph
    shapes = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    positive = {n.input[i] for n in graph.node if n.op_type == "BatchNormalization" for i in (1, 4)}
    rng = np.random.default_rng(0)
    nodes, weights = [], []
    for node in graph.node:
        if node.op_type != "ConstantOfShape" or node.input[0] not in shapes:
            nodes.append(node)
            continue
        shape = [int(d) for d in shapes[node.input[0]]]
        if node.output[0] in positive:
            w = np.ones(shape, np.float32)
        else:
            fan = math.prod(shape[1:]) if len(shape) > 1 else 10_000
            w = rng.standard_normal(shape, np.float32) * np.float32(math.sqrt(2 / fan))
        weights.append(numpy_helper.from_array(w, node.output[0]))
    read = {name for node in nodes for name in node.input}
    weights += [i for i in graph.initializer if i.name in read]
    made = {w.name for w in weights}
    inputs = [i for i in graph.input if i.name in read and i.name not in made]
    for field, kept in ((graph.node, nodes), (graph.initializer, weights), (graph.input, inputs)):
        del field[:]
        field.extend(kept)
    model.ir_version = max(model.ir_version, 4)
    return model


def gpt2(
    layers: int = 12, width: int = 768, heads: int = 12, words: int = 50257, places: int = 1024
) -> onnx.ModelProto:
    """A GPT-2 with tied embeddings, its batch and sequence symbolic."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    weights: list[TensorProto] = []

    def weight(name: str, *shape: int, scale: float = 0.02, shift: float = 0.0) -> str:
        drawn = rng.standard_normal(shape, np.float32) * np.float32(scale) + np.float32(shift)
        weights.append(numpy_helper.from_array(drawn, name))
        return name

    def constant(name: str, value: object, dtype: type = np.int64) -> str:
        weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def node(op: str, *inputs: str, out: str, **attributes: object) -> str:
        nodes.append(helper.make_node(op, inputs, [out], name=out, **attributes))
        return out

    def linear(x: str, name: str, inputs: int, outputs: int) -> str:
        y = node("MatMul", x, weight(f"{name}.weight", inputs, outputs), out=f"{name}.product")
        return node("Add", y, weight(f"{name}.bias", outputs), out=name)

    def norm(x: str, name: str) -> str:
        scale, bias = weight(f"{name}.weight", width, shift=1.0), weight(f"{name}.bias", width)
        return node("LayerNormalization", x, scale, bias, out=name, axis=-1)

    zero, one, two = constant("zero", [0]), constant("one", [1]), constant("two", [2])
    split = constant("heads", [0, 0, heads, width // heads])
    merged = constant("merged", [0, 0, width])
    scale = constant("scale", 1 / math.sqrt(width // heads), np.float32)
    allowed = constant("allowed", np.tril(np.ones((1, 1, places, places))), np.bool_)
    never = constant("never", -1e9, np.float32)
    shape = node("Shape", "input_ids", out="shape")
    length = node("Slice", shape, one, two, zero, out="length")
    table = weight("wte", words, width)
    at = node("Slice", weight("wpe", places, width), zero, length, zero, out="positions")
    x = node("Add", node("Gather", table, "input_ids", out="embedded"), at, out="h")
    ends = node("Concat", length, length, out="ends", axis=0)
    both = constant("both", [2, 3])
    mask = node("Slice", allowed, constant("starts", [0, 0]), ends, both, out="mask")
    for i in range(layers):
        at = f"h.{i}"
        nodes.append(helper.make_node("Split", [linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn", width, 3 * width)],
                                      [f"{at}.q", f"{at}.k", f"{at}.v"], name=f"{at}.split", axis=-1, num_outputs=3))  # fmt: skip
        q, k, v = (node("Reshape", f"{at}.{n}", split, out=f"{at}.{n}.split") for n in "qkv")
        q, v = (node("Transpose", n, out=f"{n}.moved", perm=[0, 2, 1, 3]) for n in (q, v))
        k = node("Transpose", k, out=f"{k}.moved", perm=[0, 2, 3, 1])
        a = node("Mul", node("MatMul", q, k, out=f"{at}.scores"), scale, out=f"{at}.scaled")
        a = node("Softmax", node("Where", mask, a, never, out=f"{at}.masked"), out=f"{at}.attention", axis=-1)
        y = node("Transpose", node("MatMul", a, v, out=f"{at}.mixed"), out=f"{at}.back", perm=[0, 2, 1, 3])
        y = linear(node("Reshape", y, merged, out=f"{at}.merged"), f"{at}.attn.c_proj", width, width)
        x = node("Add", x, y, out=f"{at}.middle")
        y = linear(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc", width, 4 * width)
        y = node("Gelu", y, out=f"{at}.gelu", approximate="tanh")
        x = node("Add", x, linear(y, f"{at}.mlp.c_proj", 4 * width, width), out=f"{at}.out")
    x = norm(x, "ln_f")
    node("MatMul", x, node("Transpose", table, out="head", perm=[1, 0]), out="logits")
    graph = helper.make_graph(
        nodes, "gpt2", [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", words])], weights,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def chain(size: int) -> onnx.ModelProto:
    """`size` nodes one after the other."""
    nodes, x = [], "x"
    for i in range(size):
        op, extra = (("Tanh", []), ("Mul", ["w"]), ("Add", ["b"]))[i % 3]
        nodes.append(helper.make_node(op, [x, *extra], [f"n{i}"]))
        x = f"n{i}"
    nodes[-1].output[0] = "y"
    return _small(nodes)


def wide(size: int) -> onnx.ModelProto:
    """`size` nodes, a third of them side by side, then added up in pairs."""
    nodes, level, numbers = [], [], []
    for i in range(size // 3):
        numbers.append(numpy_helper.from_array(np.asarray(1 + i / size, np.float32), f"c{i}"))
        nodes.append(helper.make_node("Mul", ["x" if i else "w", f"c{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Tanh", [f"m{i}"], [f"t{i}"]))
        level.append(f"t{i}")
    while len(level) > 1:
        after = []
        for a, b in zip(level[::2], level[1::2], strict=False):
            nodes.append(helper.make_node("Add", [a, b], [f"s{len(nodes)}"]))
            after.append(nodes[-1].output[0])
        level = after + ([level[-1]] if len(level) % 2 else [])
    nodes[-1].output[0] = "y"
    return _small(nodes, numbers)


def _small(nodes: list[onnx.NodeProto], numbers: Sequence[TensorProto] = ()) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(np.full(4, 0.5, np.float32), n) for n in ("w", "b")] + list(numbers)
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 4]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "small", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


# ---- one run ---------------------------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def _peak() -> int:
    """The largest size that this process had so far, in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def convert(path: Path, out: Path, profile: str, options: dict[str, object]) -> dict[str, object]:
    """`train-step`, phase by phase as the public face runs it."""
    import pullback
    from pullback.algebra.collection import paused
    from pullback.algebra.passes import default
    from pullback.backends.onnx_export import writer
    from pullback.backends.onnx_export.emit import emit

    before, clock = _peak(), Clock()
    with clock("read"):
        proto = onnx.load(path)
    with clock("lower"):
        graph = pullback.load(proto)
    del proto
    with clock("differentiate"):
        step = pullback.training_step(graph, **options)
    with clock("simplify"):
        whole = step.graph if profile == "native" else default(step.graph)
    with clock("emit"), paused():
        emitted = emit(whole, profile=profile)
    verify = writer.verify_model
    with clock("write"):

        def timed(*args: object) -> None:
            with clock("check"):
                verify(*args)  # type: ignore[arg-type]

        writer.verify_model = timed  # type: ignore[assignment]
        writer.write(emitted, out)
    clock.seconds["write"] -= clock.seconds["check"]
    return {
        "seconds": clock.seconds, "peak": _peak() - before, "nodes": len(emitted.model.graph.node),
        "values": len(whole.nodes),
    }  # fmt: skip


def peer(path: Path, out: Path) -> dict[str, object]:
    """The onnx package on the same file: load, check with shape inference, save."""
    before, clock = _peak(), Clock()
    with clock("read"):
        model = onnx.load(path)
    with clock("check"):
        onnx.checker.check_model(model, full_check=True)
    with clock("write"):
        onnx.save(model, out)
    return {"seconds": clock.seconds, "peak": _peak() - before, "nodes": len(model.graph.node), "values": 0}


def apart(*arguments: str) -> dict[str, object]:
    """One run in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.convert", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- the report ------------------------------------------------------------------------------------------------------------------------

LARGE: dict[str, tuple[Callable[[], onnx.ModelProto], dict[str, object]]] = {
    "resnet50": (resnet50, {"loss": "cross_entropy", "optimizer": "adamw"}),
    "gpt2": (gpt2, {"loss": "cross_entropy", "optimizer": "adamw", "class_axis": 2}),
}
GROWING: dict[str, Callable[[int], onnx.ModelProto]] = {"chain": chain, "wide": wide}


def large(name: str, profile: str, directory: Path) -> None:
    make, options = LARGE[name]
    path, out = directory / f"{name}.onnx", directory / f"{name}.train.onnx"
    if not path.exists():
        onnx.save(make(), path)
    gc.collect()
    size = path.stat().st_size
    ours = apart("--convert", str(path), str(out), profile, json.dumps(options))
    theirs = apart("--peer", str(path), str(out))
    seconds: dict[str, float] = ours["seconds"]  # type: ignore[assignment]
    between = sum(seconds[p] for p in ("lower", "differentiate", "simplify", "emit"))
    print(f"{name}: file {size / 1e6:.0f} MB, {ours['values']} values, {ours['nodes']} nodes written ({profile})")
    print("  " + "  ".join(f"{p} {seconds[p]:.2f} s" for p in PHASES))
    print(f"  conversion (lower, differentiate, simplify, emit) {between:.2f} s, check {seconds['check']:.2f} s")
    total, other = sum(seconds.values()), sum(theirs["seconds"].values())  # type: ignore[attr-defined]
    print(f"  peak memory {float(ours['peak']) / size:.2f} x file; onnx alone {float(theirs['peak']) / size:.2f} x")  # type: ignore[arg-type]
    print(f"  all of it {total:.2f} s; onnx alone (load, check, save) {other:.2f} s: {total / other:.2f} x")


def growing(name: str, profile: str, directory: Path) -> None:
    first: dict[str, float] = {}
    print(f"{name}: microseconds a node, and the ratio to {SIZES[0]:,} nodes")
    for size in SIZES:
        path, out = directory / f"{name}{size}.onnx", directory / "out.onnx"
        onnx.save(GROWING[name](size), path)
        options = {"loss": "mse_loss", "optimizer": "sgd"}
        ours = apart("--convert", str(path), str(out), profile, json.dumps(options))
        seconds: dict[str, float] = ours["seconds"]  # type: ignore[assignment]
        theirs: dict[str, float] = apart("--peer", str(path), str(out))["seconds"]  # type: ignore[assignment]
        seconds["all"], each = sum(seconds.values()), 1e6 / size
        first = first or seconds
        shown = (f"{p} {each * s:.0f} ({s / size / (first[p] / SIZES[0]):.2f})" for p, s in seconds.items())
        print(f"  {size:6,}: " + "  ".join(shown) + f"  onnx alone {each * sum(theirs.values()):.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join([*LARGE, *GROWING]))
    parser.add_argument("--profile", default="explicit")
    parser.add_argument("--dir", type=Path, help="where models are kept between runs")
    parser.add_argument("--convert", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.convert:
        path, out, profile, options = given.convert
        print(json.dumps(convert(Path(path), Path(out), profile, json.loads(options))))
        return
    if given.peer:
        print(json.dumps(peer(*map(Path, given.peer))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = given.dir or Path(temporary)
        os.makedirs(directory, exist_ok=True)
        for name in given.only.split(","):
            (large if name in LARGE else growing)(name, given.profile, directory)


if __name__ == "__main__":
    main()
