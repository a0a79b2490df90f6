"""Linear layers that take the same rows: one product for an attention's query, key and value.

Products of the same rows with several weights are one product with the weights on top of each
other. That is fewer calls and a larger product, which fills a GPU better; and in backward the rows
have one gradient instead of several and their sum. It takes a copy of the weights. Under autocast
these are copied anyway, into its dtype: so layers are packed under autocast, in training, and
nowhere else::

    x (rows, K)  x  [ Wq ]      =  [ q | k | v ]    (rows, 3 N), split along its last dimension
                    [ Wk ]^T
                    [ Wv ]

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

# The attentions whose layers may be packed, by fingerprint. They use the outputs for key and value
# unchanged, and also that for the query unless they scale it (True). In other attentions a layer's
# output may be read only to compute another tensor (to scale it, or to add rotary positions). As a
# packed output it would share the memory of the others, and stay alive with them.
_QKV, _LINS = ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin")
_PACKABLE = {
    **dict.fromkeys(("f434310b8181", "9238130564fd"), (_QKV, False)),  # BART and related models
    **dict.fromkeys(("280db448c0ae", "06f537010e90"), (_QKV, False)),  # CLIP and related models
    **dict.fromkeys(("3099567ec98b", "2599a40048ff"), (_QKV, True)),  # OPT
    # Whisper. Its key has no bias.
    **dict.fromkeys(("79e198db90db", "522463e6c88b"), (_QKV, True)),
    "9c1503232895": (_QKV, False),  # ViT, DeiT, BEiT, DINOv2
    "7888d8c7ae34": (_LINS, False),  # DistilBERT
}


def packable(cls: type) -> tuple[tuple[str, ...], bool]:
    """The names of the layers that may be packed, and whether the attention scales the query.

    There are no names for other classes.
    """
    return _PACKABLE.get(fingerprint(cls), ((), False))


def packed_linear(
    x: Tensor, layers: list[Any], dtype: torch.dtype, cast: Cast | None = None
) -> tuple[Tensor, ...]:
    """The layers' outputs in ``dtype``, as parts of one product.

    They may be changed in place: they are views that do not overlap, and that autograd does not
    track as views.

    Args:
        x: of shape (..., K).
        layers: linear layers with weights of shape (N, K), with biases all or none.
        dtype: the dtype of the product.
        cast: the layers on top of each other in ``dtype``, if they were cast before.
    """
    if cast is None:
        weight = torch.cat([layer.weight for layer in layers]).to(dtype)
        bias = None
        if layers[0].bias is not None:
            bias = torch.cat([layer.bias for layer in layers]).to(dtype)
        cast = Cast(weight, bias)
    return torch.unsafe_split(cast(x.to(dtype)), layers[0].weight.shape[0], -1)


class _Packed:
    """The layers of one call of their module: the first that is called computes all outputs."""

    def __init__(self, layers: list[Any], dtype: torch.dtype, cast: Cast | None) -> None:
        self._layers = layers
        self._dtype = dtype
        self._cast = cast
        self._rows: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def output(self, index: int, x: Tensor) -> Tensor:
        """The output of one layer, computed separately for other rows than the first call's."""
        if self._rows is None:
            self._rows = x
            self._outputs = list(packed_linear(x, self._layers, self._dtype, self._cast))
        y = self._outputs[index] if x is self._rows else None
        if y is None:
            layer = self._layers[index]
            return F.linear(x, layer.weight, layer.bias)
        # The caller owns it now, to change it in place or to free it. A second call computes again.
        self._outputs[index] = None
        return y


class _Part:
    """The replacement of one packed layer."""

    def __init__(self, whole: _Packed, index: int, layer: Any) -> None:
        self._whole = whole
        self._index = index
        self.weight = layer.weight
        self.bias = layer.bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._whole.output(self._index, x)


def packed(
    module: nn.Module,
    names: tuple[str, ...],
    x: Tensor,
    kv_rows: Tensor | None = None,
    last: Any = None,
    cache: Any = None,
) -> tuple[dict[str, Any], Any]:
    """Replacements of the children of these names, if they can be packed, and of ``last``.

    Where key and value take other rows than the query (``kv_rows``), as in a cross-attention, they
    are packed without it.

    A replacement that is called again, or with other rows than the first, computes as its layer
    does. Whether layers are packed depends on the module's mode, not on whether gradients are
    recorded or the rows have one: so reentrant checkpointing computes the same both times.

    Args:
        module: the attention.
        names: the names of the layers of query, key and value.
        x: the rows of the query, and of all three without ``kv_rows``.
        kv_rows: the rows of key and value; None if these are x.
        last: a linear layer after them, the output projection.
        cache: where the module may get its keys and values from.

    Returns:
        The replacements by name, and ``last``. Where the weights are cast in one pass (see
        `fusedops.models.tricks.casts`), the second is the cast of ``last`` instead, and the cast of
        a query that is not packed is among the replacements.
    """
    # In a cross-attention the query takes other rows than key and value.
    separate: tuple[str, ...] = ()
    if kv_rows is not None:
        separate, names, x = names[:1], names[1:], kv_rows
    layers: list[Any] = [module._modules.get(name) for name in names]
    dtype = _packing_dtype(module, x)
    if dtype is None or not names or not _are_alike(layers):
        return {}, last
    casts: list[Cast] | None = None
    if _may_cast(module, x) and (kv_rows is None or not _is_filled(cache, module)):
        casts = _cast(layers, [module._modules.get(name) for name in separate], last, dtype)
        # Try again without the query: its layer may be what cannot be cast with the others.
        if casts is None and separate:
            separate = ()
            casts = _cast(layers, [], last, dtype)
    if casts is None:
        return _parts(names, _Packed(layers, dtype, None), layers), last
    # In the order of `_cast`: the packed layers, the separate ones, the last.
    replacements: dict[str, Any] = {}
    replacements.update(zip(separate, casts[1:-1], strict=True))
    replacements.update(_parts(names, _Packed(layers, dtype, casts[0]), layers))
    return replacements, casts[-1]


def _packing_dtype(module: nn.Module, x: Tensor) -> torch.dtype | None:
    """Return the dtype in which a module's layers are packed; None if they are not."""
    if not module.training or not allowed(module, "packing"):
        return None
    return autocast_dtype(x)


def _may_cast(module: nn.Module, x: Tensor) -> bool:
    """Whether the module's layers may be cast in one pass."""
    return compiling.makes_kernels(x) and allowed(module, "casts")


def _parts(names: tuple[str, ...], whole: _Packed, layers: list[Any]) -> dict[str, Any]:
    """Return the replacements of packed layers, by name."""
    return {name: _Part(whole, index, layers[index]) for index, name in enumerate(names)}


def _are_alike(layers: list[Any]) -> bool:
    """Whether the layers may be packed with one another."""
    if not all(map(_packs, layers)):
        return False
    first = layers[0]
    for layer in layers:
        if layer.weight.shape != first.weight.shape or (layer.bias is None) != (first.bias is None):
            return False
        # One product has all gradients or none: backward would compute some that are not required.
        if layer.weight.requires_grad != first.weight.requires_grad:
            return False
    return True


def _cast(
    layers: list[Any], separate: list[Any], last: Any, dtype: torch.dtype
) -> list[Cast] | None:
    """The packed layers as one, the separate ones and the last one, all cast in one pass.

    None if they cannot be cast so.
    """
    stacks = [layers, *[[layer] for layer in separate], [last]]
    if not all(_packs(stack[0]) for stack in stacks):
        return None
    return cast_stacks(stacks, dtype)


def _is_filled(cache: Any, module: Any) -> bool:
    """Whether the cache has the keys and values of a cross-attention.

    Then the layers of key and value are not called, and get no gradients. Layers that are cast
    together would all get one.
    """
    filled = getattr(cache, "is_updated", None)
    return bool(filled and filled.get(module.layer_idx))


def packed_to(
    output: str,
    module: nn.Module,
    names: tuple[str, ...],
    x: Tensor,
    kv_rows: Tensor | None = None,
    cache: Any = None,
) -> dict[str, Any]:
    """The replacements of `packed` for a module whose child ``output`` is the last layer.

    They include that of the last layer.
    """
    layer = module._modules[output]
    parts, last = packed(module, names, x, kv_rows, layer, cache)
    if last is not layer:
        parts[output] = last
    return parts


def _packs(layer: nn.Module | None) -> bool:
    """Whether this is a linear layer that may be packed: no Conv1D, whose weight is transposed."""
    return type(layer) is nn.Linear and castable(layer)
