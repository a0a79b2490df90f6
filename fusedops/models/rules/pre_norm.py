"""Pre-norm blocks of Transformers: where a branch joins the residual stream, the next norm takes the sum along.

The last sum of a block meets its norm in the next block, which another module computes; there only bias, dropout and
the sum are one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..parts import activate, add, add_norm, branch, drop, dropped, linear
from ..rule import Rule

__all__ = ["RULES"]


def _gpt2_block(
    self: Any,
    hidden_states: Tensor,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    use_cache: bool | None = False,
    **kwargs: Any,
) -> Tensor:
    residual = hidden_states
    end, _ = branch(self.attn, self.ln_1(residual), past_key_values=past_key_values, attention_mask=attention_mask,
                    use_cache=use_cache, **kwargs)  # fmt: skip
    if encoder_hidden_states is not None:
        if not hasattr(self, "crossattention"):
            raise ValueError("encoder_hidden_states were given, but the block was made without cross-attention; "
                             "set config.add_cross_attention=True")  # fmt: skip
        x, residual = add_norm(end, residual, self.ln_cross_attn)
        end, _ = branch(self.crossattention, x, past_key_values=past_key_values, attention_mask=attention_mask,
                        encoder_hidden_states=encoder_hidden_states,
                        encoder_attention_mask=encoder_attention_mask)  # fmt: skip
    x, residual = add_norm(end, residual, self.ln_2)
    end, _ = branch(self.mlp, x)
    return add(end, residual)


def _vit_layer(self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    end, _ = branch(self.attention, self.layernorm_before(hidden_states), attention_mask, **kwargs)
    x, residual = add_norm(dropped(end, self.dropout), hidden_states, self.layernorm_after)
    end, _ = branch(self.mlp, x)
    return add(dropped(end, self.dropout), residual)


def _opt_layer(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    before = self.do_layer_norm_before
    x = self.self_attn_layer_norm(hidden_states) if before else hidden_states
    end, _ = branch(self.self_attn, hidden_states=x, past_key_values=past_key_values, position_ids=position_ids,
                    attention_mask=attention_mask, **kwargs)  # fmt: skip
    end = drop(end, self.dropout, training=self.training)
    shape, rows = hidden_states.shape, (-1, hidden_states.shape[-1])  # the second half works on rows
    if before:
        end = end._replace(product=end.product.reshape(rows))
        x, residual = add_norm(end, hidden_states.reshape(rows), self.final_layer_norm)
    else:
        x = residual = add_norm(end, hidden_states, self.self_attn_layer_norm, return_sum=False).reshape(rows)
    end = linear(self.fc2, activate(linear(self.fc1, x), self.activation_fn))
    end = drop(end, self.dropout, training=self.training)
    if before:
        return add(end, residual).view(shape)
    end = end._replace(product=end.product.view(shape))
    return add_norm(end, residual.view(shape), self.final_layer_norm, return_sum=False)  # type: ignore[no-any-return]


def _llama_layer(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> Tensor:
    end, _ = branch(self.self_attn, hidden_states=self.input_layernorm(hidden_states), attention_mask=attention_mask,
                    position_ids=position_ids, past_key_values=past_key_values, use_cache=use_cache,
                    position_embeddings=position_embeddings, **kwargs)  # fmt: skip
    x, residual = add_norm(end, hidden_states, self.post_attention_layernorm)
    end, _ = branch(self.mlp, x)
    return add(end, residual)


RULES = (
    Rule(
        name="gpt2_block",
        calls="bias_dropout_add_ln, bias_dropout_add",
        methods={"forward": _gpt2_block},
        fingerprints=("8fa3acc5f683",),
        names=("GPT2Block",),
    ),
    Rule(
        name="vit_layer",  # and DeiT, AST, ViT-MAE, ViT-MSN
        calls="bias_dropout_add_ln, bias_dropout_add",
        methods={"forward": _vit_layer},
        fingerprints=("853f2f356c9b",),
        names=("ViTLayer", "DeiTLayer"),
    ),
    Rule(
        name="opt_layer",
        calls="bias_dropout_add_ln, bias_dropout_add",
        methods={"forward": _opt_layer},
        fingerprints=("723b1a9a74f8",),
        names=("OPTDecoderLayer",),
    ),
    Rule(
        name="llama_layer",  # Mistral, Qwen, Gemma, DeepSeek, and about sixty more
        calls="bias_dropout_add_rms_norm",
        methods={"forward": _llama_layer},
        fingerprints=("294cf1e5f35f",),
        names=("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer",
               "GemmaDecoderLayer"),
    ),
)  # fmt: skip
