"""Activations whose derivatives are formulas of their own, PyTorch's, and not those of what they are computed of.

A ``where`` whose branch overflows has a derivative of zero times infinity, and at a kink the derivative is a convention.
"""

from __future__ import annotations

import math
from typing import Any

from ..ir import Node
from ..tracing import Value
from .common import as_kind, differentiated, lowers, pointwise


@lowers("elu", "elu_")
def _elu(r: Any, out: Any, x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Value:
    graph = r.graph

    def one(a: Node) -> Node:
        negative = graph.make("le", a, graph.const(0.0))
        inner = graph.binary("mul", a, graph.const(float(input_scale)))
        height, slope = graph.const(float(alpha * scale)), graph.const(float(scale))
        found = graph.where(
            negative, graph.binary("mul", graph.unary("expm1", inner), height), graph.binary("mul", a, slope)
        )
        steep = graph.binary("mul", graph.unary("exp", inner), graph.const(float(alpha * scale * input_scale)))
        return differentiated(r, found, (a, graph.where(negative, steep, slope)))

    return pointwise(r, out, one, x)


@lowers("celu", "celu_")
def _celu(r: Any, out: Any, x: Value, alpha: float = 1.0) -> Value:
    return _elu(r, out, x, alpha, 1.0, 1.0 / alpha)


@lowers("hardtanh", "hardtanh_")
def _hardtanh(r: Any, out: Any, x: Value, min_val: float = -1.0, max_val: float = 1.0) -> Value:
    """Limits; an element at a limit has no gradient."""
    graph = r.graph

    def one(a: Node) -> Node:
        for comparison, limit in (("le", min_val), ("ge", max_val)):
            bound = as_kind(r, graph.const(float(limit)), a.kind)
            a = graph.where(graph.make(comparison, a, bound), bound, a)
        return a

    return pointwise(r, out, one, x)


@lowers("softshrink")
def _softshrink(r: Any, out: Any, x: Value, lambd: float = 0.5) -> Value:
    """Numbers nearer to zero by as much; those between have no gradient, whatever comes to them."""
    graph, zero = r.graph, r.graph.const(0.0)
    low, high = graph.const(-float(lambd)), graph.const(float(lambd))

    def one(a: Node) -> Node:
        nearer = graph.binary("sub", a, graph.binary("mul", graph.unary("sign", a), high))
        found = graph.where(graph.make("gt", graph.unary("abs", a), high), nearer, graph.binary("mul", a, zero))
        inside = graph.binary("and", graph.make("ge", a, low), graph.make("le", a, high))
        return graph.make("instead", found, graph.where(inside, zero, a))  # type: ignore[no-any-return]

    return pointwise(r, out, one, x)


def _hard_gate(r: Any, a: Node) -> Node:
    """``relu6(a + 3) / 6``, which has its gradient from elsewhere."""
    graph = r.graph
    inner = graph.binary("maximum", graph.binary("add", a, graph.const(3.0)), graph.const(0.0))
    return graph.binary("mul", graph.binary("minimum", inner, graph.const(6.0)), graph.const(1.0 / 6.0))  # type: ignore[no-any-return]


@lowers("hardsigmoid", "hardsigmoid_")
def _hardsigmoid(r: Any, out: Any, x: Value) -> Value:
    graph = r.graph

    def one(a: Node) -> Node:
        inside = graph.binary("and", graph.make("gt", a, graph.const(-3.0)), graph.make("lt", a, graph.const(3.0)))
        line = graph.binary("mul", a, graph.const(1.0 / 6.0))
        return graph.make("instead", _hard_gate(r, a), graph.where(inside, line, graph.const(0.0)))  # type: ignore[no-any-return]

    return pointwise(r, out, one, x)


@lowers("hardswish", "hardswish_")
def _hardswish(r: Any, out: Any, x: Value) -> Value:
    graph = r.graph

    def one(a: Node) -> Node:
        slope = graph.binary("add", graph.binary("mul", a, graph.const(1.0 / 3.0)), graph.const(0.5))
        slope = graph.where(graph.make("lt", a, graph.const(3.0)), slope, graph.const(1.0))
        # A gate, which lets no infinity through.
        passed = graph.where(graph.make("le", a, graph.const(-3.0)), graph.const(0.0), a)
        return differentiated(r, graph.binary("mul", a, _hard_gate(r, a)), (passed, slope))

    return pointwise(r, out, one, x)


def _softplus_of(r: Any, x: Node) -> Node:
    """The logarithm of 1 + exp(x)."""
    graph = r.graph
    beyond = graph.unary("log1p", graph.unary("exp", graph.unary("neg", graph.unary("abs", x))))
    found = graph.binary("add", graph.binary("maximum", x, graph.const(0.0)), beyond)
    return differentiated(r, found, (x, graph.make("sigmoid", x)))


@lowers("softplus")
def _softplus(r: Any, out: Any, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    graph = r.graph

    def one(a: Node) -> Node:
        scaled = graph.binary("mul", a, graph.const(float(beta)))
        curve = graph.binary("div", _softplus_of(r, scaled), graph.const(float(beta)))
        return graph.where(graph.make("gt", scaled, graph.const(float(threshold))), a, curve)  # type: ignore[no-any-return]

    return pointwise(r, out, one, x)


@lowers("mish", "mish_")
def _mish(r: Any, out: Any, x: Value) -> Value:
    graph = r.graph

    def one(a: Node) -> Node:
        gate = graph.make("tanh", _softplus_of(r, a))
        rest = graph.binary("sub", graph.const(1.0), graph.binary("mul", gate, gate))
        slope = graph.binary("mul", graph.binary("mul", a, graph.make("sigmoid", a)), rest)
        return differentiated(r, graph.binary("mul", a, gate), (a, graph.binary("add", gate, slope)))

    return pointwise(r, out, one, x)


@lowers("log_sigmoid_forward")
def _log_sigmoid(r: Any, out: Any, x: Value) -> Any:
    return [pointwise(r, out[0], lambda a: r.graph.unary("neg", _softplus_of(r, r.graph.unary("neg", a))), x), None]


@lowers("special_entr")
def _entr(r: Any, out: Any, x: Value) -> Value:
    graph = r.graph

    def one(a: Node) -> Node:
        known = graph.unary("neg", graph.make("xlogy", a, a))
        found = graph.where(graph.make("lt", a, graph.const(0.0)), graph.const(-math.inf), known)
        return differentiated(r, found, (a, graph.binary("sub", graph.const(-1.0), graph.unary("log", a))))

    return pointwise(r, out, one, x)


@lowers("sinc")
def _sinc(r: Any, out: Any, x: Value) -> Value:
    graph = r.graph

    def one(a: Node) -> Node:
        angle, is_zero = graph.binary("mul", a, graph.const(math.pi)), graph.make("eq", a, graph.const(0.0))
        sine = graph.unary("sin", angle)
        found = graph.where(is_zero, graph.const(1.0), graph.binary("div", sine, angle))
        rise = graph.binary("sub", graph.binary("mul", angle, graph.unary("cos", angle)), sine)
        square = graph.binary("mul", angle, a)
        is_flat = graph.make("eq", square, graph.const(0.0))
        return differentiated(r, found, (a, graph.where(is_flat, graph.const(0.0), graph.binary("div", rise, square))))

    return pointwise(r, out, one, x)


@lowers("logit", "logit_")
def _logit(r: Any, out: Any, x: Value, eps: float | None = None) -> Value:
    graph = r.graph
    zero, one = graph.const(0.0), graph.const(1.0)
    low, high = (zero, one) if eps is None else (graph.const(float(eps)), graph.const(1.0 - eps))

    def inverse(a: Node) -> Node:
        below, above = graph.make("lt", a, low), graph.make("gt", a, high)
        inner = a if eps is None else graph.where(below, low, graph.where(above, high, a))
        found = graph.unary("log", graph.binary("div", inner, graph.binary("sub", one, inner)))
        steep = graph.unary("reciprocal", graph.binary("mul", a, graph.binary("sub", one, a)))
        outside = graph.const(math.nan) if eps is None else zero
        return differentiated(r, found, (a, graph.where(graph.binary("or", below, above), outside, steep)))

    return pointwise(r, out, inverse, x)
