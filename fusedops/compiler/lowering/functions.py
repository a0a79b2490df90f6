"""Remainders, quotients that are whole, logarithms and hyperbolic functions, with PyTorch's derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..errors import NotRowwiseError
from ..ir import Node, value_of
from ..tracing import Value, kind_of
from .common import TABLE, differentiated, lowers, pointwise

# --- remainders ---------------------------------------------------------------------------------------------------------


def _remainder_of(r: Any, a: Node, b: Node) -> tuple[Node, Node]:
    """The remainder with the sign of the divisor; and whether it was moved there from the dividend's."""
    graph, zero = r.graph, _zero(r, a)
    rest = graph.make("fmod", a, b)
    signs = graph.binary("xor", graph.make("lt", rest, zero), graph.make("lt", b, zero))
    moved = graph.binary("and", graph.make("ne", rest, zero), signs)
    return graph.where(moved, graph.binary("add", rest, b), rest), moved


def _zero(r: Any, like: Node) -> Node:
    return r.graph.const(0.0 if like.kind == "float" else 0)  # type: ignore[no-any-return]


def _trunc_of(r: Any, a: Node) -> Node:
    graph = r.graph
    return graph.where(graph.make("lt", a, graph.const(0.0)), graph.unary("ceil", a), graph.unary("floor", a))  # type: ignore[no-any-return]


def _floored(r: Any, a: Node, b: Node) -> Node:
    """The quotient, rounded down; exact where the rounded quotient would be the next number."""
    graph = r.graph
    rest, moved = _remainder_of(r, a, b)
    if a.kind != "float":
        return graph.make("quotient", graph.binary("sub", a, rest), b)  # type: ignore[no-any-return]
    found = graph.binary("div", graph.binary("sub", a, graph.make("fmod", a, b)), b)
    found = graph.where(moved, graph.binary("sub", found, graph.const(1.0)), found)
    whole = graph.unary("floor", found)
    above = graph.make("lt", graph.const(0.5), graph.binary("sub", found, whole))
    whole = graph.where(above, graph.binary("add", whole, graph.const(1.0)), whole)
    none = graph.binary("mul", graph.binary("div", a, b), graph.const(0.0))
    whole = graph.where(graph.make("eq", found, graph.const(0.0)), none, whole)
    return graph.where(graph.make("eq", b, graph.const(0.0)), graph.binary("div", a, b), whole)  # type: ignore[no-any-return]


def _check_divisor(y: Any, kind: str) -> None:
    """Raises where whole numbers are divided by what may be zero."""
    if kind != "float" and not (isinstance(y, int) and y):
        raise NotRowwiseError("a division of integers by what is no number; convert them to floats")


@lowers("remainder", "remainder_")
def _remainder(r: Any, out: Any, x: Any, y: Any) -> Value:
    kind = kind_of(out.dtype)
    _check_divisor(y, kind)

    def one(a: Node, b: Node) -> Node:
        found, _ = _remainder_of(r, a, b)
        if kind != "float":
            return found
        return _of_dividend(r, found, a, b, _floored(r, a, b))

    return pointwise(r, out, one, x, y)


def _of_dividend(r: Any, found: Node, a: Node, b: Node, quotient: Node) -> Node:
    partials = [(a, r.graph.const(1.0))]
    if value_of(b) is None:
        partials.append((b, r.graph.unary("neg", quotient)))
    return differentiated(r, found, *partials)


@lowers("fmod", "fmod_")
def _fmod(r: Any, out: Any, x: Any, y: Any) -> Value:
    kind = kind_of(out.dtype)
    _check_divisor(y, kind)

    def one(a: Node, b: Node) -> Node:
        found = r.graph.make("fmod", a, b)
        return _of_dividend(r, found, a, b, _trunc_of(r, r.graph.binary("div", a, b))) if kind == "float" else found

    return pointwise(r, out, one, x, y)


@lowers("floor_divide")
def _floor_divide(r: Any, out: Any, x: Any, y: Any) -> Value:
    return whole_quotient(r, out, x, y, "floor")


def whole_quotient(r: Any, out: Any, x: Any, y: Any, rounding: str) -> Value:
    """A quotient that is rounded down or towards zero; its gradient is zero."""
    kind = kind_of(out.dtype)
    _check_divisor(y, kind)

    def one(a: Node, b: Node) -> Node:
        if rounding == "floor":
            found = _floored(r, a, b)
        elif kind == "float":
            found = _trunc_of(r, r.graph.binary("div", a, b))
        else:
            found = r.graph.make("quotient", a, b)
        if kind != "float":
            return found
        steps = r.graph.binary("add", r.graph.unary("floor", a), r.graph.unary("floor", b))
        return r.graph.make("instead", found, steps)  # type: ignore[no-any-return]

    return pointwise(r, out, one, x, y)


@lowers("trunc", "trunc_", "fix")
def _trunc(r: Any, out: Any, x: Value) -> Value:
    return pointwise(r, out, lambda a: _trunc_of(r, a) if a.kind == "float" else a, x)


@lowers("frac", "frac_")
def _frac(r: Any, out: Any, x: Value) -> Value:
    return pointwise(r, out, lambda a: r.graph.binary("sub", a, _trunc_of(r, a)), x)


# --- functions by exponentials and logarithms ---------------------------------------------------------------------------


def _of_one(function: Callable[[Any, Node], tuple[Node, Node]]) -> Callable[..., Value]:
    """The lowering of a function that gives a value and its derivative."""

    def lower(r: Any, out: Any, x: Value) -> Value:
        def one(a: Node) -> Node:
            found, partial = function(r.graph, a)
            return differentiated(r, found, (a, partial))

        return pointwise(r, out, one, x)

    return lower


def _scaled(graph: Any, a: Node, by: float) -> Node:
    return graph.binary("mul", a, graph.const(by))  # type: ignore[no-any-return]


def _log10(graph: Any, a: Node) -> tuple[Node, Node]:
    return _scaled(graph, graph.unary("log2", a), math.log10(2.0)), graph.unary(
        "reciprocal", _scaled(graph, a, math.log(10.0))
    )


def _halves(graph: Any, a: Node) -> tuple[Node, Node]:
    """Half an exponential of a number's size, which is finite as long as the whole function is, and half its inverse."""
    root = graph.unary("exp", _scaled(graph, graph.unary("abs", a), 0.5))
    return graph.binary("mul", _scaled(graph, root, 0.5), root), graph.binary(
        "div", graph.binary("div", graph.const(0.5), root), root
    )


def _cosh_of(graph: Any, a: Node) -> Node:
    return graph.binary("add", *_halves(graph, a))  # type: ignore[no-any-return]


def _sinh_of(graph: Any, a: Node) -> Node:
    size = graph.unary("abs", a)
    grown = graph.unary("expm1", size)
    near = _scaled(
        graph, graph.binary("add", grown, graph.binary("div", grown, graph.binary("add", grown, graph.const(1.0)))), 0.5
    )
    far = graph.binary("sub", *_halves(graph, a))
    found = graph.where(graph.make("lt", size, graph.const(1.0)), near, far)
    return graph.where(graph.make("lt", a, graph.const(0.0)), graph.unary("neg", found), found)  # type: ignore[no-any-return]


def _inverse_root(graph: Any, a: Node, one: float) -> Node:
    """``1 / sqrt(a * a + one)``."""
    return graph.unary("rsqrt", graph.binary("add", graph.binary("mul", a, a), graph.const(one)))  # type: ignore[no-any-return]


# Beyond it the square of a number is infinite in fp32, and one is nothing beside it in fp64.
_FAR = 1e10


def _asinh(graph: Any, a: Node) -> tuple[Node, Node]:
    one, size = graph.const(1.0), graph.unary("abs", a)
    is_far = graph.make("gt", size, graph.const(_FAR))
    inner = graph.where(is_far, one, size)
    square = graph.binary("mul", inner, inner)
    root = graph.unary("sqrt", graph.binary("add", square, one))
    near = graph.unary("log1p", graph.binary("add", inner, graph.binary("div", square, graph.binary("add", root, one))))
    far = graph.binary("add", graph.unary("log", size), graph.const(math.log(2.0)))
    found = graph.where(is_far, far, near)
    found = graph.where(graph.make("lt", a, graph.const(0.0)), graph.unary("neg", found), found)
    return found, _inverse_root(graph, a, 1.0)


def _acosh(graph: Any, a: Node) -> tuple[Node, Node]:
    one = graph.const(1.0)
    is_far = graph.make("gt", a, graph.const(_FAR))
    above = graph.binary("sub", graph.where(is_far, one, a), one)
    root = graph.unary("sqrt", graph.binary("mul", above, graph.binary("add", above, graph.const(2.0))))
    far = graph.binary("add", graph.unary("log", a), graph.const(math.log(2.0)))
    found = graph.where(is_far, far, graph.unary("log1p", graph.binary("add", above, root)))
    found = graph.where(graph.make("lt", a, one), graph.const(math.nan), found)
    return found, _inverse_root(graph, a, -1.0)


def _atanh(graph: Any, a: Node) -> tuple[Node, Node]:
    one, size = graph.const(1.0), graph.unary("abs", a)
    rest = graph.binary("sub", one, size)
    found = _scaled(graph, graph.unary("log1p", graph.binary("div", _scaled(graph, size, 2.0), rest)), 0.5)
    found = graph.where(graph.make("gt", size, one), graph.const(math.nan), found)
    found = graph.where(graph.make("lt", a, graph.const(0.0)), graph.unary("neg", found), found)
    return found, graph.unary("reciprocal", graph.binary("sub", one, graph.binary("mul", a, a)))


def _tan(graph: Any, a: Node) -> tuple[Node, Node]:
    found = graph.binary("div", graph.unary("sin", a), graph.unary("cos", a))
    return found, graph.binary("add", graph.binary("mul", found, found), graph.const(1.0))


@lowers("hypot", "hypot_")
def _hypot(r: Any, out: Any, x: Value, y: Value) -> Value:
    """The root of two squares, neither of which overflows; infinite beside NaN, too, if one number is."""
    graph, zero, infinite = r.graph, r.graph.const(0.0), r.graph.const(math.inf)

    def one(a: Node, b: Node) -> Node:
        first, second = graph.unary("abs", a), graph.unary("abs", b)
        large, small = graph.binary("maximum", first, second), graph.binary("minimum", first, second)
        share = graph.where(graph.make("eq", large, zero), zero, graph.binary("div", small, large))
        root = graph.unary("sqrt", graph.binary("add", graph.binary("mul", share, share), graph.const(1.0)))
        ends = [graph.make("eq", size, infinite) for size in (first, second)]
        found = graph.where(graph.binary("or", *ends), infinite, graph.binary("mul", large, root))
        return differentiated(r, found, (a, graph.binary("div", a, found)), (b, graph.binary("div", b, found)))

    return pointwise(r, out, one, x, y)


for _name, _function in {
    "log10": _log10, "asinh": _asinh, "acosh": _acosh, "atanh": _atanh, "tan": _tan,
    "cosh": lambda graph, a: (_cosh_of(graph, a), _sinh_of(graph, a)),
    "sinh": lambda graph, a: (_sinh_of(graph, a), _cosh_of(graph, a)),
}.items():  # fmt: skip
    TABLE[_name] = TABLE[_name + "_"] = _of_one(_function)
