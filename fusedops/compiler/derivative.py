"""Reverse-mode differentiation of a graph, into the same graph.

What the backward computes again is a node of the forward. The adjoint of a value without columns
is a sum over columns. Sums over rows are left to the caller: the gradient of a vector varies along
rows here, and is summed over them once, in the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..core.activations import ACTIVATIONS
from .factors import Factoring
from .ir import Graph, Node, is_bounded, topological
from .structure import Part, Structure, nodes_of, without

__all__ = ["cotangent", "gradients"]

# A rule takes the graph, a node and the node's adjoint ``g``, and returns the products of ``g`` and
# the partial derivatives; None for an argument without a gradient.
_Rule = Callable[[Graph, Node, Node], Sequence[Node | None]]


def cotangent(structure: Structure, output: int, part: Part) -> Node:
    """Return the gradient of an output's part."""
    operand = structure.outputs[output]
    axes = without(operand.axes, structure.unrolled)
    return structure.graph.make("cotangent", attrs=(output, part), axes=axes, kind="float")


def gradients(
    structure: Structure,
    seeds: Mapping[Node, Node],
    inputs: Sequence[int],
    *,
    of_results: bool = False,
) -> dict[int, dict[Part, Node]]:
    """Return the gradients of inputs, by part. Inputs without a gradient are left out.

    Args:
        structure: the function.
        seeds: the cotangents of nodes.
        inputs: the indices of the inputs whose gradients are wanted.
        of_results: whether derivatives that are functions of a rounded result, as that of ReLU, are
            computed from it, as PyTorch does, and not from the argument.
    """
    backward = _Backward(structure, _rounded_results(seeds) if of_results else {})
    for node, seed in seeds.items():
        backward.add(node, seed, seed.axes & set(structure.columns))
    for node in reversed(topological(seeds)):
        backward.visit(node)
    results: dict[int, dict[Part, Node]] = {}
    for index in inputs:
        operand = structure.inputs[index]
        axes = without(operand.axes, structure.unrolled)
        for part in structure.parts(operand):
            leaf = structure.graph.make("input", attrs=(index, part), axes=axes, kind=operand.kind)
            adjoint = backward.adjoint(leaf)
            if adjoint is not None:
                results.setdefault(index, {})[part] = adjoint
    rewritten = Factoring(structure, nodes_of(results.values()))
    return {
        index: dict(zip(parts, map(rewritten, parts.values()), strict=True))
        for index, parts in results.items()
    }


def _rounded_results(nodes: Iterable[Node]) -> dict[Node, Node]:
    """Return the rounded values of nodes with a derivative in `_OF_RESULT`.

    The results of casts are left out: of ``sigmoid(x.float()).to(bf16)`` PyTorch saves the result
    in fp32. From the one in bf16, which is 1 for ``x > 6``, the derivative would be zero.
    """
    rounded: dict[Node, Node] = {}
    for node in topological(nodes):
        if node.op == "round" and node.args[0].op in _OF_RESULT:
            rounded[node.args[0]] = node
    return rounded


class _Backward:
    """Accumulates the adjoints of nodes.

    Attributes:
        rounded: the rounded results from which derivatives are computed.
        terms: the terms of each node's adjoint. Each is ``factor * sum(rest, over)``, with a factor
            that is constant along the axes ``over``. A term's key is its factor and its axes:
            contributions with the same key share one sum.
    """

    def __init__(self, structure: Structure, rounded: Mapping[Node, Node]) -> None:
        self.structure, self.rounded = structure, rounded
        self.graph = structure.graph
        self.terms: dict[Node, dict[tuple[Node, tuple[int, ...]], Node]] = {}

    def visit(self, node: Node) -> None:
        """Add what a node contributes to the adjoints of its arguments."""
        if node.kind != "float" or not node.args:
            return
        adjoint = self.adjoint(node)
        if adjoint is None:
            return
        contributions = self._contributions(node, adjoint)
        if _is_of_itself(node):
            # The two contributions cancel, for example if a row has one element, which is its mean.
            # They are added to each other first: added one by one to other terms, they would leave
            # a rounding error.
            contributions = (self.graph.binary("add", *contributions), None)  # type: ignore[arg-type]
        spread = self._spread(node)
        for arg, contribution in zip(node.args, contributions, strict=True):
            if contribution is None:
                continue
            if arg.kind == "float":
                self.add(arg, contribution, spread)

    def _spread(self, node: Node) -> frozenset[int]:
        """Return the column axes along which a node's adjoint varies: all, or none.

        It varies along all if the node has any. The caller sums over those that the node does not
        have. The adjoint of a number of each block varies along the blocks.
        """
        structure = self.structure
        if structure.has_blocks(node.axes):
            return frozenset(structure.outer)
        columns = frozenset(structure.columns)
        return columns if node.axes & columns else frozenset()

    # The adjoint of a number of a row is a sum over the row. For y = (x - mean) * rstd, with the
    # adjoint g of y:
    #
    #   argument   contribution      is added as
    #   rstd       g * (x - mean)    terms[rstd][1, columns] += g * (x - mean)
    #   x - mean   g * rstd          terms[x - mean][1, ()] += g * rstd
    #   mean       -(g * rstd)       terms[mean][-rstd, columns] += g
    #
    # A factor that is the same along the row, as rstd is, stays outside of the sum. Contributions
    # with one factor are added, and then summed once.

    def add(self, node: Node, contribution: Node, columns: frozenset[int]) -> None:
        """Add a contribution to a node's adjoint.

        Args:
            node: the node.
            contribution: the value, which may be constant along some of ``columns``.
            columns: the column axes that it has an element for.
        """
        spread = self._spread(node)
        summed = columns - spread
        # The sum over an axis along which the contribution is constant is a product with the size
        # of the axis.
        factor_of_sums = self._count(summed - contribution.axes)
        # Conversely, an adjoint has all columns if its node has any. The caller will sum it over
        # the axes that the node does not have. If the contribution does not have these axes either,
        # it is divided by their size. For columns c0 and c1, and a node x that has only c0:
        #
        #   sum of x over c0, of adjoint g    g has no columns: x gets g / size(c1)
        divisor = self._count(spread - columns - node.axes)
        if factor_of_sums != divisor:
            scale = self.graph.const(factor_of_sums / divisor)
            contribution = self.graph.binary("mul", contribution, scale)
        over = tuple(sorted(summed & contribution.axes))
        factor, rest = self._factored(contribution, over)
        terms = self.terms.setdefault(node, {})
        term = terms.get((factor, over))
        terms[factor, over] = rest if term is None else self.graph.binary("add", term, rest)

    def _count(self, axes: Iterable[int]) -> int:
        return self.structure.size(axes)

    def adjoint(self, node: Node) -> Node | None:
        """Return the sum of all terms of a node; None without any."""
        adjoint: Node | None = None
        for (factor, over), term in self.terms.get(node, {}).items():
            summed = self.graph.reduce("sum", term, over, exact=True)
            total = self.graph.binary("mul", factor, summed)
            adjoint = total if adjoint is None else self.graph.binary("add", adjoint, total)
        return adjoint

    def _factored(self, node: Node, over: Sequence[int]) -> tuple[Node, Node]:
        """Return a value as a finite factor that is constant along axes, and the rest.

        Without axes the value is the rest.
        """
        factor = self.graph.const(1.0)
        while over:
            split = self._split(node, over)
            if split is None:
                break
            constant, node = split
            factor = self.graph.binary("mul", factor, constant)
        return factor, node

    def _split(self, node: Node, over: Sequence[int]) -> tuple[Node, Node] | None:
        """Return a product's bounded factor that is constant along axes, and its other factor.

        A negated value is a product with minus one. Returns None if the node is no product, or has
        no such factor.
        """
        if node.op not in ("neg", "mul"):
            return None
        constants = [arg for arg in node.args if arg.axes.isdisjoint(over) and is_bounded(arg)]
        if node.op == "mul" and not constants:
            return None
        # Created for products too, which do not use it: `Graph.binary` orders operands by the order
        # in which their nodes were created, and this keeps the order the same in both cases.
        minus_one = self.graph.const(-1.0)
        if node.op == "neg":
            return minus_one, node.args[0]
        first, second = node.args
        constant = constants[0]
        return constant, second if constant is first else first

    def _contributions(self, node: Node, g: Node) -> Sequence[Node | None]:
        """Return the products of a node's adjoint and its partial derivatives."""
        op = node.op
        graph = self.graph
        if op in ("sum", "round", "narrowed", "rounded"):
            return (g,)
        if op == "amax":
            return (self._amax(node, g),)
        if op == "pick":
            return (self._picked(node, g), None)
        if op == "cast":
            return (g if node.args[0].kind == "float" else None,)
        if node in self.rounded:
            return (_OF_RESULT[op](graph, self.rounded[node], g),)
        if op == "relu":
            # A selection, not a product: zero times an infinite gradient would be NaN.
            return (_where_positive(graph, node.args[0], g),)
        if op in ACTIVATIONS:
            return (graph.binary("mul", g, graph.make(f"d:{op}", node.args[0])),)
        if op == "mul" and node.args[0] is node.args[1]:
            # One product instead of two and their sum. ``g`` is doubled first: if it is one number
            # for a row, it is doubled once for all columns.
            return _mul(graph, graph.binary("mul", g, graph.const(2.0)), node.args[0]), None
        return _RULES[op](graph, node, g)

    def _amax(self, node: Node, g: Node) -> Node:
        """Return the gradient of a row whose largest elements share it.

        A second attribute, "first", marks ``max(dim)``: only the first of them has the gradient.
        """
        graph = self.graph
        (x,) = node.args
        if len(node.attrs) > 1:
            return self._first(node, g)
        largest = graph.make("eq", x, node)
        zero = graph.const(0.0)
        one = graph.const(1.0)
        count = graph.reduce("sum", graph.where(largest, one, zero), node.attrs[0])
        share = graph.binary("div", g, count)
        # A product with zero, for a row that has a NaN: no element equals it, the share is infinite
        # or NaN, and so all elements have a gradient of NaN.
        return graph.where(largest, share, graph.binary("mul", share, zero))

    def _first(self, node: Node, g: Node) -> Node:
        """Return the gradient of a row whose first largest element has it.

        The first is the least index among the largest, computed as the largest negative index.
        """
        graph = self.graph
        (x,) = node.args
        (axis,) = node.attrs[0]
        index = graph.make("iota", attrs=(axis,), axes=(axis,), kind="int")
        position = graph.make("cast", index, kind="float")
        beyond = graph.const(-float(self.structure.sizes[axis]))
        largest = graph.make("eq", x, node)
        if x.kind == "float":
            largest = graph.binary("or", largest, graph.make("isnan", x))
        candidates = graph.where(largest, graph.unary("neg", position), beyond)
        first = graph.unary("neg", graph.reduce("amax", candidates, (axis,)))
        return graph.where(graph.make("eq", position, first), g, graph.const(0.0))

    def _picked(self, node: Node, g: Node) -> Node:
        """Return the gradient of a row whose picked element has it."""
        graph = self.graph
        (axis,) = node.attrs[0]
        index = graph.make("iota", attrs=(axis,), axes=(axis,), kind="int")
        return graph.where(graph.make("eq", index, node.args[1]), g, graph.const(0.0))


def _is_of_itself(node: Node) -> bool:
    """Whether this is the difference of a value from itself, or its quotient by itself."""
    if node.op not in ("sub", "div"):
        return False
    first, second = node.args
    return first is second


def _mul(graph: Graph, *factors: Node) -> Node:
    product = factors[0]
    for factor in factors[1:]:
        product = graph.binary("mul", product, factor)
    return product


def _where_positive(graph: Graph, x: Node, g: Node) -> Node:
    """Return ``g`` where ``x`` is positive or NaN, else zero."""
    zero = graph.const(0.0)
    return graph.where(graph.make("le", x, zero), zero, g)


def _of_sigmoid(graph: Graph, y: Node, g: Node) -> Node:
    return _mul(graph, g, y, graph.binary("sub", graph.const(1.0), y))


def _of_tanh(graph: Graph, y: Node, g: Node) -> Node:
    return _mul(graph, g, graph.binary("sub", graph.const(1.0), _mul(graph, y, y)))


# Gradients from an operator's result and its adjoint, which are PyTorch's formulas, too.
_OF_RESULT: dict[str, Callable[[Graph, Node, Node], Node]] = {
    "relu": _where_positive,
    "sigmoid": _of_sigmoid,
    "tanh": _of_tanh,
    "exp": lambda graph, y, g: _mul(graph, g, y),
}


def _unary_rule(function: Callable[[Graph, Node, Node], Node]) -> _Rule:
    """Return the rule of an operator ``y = f(x)`` from its derivative, a function of x and y."""
    return lambda graph, node, g: (_mul(graph, g, function(graph, node.args[0], node)),)


def _divided(graph: Graph, node: Node, g: Node) -> Sequence[Node]:
    # The derivative by y is -(g / y) * (x / y). ``node`` is x / y, computed by the forward.
    quotient = graph.binary("div", g, node.args[1])
    return quotient, graph.unary("neg", _mul(graph, quotient, node))


# At a kink a derivative is a convention. These are PyTorch's:
#
#   relu, abs at 0                 0
#   maximum, minimum of equals     half of the gradient for each
#   amax of several equal          an equal share for each of them
#   max(dim), min(dim)             all of it for the first
#   std, norms at 0                0
#
# If a formula would multiply zero by infinity, the rule selects with `where` instead.


def _extremum(comparison: str) -> _Rule:
    def rule(graph: Graph, node: Node, g: Node) -> Sequence[Node]:
        x, y = node.args
        half = _mul(graph, g, graph.const(0.5))
        zero = graph.const(0.0)
        # NaN compares false: then both arguments have the whole gradient.
        tied = graph.where(graph.make("eq", x, y), half, g)
        return (
            graph.where(graph.make(comparison, y, x), zero, tied),
            graph.where(graph.make(comparison, x, y), zero, tied),
        )

    return rule


def _where(graph: Graph, node: Node, g: Node) -> Sequence[Node | None]:
    zero = graph.const(0.0)
    return None, graph.where(node.args[0], g, zero), graph.where(node.args[0], zero, g)


def _rooted(graph: Graph, node: Node, g: Node) -> Sequence[Node]:
    """Return the gradient of a root, with zero for a root of zero.

    There the divisor is one, so that neither the gradient nor its derivative divides by zero.
    """
    is_zero = graph.make("eq", node, graph.const(0.0))
    zero = graph.const(0.0)
    divisor = graph.where(is_zero, graph.const(1.0), node)
    gradient = graph.binary("div", _mul(graph, g, graph.const(0.5)), divisor)
    return (graph.where(is_zero, zero, gradient),)


def _one_less(graph: Graph, node: Node) -> Node:
    """Return a power with an exponent that is less by one.

    With exponents of 0.5 and -0.5 it is a root, which is NaN for minus infinity as in PyTorch. The
    power would be infinite or zero.
    """
    (x,) = node.args
    exponent = node.attrs[0] - 1.0
    roots = {0.5: "sqrt", -0.5: "rsqrt"}
    if exponent in roots:
        return graph.unary(roots[exponent], x)
    return graph.make("pow", x, attrs=(exponent,))


def _powered(graph: Graph, node: Node, g: Node) -> Sequence[Node]:
    x, exponent = node.args
    zero = graph.const(0.0)
    one = graph.const(1.0)
    less = graph.make("power", x, graph.binary("sub", exponent, one))
    by_base = graph.where(graph.make("eq", exponent, zero), zero, _mul(graph, exponent, less))
    # If the base is zero, the power does not depend on the exponent. The logarithm is then that of
    # one, because minus infinity times zero would be NaN.
    flat = graph.binary("and", graph.make("eq", x, zero), graph.make("ge", exponent, zero))
    logarithm = graph.unary("log", graph.where(flat, one, x))
    by_exponent = graph.where(flat, zero, _mul(graph, node, logarithm))
    return _mul(graph, g, by_base), _mul(graph, g, by_exponent)


def _xlogy(graph: Graph, node: Node, g: Node) -> Sequence[Node]:
    x, y = node.args
    # As in PyTorch, x has no gradient if it is zero and y has no logarithm.
    zero = graph.const(0.0)
    flat = graph.binary("and", graph.make("eq", x, zero), graph.make("le", y, zero))
    by_x = graph.where(flat, zero, graph.make("xlogy", g, y))
    by_y = _mul(graph, g, graph.binary("div", x, y))
    return by_x, by_y


def _powered_by_number(graph: Graph, node: Node, g: Node) -> Sequence[Node]:
    return (_mul(graph, g, _one_less(graph, node), graph.const(node.attrs[0])),)


def _log1p(graph: Graph, node: Node, g: Node) -> Sequence[Node]:
    return (graph.binary("div", g, graph.binary("add", node.args[0], graph.const(1.0))),)


def _log2(graph: Graph, node: Node, g: Node) -> Sequence[Node]:
    return (graph.binary("div", g, _mul(graph, node.args[0], graph.const(math.log(2.0)))),)


def _erf(graph: Graph, x: Node, y: Node) -> Node:
    bell = graph.unary("exp", graph.unary("neg", _mul(graph, x, x)))
    return _mul(graph, bell, graph.const(2.0 / math.sqrt(math.pi)))


# Values without a gradient, and steps, whose derivative is zero. An input that no contribution
# reaches has no adjoint, and the kernels write zeros for it.
def _nothing(graph: Graph, node: Node, g: Node) -> Sequence[None]:
    return (None,) * len(node.args)


_RULES: dict[str, _Rule] = {
    "neg": lambda graph, node, g: (graph.unary("neg", g),),
    "exp": _unary_rule(lambda graph, x, y: y),
    "log": lambda graph, node, g: (graph.binary("div", g, node.args[0]),),
    "log1p": _log1p,
    "expm1": _unary_rule(lambda graph, x, y: graph.binary("add", y, graph.const(1.0))),
    "sqrt": lambda graph, node, g: (graph.binary("div", _mul(graph, g, graph.const(0.5)), node),),
    "root": _rooted,
    "exp2": _unary_rule(lambda graph, x, y: _mul(graph, y, graph.const(math.log(2.0)))),
    "log2": _log2,
    "pow": _powered_by_number,
    "rsqrt": _unary_rule(lambda graph, x, y: _mul(graph, _mul(graph, y, y), y, graph.const(-0.5))),
    "reciprocal": _unary_rule(lambda graph, x, y: graph.unary("neg", _mul(graph, y, y))),
    "abs": _unary_rule(lambda graph, x, y: graph.unary("sign", x)),
    "sin": _unary_rule(lambda graph, x, y: graph.unary("cos", x)),
    "cos": _unary_rule(lambda graph, x, y: graph.unary("neg", graph.unary("sin", x))),
    "erf": _unary_rule(_erf),
    "instead": lambda graph, node, g: (None, g),
    "sign": _nothing,
    "floor": _nothing,
    "ceil": _nothing,
    "rint": _nothing,
    "constant_to_gradients": _nothing,
    "detached": _nothing,
    "of_ordinal": _nothing,
    "add": lambda graph, node, g: (g, g),
    "sub": lambda graph, node, g: (g, graph.unary("neg", g)),
    "mul": lambda graph, node, g: (_mul(graph, g, node.args[1]), _mul(graph, g, node.args[0])),
    "div": _divided,
    "div_rn": _nothing,  # a part of `round`
    "power": _powered,
    "xlogy": _xlogy,
    "fmod": _nothing,
    "maximum": _extremum("gt"),
    "minimum": _extremum("lt"),
    "where": _where,
}
