"""The family's private `torch.library` operators: what torch.compile, FakeTensor and make_fx see of a call.

The output is one tensor in every form: for slices that are tensors of their own a buffer that holds one after the
other, which PyTorch's own operators then take apart, as they join the gradients.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from ..core import autograd
from ..core.operators import implement, versioned
from . import launching
from .launching import Site, site_of
from .widths import widths_of

__all__ = ["operator_call"]

_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")

_CALL = (
    "Tensor[] slices, Tensor? weight, Tensor? bias, int[] sizes, int dims, bool concat, float eps, str activation, "
    "bool shared, ScalarType? out_dtype"
)
# Tables of addresses and widths outlive a call, which memory that a graph tree manages must not.
_TAGS = tuple(tag for name in ("cudagraph_unsafe",) if (tag := getattr(torch.Tag, name, None)) is not None)
_LIBRARY.define(f"slices_forward({_CALL}) -> Tensor", tags=_TAGS)
_LIBRARY.define(f"slices_backward(Tensor dy, {_CALL}, bool[] needs) -> (Tensor, Tensor, Tensor)", tags=_TAGS)


def operator_call(slices: tuple[Tensor, ...], weight: Tensor | None, bias: Tensor | None, sizes: tuple[int, ...],
                  dims: int, concat: bool, eps: float, activation: str, shared: bool,
                  out_dtype: torch.dtype | None) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """The forward as one registered operator."""
    y: Tensor = torch.ops.fusedops.slices_forward(slices, weight, bias, sizes, dims, concat, eps,
                                                  versioned(activation), shared, out_dtype)  # fmt: skip
    return tuple(_split(y, slices)) if dims == 0 and not concat else y


def _split(buffer: Tensor, slices: Any) -> list[Tensor]:
    # One view each: of several views from one operator none may be changed in place.
    ends = itertools.accumulate(t.numel() for t in slices)
    return [buffer.narrow(0, end - t.numel(), t.numel()).view(t.shape) for end, t in zip(ends, slices, strict=True)]


def _site(slices: list[Tensor], weight: Tensor | None, bias: Tensor | None, sizes: list[int], dims: int, concat: bool,
          eps: float, activation: str, shared: bool, out_dtype: torch.dtype | None) -> Site:  # fmt: skip
    x, name = slices[0], activation.partition(" ")[0]
    return site_of(widths_of(tuple(sizes)), dims, concat, eps, name, shared, out_dtype, x.get_device(), x.dtype,
                   None if weight is None else weight.dtype, None if bias is None else bias.dtype)  # fmt: skip


def _elements(first: Tensor, sizes: list[int]) -> int:
    """Of all slices together, the first being one of them."""
    return first.numel() // sizes[0] * sum(sizes)


def _forward(slices: list[Tensor], weight: Tensor | None, bias: Tensor | None, *call: Any) -> Tensor:
    return launching.forward(_site(slices, weight, bias, *call), slices, weight, bias)[0]


def _fake_forward(slices: list[Tensor], weight: Tensor | None, bias: Tensor | None, sizes: list[int], dims: int,
                  concat: bool, eps: float, activation: str, shared: bool,
                  out_dtype: torch.dtype | None) -> Tensor:  # fmt: skip
    x = slices[0]
    dtype = out_dtype or x.dtype
    if dims == 0:
        return x.new_empty((*x.shape[:-1], sum(sizes)) if concat else _elements(x, sizes), dtype=dtype)
    if dims == 2 and concat:
        return x.new_empty((*x.shape[:-2], sum(sizes)), dtype=dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _backward(dy: Tensor, slices: list[Tensor], weight: Tensor | None, bias: Tensor | None,
              *call: Any) -> tuple[Tensor, ...]:  # fmt: skip
    *rest, needs = call
    grads = launching.backward(_site(slices, weight, bias, *rest), dy, slices, weight, bias, tuple(needs))
    return tuple(dy.new_empty(0) if grad is None else grad for grad in grads)


def _fake_backward(dy: Tensor, slices: list[Tensor], weight: Tensor | None, bias: Tensor | None, sizes: list[int],
                   dims: int, *call: Any) -> tuple[Tensor, ...]:  # fmt: skip
    x, needs = slices[0], call[-1]
    if not needs[0]:
        dx = dy.new_empty(0)
    elif dims == 0:
        dx = x.new_empty(_elements(x, sizes))
    else:
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, *(
        torch.empty_like(p, memory_format=torch.contiguous_format) if p is not None and needed else dy.new_empty(0)
        for p, needed in zip((weight, bias), needs[1:], strict=True)
    )


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    slices, weight, bias, *ctx.call = inputs
    ctx.save_for_backward(weight, bias, *slices)


def _autograd_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    weight, bias, *slices = ctx.saved_tensors
    dims = ctx.call[1]
    of_slices = list(ctx.needs_input_grad[0])
    needs = [any(of_slices), *ctx.needs_input_grad[1:3]]
    dx, *grads = autograd.once(torch.ops.fusedops.slices_backward, dy, slices, weight, bias, *ctx.call, needs)
    dxs: list[Tensor | None] = [None] * len(slices)
    if needs[0]:
        dxs = [dx] if dims else [d if n else None for d, n in zip(_split(dx, slices), of_slices, strict=True)]
    return (dxs, *(grad if needed else None for grad, needed in zip(grads, needs[1:], strict=True)),
            *(None,) * len(ctx.call))  # fmt: skip


implement(_LIBRARY, "slices_forward", _forward, _fake_forward)
implement(_LIBRARY, "slices_backward", _backward, _fake_backward)
torch.library.register_autograd(
    "fusedops::slices_forward", _autograd_backward, setup_context=_setup_context, lib=_LIBRARY
)
