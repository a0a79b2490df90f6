"""Layouts of operands: their rows as those of the call, and the offsets of their columns."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Literal

import torch

from .structure import Operand, Structure, within, without

__all__ = [
    "BY_ROW",
    "RowLayout",
    "column_index",
    "group_of",
    "offsets_along",
    "row_layout",
    "strides_of",
    "times",
    "unreduced",
]

# How an operand's rows correspond to those of the call: it has all of them, none, one for each
# group of rows, or some in some order.
RowLayout = Literal["rows", "vector", "group", "indexed"]
# The layouts in which tiles of rows have different elements.
BY_ROW = ("rows", "indexed")


# For a call with rows (batch, sequence) and 64 columns, of which the axes are r0, r1 and c:
#
#   (batch, sequence, 64)   rows      read at the row, which is r0 * sequence + r1
#   (64,)                   vector    all rows share it
#   (batch, 64)             group     all rows of one r0 share it, where there are many of them
#   (sequence, 64)          indexed   read at r1, computed from the row
#   (sequence, batch, 64)   indexed   read at r1, r0


def row_layout(structure: Structure, operand: Operand, grouped: bool) -> RowLayout:
    """Return how the rows of an operand correspond to those of the call."""
    rows = _row_axes(structure, operand)
    static = tuple(without(operand.axes, structure.rows))
    rows_first = operand.axes[len(rows) :] == static
    # A function without row axes has one row.
    if rows_first and rows == structure.rows:
        return "rows"
    if not rows:
        return "vector"
    is_of_group = grouped and rows == group_of(structure)
    return "group" if rows_first and is_of_group else "indexed"


def group_of(structure: Structure) -> tuple[int, ...]:
    """Return the row axes of the groups of rows that share a vector; () if there are none.

    With several kinds of groups, returns the kind with the most groups. The vectors of the others
    are read by index.
    """
    group: tuple[int, ...] = ()
    for operand in structure.inputs:
        rows = _row_axes(structure, operand)
        if operand.kind != "float" or rows == structure.rows:
            continue
        is_leading = rows == structure.rows[: len(rows)]
        if is_leading:
            group = max(group, rows, key=len)
    return group


def strides_of(structure: Structure, operand: Operand) -> tuple[dict[int, int], int]:
    """Return the strides of an operand's axes within a row, and the number of elements of a row."""
    static = without(operand.axes, structure.rows)
    strides: dict[int, int] = {}
    size = 1
    for axis in reversed(static):
        strides[axis] = size
        size *= structure.sizes[axis]
    return strides, size


def offsets_along(structure: Structure, strides: Mapping[int, int]) -> str:
    """Return the offsets of a tile's columns in an operand's row; "" if it has no columns.

    The operand may have the column axes in another order than the call, or only some of them.
    """
    columns = within(structure.columns, strides)
    if not columns:
        return ""
    is_complete = tuple(columns) == structure.columns
    if is_complete and _are_adjacent(structure, columns, strides):
        return times("cols", strides[columns[-1]])
    indices = [column_index(structure, axis) for axis in columns]
    return " + ".join(map(times, indices, [strides[axis] for axis in columns]))


def _are_adjacent(structure: Structure, columns: list[int], strides: Mapping[int, int]) -> bool:
    """Whether the columns follow one another in memory, at one distance."""
    for outer, inner in itertools.pairwise(columns):
        if strides[outer] != strides[inner] * structure.sizes[inner]:
            return False
    return True


def column_index(structure: Structure, axis: int) -> str:
    """Return the index along one of the axes that make up a row."""
    columns = structure.columns
    inner = structure.size(columns[columns.index(axis) + 1 :])
    text = "cols" if inner == 1 else f"(cols // {inner})"
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
