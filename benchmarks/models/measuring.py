"""Measures the time and memory of steps.

The time of a step is that between two completions, as in a training: it includes the host's where
the device waits for it. The time of the kernels alone is from the profiler.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from .. import timing
from .providers import Contender

__all__ = [
    "Effort",
    "Kernel",
    "Measured",
    "Warm",
    "blocks",
    "kernels",
    "seconds",
    "synchronize",
    "warm_up",
]

_PROFILED_STEPS = 10


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: the least number of rounds. In a round each contender runs one block of steps.
        block_s: the seconds of a block.
        singles: the number of single steps, for the host's time.
        most: the most rounds. They continue until the medians are exact enough: see `_settled`.
    """

    rounds: int = 5
    block_s: float = 0.2
    singles: int = 9
    most: int = 60


@dataclass(frozen=True)
class Warm:
    """The measurements of single steps.

    Attributes:
        first_s: the seconds of the first step, which compiles.
        step_s: the seconds of a later step.
        host_ms: the milliseconds until the Python call of a later step returns.
        peak_mib: the peak memory of a step; None on a CPU.
    """

    first_s: float
    step_s: float
    host_ms: float
    peak_mib: float | None


@dataclass(frozen=True)
class Measured:
    """The milliseconds per step: the median over blocks, and the interquartile range."""

    ms: float
    spread: float


@dataclass(frozen=True)
class Kernel:
    """A kernel (on a CPU, an operator): its µs and launches per step, and its name."""

    us: float
    count: float
    name: str


def kernels(contender: Contender, device: torch.device) -> list[Kernel]:
    """Returns the kernels of a step, by the profiler, as means over some steps.

    On a GPU the sum of their times is the step's time if the host keeps the queue full. Call this
    after all timing, because the profiler may slow down later launches.
    """
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with contender.context():
        # A GPU that was idle, as while the last profile was read, has a higher clock at first.
        for _ in range(_PROFILED_STEPS):
            contender.step()
        with profile(activities=[activity]) as run:
            for _ in range(_PROFILED_STEPS):
                contender.step()
            synchronize(device)
    contender.clear()
    result = []
    for event in run.key_averages():
        if (event.device_type.name == "CUDA") == on_gpu:
            us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            result.append(Kernel(us / _PROFILED_STEPS, event.count / _PROFILED_STEPS, event.key))
    return result


def warm_up(contender: Contender, effort: Effort, device: torch.device) -> Warm:
    """Compiles and loads everything, and then measures memory and host time of single steps."""
    with contender.context():
        _, first = seconds(contender.step, device)
        contender.step()
        contender.clear()
        peak = _peak_mib(contender, device)
        singles = [seconds(contender.step, device) for _ in range(effort.singles)]
        contender.clear()
    return Warm(
        first_s=first,
        step_s=statistics.median(whole for _, whole in singles),
        host_ms=statistics.median(host for host, _ in singles) * 1e3,
        peak_mib=peak,
    )


def blocks(
    contenders: dict[str, Contender], warm: dict[str, Warm], effort: Effort, device: torch.device
) -> dict[str, Measured]:
    """Times blocks of steps back to back.

    The contenders take turns, so that a drift of the GPU's clocks affects all alike.
    """
    block_ms: dict[str, list[float]] = {name: [] for name in contenders}
    for rounds_done in range(max(effort.rounds, effort.most)):
        if rounds_done >= effort.rounds and all(map(_settled, block_ms.values())):
            break
        for name, contender in contenders.items():
            steps = max(1, math.ceil(effort.block_s / warm[name].step_s))
            with contender.context():
                block_ms[name].append(_block(contender.step, steps, device) * 1e3)
            contender.clear()
    return {
        name: Measured(statistics.median(times), _quartile_range(times))
        for name, times in block_ms.items()
    }


def synchronize(device: torch.device) -> None:
    """Waits until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _block(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Returns the seconds per step, after a first step, which fills the device's queue."""
    synchronize(device)
    step()
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) / steps
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    first.record(stream)
    for _ in range(steps):
        step()
    last.record(stream)
    last.synchronize()
    milliseconds: float = first.elapsed_time(last)
    return milliseconds / 1e3 / steps


def seconds(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Returns the seconds until a step's call returns, and until the device has completed it.

    The device is idle when the step starts.
    """
    synchronize(device)
    start = time.perf_counter()
    step()
    returned = time.perf_counter()
    synchronize(device)
    return returned - start, time.perf_counter() - start


def _peak_mib(contender: Contender, device: torch.device) -> float | None:
    """Returns the peak memory of a step: what it allocates, and the memory of its model.

    Other models on the device do not count. The memory of CUDA graphs is not counted, so there is
    no figure for a step that replays them.
    """
    if device.type != "cuda" or contender.replays:
        return None
    return timing.peak_mib(contender.step) + contender.own_bytes / 2**20


def _settled(times: list[float]) -> bool:
    """Returns whether the median is exact to about one in a hundred.

    Its error is estimated as the interquartile range over the root of the number of blocks.
    """
    return _quartile_range(times) <= 0.01 * statistics.median(times) * math.sqrt(len(times))


def _quartile_range(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return high - low
