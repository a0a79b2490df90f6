"""Layouts of operands: how their rows correspond to the call's, and the offsets of columns."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Literal

import torch

from .axes import Label
from .structure import Operand, Part, Structure, within, without

__all__ = [
    "BY_ROW",
    "RowLayout",
    "column_index",
    "groups_of",
    "offsets_along",
    "outer_group",
    "pair_axis",
    "paired",
    "row_layout",
    "strides_of",
    "times",
    "unreduced",
]

# How an operand's rows correspond to those of the call. It has all of them ("rows"), none
# ("vector"), one for each group of rows ("group"), or some or all in any order ("indexed").
RowLayout = Literal["rows", "vector", "group", "indexed"]
# The layouts in which tiles of rows have different elements.
BY_ROW = ("rows", "indexed")


# For a call with rows (batch, sequence) and 64 columns, whose axes are r0, r1 and c:
#
#   (batch, sequence, 64)   rows      read at the row, which is r0 * sequence + r1
#   (64,)                   vector    all rows share it
#   (batch, 64)             group     all rows of one r0 share it, if there are many of them
#   (sequence, 64)          indexed   read at r1, computed from the row
#   (sequence, batch, 64)   indexed   read at r1, r0


def row_layout(structure: Structure, operand: Operand, group: Label) -> RowLayout:
    """Return how the rows of an operand correspond to those of the call.

    Args:
        structure: the structure of the function.
        operand: the tensor.
        group: the row axes of the groups of rows; () without groups.
    """
    rows = _row_axes(structure, operand)
    rows_first = _has_rows_first(structure, operand)
    # A function without row axes has one row.
    if rows_first and rows == structure.rows:
        return "rows"
    if not rows:
        return "vector"
    return "group" if rows_first and rows == group else "indexed"


def _has_rows_first(structure: Structure, operand: Operand) -> bool:
    """Whether an operand's row axes precede all others."""
    rows = _row_axes(structure, operand)
    return operand.axes[len(rows) :] == tuple(without(operand.axes, structure.rows))


def groups_of(structure: Structure) -> dict[Label, list[int]]:
    """Return the row axes of groups of rows, with the indices of the inputs that a group shares.

    For a call with rows (batch, sequence, heads), whose axes are r0, r1 and r2::

        (batch, 1, 1, 64)    r0
        (sequence, 1, 64)    r1
        (heads, 64)          r2
    """
    groups: dict[Label, list[int]] = {}
    for index, operand in enumerate(structure.inputs):
        rows = _row_axes(structure, operand)
        is_part = 0 < len(rows) < len(structure.rows)
        if operand.kind == "float" and is_part and _has_rows_first(structure, operand):
            groups.setdefault(rows, []).append(index)
    return {rows: inputs for rows, inputs in groups.items() if _first_of(structure, rows) >= 0}


def outer_group(structure: Structure) -> Label:
    """Return the row axes of a forward's groups, which are outer axes; () if there are no groups.

    If there are several kinds of groups, the kind with the most groups is returned. The vectors of
    the other kinds are read by index.
    """
    outer = [rows for rows in groups_of(structure) if _first_of(structure, rows) == 0]
    return max(outer, key=len, default=())


def _first_of(structure: Structure, rows: Label) -> int:
    """Return the position of these row axes among all of them; -1 if they are not adjacent."""
    first = structure.rows.index(rows[0])
    return first if rows == structure.rows[first : first + len(rows)] else -1


def strides_of(structure: Structure, operand: Operand) -> tuple[dict[int, int], int]:
    """Return the strides of an operand's axes within a row, and the number of elements of a row."""
    static = without(operand.axes, structure.rows)
    strides: dict[int, int] = {}
    size = 1
    for axis in reversed(static):
        strides[axis] = size
        size *= structure.sizes[axis]
    return strides, size


def pair_axis(structure: Structure, operand: Operand) -> int | None:
    """Return the axis of two parts of a row that alternate in memory; None if there is none.

    A tile of both is contiguous, and is split and joined in registers::

        x[..., ::2]     columns of part 0:  0   1   2   3
        x[..., 1::2]    columns of part 1:    0   1   2   3
    """
    strides, _ = strides_of(structure, operand)
    axis = (-1, *operand.axes)[-1]  # -1 for an operand without axes
    is_pair = axis in structure.unrolled and structure.sizes[axis] == 2
    columns = within(structure.columns, strides)
    if not is_pair or not columns:
        return None
    alternates = strides[columns[-1]] == 2
    are_dense = _have_one_stride(structure, columns, strides, structure.columns)
    return axis if alternates and are_dense else None


def paired(part: Part, axis: int | None) -> tuple[Part, int]:
    """Return the first part of a part's pair, and the part's index in the pair.

    ``axis`` is that of the pair (see `pair_axis`). If it is None, the part itself is returned, and
    the index is 0.
    """
    indices = dict[int | None, int](part)
    if axis not in indices:
        return part, 0
    first = tuple([(other, 0 if other == axis else index) for other, index in part])
    return first, indices[axis]


def offsets_along(
    structure: Structure, strides: Mapping[int, int], *, of_blocks: bool = False
) -> str:
    """Return the offsets of a tile's columns in an operand's row; "" if it has no columns.

    The operand may have the column axes in another order than the call, or only some of them.
    ``of_blocks``: it has one number for each block of the columns.
    """
    columns = within(structure.columns, strides)
    if not columns:
        return ""
    every = structure.columns
    if of_blocks:
        every = structure.outer
    if _have_one_stride(structure, columns, strides, every):
        return times("blocks" if of_blocks else "cols", strides[columns[-1]])
    indices = [column_index(structure, axis, of_blocks=of_blocks) for axis in columns]
    return " + ".join(map(times, indices, [strides[axis] for axis in columns]))


def _have_one_stride(
    structure: Structure, columns: list[int], strides: Mapping[int, int], every: Label
) -> bool:
    """Whether these are ``every`` axis, with one stride from each column to the next."""
    if tuple(columns) != every:
        return False
    for outer, inner in itertools.pairwise(columns):
        if strides[outer] != strides[inner] * structure.sizes[inner]:
            return False
    return True


def column_index(structure: Structure, axis: int, *, of_blocks: bool = False) -> str:
    """Return the index along one of the axes that make up a row, or the blocks of a row."""
    columns, name = structure.columns, "cols"
    if of_blocks:
        columns, name = structure.outer, "blocks"
    inner = structure.size(columns[columns.index(axis) + 1 :])
    text = name if inner == 1 else f"({name} // {inner})"
    if axis == columns[0]:
        return text
    return f"({text} % {structure.sizes[axis]})"


def unreduced(structure: Structure, operand: Operand, acc: torch.dtype) -> Operand:
    """Return the operand of an input's gradient before it is summed over rows, in ``acc``.

    It has all rows, and all columns if the input has any.
    """
    unrolled = within(structure.unrolled, operand.axes)
    columns = structure.columns if structure.has_columns(operand) else ()
    axes = (*structure.rows, *unrolled, *columns)
    return Operand(tuple([(axis,) for axis in axes]), acc, "float", operand.name)


def _row_axes(structure: Structure, operand: Operand) -> tuple[int, ...]:
    return tuple(within(operand.axes, structure.rows))


def times(index: str, stride: int | str) -> str:
    """Return an index times a stride, as an expression."""
    if stride == 1:
        return index
    return f"{index} * {stride}"
