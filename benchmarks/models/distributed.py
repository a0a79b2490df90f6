"""The command ``distributed``: training steps on several GPUs, as the models are and fused, with the same plan.

torchrun starts it, a process for each GPU::

    torchrun --nproc-per-node 2 -m benchmarks distributed

A layout says how a model is spread. "tp": every process has a part of each linear layer, and Llama's norms and sums have a
part of each sequence. "fsdp": parameters are sharded, and each process has a batch of its own. "fsdp-compiled": each block
is compiled too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fusedops

from .. import results
from .text import Text
from .workloads import Workload, named, workloads

__all__ = ["COLUMNS", "LAYOUTS", "PROVIDERS", "Row", "add_options", "run"]

LAYOUTS = ("tp", "fsdp", "fsdp-compiled")
PROVIDERS = ("eager", "fused")
_MODELS = ("llama", "bert")
_RESULTS = Path(__file__).resolve().parent.parent / "results"


@dataclass(frozen=True)
class Row:
    """One provider in one layout.

    Attributes:
        ranks: processes.
        ms: of a step, the slowest process's, median over blocks of steps.
        tokens: of all processes, a second.
        peak_mib: the most that a step allocates beside parameters and gradients, in the process that needs the most; 0 on a
            CPU.
        collectives: of a step, by name and number.
    """

    model: str
    shape: str
    layout: str
    ranks: int
    provider: str
    ms: float
    tokens: float
    peak_mib: float
    loss: float
    collectives: str
    commit: str
    torch: str
    triton: str


COLUMNS = tuple(field.name for field in fields(Row))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.set_defaults(command=run)
    parser.add_argument("--model", action="append", metavar="NAME", help=f"only this one of {', '.join(_MODELS)}; may be "
                        "repeated")  # fmt: skip
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="only this one; may be repeated")
    parser.add_argument("--steps", type=int, default=10, help="of a block of steps (default: 10)")
    parser.add_argument("--blocks", type=int, default=5, help="of each provider, in turn (default: 5)")
    parser.add_argument("--tiny", action="store_true", help="shrunken models, to try the command; writes no file unless "
                        "--output names one")  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="CSV", help="default: results/distributed_<device>.csv")


def run(options: argparse.Namespace) -> int:
    """Measures training steps of whole models on several GPUs; torchrun starts it."""
    if "RANK" not in os.environ:
        print("distributed: run it by torchrun --nproc-per-node N -m benchmarks distributed", file=sys.stderr)
        return 2
    try:
        models = [named("model", name, _MODELS) for name in options.model or _MODELS]
    except ValueError as error:
        print(f"distributed: {error}", file=sys.stderr)
        return 2
    device = _device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        _check_masks(device)
        rows: list[Row] = []
        for name in models:
            workload = workloads([name], ["train"], tiny=options.tiny)[0]
            for layout in options.layout or LAYOUTS:
                rows += _measured(workload, layout, device, options.steps, options.blocks)
        path = options.output
        if path is None and device.type == "cuda" and not options.tiny:
            path = _RESULTS / f"distributed_{results.device_slug(torch.cuda.get_device_name(device))}.csv"
        if path is not None and dist.get_rank() == 0:
            kept = {_key(record): record for record in results.read_records(path, COLUMNS)}
            kept |= {_key(record): record for record in map(_record, rows)}
            results.write_records(path, COLUMNS, [kept[key] for key in sorted(kept)])
    finally:
        dist.destroy_process_group()
    return 0


def _device() -> torch.device:
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _key(record: dict[str, Any]) -> tuple[str, ...]:
    return tuple([str(record[name]) for name in ("model", "shape", "layout", "ranks", "provider")])


def _record(row: Row) -> dict[str, Any]:
    record = asdict(row)
    return record | {name: f"{record[name]:.4f}" for name in ("ms", "tokens", "peak_mib", "loss")}


def _mesh(device: torch.device) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (dist.get_world_size(),))


def _check_masks(device: torch.device) -> None:
    """Sharded along batch, sequence or features, dropout keeps what it keeps in one process, to the bit.

    Raises:
        AssertionError: it does not.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    ranks, mesh = dist.get_world_size(), _mesh(device)
    x = torch.ones(2 * ranks, 3 * ranks, 8 * ranks, device=device)
    torch.manual_seed(1)
    expected = fusedops.bias_dropout_add(x, None, None, p=0.5)
    for dim in range(3):
        torch.manual_seed(1)
        found: Any = fusedops.bias_dropout_add(distribute_tensor(x, mesh, [Shard(dim)]), None, None, p=0.5)
        assert torch.equal(found.full_tensor(), expected), f"masks differ where dimension {dim} is sharded"


# --- a model, spread --------------------------------------------------------------------------------------------------


def _spread(workload: Workload, layout: str, provider: str, device: torch.device) -> nn.Module:
    """The model, fused or as it is, in a layout."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    model, mesh = workload.build(device), _mesh(device)
    head = getattr(model, "lm_head", None)
    if head is not None:  # a plan splits it apart from the embeddings
        head.weight = nn.Parameter(head.weight.detach().clone())
    if provider == "fused":
        fusedops.fuse_model(model)
    if layout == "tp":
        return parallelize_module(model, mesh, _llama_plan() if workload.name == "llama" else _bert_plan())
    blocks: Any = model.model.layers if workload.name == "llama" else model.bert.encoder.layer  # type: ignore[union-attr]
    for block in blocks:
        if layout == "fsdp-compiled":
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _llama_plan() -> dict[str, Any]:
    """Linear layers by columns and rows; norms and sums have a part of each sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    layer = "model.layers.*."
    rows: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
    columns = (*[f"self_attn.{name}_proj" for name in "qkv"], "mlp.gate_proj", "mlp.up_proj")
    inputs: dict[str, Any] = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    named_inputs: dict[str, Any] = {"input_kwarg_layouts": {"hidden_states": Shard(1)},
                                    "desired_input_kwarg_layouts": {"hidden_states": Replicate()}}  # fmt: skip
    return {
        "model.embed_tokens": tp.RowwiseParallel(input_layouts=Replicate(), **rows),
        **{layer + name: tp.ColwiseParallel() for name in columns},
        **{layer + name: tp.RowwiseParallel(**rows) for name in ("self_attn.o_proj", "mlp.down_proj")},
        layer + "*_layernorm": tp.SequenceParallel(),
        layer + "self_attn": tp.PrepareModuleInput(**named_inputs, use_local_output=True),
        layer + "mlp": tp.PrepareModuleInput(**inputs, use_local_output=True),
        "model.norm": tp.SequenceParallel(),
        "lm_head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def _bert_plan() -> dict[str, Any]:
    """Linear layers by columns and rows."""
    from torch.distributed.tensor import parallel as tp

    layer = "bert.encoder.layer.*."
    columns = (*[f"attention.self.{name}" for name in ("query", "key", "value")], "intermediate.dense")
    return {**{layer + name: tp.ColwiseParallel() for name in columns},
            **{layer + name: tp.RowwiseParallel() for name in ("attention.output.dense", "output.dense")}}  # fmt: skip


# --- its steps --------------------------------------------------------------------------------------------------------


def _measured(workload: Workload, layout: str, device: torch.device, steps: int, blocks: int) -> Iterator[Row]:
    """A row for each provider, whose blocks of steps take turns."""
    import triton

    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Tensor parallel processes share a batch.
    batch = workload.batch(Text(device, seed=0 if layout == "tp" else rank))
    made = {provider: _step(_spread(workload, layout, provider, device), batch, device) for provider in PROVIDERS}
    seen: dict[str, list[float]] = {provider: [] for provider in PROVIDERS}
    peaks, losses, collectives = {}, {}, {}
    for provider, step in made.items():
        torch.manual_seed(1)
        losses[provider] = _largest(float(step()), device)  # compiled and loaded before it is timed
        collectives[provider] = "" if layout == "fsdp-compiled" else _collectives(step)
        peaks[provider] = _largest(_peak_mib(step, device), device)
    for _ in range(blocks):
        for provider, step in made.items():
            seen[provider].append(_largest(_seconds(step, steps, device), device))
    tokens = batch["input_ids"].numel() * (1 if layout == "tp" else ranks)
    for provider in PROVIDERS:
        seconds = statistics.median(seen[provider])
        row = Row(workload.name, workload.shape, layout, ranks, provider, seconds * 1e3, tokens / seconds, peaks[provider],
                  losses[provider], collectives[provider], results.commit(), torch.__version__, triton.__version__)  # fmt: skip
        if rank == 0:
            print(f"{workload.name} {workload.shape} {layout:<14}{provider:<7}{row.ms:9.2f} ms {row.tokens:12,.0f} tokens/s  "
                  f"peak {row.peak_mib:9,.0f} MiB  loss {row.loss:.4f}  {row.collectives}", flush=True)  # fmt: skip
        yield row


def _step(model: nn.Module, batch: dict[str, Any], device: torch.device) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss: torch.Tensor = model(**batch).loss
        model.zero_grad(set_to_none=True)
        loss.backward()
        return loss.detach()

    return step


def _collectives(step: Callable[[], object]) -> str:
    from torch.distributed.tensor.debug import CommDebugMode

    seen = CommDebugMode()
    with seen:
        step()
    counts = {str(op).rpartition(".")[2]: count for op, count in seen.get_comm_counts().items() if count}
    return " ".join(f"{name}:{count}" for name, count in sorted(counts.items()))


def _seconds(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Of a step, in a block of them that all processes begin together."""
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
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _settle(device: torch.device) -> None:
    _wait(device)
    dist.barrier()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
