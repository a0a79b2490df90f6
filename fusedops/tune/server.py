"""``python -m fusedops.tune.server``: tunes the keys that its parent process sends, one per line.

It exits when its input ends, so that it does not outlive its parent.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any, TextIO

import torch

from ..core.children import send
from ..core.configs import cache, tuning
from ..core.configs.tuning_key import TuningKey
from .sweep import Outcome, Sweeper
from .timing import GraphTimer
from .workloads import discover, kernels_alone, workload_for

__all__ = ["serve", "tune"]

# The number of processes that compile in parallel.
_JOBS = 8


def serve(requests: TextIO, replies: TextIO, sweeper: Callable[[int], Sweeper]) -> None:
    """Reply to each request with a config or an error."""
    discover()
    for line in requests:
        try:
            reply: dict[str, Any] = {"config": astuple(tune(json.loads(line), sweeper).best)}
        # Whatever is raised, the parent continues with its current config.
        except Exception as error:  # noqa: BLE001
            reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        send(reply, replies)


def tune(message: Mapping[str, Any], sweeper: Callable[[int], Sweeper]) -> Outcome:
    """Tune one key and write the best config to the user's cache.

    Raises:
        LookupError: no workload has this key.
    """
    index, parts = message["device"], message["key"]
    key = TuningKey(**{**parts, "variant": tuple(parts["variant"])})
    device = torch.device("cuda", index) if index >= 0 else torch.device("cpu")
    workload = workload_for(key, device)
    if workload is None:
        raise LookupError("no workload has this key")
    with kernels_alone():
        # A step has several keys. Only the parent's is tuned: it requests the others when it needs
        # them.
        tuner = sweeper(index)
        outcome = next(tuner.sweep([workload], wanted=lambda candidate: candidate == key), None)
    if outcome is None:
        raise RuntimeError("; ".join(map(str, tuner.failures)) or "nothing was measured")
    times = {"best": outcome.us_of(outcome.best), "heuristic": outcome.us_of(outcome.heuristic)}
    cache.write(key, tuning.device_name(index), outcome.best, times)
    return outcome


def _gpu_sweeper() -> Callable[[int], Sweeper]:
    """Return a function that creates the sweeper of each GPU when it is first used."""
    from .command import pool_for, sweeper_for

    # Each GPU has one sweeper, because a sweeper has a pool of processes and a stream.
    sweepers: dict[int, Sweeper] = {}

    def sweeper(index: int) -> Sweeper:
        if index not in sweepers:
            torch.cuda.set_device(index)
            device = torch.device("cuda", index)
            pool = pool_for(device, min(_JOBS, os.cpu_count() or 1))
            sweepers[index] = sweeper_for(device, pool, GraphTimer(device))
        return sweepers[index]

    return sweeper


if __name__ == "__main__":
    replies = sys.stdout
    # Other prints go to standard error: the parent would not show them among the replies.
    sys.stdout = sys.stderr
    serve(sys.stdin, replies, _gpu_sweeper())
    # Not `sys.exit`, which would wait for threads that still compile.
    os._exit(0)
