"""The native profile: groups of primitives raised back to the ONNX operators that runtimes have fast kernels for.

Raising is a pass. A rule recognises a value of the algebra (`dot(window(x), w)` is a `Conv`, in whatever role) and puts one node of the primitive `onnx`
in its place, with transposes and reshapes around it where the axes lie otherwise; the simplifications then remove those that cancel. What the rule looked
at is no longer reached, unless another consumer needs it. Nothing is differentiated here, and only the default domain is used.

Sigmoid is not raised: onnxruntime 1.32 gives 0 from -18 on and is off by a sixth at -15, so that its logarithm and its gradient would be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...algebra import primitives as p
from ...algebra.dims import Dim, Shape, at_least, product, simplest
from ...algebra.errors import InconclusiveDim
from ...algebra.graph import Graph, Value, bind, current
from ...algebra.passes import FINAL, RULES
from ...algebra.passes.layout import strided_limit
from ...algebra.passes.matching import is_splat, negated, op, same, same_dims, splat
from ...algebra.passes.rewriting import Rewriter, Rule, rewrite, rules
from ...algebra.types import TensorType, TupleType, Type, f32, f64, i64

__all__ = ["RAISED", "RAISING", "raise_operators", "raised"]


def _np_raised(*xs: np.ndarray, op: str, attributes: Any, result: Type) -> np.ndarray:
    raise AssertionError(f"{op} is raised for emission: evaluate the graph before")


RAISED = p.Primitive("onnx", lambda *xs, op, attributes, result: result, _np_raised, (), "an ONNX operator")
"""A node that is one ONNX operator: `op` its type, `attributes` pairs of name and value, `result` its type."""


def raised(op: str, *xs: Value, result: Type, **attributes: Any) -> Value:
    """One ONNX operator of the default domain as a value."""
    given = tuple((k, v) for k, v in attributes.items() if v is not None)
    return bind(RAISED, *xs, op=op, attributes=given, result=result)


def is_raised(v: Value, name: str) -> bool:
    """Whether a value is a node of this ONNX operator."""
    return v.primitive is RAISED and v.params["op"] == name


def attribute(v: Value, name: str) -> Any:
    """An attribute of a raised node, None where it has none."""
    return dict(v.params["attributes"]).get(name)


# ---- axes ------------------------------------------------------------------------------------------------------------------------------


def _arranged(x: Value, *groups: Sequence[int]) -> Value:
    """`x` with each group of its axes as one axis, in this order; an empty group is an axis of size 1."""
    order = [a for group in groups for a in group]
    moved = p.transpose(x, perm=tuple(order))
    return p.reshape(moved, shape=tuple(product(x.shape[a] for a in group) for group in groups))


def _ordered(x: Value, have: Sequence[object], want: Sequence[object]) -> Value:
    """`x`, whose axes are labelled `have`, with its axes in the order `want`."""
    return p.transpose(x, perm=tuple(have.index(label) for label in want))


# ---- Conv: dot(window(x), w), forward and weight gradient alike ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sides:
    """The operands of a dot, one of which plays a part: its axes to those of the other, contracted and in step."""

    one: Value
    other: Value
    contract: dict[int, int]
    batch: dict[int, int]
    first: bool

    @property
    def free_other(self) -> list[int]:
        taken = {*self.contract.values(), *self.batch.values()}
        return [i for i in range(self.other.rank) if i not in taken]

    @property
    def free_one(self) -> list[int]:
        return [i for i in range(self.one.rank) if i not in self.contract and i not in self.batch]

    def labels(self) -> list[object]:
        """What each axis of the dot is: a pair in step, an axis of the one, an axis of the other."""
        free_one: list[object] = [("one", i) for i in self.free_one]
        free_other: list[object] = [("other", i) for i in self.free_other]
        in_step: list[object] = [("batch", i) for i in self.batch]
        return in_step + (free_one + free_other if self.first else free_other + free_one)


def _sides(v: Value) -> tuple[_Sides, _Sides]:
    x, y = v.operands
    (cx, cy), (bx, by) = v.params["contract"], v.params["batch"]
    return (
        _Sides(x, y, dict(zip(cx, cy, strict=True)), dict(zip(bx, by, strict=True)), True),
        _Sides(y, x, dict(zip(cy, cx, strict=True)), dict(zip(by, bx, strict=True)), False),
    )


def raise_conv(v: Value) -> Value | None:
    """dot(window(pad(x)), w) -> Conv

    A window has, per axis, places o and taps k, and reads `x[o * stride + k * dilation]`. Contracted over taps it is a convolution with w as its kernel; over
    places (the weight gradient) a convolution whose kernel is the cotangent, stride and dilation changed over.
    """
    if v.dtype is not f32:
        return None
    for sides in _sides(v):
        if op(sides.one) == "window":
            if _of_tiles(sides):
                return None
            found = _weight_gradient(v, sides) or _conv(v, sides)
            if found is not None:
                return found
    return None


MOST_PRODUCTS = 16  # taps of the last axis, each of which has a product of matrices of its own
FEW_PLACES = 32

Step = tuple[int, int, int]
"""Size, stride and dilation of a window along one axis."""


def _of_tiles(s: _Sides) -> bool:
    """Whether this is a weight gradient over windows that lie side by side: the axes of x need only be split, which nothing beats."""
    window = s.one.params
    tiles = (
        window["sizes"] == window["strides"] and all(d == 1 for d in window["dilations"]) and max(window["sizes"]) > 1
    )
    return tiles and any(a in s.contract for a in window["axes"])


def _weight_gradient(v: Value, s: _Sides) -> Value | None:
    """The weight gradient of a convolution, in the form that was fastest on onnxruntime 1.32.

    Products of matrices, one per tap of the last axis, group and sample, added up; where that axis has many taps, a convolution in which samples are the
    channels and channels a further spatial axis.
    """
    a, window = s.one, s.one.params
    x, spatial, n = a.operands[0], list(window["axes"]), len(window["axes"])
    taps = [x.rank + i for i in range(n)]
    others = [i for i in range(x.rank) if i not in spatial]
    samples, groups = [i for i in others if i in s.contract], [i for i in others if i in s.batch]
    channels, outs = [i for i in others if i not in s.contract and i not in s.batch], s.free_other
    if len(groups) < len(s.batch) or not samples or any(t in s.contract for t in taps):
        return None
    if any(i not in s.contract for i in spatial) or not all(isinstance(k, int) for k in window["sizes"]):
        return None
    labels: list[object] = [("batch", i) for i in groups]
    labels += [("other", i) for i in outs]
    labels += [("one", i) for i in (*channels, *taps)]
    if window["sizes"][-1] <= MOST_PRODUCTS:
        image = _arranged(x, samples, groups, channels, *([i] for i in spatial))
        ct = _arranged(
            s.other,
            [s.contract[i] for i in samples],
            [s.batch[i] for i in groups],
            outs,
            *([s.contract[i]] for i in spatial),
        )
        steps = tuple(zip(window["sizes"], window["strides"], window["dilations"], strict=True))
        if _few_places(ct):  # samples are one more axis to add up along
            image, ct, steps = _samples_as_axis(image), _samples_as_axis(ct), ((1, 1, 1), *steps)
        y = _taps_by_shifts(image, ct, steps)
    elif n <= 2 and not groups:
        ct = _arranged(s.other, [s.contract[i] for i in samples], outs, *([s.contract[i]] for i in spatial))
        y = _samples_as_channels(x, s, samples, channels, spatial, ct)
    else:
        return None
    split = (
        *(x.shape[i] for i in groups),
        *(s.other.shape[i] for i in outs),
        *(x.shape[i] for i in channels),
        *window["sizes"],
    )
    return _ordered(p.reshape(y, shape=split), labels, s.labels())


def _few_places(ct: Value) -> bool:
    """Whether each sample has so few places that its product of matrices costs less than to add it to the others."""
    count = product(ct.shape[3:])
    return isinstance(count, int) and count <= FEW_PLACES


def _samples_as_axis(x: Value) -> Value:
    """`[N, G, C, S..]` as `[1, G, C, N, S..]`."""
    moved = p.transpose(x, perm=(1, 2, 0, *range(3, x.rank)))
    return p.reshape(moved, shape=(1, *moved.shape))


def _taps_by_shifts(x: Value, ct: Value, steps: Sequence[Step]) -> Value:
    """The gradient `[G, O, C, K..]` of the weight from `x[N, G, C, S..]` and `ct[N, G, O, S'..]`, products of matrices for each tap of the last axis.

    Taps of the axes before the last are rows of x, gathered as further channels. Of the last axis, `x[place * stride + k * dilation]` is element
    `place + shift` of one of `stride` phases; with ct widened by zeros to a phase, ct is shifted instead of x, as one run of numbers, rows and all.
    """
    n, groups, channels, outs = *x.shape[:3], ct.shape[2]
    x, steps = _read_alone(x, ct.shape[3:], steps)
    *outer, (size, stride, dilation) = steps
    rows, reach = math.prod(k for k, _, _ in outer), (size - 1) * dilation // stride
    height, width = product(ct.shape[3:-1]), simplest(ct.shape[-1] + reach)
    length, each = simplest(height * width), simplest(n * groups)
    lines = p.reshape(x, shape=(n, simplest(groups * channels), product(x.shape[3:-1]), x.shape[-1]))
    if stride > 1:  # the last phases may reach beyond x
        lines = p.pad(lines, low=(0, 0, 0, 0), high=(0, 0, 0, stride - 1))
    places = _rows_read(x.shape[3:-1], ct.shape[3:-1], outer)
    stacks = {}
    for phase in dict.fromkeys(k * dilation % stride for k in range(size)):
        columns = _sliced(lines, 3, phase, width, stride)
        taken = columns if places is None else p.gather(columns, places, axis=2)
        stacks[phase] = p.reshape(taken, shape=(each, simplest(channels * rows), length))
    # before the first number of ct zeros: a row of them, or as many as a shift needs
    low = (0, 0, 1, 0) if outer else (0, 0, 0, reach)
    wide = p.reshape(ct, shape=(each, outs, height, ct.shape[-1]))
    wide = p.pad(wide, low=low, high=(0, 0, 0, reach)) if reach else wide
    run = p.transpose(p.reshape(wide, shape=(each, outs, product(wide.shape[2:]))), perm=(0, 2, 1))
    products = []
    for k in range(size):
        shift, phase = divmod(k * dilation, stride)
        shifted = _sliced(run, 1, simplest(run.shape[1] - length - shift), length, 1) if reach else run
        result = TensorType(x.dtype, (each, simplest(channels * rows), outs))
        products.append(raised("MatMul", stacks[phase], shifted, result=result))
    split = p.reshape(p.concat(*products, axis=2), shape=(n, groups, channels, rows, size, outs))
    return p.transpose(p.reduce_sum(split, axes=(0,)), perm=(0, 4, 1, 2, 3))


def _read_alone(x: Value, places: Shape, steps: Sequence[Step]) -> tuple[Value, list[Step]]:
    """Of the axes with one tap what is read alone, so that their stride is 1."""
    single = [size == 1 for size, _, _ in steps]
    limit, stride = list(x.shape), [1] * x.rank
    for i, (count, step) in enumerate(zip(places, steps, strict=True)):
        if single[i]:
            limit[3 + i], stride[3 + i] = strided_limit(0, count, step[1]), step[1]
    x = p.slice(x, start=(0,) * x.rank, limit=tuple(limit), stride=tuple(stride))
    return x, [(1, 1, 1) if one else step for one, step in zip(single, steps, strict=True)]


def _rows_read(size: Shape, places: Shape, steps: Sequence[Step]) -> Value | None:
    """For each tap and place of all axes but the last the row of x that it reads, of all rows in one line; None where they are just the rows."""
    taps = tuple(k for k, _, _ in steps)
    if all(k == 1 for k in taps):
        return None
    shape = (*taps, *places)
    lines: Value | None = None
    for i, (k, stride, dilation) in enumerate(steps):
        place = p.iota(places[i])
        place = p.broadcast(p.mul(place, p.number(stride, place)), shape=shape, axes=(len(taps) + i,))
        line = p.add(p.broadcast(p.literal(np.arange(k) * dilation), shape=shape, axes=(i,)), place)
        if lines is not None:
            line = p.add(p.mul(lines, p.broadcast(p.dim(size[i]), shape=shape, axes=())), line)
        lines = line
    return None if lines is None else p.reshape(lines, shape=(product(shape),))


def _sliced(x: Value, axis: int, start: Dim, count: Dim, stride: int) -> Value:
    """A slice that stays one: taken of what is padded once, not a pad of a slice of its own."""
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    if same_dims(shape, x.shape):
        return x
    bounds = [
        _shape((d,)) for d in (start, strided_limit(start, count, stride), axis, *((stride,) if stride > 1 else ()))
    ]
    return raised("Slice", x, *bounds, result=TensorType(x.dtype, shape))


def _samples_as_channels(
    x: Value, s: _Sides, samples: list[int], channels: list[int], spatial: list[int], ct: Value
) -> Value:
    """The gradient `[O, C, K..]` of the weight as a convolution of `x` as `[1, N, C, S..]` with `ct` as `[O, N, 1, S'..]`."""
    window, n = s.one.params, len(spatial)
    x, pads = _without_pads(x, spatial, 0.0)
    image = _arranged(x, [], samples, channels, *([i] for i in spatial))
    weight = _arranged(ct, [1], [0], [], *([2 + i] for i in range(n)))
    strides, dilations = (1, *window["dilations"]), (1, *window["strides"])
    padding = (0, *pads[:n], 0, *pads[n:])
    sizes = [
        p.window_count(simplest(d + lo + hi), k, st, di)
        for d, lo, hi, k, st, di in zip(
            image.shape[3:], pads[:n], pads[n:], weight.shape[3:], window["dilations"], window["strides"], strict=True
        )
    ]
    shape = (1, weight.shape[0], image.shape[2], *sizes)
    y = raised(
        "Conv", image, weight, result=TensorType(x.dtype, shape), strides=strides, dilations=dilations, pads=padding,
        group=1,
    )  # fmt: skip
    return p.slice(y, start=(0,) * y.rank, limit=(*shape[:3], *window["sizes"]))


def _conv(v: Value, s: _Sides) -> Value | None:
    a, window = s.one, s.one.params
    x = a.operands[0]
    spatial, free, kernel = list(window["axes"]), [], []
    strides, dilations = [], []
    for i, place in enumerate(spatial):
        tap = x.rank + i
        inside, outside = (tap, place) if tap in s.contract else (place, tap)
        if inside not in s.contract or outside in s.contract or outside in s.batch:
            return None
        kernel.append(s.contract[inside])
        free.append(outside)
        step = (window["strides"][i], window["dilations"][i])
        strides.append(step[0] if inside == tap else step[1])
        dilations.append(step[1] if inside == tap else step[0])
    if not 1 <= len(spatial) <= 3:
        return None
    x, pads = _without_pads(x, spatial, 0.0)
    others = [i for i in range(x.rank) if i not in spatial]
    channels, groups = [i for i in others if i in s.contract], [i for i in others if i in s.batch]
    if len(groups) < len(s.batch):
        return None
    rows = [i for i in others if i not in s.contract and i not in s.batch]
    outs = s.free_other
    group = product(x.shape[i] for i in groups)
    if not isinstance(group, int):
        return None
    image = _arranged(x, rows, [*groups, *channels], *([i] for i in spatial))
    weight = _arranged(
        s.other,
        [*(s.batch[i] for i in groups), *outs],
        [s.contract[i] for i in channels],
        *([i] for i in kernel),
    )
    sizes = [
        p.window_count(simplest(x.shape[i] + lo + hi), s.other.shape[k], st, di)
        for i, k, lo, hi, st, di in zip(
            spatial, kernel, pads[: len(spatial)], pads[len(spatial) :], strides, dilations, strict=True
        )
    ]
    shape = (image.shape[0], weight.shape[0], *sizes)
    y = raised(
        "Conv", image, weight, result=TensorType(v.dtype, shape), strides=tuple(strides), dilations=tuple(dilations),
        pads=tuple(pads), group=group,
    )  # fmt: skip
    wanted = [a.shape[i] for i in free]
    if not same_dims(sizes, wanted):  # windows that did not reach the end leave more taps than there are
        y = p.slice(y, start=(0,) * y.rank, limit=(*shape[:2], *wanted))
    split = (
        *(x.shape[i] for i in rows), *(x.shape[i] for i in groups), *(s.other.shape[i] for i in outs), *wanted,
    )  # fmt: skip
    labels: list[object] = [("one", i) for i in rows]
    labels += [("batch", i) for i in groups]
    labels += [("other", i) for i in outs]
    labels += [("one", i) for i in free]
    return _ordered(p.reshape(y, shape=split), labels, s.labels())


def _without_pads(x: Value, spatial: Sequence[int], value: float) -> tuple[Value, list[int]]:
    """What is padded, and its pads of the spatial axes, first all before and then all after; x and zeros where it is not."""
    none = [0] * (2 * len(spatial))
    if op(x) != "pad" or any(x.params["interior"]) or float(x.params["value"]) != value:
        return x, none
    low, high = x.params["low"], x.params["high"]
    if any(not isinstance(d, int) for d in (*low, *high)):
        return x, none
    if any(low[i] or high[i] for i in range(x.rank) if i not in spatial):
        return x, none
    return x.operands[0], [*(low[i] for i in spatial), *(high[i] for i in spatial)]


# ---- ConvTranspose: fold(dot(ct, w)), the input gradient -------------------------------------------------------------------------------


def raise_conv_transpose(v: Value) -> Value | None:
    """fold(dot(ct, w)) -> ConvTranspose"""
    z = v.operands[0]
    perm = tuple(range(z.rank))
    if op(z) == "transpose":
        perm, z = z.params["perm"], z.operands[0]
    if op(z) != "dot" or v.dtype is not f32 or not 1 <= len(v.params["axes"]) <= 3:
        return None
    for sides in _sides(z):
        labels = sides.labels()
        seen = [labels[a] for a in perm]
        places = [seen[a] for a in v.params["axes"]]
        taps = seen[v.rank :]
        if all(t[0] == "one" for t in places) and all(t[0] == "other" for t in taps):  # type: ignore[index]
            return _conv_transpose(v, sides, seen, [t[1] for t in places], [t[1] for t in taps])  # type: ignore[index]
    return None


def _conv_transpose(v: Value, s: _Sides, seen: list[object], places: list[int], taps: list[int]) -> Value | None:
    rows = [i for i in s.free_one if i not in places]
    outs = [i for i in s.free_other if i not in taps]
    groups, channels = list(s.batch), list(s.contract)
    group = product(s.one.shape[i] for i in groups)
    if not isinstance(group, int):
        return None
    image = _arranged(s.one, rows, [*groups, *channels], *([i] for i in places))
    weight = _arranged(
        s.other,
        [*(s.batch[i] for i in groups), *(s.contract[i] for i in channels)],
        outs,
        *([i] for i in taps),
    )
    strides, dilations = v.params["strides"], v.params["dilations"]
    natural = [
        simplest((s.one.shape[i] - 1) * st + (s.other.shape[k] - 1) * di + 1)
        for i, k, st, di in zip(places, taps, strides, dilations, strict=True)
    ]
    extents = v.params["extents"]
    slack = [simplest(e - n) for e, n in zip(extents, natural, strict=True)]
    more = [
        d if isinstance(d, int) and d < max(st, di) else 0 for d, st, di in zip(slack, strides, dilations, strict=True)
    ]
    made = [simplest(n + m) for n, m in zip(natural, more, strict=True)]
    shape = (image.shape[0], simplest(group * weight.shape[1]), *made)
    y = raised(
        "ConvTranspose", image, weight, result=TensorType(v.dtype, shape), strides=strides, dilations=dilations,
        pads=(0,) * (2 * len(taps)), output_padding=tuple(more), group=group,
    )  # fmt: skip
    missing = tuple(simplest(e - n) for e, n in zip(extents, made, strict=True))
    y = p.pad(y, low=(0,) * y.rank, high=(0, 0, *missing))
    split = (
        *(s.one.shape[i] for i in rows), *(s.one.shape[i] for i in groups), *(s.other.shape[i] for i in outs), *extents,
    )  # fmt: skip
    labels: list[object] = [("one", i) for i in rows]
    labels += [("batch", i) for i in groups]
    labels += [("other", i) for i in outs]
    labels += [("one", i) for i in places]
    return _ordered(p.reshape(y, shape=split), labels, seen[: v.rank])


def crop_conv_transpose(v: Value) -> Value | None:
    """ConvTranspose(ct, w)[low : size - high] -> ConvTranspose with pads"""
    inner = v.operands[0]
    if not is_raised(inner, "ConvTranspose") or any(k != 1 for k in v.params["stride"]):
        return None
    start, limit = v.params["start"], v.params["limit"]
    if any(start[i] != 0 or not same(limit[i], inner.shape[i]) for i in (0, 1)):
        return None
    before = list(start[2:])
    after = [simplest(d - m) for d, m in zip(inner.shape[2:], limit[2:], strict=True)]
    if not all(isinstance(d, int) for d in (*before, *after)):
        return None
    n = len(before)
    attributes = dict(inner.params["attributes"])
    low = [a + b for a, b in zip(attributes["pads"][:n], before, strict=True)]
    high = [a + b for a, b in zip(attributes["pads"][n:], after, strict=True)]
    extra = [max(0, o - h) for o, h in zip(attributes["output_padding"], high, strict=True)]
    high = [max(0, h - o) for o, h in zip(attributes["output_padding"], high, strict=True)]
    attributes |= {"pads": (*low, *high), "output_padding": tuple(extra)}
    return raised("ConvTranspose", *inner.operands, result=TensorType(v.dtype, v.shape), **attributes)


def add_bias(v: Value) -> Value | None:
    """Conv(x, w) + broadcast(b) -> Conv(x, w, b), Gemm(x, w) + broadcast(b) -> Gemm(x, w, b), where nothing else reads the former"""
    for y, b in (v.operands, v.operands[::-1]):
        if op(b) != "broadcast" or y.primitive is not RAISED or len(y.operands) != 2 or not _read_once(y):
            continue
        bias = b.operands[0]
        wanted = {"Conv": (1,), "Gemm": (1,)}.get(y.params["op"])
        if wanted == b.params["axes"]:
            return raised(y.params["op"], *y.operands, bias, result=y.type, **dict(y.params["attributes"]))
    return None


def _read_once(v: Value) -> bool:
    return _builder().read_once(v)


def _builder() -> Rewriter:
    builder = current()
    assert isinstance(builder, Rewriter)
    return builder


# ---- forms brought together -------------------------------------------------------------------------------------------------------------


def reshape_of_pad(v: Value) -> Value | None:
    """reshape(pad(x)) -> pad(reshape(x)), where axes before the padded ones change: a convolution by groups"""
    inner = v.operands[0]
    if op(inner) != "pad":
        return None
    low, high, interior = (inner.params[k] for k in ("low", "high", "interior"))
    first = next(
        (i for i in range(inner.rank) if not (same(low[i], 0) and same(high[i], 0) and interior[i] == 0)), None
    )
    if first is None:
        return None
    n = inner.rank - first
    if n > v.rank or not same_dims(inner.shape[first:], v.shape[v.rank - n :]):
        return None
    x, lead = inner.operands[0], v.shape[: v.rank - n]
    flat = p.reshape(x, shape=(*lead, *x.shape[first:]))
    zeros = (0,) * len(lead)
    return p.pad(
        flat, low=(*zeros, *low[first:]), high=(*zeros, *high[first:]), interior=(*zeros, *interior[first:]),
        value=inner.params["value"],
    )  # fmt: skip


def exponential_over_sum(v: Value) -> Value | None:
    """exp(s) * broadcast(a / sum(exp(s))) -> exp(LogSoftmax(x)) * broadcast(a), s = x - max(x): the cotangent of LogSoftmax"""
    for e, b in (v.operands, v.operands[::-1]):
        if op(e) != "exp" or op(b) != "broadcast" or v.dtype not in (f32, f64):
            continue
        found = _shifted(e.operands[0])
        if found is None or b.params["axes"] != p.kept_axes(v.rank, (found[1],)):
            continue
        scaled = b.operands[0]
        negative = op(scaled) == "neg"
        scaled = scaled.operands[0] if negative else scaled
        if (
            op(scaled) != "div"
            or _sum_along(p.broadcast(scaled.operands[1], shape=v.shape, axes=b.params["axes"]), found[1]) is not e
        ):
            continue
        y = p.exp(raised("LogSoftmax", found[0], result=v.type, axis=found[1]))
        product_ = p.mul(y, p.broadcast(scaled.operands[0], shape=v.shape, axes=b.params["axes"]))
        return p.neg(product_) if negative else product_
    return None


# ---- pooling ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pool:
    """A pooling's source as [rows, channels, spatial..], its attributes, and the shape of what comes out."""

    image: Value
    attributes: dict[str, Any]
    shape: Shape


def _pool(window: Value, fill: float) -> _Pool | None:
    """The pooling whose patches a window holds, with pads of a number that never matters."""
    params = window.params
    x, spatial = window.operands[0], list(params["axes"])
    n = len(spatial)
    if (
        not 1 <= n <= 3
        or spatial != list(range(x.rank - n, x.rank))
        or not all(isinstance(k, int) for k in params["sizes"])
    ):
        return None
    x, pads = _without_pads(x, spatial, fill)
    spans = [(k - 1) * d + 1 for k, d in zip(params["sizes"], params["dilations"], strict=True)]
    if any(pad >= span for pad, span in zip(pads, spans * 2, strict=True)):
        x, pads = window.operands[0], [0] * (2 * n)
    leading = list(range(x.rank - n))
    rows, channels = (leading[:1], leading[1:]) if len(leading) > 1 else ([], leading)
    image = _arranged(x, rows, channels, *([i] for i in spatial))
    attributes = {
        key: params[of] for key, of in (("kernel_shape", "sizes"), ("strides", "strides"), ("dilations", "dilations"))
    }
    attributes["pads"] = tuple(pads)
    return _Pool(image, attributes, (*image.shape[:2], *window.shape[x.rank - n : x.rank]))


def _over_taps(v: Value) -> bool:
    window = v.operands[0]
    return op(window) == "window" and v.params["axes"] == tuple(range(window.operands[0].rank, window.rank))


def _max_pool(window: Value) -> tuple[Value, Value, _Pool] | None:
    """The greatest of each patch and its place (row-major, over the whole source)."""
    pool = _pool(window, -math.inf)
    if pool is None or window.dtype not in (f32, f64):
        return None
    result = TupleType((TensorType(window.dtype, pool.shape), TensorType(i64, pool.shape)))
    both = raised("MaxPool", pool.image, result=result, **pool.attributes)
    return p.item(both, index=0), p.item(both, index=1), pool


def raise_max_pool(v: Value) -> Value | None:
    """reduce_max(window(pad(x, -inf))) -> MaxPool"""
    if not _over_taps(v) or v.params["ties"] != "first":
        return None
    found = _max_pool(v.operands[0])
    return None if found is None else p.reshape(found[0], shape=v.shape)


def raise_max_pool_gradient(v: Value) -> Value | None:
    """fold(select(the first place of the greatest, ct, 0)) -> MaxUnpool, or an addition at MaxPool's indices where windows overlap"""
    found = _chosen_first(v.operands[0])
    if found is None:
        return None
    window, y, ct = found
    params = ("axes", "strides", "dilations")
    if any(window.params[k] != v.params[k] for k in params) or not same_dims(v.shape, window.operands[0].shape):
        return None
    pooled = _max_pool(window)
    if pooled is None or p.reshape(pooled[0], shape=y.shape) is not y:
        return None
    _, indices, pool = pooled
    low = high = (0,) * v.rank
    if any(pool.attributes["pads"]):
        low, high = window.operands[0].params["low"], window.operands[0].params["high"]
    inner = tuple(simplest(d - a - b) for d, a, b in zip(v.shape, low, high, strict=True))
    incoming = p.reshape(ct, shape=pool.shape)
    apart = all(
        s >= (k - 1) * d + 1
        for s, k, d in zip(
            window.params["strides"], window.params["sizes"], window.params["dilations"], strict=True
        )
    )  # fmt: skip
    if apart and v.dtype is f32 and _unpools(pool):
        shape = pool.image.shape
        given = {k: pool.attributes[k] for k in ("kernel_shape", "strides", "pads")}
        places = raised("MaxUnpool", incoming, indices, _shape(shape), result=TensorType(v.dtype, shape), **given)
    else:
        count, total = product(pool.shape), product(pool.image.shape)
        flat, at = p.reshape(incoming, shape=(count,)), p.reshape(indices, shape=(count,))
        places = p.scatter_add(flat, at, axis=0, size=total)
    return p.pad(p.reshape(places, shape=inner), low=low, high=high)


def _unpools(pool: _Pool) -> bool:
    """Whether MaxUnpool's own size, `(n - 1) stride + kernel - pads`, is positive: onnxruntime asks for that, wherever another is given."""
    pads, n = pool.attributes["pads"], len(pool.attributes["kernel_shape"])
    axes = zip(
        pool.shape[-n:], *(pool.attributes[k] for k in ("strides", "kernel_shape")), pads[:n], pads[n:], strict=True
    )
    try:
        return all(at_least((count - 1) * stride + kernel - low - high, 1) for count, stride, kernel, low, high in axes)
    except InconclusiveDim:
        return False


def _shape(shape: Shape) -> Value:
    """A shape as an int64 vector."""
    if all(isinstance(d, int) for d in shape):
        return p.literal(np.asarray(shape, np.int64))
    return p.concat(*(p.reshape(p.dim(d), shape=(1,)) for d in shape), axis=0)


def _chosen_first(v: Value) -> tuple[Value, Value, Value] | None:
    """(window, y, ct) of the cotangent that `reduce_max` with `ties="first"` gives each patch: all to the first place that equals y."""
    passed = v.operands[0] if op(v) == "reshape" else v
    if op(passed) != "select" or not is_splat(passed.operands[2], 0):
        return None
    at, spread, _ = passed.operands
    n = passed.rank - 1
    along = tuple(range(n))
    if op(at) != "equal":
        return None
    ct = _repeated_last(spread, n)
    for iota, first in (at.operands, at.operands[::-1]):
        if op(iota) != "broadcast" or op(iota.operands[0]) != "iota" or iota.params["axes"] != (n,):
            continue
        if op(first) != "broadcast" or first.params["axes"] != along or op(first.operands[0]) != "argmax":
            continue
        score = first.operands[0].operands[0]
        if op(score) != "select" or not is_splat(score.operands[1], 1) or not is_splat(score.operands[2], 0):
            continue
        chosen = score.operands[0]
        chosen = chosen.operands[0] if op(chosen) == "reshape" else chosen
        if op(chosen) != "equal":
            continue
        for window, repeated in (chosen.operands, chosen.operands[::-1]):
            if op(window) != "window" or op(repeated) != "broadcast":
                continue
            y = _repeated_last(repeated, window.operands[0].rank)
            if y is not None and ct is not None:
                return window, y, ct
    return None


def _repeated_last(v: Value, rank: int) -> Value | None:
    """The value of this rank that is repeated along the last axes."""
    if op(v) != "broadcast" or any(a >= rank for a in v.params["axes"]):
        return None
    return p.broadcast(v.operands[0], shape=v.shape[:rank], axes=v.params["axes"])


def raise_average_pool(v: Value) -> Value | None:
    """reduce_sum(window(x)) -> AveragePool(x) * size, pads counted"""
    if not _over_taps(v) or v.dtype is not f32:
        return None
    pool = _pool(v.operands[0], 0.0)
    if pool is None:
        return None
    y = raised(
        "AveragePool", pool.image, result=TensorType(v.dtype, pool.shape), count_include_pad=1, **pool.attributes
    )
    size = math.prod(pool.attributes["kernel_shape"])
    return p.reshape(p.mul(y, p.number(size, y)), shape=v.shape)


# ---- products of matrices --------------------------------------------------------------------------------------------------------------


def raise_gemm(v: Value) -> Value | None:
    """dot of matrices, contracted over one axis or over a run of axes (the weight gradient of a layer on sequences) -> Gemm"""
    if v.dtype not in (f32, f64) or v.params["batch"] != ((), ()):
        return None
    x, y = v.operands
    cx, cy = v.params["contract"]
    fx, fy = p.free_axes(x.rank, cx, ()), p.free_axes(y.rank, cy, ())
    if not cx or len(fx) != 1 or len(fy) != 1:
        return None  # MatMul takes stacks of rows as they are
    if (*fx, *cx) == tuple(range(x.rank)):
        a, trans_a = _arranged(x, fx, cx), 0
    elif (*cx, *fx) == tuple(range(x.rank)):
        a, trans_a = _arranged(x, cx, fx), 1
    else:
        return None
    if (*cy, *fy) == tuple(range(y.rank)):
        b, trans_b = _arranged(y, cy, fy), 0
    elif (*fy, *cy) == tuple(range(y.rank)):
        b, trans_b = _arranged(y, fy, cy), 1
    else:
        return None
    shape = (product(x.shape[i] for i in fx), product(y.shape[i] for i in fy))
    z = raised("Gemm", a, b, result=TensorType(v.dtype, shape), transA=trans_a or None, transB=trans_b or None)
    return p.reshape(z, shape=v.shape)


# ---- activations -----------------------------------------------------------------------------------------------------------------------


def raise_relu(v: Value) -> Value | None:
    """select(x <= 0, 0, x) -> Relu(x)"""
    c, zero, x = v.operands
    if op(c) != "less_equal" or c.operands[0] is not x or not is_splat(c.operands[1], 0) or not is_splat(zero, 0):
        return None
    return raised("Relu", x, result=v.type) if v.dtype in (f32, f64) else None


def select_by_relu(v: Value) -> Value | None:
    """select(x <= 0, a, b) -> select(Relu(x) <= 0, a, b), where Relu(x) is there: only the Relu reads x then, and can be joined to what makes x"""
    c, a, b = v.operands
    if op(c) != "less_equal" or not is_splat(c.operands[1], 0) or is_raised(c.operands[0], "Relu"):
        return None
    x = c.operands[0]
    y = _builder().made(RAISED, (x,), {"op": "Relu", "attributes": (), "result": x.type})
    return None if y is None else p.select(p.less_equal(y, c.operands[1]), a, b)


def masked_by_product(v: Value) -> Value | None:
    """select(c, 0, ct) -> ct * not c, select(c, ct, 0) -> ct * c, where ct is finite if no sum or product overflows: a sixth of the time of Where

    Of cotangents alone: a model's own selection may be there to keep out an infinite input.
    """
    c, x, y = v.operands
    cotangent = v.origin.phase == "backward" and "recompute" not in v.origin.trail
    if v.dtype is not f32 or op(c) in ("broadcast", "literal") or not cotangent:
        return None
    memo = _builder().notes
    if is_splat(x, 0) and splat(y) is None and _tame(y, memo):
        return p.mul(y, p.cast(_negation(c), dtype=v.dtype))
    if is_splat(y, 0) and splat(x) is None and _tame(x, memo):
        return p.mul(x, p.cast(c, dtype=v.dtype))
    return None


def _negation(c: Value) -> Value:
    """`not c`; of `Relu(x) <= 0` its other form, as all is NaN where the Relu is."""
    if op(c) == "less_equal" and is_raised(c.operands[0], "Relu"):
        return p.less(c.operands[1], c.operands[0])
    return p.logical_not(c)


_TAME = frozenset(
    [
        "input",
        "add",
        "mul",
        "neg",
        "dot",
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "broadcast",
        "reshape",
        "transpose",
        "slice",
        "pad",
        "concat",
        "window",
        "fold",
        "select",
        "max",
        "min",
        "tanh",
        "erf",
        "sin",
        "cos",
        "abs",
        "sign",
        "floor",
        "round",
        "item",
        "iota",
        "dim",
        "gather",
        "scatter_add",
        "cumsum",
        "reverse",
    ]
)
"""Primitives that make finite numbers of finite ones, where no sum or product overflows."""
_TAME_OPERATORS = frozenset(
    [
        "Conv",
        "ConvTranspose",
        "Gemm",
        "MatMul",
        "MaxPool",
        "MaxUnpool",
        "AveragePool",
        "Relu",
        "Softmax",
        "LogSoftmax",
        "Slice",
    ]
)


def _tame(v: Value, memo: dict[int, bool]) -> bool:
    """Whether a value is finite wherever the inputs are, but for overflow."""
    stack = [v]
    while stack:
        node = stack[-1]
        if id(node) in memo:
            stack.pop()
            continue
        operands = _share_of_selected(node) or (node.operands if _tame_alone(node) else None)
        if operands is None:
            memo[id(node)] = False
            continue
        waiting = [o for o in operands if id(o) not in memo]
        if waiting:
            stack.extend(waiting)
            continue
        memo[id(node)] = all(memo[id(o)] for o in operands)
    return memo[id(v)]


def _share_of_selected(v: Value) -> tuple[Value, ...] | None:
    """(x, w) of `select(c, 0, x / sum(select(c, 0, w)))`, the share in a mean over what is selected: where all is 0, it divides by nothing."""
    if op(v) != "select" or not is_splat(v.operands[1], 0):
        return None
    c, _, share = v.operands
    share = share.operands[0] if op(share) == "broadcast" else share
    if op(share) != "div" or op(share.operands[1]) != "reduce_sum":
        return None
    counted = share.operands[1].operands[0]
    if op(counted) != "select" or counted.operands[0] is not c or not is_splat(counted.operands[1], 0):
        return None
    return share.operands[0], counted.operands[2]


def _tame_alone(v: Value) -> bool:
    match op(v):
        case "onnx":
            return v.params["op"] in _TAME_OPERATORS
        case "literal":
            value = v.params["value"]
            return value.size > 64 or not v.dtype.floating or bool(np.isfinite(value.array.astype(np.float64)).all())
        case "cast":
            return not v.dtype.floating or v.operands[0].dtype.bits <= v.dtype.bits or not v.operands[0].dtype.floating
        case "exp":
            return is_raised(v.operands[0], "LogSoftmax") or _not_positive(v.operands[0])
        case "sqrt":
            return _not_negative(v.operands[0])
        case "div":
            return _counts(v.operands[1]) or _positive(v.operands[1])
    return op(v) in _TAME or (isinstance(v.type, TensorType) and not v.dtype.floating)


def _inside(v: Value) -> Value:
    """The value that is repeated, or arranged otherwise."""
    while op(v) in ("broadcast", "reshape", "transpose", "cast") and v.dtype.floating:
        v = v.operands[0]
    return v


def _positive(v: Value, depth: int = 8) -> bool:
    """Whether a value is at least some positive number, by its form: a variance plus epsilon, its root, multiples of those, the sum in a sigmoid."""
    v, depth = _inside(v), depth - 1
    match op(v):
        case _ if depth == 0:
            return False
        case "sqrt":
            return _positive(v.operands[0], depth)
        case "mul":
            return all(_positive(o, depth) for o in dict.fromkeys(v.operands))
        case "add":
            x, y = v.operands
            if op(x) == op(y) == "exp":
                return _halves(x.operands[0], y.operands[0]) or _halves(y.operands[0], x.operands[0])
            return (_positive(x, depth) and _not_negative(y, depth)) or (
                _not_negative(x, depth) and _positive(y, depth)
            )
        case "dim":
            return True
    found = splat(v)
    return found is not None and bool(np.isfinite(found) and found > 0)


def _halves(a: Value, b: Value) -> bool:
    """Whether these are `min(x, 0)` and `-max(x, 0)`."""
    return (
        op(a) == "min" and op(b) == "neg" and op(b.operands[0]) == "max" and a.operands == b.operands[0].operands
        and is_splat(a.operands[1], 0)
    )  # fmt: skip


def _not_negative(v: Value, depth: int = 8) -> bool:
    """Whether a value is at least 0, by its form: a mean of squares, a running variance, a positive value."""
    v, depth = _inside(v), depth - 1
    match op(v):
        case _ if depth == 0:
            return False
        case "mul":
            return v.operands[0] is v.operands[1] or all(_not_negative(o, depth) for o in v.operands)
        case "reduce_sum":
            return _not_negative(v.operands[0], depth)
        case "div":
            return _counts(v.operands[1]) and all(_not_negative(o, depth) for o in v.operands)
        case "input":
            return v.params["role"] == "state"
        case "max":
            return any(is_splat(o, 0) for o in v.operands)
        case "abs" | "exp":
            return True
    return is_raised(v, "Relu") or is_splat(v, 0) or _positive(v, depth)


def _not_positive(v: Value) -> bool:
    """Whether a value is at most 0, by its form."""
    match op(v):
        case "min":
            return any(is_splat(o, 0) for o in v.operands)
        case "neg":
            return _not_negative(v.operands[0])
    return False


def _counts(v: Value) -> bool:
    """Whether a value is a literal that is not 0, or a number of elements."""
    while op(v) in ("broadcast", "cast"):
        v = v.operands[0]
    if op(v) == "dim":
        return True
    found = splat(v)
    return found is not None and found != 0


def _shifted(e: Value) -> tuple[Value, int] | None:
    """(x, axis) of `x - max(x)` along one axis."""
    if op(e) != "add":
        return None
    for x, b in (e.operands, e.operands[::-1]):
        if op(b) != "broadcast" or (top := negated(b.operands[0])) is None:
            continue
        if op(top) == "reduce_max" and top.operands[0] is x and len(top.params["axes"]) == 1:
            axis = top.params["axes"][0]
            if b.params["axes"] == p.kept_axes(x.rank, (axis,)):
                return x, axis
    return None


def _sum_along(b: Value, axis: int) -> Value | None:
    """The x of `sum(x)` along an axis, repeated along it again."""
    if op(b) != "broadcast" or b.params["axes"] != p.kept_axes(b.rank, (axis,)):
        return None
    total = b.operands[0]
    return total.operands[0] if op(total) == "reduce_sum" and total.params["axes"] == (axis,) else None


def raise_softmax(v: Value) -> Value | None:
    """e / sum(e) with e = exp(x - max(x)) -> Softmax(x)"""
    e, b = v.operands
    if op(e) != "exp" or v.dtype not in (f32, f64):
        return None
    found = _shifted(e.operands[0])
    if found is None or _sum_along(b, found[1]) is not e:
        return None
    return raised("Softmax", found[0], result=v.type, axis=found[1])


def raise_log_softmax(v: Value) -> Value | None:
    """s - log(sum(exp(s))) with s = x - max(x) -> LogSoftmax(x)"""
    if v.dtype not in (f32, f64):
        return None
    for shifted, b in (v.operands, v.operands[::-1]):
        found = _shifted(shifted)
        if found is None or op(b) != "broadcast" or b.params["axes"] != p.kept_axes(v.rank, (found[1],)):
            continue
        log = negated(b.operands[0])
        if log is None or op(log) != "log" or op(log.operands[0]) != "reduce_sum":
            continue
        total = log.operands[0]
        e = total.operands[0]
        if total.params["axes"] == (found[1],) and op(e) == "exp" and e.operands[0] is shifted:
            return raised("LogSoftmax", found[0], result=v.type, axis=found[1])
    return None


# ---- the pass --------------------------------------------------------------------------------------------------------------------------

RAISING: tuple[Rule, ...] = rules(
    ("dot", raise_conv),
    ("dot", raise_gemm),
    ("fold", raise_conv_transpose),
    ("fold", raise_max_pool_gradient),
    ("slice", crop_conv_transpose),
    ("add", add_bias),
    ("reduce_max", raise_max_pool),
    ("reduce_sum", raise_average_pool),
    ("select", raise_relu),
    ("div", raise_softmax),
    ("add", raise_log_softmax),
    ("mul", exponential_over_sum),
    ("reshape", reshape_of_pad),
)

MASKS: tuple[Rule, ...] = rules(("select", select_by_relu), ("select", masked_by_product))
"""Applied when all operators are raised, a Relu before its mask among them."""

_HIDING = ("dot_of_units", "fold_of_points", "reduce_units", "transpose_of_units", "window_of_points")
"""Simplifications that take the form away by which an operator is recognised: done after raising."""
_KEEPING: tuple[Rule, ...] = tuple(rule for rule in (*FINAL, *RULES) if rule.name not in _HIDING)


def raise_operators(graph: Graph) -> Graph:
    """The graph with recognised groups as single ONNX operators; simplified, and not to be differentiated any more."""
    settled = rewrite(graph, _KEEPING, "simplify")
    with_operators = rewrite(settled, (*RAISING, *_KEEPING), "raise")
    return rewrite(with_operators, (*MASKS, *FINAL, *RULES), "simplify")
