"""Reverse-mode differentiation of a graph, into the same graph.

What the backward computes again is a node of the forward. Sums over columns are taken where a value lacks them. Sums
over rows are left to the caller: an input's gradient may have rows that the input has not, and all that is linear comes
before the one sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ..core.activations import ACTIVATIONS
from .ir import Graph, Node, topological
from .structure import Part, Structure

__all__ = ["cotangent", "gradients"]

# The products of a cotangent and an operator's partial derivatives; None where there is none.
_Rule = Callable[[Graph, Node, Node], Sequence[Node | None]]


def cotangent(structure: Structure, output: int, part: Part) -> Node:
    """The gradient of an output's part."""
    operand = structure.outputs[output]
    axes = [axis for axis in operand.axes if axis not in structure.unrolled]
    return structure.graph.make("cotangent", attrs=(output, part), axes=axes, kind="float")


def gradients(structure: Structure, seeds: Mapping[Node, Node], inputs: Sequence[int]) -> dict[int, dict[Part, Node]]:
    """The gradients of inputs, by part; of inputs without a gradient none.

    Args:
        structure: the function.
        seeds: the cotangents of nodes.
        inputs: places of the inputs whose gradients are wanted.
    """
    backward = _Backward(structure)
    for node, seed in seeds.items():
        backward.add(node, seed, seed.axes & set(structure.columns))
    for node in reversed(topological(seeds)):
        backward.visit(node)
    found: dict[int, dict[Part, Node]] = {}
    for place in inputs:
        operand = structure.inputs[place]
        for part in structure.parts(operand):
            axes = [axis for axis in operand.axes if axis not in structure.unrolled]
            leaf = structure.graph.make("input", attrs=(place, part), axes=axes, kind=operand.kind)
            adjoint = backward.adjoint(leaf)
            if adjoint is not None:
                found.setdefault(place, {})[part] = adjoint
    return found


class _Backward:
    def __init__(self, structure: Structure) -> None:
        self.structure, self.graph = structure, structure.graph
        # Of each node, what was added for it: by a factor that whole rows have, and the axes to sum over, all of which each
        # term has.
        self.terms: dict[Node, dict[tuple[Node, tuple[int, ...]], Node]] = {}

    def visit(self, node: Node) -> None:
        """Hand a node's adjoint on to its arguments."""
        adjoint = self.adjoint(node) if node.kind == "float" and node.args else None
        if adjoint is None:
            return
        contributions = self._contributions(node, adjoint)
        if node.op in ("sub", "div") and node.args[0] is node.args[1]:
            # They cancel, as where a row's mean is its one element: before smaller terms of others are added to one.
            contributions = (self.graph.binary("add", *contributions), None)  # type: ignore[arg-type]
        for arg, contribution in zip(node.args, contributions, strict=True):
            if contribution is not None and arg.kind == "float":
                self.add(arg, contribution, self._spread(node))

    def _spread(self, node: Node) -> frozenset[int]:
        """The columns that a node's adjoint has: all or none. A sum over those that the node lacks is the caller's."""
        columns = frozenset(self.structure.columns)
        return columns if node.axes & columns else frozenset()

    def add(self, node: Node, contribution: Node, columns: frozenset[int]) -> None:
        """Add to a node's adjoint what is to be summed over columns."""
        spread = self._spread(node)
        gone = columns - spread
        more = math.prod([self.structure.sizes[axis] for axis in gone - contribution.axes])
        less = math.prod([self.structure.sizes[axis] for axis in spread - columns - node.axes])
        if more != less:
            contribution = self.graph.binary("mul", contribution, self.graph.const(more / less))
        over = tuple(sorted(gone & contribution.axes))
        factor, rest = self._factored(contribution, over)
        terms = self.terms.setdefault(node, {})
        known = terms.get((factor, over))
        terms[factor, over] = rest if known is None else self.graph.binary("add", known, rest)

    def adjoint(self, node: Node) -> Node | None:
        """What was added for a node: terms with one factor of whole rows are one sum over columns."""
        found: Node | None = None
        for (factor, over), term in self.terms.get(node, {}).items():
            total = self.graph.binary("mul", factor, self.graph.reduce("sum", term, over))
            found = total if found is None else self.graph.binary("add", found, total)
        return found

    def _factored(self, node: Node, over: Sequence[int]) -> tuple[Node, Node]:
        """A value as a factor that is the same along these axes, and the rest; without axes the value is the rest."""
        factor = self.graph.const(1.0)
        while over and (node.op == "neg" or (node.op == "mul" and any(not arg.axes & set(over) for arg in node.args))):
            whole = self.graph.const(-1.0)
            if node.op == "mul":
                whole = next(arg for arg in node.args if not arg.axes & set(over))
            node = next(arg for arg in node.args if arg is not whole)
            factor = self.graph.binary("mul", factor, whole)
        return factor, node

    def _contributions(self, node: Node, g: Node) -> Sequence[Node | None]:
        op, graph = node.op, self.graph
        if op in ("sum", "round", "narrowed", "rounded"):
            return (g,)
        if op == "amax":
            return (self._amax(node, g),)
        if op == "pick":
            return (self._picked(node, g), None)
        if op == "cast":
            return (g if node.args[0].kind == "float" else None,)
        if op == "relu":  # a gate, which lets no infinity through
            return (graph.where(graph.make("le", node.args[0], graph.const(0.0)), graph.const(0.0), g),)
        if op in ACTIVATIONS:
            return (graph.binary("mul", g, graph.make(f"d:{op}", node.args[0])),)
        return _RULES[op](graph, node, g)

    def _amax(self, node: Node, g: Node) -> Node:
        """The largest elements of a row share its gradient."""
        graph, (x,) = self.graph, node.args
        if len(node.attrs) > 1:
            return self._first(node, g)
        largest = graph.make("eq", x, node)
        zero, one = graph.const(0.0), graph.const(1.0)
        count = graph.reduce("sum", graph.where(largest, one, zero), node.attrs[0])
        share = graph.binary("div", g, count)
        # Zero, or NaN in a row that has a NaN: no element equals it.
        return graph.where(largest, share, graph.binary("mul", share, zero))

    def _first(self, node: Node, g: Node) -> Node:
        """The first of the largest elements of a row has its gradient."""
        graph, (x,), (axis,) = self.graph, node.args, node.attrs[0]
        place = graph.make("cast", graph.make("iota", attrs=(axis,), axes=(axis,), kind="int"), kind="float")
        beyond = graph.const(-float(self.structure.sizes[axis]))
        largest = graph.make("eq", x, node)
        if x.kind == "float":
            largest = graph.binary("or", largest, graph.make("isnan", x))
        candidates = graph.where(largest, graph.unary("neg", place), beyond)
        first = graph.unary("neg", graph.reduce("amax", candidates, (axis,)))
        return graph.where(graph.make("eq", place, first), g, graph.const(0.0))

    def _picked(self, node: Node, g: Node) -> Node:
        """The element that was picked has the gradient, if there is one axis of elements."""
        graph, (axis,) = self.graph, node.attrs[0]
        place = graph.make("iota", attrs=(axis,), axes=(axis,), kind="int")
        return graph.where(graph.make("eq", place, node.args[1]), g, graph.const(0.0))


def _mul(graph: Graph, *factors: Node) -> Node:
    found = factors[0]
    for factor in factors[1:]:
        found = graph.binary("mul", found, factor)
    return found


def _of_one(function: Callable[[Graph, Node, Node], Node]) -> _Rule:
    """The rule of an operator of one value, from its derivative as a function of the value and the result."""
    return lambda graph, node, g: (_mul(graph, g, function(graph, node.args[0], node)),)


def _divided(graph: Graph, node: Node, g: Node) -> Sequence[Node]:
    quotient = graph.binary("div", g, node.args[1])
    return quotient, graph.unary("neg", _mul(graph, quotient, node))


def _extremum(comparison: str) -> _Rule:
    def rule(graph: Graph, node: Node, g: Node) -> Sequence[Node]:
        x, y = node.args
        half, zero = _mul(graph, g, graph.const(0.5)), graph.const(0.0)
        tied = graph.where(graph.make("eq", x, y), half, g)  # both have that of a NaN
        return (
            graph.where(graph.make(comparison, y, x), zero, tied),
            graph.where(graph.make(comparison, x, y), zero, tied),
        )

    return rule


def _where(graph: Graph, node: Node, g: Node) -> Sequence[Node | None]:
    zero = graph.const(0.0)
    return None, graph.where(node.args[0], g, zero), graph.where(node.args[0], zero, g)


def _rooted(graph: Graph, node: Node, g: Node) -> Sequence[Node]:
    """That of zero is zero, and so is its own derivative: nothing is divided by zero, neither here nor there."""
    is_zero, zero = graph.make("eq", node, graph.const(0.0)), graph.const(0.0)
    divisor = graph.where(is_zero, graph.const(1.0), node)
    return (graph.where(is_zero, zero, graph.binary("div", _mul(graph, g, graph.const(0.5)), divisor)),)


def _one_less(graph: Graph, node: Node) -> Node:
    """A power with an exponent that is less by one; roots of minus infinity are NaN, as PyTorch's."""
    (x,), exponent = node.args, node.attrs[0] - 1.0
    roots = {0.5: "sqrt", -0.5: "rsqrt"}
    return graph.unary(roots[exponent], x) if exponent in roots else graph.make("pow", x, attrs=(exponent,))


def _powered(graph: Graph, node: Node, g: Node) -> Sequence[Node]:
    x, exponent = node.args
    zero, one = graph.const(0.0), graph.const(1.0)
    less = graph.make("power", x, graph.binary("sub", exponent, one))
    by_base = graph.where(graph.make("eq", exponent, zero), zero, _mul(graph, exponent, less))
    # Zero to a power does not change with it.
    flat = graph.binary("and", graph.make("eq", x, zero), graph.make("ge", exponent, zero))
    by_exponent = graph.where(flat, zero, _mul(graph, node, graph.unary("log", graph.where(flat, one, x))))
    return _mul(graph, g, by_base), _mul(graph, g, by_exponent)


def _xlogy(graph: Graph, node: Node, g: Node) -> Sequence[Node]:
    x, y = node.args
    zero = graph.const(0.0)
    flat = graph.binary("and", graph.make("eq", x, zero), graph.make("le", y, zero))
    return graph.where(flat, zero, graph.make("xlogy", g, y)), _mul(graph, g, graph.binary("div", x, y))


def _nothing(graph: Graph, node: Node, g: Node) -> Sequence[None]:
    return (None,) * len(node.args)


_RULES: dict[str, _Rule] = {
    "neg": lambda graph, node, g: (graph.unary("neg", g),),
    "exp": _of_one(lambda graph, x, y: y),
    "log": lambda graph, node, g: (graph.binary("div", g, node.args[0]),),
    "log1p": lambda graph, node, g: (graph.binary("div", g, graph.binary("add", node.args[0], graph.const(1.0))),),
    "expm1": _of_one(lambda graph, x, y: graph.binary("add", y, graph.const(1.0))),
    "sqrt": lambda graph, node, g: (graph.binary("div", _mul(graph, g, graph.const(0.5)), node),),
    "root": _rooted,
    "exp2": _of_one(lambda graph, x, y: _mul(graph, y, graph.const(math.log(2.0)))),
    "log2": lambda graph, node, g: (graph.binary("div", g, _mul(graph, node.args[0], graph.const(math.log(2.0)))),),
    "pow": lambda graph, node, g: (_mul(graph, g, _one_less(graph, node), graph.const(node.attrs[0])),),
    "rsqrt": _of_one(lambda graph, x, y: _mul(graph, _mul(graph, y, y), y, graph.const(-0.5))),
    "reciprocal": _of_one(lambda graph, x, y: graph.unary("neg", _mul(graph, y, y))),
    "abs": _of_one(lambda graph, x, y: graph.unary("sign", x)),
    "sin": _of_one(lambda graph, x, y: graph.unary("cos", x)),
    "cos": _of_one(lambda graph, x, y: graph.unary("neg", graph.unary("sin", x))),
    "erf": _of_one(lambda graph, x, y: _mul(graph, graph.unary("exp", graph.unary("neg", _mul(graph, x, x))),
                                            graph.const(2.0 / math.sqrt(math.pi)))),
    "instead": lambda graph, node, g: (None, g),
    "sign": _nothing,
    "floor": _nothing,
    "ceil": _nothing,
    "constant_to_gradients": _nothing,
    "detached": _nothing,
    "add": lambda graph, node, g: (g, g),
    "sub": lambda graph, node, g: (g, graph.unary("neg", g)),
    "mul": lambda graph, node, g: (_mul(graph, g, node.args[1]), _mul(graph, g, node.args[0])),
    "div": _divided,
    "power": _powered,
    "xlogy": _xlogy,
    "fmod": _nothing,
    "maximum": _extremum("gt"),
    "minimum": _extremum("lt"),
    "where": _where,
}  # fmt: skip
