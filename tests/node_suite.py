"""ONNX's own node suite (and its `simple`, `pytorch-operator` and `pytorch-converted` cases): read, lower, run, compare.

Run as a program:

    python -m tests.node_suite [--op Conv,Gemm] [--case GLOB] [--kind node] [--symbolic] [--engine numpy|onnxruntime] [--failed-only]

A case is run as it is given. Where an operand must be known when the model is read (the shape of a `Reshape`, the axes of a `ReduceSum`), the stored
small operands are made initializers, as they are in real files. A sequence that enters becomes its tensors and a `SequenceConstruct`; one that
leaves becomes its tensors.

With `--symbolic` every size above 1 of what remains an input becomes a symbol of its own; the model may force symbols to be equal or to have a value.
A symbol that the operator cannot take (the channels of a grouped convolution, say) keeps its size; such a case counts as passed in part.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import importlib.util
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import ModelProto, TensorProto, TypeProto, helper, numpy_helper
from pullback.algebra.dims import evaluate as size_of
from pullback.algebra.errors import PullbackError
from pullback.algebra.evaluate import bind_dims, evaluate
from pullback.algebra.graph import Graph
from pullback.algebra.types import dtype_of

KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted")

# Cases that cannot pass, and why: by engine ("" for all), by the case's name or a pattern of names.
LISTED: dict[str, dict[str, str]] = {
    "": {
        "test_ai_onnx_ml_label_encoder_*": "strings",
        "test_equal_string*": "strings",
        "test_image_decoder_*": "an image file is decoded",
        "test_regex_full_match_*": "strings",
        "test_string_*": "strings",
        "test_strnormalizer_*": "strings",
        "test_strnorm_*": "strings",
        "test_tfidfvectorizer_*": "text",
        "test_dft_inverse": "the stored output has a rounding error (1.9e-7, where 0 is exact) above the tolerance",
        "test_dft_inverse_opset19": "the stored output has a rounding error (1.9e-7, where 0 is exact) above the tolerance",
        "test_bernoulli*": "random numbers of another generator",
        "test_training_dropout": "random numbers of another generator",
        "test_training_dropout_mask": "random numbers of another generator",
        "test_training_dropout_default": "random numbers of another generator",
        "test_training_dropout_default_mask": "random numbers of another generator",
    },
    "numpy": {},
    "onnxruntime": {
        **dict.fromkeys(
            (
                "test_attention_*_bf16*",
                "test_celu_bfloat16_expanded",
                "test_einsum_batch_matmul_bfloat16",
                "test_einsum_sum_bfloat16",
                "test_onehot_with_bfloat16_values",
                "test_unique_bfloat16_*",
            ),
            "onnxruntime has no bfloat16 kernels for it on a CPU",
        ),
        "test_*quantizelinear_float4e2m1": "onnxruntime has no kernels for 4-bit floats on a CPU",
        "test_*quantizelinear_*int2": "onnxruntime has no 2-bit integers",
        "test_cast*FLOAT4E2M1*": "onnxruntime has no kernels for 4-bit floats on a CPU",
        "test_cast*INT2*": "onnxruntime has no 2-bit integers",
        "test_cast*FLOAT8E8M0*": "onnxruntime has no 8-bit exponents",
    },
}


@dataclass(frozen=True, slots=True)
class Case:
    """One model with what enters it and what must come out; a sequence is a list of arrays."""

    name: str
    kind: str
    model: ModelProto
    sets: tuple[tuple[list[Any], list[Any]], ...]
    rtol: float
    atol: float

    @property
    def op_types(self) -> frozenset[str]:
        return frozenset(n.op_type for n in self.model.graph.node)


@dataclass(frozen=True, slots=True)
class Result:
    """How a case ended: `passed`, `partly` (some sizes could not be symbols), `listed` or `failed`; and the reason, or what was fixed."""

    case: str
    state: str
    note: str = ""


def _value(proto: Any, kind: str) -> Any:
    if kind == "sequence_type":
        return list(numpy_helper.to_list(proto))
    if kind == "optional_type":
        return numpy_helper.to_optional(proto)
    return numpy_helper.to_array(proto)


def _parse(path: Path, type_: TypeProto) -> Any:
    kind = type_.WhichOneof("value")
    proto = {"sequence_type": onnx.SequenceProto, "optional_type": onnx.OptionalProto}.get(str(kind), TensorProto)()
    proto.ParseFromString(path.read_bytes())
    return _value(proto, str(kind))


def _stored(case: Any, model: ModelProto) -> Iterator[tuple[list[Any], list[Any]]]:
    for folder in sorted(Path(case.model_dir).glob("test_data_set*")):
        yield (
            [_parse(folder / f"input_{i}.pb", v.type) for i, v in enumerate(model.graph.input) if (folder / f"input_{i}.pb").exists()],
            [_parse(folder / f"output_{i}.pb", v.type) for i, v in enumerate(model.graph.output)],
        )  # fmt: skip


@cache
def cases(kind: str = "node") -> tuple[Case, ...]:
    """Every case of a kind, collected once."""
    from onnx.backend.test.loader import load_model_tests

    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in load_model_tests(kind=kind):
            if case.model is None:
                model = onnx.load(Path(case.model_dir) / "model.onnx")
                sets: Iterable[tuple[list[Any], list[Any]]] = _stored(case, model)
            else:
                model = case.model
                sets = [(_plain(i), _plain(o)) for i, o in case.data_sets]
            found.append(Case(case.name, kind, model, tuple(sets), case.rtol, case.atol))
    return tuple(found)


def _plain(values: Sequence[Any]) -> list[Any]:
    """Arrays as they are; protos (of dtypes that numpy lacks) and lists as arrays and lists of arrays."""
    out = []
    for value in values:
        if isinstance(value, TensorProto):
            value = numpy_helper.to_array(value)
        elif isinstance(value, onnx.SequenceProto):
            value = list(numpy_helper.to_list(value))
        elif isinstance(value, onnx.OptionalProto):
            value = numpy_helper.to_optional(value)
        elif not isinstance(value, list) and value is not None:
            value = np.asarray(value)
        out.append(value)
    return out


# ---- a case made into one of tensors ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Plain:
    """A model whose inputs and outputs are tensors, with its feeds and what must come out."""

    model: ModelProto
    feeds: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    fixed: list[str] = field(default_factory=list)


def plain(case: Case, inputs: Sequence[Any], outputs: Sequence[Any]) -> Plain:
    """The case with sequences and optionals taken apart."""
    model = ModelProto()
    model.CopyFrom(case.model)
    graph = model.graph
    stored = {t.name for t in graph.initializer}
    entering = [i for i in graph.input if i.name not in stored]
    nodes, feeds, infos = [], {}, []
    for info, value in zip(entering, inputs, strict=False):
        name = info.name
        kind, inner = info.type.WhichOneof("value"), info.type
        if kind == "optional_type":
            inner = info.type.optional_type.elem_type
            if value is None:
                proto = helper.make_node("Optional", [], [name], name=f"{name}.empty")
                proto.attribute.append(helper.make_attribute("type", inner))
                nodes.append(proto)
                continue
            name = f"{info.name}.held"
            nodes.append(helper.make_node("Optional", [name], [info.name]))
        if inner.WhichOneof("value") == "sequence_type":
            names = [f"{name}.{i}" for i in range(len(value))]
            code = inner.sequence_type.elem_type.tensor_type.elem_type
            empty = not names
            nodes.insert(
                0,
                helper.make_node("SequenceEmpty", [], [name], dtype=code)
                if empty
                else helper.make_node("SequenceConstruct", names, [name]),
            )
            for n, array in zip(names, value, strict=True):
                feeds[n] = np.asarray(array)
                infos.append(helper.make_tensor_value_info(n, code, feeds[n].shape))
        else:
            feeds[name] = np.asarray(value)
            infos.append(helper.make_tensor_value_info(name, inner.tensor_type.elem_type, feeds[name].shape))
    expected, results, after = {}, [], []
    for info, value in zip(graph.output, outputs, strict=True):
        if isinstance(value, list):
            code = helper.np_dtype_to_tensor_dtype(np.asarray(value[0]).dtype) if value else TensorProto.FLOAT
            for i, array in enumerate(value):
                index = helper.make_node("Constant", [], [f"{info.name}.place{i}"], value_int=i)
                after += [
                    index,
                    helper.make_node("SequenceAt", [info.name, f"{info.name}.place{i}"], [f"{info.name}.{i}"]),
                ]
                expected[f"{info.name}.{i}"] = np.asarray(array)
                results.append(helper.make_tensor_value_info(f"{info.name}.{i}", code, None))
            if model.graph.node[-1].op_type.startswith("Sequence") or not value:
                after.append(helper.make_node("SequenceLength", [info.name], [f"{info.name}.length"]))
                expected[f"{info.name}.length"] = np.asarray(len(value), np.int64)
                results.append(helper.make_tensor_value_info(f"{info.name}.length", TensorProto.INT64, []))
        else:
            expected[info.name] = np.asarray(value)
            results.append(info)
    body = [*nodes, *graph.node, *after]
    kept_results = list(results)
    del graph.node[:]
    graph.node.extend(body)
    kept = [i for i in graph.input if i.name in stored]
    del graph.input[:]
    graph.input.extend([*infos, *kept])
    copies = [helper.make_tensor_value_info(r.name, r.type.tensor_type.elem_type, None) for r in kept_results]
    del graph.output[:]
    graph.output.extend(copies)
    return Plain(model, feeds, expected)


def fixed(case: Plain, level: int) -> Plain:
    """The case with small operands made initializers: 1 integers up to rank 1, 2 numbers up to rank 1, 3 everything but the largest, 4 everything."""
    largest = max(case.feeds, key=lambda n: case.feeds[n].size, default="")

    def small(name: str, array: np.ndarray) -> bool:
        if level >= 3:
            return level == 4 or name != largest
        return array.ndim <= 1 and array.size <= 64 and (level == 2 or array.dtype.kind in "iub")

    chosen = [n for n, a in case.feeds.items() if small(n, a)]
    model = ModelProto()
    model.CopyFrom(case.model)
    kept = [i for i in model.graph.input if i.name not in chosen]
    codes = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for name in chosen:
        tensor = numpy_helper.from_array(case.feeds[name], name)
        if tensor.data_type != codes[name]:
            raise AssertionError(f"{name} is declared {codes[name]}, and {tensor.data_type} is stored")
        model.graph.initializer.append(tensor)
    return Plain(model, {n: a for n, a in case.feeds.items() if n not in chosen}, case.expected, chosen)


def with_symbols(case: Plain, keep: set[tuple[str, int]]) -> Plain:
    """The case with a symbol for every size above 1 of its inputs, save for those in `keep`."""
    model = ModelProto()
    model.CopyFrom(case.model)
    for info in model.graph.input:
        if info.name not in case.feeds:
            continue
        for axis, d in enumerate(info.type.tensor_type.shape.dim):
            if d.dim_value > 1 and (info.name, axis) not in keep:
                d.dim_param = f"{info.name}_{axis}"
    return Plain(model, case.feeds, case.expected, case.fixed)


def axes_of(case: Plain) -> list[tuple[str, int]]:
    return [(n, i) for n, a in case.feeds.items() for i, d in enumerate(a.shape) if d > 1]


# ---- running ---------------------------------------------------------------------------------------------------------


def _run_numpy(graph: Graph, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return evaluate(graph, feeds)


def _run_onnxruntime(graph: Graph, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    import onnxruntime

    to_onnx = importlib.import_module("pullback.backends.onnx_export.emit").to_onnx
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = to_onnx(graph)
    values, widened = _within_numpy(model, feeds)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    found = dict(zip(names, session.run(None, values), strict=True))
    return {n.removesuffix(".wide"): a.astype(widened[n]) if n in widened else a for n, a in found.items()}


ORDINARY = frozenset(np.dtype(n) for n in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"))


def _within_numpy(model: ModelProto, feeds: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.dtype]]:
    """What onnxruntime's Python interface cannot pass (bfloat16, 8-bit floats, 4-bit integers) stored in the model, or cast at its end."""
    inputs = {i.name: i for i in model.graph.input}
    values = {}
    for name, array in feeds.items():
        if name not in inputs:
            continue
        if array.dtype in ORDINARY:
            values[name] = array
        else:
            model.graph.input.remove(inputs[name])
            model.graph.initializer.append(numpy_helper.from_array(array, name))
    widened = {}
    for info in list(model.graph.output):
        dtype = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        if dtype in ORDINARY:
            continue
        code = TensorProto.INT8 if "int" in dtype.name else TensorProto.FLOAT
        code = TensorProto.UINT8 if dtype.name.startswith("uint") else code
        wide = f"{info.name}.wide"
        model.graph.node.append(helper.make_node("Cast", [info.name], [wide], to=code))
        model.graph.output.remove(info)
        model.graph.output.append(helper.make_tensor_value_info(wide, code, None))
        widened[wide] = dtype
    return values, widened


ENGINES = {"numpy": _run_numpy, "onnxruntime": _run_onnxruntime}


def _defined(case: Case, inputs: Sequence[Any], expected: np.ndarray) -> np.ndarray:
    """Where ONNX defines the value: `Cast` leaves a float beyond an integer's range open, and the stored output is what the library that made it chose."""
    if _first_op(case) not in ("Cast", "CastLike"):
        return np.ones(expected.shape, bool)
    given, to = np.asarray(inputs[0]), dtype_of(expected.dtype)
    if not (to.integral and dtype_of(given.dtype).floating):
        return np.ones(expected.shape, bool)
    info, wide = ml_dtypes.iinfo(expected.dtype), np.trunc(given.astype(np.float64))
    return (wide >= info.min) & (wide <= info.max)


def difference(found: np.ndarray, expected: np.ndarray, case: Case, inputs: Sequence[Any] = ()) -> str | None:
    """What differs, or None; tolerances are the case's own."""
    if found.dtype != expected.dtype:
        return f"dtype {found.dtype}, where {expected.dtype} is expected"
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}, where {list(expected.shape)} is expected"
    if found.dtype == object or found.dtype.kind in "US":
        return None if (found == expected).all() else "strings differ"
    if found.dtype.kind == "c":
        wide_found, wide_expected = found, expected
    else:
        kind = np.float64 if found.dtype.kind not in "iu" else found.dtype
        wide_found, wide_expected = found.astype(kind), expected.astype(kind)
    if case.kind == "node":
        defined = _defined(case, inputs, expected)
        wide_found, wide_expected = wide_found[defined], wide_expected[defined]
    rtol = (
        max(case.rtol, 2**-6) if found.dtype.name == "bfloat16" else case.rtol
    )  # two units in the last place, as the suite's own runner
    try:
        np.testing.assert_allclose(wide_found, wide_expected, rtol=rtol, atol=case.atol)
    except AssertionError as error:
        return " ".join(str(error).split())[:400]
    return None


def _load(case: Plain) -> Graph:
    load = importlib.import_module("pullback.frontends.onnx_import").load
    graph: Graph = load(case.model)
    return graph


MUST_BE_KNOWN = ("must be known", "depends on data")


def _loaded(base: Plain) -> tuple[Plain, Graph]:
    """Read as given, or with as little fixed as makes it readable."""
    try:
        return base, _load(base)
    except PullbackError as error:
        first = error
    for level in (1, 2, 3, 4):
        attempt = fixed(base, level)
        if not attempt.fixed:
            continue
        try:
            return attempt, _load(attempt)
        except PullbackError as error:
            if not any(m in str(error) for m in MUST_BE_KNOWN):
                first = error
    raise first


def _fits(case: Plain) -> Graph:
    """Read, and make sure that the sizes of the case are among those that the symbols stand for."""
    graph = _load(case)
    sizes = bind_dims(graph, {**{n: c.array for n, c in graph.data.items()}, **case.feeds})
    for constraint in graph.constraints:
        try:
            left, right = (size_of(d, sizes) for d in (constraint.left, constraint.right))
        except PullbackError:
            continue  # a size that depends on data
        holds = {"==": left == right, ">=": left >= right, "divides": right != 0 and left % right == 0}
        if not holds[constraint.relation]:
            raise PullbackError(f"the case does not hold {constraint}")
    return graph


def _symbolic(base: Plain) -> tuple[Plain, Graph, int]:
    """With a symbol for every size, or for all that can be one; and how many could not."""
    everything = axes_of(base)
    accepted: set[tuple[str, int]] = set()

    def grow(candidates: list[tuple[str, int]]) -> None:
        if not candidates:
            return
        try:
            _fits(with_symbols(base, set(everything) - accepted - set(candidates)))
        except PullbackError:
            if len(candidates) > 1:
                half = len(candidates) // 2
                grow(candidates[:half])
                grow(candidates[half:])
            return
        accepted.update(candidates)

    grow(everything)
    attempt = with_symbols(base, set(everything) - accepted)
    return attempt, _load(attempt), len(everything) - len(accepted)


def listed(case: Case, engine: str) -> str | None:
    for table in (LISTED[""], LISTED[engine]):
        for pattern, reason in table.items():
            if fnmatch.fnmatchcase(case.name, pattern):
                return reason
    return None


def run(case: Case, engine: str = "numpy", symbolic: bool = False) -> Result:
    """Run one case."""
    if (reason := listed(case, engine)) is not None:
        return Result(case.name, "listed", reason)
    notes: list[str] = []
    partly = False
    for inputs, outputs in case.sets:
        try:
            base = plain(case, inputs, outputs)
            used, graph = _loaded(base)
            if symbolic:
                used, graph, lost = _symbolic(used)
                partly |= lost > 0
                if lost:
                    notes.append(f"{lost} of {len(axes_of(used))} sizes kept")
            if used.fixed:
                notes.append(f"fixed {', '.join(used.fixed)}")
            found = ENGINES[engine](graph, used.feeds)
        except PullbackError as error:
            return Result(case.name, "failed", f"{type(error).__name__}: {' '.join(str(error).split())}")
        except Exception as error:  # whatever a case provokes is its result; the table shows it
            return Result(case.name, "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
        for name, expected in used.expected.items():
            if name not in found:
                return Result(case.name, "failed", f"no result {name!r}")
            if (problem := difference(np.asarray(found[name]), expected, case, inputs)) is not None:
                return Result(case.name, "failed", f"{name}: {problem}")
    return Result(case.name, "partly" if partly else "passed", "; ".join(dict.fromkeys(notes)))


def selected(kinds: Sequence[str] = KINDS, ops: Sequence[str] = (), pattern: str = "*") -> list[Case]:
    """The cases of these kinds that use one of these operators (any, where none is given) and have a name like the pattern."""
    return [
        c for k in kinds for c in cases(k)
        if (not ops or c.op_types & set(ops) or (c.name.endswith("_expanded") and _first_op(c) in ops)) and fnmatch.fnmatchcase(c.name, pattern)
    ]  # fmt: skip


@cache
def _names() -> dict[str, str]:
    return {c.name: next(iter(c.model.graph.node)).op_type for c in cases("node") if "_expanded" not in c.name}


def _first_op(case: Case) -> str:
    return _names().get(case.name.removesuffix("_expanded"), "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.node_suite", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--op", default="", help="only cases with one of these operators, separated by commas")
    parser.add_argument("--case", default="*", help="only cases with a name like this pattern")
    parser.add_argument("--kind", default=",".join(KINDS))
    parser.add_argument("--symbolic", action="store_true", help="sizes become symbols")
    parser.add_argument("--engine", default="numpy", choices=sorted(ENGINES))
    parser.add_argument("--failed-only", action="store_true", help="print only what failed")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for case in selected(options.kind.split(","), [o for o in options.op.split(",") if o], options.case):
        result = run(case, options.engine, options.symbolic)
        counts[result.state] += 1
        if result.state == "failed" or not options.failed_only:
            print(
                f"{result.state:7}{case.kind}/{result.case}" + (f"  {result.note}" if result.note else ""), flush=True
            )
    how = f"{options.engine}{', symbolic' if options.symbolic else ''}"
    total = sum(counts.values())
    print(f"{total} cases ({how}): " + ", ".join(f"{counts[s]} {s}" for s in ("passed", "partly", "listed", "failed")))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
