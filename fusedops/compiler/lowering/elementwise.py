"""Elementwise operators: arithmetic, comparisons, powers, limits and casts."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ...core.compat.autograd import clamp_has_gradients_at_limits, fmax_shares_ties
from ...core.optional import without_none
from ..errors import NotRowwiseError
from ..ir import Node, promoted, value_of
from ..traced import Value, kind_of
from .common import (
    TABLE,
    Lower,
    as_integer,
    as_kind,
    as_value,
    check_computes,
    differentiated,
    joined,
    lowers,
    pointwise,
)
from .functions import whole_quotient


def _unary(op: str) -> Lower:
    def lower(r: Any, out: Any, x: Value, **_: Any) -> Value:
        return pointwise(r, out, lambda a: r.graph.unary(op, a), x)

    return lower


for _op in (
    "neg",
    "exp",
    "exp2",
    "log2",
    "log",
    "log1p",
    "expm1",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "abs",
    "sign",
    "sin",
    "cos",
    "erf",
):
    TABLE[_op] = TABLE[_op + "_"] = _unary(_op)


def _rounded(op: str) -> Lower:
    """The lowering of a rounding to whole numbers, which leaves integers as they are."""

    def lower(r: Any, out: Any, x: Value) -> Value:
        def rounded(a: Node) -> Node:
            return r.graph.unary(op, a) if a.kind == "float" else a  # type: ignore[no-any-return]

        return pointwise(r, out, rounded, x)

    return lower


for _op in ("floor", "ceil"):
    TABLE[_op] = TABLE[_op + "_"] = _rounded(_op)


@lowers("round", "round_")
def _round(r: Any, out: Any, x: Value, *, decimals: int = 0) -> Value:
    """The nearest numbers of so many decimals; of two that are equally near, the even one."""
    graph = r.graph
    if not decimals or x.node.kind != "float":
        return _rounded("rint")(r, out, x)
    scale = graph.const(10.0 ** abs(decimals))
    # A product with the reciprocal would not keep 10.9, nor find that 6500 is halfway.
    before, after = ("mul", "div_rn") if decimals > 0 else ("div_rn", "mul")

    def rounded(a: Node) -> Node:
        whole = graph.unary("rint", graph.binary(before, a, scale))
        return graph.binary(after, whole, scale)  # type: ignore[no-any-return]

    return pointwise(r, out, rounded, x)


TABLE["sgn"] = TABLE["sign"]
TABLE["_neg_view"] = TABLE["neg"]  # of the imaginary part of a conjugate


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


# PyTorch's operators for each of the graph's.
for _op, _names in {
    "mul": ("mul", "mul_", "multiply"),
    "maximum": ("maximum",),
    "minimum": ("minimum",),
    "and": ("logical_and", "bitwise_and", "__and__"),
    "or": ("logical_or", "bitwise_or", "__or__"),
    "xor": ("logical_xor", "bitwise_xor"),
}.items():
    for _name in _names:
        TABLE[_name] = _binary(_op)


def _sum_of(op: str) -> Lower:
    def lower(r: Any, out: Any, x: Any, y: Any, alpha: Any = 1) -> Value:
        def both(a: Node, b: Node) -> Node:
            if alpha != 1:
                b = r.graph.binary("mul", b, as_kind(r, r.graph.const(alpha), b.kind))
            # The sum of two truth values is their disjunction.
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


def _in_dtype_of_tensor(r: Any, values: list[Value]) -> list[Value]:
    """The operands of a comparison, with numbers in the dtype of a tensor.

    PyTorch converts a number to the tensor's dtype before it compares them. The graph computes in a
    wider dtype, so the conversion must be an operator of its own.
    """
    tensors = [value for value in values if value.labels]
    dtypes = {value.dtype for value in tensors if value.dtype.is_floating_point}
    if len(dtypes) != 1 or not _is_narrow(r, *dtypes):
        return values
    (dtype,) = dtypes

    def rounded(value: Value) -> Value:
        if value.labels:
            return value
        node = as_kind(r, value.node, "float")
        if node.op == "const":  # a Python number: it has the default dtype, but is not rounded
            node = r.graph.const(float(torch.tensor(value_of(node), dtype=dtype)))
        elif value.dtype != dtype:
            node = r.graph.make("rounded", node, attrs=(_name_of(dtype),))
        return Value(node, value.labels, dtype)

    return list(map(rounded, values))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Operators whose results are elements of their arguments, unrounded.
_SELECTING = frozenset({"detached", "select", "stack", "amax", "pick"})


def _is_exact(node: Node) -> bool:
    """Whether a value has elements of inputs, which their dtype represents."""
    if node.op in ("input", "const"):
        return True
    return node.op in _SELECTING and all(map(_is_exact, node.args))


def as_represented(r: Any, value: Value) -> Value:
    """A value as its dtype represents it.

    One value of a comparison may be saved, and read back in its dtype, while the other one has all
    bits of the computation: then equal values could differ. A dtype as wide as that of the
    computation needs no rounding.
    """
    if value.node.kind != "float" or _is_exact(value.node) or not _is_narrow(r, value.dtype):
        return value
    node = r.graph.make("rounded", value.node, attrs=(_name_of(value.dtype),))
    return Value(node, value.labels, value.dtype)


def _is_narrow(r: Any, dtype: torch.dtype) -> bool:
    """Whether the graph computes in a wider dtype: in fp64 if an input is of it, else in fp32."""
    is_wide = torch.float64 in [value.dtype for value in r.traced.inputs]
    return dtype.itemsize <= (4 if is_wide else 2)


def _compare(op: str) -> Lower:
    def lower(r: Any, out: Any, x: Any, y: Any) -> Value:
        check_computes(x, y)
        x, y = _in_dtype_of_tensor(r, [as_value(r, value) for value in (x, y)])
        x, y = as_represented(r, x), as_represented(r, y)
        kind = promoted([x.node.kind, y.node.kind])
        result = pointwise(r, out, lambda a, b: r.graph.make(op, a, b), x, y, kind=kind)
        return Value(result.node, result.labels, torch.bool)

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
    kind = kind_of(out.dtype)
    condition = as_value(r, condition, "bool")
    x, y = as_value(r, x, kind), as_value(r, y, kind)
    node = r.graph.where(condition.node, x.node, y.node)
    return Value(node, joined(r, condition.labels, x.labels, y.labels), out.dtype)


@lowers("masked_fill", "masked_fill_")
def _masked_fill(r: Any, out: Any, x: Value, mask: Value, value: Any) -> Value:
    return _where(r, out, mask, value, x)


@lowers("_prelu_kernel")
def _prelu(r: Any, out: Any, x: Value, weight: Value) -> Value:
    """``x`` where it is positive, else ``weight * x``."""
    graph = r.graph
    zero = r.graph.const(0.0)

    def prelu(a: Node, w: Node) -> Node:
        positive = graph.make("gt", a, zero)
        # Without the inner selection the weight's gradient at infinity would be zero times
        # infinity.
        negative_part = graph.where(positive, zero, a)
        node: Node = graph.where(positive, a, graph.binary("mul", w, negative_part))
        return node

    return pointwise(r, out, prelu, x, weight)


@lowers("special_xlog1py")
def _xlog1py(r: Any, out: Any, x: Any, y: Any) -> Value:
    graph = r.graph
    zero = r.graph.const(0.0)

    def xlog1py(a: Node, b: Node) -> Node:
        is_zero = graph.make("eq", a, zero)
        logarithm = graph.unary("log1p", b)
        is_nan = graph.make("isnan", b)
        product = graph.where(is_zero, zero, graph.binary("mul", a, logarithm))
        result = graph.where(is_nan, b, product)
        # The derivative by a is log1p(b), which is infinite or NaN for b <= -1. As in PyTorch, it
        # is zero there if a is zero: the result is zero for every such b.
        is_flat = graph.binary("and", is_zero, graph.make("le", b, graph.const(-1.0)))
        by_b = graph.binary("div", a, graph.binary("add", b, graph.const(1.0)))
        return differentiated(r, result, (a, graph.where(is_flat, zero, logarithm)), (b, by_b))

    return pointwise(r, out, xlog1py, x, y)


@lowers("xlogy")
def _xlogy(r: Any, out: Any, x: Any, y: Any) -> Value:
    return pointwise(r, out, lambda a, b: r.graph.make("xlogy", a, b), x, y)


def _extremum_but_nan(comparison: str, extremum: str) -> Lower:
    """The lowering of `fmax` or `fmin`, which ignore a NaN beside a number.

    In ties the first has the whole gradient; from PyTorch 2.15 on, each has half of it.
    """

    def lower(r: Any, out: Any, x: Value, y: Value) -> Value:
        graph: Any = r.graph

        def choose(a: Node, b: Node) -> Node:
            is_first = graph.make(comparison, a, b)
            if b.kind != "float":
                return graph.where(is_first, a, b)  # type: ignore[no-any-return]
            is_first = graph.binary("or", is_first, graph.make("isnan", b))
            result: Node = graph.where(is_first, a, b)
            if not fmax_shares_ties():
                return result
            tied = graph.where(graph.make("eq", a, b), graph.binary(extremum, a, b), result)
            return graph.make("instead", result, tied)  # type: ignore[no-any-return]

        return pointwise(r, out, choose, x, y)

    return lower


TABLE["fmax"] = _extremum_but_nan("ge", "maximum")
TABLE["fmin"] = _extremum_but_nan("le", "minimum")


@lowers("square")
def _square(r: Any, out: Any, x: Value) -> Value:
    return pointwise(r, out, lambda a: r.graph.binary("mul", a, a), x)


@lowers("pow", "pow_")
def _pow(r: Any, out: Any, x: Any, exponent: Any) -> Value:
    kind = kind_of(out.dtype)
    has_tensor = isinstance(exponent, Value)
    if kind != "float" and (has_tensor or not _is_count(exponent)):
        raise NotRowwiseError("a power of integers")
    if not has_tensor:
        return pointwise(r, out, lambda a: _power(r, a, exponent), x, kind=kind)
    # The base is a number or a `Value`; a `Value` equals no number.
    if x == 2:
        return pointwise(r, out, lambda a: r.graph.unary("exp2", a), exponent)
    return pointwise(r, out, lambda a, b: r.graph.make("power", a, b), x, exponent)


def _is_count(number: float) -> bool:
    """Whether a number is whole and not negative."""
    return number >= 0 and number == int(number)


# Up to this whole exponent, a power is written as products, by repeated squaring. Larger exponents
# and fractions call the function `power` of `fusedops.compiler.device`.
_WHOLE_EXPONENTS = 1 << 16
# Exponents whose power is another operator.
_POWERS = {0.5: "sqrt", -1: "reciprocal"}


def _power(r: Any, x: Node, exponent: float) -> Node:
    graph = r.graph
    if exponent in _POWERS:
        return graph.unary(_POWERS[exponent], x)
    if exponent == -0.5:
        result = graph.unary("rsqrt", x)
        # As a product with 1 / x, the derivative at minus zero has the sign of PyTorch's.
        partial = graph.binary("mul", graph.unary("reciprocal", x), result)
        return differentiated(r, result, (x, graph.binary("mul", partial, graph.const(-0.5))))
    if exponent != int(exponent) or abs(exponent) > _WHOLE_EXPONENTS:
        return graph.make("pow", x, attrs=(float(exponent),))
    if exponent < 0:
        # The derivative for an exponent n is n / x**(1 - n). The rule of `reciprocal` would compute
        # it from the square of the result. The square may overflow or vanish although the
        # derivative does not.
        result = graph.unary("reciprocal", _product(r, x, -int(exponent)))
        partial = graph.unary("reciprocal", _product(r, x, 1 - int(exponent)))
        partial = graph.binary("mul", partial, graph.const(float(exponent)))
        return differentiated(r, result, (x, partial))
    if exponent == 0 and x.kind == "float":
        return differentiated(r, graph.const(1.0), (x, graph.const(0.0)))
    return _product(r, x, int(exponent))


def _product(r: Any, x: Node, count: int) -> Node:
    """``x ** count``, by repeated squaring."""
    graph = r.graph
    result = as_kind(r, graph.const(1), x.kind)
    square = x
    while count:
        if count & 1:
            result = graph.binary("mul", result, square)
        if count > 1:
            square = graph.binary("mul", square, square)
        count >>= 1
    return result


@lowers("nan_to_num")
def _nan_to_num(
    r: Any, out: Any, x: Value, nan: Any = None, posinf: Any = None, neginf: Any = None
) -> Value:
    """The values, with numbers instead of NaN and infinities.

    The replaced values have no gradient: PyTorch's formula multiplies it by a truth value.
    """
    if not out.dtype.is_floating_point:
        return Value(x.node, x.labels, out.dtype)
    graph = r.graph
    limits = torch.finfo(out.dtype)
    result = node = as_kind(r, x.node, "float")
    is_nan = graph.make("isnan", node)
    infinity = graph.const(math.inf)
    is_above = graph.make("eq", node, infinity)
    is_below = graph.make("eq", node, graph.const(-math.inf))
    for condition, number, default in (
        (is_nan, nan, 0.0),
        (is_above, posinf, limits.max),
        (is_below, neginf, limits.min),
    ):
        replacement = graph.const(float(default if number is None else number))
        result = graph.where(condition, replacement, result)
    is_finite = graph.make("lt", graph.unary("abs", node), infinity)
    gradient = as_kind(r, is_finite, "float")
    return Value(differentiated(r, result, (node, gradient)), x.labels, out.dtype)


@lowers("clamp", "clamp_")
def _clamp(r: Any, out: Any, x: Value, min: Any = None, max: Any = None) -> Value:
    """The elements, limited from both sides.

    An element that equals a limit has the whole gradient up to PyTorch 2.14. From 2.15 on it has
    none if the limits are numbers, and shares it with a limit that is a tensor: `_between_tied`.
    """
    has_low = min is not None
    has_high = max is not None
    values = without_none((x, min, max))
    is_float = kind_of(out.dtype) == "float"
    between = _between
    if _share_ties(min, max):
        between = _between_tied

    def limited(a: Node, *bounds: Node) -> Node:
        low = bounds[0] if has_low else None
        high = bounds[-1] if has_high else None
        result = a
        if low is not None:
            result = _limited(r.graph, "lt", result, low, is_float)
        if high is not None:
            result = _limited(r.graph, "gt", result, high, is_float)
        if not is_float:
            return result
        node: Node = r.graph.make("instead", result, between(r.graph, a, low, high))
        return node

    return pointwise(r, out, limited, *values)


def _share_ties(*limits: Any) -> bool:
    """Whether an element that equals a limit shares its gradient with it: see `_between_tied`."""
    if clamp_has_gradients_at_limits():
        return False
    return any(isinstance(limit, Value) for limit in limits)


def _limited(graph: Any, comparison: str, x: Node, bound: Node, is_float: bool) -> Node:
    """The bound where ``x`` is beyond it, or where the bound is NaN; else ``x``."""
    is_beyond = graph.make(comparison, x, bound)
    number = value_of(bound)
    may_be_nan = is_float and (number is None or math.isnan(number))
    if may_be_nan:
        is_beyond = graph.binary("or", is_beyond, graph.make("isnan", bound))
    return graph.where(is_beyond, bound, x)  # type: ignore[no-any-return]


def _between(graph: Any, x: Node, low: Node | None, high: Node | None) -> Node:
    """The value whose gradient a limited value has, by PyTorch's formula."""
    zero = graph.const(0.0)
    from_low = "gt"
    to_high = "lt"
    if clamp_has_gradients_at_limits():
        from_low = "ge"
        to_high = "le"
    inside = []
    if low is not None:
        inside.append(graph.make(from_low, x, low))
    if high is not None:
        inside.append(graph.make(to_high, x, high))
    condition = functools.reduce(functools.partial(graph.binary, "and"), inside)
    result = graph.where(condition, x, zero)
    for is_beyond, bound in _beyond(graph, x, low, high):
        # A number has no gradient.
        if bound.op != "const":
            result = graph.binary("add", result, graph.where(is_beyond, bound, zero))
    return result  # type: ignore[no-any-return]


def _beyond(graph: Any, x: Node, low: Node | None, high: Node | None) -> list[tuple[Node, Node]]:
    """Each limit after the condition under which it is the result."""
    if low is None:
        assert high is not None
        return [(graph.make("gt", x, high), high)]
    below = graph.make("lt", x, low)
    if high is None:
        return [(below, low)]
    above = graph.make("gt", x, high)
    # With limits in the wrong order the upper one is the result.
    below = graph.binary("and", below, graph.make("lt", low, high))
    above = graph.binary("or", above, graph.make("lt", high, low))
    return [(below, low), (above, high)]


def _between_tied(graph: Any, x: Node, low: Node | None, high: Node | None) -> Node:
    """The same for limits that are tensors, from PyTorch 2.15 on.

    An element at one limit shares its gradient with that limit; between two equal limits it has
    all of it.
    """
    if low is None:
        return graph.binary("minimum", x, high)  # type: ignore[no-any-return]
    if high is None:
        return graph.binary("maximum", x, low)  # type: ignore[no-any-return]
    zero = graph.const(0.0)
    both = functools.partial(graph.binary, "and")
    below = graph.make("lt", x, low)
    above = graph.make("gt", x, high)
    are_distinct = graph.make("lt", low, high)
    # Where a limit is NaN, neither of these holds.
    are_ordered = graph.make("le", low, high)
    are_crossed = graph.make("gt", low, high)
    result = graph.where(graph.binary("or", below, above), zero, x)
    for op, bound in (("maximum", low), ("minimum", high)):
        at_bound = both(are_distinct, graph.make("eq", x, bound))
        result = graph.where(at_bound, graph.binary(op, x, bound), result)
    has_low = both(below, are_ordered)
    has_high = graph.binary("or", both(above, are_ordered), are_crossed)
    for condition, bound in ((has_low, low), (has_high, high)):
        result = graph.binary("add", result, graph.where(condition, bound, zero))
    return result  # type: ignore[no-any-return]


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


# Casts. The graph computes everything in fp32, or in fp64, and a kernel rounds what it stores. If
# an earlier rounding changes the result, the rounding is an operator:
#
#   one cast to a narrower dtype   a value of its own, "narrowed", rounded if saved or returned
#   a second cast                  "rounded" to the dtype between: two roundings are not one
#   a comparison                   "rounded", so that it does not depend on what is saved


def _is_narrowed(node: Node) -> bool:
    """Whether a value, or a part of it, was cast to a narrower dtype."""
    if node.op == "narrowed":
        return True
    return node.op in ("detached", "select", "stack") and any(map(_is_narrowed, node.args))


@lowers("_to_copy", "clone", "alias", "lift_fresh_copy", "lift", "contiguous", "_conj")
def _same(r: Any, out: Any, x: Value, *_: Any, **options: Any) -> Value:
    if kind_of(out.dtype) == "int":
        return Value(as_integer(r, x.node, x.dtype, out.dtype), x.labels, out.dtype)
    node = as_kind(r, x.node, kind_of(out.dtype))
    if node.kind != "float" or x.dtype == out.dtype:
        return Value(node, x.labels, out.dtype)
    if _is_narrowed(node):
        # A second cast, as in x.bfloat16().float() of an fp32 tensor: the result has the bits of
        # bf16. The first cast alone would not round, because nothing returns or saves its value.
        node = r.graph.make("rounded", node, attrs=(_name_of(x.dtype),))
    if kind_of(x.dtype) == "float" and out.dtype.itemsize <= x.dtype.itemsize:
        # A new value: if it is returned or saved it is rounded to the dtype, but the other
        # consumers of the wider value still get the unrounded one.
        node = r.graph.make("narrowed", node, attrs=(_name_of(out.dtype),))
    return Value(node, x.labels, out.dtype)


@lowers("copy")
def _copy(r: Any, out: Any, x: Value, source: Value, *_: Any, **__: Any) -> Value:
    copied = _same(r, out, source)
    return Value(copied.node, joined(r, x.labels, copied.labels), out.dtype)


@lowers("isinf")
def _isinf(r: Any, out: Any, x: Value) -> Value:
    graph = r.graph
    size = graph.unary("abs", as_kind(r, x.node, "float"))
    node = graph.make("eq", size, graph.const(math.inf))
    return Value(node, x.labels, torch.bool)
