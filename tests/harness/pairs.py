"""An operator beside the same formula in elementary operators, as functions of their tensors, in fp64."""

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
    """``ours`` is the operator, ``theirs`` the formula.

    Both take the tensors that the sample has, in call order.
    """

    def __init__(self, spec: Spec, sample: Sample) -> None:
        self.spec, self.sample = spec, sample
        present = tensors_of(spec, sample)
        self.names, self.tensors = tuple(present), tuple(present.values())
        self.ours, self.theirs = (
            self._positional(call(spec, sample)),
            self._positional(elementary(spec, sample)),
        )

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
    """Every tensor present and random; the sum is returned where that can be asked."""
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
    """`F.layer_norm` in elementary operators: PyTorch's own has a jvp whose derivative is wrong."""
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
    """`F.silu` in elementary operators: PyTorch's own has no tangent of its backward."""
    return input * torch.sigmoid(input)


def elementary(
    spec: Spec, sample: Sample
) -> Callable[[dict[str, Tensor | None]], tuple[Tensor, ...]]:
    """The formula in elementary operators, with the same dropout mask."""
    written = eager(spec, sample)

    def function(tensors: dict[str, Tensor | None]) -> tuple[Tensor, ...]:
        with mock.patch.multiple(F, layer_norm=layer_norm, rms_norm=rms_norm, silu=silu):
            return written(tensors)

    return function


def loss(function: Function, weights: Sequence[Tensor]) -> Function:
    """A scalar function with a random gradient (a plain sum's is zero through a LayerNorm), of degree two."""
    return lambda *values: sum(
        (o * o * w + o).sum() for o, w in zip(function(*values), weights, strict=True)
    )


def filled(gradients: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """None, which autograd gives for what a result hangs on in no way, as zeros."""
    return tuple(
        torch.zeros_like(t) if g is None else g for g, t in zip(gradients, tensors, strict=True)
    )


def second_order(
    function: Function, tensors: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Gradients, and the gradients of their squares for inputs and cotangents."""
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
    """Equal in fp64 but for rounding.

    Values of order one to a hundred, with 1e-9 far below any mistake.
    """
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
