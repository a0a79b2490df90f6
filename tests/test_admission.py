"""Checks after a good call: what was admitted once is not admitted in another's place.

Calls whose shapes, dtypes and devices were checked before skip the checks, under a key. A key that is too coarse lets
a bad call, or one for another path, ride on a good one that came before.
"""

from __future__ import annotations

import contextlib
import importlib

import pytest
import torch

import fusedops
from fusedops.core import admission, launch
from fusedops.core.spec import BadSample, Spec
from support import EVERY_SPEC, as_tuple

every = pytest.mark.parametrize("spec", EVERY_SPEC, ids=lambda spec: spec.name)
META = torch.device("meta")


def _bad() -> list[object]:
    return [
        pytest.param(spec, bad.name, id=f"{spec.name}-{bad.name.replace(' ', '_')}")
        for spec in EVERY_SPEC
        for bad in spec.bad_samples(META)
    ]


@pytest.mark.parametrize(("spec", "name"), _bad())
def test_bad_after_good(spec: Spec, name: str, device: torch.device) -> None:
    """The bad samples differ in one thing from a call over ``(4, 8)`` with every tensor present."""
    bad: BadSample = next(bad for bad in spec.bad_samples(device) if bad.name == name)
    good = spec.benchmark((4, 8), torch.float32, device)
    spec.call(**good.tensors, **good.options)
    # And the bad call's own options, where those are not what is wrong: then the keys differ in the tensors alone.
    kept = {name: value for name, value in bad.options.items() if name in ("p", "normalized_shape")}
    with contextlib.suppress(TypeError, ValueError):
        spec.call(**good.tensors, **kept)
    with pytest.raises(bad.error, match=bad.match):
        spec.call(**bad.tensors, **bad.options)
    (after, *_) = as_tuple(spec.call(**good.tensors, **good.options))
    assert spec.exact or after.isfinite().all()


@every
def test_meta_after_real(spec: Spec, device: torch.device) -> None:
    """A tensor without storage has no device index, as a CPU tensor has none: it must not reach a kernel."""
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
def test_shapes_after_other_shapes(spec: Spec, device: torch.device) -> None:
    """Widths, row counts and leading dimensions follow one another in any order."""
    for rows, cols in ((4, 8), (4, 9), (5, 8), (1, 8), (4, 8)):
        sample = spec.benchmark((rows, cols), torch.float32, device)
        outputs = as_tuple(spec.call(**sample.tensors, **sample.options))
        assert all(output.shape[0] == rows for output in outputs)
        assert sum(output.shape[1] for output in outputs) == cols


@every
def test_what_is_remembered_is_bounded(spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ever new shapes fill no memory; and a call after its entry was dropped is checked again, and right."""
    ops = importlib.import_module(spec.samples.__module__.removesuffix("spec") + "ops")
    monkeypatch.setattr(ops, "_admitted", {})
    monkeypatch.setattr(admission, "_MOST", 3)
    for cols in (*range(8, 15), 8):
        sample = spec.benchmark((4, cols), torch.float32, device)
        outputs = as_tuple(spec.call(**sample.tensors, **sample.options))
        assert sum(output.shape[1] for output in outputs) == cols
        assert 1 <= len(ops._admitted) <= 3


def test_forgotten_sizes_are_seen_after_a_call_like_it(device: torch.device) -> None:
    weight = torch.randn(8, device=device)
    fusedops.batched_layer_norm_tanh(torch.randn(2, 3, 8, device=device), weight)
    with pytest.raises(ValueError, match="expected sizes with it"):
        fusedops.batched_layer_norm_tanh(torch.randn(3, 8, device=device), weight)
