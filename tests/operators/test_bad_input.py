"""Every bad sample raises its own exception with its own words, before anything is launched."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops.core.launches import launch
from fusedops.core.spec import BadSample, Spec
from support import DEVICE, EVERY_SPEC

BAD = [(spec, bad) for spec in EVERY_SPEC for bad in spec.bad_samples(DEVICE)]


@pytest.mark.parametrize(
    ("spec", "bad"), BAD, ids=[f"{spec.name}-{bad.name.replace(' ', '_')}" for spec, bad in BAD]
)
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
    touched = {
        name
        for bad in spec.bad_samples(DEVICE)
        for name in spec.tensors
        if name in bad.match.replace(" ", "_")
    }
    assert spec.tensors[0] in touched


# What no kernel reads; the first two have the key of a good call.
KINDS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sparse": (Tensor.to_sparse, "has layout torch.sparse_coo, expected torch.strided"),
    "csr": (Tensor.to_sparse_csr, "has layout torch.sparse_csr, expected torch.strided"),
    "complex": (lambda t: t.to(torch.complex64), "has dtype torch.complex64, expected"),
    "8 bits": (lambda t: t.to(torch.float8_e5m2), "has dtype torch.float8_e5m2, expected"),
    "nested": (
        lambda t: torch.nested.nested_tensor([t[:1], t[1:2]]),
        "is a nested tensor, expected a dense one",
    ),
    "array": (lambda t: t.cpu().numpy(), "must be a torch.Tensor, got ndarray"),
    "string": (lambda t: "x", "must be a torch.Tensor, got str"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", EVERY_SPEC, ids=lambda spec: spec.name)
def test_no_dense_tensor(spec: Spec, kind: str) -> None:
    """In place of any tensor, before and after a good call of the same shapes and dtypes."""
    make, words = KINDS[kind]
    good = spec.benchmark((4, 8), torch.float32, DEVICE)
    for name, value in good.tensors.items():
        if value is None or (kind == "csr" and value.dim() != 2) or _is_taken(spec, name, kind):
            continue
        bad = {**good.tensors, name: make(value)}
        argument = re.escape(name.replace("slice_", "slice "))
        for _ in range(2):
            with pytest.raises(
                TypeError, match=rf"^{spec.functional or spec.name}: {argument} {re.escape(words)}"
            ):
                spec.call(**bad, **good.options)
            spec.call(**good.tensors, **good.options)


def _is_taken(spec: Spec, name: str, kind: str) -> bool:
    """PyTorch's own norms and activation take nested rows.

    Slices may be a sequence, of which errors name a part.
    """
    if name == "slices":
        return kind in ("array", "string")
    return (
        kind == "nested"
        and name == spec.tensors[0]
        and spec.name in ("layer_norm", "rms_norm", "gelu")
    )
