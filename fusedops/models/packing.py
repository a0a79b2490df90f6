"""Linear layers that take the same rows, packed: one product for an attention's query, key and value.

Products of the same rows with several weights are one product with the weights on top of each other. That is fewer
calls and a larger product, which fills a GPU better; and backward the rows have one gradient, where there were several
and their sum. It takes a copy of the weights. Under autocast these are copied anyway, into its dtype: so layers are
packed there, in training, and nowhere else.

The module's own forward runs, and calls stand-ins (`packed`) in the layers' places.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import compiling
from .autocast import autocast_dtype
from .casts import Cast, cast_as_one, castable

__all__ = ["packed", "packed_linear", "packed_to"]


def packed_linear(x: Tensor, layers: list[Any], dtype: torch.dtype,
                  copies: list[Tensor] | None = None) -> tuple[Tensor, ...]:  # fmt: skip
    """The layers' outputs in ``dtype``, as parts of one product.

    Autograd does not know them as parts, so they may be changed in place: each has its own memory in the product, which
    nobody else sees.

    Args:
        x: of shape (..., K).
        layers: linear layers with weights of shape (N, K), with biases all or none.
        dtype: of the product.
        copies: the weights on top of each other in ``dtype``, and the biases if there are any, where they are made.
    """
    if copies is None:
        copies = [torch.cat(parameters).to(dtype) for parameters in _parameters(layers)]
    product = F.linear(x.to(dtype), *copies)
    return torch.unsafe_split(product, layers[0].weight.shape[0], -1)


def _parameters(layers: list[Any]) -> list[list[Tensor]]:
    """Their weights, and their biases if they have any."""
    weights = [layer.weight for layer in layers]
    return [weights] if layers[0].bias is None else [weights, [layer.bias for layer in layers]]


class _Packed:
    """The layers of one call of their module: the first that is called computes what all make of its rows."""

    def __init__(self, layers: list[Any], dtype: torch.dtype, copies: list[Tensor] | None) -> None:
        self._layers = layers
        self._dtype = dtype
        self._copies = copies
        self._rows: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def output(self, place: int, x: Tensor) -> Tensor:
        if self._rows is None:
            self._rows, self._outputs = x, list(packed_linear(x, self._layers, self._dtype, self._copies))
        y = self._outputs[place] if x is self._rows else None
        if y is None:
            layer = self._layers[place]
            return F.linear(x, layer.weight, layer.bias)
        self._outputs[place] = None  # its own now, to change in place and to free
        return y


class _Part:
    """One of them, as the module sees it."""

    def __init__(self, whole: _Packed, place: int, layer: Any) -> None:
        self._whole, self._place = whole, place
        self.weight, self.bias = layer.weight, layer.bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._whole.output(self._place, x)


def packed(module: nn.Module, names: tuple[str, ...], x: Tensor, others: Tensor | None = None,
           last: Any = None) -> tuple[dict[str, Any], Any]:  # fmt: skip
    """Stand-ins for the children of these names, which take x or rows like it; none where nothing is to be packed.

    Key and value are the last two names. In a cross-attention they take ``others``, and are packed without the query.
    A stand-in that is called again, or with other rows than the first, computes as its layer does. Whether layers are
    packed hangs on the module's mode, not on whether gradients are recorded or the rows have one: what reentrant
    checkpointing computes twice is the same.

    ``last`` is a linear layer behind them. It comes back as the second result, or a stand-in for it where its weight is
    cast together with theirs (see `fusedops.models.casts`).
    """
    crosses = others is not None  # key and value may come from a cache, and then nothing is to be cast
    if others is not None:
        names, x = names[-2:], others
    dtype = autocast_dtype(x) if names and module.training else None
    layers: list[Any] = [module._modules.get(name) for name in names]
    if dtype is None or not all(map(_packs, layers)):
        return {}, last
    first = layers[0]
    learns = first.weight.requires_grad
    for layer in layers:
        if layer.weight.shape != first.weight.shape or (layer.bias is None) != (first.bias is None):
            return {}, last
        if layer.weight.requires_grad != learns:  # backward would compute what nobody wants
            return {}, last
    copies = None
    if not crosses and compiling.makes_kernels(x) and _packs(last):
        weights, *biases = _parameters(layers)
        copies = cast_as_one([weights, [last.weight], *biases], dtype)
        if copies is not None:
            last = Cast(copies.pop(1), last.bias)
    whole = _Packed(layers, dtype, copies)
    return {name: _Part(whole, place, layers[place]) for place, name in enumerate(names)}, last


def packed_to(output: str, module: nn.Module, names: tuple[str, ...], x: Tensor,
              others: Tensor | None = None) -> dict[str, Any]:  # fmt: skip
    """As `packed`, for a module whose own child ``output`` is the layer behind them: its stand-in is among theirs."""
    layer = module._modules[output]
    parts, last = packed(module, names, x, others, layer)
    return parts if last is layer else {**parts, output: last}


def _packs(layer: nn.Module | None) -> bool:
    return type(layer) is nn.Linear and castable(layer)
