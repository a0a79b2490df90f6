"""The same call gives the same bits, whatever ran in between.

No atomics, no race, no leftover state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.core.spec import Sample, Spec
from support import ALL_SPECS, DEVICE, Case, call, cases, random_like, tensors_of

_PICKED = (
    "shape 129x40",
    "shape 3x1000",
    "shape 2x20000",
    "wide, without residual",
    "sum returned",
    "save=output",
    "save=inputs",
)


def _picked(spec: Spec, sample: Sample) -> bool:
    return sample.name in _PICKED


def _run(spec: Spec, sample: Sample) -> list[Tensor]:
    leaves = {
        name: t.detach().clone().requires_grad_() for name, t in tensors_of(spec, sample).items()
    }
    outputs = call(spec, sample)(leaves)
    return [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), random_like(outputs))]


def _other_work(like: Tensor) -> None:
    """Other shapes through every family, and memory taken and given back, so that addresses and caches move."""
    held = [torch.randn(count, device=DEVICE) for count in (3, 1000, 77)]
    for spec in {spec.samples.__module__: spec for spec in ALL_SPECS}.values():
        sample = next(
            sample for sample in spec.samples(DEVICE, like.dtype) if sample.name == "shape 5x1"
        )
        _run(spec, sample)
    del held


@cases((torch.float32, torch.bfloat16), _picked)
def test_same_bits_again(case: Case) -> None:
    spec, sample = case.spec, case.sample()
    first = _run(spec, sample)
    immediately = _run(spec, sample)
    _other_work(first[0])
    later = _run(spec, case.sample())
    for index, (a, b, c) in enumerate(zip(first, immediately, later, strict=True)):
        assert torch.isfinite(a).all()
        assert torch.equal(a, b), f"result {index} at once"
        assert torch.equal(a, c), f"result {index} after other work"


@cases((torch.float32, torch.bfloat16), _picked)
def test_grad_mode_changes_no_output(case: Case) -> None:
    """Training and inference differ in what is kept, not in what is computed."""
    spec, sample = case.spec, case.sample()
    with torch.no_grad():
        without = call(spec, sample)(tensors_of(spec, sample))
    for a, b in zip(without, _run(spec, sample), strict=False):
        assert torch.equal(a, b)
