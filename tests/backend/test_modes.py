"""`fusedops.compile` under the modes of training: sequences of calls, gradient scaling, dynamic sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from backends import Backend, PostNorm, randn
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]


class Decoder(nn.Module):
    """A pre-norm block with causal attention and a gated unit, of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(24) for _ in range(2))
        self.qkv, self.up = nn.Linear(24, 72, bias=False), nn.Linear(24, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, 12)).transpose(1, 3)
        mixed = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + F.silu(gate) * up


class Pixels(nn.Module):
    """A norm over channels that come before the pixels, in channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(24, 24), nn.Parameter(torch.randn(24, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).transpose(1, 2)
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * self.weight


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: PostNorm(p=0.5),
    "decoder": Decoder,
    "pixels": Pixels,
}


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.graphs += 1
        return gm.forward


@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_of_calls_is_as_many_graphs_as_without_operators(name: str) -> None:
    """Sizes, training, autocast and gradient mode change; the number of graphs is compared."""
    # Batch, length, training, autocast, gradients.
    calls = [
        (2, 5, True, False, True),
        (3, 5, True, False, True),
        (3, 7, True, False, True),
        (4, 9, True, False, True),
        (3, 7, False, False, True),
        (3, 7, False, False, False),
        (5, 4, False, False, False),
        (3, 7, True, True, True),
        (2, 5, True, False, True),
    ]
    counts = list[list[int]]()
    for compiler in (Backend(), Counting()):
        torch._dynamo.reset()
        model = MODELS[name]().to(DEVICE)
        compiled = torch.compile(model, backend=compiler)
        counts.append([])
        for batch, length, training, autocast, gradients in calls:
            model.train(training)
            with (
                torch.set_grad_enabled(gradients),
                torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast),
            ):
                y = compiled(randn(batch, length, 24))
            if gradients:
                y.float().sum().backward()
            counts[-1].append(
                compiler.report.graphs if isinstance(compiler, Backend) else compiler.graphs
            )
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", MODELS)
def test_dynamic_graphs_have_the_regions_of_static_ones(name: str) -> None:
    """A size is marked, or becomes a symbol because it has changed in the second call."""
    model = MODELS[name]().to(DEVICE)

    def regions(calls: Sequence[tuple[int, int]], marked: Sequence[int], **options: Any) -> Any:
        """The operators of the fused regions of the last graph."""
        torch._dynamo.reset()
        backends = list[Backend]()

        def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            backends.append(Backend())
            return backends[-1](gm, inputs)

        compiled = torch.compile(model, backend=compiler, **options)
        for batch, length in calls:
            x = randn(batch, length, 24)
            torch._dynamo.mark_dynamic(x, marked)
            compiled(x)
        assert len(backends) == (1 if marked else len(calls))
        return sorted(region.operators for region in backends[-1].report.fused)

    static = regions([(3, 5)], [], dynamic=False)
    assert static
    assert regions([(3, 5), (4, 5)], [0]) == static
    assert regions([(3, 5), (4, 6)], [0, 1]) == static
    assert regions([(3, 5), (4, 6)], []) == static


def test_gradient_scaler_skips_the_steps_that_eager_skips() -> None:
    """The first two scales are too large for fp16: gradients are infinite, and the scale shrinks.

    It shrinks by much. Gradients that barely overflow in eager mode, such as sums over rows in
    fp16, may be finite in a region, which computes them in fp32.
    """

    def trained(compile_it: Callable[[nn.Module], Callable[..., Tensor]]) -> tuple[Any, Any]:
        torch.manual_seed(1)
        model = nn.Sequential(PostNorm(), PostNorm()).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler(
            DEVICE.type, init_scale=2.0**34, backoff_factor=2.0**-8, growth_interval=4
        )
        run, scales = compile_it(model), list[float]()
        for _ in range(8):
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, torch.float16):
                loss = (run(randn(4, 5, 24)) * randn(4, 5, 24)).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, [parameter.detach() for parameter in model.parameters()]

    backend = Backend()
    scales, weights = trained(lambda model: torch.compile(model, backend=backend))
    expected_scales, expected = trained(lambda model: model)
    assert backend.report.fused
    assert scales == expected_scales == [2.0**26, *[2.0**18] * 4, *[2.0**19] * 3]
    for ours, theirs in zip(weights, expected, strict=True):
        # Six steps of gradients of at most 0.1 with errors of some units of fp16, times 1e-2.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=6 * 1e-2 * 0.1 * 8 * 2.0**-10)
