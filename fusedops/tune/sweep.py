"""The sweep: compiles candidates in parallel, drops those that spill or do not fit, and times the rest in two rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from ..core import launch, tuning
from ..core.tuning_key import Config, TuningKey, family_of, valid
from ..core.usage import Usage
from .compiling import Pool
from .timing import Bench, Timer
from .usage import Limits, reason_to_drop
from .workloads import Tunable, keys_of

__all__ = ["Measured", "Outcome", "Sweeper"]

# Another config replaces the heuristic's only if it is faster by more than the noise.
_NOISE = 0.01
# Configs in the second round besides the heuristic's, and workloads that are compiled ahead.
_FINALISTS = 2
_AHEAD = 6


@dataclass(frozen=True)
class Measured:
    """One candidate: its time, or why it was not timed."""

    config: Config
    registers: int
    spills: int
    us: float
    dropped: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of tuning a key."""

    key: TuningKey
    workload: Tunable
    heuristic: Config
    best: Config
    measured: tuple[Measured, ...]

    def us_of(self, config: Config) -> float:
        """A candidate's microseconds."""
        return next(one.us for one in self.measured if one.config == config)

    @property
    def gain(self) -> float:
        """The heuristic's time relative to the best, minus one."""
        return self.us_of(self.heuristic) / self.us_of(self.best) - 1.0


class Sweeper:
    """Tunes workloads on a device.

    Args:
        pool: compiles the candidates.
        timer: times the candidates; nothing else here needs a GPU.
        device: the workloads' device.
        name: the device's name, for the shipped table, whose config is a candidate too; empty for none.
        limits: the device's limits.
    """

    def __init__(self, pool: Pool, timer: Timer, device: torch.device, *, name: str, limits: Limits) -> None:
        self._pool, self._timer, self._device, self._name, self._limits = pool, timer, device, name, limits
        self.failures: list[str] = []
        # Keys and compiled kernels do not depend on the rows, so both are found once for all numbers of rows.
        self._keys_at: dict[Any, list[TuningKey]] = {}
        self._submitted: dict[Any, list[Future[Usage]]] = {}

    def sweep(
        self,
        workloads: Iterable[Tunable],
        *,
        wanted: Callable[[TuningKey], bool] = lambda key: True,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Iterator[Outcome]:
        """The outcome of each ``wanted`` key of the workloads, once; ``goes_on`` is called before each."""
        done: set[TuningKey] = set()
        # Cached configs may have changed.
        self._keys_at.clear()
        self._submitted.clear()

        def todo(workload: Tunable) -> list[TuningKey]:
            return [key for key in self._keys(workload) if key not in done and wanted(key)]

        queue: deque[Tunable] = deque()
        rest = iter(workloads)
        while True:
            # While one workload is timed, the next ones are compiled.
            while len(queue) < _AHEAD and (workload := next(rest, None)) is not None:
                if keys := todo(workload):
                    queue.append(workload)
                    self._compile_ahead(workload, keys)
            if not queue:
                return
            workload, bench = queue.popleft(), None
            for key in todo(workload):
                if not goes_on():
                    return
                try:
                    bench = bench or self._timer.open(workload)
                    outcome = self._tune(workload, key, bench)
                except RuntimeError as error:  # for example out of memory: a long run must go on
                    self.failures.append(f"{workload}: {str(error).splitlines()[0]}")
                    break
                done.add(key)
                yield outcome

    def _tune(self, workload: Tunable, key: TuningKey, bench: Bench) -> Outcome:
        candidates = self._candidates(key)
        pending = {config: self._compile(workload, key, config) for config in candidates}
        usages = {config: [each.result() for each in futures] for config, futures in pending.items()}
        first = candidates[0]
        dropped = {config: "" if config == first else reason_to_drop(config, usages[config], usages[first], self._limits)
                   for config in candidates}  # fmt: skip
        left = [config for config in candidates if not dropped[config]]
        times = {config: bench.us(key, config, careful=False) for config in left}
        best = first
        if min(times, key=lambda config: times[config]) != first:
            finalists = sorted((c for c in left if c != first), key=lambda c: times[c])[:_FINALISTS]
            for config in (first, *finalists):
                times[config] = bench.us(key, config, careful=True)
            better = sorted((c for c in finalists if times[c] < times[first] * (1.0 - _NOISE)), key=lambda c: times[c])
            best = next((c for c in better if bench.agree(key, first, c)), first)
        measured = tuple(
            Measured(config, max((u.registers for u in usages[config]), default=0),
                     max((u.spills for u in usages[config]), default=0), times.get(config, float("inf")), dropped[config])
            for config in candidates)  # fmt: skip
        return Outcome(key, workload, first, best, measured)

    def _candidates(self, key: TuningKey) -> list[Config]:
        family = family_of(key.kernel)
        assert family is not None
        found = family.candidates(key)
        shipped = tuning.shipped(key, self._name) if self._name else None
        return list(dict.fromkeys([*found, *([shipped] if shipped is not None and valid(key, shipped) else [])]))

    def _keys(self, workload: Tunable) -> list[TuningKey]:
        place = str(workload.at(4))
        if place not in self._keys_at:
            self._keys_at[place] = keys_of(workload, self._device)
        return [workload.key_at(key) for key in self._keys_at[place]]

    def _compile_ahead(self, workload: Tunable, keys: list[TuningKey]) -> None:
        for key in keys:
            for config in self._candidates(key):
                self._compile(workload, key, config)

    def _compile(self, workload: Tunable, key: TuningKey, config: Config) -> list[Future[Usage]]:
        """Submits all kernels of the workload under a config; the usages of those that run with it."""
        place = (str(workload.at(4)), key.kernel, config)
        if place not in self._submitted:
            with tuning.forced(key.kernel, config), launch.collecting() as requests:
                workload.at(4).step(self._device)()
            first = self._candidates(key)[0] == config
            found = [(request, self._pool.submit(request, fit=first or request.config != config))
                     for request in requests]  # fmt: skip
            self._submitted[place] = [future for request, future in found if request.config == config]
        return self._submitted[place]
