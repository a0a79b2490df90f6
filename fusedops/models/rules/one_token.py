"""T5's attention, for the next token of a generation.

A generation's step is launch-bound. With one token the heads need no transposition, and for linear
layers batch and tokens need not be folded, so the same products and the same attention take fewer
calls. All other cases run the module's own forward; this is decided before the cache is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..fingerprint import digest, unwrapped
from ..hooks import has_hooks, is_named, original
from ..rule import Rule

__all__ = ["RULES"]

# Transformers' `sdpa_attention_forward` with its `create_position_bias_mask`, in 5.17, 5.23 and
# 5.24. For one query they only call PyTorch's attention, with the sum of mask and position bias as
# its mask.
_SDPA = ("6b854b7295d1", "4eceba25d5ea", "8b9f4b6b4211")
# PyTorch's memory-efficient attention copies a mask in each layer, unless its rows have a stride of
# a multiple of so many elements.
_ALIGNED = 8


def _forward(
    self: Any,
    hidden_states: Tensor,
    mask: Tensor | None = None,
    key_value_states: Tensor | None = None,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    # From Transformers 5.24 on the argument's name is ``cache``.
    cache = kwargs.pop("cache", past_key_values)
    is_cross = key_value_states is not None
    # The fast path takes no other options.
    if hidden_states.shape[1] == 1 and not kwargs:
        weights = _weights(self, is_cross, cache, position_bias is not None)
        if weights is not None:
            return _next_token(self, hidden_states, mask, is_cross, position_bias, cache, weights)
    return original(self, "forward")(
        self, hidden_states, mask, key_value_states, position_bias, cache, **kwargs
    )


def _weights(self: Any, is_cross: bool, cache: Any, has_bias: bool) -> tuple[Tensor, ...] | None:
    """The weights of q, k, v and o if this is an ordinary step of a generation, or else None."""
    if not _is_inference(self) or not _is_encoder_decoder(cache):
        return None
    if not _has_keys(self, is_cross, cache, has_bias):
        return None
    return _plain_weights(self)


def _has_keys(self: Any, is_cross: bool, cache: Any, has_bias: bool) -> bool:
    """Whether the cache has this layer's keys and values, in a form that the fast path supports."""
    # Without a position bias, the layer computes one from the number of cached tokens. A static
    # cache returns that as a tensor, and its masks are of its full size.
    if not has_bias and type(cache.get_seq_length(self.layer_idx)) is not int:
        return False
    # The first step fills a cross-attention's cache.
    return not is_cross or bool(cache.is_updated.get(self.layer_idx))


def _is_inference(module: Any) -> bool:
    """Whether this is eager mode, without dropout and without a backward."""
    if module.training or torch.is_grad_enabled():
        return False
    return not torch.compiler.is_compiling()


def _plain_weights(self: Any) -> tuple[Tensor, ...] | None:
    """The weights of q, k, v and o if these are linear layers without biases and without hooks."""
    children = self._modules
    linears = [children.get("q"), children.get("k"), children.get("v"), children.get("o")]
    weights = []
    for linear in linears:
        if type(linear) is not nn.Linear or has_hooks(linear):
            return None
        if linear._parameters.get("bias") is not None:
            return None
        weight = linear._parameters.get("weight")
        # In DataParallel's replicas parameters are plain attributes.
        if weight is None:
            return None
        weights.append(weight)
    return tuple(weights)


def _is_encoder_decoder(cache: Any) -> bool:
    """Whether the cache is Transformers' own, with a part for self- and for cross-attention."""
    return is_named(type(cache), "transformers.cache_utils", "EncoderDecoderCache")


def _next_token(
    self: Any,
    x: Tensor,
    mask: Tensor | None,
    is_cross: bool,
    position_bias: Tensor | None,
    cache: Any,
    weights: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor | None]:
    q, k, v, o = weights
    count, layer = x.shape[0], self.layer_idx
    # (batch, heads, 1 token, size): with one token this is a view of (batch, heads * size).
    heads = (count, -1, 1, self.key_value_proj_dim)
    rows = x.reshape(count, -1)
    # Read before the cache is updated.
    seen = cache.get_seq_length(layer) if position_bias is None else 0
    query = F.linear(rows, q).view(heads)
    if is_cross:
        cached = cache.cross_attention_cache.layers[layer]
        keys, values = cached.keys, cached.values
    else:
        keys, values = cache.self_attention_cache.update(
            F.linear(rows, k).view(heads), F.linear(rows, v).view(heads), layer
        )
    if position_bias is None:
        position_bias = _bias(self, query, keys.shape[2], seen)
    y, attention = _attended(self, query, keys, values, mask, position_bias)
    return F.linear(y.reshape(count, -1), o).unsqueeze(1), position_bias, attention


def _attended(
    self: Any,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    position_bias: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """The attention's output, and its weights if the model's kind of attention returns them."""
    # At each call the original forward looks up the attention's function in its module's globals.
    forward, _ = unwrapped(type(self)._fusedops_original.forward)
    scope = forward.__globals__
    function = scope["ALL_ATTENTION_FUNCTIONS"].get_interface(
        self.config._attn_implementation, scope["eager_attention_forward"]
    )
    if _is_sdpa(function):
        bias = position_bias if mask is None else _masked(position_bias, mask, keys.dtype)
        return F.scaled_dot_product_attention(query, keys, values, bias, scale=self.scaling), None
    return function(  # type: ignore[no-any-return]
        self,
        query,
        keys,
        values,
        mask,
        dropout=0.0,
        scaling=self.scaling,
        position_bias=position_bias,
    )


@functools.lru_cache(maxsize=16)
def _is_sdpa(function: Callable[..., Any]) -> bool:
    """Whether this is Transformers' function around PyTorch's attention, of a known version."""
    names = getattr(function, "__globals__", {})
    is_known = digest(function, names.get("create_position_bias_mask")) in _SDPA
    return is_known and not names["_is_torch_npu_available"]


# An attribute of the position biases that `_bias` returns: ``(mask, dtype, joined)``, the arguments
# and the result of the last call of `_masked`. All layers of a step get the same mask, so the first
# one computes the result for the rest.
_JOINED = "_fusedops_joined"


def _bias(self: Any, query: Tensor, length: int, seen: int) -> Tensor:
    """The position bias of one query, which the layers after this one take too."""
    if self.has_relative_attention_bias:
        bias = _aligned(self.compute_bias(1, length, device=query.device, past_seen_tokens=seen))
    else:
        bias = _aligned(query.new_zeros(1, self.n_heads, 1, length))
    setattr(bias, _JOINED, (None, None, None))
    return bias


def _masked(bias: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask and position bias in one, computed once for all layers of a step.

    The result is cached only on a bias that `_bias` returned. A bias of the caller may be used in
    later steps, after the mask was changed in place.
    """
    cached = bias.__dict__.get(_JOINED)
    if cached is not None and cached[0] is mask and cached[1] is dtype:
        return cached[2]  # type: ignore[no-any-return]
    if mask.dtype == torch.bool:
        joined = torch.where(mask, bias, torch.finfo(dtype).min)
    else:
        joined = bias + mask
    joined = _aligned(joined)
    if cached is not None:
        setattr(bias, _JOINED, (mask, dtype, joined))
    return joined


def _aligned(bias: Tensor) -> Tensor:
    """The same numbers, with a row stride that is a multiple of `_ALIGNED` elements."""
    length = bias.shape[-1]
    if length % _ALIGNED == 0:
        return bias.contiguous()
    return F.pad(bias, (0, -length % _ALIGNED))[..., :length]


RULES = (
    Rule(
        name="one_token",  # and those of MT5, LongT5, UDOP, Switch Transformers, Pop2Piano
        calls="a fast path for one token",
        methods={"forward": _forward},
        fingerprints=("12564b5b1c2f", "f4d1a173d280"),
        names=("T5Attention", "MT5Attention"),
    ),
)
