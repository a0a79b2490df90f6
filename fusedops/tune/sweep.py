"""Finds the fastest config of each key.

Candidates are compiled in parallel. Those that spill or do not fit are dropped. The others are
timed in two rounds:

    candidates --compile--> --drop--> --time all, quickly--> --time the finalists, carefully--> best
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from ..core.configs import tuning
from ..core.configs.tuning_key import Config, TuningKey, family_of
from ..core.launches import launch
from ..core.launches.usage import Usage
from .compiling import Pool
from .timing import Bench, Timer
from .usage import Limits, reason_to_drop
from .workloads import Tunable, keys_of

__all__ = ["Measured", "Outcome", "Sweeper"]

# Another config replaces the heuristic's only if it is faster by more than the noise.
_NOISE = 0.01
# The number of configs in the second round besides the heuristic's.
_FINALISTS = 2
# The number of workloads that are compiled ahead.
_AHEAD = 6
# Keys and kernels are collected with this many rows, which take little time and memory. Kernels do
# not depend on the number of rows, and keys depend only on its bucket.
_FEW_ROWS = 4


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
        """Return a candidate's microseconds."""
        return {candidate.config: candidate.us for candidate in self.measured}[config]

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
        name: the device's name, for the shipped table: its config is a candidate too. Empty to try
            only the families' candidates.
        limits: the device's limits.
    """

    def __init__(
        self, pool: Pool, timer: Timer, device: torch.device, *, name: str, limits: Limits
    ) -> None:
        self._pool, self._timer, self._device = pool, timer, device
        self._name, self._limits = name, limits
        # The workloads that the last sweep left out, with the errors.
        self.failures: list[str] = []
        # Caches of a sweep, by the name of the workload with `_FEW_ROWS`: workloads that differ
        # only in the number of rows share the entries.
        self._keys_at: dict[Any, list[TuningKey]] = {}
        self._submitted: dict[Any, list[Future[Usage]]] = {}

    def sweep(
        self,
        workloads: Iterable[Tunable],
        *,
        wanted: Callable[[TuningKey], bool] = lambda key: True,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Iterator[Outcome]:
        """Yield the outcome of each ``wanted`` key of the workloads, once.

        Workloads that fail are listed in `failures`. ``goes_on`` is called before each key; if it
        returns False, the sweep ends.
        """
        done: set[TuningKey] = set()
        self.failures.clear()
        # Cached configs may have changed.
        self._keys_at.clear()
        self._submitted.clear()

        # This is called before a workload is compiled, and again before it is timed: workloads
        # share keys, so another one may have tuned a key by then.
        def todo(workload: Tunable) -> list[TuningKey]:
            return [key for key in self._keys(workload) if key not in done and wanted(key)]

        for workload in self._compiled_ahead(workloads, todo):
            bench = None
            for key in todo(workload):
                if not goes_on():
                    return
                try:
                    bench = bench or self._timer.open(workload)
                    outcome = self._tune(workload, key, bench)
                # For example out of memory. A long run must go on.
                except RuntimeError as error:
                    failure = f"{workload}: {type(error).__name__}: {error}"
                    self.failures.append(failure.splitlines()[0])
                    break
                done.add(key)
                yield outcome

    def _compiled_ahead(
        self, workloads: Iterable[Tunable], todo: Callable[[Tunable], list[TuningKey]]
    ) -> Iterator[Tunable]:
        """Yield the workloads with keys to tune, while the pool compiles the next ones."""
        queue: deque[Tunable] = deque()
        for workload in workloads:
            keys = todo(workload)
            if not keys:
                continue
            queue.append(workload)
            for key in keys:
                for config in self._candidates(key):
                    self._compile(workload, key, config)
            # Once the queue is full, the oldest workload is timed, while the next ones compile on
            # the CPU.
            if len(queue) == _AHEAD:
                yield queue.popleft()
        yield from queue

    def _tune(self, workload: Tunable, key: TuningKey, bench: Bench) -> Outcome:
        """Compile and time the candidates of a key."""
        candidates = self._candidates(key)
        heuristic = candidates[0]
        pending = {config: self._compile(workload, key, config) for config in candidates}
        # This waits for the results only after all candidates were submitted.
        usages: dict[Config, list[Usage]] = {}
        for config, futures in pending.items():
            usages[config] = list(map(Future.result, futures))
        dropped = self._dropped(candidates, usages)
        times: dict[Config, float] = {}
        for config in candidates:
            if not dropped[config]:
                times[config] = bench.us(key, config, careful=False)
        # The second round is needed only to replace the heuristic's config.
        best = heuristic
        if min(times, key=times.__getitem__) != heuristic:
            best = _best_of_finalists(key, heuristic, times, bench)
        measured = []
        for config in candidates:
            registers = max(map(attrgetter("registers"), usages[config]), default=0)
            spills = max(map(attrgetter("spills"), usages[config]), default=0)
            us = times.get(config, float("inf"))
            measured.append(Measured(config, registers, spills, us, dropped[config]))
        return Outcome(key, workload, heuristic, best, tuple(measured))

    def _dropped(
        self, candidates: list[Config], usages: dict[Config, list[Usage]]
    ) -> dict[Config, str]:
        """Return why each candidate is dropped; "" for the heuristic's, which is always timed."""
        heuristic, *others = candidates
        reasons = {heuristic: ""}
        for config in others:
            reasons[config] = reason_to_drop(
                config, usages[config], usages[heuristic], self._limits
            )
        return reasons

    def _candidates(self, key: TuningKey) -> list[Config]:
        """Return the configs to try, the heuristic's first."""
        family = family_of(key.kernel)
        assert family is not None
        candidates = list(family.candidates(key))
        shipped = tuning.shipped(key, self._name)
        if shipped is not None:
            candidates.append(shipped)
        return list(dict.fromkeys(candidates))

    def _keys(self, workload: Tunable) -> list[TuningKey]:
        """Return the workload's keys, from the cache if it has them."""
        name = str(workload.at(_FEW_ROWS))
        if name not in self._keys_at:
            self._keys_at[name] = keys_of(workload, self._device)
        # The cached keys may have the bucket of another workload's rows.
        return list(map(workload.key_at, self._keys_at[name]))

    def _compile(self, workload: Tunable, key: TuningKey, config: Config) -> list[Future[Usage]]:
        """Submit all kernels of the workload under a config.

        Returns:
            The usages of the kernels that run with the config.
        """
        name = (str(workload.at(_FEW_ROWS)), key.kernel, config)
        if name in self._submitted:
            return self._submitted[name]
        with tuning.forced(key.kernel, config), launch.collecting() as requests:
            workload.at(_FEW_ROWS).step(self._device)()
        is_heuristic = self._candidates(key)[0] == config
        futures = []
        for request in requests:
            # The workload's other kernels have other configs.
            is_forced = request.config == config
            # A candidate that does not fit into shared memory is dropped. The heuristic's config
            # and the other kernels must run, with as many stages as fit.
            must_run = is_heuristic or not is_forced
            future = self._pool.submit(request, fit=must_run)
            if is_forced:
                futures.append(future)
        self._submitted[name] = futures
        return futures


def _best_of_finalists(
    key: TuningKey, heuristic: Config, times: dict[Config, float], bench: Bench
) -> Config:
    """Time the fastest configs carefully, updating ``times``; return the best.

    A config replaces the heuristic's if it is faster by more than the noise and returns the same
    results up to the order of sums.
    """

    def fastest(configs: Iterable[Config]) -> list[Config]:
        return sorted(configs, key=times.__getitem__)

    finalists = fastest(config for config in times if config != heuristic)[:_FINALISTS]
    for config in (heuristic, *finalists):
        times[config] = bench.us(key, config, careful=True)
    # A smaller difference may be chance: the next run might choose another config.
    limit = times[heuristic] * (1.0 - _NOISE)
    for config in fastest(finalists):
        if times[config] < limit and bench.agree(key, heuristic, config):
            return config
    return heuristic
