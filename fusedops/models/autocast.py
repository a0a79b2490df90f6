"""Under autocast: rows whose only consumers are linear layers, computed in the dtype to which each would cast them.

Autocast computes norms in fp32, and each linear layer behind a norm casts its output again: forward, a pass for each;
backward, a pass for each gradient, and their sum in fp32. Where all consumers of the rows are known to be linear layers,
a fused block computes the norm's output in autocast's dtype (`normed`), or casts the rows once (`narrowed`). The layers
then multiply the same numbers, each rounded once from the same fp32 number.

``_fusedops_consumers``, from a module's rule, returns the linear layers that consume its first argument, or None if
anything else may. A module gets its input as before if it has hooks, or if one of these layers has hooks or is not a
plain linear layer (an adapter, say).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.compat import any_autocast_enabled, constant_when_traced
from .hooks import can_call, has_hooks, is_linear, is_plain

__all__ = ["autocast_dtype", "consumers", "low_dtype", "narrowed", "normed", "under_autocast"]

Consumers = Callable[[nn.Module], tuple[nn.Module, ...] | None]


def consumers(*names: str) -> dict[str, Consumers]:
    """The method of a module whose input goes to these children only, as far as it has them."""

    def method(self: nn.Module) -> tuple[nn.Module, ...] | None:
        children = [self._modules.get(name) for name in names]  # torch.compile looks through lists better
        return tuple([child for child in children if child is not None])

    return {"_fusedops_consumers": method}


def low_dtype(x: Tensor, modules: tuple[nn.Module, ...]) -> torch.dtype | None:
    """The dtype to which all that the modules do with rows would cast them; None where there is no such dtype."""
    # The first test is the cheapest: most calls are not under autocast.
    if not any_autocast_enabled() or not modules or not under_autocast(x):
        return None
    if not all(map(_multiplies, modules)):
        return None
    return torch.get_autocast_dtype(x.device.type)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts fp32 weights for these rows; None where it casts none."""
    if not any_autocast_enabled() or x.dtype == torch.float64 or not under_autocast(x):
        return None
    dtype = torch.get_autocast_dtype(x.device.type)
    return None if dtype == torch.float32 else dtype


def under_autocast(x: Tensor) -> bool:
    """Whether autocast is on where the tensor is; some devices (meta) have none."""
    device = x.device.type
    return _has_autocast(device) and torch.is_autocast_enabled(device)


@constant_when_traced  # which up to 2.11 cannot trace it
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def _multiplies(module: Any) -> bool:
    """Whether the module's input goes to linear layers only, none of which has hooks."""
    if is_linear(module):
        # Another kind of tensor (a quantised one, say) may use the rows in another way.
        return not has_hooks(module) and is_plain(module.weight)
    children: Any = module._fusedops_consumers() if can_call(module, "_fusedops_consumers") else None
    return children is not None and all(map(_multiplies, children))


def narrowed(x: Tensor, *modules: nn.Module) -> Tensor:
    """Rows for these modules, cast once for all of them."""
    dtype = low_dtype(x, modules)
    return x if dtype is None or x.dtype != torch.float32 else x.to(dtype)


def normed(norm: Any, x: Tensor, *modules: nn.Module) -> Any:
    """``norm(x)`` for these modules."""
    return norm._fusedops_norm(x, low_dtype(x, modules)) if can_call(norm, "_fusedops_norm") else norm(x)
