"""The same call gives the same bits, whatever ran in between.

Operators have no atomic additions, races, or state from earlier calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.core.spec import Sample, Spec
from support import ALL_SPECS, DEVICE, Case, call, cases, random_like, tensors_of

_SELECTED = (
    "shape 129x40",
    "shape 3x1000",
    "shape 2x20000",
    "wide, without residual",
    "sum returned",
    "save=output",
    "save=inputs",
)


def _is_selected(spec: Spec, sample: Sample) -> bool:
    return sample.name in _SELECTED


def _run(spec: Spec, sample: Sample) -> list[Tensor]:
    leaves = {
        name: t.detach().clone().requires_grad_() for name, t in tensors_of(spec, sample).items()
    }
    outputs = call(spec, sample)(leaves)
    return [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), random_like(outputs))]


def _other_work(like: Tensor) -> None:
    """Calls every family with other shapes and allocates memory, to change addresses and caches."""
    allocated = [torch.randn(count, device=DEVICE) for count in (3, 1000, 77)]
    for spec in {spec.samples.__module__: spec for spec in ALL_SPECS}.values():
        sample = next(
            sample for sample in spec.samples(DEVICE, like.dtype) if sample.name == "shape 5x1"
        )
        _run(spec, sample)
    del allocated


@cases((torch.float32, torch.bfloat16), _is_selected)
def test_repeated_calls_have_the_same_bits(case: Case) -> None:
    spec, sample = case.spec, case.sample()
    first = _run(spec, sample)
    second = _run(spec, sample)
    _other_work(first[0])
    third = _run(spec, case.sample())
    for index, result in enumerate(first):
        assert torch.isfinite(result).all()
        assert torch.equal(result, second[index]), f"result {index}, repeated at once"
        assert torch.equal(result, third[index]), f"result {index}, repeated after other work"


@cases((torch.float32, torch.bfloat16), _is_selected)
def test_outputs_under_no_grad_have_the_same_bits(case: Case) -> None:
    spec, sample = case.spec, case.sample()
    with torch.no_grad():
        under_no_grad = call(spec, sample)(tensors_of(spec, sample))
    outputs_and_gradients = _run(spec, sample)
    for result, expected in zip(under_no_grad, outputs_and_gradients, strict=False):
        assert torch.equal(result, expected)
