"""Losses element by element, with PyTorch's derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import NotRowwiseError
from ..ir import Node
from ..traced import Value
from .common import as_kind, differentiated, lowers, pointwise
from .reductions import gather, length, reduced


def _check_unreduced(reduction: int) -> None:
    if reduction != 0:
        raise NotRowwiseError(
            "a loss over all rows mixes rows; use reduction='none' and sum outside"
        )


def _of_difference(
    r: Any, out: Any, x: Value, target: Value, loss: Callable[[Node], tuple[Node, Node]]
) -> Value:
    """A loss of the difference of two tensors.

    Args:
        loss: returns the loss and its derivative, for a difference.
    """

    # The derivative by the difference is enough: the gradient goes on to both tensors through the
    # subtraction.
    def both(a: Node, b: Node) -> Node:
        difference = r.graph.binary("sub", a, b)
        value, partial = loss(difference)
        return differentiated(r, value, (difference, partial))

    return pointwise(r, out, both, x, target)


@lowers("huber_loss")
def _huber(
    r: Any, out: Any, x: Value, target: Value, reduction: int = 1, delta: float = 1.0
) -> Value:
    _check_unreduced(reduction)
    if x.dtype != target.dtype:
        raise NotRowwiseError(
            "huber_loss of two dtypes, whose result has the first one's dtype; convert one of them"
        )
    graph = r.graph
    width = r.graph.const(float(delta))

    def loss(d: Node) -> tuple[Node, Node]:
        size = graph.unary("abs", d)
        square = graph.binary("mul", graph.binary("mul", size, graph.const(0.5)), size)
        line = graph.binary("mul", graph.binary("sub", size, graph.const(0.5 * delta)), width)
        return graph.where(graph.make("le", size, width), square, line), _limited(graph, d, width)

    return _of_difference(r, out, x, target, loss)


def _limited(graph: Any, d: Node, width: Node) -> Node:
    """A difference, limited on either side; NaN stays."""
    minus = graph.unary("neg", width)
    inner = graph.where(graph.make("ge", d, width), width, d)
    return graph.where(graph.make("le", d, minus), minus, inner)  # type: ignore[no-any-return]


@lowers("smooth_l1_loss")
def _smooth_l1(
    r: Any, out: Any, x: Value, target: Value, reduction: int = 1, beta: float = 1.0
) -> Value:
    if beta < 0:
        raise RuntimeError("smooth_l1_loss does not support negative values for beta.")
    _check_unreduced(reduction)
    graph = r.graph
    width = r.graph.const(float(beta))

    def loss(d: Node) -> tuple[Node, Node]:
        size = graph.unary("abs", d)
        line = graph.binary("sub", size, graph.const(0.5 * beta))
        if beta == 0:
            return line, graph.unary("sign", d)
        half_square = graph.binary("mul", graph.binary("mul", size, graph.const(0.5)), size)
        square = graph.binary("div", half_square, width)
        is_far = graph.make("ge", size, width)
        slope = graph.where(is_far, graph.unary("sign", d), graph.binary("div", d, width))
        return graph.where(is_far, line, square), slope

    return _of_difference(r, out, x, target, loss)


@lowers("binary_cross_entropy")
def _binary_cross_entropy(
    r: Any, out: Any, x: Value, target: Value, weight: Any = None, reduction: int = 1
) -> Value:
    """The loss of probabilities; NaN for one outside [0, 1], for which PyTorch raises an error."""
    _check_unreduced(reduction)
    graph: Any = r.graph
    least = graph.const(-100.0)
    one = graph.const(1.0)

    def loss(a: Node, t: Node, *weights: Node) -> Node:
        # PyTorch limits the logarithms, and the divisor of the derivative. So loss and gradient are
        # finite for a probability of 0 or 1.
        log_wrong = graph.unary("log1p", graph.unary("neg", a))
        log_right = graph.unary("log", a)
        # The loss is (t - 1) * log(1 - a) - t * log(a).
        minus_rest = graph.binary("sub", t, one)
        wrong = graph.binary("mul", minus_rest, graph.binary("maximum", log_wrong, least))
        right = graph.binary("mul", t, graph.binary("maximum", log_right, least))
        value = graph.binary("sub", wrong, right)
        spread = graph.binary("mul", graph.binary("sub", one, a), a)
        floor = graph.const(1e-12)
        difference = graph.binary("sub", a, t)
        divisor = graph.where(graph.make("lt", spread, floor), floor, spread)
        by_input = graph.binary("div", difference, divisor)
        by_target = graph.binary("sub", log_wrong, log_right)
        value = differentiated(r, value, (a, by_input), (t, by_target))
        if not weights:
            return value
        return graph.binary("mul", value, weights[0])  # type: ignore[no-any-return]

    weights = [] if weight is None else [weight]
    return pointwise(r, out, loss, x, target, *weights)


@lowers("multi_margin_loss")
def _multi_margin(
    r: Any,
    out: Any,
    x: Value,
    target: Value,
    p: Any = 1,
    margin: Any = 1,
    weight: Any = None,
    reduction: int = 1,
) -> Value:
    """The mean over the columns ``i`` of ``max(0, margin - x[target] + x[i]) ** p``.

    The target's own column counts as 0. At the edge of the margin there is no gradient.
    """
    _check_unreduced(reduction)
    if weight is not None:
        raise NotRowwiseError("a loss with weights of classes; multiply by weight[target] outside")
    graph = r.graph
    zero = r.graph.const(0.0)
    last = len(x.labels) - 1
    index = Value(target.node, (*target.labels, ()), target.dtype)
    right = gather(r, out, x, last, index)
    label = x.labels[last]
    short = graph.binary("add", graph.binary("sub", graph.const(float(margin)), right.node), x.node)
    short = graph.where(graph.make("gt", short, zero), short, zero)
    if p == 2:
        short = graph.binary("mul", short, short)
    column = graph.make("iota", attrs=label, axes=label, kind="int")
    is_right = graph.make("eq", column, as_kind(r, target.node, "int"))
    short = graph.where(is_right, zero, short)
    value = Value(short, x.labels, x.dtype)
    total, labels, axes = reduced(r, "sum", value, last, False, "float")
    # For a target out of range `gather` returns NaN, which is then the loss.
    is_no_class = graph.make("isnan", right.node)
    mean = graph.binary("mul", total, graph.const(1.0 / length(r, axes)))
    return Value(graph.where(is_no_class, right.node, mean), labels, out.dtype)
