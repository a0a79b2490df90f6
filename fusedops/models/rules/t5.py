"""T5's layers and blocks, pre-norm: a layer's sum and the norm of the next layer in the block are one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..hooks import can_call, original
from ..parts import Branch, add, add_norm, branch, dropped, normed
from ..rule import At, Rule, has_method

__all__ = ["RULES"]

Method = Callable[..., Any]

# --- layers: a norm, something, and the sum -------------------------------------------------------------------------


def _self_attention(self: Any, x: Tensor, attention_mask: Tensor | None = None, position_bias: Tensor | None = None,
                    past_key_values: Any = None, **kwargs: Any) -> tuple[Branch, tuple[Any, ...]]:  # fmt: skip
    return branch(self.SelfAttention, x, mask=attention_mask, position_bias=position_bias,
                  past_key_values=past_key_values, **kwargs)  # fmt: skip


def _cross_attention(self: Any, x: Tensor, key_value_states: Tensor, attention_mask: Tensor | None = None,
                     position_bias: Tensor | None = None, past_key_values: Any = None,
                     **kwargs: Any) -> tuple[Branch, tuple[Any, ...]]:  # fmt: skip
    return branch(self.EncDecAttention, x, mask=attention_mask, key_value_states=key_value_states,
                  position_bias=position_bias, past_key_values=past_key_values, **kwargs)  # fmt: skip


def _feed_forward(self: Any, x: Tensor) -> tuple[Branch, tuple[Any, ...]]:
    return branch(self.DenseReluDense, x)


def _layer(child: str, call: Method) -> dict[str, Method]:
    """The methods of a layer around a child: its forward, and all between its norm and its sum."""

    def inner(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Branch, tuple[Any, ...]]:
        end, others = call(self, x, *args, **kwargs)
        return dropped(end, self.dropout), others

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = normed(self.layer_norm, hidden_states, self._modules[child])
        end, others = inner(self, x, *args, **kwargs)
        return add(end, hidden_states) if call is _feed_forward else (add(end, hidden_states), *others)

    def consumer(self: Any) -> Any:
        return self._modules[child]

    return {"forward": forward, "_fusedops_inner": inner, "_fusedops_consumer": consumer}


# --- the block: its layers in a row ---------------------------------------------------------------------------------


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
    first, last = self.layer[0], self.layer[-1]
    cross = self.layer[1] if self.is_decoder and encoder_hidden_states is not None else None
    layers = (first, last) if cross is None else (first, cross, last)
    if hidden_states.dtype == torch.float16 or not all(can_call(layer, "_fusedops_inner") for layer in layers):
        return original(self, "forward")(  # type: ignore[no-any-return]
            self, hidden_states, attention_mask, position_bias, encoder_hidden_states, encoder_attention_mask,
            encoder_decoder_position_bias, past_key_values, **kwargs)  # fmt: skip
    x = normed(first.layer_norm, hidden_states, first._fusedops_consumer())
    end, others = first._fusedops_inner(x, attention_mask, position_bias, past_key_values, **kwargs)
    residual, self_bias, cross_bias = hidden_states, others[0], None
    if cross is not None:
        x, residual = add_norm(end, residual, cross.layer_norm, cross._fusedops_consumer())
        end, others = cross._fusedops_inner(x, encoder_hidden_states, encoder_attention_mask,
                                            encoder_decoder_position_bias, past_key_values, **kwargs)  # fmt: skip
        cross_bias = others[0]
    x, residual = add_norm(end, residual, last.layer_norm, last._fusedops_consumer())
    end, _ = last._fusedops_inner(x)
    return add(end, residual), self_bias, cross_bias


def _layer_rule(name: str, fingerprint: str, suffix: str, child: str, call: Method) -> Rule:
    return Rule(
        name=name,
        calls="bias_dropout_add",
        methods=_layer(child, call),
        fingerprints=(fingerprint,),
        names=("T5Layer" + suffix, "MT5Layer" + suffix),
    )


def _needs_layers(module: nn.Module, at: At) -> str:
    layers = module._modules.get("layer")
    paths = [] if layers is None else [f"layer.{name}" for name in layers._modules]
    return (
        ""
        if paths and all(has_method(at(path), "_fusedops_inner") for path in paths)
        else "not all of its layers are fused"
    )


RULES = (
    _layer_rule("t5_self_attention", "867f0a59cdd9", "SelfAttention", "SelfAttention", _self_attention),
    _layer_rule("t5_cross_attention", "3ace0c45d839", "CrossAttention", "EncDecAttention", _cross_attention),
    _layer_rule("t5_feed_forward", "493046debaeb", "FF", "DenseReluDense", _feed_forward),
    Rule(
        name="t5_block",
        calls="bias_dropout_add_rms_norm, bias_dropout_add",
        parts=("layer.0", "layer.1", "layer.1.layer_norm", "layer.2", "layer.2.layer_norm"),
        needs=_needs_layers,
        methods={"forward": _block},
        fingerprints=("b17f62b6035b",),
        names=("T5Block", "MT5Block"),
    ),
)
