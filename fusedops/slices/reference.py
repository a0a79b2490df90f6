"""The slices family's reference implementation in PyTorch's operators, differentiable to any order.

It runs on devices without kernels, under torch.func transforms and in forward mode. With fp64
tensors it is the tests' oracle. Statistics and accumulation are in fp32 (fp64 for fp64 inputs).
Every function normalises over the last dimension. Parameters broadcast: ``(D,)`` for one slice,
``(K, D)`` for rows ``(*, K, D)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Formula", "accumulator", "composite", "forward"]

Formula = Callable[[Tensor], Tensor]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of statistics and sums for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: Formula,
    out_dtype: torch.dtype | None = None,
    *,
    elementary: bool = False,
) -> Tensor:
    """Returns ``activation(layer_norm(x))``, rounded once, to ``out_dtype`` or x's dtype.

    ``elementary`` excludes `F.layer_norm`, because reverse over forward mode is wrong for it in
    torch 2.13.
    """
    hat = x.to(accumulator(x.dtype))
    if elementary:
        hat = hat - hat.mean(-1, keepdim=True)
        hat = hat * torch.rsqrt(hat.square().mean(-1, keepdim=True) + eps)
    else:
        # The parameters are applied below: `F.layer_norm` does not broadcast them.
        hat = F.layer_norm(hat, hat.shape[-1:], None, None, eps)
    if weight is not None:
        hat = hat * weight.to(hat.dtype)
    if bias is not None:
        hat = hat + bias.to(hat.dtype)
    return activation(hat).to(out_dtype or x.dtype)


def composite(
    slices: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    sizes: tuple[int, ...],
    dims: int,
    rule: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
    *,
    shared: bool,
    concat: bool,
) -> tuple[Tensor, ...]:
    """Returns the outputs of ``rule`` for slices in any form, with their weights and biases.

    Args:
        slices: one tensor, or a tensor for each slice.
        weight: the weight of all slices, or None.
        bias: the bias of all slices, or None.
        sizes: the slices' widths.
        dims: the form of the slices, as in `SliceConstants`.
        rule: the operator on one slice, or on rows ``(*, K, D)`` of slices of one width.
        shared: whether all slices have the same parameters.
        concat: whether the output is one tensor with the slices side by side.
    """
    # Slices of one width in one tensor take a single call of the rule, with rows ``(*, K, D)``.
    together = dims > 0 and len(set(sizes)) == 1
    weights = _parts(weight, sizes, together=together, shared=shared)
    biases = _parts(bias, sizes, together=together, shared=shared)
    if together:
        rows = slices[0]
        if dims == 1:
            rows = rearrange(rows, "... (k d) -> ... k d", k=len(sizes))
        output = rule(rows, weights[0], biases[0])
        if concat or dims == 1:
            output = rearrange(output, "... k d -> ... (k d)")
        return (output,)
    parts = slices[0].split(sizes, -1) if dims else slices
    arguments = zip(parts, weights, biases, strict=True)
    outputs = tuple([rule(part, weight, bias) for part, weight, bias in arguments])
    if dims or concat:
        return (torch.cat(outputs, -1),)
    return outputs


def _parts(
    parameter: Tensor | None, sizes: tuple[int, ...], *, together: bool, shared: bool
) -> Sequence[Tensor | None]:
    """Returns the parameter for each call of the rule: one if ``together``, else one per slice."""
    if parameter is None or shared:
        return [parameter] * (1 if together else len(sizes))
    if together:
        return [parameter.reshape(len(sizes), sizes[0])]
    return list(parameter.reshape(-1).split(sizes))
