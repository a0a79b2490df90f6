"""The slices family's functionals.

Each passes its constants, a `SliceConstants`, and its tensors to `core.calls.call`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, index, itemgetter
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..core.activations import ActivationName
from ..core.calls.call import run
from ..core.calls.checks import check_tensor
from ..core.calls.words import record
from .operator import ACTIVATION_NAMES, SLICES
from .site import SliceConstants

__all__ = [
    "ACTIVATION_NAMES",
    "SliceActivation",
    "batched_layer_norm_act",
    "batched_layer_norm_tanh",
    "check_sizes",
]

# "none" is another name of "identity".
SliceActivation = ActivationName | Literal["none"]


@overload
def batched_layer_norm_act(
    slices: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    sizes: Sequence[int] | None = ...,
    activation: SliceActivation = ...,
    concat: bool = ...,
) -> Tensor: ...
@overload
def batched_layer_norm_act(
    slices: Sequence[Tensor],
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    sizes: Sequence[int] | None = ...,
    activation: SliceActivation = ...,
    concat: Literal[False] = ...,
) -> tuple[Tensor, ...]: ...
@overload
def batched_layer_norm_act(
    slices: Sequence[Tensor],
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    sizes: Sequence[int] | None = ...,
    activation: SliceActivation = ...,
    concat: Literal[True],
) -> Tensor: ...
@overload
def batched_layer_norm_act(
    slices: Tensor | Sequence[Tensor],
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    sizes: Sequence[int] | None = ...,
    activation: SliceActivation = ...,
    concat: bool = ...,
) -> Tensor | tuple[Tensor, ...]: ...
def batched_layer_norm_act(
    slices: Tensor | Sequence[Tensor],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    sizes: Sequence[int] | None = None,
    activation: SliceActivation = "tanh",
    concat: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """``activation(layer_norm(slice))`` for many slices of features in one launch.

    The backward takes at most two launches.

    Args:
        slices: the K slices, fp16, bf16, fp32 or fp64, in one of three forms: one tensor ``(*, K,
            D)``; one tensor ``(*, ΣD_k)`` with ``sizes``; or a sequence of K tensors ``(*, D_k)``
            of one dtype, which are read in place. Any strides.
        weight: the weights of the norms: ``(ΣD_k,)``; or ``(K, D)`` if all widths are D; or
            ``(D,)``, which all slices share. None stands for ones. The dtype may differ from the
            slices'.
        bias: as ``weight``; None stands for zeros.
        eps: added to the variance, at least 0.
        sizes: the widths D_k of the slices of one tensor ``(*, ΣD_k)``. Without it the last two
            dimensions of one tensor are K and D.
        activation: the activation after the norm: "tanh", "sigmoid", "relu", "relu_squared",
            "gelu", "gelu_tanh", "quick_gelu", "silu", or "identity" ("none").
        concat: return one tensor with the slices side by side, ``(*, ΣD_k)``.
    Returns:
        One tensor in the shape of ``slices``, or a tuple of K tensors if ``slices`` is a sequence;
        with ``concat`` always one tensor. The dtype is that of the slices, or fp32 under GPU
        autocast.
    Raises:
        ValueError: shapes or sizes do not fit, eps is negative, activation unknown; the message
            names the slice.
        TypeError: an argument is not a floating-point tensor, or the slices' dtypes differ.
        RuntimeError: an argument is on another device.
    Numerics: statistics in fp32 (fp64 for fp64 inputs), the variance by a second pass over the row;
        one rounding at the end. Parameter gradients are summed in a fixed order.
    Saved for backward: the arguments.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    return _batched(
        "batched_layer_norm_act", slices, weight, bias, sizes, (eps, activation, concat)
    )


@overload
def batched_layer_norm_tanh(
    slices: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    sizes: Sequence[int] | None = ...,
    concat: bool = ...,
) -> Tensor: ...
@overload
def batched_layer_norm_tanh(
    slices: Sequence[Tensor],
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    sizes: Sequence[int] | None = ...,
    concat: Literal[False] = ...,
) -> tuple[Tensor, ...]: ...
@overload
def batched_layer_norm_tanh(
    slices: Sequence[Tensor],
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    sizes: Sequence[int] | None = ...,
    concat: Literal[True],
) -> Tensor: ...
@overload
def batched_layer_norm_tanh(
    slices: Tensor | Sequence[Tensor],
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    sizes: Sequence[int] | None = ...,
    concat: bool = ...,
) -> Tensor | tuple[Tensor, ...]: ...
def batched_layer_norm_tanh(
    slices: Tensor | Sequence[Tensor],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    sizes: Sequence[int] | None = None,
    concat: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """``tanh(layer_norm(slice))`` for many slices of features in one launch.

    It is `batched_layer_norm_act` with tanh.

    Args:
        slices: as in `batched_layer_norm_act`.
        weight: as in `batched_layer_norm_act`.
        bias: as in `batched_layer_norm_act`.
        eps: as in `batched_layer_norm_act`.
        sizes: as in `batched_layer_norm_act`.
        concat: as in `batched_layer_norm_act`.
    Returns:
        As `batched_layer_norm_act`.
    Raises:
        ValueError: as `batched_layer_norm_act`.
        TypeError: as `batched_layer_norm_act`.
        RuntimeError: as `batched_layer_norm_act`.
    """
    return _batched("batched_layer_norm_tanh", slices, weight, bias, sizes, (eps, "tanh", concat))


def _batched(
    op: str, slices: Any, weight: Any, bias: Any, sizes: Any, options: tuple[Any, Any, Any]
) -> Tensor | tuple[Tensor, ...]:
    """Calls the operator for either functional; ``options`` are eps, activation and concat."""
    eps, activation, concat = options
    tensors: Sequence[Tensor]
    # `SliceConstants.sizes` of the call: the widths, or (K, D) if dims is 2.
    recorded_sizes: Any
    if isinstance(slices, Tensor):
        tensors = (slices,)
        if sizes is None:
            try:
                dims, recorded_sizes = 2, slices.shape[-2:]
            except RuntimeError:  # a nested tensor has no shape
                check_tensor(op, "slices", slices)
                raise
            # For a tensor with fewer dimensions the operator raises.
            count, first_width = recorded_sizes if len(recorded_sizes) == 2 else (0, 0)
        else:
            dims, recorded_sizes = 1, check_sizes(sizes, op)
            count, first_width = len(recorded_sizes), recorded_sizes[0]
    else:
        if not isinstance(slices, Sequence) or not slices:
            _refuse_sequence(slices, op)
        dims, tensors = 0, slices
        recorded_sizes = _widths(tensors)
        count, first_width = len(recorded_sizes), recorded_sizes[0]
        if sizes is not None:
            expected = check_sizes(sizes, op)
            if recorded_sizes != expected:
                _check_named(tensors, recorded_sizes, expected, op)
    shared = False
    if count > 1:
        # Not in a helper function, which would cost host time in every call.
        shares_weight = (
            isinstance(weight, Tensor) and weight.dim() == 1 and weight.shape[0] == first_width
        )
        shares_bias = isinstance(bias, Tensor) and bias.dim() == 1 and bias.shape[0] == first_width
        if shares_weight or shares_bias:
            # In the operator weight and bias are either both shared, or both have values for each
            # slice. None fits both forms.
            shared = (shares_weight or weight is None) and (shares_bias or bias is None)
            if not shared:
                weight, bias = _expanded(weight, bias, count, shares_weight, shares_bias)
    if activation == "none":
        activation = "identity"
    # In the order of `SliceConstants`; the last is ``out_dtype``.
    values = (op, recorded_sizes, dims, bool(concat), eps, activation, shared, None)
    constants = record(SliceConstants, values)
    outputs = run(SLICES, constants, (weight, bias, *tensors))
    is_separate = dims == 0 and not concat
    return outputs if is_separate else outputs[0]  # type: ignore[no-any-return]


# --- widths ---------------------------------------------------------------------------------------

# Functions for the shape of a tensor, and for the last size of a shape. `map` over these functions
# is a loop in C.
_SHAPE, _LAST = attrgetter("shape"), itemgetter(-1)


def check_sizes(sizes: Any, op: str) -> tuple[int, ...]:
    """Returns the widths as a tuple of ints, each at least 1; raises if they are not."""
    # The usual case, without the loop in Python: it is slow for a thousand slices.
    is_tuple = type(sizes) is tuple and not torch.compiler.is_dynamo_compiling()
    if is_tuple and set(map(type, sizes)) == {int} and min(sizes) > 0:
        return sizes  # type: ignore[no-any-return]
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence):
        raise TypeError(f"{op}: sizes must be a sequence of ints, got {type(sizes).__name__}")
    if not sizes:
        raise ValueError(f"{op}: sizes must name at least one slice, got an empty sequence")
    for k, size in enumerate(sizes):
        # A NumPy integer counts as an int, a bool does not. The type is compared first: Dynamo
        # cannot trace `hasattr` of a symbolic int.
        is_int = type(size) is int or (not isinstance(size, bool) and hasattr(size, "__index__"))
        if not is_int:
            raise TypeError(f"{op}: sizes[{k}] must be an int, got {type(size).__name__}")
        if size < 1:
            raise ValueError(f"{op}: sizes[{k}] must be at least 1, got {size}")
    return tuple([index(size) for size in sizes])


def _refuse_sequence(slices: Any, op: str) -> None:
    """Raises, because ``slices`` is not a sequence, or is empty."""
    if not isinstance(slices, Sequence):
        raise TypeError(
            f"{op}: slices must be a torch.Tensor or a sequence of them, "
            f"got {type(slices).__name__}"
        )
    raise ValueError(f"{op}: slices must hold at least one tensor, got an empty sequence")


def _widths(slices: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns the width of each slice.

    If a slice has no width, some or all widths are 0, and the operator raises.
    """
    if torch.compiler.is_dynamo_compiling():
        widths = []
        for t in slices:
            has_width = isinstance(t, Tensor) and t.dim() > 0
            widths.append(index(t.shape[-1]) if has_width else 0)
        return tuple(widths)
    try:
        return tuple(map(_LAST, map(_SHAPE, slices)))
    except (AttributeError, IndexError, RuntimeError):  # no tensor, no dimension, a nested tensor
        return (0,) * len(slices)


def _check_named(
    slices: Sequence[Tensor], widths: tuple[int, ...], sizes: tuple[int, ...], op: str
) -> None:
    """Raises if the caller's ``sizes`` differ from the slices' ``widths``.

    A width of 0 is unknown and not compared: see `_widths`.
    """
    for k, t in enumerate(slices):
        check_tensor(op, f"slice {k}", t)
    if len(sizes) != len(widths):
        raise ValueError(f"{op}: sizes names {len(sizes)} slices, but there are {len(widths)}")
    for k, (t, width, size) in enumerate(zip(slices, widths, sizes, strict=True)):
        if width and width != size:
            raise ValueError(
                f"{op}: slice {k} has shape {tuple(t.shape)}, but sizes[{k}] is {size}"
            )


# --- parameters -----------------------------------------------------------------------------------


def _expanded(
    weight: Any, bias: Any, count: int, shares_weight: bool, shares_bias: bool
) -> tuple[Any, Any]:
    """Returns weight and bias with values for each slice: a shared one is expanded."""
    if shares_weight:
        weight = weight.expand(count, -1)
    if shares_bias:
        bias = bias.expand(count, -1)
    return weight, bias
