"""The command ``distributed``.

It measures training steps on several GPUs, of eager, fused and compiled models with the same plan.
torchrun starts it, with a process for each GPU::

    torchrun --nproc-per-node 2 -m benchmarks distributed

A layout is how a model is distributed:

    tp                   every process has a part of each linear layer; sums and norms have a part
                         of each sequence
    fsdp                 parameters are sharded, and each process has its own batch
    fsdp-checkpointed    the same, and each block is computed again in the backward
    fsdp-tp              both fsdp and tp, for the model of ``examples/train_lm_distributed.py``; 1,
                         2 or 4 processes split its layers

The providers ``compile`` and ``backend`` compile each block, by torch.compile and by
`fusedops.compile_blocks`. A provider that raises an error is left out, with a message.

With ``--first-calls`` the command starts the processes itself, and measures how long these two
compile, with caches that the ranks share: see `shared_caches`.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import fusedops

from .. import results
from . import distributed_masks as masks
from . import example, plans, shared_caches
from .distributed_results import MASKS, Row, line, write
from .text import Text
from .traffic import Traffic
from .workloads import Workload, named, workloads

__all__ = ["add_options", "run", "seconds", "step_of"]

LAYOUTS = ("tp", "fsdp", "fsdp-checkpointed", "fsdp-tp")
PROVIDERS = ("eager", "fused", "compile", "backend")
_COMPILED = ("compile", "backend")
_MODELS = (MASKS, *plans.MODELS, example.NAME)
# After this long a collective that a process waits for is an error, of a process that has failed.
_TIMEOUT = timedelta(seconds=300)
_RESULTS = Path(__file__).resolve().parent.parent / "results"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.set_defaults(command=run)
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help=f"only this one of {', '.join(_MODELS)}; may be repeated",
    )
    parser.add_argument(
        "--layout",
        action="append",
        choices=LAYOUTS,
        help="only this one; may be repeated; fsdp-tp is "
        f"that of {example.NAME}, the others are those of the other models",
    )
    parser.add_argument(
        "--provider",
        action="append",
        choices=PROVIDERS,
        help=f"only this one; may be repeated; {example.NAME} and {MASKS} have all of theirs",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="measure no other model or layout after this long",
    )
    parser.add_argument(
        "--first-calls",
        type=int,
        metavar="RANKS",
        help="instead of timing steps, start this many processes and time how long "
        f"{' and '.join(_COMPILED)} compile, with caches that the ranks share; without torchrun",
    )
    parser.add_argument("--steps", type=int, default=10, help="of a block of steps (default: 10)")
    parser.add_argument(
        "--blocks", type=int, default=5, help="of each provider, in turn (default: 5)"
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
        help="default: results/distributed_<device>.csv; the page "
        "is then filled by the command table --write",
    )


def run(options: argparse.Namespace) -> int:
    """Measures training steps of whole models on several GPUs; torchrun starts it."""
    if "RANK" not in os.environ and not options.first_calls:
        print(
            "distributed: run it by torchrun --nproc-per-node N -m benchmarks distributed",
            file=sys.stderr,
        )
        return 2
    try:
        models = [named("model", name, _MODELS) for name in options.model or _MODELS]
    except ValueError as error:
        print(f"distributed: {error}", file=sys.stderr)
        return 2
    if options.first_calls:
        return _time_first_calls(models, options)
    device = _device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    path = options.output
    if path is None and device.type == "cuda" and not options.tiny:
        path = _RESULTS / f"distributed_{results.device_slug(name)}.csv"
    masks_differ = False
    try:
        for row in _rows(models, device, name, options):
            if row.model == MASKS and row.difference:
                masks_differ = True
            if dist.get_rank() == 0:
                print(line(row), flush=True)
                if path is not None:
                    write(path, [row])
    finally:
        dist.destroy_process_group()
    return 1 if masks_differ else 0


def _time_first_calls(models: list[str], options: argparse.Namespace) -> int:
    """Measures how long providers compile; see `shared_caches`."""
    gpu, path = torch.cuda.is_available(), options.output
    if path is None and gpu and not options.tiny:
        slug = results.device_slug(torch.cuda.get_device_name())
        path = _RESULTS / f"ranks_{slug}.csv"
    for model, layout in _settings(models, options.layout or LAYOUTS):
        if model not in plans.MODELS:
            continue
        workload = workloads([model], ["train"], tiny=options.tiny)[0]
        for provider in options.provider or _COMPILED:
            row = shared_caches.measured(workload, layout, provider, options.first_calls, gpu=gpu)
            print(shared_caches.line(row), flush=True)
            if path is not None:
                shared_caches.write(path, [row])
    return 0


def _device() -> torch.device:
    """Returns this process's GPU, or the CPU if there are fewer GPUs than processes."""
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _rows(
    models: list[str], device: torch.device, name: str, options: argparse.Namespace
) -> Iterator[Row]:
    """Yields each row as soon as it is measured. All processes must run this."""
    start = time.perf_counter()
    for model, layout in _settings(models, options.layout or LAYOUTS):
        spent = _largest(time.perf_counter() - start, device)
        if spent > options.budget:
            _say(f"stopped before {model} {layout}: the budget is spent after {spent:.0f} s")
            return
        if model == MASKS:
            for mesh, count in masks.differences(device):
                yield _row((MASKS, masks.SHAPE, mesh, "fused"), name, difference=float(count))
        elif model == example.NAME:
            yield from _trained(device, name, options)
        else:
            workload = workloads([model], ["train"], tiny=options.tiny)[0]
            yield from _measured(workload, layout, device, name, options)
            gc.collect()
            torch.compiler.reset()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _settings(models: list[str], layouts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields each model with each of the chosen layouts that it is measured in."""
    for model in models:
        if model == MASKS:
            yield model, ""
        for layout in layouts:
            if model in (plans.MODELS, (example.NAME,))[layout == "fsdp-tp"]:
                yield model, layout


def _say(message: str) -> None:
    """Prints a message of the first process."""
    if dist.get_rank() == 0:
        print(message, file=sys.stderr, flush=True)


def _row(measured: tuple[str, str, str, str], device: str, **figures: Any) -> Row:
    """Returns a row of ``(model, shape, layout, provider)``; figures not passed are None."""
    import transformers
    import triton

    model, shape, layout, provider = measured
    absent = dict.fromkeys(
        ("ms", "spread", "tokens", "peak_mib", "loss", "difference", "moved_mib")
    )
    values: dict[str, Any] = {**absent, "collectives": "", **figures}
    return Row(
        model=model,
        shape=shape,
        layout=layout,
        ranks=dist.get_world_size(),
        provider=provider,
        device=device,
        commit=results.commit(),
        torch=torch.__version__,
        triton=triton.__version__,
        transformers=transformers.__version__,
        **values,
    )


# --- models ---------------------------------------------------------------------------------------


def _distributed(workload: Workload, layout: str, provider: str, device: torch.device) -> nn.Module:
    """Returns the model of a provider in a layout."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = workload.build(device), init_device_mesh(device.type, (dist.get_world_size(),))
    head = getattr(model, "lm_head", None)
    if head is not None:
        # A plan splits it in another way than the embeddings, so they cannot share a weight.
        head.weight = nn.Parameter(head.weight.detach().clone())
    if provider == "fused":
        fusedops.fuse_model(model)
    if layout == "tp":
        plans.parallelize(model, workload.name, mesh)
    blocks = plans.blocks(model, workload.name)
    if layout == "fsdp-checkpointed":
        for name, block in blocks.items():
            blocks[name] = checkpoint_wrapper(block)
    if provider == "compile":
        for block in blocks.values():
            block.compile()
    if provider == "backend":
        fusedops.compile_blocks(model)
    if layout != "tp":
        for part in (*blocks.values(), model):
            fully_shard(part, mesh=mesh)
    return model


# --- steps ----------------------------------------------------------------------------------------


class _Prepared(NamedTuple):
    """A provider's step, which has run, and its figures besides the times."""

    step: Callable[[], torch.Tensor]
    figures: dict[str, Any]


def _measured(
    workload: Workload, layout: str, device: torch.device, name: str, options: argparse.Namespace
) -> Iterator[Row]:
    """Yields a row for each provider; their blocks of steps take turns."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # With tensor parallelism all processes have the same batch.
    batch = workload.batch(Text(device, seed=0 if layout == "tp" else rank))
    ready: dict[str, _Prepared] = {}
    for provider in options.provider or PROVIDERS:
        prepared = _prepared(workload, layout, provider, batch, device)
        if prepared is not None:
            ready[provider] = prepared
    block_seconds: dict[str, list[float]] = {provider: [] for provider in ready}
    for _ in range(options.blocks):
        for provider, prepared in ready.items():
            duration = _largest(seconds(prepared.step, options.steps, device), device)
            block_seconds[provider].append(duration)
    tokens = batch["labels"].numel() * (1 if layout == "tp" else ranks)
    for provider, times in block_seconds.items():
        duration = statistics.median(times)
        yield _row(
            (workload.name, workload.shape, layout, provider),
            name,
            ms=duration * 1e3,
            spread=_quartile_range(times) * 1e3,
            tokens=tokens / duration,
            **ready[provider].figures,
        )


def _prepared(
    workload: Workload, layout: str, provider: str, batch: dict[str, Any], device: torch.device
) -> _Prepared | None:
    """Returns a provider that is ready to be timed; None, with a message, if it has failed."""
    start, prepared = time.perf_counter(), None
    try:
        step = step_of(workload, layout, provider, batch, device)
        torch.manual_seed(1)
        # The first step compiles and loads everything.
        loss = float(step())
        with Traffic() as traffic:
            step()
        figures = {
            "loss": loss,
            "peak_mib": _peak_mib(step, device),
            "collectives": str(traffic),
            "moved_mib": traffic.bytes / 2**20,
        }
        prepared = _Prepared(step, figures)
    # Whatever a provider raises, the others are measured.
    except Exception:  # noqa: BLE001
        traceback.print_exc()
    # A process that fails alone leaves the others in a collective until `_TIMEOUT`.
    failed = _largest(float(prepared is None), device)
    duration = time.perf_counter() - start
    state = "failed" if failed else "is ready"
    _say(f"{workload.name} {layout} {provider} {state} after {duration:.0f} s")
    if failed or prepared is None:
        return None
    for figure in ("loss", "peak_mib"):
        prepared.figures[figure] = _largest(prepared.figures[figure], device)
    return prepared


def _trained(device: torch.device, name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of the example's trainings."""
    for trained in example.trainings(device, options.steps, options.blocks, tiny=options.tiny):
        times = [_largest(ms, device) for ms in trained.ms]
        ms = statistics.median(times)
        yield _row(
            (example.NAME, trained.shape, trained.layout, trained.provider),
            name,
            ms=ms,
            spread=_quartile_range(times),
            tokens=1e3 * trained.tokens / ms,
            peak_mib=_largest(trained.peak_mib, device),
            loss=trained.loss,
            difference=trained.difference,
            moved_mib=trained.traffic.bytes / 2**20,
            collectives=str(trained.traffic),
        )


def step_of(
    workload: Workload, layout: str, provider: str, batch: dict[str, Any], device: torch.device
) -> Callable[[], torch.Tensor]:
    """Returns a function that runs a training step of a provider's model, and returns the loss."""
    model = _distributed(workload, layout, provider, device)

    def step() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss: torch.Tensor = model(**batch).loss
        model.zero_grad(set_to_none=True)
        loss.backward()
        return loss.detach()

    return step


def _quartile_range(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return high - low


def seconds(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Returns the mean time of a step, in a loop that all processes start together."""
    _wait(device)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    return (time.perf_counter() - start) / steps


def _peak_mib(step: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _largest(value: float, device: torch.device) -> float:
    """Returns the largest value of all processes."""
    result = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return float(result)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
