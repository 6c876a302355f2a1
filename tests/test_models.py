"""Whole models exported from PyTorch: gradients and trajectories are PyTorch's, parameter by parameter."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pullback
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")

from tests.networks import NETWORKS, batch, build, counterparts, export, torch_loss  # noqa: E402

EXPORTS = [("ts", 11), ("ts", 13), ("ts", 17), ("ts", 20), ("dynamo", 18), ("dynamo", 20)]


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(running: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [o.name for o in running.get_outputs()]
    return dict(zip(names, running.run(None, feeds), strict=True))


def step_of(name: str, model: onnx.ModelProto | pullback.Model, **options: object) -> pullback.Step:
    return pullback.training_step(model, loss="cross_entropy", class_axis=NETWORKS[name].class_axis, **options)


def weights_of(step: pullback.Step) -> dict[str, np.ndarray]:
    return {n: step.graph.data[n].array for n in step.signature.parameters}


def as_torch(net: torch.nn.Module, key: str, transposed: bool, array: np.ndarray) -> np.ndarray:
    """An array of an ONNX weight's shape in the shape of its PyTorch counterpart."""
    return (array.T if transposed else array).reshape(dict(net.named_parameters())[key].shape)


def compare_gradients(
    name: str, net: torch.nn.Module, step: pullback.Step, got: dict[str, np.ndarray], tolerance: float
) -> None:
    """Every PyTorch parameter's gradient is the sum of those of its counterparts (an exporter may write a tied weight twice)."""
    sums: dict[str, np.ndarray] = {}
    pairs = counterparts(net, weights_of(step))
    for weight, (key, transposed) in pairs.items():
        grad = got[step.signature.gradients[weight]]
        sums[key] = sums.get(key, 0) + as_torch(net, key, transposed, grad)
    wanted = {k: p.grad.numpy() for k, p in net.named_parameters()}
    assert set(sums) == set(wanted)
    scale = max(np.abs(g).max() for g in wanted.values())
    for key, grad in wanted.items():
        error = np.abs(sums[key] - grad).max() / max(np.abs(grad).max(), 1e-3 * scale)
        assert error < tolerance, f"{name}: gradient of {key} is off by {error:.2e}"


@pytest.mark.parametrize(("exporter", "opset"), EXPORTS)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_pytorch(name: str, exporter: str, opset: int) -> None:
    norms = name == "resnet"
    net = build(name).eval()
    step = step_of(name, export(name, net, exporter, opset, keep_norms=norms), batch_norm="frozen")
    running = session(step.to_onnx())
    for n, length in ((1, 3), (3, 6)):
        x, target = batch(name, n, length, seed=n)
        net.zero_grad()
        loss = torch_loss(name, net, x, target)
        loss.backward()
        got = run(running, {"x": x, "target": target})
        assert np.allclose(got["loss"], loss.item(), rtol=1e-5)
        compare_gradients(name, net, step, got, 1e-4)


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_in_double_are_those_of_pytorch(name: str) -> None:
    net = build(name, double=True).eval()
    step = step_of(name, export(name, net, "ts", 17, keep_norms=name == "resnet", double=True), batch_norm="frozen")
    x, target = batch(name, 3, seed=1, double=True)
    torch_loss(name, net, x, target).backward()
    got = run(session(step.to_onnx()), {"x": x, "target": target})
    compare_gradients(name, net, step, got, 1e-9)


@pytest.mark.parametrize("profile", ["explicit", "native"])
@pytest.mark.parametrize("name", NETWORKS)
def test_twenty_steps_of_adamw_follow_pytorch(name: str, profile: str) -> None:
    # eps is not the tiny default: some gradients are zero but for rounding (the bias of attention's keys), and Adam would divide that by itself
    norms = name == "resnet"
    net = build(name).train(norms)
    # TorchScript gives GroupNorm a scale and a shift of its own, which PyTorch does not train
    model = export(name, build(name).eval(), "ts", 17, keep_norms=norms)
    graph = pullback.load(model)
    own = counterparts(net, {v.name: graph.data[v.name].array for v in graph.parameters})
    step = step_of(
        name, graph, train=list(own), optimizer="adamw", lr=1e-2, optimizer_options={"weight_decay": 0.05, "eps": 1e-4}
    )
    running = session(step.to_onnx(profile=profile))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.05, eps=1e-4)
    carried: dict[str, np.ndarray] = {}
    for i in range(20):
        x, target = batch(name, 4, seed=i)
        optimizer.zero_grad()
        loss = torch_loss(name, net, x, target)
        loss.backward()
        optimizer.step()
        got = run(running, {"x": x, "target": target, **carried})
        carried = {e.replaces: got[e.name] for e in step.signature.outputs if e.replaces}
        assert np.allclose(got["loss"], loss.item(), rtol=1e-4), (
            f"step {i}: {got['loss']} where PyTorch has {loss.item()}"
        )
    for weight, (key, transposed) in counterparts(build(name), weights_of(step)).items():
        new = as_torch(net, key, transposed, carried[weight])
        wanted = dict(net.named_parameters())[key].detach().numpy()
        assert np.allclose(new, wanted, atol=2e-3), f"{name}: {key}"


@pytest.mark.parametrize("name", ["mlp", "lenet", "gpt2"])
def test_hessian_vector_products_are_those_of_pytorch(name: str) -> None:
    net = build(name, double=True).eval()
    step = step_of(name, export(name, net, "ts", 17, double=True))
    x, target = batch(name, 2, seed=1, double=True)
    first = pullback.gradient(pullback.load(step.gradients.to_onnx()), of=["loss"])
    pairs = counterparts(net, {v.name: first.data[v.name].array for v in first.parameters})
    wrt = [v.name for v in first.parameters]
    second = pullback.gradient(pullback.load(first.to_onnx()), of=[first.signature.gradients[w] for w in wrt], wrt=wrt)
    rng = np.random.default_rng(0)
    own = dict(net.named_parameters())
    vectors = {key: torch.from_numpy(rng.standard_normal(own[key].shape)) for key in own}
    grads = torch.autograd.grad(torch_loss(name, net, x, target), list(own.values()), create_graph=True)
    product = sum((g * vectors[k]).sum() for k, g in zip(own, grads, strict=True))
    wanted = dict(zip(own, torch.autograd.grad(product, list(own.values())), strict=True))
    feeds = {"x": x, "target": target}
    for entry in second.signature.inputs_of("seed"):
        weight = next(w for w in wrt if entry.name == f"seed_{first.signature.gradients[w]}")
        key, transposed = pairs[weight]
        feeds[entry.name] = vectors[key].numpy().T if transposed else vectors[key].numpy()
    got = run(session(second.to_onnx()), feeds)
    sums: dict[str, np.ndarray] = {}
    for weight in wrt:
        key, transposed = pairs[weight]
        grad = got[second.signature.gradients[weight]]
        sums[key] = sums.get(key, 0) + as_torch(net, key, transposed, grad)
    for key, grad in wanted.items():
        assert np.allclose(sums[key], grad.numpy(), rtol=1e-7, atol=1e-9), key
