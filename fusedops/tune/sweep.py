"""The sweep: candidates are compiled ahead in parallel, dropped for what they take, and timed in two rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core import launch, tuning
from ..core.question import Config, Question, family_of, valid
from .compiling import Pool
from .timing import Bench, Timer
from .usage import Limits, Usage, reason_to_drop
from .workloads import Step, Workload, questions_of

__all__ = ["Measured", "Outcome", "Sweeper"]

# The heuristic's config yields to one that is faster by more than the noise.
_NOISE = 0.01
# How many go into the second round beside the heuristic's, and how many workloads are compiled ahead.
_FINALISTS = 2
_AHEAD = 6

Settled = dict[str, Config]


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
    """What came of a question."""

    question: Question
    workload: Workload
    heuristic: Config
    best: Config
    measured: tuple[Measured, ...]

    def us_of(self, config: Config) -> float:
        """A candidate's microseconds."""
        return next(one.us for one in self.measured if one.config == config)

    @property
    def gain(self) -> float:
        """By what part the heuristic's config takes longer than the best."""
        return self.us_of(self.heuristic) / self.us_of(self.best) - 1.0


class Sweeper:
    """Tunes workloads on a device.

    Args:
        pool: compiles.
        timer: times; nothing else here needs a GPU.
        device: where workloads are planned.
        name: the device's name, for the shipped table's config, which is a candidate too; empty for none.
        limits: the device's.
    """

    def __init__(self, pool: Pool, timer: Timer, device: torch.device, *, name: str, limits: Limits) -> None:
        self._pool, self._timer, self._device, self._name, self._limits = pool, timer, device, name, limits
        self.failures: list[str] = []
        # What is asked and compiled does not depend on the rows, so it is found out once for all of a shape's.
        self._asked: dict[Any, list[Question]] = {}
        self._submitted: dict[Any, list[Future[Usage]]] = {}

    def sweep(
        self,
        workloads: Iterable[Workload],
        *,
        wanted: Callable[[Question], bool] = lambda question: True,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Iterator[Outcome]:
        """The outcome of each ``wanted`` question that the workloads ask, once; ``goes_on`` is asked before each."""
        done: set[Question] = set()
        # What the cache holds may be another's since.
        self._asked.clear()
        self._submitted.clear()

        def todo(workload: Workload, settled: Settled) -> list[Question]:
            return [q for q in self._questions(workload, settled) if q not in done and wanted(q)]

        queue: deque[Workload] = deque()
        rest = iter(workloads)
        while True:
            # While one workload is timed, those behind it are compiled.
            while len(queue) < _AHEAD and (workload := next(rest, None)) is not None:
                if questions := todo(workload, {}):
                    queue.append(workload)
                    self._compile_ahead(workload, questions)
            if not queue:
                return
            workload, bench = queue.popleft(), None
            settled: Settled = {}
            # A config once settled may bring a question: what remains of rows that it cuts.
            while questions := todo(workload, settled):
                if not goes_on():
                    return
                try:
                    bench = bench or self._timer.open(workload)
                    with _all_forced(settled):  # what remains of rows is timed beside the first launch as it will be
                        outcome = self._tune(workload, questions[0], settled, bench)
                except RuntimeError as error:  # out of memory, say: the rest of a long run is not to go with it
                    self.failures.append(f"{workload}: {str(error).splitlines()[0]}")
                    break
                done.add(outcome.question)
                settled[outcome.question.kernel] = outcome.best
                yield outcome

    def _tune(self, workload: Workload, question: Question, settled: Settled, bench: Bench) -> Outcome:
        candidates = self._candidates(question)
        pending = {config: self._compile(workload, question, config, settled) for config in candidates}
        usages = {config: [each.result() for each in futures] for config, futures in pending.items()}
        first = candidates[0]
        dropped = {config: "" if config == first else reason_to_drop(config, usages[config], usages[first], self._limits)
                   for config in candidates}  # fmt: skip
        left = [config for config in candidates if not dropped[config]]
        times = {config: bench.us(question, config, careful=False) for config in left}
        best = first
        if min(times, key=lambda config: times[config]) != first:
            finalists = sorted((c for c in left if c != first), key=lambda c: times[c])[:_FINALISTS]
            for config in (first, *finalists):
                times[config] = bench.us(question, config, careful=True)
            better = sorted((c for c in finalists if times[c] < times[first] * (1.0 - _NOISE)), key=lambda c: times[c])
            best = next((c for c in better if bench.agree(question, first, c)), first)
        measured = tuple(
            Measured(config, max((u.registers for u in usages[config]), default=0),
                     max((u.spills for u in usages[config]), default=0), times.get(config, float("inf")), dropped[config])
            for config in candidates)  # fmt: skip
        return Outcome(question, workload, first, best, measured)

    def _candidates(self, question: Question) -> list[Config]:
        family = family_of(question.kernel)
        assert family is not None
        found = family.candidates(question)
        shipped = tuning.shipped(question, self._name) if self._name else None
        return list(dict.fromkeys([*found, *([shipped] if shipped is not None and valid(question, shipped) else [])]))

    def _questions(self, workload: Workload, settled: Settled) -> list[Question]:
        key = (str(workload.at(4)), tuple(settled.items()))
        if key not in self._asked:
            with _all_forced(settled):
                self._asked[key] = questions_of(workload, self._device)
        bucket = tuning.BUCKET[workload.rows.bit_length()]
        return [replace(question, bucket=bucket) for question in self._asked[key]]

    def _compile_ahead(self, workload: Workload, questions: list[Question]) -> None:
        """Also the kernels that depend on another's block, as their names do on its name."""
        for question in questions:
            blocks: set[int] = set()
            for config in self._candidates(question):
                self._compile(workload, question, config, {})
                if config.block_n in blocks:
                    continue
                blocks.add(config.block_n)
                settled = {question.kernel: config}
                for after in self._questions(workload, settled):
                    if after.kernel.startswith(f"{question.kernel}_"):
                        for remains in self._candidates(after):
                            self._compile(workload, after, remains, settled)

    def _compile(self, workload: Workload, question: Question, config: Config,
                 settled: Settled) -> list[Future[Usage]]:  # fmt: skip
        """Submits all kernels that the workload then needs; what those with the config will take."""
        forced = {kernel: c for kernel, c in settled.items() if question.kernel.startswith(f"{kernel}_")}
        forced[question.kernel] = config
        key = (str(workload.at(4)), tuple(forced.items()))
        if key not in self._submitted:
            with _all_forced(forced), launch.collecting() as requests:
                Step(workload.at(4), self._device)()
            first = self._candidates(question)[0] == config
            found = [(request, self._pool.submit(request, fit=first or request.config != config))
                     for request in requests]  # fmt: skip
            self._submitted[key] = [future for request, future in found if request.config == config]
        return self._submitted[key]


def _all_forced(configs: Settled) -> ExitStack:
    stack = ExitStack()
    for kernel, config in configs.items():
        stack.enter_context(tuning.forced(kernel, config))
    return stack
