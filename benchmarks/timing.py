"""How time and memory are measured. Importable without a GPU; measuring needs one.

GPU time comes from replays of one CUDA graph that holds many calls, each on its own set of inputs.
The sets together are several times the L2, so that no call finds its inputs there, and a graph
leaves the host's time out. The host's time is what the plain Python loop adds.
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

_CALLS = 16  # the least calls in one graph, so that the gap before it is spread thin


class Step(Protocol):
    """One call on one set of inputs."""

    def __call__(self) -> Any:
        """The whole step."""

    def forward(self) -> Any:
        """Its first half."""

    def backward(self, out: Any) -> Any:
        """Its second half, from what the first returned."""


@dataclass(frozen=True)
class Forward:
    """The forward alone."""

    call: Callable[..., Any]
    arguments: dict[str, Any]

    def __call__(self) -> Any:
        """The outputs."""
        return self.call(**self.arguments)

    forward = __call__

    def backward(self, out: Any) -> None:
        """There is none."""


@dataclass(frozen=True)
class Train:
    """Forward, then the gradients of all inputs that require them, returned instead of accumulated."""

    call: Callable[..., Any]
    arguments: dict[str, Any]
    inputs: tuple[Tensor, ...]
    cotangents: tuple[Tensor, ...]

    def __call__(self) -> Any:
        """The outputs and the gradients."""
        out = self.call(**self.arguments)
        return out, torch.autograd.grad(out, self.inputs, self.cotangents)

    def forward(self) -> Any:
        """The outputs."""
        return self.call(**self.arguments)

    def backward(self, out: Any) -> tuple[Tensor, ...]:
        """The gradients."""
        return torch.autograd.grad(out, self.inputs, self.cotangents)


@dataclass(frozen=True)
class Effort:
    """How long to measure: milliseconds of replays, and the loop's blocks and seconds."""

    replay_ms: float = 100.0
    warmup_ms: float = 20.0
    blocks: int = 5
    block_ms: float = 15.0
    launch_bound_calls: int = 400


def mode_context(mode: str) -> AbstractContextManager[Any]:
    """The context of a mode: a forward alone is inference, which saves nothing for backward."""
    return torch.no_grad() if mode == "fwd" else nullcontext()


def peak_mib(step: Callable[[], object]) -> float:
    """The most memory that one warm call held at once beyond what was held before it."""
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
    """Microseconds of GPU time a call: the median of replays of one graph.

    Args:
        steps: one for each set of inputs.
        effort: how long to measure.
        between: what to do before each replay, untimed.
        split: all forwards before all backwards, so that no backward finds what its forward kept in
            the L2.

    Raises:
        RuntimeError: the steps cannot be captured.
    """
    rounds = math.ceil(_CALLS / len(steps))
    graph = _capture(steps, rounds, split)
    try:
        graph.replay()
        estimate = max(1e-3, events(graph.replay, 1)[0])
        for _ in range(math.ceil(effort.warmup_ms / estimate)):
            graph.replay()
        replays = max(5, min(500, math.ceil(effort.replay_ms / estimate)))
        return (
            statistics.median(events(graph.replay, replays, between)) * 1e3 / (rounds * len(steps))
        )
    finally:
        graph.reset()  # frees the outputs that it holds


def uncaptured_us(steps: Sequence[Step], effort: Effort) -> float:
    """The fall-back where capture fails.

    Events around a plain loop, whose time the host may set.
    """

    def every() -> None:
        for step in steps:
            step()

    every()
    estimate = max(1e-3, events(every, 1)[0])
    repeats = max(3, min(100, math.ceil(effort.replay_ms / estimate)))
    return statistics.median(events(every, repeats)) * 1e3 / len(steps)


def loop_us(
    contenders: dict[str, Sequence[Step]], effort: Effort, *, launch_bound: bool
) -> dict[str, float]:
    """Microseconds a call, the host's included, in a plain Python loop that ends in a synchronisation.

    The contenders take turns block by block, so that a drift of the machine meets all alike; each
    block's median.
    """
    calls = {name: _block_calls(steps, effort, launch_bound) for name, steps in contenders.items()}
    seen: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(effort.blocks):
        for name, steps in contenders.items():
            seen[name].append(_loop(steps, calls[name]) * 1e6)
    return {name: statistics.median(times) for name, times in seen.items()}


def _block_calls(steps: Sequence[Step], effort: Effort, launch_bound: bool) -> int:
    _loop(steps, len(steps))
    if launch_bound:
        return effort.launch_bound_calls
    return max(5, math.ceil(effort.block_ms * 1e-3 / _loop(steps, len(steps))))


def _loop(steps: Sequence[Step], calls: int) -> float:
    """Seconds a call, over whole rounds of the steps."""
    rounds = math.ceil(calls / len(steps))
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        for step in steps:
            step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / (rounds * len(steps))


def _capture(steps: Sequence[Step], rounds: int, split: bool) -> torch.cuda.CUDAGraph:
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
            # Held until the round ends: an output put where the last one lay would be overwritten
            # within the L2.
            if split:
                kept = [(step, step.forward()) for step in steps]
                held = [(out, step.backward(out)) for step, out in kept]
                del kept
            else:
                held = [step() for step in steps]
            del held
    return graph
