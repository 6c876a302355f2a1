"""Graphs as text, one node a line, printed and parsed back.

    graph linear(x: f32[N, 4], @parameter w: f32[4, 3]) {
      y: f32[N, 3] = dot x, w contract=[[1],[0]]
      return y=y
    }

The grammar (whitespace and newlines only separate; `#` starts a comment):

    graph     = "graph" name "(" [input ("," input)*] ")" "{" where* node* [also] return "}"
    input     = [role] name ":" type                        role = "@" word ["(" name ")"]
    where     = "where" dim ("==" | ">=" | "%") dim ["== 0"] [string]
    node      = label ":" type "=" primitive [label ("," label)*] (parameter "=" value)*
    also      = "also" name "=" label ("," name "=" label)*
    return    = "return" [[role] name "=" label ("," [role] name "=" label)*]
    type      = dtype "[" dims "]" | "(" type ("," type)* ")"
    label     = name ["." digits]
    name      = identifier ("." word)* | quoted

A name that is no dotted identifier (`fc.weight`), or that ends in a number, is written in double quotes; a symbolic dim
whose name is no identifier, in single quotes. So `h.0` is a node numbered inside `h`, and `"h.0"` a tensor of that name. What a type already
states (the shape of a `broadcast`) and parameters at their defaults are left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sympy

from . import dims
from . import primitives as p
from .dims import Dim, Shape
from .errors import PullbackError
from .graph import Constant, Constraint, Graph, Role, Value, bind, building
from .types import DTYPES, DType, TensorType, TupleType, Type, dtype_of

__all__ = ["TextError", "constants", "labels", "parse", "show"]

LARGEST_LITERAL = 64
WIDTH = 120
KEYWORDS = frozenset({"also", "graph", "return", "where"})
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)*", re.ASCII)


class TextError(PullbackError, ValueError):
    """Text that is not a graph, with the line."""


# ---- labels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Label:
    """A name, and the number of the node inside what it serves (None for the node of that name itself)."""

    base: str
    number: int | None = None

    @property
    def plain(self) -> str:
        return self.base if self.number is None else f"{self.base}.{self.number}"

    @property
    def text(self) -> str:
        return _name(self.base) if self.number is None else f"{_name(self.base)}.{self.number}"


def _label(graph: Graph) -> dict[Value, _Label]:
    given: dict[Value, str] = {}  # what a node could be called, whether or not it is the first with that name
    taken: set[str] = set()
    found: dict[Value, _Label] = {}
    nodes = set(graph.nodes)
    named = [(v.params["name"], v) for v in graph.inputs]
    for name, node in (*named, *graph.outputs.items(), *graph.tensors.items()):
        if node not in nodes:
            continue
        given.setdefault(node, name)
        if node not in found and name not in taken:
            found[node] = _Label(name)
            taken.add(name)
    served: dict[Value, Value] = {}
    for node in graph.nodes:
        for operand in node.operands:
            served.setdefault(operand, node)
    bases: dict[Value, str] = {}
    for node in reversed(graph.nodes):
        bases[node] = given[node] if node in given else bases[served[node]]
    numbers: dict[str, int] = {}
    for node in graph.nodes:
        if node in found:
            continue
        base = bases[node]
        number = numbers.get(base, 0)
        while f"{base}.{number}" in taken:
            number += 1
        numbers[base] = number + 1
        found[node] = _Label(base, number)
    return found


def labels(graph: Graph) -> dict[Value, str]:
    """A readable name for every node, each unique.

    A node that is an input, an output or one of `graph.tensors` has its name; any other is numbered inside what it
    serves: the label of its first consumer.

    >>> graph = parse("graph g(x: f32[2]) { a: f32[2] = sin x b.7: f32[2] = cos a b: f32[2] = exp b.7 return b=b }")
    >>> list(labels(graph).values())
    ['x', 'a', 'b.0', 'b']
    """
    found = _label(graph)
    return {node: found[node].plain for node in graph.nodes}


# ---- parameters that are left out ------------------------------------------------------------------------------------

_STATED: dict[str, Callable[[TensorType, Mapping[str, Any]], dict[str, Any]]] = {
    "broadcast": lambda t, _: {"shape": t.shape},
    "reshape": lambda t, _: {"shape": t.shape},
    "cast": lambda t, _: {"dtype": t.dtype},
    "bit_cast": lambda t, _: {"dtype": t.dtype},
    "nonzero": lambda t, _: {"size": t.shape[0]},
    "iota": lambda t, _: {"size": t.shape[0]},
    "scatter_add": lambda t, params: {"size": t.shape[params["axis"]]},
    "fold": lambda t, params: {"extents": tuple(t.shape[a] for a in params["axes"])},
}

_DEFAULT: dict[str, Callable[[int, Mapping[str, Any]], dict[str, Any]]] = {
    "dot": lambda *_: {"batch": ((), ())},
    "reduce_max": lambda *_: {"ties": "split"},
    "reduce_min": lambda *_: {"ties": "split"},
    "cumsum": lambda *_: {"reverse": False},
    "argsort": lambda *_: {"descending": False},
    "slice": lambda rank, _: {"stride": (1,) * rank},
    "pad": lambda rank, _: {"interior": (0,) * rank, "value": 0},
    "window": lambda _, params: {"strides": (1,) * len(params["axes"]), "dilations": (1,) * len(params["axes"])},
    "fold": lambda _, params: {"strides": (1,) * len(params["axes"]), "dilations": (1,) * len(params["axes"])},
}


def _left_out(primitive: str, type_: Type, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that need not be written, with what they then are."""
    out: dict[str, Any] = {}
    if primitive in _DEFAULT:
        out |= _DEFAULT[primitive](type_.rank if isinstance(type_, TensorType) else 0, params)
    if primitive in _STATED and isinstance(type_, TensorType):
        out |= _STATED[primitive](type_, params)
    return out


def _same(a: object, b: object) -> bool:
    """Equality in which 0, 0.0, -0.0 and False differ."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, sympy.Expr) or isinstance(b, sympy.Expr):
        return bool(a == b)
    return type(a) is type(b) and bool(a == b) and (not isinstance(a, float) or repr(a) == repr(b))


# ---- printing --------------------------------------------------------------------------------------------------------


def _name(name: str) -> str:
    plain = _DOTTED.fullmatch(name) and name not in KEYWORDS and not name.rpartition(".")[2].isdigit()
    return name if plain else json.dumps(name)


def _role(role: str, parameter: str | None, default: str) -> str:
    if parameter is not None:
        return f"@{role}({_name(parameter)}) "
    return "" if role == default else f"@{role} "


def show(graph: Graph, *, origins: bool = False) -> str:
    """The graph as text that `parse` reads back; `origins` adds where each node comes from as a comment.

    >>> from pullback.algebra.types import f32, tensor
    >>> with building():
    ...     x, w = p.input("x", tensor(f32, (dims.dim("N"), 4))), p.input("w", tensor(f32, (4, 3)), "parameter")
    ...     y = p.tanh(p.dot(x, w, contract=((1,), (0,))))
    >>> print(show(Graph((x, w), {"y": y}, "layer")))
    graph layer(x: f32[N, 4], @parameter w: f32[4, 3]) {
      y.0: f32[N, 3] = dot x, w contract=[[1],[0]]
      y: f32[N, 3] = tanh y.0
      return y=y
    }
    """
    return "\n".join(_lines(graph, origins))


def _lines(graph: Graph, origins: bool = False) -> Iterator[str]:
    named = _label(graph)
    entries = [_input(v, graph.roles.get(v.params["name"])) for v in graph.inputs]
    yield from _wrapped(f"graph {_name(graph.name)}(", entries, ") {", "  ")
    for symbol in _may_be_empty(graph):
        yield f"  where {dims.show(symbol)} >= 0"
    for c in graph.constraints:
        left, right = (f"({text})" if "%" in text else text for text in (dims.show(c.left), dims.show(c.right)))
        relation = f"% {right} == 0" if c.relation == "divides" else f"{c.relation} {right}"
        yield f"  where {left} {relation}" + (f" {json.dumps(c.reason)}" if c.reason else "")
    for node in graph.nodes:
        if node.primitive.name != "input":
            where = f"  # {node.origin}" if origins and str(node.origin) else ""
            yield f"  {named[node].text}: {node.type!r} = {_expression(node, named)}{where}"
    also = [
        f"{_name(k)}={named[v].text}"
        for k, v in graph.tensors.items()
        if v in named and k not in graph.outputs and named[v] != _Label(k)
    ]
    if also:
        yield from _wrapped("  also ", also, "", "    ")
    results = []
    for name, node in graph.outputs.items():
        role = graph.roles.get(name, Role("output"))
        results.append(f"{_role(role.role, role.parameter, 'output')}{_name(name)}={named[node].text}")
    yield from _wrapped("  return ", results, "", "    ") if results else iter(["  return"])
    yield "}"


def _wrapped(start: str, entries: list[str], end: str, indent: str) -> Iterator[str]:
    line = start + ", ".join(entries) + end
    if len(line) <= WIDTH or len(entries) < 2:
        yield line
        return
    yield start.rstrip()
    for i, entry in enumerate(entries):
        yield f"{indent}{entry}" + ("," if i + 1 < len(entries) else "")
    if end:
        yield end.strip()


def _input(value: Value, role: Role | None) -> str:
    parameter = role.parameter if role else None
    return f"{_role(value.params['role'], parameter, 'input')}{_name(value.params['name'])}: {value.type!r}"


def _may_be_empty(graph: Graph) -> list[sympy.Symbol]:
    """Symbols that may be 0, by name: the text must say so, as a symbol is positive otherwise."""
    found = set()
    for node in graph.nodes:
        types = node.type.items if isinstance(node.type, TupleType) else (node.type,)
        for d in (*(d for t in types for d in t.shape), *(d for v in node.params.values() for d in dims.walk(v))):
            found |= {s for s in dims.symbols(d) if not s.is_positive}
    found |= {s for c in graph.constraints for d in (c.left, c.right) for s in dims.symbols(d) if not s.is_positive}
    return sorted(found, key=lambda s: s.name)


def _expression(node: Value, named: Mapping[Value, _Label]) -> str:
    parts = [node.primitive.name]
    if node.operands:
        parts.append(", ".join(named[o].text for o in node.operands))
    if node.primitive.name == "literal":
        return f"literal {_constant(node.params['value'], named[node].plain)}"
    silent = _left_out(node.primitive.name, node.type, node.params)
    for key, value in node.params.items():
        if key not in silent or not _same(value, silent[key]):
            parts.append(f"{key}={_value(value, f'{named[node].plain}:{key}')}")
    return " ".join(parts)


def _value(value: Any, key: str) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case None:
            return "none"
        case int() | float():
            return repr(value)
        case np.integer() | np.floating():
            return repr(value.item())
        case str():
            return json.dumps(value)
        case sympy.Expr():
            return dims.show(value)
        case tuple() | list():
            return "[" + ",".join(_value(v, f"{key}[{i}]") for i, v in enumerate(value)) + "]"
        case DType():
            return f"@{value.name}"
        case TensorType() | TupleType():
            return repr(value)
        case Constant():
            return f"{dtype_of(value.dtype).name}[{', '.join(map(str, value.shape))}]{{{_constant(value, key)}}}"
        case Graph():
            return "\n  ".join(_lines(value))
    raise TypeError(f"a parameter cannot be {value!r}")


def _constant(constant: Constant, key: str) -> str:
    """The elements as nested lists, exactly; where there are many, a reference into `data`."""
    if constant.size > LARGEST_LITERAL:
        return f"data({json.dumps(key)})"

    def nested(array: np.ndarray) -> str:
        if array.ndim == 0:
            return _number(array, dtype_of(constant.dtype))
        return "[" + ", ".join(nested(array[i, ...]) for i in range(array.shape[0])) + "]"

    return nested(constant.array) if constant.size else "[]"


def _number(x: np.ndarray, dtype: DType) -> str:
    """One element; a float that its decimal form does not give back (a NaN with a payload) by its bits."""
    if dtype.kind == "b":
        return "true" if x else "false"
    if dtype.kind in "iu":
        return str(int(x))
    text = str(x[()]) if dtype.name in ("f64", "f32", "f16") else repr(float(x))
    if not math.isfinite(float(x)):
        text = repr(float(x))
    if np.asarray(float(text)).astype(dtype.numpy).tobytes() == x.tobytes():
        return text
    return f"0x{int.from_bytes(x.tobytes(), 'little'):x}"


def constants(graph: Graph) -> dict[str, Constant]:
    """What `parse` needs beside the text.

    The initial values of inputs, and the literals too large for it, by what the text calls them.
    """
    found = dict(graph.data)
    named = labels(graph)

    def collect(value: Any, key: str) -> None:
        if isinstance(value, Constant) and value.size > LARGEST_LITERAL:
            found[key] = value
        elif isinstance(value, tuple):
            for i, v in enumerate(value):
                collect(v, f"{key}[{i}]")
        elif isinstance(value, Graph):
            for k, v in constants(value).items():
                found.setdefault(k, v)

    for node in graph.nodes:
        for key, value in node.params.items():
            collect(value, named[node] if node.primitive.name == "literal" else f"{named[node]}:{key}")
    return found


# ---- parsing ---------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
      | (?P<hex>0x[0-9a-fA-F]+)
      | (?P<float>(\d+\.\d*|\.\d+)([eE][+-]?\d+)?|\d+[eE][+-]?\d+)
      | (?P<int>\d+)
      | (?P<dotted>[A-Za-z_]\w*(\.\w+)+)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<label>"(?:[^"\\]|\\.)*"(\.\d+)+)
      | (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<symbol>'(?:[^'\\]|\\.)*')
      | (?P<op>//|\*\*|==|>=|[-+*%@(){}\[\],:=])""",
    re.VERBOSE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


def _kind(group: str, text: str) -> str:
    """`h.0` is the label of a node inside h, `h.weight` a name."""
    return "label" if group == "dotted" and text.rpartition(".")[2].isdigit() else group


def _tokens(text: str) -> list[_Token]:
    found, at, line = [], 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise TextError(f"line {line}: unexpected {text[at : at + 20].splitlines()[0]!r}")
        if match.lastgroup != "space" and match.lastgroup is not None:
            found.append(_Token(_kind(match.lastgroup, match.group()), match.group(), line))
        line += match.group().count("\n")
        at = match.end()
    found.append(_Token("end", "the end", line))
    return found


def parse(text: str, data: Mapping[str, Constant | np.ndarray] | None = None) -> Graph:
    """The graph that `show` printed.

    `data` holds initial values of inputs, and the literals too large for the text (see `constants`).

    Every type is inferred again and must be the one in the text.

    >>> graph = parse("graph g(x: f32[N]) { y: f32[N] = exp x return y=y }")
    >>> graph.outputs["y"].operands[0].name
    'x'
    """
    given = {k: v if isinstance(v, Constant) else Constant(np.asarray(v)) for k, v in (data or {}).items()}
    parser = _Parser(_tokens(text), given)
    graph = parser.graph()
    parser.expect("end")
    return graph


@dataclass(slots=True)
class _Parser:
    tokens: list[_Token]
    data: Mapping[str, Constant]
    at: int = 0
    empty: set[str] = field(default_factory=set)  # symbols that may be 0

    def __post_init__(self) -> None:
        for i, token in enumerate(self.tokens[:-3]):
            if token.text == "where" and token.kind == "name":
                name, relation, zero = self.tokens[i + 1 : i + 4]
                if name.kind in ("name", "symbol") and relation.text == ">=" and zero.text == "0":
                    self.empty.add(_unquoted(name))

    # -- tokens

    @property
    def next(self) -> _Token:
        return self.tokens[self.at]

    def is_(self, *texts: str) -> bool:
        return self.next.kind in ("op", "name") and self.next.text in texts

    def take(self, text: str) -> bool:
        if self.is_(text):
            self.at += 1
            return True
        return False

    def fail(self, wanted: str) -> TextError:
        return TextError(f"line {self.next.line}: {wanted} expected, found {self.next.text!r}")

    def need(self, text: str) -> None:
        if not self.take(text):
            raise self.fail(repr(text))

    def expect(self, *kinds: str) -> _Token:
        if self.next.kind not in kinds:
            raise self.fail(" or ".join(kinds))
        token = self.next
        if token.kind != "end":
            self.at += 1
        return token

    def name(self) -> str:
        return _unquoted(self.expect("name", "dotted", "string"))

    # -- graphs

    def graph(self) -> Graph:
        self.need("graph")
        name = self.name()
        known: dict[str, Value] = {}  # by the label as written
        roles: dict[str, Role] = {}
        with building() as builder:
            inputs = self.inputs(known, roles)
            self.need("{")
            constraints = self.wheres()
            builder.assume(constraints)
            tensors: dict[str, Value] = {}
            while not self.is_("return", "also"):
                self.node(known, tensors)
            if self.take("also"):
                while True:
                    alias = self.name()
                    self.need("=")
                    tensors[alias] = self.known(known)
                    if not self.take(","):
                        break
            outputs = self.outputs(known, roles)
            self.need("}")
        tensors = {k: v for k, v in tensors.items() if outputs.get(k) is not v}
        data = {v.params["name"]: self.data[v.params["name"]] for v in inputs if v.params["name"] in self.data}
        return Graph(inputs, outputs, name, tensors, roles, data, constraints)

    def role(self) -> Role | None:
        if not self.take("@"):
            return None
        role, parameter = self.expect("name").text, None
        if self.take("("):
            parameter = self.name()
            self.need(")")
        return Role(role, parameter)

    def inputs(self, known: dict[str, Value], roles: dict[str, Role]) -> tuple[Value, ...]:
        self.need("(")
        found: list[Value] = []
        while not self.take(")"):
            if found:
                self.need(",")
            role = self.role() or Role("input")
            name = self.name()
            self.need(":")
            type_ = self.type()
            if not isinstance(type_, TensorType):
                raise self.fail(f"one tensor for the input {name!r}")
            if _name(name) in known:
                raise TextError(f"line {self.next.line}: two inputs {name!r}")
            found.append(p.input(name, type_, role.role))
            known[_name(name)] = found[-1]
            if role.parameter is not None:
                roles[name] = role
        return tuple(found)

    def wheres(self) -> tuple[Constraint, ...]:
        found = []
        while self.take("where"):
            left = self.sum(modulo=False)
            relation = self.expect("op").text
            right = self.sum()
            if relation == "%":
                self.need("==")
                self.expect("int")
                relation = "divides"
            reason = _unquoted(self.expect("string")) if self.next.kind == "string" else ""
            declares = isinstance(left, sympy.Symbol) and left.name in self.empty and relation == ">=" and right == 0
            if not declares or reason:
                found.append(Constraint(left, relation, right, reason))
        return tuple(found)

    def outputs(self, known: Mapping[str, Value], roles: dict[str, Role]) -> dict[str, Value]:
        self.need("return")
        found: dict[str, Value] = {}
        while not self.is_("}"):
            if found:
                self.need(",")
            role = self.role()
            name = self.name()
            if role is not None:
                roles[name] = role
            self.need("=")
            found[name] = self.known(known)
        return found

    def known(self, known: Mapping[str, Value]) -> Value:
        token = self.expect("name", "dotted", "string", "label")
        if token.text not in known:
            raise TextError(f"line {token.line}: {token.text} is not defined")
        return known[token.text]

    # -- nodes

    def node(self, known: dict[str, Value], tensors: dict[str, Value]) -> None:
        token = self.expect("name", "dotted", "string", "label")
        if token.text in known:
            raise TextError(f"line {token.line}: {token.text} is defined twice")
        self.need(":")
        type_ = self.type()
        self.need("=")
        primitive = self.expect("name")
        if primitive.text not in p.BY_NAME:
            raise TextError(f"line {primitive.line}: no primitive {primitive.text!r}")
        operands, params = self.arguments(primitive.text, type_, _plain(token), known)
        value = bind(p.BY_NAME[primitive.text], *operands, **params)
        if value.type != type_:
            raise TextError(
                f"line {token.line}: {token.text} is said to be {type_!r}, but {primitive.text} gives {value.type!r}"
            )
        known[token.text] = value
        if token.kind != "label":
            tensors[_unquoted(token)] = value

    def arguments(
        self, primitive: str, type_: Type, label: str, known: Mapping[str, Value]
    ) -> tuple[list[Value], dict[str, Any]]:
        if primitive == "literal":
            if not isinstance(type_, TensorType):
                raise self.fail("one tensor")
            return [], {"value": self.constant(type_)}
        operands: list[Value] = []
        while self.next.kind in ("name", "dotted", "string", "label") and not self.starts_parameter_or_node():
            operands.append(self.known(known))
            if not self.take(","):
                break
        written: dict[str, Any] = {}
        while self.next.kind == "name" and self.tokens[self.at + 1].text == "=":
            key = self.expect("name").text
            self.need("=")
            written[key] = self.value()
        try:
            return operands, {**written, **_left_out(primitive, type_, written), **written}
        except (KeyError, IndexError) as error:
            raise self.fail(f"the parameters of {primitive}") from error

    def starts_parameter_or_node(self) -> bool:
        return self.is_("return", "also") or (
            self.tokens[self.at + 1].kind == "op" and self.tokens[self.at + 1].text in ("=", ":")
        )

    # -- types and values

    def type(self) -> Type:
        if self.take("("):
            items: list[TensorType] = []
            while not self.take(")"):
                if items:
                    self.need(",")
                item = self.type()
                assert isinstance(item, TensorType)
                items.append(item)
            return TupleType(tuple(items))
        token = self.expect("name")
        if token.text not in DTYPES:
            raise TextError(f"line {token.line}: no dtype {token.text!r}")
        return TensorType(DTYPES[token.text], self.shape())

    def shape(self) -> Shape:
        self.need("[")
        found: list[Dim] = []
        while not self.take("]"):
            if found:
                self.need(",")
            found.append(self.sum())
        return tuple(found)

    def value(self) -> Any:
        token, after = self.next, self.tokens[self.at + 1] if self.next.kind != "end" else self.next
        if token.kind == "string":
            return _unquoted(self.expect("string"))
        if self.is_("["):
            return self.values()
        if self.take("@"):
            return DTYPES[self.expect("name").text]
        if self.is_("graph"):
            return self.graph()
        if self.is_("true", "false", "none", "inf", "nan"):
            self.at += 1
            return {"true": True, "false": False, "none": None, "inf": math.inf, "nan": math.nan}[token.text]
        if self.is_("-") and after.text in ("inf", "nan") and after.kind == "name":
            self.at += 2
            return -math.inf if after.text == "inf" else math.nan
        if self.is_("-") and after.kind == "float":
            self.at += 2
            return -float(after.text)
        if token.kind == "float":
            return float(self.expect("float").text)
        if token.kind == "name" and token.text in DTYPES and after.text == "[":
            return self.typed_constant()
        if self.is_("(") and (after.text in DTYPES or after.text == ")"):
            return self.type()
        return self.sum()

    def typed_constant(self) -> TensorType | Constant:
        type_ = self.type()
        assert isinstance(type_, TensorType)
        if not self.take("{"):
            return type_
        constant = self.constant(type_)
        self.need("}")
        return constant

    def values(self) -> tuple[Any, ...]:
        self.need("[")
        found: list[Any] = []
        while not self.take("]"):
            if found:
                self.need(",")
            found.append(self.value())
        return tuple(found)

    def constant(self, type_: TensorType) -> Constant:
        line = self.next.line
        if self.take("data"):
            self.need("(")
            key = self.name()
            self.need(")")
            if key not in self.data:
                raise TextError(f"line {line}: the values of {key!r} are not in `data`")
            return self.data[key]
        elements = list(self.elements(type_.dtype))
        shape = tuple(d for d in type_.shape if isinstance(d, int))
        if len(shape) != type_.rank or len(elements) != math.prod(shape):
            raise TextError(f"line {line}: {len(elements)} elements given for {type_!r}")
        array = np.empty(len(elements), type_.dtype.numpy)
        for i, x in enumerate(elements):
            array[i] = x
        return Constant(array.reshape(shape))

    def elements(self, dtype: DType) -> Iterator[Any]:
        if self.take("["):
            first = True
            while not self.take("]"):
                if not first:
                    self.need(",")
                yield from self.elements(dtype)
                first = False
            return
        if self.is_("true", "false"):
            yield self.take("true") or not self.take("false")
            return
        negative = self.take("-")
        token = self.expect("hex", "float", "int", "name")
        if token.kind == "hex":
            size = dtype.numpy.itemsize
            yield np.frombuffer(int(token.text, 16).to_bytes(size, "little"), dtype.numpy)[0]
        elif token.kind == "int" and dtype.kind != "f":
            yield -int(token.text) if negative else int(token.text)
        elif token.kind != "name" or token.text in ("inf", "nan"):
            yield -float(token.text) if negative else float(token.text)
        else:
            raise TextError(f"line {token.line}: a number expected, found {token.text!r}")

    # -- dims

    def sum(self, modulo: bool = True) -> Dim:
        total = self.product(modulo)
        while self.is_("+", "-"):
            if self.take("+"):
                total = dims.simplest(total + self.product(modulo))
            else:
                self.need("-")
                total = dims.simplest(total - self.product(modulo))
        return total

    def product(self, modulo: bool) -> Dim:
        if self.take("-"):
            return dims.simplest(-self.product(modulo))
        left = self.power()
        while self.is_("*", "//") or (modulo and self.is_("%")):
            operator = self.expect("op").text
            right = self.power()
            match operator:
                case "*":
                    left = dims.simplest(left * right)
                case "//":
                    left = dims.floordiv(left, right)
                case _:
                    left = dims.mod(left, right)
        return left

    def power(self) -> Dim:
        base = self.atom()
        if self.take("**"):
            return dims.simplest(base ** int(self.expect("int").text))
        return base

    def atom(self) -> Dim:
        if self.take("("):
            inner = self.sum()
            self.need(")")
            return inner
        token = self.expect("int", "name", "symbol")
        if token.kind == "int":
            return int(token.text)
        if token.kind == "name" and token.text in ("max", "min") and self.take("("):
            a = self.sum()
            self.need(",")
            b = self.sum()
            self.need(")")
            return (dims.dmax if token.text == "max" else dims.dmin)(a, b)
        name = _unquoted(token)
        return dims.dim(name, 0 if name in self.empty else 1)


def _unquoted(token: _Token) -> str:
    if token.kind == "string":
        return str(json.loads(token.text))
    if token.kind == "symbol":
        return dims.unquote(token.text)
    return token.text


def _plain(token: _Token) -> str:
    """A label without its quotes."""
    if token.kind != "label" or not token.text.startswith('"'):
        return _unquoted(token)
    quoted, _, numbers = token.text.rpartition('"')
    return f"{json.loads(quoted + chr(34))}{numbers}"
