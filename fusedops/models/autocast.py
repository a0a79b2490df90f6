"""Under autocast: rows that only linear layers take, given to them in the dtype to which each would cast them.

Autocast computes norms in fp32, and each linear layer behind one casts its output for itself: forward, a pass for each;
backward, a pass for each gradient, and their sum in fp32. Where a fused block knows that nothing but linear layers
takes the rows, it asks the norm for autocast's dtype (`normed`), or casts them once (`narrowed`). The layers then
multiply the very same numbers, each rounded once from the same fp32 number.

What a module takes is known by its rule: ``_fusedops_takers`` gives the linear layers that its first argument goes to,
if it goes nowhere else, or None. A module that is watched, and one with a linear layer that is watched, or that is no
plain one (an adapter, say), gets what it got.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .watching import is_linear, is_plain, offers, unwatched

__all__ = ["autocast_dtype", "low_dtype", "narrowed", "normed", "takers", "under_autocast"]

Takers = Callable[[nn.Module], tuple[nn.Module, ...] | None]


def takers(*names: str) -> dict[str, Takers]:
    """The method of a module whose input goes to these children only, as far as it has them."""

    def method(self: nn.Module) -> tuple[nn.Module, ...] | None:
        children = [self._modules.get(name) for name in names]  # torch.compile looks through lists better
        return tuple([child for child in children if child is not None])

    return {"_fusedops_takers": method}


def low_dtype(x: Tensor, modules: tuple[nn.Module, ...]) -> torch.dtype | None:
    """The dtype to which all that the modules do with rows would cast them; None where there is no such dtype."""
    # The first question is the cheapest: most calls are under no autocast at all.
    if not torch._C._is_any_autocast_enabled() or not modules or not under_autocast(x):
        return None
    if not all(map(_multiplies, modules)):
        return None
    return torch.get_autocast_dtype(x.device.type)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts fp32 weights for these rows; None where it casts none."""
    if not torch._C._is_any_autocast_enabled() or x.dtype == torch.float64 or not under_autocast(x):
        return None
    dtype = torch.get_autocast_dtype(x.device.type)
    return None if dtype == torch.float32 else dtype


def under_autocast(x: Tensor) -> bool:
    """Whether autocast is on where the tensor is; some devices (meta) have none."""
    device = x.device.type
    return _has_autocast(device) and torch.is_autocast_enabled(device)


def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


# As for `core.launch.runs_kernels`: a constant to torch.compile, which up to 2.11 does not know the question.
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _multiplies(module: Any) -> bool:
    """Whether the module's input goes to linear layers and nowhere else, and nobody else sees it."""
    if is_linear(module):
        # Another kind of tensor (a quantised one, say) may do as it likes with the rows.
        return unwatched(module) and is_plain(module.weight)
    children: Any = module._fusedops_takers() if offers(module, "_fusedops_takers") else None
    return children is not None and all(map(_multiplies, children))


def narrowed(x: Tensor, *modules: nn.Module) -> Tensor:
    """Rows for these modules, cast once for all of them."""
    dtype = low_dtype(x, modules)
    return x if dtype is None or x.dtype != torch.float32 else x.to(dtype)


def normed(norm: Any, x: Tensor, *modules: nn.Module) -> Any:
    """``norm(x)`` for these modules."""
    return norm._fusedops_norm(x, low_dtype(x, modules)) if offers(norm, "_fusedops_norm") else norm(x)
