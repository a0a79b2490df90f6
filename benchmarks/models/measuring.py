"""Time and memory of steps: wall-clock, as a model is used, the host's time included.

The kernels' time alone.
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

_PROFILED = 5  # steps


@dataclass(frozen=True)
class Effort:
    """How hard to measure: rounds of blocks, each of so many seconds' steps, and single steps for the host's time.

    Rounds go on, to ``most`` of them, while a contender's quartiles lie too far apart for so few.
    """

    rounds: int = 5
    block_s: float = 0.2
    singles: int = 9
    most: int = 60


@dataclass(frozen=True)
class Warm:
    """The measurements of single steps of a warm model."""

    first_s: float  # of the first step, which compiles
    step_s: float
    host_ms: float
    peak_mib: float | None


@dataclass(frozen=True)
class Measured:
    """Milliseconds a step over all blocks."""

    ms: float
    spread: float


@dataclass(frozen=True)
class Kernel:
    """A kernel (on a CPU, an operator) of a step: µs and launches a step."""

    us: float
    count: float
    name: str


def kernels(contender: Contender, device: torch.device) -> list[Kernel]:
    """The kernels that ran on the device in a step, by the profiler; means of some steps.

    On a GPU the sum of the times is the step's where the host keeps the queue full. Take it after
    all timing: what the profiler has loaded may slow down later launches.
    """
    on_gpu = device.type == "cuda"
    with (
        contender.in_force(),
        profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as run,
    ):
        for _ in range(_PROFILED):
            contender.step()
        synchronize(device)
    contender.clear()
    events = [event for event in run.key_averages() if (event.device_type.name == "CUDA") == on_gpu]
    return [
        Kernel(
            (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / _PROFILED,
            event.count / _PROFILED,
            event.key,
        )
        for event in events
    ]


def warm_up(contender: Contender, effort: Effort, device: torch.device) -> Warm:
    """Runs steps until all is compiled and loaded, then takes memory and the host's time from single ones."""
    with contender.in_force():
        first = seconds(contender.step, device)[1]
        contender.step()
        contender.clear()
        peak = _peak_mib(contender, device)
        singles = [seconds(contender.step, device) for _ in range(effort.singles)]
        contender.clear()
    returned = statistics.median(host for host, _ in singles)
    return Warm(first, statistics.median(whole for _, whole in singles), returned * 1e3, peak)


def blocks(
    contenders: dict[str, Contender], warm: dict[str, Warm], effort: Effort, device: torch.device
) -> dict[str, Measured]:
    """Blocks of steps back to back, the contenders in turn, so that a drift of the clocks meets all alike."""
    seen: dict[str, list[float]] = {name: [] for name in contenders}
    for done in range(max(effort.rounds, effort.most)):
        if done >= effort.rounds and all(map(_settled, seen.values())):
            break
        for name, contender in contenders.items():
            steps = max(1, math.ceil(effort.block_s / warm[name].step_s))
            with contender.in_force():
                seen[name].append(_block(contender.step, steps, device) * 1e3)
            contender.clear()
    return {
        name: Measured(statistics.median(times), _quartile_range(times))
        for name, times in seen.items()
    }


def synchronize(device: torch.device) -> None:
    """Waits until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _block(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Seconds a step."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / steps


def seconds(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Until the step returns, the queue empty at its start, and until the device is done."""
    synchronize(device)
    start = time.perf_counter()
    step()
    returned = time.perf_counter()
    synchronize(device)
    return returned - start, time.perf_counter() - start


def _peak_mib(contender: Contender, device: torch.device) -> float | None:
    """The peak memory of one step: what it allocates, and the memory of its own model.

    Other models on the device do not count.
    """
    if device.type != "cuda":
        return None
    return timing.peak_mib(contender.step) + contender.own_bytes / 2**20


def _settled(times: list[float]) -> bool:
    """Whether the median is good to about one in a hundred.

    The quartiles' distance over the root of the count.
    """
    return _quartile_range(times) <= 0.01 * statistics.median(times) * math.sqrt(len(times))


def _quartile_range(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return high - low
