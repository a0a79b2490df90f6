"""Operators element by element."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ...core import compat
from ..errors import NotRowwiseError
from ..ir import Node, value_of
from ..tracing import Value, kind_of
from .common import TABLE, Lower, as_kind, as_value, differentiated, joined, lowers, pointwise
from .functions import whole_quotient


def _unary(op: str) -> Lower:
    def lower(r: Any, out: Any, x: Value, **_: Any) -> Value:
        return pointwise(r, out, lambda a: r.graph.unary(op, a), x)

    return lower


for _op in ("neg", "exp", "exp2", "log2", "log", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal", "abs", "sign", "sin",
            "cos", "erf"):  # fmt: skip
    TABLE[_op] = TABLE[_op + "_"] = _unary(_op)


def _rounded(op: str) -> Lower:
    """Of whole numbers these themselves."""

    def lower(r: Any, out: Any, x: Value) -> Value:
        return pointwise(r, out, lambda a: r.graph.unary(op, a) if a.kind == "float" else a, x)

    return lower


for _op in ("floor", "ceil"):
    TABLE[_op] = TABLE[_op + "_"] = _rounded(_op)
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
        if op in ("and", "or", "xor") and kind_of(out.dtype) == "float":
            raise NotRowwiseError("bits of floats, which PyTorch does not take either")
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
            return r.graph.binary("or" if b.kind == "bool" else op, a, b)

        return pointwise(r, out, both, x, y)

    return lower


TABLE["add"] = TABLE["add_"] = _sum_of("add")
TABLE["sub"] = TABLE["sub_"] = _sum_of("sub")


@lowers("rsub")
def _rsub(r: Any, out: Any, x: Any, y: Any, alpha: Any = 1) -> Value:
    return TABLE["sub"](r, out, y, x, alpha)  # type: ignore[no-any-return]


@lowers("div", "div_", "true_divide")
def _div(r: Any, out: Any, x: Any, y: Any, rounding_mode: str | None = None) -> Value:
    if rounding_mode is not None:
        return whole_quotient(r, out, x, y, rounding_mode)
    return pointwise(r, out, lambda a, b: r.graph.binary("div", a, b), x, y)


def _in_half_precision(r: Any, values: list[Value]) -> list[Value]:
    """What is compared; a number beside a tensor in half precision as that dtype has it."""
    narrow = {value.dtype for value in values if value.labels and value.dtype.is_floating_point}
    if len(narrow) != 1 or next(iter(narrow)) not in (torch.float16, torch.bfloat16):
        return values
    (dtype,) = narrow

    def rounded(value: Value) -> Value:
        if value.labels or value.dtype == dtype:
            return value
        node = as_kind(r, value.node, "float")
        if node.op == "const":
            node = r.graph.const(float(torch.tensor(value_of(node), dtype=dtype)))
        else:
            node = r.graph.make("rounded", node, attrs=(str(dtype).removeprefix("torch."),))
        return Value(node, value.labels, dtype)

    return list(map(rounded, values))


# Operators whose results are numbers of their arguments, unrounded.
_SELECTING = frozenset({"detached", "select", "stack", "amax", "pick"})


def _is_exact(node: Node) -> bool:
    """Whether a value has the numbers of inputs, which their dtype represents."""
    return node.op in ("input", "const") or (node.op in _SELECTING and all(map(_is_exact, node.args)))


def _rounded(r: Any, value: Value) -> Value:
    """A value as its dtype represents it.

    A comparison of two values must not depend on which of them is saved, and so rounded.
    """
    is_wide = any(one.dtype == torch.float64 for one in r.traced.inputs)
    if value.dtype.itemsize > (4 if is_wide else 2) or value.node.kind != "float" or _is_exact(value.node):
        return value
    node = r.graph.make("rounded", value.node, attrs=(str(value.dtype).removeprefix("torch."),))
    return Value(node, value.labels, value.dtype)


def _compare(op: str) -> Lower:
    def lower(r: Any, out: Any, x: Any, y: Any) -> Value:
        x, y = _in_half_precision(r, [as_value(r, value) for value in (x, y)])
        if x.labels and y.labels:
            x, y = _rounded(r, x), _rounded(r, y)
        kinds = [value.node.kind for value in (x, y)]
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


@lowers("_prelu_kernel")
def _prelu(r: Any, out: Any, x: Value, weight: Value) -> Value:
    """The slope of one side lets nothing of the other through, be it infinite."""
    graph, zero = r.graph, r.graph.const(0.0)

    def one(a: Node, w: Node) -> Node:
        positive = graph.make("gt", a, zero)
        return graph.where(positive, a, graph.binary("mul", w, graph.where(positive, zero, a)))  # type: ignore[no-any-return]

    return pointwise(r, out, one, x, weight)


@lowers("special_xlog1py")
def _xlog1py(r: Any, out: Any, x: Any, y: Any) -> Value:
    graph, zero = r.graph, r.graph.const(0.0)

    def one(a: Node, b: Node) -> Node:
        is_zero, rise = graph.make("eq", a, zero), graph.unary("log1p", b)
        found = graph.where(graph.make("isnan", b), b, graph.where(is_zero, zero, graph.binary("mul", a, rise)))
        flat = graph.binary("and", is_zero, graph.make("le", b, graph.const(-1.0)))
        steep = graph.binary("div", a, graph.binary("add", b, graph.const(1.0)))
        return differentiated(r, found, (a, graph.where(flat, zero, rise)), (b, steep))

    return pointwise(r, out, one, x, y)


@lowers("xlogy")
def _xlogy(r: Any, out: Any, x: Any, y: Any) -> Value:
    return pointwise(r, out, lambda a, b: r.graph.make("xlogy", a, b), x, y)


def _known_extremum(comparison: str, extremum: str) -> Lower:
    """The larger or smaller of two, of which one may not be a number; in ties the first, from PyTorch 2.15 on half of each."""

    def lower(r: Any, out: Any, x: Value, y: Value) -> Value:
        graph = r.graph

        def one(a: Node, b: Node) -> Node:
            first = graph.make(comparison, a, b)
            if b.kind != "float":
                return graph.where(first, a, b)  # type: ignore[no-any-return]
            found = graph.where(graph.binary("or", first, graph.make("isnan", b)), a, b)
            if not compat.known_extrema_share_ties():
                return found  # type: ignore[no-any-return]
            tied = graph.where(graph.make("eq", a, b), graph.binary(extremum, a, b), found)
            return graph.make("instead", found, tied)  # type: ignore[no-any-return]

        return pointwise(r, out, one, x, y)

    return lower


TABLE["fmax"], TABLE["fmin"] = _known_extremum("ge", "maximum"), _known_extremum("le", "minimum")


@lowers("square")
def _square(r: Any, out: Any, x: Value) -> Value:
    return pointwise(r, out, lambda a: r.graph.binary("mul", a, a), x)


@lowers("pow", "pow_")
def _pow(r: Any, out: Any, x: Any, exponent: Any) -> Value:
    kind = kind_of(out.dtype)
    if isinstance(exponent, Value):
        if kind != "float":
            raise NotRowwiseError("a power of integers")
        if x == 2:
            return pointwise(r, out, lambda a: r.graph.unary("exp2", a), exponent)
        return pointwise(r, out, lambda a, b: r.graph.make("power", a, b), x, exponent)
    if kind != "float" and (exponent != int(exponent) or exponent < 0):
        raise NotRowwiseError("a power of integers")
    return pointwise(r, out, lambda a: _power(r, a, exponent), x, kind=kind)


# Whole exponents up to this are products; beyond, of negative numbers a power is NaN.
_WHOLE_EXPONENTS = 1 << 16


def _power(r: Any, x: Node, exponent: float) -> Node:
    graph = r.graph
    known = {0.5: "sqrt", -1: "reciprocal"}
    if exponent in known:
        return graph.unary(known[exponent], x)
    if exponent == -0.5:
        found = graph.unary("rsqrt", x)
        steep = graph.binary("mul", graph.unary("reciprocal", x), found)  # of minus zero it has the sign of a power
        return differentiated(r, found, (x, graph.binary("mul", steep, graph.const(-0.5))))
    if exponent != int(exponent) or abs(exponent) > _WHOLE_EXPONENTS:
        return graph.make("pow", x, attrs=(float(exponent),))
    if exponent < 0:
        # Neither the power nor its square overflows or vanishes where the derivative does not.
        found = graph.unary("reciprocal", _product(r, x, -int(exponent)))
        partial = graph.unary("reciprocal", _product(r, x, 1 - int(exponent)))
        return differentiated(r, found, (x, graph.binary("mul", partial, graph.const(float(exponent)))))
    if exponent == 0 and x.kind == "float":
        return differentiated(r, graph.const(1.0), (x, graph.const(0.0)))
    return _product(r, x, int(exponent))


def _product(r: Any, x: Node, count: int) -> Node:
    """A number times itself."""
    graph = r.graph
    found, square = as_kind(r, graph.const(1), x.kind), x
    while count:
        found = graph.binary("mul", found, square) if count & 1 else found
        square, count = graph.binary("mul", square, square) if count > 1 else square, count >> 1
    return found


@lowers("nan_to_num")
def _nan_to_num(r: Any, out: Any, x: Value, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Value:
    """What takes the place of NaN and infinities passes no gradient on: by PyTorch's formula a product with zero."""
    if not out.dtype.is_floating_point:
        return Value(x.node, x.labels, out.dtype)
    graph, limits = r.graph, torch.finfo(out.dtype)
    above, below = limits.max if posinf is None else posinf, limits.min if neginf is None else neginf
    found = node = as_kind(r, x.node, "float")
    for there, instead in (
        (graph.make("isnan", node), 0.0 if nan is None else nan),
        (graph.make("eq", node, graph.const(math.inf)), above),
        (graph.make("eq", node, graph.const(-math.inf)), below),
    ):
        found = graph.where(there, graph.const(float(instead)), found)
    finite = graph.make("lt", graph.unary("abs", node), graph.const(math.inf))
    return Value(differentiated(r, found, (node, as_kind(r, finite, "float"))), x.labels, out.dtype)


@lowers("clamp", "clamp_")
def _clamp(r: Any, out: Any, x: Value, min: Any = None, max: Any = None) -> Value:
    """Limits; an element at a number for a limit has its gradient, or none from PyTorch 2.15 on."""
    graph, kind, given = r.graph, kind_of(out.dtype), [value for value in (x, min, max) if value is not None]
    bounds = iter(given[1:])
    low = next(bounds) if min is not None else None
    high = next(bounds) if max is not None else None

    is_tied = not compat.clamp_has_gradients_at_limits() and any(isinstance(limit, Value) for limit in (min, max))
    between = _between_tied if is_tied else _between

    def limited(*nodes: Node) -> Node:
        rest = iter(nodes[1:])
        lower, upper = (next(rest) if bound is not None else None for bound in (low, high))
        found = nodes[0]
        for op, bound in (("lt", lower), ("gt", upper)):
            if bound is not None:
                beyond, number = graph.make(op, found, bound), value_of(bound)
                if kind == "float" and (number is None or math.isnan(number)):  # such a limit is the result
                    beyond = graph.binary("or", beyond, graph.make("isnan", bound))
                found = graph.where(beyond, bound, found)
        return graph.make("instead", found, between(graph, nodes[0], lower, upper)) if kind == "float" else found

    return pointwise(r, out, limited, *given)


def _between(graph: Any, x: Node, low: Node | None, high: Node | None) -> Node:
    """What has the gradient of a value between limits, by PyTorch's formula."""
    zero = graph.const(0.0)
    from_low, to_high = ("ge", "le") if compat.clamp_has_gradients_at_limits() else ("gt", "lt")
    inside = [graph.make(op, x, bound) for op, bound in ((from_low, low), (to_high, high)) if bound is not None]
    found = graph.where(functools.reduce(functools.partial(graph.binary, "and"), inside), x, zero)
    below = graph.make("lt", x, low) if low is not None else None
    above = graph.make("gt", x, high) if high is not None else None
    if below is not None and above is not None:  # of limits in the wrong order the upper one is the result
        below = graph.binary("and", below, graph.make("lt", low, high))
        above = graph.binary("or", above, graph.make("lt", high, low))
    for beyond, bound in ((below, low), (above, high)):
        if beyond is not None and bound is not None and bound.op != "const":
            found = graph.binary("add", found, graph.where(beyond, bound, zero))
    return found  # type: ignore[no-any-return]


def _between_tied(graph: Any, x: Node, low: Node | None, high: Node | None) -> Node:
    """The same of tensors for limits, from PyTorch 2.15 on: at one limit each has half of the gradient, between equal ones x."""
    if low is None or high is None:
        return graph.binary("maximum", x, low) if high is None else graph.binary("minimum", x, high)  # type: ignore[no-any-return]
    zero, also = graph.const(0.0), functools.partial(graph.binary, "and")
    below, above, apart = graph.make("lt", x, low), graph.make("gt", x, high), graph.make("lt", low, high)
    ordered, crossed = graph.make("le", low, high), graph.make("gt", low, high)  # neither of what is no number
    found = graph.where(graph.binary("or", below, above), zero, x)
    for op, bound in (("maximum", low), ("minimum", high)):
        found = graph.where(also(apart, graph.make("eq", x, bound)), graph.binary(op, x, bound), found)
    for beyond, bound in ((also(below, ordered), low), (graph.binary("or", also(above, ordered), crossed), high)):
        found = graph.binary("add", found, graph.where(beyond, bound, zero))
    return found  # type: ignore[no-any-return]


@lowers("clamp_min", "clamp_min_")
def _clamp_min(r: Any, out: Any, x: Value, limit: Any) -> Value:
    return _clamp(r, out, x, limit, None)


@lowers("clamp_max", "clamp_max_")
def _clamp_max(r: Any, out: Any, x: Value, limit: Any) -> Value:
    return _clamp(r, out, x, None, limit)


@lowers("detach", "detach_")
def _detach(r: Any, out: Any, x: Value) -> Value:
    node = r.graph.make("detached", x.node) if x.node.kind == "float" else x.node
    return Value(node, x.labels, out.dtype)


def _is_narrowed(node: Node) -> bool:
    """Whether a value, or a part of it, was cast to a narrower dtype."""
    return node.op == "narrowed" or (node.op in ("detached", "select", "stack") and any(map(_is_narrowed, node.args)))


@lowers("_to_copy", "clone", "alias", "lift_fresh_copy", "lift", "contiguous", "_conj")
def _same(r: Any, out: Any, x: Value, *_: Any, **options: Any) -> Value:
    node = as_kind(r, x.node, kind_of(out.dtype))
    narrower = out.dtype.itemsize < (4 if kind_of(x.dtype) == "float" else x.dtype.itemsize)
    if kind_of(out.dtype) == "int" and out.dtype != torch.int64 and x.dtype != torch.bool and narrower:
        raise NotRowwiseError(f"a cast of {x.dtype} to {out.dtype}")
    if node.kind == "float" and x.dtype != out.dtype and _is_narrowed(node):
        # A cast of what was cast: what lies between is seen, and so is what it lost.
        node = r.graph.make("rounded", node, attrs=(str(x.dtype).removeprefix("torch."),))
    if (
        node.kind == "float"
        and kind_of(x.dtype) == "float"
        and out.dtype != x.dtype
        and out.dtype.itemsize <= x.dtype.itemsize
    ):
        # A value of its own: what is rounded to the dtype, if it is returned or saved, is not what others go on from.
        node = r.graph.make("narrowed", node, attrs=(str(out.dtype).removeprefix("torch."),))
    return Value(node, x.labels, out.dtype)


@lowers("copy")
def _copy(r: Any, out: Any, x: Value, source: Value, *_: Any, **__: Any) -> Value:
    found = _same(r, out, source)
    return Value(found.node, joined(r, x.labels, found.labels), out.dtype)


@lowers("isinf")
def _isinf(r: Any, out: Any, x: Value) -> Value:
    graph = r.graph
    node = graph.make("eq", graph.unary("abs", as_kind(r, x.node, "float")), graph.const(math.inf))
    return Value(node, x.labels, torch.bool)
