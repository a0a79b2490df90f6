"""Right results for every layout of tensors, and for numbers of rows and columns at limits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusedops.core.spec import Sample, Spec
from support import (
    ALL_SPECS,
    DEVICE,
    Case,
    call,
    cases,
    eager,
    of_families,
    random_like,
    rows_of,
    tensors_of,
)
from tolerances import check_gradients, check_values

PROCESSORS = (
    torch.cuda.get_device_properties(DEVICE).multi_processor_count if DEVICE.type == "cuda" else 132
)
Layout = Callable[[Tensor], Tensor]


def _name(layout: Layout) -> str:
    return layout.__name__.strip("_")


def _check(spec: Spec, sample: Sample) -> None:
    check_gradients(spec, sample, values=True)


# --- strides --------------------------------------------------------------------------------------


def _wider(t: Tensor) -> Tensor:
    """Rows of a wider tensor, whose row stride is no multiple of 16 bytes."""
    return torch.cat((t, torch.full_like(t[..., :3], float("nan"))), -1)[..., :-3]


def _padded(t: Tensor) -> Tensor:
    """Rows that are padded so that each begins at a multiple of 16 bytes."""
    return torch.nn.functional.pad(t, (0, -t.shape[-1] % 16 + 16), value=float("nan"))[
        ..., : t.shape[-1]
    ]


def _wide_aligned(t: Tensor) -> Tensor:
    """Half of a packed tensor, such as that of a fused projection."""
    return torch.cat((torch.full_like(t, float("nan")), t), -1)[..., t.shape[-1] :]


def _every_second_row(t: Tensor) -> Tensor:
    return torch.stack((t, torch.full_like(t, float("nan"))), 1)[:, 0]


def _expanded(t: Tensor) -> Tensor:
    return t[:1].expand_as(t)


def _column(t: Tensor) -> Tensor:
    """One value of each row, expanded along the row, so that the last stride is zero."""
    return (t[:, :1] + 0.0).expand_as(t)


def _transposed(t: Tensor) -> Tensor:
    return t.t().contiguous().t()


def _every_second_column(t: Tensor) -> Tensor:
    return torch.stack((t, torch.full_like(t, float("nan"))), -1)[..., 0]


def _unaligned(t: Tensor) -> Tensor:
    """A contiguous tensor that begins one element into its storage, off a 16-byte boundary."""
    return torch.cat((torch.full_like(t.flatten()[:1], float("nan")), t.flatten()))[1:].view(
        t.shape
    )


def _one_value(t: Tensor) -> Tensor:
    return t[:1].expand_as(t)


def _overlapping(t: Tensor) -> Tensor:
    """Rows that overlap: each begins one element after the preceding one."""
    return t.flatten()[: t.shape[0] + t.shape[1] - 1].unfold(0, t.shape[1], 1)


MATRIX_LAYOUTS: list[Layout] = [
    _wider,
    _padded,
    _wide_aligned,
    _every_second_row,
    _expanded,
    _column,
    _transposed,
    _every_second_column,
    _unaligned,
    _overlapping,
]


def _relaid(spec: Spec, sample: Sample, layout: Layout, names: tuple[str, ...]) -> Sample:
    """Returns the sample with the tensors ``names`` in another layout; asserts that it differs."""
    tensors = dict(sample.tensors)
    for name in names:
        before = tensors[name]
        if before is not None:
            tensors[name] = layout(before)
            assert tensors[name].shape == before.shape
            moved = not tensors[name].is_contiguous() or tensors[name].storage_offset() > 0
            assert moved, f"{layout.__name__} left {name} as it was"
    return dataclasses.replace(sample, tensors=tensors)


def _matrices(spec: Spec, sample: Sample) -> tuple[str, ...]:
    rows = rows_of(spec, sample)
    return tuple(name for name, t in tensors_of(spec, sample).items() if t.shape == rows.shape)


def _ordinary(spec: Spec, sample: Sample) -> bool:
    return sample.name in ("shape 7x17", "shape 6x64")


@cases((torch.float32, torch.bfloat16), _ordinary)
@pytest.mark.parametrize("layout", MATRIX_LAYOUTS, ids=_name)
def test_matrix_layouts(case: Case, layout: Layout) -> None:
    """All tensors with rows have the layout, then each alone, so that their strides differ."""
    spec, sample = case.spec, case.sample()
    names = _matrices(spec, sample)
    _check(spec, _relaid(spec, sample, layout, names))
    if len(names) > 1:
        for name in names:
            check_values(spec, _relaid(spec, sample, layout, (name,)))


@cases((torch.float32, torch.bfloat16), _ordinary)
@pytest.mark.parametrize("layout", [_every_second_column, _unaligned, _one_value], ids=_name)
def test_parameter_layouts(case: Case, layout: Layout) -> None:
    spec, sample = case.spec, case.sample()
    names = tuple(name for name in tensors_of(spec, sample) if name not in _matrices(spec, sample))
    _check(spec, _relaid(spec, sample, layout, names))


@cases((torch.float32, torch.bfloat16), lambda spec, sample: sample.name == "shape 2x20000")
@pytest.mark.parametrize("layout", [_wider, _unaligned, _transposed], ids=_name)
def test_wide_rows_in_other_layouts(case: Case, layout: Layout) -> None:
    _check(
        case.spec, _relaid(case.spec, case.sample(), layout, _matrices(case.spec, case.sample()))
    )


@cases((torch.float32, torch.bfloat16), lambda spec, sample: sample.name == "shape 2x3x96")
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (0, 2, 1)], ids=str)
def test_permuted_dimensions(case: Case, order: tuple[int, ...]) -> None:
    """Batch and sequence are swapped in memory, as in attention, or channels are moved forward."""
    back = sorted(range(3), key=order.__getitem__)
    layout = lambda t: t.permute(order).contiguous().permute(back)  # noqa: E731
    layout.__name__ = f"permuted {order}"
    _check(
        case.spec, _relaid(case.spec, case.sample(), layout, _matrices(case.spec, case.sample()))
    )


@cases((torch.float32,), lambda spec, sample: sample.name == "two normalised dimensions")
@pytest.mark.parametrize("order", [(0, 1, 3, 2), (2, 3, 0, 1), (1, 0, 2, 3)], ids=str)
def test_permuted_normalised_dimensions(case: Case, order: tuple[int, ...]) -> None:
    """The normalised dimensions have another order in memory, so a row is not contiguous."""
    back = sorted(range(4), key=order.__getitem__)
    layout = lambda t: t.permute(order).contiguous().permute(back)  # noqa: E731
    layout.__name__ = f"permuted {order}"
    sample = _relaid(case.spec, case.sample(), layout, (case.spec.tensors[0],))
    if order == (0, 1, 3, 2):
        sample = _relaid(case.spec, sample, _transposed, ("weight",))
    _check(case.spec, sample)


# --- sizes ----------------------------------------------------------------------------------------


def _resized(spec: Spec, dtype: torch.dtype, shape: tuple[int, ...]) -> Sample:
    """A random sample with all tensors, whose rows have this shape."""
    torch.manual_seed(sum(shape))
    cols = shape[-1]
    sample = spec.benchmark((math.prod(shape[:-1]), cols), dtype, torch.device("cpu"))
    tensors = {
        name: t.view(*shape[:-1], t.shape[-1]) if t.dim() > 1 else t
        for name, t in tensors_of(spec, sample).items()
    }
    tensors = {name: t.to(DEVICE) for name, t in tensors.items()}
    return Sample("x".join(map(str, shape)), {**sample.tensors, **tensors}, sample.options)


over_specs = pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)
over_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@of_families
@over_dtypes
@pytest.mark.parametrize("rows", sorted({PROCESSORS + d for d in (-1, 0, 1)} | {131, 132, 133}))
def test_rows_around_a_multiple_of_the_processors(
    spec: Spec, dtype: torch.dtype, rows: int
) -> None:
    _check(spec, _resized(spec, dtype, (rows, 24)))


@of_families
@pytest.mark.parametrize(
    "cols", [1, 2, 3, 5, 7, 8, 9, 15, 16, 31, 33, 63, 65, 255, 257, 1023, 1025]
)
def test_numbers_of_columns(spec: Spec, cols: int) -> None:
    """They are near powers of two, and near multiples of eight, which share a Philox call."""
    _check(spec, _resized(spec, torch.float32, (5, cols)))


@over_specs
@over_dtypes
@pytest.mark.parametrize("shape", [(0, 24), (0, 4, 24), (4, 0, 24), (0, 1), (0, 20000)], ids=str)
def test_no_rows(spec: Spec, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Outputs and gradients of rows are empty, and gradients of parameters are zero."""
    sample = _resized(spec, dtype, shape)
    leaves = {name: t.requires_grad_() for name, t in tensors_of(spec, sample).items()}
    outputs = call(spec, sample)(leaves)
    grads = torch.autograd.grad(outputs, list(leaves.values()), random_like(outputs))
    for output, want in zip(outputs, eager(spec, sample)(leaves), strict=True):
        assert output.shape == want.shape
        assert output.dtype == dtype
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        assert grad.shape == leaf.shape
        assert grad.dtype == leaf.dtype
        assert not grad.any(), f"gradient of {name}"


@pytest.mark.plain  # takes half a minute for each operator in the interpreter
@over_specs
def test_many_rows(spec: Spec) -> None:
    """There are more rows than the 65535 programs of a grid dimension."""
    _check(spec, _resized(spec, torch.float32, (65536 + 3, 4)))


@over_specs
@pytest.mark.parametrize("shape", [(6,), (1, 6), (2, 1, 3, 6), (1, 1, 1, 1, 6)], ids=str)
def test_leading_dimensions(spec: Spec, shape: tuple[int, ...]) -> None:
    _check(spec, _resized(spec, torch.float32, shape))
