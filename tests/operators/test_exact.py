"""Operators without floating-point arithmetic: equal to the last bit, in every layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from exact import bits, check, copies, every, expected, inplace, same, sized
from fusedops.core.spec import Sample, Spec
from support import DEVICE, DTYPES, EXACT_SPECS, Case, as_tuple, cases, rows_of, tensors_of

# --- values ---------------------------------------------------------------------------------------


def _is_selected(spec: Spec, sample: Sample) -> bool:
    """Selects all samples in fp32, and few in other dtypes.

    Other dtypes differ only in the copy of elements and in the value of minus infinity.
    """
    fp32 = rows_of(spec, sample).dtype == torch.float32
    return fp32 or sample.name.endswith((", n=2", " columns", "int32 tokens", "allowed, padded"))


@pytest.mark.pairs("sample")
@cases(DTYPES, _is_selected, EXACT_SPECS)
def test_values(case: Case) -> None:
    check(case.spec, case.sample())


@cases((torch.float32,), specs=EXACT_SPECS)
def test_reference_equals_the_definition(case: Case) -> None:
    spec, sample = case.spec, case.sample()
    outputs = spec.reference(**copies(sample.tensors), **sample.options)
    assert all(map(same, outputs, expected(spec, sample)))


@every
def test_most_samples_change_some_elements(spec: Spec) -> None:
    """Tests of values would detect few faults if a sample changed no element, or all."""
    parts = []
    for sample in spec.samples(DEVICE, torch.float32):
        changed = expected(spec, sample)[0] != rows_of(spec, sample)
        parts.append(float(changed.double().mean()))
    assert sum(0.0 < part < 1.0 for part in parts) >= 0.6 * len(parts)


def _small(spec: Spec, sample: Sample) -> bool:
    return sample.name in ("shape 6x9x64, n=2", "shape 33x20x131, n=1", "allowed, padded")


@cases(DTYPES, _small, EXACT_SPECS)
def test_every_bit_pattern_is_copied(case: Case) -> None:
    """NaN with any payload, infinities, minus zero, subnormal numbers."""
    spec, sample = case.spec, case.sample()
    rows = rows_of(spec, sample)
    integers = bits(rows).dtype
    limits = torch.iinfo(integers)
    generator = torch.Generator().manual_seed(3)
    random = torch.randint(limits.min, limits.max, rows.shape, generator=generator, dtype=integers)
    small = torch.randint(-2, 3, rows.shape, generator=generator, dtype=integers)
    is_random = torch.rand(rows.shape, generator=generator) < 0.5
    patterns = torch.where(is_random, random, small).to(DEVICE).view(rows.dtype)
    tensors = {**sample.tensors, spec.tensors[0]: patterns}
    check(spec, dataclasses.replace(sample, tensors=tensors))


@cases((torch.float32,), lambda spec, sample: sample.name == "allowed, padded", EXACT_SPECS)
def test_bad_mask_after_a_good_call_is_refused(case: Case) -> None:
    """Calls like a validated one skip the checks. A call with another mask must not."""
    spec, sample = case.spec, case.sample()
    spec.call(**sample.tensors, **sample.options)
    mask = sample.tensors["allowed"]
    for wrong, error in (
        (mask[:-1], ValueError),
        (mask[None], ValueError),
        (mask.int(), TypeError),
    ):
        with pytest.raises(error, match="no_repeat_ngram: allowed has"):
            spec.call(**{**sample.tensors, "allowed": wrong}, **sample.options)


# --- layouts --------------------------------------------------------------------------------------


def _garbage(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The content of gaps: NaN, or a valid token, which would ban a score if it was read."""
    value = float("nan") if like.is_floating_point() else 1
    return torch.full(shape, value, dtype=like.dtype, device=like.device)


def _wider(t: Tensor) -> Tensor:
    return torch.cat((_garbage((*t.shape[:-1], 3), t), t, _garbage((*t.shape[:-1], 2), t)), -1)[
        ..., 3:-2
    ]


def _padded(t: Tensor) -> Tensor:
    """A layout in which each row begins at a multiple of 16 bytes."""
    return torch.cat((t, _garbage((*t.shape[:-1], -t.shape[-1] % 16 + 16), t)), -1)[
        ..., : t.shape[-1]
    ]


def _every_second_row(t: Tensor) -> Tensor:
    return torch.stack((t, _garbage(tuple(t.shape), t)), 1)[:, 0]


def _every_second_column(t: Tensor) -> Tensor:
    return torch.stack((t, _garbage(tuple(t.shape), t)), -1)[..., 0]


def _transposed(t: Tensor) -> Tensor:
    return t.t().contiguous().t() if t.dim() == 2 else _every_second_column(t)


def _unaligned(t: Tensor) -> Tensor:
    return torch.cat((_garbage((1,), t), t.flatten()))[1:].view(t.shape)


def _expanded(t: Tensor) -> Tensor:
    return t[:1].expand_as(t)


LAYOUTS = [_wider, _padded, _every_second_row, _every_second_column, _transposed, _unaligned]


def _has_several_rows(spec: Spec, sample: Sample) -> bool:
    return sample.name in (
        "shape 4x40x17, n=2",
        "shape 6x9x64, n=1",
        "allowed, padded",
        "4097 columns",
    )


@cases((torch.float32, torch.bfloat16), _has_several_rows, EXACT_SPECS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__.strip("_"))
def test_layouts(case: Case, layout: Callable[[Tensor], Tensor]) -> None:
    """Each tensor in turn has the layout, then all. Gaps of the scores are not written to."""
    spec, sample = case.spec, case.sample()
    names = list(tensors_of(spec, sample))
    for chosen in (*([name] for name in names), names):
        fresh = case.sample()
        tensors = {
            name: layout(t) if t is not None and name in chosen and t.shape[0] > 1 else t
            for name, t in fresh.tensors.items()
        }
        rows = tensors[spec.tensors[0]]
        storage = torch.empty(0, dtype=rows.dtype, device=rows.device).set_(rows.untyped_storage())
        is_gap = torch.ones_like(storage, dtype=torch.bool)
        is_gap.as_strided(rows.shape, rows.stride(), rows.storage_offset()).zero_()
        before = storage[is_gap].clone()
        check(spec, dataclasses.replace(fresh, tensors=tensors))
        assert same(storage[is_gap], before)


@cases((torch.float32,), _has_several_rows, EXACT_SPECS)
def test_inputs_may_be_one_expanded_row(case: Case) -> None:
    """Scores that are written in place are refused instead."""
    spec = case.spec
    for name, tensor in tensors_of(spec, case.sample()).items():
        sample = case.sample()
        sample = dataclasses.replace(sample, tensors={**sample.tensors, name: _expanded(tensor)})
        if inplace(spec) and name == spec.tensors[0]:
            # A call with a single row does not overlap; it must not validate the call with all.
            one_row = {
                n: t if t is None or n == "allowed" else t[:1] for n, t in sample.tensors.items()
            }
            spec.call(**one_row, **sample.options)
            with pytest.raises(ValueError, match="scores has overlapping rows"):
                spec.call(**sample.tensors, **sample.options)
        else:
            check(spec, sample)


# --- autograd -------------------------------------------------------------------------------------


@cases((torch.float64,), _small, EXACT_SPECS)
def test_gradient_is_zero_where_a_score_is_banned(case: Case) -> None:
    """Elsewhere it is the cotangent."""
    spec, sample = case.spec, case.sample()
    (want,) = expected(spec, sample)
    leaf = rows_of(spec, sample).requires_grad_()
    for scale in (1.0, 3.0):
        (output,) = as_tuple(
            spec.call(**{**sample.tensors, spec.tensors[0]: leaf * scale}, **sample.options)
        )
        (grad,) = torch.autograd.grad(output, leaf, torch.full_like(output, 2.0))
        assert torch.equal(grad, torch.where(want.isneginf(), 0.0, 2.0 * scale))


@every
def test_autograd_detects_the_change_in_place(spec: Spec) -> None:
    """A backward that needs the overwritten scores raises an error."""
    sample = sized(spec, (4, 8))  # with so few tokens some are banned
    scores = rows_of(spec, sample)
    weight = torch.ones((), device=DEVICE, requires_grad=True)
    product = weight * scores
    (output,) = as_tuple(spec.call(**sample.tensors, **sample.options))
    assert output.isinf().any()
    if inplace(spec):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
    else:
        product.sum().backward()


@every
def test_inference_mode(spec: Spec) -> None:
    sample = sized(spec, (4, 8))
    wanted = expected(spec, sample)
    with torch.inference_mode():
        fresh = copies(sample.tensors)
        outputs = as_tuple(spec.call(**fresh, **sample.options))
    assert all(map(same, outputs, wanted))


@cases((torch.float32,), _small, EXACT_SPECS)
def test_scores_with_a_lazy_sign(case: Case) -> None:
    """The memory contains the negated scores, so a kernel that reads it directly would be wrong."""
    spec, sample = case.spec, case.sample()
    rows = rows_of(spec, sample)
    lazy = torch.complex(torch.zeros_like(rows), -rows).conj().imag
    assert lazy.is_neg()
    (want,) = expected(spec, sample)
    (output,) = as_tuple(spec.call(**{**sample.tensors, spec.tensors[0]: lazy}, **sample.options))
    assert torch.equal(output, want)


@cases((torch.float32,), _small, EXACT_SPECS)
def test_vmap(case: Case) -> None:
    """vmap over a batch of scores equals a loop."""
    spec, sample = case.spec, case.sample()
    rows = rows_of(spec, sample)
    batch = torch.stack((rows, rows + 1.0, -rows))
    first = spec.tensors[0]

    def call(scores: Tensor) -> Any:
        return spec.call(**{**sample.tensors, first: scores}, **sample.options)

    looped = torch.stack([as_tuple(call(scores.clone()))[0] for scores in batch])
    assert torch.equal(torch.vmap(call)(batch), looped)
