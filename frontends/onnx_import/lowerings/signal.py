"""Fourier transforms, and the windows and filters that go with them.

A transform is a `dot` with cosines and sines. They are written as arithmetic on `iota` in double, the product of place and frequency taken modulo
the length in integers, so that the angle is exact; where the length is known they are a constant matrix.
"""

from __future__ import annotations

import math

import numpy as np

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.dims import Dim, floordiv, is_static, simplest
from ....algebra.evaluate import evaluate
from ....algebra.graph import Graph, Value
from ....algebra.types import DType, f64
from ..context import Unsupported, require_equal
from ..registry import Gradient, Static, lowers
from ..tensors import dtype_of_onnx
from .activation import axis_of
from .convolution import padded
from .resize import as_double


def one_number(array: np.ndarray) -> Dim:
    """The single entry of an operand, as a size."""
    entry = array.reshape(-1)[0]
    return simplest(entry if hasattr(entry, "free_symbols") else int(entry))


def settled(x: Value, dtype: DType) -> Value:
    """A constant where all sizes are known, else the arithmetic; in a dtype."""
    if not is_static(x.shape):
        return p.cast(x, dtype=dtype)
    return p.literal(evaluate(Graph((), {"x": x}))["x"].astype(dtype.numpy))


def angles(rows: Dim, columns: Dim, length: Dim) -> Value:
    """`2 pi (row * column mod length) / length` in double."""
    shape = (rows, columns)
    i, j = p.broadcast(p.iota(rows), shape=shape, axes=(0,)), p.broadcast(p.iota(columns), shape=shape, axes=(1,))
    turns = p.rem(p.mul(i, j), p.broadcast(p.dim(length), shape=shape, axes=()))
    share = p.div(p.cast(turns, dtype=f64), p.broadcast(as_double(length), shape=shape, axes=()))
    return c.scale(share, 2 * math.pi)


def pair(first: Value, second: Value, axis: int) -> Value:
    """Two tensors one behind the other on a new axis."""
    return p.concat(c.unsqueeze(first, (axis,)), c.unsqueeze(second, (axis,)), axis=axis)


def fourier(length: Dim, frequencies: Dim, parts: int, inverse: bool, dtype: DType) -> Value:
    """`[length, parts, frequencies, 2]`: what real (and imaginary) elements give to the real and imaginary part of each frequency."""
    angle = angles(length, frequencies, length)
    cos, sin = p.cos(angle), p.sin(angle)
    if inverse:
        n = p.broadcast(as_double(length), shape=cos.shape, axes=())
        cos, sin = p.div(cos, n), p.neg(p.div(sin, n))
    matrix = c.unsqueeze(pair(cos, p.neg(sin), 2), (1,))
    if parts == 2:
        matrix = p.concat(matrix, c.unsqueeze(pair(sin, cos, 2), (1,)), axis=1)
    return settled(matrix, dtype)


def inverse_real(length: Dim, bins: Dim, dtype: DType) -> Value:
    """`[bins, 2, length]`: what the first half of a spectrum gives to a real signal; all but the ends stand for two frequencies."""
    angle = angles(bins, length, length)
    place = p.broadcast(p.iota(bins), shape=angle.shape, axes=(0,))
    ends = p.logical_or(
        p.equal(place, p.number(0, place)),
        p.equal(p.add(place, place), p.broadcast(p.dim(length), shape=place.shape, axes=())),
    )
    n = p.broadcast(as_double(length), shape=angle.shape, axes=())
    weight = p.div(p.select(ends, p.number(1, angle), p.number(2, angle)), n)
    return settled(pair(p.mul(weight, p.cos(angle)), p.neg(p.mul(weight, p.sin(angle))), 1), dtype)


def to_length(x: Value, axis: int, length: Dim) -> Value:
    """`x` cut off, or filled with zeros, along an axis."""
    missing = simplest(length - x.shape[axis])
    return padded(x, (0,) * x.rank, tuple(missing if a == axis else 0 for a in range(x.rank)))


def transformed(x: Value, axis: int, length: Dim | None, inverse: bool, onesided: bool) -> Value:
    """The DFT of `x[..., 1 or 2]` along an axis."""
    axis, last = axis_of(axis, x.rank), x.rank - 1
    parts = x.shape[last]
    if axis == last or parts not in (1, 2):
        raise Unsupported(
            f"axis {axis} of {x.type!r}: the last axis holds the real and imaginary parts, and is no signal axis"
        )
    size = x.shape[axis]
    moved = (*range(axis), last - 1, *range(axis, last - 1))
    if onesided and inverse:
        if parts != 2:
            raise Unsupported("a onesided inverse takes a complex spectrum")
        n = simplest(2 * (size - 1)) if length is None else length
        bins = simplest(floordiv(n, 2) + 1)
        y = p.dot(to_length(x, axis, bins), inverse_real(n, bins, x.dtype), contract=((axis, last), (0, 1)))
        return c.unsqueeze(p.transpose(y, perm=moved), (last,))
    if onesided and parts != 1:
        raise Unsupported("a onesided transform takes a real signal")
    n = size if length is None else length
    frequencies = simplest(floordiv(n, 2) + 1) if onesided else n
    matrix = fourier(n, frequencies, int(parts), inverse, x.dtype)
    y = p.dot(to_length(x, axis, n), matrix, contract=((axis, last), (0, 1)))
    return p.transpose(y, perm=(*moved, last))


@lowers("DFT", since=17)
def dft_17(
    input: Value, dft_length: Static | None = None, *, axis: int = 1, inverse: int = 0, onesided: int = 0
) -> Value:
    """sum over n of x[n] e ** (-2 pi i k n / N); of the inverse with + and divided by N"""
    length = None if dft_length is None else one_number(dft_length)
    return transformed(input, axis, length, bool(inverse), bool(onesided))


@lowers("DFT", since=20)
def dft(
    input: Value, dft_length: Static | None = None, axis: Static | None = None, *, inverse: int = 0, onesided: int = 0
) -> Value:
    """sum over n of x[n] e ** (-2 pi i k n / N); of the inverse with + and divided by N"""
    length = None if dft_length is None else one_number(dft_length)
    at = -2 if axis is None else one_number(axis)
    assert isinstance(at, int)
    return transformed(input, at, length, bool(inverse), bool(onesided))


@lowers("STFT", since=17)
def stft(
    signal: Value,
    frame_step: Static,
    window: Value | None = None,
    frame_length: Static | None = None,
    *,
    onesided: int = 1,
) -> Value:
    """the DFT of window[n] x[frame step + n], frame by frame"""
    if signal.rank == 2:
        signal = c.unsqueeze(signal, (2,))
    parts, step = signal.shape[2], one_number(frame_step)
    if parts not in (1, 2) or not isinstance(step, int):
        raise Unsupported(f"signal {signal.type!r} needs 1 or 2 parts, and frame_step {step} must be a number")
    if frame_length is not None:
        length = one_number(frame_length)
    else:
        length = signal.shape[1] if window is None else window.shape[0]
    frames = p.window(signal, axes=(1,), sizes=(length,), strides=(step,), dilations=(1,))  # [B, F, parts, length]
    if window is not None:
        require_equal(window.shape[0], length, "the window is as long as a frame")
        frames = p.mul(frames, p.broadcast(window, shape=frames.shape, axes=(3,)))
    real = onesided and parts == 1
    frequencies = simplest(floordiv(length, 2) + 1) if real else length
    return p.dot(frames, fourier(length, frequencies, int(parts), False, signal.dtype), contract=((3, 2), (0, 1)))


# ---- windows -----------------------------------------------------------------------------------------------------------------------------

CONSTANT = "depends on sizes only"


def cosine_window(size: np.ndarray, periodic: int, code: int, *weights: float) -> Value:
    """`sum over i of weights[i] cos(2 pi i n / N)`, N the size, or one less where the window is symmetric."""
    n = one_number(size)
    period = simplest(n if periodic else n - 1)
    place = p.cast(p.iota(n), dtype=f64)
    span = p.broadcast(as_double(period), shape=place.shape, axes=())
    share = p.div(place, p.max(span, p.number(1, span)))
    total = p.number(weights[0], place)
    for i, weight in enumerate(weights[1:], start=1):
        total = p.add(total, c.scale(p.cos(c.scale(share, 2 * math.pi * i)), weight))
    return settled(total, dtype_of_onnx(code))


@lowers("HannWindow", since=17, gradient=Gradient.INDEX, reason=CONSTANT)
def hann_window(size: Static, *, output_datatype: int = 1, periodic: int = 1) -> Value:
    """0.5 - 0.5 cos(2 pi n / N)"""
    return cosine_window(size, periodic, output_datatype, 0.5, -0.5)


@lowers("HammingWindow", since=17, gradient=Gradient.INDEX, reason=CONSTANT)
def hamming_window(size: Static, *, output_datatype: int = 1, periodic: int = 1) -> Value:
    """25 / 46 - 21 / 46 cos(2 pi n / N)"""
    return cosine_window(size, periodic, output_datatype, 25 / 46, -21 / 46)


@lowers("BlackmanWindow", since=17, gradient=Gradient.INDEX, reason=CONSTANT)
def blackman_window(size: Static, *, output_datatype: int = 1, periodic: int = 1) -> Value:
    """0.42 - 0.5 cos(2 pi n / N) + 0.08 cos(4 pi n / N)"""
    return cosine_window(size, periodic, output_datatype, 0.42, -0.5, 0.08)


@lowers("MelWeightMatrix", since=17, gradient=Gradient.INDEX, reason=CONSTANT)
def mel_weight_matrix(num_mel_bins: Static, dft_length: Static, sample_rate: Static, lower_edge_hertz: Static, upper_edge_hertz: Static, *,
                      output_datatype: int = 1) -> Value:  # fmt: skip
    """triangles over the bins of a spectrum, evenly spread on the mel scale 2595 log10(1 + f / 700)"""
    bins, length, rate = (one_number(v) for v in (num_mel_bins, dft_length, sample_rate))
    if not all(isinstance(v, int) for v in (bins, length, rate)):
        raise Unsupported("the sizes must be numbers; bind them with dims")
    low, high = (2595 * math.log10(1 + float(v.reshape(-1)[0]) / 700) for v in (lower_edge_hertz, upper_edge_hertz))
    mel = low + np.arange(int(bins) + 2) * ((high - low) / (int(bins) + 2))
    edges = ((int(length) + 1) * (700 * (10 ** (mel / 2595) - 1)) // int(rate)).astype(np.int64)
    places = np.arange(int(length) // 2 + 1)[:, None]
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    with np.errstate(divide="ignore", invalid="ignore"):
        rising = np.where(centre == left, 1.0, (places - left) / (centre - left))
        falling = (right - places) / (right - centre)
    matrix = np.where((places >= left) & (places <= centre), rising, 0.0)
    matrix = np.where((places >= centre) & (places < right), falling, matrix)
    return p.literal(matrix.astype(dtype_of_onnx(output_datatype).numpy))
