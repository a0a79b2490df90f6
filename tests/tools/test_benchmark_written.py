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
    """A decoder that returns only its logits."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(tokens).logits


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["gated_decoder", "meta_llama"])
def test_decoder_has_eagers_values_and_gradients(name: str, autocast: bool) -> None:
    (workload,) = workloads([name], ["train"], tiny=True)
    model = Logits(workload.build(DEVICE))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter) * (parameter.dim() == 1)
    tokens = Text(DEVICE).reseeded(0).tokens(2, 16)
    cotangent = torch.randn_like(model(tokens))
    backend = Backend()
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        result = results(torch.compile(model, backend=backend), model, [tokens], cotangent)
        eps = torch.finfo(torch.bfloat16 if autocast else torch.float32).eps
        check(result, model, [tokens], cotangent, eps)
    # At least the norms at attention and at the MLP of both layers.
    assert len(backend.report.fused) >= 4
