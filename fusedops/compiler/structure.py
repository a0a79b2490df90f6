"""Structure of a traced function: its row axes, its column axes, and the parts of rows.

A *column axis* is one that something reduces over; in a function without reductions it is the last
axis, if the last dimension has one. Rows of one element have no column axis. An axis along which
parts are selected or stacked is *unrolled*: each part becomes a value of its own. All other axes
are *row axes*::

    (batch, sequence, 3 heads, 64) with q, k, v = x.unbind(2), and sums over the last dimension
     row    row       unrolled column
"""

from __future__ import annotations

import functools
import itertools
import linecache
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .axes import AxisError, Label
from .errors import NotRowwiseError
from .ir import REDUCTIONS, Graph, Node, gradient_sources, topological
from .traced import TWICE, Traced, Value, twice

__all__ = [
    "MOST_PARTS",
    "Operand",
    "Part",
    "Structure",
    "nodes_of",
    "structured",
    "within",
    "without",
]

# A part of a row: pairs of an unrolled axis and an index along it.
Part = tuple[tuple[int, int], ...]
# The most parts of a row: more are too much code.
MOST_PARTS = 16
# The fewest columns of a part of a row that no operator of the function splits.
_LEAST_PART = 128
# How many parts such a row may have: 5120 columns are five parts of 1024, where one block that
# holds them all has 3072 idle lanes.
_PARTS = (3, 5)
# The most columns of all parts of such a row: passes tile by tile are better for longer rows.
_MOST_COLUMNS = 16384


def within(axes: Iterable[int], others: Container[int]) -> list[int]:
    """Return the axes that are among the others, in order."""
    return [axis for axis in axes if axis in others]


def without(axes: Iterable[int], others: Container[int]) -> list[int]:
    """Return the axes that are not among the others, in order."""
    return [axis for axis in axes if axis not in others]


def nodes_of(tensors: Iterable[Mapping[Part, Node]]) -> list[Node]:
    """Return the nodes of all parts of tensors."""
    return [node for parts in tensors for node in parts.values()]


@dataclass(frozen=True)
class Operand:
    """An input or output tensor.

    Attributes:
        labels: the axes that make up each of its dimensions.
        dtype: its dtype.
        kind: "float", "int" or "bool".
        name: the user's name for it.
    """

    labels: tuple[Label, ...]
    dtype: torch.dtype
    kind: str
    name: str

    @property
    def axes(self) -> tuple[int, ...]:
        """All its axes, in the order of a contiguous tensor's memory."""
        return _flat(self.labels)


@dataclass(frozen=True, eq=False)
class Structure:
    """A row-wise function.

    Attributes:
        graph: holds the nodes.
        sizes: of the axes at tracing; those of column axes and unrolled ones are constants.
        rows, columns, unrolled: the axes, the outermost first.
        inputs: the operands that the function takes.
        outputs: the operands that it returns.
        results: the nodes of each output, by part.
        drops: the drop probability of each dropout.
        container: "tensor", "tuple" or "list": what the function returns.
        lines: the user's line of each node's number.
        used: whether anything is computed of each input.
        values: the function's tensors of floating-point numbers, by part, with their dtypes: the
            candidates for saving.
        wide: whether any of them is in fp64; then everything is computed in it.
        loose: for each unused input, how many of its first dimensions may have any size; 0 for the
            others.
        fixed: row axes whose sizes are constants: with others it is another function.
    """

    graph: Graph
    sizes: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    unrolled: tuple[int, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    results: tuple[Mapping[Part, Node], ...]
    drops: tuple[float, ...]
    container: str
    lines: Mapping[int, int]
    used: tuple[bool, ...] = ()
    values: tuple[tuple[Mapping[Part, Node], torch.dtype], ...] = ()
    wide: bool = False
    loose: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()

    @property
    def cols(self) -> int:
        """Columns of a part of a row."""
        return math.prod([self.sizes[axis] for axis in self.columns])

    @property
    def parts_of_row(self) -> int:
        """Parts of each row, of the whole tensor that has the fewest."""
        whole = {*self.rows, *self.columns}
        operands = [op for op in (*self.inputs, *self.outputs) if whole <= set(op.axes)]
        return min([len(list(self.parts(operand))) for operand in operands], default=1)

    @functools.cached_property
    def counted(self) -> frozenset[int]:
        """The row axes along which an index is used, as in a causal mask."""
        indexed = {
            node.attrs[0] for node in topological(nodes_of(self.results)) if node.op == "iota"
        }
        return frozenset(indexed).intersection(self.rows)

    def parts(self, operand: Operand) -> Iterator[Part]:
        """Yield the parts of an operand."""
        yield from _parts_along(within(self.unrolled, operand.axes), self.sizes)

    def text(self, *, rows: bool = True) -> str:
        """Return the function, one line a value.

        For golden tests, and to compare functions; without ``rows`` also with a function of fewer
        row dimensions.
        """
        nodes = topological(nodes_of(self.results))
        numbers = {node: number for number, node in enumerate(nodes)}
        names = {axis: f"r{i}" for i, axis in enumerate(self.rows)}
        names |= {axis: f"c{i}" for i, axis in enumerate(self.columns)}
        lines = [self._line(node, numbers, names, rows) for node in nodes]
        for operand, parts in zip(self.outputs, self.results, strict=True):
            dtype = str(operand.dtype).removeprefix("torch.")
            values = ", ".join([f"%{numbers[node]}" for node in parts.values()])
            lines.append(f"return {values}: {dtype}")
        if self.wide:
            lines.append("in fp64")
        return "\n".join(lines)

    def _line(
        self, node: Node, numbers: Mapping[Node, int], names: Mapping[int, str], rows: bool
    ) -> str:
        """Return a node's line in `text`."""
        arguments = [f"%{numbers[arg]}" for arg in node.args]
        if node.op == "iota" and not rows:
            arguments += [self._axis_name(axis, names) for axis in node.attrs]
        else:
            arguments += [_attribute_text(attr, names) for attr in node.attrs]
        axes = node.axes if rows else without(node.axes, self.rows)
        along = " ".join(sorted(names[axis] for axis in axes))
        return f"%{numbers[node]}: {node.kind}[{along}] = {node.op}({', '.join(arguments)})"

    def _axis_name(self, axis: int, names: Mapping[int, str]) -> str:
        """Return the dimension of a row axis in the results, or a column axis's name.

        Row axes are numbered differently where there are fewer of them.
        """
        if axis not in self.rows:
            return names[axis]
        labels = self.outputs[0].labels
        return f"dimension {[axis in label for label in labels].index(True)}"


def _attribute_text(attr: Any, names: Mapping[int, str]) -> str:
    if not isinstance(attr, tuple):
        return str(attr)
    # A tuple holds axes, or is a part: pairs of axis and index.
    texts = []
    for item in attr:
        if isinstance(item, int):
            texts.append(names.get(item, str(item)))
        else:
            texts.append(f"{item[1]}")
    return f"[{' '.join(texts)}]"


def _parts_along(axes: Sequence[int], sizes: Sequence[int]) -> Iterator[Part]:
    """Yield the parts of a value that has these unrolled axes, the outermost first."""
    for indices in itertools.product(*[range(sizes[axis]) for axis in axes]):
        yield tuple(zip(axes, indices, strict=True))


def structured(traced: Traced) -> Structure:
    """Return the structure of a traced function.

    Raises:
        NotRowwiseError: its rows and columns are not those of one kernel.
    """
    try:
        return _Structuring(traced).result()
    except AxisError as error:  # where dimensions that are as long are made one
        raise NotRowwiseError(str(error)) from None


class _Structuring:
    """Assigns the axes of a traced function to rows, columns and unrolled parts.

    Attributes:
        graph: the nodes of parts.
        parts_done: from a traced node's number and its part to the node in ``graph``.
        nodes: the traced nodes that outputs are computed of.
        used: the inputs among them.
        order: the traced axes, the outermost first; a structure's axis is an index into it.
        numbers: the inverse of ``order``.
        count: how many of them have values; the rest are those of unused inputs.
        columns: of the result.
    """

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.graph = Graph()
        self.lines: dict[int, int] = {}
        self.parts_done: dict[tuple[int, Part], Node] = {}
        self.nodes = topological([v.node for v in traced.outputs])
        self.node_set = set(self.nodes)
        self.used = [v for v in traced.inputs if v.node in self.node_set]
        # Joining may make two dimensions of a value one, and unrolling needs the final axes: the
        # order of these steps matters.
        self._join_columns()
        for value in traced.noted:
            # Two dimensions that another operator made one later.
            if value.node in self.node_set and twice(traced.axes, value):
                raise self._refused(TWICE, value.node)
        self._number_axes()
        widest = max(self.nodes, key=self._count_of_parts)
        count = self._count_of_parts(widest)
        if count > MOST_PARTS:
            raise self._refused(f"rows are taken apart into more than {MOST_PARTS} parts", widest)
        self._unroll_columns(count)

    def result(self) -> Structure:
        traced = self.traced
        inputs = tuple([self._operand(v, v.node.names[0]) for v in traced.inputs])
        outputs = []
        for number, v in enumerate(traced.outputs):
            name = v.node.names[-1] if v.node.names else f"output{number}"
            outputs.append(self._operand(v, name))
        rows, columns = self._rows_and_columns()
        self.columns = frozenset(columns)
        self._check(inputs, outputs, rows, columns)
        fixed = self._of(itertools.chain(*traced.fixed))
        bare = Structure(
            self.graph,
            self.sizes,
            rows,
            columns,
            self.unrolled,
            inputs,
            tuple(outputs),
            (),
            tuple(traced.drops),
            traced.container,
            self.lines,
            tuple([v.node in self.node_set for v in traced.inputs]),
            wide=traced.wide,
            fixed=tuple(within(rows, fixed)),
        )
        results = []
        for v, operand in zip(traced.outputs, outputs, strict=True):
            results.append({part: self._part(v.node, part) for part in bare.parts(operand)})
        values = []
        for v in traced.values:
            if v.node in self.node_set:
                parts = {part: self._part(v.node, part) for part in self._parts(v.node)}
                values.append((parts, v.dtype))
        structure = replace(
            bare, results=tuple(results), values=tuple(values), loose=(0,) * len(inputs)
        )
        self._check_dropouts(structure)
        return structure

    def _operand(self, value: Value, name: str) -> Operand:
        labels = tuple(map(self._axes, value.labels))
        return Operand(labels, value.dtype, value.node.kind, name)

    def _check(
        self, inputs: Sequence[Operand], outputs: Sequence[Operand], rows: Label, columns: Label
    ) -> None:
        """Raise where tensors do not have the rows and columns that the kernels take."""
        if not any(operand.labels for operand in (*inputs, *outputs)):
            raise NotRowwiseError("none of its tensors has a dimension")
        values = [v.node for v in (*self.traced.inputs, *self.traced.outputs)]
        for operand, node in zip((*inputs, *outputs), values, strict=True):
            if node in self.node_set:
                self._check_operand(operand, node, rows)
        for operand, node in zip(outputs, values[len(inputs) :], strict=True):
            if not set(rows) <= set(operand.axes):
                raise self._refused(
                    f"{operand.name} does not vary along all rows, and is returned", node
                )
        for node in self.nodes:
            if node.op not in REDUCTIONS:
                continue
            if set(self._of(node.attrs[0])) - set(self.unrolled) != set(columns):
                raise self._refused("it reduces over other dimensions than elsewhere", node)

    def _check_operand(self, operand: Operand, node: Node, rows: Label) -> None:
        """Raise where an operand's rows are not its outer dimensions."""
        if len(set(operand.axes)) < len(operand.axes):
            raise self._refused(
                f"{operand.name} has one dimension twice: rows and columns are mixed", node
            )
        # Parts of a row may be rows of another tensor, such as heads of a packed projection: row
        # axes may lie inside unrolled ones, but not inside columns.
        is_row = [axis in rows for axis in without(operand.axes, self.unrolled)]
        columns_last = is_row == sorted(is_row, reverse=True)
        # A first dimension that joins parts and rows, the parts outermost, has no row stride.
        first = operand.labels[0] if operand.labels else ()
        parts_joined = bool(first) and first[0] in self.unrolled
        if not columns_last or (parts_joined and set(rows).intersection(first)):
            raise self._refused(f"in {operand.name} the rows are not the outer dimensions", node)

    def _check_dropouts(self, structure: Structure) -> None:
        """Raise where a dropout's random numbers would be those of several elements."""
        whole = frozenset((*structure.rows, *structure.columns))
        for node in topological(nodes_of(structure.results)):
            if node.op == "keep" and node.axes != whole:
                raise NotRowwiseError("dropout of what does not vary along all dimensions")

    def _refused(self, why: str, node: Node) -> NotRowwiseError:
        """Return the error, with the user's line if it is known."""
        for candidate in (node, *self._users(node)):
            if candidate.number in self.traced.lines:
                line = self.traced.lines[candidate.number]
                break
        else:
            line = 0
        if not line:
            return NotRowwiseError(why)
        text = linecache.getline(self.traced.file, line).strip()
        return NotRowwiseError(f"{why}\n  line {line} of {self.traced.file}: {text}")

    def _users(self, node: Node) -> list[Node]:
        """Return what is computed of a node, the nearest first."""
        users = [node]
        for other in self.nodes:
            if any(arg in users for arg in other.args):
                users.append(other)
        return users[1:]

    def _join_columns(self) -> None:
        """Unify the dimensions of outputs of one shape, and equally long ones that are reduced.

        They meet in no value, so that one tile serves both.
        """
        axes = self.traced.axes
        outputs = self.traced.outputs
        shapes = [[axes.size(axes.leaves(label)) for label in v.labels] for v in outputs]
        for (i, first), (j, second) in itertools.combinations(enumerate(outputs), 2):
            if shapes[i] != shapes[j]:
                continue
            for a, b in zip(first.labels, second.labels, strict=True):
                self._join(axes.leaves(a), axes.leaves(b))
        reduced = dict.fromkeys(node.attrs[0] for node in self.nodes if node.op in REDUCTIONS)
        last_labels = [v.labels[-1] for v in self.used if v.labels]
        for over, label in itertools.product(reduced, last_labels):
            self._join(axes.of(over), axes.leaves(label))

    def _join(self, one: Label, other: Label) -> None:
        """Unify two dimensions, if they are as long and no value has both."""
        axes = self.traced.axes
        for node in self.nodes:
            present = set(axes.of(node.axes))
            if set(one) & present and set(other) & present:
                return
        if not set(one) & set(other) and axes.size(one) == axes.size(other):
            axes.unify(one, other)

    # --- axes -------------------------------------------------------------------------------------

    def _number_axes(self, *more_unrolled: int) -> None:
        """Number the axes, the outermost first.

        Axes along which parts are selected or stacked are unrolled, and ``more_unrolled``.
        """
        self.order = self._order()
        self.numbers = {axis: number for number, axis in enumerate(self.order)}
        self.sizes = tuple([self.traced.axes.sizes[axis] for axis in self.order])
        unrolled = set(self._axes(more_unrolled))
        for node in self.nodes:
            if node.op in ("select", "stack"):
                unrolled.update(self._axes(node.attrs[0]))
        self.unrolled = tuple(sorted(unrolled))

    def _count_of_parts(self, node: Node) -> int:
        axes = within(self._of(node.axes), self.unrolled)
        return math.prod([self.sizes[axis] for axis in axes])

    def _unroll_columns(self, parts: int) -> None:
        """Unroll rows of three or five times a power of two columns, so that no lane is idle.

        Blocks are powers of two, as here of 3072 columns::

            one block     |<------ 3072 columns ------>|<- 1024 idle ->|
            three blocks  |<- 1024 ->|<- 1024 ->|<- 1024 ->|
        """
        _, columns = self._rows_and_columns()
        if len(columns) != 1 or any(map(_depends_on_order, self.nodes)):
            return
        size = self.sizes[columns[0]]
        if size > _MOST_COLUMNS:
            return
        for count in _PARTS:
            each = size // count
            divides = each * count == size
            is_power_of_two = each & (each - 1) == 0
            is_large = each >= _LEAST_PART
            if divides and is_power_of_two and is_large and count * parts <= MOST_PARTS:
                outer, _ = self.traced.axes.split((self.order[columns[0]],), (count, each))
                self._number_axes(*outer)
                return

    def _order(self) -> list[int]:
        """Return the axes, in the order of the tensors that have the most."""
        traced_axes = self.traced.axes
        values = (*self.used, *self.traced.outputs)
        tensors = [traced_axes.leaves(_flat(v.labels)) for v in values]
        order: list[int] = []
        for axes in sorted(tensors, key=len, reverse=True):
            for position, axis in enumerate(axes):
                if axis not in order:
                    order.insert(_insertion_point(order, axes[position + 1 :]), axis)
        for node in self.nodes:
            selected = node.attrs[0] if node.op in ("select", "pick") else ()
            _append_new(order, traced_axes.of((*node.axes, *selected)))
        self.count = len(order)
        # Axes of tensors that nothing is computed of come last.
        for v in self.traced.inputs:
            _append_new(order, traced_axes.of(_flat(v.labels)))
        return order

    def _axes(self, label: Label) -> Label:
        return tuple([self.numbers[axis] for axis in self.traced.axes.leaves(label)])

    def _of(self, axes: Iterable[int]) -> Label:
        """Return the axes of a value, each once."""
        return tuple([self.numbers[axis] for axis in self.traced.axes.of(axes)])

    def _rows_and_columns(self) -> tuple[Label, Label]:
        over = {node: self._of(node.attrs[0]) for node in self.nodes if node.op in REDUCTIONS}
        reduced = set(itertools.chain.from_iterable(over.values()))
        rolled = without(range(self.count), self.unrolled)
        columns = within(rolled, reduced) or within(rolled[-1:], self._innermost())
        rows = without(rolled, columns)
        if rows:
            for node, axes in over.items():
                if any(axis < max(rows) for axis in axes):
                    raise self._refused(_MIXES_ROWS, node)
        elif len(columns) > 1:
            raise self._refused("it reduces over all dimensions: it mixes rows", next(iter(over)))
        return tuple(rows), tuple(columns)

    def _innermost(self) -> set[int]:
        """Return the axes of the last dimension.

        Tensors of fewer dimensions do not count. Rows of one element have no axes.
        """
        tensors = [v.labels for v in (*self.used, *self.traced.outputs)]
        rank = max(map(len, tensors))
        axes: set[int] = set()
        for labels in tensors:
            if labels and len(labels) == rank:
                axes.update(self._axes(labels[-1]))
        return axes

    def _parts(self, node: Node) -> Iterator[Part]:
        axes = within(self._of(node.axes), self.unrolled)
        for part in _parts_along(axes, self.sizes):
            yield tuple(sorted(part))

    # --- parts ------------------------------------------------------------------------------------

    def _part(self, node: Node, part: Part) -> Node:
        """Return a node's value in a part of the row."""
        axes = self._of(node.axes)
        part = tuple([(axis, index) for axis, index in part if axis in axes])
        key = (node.number, part)
        if key in self.parts_done:
            return self.parts_done[key]
        result = self.parts_done[key] = self._build_part(node, part)
        for name in node.names:
            if name not in result.names and result.op != "const":
                result.names.append(name)
        if node.number in self.traced.lines:
            self.lines.setdefault(result.number, self.traced.lines[node.number])
        return result

    def _build_part(self, node: Node, part: Part) -> Node:
        build = _BUILDERS.get(node.op)
        if build is not None:
            return build(self, node, part)
        args = [self._part(arg, part) for arg in node.args]
        if node.op in _SIMPLIFIED:
            return self.graph.binary(node.op, *args)
        return self.graph.make(node.op, *args, attrs=node.attrs, kind=node.kind)

    def _leaf(self, node: Node, part: Part) -> Node:
        rolled = without(self._of(node.axes), self.unrolled)
        return self.graph.make(node.op, attrs=(*node.attrs, part), axes=rolled, kind=node.kind)

    def _const(self, node: Node, part: Part) -> Node:
        return self.graph.make("const", attrs=node.attrs[:1], kind=node.kind)

    def _iota(self, node: Node, part: Part) -> Node:
        """Return the index along a dimension, which may be several axes."""
        graph, index = self.graph, self.graph.const(0)
        indices = dict(part)
        for axis in self._axes(node.attrs):
            if axis in indices:
                one = graph.const(indices[axis])
            else:
                one = graph.make("iota", attrs=(axis,), axes=(axis,), kind="int")
            scaled = graph.binary("mul", index, graph.const(self.sizes[axis]))
            index = graph.binary("add", scaled, one)
        return index

    def _picked(self, node: Node, part: Part) -> Node:
        source, index = node.args
        over = self._of(node.attrs[0])
        if len(over) > 1 or set(over) & set(self.unrolled):
            raise NotRowwiseError("gather from rows that are taken apart")
        return self.graph.pick(self._part(source, part), self._part(index, part), over)

    def _stacked(self, node: Node, part: Part) -> Node:
        """Return the value that a part of a stack is: the inverse of `_selected`."""
        indices, index = dict(part), 0
        for axis in self._axes(node.attrs[0]):
            index = index * self.sizes[axis] + indices[axis]
        return self._part(node.args[index], part)

    def _selected(self, node: Node, part: Part) -> Node:
        """Return one part of a value along an axis that is unrolled."""
        (source,) = node.args
        indices, rest = dict(part), node.attrs[1]
        # The axis may have been split: its index is that of several axes.
        for axis in reversed(self._axes(node.attrs[0])):
            rest, indices[axis] = divmod(rest, self.sizes[axis])
        return self._reaching(source, self._part(source, tuple(sorted(indices.items()))))

    def _reaching(self, node: Node, selected: Node) -> Node:
        """Return a part of a value, with gradients of zero for inputs of the other parts alone."""
        graph = self.graph
        for index in sorted(gradient_sources([node]) - gradient_sources([selected])):
            source = self.traced.inputs[index].node
            one = self._part(source, next(self._parts(source)))
            one = graph.reduce("sum", one, self.columns - selected.axes)
            never = graph.make("where", graph.const(False), one, selected)
            selected = graph.make("instead", selected, never)
        return selected

    def _reduction(self, node: Node, part: Part) -> Node:
        """Return a reduction: over the parts by a binary operator, then over the columns."""
        over = self._of(node.attrs[0])
        unrolled, inner = within(over, self.unrolled), without(over, self.unrolled)
        combine = "add" if node.op == "sum" else "maximum"
        combined, parts = self._combined(combine, node.args[0], part, unrolled)
        # A maximum with an attribute of its own is `max`: its first largest element is the one that
        # has the gradient.
        is_first = len(node.attrs) > 1
        if is_first and combined.axes.intersection(inner):
            if unrolled or len(inner) > 1:
                raise NotRowwiseError(
                    "max of rows that are taken apart, or have several dimensions; use amax"
                )
            attrs = (tuple(inner), *node.attrs[1:])
            axes = combined.axes - set(inner)
            return self.graph.make("amax", combined, attrs=attrs, axes=axes)
        if node.op == "sum":
            return self._sum(combined, inner)
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
        parts: list[Node] = []
        combined: Node | None = None
        for own in _parts_along(within(unrolled, self._of(node.axes)), self.sizes):
            indices = dict(part) | dict(own)
            one = self._part(node, tuple(sorted(indices.items())))
            parts.append(one)
            combined = one if combined is None else self.graph.binary(combine, combined, one)
        assert combined is not None
        return combined, parts

    def _first(self, largest: Node, parts: Sequence[Node]) -> Node:
        """Return the largest of several columns: the first one that equals it has its gradient."""
        graph, first = self.graph, parts[-1]
        for part in reversed(parts[:-1]):
            equal = graph.make("eq", part, graph.make("constant_to_gradients", largest))
            is_largest = graph.binary("or", equal, graph.make("isnan", part))
            first = graph.where(is_largest, part, first)
        return graph.make("instead", largest, first)

    def _shared(self, largest: Node, parts: Sequence[Node], over: Sequence[int]) -> Node:
        """Return the largest element of several parts, with the gradient of a mean.

        All elements that equal it share its gradient.
        """
        graph, zero, one = self.graph, self.graph.const(0.0), self.graph.const(1.0)
        add = functools.partial(graph.binary, "add")
        equal = []
        for part in parts:
            constant = graph.make("constant_to_gradients", largest)
            equal.append(graph.make("eq", part, constant))
        # Where no element equals the largest one it is NaN, and so is zero times the infinite share
        # of each.
        terms = []
        for is_largest, part in zip(equal, parts, strict=True):
            terms.append(graph.where(is_largest, part, graph.binary("mul", part, zero)))
        total = functools.reduce(add, terms)
        ones = [graph.where(is_largest, one, zero) for is_largest in equal]
        count = functools.reduce(add, ones)
        total, count = graph.reduce("sum", total, over), graph.reduce("sum", count, over)
        return graph.make("instead", largest, graph.binary("div", total, count))

    def _sum(self, node: Node, over: Sequence[int], *, shifted: bool = False) -> Node:
        """Return a sum over columns; of a logarithm of softmax as a difference of sums.

        The sum of ``(x - shift) - log(total)`` over N columns is ``sum(x - shift) - N log(total)``:
        one pass over the rows instead of two. For long rows it is ``sum(x) - N shift - ...``, a
        pass less, at the price of what cancels.
        """
        graph = self.graph
        size = math.prod([self.sizes[axis] for axis in over])
        subtracted = "constant_to_gradients" if shifted else "log"
        splits = node.op == "sub" and node.args[1].op == subtracted
        if splits and not (shifted and size <= _MOST_COLUMNS):
            product = graph.binary("mul", node.args[1], graph.const(float(size)))
            if not product.axes & set(over):
                total = self._sum(node.args[0], over, shifted=not shifted)
                return graph.binary("sub", total, product)
        total = graph.reduce("sum", node, over, exact=True)
        # A part may be one number of a row, unlike the others that it was stacked with.
        count = math.prod([self.sizes[axis] for axis in without(over, node.axes)])
        if count == 1:
            return total
        factor = graph.const(count if node.kind == "int" else float(count))
        return graph.binary("mul", total, factor)


_BUILDERS: dict[str, Callable[[_Structuring, Node, Part], Node]] = {
    "input": _Structuring._leaf,
    "keep": _Structuring._leaf,
    "const": _Structuring._const,
    "iota": _Structuring._iota,
    "select": _Structuring._selected,
    "stack": _Structuring._stacked,
    "pick": _Structuring._picked,
    "sum": _Structuring._reduction,
    "amax": _Structuring._reduction,
}
_MIXES_ROWS = (
    "it reduces over a dimension that is not the last: it mixes rows. Move the dimension to "
    "the end outside, or add what unbind takes apart"
)
_SIMPLIFIED = ("add", "sub", "mul", "div", "maximum", "minimum", "and", "or", "xor")


def _depends_on_order(node: Node) -> bool:
    """Whether a node depends on the order of columns: a gather, or the first largest element."""
    return node.op == "pick" or (node.op == "amax" and len(node.attrs) > 1)


def _flat(labels: Sequence[Label]) -> Label:
    return tuple(itertools.chain.from_iterable(labels))


def _insertion_point(order: Sequence[int], following: Iterable[int]) -> int:
    """Return the position in an order before the first known axis of those that follow."""
    for axis in following:
        if axis in order:
            return order.index(axis)
    return len(order)


def _append_new(order: list[int], axes: Iterable[int]) -> None:
    order += without(axes, order)
