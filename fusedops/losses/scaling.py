"""Launches of the kernel that multiplies gradients by the gradient of their loss."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..core.configs.tuning import Config
from ..core.launches import launch
from ..core.launches.launch import Variant, pointer_type

__all__ = ["CONFIG", "scale"]

CONFIG = Config(block_n=4096, rows=1, warps=8)
# Programs of a multiprocessor. Each begins with the load of the factor.
_PROGRAMS = 8


@functools.lru_cache(maxsize=64)
def _variant(dtype: torch.dtype, device_index: int) -> Variant:
    from . import kernels

    return launch.build(
        kernels.scale_kernel,
        {"gradient": pointer_type(dtype), "scale": "*fp32", "elements": "i64"},
        constants={},
        config=CONFIG,
        acc=torch.float32,
        cols=0,
        device_index=device_index,
        aligned=False,
    )


def scale(gradient: Tensor, factor: Tensor) -> None:
    """Multiplies a contiguous tensor in place by a number, an fp32 or fp64 tensor."""
    wide = torch.float64 in (gradient.dtype, factor.dtype)
    if wide or not launch.runs_kernels(gradient.device.type):
        gradient.data.mul_(factor)  # as a kernel's writes, autograd does not see it
        return
    elements = gradient.numel()
    if not elements:
        return
    index = gradient.get_device()
    blocks = -(-elements // CONFIG.block_n)
    programs = min(blocks, _PROGRAMS * launch.processors(index))
    _variant(gradient.dtype, index)(programs, 1, gradient, factor, elements)
