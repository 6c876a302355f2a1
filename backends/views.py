"""Graphs to look at: text, Graphviz, LaTeX, and a page for a browser."""

from __future__ import annotations

import html
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx

from ..algebra.errors import Refusal
from ..algebra.graph import Graph, Value

__all__ = ["VIEWS", "to_dot", "to_html", "to_latex", "to_text", "write"]

COLOURS = {"forward": "#4477aa", "loss": "#aa3377", "backward": "#cc6633", "optimizer": "#228833"}
"""One per phase, told apart by people with any colour vision (after Paul Tol's bright scheme)."""

MOST_GROUPS = 400
"""Above this many groups the drawing would not be readable; the page then shows the list alone."""


def to_text(graph: Graph) -> str:
    """The text form, which parses back."""
    return f"{graph}\n"


def to_dot(graph: Graph) -> str:
    """Graphviz: one box a node, coloured by phase; edges carry the operand's position where there are several."""
    labels = graph.labels()
    lines = [
        f"digraph {json.dumps(graph.name)} {{",
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname=monospace];',
    ]
    for v in graph.nodes:
        text = f"{labels[v]}\n{v.primitive.name}\n{v.type!r}"
        shape = ", shape=ellipse" if v.primitive.name == "input" else ""
        lines.append(
            f"  n{v.index} [label={json.dumps(text)}, color={json.dumps(COLOURS.get(v.phase, '#777777'))}{shape}];"
        )
    for source, node, position in graph.dag.edges(keys=True):
        label = f" [label={json.dumps(str(position))}]" if len(node.operands) > 1 else ""
        lines.append(f"  n{source.index} -> n{node.index}{label};")
    for name, v in graph.outputs.items():
        lines.append(f"  {json.dumps('output ' + name)} [shape=ellipse, style=dashed];")
        lines.append(f"  n{v.index} -> {json.dumps('output ' + name)};")
    return "\n".join([*lines, "}", ""])


# ---- LaTeX -----------------------------------------------------------------------------------------------------------------------------

INFIX = {
    "add": "+",
    "mul": r"\odot",
    "less": "<",
    "less_equal": r"\le",
    "equal": "=",
    "logical_and": r"\wedge",
    "logical_or": r"\vee",
}
PREFIX = {"neg": "-", "logical_not": r"\neg "}


def _tex(name: str) -> str:
    return r"\mathtt{" + re.sub(r"([_%&#$])", r"\\\1", name.replace("\\", "/")) + "}"


def _formula(node: Value, operand: Callable[[Value], str]) -> str:
    xs = [operand(o) for o in node.operands]
    name = node.primitive.name
    if name in INFIX:
        return f" {INFIX[name]} ".join(xs)
    if name in PREFIX:
        return PREFIX[name] + xs[0]
    if name == "div":
        return rf"\frac{{{xs[0]}}}{{{xs[1]}}}"
    if name == "exp":
        return rf"e^{{{xs[0]}}}"
    if name == "sqrt":
        return rf"\sqrt{{{xs[0]}}}"
    if name == "pow":
        return rf"{{{xs[0]}}}^{{{xs[1]}}}"
    if name in ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min"):
        sign = {"reduce_sum": r"\sum", "reduce_prod": r"\prod", "reduce_max": r"\max", "reduce_min": r"\min"}[name]
        axes = ",".join(map(str, node.params["axes"]))
        return rf"{sign}_{{{axes}}} {xs[0]}"
    return rf"\operatorname{{{name.replace('_', '-')}}}({', '.join(xs)})"


def to_latex(graph: Graph) -> str:
    """One equation a node, in an `align*` that stands in any document with amsmath."""
    labels = graph.labels()
    rows = [
        rf"  {_tex(labels[v])} &= {_formula(v, lambda o: _tex(labels[o]))} && {_tex(repr(v.type))}"
        for v in graph.nodes
        if v.primitive.name != "input"
    ]
    return "\\begin{align*}\n" + " \\\\\n".join(rows) + "\n\\end{align*}\n"


# ---- the page --------------------------------------------------------------------------------------------------------------------------


def _group(v: Value) -> str:
    """What a node is drawn under: its phase and the ONNX node, loss or optimizer that it serves."""
    return f"{v.phase}|{v.origin.source.name if v.origin.source else ''}"


def _groups(graph: Graph) -> nx.DiGraph:
    """The graph seen from further away: one node per phase and source."""
    far = nx.DiGraph()
    for v in graph.nodes:
        if v.primitive.name == "input":
            continue
        source = v.origin.source
        far.add_node(_group(v), phase=v.phase, name=source.name if source else "", op=source.op_type if source else "")
        for o in v.operands:
            if o.primitive.name != "input" and _group(o) != _group(v):
                far.add_edge(_group(o), _group(v))
    return far


def _layout(far: nx.DiGraph) -> dict[str, tuple[int, int]]:
    """Layers by longest path through the condensation (groups may feed each other), columns by the mean of what feeds them."""
    condensed = nx.condensation(far)
    layer: dict[int, int] = {}
    for component in nx.topological_sort(condensed):
        layer[component] = 1 + max((layer[q] for q in condensed.predecessors(component)), default=-1)
    rows: dict[int, list[str]] = {}
    extra = 0
    for component in nx.topological_sort(condensed):
        for at, member in enumerate(sorted(condensed.nodes[component]["members"])):
            rows.setdefault(layer[component], []).append(member)
            extra = max(extra, at)
    column: dict[str, float] = {}
    place: dict[str, tuple[int, int]] = {}
    for row in sorted(rows):

        def wanted(member: str) -> float:
            feeding = [column[q] for q in far.predecessors(member) if q in column]
            return sum(feeding) / len(feeding) if feeding else 0.0

        for at, member in enumerate(sorted(rows[row], key=wanted)):
            column[member] = float(at)
            place[member] = (at, row)
    return place


def _svg(graph: Graph) -> str:
    far = _groups(graph)
    if not far or len(far) > MOST_GROUPS:
        return ""
    place = _layout(far)
    width, height, step_x, step_y = 150, 30, 170, 56
    size_x = (max(x for x, _ in place.values()) + 1) * step_x + 20
    size_y = (max(y for _, y in place.values()) + 1) * step_y + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size_x}" height="{size_y}" role="img" aria-label="groups of nodes">'
    ]
    for a, b in far.edges:
        (ax, ay), (bx, by) = place[a], place[b]
        x1, y1 = ax * step_x + 10 + width / 2, ay * step_y + 10 + height
        x2, y2 = bx * step_x + 10 + width / 2, by * step_y + 10
        bend = (y1 + y2) / 2
        parts.append(
            f'<path d="M{x1:.0f},{y1:.0f} C{x1:.0f},{bend:.0f} {x2:.0f},{bend:.0f} {x2:.0f},{y2:.0f}" class="edge"/>'
        )
    for member, (x, y) in place.items():
        facts = far.nodes[member]
        label = facts["name"] or facts["op"] or facts["phase"]
        short = label if len(label) <= 20 else f"{label[:8]}…{label[-10:]}"
        title = html.escape(f"{facts['phase']}: {facts['op']} {facts['name']}")
        parts.append(
            f'<g class="group" data-group="{html.escape(member, quote=True)}" tabindex="0"><title>{title}</title>'
            f'<rect x="{x * step_x + 10}" y="{y * step_y + 10}" width="{width}" height="{height}" rx="6" '
            f'fill="{COLOURS.get(facts["phase"], "#777777")}"/>'
            f'<text x="{x * step_x + 10 + width / 2}" y="{y * step_y + 30}">{html.escape(short)}</text></g>'
        )
    return "".join([*parts, "</svg>"])


def _params(v: Value) -> str:
    hidden = {"name", "dtype", "shape", "role", "value"} if v.primitive.name in ("input", "literal") else {"shape"}
    return " ".join(f"{k}={p!r}" for k, p in v.params.items() if k not in hidden and not isinstance(p, Graph))


def to_html(graph: Graph) -> str:
    """One page, nothing else needed: a drawing by ONNX node, and every node with its type, operands and users."""
    labels = graph.labels()
    number = {v: i for i, v in enumerate(graph.nodes)}
    outputs: dict[Value, list[str]] = {}
    for name, v in graph.outputs.items():
        outputs.setdefault(v, []).append(name)
    nodes: list[dict[str, Any]] = [
        {
            "label": labels[v],
            "primitive": v.params["role"] if v.primitive.name == "input" else v.primitive.name,
            "params": _params(v),
            "type": repr(v.type),
            "phase": "entry" if v.primitive.name == "input" else v.phase,
            "group": "" if v.primitive.name == "input" else _group(v),
            "origin": str(v.origin),
            "operands": [number[o] for o in v.operands],
            "outputs": outputs.get(v, []),
        }
        for v in graph.nodes
    ]
    data = json.dumps({"nodes": nodes, "colours": COLOURS}).replace("</", "<\\/")
    facts = f"{len(graph.inputs)} inputs, {len(graph.outputs)} outputs, {len(graph.nodes) - len(graph.inputs)} nodes"
    constraints = "".join(
        f"<li><code>{html.escape(str(c))}</code> {html.escape(c.reason)}</li>" for c in graph.constraints
    )
    return _PAGE.format(
        title=html.escape(graph.name),
        facts=facts,
        constraints=f"<ul>{constraints}</ul>" if constraints else "",
        svg=_svg(graph),
        data=data,
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ margin: 0; font: 14px/1.4 system-ui, sans-serif; color: #222; background: #fff; }}
header {{ padding: .6em 1em; border-bottom: 1px solid #ccc; }}
h1 {{ font-size: 1.1em; margin: 0; display: inline; }}
main {{ display: flex; height: calc(100vh - 4.2em); }}
#drawing {{ flex: 1 1 55%; overflow: auto; border-right: 1px solid #ccc; }}
#drawing:empty {{ display: none; }}
#list {{ flex: 1 1 45%; overflow: auto; padding: .5em 1em; }}
.edge {{ fill: none; stroke: #bbb; }}
.group {{ cursor: pointer; }} .group text {{ fill: #fff; font-size: 11px; text-anchor: middle; pointer-events: none; }}
.group.chosen rect {{ stroke: #000; stroke-width: 3; }}
.node {{ border-left: 4px solid #777; padding: .2em .6em; margin: .25em 0; background: #f7f7f7; }}
.node code {{ font-size: 12px; }} .node .label {{ font-weight: 600; }}
.node a {{ color: #0550ae; }} .node:target {{ outline: 2px solid #000; }}
.quiet {{ color: #666; }} label {{ margin-right: .8em; }}
input[type=search] {{ width: 16em; }}
</style></head><body>
<header><h1>{title}</h1> <span class="quiet">{facts}</span>
<span id="phases"></span><input type="search" id="filter" placeholder="name, primitive, type" aria-label="filter nodes">
<button id="all">show all</button>{constraints}</header>
<main><div id="drawing">{svg}</div><div id="list"></div></main>
<script>
const data = {data};
const users = data.nodes.map(() => []);
data.nodes.forEach((n, i) => n.operands.forEach(o => users[o].push(i)));
const list = document.getElementById("list"), filter = document.getElementById("filter");
let group = null;
const phases = ["entry", ...Object.keys(data.colours)].filter(p => data.nodes.some(n => n.phase === p));
const shown = new Set(phases);
for (const phase of phases) {{
  const label = document.createElement("label"), box = document.createElement("input");
  box.type = "checkbox"; box.checked = true;
  box.onchange = () => {{ box.checked ? shown.add(phase) : shown.delete(phase); draw(); }};
  label.append(box, " " + phase); document.getElementById("phases").append(label);
}}
function link(i) {{
  const a = document.createElement("a"); a.href = "#n" + i; a.textContent = data.nodes[i].label;
  a.onclick = () => {{ if (!document.getElementById("n" + i)) {{ group = null; filter.value = ""; draw(); }} }};
  return a;
}}
function row(name, ids) {{
  const div = document.createElement("div"); div.className = "quiet"; div.append(name + " ");
  ids.slice(0, 40).forEach((i, k) => {{ if (k) div.append(", "); div.append(link(i)); }});
  if (ids.length > 40) div.append(", and " + (ids.length - 40) + " more");
  return div;
}}
function draw() {{
  const wanted = filter.value.toLowerCase();
  const rows = [];
  let count = 0;
  data.nodes.forEach((n, i) => {{
    if (!shown.has(n.phase) || (group !== null && n.group !== group)) return;
    if (wanted && !(n.label + " " + n.primitive + " " + n.type + " " + n.origin).toLowerCase().includes(wanted)) return;
    if (++count > 3000) return;
    const div = document.createElement("div"); div.className = "node"; div.id = "n" + i;
    div.style.borderColor = data.colours[n.phase] || "#777";
    const head = document.createElement("div"), label = document.createElement("span"), code = document.createElement("code");
    label.className = "label"; label.textContent = n.label + " ";
    code.textContent = n.type + " = " + n.primitive + (n.params ? " " + n.params : "");
    head.append(label, code);
    if (n.outputs.length) head.append(" → output " + n.outputs.join(", "));
    div.append(head);
    if (n.origin) {{ const o = document.createElement("div"); o.className = "quiet"; o.textContent = n.origin; div.append(o); }}
    if (n.operands.length) div.append(row("reads", n.operands));
    if (users[i].length) div.append(row("read by", users[i]));
    rows.push(div);
  }});
  if (count > 3000) {{ const more = document.createElement("p"); more.textContent = (count - 3000) + " more: filter to see them"; rows.push(more); }}
  list.replaceChildren(...rows);
}}
filter.oninput = draw;
document.getElementById("all").onclick = () => {{
  group = null; filter.value = "";
  document.querySelectorAll(".group.chosen").forEach(g => g.classList.remove("chosen")); draw();
}};
document.querySelectorAll(".group").forEach(g => g.onclick = () => {{
  document.querySelectorAll(".group.chosen").forEach(o => o.classList.remove("chosen"));
  g.classList.add("chosen"); group = g.dataset.group; draw();
}});
draw();
</script></body></html>
"""

VIEWS: dict[str, Callable[[Graph], str]] = {".html": to_html, ".dot": to_dot, ".tex": to_latex, ".txt": to_text}
"""The form that each file ending asks for."""


def write(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write the view that the path's ending asks for."""
    path = Path(path)
    view = VIEWS.get(path.suffix)
    if view is None:
        raise Refusal(f"cannot write a view to {str(path)!r}", [f"the ending must be one of {', '.join(VIEWS)}"])
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(view(graph))
    os.replace(file.name, path)
