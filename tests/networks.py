"""Small networks in PyTorch, and their ONNX exports: what the tests of whole models train.

Weights look trained: no two tensors are equal, as exporters merge equal ones. Batch and, for sequence models, sequence length are symbolic.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402


class Block(nn.Module):
    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.c1, self.n1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.c2, self.n2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        self.down = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.n2(self.c2(F.relu(self.n1(self.c1(x))))) + self.down(x))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5),
    )  # fmt: skip


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), Block(4, 4, 1), Block(4, 8, 2), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU6(), nn.Conv2d(6, 6, 3, 1, 1, groups=6, bias=False), nn.GroupNorm(2, 6), nn.Hardswish(),
        nn.Conv2d(6, 12, 3, 2, 1, groups=3), nn.SiLU(), nn.Conv2d(12, 8, 1), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads, self.causal = nn.Linear(d, 3 * d), nn.Linear(d, d), heads, causal

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (z.reshape(b, t, self.heads, d // self.heads).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        a = q @ k.transpose(-1, -2) / math.sqrt(d // self.heads)
        if self.causal:
            place = torch.arange(t, device=x.device)
            a = a.masked_fill(place[:, None] < place, -1e9)
        return self.proj((a.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, d: int, heads: int, causal: bool, tanh: bool) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = Attention(d, heads, causal)
        self.fc, self.out, self.tanh = nn.Linear(d, 4 * d), nn.Linear(4 * d, d), tanh

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x))
        return x + self.out(F.gelu(self.fc(self.n2(x)), approximate="tanh" if self.tanh else "none"))


class Bert(nn.Module):
    """Encoder with token, position and segment embeddings; classes from the first token."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.tok, self.pos, self.seg = nn.Embedding(20, d), nn.Embedding(12, d), nn.Embedding(2, d)
        self.norm = nn.LayerNorm(d)
        self.layers = nn.ModuleList(Layer(d, 2, False, False) for _ in range(2))
        self.pool, self.head = nn.Linear(d, d), nn.Linear(d, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device)) + self.seg(torch.zeros_like(ids))
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.tanh(self.pool(x[:, 0])))


class Gpt2(nn.Module):
    """Decoder with tied embeddings; logits for each position."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(20, d), nn.Embedding(12, d)
        self.layers = nn.ModuleList(Layer(d, 2, True, True) for _ in range(2))
        self.norm = nn.LayerNorm(d)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.wte.weight.t()


class Vit(nn.Module):
    """Encoder over patches with a class token."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, d, 4, 4)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, d) * 0.1), nn.Parameter(torch.randn(1, 5, d) * 0.1)
        self.layers = nn.ModuleList(Layer(d, 2, False, False) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.cls.expand(h.shape[0], -1, -1), h], 1) + self.pos
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h)[:, 0])


@dataclass(frozen=True)
class Network:
    """A network, the shape of its input (None: symbolic), and where its classes are."""

    build: Callable[[], nn.Module]
    shape: tuple[int | None, ...]
    axes: tuple[str, ...] = ("batch",)
    tokens: int | None = None
    class_axis: int = 1
    train_mode: bool = False


NETWORKS = {
    "mlp": Network(mlp, (None, 12)),
    "lenet": Network(lenet, (None, 1, 16, 16)),
    "resnet": Network(resnet, (None, 3, 8, 8)),
    "depthwise": Network(depthwise, (None, 3, 8, 8)),
    "bert": Network(Bert, (None, None), ("batch", "sequence"), tokens=20),
    "gpt2": Network(Gpt2, (None, None), ("batch", "sequence"), tokens=20, class_axis=2),
    "vit": Network(Vit, (None, 3, 8, 8)),
}


def build(name: str, double: bool = False) -> nn.Module:
    """The network with seeded weights, no two tensors equal."""
    torch.manual_seed(0)
    net = NETWORKS[name].build()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for key, buffer in net.named_buffers():
            if key.endswith("running_mean"):
                buffer.add_(0.1 * torch.randn_like(buffer))
            elif key.endswith("running_var"):
                buffer.mul_(0.8 + 0.4 * torch.rand_like(buffer))
    return net.double() if double else net


def batch(name: str, n: int, length: int = 6, seed: int = 0, double: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """An input and labels for it."""
    network, rng = NETWORKS[name], np.random.default_rng(seed)
    sizes = {0: n, 1: length}
    shape = tuple(sizes[i] if d is None else d for i, d in enumerate(network.shape))
    if network.tokens:
        x = rng.integers(0, network.tokens, shape)
    else:
        x = rng.standard_normal(shape).astype(np.float64 if double else np.float32)
    return x, rng.integers(0, 5, (n, length) if network.class_axis == 2 else (n,))


def export(
    name: str, net: nn.Module, exporter: str, opset: int, *, keep_norms: bool = False, double: bool = False
) -> onnx.ModelProto:
    """The ONNX export, with `x` in and `logits` out."""
    network = NETWORKS[name]
    x = torch.from_numpy(batch(name, 2, double=double)[0])
    options: dict[str, Any] = {"input_names": ["x"], "output_names": ["logits"], "opset_version": opset}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "dynamo":
            dims = {i: torch.export.Dim(a) for i, a in enumerate(network.axes)}
            options["dynamic_shapes"] = (dims,)
            program = torch.onnx.export(net, (x,), dynamo=True, verbose=False, optimize=not keep_norms, **options)
            return program.model_proto
        file = io.BytesIO()
        axes = dict(enumerate(network.axes))
        options["dynamic_axes"] = {
            "x": axes,
            "logits": {0: "batch"} | ({1: "sequence"} if network.class_axis == 2 else {}),
        }
        if keep_norms:
            options |= {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False}
        torch.onnx.export(net, (x,), file, dynamo=False, **options)
        return onnx.load_from_string(file.getvalue())


def torch_loss(name: str, net: nn.Module, x: np.ndarray, target: np.ndarray) -> Tensor:
    """Mean cross-entropy."""
    logits = net(torch.from_numpy(x))
    if NETWORKS[name].class_axis == 2:
        logits = logits.transpose(1, 2)
    return F.cross_entropy(logits, torch.from_numpy(target))


def counterparts(net: nn.Module, weights: dict[str, np.ndarray]) -> dict[str, tuple[str, bool]]:
    """For each ONNX weight its PyTorch name and whether it is transposed: by name, else by value (exporters rename, transpose, reshape)."""
    own = {k: v.detach().numpy() for k, v in net.named_parameters()}
    found: dict[str, tuple[str, bool]] = {}
    for name, array in weights.items():
        if name in own and own[name].shape == array.shape and np.array_equal(own[name], array):
            found[name] = (name, False)
            continue
        for key, value in own.items():
            if value.size == array.size and np.array_equal(value.ravel(), array.ravel()):
                found[name] = (key, False)
            elif value.ndim == 2 and value.T.shape == array.shape and np.array_equal(value.T, array):
                found[name] = (key, True)
    return found
