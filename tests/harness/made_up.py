"""A tuner that times nothing: costs are made up, the same for all processes.

As a script it tunes over and over.

Everything else is the real one, on the GPU where there is one; what runs the script does so under
Triton's interpreter, on the CPU.
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
# Where workloads are planned: kernels are there on a GPU, and on the CPU only under the
# interpreter.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def cost(key: TuningKey, config: Config) -> float:
    """Microseconds, from 10 to 20."""
    return 10.0 + zlib.crc32(f"{key} {config}".encode()) % 1000 / 100.0


class Pool:
    """A pool in which every kernel compiles at once, with few resources or those of ``usages``."""

    def __init__(self, usages: dict[Config, Usage] | None = None) -> None:
        self.usages, self.requests = usages or {}, list[Request]()

    def submit(self, request: Request, *, fit: bool = False) -> Future[Usage]:
        self.requests.append(request)
        done: Future[Usage] = Future()
        done.set_result(self.usages.get(request.config, Usage(registers=32)))
        return done


class Bench:
    """Records what it times."""

    def __init__(self, timer: Timer, workload: Workload) -> None:
        self.timer, self.workload = timer, workload

    def us(self, key: TuningKey, config: Config, *, careful: bool) -> float:
        self.timer.timed.append((key, config, careful))
        self.timer.watch(key)
        return self.timer.costs.get(config, cost(key, config))

    def agree(self, key: TuningKey, one: Config, other: Config) -> bool:
        return other not in self.timer.wrong


class Timer:
    """Costs are made up, or ``costs``; the results of configs that are ``wrong`` are."""

    def __init__(
        self, costs: dict[Config, float] | None = None, wrong: tuple[Config, ...] = ()
    ) -> None:
        self.costs, self.wrong = costs or {}, wrong
        self.timed: list[tuple[TuningKey, Config, bool]] = []
        self.watch: Callable[[TuningKey], object] = lambda key: None  # called at each timing

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
    tuning.device_name = lambda index: NAME  # type: ignore[assignment]
    options, todo = argparse.Namespace(raw=None), workloads("rms_norm", "bias_dropout_add_ln")
    keep = command._Cache(options, torch.device("cuda", 0))
    with kernels_alone():
        for count in range(rounds):
            with contextlib.redirect_stdout(io.StringIO()):
                command._sweep(sweeper(device=CPU), todo, keep, 1e9, lambda outcome: "")
            if not count:
                print("begun", flush=True)


def options(**changes: object) -> argparse.Namespace:
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
