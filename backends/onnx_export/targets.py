"""What each target takes: small tables, with the version that they were measured on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...algebra.errors import PullbackError
from ...algebra.types import DType, bf16, bool_, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64

__all__ = ["TARGETS", "Target", "target_named"]


@dataclass(frozen=True, slots=True)
class Target:
    """What one consumer of ONNX takes.

    `detours` maps an operator and a dtype that it has no kernel for to the dtype in which it is computed instead.
    """

    name: str
    measured: str
    opset: int
    embed: str
    scatter: str = "scatter_nd"
    bool_by_where: bool = False
    negative_steps: bool = True
    where_bool: bool = False
    lacking: Mapping[str, frozenset[DType]] = field(default_factory=dict)
    detours: Mapping[tuple[str, DType], DType] = field(default_factory=dict)

    def detour(self, op: str, dtype: DType) -> DType | None:
        """The dtype in which an operator is computed instead of this one, or None."""
        return self.detours.get((op, dtype))


def _each(table: Mapping[str, Mapping[DType, DType]]) -> dict[tuple[str, DType], DType]:
    return {(op, dtype): via for op, row in table.items() for dtype, via in row.items()}


_UNSIGNED = {u32: i64, u64: i64}
_SMALL = {i16: i32, i8: i32, u16: i32, u8: i32}

# Kernels that onnxruntime has not, measured one model at a time, or that ONNX's own type lists leave out. bfloat16 is not in the table: such a
# graph is written as it is.
ORT_DETOURS = _each(
    {
        "Max": {i16: i32, u16: i32},
        "Min": {i16: i32, u16: i32},
        "Where": {i16: i32, u16: i32, u64: i64},
        "ReduceSum": {**_UNSIGNED, **_SMALL},
        "ReduceProd": {**_UNSIGNED, **_SMALL},
        "ReduceMax": {u32: i64, i16: i32, u16: i32},
        "ReduceMin": {u32: i64, i16: i32, u16: i32},
        "ArgMax": {i64: f64, i16: i32, u16: i32, u32: f64},
        "CumSum": {**_UNSIGNED, **_SMALL},
        "MatMul": {**_SMALL},
        "ScatterND": {f16: f32},
        "Pad": {i16: i32, u16: i32},
        "TopK": {u64: f64, u32: i64, u16: i32, bf16: f32},
    }
)
del ORT_DETOURS["ArgMax", i64]

TARGETS: Mapping[str, Target] = {
    t.name: t
    for t in (
        Target("onnxruntime", "1.32.0", 23, "all", detours=ORT_DETOURS),
        Target("onnx-mlir", "ec744fe6", 22, "frozen", "one_hot", True, detours=ORT_DETOURS),
        Target("torch-mlir", "20261001", 22, "frozen", "one_hot", True, False, detours=ORT_DETOURS),
        Target("iree", "3.13.0", 22, "frozen", "scatter_nd", True, False, detours=ORT_DETOURS),
    )
}


def target_named(name: str) -> Target:
    """The target of this name."""
    if name not in TARGETS:
        raise PullbackError(f"no target {name!r}; there are {', '.join(TARGETS)}")
    return TARGETS[name]


_ = (bool_, f16)
