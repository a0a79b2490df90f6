"""Where a step's time goes: the kernels with the most of it, and how busy the device is."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile

from . import measuring
from .providers import contender
from .runner import Setting
from .workloads import Workload

__all__ = ["profiled"]

_STEPS = 5
_WIDTH = 100


def profiled(name: str, workload: Workload, setting: Setting, top: int = 25) -> str:
    """A table of kernels (on a CPU, of operators): launches and µs a step, and the share of all kernels' time."""
    device = setting.device
    on_gpu = device.type == "cuda"
    made = contender(name, workload, device, setting.text.reseeded(0))
    warm = measuring.warm_up(made, setting.effort, device)
    wall = measuring.blocks({name: made}, {name: warm}, setting.effort, device)[name].ms
    with made.in_force(), profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as run:
        for _ in range(_STEPS):
            made.step()
        measuring.synchronize(device)
    events = [event for event in run.key_averages() if (event.device_type.name == "CUDA") == on_gpu]
    seen = [((event.self_device_time_total if on_gpu else event.self_cpu_time_total) / _STEPS, event.count / _STEPS, event.key)
            for event in events]  # fmt: skip
    busy = sum(us for us, *_ in seen) or 1.0
    lines = [f"{'us':>10}{'count':>9}{'share':>8}  kernel"]
    lines += [
        f"{us:10.1f}{count:9.1f}{us / busy:8.1%}  {key[:_WIDTH]}" for us, count, key in sorted(seen, reverse=True)[:top]
    ]
    lines.append(f"{busy / 1e3:.2f} ms busy of {wall:.2f} ms a step, {sum(count for _, count, _ in seen):.0f} launches; "
                 f"host {warm.host_ms:.2f} ms")  # fmt: skip
    return "\n".join(lines)
