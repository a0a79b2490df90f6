"""Measures times and memory. The module can be imported without a GPU; measuring needs one.

GPU time is from replays of a CUDA graph with many calls on different sets of inputs. Together the
sets are several times as large as the L2, so no call has its inputs in the L2. A graph excludes the
host's time. Host time is from a plain Python loop.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fusedops.tune.timing import copy_bandwidth, events, set_count

__all__ = [
    "Effort",
    "Forward",
    "Step",
    "Train",
    "copy_bandwidth",
    "gpu_us",
    "loop_us",
    "mode_context",
    "peak_mib",
    "set_count",
    "uncaptured_us",
]

# The least number of calls in a graph, so that the gap before the graph counts little.
_CALLS = 16


class Step(Protocol):
    """One call on one set of inputs."""

    def __call__(self) -> Any:
        """Runs the whole step."""

    def forward(self) -> Any:
        """Runs the forward."""

    def backward(self, out: Any) -> Any:
        """Runs the backward, from the forward's outputs."""


@dataclass(frozen=True)
class Forward:
    """The forward alone."""

    call: Callable[..., Any]
    arguments: dict[str, Any]

    def __call__(self) -> Any:
        """Returns the outputs."""
        return self.call(**self.arguments)

    forward = __call__

    def backward(self, out: Any) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class Train:
    """A forward, and a backward that returns the gradients instead of accumulating them."""

    call: Callable[..., Any]
    arguments: dict[str, Any]
    inputs: tuple[Tensor, ...]
    cotangents: tuple[Tensor, ...]

    def __call__(self) -> Any:
        """Returns the outputs and the gradients."""
        out = self.call(**self.arguments)
        return out, torch.autograd.grad(out, self.inputs, self.cotangents)

    def forward(self) -> Any:
        """Returns the outputs."""
        return self.call(**self.arguments)

    def backward(self, out: Any) -> tuple[Tensor, ...]:
        """Returns the gradients."""
        return torch.autograd.grad(out, self.inputs, self.cotangents)


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        replay_ms: the milliseconds of timed replays of a graph.
        warmup_ms: the milliseconds of replays before.
        blocks: the blocks of a Python loop.
        block_ms: the milliseconds of a block.
        launch_bound_calls: the calls of a block for small tensors, instead of ``block_ms``.
    """

    replay_ms: float = 100.0
    warmup_ms: float = 20.0
    blocks: int = 5
    block_ms: float = 15.0
    launch_bound_calls: int = 400


def mode_context(mode: str) -> AbstractContextManager[Any]:
    """Returns the context of a mode: a forward alone is inference, without autograd."""
    return torch.no_grad() if mode == "fwd" else nullcontext()


def peak_mib(step: Callable[[], object]) -> float:
    """Returns the peak memory of a call, beyond what was allocated before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / 2**20


def gpu_us(
    steps: Sequence[Step],
    effort: Effort,
    *,
    between: Callable[[], object] | None = None,
    split: bool = False,
) -> float:
    """Returns the microseconds of GPU time per call, the median of replays of a graph.

    Args:
        steps: one for each set of inputs.
        effort: how long to measure.
        between: runs before each replay and is not timed.
        split: whether all forwards run before all backwards, so that no backward has its saved
            tensors in the L2.

    Raises:
        RuntimeError: the steps cannot be captured.
    """
    rounds = math.ceil(_CALLS / len(steps))
    graph = _capture(steps, rounds, split=split)
    try:
        graph.replay()
        estimate = max(1e-3, events(graph.replay, 1)[0])
        for _ in range(math.ceil(effort.warmup_ms / estimate)):
            graph.replay()
        replays = max(5, min(500, math.ceil(effort.replay_ms / estimate)))
        median_ms = statistics.median(events(graph.replay, replays, between))
        return median_ms * 1e3 / (rounds * len(steps))
    finally:
        graph.reset()  # frees its outputs


def uncaptured_us(steps: Sequence[Step], effort: Effort) -> float:
    """Returns the microseconds per call if capture fails, from events around a plain loop.

    The host may determine this time.
    """

    def run_all() -> None:
        for step in steps:
            step()

    run_all()
    estimate = max(1e-3, events(run_all, 1)[0])
    repeats = max(3, min(100, math.ceil(effort.replay_ms / estimate)))
    return statistics.median(events(run_all, repeats)) * 1e3 / len(steps)


def loop_us(
    contenders: dict[str, Sequence[Step]], effort: Effort, *, launch_bound: bool
) -> dict[str, float]:
    """Returns the microseconds per call, host time included, in a plain Python loop.

    The loop ends in a synchronisation. The contenders take turns block by block, so that a drift of
    the machine affects all alike. The result is the median of the blocks.
    """
    calls = {
        name: _block_calls(steps, effort, launch_bound=launch_bound)
        for name, steps in contenders.items()
    }
    block_times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(effort.blocks):
        for name, steps in contenders.items():
            block_times[name].append(_loop(steps, calls[name]) * 1e6)
    return {name: statistics.median(times) for name, times in block_times.items()}


def _block_calls(steps: Sequence[Step], effort: Effort, *, launch_bound: bool) -> int:
    """Returns the number of calls of a block."""
    _loop(steps, len(steps))  # warms up
    if launch_bound:
        return effort.launch_bound_calls
    return max(5, math.ceil(effort.block_ms * 1e-3 / _loop(steps, len(steps))))


def _loop(steps: Sequence[Step], calls: int) -> float:
    """Returns the seconds per call, over whole rounds of the steps."""
    rounds = math.ceil(calls / len(steps))
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        for step in steps:
            step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / (rounds * len(steps))


def _capture(steps: Sequence[Step], rounds: int, *, split: bool) -> torch.cuda.CUDAGraph:
    """Captures rounds of all steps in a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # Lazy initialisation and autotuning must not happen while capturing.
    with torch.cuda.stream(stream):
        for step in steps[:3]:
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            # The outputs must exist until the round ends. Otherwise all would have the same
            # address, and be overwritten in the L2 before they are written to memory.
            if split:
                forwards = [(step, step.forward()) for step in steps]
                outputs = [(out, step.backward(out)) for step, out in forwards]
                del forwards
            else:
                outputs = [step() for step in steps]
            del outputs
    return graph
