"""Whether torch.compile is making kernels: what pays only then is done only then."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import launch

__all__ = ["makes_kernels"]


def makes_kernels(x: Tensor) -> bool:
    """Whether torch.compile makes kernels of what is done with this tensor: on a GPU, or where the interpreter is one."""
    return torch.compiler.is_compiling() and launch.runs_kernels(x.device.type)
