"""``fusedops doctor``: prints diagnostics of the setup, one per line; exits with 1 for a fault."""

from __future__ import annotations

import argparse
import functools
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from .core.configs import cache, tuning
from .core.launches import launch
from .core.version import __version__
from .tune.workloads import Workload, discover, keys_of, operators

__all__ = ["ON_GPUS", "add_parser", "run"]

# The releases of torch and Triton with which the kernels were run on GPUs. A test compares them
# with docs/versions.md.
ON_GPUS = ("2.11", "3.6 and 3.9")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command ``doctor``, which has no options."""
    parser = commands.add_parser(
        "doctor",
        help="print diagnostics of the setup",
        description=(
            "Prints diagnostics of the setup, one per line; the exit code is 1 for a fault."
        ),
    )
    parser.set_defaults(command=run)


class _Line(NamedTuple):
    """A line of the diagnostics, and whether it reports a fault."""

    text: str
    is_fault: bool = False


def run(options: argparse.Namespace) -> int:
    """Prints the lines; returns 1 if one of them reports a fault, else 0."""
    has_fault = False
    for line in _lines():
        prefix = "WRONG  " if line.is_fault else ""
        print(f"{prefix}{line.text}")
        has_fault |= line.is_fault
    return 1 if has_fault else 0


def _lines() -> Iterator[_Line]:
    """Yields all lines."""
    triton, unusable = _triton()
    libraries = f"fusedops {__version__}, torch {torch.__version__}, Triton {triton or 'none'}"
    yield _Line(f"versions: {libraries}, Python {platform.python_version()}, {_toolkit()}")
    tested = f"torch {ON_GPUS[0]} with Triton {ON_GPUS[1]}"
    yield _Line(f"tested on GPUs: {tested}; other releases on CPUs")
    gpu = torch.cuda.is_available()
    yield _Line(f"device: {_device() if gpu else 'no GPU'}")
    yield _launcher(gpu, triton, unusable)
    path, why = _path(gpu, unusable)
    reason = f" ({why})" if why else ""
    losses = "linear_cross_entropy", "linear_log_probs", "linear_rowwise"
    for name in (*operators(), "rowwise", *losses):
        yield _Line(f"{name}: {path}{reason}")
    yield _Line(_configs(gpu, path))
    yield _on_demand()
    yield from _cache()


@functools.cache
def _triton() -> tuple[str, str]:
    """Returns the version of Triton, or "" and the reason why it cannot be imported."""
    try:
        import triton
    except ModuleNotFoundError as error:
        if error.name == "triton":
            return "", "Triton is not installed"
        # Under the interpreter Triton imports numpy, which it does not require.
        return "", f"Triton needs {error.name}, which is not installed"
    except ImportError as error:
        return "", f"Triton cannot be imported: {error}"
    return str(triton.__version__), ""


def _toolkit() -> str:
    """Returns the toolkit with which torch was built."""
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"


def _device() -> str:
    """Returns the name and the properties of the current GPU."""
    index = torch.cuda.current_device()
    major, minor = torch.cuda.get_device_capability(index)
    name, processors = tuning.device_name(index), launch.processors(index)
    return f"{name}, capability {major}.{minor}, {processors} multiprocessors"


def _launcher(gpu: bool, triton: str, unusable: str) -> _Line:
    """Returns the line that reports how kernels are launched."""
    # Without Triton, or under the interpreter, a GPU is not used: then it is a fault to have one.
    # The interpreter is asked for, so it is a fault if it cannot run.
    if unusable:
        return _Line(f"launcher: none, as {unusable}", is_fault=gpu or launch.interpreting())
    if launch.interpreting():
        text = "Triton's interpreter, as TRITON_INTERPRET is set; it is for tests, and slow"
        return _Line(f"launcher: {text}", is_fault=gpu)
    if not gpu:
        return _Line("launcher: none, as there is no GPU")
    try:
        kernel = launch.diagnose(torch.cuda.current_device())
    # Any exception of the compiler or the driver is a fault of the setup.
    except Exception as error:  # noqa: BLE001
        reason = f"{type(error).__name__}: {error}"
        return _Line(f"launcher: no kernel can be built: {reason}", is_fault=True)
    if kernel.launcher == "direct":
        return _Line(f"launcher: direct, by a call of Triton {triton}'s C function")
    slower = {
        "compiled": "Triton's, a few microseconds",
        "ordinary": "Triton's binder, tens of microseconds",
    }
    return _Line(f"launcher: {slower[kernel.launcher]} more a launch, as {kernel.reason}")


def _path(gpu: bool, unusable: str) -> tuple[str, str]:
    """Returns the path of all operators, and the reason if it is not "kernel"."""
    if unusable and (gpu or launch.interpreting()):
        return "reference", unusable
    if launch.interpreting():
        return "interpreter", "TRITON_INTERPRET is set"
    return ("kernel", "") if gpu else ("reference", "no GPU")


def _configs(gpu: bool, path: str) -> str:
    """Returns the text about the sources of configs, for the benchmark's shapes on the GPU."""
    if path == "interpreter":
        return "configs: the heuristic's"
    if path != "kernel":
        return "configs: none, as no kernel runs"
    device = torch.device("cuda", torch.cuda.current_device())
    name = tuning.device_name(device.index)
    rows = 0
    for configs_by_group in tuning.table(name).values():
        rows += sum(map(len, configs_by_group.values()))
    table = f"a table of {rows} rows is shipped" if rows else "no table is shipped"
    cases = [Workload(spec, shape, dtype) for spec in discover() for shape, dtype in spec.shapes]
    # A dict, because several workloads may have the same key, which is counted once.
    keys = dict.fromkeys(key for case in cases for key in keys_of(case, device))
    counts = Counter(str(tuning.source(key, device.index)) for key in keys)
    used = filter(counts.get, ("cache", "table", "heuristic"))
    parts = ", ".join([f"{counts[kind]} from the {kind}" for kind in used])
    return f"configs: {table} for this device; of the benchmark's shapes, {parts}"


def _on_demand() -> _Line:
    """Returns the line that reports whether keys are tuned at first use.

    An unknown value of ``FUSEDOPS_TUNE`` is a fault.
    """
    value = os.environ.get("FUSEDOPS_TUNE", "")
    switch = tuning.switch(value)
    if switch is None:
        reason = f"FUSEDOPS_TUNE is {value!r}, expected 1, force or 0"
        return _Line(f"tuning at first use: off, as {reason}", is_fault=True)
    tuned = {
        "": "off",
        "1": "of keys without a measurement",
        "force": "of all keys, those of the shipped table too",
    }[switch]
    reason = f", as FUSEDOPS_TUNE is {value}" if value else ""
    return _Line(f"tuning at first use: {tuned}{reason}")


def _accepts_directory(base: Path) -> bool:
    """Whether a directory can be created in ``base``; creates one and removes it."""
    try:
        Path(tempfile.mkdtemp(prefix=".fusedops", dir=base)).rmdir()
    except OSError:
        return False
    return True


def _cache() -> Iterator[_Line]:
    """Yields the lines about the cache."""
    root = cache.directory()
    if root is None:
        yield _Line("cache: no home directory for it; set FUSEDOPS_CACHE_DIR", is_fault=True)
        return
    # If the directory does not exist, it would be created in the nearest parent that does. Creating
    # one is tried, because no directory can be created in some, such as /proc.
    base = next((path for path in (root, *root.parents) if path.exists()), root)
    writable = base.is_dir() and _accepts_directory(base)
    state = "writable" if writable else "NOT writable"
    yield _Line(f"cache: {root}, {state}", is_fault=not writable)
    counts: Counter[str] = Counter()
    if base == root and root.is_dir():
        counts.update(map(_health, cache.entries()))
    parts = [f"{count} {kind}" for kind, count in sorted(counts.items())]
    # Stale entries and those of another version are no fault.
    unusable = counts["torn"] + counts["foreign"] + counts["unreadable"]
    remedy = "; delete what is torn, foreign or unreadable" if unusable else ""
    yield _Line(f"entries: {', '.join(parts) or 'none'}{remedy}", is_fault=unusable > 0)


def _health(path: Path) -> str:
    """Returns the kind of a cache entry: "good", "unreadable", or a kind of `cache.EntryError`."""
    try:
        cache.check(path)
    except cache.EntryError as problem:
        return problem.kind
    except OSError:
        return "unreadable"
    return "good"
