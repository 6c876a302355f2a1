"""What a run shows while it goes on."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

__all__ = ["Progress", "progress_for"]


class Progress:
    """Shows nothing; what else is shown derives from it."""

    @contextmanager
    def run(self, epochs: int, batches: int | None) -> Iterator[None]:
        """Around the whole run."""
        yield

    def step(self, loss: float, batches: int) -> None:
        """After an update."""

    def epoch(self, row: Mapping[str, float]) -> None:
        """After an epoch."""


class RichProgress(Progress):
    """A bar for the epoch on a terminal, and a line for each epoch anywhere; on standard error."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr)
        self._bar = Bar(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.4f}"),
            TimeRemainingColumn(), console=self._console, transient=True, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._epochs, self._done, self._mean = 0, 0, float("nan")

    @contextmanager
    def run(self, epochs: int, batches: int | None) -> Iterator[None]:
        """Around the whole run."""
        self._epochs = epochs
        self._task = self._bar.add_task("training", total=batches, loss=float("nan"))
        with self._bar:
            yield

    def step(self, loss: float, batches: int) -> None:
        """After an update; the loss is shown smoothed."""
        self._mean = loss if self._mean != self._mean else 0.9 * self._mean + 0.1 * loss
        self._bar.update(self._task, advance=batches, loss=self._mean)

    def epoch(self, row: Mapping[str, float]) -> None:
        """After an epoch."""
        shown = "  ".join(f"{k} {v:.4f}" for k, v in row.items() if k not in ("epoch", "seconds"))
        line = f"epoch {int(row['epoch'])}/{self._epochs}  {shown}  {row['seconds']:.1f} s"
        self._console.print(line, highlight=False, markup=False)
        self._bar.reset(self._task, loss=self._mean)


def progress_for(wanted: bool | Progress) -> Progress:
    """What to show: True for a bar and lines, False for nothing, or the caller's own."""
    if isinstance(wanted, Progress):
        return wanted
    return RichProgress() if wanted else Progress()
