"""Regions save tensors that other nodes save anyway, and recompute sums of a residual stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from backends import Backend
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]


@pytest.mark.parametrize(
    "gated, saved_sums",
    [
        pytest.param(False, 3, id="the last sum is recomputed"),
        pytest.param(True, 2, id="every second sum of gated branches is recomputed"),
    ],
)
def test_sums_of_a_saved_tensor_and_a_narrow_one_are_recomputed(
    gated: bool, saved_sums: int
) -> None:
    """Three branches in bf16 are added to a residual stream in fp32.

    Four fp32 tensors of the stream could be saved: its start and three sums.
    """
    norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4)).to(DEVICE)
    branches = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3)).to(DEVICE)
    gates = torch.randn(3, 4, 1, 32, device=DEVICE, requires_grad=True)
    start = torch.randn(4, 16, 32, device=DEVICE, requires_grad=True)
    cotangent = torch.randn(4, 16, 32, device=DEVICE)
    saved: dict[int, Tensor] = {}  # by address, so that views count once

    def function(start: Tensor, gates: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            x = start + 1
            for norm, branch, gate in zip(norms, branches, gates, strict=False):
                y = branch(norm(x))
                x = x + (y * gate if gated else y)
            return norms[3](x).bfloat16()  # type: ignore[no-any-return]

    def pack(tensor: Tensor) -> Tensor:
        if type(tensor) is Tensor:  # not a fake tensor of the trace
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    backend, results = Backend(), []
    for call in (function, torch.compile(function, backend=backend)):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = call(start, gates)
        leaves = [start, gates, *norms.parameters(), *branches.parameters()]
        results.append(
            [result, *torch.autograd.grad(result, leaves, cotangent.bfloat16(), allow_unused=True)]
        )
    for eager, ours in zip(*results, strict=True):
        assert (ours is None) == (eager is None)
        if eager is not None:
            torch.testing.assert_close(
                ours, eager, rtol=2e-2, atol=2e-2 * float(eager.detach().abs().max())
            )
    assert not backend.report.left
    dtypes = [tensor.dtype for tensor in saved.values() if tensor.numel() == start.numel()]
    assert dtypes.count(torch.float32) == saved_sums


def test_relu_of_a_linear_layer_saves_its_result_alone() -> None:
    """The next product saves it, too."""
    model = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 16)).to(DEVICE)
    backend = Backend("speed")
    x = torch.randn(6, 16, device=DEVICE)
    torch.compile(model, backend=backend)(x).sum().backward()
    assert [region.operators for region in backend.report.regions if region.program]
    shapes = [tuple(tensor.shape) for tensor in backend.saved]
    assert shapes.count((6, 40)) == 1
