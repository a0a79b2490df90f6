"""The norm family's functionals: checks, then the kernels under autograd, or the formula where no kernel can run."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import autograd, checks, launch, rng
from ..core.admission import UNSEEN, keep
from . import launching, reference
from .function import Call, NormFunction
from .launching import Site
from .operators import operator_call, rule_of
from .reference import Kind, NormRule, Rounding, accumulator

__all__ = [
    "bias_dropout_add",
    "bias_dropout_add_ln",
    "bias_dropout_add_rms_norm",
    "check_constants",
    "check_sizes",
    "default_eps",
    "layer_norm",
    "rms_norm",
]

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
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else _shape("layer_norm", normalized_shape)
    return _call("layer_norm", "layer", shape, input, None, None, weight, bias, 0.0, eps, 0.0, "once", "sum", False,
                 out_dtype, None)[0]  # fmt: skip


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
        out_dtype: the output's dtype; None for the input's (see ``rounding``).
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
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else _shape("rms_norm", normalized_shape)
    return _call("rms_norm", "rms", shape, input, None, None, weight, None, 0.0, eps, weight_offset, rounding, "sum",
                 False, out_dtype, None)[0]  # fmt: skip


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
    return _call("bias_dropout_add", "none", None, x, bias, residual, None, None, p if training else _off(p), 0.0, 0.0,
                 "once", "sum", False, out_dtype, None)[0]  # fmt: skip


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
    twin_dtype: torch.dtype | None = None,
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
        twin_dtype: also return the output in this dtype, from the same pass: rows of a post-norm block, say, go to the
            next residual in fp32 and to linear layers in bf16. Both have gradients, which the backward adds.
    Returns:
        x's shape, in the promoted dtype of x, bias and residual. With ``return_sum`` and ``twin_dtype`` a tuple: the
        output, the sum, the twin, as far as they are asked for. An output that is of the twin's dtype is its twin.
    Raises:
        ValueError: a shape does not fit, p or eps is out of range; the message names it.
        TypeError: an argument is no floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: statistics in fp32 (fp64 for fp64), of the sum as rounded to its dtype. The backward draws the same mask
        again from the seed.
    Kept for backward: one tensor of x's size (see ``save``), and two numbers a row.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    y, z, twin = _call("bias_dropout_add_ln", "layer", None, x, bias, residual, weight, ln_bias,
                       p if training else _off(p), eps, 0.0, "once", save, return_sum, out_dtype,
                       twin_dtype)  # fmt: skip
    if twin is None:
        return (y, z) if return_sum else y
    return (y, z, twin) if return_sum else (y, twin)


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
    twin_dtype: torch.dtype | None = None,
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
        rounding: as in `rms_norm`.
        return_sum: also return the sum before the norm, as pre-norm blocks need.
        save: as in `bias_dropout_add_ln`.
        out_dtype: the output's dtype; None for the sum's (see ``rounding``).
        twin_dtype: also return the output in this dtype, as `bias_dropout_add_ln` does.
    Returns:
        As `bias_dropout_add_ln`.
    Raises:
        ValueError: a shape does not fit, p or eps is out of range, rounding unknown; the message names it.
        TypeError: an argument is no floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: as `bias_dropout_add_ln`.
    Kept for backward: one tensor of x's size (see ``save``), and one number a row.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    y, z, twin = _call("bias_dropout_add_rms_norm", "rms", None, x, bias, residual, weight, None,
                       p if training else _off(p), eps, weight_offset, rounding, save, return_sum, out_dtype,
                       twin_dtype)  # fmt: skip
    if twin is None:
        return (y, z) if return_sum else y
    return (y, z, twin) if return_sum else (y, twin)


# --- checks -------------------------------------------------------------------------------------------------------


def _check(op: str, shape: tuple[int, ...] | None, x: Tensor, bias: Tensor | None, residual: Tensor | None,
           weight: Tensor | None, ln_bias: Tensor | None, eps: float | None, weight_offset: float, rounding: str,
           save: str, out_dtype: torch.dtype | None, twin: torch.dtype | None) -> None:  # fmt: skip
    """All that can be wrong but p; ``shape`` is the normalised shape of a norm alone."""
    first, last = ("x", "ln_bias") if shape is None else ("input", "bias")
    checks.check_tensor(op, first, x)
    if shape is None:
        if x.dim() == 0:
            raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
        tail: tuple[int, ...] = tuple(x.shape[-1:])
    else:
        tail = shape
        if tuple(x.shape[-len(tail) :]) != tail:
            wanted = ", ".join(map(str, tail))
            raise ValueError(f"{op}: input has shape {tuple(x.shape)}, expected (*, {wanted})")
    if residual is not None:
        checks.check_tensor(op, "residual", residual, x)
        checks.check_shape(op, "residual", residual, tuple(x.shape))
    for name, value in (("bias", bias), ("weight", weight), (last, ln_bias)):
        if value is not None:
            checks.check_tensor(op, name, value, x)
            checks.check_shape(op, name, value, tail)
    check_constants(op, "rms" if "rms" in op else "layer", eps, weight_offset, rounding, save)
    checks.check_out_dtype(op, out_dtype)
    checks.check_out_dtype(op, twin, "twin_dtype")


def check_constants(op: str, kind: Kind, eps: Any, weight_offset: Any = 0.0, rounding: Any = "once",
                    save: Any = "sum") -> None:  # fmt: skip
    """What stays the same from call to call, but p; an RMSNorm's eps may be None."""
    if eps is not None or kind != "rms":
        checks.check_eps(op, eps)
    checks.check_number(op, "weight_offset", weight_offset)
    checks.check_choice(op, "rounding", rounding, _ROUNDINGS)
    checks.check_choice(op, "save", save, _SAVES)


def check_sizes(op: str, normalized_shape: Any) -> list[int]:
    """The sizes of a normalised shape that no tensor is there to be compared with yet."""
    shape = _shape(op, normalized_shape)
    for size in shape:
        # numbers.Integral as torch.nn: NumPy's integers are no int.
        if not isinstance(size, numbers.Integral):
            got = type(size).__name__
            raise TypeError(f"{op}: normalized_shape must be an int or a sequence of ints, got one of {got}")
        if size < 0:
            raise ValueError(f"{op}: normalized_shape must hold no negative size, got {shape}")
    return [int(size) for size in shape]


def _shape(op: str, normalized_shape: Any) -> tuple[int, ...]:
    if isinstance(normalized_shape, numbers.Integral):
        return (int(normalized_shape),)
    try:
        shape = tuple([int(size) if isinstance(size, Tensor) else size for size in normalized_shape])
    except TypeError:
        got = type(normalized_shape).__name__
        raise TypeError(f"{op}: normalized_shape must be an int or a sequence of ints, got {got}") from None
    if not shape:
        raise ValueError(f"{op}: normalized_shape must name at least one dimension, got ()")
    return shape


def _off(p: float) -> float:
    """No dropout, for a p that is still checked: a p out of range is an error in evaluation too."""
    return 0.0 if isinstance(p, (int, float)) and 0.0 <= p <= 1.0 else p


# --- dispatch -----------------------------------------------------------------------------------------------------

# The calls seen to be right, by all that checks and choice of kernel depend on; None for those the formula serves.
_admitted: dict[Any, Site | None] = {}
# A norm alone over at most so many elements is PyTorch's own on a GPU: both take a few microseconds there, and a
# native autograd node costs tens of microseconds less on the host than a Python one.
native_elements = 65536


def _call(op: str, kind: Kind, shape: tuple[int, ...] | None, x: Tensor, bias: Tensor | None, residual: Tensor | None,
          weight: Tensor | None, ln_bias: Tensor | None, p: float, eps: float | None, weight_offset: float,
          rounding: Rounding, save: str, return_sum: bool, out_dtype: torch.dtype | None,
          twin: torch.dtype | None) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Any member of the family: ``(y, z, y in the dtype twin)``, None what is not asked for.

    A call whose key was admitted before is not checked again: the key holds every shape, dtype, type and device that
    the checks look at.
    """
    if out_dtype is None and kind != "none" and torch.is_autocast_enabled("cuda"):
        out_dtype = autograd.autocast_dtype(f"aten::{kind}_norm", x, bias, residual)
    if torch.compiler.is_compiling():
        return _observed(op, kind, shape, x, bias, residual, weight, ln_bias, p, eps, weight_offset, rounding, save,
                         return_sum, out_dtype, twin)  # fmt: skip
    try:
        key = (
            op, kind, shape, eps, weight_offset, rounding, save, out_dtype, twin, type(x), x.dtype, x.device, x.is_neg(),
            x.shape[-1] if shape is None or len(shape) == 1 else x.shape[-len(shape) :],
            None if bias is None else (type(bias), bias.dtype, bias.device, bias.shape),
            None if residual is None else (type(residual), residual.dtype, residual.device, residual.shape == x.shape,
                                         residual.is_neg()),
            None if weight is None else (type(weight), weight.dtype, weight.device, weight.shape),
            None if ln_bias is None else (type(ln_bias), ln_bias.dtype, ln_bias.device, ln_bias.shape),
        )  # fmt: skip
        site = _admitted.get(key, UNSEEN)
    except (AttributeError, IndexError, TypeError, RuntimeError):
        key, site = None, UNSEEN  # something is wrong, and the checks say what; or a subclass that hides its device
    if site is UNSEEN or torch._C._len_torch_dispatch_stack() > 0:
        checks.check_p(op, p)
        _check(op, shape, x, bias, residual, weight, ln_bias, eps, weight_offset, rounding, save, out_dtype,
               twin)  # fmt: skip
        if not autograd.plain(x, bias, residual, weight, ln_bias):
            return _observed(op, kind, shape, x, bias, residual, weight, ln_bias, p, eps, weight_offset, rounding,
                             save, return_sum, out_dtype, twin)  # fmt: skip
        site = _admit(key, kind, shape, x, bias, residual, weight, ln_bias, eps, weight_offset, rounding, save,
                      out_dtype, twin)  # fmt: skip
    if p != 0.0 and not (type(p) is float and 0.0 <= p <= 1.0):
        checks.check_p(op, p)
    elements = x.numel()
    if site is None or elements == 0:
        return _composite(kind, shape, x, bias, residual, weight, ln_bias, p, eps, weight_offset, rounding, out_dtype,
                          twin)  # fmt: skip

    if shape is not None and elements <= native_elements and site.native and not torch.is_autocast_enabled("cuda"):
        if kind == "layer":
            return F.layer_norm(x, shape, weight, ln_bias, eps), None, None  # type: ignore[arg-type]
        return F.rms_norm(x, shape, weight, eps), None, None

    seed, threshold = (None, 0) if p == 0.0 else (rng.draw(x.device) if p < 1.0 else (0, 0), rng.threshold(p))
    if (
        torch.is_grad_enabled()
        and (
            x.requires_grad
            or (residual is not None and residual.requires_grad)
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
            or (ln_bias is not None and ln_bias.requires_grad)
        )
    ) or autograd.transforming():
        store_sum = _stores_sum(kind, save, return_sum, bias, residual, seed)
        y, z, low, _ = autograd.apply(NormFunction, x, bias, residual, weight, ln_bias,
                                      Call(site, seed, threshold, store_sum))  # fmt: skip
    else:
        y, z, low, _ = launching.forward(site, x, bias, residual, weight, ln_bias, seed, threshold, return_sum)
    return y, z, y if low is None and twin is not None else low


def _stores_sum(kind: str, save: str, return_sum: bool, bias: Tensor | None, residual: Tensor | None,
                seed: Any) -> bool:  # fmt: skip
    """Whether the forward writes the sum: it is asked for, or kept and not simply x."""
    if kind == "none":
        return False
    return return_sum or (save == "sum" and not (bias is None and residual is None and seed is None))


def _admit(key: Any, kind: Kind, shape: tuple[int, ...] | None, x: Tensor, bias: Tensor | None,
           residual: Tensor | None, weight: Tensor | None, ln_bias: Tensor | None, eps: float | None,
           weight_offset: float, rounding: Rounding, save: str, out_dtype: torch.dtype | None,
           twin: torch.dtype | None) -> Site | None:  # fmt: skip
    site = None
    # Tensors whose sign is still to be flipped (an imaginary part after conj) have other numbers in memory.
    lazy = x.is_neg() or (residual is not None and residual.is_neg())
    cols = x.shape[-1] if shape is None else math.prod(shape)
    if launch.runs_kernels(x.device.type) and not lazy and cols <= launch.LONGEST_ROW:
        if eps is None:
            eps = default_eps(reference.sum_dtype(x, bias, residual))
        site = launching.site_of(
            rule_of(kind, eps, weight_offset, rounding), cols, 1 if shape is None else len(shape), save, out_dtype,
            x.get_device(), x.dtype, *(None if t is None else t.dtype for t in (bias, residual, weight, ln_bias)), twin,
        )  # fmt: skip
    return keep(_admitted, key, site)


def _observed(op: str, kind: Kind, shape: tuple[int, ...] | None, x: Tensor, bias: Tensor | None,
              residual: Tensor | None, weight: Tensor | None, ln_bias: Tensor | None, p: float, eps: float | None,
              weight_offset: float, rounding: Rounding, save: str, return_sum: bool,
              out_dtype: torch.dtype | None,
              twin: torch.dtype | None) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Under torch.compile, a dispatch mode or a tensor subclass: one registered operator, which they can see."""
    checks.check_p(op, p)
    _check(op, shape, x, bias, residual, weight, ln_bias, eps, weight_offset, rounding, save, out_dtype, twin)
    cols = x.shape[-1] if shape is None else math.prod(shape)
    if not launch.runs_kernels(x.device.type) or not 0 < cols <= launch.LONGEST_ROW:
        return _composite(kind, shape, x, bias, residual, weight, ln_bias, p, eps, weight_offset, rounding, out_dtype,
                          twin)  # fmt: skip
    if eps is None:
        eps = default_eps(reference.sum_dtype(x, bias, residual))
    seed = None if p == 0.0 else rng.draw(x.device) if p < 1.0 else (0, 0)
    return operator_call(x, bias, residual, weight, ln_bias, seed, rng.threshold(p),
                         NormRule(kind, eps, weight_offset, rounding), cols, 1 if shape is None else len(shape), save,
                         _stores_sum(kind, save, return_sum, bias, residual, seed), out_dtype, twin)  # fmt: skip


def _composite(kind: Kind, shape: tuple[int, ...] | None, x: Tensor, bias: Tensor | None, residual: Tensor | None,
               weight: Tensor | None, ln_bias: Tensor | None, p: float, eps: float | None, weight_offset: float,
               rounding: Rounding, out_dtype: torch.dtype | None,
               twin: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The formula in PyTorch's operators, with the keep mask that `F.dropout` would draw on the CPU."""
    keep = None
    if p >= 1.0:
        keep = torch.zeros_like(x, dtype=torch.bool)
    elif p > 0.0:
        # The numbers that F.dropout draws for x + bias, whatever torch.func transform is in force.
        keep = F.dropout(torch.ones_like(x, dtype=reference.sum_dtype(x, bias, None)), p) != 0
    if eps is None:
        eps = default_eps(reference.sum_dtype(x, bias, residual))
    flat = x
    if shape is not None and len(shape) > 1:
        flat = x.flatten(-len(shape))
        weight, ln_bias = (None if t is None else t.flatten() for t in (weight, ln_bias))
    rule = NormRule(kind, eps, weight_offset, rounding)
    y, z = reference.forward(flat, bias, residual, weight, ln_bias, rule, keep=keep, keep_probability=1.0 - p,
                             out_dtype=out_dtype)  # fmt: skip
    # As from the kernels: neither is ever the caller's own tensor.
    y, z = (t.clone() if t is x else t for t in (y, z))
    y = y.view(x.shape) if flat is not x else y
    return y, z, None if twin is None else y.to(twin)
