"""Names beside those that a model has already."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Names"]


class Names:
    """Gives each wanted name, with a suffix where it is taken.

    >>> names = Names(["lr"])
    >>> names("lr"), names("lr"), names("step"), names.renamed
    ('lr_1', 'lr_2', 'step', {'lr': 'lr_2'})
    """

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self.renamed: dict[str, str] = {}

    def __call__(self, wanted: str) -> str:
        name, number = wanted, 0
        while name in self._taken:
            number += 1
            name = f"{wanted}_{number}"
        self._taken.add(name)
        if name != wanted:
            self.renamed[wanted] = name
        return name
