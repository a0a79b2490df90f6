"""The benchmark's own models, which no library has, under the compile backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from backends import Backend, check, results
from benchmarks.models.text import Text
from benchmarks.models.workloads import workloads
from rowwise_checks import kernels
from support import DEVICE

pytestmark = [kernels, pytest.mark.usefixtures("fresh_dynamo")]


class Logits(nn.Module):
    """A model that returns only its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs).logits


@pytest.mark.parametrize(
    ("name", "autocast", "regions"),
    [
        # At least the norms at attention and at the MLP of both layers.
        ("gated_decoder", False, 4),
        ("gated_decoder", True, 4),
        # The first norm has no residual sum before it: Inductor computes it as fast.
        ("meta_llama", False, 3),
        ("meta_llama", True, 3),
        # Not in bf16: if a rounding moves the input of a ReLU across zero, the gradient jumps.
        ("dlrm", False, 1),
    ],
)
def test_model_has_eagers_values_and_gradients(name: str, autocast: bool, regions: int) -> None:
    (workload,) = workloads([name], ["train"], tiny=True)
    model = Logits(workload.build(DEVICE))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter) * (parameter.dim() == 1)
    batch = workload.batch(Text(DEVICE))
    inputs = [value for argument, value in batch.items() if argument != "labels"]
    cotangent = torch.randn_like(model(*inputs))
    backend = Backend()
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        result = results(torch.compile(model, backend=backend), model, inputs, cotangent)
        eps = torch.finfo(torch.bfloat16 if autocast else torch.float32).eps
        check(result, model, inputs, cotangent, eps)
    assert len(backend.report.fused) >= regions
