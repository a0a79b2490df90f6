"""Whether anybody watches a module, and which modules are linear layers and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = ["KEPT", "is_conv1d", "is_linear", "is_plain", "of_class", "offers", "original", "unwatched"]

T = TypeVar("T")
# Before the names under which fused classes keep methods of their originals.
KEPT = "_fusedops_original_"


def unwatched(module: nn.Module) -> bool:
    """Whether calling the module does nothing but run its class's forward."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or module.__dict__.get("_compiled_call_impl")  # by itself, which a call of it respects
    )


def of_class(question: Callable[..., T]) -> Callable[..., T]:
    """For questions about classes alone. torch.compile knows the class of a module, and takes the answer for granted.

    What it sees being looked up in a class it asks for again before each step, and with that all that hangs on the module.
    """
    question._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as for `core.launch.runs_kernels`
    return question


@of_class
def _has(cls: Any, method: str) -> bool:
    # Who puts another forward into a fused class, or a subclass with its own on top of it, is to see that one called.
    return hasattr(cls, method) and cls.forward is cls._fusedops_class.forward


@of_class
def _is_kept(cls: Any, method: str) -> bool:
    return getattr(cls, KEPT + method, None) is getattr(cls._fusedops_original, method)


def original(module: Any, method: str) -> Any:
    """The method of the class that a fused module was made of, which may have been given another one since."""
    if _is_kept(type(module), method):
        return getattr(module, KEPT + method)
    return getattr(type(module)._fusedops_original, method)


def offers(module: nn.Module, method: str) -> bool:
    """Whether the module has this method of a rule's, which may be called in the module's place: nobody watches it."""
    return _has(type(module), method) and unwatched(module)


@of_class
def is_conv1d(cls: type) -> bool:
    """Transformers' linear layer with a transposed weight; known by its name, as it may not be installed."""
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


@of_class
def _multiplies(cls: type) -> bool:
    if cls is nn.Linear or cls is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return True
    return is_conv1d(cls) or "_fusedops_multiplies" in vars(cls)


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a linear layer of exactly a known class, or one that a rule made of it."""
    return _multiplies(type(module))


def is_plain(t: object) -> bool:
    """Whether this is a tensor of no special kind: not quantised, distributed, or otherwise with ways of its own."""
    return type(t) in (Tensor, nn.Parameter)
