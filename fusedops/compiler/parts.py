"""Values of a traced function by parts of rows, as nodes of a new graph.

An unrolled axis has no loop in a kernel: each index along it is a value of its own. A traced node
with three heads of 64 columns becomes three nodes::

    traced       (batch, 3 heads, 64)   unbind, mul, stack
    structure    (batch, 64)  head 0    mul
                 (batch, 64)  head 1    mul
                 (batch, 64)  head 2    mul

The new graph has no operators that select or stack parts: they only choose among values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from .errors import NotRowwiseError
from .ir import Graph, Node, gradient_sources
from .numbering import Numbering
from .structure import MOST_COLUMNS_READ_TWICE, Part, parts_along, within, without
from .traced import Traced

__all__ = ["Parts"]

_SIMPLIFIED = ("add", "sub", "mul", "div", "maximum", "minimum", "and", "or", "xor")


class Parts:
    """Builds the nodes of parts.

    Attributes:
        graph: the nodes of parts.
        lines: the user's line of each node's number.
        columns: the column axes.
    """

    def __init__(self, traced: Traced, numbering: Numbering, columns: Sequence[int]) -> None:
        self.traced = traced
        self.numbering = numbering
        self.graph = Graph()
        self.lines: dict[int, int] = {}
        self.columns = frozenset(columns)
        # From a traced node's number and its part to the node in `graph`.
        self._done: dict[tuple[int, Part], Node] = {}

    def of(self, node: Node, parts: Iterable[Part]) -> dict[Part, Node]:
        """Return a node's values in parts of the row."""
        return {part: self.part(node, part) for part in parts}

    def part(self, node: Node, part: Part) -> Node:
        """Return a node's value in a part of the row."""
        # If the node does not have an unrolled axis, all parts along this axis are one node.
        axes = self.numbering.of(node.axes)
        node_part = tuple([(axis, index) for axis, index in part if axis in axes])
        key = (node.number, node_part)
        if key not in self._done:
            self._done[key] = self._named(node, self._built(node, node_part))
        return self._done[key]

    def _named(self, node: Node, result: Node) -> Node:
        """Return a node of a part, with the names and the line of the traced node."""
        if result.op != "const":
            result.names.extend(_new_names(node.names, result.names))
        if node.number in self.traced.lines:
            self.lines.setdefault(result.number, self.traced.lines[node.number])
        return result

    def _built(self, node: Node, part: Part) -> Node:
        build = _BUILDERS.get(node.op)
        if build is not None:
            return build(self, node, part)
        args = [self.part(arg, part) for arg in node.args]
        if node.op in _SIMPLIFIED:
            return self.graph.binary(node.op, *args)
        return self.graph.make(node.op, *args, attrs=node.attrs, kind=node.kind)

    def _leaf(self, node: Node, part: Part) -> Node:
        rolled = self.numbering.rolled(node)
        return self.graph.make(node.op, attrs=(*node.attrs, part), axes=rolled, kind=node.kind)

    def _const(self, node: Node, part: Part) -> Node:
        return self.graph.make("const", attrs=node.attrs[:1], kind=node.kind)

    def _iota(self, node: Node, part: Part) -> Node:
        """Return the index along a dimension, which may be several axes."""
        graph = self.graph
        index = self.graph.const(0)
        indices = dict(part)
        for axis in self.numbering.of_label(node.attrs):
            if axis in indices:
                index_along = graph.const(indices[axis])
            else:
                index_along = graph.make("iota", attrs=(axis,), axes=(axis,), kind="int")
            scaled = graph.binary("mul", index, graph.const(self.numbering.sizes[axis]))
            index = graph.binary("add", scaled, index_along)
        return index

    def _picked(self, node: Node, part: Part) -> Node:
        source, index = node.args
        over = self.numbering.of(node.attrs[0])
        is_unrolled = bool(set(over) & set(self.numbering.unrolled))
        if is_unrolled or len(over) > 1:
            raise NotRowwiseError("gather from rows that are taken apart")
        return self.graph.pick(self.part(source, part), self.part(index, part), over)

    # --- parts of a stack -------------------------------------------------------------------------

    def _stacked(self, node: Node, part: Part) -> Node:
        """Return the stacked value that is this part of the stack: the inverse of `_selected`."""
        indices = dict(part)
        index = 0
        for axis in self.numbering.of_label(node.attrs[0]):
            index = index * self.numbering.sizes[axis] + indices[axis]
        return self.part(node.args[index], part)

    def _selected(self, node: Node, part: Part) -> Node:
        """Return one part of a value along an axis that is unrolled."""
        (source,) = node.args
        indices = dict(part)
        outer_index = node.attrs[1]
        # The axis may have been split into several: the index is divided into one for each.
        for axis in reversed(self.numbering.of_label(node.attrs[0])):
            outer_index, indices[axis] = divmod(outer_index, self.numbering.sizes[axis])
        return self._with_zero_gradients(source, self.part(source, tuple(sorted(indices.items()))))

    def _with_zero_gradients(self, node: Node, selected: Node) -> Node:
        """Return the selected part of a value, with zero gradients for the other parts' inputs.

        In ``torch.stack([x, y])[0]`` the gradient of ``y`` is zero in PyTorch, not None, because
        the gradient of the stack reaches all its inputs. So the selected ``x`` gets the gradient of
        ``where(False, y, x)``, which reaches ``y`` with zeros.
        """
        graph = self.graph
        for index in sorted(gradient_sources([node]) - gradient_sources([selected])):
            source = self.traced.inputs[index].node
            unselected = self.part(source, next(self.numbering.parts(source)))
            unselected = graph.reduce("sum", unselected, self.columns - selected.axes)
            never = graph.make("where", graph.const(False), unselected, selected)
            selected = graph.make("instead", selected, never)
        return selected

    # --- reductions -------------------------------------------------------------------------------

    def _reduction(self, node: Node, part: Part) -> Node:
        """Return a reduction: over the parts by a binary operator, then over the columns."""
        over = self.numbering.of(node.attrs[0])
        unrolled = within(over, self.numbering.unrolled)
        inner = without(over, self.numbering.unrolled)
        combine = "add" if node.op == "sum" else "maximum"
        combined, parts = self._combined(combine, node.args[0], part, unrolled)
        if node.op == "sum":
            return self._sum(combined, inner)
        # PyTorch's `amax` and `max` are both `amax` nodes. `amax` divides the gradient among all
        # largest elements. `max` gives it to the first of them, and its node has the attribute
        # "first".
        is_first = len(node.attrs) > 1
        if is_first and combined.axes.intersection(inner):
            if unrolled or len(inner) > 1:
                raise NotRowwiseError(
                    "max of rows that are taken apart, or have several dimensions; use amax"
                )
            attrs = (tuple(inner), *node.attrs[1:])
            axes = combined.axes - set(inner)
            return self.graph.make("amax", combined, attrs=attrs, axes=axes)
        largest = self.graph.reduce(node.op, combined, inner)
        if len(parts) == 1 or node.kind != "float":
            return largest
        if is_first:
            return self._first(largest, parts)
        return self._shared(largest, parts, inner)

    def _combined(
        self, combine: str, node: Node, part: Part, unrolled: Sequence[int]
    ) -> tuple[Node, list[Node]]:
        """Return the parts of a value along axes, combined by a binary operator, and as a list."""
        node_axes = within(unrolled, self.numbering.of(node.axes))
        parts: list[Node] = []
        combined: Node | None = None
        # Each part is combined before the next one is built: a commutative operator's operands are
        # ordered by when they were created.
        for combined_part in parts_along(node_axes, self.numbering.sizes):
            indices = dict(part) | dict(combined_part)
            value = self.part(node, tuple(sorted(indices.items())))
            parts.append(value)
            combined = value if combined is None else self.graph.binary(combine, combined, value)
        assert combined is not None
        return combined, parts

    def _first(self, largest: Node, parts: Sequence[Node]) -> Node:
        """Return the largest of several columns: the first one that equals it has its gradient."""
        graph = self.graph
        first = parts[-1]
        for part in reversed(parts[:-1]):
            equal = graph.make("eq", part, graph.make("constant_to_gradients", largest))
            is_largest = graph.binary("or", equal, graph.make("isnan", part))
            first = graph.where(is_largest, part, first)
        return graph.make("instead", largest, first)

    def _shared(self, largest: Node, parts: Sequence[Node], over: Sequence[int]) -> Node:
        """Return the largest element of several parts, with the gradient of a mean.

        All elements that equal it share its gradient.
        """
        # The mean of those elements is the largest one, and its derivative is one share for each:
        #
        #   largest = instead(largest, sum(x where x == largest) / count(x == largest))
        graph = self.graph
        zero = self.graph.const(0.0)
        one = self.graph.const(1.0)
        add = functools.partial(graph.binary, "add")
        equal = []
        for part in parts:
            constant = graph.make("constant_to_gradients", largest)
            equal.append(graph.make("eq", part, constant))
        # Where the largest element is NaN, none equals it, and the count is zero. A share is then
        # infinite; times the zero of `part * zero` it is NaN, the gradient of each element.
        terms = []
        for is_largest, part in zip(equal, parts, strict=True):
            terms.append(graph.where(is_largest, part, graph.binary("mul", part, zero)))
        total = functools.reduce(add, terms)
        ones = [graph.where(is_largest, one, zero) for is_largest in equal]
        count = functools.reduce(add, ones)
        total, count = graph.reduce("sum", total, over), graph.reduce("sum", count, over)
        return graph.make("instead", largest, graph.binary("div", total, count))

    def _sum(self, node: Node, over: Sequence[int], *, shifted: bool = False) -> Node:
        """Return a sum over columns. If it sums a log-softmax, it is a difference of sums.

        The sum of ``(x - shift) - log(total)`` over N columns is split once or twice::

            sum(x - shift) - N log(total)       one pass over the rows instead of two
            sum(x) - N shift - N log(total)     long rows: one pass fewer, but terms may cancel

        Args:
            node: the summed value.
            over: the axes of the sum.
            shifted: whether ``log(total)`` was split off already; then ``shift`` is the next term.
        """
        graph = self.graph
        if self._is_split(node, over, shifted=shifted):
            size = graph.const(float(self.numbering.size(over)))
            product = graph.binary("mul", node.args[1], size)
            if product.axes.isdisjoint(over):
                total = self._sum(node.args[0], over, shifted=not shifted)
                return graph.binary("sub", total, product)
        total = graph.reduce("sum", node, over, exact=True)
        # A part may be constant along the columns: a stack may have such a value beside others that
        # vary. Its sum is its product with the number of columns.
        count = self.numbering.size(without(over, node.axes))
        if count == 1:
            return total
        factor = graph.const(count if node.kind == "int" else float(count))
        return graph.binary("mul", total, factor)

    def _is_split(self, node: Node, over: Sequence[int], *, shifted: bool) -> bool:
        """Whether the sum of a difference may be a difference of sums."""
        if node.op != "sub":
            return False
        if shifted:
            is_long = self.numbering.size(over) > MOST_COLUMNS_READ_TWICE
            return is_long and node.args[1].op == "constant_to_gradients"
        return node.args[1].op == "log"


def _new_names(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the names, each once, that are not among the known ones."""
    return [name for name in dict.fromkeys(names) if name not in known]


_BUILDERS: dict[str, Callable[[Parts, Node, Part], Node]] = {
    "input": Parts._leaf,
    "keep": Parts._leaf,
    "const": Parts._const,
    "iota": Parts._iota,
    "select": Parts._selected,
    "stack": Parts._stacked,
    "pick": Parts._picked,
    "sum": Parts._reduction,
    "amax": Parts._reduction,
}
