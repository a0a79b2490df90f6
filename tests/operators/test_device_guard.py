"""Tensors on a GPU that is not the current one.

Right answers, and the current device stays what it was.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedops.core.spec import Sample, Spec
from support import ALL_SPECS, as_tuple, call, random_like, tensors_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

every = pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)
sides = pytest.mark.parametrize("current,other", [(0, 1), (1, 0)])


def _to(sample: Sample, index: int) -> Sample:
    device = torch.device("cuda", index)
    return Sample(
        sample.name,
        {n: None if t is None else t.to(device) for n, t in sample.tensors.items()},
        sample.options,
    )


def _step(spec: Spec, sample: Sample) -> list[Tensor]:
    tensors = {name: t.detach().requires_grad_() for name, t in tensors_of(spec, sample).items()}
    outputs = as_tuple(call(spec, sample)(dict(tensors)))
    return [*outputs, *torch.autograd.grad(outputs, list(tensors.values()), random_like(outputs))]


@every
@sides
@pytest.mark.parametrize("cols", [64, 20000])
@pytest.mark.parametrize("fresh", [True, False], ids=["built here", "built elsewhere"])
def test_right_answers(spec: Spec, current: int, other: int, cols: int, fresh: bool) -> None:
    """Bit for bit what the GPU gives where it is current.

    A variant belongs to the device it was built for.
    """
    sample = spec.benchmark((40, cols + (0 if fresh else 8)), torch.float32, torch.device("cpu"))
    with torch.cuda.device(other):
        expected = [] if fresh else _step(spec, _to(sample, other))
    with torch.cuda.device(current):
        actual = _step(spec, _to(sample, other))
        assert torch.cuda.current_device() == current
    if fresh:
        with torch.cuda.device(other):
            expected = _step(spec, _to(sample, other))
    torch.cuda.synchronize(other)
    for a, b in zip(actual, expected, strict=True):
        assert a.device.index == other
        assert torch.equal(a, b)


@every
@sides
def test_backward_from_another_device(spec: Spec, current: int, other: int) -> None:
    """Forward where the GPU is current, backward where it is not.

    Autograd's own thread sets its device, ours must.
    """
    sample = _to(spec.benchmark((40, 64), torch.float32, torch.device("cpu")), other)
    leaves = [t.requires_grad_() for t in tensors_of(spec, sample).values()]
    with torch.cuda.device(other):
        outputs = as_tuple(
            call(spec, sample)(dict(zip(tensors_of(spec, sample), leaves, strict=True)))
        )
        expected = torch.autograd.grad(outputs, leaves, random_like(outputs), retain_graph=True)
    with torch.cuda.device(current):
        actual = torch.autograd.grad(outputs, leaves, random_like(outputs))
        assert torch.cuda.current_device() == current
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@every
@sides
def test_dropout_draws_from_the_tensors_generator(spec: Spec, current: int, other: int) -> None:
    """The generator of the device that holds the tensors moves on, the current device's does not."""
    if not spec.has_dropout:
        return
    sample = _to(spec.benchmark((8, 64), torch.float32, torch.device("cpu")), other)
    with torch.cuda.device(current):
        before = [torch.cuda.get_rng_state(i) for i in (current, other)]
        spec.call(**sample.tensors, **sample.options)
        after = [torch.cuda.get_rng_state(i) for i in (current, other)]
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


@every
@sides
def test_launches_use_the_stream_of_the_tensors_device(
    spec: Spec, current: int, other: int
) -> None:
    """The launch goes to the current stream of the tensors' device, not of the current device."""
    sample = _to(spec.benchmark((4096, 1024), torch.float32, torch.device("cpu")), other)
    stream = torch.cuda.Stream(other)
    expected = _step(spec, sample)
    torch.cuda.synchronize(other)
    with torch.cuda.device(current), torch.cuda.stream(stream):
        torch.cuda.set_device(current)
        actual = _step(spec, sample)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
