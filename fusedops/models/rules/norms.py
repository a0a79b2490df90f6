"""Norms: LayerNorm and RMSNorm of torch.nn, and the RMSNorms of Transformers, which differ in where they round.

Each gets a forward, and two methods that fused blocks call: ``_fusedops_norm``, the norm with an output in a given dtype,
and ``_fusedops_add_norm``, the norm of a branch added to the residual stream, with an output in that dtype instead of or
beside the norm's own.
"""

from __future__ import annotations

import functools
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


def _narrowed(low: torch.dtype | None, *dtypes: torch.dtype) -> torch.dtype | None:
    """The output's dtype where all that takes it would cast it to ``low``; None for the operator's own choice.

    From another half dtype, which may be what the norm gives, it would be rounded twice.
    """
    if low is None:
        return None
    return low if functools.reduce(torch.promote_types, dtypes) in (torch.float32, low) else None


def _methods(norm: Method, add_norm: Method, argument: str) -> dict[str, Method]:
    """The methods of a norm: its forward, whose argument has that name, and what a fused block calls."""

    def forward_input(self: Any, input: Tensor) -> Tensor:
        return norm(self, input, None)  # type: ignore[no-any-return]

    def forward_x(self: Any, x: Tensor) -> Tensor:
        return norm(self, x, None)  # type: ignore[no-any-return]

    def forward_hidden_states(self: Any, hidden_states: Tensor) -> Tensor:
        return norm(self, hidden_states, None)  # type: ignore[no-any-return]

    forward = {"input": forward_input, "x": forward_x, "hidden_states": forward_hidden_states}[argument]
    return {"forward": forward, "_fusedops_norm": norm, "_fusedops_add_norm": add_norm}


def _layer_norm(self: Any, x: Tensor, low: torch.dtype | None) -> Tensor:
    return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps, out_dtype=_narrowed(low, x.dtype))


def _rms_norm(self: Any, x: Tensor, low: torch.dtype | None) -> Tensor:
    return rms_norm(x, self.normalized_shape, self.weight, self.eps, out_dtype=_narrowed(low, x.dtype))


def _of_one_dimension(call: Method) -> Method:
    """The method that adds and normalises; over several dimensions, which the operators do not take, in two steps."""

    def add_norm(self: Any, end: Branch, residual: Tensor, return_sum: bool, low: torch.dtype | None,
                 with_cast: bool = False) -> Any:  # fmt: skip
        if len(self.normalized_shape) != 1:
            z = add(end, residual)
            return (self(z), z) if return_sum else self(z)
        low = _narrowed(low, end.product.dtype, residual.dtype)
        return call(self, end.product, folded(end, residual), residual, p=end.p, training=end.training, eps=self.eps,
                    return_sum=return_sum, **{"cast_dtype" if with_cast else "out_dtype": low})  # fmt: skip

    return add_norm


def _add_layer_norm(self: Any, x: Tensor, bias: Tensor | None, residual: Tensor, **options: Any) -> Any:
    return bias_dropout_add_ln(x, bias, residual, self.weight, self.bias, **options)


def _add_rms_norm(self: Any, x: Tensor, bias: Tensor | None, residual: Tensor, **options: Any) -> Any:
    return bias_dropout_add_rms_norm(x, bias, residual, self.weight, **options)


def _output_dtype(x: torch.dtype, weight: torch.dtype, rounding: Rounding, low: torch.dtype | None) -> torch.dtype:
    """The dtype that a module of Transformers gives: it computes its norm out of autocast's sight.

    Or ``low``, to which it would be cast; through another half dtype on the way it would round twice.
    """
    if rounding == "llama":
        x = torch.promote_types(x, weight)
    elif rounding == "t5":
        x = weight if weight in (torch.float16, torch.bfloat16) else torch.promote_types(weight, torch.float32)
    return x if low is None or x != torch.float32 else low


def _rounded(rounding: Rounding) -> dict[str, Method]:
    """The methods of a norm of Transformers with one weight."""
    offset, eps, argument = (1.0, "eps", "x") if rounding == "gemma" else (0.0, "variance_epsilon", "hidden_states")

    def norm(self: Any, x: Tensor, low: torch.dtype | None) -> Tensor:
        weight = self.weight
        return rms_norm(x, weight.shape[0], weight, getattr(self, eps), weight_offset=offset, rounding=rounding,
                        out_dtype=_output_dtype(x.dtype, weight.dtype, rounding, low))  # fmt: skip

    def add_norm(self: Any, end: Branch, residual: Tensor, return_sum: bool, low: torch.dtype | None,
                 with_cast: bool = False) -> Any:  # fmt: skip
        weight = self.weight
        dtype = torch.promote_types(end.product.dtype, residual.dtype)
        dtype, low = (_output_dtype(dtype, weight.dtype, rounding, d) for d in (None, low))
        return bias_dropout_add_rms_norm(
            end.product, folded(end, residual), residual, weight, p=end.p, training=end.training,
            eps=getattr(self, eps), weight_offset=offset, rounding=rounding, return_sum=return_sum,
            out_dtype=dtype if with_cast else low, cast_dtype=low if with_cast else None,
        )  # fmt: skip

    return _methods(norm, add_norm, argument)


def _has_a_vector(module: nn.Module) -> str:
    weight = module._parameters.get("weight")
    return "" if weight is not None and weight.dim() == 1 else "its weight is no vector"


RULES = (
    Rule(
        name="layer_norm",
        calls="layer_norm",
        methods=_methods(_layer_norm, _of_one_dimension(_add_layer_norm), "input"),
        base=nn.LayerNorm,
        names=("LayerNorm",),
    ),
    Rule(
        name="rms_norm",
        calls="rms_norm",
        methods=_methods(_rms_norm, _of_one_dimension(_add_rms_norm), "x"),
        base=nn.RMSNorm,
        names=("RMSNorm",),
    ),
    Rule(
        name="llama_rms_norm",  # and Mistral, Mixtral, Qwen2, Qwen3, Phi3, Granite, DeepSeek, Cohere, …
        calls="rms_norm, rounding as Llama's",
        methods=_rounded("llama"),
        fits=_has_a_vector,
        fingerprints=("f76e5ef4173f",),
        names=("LlamaRMSNorm", "MistralRMSNorm", "MixtralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Phi3RMSNorm"),
    ),
    Rule(
        name="olmo_rms_norm",  # and GPT-OSS
        calls="rms_norm",
        methods=_rounded("once"),
        fits=_has_a_vector,
        fingerprints=("7911e327d434", "8af8710d7503"),
        names=("Olmo2RMSNorm", "GptOssRMSNorm", "HeliumRMSNorm"),
    ),
    Rule(
        name="t5_layer_norm",  # and MT5, UMT5, LongT5, Idefics
        calls="rms_norm, rounding as T5's",
        methods=_rounded("t5"),
        fits=_has_a_vector,
        fingerprints=("9b3babbf8e1d",),
        names=("T5LayerNorm", "MT5LayerNorm", "UMT5LayerNorm", "LongT5LayerNorm"),
    ),
    Rule(
        name="gemma_rms_norm",  # and Gemma 2 and 3, Qwen3-Next, RecurrentGemma
        calls="rms_norm, weight + 1",
        methods=_rounded("gemma"),
        fits=_has_a_vector,
        fingerprints=("fc17404a67aa",),
        names=("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"),
        known=("forward", "_norm"),
    ),
)
