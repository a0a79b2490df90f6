"""Linear layers under autocast and torch.compile: what autocast casts of them one by one, cast in one pass.

Autocast casts each weight for itself: a kernel forward, and one backward that takes its gradient to fp32 again. In a
compiled step these are two of the calls for every weight and every bias, and where a GPU waits for its host the calls are
the time. One behind the other in one tensor they are one kernel each way, which writes the same numbers.

Only where torch.compile makes that kernel, which is on GPUs. Eagerly it would be two, and autocast keeps its casts for
the other calls of its context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import compiling
from ..autocast import autocast_dtype
from ..cast import Cast
from ..hooks import has_hooks, is_conv1d, is_plain
from . import allowed

__all__ = ["cast_as_one", "cast_stacks", "cast_together", "castable"]

# Inductor reads up to so many tensors in one kernel that joins them.
_MOST = 8
# A matrix product loads 16 bytes at once: no matrix may begin between two such loads.
_ALIGNED = 8


def castable(layer: nn.Module | None) -> bool:
    """Whether this is a linear layer of fp32, which autocast copies, and nothing else."""
    if layer is None or not (type(layer) is nn.Linear or is_conv1d(type(layer))) or has_hooks(layer):
        return False
    parameters: Any = (layer.weight,) if layer.bias is None else (layer.weight, layer.bias)
    return all(is_plain(parameter) and parameter.dtype == torch.float32 for parameter in parameters)


def cast_as_one(groups: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> list[Tensor] | None:
    """Each group's tensors on top of each other in ``dtype``, all of them parts of one tensor; None where not to be.

    Args:
        groups: of tensors in fp32. Those of a group have the same shape but for the first dimension; matrices come
            before vectors.
        dtype: of the parts.
    """
    tensors = [t for group in groups for t in group]
    first = tensors[0]
    if len(tensors) > _MOST:
        return None
    for t in tensors:
        if t.requires_grad != first.requires_grad or t.device != first.device:
            return None  # backward would compute gradients that are not required
        if t.dim() > 1 and t.numel() % _ALIGNED:
            return None
    flat = torch.cat([t.reshape(-1) for t in tensors]).to(dtype)
    parts = flat.split([sum([t.numel() for t in group]) for group in groups])
    shapes = [(sum([t.shape[0] for t in group]), *group[0].shape[1:]) for group in groups]
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def cast_stacks(stacks: Sequence[Sequence[Any]], dtype: torch.dtype) -> list[Cast] | None:
    """For each stack of layers one with their weights on top of each other, cast in one pass; None where not to be.

    The last stack's bias is left as it is, for the operator at the end of the branch.

    Args:
        stacks: of `castable` layers, in each of one shape and with biases all or none. The last is of one layer.
        dtype: of the weights and biases.
    """
    weights = [[layer.weight for layer in stack] for stack in stacks]
    biased = [stack for stack in stacks[:-1] if stack[0].bias is not None]
    parts = cast_as_one([*weights, *[[layer.bias for layer in stack] for stack in biased]], dtype)
    if parts is None:
        return None
    biases = [*parts[len(stacks) :], stacks[-1][0].bias]
    casts = []
    for stack, weight in zip(stacks, parts[: len(stacks)], strict=True):
        bias = None if stack[0].bias is None else biases.pop(0)
        casts.append(Cast(weight.t() if is_conv1d(type(stack[0])) else weight, bias))
    return casts


def cast_together(owner: Any, x: Tensor, *layers: Any) -> Sequence[Any]:
    """The linear layers of one branch: as `Cast` with weights cast in one pass, or the layers as they are.

    The last one's bias is left as it is, for the operator at the end of the branch.

    Args:
        owner: the fused module whose layers these are.
        x: the rows that the branch takes.
        layers: in the order in which they are called.
    """
    dtype = autocast_dtype(x) if compiling.makes_kernels(x) else None
    if dtype is None or not allowed(owner, "casts") or not all(map(castable, layers)):
        return layers
    return cast_stacks([[layer] for layer in layers], dtype) or layers
