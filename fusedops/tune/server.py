"""``python -m fusedops.tune.server``: tunes the questions it is sent, line by line, for a process that keeps running.

It ends with its input, so that it outlives nobody.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any, TextIO

import torch

from ..core import cache, tuning
from ..core.question import Question
from .sweep import Outcome, Sweeper
from .timing import GraphTimer
from .workloads import discover, kernels_alone, workload_for

__all__ = ["answer", "serve"]

# Processes that compile beside the one that waits.
_JOBS = 8


def serve(requests: TextIO, answers: TextIO, sweeper: Callable[[int], Sweeper]) -> None:
    """Answers each request with a config, or with what went wrong."""
    discover()
    for line in requests:
        try:
            reply: dict[str, Any] = {"config": astuple(answer(json.loads(line), sweeper).best)}
        except Exception as error:  # noqa: BLE001 - whatever fails, the process that asks goes on with what it has
            reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        print(json.dumps(reply), file=answers, flush=True)


def answer(message: Mapping[str, Any], sweeper: Callable[[int], Sweeper]) -> Outcome:
    """Tunes one question, and keeps its answer in the user's cache.

    Raises:
        LookupError: no operator is known to ask it.
    """
    index, parts = message["device"], message["question"]
    question = Question(**{**parts, "variant": tuple(parts["variant"])})
    device = torch.device("cuda", index) if index >= 0 else torch.device("cpu")
    workload = workload_for(question, device)
    if workload is None:
        raise LookupError("no workload asks this")
    with kernels_alone():
        tuner = sweeper(index)
        outcomes = tuner.sweep([workload], wanted=question.__eq__)
        outcome = next((found for found in outcomes if found.question == question), None)
    if outcome is None:
        raise RuntimeError("; ".join(map(str, tuner.failures)) or "nothing came of it")
    times = {"best": outcome.us_of(outcome.best), "heuristic": outcome.us_of(outcome.heuristic)}
    cache.write(question, tuning.device_name(index), outcome.best, times)
    return outcome


def _gpu_sweeper() -> Callable[[int], Sweeper]:
    from .command import pool_for, sweeper_for

    known: dict[int, Sweeper] = {}

    def sweeper(index: int) -> Sweeper:
        if index not in known:
            torch.cuda.set_device(index)
            device = torch.device("cuda", index)
            known[index] = sweeper_for(device, pool_for(device, min(_JOBS, os.cpu_count() or 1)), GraphTimer(device))
        return known[index]

    return sweeper


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing that is printed may come between the answers
    serve(sys.stdin, answers, _gpu_sweeper())
    os._exit(0)  # the compilers' threads may be waiting for work that nobody wants any more
