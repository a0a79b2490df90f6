"""Regions save tensors that other nodes save anyway: the sums of a residual stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from backends import Backend
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]


@pytest.mark.parametrize(
    "gated, sums",
    [
        pytest.param(False, 3, id="the last sum is computed again"),
        pytest.param(True, 2, id="every other sum of gated branches is"),
    ],
)
def test_sums_of_a_saved_tensor_and_a_narrow_one_are_computed_again(gated: bool, sums: int) -> None:
    """The sums add three branches in bf16 to a stream in fp32, whose first tensor is saved, too."""
    norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4)).to(DEVICE)
    branches = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3)).to(DEVICE)
    gates = torch.randn(3, 4, 1, 32, device=DEVICE, requires_grad=True)
    start = torch.randn(4, 16, 32, device=DEVICE, requires_grad=True)
    cotangent = torch.randn(4, 16, 32, device=DEVICE)
    stored: dict[int, Tensor] = {}

    def function(start: Tensor, gates: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            x = start + 1
            for norm, branch, gate in zip(norms, branches, gates, strict=False):
                x = x + branch(norm(x)) * (gate if gated else 1)
            return norms[3](x).bfloat16()  # type: ignore[no-any-return]

    def keep(tensor: Tensor) -> Tensor:
        if type(tensor) is Tensor:  # none that is fake, while the function is traced
            stored[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    backend, results = Backend(), []
    for call in (function, torch.compile(function, backend=backend)):
        stored.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = call(start, gates)
        wanted = [start, gates, *norms.parameters(), *branches.parameters()]
        results.append(
            [result, *torch.autograd.grad(result, wanted, cotangent.bfloat16(), allow_unused=True)]
        )
    for ours, eager in zip(*reversed(results), strict=True):
        assert (ours is None) == (eager is None)
        if eager is not None:
            torch.testing.assert_close(
                ours, eager, rtol=2e-2, atol=2e-2 * float(eager.detach().abs().max())
            )
    assert not backend.report.left
    whole = [tensor.dtype for tensor in stored.values() if tensor.numel() == start.numel()]
    assert whole.count(torch.float32) == sums
