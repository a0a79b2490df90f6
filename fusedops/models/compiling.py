"""Whether torch.compile is compiling: some tricks pay only in the kernels that it generates."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.launches import launch

__all__ = ["makes_kernels"]


def makes_kernels(x: Tensor) -> bool:
    """Whether torch.compile is compiling operations on this tensor to kernels.

    It does for GPUs, and for CPUs where Triton's interpreter runs the kernels.
    """
    if not torch.compiler.is_compiling():
        return False
    return launch.runs_kernels(x.device.type)
