"""Post-norm blocks of Transformers: each residual branch ends in one bias-dropout-add-norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..parts import activate, add_norm, branch, drop, dropped, linear, narrowed
from ..rule import Rule

__all__ = ["RULES"]


def _bert_output(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    end = dropped(linear(self.dense, hidden_states), self.dropout)
    return add_norm(end, input_tensor, self.LayerNorm, return_sum=False)  # type: ignore[no-any-return]


def _distilbert_block(self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    end, _ = branch(self.attention, narrowed(hidden_states, self.attention), attention_mask=attention_mask, **kwargs)
    attention = add_norm(end, hidden_states, self.sa_layer_norm, return_sum=False)
    end, _ = branch(self.ffn, attention)
    return add_norm(end, attention, self.output_layer_norm, return_sum=False)  # type: ignore[no-any-return]


def _bart_feed_forward(self: Any, x: Tensor) -> Tensor:
    inner = activate(linear(self.fc1, x), self.activation_fn, self.activation_dropout, training=self.training)
    end = drop(linear(self.fc2, inner), self.dropout, training=self.training)
    return add_norm(end, x, self.final_layer_norm, return_sum=False)  # type: ignore[no-any-return]


def _bart_encoder_layer(self: Any, hidden_states: Tensor, attention_mask: Tensor, **kwargs: Any) -> Tensor:
    end, _ = branch(self.self_attn, narrowed(hidden_states, self.self_attn), attention_mask=attention_mask, **kwargs)
    end = drop(end, self.dropout, training=self.training)
    x = add_norm(end, hidden_states, self.self_attn_layer_norm, return_sum=False)
    x = _bart_feed_forward(self, x)
    if x.dtype == torch.float16 and not torch.isfinite(x).all():
        largest = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-largest, max=largest)
    return x


def _bart_decoder_layer(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = True,
    **kwargs: Any,
) -> Tensor:
    end, _ = branch(self.self_attn, narrowed(hidden_states, self.self_attn), past_key_values=past_key_values,
                    attention_mask=attention_mask, **kwargs)  # fmt: skip
    end = drop(end, self.dropout, training=self.training)
    x = add_norm(end, hidden_states, self.self_attn_layer_norm, return_sum=False)
    if encoder_hidden_states is not None:
        end, _ = branch(self.encoder_attn, x, key_value_states=encoder_hidden_states,
                        attention_mask=encoder_attention_mask, past_key_values=past_key_values, **kwargs)  # fmt: skip
        end = drop(end, self.dropout, training=self.training)
        x = add_norm(end, x, self.encoder_attn_layer_norm, return_sum=False)
    return _bart_feed_forward(self, x)


_CALLS = "bias_dropout_add_ln"

RULES = (
    Rule(
        name="bert_output",  # and about forty models more
        calls=_CALLS,
        methods={"forward": _bert_output},
        fingerprints=("ab006922443d",),
        names=("BertSelfOutput", "BertOutput", "RobertaSelfOutput", "RobertaOutput", "ElectraSelfOutput",
               "ElectraOutput"),
    ),
    Rule(
        name="distilbert_block",
        calls=_CALLS,
        methods={"forward": _distilbert_block},
        fingerprints=("f53a3b665f7a",),
        names=("TransformerBlock",),
    ),
    Rule(
        name="bart_encoder_layer",  # and Marian, PLBart, BlenderbotSmall
        calls=_CALLS,
        methods={"forward": _bart_encoder_layer},
        fingerprints=("b57d6d10a46f",),
        names=("BartEncoderLayer", "MarianEncoderLayer"),
    ),
    Rule(
        name="bart_decoder_layer",
        calls=_CALLS,
        methods={"forward": _bart_decoder_layer},
        fingerprints=("a9c8541de6d8",),
        names=("BartDecoderLayer", "MarianDecoderLayer"),
    ),
)  # fmt: skip
