"""The results file of the zoo: one row for each model, mode, shape and provider, the newest one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..models import results

__all__ = ["Row", "read", "row_of", "write"]


@dataclass(frozen=True)
class Row(results.Row):
    """The measurements of a provider on a workload. A number is None if it was not measured.

    Attributes:
        first_s: the seconds of the first step. With caches on disk, it loads what is compiled.
        regions: the operators of fusedops in its graphs, each of them a region or a loss.
        breaks: the number of breaks of its graph.
        difference: the relative distance of gradients or outputs from those in fp32.
        allowed: the largest difference that is correct; see `gate`.
        failure: why there is no time; empty if there is one.
    """

    first_s: float | None = None
    regions: int | None = None
    breaks: int | None = None
    difference: float | None = None
    allowed: float | None = None
    failure: str = ""


def row_of(row: results.Row) -> Row:
    """Returns a row of whole models as a row of the zoo."""
    return Row(**asdict(row))


def read(path: Path) -> list[Row]:
    """Returns the rows of a file; none if there is no file."""
    return results.read_as(Row, path)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Merges the rows into the file, in which other processes may write too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        results.write_as(Row, path, rows)
    finally:
        os.close(folder)  # which unlocks it
