"""RNN, GRU and LSTM: values against onnxruntime, gradients of inputs, weights and initial states against PyTorch and differences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from one_node import Case, check_gradients, check_values
from onnx import helper, numpy_helper
from pullback.algebra import primitives as p
from pullback.algebra.calculus.vjp import vjp
from pullback.algebra.costs import cost
from pullback.algebra.dims import symbols
from pullback.algebra.errors import Refusal
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Graph, building
from pullback.algebra.passes.unroll import unroll
from pullback.backends.onnx_export.emit import to_onnx
from pullback.frontends.onnx_import import load

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
TIME, BATCH, SIZE, HIDDEN = 5, 3, 4, 2


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return (0.6 * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(np.float32)


def layer(op: str, note: str = "", *, directions: int = 1, bias: bool = True, lengths: Any = None, initial: bool = True, peepholes: bool = False,
          batch_first: bool = False, **attributes: Any) -> Case:  # fmt: skip
    """One recurrent node with weights as inputs."""
    rows = GATES[op] * HIDDEN
    x, h, c = draw(TIME, BATCH, SIZE), draw(directions, BATCH, HIDDEN, seed=1), draw(directions, BATCH, HIDDEN, seed=2)
    if batch_first:
        x, h, c = (v.swapaxes(0, 1) for v in (x, h, c))
        attributes["layout"] = 1
    inputs: list[Any] = [x, draw(directions, rows, SIZE, seed=3), draw(directions, rows, HIDDEN, seed=4)]
    inputs.append(draw(directions, 2 * rows, seed=5) if bias else None)
    inputs.append(None if lengths is None else np.asarray(lengths, np.int32))
    inputs.append(h if initial else None)
    if op == "LSTM":
        inputs += [c if initial else None, draw(directions, 3 * HIDDEN, seed=6) if peepholes else None]
    while inputs[-1] is None:
        inputs.pop()
    return Case(op, inputs, {"hidden_size": HIDDEN, **attributes}, 3 if op == "LSTM" else 2, "", note=note, opset=14)


BOTH: dict[str, Any] = {"directions": 2, "direction": "bidirectional"}
CASES = [
    *(layer(op) for op in GATES),
    *(layer(op, "reverse", direction="reverse") for op in GATES),
    *(layer(op, "both ways", **BOTH) for op in GATES),
    *(layer(op, "without bias or state", bias=False, initial=False) for op in GATES),
    *(layer(op, "lengths", lengths=[5, 2, 3]) for op in GATES),
    *(layer(op, "lengths both ways", lengths=[4, 2, 1], **BOTH) for op in GATES),
    *(layer(op, "clip", clip=0.3) for op in ("RNN", "GRU", "LSTM")),
    layer("GRU", "linear before reset", linear_before_reset=1),
    layer("GRU", "linear before reset both ways", linear_before_reset=1, **BOTH),
    layer("LSTM", "peepholes", peepholes=True),
    layer("LSTM", "peepholes both ways", peepholes=True, lengths=[5, 4, 2], **BOTH),
    layer("LSTM", "input and forget gate coupled", input_forget=1),
    layer("RNN", "Relu", activations=["Relu"]),
    layer("RNN", "two activations", activations=["LeakyRelu", "Softsign"], activation_alpha=[0.2], **BOTH),
    layer("RNN", "Affine", activations=["Affine"], activation_alpha=[0.7], activation_beta=[0.1]),
    layer("RNN", "ScaledTanh", activations=["ScaledTanh"], activation_alpha=[0.7], activation_beta=[1.2]),
    layer("LSTM", "HardSigmoid", activations=["HardSigmoid", "Tanh", "Softplus"], activation_alpha=[0.3], activation_beta=[0.4]),
    layer("GRU", "Elu", activations=["Sigmoid", "Elu"], activation_alpha=[0.8]),
]  # fmt: skip
# onnxruntime has no batch-first kernels: the values of layout 1 are those of layout 0 with axes exchanged
BATCH_FIRST = [layer(op, "batch first", batch_first=True, **BOTH) for op in GATES]

every = pytest.mark.parametrize("case", CASES, ids=str)


@every
def test_values_are_those_of_onnxruntime(case: Case) -> None:
    check_values(case)


@pytest.mark.parametrize("case", [*CASES, *BATCH_FIRST], ids=str)
def test_gradients_agree_with_differences(case: Case) -> None:
    """Of the sequence, every weight and every initial state."""
    floats = sum(x is not None and x.dtype == np.float32 for x in case.inputs)
    assert check_gradients(case) == floats


@pytest.mark.parametrize("op", GATES)
def test_batch_first_is_the_same_with_axes_exchanged(op: str) -> None:
    first, last = layer(op, batch_first=True, **BOTH), layer(op, **BOTH)
    y, *states = evaluate(load(first.model()), first.feeds()).values()
    expected, *ends = evaluate(load(last.model()), last.feeds()).values()
    np.testing.assert_array_equal(y, expected.transpose(2, 0, 1, 3))
    for a, b in zip(states, ends, strict=True):
        np.testing.assert_array_equal(a, b.swapaxes(0, 1))


def symbolic(case: Case) -> onnx.ModelProto:
    """The model with time and batch as symbols; the states say the batch each in its own name."""
    model = case.model()
    for i, info in enumerate(model.graph.input):
        shape = info.type.tensor_type.shape
        if i == 0:
            shape.dim[0].dim_param, shape.dim[1].dim_param = "time", "batch"
        elif info.name in ("x5", "x6"):
            shape.dim[1].dim_param = f"batch_{info.name}"
        elif info.name == "x4":
            shape.dim[0].dim_param = "batch_lengths"
    return model


def gradient_graph(graph: Graph) -> Graph:
    """Of the sum of all outputs, each weighted by an input of its own."""
    wanted = [v for v in graph.inputs if v.dtype.floating]
    with building(graph):
        seeds = [p.input(f"seed_{n}", v.type, "seed") for n, v in graph.outputs.items()]
        grads = vjp(list(graph.outputs.values()), seeds, wanted)
    found = {f"grad_{v.params['name']}": g for v, g in zip(wanted, grads, strict=True) if g is not None}
    return graph.with_(inputs=(*graph.inputs, *seeds), outputs={**graph.outputs, **found}, roles={})


@every
def test_time_and_batch_may_be_symbols_and_the_gradient_graph_runs_on_onnxruntime(case: Case) -> None:
    static, graph = gradient_graph(load(case.model())), gradient_graph(load(symbolic(case)))
    feeds = case.feeds()
    feeds |= {f"seed_{n}": draw(*y.shape, seed=9) for n, y in evaluate(load(case.model()), feeds).items()}
    expected = evaluate(static, feeds)
    model = to_onnx(graph)
    onnx.checker.check_model(model, full_check=True)
    assert {n.op_type for n in model.graph.node}.isdisjoint(GATES)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    for name, y in zip(names, session.run(names, feeds), strict=True):
        np.testing.assert_allclose(y, expected[name], rtol=2e-4, atol=2e-5, err_msg=name)


def test_a_longer_sequence_needs_no_other_graph() -> None:
    case = layer("LSTM", **BOTH)
    graph = load(symbolic(case))
    for time in (1, 2, 9):
        feeds = {**case.feeds(), "x0": draw(time, BATCH, SIZE)}
        fixed = load(symbolic(case), dims={"time": time})
        for name, y in evaluate(graph, feeds).items():
            np.testing.assert_array_equal(y, evaluate(fixed, feeds)[name])


def test_an_empty_sequence_leaves_the_states_as_they_are() -> None:
    case = layer("LSTM")
    feeds = {**case.feeds(), "x0": draw(0, BATCH, SIZE)}
    found = evaluate(load(symbolic(case)), feeds)
    assert found["y0"].shape == (0, 1, BATCH, HIDDEN)
    np.testing.assert_array_equal(found["y1"], feeds["x5"])
    np.testing.assert_array_equal(found["y2"], feeds["x6"])


@pytest.mark.parametrize("op", GATES)
def test_steps_are_written_out_on_request(op: str) -> None:
    case = layer(op, **BOTH)
    expected = evaluate(load(case.model()), case.feeds())
    for graph in (load(case.model(), unroll=True), unroll(load(case.model()))):
        assert "scan" not in {v.primitive.name for v in graph.nodes}
        for name, y in evaluate(graph, case.feeds()).items():
            np.testing.assert_allclose(y, expected[name], rtol=1e-6)


def test_the_gradient_of_a_scan_is_written_out_too() -> None:
    case = layer("LSTM", lengths=[5, 2, 3], **BOTH)
    graph = gradient_graph(load(case.model()))
    plain = unroll(graph)
    assert "scan" not in {v.primitive.name for v in plain.nodes}
    feeds = case.feeds()
    feeds |= {f"seed_{n}": draw(*y.shape, seed=9) for n, y in evaluate(load(case.model()), feeds).items()}
    expected = evaluate(graph, feeds)
    for name, y in evaluate(plain, feeds).items():
        np.testing.assert_allclose(y, expected[name], rtol=1e-5, atol=1e-6)


def test_the_cost_of_a_scan_is_that_of_its_steps() -> None:
    plain, rolled = (cost(load(layer("RNN").model(), unroll=unrolled)) for unrolled in (True, False))
    assert plain.flops == rolled.flops
    model = symbolic(layer("RNN"))
    assert {s.name for s in symbols(cost(load(model)).flops)} == {"batch", "time"}


def test_second_derivatives_agree_with_differences() -> None:
    case = layer("GRU").in_double()
    graph = load(case.model())
    feeds = case.feeds()
    x, w = graph["x0"], graph["x2"]
    with building(graph):
        (g,) = vjp([graph.outputs["y1"]], [p.number(1, graph.outputs["y1"])], [x])
        assert g is not None
        (gg,) = vjp([g], [p.number(1, g)], [w])
        assert gg is not None
    both = graph.with_(outputs={"g": g, "gg": gg}, roles={})
    direction = np.random.default_rng(0).standard_normal(feeds["x2"].shape)
    up, down = (evaluate(both, {**feeds, "x2": feeds["x2"] + s * 1e-5 * direction})["g"].sum() for s in (1, -1))
    np.testing.assert_allclose((evaluate(both, feeds)["gg"] * direction).sum(), (up - down) / 2e-5, rtol=1e-6)


def test_what_does_not_fit_is_refused_by_name() -> None:
    case = layer("LSTM", activations=["Sigmoid", "Tanh", "Sine"])
    with pytest.raises(Refusal, match=r"node 'node' .LSTM.*no activation 'Sine'"):
        load(case.model_unchecked())
    with pytest.raises(Refusal, match="direction 'upward'"):
        load(layer("RNN", direction="upward").model_unchecked())


# ---- PyTorch ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    """A PyTorch layer, and the order of its gates in ONNX."""

    op: str
    gates: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.op} {self.options}"


MODULES = [
    Module(op, gates, {"bidirectional": both})
    for op, gates in (("RNN", (0,)), ("GRU", (1, 0, 2)), ("LSTM", (0, 3, 1, 2)))
    for both in (False, True)
]


@pytest.mark.parametrize("time", ["static", "symbolic"])
@pytest.mark.parametrize("module", MODULES, ids=str)
def test_gradients_of_weights_and_initial_states_are_those_of_pytorch(module: Module, time: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    torch.manual_seed(0)
    net = getattr(torch.nn, module.op)(SIZE, HIDDEN, **module.options).double()
    ways = 2 if module.options["bidirectional"] else 1

    def arranged(name: str) -> Any:
        """A weight of all directions, gates in ONNX's order."""
        parts = []
        for way in range(ways):
            whole = getattr(net, f"{name}_l0{'_reverse' if way else ''}").detach().numpy()
            blocks = np.split(whole, len(module.gates))
            parts.append(np.concatenate([blocks[g] for g in module.gates]))
        return np.stack(parts)

    weights = {"W": arranged("weight_ih"), "R": arranged("weight_hh")}
    weights["B"] = np.concatenate([arranged("bias_ih"), arranged("bias_hh")], axis=1)
    rng = np.random.default_rng(1)
    x = torch.tensor(rng.standard_normal((TIME, BATCH, SIZE)), requires_grad=True)
    states = [
        torch.tensor(rng.standard_normal((ways, BATCH, HIDDEN)), requires_grad=True)
        for _ in range(2 if module.op == "LSTM" else 1)
    ]
    y, last = net(x, tuple(states) if module.op == "LSTM" else states[0])
    ends = list(last) if module.op == "LSTM" else [last]
    seeds = [torch.tensor(rng.standard_normal(v.shape)) for v in (y, *ends)]
    torch.autograd.backward([y, *ends], seeds)

    names = ["X", "W", "R", "B", "", "h", "c"][: 6 + len(states) - 1]
    results = ["Y", "Y_h", "Y_c"][: 1 + len(states)]
    attributes = {"hidden_size": HIDDEN, "direction": "bidirectional" if ways == 2 else "forward"}
    if module.op == "GRU":
        attributes["linear_before_reset"] = 1
    node = helper.make_node(module.op, names, results, name="net", **attributes)
    shape = ["time", "batch", SIZE] if time == "symbolic" else [TIME, BATCH, SIZE]
    inputs = [helper.make_tensor_value_info("X", 11, shape)]
    inputs += [helper.make_tensor_value_info(n, 11, [ways, shape[1], HIDDEN]) for n in ("h", "c")[: len(states)]]
    stored = [numpy_helper.from_array(w, n) for n, w in weights.items()]
    outputs = [helper.make_tensor_value_info(n, 11, None) for n in results]
    model = helper.make_model(
        helper.make_graph([node], "net", inputs, outputs, stored), opset_imports=[helper.make_opsetid("", 17)]
    )
    graph = gradient_graph(load(model))
    # ONNX has directions on an axis of their own, PyTorch side by side on the last
    seed = seeds[0].numpy().reshape(TIME, BATCH, ways, HIDDEN).transpose(0, 2, 1, 3)
    feeds = {"X": x.detach().numpy(), "seed_Y": seed}
    feeds |= {n: s.detach().numpy() for n, s in zip(("h", "c"), states, strict=False)}
    feeds |= {f"seed_{n}": s.numpy() for n, s in zip(results[1:], seeds[1:], strict=True)}
    found = evaluate(graph, feeds)
    np.testing.assert_allclose(
        found["Y"].transpose(0, 2, 1, 3).reshape(TIME, BATCH, -1), y.detach().numpy(), rtol=1e-12
    )
    np.testing.assert_allclose(found["grad_X"], x.grad.numpy(), rtol=1e-10, atol=1e-12)
    for n, s in zip(("h", "c"), states, strict=False):
        np.testing.assert_allclose(found[f"grad_{n}"], s.grad.numpy(), rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(parameter.grad)
    expected = {"W": arranged("weight_ih"), "R": arranged("weight_hh")}
    expected["B"] = np.concatenate([arranged("bias_ih"), arranged("bias_hh")], axis=1)
    for n, g in expected.items():
        np.testing.assert_allclose(found[f"grad_{n}"], g, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("target", ["onnx-mlir", "torch-mlir", "iree"])
def test_a_compiler_whose_loops_take_no_symbols_gets_the_steps_of_a_known_length(target: str) -> None:
    case = layer("LSTM")
    model = symbolic(case)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = TIME
    graph = gradient_graph(load(model))
    written = to_onnx(graph, target=target, embed="none")
    onnx.checker.check_model(written, full_check=True)
    assert "Scan" not in {n.op_type for n in written.graph.node}
    assert "Scan" in {n.op_type for n in to_onnx(gradient_graph(load(case.model())), target=target).graph.node}
    with pytest.raises(Refusal, match="its loops take no symbolic dims"):
        to_onnx(gradient_graph(load(symbolic(case))), target=target)
