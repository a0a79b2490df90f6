"""The tensor-parallel plans of the models of the command ``distributed``: PyTorch's usual ones."""

from __future__ import annotations

from typing import Any

__all__ = ["plan"]


def plan(model: str) -> dict[str, Any]:
    """Returns a model's plan, with sequence parallelism.

    Linear layers are split by columns or rows. Between them, sums, dropout and norms have a part of
    each sequence.
    """
    return _llama() if model == "llama" else _bert()


def _llama() -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    layer = "model.layers.*."
    columns = (*[f"self_attn.{name}_proj" for name in "qkv"], "mlp.gate_proj", "mlp.up_proj")
    named_inputs: dict[str, Any] = {
        "input_kwarg_layouts": {"hidden_states": Shard(1)},
        "desired_input_kwarg_layouts": {"hidden_states": Replicate()},
    }
    return {
        "model.embed_tokens": tp.RowwiseParallel(input_layouts=Replicate(), **_rows()),
        **{layer + name: tp.ColwiseParallel() for name in columns},
        **{
            layer + name: tp.RowwiseParallel(**_rows())
            for name in ("self_attn.o_proj", "mlp.down_proj")
        },
        layer + "*_layernorm": tp.SequenceParallel(),
        layer + "self_attn": tp.PrepareModuleInput(**named_inputs, use_local_output=True),
        layer + "mlp": _gathered(),
        "model.norm": tp.SequenceParallel(),
        "lm_head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def _bert() -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    layer, sums = "bert.encoder.layer.*.", ("attention.output", "output")
    return {
        "bert.embeddings": tp.PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False
        ),
        layer + "attention.self": _gathered(),
        **{
            layer + f"attention.self.{name}": tp.ColwiseParallel()
            for name in ("query", "key", "value")
        },
        layer + "intermediate.dense": tp.ColwiseParallel(input_layouts=Shard(1)),
        **{layer + f"{name}.dense": tp.RowwiseParallel(**_rows()) for name in sums},
        **{layer + f"{name}.LayerNorm": tp.SequenceParallel() for name in sums},
        "cls": _gathered(),
    }


def _rows() -> dict[str, Any]:
    """Returns options for a layer that is split by rows: its output is sharded by sequence."""
    from torch.distributed.tensor import Shard

    return {"output_layouts": Shard(1), "use_local_output": False}


def _gathered() -> Any:
    """Returns the style of a module that takes whole sequences."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import PrepareModuleInput

    return PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
    )
