"""Where a step's time goes: the kernels with the most of it, and how busy the device is."""

from __future__ import annotations

from . import measuring
from .measuring import kernels
from .providers import contender
from .runner import Setting
from .workloads import Workload

__all__ = ["profiled"]

_MOST, _WIDTH = 25, 100  # kernels, and characters of a name


def profiled(name: str, workload: Workload, setting: Setting) -> str:
    """A table of kernels (on a CPU, of operators).

    Launches and µs a step, and the share of all kernels' time.
    """
    device = setting.device
    built = contender(name, workload, device, setting.text.reseeded(0))
    warm = measuring.warm_up(built, setting.effort, device)
    wall = measuring.blocks({name: built}, {name: warm}, setting.effort, device)[name].ms
    seen = kernels(built, device)
    busy = sum(kernel.us for kernel in seen) or 1.0
    lines = [f"{'us':>10}{'count':>9}{'share':>8}  kernel"]
    lines += [
        f"{kernel.us:10.1f}{kernel.count:9.1f}{kernel.us / busy:8.1%}  {kernel.name[:_WIDTH]}"
        for kernel in sorted(seen, key=lambda kernel: -kernel.us)[:_MOST]
    ]
    lines.append(
        f"{busy / 1e3:.2f} ms busy of {wall:.2f} ms a step, {sum(kernel.count for kernel in seen):.0f} launches; "
        f"host {warm.host_ms:.2f} ms"
    )
    return "\n".join(lines)
