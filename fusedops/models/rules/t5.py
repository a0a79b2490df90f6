"""T5's layers and blocks, pre-norm: a layer's sum is taken along by the norm of the layer that follows in the block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..parts import Branch, add, add_norm, branch, dropped, unwatched
from ..rule import Rule

__all__ = ["RULES"]

# --- layers: a norm, something, and the sum -------------------------------------------------------------------------


def _self_attention_inner(self: Any, normed: Tensor, attention_mask: Tensor | None = None,
                          position_bias: Tensor | None = None, past_key_values: Any = None,
                          **kwargs: Any) -> tuple[Branch, tuple[Any, ...]]:  # fmt: skip
    """All between the layer's norm and its sum."""
    end, others = branch(self.SelfAttention, normed, mask=attention_mask, position_bias=position_bias,
                         past_key_values=past_key_values, **kwargs)  # fmt: skip
    return dropped(end, self.dropout), others


def _cross_attention_inner(self: Any, normed: Tensor, key_value_states: Tensor, attention_mask: Tensor | None = None,
                           position_bias: Tensor | None = None, past_key_values: Any = None,
                           **kwargs: Any) -> tuple[Branch, tuple[Any, ...]]:  # fmt: skip
    end, others = branch(self.EncDecAttention, normed, mask=attention_mask, key_value_states=key_value_states,
                         position_bias=position_bias, past_key_values=past_key_values, **kwargs)  # fmt: skip
    return dropped(end, self.dropout), others


def _feed_forward_inner(self: Any, normed: Tensor) -> tuple[Branch, tuple[Any, ...]]:
    end, _ = branch(self.DenseReluDense, normed)
    return dropped(end, self.dropout), ()


def _self_attention(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    end, others = _self_attention_inner(self, self.layer_norm(hidden_states), attention_mask, position_bias,
                                        past_key_values, **kwargs)  # fmt: skip
    return add(end, hidden_states), *others


def _cross_attention(
    self: Any,
    hidden_states: Tensor,
    key_value_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    end, others = _cross_attention_inner(self, self.layer_norm(hidden_states), key_value_states, attention_mask,
                                         position_bias, past_key_values, **kwargs)  # fmt: skip
    return add(end, hidden_states), *others


def _feed_forward(self: Any, hidden_states: Tensor) -> Tensor:
    end, _ = _feed_forward_inner(self, self.layer_norm(hidden_states))
    return add(end, hidden_states)


# --- the block: its layers in a row ---------------------------------------------------------------------------------


def _inner(layer: Any) -> Any:
    """What the layer does between its norm and its sum, if the block may do these two."""
    return getattr(type(layer), "_fusedops_inner", None) if unwatched(layer) else None


def _block(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    encoder_decoder_position_bias: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    # In fp16 the original clamps each layer's sum before the next norm.
    inner = [_inner(layer) for layer in self.layer]
    if hidden_states.dtype == torch.float16 or None in inner:
        return type(self)._fusedops_original.forward(  # type: ignore[no-any-return]
            self, hidden_states, attention_mask, position_bias, encoder_hidden_states, encoder_attention_mask,
            encoder_decoder_position_bias, past_key_values, **kwargs)  # fmt: skip
    first, last = self.layer[0], self.layer[-1]
    end, others = inner[0](first, first.layer_norm(hidden_states), attention_mask, position_bias, past_key_values,
                           **kwargs)  # fmt: skip
    residual, self_bias, cross_bias = hidden_states, others[0], None
    if self.is_decoder and encoder_hidden_states is not None:
        cross = self.layer[1]
        x, residual = add_norm(end, residual, cross.layer_norm)
        end, others = inner[1](cross, x, encoder_hidden_states, encoder_attention_mask, encoder_decoder_position_bias,
                               past_key_values, **kwargs)  # fmt: skip
        cross_bias = others[0]
    x, residual = add_norm(end, residual, last.layer_norm)
    end, _ = inner[-1](last, x)
    return add(end, residual), self_bias, cross_bias


RULES = (
    Rule(
        name="t5_self_attention",
        calls="bias_dropout_add",
        methods={"forward": _self_attention, "_fusedops_inner": _self_attention_inner},
        fingerprints=("867f0a59cdd9",),
        names=("T5LayerSelfAttention", "MT5LayerSelfAttention"),
    ),
    Rule(
        name="t5_cross_attention",
        calls="bias_dropout_add",
        methods={"forward": _cross_attention, "_fusedops_inner": _cross_attention_inner},
        fingerprints=("3ace0c45d839",),
        names=("T5LayerCrossAttention", "MT5LayerCrossAttention"),
    ),
    Rule(
        name="t5_feed_forward",
        calls="bias_dropout_add",
        methods={"forward": _feed_forward, "_fusedops_inner": _feed_forward_inner},
        fingerprints=("493046debaeb",),
        names=("T5LayerFF", "MT5LayerFF"),
    ),
    Rule(
        name="t5_block",
        calls="bias_dropout_add_rms_norm, bias_dropout_add",
        methods={"forward": _block},
        fingerprints=("b17f62b6035b",),
        names=("T5Block", "MT5Block"),
    ),
)
