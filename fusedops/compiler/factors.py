"""Factors in a derivative, rearranged for fewer operators and registers.

If a product has several numbers of a row, these are multiplied first, and the columns only once. If
both terms of a sum have a number as a factor, it is moved out of the sum. The remaining term may be
a product that the forward has, and that another gradient needs::

    rstd * g + (x - mean) * (rstd**3 * c)
    rstd * (g + hat * (rstd * c))            hat = (x - mean) * rstd
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Collection

from .ir import BINARY, Node, is_bounded, reachable, topological, value_behind
from .structure import Structure, nodes_of

__all__ = ["Factoring"]


class Factoring:
    """Rewrites the nodes of a derivative, but not the forward's: some of their values are saved.

    Attributes:
        forward: the nodes of the forward.
        again: the nodes of the forward that the derivative needs.
        uses: how many operators have a node as an argument.
        done: the replacement of each node that was rewritten.
    """

    def __init__(self, structure: Structure, roots: Collection[Node]) -> None:
        self.graph = structure.graph
        self.columns = frozenset(structure.columns)
        self.one = self.graph.const(1.0)
        used = reachable(roots)
        self.forward = reachable(nodes_of(structure.results))
        self.again = used & self.forward
        self.uses = Counter(itertools.chain(*[node.args for node in used]))
        self.done = {node: self._differentiated(node) for node in self.forward}

    def __call__(self, root: Node) -> Node:
        """Return the replacement of a node."""
        for node in topological([root], self.done):
            self.done[node] = self._rewritten(node)
        return self.done[root]

    def _differentiated(self, node: Node) -> Node:
        """Return a value of the forward as the derivative needs it.

        In a derivative ``x - constant_to_gradients(mean)`` is ``x - mean``, which the forward has
        too. Numbers of a row are not changed, because they are saved.
        """
        if node.op not in BINARY or self._is_number(node):
            return node
        return self.graph.binary(node.op, *map(value_behind, node.args))

    def _rewritten(self, node: Node) -> Node:
        args = list(map(self.done.__getitem__, node.args))
        if node.op in ("add", "sub") and all(map(self._is_term, node.args)):
            return self._sum(node.op, *args)
        if node.op == "mul":
            return self._regrouped(self.graph.binary("mul", *args))
        if node.op in BINARY:
            return self.graph.binary(node.op, *args)
        return self.graph.make(node.op, *args, attrs=node.attrs, axes=node.axes, kind=node.kind)

    def _regrouped(self, node: Node) -> Node:
        """Return a product whose numbers of a row are multiplied first, if there are several."""
        numbers, rest = self._split(node)
        return self._product(numbers, rest) if numbers.total() > 1 else node

    def _is_term(self, node: Node) -> bool:
        """Whether a term has columns, and is an argument of one operator alone."""
        return self.uses[node] == 1 and not self._is_number(node)

    def _is_number(self, node: Node) -> bool:
        """Whether a value is the same in all columns."""
        return node.axes.isdisjoint(self.columns)

    def _sum(self, op: str, x: Node, y: Node) -> Node:
        """Return a sum or a difference as the product of common factors and the rest."""
        x_numbers, x_rest = self._split(x)
        y_numbers, y_rest = self._split(y)
        # Infinity times a sum is not the sum of infinities: see `is_bounded`.
        common = Counter(filter(is_bounded, (x_numbers & y_numbers).elements()))
        if not common:
            return self.graph.binary(op, x, y)
        x = self._product(x_numbers - common, x_rest)
        y = self._product(y_numbers - common, y_rest)
        return self._product(common, self.graph.binary(op, x, y))

    def _split(self, node: Node) -> tuple[Counter[Node], Node]:
        """Return the factors of a product that are numbers of a row, and the rest.

        A product that the forward has, or that two operators need, is one factor.
        """
        if node.op == "mul" and node not in self.forward and self.uses[node] <= 1:
            (x_numbers, x_rest), (y_numbers, y_rest) = map(self._split, node.args)
            return x_numbers + y_numbers, self.graph.binary("mul", x_rest, y_rest)
        if self._is_number(node):
            return Counter([node]), self.one
        return Counter(), node

    def _product(self, numbers: Counter[Node], value: Node) -> Node:
        """Return the product of numbers and a value, from a product of the forward if one fits."""
        product = functools.partial(self.graph.binary, "mul")
        for number in numbers:
            forward_product = product(number, value)
            if forward_product in self.again:
                return self._product(numbers - Counter([number]), forward_product)
        return product(functools.reduce(product, numbers.elements(), self.one), value)
