"""The representation of a row-wise function: a graph of few operators on values that know their axes.

A value has no shape but a set of axes, and broadcasting is implied: the sum of a row ``{rows, columns}`` and a vector
``{columns}`` has both. Equal expressions are one node, so that what a backward computes again merges with the forward.
All floating-point values are computed in one dtype; what is rounded says so with ``round``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["BINARY", "COMPARISONS", "REDUCTIONS", "UNARY", "Graph", "Node", "computed_of", "derived_of", "gradient_sources",
           "reachable", "topological"]  # fmt: skip

# Operators of one value, of two, and of two with a truth value; ``where`` takes three. The activations of
# `fusedops.core.activations` are operators of one value too, and so are their derivatives.
UNARY = frozenset({"neg", "exp", "exp2", "log2",
                   "log", "log1p", "expm1", "sqrt", "root", "pow", "rsqrt", "reciprocal", "abs", "sign", "sin",
                   "cos", "erf", "floor", "ceil", "not", "isnan"})  # fmt: skip
BINARY = frozenset({"power", "fmod", "quotient", "xlogy", "add", "sub", "mul", "div", "maximum", "minimum", "and", "or",
                    "xor"})  # fmt: skip
COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
REDUCTIONS = frozenset({"sum", "amax", "pick"})


@dataclass(frozen=True, eq=False)
class Node:
    """One value.

    Attributes:
        op: its operator. Leaves are ``input``, ``const``, ``iota`` (the index along an axis), ``keep`` (dropout's factor),
            ``cotangent`` and ``saved``.
        args: the values that it is computed of.
        attrs: what else decides it, hashable.
        axes: the axes along which it varies.
        kind: "float", "int" or "bool".
        name: what the user called it; "" where he did not.
    """

    op: str
    args: tuple[Node, ...]
    attrs: tuple[Any, ...]
    axes: frozenset[int]
    kind: str
    number: int
    names: list[str]

    def __repr__(self) -> str:
        inner = ", ".join([*(f"%{arg.number}" for arg in self.args), *map(repr, self.attrs)])
        return f"%{self.number} = {self.op}({inner})"


class Graph:
    """Makes nodes, each only once."""

    def __init__(self) -> None:
        self.nodes: dict[Any, Node] = {}

    def make(self, op: str, *args: Node, attrs: tuple[Any, ...] = (), axes: Iterable[int] | None = None,
             kind: str | None = None) -> Node:  # fmt: skip
        """The node; ``axes`` and ``kind`` are those of the arguments unless they are given."""
        if op == "constant_to_gradients":
            args = computed_of(args[0]) if args[0].op == "instead" else args
        if op in ("constant_to_gradients", "detached") and args[0].op == "const":
            return args[0]  # numbers have no gradients
        kind = kind or _kind(op, args)
        found = frozenset().union(*[arg.axes for arg in args]) if axes is None else frozenset(axes)
        key = (op, tuple([arg.number for arg in args]), attrs, found, kind)
        node = self.nodes.get(key)
        if node is None:
            node = self.nodes[key] = Node(op, args, attrs, found, kind, len(self.nodes), [])
        return node

    # --- operators, with what is the same written as the same ---------------------------------------------------------

    def const(self, value: float | bool) -> Node:
        """A number."""
        kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
        # Zeros have a sign, and no NaN equals another.
        return self.make("const", attrs=(repr(value) if kind == "float" else value,), kind=kind)

    def unary(self, op: str, x: Node) -> Node:
        """An operator of one value."""
        if op == "neg" and x.op == "neg":
            return x.args[0]
        number = value_of(x)
        if number is not None and op in _FOLDED:
            try:
                return self.const(_FOLDED[op](float(number)))
            except (ValueError, OverflowError, ZeroDivisionError):
                pass
        return self.make(op, x)

    def binary(self, op: str, x: Node, y: Node) -> Node:  # noqa: C901 - one case a rule
        """An operator of two values."""
        a, b = value_of(x), value_of(y)
        if a is not None and b is not None and op in _FOLDED2:
            try:
                return self.const(_FOLDED2[op](a, b))
            except (OverflowError, ZeroDivisionError):
                pass
        if op in ("add", "mul", "maximum", "minimum", "and", "or", "xor") and x.number > y.number:
            x, y, a, b = y, x, b, a
        if op == "mul" and (a == 1 or b == 1):
            return y if a == 1 else x
        if op == "div" and b == 1:
            return x
        if op == "div" and b is not None and _is_power_of_two(b):
            return self.binary("mul", x, self.const(1.0 / b))
        if op in ("add", "sub") and b == 0:
            return x
        if op == "add" and a == 0:
            return y
        if op == "mul" and (a == -1 or b == -1):
            return self.unary("neg", y if a == -1 else x)
        if op == "add" and y.op == "neg":
            return self.binary("sub", x, y.args[0])
        if op == "add" and x.op == "neg":
            return self.binary("sub", y, x.args[0])
        if op == "sub" and y.op == "neg":
            return self.binary("add", x, y.args[0])
        if op == "mul" and (x.op == "neg" or y.op == "neg"):
            inner = [n.args[0] if n.op == "neg" else n for n in (x, y)]
            product = self.binary("mul", *inner)
            return product if x.op == y.op else self.unary("neg", product)
        return self.make(op, x, y)

    def where(self, condition: Node, x: Node, y: Node) -> Node:
        """``x`` where the condition holds, else ``y``."""
        if x is y:
            return x
        return self.make("where", condition, x, y)

    def pick(self, x: Node, index: Node, axes: Iterable[int]) -> Node:
        """One element of each row, by its number. What is the same for a whole row is not picked."""
        over = set(axes)
        if not x.axes & over:
            return x
        if x.op in ("add", "sub", "mul") and any(not arg.axes & over for arg in x.args):
            return self.binary(x.op, *[self.pick(arg, index, over) for arg in x.args])
        if x.op == "neg":
            return self.unary("neg", self.pick(x.args[0], index, over))
        return self.make(
            "pick", x, index, attrs=(tuple(sorted(over & x.axes)),), axes=(x.axes | index.axes) - over, kind=x.kind
        )

    def reduce(self, op: str, x: Node, axes: Iterable[int]) -> Node:
        """A reduction over those of the axes along which the value varies. A factor of whole rows comes out of a sum."""
        over = tuple(sorted(set(axes) & x.axes))
        if not over:
            return x
        if op == "sum" and x.op == "neg":
            return self.unary("neg", self.reduce(op, x.args[0], over))
        if op == "sum" and x.op == "mul" and any(not arg.axes & set(over) for arg in x.args):
            return self.binary("mul", *[self.reduce(op, arg, over) for arg in x.args])
        return self.make(op, x, attrs=(over,), axes=x.axes - set(over))


def value_of(node: Node) -> Any:
    """The number that a node is; None if it is none."""
    if node.op != "const":
        return None
    return float(node.attrs[0]) if node.kind == "float" else node.attrs[0]


def _kind(op: str, args: Sequence[Node]) -> str:
    if op in COMPARISONS or op in ("not", "isnan"):
        return "bool"
    kinds = [arg.kind for arg in (args[1:] if op == "where" else args)]
    return "float" if "float" in kinds else "int" if "int" in kinds else "bool"


def _is_power_of_two(value: float) -> bool:
    return value != 0 and math.isfinite(value) and abs(math.frexp(value)[0]) == 0.5 and math.isfinite(1.0 / value)


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


def topological(roots: Iterable[Node]) -> list[Node]:
    """All that the roots are computed of, arguments first."""
    seen: dict[Node, None] = {}
    stack: list[tuple[Node, Iterator[Node]]] = []
    for root in roots:
        if root in seen:
            continue
        stack.append((root, iter(root.args)))
        while stack:
            node, rest = stack[-1]
            following = next((arg for arg in rest if arg not in seen), None)
            if following is None:
                seen.setdefault(node)
                stack.pop()
            else:
                stack.append((following, iter(following.args)))
    return list(seen)


def computed_of(node: Node) -> tuple[Node, ...]:
    """What a value is computed of: all its arguments, but of ``instead`` not the one that stands for it to gradients."""
    return node.args[:1] if node.op == "instead" else node.args


def derived_of(node: Node) -> tuple[Node, ...]:
    """What a value and its derivatives are computed of: what stands for it to gradients, too, where it has none itself."""
    return node.args if node.op == "instead" and node.args[0].op in ("detached", "const") else computed_of(node)


def reachable(roots: Iterable[Node], stop: Callable[[Node], bool] = lambda node: False,
              arguments: Callable[[Node], tuple[Node, ...]] = computed_of) -> set[Node]:  # fmt: skip
    """The roots and what they are computed of, but for what lies behind nodes at which ``stop`` says so."""
    found: set[Node] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            if not stop(node):
                todo.extend(arguments(node))
    return found


def gradient_sources(roots: Iterable[Node]) -> frozenset[int]:
    """The places of the inputs that autograd would reach from these values.

    A gradient that is zero whatever the numbers are, as of ``sign``, is one; what is detached or compared has none.
    """
    found, seen, todo = set[int](), set[Node](), list(roots)
    while todo:
        node = todo.pop()
        if node in seen or node.kind != "float" or node.op in ("detached", "constant_to_gradients"):
            continue
        seen.add(node)
        if node.op == "input":
            found.add(node.attrs[0])
        todo += node.args[1:] if node.op in ("instead", "where") else node.args
    return frozenset(found)
