"""The command ``python -m benchmarks models``."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from .. import results as operator_results
from . import ahead, page, profiling, results
from .measuring import Effort
from .providers import PROVIDERS
from .runner import Setting, Work, run_work, stages, without
from .text import Text
from .workloads import MODELS, MODES, Workload, loss_workloads, named, workloads

__all__ = ["add_options", "run"]

_ROOT = Path(__file__).resolve().parent.parent.parent
_RESULTS = _ROOT / "benchmarks" / "results"
_DEFAULT = _RESULTS / "models_nvidia_h200.csv"
_TINY = Effort(rounds=3, block_s=0.01, singles=1)


def run(options: argparse.Namespace) -> int:
    """Measures whole models: eager, fused, compiled, both, and Liger-Kernel's patch; writes rows as soon as it has them."""
    try:
        if options.page is not None:
            options.page.write_text(page.markdown(options.output or _DEFAULT), encoding="utf-8")
            print(f"wrote {options.page}")
            return 0
        if options.table:
            print(page.table(results.read(options.output or _DEFAULT)))
            return 0
        chosen = (loss_workloads(options.model or (), tiny=options.tiny) if options.loss
                  else workloads(options.model or (), options.mode or (), tiny=options.tiny))  # fmt: skip
        wanted = [named("provider", name, PROVIDERS) for name in options.provider or ()]
        device = _device(options.device)
    except (OSError, ValueError) as error:
        print(f"models: {error}", file=sys.stderr)
        return 2
    setting = Setting(device, Text(device), _TINY if options.tiny else Effort(), tuple(range(options.seeds)), options.steps)
    if options.profile:
        return _profile(chosen, wanted or ["fused"], setting)
    return _measure(stages(chosen, wanted), setting, options)


def _measure(plan: list[list[Work]], setting: Setting, options: argparse.Namespace) -> int:
    ends = time.perf_counter() + (math.inf if options.budget is None else options.budget)
    path = _output(options, setting.device)
    print(f"{_name(setting.device)}, torch {torch.__version__}; results to {path or 'the terminal only'}", flush=True)
    rows: list[results.Row] = []
    missing = 0
    for stage in plan:
        done = {row.key for row in results.read(path) if row.commit == operator_results.commit()} if options.resume and path else set()
        work = without(stage, done)
        _compile_ahead(work, setting, options, ends)
        for item in work:
            if time.perf_counter() > ends:
                print(f"stopped before {item.workload}: the budget of {options.budget:.0f} s is spent; --resume goes on")
                break
            begun = time.perf_counter()
            print(item.workload, flush=True)
            new = run_work(item, setting)
            rows += new
            missing += sum("fused" in name and name not in {row.provider for row in new} for name in item.providers)
            if path is not None:
                results.write(path, new)
            print(f"  {time.perf_counter() - begun:.1f} s", flush=True)
    print(page.table(results.read(path) if path is not None else rows))
    # What we failed to time is our fault; a peer's is not.
    return 1 if missing else 0
