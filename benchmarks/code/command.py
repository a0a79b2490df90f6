"""The command ``python -m benchmarks code``."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..models.providers import contender
from ..models.text import Text
from ..models.workloads import MODELS, Workload, workloads
from ..results import UnreadableError, commit
from . import results
from .counting import Counts, counts_of
from .pretending import generated, pretended

__all__ = ["add_options", "counted", "counts_of_step", "run"]

_CPU = torch.device("cpu")
_MODES = ("train", "infer")
_PROVIDERS = ("compile", "backend")
_LAYERS = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.set_defaults(command=run)
    parser.add_argument(
        "model", nargs="*", metavar="MODEL", help=f"default: all of {', '.join(MODELS)}"
    )
    parser.add_argument("--mode", choices=_MODES, default="train", help="default: train")
    parser.add_argument(
        "--layers",
        type=int,
        default=_LAYERS,
        metavar="N",
        help=f"of each model, which repeats them; 0 for all (default: {_LAYERS})",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="shrunken models, to try the command; writes no file unless --output names one",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="CSV",
        help="default: results/code_torch_<release>.csv",
    )
    parser.add_argument(
        "--table", action="store_true", help="only print the table of the results file"
    )


def run(options: argparse.Namespace) -> int:
    """Counts the kernels and the bytes of the code that both compilers generate, without a GPU.

    Fails if the code of a model cannot be generated.
    """
    try:
        if options.table:
            path = options.output or results.path_of(torch.__version__)
            print(results.table(results.read(path)))
            return 0
        return _count(options)
    except (OSError, ValueError, UnreadableError) as error:
        print(f"code: {error}", file=sys.stderr)
        return 2


def _count(options: argparse.Namespace) -> int:
    """Counts what the options ask for, and returns the exit status."""
    if torch.cuda.is_available():
        raise ValueError("pretends a GPU; hide the real ones: CUDA_VISIBLE_DEVICES=''")
    if torch.version.cuda is None:
        raise ValueError("needs a PyTorch that is built for CUDA; it needs no GPU")
    path = _output(options)
    rows, failures = list[results.Row](), 0
    print(f"torch {torch.__version__}; results to {path or 'the terminal only'}", flush=True)
    at = commit()
    for workload in _chosen(options):
        started = time.perf_counter()
        try:
            new = [_row(workload, provider, at) for provider in _PROVIDERS]
        # The other models are counted, whatever a model raises.
        except Exception as error:  # noqa: BLE001
            print(f"{workload}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            failures += 1
            continue
        finally:
            torch.compiler.reset()
            gc.collect()
        print(f"{workload}: {time.perf_counter() - started:.0f} s", flush=True)
        rows += new
        if path is not None:
            results.write(path, new)
    print(results.table(rows))
    return 1 if failures else 0


def _output(options: argparse.Namespace) -> Path | None:
    """Returns the results file; by default tiny models have none."""
    if options.output is not None or options.tiny:
        path: Path | None = options.output
        return path
    return results.path_of(torch.__version__)


def _chosen(options: argparse.Namespace) -> list[Workload]:
    """Returns the workloads of the options: each model at its most important sizes."""
    chosen = workloads(options.model, [options.mode], tiny=options.tiny)
    first: dict[str, Workload] = {}
    for workload in chosen:
        first.setdefault(workload.name, replace(workload, layers=options.layers))
    return list(first.values())


def _row(workload: Workload, provider: str, at: str) -> results.Row:
    counts = counted(workload, provider)
    return results.Row(
        model=workload.name,
        mode=workload.mode,
        shape=workload.shape,
        layers=workload.layers,
        provider=provider,
        generated=counts.generated,
        generated_gib=counts.generated_bytes / 2**30,
        operators=counts.operators,
        operators_gib=counts.operator_bytes / 2**30,
        products=counts.products,
        others=counts.others,
        commit=at,
        torch=torch.__version__,
        triton=metadata.version("triton"),
        transformers=metadata.version("transformers"),
    )


def counted(workload: Workload, provider: str) -> Counts:
    """Returns the counts of a step that a provider compiles for a GPU that is not there."""
    built = contender(provider, workload, _CPU, Text(_CPU))
    with built.context():
        return counts_of_step(built.step)


def counts_of_step(step: Callable[[], object]) -> Counts:
    """Returns the counts of what a step compiles, and then calls.

    Raises:
        RuntimeError: the step is compiled in several parts. After the first one nothing would be
            counted.
    """
    from torch._dynamo.utils import counters

    found: list[Counts] = []

    def observe(graph: Any, code: str) -> None:
        found.append(counts_of(graph, code))

    breaks = counters["graph_break"]
    breaks.clear()
    with pretended(observe), generated():
        step()
    if breaks:
        raise RuntimeError(f"its graph has breaks: {'; '.join(breaks)}")
    return sum(found, start=Counts())
