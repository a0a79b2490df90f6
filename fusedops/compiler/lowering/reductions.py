"""Reductions over rows, and operators that consist of them: variances, norms, softmax, losses.

Some graphs have a node ``instead(a, b)``: it has the value of ``a`` and the gradient of ``b``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..axes import Label
from ..errors import NotRowwiseError
from ..ir import Node
from ..structure import within
from ..traced import Value, kind_of
from .common import (
    as_integer,
    as_kind,
    check_computes,
    differentiated,
    joined,
    lowers,
    picked,
    pointwise,
    where_within,
)


def reduced(
    r: Any, op: str, x: Value, dims: Any, keepdim: bool, kind: str
) -> tuple[Node, tuple[Label, ...], list[int]]:
    """A reduction over dimensions.

    Only the axes along which the value varies are reduced. If the value is constant along one of
    ``axes``, the caller multiplies a sum by its length: see `repeated`.

    Args:
        dims: one or several dimensions; None or empty for all.
    Returns:
        node: the reduction, or the value itself if it is constant along all of ``axes``.
        labels: the labels of the result's dimensions.
        axes: the axes of the reduced dimensions.
    """
    check_computes(x)
    over = _dims_over(dims, len(x.labels))
    axes = [axis for d in sorted(over) for axis in x.labels[d]]
    node = as_kind(r, x.node, kind)
    labels: list[Label] = []
    for d, label in enumerate(x.labels):
        if d not in over:
            labels.append(label)
        elif keepdim:
            labels.append(())
    varying = r.axes.leaves_of(node.axes)
    reduced_axes = set(r.axes.leaves_of(axes))
    along = tuple(within(varying, reduced_axes))
    if along:
        remaining_axes = frozenset(varying) - reduced_axes
        node = r.graph.make(op, node, attrs=(along,), axes=remaining_axes)
    return node, tuple(labels), axes


def _dims_over(dims: Any, rank: int) -> set[int]:
    if rank == 0:
        return set()
    if isinstance(dims, int):
        return {dims % rank}
    return {d % rank for d in dims or range(rank)}


def length(r: Any, axes: Sequence[int]) -> int:
    """The number of elements along axes."""
    return r.axes.size(r.axes.leaves_of(axes))


@lowers("sum")
def _sum(r: Any, out: Any, x: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    kind = kind_of(out.dtype)
    node, labels, axes = reduced(r, "sum", x, dim, keepdim, kind)
    node = repeated(r, x, node, axes)
    if kind == "int":
        node = as_integer(r, node, torch.int64, out.dtype)
    return Value(node, labels, out.dtype)


def repeated(r: Any, x: Value, node: Node, axes: Sequence[int]) -> Node:
    """The sum ``node`` of ``x``, times the length of the axes along which ``x`` is constant."""
    missing = set(r.axes.leaves_of(axes)) - set(r.axes.leaves_of(x.node.axes))
    if not missing:
        return node
    count = as_kind(r, r.graph.const(length(r, tuple(missing))), node.kind)
    return r.graph.binary("mul", node, count)


@lowers("mean")
def _mean(r: Any, out: Any, x: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    node, labels, axes = reduced(r, "sum", x, dim, keepdim, "float")
    return Value(averaged(r, x, node, axes), labels, out.dtype)


def averaged(r: Any, x: Value, total: Node, axes: Sequence[int]) -> Node:
    """The mean of ``x`` from its sum ``total``, over the axes along which ``x`` varies.

    The other axes are left out of both sum and count: the mean of a constant is that constant,
    without a rounding.
    """
    varied = set(r.axes.leaves_of(axes)).intersection(r.axes.leaves_of(x.node.axes))
    node: Node = r.graph.binary("mul", total, r.graph.const(1.0 / length(r, tuple(varied))))
    return node


@lowers("amax")
def _amax(r: Any, out: Any, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    graph = r.graph
    kind = kind_of(out.dtype)
    node, labels, _axes = reduced(r, "amax", x, dim, keepdim, _ordered_kind(kind))
    is_reduced = node.op == "amax"
    if kind == "float" and not is_reduced:
        # All elements are one value, which is its own maximum. If it is NaN, so is its gradient, as
        # in a row that is reduced.
        is_nan = graph.make("isnan", node)
        factor = graph.where(is_nan, graph.const(math.nan), graph.const(1.0))
        node = differentiated(r, node, (node, factor))
    return Value(as_kind(r, node, kind), labels, out.dtype)


def _ordered_kind(kind: str) -> str:
    """The kind in which values are compared: truth values are integers then."""
    return "int" if kind == "bool" else kind


@lowers("amin")
def _amin(r: Any, out: Any, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    kind = kind_of(out.dtype)
    inner = _ordered_kind(kind)
    opposite = _opposite(r, as_kind(r, x.node, inner))
    largest = _amax(r, out, Value(opposite, x.labels, x.dtype), dim, keepdim)
    smallest = _opposite(r, as_kind(r, largest.node, inner))
    return Value(as_kind(r, smallest, kind), largest.labels, out.dtype)


@lowers("any")
def _any(r: Any, out: Any, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    condition = x.node
    if condition.kind != "bool":
        condition = r.graph.make("ne", x.node, as_kind(r, r.graph.const(0), x.node.kind))
    value = Value(as_kind(r, condition, "int"), x.labels, x.dtype)
    node, labels, _axes = reduced(r, "amax", value, dim, keepdim, "int")
    return Value(as_kind(r, node, "bool"), labels, out.dtype)


@lowers("all")
def _all(r: Any, out: Any, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    graph = r.graph
    fails = graph.make("eq", x.node, as_kind(r, graph.const(0), x.node.kind))
    if x.node.kind == "bool":
        fails = graph.unary("not", x.node)
    any_fails = _any(r, out, Value(fails, x.labels, x.dtype), dim, keepdim)
    return Value(graph.unary("not", any_fails.node), any_fails.labels, out.dtype)


@lowers("argmax")
def _argmax(r: Any, out: Any, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    """The index of the first of the largest elements, or of the first NaN."""
    if dim is None:
        raise NotRowwiseError("argmax over all dimensions mixes rows; name one")
    graph = r.graph
    kind = "float" if x.node.kind == "float" else "int"
    label = x.labels[dim] if x.labels else ()
    node = as_kind(r, x.node, kind)
    size = length(r, label)
    value = Value(node, x.labels, x.dtype)
    largest, labels, _axes = reduced(r, "amax", value, dim, keepdim, kind)
    if largest is node:  # all are equal
        return Value(graph.const(0), labels, out.dtype)
    is_largest = graph.make("eq", node, largest)
    if kind == "float":
        is_largest = graph.binary("or", is_largest, graph.make("isnan", node))
    # The first index is the smallest. There is no reduction for the smallest, so it is computed as
    # the largest of the negated indices.
    index = graph.make("iota", attrs=label, axes=label, kind="int")
    candidates = graph.where(is_largest, graph.unary("neg", index), graph.const(-size))
    value = Value(candidates, x.labels, out.dtype)
    first, _labels, _axes = reduced(r, "amax", value, dim, keepdim, "int")
    return Value(graph.unary("neg", first), labels, out.dtype)


def _opposite(r: Any, node: Node) -> Node:
    """A value that reverses the order: for a float its negative, for an integer its complement.

    The least integer has no negative, but it has a complement, ``-1 - x``.
    """
    if node.kind == "float":
        return r.graph.unary("neg", node)
    return r.graph.binary("sub", r.graph.const(-1), node)


def _in_opposite_order(r: Any, x: Value) -> Value:
    kind = "float" if x.node.kind == "float" else "int"
    return Value(_opposite(r, as_kind(r, x.node, kind)), x.labels, x.dtype)


@lowers("argmin")
def _argmin(r: Any, out: Any, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return _argmax(r, out, _in_opposite_order(r, x), dim, keepdim)


@lowers("min")
def _min(r: Any, out: Any, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
    if isinstance(dim, Value):  # of two tensors
        return pointwise(r, out, lambda a, b: r.graph.binary("minimum", a, b), x, dim)
    if dim is None:
        largest = _max(r, out, _in_opposite_order(r, x))
        return Value(_opposite(r, largest.node), largest.labels, out.dtype)
    kind = kind_of(out[0].dtype)
    ordered = Value(as_kind(r, x.node, _ordered_kind(kind)), x.labels, x.dtype)
    opposite = _in_opposite_order(r, ordered)
    node, labels = _largest_along(r, opposite, dim, keepdim)
    values = Value(as_kind(r, _opposite(r, node), kind), labels, out[0].dtype)
    return [values, _argmax(r, out[1], opposite, dim, keepdim)]


@lowers("max")
def _max(r: Any, out: Any, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
    if isinstance(dim, Value):  # of two tensors
        return pointwise(r, out, lambda a, b: r.graph.binary("maximum", a, b), x, dim)
    if dim is None:
        largest = _amax(r, out, x)
        node = largest.node
        if x.node.kind == "float":
            node = _shared_evenly(r, x, node, None, False)
        return Value(node, largest.labels, largest.dtype)
    node, labels = _largest_along(r, x, dim, keepdim)
    node = as_kind(r, node, kind_of(out[0].dtype))
    return [Value(node, labels, out[0].dtype), _argmax(r, out[1], x, dim, keepdim)]


def _largest_along(r: Any, x: Value, dim: Any, keepdim: bool) -> tuple[Node, Any]:
    """The largest element along a dimension, and its labels.

    The first of equal elements gets the gradient.
    """
    node, labels, _axes = reduced(r, "amax", x, dim, keepdim, _ordered_kind(x.node.kind))
    if node.op == "amax" and node is not x.node:
        node = r.graph.make("amax", *node.args, attrs=(*node.attrs, "first"), axes=node.axes)
    return node, labels


# --- variances ------------------------------------------------------------------------------------

# The most columns of a row for which the mean is corrected by a sum of its own. A program holds
# such a row whole, so that another sum reads nothing again. A longer row is read tile by tile, once
# more for each sum that depends on an earlier one. There one pass computes both the sum that
# corrects the mean and the sum of squares.
_LONGEST_WITH_OWN_CORRECTION = 16384


# The variance of N equal numbers is zero. But the sum of the numbers may be rounded, and then the
# computed variance is not:
#
#   mean                        has a rounding error
#   x - mean                    is minus that error, and its size is the standard deviation
#   mean + sum(x - mean) / N    is exact: the corrected mean
#
# A norm adds an epsilon to its variance. The error is negligible beside it, so that its mean is not
# corrected.


def variance(
    r: Any, x: Value, dim: Any, correction: Any, keepdim: bool, *, exact: bool = False
) -> tuple[Node, Node, tuple[Label, ...]]:
    """The variance over dimensions, the mean, and the labels of their dimensions.

    ``exact`` corrects the mean by one more sum, so that the variance of equal numbers is zero.
    """
    graph = r.graph

    def summed(node: Node) -> Node:
        value = Value(node, x.labels, x.dtype)
        return reduced(r, "sum", value, dim, keepdim, "float")[0]

    def about(centre: Node) -> tuple[Node, Node]:
        """The differences from ``centre``, a number of each row, and the sum of their squares."""
        # The derivative of sum((x - c)**2) by c is -2 sum(x - c), which is zero at the mean. As a
        # constant, the centre adds exactly zero to the gradient, and no rounding error of that sum.
        centre = graph.make("constant_to_gradients", centre)
        difference = graph.binary("sub", as_kind(r, x.node, "float"), centre)
        square = Value(graph.binary("mul", difference, difference), x.labels, x.dtype)
        return difference, repeated(r, square, summed(square.node), axes)

    def corrected(mean: Node, step: Node) -> Node:
        """The mean plus a correction, with the gradient of the mean alone.

        An infinite mean, whose correction is NaN, is not corrected.
        """
        total = graph.binary("add", mean, step)
        total = graph.where(graph.make("isnan", total), mean, total)
        return graph.make("instead", total, mean)  # type: ignore[no-any-return]

    total, labels, axes = reduced(r, "sum", x, dim, keepdim, "float")
    count = length(r, axes)
    mean = averaged(r, x, total, axes)
    # Sums of equal numbers are exact where their count is a power of two.
    is_inexact = bool(exact and count & (count - 1))
    if is_inexact and count <= _LONGEST_WITH_OWN_CORRECTION:
        deviations = graph.binary("sub", as_kind(r, x.node, "float"), mean)
        deviation_sum = repeated(r, x, summed(deviations), axes)
        mean = corrected(mean, graph.binary("mul", deviation_sum, graph.const(1.0 / count)))

    differences, squares = about(mean)
    if is_inexact and count > _LONGEST_WITH_OWN_CORRECTION:
        # One pass sums the differences d = x - m from the uncorrected mean m, and their squares:
        #
        #   step = sum(d) / N             the corrected mean is m + step
        #   sum(d**2) - sum(d) * step     equals sum((d - step)**2), the sum about that mean
        #
        # A rounding error may make the last difference negative, so zero is its least value.
        deviation_sum = repeated(r, x, summed(differences), axes)
        step = graph.binary("mul", deviation_sum, graph.const(1.0 / count))
        mean = corrected(mean, step)
        shifted = graph.binary("sub", squares, graph.binary("mul", deviation_sum, step))
        is_negative = graph.make("lt", shifted, graph.const(0.0))
        shifted = graph.where(is_negative, graph.const(0.0), shifted)
        squares = graph.make("instead", shifted, about(mean)[1])
    divisor = count - (1 if correction is None else correction)
    factor = graph.const(1.0 / divisor if divisor > 0 else math.inf)
    return graph.binary("mul", squares, factor), mean, labels


@lowers("var")
def _var(
    r: Any, out: Any, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Value:
    var, _, labels = variance(r, x, dim, correction, keepdim, exact=True)
    return Value(var, labels, out.dtype)


@lowers("std")
def _std(
    r: Any, out: Any, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Value:
    var, _, labels = variance(r, x, dim, correction, keepdim, exact=True)
    return Value(r.graph.make("root", var), labels, out.dtype)


@lowers("std_mean")
def _std_mean(
    r: Any, out: Any, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    var, mean, labels = variance(r, x, dim, correction, keepdim, exact=True)
    return [
        Value(r.graph.make("root", var), labels, out[0].dtype),
        Value(mean, labels, out[1].dtype),
    ]


@lowers("var_mean")
def _var_mean(
    r: Any, out: Any, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    var, mean, labels = variance(r, x, dim, correction, keepdim, exact=True)
    return [Value(var, labels, out[0].dtype), Value(mean, labels, out[1].dtype)]


# --- extrema whose gradient is shared, and norms --------------------------------------------------


def _shared_evenly(r: Any, x: Value, largest: Node, dim: Any, keepdim: bool) -> Node:
    """The largest element of a row; all elements that equal it share its gradient.

    If it is NaN, the elements that are NaN share the gradient. The value is ``largest``. The
    gradient is that of the mean of the elements that equal it: ``sum(x * one) / sum(one)``.
    """
    graph = r.graph
    if largest.op != "amax":
        return largest
    equal = graph.make("eq", x.node, graph.make("constant_to_gradients", largest))
    equal = graph.binary("or", equal, graph.make("isnan", x.node))
    one = graph.where(equal, graph.const(1.0), graph.const(0.0))
    # A product, as in PyTorch, and no `where`: a NaN from the gradient of the output reaches all
    # elements of the row.
    product = graph.binary("mul", x.node, one)
    total, count = [
        reduced(r, "sum", Value(node, x.labels, x.dtype), dim, keepdim, "float")[0]
        for node in (product, one)
    ]
    node: Node = graph.make("instead", largest, graph.binary("div", total, count))
    return node


@lowers("linalg_vector_norm", "norm")
def _vector_norm(
    r: Any, out: Any, x: Value, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any
) -> Value:
    graph, x = r.graph, Value(as_kind(r, x.node, "float"), x.labels, x.dtype)
    order = 2 if ord is None else ord
    if order in (math.inf, -math.inf):
        return _norm_by_extremum(r, out, x, order, dim, keepdim)
    if order not in (1, 2):
        return _norm_of_order(r, out, x, float(order), dim, keepdim)
    node = graph.binary("mul", x.node, x.node) if order == 2 else graph.unary("abs", x.node)
    value = Value(node, x.labels, x.dtype)
    total, labels, axes = reduced(r, "sum", value, dim, keepdim, "float")
    total = repeated(r, value, total, axes)
    return Value(_root_of_norm(r, total) if order == 2 else total, labels, out.dtype)


def _norm_by_extremum(r: Any, out: Any, x: Value, order: float, dim: Any, keepdim: bool) -> Value:
    """The largest absolute value, or the smallest for the order minus infinity.

    The smallest is computed as the largest of the negated values.
    """
    is_smallest = order < 0
    node = r.graph.unary("abs", x.node)
    if is_smallest:
        node = r.graph.unary("neg", node)
    value = Value(node, x.labels, x.dtype)
    node, labels, _axes = reduced(r, "amax", value, dim, keepdim, "float")
    node = _shared_evenly(r, value, node, dim, keepdim)
    if is_smallest:
        node = r.graph.unary("neg", node)
    return Value(node, labels, out.dtype)


def _root_of_norm(r: Any, squares: Node) -> Node:
    """The root of a sum of squares; a norm of zero has a gradient of zero.

    That gradient is the output's times zero, so that it is NaN if the output's is, as in PyTorch's
    norm. The derivative of the op ``root`` selects zero instead, as in PyTorch's `std`.
    """
    graph = r.graph
    norm = r.graph.make("root", squares)
    is_zero = graph.make("eq", norm, graph.const(0.0))
    zero = graph.const(0.0)
    slope = graph.binary("div", graph.const(0.5), graph.where(is_zero, graph.const(1.0), norm))
    return differentiated(r, norm, (squares, graph.where(is_zero, zero, slope)))


def _norm_of_order(r: Any, out: Any, x: Value, order: float, dim: Any, keepdim: bool) -> Value:
    """A root of a sum of powers; an element of zero, and a norm of zero, have zero gradients."""
    graph = r.graph
    a = x.node
    zero = graph.const(0.0)
    is_zero = graph.make("eq", a, zero)

    def power(node: Node, exponent: float) -> Node:
        return graph.make("power", node, graph.const(exponent))  # type: ignore[no-any-return]

    def summed(node: Node) -> tuple[Node, tuple[Label, ...]]:
        value = Value(node, x.labels, x.dtype)
        total, labels, axes = reduced(r, "sum", value, dim, keepdim, "float")
        return repeated(r, value, total, axes), labels

    def rooted(total: Node) -> Node:
        norm = power(total, 1.0 / order)
        by_total = graph.binary("mul", power(norm, 1.0 - order), graph.const(1.0 / order))
        by_total = graph.where(graph.make("eq", norm, zero), zero, by_total)
        return differentiated(r, norm, (total, by_total))

    if order == 0:  # the number of elements that are not zero
        return Value(*summed(graph.where(is_zero, zero, graph.const(1.0))), out.dtype)
    absolute = graph.unary("abs", a)
    by_element = graph.binary("mul", graph.unary("sign", a), power(absolute, order - 1.0))
    by_element = graph.where(is_zero, zero, graph.binary("mul", by_element, graph.const(order)))
    total, labels = summed(differentiated(r, power(absolute, order), (a, by_element)))
    if order < 1:
        return Value(rooted(total), labels, out.dtype)
    # A norm of zero is selected by `where`, as in PyTorch: its gradient is then zero even if the
    # output's is NaN. There `rooted` gets one instead of zero, because the derivative at zero is
    # infinite, and a second derivative would multiply it by zero, which is NaN.
    is_zero_norm = graph.make("eq", total, zero)
    norm = rooted(graph.where(is_zero_norm, graph.const(1.0), total))
    return Value(graph.where(is_zero_norm, zero, norm), labels, out.dtype)


# --- softmax and losses ---------------------------------------------------------------------------


def _largest(r: Any, x: Value, dim: int) -> Node:
    """The largest element of each row."""
    value = Value(as_kind(r, x.node, "float"), x.labels, x.dtype)
    largest, _labels, _axes = reduced(r, "amax", value, dim, True, "float")
    return largest


def _exponentials(r: Any, x: Value, dim: int, largest: Node) -> tuple[Node, Node, Node]:
    """``x - largest``, the exponentials of that, and their sums over each row.

    A softmax does not depend on what is subtracted. So `_safe_softmax` may pass zero for
    ``largest`` if the largest element is minus infinity.
    """
    graph = r.graph
    node = as_kind(r, x.node, "float")
    shifted = graph.binary("sub", node, graph.make("constant_to_gradients", largest))
    exponentials = graph.unary("exp", shifted)
    value = Value(exponentials, x.labels, x.dtype)
    total, _labels, axes = reduced(r, "sum", value, dim, True, "float")
    return shifted, exponentials, repeated(r, value, total, axes)


@lowers("_softmax")
def _softmax(r: Any, out: Any, x: Value, dim: int, *_: Any, **__: Any) -> Value:
    _shifted, exponentials, total = _exponentials(r, x, dim, _largest(r, x, dim))
    return Value(r.graph.binary("div", exponentials, total), x.labels, out.dtype)


@lowers("_safe_softmax")
def _safe_softmax(r: Any, out: Any, x: Value, dim: int, *_: Any, **__: Any) -> Value:
    """The softmax, with zeros for rows of nothing but minus infinity."""
    graph = r.graph
    largest = _largest(r, x, dim)
    is_nothing = graph.make("eq", largest, graph.const(-math.inf))
    shift = graph.where(is_nothing, graph.const(0.0), largest)
    _shifted, exponentials, total = _exponentials(r, x, dim, shift)
    divisor = graph.where(is_nothing, graph.const(1.0), total)
    return Value(graph.binary("div", exponentials, divisor), x.labels, out.dtype)


@lowers("_log_softmax")
def _log_softmax(r: Any, out: Any, x: Value, dim: int, *_: Any) -> Value:
    shifted, _inner, total = _exponentials(r, x, dim, _largest(r, x, dim))
    return Value(r.graph.binary("sub", shifted, r.graph.unary("log", total)), x.labels, out.dtype)


@lowers("logsumexp")
def _logsumexp(r: Any, out: Any, x: Value, dim: Any, keepdim: bool = False) -> Value:
    graph = r.graph
    dims = [dim] if isinstance(dim, int) else list(dim)
    node = as_kind(r, x.node, "float")
    value = Value(node, x.labels, x.dtype)
    largest, labels, axes = reduced(r, "amax", value, dims, keepdim, "float")
    largest = graph.make("constant_to_gradients", largest)
    exponentials = graph.unary("exp", graph.binary("sub", node, largest))
    value = Value(exponentials, x.labels, x.dtype)
    total, _labels, _axes = reduced(r, "sum", value, dims, keepdim, "float")
    total = repeated(r, x, total, axes)
    # An infinite maximum is the row's result, as in PyTorch.
    infinite = graph.make("eq", graph.unary("abs", largest), graph.const(math.inf))
    logarithm = graph.binary("add", graph.unary("log", total), largest)
    result = graph.where(infinite, largest, logarithm)
    # The gradient is that of log(total): total / c with the constant c = total. In a row with an
    # infinite maximum c is one, as total is NaN: the finite elements then have a gradient of zero.
    divisor = graph.where(infinite, graph.const(1.0), total)
    divisor = graph.make("constant_to_gradients", divisor)
    gradient = graph.binary("div", total, divisor)
    return Value(graph.make("instead", result, gradient), labels, out.dtype)


def gather(r: Any, out: Any, x: Value, dim: int, index: Value, **_: Any) -> Value:
    """One column of each row, by its number."""
    if not x.labels:
        raise NotRowwiseError("gather from a number")
    dim %= len(x.labels)
    # The rows of both; the picked dimension is that of the index.
    rows = [() if d == dim else label for d, label in enumerate(x.labels)]
    labels = joined(r, tuple(rows), index.labels)
    node = picked(r, x, dim, index.node)
    node = where_within(r, index.node, length(r, x.labels[dim]), node, out.dtype)
    return Value(node, labels, out.dtype)


@lowers("nll_loss_forward")
def _nll_loss(
    r: Any, out: Any, x: Value, target: Value, weight: Any, reduction: int, ignore_index: int
) -> Any:
    """The loss of each row; the caller sums over rows."""
    if reduction != 0:
        raise NotRowwiseError(
            "a loss over all rows mixes rows; use reduction='none' and sum outside"
        )
    if weight is not None:
        raise NotRowwiseError("a loss with weights of classes; multiply by weight[target] outside")
    graph = r.graph
    index = Value(target.node, (*target.labels, ()), target.dtype)
    element = gather(r, out[0], x, len(x.labels) - 1, index)
    labels = element.labels[:-1]
    left_out = graph.make("eq", as_kind(r, target.node, "int"), graph.const(ignore_index))
    loss = graph.where(left_out, graph.const(0.0), graph.unary("neg", element.node))
    return [Value(loss, labels, out[0].dtype), None]
