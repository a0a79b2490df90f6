"""``FUSEDOPS_TUNE=1``: tunes a key without a measurement when a config is first chosen for it.

The tuner is a child process, so that the caller's random state, streams, gradients and caches do
not change, and the tuner's own calls are not tuned. Under ``torch.distributed`` rank 0 tunes and
the others read its config:

    rank 0           store                 other ranks
    first use -----> "KEY reached" ------> wait, at most `reach`
    tune with the
    child process
    config    -----> "KEY"         ------> wait, at most `patience` + `reach`

Every wait has a timeout, and after a timeout the same wait is not tried again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import queue
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any, TextIO

import torch
import torch.distributed as dist

from ..core.compat.dispatch import dispatch_modes
from ..core.compat.distributed import default_store
from ..core.configs import tuning
from ..core.configs.tuning_key import Config, TuningKey, valid
from ..core.launches import launch
from .compiling import child_environment
from .replies import how_it_ended, replies_in

__all__ = ["improve"]

command: Sequence[str] = (sys.executable, "-m", "fusedops.tune.server")
# The timeout for tuning a key, including compilation and the start of the tuner.
patience = datetime.timedelta(seconds=180)
# The timeout of a rank for rank 0 to reach a key.
reach = datetime.timedelta(seconds=60)

_lock = threading.Lock()
_server: subprocess.Popen[str] | None = None
# The tuner's replies, and None at the end of its output.
_replies: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
_warned: set[str] = set()


def improve(key: TuningKey, device_index: int, config: Config, origin: tuning.Source) -> Config:
    """Return the tuned config.

    Args:
        key: the key to tune.
        device_index: the GPU's; negative for a CPU.
        config: the current config, returned if it is a measured one or tuning is impossible.
        origin: the source of ``config``.
    """
    # The child process cannot import a user's function.
    if _is_recording(device_index) or key.kernel.startswith("rowwise"):
        return config
    if _has_other_ranks():
        return _agreed(key, device_index, config, origin)
    return _tuned(key, device_index, config, origin)


def _has_other_ranks() -> bool:
    if not dist.is_available() or not dist.is_initialized():
        return False
    return dist.get_world_size() > 1


def _is_recording(device_index: int) -> bool:
    """Whether calls are captured, traced or only planned, so that a benchmark must not run."""
    if launch.collects() or torch.compiler.is_compiling() or dispatch_modes() > 0:
        return True
    return tuning.capturing(device_index)


def _tuned(key: TuningKey, device_index: int, config: Config, origin: tuning.Source) -> Config:
    """Return the child process's config, or the current one if that was measured or none comes."""
    # A forced tuning replaces what was measured elsewhere, not what was measured here.
    measured = ("cache",) if tuning.on_demand() == "force" else ("cache", "table")
    if origin in measured:
        return config
    with _lock:
        if "hang" in _warned:
            return config
        if device_index >= 0:
            torch.cuda.synchronize(device_index)  # pending work would slow the measured kernels
        reply = _request({"key": dataclasses.asdict(key), "device": device_index})
    tuned = _config(key, reply.get("config"))
    if tuned is None and "hang" not in _warned:
        _warn_once("tune", f"{key} was not tuned ({reply.get('error', 'no reply')})")
    return tuned or config


def _request(message: dict[str, Any]) -> dict[str, Any]:
    """Send one line to the tuner and return its reply.

    The first request starts the tuner, which ends with this process.
    """
    try:
        if _server is None:
            _start()
        assert _server is not None and _server.stdin is not None
        # The end of a tuner that no longer reads is in its replies.
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(message), file=_server.stdin, flush=True)
        reply = _replies.get(timeout=patience.total_seconds())
        if reply is not None:
            return reply
        problem = f"the tuner died {how_it_ended(_server)}"
    except queue.Empty:
        problem = f"no reply within {patience}"
        _warn_once(
            "hang",
            f"the tuner did not reply for {message['key']['kernel']} within {patience} and is not "
            "used any more",
        )
    except OSError as error:
        problem = f"{type(error).__name__}: {error}"
    except BaseException:  # otherwise its reply would be read as the next request's
        _drop()
        raise
    _drop()
    return {"error": problem}


def _start() -> None:
    """Start the tuner, and a thread that reads its replies."""
    global _server, _replies
    _server = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",  # what is no reply may be in any encoding
        env=child_environment(),
    )
    # A new queue, so that replies of an earlier tuner cannot be read as this one's.
    _replies = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(_server.stdout, _replies), daemon=True).start()


def _listen(lines: TextIO, replies: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    """Put the tuner's replies into a queue, and None at its end.

    Reads of a queue have a timeout, which reads of a pipe do not.
    """
    with lines:
        for reply in replies_in(lines):
            replies.put(reply)
    replies.put(None)


def _drop() -> None:
    """End the tuner; the next request starts another."""
    global _server
    if _server is None:
        return
    _server.kill()
    # A process that hangs in a driver ends later.
    with contextlib.suppress(subprocess.TimeoutExpired):
        _server.wait(timeout=5.0)
    # Closing the pipe raises if a request in its buffer cannot be written any more.
    with contextlib.suppress(OSError):
        if _server.stdin is not None:
            _server.stdin.close()
    _server = None


def _agreed(key: TuningKey, device_index: int, config: Config, origin: tuning.Source) -> Config:
    """Return one config for all ranks, the first that any rank stores.

    All ranks must use the same one, since different configs add numbers in different orders. It is
    usually rank 0's, for which the others wait. A rank whose wait timed out stores the config it
    has; if rank 0 reaches the key later, it uses that config and does not tune.

    The store has two entries for a key: one for the config, and one whose name ends in "reached",
    which is set before rank 0 tunes.
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
            # It may be an error of the user's earlier work on the device. The other ranks must not
            # wait for this one, so it is raised after a config has been stored.
            except Exception as error:  # noqa: BLE001
                problem = error
        stored = store.compare_set(name, "", json.dumps(dataclasses.astuple(config)))
        # For the ranks that still wait for "reached". Rank 0 has set it already, but a rank whose
        # wait timed out has stored the config without it.
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
        store.wait([name], patience + reach)  # rank 0 may have to wait for its tuner
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
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(
            f"fusedops: FUSEDOPS_TUNE: {problem}; the current config stays in use. "
            "This warning is shown once.",
            RuntimeWarning,
            stacklevel=2,
        )
