"""The columns in which tables and charts show results: fusedops, and each kind of peer.

A column has the same colour everywhere.
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
    "CaseKey",
    "all_values",
    "best",
    "by_case",
    "launch_bound",
    "sized",
]

# Operator, shape, dtype and mode. A row's `key` has the provider too.
CaseKey = tuple[str, str, str, str]

# The providers of each column, which shows the best of them.
COLUMNS = {
    "fusedops": ("fusedops",),
    "eager": ("eager", "eager_combined"),
    "torch.compile": ("compile", "compile_max_autotune"),
    "Liger-Kernel": ("liger",),
}
# From the palette of Okabe and Ito: colour-blind readers can distinguish its colours.
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
    """Returns whether the tensors are so small that the host's time determines a call's time."""
    return elements(row.shape) <= 1 << 16


def sized(shape: str) -> str:
    """Returns a shape for display, with multiplication signs and non-breaking spaces."""
    return re.sub(r"([x+])", "\u00a0\\1\u00a0", shape).replace("x", "\u00d7")


def by_case(rows: Iterable[Row]) -> dict[CaseKey, dict[str, Row]]:
    """Returns the rows of each operator, shape, dtype and mode by provider, in the rows' order."""
    cases: dict[CaseKey, dict[str, Row]] = {}
    for row in rows:
        key = (row.op, row.shape, row.dtype, row.mode)
        cases.setdefault(key, {})[row.provider] = row
    return cases


def best(by_provider: dict[str, Row], column: str, by: str = "gpu_us") -> Row | None:
    """Returns the row of the column's best provider; None if there is no row.

    The best provider has the least value of the field ``by``.
    """
    rows = [by_provider[name] for name in COLUMNS[column] if name in by_provider]
    return min(rows, key=operator.attrgetter(by), default=None)


def all_values(rows: Iterable[object], field: str) -> str:
    """Returns all values of a field as text, in order of appearance."""
    return ", ".join(dict.fromkeys(str(getattr(row, field)) for row in rows))
