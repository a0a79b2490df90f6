"""Remainders, whole quotients, logarithms and hyperbolic functions, with PyTorch's derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..errors import NotRowwiseError
from ..ir import Node, value_of
from ..traced import Value, kind_of
from .common import TABLE, differentiated, lowers, pointwise

# --- remainders -----------------------------------------------------------------------------------


def _remainder_of(r: Any, a: Node, b: Node) -> tuple[Node, Node]:
    """The remainder with the divisor's sign, and whether it differs from ``fmod``.

    ``fmod`` has the dividend's sign. If the divisor has the other sign, the divisor is added.
    """
    graph = r.graph
    zero = _zero(r, a)
    fmod = graph.make("fmod", a, b)
    signs_differ = graph.binary("xor", graph.make("lt", fmod, zero), graph.make("lt", b, zero))
    is_shifted = graph.binary("and", graph.make("ne", fmod, zero), signs_differ)
    return graph.where(is_shifted, graph.binary("add", fmod, b), fmod), is_shifted


def _zero(r: Any, like: Node) -> Node:
    return r.graph.const(0.0 if like.kind == "float" else 0)  # type: ignore[no-any-return]


def _trunc_of(r: Any, a: Node) -> Node:
    graph: Any = r.graph
    is_negative = graph.make("lt", a, graph.const(0.0))
    node: Node = graph.where(is_negative, graph.unary("ceil", a), graph.unary("floor", a))
    return node


# floor(a / b) is wrong if the quotient is just below a whole number, and the division rounds it up
# to this number. As in PyTorch, these steps avoid that:
#
#   q = (a - fmod(a, b)) / b    a whole number, up to the division's rounding error
#   q - 1                       if the remainder's sign differs from that of b
#   floor(q), or floor(q) + 1   whichever is nearer: this removes the rounding error


def _floored(r: Any, a: Node, b: Node) -> Node:
    """The quotient, rounded down."""
    graph: Any = r.graph
    remainder, is_shifted = _remainder_of(r, a, b)
    if a.kind != "float":
        node: Node = graph.make("quotient", graph.binary("sub", a, remainder), b)
        return node
    quotient = graph.binary("div", graph.binary("sub", a, graph.make("fmod", a, b)), b)
    zero = graph.const(0.0)
    one = graph.const(1.0)
    quotient = graph.where(is_shifted, graph.binary("sub", quotient, one), quotient)
    whole = graph.unary("floor", quotient)
    is_above = graph.make("lt", graph.const(0.5), graph.binary("sub", quotient, whole))
    whole = graph.where(is_above, graph.binary("add", whole, one), whole)
    # A quotient of zero has the sign of a / b.
    signed_zero = graph.binary("mul", graph.binary("div", a, b), zero)
    whole = graph.where(graph.make("eq", quotient, zero), signed_zero, whole)
    by_zero = graph.make("eq", b, zero)
    return graph.where(by_zero, graph.binary("div", a, b), whole)  # type: ignore[no-any-return]


def _check_divisor(y: Any, kind: str) -> None:
    """Raises if integers are divided by a tensor, which may be zero, or by zero."""
    if kind == "float":
        return
    is_known = isinstance(y, int) and y != 0
    if not is_known:
        raise NotRowwiseError("integers are divided by a tensor or by zero; convert them to floats")


@lowers("remainder", "remainder_")
def _remainder(r: Any, out: Any, x: Any, y: Any) -> Value:
    kind = kind_of(out.dtype)
    _check_divisor(y, kind)

    def remainder(a: Node, b: Node) -> Node:
        result, _ = _remainder_of(r, a, b)
        if kind != "float":
            return result
        return _with_derivative(r, result, a, b, _floored(r, a, b))

    return pointwise(r, out, remainder, x, y)


def _with_derivative(r: Any, remainder: Node, a: Node, b: Node, quotient: Node) -> Node:
    """The remainder ``a - quotient * b``, with the derivative for a constant quotient."""
    partials = [(a, r.graph.const(1.0))]
    if value_of(b) is None:
        partials.append((b, r.graph.unary("neg", quotient)))
    return differentiated(r, remainder, *partials)


@lowers("fmod", "fmod_")
def _fmod(r: Any, out: Any, x: Any, y: Any) -> Value:
    kind = kind_of(out.dtype)
    _check_divisor(y, kind)

    def fmod(a: Node, b: Node) -> Node:
        result: Node = r.graph.make("fmod", a, b)
        if kind != "float":
            return result
        quotient = _trunc_of(r, r.graph.binary("div", a, b))
        return _with_derivative(r, result, a, b, quotient)

    return pointwise(r, out, fmod, x, y)


@lowers("floor_divide")
def _floor_divide(r: Any, out: Any, x: Any, y: Any) -> Value:
    return whole_quotient(r, out, x, y, "floor")


def whole_quotient(r: Any, out: Any, x: Any, y: Any, rounding: str) -> Value:
    """A quotient that is rounded down or towards zero; its gradient is zero."""
    kind = kind_of(out.dtype)
    _check_divisor(y, kind)

    def divide(a: Node, b: Node) -> Node:
        if rounding == "floor":
            quotient = _floored(r, a, b)
        elif kind == "float":
            quotient = _trunc_of(r, r.graph.binary("div", a, b))
        else:
            quotient = r.graph.make("quotient", a, b)
        if kind != "float":
            return quotient
        # PyTorch returns gradients of zeros for both arguments, not None. So does this sum of two
        # step functions: `floor` has a derivative of zero, and `gradient_sources` goes through it.
        steps = r.graph.binary("add", r.graph.unary("floor", a), r.graph.unary("floor", b))
        return r.graph.make("instead", quotient, steps)  # type: ignore[no-any-return]

    return pointwise(r, out, divide, x, y)


@lowers("trunc", "trunc_", "fix")
def _trunc(r: Any, out: Any, x: Value) -> Value:
    return pointwise(r, out, lambda a: _trunc_of(r, a) if a.kind == "float" else a, x)


@lowers("frac", "frac_")
def _frac(r: Any, out: Any, x: Value) -> Value:
    return pointwise(r, out, lambda a: r.graph.binary("sub", a, _trunc_of(r, a)), x)


# --- functions by exponentials and logarithms -----------------------------------------------------


def _with_partial(function: Callable[[Any, Node], tuple[Node, Node]]) -> Callable[..., Value]:
    """The lowering for a function that returns a value and its derivative."""

    def lower(r: Any, out: Any, x: Value) -> Value:
        def value(a: Node) -> Node:
            result, partial = function(r.graph, a)
            return differentiated(r, result, (a, partial))

        return pointwise(r, out, value, x)

    return lower


def _scaled(graph: Any, a: Node, by: float) -> Node:
    return graph.binary("mul", a, graph.const(by))  # type: ignore[no-any-return]


def _log10(graph: Any, a: Node) -> tuple[Node, Node]:
    result = _scaled(graph, graph.unary("log2", a), math.log10(2.0))
    return result, graph.unary("reciprocal", _scaled(graph, a, math.log(10.0)))


def _halves(graph: Any, a: Node) -> tuple[Node, Node]:
    """``exp(abs(a)) / 2`` and ``exp(-abs(a)) / 2``.

    The first is ``r / 2 * r`` with ``r = exp(abs(a) / 2)``. ``exp(abs(a))`` itself may overflow
    although its half, and so the hyperbolic function, does not.
    """
    root = graph.unary("exp", _scaled(graph, graph.unary("abs", a), 0.5))
    half = graph.binary("mul", _scaled(graph, root, 0.5), root)
    inverse = graph.binary("div", graph.binary("div", graph.const(0.5), root), root)
    return half, inverse


def _cosh_of(graph: Any, a: Node) -> Node:
    return graph.binary("add", *_halves(graph, a))  # type: ignore[no-any-return]


def _sinh_of(graph: Any, a: Node) -> Node:
    size = graph.unary("abs", a)
    # Near zero the two exponentials cancel; (e + e / (e + 1)) / 2 with e = exp(size) - 1 does not.
    grown = graph.unary("expm1", size)
    share = graph.binary("div", grown, graph.binary("add", grown, graph.const(1.0)))
    near = _scaled(graph, graph.binary("add", grown, share), 0.5)
    far = graph.binary("sub", *_halves(graph, a))
    result = graph.where(graph.make("lt", size, graph.const(1.0)), near, far)
    return _with_sign(graph, a, result)


def _with_sign(graph: Any, a: Node, size: Node) -> Node:
    """``size``, negated where ``a`` is negative."""
    is_negative = graph.make("lt", a, graph.const(0.0))
    return graph.where(is_negative, graph.unary("neg", size), size)  # type: ignore[no-any-return]


def _inverse_root(graph: Any, a: Node, offset: float) -> Node:
    """``1 / sqrt(a * a + offset)``."""
    square = graph.binary("mul", a, a)
    node: Node = graph.unary("rsqrt", graph.binary("add", square, graph.const(offset)))
    return node


# From here on the functions are log(2 * size): in fp32 the square of a number soon overflows, and
# in fp64 one added to it is rounded off.
_FAR = 1e10


def _asinh(graph: Any, a: Node) -> tuple[Node, Node]:
    one = graph.const(1.0)
    size = graph.unary("abs", a)
    is_far = graph.make("gt", size, graph.const(_FAR))
    inner = graph.where(is_far, one, size)
    square = graph.binary("mul", inner, inner)
    root = graph.unary("sqrt", graph.binary("add", square, one))
    share = graph.binary("div", square, graph.binary("add", root, one))
    near = graph.unary("log1p", graph.binary("add", inner, share))
    far = graph.binary("add", graph.unary("log", size), graph.const(math.log(2.0)))
    result = _with_sign(graph, a, graph.where(is_far, far, near))
    return result, _inverse_root(graph, a, 1.0)


def _acosh(graph: Any, a: Node) -> tuple[Node, Node]:
    one = graph.const(1.0)
    is_far = graph.make("gt", a, graph.const(_FAR))
    above = graph.binary("sub", graph.where(is_far, one, a), one)
    product = graph.binary("mul", above, graph.binary("add", above, graph.const(2.0)))
    root = graph.unary("sqrt", product)
    far = graph.binary("add", graph.unary("log", a), graph.const(math.log(2.0)))
    near = graph.unary("log1p", graph.binary("add", above, root))
    result = graph.where(is_far, far, near)
    result = graph.where(graph.make("lt", a, one), graph.const(math.nan), result)
    return result, _inverse_root(graph, a, -1.0)


def _atanh(graph: Any, a: Node) -> tuple[Node, Node]:
    one = graph.const(1.0)
    size = graph.unary("abs", a)
    one_minus_size = graph.binary("sub", one, size)
    quotient = graph.binary("div", _scaled(graph, size, 2.0), one_minus_size)
    result = _scaled(graph, graph.unary("log1p", quotient), 0.5)
    result = graph.where(graph.make("gt", size, one), graph.const(math.nan), result)
    result = _with_sign(graph, a, result)
    partial = graph.binary("sub", one, graph.binary("mul", a, a))
    return result, graph.unary("reciprocal", partial)


def _tan(graph: Any, a: Node) -> tuple[Node, Node]:
    result = graph.binary("div", graph.unary("sin", a), graph.unary("cos", a))
    return result, graph.binary("add", graph.binary("mul", result, result), graph.const(1.0))


@lowers("hypot", "hypot_")
def _hypot(r: Any, out: Any, x: Value, y: Value) -> Value:
    """The root of the sum of two squares, without an overflow of either square.

    If one number is infinite, so is the result, even beside NaN.
    """
    graph = r.graph
    zero = r.graph.const(0.0)
    infinity = r.graph.const(math.inf)

    def hypot(a: Node, b: Node) -> Node:
        first = graph.unary("abs", a)
        second = graph.unary("abs", b)
        large = graph.binary("maximum", first, second)
        small = graph.binary("minimum", first, second)
        # The larger number is a factor outside of the root; the sum under the root is 1 to 2.
        ratio = graph.where(graph.make("eq", large, zero), zero, graph.binary("div", small, large))
        square = graph.binary("mul", ratio, ratio)
        root = graph.unary("sqrt", graph.binary("add", square, graph.const(1.0)))
        are_infinite = [graph.make("eq", size, infinity) for size in (first, second)]
        is_infinite = graph.binary("or", *are_infinite)
        result = graph.where(is_infinite, infinity, graph.binary("mul", large, root))
        partials = [(number, graph.binary("div", number, result)) for number in (a, b)]
        return differentiated(r, result, *partials)

    return pointwise(r, out, hypot, x, y)


for _name, _function in {
    "log10": _log10,
    "asinh": _asinh,
    "acosh": _acosh,
    "atanh": _atanh,
    "tan": _tan,
    "cosh": lambda graph, a: (_cosh_of(graph, a), _sinh_of(graph, a)),
    "sinh": lambda graph, a: (_sinh_of(graph, a), _cosh_of(graph, a)),
}.items():
    TABLE[_name] = TABLE[_name + "_"] = _with_partial(_function)
