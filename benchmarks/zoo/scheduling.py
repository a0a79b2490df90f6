"""Measures the zoo: processes prepare workloads side by side, and each is timed alone."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .. import warm
from ..fresh import Worker
from ..models.measuring import Effort
from ..models.runner import Setting, Work
from ..models.text import Text
from . import measuring
from .results import Row, row_of

__all__ = ["Plan", "measure_all"]

_LEAST_SECONDS = 15.0  # with less time left, no workload is started
_DRAINED_SECONDS = 0.05  # until the device has completed what stopped processes have launched


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        device: the device.
        effort: how long to measure.
        processes: the number of workloads that are prepared side by side.
        limit: the seconds of a workload, after which its process is killed.
        deadline: the time of ``time.perf_counter`` at which nothing more is measured.
    """

    device: torch.device
    effort: Effort
    processes: int
    limit: float
    deadline: float

    @property
    def seconds_left(self) -> float:
        """The seconds that a workload may take now."""
        return min(self.limit, self.deadline - time.perf_counter())


def measure_all(work: Sequence[Work], plan: Plan, write: Callable[[list[Row]], None]) -> int:
    """Measures, and calls ``write`` with the rows of each workload; returns how many are left."""
    queue, turns = deque(work), _Turns(write)
    with ThreadPoolExecutor(plan.processes) as pool:
        futures = [pool.submit(_measure_from, queue, plan, turns) for _ in range(plan.processes)]
    return len(queue) + sum(future.result() for future in futures)


class _Turns:
    """The processes of a run, of which one at a time is timed."""

    def __init__(self, write: Callable[[list[Row]], None]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._workers: list[Worker] = []

    @contextmanager
    def worker(self, device: torch.device) -> Iterator[Worker]:
        """Context manager: a worker that is stopped while another is timed."""
        with Worker(warm.initialize, device) as worker:
            self._workers.append(worker)
            yield worker

    def start(self, worker: Worker) -> None:
        """Starts a worker's process while none is timed."""
        with self._lock:
            worker.start()

    @contextmanager
    def alone(self, worker: Worker) -> Iterator[None]:
        """Context manager: all other processes are stopped."""
        with self._lock:
            others = [other for other in self._workers if other is not worker]
            for other in others:
                other.pause()
            time.sleep(_DRAINED_SECONDS)
            try:
                yield
            finally:
                for other in others:
                    other.resume()

    def write(self, rows: list[Row]) -> None:
        """Writes rows, of one worker at a time."""
        with self._lock:
            self._write(rows)


def _measure_from(queue: deque[Work], plan: Plan, turns: _Turns) -> int:
    """Measures workloads of the queue in one process; returns how many it could not complete."""
    cut = 0
    with turns.worker(plan.device) as worker:
        while queue and plan.seconds_left >= min(plan.limit, _LEAST_SECONDS):
            try:
                item = queue.popleft()
            except IndexError:  # another thread has taken it
                break
            started = time.perf_counter()
            rows = _measured(worker, item, plan, turns)
            cut += rows is None
            if rows is not None:
                turns.write(rows)
                print(f"{item.workload}: {time.perf_counter() - started:.0f} s", flush=True)
    return cut


def _measured(worker: Worker, item: Work, plan: Plan, turns: _Turns) -> list[Row] | None:
    """Returns the rows of a workload, failures included; None if the time was over."""
    try:
        turns.start(worker)
        failures = worker.run(
            measuring.prepare, item, plan.device, plan.effort, limit=plan.seconds_left
        )
        with turns.alone(worker):
            rows = worker.run(measuring.timed, limit=max(plan.seconds_left, 1.0))
    except (RuntimeError, TimeoutError) as error:
        worker.kill()
        if time.perf_counter() >= plan.deadline:
            return None
        print(f"{item.workload} {' '.join(item.providers)}: {error}", file=sys.stderr, flush=True)
        return _one_by_one(worker, item, plan, turns, str(error))
    return failures + rows


def _one_by_one(
    worker: Worker, item: Work, plan: Plan, turns: _Turns, reason: str
) -> list[Row] | None:
    """Returns the rows of a workload whose process crashed or hung: each provider by itself."""
    if len(item.providers) == 1:
        setting = Setting(plan.device, Text(torch.device("cpu")), plan.effort)
        row = row_of(setting.row(item.workload, item.providers[0]))
        return [measuring.failed(row, _last_line(reason))]
    rows = list[Row]()
    for name in item.providers:
        result = _measured(worker, Work(item.workload, (name,)), plan, turns)
        if result is None:
            return None
        rows += result
    return rows


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:200]
