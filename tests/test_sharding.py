"""DTensors: four processes give what one gives, to the bit where no sum crosses them, and move two numbers of a row."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops.activations.operator import ACTIVATION
from fusedops.core import compat, launch, sharding
from fusedops.core.sharding import numbers
from fusedops.distributed import check_seeds
from fusedops.norms.operator import NORM
from fusedops.slices.operator import SLICES
from support import DEVICE, INTERPRETED

pytestmark = pytest.mark.kernels
on_cpus = pytest.mark.skipif(not INTERPRETED, reason="gloo's processes have CPUs")

RANKS = 4

# --- calls --------------------------------------------------------------------------------------------------------------

ROWS, COLS = "rows", "columns"
# What a call does with columns that are sharded: nothing crosses ranks; numbers of rows do; they are gathered first.
Columns = Literal["local", "reduced", "gathered"]


class Call(NamedTuple):
    """A call, and the shapes of its tensors: those with ROWS have rows, the others are parameters."""

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[Any, ...], ...]
    columns: Columns
    moved: tuple[int, int] = (0, 0)  # numbers of a row that cross ranks, forward and backward


@fusedops.rowwise(strict=True)
def _modulated(x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    z = F.dropout(x * (1 + scale), 0.4) + F.dropout(x, 0.3)
    return F.layer_norm(z, z.shape[-1:]) * weight, z


@fusedops.rowwise(strict=True)
def _rotated(x: Tensor, weight: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return F.dropout(torch.cat((-second, first), -1), 0.4) * weight


@fusedops.rowwise(strict=True)
def _dropped_twice(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.4) + F.dropout(x.cos(), 0.3)


FULL, VECTOR = (ROWS, COLS), (COLS,)
CALLS = (
    Call("layer_norm", lambda x, w, b: fusedops.layer_norm(x, x.shape[-1], w, b), (FULL, VECTOR, VECTOR), "reduced", (2, 2)),
    Call("layer_norm, two dimensions", lambda x, w: fusedops.layer_norm(x, (3, 8), w), ((ROWS, 3, 8), (3, 8)), "gathered"),
    Call("rms_norm", lambda x, w: fusedops.rms_norm(x, x.shape[-1], w), (FULL, VECTOR), "reduced", (1, 1)),
    Call("rms_norm, offset", lambda x, w: fusedops.rms_norm(x, x.shape[-1], w, weight_offset=1.0),
         (FULL, VECTOR), "reduced", (1, 1)),
    Call("bias_dropout_add_ln", lambda *t: fusedops.bias_dropout_add_ln(*t, p=0.0, return_sum=True),
         (FULL, VECTOR, FULL, VECTOR, VECTOR), "reduced", (2, 2)),
    Call("bias_dropout_add_ln with dropout", lambda *t: fusedops.bias_dropout_add_ln(*t, p=0.4, return_sum=True),
         (FULL, VECTOR, FULL, VECTOR, VECTOR), "reduced", (2, 2)),
    Call("bias_dropout_add_rms_norm with dropout", lambda *t: fusedops.bias_dropout_add_rms_norm(*t, p=0.4),
         (FULL, VECTOR, FULL, VECTOR), "reduced", (1, 1)),
    Call("bias_dropout_add with dropout", lambda *t: fusedops.bias_dropout_add(*t, p=0.4), (FULL, VECTOR, FULL), "local"),
    Call("bias_act with dropout", lambda *t: fusedops.bias_act(*t, "silu", p=0.4), (FULL, VECTOR), "local"),
    Call("bias_gelu", fusedops.bias_gelu, (FULL, VECTOR), "local"),
    Call("gelu", fusedops.gelu, (FULL,), "local"),
    Call("glu", fusedops.gated_act, (FULL, FULL), "local"),
    Call("glu, packed", fusedops.gated_act, ((ROWS, 24),), "gathered"),
    Call("slices", fusedops.batched_layer_norm_tanh, ((ROWS, 3, 8), (3, 8), (8,)), "gathered"),
    Call("slices of widths", lambda x, w: fusedops.batched_layer_norm_tanh(x, w, sizes=(7, 17)), ((ROWS, 24), (24,)), "gathered"),
    Call("slices in tensors", lambda x, y, w: fusedops.batched_layer_norm_tanh([x, y], w), ((ROWS, 7), (ROWS, 17), (24,)),
         "gathered"),
    Call("slices side by side", lambda x, y: fusedops.batched_layer_norm_tanh([x, y], concat=True), ((ROWS, 7), (ROWS, 17)),
         "gathered"),
    Call("rowwise with dropout", _modulated, (FULL, (ROWS, 1), VECTOR), "gathered"),
    Call("rowwise, parts of rows", _rotated, (FULL, VECTOR), "gathered"),
)  # fmt: skip


def _call(name: str) -> Call:
    return next(call for call in CALLS if call.name == name)


# --- placements ---------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Where tensors are: the rows' sizes, the width, the mesh, and along what each of its dimensions shards.

    Attributes:
        along: for each dimension of the mesh the dimension of the rows, COLS, or None.
        vectors: whether parameters are sharded as the columns, not replicated.
    """

    rows: tuple[int, ...]
    width: int
    mesh: tuple[int, ...]
    along: tuple[Any, ...]
    vectors: bool = False


CASES = (
    Case((5, 6), 24, (RANKS,), (0,)),  # 2, 2, 1 and no rows
    Case((4, 6), 24, (RANKS,), (1,)),  # of each row of the first dimension 2, 2, 2 and none
    Case((1, 2), 24, (RANKS,), (0,)),  # one rank has all
    Case((2, 3), 24, (RANKS,), (None,)),
    Case((2, 3), 32, (RANKS,), (COLS,)),
    Case((2, 3), 30, (RANKS,), (COLS,), vectors=True),  # 8, 8, 8 and 6
    Case((3,), 6, (RANKS,), (COLS,)),  # 2, 2, 2 and none
    Case((3, 3), 16, (2, 2), (1, COLS), vectors=True),  # 2 rows and 1
    Case((3,), 12, (2, 2), (COLS, 0)),  # 6 columns each
)  # fmt: skip


def _placements(call: Call, case: Case, shape: tuple[Any, ...]) -> list[Any]:
    """Of a tensor of the call."""
    from torch.distributed.tensor import Replicate, Shard

    found = []
    for dim in case.along:
        carries = shape[0] is ROWS
        if dim is None:
            found.append(Replicate())
        elif dim == COLS:
            dims = len(case.rows) + len(shape) - 1 if carries else len(shape)
            size = _sizes(call, case, shape)[-1]
            shards = size > 1 and (carries or (case.vectors and len(shape) == 1))
            found.append(Shard(dims - 1) if shards else Replicate())
        else:
            found.append(Shard(dim) if carries else Replicate())
    return found


def _sizes(call: Call, case: Case, shape: tuple[Any, ...]) -> list[int]:
    sizes = [case.rows if size is ROWS else (case.width,) if size == COLS else (size,) for size in shape]
    return list(itertools.chain(*sizes))


def _columns(call: Call, case: Case) -> Columns:
    """What the call does with its columns; of a mask eight adjacent ones are drawn at once."""
    aligned = (
        -(-case.width // math.prod([n for n, dim in zip(case.mesh, case.along, strict=True) if dim == COLS])) % 8 == 0
    )
    return call.columns if aligned or "with dropout" not in call.name else "gathered"


# --- what crosses ranks -------------------------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """The collectives of a block, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "_c10d_functional" and not func.__name__.startswith(("wait_", "_wrap_")):
            self.found.append((func.__name__, args[0].numel() * args[0].itemsize))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        """Of the collectives."""
        return [name.partition(".")[0] for name, _ in self.found]


# --- the table ----------------------------------------------------------------------------------------------------------


def _outputs(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _tensors(call: Call, case: Case) -> list[Tensor]:
    made = torch.Generator().manual_seed(len(call.name))
    return [torch.randn(_sizes(call, case, shape), generator=made) for shape in call.shapes]


class Expected(NamedTuple):
    """What one process computes."""

    tensors: list[Tensor]
    outputs: list[Tensor]
    cotangents: list[Tensor]
    gradients: list[Tensor]


_turn = itertools.count()


def _expected(function: Callable[..., Any], tensors: list[Tensor]) -> Expected:
    """The ranks take turns, and tell the others."""
    found: list[Any] = [None]
    source = next(_turn) % RANKS
    if dist.get_rank() == source:
        leaves = [t.clone().requires_grad_() for t in tensors]
        torch.manual_seed(5)
        outputs = _outputs(function(*leaves))
        made = torch.Generator().manual_seed(7)
        along = [torch.randn(out.shape, generator=made) for out in outputs]
        gradients = torch.autograd.grad(outputs, leaves, along)
        found = [Expected(tensors, [out.detach() for out in outputs], along, [*gradients])]
    dist.broadcast_object_list(found, source)
    return found[0]  # type: ignore[no-any-return]


def _compare(found: Tensor, expected: Tensor, terms: int, what: Any) -> None:
    """Equal, or where ``terms`` numbers are added up in another order, close.

    Each addition rounds, by half a unit in the last place of what was added up so far. That is not more than a small
    multiple of the largest result, here random: two for each of the sums that a gradient depends on.
    """
    whole = found.full_tensor()  # type: ignore[attr-defined]
    if terms:
        error = (whole - expected).abs().max().item()
        limit = 4 * terms * torch.finfo(expected.dtype).eps * max(expected.abs().max().item(), 1.0)
        assert error <= limit, (*what, error, limit)
    else:
        assert torch.equal(whole, expected), what


def _check(call: Call, case: Case, meshes: dict[tuple[int, ...], Any], *, kernels: bool = True) -> None:
    """A call, forward and backward, against one process: values, placements and collectives.

    PyTorch's sums over rows depend on the number of columns, and its activations, to the last bits, on where an element
    is: vector instructions take all but the last ones. The kernels' do not.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh, columns, what = meshes[case.mesh], _columns(call, case), (call.name, case)
    expected = _expected(call.function, _tensors(call, case))
    places = [_placements(call, case, shape) for shape in call.shapes]
    leaves = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip(expected.tensors, places, strict=True)]
    torch.manual_seed(5)
    with Traffic() as forward:
        found = _outputs(call.function(*leaves))
    gathered = COLS in case.along and columns == "gathered"
    reduced = COLS in case.along and columns == "reduced"
    last_bits = 0 if kernels else 2
    for number, (out, one) in enumerate(zip(found, expected.outputs, strict=True)):
        wanted = [Replicate() if dim is None or (dim == COLS and gathered)
                  else Shard(len(case.rows) if dim == COLS else dim) for dim in case.along]  # fmt: skip
        assert list(out.placements) == wanted, what  # type: ignore[attr-defined]
        _compare(
            out, one, case.width if reduced and number == 0 else last_bits, (*what, "output", number)
        )  # the sum is local
    cotangents = [distribute_tensor(g, mesh, out.placements) for g, out in zip(expected.cotangents, found, strict=True)]  # type: ignore[attr-defined]
    with Traffic() as backward:
        grads = torch.autograd.grad(found, leaves, cotangents)
    terms = case.width * reduced + last_bits
    for grad, one, place, shape in zip(grads, expected.gradients, places, call.shapes, strict=True):
        wanted = [place[at] if dim is None or not place[at].is_replicate() or (dim == COLS and gathered) else Partial()
                  for at, dim in enumerate(case.along)]  # fmt: skip
        assert list(grad.placements) == wanted, (*what, shape, grad.placements, wanted)  # type: ignore[attr-defined]
        partial = any(isinstance(dim, int) for dim in case.along) or not kernels
        rows = math.prod(case.rows) if shape[0] is not ROWS and partial else 0
        _compare(grad, one, terms + rows, (*what, "gradient", shape))
    if not gathered:
        _check_traffic(call, case, reduced, (forward, backward))


def _check_traffic(call: Call, case: Case, reduced: bool, traffic: tuple[Traffic, Traffic]) -> None:
    """Numbers of rows cross ranks, in fp32, or nothing does."""
    place = _place(case.mesh)
    rows = 1
    for dim, size in enumerate(case.rows):
        for at, along in enumerate(case.along):
            if along == dim:
                most = -(-size // case.mesh[at])
                size = max(min(most, size - most * place[at]), 0)
        rows *= size
    for numbers_of_row, seen in zip(call.moved, traffic, strict=True):
        assert seen.names == ["all_reduce"] * (numbers_of_row * reduced), (call.name, case, seen.found)
        assert sum(size for _, size in seen.found) == 4 * rows * numbers_of_row * reduced, (call.name, case, seen.found)


def _place(mesh: tuple[int, ...]) -> list[int]:
    rank = dist.get_rank()
    return [rank // math.prod(mesh[at + 1 :]) % size for at, size in enumerate(mesh)]


# --- properties beside it -----------------------------------------------------------------------------------------------


def _compiled(call: Call, case: Case, mesh: Any) -> None:
    """Under torch.compile, twice: other rows make no other graph."""
    from torch.distributed.tensor import distribute_tensor

    torch.compiler.reset()
    function = torch.compile(call.function, backend="aot_eager", fullgraph=True)
    for stance in ("default", "fail_on_recompile"):
        expected = _expected(call.function, _tensors(call, case))
        places = [_placements(call, case, shape) for shape in call.shapes]
        leaves = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip(expected.tensors, places, strict=True)]
        torch.manual_seed(5)
        with torch.compiler.set_stance(stance):
            found = _outputs(function(*leaves))
            cotangents = [
                distribute_tensor(g, mesh, o.placements) for g, o in zip(expected.cotangents, found, strict=True)
            ]
            grads = torch.autograd.grad(found, leaves, cotangents)
        for out, one in zip((*found, *grads), (*expected.outputs, *expected.gradients), strict=True):
            _compare(out, one, case.width + math.prod(case.rows), (call.name, case, "compiled"))


def _other_placements(mesh: Any) -> None:
    """What no rank can compute as it is, is moved first: partial sums, a sharded parameter, a cotangent placed otherwise."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    call, case = _call("layer_norm"), Case((4, 6), 24, (RANKS,), (None,))
    expected = _expected(call.function, _tensors(call, case))
    for source, width in ((Partial(), Replicate()), (Shard(2), Shard(0)), (Shard(1), Shard(0)), (Partial(), Shard(0))):
        x, w, b = expected.tensors
        part = x / RANKS
        placed = (
            DTensor.from_local(part, mesh, [source]) if source.is_partial() else distribute_tensor(x, mesh, [source])
        )
        leaves = [placed.requires_grad_(), *[distribute_tensor(t, mesh, [width]).requires_grad_() for t in (w, b)]]
        out = call.function(*leaves)
        _compare(out, expected.outputs[0], 24, (source, width))
        grads = torch.autograd.grad(out, leaves, distribute_tensor(expected.cotangents[0], mesh, [Shard(0)]))
        for grad, one in zip(grads, expected.gradients, strict=True):
            _compare(grad, one, 48, (source, width))


def _partial_sums_meet_a_sharded_residual(mesh: Any) -> None:
    """A linear layer's partial sums go to where the residual is: scattered, not gathered."""
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    x, residual = torch.randn(2, 4, 6, 24)
    expected = fusedops.bias_dropout_add(x, None, residual, p=0.0)
    placed = DTensor.from_local(x / RANKS, mesh, [Partial()])
    with Traffic() as traffic:
        out = fusedops.bias_dropout_add(placed, None, distribute_tensor(residual, mesh, [Shard(0)]), p=0.0)
    assert traffic.names == ["reduce_scatter_tensor"], traffic.found
    assert out.placements == (Shard(0),)
    _compare(out, expected, RANKS, ())


def _masks_stay_with_their_rows(mesh: Any) -> None:
    """Whatever moves, by cotangents or other placements, the mask is that of the rows' places."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    case = Case((4, 4), 32, (RANKS,), (None,))
    for save, layouts in (
        ("inputs", ((Shard(0), Shard(1), Replicate(), Replicate()), (Shard(1), Shard(1), Shard(0), Shard(0)))),
        ("sum", ((Replicate(), Replicate(), Shard(0), Shard(1)), (Shard(2), Replicate(), Replicate(), Shard(0)),
                 (Replicate(), Shard(1), Replicate(), Shard(2)))),
    ):  # fmt: skip
        function = functools.partial(fusedops.bias_dropout_add_ln, p=0.4, save=save, return_sum=True)
        expected = _expected(function, _tensors(_call("bias_dropout_add_ln"), case))
        for rows, other, vectors, cotangent in layouts:
            places = (rows, vectors, other, vectors, vectors)
            leaves = [
                distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(expected.tensors, places, strict=True)
            ]
            torch.manual_seed(5)
            found = function(*leaves)
            assert torch.equal(found[1].full_tensor(), expected.outputs[1]), (rows, other, vectors)
            _compare(found[0], expected.outputs[0], 32 if rows == Shard(2) else 0, (rows, other, vectors))
            along = [distribute_tensor(g, mesh, [cotangent]) for g in expected.cotangents]
            for grad, one in zip(torch.autograd.grad(found, leaves, along), expected.gradients, strict=True):
                _compare(grad, one, 56, (rows, other, vectors))


def _roundings(mesh: Any) -> None:
    """Of sharded columns too are rounded where a model rounds, and a copy of the output is of what was rounded."""
    from torch.distributed.tensor import Shard, distribute_tensor

    x, residual, weight = (t.bfloat16() for t in torch.randn(3, 64, 32))
    for rounding, wide in (("once", True), ("llama", False), ("t5", False), ("gemma", True)):
        w = weight[0].float() if wide else weight[0]
        tensors = (x, None, residual.float(), w) if rounding == "once" else (x, None, residual, w)
        function = functools.partial(fusedops.bias_dropout_add_rms_norm, p=0.0, rounding=rounding, return_sum=True,
                                     cast_dtype=torch.float16, weight_offset=float(rounding == "gemma"))  # fmt: skip
        placed = [None if t is None else distribute_tensor(t, mesh, [Shard(t.dim() - 1)]) for t in tensors]
        for out, one in zip(function(*placed), function(*tensors), strict=True):
            assert out.dtype == one.dtype, (rounding, wide)
            found, one = out.full_tensor().float(), one.float()
            unit = torch.finfo(out.dtype).eps * (32 if out.dtype == torch.float32 else 1)
            # The statistics differ in the last bits of fp32: now and then a number falls to the other side.
            torch.testing.assert_close(found, one, rtol=2 * unit, atol=1e-6)
            assert out.dtype == torch.float32 or (found != one).float().mean() < 0.02, (rounding, wide)


def _a_parameter_learns_later(mesh: Any) -> None:
    """What needs a gradient may change from call to call."""
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

    x, residual, weight = [distribute_tensor(torch.ones(shape), mesh, [Shard(0)]).requires_grad_()
                           for shape in ((4, 24), (4, 24), (24,))]  # fmt: skip
    _, z = fusedops.bias_dropout_add_ln(x, None, residual, weight, None, p=0.0, return_sum=True)
    z.sum().backward()
    assert x.grad.full_tensor().eq(1).all()
    assert weight.grad.full_tensor().eq(0).all()


def _gradients_are_absent_on_all_ranks_or_none(mesh: Any) -> None:
    """A rank without rows has the gradients that the others have: else their next collective waits for it."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def shapes(t: Any) -> Any:
        return None if t is None else (tuple(t.shape), t.placements)

    for rows, moves in ((RANKS, False), (RANKS - 1, False), (RANKS - 1, True)):
        x, residual = (distribute_tensor(torch.ones(rows, 24), mesh, [Shard(0)]).requires_grad_() for _ in range(2))
        weight = distribute_tensor(torch.ones(24), mesh, [Shard(0) if moves else Replicate()]).requires_grad_()
        y, z = fusedops.bias_dropout_add_ln(x, None, residual, weight, None, p=0.4, return_sum=True)
        for out in (y, z):
            found = torch.autograd.grad(out.sum(), (x, residual, weight), retain_graph=True, allow_unused=True)
            assert (found[2] is None) == (out is z and not moves)
            every: list[Any] = [None] * RANKS
            dist.all_gather_object(every, [shapes(t) for t in found])
            assert all(seen == every[0] for seen in every), every
        first = torch.autograd.grad(y.square().sum(), (x, weight), create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), (x, residual, weight), allow_unused=True)
        dist.all_gather_object(every, [shapes(t) for t in second])
        assert all(seen == every[0] for seen in every), every


def _no_elements_draw_nothing(mesh: Any) -> None:
    """As in one process."""
    from torch.distributed.tensor import Shard, distribute_tensor

    state = torch.get_rng_state()
    fusedops.bias_dropout_add(distribute_tensor(torch.ones(0, 24), mesh, [Shard(0)]), None, None, p=0.5)
    assert torch.equal(torch.get_rng_state(), state)


def _collectives_that_are_under_way(mesh: Any) -> None:
    """What a row-wise parallel layer hands on is not there yet; a call waits for it."""
    from torch.distributed.tensor import DTensor, Partial, Shard

    x = torch.randn(4, 24)
    placed = DTensor.from_local(x / RANKS, mesh, [Partial()]).requires_grad_()
    out = fusedops.layer_norm(placed.redistribute(placements=[Shard(0)], async_op=True), 24)
    _compare(out, F.layer_norm(x, (24,)), 24, ())
    out.sum().backward()
    assert placed.grad is not None


def _implicit_replication(mesh: Any) -> None:
    """PyTorch's context manager makes replicated DTensors of other tensors, whose gradients are those of one process."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication

    x, weight = torch.randn(4, 24), torch.ones(24, requires_grad=True)
    with implicit_replication():
        found = fusedops.layer_norm(distribute_tensor(x, mesh, [Shard(0)]), 24, weight)
    found.square().sum().backward()
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


def _without_kernels(meshes: dict[tuple[int, ...], Any]) -> None:
    """PyTorch's operators give the same, with PyTorch's masks; a row-wise function is made of them itself."""
    names = [call for call in CALLS if "rowwise" not in call.name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "runs_kernels", lambda kind: False)
        for op in (NORM, ACTIVATION, SLICES):
            patch.setattr(op, "signatures", ({}, {}))
        for call, case in itertools.product(names, CASES[::2]):
            if call.columns != "gathered" or COLS not in case.along:
                _check(call, case, meshes, kernels=False)
        _on_one_rank_alone(dist.get_rank())
        _scalars(meshes[(RANKS,)])


def _without_private_names(meshes: dict[tuple[int, ...], Any]) -> None:
    """Of DTensor: its public functions give the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "_dtensor_parts", lambda: None)
        patch.setattr(sharding, "_plans", {})
        for case in CASES[::3]:
            _check(_call("bias_dropout_add_ln with dropout"), case, meshes)


def _scalars(mesh: Any) -> None:
    """A tensor without dimensions has the mask of one process."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    for seed in range(4):
        torch.manual_seed(seed)
        expected = fusedops.bias_act(torch.tensor(2.0), None, "silu", p=0.5)
        torch.manual_seed(seed)
        found = fusedops.bias_act(distribute_tensor(torch.tensor(2.0), mesh, [Replicate()]), None, "silu", p=0.5)
        assert torch.equal(found.full_tensor(), expected)


def _second_derivatives(mesh: Any) -> None:
    """In PyTorch's operators, with the mask of the first, and across ranks."""
    from torch.distributed.tensor import Shard, distribute_tensor

    def twice(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
        torch.manual_seed(5)
        (once,) = torch.autograd.grad(function(t).sum(), t, create_graph=True)
        return torch.autograd.grad(once.square().sum(), t)[0]

    x = torch.randn(2, 6, 32, dtype=torch.float64)
    for dim, function in (
        (1, lambda t: fusedops.bias_act(t, None, "silu", p=0.4)), (2, lambda t: fusedops.bias_act(t, None, "silu", p=0.4)),
        (2, lambda t: fusedops.layer_norm(t, 32).sin()), (1, _dropped_twice),
    ):  # fmt: skip
        found = twice(function, distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_())
        torch.testing.assert_close(found.full_tensor(), twice(function, x.clone().requires_grad_()))


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
    torch.testing.assert_close(parallel.weight.grad.full_tensor(), module.weight.grad, rtol=1e-5, atol=1e-5)


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
    for placements in ((Shard(0), Shard(1)), (Shard(1), Shard(2)), (Shard(2), Shard(3)), (Shard(3), Shard(0)),
                       (Shard(3), Replicate()), (Shard(1), Shard(1)), (Shard(3), Shard(3))):  # fmt: skip
        torch.manual_seed(6)
        found = fusedops.bias_dropout_add(distribute_tensor(x, mesh, placements), None, None, p=0.5)
        assert torch.equal(found.full_tensor(), expected), placements
        # Twelve columns are no whole groups of eight, so that the second dimension shards nothing.
        assert list(found.placements) == [*placements[:1], Replicate() if placements[0] == placements[1] == Shard(3)
                                          else placements[1]], placements  # fmt: skip


def _bad_input(mesh: Any, other: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    plain, vector = torch.randn(4, 24), torch.randn(24)
    x = distribute_tensor(plain, mesh, [Shard(0)])
    w = distribute_tensor(vector, mesh, [Replicate()])
    with pytest.raises(TypeError, match="layer_norm: weight is a tensor of one rank, expected a DTensor as input is"):
        fusedops.layer_norm(x, 24, vector)
    with pytest.raises(TypeError, match="layer_norm: input is a tensor of one rank, expected a DTensor as bias is"):
        fusedops.layer_norm(plain, 24, None, w)
    with pytest.raises(TypeError, match="_modulated: scale is a tensor of one rank"):
        _modulated(x, torch.randn(4, 1), w)
    with pytest.raises(TypeError, match="slice 1 is a tensor of one rank"):
        fusedops.batched_layer_norm_tanh([x, plain])
    with pytest.raises(ValueError, match=r"bias_gelu: bias is on DeviceMesh\(\(2, 2\).* as x$"):
        fusedops.bias_gelu(x, distribute_tensor(vector, other, [Replicate()] * 2))
    unknown = DTensor.from_local(plain, mesh, [Partial("nonsense")])
    with pytest.raises(
        ValueError, match=r"gated_act: up is placed \(Partial\(nonsense\),\), which PyTorch cannot make"
    ):
        fusedops.gated_act(x, unknown)


def _seeds(mesh: Any) -> None:
    """The check passes for one seed, and names the ranks that have another."""
    check_seeds(mesh)
    if dist.get_rank() in (1, 3):
        torch.rand(1)
    with pytest.raises(RuntimeError, match="the random state of rank 1, 3 is not that of rank 0"):
        check_seeds(mesh)


def _work(rank: int, store: str) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    from torch.distributed.device_mesh import init_device_mesh

    mesh, square = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2))
    meshes = {(RANKS,): mesh, (2, 2): square}
    for call, case in itertools.product(CALLS, CASES):
        if call.columns != "gathered" or COLS not in case.along or case is CASES[4]:
            _check(call, case, meshes)
    for check in (_other_placements, _partial_sums_meet_a_sharded_residual, _masks_stay_with_their_rows, _roundings,
                  _a_parameter_learns_later, _gradients_that_are_absent, _gradients_are_absent_on_all_ranks_or_none,
                  _no_elements_draw_nothing, _collectives_that_are_under_way, _second_derivatives, _sequence_parallel,
                  _captured_parameters, _implicit_replication):  # fmt: skip
        torch.manual_seed(3)  # all ranks draw the same tensors
        check(mesh)
    _on_one_rank_alone(rank)
    _without_private_names(meshes)
    _without_kernels(meshes)
    _several_dimensions_of_rows(square)
    _bad_input(mesh, square)
    for checked in (mesh, square):
        torch.manual_seed(3)
        _seeds(checked)
    for name, case in (("bias_dropout_add_ln with dropout", CASES[4]), ("slices in tensors", CASES[1]),
                       ("rowwise with dropout", CASES[1])):  # fmt: skip
        _compiled(_call(name), case, mesh)
    dist.destroy_process_group()


@on_cpus
def test_four_processes(tmp_path: Path) -> None:
    mp.spawn(_work, (str(tmp_path / "store"),), RANKS)


# --- simulated ranks ----------------------------------------------------------------------------------------------------


def _simulated(shape: tuple[int, ...], rank: int) -> list[Any]:
    """Placements, local shapes and collectives of calls on one of many ranks; each has a row and eight columns."""
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
            call, ranks = _call(name), dict(zip(along, shape, strict=True))
            case = Case((ranks.get(0, 2), 3), 8 * ranks.get(COLS, 2), shape, along, vectors=True)
            whole = [_sizes(call, case, tensor) for tensor in call.shapes]
            leaves = []
            for sizes, tensor in zip(whole, call.shapes, strict=True):
                places = _placements(call, case, tensor)
                local = [size // math.prod([shape[at] for at, p in enumerate(places) if p.is_shard(dim)])
                         for dim, size in enumerate(sizes)]  # fmt: skip
                leaves.append(DTensor.from_local(torch.randn(local), mesh, places, run_check=False).requires_grad_())
            with Traffic() as traffic:
                found = _outputs(call.function(*leaves))
                grads = torch.autograd.grad(found, leaves, [torch.ones_like(out) for out in found])
            tensors: list[Any] = [*found, *grads]
            for t, sizes in zip(grads, whole, strict=True):
                assert list(t.shape) == sizes
            seen.append((name, along, [(t.placements, t.to_local().shape) for t in tensors], traffic.found))
    finally:
        dist.destroy_process_group()
    return seen


_SIMULATED = ("layer_norm", "bias_dropout_add_ln with dropout", "bias_act with dropout", "glu")


@on_cpus
@pytest.mark.parametrize(("few", "many"), [((2,), (1024,)), ((2, 2), (128, 8))])
def test_many_ranks_do_what_few_do(few: tuple[int, ...], many: tuple[int, ...]) -> None:
    """Of a thousand each moves what one of two moves: the numbers of its own rows."""
    seen = _simulated(few, 0)
    assert seen == _simulated(many, 0) == _simulated(many, 517)
    assert any(collectives for *_, collectives in seen)


@pytest.mark.parametrize("name", ["bias_dropout_add_ln with dropout", "bias_dropout_add with dropout",
                                  "bias_act with dropout", "rowwise with dropout"])  # fmt: skip
@pytest.mark.parametrize("dim", [0, 1, COLS])
def test_the_second_of_two_ranks(name: str, dim: Any) -> None:
    """On a GPU too: its part of the outputs, masks and gradients of one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    call, case = _call(name), Case((4, 6), 64, (2,), (dim,))
    if dim == COLS and call.columns != "local":
        return  # what ranks exchange is not there
    whole = [t.to(DEVICE).requires_grad_() for t in _tensors(call, case)]
    torch.manual_seed(5)
    expected = _outputs(call.function(*whole))
    expected = [*expected, *torch.autograd.grad(expected, whole, [torch.ones_like(out) for out in expected])]
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh(DEVICE.type, (2,))

        def part(t: Tensor, place: Any) -> Tensor:
            return t.detach().chunk(2, place.dim)[1].contiguous() if place.is_shard() else t.detach()

        places = [_placements(call, case, shape)[0] for shape in call.shapes]
        leaves = [DTensor.from_local(part(t, place), mesh, [place], run_check=False).requires_grad_()
                  for t, place in zip(whole, places, strict=True)]  # fmt: skip
        torch.manual_seed(5)
        found: Any = _outputs(call.function(*leaves))
        found = [*found, *torch.autograd.grad(found, leaves, [torch.ones_like(out) for out in found])]
        for own, one in zip(found, expected, strict=True):
            if not own.placements[0].is_partial():
                assert torch.equal(own.to_local(), part(one, own.placements[0]))
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU to wait for")
def test_dropout_does_not_wait_for_the_gpu() -> None:
    """The random state of a shard goes there without the host's waiting."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        x = DTensor.from_local(torch.ones(4, 64, device=DEVICE), init_device_mesh("cuda", (2,)), [Shard(0)])
        for mode in ("default", "error"):  # the first call compiles
            torch.cuda.set_sync_debug_mode(mode)
            fusedops.bias_dropout_add(x, None, None, p=0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()


# --- one process --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "ranks", "dims"),
    [
        ((4, 6), (2,), (0,)), ((5, 7), (3,), (1,)), ((4, 6), (2, 2), (0, 1)), ((4, 6, 5), (2, 3), (1, 2)),
        ((4, 6, 5), (2, 3), (0, 2)), ((4, 6, 5), (2, 2, 2), (0, 1, 2)), ((4,), (3,), (0,)), ((3, 9), (2, 2), (1, 1)),
        ((4, 6), (2, 2), (None, 1)), ((2, 4, 4, 4), (2, 2, 1), (1, 2, 3)), ((4, 6), (3,), (2,)), ((4, 6), (2, 3), (1, 2)),
    ],
)  # fmt: skip
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
        whole = base + rows // outer * outer_apart + rows % outer // inner * inner_apart + rows % inner
        found = whole[:, None] * each + first + torch.arange(shard.shape[-1])
        assert torch.equal(found, shard.reshape(found.shape))
