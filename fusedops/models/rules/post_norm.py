"""Post-norm blocks of Transformers: each residual branch ends in one bias-dropout-add-norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import compiling
from ..casts import cast_together
from ..hooks import can_call, has_hooks, original
from ..parts import Branch, activate, add_norm, add_norm_cast, branch, drop, dropped, linear, narrowed
from ..rule import At, Rule, has_method, needs_norm

__all__ = ["RULES"]


def _bert_end(self: Any, dense: Any, hidden_states: Tensor) -> Branch:
    return dropped(linear(dense, hidden_states), self.dropout)


def _bert_output(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    end = _bert_end(self, self.dense, hidden_states)
    return add_norm(end, input_tensor, self.LayerNorm, return_sum=False)  # type: ignore[no-any-return]


def _bert_attend(
    self: Any,
    dense: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """The input of an attention's output module, and that module's linear layer, cast with the others if they are."""
    inner = self.self
    kwargs["attention_mask"] = encoder_attention_mask if self.is_cross_attention else attention_mask
    kwargs["encoder_hidden_states"], kwargs["past_key_values"] = encoder_hidden_states, past_key_values
    if not compiling.makes_kernels(hidden_states) or not can_call(inner, "_fusedops_with_last"):
        return inner(hidden_states, **kwargs)[0], dense
    outputs, dense = inner._fusedops_with_last(dense, hidden_states, **kwargs)
    return outputs[0], dense


def _attended(attention: Any, modules: tuple[nn.Module, ...], hidden_states: Tensor, *args: Any,
              **kwargs: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    """An attention's output: in the dtype for ``modules``, and for the residual stream."""
    if can_call(attention, "_fusedops_attend"):
        output = attention.output
        if can_call(output, "_fusedops_end"):
            attended, dense = attention._fusedops_attend(output.dense, hidden_states, *args, **kwargs)
            end = output._fusedops_end(dense, attended)
            return add_norm_cast(end, hidden_states, output.LayerNorm, *modules)
    y = attention(hidden_states, *args, **kwargs)[0]
    return y, y


def _bert_feed_forward(intermediate: Any, output: Any, x: Tensor, residual: Tensor) -> Tensor:
    known = compiling.makes_kernels(x) and can_call(intermediate, "_fusedops_activated")
    if not known or not can_call(output, "_fusedops_end"):
        return output(intermediate(x), residual)  # type: ignore[no-any-return]
    first, second = cast_together(x, intermediate.dense, output.dense)
    end = output._fusedops_end(second, intermediate._fusedops_activated(first, x))
    return add_norm(end, residual, output.LayerNorm, return_sum=False)  # type: ignore[no-any-return]


def _bert_layer(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Tensor:
    crosses = self.is_decoder and encoder_hidden_states is not None
    if self.chunk_size_feed_forward or "feed_forward_chunk" in vars(self) or (crosses and not self.add_cross_attention):
        return original(self, "forward")(  # type: ignore[no-any-return]
            self, hidden_states, attention_mask, encoder_hidden_states, encoder_attention_mask, past_key_values,
            **kwargs)  # fmt: skip
    # A hook on the output module sees the residual, whose gradient would lack that of the low-precision copy.
    consumers = () if has_hooks(self.output) else (self.intermediate,)
    x, y = _attended(self.attention, () if crosses else consumers, hidden_states, attention_mask,
                     past_key_values=past_key_values, **kwargs)  # fmt: skip
    if crosses:
        x, y = _attended(self.crossattention, consumers, y, None, encoder_hidden_states, encoder_attention_mask,
                         past_key_values=past_key_values, **kwargs)  # fmt: skip
    return _bert_feed_forward(self.intermediate, self.output, x, y)


def _distilbert_block(self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    end, _ = branch(self.attention, narrowed(hidden_states, self.attention), attention_mask=attention_mask, **kwargs)
    x, y = add_norm_cast(end, hidden_states, self.sa_layer_norm, self.ffn)
    end, _ = branch(self.ffn, x)
    return add_norm(end, y, self.output_layer_norm, return_sum=False)  # type: ignore[no-any-return]


def _bart_feed_forward(self: Any, x: Tensor, residual: Tensor) -> Tensor:
    first, second = cast_together(x, self.fc1, self.fc2)
    inner = activate(linear(first, x), self.activation_fn, self.activation_dropout, training=self.training)
    end = drop(linear(second, inner), self.dropout, training=self.training)
    return add_norm(end, residual, self.final_layer_norm, return_sum=False)  # type: ignore[no-any-return]


def _bart_encoder_layer(self: Any, hidden_states: Tensor, attention_mask: Tensor, **kwargs: Any) -> Tensor:
    end, _ = branch(self.self_attn, narrowed(hidden_states, self.self_attn), attention_mask=attention_mask, **kwargs)
    end = drop(end, self.dropout, training=self.training)
    x, y = add_norm_cast(end, hidden_states, self.self_attn_layer_norm, self.fc1)
    x = _bart_feed_forward(self, x, y)
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
    crosses = encoder_hidden_states is not None
    x, y = add_norm_cast(end, hidden_states, self.self_attn_layer_norm, self.encoder_attn if crosses else self.fc1)
    if crosses:
        end, _ = branch(self.encoder_attn, x, key_value_states=encoder_hidden_states,
                        attention_mask=encoder_attention_mask, past_key_values=past_key_values, **kwargs)  # fmt: skip
        end = drop(end, self.dropout, training=self.training)
        x, y = add_norm_cast(end, y, self.encoder_attn_layer_norm, self.fc1)
    return _bart_feed_forward(self, x, y)


def _bert_layer_needs(module: nn.Module, at: At) -> str:
    ends = has_method(at("attention"), "_fusedops_attend") and has_method(at("attention.output"), "_fusedops_end")
    return "" if ends else "its attention does not leave its last sum and norm to it"


_CALLS = "bias_dropout_add_ln"

RULES = (
    Rule(
        name="bert_output",  # and about forty models more
        calls=_CALLS,
        parts=("dense", "dropout", "LayerNorm"),
        needs=needs_norm("LayerNorm"),
        methods={"forward": _bert_output, "_fusedops_end": _bert_end},
        fingerprints=("ab006922443d",),
        names=("BertSelfOutput", "BertOutput", "RobertaSelfOutput", "RobertaOutput", "ElectraSelfOutput",
               "ElectraOutput"),
    ),
    Rule(
        name="bert_attention",
        helps="leaves its last sum and norm to the layer",
        methods={"_fusedops_attend": _bert_attend},
        fingerprints=("f1adf76ab4fc",),
        names=("BertAttention", "RobertaAttention", "ElectraAttention"),
    ),
    Rule(
        name="bert_layer",
        calls=_CALLS,
        parts=("attention.output", "crossattention.output"),
        needs=_bert_layer_needs,
        methods={"forward": _bert_layer},
        fingerprints=("0b57e6dd92b0",),
        names=("BertLayer", "RobertaLayer", "ElectraLayer"),
        known=("forward", "feed_forward_chunk"),
    ),
    Rule(
        name="distilbert_block",
        calls=_CALLS,
        parts=("sa_layer_norm", "output_layer_norm"),
        needs=needs_norm("sa_layer_norm", "output_layer_norm"),
        methods={"forward": _distilbert_block},
        fingerprints=("f53a3b665f7a",),
        names=("TransformerBlock",),
    ),
    Rule(
        name="bart_encoder_layer",  # and Marian, PLBart, BlenderbotSmall
        calls=_CALLS,
        parts=("fc1", "activation_fn", "fc2", "self_attn_layer_norm", "final_layer_norm"),
        needs=needs_norm("self_attn_layer_norm", "final_layer_norm"),
        methods={"forward": _bart_encoder_layer},
        fingerprints=("b57d6d10a46f",),
        names=("BartEncoderLayer", "MarianEncoderLayer"),
    ),
    Rule(
        name="bart_decoder_layer",
        calls=_CALLS,
        parts=("fc1", "activation_fn", "fc2", "self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
        needs=needs_norm("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
        methods={"forward": _bart_decoder_layer},
        fingerprints=("a9c8541de6d8",),
        names=("BartDecoderLayer", "MarianDecoderLayer"),
    ),
)  # fmt: skip
