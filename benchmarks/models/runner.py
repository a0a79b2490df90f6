"""From workloads to rows: providers that need no compiler first, on all workloads, then those that do."""

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
from .providers import COMPILING, Contender, contender, offered
from .results import Key, Row
from .text import Text
from .workloads import Workload

__all__ = ["Setting", "Work", "run_work", "stages", "without"]


@dataclass(frozen=True)
class Setting:
    """On what all rows of a run are measured, and how hard."""

    device: torch.device
    text: Text
    effort: Effort
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 100  # of the short training

    def row(self, workload: Workload, provider: str) -> Row:
        """A row with no number yet."""
        return Row(
            workload.name,
            workload.mode,
            provider,
            None,
            None,
            None,
            operator_results.commit(),
            torch.__version__,
            _version("triton"),
            workload.shape,
            transformers=_version("transformers"),
        )


@dataclass(frozen=True)
class Work:
    """A workload, and the providers that are measured on it in turn."""

    workload: Workload
    providers: tuple[str, ...]

    @property
    def keys(self) -> Iterator[Key]:
        """Its rows'."""
        workload = self.workload
        return (
            (workload.name, workload.mode, workload.shape, provider) for provider in self.providers
        )


def stages(workloads: Sequence[Workload], wanted: Sequence[str] = ()) -> list[list[Work]]:
    """What is measured together, in order: no provider waits for a compilation that another needs.

    Args:
        workloads: in order.
        wanted: the providers; none for all that are offered.
    """
    results = []
    for compiling in (False, True):
        stage = []
        for workload in workloads:
            names = [
                n for n in (wanted or offered(workload)) if n != "liger" or n in offered(workload)
            ]
            names = [name for name in names if (name in COMPILING) == compiling]
            stage += [Work(workload, tuple(names))] if names else []
        results.append(stage)
    return [stage for stage in results if stage]


def without(work: Sequence[Work], done: set[Key]) -> list[Work]:
    """What is not done yet."""
    left = []
    for item in work:
        names = tuple(key[-1] for key in item.keys if key not in done)
        left += [Work(item.workload, names)] if names else []
    return left


def run_work(work: Work, setting: Setting) -> list[Row]:
    """The rows of all its providers; one that fails has none, and stderr says why."""
    operator_providers.fresh_compiler()
    try:
        return (_learned if work.workload.mode == "loss" else _timed)(work, setting)
    finally:
        torch.compiler.reset()
        _free(setting.device)


def _timed(work: Work, setting: Setting) -> list[Row]:
    warm = {
        name: begun
        for name in work.providers
        if (begun := _begin(name, work.workload, setting)) is not None
    }
    contenders = {name: made for name, (made, _) in warm.items()}
    singles = {name: single for name, (_, single) in warm.items()}
    times = measuring.blocks(contenders, singles, setting.effort, setting.device)
    on_gpu = setting.device.type == "cuda"
    rows = []
    for name, made in contenders.items():  # the profiler comes after all timing
        seen, single = times[name], singles[name]
        gpu = (
            sum([kernel.us for kernel in measuring.kernels(made, setting.device)]) / 1e3
            if on_gpu
            else None
        )
        more = "" if gpu is None else f"  gpu {gpu:9.2f} ms  peak {single.peak_mib:9.0f} MiB"
        print(
            f"  {name:<14}{seen.ms:10.2f} ms ± {seen.spread:5.2f}  host {single.host_ms:9.2f} ms{more}"
            f"  (first step {single.first_s:.1f} s)",
            flush=True,
        )
        rows.append(
            replace(
                setting.row(work.workload, name),
                ms=seen.ms,
                spread=seen.spread,
                host_ms=single.host_ms,
                peak_mib=single.peak_mib,
                gpu_ms=gpu,
            )
        )
    return rows


def _begin(name: str, workload: Workload, setting: Setting) -> tuple[Contender, Warm] | None:
    """A provider's model, warm; None if it fails."""
    try:
        # The text is seeded anew, so that all have the same batch.
        built = contender(name, workload, setting.device, setting.text.reseeded(0))
        return built, measuring.warm_up(built, setting.effort, setting.device)
    # A provider may fail in any way; the others are still to be timed.
    except Exception as error:  # noqa: BLE001
        _say(f"{workload} {name}: left out, {type(error).__name__}: {_first_line(error)}")
        _free(setting.device)
        return None


def _learned(work: Work, setting: Setting) -> list[Row]:
    rows = []
    for name in work.providers:
        start = time.perf_counter()
        try:
            seen = training.learn(
                name,
                work.workload,
                setting.text,
                setting.device,
                seeds=setting.seeds,
                steps=setting.steps,
            )
        except Exception as error:  # noqa: BLE001 - as above
            _say(f"{work.workload} {name}: left out, {type(error).__name__}: {_first_line(error)}")
            continue
        finally:
            _free(setting.device)
        took = time.perf_counter() - start
        print(
            f"  {name:<14}loss {seen.mean:.4f}, {seen.spread:.4f} between seeds  ({took:.1f} s)",
            flush=True,
        )
        rows.append(
            replace(setting.row(work.workload, name), loss=seen.mean, loss_spread=seen.spread)
        )
    return rows


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
