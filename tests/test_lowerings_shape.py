"""Shapes, pieces, pads and tensors made of nothing: values, derivatives, symbolic sizes, and every version's signature."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered import check, gradients, model_of, run, text_model
from numerics import every_node, pulled_back
from pullback.algebra.dims import show_shape
from pullback.algebra.errors import Refusal
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Graph
from pullback.backends.onnx_export.emit import to_onnx
from pullback.frontends.onnx_import import load

RNG = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return RNG.uniform(-1, 1, shape)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def shape_of(graph: Graph, name: str = "y") -> str:
    return show_shape(graph.outputs[name].shape)


# ---- the same elements under another shape ---------------------------------------------------------------------------

RESHAPES = [
    ((2, 3, 4), (4, 2, 3), 0), ((2, 3, 4), (24,), 0), ((2, 3, 4), (-1,), 0), ((2, 3, 4), (0, -1), 0), ((2, 3, 4), (0, 0, 2, -1), 0),
    ((2, 3, 4), (2, -1, 1, 2), 0), ((0, 3), (3, 0), 1), ((2, 0), (-1, 3), 0), ((0, 4), (0, -1), 0), ((1,), (), 0), ((), (1, 1), 0),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "wanted", "allowzero"), RESHAPES)
def test_reshape_agrees_with_the_reference_and_its_derivative_with_differences(
    shape: tuple[int, ...], wanted: tuple[int, ...], allowzero: int
) -> None:
    x = numbers(*shape)
    full = [shape[i] if d == 0 and not allowzero else d for i, d in enumerate(wanted)]
    inputs = {"x": x, "shape": ints(*wanted)}
    options = {"fixed": ("shape",), "allowzero": allowzero}
    if 0 in shape and -1 in wanted:
        assert run("Reshape", inputs, **options).size == 0
    else:
        np.testing.assert_array_equal(run("Reshape", inputs, **options), x.reshape(full))
    graph = load(model_of("Reshape", inputs, **options))
    assert gradients(graph, {"x": x})["x"].shape == shape


@pytest.mark.parametrize("opset", [1, 4, 5, 7, 13, 14, 19, 21, 23, 24, 25, 28])
def test_reshape_is_the_same_in_every_version(opset: int) -> None:
    x = numbers(2, 3, 4).astype(np.float32)
    if opset < 5:
        found = run("Reshape", {"x": x}, opset=opset, shape=[0, -1])
    else:
        found = run("Reshape", {"x": x, "shape": ints(0, -1)}, opset=opset, fixed=("shape",))
    np.testing.assert_array_equal(found, x.reshape(2, 12))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("g (float[B, S, 12] x) => (float y) <int64[4] s = {0, -1, 3, 4}> { y = Reshape(x, s) }", "[B, S, 3, 4]"),
        ("g (float[B, S, 12] x) => (float y) <int64[2] s = {-1, 12}> { y = Reshape(x, s) }", "[B*S, 12]"),
        ("g (float[B, S, 12] x) => (float y) <int64[1] s = {-1}> { y = Reshape(x, s) }", "[12*B*S]"),
        ("g (float[N, 4] x) => (float y) <int64[2] s = {2, 8}> { y = Reshape(x, s) }", "[2, 8]"),
        ("g (float[N, 6] x, float[N, 3, 2] z) => (float y) { s = Shape(z)  y = Reshape(x, s) }", "[N, 3, 2]"),
        (
            """g (float[B, S, 12] x) => (float y) <int64 i0 = {0}, int64 i1 = {1}, int64[1] ax = {0}, int64[1] h = {3}, int64[1] m = {-1}> {
               s = Shape(x)  b = Gather(s, i0)  t = Gather(s, i1)  b1 = Unsqueeze(b, ax)  t1 = Unsqueeze(t, ax)
               w = Concat<axis = 0>(b1, t1, h, m)  y = Reshape(x, w) }""",
            "[B, S, 3, 4]",
        ),
        (
            """g (float[B, S, 12] x) => (float y) <int64[1] zero = {0}, int64[1] two = {2}, int64[1] m = {-1}, int64 c = {2}> {
               s = Shape(x)  b = Slice(s, zero, two)  p = ReduceProd<keepdims = 1>(b)  half = Div(p, c)  both = Mul(half, c)
               w = Concat<axis = 0>(p, m)  y = Reshape(x, w) }""",
            "[B*S, 12]",
        ),
    ],
)  # fmt: skip
def test_shape_arithmetic_vanishes_and_leaves_symbols(text: str, expected: str) -> None:
    graph = load(text_model(text))
    assert shape_of(graph) == expected
    assert {n.primitive.name for n in graph.nodes} <= {"input", "reshape"}


def test_a_reshape_that_needs_a_factor_is_a_constraint() -> None:
    graph = load(text_model("g (float[N] x) => (float y) <int64[2] s = {-1, 4}> { y = Reshape(x, s) }"))
    assert [str(c) for c in graph.constraints] == ["N % 4 == 0"]


@pytest.mark.parametrize(
    ("shape", "wanted", "reason"),
    [
        ((2, 3), (4, 2), "must be equal"),
        ((2, 3), (-1, 4), "must divide"),
        ((2, 3), (-1, -1), "more than one -1"),
        ((2,), (2, 0), "which it lacks"),
    ],
)
def test_a_reshape_that_cannot_be_is_refused(shape: tuple[int, ...], wanted: tuple[int, ...], reason: str) -> None:
    with pytest.raises(Refusal, match=reason):
        load(model_of("Reshape", {"x": numbers(*shape), "s": ints(*wanted)}, fixed=("s",)))


def test_a_shape_that_is_data_is_refused_with_the_reason() -> None:
    with pytest.raises(
        Refusal, match=r"node 'node' \(Reshape, domain ai.onnx, opset 28\).*must be known when the model is read"
    ):
        load(model_of("Reshape", {"x": numbers(2, 3), "s": ints(3, 2)}))


@pytest.mark.parametrize("axis", range(-3, 4))
def test_flatten_splits_the_axes_in_two(axis: int) -> None:
    x = numbers(2, 3, 4)
    cut = axis % 3 if axis < 0 else axis
    assert run("Flatten", {"x": x}, axis=axis).shape == (int(np.prod(x.shape[:cut])), int(np.prod(x.shape[cut:])))
    check("Flatten", {"x": x}, axis=axis, orders=1)


@pytest.mark.parametrize("opset", [7, 11, 12, 13, 21, 28])
@pytest.mark.parametrize("axes", [None, (0,), (-1,), (0, 2), (0, -3)])
def test_squeeze_and_unsqueeze_are_the_same_in_every_version(opset: int, axes: tuple[int, ...] | None) -> None:
    x = numbers(1, 3, 1, 1).astype(np.float32)

    def axes_as(op: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        if axes is None:
            return {}, {}
        return ({"axes": ints(*axes)}, {"fixed": ("axes",)}) if opset >= 13 else ({}, {"axes": list(axes)})

    if axes != (0, -3):
        more, options = axes_as("Squeeze")
        np.testing.assert_array_equal(run("Squeeze", {"x": x, **more}, opset=opset, **options), np.squeeze(x, axes))
    if axes is not None:
        more, options = axes_as("Unsqueeze")
        np.testing.assert_array_equal(
            run("Unsqueeze", {"x": x, **more}, opset=opset, **options), np.expand_dims(x, axes)
        )


def test_squeezing_a_symbol_forces_it_to_be_one() -> None:
    graph = load(text_model("g (float[N, 3] x) => (float y) <int64[1] a = {0}> { y = Squeeze(x, a) }"))
    assert shape_of(graph) == "[3]"
    assert [str(c) for c in graph.constraints] == ["N == 1"]


@pytest.mark.parametrize("perm", [None, (0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_transpose_permutes(perm: tuple[int, ...] | None) -> None:
    x = numbers(2, 3, 4)
    options = {} if perm is None else {"perm": list(perm)}
    np.testing.assert_array_equal(run("Transpose", {"x": x}, **options), np.transpose(x, perm))
    check("Transpose", {"x": x}, orders=1, **options)


@pytest.mark.parametrize("op", ["DepthToSpace", "SpaceToDepth"])
def test_blocks_of_space_and_channels_agree_with_differences(op: str) -> None:
    for mode in ("DCR", "CRD") if op == "DepthToSpace" else (None,):
        check(op, {"x": numbers(2, 8, 4, 6)}, blocksize=2, orders=1, **({} if mode is None else {"mode": mode}))


# ---- repetition ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [((3, 1), (2, 3, 4)), ((3, 1), (1, 1)), ((3,), (2, 1)), ((), (2, 3)), ((2, 3), (3,)), ((1,), (0, 4))],
)
def test_expand_agrees_with_numpy_and_its_derivative_with_differences(
    shape: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    x = numbers(*shape)
    np.testing.assert_array_equal(run("Expand", {"x": x, "s": ints(*wanted)}, fixed=("s",)), x * np.ones(wanted))
    check("Expand", {"x": x, "s": ints(*wanted)}, fixed=("s",), orders=1)


@pytest.mark.parametrize(
    ("shape", "repeats"),
    [((2, 3), (2, 1)), ((2, 3), (1, 1)), ((2, 3), (3, 2)), ((3,), (0,)), ((), ()), ((1, 2), (4, 2))],
)
def test_tile_agrees_with_numpy_and_its_derivative_with_differences(
    shape: tuple[int, ...], repeats: tuple[int, ...]
) -> None:
    x = numbers(*shape)
    for opset in (6, 13, 28):
        y = run("Tile", {"x": x, "r": ints(*repeats)}, fixed=("r",), opset=opset)
        np.testing.assert_array_equal(y, np.tile(x, repeats))
    check("Tile", {"x": x, "r": ints(*repeats)}, fixed=("r",), orders=1)


def test_tile_of_the_first_version_repeats_one_axis() -> None:
    x = numbers(2, 3).astype(np.float32)
    found = run("Tile", {"x": x, "t": np.float32([2]), "a": np.float32([1])}, fixed=("t", "a"), opset=5)
    np.testing.assert_array_equal(found, np.tile(x, (1, 2)))


# ---- pieces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [1, 3, 4, 7, 11, 13, 28])
def test_concat_is_the_same_in_every_version(opset: int) -> None:
    xs = {f"x{i}": numbers(2, i, 3).astype(np.float32) for i in (1, 0, 2)}
    options = {} if opset == 1 else {"axis": 1 if opset < 11 else -2}
    np.testing.assert_array_equal(run("Concat", xs, opset=opset, **options), np.concatenate(list(xs.values()), 1))


def test_derivatives_of_concat_agree_with_differences() -> None:
    check("Concat", {"a": numbers(2, 3), "b": numbers(2, 1), "c": numbers(2, 2)}, axis=1, orders=1)


@pytest.mark.parametrize("opset", [1, 2, 7, 11, 13, 18, 28])
@pytest.mark.parametrize("sizes", [None, (1, 2, 3), (6, 0, 0)])
def test_split_is_the_same_in_every_version(opset: int, sizes: tuple[int, ...] | None) -> None:
    x = numbers(6, 2).astype(np.float32)
    inputs: dict[str, np.ndarray] = {"x": x}
    options: dict[str, Any] = {"axis": 0}
    if sizes is None:
        options |= {"num_outputs": 3} if opset >= 18 else {}
    elif opset >= 13:
        inputs, options = inputs | {"s": ints(*sizes)}, options | {"fixed": ("s",)}
    else:
        options |= {"split": list(sizes)}
    found = run("Split", inputs, opset=opset, outputs=3, **options)
    for a, b in zip(found, np.split(x, np.cumsum(sizes or (2, 2, 2))[:-1]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("size", [5, 6, 7, 8])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_an_uneven_split_has_smaller_last_pieces(size: int, count: int) -> None:
    x = numbers(size)
    chunk = -(-size // count)
    found = run("Split", {"x": x}, outputs=count, num_outputs=count)
    assert [len(a) for a in found] == [min(chunk, max(size - i * chunk, 0)) for i in range(count)]
    check("Split", {"x": x}, outputs=count, num_outputs=count, orders=1)


def test_pieces_that_do_not_fill_the_axis_are_refused() -> None:
    with pytest.raises(Refusal, match="must be equal"):
        load(model_of("Split", {"x": numbers(6), "s": ints(2, 3)}, outputs=2, fixed=("s",)))


HUGE = [2**63 - 1, -(2**63), 2**31 - 1, -(2**31)]
BOUNDS = st.one_of(st.integers(-9, 9), st.sampled_from(HUGE))
STEPS = st.sampled_from([1, 2, 3, -1, -2, -3, 7, -7, *HUGE])


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 6), start=BOUNDS, end=BOUNDS, step=STEPS, symbols=st.booleans())
def test_slice_agrees_with_numpy_at_every_bound_and_step(
    size: int, start: int, end: int, step: int, symbols: bool
) -> None:
    x = np.arange(float(size * 2)).reshape(2, size)
    inputs = {"x": x, "s": ints(start), "e": ints(end), "a": ints(-1), "k": ints(step)}
    graph = load(model_of("Slice", inputs, fixed=("s", "e", "a", "k"), symbols=symbols))
    np.testing.assert_array_equal(evaluate(graph, {"x": x})["y"], x[:, start:end:step])


@pytest.mark.parametrize(
    ("start", "end", "step"),
    [
        (0, 2, 1),
        (1, 2**63 - 1, 1),
        (-1, -(2**63), -1),
        (0, 100, 2),
        (-2, 100, 1),
        (4, 1, -2),
        (2, 2, 1),
        (1, 9, 2**63 - 1),
        (-2, -9, -(2**63)),
    ],
)
def test_derivatives_of_slice_agree_with_differences(start: int, end: int, step: int) -> None:
    inputs = {"x": numbers(2, 5), "s": ints(start), "e": ints(end), "a": ints(1), "k": ints(step)}
    check("Slice", inputs, fixed=("s", "e", "a", "k"), orders=1)


@pytest.mark.parametrize("symbols", [False, True])
@pytest.mark.parametrize("step", HUGE)
def test_a_step_over_the_whole_axis_is_written_and_differentiated(step: int, symbols: bool) -> None:
    x = np.arange(10, dtype=np.float32).reshape(2, 5)
    inputs = {"x": x, "s": ints(3), "e": ints(2**63 - 1 if step > 0 else -(2**63)), "a": ints(1), "k": ints(step)}
    graph = load(model_of("Slice", inputs, fixed=("s", "e", "a", "k"), symbols=symbols))
    feeds = {"x": x, "ct_y": np.ones((2, 1), np.float32)}
    for g, name, expected in ((graph, "y", x[:, 3:4]), (pulled_back(graph, ("x",)), "ct_x", np.eye(5)[[3, 3]])):
        written = onnxruntime.InferenceSession(to_onnx(g).SerializeToString())
        (found,) = written.run([name], {i.name: feeds[i.name] for i in written.get_inputs()})
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("opset", [7, 9, 10, 11, 13, 28])
def test_slice_is_the_same_in_every_version(opset: int) -> None:
    x = numbers(4, 5).astype(np.float32)
    if opset < 10:
        found = run("Slice", {"x": x}, opset=opset, starts=[1, -3], ends=[1000, -1], axes=[0, 1])
    else:
        inputs = {"x": x, "s": ints(1, -3), "e": ints(1000, -1), "a": ints(0, 1)}
        found = run("Slice", inputs, opset=opset, fixed=("s", "e", "a"))
    np.testing.assert_array_equal(found, x[1:, -3:-1])


def test_the_gradient_of_a_slice_is_placed_where_it_was_taken() -> None:
    x = numbers(2, 2)
    graph = load(
        text_model(
            "g (double[2, 2] x) => (double y) <int64[1] s = {0}, int64[1] e = {1}> { z = Slice(x, s, e)  y = ReduceSum<keepdims = 0>(z) }",
            13,
        )
    )
    assert gradients(graph, {"x": x})["x"].tolist() == [[1, 1], [0, 0]]


def test_a_vector_output_takes_its_cotangent() -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    graph = load(
        text_model(
            """g (float[3, 2] x) => (float y) <int64 zero = {0}, int64 one = {1}, float two = {2.0}> {
            a = Gather<axis = 1>(x, zero)  b = Gather<axis = 1>(x, one)  sq = Pow(a, two)  y = Add(sq, b) }""",
            13,
        )
    )
    assert gradients(graph, {"x": x})["x"].tolist() == [[0, 1], [4, 1], [8, 1]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("g (float[N, S] x) => (float y) <int64[1] s = {1}, int64[1] e = {9223372036854775807}, int64[1] a = {1}> { y = Slice(x, s, e, a) }", "[N, S - 1]"),
        ("g (float[N, S] x) => (float y) <int64[1] s = {-1}, int64[1] e = {9223372036854775807}, int64[1] a = {1}> { y = Slice(x, s, e, a) }", "[N, 1]"),
        ("g (float[N, S] x) => (float y) <int64[1] s = {0}, int64[1] e = {-1}, int64[1] a = {1}> { y = Slice(x, s, e, a) }", "[N, S - 1]"),
        ("""g (float[N, S] x, float[N, T] z) => (float y) <int64[1] s = {0}, int64[1] a = {1}, int64 one = {1}, int64[1] ax = {0}> {
            h = Shape(z)  t = Gather(h, one)  e = Unsqueeze(t, ax)  y = Slice(x, s, e, a) }""", "[N, min(S, T)]"),
        ("""g (float[N, 8] x) => (float y) <int64[1] s = {-1}, int64[1] e = {-9223372036854775807}, int64[1] a = {0}, int64[1] k = {-1}> {
            y = Slice(x, s, e, a, k) }""", "[N, 8]"),
    ],
)  # fmt: skip
def test_slices_of_symbols_have_exact_sizes(text: str, expected: str) -> None:
    assert shape_of(load(text_model(text))) == expected


# ---- padding ---------------------------------------------------------------------------------------------------------

PADS = [(0, 1, 0, 2), (1, 0, 1, 0), (1, 3, 0, 2), (0, -1, 0, 2), (-1, 2, 1, -2), (0, 0, 0, 0)]


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
@pytest.mark.parametrize("pads", PADS)
def test_pad_agrees_with_numpy_and_its_derivative_with_differences(mode: str, pads: tuple[int, ...]) -> None:
    x = numbers(3, 5)
    cropped = x[max(-pads[0], 0) : 3 - max(-pads[2], 0), max(-pads[1], 0) : 5 - max(-pads[3], 0)]
    amounts = [(max(pads[i], 0), max(pads[2 + i], 0)) for i in range(2)]
    expected = np.pad(cropped, amounts, mode=mode)  # type: ignore[call-overload]
    inputs = {"x": x, "p": ints(*pads)}
    np.testing.assert_array_equal(run("Pad", inputs, fixed=("p",), mode=mode), expected)
    check("Pad", inputs, fixed=("p",), mode=mode, orders=1)


@pytest.mark.parametrize("mode", ["edge", "reflect", "wrap"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_pad_may_go_round_more_than_once(mode: str, size: int) -> None:
    if mode == "reflect" and size == 1:
        return
    x = numbers(size)
    expected = np.pad(x, (7, 4), mode=mode)  # type: ignore[call-overload]
    np.testing.assert_array_equal(run("Pad", {"x": x, "p": ints(7, 4)}, fixed=("p",), mode=mode), expected)
    check("Pad", {"x": x, "p": ints(7, 4)}, fixed=("p",), mode=mode, orders=1, keep=[("x", 0)])


@pytest.mark.parametrize("opset", [1, 2, 7, 11, 13, 18, 19, 28])
def test_pad_is_the_same_in_every_version(opset: int) -> None:
    x = numbers(2, 3).astype(np.float32)
    expected = np.pad(x, ((0, 0), (1, 2)), constant_values=7)
    if opset == 1:
        found = run("Pad", {"x": x}, opset=opset, paddings=[0, 1, 0, 2], value=7.0)
    elif opset < 11:
        found = run("Pad", {"x": x}, opset=opset, pads=[0, 1, 0, 2], value=7.0)
    elif opset < 18:
        found = run("Pad", {"x": x, "p": ints(0, 1, 0, 2), "v": np.float32(7)}, opset=opset, fixed=("p", "v"))
    else:
        inputs = {"x": x, "p": ints(1, 2), "v": np.float32(7), "a": ints(-1)}
        found = run("Pad", inputs, opset=opset, fixed=("p", "v", "a"))
    np.testing.assert_array_equal(found, expected)


def test_a_pad_value_that_is_data_has_a_gradient() -> None:
    x, v = numbers(2, 3), np.array(0.5)
    np.testing.assert_array_equal(
        run("Pad", {"x": x, "p": ints(1, 0, 0, 2), "v": v}, fixed=("p",)),
        np.pad(x, ((1, 0), (0, 2)), constant_values=0.5),
    )
    check("Pad", {"x": x, "p": ints(1, 0, 0, 2), "v": v}, fixed=("p",), orders=1)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.bool_, np.uint8])
def test_pad_of_other_dtypes(dtype: type) -> None:
    x = np.ones((2,), dtype)
    found = run("Pad", {"x": x, "p": ints(1, 1), "v": np.array(1, dtype)}, fixed=("p", "v"))
    assert found.dtype == dtype
    assert found.tolist() == [1, 1, 1, 1]


def test_a_reflection_of_a_symbolic_size_is_a_constraint() -> None:
    graph = load(text_model('g (float[N] x) => (float y) <int64[2] p = {2, 1}> { y = Pad<mode = "reflect">(x, p) }'))
    assert [str(c) for c in graph.constraints] == ["N >= 3"]


@pytest.mark.parametrize("wanted", [(2, 3), (8, 9), (2, 9), (5, 4), (4, 5)])
def test_crop_or_pad_keeps_the_middle(wanted: tuple[int, int]) -> None:
    x = np.arange(1.0, 21).reshape(4, 5)
    found = run("CenterCropPad", {"x": x, "s": ints(*wanted)}, fixed=("s",))
    assert found.shape == wanted
    check("CenterCropPad", {"x": x, "s": ints(*wanted)}, fixed=("s",), orders=1)


@pytest.mark.parametrize(
    ("strides", "pads", "dilations"),
    [(None, None, None), ([2, 1], None, None), (None, [1, 0, 1, 2], None), ([2, 2], [1, 1, 1, 1], [1, 2])],
)
def test_columns_become_an_image_as_the_transpose_of_taking_them(
    strides: list[int] | None, pads: list[int] | None, dilations: list[int] | None
) -> None:
    s, p, d = strides or [1, 1], pads or [0] * 4, dilations or [1, 1]
    image, block = (5, 6), (2, 3)
    rows, columns = ((image[i] + p[i] + p[2 + i] - d[i] * (block[i] - 1) - 1) // s[i] + 1 for i in range(2))
    x = numbers(2, 3 * 6, rows * columns)
    expected = np.zeros((2, 3, image[0] + p[0] + p[2], image[1] + p[1] + p[3]))
    taken = x.reshape(2, 3, 2, 3, rows, columns)
    for i, j, r, c in np.ndindex(2, 3, rows, columns):
        expected[:, :, r * s[0] + i * d[0], c * s[1] + j * d[1]] += taken[:, :, i, j, r, c]
    expected = expected[:, :, p[0] : p[0] + image[0], p[1] : p[1] + image[1]]
    options = {k: v for k, v in (("strides", strides), ("pads", pads), ("dilations", dilations)) if v is not None}
    inputs = {"x": x, "i": ints(*image), "b": ints(*block)}
    np.testing.assert_allclose(run("Col2Im", inputs, fixed=("i", "b"), **options), expected)
    check("Col2Im", inputs, fixed=("i", "b"), orders=1, **options)


# ---- tensors made of nothing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "limit", "delta"),
    [(0, 5, 1), (10, 4, -2), (1, 1, 1), (3, 1, 1), (0.0, 1.0, 0.25), (1.5, -2.0, -0.75), (2, 9, 3)],
)
def test_range_agrees_with_numpy(start: float, limit: float, delta: float) -> None:
    dtype = np.int64 if isinstance(start, int) else np.float64
    inputs = {n: np.array(v, dtype) for n, v in (("s", start), ("l", limit), ("d", delta))}
    np.testing.assert_allclose(run("Range", inputs, fixed=("s", "l", "d")), np.arange(start, limit, delta, dtype))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("r = Range(zero, n, one)", "[N]"),
        ("r = Range(one, n, one)", "[N - 1]"),
        ("r = Range(zero, n, two)", "[(N + 1)//2]"),
        ("f = Cast<to = 1>(n)  a = Cast<to = 1>(zero)  b = Cast<to = 1>(one)  r = Range(a, f, b)", "[N]"),
    ],
)
def test_ranges_of_symbols_have_exact_sizes(code: str, expected: str) -> None:
    graph = load(
        text_model(
            f"""g (float[N, 3] x) => (float y) <int64 zero = {{0}}, int64 one = {{1}}, int64 two = {{2}}> {{
            s = Shape(x)  n = Gather(s, zero)  {code}  y = Cast<to = 1>(r) }}"""
        )
    )
    assert shape_of(graph) == expected


def test_a_range_that_depends_on_data_is_refused() -> None:
    with pytest.raises(Refusal, match="limit must be known when the model is read"):
        load(model_of("Range", {"s": np.array(0), "l": np.array(5), "d": np.array(1)}, fixed=("s", "d")))


@pytest.mark.parametrize("k", [-3, -1, 0, 1, 4])
@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("known", [True, False])
def test_triangles_agree_with_numpy_and_differences(k: int, upper: int, known: bool) -> None:
    x = numbers(2, 3, 4)
    inputs, fixed = {"x": x, "k": np.array(k, np.int64)}, ("k",) if known else ()
    np.testing.assert_array_equal(run("Trilu", inputs, upper=upper, fixed=fixed), (np.triu if upper else np.tril)(x, k))
    check("Trilu", inputs, upper=upper, fixed=fixed, orders=1)


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, np.float16])
def test_triangles_of_other_dtypes(dtype: type) -> None:
    x = np.ones((3, 3), dtype)
    np.testing.assert_array_equal(run("Trilu", {"x": x}), np.triu(x))


@pytest.mark.parametrize("k", [-1, 0, 2])
def test_eye_has_ones_on_its_diagonal(k: int) -> None:
    x = np.zeros((3, 4), np.int32)
    np.testing.assert_array_equal(run("EyeLike", {"x": x}, k=k), np.eye(3, 4, k, np.int32))
    found = run("EyeLike", {"x": x}, k=k, dtype=onnx.TensorProto.DOUBLE)
    assert found.dtype == np.float64


def test_constants_of_a_symbolic_shape_need_no_data() -> None:
    graph = load(
        text_model(
            "g (float[N, 3] x) => (float y) { s = Shape(x)  c = ConstantOfShape<value = float[1] {2.0}>(s)  y = Mul(x, c) }"
        )
    )
    assert shape_of(graph) == "[N, 3]"
    np.testing.assert_array_equal(evaluate(graph, {"x": np.ones((4, 3), np.float32)})["y"], np.full((4, 3), 2))


# ---- exporters' shape code -------------------------------------------------------------------------------------------

EXPORTED = {
    "upsampled by a factor": (
        """g (float[N, C, H, W] x) => (float y) <int64[1] two = {2}, int64[1] four = {4}, float[2] f = {2.0, 2.0}, int64[1] zero = {0}> {
           s = Shape(x)  hw = Slice(s, two, four)  hf = Cast<to = 1>(hw)  big = Mul(hf, f)  fl = Floor(big)  i = Cast<to = 7>(fl)
           nc = Slice(s, zero, two)  w = Concat<axis = 0>(nc, i)  y = ConstantOfShape(w) }""",
        "[N, C, 2*H, 2*W]",
    ),
    "expanded to itself where -1": (
        """g (float[N, 3] x) => (float y) <int64[2] t = {-1, 3}, int64[2] ones = {1, 1}, int64[2] minus = {-1, -1}> {
           e = Equal(t, minus)  w = Where(e, ones, t)  y = Expand(x, w) }""",
        "[N, 3]",
    ),
    "a causal mask": (
        """g (float[N, S] x) => (float y) <int64 one = {1}, int64[1] ax = {0}> {
           s = Shape(x)  n = Gather(s, one)  v = Unsqueeze(n, ax)  w = Concat<axis = 0>(v, v)  c = ConstantOfShape(w)  y = Trilu(c) }""",
        "[S, S]",
    ),
    "positions": (
        """g (int64[N, S] x) => (int64 y) <int64 zero = {0}, int64 one = {1}, int64[1] ax = {0}> {
           s = Shape(x)  n = Gather(s, one)  r = Range(zero, n, one)  u = Unsqueeze(r, ax)  y = Expand(u, s) }""",
        "[N, S]",
    ),
    "half of an axis": (
        """g (float[N, 2] x) => (float y) <int64 zero = {0}, int64 two = {2}, int64[1] ax = {0}, int64[1] z = {0}> {
           s = Shape(x)  n = Gather(s, zero)  d = Mul(n, two)  h = Div(d, two)  e = Unsqueeze(h, ax)  y = Slice(x, z, e) }""",
        "[N, 2]",
    ),
    "heads": (
        """g (float[B, S, 16] x) => (float y) <int64[2] a = {0, 0}, int64[4] w = {0, 0, 4, -1}, int64[3] b = {0, 0, -1}> {
           h = Reshape(x, w)  t = Transpose<perm = [0, 2, 1, 3]>(h)  u = Transpose<perm = [0, 2, 1, 3]>(t)  y = Reshape(u, b) }""",
        "[B, S, 16]",
    ),
    "windows of an image": (
        """g (float[B, H, W, 8] x) => (float y) <int64 zero = {0}, int64 i1 = {1}, int64 i2 = {2}, int64 seven = {7},
           int64[1] ax = {0}, int64[1] s7 = {7}, int64[1] c = {8}> {
           s = Shape(x)  b = Gather(s, zero)  h = Gather(s, i1)  w = Gather(s, i2)  hq = Div(h, seven)  wq = Div(w, seven)
           b1 = Unsqueeze(b, ax)  h1 = Unsqueeze(hq, ax)  w1 = Unsqueeze(wq, ax)  v = Concat<axis = 0>(b1, h1, s7, w1, s7, c)  y = Reshape(x, v) }""",
        "[B, H//7, 7, W//7, 7, 8]",
    ),
    "a size from Size": (
        "g (float[N, 3] x) => (float y) <int64[1] ax = {0}> { n = Size(x)  v = Unsqueeze(n, ax)  y = Reshape(x, v) }",
        "[3*N]",
    ),
    "the last sizes by start and end": (
        "g (float[N, C, 4] x) => (float y) <int64[1] m = {-1}> { t = Shape<start = -1>(x)  w = Concat<axis = 0>(m, t)  y = Reshape(x, w) }",
        "[C*N, 4]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPORTED)
def test_sizes_that_exporters_compute_are_known_with_symbols(name: str) -> None:
    text, expected = EXPORTED[name]
    graph = load(text_model(text))
    assert shape_of(graph) == expected
    assert not any(n.primitive.name in ("dim", "concat", "div") for n in every_node(graph))


@pytest.mark.parametrize("sizes", [
    "n = Neg (t)  r = Mod (n, four)",
    "m = Mod (t, four)  d = Sub (four, m)  r = Mod (d, four)",
    "q = Sub (one, t)  e = Sub (q, one)  r = Mod (e, four)",
])  # fmt: skip
def test_padding_to_a_multiple_is_known_from_a_modulo_of_a_negative_size(sizes: str) -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float[N, T] x) => (float[N, K, 4] y) <int64[1] one = {{1}}, int64[1] four = {{4}}, int64[1] zero = {{0}}, int64[3] s = {{0, -1, 4}}> {{
      shape = Shape (x)  t = Gather (shape, one)  {sizes}
      ends = Concat <axis = 0> (zero, zero, zero, r)  p = Pad (x, ends)  y = Reshape (p, s)
    }}""")
    graph = load(model)
    assert graph.constraints == ()
    for n in (1, 3, 4, 5, 8):
        x = np.arange(2 * n, dtype=np.float32).reshape(2, n) + 1
        wanted = np.pad(x, ((0, 0), (0, -n % 4))).reshape(2, -1, 4)
        np.testing.assert_array_equal(evaluate(graph, {"x": x})["y"], wanted)
