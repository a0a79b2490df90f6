"""The results file: one row for each operator, shape, dtype, mode and provider, the newest one."""

from __future__ import annotations

import csv
import math
import os
import re
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from string import ascii_uppercase
from typing import Any

__all__ = [
    "COLUMNS",
    "Book",
    "Key",
    "Row",
    "UnreadableError",
    "commit",
    "device_slug",
    "elements",
    "load",
    "merge",
    "read",
    "read_records",
    "sides",
    "write",
    "write_records",
]

Key = tuple[str, str, str, str, str]
_ROOT = Path(__file__).resolve().parent.parent


class UnreadableError(Exception):
    """A file that is not a results file."""


@dataclass(frozen=True)
class Row:
    """One measurement of an operator by a provider: times, memory, and versions."""

    op: str
    shape: str
    dtype: str
    mode: str
    provider: str
    gpu_us: float
    loop_us: float
    floor_us: float
    peak_mib: float
    commit: str
    torch: str
    triton: str

    @property
    def key(self) -> Key:
        """The key of a row: a newer row replaces the older one with the same key."""
        return (self.op, self.shape, self.dtype, self.mode, self.provider)

    @property
    def fraction(self) -> float:
        """The fraction of the roofline."""
        return self.floor_us / self.gpu_us


def sides(shape: str) -> tuple[int, ...]:
    """Returns the numbers in a shape's name.

    A letter before a number, as in ``4096xR4096``, stands for slices of unequal widths.
    """
    return tuple(int(side.lstrip(ascii_uppercase)) for side in shape.split("x"))


def elements(shape: str) -> int:
    """Returns the number of elements of the shape with this name."""
    return math.prod(sides(shape))


COLUMNS = tuple(field.name for field in fields(Row))
_NUMBERS = ("gpu_us", "loop_us", "floor_us", "peak_mib")


def load(path: Path) -> list[Row]:
    """Returns the rows of a results file.

    Raises:
        UnreadableError: there is no file, or it has other columns.
    """
    if not path.is_file():
        raise UnreadableError(f"no such file: {path}")
    return read(path)


def read(path: Path) -> list[Row]:
    """Returns the rows of a results file; none if there is no file.

    Raises:
        UnreadableError: it has other columns.
    """
    return [_row(record) for record in read_records(path, COLUMNS)]


def read_records(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Returns the lines of a file with exactly these columns; none if there is no file.

    Raises:
        UnreadableError: it has other columns.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if list(reader.fieldnames or ()) != list(columns):
            raise UnreadableError(
                f"{path} has the columns {reader.fieldnames}, expected {list(columns)}"
            )
        return list(reader)


def merge(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Returns both in a stable order; a new row replaces the old one with the same key."""
    rows = {row.key: row for row in old} | {row.key: row for row in new}
    return sorted(rows.values(), key=_order)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Merges the rows into the file."""
    records = []
    for row in merge(read(path), rows):
        record = asdict(row)
        record |= {name: f"{record[name]:.3f}" for name in _NUMBERS}
        records.append(record)
    write_records(path, COLUMNS, records)


def write_records(path: Path, columns: Sequence[str], records: Iterable[Mapping[str, Any]]) -> None:
    """Replaces the file atomically, so that an interrupted run leaves no incomplete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".new")
    with scratch.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    scratch.replace(path)


_FLUSH_SECONDS = 5.0  # between two writes of a `Book`


class Book:
    """Collects the rows of many cases, and writes them into a file every few seconds.

    They are not written one by one, because each write merges and writes the whole file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[Row] = []
        self._written = time.monotonic()

    def add(self, rows: Iterable[Row]) -> None:
        """Adds a case's rows."""
        self._rows += rows
        if time.monotonic() - self._written >= _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes the rows that were not written yet."""
        if self._rows:
            write(self.path, self._rows)
        self._rows, self._written = [], time.monotonic()

    def __enter__(self) -> Book:
        return self

    def __exit__(self, *error: object) -> None:
        self.flush()


def commit() -> str:
    """Returns the short hash of the code, with ``+dirty`` after changes of more than results.

    ``FUSEDOPS_COMMIT`` overrides it, for a copy of the tree without its history.
    """
    if "FUSEDOPS_COMMIT" in os.environ:
        return os.environ["FUSEDOPS_COMMIT"]
    try:
        head = _git("rev-parse", "--short", "HEAD")
        dirty = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+dirty" if dirty else "")


def device_slug(name: str) -> str:
    """Returns a device's name for file names: ``NVIDIA H200`` becomes ``nvidia_h200``."""
    return re.sub(r"[\W_]+", "_", name.lower()).strip("_")


def _row(record: dict[str, str]) -> Row:
    values: dict[str, Any] = {
        name: float(text) if name in _NUMBERS else text for name, text in record.items()
    }
    return Row(**values)


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=_ROOT, check=True, capture_output=True, text=True)
    return run.stdout.strip()


def _order(row: Row) -> tuple[str, str, tuple[int, ...], str, str]:
    """Returns a row's sort key; shapes are sorted by their last dimension first."""
    return (row.op, row.dtype, sides(row.shape)[::-1], row.mode, row.provider)
