"""Views hold every node, whatever the names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pullback.algebra import composites as c
from pullback.algebra import primitives as p
from pullback.algebra.calculus.vjp import vjp
from pullback.algebra.dims import dim
from pullback.algebra.errors import Refusal
from pullback.algebra.graph import Graph, building
from pullback.algebra.types import f32, tensor
from pullback.backends import views


@pytest.fixture
def graph() -> Graph:
    with building():
        x = p.input("x</script>&'\"", tensor(f32, (dim("N"), 4)))
        w = p.input("w:0/a.b", tensor(f32, (4, 3)), role="parameter")
        y = c.sigmoid(p.dot(x, w, contract=((1,), (0,))))
        loss = p.reduce_sum(y, axes=(0, 1))
        (ct,) = vjp([loss], [p.number(1, loss)], [w])
        assert ct is not None
    return Graph((x, w), {"loss": loss, "grad_w:0/a.b": ct}, tensors={"y": y})


def test_page_holds_every_node_and_no_name_breaks_it(graph: Graph) -> None:
    page = views.to_html(graph)
    found = re.search(r"const data = (.*);\nconst users", page)
    assert found is not None
    assert page.count("</script>") == 1
    nodes = json.loads(found.group(1).replace("<\\/", "</"))["nodes"]
    assert len(nodes) == len(graph.nodes)
    assert nodes[0]["label"] == "x</script>&'\""


def test_dot_has_each_node_and_edge(graph: Graph) -> None:
    text = views.to_dot(graph)
    assert len(re.findall(r"^  n\d+ \[", text, re.M)) == len(graph.nodes)
    assert len(re.findall(r"^  n\d+ -> n\d+", text, re.M)) == sum(len(v.operands) for v in graph.nodes)


def test_latex_has_one_equation_a_node(graph: Graph) -> None:
    assert views.to_latex(graph).count("&=") == len(graph.nodes) - len(graph.inputs)


@pytest.mark.parametrize("ending", sorted(views.VIEWS))
def test_ending_chooses_the_view(graph: Graph, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"view{ending}"
    views.write(graph, path)
    assert path.read_text(encoding="utf-8") == views.VIEWS[ending](graph)


def test_unknown_ending_is_refused_and_leaves_no_file(graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="ending"):
        views.write(graph, tmp_path / "view.pdf")
    assert list(tmp_path.iterdir()) == []
