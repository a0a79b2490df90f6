"""Activations whose derivatives are formulas of their own, as in PyTorch.

The derivative of the forward's formula would not do: a ``where`` whose branch overflows has a
derivative of zero times infinity, and at a kink the derivative is a convention.
"""

from __future__ import annotations

import math
from typing import Any

from ..ir import Node
from ..traced import Value
from .common import as_kind, differentiated, lowers, pointwise


@lowers("elu", "elu_")
def _elu(
    r: Any, out: Any, x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> Value:
    graph = r.graph

    def elu(a: Node) -> Node:
        zero = graph.const(0.0)
        is_negative = graph.make("le", a, zero)
        inner = graph.binary("mul", a, graph.const(float(input_scale)))
        height = graph.const(float(alpha * scale))
        slope = graph.const(float(scale))
        # Second derivatives differentiate these formulas. They multiply the branch that is not
        # selected by zero. So that branch computes the exponential of zero: an overflow, times
        # zero, would be NaN. At zero PyTorch's second derivative is zero.
        curve = graph.unary("expm1", graph.where(is_negative, inner, zero))
        curve = graph.binary("mul", curve, height)
        result = graph.where(is_negative, curve, graph.binary("mul", a, slope))
        steepness = graph.const(float(alpha * scale * input_scale))
        steep = graph.unary("exp", graph.where(graph.make("lt", a, zero), inner, zero))
        steep = graph.binary("mul", steep, steepness)
        return differentiated(r, result, (a, graph.where(is_negative, steep, slope)))

    return pointwise(r, out, elu, x)


@lowers("celu", "celu_")
def _celu(r: Any, out: Any, x: Value, alpha: float = 1.0) -> Value:
    return _elu(r, out, x, alpha, 1.0, 1.0 / alpha)


@lowers("hardtanh", "hardtanh_")
def _hardtanh(r: Any, out: Any, x: Value, min_val: float = -1.0, max_val: float = 1.0) -> Value:
    """The elements, limited from both sides; an element at a limit has no gradient."""
    graph = r.graph

    def hardtanh(a: Node) -> Node:
        for comparison, limit in (("le", min_val), ("ge", max_val)):
            bound = as_kind(r, graph.const(float(limit)), a.kind)
            a = graph.where(graph.make(comparison, a, bound), bound, a)
        return a

    return pointwise(r, out, hardtanh, x)


@lowers("softshrink")
def _softshrink(r: Any, out: Any, x: Value, lambd: float = 0.5) -> Value:
    """The elements, moved towards zero by ``lambd``; those that become zero have no gradient."""
    graph: Any = r.graph
    zero = graph.const(0.0)
    low = graph.const(-float(lambd))
    high = graph.const(float(lambd))

    def softshrink(a: Node) -> Node:
        nearer = graph.binary("sub", a, graph.binary("mul", graph.unary("sign", a), high))
        is_far = graph.make("gt", graph.unary("abs", a), high)
        # Near zero the result is a * 0, so that NaN, for which ``is_far`` is False, stays NaN.
        result = graph.where(is_far, nearer, graph.binary("mul", a, zero))
        is_inside = graph.binary("and", graph.make("ge", a, low), graph.make("le", a, high))
        # The gradient goes through a selection: near zero it is zero, even if the cotangent is NaN.
        node: Node = graph.make("instead", result, graph.where(is_inside, zero, a))
        return node

    return pointwise(r, out, softshrink, x)


def _hard_gate(r: Any, a: Node) -> Node:
    """``relu6(a + 3) / 6``; its consumers define the gradient."""
    graph: Any = r.graph
    inner = graph.binary("maximum", graph.binary("add", a, graph.const(3.0)), graph.const(0.0))
    inner = graph.binary("minimum", inner, graph.const(6.0))
    return graph.binary("mul", inner, graph.const(1.0 / 6.0))  # type: ignore[no-any-return]


@lowers("hardsigmoid", "hardsigmoid_")
def _hardsigmoid(r: Any, out: Any, x: Value) -> Value:
    graph = r.graph

    def hardsigmoid(a: Node) -> Node:
        is_above = graph.make("gt", a, graph.const(-3.0))
        is_below = graph.make("lt", a, graph.const(3.0))
        is_inside = graph.binary("and", is_above, is_below)
        line = graph.binary("mul", a, graph.const(1.0 / 6.0))
        gate = _hard_gate(r, a)
        node: Node = graph.make("instead", gate, graph.where(is_inside, line, graph.const(0.0)))
        return node

    return pointwise(r, out, hardsigmoid, x)


@lowers("hardswish", "hardswish_")
def _hardswish(r: Any, out: Any, x: Value) -> Value:
    graph = r.graph

    def hardswish(a: Node) -> Node:
        slope = graph.binary("mul", a, graph.const(1.0 / 3.0))
        slope = graph.binary("add", slope, graph.const(0.5))
        slope = graph.where(graph.make("lt", a, graph.const(3.0)), slope, graph.const(1.0))
        # The factor of the slope is zero below -3, so that an infinite element has no gradient of
        # NaN.
        argument = graph.where(graph.make("le", a, graph.const(-3.0)), graph.const(0.0), a)
        result = graph.binary("mul", a, _hard_gate(r, a))
        return differentiated(r, result, (argument, slope))

    return pointwise(r, out, hardswish, x)


def _softplus_of(r: Any, x: Node) -> Node:
    """``log(1 + exp(x))``, as ``max(x, 0) + log1p(exp(-abs(x)))``, which does not overflow."""
    graph = r.graph
    beyond = graph.unary("log1p", graph.unary("exp", graph.unary("neg", graph.unary("abs", x))))
    result = graph.binary("add", graph.binary("maximum", x, graph.const(0.0)), beyond)
    return differentiated(r, result, (x, graph.make("sigmoid", x)))


@lowers("softplus")
def _softplus(r: Any, out: Any, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    graph = r.graph

    def softplus(a: Node) -> Node:
        scaled = graph.binary("mul", a, graph.const(float(beta)))
        curve = graph.binary("div", _softplus_of(r, scaled), graph.const(float(beta)))
        is_linear = graph.make("gt", scaled, graph.const(float(threshold)))
        return graph.where(is_linear, a, curve)  # type: ignore[no-any-return]

    return pointwise(r, out, softplus, x)


@lowers("mish", "mish_")
def _mish(r: Any, out: Any, x: Value) -> Value:
    graph = r.graph

    def mish(a: Node) -> Node:
        gate = graph.make("tanh", _softplus_of(r, a))
        by_curve = graph.binary("sub", graph.const(1.0), graph.binary("mul", gate, gate))
        slope = graph.binary("mul", graph.binary("mul", a, graph.make("sigmoid", a)), by_curve)
        result = graph.binary("mul", a, gate)
        return differentiated(r, result, (a, graph.binary("add", gate, slope)))

    return pointwise(r, out, mish, x)


@lowers("log_sigmoid_forward")
def _log_sigmoid(r: Any, out: Any, x: Value) -> Any:
    graph = r.graph

    def log_sigmoid(a: Node) -> Node:
        node: Node = graph.unary("neg", _softplus_of(r, graph.unary("neg", a)))
        return node

    # The second output is a buffer for PyTorch's own backward.
    return [pointwise(r, out[0], log_sigmoid, x), None]


@lowers("special_entr")
def _entr(r: Any, out: Any, x: Value) -> Value:
    graph = r.graph

    def entr(a: Node) -> Node:
        entropy = graph.unary("neg", graph.make("xlogy", a, a))
        is_negative = graph.make("lt", a, graph.const(0.0))
        result = graph.where(is_negative, graph.const(-math.inf), entropy)
        slope = graph.binary("sub", graph.const(-1.0), graph.unary("log", a))
        return differentiated(r, result, (a, slope))

    return pointwise(r, out, entr, x)


# Below it four terms of the series are right to a roundoff of fp64.
_SERIES_OF_SINC = 0.1


def _slope_of_sinc(graph: Any, angle: Node) -> Node:
    """Returns the derivative of ``sin(angle) / angle`` by x, for ``angle = pi * x`` near zero."""
    square = graph.binary("mul", angle, angle)
    series = graph.const(math.pi / 45360)
    for term in (-math.pi / 840, math.pi / 30, -math.pi / 3):
        series = graph.binary("add", graph.binary("mul", series, square), graph.const(term))
    return graph.binary("mul", series, angle)


@lowers("sinc")
def _sinc(r: Any, out: Any, x: Value) -> Value:
    graph = r.graph

    def sinc(a: Node) -> Node:
        angle = graph.binary("mul", a, graph.const(math.pi))
        is_zero = graph.make("eq", a, graph.const(0.0))
        sine = graph.unary("sin", angle)
        one = graph.const(1.0)
        result = graph.where(is_zero, one, graph.binary("div", sine, angle))
        rise = graph.binary("sub", graph.binary("mul", angle, graph.unary("cos", angle)), sine)
        slope = graph.binary("div", rise, graph.binary("mul", angle, a))
        # Near zero the formula cancels, with an error of a roundoff over the angle; its series
        # does not.
        is_near = graph.make("lt", graph.unary("abs", angle), graph.const(_SERIES_OF_SINC))
        slope = graph.where(is_near, _slope_of_sinc(graph, angle), slope)
        return differentiated(r, result, (a, slope))

    return pointwise(r, out, sinc, x)


@lowers("logit", "logit_")
def _logit(r: Any, out: Any, x: Value, eps: float | None = None) -> Value:
    graph = r.graph
    zero = graph.const(0.0)
    one = graph.const(1.0)
    if eps is None:
        low = zero
        high = one
    else:
        low = graph.const(float(eps))
        high = graph.const(1.0 - eps)

    def logit(a: Node) -> Node:
        below = graph.make("lt", a, low)
        above = graph.make("gt", a, high)
        inner = a
        if eps is not None:
            inner = graph.where(below, low, graph.where(above, high, a))
        result = graph.unary("log", graph.binary("div", inner, graph.binary("sub", one, inner)))
        steep = graph.unary("reciprocal", graph.binary("mul", a, graph.binary("sub", one, a)))
        outside = graph.const(math.nan) if eps is None else zero
        is_outside = graph.binary("or", below, above)
        return differentiated(r, result, (a, graph.where(is_outside, outside, steep)))

    return pointwise(r, out, logit, x)
