"""The slices family's autograd Function: first order through the kernels, a second order through the formula.

Under torch.func transforms and in forward mode the functional takes the formula throughout, so none of them is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import autograd
from . import launching, reference
from .launching import Site

__all__ = ["SliceFunction"]


class SliceFunction(torch.autograd.Function):
    """One tensor, or a tensor for each slice, as `launching.forward` and `launching.apart` make them."""

    @staticmethod
    def forward(ctx: Any, site: Site, weight: Tensor | None, bias: Tensor | None, *slices: Tensor) -> Any:
        """One launch; nothing is kept but the arguments."""
        y, addresses = launching.forward(site, slices, weight, bias)
        ctx.save_for_backward(weight, bias, *slices)
        ctx.set_materialize_grads(False)
        ctx.site = site
        ctx.addresses = addresses
        return launching.apart(site, y, slices) if site.apart else y

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        """Kernels at first order, the formula where the gradient is itself differentiated or batched."""
        site: Site = ctx.site
        needs = ctx.needs_input_grad
        given = [dy for dy in dys if dy is not None]
        if not given:
            return (None,) * len(needs)
        weight, bias, *slices = ctx.saved_tensors
        if torch.is_grad_enabled() or autograd.batched(*given):
            return _formula(site, dys, weight, bias, tuple(slices), needs)
        needs_slices = needs[3:]
        if any(map(Tensor.is_neg, given)):
            dys = tuple([autograd.settled(dy) for dy in dys])
        gradient = dys if site.apart else dys[0]
        assert gradient is not None
        dx, dweight, dbias = launching.backward(site, gradient, slices, weight, bias,
                                                (any(needs_slices), needs[1], needs[2]), ctx.addresses)  # fmt: skip
        if dx is None or site.dims:
            return None, dweight, dbias, *((dx,) if site.dims else (None,) * len(slices))
        dxs = launching.apart(site, dx, slices)
        return None, dweight, dbias, *_wanted(site, dxs, dys, needs_slices)


def _wanted(site: Site, dxs: Sequence[Tensor | None], dys: Sequence[Tensor | None],
            needs: Sequence[bool]) -> Sequence[Tensor | None]:  # fmt: skip
    """The slices' gradients without those that nobody asked for, and those of slices of which nothing came."""
    if site.apart and any(dy is None for dy in dys):
        return [dx if n and dy is not None else None for dx, dy, n in zip(dxs, dys, needs, strict=True)]
    return dxs if all(needs) else [dx if n else None for dx, n in zip(dxs, needs, strict=True)]


def _formula(site: Site, dys: tuple[Tensor | None, ...], weight: Tensor | None, bias: Tensor | None,
             slices: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients in differentiable operators."""
    widths = site.widths
    dxs, *sums = reference.composite_backward(dys, slices, weight, bias, widths.sizes, widths.uniform, site.dims,
                                              site.shared, site.concat, site.eps, site.activation.derivative)  # fmt: skip
    grads = [None if p is None else d.reshape(p.shape) for d, p in zip(sums, (weight, bias), strict=True)]
    dtypes = (site.weight, site.bias, *(site.x,) * len(slices))
    wanted = _wanted(site, dxs, dys, needs[3:]) if site.dims == 0 else dxs
    return None, *(
        None if d is None or not needed else d.to(dtype)
        for d, needed, dtype in zip((*grads, *wanted), needs[1:], dtypes, strict=True)
    )
