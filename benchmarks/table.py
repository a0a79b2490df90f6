"""Markdown tables of results, for the operators' pages.

They have times and fractions of the floor, with one line per shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from .columns import COLUMNS, all_values, best, launch_bound, sized
from .results import Row

__all__ = ["fill", "markdown"]

_MODES = {"fwd": "Forward", "fwd_bwd": "Forward + backward"}
_FIGURES = re.compile(
    r"(?P<open><!-- figures: (?P<what>.+?) -->)(?P<gap>\n*).*?\n*(?P<close><!-- /figures -->)",
    re.DOTALL,
)


def markdown(rows: Iterable[Row], device: str, mode: str = "fwd_bwd") -> str:
    """Returns tables of the GPU time of large shapes and of the host time of launch-bound ones."""
    shown = [row for row in rows if row.mode == mode]
    if not shown:
        raise ValueError(f"no row of mode {mode}")
    large = [row for row in shown if not launch_bound(row)]
    small = [row for row in shown if launch_bound(row)]
    parts = []
    if large:
        parts += [
            f"{_MODES[mode]}: GPU time in µs, and in brackets the fraction of the floor.",
            _table(large, ("floor", *COLUMNS), _gpu_cells),
        ]
    if small:
        parts += [
            f"{_MODES[mode]} of small, launch-bound tensors: µs per call in a plain Python loop.",
            _table(small, tuple(COLUMNS), _loop_cells),
        ]
    versions = f"torch {all_values(shown, 'torch')}, Triton {all_values(shown, 'triton')}, commit {all_values(shown, 'commit')}"
    parts.append(
        f"{device}, {versions}. The column torch.compile is the faster of its default mode and, where that was "
        "measured, max-autotune without CUDA graphs."
    )
    return "\n\n".join(parts)


def fill(text: str, content: Callable[[str], str]) -> str:
    """Returns a page with its figures replaced.

    Between ``<!-- figures: WHAT -->`` and the next ``<!-- /figures -->`` it has ``content(WHAT)``,
    within the line if the first marker does not end a line.
    """

    def filled(match: re.Match[str]) -> str:
        gap = "\n\n" if match["gap"] else ""
        return f"{match['open']}{gap}{content(match['what'])}{gap}{match['close']}"

    return _FIGURES.sub(filled, text)


def _table(
    rows: list[Row], columns: tuple[str, ...], cells: Callable[[dict[str, Row]], list[str]]
) -> str:
    """Returns a table with a line per operator, shape and dtype; ``cells`` returns its columns."""
    groups: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.shape, row.dtype), {})[row.provider] = row
    lines = [
        "| operator | rows × N | dtype | " + " | ".join(columns) + " |",  # noqa: RUF001
        "|---|---|---|" + "--:|" * len(columns),
    ]
    previous = ""
    for (op, shape, dtype), by_provider in groups.items():
        # The operator's name is only in its first line.
        name = "" if op == previous else f"`{op}`"
        line = [name, sized(shape), dtype, *cells(by_provider)]
        lines.append(f"| {' | '.join(line)} |")
        previous = op
    return "\n".join(lines)


def _gpu_cells(by_provider: dict[str, Row]) -> list[str]:
    """Returns the floor, and each column's GPU time and fraction of the floor."""
    first = next(iter(by_provider.values()))  # all have the same floor
    cells = [f"{first.floor_us:.1f}"]
    for column in COLUMNS:
        row = best(by_provider, column)
        cells.append("" if row is None else f"{row.gpu_us:.1f} ({row.fraction:.2f})")
    return cells


def _loop_cells(by_provider: dict[str, Row]) -> list[str]:
    """Returns each column's host time."""
    rows = (best(by_provider, column, by="loop_us") for column in COLUMNS)
    return ["" if row is None else f"{row.loop_us:.1f}" for row in rows]
