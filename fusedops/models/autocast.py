"""Rows whose only consumers are linear layers, in the dtype that autocast casts them to.

Autocast computes norms in fp32, and each linear layer behind a norm casts the norm's output again.
The forward takes a pass for each of these casts. The backward takes a pass for each gradient, and
sums the gradients in fp32. If all consumers of the rows are known to be linear layers, a fused
block computes the norm's output in autocast's dtype (`normed`), or casts the rows once
(`narrowed`):

    norm --fp32-+-> cast --bf16--> q            norm --bf16-+-> q
                +-> cast --bf16--> k    becomes             +-> k
                +-> cast --bf16--> v                        +-> v

The layers then multiply the same numbers, each rounded once from the same fp32 number.

``_fusedops_consumers``, from a module's rule, returns the linear layers that consume its first
argument, or None if anything else may. A module gets its input as before if it has hooks, or if one
of these layers has hooks or is not a plain linear layer (an adapter, say).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.compat.dispatch import any_autocast_enabled
from ..core.compat.dynamo import constant_when_traced
from .hooks import can_call, has_hooks, is_linear, is_plain

__all__ = ["autocast_dtype", "consumers", "low_dtype", "narrowed", "normed", "under_autocast"]

Consumers = Callable[[nn.Module], tuple[nn.Module, ...] | None]


def consumers(*names: str) -> dict[str, Consumers]:
    """Build the method for a module whose input goes only to these children.

    A module may lack some of them.
    """

    def method(self: nn.Module) -> tuple[nn.Module, ...] | None:
        # torch.compile traces lists better than generators.
        children = [self._modules.get(name) for name in names]
        return tuple([child for child in children if child is not None])

    return {"_fusedops_consumers": method}


def low_dtype(x: Tensor, modules: tuple[nn.Module, ...]) -> torch.dtype | None:
    """Return the dtype to which autocast casts these rows in all the modules, or None."""
    # The first test is the cheapest: most calls are not under autocast.
    if not any_autocast_enabled() or not modules:
        return None
    # A consumer that is no linear layer would get rounded rows.
    if not under_autocast(x) or not all(map(_feeds_only_layers, modules)):
        return None
    return torch.get_autocast_dtype(x.device.type)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast casts fp32 weights for these rows, or None."""
    if not any_autocast_enabled() or not under_autocast(x):
        return None
    # Autocast does not cast fp64.
    if x.dtype == torch.float64:
        return None
    dtype = torch.get_autocast_dtype(x.device.type)
    if dtype == torch.float32:
        return None
    return dtype


def under_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the tensor's device; some devices (meta) have none."""
    device = x.device.type
    # `is_autocast_enabled` raises for a device without autocast.
    if not _has_autocast(device):
        return False
    return torch.is_autocast_enabled(device)


@constant_when_traced  # torch.compile up to 2.11 cannot trace it
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def _feeds_only_layers(module: Any) -> bool:
    """Whether the module's input goes to linear layers only, none of which has hooks."""
    if is_linear(module):
        # Another kind of tensor (a quantised one, say) may use the rows in another way, and a hook
        # could see them.
        if has_hooks(module):
            return False
        return is_plain(module.weight)
    if not can_call(module, "_fusedops_consumers"):
        return False
    children: Any = module._fusedops_consumers()
    if children is None:
        return False
    return all(map(_feeds_only_layers, children))


def narrowed(x: Tensor, *modules: nn.Module) -> Tensor:
    """Return rows for these modules, cast once for all of them."""
    dtype = low_dtype(x, modules)
    if dtype is None or x.dtype != torch.float32:
        return x
    return x.to(dtype)


def normed(norm: Any, x: Tensor, *modules: nn.Module) -> Any:
    """Return ``norm(x)``, in the dtype for these modules."""
    if can_call(norm, "_fusedops_norm"):
        return norm._fusedops_norm(x, low_dtype(x, modules))
    return norm(x)
