"""Times a config by many calls in one CUDA graph, on several sets of inputs.

A graph excludes the host's time. The sets of inputs together exceed the L2, so no call has its
inputs in the L2. The module can be imported without a GPU; timing needs one.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.configs import tuning
from ..core.configs.tuning_key import Config, TuningKey
from ..core.random import rng
from .workloads import Step, Tunable

__all__ = ["Bench", "GraphTimer", "Timer", "copy_bandwidth", "events", "replay", "set_count"]

# The total size of the sets of inputs, as a multiple of the L2's size.
_CACHES = 4
# The least number of calls in a graph, so that the gap before the graph counts little.
_CALLS = 16
# The milliseconds for replays of a graph, and their least number, in the first and in the second
# round.
_QUICK, _CAREFUL = (2.0, 3), (8.0, 5)
# Two configs add numbers in different orders. Their results may differ by this many roundings of
# their dtype.
_ROUNDINGS = 8.0


class Bench(Protocol):
    """A workload with its inputs, to be timed."""

    def us(self, key: TuningKey, config: Config, *, careful: bool) -> float:
        """Return the microseconds of a call under a config.

        The call is the backward if the key is a backward kernel's, else the forward. A forward's
        time is the mean of training and inference, because both share a config.
        """

    def agree(self, key: TuningKey, first: Config, second: Config) -> bool:
        """Return whether two configs return the same results, up to the order of sums."""


class Timer(Protocol):
    """Prepares workloads to be timed."""

    def open(self, workload: Tunable) -> Bench:
        """Return the workload's bench."""


def set_count(input_bytes: int, l2_bytes: int, *, least: int = 3, most: int = 64) -> int:
    """Return how many sets of inputs are several times as large as the L2, within bounds."""
    count = math.ceil(_CACHES * l2_bytes / max(1, input_bytes))
    return max(least, min(most, count))


def copy_bandwidth(device: torch.device, gib: float = 1.0) -> float:
    """Return the bytes per second that a large copy within the device reads and writes."""
    source = torch.empty(int(gib * 2**30), dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    ms = events(lambda: target.copy_(source), 10)
    return 2 * source.numel() / (statistics.median(ms) * 1e-3)


def events(
    work: Callable[[], object], repeats: int, between: Callable[[], object] | None = None
) -> list[float]:
    """Return the milliseconds of each run of ``work``; ``between`` runs before each, untimed."""
    pairs = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if between is not None:
            between()
        start.record()
        work()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


class GraphTimer:
    """Times workloads on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # All graphs share one memory pool. A pool exists as long as a graph uses it, so this graph
        # exists as long as the timer.
        self._pool_owner = torch.cuda.CUDAGraph()
        counter = torch.zeros(1, device=device)
        with torch.cuda.graph(self._pool_owner, stream=self._stream):
            counter.add_(1)
        self._memory = self._pool_owner.pool()

    def open(self, workload: Tunable) -> Bench:
        """Return a bench with several sets of inputs, so that no call has its inputs in the L2."""
        properties = torch.cuda.get_device_properties(self._device)
        if torch.cuda.memory_reserved(self._device) > properties.total_memory // 2:
            torch.cuda.empty_cache()
        first = workload.step(self._device)
        l2 = properties.L2_cache_size
        # Two sets are enough if each is larger than the L2: then each evicts the other.
        count = set_count(first.nbytes, l2, least=2 if first.nbytes > l2 else 3)
        steps = [first, *[workload.step(self._device) for _ in range(count - 1)]]
        return _GraphBench(steps, self._stream, self._memory)


class _GraphBench:
    """Times a workload by replays of a graph, with calls of each of its steps."""

    def __init__(self, steps: list[Step], stream: torch.cuda.Stream, memory: Any) -> None:
        self._steps, self._stream, self._memory = steps, stream, memory
        self._outputs: list[tuple[Tensor, ...]] = []

    def us(self, key: TuningKey, config: Config, *, careful: bool) -> float:
        with tuning.forced(key.kernel, config), self._ready():
            calls = self._calls(backward="backward" in key.kernel)
            # No kernel may be loaded while a graph is captured, so both kinds of calls run before.
            # For a forward, the first call is a training forward, and the last an inference.
            calls[-1]()
            calls[0]()
            estimate = max(1e-3, events(calls[0], 1)[0])
            # One round is enough if it takes more than a millisecond: then the gap before a graph
            # does not matter.
            rounds = 1 if estimate * len(calls) > 1.0 else math.ceil(_CALLS / len(calls))
            graph = torch.cuda.CUDAGraph()
            # Not `torch.cuda.graph`, which returns all cached memory to the driver each time.
            graph.capture_begin(pool=self._memory)
            try:
                for _ in range(rounds):
                    # The outputs must exist until the round ends. Otherwise all would have the same
                    # address, and be overwritten in the L2 before they are written to memory.
                    outputs = [call() for call in calls]
                    del outputs
            finally:
                graph.capture_end()
            try:
                total, least = _CAREFUL if careful else _QUICK
                return replay(graph, total, least) * 1e3 / (rounds * len(calls))
            finally:
                graph.reset()

    def agree(self, key: TuningKey, first: Config, second: Config) -> bool:
        results = []
        for config in (first, second):
            with tuning.forced(key.kernel, config), self._ready():
                outputs = self._steps[0].forward()
                gradients = self._steps[0].backward(outputs)
                results.append([t.detach() for t in (*outputs, *gradients)])
        torch.cuda.synchronize()
        return all(itertools.starmap(_close, zip(*results, strict=True)))

    def _calls(self, *, backward: bool) -> list[Callable[[], object]]:
        """Return the calls to capture, one or two for each set of inputs."""
        if not backward:
            # Training and inference share a config.
            training = [step.forward for step in self._steps]
            inference = [step.infer for step in self._steps]
            return [*training, *inference]
        # The outputs do not depend on the backward's config, so they are computed once.
        if not self._outputs:
            self._outputs = [step.forward() for step in self._steps]
            for step, outputs in zip(self._steps, self._outputs, strict=True):
                # This draws the output gradients, before a graph is captured.
                step.backward(outputs)
        pairs = zip(self._steps, self._outputs, strict=True)
        return [partial(step.backward, outputs) for step, outputs in pairs]

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Context manager: runs calls on the capturing stream, with a fixed dropout mask.

        The forward must run on that stream too, because autograd runs a backward on the stream of
        its forward. The seed is two numbers, as in eager calls. Under capture it would be a tensor,
        and kernels for a tensor would be compiled instead of those that are tuned.
        """
        draw, rng.draw = rng.draw, lambda device: (1, 0)
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            rng.draw = draw
        torch.cuda.current_stream().wait_stream(self._stream)


def replay(graph: torch.cuda.CUDAGraph, total: float, least: int) -> float:
    """Return the median milliseconds of a replay.

    Args:
        graph: the graph.
        total: the milliseconds for all replays.
        least: their least number.
    """
    graph.replay()
    estimate = max(1e-3, events(graph.replay, 1)[0])
    repeats = max(least, min(200, math.ceil(total / estimate)))
    return statistics.median(events(graph.replay, repeats))


def _close(expected: Tensor, actual: Tensor) -> bool:
    """Return whether two results differ by at most some roundings of the largest finite value.

    Integers, masks, infinities and NaNs must be equal.
    """
    # Empty tensors have no largest value.
    if not expected.is_floating_point() or expected.numel() == 0:
        return torch.equal(expected, actual)
    wide = torch.promote_types(expected.dtype, torch.float32)
    limit = _ROUNDINGS * torch.finfo(expected.dtype).eps
    expected, actual = expected.to(wide), actual.to(wide)
    scale = float(expected.where(expected.isfinite(), 0.0).abs().max())
    return torch.allclose(expected, actual, rtol=0.0, atol=limit * scale, equal_nan=True)
