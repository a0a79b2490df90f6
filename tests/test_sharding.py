"""DTensors: rows sharded over three processes give the same bits as one, without communication."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import fusedops
from fusedops.core.sharding import numbers
from support import INTERPRETED

pytestmark = [pytest.mark.kernels, pytest.mark.skipif(not INTERPRETED, reason="gloo's processes have CPUs")]

RANKS = 3


class Call(NamedTuple):
    """A call, and the shapes of its tensors: those with ROWS have rows, the others are parameters."""

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[Any, ...], ...]


ROWS = "rows"
CALLS = (
    Call("layer_norm", lambda x, w, b: fusedops.layer_norm(x, 24, w, b), ((ROWS, 24), (24,), (24,))),
    Call("rms_norm", lambda x, w: fusedops.rms_norm(x, 24, w), ((ROWS, 24), (24,))),
    Call("bias_dropout_add_ln", lambda *t: fusedops.bias_dropout_add_ln(*t, p=0.0, return_sum=True),
         ((ROWS, 24), (24,), (ROWS, 24), (24,), (24,))),
    Call("bias_dropout_add_ln with dropout", lambda *t: fusedops.bias_dropout_add_ln(*t, p=0.4),
         ((ROWS, 24), (24,), (ROWS, 24), (24,), (24,))),
    Call("bias_dropout_add with dropout", lambda *t: fusedops.bias_dropout_add(*t, p=0.4), ((ROWS, 24), (24,), (ROWS, 24))),
    Call("bias_act with dropout", lambda *t: fusedops.bias_act(*t, "silu", p=0.4), ((ROWS, 24), (24,))),
    Call("bias_gelu", fusedops.bias_gelu, ((ROWS, 24), (24,))),
    Call("glu", fusedops.glu, ((ROWS, 24), (ROWS, 24))),
    Call("glu, packed", fusedops.glu, ((ROWS, 24),)),
    Call("slices", fusedops.batched_layer_norm_tanh, ((ROWS, 3, 8), (3, 8), (8,))),
    Call("slices of widths", lambda x, w: fusedops.batched_layer_norm_tanh(x, w, sizes=(7, 17)), ((ROWS, 24), (24,))),
)  # fmt: skip


def _tensors(call: Call, rows: tuple[int, ...]) -> list[Tensor]:
    made = torch.Generator().manual_seed(len(call.name))
    shapes = [(*rows, *shape[1:]) if shape[0] is ROWS else shape for shape in call.shapes]
    return [torch.randn(shape, generator=made) for shape in shapes]


def _outputs(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _expected(function: Callable[..., Any], tensors: list[Tensor], made: torch.Generator) -> tuple[list[Tensor], ...]:
    """Outputs, cotangents and gradients of one process."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    torch.manual_seed(5)
    outputs = _outputs(function(*leaves))
    along = [torch.randn(out.shape, generator=made) for out in outputs]
    return [*outputs], along, [*torch.autograd.grad(outputs, leaves, along)]


def _sharded(call: Call, rows: tuple[int, ...], placement: Any, mesh: Any, *, compiled: bool = False) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    tensors, function = _tensors(call, rows), call.function
    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    outputs, along, gradients = _expected(function, tensors, torch.Generator().manual_seed(7))
    places = [placement if shape[0] is ROWS else Replicate() for shape in call.shapes]
    leaves = [distribute_tensor(t, mesh, [place]).requires_grad_() for t, place in zip(tensors, places, strict=True)]
    cotangents = [distribute_tensor(g, mesh, [placement]) for g in along]
    torch.manual_seed(5)
    collectives = CommDebugMode()
    with nullcontext() if compiled else collectives:  # torch.compile supports no mode
        found = _outputs(function(*leaves))
        grads = torch.autograd.grad(found, leaves, cotangents)
    # DTensor shards no dimension over more ranks than it has elements: it gathers the rows.
    shards = placement.is_replicate() or rows[placement.dim] >= RANKS
    if shards and not compiled:
        assert not collectives.get_total_counts(), (call.name, dict(collectives.get_comm_counts()))
    for out, expected in zip(found, outputs, strict=True):
        assert not shards or out.placements == (placement,)
        assert torch.equal(out.full_tensor(), expected), (call.name, rows, placement)
    for grad, expected, place in zip(grads, gradients, places, strict=True):
        rowwise = isinstance(place, Shard)
        partial = isinstance(placement, Shard) and not rowwise
        if shards and not compiled:  # torch.compile may add a parameter's gradients at once
            assert grad.placements == ((Partial() if partial else place),)
        if partial:
            torch.testing.assert_close(grad.full_tensor(), expected, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(grad.full_tensor(), expected)


def _other_placements(mesh: Any) -> None:
    """What no rule takes as it is, DTensor redistributes: partial sums, a sharded width, a cotangent placed otherwise."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    call = CALLS[0]
    tensors = _tensors(call, (4, 6))
    outputs, (along,), gradients = _expected(call.function, tensors, torch.Generator().manual_seed(7))
    for source, width in ((Partial(), Replicate()), (Shard(2), Shard(0)), (Shard(1), Replicate())):
        x, w, b = tensors
        part = x / RANKS
        placed = (
            DTensor.from_local(part, mesh, [source]) if source.is_partial() else distribute_tensor(x, mesh, [source])
        )
        leaves = [placed.requires_grad_(), *[distribute_tensor(t, mesh, [width]).requires_grad_() for t in (w, b)]]
        out = call.function(*leaves)
        torch.testing.assert_close(out.full_tensor(), outputs[0])
        grads = torch.autograd.grad(out, leaves, distribute_tensor(along, mesh, [Shard(0)]))
        for grad, expected in zip(grads, gradients, strict=True):
            torch.testing.assert_close(grad.full_tensor(), expected, rtol=1e-5, atol=1e-5)


def _masks_stay_with_their_rows(mesh: Any) -> None:
    """With dropout nothing may move after the mask's rows are known: not by cotangents, nor by sharded parameters."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    call = CALLS[3]
    assert "dropout" in call.name
    for save in ("sum", "inputs"):
        function = functools.partial(fusedops.bias_dropout_add_ln, p=0.4, save=save)
        tensors = _tensors(call, (4, 6))
        outputs, (along,), gradients = _expected(function, tensors, torch.Generator().manual_seed(7))
        for rows, other, vectors, cotangent in (
            (Shard(0), Shard(1), Replicate(), Replicate()), (Replicate(), Replicate(), Shard(0), Shard(1)),
            (Shard(1), Shard(1), Shard(0), Shard(0)), (Shard(2), Replicate(), Replicate(), Shard(0)),
        ):  # fmt: skip
            places = (rows, vectors, other, vectors, vectors)
            leaves = [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(tensors, places, strict=True)]
            torch.manual_seed(5)
            out = function(*leaves)
            assert torch.equal(out.full_tensor(), outputs[0]), (rows, other, vectors)
            grads = torch.autograd.grad(out, leaves, distribute_tensor(along, mesh, [cotangent]))
            for grad, expected in zip(grads, gradients, strict=True):
                torch.testing.assert_close(grad.full_tensor(), expected, rtol=1e-5, atol=1e-5)


def _a_parameter_learns_later(mesh: Any) -> None:
    """DTensor keeps the placements of a call: the outputs of a backward depend on what is needed."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x, weight = torch.randn(4, 6, 24), torch.randn(24)
    placed, vector = (
        distribute_tensor(x, mesh, [Shard(0)]).requires_grad_(),
        distribute_tensor(weight, mesh, [Replicate()]),
    )
    fusedops.layer_norm(placed, 24, vector).sum().backward()
    assert vector.grad is None
    vector.requires_grad_()
    fusedops.layer_norm(placed, 24, vector).sum().backward()
    weight.requires_grad_()
    torch.nn.functional.layer_norm(x, (24,), weight).sum().backward()
    torch.testing.assert_close(vector.grad.full_tensor(), weight.grad, rtol=1e-5, atol=1e-5)


def _on_one_rank_alone(rank: int) -> None:
    """The others take part in no mesh, and have no rows."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0])
    out = fusedops.bias_dropout_add(distribute_tensor(torch.ones(4, 24), mesh, [Shard(0)]), None, None, p=0.5)
    assert out.to_local().numel() == (4 * 24 if rank == 0 else 0)


def _second_derivatives(mesh: Any) -> None:
    """With dropout, in PyTorch's operators."""
    from torch.distributed.tensor import Shard, distribute_tensor

    def twice(t: Tensor) -> Tensor:
        torch.manual_seed(5)
        (once,) = torch.autograd.grad(fusedops.bias_act(t, None, "silu", p=0.4).sum(), t, create_graph=True)
        return torch.autograd.grad(once.sum(), t)[0]

    x = torch.randn(4, 6, 24)
    found = twice(distribute_tensor(x, mesh, [Shard(1)]).requires_grad_())
    torch.testing.assert_close(found.full_tensor(), twice(x.clone().requires_grad_()))


def _sequence_parallel(mesh: Any) -> None:
    """PyTorch's own plan for norms, over ours."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    torch.manual_seed(3)
    module, x = fusedops.nn.FusedLayerNorm(24), torch.randn(4, 6, 24)
    expected = module(x)
    parallel = parallelize_module(copy.deepcopy(module), mesh, SequenceParallel())
    out = parallel(x.chunk(RANKS, 1)[dist.get_rank()])
    assert out.placements == (Shard(1),)
    assert torch.equal(out.full_tensor(), expected)
    out.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(parallel.weight.grad.full_tensor(), module.weight.grad, rtol=1e-5, atol=1e-5)


def _two_dimensions() -> None:
    """Batch and sequence sharded over a mesh of two dimensions: the mask is that of one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, RANKS))
    x = torch.ones(2, 7, 24)
    torch.manual_seed(6)
    expected = fusedops.bias_dropout_add(x, None, torch.zeros_like(x), p=0.5)
    placed = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    torch.manual_seed(6)
    found = fusedops.bias_dropout_add(placed, None, torch.zeros_like(placed), p=0.5)
    assert torch.equal(found.full_tensor(), expected)


def _work(rank: int, store: str) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for call in CALLS:
        # Of four along the first dimension the ranks have two, two and none; of five along the second, one has one.
        for rows, placement in (((4, 5), Shard(0)), ((4, 5), Shard(1)), ((1, 2), Shard(0)), ((4, 5), Replicate())):
            _sharded(call, rows, placement, mesh)
    _other_placements(mesh)
    _masks_stay_with_their_rows(mesh)
    _a_parameter_learns_later(mesh)
    _on_one_rank_alone(rank)
    _second_derivatives(mesh)
    _sequence_parallel(mesh)
    _two_dimensions()
    for call in CALLS[2:6]:
        _sharded(call, (4, 6), Shard(1), mesh, compiled=True)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "ranks", "dims"),
    [
        ((4, 6), (2,), (0,)), ((5, 7), (3,), (1,)), ((4, 6), (2, 2), (0, 1)), ((4, 6, 5), (2, 3), (1, 2)),
        ((4, 6, 5), (2, 3), (0, 2)), ((4, 6, 5), (2, 2, 2), (0, 1, 2)), ((4,), (3,), (0,)), ((3, 9), (2, 2), (1, 1)),
        ((4, 6), (2, 2), (None, 1)), ((2, 4, 4, 4), (2, 2, 1), (1, 2, 3)),
    ],
)  # fmt: skip
def test_which_rows_a_shard_has(shape: tuple[int, ...], ranks: tuple[int, ...], dims: tuple[int | None, ...]) -> None:
    """On every rank, as the chunks that PyTorch's own `torch.chunk` takes."""
    rows = torch.arange(math.prod(shape)).view(shape)
    for place in itertools.product(*map(range, ranks)):
        shard = rows
        for count, at, dim in zip(ranks, place, dims, strict=True):
            if dim is not None:
                chunks = shard.chunk(count, dim)
                shard = chunks[at] if at < len(chunks) else shard.narrow(dim, 0, 0)
        own = torch.arange(shard.numel())
        base, outer, outer_apart, inner, inner_apart = numbers(shape, ranks, place, dims)
        found = base + own // outer * outer_apart + own % outer // inner * inner_apart + own % inner
        assert torch.equal(found, shard.flatten())


def test_three_processes(tmp_path: Path) -> None:
    mp.spawn(_work, (str(tmp_path / "store"),), RANKS)
