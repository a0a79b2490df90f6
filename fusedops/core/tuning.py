"""Which config a kernel runs with: the user's cache, the table shipped for the device, else the family's heuristic.

Nothing is benchmarked here. With ``FUSEDOPS_TUNE=1`` the tuner, which stands above, is asked where nobody measured.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from typing import Any, Literal, TypeVar

import torch

from . import cache
from .cache import slug
from .question import BUCKET, BUCKETS, Config, Question, family_of, register, valid, widths

__all__ = [
    "BUCKET",
    "BUCKETS",
    "Config",
    "Question",
    "Source",
    "asked",
    "capturing",
    "choose",
    "device_name",
    "forced",
    "forget",
    "on_demand",
    "plan",
    "register",
    "register_cache",
    "shipped",
    "slug",
    "source",
    "switch",
    "widths",
]

Source = Literal["forced", "cache", "table", "heuristic"]
_Plan = TypeVar("_Plan")

_forced: dict[str, Config] = {}
_asked: list[dict[Question, None]] = []
_caches: list[dict[Any, Any]] = []
# A hidden size that the table lacks takes the entry of the next larger one, if that is at most so many times as large.
_NEAR = 2


def register_cache(plans: dict[Any, Any]) -> dict[Any, Any]:
    """A family's plans, kept by key; they are dropped where what a key stands for changes."""
    _caches.append(plans)
    return plans


def plan(plans: dict[Any, _Plan], key: tuple[Any, ...], make: Callable[..., _Plan], *more: Any) -> _Plan:
    """The plan for a key that has none; the key begins with the call's site and ends with the bucket of its rows.

    A bucket's config is only the best one: every plan is right for any number of rows. So while a CUDA graph is captured,
    which is no time to compile and load a kernel, the plan of the nearest bucket that has one serves, for that call.
    """
    if capturing(key[0].device_index):
        *same, bucket = key
        for other in sorted(range(len(BUCKETS)), key=lambda other: abs(other - bucket)):
            if (near := plans.get((*same, other))) is not None:
                return near
    made = plans[key] = make(*key, *more)
    return made


def capturing(device_index: int) -> bool:
    """Whether the current stream's work is being captured into a CUDA graph."""
    return device_index >= 0 and torch.cuda.is_current_stream_capturing()


def forget() -> None:
    """Drops all plans, so that every config is chosen anew; compiled kernels are kept."""
    for plans in _caches:
        plans.clear()


@contextmanager
def forced(kernel: str, config: Config) -> Iterator[None]:
    """Inside the block ``kernel`` runs with ``config``, whatever cache, table and heuristic say."""
    before = _forced.get(kernel)
    forget()
    _forced[kernel] = config
    try:
        yield
    finally:
        del _forced[kernel]
        if before is not None:
            _forced[kernel] = before
        forget()


@contextmanager
def asked() -> Iterator[dict[Question, None]]:
    """Collects, in order, the questions asked inside the block; plans made before are made again."""
    seen: dict[Question, None] = {}
    forget()
    _asked.append(seen)
    try:
        yield seen
    finally:
        _asked[:] = [other for other in _asked if other is not seen]


def choose(question: Question, device_index: int) -> Config:
    """The config for a question on a device; index -1 is the interpreter. The caller keeps it with its plan."""
    for seen in _asked:
        seen[question] = None
    config, origin = _answer(question, device_index)
    if origin != "forced" and on_demand() and device_name(device_index):
        # By name, as it stands above: it knows the specs, and runs the operators.
        tuner = importlib.import_module("fusedops.tune.ondemand")
        return tuner.improve(question, device_index, config, origin)  # type: ignore[no-any-return]
    return config


def source(question: Question, device_index: int) -> Source:
    """Where `choose` would have its config from, the tuner aside."""
    return _answer(question, device_index)[1]


def _answer(question: Question, device_index: int) -> tuple[Config, Source]:
    if question.kernel in _forced:
        return _forced[question.kernel], "forced"
    name = device_name(device_index)
    if name:
        if (config := cache.read(question, name)) is not None:
            return config, "cache"
        if (config := shipped(question, name)) is not None:
            return config, "table"
    family = family_of(question.kernel)
    assert family is not None, f"no family answers for {question.kernel}"
    return family.heuristic(question), "heuristic"


@functools.cache
def on_demand() -> str:
    """``FUSEDOPS_TUNE`` as it was at the first call: empty for off, ``1``, or ``force`` to tune what a table has too."""
    value = os.environ.get("FUSEDOPS_TUNE", "").lower()
    meant = switch(value)
    if meant is None:
        warnings.warn(f"fusedops: FUSEDOPS_TUNE is {value!r}, expected 1 (tune what nobody measured), force (tune what the "
                      "shipped table has too) or 0; nothing is tuned.", RuntimeWarning, stacklevel=2)  # fmt: skip
    return meant or ""


def switch(value: str) -> str | None:
    """What a value of ``FUSEDOPS_TUNE`` stands for: empty, ``1`` or ``force``; None for nothing that is known."""
    value = value.lower()
    if value in ("1", "true", "on", "yes", "y"):
        return "1"
    if value in ("", "0", "false", "off", "no", "n"):
        return ""
    return value if value == "force" else None


@functools.cache
def device_name(device_index: int) -> str:
    """The name under which a device's configs are kept; empty for the interpreter, which has none."""
    return torch.cuda.get_device_name(device_index) if device_index >= 0 else ""


def shipped(question: Question, device: str) -> Config | None:
    """The shipped table's config: for these columns or the next larger, in this bucket of rows or the nearest."""
    sizes = table(device).get(question.kernel, {}).get(question.group)
    if not sizes:
        return None
    known = sorted(sizes)
    place = bisect_left(known, question.cols)
    if place == len(known) or known[place] > _NEAR * question.cols:
        return None
    row = sizes[known[place]]
    # Fewer rows first: from some number of rows on the choice changes no more.
    nearest = sorted(range(len(row)), key=lambda bucket: (bucket > question.bucket, abs(bucket - question.bucket)))
    config = next((row[bucket] for bucket in nearest if row[bucket] is not None), None)
    return config if config is not None and valid(question, config) else None


@functools.cache
def table(device: str) -> Mapping[str, Mapping[str, Mapping[int, list[Config | None]]]]:
    """The shipped table of a device: by kernel, group and columns, the config of each bucket of rows."""
    file = resources.files("fusedops") / "tuned" / f"{slug(device)}.json"
    if not file.is_file():
        return {}
    found: dict[str, dict[str, dict[int, list[Config | None]]]] = {}
    for kernel, groups in json.loads(file.read_text())["configs"].items():
        for key, row in groups.items():
            group, _, cols = key.rpartition("|")
            sizes = found.setdefault(kernel, {}).setdefault(group, {})
            # What stands behind the buckets tells the tuner what the row was measured with.
            sizes[int(cols)] = [Config(*numbers) if numbers else None for numbers in row[: len(BUCKETS)]]
    return found
