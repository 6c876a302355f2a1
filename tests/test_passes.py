"""The passes: each named rule as text before and after, equal values on random graphs, linear cost in steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pullback.algebra import composites as c
from pullback.algebra import primitives as p
from pullback.algebra.calculus.vjp import vjp
from pullback.algebra.dims import dim
from pullback.algebra.evaluate import evaluate
from pullback.algebra.graph import Constant, Graph, Value, bind, building
from pullback.algebra.origin import Origin, Source
from pullback.algebra.passes import FINAL, RULES, cse, default, finish, fold, simplify
from pullback.algebra.text import parse, show
from pullback.algebra.types import TensorType, f32, f64, i64, tensor

N = dim("N")


def graph(inputs: str, body: str) -> Graph:
    """`inputs` and the lines of `body`, the last of which is the output."""
    lines = [line.strip() for line in body.strip().splitlines()]
    name = lines[-1].split(":")[0] if ":" in lines[-1] else lines[-1]
    nodes = lines if ":" in lines[-1] else lines[:-1]
    return parse("graph g(" + inputs + ") {\n" + "\n".join(nodes) + f"\nreturn out={name}\n}}")


# ---- one row a rule: name, inputs, before, after ----------------------------------------------------------------------------------------

X = "x: f32[N, 4]"
XY = "x: f32[N, 4], y: f32[N, 4]"


def constant(name: str, value: str, shape: str = "N, 4") -> str:
    return f"{name}.0: f32[] = literal {value}\n{name}: f32[{shape}] = broadcast {name}.0 axes=[]\n"


ROWS: list[tuple[str, str, str, str]] = [
    (
        "sigmoid_cotangent", "x: f32[N], ct: f32[N]",
        "z.0: f32[] = literal 0.0\nz: f32[N] = broadcast z.0 axes=[]\nh.0: f32[] = literal 0.5\nh: f32[N] = broadcast h.0 axes=[]\n"
        "i: f32[N] = min x, z\na: f32[N] = exp i\nj: f32[N] = max x, z\nk: f32[N] = neg j\nb: f32[N] = exp k\ns: f32[N] = add a, b\n"
        "y: f32[N] = div a, s\nu: f32[N] = div y, s\nt: f32[N] = mul ct, u\nq: f32[N] = div ct, s\nn: f32[N] = neg t\n"
        "d: f32[N] = add q, n\nA: f32[N] = mul d, a\nB: f32[N] = mul t, b\n"
        "e.0: bool[N] = equal x, z\ne.1: f32[N] = mul B, h\ne.2: f32[N] = select e.0, e.1, z\ne.3: bool[N] = less z, x\n"
        "e: f32[N] = select e.3, B, e.2\n"
        "f.0: bool[N] = equal z, x\nf.1: f32[N] = mul A, h\nf.2: f32[N] = select f.0, f.1, z\nf.3: bool[N] = less x, z\n"
        "f: f32[N] = select f.3, A, f.2\no: f32[N] = add e, f",
        "z.0: f32[] = literal 0.0\nz: f32[N] = broadcast z.0 axes=[]\ni: f32[N] = min x, z\na: f32[N] = exp i\nj: f32[N] = max x, z\n"
        "k: f32[N] = neg j\nb: f32[N] = exp k\ns: f32[N] = add a, b\ny: f32[N] = div a, s\nm: f32[N] = mul ct, y\nw: f32[N] = div b, s\n"
        "o: f32[N] = mul m, w",
    ),
    (
        "commuted", XY,
        "a: f32[N, 4] = mul x, y\nb: f32[N, 4] = mul y, x\no: f32[N, 4] = max a, b",
        "o: f32[N, 4] = mul x, y",
    ),
    (
        "scaled_broadcast", "x: f32[N, 4], s: f32[4]",
        "b: f32[N, 4] = broadcast s axes=[1]\na: f32[N, 4] = mul x, b\n" + constant("c", "3.0") + "o: f32[N, 4] = mul a, c",
        constant("c", "3.0", "4") + "d: f32[4] = mul s, c\nb: f32[N, 4] = broadcast d axes=[1]\no: f32[N, 4] = mul x, b",
    ),
    (
        "added_twice", "x: f32[N, 4], y: f32[N, 4], s: f32[4]",
        "b: f32[N, 4] = broadcast s axes=[1]\nt: f32[N, 4] = mul x, b\na: f32[N, 4] = add y, t\no: f32[N, 4] = add a, t",
        constant("c", "2.0", "4") + "d: f32[4] = mul s, c\nb: f32[N, 4] = broadcast d axes=[1]\nt: f32[N, 4] = mul x, b\no: f32[N, 4] = add y, t",
    ),
    (
        "neg_of_negated_factor", "x: f32[N, 4], s: f32[4]",
        "n: f32[4] = neg s\nb: f32[N, 4] = broadcast n axes=[1]\na: f32[N, 4] = mul x, b\no: f32[N, 4] = neg a",
        "b: f32[N, 4] = broadcast s axes=[1]\no: f32[N, 4] = mul x, b",
    ),
    ("add_zero", X, constant("c", "0.0") + "o: f32[N, 4] = add x, c", "x"),
    ("add_negs", XY, "a: f32[N, 4] = neg x\nb: f32[N, 4] = neg y\no: f32[N, 4] = add a, b",
     "s: f32[N, 4] = add x, y\no: f32[N, 4] = neg s"),
    ("sub_itself_of_integers", "x: i64[N]", "a: i64[N] = neg x\no: i64[N] = add x, a",
     "c: i64[] = literal 0\no: i64[N] = broadcast c axes=[]"),
    ("mul_one", X, constant("c", "1.0") + "o: f32[N, 4] = mul c, x", "x"),
    ("mul_zero_of_integers", "x: i64[N]", "c.0: i64[] = literal 0\nc: i64[N] = broadcast c.0 axes=[]\no: i64[N] = mul x, c",
     "c.0: i64[] = literal 0\no: i64[N] = broadcast c.0 axes=[]"),
    ("mul_minus_one", X, constant("c", "-1.0") + "o: f32[N, 4] = mul x, c", "o: f32[N, 4] = neg x"),
    ("mul_neg", XY, "a: f32[N, 4] = neg x\no: f32[N, 4] = mul a, y", "a: f32[N, 4] = mul x, y\no: f32[N, 4] = neg a"),
    ("mul_of_scaled", X, constant("c", "3.0") + constant("d", "0.5") + "a: f32[N, 4] = mul x, c\no: f32[N, 4] = mul a, d",
     constant("c", "1.5") + "o: f32[N, 4] = mul x, c"),
    ("div_one", X, constant("c", "1.0") + "o: f32[N, 4] = div x, c", "x"),
    ("div_neg", XY, "a: f32[N, 4] = neg x\no: f32[N, 4] = div a, y", "a: f32[N, 4] = div x, y\no: f32[N, 4] = neg a"),
    ("div_power_of_two", X, constant("c", "8.0") + "o: f32[N, 4] = div x, c",
     constant("c", "0.125") + "o: f32[N, 4] = mul x, c"),
    ("neg_neg", X, "a: f32[N, 4] = neg x\no: f32[N, 4] = neg a", "x"),
    ("neg_of_scaled", X, constant("c", "3.0") + "a: f32[N, 4] = mul x, c\no: f32[N, 4] = neg a",
     constant("c", "-3.0") + "o: f32[N, 4] = mul x, c"),
    ("neg_of_difference", XY, "a: f32[N, 4] = neg y\nb: f32[N, 4] = add x, a\no: f32[N, 4] = neg b",
     "a: f32[N, 4] = neg x\no: f32[N, 4] = add y, a"),
    ("pow_literal", X, constant("c", "2.0") + "o: f32[N, 4] = pow x, c", "o: f32[N, 4] = mul x, x"),
    ("extreme_of_itself", X, "o: f32[N, 4] = max x, x", "x"),
    ("logical_literal", "x: bool[N]", "t.0: bool[] = literal true\nt: bool[N] = broadcast t.0 axes=[]\no: bool[N] = logical_and x, t", "x"),
    ("logical_not_not", "x: bool[N]", "a: bool[N] = logical_not x\no: bool[N] = logical_not a", "x"),
    ("select_literal", XY, "t.0: bool[] = literal false\nt: bool[N, 4] = broadcast t.0 axes=[]\no: f32[N, 4] = select t, x, y", "y"),
    ("select_same", "b: bool[N, 4], x: f32[N, 4]", "o: f32[N, 4] = select b, x, x", "x"),
    ("select_not", "b: bool[N, 4], x: f32[N, 4], y: f32[N, 4]", "n: bool[N, 4] = logical_not b\no: f32[N, 4] = select n, x, y",
     "o: f32[N, 4] = select b, y, x"),
    ("select_nested", "b: bool[N, 4], x: f32[N, 4], y: f32[N, 4]",
     "a: f32[N, 4] = select b, x, y\nn: f32[N, 4] = neg y\no: f32[N, 4] = select b, a, n",
     "n: f32[N, 4] = neg y\no: f32[N, 4] = select b, x, n"),
    ("abs_of_abs", X, "a: f32[N, 4] = neg x\nb: f32[N, 4] = abs a\no: f32[N, 4] = abs b", "o: f32[N, 4] = abs x"),
    ("rounding_twice", X, "a: f32[N, 4] = floor x\no: f32[N, 4] = round a", "o: f32[N, 4] = floor x"),
    ("cast_of_cast", "x: f16[N]", "a: f32[N] = cast x\nb: f64[N] = cast a\no: f16[N] = cast b", "x"),
    ("fold", X, "a: f32[] = literal 2.0\nb: f32[] = literal 3.0\nd: f32[] = add a, b\nc: f32[N, 4] = broadcast d axes=[]\no: f32[N, 4] = mul x, c",
     constant("c", "5.0") + "o: f32[N, 4] = mul x, c"),
    ("transpose_identity", X, "o: f32[N, 4] = transpose x perm=[0,1]", "x"),
    ("transpose_twice", X, "a: f32[4, N] = transpose x perm=[1,0]\no: f32[N, 4] = transpose a perm=[1,0]", "x"),
    ("transpose_of_broadcast", "x: f32[4]", "a: f32[N, 4] = broadcast x axes=[1]\no: f32[4, N] = transpose a perm=[1,0]",
     "o: f32[4, N] = broadcast x axes=[0]"),
    ("transpose_of_units", "x: f32[N, 1]", "o: f32[1, N] = transpose x perm=[1,0]", "o: f32[1, N] = reshape x"),
    ("reshape_identity", X, "o: f32[N, 4] = reshape x", "x"),
    ("reshape_twice", X, "a: f32[4*N] = reshape x\no: f32[2*N, 2] = reshape a", "o: f32[2*N, 2] = reshape x"),
    ("reshape_of_broadcast", "x: f32[4, 6]", "a: f32[N, 4, 6] = broadcast x axes=[1,2]\no: f32[N, 24] = reshape a",
     "a: f32[24] = reshape x\no: f32[N, 24] = broadcast a axes=[1]"),
    ("broadcast_identity", X, "o: f32[N, 4] = broadcast x axes=[0,1]", "x"),
    ("broadcast_twice", "x: f32[4]", "a: f32[N, 4] = broadcast x axes=[1]\no: f32[2, N, 4] = broadcast a axes=[1,2]",
     "o: f32[2, N, 4] = broadcast x axes=[2]"),
    ("broadcast_of_units", "x: f32[4]", "a: f32[1, 4] = reshape x\no: f32[1, N, 4] = broadcast a axes=[0,2]",
     "o: f32[1, N, 4] = broadcast x axes=[2]"),
    ("pointwise_of_broadcasts", "x: f32[4], y: f32[4]",
     "a: f32[N, 4] = broadcast x axes=[1]\nb: f32[N, 4] = broadcast y axes=[1]\no: f32[N, 4] = mul a, b",
     "a: f32[4] = mul x, y\no: f32[N, 4] = broadcast a axes=[1]"),
    ("slice_identity", X, "o: f32[N, 4] = slice x start=[0,0] limit=[N,4]", "x"),
    ("slice_twice", "x: f32[20]", "a: f32[8] = slice x start=[2] limit=[18] stride=[2]\no: f32[3] = slice a start=[1] limit=[7] stride=[2]",
     "o: f32[3] = slice x start=[4] limit=[13] stride=[4]"),
    ("slice_of_broadcast", "x: f32[4]", "a: f32[N, 4] = broadcast x axes=[1]\no: f32[N, 2] = slice a start=[0,1] limit=[N,3]",
     "a: f32[2] = slice x start=[1] limit=[3]\no: f32[N, 2] = broadcast a axes=[1]"),
    ("slice_of_pad", X, "a: f32[N + 5, 4] = pad x low=[2,0] high=[3,0]\no: f32[N, 4] = slice a start=[2,0] limit=[N + 2,4]", "x"),
    ("slice_of_concat", XY, "a: f32[N, 8] = concat x, y axis=1\no: f32[N, 2] = slice a start=[0,5] limit=[N,7]",
     "o: f32[N, 2] = slice y start=[0,1] limit=[N,3]"),
    ("reverse_few", "x: f32[N, 1]", "o: f32[N, 1] = reverse x axes=[1]", "x"),
    ("reverse_twice", X, "a: f32[N, 4] = reverse x axes=[0,1]\no: f32[N, 4] = reverse a axes=[1]", "o: f32[N, 4] = reverse x axes=[0]"),
    ("reverse_of_broadcast", "x: f32[4]", "a: f32[N, 4] = broadcast x axes=[1]\no: f32[N, 4] = reverse a axes=[0]",
     "o: f32[N, 4] = broadcast x axes=[1]"),
    ("pad_nothing", X, "o: f32[N, 4] = pad x low=[0,0] high=[0,0]", "x"),
    ("pad_twice", X, "a: f32[N, 6] = pad x low=[0,1] high=[0,1]\no: f32[N + 1, 7] = pad a low=[0,0] high=[1,1]",
     "o: f32[N + 1, 7] = pad x low=[0,1] high=[1,2]"),
    ("pad_of_its_value", "x: f32[N, 5]", constant("c", "0.0") + "a: f32[N, 5] = pad c low=[0,1] high=[0,0]\no: f32[N, 5] = add x, a", "x"),
    ("pad_of_broadcast", "x: f32[4]", "a: f32[N, 4] = broadcast x axes=[1]\no: f32[N, 5] = pad a low=[0,1] high=[0,0]",
     "a: f32[5] = pad x low=[1] high=[0]\no: f32[N, 5] = broadcast a axes=[1]"),
    ("add_of_adjacent_pads", XY, "a: f32[N, 8] = pad x low=[0,0] high=[0,4]\nb: f32[N, 8] = pad y low=[0,4] high=[0,0]\no: f32[N, 8] = add a, b",
     "o: f32[N, 8] = concat x, y axis=1"),
    ("concat_one", X, "o: f32[N, 4] = concat x axis=0", "x"),
    ("concat_empty", "x: f32[N, 4], y: f32[N, 0]", "o: f32[N, 4] = concat x, y axis=1", "x"),
    ("concat_nested", XY, "a: f32[2*N, 4] = concat x, y axis=0\no: f32[3*N, 4] = concat a, x axis=0", "o: f32[3*N, 4] = concat x, y, x axis=0"),
    ("concat_of_slices", "x: f32[N, 9]",
     "a: f32[N, 2] = slice x start=[0,1] limit=[N,3]\nb: f32[N, 4] = slice x start=[0,3] limit=[N,7]\no: f32[N, 6] = concat a, b axis=1",
     "o: f32[N, 6] = slice x start=[0,1] limit=[N,7]"),
    ("window_of_points", "x: f32[N, 9]", "o: f32[N, 5, 1] = window x axes=[1] sizes=[1] strides=[2]",
     "a: f32[N, 5] = slice x start=[0,0] limit=[N,9] stride=[1,2]\no: f32[N, 5, 1] = reshape a"),
    ("fold_of_points", "x: f32[N, 5, 1]", "o: f32[N, 10] = fold x axes=[1] strides=[2]",
     "a: f32[N, 5] = reshape x\no: f32[N, 10] = pad a low=[0,0] high=[0,1] interior=[0,1]"),
    ("gather_at_literal", X, "i: i64[] = literal -1\no: f32[N] = gather x, i axis=1",
     "a: f32[N, 1] = slice x start=[0,3] limit=[N,4]\no: f32[N] = reshape a"),
    ("gather_everything", X, "i: i64[4] = iota\no: f32[N, 4] = gather x, i axis=1", "x"),
    ("scatter_at_literal", "x: f32[N]", "i: i64[] = literal 1\no: f32[N, 4] = scatter_add x, i axis=1",
     "a: f32[N, 1] = reshape x\no: f32[N, 4] = pad a low=[0,1] high=[0,2]"),
    ("scatter_everything", X, "i: i64[4] = iota\no: f32[N, 4] = scatter_add x, i axis=1", "x"),
    ("reduce_nothing", X, "o: f32[N, 4] = reduce_sum x axes=[]", "x"),
    ("reduce_units", "x: f32[N, 1, 4]", "o: f32[N] = reduce_max x axes=[1,2]",
     "a: f32[N, 4] = reshape x\no: f32[N] = reduce_max a axes=[1]"),
    ("reduce_twice", X, "a: f32[N] = reduce_sum x axes=[1]\no: f32[] = reduce_sum a axes=[0]", "o: f32[] = reduce_sum x axes=[0,1]"),
    ("reduce_of_transpose", "x: f32[2, 3, 4]", "a: f32[4, 3, 2] = transpose x perm=[2,1,0]\no: f32[4, 2] = reduce_sum a axes=[1]",
     "a: f32[2, 4] = reduce_sum x axes=[1]\no: f32[4, 2] = transpose a perm=[1,0]"),
    ("reduce_of_broadcast", "x: f32[4]", "a: f32[N, 4] = broadcast x axes=[1]\no: f32[4] = reduce_sum a axes=[0]",
     "d: i64[] = dim value=N\nf: f32[] = cast d\na: f32[4] = broadcast f axes=[]\no: f32[4] = mul x, a"),
    ("sum_of_neg", X, "a: f32[N, 4] = neg x\no: f32[N] = reduce_sum a axes=[1]", "a: f32[N] = reduce_sum x axes=[1]\no: f32[N] = neg a"),
    ("sum_of_scaled", X, constant("c", "3.0") + "a: f32[N, 4] = mul x, c\no: f32[N] = reduce_sum a axes=[1]",
     "a: f32[N] = reduce_sum x axes=[1]\n" + constant("c", "3.0", "N") + "o: f32[N] = mul a, c"),
    ("sum_of_dot", "x: f32[N, 2, 3], y: f32[N, 3, 5]",
     "a: f32[N, 2, 5] = dot x, y contract=[[2],[1]] batch=[[0],[0]]\no: f32[2, 5] = reduce_sum a axes=[0]",
     "o: f32[2, 5] = dot x, y contract=[[0,2],[0,1]]"),
    ("dot_ordered", "x: f32[2, 3, 4], y: f32[2, 3, 5]", "o: f32[4, 5] = dot x, y contract=[[1,0],[1,0]]",
     "o: f32[4, 5] = dot x, y contract=[[0,1],[0,1]]"),
    ("dot_of_transpose", "x: f32[N, 3], y: f32[N, 5]", "a: f32[3, N] = transpose x perm=[1,0]\no: f32[3, 5] = dot a, y contract=[[1],[0]]",
     "o: f32[3, 5] = dot x, y contract=[[0],[0]]"),
    ("dot_of_units", "x: f32[N, 3, 1], y: f32[3, 1, 5]", "o: f32[N, 5] = dot x, y contract=[[1,2],[0,1]]",
     "a: f32[N, 3] = reshape x\nb: f32[3, 5] = reshape y\no: f32[N, 5] = dot a, b contract=[[1],[0]]"),
    ("dot_of_nothing", "x: f32[N], y: f32[4]", "o: f32[N, 4] = dot x, y contract=[[],[]]",
     "a: f32[N, 4] = broadcast x axes=[0]\nb: f32[N, 4] = broadcast y axes=[1]\no: f32[N, 4] = mul a, b"),
    ("dot_of_broadcast", "x: f32[N], y: f32[4, 5]", "a: f32[N, 4] = broadcast x axes=[0]\no: f32[N, 5] = dot a, y contract=[[1],[0]]",
     "b: f32[5] = reduce_sum y axes=[0]\nc: f32[N, 5] = broadcast x axes=[0]\nd: f32[N, 5] = broadcast b axes=[1]\no: f32[N, 5] = mul c, d"),
    ("transpose_of_dot", "x: f32[N, 3], y: f32[3, 5]", "a: f32[N, 5] = dot x, y contract=[[1],[0]]\no: f32[5, N] = transpose a perm=[1,0]",
     "o: f32[5, N] = dot y, x contract=[[0],[1]]"),
    ("softmax_cotangent", "x: f32[N, 4], ct: f32[N, 4]",
     "e: f32[N, 4] = exp x\ns.0: f32[N] = reduce_sum e axes=[1]\ns: f32[N, 4] = broadcast s.0 axes=[0]\n"
     "y: f32[N, 4] = div e, s\na: f32[N, 4] = div ct, s\nb: f32[N, 4] = div y, s\nm: f32[N, 4] = mul ct, b\nt: f32[N] = reduce_sum m axes=[1]\n"
     "n: f32[N] = neg t\nr: f32[N, 4] = broadcast n axes=[0]\nd: f32[N, 4] = add a, r\no: f32[N, 4] = mul d, e",
     "e: f32[N, 4] = exp x\ns.0: f32[N] = reduce_sum e axes=[1]\ns: f32[N, 4] = broadcast s.0 axes=[0]\ny: f32[N, 4] = div e, s\n"
     "m: f32[N, 4] = mul ct, y\nt: f32[N] = reduce_sum m axes=[1]\nn: f32[N] = neg t\nr: f32[N, 4] = broadcast n axes=[0]\n"
     "d: f32[N, 4] = add ct, r\no: f32[N, 4] = mul y, d"),
]  # fmt: skip


REASSOCIATING = {
    "dot_of_broadcast",
    "reduce_of_broadcast",
    "sigmoid_cotangent",
    "softmax_cotangent",
    "sum_of_dot",
    "sum_of_scaled",
}
"""Rules that add up in another order, or factor a sum: infinities of both signs may then meet, or no longer meet, and what is NaN shows."""


def normal(g: Graph) -> str:
    """The text of a graph whatever its nodes are called and whenever they were made: built anew from its outputs, operands first."""
    with building():
        new = {id(v): p.input(v.params["name"], v.type, v.params["role"]) for v in g.inputs}

        def again(v: Value) -> Value:
            if id(v) not in new:
                new[id(v)] = bind(v.primitive, *(again(o) for o in v.operands), **v.params)
            return new[id(v)]

        outputs = {name: again(v) for name, v in g.outputs.items()}
    return show(Graph(tuple(new[id(v)] for v in g.inputs), outputs, "g"))


def feeds(g: Graph, seed: int = 0, special: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    drawn: dict[str, np.ndarray] = {}
    for v in g.inputs:
        shape = [d if isinstance(d, int) else 3 for d in v.shape]
        if v.dtype.floating:
            x = rng.standard_normal(shape)
            if special and x.size:
                x.reshape(-1)[rng.integers(0, x.size, 2)] = rng.choice([np.nan, np.inf, -np.inf, 0.0], 2)
            drawn[v.params["name"]] = x.astype(v.dtype.numpy)
        else:
            drawn[v.params["name"]] = rng.integers(0, 2, shape).astype(v.dtype.numpy)
    return drawn


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_rule_gives_the_text_that_its_row_shows(row: tuple[str, str, str, str]) -> None:
    _, inputs, before, after = row
    found = simplify(graph(inputs, before))
    assert normal(found) == normal(simplify(graph(inputs, after)))
    assert normal(found) == normal(graph(inputs, after)), show(found)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_rule_keeps_values_with_their_nans_and_infinities(row: tuple[str, str, str, str]) -> None:
    name, inputs, before, _ = row
    g = graph(inputs, before)
    h = simplify(g)
    for seed in range(4):
        given_ = feeds(g, seed, special=seed > 1 and name not in REASSOCIATING)
        a, b = (evaluate(each, given_, sizes={"N": 3})["out"] for each in (g, h))
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=show(g) + show(h))


def test_every_rule_has_a_row_and_every_row_a_rule() -> None:
    assert {rule.name for rule in RULES} == {row[0] for row in ROWS}


def test_every_rule_says_what_it_does() -> None:
    assert all("->" in rule.formula or rule.name == "dot_of_units" or "without" in rule.formula or "order" in rule.formula
               for rule in (*RULES, *FINAL))  # fmt: skip


# ---- what must stay ---------------------------------------------------------------------------------------------------------------------

STAYS = [
    ("a float times zero may be NaN", X, constant("c", "0.0") + "o: f32[N, 4] = mul x, c"),
    ("a difference of a float with itself may be NaN", X, "a: f32[N, 4] = neg x\no: f32[N, 4] = add x, a"),
    ("a quotient by a number that is no power of two would be rounded otherwise", X, constant("c", "3.0") + "o: f32[N, 4] = div x, c"),
    ("a product of literals that overflows", X,
     constant("c", "1e30") + constant("d", "1e30") + "a: f32[N, 4] = mul x, c\no: f32[N, 4] = mul a, d"),
    ("b * (a / b) is not a where b is 0", XY, "a: f32[N, 4] = div x, y\no: f32[N, 4] = mul a, y"),
    ("a cast that loses bits", "x: f32[N]", "a: f16[N] = cast x\no: f32[N] = cast a"),
    ("a slice of which no end is sure to be inside", "x: f32[N], y: f32[M]",
     "a: f32[N + 3] = pad x low=[3] high=[0]\nb: f32[M + 3] = pad y low=[3] high=[0]\nc: f32[M + N + 6] = concat a, b axis=0\n"
     "o: f32[5] = slice c start=[1] limit=[6]"),
    ("split ties of a maximum of maxima", X, "a: f32[N] = reduce_max x axes=[1]\no: f32[] = reduce_max a axes=[0]"),
    ("stop_gradient while the graph can be differentiated", X, "o: f32[N, 4] = stop_gradient x"),
]  # fmt: skip


@pytest.mark.parametrize("row", STAYS, ids=[row[0] for row in STAYS])
def test_what_only_looks_simpler_stays(row: tuple[str, str, str]) -> None:
    g = graph(row[1], row[2])
    assert normal(simplify(g)) == normal(g)


def test_stop_gradient_goes_when_the_graph_is_finished() -> None:
    g = graph(X, "o: f32[N, 4] = stop_gradient x")
    assert normal(finish(g)) == normal(graph(X, "x"))
    assert normal(default(g)) == normal(finish(g))


def test_fold_computes_constants_and_leaves_the_rest() -> None:
    g = graph("x: f32[3]", "a: f32[3] = literal [1,2,3]\nb: f32[3] = exp a\nc: f32[3] = mul x, b\no: f32[3] = neg c")
    assert [v.primitive.name for v in fold(g).nodes] == ["input", "literal", "mul", "neg"]


def test_folding_does_not_make_a_file_larger() -> None:
    with building():
        row, column = p.literal(np.arange(2000.0, dtype=np.float32)), p.literal(np.arange(1999.0, dtype=np.float32))
        table = p.dot(row, column, contract=((), ()))
    assert all(
        v.type.shape != (2000, 1999) or v.primitive.name != "literal" for v in fold(Graph((), {"t": table})).nodes
    )


def test_a_parameter_is_never_folded() -> None:
    with building():
        w = p.input("w", tensor(f32, (2,)), role="parameter")
        y = p.mul(w, p.number(2, w))
    g = Graph((w,), {"y": y}, data={"w": Constant(np.ones(2, np.float32))})
    assert "mul" in [v.primitive.name for v in default(g).nodes]


def test_names_roles_and_data_survive_and_vanished_tensors_go() -> None:
    with building():
        x = p.input("x", tensor(f32, (N,)))
        inner = p.neg(p.neg(x))
        lost = p.neg(x)
        y = p.tanh(inner)
    g = Graph((x,), {"y": y}, tensors={"inner": inner, "lost": lost, "y": y})
    h = simplify(g)
    assert list(h.outputs) == ["y"]
    assert h.tensors["inner"] is h.inputs[0]
    assert "lost" not in h.tensors
    assert h.tensors["y"] is h.outputs["y"]


def test_a_node_that_a_rule_made_says_so_in_its_origin() -> None:
    with building() as builder:
        builder.origin = Origin("forward", Source("fc", "Gemm", "", 18))
        x = p.input("x", tensor(f32, (N,)))
        y = p.mul(x, p.number(-1, x))
    made = simplify(Graph((x,), {"y": y})).outputs["y"]
    assert made.primitive.name == "neg"
    assert str(made.origin) == "fc / simplify:mul_minus_one"


def test_equal_expressions_become_one() -> None:
    with building():
        x = p.input("x", tensor(f32, (N,)))
        a = p.tanh(x)
        with building():
            b = p.tanh(x)
        y = p.add(a, b)
    assert len(Graph((x,), {"y": y}).nodes) == 4
    assert len(cse(Graph((x,), {"y": y})).nodes) == 3


# ---- random graphs ----------------------------------------------------------------------------------------------------------------------

UNARY = (p.neg, p.abs, p.floor, p.tanh, p.exp, p.sign, c.relu, p.stop_gradient)
BINARY = (p.add, p.mul, c.sub, p.max, p.min)
NUMBERS = (0.0, 1.0, -1.0, 2.0, 0.5, 3.0)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    dtype = draw(st.sampled_from((f32, f64)))
    with building():
        values = [
            p.input("x", tensor(dtype, (N, 4))),
            p.input("w", tensor(dtype, (4,))),
            p.input("z", tensor(dtype, (2, N))),
        ]
        inputs = tuple(values)
        for _ in range(draw(st.integers(3, 14))):
            values.append(draw_node(draw, values))
        outputs = {f"o{i}": v for i, v in enumerate(values[-3:])}
    return Graph(inputs, outputs)


def draw_node(draw: st.DrawFn, values: list[Value]) -> Value:
    x = draw(st.sampled_from(values[-6:]))
    kind = draw(st.integers(0, 12))
    match kind:
        case 0 | 1:
            return draw(st.sampled_from(UNARY))(x)
        case 2 | 3:
            fit = [v for v in values if v.shape == x.shape]
            return draw(st.sampled_from(BINARY))(x, draw(st.sampled_from(fit)))
        case 4:
            return draw(st.sampled_from(BINARY))(x, p.number(draw(st.sampled_from(NUMBERS)), x))
        case 5:
            return p.transpose(x, perm=tuple(draw(st.permutations(range(x.rank)))))
        case 6 if x.rank < 4:
            place = draw(st.integers(0, x.rank))
            shape = (*x.shape[:place], draw(st.sampled_from((1, 2, N))), *x.shape[place:])
            return p.broadcast(x, shape=shape, axes=tuple(i for i in range(x.rank + 1) if i != place))
        case 7 if x.rank:
            axes = draw(st.sets(st.integers(0, x.rank - 1)))
            reduce = draw(st.sampled_from((p.reduce_sum, p.reduce_max)))
            return reduce(x, axes=tuple(axes))
        case 8:
            amounts = [draw(st.tuples(st.integers(0, 2), st.integers(0, 1))) for _ in range(x.rank)]
            return p.pad(x, low=tuple(a for a, _ in amounts), high=tuple(b for _, b in amounts))
        case 9 if x.rank:
            axis = draw(st.integers(0, x.rank - 1))
            start = draw(st.integers(0, 1)) if x.shape[axis] != 1 else 0
            limit = tuple(d for d in x.shape)
            return p.slice(x, start=tuple(start if i == axis else 0 for i in range(x.rank)), limit=limit)
        case 10 if x.rank:
            fit = [v for v in values if v.rank and v.shape[0] == x.shape[-1]]
            if fit and x.rank < 4:
                y = draw(st.sampled_from(fit))
                return p.dot(x, y, contract=((x.rank - 1,), (0,))) if x.rank + y.rank < 7 else x
            return p.reverse(x, axes=(0,))
        case 11 if x.rank:
            axis = draw(st.integers(0, x.rank - 1))
            return p.concat(x, x, axis=axis)
        case 12 if x.rank and x.rank < 5:
            return c.unsqueeze(x, [draw(st.integers(0, x.rank))])
    return p.neg(x)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(graphs(), st.integers(0, 3))
def test_random_graphs_compute_the_same_before_and_after(g: Graph, seed: int) -> None:
    h = default(g)
    assert len(h.nodes) <= 3 * len(g.nodes) + 8
    given_ = feeds(g, seed)
    before, after = evaluate(g, given_), evaluate(h, given_)
    for name in before:
        with np.errstate(all="ignore"):
            scale = np.nanmax(np.abs(before[name]), initial=1.0, where=np.isfinite(before[name]))
        if not np.isfinite(scale) or scale > 1e6:
            continue  # sums of numbers so large cancel in other ways
        np.testing.assert_allclose(
            after[name], before[name], rtol=1e-4, atol=1e-5 * scale, err_msg=show(g) + "\n" + show(h)
        )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(graphs())
def test_simplifying_twice_changes_nothing(g: Graph) -> None:
    once = simplify(g)
    assert len(simplify(once).nodes) == len(once.nodes)


# ---- gradients get short ----------------------------------------------------------------------------------------------------------------


def gradient_nodes(f: object, shapes: dict[str, TensorType]) -> list[str]:
    with building():
        inputs = [p.input(name, t) for name, t in shapes.items()]
        y = f(*inputs)  # type: ignore[operator]
        ct = p.input("ct", y.type)
        cts = vjp([y], [ct], inputs)
    g = default(
        Graph(
            (*inputs, ct), {f"grad_{v.params['name']}": ct for v, ct in zip(inputs, cts, strict=True) if ct is not None}
        )
    )
    return sorted(v.primitive.name for v in g.nodes if v.primitive.name not in ("input", "literal", "broadcast"))


def test_the_gradient_of_a_linear_layer_is_two_dots_and_a_sum() -> None:
    def linear(x: Value, w: Value, b: Value) -> Value:
        y = p.dot(x, w, contract=((1,), (1,)))
        return p.add(y, p.broadcast(b, shape=y.shape, axes=(1,)))

    shapes = {"x": tensor(f32, (N, 4)), "w": tensor(f32, (3, 4)), "b": tensor(f32, (3,))}
    assert gradient_nodes(linear, shapes) == ["dot", "dot", "reduce_sum"]


def test_the_gradient_of_a_convolution_is_two_dots_and_a_fold() -> None:
    def conv(x: Value, w: Value) -> Value:
        padded = p.pad(x, low=(0, 0, 1, 1), high=(0, 0, 1, 1))
        patches = p.window(padded, axes=(2, 3), sizes=(3, 3), strides=(1, 1), dilations=(1, 1))
        return p.transpose(p.dot(patches, w, contract=((1, 4, 5), (1, 2, 3))), perm=(0, 3, 1, 2))

    found = gradient_nodes(conv, {"x": tensor(f32, (N, 4, 8, 8)), "w": tensor(f32, (5, 4, 3, 3))})
    assert found == ["dot", "dot", "fold", "pad", "slice", "transpose", "window"]


def test_the_gradient_of_a_softmax_is_short() -> None:
    found = gradient_nodes(lambda x: c.softmax(x, [1]), {"x": tensor(f32, (N, 4))})
    assert found == ["add", "add", "div", "exp", "mul", "mul", "neg", "neg", "reduce_max", "reduce_sum", "reduce_sum"]


def test_the_gradient_of_a_sigmoid_is_short_and_exact_in_its_tails() -> None:
    with building():
        x, ct = (p.input(name, tensor(f64, (N,))) for name in ("x", "ct"))
        g = Graph((x, ct), {"grad_x": vjp([c.sigmoid(x)], [ct], [x])[0]})
    short = default(g)
    assert len(short.nodes) < 20
    assert not {v.primitive.name for v in short.nodes} & {"less", "equal", "select"}
    feeds_ = {"x": np.asarray([-700.0, -40.0, -1.0, 0.0, 2.0, 40.0, 700.0]), "ct": np.full(7, 3.0)}
    before, after = evaluate(g, feeds_)["grad_x"], evaluate(short, feeds_)["grad_x"]
    np.testing.assert_allclose(after, before, rtol=1e-12)
    assert after[3] == 0.75


def test_the_gradient_of_a_split_is_a_concat() -> None:
    def split(x: Value) -> Value:
        a, b, d = c.split(x, [2, 3, 1], 1)
        return p.concat(p.tanh(d), p.exp(a), p.exp(b), axis=1)

    assert "pad" not in gradient_nodes(split, {"x": tensor(f32, (N, 6))})


def test_a_gradient_by_a_literal_index_is_a_pad() -> None:
    found = gradient_nodes(lambda x: p.gather(x, p.literal(0, i64), axis=1), {"x": tensor(f32, (N, 6))})
    assert found == ["pad", "reshape"] or found == ["pad"]


# ---- cost -------------------------------------------------------------------------------------------------------------------------------


def steps_of(g: Graph, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many values the rewriting asks for."""
    from pullback.algebra.passes import rewriting

    count = 0
    add = rewriting.Rewriter.add

    def counting(self: object, *args: object) -> Value:
        nonlocal count
        count += 1
        return add(self, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(rewriting.Rewriter, "add", counting)
        default(g)
    return count


def chain(n: int) -> Graph:
    with building():
        x = p.input("x", tensor(f32, (N, 4)))
        h = x
        for i in range(n):
            h = p.neg(p.add(h, p.number(i % 3, h))) if i % 2 else p.transpose(p.transpose(h, perm=(1, 0)), perm=(1, 0))
    return Graph((x,), {"y": h})


def wide(n: int) -> Graph:
    with building():
        x = p.input("x", tensor(f32, (N, 4)))
        parts = [p.pad(p.mul(x, p.number(1.0 + i, x)), low=(0, 4 * i), high=(0, 4 * (n - 1 - i))) for i in range(n)]
        total = parts[0]
        for part in parts[1:]:
            total = p.add(total, part)
    return Graph((x,), {"y": total})


@pytest.mark.parametrize("make", [chain, wide])
def test_the_work_grows_with_the_graph_and_no_faster(make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (steps_of(make(n), monkeypatch) for n in (200, 1600))  # type: ignore[operator]
    assert large <= 8.5 * small
