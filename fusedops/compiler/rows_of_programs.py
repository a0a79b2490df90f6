"""Lines about the rows of a program, which all kinds of kernels have."""

from __future__ import annotations

__all__ = ["GROUP_LINES", "IN_GROUPS", "program_line", "row_lines", "row_sum"]

GROUP_LINES = (
    # The last programs may have no group: see `core.launches.launch`.
    "group = (tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)).to(tl.int64)",
    # ``group < groups`` compares two numbers. Combined with the block ``in_cols`` it is a block of
    # integers in Triton's interpreter, and no mask. So ``group`` becomes a block of one element.
    "in_groups = tl.full((1, 1), group, tl.int64) < groups",
)
IN_GROUPS = "in_cols = in_cols & in_groups"


def row_lines(grouped: bool) -> list[str]:
    """Return the lines that compute the rows of a tile."""
    lines = ["places = rows_of(tile, ROWS)"]
    if grouped:
        lines.append("in_rows = (places < M)[:, None] & in_groups")
        lines.append("rows = (group * M + places)[:, None]")
    else:
        lines.append("in_rows = (places < M)[:, None]")
        lines.append("rows = places[:, None]")
    return lines


def program_line(grouped: bool) -> list[str]:
    """Return the line that computes the number of a program, of which all have partial sums."""
    program = "program = tl.program_id(0).to(tl.int64)"
    if grouped:
        program += " + group * tl.num_programs(0)"
    return [program]


def row_sum(value: str, *, grouped: bool, exchanges: bool = False) -> str:
    """Return the sum of a tile over its rows, as an expression.

    A tile of one row exists, unless it is of a group beyond the last, or of a program that waits.
    """
    every = "ROWS == 1"
    if exchanges:
        every += ' and EXCHANGE != "wait"'
    return f"sum_of_rows({value}, in_rows, {'False' if grouped else every})"
