"""What each target takes: small tables, with the version that they were measured on.

About 400 small forms were compiled and run on each compiler, static and with a symbolic batch, and one model per operator and dtype on onnxruntime. What
is silently wrong somewhere is never written for that target; what is refused there is refused here, before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ...algebra.dims import is_static
from ...algebra.errors import PullbackError
from ...algebra.graph import Graph, Value
from ...algebra.types import DType, TensorType, TupleType, bf16, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64

__all__ = ["NEWEST", "OLDEST", "TARGETS", "Target", "all_nodes", "refusals", "target_named", "with_symbols"]

OLDEST, NEWEST = 13, 28  # default-domain opsets that can be written


@dataclass(frozen=True, slots=True)
class Target:
    """What one consumer of ONNX takes.

    `opset` is written unless another is asked for. `embed` is where initial values live. `scatter` is how scatter_add is written: `scatter_nd` or as a
    product with a `one_hot` matrix; the latter too where `shares_zeros` says that equal tensors of zeros of a symbolic shape are one
    buffer there, in which the second scatter finds what the first one wrote. `bool_by_where` writes a bool as a number by Where, not by Cast.
    `negative_steps` allows a Slice to run backwards, `scan_backwards` a Scan. `where_bool` allows a Where of bools. `merges_apart`
    asks for several symbolic axes to be merged in a Reshape of their own, `vectors_alone` for a vector to be multiplied by one matrix or as a matrix,
    not by a stack of them. `slow_moves` says that selecting and padding element by element is slow
    there, so that other forms with the same result are taken. `detours` maps an operator and a dtype without a kernel to the dtype in
    which it is computed instead. `dtypes` and `lacking` say what is refused, a dtype or a primitive in a dtype, and why. `flags` are what a
    compiler must be told for a dtype to be right. `control` are the control-flow primitives, each with what must be static.
    """

    name: str
    measured: str
    opset: int
    embed: str
    scatter: str
    shares_zeros: bool = False
    bool_by_where: bool = False
    negative_steps: bool = True
    scan_backwards: bool = True
    where_bool: bool = False
    merges_apart: bool = False
    vectors_alone: bool = False
    slow_moves: bool = False
    detours: Mapping[tuple[str, DType], DType] = field(default_factory=dict)
    dtypes: Mapping[DType, str] = field(default_factory=dict)
    lacking: Mapping[tuple[str, DType], str] = field(default_factory=dict)
    static_only: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[DType, str] = field(default_factory=dict)

    def detour(self, op: str, dtype: DType) -> DType | None:
        """The dtype in which an operator is computed instead of this one, or None."""
        return self.detours.get((op, dtype))


def _each(table: Mapping[str, Mapping[DType, DType]]) -> dict[tuple[str, DType], DType]:
    return {(op, dtype): via for op, row in table.items() for dtype, via in row.items()}


_UNSIGNED = {u32: i64, u64: i64}
_SMALL = {i16: i32, i8: i32, u16: i32, u8: i32}

# Dtypes that ONNX does not list for an operator.
ONNX_DETOURS = _each(
    {
        "ReduceSum": _SMALL,
        "ReduceProd": _SMALL,
        "ReduceMax": {i16: i32, u16: i32},
        "ReduceMin": {i16: i32, u16: i32},
        "CumSum": _SMALL,
        "MatMul": _SMALL,
        "TopK": {bf16: f32},
    }
)

# Kernels that onnxruntime's CPU provider has not. bfloat16, of which it has very few, is not in the table: such a graph is written as it is.
ORT_DETOURS = ONNX_DETOURS | _each(
    {
        "Max": {i16: i32, u16: i32},
        "Min": {i16: i32, u16: i32},
        "Where": {i16: i32, u16: i32, u64: i64},
        "ReduceSum": _UNSIGNED,
        "ReduceProd": _UNSIGNED,
        "ReduceMax": {u32: i64},
        "ReduceMin": {u32: i64},
        "ArgMax": {i16: i32, u16: i32, u32: f64},
        "CumSum": _UNSIGNED,
        "Pad": {i16: i32, u16: i32},
        "ScatterND": {f16: f32},
        "TopK": {u32: i64, u16: i32},
    }
)

_SIGNLESS = "its arithmetic takes no unsigned integers (cast to int64 first)"
_ARITHMETIC = (
    "add", "mul", "neg", "div", "rem", "max", "min", "abs", "sign", "dot", "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "cumsum",
    "less", "less_equal", "bit_not", "bit_and", "bit_or", "bit_xor",
)  # fmt: skip
_NO_FUNCTION = "the function is missing there in double"
_STATIC_PRODUCT = "a product over an axis needs static dims there"
_STATIC_SORT = "sorting needs static dims there"
_SYMBOLIC_SCAN = "its loops take no symbolic dims: bind them first (dims={...}, --dim NAME=SIZE)"

TARGETS: Mapping[str, Target] = {
    t.name: t
    for t in (
        # 22 is the newest opset of the oldest onnxruntime that is supported (1.22); 13 to 28 all work on 1.32
        Target("onnxruntime", "1.32.0", 22, "all", "scatter_nd", slow_moves=True, detours=ORT_DETOURS),
        Target(
            "onnx-mlir",
            "ec744fe6 of July 2026, LLVM 22.1",
            22,
            "frozen",
            "one_hot",  # ScatterND with reduction=add overwrites instead of adding
            bool_by_where=True,
            scan_backwards=False,
            detours=ONNX_DETOURS,
            dtypes={bf16: "it cannot compile bfloat16"},
            lacking={("erf", f64): _NO_FUNCTION}
            | {(name, d): _SIGNLESS for name in _ARITHMETIC for d in (u8, u16, u32, u64)}
            | {
                (name, d): "it has no shifts"
                for name in ("shift_left", "shift_right")
                for d in (i8, i16, i32, i64, u8, u16, u32, u64)
            },
            static_only={"scan": _SYMBOLIC_SCAN},
            flags={f16: "--mcpu=x86-64-v3 (or another CPU with F16C): without it float16 is silently wrong"},
        ),
        Target(
            "torch-mlir",
            "20261001",
            22,
            "frozen",
            "one_hot",  # ScatterND with reduction=add has no StableHLO or TOSA
            bool_by_where=True,
            negative_steps=False,
            scan_backwards=False,
            merges_apart=True,
            vectors_alone=True,
            detours=ONNX_DETOURS,
            lacking={
                ("while", d): "a loop ends there only by its trip count, not by its test"
                for d in (f32, f64, f16, bf16, i64, i32)
            },
            static_only={"scan": _SYMBOLIC_SCAN, "reduce_prod": _STATIC_PRODUCT, "argsort": _STATIC_SORT},
        ),
        Target(
            "iree",
            "3.13.0",
            22,
            "frozen",
            "scatter_nd",
            shares_zeros=True,
            bool_by_where=True,
            negative_steps=False,
            scan_backwards=False,
            merges_apart=True,
            vectors_alone=True,
            detours=ONNX_DETOURS,
            lacking={(name, f64): _NO_FUNCTION for name in ("tanh", "sin", "cos", "erf")}
            | {
                ("while", d): "a loop ends there only by its trip count, not by its test"
                for d in (f32, f64, f16, bf16, i64, i32)
            },
            static_only={"scan": _SYMBOLIC_SCAN, "reduce_prod": _STATIC_PRODUCT, "argsort": _STATIC_SORT},
            flags={f64: "--iree-input-demote-f64-to-f32=false: without it the compiled function refuses doubles"},
        ),
    )
}


def target_named(name: str) -> Target:
    """The target of this name."""
    if name not in TARGETS:
        raise PullbackError(f"no target {name!r}; there are {', '.join(TARGETS)}")
    return TARGETS[name]


def all_nodes(graph: Graph) -> Iterator[Value]:
    """The nodes of a graph and of the bodies in it."""
    for v in graph.nodes:
        yield v
        for param in v.params.values():
            if isinstance(param, Graph):
                yield from all_nodes(param)


def _types(v: Value) -> tuple[TensorType, ...]:
    return v.type.items if isinstance(v.type, TupleType) else (v.type,)


def refusals(graph: Graph, target: Target) -> list[str]:
    """What the target does not take of a graph: each dtype, primitive or form once, with the first node that has it."""
    found: dict[object, str] = {}
    for v in all_nodes(graph):
        name = v.primitive.name
        for t in _types(v):
            if t.dtype in target.dtypes:
                found.setdefault(t.dtype, f"{_where(v)}: {t!r}: {target.dtypes[t.dtype]}")
        for t in (*(o for operand in v.operands for o in _types(operand)), *_types(v)):
            if (name, t.dtype) in target.lacking:
                found.setdefault((name, t.dtype), f"{_where(v)}: {name} of {t!r}: {target.lacking[name, t.dtype]}")
            if name in target.static_only and not is_static(t.shape):
                found.setdefault(name, f"{_where(v)}: {name} of {t!r}: {target.static_only[name]}")
    return list(found.values())


def with_symbols(v: Value) -> bool:
    """Whether a node is a scan over tensors of symbolic shapes."""
    types = (*(t for o in v.operands for t in _types(o)), *_types(v))
    return v.primitive.name == "scan" and not all(is_static(t.shape) for t in types)


def _where(v: Value) -> str:
    if v.primitive.name == "input":
        return f"input {v.params['name']!r}"
    source = v.origin.source
    return f"{v.primitive.name} node" if source is None else str(source)
