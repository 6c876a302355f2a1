"""The generated tables: `python -m pullback.docs.generate` writes docs/tables/*.md anew; a test holds them against the code."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path

from ..algebra import primitives as p
from ..algebra.calculus.kinks import KINKS
from ..algebra.training.losses import LOSSES
from ..algebra.training.optimizers import OPTIMIZERS
from ..algebra.training.schedules import SCHEDULES
from ..backends.onnx_export.checker import EVERYWHERE, FORBIDDEN
from ..backends.onnx_export.tables import ALLOWED
from ..backends.onnx_export.targets import TARGETS
from ..backends.onnx_export.workarounds import WORKAROUNDS
from ..frontends.onnx_import.coverage import coverage

__all__ = ["TABLES"]

FOLDER = Path(__file__).with_name("tables")
NOTE = "Generated from the code by `python -m pullback.docs.generate`.\n"


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def operators() -> str:
    """Every operator in one of four states."""
    rows = coverage()
    counts = ", ".join(f"{n} {state}" for state, n in Counter(r.state for r in rows).items())
    parts = [f"# Operators\n\n{NOTE}\n{counts}.\n"]
    for domain in dict.fromkeys(r.domain for r in rows):
        parts.append(f"\n## {domain or 'ai.onnx'}\n\n")
        body = [
            (
                f"`{r.op_type}`",
                ", ".join(map(str, r.since)),
                r.state,
                r.formula if "`" in r.formula or not r.formula else f"`{r.formula}`",
                r.reason,
            )
            for r in rows
            if r.domain == domain
        ]
        parts.append(_table(("operator", "lowerings since", "state", "formula", "reason"), body))
    return "".join(parts)


def _rule(rule: object) -> str:
    """A VJP rule as its source says it."""
    if isinstance(rule, p.NoGrad):
        return f"none: {rule.reason}"
    if isinstance(rule, p.Each):
        rule = rule.rule
    if isinstance(rule, p.Joint):
        rule = rule.rule
    assert callable(rule)
    if rule.__name__ != "<lambda>":  # type: ignore[attr-defined]
        first = (inspect.getdoc(rule) or "").split("\n")[0]
        assert first, f"{rule} needs a docstring: its first line stands in the table of primitives"
        return first
    return "`" + _lambda_body(rule) + "`"


def _lambda_body(rule: Callable[..., object]) -> str:
    """The source of a lambda's body: from the first place that an instruction of it stands at to the last."""
    spans = [(a, c, b, d) for a, b, c, d in rule.__code__.co_positions() if a and b and c is not None and d]
    (line, column), (end_line, end_column) = min(s[:2] for s in spans), max(s[2:] for s in spans)
    file = inspect.getsourcefile(rule)
    assert file is not None
    lines = Path(file).read_bytes().splitlines()[line - 1 : end_line]
    lines[-1] = lines[-1][:end_column]
    lines[0] = lines[0][column:]
    return " ".join(b" ".join(lines).decode().split())


def primitives() -> str:
    """Every primitive with its VJPs."""
    rows = []
    for primitive in p.PRIMITIVES:
        rules = primitive.vjp if isinstance(primitive.vjp, tuple) else (primitive.vjp,)
        rows.append((f"`{primitive.name}`", primitive.formula, "; ".join(map(_rule, rules)) or "a source: no operands"))
    head = "`ct` is the cotangent of the result `y` (or `z`), `x`, `y` the operands.\n"
    return f"# Primitives\n\n{NOTE}\n{head}\n" + _table(("primitive", "meaning", "VJP of each operand"), rows)


def losses() -> str:
    """Every loss with its options."""
    rows = []
    for loss in dict.fromkeys(LOSSES.values()):
        names = ", ".join(f"`{n}`" for n in (loss.name, *loss.aliases))
        options = ", ".join(f"`{k}={v!r}`" for k, v in loss.options.items())
        rows.append((names, loss.formula, ", ".join(loss.outputs), options, loss.reference))
    return f"# Losses\n\n{NOTE}\n" + _table(("loss", "formula", "model outputs", "options", "source"), rows)


def optimizers() -> str:
    """Every optimizer with its options."""
    rows = []
    for name, cls in OPTIMIZERS.items():
        options = ", ".join(f"`{f.name}={f.default!r}`" for f in fields(cls))
        rows.append((f"`{name}`", cls.formula, options, cls.reference))
    return f"# Optimizers\n\n{NOTE}\n" + _table(("optimizer", "update", "options", "source"), rows)


def targets() -> str:
    """What each target takes, what is written in another way for it, and what is refused."""
    rows = [(t.name, t.measured, t.opset, t.embed, t.scatter) for t in TARGETS.values()]
    parts = [
        f"# Targets\n\n{NOTE}\n",
        _table(("target", "measured on", "opset", "values in the file", "scatter-add as"), rows),
    ]
    for t in TARGETS.values():
        parts.append(f"\n## {t.name}\n\n")
        refused = [
            *((f"{dtype!r}", why) for dtype, why in t.dtypes.items()),
            *_merged((f"`{name}`", f"{dtype!r}", why) for (name, dtype), why in t.lacking.items()),
            *((f"`{name}` of symbolic sizes", why) for name, why in t.static_only.items()),
        ]
        forms = [*EVERYWHERE, *FORBIDDEN[t.name]]
        parts.append(f"Forms that are never written: {', '.join(forms)}.\n")
        for dtype, flag in t.flags.items():
            parts.append(f"\nWhat the compiler must be told for {dtype!r}: {flag}.\n")
        if refused:
            parts.append("\n" + _table(("refused", "because"), refused))
        lacking = _merged((f"`{op}`", f"{dtype!r}", f"computed in {via!r}") for (op, dtype), via in t.detours.items())
        lacking += [
            (f"`{w.op}` of {w.dtype!r}", f"{w.symptom} ({w.version}); written in other operators")
            for w in WORKAROUNDS
            if w.target == t.name
        ]
        parts.append("\n" + _table(("without a kernel", "instead"), lacking))
    return "".join(parts)


def _merged(rows: Iterable[tuple[str, str, str]]) -> list[tuple[str, str]]:
    """Rows of operator, dtype and text, those with the same operator and text in one."""
    found: dict[tuple[str, str], list[str]] = {}
    for op, dtype, text in rows:
        found.setdefault((op, text), []).append(dtype)
    return [(f"{op} of {', '.join(dtypes)}", text) for (op, text), dtypes in found.items()]


def schedules() -> str:
    """Every schedule with its options."""
    rows = []
    for name, cls in SCHEDULES.items():
        options = ", ".join(f"`{f.name}`" if f.default is MISSING else f"`{f.name}={f.default!r}`" for f in fields(cls))
        rows.append((f"`{name}`", cls.formula, options, cls.reference))
    head = (
        "`t` is the step counter, 0 at first; `lr` the rate that is an input. Options without a default are required.\n"
    )
    return f"# Schedules\n\n{NOTE}\n{head}\n" + _table(("schedule", "rate", "options", "source"), rows)


def allowed() -> str:
    """The operators of the explicit profile."""
    rows = [(f"`{op}`", why) for op, why in ALLOWED.items()]
    return f"# Operators of the explicit profile\n\n{NOTE}\n{len(rows)} operators.\n\n" + _table(
        ("operator", "for"), rows
    )


def kinks() -> str:
    """What a derivative is where the mathematics leaves a choice."""
    rows = [(k.where, k.choice, k.source) for k in KINKS]
    return f"# Kinks and ties\n\n{NOTE}\n" + _table(("where", "choice", "as"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "operators": operators,
    "primitives": primitives,
    "losses": losses,
    "optimizers": optimizers,
    "schedules": schedules,
    "targets": targets,
    "allowed": allowed,
    "kinks": kinks,
}
"""The tables by the name of their file."""


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, make in TABLES.items():
        (FOLDER / f"{name}.md").write_text(make())
        print(f"wrote {FOLDER / name}.md")
