"""Where a node comes from: the ONNX node, then each rule or pass that made it. Outside a node's identity."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["PHASES", "Origin", "Source"]

PHASES = ("forward", "loss", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Source:
    """The ONNX node, loss or optimizer that a node serves."""

    name: str
    op_type: str = ""
    domain: str = ""
    opset: int = 0

    def __str__(self) -> str:
        where = f" of {self.domain}" if self.domain else ""
        return (
            f"{self.op_type} node {self.name!r}{where} (opset {self.opset})"
            if self.opset
            else f"{self.op_type} {self.name!r}".strip()
        )


@dataclass(frozen=True, slots=True)
class Origin:
    """Phase, source and the trail of rules and passes since.

    >>> str(Origin("backward", Source("fc", "Gemm", "", 18), ("vjp:dot[1]",)))
    'fc / vjp:dot[1]'
    """

    phase: str = "forward"
    source: Source | None = None
    trail: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " / ".join(([self.source.name] if self.source else []) + list(self.trail))

    def then(self, step: str) -> Origin:
        """This origin with one more step of its trail; at most four are kept, the oldest and the newest."""
        trail = (*self.trail, step)
        return replace(self, trail=trail if len(trail) <= 4 else (*trail[:2], *trail[-2:]))

    def in_phase(self, phase: str) -> Origin:
        return replace(self, phase=phase)
