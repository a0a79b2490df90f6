"""Norms: LayerNorm and RMSNorm of torch.nn, and the RMSNorms of Transformers, which differ in where they round.

Each gets a forward, and ``_fusedops_add_norm``, by which a fused block hands it a branch and the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...norms.ops import bias_dropout_add_ln, bias_dropout_add_rms_norm, layer_norm, rms_norm
from ..parts import Branch, add, folded
from ..rule import Rule

__all__ = ["RULES"]

Rounding = Literal["once", "llama", "t5", "gemma"]
Method = Callable[..., Any]


def _layer_norm(self: Any, input: Tensor) -> Tensor:
    return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


def _add_layer_norm(self: Any, end: Branch, residual: Tensor, return_sum: bool) -> Any:
    if len(self.normalized_shape) != 1:
        z = add(end, residual)
        return (self(z), z) if return_sum else self(z)
    return bias_dropout_add_ln(end.product, folded(end, residual), residual, self.weight, self.bias, p=end.p,
                               training=end.training, eps=self.eps, return_sum=return_sum)  # fmt: skip


def _rms_norm(self: Any, x: Tensor) -> Tensor:
    return rms_norm(x, self.normalized_shape, self.weight, self.eps)


def _add_rms_norm(self: Any, end: Branch, residual: Tensor, return_sum: bool) -> Any:
    if len(self.normalized_shape) != 1:
        z = add(end, residual)
        return (self(z), z) if return_sum else self(z)
    return bias_dropout_add_rms_norm(end.product, folded(end, residual), residual, self.weight, p=end.p,
                                     training=end.training, eps=self.eps, return_sum=return_sum)  # fmt: skip


def _output_dtype(x: torch.dtype, weight: torch.dtype, rounding: Rounding) -> torch.dtype:
    """The dtype that a module of Transformers gives: it computes its norm out of autocast's sight."""
    if rounding == "llama":
        return torch.promote_types(x, weight)
    if rounding == "t5":
        return weight if weight in (torch.float16, torch.bfloat16) else torch.promote_types(weight, torch.float32)
    return x


def _rounded(rounding: Rounding) -> dict[str, Method]:
    """The methods of a norm of Transformers with one weight."""
    offset, eps = (1.0, "eps") if rounding == "gemma" else (0.0, "variance_epsilon")

    def normed(self: Any, x: Tensor) -> Tensor:
        weight = self.weight
        return rms_norm(x, weight.shape[0], weight, getattr(self, eps), weight_offset=offset, rounding=rounding,
                        out_dtype=_output_dtype(x.dtype, weight.dtype, rounding))  # fmt: skip

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return normed(self, hidden_states)

    def forward_gemma(self: Any, x: Tensor) -> Tensor:
        return normed(self, x)

    def add_norm(self: Any, end: Branch, residual: Tensor, return_sum: bool) -> Any:
        weight = self.weight
        dtype = torch.promote_types(end.product.dtype, residual.dtype)
        return bias_dropout_add_rms_norm(
            end.product, folded(end, residual), residual, weight, p=end.p, training=end.training,
            eps=getattr(self, eps), weight_offset=offset, rounding=rounding, return_sum=return_sum,
            out_dtype=_output_dtype(dtype, weight.dtype, rounding),
        )  # fmt: skip

    return {"forward": forward_gemma if rounding == "gemma" else forward, "_fusedops_add_norm": add_norm}


RULES = (
    Rule(
        name="layer_norm",
        calls="layer_norm",
        methods={"forward": _layer_norm, "_fusedops_add_norm": _add_layer_norm},
        base=nn.LayerNorm,
        names=("LayerNorm",),
    ),
    Rule(
        name="rms_norm",
        calls="rms_norm",
        methods={"forward": _rms_norm, "_fusedops_add_norm": _add_rms_norm},
        base=nn.RMSNorm,
        names=("RMSNorm",),
    ),
    Rule(
        name="llama_rms_norm",  # and Mistral, Mixtral, Qwen2, Qwen3, Phi3, Granite, DeepSeek, Cohere, …
        calls="rms_norm, rounding as Llama's",
        methods=_rounded("llama"),
        fingerprints=("f76e5ef4173f",),
        names=("LlamaRMSNorm", "MistralRMSNorm", "MixtralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Phi3RMSNorm"),
    ),
    Rule(
        name="olmo_rms_norm",  # and GPT-OSS
        calls="rms_norm",
        methods=_rounded("once"),
        fingerprints=("7911e327d434", "8af8710d7503"),
        names=("Olmo2RMSNorm", "GptOssRMSNorm", "HeliumRMSNorm"),
    ),
    Rule(
        name="t5_layer_norm",  # and MT5, UMT5, LongT5, Idefics
        calls="rms_norm, rounding as T5's",
        methods=_rounded("t5"),
        fingerprints=("9b3babbf8e1d",),
        names=("T5LayerNorm", "MT5LayerNorm", "UMT5LayerNorm", "LongT5LayerNorm"),
    ),
    Rule(
        name="gemma_rms_norm",  # and Gemma 2 and 3, Qwen3-Next, RecurrentGemma
        calls="rms_norm, weight + 1",
        methods=_rounded("gemma"),
        fingerprints=("fc17404a67aa",),
        names=("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"),
        known=("forward", "_norm"),
    ),
)
