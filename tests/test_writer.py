"""Files: what is written where, that nothing is left on failure, that weights are streamed, and that large ones go beside."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from pullback.algebra import primitives as p
from pullback.algebra.dims import dim
from pullback.algebra.errors import Refusal
from pullback.algebra.graph import Constant, Graph, building
from pullback.algebra.types import DTYPES, DType, bf16, f32, i4, tensor
from pullback.backends.onnx_export import save, to_onnx, writer
from safetensors.numpy import load_file

N = dim("N")


def layers(*arrays: np.ndarray, roles: tuple[str, ...] = ()) -> Graph:
    """`x W0 W1 ...` and the sum of what is not a matrix."""
    with building():
        x = p.input("x", tensor(f32, (N, 64)))
        inputs, h = [x], x
        for i, array in enumerate(arrays):
            role = roles[i] if roles else "parameter"
            inputs.append(p.input(f"w{i}", tensor(f32, array.shape), role))
            h = p.dot(h, inputs[-1], contract=((1,), (0,)))
    return Graph(tuple(inputs), {"y": h}, "layers", data={f"w{i}": Constant(a) for i, a in enumerate(arrays)})


def matrices(count: int = 2) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((64, 64)).astype(np.float32) / 8 for _ in range(count)]


def output_of(path: Path) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(os.fspath(path), options).run(None, {"x": np.ones((2, 64), np.float32)})[0]


@pytest.mark.parametrize("external", [False, True])
def test_a_written_model_is_whole(tmp_path: Path, external: bool) -> None:
    arrays = matrices()
    graph = layers(*arrays, roles=("parameter", "frozen"))
    files = save(graph, tmp_path / "m.onnx", external=external)
    names = ["m.onnx", "m.onnx.data"] if external else ["m.onnx"]
    assert sorted(f.name for f in files) == sorted(q.name for q in tmp_path.iterdir()) == names
    np.testing.assert_allclose(
        output_of(tmp_path / "m.onnx"), np.ones((2, 64)) @ arrays[0] @ arrays[1], rtol=1e-4, atol=1e-4
    )
    model = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(os.fspath(tmp_path / "m.onnx"), full_check=True)
    for i, array in enumerate(arrays):
        (found,) = (t for t in model.graph.initializer if t.name == f"w{i}")
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(found), array)
    assert [i.name for i in model.graph.input] == ["x", "w0"]


def test_a_written_model_is_the_one_that_to_onnx_gives(tmp_path: Path) -> None:
    graph = layers(*matrices())
    save(graph, tmp_path / "m.onnx")
    written, made = onnx.load(tmp_path / "m.onnx"), to_onnx(graph)
    for model in (written, made):
        tensors = sorted(model.graph.initializer, key=lambda t: t.name)
        del model.graph.initializer[:]
        model.graph.initializer.extend(tensors)
    assert written == made


def test_weights_beyond_the_limit_go_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "EXTERNAL_FROM", 10_000)
    save(layers(*matrices()), tmp_path / "m.onnx")
    assert sorted(q.name for q in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    entries = [
        {e.key: e.value for e in t.external_data}
        for t in onnx.load(tmp_path / "m.onnx", load_external_data=False).graph.initializer
    ]
    assert [int(e["offset"]) % 4096 for e in entries if e] == [0, 0]
    assert {e["location"] for e in entries if e} == {"m.onnx.data"}


def test_values_that_do_not_stand_in_the_model_are_safetensors(tmp_path: Path) -> None:
    arrays = matrices()
    files = save(layers(*arrays, roles=("parameter", "frozen")), tmp_path / "m.onnx", target="iree")
    assert [f.name for f in files] == ["m.onnx", "m.safetensors"]
    held = load_file(tmp_path / "m.safetensors")
    assert list(held) == ["w0"]
    np.testing.assert_array_equal(held["w0"], arrays[0])
    save(layers(*arrays, roles=("parameter", "frozen")), tmp_path / "none.onnx", embed="none")
    assert sorted(load_file(tmp_path / "none.safetensors")) == ["w0", "w1"]
    assert not [t for t in onnx.load(tmp_path / "none.onnx").graph.initializer if t.name.startswith("w")]


@pytest.mark.parametrize("name", sorted(writer._SAFETENSORS))
def test_every_dtype_of_safetensors_is_written(tmp_path: Path, name: str) -> None:
    dtype: DType = DTYPES[name]
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype.numpy)
    with open(tmp_path / "t.safetensors", "wb") as file:
        writer.write_safetensors(file, {"a": Constant(array), "é": Constant(np.asarray(array[0, 0]))})
    if dtype.name.startswith("f8"):
        assert (tmp_path / "t.safetensors").stat().st_size > 7
        return  # the reader of safetensors for numpy has no 8-bit floats
    held = load_file(tmp_path / "t.safetensors")
    assert held["a"].dtype == dtype.numpy
    assert held["é"].shape == ()
    np.testing.assert_array_equal(held["a"], array)


def test_bfloat16_and_4_bit_weights_are_kept(tmp_path: Path) -> None:
    with building():
        x, w = p.input("x", tensor(bf16, (3,))), p.input("w", tensor(bf16, (3,)), "parameter")
        k = p.input("k", tensor(i4, (3,)), "frozen")
        y = p.add(p.add(x, w), p.cast(k, dtype=bf16))
    data = {
        "w": Constant(np.array([1.5, -2, 3], ml_dtypes.bfloat16)),
        "k": Constant(np.array([-8, 7, 1], ml_dtypes.int4)),
    }
    save(Graph((x, w, k), {"y": y}, "g", data=data), tmp_path / "m.onnx", opset=23)
    held = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "m.onnx").graph.initializer}
    np.testing.assert_array_equal(held["w"].astype(np.float32), [1.5, -2, 3])
    np.testing.assert_array_equal(held["k"].astype(np.int64), [-8, 7, 1])


# ---- failure ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"external": True}, {"target": "iree"}], ids=str)
def test_nothing_is_left_when_a_weight_cannot_be_read(tmp_path: Path, options: dict[str, object]) -> None:
    def broken() -> np.ndarray:
        raise OSError("the disk is gone")

    graph = layers(*matrices())
    data = {**graph.data, "w1": Constant(load=broken, shape=(64, 64), dtype=np.dtype(np.float32))}
    (tmp_path / "m.onnx").write_bytes(b"before")
    with pytest.raises(OSError, match="the disk is gone"):
        save(graph.with_(data=data), tmp_path / "m.onnx", **options)  # type: ignore[arg-type]
    assert [q.name for q in tmp_path.iterdir()] == ["m.onnx"]
    assert (tmp_path / "m.onnx").read_bytes() == b"before"


def test_a_refusal_names_everything_and_leaves_no_file(tmp_path: Path) -> None:
    with building():
        x = p.input("x", tensor(bf16, (N,)))
        u = p.input("u", tensor(DTYPES["u32"], (N,)))
        graph = Graph((x, u), {"y": p.exp(x), "z": p.bit_xor(u, u)}, "g")
    with pytest.raises(Refusal) as found:
        save(graph, tmp_path / "m.onnx", target="onnx-mlir")
    assert len(found.value.reasons) == 2
    assert "bfloat16" in str(found.value)
    assert "unsigned" in str(found.value)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="no directory"):
        save(layers(*matrices()), tmp_path / "missing" / "m.onnx")
    with pytest.raises(Refusal, match="is a directory"):
        save(layers(*matrices()), tmp_path)


def test_a_dtype_that_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    with building():
        k = p.input("k", tensor(i4, (3,)), "state")
        graph = Graph((k,), {"y": p.cast(k, dtype=f32)}, "g", data={"k": Constant(np.array([1, 2, 3], ml_dtypes.int4))})
    with pytest.raises(Refusal, match="'k' is int4, which safetensors cannot hold"):
        save(graph, tmp_path / "m.onnx", embed="none")
    assert list(tmp_path.iterdir()) == []


# ---- memory ----------------------------------------------------------------------------------------------------------------------------


def test_weights_are_not_copied(tmp_path: Path) -> None:
    array = np.ones((64, 64 * 1024), np.float32)  # 16 MB
    graph = layers(array)
    tracemalloc.start()
    try:
        save(graph, tmp_path / "m.onnx")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < array.nbytes / 4
    assert (tmp_path / "m.onnx").stat().st_size > array.nbytes
