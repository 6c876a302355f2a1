"""`ai.onnx.ml`, where it is numerical: linear models, support vectors, trees, and what prepares features.

Coefficients, intercepts, support vectors' weights and the values of leaves are attributes; they become parameters called `node/attribute`, of the
attribute's own shape. A tree is walked by index: each step compares one feature with one threshold and selects the next node, so only the values of
leaves have a gradient. The meaning, where the specification is silent, is that of onnxruntime's CPU kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ....algebra import composites as c
from ....algebra import primitives as p
from ....algebra.graph import Value
from ....algebra.types import DType, dtype_of, f32, f64, i64
from ..context import Node, Unsupported, require_equal
from ..registry import Gradient, lowers, outside
from .math import determinant

ML = "ai.onnx.ml"
Floats = tuple[float, ...]
Ints = tuple[int, ...]
Strings = tuple[str, ...]

outside("strings are outside numerical graphs", "CategoryMapper", "DictVectorizer", "CastMap", domain=ML)
outside("a sequence of maps is outside numerical graphs; take the scores before it", "ZipMap", domain=ML)


# ---- what many share -------------------------------------------------------------------------------------------------------------------


def _as_floats(x: Value) -> Value:
    """`x` as the dtype that scores are computed in: doubles stay, all else is float32."""
    return p.cast(x, dtype=f64 if x.dtype is f64 else f32)


def _rows(x: Value) -> Value:
    """Features as `[N, F]`; one row of features is a batch of one."""
    if x.rank == 1:
        return p.reshape(x, shape=(1, *x.shape))
    if x.rank != 2:
        raise Unsupported(f"features of {x.type!r} are no rows")
    return x


def _parameter(node: Node, name: str, values: Sequence[float] | np.ndarray, dtype: DType) -> Value:
    """An attribute as a parameter, in the dtype of the scores."""
    array = np.asarray(values)
    if array.dtype not in (np.float32, np.float64) or not isinstance(values, np.ndarray):
        array = array.astype(np.float32)
    return p.cast(node.scope.parameter(f"{node.name}/{name}", array), dtype=dtype)


def _error_function_inverse(x: Value) -> Value:
    """S. Winitzki's approximation, which onnxruntime takes."""
    log = p.log(p.mul(c.sub(p.number(1, x), x), c.plus(x, 1)))
    v = c.plus(c.scale(log, 0.5), 2 / (3.14159 * 0.147))
    inner = p.add(p.neg(v), p.sqrt(c.sub(c.square(v), c.scale(log, 1 / 0.147))))
    return p.mul(p.select(p.less(x, p.number(0, x)), p.number(-1, x), p.number(1, x)), p.sqrt(inner))


def transformed(scores: Value, kind: str) -> Value:
    """Scores `[N, targets]` after `post_transform`."""
    match kind:
        case "NONE":
            return scores
        case "LOGISTIC":
            return c.sigmoid(scores)
        case "SOFTMAX":
            return c.softmax(scores, (1,))
        case "SOFTMAX_ZERO":
            zero = p.less_equal(p.abs(scores), p.number(1e-7, scores))
            top = p.stop_gradient(p.reduce_max(scores, axes=(1,)))
            e = p.exp(c.sub(scores, c.along(top, scores.shape, (1,))))
            weight = p.select(zero, p.mul(scores, p.exp(p.neg(c.along(top, scores.shape, (1,))))), e)
            total = p.reduce_sum(p.select(zero, p.number(0, e), e), axes=(1,))
            return p.div(weight, c.along(total, scores.shape, (1,)))
        case "PROBIT":
            return c.scale(_error_function_inverse(c.plus(c.scale(scores, 2), -1)), math.sqrt(2))
    raise Unsupported(f"post_transform {kind!r}")


def _labels(ints: Ints, strings: Strings) -> tuple[int, Value | None]:
    """How many classes there are, and their labels where those are numbers."""
    if strings:
        return len(strings), None
    return len(ints), c.integers(ints) if ints else None


def _label_of(index: Value, labels: Value | None, count: int) -> Value | None:
    """The labels at indices; without labels the indices; None where labels are strings."""
    if labels is not None:
        return p.gather(labels, index, axis=0)
    return None if count else index


def _pair(score: Value, kind: str, positive: bool) -> Value:
    """Both columns of a classifier of two classes that has one score: `[1 - s, s]` of a share, else `[-s, s]`, the latter also before LOGISTIC."""
    if kind == "PROBIT":
        return transformed(score, kind)
    if kind == "LOGISTIC":
        return c.sigmoid(p.concat(p.neg(score), score, axis=1))
    other = c.sub(p.number(1, score), score) if positive else p.neg(score)
    return p.concat(other, score, axis=1)


# ---- linear models and support vectors -------------------------------------------------------------------------------------------------


def _linear(x: Value, node: Node, coefficients: Floats, intercepts: Floats, targets: int) -> Value:
    """`x @ coefficients^T + intercepts`."""
    if not targets or len(coefficients) % targets:
        raise Unsupported(f"{len(coefficients)} coefficients do not serve {targets} targets")
    features = require_equal(x.shape[1], len(coefficients) // targets, "a coefficient for each feature")
    w = p.reshape(_parameter(node, "coefficients", coefficients, x.dtype), shape=(targets, features))
    y = p.dot(x, w, contract=((1,), (1,)))
    if not intercepts:
        return y
    return p.add(y, c.at_last(_parameter(node, "intercepts", intercepts, x.dtype), y.shape))


@lowers("LinearRegressor", domain=ML)
def linear_regressor(
    x: Value, *, coefficients: Floats, intercepts: Floats = (), post_transform: str = "NONE", targets: int = 1, node: Node
) -> Value:  # fmt: skip
    """x @ coefficients^T + intercepts"""
    y = _linear(_as_floats(_rows(x)), node, coefficients, intercepts, targets)
    return p.cast(transformed(y, post_transform), dtype=f32)


@lowers("LinearClassifier", domain=ML)
def linear_classifier(
    x: Value, *, classlabels_ints: Ints = (), classlabels_strings: Strings = (), coefficients: Floats, intercepts: Floats = (),
    multi_class: int = 0, post_transform: str = "NONE", node: Node,
) -> tuple[Value | None, Value]:  # fmt: skip
    """the label of the largest of x @ coefficients^T + intercepts, and these scores"""
    count, labels = _labels(classlabels_ints, classlabels_strings)
    rows = len(intercepts) or count
    scores = _linear(_as_floats(_rows(x)), node, coefficients, intercepts, rows)
    if rows > 1 or count != 2:
        index = p.argmax(scores, axis=1)
        return _label_of(index, labels, count), p.cast(transformed(scores, post_transform), dtype=f32)
    index = _is_positive(c.drop_ones(scores, (1,)), 0.0)
    if post_transform == "LOGISTIC":
        both = _pair(c.sigmoid(scores), "NONE", positive=True)
    else:
        both = _pair(scores, post_transform, positive=True)
    return _label_of(index, labels, count), p.cast(both, dtype=f32)


def _is_positive(score: Value, threshold: float) -> Value:
    """1 where a score is above a threshold, else 0, as an index."""
    return c.as_number(p.less(p.number(threshold, score), score), i64)


def _kernel(x: Value, vectors: Value, kind: str, parameters: Floats) -> Value:
    """`[N, vectors]`: how alike each row is to each support vector."""
    gamma, coef0, degree = (*parameters, 0.0, 0.0, 0.0)[:3]
    inner = p.dot(x, vectors, contract=((1,), (1,)))
    match kind:
        case "LINEAR":
            return inner
        case "POLY":
            return p.pow(c.plus(c.scale(inner, gamma), coef0), p.number(degree, inner))
        case "SIGMOID":
            return p.tanh(c.plus(c.scale(inner, gamma), coef0))
        case "RBF":
            full = (x.shape[0], *vectors.shape)
            gap = c.sub(p.broadcast(x, shape=full, axes=(0, 2)), p.broadcast(vectors, shape=full, axes=(1, 2)))
            return p.exp(c.scale(p.reduce_sum(c.square(gap), axes=(2,)), -gamma))
    raise Unsupported(f"kernel_type {kind!r}")


def _vectors(x: Value, node: Node, vectors: Floats, count: int) -> Value:
    features = require_equal(x.shape[1], len(vectors) // count, "a support vector has an entry for each feature")
    return p.reshape(_parameter(node, "support_vectors", vectors, x.dtype), shape=(count, features))


@lowers("SVMRegressor", domain=ML)
def svm_regressor(
    x: Value, *, coefficients: Floats, kernel_params: Floats = (), kernel_type: str = "LINEAR", n_supports: int = 0, one_class: int = 0,
    post_transform: str = "NONE", rho: Floats, support_vectors: Floats = (), node: Node,
) -> Value:  # fmt: skip
    """kernel(x, support_vectors) @ coefficients + rho"""
    x = _as_floats(_rows(x))
    w = _parameter(node, "coefficients", coefficients, x.dtype)
    if n_supports:
        y = p.dot(
            _kernel(x, _vectors(x, node, support_vectors, n_supports), kernel_type, kernel_params),
            w,
            contract=((1,), (0,)),
        )
    else:
        y = p.dot(x, w, contract=((1,), (0,)))
    offset = p.reshape(_parameter(node, "rho", rho[:1], x.dtype), shape=())
    y = p.add(y, p.broadcast(offset, shape=y.shape, axes=()))
    if one_class:
        y = p.select(p.less(p.number(0, y), y), p.number(1, y), p.number(-1, y))
    return p.cast(transformed(c.unsqueeze(y, (1,)), post_transform), dtype=f32)


@lowers("SVMClassifier", domain=ML)
def svm_classifier(
    x: Value, *, classlabels_ints: Ints = (), classlabels_strings: Strings = (), coefficients: Floats, kernel_params: Floats = (),
    kernel_type: str = "LINEAR", post_transform: str = "NONE", prob_a: Floats = (), prob_b: Floats = (), rho: Floats,
    support_vectors: Floats = (), vectors_per_class: Ints = (), node: Node,
) -> tuple[Value | None, Value]:  # fmt: skip
    """the label that most pairs of classes vote for, and the scores of the pairs, or the probability where two classes have one"""
    count, labels = _labels(classlabels_ints, classlabels_strings)
    x = _as_floats(_rows(x))
    if not vectors_per_class:
        scores = _linear(x, node, coefficients, (), count)
        scores = p.add(
            scores,
            p.broadcast(p.reshape(_parameter(node, "rho", rho[:1], x.dtype), shape=()), shape=scores.shape, axes=()),
        )
        return _label_of(p.argmax(scores, axis=1), labels, count), p.cast(
            transformed(scores, post_transform), dtype=f32
        )
    total = sum(vectors_per_class)
    weights = p.reshape(_parameter(node, "coefficients", coefficients, x.dtype), shape=(count - 1, total))
    alike = _kernel(x, _vectors(x, node, support_vectors, total), kernel_type, kernel_params)
    starts = np.concatenate([[0], np.cumsum(vectors_per_class)]).tolist()
    offsets = _parameter(node, "rho", rho, x.dtype)
    pairs: list[Value] = []
    for i in range(count):
        for j in range(i + 1, count):
            parts = [
                p.dot(_columns(alike, starts[k], starts[k + 1]), _part(weights, row, starts[k], starts[k + 1]), contract=((1,), (0,)))
                for k, row in ((i, j - 1), (j, i))
            ]  # fmt: skip
            score = p.add(parts[0], parts[1])
            offset = p.reshape(p.slice(offsets, start=(len(pairs),), limit=(len(pairs) + 1,)), shape=())
            pairs.append(p.add(score, p.broadcast(offset, shape=score.shape, axes=())))
    index = _most_votes(pairs, count)
    if not prob_a:
        if count == 2:
            both = p.concat(c.unsqueeze(p.neg(pairs[0]), (1,)), c.unsqueeze(pairs[0], (1,)), axis=1)
            if post_transform == "LOGISTIC":
                both = c.sigmoid(both)
            return _label_of(index, labels, count), p.cast(both, dtype=f32)
        scores = p.concat(*(c.unsqueeze(s, (1,)) for s in pairs), axis=1)
        return _label_of(index, labels, count), p.cast(transformed(scores, post_transform), dtype=f32)
    shares = _shares(
        pairs, _parameter(node, "prob_a", prob_a, x.dtype), _parameter(node, "prob_b", prob_b, x.dtype), count
    )
    return _label_of(p.argmax(shares, axis=1), labels, count), p.cast(transformed(shares, post_transform), dtype=f32)


def _shares(pairs: Sequence[Value], a: Value, b: Value, count: int) -> Value:
    """The probability of each class, `[N, classes]`, from those of the pairs, `r[i, j] = sigmoid(-(a f + b))` and `r[j, i] = 1 - r[i, j]`.

    They minimise the sum of `(r[j, i] p[i] - r[i, j] p[j])^2` (Wu, Lin and Weng, 2004, second method): p is proportional to `adj(Q) 1`, whose
    entries are determinants of Q with a column of ones. onnxruntime stops an iteration towards the same values at 0.005 / classes.
    """
    scores = p.concat(*(c.unsqueeze(s, (1,)) for s in pairs), axis=1)
    inner = p.add(p.mul(scores, c.at_last(a, scores.shape)), c.at_last(b, scores.shape))
    won = c.clamp(c.sigmoid(p.neg(inner)), p.number(1e-7, inner), p.number(1 - 1e-7, inner))
    lost = c.sub(p.number(1, won), won)
    if count == 2:
        return p.concat(won, lost, axis=1)
    order = {pair: k for k, pair in enumerate((i, j) for i in range(count) for j in range(i + 1, count))}
    places = [order[min(i, j), max(i, j)] + (len(pairs) if i > j else 0) if i != j else 2 * len(pairs) for i in range(count) for j in range(count)]  # fmt: skip
    nothing = p.full(0, won.dtype, (won.shape[0], 1))
    entries = p.gather(p.concat(won, lost, nothing, axis=1), c.integers(places), axis=1)
    r = p.reshape(entries, shape=(won.shape[0], count, count))
    diagonal = p.equal(*(p.broadcast(p.iota(count), shape=r.shape, axes=(k,)) for k in (1, 2)))
    squares = p.broadcast(p.reduce_sum(c.square(r), axes=(1,)), shape=r.shape, axes=(0, 2))
    q = p.select(diagonal, squares, p.neg(p.mul(r, p.transpose(r, perm=(0, 2, 1)))))
    full = (won.shape[0], count, count, count)
    column = p.equal(*(p.broadcast(p.iota(count), shape=full, axes=(k,)) for k in (1, 3)))
    replaced = p.select(column, p.full(1, q.dtype, full), p.broadcast(q, shape=full, axes=(0, 2, 3)))
    minors: Value = determinant(replaced, count)
    return p.div(minors, c.along(p.reduce_sum(minors, axes=(1,)), minors.shape, (1,)))


def _part(x: Value, row: int, start: int, stop: int) -> Value:
    """A part of one row."""
    return p.reshape(p.slice(x, start=(row, start), limit=(row + 1, stop)), shape=(stop - start,))


def _columns(x: Value, start: int, stop: int) -> Value:
    return p.slice(x, start=(0, start), limit=(x.shape[0], stop))


def _most_votes(pairs: Sequence[Value], count: int) -> Value:
    """The class that wins most of its pairs, the first of equals."""
    votes: list[Value | None] = [None] * count
    at = iter(pairs)
    for i in range(count):
        for j in range(i + 1, count):
            won = _is_positive(next(at), 0.0)
            for k, vote in ((i, won), (j, c.sub(p.number(1, won), won))):
                before = votes[k]
                votes[k] = vote if before is None else p.add(before, vote)
    return p.argmax(p.concat(*(c.unsqueeze(v, (1,)) for v in votes if v is not None), axis=1), axis=1)


# ---- features --------------------------------------------------------------------------------------------------------------------------


def _per_feature(values: Floats, x: Value) -> Value:
    """One number for all features, or one for each."""
    if len(values) == 1:
        return p.number(values[0], x)
    require_equal(x.shape[-1], len(values), "a number for each feature")
    return c.at_last(p.literal(np.asarray(values, x.dtype.numpy)), x.shape)


@lowers("Scaler", domain=ML)
def scaler(x: Value, *, offset: Floats = (), scale: Floats = ()) -> Value:
    """(x - offset) scale"""
    y = _as_floats(x)
    y = c.sub(y, _per_feature(offset, y)) if offset else y
    return p.cast(p.mul(y, _per_feature(scale, y)) if scale else y, dtype=f32)


@lowers("Normalizer", domain=ML)
def normalizer(x: Value, *, norm: str = "MAX") -> Value:
    """x / norm(x) of each row; a row whose norm is 0 as it is"""
    y = _as_floats(x)
    axis = (y.rank - 1,)
    zero = p.number(0, y)
    match norm:
        case "MAX":
            size = p.reduce_max(y, axes=axis)
        case "L1":
            size = p.reduce_sum(p.abs(y), axes=axis)
        case "L2":
            square = c.along(p.reduce_sum(c.square(y), axes=axis), y.shape, axis)
            empty = p.equal(square, zero)
            root = p.sqrt(p.select(empty, p.number(1, square), square))
            return p.cast(p.select(empty, y, p.div(y, root)), dtype=f32)
        case _:
            raise Unsupported(f"norm {norm!r} is none of MAX, L1, L2")
    whole = c.along(size, y.shape, axis)
    empty = p.equal(whole, zero)
    return p.cast(p.select(empty, y, p.div(y, p.select(empty, p.number(1, whole), whole))), dtype=f32)


@lowers("Imputer", domain=ML)
def imputer(
    x: Value, *, imputed_value_floats: Floats = (), imputed_value_int64s: Ints = (), replaced_value_float: float = 0.0,
    replaced_value_int64: int = 0,
) -> Value:  # fmt: skip
    """x, with what equals the replaced value replaced"""
    values: Floats | Ints = imputed_value_floats if x.dtype.floating else imputed_value_int64s
    if not values:
        raise Unsupported(f"no imputed values for {x.type!r}")
    old = replaced_value_float if x.dtype.floating else replaced_value_int64
    gone = p.is_nan(x) if x.dtype.floating and math.isnan(old) else p.equal(x, p.number(old, x))
    return p.select(gone, _per_feature(tuple(values), x), x)


@lowers("Binarizer", domain=ML, gradient=Gradient.PIECEWISE, reason="0 or 1")
def binarizer(x: Value, *, threshold: float = 0.0) -> Value:
    """1 where x > threshold, else 0"""
    return c.as_number(p.less(p.number(threshold, x), x), x.dtype)


@lowers("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor(x: Value, y: Value) -> Value:
    """x[..., y]"""
    at = p.reshape(y, shape=(y.shape[-1],)) if y.rank != 1 else y
    z = p.gather(x, at, axis=x.rank - 1)
    return p.reshape(z, shape=(1, *z.shape)) if z.rank == 1 else z


@lowers("OneHotEncoder", domain=ML, gradient=Gradient.INDEX, reason="categories")
def one_hot_encoder(x: Value, *, cats_int64s: Ints = (), cats_strings: Strings = (), zeros: int = 1) -> Value:
    """1 where x is the category, along a new last axis; all 0 of what is none of them"""
    if cats_strings:
        raise Unsupported("categories that are strings are outside numerical graphs")
    if not zeros:
        raise Unsupported("zeros=0 fails at run time on an unknown category; there is no way to write that")
    number = p.cast(x, dtype=i64)
    shape = (*number.shape, len(cats_int64s))
    kinds = c.at_last(c.integers(cats_int64s), shape)
    spread = p.broadcast(number, shape=shape, axes=tuple(range(number.rank)))
    return c.as_number(p.equal(spread, kinds), f32)


@lowers("LabelEncoder", domain=ML, gradient=Gradient.INDEX, reason="a table is looked up")
def label_encoder(
    x: Value, *, classes_strings: Strings = (), default_float: float = -0.0, default_int64: int = -1, default_string: str = "_Unused",
    default_tensor: np.ndarray | None = None, keys_floats: Floats = (), keys_int64s: Ints = (), keys_strings: Strings = (),
    keys_tensor: np.ndarray | None = None, values_floats: Floats = (), values_int64s: Ints = (), values_strings: Strings = (),
    values_tensor: np.ndarray | None = None,
) -> Value:  # fmt: skip
    """the value beside the key that x equals, else the default"""
    if classes_strings or keys_strings or values_strings:
        raise Unsupported("strings are outside numerical graphs")
    keys = _table(keys_tensor, keys_floats, keys_int64s)
    values = _table(values_tensor, values_floats, values_int64s)
    if keys.dtype == object or values.dtype == object:
        raise Unsupported("strings are outside numerical graphs")
    if len(keys) != len(values) or not len(keys):
        raise Unsupported(f"{len(keys)} keys and {len(values)} values are no table")
    default = default_float if values.dtype.kind == "f" else default_int64
    if default_tensor is not None:
        default = np.asarray(default_tensor).reshape(-1)[0]
    shape = (*x.shape, len(keys))
    spread = p.broadcast(x, shape=shape, axes=tuple(range(x.rank)))
    table = c.at_last(p.literal(keys.astype(x.dtype.numpy)), shape)
    found = p.equal(spread, table)
    if x.dtype.floating:
        found = p.logical_or(found, p.logical_and(p.is_nan(spread), p.is_nan(table)))
    place = p.argmax(c.as_number(found, f32), axis=x.rank)
    taken = p.gather(p.literal(values), place, axis=0)
    known = p.less(p.full(0, f32, x.shape), p.reduce_sum(c.as_number(found, f32), axes=(x.rank,)))
    return p.select(known, taken, p.full(default, dtype_of(values.dtype), x.shape))


def _table(tensor: np.ndarray | None, floats: Floats, ints: Ints) -> np.ndarray:
    if tensor is not None:
        return np.asarray(tensor).reshape(-1)
    return np.asarray(floats, np.float32) if floats else np.asarray(ints, np.int64)


@lowers("FeatureVectorizer", domain=ML)
def feature_vectorizer(*x: Value, inputdimensions: Ints = ()) -> Value:
    """columns one after the other, each input cut or filled with 0 to its number of columns"""
    sizes = inputdimensions or tuple(int(v.shape[-1]) for v in x)
    if len(sizes) != len(x):
        raise Unsupported(f"inputdimensions has {len(sizes)} entries for {len(x)} inputs")
    pieces = []
    for v, size in zip(x, sizes, strict=True):
        rows = p.cast(_rows(v), dtype=f32)
        have = rows.shape[1]
        if not isinstance(have, int):
            have = int(require_equal(have, size, "the number of columns"))
        if have > size:
            rows = _columns(rows, 0, size)
        elif have < size:
            rows = p.pad(rows, low=(0, 0), high=(0, size - have))
        pieces.append(rows)
    return p.concat(*pieces, axis=1)


# ---- trees -----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Trees:
    """Trees as arrays over all their nodes, leaves included: a leaf has itself for both children.

    `members` are, for each node that tests membership, the values it looks for (NaN fills the rows).
    """

    roots: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    mode: np.ndarray
    yes: np.ndarray
    no: np.ndarray
    missing_is_yes: np.ndarray
    members: np.ndarray
    depth: int


_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER", "LEAF")
_MEMBER, _LEAF = 6, 7


def _depth(roots: np.ndarray, yes: np.ndarray, no: np.ndarray, leaf: np.ndarray) -> int:
    """The most steps from a root to a leaf; refuse what is no tree."""
    level, depth = np.unique(roots), 0
    while len(level := level[~leaf[level]]):
        depth += 1
        if depth > len(yes):
            raise Unsupported("the branches of a tree lead in a circle")
        level = np.unique(np.concatenate([yes[level], no[level]]))
    return depth


def _leaves(x: Value, trees: _Trees) -> Value:
    """The leaf that each row of `x[N, F]` reaches in each tree, as node numbers `[N, trees]`."""
    shape = (x.shape[0], len(trees.roots))
    at = p.broadcast(c.integers(trees.roots.tolist()), shape=shape, axes=(1,))
    modes = sorted({int(m) for m in trees.mode if m != _LEAF})

    def of_node(values: np.ndarray) -> Value:
        return p.gather(p.literal(values), at, axis=0)

    for _ in range(trees.depth):
        own = c.take_along(x, of_node(trees.feature), 1)
        limit = of_node(trees.threshold.astype(x.dtype.numpy))
        mode = of_node(trees.mode) if len(modes) > 1 else None
        holds: Value | None = None
        for m in modes:
            test = _test(m, own, limit, trees, of_node)
            holds = test if holds is None or mode is None else p.select(p.equal(mode, p.number(m, mode)), test, holds)
        assert holds is not None
        if trees.missing_is_yes.any():
            holds = p.logical_or(holds, p.logical_and(p.is_nan(own), of_node(trees.missing_is_yes)))
        at = p.select(holds, of_node(trees.yes), of_node(trees.no))
    return at


def _test(mode: int, own: Value, limit: Value, trees: _Trees, of_node: Callable[[np.ndarray], Value]) -> Value:
    match _MODES[mode]:
        case "BRANCH_LEQ":
            return p.less_equal(own, limit)
        case "BRANCH_LT":
            return p.less(own, limit)
        case "BRANCH_GTE":
            return p.less_equal(limit, own)
        case "BRANCH_GT":
            return p.less(limit, own)
        case "BRANCH_EQ":
            return p.equal(own, limit)
        case "BRANCH_NEQ":
            return c.not_equal(own, limit)
    rows = of_node(trees.members.astype(own.dtype.numpy))
    alike = p.equal(p.broadcast(own, shape=rows.shape, axes=tuple(range(own.rank))), rows)
    return p.less(p.full(0, f32, own.shape), p.reduce_sum(c.as_number(alike, f32), axes=(own.rank,)))


def _aggregated(
    at: Value, weights: Value, nodes: np.ndarray, targets: np.ndarray, node_count: int, target_count: int, how: str
) -> Value:  # fmt: skip
    """`[N, targets]` of the leaves reached. Entry e of `weights` belongs to a leaf and a target."""
    flat = nodes * target_count + targets
    table = p.scatter_add(weights, c.integers(flat.tolist()), axis=0, size=node_count * target_count)
    table = p.reshape(table, shape=(node_count, target_count))
    there = np.zeros(node_count * target_count, np.bool_)
    there[flat] = True
    rows = p.gather(table, at, axis=0)
    if how in ("SUM", "AVERAGE"):
        total = p.reduce_sum(rows, axes=(1,))
        return c.scale(total, 1 / int(at.shape[1])) if how == "AVERAGE" else total
    if how not in ("MIN", "MAX"):
        raise Unsupported(f"aggregate_function {how!r}")
    present = p.gather(p.literal(there.reshape(node_count, target_count)), at, axis=0)
    worst = math.inf if how == "MIN" else -math.inf
    rows = p.select(present, rows, p.number(worst, rows))
    best = (p.reduce_min if how == "MIN" else p.reduce_max)(rows, axes=(1,), ties="first")
    empty = p.equal(best, p.number(worst, best))
    return p.select(empty, p.number(0, best), best)


def _trees_3(
    node_ids: Ints, tree_ids: Ints, features: Ints, thresholds: np.ndarray, modes: Strings, yes: Ints, no: Ints, missing: Ints
) -> tuple[_Trees, dict[tuple[int, int], int]]:  # fmt: skip
    """The trees of versions up to 4, whose nodes are named by tree and number; and the place of each of those names."""
    place = {key: i for i, key in enumerate(zip(tree_ids, node_ids, strict=True))}
    unknown = sorted(set(modes) - set(_MODES))
    if unknown:
        raise Unsupported(f"the modes {', '.join(unknown)} are not handled")
    mode = np.asarray([_MODES.index(m) for m in modes], np.int64)
    leaf = mode == _LEAF
    own = np.arange(len(place))
    try:
        to_yes = np.asarray([i if leaf[i] else place[tree_ids[i], yes[i]] for i in own], np.int64)
        to_no = np.asarray([i if leaf[i] else place[tree_ids[i], no[i]] for i in own], np.int64)
    except KeyError as error:
        raise Unsupported(f"a branch leads to node {error}, which there is not") from error
    children = set(to_yes[~leaf].tolist()) | set(to_no[~leaf].tolist())
    roots = np.asarray([i for i in own if i not in children], np.int64)
    if len(roots) != len(set(tree_ids)):
        raise Unsupported(f"{len(set(tree_ids))} trees have {len(roots)} roots")
    none = np.zeros((len(place), 1))
    trees = _Trees(
        roots, np.asarray(features, np.int64), thresholds, mode, to_yes, to_no,
        np.asarray(missing or [0] * len(place), np.bool_), none, _depth(roots, to_yes, to_no, leaf),
    )  # fmt: skip
    return trees, place


def _held(tensor: np.ndarray | None, floats: Floats) -> np.ndarray:
    return np.asarray(tensor) if tensor is not None else np.asarray(floats, np.float32)


@lowers("TreeEnsembleRegressor", domain=ML)
def tree_ensemble_regressor(
    x: Value, *, aggregate_function: str = "SUM", base_values: Floats = (), base_values_as_tensor: np.ndarray | None = None,
    n_targets: int = 1, nodes_falsenodeids: Ints, nodes_featureids: Ints, nodes_hitrates: Floats = (),
    nodes_hitrates_as_tensor: np.ndarray | None = None, nodes_missing_value_tracks_true: Ints = (), nodes_modes: Strings,
    nodes_nodeids: Ints, nodes_treeids: Ints, nodes_truenodeids: Ints, nodes_values: Floats = (),
    nodes_values_as_tensor: np.ndarray | None = None, post_transform: str = "NONE", target_ids: Ints, target_nodeids: Ints,
    target_treeids: Ints, target_weights: Floats = (), target_weights_as_tensor: np.ndarray | None = None, node: Node,
) -> Value:  # fmt: skip
    """the sum (or mean, smallest, largest) over trees of the values of the leaf that x reaches"""
    x = _as_floats(_rows(x))
    trees, place = _trees_3(
        nodes_nodeids, nodes_treeids, nodes_featureids, _held(nodes_values_as_tensor, nodes_values), nodes_modes, nodes_truenodeids,
        nodes_falsenodeids, nodes_missing_value_tracks_true,
    )  # fmt: skip
    weights = _attribute(node, "target_weights", target_weights, target_weights_as_tensor, x.dtype)
    nodes = np.asarray([place[key] for key in zip(target_treeids, target_nodeids, strict=True)], np.int64)
    y = _aggregated(
        _leaves(x, trees), weights, nodes, np.asarray(target_ids), len(place), n_targets, aggregate_function
    )
    if len(base_values) or base_values_as_tensor is not None:
        y = p.add(y, c.at_last(_attribute(node, "base_values", base_values, base_values_as_tensor, x.dtype), y.shape))
    return p.cast(transformed(y, post_transform), dtype=f32)


def _attribute(node: Node, name: str, floats: Floats, tensor: np.ndarray | None, dtype: DType) -> Value:
    """The attribute `name`, or `name_as_tensor`, as a parameter."""
    if tensor is None:
        return _parameter(node, name, floats, dtype)
    return _parameter(node, f"{name}_as_tensor", np.asarray(tensor), dtype)


@lowers("TreeEnsembleClassifier", domain=ML)
def tree_ensemble_classifier(
    x: Value, *, base_values: Floats = (), base_values_as_tensor: np.ndarray | None = None, class_ids: Ints, class_nodeids: Ints,
    class_treeids: Ints, class_weights: Floats = (), class_weights_as_tensor: np.ndarray | None = None, classlabels_int64s: Ints = (),
    classlabels_strings: Strings = (), nodes_falsenodeids: Ints, nodes_featureids: Ints, nodes_hitrates: Floats = (),
    nodes_hitrates_as_tensor: np.ndarray | None = None, nodes_missing_value_tracks_true: Ints = (), nodes_modes: Strings,
    nodes_nodeids: Ints, nodes_treeids: Ints, nodes_truenodeids: Ints, nodes_values: Floats = (),
    nodes_values_as_tensor: np.ndarray | None = None, post_transform: str = "NONE", node: Node,
) -> tuple[Value | None, Value]:  # fmt: skip
    """the label of the largest sum over trees of the weights of the leaf that x reaches, and these sums"""
    x = _as_floats(_rows(x))
    count, labels = _labels(classlabels_int64s, classlabels_strings)
    trees, place = _trees_3(
        nodes_nodeids, nodes_treeids, nodes_featureids, _held(nodes_values_as_tensor, nodes_values), nodes_modes, nodes_truenodeids,
        nodes_falsenodeids, nodes_missing_value_tracks_true,
    )  # fmt: skip
    weights = _attribute(node, "class_weights", class_weights, class_weights_as_tensor, x.dtype)
    nodes = np.asarray([place[key] for key in zip(class_treeids, class_nodeids, strict=True)], np.int64)
    ids = np.asarray(class_ids)
    single = count == 2 and len(set(class_ids)) == 1
    if single:  # both classes from one score
        ids = np.zeros_like(ids)
    scores = _aggregated(_leaves(x, trees), weights, nodes, ids, len(place), 1 if single else count, "SUM")
    bases = len(base_values) if base_values_as_tensor is None else int(np.size(base_values_as_tensor))
    if bases:
        base = _attribute(node, "base_values", base_values, base_values_as_tensor, x.dtype)
        if single and bases == 2:
            base = p.slice(base, start=(1,), limit=(2,))
        scores = p.add(scores, c.at_last(base, scores.shape))
    if not single:
        index = p.argmax(scores, axis=1)
        return _label_of(index, labels, count), p.cast(transformed(scores, post_transform), dtype=f32)
    positive = bool((_held(class_weights_as_tensor, class_weights) >= 0).all())
    index = _is_positive(c.drop_ones(scores, (1,)), 0.5 if positive else 0.0)
    if class_ids[0] == 1:  # the other class has the score 0
        both = transformed(p.concat(p.number(0, scores), scores, axis=1), post_transform)
    else:
        both = _pair(scores, post_transform, positive)
    return _label_of(index, labels, count), p.cast(both, dtype=f32)


@lowers("TreeEnsemble", domain=ML, since=5)
def tree_ensemble(
    x: Value, *, aggregate_function: int = 1, leaf_targetids: Ints, leaf_weights: np.ndarray, membership_values: np.ndarray | None = None,
    n_targets: int = 1, nodes_falseleafs: Ints, nodes_falsenodeids: Ints, nodes_featureids: Ints,
    nodes_hitrates: np.ndarray | None = None, nodes_missing_value_tracks_true: Ints = (), nodes_modes: np.ndarray,
    nodes_splits: np.ndarray, nodes_trueleafs: Ints, nodes_truenodeids: Ints, post_transform: int = 0, tree_roots: Ints, node: Node,
) -> Value:  # fmt: skip
    """the sum (or mean, smallest, largest) over trees of the value of the leaf that x reaches"""
    dtype = x.dtype
    x = _rows(x)
    inner, leaves = len(nodes_modes), len(leaf_targetids)
    own = np.arange(inner, inner + leaves)  # leaves follow the other nodes

    def children(ids: Ints, is_leaf: Ints) -> np.ndarray:
        return np.concatenate([np.asarray(ids) + inner * np.asarray(is_leaf), own]).astype(np.int64)

    def extended(values: np.ndarray | Ints, fill: float) -> np.ndarray:
        return np.concatenate([np.asarray(values), np.full(leaves, fill, np.asarray(values).dtype)])

    mode = extended(np.asarray(nodes_modes, np.int64), _LEAF)
    yes, no = children(nodes_truenodeids, nodes_trueleafs), children(nodes_falsenodeids, nodes_falseleafs)
    roots = np.asarray(tree_roots, np.int64)
    trees = _Trees(
        roots, extended(np.asarray(nodes_featureids, np.int64), 0), extended(np.asarray(nodes_splits), 0), mode, yes, no,
        extended(np.asarray(nodes_missing_value_tracks_true or [0] * inner, np.bool_), False), _members(mode, membership_values),
        _depth(roots, yes, no, mode == _LEAF),
    )  # fmt: skip
    weights = _parameter(node, "leaf_weights", np.asarray(leaf_weights), dtype)
    how = ("AVERAGE", "SUM", "MIN", "MAX")[aggregate_function]
    y = _aggregated(_leaves(x, trees), weights, own, np.asarray(leaf_targetids), inner + leaves, n_targets, how)
    return transformed(y, ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")[post_transform])


def _members(mode: np.ndarray, values: np.ndarray | None) -> np.ndarray:
    """For each node the values whose membership it tests, filled with NaN; sets follow each other in the order of those nodes, NaN between."""
    if values is None:
        return np.zeros((len(mode), 1))
    sets: list[list[float]] = [[]]
    for v in np.asarray(values).reshape(-1).tolist():
        if math.isnan(v):
            sets.append([])
        else:
            sets[-1].append(v)
    wide = max(1, *map(len, sets))
    table = np.full((len(mode), wide), math.nan)
    for row, held in zip(np.flatnonzero(mode == _MEMBER), sets, strict=False):
        table[row, : len(held)] = held
    return table
