"""Blocks in the style of Llama and BERT, and the layouts in which trainers distribute them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "BATCH",
    "LAYERS",
    "LENGTH",
    "WIDTH",
    "BertLike",
    "LlamaLike",
    "Model",
    "gather_keys_on_cpus",
    "parallel",
    "plan",
]

WIDTH, HEADS, BATCH, LENGTH, LAYERS, P = 16, 2, 2, 4, 2, 0.2


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.query, self.key, self.value)
        query, key, value = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in layers
        )
        y = F.scaled_dot_product_attention(query, key, value)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class LlamaLike(nn.Module):
    """A block with norms before its parts; between parts, rows are plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(bias=False), Gated()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class BertLike(nn.Module):
    """A block with norms behind its parts, biases and dropout; all its rows are DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(bias=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(P)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x)))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([make() for _ in range(LAYERS)])
        for parameter in self.parameters():
            if parameter.dim() == 1:  # ones and zeros would hide errors
                nn.init.normal_(parameter, 1.0, 0.3)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def plan(make: type[nn.Module]) -> dict[str, Any]:
    """Tensor and sequence parallel, as trainers write it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    rows = Shard(1)
    gather = tp.PrepareModuleInput(input_layouts=rows, desired_input_layouts=Replicate())
    common: dict[str, Any] = {
        "attention": gather,
        **{f"attention.{name}": tp.ColwiseParallel() for name in ("query", "key", "value")},
        "norm1": tp.SequenceParallel(),
        "norm2": tp.SequenceParallel(),
    }
    if make is LlamaLike:
        out = tp.RowwiseParallel(output_layouts=rows)
        columns = tp.ColwiseParallel()
        mlp = {"mlp": gather, "mlp.gate": columns, "mlp.up": columns, "mlp.down": out}
        return {**common, "attention.out": out, **mlp}
    out = tp.RowwiseParallel(output_layouts=rows, use_local_output=False)
    up = tp.ColwiseParallel(input_layouts=rows)
    return {**common, "attention.out": out, "up": up, "down": out}


def _saving_products() -> Any:
    """Contexts of selective checkpointing that save every second product, and no other value."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    products: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        products[context.is_recompute] += is_product
        if is_product and products[context.is_recompute] % 2:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def gather_keys_on_cpus() -> None:
    """Registers a rule by which PyTorch's `context_parallel` runs on a CPU.

    PyTorch has ring attention for GPUs' kernels of attention, and no rule for a CPU's. By this rule
    keys and values are gathered, and each rank computes the attention of its queries.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    rows, whole = Shard(2), Replicate()
    name = "_scaled_dot_product_flash_attention_for_cpu"

    @register_sharding(getattr(torch.ops.aten, name).default)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return [([rows, rows], [rows, whole, whole, None, None])]

    @register_sharding(getattr(torch.ops.aten, f"{name}_backward").default)
    def backward(*args: Any, **kwargs: Any) -> Any:
        gradients = [rows, Partial(), Partial()]
        return [(gradients, [rows, rows, whole, whole, rows, rows, None, None])]


def parallel(make: type[nn.Module], layout: str, mesh: Any) -> nn.Module:
    """A model in a layout; its blocks are not compiled yet."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    model = Model(make)
    for number, layer in enumerate(model.layers):
        if "tp" in layout:
            parallelize_module(layer, mesh, plan(make))
        if "checkpointed" in layout:
            model.layers[number] = checkpoint_wrapper(layer)
        if "selective" in layout:
            model.layers[number] = checkpoint_wrapper(layer, context_fn=_saving_products)
    if "fsdp" in layout:
        dtype = torch.bfloat16 if "bf16" in layout else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    return model
