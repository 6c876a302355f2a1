"""If, Loop and Scan of ONNX: in place where known, else `cond`, `scan` and `while`; their gradients; what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pullback
import pytest
from click.testing import CliRunner
from numerics import check_pullback, floats, pulled_back
from pullback.algebra import primitives as p
from pullback.algebra.calculus.vjp import vjp
from pullback.algebra.errors import PullbackError, Refusal
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Graph, building
from pullback.algebra.text import constants, parse, show
from pullback.algebra.verify import verify
from pullback.backends.onnx_export.emit import to_onnx
from pullback.frontends.cli import main
from pullback.frontends.onnx_import import load

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'


def model(text: str) -> onnx.ModelProto:
    parsed = onnx.parser.parse_model(HEAD + text)
    for i, node in enumerate(parsed.graph.node):
        node.name = node.name or f"n{i}"
    return parsed


def by_onnxruntime(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    wanted = {i.name for i in session.get_inputs()}
    return dict(zip(names, session.run(names, {k: v for k, v in feeds.items() if k in wanted}), strict=True))


def primitives(graph: Graph) -> list[str]:
    """Every primitive, those of nested graphs included."""
    found = []
    for v in graph.nodes:
        found.append(v.primitive.name)
        for inner in v.params.values():
            found += primitives(inner) if isinstance(inner, Graph) else []
    return found


def differentiated(graph: Graph, output: str = "y") -> Graph:
    """With the gradient of the sum of an output by every floating input and weight."""
    wanted = [v for v in graph.inputs if v.dtype.floating]
    with building(graph):
        y = graph.outputs[output]
        grads = vjp([y], [p.number(1, y)], wanted)
    named = {f"grad_{v.params['name']}": g for v, g in zip(wanted, grads, strict=True) if g is not None}
    return graph.with_(outputs={**graph.outputs, **named}, roles={})


def check(
    proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray], *, graph: Graph | None = None, output: str = "y"
) -> Graph:
    """Values are onnxruntime's on the model as it is, gradients those of differences, and the emitted graph gives both; text round trips."""
    graph = load(proto) if graph is None else graph
    verify(graph)
    for name, array in by_onnxruntime(proto, feeds).items():
        np.testing.assert_allclose(evaluate(graph, feeds)[name], array, rtol=1e-5, atol=1e-6)
    back = differentiated(graph, output)
    text = show(back)
    assert show(parse(text, constants(back))) == text
    values = evaluate(back, feeds)
    rng = np.random.default_rng(0)
    for name in [n for n in values if n.startswith("grad_")]:
        source = name.removeprefix("grad_")
        at = feeds[source] if source in feeds else graph.data[source].array
        direction = rng.standard_normal(at.shape).astype(at.dtype)
        up, down = (
            evaluate(graph, {**feeds, source: at + s * np.asarray(1e-2, at.dtype) * direction})[output]
            .astype(np.float64)
            .sum()
            for s in (1, -1)
        )
        np.testing.assert_allclose((values[name] * direction).sum(), (up - down) / 2e-2, rtol=2e-2, atol=2e-3)
    emitted = to_onnx(back)
    onnx.checker.check_model(emitted, full_check=True)
    for name, array in by_onnxruntime(emitted, feeds).items():
        np.testing.assert_allclose(array, values[name], rtol=1e-4, atol=1e-5)
    return back


X = np.asarray([[0.5, -1.0, 2.0], [1.5, 0.2, -0.7]], np.float32)


# ---- If --------------------------------------------------------------------------------------------------------------------------------

IF = """
main (bool c, float[N, 3] x) => (float[N, 3] y) <float[3] w = {1, 2, 3}> {
  y = If (c) <
    then_branch = t () => (a) { a = Mul (x, w) },
    else_branch = e () => (b) <float[3] v = {4, 5, 6}> { s = Sin (x)  b = Mul (s, v) }
  >
}
"""


@pytest.mark.parametrize("c", [True, False])
def test_a_condition_that_is_data_becomes_a_cond_with_its_gradient(c: bool) -> None:
    back = check(model(IF), {"c": np.asarray(c), "x": X})
    assert primitives(back).count("cond") == 2
    assert {v.params["name"] for v in back.parameters} == {"w", "n0/v"}


@pytest.mark.parametrize("value", [1, 0])
def test_a_branch_that_is_known_to_be_taken_is_put_in_place(value: int) -> None:
    proto = model(IF.replace("bool c, ", "").replace("<float[3] w", f"<bool c = {{{value}}}, float[3] w"))
    graph = load(proto)
    assert "cond" not in primitives(graph)
    assert {v.params["name"] for v in graph.parameters} == ({"w"} if value else {"n0/v"})
    check(proto, {"x": X})


def test_branches_that_store_tensors_of_one_name_have_two_parameters() -> None:
    proto = model(
        IF.replace("<float[3] w = {1, 2, 3}>", "")
        .replace("a = Mul (x, w)", "a = Mul (x, v)")
        .replace("(a) {", "(a) <float[3] v = {1, 2, 3}> {")
    )
    assert {v.params["name"] for v in load(proto).parameters} == {"n0/then_branch/v", "n0/else_branch/v"}


def test_branches_may_be_nested() -> None:
    proto = model("""
    main (bool c, bool d, float[N, 3] x) => (float[N, 3] y) <float[3] w = {1, 2, 3}> {
      y = If (c) <
        then_branch = t () => (a) { a = If (d) <then_branch = tt () => (p) { p = Mul (x, w) }, else_branch = te () => (q) { q = Neg (x) }> },
        else_branch = e () => (b) { b = Exp (x) }
      >
    }
    """)
    for c in (True, False):
        for d in (True, False):
            check(proto, {"c": np.asarray(c), "d": np.asarray(d), "x": X})


def test_a_condition_on_sizes_is_decided_when_the_model_is_read() -> None:
    proto = model("""
    main (float[N, 1, 3] x) => (y) {
      shape = Shape (x)  one = Constant <value_int = 1> ()
      size = Gather <axis = 0> (shape, one)  c = Equal (size, one)
      y = If (c) <
        then_branch = t () => (a) { ax = Constant <value_ints = [1]> ()  a = Squeeze (x, ax) },
        else_branch = e () => (b) { b = Identity (x) }
      >
    }
    """)
    graph = load(proto)
    assert "cond" not in primitives(graph)
    assert graph.outputs["y"].rank == 2


def test_a_symbolic_size_is_not_1_where_the_branches_have_different_ranks() -> None:
    proto = model("""
    main (float[N, M, 3] x) => (y) {
      shape = Shape (x)  one = Constant <value_int = 1> ()
      size = Gather <axis = 0> (shape, one)  c = Equal (size, one)
      y = If (c) <
        then_branch = t () => (a) { ax = Constant <value_ints = [1]> ()  a = Squeeze (x, ax) },
        else_branch = e () => (b) { b = Identity (x) }
      >
    }
    """)
    graph = load(proto)
    assert graph.outputs["y"].rank == 3
    assert "M >= 2" in map(str, graph.constraints)


def test_a_size_is_1_where_the_model_only_fits_together_then() -> None:
    """An exporter's `If(size == 1, Squeeze(x), x)` before a product that takes a matrix."""
    proto = model("""
    main (float[N, T, 3] x) => (y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {1, 2}> {
      shape = Shape (x)  one = Constant <value_int = 1> ()
      size = Gather <axis = 0> (shape, one)  c = Equal (size, one)
      s = If (c) <
        then_branch = t () => (a) { ax = Constant <value_ints = [1]> ()  a = Squeeze (x, ax) },
        else_branch = e () => (d) { d = Identity (x) }
      >
      y = Gemm (s, w, b)
    }
    """)
    graph = load(proto)
    assert str(graph.outputs["y"].type) == "f32[N, 2]"
    assert "T == 1" in map(str, graph.constraints)


def test_branches_of_different_shapes_are_refused_where_data_decides() -> None:
    proto = model("""
    main (bool c, float[2, 3] x) => (y) {
      y = If (c) <
        then_branch = t () => (a) { ax = Constant <value_ints = [0]> ()  a = Unsqueeze (x, ax) },
        else_branch = e () => (b) { b = Identity (x) }
      >
    }
    """)
    with pytest.raises(Refusal, match=r"node 'n0' \(If.*f32\[1, 2, 3\] and f32\[2, 3\].*depends on data"):
        load(proto)


# ---- Scan ------------------------------------------------------------------------------------------------------------------------------

SCAN = """
main (float[3] h, float[T, 3] x) => (float[3] y, float[T, 3] z) <float[3] w = {0.5, 0.2, -0.3}> {
  y, z = Scan <num_scan_inputs = 1, body = step (float[3] h_in, float[3] x_in) => (h_out, z_out) <float[3] v = {0.1, 0.2, 0.3}> {
    a = Mul (h_in, w)  b = Add (a, x_in)  d = Tanh (b)  h_out = Add (d, v)  z_out = Mul (h_out, h_in)
  }ATTRIBUTES> (h, x)
}
"""


@pytest.mark.parametrize("output", ["y", "z"])
@pytest.mark.parametrize("attributes", ["", ", scan_input_directions = [1]", ", scan_output_directions = [1]",
                                        ", scan_input_directions = [1], scan_output_directions = [1]"])  # fmt: skip
def test_a_scan_of_symbolic_length_has_its_gradient(output: str, attributes: str) -> None:
    proto = model(SCAN.replace("ATTRIBUTES", attributes))
    back = check(proto, {"h": X[0], "x": np.vstack([X, X[::-1] * 0.5])}, output=output)
    assert {v.params["name"] for v in back.parameters} == {"w", "n0/v"}


def test_a_scan_moves_its_axes() -> None:
    proto = model("""
    main (float[3] h, float[3, T] x) => (float[3] y, float[3, T] z) {
      y, z = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [-1], body = step (float[3] a, float[3] b) => (d, e) {
        d = Add (a, b)  e = Mul (d, a)
      }> (h, x)
    }
    """)
    check(proto, {"h": X[0], "x": np.arange(12, dtype=np.float32).reshape(3, 4) / 7}, output="z")


def test_scans_of_the_first_version_run_over_a_batch() -> None:
    body = onnx.parser.parse_graph(
        "step (float[2] a, float[2] b) => (float[2] d, float[2] e) { d = Add (a, b)  e = Mul (d, b) }"
    )
    node = onnx.helper.make_node("Scan", ["lens", "h", "x"], ["y", "z"], name="scan", body=body, num_scan_inputs=1)
    infos = [
        onnx.helper.make_tensor_value_info(n, t, s)
        for n, t, s in (("lens", 7, ["B"]), ("h", 1, ["B", 2]), ("x", 1, ["B", "T", 2]))
    ]
    outs = [onnx.helper.make_tensor_value_info(n, 1, None) for n in ("y", "z")]
    proto = onnx.helper.make_model(
        onnx.helper.make_graph([node], "g", infos, outs), opset_imports=[onnx.helper.make_opsetid("", 8)], ir_version=8
    )
    x = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    found = evaluate(load(proto), {"lens": np.asarray([3, 2]), "h": np.ones((2, 2), np.float32), "x": x})
    np.testing.assert_allclose(found["y"], 1 + np.stack([x[0].sum(0), x[1, :2].sum(0)]))
    np.testing.assert_allclose(found["z"][1, 2], 0)
    np.testing.assert_allclose(found["z"][0], (1 + np.cumsum(x[0], 0)) * x[0])


# ---- Loop ------------------------------------------------------------------------------------------------------------------------------

LOOP = """
main (float[N, 3] x) => (float[N, 3] y, float[K, N, 3] z) <float[3] w = {0.5, 0.2, -0.3}TRIPS> {
  on = Constant <value = bool {1}> ()
  y, z = Loop <body = step (int64 i, bool c, float[N, 3] s) => (c_out, s_out, z_out) {
    c_out = Identity (c)  k = Cast <to = 1> (i)  a = Mul (s, w)  b = Add (a, k)  s_out = Sin (b)  z_out = Mul (s_out, x)
  }> (trips, on, x)
}
"""


@pytest.mark.parametrize("output", ["y", "z"])
def test_a_loop_of_known_length_is_a_scan_with_its_gradient(output: str) -> None:
    proto = model(LOOP.replace("TRIPS", ", int64 trips = {4}"))
    back = check(proto, {"x": X}, output=output)
    assert "scan" in primitives(back)
    assert {v.params["name"] for v in back.parameters} == {"w"}


def test_a_loop_may_run_as_often_as_a_size_says() -> None:
    text = LOOP.replace("TRIPS", "").replace(
        "on = Constant",
        "shape = Shape (x)  zero = Constant <value_int = 0> ()  trips = Gather (shape, zero)\n  on = Constant",
    )
    graph = load(model(text))
    assert "scan" in primitives(graph)
    assert str(graph.outputs["z"].type) == "f32[N, N, 3]"
    for n in (1, 3):
        check(model(text), {"x": np.linspace(-1, 1, 3 * n, dtype=np.float32).reshape(n, 3)})


def test_a_loop_is_unrolled_on_request() -> None:
    proto = model(LOOP.replace("TRIPS", ", int64 trips = {4}"))
    graph = load(proto, unroll=True)
    assert "scan" not in primitives(graph)
    check(proto, {"x": X}, graph=graph)


def test_a_loop_without_steps_gives_what_enters() -> None:
    found = evaluate(load(model(LOOP.replace("TRIPS", ", int64 trips = {0}"))), {"x": X})
    np.testing.assert_array_equal(found["y"], X)
    assert found["z"].shape == (0, 2, 3)


def test_a_loop_whose_tensor_grows_is_unrolled() -> None:
    proto = model("""
    main (float[2] x) => (y) <int64 trips = {3}> {
      on = Constant <value = bool {1}> ()
      y = Loop <body = step (int64 i, bool c, float[n] s) => (c_out, s_out) { c_out = Identity (c)  s_out = Concat <axis = 0> (s, x) }> (trips, on, x)
    }
    """)
    assert str(load(proto).outputs["y"].type) == "f32[8]"
    check(proto, {"x": X[0, :2]})


COLLECTING = """
main (float[N, 2] x) => (y) <float[2] w = {0.7, -1.2}> {
  shape = Shape (x)  zero = Constant <value_int = 0> ()  trips = Gather (shape, zero)  on = Constant <value = bool {1}> ()
  h = ReduceMean <axes = [0], keepdims = 1> (x)  START
  last, ys = Loop <body = step (int64 i, bool c, float[1, 2] s, TYPE held) => (c_out, s_out, held_out) {
    c_out = Identity (c)  row = Gather (x, i)  t = Mul (s, w)  s_out = Add (t, row)  JOIN
  }> (trips, on, h, first)
  END
}
"""
COLLECTORS = {
    "behind": ("float[k, 2]", "first = Identity (x)", "held_out = Concat <axis = 0> (held, s_out)", "y = Sin (ys)"),
    "in front": ("float[k, 2]", "first = Identity (x)", "held_out = Concat <axis = -2> (s_out, held)", "y = Sin (ys)"),
    "along the last axis": ("float[1, k]", "first = Identity (h)", "j = Concat <axis = -1> (held, s_out)  held_out = Identity (j)", "y = Sin (ys)"),
    "from outside": ("float[k, 2]", "first = Identity (h)", "held_out = Concat <axis = 0> (held, x)", "y = Sin (ys)"),
    "sequence": ("seq(float[1, 2])", "first = SequenceEmpty ()", "held_out = SequenceInsert (held, s_out)",
        "z = ConcatFromSequence <axis = 1> (ys)  y = Sin (z)"),
    "sequence, new axis": ("seq(float[1, 2])", "first = SequenceEmpty ()", "held_out = SequenceInsert (held, s_out)",
        "z = ConcatFromSequence <axis = -1, new_axis = 1> (ys)  n = SequenceLength (ys)  m = Cast <to = 1> (n)  y = Mul (z, m)"),
}  # fmt: skip


@pytest.mark.parametrize("name", COLLECTORS)
def test_what_a_loop_only_collects_may_be_as_long_as_a_size_says(name: str) -> None:
    text = COLLECTING
    for place, part in zip(("TYPE", "START", "JOIN", "END"), COLLECTORS[name], strict=True):
        text = text.replace(place, part)
    graph = load(model(text))
    assert "scan" in primitives(graph)
    rng = np.random.default_rng(0)
    for n in (1, 2, 5):
        check(model(text), {"x": rng.standard_normal((n, 2)).astype(np.float32)}, graph=graph)


def test_what_a_loop_reads_of_its_collection_is_refused_where_its_length_is_a_size() -> None:
    text = COLLECTING
    parts = (
        "float[k, 2]",
        "first = Identity (x)",
        "u = ReduceSum (held)  v = Add (u, s_out)  held_out = Concat <axis = 0> (held, v)",
        "y = Sin (ys)",
    )
    for place, part in zip(("TYPE", "START", "JOIN", "END"), parts, strict=True):
        text = text.replace(place, part)
    with pytest.raises(Refusal, match="the loop changes 'held'"):
        load(model(text))
    bound = load(model(text), dims={"N": 3})
    check(model(text), {"x": np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)}, graph=bound)


UNTIL = """
main (float[2, 3] xTRIPS) => (float[2, 3] y) <float w = {0.7}> {
  on = Constant <value = bool {1}> ()
  y = Loop <body = step (int64 i, bool c, float[2, 3] s) => (c_out, s_out) <float limit = {0.6}> {
    s_out = Mul (s, w)  q = Mul (s_out, s_out)  total = ReduceSum <keepdims = 0> (q)  c_out = Less (limit, total)
  }> (COUNT, on, x)
}
"""


def test_a_loop_until_a_condition_runs_forward_and_refuses_a_gradient_with_the_way_out() -> None:
    proto = model(UNTIL.replace("TRIPS", "").replace("COUNT", ""))
    graph = load(proto)
    assert "while" in primitives(graph)
    for scale in (0.1, 1.0, 3.0):
        feeds = {"x": X * np.float32(scale)}
        expected = by_onnxruntime(proto, feeds)["y"]
        np.testing.assert_allclose(evaluate(graph, feeds)["y"], expected, rtol=1e-6)
        np.testing.assert_allclose(by_onnxruntime(to_onnx(graph), feeds)["y"], expected, rtol=1e-6)
    with pytest.raises(PullbackError, match=r"number of iterations depends on data.*'n1'.*max_trips"):
        differentiated(graph)


def test_max_trips_bounds_a_loop_and_gives_it_a_gradient() -> None:
    proto = model(UNTIL.replace("TRIPS", "").replace("COUNT", ""))
    graph = load(proto, max_trips=12)
    assert "while" not in primitives(graph)
    for scale in (0.1, 1.0, 3.0):
        check(proto, {"x": X * np.float32(scale)}, graph=graph)


def test_a_loop_that_is_not_done_within_max_trips_is_not_a_number() -> None:
    graph = load(model(UNTIL.replace("TRIPS", "").replace("COUNT", "")), max_trips=2)
    assert np.isnan(evaluate(graph, {"x": X})["y"]).all()


def test_a_known_trip_count_bounds_a_loop_that_may_stop_early() -> None:
    proto = model(
        UNTIL.replace("TRIPS", "").replace("COUNT", "trips").replace("<float w", "<int64 trips = {3}, float w")
    )
    for scale in (0.1, 1.0, 3.0):
        check(proto, {"x": X * np.float32(scale)})


def test_a_trip_count_that_is_data_runs_forward() -> None:
    proto = model(UNTIL.replace("TRIPS", ", int64 trips").replace("COUNT", "trips"))
    graph = load(proto)
    for trips in (0, 1, 9):
        feeds = {"x": X, "trips": np.asarray(trips, np.int64)}
        np.testing.assert_allclose(evaluate(graph, feeds)["y"], by_onnxruntime(proto, feeds)["y"], rtol=1e-6)
        check(proto, feeds, graph=load(proto, max_trips=9))


COUNTING = """
main (float[N, T, 3] x) => (float[N, 3] y, float[K, N, 3] z) <float[3] w = {0.5, 0.2, -0.3}, int64 zero = {0}, int64 one = {1}, float[1] f = {0}> {
  xt = Transpose <perm = [1, 0, 2]> (x)  shape = Shape (xt)  n = Gather (shape, zero)  nf = Cast <to = 1> (n)
  rows = Gather (shape, one)  flat = Constant <value_ints = [-1]> ()  r1 = Reshape (rows, flat)  three = Constant <value_ints = [3]> ()
  size = Concat <axis = 0> (r1, three)  h = Expand (f, size)
  zf = Cast <to = 1> (zero)  on = Less (zf, nf)
  i_last, y, n_last, z = Loop <body = step (int64 i, bool c, int64 j, float[N, 3] s, int64 m) => (c_out, j_out, s_out, m_out, z_out) {
    j_out = Add (j, one)  xi = Gather <axis = 0> (xt, j)  a = Mul (s, w)  b = Add (a, xi)  s_out = Tanh (b)  z_out = Identity (s_out)
    m_out = Identity (m)  jf = Cast <to = 1> (j_out)  mf = Cast <to = 1> (m)  less = Less (jf, mf)
    if = Cast <to = 1> (i)  below = Less (if, nf)  c_out = And (below, less)
  }> (n, on, zero, h, n)
}
"""


@pytest.mark.parametrize("output", ["y", "z"])
def test_a_loop_whose_condition_only_counts_is_a_scan(output: str) -> None:
    """As tf2onnx writes a recurrent layer: a counter of its own, compared in floats with a size."""
    proto = model(COUNTING)
    graph = load(proto)
    assert "scan" in primitives(graph)
    assert "while" not in primitives(graph)
    assert str(graph.outputs["z"].type) == "f32[T, N, 3]"
    for time in (1, 4):
        x = np.linspace(-1, 1, 2 * time * 3, dtype=np.float32).reshape(2, time, 3)
        check(proto, {"x": x}, output=output)


def test_scan_outputs_of_a_loop_without_known_length_are_refused() -> None:
    text = LOOP.replace("TRIPS", "").replace("float[N, 3] x)", "float[N, 3] x, int64 trips)")
    with pytest.raises(Refusal, match="scan outputs of a loop whose number of steps depends on data"):
        load(model(text))


def test_loops_and_branches_nest() -> None:
    proto = model("""
    main (float[2, 3] x) => (float[2, 3] y) <float[3] w = {0.5, 0.2, -0.3}, int64 trips = {3}> {
      on = Constant <value = bool {1}> ()
      y = Loop <body = step (int64 i, bool c, float[2, 3] s) => (c_out, s_out) <float[3] u = {1, 2, 3}, int64 inner = {2}> {
        c_out = Identity (c)  two = Constant <value_int = 2> ()  m = Mod (i, two)  odd = Cast <to = 9> (m)
        s_out = If (odd) <
          then_branch = t () => (a) {
            a = Loop <body = again (int64 j, bool d, float[2, 3] r) => (d_out, r_out) { d_out = Identity (d)  e = Mul (r, u)  r_out = Sin (e) }> (inner, c, s)
          },
          else_branch = f () => (b) { g = Mul (s, w)  b = Add (g, x) }
        >
      }> (trips, on, x)
    }
    """)
    back = check(proto, {"x": X})
    assert {"scan", "cond"} <= set(primitives(back))
    assert {v.params["name"] for v in back.parameters} == {"w", "n1/u"}


# ---- the primitives --------------------------------------------------------------------------------------------------------------------


def test_the_running_sums_of_a_pullback_are_not_kept_for_every_step() -> None:
    graph = differentiated(load(model(SCAN.replace("ATTRIBUTES", ""))))
    scans = [v for v in graph.nodes if v.primitive.name == "scan"]
    kept = [name for v in scans for name in v.params["body"].outputs if name.startswith("saved_")]
    assert kept == ["saved_h_in", "saved_ct_h_in"]


def test_a_scan_shows_as_text() -> None:
    graph = load(model("""
    main (float[3] h, float[T, 3] x) => (float[3] y, float[T, 3] z) {
      y, z = Scan <num_scan_inputs = 1, body = step (float[3] a, float[3] b) => (d, e) { d = Add (a, b)  e = Mul (d, a) }> (h, x)
    }
    """))  # fmt: skip
    assert (
        show(graph)
        == """\
graph main(h: f32[3], x: f32[T, 3]) {
  y.0: (f32[3], f32[T, 3], f32[T, 3]) = scan h, x body=graph n0(a: f32[3], b: f32[3]) {
    next_a: f32[3] = add a, b
    slice0: f32[3] = mul next_a, a
    return next_a=next_a, slice0=slice0, saved_a=a
  } carries=1 xs=1 length=T reverse=false
  y: f32[3] = item y.0 index=0
  z: f32[T, 3] = item y.0 index=1
  return y=y, z=z
}"""
    )


def test_a_body_must_fit_what_is_around_it() -> None:
    from pullback.algebra.types import TensorType, f32

    with building():
        x = p.input("x", TensorType(f32, (3,)))
        body = p.body_of(lambda h: [p.reduce_sum(h, axes=(0,))], [("h", TensorType(f32, (3,)))])
        with pytest.raises(PullbackError, match=r"carry of the body 0: f32\[3\] is required, found f32\[\]"):
            p.scan([x], [], [], body, length=4)
        with pytest.raises(PullbackError, match=r"condition must be bool\[\]"):
            p.cond(x, [x], body, body)
        test = p.body_of(lambda h: [h], [("h", TensorType(f32, (3,)))])
        with pytest.raises(PullbackError, match=r"test of a loop 0: bool\[\] is required"):
            p.while_([x], [], test, test)


UNTIL_WITH_SLICES = UNTIL.replace("=> (float[2, 3] y) ", "=> (float[2, 3] y, float[K, 2, 3] z) ").replace("  y = Loop", "  y, z = Loop").replace(
    "=> (c_out, s_out)", "=> (c_out, s_out, z_out)").replace("c_out = Less", "z_out = Sin (s_out)  c_out = Less")  # fmt: skip


@pytest.mark.parametrize("output", ["y", "z"])
def test_a_bounded_loop_gives_the_slices_of_the_steps_that_it_made(output: str) -> None:
    proto = model(UNTIL_WITH_SLICES.replace("TRIPS", "").replace("COUNT", ""))
    with pytest.raises(Refusal, match=r"scan outputs of a loop whose number of steps depends on data.*max_trips"):
        load(proto)
    graph = load(proto, max_trips=12)
    for scale in (0.1, 1.0, 3.0):
        check(proto, {"x": X * np.float32(scale)}, graph=graph, output=output)


# ---- training --------------------------------------------------------------------------------------------------------------------------

DROPPED = """
main (float[N, 3] x) => (float[N, 3] y) <float[3] w = {0.5, 0.2, -0.3}, int64 trips = {3}> {
  on = Constant <value = bool {1}> ()
  y = Loop <body = step (int64 i, bool c, float[N, 3] h) => (c_out, o) { c_out = Identity (c)  a = Mul (h, w)  d = Dropout (a)  o = Tanh (d) }> (trips, on, x)
}
"""


def test_a_dropout_inside_a_loop_is_refused_or_unrolled_never_left_out() -> None:
    def step(graph: Graph, **options: Any) -> Any:
        return pullback.training_step(graph, loss="mse_loss", optimizer="sgd", **options)

    with pytest.raises(Refusal, match=r"dropout 'n1/d' stands inside a loop.*unroll=True"):
        step(pullback.load(model(DROPPED)), dropout=0.5)
    assert step(pullback.load(model(DROPPED)))
    plain = step(pullback.load(model(DROPPED), unroll=True), dropout=0.5)
    masks = [v for v in plain.graph.nodes if v.primitive.name == "less" and v.origin.phase == "forward"]
    assert len(masks) == 3


# ---- the command line ------------------------------------------------------------------------------------------------------------------


def test_the_command_line_bounds_a_loop(tmp_path: Path) -> None:
    runner = CliRunner()
    source, target = tmp_path / "until.onnx", tmp_path / "grad.onnx"
    onnx.save(model(UNTIL.replace("TRIPS", "").replace("COUNT", "")), source)
    refused = runner.invoke(main, ["grad", str(source), "-o", str(target), "--wrt", "x"])
    assert refused.exit_code == 2
    assert "max_trips" in refused.output
    assert not target.exists()
    done = runner.invoke(main, ["grad", str(source), "-o", str(target), "--wrt", "x", "--max-trips", "9"])
    assert done.exit_code == 0, done.output
    assert target.exists()


# ---- carries that a step only adds to -------------------------------------------------------------------------------------------------

SUMS = """
main (double[2] u, double[2] v, double[2] w, double[T] seq) => (double[2] y, double[2] z, double[2] last) <double[2] zero = {0, 0}> {
  sizes = Shape (seq)
  trips = Squeeze (sizes)
  y, z, last = Loop (trips, , zero, zero, u) <body = b (int64 i, bool c, double[2] a, double[2] b, double[2] s) =>
    (bool go, double[2] next_a, double[2] next_b, double[2] next_s) {
      next_a = Add (a, v)
      sine = Sin (s)
      next_b = Add (b, sine)
      next_s = Identity (w)
      go = Identity (c)
    }>
}
"""


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_running_sums_of_one_loop_keep_their_cotangents_apart_at_first_and_second_order(steps: int) -> None:
    graph = load(model(SUMS))
    rng = np.random.default_rng(steps)
    feeds = {n: rng.standard_normal(2) for n in ("u", "v", "w")} | {"zero": np.zeros(2), "seq": np.zeros(steps)}
    check_pullback(graph, feeds, floats(graph), rng, orders=2)
    seeds = {"ct_y": np.array([1.0, 2.0]), "ct_z": np.array([10.0, 20.0]), "ct_last": np.array([100.0, 200.0])}
    found = evaluate(pulled_back(graph, floats(graph)), {**feeds, **seeds})
    np.testing.assert_allclose(found["ct_v"], steps * seeds["ct_y"])
    np.testing.assert_allclose(found["ct_u"], np.cos(feeds["u"]) * seeds["ct_z"])
    np.testing.assert_allclose(found["ct_w"], (steps - 1) * np.cos(feeds["w"]) * seeds["ct_z"] + seeds["ct_last"])
    np.testing.assert_allclose(found["ct_zero"], seeds["ct_y"] + seeds["ct_z"])
