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

from .core.configs import cache, tuning
from .core.launches import launch
from .core.version import __version__
from .tune.workloads import Workload, discover, keys_of, operators

__all__ = ["ON_GPUS", "add_parser", "run"]

# The releases of torch and Triton with which the kernels have run on GPUs. docs/versions.md has the
# same, and a test compares them.
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


def run(options: argparse.Namespace) -> int:
    """Prints the lines; returns 1 if one of them is a fault, else 0."""
    faults = 0
    for text, is_fault in _lines():
        prefix = "WRONG  " if is_fault else ""
        print(f"{prefix}{text}")
        faults += is_fault
    return 1 if faults else 0


def _lines() -> Iterator[tuple[str, bool]]:
    """The lines, and whether each is a fault."""
    triton = _triton_version()
    libraries = f"fusedops {__version__}, torch {torch.__version__}, Triton {triton or 'none'}"
    yield f"versions: {libraries}, Python {platform.python_version()}, {_toolkit()}", False
    tested = f"torch {ON_GPUS[0]} with Triton {ON_GPUS[1]}"
    yield f"tested on GPUs: {tested}; other releases on CPUs", False
    gpu = torch.cuda.is_available()
    yield f"device: {_device() if gpu else 'no GPU'}", False
    yield _launcher(gpu, triton)
    path, why = _path(gpu, triton)
    reason = f" ({why})" if why else ""
    for name in (*operators(), "rowwise"):
        yield f"{name}: {path}{reason}", False
    yield _configs(gpu, path), False
    yield _on_demand()
    yield from _cache()


@functools.cache
def _triton_version() -> str:
    """The version of Triton; "" if it is not installed."""
    try:
        import triton
    except ImportError:
        return ""
    return str(triton.__version__)


def _toolkit() -> str:
    """The toolkit that torch was built with."""
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"


def _device() -> str:
    """The name and the properties of the current GPU."""
    index = torch.cuda.current_device()
    major, minor = torch.cuda.get_device_capability(index)
    name, processors = tuning.device_name(index), launch.processors(index)
    return f"{name}, capability {major}.{minor}, {processors} multiprocessors"


def _launcher(gpu: bool, triton: str) -> tuple[str, bool]:
    """How kernels are launched, and whether that is a fault."""
    # A fault only if there is a GPU, which is not used then.
    if not triton:
        return "launcher: none, as Triton is not installed", gpu
    if launch.interpreting():
        text = "Triton's interpreter, as TRITON_INTERPRET is set; it is for tests, and slow"
        return f"launcher: {text}", gpu
    if not gpu:
        return "launcher: none, as there is no GPU", False
    try:
        kernel = launch.diagnose(torch.cuda.current_device())
    # Any exception of the compiler or the driver is a fault of the setup.
    except Exception as error:  # noqa: BLE001
        return f"launcher: no kernel can be built: {type(error).__name__}: {error}", True
    if kernel.launcher == "direct":
        return f"launcher: direct, by a call of Triton {triton}'s C function", False
    slower = {
        "compiled": "Triton's, a few microseconds",
        "ordinary": "Triton's binder, tens of microseconds",
    }
    return f"launcher: {slower[kernel.launcher]} more a launch, as {kernel.reason}", False


def _path(gpu: bool, triton: str) -> tuple[str, str]:
    """The path of all operators, and the reason why it is no kernel."""
    if launch.interpreting() and triton:
        return "interpreter", "TRITON_INTERPRET is set"
    if gpu and triton:
        return "kernel", ""
    return "reference", "Triton is not installed" if gpu else "no GPU"


def _configs(gpu: bool, path: str) -> str:
    """The sources of configs for the benchmark's shapes on the current GPU."""
    if path == "interpreter":
        return "configs: the heuristic's"
    if path != "kernel":
        return "configs: none, as no kernel runs"
    device = torch.device("cuda", torch.cuda.current_device())
    name = tuning.device_name(device.index)
    rows = sum(len(sizes) for groups in tuning.table(name).values() for sizes in groups.values())
    table = f"a table of {rows} rows is shipped" if rows else "no table is shipped"
    cases = [Workload(spec, shape, dtype) for spec in discover() for shape, dtype in spec.shapes]
    # Each key once: several workloads may have the same.
    keys = dict.fromkeys(key for case in cases for key in keys_of(case, device))
    counts = Counter(str(tuning.source(key, device.index)) for key in keys)
    used = [kind for kind in ("cache", "table", "heuristic") if counts[kind]]
    parts = ", ".join([f"{counts[kind]} from the {kind}" for kind in used])
    return f"configs: {table} for this device; of the benchmark's shapes, {parts}"


def _on_demand() -> tuple[str, bool]:
    """Whether keys are tuned at first use; an unknown value of ``FUSEDOPS_TUNE`` is a fault."""
    value = os.environ.get("FUSEDOPS_TUNE", "")
    switch = tuning.switch(value)
    if switch is None:
        reason = f"FUSEDOPS_TUNE is {value!r}, expected 1, force or 0"
        return f"tuning at first use: off, as {reason}", True
    tuned = {
        "": "off",
        "1": "of keys without a measurement",
        "force": "of all keys, those of the shipped table too",
    }[switch]
    reason = f", as FUSEDOPS_TUNE is {value}" if value else ""
    return f"tuning at first use: {tuned}{reason}", False


def _accepts_directory(base: Path) -> bool:
    """Whether a directory can be created in another: it creates one, and removes it."""
    try:
        Path(tempfile.mkdtemp(prefix=".fusedops", dir=base)).rmdir()
    except OSError:
        return False
    return True


def _cache() -> Iterator[tuple[str, bool]]:
    """The lines about the cache, and whether each is a fault."""
    root = cache.directory()
    if root is None:
        yield "cache: no home directory for it; set FUSEDOPS_CACHE_DIR", True
        return
    # A directory that does not exist yet is created in the nearest one that does. Some, such as
    # /proc, accept none.
    base = next((path for path in (root, *root.parents) if path.exists()), root)
    writable = base.is_dir() and _accepts_directory(base)
    yield f"cache: {root}, {'writable' if writable else 'NOT writable'}", not writable
    counts: Counter[str] = Counter()
    if base == root and root.is_dir():
        counts.update(map(_health, cache.entries()))
    parts = [f"{count} {kind}" for kind, count in sorted(counts.items())]
    spoilt = counts["torn"] + counts["foreign"] + counts["unreadable"]
    remedy = "; delete what is torn, foreign or unreadable" if spoilt else ""
    yield f"entries: {', '.join(parts) or 'none'}{remedy}", spoilt > 0


def _health(path: Path) -> str:
    """The kind of an entry of the cache: "good", or what is wrong with it."""
    try:
        cache.check(path)
    except cache.EntryError as problem:
        return problem.kind
    except OSError:
        return "unreadable"
    return "good"
