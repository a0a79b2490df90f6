"""Tensors on a GPU that is not the current device: right results, and no change of that device."""

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
@pytest.mark.parametrize("first", [True, False], ids=["first call", "second call"])
def test_results_equal_those_on_the_current_device(
    spec: Spec, current: int, other: int, cols: int, first: bool
) -> None:
    """The call is compared bit for bit with one for which the tensors' device is the current one.

    The kernel is compiled by whichever of the two calls comes first.
    """
    sample = spec.benchmark((40, cols + (0 if first else 8)), torch.float32, torch.device("cpu"))
    expected: list[Tensor] = []
    if not first:
        with torch.cuda.device(other):
            expected = _step(spec, _to(sample, other))
    with torch.cuda.device(current):
        actual = _step(spec, _to(sample, other))
        assert torch.cuda.current_device() == current
    if first:
        with torch.cuda.device(other):
            expected = _step(spec, _to(sample, other))
    torch.cuda.synchronize(other)
    for result, value in zip(actual, expected, strict=True):
        assert result.device.index == other
        assert torch.equal(result, value)


@every
@sides
def test_backward_while_another_device_is_current(spec: Spec, current: int, other: int) -> None:
    """In the forward, the tensors' device is the current one.

    Autograd sets the device in its own threads only.
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
    assert all(map(torch.equal, actual, expected))


@every
@sides
def test_dropout_draws_from_the_generator_of_the_tensors_device(
    spec: Spec, current: int, other: int
) -> None:
    """The state of this generator advances, and that of the current device's does not."""
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
    """Kernels run on the current stream of the tensors' device."""
    sample = _to(spec.benchmark((4096, 1024), torch.float32, torch.device("cpu")), other)
    stream = torch.cuda.Stream(other)
    expected = _step(spec, sample)
    torch.cuda.synchronize(other)
    with torch.cuda.device(current), torch.cuda.stream(stream):
        torch.cuda.set_device(current)
        actual = _step(spec, sample)
    stream.synchronize()
    assert all(map(torch.equal, actual, expected))
