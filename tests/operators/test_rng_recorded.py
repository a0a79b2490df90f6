"""Dropout in activation checkpointing, CUDA graphs, torch.compile and make_fx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.core.random import rng
from fusedops.core.spec import Spec
from masks import DROPOUT_SPECS, Problem, Run
from support import as_tuple, random_like

every = pytest.mark.parametrize("spec", DROPOUT_SPECS, ids=lambda spec: spec.name)


def _assert_equal(a: Run, b: Run) -> None:
    for x, y in zip(a.outputs, b.outputs, strict=True):
        assert torch.equal(x, y)
    assert a.gradients.keys() == b.gradients.keys()
    for name in a.gradients:
        assert torch.equal(a.gradients[name], b.gradients[name]), name


# Compiling a graph takes seconds.
pytestmark = pytest.mark.shared("spec", most=2)


# --- activation checkpointing ---------------------------------------------------------------------


@every
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_changes_nothing(spec: Spec, use_reentrant: bool, device: torch.device) -> None:
    """The checkpointed part has two calls. Recomputation restores the random state of both."""
    problem = Problem(spec, 6, 40, device)
    calls = 0

    def block(**tensors: Tensor | None) -> tuple[Tensor, ...]:
        nonlocal calls
        calls += 1
        first, *_ = problem.forward(0.5)
        rows = tensors[spec.tensors[0]]
        assert rows is not None
        options = {**problem.options, "p": 0.3}
        # The square needs recomputing also where the operator itself saves nothing.
        outputs = spec.call(
            **{**tensors, spec.tensors[0]: rows + first.square()}, **problem.absent, **options
        )
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def checkpointed(**tensors: Tensor | None) -> tuple[Tensor, ...]:
        names = list(tensors)
        function = lambda *values: block(**dict(zip(names, values, strict=True)))  # noqa: E731
        return checkpoint(function, *tensors.values(), use_reentrant=use_reentrant)

    def run(function: Callable[..., tuple[Tensor, ...]]) -> Run:
        torch.manual_seed(21)
        outputs = function(**problem.tensors)
        leaves = {name: tensor for name, tensor in problem.tensors.items() if tensor is not None}
        for leaf in leaves.values():
            leaf.grad = None
        # Reentrant checkpointing works with backward() alone.
        torch.autograd.backward(outputs, random_like(outputs))
        gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        return Run(outputs, gradients, outputs[-1] != 0, outputs[-1] != 0)

    plain = run(block)
    assert calls == 1
    recomputed = run(checkpointed)
    assert calls == 3, "nothing was recomputed"
    _assert_equal(plain, recomputed)
    # Another seed changes the mask, so the equality above means something.
    torch.manual_seed(22)
    assert not torch.equal(block(**problem.tensors)[-1], plain.outputs[-1])


# --- CUDA graphs ----------------------------------------------------------------------------------


def _capture(
    problem: Problem, p: float
) -> tuple[torch.cuda.CUDAGraph, Run, tuple[torch.Tensor, ...]]:
    """A graph of a forward and backward, the run that replays overwrite, and the cotangents.

    The caller must hold all of them: a graph does not own the memory that it reads.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        problem.run(p)  # kernels are built outside the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    cotangents = random_like(problem.run(p).outputs)
    leaves = {name: tensor for name, tensor in problem.tensors.items() if tensor is not None}
    with torch.cuda.graph(graph):
        outputs = problem.forward(p)
        grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    gradients = dict(zip(leaves, grads, strict=True))
    return (
        graph,
        Run(outputs, gradients, outputs[-1], gradients[problem.spec.tensors[0]]),
        cotangents,
    )


def _replay(graph: torch.cuda.CUDAGraph, run: Run) -> Run:
    graph.replay()
    torch.cuda.synchronize()
    outputs = tuple(output.detach().clone() for output in run.outputs)
    gradients = {name: gradient.clone() for name, gradient in run.gradients.items()}
    return Run(outputs, gradients, run.forward.detach() != 0, run.backward != 0)


@every
@pytest.mark.gpu
def test_graph_replays_have_different_masks(spec: Spec, device: torch.device) -> None:
    problem = Problem(spec, 64, 256, device)
    graph, static, _cotangents = _capture(problem, 0.5)
    runs = [_replay(graph, static) for _ in range(4)]
    for run in runs:
        assert torch.equal(run.forward, run.backward)
        assert 0.4 < run.forward.double().mean().item() < 0.6
    for i, run in enumerate(runs):
        assert all(not torch.equal(run.forward, other.forward) for other in runs[i + 1 :])


@every
@pytest.mark.gpu
def test_graph_replays_follow_the_seed(spec: Spec, device: torch.device) -> None:
    """A seed before a replay determines its mask, as for `F.dropout`; eager calls have others."""
    problem = Problem(spec, 16, 64, device)
    graph, static, _cotangents = _capture(problem, 0.5)
    torch.manual_seed(9)
    first, second = _replay(graph, static), _replay(graph, static)
    eager = problem.run(0.5)
    torch.manual_seed(9)
    _assert_equal(_replay(graph, static), first)
    _assert_equal(_replay(graph, static), second)
    assert not torch.equal(first.forward, second.forward)
    assert not torch.equal(first.forward, eager.forward) and not torch.equal(
        second.forward, eager.forward
    )


@every
@pytest.mark.gpu
def test_graph_without_dropout_equals_eager(spec: Spec, device: torch.device) -> None:
    problem = Problem(spec, 16, 64, device)
    expected = problem.run(0.0)
    graph, static, _cotangents = _capture(problem, 0.0)
    _assert_equal(_replay(graph, static), expected)


# --- torch.compile --------------------------------------------------------------------------------


@pytest.fixture
def compiled(
    device: torch.device, fresh_dynamo: None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """torch.compile with Inductor on a GPU, elsewhere without, as C++ takes seconds to compile."""
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    return lambda function: torch.compile(function, fullgraph=True, backend=backend)


@every
def test_compiled_calls_have_different_masks(
    spec: Spec, compiled: Callable[..., Any], device: torch.device
) -> None:
    problem = Problem(spec, 9, 72, device)
    call = compiled(spec.call)
    runs = [problem.run(0.5, call) for _ in range(3)]
    for run in runs:
        assert torch.equal(run.forward, run.backward)
        assert 0.3 < run.forward.double().mean().item() < 0.7
    for i, run in enumerate(runs):
        assert all(not torch.equal(run.forward, other.forward) for other in runs[i + 1 :])


@every
def test_compiled_calls_follow_the_seed(
    spec: Spec, compiled: Callable[..., Any], device: torch.device
) -> None:
    problem = Problem(spec, 9, 72, device)
    call = compiled(spec.call)
    problem.run(0.5, call)
    torch.manual_seed(31)
    first, second = problem.run(0.5, call), problem.run(0.5, call)
    torch.manual_seed(31)
    _assert_equal(problem.run(0.5, call), first)
    _assert_equal(problem.run(0.5, call), second)
    torch.manual_seed(32)
    assert not torch.equal(problem.run(0.5, call).forward, first.forward)


@every
def test_compiled_without_dropout_draws_nothing(
    spec: Spec, compiled: Callable[..., Any], device: torch.device
) -> None:
    problem = Problem(spec, 9, 72, device)
    call = compiled(spec.call)
    assert problem.run(0.0, call).forward.all()
    # Two calls are equal, as nothing in them is random.
    _assert_equal(problem.run(0.0, call), problem.run(0.0, call))
    assert problem.run(0.5, call, training=False).forward.all()
    assert not problem.run(1.0, call).forward.any()


@every
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traced_calls_have_different_masks(spec: Spec, mode: str, device: torch.device) -> None:
    """`make_fx` records the drawing of a state, not the state."""
    problem = Problem(spec, 9, 72, device)
    tensors = {name: t.detach() for name, t in problem.tensors.items() if t is not None}
    options = {**problem.absent, **problem.options, "p": 0.5}

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        return as_tuple(spec.call(**dict(zip(tensors, values, strict=True)), **options))

    graph = make_fx(call, tracing_mode=mode)(*tensors.values())
    torch.manual_seed(31)
    first, second = (graph(*tensors.values())[-1] for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(31)
    assert torch.equal(graph(*tensors.values())[-1], first)


def _counting_backend() -> tuple[Callable[..., Any], list[int]]:
    """A backend, and a list to which it appends the number of random operators of each graph."""
    counts: list[int] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        counts.append(sum("randint" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compiler), counts


@pytest.mark.kernels
@pytest.mark.parametrize(("calls", "draws"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_compiled_graph_draws_states_of_several_calls_at_once(
    calls: int, draws: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph draws once for as many calls as a pool has states. All masks differ."""
    assert rng._POOL == 64
    monkeypatch.setattr(rng, "_POOL", 4)  # a graph of 64 calls takes ten seconds
    torch._dynamo.reset()
    backend, counts = _counting_backend()
    x = torch.ones(4, 64, device=device, requires_grad=True)

    def function(x: Tensor) -> list[Tensor]:
        return [x.sin()] + [fusedops.bias_dropout_add(x, None, None, p=0.5) for _ in range(calls)]

    masks = [y != 0.0 for y in torch.compile(function, fullgraph=True, backend=backend)(x)[1:]]
    assert counts[0] == draws
    for i, mask in enumerate(masks):
        assert all(not torch.equal(mask, other) for other in masks[i + 1 :])


@every
@pytest.mark.parametrize("dropout_before", [False, True])
def test_compiled_checkpoint_changes_nothing(
    spec: Spec, dropout_before: bool, compiled: Callable[..., Any], device: torch.device
) -> None:
    """Two parts of a compiled function are recomputed.

    One operator draws their states, in the first part or before it.
    """
    problem = Problem(spec, 6, 40, device)
    name = spec.tensors[0]

    def part(rows: Tensor) -> Tensor:
        first = problem.forward(0.5)[0]
        options = {**problem.options, "p": 0.3}
        # The square needs recomputing also where the operator itself saves nothing.
        inputs = {**problem.tensors, name: rows + first.square()}
        return as_tuple(spec.call(**inputs, **problem.absent, **options))[0].reshape(first.shape)

    def run(call_part: Callable[..., Tensor]) -> list[Tensor]:
        def function(rows: Tensor) -> Tensor:
            if dropout_before:
                rows = rows + fusedops.bias_dropout_add(rows, None, None, p=0.5)
            y = call_part(part, rows)
            z = call_part(part, rows * y.mean())
            return y + z * fusedops.bias_dropout_add(y, None, None, p=0.5)

        torch._dynamo.reset()
        torch.manual_seed(21)
        output = compiled(function)(problem.rows)
        leaves = [tensor for tensor in problem.tensors.values() if tensor is not None]
        return [output, *torch.autograd.grad(output.square().sum(), leaves)]

    # A compiler rounds differently in different graphs. With other masks the results would differ
    # much more.
    plain = run(lambda function, rows: function(rows))
    recomputed = run(lambda function, rows: checkpoint(function, rows, use_reentrant=False))
    for a, b in zip(recomputed, plain, strict=True):
        scale = b.double().abs().max().item()
        assert (a.double() - b.double()).abs().max().item() <= 64 * torch.finfo(b.dtype).eps * scale


@pytest.mark.kernels
@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_compiled_under_a_memory_budget(budget: float, device: torch.device) -> None:
    """The backward has the forward's mask, whatever the partitioner recomputes."""
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    x = torch.randn(12, 64, device=device, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return fusedops.bias_dropout_add(x.sin(), None, None, p=0.5).exp()

    with functorch_config.patch(activation_memory_budget=budget):
        y = torch.compile(function, fullgraph=True, backend=backend)(x)
        (dx,) = torch.autograd.grad(y.sum(), [x])
    assert torch.equal(y != 1.0, dx != 0.0)
