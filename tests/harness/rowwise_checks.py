"""What tests of `fusedops.rowwise` share.

The oracle, which is the function in fp64 with the masks of the kernels.
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
    """Parametrises over the functions, which the tests of a file share in the short suite."""
    parametrize = pytest.mark.parametrize("sample", FUNCTIONS, ids=lambda sample: sample.name)
    shared: T = pytest.mark.shared("sample", most=6)(parametrize(test))
    return shared


def of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("sample", named(*names), ids=lambda sample: sample.name)


@contextmanager
def masks(sample: RowwiseFunction) -> Iterator[None]:
    """Within it `F.dropout` has the masks that the kernels draw.

    A part of a row is a row to them.
    """
    count, parts = 0, sample.parts

    def dropout(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        nonlocal count
        rows, cols = (
            input.numel() // input.shape[-1],
            input.shape[-1] // (parts if sample.drops_whole else 1),
        )
        keep = keep_mask(SEED, OFFSET + (count << 48), rows * parts, cols, p, device=input.device)
        count += 1
        scale = 1.0 / (1.0 - drop_threshold(p) / 65536)
        keep = rearrange(keep, "(rows parts) cols -> rows parts cols", parts=parts)
        keep = keep if sample.drops_whole else keep[:, 0]
        return input * (keep.reshape(input.shape) * scale).to(input.dtype)

    with mock.patch.object(F, "dropout", dropout):
        yield


def cotangents_of(outputs: Sequence[Tensor]) -> list[Tensor]:
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
    """The outputs, and the gradients for some of the tensors, by default all that may have one."""
    names = (
        [name for name, t in tensors.items() if t.is_floating_point()] if names is None else names
    )
    leaves = {name: t.detach().requires_grad_(name in names) for name, t in tensors.items()}
    outputs = list(as_tuple(function(*leaves.values())))
    cotangents = (
        cotangents_of(outputs)
        if cotangents is None
        else [c.to(o.dtype) for c, o in zip(cotangents, outputs)]  # noqa: B905
    )
    grads = torch.autograd.grad(
        outputs[: len(cotangents)], [leaves[name] for name in names], cotangents
    )
    return [out.detach() for out in outputs], dict(zip(names, grads, strict=True))


def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}


def assert_as_good(
    got: Tensor, exact: Tensor, eager: Sequence[Tensor], what: str, units: float = 8.0
) -> None:
    """The error is at most twice eager PyTorch's, its largest of a few, or some units of roundoff of the largest value.

    A unit for each of the few operators on a value's way from the inputs; those of a sum of n terms
    are a tree's, of depth log2 n. The interpreter rounds fp32 to bf16 towards zero: an error of two
    units where there is one.
    """
    assert got.shape == exact.shape, (
        f"{what}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    )
    assert got.dtype == eager[0].dtype, f"{what}: {got.dtype}, expected {eager[0].dtype}"
    assert torch.equal(got.isfinite(), exact.isfinite()), f"{what}: not finite"
    if got.dtype in (torch.bfloat16, torch.float16) and INTERPRETED:
        units *= 2
    error, *natives = ((t.double() - exact).nan_to_num().abs().max().item() for t in (got, *eager))
    native, finite = max(natives), exact[exact.isfinite()]
    floor = (
        units * unit_roundoff(got.dtype) * (finite.abs().max().item() if finite.numel() else 0.0)
    )
    assert error <= 2 * native + floor, (
        f"{what}: error {error:.3g}, eager's {native:.3g}, floor {floor:.3g}"
    )


def check(
    sample: RowwiseFunction,
    function: Callable[..., Any],
    tensors: dict[str, Tensor],
    names: Sequence[str] | None = None,
) -> None:
    """Values and gradients of a function made of the sample's, held to the sample's own in fp64."""
    with fixed_draw():
        outputs, grads = results(function, tensors, names=names)
    cotangents = cotangents_of(outputs)
    with masks(sample):
        exact, exact_grads = results(sample.function, wide(tensors), cotangents, names)
    near = [{name: a_rounding_away(t, draw) for name, t in tensors.items()} for draw in range(3)]
    eager = []
    for inputs in (tensors, *near):
        # Each call draws the masks of its dropouts anew: those of one context differ.
        with masks(sample), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            eager.append(results(sample.function, inputs, cotangents, names))
    for number, (got, want) in enumerate(zip(outputs, exact, strict=True)):
        assert_as_good(
            got, want, [natives[number] for natives, _ in eager], f"{sample.name}: output {number}"
        )
    for name, got in grads.items():
        # The largest gradient of a vector is the sum of many.
        assert_as_good(
            got,
            exact_grads[name],
            [natives[name] for _, natives in eager],
            f"{sample.name}: gradient of {name}",
            16.0,
        )


def rowwise(sample: RowwiseFunction) -> Any:
    return fusedops.rowwise(sample.function, strict=True)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device=DEVICE)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)
