"""Time of one training step: native and explicit on onnxruntime against PyTorch eager, interleaved in one run.

    python -m benchmarks.step [--rounds 15] [--steps 10] [--threads 2] [--only mlp,lenet,resnet]

A step is forward pass, cross-entropy, backward pass and SGD update. All three run the same float32 model on the same batch with the same number of
threads; on onnxruntime, parameters stay in bound buffers between steps. Each round takes `steps` steps of every candidate in turn; a candidate's time is
the median over rounds, its ratio the median of the ratios to PyTorch within a round; beside it the ratio of the fastest rounds, which other work on the
machine disturbs least. A ratio below 1 is faster than PyTorch. The losses after all steps are shown, so that a fast wrong step is seen.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
import pullback
import torch
from torch import nn
from torch.nn import functional

LR = 0.01


# ---- models ----------------------------------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, as an inference export leaves them: normalisation folded into the weights."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1)
        plain = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if plain else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.second(functional.relu(self.first(x))) + self.shortcut(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1), nn.ReLU(), Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (128, 784)),
    "lenet": (lenet, (64, 1, 28, 28)),
    "resnet": (resnet, (32, 3, 32, 32)),
}


# ---- candidates ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something that takes one step a call and returns the loss."""

    name: str
    step: Callable[[], float]


def on_pytorch(net: nn.Module, x: np.ndarray, labels: np.ndarray) -> Candidate:
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    inputs, target = torch.from_numpy(x), torch.from_numpy(labels)

    def step() -> float:
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(inputs), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Candidate("pytorch", step)


def on_onnxruntime(model: onnx.ModelProto, profile: str, x: np.ndarray, labels: np.ndarray, threads: int) -> Candidate:
    """The training step of a model, its state in two sets of buffers that take turns as input and output."""
    written = pullback.training_step(pullback.load(model), loss="cross_entropy", optimizer="sgd", lr=LR)
    proto = written.to_onnx(profile=profile)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = {i.name: onnx.numpy_helper.to_array(i) for i in proto.graph.initializer}
    state = {n: values[n] for n in written.signature.parameters}
    fixed = {"target": labels, next(i.name for i in proto.graph.input if i.name not in values): x}
    if "step" in {i.name for i in proto.graph.input}:
        fixed["step"] = np.asarray(0, np.int64)
    ort = onnxruntime.OrtValue.ortvalue_from_numpy
    buffers = [{n: ort(v.copy()) for n, v in state.items()} for _ in range(2)]
    loss = ort(np.zeros((), np.float32))
    held = {n: ort(v) for n, v in fixed.items()}
    bindings = []
    for now, after in (buffers, buffers[::-1]):
        binding = session.io_binding()
        for n, v in {**held, **now}.items():
            binding.bind_ortvalue_input(n, v)
        binding.bind_ortvalue_output("loss", loss)
        for n, v in after.items():
            binding.bind_ortvalue_output(f"new_{n}", v)
        bindings.append(binding)
    turns = _turns()

    def step() -> float:
        session.run_with_iobinding(bindings[next(turns)])
        return float(loss.numpy())

    return Candidate(profile, step)


def _turns() -> Iterator[int]:
    while True:
        yield from (0, 1)


def exported(net: nn.Module, x: np.ndarray) -> onnx.ModelProto:
    """The inference model, batch symbolic."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net.eval(), (torch.from_numpy(x),), buffer, input_names=["x"], output_names=["logits"], dynamo=False,
            opset_version=17, dynamic_axes={"x": {0: "batch"}, "logits": {0: "batch"}},
        )  # fmt: skip
    return onnx.load_from_string(buffer.getvalue())


# ---- the run ---------------------------------------------------------------------------------------------------------------------------


def measure(name: str, rounds: int, steps: int, threads: int) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    net = make()
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape, np.float32)
    labels = rng.integers(0, 10, shape[:1])
    model = exported(net, x)
    candidates = [on_onnxruntime(model, profile, x, labels, threads) for profile in ("native", "explicit")]
    candidates.append(on_pytorch(net.train(), x, labels))
    times: dict[str, list[float]] = {c.name: [] for c in candidates}
    losses = {c.name: [c.step() for _ in range(3)][-1] for c in candidates}
    for _ in range(rounds):
        for c in candidates:
            start = time.perf_counter()
            for _ in range(steps):
                losses[c.name] = c.step()
            times[c.name].append((time.perf_counter() - start) / steps)
    print(f"{name}, batch {shape[0]}")
    for c in candidates:
        ratio = statistics.median(a / b for a, b in zip(times[c.name], times["pytorch"], strict=True))
        median = statistics.median(times[c.name])
        best = min(times[c.name]) / min(times["pytorch"])
        print(
            f"  {c.name:10s} {1e3 * median:8.3f} ms   {ratio:5.2f} x PyTorch   fastest {best:5.2f} x   loss {losses[c.name]:.6f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default=",".join(MODELS))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for name in given.only.split(","):
        measure(name, given.rounds, given.steps, given.threads)


if __name__ == "__main__":
    main()
