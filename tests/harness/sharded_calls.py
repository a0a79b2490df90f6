"""Calls on DTensors compared with one process: operators, placements, and collectives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops

# --- calls ----------------------------------------------------------------------------------------

ROWS, COLS = "rows", "columns"
# How an operator computes sharded columns: "local" without communication, "reduced" with an
# all-reduce of some numbers of each row, "gathered" after it gathers the columns.
Columns = Literal["local", "reduced", "gathered"]


class Call(NamedTuple):
    """A call of an operator.

    Attributes:
        name: describes the call.
        function: the function of tensors.
        shapes: the shapes of the tensors. ROWS stands for the sizes of the rows, COLS for the
            width. Tensors without ROWS are parameters.
        columns: how the operator computes sharded columns.
        reduced_numbers: how many numbers of each row the all-reduces sum, in forward and backward.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[Any, ...], ...]
    columns: Columns
    reduced_numbers: tuple[int, int] = (0, 0)


@fusedops.rowwise(strict=True)
def modulated(x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    z = F.dropout(x * (1 + scale), 0.4) + F.dropout(x, 0.3)
    return F.layer_norm(z, z.shape[-1:]) * weight, z


@fusedops.rowwise(strict=True)
def _rotated(x: Tensor, weight: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return F.dropout(torch.cat((-second, first), -1), 0.4) * weight


@fusedops.rowwise(strict=True)
def dropped_twice(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.4) + F.dropout(x.cos(), 0.3)


FULL, VECTOR = (ROWS, COLS), (COLS,)
CALLS = (
    Call(
        "layer_norm",
        lambda x, w, b: fusedops.layer_norm(x, x.shape[-1], w, b),
        (FULL, VECTOR, VECTOR),
        columns="reduced",
        reduced_numbers=(2, 2),
    ),
    Call(
        "layer_norm, two dimensions",
        lambda x, w: fusedops.layer_norm(x, (3, 8), w),
        ((ROWS, 3, 8), (3, 8)),
        columns="gathered",
    ),
    Call(
        "rms_norm",
        lambda x, w: fusedops.rms_norm(x, x.shape[-1], w),
        (FULL, VECTOR),
        columns="reduced",
        reduced_numbers=(1, 1),
    ),
    Call(
        "rms_norm, offset",
        lambda x, w: fusedops.rms_norm(x, x.shape[-1], w, weight_offset=1.0),
        (FULL, VECTOR),
        columns="reduced",
        reduced_numbers=(1, 1),
    ),
    Call(
        "bias_dropout_add_ln",
        lambda *t: fusedops.bias_dropout_add_ln(*t, p=0.0, return_sum=True),
        (FULL, VECTOR, FULL, VECTOR, VECTOR),
        columns="reduced",
        reduced_numbers=(2, 2),
    ),
    Call(
        "bias_dropout_add_ln with dropout",
        lambda *t: fusedops.bias_dropout_add_ln(*t, p=0.4, return_sum=True),
        (FULL, VECTOR, FULL, VECTOR, VECTOR),
        columns="reduced",
        reduced_numbers=(2, 2),
    ),
    Call(
        "bias_dropout_add_rms_norm with dropout",
        lambda *t: fusedops.bias_dropout_add_rms_norm(*t, p=0.4),
        (FULL, VECTOR, FULL, VECTOR),
        columns="reduced",
        reduced_numbers=(1, 1),
    ),
    Call(
        "bias_dropout_add with dropout",
        lambda *t: fusedops.bias_dropout_add(*t, p=0.4),
        (FULL, VECTOR, FULL),
        columns="local",
    ),
    Call(
        "bias_act with dropout",
        lambda *t: fusedops.bias_act(*t, "silu", p=0.4),
        (FULL, VECTOR),
        columns="local",
    ),
    Call("bias_gelu", fusedops.bias_gelu, (FULL, VECTOR), columns="local"),
    Call("gelu", fusedops.gelu, (FULL,), columns="local"),
    Call("glu", fusedops.gated_act, (FULL, FULL), columns="local"),
    Call("glu, packed", fusedops.gated_act, ((ROWS, 24),), columns="gathered"),
    Call(
        "slices", fusedops.batched_layer_norm_tanh, ((ROWS, 3, 8), (3, 8), (8,)), columns="gathered"
    ),
    Call(
        "slices of widths",
        lambda x, w: fusedops.batched_layer_norm_tanh(x, w, sizes=(7, 17)),
        ((ROWS, 24), (24,)),
        columns="gathered",
    ),
    Call(
        "slices in tensors",
        lambda x, y, w: fusedops.batched_layer_norm_tanh([x, y], w),
        ((ROWS, 7), (ROWS, 17), (24,)),
        columns="gathered",
    ),
    Call(
        "slices side by side",
        lambda x, y: fusedops.batched_layer_norm_tanh([x, y], concat=True),
        ((ROWS, 7), (ROWS, 17)),
        columns="gathered",
    ),
    Call("rowwise with dropout", modulated, (FULL, (ROWS, 1), VECTOR), columns="gathered"),
    Call("rowwise, parts of rows", _rotated, (FULL, VECTOR), columns="gathered"),
)


def call_named(name: str) -> Call:
    return next(call for call in CALLS if call.name == name)


# --- placements -----------------------------------------------------------------------------------


class Case(NamedTuple):
    """Sizes and placements of tensors.

    Attributes:
        rows: the sizes of the rows' dimensions.
        width: the number of columns.
        mesh: the shape of the device mesh.
        sharded: what each dimension of the mesh shards: a dimension of the rows, COLS, or None.
        vectors: whether parameters are sharded like the columns, not replicated.
    """

    rows: tuple[int, ...]
    width: int
    mesh: tuple[int, ...]
    sharded: tuple[Any, ...]
    vectors: bool = False


def cases(ranks: int) -> tuple[Case, ...]:
    """Cases on a mesh of all ranks, and for four ranks also on a mesh of two dimensions.

    The comments have the numbers of rows or columns of each of four ranks.
    """
    results = (
        Case((5, 6), 24, (ranks,), sharded=(0,)),  # 2, 2, 1 and 0
        Case((4, 6), 24, (ranks,), sharded=(1,)),  # 2, 2, 2 and 0
        Case((1, 2), 24, (ranks,), sharded=(0,)),  # 1, 0, 0 and 0
        Case((2, 3), 24, (ranks,), sharded=(None,)),
        Case((2, 3), 32, (ranks,), sharded=(COLS,)),
        Case((2, 3), 30, (ranks,), sharded=(COLS,), vectors=True),  # 8, 8, 8 and 6
        Case((3,), 6, (ranks,), sharded=(COLS,)),  # 2, 2, 2 and 0
    )
    if ranks != 4:
        return results
    return (
        *results,
        Case((3, 3), 16, (2, 2), sharded=(1, COLS), vectors=True),  # 2 or 1 rows, 8 columns
        Case((3,), 12, (2, 2), sharded=(COLS, 0)),  # 6 columns, 2 or 1 rows
    )


RANKS = 4
CASES = cases(RANKS)


def placements_of(call: Call, case: Case, shape: tuple[Any, ...]) -> list[Any]:
    """The placements of a tensor of the call, one for each dimension of the mesh."""
    from torch.distributed.tensor import Replicate, Shard

    results = []
    has_rows = shape[0] is ROWS
    sizes = sizes_of(call, case, shape)
    for dim in case.sharded:
        if dim is None:
            results.append(Replicate())
        elif dim == COLS:
            has_columns = has_rows or (case.vectors and len(shape) == 1)
            is_sharded = has_columns and sizes[-1] > 1
            results.append(Shard(len(sizes) - 1) if is_sharded else Replicate())
        else:
            results.append(Shard(dim) if has_rows else Replicate())
    return results


def sizes_of(call: Call, case: Case, shape: tuple[Any, ...]) -> list[int]:
    """The sizes of a tensor with this shape, in which ROWS and COLS are replaced."""
    sizes: list[int] = []
    for size in shape:
        if size is ROWS:
            sizes += case.rows
        else:
            sizes.append(case.width if size == COLS else size)
    return sizes


def columns_of(call: Call, case: Case) -> Columns:
    """How the call computes sharded columns.

    With dropout, columns are gathered unless each rank has a multiple of eight, since the mask of
    eight adjacent columns is drawn at once.
    """
    ranks_of_columns = math.prod(
        [size for size, dim in zip(case.mesh, case.sharded, strict=True) if dim == COLS]
    )
    columns_of_rank = -(-case.width // ranks_of_columns)
    if "with dropout" in call.name and columns_of_rank % 8:
        return "gathered"
    return call.columns


# --- collectives ----------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Records the collectives of a block: name and bytes of each."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "_c10d_functional" and not func.__name__.startswith(
            ("wait_", "_wrap_")
        ):
            self.collectives.append((func.__name__, args[0].numel() * args[0].itemsize))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        """The names of the collectives."""
        return [name.partition(".")[0] for name, _ in self.collectives]


# --- comparisons ----------------------------------------------------------------------------------


def outputs_of(returned: Any) -> tuple[Tensor, ...]:
    """A returned tensor as a tuple of one."""
    return returned if isinstance(returned, tuple) else (returned,)


def tensors_of(call: Call, case: Case) -> list[Tensor]:
    """Random tensors for the call, the same on all ranks."""
    generator = torch.Generator().manual_seed(len(call.name))
    return [torch.randn(sizes_of(call, case, shape), generator=generator) for shape in call.shapes]


class Expected(NamedTuple):
    """Arguments and results of a call in one process, on the CPU."""

    tensors: list[Tensor]
    outputs: list[Tensor]
    cotangents: list[Tensor]
    gradients: list[Tensor]


_turn = itertools.count()


def expected_of(function: Callable[..., Any], tensors: list[Tensor]) -> Expected:
    """Computes the results in one process, and sends them to the others.

    The ranks take turns, one for each call of this function.
    """
    results: list[Any] = [None]
    source = next(_turn) % dist.get_world_size()
    device = (
        torch.device("cpu")
        if dist.get_backend() == "gloo"
        else torch.device("cuda", torch.cuda.current_device())
    )
    if dist.get_rank() == source:
        leaves = [t.to(device, copy=True).requires_grad_() for t in tensors]
        torch.manual_seed(5)
        outputs = outputs_of(function(*leaves))
        generator = torch.Generator().manual_seed(7)
        cotangents = [torch.randn(out.shape, generator=generator) for out in outputs]
        gradients = torch.autograd.grad(outputs, leaves, [t.to(device) for t in cotangents])
        result = Expected(
            tensors,
            outputs=[out.detach().cpu() for out in outputs],
            cotangents=cotangents,
            gradients=[t.cpu() for t in gradients],
        )
        results = [result]
    dist.broadcast_object_list(results, source)
    return results[0]  # type: ignore[no-any-return]


def compare(actual: Tensor, expected: Tensor, terms: int, what: Any) -> None:
    """Asserts that a DTensor is equal to the expected tensor, or close if ``terms`` is not zero.

    ``terms`` is how many numbers are added in another order. Each addition rounds by half a unit in
    the last place of the partial sum. For random numbers, partial sums are at most a small multiple
    of the largest result: two for each of the sums that a gradient depends on.
    """
    whole = actual.full_tensor().cpu()  # type: ignore[attr-defined]
    if terms == 0:
        assert torch.equal(whole, expected), what
        return
    error = (whole - expected).abs().max().item()
    limit = 4 * terms * torch.finfo(expected.dtype).eps * max(expected.abs().max().item(), 1.0)
    assert error <= limit, (*what, error, limit)


def check(
    call: Call, case: Case, meshes: dict[tuple[int, ...], Any], *, kernels: bool = True
) -> None:
    """Compares a call on DTensors with one process: values, gradients, placements, collectives.

    Some results differ in the last bits. PyTorch's sums over rows depend on the number of columns.
    Its activations depend on the position of an element, because the last elements are not computed
    by vector instructions. The kernels have no such differences on the CPU. On a GPU, the number of
    rows determines the tiles, and these determine the order of a sum along a row.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh, columns, what = meshes[case.mesh], columns_of(call, case), (call.name, case)
    expected = expected_of(call.function, tensors_of(call, case))
    placements = [placements_of(call, case, shape) for shape in call.shapes]
    leaves = [
        distribute_tensor(tensor, mesh, of_tensor).requires_grad_()
        for tensor, of_tensor in zip(expected.tensors, placements, strict=True)
    ]
    torch.manual_seed(5)
    with Traffic() as forward:
        result = outputs_of(call.function(*leaves))
    gathered = COLS in case.sharded and columns == "gathered"
    reduced = COLS in case.sharded and columns == "reduced"
    # The terms of a result that differs in the last bits only.
    last_bits_on_cpu = 0 if kernels else 2
    last_bits = case.width if mesh.device_type == "cuda" else last_bits_on_cpu
    expected_placements: list[Any] = []
    for dim in case.sharded:
        if dim is None or (dim == COLS and gathered):
            expected_placements.append(Replicate())
        else:
            expected_placements.append(Shard(len(case.rows) if dim == COLS else dim))
    for number, (out, value) in enumerate(zip(result, expected.outputs, strict=True)):
        assert list(out.placements) == expected_placements, what  # type: ignore[attr-defined]
        # A reduced call's first output is a sum over ranks. The pre-norm sum, the second, is local.
        terms = case.width if reduced and number == 0 else last_bits
        compare(out, value, terms, (*what, "output", number))
    cotangents = [
        distribute_tensor(cotangent, mesh, out.placements)
        for cotangent, out in zip(expected.cotangents, result, strict=True)
    ]  # type: ignore[attr-defined]
    with Traffic() as backward:
        grads = torch.autograd.grad(result, leaves, cotangents)
    terms = (case.width if reduced else 0) + last_bits
    for grad, value, of_tensor, shape in zip(
        grads, expected.gradients, placements, call.shapes, strict=True
    ):
        # A replicated parameter's gradient is a partial sum on each rank that has other rows.
        of_grad = []
        for placement, dim in zip(of_tensor, case.sharded, strict=True):
            is_whole = dim is None or (dim == COLS and gathered)
            is_partial = placement.is_replicate() and not is_whole
            of_grad.append(Partial() if is_partial else placement)
        assert list(grad.placements) == of_grad, (*what, shape, grad.placements, of_grad)  # type: ignore[attr-defined]
        has_other_order = any(isinstance(dim, int) for dim in case.sharded) or not kernels
        rows = math.prod(case.rows) if shape[0] is not ROWS and has_other_order else 0
        compare(grad, value, terms + rows, (*what, "gradient", shape))
    if not gathered:
        _check_traffic(call, case, (forward, backward), reduced=reduced)


def _check_traffic(
    call: Call, case: Case, traffic: tuple[Traffic, Traffic], *, reduced: bool
) -> None:
    """Asserts that the collectives are all-reduces of fp32 numbers of the rows of this rank.

    Without ``reduced`` there must be none.
    """
    coordinates = _coordinates(case.mesh)
    rows = 1
    for dim, size in enumerate(case.rows):
        for mesh_dim, sharded in enumerate(case.sharded):
            if sharded == dim:
                size_of_shard = -(-size // case.mesh[mesh_dim])
                before = size_of_shard * coordinates[mesh_dim]
                size = max(min(size_of_shard, size - before), 0)
        rows *= size
    for numbers_of_row, recorded in zip(call.reduced_numbers, traffic, strict=True):
        what = (call.name, case, recorded.collectives)
        numbers = numbers_of_row if reduced else 0
        assert recorded.names == ["all_reduce"] * numbers, what
        assert sum(size for _, size in recorded.collectives) == 4 * rows * numbers, what


def _coordinates(mesh: tuple[int, ...]) -> list[int]:
    """The coordinates of this rank in the mesh."""
    rank = dist.get_rank()
    return [rank // math.prod(mesh[dim + 1 :]) % size for dim, size in enumerate(mesh)]
