"""``fusedops doctor``: prints diagnostics of the setup, one per line; exit code 1 for a fault."""

from __future__ import annotations

import argparse
import functools
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from .core import cache, launch, tuning
from .core.version import __version__
from .tune.workloads import Workload, discover, keys_of, operators

__all__ = ["ON_GPUS", "add_parser", "run"]

# The releases of torch and Triton with which the kernels have run on GPUs, as docs/versions.md has them.
ON_GPUS = ("2.11", "3.6 and 3.9")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """``doctor``, which has no options."""
    parser = commands.add_parser(
        "doctor", help="print diagnostics of the setup",
        description="Prints diagnostics of the setup, one per line; the exit code is 1 for a fault.",
    )  # fmt: skip
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Prints the lines; 1 if one of them tells of something wrong."""
    wrong = 0
    for text, fault in _lines():
        print(f"{'WRONG  ' if fault else ''}{text}")
        wrong += fault
    return 1 if wrong else 0


def _lines() -> Iterator[tuple[str, bool]]:
    """What there is to say, and whether it is a fault."""
    triton = _triton_version()
    libraries = f"fusedops {__version__}, torch {torch.__version__}, Triton {triton or 'none'}"
    yield f"versions: {libraries}, Python {platform.python_version()}, {_toolkit()}", False
    yield f"tested on GPUs: torch {ON_GPUS[0]} with Triton {ON_GPUS[1]}; other releases on CPUs", False
    gpu = torch.cuda.is_available()
    yield f"device: {_device() if gpu else 'no GPU'}", False
    yield _launcher(gpu, triton)
    path, why = _path(gpu, triton)
    for name in (*operators(), "rowwise"):
        yield f"{name}: {path}{f' ({why})' if why else ''}", False
    yield _configs(gpu, path), False
    yield _on_demand()
    yield from _cache()


@functools.cache
def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return str(triton.__version__)


def _toolkit() -> str:
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"


def _device() -> str:
    index = torch.cuda.current_device()
    major, minor = torch.cuda.get_device_capability(index)
    return f"{tuning.device_name(index)}, capability {major}.{minor}, {launch.processors(index)} multiprocessors"


def _launcher(gpu: bool, triton: str) -> tuple[str, bool]:
    if not triton:
        return "launcher: none, as Triton is not installed", gpu
    if launch.interpreting():
        return "launcher: Triton's interpreter, as TRITON_INTERPRET is set; it is for tests, and slow", gpu
    if not gpu:
        return "launcher: none, as there is no GPU", False
    try:
        kernel = launch.diagnose(torch.cuda.current_device())
    except Exception as error:  # noqa: BLE001 - whatever the compiler or the driver raises is what is wrong
        return f"launcher: no kernel can be built: {type(error).__name__}: {error}", True
    if kernel.launcher == "direct":
        return f"launcher: direct, by a call of Triton {triton}'s C function", False
    slower = {"compiled": "Triton's, a few microseconds", "ordinary": "Triton's binder, tens of microseconds"}
    return f"launcher: {slower[kernel.launcher]} more a launch, as {kernel.reason}", False


def _path(gpu: bool, triton: str) -> tuple[str, str]:
    """Which path every operator takes, and why not another."""
    if launch.interpreting() and triton:
        return "interpreter", "TRITON_INTERPRET is set"
    if gpu and triton:
        return "kernel", ""
    return "reference", "Triton is not installed" if gpu else "no GPU"


def _configs(gpu: bool, path: str) -> str:
    if path != "kernel":
        return "configs: the heuristic's" if path == "interpreter" else "configs: none, as no kernel runs"
    device = torch.device("cuda", torch.cuda.current_device())
    name = tuning.device_name(device.index)
    known = sum(len(sizes) for groups in tuning.table(name).values() for sizes in groups.values())
    table = f"a table of {known} rows is shipped for this device" if known else "no table is shipped for this device"
    cases = [Workload(spec, shape, dtype) for spec in discover() for shape, dtype in spec.shapes]
    keys = dict.fromkeys(key for case in cases for key in keys_of(case, device))
    counts = Counter(str(tuning.source(key, device.index)) for key in keys)
    parts = [f"{counts[kind]} from the {kind}" for kind in ("cache", "table", "heuristic") if counts[kind]]
    return f"configs: {table}; of the benchmark's shapes, {', '.join(parts)}"


def _on_demand() -> tuple[str, bool]:
    """Whether keys are tuned at first use; an unknown value of ``FUSEDOPS_TUNE`` is a fault."""
    value = os.environ.get("FUSEDOPS_TUNE", "")
    meant = tuning.switch(value)
    if meant is None:
        return f"tuning at first use: off, as FUSEDOPS_TUNE is {value!r}, expected 1, force or 0", True
    told = {"": "off", "1": "of keys without a measurement", "force": "of all keys, those of the shipped table too"}[
        meant
    ]
    return f"tuning at first use: {told}{f', as FUSEDOPS_TUNE is {value}' if value else ''}", False


def _takes_a_directory(base: Path) -> bool:
    try:
        Path(tempfile.mkdtemp(prefix=".fusedops", dir=base)).rmdir()
    except OSError:
        return False
    return True


def _cache() -> Iterator[tuple[str, bool]]:
    root = cache.directory()
    if root is None:
        yield "cache: no home directory for it; set FUSEDOPS_CACHE_DIR", True
        return
    # A directory that does not exist yet is made in the nearest one that does; there are some that take none (/proc).
    base = next((path for path in (root, *root.parents) if path.exists()), root)
    writable = base.is_dir() and _takes_a_directory(base)
    yield f"cache: {root}, {'writable' if writable else 'NOT writable'}", not writable
    counts = Counter(_health(path) for path in cache.entries()) if base == root and root.is_dir() else Counter()
    parts = [f"{count} {kind}" for kind, count in sorted(counts.items())]
    spoilt = counts["torn"] + counts["foreign"] + counts["unreadable"]
    remedy = "; delete what is torn, foreign or unreadable" if spoilt else ""
    yield f"entries: {', '.join(parts) or 'none'}{remedy}", spoilt > 0


def _health(path: Path) -> str:
    try:
        cache.check(path)
    except cache.EntryError as problem:
        return problem.kind
    except OSError:
        return "unreadable"
    return "good"
