"""Operators element by element."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import NotRowwiseError
from ..ir import Node, value_of
from ..tracing import Value, kind_of
from .common import TABLE, Lower, as_kind, as_value, joined, lowers, pointwise


def _unary(op: str) -> Lower:
    def lower(r: Any, out: Any, x: Value, **_: Any) -> Value:
        return pointwise(r, out, lambda a: r.graph.unary(op, a), x)

    return lower


for _op in ("neg", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal", "abs", "sign", "sin", "cos", "erf",
            "floor", "ceil"):  # fmt: skip
    TABLE[_op] = TABLE[_op + "_"] = _unary(_op)
TABLE["sgn"] = TABLE["sign"]


def _activation(name: str) -> Lower:
    def lower(r: Any, out: Any, x: Value) -> Value:
        return pointwise(r, out, lambda a: r.graph.make(name, a), x)

    return lower


for _op in ("silu", "tanh", "sigmoid", "relu"):
    TABLE[_op] = TABLE[_op + "_"] = _activation(_op)


@lowers("gelu", "gelu_")
def _gelu(r: Any, out: Any, x: Value, approximate: str = "none") -> Value:
    return _activation("gelu" if approximate == "none" else "gelu_tanh")(r, out, x)


def _binary(op: str) -> Lower:
    def lower(r: Any, out: Any, x: Any, y: Any, **_: Any) -> Value:
        return pointwise(r, out, lambda a, b: r.graph.binary(op, a, b), x, y)

    return lower


for _op, _names in {"mul": ("mul", "mul_", "multiply"), "maximum": ("maximum",), "minimum": ("minimum",),
                    "and": ("logical_and", "bitwise_and", "__and__"), "or": ("logical_or", "bitwise_or", "__or__"),
                    "xor": ("logical_xor", "bitwise_xor")}.items():  # fmt: skip
    for _name in _names:
        TABLE[_name] = _binary(_op)


def _sum_of(op: str) -> Lower:
    def lower(r: Any, out: Any, x: Any, y: Any, alpha: Any = 1) -> Value:
        def both(a: Node, b: Node) -> Node:
            if alpha != 1:
                b = r.graph.binary("mul", b, as_kind(r, r.graph.const(alpha), b.kind))
            return r.graph.binary(op, a, b)

        return pointwise(r, out, both, x, y)

    return lower


TABLE["add"] = TABLE["add_"] = _sum_of("add")
TABLE["sub"] = TABLE["sub_"] = _sum_of("sub")


@lowers("rsub")
def _rsub(r: Any, out: Any, x: Any, y: Any, alpha: Any = 1) -> Value:
    if alpha != 1:
        raise NotRowwiseError("rsub with alpha")
    return pointwise(r, out, lambda a, b: r.graph.binary("sub", b, a), x, y)


@lowers("div", "div_", "true_divide")
def _div(r: Any, out: Any, x: Any, y: Any, rounding_mode: str | None = None) -> Value:
    if rounding_mode is not None or kind_of(out.dtype) != "float":
        raise NotRowwiseError("a division that rounds")
    return pointwise(r, out, lambda a, b: r.graph.binary("div", a, b), x, y)


def _compare(op: str) -> Lower:
    def lower(r: Any, out: Any, x: Any, y: Any) -> Value:
        kinds = [as_value(r, value).node.kind for value in (x, y)]
        kind = "float" if "float" in kinds else "int" if "int" in kinds else "bool"
        found = pointwise(r, out, lambda a, b: r.graph.make(op, a, b), x, y, kind=kind)
        return Value(found.node, found.labels, torch.bool)

    return lower


for _op in ("lt", "le", "gt", "ge", "eq", "ne"):
    TABLE[_op] = _compare(_op)


@lowers("logical_not", "bitwise_not")
def _not(r: Any, out: Any, x: Value) -> Value:
    if kind_of(x.dtype) != "bool":
        raise NotRowwiseError("bits of integers")
    return pointwise(r, out, lambda a: r.graph.unary("not", a), x)


@lowers("isnan")
def _isnan(r: Any, out: Any, x: Value) -> Value:
    return pointwise(r, out, lambda a: r.graph.unary("isnan", a), x, kind=x.node.kind)


@lowers("where")
def _where(r: Any, out: Any, condition: Value, x: Any, y: Any) -> Value:
    given = [as_value(r, condition, "bool"), *[as_value(r, value, kind_of(out.dtype)) for value in (x, y)]]
    node = r.graph.where(*[value.node for value in given])
    return Value(node, joined(r, *[value.labels for value in given]), out.dtype)


@lowers("masked_fill", "masked_fill_")
def _masked_fill(r: Any, out: Any, x: Value, mask: Value, value: Any) -> Value:
    return _where(r, out, mask, value, x)


@lowers("square")
def _square(r: Any, out: Any, x: Value) -> Value:
    return pointwise(r, out, lambda a: r.graph.binary("mul", a, a), x)


@lowers("pow", "pow_")
def _pow(r: Any, out: Any, x: Any, exponent: Any) -> Value:
    if isinstance(exponent, Value):
        raise NotRowwiseError("pow with an exponent that is no number")
    kind = kind_of(out.dtype)
    if kind != "float" and (exponent != int(exponent) or exponent < 0):
        raise NotRowwiseError("a power of integers")
    return pointwise(r, out, lambda a: _power(r, a, exponent), x, kind=kind)


# Whole exponents up to this are products; beyond, of negative numbers a power is NaN.
_WHOLE_EXPONENTS = 1 << 16


def _power(r: Any, x: Node, exponent: float) -> Node:
    graph = r.graph
    known = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent in known:
        return graph.unary(known[exponent], x)
    if exponent != int(exponent) or abs(exponent) > _WHOLE_EXPONENTS:
        return graph.make("pow", x, attrs=(float(exponent),))
    found, square, left = as_kind(r, graph.const(1), x.kind), x, int(abs(exponent))
    while left:
        found = graph.binary("mul", found, square) if left & 1 else found
        square, left = graph.binary("mul", square, square) if left > 1 else square, left >> 1
    return graph.unary("reciprocal", found) if exponent < 0 else found


def _limited(r: Any, out: Any, x: Value, low: Any, high: Any, comparisons: tuple[str, str]) -> Value:
    """Limits. Whether an element at a limit has a gradient, the comparisons say."""
    graph, found = r.graph, x
    for comparison, limit in zip(comparisons, (low, high), strict=True):
        if limit is not None:

            def one(a: Node, bound: Node, comparison: str = comparison) -> Node:
                beyond, number = graph.make(comparison, a, bound), value_of(bound)
                if bound.kind == "float" and (number is None or math.isnan(number)):  # such a limit is the result
                    beyond = graph.binary("or", beyond, graph.make("isnan", bound))
                return graph.where(beyond, bound, a)

            found = pointwise(r, out, one, found, limit)
    return found


@lowers("clamp", "clamp_")
def _clamp(r: Any, out: Any, x: Value, min: Any = None, max: Any = None) -> Value:
    return _limited(r, out, x, min, max, ("lt", "gt"))


@lowers("clamp_min", "clamp_min_")
def _clamp_min(r: Any, out: Any, x: Value, limit: Any) -> Value:
    return _limited(r, out, x, limit, None, ("lt", "gt"))


@lowers("clamp_max", "clamp_max_")
def _clamp_max(r: Any, out: Any, x: Value, limit: Any) -> Value:
    return _limited(r, out, x, None, limit, ("lt", "gt"))


@lowers("hardtanh", "hardtanh_")
def _hardtanh(r: Any, out: Any, x: Value, min_val: float = -1.0, max_val: float = 1.0) -> Value:
    return _limited(r, out, x, min_val, max_val, ("le", "ge"))


@lowers("detach", "detach_")
def _detach(r: Any, out: Any, x: Value) -> Value:
    node = r.graph.make("detached", x.node) if x.node.kind == "float" else x.node
    return Value(node, x.labels, out.dtype)


@lowers("_to_copy", "clone", "alias", "lift_fresh_copy", "lift", "contiguous", "copy", "_conj")
def _same(r: Any, out: Any, x: Value, *_: Any, **options: Any) -> Value:
    node = as_kind(r, x.node, kind_of(out.dtype))
    narrower = out.dtype.itemsize < (4 if kind_of(x.dtype) == "float" else x.dtype.itemsize)
    if kind_of(out.dtype) == "int" and out.dtype != torch.int64 and x.dtype != torch.bool and narrower:
        raise NotRowwiseError(f"a cast of {x.dtype} to {out.dtype}")
    if (
        node.kind == "float"
        and kind_of(x.dtype) == "float"
        and out.dtype != x.dtype
        and out.dtype.itemsize <= x.dtype.itemsize
    ):
        # A value of its own: what is rounded to the dtype, if it is returned or saved, is not what others go on from.
        node = r.graph.make("narrowed", node, attrs=(str(out.dtype).removeprefix("torch."),))
    return Value(node, x.labels, out.dtype)


@lowers("isinf")
def _isinf(r: Any, out: Any, x: Value) -> Value:
    graph = r.graph
    node = graph.make("eq", graph.unary("abs", as_kind(r, x.node, "float")), graph.const(math.inf))
    return Value(node, x.labels, torch.bool)


def _softplus_of(r: Any, x: Node) -> Node:
    """The logarithm of 1 + exp(x), with finite derivatives everywhere."""
    graph = r.graph
    beyond = graph.unary("log1p", graph.unary("exp", graph.unary("neg", graph.unary("abs", x))))
    return graph.binary("add", graph.binary("maximum", x, graph.const(0.0)), beyond)


@lowers("softplus")
def _softplus(r: Any, out: Any, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    def both(a: Node) -> Node:
        scaled = r.graph.binary("mul", a, r.graph.const(float(beta)))
        return r.graph.binary("mul", _softplus_of(r, scaled), r.graph.const(1.0 / beta))

    return pointwise(r, out, both, x)


@lowers("mish", "mish_")
def _mish(r: Any, out: Any, x: Value) -> Value:
    return pointwise(r, out, lambda a: r.graph.binary("mul", a, r.graph.make("tanh", _softplus_of(r, a))), x)


@lowers("log_sigmoid_forward")
def _log_sigmoid(r: Any, out: Any, x: Value) -> Any:
    return [pointwise(r, out[0], lambda a: r.graph.unary("neg", _softplus_of(r, r.graph.unary("neg", a))), x), None]
