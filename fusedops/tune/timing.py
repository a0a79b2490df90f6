"""How a config is timed: many calls in one CUDA graph, on sets of inputs that together exceed the L2.

A graph leaves the host out, and no call finds its inputs in the cache. Importable without a GPU; timing needs one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core import rng, tuning
from ..core.question import Config, Question
from .workloads import Step, Workload

__all__ = ["Bench", "GraphTimer", "Timer", "copy_bandwidth", "events", "set_count"]

_CACHES = 4  # the sets' total, in sizes of the L2
_CALLS = 16  # the least calls in a graph, so that the gap before it is spread thin
_QUICK_MS, _CAREFUL_MS = 2.0, 8.0
# How much further two configs' results may lie apart than the roundings of their dtype: their sums' orders differ.
_ROUNDINGS = 8.0


class Bench(Protocol):
    """A workload, ready to be timed."""

    def us(self, question: Question, config: Config, *, careful: bool) -> float:
        """Microseconds of the backward, if the question is one's, under a config, or of the forward.

        The forward's are the mean of training's and of inference's, which keeps nothing.
        """

    def agree(self, question: Question, one: Config, other: Config) -> bool:
        """Whether two configs give the same results, up to the order of sums."""


class Timer(Protocol):
    """Makes workloads ready."""

    def open(self, workload: Workload) -> Bench:
        """The workload's bench."""


def set_count(input_bytes: int, l2_bytes: int, *, least: int = 3, most: int = 64) -> int:
    """How many sets of inputs of that size are several times the L2; bounded for very small and very large ones."""
    return max(least, min(most, math.ceil(_CACHES * l2_bytes / max(1, input_bytes))))


def copy_bandwidth(device: torch.device, gib: float = 1.0) -> float:
    """Bytes a second, read and written, of a large copy within the device."""
    source = torch.empty(int(gib * 2**30), dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    ms = events(lambda: target.copy_(source), 10)
    return 2 * source.numel() / (statistics.median(ms) * 1e-3)


def events(work: Callable[[], object], repeats: int, between: Callable[[], object] | None = None) -> list[float]:
    """Milliseconds of each repeat; ``between`` is done before each, untimed."""
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
    """Times on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # One pool for the outputs of all graphs, which lives as long as a graph does that has it.
        self._first = torch.cuda.CUDAGraph()
        counter = torch.zeros(1, device=device)
        with torch.cuda.graph(self._first, stream=self._stream):
            counter.add_(1)
        self._memory = self._first.pool()

    def open(self, workload: Workload) -> Bench:
        """Inputs, several sets of them."""
        properties = torch.cuda.get_device_properties(self._device)
        if torch.cuda.memory_reserved(self._device) > properties.total_memory // 2:
            torch.cuda.empty_cache()
        first = Step(workload, self._device)
        l2 = properties.L2_cache_size
        count = set_count(first.nbytes, l2, least=2 if first.nbytes > l2 else 3)
        steps = [first, *[Step(workload, self._device) for _ in range(count - 1)]]
        return _GraphBench(steps, self._stream, self._memory)


class _GraphBench:
    def __init__(self, steps: list[Step], stream: torch.cuda.Stream, memory: Any) -> None:
        self._steps, self._stream, self._memory = steps, stream, memory
        self._outputs: list[tuple[Tensor, ...]] = []

    def us(self, question: Question, config: Config, *, careful: bool) -> float:
        with tuning.forced(question.kernel, config), self._ready():
            calls = self._calls("backward" in question.kernel)
            calls[-1]()  # of the other kind, if there are two: nothing is to be loaded while a graph is captured
            calls[0]()
            estimate = max(1e-3, events(calls[0], 1)[0])
            rounds = 1 if estimate * len(calls) > 1.0 else math.ceil(_CALLS / len(calls))
            graph = torch.cuda.CUDAGraph()
            # Not by `torch.cuda.graph`, which gives all cached memory back to the system each time.
            graph.capture_begin(pool=self._memory)
            try:
                for _ in range(rounds):
                    # Held until the round ends: an output put where the last one lay would be overwritten in the L2.
                    held = [call() for call in calls]
                    del held
            finally:
                graph.capture_end()
            try:
                return _replay(graph, careful) * 1e3 / (rounds * len(calls))
            finally:
                graph.reset()

    def agree(self, question: Question, one: Config, other: Config) -> bool:
        results = []
        for config in (one, other):
            with tuning.forced(question.kernel, config), self._ready():
                outputs = self._steps[0].forward()
                gradients = self._steps[0].backward(outputs)
                results.append([t.detach() for t in (*outputs, *gradients)])
        torch.cuda.synchronize()
        return all(_close(a, b) for a, b in zip(*results, strict=True))

    def _calls(self, backward: bool) -> list[Callable[[], object]]:
        if not backward:  # one config serves training and inference
            return [*[step.forward for step in self._steps], *[step.infer for step in self._steps]]
        if not self._outputs:  # they depend on no config of the backward
            self._outputs = [step.forward() for step in self._steps]
            for step, outputs in zip(self._steps, self._outputs, strict=True):
                step.backward(outputs)  # makes the cotangents
        pairs = zip(self._steps, self._outputs, strict=True)
        return [lambda step=step, out=out: step.backward(out) for step, out in pairs]  # type: ignore[misc]

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """On the stream that is captured, where a backward runs too if its forward did; with one mask for all calls.

        Two numbers for a seed, as eager calls have them: a graph would draw a tensor, for which the kernels that were
        compiled ahead are not.
        """
        draw, rng.draw = rng.draw, lambda device: (1, 0)
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            rng.draw = draw
        torch.cuda.current_stream().wait_stream(self._stream)


def _replay(graph: torch.cuda.CUDAGraph, careful: bool) -> float:
    """Milliseconds of a replay, the median of few or many."""
    graph.replay()
    estimate = max(1e-3, events(graph.replay, 1)[0])
    wanted = _CAREFUL_MS if careful else _QUICK_MS
    return statistics.median(events(graph.replay, max(5 if careful else 3, min(200, math.ceil(wanted / estimate)))))


def _close(one: Tensor, other: Tensor) -> bool:
    """Within some roundings of the largest value."""
    wide = torch.promote_types(one.dtype, torch.float32)
    scale = float(one.abs().max().to(wide))
    return float((one.to(wide) - other.to(wide)).abs().max()) <= _ROUNDINGS * torch.finfo(one.dtype).eps * scale
