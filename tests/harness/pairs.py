"""Pairs of an operator and the same formula in elementary operators, as functions of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedops.core.spec import Sample, Spec
from support import call, eager, random_like, tensors_of

__all__ = ["Pair", "close", "filled", "loss", "pair", "second_order", "small_sample"]

Function = Callable[..., Any]

ROWS, COLS = 4, 8


class Pair:
    """An operator and its formula as functions of the sample's tensors, in the order of the call.

    Attributes:
        ours: the operator.
        theirs: the formula in elementary operators of PyTorch.
        names: the names of the tensors.
        tensors: the tensors.
    """

    def __init__(self, spec: Spec, sample: Sample) -> None:
        self.spec, self.sample = spec, sample
        present = tensors_of(spec, sample)
        self.names, self.tensors = tuple(present), tuple(present.values())
        self.ours = self._positional(call(spec, sample))
        self.theirs = self._positional(elementary(spec, sample))

    def _positional(self, function: Function) -> Function:
        return lambda *values: function(dict(zip(self.names, values, strict=True)))

    def leaves(self) -> tuple[Tensor, ...]:
        """Copies of the tensors that require a gradient."""
        return tuple(t.clone().requires_grad_() for t in self.tensors)

    def cotangents(self) -> list[Tensor]:
        """A random cotangent for each output."""
        return random_like(self.theirs(*self.tensors))


def small_sample(
    spec: Spec,
    p: float = 0.25,
    shape: tuple[int, int] = (ROWS, COLS),
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Sample:
    """A sample with all tensors, random; the operator returns the sum if it has that option."""
    sample = spec.benchmark(shape, dtype, torch.device(device))
    options = {**sample.options, **({"p": p} if spec.has_dropout else {})}
    if "return_sum" in inspect.signature(spec.call).parameters:
        options["return_sum"] = True
    return Sample(sample.name, sample.tensors, options)


def pair(
    spec: Spec, device: torch.device, p: float = 0.25, shape: tuple[int, int] = (ROWS, COLS)
) -> Pair:
    """The pair of a small sample."""
    return Pair(spec, small_sample(spec, p, shape, device=device))


def layer_norm(
    input: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`F.layer_norm` in elementary operators, since the derivative of PyTorch's jvp is wrong."""
    dims = tuple(range(-len(shape), 0))
    centred = input - input.mean(dims, keepdim=True)
    hat = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    hat = hat if weight is None else hat * weight
    return hat if bias is None else hat + bias


def rms_norm(
    input: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """`F.rms_norm` in elementary operators."""
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    hat = input * torch.rsqrt(input.square().mean(tuple(range(-len(shape), 0)), keepdim=True) + eps)
    return hat if weight is None else hat * weight


def silu(input: Tensor) -> Tensor:
    """`F.silu` in elementary operators, since PyTorch's backward has no forward-mode derivative."""
    return input * torch.sigmoid(input)


def elementary(
    spec: Spec, sample: Sample
) -> Callable[[dict[str, Tensor | None]], tuple[Tensor, ...]]:
    """The eager formula with norms and SiLU in elementary operators, and the same dropout mask."""
    formula = eager(spec, sample)

    def function(tensors: dict[str, Tensor | None]) -> tuple[Tensor, ...]:
        with mock.patch.multiple(F, layer_norm=layer_norm, rms_norm=rms_norm, silu=silu):
            return formula(tensors)

    return function


def loss(function: Function, weights: Sequence[Tensor]) -> Function:
    """A scalar function of the outputs, of degree two, with random weights.

    The gradient of a plain sum would be zero through a LayerNorm.
    """
    return lambda *values: sum(
        (o * o * w + o).sum() for o, w in zip(function(*values), weights, strict=True)
    )


def filled(gradients: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients with zeros instead of None, for tensors on which the result does not depend."""
    return tuple(
        torch.zeros_like(t) if g is None else g for g, t in zip(gradients, tensors, strict=True)
    )


def second_order(
    function: Function, tensors: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Returns the gradients, and the gradients of their squared norm by inputs and cotangents."""
    leaves = tuple(t.detach().requires_grad_() for t in tensors)
    outputs = function(*leaves)
    cotangents = tuple(
        (w + 0.5 * o.detach()).requires_grad_() for w, o in zip(weights, outputs, strict=True)
    )
    grads = torch.autograd.grad(outputs, leaves, cotangents, create_graph=True)
    inputs = (*leaves, *cotangents)
    total = sum((g * g).sum() for g in grads)
    return (*grads, *filled(torch.autograd.grad(total, inputs, allow_unused=True), inputs))


def close(actual: Any, expected: Any) -> None:
    """Asserts that fp64 tensors are equal up to rounding.

    Values are between one and a hundred. A mistake in a formula changes them by far more than 1e-9.
    """
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
