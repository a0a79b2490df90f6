"""Checks that tests of `fusedops.rowwise` share.

The oracle is the plain function in fp64, with the dropout masks that the kernels draw.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

import fusedops
from rowwise_functions import FUNCTIONS, RowwiseFunction, named
from support import (
    DEVICE,
    INTERPRETED,
    OFFSET,
    SEED,
    as_tuple,
    drop_threshold,
    fixed_draw,
    keep_mask,
)
from tolerances import a_rounding_away, unit_roundoff

__all__ = [
    "assert_as_good",
    "assert_matches_eager",
    "check",
    "cotangents_of",
    "every",
    "kernels",
    "masks",
    "of",
    "ones",
    "randn",
    "results",
    "rowwise",
    "wide",
]

T = TypeVar("T", bound=Callable[..., Any])

kernels = pytest.mark.kernels


def every(test: T) -> T:
    """Parametrises a test over all sample functions; in the short suite each test has six."""
    parametrize = pytest.mark.parametrize("sample", FUNCTIONS, ids=lambda sample: sample.name)
    shared: T = pytest.mark.shared("sample", most=6)(parametrize(test))
    return shared


def of(*names: str) -> pytest.MarkDecorator:
    """Parametrises a test over the sample functions of these names."""
    return pytest.mark.parametrize("sample", named(*names), ids=lambda sample: sample.name)


@contextmanager
def masks(sample: RowwiseFunction) -> Iterator[None]:
    """Within this context `F.dropout` uses the masks that the kernels draw.

    The kernels draw a mask for each part of a row, as if the part were a row.
    """
    count, parts = 0, sample.parts

    def dropout(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        nonlocal count
        rows = input.numel() // input.shape[-1]
        cols = input.shape[-1] // (parts if sample.drops_whole else 1)
        keep = keep_mask(SEED, OFFSET + (count << 48), rows * parts, cols, p, device=input.device)
        count += 1
        scale = 1.0 / (1.0 - drop_threshold(p) / 65536)
        keep = rearrange(keep, "(rows parts) cols -> rows parts cols", parts=parts)
        keep = keep if sample.drops_whole else keep[:, 0]
        return input * (keep.reshape(input.shape) * scale).to(input.dtype)

    with mock.patch.object(F, "dropout", dropout):
        yield


def cotangents_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Random cotangents for ``outputs``, the same in each call and on each device."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device, out.dtype)
        for out in outputs
    ]


def results(
    function: Callable[..., Any],
    tensors: dict[str, Tensor],
    cotangents: Sequence[Tensor] | None = None,
    names: Sequence[str] | None = None,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the outputs, and the gradients for ``names``, by default all floating tensors."""
    if names is None:
        names = [name for name, t in tensors.items() if t.is_floating_point()]
    leaves = {name: t.detach().requires_grad_(name in names) for name, t in tensors.items()}
    outputs = list(as_tuple(function(*leaves.values())))
    if cotangents is None:
        cotangents = cotangents_of(outputs)
    else:  # there may be fewer cotangents than outputs
        cotangents = [c.to(o.dtype) for c, o in zip(cotangents, outputs)]  # noqa: B905
    grads = torch.autograd.grad(
        outputs[: len(cotangents)], [leaves[name] for name in names], cotangents
    )
    return [out.detach() for out in outputs], dict(zip(names, grads, strict=True))


def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with floating-point ones in fp64."""
    return {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}


def assert_as_good(
    got: Tensor, exact: Tensor, eager: Sequence[Tensor], what: str, units: float = 8.0
) -> None:
    """Asserts that the largest error of ``got`` is at most twice eager PyTorch's, plus a floor.

    Eager's error is the largest of the results in ``eager``. The floor is ``units`` units of
    roundoff of the largest value: one for each of the few operators between the inputs and a value.
    A sum of n terms is a tree of depth log2 n. The interpreter rounds fp32 to bf16 towards zero,
    which doubles the error of a rounding.
    """
    assert got.shape == exact.shape, (
        f"{what}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    )
    assert got.dtype == eager[0].dtype, f"{what}: {got.dtype}, expected {eager[0].dtype}"
    assert torch.equal(got.isfinite(), exact.isfinite()), f"{what}: not finite"
    if got.dtype in (torch.bfloat16, torch.float16) and INTERPRETED:
        units *= 2
    error, *eager_errors = (
        (t.double() - exact).nan_to_num().abs().max().item() for t in (got, *eager)
    )
    eager_error, finite = max(eager_errors), exact[exact.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    floor = units * unit_roundoff(got.dtype) * largest
    assert error <= 2 * eager_error + floor, (
        f"{what}: error {error:.3g}, eager's {eager_error:.3g}, floor {floor:.3g}"
    )


def assert_matches_eager(
    function: Callable[..., Any],
    tensors: dict[str, Tensor],
    *,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """Asserts that the fused function has the values and gradients of the function itself."""
    outputs, grads = results(fusedops.rowwise(function, strict=True), tensors)
    expected_outputs, expected_grads = results(function, tensors)
    actual = (*outputs, *grads.values())
    expected = (*expected_outputs, *expected_grads.values())
    for result, value in zip(actual, expected, strict=True):
        torch.testing.assert_close(result, value, rtol=rtol, atol=atol)


def check(
    sample: RowwiseFunction,
    function: Callable[..., Any],
    tensors: dict[str, Tensor],
    names: Sequence[str] | None = None,
) -> None:
    """Checks values and gradients of ``function`` against the sample's function in fp64."""
    with fixed_draw():
        outputs, grads = results(function, tensors, names=names)
    cotangents = cotangents_of(outputs)
    with masks(sample):
        exact, exact_grads = results(sample.function, wide(tensors), cotangents, names)
    perturbed = [
        {name: a_rounding_away(t, draw) for name, t in tensors.items()} for draw in range(3)
    ]
    eager = []
    for inputs in (tensors, *perturbed):
        # A context for each call, since a second call in one context would get other masks.
        with masks(sample), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            eager.append(results(sample.function, inputs, cotangents, names))
    for number, (got, want) in enumerate(zip(outputs, exact, strict=True)):
        eager_outputs = [values[number] for values, _ in eager]
        assert_as_good(got, want, eager_outputs, f"{sample.name}: output {number}")
    for name, got in grads.items():
        # A vector's gradient is a sum over the rows: more roundings than an output has.
        eager_grads = [gradients[name] for _, gradients in eager]
        assert_as_good(
            got, exact_grads[name], eager_grads, f"{sample.name}: gradient of {name}", units=16.0
        )


def rowwise(sample: RowwiseFunction) -> Any:
    """The sample's function, fused; refusals are errors."""
    return fusedops.rowwise(sample.function, strict=True)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device=DEVICE)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)
