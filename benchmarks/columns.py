"""The results as a reader compares them.

One column for fusedops and each kind of peer, the same colour everywhere.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable

from .results import Row, elements

__all__ = [
    "COLOURS",
    "COLUMNS",
    "MODE_NAMES",
    "PROVIDER_NAMES",
    "Place",
    "best",
    "by_place",
    "every",
    "launch_bound",
    "sized",
]

Place = tuple[str, str, str, str]  # op, shape, dtype, mode

# A column is the best of its providers.
COLUMNS = {
    "fusedops": ("fusedops",),
    "eager": ("eager", "eager_combined"),
    "torch.compile": ("compile", "compile_max_autotune"),
    "Liger-Kernel": ("liger",),
}
# Okabe and Ito's, which colour-blind readers can tell apart.
COLOURS = {
    "fusedops": "#D55E00",
    "eager": "#8C8C8C",
    "torch.compile": "#0072B2",
    "Liger-Kernel": "#009E73",
}
PROVIDER_NAMES = {
    "fusedops": "fusedops",
    "eager": "eager",
    "eager_combined": "eager, all slices at once",
    "compile": "torch.compile",
    "compile_max_autotune": "torch.compile, max-autotune",
    "liger": "Liger-Kernel",
    "transformers": "transformers",
}
MODE_NAMES = {"fwd": "forward", "fwd_bwd": "forward + backward"}


def launch_bound(row: Row) -> bool:
    """Whether the tensors are so small that the host's time is what counts."""
    return elements(row.shape) <= 1 << 16


def sized(shape: str) -> str:
    """A shape as a reader sees it, with spaces at which no line is broken."""
    return re.sub(r"([x+])", "\u00a0\\1\u00a0", shape).replace("x", "\u00d7")


def by_place(rows: Iterable[Row]) -> dict[Place, dict[str, Row]]:
    """The rows of each operator, shape, dtype and mode by provider, in the rows' order."""
    places: dict[Place, dict[str, Row]] = {}
    for row in rows:
        places.setdefault((row.op, row.shape, row.dtype, row.mode), {})[row.provider] = row
    return places


def best(seen: dict[str, Row], column: str, by: str = "gpu_us") -> Row | None:
    """The column's provider with the least of a figure, if it has any."""
    return min(
        (seen[p] for p in COLUMNS[column] if p in seen), key=operator.attrgetter(by), default=None
    )


def every(rows: Iterable[object], field: str) -> str:
    """All values of a field, in order of appearance."""
    return ", ".join(dict.fromkeys(str(getattr(row, field)) for row in rows))
