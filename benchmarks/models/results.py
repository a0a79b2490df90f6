"""The results file of whole models.

It has one row for each model, mode, shape and provider, the newest one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .. import results

__all__ = ["COLUMNS", "Key", "Row", "WorkloadKey", "by_workload", "merge", "read", "write"]

WorkloadKey = tuple[str, str, str]  # model, mode, shape
Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Row:
    """The measurements of a provider on a workload. A number is None if it was not measured."""

    model: str
    mode: str  # one of `workloads.MODES`, or "loss" for a short training, which is not timed
    provider: str
    ms: float | None  # per step, with steps back to back
    peak_mib: float | None  # of a step, with weights and gradients
    loss: float | None  # at the end of the short training, the mean over seeds
    commit: str
    torch: str
    triton: str
    shape: str
    spread: float | None = None  # the interquartile range of ``ms``
    host_ms: float | None = None  # until the Python call of a step returns
    loss_spread: float | None = None  # the range of ``loss`` over seeds
    transformers: str = ""
    gpu_ms: float | None = None  # the sum of the times of a step's kernels, by the profiler

    @property
    def workload(self) -> WorkloadKey:
        """The model, mode and shape."""
        return (self.model, self.mode, self.shape)

    @property
    def key(self) -> Key:
        """The key of a row: a newer row replaces the older one with the same key."""
        return (*self.workload, self.provider)


COLUMNS = tuple(field.name for field in fields(Row))
_NUMBERS = ("ms", "peak_mib", "loss", "spread", "host_ms", "loss_spread", "gpu_ms")


def read(path: Path) -> list[Row]:
    """Returns the rows of a file; none if there is no file."""
    return [_row(record) for record in results.read_records(path, COLUMNS)]


def merge(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Returns both, sorted; a new row replaces the old one with the same key."""
    rows = {row.key: row for row in old} | {row.key: row for row in new}
    return sorted(rows.values(), key=lambda row: row.key)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Merges the rows into the file."""
    results.write_records(path, COLUMNS, map(_record, merge(read(path), rows)))


def by_workload(rows: Iterable[Row]) -> dict[WorkloadKey, dict[str, Row]]:
    """Returns the rows of each workload by provider."""
    workloads: dict[WorkloadKey, dict[str, Row]] = {}
    for row in rows:
        workloads.setdefault(row.workload, {})[row.provider] = row
    return workloads


def _record(row: Row) -> dict[str, Any]:
    record = asdict(row)
    return record | {
        name: "" if record[name] is None else f"{record[name]:.4f}" for name in _NUMBERS
    }


def _row(record: dict[str, str]) -> Row:
    numbers = {name: float(record[name]) if record[name] else None for name in _NUMBERS}
    values: dict[str, Any] = {**record, **numbers}
    return Row(**values)
