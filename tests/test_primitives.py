"""Every primitive, by the table of samples."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

import numpy as np
import pytest
from numerics import check_pullback, pulled_back, tensors
from pullback.algebra import primitives as p
from pullback.algebra.dims import evaluate as size_of
from pullback.algebra.errors import PullbackError
from pullback.algebra.evaluate import evaluate, evaluate_all
from pullback.algebra.graph import Graph
from pullback.algebra.text import constants, parse, show
from pullback.algebra.types import DTYPES, DType, TupleType
from pullback.algebra.verify import verify
from samples import FAILS, SAMPLES, Fails, P, Sample

every = pytest.mark.parametrize("sample", SAMPLES, ids=str)


def _rng(sample: Sample) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(str(sample).encode()))


def test_no_primitive_lacks_a_sample() -> None:
    assert {s.primitive.name for s in SAMPLES} == set(p.BY_NAME)


def test_every_primitive_says_what_it_is() -> None:
    assert [q.name for q in p.PRIMITIVES if not q.formula] == []
    assert len(p.BY_NAME) == len(p.PRIMITIVES)
    assert [
        q.name for q in p.PRIMITIVES if q.name != "input" and not hasattr(p, {"while": "while_"}.get(q.name, q.name))
    ] == []


def _agrees(graph: Graph, sample: Sample, sizes: dict[str, int], feeds: dict[str, np.ndarray]) -> None:
    values = evaluate_all(graph, feeds, sizes=sizes)
    for node in graph.nodes:
        value = values[id(node)]
        for t, array in zip(tensors(node), value if isinstance(value, tuple) else (value,), strict=True):
            assert np.shape(array) == tuple(size_of(d, sizes) for d in t.shape), f"{node!r}\n{show(graph)}"
            assert array.dtype == t.dtype.numpy, f"{node!r} computed as {array.dtype}\n{show(graph)}"


@every
def test_the_inferred_type_is_the_computed_one(sample: Sample) -> None:
    graph, rng = verify(sample.graph()), _rng(sample)
    back = verify(pulled_back(graph, sample.wanted()))
    for sizes in (sample.sizes, *sample.also):
        sizes = {**sample.sizes, **sizes}
        feeds = sample.feeds(rng, sizes)
        _agrees(graph, sample, sizes, feeds)
        seeds = {}
        for v in back.inputs[len(graph.inputs) :]:
            seeds[v.params["name"]] = np.ones([size_of(d, sizes) for d in v.shape], v.dtype.numpy)
        _agrees(back, sample, sizes, {**feeds, **seeds})


def _doubles_only(sample: Sample, graph: Graph) -> bool:
    return all(d.numpy == np.float64 for d in _floats(graph))


@every
def test_the_pullback_agrees_with_finite_differences_at_orders_1_and_2(sample: Sample) -> None:
    graph, rng = sample.graph(), _rng(sample)
    if not sample.wanted() or not _doubles_only(sample, graph) or not graph.outputs["y"].dtype.floating:
        return  # other dtypes: see the test of dtypes, and the test against double
    for sizes in (sample.sizes, *sample.also):
        sizes = {**sample.sizes, **sizes}
        check_pullback(graph, sample.feeds(rng, sizes), sample.wanted(), rng, sizes=sizes)


def _plain(params: Mapping[str, object]) -> dict[str, object]:
    """Parameters as they compare; nested graphs by their text."""
    return {k: show(v) if isinstance(v, Graph) else v for k, v in params.items()}


@every
def test_text_round_trips(sample: Sample) -> None:
    graph = sample.graph()
    for g in (graph, pulled_back(graph, sample.wanted())):
        text = show(g)
        again = parse(text, constants(g))
        assert show(again) == text
        assert [v.type for v in again.nodes] == [v.type for v in g.nodes]
        for a, b in zip(again.nodes, g.nodes, strict=True):
            assert a.primitive is b.primitive
            assert _plain(a.params) == _plain(b.params)


def _floats(graph: Graph) -> set[DType]:
    """The floating dtypes inside."""
    types = [t for v in graph.nodes for t in (v.type.items if isinstance(v.type, TupleType) else (v.type,))]
    inner = [d for v in graph.nodes for g in v.params.values() if isinstance(g, Graph) for d in _floats(g)]
    return {t.dtype for t in types if t.dtype.floating} | set(inner)


@every
def test_the_backward_pass_has_only_the_dtypes_of_the_forward_pass(sample: Sample) -> None:
    graph = sample.graph()
    forward = _floats(graph)
    back = pulled_back(graph, sample.wanted())
    for g in (back, pulled_back(back, sample.wanted())):
        assert _floats(g) <= forward, show(g)


@pytest.mark.parametrize("sample", [s for s in SAMPLES if any(k in str(s) for k in ("f32[", "f16["))], ids=str)
def test_lower_precision_agrees_with_double(sample: Sample) -> None:
    if sample.primitive.name in ("cast", "bit_cast", "input"):
        return
    rng = _rng(sample)
    narrow = pulled_back(sample.graph(), sample.wanted())
    wide_sample = Sample(sample.primitive, tuple(re.sub(r"^(bf16|f16|f32)\[", "f64[", s) for s in sample.operands),
                         sample.params, sample.draw, sample.sizes, sample.also, sample.beside, sample.wrt,
                             sample.build)  # fmt: skip
    wide = pulled_back(wide_sample.graph(), sample.wanted())
    feeds = sample.feeds(rng)
    feeds |= {
        v.params["name"]: np.asarray(rng.standard_normal([size_of(d, sample.sizes) for d in v.shape]), v.dtype.numpy)
        for v in narrow.inputs
        if v.params["role"] == "seed"
    }
    low = 4e-2 if "bf16[" in str(sample) else 5e-3 if "f16[" in str(sample) else 1e-5
    found, expected = evaluate(narrow, feeds, sizes=sample.sizes), evaluate(wide, feeds, sizes=sample.sizes)
    for name in found:
        np.testing.assert_allclose(found[name].astype(np.float64), expected[name], rtol=low, atol=low, err_msg=name)


@pytest.mark.parametrize("row", FAILS, ids=str)
def test_a_wrong_use_is_refused(row: Fails) -> None:
    with pytest.raises(PullbackError, match=row.match) as found:
        row.build()
    assert any(f"in {row.primitive.name}(" in note for note in getattr(found.value, "__notes__", ()))


NARROW = ("i4", "u4", "i2", "u2")
WRAPPING = {
    "add": lambda x: P["add"].numpy(x, x),
    "mul": lambda x: P["mul"].numpy(x, x),
    "neg": P["neg"].numpy,
    "bit_not": P["bit_not"].numpy,
    "reduce_sum": lambda x: P["reduce_sum"].numpy(x, axes=(0,)),
    "reduce_prod": lambda x: P["reduce_prod"].numpy(x, axes=(0,)),
    "cumsum": lambda x: P["cumsum"].numpy(x, axis=0, reverse=False),
    "dot": lambda x: P["dot"].numpy(x, x, contract=((0,), (0,)), batch=((), ())),
    "scatter_add": lambda x: P["scatter_add"].numpy(x, np.zeros(x.size, np.int64), axis=0, size=1),
}


@pytest.mark.parametrize("name", WRAPPING)
@pytest.mark.parametrize("dtype", NARROW)
def test_integers_that_numpy_lacks_wrap_as_those_that_it_has(dtype: str, name: str) -> None:
    to = DTYPES[dtype]
    x = np.arange(2**to.bits).astype(to.numpy)
    found = WRAPPING[name](x)
    assert found.dtype == to.numpy
    np.testing.assert_array_equal(found, WRAPPING[name](x.astype(np.int64)).astype(to.numpy))


@pytest.mark.parametrize("dtype", ["i8", "u8", *NARROW])
@pytest.mark.parametrize("floating", ["f64", "f32", "f16", "bf16"])
def test_a_float_becomes_an_integer_toward_zero_and_wraps(floating: str, dtype: str) -> None:
    """Beyond the range ONNX leaves the value undefined: here it is one and the same for every dtype and release of the libraries."""
    x = np.arange(-9, 16, 0.5).astype(DTYPES[floating].numpy)
    expected = np.trunc(x.astype(np.float64)).astype(np.int64).astype(DTYPES[dtype].numpy)
    np.testing.assert_array_equal(P["cast"].numpy(x, dtype=DTYPES[dtype]), expected)


@pytest.mark.parametrize("dtype", NARROW)
def test_the_largest_of_nothing_is_the_least_number(dtype: str) -> None:
    to = DTYPES[dtype]
    low, high = (-(2 ** (to.bits - 1)), 2 ** (to.bits - 1) - 1) if to.kind == "i" else (0, 2**to.bits - 1)
    empty = np.zeros((0, 2), to.numpy)
    assert P["reduce_max"].numpy(empty, axes=(0,), ties="split").astype(int).tolist() == [low, low]
    assert P["reduce_min"].numpy(empty, axes=(0,), ties="split").astype(int).tolist() == [high, high]
