"""Whether a call of a module runs anything beside its class's forward, and which modules are plain linear layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..core.compat import constant_when_traced, has_compiled_call, has_global_hooks, has_own_hooks

__all__ = ["ORIGINAL", "can_call", "found", "has_hooks", "is_conv1d", "is_linear", "is_plain", "is_simple", "is_unchanged",
           "keeps_method", "original"]  # fmt: skip

# The prefix of the names under which fused classes keep methods of their originals.
ORIGINAL = "_fusedops_original_"


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks, a forward of its own (patched on the instance) or a compiled one.

    Hooks on all modules count: where there are any, a fused block calls each of its modules.
    """
    return has_own_hooks(module) or "forward" in module.__dict__ or has_compiled_call(module) or has_global_hooks()


# What calls a module, when it was imported: a class with a ``__call__`` of its own, or a patched one, is called.
_CALL = nn.Module.__call__


# torch.compile guards on the class of a module, so a function of the class alone is a constant to it. An attribute that
# it sees looked up in a class becomes a guard of its own, and the module is then checked before every step.
@constant_when_traced
def keeps_method(cls: Any, method: str) -> bool:
    """Whether instances of a fused class have this method of a rule, and their call is the class's own."""
    # A forward that replaces the fused class's, there or in a subclass, is called; the rule's method is not.
    return hasattr(cls, method) and cls.forward is cls._fusedops_class.forward and cls.__call__ is _CALL


@constant_when_traced
def is_unchanged(cls: Any, method: str) -> bool:
    """Whether the class that a fused one was made of still has the method that it had then."""
    return getattr(cls, ORIGINAL + method, None) is getattr(cls._fusedops_original, method)


def original(module: Any, method: str) -> Any:
    """The method of the class that a fused module was made of, which may have been given another one since."""
    if is_unchanged(type(module), method):
        return getattr(module, ORIGINAL + method)
    return getattr(type(module)._fusedops_original, method)


def can_call(module: nn.Module, method: str) -> bool:
    """Whether the module has this method of a rule, and the method may be called in place of the module."""
    return keeps_method(type(module), method) and not has_hooks(module)


@constant_when_traced
def is_conv1d(cls: type) -> bool:
    """Whether this is Transformers' linear layer with a transposed weight, by its name: it may not be installed."""
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


@constant_when_traced
def _multiplies(cls: type) -> bool:
    if cls is nn.Linear or cls is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return True
    return is_conv1d(cls) or "_fusedops_multiplies" in vars(cls)


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a linear layer of exactly a known class, or one that a rule made of it."""
    return _multiplies(type(module))


def is_simple(module: nn.Module) -> bool:
    """Whether this is a linear layer, a dropout or an activation that a block computes without calling it."""
    return (is_linear(module) or type(module) in _SIMPLE) and not has_hooks(module)


_SIMPLE = (nn.Dropout, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity)


def found(module: nn.Module, path: str) -> nn.Module | None:
    """The module at a path in another one; None where there is none."""
    inner: Any = module
    for name in path.split("."):
        inner = inner._modules.get(name) if isinstance(inner, nn.Module) else None
    return inner if isinstance(inner, nn.Module) else None


def is_plain(t: object) -> bool:
    """Whether this is a tensor or parameter and no subclass: not quantised, not distributed."""
    return type(t) in (Tensor, nn.Parameter)
