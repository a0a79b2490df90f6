"""From what was traced to rows and columns: which axes a program's rows have, and equal parts of rows unrolled.

An axis that something reduces over is part of a row, a *column axis*; of a function without reductions the last one is, if
the last dimension has one. Rows of one element have no column axis.
An axis along which parts are taken or put together is *unrolled*: each part becomes a value of its own. All other axes
are *row axes*.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .axes import AxisError, Label
from .errors import NotRowwiseError
from .ir import REDUCTIONS, Graph, Node, gradient_sources, topological
from .tracing import TWICE, Traced, twice

__all__ = ["MOST_PARTS", "Operand", "Part", "Structure", "structured"]

# Of an axis that is unrolled, which part: pairs of axis and index.
Part = tuple[tuple[int, int], ...]
# More parts are too much code.
MOST_PARTS = 16
# Columns of a part of a row that no operator of the function takes apart.
_LEAST_PART = 128
# Into so many: of 5120 columns, five of 1024 where a block that holds them all has 3072 idle lanes.
_PARTS = (3, 5)
# Columns of all parts of such a row: longer ones are better passed over tile by tile.
_MOST_COLUMNS = 16384


@dataclass(frozen=True)
class Operand:
    """A tensor that goes in or out.

    Attributes:
        labels: of its dimensions, in axes of the structure.
        dtype: its dtype.
        kind: "float", "int" or "bool".
        name: what the user calls it.
    """

    labels: tuple[Label, ...]
    dtype: torch.dtype
    kind: str
    name: str

    @property
    def axes(self) -> tuple[int, ...]:
        """All its axes, in order of its memory when contiguous."""
        return tuple([axis for label in self.labels for axis in label])


@dataclass(frozen=True, eq=False)
class Structure:
    """A row-wise function.

    Attributes:
        graph: holds the nodes.
        sizes: of the axes when it was traced; those of column axes and unrolled ones are constants.
        rows, columns, unrolled: the axes, the outermost first.
        inputs: what goes in.
        outputs: what comes out.
        results: of each output, its nodes by part.
        drops: the drop probability of each dropout.
        container: "tensor", "tuple" or "list": what the function returns.
        lines: of nodes, the user's line.
        used: whether anything is computed of each input.
        values: the function's tensors of floating-point numbers, by part, with their dtypes: what may be saved.
        wide: whether any of them is in fp64, in which everything is computed then.
        loose: of each input that is not used, how many of its first dimensions may have any size; of others 0.
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
        return min([len(list(self.parts(operand))) for operand in (*self.inputs, *self.outputs)
                    if whole <= set(operand.axes)], default=1)  # fmt: skip

    @functools.cached_property
    def counted(self) -> frozenset[int]:
        """The row axes along which an index is used, as in a causal mask."""
        nodes = topological([node for parts in self.results for node in parts.values()])
        return frozenset([node.attrs[0] for node in nodes if node.op == "iota"]).intersection(self.rows)

    def parts(self, operand: Operand) -> Iterator[Part]:
        """Of an operand."""
        axes = [axis for axis in self.unrolled if axis in operand.axes]
        for places in itertools.product(*[range(self.sizes[axis]) for axis in axes]):
            yield tuple(zip(axes, places, strict=True))

    def text(self, *, rows: bool = True) -> str:
        """The function, one line a value; for golden tests, and to compare, also with that of fewer dimensions of rows."""
        nodes = topological([node for parts in self.results for node in parts.values()])
        numbers = {node: i for i, node in enumerate(nodes)}
        names = {axis: name for letter, axes in (("r", self.rows), ("c", self.columns)) for axis, name in
                 zip(axes, [f"{letter}{i}" for i in range(len(axes))], strict=True)}  # fmt: skip
        lines = []
        for node in nodes:
            attrs = [self._axis_name(attr, names) if node.op == "iota" and not rows else _shown(attr, names)
                     for attr in node.attrs]  # fmt: skip
            what = ", ".join([*[f"%{numbers[arg]}" for arg in node.args], *attrs])
            where = " ".join(sorted(names[axis] for axis in node.axes if rows or axis not in self.rows))
            lines.append(f"%{numbers[node]}: {node.kind}[{where}] = {node.op}({what})")
        for number, parts in enumerate(self.results):
            dtype = str(self.outputs[number].dtype).removeprefix("torch.")
            lines.append(f"return {', '.join([f'%{numbers[node]}' for node in parts.values()])}: {dtype}")
        return "\n".join([*lines, *(["in fp64"] if self.wide else [])])

    def _axis_name(self, axis: int, names: Mapping[int, str]) -> str:
        """Of a row axis its dimension in the results: axes have other numbers where there are fewer."""
        labels = self.outputs[0].labels
        return f"dimension {[axis in label for label in labels].index(True)}" if axis in self.rows else names[axis]


def _shown(attr: Any, names: Mapping[int, str]) -> str:
    if isinstance(attr, tuple):
        return "[" + " ".join([names.get(a, str(a)) if isinstance(a, int) else f"{a[1]}" for a in attr]) + "]"
    return str(attr)


def structured(traced: Traced) -> Structure:
    """The structure of a traced function.

    Raises:
        NotRowwiseError: its rows and columns are not those of one kernel.
    """
    try:
        return _Structuring(traced).result()
    except AxisError as error:  # where dimensions that are as long are made one
        raise NotRowwiseError(str(error)) from None


class _Structuring:
    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.graph = Graph()
        self.lines: dict[int, int] = {}
        self.done: dict[tuple[int, Part], Node] = {}
        self.nodes = topological([v.node for v in traced.outputs])
        self.used = [v for v in traced.inputs if v.node in set(self.nodes)]
        self._join_columns()
        there = set(self.nodes)
        wrong = next((v.node for v in traced.noted if v.node in there and twice(traced.axes, v)), None)
        if wrong is not None:  # two dimensions that another operator made one later
            raise self._refused(TWICE, wrong)
        self._number_axes()
        wide = max(self.nodes, key=self._count_of_parts)
        if (count := self._count_of_parts(wide)) > MOST_PARTS:
            raise self._refused(f"rows are taken apart into more than {MOST_PARTS} parts", wide)
        self._unroll_columns(count)

    def result(self) -> Structure:
        traced = self.traced
        inputs = tuple([Operand(tuple(map(self._axes, v.labels)), v.dtype, v.node.kind, v.node.names[0])
                        for v in traced.inputs])  # fmt: skip
        outputs = tuple([Operand(tuple(map(self._axes, v.labels)), v.dtype, v.node.kind, (v.node.names or [f"output{i}"])[-1])
                         for i, v in enumerate(traced.outputs)])  # fmt: skip
        rows, columns = self._rows_and_columns()
        self.columns = frozenset(columns)
        self._check(inputs, outputs, rows, columns)
        fixed = self._of(itertools.chain(*traced.fixed))
        bare = Structure(self.graph, self.sizes, rows, columns, self.unrolled, inputs, outputs, (), tuple(traced.drops),
                         traced.container, self.lines, tuple([v.node in set(self.nodes) for v in traced.inputs]),
                         wide=traced.wide, fixed=tuple([axis for axis in rows if axis in fixed]))  # fmt: skip
        results = tuple([{part: self._part(value.node, part) for part in bare.parts(operand)}
                         for value, operand in zip(traced.outputs, outputs, strict=True)])  # fmt: skip
        values = tuple([({part: self._part(value.node, part) for part in self._parts(value.node)}, value.dtype)
                        for value in traced.values if value.node in set(self.nodes)])  # fmt: skip
        for node in topological([node for parts in results for node in parts.values()]):
            if node.op == "keep" and node.axes != frozenset((*rows, *columns)):
                raise NotRowwiseError("dropout of what does not vary along all dimensions")
        return replace(bare, results=results, values=values, loose=(0,) * len(inputs))

    def _check(self, inputs: Sequence[Operand], outputs: Sequence[Operand], rows: Label, columns: Label) -> None:
        """Raises where tensors do not have the rows and columns that the kernels take."""
        if not any(operand.labels for operand in (*inputs, *outputs)):
            raise NotRowwiseError("none of its tensors has a dimension")
        values = [v.node for v in (*self.traced.inputs, *self.traced.outputs)]
        for operand, node in zip((*inputs, *outputs), values, strict=True):
            if node not in self.nodes:
                continue
            if len(set(operand.axes)) < len(operand.axes):
                raise self._refused(f"{operand.name} has one dimension twice: rows and columns are mixed", node)
            # Parts of a row may be rows of another tensor: heads of a packed projection. Joined rows are as many as there are.
            is_row = [axis in rows for axis in operand.axes if axis not in self.unrolled]
            joined = operand.labels and operand.labels[0][:1] and operand.labels[0][0] in self.unrolled
            if is_row != sorted(is_row, reverse=True) or (joined and set(rows).intersection(operand.labels[0])):
                raise self._refused(f"in {operand.name} the rows are not the outer dimensions", node)
        for operand, node in zip(outputs, values[len(inputs) :], strict=True):
            if not set(rows) <= set(operand.axes):
                raise self._refused(f"{operand.name} does not vary along all rows, and is returned", node)
        for node in self.nodes:
            if node.op in REDUCTIONS and set(self._of(node.attrs[0])) - set(self.unrolled) != set(columns):
                raise self._refused("it reduces over other dimensions than elsewhere", node)

    def _refused(self, why: str, node: Node) -> NotRowwiseError:
        """The error, with the user's line where that is known."""
        line = next(
            (self.traced.lines[n.number] for n in (node, *self._users(node)) if n.number in self.traced.lines), 0
        )
        text = linecache.getline(self.traced.file, line).strip() if line else ""
        return NotRowwiseError(f"{why}\n  line {line} of {self.traced.file}: {text}" if line else why)

    def _users(self, node: Node) -> list[Node]:
        """What is computed of a node, the nearest first."""
        found = [node]
        for other in self.nodes:
            if any(arg in found for arg in other.args):
                found.append(other)
        return found[1:]

    def _join_columns(self) -> None:
        """Outputs of one shape have the same rows, and rows that are reduced apart and are as long the same columns.

        They meet in no value, so that one tile serves both.
        """
        axes = self.traced.axes
        shapes = [[axes.size(axes.leaves(label)) for label in v.labels] for v in self.traced.outputs]
        for (first, one), (second, other) in itertools.combinations(zip(self.traced.outputs, shapes, strict=True), 2):
            for a, b in zip(first.labels, second.labels, strict=True) if one == other else ():
                self._join(axes.leaves(a), axes.leaves(b))
        reduced = [node.attrs[0] for node in self.nodes if node.op in REDUCTIONS]
        for over, label in itertools.product(dict.fromkeys(reduced), [v.labels[-1] for v in self.used if v.labels]):
            self._join(axes.of(over), axes.leaves(label))

    def _join(self, one: Label, other: Label) -> None:
        """Make two dimensions one, if they are as long and no value has both."""
        axes = self.traced.axes
        together = any(set(one) & (own := set(axes.of(node.axes))) and set(other) & own for node in self.nodes)
        if not set(one) & set(other) and axes.size(one) == axes.size(other) and not together:
            axes.unify(one, other)

    # --- axes -----------------------------------------------------------------------------------------------------------

    def _number_axes(self, *unrolled: int) -> None:
        """Number the axes, the outermost first. Those along which parts are taken are unrolled, and those given."""
        self.order = self._order()
        self.numbers = {axis: i for i, axis in enumerate(self.order)}
        self.sizes = tuple([self.traced.axes.sizes[axis] for axis in self.order])
        found = {axis for node in self.nodes if node.op in ("select", "stack") for axis in self._axes(node.attrs[0])}
        self.unrolled = tuple(sorted(found | set(self._axes(unrolled))))

    def _count_of_parts(self, node: Node) -> int:
        return math.prod([self.sizes[axis] for axis in self._of(node.axes) if axis in self.unrolled])

    def _unroll_columns(self, parts: int) -> None:
        """Take rows of three or five times a power of two columns as so many parts, so that no lane is idle."""
        _, columns = self._rows_and_columns()
        in_order = any(node.op == "pick" or (node.op == "amax" and len(node.attrs) > 1) for node in self.nodes)
        if len(columns) != 1 or in_order or (size := self.sizes[columns[0]]) > _MOST_COLUMNS:
            return
        for count in _PARTS:
            each = size // count
            if each * count == size and each >= _LEAST_PART and not each & (each - 1) and count * parts <= MOST_PARTS:
                outer, _ = self.traced.axes.split((self.order[columns[0]],), (count, each))
                self._number_axes(*outer)
                return

    def _order(self) -> list[int]:
        """The axes, in the order of the tensors that have the most."""
        labels = [v.labels for v in (*self.used, *self.traced.outputs)]
        flat = [self.traced.axes.leaves(tuple([axis for label in one for axis in label])) for one in labels]
        found: list[int] = []
        for axes in sorted(flat, key=len, reverse=True):
            # What is new goes where it stands: before the first known axis behind it.
            for place, axis in enumerate(axes):
                if axis not in found:
                    behind = next((found.index(a) for a in axes[place + 1 :] if a in found), len(found))
                    found.insert(behind, axis)
        for node in self.nodes:
            axes = (*node.axes, *(node.attrs[0] if node.op in ("select", "pick") else ()))
            found += [axis for axis in self.traced.axes.of(axes) if axis not in found]
        self.count = len(found)  # behind them come those of tensors that nothing is computed of
        for v in self.traced.inputs:
            found += [
                axis for axis in self.traced.axes.of([a for label in v.labels for a in label]) if axis not in found
            ]
        return found

    def _axes(self, label: Label) -> Label:
        return tuple([self.numbers[axis] for axis in self.traced.axes.leaves(label)])

    def _of(self, axes: Iterable[int]) -> Label:
        """The axes of a value, each once."""
        return tuple([self.numbers[axis] for axis in self.traced.axes.of(axes)])

    def _rows_and_columns(self) -> tuple[Label, Label]:
        over = {node: self._of(node.attrs[0]) for node in self.nodes if node.op in REDUCTIONS}
        reduced = {axis for axes in over.values() for axis in axes}
        rolled = [axis for axis in range(self.count) if axis not in self.unrolled]
        columns = [axis for axis in rolled if axis in reduced]
        columns = columns or [axis for axis in rolled[-1:] if axis in self._innermost()]
        rows = [axis for axis in rolled if axis not in columns]
        wrong = next((node for node, axes in over.items() if rows and any(axis < max(rows) for axis in axes)), None)
        if wrong is not None:
            raise self._refused(
                "it reduces over a dimension that is not the last: it mixes rows. Move the dimension to "
                "the end outside, or add what unbind takes apart",
                wrong,
            )
        if not rows and len(columns) > 1:
            raise self._refused("it reduces over all dimensions: it mixes rows", next(iter(over)))
        return tuple(rows), tuple(columns)

    def _innermost(self) -> set[int]:
        """The axes of the last dimension. Rows of one element have none, and those of which all parts are of one."""
        found = [v.labels for v in (*self.used, *self.traced.outputs)]
        rank = max(map(len, found))
        return {axis for labels in found if labels and len(labels) == rank for axis in self._axes(labels[-1])}

    def _parts(self, node: Node) -> Iterator[Part]:
        axes = [axis for axis in self._of(node.axes) if axis in self.unrolled]
        for places in itertools.product(*[range(self.sizes[axis]) for axis in axes]):
            yield tuple(sorted(zip(axes, places, strict=True)))

    # --- parts ----------------------------------------------------------------------------------------------------------

    def _part(self, node: Node, part: Part) -> Node:
        """A node's value in a part of the row."""
        axes = self._of(node.axes)
        part = tuple([(axis, place) for axis, place in part if axis in axes])
        key = (node.number, part)
        found = self.done.get(key)
        if found is None:
            found = self.done[key] = self._made(node, part, axes)
            for name in node.names:
                if name not in found.names and found.op != "const":
                    found.names.append(name)
            if node.number in self.traced.lines:
                self.lines.setdefault(found.number, self.traced.lines[node.number])
        return found

    def _made(self, node: Node, part: Part, axes: Label) -> Node:
        graph, rolled = self.graph, frozenset(axes) - set(self.unrolled)
        if node.op == "select":
            given, rest = dict(part), node.attrs[1]
            for axis in reversed(self._axes(node.attrs[0])):  # which may have become several
                rest, given[axis] = divmod(rest, self.sizes[axis])
            return self._reaching(node.args[0], self._part(node.args[0], tuple(sorted(given.items()))))
        if node.op == "stack":
            which = 0
            for axis in self._axes(node.attrs[0]):
                which = which * self.sizes[axis] + dict(part)[axis]
            return self._part(node.args[which], part)
        if node.op == "iota":
            return self._index(self._axes(node.attrs), dict(part))
        if node.op in ("input", "keep"):
            return graph.make(node.op, attrs=(*node.attrs, part), axes=rolled, kind=node.kind)
        if node.op == "pick":
            over = self._of(node.attrs[0])
            if len(over) > 1 or set(over) & set(self.unrolled):
                raise NotRowwiseError("gather from rows that are taken apart")
            return graph.pick(self._part(node.args[0], part), self._part(node.args[1], part), over)
        if node.op in REDUCTIONS:
            return self._reduction(node, part)
        if node.op == "const":
            return graph.make("const", attrs=node.attrs[:1], kind=node.kind)
        args = [self._part(arg, part) for arg in node.args]
        if node.op in ("add", "sub", "mul", "div", "maximum", "minimum", "and", "or", "xor"):
            return graph.binary(node.op, *args)
        return graph.make(node.op, *args, attrs=node.attrs, kind=node.kind)

    def _reaching(self, node: Node, found: Node) -> Node:
        """A part of a value, with gradients of zero for the inputs that only other parts are computed of."""
        graph = self.graph
        for place in sorted(gradient_sources([node]) - gradient_sources([found])):
            source = self.traced.inputs[place].node
            one = self._part(source, next(self._parts(source)))
            one = graph.reduce("sum", one, self.columns - found.axes)
            found = graph.make("instead", found, graph.make("where", graph.const(False), one, found))
        return found

    def _reduction(self, node: Node, part: Part) -> Node:
        over = self._of(node.attrs[0])
        places = [axis for axis in over if axis in self.unrolled]
        inner = [axis for axis in over if axis not in self.unrolled]
        combine = "add" if node.op == "sum" else "maximum"
        argument, parts = self._of(node.args[0].axes), list[Node]()
        found: Node | None = None
        for at in itertools.product(*[range(self.sizes[axis]) for axis in places if axis in argument]):
            given = dict(part) | dict(zip([axis for axis in places if axis in argument], at, strict=True))
            parts.append(self._part(node.args[0], tuple(sorted(given.items()))))
            found = parts[0] if found is None else self.graph.binary(combine, found, parts[-1])
        assert found is not None
        if len(node.attrs) > 1 and found.axes.intersection(inner):
            if places or len(inner) > 1:
                raise NotRowwiseError("max of rows that are taken apart, or have several dimensions; use amax")
            return self.graph.make("amax", found, attrs=(tuple(inner), *node.attrs[1:]), axes=found.axes - set(inner))
        if node.op == "sum":
            return self._sum(found, inner)
        largest = self.graph.reduce(node.op, found, inner)
        if len(parts) == 1 or node.kind != "float":
            return largest
        return self._first(largest, parts) if len(node.attrs) > 1 else self._shared(largest, parts, inner)

    def _first(self, largest: Node, parts: Sequence[Node]) -> Node:
        """The largest of several columns, the first of which that equals it has its gradient."""
        graph, found = self.graph, parts[-1]
        for part in reversed(parts[:-1]):
            equal = graph.make("eq", part, graph.make("constant_to_gradients", largest))
            found = graph.where(graph.binary("or", equal, graph.make("isnan", part)), part, found)
        return graph.make("instead", largest, found)

    def _shared(self, largest: Node, parts: Sequence[Node], over: Sequence[int]) -> Node:
        """The largest element of several parts, all of whose largest elements share its gradient."""
        graph, zero, one = self.graph, self.graph.const(0.0), self.graph.const(1.0)
        equal = [graph.make("eq", part, graph.make("constant_to_gradients", largest)) for part in parts]
        add = functools.partial(graph.binary, "add")
        # Where no element equals the largest one it is NaN, and so is zero times the infinite share of each.
        total = functools.reduce(add, [graph.where(eq, part, graph.binary("mul", part, zero))
                                       for eq, part in zip(equal, parts, strict=True)])  # fmt: skip
        count = functools.reduce(add, [graph.where(eq, one, zero) for eq in equal])
        mean = graph.binary("div", graph.reduce("sum", total, over), graph.reduce("sum", count, over))
        return graph.make("instead", largest, mean)

    def _sum(self, node: Node, over: Sequence[int], *, shifted: bool = False) -> Node:
        """A sum over columns, of a logarithm of softmax as a difference of sums: one pass over the rows, and not two.

        What long rows are shifted by is left out of the sum, too: a pass less, at the price of what cancels.
        """
        size = math.prod([self.sizes[axis] for axis in over])
        splits = node.op == "sub" and node.args[1].op == ("constant_to_gradients" if shifted else "log")
        if splits and not (shifted and size <= _MOST_COLUMNS):
            by = self.graph.binary("mul", node.args[1], self.graph.const(float(size)))
            if not by.axes & set(over):
                return self.graph.binary("sub", self._sum(node.args[0], over, shifted=not shifted), by)
        total = self.graph.reduce("sum", node, over)
        # A part may be one number of a row, unlike the others that it was put together with.
        count = math.prod([self.sizes[axis] for axis in over if axis not in node.axes])
        if count == 1:
            return total
        return self.graph.binary("mul", total, self.graph.const(count if node.kind == "int" else float(count)))

    def _index(self, axes: Label, part: Mapping[int, int]) -> Node:
        """The index along a dimension that is several axes."""
        graph, found = self.graph, self.graph.const(0)
        for axis in axes:
            one = (
                graph.const(part[axis]) if axis in part else graph.make("iota", attrs=(axis,), axes=(axis,), kind="int")
            )
            found = graph.binary("add", graph.binary("mul", found, graph.const(self.sizes[axis])), one)
        return found
