"""Reading models: what files may look like, and what is refused with everything that stands in the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from pullback.algebra.errors import PullbackError, PullbackWarning, Refusal
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Graph
from pullback.algebra.training.step import training_step
from pullback.backends.restore import restored
from pullback.frontends.onnx_import import load

F = TensorProto.FLOAT


def parse(text: str, opset: int = 17, ir: int = 8) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : {opset}]>\n{text}')


LINEAR = "g (float[N, 2] x) => (float[N, 3] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}> { y = MatMul (x, w) }"
X = np.array([[1, 1]], np.float32)


def run(model: onnx.ModelProto | str | Path, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    return evaluate(load(model), feeds)


# ---- forms that files take -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ir", range(3, onnx.IR_VERSION + 1))
def test_every_ir_version_is_read(ir: int) -> None:
    model = parse(LINEAR, ir=ir)
    if ir == 3:  # initializers must be graph inputs there
        model.graph.input.append(helper.make_tensor_value_info("w", F, [2, 3]))
    graph = load(model)
    assert [v.name for v in graph.by_role("input")] == ["x"]
    assert [v.name for v in graph.parameters] == ["w"]
    assert evaluate(graph, {"x": X})["y"].tolist() == [[5, 7, 9]]


@pytest.mark.parametrize("opset", range(7, onnx.defs.onnx_opset_version() + 1))
def test_every_opset_is_read(opset: int) -> None:
    assert run(parse(LINEAR, opset=opset), x=X)["y"].tolist() == [[5, 7, 9]]


def test_model_is_read_from_path_bytes_and_proto(tmp_path: Path) -> None:
    model = parse(LINEAR)
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    for form in (model, path, str(path), model.SerializeToString()):
        assert evaluate(load(form), {"x": X})["y"].tolist() == [[5, 7, 9]]


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ("value = float[2] {1, 2}", [1, 2]),
        ("value_float = 3.0", 3),
        ("value_floats = [1.0, 4.0]", [1, 4]),
        ("value_int = 5", 5),
        ("value_ints = [1, 6]", [1, 6]),
    ],
)
def test_constant_node_holds_any_kind_of_value(attribute: str, expected: object) -> None:
    kind = "int64" if "int" in attribute else "float"
    shape = "2" if isinstance(expected, list) else ""
    model = parse(f"g (float[N] x) => ({kind}[{shape}] y) {{ c = Constant <{attribute}> () y = Identity (c) }}")
    assert run(model, x=np.zeros(1, np.float32))["y"].tolist() == expected


def test_constant_node_of_floats_is_a_parameter_named_after_its_output() -> None:
    graph = load(parse("g (float[2] x) => (float[2] y) { c = Constant <value = float[2] {1, 2}> () y = Add (x, c) }"))
    assert [v.name for v in graph.parameters] == ["c"]


def test_scalars_and_integers_are_no_parameters() -> None:
    text = "g (float[2] x) => (float[2] y) <float s = {2}, int64[1] i = {0}> { z = Add (x, s) t = Gather (z, i) y = Add (z, t) }"
    assert load(parse(text)).parameters == ()


def sparse(values: list[float], indices: np.ndarray, shape: list[int]) -> onnx.SparseTensorProto:
    held = numpy_helper.from_array(np.array(values, np.float32), "w")
    return helper.make_sparse_tensor(held, numpy_helper.from_array(indices, "w_indices"), shape)


@pytest.mark.parametrize("indices", [np.array([0, 4]), np.array([[0, 0], [1, 1]])], ids=["linear", "one row each"])
def test_sparse_initializer_is_read_densely(indices: np.ndarray) -> None:
    model = parse("g (float[N, 2] x) => (float[N, 3] y) { y = MatMul (x, w) }")
    model.graph.sparse_initializer.append(sparse([7, 8], indices, [2, 3]))
    assert run(model, x=X)["y"].tolist() == [[7, 8, 0]]


def test_sparse_constant_is_read_densely() -> None:
    model = parse("g (float[N, 2] x) => (float[N, 3] y) { y = MatMul (x, w) }")
    node = helper.make_node("Constant", [], ["w"])
    node.attribute.append(helper.make_attribute("sparse_value", sparse([7, 8], np.array([0, 4]), [2, 3])))
    model.graph.node.insert(0, node)
    assert run(model, x=X)["y"].tolist() == [[7, 8, 0]]


@pytest.mark.parametrize("size", [6, 6000])
def test_external_data_is_read_in_place(tmp_path: Path, size: int) -> None:
    model = parse(f"g (float[{size}] x) => (float[{size}] y) {{ y = Add (x, w) }}")
    weight = np.arange(size, dtype=np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    assert np.array_equal(run(path, x=np.ones(size, np.float32))["y"], weight + 1)


def test_local_functions_are_put_in_place_of_their_calls() -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 17, "local" : 1]>
    g (float[N, 2] x) => (float[N, 2] y) { y = local.twice_shifted <by = 3.0> (x) }
    <domain: "local", opset_import: ["" : 17, "local" : 1]>
    twice_shifted <by: float> (a) => (c) { b = local.twice (a) s = Constant <value_float: float = @by> () c = Add (b, s) }
    <domain: "local", opset_import: ["" : 17]>
    twice (a) => (b) { b = Add (a, a) }
    """
    assert run(onnx.parser.parse_model(text), x=X)["y"].tolist() == [[5, 5]]


def test_overloads_of_a_function_are_told_apart() -> None:
    model = parse("g (float[N, 2] x) => (float[N, 2] y) { y = Identity (x) }", ir=10)
    opset = [helper.make_opsetid("", 17)]
    for overload, op in (("a", "Neg"), ("b", "Abs")):
        body = [helper.make_node(op, ["v"], ["r"])]
        model.functions.append(helper.make_function("local", "f", ["v"], ["r"], body, opset, overload=overload))
    model.opset_import.append(helper.make_opsetid("local", 1))
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("f", ["x"], ["t"], domain="local", overload="a"))
    model.graph.node.append(helper.make_node("f", ["t"], ["y"], domain="local", overload="b"))
    assert run(model, x=X)["y"].tolist() == [[1, 1]]


def test_nodes_need_no_names_and_no_order() -> None:
    text = "g (float[N, 2] x) => (float[N, 2] y) { y = Add (b, b) b = Add (a, a) a = Neg (x) }"
    graph = load(parse(text))
    assert evaluate(graph, {"x": X})["y"].tolist() == [[-4, -4]]
    assert graph["b"].origin.source is not None
    assert graph["b"].origin.source.name == "b"


def test_long_chain_in_reverse_order_is_read() -> None:
    nodes = [helper.make_node("Neg", [f"t{i}"], [f"t{i + 1}"]) for i in range(3001)]
    info = [helper.make_tensor_value_info(n, F, ["N"]) for n in ("t0", "t3001")]
    graph = helper.make_graph(nodes[::-1], "g", info[:1], info[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert run(model, t0=np.ones(1, np.float32))["t3001"].tolist() == [-1]


def test_nodes_that_no_output_needs_do_not_stand_in_the_way() -> None:
    model = parse("g (float[N, 2] x) => (float[N, 2] y) { y = Neg (x) unused = Nonsense (x) }")
    assert run(model, x=X)["y"].tolist() == [[-1, -1]]


def test_domain_may_be_spelt_out_and_imports_may_be_unused() -> None:
    model = parse("g (float[N, 2] x) => (float[N, 2] y) { y = Neg (x) }")
    model.graph.node[0].domain = "ai.onnx"
    model.opset_import.append(helper.make_opsetid("com.example.unused", 3))
    assert run(model, x=X)["y"].tolist() == [[-1, -1]]


@pytest.mark.parametrize("param", ["?", "", "-1"])
def test_dims_without_a_name_are_told_apart(param: str) -> None:
    model = parse("g (float[A, B] x) => (float[A, B] y) { y = Neg (x) }")
    for d in model.graph.input[0].type.tensor_type.shape.dim:
        if param == "-1":
            d.dim_value = -1
        else:
            d.dim_param = param
    graph = load(model)
    assert [s.name for s in graph.symbols] == ["x_0", "x_1"]


def test_dim_names_are_never_parsed() -> None:
    model = parse("g (float[A] x) => (float[A] y) { y = Neg (x) }")
    name = "floor(S*I/2) + E"
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = name
    graph = load(model)
    assert [s.name for s in graph.symbols] == [name]
    assert evaluate(graph, {"x": np.ones(3, np.float32)})["y"].shape == (3,)


def test_dims_can_be_given_sizes() -> None:
    graph = load(parse(LINEAR), dims={"N": 5})
    assert repr(graph["y"].type) == "f32[5, 3]"
    with pytest.raises(Refusal, match="no symbolic dim 'M'"):
        load(parse(LINEAR), dims={"M": 5})


def test_sizes_that_the_model_forces_are_constraints() -> None:
    graph = load(
        parse("g (float[A, 2] a, float[B, 2] b, float[C, 2] c) => (float[A, 2] y) { d = Add (a, b) y = Add (d, c) }")
    )
    assert len(graph.symbols) == 1
    assert len(graph.constraints) == 2
    assert graph["y"].shape == graph["a"].shape == graph["b"].shape == graph["c"].shape


@pytest.mark.parametrize(("setting", "use"), [
    ("float[2] c = {0, 1}, int64 d = {3}", "i = ArgMax <axis = -1, keepdims = 0> (x)  y = OneHot (i, d, c)"),
    ("float[1] c = {2.5}, int64[4] d = {0, 0, 0, 1}", "h = Mul (x, w)  y = Pad (h, d, c)"),
    ("float[1] c = {-0.5}", "h = Mul (x, w)  y = Clip (h, c)"),
])  # fmt: skip
def test_what_an_operator_takes_as_a_setting_is_no_weight(setting: str, use: str) -> None:
    graph = load(parse(f"g (float[N, 2] x) => (float[N, M] y) <float[2] w = {{1, 2}}, {setting}> {{ {use} }}"))
    assert "c" in graph.info["frozen"]
    assert "c" not in [v.name for v in graph.parameters]


def test_one_tensor_used_as_weight_and_as_running_mean_is_split() -> None:
    text = """
    g (float[N, 2] x) => (float[N, 2] y) <float[2] zeros = {0, 0}, float[2] ones = {1, 1}> {
      n = BatchNormalization (x, ones, zeros, zeros, ones)
      y = Add (n, zeros)
    }"""
    graph = load(parse(text))
    assert {v.name for v in graph.parameters} == {"ones", "zeros"}
    assert {v.name for v in graph.by_role("state")} == {"n.running_mean", "n.running_var"}
    assert np.allclose(evaluate(graph, {"x": X})["y"], X, atol=1e-5)


# ---- what exporters merged ---------------------------------------------------------------------------------------------------------


def names(graph: Graph, *roles: str) -> set[str]:
    return {v.name for v in graph.by_role(*roles)}


def test_parameters_that_an_exporter_merged_are_told_apart_by_the_names_it_left() -> None:
    graph = load(
        parse("""
    g (float[N, 2] x) => (float[N, 2] y) <float[2] ones = {1, 1}, float[2] zeros = {0, 0}, float[2] w = {1, 2}> {
      scale = Identity (ones)  bias = Identity (zeros)  mean = Identity (zeros)  var = Identity (ones)  tied = Identity (w)
      n = BatchNormalization (x, ones, zeros, mean, var)
      m = LayerNormalization (n, scale, bias)
      a = Mul (m, w)
      y = Mul (a, tied)
    }""")
    )
    assert names(graph, "parameter") == {"ones", "zeros", "scale", "bias", "w"}
    assert names(graph, "state") == {"mean", "var"}
    assert np.allclose(evaluate(graph, {"x": X})["y"][:, 1] > 0, X[:, 1] > X[:, 0])


SIGNATURE = """
p_one_w: PARAMETER target='one_w'
p_one_b: PARAMETER target='one_b'
p_two_w: PARAMETER target='two_w'
p_two_b: PARAMETER target='two_b'
p_table: PARAMETER target='hidden'
p_unused: PARAMETER target='unused'
b_shift: BUFFER target='shift' persistent=True
b_rates: BUFFER target='rates' persistent=True
c_t: CONSTANT_TENSOR target='t'
x: USER_INPUT
"""
BODY = "(%x, [2], %p_one_w, %p_one_b, 1e-05, False), kwargs = {}", "(%n, [2], %p_two_w, %p_two_b)", "(%m, %b_shift)"


def signed(
    nodes: str, calls: Sequence[str], stored: str = "", folded: Mapping[str, Sequence[str]] | None = None
) -> onnx.ModelProto:
    """A model as PyTorch's newer exporter writes it: the signature of the network, and in each node the call that it was made from."""
    model = parse(f"""g (float[N, 2] x) => (float[N, 2] y)
      <float[2] one_w = {{1, 1}}, float[2] one_b = {{0, 0}}{stored and ", "}{stored}> {{ {nodes} }}""")
    model.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=SIGNATURE)
    for node, call in zip(model.graph.node, calls, strict=True):
        node.metadata_props.add(
            key="pkg.torch.onnx.fx_node", value=f"%v{calls.index(call)} : call_function[target=f](args = {call}"
        )
    for name, made_from in (folded or {}).items():
        info = model.graph.value_info.add(name=name)
        info.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value=repr(list(made_from)))
    return model


NORMS = "n = LayerNormalization (x, one_w, one_b)  m = LayerNormalization (n, one_w, one_b)"


def test_parameters_that_an_exporter_merged_are_told_apart_by_its_record_of_calls() -> None:
    graph = load(signed(f"{NORMS}  y = Add (m, one_b)", BODY))
    assert names(graph, "parameter") == {"one_w", "one_b", "two_w", "two_b"}
    assert graph.info["frozen"] == {"shift": "a buffer of the network, by its exporter's record"}
    assert {tuple(s) for s in graph.info["split"]} == {
        ("two_w", "one_w", "m", 1), ("two_b", "one_b", "m", 2), ("shift", "one_b", "y", 1),
    }  # fmt: skip


def test_one_layer_used_twice_stays_one() -> None:
    graph = load(signed(f"{NORMS}  y = Add (m, one_b)", [BODY[0], "(%v0, [2], %p_one_w, %p_one_b)", BODY[2]]))
    assert names(graph, "parameter") == {"one_w", "one_b"}


def test_a_call_of_several_nodes_takes_its_tensors_in_order() -> None:
    nodes = "n = Mul (x, one_w)  m = Add (n, one_b)  a = Mul (m, one_w)  y = Add (a, one_b)"
    graph = load(signed(nodes, [BODY[0], BODY[0], BODY[1], BODY[1]]))
    assert names(graph, "parameter") == {"one_w", "one_b", "two_w", "two_b"}


def test_the_inner_norm_of_a_group_norm_has_no_parameters() -> None:
    """Its ones and zeros are merged with those of parameters; a norm of the network with the same two operands has them."""
    nodes = "n = InstanceNormalization (x, one_w, one_b)  m = Mul (n, two_w)  a = Add (m, two_b)  y = InstanceNormalization (a, one_w, one_b)"
    group = "(%x, 2, %p_two_w, %p_two_b, 1e-05)"
    model = signed(nodes, [group, group, group, BODY[0]], "float[2, 1] two_w = {3, 4}, float[2, 1] two_b = {5, 6}")
    for node in model.graph.node[:3]:
        node.metadata_props[0].value = node.metadata_props[0].value.replace(
            "target=f", "target=torch.ops.aten.group_norm.default"
        )
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim.add(dim_value=5)
    graph = load(model)
    assert names(graph, "parameter") == {"one_w", "one_b", "two_w", "two_b"}
    assert names(graph, "frozen") == {"n.1", "n.2"}


def test_a_tensor_is_a_weight_where_the_exporter_computed_it_from_one() -> None:
    stored = "float[2] a = {3, 4}, float[2] b = {5, 6}, float[2] rates = {7, 8}, float[2] t = {1, 2}"
    nodes = "n = Add (x, a)  m = Add (n, b)  k = Mul (m, rates)  l = Mul (k, t)  p = Mul (l, one_w)  y = Add (p, one_b)"
    calls = ["(%x, %a)", "(%n, %b)", "(%m, %b_rates)", "(%k, %c_t)", "(%l, %p_one_w)", "(%p, %p_one_b)"]
    graph = load(signed(nodes, calls, stored, {"a": ["arange", "rates"], "b": ["arange", "hidden"]}))
    assert names(graph, "parameter") == {"b", "one_w", "one_b"}
    assert graph.info["frozen"] == {
        "a": "computed from no parameter, by its exporter's record",
        "rates": "a buffer of the network, by its exporter's record",
        "t": "a constant in the network's code, by its exporter's record",
    }


def test_merged_parameters_that_cannot_be_told_apart_are_named() -> None:
    model = signed("n = Mul (x, one_w)  y = Add (n, one_b)", ["(%x, %p_one_w, %p_two_w, %p_two_b)", "(%n, %p_one_b)"])
    model.graph.node[0].input[1] = "one_b"
    with pytest.warns(PullbackWarning, match=r"'one_b' of 'g' stands for parameters of its network \(two_b, two_w\)"):
        load(model)


SHARED = """g (float[N, 2] x) => (float[N, 2] y) <float[2] ones = {1, 1}, float[2] w = {1, 2}> {
  [first] n = LayerNormalization (x, ones, w)
  [second] m = LayerNormalization (n, ones, w)
  y = Mul (m, ones)
}"""


def test_what_several_layers_share_is_named_where_its_elements_are_all_equal() -> None:
    with pytest.warns(
        PullbackWarning, match=r"'ones' of 'g' stands for a scale or a bias of 2 layers.*untie='ones'"
    ) as caught:
        graph = load(parse(SHARED))
    assert len(caught) == 1  # a trained tensor that layers share is one weight
    assert names(graph, "parameter") == {"ones", "w"}


def test_one_layer_in_every_step_is_not_named() -> None:
    load(
        parse("""g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}, float[2] b = {0, 0}> {
      a = Gemm (x, w, b)
      y = Gemm (a, w, b)
    }""")
    )


def test_each_use_is_a_parameter_of_its_own_on_request() -> None:
    graph = load(parse(SHARED), untie=["on*"])
    assert names(graph, "parameter") == {"ones", "w", "second.ones", "y.ones"}
    with pytest.raises(Refusal, match="untie 'onse' matches nothing; near names: ones"):
        load(parse(SHARED), untie=["onse"])


def test_parameters_that_the_exporter_left_out_are_named() -> None:
    graph = load(signed("y = Mul (x, one_w)", ["(%x, %p_one_w, %p_two_b)"]))
    reason = "not in the file: its exporter folded it into others, or dropped it"
    assert graph.info["frozen"] == {"two_b": reason}
    step = training_step(graph, loss="mse_loss")
    assert step.selection.left_out == {"two_b": reason}
    with pytest.raises(Refusal, match=rf"train 'two_b' matches nothing that can be trained: two_b \({reason}\)"):
        training_step(graph, loss="mse_loss", train=["two_b"])


# ---- refusals ------------------------------------------------------------------------------------------------------------------------------


def dangling(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "nowhere"


def wrong_attribute(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute.append(helper.make_attribute("colour", 1))


def wrong_type_of_attribute(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "Softmax"
    del model.graph.node[0].input[1:]
    model.graph.node[0].attribute.append(helper.make_attribute("axis", 1.5))


def cycle(model: onnx.ModelProto) -> None:
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("Add", ["x", "b"], ["y"], "one"))
    model.graph.node.append(helper.make_node("Neg", ["y"], ["b"], "two"))


def twice(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Neg", ["x"], ["y"]))


def unknown_ops(model: onnx.ModelProto) -> None:
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("Foo", ["x"], ["a"], "first", domain="com.example"))
    model.graph.node.append(helper.make_node("Bar", ["x"], ["b"], "second"))
    model.graph.node.append(helper.make_node("Add", ["a", "b"], ["y"]))


def no_outputs(model: onnx.ModelProto) -> None:
    del model.graph.output[:]


def shapeless(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.ClearField("shape")


def strings(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING


def too_new(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 999


def unknown_element_type(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = 99


def unknown_element_type_of_a_weight(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_type = -1


def endless_version(model: onnx.ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("com.example", 1 << 40))


def short_data(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].raw_data = b"1234"
    model.graph.initializer[0].ClearField("float_data")


def operands_that_do_not_fit(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[0] = 3
    model.graph.initializer[0].dims[1] = 2


def stored_and_made(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].name = model.graph.node[-1].output[0]


def layout_of_one_processor(model: onnx.ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("com.microsoft.nchwc", 1))
    model.graph.node[0].domain, model.graph.node[0].op_type = "com.microsoft.nchwc", "ReorderInput"


def output_that_nothing_makes(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "z"


@pytest.mark.parametrize(
    ("spoil", "messages"),
    [
        (dangling, ["'nowhere' is not defined"]),
        (wrong_attribute, ["no attribute 'colour'"]),
        (wrong_type_of_attribute, ["attribute 'axis' must be INT, found FLOAT"]),
        (cycle, ["a cycle", "'one'", "'two'"]),
        (twice, ["'y' is made by more than one node"]),
        (unknown_ops, ["'first'", "com.example", "'second'", "no lowering for Bar"]),
        (no_outputs, ["no outputs"]),
        (shapeless, ["input 'x' has no shape"]),
        (strings, ["input 'x'", "string"]),
        (too_new, ["operator set 999"]),
        (unknown_element_type, ["input 'x': 99 is no element type"]),
        (unknown_element_type_of_a_weight, ["'w'", "-1 is no element type"]),
        (endless_version, ["of com.example is no version"]),
        (short_data, ["'w'"]),
        (operands_that_do_not_fit, ["MatMul", "f32[N, 2]", "f32[3, 2]"]),
        (output_that_nothing_makes, ["'z'"]),
        (stored_and_made, ["'y' is stored in the file and made by a node too"]),
        (layout_of_one_processor, ["no lowering for ReorderInput", "save the model at ORT_ENABLE_EXTENDED"]),
    ],
)
def test_bad_model_gets_one_clear_error(spoil: Callable[[onnx.ModelProto], None], messages: list[str]) -> None:
    model = parse(LINEAR)
    spoil(model)
    with pytest.raises(PullbackError) as caught:
        load(model)
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"this is no model", "not an ONNX model"),
        (b"", "not an ONNX model"),
        (
            onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {LINEAR}').SerializeToString()[:-20],
            "ONNX model",
        ),
    ],
    ids=["text", "empty", "cut short"],
)
def test_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(Refusal, match=message):
        load(path)


DAMAGED = """
g (float[T, N] x, float[N] h0) => (float[N] hf, float[T, M] y) <float[4, 3, 1] k = {1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6}, int64[3] s = {-1, 4, 0}> {
  c = Constant <value = bool {1}> ()
  u = If <then_branch = t () => (float[T, N] p) { p = Tanh (x) }, else_branch = e () => (float[T, N] q) { q = Neg (x) }> (c)
  hf, ys = Scan <num_scan_inputs = 1, body = b (float[N] h, float[N] xi) => (float[N] ho, float[N] yo) {
    a = Add (h, xi)  ho = Tanh (a)  yo = Mul (ho, xi) }> (h0, u)
  sh = Shape (ys)
  up = Unsqueeze (ys, zero)
  zero = Constant <value_ints = [0]> ()
  last = Constant <value_ints = [2]> ()
  w = Squeeze (k, last)
  r = Reshape (ys, sh)
  y = Softmax <axis = -1> (r)
}"""


@pytest.mark.parametrize("seed", range(4))
def test_bytes_that_were_changed_give_a_model_or_one_clear_error(seed: int) -> None:
    whole, rng, refused = parse(DAMAGED).SerializeToString(), np.random.default_rng(seed), 0
    load(whole)
    for _ in range(100):
        changed = bytearray(whole)
        for at in rng.integers(0, len(whole), rng.choice([1, 2, 6])):
            changed[at] = rng.integers(256)
        try:
            load(bytes(changed))
        except PullbackError as error:
            refused += bool(str(error))
    assert refused > 30


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="No such file"):
        load(tmp_path / "absent.onnx")


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/hostname", "sub/../../secret.bin", "link.bin"])
def test_external_data_outside_the_models_folder_is_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "secret.bin").write_bytes(bytes(24))
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    model = parse("g (float[N, 2] x) => (float[N, 3] y) { y = MatMul (x, w) }")
    tensor = model.graph.initializer.add(name="w", data_type=F, dims=[2, 3], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(Refusal, match="leaves the model's folder"):
        load(path)


@pytest.mark.parametrize(("offset", "length"), [(0, 100), (8, 24), (-4, 24)])
def test_external_data_that_is_too_short_is_refused(tmp_path: Path, offset: int, length: int) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(24))
    model = parse("g (float[N, 2] x) => (float[N, 3] y) { y = MatMul (x, w) }")
    tensor = model.graph.initializer.add(name="w", data_type=F, dims=[2, 3], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "w.bin"), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(Refusal, match=r"ends at 24 bytes"):
        load(path)


def test_everything_that_stands_in_the_way_is_named_at_once() -> None:
    text = "g (float[N, 2] x) => (float[N, 2] y) { a = Foo (x) b = Bar (x) c = Neg <q = 1> (x) d = Add (a, b) y = Add (d, c) }"
    with pytest.raises(Refusal) as caught:
        load(parse(text))
    assert len(caught.value.reasons) == 3


# ---- what PyTorch's exporters make of a network ----------------------------------------------------------------------------------------


def _with(text: str, **stored: np.ndarray) -> onnx.ModelProto:
    model = parse(text)
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in stored.items())
    return model


def _tied(name: str) -> onnx.ModelProto:
    """An embedding whose transpose, under the exporter's name, makes logits."""
    e = np.arange(20, dtype=np.float32).reshape(5, 4)
    model = _with(
        "g (int64[N] i) => (float[N, 5] y) { h = Gather (e, i) t = Tanh (h) y = MatMul (t, c) }", e=e, c=e.T.copy()
    )
    model.graph.initializer[1].name = model.graph.node[2].input[1] = name
    return model


@pytest.mark.parametrize("name", ["onnx::MatMul_9", "val_3", "transpose", "t_1"])
def test_a_weight_that_was_written_twice_is_one_parameter(name: str) -> None:
    model = _tied(name)
    graph = load(model)
    assert [v.params["name"] for v in graph.by_role("parameter")] == ["e"]
    given = {"e": np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)}
    assert [t.name for t in model.graph.initializer] == ["e", name], "the file that was given stays as it was"
    back = {t.name: numpy_helper.to_array(t) for t in restored(model, given).graph.initializer}
    np.testing.assert_array_equal(back[name], given["e"].T)


def test_weights_with_names_of_their_own_are_not_tied() -> None:
    assert [v.params["name"] for v in load(_tied("head.weight")).by_role("parameter")] == ["e", "head.weight"]


def test_constants_in_the_code_of_a_network_are_no_weights() -> None:
    ones, mask = np.ones(3, np.float32), np.float32([[0, -np.inf, 0]])
    text = """g (float[N, 3, L] x) => (float[N, 3, L] y) {
      a = InstanceNormalization (x, val_1, val_2)
      b = InstanceNormalization (a, scale, bias)
      c = Mul (b, val_3) d = Div (c, one) e = Transpose <perm = [0, 2, 1]> (d) f = Add (e, mask) s = Softmax (f) m = Mul (s, gain)
      y = Transpose <perm = [0, 2, 1]> (m)
    }"""
    stored = {
        "val_1": ones, "val_2": 0 * ones, "scale": ones, "bias": 0 * ones, "val_3": np.float32([0.5]), "one": np.float32([2]), "mask": mask,
        "gain": np.float32([1]),
    }  # fmt: skip
    graph = load(_with(text, **stored))
    assert [v.params["name"] for v in graph.by_role("parameter")] == ["scale", "bias", "one", "gain"]
    assert set(graph.info["frozen"]) == {"val_1", "val_2", "mask"}


@pytest.mark.parametrize(
    "name", ["/block/Constant_4_output_0", "Constant_output_0", "lifted_tensor_0", "clone", "clone_3"]
)
def test_what_an_exporter_calls_a_constant_of_the_code_is_none(name: str) -> None:
    text = """g (float[N, 3] x) => (float[N, 3] y) {
      c = Constant <value = float[3] {1, 2, 3}> () w = Constant <value = float[3] {1, 2, 3}> () a = Mul (x, c) y = Add (a, w)
    }"""
    model = parse(text)
    model.graph.node[0].output[0] = model.graph.node[2].input[1] = name
    assert [v.params["name"] for v in load(model).by_role("parameter")] == ["w"]


def test_an_exporter_that_tells_weights_from_buffers_is_believed() -> None:
    kinds = {
        "temperature": "PARAMETER", "table": "BUFFER", "inv_freq": "PARAMETER", "mask": "PARAMETER", "lifted_tensor_0": "CONSTANT_TENSOR",
        "block.w": "PARAMETER", "w": "PARAMETER", "gain": "PARAMETER", "t": "PARAMETER", "rates": "BUFFER",
    }  # fmt: skip
    folded = {
        "clone": ["block.w"], "clone_1": ["w"], "clone_2": ["lifted_tensor_0", "val_3"], "sum_1": ["rates", "clone"], "exp": ["t", "mul_2"],
        "val_1": ["gain"], "val_2": ["val_7"],
    }  # fmt: skip
    stored = ["temperature", "table", "inv_freq", "mask", *folded, "plain"]
    values = {n: np.float32([-np.inf, 1, 2] if n == "mask" else range(1, 4)) for n in stored}
    values |= {n: np.float32(2) for n in ("temperature", "exp")} | {n: np.float32([2]) for n in ("val_1", "val_2")}
    lines = " ".join(f"y{i + 1} = Mul (y{i}, {n})" for i, n in enumerate(stored))
    model = _with(f"g (float[N, 3] y0) => (float[N, 3] y{len(stored)}) {{ {lines} }}", **values)
    by_name = load(model)
    assert set(by_name.info["frozen"]) == {"clone", "clone_1", "clone_2", "inv_freq", "mask"}
    text = "\n".join(f"p_{i}: {kind} target='{name}'" for i, (name, kind) in enumerate(kinds.items()))
    model.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=text)
    for name, made_from in folded.items():
        info = model.graph.value_info.add(name=name)
        info.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value=repr(made_from))
    graph = load(model)
    assert names(graph, "parameter") == {"temperature", "inv_freq", "mask", "clone", "clone_1", "exp", "val_1", "plain"}
    assert set(graph.info["frozen"]) == {"table", "clone_2", "sum_1"}


def test_a_parameter_that_an_exporter_computed_with_and_kept_is_named() -> None:
    """`x * w / (1 - w)` has one parameter; with `1 - w` folded, its gradient is in two tensors, which no one can put together again."""
    rng = np.random.default_rng(0)
    w, e = (rng.random(shape, np.float32) for shape in ((3,), (3, 3)))
    text = "g (float[N, 3] x) => (float[N, 3] y) { a = Mul (x, w) b = Div (a, sub) c = MatMul (b, e) y = MatMul (c, val_1) }"
    model = _with(text, w=w, sub=1 - w, e=e, val_1=e.T.copy())
    told = "p_w: PARAMETER target='w'\np_e: PARAMETER target='e'\nb: BUFFER target='t'"
    model.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=told)
    for name, made_from in {"sub": ["w", "t"], "val_1": ["e"]}.items():
        info = model.graph.value_info.add(name=name)
        info.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value=repr(made_from))
    with pytest.warns(PullbackWarning, match="w, sub are trained apart") as caught:
        graph = load(model)
    assert len(caught) == 1, "a transpose is tied to its matrix"
    assert names(graph, "parameter") == {"w", "sub", "e"}


def test_scales_of_quantised_operators_are_no_weights() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    g (uint8[N, 2] x) => (float[N, 2] y)
    <float[1] s = {0.1}, uint8 z = {0}, uint8[2, 2] w = {1, 2, 3, 4}, float[2] each = {0.1, 0.2}, uint8[2] zeros = {0, 0},
     float[1] r = {0.5}, float[2] t = {1, 2}> {
      a = com.microsoft.QGemm (x, s, z, w, each, zeros, , r, z)
      b = com.microsoft.QLinearAdd (a, r, z, x, s, z, r, z)
      c = com.microsoft.QLinearSigmoid (b, r, z, s, z)
      d = DequantizeLinear (c, s, z)
      y = Mul (d, t)
    }"""
    graph = load(onnx.parser.parse_model(text))
    assert names(graph, "parameter") == {"t"}
    assert {"s", "each", "r"} <= set(graph.info["frozen"])


def test_one_number_is_a_weight_where_the_exporter_gave_it_a_name_of_the_network() -> None:
    names = ["scale", "blocks_0.alpha", "val_3", "onnx__Mul_7", "p.0"]
    lines = " ".join(f"y{i + 1} = Mul (y{i}, s{i})" for i in range(len(names)))
    model = _with(f"g (float[N] y0) => (float[N] y5) {{ {lines} }}", **{f"s{i}": np.float32(2) for i in range(5)})
    for i, name in enumerate(names):
        model.graph.initializer[i].name = model.graph.node[i].input[1] = name.replace("onnx__", "onnx::")
        model.graph.node[i].name = f"/blocks.0/Mul_{i}"
    assert not list(load(model).by_role("parameter")), "other producers' numbers are constants"
    model.producer_name = "pytorch"
    assert [v.params["name"] for v in load(model).by_role("parameter")] == ["scale", "blocks_0.alpha", "p.0"]
    for i, node in enumerate(model.graph.node):
        node.name = f"node_{i}"
    assert not list(load(model).by_role("parameter")), "the newer exporter says which are weights"


def test_frequencies_of_rotary_positions_are_no_weights() -> None:
    name = "model.rotary_emb.inv_freq"
    model = _with("g (float[N, 3] x) => (float[N, 3] y) { y = Mul (x, f) }", f=np.float32([1, 0.1, 0.01]))
    model.graph.initializer[0].name = model.graph.node[0].input[1] = name
    assert list(load(model).info["frozen"]) == [name]


# ---- sizes that the model forces -------------------------------------------------------------------------------------------------------


def test_sizes_that_are_halved_and_doubled_are_multiples() -> None:
    text = """g (float[N, 1, H, 8] x) => (float[N, 4, H, 8] y) {
      a = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x)
      b = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a)
      c = Resize <mode = "nearest"> (b, , scales)
      d = Concat <axis = 1> (a, c)
      e = Resize <mode = "nearest"> (d, , scales)
      f = Add (x, e)
      y = Concat <axis = 1> (x, f, x)
    }"""
    graph = load(_with(text, scales=np.float32([1, 1, 2, 2])))
    assert repr(graph["y"].type) == "f32[N, 4, H, 8]"
    assert "4*(H//4) == H" in [str(c) for c in graph.constraints]
    x = np.random.default_rng(0).standard_normal((2, 1, 8, 8)).astype(np.float32)
    assert evaluate(graph, {"x": x})["y"].shape == (2, 4, 8, 8)


@pytest.mark.parametrize(
    ("node", "inputs", "forced"),
    [
        ('y = ai.onnx.ml.FeatureVectorizer <inputdimensions = [3, 2]> (a, b)', "float[N, 3] a, float[M, 2] b", "N == M"),
        ('y = com.microsoft.MatMulNBits <K = 16, N = 2, bits = 4, block_size = 16> (a, q, s)', "float[3, k] a", "k == 16"),
    ],
)  # fmt: skip
def test_sizes_that_an_operator_computes_with_as_equal_are_one(node: str, inputs: str, forced: str) -> None:
    weights = (
        "<uint8[2, 1, 8] q = {0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}, float[2] s = {1, 2}>" if "q, s" in node else ""
    )
    domains = '"" : 17, "ai.onnx.ml" : 3, "com.microsoft" : 1'
    text = f"<ir_version: 8, opset_import: [{domains}]> m ({inputs}) => (float[P, Q] y) {weights} {{ {node} }}"
    assert forced in [str(c) for c in load(onnx.parser.parse_model(text)).constraints]
