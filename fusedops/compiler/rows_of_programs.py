"""Lines about the rows and columns of a program, which all kinds of kernels have."""

from __future__ import annotations

__all__ = ["GROUP_LINES", "MASK", "column_lines", "of_rows", "partial_row_line", "program_lines"]

GROUP_LINES = (
    # The last programs may have no group: see `core.launches.launch`.
    "group = (tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)).to(tl.int64)",
    # ``group < groups`` compares two numbers. Combined with the block ``in_cols`` it is a block of
    # integers in Triton's interpreter, and no mask. So ``group`` becomes a block of one element.
    "in_groups = tl.full((1, 1), group, tl.int64) < groups",
)
MASK = "mask = in_rows & in_cols"


def column_lines(
    inside: str = "{} < {}", *, masked: bool = True, grouped: bool, pairs: bool, block: int
) -> list[str]:
    """Return the lines that compute the columns of a tile, which begins at ``start``.

    Args:
        inside: the condition that columns exist, with ``{}`` for their variable and for their
            number in a row.
        masked: whether the tile may reach beyond the last column.
        grouped: whether axis 1 of the grid is groups of rows.
        pairs: whether there are tiles with the columns of two parts: see `layouts.pair_axis`.
        block: the columns of a block, if there are numbers of blocks in memory; else 0.
    """
    ranges = [("cols", "start", "N", "BLOCK_N")]
    if pairs:
        ranges.append(("pairs", "2 * start", "2 * N", "2 * BLOCK_N"))
    if block:
        ranges.append(("blocks", f"start // {block}", f"N // {block}", f"BLOCK_N // {block}"))
    lines = []
    for name, start, count, length in ranges:
        lines.append(f"{name} = {start} + tl.arange(0, {length})[None, :]")
        if not masked:
            continue
        condition = inside.format(name, count)
        if grouped:
            condition = f"({condition}) & in_groups"
        lines.append(f"in_{name} = {condition}")
    return lines


def program_lines(*, shares: bool) -> list[str]:
    """Return the lines that compute a program's index among those along the rows, and their number.

    Programs with different columns of the same rows are neighbours, so that they read memory that
    is adjacent at the same time::

        axis 0 of the grid    0        1        2        3        4        5       COLUMNS = 3
        rows, columns         (0, 0)   (0, 1)   (0, 2)   (1, 0)   (1, 1)   (1, 2)

    Args:
        shares: whether the columns of a row may be divided among COLUMNS programs.
    """
    if not shares:
        return ["program = tl.program_id(0)", "programs = tl.num_programs(0)"]
    # If one program has all columns of a row, axis 1 has one program, so its index is zero. It is
    # read all the same: with a constant zero ptxas orders the loads of some kernels otherwise. On
    # an H200 in bf16 dropout-add-LN of 8192 columns then takes 157 us, forward and backward, in
    # place of 145.
    return [
        "column = tl.program_id(1)",
        "if COLUMNS > 1:",
        "    column = tl.program_id(0) % COLUMNS",
        "program = tl.program_id(0) // COLUMNS",
        "programs = tl.num_programs(0) // COLUMNS",
    ]


def partial_row_line(grouped: bool) -> str:
    """Return the line that computes the index of a program's partial sums: see `partials`."""
    group = " + group * programs" if grouped else ""
    return f"partial_row = program.to(tl.int64){group}"


def of_rows(function: str, value: str, *, grouped: bool, exchanges: bool = False) -> str:
    """Return a device function of the rows of a tile that exist, as an expression.

    A tile of one row needs no mask, because the row exists. It may not exist in a group beyond the
    last, and in a program that waits for others: see `phases`.

    Args:
        function: ``sum_of_rows`` or ``existing_rows``.
        value: the tile.
        grouped: whether axis 1 of the grid is groups of rows.
        exchanges: whether programs exchange sums of rows that they share.
    """
    every = "ROWS == 1"
    if exchanges:
        every += ' and EXCHANGE != "wait"'
    return f"{function}({value}, in_rows, {'False' if grouped else every})"
