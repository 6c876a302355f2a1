"""Options held against the types that they are declared with, so that a wrong one is said by name and not met inside a formula."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from numbers import Real
from typing import Any

import numpy as np

from ..graph import Value

__all__ = ["mistyped", "mistyped_fields"]


def mistyped(given: Mapping[str, Any], types: Mapping[str, str]) -> list[str]:
    """A complaint for each option that is not of its type: `float`, `int`, `bool`, `str`, tuples of these, and None. Other types are not looked at.

    >>> mistyped({"lr": "fast", "betas": (0.9,), "steps": 2.5}, {"lr": "float", "betas": "tuple[float, float]", "steps": "int"})
    ["lr must be a number, found 'fast'", 'betas must be 2 numbers, found (0.9,)', 'steps must be an integer, found 2.5']
    """
    wanted = {name: _words(types[name]) for name in given if name in types}
    return [
        f"{name} must be {words}, found {given[name]!r}"
        for name, words in wanted.items()
        if not _is(given[name], types[name])
    ]


def mistyped_fields(options: Any) -> list[str]:
    """The same of the fields of a record of options."""
    types = {f.name: str(f.type) for f in fields(options)}
    return mistyped({name: getattr(options, name) for name in types}, types)


_ONE = {"Number": "numbers", "float": "a number", "int": "an integer", "bool": "true or false", "str": "a text"}


def _alternatives(type_: str) -> list[str]:
    """The members of a union that is no member of a tuple."""
    inside, members = 0, [""]
    for character in type_:
        inside += {"[": 1, "]": -1}.get(character, 0)
        if character == "|" and not inside:
            members.append("")
        else:
            members[-1] += character
    return [m.strip() for m in members]


def _items(type_: str) -> list[str] | None:
    """The types of the items of a tuple; None of another type."""
    found = re.fullmatch(r"tuple\[(.*)\]", type_)
    return None if found is None else [item.strip() for item in found[1].split(",")]


def _is(value: Any, type_: str) -> bool:
    return any(_is_one(value, member) for member in _alternatives(type_))


def _is_one(value: Any, type_: str) -> bool:
    if (items := _items(type_)) is not None:
        if not isinstance(value, Sequence) or isinstance(value, str):
            return False
        if items[-1] == "...":
            return all(_is(v, items[0]) for v in value)
        return len(value) == len(items) and all(map(_is, value, items))
    match type_:
        case "None":
            return value is None
        case "bool":
            return isinstance(value, bool | np.bool_)
        case "float" | "int":
            number = isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
            return number and (type_ == "float" or float(value).is_integer())
        case "str":
            return isinstance(value, str)
        case "Number":
            return isinstance(value, Value) or _numbers(value)
        case _:
            return True


def _numbers(value: Any) -> bool:
    try:
        return np.asarray(value).dtype.kind != "U" and bool(np.isfinite(np.asarray(value, np.float64)).all())
    except (TypeError, ValueError):
        return False


def _words(type_: str) -> str:
    """A type as a message names it."""
    members = [m for m in _alternatives(type_) if m != "None"]
    items = _items(members[0])
    if items is None:
        return _ONE.get(members[0], type_)
    plural = {"float": "numbers", "int": "integers"}.get(_alternatives(items[0])[0], items[0])
    return plural if items[-1] == "..." else f"{len(items)} {plural}"
