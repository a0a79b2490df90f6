"""Measures one workload in a worker process, in two calls: `prepare`, and `timed`.

While a process prepares, others may use the device. While it times, all others are stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import fx

from fusedops.backend.fx import compile_by_inductor, namespace

from .. import providers as operator_providers
from ..models import measuring
from ..models.ahead import waiting_for_memory
from ..models.measuring import Effort, Warm
from ..models.providers import Contender, contender
from ..models.runner import Setting, Work, first_line, free
from ..models.text import Text
from . import gate
from .results import Row, row_of

__all__ = ["failed", "prepare", "timed"]


@dataclass(frozen=True)
class _Prepared:
    """The models of a workload after their first steps, with the rows so far."""

    setting: Setting
    contenders: dict[str, Contender]
    rows: dict[str, Row]


# The workload of this process.
_prepared = list[_Prepared]()


def prepare(work: Work, device: torch.device, effort: Effort) -> list[Row]:
    """Compiles the models of a workload, or loads them, and compares their results.

    Returns:
        The rows of the providers that failed or are wrong. The others are timed by `timed`.
    """
    setting = _setting(device, effort)
    release()
    operator_providers.fresh_compiler()
    contenders, rows, failures = dict[str, Contender](), dict[str, Row](), list[Row]()
    try:
        compare = partial(gate.reference_of, work.workload, device, setting.text)
        reference = waiting_for_memory(compare, device)
    # Whatever eager raises is reported as each provider's failure.
    except Exception as error:  # noqa: BLE001
        return [failed(row, f"eager: {_described(error)}") for row in _rows(work, setting)]
    for name, row in zip(work.providers, _rows(work, setting), strict=True):
        start = partial(_started, name, work, setting, row, reference)
        try:
            built, started = waiting_for_memory(start, device)
        # Whatever a provider raises, the others are timed.
        except Exception as error:  # noqa: BLE001
            # After some errors this raises another: the device is lost to this process.
            measuring.synchronize(device)
            failures.append(failed(row, _described(error)))
            continue
        if started.failure:
            failures.append(started)
        else:
            contenders[name], rows[name] = built, started
    del reference
    free(device)
    _prepared.append(_Prepared(setting, contenders, rows))
    return failures


def timed() -> list[Row]:
    """Returns the rows of the prepared models, timed in turns, and releases the models."""
    prepared = _prepared[0]
    setting, contenders = prepared.setting, prepared.contenders
    device, effort = setting.device, setting.effort
    singles: dict[str, Warm] = {}
    for name, model in contenders.items():
        singles[name] = measuring.warm_up(model, effort, device)
    times = measuring.blocks(contenders, singles, effort, device)
    rows = []
    # The profiler comes after all timing: see `measuring.kernels`.
    for name, model in contenders.items():
        gpu_ms = None
        if device.type == "cuda":
            gpu_ms = sum([kernel.us for kernel in measuring.kernels(model, device)]) / 1e3
        row = replace(
            prepared.rows[name],
            ms=times[name].ms,
            spread=times[name].spread,
            host_ms=singles[name].host_ms,
            peak_mib=singles[name].peak_mib,
            gpu_ms=gpu_ms,
        )
        rows.append(row)
    release()
    return rows


def release() -> None:
    """Frees the prepared models, and what was compiled for them."""
    while _prepared:
        device = _prepared.pop().setting.device
        torch.compiler.reset()
        free(device)


def failed(row: Row, reason: str) -> Row:
    """Returns the row of a failure."""
    return replace(row, failure=reason)


@cache
def _setting(device: torch.device, effort: Effort) -> Setting:
    return Setting(device, Text(device), effort)


def _rows(work: Work, setting: Setting) -> list[Row]:
    """Returns a row without numbers for each provider."""
    return [row_of(setting.row(work.workload, name)) for name in work.providers]


def _started(
    name: str, work: Work, setting: Setting, row: Row, reference: gate.Reference
) -> tuple[Contender, Row]:
    """Returns a provider's model after its first steps, and its row without times."""
    from torch._dynamo.utils import counters

    counters.clear()
    with _counted() as regions:
        built = contender(name, work.workload, setting.device, setting.text.reseeded(0))
        with built.context():
            _, first = measuring.seconds(built.step, setting.device)
            built.step()
        built.clear()
    verdict = gate.judged(built, reference)
    row = replace(
        row,
        first_s=first,
        regions=sum(regions),
        breaks=sum(counters["graph_break"].values()),
        difference=verdict.difference,
        allowed=verdict.allowed,
        failure=verdict.wrong,
    )
    return built, row


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Counts, within this context, the operators of fusedops in each graph that is compiled."""
    counts = list[int]()

    def counting(graph: fx.GraphModule, *arguments: Any) -> Any:
        operators = [node for node in graph.graph.nodes if namespace(node.target) == "fusedops"]
        counts.append(len(operators))
        return compile_by_inductor(graph, *arguments)

    with mock.patch("fusedops.backend.entry.compile_by_inductor", counting):
        yield counts


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
