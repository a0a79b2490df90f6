"""Outputs of every sample against the formula in fp64, and the formula against PyTorch."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusedops.core.spec import Sample, Spec
from support import (
    ALL_SPECS,
    DEVICE,
    DTYPES,
    HALF,
    KERNEL_PATH,
    SEED,
    Case,
    Mask,
    call,
    cases,
    dropout_mask,
    eager,
    gradients,
    hugging_face_norm,
    keep_mask,
    oracle,
    philox,
    random_like,
    resolved,
    rows_of,
    tensors_of,
)
from tolerances import (
    assert_within,
    check_gradients,
    check_values,
    depth,
    sensitivity,
    unit_roundoff,
)


@pytest.mark.pairs("spec dtype", "sample")
@cases()
def test_values(case: Case) -> None:
    check_values(case.spec, case.sample())


@cases(select=lambda spec, sample: bool(sample.options.get("return_sum")))
def test_output_is_the_norm_of_the_returned_sum(case: Case) -> None:
    """The norm is computed from the sum as it is returned, that is, rounded."""
    spec, sample = case.spec, case.sample()
    y, z, *_ = call(spec, sample)(tensors_of(spec, sample))
    inputs = {**sample.tensors, "bias": None, "residual": None, spec.tensors[0]: z}
    exact = oracle(spec, dataclasses.replace(sample, tensors=inputs), Mask())
    (moved, *_), _ = sensitivity(exact, {name: t for name, t in inputs.items() if t is not None})
    unit = depth(z.shape[-1]) * unit_roundoff(torch.promote_types(z.dtype, torch.float32))
    assert_within(y, exact(inputs)[0], 2 * unit * moved, "output")


@cases(select=lambda spec, sample: "cast_dtype" in sample.options)
def test_cast_output_is_the_output_in_another_dtype(case: Case) -> None:
    """They agree in every bit. If the dtypes are equal, the cast is the output itself, no copy."""
    y, *_, cast = call(case.spec, case.sample())(tensors_of(case.spec, case.sample()))
    assert torch.equal(cast, y.to(cast.dtype))
    assert (cast is y) == (cast.dtype == y.dtype)


@pytest.mark.once
@cases((torch.float64,))
def test_oracle_agrees_with_pytorch(case: Case) -> None:
    """It also agrees with the formulas of the papers: `_layer_norm` and `_rms_norm`."""
    sample = case.sample()
    tensors = tensors_of(case.spec, sample)
    exact = oracle(case.spec, sample)(tensors)
    for got, want in zip(exact, eager(case.spec, sample)(tensors), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    with mock.patch.multiple(F, layer_norm=_layer_norm, rms_norm=_rms_norm):
        written_out = eager(case.spec, sample)(tensors)
    for got, want in zip(exact, written_out, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """The formula of Ba et al. 2016, as printed."""
    dims = tuple(range(-len(shape), 0))
    centred = x - x.mean(dims, keepdim=True)
    y = centred / (centred.square().mean(dims, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float) -> Tensor:
    """The formula of Zhang and Sennrich 2019, as printed."""
    y = x / (x.square().mean(tuple(range(-len(shape), 0)), keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


@pytest.mark.parametrize(
    ("rounds", "counter", "key", "words"),
    [
        (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (7, (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ],
)
def test_oracle_of_philox_gives_the_known_answers(
    rounds: int, counter: tuple, key: tuple, words: tuple
) -> None:
    """Random123, the library of Philox's authors, publishes these answers."""
    got = philox([torch.tensor([c]) for c in counter], key, rounds)
    assert tuple(word.item() for word in got) == words


@pytest.mark.gpu
@cases(select=lambda spec, sample: not spec.has_dropout and rows_of(spec, sample).numel() <= 4096)
def test_small_calls_left_to_pytorch(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU small calls go to PyTorch's own operator, except in the other tests."""
    monkeypatch.setattr("fusedops.core.calls.operator.Operator.native_elements", 4096)
    check_gradients(case.spec, case.sample(), values=True)


# --- inputs on which a careless formula loses all digits ------------------------------------------


def _shifted(spec: Spec, sample: Sample, scale: float, shift: float) -> Sample:
    rows = rows_of(spec, sample)
    return dataclasses.replace(
        sample, tensors={**sample.tensors, spec.tensors[0]: rows * scale + shift}
    )


def _is_plain(spec: Spec, sample: Sample) -> bool:
    return sample.name in ("shape 6x64", "shape 3x1000", "shape 2x20000")


@cases((torch.float32, torch.float64), _is_plain)
def test_rows_far_from_zero(case: Case) -> None:
    """The formula E[x²] - E[x]² would lose all digits here, the variance of centred rows none."""
    check_values(case.spec, _shifted(case.spec, case.sample(), 1.0, 3000.0))


@cases(
    DTYPES,
    lambda spec, sample: (
        _is_plain(spec, sample) and "eps" in inspect.signature(spec.reference).parameters
    ),
)
def test_default_eps(case: Case) -> None:
    """The rows are so small that eps decides: the default must be PyTorch's for the dtype."""
    sample = case.sample()
    assert "eps" not in sample.options
    tiny = {
        name: t * (1e-3 if t.dim() > 1 or name == "bias" else 1.0)
        for name, t in tensors_of(case.spec, sample).items()
    }
    sample = dataclasses.replace(sample, tensors={**sample.tensors, **tiny})
    check_values(case.spec, sample)
    eps = resolved(case.spec, sample)["eps"]
    if not case.spec.has_dropout:
        with_default = case.spec.eager(**tiny, **sample.options)
        with_eps = eager(case.spec, sample, dropout_mask(case.spec, sample))(tiny)
        torch.testing.assert_close(
            with_default, with_eps, msg=f"PyTorch's own default is not {eps}"
        )


# --- roundings that reproduce other libraries -----------------------------------------------------


def _rounds_like_another(spec: Spec, sample: Sample) -> bool:
    # Gemma's norms have an offset.
    return sample.options.get("rounding", "once") != "once" or "weight_offset" in sample.options


def _dyadic(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Quarters in [-2, 2].

    They are exact in fp16 and bf16, and so are sums of their squares in fp32, in any order.
    """
    values = torch.randint(-8, 9, tensor.shape, generator=generator) / 4
    return values.to(tensor.device, tensor.dtype)


def _with_width(
    sample: Sample, rows: int, cols: int, generator: torch.Generator, *, exact: bool
) -> dict[str, Tensor]:
    tensors = {}
    for name, t in sample.tensors.items():
        if t is not None:
            blank = torch.empty(
                (rows, cols) if t.dim() > 1 else (cols,), dtype=t.dtype, device=t.device
            )
            random = torch.randn(blank.shape, generator=generator).to(blank)
            # Only what is summed needs to be exact; weights may use all their bits.
            tensors[name] = _dyadic(blank, generator) if exact and name != "weight" else random
    return tensors


@cases(HALF, _rounds_like_another)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "random"])
def test_rounds_as_hugging_face(case: Case, exact: bool) -> None:
    """All bits are equal where the sum of squares is exact.

    Otherwise rstd may differ in its last bit, which changes a few roundings.
    """
    spec, sample = case.spec, case.sample()
    generator = torch.Generator().manual_seed(11)
    options = (
        {**sample.options, "normalized_shape": (64,)}
        if "normalized_shape" in sample.options
        else sample.options
    )
    options = {**options, **({"p": 0.5} if spec.has_dropout else {})}  # the scale, 2, is exact
    sample = Sample(sample.name, _with_width(sample, 48, 64, generator, exact=exact), options)
    (got,) = call(spec, sample)(sample.tensors)
    (want,) = eager(spec, sample)(sample.tensors)
    assert got.dtype == want.dtype
    if exact:
        assert torch.equal(got, want), f"{int((got != want).sum())} of {got.numel()} differ"
    elif not spec.has_dropout:  # eager also rounds between the steps of its sum
        # Where the weight widens the output to fp32, it shows the last bit of rstd and those of
        # two products, 2u each.
        tolerance = (
            6 * unit_roundoff(torch.float32) * want.abs() if want.dtype == torch.float32 else 0.0
        )
        assert ((got - want).abs() > tolerance).double().mean() <= 1e-3


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_roundings_differ(dtype: torch.dtype) -> None:
    """The oracle's formulas differ. If they did not, no test could tell one from another."""
    z, weight = (
        torch.randn(64, 64, device=DEVICE).to(dtype),
        torch.randn(64, device=DEVICE).to(dtype),
    )
    llama, gemma = (hugging_face_norm(z, weight, 1e-6, rounding) for rounding in ("llama", "gemma"))
    assert 0.05 < (llama != gemma).double().mean() < 0.9


# --- NaN and infinity -----------------------------------------------------------------------------


def _classes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """For each element a number that tells finite, positive and negative infinite, and NaN."""
    return [t.isnan() * 3 + t.isposinf() * 1 + t.isneginf() * 2 for t in tensors]


def _on_cpu(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if t is None else t.cpu().double() for name, t in tensors.items()}


_SPOILED = ("shape 7x17", "shape 2x20000", "sum returned", "p=0.9")


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), float("-inf")], ids=["nan", "inf", "-inf"]
)
@cases((torch.float32, torch.bfloat16), lambda spec, sample: sample.name in _SPOILED)
def test_not_a_number_spreads_as_in_pytorch(case: Case, value: float) -> None:
    """The same elements become NaN or infinite as in eager PyTorch, whichever input is spoiled."""
    spec, sample = case.spec, case.sample()
    mask = dropout_mask(spec, sample)
    unspoiled = call(spec, sample)(sample.tensors)
    for name, clean in tensors_of(spec, sample).items():
        spoiled = clean.clone()
        spoiled.view(-1)[:: max(clean.numel() // 3, 1) + 1] = value
        tensors = {**sample.tensors, name: spoiled}
        # Kernels are compared with fp64 on the CPU, since two kernels of PyTorch deviate from their
        # formulas. In fp32 on the CPU, GELU(inf) is NaN. On a GPU, an infinity makes its whole row
        # NaN in rms_norm; by the formula, finite elements become zero.
        exact, kept = (_on_cpu(tensors), mask.cpu()) if KERNEL_PATH else (tensors, mask)
        got, want = [t.cpu() for t in call(spec, sample)(tensors)], eager(spec, sample, kept)(exact)
        for a, b in zip(_classes(got), _classes(want), strict=True):
            assert torch.equal(a, b), f"{name}: {int((a != b).sum())} elements"
        # An activation may make an infinite number finite, but the result still changes.
        assert not all(map(torch.equal, got, [t.cpu() for t in unspoiled])), (
            f"{name}: the outputs are the same as without {value}"
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@cases((torch.float32, torch.bfloat16), lambda spec, sample: sample.name in _SPOILED)
def test_not_a_number_spreads_backwards(case: Case, value: float) -> None:
    """It spreads from one element of a cotangent to the same gradients as in eager PyTorch."""
    spec, sample = case.spec, case.sample()
    tensors, mask = tensors_of(spec, sample), dropout_mask(spec, sample)
    cotangents = random_like(call(spec, sample)(tensors))
    cotangents[0].view(-1)[cotangents[0].shape[-1] + 1] = value
    got = gradients(call(spec, sample), tensors, cotangents)
    want = gradients(eager(spec, sample, mask), tensors, cotangents)
    for name in tensors:
        assert torch.equal(got[name].isfinite(), want[name].isfinite()), name
        # If there are many outputs, each depends on a part of the inputs.
        if name == spec.tensors[0] or len(cotangents) <= 2:
            assert not got[name].isfinite().all(), name


def test_specs_are_found() -> None:
    assert len(ALL_SPECS) >= 5
    assert len({spec.name for spec in ALL_SPECS}) == len(ALL_SPECS)


def test_masks_of_rows_offsets_and_seeds_differ() -> None:
    keep = keep_mask(SEED, 4, 4, 64, 0.5)
    assert not torch.equal(keep[0], keep[1])
    assert not torch.equal(keep, keep_mask(SEED, 8, 4, 64, 0.5))
    assert not torch.equal(keep, keep_mask(SEED ^ (1 << 40), 4, 4, 64, 0.5))
