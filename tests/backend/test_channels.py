"""Norms over the channels of images in channels-last memory are regions of `fusedops.compile`.

Channels come before pixels in the shape, and behind them in memory. The tests compare values,
gradients and strides with eager mode. Images in contiguous memory are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backends import Backend, check, randn, results
from fusedops.backend.graphs import name_of
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

CHANNELS = 16
SHAPE = (2, CHANNELS, 5, 6)


class PixelNorm(nn.Module):
    """A LayerNorm over dimension 1, by elementary operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(CHANNELS)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(1, keepdim=True)
        x = x / torch.sqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Block(nn.Module):
    """A residual block with a norm before and behind, a layer scale and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(PixelNorm() for _ in range(2))
        self.scale = nn.Parameter(torch.randn(1, CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norms[0](self.convs[0](x)))
        return self.norms[1](x + self.scale * self.convs[1](y))


class Modulated(nn.Module):
    """A norm whose image has a scale of its own, a bias for each pixel and one for each column."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(2, CHANNELS, 1, 1))
        self.pixels = nn.Parameter(torch.randn(5, 6))
        self.columns = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().sum(dim=1, keepdim=True) + 1e-2)
        return y * (1 + self.scale) + self.pixels * self.columns


class Reduced(nn.Module):
    """Reductions that drop their dimension, in 5 dimensions, beside one that keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CHANNELS, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(3, (2, 3)) * self.weight
        total = x.amax(1).unsqueeze(1) + x.var(-4, keepdim=True, correction=0)
        return x.sigmoid() * total


class Weighted(nn.Module):
    """Channels that are weighted by their softmax, which takes its dimension as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).softmax(1) * x


class Unit(nn.Module):
    """Vectors of length one, of a sequence whose channels come first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x.flatten(2).transpose(1, 2)).transpose(1, 2)
        return F.normalize(x, dim=1) + x


class Changed(nn.Module):
    """A norm without gradients, whose result is changed in place before it is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = PixelNorm()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.norm(x).mul(2)
        y = self.norm(x + scale)
        scale.flatten(2).mul_(3)
        return self.norm(y + scale)


class Copied(nn.Module):
    """A copy in another memory format, whose norm has no weight and stays Inductor's."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous().sin().to(memory_format=torch.channels_last)
        return x * x.mean(1, keepdim=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "block": (Block, 2),
    "modulated": (Modulated, 1),
    "reduced": (Reduced, 1),
    "weighted": (Weighted, 1),
    "unit": (Unit, 1),
    "changed": (Changed, 3),
    "copied": (Copied, 0),
}


def _built(name: str) -> tuple[nn.Module, Tensor, int]:
    """Return a model and an image in channels-last memory, and the number of its regions."""
    make, region_count = MODELS[name]
    x = randn(*SHAPE).contiguous(memory_format=torch.channels_last)
    return make().to(DEVICE, memory_format=torch.channels_last), x, region_count


@pytest.mark.parametrize("name", MODELS)
def test_norms_over_channels_in_channels_last_memory_are_fused(name: str) -> None:
    model, x, region_count = _built(name)
    expected = model(x)
    cotangent = torch.randn_like(expected)
    backend = Backend()
    result = results(torch.compile(model, backend=backend, fullgraph=True), model, (x,), cotangent)
    assert not backend.report.left
    assert len(backend.report.fused) == region_count
    assert result[0].stride() == expected.stride()
    check(result, model, (x,), cotangent, torch.finfo(torch.float32).eps)


class Convolved(nn.Module):
    """Convolutions whose channels are moved last: a norm follows two of three. One is split."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        self.sequence = nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1)
        self.norms = nn.ModuleList(nn.LayerNorm(CHANNELS) for _ in range(2))
        self.gate = nn.Conv2d(CHANNELS, 2 * CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.images
        x = torch.mul(*self.gate(x).chunk(2, 1))
        y = self.norms[0](first(x).permute(0, 2, 3, 1)).flatten(1, 2)
        y = self.norms[1](self.sequence(y.mT).transpose(-1, 1))
        return last(y.mT.unflatten(2, x.shape[2:])).permute(0, 2, 3, 1)


def test_regions_add_the_biases_of_convolutions() -> None:
    model, x = Convolved().to(DEVICE, memory_format=torch.channels_last), randn(*SHAPE)
    cotangent, backend = torch.randn_like(model(x)), Backend()
    result = results(torch.compile(model, backend=backend, fullgraph=True), model, (x,), cotangent)
    nodes = [node for node in backend.forwards[0].nodes if name_of(node) == "convolution"]
    assert [node.args[2] is None for node in nodes] == [False, True, True, False]
    check(result, model, (x,), cotangent, torch.finfo(torch.float32).eps)


def _norm(x: Tensor, weight: Tensor, dim: int) -> Tensor:
    x = x.sin() - x.mean(dim, keepdim=True)
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + 1e-6) * weight


def _maximum(x: Tensor, weight: Tensor, dim: int) -> Tensor:
    return (x.exp() * weight).amax(dim)


@pytest.mark.parametrize("function", [_norm, _maximum])
def test_regions_of_channels_are_those_of_permuted_images(function: Callable[..., Tensor]) -> None:
    """They have the same operators, and move the same bytes, in training and in inference."""

    def of_channels(x: Tensor, weight: Tensor) -> Tensor:
        return function(x, weight[:, None, None], 1)

    def of_rows(x: Tensor, weight: Tensor) -> Tensor:
        return function(x.permute(0, 2, 3, 1), weight, -1)

    def regions(model: Callable[..., Tensor], weight: Tensor) -> list[Any]:
        backend = Backend()
        torch.compile(model, backend=backend)(x, weight)
        return [(region.operators, region.moved) for region in backend.report.fused]

    x = randn(*SHAPE).contiguous(memory_format=torch.channels_last)
    for requires_grad in (True, False):
        weight = randn(CHANNELS).requires_grad_(requires_grad)
        (expected,) = regions(of_rows, weight)
        assert regions(of_channels, weight) == [expected]


def test_casts_of_autocast_are_in_regions_of_channels() -> None:
    model, x, region_count = _built("block")
    backend = Backend()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        cotangent = torch.randn_like(model(x))
        result = results(torch.compile(model, backend=backend), model, (x,), cotangent)
        # Triton's interpreter truncates where a GPU rounds.
        check(result, model, (x,), cotangent, 2 * torch.finfo(torch.bfloat16).eps)
    assert len(backend.report.fused) == region_count
    assert "_to_copy" in backend.report.fused[0].operators


def test_images_of_changing_sizes_are_one_graph() -> None:
    """Sizes of batch and pixels are symbols, and the number of channels is a constant."""
    model, _, region_count = _built("block")
    backend = Backend()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for batch, height, width in ((2, 5, 6), (3, 4, 7), (5, 16, 16)):
        x = randn(batch, CHANNELS, height, width).contiguous(memory_format=torch.channels_last)
        cotangent = torch.randn_like(model(x))
        result = results(compiled, model, (x,), cotangent)
        check(result, model, (x,), cotangent, torch.finfo(torch.float32).eps)
    assert backend.report.graphs == 1
    assert len(backend.report.fused) == region_count


@pytest.mark.parametrize("channels", [1, CHANNELS])
def test_norms_over_channels_in_contiguous_memory_are_left(channels: int) -> None:
    """Their graphs are as they were, also if the memory of an argument is channels-last."""
    weight, scale = randn(CHANNELS).requires_grad_(), randn(2, channels, 5, 6)

    def function(x: Tensor, scale: Tensor) -> Tensor:
        x = x.relu() * scale
        return x * torch.rsqrt(x.square().mean(1, keepdim=True)) * weight[:, None, None]

    backend = Backend()
    scale = scale.contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    x = randn(*SHAPE)
    y = compiled(x, scale)
    torch.testing.assert_close(y, function(x, scale))
    assert y.is_contiguous()
    assert not backend.report.regions
    y.sum().backward()
    (backward,) = backend.backwards
    assert "permute" not in map(name_of, backward.nodes)
