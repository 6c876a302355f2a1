"""The training step: names, roles, order, losses, selection, training mode, and trajectories against PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from pullback.algebra import composites as c
from pullback.algebra import primitives as p
from pullback.algebra.dims import dim
from pullback.algebra.errors import Refusal
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Constant, Graph, Value, building
from pullback.algebra.training.modes import BatchNorm, Dropout, passing
from pullback.algebra.training.step import TrainingStep, training_step
from pullback.algebra.types import DType, f16, f32, f64, i64, tensor

N = dim("N")
Arrays = dict[str, np.ndarray]


def weights(dtype: DType, seed: int = 0, **shapes: tuple[int, ...]) -> dict[str, Constant]:
    rng = np.random.default_rng(seed)
    return {k.replace("__", "."): Constant(rng.standard_normal(s).astype(dtype.numpy)) for k, s in shapes.items()}


def dense(x: Value, w: Value) -> Value:
    return p.dot(x, w, contract=((x.rank - 1,), (0,)))


def mlp(dtype: DType = f32, end: Callable[[Value], Value] = lambda y: y, names: tuple[str, str] = ("x", "y")) -> Graph:
    """`y = end(relu(x W1 + b) W2)`, 5 to 8 to 3."""
    with building():
        x = p.input(names[0], tensor(dtype, (N, 5)))
        w1 = p.input("fc1.weight", tensor(dtype, (5, 8)), "parameter")
        b1 = p.input("fc1.bias", tensor(dtype, (8,)), "parameter")
        w2 = p.input("fc2.weight", tensor(dtype, (8, 3)), "parameter")
        h = c.relu(p.add(dense(x, w1), c.at_last(b1, (N, 8))))
        logits = dense(h, w2)
        y = end(logits)
    data = weights(dtype, fc1__weight=(5, 8), fc1__bias=(8,), fc2__weight=(8, 3))
    return Graph((x, w1, b1, w2), {names[1]: y}, "mlp", {"h": h, "logits": logits, names[1]: y}, data=data)


def batches(count: int, dtype: DType = f32, seed: int = 1) -> list[Arrays]:
    rng = np.random.default_rng(seed)
    return [
        {"x": rng.standard_normal((7, 5)).astype(dtype.numpy), "target": rng.integers(0, 3, 7)} for _ in range(count)
    ]


def run(step: TrainingStep, data: list[Arrays], **numbers: Any) -> tuple[list[float], Arrays]:
    """Losses of steps, and what is carried at the end."""
    carried = step.signature.carried
    feeds: dict[str, Any] = dict(numbers)
    losses = []
    for batch in data:
        out = evaluate(step.graph, {**feeds, **batch})
        losses.append(float(out["loss"]))
        feeds |= {carried[k]: v for k, v in out.items() if k in carried}
    return losses, feeds


# ---- names, roles, order ---------------------------------------------------------------------------------------


def test_inputs_and_outputs_have_the_fixed_names_in_the_fixed_order() -> None:
    s = training_step(mlp(), optimizer="adamw").signature
    assert [e.name for e in s.inputs] == [
        "x", "target", "fc1.weight", "fc1.bias", "fc2.weight",
        "exp_avg_fc1.weight", "exp_avg_sq_fc1.weight", "exp_avg_fc1.bias", "exp_avg_sq_fc1.bias", "exp_avg_fc2.weight", "exp_avg_sq_fc2.weight",
        "step", "lr", "eps", "weight_decay",
    ]  # fmt: skip
    assert [e.name for e in s.outputs] == [
        "loss", "y", "grad_fc1.weight", "grad_fc1.bias", "grad_fc2.weight", "new_fc1.weight", "new_fc1.bias", "new_fc2.weight",
        "new_exp_avg_fc1.weight", "new_exp_avg_sq_fc1.weight", "new_exp_avg_fc1.bias", "new_exp_avg_sq_fc1.bias", "new_exp_avg_fc2.weight",
        "new_exp_avg_sq_fc2.weight", "new_step",
    ]  # fmt: skip
    assert s.gradients["fc1.bias"] == "grad_fc1.bias"
    assert s.updates["fc1.bias"] == "new_fc1.bias"
    assert [e.role for e in s.inputs[-4:]] == ["step", "hyperparameter", "hyperparameter", "hyperparameter"]
    assert s.carried["new_step"] == "step"


def test_a_taken_name_gets_a_suffix_and_the_signature_says_so() -> None:
    step = training_step(mlp(names=("lr", "loss")), optimizer="sgd")
    assert step.signature.renamed == {"lr": "lr_1", "loss": "loss_1"}
    assert [e.name for e in step.signature.by_role("loss", "hyperparameter")] == ["lr_1", "loss_1"]
    assert [e.name for e in step.signature.outputs_of("output")] == ["loss"]


def test_every_node_says_its_phase_and_source() -> None:
    step = training_step(mlp(), optimizer="adamw")
    phases = {n.phase for n in step.nodes()}
    assert phases == {"forward", "loss", "backward", "optimizer"}
    sources = {n.origin.source.name for n in step.nodes() if n.phase == "optimizer" and n.origin.source}
    assert sources == {"adamw"}
    assert {n.origin.source.name for n in step.nodes() if n.phase == "loss" and n.origin.source} == {"cross_entropy"}


def test_a_tied_weight_has_one_gradient() -> None:
    with building():
        ids = p.input("ids", tensor(i64, (2,)))
        w = p.input("W", tensor(f32, (5, 3)), "parameter")
        y = p.reduce_sum(p.dot(p.gather(w, ids, axis=0), w, contract=((1,), (1,))), axes=(0, 1))
    data = {"W": Constant((np.arange(15).reshape(5, 3) / 10).astype(np.float32))}
    step = training_step(Graph((ids, w), {"y": y}, data=data), loss=None, output="y")
    out = evaluate(step.graph, {"ids": np.array([0, 2])})
    expected = np.tile(np.float32([0.6, 0.8, 1.0]), (5, 1))
    expected[[0, 2]] = [3.6, 4.3, 5.0]
    np.testing.assert_allclose(out["grad_W"], expected, rtol=1e-6)
    assert step.signature.parameters == ("W",)


def test_gradients_and_apply_together_are_the_step() -> None:
    step = training_step(mlp(f64), optimizer="adam", lr=0.01)
    (batch,) = batches(1, f64)
    whole = evaluate(step.graph, batch)
    half = evaluate(step.gradients, batch)
    assert set(half) == {"loss", "y", "grad_fc1.weight", "grad_fc1.bias", "grad_fc2.weight"}
    update = evaluate(step.apply, {k: v for k, v in half.items() if k.startswith("grad_")})
    assert set(update) | set(half) == set(whole)
    for name, value in (half | update).items():
        np.testing.assert_array_equal(value, whole[name], err_msg=name)


def test_the_step_runs_at_any_batch_size() -> None:
    step = training_step(mlp())
    for n in (1, 3, 17):
        out = evaluate(step.graph, {"x": np.ones((n, 5), np.float32), "target": np.zeros(n, np.int64)})
        assert out["y"].shape == (n, 3)


@pytest.mark.parametrize("dtype", [f16, f64])
def test_a_model_keeps_its_dtype(dtype: DType) -> None:
    step = training_step(mlp(dtype), optimizer="adamw")
    (batch,) = batches(1, dtype)
    out = evaluate(step.graph, batch)
    floats = {k: v.dtype for k, v in out.items() if k != "new_step"}
    assert set(floats.values()) == {dtype.numpy}
    stray = f32 if dtype is f64 else f64
    assert not [n for n in step.nodes() if n.dtype is stray and n.phase != "optimizer"]


# ---- losses ----------------------------------------------------------------------------------------------------


def test_a_model_that_ends_in_softmax_gets_the_loss_on_its_logits() -> None:
    plain, soft = training_step(mlp(f64)), training_step(mlp(f64, lambda y: c.softmax(y, (1,))))
    assert soft.signature.loss["fused"] == "softmax"
    assert "fused" not in plain.signature.loss
    (batch,) = batches(1, f64)
    batch["x"] *= 1e4  # probabilities of exactly 0 and 1
    a, b = evaluate(plain.graph, batch), evaluate(soft.graph, batch)
    assert np.isfinite(b["loss"])
    assert b["loss"] > 100
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-12)
    np.testing.assert_allclose(a["grad_fc2.weight"], b["grad_fc2.weight"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(b["y"].sum(1), 1)


def test_softmax_is_seen_through_reshapes_and_in_parts() -> None:
    def parts(y: Value) -> Value:
        e = p.exp(y)
        total = p.reduce_sum(e, axes=(1,))
        z = p.div(e, p.broadcast(total, shape=y.shape, axes=(0,)))
        return p.reshape(z, shape=(N, 3, 1, 1))

    step = training_step(mlp(f64, parts))
    assert step.signature.loss["fused"] == "softmax"
    assert [(e.name, e.shape) for e in step.signature.inputs_of("target")] == [("target", ("N", 1, 1))]


def test_sigmoid_gets_the_loss_on_its_logits() -> None:
    soft = training_step(mlp(f64, c.sigmoid), loss="binary_cross_entropy")
    plain = training_step(mlp(f64), loss="binary_cross_entropy_with_logits")
    assert soft.signature.loss["fused"] == "sigmoid"
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 5)) * 1e3, "target": np.eye(4, 3)}
    a, b = evaluate(soft.graph, feeds), evaluate(plain.graph, feeds)
    assert np.isfinite(a["loss"])
    np.testing.assert_allclose(a["grad_fc1.weight"], b["grad_fc1.weight"])


def test_fusing_can_be_declined() -> None:
    assert "fused" not in training_step(mlp(f64, lambda y: c.softmax(y, (1,))), fuse=False).signature.loss


def test_the_class_axis_is_that_of_the_softmax() -> None:
    with building():
        x = p.input("x", tensor(f32, (N, 4, 5)))
        w = p.input("w", tensor(f32, (5, 6)), "parameter")
        y = c.softmax(dense(x, w), (2,))
    graph = Graph((x, w), {"y": y}, data=weights(f32, w=(5, 6)))
    step = training_step(graph)
    assert [e.shape for e in step.signature.inputs_of("target")] == [("N", 4)]
    with pytest.raises(Refusal, match="softmax over axis 2, but class_axis is 1"):
        training_step(graph, class_axis=1)


def two_outputs() -> Graph:
    with building():
        x = p.input("x", tensor(f64, (N, 4)))
        w, v = p.input("w", tensor(f64, (4, 3)), "parameter"), p.input("v", tensor(f64, (4,)), "parameter")
        y1 = dense(x, w)
        y2 = p.dot(x, v, contract=((1,), (0,)))
        label = p.argmax(y1, axis=1)
    return Graph((x, w, v), {"y1": y1, "y2": y2, "label": label}, data=weights(f64, w=(4, 3), v=(4,)))


def test_losses_on_several_outputs_are_summed_with_weights() -> None:
    step = training_step(two_outputs(), loss={"y1": ("mse_loss", 0.4), "y2": ("mse", 0.6)})
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.standard_normal((5, 4)),
        "target_y1": rng.standard_normal((5, 3)),
        "target_y2": rng.standard_normal(5),
    }
    out = evaluate(step.graph, feeds)
    d1, d2 = out["y1"] - feeds["target_y1"], out["y2"] - feeds["target_y2"]
    np.testing.assert_allclose(out["loss"], 0.4 * np.mean(d1**2) + 0.6 * np.mean(d2**2))
    np.testing.assert_allclose(out["grad_w"], 0.4 * 2 / 15 * feeds["x"].T @ d1)
    np.testing.assert_allclose(out["grad_v"], 0.6 * 2 / 5 * feeds["x"].T @ d2)
    assert out["loss"].shape == ()
    assert [t["weight"] for t in step.signature.loss["terms"]] == [0.4, 0.6]


def test_an_integer_output_is_refused_as_a_loss_with_the_way_out() -> None:
    with pytest.raises(Refusal, match=r"output 'label' is i64\[N\]; choose another with output=: y1, y2"):
        training_step(two_outputs(), loss="mse_loss", output="label")


def test_a_function_over_values_is_a_loss() -> None:
    def cubes(outputs: Mapping[str, Value], target: Any) -> Value:
        y = outputs["y2"]
        d = c.sub(y, target("wanted", like=y))
        return c.mean(p.mul(p.mul(d, d), p.abs(d)), (0,))

    step = training_step(two_outputs(), loss=cubes)
    assert [e.name for e in step.signature.inputs_of("target")] == ["wanted"]
    feeds = {"x": np.ones((2, 4)), "wanted": np.zeros(2)}
    out = evaluate(step.graph, feeds)
    np.testing.assert_allclose(out["loss"], np.mean(np.abs(out["y2"]) ** 3))
    assert dict(step.selection.left_out) == {"w": "no differentiable path to the loss"}


def test_a_graph_is_a_loss_and_binds_by_name() -> None:
    m = dim("batch")
    with building():
        y = p.input("y2", tensor(f64, (m,)))
        t = p.input("goal", tensor(f64, (m,)))
        k = p.input("k", tensor(f64, (1,)), "parameter")
        d = p.mul(c.sub(y, t), p.broadcast(p.reshape(k, shape=()), shape=(m,), axes=()))
        value = c.mean(p.mul(d, d), (0,))
    loss = Graph((y, t, k), {"value": value}, "custom", data={"k": Constant(np.array([3.0]))})
    step = training_step(two_outputs(), loss=loss)
    assert [(e.name, e.shape) for e in step.signature.inputs_of("target")] == [("goal", ("N",))]
    out = evaluate(step.graph, {"x": np.ones((2, 4)), "goal": np.zeros(2)})
    np.testing.assert_allclose(out["loss"], 9 * np.mean(out["y2"] ** 2))


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    with pytest.raises(Refusal, match="one number"):
        training_step(mlp(), loss=None)
    with pytest.raises(Refusal, match="one number"):
        training_step(mlp(), loss_options={"reduction": "none"})


# ---- what is trained -------------------------------------------------------------------------------------------


def test_patterns_choose_what_is_trained_and_reasons_are_given() -> None:
    step = training_step(mlp(), train=["*.weight"], freeze=["fc2.weight"])
    assert step.selection.trained == ("fc1.weight",)
    assert step.signature.frozen == {"fc1.bias": "not named by train", "fc2.weight": "named by freeze 'fc2.weight'"}
    assert "fc2.weight" not in [e.name for e in step.signature.inputs]


def test_a_pattern_that_matches_nothing_is_refused_with_near_names() -> None:
    with pytest.raises(Refusal) as error:
        training_step(mlp(), train=["fc1.wieght", "nothing*"])
    assert "train 'fc1.wieght' matches nothing; near names: fc1.weight" in str(error.value)
    assert "'nothing*'" in str(error.value)


def test_a_name_with_glob_characters_matches_itself() -> None:
    with building():
        x = p.input("x", tensor(f32, (N, 2)))
        w, v = (p.input(n, tensor(f32, (2,)), "parameter") for n in ("w[0]", "w0"))
        y = p.dot(x, p.add(w, v), contract=((1,), (0,)))
    data = {n: Constant(np.ones(2, np.float32)) for n in ("w[0]", "w0")}
    assert training_step(Graph((x, w, v), {"y": y}, data=data), loss="mse", train=["w[0]"]).selection.trained == (
        "w[0]",
    )


def test_a_parameter_that_does_not_reach_the_loss_is_left_out_with_the_reason() -> None:
    step = training_step(two_outputs(), loss="mse_loss", output="y1")
    assert step.selection.trained == ("w",)
    assert step.signature.frozen == {"v": "no differentiable path to the loss"}


def test_when_nothing_is_left_to_train_the_call_is_refused() -> None:
    with pytest.raises(Refusal, match="nothing to train"):
        training_step(mlp(), freeze=["*"])


# ---- groups and decay ------------------------------------------------------------------------------------------


def test_groups_have_their_own_numbers() -> None:
    groups = [{"params": "fc1.*", "lr": 0.5, "weight_decay": 0.1}, {"params": ["fc2.weight"], "frozen": True}]
    step = training_step(mlp(f64), optimizer="sgd", lr=0.1, groups=groups)
    assert [e.name for e in step.signature.inputs_of("hyperparameter")] == ["lr_1", "weight_decay_1"]
    (batch,) = batches(1, f64)
    out = evaluate(step.graph, batch)
    w = mlp(f64).data["fc1.weight"].array
    np.testing.assert_allclose(out["new_fc1.weight"], w - 0.5 * (out["grad_fc1.weight"] + 0.1 * w))
    assert "frozen by the group" in step.signature.frozen["fc2.weight"]


def test_no_decay_spares_vectors() -> None:
    step = training_step(mlp(f64), optimizer="adamw", lr=0.1, optimizer_options={"weight_decay": 0.5}, no_decay=True)
    with_decay = training_step(mlp(f64), optimizer="adamw", lr=0.1, optimizer_options={"weight_decay": 0.5})
    (batch,) = batches(1, f64)
    a, b = evaluate(step.graph, batch), evaluate(with_decay.graph, batch)
    bias = mlp(f64).data["fc1.bias"].array
    np.testing.assert_allclose(a["new_fc1.bias"] - b["new_fc1.bias"], 0.1 * 0.5 * bias, rtol=1e-9)
    np.testing.assert_array_equal(a["new_fc1.weight"], b["new_fc1.weight"])


def test_a_moving_average_of_weights_is_kept() -> None:
    step = training_step(mlp(f64), optimizer="sgd", lr=0.1, ema=0.9)
    data = batches(3, f64)
    feeds: dict[str, Any] = {}
    average = None
    for batch in data:
        out = evaluate(step.graph, {**feeds, **batch})
        feeds = {step.signature.carried[k]: v for k, v in out.items() if k in step.signature.carried}
        new = out["new_fc2.weight"]
        average = new if average is None else 0.9 * average + 0.1 * new
        np.testing.assert_allclose(out["new_ema_fc2.weight"], average)
    assert step.signature.slots["fc2.weight"] == ["ema_fc2.weight"]


# ---- training mode ---------------------------------------------------------------------------------------------


def normalised(dtype: DType = f64) -> Graph:
    """A batch normalisation and a dropout in inference form, with the records that a reader leaves."""
    with building():
        x = p.input("x", tensor(dtype, (N, 5)))
        w = p.input("w", tensor(dtype, (5, 6)), "parameter")
        g, b = (p.input(f"bn.{n}", tensor(dtype, (6,)), "parameter") for n in ("weight", "bias"))
        m, v = (p.input(f"bn.running_{n}", tensor(dtype, (6,)), "state") for n in ("mean", "var"))
        w2 = p.input("w2", tensor(dtype, (6, 3)), "parameter")
        h = dense(x, w)
        factor = p.div(g, p.sqrt(c.plus(v, 1e-5)))
        bn = p.add(p.mul(c.sub(h, c.at_last(m, h.shape)), c.at_last(factor, h.shape)), c.at_last(b, h.shape))
        a = c.relu(bn)
        d = passing(a)
        y = dense(d, w2)
    data = weights(dtype, w=(5, 6), w2=(6, 3))
    first = {"bn.weight": 1.1, "bn.bias": 0.2, "bn.running_mean": 0, "bn.running_var": 1}
    data |= {n: Constant(np.full(6, k, dtype.numpy)) for n, k in first.items()}
    records = {
        "batch_norms": (BatchNorm("bn1", "h", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var", "bn", 1e-5, float(np.float32(0.9))),),
        "dropouts": (Dropout("drop", "a", "d", 0.25),),
    }  # fmt: skip
    tensors = {"h": h, "bn": bn, "a": a, "d": d, "y": y}
    return Graph((x, w, g, b, m, v, w2), {"y": y}, "net", tensors, data=data, info=records)


def test_batch_statistics_and_running_statistics_follow_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    graph = normalised()
    net = torch.nn.Sequential(
        torch.nn.Linear(5, 6, bias=False), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 3, bias=False)
    ).double()
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor(graph.data["w"].array.T))
        net[1].weight.fill_(1.1)
        net[1].bias.fill_(0.2)
        net[3].weight.copy_(torch.tensor(graph.data["w2"].array.T))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    data = batches(20, f64)
    losses, feeds = run(training_step(graph, optimizer="adam", lr=0.01), data)
    for batch, loss in zip(data, losses, strict=True):
        optimizer.zero_grad()
        theirs = torch.nn.functional.cross_entropy(net(torch.tensor(batch["x"])), torch.tensor(batch["target"]))
        theirs.backward()
        optimizer.step()
        assert abs(theirs.item() - loss) < 1e-10
    np.testing.assert_allclose(feeds["bn.running_mean"], net[1].running_mean.numpy(), rtol=1e-10)
    np.testing.assert_allclose(feeds["bn.running_var"], net[1].running_var.numpy(), rtol=1e-10)
    np.testing.assert_allclose(feeds["w"], net[0].weight.detach().numpy().T, rtol=1e-9)


def test_running_variance_can_be_that_of_the_population() -> None:
    (batch,) = batches(1, f64)
    unbiased, population = (
        evaluate(training_step(normalised(), running_variance=r).graph, batch)["new_bn.running_var"] - 0.9
        for r in ("unbiased", "population")
    )
    np.testing.assert_allclose(unbiased, population * 7 / 6)


def test_frozen_statistics_keep_the_inference_form() -> None:
    step = training_step(normalised(), batch_norm="frozen")
    (batch,) = batches(1, f64)
    out = evaluate(step.graph, batch)
    np.testing.assert_array_equal(out["y"], evaluate(normalised(), {"x": batch["x"]})["y"])
    assert not step.signature.by_role("state")[1:]  # new_step alone
    assert "bn.running_var" in step.signature.frozen


def test_the_evaluation_graph_is_in_inference_mode() -> None:
    step = training_step(normalised(), dropout=True)
    (batch,) = batches(1, f64)
    out = evaluate(step.evaluation, batch)
    np.testing.assert_array_equal(out["y"], evaluate(normalised(), {"x": batch["x"]})["y"])
    assert set(out) == {"loss", "y"}
    assert "state" in [v.params["role"] for v in step.evaluation.inputs]


def test_running_statistics_cannot_be_trained_while_the_step_updates_them() -> None:
    with pytest.raises(Refusal, match=r"bn.running_mean \(running statistics"):
        training_step(normalised(), train=["bn.running_mean"])
    step = training_step(normalised(), train=["bn.running_mean"], batch_norm="frozen")
    assert step.selection.trained == ("bn.running_mean",)


def test_dropout_is_off_unless_asked_for() -> None:
    step = training_step(normalised(), batch_norm="frozen")
    assert not step.signature.inputs_of("seed")
    (batch,) = batches(1, f64)
    assert evaluate(step.graph, batch)["loss"] == evaluate(step.evaluation, batch)["loss"]


def test_a_dropout_mask_depends_on_seed_and_step_alone_and_is_shared_with_the_backward_pass() -> None:
    step = training_step(normalised(), batch_norm="frozen", dropout=True)
    x = np.random.default_rng(0).standard_normal((500, 5))
    feeds = {"x": x, "target": np.zeros(500, np.int64)}
    first, again = evaluate(step.graph, feeds), evaluate(step.graph, feeds)
    np.testing.assert_array_equal(first["grad_w"], again["grad_w"])
    for change in ({"seed": 1}, {"step": 1}):
        assert evaluate(step.graph, {**feeds, **change})["loss"] != first["loss"]
    # directional differences of the very step: right only if forward and backward see one mask
    v = np.random.default_rng(1).standard_normal((5, 6))
    w = normalised().data["w"].array
    plus, minus = (evaluate(step.graph, {**feeds, "w": w + s * 1e-6 * v})["loss"] for s in (1, -1))
    np.testing.assert_allclose((plus - minus) / 2e-6, np.sum(first["grad_w"] * v), rtol=1e-6)


def test_dropout_can_be_put_behind_any_tensor() -> None:
    step = training_step(mlp(f64), dropout={"h": 0.4})
    assert step.signature.training["dropout"] == {"h": 0.4}
    x = np.random.default_rng(0).standard_normal((2000, 5))
    whole = step.graph.with_(outputs={"h": step.graph.tensors["h"]})
    dropped = evaluate(whole, {"x": x, "target": np.zeros(2000, np.int64)})["h"]
    kept = evaluate(mlp(f64).with_(outputs={"h": mlp(f64).tensors["h"]}), {"x": x})["h"]
    alive = kept > 0
    rate = np.mean(dropped[alive] == 0)
    assert abs(rate - 0.4) < 4 * np.sqrt(0.24 / alive.sum())
    np.testing.assert_allclose(dropped[dropped > 0], kept[dropped > 0] / 0.6)
    with pytest.raises(Refusal, match="matches no dropout"):
        training_step(mlp(f64), dropout={"nowhere": 0.5})


# ---- trajectories ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [f32, f64])
@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}), ("AdamW", {"lr": 0.01})],
)
def test_twenty_steps_follow_pytorch(dtype: DType, name: str, options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    graph, data = mlp(dtype), batches(20, dtype)
    options = dict(options)
    lr = options.pop("lr")
    losses, feeds = run(training_step(graph, optimizer=name.lower(), lr=lr, optimizer_options=options), data)
    params = {k: torch.tensor(v.array, requires_grad=True) for k, v in graph.data.items()}
    optimizer = getattr(torch.optim, name)(params.values(), lr=lr, **options)
    tolerance = 1e-5 if dtype is f32 else 1e-11
    for batch, loss in zip(data, losses, strict=True):
        optimizer.zero_grad()
        h = torch.relu(torch.tensor(batch["x"]) @ params["fc1.weight"] + params["fc1.bias"])
        theirs = torch.nn.functional.cross_entropy(h @ params["fc2.weight"], torch.tensor(batch["target"]))
        theirs.backward()
        optimizer.step()
        assert abs(theirs.item() - loss) < tolerance
    for k, v in params.items():
        np.testing.assert_allclose(feeds[k], v.detach().numpy(), rtol=100 * tolerance, atol=tolerance, err_msg=k)


def test_clipping_and_schedule_act_on_the_update_alone() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    graph, data = mlp(f64), batches(12, f64)
    step = training_step(
        graph, lr=0.5, clip_value=0.2, clip_global_norm=0.3, schedule=("cosine", {"T_max": 10, "warmup_steps": 3})
    )
    assert step.signature.optimizer["clip"] == {"value": 0.2, "global_norm": 0.3}
    assert step.signature.optimizer["schedule"]["name"] == "sequential"
    _, feeds = run(step, data)
    params = {k: torch.tensor(v.array, requires_grad=True) for k, v in graph.data.items()}
    optimizer = torch.optim.SGD(params.values(), lr=0.5)
    for i, batch in enumerate(data):
        optimizer.param_groups[0]["lr"] = 0.5 * (i / 3 if i < 3 else (1 + np.cos(np.pi * (i - 3) / 10)) / 2)
        optimizer.zero_grad()
        h = torch.relu(torch.tensor(batch["x"]) @ params["fc1.weight"] + params["fc1.bias"])
        torch.nn.functional.cross_entropy(h @ params["fc2.weight"], torch.tensor(batch["target"])).backward()
        if i == 0:
            first = evaluate(step.graph, batch)["grad_fc1.weight"]
            np.testing.assert_allclose(first, params["fc1.weight"].grad.numpy(), rtol=1e-9, atol=1e-12)
        torch.nn.utils.clip_grad_value_(params.values(), 0.2)
        torch.nn.utils.clip_grad_norm_(params.values(), 0.3)
        optimizer.step()
    for k, v in params.items():
        np.testing.assert_allclose(feeds[k], v.detach().numpy(), rtol=1e-9, err_msg=k)


# ---- precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_mixed_precision_keeps_weights_in_float32_and_follows_the_full_run(precision: str) -> None:
    step = training_step(mlp(), optimizer="adamw", lr=0.01, precision=precision, loss_scale=256)
    dots = [n for n in step.nodes() if n.primitive.name == "dot"]
    assert {n.dtype.numpy.name for n in dots} == {precision}
    assert {n.phase for n in dots} == {"forward", "backward"}
    assert {e.dtype for e in step.signature.by_role("parameter", "slot", "update", "gradient", "loss")} == {"float32"}
    data = batches(20)
    low, _ = run(step, data)
    full, _ = run(training_step(mlp(), optimizer="adamw", lr=0.01), data)
    np.testing.assert_allclose(low, full, rtol=5e-3 if precision == "float16" else 5e-2)


def test_a_step_with_gradients_that_are_not_finite_is_skipped_and_the_scale_shrinks() -> None:
    step = training_step(mlp(), optimizer="adamw", precision="float16")
    assert [e.name for e in step.signature.inputs_of("state")] == ["loss_scale", "growth_tracker"]
    (batch,) = batches(1)
    start = {i: step.graph.data[i].array for i in step.signature.carried.values()}
    out = evaluate(step.graph, {**batch, "loss_scale": 1e30})
    for output, name in step.signature.carried.items():
        if name == "loss_scale":
            assert out[output] == np.float32(5e29)
        else:
            np.testing.assert_array_equal(out[output], start[name], err_msg=name)
    good = evaluate(step.graph, {**batch, "loss_scale": 256})
    assert good["new_step"] == 1
    assert good["new_loss_scale"] == 256
    assert good["new_growth_tracker"] == 1
    grown = evaluate(step.graph, {**batch, "loss_scale": 256, "growth_tracker": 1999})
    assert (grown["new_loss_scale"], grown["new_growth_tracker"]) == (512, 0)


def test_the_scale_never_grows_to_infinity() -> None:
    step = training_step(mlp(), optimizer="sgd", loss_scale=256)
    (batch,) = batches(1)
    zero = {e.name: np.zeros_like(step.graph.data[e.name].array) for e in step.signature.inputs_of("parameter")}
    large = np.float32(2.0**127)
    out = evaluate(
        step.graph,
        {**batch, **zero, "x": np.zeros_like(batch["x"]), "loss_scale": np.float32(2.0**126), "growth_tracker": 1999},
    )
    assert (out["new_loss_scale"], out["new_growth_tracker"]) == (large, 0)
    out = evaluate(
        step.graph, {**batch, **zero, "x": np.zeros_like(batch["x"]), "loss_scale": large, "growth_tracker": 1999}
    )
    assert (out["new_loss_scale"], out["new_growth_tracker"]) == (large, 0)


def test_loss_scaling_does_not_change_gradients() -> None:
    (batch,) = batches(1)
    plain, scaled = (evaluate(training_step(mlp(), loss_scale=s).graph, batch) for s in ("off", "dynamic"))
    for name in ("grad_fc1.weight", "new_fc2.weight"):
        np.testing.assert_allclose(scaled[name], plain[name], rtol=1e-6)


def test_scaled_gradients_and_apply_are_the_step() -> None:
    step = training_step(mlp(), optimizer="adam", precision="float16", loss_scale=256)
    (batch,) = batches(1)
    whole, half = evaluate(step.graph, batch), evaluate(step.gradients, batch)
    update = evaluate(step.apply, {k: v for k, v in half.items() if k.startswith("grad_")})
    assert set(update) | set(half) == set(whole)
    for name, value in (half | update).items():
        np.testing.assert_array_equal(value, whole[name], err_msg=name)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(Refusal, match="no precision 'int8'"):
        training_step(mlp(), precision="int8")
    with pytest.raises(Refusal, match="no product of float32 tensors"):
        training_step(mlp(f64), precision="float16")


def test_a_float16_model_can_scale_its_loss() -> None:
    step = training_step(mlp(f16), loss_scale=512)
    (batch,) = batches(1, f16)
    plain, scaled = evaluate(training_step(mlp(f16)).graph, batch), evaluate(step.graph, batch)
    assert scaled["grad_fc1.weight"].dtype == np.float32  # unscaled gradients may be too small for 16 bits
    assert scaled["new_fc1.weight"].dtype == np.float16
    np.testing.assert_allclose(scaled["grad_fc1.weight"], plain["grad_fc1.weight"], rtol=2e-2, atol=1e-3)


# ---- adapters --------------------------------------------------------------------------------------------------


def test_low_rank_adapters_are_trained_beside_frozen_matrices() -> None:
    graph = mlp(f64)
    step = training_step(graph, optimizer="sgd", lr=0.1, lora={"rank": 2, "alpha": 4, "targets": "fc1.*"})
    assert step.signature.parameters == ("lora_A_fc1.weight", "lora_B_fc1.weight")
    assert set(step.signature.frozen) == {"fc1.weight", "fc1.bias", "fc2.weight"}
    (batch,) = batches(1, f64)
    out = evaluate(step.graph, batch)
    np.testing.assert_allclose(out["y"], evaluate(graph, {"x": batch["x"]})["y"])  # B starts at 0
    full = evaluate(training_step(graph).graph, batch)["grad_fc1.weight"]
    a = step.graph.data["lora_A_fc1.weight"].array
    np.testing.assert_allclose(out["grad_lora_B_fc1.weight"], 2 * a.T @ full, rtol=1e-10)
    assert not out["grad_lora_A_fc1.weight"].any()


def test_adapters_can_be_trained_with_other_parameters() -> None:
    step = training_step(mlp(), lora={"rank": 1, "targets": ["fc2.weight"]}, train=["fc1.bias"])
    assert set(step.signature.parameters) == {"fc1.bias", "lora_A_fc2.weight", "lora_B_fc2.weight"}
    with pytest.raises(Refusal, match=r"f32\[8\] is no matrix"):
        training_step(mlp(), lora={"targets": ["fc1.bias"]})


def test_statistics_inside_a_branch_are_kept_and_reported() -> None:
    with building():
        inner = p.input("elsewhere", tensor(f32, (N, 8)))  # a value of a nested graph
    norm = BatchNorm("branch/bn", "x", "fc1.bias", "fc1.bias", "fc1.bias", "fc1.bias", inner)
    step = training_step(mlp().with_(info={"batch_norms": (norm,)}))
    said = {"branch/bn": "inference form, as it stands inside a loop or branch"}
    assert step.signature.training["batch_norms"] == said
    assert step.signature.frozen == {"fc1.bias": "running statistics, kept as they are"}


def test_options_without_such_a_value_are_refused_together() -> None:
    with pytest.raises(Refusal) as error:
        training_step(mlp(), clip_norm=-1.0, ema=1.5, batch_norm="train", running_variance="biased")
    for part in ("clip_norm must be above 0", "ema must lie in", "found 'train'", "found 'biased'"):
        assert part in str(error.value)
