"""CUDA graphs of operators of slices and of loss heads: each replay computes from new inputs.

Replays read and write the memory of the captured call, so that each one gets new values in it. Their
results and gradients are compared with those of PyTorch's operators in fp64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedops
from fusedops.backend.passes import loss_heads
from fusedops.core.launches import launch, tables
from support import DEVICE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]

ROWS, SLICES, WIDTH, CLASSES = 70, 5, 24, 300
TABLES = (9, 5, 12, 3)
IGNORED = -100


@pytest.fixture(autouse=True)
def every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let logits of any size be fused."""
    monkeypatch.setattr(loss_heads, "_LEAST_BYTES", 0)


def _normalised(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(F.layer_norm(x, x.shape[-1:], weight))


_FUSED = fusedops.rowwise(_normalised)


class _Foreach(nn.Module):
    """A function of slices in separate tensors, by `foreach`."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH) for _ in range(SLICES)])

    def forward(self, x: Tensor) -> Tensor:
        slices = [part * 2 for part in x.unbind(1)]
        return torch.stack(_FUSED.foreach(slices, list(self.weights)), 1)

    def plain(self, x: Tensor) -> Tensor:
        pairs = zip(x.unbind(1), self.weights, strict=True)
        return torch.stack([_normalised(part * 2, weight) for part, weight in pairs], 1)


class _Loop(_Foreach):
    """The same as a loop, which the backend makes one operator."""

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x)


class _Lookups(nn.Module):
    """Norms of looked-up rows, which the operator reads from their tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, WIDTH) for rows in TABLES])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in TABLES])
        for parameter in self.norms.parameters():
            nn.init.normal_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        pairs = zip(self.tables, self.norms, strict=True)
        looked_up = [torch.tanh(norm(table(ids[:, k]))) for k, (table, norm) in enumerate(pairs)]
        return torch.cat(looked_up, -1)

    plain = forward


class _Head(nn.Module):
    """A head and its loss, by the functional; or as a product and a cross-entropy."""

    def __init__(self, *, is_plain: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.is_plain = is_plain

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        if self.is_plain:
            return self.plain(x, target)
        mib = 40 * CLASSES * 4 / 2**20  # the second of two chunks is smaller
        return fusedops.linear_cross_entropy(x, self.head.weight, target, chunk_mib=mib)

    def plain(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), target)


def _slices() -> list[Tensor]:
    return [torch.randn(ROWS, SLICES, WIDTH, device=DEVICE, requires_grad=True)]


def _indices() -> list[Tensor]:
    return [torch.stack([torch.randint(n, (ROWS,), device=DEVICE) for n in TABLES], 1)]


def _rows_and_targets() -> list[Tensor]:
    target = torch.randint(CLASSES, (ROWS,), device=DEVICE)
    ignored = torch.rand(ROWS, device=DEVICE) < 0.3  # another number in each replay
    x = torch.randn(ROWS, WIDTH, device=DEVICE, requires_grad=True)
    return [x, target.masked_fill(ignored, IGNORED)]


# Each model, its inputs, and whether the backend compiles it (else it calls operators in eager).
CASES: dict[str, tuple[Callable[[], Any], Callable[[], list[Tensor]], bool]] = {
    "foreach": (_Foreach, _slices, False),
    "foreach, compiled": (_Foreach, _slices, True),
    "loop": (_Loop, _slices, True),
    "lookups": (_Lookups, _indices, True),
    "head": (_Head, _rows_and_targets, False),
    "head, compiled": (_Head, _rows_and_targets, True),
    "head, found by the backend": (lambda: _Head(is_plain=True), _rows_and_targets, True),
}
COMPILED = [name for name, (_, _, is_compiled) in CASES.items() if is_compiled]


def _leaves(model: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that get gradients."""
    return [t for t in (*inputs, *model.parameters()) if t.requires_grad]


def _step(call: Callable[..., Tensor], leaves: list[Tensor], inputs: Any, g: Tensor) -> Any:
    """Return the result of a call, and the gradients from a cotangent."""
    result = call(*inputs)
    return [result, *torch.autograd.grad(result, leaves, g)]


def _in_fp64(model: Any, inputs: Sequence[Tensor], g: Tensor) -> list[Tensor]:
    """Return what PyTorch's operators compute in fp64."""
    wide: Any = copy.deepcopy(model).double()
    wide_inputs = [
        t.detach().double().requires_grad_() if t.is_floating_point() else t for t in inputs
    ]
    results = _step(wide.plain, _leaves(wide, wide_inputs), wide_inputs, g.double())
    return [result.detach() for result in results]


def _check(actual: Sequence[Tensor], model: Any, inputs: Sequence[Tensor], g: Tensor) -> None:
    """Check a result and gradients. All are sums of at most 70 or 300 terms of magnitude 10."""
    expected = _in_fp64(model, inputs, g)
    for ours, exact in zip(actual, expected, strict=True):
        # PyTorch's products of fp32 are in fp32: a rounding for each term, all in one direction.
        bound = 300 * torch.finfo(torch.float32).eps * max(1.0, float(exact.abs().max()))
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=bound)


def _renewed(inputs: Sequence[Tensor], make_inputs: Callable[[], list[Tensor]]) -> None:
    """Write new values into inputs."""
    with torch.no_grad():
        for held, new in zip(inputs, make_inputs(), strict=True):
            held.copy_(new)


def test_tables_are_written_after_pytorch_has_filled_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under deterministic algorithms new memory is filled, on the stream that allocates it."""
    monkeypatch.setattr(tables, "_arenas", {})
    monkeypatch.setattr(tables, "_recorded_arenas", {})
    device, numbers = torch.device("cuda", torch.cuda.current_device()), (3, 1, 2)
    torch.cuda._sleep(10**8)  # the fill waits for it
    with torch.cuda.stream(torch.cuda.Stream()):
        plain = tables.gather(device.index, device, numbers, None).table
        constant = tables.constants((*numbers, 11), device, torch.int64)
    torch.cuda.synchronize()
    assert plain.tolist() == [3, 1, 2]
    assert constant.tolist() == [3, 1, 2, 11]


@pytest.mark.parametrize("name", CASES)
def test_captured_graph_replays_with_new_inputs(name: str) -> None:
    make_model, make_inputs, is_compiled = CASES[name]
    model, inputs = make_model().to(DEVICE), make_inputs()
    call = fusedops.compile(model, fullgraph=True, dynamic=False) if is_compiled else model
    g, leaves = torch.randn_like(model(*inputs)), _leaves(model, inputs)
    # As PyTorch asks: the first calls compile and warm up, on a stream of their own.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), launch.record() as kernels:
        for _ in range(3):
            _step(call, leaves, inputs, g)
    assert kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _step(call, leaves, inputs, g)
    for _ in range(3):
        _renewed(inputs, make_inputs)
        g.normal_()
        graph.replay()
        _check(results, model, inputs, g)


@pytest.mark.parametrize("name", COMPILED)
def test_reduce_overhead_replays_with_new_inputs(name: str) -> None:
    make_model, make_inputs, _ = CASES[name]
    model = make_model().to(DEVICE)
    compiled = fusedops.compile(model, fullgraph=True, dynamic=False, mode="reduce-overhead")
    launched = []
    for _ in range(5):
        inputs = make_inputs()
        torch.compiler.cudagraph_mark_step_begin()
        g = torch.randn_like(model.plain(*inputs))
        with launch.record() as kernels:
            results = _step(compiled, _leaves(model, inputs), inputs, g)
        launched.append(len(kernels))
        _check([t.detach().clone() for t in results], model, inputs, g)
    # The first steps warm up and record; later ones replay, and launch nothing from Python.
    assert launched[0] and not launched[-1]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_wrong_target_in_a_replay_gives_nan(reduction: str) -> None:
    """A capture cannot read targets: all rows are computed, and a wrong target marks its loss."""
    x, target = _rows_and_targets()
    weight = torch.randn(CLASSES, WIDTH, device=DEVICE)

    def loss() -> Tensor:
        return fusedops.linear_cross_entropy(x.detach(), weight, target, reduction=reduction)

    loss()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = loss()
    target[3], target[4] = CLASSES, IGNORED
    graph.replay()
    wrong = torch.arange(ROWS, device=DEVICE) == 3
    if reduction == "mean":
        assert result.isnan()
    else:
        assert torch.equal(result.isnan(), wrong)
    target[3] = 0
    graph.replay()
    assert result.isfinite().all()
    torch.testing.assert_close(
        result.double(),
        F.cross_entropy(x.double() @ weight.double().t(), target, reduction=reduction),
        rtol=0,
        atol=300 * torch.finfo(torch.float32).eps * 30,
    )
