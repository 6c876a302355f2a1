"""What is known of a value before anything runs: an array of numbers, or of symbolic dims.

Shape arithmetic (`Shape`, `Gather`, `Concat`, `Div`, ... as exporters write it) is lowered like all else; here it is
evaluated, with dims in place of numbers, by the primitives' own numpy meanings on object arrays. So any operation an
exporter finds for its sizes is covered, and sizes never reach the graph as data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import sympy

from .dims import Dim, at_least, dmax, dmin, equal, floordiv, is_static, simplest
from .errors import InconclusiveDim
from .graph import Value
from .types import TensorType

__all__ = ["Facts"]

LARGEST = 1 << 20
LARGEST_SYMBOLIC = 1 << 12
LARGEST_DENOMINATOR = 1 << 12


class Facts:
    """A memory of what is known, each value looked at once.

    >>> from pullback.algebra import primitives as p
    >>> from pullback.algebra.dims import dim
    >>> from pullback.algebra.graph import building
    >>> with building():
    ...     twice = p.mul(p.dim(dim("N")), p.literal(np.int64(2)))
    >>> Facts()(twice)
    array(2*N, dtype=object)
    """

    def __init__(self) -> None:
        self._memory: dict[int, np.ndarray | None] = {}
        self._held: list[Value] = []  # ids stay valid while their values live

    def __call__(self, value: Value) -> np.ndarray | None:
        """The array, of the value's own dtype or of objects where dims are inside; None where it depends on data."""
        stack = [value]
        while stack:
            node = stack[-1]
            if id(node) in self._memory:
                stack.pop()
                continue
            if not _small(node):
                self._remember(node, None)
                continue
            waiting = [o for o in node.operands if id(o) not in self._memory]
            if waiting:
                stack.extend(waiting)
                continue
            operands = [self._memory[id(o)] for o in node.operands]
            self._remember(node, None if any(o is None for o in operands) else _compute(node, operands))
        return self._memory[id(value)]

    def tell(self, node: Value, array: np.ndarray) -> None:
        """Take a node, an input say, as known to be this array."""
        self._remember(node, array)

    def forget(self, values: Iterable[Value]) -> None:
        """Look at these again when they are next asked for, as more has been told."""
        for v in values:
            self._memory.pop(id(v), None)

    def _remember(self, node: Value, array: np.ndarray | None) -> None:
        self._memory[id(node)] = array
        self._held.append(node)


def _small(node: Value) -> bool:
    if node.primitive.name == "input" or not isinstance(node.type, TensorType) or not is_static(node.shape):
        return False
    if node.primitive.name == "literal":
        return True
    size = 1
    for d in node.shape:
        size *= int(d)
    return size <= LARGEST


def _compute(node: Value, operands: list[Any]) -> np.ndarray | None:
    name, params = node.primitive.name, node.params
    if name == "dim":
        value = params["value"]
        return np.asarray(value, np.int64) if isinstance(value, int) else _objects(value)
    symbolic = any(o.dtype == object for o in operands)
    if not all(_ints_only(v) for v in params.values()):
        return None
    if not symbolic:
        with np.errstate(all="ignore"):
            try:
                return np.asarray(node.primitive.numpy(*operands, **params))
            except IndexError:  # an index out of range: an error when the model runs, if it gets there
                return None
    if sum(o.size for o in operands) > LARGEST_SYMBOLIC:
        return None
    try:
        result = _symbolically(node, operands)
    except (InconclusiveDim, _Unknown):
        return None
    return _settled(result, node.dtype.numpy)


class _Unknown(Exception):
    """No rule for this primitive on dims."""


def _ints_only(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_ints_only, value))
    return not isinstance(value, sympy.Expr)


def _objects(value: object) -> np.ndarray:
    out = np.empty((), object)
    out[()] = value
    return out


def _settled(result: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Plain numbers where no symbol is left."""
    flat = [_plain(x) for x in result.ravel()]
    if not any(isinstance(x, sympy.Expr) for x in flat):
        return np.array(flat, dtype=dtype).reshape(result.shape)
    out = np.empty(len(flat), object)
    out[:] = flat
    return out.reshape(result.shape)


def _plain(x: Any) -> Any:
    if isinstance(x, sympy.Expr):
        x = sympy.expand(x)
        if x.is_Integer:
            return int(x)
        if x.is_Rational:
            return float(x)
    return x


def _exact(x: Any) -> Any:
    """A number as sympy computes with it: floats become the rationals that they are."""
    if isinstance(x, sympy.Expr | bool | np.bool_):
        return x
    if isinstance(x, int | np.integer):
        return int(x)
    value = float(x)
    if not np.isfinite(value):
        raise _Unknown
    exact = sympy.Rational(value)
    if exact.q > LARGEST_DENOMINATOR:  # 0.1 as a float: a product with it is rounded when the model runs
        raise _Unknown
    return exact


def _each(node: Value, f: Callable[..., Any], arrays: list[np.ndarray]) -> np.ndarray:
    """`f` of each element; where all are plain numbers, what the primitive computes."""
    out = np.empty(arrays[0].shape, object)
    for at in np.ndindex(*arrays[0].shape):
        elements = [a[at] for a in arrays]
        if any(isinstance(x, sympy.Expr) for x in elements):
            out[at] = f(*map(_exact, elements))
        else:
            plain = [np.asarray(x, o.dtype.numpy) for x, o in zip(elements, node.operands, strict=True)]
            out[at] = node.primitive.numpy(*plain, **node.params).item()
    return out


def _floor(x: Any) -> Dim:
    if isinstance(x, int):
        return x
    numerator, denominator = sympy.together(x).as_numer_denom()
    return floordiv(simplest(numerator), simplest(denominator))


def _whole(x: Any) -> Any:
    """`x` where it is a whole number."""
    if isinstance(x, int) or sympy.together(x).as_numer_denom()[1] == 1:
        return x
    raise _Unknown


def _to_dtype(x: Any, dtype: Any) -> Any:
    if dtype.name == "bool":
        if isinstance(x, bool):
            return x
        return not equal(simplest(x), 0)
    if dtype.floating or isinstance(x, bool):
        return x if dtype.floating else int(x)
    if isinstance(x, int) or sympy.together(x).as_numer_denom()[1] == 1:
        return x
    if not isinstance(x, int) and not at_least(_floor(x), 0):
        return -_floor(-x)
    return _floor(x)


def _reduced(f: Callable[[Any, Any], Any]) -> Callable[..., np.ndarray]:
    def apply(x: np.ndarray, *, axes: tuple[int, ...], **_: Any) -> np.ndarray:
        kept = [i for i in range(x.ndim) if i not in axes]
        lined = x.transpose(*kept, *axes).reshape(*(x.shape[i] for i in kept), -1)
        out = np.empty(lined.shape[:-1], object)
        for at in np.ndindex(*out.shape):
            total: Any = None
            for item in lined[at]:
                total = _exact(item) if total is None else f(total, _exact(item))
            if total is None:
                raise _Unknown
            out[at] = total
        return out

    return apply


def _sign(x: Any) -> int:
    if equal(simplest(x), 0):
        return 0
    return 1 if at_least(simplest(x), 0) else -1


def _divide(x: Any, y: Any, floating: bool) -> Any:
    if floating:
        return sympy.sympify(x) / y
    x, y = simplest(x), simplest(y)
    if not at_least(y, 1):
        raise _Unknown
    return floordiv(x, y) if at_least(x, 0) else -floordiv(-x, y)


def _remainder(x: Any, y: Any, floating: bool) -> Any:
    if floating and at_least(x, 0) and not at_least(0, y):
        return x - y * _floor(sympy.sympify(x) / y)
    return x - y * _divide(x, y, False)


def _symbolically(node: Value, xs: list[np.ndarray]) -> np.ndarray:
    params = node.params
    match node.primitive.name:
        case (
            "broadcast" | "reshape" | "transpose" | "slice" | "reverse" | "concat" | "stop_gradient" | "pad" | "window"
        ):
            return np.asarray(node.primitive.numpy(*(x.astype(object) for x in xs), **params))
        case "gather" if xs[1].dtype != object:
            return np.asarray(node.primitive.numpy(xs[0], xs[1], **params))
        case "add":
            return _each(node, lambda x, y: x + y, xs)
        case "mul":
            return _each(node, lambda x, y: x * y, xs)
        case "neg":
            return _each(node, lambda x: -x, xs)
        case "div":
            return _each(node, lambda x, y: _divide(x, y, node.dtype.floating), xs)
        case "max":
            return _each(node, lambda x, y: dmax(simplest(x), simplest(y)), xs)
        case "min":
            return _each(node, lambda x, y: dmin(simplest(x), simplest(y)), xs)
        case "floor":
            return _each(node, _floor, xs)
        case "rem":
            return _each(node, lambda x, y: _remainder(x, y, node.dtype.floating), xs)
        case "abs":
            return _each(node, lambda x: x if at_least(simplest(x), 0) else -x, xs)
        case "sign":
            return _each(node, _sign, xs)
        case "pow" if all(
            isinstance(e, int | np.integer | float | np.floating) and np.isfinite(e) and float(e) == int(e) >= 0
            for e in xs[1].ravel()
        ):
            return _each(node, lambda x, y: x ** int(y), xs)
        case "cast":
            return _each(node, lambda x: _to_dtype(x, params["dtype"]), xs)
        case "equal":
            return _each(node, lambda x, y: equal(simplest(x), simplest(y)), xs)
        case "less":
            return _each(node, lambda x, y: not at_least(simplest(x), simplest(y)), xs)
        case "less_equal":
            return _each(node, lambda x, y: at_least(simplest(y), simplest(x)), xs)
        case "select" if xs[0].dtype != object:
            return np.where(xs[0], xs[1].astype(object), xs[2].astype(object))
        case "reduce_sum":
            return _reduced(lambda x, y: x + y)(*xs, **params)
        case "reduce_prod":
            return _reduced(lambda x, y: x * y)(*xs, **params)
        case "reduce_max":
            return _reduced(lambda x, y: dmax(simplest(x), simplest(y)))(*xs, **params)
        case "reduce_min":
            return _reduced(lambda x, y: dmin(simplest(x), simplest(y)))(*xs, **params)
        case "round" | "is_nan":
            return _each(node, _whole if node.primitive.name == "round" else lambda _: False, xs)
        case "scatter_add" if xs[1].dtype != object:
            return np.asarray(node.primitive.numpy(xs[0].astype(object), xs[1], **params))
        case "cumsum":
            axis, turned = params["axis"], params["reverse"]
            sums = np.cumsum(np.flip(xs[0].astype(object), axis) if turned else xs[0].astype(object), axis=axis)
            return np.flip(sums, axis) if turned else sums
    raise _Unknown
