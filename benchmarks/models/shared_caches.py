"""Measures the first step of several ranks that share the caches of compilers.

Each rank is a process that sees one GPU. They run a first step three times:

    cold      each rank has empty caches of its own
    shared    all ranks have the caches that the first rank filled
    warm      the same again: what `shared` has added to the caches is there

The caches are Inductor's, Triton's and fusedops'.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from .. import fresh, results
from .text import Text
from .workloads import Workload

__all__ = ["COLUMNS", "Row", "line", "measured", "read", "write"]

_LATER_STEPS = 3  # their median is subtracted from the first step's time


@dataclass(frozen=True)
class Row:
    """The measurement of a provider in a layout.

    Attributes:
        ranks: the number of processes.
        cold_s: the seconds of the last rank's first step, less those of a later step, with empty
            caches.
        shared_s: the same, with the caches that the first rank filled.
        warm_s: the same once more.
    """

    model: str
    shape: str
    layout: str
    ranks: int
    provider: str
    cold_s: float
    shared_s: float
    warm_s: float
    commit: str
    torch: str


COLUMNS = tuple(field.name for field in fields(Row))
_KEY = ("model", "shape", "layout", "ranks", "provider")
_SECONDS = ("cold_s", "shared_s", "warm_s")


def measured(workload: Workload, layout: str, provider: str, ranks: int, *, gpu: bool) -> Row:
    """Returns the row of a provider; starts each rank three times."""
    with tempfile.TemporaryDirectory(prefix="fusedops-benchmark-") as name:
        own = [Path(name) / str(rank) for rank in range(ranks)]
        of_the_first = [own[0]] * ranks
        seconds = [
            _last_rank(workload, layout, provider, folders, gpu=gpu)
            for folders in (own, of_the_first, of_the_first)
        ]
    return Row(
        model=workload.name,
        shape=workload.shape,
        layout=layout,
        ranks=ranks,
        provider=provider,
        **dict(zip(_SECONDS, seconds, strict=True)),
        commit=results.commit(),
        torch=torch.__version__,
    )


def _last_rank(
    workload: Workload, layout: str, provider: str, folders: Sequence[Path], *, gpu: bool
) -> float:
    """Returns the seconds of the last rank's first step.

    Args:
        workload: the model and its batch.
        layout: how it is distributed.
        provider: who compiles its blocks.
        folders: the folder of each rank's caches.
        gpu: whether each rank has a GPU.
    """
    with ExitStack() as stack, tempfile.TemporaryDirectory() as store:
        workers = []
        for rank, folder in enumerate(folders):
            visible = {"CUDA_VISIBLE_DEVICES": str(rank) if gpu else ""}
            with fresh.caches(folder), mock.patch.dict(os.environ, visible):
                workers.append(stack.enter_context(fresh.Worker()))
                workers[-1].start()
        place, setting = f"file://{store}/store", (workload, layout, provider)
        arguments = [(place, rank, len(folders), setting) for rank in range(len(folders))]
        return fresh.together(workers, _first_step, arguments)[-1]


def _first_step(store: str, rank: int, ranks: int, setting: tuple[Workload, str, str]) -> float:
    """Returns the seconds of a rank's first step, less those of a later step.

    The first use of a device, of its collectives and of Inductor is not timed.
    """
    from . import distributed

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    dist.init_process_group(
        "nccl" if gpu else "gloo", init_method=store, rank=rank, world_size=ranks
    )
    try:
        workload, layout, provider = setting
        batch = workload.batch(Text(device, seed=0 if layout == "tp" else rank))
        for name in ("eager", provider):
            step = distributed.step_of(workload, layout, name, batch, device)
            first, *later = [distributed.seconds(step, 1, device) for _ in range(1 + _LATER_STEPS)]
    finally:
        dist.destroy_process_group()
    return first - statistics.median(later)


def line(row: Row) -> str:
    """Returns a line for the terminal."""
    return (
        f"{row.model} {row.shape} {row.layout} on {row.ranks} {row.provider}: cold {row.cold_s:.1f} s, "
        f"from the first rank's caches {row.shared_s:.1f} s, warm {row.warm_s:.1f} s"
    )


def write(path: Path, rows: Sequence[Row]) -> None:
    """Merges the rows into a file; a new row replaces the older one."""
    records = {_key(row): asdict(row) for row in [*read(path), *rows]}
    results.write_records(path, COLUMNS, [records[key] for key in sorted(records)])


def read(path: Path) -> list[Row]:
    """Returns the rows of a file; none if there is no file."""
    rows = []
    for record in results.read_records(path, COLUMNS):
        numbers = {name: float(record[name]) for name in _SECONDS}
        values: dict[str, Any] = {**record, **numbers, "ranks": int(record["ranks"])}
        rows.append(Row(**values))
    return rows


def _key(row: Row) -> tuple[Any, ...]:
    return tuple([getattr(row, name) for name in _KEY])
