"""RNN, GRU and LSTM, each direction as one `scan` over time.

The products with the input do not depend on time and are one `dot` before the loop. In a step past a sequence's own length the states stay as they
are and the result is 0; so the reverse direction starts at each sequence's own end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.dims import Dim
from ....algebra.graph import Value
from ....algebra.types import TensorType, i64
from ..context import Unsupported, require_equal, require_same_shape
from ..registry import lowers
from .control import looped

Activation = Callable[[Value], Value]


# ---- activations -----------------------------------------------------------------------------------------------------------------------


def _elu(x: Value, alpha: float) -> Value:
    zero = p.number(0, x)
    low = p.less_equal(x, zero)
    return p.select(low, c.scale(c.expm1(p.select(low, x, zero)), alpha), x)


def _hard_sigmoid(x: Value, alpha: float, beta: float) -> Value:
    return c.clamp(c.plus(c.scale(x, alpha), beta), p.number(0, x), p.number(1, x))


def _leaky_relu(x: Value, alpha: float) -> Value:
    return p.select(p.less(x, p.number(0, x)), c.scale(x, alpha), x)


def _thresholded_relu(x: Value, alpha: float) -> Value:
    return p.select(p.less_equal(x, p.number(alpha, x)), p.number(0, x), x)


# name -> how many of alpha and beta it takes, their defaults, the function
_ACTIVATIONS: dict[str, tuple[tuple[float, ...], Callable[..., Value]]] = {
    "relu": ((), c.relu),
    "tanh": ((), p.tanh),
    "sigmoid": ((), c.sigmoid),
    "softsign": ((), lambda x: p.div(x, c.plus(p.abs(x), 1))),
    "softplus": ((), c.softplus),
    "elu": ((1.0,), _elu),
    "leakyrelu": ((0.01,), _leaky_relu),
    "thresholdedrelu": ((1.0,), _thresholded_relu),
    "affine": ((1.0, 0.0), lambda x, alpha, beta: c.plus(c.scale(x, alpha), beta)),
    "scaledtanh": ((1.0, 1.0), lambda x, alpha, beta: c.scale(p.tanh(c.scale(x, beta)), alpha)),
    "hardsigmoid": ((0.2, 0.5), _hard_sigmoid),
}


def activations_of(
    names: Sequence[str], default: Sequence[str], directions: int, alpha: Sequence[float], beta: Sequence[float]
) -> list[list[Activation]]:
    """The functions of each direction. `alpha` and `beta` list values for those functions that take them, in order."""
    chosen = list(names) or list(default) * directions
    if len(chosen) != len(default) * directions:
        raise Unsupported(f"{len(default) * directions} activations are required, found {list(names)}")
    alphas, betas = iter(alpha), iter(beta)
    made = [_activation(name, alphas, betas) for name in chosen]
    return [made[i : i + len(default)] for i in range(0, len(made), len(default))]


def _activation(name: str, alphas: Iterator[float], betas: Iterator[float]) -> Activation:
    if name.lower() not in _ACTIVATIONS:
        raise Unsupported(f"there is no activation {name!r}")
    defaults, function = _ACTIVATIONS[name.lower()]
    given = [next(values, default) for values, default in zip((alphas, betas), defaults, strict=False)]
    return lambda x: function(x, *given)


# ---- what the three share --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layer:
    """One recurrent node: input `x[time, batch, size]`, directions, and which steps count."""

    x: Value
    directions: tuple[bool, ...]  # reverse?
    hidden: int
    batch_first: bool
    lengths: Value | None
    clip: float

    @property
    def time(self) -> Dim:
        return self.x.shape[0]

    @property
    def batch(self) -> Dim:
        return self.x.shape[1]

    def initial(self, state: Value | None, direction: int) -> Value:
        """The first state of a direction, `[batch, hidden]`."""
        if state is None:
            return p.full(0, self.x.dtype, (self.batch, self.hidden))
        if self.batch_first:
            state = p.transpose(state, perm=(1, 0, 2))
        wanted = (len(self.directions), self.batch, self.hidden)
        require_same_shape(state.shape, wanted, "an initial state has a row for each direction, batch and hidden unit")
        return row(state, direction)

    def gates(self, weight: Value, bias: Value | None, direction: int) -> Value:
        """`x @ w^T + b` of all steps at once: `[time, batch, gates]`."""
        y = p.dot(self.x, row(weight, direction), contract=((2,), (1,)))
        return y if bias is None else p.add(y, c.at_last(bias, y.shape))

    def clipped(self, x: Value) -> Value:
        """`x` within the clip threshold; as it is where there is none."""
        return c.clamp(x, p.number(-self.clip, x), p.number(self.clip, x)) if self.clip else x

    def run(
        self, direction: int, states: Sequence[Value], gates: Value, consts: Sequence[Value], cell: Callable[..., Sequence[Value]]
    ) -> tuple[list[Value], Value]:  # fmt: skip
        """The last states, and the first state of every step `[time, batch, hidden]`; `cell(gates, states, consts)` gives new states."""
        names = ["h", "c"][: len(states)]
        masked = self.lengths is not None
        inputs = [(n, TensorType(s.dtype, s.shape)) for n, s in zip(names, states, strict=True)]
        inputs.append(("x", TensorType(gates.dtype, gates.shape[1:])))
        if masked:
            inputs.append(("t", TensorType(i64, ())))
        inputs += [(f"k{i}", TensorType(k.dtype, k.shape)) for i, k in enumerate(consts)]
        if self.lengths is not None:
            inputs.append(("length", TensorType(i64, self.lengths.shape)))

        def step(*given: Value) -> list[Value]:
            before, rest = given[: len(states)], given[len(states) :]
            if not masked:
                new = list(cell(rest[0], before, rest[1:]))
                return [*new, new[0]]
            new = list(cell(rest[0], before, rest[2:-1]))
            inside = p.less(p.broadcast(rest[1], shape=rest[-1].shape, axes=()), rest[-1])
            inside = p.broadcast(inside, shape=new[0].shape, axes=(0,))
            kept = [p.select(inside, n, b) for n, b in zip(new, before, strict=True)]
            return [*kept, p.select(inside, new[0], p.number(0, new[0]))]

        body = p.body_of(step, inputs, outputs=[*(f"next_{n}" for n in names), "y"], name="step")
        slices = [gates, p.iota(self.time)] if masked else [gates]
        outer = [*consts, self.lengths] if self.lengths is not None else list(consts)
        *last, ys = looped(states, slices, outer, body, length=self.time, reverse=self.directions[direction])
        return last, ys

    def result(self, found: Sequence[tuple[list[Value], Value]]) -> tuple[Value, ...]:
        """Y, Y_h (and Y_c) from each direction's last states and steps, in the layout that is asked for."""
        y = p.concat(*(c.unsqueeze(ys, (1,)) for _, ys in found), axis=1)
        last = [
            p.concat(*(c.unsqueeze(states[i], (0,)) for states, _ in found), axis=0) for i in range(len(found[0][0]))
        ]
        if self.batch_first:
            return (p.transpose(y, perm=(2, 0, 1, 3)), *(p.transpose(s, perm=(1, 0, 2)) for s in last))
        return (y, *last)


def row(x: Value, i: int) -> Value:
    """`x[i]`."""
    if isinstance(x.shape[0], int) and x.shape[0] == 1:
        return p.reshape(x, shape=x.shape[1:])
    piece = c.split(x, (i, 1), 0)[1]
    return p.reshape(piece, shape=x.shape[1:])


def directions_of(direction: str) -> tuple[bool, ...]:
    """Whether each direction runs backward."""
    ways = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}.get(direction)
    if ways is None:
        raise Unsupported(f"direction {direction!r} is not forward, reverse or bidirectional")
    return ways


def _layer(
    x: Value, w: Value, r: Value, lengths: Value | None, gates: int, hidden: int | None, direction: str, layout: int, clip: float | None
) -> Layer:  # fmt: skip
    ways = directions_of(direction)
    size = r.shape[2]
    if not isinstance(size, int) or (hidden is not None and hidden != size):
        raise Unsupported(f"the recurrence weight {r.type!r} does not fit hidden_size {hidden}")
    require_same_shape(
        r.shape, (len(ways), gates * size, size), "a recurrence weight has a block for each direction and gate"
    )
    x = p.transpose(x, perm=(1, 0, 2)) if layout else x
    require_same_shape(
        w.shape, (len(ways), gates * size, x.shape[2]), "an input weight has a block for each direction and gate"
    )
    if lengths is not None:
        require_equal(lengths.shape[0], x.shape[1], "a sequence length for each batch")
        lengths = p.cast(lengths, dtype=i64)
    return Layer(x, ways, size, bool(layout), lengths, clip or 0.0)


def bias_of(b: Value | None, direction: int, gates: int, hidden: int) -> tuple[Value | None, Value | None]:
    """The biases of the input and of the recurrence, `[gates * hidden]` each."""
    if b is None:
        return None, None
    first, second = c.split(row(b, direction), (gates * hidden, gates * hidden), 0)
    return first, second


def _recur(h: Value, r: Value) -> Value:
    """`h @ r^T`."""
    return p.dot(h, r, contract=((1,), (1,)))


# ---- the operators ---------------------------------------------------------------------------------------------------------------------


@lowers("RNN")
def rnn(
    x: Value, w: Value, r: Value, b: Value | None = None, sequence_lens: Value | None = None, initial_h: Value | None = None, *,
    activation_alpha: tuple[float, ...] = (), activation_beta: tuple[float, ...] = (), activations: tuple[str, ...] = (),
    clip: float | None = None, direction: str = "forward", hidden_size: int | None = None, layout: int = 0, output_sequence: int = 0,
) -> tuple[Value, ...]:  # fmt: skip
    """h' = f(x w^T + h r^T + wb + rb)"""
    layer = _layer(x, w, r, sequence_lens, 1, hidden_size, direction, layout, clip)
    functions = activations_of(activations, ("Tanh",), len(layer.directions), activation_alpha, activation_beta)
    found = []
    for d, (f,) in enumerate(functions):
        wb, rb = bias_of(b, d, 1, layer.hidden)
        gates = layer.gates(w, wb if wb is None or rb is None else p.add(wb, rb), d)

        def cell(g: Value, states: Sequence[Value], consts: Sequence[Value], f: Activation = f) -> list[Value]:
            return [f(layer.clipped(p.add(g, _recur(states[0], consts[0]))))]

        found.append(layer.run(d, [layer.initial(initial_h, d)], gates, [row(r, d)], cell))
    return layer.result(found)


@lowers("GRU")
def gru(
    x: Value, w: Value, r: Value, b: Value | None = None, sequence_lens: Value | None = None, initial_h: Value | None = None, *,
    activation_alpha: tuple[float, ...] = (), activation_beta: tuple[float, ...] = (), activations: tuple[str, ...] = (),
    clip: float | None = None, direction: str = "forward", hidden_size: int | None = None, layout: int = 0, linear_before_reset: int = 0,
    output_sequence: int = 0,
) -> tuple[Value, ...]:  # fmt: skip
    """h' = (1 - z) n + z h, with z and r the sigmoid gates, n = tanh(x + (r h) R^T + b), or r (h R^T + b) where linear_before_reset"""
    layer = _layer(x, w, r, sequence_lens, 3, hidden_size, direction, layout, clip)
    functions = activations_of(
        activations, ("Sigmoid", "Tanh"), len(layer.directions), activation_alpha, activation_beta
    )
    size, found = layer.hidden, []
    for d, (f, g) in enumerate(functions):
        wb, rb = bias_of(b, d, 3, size)
        if wb is not None and rb is not None:
            zr, n = c.split(rb, (2 * size, size), 0)
            inner = p.concat(zr, p.number(0, n), axis=0) if linear_before_reset else rb
            wb = p.add(wb, inner)
            consts = [row(r, d), n]
        else:
            consts = [row(r, d)]
        gates = layer.gates(w, wb, d)

        def cell(
            x: Value, states: Sequence[Value], consts: Sequence[Value], f: Activation = f, g: Activation = g
        ) -> list[Value]:
            (h,), recurrence = states, consts[0]
            x_zr, x_n = c.split(x, (2 * size, size), 1)
            r_zr, r_n = c.split(recurrence, (2 * size, size), 0)
            z, reset = c.split(f(layer.clipped(p.add(x_zr, _recur(h, r_zr)))), (size, size), 1)
            if linear_before_reset:
                inner = _recur(h, r_n)
                if len(consts) > 1:
                    inner = p.add(inner, c.at_last(consts[1], inner.shape))
                candidate = p.mul(reset, inner)
            else:
                candidate = _recur(p.mul(reset, h), r_n)
            n = g(layer.clipped(p.add(x_n, candidate)))
            return [p.add(p.mul(c.sub(p.number(1, z), z), n), p.mul(z, h))]

        used = consts if linear_before_reset else consts[:1]
        found.append(layer.run(d, [layer.initial(initial_h, d)], gates, used, cell))
    return layer.result(found)


@lowers("LSTM")
def lstm(
    x: Value, w: Value, r: Value, b: Value | None = None, sequence_lens: Value | None = None, initial_h: Value | None = None,
    initial_c: Value | None = None, p_: Value | None = None, *, activation_alpha: tuple[float, ...] = (),
    activation_beta: tuple[float, ...] = (), activations: tuple[str, ...] = (), clip: float | None = None, direction: str = "forward",
    hidden_size: int | None = None, input_forget: int = 0, layout: int = 0, output_sequence: int = 0,
) -> tuple[Value, ...]:  # fmt: skip
    """c' = f c + i g, h' = o tanh(c'), with gates i, o, f, g of x w^T + h r^T + wb + rb and the peepholes of c"""
    layer = _layer(x, w, r, sequence_lens, 4, hidden_size, direction, layout, clip)
    functions = activations_of(
        activations, ("Sigmoid", "Tanh", "Tanh"), len(layer.directions), activation_alpha, activation_beta
    )

    def gates(d: int) -> Value:
        wb, rb = bias_of(b, d, 4, layer.hidden)
        return layer.gates(w, wb if wb is None or rb is None else p.add(wb, rb), d)

    return lstm_layer(
        layer, functions, gates, lambda d: [row(r, d)], lambda h, consts: _recur(h, consts[0]), initial_h, initial_c, p_, input_forget
    )  # fmt: skip


def lstm_layer(
    layer: Layer, functions: Sequence[Sequence[Activation]], gates: Callable[[int], Value], weights: Callable[[int], list[Value]],
    recur: Callable[[Value, Sequence[Value]], Value], initial_h: Value | None, initial_c: Value | None, peephole: Value | None,
    input_forget: int,
) -> tuple[Value, ...]:  # fmt: skip
    """An LSTM from what the input gives to the gates of each direction, the recurrence's weights, and how a state meets them."""
    size, found = layer.hidden, []
    for d, (f, g, h) in enumerate(functions):
        recurrent = weights(d)
        count = len(recurrent)

        def cell(
            x: Value, states: Sequence[Value], consts: Sequence[Value], count: int = count, f: Activation = f, g: Activation = g,
            act: Activation = h,
        ) -> list[Value]:  # fmt: skip
            hidden, memory = states
            i, o, forget, new = c.split(p.add(x, recur(hidden, consts[:count])), (size,) * 4, 1)
            peeps = [c.at_last(v, i.shape) for k in consts[count:] for v in c.split(k, (size,) * 3, 0)]
            if peeps:
                i, forget = p.add(i, p.mul(peeps[0], memory)), p.add(forget, p.mul(peeps[2], memory))
            i = f(layer.clipped(i))
            forget = c.sub(p.number(1, i), i) if input_forget else f(layer.clipped(forget))
            memory = p.add(p.mul(forget, memory), p.mul(i, g(layer.clipped(new))))
            if peeps:
                o = p.add(o, p.mul(peeps[1], memory))
            return [p.mul(f(layer.clipped(o)), act(memory)), memory]

        states = [layer.initial(initial_h, d), layer.initial(initial_c, d)]
        consts = [*recurrent, *([] if peephole is None else [row(peephole, d)])]
        found.append(layer.run(d, states, gates(d), consts, cell))
    return layer.result(found)
