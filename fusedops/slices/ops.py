"""The slices family's functionals: a record, tensors, and one call into `core.calls.call`."""

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
        weight: the weights of the norms. ``(ΣD_k,)``, or ``(K, D)`` if all widths are D, has a
            weight for each slice; ``(D,)`` is shared by all slices; None stands for ones. Its dtype
            may differ from the slices'.
        bias: as ``weight``; None stands for zeros.
        eps: added to the variance, at least 0.
        sizes: the widths D_k of the slices of one tensor ``(*, ΣD_k)``; without it the last two
            dimensions are K and D.
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
        "batched_layer_norm_act", slices, weight, bias, (eps, activation, concat), sizes
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
    return _batched("batched_layer_norm_tanh", slices, weight, bias, (eps, "tanh", concat), sizes)


def _batched(
    op: str, slices: Any, weight: Any, bias: Any, options: tuple[Any, Any, Any], sizes: Any
) -> Tensor | tuple[Tensor, ...]:
    """One call of either functional; ``options`` are eps, activation and concat."""
    eps, activation, concat = options
    tensors: Sequence[Tensor]
    sizes_of: Any
    if isinstance(slices, Tensor):
        tensors = (slices,)
        if sizes is None:
            try:
                dims, sizes_of = 2, slices.shape[-2:]
            except RuntimeError:  # a nested tensor has no shape
                check_tensor(op, "slices", slices)
                raise
            count, size = sizes_of if len(sizes_of) == 2 else (0, 0)
        else:
            dims, sizes_of = 1, check_sizes(sizes, op)
            count, size = len(sizes_of), sizes_of[0]
    else:
        if not isinstance(slices, Sequence) or not slices:
            _refuse_sequence(slices, op)
        dims, tensors = 0, slices
        sizes_of = _widths(tensors)
        count, size = len(sizes_of), sizes_of[0]
        if sizes is not None:
            expected = check_sizes(sizes, op)
            if sizes_of != expected:
                _check_named(tensors, sizes_of, expected, op)
    shared = False
    if count > 1:
        # Inside this function, not in one of its own, as every call comes here.
        shares_weight = isinstance(weight, Tensor) and weight.dim() == 1 and weight.shape[0] == size
        shares_bias = isinstance(bias, Tensor) and bias.dim() == 1 and bias.shape[0] == size
        if shares_weight or shares_bias:
            shared = (shares_weight or weight is None) and (shares_bias or bias is None)
            if not shared:
                weight, bias = _expanded(weight, bias, count, shares_weight, shares_bias)
    if activation == "none":
        activation = "identity"
    values = (op, sizes_of, dims, bool(concat), eps, activation, shared, None)
    constants = record(SliceConstants, values)
    outputs = run(SLICES, constants, (weight, bias, *tensors))
    is_separate = dims == 0 and not concat
    return outputs if is_separate else outputs[0]  # type: ignore[no-any-return]


# --- widths ---------------------------------------------------------------------------------------

# The shape of each of many tensors, and its last number: `map` over these runs in C.
_SHAPE, _LAST = attrgetter("shape"), itemgetter(-1)


def check_sizes(sizes: Any, op: str) -> tuple[int, ...]:
    """The widths as a tuple of ints, each at least 1."""
    traced = torch.compiler.is_dynamo_compiling()
    if not traced and type(sizes) is tuple and set(map(type, sizes)) == {int} and min(sizes) > 0:
        return sizes  # without a loop over perhaps a thousand numbers
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
    if not isinstance(slices, Sequence):
        raise TypeError(
            f"{op}: slices must be a torch.Tensor or a sequence of them, "
            f"got {type(slices).__name__}"
        )
    raise ValueError(f"{op}: slices must hold at least one tensor, got an empty sequence")


def _widths(slices: Sequence[Tensor]) -> tuple[int, ...]:
    """The width of each slice; zeros where one has none: the checks raise for that slice."""
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
    """Raises where the caller's ``sizes`` are not the slices' ``widths``."""
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
    """The parameters, of which slices share only one, with that one expanded to all slices."""
    if shares_weight:
        weight = weight.expand(count, -1)
    if shares_bias:
        bias = bias.expand(count, -1)
    return weight, bias
