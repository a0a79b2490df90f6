"""Attention of one packed projection: what of it is one kernel, and how its gradient is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backends import Backend, check, randn, results
from fusedops.backend.fx import aten_name
from fusedops.core.calls import registration
from fusedops.core.launches import launch
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


def _complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    angles = torch.complex(*[part.chunk(2, -1)[0] for part in (cos, sin)])
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * angles
    return torch.view_as_real(turned).flatten(-2)


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
    """A decoder's attention with norms of queries and keys, rotary embeddings and a gate."""

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
    result = results(compiled, module, inputs, cotangent)
    check(result, module, inputs, cotangent, torch.finfo(torch.float32).eps)
    assert not backend.report.left
    return backend


def _operators_of(backend: Backend) -> list[set[str]]:
    """The operators of each region that is one kernel, of those with rotated heads."""
    regions = [set(region.operators) for region in backend.report.regions if not region.reason]
    return [region for region in regions if not region.isdisjoint(("rsqrt", "_fused_rms_norm"))]


_GROUPED = pytest.mark.parametrize("parts", [_split, _sliced])
_ROTATIONS = pytest.mark.parametrize("rotate", [_halves, _interleaved, _complex])


@_ROTATIONS
@_GROUPED
def test_queries_and_fewer_keys_are_a_kernel_each(parts: Any, rotate: Any) -> None:
    """They are parts of one region, which no kernel computes: they have other numbers of heads."""
    backend = _checked(_Attention(parts, 2, rotate).to(DEVICE), randn(2, 6, 32))
    joined = "cat" if rotate is _halves else "stack"
    for region in _operators_of(backend):
        assert joined in region
    assert len(_operators_of(backend)) == 2


@_ROTATIONS
@pytest.mark.parametrize("parts", [_unbound, _split, _sliced, _of_heads])
def test_queries_and_keys_are_one_kernel(parts: Any, rotate: Any) -> None:
    """The kernel has the rotation, too, and joins its halves or pairs."""
    backend = _checked(_Attention(parts, 4, rotate).to(DEVICE), randn(2, 6, 32))
    joined = "cat" if rotate is _halves else "stack"
    assert all(joined in region for region in _operators_of(backend))


# --- the gradient of a packed projection ----------------------------------------------------------

# Operators by which PyTorch puts the gradient of a tensor together from those of its parts.
_ASSEMBLING = frozenset(
    {"cat", "stack", "select_backward", "slice_backward", "select_scatter", "slice_scatter"}
)
_CHANGE = "gradients of parts of a tensor, written into one"
# On a GPU attention in fp32 repeats the keys and values of a group. The gradients of parts are sums
# then, which kernels of Inductor compute.
_REPEATS = DEVICE.type == "cuda"


def _packs(groups: int) -> int:
    """How many gradients are written into one, of four heads of queries in so many groups."""
    return 0 if _REPEATS and groups != 4 else 1


@pytest.fixture(params=[True, False], ids=["planned", "returned"])
def planned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether operators write into memory that the compiler plans, as on GPUs."""
    monkeypatch.setattr(registration, "is_planned", lambda args: request.param)
    is_planned: bool = request.param
    return is_planned


@pytest.fixture
def _planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "is_planned", lambda args: True)


_on_gpus = pytest.mark.usefixtures("_planned")


def _names(graph: torch.fx.Graph) -> list[str]:
    """The operators of a graph: of one that writes into arguments, that operator itself."""
    nodes = graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.auto_functionalized_v2
    )
    writing = [node.args[0].overloadpacket.__name__ for node in nodes]
    return writing + [aten_name(node.target) for node in graph.nodes]


def _changed(backend: Backend) -> int:
    """How many tensors have gradients that are written into one."""
    return backend.report.changes[_CHANGE]


@_ROTATIONS
@pytest.mark.parametrize(
    ("parts", "groups"),
    [*itertools.product((_unbound, _split, _sliced, _of_heads), [4]), (_split, 2), (_sliced, 2)],
)
def test_values_and_gradients(parts: Any, groups: int, rotate: Any, planned: bool) -> None:
    backend = _checked(_Attention(parts, groups, rotate).to(DEVICE), randn(2, 6, 32))
    assert _changed(backend) == _packs(groups)


@_on_gpus
@pytest.mark.parametrize(
    ("parts", "groups"),
    [(_unbound, 4), (_of_heads, 4), *([] if _REPEATS else [(_split, 2), (_sliced, 2)])],
)
def test_gradient_is_written_in_place(parts: Any, groups: int) -> None:
    """Kernels write the gradients of queries and keys, that of values is copied, and no more."""
    x = randn(2, 6, 32).requires_grad_()
    backend = Backend()
    output = torch.compile(_Attention(parts, groups).to(DEVICE), backend=backend)(x)
    with launch.record() as kernels:
        output.sum().backward()
    (graph,) = backend.backwards
    names = _names(graph)
    assert _ASSEMBLING.isdisjoint(names)
    assert names.count("copy_into") == 1
    # One kernel of queries and keys, or two, and one of the gate.
    launched = [name for name in kernels if "backward" in name]
    assert len(launched) == (2 if groups == 4 and parts in (_unbound, _of_heads) else 3)
    empty = graph.find_nodes(op="call_function", target=torch.ops.aten.new_empty.default)
    size = 2 * 6 * (4 + 2 * groups) * _SIZE
    assert max(node.meta["val"].numel() for node in empty) == size


@_on_gpus
@pytest.mark.parametrize("groups", [4, 2])
def test_queries_alone_are_rotated(groups: int) -> None:
    class OfQueries(_Attention):
        def rotated(self, query: Tensor, key: Tensor, value: Tensor) -> _Parts:
            return self.rotate(self.norm_of_queries(query), *self.angles(query)), key, value

    module = OfQueries(_sliced, groups).to(DEVICE)
    module.norm_of_keys = nn.Identity()
    backend = _checked(module, randn(2, 6, 32))
    assert _changed(backend) == _packs(groups)
    assert _names(backend.backwards[0]).count("copy_into") == 2 * _packs(groups)


@_on_gpus
def test_region_saves_a_value_of_its_own() -> None:
    """It is a result of the operator, and of no other."""

    class Shifted(_Attention):
        def rotated(self, query: Tensor, key: Tensor, value: Tensor) -> _Parts:
            query = self.norm_of_queries(query + self.shift)
            return query, self.norm_of_keys(key), value

    module = Shifted().to(DEVICE)
    module.shift = nn.Parameter(randn(2, 6, 4, _SIZE))
    assert _changed(_checked(module, randn(2, 6, 32))) == 1


def test_lengths_that_are_divided_stay_dynamic() -> None:
    """The first row alone is normalised, as of a token that stands for a class."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(32, 32), nn.RMSNorm(32)

        def forward(self, x: Tensor) -> Tensor:
            rows = self.layer(x)
            return self.norm(rows[:, 0]).sigmoid() * rows[:, 1:].sum(1)

    backend = Backend()
    module = First().to(DEVICE)
    compiled = torch.compile(module, backend=backend, dynamic=True)
    for length in (6, 9, 11):
        x = randn(2, length, 32)
        cotangent = torch.randn_like(module(x))
        result = results(compiled, module, [x], cotangent)
        check(result, module, [x], cotangent, torch.finfo(torch.float32).eps)
    assert backend.report.graphs == 1


@_on_gpus
@pytest.mark.parametrize(("groups", "times"), [(4, 0), (2, _packs(2))])
def test_keys_are_values_too(groups: int, times: int) -> None:
    """The gradient of keys is a sum, which is copied. One kernel of both keeps it in a sum."""

    class WithoutValues(_Attention):
        def rotated(self, query: Tensor, key: Tensor, value: Tensor) -> _Parts:
            query, rotated, _ = super().rotated(query, key, value)
            return query, rotated, key

    parts = _unbound if groups == 4 else _sliced
    backend = _checked(WithoutValues(parts, groups).to(DEVICE), randn(2, 6, 32))
    assert _changed(backend) == times
    assert _ASSEMBLING.isdisjoint(_names(backend.backwards[0])) == bool(times)


@_on_gpus
def test_part_that_nothing_reads_has_a_gradient_of_zeros() -> None:
    class Rotated(_Attention):
        def rotated(self, query: Tensor, key: Tensor, value: Tensor) -> _Parts:
            query, key, _ = super().rotated(query, key, value)
            return query, key, query

    backend = _checked(Rotated().to(DEVICE), randn(2, 6, 32))
    assert _changed(backend) == 1


@_on_gpus
@pytest.mark.parametrize("parts", [_unbound, _split])
def test_projection_that_is_not_contiguous(parts: Any) -> None:
    class Transposed(_Attention):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x.transpose(0, 1))
            return out

    def transposed(packed: Tensor, heads: int, groups: int) -> _Parts:
        result: _Parts = parts(packed.transpose(0, 1).contiguous().transpose(0, 1), heads, groups)
        return result

    backend = _checked(Transposed(transposed).to(DEVICE), randn(2, 6, 32))
    assert _changed(backend) == 1


@_on_gpus
def test_projection_with_another_use() -> None:
    """Its gradient is then a sum of both."""
    seen: list[Tensor] = []

    def noted(packed: Tensor, heads: int, groups: int) -> _Parts:
        seen[:] = [packed]
        return _unbound(packed, heads, groups)

    class Penalised(_Attention):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return out + seen[0].square().mean()

    backend = _checked(Penalised(noted).to(DEVICE), randn(2, 6, 32))
    assert _changed(backend) == 1


@_on_gpus
def test_values_that_are_computed_with_are_left() -> None:
    """Inductor computes their gradient where it belongs."""

    class Scaled(_Attention):
        def rotated(self, query: Tensor, key: Tensor, value: Tensor) -> _Parts:
            query, key, value = super().rotated(query, key, value)
            return query, key, value * 2

    assert _changed(_checked(Scaled(_sliced, 2).to(DEVICE), randn(2, 6, 32))) == 0


@_on_gpus
def test_values_that_are_returned_are_left() -> None:
    seen: list[Tensor] = []

    class Noting(_Attention):
        def rotated(self, query: Tensor, key: Tensor, value: Tensor) -> _Parts:
            seen[:] = [value]
            return super().rotated(query, key, value)

    module, x = Noting().to(DEVICE), randn(2, 6, 32)

    def returning(x: Tensor) -> tuple[Tensor, Tensor]:
        return module(x), seen[0]

    backend, sets = Backend(), []
    for function in (returning, torch.compile(returning, backend=backend)):
        output, value = function(x)
        loss = output.square().sum() + value.square().sum()
        sets.append([output, value, *torch.autograd.grad(loss, list(module.parameters()))])
    torch.testing.assert_close(*sets)
    assert _changed(backend) == 0


@_on_gpus
def test_parts_that_overlap_are_left() -> None:
    def overlapping(packed: Tensor, heads: int, groups: int) -> _Parts:
        packed = packed.unflatten(-1, (-1, _SIZE))
        return packed[:, :, :heads], packed[:, :, 2 : heads + 2], packed[:, :, -groups:]

    assert _changed(_checked(_Attention(overlapping).to(DEVICE), randn(2, 6, 32))) == 0


@_on_gpus
@pytest.mark.parametrize(("parts", "groups"), [(_unbound, 4), (_split, 2)])
def test_lengths_that_change(parts: Any, groups: int) -> None:
    module = _Attention(parts, groups).to(DEVICE)
    backend = Backend()
    compiled = torch.compile(module, backend=backend, dynamic=True)
    for length in (6, 9):
        x = randn(2, length, 32)
        cotangent = torch.randn_like(x)
        result = results(compiled, module, [x], cotangent)
        check(result, module, [x], cotangent, torch.finfo(torch.float32).eps)
    assert backend.report.graphs == 1
    assert _changed(backend) == _packs(groups)


@_on_gpus
def test_checkpointed_part() -> None:
    class Checkpointed(_Attention):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return out

    backend = _checked(Checkpointed().to(DEVICE), randn(2, 6, 32))
    assert _changed(backend) == 1


@_on_gpus
def test_dropout_is_drawn_as_without() -> None:
    class Dropped(_Attention):
        def rotated(self, query: Tensor, key: Tensor, value: Tensor) -> _Parts:
            query, key, value = super().rotated(query, key, value)
            return F.dropout(query, 0.5), key, value

    module, x = Dropped().to(DEVICE), randn(2, 6, 32)
    cotangent, sets = torch.randn_like(x), []
    for passes in (None, "fusedops.backend.passes.packing._may_pack"):
        torch._dynamo.reset()
        backend = Backend()
        with mock.patch(passes, return_value=False) if passes else mock.MagicMock():
            torch.manual_seed(0)
            compiled = torch.compile(module, backend=backend)
            sets.append(results(compiled, module, [x], cotangent))
        assert _changed(backend) == (passes is None)
    for ours, theirs in zip(*sets, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@_on_gpus
def test_inference_is_left() -> None:
    backend = Backend()
    with torch.no_grad():
        torch.compile(_Attention().to(DEVICE), backend=backend)(randn(2, 6, 32))
    assert _changed(backend) == 0
