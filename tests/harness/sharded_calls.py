"""Calls on DTensors against one process: the operators, the placements, and what crosses ranks."""

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
# What a call does with columns that are sharded: nothing crosses ranks; numbers of rows do; they
# are gathered first.
Columns = Literal["local", "reduced", "gathered"]


class Call(NamedTuple):
    """A call, and the shapes of its tensors.

    Those with ROWS have rows, the others are parameters.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[Any, ...], ...]
    columns: Columns
    moved: tuple[int, int] = (0, 0)  # numbers of a row that cross ranks, forward and backward


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
        "reduced",
        (2, 2),
    ),
    Call(
        "layer_norm, two dimensions",
        lambda x, w: fusedops.layer_norm(x, (3, 8), w),
        ((ROWS, 3, 8), (3, 8)),
        "gathered",
    ),
    Call(
        "rms_norm",
        lambda x, w: fusedops.rms_norm(x, x.shape[-1], w),
        (FULL, VECTOR),
        "reduced",
        (1, 1),
    ),
    Call(
        "rms_norm, offset",
        lambda x, w: fusedops.rms_norm(x, x.shape[-1], w, weight_offset=1.0),
        (FULL, VECTOR),
        "reduced",
        (1, 1),
    ),
    Call(
        "bias_dropout_add_ln",
        lambda *t: fusedops.bias_dropout_add_ln(*t, p=0.0, return_sum=True),
        (FULL, VECTOR, FULL, VECTOR, VECTOR),
        "reduced",
        (2, 2),
    ),
    Call(
        "bias_dropout_add_ln with dropout",
        lambda *t: fusedops.bias_dropout_add_ln(*t, p=0.4, return_sum=True),
        (FULL, VECTOR, FULL, VECTOR, VECTOR),
        "reduced",
        (2, 2),
    ),
    Call(
        "bias_dropout_add_rms_norm with dropout",
        lambda *t: fusedops.bias_dropout_add_rms_norm(*t, p=0.4),
        (FULL, VECTOR, FULL, VECTOR),
        "reduced",
        (1, 1),
    ),
    Call(
        "bias_dropout_add with dropout",
        lambda *t: fusedops.bias_dropout_add(*t, p=0.4),
        (FULL, VECTOR, FULL),
        "local",
    ),
    Call(
        "bias_act with dropout",
        lambda *t: fusedops.bias_act(*t, "silu", p=0.4),
        (FULL, VECTOR),
        "local",
    ),
    Call("bias_gelu", fusedops.bias_gelu, (FULL, VECTOR), "local"),
    Call("gelu", fusedops.gelu, (FULL,), "local"),
    Call("glu", fusedops.gated_act, (FULL, FULL), "local"),
    Call("glu, packed", fusedops.gated_act, ((ROWS, 24),), "gathered"),
    Call("slices", fusedops.batched_layer_norm_tanh, ((ROWS, 3, 8), (3, 8), (8,)), "gathered"),
    Call(
        "slices of widths",
        lambda x, w: fusedops.batched_layer_norm_tanh(x, w, sizes=(7, 17)),
        ((ROWS, 24), (24,)),
        "gathered",
    ),
    Call(
        "slices in tensors",
        lambda x, y, w: fusedops.batched_layer_norm_tanh([x, y], w),
        ((ROWS, 7), (ROWS, 17), (24,)),
        "gathered",
    ),
    Call(
        "slices side by side",
        lambda x, y: fusedops.batched_layer_norm_tanh([x, y], concat=True),
        ((ROWS, 7), (ROWS, 17)),
        "gathered",
    ),
    Call("rowwise with dropout", modulated, (FULL, (ROWS, 1), VECTOR), "gathered"),
    Call("rowwise, parts of rows", _rotated, (FULL, VECTOR), "gathered"),
)


def call_named(name: str) -> Call:
    return next(call for call in CALLS if call.name == name)


# --- placements -----------------------------------------------------------------------------------


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


def cases(ranks: int) -> tuple[Case, ...]:
    """On a mesh of all ranks; four make one of two dimensions too."""
    results = (
        Case((5, 6), 24, (ranks,), (0,)),  # 2, 2, 1 and no rows
        Case((4, 6), 24, (ranks,), (1,)),  # of each row of the first dimension 2, 2, 2 and none
        Case((1, 2), 24, (ranks,), (0,)),  # one rank has all
        Case((2, 3), 24, (ranks,), (None,)),
        Case((2, 3), 32, (ranks,), (COLS,)),
        Case((2, 3), 30, (ranks,), (COLS,), vectors=True),  # 8, 8, 8 and 6
        Case((3,), 6, (ranks,), (COLS,)),  # 2, 2, 2 and none
    )
    if ranks != 4:
        return results
    return (
        *results,
        Case((3, 3), 16, (2, 2), (1, COLS), vectors=True),  # 2 rows and 1
        Case((3,), 12, (2, 2), (COLS, 0)),  # 6 columns each
    )


RANKS = 4
CASES = cases(RANKS)


def placements_of(call: Call, case: Case, shape: tuple[Any, ...]) -> list[Any]:
    """The placements of a tensor of the call."""
    from torch.distributed.tensor import Replicate, Shard

    results = []
    for dim in case.along:
        carries = shape[0] is ROWS
        if dim is None:
            results.append(Replicate())
        elif dim == COLS:
            dims = len(case.rows) + len(shape) - 1 if carries else len(shape)
            size = sizes_of(call, case, shape)[-1]
            shards = size > 1 and (carries or (case.vectors and len(shape) == 1))
            results.append(Shard(dims - 1) if shards else Replicate())
        else:
            results.append(Shard(dim) if carries else Replicate())
    return results


def sizes_of(call: Call, case: Case, shape: tuple[Any, ...]) -> list[int]:
    sizes = [
        case.rows if size is ROWS else (case.width,) if size == COLS else (size,) for size in shape
    ]
    return list(itertools.chain(*sizes))


def columns_of(call: Call, case: Case) -> Columns:
    """The way in which the call distributes columns. A mask's are drawn by eight adjacent ones."""
    aligned = (
        -(
            -case.width
            // math.prod([n for n, dim in zip(case.mesh, case.along, strict=True) if dim == COLS])
        )
        % 8
        == 0
    )
    return call.columns if aligned or "with dropout" not in call.name else "gathered"


# --- what crosses ranks ---------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """The collectives of a block, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "_c10d_functional" and not func.__name__.startswith(
            ("wait_", "_wrap_")
        ):
            self.found.append((func.__name__, args[0].numel() * args[0].itemsize))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        """The names of the collectives."""
        return [name.partition(".")[0] for name, _ in self.found]


# --- the table ------------------------------------------------------------------------------------


def outputs_of(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def tensors_of(call: Call, case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(call.name))
    return [torch.randn(sizes_of(call, case, shape), generator=generator) for shape in call.shapes]


class Expected(NamedTuple):
    """The tensors of a call in one process."""

    tensors: list[Tensor]
    outputs: list[Tensor]
    cotangents: list[Tensor]
    gradients: list[Tensor]


_turn = itertools.count()


def expected_of(function: Callable[..., Any], tensors: list[Tensor]) -> Expected:
    """The ranks take turns, and tell the others."""
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
        along = [torch.randn(out.shape, generator=generator) for out in outputs]
        gradients = torch.autograd.grad(outputs, leaves, [t.to(device) for t in along])
        results = [
            Expected(
                tensors,
                [out.detach().cpu() for out in outputs],
                along,
                [t.cpu() for t in gradients],
            )
        ]
    dist.broadcast_object_list(results, source)
    return results[0]  # type: ignore[no-any-return]


def compare(found: Tensor, expected: Tensor, terms: int, what: Any) -> None:
    """Equal, or where ``terms`` numbers are added up in another order, close.

    Each addition rounds, by half a unit in the last place of what was added up so far. That is not
    more than a small multiple of the largest result, here random: two for each of the sums that a
    gradient depends on.
    """
    whole = found.full_tensor().cpu()  # type: ignore[attr-defined]
    if terms:
        error = (whole - expected).abs().max().item()
        limit = 4 * terms * torch.finfo(expected.dtype).eps * max(expected.abs().max().item(), 1.0)
        assert error <= limit, (*what, error, limit)
    else:
        assert torch.equal(whole, expected), what


def check(
    call: Call, case: Case, meshes: dict[tuple[int, ...], Any], *, kernels: bool = True
) -> None:
    """A call, forward and backward, against one process: values, placements and collectives.

    PyTorch's sums over rows depend on the number of columns, and its activations, to the last bits,
    on where an element is: vector instructions take all but the last ones. The kernels' do not, but
    on GPUs the number of rows chooses the tiles, and those the order in which a row is added up.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh, columns, what = meshes[case.mesh], columns_of(call, case), (call.name, case)
    expected = expected_of(call.function, tensors_of(call, case))
    places = [placements_of(call, case, shape) for shape in call.shapes]
    leaves = [
        distribute_tensor(t, mesh, p).requires_grad_()
        for t, p in zip(expected.tensors, places, strict=True)
    ]
    torch.manual_seed(5)
    with Traffic() as forward:
        result = outputs_of(call.function(*leaves))
    gathered = COLS in case.along and columns == "gathered"
    reduced = COLS in case.along and columns == "reduced"
    last_bits = case.width if mesh.device_type == "cuda" else 0 if kernels else 2
    for number, (out, one) in enumerate(zip(result, expected.outputs, strict=True)):
        wanted = [
            Replicate()
            if dim is None or (dim == COLS and gathered)
            else Shard(len(case.rows) if dim == COLS else dim)
            for dim in case.along
        ]
        assert list(out.placements) == wanted, what  # type: ignore[attr-defined]
        # A reduced call's first output is a sum over ranks. The pre-norm sum, the second, is local.
        compare(
            out,
            one,
            case.width if reduced and number == 0 else last_bits,
            (*what, "output", number),
        )
    cotangents = [
        distribute_tensor(g, mesh, out.placements)
        for g, out in zip(expected.cotangents, result, strict=True)
    ]  # type: ignore[attr-defined]
    with Traffic() as backward:
        grads = torch.autograd.grad(result, leaves, cotangents)
    terms = case.width * reduced + last_bits
    for grad, one, place, shape in zip(grads, expected.gradients, places, call.shapes, strict=True):
        wanted = [
            place[at]
            if dim is None or not place[at].is_replicate() or (dim == COLS and gathered)
            else Partial()
            for at, dim in enumerate(case.along)
        ]
        assert list(grad.placements) == wanted, (*what, shape, grad.placements, wanted)  # type: ignore[attr-defined]
        partial = any(isinstance(dim, int) for dim in case.along) or not kernels
        rows = math.prod(case.rows) if shape[0] is not ROWS and partial else 0
        compare(grad, one, terms + rows, (*what, "gradient", shape))
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
        assert seen.names == ["all_reduce"] * (numbers_of_row * reduced), (
            call.name,
            case,
            seen.found,
        )
        assert sum(size for _, size in seen.found) == 4 * rows * numbers_of_row * reduced, (
            call.name,
            case,
            seen.found,
        )


def _place(mesh: tuple[int, ...]) -> list[int]:
    rank = dist.get_rank()
    return [rank // math.prod(mesh[at + 1 :]) % size for at, size in enumerate(mesh)]
