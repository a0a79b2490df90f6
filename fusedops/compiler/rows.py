"""Tells the row axes of a traced function from its column axes, and checks that one kernel fits.

A function that no kernel can compute is refused here, with the user's line: reductions over rows,
rows inside columns, one dimension twice.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
from collections.abc import Collection, Sequence
from dataclasses import replace

from .axes import AxisError, Label
from .errors import NotRowwiseError
from .ir import REDUCTIONS, Node, topological
from .numbering import Numbering
from .parts import Parts
from .structure import (
    MOST_NUMBERS,
    MOST_PARTS,
    Operand,
    Structure,
    inner_of,
    nodes_of,
    within,
    without,
)
from .traced import TWICE, Traced, Value, twice

__all__ = ["structured", "structured_as"]

_MIXES_ROWS = (
    "it reduces over a dimension that is not the last: it mixes rows. Move the dimension to "
    "the end outside, or take the dimension apart with unbind and add its slices"
)


def structured(traced: Traced) -> Structure:
    """Return the structure of a traced function.

    Small axes that are reduced are unrolled if no kernel fits otherwise. For example, a sum over
    four streams of a residual is three sums of their columns. Of a matrix whose rows and columns
    are both reduced, the columns remain an axis.

    Axes along which rows are repeated are unrolled with them, if that makes few enough parts and
    values.

    Raises:
        NotRowwiseError: its rows and columns are not those of one kernel.
    """
    structuring = _Structuring(traced)
    try:
        return structuring.result()
    except NotRowwiseError:
        small = structuring.small_axes()
        if not small:
            raise
    with contextlib.suppress(NotRowwiseError):
        return _of_few_values(structuring.result((*small, *structuring.repeated_axes(small))))
    return _of_few_values(structuring.result(small))


def structured_as(traced: Traced, unrolled: Label) -> Structure:
    """Return the structure of a traced function, with these axes unrolled.

    The choice of `structured` may depend on sizes: of one row, the outermost axis is not the rows.

    Raises:
        NotRowwiseError: its rows and columns are not those of one kernel.
    """
    return _Structuring(traced).result(unrolled)


# Example: the axes of ``q, k, v = x.unbind(2)``, with sums over the last dimension of each:
#
#   dimensions of x   batch  sequence  3  64
#   reduced over                          64   -> column
#   selected along                     3       -> unrolled
#   the others        batch  sequence          -> rows
#
# A kernel's program has some rows, all columns, and code of its own for each index along the
# unrolled axes. So rows have to be outside of columns in every tensor, and all reductions have to
# be over the same columns.


# The most values of a function with small axes that are unrolled. The time in which Triton
# compiles a kernel grows with the square of their number: for 20 iterations on matrices of 4 x 4,
# which have 300, it is half a minute.
_MOST_VALUES = 400


def _of_few_values(structure: Structure) -> Structure:
    """Return the structure; raise if unrolling small axes makes too much code."""
    count = len(topological(nodes_of(structure.results)))
    if count > _MOST_VALUES:
        raise NotRowwiseError(
            f"with its small dimensions unrolled it has {count} values, and {_MOST_VALUES} are the "
            "most. Make iterations on small matrices a function of their own"
        )
    return structure


# The fewest columns of a block. A thread has about as many neighbouring columns.
_SMALLEST_BLOCK = 8


class _Structuring:
    """Assigns the axes of a traced function to rows, columns and unrolled parts.

    Attributes:
        nodes: the traced nodes that outputs depend on.
        used: the inputs among them.
        numbering: the axes, with those that are unrolled.
    """

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.nodes = topological([value.node for value in traced.outputs])
        self.node_set = set(self.nodes)
        self.used = list(filter(self._is_computed, traced.inputs))
        # The order of these steps matters. Joining may make two dimensions of a value one: then the
        # check raises. The numbering is of the axes that remain after all joins.
        try:
            self._join_columns()
        except AxisError as error:  # raised when dimensions are joined that cannot be the same
            raise NotRowwiseError(str(error)) from None
        self._check_dimensions()
        self.numbering = Numbering(traced, self.nodes, self.used)

    def result(self, unrolled: Label = ()) -> Structure:
        """Return the structure, after checks of its operands, with further axes unrolled."""
        traced = self.traced
        numbering = self.numbering
        numbering.unroll(unrolled)
        inputs = [self._operand(value, value.node.names[0]) for value in traced.inputs]
        outputs = self._outputs()
        rows, columns = self._rows_and_columns()
        self._check_parts(columns)
        self._check(inputs, outputs, rows, columns)
        parts = Parts(traced, numbering, columns)
        fixed = numbering.of(itertools.chain(*traced.fixed))
        bare = Structure(
            parts.graph,
            numbering.sizes,
            rows,
            columns,
            numbering.unrolled,
            tuple(inputs),
            tuple(outputs),
            results=(),  # replaced below: the results are computed from this structure's parts
            drops=tuple(traced.drops),
            container=traced.container,
            lines=parts.lines,
            used=tuple(map(self._is_computed, traced.inputs)),
            wide=traced.wide,
            fixed=tuple(within(rows, fixed)),
        )
        results = []
        for value, operand in zip(traced.outputs, outputs, strict=True):
            results.append(parts.of(value.node, bare.parts(operand)))
        values = []
        for value in filter(self._is_computed, traced.values):
            nodes = parts.of(value.node, numbering.parts(value.node))
            values.append((nodes, value.dtype))
        structure = replace(
            bare, results=tuple(results), values=tuple(values), loose=(0,) * len(inputs)
        )
        _check_dropouts(structure)
        return structure

    def small_axes(self) -> Label:
        """Return the axes of reductions that could be unrolled; () if they do not fit.

        The innermost axis is the columns, and reductions that are not over it may be of small axes.
        The outermost axis has the rows of a batch, whose number differs between calls.
        """
        numbering = self.numbering
        rolled = without(range(numbering.count), numbering.unrolled)
        columns = frozenset(rolled[-1:])
        beside = filter(columns.isdisjoint, self._reductions().values())
        small = without(sorted(set(itertools.chain(*beside))), numbering.unrolled)
        if rolled[0] in small or numbering.size(small) > MOST_PARTS:
            return ()
        return tuple(small)

    def repeated_axes(self, small: Label) -> Label:
        """Return further axes to unroll, along which rows are repeated.

        Inputs with columns do not have these axes, but results do. For example, each mix of a
        residual's streams reads all streams::

            (batch, 4 mixes, 4 streams, 1)   *   (batch, 1, 4 streams, 64)

        With the mixes as rows, a program reads all streams again for each of them, and the gradient
        of the streams is written for each, for the caller to sum. Unrolled, both happen once.
        """
        numbering = self.numbering
        first, *_, last = without(range(numbering.count), numbering.unrolled)
        wide = set[int]()
        for value in self.used:
            axes = numbering.of(value.node.axes)
            if last in axes:
                wide.update(axes)
        if first not in wide:  # rows of a batch share the inputs
            return ()
        return tuple(without(range(first, last), {*wide, *numbering.unrolled, *small}))

    def _outputs(self) -> list[Operand]:
        """Return the outputs, with the last name that the user gave to each."""
        outputs = []
        for number, value in enumerate(self.traced.outputs):
            names = value.node.names or [f"output{number}"]
            outputs.append(self._operand(value, names[-1]))
        return outputs

    def _operand(self, value: Value, name: str) -> Operand:
        labels = tuple(map(self.numbering.of_label, value.labels))
        return Operand(labels, value.dtype, value.node.kind, name)

    # --- checks -----------------------------------------------------------------------------------

    def _check_parts(self, columns: Label) -> None:
        """Raise if a value has too many parts."""
        numbering = self.numbering
        for node in self.nodes:
            has_columns = not set(columns).isdisjoint(numbering.of(node.axes))
            most = MOST_PARTS if has_columns else MOST_NUMBERS
            if numbering.count_of_parts(node) > most:
                raise self._refused(f"rows are taken apart into more than {most} parts", node)

    def _check_dimensions(self) -> None:
        """Raise if two dimensions of a value became the same axis.

        The recorder checks each value when it is computed. A later operator may join its axes.
        """
        for value in filter(self._is_computed, self.traced.noted):
            if twice(self.traced.axes, value):
                raise self._refused(TWICE, value.node)

    def _is_computed(self, value: Value) -> bool:
        """Whether an output depends on a value, or is that value."""
        return value.node in self.node_set

    def _check(
        self, inputs: Sequence[Operand], outputs: Sequence[Operand], rows: Label, columns: Label
    ) -> None:
        """Raise if tensors do not have the rows and columns that the kernels take."""
        operands = [*inputs, *outputs]
        if not any(operand.labels for operand in operands):
            raise NotRowwiseError("none of its tensors has a dimension")
        values = [*self.traced.inputs, *self.traced.outputs]
        for operand, value in zip(operands, values, strict=True):
            if self._is_computed(value):
                self._check_operand(operand, value.node, rows, columns)
        for operand, value in zip(outputs, self.traced.outputs, strict=True):
            if not set(rows) <= set(operand.axes):
                raise self._refused(
                    f"{operand.name} does not vary along all rows, and is returned", value.node
                )
        self._check_reductions([*inputs, *outputs], columns)

    def _check_reductions(self, operands: Sequence[Operand], columns: Label) -> None:
        """Raise if reductions are neither over rows nor over the same blocks of them."""
        over = self._reductions_of_parts()
        inner = inner_of(over.values(), columns)
        for node, axes in over.items():
            if not axes or set(axes) == set(columns):
                continue
            is_over_blocks = axes == inner and node.op != "pick"
            outer = tuple(without(columns, inner))
            is_over_numbers = inner and axes == outer and node.op == "amax"
            if not (is_over_blocks or is_over_numbers) or columns != (*outer, *inner):
                raise self._refused(
                    "it reduces over other dimensions than elsewhere; compute one of the two "
                    "reductions outside",
                    node,
                )
            if is_over_blocks and not set(columns) <= set(self.numbering.of(node.args[0].axes)):
                raise self._refused("it reduces over blocks what is the same in each block", node)
        if not inner:
            return
        size = self.numbering.size(inner)
        if size < _SMALLEST_BLOCK or size & (size - 1):
            raise NotRowwiseError(
                f"it reduces over rows and over blocks of {size} of their columns; blocks of "
                f"{_SMALLEST_BLOCK}, 16, 32 and so on fit"
            )
        values = [*self.traced.inputs, *self.traced.outputs]
        for operand, value in zip(operands, values, strict=True):
            varying = tuple(within(columns, operand.axes))
            is_input = value.node.op == "input"
            fits = varying in ((), columns) or (not is_input and varying == outer)
            if self._is_computed(value) and not fits:
                raise self._refused(
                    f"{operand.name} has some of the dimensions of rows whose blocks it reduces; "
                    "expand it outside",
                    value.node,
                )

    def _check_operand(self, operand: Operand, node: Node, rows: Label, columns: Label) -> None:
        """Raise if an operand's rows are not its outer dimensions."""
        if len(set(operand.axes)) < len(operand.axes):
            raise self._refused(
                f"{operand.name} has one dimension twice: rows and columns are mixed", node
            )
        if self._has_numbers_of_blocks(operand, columns):
            return
        # Parts of a row may be rows of another tensor, such as heads of a packed projection: row
        # axes may lie inside unrolled ones, but not inside columns.
        is_row = [axis in rows for axis in without(operand.axes, self.numbering.unrolled)]
        columns_last = is_row == sorted(is_row, reverse=True)
        # A view may split the first dimension into rows and parts. The parts have to be inside,
        # since otherwise there is no one stride from row to row:
        #
        #   (batch * 3, 64)    accepted: label (row, part), one row after the other
        #   (3 * batch, 64)    refused: label (part, row), the parts of a row are far apart
        first = operand.labels[0] if operand.labels else ()
        parts_first = bool(first) and first[0] in self.numbering.unrolled
        joins_rows = not set(rows).isdisjoint(first)
        if not columns_last or (parts_first and joins_rows):
            raise self._refused(f"in {operand.name} the rows are not the outer dimensions", node)

    def _has_numbers_of_blocks(self, operand: Operand, columns: Label) -> bool:
        """Whether an operand has one number for each block of a row, in adjacent dimensions.

        Rows may be inside of these, as in scales that a product reads column by column.
        """
        inner = inner_of(self._reductions_of_parts().values(), columns)
        outer = tuple(without(columns, inner))
        if not inner or not set(outer) <= set(operand.axes):
            return False
        first = operand.axes.index(outer[0])
        adjacent = operand.axes[first : first + len(outer)] == outer
        return adjacent and set(self.numbering.unrolled + inner).isdisjoint(operand.axes)

    def _refused(self, why: str, node: Node) -> NotRowwiseError:
        """Return the error, with the user's line if it is known."""
        line = self._line_of(node)
        if not line:
            return NotRowwiseError(why)
        text = linecache.getline(self.traced.file, line).strip()
        return NotRowwiseError(f"{why}\n  line {line} of {self.traced.file}: {text}")

    def _line_of(self, node: Node) -> int:
        """Return the user's line of a node or, without one, of the first node that uses it.

        It is 0 if no such node has a line.
        """
        users = {node: None}  # as an ordered set
        for candidate in self.nodes:
            if not users.keys().isdisjoint(candidate.args):
                users[candidate] = None
        lines = [self.traced.lines.get(user.number, 0) for user in users]
        return next(filter(None, lines), 0)

    # --- dimensions that are the same -------------------------------------------------------------

    def _join_columns(self) -> None:
        """Unify dimensions of equal size that no operator combines, so that one kernel has them.

        It unifies the dimensions of outputs of the same shape. It also unifies reduced dimensions
        with the last dimensions of inputs: in ``return x.sum(-1), y.sum(-1)`` the two inputs'
        columns are separate axes of the trace, but a kernel has one set of columns. `_join` does
        not unify two axes of one value: they are two of its dimensions.
        """
        shapes = {value: self._shape(value) for value in self.traced.outputs}
        for first, second in itertools.combinations(self.traced.outputs, 2):
            if shapes[first] == shapes[second]:
                self._join_all(first.labels, second.labels)
        self._join_reduced()

    def _join_reduced(self) -> None:
        """Unify reduced dimensions with the last dimensions of tensors, and with each other."""
        axes = self.traced.axes
        reduced = dict.fromkeys([node.attrs[0] for node in self._nodes_of(REDUCTIONS)])
        tensors = [*self.used, *self.traced.outputs]
        last_labels = [value.labels[-1] for value in tensors if value.labels]
        for over, label in itertools.product(reduced, last_labels):
            self._join(axes.leaves_of(over), axes.leaves(label))
        # Blocks of two inputs' rows: these are split into the same blocks.
        for first, second in itertools.combinations(reduced, 2):
            self._join(axes.leaves_of(first), axes.leaves_of(second))

    def _nodes_of(self, ops: Collection[str]) -> list[Node]:
        """Return the nodes of these operators."""
        return [node for node in self.nodes if node.op in ops]

    def _shape(self, value: Value) -> list[int]:
        """Return the shape of a tensor, as the trace has it."""
        axes = self.traced.axes
        return [axes.size(axes.leaves(label)) for label in value.labels]

    def _join_all(self, labels: Sequence[Label], others: Sequence[Label]) -> None:
        """Unify the dimensions of two tensors."""
        axes = self.traced.axes
        for first, second in zip(labels, others, strict=True):
            self._join(axes.leaves(first), axes.leaves(second))

    def _join(self, first: Label, second: Label) -> None:
        """Unify two dimensions, if they have the same size and no value has both."""
        axes = self.traced.axes
        have_common_axis = not set(first).isdisjoint(second)
        if have_common_axis or axes.size(first) != axes.size(second):
            return
        # Axes that elements are picked along are not unrolled.
        for one, other in ((first, second), (second, first)):
            if self._is_of(one, ("pick",)) and self._is_of(other, ("select", "stack")):
                return
        for node in self.nodes:
            axes_of_node = set(axes.leaves_of(node.axes))
            if axes_of_node & set(first) and axes_of_node & set(second):
                return
        axes.unify(first, second)

    def _is_of(self, label: Label, ops: Collection[str]) -> bool:
        """Whether one of these operators selects, stacks or picks along axes."""
        axes = self.traced.axes
        over = [node.attrs[0] for node in self._nodes_of(ops)]
        return not set(label).isdisjoint(axes.leaves_of(itertools.chain(*over)))

    # --- rows and columns -------------------------------------------------------------------------

    def _reductions(self) -> dict[Node, Label]:
        """Return the reductions, each with the axes that it is over."""
        return {node: self.numbering.of(node.attrs[0]) for node in self._nodes_of(REDUCTIONS)}

    def _reductions_of_parts(self) -> dict[Node, Label]:
        """Return the reductions, each with the axes that it is over in every part of a row."""
        unrolled = self.numbering.unrolled
        return {node: tuple(without(axes, unrolled)) for node, axes in self._reductions().items()}

    def _rows_and_columns(self) -> tuple[Label, Label]:
        """Return the axes of rows and of columns; raise if the function reduces over rows."""
        over = self._reductions()
        rolled = without(range(self.numbering.count), self.numbering.unrolled)
        columns = within(rolled, set(itertools.chain(*over.values())))
        if not columns:
            columns = within(rolled[-1:], self._innermost())
        rows = without(rolled, columns)
        if not rows and len(columns) > 1:
            raise self._refused("it reduces over all dimensions: it mixes rows", next(iter(over)))
        # The outermost axis has the smallest number: no reduced axis may be before a row axis.
        last_row = max(rows, default=0)
        for node, axes in over.items():
            if min(axes, default=last_row) < last_row:
                raise self._refused(_MIXES_ROWS, node)
        return tuple(rows), tuple(columns)

    def _innermost(self) -> set[int]:
        """Return the axes of the last dimension.

        Tensors of fewer dimensions do not count. Rows of one element have no axes.
        """
        tensors = [value.labels for value in (*self.used, *self.traced.outputs)]
        rank = max(map(len, tensors))
        axes: set[int] = set()
        for labels in tensors:
            if labels and len(labels) == rank:
                axes.update(self.numbering.of_label(labels[-1]))
        return axes


def _check_dropouts(structure: Structure) -> None:
    """Raise if several elements would share a random number of a dropout."""
    whole = frozenset((*structure.rows, *structure.columns))
    for node in topological(nodes_of(structure.results)):
        if node.op == "keep" and node.axes != whole:
            raise NotRowwiseError(
                "dropout of what does not vary along all dimensions; draw it outside, and pass it "
                "as an argument"
            )
