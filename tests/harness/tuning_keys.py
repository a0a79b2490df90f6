"""Collects the tuning keys of every family, from plans that need neither kernels nor a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from fusedops.core.configs import tuning
from fusedops.core.configs.tuning_key import BUCKETS, TuningKey
from fusedops.core.launches import launch
from support import ALL_SPECS

__all__ = ["every_key", "plans"]


def plans(cols: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Functions that plan the launches of each kernel variant, by name."""
    results: dict[str, Callable[[], object]] = {}
    for name in dict.fromkeys(spec.samples.__module__ for spec in ALL_SPECS):
        results |= importlib.import_module(name).compiled_plans(cols, dtype)
    return results


def keys_of(plan: Callable[[], object]) -> list[TuningKey]:
    """The tuning keys for which a plan chooses configs."""
    with tuning.collected_keys() as seen, launch.collecting():
        plan()
    tuning.forget()
    return list(seen)


@cache
def every_key() -> tuple[TuningKey, ...]:
    """The keys of narrow, odd, ordinary and wide rows, in three dtypes, for each bucket of rows."""
    results: dict[TuningKey, None] = {}
    for cols in (17, 64, 256, 768, 1024, 4096, 8192, 16384, 65536):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            for plan in plans(cols, dtype).values():
                results |= dict.fromkeys(keys_of(plan))
    return tuple(replace(key, bucket=bucket) for key in results for bucket in range(len(BUCKETS)))
