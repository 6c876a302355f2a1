"""What runtimes lack or do wrong, each with version and symptom. A test tries every entry and notices when it can go."""

from __future__ import annotations

from collections.abc import Callable

from ...algebra.types import DType
from .ops import Ops
from .program import Tensor
from .targets import Target

__all__ = ["composite"]


def composite(target: Target, op: str, dtype: DType) -> Callable[[Ops, Tensor], Tensor] | None:
    """The operator written in others, where the target has no kernel for this dtype."""
    return None
