"""Predicates of modules: hooks, replaced methods, plain linear layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..core.compat.dynamo import constant_when_traced
from ..core.compat.modules import has_compiled_call, has_global_hooks, has_own_hooks

__all__ = [
    "ORIGINAL",
    "has_hooks",
    "is_conv1d",
    "is_linear",
    "is_named",
    "is_plain",
    "is_unchanged",
    "original",
    "submodule",
]

# The prefix of the names under which fused classes store methods of their originals.
ORIGINAL = "_fusedops_original_"


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs more, or other code, than its class's forward.

    That is so if it has hooks, a forward of its own (patched on the instance) or a compiled one.
    Hooks on all modules count.
    """
    # Accelerate, for one, replaces the forward on the instance.
    if has_own_hooks(module) or "forward" in module.__dict__:
        return True
    if has_compiled_call(module):
        return True
    return has_global_hooks()


@constant_when_traced
def is_unchanged(cls: Any, method: str) -> bool:
    """Whether a fused class's original still has the method that it had when it was fused."""
    return getattr(cls, ORIGINAL + method, None) is getattr(cls._fusedops_original, method)


def original(module: Any, method: str) -> Any:
    """Return the current method of a fused module's original class."""
    # Read from the instance, as each attribute that torch.compile reads from a class adds a guard.
    # Only a method that was patched after fusing is read from the class.
    if is_unchanged(type(module), method):
        return getattr(module, ORIGINAL + method)
    return getattr(type(module)._fusedops_original, method)


def is_named(cls: type, module: str, name: str) -> bool:
    """Whether this is the class of that name in a package that may not be installed."""
    return (cls.__module__, cls.__name__) == (module, name)


@constant_when_traced
def is_conv1d(cls: type) -> bool:
    """Whether this is Transformers' linear layer with a transposed weight."""
    return is_named(cls, "transformers.pytorch_utils", "Conv1D")


@constant_when_traced
def _multiplies(cls: type) -> bool:
    """Whether instances are linear layers: PyTorch's, Transformers' or fused ones."""
    if cls is nn.Linear or cls is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return True
    if is_conv1d(cls):
        return True
    return "_fusedops_multiplies" in vars(cls)


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a linear layer of exactly a known class, or fused from one."""
    return _multiplies(type(module))


def submodule(module: nn.Module, path: str) -> nn.Module | None:
    """Return the module at a path in another one, or None."""
    inner: Any = module
    for name in path.split("."):
        inner = inner._modules.get(name) if isinstance(inner, nn.Module) else None
    if not isinstance(inner, nn.Module):
        return None
    return inner


def is_plain(t: object) -> bool:
    """Whether this is a tensor or parameter, not of a subclass (quantised or distributed, say)."""
    return type(t) in (Tensor, nn.Parameter)
