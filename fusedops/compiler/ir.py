"""Representation of a row-wise function: a graph of few operators on values with axes.

A value has no shape but a set of axes, and broadcasting is implied: the sum of a row ``{rows,
columns}`` and a vector ``{columns}`` has both. Equal expressions are one node, so that what a
backward computes again merges with the forward. All floating-point values are computed in one
dtype; the operator ``round`` rounds to another.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

__all__ = [
    "BINARY",
    "COMPARISONS",
    "REDUCTIONS",
    "SAME_VALUE",
    "UNARY",
    "Graph",
    "Node",
    "cannot_cancel",
    "computed_of",
    "derived_of",
    "gradient_sources",
    "has_reciprocal",
    "is_below_largest",
    "is_bounded",
    "largest_of",
    "promoted",
    "reachable",
    "topological",
    "value_behind",
]

# Some operators compute nothing. They mark where gradients stop or change, and where values are
# rounded:
#
#   detached(x)               x, without a gradient
#   constant_to_gradients(x)  x, without a gradient in the backward. A second derivative does have
#                             one: it differentiates the backward, where x is like any other value
#   instead(x, y)             x, with the gradient of y
#   narrowed(x)               x after a cast: it is rounded if it is saved or returned, without an
#                             effect on the other consumers of x
#   rounded(x)                x rounded to a dtype, for the user's casts and comparisons
#   round(x)                  the same, for what is saved or returned
#   cast(x)                   x as another kind; with the name of a dtype, as its integers, which
#                             wrap around
#
# Operators of one value, of two, and of two that return a boolean; ``where`` takes three. The
# activations of `fusedops.core.activations` are operators of one value too, and so are their
# derivatives, ``d:name``.
UNARY = frozenset(
    {
        "neg",
        "exp",
        "exp2",
        "log2",
        "log",
        "log1p",
        "expm1",
        "sqrt",
        "root",
        "pow",
        "rsqrt",
        "reciprocal",
        "abs",
        "sign",
        "sin",
        "cos",
        "erf",
        "floor",
        "ceil",
        "rint",
        "not",
        "isnan",
        "ordinal",
        "of_ordinal",
    }
)
BINARY = frozenset(
    {
        "power",
        "fmod",
        "div_rn",
        "quotient",
        "xlogy",
        "add",
        "sub",
        "mul",
        "div",
        "maximum",
        "minimum",
        "and",
        "or",
        "xor",
    }
)
COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
REDUCTIONS = frozenset({"sum", "amax", "pick"})
# Kinds in the order of promotion, which is that of PyTorch's dtypes.
_RANKS = {"bool": 0, "int": 1, "float": 2}
_CONDITIONS = COMPARISONS | {"not", "isnan"}
# Operators that change only gradients: their argument is the value that is computed and saved.
SAME_VALUE = ("constant_to_gradients", "detached", "instead", "narrowed")
# Operators that return their argument without its gradient.
_WITHOUT_GRADIENTS = ("constant_to_gradients", "detached")
# If an argument of one of these operators is constant along a row, it moves out of a `pick`.
_PICKED_BY_ARGUMENT = ("add", "sub", "mul")
_NUMBER = operator.attrgetter("number")
_ARGUMENTS = operator.attrgetter("args")


@dataclass(frozen=True, eq=False)
class Node:
    """One value.

    Attributes:
        op: its operator. Leaves are ``input``, ``const``, ``iota`` (the index along an axis),
            ``keep`` (dropout's factor), ``cotangent`` and ``saved``.
        args: the values that it is computed from.
        attrs: constants of the operator, hashable.
        axes: the axes along which it varies.
        kind: "float", "int" or "bool".
        number: counts the graph's nodes; an argument has a smaller number.
        names: the user's names for it, in order.
    """

    op: str
    args: tuple[Node, ...]
    attrs: tuple[Any, ...]
    axes: frozenset[int]
    kind: str
    number: int
    names: list[str]

    def __repr__(self) -> str:
        args = [f"%{arg.number}" for arg in self.args]
        return f"%{self.number} = {self.op}({', '.join([*args, *map(repr, self.attrs)])})"


class Graph:
    """Builds and holds nodes; equal nodes are one object."""

    def __init__(self) -> None:
        self.nodes: dict[Any, Node] = {}

    def make(
        self,
        op: str,
        *args: Node,
        attrs: tuple[Any, ...] = (),
        axes: Iterable[int] | None = None,
        kind: str | None = None,
    ) -> Node:
        """Return the node; the default of ``axes`` and ``kind`` are those of the arguments."""
        if op == "constant_to_gradients" and args[0].op == "instead":
            # The second argument of `instead` is for gradients only, and no gradient goes here.
            args = computed_of(args[0])
        if op in _WITHOUT_GRADIENTS and args[0].op == "const":
            return args[0]  # numbers have no gradients
        if kind is None:
            kind = _kind(op, args)
        node_axes = _axes_of(args) if axes is None else frozenset(axes)
        # Names are no part of the key: an expression that the user names twice is one node.
        key = (op, tuple(map(_NUMBER, args)), attrs, node_axes, kind)
        node = self.nodes.get(key)
        if node is None:
            node = Node(op, args, attrs, node_axes, kind, len(self.nodes), [])
            self.nodes[key] = node
        return node

    # --- operators, in a normal form so that more expressions are equal ---------------------------

    def const(self, value: float | bool) -> Node:
        """Return a number."""
        # A boolean is an instance of int, too.
        if isinstance(value, bool):
            return self.make("const", attrs=(value,), kind="bool")
        if isinstance(value, int):
            return self.make("const", attrs=(value,), kind="int")
        # As text: 0.0 equals -0.0, and no NaN equals another.
        return self.make("const", attrs=(repr(value),), kind="float")

    def unary(self, op: str, x: Node) -> Node:
        """Return an operator of one value."""
        if op == "neg" and x.op == "neg":
            return x.args[0]
        fold = _FOLDED.get(op)
        if fold is not None and x.op == "const":
            # Where Python raises, the kernel computes an infinity or NaN.
            with contextlib.suppress(ValueError, OverflowError, ZeroDivisionError):
                return self.const(fold(float(value_of(x))))
        return self.make(op, x)

    def binary(self, op: str, x: Node, y: Node) -> Node:
        """Return an operator of two values."""
        fold = _FOLDED2.get(op)
        if fold is not None and x.op == y.op == "const":
            with contextlib.suppress(OverflowError, ZeroDivisionError):
                return self.const(fold(value_of(x), value_of(y)))
        # One order of the operands, so that x + y and y + x are one node.
        if op in _COMMUTATIVE and x.number > y.number:
            x, y = y, x
        simplified = None
        if op in _SIMPLIFICATIONS:
            simplified = _SIMPLIFICATIONS[op](self, x, y)
        return self.make(op, x, y) if simplified is None else simplified

    def where(self, condition: Node, x: Node, y: Node) -> Node:
        """Return ``x`` where the condition holds, else ``y``."""
        if x is y:
            return x
        return self.make("where", condition, x, y)

    def pick(self, x: Node, index: Node, axes: Iterable[int]) -> Node:
        """Return one element of each row, by its index.

        Terms and factors that are constant along a row stay outside: ``pick(x - mean)`` is
        ``pick(x) - mean``. What is computed of inputs is computed of their elements, which are
        loaded: ``pick(sigmoid(x))`` is ``sigmoid(pick(x))``.
        """
        over = set(axes)
        if x.axes.isdisjoint(over):
            return x
        if x.op == "neg":
            return self.unary("neg", self.pick(x.args[0], index, over))
        is_term = x.op in _PICKED_BY_ARGUMENT and _has_constant(x.args, over)
        if is_term or (x.args and _is_of_inputs(x, over)):
            arguments = [self.pick(arg, index, over) for arg in x.args]
            if x.op in BINARY:
                return self.binary(x.op, *arguments)
            return self.make(x.op, *arguments, attrs=x.attrs, kind=x.kind)
        picked = (tuple(sorted(over & x.axes)),)
        remaining = (x.axes | index.axes) - over
        return self.make("pick", x, index, attrs=picked, axes=remaining, kind=x.kind)

    def reduce(self, op: str, x: Node, axes: Iterable[int], *, exact: bool = False) -> Node:
        """Return a reduction over those of the axes along which the value varies.

        A factor that is constant along these axes moves out of a sum. With ``exact`` only integers
        and finite constants move out. Any other factor may be infinite: ``inf * (1 - 2)`` is minus
        infinity, but the sum of ``inf * 1`` and ``inf * -2`` is NaN.
        """
        over = tuple(sorted(set(axes) & x.axes))
        if not over:
            return x
        remaining = x.axes - set(over)
        if op != "sum":
            return self.make(op, x, attrs=(over,), axes=remaining)
        if x.op == "neg":
            return self.unary("neg", self.reduce(op, x.args[0], over, exact=exact))
        is_product = x.op == "mul" and _has_constant(x.args, set(over))
        if is_product and (not exact or _has_finite_factor(x)):
            return self.binary("mul", *[self.reduce(op, arg, over, exact=exact) for arg in x.args])
        return self.make(op, x, attrs=(over,), axes=remaining)


def value_of(node: Node) -> Any:
    """Return the number of a constant; None for another node."""
    if node.op != "const":
        return None
    if node.kind == "float":
        return float(node.attrs[0])
    return node.attrs[0]


def value_behind(node: Node) -> Node:
    """Return the argument of a `constant_to_gradients` node; any other node itself."""
    return node.args[0] if node.op == "constant_to_gradients" else node


def largest_of(node: Node) -> Node | None:
    """Return the maximum that is subtracted, with or without gradients, in ``x - amax(x)``."""
    if node.op != "sub":
        return None
    x, shift = node.args
    largest = shift.args[0] if shift.op in _WITHOUT_GRADIENTS else shift
    return largest if largest.op == "amax" and largest.args[0] is x else None


def is_below_largest(node: Node) -> bool:
    """Whether this is ``x - amax(x)``; then each row has an element of zero."""
    return largest_of(node) is not None


def _has_constant(args: Iterable[Node], axes: Set[int]) -> bool:
    """Whether one of the values does not vary along axes."""
    return any(arg.axes.isdisjoint(axes) for arg in args)


def _is_of_inputs(node: Node, axes: Set[int]) -> bool:
    """Whether a value along axes is computed element by element of inputs and of numbers."""
    computed = reachable([node], lambda inner: inner.axes.isdisjoint(axes), _ARGUMENTS)
    along = [inner for inner in computed if not inner.axes.isdisjoint(axes)]
    return all(
        inner.op == "input" or (inner.args and inner.op not in REDUCTIONS) for inner in along
    )


def _axes_of(args: Iterable[Node]) -> frozenset[int]:
    """Return the axes along which a value of these arguments varies."""
    axes: frozenset[int] = frozenset()
    for arg in args:
        axes |= arg.axes
    return axes


def _has_finite_factor(product: Node) -> bool:
    """Whether a product is of integers, or has a finite constant as a factor."""
    if product.kind != "float":
        return True
    numbers = list(map(value_of, product.args))
    return any(number is not None and math.isfinite(number) for number in numbers)


def _kind(op: str, args: Sequence[Node]) -> str:
    """Return the kind of an operator's result."""
    if op in _CONDITIONS:
        return "bool"
    converted = args[1:] if op == "where" else args
    return promoted([arg.kind for arg in converted])


def promoted(kinds: Iterable[str]) -> str:
    """Return the kind in which values of these kinds are computed together."""
    return max(kinds, key=_RANKS.__getitem__, default="bool")


# --- simplifications: each returns a simpler node, or None if no rule applies ---------------------


def _simplified_add(graph: Graph, x: Node, y: Node) -> Node | None:
    # A zero of either sign: for x of -0.0, x + 0.0 is 0.0 in PyTorch, and -0.0 here.
    if value_of(y) == 0:
        return x
    if value_of(x) == 0:
        return y
    if y.op == "neg":
        return graph.binary("sub", x, y.args[0])
    if x.op == "neg":
        return graph.binary("sub", y, x.args[0])
    return None


def _simplified_sub(graph: Graph, x: Node, y: Node) -> Node | None:
    if value_of(y) == 0:
        return x
    if y.op == "neg":
        return graph.binary("add", x, y.args[0])
    return None


def _simplified_mul(graph: Graph, x: Node, y: Node) -> Node | None:
    a = value_of(x)
    b = value_of(y)
    if a == 1:
        return y
    if b == 1:
        return x
    if a == -1:
        return graph.unary("neg", y)
    if b == -1:
        return graph.unary("neg", x)
    # Signs move out of products: two of them cancel.
    signs = (x.op, y.op).count("neg")
    if not signs:
        return None
    product = graph.binary("mul", _without_sign(x), _without_sign(y))
    return product if signs == 2 else graph.unary("neg", product)


def _without_sign(node: Node) -> Node:
    return node.args[0] if node.op == "neg" else node


def _simplified_div(graph: Graph, x: Node, y: Node) -> Node | None:
    # On GPUs PyTorch too computes a quotient by a number as a product with the reciprocal. Beyond
    # this range the number or its reciprocal is infinite, zero or subnormal in fp32.
    divisor = value_of(y)
    if divisor is None or not 1e-37 < abs(divisor) < 1e37:
        return None
    return graph.binary("mul", x, graph.const(1.0 / divisor))


_SIMPLIFICATIONS: dict[str, Callable[[Graph, Node, Node], Node | None]] = {
    "add": _simplified_add,
    "sub": _simplified_sub,
    "mul": _simplified_mul,
    "div": _simplified_div,
}
# Operators whose operands are put in the order of their numbers.
_COMMUTATIVE = ("add", "mul", "maximum", "minimum", "and", "or", "xor")


# Operators of numbers, which Python computes in fp64 while a function is traced.
_FOLDED: dict[str, Callable[[float], float]] = {
    "neg": lambda a: -a,
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "rsqrt": lambda a: 1.0 / math.sqrt(a),
    "reciprocal": lambda a: 1.0 / a,
    "abs": abs,
}
_FOLDED2: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
}


def is_bounded(factor: Node) -> bool:
    """Whether a factor is finite or NaN, so that it may move out of a sum.

    Infinity times a sum is not the sum of infinities, which is NaN if their signs differ.
    Cotangents count as finite, so that the backward of a loss of each row needs only one pass over
    its columns.
    """
    if factor.op in ("mul", "neg"):
        return all(map(is_bounded, factor.args))
    if factor.op == "rsqrt" and factor.args[0].op == "add":  # of a mean of squares and an epsilon
        return any(map(_is_positive, factor.args[0].args))
    number = value_of(factor)
    return factor.op == "cotangent" or (number is not None and math.isfinite(number))


def has_reciprocal(node: Node) -> bool:
    """Whether a number of a row is known to be so large that its reciprocal is finite.

    It is the sum of a softmax's exponentials, one of which is 1, or it has a lower limit.
    """
    if node.op == "sum":
        (summed,) = node.args
        return summed.op == "exp" and is_below_largest(summed.args[0])
    if node.op == "sqrt":  # of a mean of squares and an epsilon
        (node,) = node.args
    # A sum with such a number is zero, or as large as the number's last bit.
    is_limit = functools.partial(_is_positive, least=1e-30)
    return node.op in ("add", "maximum") and any(map(is_limit, node.args))


def cannot_cancel(node: Node) -> bool:
    """Whether this is the sum of a square and a positive number, such as an epsilon."""
    squares = [arg for arg in node.args if arg.op == "mul" and len(set(arg.args)) == 1]
    return node.op == "add" and bool(squares) and any(map(_is_positive, node.args))


def _is_positive(node: Node, least: float = 0.0) -> bool:
    number = value_of(node)
    return number is not None and number > least


def topological(roots: Iterable[Node], known: Container[Node] = ()) -> list[Node]:
    """Return all nodes that the roots are computed from, arguments first.

    The search ends at nodes that are ``known``, which are left out.
    """
    seen: dict[Node, None] = {}
    # A stack in place of recursion, which a long chain of operators would take too deep.
    stack: list[tuple[Node, Iterator[Node]]] = []
    for root in itertools.filterfalse(known.__contains__, roots):
        if root not in seen:
            stack.append((root, iter(root.args)))
        while stack:
            node, arguments = stack[-1]
            unknown = itertools.filterfalse(known.__contains__, arguments)
            following = next(itertools.filterfalse(seen.__contains__, unknown), None)
            if following is None:
                seen.setdefault(node)
                stack.pop()
            else:
                stack.append((following, iter(following.args)))
    return list(seen)


def computed_of(node: Node) -> tuple[Node, ...]:
    """Return the arguments that a value is computed from.

    The second argument of ``instead`` replaces the first for gradients only.
    """
    if node.op == "instead":
        return node.args[:1]
    return node.args


def derived_of(node: Node) -> tuple[Node, ...]:
    """Return the arguments that a value and its derivatives are computed from.

    For ``instead(x, y)`` the result is both if x is detached or a number, and otherwise x alone.
    """
    if node.op == "instead" and node.args[0].op in ("detached", "const"):
        return node.args
    return computed_of(node)


def reachable(
    roots: Iterable[Node],
    stop: Callable[[Node], bool] = lambda node: False,
    arguments: Callable[[Node], tuple[Node, ...]] = computed_of,
) -> set[Node]:
    """Return the roots and what they are computed from.

    The search ends at nodes for which ``stop`` returns True: these are in the result, but their
    arguments are not.
    """
    nodes: set[Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node in nodes:
            continue
        nodes.add(node)
        if not stop(node):
            pending.extend(arguments(node))
    return nodes


def gradient_sources(roots: Iterable[Node]) -> frozenset[int]:
    """Return the indices of the inputs that autograd would reach from these values.

    A gradient that is always zero, such as the gradient of ``sign``, counts. Detached and compared
    values have none.
    """
    inputs = set[int]()
    seen = set[Node]()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node in seen or _is_constant(node):
            continue
        seen.add(node)
        if node.op == "input":
            inputs.add(node.attrs[0])
        # The first argument is a condition, or a value whose gradient another replaces.
        skipped = 1 if node.op in ("instead", "where") else 0
        pending += node.args[skipped:]
    return frozenset(inputs)


def _is_constant(node: Node) -> bool:
    """Whether autograd goes no further than a value."""
    return node.kind != "float" or node.op in _WITHOUT_GRADIENTS
