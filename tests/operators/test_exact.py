"""Operators that compute nothing with floating-point numbers.

Right to the last bit, in every layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from exact import bits, check, copies, every, expected, inplace, same, sized
from fusedops.core.spec import Sample, Spec
from support import DEVICE, DTYPES, EXACT_SPECS, Case, as_tuple, cases, rows_of, tensors_of

# --- values ---------------------------------------------------------------------------------------


def _in_its_dtype(spec: Spec, sample: Sample) -> bool:
    """Whether a sample is run in this dtype.

    In other dtypes than fp32 only the copy and the value of minus infinity differ.
    """
    fp32 = rows_of(spec, sample).dtype == torch.float32
    return fp32 or sample.name.endswith((", n=2", " columns", "int32 tokens", "allowed, padded"))


@pytest.mark.pairs("sample")
@cases(DTYPES, _in_its_dtype, EXACT_SPECS)
def test_values(case: Case) -> None:
    check(case.spec, case.sample())


@cases((torch.float32,), specs=EXACT_SPECS)
def test_the_formula_is_the_definition(case: Case) -> None:
    spec, sample = case.spec, case.sample()
    outputs = spec.reference(**copies(sample.tensors), **sample.options)
    assert all(map(same, outputs, expected(spec, sample)))


@every
def test_samples_are_not_in_vain(spec: Spec) -> None:
    """Most samples change some elements and leave others, else right values would show little."""
    parts = []
    for sample in spec.samples(DEVICE, torch.float32):
        changed = expected(spec, sample)[0] != rows_of(spec, sample)
        parts.append(float(changed.double().mean()))
    assert sum(0.0 < part < 1.0 for part in parts) >= 0.6 * len(parts)


def _small(spec: Spec, sample: Sample) -> bool:
    return sample.name in ("shape 6x9x64, n=2", "shape 33x20x131, n=1", "allowed, padded")


@cases(DTYPES, _small, EXACT_SPECS)
def test_every_bit_pattern_is_kept(case: Case) -> None:
    """NaN with whatever payload, infinities, minus zero, numbers below the normal ones."""
    spec, sample = case.spec, case.sample()
    rows = rows_of(spec, sample)
    integers = bits(rows).dtype
    limits = torch.iinfo(integers)
    generator = torch.Generator().manual_seed(3)
    random = torch.randint(limits.min, limits.max, rows.shape, generator=generator, dtype=integers)
    small = torch.randint(-2, 3, rows.shape, generator=generator, dtype=integers)
    patterns = torch.where(torch.rand(rows.shape, generator=generator) < 0.5, random, small).to(
        DEVICE
    )
    check(
        spec,
        dataclasses.replace(
            sample, tensors={**sample.tensors, spec.tensors[0]: patterns.view(rows.dtype)}
        ),
    )


@cases((torch.float32,), lambda spec, sample: sample.name == "allowed, padded", EXACT_SPECS)
def test_checks_after_a_good_call(case: Case) -> None:
    """Calls that were checked once are not checked again.

    A mask of another width is no such call.
    """
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
    """The content of a view's gaps: NaN, or a valid token, which would ban if it were read."""
    value = float("nan") if like.is_floating_point() else 1
    return torch.full(shape, value, dtype=like.dtype, device=like.device)


def _wider(t: Tensor) -> Tensor:
    return torch.cat((_garbage((*t.shape[:-1], 3), t), t, _garbage((*t.shape[:-1], 2), t)), -1)[
        ..., 3:-2
    ]


def _padded(t: Tensor) -> Tensor:
    """Rows that each begin at a multiple of 16 bytes."""
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


def _roomy(spec: Spec, sample: Sample) -> bool:
    return sample.name in (
        "shape 4x40x17, n=2",
        "shape 6x9x64, n=1",
        "allowed, padded",
        "4097 columns",
    )


@cases((torch.float32, torch.bfloat16), _roomy, EXACT_SPECS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__.strip("_"))
def test_layouts(case: Case, layout: Callable[[Tensor], Tensor]) -> None:
    """Each tensor in turn, then all.

    Where the scores are written to, nothing between and around them is.
    """
    spec, sample = case.spec, case.sample()
    names = list(tensors_of(spec, sample))
    for chosen in (*([name] for name in names), names):
        fresh = case.sample()
        tensors = {
            name: layout(t) if t is not None and name in chosen and t.shape[0] > 1 else t
            for name, t in fresh.tensors.items()
        }
        rows = tensors[spec.tensors[0]]
        whole = torch.empty(0, dtype=rows.dtype, device=rows.device).set_(rows.untyped_storage())
        outside = torch.ones_like(whole, dtype=torch.bool)
        outside.as_strided(rows.shape, rows.stride(), rows.storage_offset()).zero_()
        around = whole[outside].clone()
        check(spec, dataclasses.replace(fresh, tensors=tensors))
        assert same(whole[outside], around)


@cases((torch.float32,), _roomy, EXACT_SPECS)
def test_inputs_may_be_one_expanded_row(case: Case) -> None:
    """One row in the place of all: what is only read may be."""
    spec = case.spec
    for name, tensor in tensors_of(spec, case.sample()).items():
        sample = case.sample()
        sample = dataclasses.replace(sample, tensors={**sample.tensors, name: _expanded(tensor)})
        if inplace(spec) and name == spec.tensors[0]:
            # One row of it is no overlap, and being right must not speak for all of them.
            one = {
                n: t if t is None or n == "allowed" else t[:1] for n, t in sample.tensors.items()
            }
            spec.call(**one, **sample.options)
            with pytest.raises(ValueError, match="scores has overlapping rows"):
                spec.call(**sample.tensors, **sample.options)
        else:
            check(spec, sample)


# --- autograd -------------------------------------------------------------------------------------


@cases((torch.float64,), _small, EXACT_SPECS)
def test_gradient_is_zero_where_a_score_is_banned(case: Case) -> None:
    """It goes through where the score did, and is zero where it did not."""
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
def test_a_change_in_place_is_noticed(spec: Spec) -> None:
    """Autograd refuses a backward that needs what was overwritten."""
    sample = sized(spec, (4, 8))  # so few tokens that some are banned
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
    """Memory holds the negatives: a kernel that copied it would be wrong."""
    spec, sample = case.spec, case.sample()
    rows = rows_of(spec, sample)
    lazy = torch.complex(torch.zeros_like(rows), -rows).conj().imag
    assert lazy.is_neg()
    (want,) = expected(spec, sample)
    (output,) = as_tuple(spec.call(**{**sample.tensors, spec.tensors[0]: lazy}, **sample.options))
    assert torch.equal(output, want)


@cases((torch.float32,), _small, EXACT_SPECS)
def test_vmap(case: Case) -> None:
    """Over a batch of scores, as over a loop."""
    spec, sample = case.spec, case.sample()
    rows = rows_of(spec, sample)
    many = torch.stack((rows, rows + 1.0, -rows))
    one = lambda scores: spec.call(**{**sample.tensors, spec.tensors[0]: scores}, **sample.options)  # noqa: E731
    wanted = torch.stack([as_tuple(one(scores.clone()))[0] for scores in many])
    assert torch.equal(torch.vmap(one)(many), wanted)
