"""CUDA's rules for operators on the CPU: what autocast casts, and which attention runs.

A step is traced on the CPU, as autograd can record nothing on a GPU that is not there. PyTorch's
rules for the CPU differ in two things that change what a step moves: norms and softmaxes are not
computed in fp32, and an attention with dropout is no fused kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["rules_of_cuda"]

# Operators that autocast computes in fp32 on GPUs:
# https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32
_IN_FP32 = (
    "acos",
    "asin",
    "binary_cross_entropy_with_logits",
    "cdist",
    "cosh",
    "cosine_embedding_loss",
    "cosine_similarity",
    "cumprod",
    "cumsum",
    "dist",
    "erfinv",
    "exp",
    "expm1",
    "group_norm",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "linalg_vector_norm",
    "log",
    "log10",
    "log1p",
    "log2",
    "log_softmax",
    "logsumexp",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "native_layer_norm",
    "nll_loss",
    "nll_loss2d",
    "pdist",
    "poisson_nll_loss",
    "pow",
    "prod",
    "reciprocal",
    "renorm",
    "rsqrt",
    "sinh",
    "smooth_l1_loss",
    "soft_margin_loss",
    "softmax",
    "softplus",
    "sum",
    "tan",
    "triplet_margin_loss",
)
_HALF = (torch.float16, torch.bfloat16)
_WIDEST_HEADS = 256  # of flash attention


@contextmanager
def rules_of_cuda() -> Iterator[None]:
    """Applies CUDA's rules to tensors on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name in _IN_FP32:
            for operator in _overloads(name):
                library.impl(operator, _in_fp32(operator), "AutocastCPU")
        operator = torch.ops.aten.scaled_dot_product_attention.default
        for key in ("CPU", "AutogradCPU"):
            library.impl(operator, _attention, key)
        yield
    finally:
        library._destroy()


def _overloads(name: str) -> list[Any]:
    """Returns the overloads of an operator that this release of PyTorch casts on GPUs alone."""
    packet = getattr(torch.ops.aten, name)
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return list(filter(_is_cast_on_gpus, overloads))


def _is_cast_on_gpus(operator: Any) -> bool:
    name: str = operator.name()
    # Overloads for numbers are operators of TorchScript, which have no kernels.
    if not torch._C._dispatch_has_kernel(name):
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(name, "AutocastCUDA") and not has_kernel(name, "AutocastCPU")


def _in_fp32(operator: Any) -> Callable[..., Any]:
    """Returns the implementation of an operator under autocast: in fp32."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_autocast()):
            args, kwargs = pytree.tree_map_only(Tensor, _as_fp32, (args, kwargs))
            return operator(*args, **kwargs)

    return call


@functools.cache
def _autocast() -> Any:
    return torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _as_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Returns an attention, by the operator that PyTorch chooses on an H200.

    Without a mask that is flash attention, otherwise the memory-efficient one.
    """
    aten = torch.ops.aten
    is_fused = query.dim() == 4 and query.shape[-1] <= _WIDEST_HEADS
    if is_fused and query.dtype in _HALF and attn_mask is None:
        results = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )
        return results[0]  # type: ignore[no-any-return]
    if is_fused and query.shape[1] == key.shape[1]:
        needs = any(tensor.requires_grad for tensor in (query, key, value))
        results = aten._scaled_dot_product_efficient_attention(
            query,
            key,
            value,
            _summands(attn_mask, query, key),
            needs and torch.is_grad_enabled(),
            dropout_p,
            is_causal,
            scale=scale,
        )
        return results[0]  # type: ignore[no-any-return]
    results = aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return results[0]  # type: ignore[no-any-return]


def _summands(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Returns a mask as summands of the scores: 0 where it is True, minus infinity elsewhere."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
    return mask.expand(*query.shape[:2], query.shape[-2], key.shape[-2])
