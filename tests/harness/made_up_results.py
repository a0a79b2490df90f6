"""Made-up results of a benchmark sweep, from a simple model instead of a GPU."""

from __future__ import annotations

import math

from benchmarks import sweep
from benchmarks.cases import discover
from benchmarks.floors import bytes_moved, floor_us
from benchmarks.results import Row

SPECS = {spec.name: spec for spec in discover()}
_BANDWIDTH = 4.26e12
# For each provider: the fraction of the bandwidth on large shapes, the least time of its kernels in
# µs, the host time of a call in µs, and the number of tensors in memory at the peak.
_MODELS = {
    "fusedops": (0.88, 6.0, 90.0, 2.0),
    "eager": (0.42, 14.0, 80.0, 4.0),
    "eager_combined": (0.35, 16.0, 110.0, 5.0),
    "compile": (0.66, 8.0, 210.0, 3.0),
    "liger": (0.55, 9.0, 220.0, 2.0),
}


def row(case, provider, mode="fwd_bwd", **changes):
    """One made-up row; ``changes`` replace values of it."""
    fraction, least_us, host_us, tensors = _MODELS[provider]
    if provider == "eager" and case.spec.combined is not None:
        fraction /= 12.0  # eager PyTorch processes slice by slice
    floor = floor_us(bytes_moved(case.spec, case.elements, case.dtype, mode), _BANDWIDTH)
    cols = math.prod(case.sides[1:])
    fraction *= 1.0 - 0.08 * abs(math.log2(cols / 4096)) * (1.5 if cols > 8192 else 0.6)
    gpu_us = least_us + floor / max(fraction, 0.05)
    mib_of_tensor = case.elements * case.dtype.itemsize / 2**20
    values = {
        "gpu_us": gpu_us,
        "loop_us": max(host_us, gpu_us),
        "floor_us": floor,
        "peak_mib": tensors * mib_of_tensor,
    } | changes
    return Row(
        case.op,
        case.shape,
        case.dtype_name,
        mode,
        provider,
        **values,
        commit="abc1234",
        torch="2.11.0",
        triton="3.6.0",
    )


def rows(*, axes=sweep.AXES, dtypes=("bf16",), modes=("fwd_bwd",), ops=None):
    """The rows of a whole sweep: all cases, modes, and providers that have the operator."""
    specs = [spec for spec in SPECS.values() if ops is None or spec.name in ops]
    results = []
    for case in sweep.plan(specs, axes, dtypes):
        providers = ["fusedops", "eager", "compile"]
        if case.spec.combined is not None:
            providers.append("eager_combined")
        if case.spec.liger is not None:
            providers.append("liger")
        results += [row(case, provider, mode) for mode in modes for provider in providers]
    return results
