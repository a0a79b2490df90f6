"""Measures how long a provider takes to compile a model.

It times the first step in a new process with empty caches, and in a second process with the caches
of the first. The caches are Inductor's, Triton's and fusedops'; each provider has its own. Of the
first step it also times what the backend ``fusedops`` adds to the compilers: its capture, regions
and passes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fusedops.backend import entry, joint

from .. import fresh, results
from . import measuring
from .providers import contender
from .text import Text
from .workloads import Workload

__all__ = ["COLUMNS", "DEFAULT", "Row", "measured", "read", "table", "write"]

DEFAULT = ("compile", "backend")
_LATER_STEPS = 3  # their median is subtracted from the first step's time
# The functions of the backend that run while torch.compile compiles.
_OWN = ((entry, "_stored"), (joint, "prepare"), (joint, "recompute"))


@dataclass(frozen=True)
class Row:
    """The measurement of a provider on a workload.

    Attributes:
        cold_s: the seconds of the first step, less those of a later step. The first step compiles
            forward and backward.
        warm_s: the same in a second process, with the caches of the first.
        own_s: the seconds of ``cold_s`` that the backend takes, besides the compilers.
    """

    model: str
    mode: str
    shape: str
    provider: str
    cold_s: float
    warm_s: float
    own_s: float
    commit: str
    torch: str


COLUMNS = tuple(field.name for field in fields(Row))
_KEY = ("model", "mode", "shape", "provider")
_SECONDS = ("cold_s", "warm_s", "own_s")


def measured(workload: Workload, provider: str, device: torch.device) -> Row:
    """Returns the row of a provider; runs its first step in two processes, one after the other."""
    with (
        tempfile.TemporaryDirectory(prefix="fusedops-benchmark-") as folder,
        fresh.caches(Path(folder)),
    ):
        cold, own = _in_a_new_process(workload, provider, device)
        warm, _ = _in_a_new_process(workload, provider, device)
    return Row(
        model=workload.name,
        mode=workload.mode,
        shape=workload.shape,
        provider=provider,
        cold_s=cold,
        warm_s=warm,
        own_s=own,
        commit=results.commit(),
        torch=torch.__version__,
    )


def _in_a_new_process(
    workload: Workload, provider: str, device: torch.device
) -> tuple[float, float]:
    return fresh.in_a_new_process(_first_step, workload, provider, device)


def _first_step(workload: Workload, provider: str, device: torch.device) -> tuple[float, float]:
    """Returns the seconds of the first step, less those of a later step, and the backend's own.

    The first use of a device and the import of Inductor are not timed, because some providers
    import Inductor before their first step.
    """
    import_module("torch._inductor.compile_fx")
    text = Text(device)
    contender("eager", workload, device, text.reseeded(0)).step()
    built = contender(provider, workload, device, text.reseeded(0))
    own: list[float] = []
    with built.context(), _noting(own):
        first, *later = [measuring.seconds(built.step, device)[1] for _ in range(1 + _LATER_STEPS)]
    return first - statistics.median(later), sum(own)


@contextmanager
def _noting(seconds: list[float]) -> Iterator[None]:
    """Context manager: appends the seconds of each call of the backend's own functions."""

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                seconds.append(time.perf_counter() - started)

        return call

    with ExitStack() as stack:
        for module, name in _OWN:
            stack.enter_context(mock.patch.object(module, name, timed(getattr(module, name))))
        yield


def table(rows: Sequence[Row]) -> str:
    """Returns a table with a line per row, and the ratios to the seconds of torch.compile.

    Those of a first step also have the part that is the backend's own.
    """
    of_compile = {_workload(row): row for row in rows if row.provider == "compile"}
    lines = [["model", "mode", "shape", "provider", "cold, s", "", "own", "second process, s", ""]]
    for row in rows:
        base = None if row.provider == "compile" else of_compile.get(_workload(row))
        cold_ratio = own_ratio = warm_ratio = ""
        if base is not None:
            cold_ratio = f"{row.cold_s / base.cold_s:.2f}x"
            own_ratio = f"{row.own_s / base.cold_s:.1%}"
            warm_ratio = f"{row.warm_s / base.warm_s:.2f}x"
        cold, warm = f"{row.cold_s:.1f}", f"{row.warm_s:.1f}"
        lines.append([*_workload(row), row.provider, cold, cold_ratio, own_ratio, warm, warm_ratio])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def write(path: Path, rows: Sequence[Row]) -> None:
    """Merges the rows into a file; a new row replaces the older one."""
    records: dict[Any, Any] = {
        _key(record): record for record in results.read_records(path, COLUMNS)
    }
    for row in rows:
        record = asdict(row) | {name: f"{getattr(row, name):.2f}" for name in _SECONDS}
        records[_key(record)] = record
    results.write_records(path, COLUMNS, [records[key] for key in sorted(records)])


def read(path: Path) -> list[Row]:
    """Returns the rows of a file; none if there is no file."""
    kinds: dict[str, Callable[[str], Any]] = dict.fromkeys(_SECONDS, float)
    records: list[dict[str, Any]] = [dict(record) for record in results.read_records(path, COLUMNS)]
    return [
        Row(**{name: kinds.get(name, str)(value) for name, value in record.items()})
        for record in records
    ]


def _workload(row: Row) -> tuple[str, str, str]:
    return (row.model, row.mode, row.shape)


def _key(record: dict[str, Any]) -> tuple[str, ...]:
    return tuple([record[name] for name in _KEY])
