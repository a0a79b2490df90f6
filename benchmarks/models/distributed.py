"""The command ``distributed``.

Training steps on several GPUs, as the models are and fused, with the same plan.

torchrun starts it, a process for each GPU::

    torchrun --nproc-per-node 2 -m benchmarks distributed

A layout says how a model is spread. "tp": every process has a part of each linear layer, and sums
and norms have a part of each sequence. "fsdp": parameters are sharded, and each process has a batch
of its own. "fsdp-compiled": each block is compiled too. "fsdp-tp": both, of the model of
``examples/train_lm_distributed.py``, whose layers 1, 2 and 4 processes split.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fusedops

from .. import results
from . import distributed_masks as masks
from . import example
from .distributed_results import MASKS, Row, line, write
from .plans import plan
from .text import Text
from .traffic import Traffic
from .workloads import Workload, named, workloads

__all__ = ["add_options", "run"]

LAYOUTS = ("tp", "fsdp", "fsdp-compiled", "fsdp-tp")
PROVIDERS = ("eager", "fused")
_MODELS = ("llama", "bert", example.NAME)
_RESULTS = Path(__file__).resolve().parent.parent / "results"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
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
    if "RANK" not in os.environ:
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
    device = _device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    path = options.output
    if path is None and device.type == "cuda" and not options.tiny:
        path = _RESULTS / f"distributed_{results.device_slug(name)}.csv"
    differ = 0.0
    try:
        for row in _rows(models, device, name, options):
            differ += (row.difference or 0.0) * (row.model == MASKS)
            if dist.get_rank() == 0:
                print(line(row), flush=True)
                if path is not None:
                    write(path, [row])
    finally:
        dist.destroy_process_group()
    return 1 if differ else 0


def _device() -> torch.device:
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _rows(
    models: list[str], device: torch.device, name: str, options: argparse.Namespace
) -> Iterator[Row]:
    """Yields the rows, masks first, each as soon as it is measured; on all processes."""
    layouts = options.layout or LAYOUTS
    for sides, differ in masks.differences(device):
        yield _row((MASKS, masks.SHAPE, sides, "fused"), name, difference=float(differ))
    for model in models:
        if model == example.NAME:
            if "fsdp-tp" in layouts:
                yield from _trained(device, name, options)
            continue
        workload = workloads([model], ["train"], tiny=options.tiny)[0]
        for layout in layouts:
            if layout != "fsdp-tp":
                yield from _measured(workload, layout, device, name, options)
                gc.collect()
                torch.compiler.reset()
                if device.type == "cuda":
                    torch.cuda.empty_cache()


def _row(place: tuple[str, str, str, str], device: str, **found: Any) -> Row:
    import transformers
    import triton

    model, shape, layout, provider = place
    absent = dict.fromkeys(
        ("ms", "spread", "tokens", "peak_mib", "loss", "difference", "moved_mib")
    )
    values: dict[str, Any] = {**absent, "collectives": "", **found}
    return Row(
        model,
        shape,
        layout,
        dist.get_world_size(),
        provider,
        device=device,
        commit=results.commit(),
        torch=torch.__version__,
        triton=triton.__version__,
        transformers=transformers.__version__,
        **values,
    )


# --- a model, spread ------------------------------------------------------------------------------


def _spread(workload: Workload, layout: str, provider: str, device: torch.device) -> nn.Module:
    """The model, fused or as it is, in a layout."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    model, mesh = workload.build(device), init_device_mesh(device.type, (dist.get_world_size(),))
    head = getattr(model, "lm_head", None)
    if head is not None:  # a plan splits it apart from the embeddings
        head.weight = nn.Parameter(head.weight.detach().clone())
    if provider == "fused":
        fusedops.fuse_model(model)
    if layout == "tp":
        return parallelize_module(model, mesh, plan(workload.name))
    blocks: Any = model.model.layers if workload.name == "llama" else model.bert.encoder.layer  # type: ignore[union-attr]
    for block in blocks:
        if layout == "fsdp-compiled":
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


# --- its steps ------------------------------------------------------------------------------------


def _measured(
    workload: Workload, layout: str, device: torch.device, name: str, options: argparse.Namespace
) -> Iterator[Row]:
    """A row for each provider, whose blocks of steps take turns."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Tensor parallel processes share a batch.
    batch = workload.batch(Text(device, seed=0 if layout == "tp" else rank))
    made = {
        provider: _step(_spread(workload, layout, provider, device), batch, device)
        for provider in PROVIDERS
    }
    seen: dict[str, list[float]] = {provider: [] for provider in PROVIDERS}
    result: dict[str, dict[str, Any]] = {}
    for provider, step in made.items():
        torch.manual_seed(1)
        loss = _largest(float(step()), device)  # compiled and loaded before it is timed
        # A dispatch mode would keep compiled blocks from running; FSDP's collectives are those of
        # "fsdp".
        traffic = {} if layout == "fsdp-compiled" else _traffic(step)
        result[provider] = {
            "loss": loss,
            "peak_mib": _largest(_peak_mib(step, device), device),
            **traffic,
        }
    for _ in range(options.blocks):
        for provider, step in made.items():
            seen[provider].append(_largest(_seconds(step, options.steps, device), device))
    tokens = batch["input_ids"].numel() * (1 if layout == "tp" else ranks)
    for provider, times in seen.items():
        seconds = statistics.median(times)
        yield _row(
            (workload.name, workload.shape, layout, provider),
            name,
            ms=seconds * 1e3,
            spread=_spread_of(times) * 1e3,
            tokens=tokens / seconds,
            **result[provider],
        )


def _trained(device: torch.device, name: str, options: argparse.Namespace) -> Iterator[Row]:
    """The example's trainings."""
    for trained in example.trainings(device, options.steps, options.blocks, tiny=options.tiny):
        times = [_largest(ms, device) for ms in trained.ms]
        ms = statistics.median(times)
        yield _row(
            (example.NAME, trained.shape, trained.layout, trained.provider),
            name,
            ms=ms,
            spread=_spread_of(times),
            tokens=1e3 * trained.tokens / ms,
            peak_mib=_largest(trained.peak_mib, device),
            loss=trained.loss,
            difference=trained.difference,
            moved_mib=trained.traffic.bytes / 2**20,
            collectives=str(trained.traffic),
        )


def _step(
    model: nn.Module, batch: dict[str, Any], device: torch.device
) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss: torch.Tensor = model(**batch).loss
        model.zero_grad(set_to_none=True)
        loss.backward()
        return loss.detach()

    return step


def _traffic(step: Callable[[], object]) -> dict[str, Any]:
    with Traffic() as seen:
        step()
    return {"collectives": str(seen), "moved_mib": seen.bytes / 2**20}


def _spread_of(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return high - low


def _seconds(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """The mean time of a step, in a loop of steps that all processes begin together."""
    _settle(device)
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
    """Over all processes."""
    result = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return float(result)


def _settle(device: torch.device) -> None:
    _wait(device)
    dist.barrier()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
