"""Arguments of a generated kernel, and the addresses of what it reads and writes.

An address is a sum of terms, each of which may be absent::

    pointer + row * stride of rows + column * stride of columns + offset of the part

and its mask tells which elements of the tile exist::

                           columns   | padding
    rows of the call    [  mask      |    0    ]     in_rows: (ROWS, 1)
    rows after the last [   0        |    0    ]     in_cols: (1, BLOCK_N)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ..core.launches.operand import Spacing
from .axes import Label
from .identifiers import Identifiers
from .layouts import BY_ROW, RowLayout, offsets_along, row_layout, strides_of, times
from .structure import Operand, Part, Structure, within
from .text import product

__all__ = ["EVEN", "LOOKUP", "SPREAD", "Addresses", "Argument", "Sliced", "Spacings"]

# How rows are spaced, for each tensor whose rows no single stride reaches, by its kind and index.
Spacings = Mapping[tuple[str, int], Spacing]
EVEN: Spacings = MappingProxyType({})
# The spacing of a tensor whose rows are those of a table that an index selects. Its argument is the
# table. Only kernels of slices have such tensors: see `horizontal.lookups`.
LOOKUP: Spacing = ()

# Of a kernel of one slice of many: whether all slices have one length or several, or whether some
# length is no multiple of a load's elements, so that rows are held in parts. "" for other kernels.
Sliced = Literal["", "equal", "mixed", "ragged"]

_PREFIXES = {"cotangent": "d_", "gradient": "grad_"}
# A term of zeros, with a row for each of a tile, in the kernel of a slice. A vector is read and
# written in the layout of tiles with it. Otherwise Triton may give tiles the layout of vectors,
# whose columns are divided among warps: then each sum of a row is an exchange between warps.
SPREAD = "slice_spread"
# What this package allocates for the call is contiguous.
_ALLOCATED = ("output", "intermediate", "gradient")
# By whether an address varies along rows, and by the variable of its columns: "" without columns.
_MASKS = {
    (True, "cols"): "mask",
    (True, "pairs"): "in_rows & in_pairs",
    (True, "blocks"): "in_rows & in_blocks",
    (True, ""): "in_rows",
    (False, "cols"): "in_cols",
    (False, "pairs"): "in_pairs",
    (False, "blocks"): "in_blocks",
    (False, ""): "",
}


@dataclass(frozen=True)
class Argument:
    """A run-time argument of a kernel.

    Attributes:
        name: in the source.
        kind: "input", "output", "intermediate", "stats", "moments", "cotangent", "gradient",
            "partials", "seed", "offset", "threshold", "stride" (of the tensor that ``of`` names),
            "size" (of a row axis), "rows", "chunks" or "programs". Of an input that is looked up in
            a table: "index" (its row of the table for each row) and "limit" (the table's rows).
        index: the index of the input, output, dropout or axis.
        of: for a stride: the kind of its tensor.
        dim: for a stride: if rows have several strides, the dimension that has this one; else -1.
    """

    name: str
    kind: str
    index: int = 0
    of: str = ""
    dim: int = -1


class Addresses:
    """Writes addresses, and collects the arguments that they use.

    Attributes:
        arguments: by kind, index, and for a stride the kind of its tensor and the dimension.
        names: the names of the kernel.
        group: the row axes of groups of rows, which are axis 1 of the grid; () without groups.
        spacings: the spacings of tensors whose rows no single stride reaches.
        sliced: of a kernel of one slice of many, the kind of lengths: see `Sliced`. Then every row
            stride is an argument.
        divides: whether rows are divided for an index, in the type INDEX.
        pairs: whether a tile has the columns of two parts.
        blocks: whether a tile has the blocks of a row.
    """

    def __init__(
        self,
        structure: Structure,
        names: Identifiers,
        *,
        group: Label,
        spacings: Spacings,
        sliced: Sliced,
    ) -> None:
        self.structure = structure
        self.names = names
        self.group = group
        self.spacings = spacings
        self.sliced = sliced
        self.arguments: dict[tuple[str, int, str, int], Argument] = {}
        self.divides = False
        self.pairs = False
        self.blocks = False
        self._indexed_axes: set[int] = set()  # the row axes whose index is used
        self._looked_up: dict[int, tuple[str, str]] = {}  # rows of tables: variables and lines

    @property
    def spreads(self) -> bool:
        """Whether vectors are read and written in the layout of tiles: see `SPREAD`.

        Programs that hold rows in parts have few warps, and no need of it.
        """
        return self.sliced in ("equal", "mixed")

    @property
    def joins(self) -> bool:
        """Whether a tile may have BLOCK_K neighbouring slices: see `horizontal.tiles`.

        Each address of a slice is then a block ``(ROWS, 1)``, with that of each row's slice.
        """
        return self.sliced == "equal"

    def argument(self, kind: str, index: int, name: str, of: str = "", dim: int = -1) -> str:
        """Return the name of an argument, which is added if it is new."""
        key = (kind, index, of, dim)
        argument = self.arguments.get(key)
        if argument is None:
            argument = Argument(self.names.free(name), kind, index, of, dim)
            self.arguments[key] = argument
        return argument.name

    def varies_by_row(self, operand: Operand) -> bool:
        """Whether tiles of rows have different elements of an operand."""
        return row_layout(self.structure, operand, self.group) in BY_ROW

    def number_of_rows(self, kind: str, index: int) -> str:
        """Return the address of a number of each row.

        It is one of ``stats``, which a backward reads, or of ``moments``, which the next kernel
        reads::

            stats = [number 0 of all rows | number 1 of all rows | ...]
        """
        pointer = self.argument(kind, 0, kind)
        total = "M * groups" if self.group else "M"
        if index:
            return f"{pointer} + {index} * {total} + rows"
        return f"{pointer} + rows"

    def tile(
        self,
        kind: str,
        index: int,
        operand: Operand,
        part: Part,
        *,
        full: bool = False,
        element: str = "",
        paired: bool = False,
    ) -> tuple[str, str]:
        """Return the address of a tile of an operand, or of an element of each row; and its mask.

        Args:
            kind: as in `Argument`.
            index: as in `Argument`.
            operand: the tensor.
            part: the part of a row.
            full: whether the tile has all its columns, so that none is masked.
            element: the index of an element; "" for a tile.
            paired: whether the tile has the columns of two parts in turn: see `pair_axis`.
        """
        structure = self.structure
        # Arguments are named in the order of these calls.
        pointer = self.argument(kind, index, _PREFIXES.get(kind, "") + operand.name)
        layout = row_layout(structure, operand, self.group)
        strides, _ = strides_of(structure, operand)
        columns = within(structure.columns, strides)
        of_blocks = structure.has_blocks(columns)
        terms = [pointer, *self._row_terms(kind, index, operand, layout)]
        if columns and element:
            terms.append(times(element, strides[columns[0]]))
        elif paired:
            terms.append("pairs")
            self.pairs = True
        elif columns:
            terms.append(self._column_offset(operand, columns))
            self.blocks |= of_blocks
        terms += self._part_offsets(operand, part)
        by_column = bool(columns) and not (element or full)
        if self.spreads and layout == "vector" and by_column:
            terms.append(SPREAD)
        variable = ""
        if by_column:
            variable = "pairs" if paired else "blocks" if of_blocks else "cols"
        mask = _MASKS[layout in BY_ROW, variable]
        if layout == "group" and not mask:
            # The last programs may have no group. A mask has the shape of the address: a block for
            # an element, a scalar for a group's number.
            mask = "in_groups" if element else "(group < groups)"
        return " + ".join(terms), mask

    def _row_terms(self, kind: str, index: int, operand: Operand, layout: RowLayout) -> list[str]:
        """Return the terms of an address that lead to a row; none for what all rows share."""
        if layout == "vector":
            return []
        if layout == "indexed":
            return [self._row_offset(operand)]
        spacing = self.spacings.get((kind, index))
        if spacing:
            return self._spaced_terms(kind, index, operand, spacing)
        row = "group" if layout == "group" else "rows"
        if spacing == LOOKUP:
            row = self._row_of_table(index)
        return [times(row, self._row_stride(kind, index, operand, layout))]

    def _column_offset(self, operand: Operand, columns: Sequence[int]) -> str:
        """Return the offset of a tile's columns, or blocks, inside of which there may be rows."""
        structure = self.structure
        strides, _ = strides_of(structure, operand)
        offset = offsets_along(structure, strides, of_blocks=structure.has_blocks(columns))
        inner = operand.axes[operand.axes.index(columns[-1]) + 1 :]
        sizes = map(self._size, within(inner, structure.rows))
        return product([f"({offset})" if "+" in offset else offset, *sizes])

    def _row_of_table(self, index: int) -> str:
        """Return the variable with the row of a table, which `indices` assigns."""
        if index in self._looked_up:
            return self._looked_up[index][0]
        name = self.arguments["input", index, "", -1].name
        indices = self.argument("index", index, f"{name}_index")
        step = self.argument("stride", index, f"{name}_step", "index")
        limit = self.argument("limit", index, f"{name}_limit")
        row = self.names.free(f"{name}_row")
        address = f"{indices} + {times('rows', step)}"
        line = f"{row} = row_of_table({address}, {limit}, in_rows)"
        self._looked_up[index] = row, line
        return row

    def _spaced_terms(self, kind: str, index: int, operand: Operand, spacing: Spacing) -> list[str]:
        """Return the terms that lead to a row which no single stride reaches.

        For q of a packed projection, with rows (batch, sequence, heads)::

            rows // heads * q_stride1  +  rows % heads * q_stride2
        """
        terms = []
        for first, last in spacing:
            inner = within(_axes_of(operand, last + 1, len(operand.labels)), self.structure.rows)
            is_outermost = first == spacing[0][0]
            axes = [] if is_outermost else _axes_of(operand, first, last + 1)
            row = self._index_within(axes, inner)
            name = f"{operand.name}{last}_stride"
            terms.append(times(row, self.argument("stride", index, name, kind, last)))
        return terms

    def _row_stride(self, kind: str, index: int, operand: Operand, layout: RowLayout) -> int | str:
        """Return the distance of rows, or of groups: a constant if the tensor is contiguous."""
        strides, row_size = strides_of(self.structure, operand)
        # A number of each group is read from a contiguous tensor: see
        # `launcher.Launcher._row_dims`.
        is_vector = bool(set(self.structure.columns) & set(strides))
        is_number_of_group = layout == "group" and not is_vector
        # A slice of one column may be beside longer ones, in one tensor.
        is_number = row_size == 1 and self.sliced != "ragged"
        if is_number or is_number_of_group or (kind in _ALLOCATED and not self.sliced):
            return row_size
        # A name without a number at its end: it marks strides, see `core.launches.launch`. An input
        # and its gradient both have a stride in the kernel of a slice.
        name = self.arguments[kind, index, "", -1].name if self.sliced else operand.name
        return self.argument("stride", index, f"{name}_stride", kind)

    def _part_offsets(self, operand: Operand, part: Part) -> list[str]:
        """Return the terms of an address that lead to a part of a row."""
        strides, _ = strides_of(self.structure, operand)
        terms: list[str] = []
        # If an unrolled axis is outside of rows, the distance between parts is a number of rows:
        #
        #   (batch, 3, columns)   part 2 begins at 2 * columns
        #   (3, batch, columns)   part 2 begins at 2 * batch * columns, of any batch
        offset = 0
        for axis, position in part:
            inner = operand.axes[operand.axes.index(axis) + 1 :]
            inner_rows = within(inner, self.structure.rows)
            distance = strides[axis] * position
            if position and inner_rows:
                # Each part has rows of its own: their number is not a constant.
                terms.append(product([str(distance), *map(self._size, inner_rows)]))
            else:
                offset += distance
        if offset:
            terms.append(str(offset))
        return terms

    def _row_offset(self, operand: Operand) -> str:
        """Return the offset of a row of a contiguous operand that has other rows than the call."""
        structure = self.structure
        terms = []
        rows = structure.rows
        if operand.axes[len(operand.axes) - len(rows) :] == rows:
            return "rows"
        for dim, axis in enumerate(operand.axes):
            if axis not in rows:
                continue
            self._indexed_axes.add(axis)
            sizes = map(self._size_of, operand.axes[dim + 1 :])
            terms.append(product([f"row{axis}", *sizes]))
        # This registers the sizes that `indices` will use, as `index_of_row` does. It comes after
        # the sizes above, because arguments of the kernel have the order of registration.
        for axis in self._indexed_axes:
            self._row_index(axis)
        return " + ".join(terms)

    def _size_of(self, axis: int) -> str:
        """Return an axis's size: an argument for that of a row axis, else a constant."""
        if axis in self.structure.rows:
            return self._size(axis)
        return str(self.structure.sizes[axis])

    def _size(self, axis: int) -> str:
        return self.argument("size", axis, f"size{axis}")

    # --- rows of a tile ---------------------------------------------------------------------------

    def row_lines(self) -> list[str]:
        """Return the lines that compute the rows of a tile, and the indices that are used."""
        lines = ["places = rows_of(tile, ROWS)"]
        if self.joins:
            lines = ["places = rows_of_slices(tile, ROWS, BLOCK_K)"]
        if self.sliced == "ragged":
            # A tile of one row exists: a loop over tiles ends with the last.
            lines.append("in_rows = which_exist(places, M, ROWS == 1)[:, None]")
            lines.append("rows = places[:, None]")
        elif self.group:
            lines.append("in_rows = (places < M)[:, None] & in_groups")
            lines.append(f"numbers = {self._row_of_group()}")
            lines.append("rows = numbers[:, None]")
        else:
            lines.append("in_rows = (places < M)[:, None]")
            lines.append("rows = places[:, None]")
        return [*lines, *self.indices()]

    def _row_of_group(self) -> str:
        """Return the number of a row among all rows, from its number in a group, ``places``.

        With rows (batch, sequence, heads), for groups of one

            batch       group * M + places
            head        places * groups + group
            sequence    (places // heads * groups + group) * heads + places % heads
        """
        rows = self.structure.rows
        if self.group[0] == rows[0]:
            return "group * M + places"
        inner = rows[rows.index(self.group[-1]) + 1 :]
        if not inner:
            return "places * groups + group"
        self.divides = True
        size = f"({product(map(self._size, inner))})"
        divisor = f"{size}.to(INDEX)"
        outer = f"(places.to(INDEX) // {divisor}).to(tl.int64)"
        return f"({outer} * groups + group) * {size} + places.to(INDEX) % {divisor}"

    # --- indices of rows --------------------------------------------------------------------------

    def index_of_row(self, axis: int) -> str:
        """Return the variable with the index along a row axis, which `indices` assigns."""
        self._indexed_axes.add(axis)
        # The line itself comes from `indices`, when the list of arguments is complete: this call
        # registers the sizes that it uses.
        self._row_index(axis)
        return f"row{axis}"

    def indices(self) -> list[str]:
        """Return the lines that compute the index along each row axis whose index is used.

        They also compute the rows of tables.
        """
        lines = [f"row{axis} = {self._row_index(axis)}" for axis in sorted(self._indexed_axes)]
        return [*lines, *[line for _, line in self._looked_up.values()]]

    def _row_index(self, axis: int) -> str:
        """Return the index along a row axis: ``rows`` counts all of them, the last one fastest."""
        rows = self.structure.rows
        inner = rows[rows.index(axis) + 1 :]
        return self._index_within([] if axis == rows[0] else [axis], inner)

    def _index_within(self, axes: Sequence[int], inner: Sequence[int]) -> str:
        """Return the common index along neighbouring row axes that precede the ``inner`` ones.

        Without axes, it is the index along all axes before the inner ones. A GPU has no division of
        64 bits, so the division is of 32 bits unless there are too many rows.
        """
        if not axes and not inner:
            return "rows"
        self.divides = True
        text = "rows.to(INDEX)"
        if inner:
            text = f"{text} // ({product(map(self._size, inner))}).to(INDEX)"
        if axes:
            text = f"({text}) % ({product(map(self._size, axes))}).to(INDEX)"
        return f"({text}).to(tl.int64)"


def _axes_of(operand: Operand, first: int, end: int) -> list[int]:
    """Return the axes that make up dimensions of an operand."""
    return list(itertools.chain(*operand.labels[first:end]))
