"""Whether anybody watches a module, and which modules are linear layers and nothing else."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["is_conv1d", "is_linear", "is_plain", "unwatched"]


def unwatched(module: nn.Module) -> bool:
    """Whether calling the module does nothing but run its class's forward."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or module._compiled_call_impl is not None  # by itself, which a call of it respects
    )


def is_conv1d(cls: type) -> bool:
    """Transformers' linear layer with a transposed weight; known by its name, as it may not be installed."""
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a linear layer of exactly a known class, or one that a rule made of it."""
    cls = type(module)
    if cls is nn.Linear or cls is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return True
    return is_conv1d(cls) or "_fusedops_multiplies" in vars(cls)


def is_plain(t: object) -> bool:
    """Whether this is a tensor of no special kind: not quantised, distributed, or otherwise with ways of its own."""
    return type(t) in (Tensor, nn.Parameter)
