"""Helpers of the tests of exact operators, whose results are compared bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedops.core.spec import Sample, Spec
from support import DEVICE, EXACT_SPECS, as_tuple, tensors_of

__all__ = ["bits", "check", "copies", "every", "expected", "inplace", "same", "sized"]

every = pytest.mark.parametrize("spec", EXACT_SPECS, ids=lambda spec: spec.name)

Tensors = dict[str, Tensor | None]


def bits(t: Tensor) -> Tensor:
    """The bits as integers, so that NaN equals itself and zero does not equal minus zero."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(integers[t.itemsize]) if t.is_floating_point() else t


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def copies(tensors: Tensors) -> Tensors:
    return {name: None if t is None else t.clone() for name, t in tensors.items()}


def expected(spec: Spec, sample: Sample) -> tuple[Tensor, ...]:
    return spec.eager(**copies(sample.tensors), **sample.options)


def inplace(spec: Spec) -> bool:
    return spec.name.endswith(("_inplace", "_inplace_32k"))


def check(spec: Spec, sample: Sample) -> None:
    """Asserts that the outputs are those of the definition, and that no input changed.

    An operator in place changes and returns its first input.
    """
    definition, before = expected(spec, sample), copies(sample.tensors)
    outputs = as_tuple(spec.call(**sample.tensors, **sample.options))
    for i, (output, want) in enumerate(zip(outputs, definition, strict=True)):
        assert output.device == want.device
        assert same(output, want), (
            f"output {i}: {int((bits(output) != bits(want)).sum())} elements differ"
        )
    for name, tensor in tensors_of(spec, sample).items():
        if inplace(spec) and name == spec.tensors[0]:
            assert outputs[0] is tensor
            continue
        for output in outputs:
            assert output.data_ptr() != tensor.data_ptr() or not output.numel()
        assert same(tensor, before[name]), f"{name} was changed"


def sized(spec: Spec, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Sample:
    """The benchmark's sample with these numbers of rows and columns."""
    return spec.benchmark(shape, dtype, DEVICE)
