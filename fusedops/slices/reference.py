"""The slices family in plain torch: the formula and its backward, for one slice or for many of one width.

Runs on any device, and takes parts in differentiable operators, so that every order of derivative and every transform
works. Statistics and accumulation are in fp32, in fp64 for fp64 inputs. Every function works over the last dimension;
parameters broadcast: ``(D,)`` for one slice, ``(K, D)`` for rows ``(*, K, D)``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Formula", "accumulator", "backward", "composite", "composite_backward", "forward"]

Formula = Callable[[Tensor], Tensor]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics and sums are held for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: Formula,
            out_dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    """``activation(layer_norm(x))``, rounded once, to x's dtype if no other is named."""
    # The parameters outside F.layer_norm: there they could not broadcast, and a bias without a weight has a wrong
    # second derivative (torch 2.13).
    hat = F.layer_norm(x.to(accumulator(x.dtype)), x.shape[-1:], None, None, eps)
    return activation(_affine(hat, weight, bias)).to(out_dtype or x.dtype)


def backward(dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
             derivative: Formula) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``(dx, dweight, dbias)`` in the accumulator's dtype; the parameters' not yet summed over rows."""
    acc = accumulator(x.dtype)
    centred = x.to(acc) - x.to(acc).mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    hat = centred * rstd
    dbias = dy.to(acc) * derivative(_affine(hat, weight, bias))
    dhat = dbias if weight is None else dbias * weight.to(acc)
    along = (dhat * hat).mean(-1, keepdim=True)
    return (dhat - dhat.mean(-1, keepdim=True) - hat * along) * rstd, dbias * hat, dbias


def _affine(hat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        hat = hat * weight.to(hat.dtype)
    return hat if bias is None else hat + bias.to(hat.dtype)


# --- many slices, in any of their forms ---------------------------------------------------------------------------


def blocks(slices: tuple[Tensor, ...], sizes: tuple[int, ...], uniform: int, dims: int) -> list[Tensor]:
    """What the formula runs over: one tensor ``(*, K, D)`` where widths are equal, else a tensor for each slice.

    ``uniform`` is the width that all slices have, or 0; ``dims`` how many trailing dimensions of the one tensor hold
    the slices, 0 for a sequence.
    """
    if dims == 0:
        return list(slices)
    if uniform:
        return [slices[0] if dims == 2 else slices[0].unflatten(-1, (len(sizes), uniform))]
    return list(slices[0].split(sizes, -1))


def parameters(vector: Tensor | None, count: int, sizes: tuple[int, ...], uniform: int,
               shared: bool) -> list[Tensor | None]:  # fmt: skip
    """A parameter for each of the ``count`` blocks."""
    if vector is None or shared:
        return [vector] * count
    if count == 1:
        return [vector.reshape(len(sizes), uniform) if uniform else vector]
    return list(vector.reshape(-1).split(sizes))


def composite(slices: tuple[Tensor, ...], weight: Tensor | None, bias: Tensor | None, sizes: tuple[int, ...],
              uniform: int, dims: int, shared: bool, concat: bool, eps: float, activation: Formula,
              out_dtype: torch.dtype | None) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """The operator in differentiable operators of PyTorch."""
    parts = blocks(slices, sizes, uniform, dims)
    weights, biases = (parameters(p, len(parts), sizes, uniform, shared) for p in (weight, bias))
    outputs = [
        forward(x, w, b, eps, activation, out_dtype) for x, w, b in zip(parts, weights, biases, strict=True)
    ]  # fmt: skip
    if dims and uniform:
        return outputs[0].flatten(-2) if concat or dims == 1 else outputs[0]
    return torch.cat(outputs, -1) if dims or concat else tuple(outputs)


def composite_backward(dys: tuple[Tensor | None, ...], slices: tuple[Tensor, ...], weight: Tensor | None,
                       bias: Tensor | None, sizes: tuple[int, ...], uniform: int, dims: int, shared: bool,
                       concat: bool, eps: float,
                       derivative: Formula) -> tuple[list[Tensor], Tensor, Tensor]:  # fmt: skip
    """``(dx, dweight, dbias)`` in the accumulator's dtype: dx for each of ``slices``, the parameters' flat."""
    parts = blocks(slices, sizes, uniform, dims)
    weights, biases = (parameters(p, len(parts), sizes, uniform, shared) for p in (weight, bias))
    if dims or concat:
        (dy,) = dys
        assert dy is not None
        dys = tuple(blocks((dy,), sizes, uniform if dims else 0, 2 if dims == 2 and not concat else 1))
    results = [
        backward(torch.zeros_like(x) if dy is None else dy, x, w, b, eps, derivative)
        for dy, x, w, b in zip(dys, parts, weights, biases, strict=True)
    ]
    dxs = [dx for dx, _, _ in results]
    if dims:
        dxs = [(dxs[0].flatten(-2) if uniform else torch.cat(dxs, -1)).reshape(slices[0].shape)]
    dweights, dbiases = ([result[i] for result in results] for i in (1, 2))
    together = bool(dims and uniform)
    return dxs, _summed(dweights, together, shared), _summed(dbiases, together, shared)


def _summed(parts: list[Tensor], together: bool, shared: bool) -> Tensor:
    """A parameter's gradient from its terms, ``(*, K, D)`` or for each slice ``(*, D)``, flat."""
    if together:
        return parts[0].reshape(-1, *parts[0].shape[-1 if shared else -2 :]).sum(0).flatten()
    sums = [part.reshape(-1, part.shape[-1]).sum(0) for part in parts]
    return torch.stack(sums).sum(0) if shared else torch.cat(sums)
