"""``FUSEDOPS_TUNE=1``: tunes a key that was not measured when its config is first chosen.

The tuner is a child process, so that the caller's random state, streams, gradients and caches do
not change, and the tuner's own calls are not tuned. With ``torch.distributed``, rank 0 tunes and
the other ranks read its config:

    rank 0           store                 other ranks
    first use -----> "KEY reached" ------> wait, at most `reach`
    tune with the
    child process
    config    -----> "KEY"         ------> wait, at most `patience` + `reach`

Every wait has a timeout, and after a timeout the same wait is not tried again.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..core.children import Child
from ..core.compat.dispatch import dispatch_modes
from ..core.compat.distributed import default_store, has_other_ranks
from ..core.configs import tuning
from ..core.configs.tuning_key import Config, TuningKey, valid
from ..core.launches import launch

__all__ = ["improve"]

command: Sequence[str] = (sys.executable, "-m", "fusedops.tune.server")
# The timeout for tuning a key, including compilation and the start of the tuner.
patience = datetime.timedelta(seconds=180)
# The timeout for which another rank waits until rank 0 reaches a key.
reach = datetime.timedelta(seconds=60)

_lock = threading.Lock()
_server: Child | None = None
_warned: set[str] = set()


def improve(key: TuningKey, device_index: int, config: Config, origin: tuning.Source) -> Config:
    """Return the tuned config.

    Args:
        key: the key to tune.
        device_index: the GPU's index; negative for a CPU.
        config: the current config. It is returned if it was measured or tuning is impossible.
        origin: the source of ``config``.
    """
    # Kernels of users' functions are not tuned, because the child process cannot import these.
    is_users = key.kernel.startswith("rowwise")
    if is_users or _is_recording(device_index):
        return config
    if has_other_ranks():
        return _agreed(key, device_index, config, origin)
    return _tuned(key, device_index, config, origin)


def _is_recording(device_index: int) -> bool:
    """Return whether calls are captured, traced or only planned: then no benchmark must run."""
    if launch.collects() or torch.compiler.is_compiling() or dispatch_modes() > 0:
        return True
    return tuning.capturing(device_index)


def _tuned(key: TuningKey, device_index: int, config: Config, origin: tuning.Source) -> Config:
    """Return the config that the child process tuned.

    If the current ``config`` was measured, or the child process fails, ``config`` is returned.
    """
    # With "force", configs of the shipped table are tuned again, but not those of this cache.
    measured = ("cache",) if tuning.on_demand() == "force" else ("cache", "table")
    if origin in measured:
        return config
    with _lock:
        if "hang" in _warned:
            return config
        if device_index >= 0:
            # Pending work would slow down the kernels that are measured.
            torch.cuda.synchronize(device_index)
        reply = _request({"key": dataclasses.asdict(key), "device": device_index})
    tuned = _config(key, reply.get("config"))
    if tuned is None and "hang" not in _warned:
        _warn_once("tune", f"{key} was not tuned ({reply.get('error', 'no reply')})")
    return tuned or config


def _request(message: dict[str, Any]) -> dict[str, Any]:
    """Send one line to the tuner and return its reply.

    The first request starts the tuner, which ends with this process.
    """
    global _server
    try:
        if _server is None:
            _server = Child(command)
        reply = _server.reply(json.dumps(message), patience.total_seconds())
        if reply is not None:
            return reply
        problem = f"the tuner died {_server.how_it_ended()}"
    except TimeoutError:
        problem = f"no reply within {patience}"
        _warn_once(
            "hang",
            f"the tuner did not reply for {message['key']['kernel']} within {patience} and is not "
            "used any more",
        )
    except OSError as error:
        problem = f"{type(error).__name__}: {error}"
    except BaseException:
        # Otherwise the reply to this request would be read as that to the next.
        _drop()
        raise
    _drop()
    return {"error": problem}


def _drop() -> None:
    """End the tuner; the next request starts another."""
    global _server
    if _server is not None:
        _server.end()
    _server = None


def _agreed(key: TuningKey, device_index: int, config: Config, origin: tuning.Source) -> Config:
    """Return one config for all ranks, the first that any rank stores.

    All ranks must use the same config, because different configs add numbers in different orders.
    Usually rank 0 stores its config, and the other ranks wait for it. A rank whose wait timed out
    stores its current config. If rank 0 reaches the key later, it uses the stored config and does
    not tune.

    The store has two entries for a key: one has the config. The name of the other ends in
    "reached", and it is set before rank 0 tunes.
    """
    store = default_store()
    name = f"fusedops_tune {tuning.device_name(device_index)} {key}"
    reached = f"{name} reached"
    problem: Exception | None = None
    agreed: Config | None = None
    try:
        if dist.get_rank() != 0:
            if "wait" not in _warned:
                _wait(store, key, reached, name)
        elif not store.check([name]):
            store.set(reached, "")
            try:
                config = _tuned(key, device_index, config, origin)
            # The error may be one of the user's earlier work on the device. It is raised only after
            # a config has been stored, because the other ranks wait for one.
            except Exception as error:  # noqa: BLE001
                problem = error
        stored = store.compare_set(name, "", json.dumps(dataclasses.astuple(config)))
        # Other ranks may still wait for "reached". Rank 0 has set it already, but a rank whose wait
        # timed out has not.
        store.set(reached, "")
        agreed = _config(key, json.loads(stored))
        if agreed is None:
            _warn_once("store", f"another rank stored {stored!r} for {key}")
    except RuntimeError as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        _warn_once("store", f"the ranks' store failed ({reason})")
    if problem is not None:
        raise problem
    return agreed or config


def _wait(store: Any, key: TuningKey, reached: str, name: str) -> None:
    """Wait until rank 0 has stored its config, or until a timeout."""
    try:
        store.wait([reached], reach)
        # Rank 0 may take `patience` to tune.
        store.wait([name], patience + reach)
    except RuntimeError:
        _warn_once(
            "wait",
            f"rank 0 did not store its config for {key} in time; this rank no longer waits for it",
        )


def _config(key: TuningKey, numbers: Sequence[int] | None) -> Config | None:
    """Return the config with these fields, or None if the key's kernel cannot have it."""
    if numbers is None:
        return None
    try:
        config = Config(*numbers)
    except TypeError:
        return None
    return config if valid(key, config) else None


def _warn_once(kind: str, problem: str) -> None:
    """Warn of a problem if there was no warning of this kind before."""
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(
            f"fusedops: FUSEDOPS_TUNE: {problem}; the current config stays in use. "
            "This warning is shown once.",
            RuntimeWarning,
            stacklevel=2,
        )
