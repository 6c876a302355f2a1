"""The errors that a user can meet. All are `PullbackError`; each message names what was required, what was found and where."""

from __future__ import annotations

from typing import Any

__all__ = ["DimError", "InconclusiveDim", "PullbackError", "PullbackWarning", "Refusal", "TypeMismatch"]


class PullbackError(Exception):
    """Base of every refusal of this package."""


class PullbackWarning(UserWarning):
    """Something that is done as asked, but may not be what is meant."""


class TypeMismatch(PullbackError, TypeError):
    """Operands of a primitive do not fit together."""


class DimError(PullbackError, ValueError):
    """A dim that cannot be what it is asked to be."""


class InconclusiveDim(PullbackError, ValueError):
    """A comparison of dims whose answer depends on the sizes: of `sides`, where it is an equality, which `forced` says a primitive's type asks for."""

    sides: tuple[Any, Any] | None = None
    forced: bool = False


class Refusal(PullbackError):
    """An input that cannot be handled, with everything that stands in the way.

    >>> print(Refusal("cannot lower 'm.onnx'", ["node 'a' (Foo, opset 18): no lowering"]))
    cannot lower 'm.onnx':
      - node 'a' (Foo, opset 18): no lowering
    """

    def __init__(self, summary: str, reasons: list[str] | tuple[str, ...] = ()) -> None:
        self.summary = summary
        self.reasons = tuple(dict.fromkeys(reasons))
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        super().__init__(f"{summary}:{lines}" if lines else summary)
