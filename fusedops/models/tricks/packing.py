"""Linear layers that take the same rows, packed: one product for an attention's query, key and value.

Products of the same rows with several weights are one product with the weights on top of each other. That is fewer
calls and a larger product, which fills a GPU better; and backward the rows have one gradient, where there were several
and their sum. It takes a copy of the weights. Under autocast these are copied anyway, into its dtype: so layers are
packed there, in training, and nowhere else.

The module's own forward runs, with replacements (`packed`) of the layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import compiling
from ..autocast import autocast_dtype
from ..cast import Cast
from ..fingerprint import fingerprint
from . import allowed
from .casts import cast_stacks, castable

__all__ = ["packable", "packed", "packed_linear", "packed_to"]

# Attentions whose key and value go into the attention as they are, and so does the query if it is not scaled first:
# what is only on the way to something else (a scaled query, rotary positions) packing would keep alive with the others.
_QKV, _LINS = ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin")
_PACKABLE = {
    **dict.fromkeys(("f434310b8181", "9238130564fd"), (_QKV, False)),  # BART and its relatives
    **dict.fromkeys(("280db448c0ae", "06f537010e90"), (_QKV, False)),  # CLIP and its relatives
    **dict.fromkeys(("3099567ec98b", "2599a40048ff"), (_QKV, True)),  # OPT
    **dict.fromkeys(("79e198db90db", "522463e6c88b"), (_QKV, True)),  # Whisper, whose key is without a bias
    "9c1503232895": (_QKV, False),  # ViT, DeiT, BEiT, DINOv2
    "7888d8c7ae34": (_LINS, False),  # DistilBERT
}


def packable(cls: type) -> tuple[tuple[str, ...], bool]:
    """The names of query, key and value of an attention that may be packed, none for another class; whether it scales first."""
    return _PACKABLE.get(fingerprint(cls), ((), False))


def packed_linear(x: Tensor, layers: list[Any], dtype: torch.dtype, cast: Cast | None = None) -> tuple[Tensor, ...]:
    """The layers' outputs in ``dtype``, as parts of one product.

    Autograd does not track them as views, so they may be changed in place: each has memory of its own in the product.

    Args:
        x: of shape (..., K).
        layers: linear layers with weights of shape (N, K), with biases all or none.
        dtype: of the product.
        cast: the layers on top of each other in ``dtype``, where that is made.
    """
    if cast is None:
        weight = torch.cat([layer.weight for layer in layers]).to(dtype)
        cast = Cast(weight, None if layers[0].bias is None else torch.cat([layer.bias for layer in layers]).to(dtype))
    return torch.unsafe_split(cast(x.to(dtype)), layers[0].weight.shape[0], -1)


class _Packed:
    """The layers of one call of their module: the first that is called computes what all make of its rows."""

    def __init__(self, layers: list[Any], dtype: torch.dtype, cast: Cast | None) -> None:
        self._layers = layers
        self._dtype = dtype
        self._cast = cast
        self._rows: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def output(self, place: int, x: Tensor) -> Tensor:
        if self._rows is None:
            self._rows, self._outputs = x, list(packed_linear(x, self._layers, self._dtype, self._cast))
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


def packed(module: nn.Module, names: tuple[str, ...], x: Tensor, others: Tensor | None = None, last: Any = None,
           cache: Any = None) -> tuple[dict[str, Any], Any]:  # fmt: skip
    """Replacements of the children of these names, which take x or rows like it; none where nothing is packed.

    The names are those of query, key and value. Where key and value take ``others``, as in a cross-attention, they are
    packed without the query.

    A replacement that is called again, or with other rows than the first, computes as its layer does. Whether layers are
    packed hangs on the module's mode, not on whether gradients are recorded or the rows have one: what reentrant
    checkpointing computes twice is the same.

    ``last`` is a linear layer behind them. It comes back as the second result, or a replacement of it where its weight is
    cast together with theirs (see `fusedops.models.casts`); a query that is not packed is then replaced too.
    ``cache`` is what the module may take its keys and values from.
    """
    apart: tuple[str, ...] = ()
    if others is not None:
        apart, names, x = names[:1], names[1:], others
    dtype = autocast_dtype(x) if names and module.training and allowed(module, "packing") else None
    layers: list[Any] = [module._modules.get(name) for name in names]
    if dtype is None or not all(map(_packs, layers)):
        return {}, last
    first = layers[0]
    learns = first.weight.requires_grad
    for layer in layers:
        if layer.weight.shape != first.weight.shape or (layer.bias is None) != (first.bias is None):
            return {}, last
        if layer.weight.requires_grad != learns:  # backward would compute gradients that are not required
            return {}, last
    casts: list[Cast] | None = None
    casting = compiling.makes_kernels(x) and allowed(module, "casts")
    if casting and (others is None or not _is_filled(cache, module)):
        casts = _cast(layers, [module._modules.get(name) for name in apart], last, dtype)
        if casts is None and apart:  # the query may be what keeps the rest from it
            apart, casts = (), _cast(layers, [], last, dtype)
    parts: dict[str, Any] = {}
    if casts is not None:
        parts.update(zip(apart, casts[1:-1], strict=True))
        last = casts[-1]
    whole = _Packed(layers, dtype, None if casts is None else casts[0])
    parts.update({name: _Part(whole, place, layers[place]) for place, name in enumerate(names)})
    return parts, last


def _cast(layers: list[Any], apart: list[Any], last: Any, dtype: torch.dtype) -> list[Cast] | None:
    """The packed layers, those that are not packed with them and the last one, cast in one pass, if they can be."""
    stacks = [layers, *[[layer] for layer in apart], [last]]
    return cast_stacks(stacks, dtype) if all(_packs(stack[0]) for stack in stacks) else None


def _is_filled(cache: Any, module: Any) -> bool:
    """Whether the cache has the keys and values of a cross-attention.

    Their layers are not called then, and have no gradients, where of layers that are cast together all have one.
    """
    filled = getattr(cache, "is_updated", None)
    return bool(filled and filled.get(module.layer_idx))


def packed_to(output: str, module: nn.Module, names: tuple[str, ...], x: Tensor, others: Tensor | None = None,
              cache: Any = None) -> dict[str, Any]:  # fmt: skip
    """As `packed`, for a module whose own child ``output`` is the layer behind them: its replacement is among theirs."""
    layer = module._modules[output]
    parts, last = packed(module, names, x, others, layer, cache)
    return parts if last is layer else {**parts, output: last}


def _packs(layer: nn.Module | None) -> bool:
    return type(layer) is nn.Linear and castable(layer)
