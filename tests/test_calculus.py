"""Derivatives of graphs: gradient, JVP, Jacobian, Hessian, alone and of each other."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from pullback.algebra import composites as c
from pullback.algebra import primitives as p
from pullback.algebra.calculus import gradient, hessian, jacobian, jvp
from pullback.algebra.dims import dim, floordiv
from pullback.algebra.errors import PullbackWarning, Refusal
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Constant, Graph, Value, building
from pullback.algebra.primitives.control import body_of
from pullback.algebra.text import constants, parse, show
from pullback.algebra.types import f64, i64, tensor
from pullback.algebra.verify import verify

N = dim("N")


def network() -> Graph:
    """Two layers with an inner tensor, a scalar and a matrix output, and an integer output beside."""
    with building():
        x = p.input("x", tensor(f64, (N, 4)))
        w = p.input("w", tensor(f64, (4, 3)), "parameter")
        b = p.input("b", tensor(f64, (3,)), "parameter")
        h = p.tanh(p.add(p.dot(x, w, contract=((1,), (0,))), p.broadcast(b, shape=(N, 3), axes=(1,))))
        y = c.softmax(h, (1,))
        total = p.reduce_sum(c.square(y), axes=(0, 1))
        top = p.argmax(y, axis=1)
    data = {"b": Constant(np.array([0.1, -0.2, 0.3]))}
    return Graph((x, w, b), {"y": y, "total": total, "top": top}, "net", tensors={"h": h}, data=data)


def point(n: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n)
    return {"x": rng.standard_normal((n, 4)), "w": rng.standard_normal((4, 3))}


def differences(graph: Graph, feeds: Mapping[str, np.ndarray], of: str, wrt: str, step: float = 1e-4) -> np.ndarray:
    """The Jacobian, element by element, by central differences extrapolated."""
    at = np.array(feeds[wrt] if wrt in feeds else graph.data[wrt].array)
    out = np.empty((*evaluate(graph, feeds)[of].shape, *at.shape))

    def moved(index: tuple[int, ...], by: float) -> np.ndarray:
        x = at.copy()
        x[index] += by
        return evaluate(graph, {**feeds, wrt: x})[of]

    for i in np.ndindex(*at.shape):
        coarse = (moved(i, step) - moved(i, -step)) / (2 * step)
        fine = (moved(i, step / 2) - moved(i, -step / 2)) / step
        out[(..., *i)] = (4 * fine - coarse) / 3
    return out


def test_a_gradient_agrees_with_differences_for_inputs_and_parameters() -> None:
    graph = network()
    back = verify(gradient(graph, of=["total"], wrt=["x", "w", "b"]))
    found = evaluate(back, point())
    for name in ("x", "w", "b"):
        np.testing.assert_allclose(found[f"grad_{name}"], differences(graph, point(), "total", name), atol=1e-9)


def test_defaults_are_the_floating_outputs_and_the_parameters() -> None:
    back = gradient(network())
    assert [v.params["name"] for v in back.inputs] == ["x", "w", "b", "seed_y"]
    assert list(back.outputs) == ["y", "total", "top", "grad_w", "grad_b"]
    assert back.roles["grad_w"].role == "gradient"
    assert back.roles["grad_w"].parameter == "w"
    assert back.inputs[-1].params["role"] == "seed"
    assert back.data["b"].array.tolist() == [0.1, -0.2, 0.3]


def test_inputs_are_the_default_where_there_are_no_parameters() -> None:
    graph = parse("graph g(x: f64[N], i: i64[N]) { y: f64[N] = exp x return y=y }")
    assert list(gradient(graph).outputs) == ["y", "grad_x"]


def test_a_gradient_with_respect_to_an_inner_tensor_and_to_what_it_depends_on() -> None:
    graph = network()
    found = evaluate(gradient(graph, of="total", wrt=["h", "x"]), point())
    after = parse(
        """graph after(h: f64[N, 3]) {
          m: f64[N] = reduce_max h axes=[1]
          a: f64[N, 3] = broadcast m axes=[0]
          b: f64[N, 3] = neg a
          d: f64[N, 3] = add h, b
          e: f64[N, 3] = exp d
          s: f64[N] = reduce_sum e axes=[1]
          t: f64[N, 3] = broadcast s axes=[0]
          y: f64[N, 3] = div e, t
          q: f64[N, 3] = mul y, y
          total: f64[] = reduce_sum q axes=[0,1]
          return total=total
        }"""
    )
    with_h = graph.with_(outputs={"h": graph["h"]})
    h = evaluate(with_h, point())["h"]
    np.testing.assert_allclose(found["grad_h"], differences(after, {"h": h}, "total", "h"), atol=1e-9)
    np.testing.assert_allclose(found["grad_x"], differences(graph, point(), "total", "x"), atol=1e-9)


def test_an_inner_tensor_can_be_differentiated_even_where_no_output_needs_it() -> None:
    with building():
        x = p.input("x", tensor(f64, (2,)))
        y = p.exp(x)
        h = p.sin(p.mul(x, y))
    back = gradient(Graph((x,), {"y": y}, tensors={"h": h}), of="h", wrt="x")
    assert verify(back)
    a = np.array([0.3, -1.0])
    found = evaluate(back, {"x": a, "seed_h": np.ones(2)})["grad_x"]
    np.testing.assert_allclose(found, np.cos(a * np.exp(a)) * np.exp(a) * (1 + a))


def test_seeds_weigh_the_rows_of_the_jacobian() -> None:
    graph, seed = network(), np.random.default_rng(1).standard_normal((5, 3))
    found = evaluate(gradient(graph, of="y", wrt="w"), {**point(), "seed_y": seed})["grad_w"]
    expected = np.einsum("nc,ncij->ij", seed, differences(graph, point(), "y", "w"))
    np.testing.assert_allclose(found, expected, atol=1e-8)


def test_a_seed_can_be_named_or_be_an_input_that_is_there() -> None:
    graph = network()
    assert gradient(graph, of="y", seeds={"y": "dy"}).inputs[-1].name == "dy"
    assert gradient(graph, of="total", seeds={"total": "dl"}).inputs[-1].name == "dl"
    reused = parse("graph g(x: f64[N], u: f64[N]) { y: f64[N] = exp x return y=y }")
    back = gradient(reused, wrt="x", seeds={"y": "u"})
    assert [v.name for v in back.inputs] == ["x", "u"]
    with pytest.raises(Refusal, match="seed"):
        gradient(graph, of="y", seeds={"y": "x"})


def test_names_that_are_taken_get_a_suffix() -> None:
    graph = parse("graph g(x: f64[N], seed_y: f64[N]) { y: f64[N] = mul x, seed_y return y=y, grad_x=x }")
    back = gradient(graph, of="y", wrt=["x"])
    assert [v.name for v in back.inputs] == ["x", "seed_y", "seed_y_1"]
    assert list(back.outputs) == ["y", "grad_x", "grad_x_1"]
    assert back.info["renamed"] == {"seed_y": "seed_y_1", "grad_x": "grad_x_1"}


def test_no_path_gives_zeros_and_one_warning() -> None:
    graph = parse("graph g(x: f64[N], z: f64[N, 2]) { y: f64[N] = floor x return y=y, z=z }")
    with pytest.warns(PullbackWarning, match="from 'x', 'z' to 'y'") as caught:
        back = gradient(graph, of="y", wrt=["x", "z"])
    assert len(caught) == 1
    found = evaluate(back, {"x": np.ones(3), "z": np.ones((3, 2)), "seed_y": np.ones(3)})
    assert found["grad_x"].tolist() == [0, 0, 0]
    assert found["grad_z"].shape == (3, 2)


def test_a_wrong_name_or_dtype_is_refused_and_everything_is_listed() -> None:
    with pytest.raises(Refusal, match="no tensor 'totl'; near names: total") as found:
        gradient(network(), of=["totl"], wrt=["q"])
    assert "no tensor 'q'" in str(found.value)
    with pytest.raises(Refusal, match="'top' is i64") as found:
        gradient(network(), of=["top"], wrt=["x"])
    with pytest.raises(Refusal, match="no floating"):
        gradient(parse("graph g(x: i64[N]) { y: i64[N] = neg x return y=y }"))


def test_an_output_that_is_an_input_has_its_seed_as_gradient() -> None:
    graph = parse("graph g(x: f64[N]) { return a=x, b=x }")
    back = gradient(graph)
    found = evaluate(back, {"x": np.zeros(2), "seed_a": np.ones(2), "seed_b": np.full(2, 3.0)})
    assert found["grad_x"].tolist() == [4, 4]


def test_a_gradient_graph_has_gradients_again() -> None:
    graph = network()
    back = gradient(graph, of="total", wrt="w")
    twice = verify(gradient(back, of="grad_w", wrt=["w", "x"]))
    assert "grad_w_1" in twice.outputs
    v = np.random.default_rng(2).standard_normal((4, 3))
    found = evaluate(twice, {**point(), "seed_grad_w": v})
    expected = np.einsum("ij,ijkl->kl", v, differences(back, point(), "grad_w", "w"))
    np.testing.assert_allclose(found["grad_w_1"], expected, atol=1e-8)
    expected = np.einsum("ij,ijkl->kl", v, differences(back, point(), "grad_w", "x"))
    np.testing.assert_allclose(found["grad_x"], expected, atol=1e-8)


@pytest.mark.parametrize("n", [1, 4])
def test_a_jvp_is_the_jacobian_times_the_tangent(n: int) -> None:
    graph = network()
    push = verify(jvp(graph, of=["y", "total"], wrt=["x", "w"]))
    rng, feeds = np.random.default_rng(n), point(n)
    tx, tw = rng.standard_normal((n, 4)), rng.standard_normal((4, 3))
    found = evaluate(push, {**feeds, "tangent_x": tx, "tangent_w": tw})
    for name, axes in (("y", "nc"), ("total", "")):
        expected = np.einsum(f"{axes}ij,ij->{axes}", differences(graph, feeds, name, "x"), tx)
        expected = expected + np.einsum(f"{axes}ij,ij->{axes}", differences(graph, feeds, name, "w"), tw)
        np.testing.assert_allclose(found[f"tangent_{name}"], expected, atol=1e-8)


def test_no_dummy_cotangent_is_left_in_a_jvp() -> None:
    names = {v.name for v in jvp(network()).nodes if v.primitive.name == "input"}
    assert names == {"x", "w", "b", "tangent_w", "tangent_b"}


def test_a_jvp_without_a_path_is_zero() -> None:
    graph = parse("graph g(x: f64[N]) { y: f64[N] = sign x return y=y }")
    found = evaluate(jvp(graph), {"x": np.ones(2), "tangent_x": np.ones(2)})
    assert found["tangent_y"].tolist() == [0, 0]


def test_hessian_vector_products_agree_forward_over_reverse_and_reverse_over_reverse() -> None:
    back = gradient(network(), of="total", wrt="w")
    v = np.random.default_rng(3).standard_normal((4, 3))
    forward = evaluate(jvp(back, of="grad_w", wrt="w"), {**point(), "tangent_w": v})["tangent_grad_w"]
    reverse = evaluate(gradient(back, of="grad_w", wrt="w"), {**point(), "seed_grad_w": v})["grad_w_1"]
    np.testing.assert_allclose(forward, reverse, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_a_jacobian_of_symbolic_size_is_a_loop_over_its_rows(n: int) -> None:
    graph = network()
    whole = verify(jacobian(graph, of=["y", "total"], wrt=["x", "b"]))
    assert any(v.primitive.name == "scan" for v in whole.nodes)
    found, feeds = evaluate(whole, point(n)), point(n)
    for y in ("y", "total"):
        for x in ("x", "b"):
            np.testing.assert_allclose(found[f"jacobian_{y}_{x}"], differences(graph, feeds, y, x), atol=1e-8)


def test_a_small_static_jacobian_is_unrolled_and_agrees_with_the_loop() -> None:
    text = "graph g(x: f64[{n}]) {{ a: f64[{n}] = sin x y: f64[{n}] = mul a, x return y=y }}"
    for n in (0, 1, 3, 40):
        graph = jacobian(parse(text.format(n=n)))
        assert any(v.primitive.name == "scan" for v in graph.nodes) == (n > 16)
        x = np.linspace(-1, 1, n)
        found = evaluate(graph, {"x": x})["jacobian_y_x"]
        np.testing.assert_allclose(found, np.diag(np.cos(x) * x + np.sin(x)), atol=1e-12)


def test_a_hessian_has_every_block_and_is_symmetric() -> None:
    graph = parse(
        """graph g(x: f64[N], z: f64[2]) {
          a: f64[N] = sin x
          s: f64[] = reduce_sum a axes=[0]
          q: f64[2] = mul z, z
          t: f64[] = reduce_sum q axes=[0]
          y: f64[] = mul s, t
          return y=y
        }"""
    )
    x, z = np.array([0.3, -0.7, 1.1]), np.array([0.5, -2.0])
    found = evaluate(verify(hessian(graph)), {"x": x, "z": z})
    np.testing.assert_allclose(found["hessian_x_x"], np.diag(-np.sin(x)) * (z @ z))
    np.testing.assert_allclose(found["hessian_x_z"], np.outer(np.cos(x), 2 * z))
    np.testing.assert_allclose(found["hessian_z_x"], found["hessian_x_z"].T)
    np.testing.assert_allclose(found["hessian_z_z"], np.sin(x).sum() * 2 * np.eye(2))


def test_a_hessian_of_what_is_no_scalar_is_refused() -> None:
    with pytest.raises(Refusal, match="one scalar is required"):
        hessian(network(), of=["y"])


def test_a_jacobian_can_be_differentiated() -> None:
    graph = parse("graph g(x: f64[N]) { a: f64[N] = sin x y: f64[N] = mul a, x return y=y }")
    whole = jacobian(graph)
    back = gradient(whole, of="jacobian_y_x", wrt="x")
    x, seed = np.array([0.2, -0.5, 1.5]), np.random.default_rng(0).standard_normal((3, 3))
    found = evaluate(back, {"x": x, "seed_jacobian_y_x": seed})["grad_x"]
    expected = np.einsum("ij,ijk->k", seed, differences(whole, {"x": x}, "jacobian_y_x", "x"))
    np.testing.assert_allclose(found, expected, atol=1e-8)


def test_derivative_graphs_print_and_parse() -> None:
    graph = network()
    for derived in (gradient(graph), jvp(graph), jacobian(graph, of="y"), hessian(graph, of="total", wrt="b")):
        text = show(derived)
        assert show(parse(text, constants(derived))) == text


def test_the_forward_part_of_a_gradient_graph_is_the_graph_itself() -> None:
    graph = network()
    back = gradient(graph)
    assert [v for v in back.nodes if v.phase == "forward" and v.name not in ("seed_y",)][: len(graph.nodes)]
    assert set(graph.nodes) <= set(back.nodes)
    assert {v.phase for v in set(back.nodes) - set(graph.nodes)} <= {"backward"}


def test_integer_inputs_take_no_part() -> None:
    with building():
        x = p.input("x", tensor(f64, (N, 3)))
        i = p.input("i", tensor(i64, (5,)))
        y = p.gather(x, i, axis=0)
    back = gradient(Graph((x, i), {"y": y}))
    assert list(back.outputs) == ["y", "grad_x"]
    feeds = {"x": np.ones((2, 3)), "i": np.array([0, 1, 1, -1, 0]), "seed_y": np.ones((5, 3))}
    assert evaluate(back, feeds)["grad_x"].tolist() == [[2] * 3, [3] * 3]


def recurrent() -> Graph:
    """A loop over N steps with a parameter: its last state and its stacked states."""
    with building():
        x, h = p.input("x", tensor(f64, (N, 2))), p.input("h", tensor(f64, (2,)))
        w = p.input("w", tensor(f64, (2, 2)), "parameter")

        def step(h: Value, x: Value, w: Value) -> list[Value]:
            new = p.tanh(p.add(p.dot(w, h, contract=((1,), (0,))), x))
            return [new, new]

        types = [("h", tensor(f64, (2,))), ("x", tensor(f64, (2,))), ("w", tensor(f64, (2, 2)))]
        last, states = p.scan([h], [x], [w], body_of(step, types), length=N)
        total = p.reduce_sum(c.square(last), axes=(0,))
    return Graph((x, h, w), {"states": states, "total": total}, "recurrent")


@pytest.mark.parametrize("n", [1, 4])
def test_derivatives_of_every_kind_go_through_loops(n: int) -> None:
    graph, rng = recurrent(), np.random.default_rng(n)
    feeds = {"x": rng.standard_normal((n, 2)), "h": rng.standard_normal(2), "w": rng.standard_normal((2, 2))}
    by_w = differences(graph, feeds, "states", "w")
    np.testing.assert_allclose(
        evaluate(verify(jacobian(graph, of="states", wrt="w")), feeds)["jacobian_states_w"], by_w, atol=1e-8
    )
    tangent = rng.standard_normal((2, 2))
    push = verify(jvp(graph, of=["states", "total"], wrt="w"))
    assert {v.name for v in push.nodes if v.primitive.name == "input"} == {"x", "h", "w", "tangent_w"}
    found = evaluate(push, {**feeds, "tangent_w": tangent})
    np.testing.assert_allclose(found["tangent_states"], np.einsum("ncij,ij->nc", by_w, tangent), atol=1e-8)
    back = gradient(graph, of="total", wrt=["w", "h", "x"])
    for name in ("w", "h", "x"):
        np.testing.assert_allclose(
            evaluate(back, feeds)[f"grad_{name}"], differences(graph, feeds, "total", name), atol=1e-8
        )
    second = evaluate(verify(hessian(graph, of="total", wrt=["w", "h"])), feeds)
    np.testing.assert_allclose(second["hessian_w_h"], differences(back, feeds, "grad_w", "h"), atol=1e-7)
    np.testing.assert_allclose(second["hessian_w_w"], differences(back, feeds, "grad_w", "w"), atol=1e-7)


def test_a_cotangent_has_the_type_of_its_primal_however_a_size_is_written() -> None:
    half, other = floordiv(N + 1, 2), N - floordiv(N, 2)  # the same size
    with building():
        x, w = p.input("x", tensor(f64, (N, half))), p.input("w", tensor(f64, (other, 3)))
        b = p.input("b", tensor(f64, (half,)))
        y = p.dot(x, w, contract=((1,), (0,)))
        z = p.add(p.broadcast(b, shape=(2, other), axes=(1,)), p.number(1, p.full(0, f64, (2, other))))
    back = verify(gradient(Graph((x, w, b), {"y": y, "z": z})))
    assert [back.outputs[f"grad_{n}"].type for n in ("x", "w", "b")] == [x.type, w.type, b.type]
    feeds = {
        "x": np.ones((5, 3)),
        "w": np.ones((3, 3)),
        "b": np.ones(3),
        "seed_y": np.ones((5, 3)),
        "seed_z": np.ones((2, 3)),
    }
    assert (evaluate(back, feeds)["grad_x"] == 3).all()


def test_what_a_model_forces_upon_its_sizes_holds_in_the_backward_pass() -> None:
    graph = parse(
        """graph g(x: f64[N, 3], table: f64[512, 3]) {
          where min(512, N) == N
          t: f64[N, 3] = slice table start=[0,0] limit=[min(512, N),3]
          s: f64[N, 3] = add x, t
          y: f64[N, 3] = mul s, s
          return y=y
        }"""
    )
    back = verify(gradient(graph))
    assert back.outputs["grad_table"].type == graph["table"].type
    assert not any(v.primitive.name == "reshape" for v in back.nodes)
    feeds = {"x": np.ones((2, 3)), "table": np.ones((512, 3)), "seed_y": np.ones((2, 3))}
    assert evaluate(back, feeds)["grad_table"].sum() == 24
    verify(jvp(graph))
    verify(gradient(back, of="grad_x"))
