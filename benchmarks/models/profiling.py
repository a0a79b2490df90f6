"""Profiles a step: the kernels that take the most time, and how busy the device is."""

from __future__ import annotations

from . import measuring
from .measuring import kernels
from .providers import contender
from .runner import Setting
from .workloads import Workload

__all__ = ["profiled"]

_MOST_KERNELS, _NAME_WIDTH = 25, 100


def profiled(name: str, workload: Workload, setting: Setting) -> str:
    """Returns a table of kernels (on a CPU, of operators).

    It has their µs and launches per step, and their share of the time of all kernels.
    """
    device = setting.device
    built = contender(name, workload, device, setting.text.reseeded(0))
    warm = measuring.warm_up(built, setting.effort, device)
    wall = measuring.blocks({name: built}, {name: warm}, setting.effort, device)[name].ms
    all_kernels = sorted(kernels(built, device), key=lambda kernel: -kernel.us)
    busy = sum(kernel.us for kernel in all_kernels) or 1.0
    lines = [f"{'us':>10}{'count':>9}{'share':>8}  kernel"]
    lines += [
        f"{kernel.us:10.1f}{kernel.count:9.1f}{kernel.us / busy:8.1%}  {kernel.name[:_NAME_WIDTH]}"
        for kernel in all_kernels[:_MOST_KERNELS]
    ]
    launches = sum(kernel.count for kernel in all_kernels)
    lines.append(
        f"{busy / 1e3:.2f} ms busy of {wall:.2f} ms a step, {launches:.0f} launches; "
        f"host {warm.host_ms:.2f} ms"
    )
    return "\n".join(lines)
