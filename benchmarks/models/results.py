"""The results file of whole models.

It has one row for each model, mode, shape and provider, the newest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from .. import results

__all__ = [
    "Key",
    "Row",
    "WorkloadKey",
    "by_workload",
    "merge",
    "read",
    "read_as",
    "write",
    "write_as",
]

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


_AnyRow = TypeVar("_AnyRow", bound=Row)


def columns(kind: type[Row]) -> tuple[str, ...]:
    """Returns the columns of a file of rows of this kind."""
    return tuple([field.name for field in fields(kind)])


def read(path: Path) -> list[Row]:
    """Returns the rows of a file; none if there is no file."""
    return read_as(Row, path)


def read_as(kind: type[_AnyRow], path: Path) -> list[_AnyRow]:
    """Returns the rows of a file whose rows are of this kind."""
    numbers = _numbers(kind)
    return [_row(record, kind, numbers) for record in results.read_records(path, columns(kind))]


def merge(old: Iterable[_AnyRow], new: Iterable[_AnyRow]) -> list[_AnyRow]:
    """Returns both, sorted; a new row replaces the old one with the same key."""
    rows = {row.key: row for row in old} | {row.key: row for row in new}
    return sorted(rows.values(), key=lambda row: row.key)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Merges the rows into the file."""
    write_as(Row, path, rows)


def write_as(kind: type[_AnyRow], path: Path, rows: Iterable[_AnyRow]) -> None:
    """Merges rows of this kind into their file."""
    records = map(_record, merge(read_as(kind, path), rows))
    results.write_records(path, columns(kind), records)


def by_workload(rows: Iterable[_AnyRow]) -> dict[WorkloadKey, dict[str, _AnyRow]]:
    """Returns the rows of each workload by provider."""
    workloads: dict[WorkloadKey, dict[str, _AnyRow]] = {}
    for row in rows:
        workloads.setdefault(row.workload, {})[row.provider] = row
    return workloads


def _numbers(kind: type[Row]) -> dict[str, Callable[[str], float | int]]:
    """Returns the columns that are numbers, or empty, with the type of each."""
    types: dict[Any, type[float | int]] = {"float | None": float, "int | None": int}
    return {field.name: types[field.type] for field in fields(kind) if field.type in types}


def _record(row: Row) -> dict[str, Any]:
    record = asdict(row)
    for name, value in record.items():
        if value is None:
            record[name] = ""
        elif isinstance(value, float):
            record[name] = f"{value:.4f}"
    return record


def _row(
    record: dict[str, str], kind: type[_AnyRow], numbers: dict[str, Callable[[str], float | int]]
) -> _AnyRow:
    values: dict[str, Any] = dict(record)
    for name, number in numbers.items():
        values[name] = number(record[name]) if record[name] else None
    return kind(**values)
