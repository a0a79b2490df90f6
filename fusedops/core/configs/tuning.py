"""Chooses the config of a kernel. These are the sources; the first one that has a config is used.

1. ``forced``: the config of a block of `forced`.
2. ``cache``: the user's cache of tuned configs.
3. ``table``: the shipped table of the device.
4. ``heuristic``: the family's rule.

This module measures nothing. With ``FUSEDOPS_TUNE=1`` it calls the registered tuner for keys that
were not measured.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import Any, Literal, TypeVar

import torch

from . import cache
from .cache import slug
from .tuning_key import (
    BUCKET,
    BUCKETS,
    Config,
    TuningKey,
    config_of_sums,
    family_of,
    register,
    valid,
    widths,
)

__all__ = [
    "BUCKET",
    "BUCKETS",
    "Config",
    "Source",
    "TuningKey",
    "capturing",
    "choose",
    "collected_keys",
    "config_of_sums",
    "device_name",
    "forced",
    "forces",
    "forget",
    "on_demand",
    "plan",
    "register",
    "register_cache",
    "register_tuner",
    "shipped",
    "slug",
    "source",
    "switch",
    "widths",
]

Source = Literal["forced", "cache", "table", "heuristic"]
_Plan = TypeVar("_Plan")
# A function that tunes: it takes a key, a device's index, the config without tuning and the source
# of that config; it returns the tuned config.
Tuner = Callable[[TuningKey, int, Config, Source], Config]

# The most plans of a family. Few programs need so many; if one does, the plans are cleared.
_MOST_PLANS = 16384
_forced: dict[str, Config] = {}  # by kernel, of the active blocks of `forced`
_collectors: list[dict[TuningKey, None]] = []  # of the active blocks of `collected_keys`
_caches: list[dict[Any, Any]] = []  # the families' dicts of plans
_load_tuner: Callable[[], Tuner] | None = None
# If the shipped table has no entry for a hidden size, the entry for a larger one is used, up to
# this many times as large.
_NEAR = 2
# The meanings of ``FUSEDOPS_TUNE``, by its value in lower case.
_SWITCH = {
    **dict.fromkeys(("1", "true", "on", "yes", "y"), "1"),
    **dict.fromkeys(("", "0", "false", "off", "no", "n"), ""),
    "force": "force",
}


def register_cache(plans: dict[Any, Any]) -> dict[Any, Any]:
    """Registers a family's dict of plans, which `forget` clears; returns it."""
    _caches.append(plans)
    return plans


def register_tuner(load: Callable[[], Tuner]) -> None:
    """Registers the tuner, which is called if ``FUSEDOPS_TUNE`` is on.

    ``load`` imports the tuner and returns it. The tuner runs operators, so it is above this package
    in the layering, and this package must not import it.
    """
    global _load_tuner
    _load_tuner = load


def plan(
    plans: dict[Any, _Plan], key: tuple[Any, ...], make: Callable[..., _Plan], *arguments: Any
) -> _Plan:
    """Returns and stores the plan for a new key: ``make(*key, *arguments)``.

    A key begins with the call's site and ends with the bucket of its number of rows. Every plan is
    correct for any number of rows, but fastest for those of its bucket.
    """
    if capturing(key[0].device_index):
        # No kernel can be compiled and loaded while a CUDA graph is captured.
        nearest = _of_nearest_bucket(plans, key)
        if nearest is not None:
            return nearest
    # Clearing is cheap: kernels stay compiled, so that a plan that is needed again costs only a
    # choice of its config and a look-up of its kernels.
    if len(plans) >= _MOST_PLANS:
        plans.clear()
    result = plans[key] = make(*key, *arguments)
    return result


def _of_nearest_bucket(plans: dict[Any, _Plan], key: tuple[Any, ...]) -> _Plan | None:
    """Returns the plan of the same call for the nearest bucket; None if there is none."""
    *call, bucket = key
    by_distance = sorted(range(len(BUCKETS)), key=lambda candidate: abs(candidate - bucket))
    for candidate in by_distance:
        nearest = plans.get((*call, candidate))
        if nearest is not None:
            return nearest
    return None


def capturing(device_index: int) -> bool:
    """Whether the current stream's work is being captured into a CUDA graph."""
    return device_index >= 0 and torch.cuda.is_current_stream_capturing()


def forget() -> None:
    """Clears all plans, so that every config is chosen again; compiled kernels stay cached."""
    for plans in _caches:
        plans.clear()


@contextmanager
def forced(kernel: str, config: Config) -> Iterator[None]:
    """Runs ``kernel`` with ``config`` inside the block, whatever the other sources have."""
    previous = _forced.get(kernel)
    # A plan holds its config: without this, a call would run with the config of an existing plan.
    forget()
    _forced[kernel] = config
    try:
        yield
    finally:
        del _forced[kernel]
        if previous is not None:
            _forced[kernel] = previous
        forget()


def forces() -> bool:
    """Whether a block of `forced` is active, so that no other config may run."""
    return bool(_forced)


@contextmanager
def collected_keys() -> Iterator[dict[TuningKey, None]]:
    """Clears all plans; then collects the keys for which configs are chosen in the block.

    It yields them as the keys of a dict, in the order of the choices.
    """
    keys: dict[TuningKey, None] = {}
    forget()
    _collectors.append(keys)
    try:
        yield keys
    finally:
        # Removed by identity: another block's dict may be equal, and must not be removed.
        _collectors[:] = [collected for collected in _collectors if collected is not keys]


def choose(key: TuningKey, device_index: int) -> Config:
    """Returns the config for a key on a device; index -1 is the interpreter.

    The caller stores the config in its plan.
    """
    for keys in _collectors:
        keys[key] = None
    config, origin = _lookup(key, device_index)
    if origin == "forced" or _load_tuner is None:
        return config
    # The interpreter has no device name. Nothing is tuned for it.
    if on_demand() and device_name(device_index):
        return _load_tuner()(key, device_index, config, origin)
    return config


def source(key: TuningKey, device_index: int) -> Source:
    """Returns the source of the config that `choose` returns without the tuner."""
    return _lookup(key, device_index)[1]


def _lookup(key: TuningKey, device_index: int) -> tuple[Config, Source]:
    """Returns the config from the first source that has one, and that source."""
    if key.kernel in _forced:
        return _forced[key.kernel], "forced"
    name = device_name(device_index)
    if name:
        # A measurement on this machine takes precedence over one on another machine of its kind.
        config = cache.read(key, name)
        if config is not None:
            return config, "cache"
        config = shipped(key, name)
        if config is not None:
            return config, "table"
    family = family_of(key.kernel)
    assert family is not None, f"no family has a kernel {key.kernel}"
    return family.heuristic(key), "heuristic"


@functools.cache
def on_demand() -> str:
    """Returns whether to tune: the meaning of ``FUSEDOPS_TUNE``, which is read at the first call.

    It is "" for off, "1" to tune keys without a measurement, or "force" to tune also keys that the
    shipped table has.
    """
    value = os.environ.get("FUSEDOPS_TUNE", "").lower()
    meaning = switch(value)
    if meaning is None:
        warnings.warn(
            f"fusedops: FUSEDOPS_TUNE is {value!r}, expected 1 (tune keys without a measurement), "
            "force (tune keys that the shipped table has too) or 0; nothing is tuned.",
            RuntimeWarning,
            stacklevel=2,
        )
        return ""
    return meaning


def switch(value: str) -> str | None:
    """Returns the meaning of a value of ``FUSEDOPS_TUNE``; None for an unknown value."""
    return _SWITCH.get(value.lower())


@functools.cache
def device_name(device_index: int) -> str:
    """Returns the device's name, as in the cache and the tables; "" for the interpreter."""
    return torch.cuda.get_device_name(device_index) if device_index >= 0 else ""


def shipped(key: TuningKey, device: str) -> Config | None:
    """Returns the shipped table's config for a key; None if it has none.

    An entry is for a number of columns, and has a config for each bucket of rows. If the table has
    no entry for the key's columns, the entry for the next larger number is used. If the entry has
    no config for the key's bucket, the config of the nearest bucket is returned.
    """
    configs_by_cols = table(device).get(key.kernel, {}).get(key.group, {})
    most_cols = _NEAR * key.cols
    usable_cols = [cols for cols in configs_by_cols if key.cols <= cols <= most_cols]
    if not usable_cols:
        return None
    config = _nearest(configs_by_cols[min(usable_cols)], key.bucket)
    # A config for more columns may be unfit for this key: it may leave too many lanes idle.
    if config is None or not valid(key, config):
        return None
    return config


def _nearest(configs: Sequence[Config | None], bucket: int) -> Config | None:
    """Returns the config of the nearest bucket that has one; None if no bucket has."""
    # The smaller buckets come first, because beyond some number of rows the best config no longer
    # changes.
    smaller = range(min(bucket, len(configs) - 1), -1, -1)
    larger = range(bucket + 1, len(configs))
    order: list[int] = [*smaller, *larger]
    for candidate in order:
        config = configs[candidate]
        if config is not None:
            return config
    return None


@functools.cache
def table(device: str) -> Mapping[str, Mapping[str, Mapping[int, list[Config | None]]]]:
    """Returns the shipped table of a device: the configs by kernel, group, columns and bucket."""
    file = resources.files("fusedops") / "tuned" / f"{slug(device)}.json"
    if not file.is_file():
        return {}
    kernels: dict[str, dict[str, dict[int, list[Config | None]]]] = {}
    for kernel, rows in json.loads(file.read_text())["configs"].items():
        for name, row in rows.items():
            group, _, cols = name.rpartition("|")
            configs_by_cols = kernels.setdefault(kernel, {}).setdefault(group, {})
            configs_by_cols[int(cols)] = _configs_of(row)
    return kernels


def _configs_of(row: Sequence[Any]) -> list[Config | None]:
    """Returns the config of each bucket in a row of a table; None where none was measured."""
    # A row has another, last element, which only the tuner reads: it identifies the measured code.
    measured = row[: len(BUCKETS)]
    return [Config(*numbers) if numbers else None for numbers in measured]
