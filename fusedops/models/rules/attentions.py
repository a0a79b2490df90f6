"""Attention modules whose forward ends in a linear layer: they can leave its bias, and a dropout, to their block.

Their own forward stays as it is, and is what runs.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..parts import Branch, without
from ..rule import Rule

__all__ = ["RULES"]

_CALLS = "leaves its last bias to the block"


def _ends_in(output: str, dropout: str | None = None) -> dict[str, Any]:
    """The method of a module whose forward ends in these children."""

    def branch(self: Any, *args: Any, **kwargs: Any) -> tuple[Branch, tuple[Any, ...]]:
        return without(self, output, dropout, *args, **kwargs)

    return {"_fusedops_branch": branch}


def _multihead_branch(self: Any, *args: Any, **kwargs: Any) -> tuple[Branch, tuple[Any, ...]]:
    if self.training:
        return without(self, "out_proj", None, *args, **kwargs)
    result = self(*args, **kwargs)  # it may take PyTorch's fast path, which needs the bias
    return Branch(result[0]), result[1:]


RULES = (
    Rule(
        name="multihead_attention",
        calls=_CALLS,
        methods={"_fusedops_branch": _multihead_branch},
        base=nn.MultiheadAttention,
    ),
    Rule(
        name="gpt2_attention",
        calls=_CALLS + ", and its dropout",
        methods=_ends_in("c_proj", "resid_dropout"),
        fingerprints=("4baf42142fd2",),
        names=("GPT2Attention",),
    ),
    Rule(
        name="bart_attention",  # and MBart, Marian, Pegasus, OPT
        calls=_CALLS,
        methods=_ends_in("out_proj"),
        fingerprints=("f434310b8181", "3099567ec98b"),
        names=("BartAttention", "OPTAttention"),
    ),
    Rule(
        name="vit_attention",  # and DeiT, BEiT, DINOv2
        calls=_CALLS,
        methods=_ends_in("o_proj"),
        fingerprints=("9c1503232895",),
        names=("ViTAttention",),
    ),
    Rule(
        name="distilbert_attention",
        calls=_CALLS,
        methods=_ends_in("out_lin"),
        fingerprints=("7888d8c7ae34",),
        names=("DistilBertSelfAttention",),
    ),
)
