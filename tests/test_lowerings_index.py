"""Reading and writing at places that are data; orders; sequences: values, derivatives, ties and repeated places, every version's signature."""

from __future__ import annotations

from typing import Any

import numpy as np
import pullback
import pytest
from lowered import check, gradients, model_of, run, text_model
from pullback.algebra.dims import show_shape
from pullback.algebra.errors import Refusal
from pullback.algebra.evaluate import evaluate
from pullback.frontends.onnx_import import load

RNG = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return RNG.uniform(-1, 1, shape)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def apart(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Tensors of numbers of which no two are near, as a maximum has no derivative where two tie."""
    counts = [int(np.prod(s)) for s in shapes]
    line = RNG.permutation(np.linspace(-1, 1, sum(counts)))
    return [part.reshape(s) for part, s in zip(np.split(line, np.cumsum(counts)[:-1]), shapes, strict=True)]


KNOWN = pytest.mark.parametrize("known", [True, False], ids=["known", "data"])

# ---- reading ---------------------------------------------------------------------------------------------------------


@KNOWN
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (0,)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_gather_agrees_with_numpy_and_its_derivative_with_differences(
    known: bool, axis: int, shape: tuple[int, ...], dtype: type
) -> None:
    x, i = numbers(3, 4), RNG.integers(-3, 3, shape).astype(dtype)
    inputs, options = {"x": x, "i": i}, {"axis": axis, "fixed": ("i",) if known else ()}
    np.testing.assert_array_equal(run("Gather", inputs, **options), np.take(x, i, axis))
    check("Gather", inputs, orders=2 if dtype is np.int64 else 1, **options)


@KNOWN
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(3, 4), (2, 4), (3, 2), (5, 4), (3, 6)])
def test_gather_elements_agrees_with_numpy_and_its_derivative_with_differences(
    known: bool, axis: int, shape: tuple[int, int]
) -> None:
    x = numbers(3, 4)
    if any(s > d for a, (s, d) in enumerate(zip(shape, x.shape, strict=True)) if a != axis % 2):
        return
    i = RNG.integers(-x.shape[axis], x.shape[axis], shape)
    part = x[: shape[0]] if axis % 2 == 1 else x[:, : shape[1]]
    inputs, options = {"x": x, "i": i}, {"axis": axis, "fixed": ("i",) if known else ()}
    np.testing.assert_array_equal(
        run("GatherElements", inputs, **options), np.take_along_axis(part, i % x.shape[axis], axis)
    )
    check("GatherElements", inputs, orders=1, **options)


def gathered(x: np.ndarray, i: np.ndarray, b: int) -> np.ndarray:
    rows = [x[(*at[:b], *i[at])] for at in np.ndindex(*i.shape[:-1])]
    return np.array(rows).reshape(*i.shape[:-1], *x.shape[b + i.shape[-1] :])


@KNOWN
@pytest.mark.parametrize(("shape", "lead", "width", "batch"), [
    ((3, 4), (), 1, 0), ((3, 4), (5,), 2, 0), ((3, 4), (5,), 1, 0), ((3, 4, 2), (2, 3), 2, 0), ((2, 3, 4), (2,), 1, 1), ((2, 3, 4), (2, 5), 2, 1),
    ((2, 3, 4, 2), (2, 3), 1, 2), ((2, 3, 4, 2), (2, 3, 5), 2, 2), ((2, 3, 4), (2, 0), 1, 1),
])  # fmt: skip
def test_gather_nd_agrees_with_numpy_and_its_derivative_with_differences(
    known: bool, shape: tuple[int, ...], lead: tuple[int, ...], width: int, batch: int
) -> None:
    x = numbers(*shape)
    sizes = shape[batch : batch + width]
    i = np.stack([RNG.integers(-d, d, lead) for d in sizes], -1)
    inputs, options = {"x": x, "i": i}, {"batch_dims": batch, "fixed": ("i",) if known else ()}
    np.testing.assert_array_equal(run("GatherND", inputs, **options), gathered(x, i, batch))
    check("GatherND", inputs, orders=1, keep=[("i", i.ndim - 1)], **options)


def test_a_repeated_index_adds_its_gradients_up() -> None:
    x, i = numbers(3, 2), ints(0, -3, 2, 0)
    found = gradients(load(model_of("Gather", {"x": x, "i": i})), {"x": x, "i": i})["x"]
    assert found.tolist() == [[3, 3], [0, 0], [1, 1]]


# ---- writing ---------------------------------------------------------------------------------------------------------

REDUCTIONS = ["none", "add", "mul", "max", "min"]
FUNCTIONS = {"none": lambda a, b: b, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def wrote_elements(x: np.ndarray, i: np.ndarray, u: np.ndarray, axis: int, reduction: str) -> np.ndarray:
    y = x.copy()
    for at in np.ndindex(*i.shape):
        place = list(at)
        place[axis] = i[at]
        y[tuple(place)] = FUNCTIONS[reduction](y[tuple(place)], u[at])
    return y


@KNOWN
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(4, 5), (2, 5), (4, 3), (2, 3)])
def test_scatter_elements_agrees_with_numpy_and_its_derivative_with_differences(
    known: bool, reduction: str, axis: int, shape: tuple[int, int]
) -> None:
    x, u = apart((4, 5), shape)
    size = x.shape[axis]
    if reduction == "none":
        i = np.argsort(RNG.uniform(size=shape), axis)
        i = np.where(i % 2, i - size, i)
    else:
        i = RNG.integers(-size, size, shape)
    inputs, options = {"x": x, "i": i, "u": u}, {"axis": axis, "fixed": ("i",) if known else (), "reduction": reduction}
    np.testing.assert_allclose(run("ScatterElements", inputs, **options), wrote_elements(x, i, u, axis, reduction))
    check("ScatterElements", inputs, orders=2 if reduction in ("mul", "add") and shape == (4, 5) else 1, **options)


@KNOWN
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("shape", "width", "count"), [((4,), 1, 3), ((4, 3), 1, 3), ((4, 3), 2, 5), ((2, 3, 2), 2, 4), ((4, 2), 1, 0)]
)
def test_scatter_nd_agrees_with_numpy_and_its_derivative_with_differences(
    known: bool, reduction: str, shape: tuple[int, ...], width: int, count: int
) -> None:
    x, u = apart(shape, (count, *shape[width:]))
    sizes = shape[:width]
    flat = (
        RNG.permutation(int(np.prod(sizes)))[:count]
        if reduction == "none"
        else RNG.integers(0, int(np.prod(sizes)), count)
    )
    i = np.stack(np.unravel_index(flat, sizes), -1).astype(np.int64).reshape(count, width)
    i = np.where(RNG.integers(0, 2, i.shape), i, i - np.array(sizes))
    expected = x.copy()
    for row, at in enumerate(i):
        expected[tuple(at)] = FUNCTIONS[reduction](expected[tuple(at)], u[row])
    inputs, options = {"x": x, "i": i, "u": u}, {"fixed": ("i",) if known else (), "reduction": reduction}
    np.testing.assert_allclose(run("ScatterND", inputs, **options), expected)
    check("ScatterND", inputs, orders=1, keep=[("i", 1)], **options)


@KNOWN
@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
@pytest.mark.parametrize("reduction", ["max", "min"])
def test_ties_of_written_extremes_are_shared_by_all_that_take_part(known: bool, op: str, reduction: str) -> None:
    x, u = np.array([1.0, 5.0, 1.0]), np.array([1.0, 1.0, 5.0, -1.0 if reduction == "max" else 9.0])
    i = ints(0, 0, 1, 2)
    inputs = {"x": x, "i": i if op == "ScatterElements" else i[:, None], "u": u}
    graph = load(model_of(op, inputs, fixed=("i",) if known else (), reduction=reduction))
    found = gradients(graph, {k: v for k, v in inputs.items() if k != "i" or not known})
    np.testing.assert_allclose(found["x"], [1 / 3, 1 / 2, 1])
    np.testing.assert_allclose(found["u"], [1 / 3, 1 / 3, 1 / 2, 0])


def test_written_extremes_have_the_gradients_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    for reduction, name in names.items():
        x, u = RNG.integers(-2, 3, (4, 6)).astype(float), RNG.integers(-2, 3, (4, 9)).astype(float)
        i = RNG.integers(0, 6, (4, 9))
        a, b = torch.tensor(x, requires_grad=True), torch.tensor(u, requires_grad=True)
        y = a.scatter_reduce(1, torch.tensor(i), b, name, include_self=True)
        ct = numbers(4, 6)
        y.backward(torch.tensor(ct))
        inputs = {"x": x, "i": i, "u": u}
        for known in (True, False):
            graph = load(
                model_of("ScatterElements", inputs, fixed=("i",) if known else (), axis=1, reduction=reduction)
            )
            feeds = {k: v for k, v in inputs.items() if k != "i" or not known}
            np.testing.assert_allclose(evaluate(graph, feeds)["y"], y.detach().numpy())
            found = gradients(graph, feeds, seeds={"y": ct})
            np.testing.assert_allclose(found["x"], a.grad.numpy(), atol=1e-12, err_msg=reduction)
            np.testing.assert_allclose(found["u"], b.grad.numpy(), atol=1e-12, err_msg=reduction)


def test_of_known_places_the_last_write_holds() -> None:
    x, i, u = np.zeros(3), ints(1, 1, -2, 0), np.array([1.0, 2.0, 3.0, 4.0])
    graph = load(model_of("ScatterElements", {"x": x, "i": i, "u": u}, fixed=("i",)))
    assert evaluate(graph, {"x": x, "u": u})["y"].tolist() == [4, 3, 0]
    found = gradients(graph, {"x": x, "u": u})
    assert found["x"].tolist() == [0, 0, 1]
    assert found["u"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("op", "opset"),
    [("Scatter", 9), ("Scatter", 10), ("ScatterElements", 11), ("ScatterElements", 13), ("ScatterElements", 28)],
)
def test_scatter_is_the_same_in_every_version(op: str, opset: int) -> None:
    x, i, u = np.zeros((2, 3), np.float32), np.array([[2, 0], [1, 2]]), np.ones((2, 2), np.float32)
    np.testing.assert_array_equal(run(op, {"x": x, "i": i, "u": u}, opset=opset, axis=1), [[1, 0, 1], [0, 1, 1]])


@KNOWN
@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.float16])
def test_other_dtypes_are_written_too(known: bool, dtype: type) -> None:
    x, i, u = np.zeros(4, dtype), ints(2, 0), np.ones(2, dtype)
    found = run("ScatterElements", {"x": x, "i": i, "u": u}, fixed=("i",) if known else ())
    assert found.dtype == dtype
    assert found.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("given", [True, False])
def test_a_cache_is_written_from_each_samples_place_on(mode: str, given: bool) -> None:
    past, update = numbers(2, 3, 5, 2), numbers(2, 3, 2, 2)
    places = ints(3, 1 if mode == "linear" else 4)
    expected = past.copy()
    for b, s in np.ndindex(2, 2):
        expected[b, :, ((places[b] if given else 0) + s) % 5] = update[b, :, s]
    inputs = {"past": past, "update": update, "at": places if given else None}
    np.testing.assert_array_equal(run("TensorScatter", inputs, mode=mode), expected)
    check("TensorScatter", inputs, mode=mode, orders=1)


# ---- classes and orders ----------------------------------------------------------------------------------------------


@KNOWN
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float32])
def test_one_hot_agrees_with_numpy_and_is_differentiable_in_its_values(known: bool, axis: int, dtype: type) -> None:
    i, values = np.array([0, 2, -1, 5, -4], dtype), np.array([0.25, 3.0])
    expected = np.full((5, 3), 0.25)
    for row, at in enumerate(i):
        if -3 <= at < 3:
            expected[row, int(at)] = 3
    inputs = {"i": i, "depth": np.array(3, np.int64), "values": values}
    options = {"axis": axis, "fixed": ("depth", "i") if known else ("depth",)}
    np.testing.assert_array_equal(run("OneHot", inputs, **options), expected.T if axis == 0 else expected)
    graph = load(model_of("OneHot", inputs, **options))
    feeds = {k: v for k, v in inputs.items() if k not in options["fixed"]} | {n: c.array for n, c in graph.data.items()}
    assert gradients(graph, feeds, ["values"])["values"].tolist() == [12, 3]


@pytest.mark.parametrize("opset", [9, 10, 11, 24, 28])
@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("axis", [0, -1])
def test_the_largest_few_are_the_same_in_every_version(opset: int, largest: int, axis: int) -> None:
    x = RNG.integers(0, 4, (4, 5)).astype(np.float32)
    if opset < 11 and not largest:
        return
    order = np.argsort(-x if largest else x, axis=axis, kind="stable")
    places = np.take(order, range(2), axis)
    if opset < 10:
        inputs: dict[str, np.ndarray] = {"x": x}
        options: dict[str, Any] = {"k": 2}
    else:
        inputs, options = {"x": x, "k": ints(2)}, {"fixed": ("k",)}
    if opset >= 11:
        options["largest"] = largest
    values, at = run("TopK", inputs, opset=opset, axis=axis, outputs=2, **options)
    np.testing.assert_array_equal(at, places)
    np.testing.assert_array_equal(values, np.take_along_axis(x, places, axis))


@pytest.mark.parametrize("dtype", [np.uint64, np.uint32, np.int64, np.int8])
@pytest.mark.parametrize("largest", [0, 1])
def test_the_largest_few_integers_are_exact(dtype: type, largest: int) -> None:
    top = int(np.iinfo(dtype).max)
    x = np.array([top, 0, top - 1, 5, int(np.iinfo(dtype).min), top], dtype)
    values, at = run("TopK", {"x": x, "k": ints(3)}, fixed=("k",), outputs=2, largest=largest)
    order = sorted(range(6), key=lambda i: (-int(x[i]) if largest else int(x[i]), i))[:3]
    assert at.tolist() == order
    assert values.tolist() == x[order].tolist()
    assert run("ArgMax", {"x": x}, keepdims=0).tolist() == 0


def test_the_gradient_of_the_largest_few_goes_to_the_elements_chosen() -> None:
    x = np.array([[1.0, 3.0, 3.0, 2.0]])
    graph = load(model_of("TopK", {"x": x, "k": ints(2)}, fixed=("k",), outputs=2))
    found = gradients(graph, {"x": x}, seeds={"y0": np.array([[5.0, 7.0]])})["x"]
    assert found.tolist() == [[0, 5, 7, 0]]
    check("TopK", {"x": numbers(2, 6), "k": ints(3)}, fixed=("k",), outputs=2, orders=2)


@pytest.mark.parametrize(("batch", "time"), [(0, 1), (1, 0)])
def test_sequences_are_reversed_up_to_their_length(batch: int, time: int) -> None:
    x, lengths = numbers(3, 3, 2), ints(1, 3, 2)
    expected = x.copy()
    for b, n in enumerate(lengths):
        line = np.take(x, b, batch)
        line = np.concatenate([line[:n][::-1], line[n:]])
        expected[(b, slice(None)) if batch == 0 else (slice(None), b)] = line
    inputs = {"x": x, "n": lengths}
    np.testing.assert_array_equal(run("ReverseSequence", inputs, batch_axis=batch, time_axis=time), expected)
    check("ReverseSequence", inputs, batch_axis=batch, time_axis=time, orders=1)


@KNOWN
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_compression_is_differentiable(known: bool, axis: int | None) -> None:
    x, condition = numbers(3, 4), np.array([True, False, True])
    inputs, options = (
        {"x": x, "c": condition},
        {"fixed": ("c",) if known else (), **({} if axis is None else {"axis": axis})},
    )
    np.testing.assert_array_equal(run("Compress", inputs, **options), np.compress(condition, x, axis))
    graph = load(model_of("Compress", inputs, **options))
    feeds = {k: v for k, v in inputs.items() if k not in options["fixed"]}
    kept = np.zeros((3, 4))
    index = np.flatnonzero(condition)
    kept.reshape(-1)[index] = 1 if axis is None else 0
    if axis is not None:
        kept[(index,) if axis == 0 else (slice(None), index)] = 1
    assert gradients(graph, feeds, ["x"])["x"].tolist() == kept.tolist()


@KNOWN
@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.bool_, np.int8])
@pytest.mark.parametrize("sorted_", [0, 1])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_distinct_elements_agree_with_numpy(known: bool, dtype: type, sorted_: int, axis: int | None) -> None:
    x = np.array([[2, 1, 2], [2, 1, 2], [0, 1, 0], [2, 1, 1]]).astype(dtype)
    options = {} if axis is None else {"axis": axis}
    values, first, inverse, counts = run(
        "Unique", {"x": x}, fixed=("x",) if known else (), outputs=4, sorted=sorted_, **options
    )
    expected = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    lines = x.reshape(-1) if axis is None else x
    if sorted_:
        np.testing.assert_array_equal(values, expected[0])
        np.testing.assert_array_equal(first, expected[1])
        np.testing.assert_array_equal(counts, expected[3])
    else:
        assert first.tolist() == sorted(expected[1].tolist())
        assert counts.sum() == lines.shape[axis or 0]
    np.testing.assert_array_equal(np.take(values, inverse, axis or 0), lines)
    np.testing.assert_array_equal(np.take(lines, first, axis or 0), values)


@KNOWN
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 3, 4), (0, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_])
def test_places_of_what_is_not_zero_agree_with_numpy(known: bool, shape: tuple[int, ...], dtype: type) -> None:
    x = RNG.integers(0, 2, shape).astype(dtype)
    found = run("NonZero", {"x": np.asarray(x)}, fixed=("x",) if known else ())
    np.testing.assert_array_equal(found, np.stack(np.nonzero(np.atleast_1d(x))))


def test_a_size_that_depends_on_data_is_a_symbol_of_its_own() -> None:
    graph = load(
        text_model(
            """g (float[N, 4] x) => (float y, int64[K, 1] t) <int64 zero = {0}, int64[1] ax = {1}, float nought = {0.0}> {
            s = ReduceSum<keepdims = 0>(x, ax)  m = Greater(s, nought)  i = NonZero(m)  t = Transpose(i)
            j = Gather(i, zero)  z = Gather(x, j)  y = Mul(z, z) }""",
            17,
        )
    )
    assert show_shape(graph.outputs["y"].shape) == "[i_size, 4]"
    for rows in ([1, -1, 2], [-1, -1, -1], [1, 1, 1]):
        x = np.array(rows, np.float32)[:, None] * np.ones((1, 4), np.float32)
        found = evaluate(graph, {"x": x})
        np.testing.assert_array_equal(found["y"], x[x[:, 0] > 0] ** 2)
        np.testing.assert_array_equal(gradients(graph, {"x": x})["x"], np.where(x > 0, 2 * x, 0))


def test_a_size_that_depends_on_data_is_read_on_the_runtime() -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    from pullback.backends.onnx_export.emit import to_onnx

    x = np.array([[1, 2], [0, 0], [3, 4]], np.float32)
    text = "g (float[N, 2] x, bool[N] m) => (float y) { z = Compress<axis = 0>(x, m)  y = Add(z, z) }"
    session = onnxruntime.InferenceSession(to_onnx(load(text_model(text))).SerializeToString())
    for mask in ([True, False, True], [False] * 3, [True] * 3):
        np.testing.assert_array_equal(session.run(None, {"x": x, "m": np.array(mask)})[0], 2 * x[mask])


def test_the_rows_that_a_mask_keeps_are_trained_on() -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    weights = ", ".join(f"{i / 10:.1f}" for i in range(12))
    text = f"""g (float[N, 4] x, bool[N] m) => (float[K, 3] y) <float[4, 3] w = {{{weights}}}> {{
        z = Compress<axis = 0>(x, m)  y = MatMul(z, w) }}"""
    step = pullback.training_step(load(text_model(text)), loss="mse_loss", optimizer="sgd", lr=0.1)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(step.to_onnx().SerializeToString(), options)
    x, w = numbers(5, 4).astype(np.float32), np.arange(12, dtype=np.float32).reshape(4, 3) / 10
    for mask in ([True, False, True, True, False], [True] * 5):
        kept, target = x[mask], numbers(sum(mask), 3).astype(np.float32)
        (found,) = session.run(["grad_w"], {"x": x, "m": np.array(mask), "target": target})
        np.testing.assert_allclose(found, 2 / target.size * kept.T @ (kept @ w - target), rtol=1e-5, atol=1e-6)


def test_boxes_that_overlap_a_better_one_are_left_out() -> None:
    boxes = np.array([[[0, 0, 1, 1], [0, 0.1, 1, 1.1], [0, 5, 1, 6], [0, 5, 1, 6.1]]], np.float32)
    scores = np.array([[[0.8, 0.9, 0.7, 0.2]]], np.float32)
    inputs = {"b": boxes, "s": scores, "m": np.array(3), "i": np.float32(0.5), "t": np.float32(0.3)}
    assert run("NonMaxSuppression", inputs).tolist() == [[0, 0, 1], [0, 0, 2]]
    assert run("NonMaxSuppression", {"b": boxes, "s": scores}).shape == (0, 3)  # at most 0 unless told otherwise


# ---- sequences -------------------------------------------------------------------------------------------------------

SEQUENCES = {
    "built and taken apart": ("s = SequenceConstruct(x, z)  y = SequenceAt(s, one)", lambda x, z: z),
    "from the end": ("s = SequenceConstruct(x, z)  y = SequenceAt(s, minus)", lambda x, z: z),
    "inserted in front": (
        "s = SequenceConstruct(x, x)  t = SequenceInsert(s, z, nil)  y = SequenceAt(t, nil)",
        lambda x, z: z,
    ),
    "appended": (
        "e = SequenceEmpty()  s = SequenceInsert(e, x)  t = SequenceInsert(s, z)  y = SequenceAt(t, one)",
        lambda x, z: z,
    ),
    "erased": ("s = SequenceConstruct(x, z)  t = SequenceErase(s, nil)  y = SequenceAt(t, nil)", lambda x, z: z),
    "joined": (
        "s = SequenceConstruct(x, z)  y = ConcatFromSequence<axis = 1>(s)",
        lambda x, z: np.concatenate([x, z], 1),
    ),
    "stacked": (
        "s = SequenceConstruct(x, z)  y = ConcatFromSequence<axis = -1, new_axis = 1>(s)",
        lambda x, z: np.stack([x, z], -1),
    ),
    "split in ones": ("s = SplitToSequence<axis = 1>(x)  y = SequenceAt(s, one)", lambda x, z: x[:, 1:2]),
    "split without the axis": (
        "s = SplitToSequence<axis = 1, keepdims = 0>(x)  y = SequenceAt(s, one)",
        lambda x, z: x[:, 1],
    ),
    "split in pieces of two": ("s = SplitToSequence<axis = 1>(x, two)  y = SequenceAt(s, one)", lambda x, z: x[:, 2:]),
    "split in given sizes": ("s = SplitToSequence<axis = 1>(x, sizes)  y = SequenceAt(s, one)", lambda x, z: x[:, 1:]),
    "an optional": ("o = Optional(x)  y = OptionalGetElement(o)", lambda x, z: x),
    "the same": ("s = SequenceConstruct(x, z)  t = Identity(s)  y = SequenceAt(t, nil)", lambda x, z: x),
    "counted": (
        "s = SequenceConstruct(x, z)  n = SequenceLength(s)  f = Cast<to = 11>(n)  y = Mul(x, f)",
        lambda x, z: 2 * x,
    ),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_whose_use_is_known_leave_no_trace(name: str) -> None:
    body, expected = SEQUENCES[name]
    ints_ = "int64 nil = {0}, int64 one = {1}, int64 two = {2}, int64 minus = {-1}, int64[2] sizes = {1, 2}"
    graph = load(text_model(f"g (double[2, 3] x, double[2, 3] z) => (double y) <{ints_}> {{ {body} }}", 18))
    x, z = numbers(2, 3), numbers(2, 3)
    np.testing.assert_allclose(evaluate(graph, {"x": x, "z": z})["y"], expected(x, z))
    assert gradients(graph, {"x": x, "z": z})


def test_a_graph_is_applied_to_each_tensor_of_a_sequence() -> None:
    graph = load(
        text_model(
            """g (double[2] x, double[3] z, double w) => (double y) <int64 one = {1}> {
            s = SequenceConstruct(x, z)
            t = SequenceMap<body = inner (double a, double b) => (double c) { c = Mul(a, b) }>(s, w)
            y = SequenceAt(t, one) }""",
            18,
        )
    )
    feeds = {"x": numbers(2), "z": numbers(3), "w": np.array(2.0)}
    np.testing.assert_allclose(evaluate(graph, feeds)["y"], 2 * feeds["z"])


def test_a_position_that_is_data_is_refused_with_the_reason() -> None:
    with pytest.raises(Refusal, match=r"SequenceAt.*must be known when the model is read"):
        load(
            text_model("g (float[2] x, int64 i) => (float y) { s = SequenceConstruct(x, x)  y = SequenceAt(s, i) }", 18)
        )


def test_a_symbolic_size_split_in_ones_is_refused_with_the_way_out() -> None:
    with pytest.raises(Refusal, match="depends on a symbolic size: give it with dims"):
        load(
            text_model(
                "g (float[N] x) => (float y) <int64 i = {0}> { s = SplitToSequence(x)  y = SequenceAt(s, i) }", 18
            )
        )


def test_a_table_looked_up_with_symbols_keeps_them() -> None:
    graph = load(
        text_model(
            "g (int64[B, S] i) => (float y) <float[10, 4] w = {" + ", ".join(["0.5"] * 40) + "}> { y = Gather(w, i) }"
        )
    )
    assert show_shape(graph.outputs["y"].shape) == "[B, S, 4]"
