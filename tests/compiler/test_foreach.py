"""`fusedops.rowwise(...).foreach`: a function of many slices against a loop over the slices."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedops
from backends import Backend
from fusedops.core.configs import tuning
from fusedops.core.configs.tuning_key import Config
from fusedops.core.launches import launch
from fusedops.core.launches.tables import gather
from rowwise_checks import cotangents_of, kernels, randn
from slice_checks import SliceCall, check, flat, looped, mapped, results
from support import DEVICE
from wrappers import Wrapper

# Lengths of several tiles, with and without remainders.
RAGGED = (7, 16, 24, 200, 300)
# More rows than one program of a slice processes, so that partial sums are added up.
FEW, MANY = 5, 70
fp32 = torch.float32


def _norm_tanh(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(F.layer_norm(x, x.shape[-1:], w, b))


def _gated(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, a number of each row, and one with its dimension."""
    gated = F.silu(x) * y * w
    return gated, gated.mean(-1), x.square().sum(-1, keepdim=True)


def _residual(x: Tensor, residual: Tensor) -> list[Tensor]:
    z = x + residual
    return [F.rms_norm(z, z.shape[-1:]), z]


def _dropped(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(x, 0.3) * w + F.dropout(x.sin(), 0.5)


def _lists(rows: int, dtype: torch.dtype, widths: Sequence[int] = RAGGED) -> list[Any]:
    """Return rows of all slices, and two vectors for each."""
    xs = [randn(rows, width, dtype=dtype) for width in widths]
    return [xs, *[[randn(width, dtype=dtype) for width in widths] for _ in range(2)]]


def _ragged(rows: int, dtype: torch.dtype) -> SliceCall:
    return SliceCall(_norm_tanh, _lists(rows, dtype))


def _one_column(rows: int, dtype: torch.dtype) -> SliceCall:
    """The kernel has a function of its own for rows of one column."""
    return SliceCall(_norm_tanh, _lists(rows, dtype, (7, 1, 16)))


def _joint_columns(rows: int, dtype: torch.dtype) -> SliceCall:
    """Slices of one and two columns are beside others in one tensor, as are their results."""
    widths = [130, 1, 7, 2, 1, 65]
    total = sum(widths)
    args = [randn(rows, total, dtype=dtype), *[randn(total, dtype=dtype) for _ in range(2)]]
    return SliceCall(_norm_tanh, args, widths)


def _strided_numbers(rows: int, dtype: torch.dtype) -> SliceCall:
    """Each slice has a number of each row, a column of a matrix; one has one column."""

    def function(x: Tensor, factor: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x * factor) * w

    widths = (7, 1, 70)
    xs, weights, _ = _lists(rows, dtype, widths)
    columns = randn(rows, 3, dtype=dtype)
    return SliceCall(function, [xs, [columns[:, k : k + 1] for k in range(3)], weights])


def _stacked_columns(rows: int, dtype: torch.dtype) -> SliceCall:
    args = [randn(rows, 5, 1, dtype=dtype), *[randn(5, 1, dtype=dtype) for _ in range(2)]]
    return SliceCall(_norm_tanh, args)


def _sizes(rows: int, dtype: torch.dtype) -> SliceCall:
    total = sum(RAGGED)
    args = [randn(rows, total, dtype=dtype), *[randn(total, dtype=dtype) for _ in range(2)]]
    return SliceCall(_norm_tanh, args, list(RAGGED))


def _sizes_and_lists(rows: int, dtype: torch.dtype) -> SliceCall:
    _, weights, biases = _lists(rows, dtype)
    return SliceCall(
        _norm_tanh, [randn(rows, sum(RAGGED), dtype=dtype), weights, biases], [*RAGGED]
    )


def _stacked(rows: int, dtype: torch.dtype) -> SliceCall:
    args = [randn(rows, 5, 24, dtype=dtype), *[randn(5, 24, dtype=dtype) for _ in range(2)]]
    return SliceCall(_norm_tanh, args)


def _shared_vectors(rows: int, dtype: torch.dtype) -> SliceCall:
    args = [randn(rows, 5, 24, dtype=dtype), randn(24, dtype=dtype), randn(1, 24, dtype=dtype)]
    return SliceCall(_norm_tanh, args)


def _shared_rows(rows: int, dtype: torch.dtype) -> SliceCall:
    xs = [randn(rows, 24, dtype=dtype) for _ in range(4)]
    return SliceCall(_residual, [xs, randn(rows, 24, dtype=dtype)], sums=False)


def _captured(rows: int, dtype: torch.dtype) -> SliceCall:
    captured, factor = {"w": randn(24, dtype=dtype)}, 0.7

    def function(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], captured["w"]) * factor

    xs = [randn(rows, 24, dtype=dtype) for _ in range(3)]
    return SliceCall(function, [xs], captured=captured)


def _numbers(rows: int, dtype: torch.dtype) -> SliceCall:
    """A number of each slice, and one of all."""

    def function(x: Tensor, factor: float, eps: float) -> Tensor:
        return F.rms_norm(x * factor, x.shape[-1:], eps=eps)

    xs = [randn(rows, width, dtype=dtype) for width in (7, 7, 24)]
    return SliceCall(function, [xs, [0.5, 3.25, 1.75], 0.3], sums=False)


def _several_results(rows: int, dtype: torch.dtype) -> SliceCall:
    xs, weights, _ = _lists(rows, dtype)
    ys = [randn(rows, width, dtype=dtype) for width in RAGGED]
    return SliceCall(_gated, [xs, ys, weights])


def _several_joint_results(rows: int, dtype: torch.dtype) -> SliceCall:
    total = sum(RAGGED)
    tensors = [randn(*shape, dtype=dtype) for shape in ((rows, total), (rows, total), (total,))]
    return SliceCall(_gated, tensors, [*RAGGED])


def _several_stacked_results(rows: int, dtype: torch.dtype) -> SliceCall:
    shapes = ((rows, 5, 24), (rows, 5, 24), (5, 24))
    return SliceCall(_gated, [randn(*shape, dtype=dtype) for shape in shapes])


def _three_dimensions(rows: int, dtype: torch.dtype) -> SliceCall:
    xs, weights, biases = _lists(rows // 2 * 2, dtype)
    return SliceCall(_norm_tanh, [[x.view(2, rows // 2, -1) for x in xs], weights, biases])


def _joint_three_dimensions(rows: int, dtype: torch.dtype) -> SliceCall:
    shapes = ((2, rows, 5, 24), (2, rows, 5, 24), (5, 24))
    return SliceCall(_gated, [randn(*shape, dtype=dtype) for shape in shapes])


def _layouts(rows: int, dtype: torch.dtype) -> SliceCall:
    """Rows of a wider tensor, transposed, expanded and negative ones; and strided vectors."""

    def of_width(make: Callable[..., Tensor], *shape: int) -> Tensor:
        return make(randn(*shape, dtype=dtype))

    wide = [
        lambda t: t[:, 4:28],
        lambda t: t.t(),
        lambda t: t.expand(rows, 24),
        torch._neg_view,
        lambda t: t.flip(0)[::2],
    ]
    shapes = [(rows, 40), (24, rows), (1, 24), (rows, 24), (2 * rows, 24)]
    xs = [of_width(make, *shape) for make, shape in zip(wide, shapes, strict=True)]
    columns = randn(24, 10, dtype=dtype)
    return SliceCall(
        _norm_tanh,
        [xs, [columns[:, k] for k in range(5)], [torch._neg_view(columns[:, k]) for k in range(5)]],
    )


def _joint_layouts(rows: int, dtype: torch.dtype) -> SliceCall:
    total = sum(RAGGED)
    args = [randn(total, rows, dtype=dtype).t(), *[randn(2 * total, dtype=dtype)[::2]] * 2]
    return SliceCall(_norm_tanh, args, list(RAGGED))


def _rows_of_slices(
    rows: Sequence[int], widths: Sequence[int], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return slices with these rows, and two vectors for each."""
    xs = [randn(*shape, dtype=dtype) for shape in zip(rows, widths, strict=True)]
    return xs, *[[randn(width, dtype=dtype) for width in widths] for _ in range(2)]  # type: ignore[return-value]


def _other_rows(rows: int, dtype: torch.dtype) -> SliceCall:
    """Slices with rows of their own, of lengths that are multiples of a vector load."""
    widths = (8, 40, 8, 200)
    return SliceCall(_norm_tanh, [*_rows_of_slices((3, rows, 1, 2 * rows), widths, dtype)])


def _other_ragged_rows(rows: int, dtype: torch.dtype) -> SliceCall:
    """Slices with rows of their own, of two kinds of code."""
    widths = (130, 1, 7, 70)
    return SliceCall(_norm_tanh, [*_rows_of_slices((1, rows, 3, rows + 1), widths, dtype)])


def _other_rows_of_several_results(rows: int, dtype: torch.dtype) -> SliceCall:
    """The slices' numbers of each row have other offsets than their rows."""
    widths = (7, 16, 24)
    xs, weights, _ = _rows_of_slices((2 * rows, 1, rows), widths, dtype)
    return SliceCall(_gated, [xs, [x.cos() for x in xs], weights])


def _other_rows_without_saved_rows(rows: int, dtype: torch.dtype) -> SliceCall:
    """The forward saves a result alone; several dimensions are rows."""
    xs = [randn(2, count, 24, dtype=dtype) for count in (rows, 1, 3)]
    return SliceCall(lambda x, w: (x * w).softmax(-1), [xs, randn(24, dtype=dtype)])


def _other_rows_with_masks(rows: int, dtype: torch.dtype) -> SliceCall:
    xs, weights, _ = _rows_of_slices((rows, 3, rows + 9), (16, 24, 200), dtype)
    return SliceCall(_dropped, [xs, weights])


def _other_rows_and_layouts(rows: int, dtype: torch.dtype) -> SliceCall:
    xs = [
        randn(rows, 40, dtype=dtype)[:, 4:28],
        randn(24, 3, dtype=dtype).t(),
        randn(1, 24, dtype=dtype).expand(2 * rows, 24),
    ]
    columns = randn(24, 3, dtype=dtype)
    return SliceCall(_norm_tanh, [xs, randn(24, dtype=dtype), [*columns.unbind(1)]])


def _of_heads(rows: int, dtype: torch.dtype) -> SliceCall:
    """A row has two dimensions."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-2:]) * w

    xs = [randn(rows, 3, width, dtype=dtype) for width in (8, 8, 20)]
    return SliceCall(function, [xs, [randn(3, width, dtype=dtype) for width in (8, 8, 20)]])


def _halves(x: Tensor, w: Tensor) -> Tensor:
    gate, up = (x * w).chunk(2, -1)
    return F.silu(gate) * up


def _parts(rows: int, dtype: torch.dtype) -> SliceCall:
    """Results are half as wide as their slices."""
    xs, weights, _ = _lists(rows, dtype, (16, 48, 200))
    return SliceCall(_halves, [xs, weights])


def _joint_parts(rows: int, dtype: torch.dtype) -> SliceCall:
    return SliceCall(_halves, [randn(rows, 88, dtype=dtype), randn(88, dtype=dtype)], [16, 24, 48])


def _with_masks(rows: int, dtype: torch.dtype) -> SliceCall:
    xs, weights, _ = _lists(rows, dtype)
    return SliceCall(_dropped, [xs, weights])


def _with_joint_masks(rows: int, dtype: torch.dtype) -> SliceCall:
    return SliceCall(_dropped, [randn(rows, 5, 24, dtype=dtype), randn(5, 24, dtype=dtype)])


SAMPLES: dict[str, Callable[[int, torch.dtype], SliceCall]] = {
    make.__name__.strip("_"): make
    for make in (
        _ragged,
        _one_column,
        _joint_columns,
        _strided_numbers,
        _stacked_columns,
        _sizes,
        _sizes_and_lists,
        _stacked,
        _shared_vectors,
        _shared_rows,
        _captured,
        _numbers,
        _several_results,
        _several_joint_results,
        _several_stacked_results,
        _three_dimensions,
        _joint_three_dimensions,
        _layouts,
        _joint_layouts,
        _other_rows,
        _other_ragged_rows,
        _other_rows_of_several_results,
        _other_rows_without_saved_rows,
        _other_rows_with_masks,
        _other_rows_and_layouts,
        _of_heads,
        _parts,
        _joint_parts,
        _with_masks,
        _with_joint_masks,
    )
}
every = pytest.mark.parametrize("name", SAMPLES)


# --- values, gradients and launches ---------------------------------------------------------------


@kernels
@pytest.mark.pairs("rows dtype", "name")
@every
@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("dtype", [fp32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_values_gradients_and_launches(name: str, rows: int, dtype: torch.dtype) -> None:
    sample = SAMPLES[name](rows, dtype)
    sample.sums &= rows == MANY
    if dtype == torch.float64:
        # A mean's factor 1 / N is a sum of several numbers, as many as N demands.
        sample.parts = 0
    check(sample)


@kernels
@pytest.mark.parametrize("name", ["several_stacked_results", "parts"])
def test_fp32_weights_of_bf16_rows(name: str) -> None:
    sample = SAMPLES[name](MANY, fp32)
    sample.args[0] = mapped(Tensor.bfloat16, sample.args[0])
    check(sample)


@kernels
def test_without_gradients_one_kernel_runs_and_saves_nothing() -> None:
    sample = _several_results(FEW, fp32)
    leaves = mapped(Tensor.requires_grad_, sample.args)
    with launch.record() as launched, torch.no_grad():
        outputs = flat(fusedops.rowwise(sample.function, strict=True).foreach(*leaves))
    assert launched == ["forward_slices"]
    assert not any(out.requires_grad for out in outputs)


@kernels
def test_more_slices_than_programs_that_run_at_a_time() -> None:
    """Each slice has two programs or more, because one would store sums as gradients."""
    check(SliceCall(_norm_tanh, _lists(20, fp32, (3, 5) * 20)))


def _scaled(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return torch.tanh(x * w) * scale


# Functions of a tensor of rows, a vector of each slice, and what else they have.
NEIGHBOURS: dict[str, tuple[Callable[..., Any], Callable[[int], list[Any]]]] = {
    "vectors in a list": (_norm_tanh, lambda count: [[randn(24) for _ in range(count)]]),
    "a vector of all": (_norm_tanh, lambda count: [randn(24)]),
    "numbers of rows": (lambda x, w, y: _gated(x, y, w), lambda count: [randn(MANY, count * 24)]),
    # A tile has one slice: what a slice has is no block.
    "a number of each": (_scaled, lambda count: [[randn() for _ in range(count)]]),
    "factors of each": (_scaled, lambda count: [[0.5 + k / 8 for k in range(count)]]),
    "masks": (_dropped, lambda count: []),
}


@kernels
@pytest.mark.parametrize("name", NEIGHBOURS)
@pytest.mark.parametrize("count", [8, 6, 3])
def test_tiles_of_neighbouring_slices(name: str, count: int) -> None:
    """A tile has two rows of four slices, or as many of two or one."""
    function, others = NEIGHBOURS[name]
    args = [randn(MANY, count * 24), randn(count * 24), *others(count)]
    config = Config(block_n=128, rows=2, warps=4, stages=2, per_sm=3)
    with (
        tuning.forced("slices_rowwise_forward", replace(config, per_sm=0)),
        tuning.forced("slices_rowwise_backward", config),
    ):
        check(SliceCall(function, args, [24] * count))


@kernels
def test_other_numbers_of_rows_compile_no_kernel() -> None:
    call = fusedops.rowwise(_norm_tanh, strict=True).foreach
    check(_ragged(MANY, fp32), call)
    before = launch.variants()
    check(_ragged(MANY + 7, fp32), call)
    assert launch.variants() == before


@kernels
@pytest.mark.parametrize("widths", [(8, 24, 200), (130, 1, 7)], ids=str)
def test_other_rows_of_slices_compile_no_kernel(widths: tuple[int, ...]) -> None:
    call = fusedops.rowwise(_norm_tanh, strict=True).foreach
    variants = []
    for rows in ((MANY, 3, 40), (1, MANY + 9, 5), (MANY, MANY, 0)):
        _assert_as_loop(call, [*_rows_of_slices(rows, widths, fp32)])
        variants.append(launch.variants())
    assert len(set(variants)) == 1


@pytest.mark.plain
def test_tables_begin_at_multiples_of_16_bytes() -> None:
    """Kernels are compiled for that. The arena's pieces have odd numbers of elements."""
    cpu = torch.device("cpu")
    tables = [gather(-1, cpu, (-1, number, -3), None).table for number in range(3)]
    assert {table.data_ptr() % 16 for table in tables} == {0}


def _assert_as_loop(call: Callable[..., Any], args: Sequence[Any]) -> None:
    """Check the results and gradients of one call each way, also of slices without rows."""
    args = mapped(lambda t: t.clone().requires_grad_(), args)

    def loop(*args: Any) -> Any:
        return [_norm_tanh(*own) for own in zip(*args, strict=True)]

    expected = loop(*args)
    cotangents = cotangents_of(expected)
    with launch.record() as launched:
        outputs = call(*args)
        grads = torch.autograd.grad(outputs, flat(args), cotangents)
    assert launched == ["forward_slices", "backward_slices", "reduce_slices"]
    torch.testing.assert_close(outputs, expected)
    expected_grads = torch.autograd.grad(expected, flat(args), cotangents)
    # The terms of the gradient of a norm cancel.
    torch.testing.assert_close(list(grads), list(expected_grads), rtol=1e-4, atol=1e-4)


@pytest.mark.plain
@every
def test_without_kernels_the_plain_function_runs(name: str) -> None:
    sample = SAMPLES[name](FEW, fp32)
    sample.args = mapped(Tensor.cpu, sample.args)
    if sample.captured is not None:
        sample.captured["w"] = sample.captured["w"].cpu()
    call = fusedops.rowwise(sample.function).foreach

    def loop(*args: Any, sizes: Any) -> Any:
        return looped(sample.function, args, sizes)

    with launch.record() as launched:
        torch.manual_seed(3)
        outputs, grads = results(call, sample)
    torch.manual_seed(3)
    expected, expected_grads = results(loop, sample)
    assert launched == []
    assert all(map(torch.equal, outputs, expected))
    # Autograd adds up the gradients of a shared tensor in another order.
    torch.testing.assert_close(grads, expected_grads)


@kernels
@pytest.mark.parametrize("name", ["several_stacked_results", "with_joint_masks"])
def test_equal_calls_have_equal_bits(name: str) -> None:
    sample = SAMPLES[name](MANY, fp32)
    call = fusedops.rowwise(sample.function, strict=True).foreach
    first, second = [_seeded(lambda: flat(results(call, sample))) for _ in range(2)]
    assert all(map(torch.equal, first, second))


def _seeded(call: Callable[[], Any]) -> Any:
    torch.manual_seed(5)
    return call()


# --- gradients of some tensors only ---------------------------------------------------------------


def _grads(
    call: Callable[..., Any],
    args: Sequence[Any],
    sizes: Any,
    used: Sequence[int],
    *,
    creates: bool = False,
) -> list[Tensor | None]:
    """Return the gradients of the leaves, of some outputs only.

    Args:
        call: takes the arguments and ``sizes``.
        args: the arguments.
        sizes: as for `foreach`.
        used: the numbers of the outputs that have cotangents.
        creates: whether the gradients are differentiable.
    """
    outputs = flat(call(*args, sizes=sizes))
    leaves = [t for t in flat(args) if isinstance(t, Tensor) and t.requires_grad]
    chosen = [outputs[number] for number in used]
    generator = torch.Generator().manual_seed(2)
    cotangents = [torch.randn(t.shape, generator=generator).to(t) for t in chosen]
    grads = torch.autograd.grad(chosen, leaves, cotangents, allow_unused=True, create_graph=creates)
    return list(grads)


@kernels
@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("name", ["ragged", "sizes_and_lists", "shared_vectors"])
def test_frozen_arguments(name: str, frozen: tuple[int, ...], rows: int) -> None:
    sample = SAMPLES[name](rows, fp32)
    for index, value in enumerate(sample.args):
        mapped(lambda t, need=index not in frozen: t.requires_grad_(need), value)
    _assert_same_gradients(sample, [0])


@kernels
@pytest.mark.parametrize("rows", [FEW, MANY])
def test_frozen_arguments_of_single_slices(rows: int) -> None:
    sample = _ragged(rows, fp32)
    for index, value in enumerate(sample.args):
        for k, tensor in enumerate(value):
            tensor.requires_grad_(k % 3 != index)
    _assert_same_gradients(sample, range(len(RAGGED)))


@kernels
@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("ragged", [1, 3]),
        ("several_results", [0, 2]),  # rows of two slices
        ("several_results", [6, 14]),  # numbers of rows of one slice, and of another
        ("several_stacked_results", [1]),
        ("several_joint_results", [2]),
        ("shared_rows", [1, 4]),
        ("other_rows", [1]),
        ("other_rows_without_saved_rows", [2]),
    ],
)
def test_missing_cotangents(name: str, used: list[int], rows: int) -> None:
    sample = SAMPLES[name](rows, fp32)
    mapped(Tensor.requires_grad_, sample.args)
    _assert_same_gradients(sample, used)


def _assert_same_gradients(sample: SliceCall, used: Sequence[int]) -> None:
    """Compare gradients with those of the loop; zeros may stand for none."""

    def loop(*args: Any, sizes: Any) -> Any:
        return looped(sample.function, args, sizes)

    call = fusedops.rowwise(sample.function, strict=True).foreach
    expected = _grads(loop, sample.args, sample.sizes, used)
    actual = _grads(call, sample.args, sample.sizes, used)
    differentiable = _grads(call, sample.args, sample.sizes, used, creates=True)
    for result, value in zip([*actual, *differentiable], expected * 2, strict=True):
        if result is None or value is None:
            assert not any(t is not None and t.count_nonzero() for t in (result, value))
        else:
            # A gradient of norms cancels: its terms have some ten times its magnitude, and each
            # of MANY rows adds a rounding of fp32.
            torch.testing.assert_close(result, value, rtol=1e-4, atol=1e-4)


def _small(name: str) -> SliceCall:
    """Return a sample with slices of two, three and three columns."""
    widths = (2, 3, 3)
    rows, vectors = [randn(2, n) for n in widths], [randn(n) for n in widths]
    samples = {
        "lists": SliceCall(_gated, [rows, [x.cos() for x in rows], vectors]),
        "sizes": SliceCall(_norm_tanh, [randn(2, 8), randn(8), randn(8)], [*widths]),
        "stacked": SliceCall(_residual, [randn(2, 2, 3), randn(2, 3)]),
        "dropout": SliceCall(_dropped, [rows[1:], vectors[1:]]),
        "dropout of other widths": SliceCall(_dropped, [rows, vectors]),
        "other rows": SliceCall(_norm_tanh, [[*rows[:2], randn(4, 3)], vectors, vectors]),
    }
    return samples[name]


@kernels
@pytest.mark.parametrize(
    "name",
    [
        "lists",
        "sizes",
        "stacked",
        "dropout",
        "dropout of other widths",
        "other rows",
    ],
)
def test_first_and_second_derivatives(name: str) -> None:
    sample = _small(name)
    args = mapped(lambda t: t.double().requires_grad_(), sample.args)
    counts = [len(value) if isinstance(value, list) else 0 for value in args]
    call = fusedops.rowwise(sample.function, strict=True).foreach

    def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
        remaining, values = iter(tensors), list[Any]()
        for count in counts:
            values.append([next(remaining) for _ in range(count)] if count else next(remaining))
        return tuple(_seeded(lambda: flat(call(*values, sizes=sample.sizes))))

    # A second derivative is one of the gradients that PyTorch's operators compute.
    outputs = of_tensors(*flat(args))
    kernels_grads, differentiable_grads = (
        torch.autograd.grad(
            outputs, flat(args), cotangents_of(outputs), retain_graph=True, create_graph=creates
        )
        for creates in (False, True)
    )
    torch.testing.assert_close(kernels_grads, differentiable_grads)
    assert torch.autograd.gradcheck(of_tensors, flat(args), fast_mode=True)
    assert torch.autograd.gradgradcheck(of_tensors, flat(args), fast_mode=True)


# --- dropout --------------------------------------------------------------------------------------


def _half_dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


@kernels
def test_masks_differ_between_slices_and_calls() -> None:
    """They depend on the seed, but not on the widths of other slices."""
    call = fusedops.rowwise(_half_dropped, strict=True).foreach
    ones = [torch.ones(MANY, width, device=DEVICE) for width in (24, 24, 40)]
    first, second, _ = _seeded(lambda: call(ones))
    of_seed, _, _ = _seeded(lambda: call([ones[0], ones[2], ones[2]]))
    of_next_call = call(ones)[0]
    assert torch.equal(first, of_seed)
    for other in (second, of_next_call):
        # Of independent masks half of the elements differ, with a deviation of 0.5 / sqrt(1680).
        assert abs((first != other).double().mean() - 0.5) < 5 * 0.5 / first.numel() ** 0.5


# --- autograd -------------------------------------------------------------------------------------


@kernels
def test_result_that_is_saved_must_not_change_in_place() -> None:
    """Others may: results of slices do not share a version, although they share memory."""
    sample = _shared_rows(FEW, fp32)
    args = mapped(Tensor.requires_grad_, sample.args)
    call = fusedops.rowwise(_residual, strict=True).foreach
    normed, sums = call(*args)
    normed[1].zero_()
    grads = torch.autograd.grad(sums, flat(args), [torch.ones_like(z) for z in sums])
    for grad in grads[:-1]:
        torch.testing.assert_close(grad, torch.ones_like(grad))
    normed, sums = call(*args)
    sums[2].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(normed[0].sum(), args[0][0])


@kernels
def test_change_of_a_result_in_place_leaves_other_slices() -> None:
    args = mapped(Tensor.requires_grad_, _ragged(FEW, fp32).args)
    call = fusedops.rowwise(_norm_tanh, strict=True).foreach
    expected = call(*args)
    actual = call(*args)
    actual[2].mul_(3.0)
    for k, (result, value) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(result, value * 3.0 if k == 2 else value)
    cotangents = [torch.randn_like(value) for value in expected]
    scaled = [t * 3.0 if k == 2 else t for k, t in enumerate(cotangents)]
    grads, expected_grads = (
        torch.autograd.grad(outs, flat(args), own)
        for outs, own in ((actual, cotangents), (expected, scaled))
    )
    assert all(map(torch.equal, grads, expected_grads))


@kernels
@pytest.mark.parametrize("name", ["several_results", "with_joint_masks"])
def test_checkpoints_have_the_gradients_of_plain_calls(name: str) -> None:
    sample = SAMPLES[name](FEW, fp32)
    foreach = fusedops.rowwise(sample.function, strict=True).foreach

    def checkpointed(*args: Any, sizes: Any) -> Any:
        return checkpoint(foreach, *args, sizes=sizes, use_reentrant=False)

    plain, actual = (
        _seeded(lambda call=call: flat(results(call, sample))) for call in (foreach, checkpointed)
    )
    assert all(map(torch.equal, plain, actual))


@kernels
def test_transforms_call_the_function_for_each_slice() -> None:
    xs, weights, biases = _lists(FEW, torch.float64)
    call = fusedops.rowwise(_norm_tanh, strict=True).foreach
    batch = [torch.stack([x, -x]) for x in xs]
    with launch.record() as launched:
        batched = torch.func.vmap(lambda *x: call([*x], weights, biases))(*batch)
        _, tangents = torch.func.jvp(lambda *x: call([*x], weights, biases), (*xs,), (*xs[::1],))
        grads = torch.func.grad(lambda x: sum(y.sin().sum() for y in call(x, weights, biases)))(xs)
    assert launched == []
    for k, (x, w, b) in enumerate(zip(xs, weights, biases, strict=True)):
        torch.testing.assert_close(batched[k][1], _norm_tanh(-x, w, b))
        plain = lambda x, w=w, b=b: _norm_tanh(x, w, b)  # noqa: E731
        torch.testing.assert_close(tangents[k], torch.func.jvp(plain, (x,), (x,))[1])
        expected = torch.func.grad(lambda x, f=plain: f(x).sin().sum())(x)
        torch.testing.assert_close(grads[k], expected)


@kernels
def test_subclasses_are_passed_to_the_function_for_each_slice() -> None:
    sample = _ragged(FEW, fp32)
    xs = list(map(Wrapper, sample.args[0]))
    Wrapper.log.clear()
    ys = fusedops.rowwise(_norm_tanh, strict=True).foreach(xs, *sample.args[1:])
    assert not any("_slices_" in name for name in Wrapper.log)
    for y, *args in zip(ys, *sample.args, strict=True):
        assert isinstance(y, Wrapper)
        torch.testing.assert_close(y.held, _norm_tanh(*args))


@kernels
def test_autocast_is_no_repeated_call() -> None:
    """Under autocast, PyTorch computes this sum as a matrix product in half precision."""
    xs, v = [randn(FEW, 24) for _ in range(3)], randn(24)
    call = fusedops.rowwise(lambda x, v: torch.einsum("sd,d->s", x, v), strict=True).foreach
    for _ in range(2):
        for x, y in zip(xs, call(xs, v), strict=True):
            torch.testing.assert_close(y, x @ v)
        with (
            torch.autocast(DEVICE.type, torch.bfloat16),
            pytest.raises(fusedops.NotRowwiseError, match="matrix product"),
        ):
            call(xs, v)


# --- other calls ----------------------------------------------------------------------------------


@kernels
def test_arguments_by_name_and_defaults() -> None:
    def function(x: Tensor, scale: float = 2.0, *, shift: float = 1.0) -> Tensor:
        return x.sin() * scale + shift

    call = fusedops.rowwise(function, strict=True).foreach
    xs = _lists(FEW, fp32)[0]
    for k, y in enumerate(call(x=xs, shift=[float(k + 1) for k in range(5)])):
        torch.testing.assert_close(y, function(xs[k], shift=k + 1.0))


@kernels
def test_captured_values_are_those_of_each_call() -> None:
    state: dict[str, Any] = {"w": randn(24), "factor": 2.0}
    xs = [randn(FEW, 24) for _ in range(3)]

    def function(x: Tensor) -> Tensor:
        return x * state["w"] * state["factor"]

    call = fusedops.rowwise(function, strict=True).foreach
    for change in ({}, {"factor": 3.0}, {"w": randn(24)}, {"factor": 2.0}):
        state.update(change)
        with launch.record() as launched:
            ys = call(xs)
        assert launched == ["forward_slices"]
        for x, y in zip(xs, ys, strict=True):
            torch.testing.assert_close(y, function(x))


@kernels
def test_changed_arguments_are_no_repeated_call() -> None:
    """Lists of other widths, sizes, dtypes, numbers or rows alternate."""
    call = fusedops.rowwise(lambda x, t: F.rms_norm(x * t, x.shape[-1:], eps=0.1)).foreach
    wide = randn(FEW, 48)
    calls: list[tuple[list[Any], Any]] = [
        ([[randn(FEW, 16), randn(FEW, 24)], 2.0], None),
        ([[randn(FEW, 24), randn(FEW, 16)], 2.0], None),
        ([[randn(FEW, 24), randn(FEW, 16)], [2.0, 3.0]], None),
        ([[randn(1, 24), randn(1, 16)], [2.0, 3.0]], None),
        ([[randn(1, 24), randn(FEW, 16)], [2.0, 3.0]], None),
        ([[randn(FEW, 24), randn(MANY, 16)], 2.0], None),
        ([[randn(FEW, 24, dtype=torch.float64), randn(FEW, 16)], 2.0], None),
        ([wide, 2.0], [16, 32]),
        ([wide, 2.0], [32, 16]),
        ([wide.view(FEW, 2, 24), 2.0], None),
        ([wide.view(FEW, 3, 16), 2.0], None),
    ]
    for args, sizes in calls * 2:
        expected = looped(call.__self__.function, args, sizes)
        for result, value in zip(flat(call(*args, sizes=sizes)), flat(expected), strict=True):
            torch.testing.assert_close(result, value)


@kernels
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_slices_without_rows_beside_others(is_compiled: bool) -> None:
    call: Callable[..., Any] = fusedops.rowwise(_norm_tanh, strict=True).foreach
    if is_compiled:
        foreach = call
        call = torch.compile(lambda *args: foreach(*args), fullgraph=True, backend="aot_eager")
    for rows in ((0, MANY, 3), (MANY, 0, 0)):
        _assert_as_loop(call, [*_rows_of_slices(rows, (8, 24, 40), fp32)])


@kernels
@pytest.mark.parametrize("empty", [[0], [0, 1]], ids=str)
def test_slices_without_rows(empty: list[int]) -> None:
    xs = [randn(0 if k in empty else FEW, 24).requires_grad_() for k in range(2)]
    ys = fusedops.rowwise(_residual).foreach(xs, 1.0)[0]
    assert [y.shape for y in ys] == [x.shape for x in xs]
    for x, grad in zip(xs, torch.autograd.grad(sum(y.sum() for y in ys), xs), strict=True):
        assert grad.shape == x.shape


def _not_rowwise(x: Tensor) -> Tensor:
    return x.cumsum(0)


@kernels
def test_function_that_is_not_rowwise() -> None:
    xs = [randn(FEW, width) for width in (8, 24)]
    with pytest.raises(fusedops.NotRowwiseError, match="cumsum"):
        fusedops.rowwise(_not_rowwise, strict=True).foreach(xs)
    with pytest.warns(RuntimeWarning, match="does not fuse _not_rowwise"):
        ys = fusedops.rowwise(_not_rowwise).foreach(xs)
    assert all(map(torch.equal, ys, map(_not_rowwise, xs)))


@kernels
def test_slices_that_cannot_be_fused_are_called_alone() -> None:
    """The function's code depends on a slice's length."""

    def function(x: Tensor) -> Tensor:
        return x.cumsum(0) if x.shape[-1] == 8 else F.silu(x)

    xs = [randn(FEW, width) for width in (24, 8, 16)]
    with pytest.warns(RuntimeWarning, match="does not fuse"), launch.record() as launched:
        ys = fusedops.rowwise(function).foreach(xs)
    assert launched == ["forward_slices"]
    for x, y in zip(xs, ys, strict=True):
        torch.testing.assert_close(y, function(x))


_x, _y = torch.ones(4, 8), torch.ones(4, 6)


@pytest.mark.parametrize(
    ("args", "sizes", "error", "message"),
    [
        (([_x, _x], [_x]), None, ValueError, "residual has 1 slices, and x 2"),
        (([], []), None, ValueError, "there are 0 slices"),
        ((_x[0], _x), None, TypeError, "no argument has slices"),
        ((1.0, 2.0), None, TypeError, "no argument has slices"),
        ((_x, _x), [3, 4], ValueError, "no tensor has 7 columns"),
        ((_x, _x), [8, 0], ValueError, "expected 1 to 4096 positive numbers"),
        ((_x, _x), [], ValueError, "expected 1 to 4096 positive numbers"),
        ((_x, [_x, _x]), [8], ValueError, "residual has 2 slices, and sizes has 1"),
        ((torch.ones(1, 4097, 1), 1.0), None, ValueError, "expected 1 to 4096"),
        (([_x, _y], _x), None, RuntimeError, "must match the size"),
        (([_x, 2.0], [_x, _x]), None, TypeError, "foreach: x .* tensors, or numbers$"),
        (([_x], [torch.nn.Tanh()]), None, TypeError, "of Tanh, .*; pass .*: .m.weight for m in"),
        (([_x], torch.nn.ModuleList()), None, TypeError, "residual is a ModuleList; pass a list"),
        (([_x], iter([_x])), None, TypeError, "residual is a list_iterator; pass a list"),
    ],
)
def test_bad_arguments(
    args: tuple[Any, ...], sizes: Any, error: type[Exception], message: str
) -> None:
    args = tuple(mapped(lambda t: t.to(DEVICE), value) for value in args)
    with pytest.raises(error, match=message):
        fusedops.rowwise(_residual, strict=True).foreach(*args, sizes=sizes)


# --- calls that differ ----------------------------------------------------------------------------


@kernels
def test_captured_tensors_of_other_dtypes_and_shapes() -> None:
    captured = {"w": randn(8)}
    foreach = fusedops.rowwise(lambda x: x * captured["w"]).foreach
    xs = [randn(FEW, 8), randn(MANY, 8)]
    for w in (captured["w"], randn(8).double(), randn(1)):
        captured["w"] = w
        for y, x in zip(foreach(xs), xs, strict=True):
            assert torch.equal(y, x * w)


@kernels
def test_numbers_of_rows_may_be_numbers_of_columns() -> None:
    foreach = fusedops.rowwise(lambda x, w: x * w[-1]).foreach
    for count in (2, 3):
        xs, ws = [randn(count, 8), randn(count, 8)], [randn(count, 8), randn(count, 8)]
        for y, x, w in zip(foreach(xs, ws), xs, ws, strict=True):
            torch.testing.assert_close(y, x * w[-1])


@kernels
def test_results_without_gradients_are_no_views() -> None:
    xs, weight = [randn(2, 3, 8), randn(2, 3, 20)], randn(8).requires_grad_()
    with torch.no_grad():
        ys = fusedops.rowwise(lambda x: x.tanh()).foreach(xs)
    ys[0].mul_(weight)
    torch.testing.assert_close(ys[0], xs[0].tanh() * weight)


@kernels
def test_joint_parameters_of_several_dimensions() -> None:
    """Slices of them are not adjacent in memory."""
    foreach = fusedops.rowwise(lambda x, w: x * w[0] + w[1]).foreach
    x, w = randn(FEW, 3, 8), randn(2, 3, 8).requires_grad_()
    y, expected = foreach(x, w), x * w[0] + w[1]
    torch.testing.assert_close(y, expected)
    cotangent = randn(FEW, 3, 8)
    (actual,) = torch.autograd.grad(y, w, cotangent)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, w, cotangent)[0])
    x, w = randn(FEW, 12), randn(2, 12)
    torch.testing.assert_close(foreach(x, w, sizes=[4, 8]), x * w[0] + w[1])


@kernels
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_calls_of_changing_rows() -> None:
    foreach = fusedops.rowwise(lambda x, w: F.rms_norm(x, x.shape[-1:], w)).foreach
    compiled = torch.compile(lambda x, w: foreach(x, w, sizes=[8, 16]), backend="aot_eager")
    for rows in (FEW, MANY, MANY + 3):
        x, w = randn(rows, 24), randn(24)
        torch.testing.assert_close(compiled(x, w), foreach(x, w, sizes=[8, 16]))


@kernels
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_calls_of_slices_whose_rows_change() -> None:
    foreach = fusedops.rowwise(_norm_tanh, strict=True).foreach
    compiled = torch.compile(
        lambda *args: foreach(*args), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for rows in ((FEW, MANY), (MANY, 3), (MANY + 3, 7)):
        _assert_as_loop(compiled, [*_rows_of_slices(rows, (8, 40), fp32)])


@kernels
def test_signs_of_zeros_are_numbers() -> None:
    foreach, xs = fusedops.rowwise(lambda x, c: x * c).foreach, [randn(FEW, 8).abs()] * 2
    for number in (0.0, -0.0):
        assert torch.equal(foreach(xs, number)[0].signbit(), (xs[0] * number).signbit())


def test_function_is_freed_with_the_tensors_that_it_captures() -> None:
    def used() -> weakref.ref[Tensor]:
        factors = torch.rand(16, device=DEVICE)
        f = fusedops.rowwise(lambda x: (x * factors).softmax(-1))
        xs = [randn(FEW, 16).requires_grad_() for _ in range(3)]
        torch.stack(f.foreach(xs)).sum().backward()
        return weakref.ref(factors)

    alive = used()
    gc.collect()
    assert alive() is None


@kernels
def test_slices_of_other_dimensions_of_rows() -> None:
    xs = [randn(2, 3, 8), randn(6, 8), randn(8)]
    for y, x in zip(fusedops.rowwise(lambda x: x.tanh()).foreach(xs), xs, strict=True):
        torch.testing.assert_close(y, x.tanh())


@kernels
def test_stacked_slices_of_one_row() -> None:
    x = randn(3, 8)
    torch.testing.assert_close(fusedops.rowwise(lambda x: x.tanh()).foreach(x), x.tanh())


@kernels
def test_results_have_the_form_of_the_rows() -> None:
    """The first argument is a weight, which has fewer dimensions."""
    function = fusedops.rowwise(lambda w, x: (x * w).sum(-1))
    w, x = randn(4, 8), randn(FEW, 4, 8)
    torch.testing.assert_close(function.foreach(w, x), (x * w).sum(-1))
    separate = function.foreach(w[:2].flatten(), [x[:, 0], x[:, 1]], sizes=[8, 8])
    for k, y in enumerate(separate):
        torch.testing.assert_close(y, (x[:, k] * w[k]).sum(-1))


@kernels
def test_tuples_of_numbers_are_no_lists() -> None:
    function = fusedops.rowwise(lambda x, shape=(8,): F.rms_norm(x, shape))
    xs = [randn(FEW, 8), randn(FEW, 8)]
    for y, x in zip(function.foreach(xs), xs, strict=True):
        torch.testing.assert_close(y, F.rms_norm(x, (8,)))


@kernels
def test_masks_and_targets() -> None:
    masked = fusedops.rowwise(lambda x, mask: torch.where(mask, x, x * 2))
    losses = fusedops.rowwise(lambda x, t: F.cross_entropy(x, t, reduction="none"))
    xs = [randn(FEW, 8), randn(FEW, 20)]
    masks = [x > 0 for x in xs]
    targets = [torch.randint(x.shape[1], (FEW,), device=DEVICE) for x in xs]
    with launch.record() as launched:
        ys, values = masked.foreach(xs, masks), losses.foreach(xs, targets)
    assert launched == ["forward_slices"] * 2
    for x, mask, target, y, value in zip(xs, masks, targets, ys, values, strict=True):
        assert torch.equal(y, torch.where(mask, x, x * 2))
        torch.testing.assert_close(value, F.cross_entropy(x, target, reduction="none"))


class _Scaled:
    factor = 2.0

    @fusedops.rowwise
    def norm(self, x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w) * self.factor


@kernels
def test_methods() -> None:
    scaled, xs, ws = _Scaled(), [randn(FEW, 8), randn(FEW, 20)], [randn(8), randn(20)]
    for scaled.factor in (2.0, 3.0):
        for y, x, w in zip(scaled.norm.foreach(xs, ws), xs, ws, strict=True):
            torch.testing.assert_close(y, F.rms_norm(x, x.shape[-1:], w) * scaled.factor)
    assert scaled.norm.explain_foreach(xs, ws).launches == 1


# --- torch.compile --------------------------------------------------------------------------------


@kernels
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "name",
    [
        "ragged",
        "several_joint_results",
        "stacked",
        "several_results",
        "other_rows",
        "other_rows_without_saved_rows",
    ],
)
def test_compiled_calls(name: str) -> None:
    sample = SAMPLES[name](MANY, fp32)
    foreach = fusedops.rowwise(sample.function, strict=True).foreach
    function = lambda *args, sizes: foreach(*args, sizes=sizes)  # noqa: E731
    check(sample, torch.compile(function, fullgraph=True, backend="aot_eager"))


@kernels
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_call_of_a_function_that_captures_a_dictionary() -> None:
    """It has no guards. So its operators are in the graph, as those of a call of one slice."""
    sample = _captured(FEW, fp32)
    foreach = fusedops.rowwise(sample.function, strict=True).foreach
    compiled = torch.compile(lambda *xs: foreach([*xs]), fullgraph=True, backend="aot_eager")
    for result, x in zip(compiled(*sample.args[0]), sample.args[0], strict=True):
        torch.testing.assert_close(result, sample.function(x))


@kernels
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["stacked"])
def test_calls_under_fusedops_compile(name: str) -> None:
    """The backend fuses the rest of the graph, too."""
    sample = SAMPLES[name](MANY, fp32)
    foreach = fusedops.rowwise(sample.function, strict=True).foreach
    backend = Backend()
    function = lambda *args, sizes: foreach(*args, sizes=sizes)  # noqa: E731
    check(sample, torch.compile(function, fullgraph=True, backend=backend))
    assert not backend.report.left


@kernels
@pytest.mark.usefixtures("fresh_dynamo")
def test_exported_programs_call_the_function_for_each_slice() -> None:
    """They run where no operators of this library are registered."""
    call = fusedops.rowwise(_norm_tanh, strict=True).foreach

    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> list[Tensor]:
            return call([*tensors[:3]], [*tensors[3:6]], [*tensors[6:]])  # type: ignore[no-any-return]

    args = _lists(FEW, fp32, (7, 16, 24))
    exported = torch.export.export(Module(), tuple(flat(args)))
    assert "fusedops" not in exported.graph_module.code
    for y, *own in zip(exported.module()(*flat(args)), *args, strict=True):
        torch.testing.assert_close(y, _norm_tanh(*own))
