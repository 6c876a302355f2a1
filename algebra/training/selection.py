"""Which tensors are trained, and the reason for each one that is not."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from .. import primitives as p
from ..calculus.vjp import vjp
from ..errors import Refusal
from ..graph import Graph, Value, reachable
from ..types import TupleType

__all__ = ["NO_PATH", "Selection", "differentiable", "match", "select"]

NO_PATH = "no differentiable path to the loss"
NOT_NAMED = "not named by train"
STATISTICS = "running statistics, kept as they are"


@dataclass(frozen=True, slots=True)
class Selection:
    """The trained tensors' names in the model's order, and why each other one is left out."""

    trained: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"trained: {len(self.trained)}", *(f"  {name}" for name in self.trained)]
        if self.left_out:
            lines += [f"left out: {len(self.left_out)}", *(f"  {name}: {why}" for name, why in self.left_out.items())]
        return "\n".join(lines)


def match(names: Iterable[str], patterns: Sequence[str], *, option: str, elsewhere: Mapping[str, str] | None = None,
          usual: Collection[str] | None = None) -> dict[str, str]:  # fmt: skip
    """The names that the patterns match, each with the first pattern that does.

    A pattern is a name letter for letter, or a glob (`*`, `?`, `[ab]`); a name always matches itself, whatever it holds. A pattern that matches
    nothing is refused, all such at once, with near names, or some if none is near; `elsewhere` says of names that cannot be chosen why not. A glob
    that matches some of the `usual` names means those alone.
    """
    names = list(names)
    known = set(names)
    found: dict[str, str] = {}
    reasons = []
    for pattern in patterns:
        hits = [pattern] if pattern in known else [n for n in names if fnmatchcase(n, pattern)]
        if usual is not None and pattern not in known:
            hits = [n for n in hits if n in usual] or hits
        for name in hits:
            found.setdefault(name, pattern)
        if not hits:
            reasons.append(_nothing(names, pattern, option, elsewhere or {}))
    if reasons:
        raise Refusal("patterns that match no tensor that can be trained", reasons)
    return found


def _nothing(names: Sequence[str], pattern: str, option: str, elsewhere: Mapping[str, str]) -> str:
    text = f"{option} {pattern!r} matches nothing"
    barred = [n for n in elsewhere if n == pattern or fnmatchcase(n, pattern)]
    if barred:
        return f"{text} that can be trained: " + "; ".join(f"{n} ({elsewhere[n]})" for n in barred[:8])
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
    some = ", ".join([*names[:5], *(["..."] if len(names) > 5 else [])])
    return f"{text}; near names: {', '.join(near)}" if near else f"{text}; there are {some or 'none'}"


def differentiable(root: Value) -> set[int]:
    """Ids of the values from which a differentiable path leads to `root`, itself included."""
    marked = {id(root)}
    for node in reversed(reachable([root])):
        if id(node) not in marked or not (isinstance(node.type, TupleType) or node.dtype.floating):
            continue
        rules = node.primitive.vjp
        for i, operand in enumerate(node.operands):
            if isinstance(rules, tuple) and node.primitive.name != "item" and isinstance(rules[i], p.NoGrad):
                continue
            if isinstance(operand.type, TupleType) or operand.dtype.floating:
                marked.add(id(operand))
    return marked


def select(graph: Graph, loss: Value, *, train: Sequence[str] = (), freeze: Sequence[str] = (),
           statistics: Collection[str] = (), kept: Collection[str] = (), frozen_groups: Mapping[str, str] | None = None) -> Selection:  # fmt: skip
    """What is trained: the graph's parameters, or what the `train` patterns name; less what `freeze` names; less what does not reach the loss.

    `train` may also name frozen floating inputs and state, except `statistics`, which the step itself updates; a glob means those only where it
    matches no parameter, so that `*` leaves running statistics and quantisation scales alone. `frozen_groups` gives reasons for parameters
    that a group freezes.
    """
    reasons = dict(graph.info.get("frozen", {}))
    inputs = {v.params["name"]: v for v in graph.by_role("parameter", "frozen", "state")}
    candidates = {n: v for n, v in inputs.items() if v.dtype.floating and n not in statistics}
    for n, v in inputs.items():
        if n not in candidates:
            reasons[n] = "running statistics, updated by the step" if v.dtype.floating else "not a floating tensor"
    chosen: list[str]
    if train:
        usual = {n for n, v in candidates.items() if v.params["role"] == "parameter" and n not in kept}
        chosen = list(match(candidates, train, option="train", elsewhere=reasons, usual=usual))
    else:
        chosen = [n for n, v in candidates.items() if v.params["role"] == "parameter" and n not in kept]
    stopped = match(candidates, freeze, option="freeze", elsewhere=reasons) if freeze else {}
    reach = _reaching(loss, [candidates[n] for n in chosen])
    trained, left_out = [], {}
    wanted = set(chosen)
    for n, v in candidates.items():
        if n not in wanted:
            weight = v.params["role"] == "parameter" and n not in kept
            left_out[n] = NOT_NAMED if weight else reasons.get(n, STATISTICS if n in kept else _kept(v))
        elif n in stopped:
            left_out[n] = f"named by freeze {stopped[n]!r}"
        elif frozen_groups and n in frozen_groups:
            left_out[n] = frozen_groups[n]
        elif id(v) not in reach:
            left_out[n] = NO_PATH
        else:
            trained.append(n)
    return Selection(tuple(trained), {**{n: r for n, r in reasons.items() if n not in wanted}, **left_out})


def _reaching(loss: Value, wanted: Sequence[Value]) -> set[int]:
    """Ids of those from which a differentiable path leads to the loss.

    What passes through a loop or a branch only its own rule can tell, so that where there is one, the gradients themselves are made and thrown away.
    """
    reach = differentiable(loss)
    hopeful = [v for v in wanted if id(v) in reach]
    if not any(isinstance(v.primitive.vjp, p.Joint) for v in reachable([loss])):
        return {id(v) for v in hopeful}
    found = vjp([loss], [p.literal(1, loss.dtype)], hopeful)
    return {id(v) for v, ct in zip(hopeful, found, strict=True) if ct is not None}


def _kept(v: Value) -> str:
    return STATISTICS if v.params["role"] == "state" else "constant"
