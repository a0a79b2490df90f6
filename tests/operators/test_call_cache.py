"""The call cache: a call's key contains everything that the checks of arguments read.

A call skips the checks if an earlier call with the same key was validated. The key consists of
shapes, dtypes and devices. If it lacked something, a bad call could use a good call's signature.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

import fusedops
from fusedops.activations.operator import ACTIVATION
from fusedops.core.calls import call, operators
from fusedops.core.calls.operator import Operator
from fusedops.core.launches import launch
from fusedops.core.spec import BadSample, Spec
from fusedops.generation import operator as generation
from fusedops.norms.operator import NORM
from fusedops.slices.operator import SLICES
from support import EVERY_SPEC, as_tuple, tensors_of

every = pytest.mark.parametrize("spec", EVERY_SPEC, ids=lambda spec: spec.name)
META = torch.device("meta")
OPERATORS: tuple[Operator, ...] = (NORM, ACTIVATION, SLICES)


def _bad_samples() -> list[object]:
    return [
        pytest.param(spec, bad.name, id=f"{spec.name}-{bad.name.replace(' ', '_')}")
        for spec in EVERY_SPEC
        for bad in spec.bad_samples(META)
    ]


@pytest.mark.once
@pytest.mark.parametrize(("spec", "name"), _bad_samples())
def test_bad_call_after_a_good_one_is_refused(spec: Spec, name: str, device: torch.device) -> None:
    """The bad call differs in one property from the good one, which has all tensors."""
    bad: BadSample = next(bad for bad in spec.bad_samples(device) if bad.name == name)
    good = spec.benchmark((4, 8), torch.float32, device)
    spec.call(**good.tensors, **good.options)
    # This call has the bad call's options. If these are valid, the keys differ only by tensors.
    options = {
        name: value for name, value in bad.options.items() if name in ("p", "normalized_shape")
    }
    with contextlib.suppress(TypeError, ValueError):
        spec.call(**good.tensors, **options)
    with pytest.raises(bad.error, match=bad.match):
        spec.call(**bad.tensors, **bad.options)
    (after, *_) = as_tuple(spec.call(**good.tensors, **good.options))
    assert spec.exact or after.isfinite().all()


@every
def test_call_of_meta_tensors_after_real_ones(spec: Spec, device: torch.device) -> None:
    """Tensors on meta have no device index, like those on the CPU, but no kernel may read them."""
    sample = spec.benchmark((4, 8), torch.float32, device)
    expected = as_tuple(spec.call(**sample.tensors, **sample.options))
    tensors = {name: None if t is None else t.to(META) for name, t in sample.tensors.items()}
    with launch.record() as names:
        outputs = as_tuple(spec.call(**tensors, **sample.options))
    assert names == []
    for output, real in zip(outputs, expected, strict=True):
        assert output.is_meta
        assert (output.shape, output.dtype) == (real.shape, real.dtype)


@every
def test_call_of_other_shapes(spec: Spec, device: torch.device) -> None:
    """Successive calls differ in the number of columns or of rows."""
    for rows, cols in ((4, 8), (4, 9), (5, 8), (1, 8), (4, 8)):
        sample = spec.benchmark((rows, cols), torch.float32, device)
        outputs = as_tuple(spec.call(**sample.tensors, **sample.options))
        assert all(output.shape[0] == rows for output in outputs)
        assert sum(output.shape[1] for output in outputs) == cols


@every
def test_each_tensor_in_another_dtype(spec: Spec, device: torch.device) -> None:
    """A call that differs from the one before in the dtype of one tensor has the right outputs.

    They are those of the same call with empty caches.
    """
    sample = spec.benchmark((4, 8), torch.bfloat16, device)
    options = {**sample.options, **({"p": 0.0} if spec.has_dropout else {})}
    for name, t in tensors_of(spec, sample).items():
        tensors = {**sample.tensors, name: t.float()}
        spec.call(**sample.tensors, **options)
        try:
            result = as_tuple(spec.call(**tensors, **options))
        except TypeError:  # the operator does not accept this mixture of dtypes
            continue
        for op in OPERATORS:
            op.sites.clear()
        for output, expected in zip(result, as_tuple(spec.call(**tensors, **options)), strict=True):
            assert output.dtype == expected.dtype, name
            assert torch.equal(output, expected), name


def test_gpu_autocast_after_a_call_outside(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test simulates a GPU: under its autocast, the output of a norm is fp32."""
    monkeypatch.setattr("fusedops.norms.operator._all_on_gpu", lambda tensors: True)
    monkeypatch.setattr(NORM, "sites", {})
    x = torch.randn(4, 8, dtype=torch.bfloat16, device=device)
    before = torch.is_autocast_enabled("cuda")
    try:
        for enabled in (True, False, True, False):
            torch.set_autocast_enabled("cuda", enabled)
            y = fusedops.layer_norm(x, (8,))
            assert y.dtype == (torch.float32 if enabled else torch.bfloat16)
    finally:
        torch.set_autocast_enabled("cuda", before)


def test_keys_do_not_contain_the_probability(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They contain only whether it is zero. A tensor in a key would make each key a new one."""
    monkeypatch.setattr(NORM, "sites", {})
    x = torch.randn(4, 8, device=device)
    for p in (0.25, 0.5, torch.tensor(0.5), torch.tensor(0.75)):
        with contextlib.nullcontext() if type(p) is float else pytest.raises(TypeError):
            fusedops.bias_dropout_add(x, None, x, p=p)
    assert len(NORM.sites) == 1
    # A zero of any type means no dropout.
    without_dropout = fusedops.bias_dropout_add(x, None, x, p=torch.tensor(0.0))
    assert torch.equal(without_dropout, fusedops.bias_dropout_add(x, None, x, p=0.0))
    assert len(NORM.sites) == 2


def _most_cached() -> int:
    """The number of signatures in the fullest of all call caches."""
    caches = [op.sites for op in OPERATORS] + [generation.NO_REPEAT_NGRAM.signatures]
    return max(map(len, caches))


@every
def test_cache_is_bounded(
    spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New shapes replace old signatures; a call whose signature was dropped is checked again."""
    for op in OPERATORS:
        monkeypatch.setattr(op, "sites", {})
    monkeypatch.setattr(generation.NO_REPEAT_NGRAM, "signatures", {})
    for module in (call, generation):
        monkeypatch.setattr(module, "_MOST_CALLS", 3)
    for cols in (*range(8, 15), 8):
        sample = spec.benchmark((4, cols), torch.float32, device)
        outputs = as_tuple(spec.call(**sample.tensors, **sample.options))
        assert sum(output.shape[1] for output in outputs) == cols
        assert 1 <= _most_cached() <= 3


def test_numbers_of_rows_share_a_signature(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NORM, "sites", {})
    for rows in (2, 3, 5):
        fusedops.layer_norm(torch.randn(rows, 8, device=device), (8,))
    assert len(NORM.sites) == 1


def test_forgotten_sizes_after_a_similar_call_are_refused(device: torch.device) -> None:
    weight = torch.randn(8, device=device)
    fusedops.batched_layer_norm_tanh(torch.randn(2, 3, 8, device=device), weight)
    with pytest.raises(ValueError, match="expected sizes with it"):
        fusedops.batched_layer_norm_tanh(torch.randn(3, 8, device=device), weight)


@pytest.mark.kernels
def test_eager_and_registered_calls_share_a_site(device: torch.device) -> None:
    """A site caches the plans of a call, so two sites would compile its kernels twice."""
    NORM.sites.clear()
    fusedops.layer_norm(torch.randn(4, 8, device=device), (8,))
    (site,) = NORM.sites.values()
    numbers = tuple(site.constants.numbers())
    registered = operators.site_from(
        NORM, site.device_index, site.dropout, site.cols, site.call, numbers
    )
    assert registered is site
