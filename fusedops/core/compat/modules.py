"""Hooks of modules, and other private state that PyTorch stores on a module.

What computes a submodule's forward without calling the submodule must know whether hooks are
registered. PyTorch has public functions to register hooks, but none to query them.
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
    "has_backward_hooks",
    "has_compiled_call",
    "has_global_hooks",
    "has_own_backward_hooks",
    "has_own_hooks",
    "is_compiled",
    "is_replica",
]

# Attributes of a module that hold its hooks, by the pass in which PyTorch calls them.
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Attributes of a module that hold its parameters, buffers and submodules.
MODULE_MEMBERS = ("_parameters", "_buffers", "_modules")
# All attributes that PyTorch sets on a module, except its mode. Any other attribute is the user's.
# They are read from a new module, because releases add some.
MODULE_INTERNALS = frozenset(vars(torch.nn.Module())) - {"training"}

# --- hooks ----------------------------------------------------------------------------------------


def _global_hooks(kind: str) -> Mapping[int, Any]:
    """Returns PyTorch's dict of the hooks of one kind that apply to all modules.

    It is looked up once, because PyTorch changes it in place. If PyTorch lacks the private name,
    there may be such hooks: then a dict with one entry is returned.
    """
    unknown = {0: None}
    hooks: Mapping[int, Any] = getattr(torch.nn.modules.module, f"_global_{kind}_hooks", unknown)
    return hooks


_GLOBAL_BACKWARD = (_global_hooks("backward"), _global_hooks("backward_pre"))
_GLOBAL = (_global_hooks("forward"), _global_hooks("forward_pre"), *_GLOBAL_BACKWARD)


@constant_when_traced
def has_global_hooks() -> bool:
    """Returns whether there are hooks that apply to all modules.

    For example, ``register_module_forward_hook`` registers one. Without the private names the
    result is True: modules are then called, which is slower, but correct. In code that
    torch.compile traces the result is a constant without a guard, as for PyTorch's own modules:
    once compiled, they do not look for hooks again.
    """
    return any(_GLOBAL)


def has_own_hooks(module: torch.nn.Module) -> bool:
    """Returns whether hooks are registered on a module.

    Without a private name the result is True: the module is then called, which is slower.
    """
    # T5's fast path calls this for each layer. A loop over the names would take longer.
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

    Without a private name the result is True.
    """
    try:
        return bool(module._backward_hooks or module._backward_pre_hooks)
    except AttributeError:
        return True


# --- compiled modules -----------------------------------------------------------------------------


def is_compiled(module: torch.nn.Module) -> bool:
    """Returns whether the module itself is compiled, not only one that contains it.

    Without the private names only `torch.compile`'s wrapper is recognised.
    """
    # The wrapper's class is recognised by its name, because importing it would import Dynamo.
    names = [cls.__name__ for cls in type(module).__mro__]
    return has_compiled_call(module) or "OptimizedModule" in names


def has_compiled_call(module: torch.nn.Module) -> bool:
    """Returns whether ``module.compile()`` was called.

    Only the instance's attribute is read, not that of its class: torch.compile would add a guard
    for the class.
    """
    return module.__dict__.get("_compiled_call_impl") is not None


def is_replica(module: torch.nn.Module) -> bool:
    """Returns whether this is a replica of DataParallel; False without the private attribute."""
    return getattr(module, "_is_replica", False)
