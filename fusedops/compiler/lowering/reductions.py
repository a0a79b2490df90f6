"""Reductions over rows, and what PyTorch makes of them: softmax, losses, norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..axes import Label
from ..errors import NotRowwiseError
from ..ir import Node
from ..tracing import Value, kind_of
from .common import as_kind, differentiated, joined, lowers, picked, pointwise, where_within


def reduced(
    r: Any, op: str, x: Value, dims: Any, keepdim: bool, kind: str
) -> tuple[Node, tuple[Label, ...], list[int]]:
    """A reduction over dimensions (None and () for all): the node, the labels that are left, and the axes that are gone."""
    rank = len(x.labels)
    over = {d % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank))} if rank else set()
    axes = [axis for d in sorted(over) for axis in x.labels[d]]
    node = as_kind(r, x.node, kind)
    labels = tuple([() if d in over else label for d, label in enumerate(x.labels) if keepdim or d not in over])
    if not axes:
        return node, labels, axes
    varies, over_axes = r.axes.of(node.axes), set(r.axes.of(axes))
    along = tuple([axis for axis in varies if axis in over_axes])
    rest = frozenset(varies) - over_axes
    return r.graph.make(op, node, attrs=(along,), axes=rest) if along else node, labels, axes


def length(r: Any, axes: Sequence[int]) -> int:
    """How many elements there are along axes."""
    return r.axes.size(r.axes.of(axes))


@lowers("sum")
def _sum(r: Any, out: Any, x: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    node, labels, axes = reduced(r, "sum", x, dim, keepdim, kind_of(out.dtype))
    return Value(repeated(r, x, node, axes), labels, out.dtype)


def repeated(r: Any, x: Value, node: Node, axes: Sequence[int]) -> Node:
    """A sum over what does not vary along some of the axes counts it as often as these are long."""
    missing = set(r.axes.of(axes)) - set(r.axes.of(x.node.axes))
    if not missing:
        return node
    return r.graph.binary("mul", node, as_kind(r, r.graph.const(length(r, tuple(missing))), node.kind))


@lowers("mean")
def _mean(r: Any, out: Any, x: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    node, labels, axes = reduced(r, "sum", x, dim, keepdim, "float")
    return Value(averaged(r, x, node, axes), labels, out.dtype)


def averaged(r: Any, x: Value, total: Node, axes: Sequence[int]) -> Node:
    """The mean of a sum: of what does not vary along the axes that value itself, and no rounding off."""
    varied = length(r, tuple(set(r.axes.of(axes)).intersection(r.axes.of(x.node.axes))))
    return r.graph.binary("mul", total, r.graph.const(1.0 / varied))  # type: ignore[no-any-return]


@lowers("amax")
def _amax(r: Any, out: Any, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    kind = kind_of(out.dtype)
    node, labels, _gone = reduced(r, "amax", x, dim, keepdim, "int" if kind == "bool" else kind)
    if node.op != "amax" and kind == "float":  # of equal elements, or of one: of NaN the gradient is NaN, as in any row
        is_nan = r.graph.where(r.graph.make("isnan", node), r.graph.const(math.nan), r.graph.const(1.0))
        node = differentiated(r, node, (node, is_nan))
    return Value(as_kind(r, node, kind), labels, out.dtype)


@lowers("amin")
def _amin(r: Any, out: Any, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    kind = kind_of(out.dtype)
    inner = "int" if kind == "bool" else kind
    found = _amax(r, out, Value(r.graph.unary("neg", as_kind(r, x.node, inner)), x.labels, x.dtype), dim, keepdim)
    return Value(as_kind(r, r.graph.unary("neg", as_kind(r, found.node, inner)), kind), found.labels, out.dtype)


@lowers("any")
def _any(r: Any, out: Any, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    graph = r.graph
    holds = graph.make("ne", x.node, as_kind(r, graph.const(0), x.node.kind)) if x.node.kind != "bool" else x.node
    found = as_kind(r, holds, "int")
    node, labels, _gone = reduced(r, "amax", Value(found, x.labels, x.dtype), dim, keepdim, "int")
    return Value(as_kind(r, node, "bool"), labels, out.dtype)


@lowers("all")
def _all(r: Any, out: Any, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    graph = r.graph
    fails = graph.make("eq", x.node, as_kind(r, graph.const(0), x.node.kind))
    if x.node.kind == "bool":
        fails = graph.unary("not", x.node)
    found = _any(r, out, Value(fails, x.labels, x.dtype), dim, keepdim)
    return Value(graph.unary("not", found.node), found.labels, out.dtype)


@lowers("argmax")
def _argmax(r: Any, out: Any, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    """The place of the first of the largest elements, or of the first that is not a number."""
    if dim is None:
        raise NotRowwiseError("argmax over all dimensions mixes rows; name one")
    graph = r.graph
    kind = "float" if x.node.kind == "float" else "int"
    label = x.labels[dim] if x.labels else ()
    node, size = as_kind(r, x.node, kind), length(r, label)
    given = Value(node, x.labels, x.dtype)
    largest, labels, _gone = reduced(r, "amax", given, dim, keepdim, kind)
    if largest is node:  # all are equal
        return Value(graph.const(0), labels, out.dtype)
    is_largest = graph.make("eq", node, largest)
    if kind == "float":
        is_largest = graph.binary("or", is_largest, graph.make("isnan", node))
    place = graph.make("iota", attrs=label, axes=label, kind="int")
    candidates = graph.where(is_largest, graph.unary("neg", place), graph.const(-size))
    first, _labels, _gone = reduced(r, "amax", Value(candidates, x.labels, out.dtype), dim, keepdim, "int")
    return Value(graph.unary("neg", first), labels, out.dtype)


def _negated(r: Any, x: Value) -> Value:
    kind = "float" if x.node.kind == "float" else "int"
    return Value(r.graph.unary("neg", as_kind(r, x.node, kind)), x.labels, x.dtype)


@lowers("argmin")
def _argmin(r: Any, out: Any, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return _argmax(r, out, _negated(r, x), dim, keepdim)


@lowers("min")
def _min(r: Any, out: Any, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
    if isinstance(dim, Value):
        return pointwise(r, out, lambda a, b: r.graph.binary("minimum", a, b), x, dim)
    if dim is None:
        found = _max(r, out, _negated(r, x))
        return Value(r.graph.unary("neg", found.node), found.labels, out.dtype)
    values, places = _max(r, out, _negated(r, x), dim, keepdim)
    return [Value(r.graph.unary("neg", values.node), values.labels, out[0].dtype), places]


@lowers("max")
def _max(r: Any, out: Any, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
    if isinstance(dim, Value):
        return pointwise(r, out, lambda a, b: r.graph.binary("maximum", a, b), x, dim)
    if dim is None:
        found = _amax(r, out, x)
        node = _shared_evenly(r, x, found.node, None, False) if x.node.kind == "float" else found.node
        return Value(node, found.labels, found.dtype)
    node, labels, _gone = reduced(r, "amax", x, dim, keepdim, kind_of(out[0].dtype))
    if node.op == "amax" and node is not x.node:  # only one of equal elements has the gradient
        node = r.graph.make("amax", *node.args, attrs=(*node.attrs, "first"), axes=node.axes)
    return [Value(node, labels, out[0].dtype), _argmax(r, out[1], x, dim, keepdim)]


# Longer rows are passed over tile by tile, once for each sum of differences.
_MOST_SUMMED_AGAIN = 16384


def variance(
    r: Any, x: Value, dim: Any, correction: Any, keepdim: bool, *, exact: bool = False
) -> tuple[Node, Node, tuple[Label, ...]]:
    """The variance over dimensions, and the mean, with the labels that are left.

    ``exact`` is for the mean of equal numbers to be that number, so that their deviation is zero, by one more sum.
    """
    graph = r.graph
    total, labels, axes = reduced(r, "sum", x, dim, keepdim, "float")
    count = length(r, axes)
    mean = averaged(r, x, total, axes)
    if exact and 1 < count <= _MOST_SUMMED_AGAIN and count & (count - 1):  # sums of equal powers of two are exact
        left = graph.binary("sub", as_kind(r, x.node, "float"), mean)
        off, _, _gone = reduced(r, "sum", Value(left, x.labels, x.dtype), dim, keepdim, "float")
        corrected = graph.binary("add", mean, graph.binary("mul", repeated(r, x, off, axes), graph.const(1.0 / count)))
        corrected = graph.where(graph.make("isnan", corrected), mean, corrected)  # of an infinite mean
        mean = graph.make("instead", corrected, mean)

    def about(centre: Node) -> tuple[Node, Node]:
        """Differences from a number of each row, and the sum of their squares."""
        # A variance does not change with the mean: its derivative there is zero, which a sum would find by rounding.
        left = graph.binary("sub", as_kind(r, x.node, "float"), graph.make("constant_to_gradients", centre))
        square = Value(graph.binary("mul", left, left), x.labels, x.dtype)
        return left, repeated(r, square, reduced(r, "sum", square, dim, keepdim, "float")[0], axes)

    differences, squares = about(mean)
    if exact and count > _MOST_SUMMED_AGAIN and count & (count - 1):
        # In one pass with the squares, which are then about a mean that is a rounding off.
        off, _, _gone = reduced(r, "sum", Value(differences, x.labels, x.dtype), dim, keepdim, "float")
        off = repeated(r, x, off, axes)
        step = graph.binary("mul", off, graph.const(1.0 / count))
        corrected = graph.binary("add", mean, step)
        mean = graph.make("instead", graph.where(graph.make("isnan", corrected), mean, corrected), mean)
        less = graph.binary("sub", squares, graph.binary("mul", off, step))
        less = graph.where(graph.make("lt", less, graph.const(0.0)), graph.const(0.0), less)
        squares = graph.make("instead", less, about(mean)[1])
    left = count - (1 if correction is None else correction)
    return graph.binary("mul", squares, graph.const(1.0 / left if left > 0 else math.inf)), mean, labels


@lowers("var")
def _var(r: Any, out: Any, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Value:
    var, _, labels = variance(r, x, dim, correction, keepdim, exact=True)
    return Value(var, labels, out.dtype)


@lowers("std")
def _std(r: Any, out: Any, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Value:
    var, _, labels = variance(r, x, dim, correction, keepdim, exact=True)
    return Value(r.graph.make("root", var), labels, out.dtype)


@lowers("std_mean")
def _std_mean(r: Any, out: Any, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    var, mean, labels = variance(r, x, dim, correction, keepdim, exact=True)
    return [Value(r.graph.make("root", var), labels, out[0].dtype), Value(mean, labels, out[1].dtype)]


@lowers("var_mean")
def _var_mean(r: Any, out: Any, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    var, mean, labels = variance(r, x, dim, correction, keepdim, exact=True)
    return [Value(var, labels, out[0].dtype), Value(mean, labels, out[1].dtype)]


def _shared_evenly(r: Any, x: Value, largest: Node, dim: Any, keepdim: bool) -> Node:
    """The largest element of a row, whose gradient all share that equal it: where it is NaN, those that are NaN."""
    graph = r.graph
    if largest.op != "amax":
        return largest
    equal = graph.make("eq", x.node, graph.make("constant_to_gradients", largest))
    equal = graph.binary("or", equal, graph.make("isnan", x.node))
    one = graph.where(equal, graph.const(1.0), graph.const(0.0))
    # PyTorch multiplies: a cotangent of NaN goes on.
    total, count = [reduced(r, "sum", Value(value, x.labels, x.dtype), dim, keepdim, "float")[0]
                    for value in (graph.binary("mul", x.node, one), one)]  # fmt: skip
    return graph.make("instead", largest, graph.binary("div", total, count))  # type: ignore[no-any-return]


@lowers("linalg_vector_norm", "norm")
def _vector_norm(r: Any, out: Any, x: Value, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    graph, one = r.graph, as_kind(r, x.node, "float")
    if ord not in (None, 1, 2, math.inf, -math.inf):
        return _norm_of_order(r, out, Value(one, x.labels, x.dtype), float(ord), dim, keepdim)
    node = graph.binary("mul", one, one) if ord in (None, 2) else graph.unary("abs", one)
    value = Value(graph.unary("neg", node) if ord == -math.inf else node, x.labels, x.dtype)
    is_extremum = ord in (math.inf, -math.inf)
    node, labels, axes = reduced(r, "amax" if is_extremum else "sum", value, dim, keepdim, "float")
    node = _shared_evenly(r, value, node, dim, keepdim) if is_extremum else repeated(r, value, node, axes)
    node = graph.unary("neg", node) if ord == -math.inf else node
    return Value(_root_of_norm(r, node) if ord in (2, None) else node, labels, out.dtype)


def _root_of_norm(r: Any, squares: Node) -> Node:
    """Zero has no gradient, by a product: PyTorch lets a cotangent of NaN through, as it does not for a standard deviation."""
    graph, norm = r.graph, r.graph.make("root", squares)
    is_zero, zero = graph.make("eq", norm, graph.const(0.0)), graph.const(0.0)
    slope = graph.binary("div", graph.const(0.5), graph.where(is_zero, graph.const(1.0), norm))
    return differentiated(r, norm, (squares, graph.where(is_zero, zero, slope)))


def _norm_of_order(r: Any, out: Any, x: Value, order: float, dim: Any, keepdim: bool) -> Value:
    """A root of a sum of powers; zeros have no gradient, nor has a norm of zero."""
    graph, a = r.graph, x.node
    zero, is_zero = graph.const(0.0), graph.make("eq", a, graph.const(0.0))

    def power(node: Node, exponent: float) -> Node:
        return graph.make("power", node, graph.const(exponent))  # type: ignore[no-any-return]

    def summed(node: Node) -> tuple[Node, tuple[Label, ...]]:
        value = Value(node, x.labels, x.dtype)
        total, labels, axes = reduced(r, "sum", value, dim, keepdim, "float")
        return repeated(r, value, total, axes), labels

    if order == 0:  # the number of elements that are not zero
        return Value(*summed(graph.where(is_zero, zero, graph.const(1.0))), out.dtype)
    size = graph.unary("abs", a)
    slope = graph.binary("mul", graph.unary("sign", a), power(size, order - 1.0))
    slope = graph.where(is_zero, zero, graph.binary("mul", slope, graph.const(order)))
    total, labels = summed(differentiated(r, power(size, order), (a, slope)))
    norm = power(total, 1.0 / order)
    steep = graph.binary("mul", power(norm, 1.0 - order), graph.const(1.0 / order))
    steep = graph.where(graph.make("eq", norm, zero), zero, steep)
    return Value(differentiated(r, norm, (total, steep)), labels, out.dtype)


def _largest(r: Any, x: Value, dim: int) -> Node:
    """The largest element of each row."""
    largest, _left, _gone = reduced(
        r, "amax", Value(as_kind(r, x.node, "float"), x.labels, x.dtype), dim, True, "float"
    )
    return largest


def _exponentials(r: Any, x: Value, dim: int, largest: Node) -> tuple[Node, Node, Node]:
    """Rows less a number each, such as the largest element, their exponentials, and the sums of these."""
    graph = r.graph
    node = as_kind(r, x.node, "float")
    shifted = graph.binary("sub", node, graph.make("constant_to_gradients", largest))
    exponentials = graph.unary("exp", shifted)
    value = Value(exponentials, x.labels, x.dtype)
    total, _left, axes = reduced(r, "sum", value, dim, True, "float")
    return shifted, exponentials, repeated(r, value, total, axes)


@lowers("_softmax")
def _softmax(r: Any, out: Any, x: Value, dim: int, *_: Any, **__: Any) -> Value:
    _shifted, exponentials, total = _exponentials(r, x, dim, _largest(r, x, dim))
    return Value(r.graph.binary("div", exponentials, total), x.labels, out.dtype)


@lowers("_safe_softmax")
def _safe_softmax(r: Any, out: Any, x: Value, dim: int, *_: Any, **__: Any) -> Value:
    """Zero in rows of nothing but minus infinity."""
    graph, largest = r.graph, _largest(r, x, dim)
    is_nothing = graph.make("eq", largest, graph.const(-math.inf))
    _shifted, exponentials, total = _exponentials(r, x, dim, graph.where(is_nothing, graph.const(0.0), largest))
    return Value(
        graph.binary("div", exponentials, graph.where(is_nothing, graph.const(1.0), total)), x.labels, out.dtype
    )


@lowers("_log_softmax")
def _log_softmax(r: Any, out: Any, x: Value, dim: int, *_: Any) -> Value:
    shifted, _inner, total = _exponentials(r, x, dim, _largest(r, x, dim))
    return Value(r.graph.binary("sub", shifted, r.graph.unary("log", total)), x.labels, out.dtype)


@lowers("logsumexp")
def _logsumexp(r: Any, out: Any, x: Value, dim: Any, keepdim: bool = False) -> Value:
    graph = r.graph
    dims = [dim] if isinstance(dim, int) else list(dim)
    node = as_kind(r, x.node, "float")
    largest, labels, axes = reduced(r, "amax", Value(node, x.labels, x.dtype), dims, keepdim, "float")
    largest = graph.make("constant_to_gradients", largest)
    exponentials = graph.unary("exp", graph.binary("sub", node, largest))
    total, _left, _gone = reduced(r, "sum", Value(exponentials, x.labels, x.dtype), dims, keepdim, "float")
    total = repeated(r, x, total, axes)
    # Of a row with an infinite maximum that is the result; PyTorch's too.
    infinite = graph.make("eq", graph.unary("abs", largest), graph.const(math.inf))
    found = graph.where(infinite, largest, graph.binary("add", graph.unary("log", total), largest))
    # Beside an infinite element the others have no gradient.
    whole = graph.make("constant_to_gradients", graph.where(infinite, graph.const(1.0), total))
    return Value(graph.make("instead", found, graph.binary("div", total, whole)), labels, out.dtype)


@lowers("gather")
def gather(r: Any, out: Any, x: Value, dim: int, index: Value, **_: Any) -> Value:
    """One column of each row, by its number."""
    if not x.labels:
        raise NotRowwiseError("gather from a number")
    dim %= len(x.labels)
    if index.labels[dim]:
        raise NotRowwiseError("gather takes more than one column of a row")
    shared = joined(r, tuple([() if d == dim else one for d, one in enumerate(x.labels)]), index.labels)
    node = picked(r, x, dim, index.node)
    return Value(where_within(r, index.node, length(r, x.labels[dim]), node, out.dtype), shared, out.dtype)


@lowers("nll_loss_forward")
def _nll_loss(r: Any, out: Any, x: Value, target: Value, weight: Any, reduction: int, ignore_index: int) -> Any:
    """The loss of each row; over rows it is the caller's to sum."""
    if reduction != 0 or weight is not None:
        raise NotRowwiseError("a loss over all rows mixes rows; use reduction='none' and sum outside"
                              if reduction else "a loss with weights of classes; multiply by weight[target] outside")  # fmt: skip
    graph = r.graph
    index = Value(target.node, (*target.labels, ()), target.dtype)
    element = gather(r, out[0], x, len(x.labels) - 1, index)
    labels = element.labels[:-1]
    left_out = graph.make("eq", as_kind(r, target.node, "int"), graph.const(ignore_index))
    loss = graph.where(left_out, graph.const(0.0), graph.unary("neg", element.node))
    return [Value(loss, labels, out[0].dtype), None]
