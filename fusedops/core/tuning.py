"""Which config a kernel runs with: the table shipped for the device, else the family's heuristic. Never a benchmark."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

__all__ = ["Config", "choose", "forced", "register_cache", "slug"]


@dataclass(frozen=True)
class Config:
    """How a kernel cuts its work.

    Attributes:
        block_n: columns of a tile, a power of two.
        rows: rows of a tile, a power of two.
        warps: warps a program.
        stages: depth of the pipelined loop over tiles.
        per_sm: programs a multiprocessor, for persistent kernels; 0 for one program a tile.
        registers: most registers a thread may take; 0 for the compiler's choice.
    """

    block_n: int
    rows: int
    warps: int
    stages: int = 1
    per_sm: int = 0
    registers: int = 0


_forced: dict[str, Config] = {}
_caches: list[dict[Any, Any]] = []


def register_cache(cache: dict[Any, Any]) -> dict[Any, Any]:
    """A family's variants, kept by key; they are dropped where `forced` changes what a key stands for."""
    _caches.append(cache)
    return cache


@contextmanager
def forced(kernel: str, config: Config) -> Iterator[None]:
    """Inside the block ``kernel`` runs with ``config``, whatever table and heuristic say."""
    for cache in _caches:
        cache.clear()
    _forced[kernel] = config
    try:
        yield
    finally:
        del _forced[kernel]
        for cache in _caches:
            cache.clear()


def choose(kernel: str, key: str, device_index: int, heuristic: Callable[[], Config]) -> Config:
    """The config for a kernel's variant on a device; ``key`` names the variant in the shipped table."""
    if kernel in _forced:
        return _forced[kernel]
    entry = _table(device_index).get(kernel, {}).get(key) if device_index >= 0 else None
    return Config(*entry) if entry is not None else heuristic()


def slug(device_name: str) -> str:
    """A device's name as a file name: ``NVIDIA H200`` is ``nvidia_h200``."""
    return re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_")


@functools.cache
def _table(device_index: int) -> dict[str, dict[str, list[int]]]:
    name = slug(torch.cuda.get_device_name(device_index))
    table = resources.files("fusedops") / "tuned" / f"{name}.json"
    if not table.is_file():
        return {}
    return dict(json.loads(table.read_text())["configs"])
