"""``FUSEDOPS_TUNE=1``: a question that nobody measured is tuned when it is first asked.

A process of its own does it, so that the caller's random state, streams, gradients and caches stay as they are, and
so that the tuner's own calls ask nobody. Under ``torch.distributed`` rank 0 answers and the others read.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..core import tuning
from ..core.question import Config, Question, valid
from .compiling import child_environment

__all__ = ["improve"]

command: Sequence[str] = (sys.executable, "-m", "fusedops.tune.server")
# How long a rank waits for rank 0, which may have to reach the question first.
timeout = datetime.timedelta(seconds=300)

_lock = threading.Lock()
_server: subprocess.Popen[str] | None = None
_said: set[str] = set()


def improve(question: Question, device_index: int, config: Config, origin: tuning.Source) -> Config:
    """The tuned config, or ``config``, which came from ``origin``, where it is measured or cannot be."""
    if _recorded(device_index):
        return config
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return _agreed(question, device_index, config, origin)
    return _tuned(question, device_index, config, origin)


def _recorded(device_index: int) -> bool:
    """Whether work is being captured or traced: a benchmark would become part of it, or break it."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return device_index >= 0 and torch.cuda.is_current_stream_capturing()


def _tuned(question: Question, device_index: int, config: Config, origin: tuning.Source) -> Config:
    if origin == "cache" or (origin == "table" and tuning.on_demand() != "force"):
        return config
    with _lock:
        if device_index >= 0:
            torch.cuda.synchronize(device_index)  # what is in flight would be timed with it
        answer = _ask({"question": dataclasses.asdict(question), "device": device_index})
    found = _config(question, answer.get("config"))
    if found is None:
        _say_once("tune", f"{question} was not tuned ({answer.get('error', 'no answer')})")
    return found or config


def _ask(message: dict[str, Any]) -> dict[str, Any]:
    """One line to the tuner and one back; it is started with the first, and ends with this process."""
    global _server
    try:
        if _server is None:
            _server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                       env=child_environment())  # fmt: skip
        assert _server.stdin is not None and _server.stdout is not None
        print(json.dumps(message), file=_server.stdin, flush=True)
        if line := _server.stdout.readline():
            return dict(json.loads(line))
        problem = "the tuner died"
    except (OSError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    except BaseException:  # its answer would be taken for that to the next question
        _drop()
        raise
    _drop()
    return {"error": problem}


def _drop() -> None:
    """Ends the tuner; the next question gets another."""
    global _server
    if _server is not None:
        _server.kill()
        _server.wait()
        _server = None


def _agreed(question: Question, device_index: int, config: Config, origin: tuning.Source) -> Config:
    """All ranks take rank 0's config: one with another config sums in another order."""
    store = dist.distributed_c10d._get_default_store()
    key = f"fusedops_tune {tuning.device_name(device_index)} {question}"
    if dist.get_rank() == 0:
        config = _tuned(question, device_index, config, origin)
        store.set(key, json.dumps(dataclasses.astuple(config)))
        return config
    try:
        # Once rank 0 kept this one waiting in vain, what it has already said is read, and nothing is waited for.
        if "wait" not in _said:
            store.wait([key], timeout)
        found = _config(question, json.loads(store.get(key))) if store.check([key]) else None
    except RuntimeError:
        found = None
    if found is None:
        _say_once("wait", f"rank 0 did not say its config for {question} within {timeout}")
    return found or config


def _config(question: Question, numbers: Sequence[int] | None) -> Config | None:
    try:
        config = Config(*numbers or ())
    except TypeError:
        return None
    return config if valid(question, config) else None


def _say_once(what: str, problem: str) -> None:
    if what not in _said:
        _said.add(what)
        warnings.warn(f"fusedops: FUSEDOPS_TUNE: {problem}; the config in use stays. This is said once.",
                      RuntimeWarning, stacklevel=2)  # fmt: skip
