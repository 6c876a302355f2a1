"""Graphs as text: what prints can be parsed, exactly; what cannot be parsed is refused with the line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pullback.algebra import primitives as p
from pullback.algebra.calculus import gradient
from pullback.algebra.dims import dim, floordiv, mod
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Constant, Constraint, Graph, Role, Value, at, bind, building
from pullback.algebra.origin import Origin, Source
from pullback.algebra.primitives.control import body_of
from pullback.algebra.primitives.record import Primitive
from pullback.algebra.text import TextError, constants, labels, parse, show
from pullback.algebra.types import DTYPES, TensorType, bf16, f16, f32, f64, i64, tensor
from pullback.algebra.verify import verify

N, M = dim("N"), dim("M")


def again(graph: Graph) -> Graph:
    text = show(graph)
    parsed = parse(text, constants(graph))
    assert show(parsed) == text
    return parsed


def dense() -> Graph:
    with building():
        x = p.input("x", tensor(f32, (N, 4)))
        w = p.input("fc/weight:0", tensor(f32, (4, 3)), "parameter")
        b = p.input("fc.bias", tensor(f32, (3,)), "parameter")
        h = p.add(p.dot(x, w, contract=((1,), (0,))), p.broadcast(b, shape=(N, 3), axes=(1,)))
        y = p.select(p.less_equal(h, p.number(0, h)), p.number(0, h), h)
    data = {"fc.bias": Constant(np.array([1, 2, 3], np.float32))}
    return Graph((x, w, b), {"y": y}, "dense", tensors={"fc.out": h}, data=data)


def test_a_layer_reads_as_it_should() -> None:
    assert (
        show(dense())
        == """\
graph dense(x: f32[N, 4], @parameter "fc/weight:0": f32[4, 3], @parameter fc.bias: f32[3]) {
  fc.out.0: f32[N, 3] = dot x, "fc/weight:0" contract=[[1],[0]]
  fc.out.1: f32[N, 3] = broadcast fc.bias axes=[1]
  fc.out: f32[N, 3] = add fc.out.0, fc.out.1
  y.0: f32[] = literal 0.0
  y.1: f32[N, 3] = broadcast y.0 axes=[]
  y.2: bool[N, 3] = less_equal fc.out, y.1
  y: f32[N, 3] = select y.2, y.1, fc.out
  return y=y
}"""
    )


def test_its_gradient_reads_as_it_should() -> None:
    assert (
        show(gradient(dense(), of="y", wrt="fc.bias"))
        == """\
graph dense_gradient(
  x: f32[N, 4],
  @parameter "fc/weight:0": f32[4, 3],
  @parameter fc.bias: f32[3],
  @seed(y) seed_y: f32[N, 3]
) {
  fc.out.0: f32[N, 3] = dot x, "fc/weight:0" contract=[[1],[0]]
  fc.out.1: f32[N, 3] = broadcast fc.bias axes=[1]
  fc.out: f32[N, 3] = add fc.out.0, fc.out.1
  y.0: f32[] = literal 0.0
  y.1: f32[N, 3] = broadcast y.0 axes=[]
  y.2: bool[N, 3] = less_equal fc.out, y.1
  y: f32[N, 3] = select y.2, y.1, fc.out
  grad_fc.bias.0: f32[N, 3] = select y.2, y.1, seed_y
  grad_fc.bias: f32[3] = reduce_sum grad_fc.bias.0 axes=[0]
  return y=y, @gradient(fc.bias) grad_fc.bias=grad_fc.bias
}"""
    )


def test_what_was_printed_means_the_same() -> None:
    graph = dense()
    parsed = verify(again(graph))
    feeds = {"x": np.ones((2, 4), np.float32), "fc/weight:0": np.arange(12, dtype=np.float32).reshape(4, 3) - 5}
    np.testing.assert_array_equal(evaluate(parsed, feeds)["y"], evaluate(graph, feeds)["y"])
    assert list(parsed.tensors) == ["fc.out"]
    assert parsed["fc/weight:0"].params["role"] == "parameter"
    assert parsed.data["fc.bias"].array.tolist() == [1, 2, 3]


def test_a_label_is_never_given_twice() -> None:
    with building():
        x = p.input("x", tensor(f64, (2,)))
        y = p.exp(p.sin(p.cos(x)))
        z = p.neg(p.tanh(x))
    graph = Graph((x,), {"y": y, "x": z, "y.0": p_tanh(z)}, tensors={"y.1": y.operands[0]})
    found = labels(graph)
    assert len(set(found.values())) == len(graph.nodes)
    assert found[y.operands[0]] == "y.1"
    assert found[y] == "y"
    assert found[x] == "x"
    assert again(graph).outputs.keys() == graph.outputs.keys()


def p_tanh(z: Value) -> Value:
    """The operand of a negation: an inner value that gets an output of its own."""
    return z.operands[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fc.weight", "fc.weight"), ("layers.0.weight", "layers.0.weight"), ("h.0", '"h.0"'), ("h.0.1", '"h.0.1"'),
        ("a.1b", "a.1b"),
        ("h.", '"h."'), (".h", '".h"'), ("0.weight", '"0.weight"'), ("return", '"return"'), ("a.return", "a.return"),
        ("ü", '"\\u00fc"'),
        ("a b", '"a b"'), ('say "x"', '"say \\"x\\""'), ("", '""'), ("N", "N"), ("data", "data"), ("f32", "f32"),
        ("true", "true"),
    ],
)  # fmt: skip
def test_any_name_is_a_name(name: str, text: str) -> None:
    with building():
        x = p.input(name, tensor(f64, (N,)), "parameter")
        y = p.sin(p.exp(x))
        z = p.neg(p.tanh(x))
    graph = Graph((x,), {f"{name}!": y, f"{name}_": z}, name, tensors={}, roles={f"{name}!": Role("gradient", name)})
    assert f"@parameter {text}: f64[N]" in show(graph)
    parsed = again(graph)
    assert parsed.inputs[0].name == name
    assert list(parsed.outputs) == [f"{name}!", f"{name}_"]
    assert parsed.roles == graph.roles
    assert parsed.name == name


def test_other_names_of_a_tensor_are_kept() -> None:
    with building():
        x = p.input("x", tensor(f64, (2,)))
        y = p.exp(x)
    graph = Graph((x,), {"y": y, "same": y, "through": x}, tensors={"y": y, "act": y, "identity": x})
    parsed = again(graph)
    assert set(parsed.tensors) == {"act", "identity"}
    assert parsed.outputs["same"] is parsed.outputs["y"] is parsed.tensors["act"]
    assert parsed.outputs["through"] is parsed.inputs[0] is parsed.tensors["identity"]


def test_roles_constraints_and_dims_that_may_be_empty_are_kept() -> None:
    empty = dim("K", least=0)
    with building():
        x = p.input("x", tensor(f32, (N, M, 32)))
        s = p.input("exp_avg_w", tensor(f32, (empty, floordiv(N, 2))), "slot")
        y, g = p.exp(x), p.neg(s)
    constraints = (
        Constraint(N, "divides", 2, "Reshape node 'r'"),
        Constraint(mod(M, 3) + 1, "==", 2),
        Constraint(N, ">=", M),
    )
    roles = {"g": Role("gradient", "w x"), "exp_avg_w": Role("slot", "w x"), "y": Role("output")}
    graph = Graph((x, s), {"y": y, "g": g}, "a graph", roles=roles, constraints=constraints)
    text = show(graph)
    assert "  where N % 2 == 0 \"Reshape node 'r'\"" in text
    assert '@slot("w x") exp_avg_w: f32[K, N//2]' in text
    parsed = again(graph)
    assert parsed.constraints == constraints
    assert parsed.roles == {k: v for k, v in roles.items() if k != "y"}
    assert parsed.inputs[1].shape[0] == empty
    assert not parsed.inputs[1].shape[0].is_positive  # type: ignore[union-attr]


def test_what_constraints_say_of_quotients_holds_while_parsing() -> None:
    text = """graph g(x: f32[min(N, 8)], y: f32[N]) {
  where min(8, N) == N
  z: f32[N] = add x, y
  return z=z
}"""
    assert parse(text).outputs["z"].shape == (N,)


def _scan(x: Value, w: Value) -> Value:
    def step(h: Value, x: Value, w: Value) -> list[Value]:
        return [p.tanh(p.add(p.mul(h, w), x))]

    inner = TensorType(x.dtype, x.shape[1:])
    body = body_of(step, [("h", inner), ("x", inner), ("w", inner)])
    return p.scan([w], [x], [w], body, length=x.shape[0], reverse=True)[0]


def test_nested_graphs_print_and_parse() -> None:
    with building():
        x, w = p.input("x", tensor(f64, (N, 2))), p.input("w", tensor(f64, (2,)))
        c = p.input("c", TensorType(DTYPES["bool"], ()))
        h = _scan(x, w)
        types = [("h", TensorType(f64, (2,)))]
        y = p.cond(c, [h], body_of(lambda h: [p.sin(h)], types, name="then"), body_of(lambda h: [p.neg(h)], types))[0]
    graph = Graph((x, w, c), {"y": y}, "recurrent")
    assert "body=graph body(" in show(graph)
    parsed = again(graph)
    back = gradient(parsed, wrt=["x", "w"])
    again(back)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((4, 2)), "w": rng.standard_normal(2), "c": np.array(True), "seed_y": np.ones(2)}
    for found, expected in zip(
        evaluate(back, feeds).values(), evaluate(gradient(graph, wrt=["x", "w"]), feeds).values(), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


# ---- literals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
@settings(max_examples=25, deadline=None)
@given(raw=st.binary(min_size=48, max_size=48), shape=st.sampled_from([(), (2,), (2, 3), (1, 1, 3), (0, 2)]))
def test_literals_of_every_dtype_round_trip_to_the_bit(name: str, raw: bytes, shape: tuple[int, ...]) -> None:
    dtype, count = DTYPES[name], int(np.prod(shape, dtype=np.int64))
    numbers = np.frombuffer(raw, np.uint8)
    if dtype.kind == "b":
        array = (numbers[:count] % 2).astype(np.bool_).reshape(shape)
    elif dtype.bits < 8 and dtype.kind in "iu":
        array = (
            (numbers[:count].astype(np.int64) % 2**dtype.bits - (2 ** (dtype.bits - 1) if dtype.kind == "i" else 0))
            .astype(dtype.numpy)
            .reshape(shape)
        )
    elif dtype.bits < 8:
        array = (numbers[:count] % 16).view(dtype.numpy).reshape(shape)
    else:
        array = np.frombuffer(
            raw[: count * dtype.numpy.itemsize].ljust(count * dtype.numpy.itemsize, b"\0"), dtype.numpy
        ).reshape(shape)
    with building():
        y = p.literal(Constant(array))
    (literal,) = again(Graph((), {"y": y})).outputs.values()
    assert literal.params["value"].array.tobytes() == array.tobytes()
    assert literal.shape == shape


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.float32(0.1), "0.1"), (np.float64(0.1), "0.1"), (np.float16(0.1), "0.1"), (np.float32(1e30), "1e+30"),
        (np.float64(-0.0), "-0.0"),
        (np.float32(np.inf), "inf"), (np.float64(-np.inf), "-inf"), (np.float32(np.nan), "nan"),
        (np.int64(-(2**63)), str(-(2**63))),
        (np.bool_(True), "true"), (np.zeros((0, 3)), "[]"), (np.float32([[1, 2], [3, 4]]), "[[1.0, 2.0], [3.0, 4.0]]"),
        (np.uint32([0x7FC00001]).view(np.float32), "[0x7fc00001]"), (np.asarray(0.1, bf16.numpy), "0.10009765625"),
    ],
)  # fmt: skip
def test_how_numbers_are_written(array: Any, text: str) -> None:
    with building():
        y = p.literal(Constant(np.asarray(array)))
    assert f" = literal {text}\n" in show(Graph((), {"y": y}))


def test_a_large_literal_stands_in_data_under_its_label() -> None:
    with building():
        x = p.input("x", tensor(f32, (65,)))
        table = p.literal(np.arange(65, dtype=np.float32))
        y = p.mul(x, table)
    graph = Graph((x,), {"y": y}, tensors={"ta ble": table})
    assert '"ta ble": f32[65] = literal data("ta ble")' in show(graph)
    assert again(graph).outputs["y"].operands[1].params["value"] is table.params["value"]
    with pytest.raises(TextError, match="'ta ble' are not in `data`"):
        parse(show(graph))


def test_a_constant_that_is_no_literal_is_written_with_its_type() -> None:
    table = Primitive("table", lambda *, values, limits: TensorType(f16, values.shape), lambda **_: None, ())
    with building():
        y = bind(
            table,
            values=Constant(np.float16([1, 2])),
            limits=(1.0, -np.inf, None, True, f64, "a b", N + 1, TensorType(i64, (N,))),
        )
    p.BY_NAME["table"] = table
    try:
        parsed = again(Graph((), {"y": y}))
    finally:
        del p.BY_NAME["table"]
    params = parsed.outputs["y"].params
    assert params["values"] == Constant(np.float16([1, 2]))
    assert params["limits"] == (1.0, -np.inf, None, True, f64, "a b", N + 1, TensorType(i64, (N,)))


def test_origins_are_comments() -> None:
    with building():
        x = p.input("x", tensor(f32, (N,)))
        with at(Origin("forward", Source("act", "Exp", "", 13), ("fold",))):
            y = p.exp(x)
    graph = Graph((x,), {"y": y})
    assert "  y: f32[N] = exp x  # act / fold\n" in show(graph, origins=True)
    assert show(parse(show(graph, origins=True))) == show(graph)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("graph g(x: f32[N]) { y: f32[N] = foo x return y=y }", "line 1: no primitive 'foo'"),
        ("graph g(x: f32[N]) {\n  y: f32[N] = exp z\n  return y=y }", "line 2: z is not defined"),
        ("graph g(x: f32[N]) { y: f32[M] = exp x return y=y }", r"y is said to be f32\[M\], but exp gives f32\[N\]"),
        ("graph g(x: f32[N]) { y: f64[N] = exp x return y=y }", r"said to be f64\[N\]"),
        ("graph g(x: f32[N], x: f32[N]) { return x=x }", "two inputs 'x'"),
        ("graph g(x: f32[N]) { y: f32[N] = exp x y: f32[N] = exp x return y=y }", "y is defined twice"),
        ("graph g(x: q7[N]) { return x=x }", "no dtype 'q7'"),
        ("graph g(x: f32[N]) { y: f32[N] = exp x }", "expected"),
        ("graph g(x: f32[N]) { return y=y } extra", "extra|not defined"),
        ("graph g() { y: f32[2] = literal [1.0] return y=y }", "1 elements given for"),
        ("graph g() { y: f32[1] = literal [foo] return y=y }", "a number expected"),
        ("graph g(x: f32[N]) { y: f32[N] = exp x $ return y=y }", "unexpected"),
        ("graph g(x: f32[2]) { y: f32[3] = fold x return y=y }", "the parameters of fold"),
        ("", "'graph' expected"),
    ],
)
def test_text_that_is_no_graph_is_refused_with_the_line(text: str, message: str) -> None:
    with pytest.raises(TextError, match=message):
        parse(text)


def test_everything_wrong_with_a_graph_is_listed() -> None:
    from pullback.algebra.errors import Refusal

    with building():
        x, z = p.input("x", tensor(f32, (N,))), p.input("z", tensor(f32, (N,)), "parameter")
        y = p.mul(p.exp(x), z)
        stray = p.iota(M)
    object.__setattr__(y, "type", tensor(f32, (N, 2)))
    bad = Graph((x,), {"y": y, "i": stray}, roles={"q": Role("output"), "y": Role("nonsense")},
                data={"x": Constant(np.zeros(3)), "v": Constant(np.zeros(3))})  # fmt: skip
    with pytest.raises(Refusal) as found:
        verify(bad)
    message = str(found.value)
    for part in (
        "'z' is used, but not an input", "stored as f32[N, 2], but has type f32[N]",
        "the dims M are not those of any input",
        "a role is given for 'q'", "unknown role 'nonsense'", "initial value of 'x' is float64[3]",
        "given for 'v', which is no input",
    ):  # fmt: skip
        assert part in message


# ---- golden pullbacks ------------------------------------------------------------------------------------------------

GOLDEN = {
    "dot": (
        "graph g(x: f32[N, 4], w: f32[4, 3]) { y: f32[N, 3] = dot x, w contract=[[1],[0]] return y=y }",
        """\
grad_x.0: f32[N, 4] = dot seed_y, w contract=[[1],[1]]
grad_x: f32[N, 4] = transpose grad_x.0 perm=[0,1]
grad_w.0: f32[4, 3] = dot x, seed_y contract=[[0],[0]]
grad_w: f32[4, 3] = transpose grad_w.0 perm=[0,1]""",
    ),
    "strided slice": (
        "graph g(x: f32[2*N]) { y: f32[N] = slice x start=[0] limit=[2*N] stride=[2] return y=y }",
        "grad_x: f32[2*N] = pad seed_y low=[0] high=[1] interior=[1]",
    ),
    "window": (
        "graph g(x: f32[N, 8]) { y: f32[N, 3, 3] = window x axes=[1] sizes=[3] strides=[2] return y=y }",
        "grad_x: f32[N, 8] = fold seed_y axes=[1] strides=[2]",
    ),
    "gather": (
        "graph g(x: f32[N, 4], i: i64[M]) { y: f32[M, 4] = gather x, i axis=0 return y=y }",
        "grad_x: f32[N, 4] = scatter_add seed_y, i axis=0",
    ),
    "broadcast": (
        "graph g(x: f32[N]) { y: f32[2, N, 3] = broadcast x axes=[1] return y=y }",
        "grad_x: f32[N] = reduce_sum seed_y axes=[0,2]",
    ),
    "a value used twice": (
        "graph g(x: f32[N]) { a: f32[N] = exp x y: f32[N] = mul a, a return y=y }",
        """\
grad_x.0: f32[N] = mul seed_y, a
grad_x.1: f32[N] = mul a, seed_y
grad_x.2: f32[N] = add grad_x.0, grad_x.1
grad_x: f32[N] = mul grad_x.2, a""",
    ),
    "amax": (
        "graph g(x: f32[N, 3]) { y: f32[N] = reduce_max x axes=[1] return y=y }",
        """\
grad_x.0: f32[N, 3] = broadcast y axes=[0]
grad_x.1: bool[N, 3] = equal x, grad_x.0
grad_x.2: f32[] = literal 1.0
grad_x.3: f32[N, 3] = broadcast grad_x.2 axes=[]
grad_x.4: f32[] = literal 0.0
grad_x.5: f32[N, 3] = broadcast grad_x.4 axes=[]
grad_x.6: f32[N, 3] = select grad_x.1, grad_x.3, grad_x.5
grad_x.7: f32[N] = reduce_sum grad_x.6 axes=[1]
grad_x.8: f32[N] = div seed_y, grad_x.7
grad_x.9: f32[N, 3] = broadcast grad_x.8 axes=[0]
grad_x: f32[N, 3] = select grad_x.1, grad_x.9, grad_x.5""",
    ),
    "softmax": (
        """graph g(x: f32[N, 3]) {
          m: f32[N] = reduce_max x axes=[1]
          c: f32[N] = stop_gradient m
          b: f32[N, 3] = broadcast c axes=[0]
          n: f32[N, 3] = neg b
          s: f32[N, 3] = add x, n
          e: f32[N, 3] = exp s
          t: f32[N] = reduce_sum e axes=[1]
          d: f32[N, 3] = broadcast t axes=[0]
          y: f32[N, 3] = div e, d
          return y=y
        }""",
        """\
grad_x.0: f32[N, 3] = div seed_y, d
grad_x.1: f32[N, 3] = div y, d
grad_x.2: f32[N, 3] = mul seed_y, grad_x.1
grad_x.3: f32[N, 3] = neg grad_x.2
grad_x.4: f32[N] = reduce_sum grad_x.3 axes=[1]
grad_x.5: f32[N, 3] = broadcast grad_x.4 axes=[0]
grad_x.6: f32[N, 3] = add grad_x.0, grad_x.5
grad_x: f32[N, 3] = mul grad_x.6, e""",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_pullback_reads_as_it_should(name: str) -> None:
    text, expected = GOLDEN[name]
    found = show(gradient(parse(text)))
    lines = [line.strip() for line in found.splitlines() if line.strip().startswith("grad_")]
    assert "\n".join(lines) == expected, found
