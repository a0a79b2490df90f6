"""Hooks of modules, and what else PyTorch stores on a module.

A fused block computes a submodule's forward without a call of it, so that hooks must be looked for:
PyTorch has functions that register hooks, and none that tells whether there are any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .dynamo import constant_when_traced

__all__ = [
    "BACKWARD_HOOKS",
    "FORWARD_HOOKS",
    "MODULE_INTERNALS",
    "MODULE_MEMBERS",
    "forget_compiled",
    "has_backward_hooks",
    "has_compiled_call",
    "has_global_hooks",
    "has_own_backward_hooks",
    "has_own_hooks",
    "is_compiled",
]

# Registries of a module's hooks, by the pass in which PyTorch calls them.
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Registries of its parameters, buffers and submodules.
MODULE_MEMBERS = ("_parameters", "_buffers", "_modules")
# All attributes that PyTorch gives a module, but for its mode: a user's attributes are the others.
# Read from a new module, for releases add some.
MODULE_INTERNALS = frozenset(vars(torch.nn.Module())) - {"training"}

# --- hooks ----------------------------------------------------------------------------------------


def _global_hooks(kind: str) -> Mapping[int, Any]:
    """Returns PyTorch's registry of the hooks of one kind on all modules.

    PyTorch changes it in place, so that it is looked up once. Without the registry there may be
    such hooks: an entry stands for them.
    """
    unknown = {0: None}
    hooks: Mapping[int, Any] = getattr(torch.nn.modules.module, f"_global_{kind}_hooks", unknown)
    return hooks


_GLOBAL_BACKWARD = (_global_hooks("backward"), _global_hooks("backward_pre"))
_GLOBAL = (_global_hooks("forward"), _global_hooks("forward_pre"), *_GLOBAL_BACKWARD)


@constant_when_traced
def has_global_hooks() -> bool:
    """Returns whether there are hooks on all modules, as from ``register_module_forward_hook``.

    Without the registries the result is True: fused blocks then call each of their modules, slower
    and right. Traced by torch.compile the result is a constant without a guard: PyTorch's own
    compiled modules do not look for hooks again.
    """
    return any(_GLOBAL)


def has_own_hooks(module: torch.nn.Module) -> bool:
    """Returns whether hooks are registered on a module.

    Without a private registry there may be: blocks call each module, slower.
    """
    # Called in each call of a fused block. It is written out, as a loop takes longer.
    try:
        return bool(
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        )
    except AttributeError:
        return True


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Returns whether hooks of this module, or of all modules, see its gradients."""
    return has_own_backward_hooks(module) or any(_GLOBAL_BACKWARD)


def has_own_backward_hooks(module: torch.nn.Module) -> bool:
    """Returns whether hooks that see gradients are registered on a module.

    Without a private registry there may be.
    """
    try:
        return bool(module._backward_hooks or module._backward_pre_hooks)
    except AttributeError:
        return True


# --- compiled modules -----------------------------------------------------------------------------


def is_compiled(module: torch.nn.Module) -> bool:
    """Returns whether a module is compiled by itself.

    Without the private names only `torch.compile`'s wrapper is recognised.
    """
    # The wrapper's class is known by name: an import of it is an import of Dynamo.
    names = [cls.__name__ for cls in type(module).__mro__]
    return has_compiled_call(module) or "OptimizedModule" in names


def has_compiled_call(module: torch.nn.Module) -> bool:
    """Returns whether ``module.compile()`` was called.

    Its class, which has the attribute too, is not looked at: torch.compile would guard it.
    """
    return module.__dict__.get("_compiled_call_impl") is not None


def forget_compiled(module: torch.nn.Module) -> None:
    """Undoes ``module.compile()``, for which PyTorch has no function.

    Without the private attribute there is nothing to undo.
    """
    module.__dict__.pop("_compiled_call_impl", None)
