"""Every bad sample raises its own exception and message, before any launch or random number."""

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
def test_bad_input_is_refused_twice(spec: Spec, bad: BadSample) -> None:
    """The first refusal must not change any state such that the second call passes."""
    for value in bad.tensors.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_()
    state = torch.get_rng_state()
    for _ in range(2):
        _assert_refused(spec, bad)
    assert torch.equal(state, torch.get_rng_state()), "a random number was drawn"


def _assert_refused(spec: Spec, bad: BadSample) -> None:
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
    named = {
        name
        for bad in spec.bad_samples(DEVICE)
        for name in spec.tensors
        if name in bad.match.replace(" ", "_")
    }
    assert spec.tensors[0] in named


# Values that no kernel accepts, and the message. For the first two, the call cache's key equals the
# key of a dense tensor.
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
def test_argument_that_is_no_dense_tensor_is_refused(spec: Spec, kind: str) -> None:
    """A bad value replaces each argument in turn, before and after a good call."""
    make, message = KINDS[kind]
    good = spec.benchmark((4, 8), torch.float32, DEVICE)
    for name, value in good.tensors.items():
        if value is None or _is_accepted(spec, name, kind):
            continue
        if kind == "csr" and value.dim() != 2:
            continue
        bad = {**good.tensors, name: make(value)}
        argument = re.escape(name.replace("slice_", "slice "))
        for _ in range(2):
            with pytest.raises(
                TypeError,
                match=rf"^{spec.functional or spec.name}: {argument} {re.escape(message)}",
            ):
                spec.call(**bad, **good.options)
            spec.call(**good.tensors, **good.options)


def _is_accepted(spec: Spec, name: str, kind: str) -> bool:
    """Whether the operator accepts the value, or its error names another argument.

    Drop-in operators accept nested rows as PyTorch's do. An array or string as ``slices`` is taken
    for a sequence, so the error names an element.
    """
    if name == "slices":
        return kind in ("array", "string")
    is_drop_in = spec.name in ("layer_norm", "rms_norm", "gelu")
    return kind == "nested" and is_drop_in and name == spec.tensors[0]
