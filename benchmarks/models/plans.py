"""The tensor-parallel plans of the models of the command ``distributed``: PyTorch's usual ones."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["MODELS", "blocks", "parallelize"]

# The models that have a plan, and the names of their lists of blocks.
MODELS = {"llama": "model.layers", "bert": "bert.encoder.layer", "gated_decoder": "blocks"}


def blocks(model: nn.Module, name: str) -> Any:
    """Returns the blocks of a model, by their names; a change of a value replaces the block."""
    return model.get_submodule(MODELS[name])._modules


def parallelize(model: nn.Module, name: str, mesh: Any) -> None:
    """Makes a model tensor and sequence parallel.

    Linear layers are split by columns or rows. Between them, sums, dropout and norms have a part of
    each sequence.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    plans = {"llama": _llama, "bert": _bert, "gated_decoder": _gated_decoder}
    parallelize_module(model, mesh, plans[name]())


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


def _gated_decoder() -> dict[str, Any]:
    """Returns the plan of the gated decoder.

    Its packed layer is split like any other: each rank reads its part of the rows as the queries,
    keys, values and gates of its own heads. That is a permutation of the random rows.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    layer = "blocks.*."
    heads = tp.SequenceParallel(sequence_dim=2, use_local_output=True)
    gathered = tp.PrepareModuleInput(
        input_layouts=(Shard(1), None, None),
        desired_input_layouts=(Replicate(), None, None),
        use_local_output=True,
    )
    return {
        "embed": tp.RowwiseParallel(input_layouts=Replicate(), **_rows()),
        layer + "attn": gathered,
        layer + "attn.qkvg": tp.ColwiseParallel(),
        **{layer + f"attn.{name}_norm": heads for name in "qk"},
        layer + "mlp": _gathered(),
        layer + "mlp.fc": tp.ColwiseParallel(),
        **{layer + f"{name}.proj": tp.RowwiseParallel(**_rows()) for name in ("attn", "mlp")},
        **{layer + f"{name}_norm": tp.SequenceParallel() for name in ("attn", "mlp")},
        "norm": tp.SequenceParallel(),
        "lm_head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
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
