"""Measures workloads: first the providers that need no compiler, then those that do."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

import torch

from .. import providers as operator_providers
from .. import results as operator_results
from . import measuring, training
from .measuring import Effort, Warm
from .providers import COMPILING, Contender, applies, contender, offered
from .results import Key, Row
from .text import Text
from .workloads import Workload

__all__ = ["Setting", "Work", "first_line", "free", "run_work", "stages", "without"]


@dataclass(frozen=True)
class Setting:
    """What all rows of a run have in common: device, text, and how long to measure."""

    device: torch.device
    text: Text
    effort: Effort
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 100  # of the short training

    def row(self, workload: Workload, provider: str) -> Row:
        """Returns a row without numbers."""
        return Row(
            model=workload.name,
            mode=workload.mode,
            provider=provider,
            ms=None,
            peak_mib=None,
            loss=None,
            commit=operator_results.commit(),
            torch=torch.__version__,
            triton=_version("triton"),
            shape=workload.shape,
            transformers=_version("transformers"),
        )


@dataclass(frozen=True)
class Work:
    """A workload, and the providers that are measured on it in turn."""

    workload: Workload
    providers: tuple[str, ...]

    @property
    def keys(self) -> Iterator[Key]:
        """The keys of its rows."""
        workload = self.workload
        return (
            (workload.name, workload.mode, workload.shape, provider) for provider in self.providers
        )


def stages(workloads: Sequence[Workload], wanted: Sequence[str] = ()) -> list[list[Work]]:
    """Returns the work in two stages: without providers that compile, and with these alone.

    So providers that need no compilation do not wait for one.

    Args:
        workloads: the workloads, in the order of measuring.
        wanted: the providers; empty for those of `offered`.
    """
    results = []
    for compiling in (False, True):
        stage = []
        for workload in workloads:
            names = [name for name in wanted or offered(workload) if applies(name, workload)]
            names = [name for name in names if (name in COMPILING) == compiling]
            if names:
                stage.append(Work(workload, tuple(names)))
        if stage:
            results.append(stage)
    return results


def without(work: Sequence[Work], done: set[Key]) -> list[Work]:
    """Returns the work without the rows that are done."""
    remaining = []
    for item in work:
        keys = [key for key in item.keys if key not in done]
        if keys:
            remaining.append(Work(item.workload, tuple([provider for *_, provider in keys])))
    return remaining


def run_work(work: Work, setting: Setting) -> list[Row]:
    """Returns the rows of all its providers.

    A provider that fails has no row; the error is printed to stderr.
    """
    operator_providers.fresh_compiler()
    measure = _learned if work.workload.mode == "loss" else _timed
    try:
        return measure(work, setting)
    finally:
        torch.compiler.reset()
        free(setting.device)


def _timed(work: Work, setting: Setting) -> list[Row]:
    """Returns the rows of timed steps."""
    contenders: dict[str, Contender] = {}
    singles: dict[str, Warm] = {}
    for name in work.providers:
        started = _start(name, work.workload, setting)
        if started is not None:
            contenders[name], singles[name] = started
    times = measuring.blocks(contenders, singles, setting.effort, setting.device)
    on_gpu = setting.device.type == "cuda"
    rows = []
    # The profiler comes after all timing: see `measuring.kernels`.
    for name, model in contenders.items():
        time_of_step, single = times[name], singles[name]
        gpu, gpu_columns = None, ""
        if on_gpu:
            gpu = sum([kernel.us for kernel in measuring.kernels(model, setting.device)]) / 1e3
            gpu_columns = f"  gpu {gpu:9.2f} ms"
        if single.peak_mib is not None:
            gpu_columns += f"  peak {single.peak_mib:9.0f} MiB"
        print(
            f"  {name:<14}{time_of_step.ms:10.2f} ms ± {time_of_step.spread:5.2f}"
            f"  host {single.host_ms:9.2f} ms{gpu_columns}"
            f"  (first step {single.first_s:.1f} s)",
            flush=True,
        )
        rows.append(
            replace(
                setting.row(work.workload, name),
                ms=time_of_step.ms,
                spread=time_of_step.spread,
                host_ms=single.host_ms,
                peak_mib=single.peak_mib,
                gpu_ms=gpu,
            )
        )
    return rows


def _start(name: str, workload: Workload, setting: Setting) -> tuple[Contender, Warm] | None:
    """Returns a provider's model after its first steps, with their times; None if it fails."""
    try:
        # The text has a new generator, so that all providers have the same batch.
        built = contender(name, workload, setting.device, setting.text.reseeded(0))
        return built, measuring.warm_up(built, setting.effort, setting.device)
    # Whatever a provider raises, the others must be timed.
    except Exception as error:  # noqa: BLE001
        _say(f"{workload} {name}: left out, {type(error).__name__}: {first_line(error)}")
        free(setting.device)
        return None


def _learned(work: Work, setting: Setting) -> list[Row]:
    """Returns the rows of short trainings."""
    rows = []
    for name in work.providers:
        start = time.perf_counter()
        try:
            learned = training.learn(
                name,
                work.workload,
                setting.text,
                setting.device,
                seeds=setting.seeds,
                steps=setting.steps,
            )
        # As in `_start`.
        except Exception as error:  # noqa: BLE001
            _say(f"{work.workload} {name}: left out, {type(error).__name__}: {first_line(error)}")
            continue
        finally:
            free(setting.device)
        took = time.perf_counter() - start
        print(
            f"  {name:<14}loss {learned.mean:.4f}, {learned.spread:.4f} between seeds"
            f"  ({took:.1f} s)",
            flush=True,
        )
        rows.append(
            replace(setting.row(work.workload, name), loss=learned.mean, loss_spread=learned.spread)
        )
    return rows


def free(device: torch.device) -> None:
    """Returns the memory that nothing uses to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def first_line(error: Exception) -> str:
    """Returns the beginning of an error's message."""
    return (str(error).strip().splitlines() or [""])[0][:200]


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
