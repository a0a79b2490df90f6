"""Parts of a tuner that do not time anything: costs are made up, and the same in all processes.

The other parts are the real ones. They plan for the GPU if there is one, else for the CPU. As a
script, under Triton's interpreter on the CPU, this tunes the same workloads again and again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from fusedops.core.configs import tuning
from fusedops.core.configs.tuning_key import Config, TuningKey
from fusedops.core.launches.launch import Request
from fusedops.core.launches.usage import Usage
from fusedops.tune import command
from fusedops.tune.sweep import Sweeper
from fusedops.tune.usage import limits_of
from fusedops.tune.workloads import Workload, discover, kernels_alone

__all__ = ["NAME", "Bench", "Pool", "Timer", "cost", "sweeper", "workloads"]

NAME = "Test GPU"
CPU = torch.device("cpu")
# The device for which workloads are planned. On the CPU there are kernels only under the
# interpreter.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def cost(key: TuningKey, config: Config) -> float:
    """A made-up time in microseconds, from 10 to 20."""
    return 10.0 + zlib.crc32(f"{key} {config}".encode()) % 1000 / 100.0


class Pool:
    """A pool of compilers that returns made-up resources at once: by default 32 registers."""

    def __init__(self, usages: dict[Config, Usage] | None = None) -> None:
        self.usages, self.requests = usages or {}, list[Request]()

    def submit(self, request: Request, *, fit: bool = False) -> Future[Usage]:
        self.requests.append(request)
        future: Future[Usage] = Future()
        future.set_result(self.usages.get(request.config, Usage(registers=32)))
        return future


class Bench:
    """Returns made-up times for a workload, and records the requests in its timer."""

    def __init__(self, timer: Timer, workload: Workload) -> None:
        self.timer, self.workload = timer, workload

    def us(self, key: TuningKey, config: Config, *, careful: bool) -> float:
        self.timer.timed.append((key, config, careful))
        self.timer.on_timing(key)
        return self.timer.costs.get(config, cost(key, config))

    def agree(self, key: TuningKey, first: Config, second: Config) -> bool:
        return second not in self.timer.wrong


class Timer:
    """A timer with made-up times.

    Args:
        costs: the times of some configs; others have those of `cost`.
        wrong: configs whose results are to differ from those of others.
    """

    def __init__(
        self, costs: dict[Config, float] | None = None, wrong: tuple[Config, ...] = ()
    ) -> None:
        self.costs, self.wrong = costs or {}, wrong
        self.timed: list[tuple[TuningKey, Config, bool]] = []
        self.on_timing: Callable[[TuningKey], object] = lambda key: None

    def open(self, workload: Workload) -> Bench:
        return Bench(self, workload)


def sweeper(
    pool: Any = None, timer: Timer | None = None, *, device: torch.device = DEVICE
) -> Sweeper:
    return Sweeper(pool or Pool(), timer or Timer(), device, name="", limits=limits_of(CPU))


def workloads(*names: str, shape: tuple[int, ...] = (20, 64)) -> list[Workload]:
    return [
        Workload(spec, shape, torch.float32)
        for spec in discover()
        if not names or spec.name in names
    ]


def main(rounds: int) -> None:
    """Tunes for this many rounds, and prints ``begun`` after the first."""
    tuning.device_name = lambda index: NAME  # type: ignore[assignment]
    options, to_tune = argparse.Namespace(raw=None), workloads("rms_norm", "bias_dropout_add_ln")
    cache = command._Cache(options, torch.device("cuda", 0))
    with kernels_alone():
        for count in range(rounds):
            with contextlib.redirect_stdout(io.StringIO()):
                command._sweep(
                    sweeper(device=CPU), to_tune, cache, budget=1e9, describe=lambda outcome: ""
                )
            if count == 0:
                print("begun", flush=True)


def options(**changes: object) -> argparse.Namespace:
    """The options of the command ``tune``, with defaults for those that are not in ``changes``."""
    defaults = {
        "op": None,
        "shape": None,
        "dtype": None,
        "ship": False,
        "raw": None,
        "resume": False,
        "output": None,
        "function": None,
        "arg": None,
    }
    return argparse.Namespace(**{**defaults, **changes})


if __name__ == "__main__":
    main(int(sys.argv[1]))
