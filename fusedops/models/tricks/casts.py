"""Linear layers under autocast and torch.compile: their parameters cast in one pass.

Autocast casts each parameter separately: one kernel in forward, and one in backward that casts its
gradient back to fp32. In a compiled step these are two launches for every weight and every bias,
which take the time of a CPU-bound step. For parameters that are concatenated to one tensor, one
kernel in each direction writes the same numbers::

    fp32    w1 | w2 | b1          three tensors
              cat, cast           one kernel of Inductor's
    half    [ w1 | w2 | b1 ]      one tensor; its parts are views

This is done only where torch.compile generates such a kernel (see `compiling.makes_kernels`). Eager
mode would launch two kernels, and lose autocast's cache, from which other calls in the context of
autocast read their casts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.alignment import ALIGNED
from .. import compiling
from ..autocast import autocast_dtype
from ..cast import Cast
from ..hooks import has_hooks, is_conv1d, is_plain
from . import allowed

__all__ = ["cast_as_one", "cast_stacks", "cast_together", "castable"]

# The largest number of tensors that Inductor concatenates in one kernel.
_MOST_TENSORS = 8


def castable(layer: Any) -> bool:
    """Whether this is a linear layer with fp32 parameters, which autocast casts, and no hooks.

    Subclasses of the layer and of tensors do not count.
    """
    is_linear = type(layer) is nn.Linear or is_conv1d(type(layer))
    # `Cast` takes the layer's place, and runs no hooks.
    if not is_linear or has_hooks(layer):
        return False
    parameters = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    return all(map(_is_fp32, parameters))


def _is_fp32(parameter: Any) -> bool:
    if not is_plain(parameter):
        return False
    return bool(parameter.dtype == torch.float32)


def cast_as_one(groups: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> list[Tensor] | None:
    """Concatenate the tensors of each group and cast them; return a view of one tensor per group.

    Return None if there are too many tensors for one kernel, or if they cannot be parts of one
    tensor.

    Args:
        groups: groups of fp32 tensors. The tensors of a group differ in their first dimension at
            most. Groups of matrices come before groups of vectors.
        dtype: the dtype of the results.
    """
    tensors: list[Tensor] = []
    for group in groups:
        tensors += group
    if len(tensors) > _MOST_TENSORS or not _can_share(tensors):
        return None
    flat = torch.cat([t.reshape(-1) for t in tensors]).to(dtype)
    sizes, shapes = [], []
    for group in groups:
        sizes.append(sum([t.numel() for t in group]))
        shapes.append((sum([t.shape[0] for t in group]), *group[0].shape[1:]))
    # The backward of one split is one concatenation. Separate slices would have one backward each.
    parts = flat.split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _can_share(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors may be parts of one: aligned, alike in device and requires_grad."""
    first = tensors[0]
    for t in tensors:
        # The joined tensor requires a gradient if any part does. The backward would then compute
        # gradients of frozen parts, too.
        if t.requires_grad != first.requires_grad or t.device != first.device:
            return False
    return all(map(_is_aligned, tensors))


def _is_aligned(t: Tensor) -> bool:
    """Whether the part after this tensor is aligned, if it has to be.

    Vectors come last. Only vectors follow them, which need no alignment.
    """
    return t.dim() < 2 or t.numel() % ALIGNED == 0


def cast_stacks(stacks: Sequence[Sequence[Any]], dtype: torch.dtype) -> list[Cast] | None:
    """Return one `Cast` for each stack of layers, with their weights and biases concatenated.

    All are cast in one pass. The last stack's bias is not cast: the operator at the end of the
    branch takes it. Return None if `cast_as_one` returns None.

    Args:
        stacks: stacks of `castable` layers. The layers of a stack have weights of one shape, and
            either all or none have a bias. The last stack has one layer.
        dtype: the dtype of the weights and biases.
    """
    # Vectors come after matrices, as their lengths need not be multiples of 8.
    biased = [stack for stack in stacks[:-1] if stack[0].bias is not None]
    weights = [_of_layers("weight", stack) for stack in stacks]
    biases = [_of_layers("bias", stack) for stack in biased]
    parts = cast_as_one([*weights, *biases], dtype)
    if parts is None:
        return None
    # The biases are in the order of their stacks; stacks without a bias have none.
    remaining_biases = [*parts[len(stacks) :], stacks[-1][0].bias]
    casts = []
    for stack, weight in zip(stacks, parts[: len(stacks)], strict=True):
        first = stack[0]
        # Conv1D stores its weight transposed.
        weight = weight.t() if is_conv1d(type(first)) else weight
        bias = None if first.bias is None else remaining_biases.pop(0)
        casts.append(Cast(weight, bias))
    return casts


def _of_layers(name: str, layers: Sequence[Any]) -> list[Tensor]:
    """Return the parameter ``name`` of each layer."""
    return [getattr(layer, name) for layer in layers]


def cast_together(owner: Any, x: Tensor, *layers: Any) -> Sequence[Any]:
    """The linear layers of one branch, as `Cast` with weights cast in one pass, or unchanged.

    The last one's bias is not cast: the operator at the end of the branch takes it.

    Args:
        owner: the fused module whose layers these are.
        x: the rows that the branch takes.
        layers: in the order in which they are called.
    """
    if not compiling.makes_kernels(x) or not allowed(owner, "casts"):
        return layers
    dtype = autocast_dtype(x)
    if dtype is None or not all(map(castable, layers)):
        return layers
    stacks = [[layer] for layer in layers]
    return cast_stacks(stacks, dtype) or layers
