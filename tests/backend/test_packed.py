"""`fusedops.compile` on attention with a packed projection of queries, keys and values.

The tests check which parts are one kernel, and that kernels write into the projection's gradient.
"""

from __future__ import annotations

import contextlib
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

_SIZE = 8  # columns of a head


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = cos[..., ::2], sin[..., ::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def _complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    angles = torch.complex(*[part.chunk(2, -1)[0] for part in (cos, sin)])
    rotated = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * angles
    return torch.view_as_real(rotated).flatten(-2)


_Parts = tuple[Tensor, Tensor, Tensor]  # query, key and value, (batch, length, heads, columns)


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
    """A decoder's attention with norms of queries and keys, rotary embeddings and a gate.

    Args:
        parts: takes query, key and value from the packed projection.
        groups: the number of heads of keys and values.
        rotate: applies rotary embeddings to heads, by cosines and sines.
        heads: the number of heads of queries.
    """

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
        is_grouped = self.heads != self.groups
        heads = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=is_grouped
        )
        heads = heads.transpose(1, 2).flatten(2)
        out: Tensor = self.out(heads * self.gate(x).sigmoid())
        return out

    def rotated(self, query: Tensor, key: Tensor, value: Tensor) -> _Parts:
        angles = self.angles(query)
        query = self.rotate(self.norm_of_queries(query), *angles)
        return query, self.rotate(self.norm_of_keys(key), *angles), value

    def angles(self, like: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(like.shape[1], device=like.device, dtype=like.dtype)
        angles = torch.outer(positions, torch.linspace(1, 0.1, _SIZE // 2).to(like))
        angles = torch.cat((angles, angles), -1)[:, None]
        return angles.cos(), angles.sin()


def _checked(module: nn.Module, *inputs: Tensor, dynamic: bool | None = None) -> Backend:
    """Compile a module, compare values and gradients with fp64, and return the backend."""
    backend = Backend()
    compiled = torch.compile(module, backend=backend, dynamic=dynamic)
    cotangent = torch.randn_like(module(*inputs))
    result = results(compiled, module, inputs, cotangent)
    check(result, module, inputs, cotangent, torch.finfo(torch.float32).eps)
    assert not backend.report.left
    return backend


def _operators_of(backend: Backend) -> list[set[str]]:
    """Return the operators of each fused region with a norm of heads."""
    regions = [set(region.operators) for region in backend.report.regions if not region.reason]
    return [region for region in regions if not region.isdisjoint(("rsqrt", "_fused_rms_norm"))]


def _joining_operator(rotate: Callable[..., Tensor]) -> str:
    """Return the operator that joins the rotated halves or pairs."""
    return "cat" if rotate is _halves else "stack"


_GROUPED = pytest.mark.parametrize("parts", [_split, _sliced])
_ROTATIONS = pytest.mark.parametrize("rotate", [_halves, _interleaved, _complex])


@_ROTATIONS
@_GROUPED
def test_queries_and_fewer_keys_are_one_kernel_each(parts: Any, rotate: Any) -> None:
    """One kernel cannot compute both, because they have different numbers of heads."""
    backend = _checked(_Attention(parts, groups=2, rotate=rotate).to(DEVICE), randn(2, 6, 32))
    regions = _operators_of(backend)
    assert len(regions) == 2
    for operators in regions:
        assert _joining_operator(rotate) in operators


@_ROTATIONS
@pytest.mark.parametrize("parts", [_unbound, _split, _sliced, _of_heads])
def test_queries_and_keys_are_one_kernel(parts: Any, rotate: Any) -> None:
    """The kernel contains the rotation, and joins its halves or pairs."""
    backend = _checked(_Attention(parts, groups=4, rotate=rotate).to(DEVICE), randn(2, 6, 32))
    for operators in _operators_of(backend):
        assert _joining_operator(rotate) in operators


# --- the gradient of a packed projection ----------------------------------------------------------

# Operators by which PyTorch assembles the gradient of a tensor from those of its parts.
_ASSEMBLING = frozenset(
    {"cat", "stack", "select_backward", "slice_backward", "select_scatter", "slice_scatter"}
)
_CHANGE = "gradients of parts of a tensor, written into one"
# On a GPU, attention in fp32 repeats the keys and values of a group. Then the gradients of keys and
# values are sums, which kernels of Inductor compute.
_REPEATS_GROUPS = DEVICE.type == "cuda"


def _packed_projections(groups: int) -> int:
    """Return into how many projections' gradients kernels write (0 or 1), with four query heads."""
    return 0 if _REPEATS_GROUPS and groups != 4 else 1


@pytest.fixture(params=[True, False], ids=["planned", "returned"])
def planned_or_returned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make operators write into memory that the compiler plans, as on GPUs, or return tensors."""
    monkeypatch.setattr(registration, "is_planned", lambda args: request.param)


@pytest.fixture
def _planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "is_planned", lambda args: True)


_as_on_gpus = pytest.mark.usefixtures("_planned")


def _names(graph: torch.fx.Graph) -> list[str]:
    """Return the operators of a graph, also those that functionalisation has wrapped."""
    nodes = graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.auto_functionalized_v2
    )
    wrapped = [node.args[0].overloadpacket.__name__ for node in nodes]
    return wrapped + [aten_name(node.target) for node in graph.nodes]


def _packed_count(backend: Backend) -> int:
    """Return the number of gradients into which kernels write the gradients of parts."""
    return backend.report.changes[_CHANGE]


@_ROTATIONS
@pytest.mark.usefixtures("planned_or_returned")
@pytest.mark.parametrize(
    ("parts", "groups"),
    [(_unbound, 4), (_split, 4), (_sliced, 4), (_of_heads, 4), (_split, 2), (_sliced, 2)],
)
def test_packed_attention_has_eager_values_and_gradients(
    parts: Any, groups: int, rotate: Any
) -> None:
    backend = _checked(_Attention(parts, groups, rotate).to(DEVICE), randn(2, 6, 32))
    assert _packed_count(backend) == _packed_projections(groups)


@_as_on_gpus
@pytest.mark.parametrize(
    ("parts", "groups"),
    [(_unbound, 4), (_of_heads, 4), *([] if _REPEATS_GROUPS else [(_split, 2), (_sliced, 2)])],
)
def test_kernels_write_into_the_gradient_of_the_projection(parts: Any, groups: int) -> None:
    """Only the gradient of values is copied into it, and nothing else is assembled."""
    x = randn(2, 6, 32).requires_grad_()
    backend = Backend()
    output = torch.compile(_Attention(parts, groups).to(DEVICE), backend=backend)(x)
    with launch.record() as kernels:
        output.sum().backward()
    (graph,) = backend.backwards
    names = _names(graph)
    assert _ASSEMBLING.isdisjoint(names)
    assert names.count("copy_into") == 1
    # Queries and keys take one kernel if they have one shape, else two. The gate takes another.
    has_one_shape = groups == 4 and parts in (_unbound, _of_heads)
    launched = [name for name in kernels if "backward" in name]
    assert len(launched) == (2 if has_one_shape else 3)
    allocations = graph.find_nodes(op="call_function", target=torch.ops.aten.new_empty.default)
    projection_size = 2 * 6 * (4 + 2 * groups) * _SIZE
    assert max(node.meta["val"].numel() for node in allocations) == projection_size


@_as_on_gpus
@pytest.mark.parametrize("groups", [4, 2])
def test_gradients_of_keys_and_values_are_copied_if_only_queries_are_rotated(groups: int) -> None:
    class OfQueries(_Attention):
        def rotated(self, query: Tensor, key: Tensor, value: Tensor) -> _Parts:
            return self.rotate(self.norm_of_queries(query), *self.angles(query)), key, value

    module = OfQueries(_sliced, groups).to(DEVICE)
    module.norm_of_keys = nn.Identity()
    backend = _checked(module, randn(2, 6, 32))
    assert _packed_count(backend) == _packed_projections(groups)
    assert _names(backend.backwards[0]).count("copy_into") == 2 * _packed_projections(groups)


@_as_on_gpus
def test_gradients_are_packed_if_the_region_saves_an_intermediate() -> None:
    """The intermediate is an output of the region's operator."""

    class Shifted(_Attention):
        def rotated(self, query: Tensor, key: Tensor, value: Tensor) -> _Parts:
            query = self.norm_of_queries(query + self.shift)
            return query, self.norm_of_keys(key), value

    module = Shifted().to(DEVICE)
    module.shift = nn.Parameter(randn(2, 6, 4, _SIZE))
    assert _packed_count(_checked(module, randn(2, 6, 32))) == 1


def test_length_that_slices_divide_stays_dynamic() -> None:
    """Only the first row is normalised, like a class token."""

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


@_as_on_gpus
@pytest.mark.parametrize(("groups", "packed"), [(4, 0), (2, _packed_projections(2))])
def test_keys_that_are_also_values_are_packed_if_they_have_a_kernel_of_their_own(
    groups: int, packed: int
) -> None:
    """The gradient of keys is then a sum of two gradients, and is copied.

    If queries and keys are one kernel, this sum rules out packing.
    """

    class WithoutValues(_Attention):
        def rotated(self, query: Tensor, key: Tensor, value: Tensor) -> _Parts:
            query, rotated, _ = super().rotated(query, key, value)
            return query, rotated, key

    parts = _unbound if groups == 4 else _sliced
    backend = _checked(WithoutValues(parts, groups).to(DEVICE), randn(2, 6, 32))
    assert _packed_count(backend) == packed
    assert _ASSEMBLING.isdisjoint(_names(backend.backwards[0])) == bool(packed)


@_as_on_gpus
def test_unused_part_has_a_gradient_of_zeros() -> None:
    class Rotated(_Attention):
        def rotated(self, query: Tensor, key: Tensor, value: Tensor) -> _Parts:
            query, key, _ = super().rotated(query, key, value)
            return query, key, query

    backend = _checked(Rotated().to(DEVICE), randn(2, 6, 32))
    assert _packed_count(backend) == 1


@_as_on_gpus
@pytest.mark.parametrize("parts", [_unbound, _split])
def test_gradients_of_a_projection_that_is_not_contiguous_are_packed(parts: Any) -> None:
    class Transposed(_Attention):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x.transpose(0, 1))
            return out

    def transposed(packed: Tensor, heads: int, groups: int) -> _Parts:
        result: _Parts = parts(packed.transpose(0, 1).contiguous().transpose(0, 1), heads, groups)
        return result

    backend = _checked(Transposed(transposed).to(DEVICE), randn(2, 6, 32))
    assert _packed_count(backend) == 1


@_as_on_gpus
def test_gradients_of_a_projection_with_another_consumer_are_packed() -> None:
    """Its gradient is then the sum of the packed one and that of the other consumer."""
    projections: list[Tensor] = []

    def recording(packed: Tensor, heads: int, groups: int) -> _Parts:
        projections[:] = [packed]
        return _unbound(packed, heads, groups)

    class Penalised(_Attention):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return out + projections[0].square().mean()

    backend = _checked(Penalised(recording).to(DEVICE), randn(2, 6, 32))
    assert _packed_count(backend) == 1


@_as_on_gpus
def test_gradients_are_not_packed_if_inductor_computes_with_values() -> None:
    """A kernel of Inductor then computes the gradient of a part."""

    class Scaled(_Attention):
        def rotated(self, query: Tensor, key: Tensor, value: Tensor) -> _Parts:
            query, key, value = super().rotated(query, key, value)
            return query, key, value * 2

    assert _packed_count(_checked(Scaled(_sliced, 2).to(DEVICE), randn(2, 6, 32))) == 0


@_as_on_gpus
def test_gradients_are_not_packed_if_values_are_returned() -> None:
    values: list[Tensor] = []

    class Recording(_Attention):
        def rotated(self, query: Tensor, key: Tensor, value: Tensor) -> _Parts:
            values[:] = [value]
            return super().rotated(query, key, value)

    module, x = Recording().to(DEVICE), randn(2, 6, 32)

    def returning(x: Tensor) -> tuple[Tensor, Tensor]:
        return module(x), values[0]

    backend, results = Backend(), []
    for function in (returning, torch.compile(returning, backend=backend)):
        output, value = function(x)
        loss = output.square().sum() + value.square().sum()
        results.append([output, value, *torch.autograd.grad(loss, list(module.parameters()))])
    eager, ours = results
    torch.testing.assert_close(ours, eager)
    assert _packed_count(backend) == 0


@_as_on_gpus
def test_gradients_of_overlapping_parts_are_not_packed() -> None:
    def overlapping(packed: Tensor, heads: int, groups: int) -> _Parts:
        packed = packed.unflatten(-1, (-1, _SIZE))
        return packed[:, :, :heads], packed[:, :, 2 : heads + 2], packed[:, :, -groups:]

    assert _packed_count(_checked(_Attention(overlapping).to(DEVICE), randn(2, 6, 32))) == 0


@_as_on_gpus
@pytest.mark.parametrize(("parts", "groups"), [(_unbound, 4), (_split, 2)])
def test_gradients_are_packed_at_dynamic_lengths(parts: Any, groups: int) -> None:
    module = _Attention(parts, groups).to(DEVICE)
    backend = Backend()
    compiled = torch.compile(module, backend=backend, dynamic=True)
    for length in (6, 9):
        x = randn(2, length, 32)
        cotangent = torch.randn_like(x)
        result = results(compiled, module, [x], cotangent)
        check(result, module, [x], cotangent, torch.finfo(torch.float32).eps)
    assert backend.report.graphs == 1
    assert _packed_count(backend) == _packed_projections(groups)


@_as_on_gpus
def test_gradients_are_packed_in_a_checkpointed_part() -> None:
    class Checkpointed(_Attention):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return out

    backend = _checked(Checkpointed().to(DEVICE), randn(2, 6, 32))
    assert _packed_count(backend) == 1


@_as_on_gpus
def test_packing_does_not_change_dropout_masks() -> None:
    class Dropped(_Attention):
        def rotated(self, query: Tensor, key: Tensor, value: Tensor) -> _Parts:
            query, key, value = super().rotated(query, key, value)
            return F.dropout(query, 0.5), key, value

    module, x = Dropped().to(DEVICE), randn(2, 6, 32)
    cotangent, both_results = torch.randn_like(x), []
    no_packing = mock.patch("fusedops.backend.passes.packing._may_pack", return_value=False)
    for packs, context in ((True, contextlib.nullcontext()), (False, no_packing)):
        torch._dynamo.reset()
        backend = Backend()
        with context:
            torch.manual_seed(0)
            compiled = torch.compile(module, backend=backend)
            both_results.append(results(compiled, module, [x], cotangent))
        assert _packed_count(backend) == packs
    for packed, unpacked in zip(*both_results, strict=True):
        torch.testing.assert_close(packed, unpacked, rtol=0, atol=0)


@_as_on_gpus
def test_inference_packs_nothing() -> None:
    backend = Backend()
    with torch.no_grad():
        torch.compile(_Attention().to(DEVICE), backend=backend)(randn(2, 6, 32))
    assert _packed_count(backend) == 0
