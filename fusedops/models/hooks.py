"""Predicates of modules: hooks, replaced methods, plain linear layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..core.compat.dynamo import constant_when_traced
from ..core.compat.modules import has_compiled_call, has_global_hooks, has_own_hooks

__all__ = [
    "ORIGINAL",
    "can_call",
    "has_hooks",
    "is_conv1d",
    "is_linear",
    "is_named",
    "is_plain",
    "is_simple",
    "is_unchanged",
    "keeps_method",
    "original",
    "submodule",
]

# The prefix of the names under which fused classes store methods of their originals.
ORIGINAL = "_fusedops_original_"


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs more, or other code, than its class's forward.

    That is so if it has hooks, a forward of its own (patched on the instance) or a compiled one.
    Hooks on all modules count: if there are any, a fused block calls each of its modules.
    """
    # Accelerate, for one, replaces the forward on the instance.
    if has_own_hooks(module) or "forward" in module.__dict__:
        return True
    if has_compiled_call(module):
        return True
    return has_global_hooks()


# The usual ``__call__`` of modules. If a class or a patch replaces it, only a call of the module
# runs the new one.
_CALL = nn.Module.__call__


# A constant to torch.compile, which guards on the class of each module anyway. If it traced this
# function instead, each attribute that is read from the class would become one more guard, which is
# checked before every step.
@constant_when_traced
def keeps_method(cls: Any, method: str) -> bool:
    """Whether a block may call a rule's method of a fused class instead of the module itself.

    That is so if the class has the method, and neither its forward nor its call is replaced.
    """
    if not hasattr(cls, method):
        return False
    # If the forward was replaced, in the fused class or in a subclass, the rule's method would skip
    # the new one.
    has_own_forward = cls.forward is cls._fusedops_class.forward
    return has_own_forward and cls.__call__ is _CALL


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


def can_call(module: nn.Module, method: str) -> bool:
    """Whether a block may call this method of a rule instead of the module: see `keeps_method`."""
    if not keeps_method(type(module), method):
        return False
    return not has_hooks(module)


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


def is_simple(module: nn.Module) -> bool:
    """Whether a block computes this linear layer, dropout or activation without calling it."""
    is_known = is_linear(module) or type(module) in _SIMPLE
    return is_known and not has_hooks(module)


_SIMPLE = (nn.Dropout, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity)


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
