"""The results file of whole models.

One row for a (model, mode, shape, provider), the newest replacing the older.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .. import results

__all__ = ["COLUMNS", "Key", "Place", "Row", "by_place", "merge", "read", "write"]

Place = tuple[str, str, str]  # model, mode, shape
Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Row:
    """One provider on one workload. A number is None where it was not taken."""

    model: str
    mode: str  # train, infer, generate; loss for a short training, which is not timed
    provider: str
    ms: float | None  # a step, with steps back to back
    peak_mib: float | None  # of one step, weights and gradients included
    loss: float | None  # at the end of the short training, mean over seeds
    commit: str
    torch: str
    triton: str
    shape: str
    spread: float | None = None  # of ms: the interquartile range
    host_ms: float | None = None  # until the step's Python returns
    loss_spread: float | None = None  # greatest less least over the seeds
    transformers: str = ""
    gpu_ms: float | None = None  # a step, of its kernels alone, by the profiler

    @property
    def place(self) -> Place:
        """The workload."""
        return (self.model, self.mode, self.shape)

    @property
    def key(self) -> Key:
        """The key by which a newer row replaces an older one."""
        return (*self.place, self.provider)


COLUMNS = tuple(field.name for field in fields(Row))
_NUMBERS = ("ms", "peak_mib", "loss", "spread", "host_ms", "loss_spread", "gpu_ms")


def read(path: Path) -> list[Row]:
    """The rows of a file; none where there is no file."""
    return [_row(record) for record in results.read_records(path, COLUMNS)]


def merge(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Both, sorted, where a new row replaces the old one of the same key."""
    rows = {row.key: row for row in old} | {row.key: row for row in new}
    return sorted(rows.values(), key=lambda row: row.key)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Merges the rows into the file."""
    results.write_records(path, COLUMNS, map(_record, merge(read(path), rows)))


def by_place(rows: Iterable[Row]) -> dict[Place, dict[str, Row]]:
    """The rows of each workload by provider."""
    places: dict[Place, dict[str, Row]] = {}
    for row in rows:
        places.setdefault(row.place, {})[row.provider] = row
    return places


def _record(row: Row) -> dict[str, Any]:
    record = asdict(row)
    return record | {
        name: "" if record[name] is None else f"{record[name]:.4f}" for name in _NUMBERS
    }


def _row(record: dict[str, str]) -> Row:
    numbers = {name: float(record[name]) if record[name] else None for name in _NUMBERS}
    values: dict[str, Any] = {**record, **numbers}
    return Row(**values)
