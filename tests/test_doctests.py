"""Every example in a docstring runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator

import pullback
import pytest

pytestmark = pytest.mark.usefixtures("own_lowerings")


def modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(pullback.__path__, "pullback."):
        if found.name.split(".")[1] in {"algebra", "backends", "frontends", "face"}:
            yield found.name


@pytest.mark.parametrize("name", sorted(modules()))
def test_examples_of_module_run(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
