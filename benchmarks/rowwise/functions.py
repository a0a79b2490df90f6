"""The functions that are timed, written as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops

__all__ = [
    "adaptive_layer_norm",
    "add_rms_norm_to_fp8_blocks",
    "add_rms_norm_to_fp8_blocks_by_hand",
    "cross_entropy",
    "dropout_add_layer_norm",
    "dropout_add_layer_norm_by_hand",
    "dynamic_tanh",
    "gated_residual_norm",
    "gated_rms_norm",
    "hyper_connection",
    "layer_scale",
    "masked_softmax",
    "norm_and_rotary",
    "normalized_residual",
    "per_head_rms_norm",
    "polynomial_norm",
    "qk_norm_rotary_grouped",
    "qk_norm_rotary_grouped_packed",
    "qk_norm_rotary_halves",
    "qk_norm_rotary_interleaved",
    "qk_norm_rotary_packed",
    "qk_norm_rotary_partial",
    "rms_norm_to_fp8",
    "rms_norm_to_fp8_by_hand",
    "router",
    "router_weights",
    "sinkhorn_of",
    "soft_capped_softmax",
    "swiglu_norm",
    "swiglu_to_fp8_blocks",
    "swiglu_to_fp8_blocks_by_hand",
]

_P = 0.1
_EPS = 1e-6
_SOFT_CAP = 50.0


def _rms_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, _EPS)


# --- norms with the operations around them --------------------------------------------------------


def dropout_add_layer_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor
) -> Tensor:
    """Computes the end of a post-norm block."""
    return F.layer_norm(F.dropout(x + bias, _P) + residual, (x.shape[-1],), weight, shift, 1e-5)


def dropout_add_layer_norm_by_hand(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor
) -> Tensor:
    """Computes the same by this package's hand-written operator."""
    out: Tensor = fusedops.bias_dropout_add_ln(x, bias, residual, weight, shift, p=_P)
    return out


def adaptive_layer_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Computes the norm of a diffusion transformer (Peebles and Xie 2023, arXiv:2212.09748)."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


def gated_residual_norm(
    x: Tensor, gamma: Tensor, residual: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes a gate, dropout, a sum and its RMSNorm; returns the norm and the sum."""
    z = residual + gamma * F.dropout(F.silu(x), _P)
    return F.rms_norm(z, z.shape[-1:], weight, _EPS), z


def layer_scale(
    x: Tensor, gamma: Tensor, residual: Tensor, weight: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes a scaled branch (Touvron et al. 2021, arXiv:2103.17239), a sum and its LayerNorm."""
    z = residual + gamma * x
    return F.layer_norm(z, z.shape[-1:], weight, shift), z


def swiglu_norm(packed: Tensor, weight: Tensor) -> Tensor:
    """Computes a packed gated unit (Shazeer 2020, arXiv:2002.05202), dropout and an RMSNorm."""
    gate, up = packed.chunk(2, -1)
    return F.rms_norm(F.dropout(F.silu(gate) * up, _P), up.shape[-1:], weight, _EPS)


def polynomial_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Computes PolyNorm (Zhuo et al. 2024, arXiv:2411.03884): the sum of the norms of three powers.

    Args:
        x: ``(..., N)``.
        weight: ``(3,)``, for the third, the second and the first power.
        bias: ``(1,)``.
    """
    third = weight[0] * _rms_norm(x**3)
    second = weight[1] * _rms_norm(x**2)
    return third + second + weight[2] * _rms_norm(x) + bias


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Computes DyT (Zhu et al. 2025, arXiv:2503.10622) instead of a norm; alpha is ``(1,)``."""
    return torch.tanh(alpha * x) * weight + bias


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    """Computes the gate of a state-space model and its norm (Dao and Gu 2024, arXiv:2405.21060)."""
    return _rms_norm(x * F.silu(z), weight)


def normalized_residual(h: Tensor, u: Tensor, a: Tensor) -> Tensor:
    """Computes the residual of nGPT (Loshchilov et al. 2024, arXiv:2410.01131)."""
    return F.normalize(h + a * (F.normalize(u, dim=-1) - h), dim=-1)


def per_head_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Computes an RMSNorm of each head, ``(..., H, D)``, with weights ``(H, D)``."""
    return _rms_norm(x) * weight


# --- queries and keys -----------------------------------------------------------------------------


def norm_and_rotary(q: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Computes QK-norm and rotary embeddings (Su et al. 2021, arXiv:2104.09864) in halves."""
    return _rotated_halves(F.rms_norm(q, q.shape[-1:], weight, _EPS), cos, sin)


def _rotated_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _rotated_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def _rotated_partly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated, rest = x.chunk(2, -1)
    return torch.cat((_rotated_halves(rotated, cos, sin), rest), -1)


def qk_norm_rotary_halves(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes `norm_and_rotary` of queries and keys, each ``(batch, length, heads, D)``.

    Cosines and sines have D columns.
    """
    q, k = _rms_norm(q, q_weight), _rms_norm(k, k_weight)
    return _rotated_halves(q, cos, sin), _rotated_halves(k, cos, sin)


def qk_norm_rotary_interleaved(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the same with pairs of neighbours rotated; cosines have D / 2 columns."""
    q, k = _rms_norm(q, q_weight), _rms_norm(k, k_weight)
    return _rotated_neighbours(q, cos, sin), _rotated_neighbours(k, cos, sin)


def qk_norm_rotary_partial(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the same with half of the columns rotated; cosines have D / 2 columns."""
    q, k = _rms_norm(q, q_weight), _rms_norm(k, k_weight)
    return _rotated_partly(q, cos, sin), _rotated_partly(k, cos, sin)


def qk_norm_rotary_packed(
    packed: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the same for queries and keys of a projection ``(batch, length, 3, heads, D)``."""
    q, k, v = packed.unbind(2)
    return (*qk_norm_rotary_halves(q, k, q_weight, k_weight, cos, sin), v)


def qk_norm_rotary_grouped_packed(
    packed: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the same for grouped queries, of a projection ``(batch, length, 6 * groups * D)``.

    A group has four heads of queries, one of keys and one of values.
    """
    size = q_weight.shape[0]
    group = packed.shape[-1] // 6
    q, k, v = packed.split((4 * group, group, group), -1)
    q, k, v = (t.view(*t.shape[:-1], -1, size) for t in (q, k, v))
    return (*qk_norm_rotary_halves(q, k, q_weight, k_weight, cos, sin), v)


def qk_norm_rotary_grouped(
    function: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """Calls `norm_and_rotary`, perhaps compiled, for queries, and for keys of fewer heads."""
    return function(q, q_weight, cos, sin), function(k, k_weight, cos, sin)


# --- scores and losses ----------------------------------------------------------------------------


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Computes attention weights with dropout."""
    return F.dropout(torch.softmax(scores.masked_fill(mask, float("-inf")), -1), _P)


def soft_capped_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Computes attention weights of soft-capped scores, as in Gemma 2 (2024, arXiv:2408.00118)."""
    capped = _SOFT_CAP * torch.tanh(scores / _SOFT_CAP)
    return torch.softmax(capped.masked_fill(mask, float("-inf")), -1)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Computes the cross-entropy of each row."""
    return F.cross_entropy(logits, target, reduction="none")


def router(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the eight experts of each token and their weights, as in Qwen3-MoE (2025)."""
    weights, indices = logits.float().softmax(-1).topk(8, dim=-1)
    return weights / weights.sum(-1, keepdim=True), indices


def router_weights(function: Callable[..., Any], logits: Tensor) -> Tensor:
    """Returns the router's weights, which have a gradient, and not the indices."""
    weights: Tensor = function(logits)[0]
    return weights


# --- streams of a residual ------------------------------------------------------------------------


def hyper_connection(x: Tensor, out: Tensor, mixing: Tensor, weights: Tensor) -> Tensor:
    """Mixes the streams of a residual, and adds a layer's output to each (arXiv:2409.19606)."""
    mixed = (mixing.float()[..., None] * x.float().unsqueeze(-3)).sum(-2)
    return (mixed + weights.float()[..., None] * out.float().unsqueeze(-2)).to(x.dtype)


def sinkhorn_of(steps: int) -> Callable[[Tensor], Tensor]:
    """Returns a function that normalises the rows and the columns of a small matrix in turn."""

    def sinkhorn(logits: Tensor) -> Tensor:
        matrix = logits.float().exp()
        for _ in range(steps):
            matrix = matrix / matrix.sum(-1, keepdim=True)
            matrix = matrix / matrix.sum(-2, keepdim=True)
        return matrix

    return sinkhorn


# --- quantised results ----------------------------------------------------------------------------

_FP8 = torch.float8_e4m3fn


def _quantised(y: Tensor) -> tuple[Tensor, Tensor]:
    """Divides by a scale for each row."""
    scales = (y.abs().amax(-1, keepdim=True) / torch.finfo(_FP8).max).clamp(min=1e-12)
    return (y * (1.0 / scales)).to(_FP8), scales


def _quantised_blocks(y: Tensor) -> tuple[Tensor, Tensor]:
    """Divides by a scale for each block of 128 columns."""
    values, scales = _quantised(y.unflatten(-1, (-1, 128)))
    return values.flatten(-2), scales.squeeze(-1)


def rms_norm_to_fp8(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the input of a product in fp8, with a scale for each row."""
    return _quantised(_rms_norm(x.float(), weight.float()))


def rms_norm_to_fp8_by_hand(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the same by this package's operator."""
    return fusedops.rms_norm(x, x.shape[-1], weight, _EPS, quantize=fusedops.quant.PerRow())


def add_rms_norm_to_fp8_blocks(
    x: Tensor, residual: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the end of a pre-norm block, and the input of a product in fp8."""
    z = residual + x
    return *_quantised_blocks(_rms_norm(z.float(), weight.float())), z


def add_rms_norm_to_fp8_blocks_by_hand(
    x: Tensor, residual: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the same by this package's operator."""
    form = fusedops.quant.PerBlock(128)
    return fusedops.add_rms_norm(x, residual, weight, _EPS, quantize=form)


def swiglu_to_fp8_blocks(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the input of an MLP's second product in fp8."""
    gate, up = packed.float().chunk(2, -1)
    return _quantised_blocks(F.silu(gate) * up)


def swiglu_to_fp8_blocks_by_hand(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the same by this package's operator."""
    return fusedops.swiglu(packed, quantize=fusedops.quant.PerBlock(128))
