"""Train a small language model on several GPUs, or on several processes of a CPU.

The model is a pre-norm transformer over bytes. It is like Llama, except that it learns embeddings
of positions. It is trained on the source text of Python's standard library, once with modules of
``torch.nn`` and once with modules of ``fusedops.nn``: see `CONTENDERS`.

Processes form groups of ``--tp``. Within a group, linear layers are split by columns and rows
(tensor parallel), and norms, sums and dropout compute a part of each sequence (sequence parallel).
The batch is split over the groups. FSDP2 shards the parameters of each process over the groups.

    torchrun --nproc-per-node 2 examples/train_lm_distributed.py
    torchrun --nproc-per-node 8 examples/train_lm_distributed.py --tp 4 --width 4096 --heads 32
"""

from __future__ import annotations

import argparse
import functools
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp

import fusedops
from fusedops.nn import FusedBiasDropoutAddRMSNorm, FusedSwiGLU

VOCABULARY = 256  # bytes


class TorchAddNorm(nn.RMSNorm):
    """Dropout, the residual sum and the norm, as three operators.

    The module returns the output of the norm, and the sum.
    """

    def __init__(self, width: int, *, p: float) -> None:
        super().__init__(width, eps=1e-6)
        self.dropout = nn.Dropout(p)

    def forward(  # type: ignore[override]
        self, x: Tensor, *, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Map ``(batch, context, width)`` to two tensors of that shape."""
        x = self.dropout(x)
        x = x if residual is None else residual + x
        return super().forward(x), x


class TorchSwiGLU(nn.Module):
    """The gated unit, as two operators."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Map two tensors of one shape to another of that shape."""
        return F.silu(gate) * up


# Two classes of modules: the norm, with the dropout and the sum before it, and the gated unit.
Parts = tuple[Any, Any]
FusedAddNorm = functools.partial(FusedBiasDropoutAddRMSNorm, eps=1e-6, return_sum=True)
CONTENDERS: dict[str, Parts] = {
    "torch.nn": (TorchAddNorm, TorchSwiGLU),
    "fusedops.nn": (FusedAddNorm, FusedSwiGLU),
}


class Attention(nn.Module):
    """Causal self-attention, whose heads `plan` splits over the processes of a group."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Any:
        """Map ``(batch, context, width)`` to the same shape."""
        layers = (self.query, self.key, self.value)
        q, k, v = (rearrange(layer(x), "b t (h d) -> b h t d", d=self.size) for layer in layers)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(rearrange(attended, "b h t d -> b t (h d)"))


class MLP(nn.Module):
    """The gated MLP, whose columns `plan` splits over the processes of a group."""

    def __init__(self, width: int, gated_unit: Any) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down, self.unit = nn.Linear(3 * width, width, bias=False), gated_unit()

    def forward(self, x: Tensor) -> Any:
        """Map ``(batch, context, width)`` to the same shape."""
        return self.down(self.unit(self.gate(x), self.up(x)))


class Block(nn.Module):
    """A pre-norm block. Each norm first adds the preceding branch to the residual stream."""

    def __init__(self, width: int, heads: int, p: float, parts: Parts) -> None:
        super().__init__()
        add_norm, gated_unit = parts
        self.attention_norm, self.mlp_norm = (add_norm(width, p=p) for _ in range(2))
        self.attention, self.mlp = Attention(width, heads), MLP(width, gated_unit)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Map the preceding block's MLP output and residual stream to those of this block.

        The first block receives the embeddings, and None.
        """
        x, residual = self.attention_norm(x, residual=residual)
        x, residual = self.mlp_norm(self.attention(x), residual=residual)
        return self.mlp(x), residual


class LanguageModel(nn.Module):
    """A model that maps bytes, and their targets (the next bytes), to the mean loss."""

    def __init__(self, args: argparse.Namespace, parts: Parts) -> None:
        super().__init__()
        self.bytes, self.positions = (
            nn.Embedding(VOCABULARY, args.width),
            nn.Embedding(args.context, args.width),
        )
        blocks = [Block(args.width, args.heads, args.dropout, parts) for _ in range(args.layers)]
        self.blocks, self.norm = nn.ModuleList(blocks), parts[0](args.width, p=args.dropout)
        self.head = nn.Linear(args.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Map ``(batch, context)`` bytes, and as many targets, to a scalar."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x, residual = self.bytes(tokens) + self.positions(positions), None
        for block in self.blocks:
            x, residual = block(x, residual)
        logits = self.head(self.norm(x, residual=residual)[0])
        return F.cross_entropy(
            rearrange(logits, "b t v -> (b t) v"), rearrange(targets, "b t -> (b t)")
        )


# How the model is split over processes.
# --------------------------------------------------------------------------------------------------


def plan() -> dict[str, tp.ParallelStyle]:
    """Return the usual tensor-parallel plan of a pre-norm model.

    Outside of attention and MLP, each process has a part of every sequence.
    """
    # The outputs are DTensors whose sequences (dimension 1) are sharded.
    rows: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
    embedding = tp.RowwiseParallel(input_layouts=Replicate(), **rows)
    gather = tp.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    # Layers whose output columns are split over the processes.
    columns = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
    return {
        **dict.fromkeys(("bytes", "positions"), embedding),
        **dict.fromkeys(("blocks.*.*_norm", "norm"), tp.SequenceParallel()),
        **dict.fromkeys(("blocks.*.attention", "blocks.*.mlp"), gather),
        **{f"blocks.*.{name}": tp.ColwiseParallel() for name in columns},
        "blocks.*.attention.out": tp.RowwiseParallel(**rows),
        "blocks.*.mlp.down": tp.RowwiseParallel(**rows),
        "head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def spread(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Split the layers within each group, then shard the parameters over the groups."""
    if mesh["tp"].size() > 1:
        tp.parallelize_module(model, mesh["tp"], plan())
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["dp"])


# Training.
# --------------------------------------------------------------------------------------------------


def read_corpus() -> Tensor:
    """Return the standard library's modules, one after the other, as bytes."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(module.read_bytes() for module in modules)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(corpus: Tensor, args: argparse.Namespace, steps: int) -> Iterator[Tensor]:
    """Yield random windows of one byte more than the context, the same ones in every process."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(corpus) - args.context, (args.batch, 1), generator=generator)
        yield corpus[(starts + torch.arange(args.context + 1)).to(corpus.device)].long()


def train(
    parts: Parts, corpus: Tensor, args: argparse.Namespace, steps: int, mesh: DeviceMesh | None
) -> tuple[list[float], float, float]:
    """Train on the mesh, or without one in this process alone; on a GPU in bf16 autocast.

    Returns the losses, the tokens per second, and the peak memory in MiB (0 on a CPU).
    """
    device, on_gpu = corpus.device, corpus.device.type == "cuda"
    torch.manual_seed(0)  # the same weights everywhere
    model = LanguageModel(args, parts).to(device)
    groups, group = (1, 0) if mesh is None else (mesh["dp"].size(), mesh["dp"].get_local_rank())
    if args.compile:
        fusedops.compile_blocks(model)
    if mesh is not None:
        spread(model, mesh)
    # For dropout, the processes of a group need the same seed, because they draw parts of one mask.
    # Other groups have other data, and draw other masks.
    torch.manual_seed(1 + group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
    losses, started = [], time.perf_counter()
    warm_up = min(5, steps - 1)  # steps that are not timed: kernels compile in them
    for step, windows in enumerate(batches(corpus, args, steps)):
        if step == warm_up and on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        if step == warm_up:
            started = time.perf_counter()
        group_windows = windows.chunk(groups)[group]
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = model(group_windows[:, :-1], group_windows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    means = torch.stack(losses) / groups
    if mesh is not None:
        dist.all_reduce(means, group=mesh["dp"].get_group())
    mean_losses = means.tolist()  # waits for the GPU, so it comes before the time is taken
    speed = (steps - warm_up) * args.batch * args.context / (time.perf_counter() - started)
    peak_mib = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0.0
    return mean_losses, speed, peak_mib


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small language model on several processes; run by torchrun."
    )
    parser.add_argument(
        "--tp",
        type=int,
        help="processes that share each layer; by default 2, or 1 if WORLD_SIZE is odd",
    )
    parser.add_argument(
        "--parts", choices=[*CONTENDERS, "both"], default="both", help="what the model is made of"
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile each block by fusedops.compile_blocks"
    )
    # The defaults without a GPU, and with one.
    sizes = {
        "layers": (2, 8),
        "width": (96, 1024),
        "heads": (4, 16),
        "context": (64, 512),
        "batch": (12, 32),
        "steps": (40, 200),
        "rate": (2e-3, 3e-4),
        "dropout": (0.0, 0.0),
    }
    for name, presets in sizes.items():
        default: Any = presets[torch.cuda.is_available()]
        parser.add_argument(
            f"--{name}", type=type(default), default=default, help=f"{default} on this machine"
        )
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "run this by torchrun: torchrun --nproc-per-node 2 examples/train_lm_distributed.py"
        )
    processes = int(os.environ["WORLD_SIZE"])
    args.tp = args.tp or (2 if processes % 2 == 0 else 1)
    divided_by_tp = (processes, args.heads, args.context)
    if any(size % args.tp for size in divided_by_tp) or args.batch % (processes // args.tp):
        parser.error(
            "--tp must divide the number of processes, --heads and --context; "
            "the number of groups, processes / tp, must divide --batch"
        )
    return args


def main() -> None:
    """Train each model on all processes; then train its first steps in one process, to compare."""
    args = parse_arguments()
    kind = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(
        kind, (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp")
    )
    corpus, is_first = read_corpus().to(kind), dist.get_rank() == 0
    if is_first:
        print(
            f"{dist.get_world_size()} processes on {kind}: data over {mesh.shape[0]}, "
            f"tensors over {args.tp}"
        )
    for name, parts in CONTENDERS.items():
        if args.parts not in (name, "both"):
            continue
        losses, speed, mib = train(parts, corpus, args, args.steps, mesh)
        if is_first:
            memory = f", peak memory {mib:,.0f} MiB a process" if mib else ""
            print(
                f"{name:>12}  loss {losses[0]:.3f} to {losses[-1]:.3f}, "
                f"{speed:,.0f} tokens/s{memory}",
                flush=True,
            )
        # With dropout there is nothing to compare: each group draws a mask of its own.
        if is_first and not args.dropout:
            alone, _, _ = train(parts, corpus, args, min(args.steps, 10), mesh=None)
            gap = max(abs(a - b) for a, b in zip(alone, losses, strict=False))
            print(
                f"{'':>12}  largest difference from one process, {len(alone)} steps: {gap:.1g}",
                flush=True,
            )
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
