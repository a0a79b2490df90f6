"""``FUSEDOPS_TUNE=1``: a question that nobody measured is tuned when it is first asked.

A process of its own does it, so that the caller's random state, streams, gradients and caches stay as they are, and
so that the tuner's own calls ask nobody. Under ``torch.distributed`` rank 0 answers and the others read. Every wait has
an end, and after one that was in vain there is none of its kind any more.
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

from ..core import launch, tuning
from ..core.question import Config, Question, valid
from .compiling import child_environment

__all__ = ["improve"]

command: Sequence[str] = (sys.executable, "-m", "fusedops.tune.server")
# How long a question may take to tune, its compilation and the tuner's start included.
patience = datetime.timedelta(seconds=180)
# How long a rank waits for rank 0 to reach a question.
reach = datetime.timedelta(seconds=60)

_lock = threading.Lock()
_server: subprocess.Popen[str] | None = None
_answers: queue.SimpleQueue[str] = queue.SimpleQueue()
_said: set[str] = set()


def improve(question: Question, device_index: int, config: Config, origin: tuning.Source) -> Config:
    """The tuned config, or ``config``, which came from ``origin``, where it is measured or cannot be."""
    if _recorded(device_index):
        return config
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return _agreed(question, device_index, config, origin)
    return _tuned(question, device_index, config, origin)


def _recorded(device_index: int) -> bool:
    """Whether work is captured or traced, of which a benchmark would become part, or planned and never done."""
    if launch.collects() or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return tuning.capturing(device_index)


def _tuned(question: Question, device_index: int, config: Config, origin: tuning.Source) -> Config:
    if origin == "cache" or (origin == "table" and tuning.on_demand() != "force"):
        return config
    with _lock:
        if "hang" in _said:
            return config
        if device_index >= 0:
            torch.cuda.synchronize(device_index)  # what is in flight would be timed with it
        answer = _ask({"question": dataclasses.asdict(question), "device": device_index})
    found = _config(question, answer.get("config"))
    if found is None and "hang" not in _said:
        _say_once("tune", f"{question} was not tuned ({answer.get('error', 'no answer')})")
    return found or config


def _ask(message: dict[str, Any]) -> dict[str, Any]:
    """One line to the tuner and one back; it is started with the first, and ends with this process."""
    global _server, _answers
    try:
        if _server is None:
            _server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                       env=child_environment())  # fmt: skip
            _answers = queue.SimpleQueue()
            threading.Thread(target=_listen, args=(_server.stdout, _answers), daemon=True).start()
        assert _server.stdin is not None
        print(json.dumps(message), file=_server.stdin, flush=True)
        if line := _answers.get(timeout=patience.total_seconds()):
            return dict(json.loads(line))
        problem = "the tuner died"
    except queue.Empty:
        problem = f"no answer within {patience}"
        _say_once("hang", f"the tuner did not answer for {message['question']['kernel']} within {patience} and is asked "
                  "no more")  # fmt: skip
    except (OSError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    except BaseException:  # its answer would be taken for that to the next question
        _drop()
        raise
    _drop()
    return {"error": problem}


def _listen(lines: TextIO, answers: queue.SimpleQueue[str]) -> None:
    """Hands on what the tuner says, and an empty line for its end; a read of the pipe itself could not be given up."""
    for line in lines:
        answers.put(line)
    answers.put("")


def _drop() -> None:
    """Ends the tuner; the next question gets another."""
    global _server
    if _server is not None:
        _server.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in a driver goes when that lets it
            _server.wait(timeout=5.0)
        _server = None


def _agreed(question: Question, device_index: int, config: Config, origin: tuning.Source) -> Config:
    """All ranks take one config, as one with another config sums in another order: the first that any of them names.

    That is rank 0's, which the others wait for. A rank that waited in vain names the config that it has; rank 0, if it
    comes later, takes that and tunes nothing.
    """
    store = dist.distributed_c10d._get_default_store()
    key = f"fusedops_tune {tuning.device_name(device_index)} {question}"
    reached = f"{key} reached"
    problem: Exception | None = None
    try:
        if dist.get_rank() == 0:
            if not store.check([key]):
                store.set(reached, "")
                try:
                    config = _tuned(question, device_index, config, origin)
                except Exception as error:  # noqa: BLE001 - the user's own, from the device, say; raised below
                    problem = error  # the others are not to wait for it
        elif "wait" not in _said:
            _wait(store, question, reached, key)
        named = store.compare_set(key, "", json.dumps(dataclasses.astuple(config)))
        store.set(reached, "")
        found = _config(question, json.loads(named))
        if found is None:
            _say_once("store", f"another rank named {named!r} for {question}")
    except RuntimeError as error:
        found = None
        _say_once("store", f"the ranks' store failed ({str(error).splitlines()[0][:200]})")
    if problem is not None:
        raise problem
    return found or config


def _wait(store: Any, question: Question, reached: str, key: str) -> None:
    """Until rank 0's answer is there, or for so long that it will not come."""
    try:
        store.wait([reached], reach)
        store.wait([key], patience + reach)  # rank 0 may have to wait for its tuner
    except RuntimeError:
        _say_once("wait", f"rank 0 did not name its config for {question} in time and is not waited for any more")


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
