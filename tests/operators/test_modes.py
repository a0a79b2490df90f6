"""Dispatch modes, tensor subclasses, checkpoints and threads change no value, gradient or mask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from fusedops.core.spec import Spec
from masks import DROPOUT_SPECS, Problem, rng_state
from pairs import Pair, close, pair, second_order
from support import ALL_SPECS, KERNEL_PATH, as_tuple
from wrappers import Wrapper, wrapped

every = pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)
droppers = pytest.mark.parametrize("spec", DROPOUT_SPECS, ids=lambda spec: spec.name)

Manager = AbstractContextManager[Any]
_mode = partial(FlopCounterMode, display=False)
SEED = 5


def _drawn(both: Pair) -> Callable[..., tuple[Tensor, ...]]:
    """The operator with a mask from the generator, as in a user's call."""
    spec, sample = both.spec, both.sample
    return lambda *values: as_tuple(
        spec.call(
            **{**sample.tensors, **dict(zip(both.names, values, strict=True))}, **sample.options
        )
    )


# --- another thread compiles ----------------------------------------------------------------------


@contextmanager
def _another_thread_compiling() -> Iterator[None]:
    """Inside the block another thread is in the middle of a `torch.compile`."""
    started, release = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        started.set()
        assert release.wait(60)
        return graph.forward

    function = torch.compile(lambda t: t.sin() + 1.0, backend=backend)
    thread = threading.Thread(target=function, args=(torch.ones(3),))
    thread.start()
    try:
        assert started.wait(60)
        yield  # from PyTorch 2.13 on `torch.compiler.is_compiling()` is true in all threads here
    finally:
        release.set()
        thread.join()


@every
def test_eager_calls_while_another_thread_compiles(
    spec: Spec, device: torch.device, fresh_dynamo: None
) -> None:
    """Derivatives, masks and the generator's state are those of calls without the other thread."""
    both = pair(spec, device)
    weights = both.cotangents()

    def run() -> tuple[tuple[Tensor, ...], Tensor]:
        torch.manual_seed(SEED)
        return second_order(_drawn(both), both.tensors, weights), rng_state(device)

    alone = run()
    with _another_thread_compiling():
        concurrent = run()
    close(concurrent, alone)


# --- dropout under modes and checkpoints ----------------------------------------------------------


@droppers
@pytest.mark.parametrize("where", ["forward", "backward", "both"])
def test_mask_under_a_dispatch_mode(spec: Spec, where: str, device: torch.device) -> None:
    """For a seed, mask and final state of the generator are the same with and without the mode."""
    problem = Problem(spec, 4, 40, device)

    def run(forward: Manager, backward: Manager) -> tuple[Tensor, ...]:
        torch.manual_seed(SEED)
        with forward:
            outputs = problem.forward(0.5)
        state = rng_state(device)
        with backward:
            grads = torch.autograd.grad(
                outputs, problem.rows, [torch.ones_like(o) for o in outputs]
            )
        return (*(o.detach() for o in outputs), *grads, state)

    plain = run(nullcontext(), nullcontext())
    under_mode = run(
        _mode() if where != "backward" else nullcontext(),
        _mode() if where != "forward" else nullcontext(),
    )
    torch.testing.assert_close(under_mode, plain, rtol=0.0, atol=0.0)


def _ours_saved(_: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    ours = operator.namespace == "fusedops"
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


def _all_recomputed(_: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def _selective(policy: Callable[..., CheckpointPolicy]) -> Callable[..., Any]:
    return partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, policy),
    )


CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "selective, recomputed": _selective(_all_recomputed),
    "selective, saved": _selective(_ours_saved),
}


@every
@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("where", ["none", "forward", "backward"])
def test_checkpoint(spec: Spec, kind: str, where: str, device: torch.device) -> None:
    """A recomputed call has the mask and gradients of a call that is not recomputed.

    A dispatch mode may be active in the forward or in the backward only.
    """
    both = pair(spec, device)
    weights, function = both.cotangents(), _drawn(both)

    def block(*values: Tensor) -> tuple[Tensor, ...]:
        return function(*(value * 2.0 for value in values))

    def run(call: Callable[..., Any], forward: Manager, backward: Manager) -> tuple[Tensor, ...]:
        leaves = both.leaves()
        torch.manual_seed(SEED)
        with forward:
            outputs = call(*leaves)
        torch.rand(3, device=device)  # changes the generator's state before the recomputation
        with backward:
            torch.autograd.backward(outputs, weights)
        return (*(o.detach() for o in outputs), *(leaf.grad for leaf in leaves))

    expected = run(block, nullcontext(), nullcontext())
    result = run(
        partial(CHECKPOINTS[kind], block),
        _mode() if where == "forward" else nullcontext(),
        _mode() if where == "backward" else nullcontext(),
    )
    close(result, expected)


# --- subclasses -----------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("position", ["all", "first", "last"])
def test_wrapper_subclass_among_the_arguments(
    spec: Spec, position: str, device: torch.device
) -> None:
    """All, the first or the last argument is a subclass without storage, which logs operators."""
    both = pair(spec, device)
    weights = both.cotangents()
    outputs = both.ours(*(leaves := both.leaves()))
    expected = (*outputs, *torch.autograd.grad(outputs, leaves, weights))
    chosen = {"all": range(len(leaves)), "first": [0], "last": [len(leaves) - 1]}[position]
    leaves = tuple(
        (Wrapper(t) if i in chosen else t.clone()).requires_grad_()
        for i, t in enumerate(both.tensors)
    )
    Wrapper.log.clear()
    outputs = both.ours(*leaves)
    if position == "all":
        assert all(isinstance(output, Wrapper) for output in outputs)
    cotangents = [
        w if type(o) is Tensor else Wrapper(w) for o, w in zip(outputs, weights, strict=True)
    ]
    results = (*outputs, *torch.autograd.grad(outputs, leaves, cotangents))
    close(tuple(t.held if isinstance(t, Wrapper) else t for t in results), expected)
    if KERNEL_PATH:
        assert sum(name.startswith("fusedops.") for name in Wrapper.log) >= 2, (
            "the subclass did not dispatch the operators"
        )


@every
def test_wrapper_subclass_as_a_cotangent(spec: Spec, device: torch.device) -> None:
    """The forward had plain tensors."""
    both = pair(spec, device)
    weights = both.cotangents()
    leaves = both.leaves()
    outputs = both.ours(*leaves)
    expected = torch.autograd.grad(outputs, leaves, weights, retain_graph=True)
    result = torch.autograd.grad(outputs, leaves, wrapped(weights))
    close(tuple(t.held if isinstance(t, Wrapper) else t for t in result), expected)


# --- lazy tensors ---------------------------------------------------------------------------------


def _negated(t: Tensor) -> Tensor:
    """A tensor equal to ``t`` with a lazy negation: its memory contains the negatives."""
    result = torch._neg_view(-t.detach())
    assert result.is_neg()
    return result


@every
def test_arguments_and_cotangents_with_a_lazy_negation(spec: Spec, device: torch.device) -> None:
    """Values, and first and second derivatives for one argument, for all, and for cotangents."""
    both = pair(spec, device)
    weights = both.cotangents()
    with torch.no_grad():
        values = both.theirs(*both.tensors)
    expected = second_order(both.theirs, both.tensors, weights)
    count = len(both.tensors)
    for chosen in [*([i] for i in range(count)), range(count)]:
        tensors = [_negated(t) if i in chosen else t for i, t in enumerate(both.tensors)]
        with torch.no_grad():
            close(both.ours(*tensors), values)
        close(second_order(both.ours, tensors, weights), expected)
    leaves = both.leaves()
    outputs = both.ours(*leaves)
    plain = torch.autograd.grad(outputs, leaves, weights, retain_graph=True)
    close(torch.autograd.grad(outputs, leaves, [_negated(w) for w in weights]), plain)


@every
@pytest.mark.parametrize("position", ["all", "first", "last"])
def test_zero_tensors_as_cotangents(spec: Spec, position: str, device: torch.device) -> None:
    """They have no memory; forward-mode differentiation creates them."""
    both = pair(spec, device)
    weights = both.cotangents()
    chosen = {"all": range(len(weights)), "first": [0], "last": [len(weights) - 1]}[position]
    zeros = [
        torch._efficientzerotensor(w.shape, dtype=w.dtype, device=device) if i in chosen else w
        for i, w in enumerate(weights)
    ]
    dense = [torch.zeros_like(w) if i in chosen else w for i, w in enumerate(weights)]
    leaves = both.leaves()
    result = torch.autograd.grad(both.ours(*leaves), leaves, zeros)
    leaves = both.leaves()
    close(tuple(t + 0.0 for t in result), torch.autograd.grad(both.theirs(*leaves), leaves, dense))


# --- draws in concurrent threads ------------------------------------------------------------------


@pytest.mark.gpu
def test_concurrent_threads_share_the_generator(device: torch.device) -> None:
    """The offset never decreases, and at the end it includes all draws of both threads."""
    problem = Problem(DROPOUT_SPECS[0], 4, 40, device)
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    rounds = 2000

    def draw_torch() -> None:
        torch.rand(8, device=device)

    def draw_ours() -> None:
        problem.forward(0.5)

    def advance(draw: Callable[[], None]) -> int:
        before = generator.get_offset()
        draw()
        return generator.get_offset() - before

    steps = [advance(draw) for draw in (draw_torch, draw_ours)]
    assert all(step > 0 for step in steps)
    offsets: list[int] = []
    barrier = threading.Barrier(2)

    def native() -> None:
        barrier.wait()
        for _ in range(rounds):
            draw_torch()
            offsets.append(generator.get_offset())

    start = generator.get_offset()
    thread = threading.Thread(target=native)
    thread.start()
    barrier.wait()
    for _ in range(rounds):
        draw_ours()
    thread.join()
    assert offsets == sorted(offsets)
    assert generator.get_offset() == start + rounds * sum(steps)
