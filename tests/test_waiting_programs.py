"""Programs that share rows and wait for each other's sums: on a GPU, where they run at the same time."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from fusedops.core import launch
from fusedops.core.tuning import forced
from fusedops.core.tuning_key import Config
from support import DEVICE

pytestmark = pytest.mark.gpu

COLS = 24_576  # in fp32 six programs a row


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """Programs that wait for ever end with this process."""
    faulthandler.dump_traceback_later(240, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def _tensors(rows: int, cols: int = COLS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, cols), (cols,), (cols,))
    x, weight, bias = [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]
    return x, weight, bias


def _gradients(tensors: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    x, weight, bias = tensors
    return torch.autograd.grad(fusedops.layer_norm(x, x.shape[-1], weight, bias), tensors, dy)


def _expected(tensors: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    x, weight, bias = [t.detach().double().requires_grad_() for t in tensors]
    return torch.autograd.grad(F.layer_norm(x, x.shape[-1:], weight, bias), (x, weight, bias), dy.double())


def _check(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, want, strict=True):
        # Sums of 24,576 products in fp32, in trees.
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5 * other.abs().max().item() + 1e-30)


@pytest.mark.parametrize("rows", [1, 2, 3, 131, 700])
def test_one_launch(rows: int) -> None:
    """And equal bits, however the programs are ahead of one another."""
    tensors = _tensors(rows)
    dy = torch.randn(rows, COLS, device=DEVICE)
    with launch.record() as launched:
        first = _gradients(tensors, dy)
    assert launched.count("norm_backward_kernel") == 1
    _check(first, _expected(tensors, dy))
    for _ in range(5):
        assert all(map(torch.equal, first, _gradients(tensors, dy)))


def test_sums_of_zero() -> None:
    """Zeros are sums too: no program waits for another number in their place."""
    tensors = _tensors(40)
    dy = torch.zeros(40, COLS, device=DEVICE)
    dy[7] = -0.0
    assert not any(gradient.any() for gradient in _gradients(tensors, dy))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_sums_that_are_no_numbers(value: float) -> None:
    """They stay in their row."""
    tensors = _tensors(40)
    dy = torch.randn(40, COLS, device=DEVICE)
    dy[7, 5] = value
    dx, *_ = _gradients(tensors, dy)
    assert not dx[7].isfinite().any() and dx[:7].isfinite().all() and dx[8:].isfinite().all()


def test_graph_replays() -> None:
    """A replay does not take the sums of the one before."""
    tensors = _tensors(300)
    dy = torch.randn(300, COLS, device=DEVICE)
    _gradients(tensors, dy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _gradients(tensors, dy)
    for _ in range(3):
        dy.normal_()
        graph.replay()
        _check(found, _expected(tensors, dy))


def test_streams() -> None:
    """Two such kernels at a time, neither of which has the GPU to itself."""
    tensors = _tensors(2000)
    dy = torch.randn(2000, COLS, device=DEVICE)
    want = _gradients(tensors, dy)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(_gradients(tensors, dy))
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for got in found for one, other in zip(got, want, strict=True))


def test_more_programs_than_may_wait() -> None:
    """A launch leaves the sums, a second one reads them."""
    tensors = _tensors(5)
    dy = torch.randn(5, COLS, device=DEVICE)
    with forced("norm_backward", Config(1024, 1, 4, 2, 1)), launch.record() as launched:
        got = _gradients(tensors, dy)
    assert launched.count("norm_backward_kernel") == 2
    _check(got, _expected(tensors, dy))
