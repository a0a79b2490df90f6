"""Lines about the rows and columns of a program, which all kinds of kernels have."""

from __future__ import annotations

__all__ = ["GROUP_LINES", "MASK", "column_lines", "program_line", "row_sum"]

GROUP_LINES = (
    # The last programs may have no group: see `core.launches.launch`.
    "group = (tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)).to(tl.int64)",
    # ``group < groups`` compares two numbers. Combined with the block ``in_cols`` it is a block of
    # integers in Triton's interpreter, and no mask. So ``group`` becomes a block of one element.
    "in_groups = tl.full((1, 1), group, tl.int64) < groups",
)
MASK = "mask = in_rows & in_cols"


def column_lines(
    inside: str = "{} < {}", *, masked: bool = True, grouped: bool, pairs: bool
) -> list[str]:
    """Return the lines that compute the columns of a tile, which begins at ``start``.

    Args:
        inside: the condition that columns exist, with ``{}`` for their variable and for their
            number in a row.
        masked: whether the tile may reach beyond the last column.
        grouped: whether axis 1 of the grid is groups of rows.
        pairs: whether there are tiles with the columns of two parts: see `layouts.pair_axis`.
    """
    blocks = [("cols", "start", "N", "BLOCK_N")]
    if pairs:
        blocks.append(("pairs", "2 * start", "2 * N", "2 * BLOCK_N"))
    lines = []
    for name, start, count, block in blocks:
        lines.append(f"{name} = {start} + tl.arange(0, {block})[None, :]")
        if not masked:
            continue
        condition = inside.format(name, count)
        if grouped:
            condition = f"({condition}) & in_groups"
        lines.append(f"in_{name} = {condition}")
    return lines


def program_line(grouped: bool) -> list[str]:
    """Return the line that computes a program's index, which its partial sums have as well."""
    program = "program = tl.program_id(0).to(tl.int64)"
    if grouped:
        program += " + group * tl.num_programs(0)"
    return [program]


def row_sum(value: str, *, grouped: bool, exchanges: bool = False) -> str:
    """Return the sum of a tile over its rows, as an expression.

    A tile of one row needs no mask, because the row exists. It may not exist in a group beyond the
    last, and in a program that waits for others: see `phases`.
    """
    every = "ROWS == 1"
    if exchanges:
        every += ' and EXCHANGE != "wait"'
    return f"sum_of_rows({value}, in_rows, {'False' if grouped else every})"
