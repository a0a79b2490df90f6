"""Calls of PyTorch's attention, in forms that its fused kernels support.

mask                nothing is masked: none; causal: ``is_causal``; else contiguous along keys
repeated heads      groups of queries, where a fused kernel accepts groups
heads, one token    the queries of a group are rows, where none does
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.alignment import HALF, contiguous_along_keys
from ..core.compat.dispatch import DispatchMode
from ..core.launches import launch
from .fx import recorded_node, recording_nothing
from .graphs import are_numbers
from .heads import Repeats
from .masks import Constants, Mask, is_mask
from .report import note_change

__all__ = ["attention"]

# The widest heads that PyTorch's fused attention computes.
_WIDEST_HEADS = 256


def attention(
    constants: Constants,
    repeats: Repeats,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *positional: Any,
    **options: Any,
) -> Tensor:
    """Records a call of ``scaled_dot_product_attention`` in a form that fused kernels support.

    It has no mask and no repeated heads where it needs none, or else a contiguous mask.

    Args:
        constants: knows the masks that depend on no input.
        repeats: knows which heads were repeated.
        query: as of PyTorch's function; so are the rest.
    """
    if not launch.runs_kernels(query.device.type):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, *positional, **options)
    changes = []
    if attn_mask is not None:
        kind = Mask.OTHER
        # A causal mask becomes the keyword ``is_causal``, unless the call passes a second
        # positional argument after the mask, which is ``is_causal``. With a mask and a true
        # ``is_causal`` PyTorch raises: that call is unchanged.
        if len(positional) < 2 and not options.get("is_causal"):
            kind = _kind_of_mask(constants, query, key, attn_mask, options)
        attn_mask, change = _needed_mask(attn_mask, kind)
        if kind is Mask.CAUSAL:
            options = {**options, "is_causal": True}
        changes += change
    heads = _heads_of_groups(repeats, query, key, value)
    function: Callable[..., Tensor] = F.scaled_dot_product_attention
    # Transformers repeats heads wherever it has a mask, which a compiled model always has.
    if heads is not None:
        call = (query, key, value, attn_mask, *positional)
        if _accepts_groups(heads, *call, **options):
            options = {**options, "enable_gqa": True}
        elif _is_of_one_token(query, key, attn_mask, positional, options):
            function = _of_rows
        else:
            heads = None
    if heads is not None:
        form = "of one head that all queries share, in a fused kernel"
        if heads[0] is not key:
            form = "that are not repeated for groups of queries"
        changes.append(f"an attention of keys and values {form}")
        key, value = heads
    result = function(query, key, value, attn_mask, *positional, **options)
    for description in changes:
        note_change(recorded_node(result), description)
    return result


def _kind_of_mask(
    constants: Constants, query: Tensor, key: Tensor, mask: Tensor, options: Mapping[str, Any]
) -> Mask:
    """The kind of a mask, if the attention may do without it."""
    if not is_mask(mask):
        return Mask.OTHER
    kind = constants.kind(recorded_node(mask))
    if kind is not Mask.CAUSAL or _is_causal_call(query, key, mask, options):
        return kind
    return Mask.OTHER


def _heads_of_groups(
    repeats: Repeats, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Keys and values before their heads were repeated, if both were, and equally.

    One head that is broadcast to all queries is returned as it is. Without ``enable_gqa`` PyTorch
    has no fused kernel for it.
    """
    if not query.dim() == key.dim() == value.dim() == 4:
        return None
    if key.shape[1] == value.shape[1] == 1 and query.shape[1] != 1:
        return key, value
    keys, values = repeats.unrepeated(key), repeats.unrepeated(value)
    if keys is None or values is None:
        return None
    return (keys, values) if keys.shape[1] == values.shape[1] else None


def _is_of_one_token(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    positional: Sequence[Any],
    options: Mapping[str, Any],
) -> bool:
    """Whether a query is one token of each sequence, and its heads have one mask.

    So is a query of a decoder with a static cache, whose mask is of all places in the cache.
    """
    if mask is None or positional:
        return False
    if any(map(options.get, ("dropout_p", "is_causal", "enable_gqa"))):
        return False
    if query.shape[0] != key.shape[0]:
        return False
    # A size that is a symbol is never one: Dynamo makes no symbols of ones.
    sizes = (query.shape[2], *mask.shape[-3:-2])
    is_one = are_numbers(sizes) and all(size == 1 for size in sizes)
    return is_one and query.shape[1] % key.shape[1] == 0


def _of_rows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """Attention of one token, in which the queries that share a head of keys are its rows.

    (batch, heads, 1, size) ──▶ (batch, heads of keys, group, size). Every fused kernel accepts
    rows.
    """
    batch, count, _, size = query.shape
    heads = key.shape[1]
    rows = query.reshape(batch, heads, count // heads, size)
    result = F.scaled_dot_product_attention(rows, key, value, mask, **options)
    return result.reshape(batch, count, 1, value.shape[-1])


def _needed_mask(mask: Tensor, kind: Mask) -> tuple[Tensor | None, list[str]]:
    """The mask that an attention needs, and what is changed.

    Without a mask, or with ``is_causal``, fused kernels compute only the scores that count.
    """
    if kind is Mask.ALL:
        return None, ["an attention without its mask, which masks nothing"]
    if kind is Mask.CAUSAL:
        return None, ["an attention that is causal in the place of its mask"]
    contiguous = contiguous_along_keys(mask)
    if contiguous is mask:
        return mask, []
    return contiguous, ["an attention whose mask is made contiguous"]


def _is_causal_call(query: Tensor, key: Tensor, mask: Tensor, options: Mapping[str, Any]) -> bool:
    """Whether ``is_causal`` does the same as a causal mask, whose size must be queries by keys."""
    if not _is_positive(options.get("scale")):
        return False
    return mask.shape[-2:] == (query.shape[-2], key.shape[-2])


def _accepts_groups(
    heads: tuple[Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *positional: Any,
    **options: Any,
) -> bool:
    """Whether a fused kernel of PyTorch computes groups of queries, for a call with repeated heads.

    With a mask it is that of cuDNN alone. A step of one token of Llama 1.2B then takes 1.42 ms on
    an H200, 1.86 where the queries of a group are rows: see ``benchmarks models --mode decode``.
    The fourth positional argument after the mask would be ``enable_gqa``: a call that passes it has
    groups already.

    Args:
        heads: keys and values before their heads were repeated.
        query: as of the call; so are the rest.
    """
    if len(positional) > 3 or options.get("enable_gqa") or query.shape[1] % key.shape[1] != 0:
        return False
    if mask is None:
        return _has_grouped_kernel(query, value)
    whole = (-1, query.shape[1], -1, -1)
    others = (mask, *positional)
    is_of_cudnn = _is_of_cudnn(query, key.expand(whole), value.expand(whole), *others, **options)
    return is_of_cudnn and _is_of_cudnn(query, *heads, *others, **options, enable_gqa=True)


def _is_of_cudnn(query: Tensor, *others: Any, **options: Any) -> bool:
    """Whether PyTorch computes a call in cuDNN."""
    if query.device.type != "cuda":
        return False
    with recording_nothing(), _Observer() as observer:
        F.scaled_dot_product_attention(query, *others, **options)
    return "cudnn" in observer.last


class _Observer(DispatchMode):  # type: ignore[misc]
    """Records the name of the last operator of attention that PyTorch calls."""

    last = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in str(func):
            self.last = str(func)
        return func(*args, **(kwargs or {}))


def _has_grouped_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether a fused kernel accepts groups: in half precision, of heads that are not too wide."""
    if _dtype_of_attention(query) not in HALF:
        return False
    widths = (query.shape[-1], value.shape[-1])
    if not are_numbers(widths) or max(widths) > _WIDEST_HEADS or widths[0] != widths[1]:
        return False
    if query.device.type != "cuda":
        return True
    # On GPUs it is flash attention alone, which needs Ampere.
    if not torch.backends.cuda.flash_sdp_enabled():
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def _dtype_of_attention(query: Tensor) -> torch.dtype:
    """The dtype in which attention computes, after autocast."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def _is_positive(scale: Any) -> bool:
    """Whether scores are scaled so that the least, which are masked, stay the least."""
    if scale is None:
        return True
    return type(scale) in (int, float) and scale > 0
