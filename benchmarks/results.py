"""The results file: one row for an (operator, shape, dtype, mode, provider), the newest replacing the older."""

from __future__ import annotations

import csv
import math
import os
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
    """A file that holds no results."""


@dataclass(frozen=True)
class Row:
    """One measurement: an operator on a shape by a provider, its times and memory, and the versions."""

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
        """The part of the roofline that was reached."""
        return self.floor_us / self.gpu_us


def sides(shape: str) -> tuple[int, ...]:
    """The numbers in a shape's name.

    A letter before one (``4096xR4096``) tells shapes of equal numbers apart.
    """
    return tuple(int(side.lstrip(ascii_uppercase)) for side in shape.split("x"))


def elements(shape: str) -> int:
    """How many elements a shape of that name has."""
    return math.prod(sides(shape))


COLUMNS = tuple(field.name for field in fields(Row))
_NUMBERS = ("gpu_us", "loop_us", "floor_us", "peak_mib")


def load(path: Path) -> list[Row]:
    """The rows of a results file that must be there.

    Raises:
        UnreadableError: there is none, or it holds something else.
    """
    if not path.is_file():
        raise UnreadableError(f"no such file: {path}")
    return read(path)


def read(path: Path) -> list[Row]:
    """The rows of a results file; none where there is no file.

    Raises:
        UnreadableError: it holds something else.
    """
    return [_row(record) for record in read_records(path, COLUMNS)]


def read_records(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The lines of a file with these columns and no others; none where there is no file.

    Raises:
        UnreadableError: it holds something else.
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
    """Both, in a stable order, where a new row replaces the old one of the same key."""
    rows = {row.key: row for row in old} | {row.key: row for row in new}
    return sorted(rows.values(), key=_order)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Merges the rows into the file."""
    records = [asdict(row) for row in merge(read(path), rows)]
    write_records(
        path, COLUMNS, [r | {name: f"{r[name]:.3f}" for name in _NUMBERS} for r in records]
    )


def write_records(path: Path, columns: Sequence[str], records: Iterable[Mapping[str, Any]]) -> None:
    """Replaces the file as a whole, so that a cut run leaves no torn one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".new")
    with scratch.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    scratch.replace(path)


_FLUSH_S = 5.0  # between two writings


class Book:
    """Rows on their way to a file that many cases share.

    Written every few seconds, as each writing merges all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[Row] = []
        self._written = time.monotonic()

    def add(self, rows: Iterable[Row]) -> None:
        """Takes a case's rows."""
        self._rows += rows
        if time.monotonic() - self._written >= _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Writes what is not written yet."""
        if self._rows:
            write(self.path, self._rows)
        self._rows, self._written = [], time.monotonic()

    def __enter__(self) -> Book:
        return self

    def __exit__(self, *error: object) -> None:
        self.flush()


def commit() -> str:
    """The short hash of the measured code.

    ``+dirty`` where the tree differs from it, results aside.

    ``FUSEDOPS_COMMIT`` overrides it: a tree that was copied to the machine with the GPU has no
    history there.
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
    """A file name for a device: ``NVIDIA H200`` becomes ``nvidia_h200``."""
    return "_".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def _row(record: dict[str, str]) -> Row:
    values: dict[str, Any] = {
        name: float(text) if name in _NUMBERS else text for name, text in record.items()
    }
    return Row(**values)


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=_ROOT, check=True, capture_output=True, text=True)
    return run.stdout.strip()


def _order(row: Row) -> tuple[str, str, tuple[int, ...], str, str]:
    return (row.op, row.dtype, sides(row.shape)[::-1], row.mode, row.provider)
