"""Attention of one packed projection: what of it is one kernel, and how its gradient is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backends import Backend, check, randn, results
from support import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_dynamo")]

_SIZE = 8


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = cos[..., ::2], sin[..., ::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


_Parts = tuple[Tensor, Tensor, Tensor]


def _unbound(packed: Tensor, heads: int, groups: int) -> _Parts:
    query, key, value = packed.unflatten(-1, (3, heads, _SIZE)).unbind(2)
    return query, key, value


def _split(packed: Tensor, heads: int, groups: int) -> _Parts:
    sizes = [heads * _SIZE, groups * _SIZE, groups * _SIZE]
    query, key, value = [part.unflatten(-1, (-1, _SIZE)) for part in packed.split(sizes, -1)]
    return query, key, value


def _sliced(packed: Tensor, heads: int, groups: int) -> _Parts:
    packed = packed.unflatten(-1, (-1, _SIZE))
    end = heads + groups
    return packed[:, :, :heads], packed[:, :, heads:end], packed[:, :, end:]


def _of_heads(packed: Tensor, heads: int, groups: int) -> _Parts:
    query, key, value = packed.unflatten(-1, (heads, 3 * _SIZE)).chunk(3, -1)
    return query, key, value


class _Attention(nn.Module):
    """Of a decoder, with norms of queries and keys, rotary embeddings and a gate."""

    def __init__(
        self,
        parts: Callable[[Tensor, int, int], _Parts] = _unbound,
        groups: int = 4,
        rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = _halves,
        heads: int = 4,
    ) -> None:
        super().__init__()
        width = heads * _SIZE
        self.heads, self.groups, self.parts, self.rotate = heads, groups, parts, rotate
        self.packed = nn.Linear(width, (heads + 2 * groups) * _SIZE, bias=False)
        self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.norm_of_queries, self.norm_of_keys = nn.RMSNorm(_SIZE), nn.RMSNorm(_SIZE)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.parts(self.packed(x), self.heads, self.groups)
        query, key, value = self.rotated(query, key, value)
        query, key, value = [part.transpose(1, 2) for part in (query, key, value)]
        grouped = self.heads != self.groups
        heads = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=grouped
        )
        heads = heads.transpose(1, 2).flatten(2)
        out: Tensor = self.out(heads * self.gate(x).sigmoid())
        return out

    def rotated(self, query: Tensor, key: Tensor, value: Tensor) -> _Parts:
        angles = self.angles(query)
        query = self.rotate(self.norm_of_queries(query), *angles)
        return query, self.rotate(self.norm_of_keys(key), *angles), value

    def angles(self, like: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(like.shape[1], device=like.device, dtype=like.dtype)
        angles = torch.outer(places, torch.linspace(1, 0.1, _SIZE // 2).to(like))
        angles = torch.cat((angles, angles), -1)[:, None]
        return angles.cos(), angles.sin()


def _checked(module: nn.Module, *inputs: Tensor, dynamic: bool | None = None) -> Backend:
    """The backend, after values and gradients were compared with eager fp64."""
    backend = Backend()
    compiled = torch.compile(module, backend=backend, dynamic=dynamic)
    cotangent = torch.randn_like(module(*inputs))
    found = results(compiled, module, inputs, cotangent)
    check(found, module, inputs, cotangent, torch.finfo(torch.float32).eps)
    assert not backend.report.left
    return backend


def _operators_of(backend: Backend) -> list[set[str]]:
    """The operators of each region that is one kernel, of those with rotated heads."""
    regions = [set(region.operators) for region in backend.report.regions if not region.reason]
    return [region for region in regions if "rsqrt" in region]


_GROUPED = pytest.mark.parametrize("parts", [_split, _sliced])
_ROTATIONS = pytest.mark.parametrize("rotate", [_halves, _interleaved])


@_ROTATIONS
@_GROUPED
def test_queries_and_fewer_keys_are_a_kernel_each(parts: Any, rotate: Any) -> None:
    """They are parts of one region, which no kernel computes: they have other numbers of heads."""
    backend = _checked(_Attention(parts, 2, rotate).to(DEVICE), randn(2, 6, 32))
    joined = "cat" if rotate is _halves else "stack"
    for region in _operators_of(backend):
        assert {"rsqrt", joined} <= region
    assert len(_operators_of(backend)) == 2


@_ROTATIONS
@pytest.mark.parametrize("parts", [_unbound, _split, _sliced, _of_heads])
def test_queries_and_keys_are_one_kernel(parts: Any, rotate: Any) -> None:
    """With the rotation, whose halves or pairs are put together in the kernel."""
    backend = _checked(_Attention(parts, 4, rotate).to(DEVICE), randn(2, 6, 32))
    joined = "cat" if rotate is _halves else "stack"
    assert all(joined in region for region in _operators_of(backend))
