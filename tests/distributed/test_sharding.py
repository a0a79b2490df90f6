"""DTensors: results on four processes are those of one process.

They have the same bits if no sum crosses ranks. Norms of sharded columns exchange at most two
numbers per row.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
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

# --- properties that four ranks check -------------------------------------------------------------


def _compiled(call: Call, case: Case, mesh: Any) -> None:
    """Results under torch.compile are right, and other values do not compile again."""
    from torch.distributed.tensor import distribute_tensor

    torch.compiler.reset()
    function = torch.compile(call.function, backend="aot_eager", fullgraph=True)
    for stance in ("default", "fail_on_recompile"):
        expected = expected_of(call.function, tensors_of(call, case))
        leaves = [
            distribute_tensor(t, mesh, placements_of(call, case, shape)).requires_grad_()
            for t, shape in zip(expected.tensors, call.shapes, strict=True)
        ]
        torch.manual_seed(5)
        with torch.compiler.set_stance(stance):
            result = outputs_of(function(*leaves))
            cotangents = [
                distribute_tensor(cotangent, mesh, output.placements)
                for cotangent, output in zip(expected.cotangents, result, strict=True)
            ]
            gradients = torch.autograd.grad(result, leaves, cotangents)
        all_results = (*result, *gradients)
        all_expected = (*expected.outputs, *expected.gradients)
        terms = case.width + math.prod(case.rows)
        for ours, of_one_process in zip(all_results, all_expected, strict=True):
            compare(ours, of_one_process, terms, (call.name, case, "compiled"))


def _other_placements(mesh: Any) -> None:
    """Tensors with which a rank cannot compute are redistributed first.

    These are partial sums, a sharded parameter, and a cotangent with another placement.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    call, case = call_named("layer_norm"), Case((4, 6), 24, (RANKS,), sharded=(None,))
    expected = expected_of(call.function, tensors_of(call, case))
    for x_placement, vector_placement in (
        (Partial(), Replicate()),
        (Shard(2), Shard(0)),
        (Shard(1), Shard(0)),
        (Partial(), Shard(0)),
    ):
        x, weight, bias = expected.tensors
        if x_placement.is_partial():
            sharded_x = DTensor.from_local(x / RANKS, mesh, [x_placement])
        else:
            sharded_x = distribute_tensor(x, mesh, [x_placement])
        vectors = [distribute_tensor(t, mesh, [vector_placement]) for t in (weight, bias)]
        leaves = [t.requires_grad_() for t in (sharded_x, *vectors)]
        output = call.function(*leaves)
        compare(output, expected.outputs[0], 24, (x_placement, vector_placement))
        cotangent = distribute_tensor(expected.cotangents[0], mesh, [Shard(0)])
        gradients = torch.autograd.grad(output, leaves, cotangent)
        for gradient, of_one_process in zip(gradients, expected.gradients, strict=True):
            compare(gradient, of_one_process, 48, (x_placement, vector_placement))


def _partial_sums_take_the_placement_of_a_sharded_residual(mesh: Any) -> None:
    """A linear layer's partial sums are scattered to the residual's placement, not gathered."""
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    x, residual = torch.randn(2, 4, 6, 24)
    expected = fusedops.bias_dropout_add(x, None, residual, p=0.0)
    partial_x = DTensor.from_local(x / RANKS, mesh, [Partial()])
    sharded_residual = distribute_tensor(residual, mesh, [Shard(0)])
    with Traffic() as traffic:
        output = fusedops.bias_dropout_add(partial_x, None, sharded_residual, p=0.0)
    assert traffic.names == ["reduce_scatter_tensor"], traffic.collectives
    assert output.placements == (Shard(0),)
    compare(output, expected, RANKS, ())


def _masks_depend_on_rows_not_on_placements(mesh: Any) -> None:
    """Tensors and cotangents may be redistributed: a row keeps the mask of its index."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    case = Case((4, 4), 32, (RANKS,), sharded=(None,))
    # The placements of x, of the residual, of the vectors, and of the cotangents.
    for save, placements in (
        ("inputs", (Shard(0), Shard(1), Replicate(), Replicate())),
        ("inputs", (Shard(1), Shard(1), Shard(0), Shard(0))),
        ("sum", (Replicate(), Replicate(), Shard(0), Shard(1))),
        ("sum", (Shard(2), Replicate(), Replicate(), Shard(0))),
        ("sum", (Replicate(), Shard(1), Replicate(), Shard(2))),
    ):
        of_x, of_residual, of_vectors, of_cotangents = placements
        function = functools.partial(
            fusedops.bias_dropout_add_ln, p=0.4, save=save, return_sum=True
        )
        expected = expected_of(function, tensors_of(call_named("bias_dropout_add_ln"), case))
        argument_placements = (of_x, of_vectors, of_residual, of_vectors, of_vectors)
        leaves = [
            distribute_tensor(t, mesh, [placement]).requires_grad_()
            for t, placement in zip(expected.tensors, argument_placements, strict=True)
        ]
        torch.manual_seed(5)
        y, z = function(*leaves)
        expected_y, expected_z = expected.outputs
        assert torch.equal(z.full_tensor(), expected_z), placements
        columns_are_sharded = of_x == Shard(2)
        compare(y, expected_y, 32 if columns_are_sharded else 0, placements)
        cotangents = [distribute_tensor(g, mesh, [of_cotangents]) for g in expected.cotangents]
        gradients = torch.autograd.grad((y, z), leaves, cotangents)
        for gradient, of_one_process in zip(gradients, expected.gradients, strict=True):
            compare(gradient, of_one_process, 56, placements)


def _roundings(mesh: Any) -> None:
    """A norm of sharded columns rounds as ``rounding`` says, and casts the rounded output."""
    from torch.distributed.tensor import Shard, distribute_tensor

    x, residual, weight = (t.bfloat16() for t in torch.randn(3, 16, 32))
    for rounding, is_fp32, offset in (
        ("once", True, 0.0),
        ("once", True, 1.0),
        ("llama", False, 0.0),
        ("t5", False, 0.0),
    ):
        tensors = (x, None, residual, weight[0])
        if is_fp32:
            tensors = (x, None, residual.float(), weight[0].float())
        function = functools.partial(
            fusedops.bias_dropout_add_rms_norm,
            p=0.0,
            rounding=rounding,
            return_sum=True,
            cast_dtype=torch.float16,
            weight_offset=offset,
        )
        sharded = [
            None if t is None else distribute_tensor(t, mesh, [Shard(t.dim() - 1)]) for t in tensors
        ]
        for output, of_one_process in zip(function(*sharded), function(*tensors), strict=True):
            assert output.dtype == of_one_process.dtype, (rounding, is_fp32)
            result, expected = output.full_tensor().float(), of_one_process.float()
            unit = torch.finfo(output.dtype).eps * (32 if output.dtype == torch.float32 else 1)
            # The statistics differ in the last bits of fp32, so a few numbers round the other way.
            torch.testing.assert_close(result, expected, rtol=2 * unit, atol=1e-6)
            if output.dtype != torch.float32:
                assert (result != expected).float().mean() < 0.02, (rounding, is_fp32)


def _parameter_requires_a_gradient_later(mesh: Any) -> None:
    """The tensors that need a gradient may change from call to call."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x, weight = torch.randn(4, 6, 24), torch.randn(24)
    sharded_x = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    replicated = distribute_tensor(weight, mesh, [Replicate()])
    fusedops.layer_norm(sharded_x, 24, replicated).sum().backward()
    assert replicated.grad is None
    replicated.requires_grad_()
    fusedops.layer_norm(sharded_x, 24, replicated).sum().backward()
    weight.requires_grad_()
    F.layer_norm(x, (24,), weight).sum().backward()
    torch.testing.assert_close(replicated.grad.full_tensor(), weight.grad, rtol=1e-5, atol=1e-5)


def _redistributed_parameter_without_influence_has_a_gradient_of_zero(mesh: Any) -> None:
    """The loss does not depend on the weight, which is sharded and so gathered."""
    from torch.distributed.tensor import Shard, distribute_tensor

    x, residual, weight = [
        distribute_tensor(torch.ones(shape), mesh, [Shard(0)]).requires_grad_()
        for shape in ((4, 24), (4, 24), (24,))
    ]
    _, z = fusedops.bias_dropout_add_ln(x, None, residual, weight, None, p=0.0, return_sum=True)
    z.sum().backward()
    assert x.grad.full_tensor().eq(1).all()
    assert weight.grad.full_tensor().eq(0).all()


def _gradients_are_none_on_all_ranks_or_on_none(mesh: Any) -> None:
    """A rank without rows has gradients for the same tensors as the others.

    Otherwise the next collective of the others would wait for it.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def check_equal_on_all_ranks(gradients: Sequence[Any]) -> None:
        layouts = [None if t is None else (tuple(t.shape), t.placements) for t in gradients]
        layouts_of_ranks: list[Any] = [None] * RANKS
        dist.all_gather_object(layouts_of_ranks, layouts)
        assert layouts_of_ranks == [layouts] * RANKS

    for rows, shards_weight in ((RANKS, False), (RANKS - 1, False), (RANKS - 1, True)):
        x, residual = (
            distribute_tensor(torch.ones(rows, 24), mesh, [Shard(0)]).requires_grad_()
            for _ in range(2)
        )
        weight_placement = Shard(0) if shards_weight else Replicate()
        weight = distribute_tensor(torch.ones(24), mesh, [weight_placement]).requires_grad_()
        y, z = fusedops.bias_dropout_add_ln(x, None, residual, weight, None, p=0.4, return_sum=True)
        for output in (y, z):
            gradients = torch.autograd.grad(
                output.sum(), (x, residual, weight), retain_graph=True, allow_unused=True
            )
            *_, weight_gradient = gradients
            # A gathered weight has a gradient of zeros if the output does not depend on it.
            assert (weight_gradient is None) == (output is z and not shards_weight)
            check_equal_on_all_ranks(gradients)
        first = torch.autograd.grad(y.square().sum(), (x, weight), create_graph=True)
        second = torch.autograd.grad(
            sum(t.square().sum() for t in first), (x, residual, weight), allow_unused=True
        )
        check_equal_on_all_ranks(second)


def _tensors_without_elements_draw_nothing(mesh: Any) -> None:
    """The random state does not change, as in one process."""
    from torch.distributed.tensor import Shard, distribute_tensor

    state = torch.get_rng_state()
    fusedops.bias_dropout_add(
        distribute_tensor(torch.ones(0, 24), mesh, [Shard(0)]), None, None, p=0.5
    )
    assert torch.equal(torch.get_rng_state(), state)


def _asynchronous_collectives(mesh: Any) -> None:
    """A call waits for an input that is still being reduced, as by a row-wise parallel layer."""
    from torch.distributed.tensor import DTensor, Partial, Shard

    x = torch.randn(4, 24)
    partial_x = DTensor.from_local(x / RANKS, mesh, [Partial()]).requires_grad_()
    reducing = partial_x.redistribute(placements=[Shard(0)], async_op=True)
    output = fusedops.layer_norm(reducing, 24)
    compare(output, F.layer_norm(x, (24,)), 24, ())
    output.sum().backward()
    assert partial_x.grad is not None


def _implicit_replication(mesh: Any) -> None:
    """Plain tensors under PyTorch's context manager have the gradients of one process.

    It turns them into replicated DTensors.
    """
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication

    x, weight = torch.randn(4, 24), torch.ones(24, requires_grad=True)
    with implicit_replication():
        result = fusedops.layer_norm(distribute_tensor(x, mesh, [Shard(0)]), 24, weight)
    result.square().sum().backward()
    expected = weight.detach().clone().requires_grad_()
    F.layer_norm(x, (24,), expected).square().sum().backward()
    torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-5, atol=1e-5)


def _mesh_of_one_rank(rank: int) -> None:
    """Ranks outside of the mesh have no elements."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0])
    elements = 4 * 24 if rank == 0 else 0
    for dim in (0, 1):
        x = distribute_tensor(torch.ones(4, 24), mesh, [Shard(dim)])
        dropped = fusedops.bias_dropout_add(x, None, None, p=0.5)
        assert dropped.to_local().numel() == elements
        assert fusedops.layer_norm(x, 24).to_local().numel() == elements


def _without_kernels(meshes: dict[tuple[int, ...], Any], full: bool) -> None:
    """PyTorch's operators give the same results, with PyTorch's masks.

    Functions of `rowwise` are left out, because they consist of PyTorch's operators anyway.
    """
    calls = [call for call in CALLS if "rowwise" not in call.name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "runs_kernels", lambda kind: False)
        for op in (NORM, ACTIVATION, SLICES):
            patch.setattr(op, "sites", {})
        for call, case in itertools.product(calls, CASES[:: 2 if full else 4]):
            if call.columns != "gathered" or COLS not in case.sharded:
                check(call, case, meshes, kernels=False)
        _mesh_of_one_rank(dist.get_rank())
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
    """They have the mask of the first derivative, and equal those of one process."""
    from torch.distributed.tensor import Shard, distribute_tensor

    def second_derivative(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
        torch.manual_seed(5)
        (first,) = torch.autograd.grad(function(t).sum(), t, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), t)
        return second

    x = torch.randn(2, 6, 32, dtype=torch.float64)
    for dim, function in (
        (1, lambda t: fusedops.bias_act(t, None, "silu", p=0.4)),
        (2, lambda t: fusedops.bias_act(t, None, "silu", p=0.4)),
        (2, lambda t: fusedops.layer_norm(t, 32).sin()),
        (1, dropped_twice),
    ):
        sharded = distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_()
        result = second_derivative(function, sharded)
        expected = second_derivative(function, x.clone().requires_grad_())
        torch.testing.assert_close(result.full_tensor(), expected)


def _sequence_parallel(mesh: Any) -> None:
    """A fused norm takes PyTorch's `SequenceParallel`."""
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
    """A row-wise function may capture a module whose parameters are DTensors."""
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
    """The mask is that of one process, for any two sharded dimensions of rows and columns."""
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
        expected_placements = placements
        if placements == (Shard(3), Shard(3)):
            # Four ranks would have 12 columns each, not a multiple of eight. So the second
            # dimension of the mesh does not shard them.
            expected_placements = (Shard(3), Replicate())
        assert tuple(result.placements) == expected_placements, placements


def _bad_input(mesh: Any, other_mesh: Any) -> None:
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
        fusedops.bias_gelu(x, distribute_tensor(vector, other_mesh, [Replicate()] * 2))
    unknown = DTensor.from_local(plain, mesh, [Partial("nonsense")])
    with pytest.raises(
        ValueError,
        match=r"gated_act: up is placed \(Partial\(nonsense\),\), which PyTorch cannot make",
    ):
        fusedops.gated_act(x, unknown)


def _indices_of_rows(mesh: Any) -> None:
    """A row's index is that in the whole tensor.

    A sharded dimension whose rows are numbered is gathered; others stay sharded.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def causal(x: Tensor) -> Tensor:
        row = torch.arange(x.shape[-2], device=x.device)[:, None]
        column = torch.arange(x.shape[-1], device=x.device)
        return x.masked_fill(column > row, -math.inf).softmax(-1)

    x, function = torch.randn(5, 6, 8), fusedops.rowwise(causal, strict=True)
    for source, expected in ((Shard(1), Replicate()), (Shard(0), Shard(0))):
        result = function(distribute_tensor(x, mesh, [source]))
        assert result.placements == (expected,)
        torch.testing.assert_close(result.full_tensor(), causal(x))


def _seeds(mesh: Any) -> None:
    """`check_seeds` passes if all ranks have one seed, and names the ranks with another."""
    check_seeds(mesh)
    if dist.get_rank() in (1, 3):
        torch.rand(1, device=mesh.device_type)
    ranks = ", ".join(str(rank) for rank in (1, 3) if rank < dist.get_world_size())
    with pytest.raises(
        RuntimeError, match=f"the random state of rank {ranks} is not that of rank 0"
    ):
        check_seeds(mesh)


def _checkpointed(mesh: Any) -> None:
    """A checkpointed call has the results of a plain one, and leaves the same random state."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(4, 6, 32)
    call = functools.partial(fusedops.bias_act, bias=None, activation="silu", p=0.4)
    for dim in range(3):
        results = []
        for function in (call, functools.partial(checkpoint, call, use_reentrant=False)):
            leaf = distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_()
            torch.manual_seed(5)
            output = function(leaf)
            (gradient,) = torch.autograd.grad(output.sum(), leaf)
            results.append((output.full_tensor(), gradient.full_tensor(), torch.get_rng_state()))
        assert all(map(torch.equal, *results))


def _table(full: bool) -> Iterator[tuple[Call, Case]]:
    """Yield the calls with their placements; without ``full``, a quarter of them.

    Every placement then has a quarter of the calls. Four adjacent calls draw masks, so each
    quarter has one of them.
    """
    for (call_index, call), (case_index, case) in itertools.product(
        enumerate(CALLS), enumerate(CASES)
    ):
        if call.columns == "gathered" and COLS in case.sharded and case is not CASES[4]:
            continue
        if full or (call_index + case_index) % 4 == 0:
            yield call, case


def _work(rank: int, store: str, full: bool) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    interpreter.install()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # PyTorch fills new memory with NaN
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    from torch.distributed.device_mesh import init_device_mesh

    mesh, square = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2))
    meshes = {(RANKS,): mesh, (2, 2): square}
    for call, case in _table(full):
        check(call, case, meshes)
    for check_property in (
        _other_placements,
        _partial_sums_take_the_placement_of_a_sharded_residual,
        _masks_depend_on_rows_not_on_placements,
        _roundings,
        _parameter_requires_a_gradient_later,
        _redistributed_parameter_without_influence_has_a_gradient_of_zero,
        _gradients_are_none_on_all_ranks_or_on_none,
        _tensors_without_elements_draw_nothing,
        _checkpointed,
        _asynchronous_collectives,
        _second_derivatives,
        _sequence_parallel,
        _captured_parameters,
        _implicit_replication,
        _indices_of_rows,
    ):
        torch.manual_seed(3)  # all ranks draw the same tensors
        check_property(mesh)
    _mesh_of_one_rank(rank)
    _without_private_names(meshes, full)
    _without_kernels(meshes, full)
    _several_dimensions_of_rows(square)
    _bad_input(mesh, square)
    for any_mesh in (mesh, square):
        torch.manual_seed(3)
        _seeds(any_mesh)
    if full:  # the short suite compiles on one of two simulated ranks, below
        for name, case in (
            ("bias_dropout_add_ln with dropout", CASES[4]),
            ("slices in tensors", CASES[1]),
            ("rowwise with dropout", CASES[1]),
        ):
            _compiled(call_named(name), case, mesh)
    dist.destroy_process_group()


def _work_on_two(rank: int, store: str, kind: str) -> None:
    """Check calls and seeds on two processes. With a ``kind`` of "cuda", each has a GPU."""
    if kind == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(kind, (2,))
    # On CPUs a test with four processes covers the other calls.
    for call, case in itertools.product(CALLS if kind == "cuda" else CALLS[::4], cases(2)):
        if call.columns != "gathered" or COLS not in case.sharded:
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
def test_results_on_two_processes_are_those_of_one(kind: str, tmp_path: Path) -> None:
    mp.spawn(_work_on_two, (str(tmp_path / "store"), kind), 2)


@on_cpus
def test_results_on_four_processes_are_those_of_one(tmp_path: Path, full: bool) -> None:
    preloaded = "torch._dynamo"
    run_ranks(_work, (str(tmp_path / "store"), full), RANKS, preloaded)


# --- simulated ranks ------------------------------------------------------------------------------


def _simulated(shape: tuple[int, ...], rank: int) -> list[Any]:
    """Return placements, local shapes and collectives of calls on one of many ranks.

    Each rank has one row and eight columns.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    records = []
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
    # For each case, the dimension of the call that each dimension of the mesh shards.
    sharded_dims = ((0,), (COLS,)) if len(shape) == 1 else ((0, COLS), (COLS, 0))
    try:
        mesh = init_device_mesh("cpu", shape)
        for name, sharded in itertools.product(_SIMULATED, sharded_dims):
            call, ranks = call_named(name), dict(zip(sharded, shape, strict=True))
            case = Case((ranks.get(0, 2), 3), 8 * ranks.get(COLS, 2), shape, sharded, vectors=True)
            sizes_of_tensors = [sizes_of(call, case, tensor) for tensor in call.shapes]
            leaves = []
            for sizes, tensor in zip(sizes_of_tensors, call.shapes, strict=True):
                placements = placements_of(call, case, tensor)
                local_sizes = list(sizes)
                for ranks_of_dim, placement in zip(shape, placements, strict=True):
                    if placement.is_shard():
                        local_sizes[placement.dim] //= ranks_of_dim
                local = torch.randn(local_sizes)
                leaf = DTensor.from_local(local, mesh, placements, run_check=False)
                leaves.append(leaf.requires_grad_())
            with Traffic() as traffic:
                result = outputs_of(call.function(*leaves))
                cotangents = [torch.ones_like(output) for output in result]
                gradients = torch.autograd.grad(result, leaves, cotangents)
            for gradient, sizes in zip(gradients, sizes_of_tensors, strict=True):
                assert list(gradient.shape) == sizes
            tensors: list[Any] = [*result, *gradients]
            layouts = [(t.placements, t.to_local().shape) for t in tensors]
            records.append((name, sharded, layouts, traffic.collectives))
    finally:
        dist.destroy_process_group()
    return records


_SIMULATED = ("layer_norm", "bias_dropout_add_ln with dropout", "bias_act with dropout", "glu")


@on_cpus
@pytest.mark.parametrize(("few", "many"), [((2,), (1024,)), ((2, 2), (128, 8))])
def test_traffic_of_a_rank_does_not_depend_on_the_number_of_ranks(
    few: tuple[int, ...], many: tuple[int, ...]
) -> None:
    """Each rank exchanges only numbers of its own rows."""
    records = _simulated(few, rank=0)
    assert records == _simulated(many, rank=0) == _simulated(many, rank=517)
    assert any(collectives for *_, collectives in records)


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
def test_second_of_two_ranks_has_its_part_of_the_results_of_one_process(
    name: str, dim: Any
) -> None:
    """The rank is simulated, also on a GPU. The test compares outputs, masks and gradients."""
    call, case = call_named(name), Case((4, 6), 64, (2,), (dim,))
    if dim == COLS and call.columns != "local":
        return  # there is no first rank with which it could exchange numbers
    with _second_of_two() as mesh:
        _compare_parts(call, case, mesh, call.function)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_calls_on_the_second_of_two_ranks_are_one_graph() -> None:
    """A second call with the same shapes does not compile again."""
    call, case = call_named("bias_dropout_add_ln with dropout"), Case((4, 6), 64, (2,), (0,))
    function = torch.compile(call.function, backend="aot_eager", fullgraph=True)
    with _second_of_two() as mesh:
        for stance in ("default", "fail_on_recompile"):
            with torch.compiler.set_stance(stance):
                _compare_parts(call, case, mesh, function)


@contextlib.contextmanager
def _second_of_two() -> Iterator[Any]:
    """Yield a mesh of two ranks; this process is the second, and there is no first."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        yield init_device_mesh(DEVICE.type, (2,))
    finally:
        dist.destroy_process_group()


def _compare_parts(call: Call, case: Case, mesh: Any, function: Callable[..., Any]) -> None:
    """Compare the second rank's part of outputs and gradients with those of one process.

    The same function computes both, because a compiled function draws its random state on a GPU
    by another operator than an eager one.
    """
    from torch.distributed.tensor import DTensor

    tensors = [t.to(DEVICE).requires_grad_() for t in tensors_of(call, case)]
    expected = _with_gradients(function, tensors)

    def second_part(t: Tensor, placement: Any) -> Tensor:
        if not placement.is_shard():
            return t.detach()
        _, second = t.detach().chunk(2, placement.dim)
        return second.contiguous()

    leaves = []
    for t, shape in zip(tensors, call.shapes, strict=True):
        (placement,) = placements_of(call, case, shape)
        local = second_part(t, placement)
        leaves.append(DTensor.from_local(local, mesh, [placement], run_check=False))
        leaves[-1].requires_grad_()
    for own, whole in zip(_with_gradients(function, leaves), expected, strict=True):
        (placement,) = own.placements
        if not placement.is_partial():
            assert torch.equal(own.to_local(), second_part(whole, placement))


def _with_gradients(function: Callable[..., Any], tensors: list[Any]) -> list[Any]:
    """Return a call's outputs, and the gradients of their sum."""
    torch.manual_seed(5)
    outputs = outputs_of(function(*tensors))
    return [*outputs, *torch.autograd.grad(outputs, tensors, list(map(torch.ones_like, outputs)))]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU to wait for")
def test_dropout_does_not_wait_for_the_gpu() -> None:
    """The host copies the random state of a shard to the GPU without a synchronisation."""
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
def test_part_of_the_mask_of_each_shard_is_that_of_torch_chunk(
    shape: tuple[int, ...], ranks: tuple[int, ...], dims: tuple[int | None, ...], parts: int
) -> None:
    """`numbers` describes the part of every rank.

    Args:
        shape: the dimensions of rows.
        ranks: the size of each dimension of the mesh.
        dims: the dimension of the tensor that each dimension of the mesh shards.
        parts: the number of parts of each row.
    """
    columns = 48  # six groups of eight
    group_indices = torch.arange(math.prod(shape) * parts * 6).view(*shape, parts, 6)
    for coordinate in itertools.product(*map(range, ranks)):
        shard = group_indices
        for count, index, dim in zip(ranks, coordinate, dims, strict=True):
            if dim is None:
                continue
            dim = -1 if dim == len(shape) else dim
            chunks = shard.chunk(count, dim)
            # torch.chunk returns fewer chunks if there are fewer elements than ranks.
            shard = chunks[index] if index < len(chunks) else shard.narrow(dim, 0, 0)
        local_rows = torch.arange(math.prod(shard.shape[:-1]))
        base, outer, outer_stride, inner, inner_stride, groups, first = numbers(
            (*shape, parts, columns), ranks, coordinate, dims
        )
        rows = base + local_rows // outer * outer_stride
        rows = rows + local_rows % outer // inner * inner_stride + local_rows % inner
        result = rows[:, None] * groups + first + torch.arange(shard.shape[-1])
        assert torch.equal(result, shard.reshape(result.shape))
