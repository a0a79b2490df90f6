"""How long a contender takes to compile.

Its first step in a new process, cold, and in another with the caches of the first.

Each contender has caches of its own, empty at first: Inductor's, Triton's, and that of fusedops.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from .. import results
from . import measuring
from .providers import contender
from .text import Text
from .workloads import Workload

__all__ = ["COLUMNS", "DEFAULT", "Row", "measured", "read", "table", "write"]

DEFAULT = ("compile", "backend")
_LATER = 3  # steps that are taken from the first


@dataclass(frozen=True)
class Row:
    """One provider on one workload.

    Attributes:
        cold_s: seconds of the first step beyond a later one's; forward and backward are compiled in
            it.
        warm_s: the same in a second process.
    """

    model: str
    mode: str
    shape: str
    provider: str
    cold_s: float
    warm_s: float
    commit: str
    torch: str


COLUMNS = tuple(field.name for field in fields(Row))
_KEY = ("model", "mode", "shape", "provider")


def measured(workload: Workload, provider: str, device: torch.device) -> Row:
    """Both processes' seconds, one process after the other."""
    with tempfile.TemporaryDirectory(prefix="fusedops-benchmark-") as folder, _caches(Path(folder)):
        cold, warm = (_in_a_new_process(workload, provider, device) for _ in range(2))
    return Row(
        workload.name,
        workload.mode,
        workload.shape,
        provider,
        cold,
        warm,
        results.commit(),
        torch.__version__,
    )


@contextmanager
def _caches(folder: Path) -> Iterator[None]:
    """New processes in the block have their caches in the folder."""
    places = {
        name: str(folder / name.lower())
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSEDOPS_CACHE_DIR")
    }
    with mock.patch.dict(os.environ, places):
        yield


def _in_a_new_process(workload: Workload, provider: str, device: torch.device) -> float:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_first_step, workload, provider, device).result()


def _first_step(workload: Workload, provider: str, device: torch.device) -> float:
    """Not timed are the first use of a device and the import of Inductor.

    Some providers import it before their first step.
    """
    import_module("torch._inductor.compile_fx")
    text = Text(device)
    contender("eager", workload, device, text.reseeded(0)).step()
    built = contender(provider, workload, device, text.reseeded(0))
    with built.in_force():
        first, *later = [measuring.seconds(built.step, device)[1] for _ in range(1 + _LATER)]
    return first - statistics.median(later)


def table(rows: Sequence[Row]) -> str:
    """One line each, with the ratios to torch.compile's own."""
    theirs = {_place(row): row for row in rows if row.provider == "compile"}
    lines = [["model", "mode", "shape", "provider", "cold, s", "", "second process, s", ""]]
    for row in rows:
        base = None if row.provider == "compile" else theirs.get(_place(row))
        ratios = (
            ("", "")
            if base is None
            else (f"{row.cold_s / base.cold_s:.2f}x", f"{row.warm_s / base.warm_s:.2f}x")
        )
        lines.append(
            [
                *_place(row),
                row.provider,
                f"{row.cold_s:.1f}",
                ratios[0],
                f"{row.warm_s:.1f}",
                ratios[1],
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def write(path: Path, rows: Sequence[Row]) -> None:
    """Merges the rows into a file, where a new one replaces the older."""
    records: dict[Any, Any] = {
        _key(record): record for record in results.read_records(path, COLUMNS)
    }
    for row in rows:
        record = asdict(row) | {"cold_s": f"{row.cold_s:.2f}", "warm_s": f"{row.warm_s:.2f}"}
        records[_key(record)] = record
    results.write_records(path, COLUMNS, [records[key] for key in sorted(records)])


def read(path: Path) -> list[Row]:
    """A file's rows; none of a file that is not there."""
    kinds: dict[str, Callable[[str], Any]] = {"cold_s": float, "warm_s": float}
    records: list[dict[str, Any]] = [dict(record) for record in results.read_records(path, COLUMNS)]
    return [
        Row(**{name: kinds.get(name, str)(value) for name, value in record.items()})
        for record in records
    ]


def _place(row: Row) -> tuple[str, str, str]:
    return (row.model, row.mode, row.shape)


def _key(record: dict[str, Any]) -> tuple[str, ...]:
    return tuple([record[name] for name in _KEY])
