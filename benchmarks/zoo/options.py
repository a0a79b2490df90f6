"""Options that configs of several of the zoo's models share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..models.batches import Sizes
from ..models.text import EOS, PAD, TOKENS
from ..models.workloads import MODELS, Model

__all__ = ["GROUPS", "SPECIAL", "TINY", "WITH_BOS", "tiny_text", "with_layers"]

SPECIAL = {"pad_token_id": PAD, "eos_token_id": EOS}
WITH_BOS = SPECIAL | {"bos_token_id": EOS}
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
GROUPS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def tiny_text(**others: Any) -> dict[str, Any]:
    """Returns the tiny options of a model of text."""
    return {"vocab_size": TOKENS, **TINY, **others}


def with_layers(name: str, *sizes: Sizes, **options: Any) -> Model:
    """Returns a model of `benchmarks.models` with other options, such as fewer layers.

    Args:
        name: the model.
        sizes: see `registry.workloads`; by default the model's first.
        options: the options.
    """
    model = MODELS[name]
    return replace(model, options=model.options | options, sizes=sizes or model.sizes[:1])
