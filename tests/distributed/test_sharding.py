"""DTensors: four processes give what one gives, to the bit where no sum crosses them, and move two numbers of a row."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import functional as F

import fusedops
import interpreter
from fusedops.activations.operator import ACTIVATION
from fusedops.core.compat import distributed
from fusedops.core.launches import launch
from fusedops.distributed import check_seeds, sharding
from fusedops.distributed.sharding import numbers
from fusedops.norms.operator import NORM
from fusedops.slices.operator import SLICES
from ranks import run_ranks
from sharded_calls import (
    CALLS,
    CASES,
    COLS,
    RANKS,
    Call,
    Case,
    Traffic,
    call_named,
    cases,
    check,
    compare,
    dropped_twice,
    expected_of,
    modulated,
    outputs_of,
    placements_of,
    sizes_of,
    tensors_of,
)
from support import DEVICE, INTERPRETED

pytestmark = pytest.mark.kernels
on_cpus = pytest.mark.skipif(not INTERPRETED, reason="gloo's processes have CPUs")

# --- properties -----------------------------------------------------------------------------------


def _compiled(call: Call, case: Case, mesh: Any) -> None:
    """Under torch.compile, twice: other rows make no other graph."""
    from torch.distributed.tensor import distribute_tensor

    torch.compiler.reset()
    function = torch.compile(call.function, backend="aot_eager", fullgraph=True)
    for stance in ("default", "fail_on_recompile"):
        expected = expected_of(call.function, tensors_of(call, case))
        places = [placements_of(call, case, shape) for shape in call.shapes]
        leaves = [
            distribute_tensor(t, mesh, p).requires_grad_()
            for t, p in zip(expected.tensors, places, strict=True)
        ]
        torch.manual_seed(5)
        with torch.compiler.set_stance(stance):
            result = outputs_of(function(*leaves))
            cotangents = [
                distribute_tensor(g, mesh, o.placements)
                for g, o in zip(expected.cotangents, result, strict=True)
            ]
            grads = torch.autograd.grad(result, leaves, cotangents)
        for out, one in zip(
            (*result, *grads), (*expected.outputs, *expected.gradients), strict=True
        ):
            compare(out, one, case.width + math.prod(case.rows), (call.name, case, "compiled"))


def _other_placements(mesh: Any) -> None:
    """Tensors that no rank can compute with are redistributed first.

    Partial sums, a sharded parameter, a cotangent placed otherwise.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    call, case = call_named("layer_norm"), Case((4, 6), 24, (RANKS,), (None,))
    expected = expected_of(call.function, tensors_of(call, case))
    for source, width in (
        (Partial(), Replicate()),
        (Shard(2), Shard(0)),
        (Shard(1), Shard(0)),
        (Partial(), Shard(0)),
    ):
        x, w, b = expected.tensors
        part = x / RANKS
        placed = (
            DTensor.from_local(part, mesh, [source])
            if source.is_partial()
            else distribute_tensor(x, mesh, [source])
        )
        leaves = [
            placed.requires_grad_(),
            *[distribute_tensor(t, mesh, [width]).requires_grad_() for t in (w, b)],
        ]
        out = call.function(*leaves)
        compare(out, expected.outputs[0], 24, (source, width))
        grads = torch.autograd.grad(
            out, leaves, distribute_tensor(expected.cotangents[0], mesh, [Shard(0)])
        )
        for grad, one in zip(grads, expected.gradients, strict=True):
            compare(grad, one, 48, (source, width))


def _partial_sums_meet_a_sharded_residual(mesh: Any) -> None:
    """A linear layer's partial sums go to where the residual is: scattered, not gathered."""
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    x, residual = torch.randn(2, 4, 6, 24)
    expected = fusedops.bias_dropout_add(x, None, residual, p=0.0)
    placed = DTensor.from_local(x / RANKS, mesh, [Partial()])
    with Traffic() as traffic:
        out = fusedops.bias_dropout_add(
            placed, None, distribute_tensor(residual, mesh, [Shard(0)]), p=0.0
        )
    assert traffic.names == ["reduce_scatter_tensor"], traffic.found
    assert out.placements == (Shard(0),)
    compare(out, expected, RANKS, ())


def _masks_stay_with_their_rows(mesh: Any) -> None:
    """Whatever moves, by cotangents or other placements, the mask is that of the rows' places."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    case = Case((4, 4), 32, (RANKS,), (None,))
    for save, layouts in (
        (
            "inputs",
            (
                (Shard(0), Shard(1), Replicate(), Replicate()),
                (Shard(1), Shard(1), Shard(0), Shard(0)),
            ),
        ),
        (
            "sum",
            (
                (Replicate(), Replicate(), Shard(0), Shard(1)),
                (Shard(2), Replicate(), Replicate(), Shard(0)),
                (Replicate(), Shard(1), Replicate(), Shard(2)),
            ),
        ),
    ):
        function = functools.partial(
            fusedops.bias_dropout_add_ln, p=0.4, save=save, return_sum=True
        )
        expected = expected_of(function, tensors_of(call_named("bias_dropout_add_ln"), case))
        for rows, other, vectors, cotangent in layouts:
            places = (rows, vectors, other, vectors, vectors)
            leaves = [
                distribute_tensor(t, mesh, [p]).requires_grad_()
                for t, p in zip(expected.tensors, places, strict=True)
            ]
            torch.manual_seed(5)
            result = function(*leaves)
            assert torch.equal(result[1].full_tensor(), expected.outputs[1]), (rows, other, vectors)
            compare(
                result[0],
                expected.outputs[0],
                32 if rows == Shard(2) else 0,
                (rows, other, vectors),
            )
            along = [distribute_tensor(g, mesh, [cotangent]) for g in expected.cotangents]
            for grad, one in zip(
                torch.autograd.grad(result, leaves, along), expected.gradients, strict=True
            ):
                compare(grad, one, 56, (rows, other, vectors))


def _roundings(mesh: Any) -> None:
    """A norm of sharded columns rounds where a model does, and casts the rounded output."""
    from torch.distributed.tensor import Shard, distribute_tensor

    x, residual, weight = (t.bfloat16() for t in torch.randn(3, 16, 32))
    for rounding, wide, offset in (
        ("once", True, 0.0),
        ("once", True, 1.0),
        ("llama", False, 0.0),
        ("t5", False, 0.0),
    ):
        w = weight[0].float() if wide else weight[0]
        tensors = (x, None, residual.float(), w) if rounding == "once" else (x, None, residual, w)
        function = functools.partial(
            fusedops.bias_dropout_add_rms_norm,
            p=0.0,
            rounding=rounding,
            return_sum=True,
            cast_dtype=torch.float16,
            weight_offset=offset,
        )
        placed = [
            None if t is None else distribute_tensor(t, mesh, [Shard(t.dim() - 1)]) for t in tensors
        ]
        for out, one in zip(function(*placed), function(*tensors), strict=True):
            assert out.dtype == one.dtype, (rounding, wide)
            result, one = out.full_tensor().float(), one.float()
            unit = torch.finfo(out.dtype).eps * (32 if out.dtype == torch.float32 else 1)
            # The statistics differ in the last bits of fp32: now and then a number falls to the
            # other side.
            torch.testing.assert_close(result, one, rtol=2 * unit, atol=1e-6)
            assert out.dtype == torch.float32 or (result != one).float().mean() < 0.02, (
                rounding,
                wide,
            )


def _a_parameter_learns_later(mesh: Any) -> None:
    """The tensors that need a gradient may change from call to call."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x, weight = torch.randn(4, 6, 24), torch.randn(24)
    placed = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    vector = distribute_tensor(weight, mesh, [Replicate()])
    fusedops.layer_norm(placed, 24, vector).sum().backward()
    assert vector.grad is None
    vector.requires_grad_()
    fusedops.layer_norm(placed, 24, vector).sum().backward()
    weight.requires_grad_()
    F.layer_norm(x, (24,), weight).sum().backward()
    torch.testing.assert_close(vector.grad.full_tensor(), weight.grad, rtol=1e-5, atol=1e-5)


def _gradients_that_are_absent(mesh: Any) -> None:
    """A parameter that was moved, and that the loss does not depend on."""
    from torch.distributed.tensor import Shard, distribute_tensor

    x, residual, weight = [
        distribute_tensor(torch.ones(shape), mesh, [Shard(0)]).requires_grad_()
        for shape in ((4, 24), (4, 24), (24,))
    ]
    _, z = fusedops.bias_dropout_add_ln(x, None, residual, weight, None, p=0.0, return_sum=True)
    z.sum().backward()
    assert x.grad.full_tensor().eq(1).all()
    assert weight.grad.full_tensor().eq(0).all()


def _gradients_are_absent_on_all_ranks_or_none(mesh: Any) -> None:
    """A rank without rows has the gradients that the others have.

    Else their next collective waits for it.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def shapes(t: Any) -> Any:
        return None if t is None else (tuple(t.shape), t.placements)

    for rows, moves in ((RANKS, False), (RANKS - 1, False), (RANKS - 1, True)):
        x, residual = (
            distribute_tensor(torch.ones(rows, 24), mesh, [Shard(0)]).requires_grad_()
            for _ in range(2)
        )
        weight = distribute_tensor(
            torch.ones(24), mesh, [Shard(0) if moves else Replicate()]
        ).requires_grad_()
        y, z = fusedops.bias_dropout_add_ln(x, None, residual, weight, None, p=0.4, return_sum=True)
        for out in (y, z):
            result = torch.autograd.grad(
                out.sum(), (x, residual, weight), retain_graph=True, allow_unused=True
            )
            assert (result[2] is None) == (out is z and not moves)
            every: list[Any] = [None] * RANKS
            dist.all_gather_object(every, [shapes(t) for t in result])
            assert all(seen == every[0] for seen in every), every
        first = torch.autograd.grad(y.square().sum(), (x, weight), create_graph=True)
        second = torch.autograd.grad(
            sum(t.square().sum() for t in first), (x, residual, weight), allow_unused=True
        )
        dist.all_gather_object(every, [shapes(t) for t in second])
        assert all(seen == every[0] for seen in every), every


def _no_elements_draw_nothing(mesh: Any) -> None:
    """As in one process."""
    from torch.distributed.tensor import Shard, distribute_tensor

    state = torch.get_rng_state()
    fusedops.bias_dropout_add(
        distribute_tensor(torch.ones(0, 24), mesh, [Shard(0)]), None, None, p=0.5
    )
    assert torch.equal(torch.get_rng_state(), state)


def _collectives_that_are_under_way(mesh: Any) -> None:
    """The output of a row-wise parallel layer is still being reduced; a call waits for it."""
    from torch.distributed.tensor import DTensor, Partial, Shard

    x = torch.randn(4, 24)
    placed = DTensor.from_local(x / RANKS, mesh, [Partial()]).requires_grad_()
    out = fusedops.layer_norm(placed.redistribute(placements=[Shard(0)], async_op=True), 24)
    compare(out, F.layer_norm(x, (24,)), 24, ())
    out.sum().backward()
    assert placed.grad is not None


def _implicit_replication(mesh: Any) -> None:
    """PyTorch's context manager makes replicated DTensors of other tensors, whose gradients are those of one process."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication

    x, weight = torch.randn(4, 24), torch.ones(24, requires_grad=True)
    with implicit_replication():
        result = fusedops.layer_norm(distribute_tensor(x, mesh, [Shard(0)]), 24, weight)
    result.square().sum().backward()
    expected = weight.detach().clone().requires_grad_()
    F.layer_norm(x, (24,), expected).square().sum().backward()
    torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-5, atol=1e-5)


def _on_one_rank_alone(rank: int) -> None:
    """The others take part in no mesh, and have nothing."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0])
    for dim in (0, 1):
        x = distribute_tensor(torch.ones(4, 24), mesh, [Shard(dim)])
        out = fusedops.bias_dropout_add(x, None, None, p=0.5)
        assert out.to_local().numel() == (4 * 24 if rank == 0 else 0)
        assert fusedops.layer_norm(x, 24).to_local().numel() == (4 * 24 if rank == 0 else 0)


def _without_kernels(meshes: dict[tuple[int, ...], Any], full: bool) -> None:
    """PyTorch's operators give the same, with PyTorch's masks.

    A row-wise function is made of them itself.
    """
    names = [call for call in CALLS if "rowwise" not in call.name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "runs_kernels", lambda kind: False)
        for op in (NORM, ACTIVATION, SLICES):
            patch.setattr(op, "sites", {})
        for call, case in itertools.product(names, CASES[:: 2 if full else 4]):
            if call.columns != "gathered" or COLS not in case.along:
                check(call, case, meshes, kernels=False)
        _on_one_rank_alone(dist.get_rank())
        _scalars(meshes[(RANKS,)])


def _without_private_names(meshes: dict[tuple[int, ...], Any], full: bool) -> None:
    """Without DTensor's private names, its public functions give the same results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "_dtensor_parts", lambda: None)
        patch.setattr(sharding, "_plans", {})
        for case in CASES[::3] if full else CASES[4::4]:
            check(call_named("bias_dropout_add_ln with dropout"), case, meshes)


def _scalars(mesh: Any) -> None:
    """A tensor without dimensions has the mask of one process."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    for seed in range(4):
        torch.manual_seed(seed)
        expected = fusedops.bias_act(torch.tensor(2.0), None, "silu", p=0.5)
        torch.manual_seed(seed)
        result = fusedops.bias_act(
            distribute_tensor(torch.tensor(2.0), mesh, [Replicate()]), None, "silu", p=0.5
        )
        assert torch.equal(result.full_tensor(), expected)


def _second_derivatives(mesh: Any) -> None:
    """In PyTorch's operators, with the mask of the first, and across ranks."""
    from torch.distributed.tensor import Shard, distribute_tensor

    def twice(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
        torch.manual_seed(5)
        (once,) = torch.autograd.grad(function(t).sum(), t, create_graph=True)
        return torch.autograd.grad(once.square().sum(), t)[0]

    x = torch.randn(2, 6, 32, dtype=torch.float64)
    for dim, function in (
        (1, lambda t: fusedops.bias_act(t, None, "silu", p=0.4)),
        (2, lambda t: fusedops.bias_act(t, None, "silu", p=0.4)),
        (2, lambda t: fusedops.layer_norm(t, 32).sin()),
        (1, dropped_twice),
    ):
        result = twice(function, distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_())
        torch.testing.assert_close(
            result.full_tensor(), twice(function, x.clone().requires_grad_())
        )


def _sequence_parallel(mesh: Any) -> None:
    """PyTorch's own plan for norms, over ours."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    torch.manual_seed(3)
    module, x = fusedops.nn.FusedLayerNorm(24), torch.randn(4, 8, 24)
    expected = module(x)
    parallel = parallelize_module(copy.deepcopy(module), mesh, SequenceParallel())
    out = parallel(x.chunk(RANKS, 1)[dist.get_rank()])
    assert out.placements == (Shard(1),)
    assert torch.equal(out.full_tensor(), expected)
    out.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(
        parallel.weight.grad.full_tensor(), module.weight.grad, rtol=1e-5, atol=1e-5
    )


def _captured_parameters(mesh: Any) -> None:
    """A row-wise function takes a module's parameters, which are DTensors, as its own."""
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    norm, x = torch.nn.LayerNorm(24), torch.randn(4, 6, 24)
    branch = fusedops.rowwise(lambda t: t + norm(t), strict=True)
    expected = branch(x)
    distribute_module(norm, mesh)
    out = branch(distribute_tensor(x, mesh, [Shard(1)]))
    assert torch.equal(out.full_tensor(), expected)
    out.sum().backward()
    assert norm.weight.grad.placements[0].is_partial()


def _several_dimensions_of_rows(mesh: Any) -> None:
    """Batch, sequence and columns: the mask is that of one process on every mesh."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x = torch.ones(3, 7, 5, 48)
    torch.manual_seed(6)
    expected = fusedops.bias_dropout_add(x, None, None, p=0.5)
    for placements in (
        (Shard(0), Shard(1)),
        (Shard(1), Shard(2)),
        (Shard(2), Shard(3)),
        (Shard(3), Shard(0)),
        (Shard(3), Replicate()),
        (Shard(1), Shard(1)),
        (Shard(3), Shard(3)),
    ):
        torch.manual_seed(6)
        result = fusedops.bias_dropout_add(
            distribute_tensor(x, mesh, placements), None, None, p=0.5
        )
        assert torch.equal(result.full_tensor(), expected), placements
        # Twelve columns are no whole groups of eight, so that the second dimension shards nothing.
        assert list(result.placements) == [
            *placements[:1],
            Replicate() if placements[0] == placements[1] == Shard(3) else placements[1],
        ], placements


def _bad_input(mesh: Any, other: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    plain, vector = torch.randn(4, 24), torch.randn(24)
    x = distribute_tensor(plain, mesh, [Shard(0)])
    w = distribute_tensor(vector, mesh, [Replicate()])
    with pytest.raises(
        TypeError,
        match="layer_norm: weight is a tensor of one rank, expected a DTensor as input is",
    ):
        fusedops.layer_norm(x, 24, vector)
    with pytest.raises(
        TypeError, match="layer_norm: input is a tensor of one rank, expected a DTensor as bias is"
    ):
        fusedops.layer_norm(plain, 24, None, w)
    with pytest.raises(TypeError, match="modulated: scale is a tensor of one rank"):
        modulated(x, torch.randn(4, 1), w)
    with pytest.raises(TypeError, match="slice 1 is a tensor of one rank"):
        fusedops.batched_layer_norm_tanh([x, plain])
    with pytest.raises(ValueError, match=r"bias_gelu: bias is on DeviceMesh\(\(2, 2\).* as x$"):
        fusedops.bias_gelu(x, distribute_tensor(vector, other, [Replicate()] * 2))
    unknown = DTensor.from_local(plain, mesh, [Partial("nonsense")])
    with pytest.raises(
        ValueError,
        match=r"gated_act: up is placed \(Partial\(nonsense\),\), which PyTorch cannot make",
    ):
        fusedops.gated_act(x, unknown)


def _indices_of_rows(mesh: Any) -> None:
    """The index of a row is that in the whole tensor.

    Rows that are counted are gathered, others stay.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def causal(x: Tensor) -> Tensor:
        row = torch.arange(x.shape[-2], device=x.device)[:, None]
        return x.masked_fill(torch.arange(x.shape[-1], device=x.device) > row, -math.inf).softmax(
            -1
        )

    x, function = torch.randn(5, 6, 8), fusedops.rowwise(causal, strict=True)
    for source, expected in ((Shard(1), Replicate()), (Shard(0), Shard(0))):
        result = function(distribute_tensor(x, mesh, [source]))
        assert result.placements == (expected,)
        torch.testing.assert_close(result.full_tensor(), causal(x))


def _seeds(mesh: Any) -> None:
    """The check passes for one seed, and names the ranks that have another."""
    check_seeds(mesh)
    if dist.get_rank() in (1, 3):
        torch.rand(1, device=mesh.device_type)
    ranks = ", ".join(str(rank) for rank in (1, 3) if rank < dist.get_world_size())
    with pytest.raises(
        RuntimeError, match=f"the random state of rank {ranks} is not that of rank 0"
    ):
        check_seeds(mesh)


def _checkpointed(mesh: Any) -> None:
    """The recomputation of a checkpoint draws the mask again, and nothing besides."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(4, 6, 32)
    for dim in range(3):
        results = []
        for call in (
            lambda t: t,
            lambda t: checkpoint(fusedops.bias_act, t, None, "silu", p=0.4, use_reentrant=False),
        ):
            leaf = distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_()
            torch.manual_seed(5)
            out = fusedops.bias_act(leaf, None, "silu", p=0.4) if not results else call(leaf)
            (gradient,) = torch.autograd.grad(out.sum(), leaf)
            results.append((out.full_tensor(), gradient.full_tensor(), torch.get_rng_state()))
        assert all(map(torch.equal, *results))


def _table(full: bool) -> Iterator[tuple[Call, Case]]:
    """The calls and their placements; without ``full`` each placement has a quarter of the calls.

    Four adjacent calls draw masks, so one of them is in each quarter.
    """
    for (index, call), (place, case) in itertools.product(enumerate(CALLS), enumerate(CASES)):
        if call.columns == "gathered" and COLS in case.along and case is not CASES[4]:
            continue
        if full or (index + place) % 4 == 0:
            yield call, case


def _work(rank: int, store: str, full: bool) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    interpreter.install()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    from torch.distributed.device_mesh import init_device_mesh

    mesh, square = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2))
    meshes = {(RANKS,): mesh, (2, 2): square}
    for call, case in _table(full):
        check(call, case, meshes)
    for holds in (
        _other_placements,
        _partial_sums_meet_a_sharded_residual,
        _masks_stay_with_their_rows,
        _roundings,
        _a_parameter_learns_later,
        _gradients_that_are_absent,
        _gradients_are_absent_on_all_ranks_or_none,
        _no_elements_draw_nothing,
        _checkpointed,
        _collectives_that_are_under_way,
        _second_derivatives,
        _sequence_parallel,
        _captured_parameters,
        _implicit_replication,
        _indices_of_rows,
    ):
        torch.manual_seed(3)  # all ranks draw the same tensors
        holds(mesh)
    _on_one_rank_alone(rank)
    _without_private_names(meshes, full)
    _without_kernels(meshes, full)
    _several_dimensions_of_rows(square)
    _bad_input(mesh, square)
    for checked in (mesh, square):
        torch.manual_seed(3)
        _seeds(checked)
    compiled = (
        ("bias_dropout_add_ln with dropout", CASES[4]),
        ("slices in tensors", CASES[1]),
        ("rowwise with dropout", CASES[1]),
    )
    # The short suite compiles on one of two ranks, below.
    for name, case in compiled if full else ():
        _compiled(call_named(name), case, mesh)
    dist.destroy_process_group()


def _work_on_gpus(rank: int, store: str, kind: str) -> None:
    """The table and the check of seeds on two processes, which have a GPU each if that is the kind."""
    if kind == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(kind, (2,))
    # On CPUs a test with four processes covers the other calls.
    for call, case in itertools.product(CALLS if kind == "cuda" else CALLS[::4], cases(2)):
        if call.columns != "gathered" or COLS not in case.along:
            check(call, case, {(2,): mesh})
    torch.manual_seed(3)
    _seeds(mesh)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("cpu", marks=(on_cpus, pytest.mark.full)),
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(
                INTERPRETED or torch.cuda.device_count() < 2, reason="needs two GPUs"
            ),
        ),
    ],
)
def test_two_processes(kind: str, tmp_path: Path) -> None:
    mp.spawn(_work_on_gpus, (str(tmp_path / "store"), kind), 2)


@on_cpus
def test_four_processes(tmp_path: Path, full: bool) -> None:
    run_ranks(_work, (str(tmp_path / "store"), full), RANKS, "torch._dynamo")


# --- simulated ranks ------------------------------------------------------------------------------


def _simulated(shape: tuple[int, ...], rank: int) -> list[Any]:
    """Placements, local shapes and collectives of calls on one of many ranks.

    Each has a row and eight columns.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    seen = []
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
    try:
        mesh = init_device_mesh("cpu", shape)
        for name, along in itertools.product(
            _SIMULATED, ((0,), (COLS,)) if len(shape) == 1 else ((0, COLS), (COLS, 0))
        ):
            call, ranks = call_named(name), dict(zip(along, shape, strict=True))
            case = Case((ranks.get(0, 2), 3), 8 * ranks.get(COLS, 2), shape, along, vectors=True)
            whole = [sizes_of(call, case, tensor) for tensor in call.shapes]
            leaves = []
            for sizes, tensor in zip(whole, call.shapes, strict=True):
                places = placements_of(call, case, tensor)
                local = [
                    size // math.prod([shape[at] for at, p in enumerate(places) if p.is_shard(dim)])
                    for dim, size in enumerate(sizes)
                ]
                leaves.append(
                    DTensor.from_local(
                        torch.randn(local), mesh, places, run_check=False
                    ).requires_grad_()
                )
            with Traffic() as traffic:
                result = outputs_of(call.function(*leaves))
                grads = torch.autograd.grad(
                    result, leaves, [torch.ones_like(out) for out in result]
                )
            tensors: list[Any] = [*result, *grads]
            for t, sizes in zip(grads, whole, strict=True):
                assert list(t.shape) == sizes
            seen.append(
                (name, along, [(t.placements, t.to_local().shape) for t in tensors], traffic.found)
            )
    finally:
        dist.destroy_process_group()
    return seen


_SIMULATED = ("layer_norm", "bias_dropout_add_ln with dropout", "bias_act with dropout", "glu")


@on_cpus
@pytest.mark.parametrize(("few", "many"), [((2,), (1024,)), ((2, 2), (128, 8))])
def test_many_ranks_do_what_few_do(few: tuple[int, ...], many: tuple[int, ...]) -> None:
    """Each of a thousand ranks moves what one of two moves: the numbers of its own rows."""
    seen = _simulated(few, 0)
    assert seen == _simulated(many, 0) == _simulated(many, 517)
    assert any(collectives for *_, collectives in seen)


@pytest.mark.parametrize(
    "name",
    [
        "bias_dropout_add_ln with dropout",
        "bias_dropout_add with dropout",
        "bias_act with dropout",
        "rowwise with dropout",
    ],
)
@pytest.mark.parametrize("dim", [0, 1, COLS])
def test_the_second_of_two_ranks(name: str, dim: Any) -> None:
    """On a GPU too: its part of the outputs, masks and gradients of one process."""
    call, case = call_named(name), Case((4, 6), 64, (2,), (dim,))
    if dim == COLS and call.columns != "local":
        return  # what ranks exchange is not there
    with _second_of_two() as mesh:
        _compare_parts(call, case, mesh, call.function)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_calls_of_the_second_of_two_ranks() -> None:
    """A whole graph, of which a second call with the same shapes makes no other."""
    call, case = call_named("bias_dropout_add_ln with dropout"), Case((4, 6), 64, (2,), (0,))
    function = torch.compile(call.function, backend="aot_eager", fullgraph=True)
    with _second_of_two() as mesh:
        for stance in ("default", "fail_on_recompile"):
            with torch.compiler.set_stance(stance):
                _compare_parts(call, case, mesh, function)


@contextlib.contextmanager
def _second_of_two() -> Iterator[Any]:
    """A mesh of two ranks, of which only the second is there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        yield init_device_mesh(DEVICE.type, (2,))
    finally:
        dist.destroy_process_group()


def _compare_parts(call: Call, case: Case, mesh: Any, function: Callable[..., Any]) -> None:
    """The second rank's part of outputs and gradients, against those of one process.

    The same function computes both: on a GPU a graph draws its random state by another operator.
    """
    from torch.distributed.tensor import DTensor

    whole = [t.to(DEVICE).requires_grad_() for t in tensors_of(call, case)]
    expected = _with_gradients(function, whole)

    def part(t: Tensor, place: Any) -> Tensor:
        return t.detach().chunk(2, place.dim)[1].contiguous() if place.is_shard() else t.detach()

    places = [placements_of(call, case, shape)[0] for shape in call.shapes]
    leaves = [
        DTensor.from_local(part(t, place), mesh, [place], run_check=False).requires_grad_()
        for t, place in zip(whole, places, strict=True)
    ]
    for own, one in zip(_with_gradients(function, leaves), expected, strict=True):
        if not own.placements[0].is_partial():
            assert torch.equal(own.to_local(), part(one, own.placements[0]))


def _with_gradients(function: Callable[..., Any], tensors: list[Any]) -> list[Any]:
    """A call's outputs, and the gradients of their sum."""
    torch.manual_seed(5)
    outputs = outputs_of(function(*tensors))
    return [*outputs, *torch.autograd.grad(outputs, tensors, list(map(torch.ones_like, outputs)))]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU to wait for")
def test_dropout_does_not_wait_for_the_gpu() -> None:
    """The random state of a shard goes there without the host's waiting."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        x = DTensor.from_local(
            torch.ones(4, 64, device=DEVICE), init_device_mesh("cuda", (2,)), [Shard(0)]
        )
        for mode in ("default", "error"):  # the first call compiles
            torch.cuda.set_sync_debug_mode(mode)
            fusedops.bias_dropout_add(x, None, None, p=0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()


# --- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "ranks", "dims"),
    [
        ((4, 6), (2,), (0,)),
        ((5, 7), (3,), (1,)),
        ((4, 6), (2, 2), (0, 1)),
        ((4, 6, 5), (2, 3), (1, 2)),
        ((4, 6, 5), (2, 3), (0, 2)),
        ((4, 6, 5), (2, 2, 2), (0, 1, 2)),
        ((4,), (3,), (0,)),
        ((3, 9), (2, 2), (1, 1)),
        ((4, 6), (2, 2), (None, 1)),
        ((2, 4, 4, 4), (2, 2, 1), (1, 2, 3)),
        ((4, 6), (3,), (2,)),
        ((4, 6), (2, 3), (1, 2)),
    ],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_which_part_of_a_mask_a_shard_has(
    shape: tuple[int, ...], ranks: tuple[int, ...], dims: tuple[int | None, ...], parts: int
) -> None:
    """On every rank, as the chunks that PyTorch's own `torch.chunk` takes."""
    columns = 48  # six groups of eight
    groups = torch.arange(math.prod(shape) * parts * 6).view(*shape, parts, 6)
    for place in itertools.product(*map(range, ranks)):
        shard = groups
        for count, at, dim in zip(ranks, place, dims, strict=True):
            if dim is not None:
                dim = -1 if dim == len(shape) else dim
                chunks = shard.chunk(count, dim)
                shard = chunks[at] if at < len(chunks) else shard.narrow(dim, 0, 0)
        rows = torch.arange(math.prod(shard.shape[:-1]))
        base, outer, outer_apart, inner, inner_apart, each, first = numbers(
            (*shape, parts, columns), ranks, place, dims
        )
        whole = (
            base + rows // outer * outer_apart + rows % outer // inner * inner_apart + rows % inner
        )
        result = whole[:, None] * each + first + torch.arange(shard.shape[-1])
        assert torch.equal(result, shard.reshape(result.shape))
