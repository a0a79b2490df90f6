"""The norm family's functionals: each passes its constants and tensors to `core.calls.call`.

A call's constants are a `NormConstants`; `record` takes its fields in their order.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..compiler.quantising import Format
from ..core.calls.call import run
from ..core.calls.checks import check_p_off
from ..core.calls.words import record
from ..core.typevars import Returned, Summed
from .inplace import summed_into
from .operator import NORM, check_constants
from .quantised import quantised_norm
from .reference import Rounding
from .site import NormConstants

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "bias_dropout_add",
    "bias_dropout_add_ln",
    "bias_dropout_add_rms_norm",
    "check_constants",
    "check_sizes",
    "layer_norm",
    "rms_norm",
]

Save = Literal["sum", "output", "inputs"]


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
    quantize: Format[Returned, Any] | None = None,
) -> Returned:
    """Layer normalisation over the last dimensions; a drop-in for `torch.nn.functional.layer_norm`.

    Args:
        input: ``(*, *normalized_shape)``, fp16, bf16, fp32 or fp64; any strides.
        normalized_shape: the trailing dimensions to normalise over, or one int for the last.
        weight: ``normalized_shape``, or None for ones; its dtype may differ from the input's.
        bias: ``normalized_shape``, or None for zeros.
        eps: added to the variance, at least 0.
        out_dtype: the output's dtype; None for the input's, or fp32 under GPU autocast.
        quantize: a format of `fusedops.quant`: the result is quantised in the same pass. Then
            `out_dtype` is None, and normalised rows are one dimension.
    Returns:
        The input's shape.
        With ``quantize``, a tuple: the values, and their scales: see `fusedops.quant`.
    Raises:
        ValueError: a shape does not fit or eps is negative; the message names it.
        TypeError: an argument is not a floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: statistics in fp32 (fp64 for fp64 inputs), the variance by a second pass over the row;
    one rounding at the end. Saved for backward: the input, and two numbers per row. Source: Ba et
    al. 2016, arXiv:1607.06450.
    """
    if type(normalized_shape) is int:
        shape: tuple[int, ...] = (normalized_shape,)
    else:
        shape = _shape("layer_norm", normalized_shape)
    # The fields: op, kind, rounding, eps, weight_offset, shape, save, return_sum, out_dtype and
    # cast_dtype.
    constants = record(
        NormConstants,
        ("layer_norm", "layer", "once", eps, 0.0, shape, "sum", False, out_dtype, None),
    )
    if quantize is not None:
        return quantised_norm(  # type: ignore[return-value]
            constants, (input, None, None, weight, bias), quantize
        )
    return run(NORM, constants, (input, None, None, weight, bias))[0]  # type: ignore[no-any-return]


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    rounding: Rounding = "once",
    out_dtype: torch.dtype | None = None,
    quantize: Format[Returned, Any] | None = None,
) -> Returned:
    """Root-mean-square normalisation over the last dimensions.

    A drop-in for `torch.nn.functional.rms_norm`.

    Args:
        input: ``(*, *normalized_shape)``, fp16, bf16, fp32 or fp64; any strides.
        normalized_shape: the trailing dimensions to normalise over, or one int for the last.
        weight: ``normalized_shape``, or None for ones; its dtype may differ from the input's.
        eps: added to the mean square, at least 0; None for the machine epsilon of the statistics'
            dtype.
        weight_offset: added to the weight; 1.0 for Gemma's convention.
        rounding: "once" computes in fp32 and rounds once at the end, as `F.rms_norm` and Gemma's
            module do; "llama" and "t5" round where the Hugging Face modules of that name do. If the
            weight has a wider dtype than the input, their output has the wider dtype too.
        out_dtype: the output's dtype; None for the input's (see ``rounding``).
        quantize: a format of `fusedops.quant`: the result is quantised in the same pass. Then
            `out_dtype` is None, `rounding` is "once", and normalised rows are one dimension.
    Returns:
        The input's shape.
        With ``quantize``, a tuple: the values, and their scales: see `fusedops.quant`.
    Raises:
        ValueError: a shape does not fit, eps is negative or rounding unknown; the message names it.
        TypeError: an argument is not a floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: statistics in fp32 (fp64 for fp64 inputs).
    Saved for backward: the input, and one number per row.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    if type(normalized_shape) is int:
        shape: tuple[int, ...] = (normalized_shape,)
    else:
        shape = _shape("rms_norm", normalized_shape)
    # The fields: op, kind, rounding, eps, weight_offset, shape, save, return_sum, out_dtype and
    # cast_dtype.
    constants = record(
        NormConstants,
        ("rms_norm", "rms", rounding, eps, weight_offset, shape, "sum", False, out_dtype, None),
    )
    if quantize is not None:
        return quantised_norm(  # type: ignore[return-value]
            constants, (input, None, None, weight, None), quantize
        )
    return run(NORM, constants, (input, None, None, weight, None))[0]  # type: ignore[no-any-return]


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
        bias: ``(N,)`` added before dropout, or None; usually the bias of the linear layer before.
        residual: x's shape, or None.
        p: drop probability in [0, 1]; GPUs round it to a multiple of 2⁻¹⁶ and scale by the rounded
            keep probability.
        training: False turns dropout off.
        out_dtype: the output's dtype; None for the dtype to which PyTorch promotes the arguments.
    Returns:
        x's shape.
    Raises:
        ValueError: a shape does not fit or p is out of range; the message names it.
        TypeError: an argument is not a floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: computed in fp32 (fp64 for fp64 inputs), rounded once. The backward draws the same
    mask again from the seed. Saved for backward: nothing. Source: Srivastava et al. 2014,
    "Dropout"; Salmon et al. 2011 for the mask's generator, Philox.
    """
    # The fields: op, kind, rounding, eps, weight_offset, shape, save, return_sum, out_dtype and
    # cast_dtype.
    constants = record(
        NormConstants,
        ("bias_dropout_add", "none", "once", 0.0, 0.0, None, "sum", False, out_dtype, None),
    )
    tensors = (x, bias, residual, None, None)
    outputs = run(NORM, constants, tensors, p if training else check_p_off("bias_dropout_add", p))
    return outputs[0]  # type: ignore[no-any-return]


@overload
def bias_dropout_add_ln(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    ln_bias: Tensor | None,
    *,
    p: float,
    training: bool = ...,
    eps: float = ...,
    return_sum: Literal[False] = ...,
    save: Save = ...,
    out_dtype: torch.dtype | None = ...,
    cast_dtype: None = ...,
) -> Tensor: ...
@overload
def bias_dropout_add_ln(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    ln_bias: Tensor | None,
    *,
    p: float,
    training: bool = ...,
    eps: float = ...,
    return_sum: Literal[True],
    save: Save = ...,
    out_dtype: torch.dtype | None = ...,
    cast_dtype: None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def bias_dropout_add_ln(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    ln_bias: Tensor | None,
    *,
    p: float,
    training: bool = ...,
    eps: float = ...,
    return_sum: Literal[False] = ...,
    save: Save = ...,
    out_dtype: torch.dtype | None = ...,
    cast_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]: ...
@overload
def bias_dropout_add_ln(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    ln_bias: Tensor | None,
    *,
    p: float,
    training: bool = ...,
    eps: float = ...,
    return_sum: Literal[True],
    save: Save = ...,
    out_dtype: torch.dtype | None = ...,
    cast_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def bias_dropout_add_ln(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    ln_bias: Tensor | None,
    *,
    p: float,
    training: bool = ...,
    eps: float = ...,
    return_sum: bool = ...,
    save: Save = ...,
    out_dtype: torch.dtype | None = ...,
    cast_dtype: torch.dtype | None = ...,
) -> Tensor | tuple[Tensor, ...]: ...
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
    cast_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """``layer_norm(dropout(x + bias) + residual)`` in one pass.

    Args:
        x: ``(*, N)``, fp16, bf16, fp32 or fp64; any strides.
        bias: ``(N,)`` added before dropout, or None; usually the bias of the linear layer before.
        residual: x's shape, or None.
        weight: ``(N,)`` of the norm, or None for ones.
        ln_bias: ``(N,)`` of the norm, or None for zeros.
        p: drop probability in [0, 1]; GPUs round it to a multiple of 2⁻¹⁶ and scale by the rounded
            keep probability.
        training: False turns dropout off.
        eps: added to the variance, at least 0.
        return_sum: also return the pre-norm sum, as pre-norm blocks need.
        save: what is saved for the backward. "sum" saves the pre-norm sum and is always correct.
            "output" saves the output, which the next layer usually saves anyway, and the backward
            inverts the affine: the forward writes one tensor less, but a weight of zero gets no
            gradient, small weights reduce precision, and the output must not be changed in place.
            "inputs" saves x, bias and residual.
        out_dtype: the output's dtype; None for the pre-norm sum's, or fp32 under GPU autocast.
        cast_dtype: also return the output cast to this dtype, from the same pass. For example, a
            post-norm block passes its output to the next residual in fp32 and to linear layers in
            bf16. The backward adds both gradients.
    Returns:
        x's shape, in the promoted dtype of x, bias and residual. With ``return_sum`` or
        ``cast_dtype`` a tuple: the output, then the pre-norm sum if ``return_sum``, then the cast
        output if ``cast_dtype``. An output that has ``cast_dtype`` already is returned twice.
    Raises:
        ValueError: a shape does not fit, p or eps is out of range; the message names it.
        TypeError: an argument is not a floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: statistics in fp32 (fp64 for fp64 inputs), of the pre-norm sum, rounded to its dtype.
        The backward draws the same mask again from the seed.
    Saved for backward: the tensors of ``save``, and two numbers per row.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    op = "bias_dropout_add_ln"
    # The fields: op, kind, rounding, eps, weight_offset, shape, save, return_sum, out_dtype and
    # cast_dtype.
    constants = record(
        NormConstants,
        (op, "layer", "once", eps, 0.0, None, save, return_sum, out_dtype, cast_dtype),
    )
    tensors = (x, bias, residual, weight, ln_bias)
    outputs = run(NORM, constants, tensors, p if training else check_p_off(op, p))
    if cast_dtype is None and not return_sum:
        return outputs[0]  # type: ignore[no-any-return]
    return _several(outputs, return_sum, cast_dtype)


@overload
def bias_dropout_add_rms_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    p: float,
    training: bool = ...,
    eps: float | None = ...,
    weight_offset: float = ...,
    rounding: Rounding = ...,
    return_sum: Literal[False] = ...,
    save: Save = ...,
    out_dtype: torch.dtype | None = ...,
    cast_dtype: None = ...,
) -> Tensor: ...
@overload
def bias_dropout_add_rms_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    p: float,
    training: bool = ...,
    eps: float | None = ...,
    weight_offset: float = ...,
    rounding: Rounding = ...,
    return_sum: Literal[True],
    save: Save = ...,
    out_dtype: torch.dtype | None = ...,
    cast_dtype: None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def bias_dropout_add_rms_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    p: float,
    training: bool = ...,
    eps: float | None = ...,
    weight_offset: float = ...,
    rounding: Rounding = ...,
    return_sum: Literal[False] = ...,
    save: Save = ...,
    out_dtype: torch.dtype | None = ...,
    cast_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]: ...
@overload
def bias_dropout_add_rms_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    p: float,
    training: bool = ...,
    eps: float | None = ...,
    weight_offset: float = ...,
    rounding: Rounding = ...,
    return_sum: Literal[True],
    save: Save = ...,
    out_dtype: torch.dtype | None = ...,
    cast_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def bias_dropout_add_rms_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    p: float,
    training: bool = ...,
    eps: float | None = ...,
    weight_offset: float = ...,
    rounding: Rounding = ...,
    return_sum: bool = ...,
    save: Save = ...,
    out_dtype: torch.dtype | None = ...,
    cast_dtype: torch.dtype | None = ...,
) -> Tensor | tuple[Tensor, ...]: ...
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
    cast_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """``rms_norm(dropout(x + bias) + residual)`` in one pass.

    Args:
        x: ``(*, N)``, fp16, bf16, fp32 or fp64; any strides.
        bias: ``(N,)`` added before dropout, or None.
        residual: x's shape, or None.
        weight: ``(N,)`` of the norm, or None for ones.
        p: drop probability in [0, 1]; GPUs round it to a multiple of 2⁻¹⁶ and scale by the rounded
            keep probability.
        training: False turns dropout off.
        eps: added to the mean square, at least 0; None for the machine epsilon of the statistics'
            dtype.
        weight_offset: added to the weight; 1.0 for Gemma's convention.
        rounding: as in `rms_norm`.
        return_sum: also return the pre-norm sum, as pre-norm blocks need.
        save: as in `bias_dropout_add_ln`.
        out_dtype: the output's dtype; None for the pre-norm sum's (see ``rounding``).
        cast_dtype: as in `bias_dropout_add_ln`.
    Returns:
        The same as `bias_dropout_add_ln`.
    Raises:
        ValueError: a shape does not fit, p or eps is out of range, rounding unknown; the message
            names it.
        TypeError: an argument is not a floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: as `bias_dropout_add_ln`.
    Saved for backward: the tensors of ``save``, and one number per row.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    op = "bias_dropout_add_rms_norm"
    # The fields: op, kind, rounding, eps, weight_offset, shape, save, return_sum, out_dtype and
    # cast_dtype.
    constants = record(
        NormConstants,
        (op, "rms", rounding, eps, weight_offset, None, save, return_sum, out_dtype, cast_dtype),
    )
    tensors = (x, bias, residual, weight, None)
    outputs = run(NORM, constants, tensors, p if training else check_p_off(op, p))
    if cast_dtype is None and not return_sum:
        return outputs[0]  # type: ignore[no-any-return]
    return _several(outputs, return_sum, cast_dtype)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
    quantize: Format[Any, Summed] | None = None,
    out: Tensor | None = None,
) -> Summed:
    """``layer_norm(x + residual)`` and the sum, in one pass.

    For the residual additions of a pre-norm block. The same as `bias_dropout_add_ln` with
    ``p=0.0``, ``bias=None`` and ``return_sum=True``.

    Args:
        x: ``(*, N)``, the branch's output; fp16, bf16, fp32 or fp64; any strides.
        residual: x's shape, the residual stream.
        weight: ``(N,)`` of the norm, or None for ones.
        bias: ``(N,)`` of the norm, or None for zeros.
        eps: added to the variance, at least 0.
        out_dtype: the normalised output's dtype; None for the sum's, or fp32 under GPU autocast.
        quantize: as in `layer_norm`, for the normalised sum.
        out: as in `add_rms_norm`.
    Returns:
        The normalised sum, then the sum: both x's shape. The sum is in the promoted dtype of x and
            residual, or ``out``.
            With ``quantize``, the values, their scales, then the sum.
    Raises:
        ValueError: a shape does not fit or eps is negative; the message names it. ``out`` is not
            contiguous, or shares other memory with an argument.
        TypeError: an argument is not a floating-point tensor; ``out`` has another dtype.
        RuntimeError: an argument is on another device; one requires a gradient, with ``out``.
    Numerics: as `bias_dropout_add_ln`.
    Saved for backward: the sum, and two numbers per row.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    if residual is None:
        _refuse_residual("add_layer_norm")
    # The fields: op, kind, rounding, eps, weight_offset, shape, save, return_sum, out_dtype and
    # cast_dtype.
    constants = record(
        NormConstants,
        ("add_layer_norm", "layer", "once", eps, 0.0, None, "sum", True, out_dtype, None),
    )
    tensors = (x, None, residual, weight, bias)
    if out is not None:
        return summed_into(constants, tensors, quantize, out)  # type: ignore[return-value]
    if quantize is not None:
        return quantised_norm(constants, tensors, quantize)  # type: ignore[return-value]
    return run(NORM, constants, tensors)[:2]  # type: ignore[no-any-return]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    rounding: Rounding = "once",
    out_dtype: torch.dtype | None = None,
    quantize: Format[Any, Summed] | None = None,
    out: Tensor | None = None,
) -> Summed:
    """``rms_norm(x + residual)`` and the sum, in one pass.

    For the residual additions of a Llama block. The same as `bias_dropout_add_rms_norm` with
    ``p=0.0``, ``bias=None`` and ``return_sum=True``.

    Args:
        x: ``(*, N)``, the branch's output; fp16, bf16, fp32 or fp64; any strides.
        residual: x's shape, the residual stream.
        weight: ``(N,)`` of the norm, or None for ones.
        eps: added to the mean square, at least 0; None for the machine epsilon of the statistics'
            dtype.
        weight_offset: added to the weight; 1.0 for Gemma's convention.
        rounding: as in `rms_norm`; "llama" gives the same bits as the Llama of Hugging Face.
        out_dtype: the normalised output's dtype; None for the sum's (see ``rounding``).
        quantize: as in `rms_norm`, for the normalised sum.
        out: a contiguous tensor of the sum's shape and dtype that the sum is written to: the
            residual itself, to update it in place; x; or a tensor that shares no memory with the
            arguments. No argument may need a gradient then. None for a new tensor.
    Returns:
        The normalised sum, then the sum: both x's shape. The sum is in the promoted dtype of x and
            residual, or ``out``.
            With ``quantize``, the values, their scales, then the sum.
    Raises:
        ValueError: a shape does not fit, eps is negative or rounding unknown; the message names it.
            ``out`` is not contiguous, or shares other memory with an argument.
        TypeError: an argument is not a floating-point tensor; ``out`` has another dtype.
        RuntimeError: an argument is on another device; one requires a gradient, with ``out``.
    Numerics: as `bias_dropout_add_ln`.
    Saved for backward: the sum, and one number per row.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    if residual is None:
        _refuse_residual("add_rms_norm")
    # The fields: op, kind, rounding, eps, weight_offset, shape, save, return_sum, out_dtype and
    # cast_dtype.
    constants = record(
        NormConstants,
        ("add_rms_norm", "rms", rounding, eps, weight_offset, None, "sum", True, out_dtype, None),
    )
    tensors = (x, None, residual, weight, None)
    if out is not None:
        return summed_into(constants, tensors, quantize, out)  # type: ignore[return-value]
    if quantize is not None:
        return quantised_norm(constants, tensors, quantize)  # type: ignore[return-value]
    return run(NORM, constants, tensors)[:2]  # type: ignore[no-any-return]


def _refuse_residual(op: str) -> None:
    """Raises a TypeError: the operator accepts None, but functions that add need a residual."""
    raise TypeError(f"{op}: residual must be a torch.Tensor, got NoneType")


def _several(outputs: Any, return_sum: bool, cast_dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    """Returns the outputs that the caller asked for.

    If the output has ``cast_dtype`` already, there is no copy, and the output is returned twice.
    """
    y, z, cast = outputs[:3]
    returned = (y, z) if return_sum else (y,)
    if cast_dtype is None:
        return returned
    return (*returned, y if cast is None else cast)


# --- shapes ---------------------------------------------------------------------------------------


def check_sizes(op: str, normalized_shape: Any) -> list[int]:
    """Returns the sizes of a module's normalised shape, checked without an input."""
    shape = _shape(op, normalized_shape)
    if any(size < 0 for size in shape):
        raise ValueError(f"{op}: normalized_shape must hold no negative size, got {shape}")
    return list(shape)


def _shape(op: str, normalized_shape: Any) -> tuple[int, ...]:
    """Returns a normalised shape as a tuple of ints."""
    if isinstance(normalized_shape, numbers.Integral):
        return (_size(op, normalized_shape),)
    sizes = None
    # A string is a sequence too, but the error would name its first item's type.
    if not isinstance(normalized_shape, (str, bytes, bytearray)):
        with contextlib.suppress(TypeError):
            sizes = tuple(normalized_shape)
    if sizes is None:
        got = type(normalized_shape).__name__
        raise TypeError(f"{op}: normalized_shape must be an int or a sequence of ints, got {got}")
    if not sizes:
        raise ValueError(f"{op}: normalized_shape must name at least one dimension, got ()")
    return tuple([size if type(size) is int else _size(op, size) for size in sizes])


def _size(op: str, size: Any) -> int:
    """Returns one size of a normalised shape as an int; raises if it is not a whole number."""
    # numbers.Integral as in torch.nn, because NumPy's integers are not of type int. A boolean is of
    # type int, but as a size it is a mistake.
    is_whole = isinstance(size, (numbers.Integral, torch.SymInt)) and not isinstance(size, bool)
    if is_whole or (isinstance(size, Tensor) and not size.is_floating_point()):
        return int(size)
    got = type(size).__name__
    raise TypeError(
        f"{op}: normalized_shape must be an int or a sequence of ints, got one of {got}"
    )
