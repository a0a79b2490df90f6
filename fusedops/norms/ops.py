"""The norm family's functionals: checks, then the kernels under autograd, or the formula where no kernel can run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..core import autograd, checks, launch, rng
from . import launching, reference
from .function import Call, NormFunction
from .launching import Options
from .operators import operator_call
from .reference import Kind, NormRule, Rounding, accumulator

__all__ = ["bias_dropout_add", "bias_dropout_add_ln", "bias_dropout_add_rms_norm", "default_eps", "layer_norm", "rms_norm"]

Save = Literal["sum", "output", "inputs"]

_ROUNDINGS = ("once", "llama", "t5", "gemma")
_SAVES = ("sum", "output", "inputs")


def default_eps(dtype: torch.dtype) -> float:
    """The eps that `F.rms_norm` takes for None: the machine epsilon of the dtype in which it computes."""
    return torch.finfo(accumulator(dtype)).eps


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Layer normalisation over the last dimensions; a drop-in for `torch.nn.functional.layer_norm`.

    Args:
        input: ``(*, *normalized_shape)``, fp16, bf16, fp32 or fp64; any strides.
        normalized_shape: the trailing dimensions to normalise over, or one int for the last.
        weight: ``normalized_shape``, or None for ones; its dtype may differ from the input's.
        bias: ``normalized_shape``, or None for zeros.
        eps: added to the variance, at least 0.
        out_dtype: the output's dtype; None for the input's, or fp32 under GPU autocast.
    Returns:
        The input's shape.
    Raises:
        ValueError: a shape does not fit or eps is negative; the message names it.
        TypeError: an argument is no floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: statistics in fp32 (fp64 for fp64), the variance by a second pass over the row; one rounding at the end.
    Kept for backward: the input, and two numbers a row.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    shape = _check_norm("layer_norm", input, normalized_shape, weight, bias, eps, out_dtype)
    return _norm("layer", input, weight, bias, shape, eps, 0.0, "once", out_dtype)


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    rounding: Rounding = "once",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Root-mean-square normalisation over the last dimensions; a drop-in for `torch.nn.functional.rms_norm`.

    Args:
        input: ``(*, *normalized_shape)``, fp16, bf16, fp32 or fp64; any strides.
        normalized_shape: the trailing dimensions to normalise over, or one int for the last.
        weight: ``normalized_shape``, or None for ones; its dtype may differ from the input's.
        eps: added to the mean square, at least 0; None for the machine epsilon of the statistics' dtype.
        weight_offset: added to the weight; 1.0 for Gemma's convention.
        rounding: "once", all in fp32 with one rounding at the end; "llama", "t5" and "gemma" round where the Hugging
            Face modules of that name round, and "llama" and "t5" give a wider output under a wider weight, as they do.
        out_dtype: the output's dtype; None for the input's (see ``rounding``), or fp32 under GPU autocast.
    Returns:
        The input's shape.
    Raises:
        ValueError: a shape does not fit, eps is negative or rounding unknown; the message names it.
        TypeError: an argument is no floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: statistics in fp32 (fp64 for fp64).
    Kept for backward: the input, and one number a row.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    shape = _check_norm("rms_norm", input, normalized_shape, weight, None, eps, out_dtype)
    if rounding != "once":
        checks.check_choice("rms_norm", "rounding", rounding, _ROUNDINGS)
    if eps is None:
        eps = default_eps(input.dtype)
    return _norm("rms", input, weight, None, shape, eps, weight_offset, rounding, out_dtype)


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    p: float,
    training: bool = True,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``dropout(x + bias) + residual`` in one pass.

    Args:
        x: ``(*, N)``, fp16, bf16, fp32 or fp64; any strides.
        bias: ``(N,)`` added before dropout, or None; as a rule the bias of the linear layer that made x.
        residual: x's shape, or None.
        p: drop probability in [0, 1]; on GPUs to the nearest 2⁻¹⁶, and the scale is one over what is really kept.
        training: False turns dropout off.
        out_dtype: the output's dtype; None for PyTorch's promotion of the arguments.
    Returns:
        x's shape.
    Raises:
        ValueError: a shape does not fit or p is out of range; the message names it.
        TypeError: an argument is no floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: computed in fp32 (fp64 for fp64), rounded once. The backward draws the same mask again from the seed.
    Kept for backward: nothing.
    Source: Srivastava et al. 2014, "Dropout"; Salmon et al. 2011 for the mask's generator, Philox.
    """
    op = "bias_dropout_add"
    _check_fused(op, x, bias, residual, None, None, p, 0.0, out_dtype)
    rule = _rule("none", 0.0, 0.0, "once")
    return _fused(x, bias, residual, None, None, p if training else 0.0, rule, "sum", False, out_dtype)[0]


def bias_dropout_add_ln(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    ln_bias: Tensor | None,
    *,
    p: float,
    training: bool = True,
    eps: float = 1e-5,
    return_sum: bool = False,
    save: Save = "sum",
    out_dtype: torch.dtype | None = None,
) -> Any:
    """``layer_norm(dropout(x + bias) + residual)`` in one pass.

    Args:
        x: ``(*, N)``, fp16, bf16, fp32 or fp64; any strides.
        bias: ``(N,)`` added before dropout, or None; as a rule the bias of the linear layer that made x.
        residual: x's shape, or None.
        weight: ``(N,)`` of the norm, or None for ones.
        ln_bias: ``(N,)`` of the norm, or None for zeros.
        p: drop probability in [0, 1]; on GPUs to the nearest 2⁻¹⁶, and the scale is one over what is really kept.
        training: False turns dropout off.
        eps: added to the variance, at least 0.
        return_sum: also return the sum before the norm, as pre-norm blocks need.
        save: the one tensor kept for backward. "sum" always works. "output" keeps the output, which the next layer as
            a rule keeps anyway, and inverts the affine: the forward writes one tensor less, but columns whose weight
            is zero get no weight gradient, small weights lose precision, and the output must not be changed in place.
            "inputs" keeps x, bias and residual.
        out_dtype: the output's dtype; None for the sum's, or fp32 under GPU autocast.
    Returns:
        x's shape, in the promoted dtype of x, bias and residual; with ``return_sum`` also the sum, a tuple.
    Raises:
        ValueError: a shape does not fit, p or eps is out of range; the message names it.
        TypeError: an argument is no floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: statistics in fp32 (fp64 for fp64), of the sum before it is rounded. The backward draws the same mask
        again from the seed.
    Kept for backward: one tensor of x's size (see ``save``), and two numbers a row.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    op = "bias_dropout_add_ln"
    _check_fused(op, x, bias, residual, weight, ln_bias, p, eps, out_dtype)
    if save != "sum":
        checks.check_choice(op, "save", save, _SAVES)
    rule = _rule("layer", eps, 0.0, "once")
    y, z = _fused(x, bias, residual, weight, ln_bias, p if training else 0.0, rule, save, return_sum, out_dtype)
    return (y, z) if return_sum else y


def bias_dropout_add_rms_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    p: float,
    training: bool = True,
    eps: float | None = None,
    weight_offset: float = 0.0,
    rounding: Rounding = "once",
    return_sum: bool = False,
    save: Save = "sum",
    out_dtype: torch.dtype | None = None,
) -> Any:
    """``rms_norm(dropout(x + bias) + residual)`` in one pass.

    Args:
        x: ``(*, N)``, fp16, bf16, fp32 or fp64; any strides.
        bias: ``(N,)`` added before dropout, or None.
        residual: x's shape, or None.
        weight: ``(N,)`` of the norm, or None for ones.
        p: drop probability in [0, 1]; on GPUs to the nearest 2⁻¹⁶, and the scale is one over what is really kept.
        training: False turns dropout off.
        eps: added to the mean square, at least 0; None for the machine epsilon of the statistics' dtype.
        weight_offset: added to the weight; 1.0 for Gemma's convention.
        rounding: as in `rms_norm`; other than "once" also rounds the sum to its dtype before the norm.
        return_sum: also return the sum before the norm, as pre-norm blocks need.
        save: as in `bias_dropout_add_ln`.
        out_dtype: the output's dtype; None for the sum's, or fp32 under GPU autocast.
    Returns:
        x's shape, in the promoted dtype of x, bias and residual; with ``return_sum`` also the sum, a tuple.
    Raises:
        ValueError: a shape does not fit, p or eps is out of range, rounding unknown; the message names it.
        TypeError: an argument is no floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: as `bias_dropout_add_ln`.
    Kept for backward: one tensor of x's size (see ``save``), and one number a row.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    op = "bias_dropout_add_rms_norm"
    _check_fused(op, x, bias, residual, weight, None, p, eps, out_dtype)
    if save != "sum":
        checks.check_choice(op, "save", save, _SAVES)
    if rounding != "once":
        checks.check_choice(op, "rounding", rounding, _ROUNDINGS)
    if eps is None:
        eps = default_eps(reference.sum_dtype(x, bias, residual))
    rule = _rule("rms", eps, weight_offset, rounding)
    y, z = _fused(x, bias, residual, weight, None, p if training else 0.0, rule, save, return_sum, out_dtype)
    return (y, z) if return_sum else y


# --- checks -------------------------------------------------------------------------------------------------------


def _check_norm(op: str, input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None,
                bias: Tensor | None, eps: float | None, out_dtype: torch.dtype | None) -> tuple[int, ...]:  # fmt: skip
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    checks.check_tensor(op, "input", input)
    if not shape:
        raise ValueError(f"{op}: normalized_shape must name at least one dimension, got ()")
    if input.shape[-len(shape) :] != shape:
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{op}: input has shape {tuple(input.shape)}, expected (*, {wanted})")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            checks.check_tensor(op, name, value, input)
            checks.check_shape(op, name, value, shape)
    if eps is not None:
        checks.check_eps(op, eps)
    if out_dtype is not None:
        checks.check_out_dtype(op, out_dtype)
    return shape


def _check_fused(op: str, x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None,
                 ln_bias: Tensor | None, p: float, eps: float | None, out_dtype: torch.dtype | None) -> None:  # fmt: skip
    checks.check_tensor(op, "x", x)
    shape = x.shape
    if not shape:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    if residual is not None:
        checks.check_tensor(op, "residual", residual, x)
        checks.check_shape(op, "residual", residual, shape)
    for name, value in (("bias", bias), ("weight", weight), ("ln_bias", ln_bias)):
        if value is not None:
            checks.check_tensor(op, name, value, x)
            checks.check_shape(op, name, value, shape[-1:])
    checks.check_p(op, p)
    if eps is not None:
        checks.check_eps(op, eps)
    if out_dtype is not None:
        checks.check_out_dtype(op, out_dtype)


# --- dispatch -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def rule_of(kind: Kind, eps: float, weight_offset: float, rounding: Rounding) -> NormRule:
    """The one rule object for these constants."""
    return NormRule(kind, eps, weight_offset, rounding)


def _rule(kind: Kind, eps: float, weight_offset: float, rounding: Rounding) -> NormRule:
    # torch.compile does not trace caches.
    make = NormRule if torch.compiler.is_compiling() else rule_of
    return make(kind, eps, weight_offset, rounding)


@functools.lru_cache(maxsize=4096)
def options_of(rule: NormRule, cols: int, dims: int, save: str, store_sum: bool,
             out_dtype: torch.dtype | None) -> Options:  # fmt: skip
    """The one options object for these choices."""
    return Options(rule, cols, dims, save, store_sum, out_dtype)


def _norm(kind: Kind, input: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...], eps: float,
          weight_offset: float, rounding: Rounding, out_dtype: torch.dtype | None) -> Tensor:  # fmt: skip
    """A norm alone: the sum is the input itself."""
    device_type = input.device.type
    if out_dtype is None:
        out_dtype = autograd.autocast_dtype(device_type, input.dtype)
    rule = _rule(kind, eps, weight_offset, rounding)
    cols = shape[0] if len(shape) == 1 else functools.reduce(lambda a, b: a * b, shape)
    if not launch.runs_kernels(device_type) or input.numel() == 0:
        dims = len(shape)
        if dims > 1:
            weight, bias = (None if t is None else t.reshape(cols) for t in (weight, bias))
        flat = input.flatten(-dims) if dims > 1 else input
        y, _ = reference.forward(flat, None, None, weight, bias, rule, out_dtype=out_dtype)
        return y.view(input.shape) if dims > 1 else y
    y, _ = _kernels(input, None, None, weight, bias, None, 0, rule, cols, len(shape), "sum", False, out_dtype)
    return y


def _fused(x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None, ln_bias: Tensor | None,
           p: float, rule: NormRule, save: str, return_sum: bool,
           out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    device = x.device
    if out_dtype is None and rule.kind != "none":
        out_dtype = autograd.autocast_dtype(device.type, reference.sum_dtype(x, bias, residual))
    if not launch.runs_kernels(device.type) or x.numel() == 0:
        return _composite(x, bias, residual, weight, ln_bias, p, rule, out_dtype)
    seed = rng.draw(device) if 0.0 < p < 1.0 else (0, 0) if p > 0.0 else None
    if rule.kind == "none" and out_dtype is None:
        return_sum = False
    unchanged = bias is None and residual is None and seed is None
    store_sum = rule.kind != "none" and (return_sum or (save == "sum" and not unchanged))
    y, z = _kernels(x, bias, residual, weight, ln_bias, seed, rng.threshold(p), rule, x.shape[-1], 1, save, store_sum,
                    out_dtype)  # fmt: skip
    return y, z


def _composite(x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None, ln_bias: Tensor | None,
               p: float, rule: NormRule, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The formula in PyTorch's operators, with the keep mask that `F.dropout` would draw on the CPU."""
    keep = None
    if p >= 1.0:
        keep = torch.zeros_like(x, dtype=torch.bool)
    elif p > 0.0:
        keep = torch.empty_like(x, dtype=reference.sum_dtype(x, bias, None)).bernoulli_(1.0 - p)
    return reference.forward(x, bias, residual, weight, ln_bias, rule, keep=keep, keep_probability=1.0 - p,
                             out_dtype=out_dtype)  # fmt: skip


def _kernels(x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None, ln_bias: Tensor | None,
             seed: rng.Seed | None, threshold: int, rule: NormRule, cols: int, dims: int, save: str, store_sum: bool,
             out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Through the light autograd Function where nobody looks on, through the registered operators otherwise."""
    if not autograd.plain(x, bias, residual, weight, ln_bias):
        return operator_call(x, bias, residual, weight, ln_bias, seed, threshold, rule, cols, dims, save, store_sum,
                             out_dtype)  # fmt: skip
    options = options_of(rule, cols, dims, save, store_sum, out_dtype)
    if autograd.differentiates(x, bias, residual, weight, ln_bias):
        y, z, _ = autograd.apply(NormFunction, x, bias, residual, weight, ln_bias, Call(seed, threshold, options))
        return y, z
    y, z, _ = launching.forward(x, bias, residual, weight, ln_bias, seed, threshold, options)
    return y, z
