"""How a value of the algebra lies in an ONNX tensor: with its axes permuted, and some of them not there because they only repeat.

Transposes and broadcasts cost nothing until a consumer needs the axes in place. Elementwise operators compute in the layout of their operands and
leave repeated axes out, a `dot` names the axes that it contracts wherever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...algebra.dims import Shape
from .program import Tensor

__all__ = ["View", "whole"]


@dataclass(frozen=True, slots=True)
class View:
    """A value of `shape` in `tensor`: axis i of the value is axis `places[i]` of the tensor, or repeated where that is None."""

    tensor: Tensor
    places: tuple[int | None, ...]
    shape: Shape

    @property
    def order(self) -> tuple[int, ...]:
        """The value's axes in the order in which the tensor has them."""
        found = {place: axis for axis, place in enumerate(self.places) if place is not None}
        return tuple(found[i] for i in range(len(found)))

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is the value as it is."""
        return self.places == tuple(range(len(self.shape)))

    @classmethod
    def of(cls, tensor: Tensor, order: Sequence[int], shape: Shape) -> View:
        """The view whose tensor has the value's axes `order`."""
        at = {axis: place for place, axis in enumerate(order)}
        return cls(tensor, tuple(at.get(axis) for axis in range(len(shape))), shape)


def whole(tensor: Tensor) -> View:
    """A value that is a tensor as it is."""
    return View(tensor, tuple(range(tensor.rank)), tensor.shape)
