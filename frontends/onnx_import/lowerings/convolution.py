"""Convolutions, and what they share with pooling: pads, strides and windows.

The form of a convolution is fixed, so that it can be recognised again. With spatial axes S, kernel axes K and output axes O,

    Conv, group 1:   pad x[N, C, S..] -> window over S: [N, C, O.., K..] -> dot with w[M, C, K..] over C and K..: [N, O.., M] -> transpose: [N, M, O..]
    Conv, group G:   pad x -> reshape [N, G, C/G, S..] -> window: [N, G, C/G, O.., K..]
                     -> dot with w as [G, M/G, C/G, K..], batch G, over C/G and K..: [G, N, O.., M/G] -> transpose [N, G, M/G, O..] -> reshape [N, M, O..]
    ConvTranspose, group 1:  dot x[N, C, S..] with w[C, M, K..] over C: [N, S.., M, K..] -> transpose [N, M, S.., K..]
                     -> fold: [N, M, E..] -> slice off the pads
    ConvTranspose, group G:  reshape x to [N, G, C/G, S..] -> dot with w as [G, C/G, M/G, K..], batch G, over C/G: [G, N, S.., M/G, K..]
                     -> transpose [N, G, M/G, S.., K..] -> fold: [N, G, M/G, E..] -> reshape [N, M, E..] -> slice off the pads

The pad is left out where nothing is padded, the slice where nothing is cut. A bias is added last, broadcast from its channel axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.dims import Dim, Shape, ceildiv, dmax, floordiv, is_zero, simplest
from ....algebra.graph import Value
from ..context import Unsupported, require_divides, require_equal
from ..registry import lowers

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Windows:
    """How windows lie on the spatial axes: sizes, strides, dilations, and pads before and after. One entry per spatial axis."""

    sizes: Shape
    strides: Ints
    dilations: Ints
    low: Shape
    high: Shape

    @property
    def rank(self) -> int:
        return len(self.sizes)

    def reach(self, i: int) -> Dim:
        """The elements from the first to the last that a window touches."""
        return simplest((self.sizes[i] - 1) * self.dilations[i] + 1)


def windows(spatial: Shape, sizes: Shape, strides: Ints | None, dilations: Ints | None, pads: Ints | None,
            auto_pad: str) -> Windows:  # fmt: skip
    """The windows that ONNX's attributes ask for.

    SAME_UPPER and SAME_LOWER pad so that there are `ceil(size / stride)` windows, the odd element after or before; VALID pads nothing.
    """
    rank = len(spatial)
    strides, dilations = strides or (1,) * rank, dilations or (1,) * rank
    for name, given in (("kernel_shape", sizes), ("strides", strides), ("dilations", dilations)):
        if len(given) != rank:
            raise Unsupported(f"{name} {list(given)} needs one entry for each of {rank} spatial axes")
        if any(isinstance(n, int) and n < 1 for n in given):
            raise Unsupported(f"{name} {list(given)} must be positive")
    if pads and len(pads) != 2 * rank:
        raise Unsupported(f"pads {list(pads)} needs two entries for each of {rank} spatial axes")
    plain = Windows(sizes, strides, dilations, (0,) * rank, (0,) * rank)
    match auto_pad:
        case "NOTSET" | "":
            pads = pads or (0,) * (2 * rank)
            return Windows(sizes, strides, dilations, pads[:rank], pads[rank:])
        case "VALID":
            return plain
        case "SAME_UPPER" | "SAME_LOWER":
            totals = [same_padding(d, plain.reach(i), strides[i]) for i, d in enumerate(spatial)]
            small = tuple(floordiv(t, 2) for t in totals)
            large = tuple(simplest(t - s) for t, s in zip(totals, small, strict=True))
            low, high = (small, large) if auto_pad == "SAME_UPPER" else (large, small)
            return Windows(sizes, strides, dilations, low, high)
    raise Unsupported(f"auto_pad={auto_pad!r} is none of NOTSET, SAME_UPPER, SAME_LOWER, VALID")


def same_padding(size: Dim, reach: Dim, stride: int) -> Dim:
    """The padding with which windows start at every stride of an axis: `max((ceil(size / stride) - 1) stride + reach - size, 0)`."""
    total = simplest((ceildiv(size, stride) - 1) * stride + reach - size)
    if not isinstance(reach, int) or reach < stride:
        return 0 if isinstance(reach, int) and reach == 1 else dmax(total, 0)
    return total  # the last window starts at most stride - 1 before the end, so nothing is negative


def padded(x: Value, low: Sequence[Dim], high: Sequence[Dim], value: float = 0) -> Value:
    """`x` with its last axes padded; negative amounts cut off. An amount of unknown sign is padded where positive, and cut off where not."""
    before = (0,) * (x.rank - len(low))
    low, high = (*before, *low), (*before, *high)
    more_low, more_high = (tuple(d if is_zero(d) else dmax(d, 0) for d in amounts) for amounts in (low, high))
    if not all(map(is_zero, (*more_low, *more_high))):
        x = p.pad(x, low=more_low, high=more_high, value=value)
    start = tuple(simplest(m - d) for m, d in zip(more_low, low, strict=True))
    cut = tuple(simplest(m - d) for m, d in zip(more_high, high, strict=True))
    if all(map(is_zero, (*start, *cut))):
        return x
    return p.slice(x, start=start, limit=tuple(simplest(d - n) for d, n in zip(x.shape, cut, strict=True)))


def windowed(x: Value, w: Windows) -> Value:
    """The windows over the last axes of x."""
    axes = tuple(range(x.rank - w.rank, x.rank))
    return p.window(x, axes=axes, sizes=w.sizes, strides=w.strides, dilations=w.dilations)


def spatial_rank(x: Value, op: str) -> int:
    if x.rank < 3:
        raise Unsupported(f"{op} needs a batch, channels and a spatial axis, found {x.type!r}")
    return x.rank - 2


def by_group(v: Value, axis: int, group: int, what: str) -> Value:
    """`v` with an axis as `[group, size / group]`."""
    each = require_divides(v.shape[axis], group, f"group {group} divides {what}")
    return p.reshape(v, shape=(*v.shape[:axis], group, each, *v.shape[axis + 1 :]))


def with_bias(y: Value, bias: Value | None) -> Value:
    """`y` plus one number per channel."""
    if bias is None:
        return y
    require_equal(bias.shape[0], y.shape[1], "one bias per output channel")
    return p.add(y, p.broadcast(bias, shape=y.shape, axes=(1,)))


def convolve(x: Value, w: Value, at: Windows, group: int = 1) -> Value:
    """`y[n, m, o] = sum over c, k of x[n, c, o stride + k dilation - low] w[m, c, k]`, in the form that the module describes."""
    n = at.rank
    channels = require_divides(x.shape[1], group, f"group {group} divides the input channels")
    require_equal(channels, w.shape[1], "the weight's input channels are those of a group")
    x = padded(x, at.low, at.high)
    if group > 1:
        x = by_group(x, 1, group, "the input channels")
    return weighted_patches(windowed(x, at), w, n, group)


def weighted_patches(patches: Value, w: Value, n: int, group: int) -> Value:
    """Patches `[N, C, O.., K..]` (or `[N, G, C/G, O.., K..]`, where there are groups) weighted by `w[M, C/G, K..]`: `[N, M, O..]`."""
    if group == 1:
        y = p.dot(patches, w, contract=((1, *range(2 + n, 2 + 2 * n)), tuple(range(1, 2 + n))))
        return p.transpose(y, perm=(0, n + 1, *range(1, n + 1)))
    y = p.dot(
        patches,
        by_group(w, 0, group, "the output channels"),
        contract=((2, *range(3 + n, 3 + 2 * n)), tuple(range(2, 3 + n))),
        batch=((1,), (0,)),
    )
    y = p.transpose(y, perm=(1, 0, n + 2, *range(2, n + 2)))
    return p.reshape(y, shape=(y.shape[0], w.shape[0], *y.shape[3:]))


def convolve_transposed(x: Value, w: Value, strides: Ints, dilations: Ints, extents: Shape, group: int = 1) -> Value:
    """The transpose of `convolve` in x, before its pads are cut off: windows weighted by x, added up on axes of the sizes `extents`."""
    n = len(strides)
    spatial = range(2, 2 + n)
    if group == 1:
        y = p.dot(x, w, contract=((1,), (0,)))  # [N, S.., M, K..]
        y = p.transpose(y, perm=(0, n + 1, *range(1, n + 1), *range(n + 2, 2 * n + 2)))
        return p.fold(y, axes=tuple(spatial), strides=strides, dilations=dilations, extents=extents)
    y = p.dot(by_group(x, 1, group, "the input channels"), by_group(w, 0, group, "the input channels"),
              contract=((2,), (1,)), batch=((1,), (0,)))  # [G, N, S.., M/G, K..]  # fmt: skip
    y = p.transpose(y, perm=(1, 0, n + 2, *range(2, n + 2), *range(n + 3, 2 * n + 3)))
    y = p.fold(y, axes=tuple(a + 1 for a in spatial), strides=strides, dilations=dilations, extents=extents)
    return c.flatten_axes(y, 1, 3)


def kernel_of(w: Value, kernel_shape: Ints | None) -> Shape:
    """The kernel's sizes: the weight's, which the attribute must repeat."""
    sizes = w.shape[2:]
    if kernel_shape:
        if len(kernel_shape) != len(sizes):
            raise Unsupported(f"kernel_shape {list(kernel_shape)} does not fit the weight {w.type!r}")
        return tuple(
            require_equal(d, k, "kernel_shape is the weight's") for d, k in zip(sizes, kernel_shape, strict=True)
        )
    return sizes


@lowers("Conv", since=1)
def conv(x: Value, w: Value, b: Value | None = None, *, auto_pad: str = "NOTSET", dilations: Ints | None = None, group: int = 1,
         kernel_shape: Ints | None = None, pads: Ints | None = None, strides: Ints | None = None) -> Value:  # fmt: skip
    """sum over channels and taps of x[n, c, o stride + k dilation - pad] w[m, c, k], + b[m]"""
    spatial_rank(x, "Conv")
    at = windows(x.shape[2:], kernel_of(w, kernel_shape), strides, dilations, pads, auto_pad)
    return with_bias(convolve(x, w, at, group), b)


@lowers("ConvTranspose", since=1)
def conv_transpose(x: Value, w: Value, b: Value | None = None, *, auto_pad: str = "NOTSET", dilations: Ints | None = None,
                   group: int = 1, kernel_shape: Ints | None = None, output_padding: Ints | None = None,
                   output_shape: Ints | None = None, pads: Ints | None = None, strides: Ints | None = None) -> Value:  # fmt: skip
    """the transpose of Conv in its input: windows w[c, m, k] weighted by x[n, c, s], added at s stride + k dilation - pad, + b[m]"""
    n = spatial_rank(x, "ConvTranspose")
    require_equal(x.shape[1], w.shape[0], "the weight's input channels are those of x")
    plain = windows(x.shape[2:], kernel_of(w, kernel_shape), strides, dilations, pads, "NOTSET")
    extra = output_padding or (0,) * n
    reach = tuple(
        simplest((d - 1) * s + plain.reach(i)) for i, (d, s) in enumerate(zip(x.shape[2:], plain.strides, strict=True))
    )
    if output_shape:
        wanted: Shape | None = tuple(output_shape[-n:])
    elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        wanted = tuple(simplest(d * s) for d, s in zip(x.shape[2:], plain.strides, strict=True))
    else:
        wanted = None
    low, high = plain.low, plain.high
    if auto_pad == "VALID":
        low = high = (0,) * n
    if wanted is not None:
        totals = [simplest(r + e - o) for r, e, o in zip(reach, extra, wanted, strict=True)]
        # the odd element is cut at the end for SAME_UPPER, else at the start; where windows fall short, zeros follow at the end
        halves = [(floordiv(cut, 2), cut) for cut in (dmax(t, 0) for t in totals)]
        low = tuple(half if auto_pad == "SAME_UPPER" else simplest(cut - half) for half, cut in halves)
        high = tuple(simplest(t - n) for t, n in zip(totals, low, strict=True))
    inside = tuple(
        min(e, s - 1) for e, s in zip(extra, plain.strides, strict=True)
    )  # windows leave at most stride - 1 free at the end
    extents = tuple(simplest(r + i) for r, i in zip(reach, inside, strict=True))
    y = convolve_transposed(x, w, plain.strides, plain.dilations, extents, group)
    cut_high = tuple(simplest(e - i - h) for e, i, h in zip(extra, inside, high, strict=True))
    return with_bias(padded(y, tuple(simplest(-n) for n in low), cut_high), b)
