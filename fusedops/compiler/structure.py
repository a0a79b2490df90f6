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
import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .axes import Label
from .ir import REDUCTIONS, Graph, Node, topological

__all__ = [
    "MOST_COLUMNS_READ_TWICE",
    "MOST_NUMBERS",
    "MOST_PARTS",
    "Operand",
    "Part",
    "Structure",
    "inner_of",
    "nodes_of",
    "parts_along",
    "within",
    "without",
]

# A part of a row: pairs of an unrolled axis and an index along it.
Part = tuple[tuple[int, int], ...]
# The most parts of a row, and of numbers of a row, such as its largest elements: more are too much
# code.
MOST_PARTS = 16
MOST_NUMBERS = 32
# The most columns of a row that is read twice to avoid cancellation: see `Parts._sum`. The second
# pass over longer rows takes too long.
MOST_COLUMNS_READ_TWICE = 16384


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
        sizes: the sizes of axes at tracing; those of column axes and unrolled ones are constants.
        rows, columns, unrolled: the axes, the outermost first.
        inputs: the operands that the function takes.
        outputs: the operands that it returns.
        results: the nodes of each output, by part.
        drops: the drop probability of each dropout.
        container: "tensor", "tuple" or "list": what the function returns.
        lines: the user's line of each node's number.
        used: for each input, whether an output depends on it.
        values: the function's tensors of floating-point numbers, by part, with their dtypes: the
            candidates for saving.
        wide: whether any of these tensors is in fp64; then everything is computed in fp64.
        loose: for each unused input, how many of its first dimensions may have any size; 0 for the
            others.
        fixed: row axes whose sizes are constants: for other sizes the function is traced again.
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
        """The number of columns of a part of a row."""
        return self.size(self.columns)

    @property
    def parts_of_row(self) -> int:
        """The number of parts of a row, in the whole tensor that has the fewest."""
        operands = filter(self.is_whole, (*self.inputs, *self.outputs))
        counts = [self.size(within(self.unrolled, operand.axes)) for operand in operands]
        return min(counts, default=1)

    @functools.cached_property
    def indexed(self) -> frozenset[int]:
        """The row axes whose index the function reads, as in a causal mask."""
        nodes = topological(nodes_of(self.results))
        axes = {node.attrs[0] for node in nodes if node.op == "iota"}
        return frozenset(axes).intersection(self.rows)

    @functools.cached_property
    def inner(self) -> tuple[int, ...]:
        """The column axes of a block, if something reduces over blocks of a row; else ().

        Beside reductions over blocks there are others over whole rows: otherwise the blocks would
        be the rows.
        """
        nodes = topological(nodes_of(self.results))
        return inner_of([node.attrs[0] for node in nodes if node.op in REDUCTIONS], self.columns)

    @property
    def outer(self) -> tuple[int, ...]:
        """The column axes along which blocks of a row differ."""
        return tuple(without(self.columns, self.inner))

    @property
    def block(self) -> int:
        """The columns of a block; 0 if nothing reduces over blocks."""
        return self.size(self.inner) if self.inner else 0

    def has_blocks(self, axes: Collection[int]) -> bool:
        """Whether a value with these axes has one number for each block of a row."""
        if not self.inner or not set(self.inner).isdisjoint(axes):
            return False
        return not set(self.outer).isdisjoint(axes)

    def size(self, axes: Iterable[int]) -> int:
        """Return the number of elements along axes, in the trace."""
        return math.prod([self.sizes[axis] for axis in axes])

    def is_whole(self, operand: Operand) -> bool:
        """Whether a tensor has all rows and columns."""
        return {*self.rows, *self.columns} <= set(operand.axes)

    def has_columns(self, operand: Operand) -> bool:
        """Whether an operand varies along a row."""
        return not set(self.columns).isdisjoint(operand.axes)

    def parts(self, operand: Operand) -> Iterator[Part]:
        """Yield the parts of an operand."""
        yield from parts_along(within(self.unrolled, operand.axes), self.sizes)

    def text(self, *, rows: bool = True) -> str:
        """Return the function, one line a value.

        For golden tests, and to compare functions. Without ``rows`` the text does not depend on the
        number of row axes, which is smaller if row dimensions have size one. With rows r0 and r1::

            rows=True     %2: float[c0 r0 r1] = mul(%0, %1)
            rows=False    %2: float[c0] = mul(%0, %1)
        """
        nodes = topological(nodes_of(self.results))
        variables = {node: f"%{number}" for number, node in enumerate(nodes)}
        names = {axis: f"r{i}" for i, axis in enumerate(self.rows)}
        names |= {axis: f"c{i}" for i, axis in enumerate(self.columns)}
        lines = [self._line(node, variables, names, rows) for node in nodes]
        for operand, parts in zip(self.outputs, self.results, strict=True):
            dtype = str(operand.dtype).removeprefix("torch.")
            values = ", ".join(map(variables.__getitem__, parts.values()))
            lines.append(f"return {values}: {dtype}")
        if self.wide:
            lines.append("in fp64")
        return "\n".join(lines)

    def _line(
        self, node: Node, variables: Mapping[Node, str], names: Mapping[int, str], rows: bool
    ) -> str:
        """Return a node's line in `text`."""
        arguments = list(map(variables.__getitem__, node.args))
        # Without rows, an index along one is named by its dimension in the results.
        is_index_of_any = node.op == "iota" and not rows
        for attr in node.attrs:
            if is_index_of_any:
                arguments.append(self._axis_name(attr, names))
            else:
                arguments.append(_attribute_text(attr, names))
        axes = node.axes if rows else without(node.axes, self.rows)
        along = " ".join(sorted(map(names.__getitem__, axes)))
        return f"{variables[node]}: {node.kind}[{along}] = {node.op}({', '.join(arguments)})"

    def _axis_name(self, axis: int, names: Mapping[int, str]) -> str:
        """Return the dimension of a row axis in the results, or a column axis's name.

        The number of a row axis would depend on how many row axes there are.
        """
        if axis not in self.rows:
            return names[axis]
        labels = self.outputs[0].labels
        return f"dimension {[axis in label for label in labels].index(True)}"


def _attribute_text(attr: Any, names: Mapping[int, str]) -> str:
    if not isinstance(attr, tuple):
        return str(attr)
    return f"[{' '.join([_item_text(item, names) for item in attr])}]"


def _item_text(item: Any, names: Mapping[int, str]) -> str:
    """Return the text of an axis, or of one in a part, which is a pair of axis and index."""
    if isinstance(item, int):
        return names.get(item, str(item))
    return f"{item[1]}"


def inner_of(reduced: Iterable[Iterable[int]], columns: Sequence[int]) -> tuple[int, ...]:
    """Return the axes of the shortest reductions that include the last column axis.

    They are () if all these are over all columns.
    """
    lasts = [axes for axes in map(set, reduced) if columns and columns[-1] in axes]
    shortest = min(lasts, key=len, default=set(columns))
    inner = within(columns, shortest)
    return tuple(inner) if len(inner) < len(columns) else ()


def parts_along(axes: Sequence[int], sizes: Sequence[int]) -> Iterator[Part]:
    """Yield the parts of a value that has these unrolled axes, the outermost first."""
    for indices in itertools.product(*[range(sizes[axis]) for axis in axes]):
        yield tuple(zip(axes, indices, strict=True))


def _flat(labels: Sequence[Label]) -> Label:
    return tuple(itertools.chain.from_iterable(labels))
