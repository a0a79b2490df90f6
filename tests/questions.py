"""Questions of every family, as the plans that the specs can build ask them; needs neither kernels nor a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from fusedops.core import launch, tuning
from fusedops.core.question import BUCKETS, Question
from support import ALL_SPECS

__all__ = ["every_question", "plans"]


def plans(cols: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {}
    for name in dict.fromkeys(spec.samples.__module__ for spec in ALL_SPECS):
        found |= importlib.import_module(name).compiled_plans(cols, dtype)
    return found


def asked_by(plan: Callable[[], object]) -> list[Question]:
    with tuning.asked() as seen, launch.collecting():
        plan()
    tuning.forget()
    return list(seen)


@cache
def every_question() -> tuple[Question, ...]:
    """Of narrow, ordinary, odd and wide rows, in each width of dtype and each bucket of rows."""
    found: dict[Question, None] = {}
    for cols in (17, 64, 256, 768, 1024, 4096, 8192, 16384, 65536):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            for plan in plans(cols, dtype).values():
                found |= dict.fromkeys(asked_by(plan))
    return tuple(replace(question, bucket=bucket) for question in found for bucket in range(len(BUCKETS)))
