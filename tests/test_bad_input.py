"""Every bad sample raises its own exception with its own words, before anything is launched."""

from __future__ import annotations

import pytest
import torch

from fusedops.core import launch
from fusedops.core.spec import BadSample, Spec
from support import DEVICE, EVERY_SPEC

BAD = [(spec, bad) for spec in EVERY_SPEC for bad in spec.bad_samples(DEVICE)]


@pytest.mark.parametrize(("spec", "bad"), BAD, ids=[f"{spec.name}-{bad.name.replace(' ', '_')}" for spec, bad in BAD])
def test_bad_input(spec: Spec, bad: BadSample) -> None:
    for value in bad.tensors.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_()
    state = torch.get_rng_state()
    # Twice: the first refusal must leave nothing behind that lets the second call pass.
    for _ in range(2):
        _refused(spec, bad)
    assert torch.equal(state, torch.get_rng_state()), "a random number was drawn"


def _refused(spec: Spec, bad: BadSample) -> None:
    with launch.record() as launched, pytest.raises(bad.error, match=bad.match) as caught:
        spec.call(**bad.tensors, **bad.options)
    assert type(caught.value) is bad.error
    assert launched == []
    message = str(caught.value)
    assert message.startswith(f"{spec.functional or spec.name}: "), message
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize("spec", EVERY_SPEC, ids=lambda spec: spec.name)
def test_bad_samples_cover_every_kind_of_error(spec: Spec) -> None:
    errors = {bad.error for bad in spec.bad_samples(DEVICE)}
    assert errors >= {ValueError, TypeError}
    assert RuntimeError in errors or len(spec.tensors) == 1  # devices can differ
    touched = {name for bad in spec.bad_samples(DEVICE) for name in spec.tensors if name in bad.match.replace(" ", "_")}
    assert spec.tensors[0] in touched
