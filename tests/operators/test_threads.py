"""Calls in several threads: results while kernels are being built, and random states."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.core.compat import fake
from fusedops.core.random import rng
from fusedops.core.spec import Spec
from masks import DROPOUT_SPECS, Problem
from support import ALL_SPECS, INTERPRETED, as_tuple, random_like, tensors_of

THREADS = 4
ROUNDS = 3

every = pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)


@pytest.fixture(autouse=True)
def frequent_switching() -> Iterator[None]:
    """Threads take turns every few bytecodes, which makes races likely."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _together(work: Callable[[int], Any]) -> list[Any]:
    """``work(i)`` in THREADS threads that start at the same moment."""
    barrier = threading.Barrier(THREADS)

    def run(i: int) -> Any:
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


def _step(spec: Spec, rows: int, cols: int, values: dict[str, Tensor], p: float) -> list[Tensor]:
    sample = spec.benchmark((rows, cols), torch.float32, next(iter(values.values())).device)
    leaves = {name: t.detach().clone().requires_grad_() for name, t in values.items()}
    options = {**sample.options, **({"p": p} if spec.has_dropout else {})}
    outputs = as_tuple(spec.call(**leaves, **options))
    return [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), random_like(outputs))]


def test_log_is_silenced_in_one_thread(caplog: pytest.LogCaptureFixture) -> None:
    """Outside all blocks nothing is silenced, in whatever order threads leave their blocks."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    inside, left = threading.Event(), threading.Event()

    def other() -> None:
        with fake.quiet():
            inside.set()
            assert left.wait(30)
            logger.error("silenced")

    with ThreadPoolExecutor(1) as pool:
        with fake.quiet():
            work = pool.submit(other)
            assert inside.wait(30)
            logger.error("silenced")
        logger.error("logged outside a block")
        left.set()
        work.result()
    logger.error("logged after all blocks")
    assert caplog.messages == ["logged outside a block", "logged after all blocks"]


@pytest.mark.kernels
def test_equal_functions_in_all_threads(device: torch.device) -> None:
    """Each thread compiles the function, and one of them registers its operator."""
    for k in range(ROUNDS):
        functions = [
            fusedops.rowwise(lambda x, k=k: torch.tanh(x * 7.25) - k, strict=True)
            for _ in range(THREADS)
        ]
        x = torch.randn(3, 16, device=device, requires_grad=True)
        for (y,) in _together(lambda i, functions=functions, x=x: [functions[i](x)]):  # type: ignore[misc]
            torch.testing.assert_close(y, torch.tanh(x * 7.25) - k)


@every
def test_threads_that_build_kernels_get_their_own_results(spec: Spec, device: torch.device) -> None:
    """The widths are new and differ between threads, so that all threads build kernels."""
    sizes = [(3 + i, 41 + 6 * i) for i in range(THREADS)]
    inputs = [
        tensors_of(spec, spec.benchmark((rows, cols), torch.float32, device))
        for rows, cols in sizes
    ]

    rounds = 4 * ROUNDS

    def work(i: int) -> list[list[Tensor]]:
        return [
            _step(spec, *sizes[(i + n) % THREADS], inputs[(i + n) % THREADS], 0.0)
            for n in range(rounds)
        ]

    results = _together(work)
    alone = [_step(spec, *sizes[i], inputs[i], 0.0) for i in range(THREADS)]
    for i, steps in enumerate(results):
        for n, tensors in enumerate(steps):
            for a, b in zip(tensors, alone[(i + n) % THREADS], strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("spec", DROPOUT_SPECS, ids=lambda spec: spec.name)
def test_masks_are_all_different(spec: Spec, device: torch.device) -> None:
    """All forwards have different masks. A backward has the mask of its forward."""
    problems = [Problem(spec, 4, 40, device) for _ in range(THREADS)]
    runs = [
        run
        for runs_of_thread in _together(lambda i: [problems[i].run(0.5) for _ in range(ROUNDS)])
        for run in runs_of_thread
    ]
    assert all(torch.equal(run.forward, run.backward) for run in runs)
    assert all(not torch.equal(a.forward, b.forward) for a, b in combinations(runs, 2))


@pytest.mark.kernels
def test_no_state_is_drawn_twice(device: torch.device) -> None:
    device = torch.empty(0, device=device).device  # with its index, as tensors have it
    draws = [
        draw
        for draws_of_thread in _together(lambda i: [rng.draw(device) for _ in range(200)])
        for draw in draws_of_thread
    ]
    assert len(set(draws)) == len(draws) == 200 * THREADS


if INTERPRETED:

    def test_interpreter_runs_one_kernel_at_a_time(
        device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its position in the grid is global, so two kernels at once would mix up their rows."""
        from triton.runtime.interpreter import GridExecutor

        running: list[None] = []
        counts: list[int] = []
        original = GridExecutor.__call__

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            running.append(None)
            counts.append(len(running))
            time.sleep(0.002)
            try:
                return original(self, *args, **kwargs)
            finally:
                running.pop()

        monkeypatch.setattr(GridExecutor, "__call__", counted)
        spec = ALL_SPECS[0]
        values = tensors_of(spec, spec.benchmark((4, 40), torch.float32, device))
        _together(lambda i: _step(spec, 4, 40, values, 0.0))
        assert len(counts) >= 2 * THREADS
        assert max(counts) == 1


@every
def test_backward_in_another_thread(spec: Spec, device: torch.device) -> None:
    sample = spec.benchmark((6, 40), torch.float32, device)
    leaves = {name: t.requires_grad_() for name, t in tensors_of(spec, sample).items()}
    options = {**sample.options, **({"p": 0.0} if spec.has_dropout else {})}
    outputs = as_tuple(spec.call(**leaves, **options))
    cotangents = random_like(outputs)
    expected = torch.autograd.grad(outputs, list(leaves.values()), cotangents, retain_graph=True)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(torch.autograd.grad, outputs, list(leaves.values()), cotangents)
        assert all(torch.equal(a, b) for a, b in zip(job.result(), expected, strict=True))
