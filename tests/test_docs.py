"""Everything shown in the documentation is executed.

In README.md and docs/*.md, `>>>` blocks of one page run one after the other as doctests, and each line `$ pullback ...` of a `console` block runs in
a folder that holds the demo's model as `digits.onnx` and its data as `digits.npz`; the lines under it must stand in what it prints (`...` stands for
anything). A block marked `python needs=module,module` runs where those modules are installed; elsewhere the page's test runs the rest, and then says
that it skipped. Generated tables must be those that the code would write now.
"""

from __future__ import annotations

import doctest
import importlib.util
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from pullback.algebra.training.losses import LOSSES
from pullback.algebra.training.optimizers import OPTIMIZERS
from pullback.algebra.training.schedules import SCHEDULES
from pullback.demo import DATA, MODEL
from pullback.docs import generate
from pullback.frontends.cli import main
from pullback.frontends.onnx_import.coverage import coverage

pytestmark = pytest.mark.usefixtures("own_lowerings")

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")], key=str)
BLOCK = re.compile(r"^```(\w+)(?: needs=(\S+))?\n(.*?)^```$", re.M | re.S)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(MODEL, tmp_path / "digits.onnx")
    shutil.copy(DATA, tmp_path / "digits.npz")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines that it must print."""
    command, shown = "", []
    for line in text.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line[2:], []
        elif line.strip():
            shown.append(line)
    if command:
        yield command, shown


def run(command: str) -> str:
    words = shlex.split(command, comments=True)
    result = CliRunner().invoke(main, words[1:], catch_exceptions=False)
    assert result.exit_code == 0, f"{command}\n{result.output}"
    return result.output


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package
        return False


def squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_page_does_what_it_shows(page: Path, folder: Path) -> None:
    parser, names = doctest.DocTestParser(), {"__name__": "__main__"}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    lacking: set[str] = set()
    for block, (kind, needs, text) in enumerate(BLOCK.findall(page.read_text())):
        if absent := {name for name in needs.split(",") if name and not installed(name)}:
            lacking |= absent
        elif kind == "python" and ">>>" in text:
            example = parser.get_doctest(text, names, f"{page.name}/{block}", str(page), 0)
            runner.run(example, clear_globs=False)
            names = example.globs
        elif kind == "console":
            for command, shown in commands(text):
                if not command.startswith("pullback "):
                    continue
                printed = squeezed(run(command))
                for line in shown:
                    pattern = ".*".join(re.escape(squeezed(part)) for part in line.split("..."))
                    assert re.search(pattern, printed), f"{command}\ndoes not print {line!r}, but\n{printed}"
    assert runner.summarize(verbose=False).failed == 0
    if lacking:
        pytest.skip(
            f"blocks that need {', '.join(sorted(lacking))} did not run (pip install pullback[torch,mlir]); the others did"
        )


@pytest.mark.parametrize("name", sorted(generate.TABLES))
def test_generated_table_is_what_the_code_says(name: str) -> None:
    written = (ROOT / "docs" / "tables" / f"{name}.md").read_text()
    assert written == generate.TABLES[name](), (
        f"run `python -m pullback.docs.generate` to write docs/tables/{name}.md anew"
    )


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "docs").glob("*/*.md"))], ids=lambda p: p.stem)
def test_links_of_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"


def test_every_decision_is_linked() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    assert [p.name for p in sorted(folder.glob("*.md")) if p.name != "README.md" and f"]({p.name})" not in index] == []


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert [p.name for p in PAGES if p.parent.name == "docs" and f"](docs/{p.name})" not in text] == []


def test_every_operator_has_a_formula_and_every_loss_and_optimizer_its_source() -> None:
    rows = coverage()
    assert [(r.domain, r.op_type) for r in rows if r.state != "outside" and not r.formula] == []
    assert [(r.domain, r.op_type) for r in rows if r.state != "differentiable" and not r.reason] == []
    assert [
        x.name for x in (*LOSSES.values(), *OPTIMIZERS.values(), *SCHEDULES.values()) if not (x.formula and x.reference)
    ] == []
