"""Networks of many kinds, exported by PyTorch with symbolic sizes: what is trained, loss, every gradient and five steps as PyTorch has them."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pullback
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")

import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

Feeds = tuple[np.ndarray, ...]
B, BL = {0: "batch"}, {0: "batch", 1: "length"}


class UNet(nn.Module):
    """Three levels, skip connections, bilinear and transposed upsampling; height and width are symbolic."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 6, 3, 2, 1)
        self.up = nn.ConvTranspose2d(6, 6, 2, 2)
        self.d, self.e = nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(8, 3, 1)
        self.group = nn.GroupNorm(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        b = F.silu(self.group(self.b(F.max_pool2d(a, 2))))
        d = F.relu(self.d(torch.cat([self.up(F.relu(self.c(b))), b], 1)))
        return self.e(torch.cat([F.interpolate(d, scale_factor=2, mode="bilinear", align_corners=False), a], 1))


class RMSNorm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Llama(nn.Module):
    """Grouped queries, rotary positions, a causal mask of symbolic length, gated units, tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.n1, self.n2 = nn.Embedding(20, 8), RMSNorm(8), RMSNorm(8)
        self.q, self.k, self.v = (nn.Linear(8, d, bias=False) for d in (16, 8, 8))
        self.o, self.g, self.u, self.d = (nn.Linear(*d, bias=False) for d in ((16, 8), (8, 12), (8, 12), (12, 8)))

    def turned(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2]).float()[:, None] * torch.tensor([1.0, 0.1])
        angle = torch.cat([angle, angle], -1)
        return x * angle.cos() + torch.cat([-x[..., 2:], x[..., :2]], -1) * angle.sin()

    def forward(self, ids: Tensor) -> Tensor:
        n, length = ids.shape
        h = self.e(ids)
        z = self.n1(h)
        q = self.q(z).view(n, length, 4, 4).transpose(1, 2)
        k, v = (f(z).view(n, length, 2, 4).transpose(1, 2).repeat_interleave(2, 1) for f in (self.k, self.v))
        a = self.turned(q) @ self.turned(k).transpose(-1, -2) / 2 + torch.full((length, length), -torch.inf).triu(1)
        h = h + self.o((a.softmax(-1) @ v).transpose(1, 2).reshape(n, length, 16))
        z = self.n2(h)
        return (h + self.d(F.silu(self.g(z)) * self.u(z))) @ self.e.weight.t()


class Window(nn.Module):
    """Attention in shifted windows, with a stored mask of infinities and a table of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Conv2d(2, 8, 2, 2), nn.Linear(8, 24), nn.Linear(8, 3)
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        part = torch.tensor([0, 0, 1, 2])[:, None] * 3 + torch.tensor([0, 0, 1, 2])
        part = part.view(2, 2, 2, 2).permute(0, 2, 1, 3).reshape(4, 4)
        self.register_buffer("mask", torch.where(part[:, None] == part[:, :, None], 0.0, -torch.inf)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).permute(0, 2, 3, 1)
        y = torch.roll(self.norm(x), (-1, -1), (1, 2))
        y = y.view(-1, 2, 2, 2, 2, 8).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 8)
        q, k, v = self.qkv(y).view(-1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        a = ((q @ k.transpose(-1, -2)).view(-1, 4, 2, 4, 4) + self.mask).view(-1, 2, 4, 4)
        y = (
            (a.softmax(-1) @ v)
            .transpose(1, 2)
            .reshape(-1, 2, 2, 2, 2, 8)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(-1, 4, 4, 8)
        )
        return self.head((x + torch.roll(y, (1, 1), (1, 2))).mean((1, 2)))


class Masked(nn.Module):
    """Fused attention under a boolean mask, and a causal one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])
        return self.o((y + F.scaled_dot_product_attention(q, k, v, is_causal=True)).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Two of four experts for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.w1, self.w2 = nn.Parameter(0.3 * torch.randn(4, 6, 8)), nn.Parameter(0.3 * torch.randn(4, 8, 6))

    def forward(self, x: Tensor) -> Tensor:
        p = self.gate(x).softmax(-1)
        v, i = p.topk(2, -1)
        gates = torch.zeros_like(p).scatter(-1, i, v / v.sum(-1, keepdim=True))
        y = torch.einsum("blef,efd->bled", F.silu(torch.einsum("bld,edf->blef", x, self.w1)), self.w2)
        return torch.einsum("bled,ble->bld", y, gates)


class GraphAttention(nn.Module):
    """A softmax over the edges into each node."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(5, 4, bias=False), nn.Linear(4, 3)
        self.into, self.outof = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        h = self.a(x)
        z = F.leaky_relu((h @ self.outof)[source] + (h @ self.into)[target], 0.2)
        top = torch.full((x.shape[0],), -1e9).scatter_reduce(0, target, z, "amax", include_self=True)
        e = torch.exp(z - top[target])
        share = e / (torch.zeros(x.shape[0]).scatter_add(0, target, e)[target] + 1e-9)
        places = target[:, None].expand(-1, 4)
        return self.h(torch.zeros(x.shape[0], 4).scatter_add(0, places, share[:, None] * h[source]))


class Speech(nn.Module):
    """Strided convolutions over sound of any length, group norms, one matrix in three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv1d(1, 6, 10, 3, bias=False), nn.Conv1d(6, 6, 3, 2)
        self.group, self.l, self.h = nn.GroupNorm(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.c2(F.gelu(self.group(self.c1(x))))).transpose(1, 2)
        for _ in range(3):
            h = h + torch.tanh(self.l(h))
        return self.h(h)


class Capsules(nn.Module):
    """Routing by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Conv2d(1, 8, 5, 3), nn.Parameter(0.3 * torch.randn(18, 3, 4, 4))

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        n = (x**2).sum(-1, keepdim=True)
        return n / (1 + n) * x / torch.sqrt(n + 1e-8)

    def forward(self, x: Tensor) -> Tensor:
        u = self.squash(F.relu(self.a(x)).view(x.shape[0], -1, 4))
        votes, b = torch.einsum("bid,ijdk->bijk", u, self.w), torch.zeros(x.shape[0], 18, 3)
        for _ in range(2):
            v = self.squash((F.softmax(b, 2)[..., None] * votes).sum(1))
            b = b + (votes * v[:, None]).sum(-1)
        return v.norm(dim=-1)


class Translator(nn.Module):
    """A bidirectional LSTM, attention over it, and a GRU cell step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.cell = nn.LSTM(4, 3, 1, batch_first=True, bidirectional=True), nn.GRUCell(8, 6)
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        memory, (h, _) = self.read(x)
        state, outs = torch.cat([h[0], h[1]], 1), []
        for t in range(3):
            weights = torch.softmax((memory * state[:, None]).sum(-1), 1)
            state = self.cell(torch.cat([y[:, t], (weights[..., None] * memory).sum(1)], 1), state)
            outs.append(self.out(state))
        return torch.stack(outs, 1)


class Flow(nn.Module):
    """Coupling layers and the logarithm of their determinant, in double."""

    def __init__(self) -> None:
        super().__init__()
        self.n = nn.ModuleList(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        total: Any = 0.0
        for net in self.n:
            a, b = x.chunk(2, -1)
            s, t = net(a).chunk(2, -1)
            s = torch.tanh(s)
            total, x = total + s.sum(-1), torch.cat([b * s.exp() + t, a], -1)
        return total - 0.5 * (x**2).sum(-1)


class Style(nn.Module):
    """Instance norms with and without weights, reflected borders, a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n = nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True)
        self.b, self.m, self.c = nn.Conv2d(4, 6, 3, 2, 1), nn.InstanceNorm2d(6), nn.ConvTranspose2d(6, 2, 3, 2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.n(self.a(F.pad(x, (1, 1, 1, 1), mode="reflect"))))
        return torch.tanh(self.c(F.relu(self.m(self.b(x)))))


class Sets(nn.Module):
    """The largest over points, and attention that leaves out padding."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.q, self.h = nn.Linear(6, 8), nn.Parameter(torch.randn(8)), nn.Linear(16, 4)

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        keep = torch.arange(x.shape[1])[None] < count[:, None]
        w = (h * self.q).sum(-1).masked_fill(~keep, -torch.inf).softmax(-1)
        top = h.masked_fill(~keep[..., None], -1.0).amax(1)
        return self.h(torch.cat([(w[..., None] * h).sum(1), top], 1))


class Residual(nn.Module):
    """Batch norms of one size, whose scales, biases and statistics are the same ones and zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(2 if i == 0 else 6, 6, 3, padding=1) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(3))
        self.before, self.head = nn.BatchNorm2d(2), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = F.relu(norm(F.relu(conv(x))))
            x = x + y if i else y
        return self.head(x.mean((2, 3)))


class Encoder(nn.Module):
    """Transformer layers as PyTorch makes them: biases of zeros, norms of ones, and a buffer of zeros beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("start", torch.zeros(8))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=i == 1) for i in range(2)
        )
        self.shift, self.group = nn.Parameter(torch.zeros(8)), nn.GroupNorm(2, 8)
        for layer in self.layers:
            nn.init.normal_(layer.self_attn.out_proj.bias)  # of zeros the newer exporter leaves nothing

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.start + self.shift
        for layer in self.layers:
            x = layer(x)
        return self.group(x.transpose(1, 2)).transpose(1, 2)


class Twice(nn.Module):
    """One norm used twice, beside another of the same size: two parameters of ones, three uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.shared, self.other = nn.Linear(6, 6), nn.LayerNorm(6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.shared(self.a(F.relu(self.shared(self.a(x))))) * x)


class Gated(nn.Module):
    """Weights of one number, weights that are copied before use, and a buffer of positions, which is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.h = nn.Linear(4, 4), nn.Linear(4, 3)
        self.temperature, self.gate = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor([0.3]))
        self.l.place, self.token = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(4))
        self.register_buffer("positions", torch.randn(9, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.l.place.clone() + F.dropout(self.token, training=False) + self.positions[: x.shape[1]]
        y = self.l(x)
        return self.h(torch.where(y > 0, y, self.gate * y)) * self.temperature


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A network, its inputs for `(rng, batch, length)`, their symbolic axes, the exporter, and the loss."""

    build: Callable[[], nn.Module]
    feeds: Callable[[np.random.Generator, int, int], Feeds]
    axes: tuple[dict[int, str], ...]
    exporter: str
    opset: int
    loss: str = "mse"
    class_axis: int = 1


CASES = {
    "unet": Case(UNet, lambda g, b, n: (normal(g, b, 2, 4 * n, 8 * n),), ({0: "batch", 2: "height", 3: "width"},), "ts", 14, "cross_entropy"),
    "llama": Case(Llama, lambda g, b, n: (g.integers(0, 20, (b, n)),), (BL,), "dynamo", 18, "cross_entropy", 2),
    "window": Case(Window, lambda g, b, n: (normal(g, b, 2, 8, 8),), (B,), "ts", 17, "cross_entropy"),
    "masked": Case(Masked, lambda g, b, n: (normal(g, b, n, 8), (g.random((b, n)) > 0.5) | (np.arange(n) == 0)), (BL, BL), "ts", 16, "huber"),
    "experts": Case(Experts, lambda g, b, n: (normal(g, b, n, 6),), (BL,), "ts", 13),
    "graph": Case(
        GraphAttention, lambda g, b, n: (normal(g, 3 * b, 5), g.integers(0, 3 * b, (2, 4 * n))), ({0: "nodes"}, {1: "edges"}), "dynamo", 18, "cross_entropy",
    ),
    "speech": Case(Speech, lambda g, b, n: (normal(g, b, 1, 9 * n + 11),), ({0: "batch", 2: "time"},), "ts", 15, "l1"),
    "capsules": Case(Capsules, lambda g, b, n: (normal(g, b, 1, 12, 12),), (B,), "ts", 12, "cross_entropy"),
    "translator": Case(Translator, lambda g, b, n: (normal(g, b, n, 4), normal(g, b, 3, 2)), (BL, B), "ts", 18),
    "flow": Case(Flow, lambda g, b, n: (normal(g, b, 6).astype(np.float64),), (B,), "dynamo", 20),
    "style": Case(Style, lambda g, b, n: (normal(g, b, 2, 2 * n, 8),), ({0: "batch", 2: "height"},), "ts", 19, "smooth_l1"),
    "sets": Case(Sets, lambda g, b, n: (normal(g, b, n, 6), g.integers(1, n + 1, b)), (BL, B), "dynamo", 21, "cross_entropy"),
    "gated": Case(Gated, lambda g, b, n: (normal(g, b, n, 4),), (BL,), "dynamo", 18, "cross_entropy", 2),
}  # fmt: skip
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss, "huber": F.huber_loss, "l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss, "cross_entropy": F.cross_entropy,
}  # fmt: skip


def network(case: Case, fresh: bool = False) -> nn.Module:
    torch.manual_seed(0)
    net = case.build().eval()
    with torch.no_grad():
        for parameter in () if fresh else net.parameters():  # no two equal, none at its neutral value
            parameter.add_(0.05 * torch.randn_like(parameter))
    return net.double() if case.build is Flow else net


def exported(case: Case, net: nn.Module) -> onnx.ModelProto:
    xs = tuple(map(torch.from_numpy, case.feeds(np.random.default_rng(0), 2, 5)))
    names = [f"x{i}" for i in range(len(xs))]
    options: dict[str, Any] = {"input_names": names, "output_names": ["y"], "opset_version": case.opset}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if case.exporter != "ts":
            dims = tuple(
                {i: torch.export.Dim(a, min=1 if i == 0 else 2) for i, a in axes.items()} for axes in case.axes
            )
            program = torch.onnx.export(
                net, xs, dynamo=True, verbose=False, optimize=case.exporter == "dynamo", dynamic_shapes=dims, **options
            )
            return program.model_proto
        file = io.BytesIO()
        torch.onnx.export(net, xs, file, dynamo=False, dynamic_axes=dict(zip(names, case.axes, strict=True)), **options)
        return onnx.load_from_string(file.getvalue())


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    onnx.checker.check_model(model, full_check=True)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def places(net: nn.Module, name: str, stored: np.ndarray) -> list[tuple[str, int]]:
    """For each number of a stored tensor the parameter and the place that it came from: exporters transpose, merge and permute."""
    parameters = dict(net.named_parameters())
    if name in parameters:
        return [(name, i) for i in range(stored.size)]
    if len(np.unique(stored)) == 1:  # of a norm that the exporter gave no name: here there is one of this size
        (name,) = (
            k for k, p in parameters.items() if "group" in k and np.array_equal(p.detach().ravel(), stored.ravel())
        )
        return [(name, i) for i in range(stored.size)]
    found = {v: (k, i) for k, p in parameters.items() for i, v in enumerate(p.detach().numpy().ravel().tolist())}
    return [found[v] for v in stored.ravel().tolist()]


def torch_loss(case: Case, y: Tensor, target: np.ndarray) -> Tensor:
    return LOSSES[case.loss](y.movedim(case.class_axis, 1) if y.ndim > 1 else y, torch.from_numpy(target))


def wanted(case: Case, rng: np.random.Generator, y: Tensor) -> np.ndarray:
    shape = list(y.shape)
    if case.loss == "cross_entropy":
        return rng.integers(0, shape.pop(case.class_axis), shape)
    return rng.standard_normal(shape).astype(y.detach().numpy().dtype)


@pytest.mark.parametrize("name", CASES)
def test_network_trains_as_in_pytorch(name: str) -> None:
    trains_as_in_pytorch(CASES[name], network(CASES[name]))


FRESH = {
    f"{name}-{exporter}": Case(build, feeds, axes, exporter, 18, loss)
    for name, build, feeds, axes, loss in (
        ("residual", Residual, lambda g, b, n: (normal(g, b, 2, 8, 8),), (B,), "cross_entropy"),
        ("encoder", Encoder, lambda g, b, n: (normal(g, b, 5, 8),), (B,), "mse"),
        ("twice", Twice, lambda g, b, n: (normal(g, b, 6),), (B,), "mse"),
    )
    for exporter in ("ts", "dynamo", "raw")
}


@pytest.mark.parametrize("name", FRESH)
def test_network_fresh_from_its_constructor_trains_as_in_pytorch(name: str) -> None:
    """Exporters merge parameters that are equal, as all scales of ones and biases of zeros are; each is trained for itself all the same."""
    trains_as_in_pytorch(FRESH[name], network(FRESH[name], fresh=True))


@pytest.mark.parametrize("name", CASES)
def test_network_exported_without_optimisation_keeps_the_name_of_every_parameter(name: str) -> None:
    case = replace(CASES[name], exporter="raw")
    net = network(case, fresh=True)
    assert trains_as_in_pytorch(case, net) == {k for k, _ in net.named_parameters()}


def trains_as_in_pytorch(case: Case, net: nn.Module) -> set[str]:
    """Loss, gradients and five steps; the names of what is trained."""
    limit = 1e-9 if case.build is Flow else 1e-4
    graph = pullback.load(exported(case, net))
    options = {"class_axis": case.class_axis} if case.loss == "cross_entropy" else {}
    buffers = {n for n, _ in net.named_buffers()} & {v.params["name"] for v in graph.by_role("parameter")}
    step = pullback.training_step(graph, loss=case.loss, optimizer="sgd", lr=0.01, freeze=sorted(buffers), **options)
    net.train(any(isinstance(m, nn.BatchNorm2d) for m in net.modules()))
    origin = {n: places(net, n, step.graph.data[n].array) for n in step.signature.parameters}
    assert {k for found in origin.values() for k, _ in found} == {k for k, _ in net.named_parameters()}
    sessions = [session(step.to_onnx(profile=profile)) for profile in ("explicit", "native")]
    (target,) = step.signature.inputs_of("target")

    def batch(n: int, length: int) -> tuple[dict[str, np.ndarray], Tensor]:
        rng = np.random.default_rng(n)
        xs = case.feeds(rng, n, length)
        y = net(*map(torch.from_numpy, xs))
        t = wanted(case, rng, y)
        return {**{f"x{i}": x for i, x in enumerate(xs)}, target.name: t}, torch_loss(case, y, t)

    for n, length in ((2, 5), (3, 8)):
        feeds, loss = batch(n, length)
        net.zero_grad()
        loss.backward()
        slopes = {k: p.grad.numpy().ravel() for k, p in net.named_parameters() if p.grad is not None}
        largest = max(float(np.abs(s).max()) for s in slopes.values())
        for runner in sessions:
            value, *got = runner.run(["loss", *(step.signature.gradients[k] for k in origin)], feeds)
            assert abs(float(value) - loss.item()) <= limit * abs(loss.item())
            total = {k: np.zeros_like(s) for k, s in slopes.items()}
            for found, gradient in zip(origin.values(), got, strict=True):
                for (k, i), g in zip(found, gradient.ravel().tolist(), strict=True):
                    total[k][i] += g
            for k, s in slopes.items():
                assert np.abs(total[k] - s).max() <= limit * largest, k

    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    state: dict[str, np.ndarray] = {}
    new = {e.name: e.replaces for e in step.signature.outputs if e.replaces}
    for i in range(5):
        feeds, loss = batch(2 + i % 2, 5 + i)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value, *values = sessions[0].run(["loss", *new], {**feeds, **state})
        state = {str(new[k]): v for k, v in zip(new, values, strict=True)}
        assert abs(float(value) - loss.item()) <= 10 * limit * abs(loss.item())
    return set(origin)
