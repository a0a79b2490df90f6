"""Pre-norm blocks of Transformers: a branch, its sum with the residual stream and the next norm are one operator.

The last sum of a block meets its norm in the next block, which another module computes; there only bias, dropout and
the sum are one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..casts import cast_together
from ..parts import Branch, activate, add, add_norm, add_norm_cast, branch, drop, dropped, linear, narrowed, normed
from ..rule import At, Rule, needs_norm

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
    residual, attention, mlp = hidden_states, self.attn, self.mlp
    end, _ = branch(attention, normed(self.ln_1, residual, attention), past_key_values=past_key_values,
                    attention_mask=attention_mask, use_cache=use_cache, **kwargs)  # fmt: skip
    if encoder_hidden_states is not None:
        if not hasattr(self, "crossattention"):
            raise ValueError("encoder_hidden_states were given, but the block was made without cross-attention; "
                             "set config.add_cross_attention=True")  # fmt: skip
        x, residual = add_norm(end, residual, self.ln_cross_attn, self.crossattention)
        end, _ = branch(self.crossattention, x, past_key_values=past_key_values, attention_mask=attention_mask,
                        encoder_hidden_states=encoder_hidden_states,
                        encoder_attention_mask=encoder_attention_mask)  # fmt: skip
    x, residual = add_norm(end, residual, self.ln_2, mlp)
    end, _ = branch(mlp, x)
    return add(end, residual)


def _vit_layer(self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    attention, mlp, dropout = self.attention, self.mlp, self.dropout
    end, _ = branch(attention, normed(self.layernorm_before, hidden_states, attention), attention_mask, **kwargs)
    x, residual = add_norm(dropped(end, dropout), hidden_states, self.layernorm_after, mlp)
    end, _ = branch(mlp, x)
    return add(dropped(end, dropout), residual)


def _opt_layer(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    before, attention = self.do_layer_norm_before, self.self_attn
    x = normed(self.self_attn_layer_norm, hidden_states, attention) if before else narrowed(hidden_states, attention)
    end, _ = branch(attention, hidden_states=x, past_key_values=past_key_values, position_ids=position_ids,
                    attention_mask=attention_mask, **kwargs)  # fmt: skip
    end = drop(end, self.dropout, training=self.training)
    shape, rows = hidden_states.shape, (-1, hidden_states.shape[-1])  # the second half works on rows
    if before:
        end = end._replace(product=end.product.reshape(rows))
        x, residual = add_norm(end, hidden_states.reshape(rows), self.final_layer_norm, self.fc1)
    else:
        x, y = add_norm_cast(end, hidden_states, self.self_attn_layer_norm, self.fc1)
        residual = y.reshape(rows)
        # One tensor, if it is one, so that a hook on it gets the whole of its gradient.
        x = residual if x is y else x.reshape(rows)
    first, second = cast_together(x, self.fc1, self.fc2)
    end = linear(second, activate(linear(first, x), self.activation_fn))
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
    attention, mlp = self.self_attn, self.mlp
    x = normed(self.input_layernorm, hidden_states, attention)
    end, _ = branch(attention, hidden_states=x, attention_mask=attention_mask, position_ids=position_ids,
                    past_key_values=past_key_values, use_cache=use_cache, position_embeddings=position_embeddings,
                    **kwargs)  # fmt: skip
    x, residual = add_norm(end, hidden_states, self.post_attention_layernorm, mlp)
    end, _ = branch(mlp, x)
    return add(end, residual)


def _clip_layer(self: Any, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
    attention, mlp = self.self_attn, self.mlp
    x = normed(self.layer_norm1, hidden_states, attention)
    end, _ = branch(attention, hidden_states=x, attention_mask=attention_mask, **kwargs)
    x, residual = add_norm(end, hidden_states, self.layer_norm2, mlp)
    end, _ = branch(mlp, x)
    return add(end, residual)


def _gpt_neo_block(self: Any, hidden_states: Tensor, layer_past: Any = None, attention_mask: Tensor | None = None,
                   use_cache: bool = False, output_attentions: bool = False,
                   **kwargs: Any) -> tuple[Tensor, Any]:  # fmt: skip
    attention, mlp = self.attn, self.mlp
    x = normed(self.ln_1, hidden_states, attention)
    end, others = branch(attention, x, layer_past=layer_past, attention_mask=attention_mask, use_cache=use_cache,
                         output_attentions=output_attentions)  # fmt: skip
    x, residual = add_norm(end, hidden_states, self.ln_2, mlp)
    end, _ = branch(mlp, x)
    return add(end, residual), others[0]


def _mbart_feed_forward(self: Any, end: Branch, residual: Tensor) -> Tensor:
    """From the end of the attention before it: its sum, norm, and the feed-forward part."""
    x, residual = add_norm(end, residual, self.final_layer_norm, self.fc1)
    first, second = cast_together(x, self.fc1, self.fc2)
    inner = activate(linear(first, x), self.activation_fn, self.activation_dropout, training=self.training)
    return add(drop(linear(second, inner), self.dropout, training=self.training), residual)


def _mbart_encoder_layer(self: Any, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
    x = normed(self.self_attn_layer_norm, hidden_states, self.self_attn)
    end, _ = branch(self.self_attn, hidden_states=x, attention_mask=attention_mask, **kwargs)
    y = _mbart_feed_forward(self, drop(end, self.dropout, training=self.training), hidden_states)
    if y.dtype == torch.float16:
        largest = torch.finfo(y.dtype).max - 1000
        y = torch.clamp(y, min=-largest, max=largest)
    return y


def _mbart_decoder_layer(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = True,
    **kwargs: Any,
) -> Tensor:
    residual, x = hidden_states, normed(self.self_attn_layer_norm, hidden_states, self.self_attn)
    end, _ = branch(self.self_attn, hidden_states=x, past_key_values=past_key_values, attention_mask=attention_mask,
                    **kwargs)  # fmt: skip
    end = drop(end, self.dropout, training=self.training)
    if encoder_hidden_states is not None:
        x, residual = add_norm(end, residual, self.encoder_attn_layer_norm, self.encoder_attn)
        end, _ = branch(self.encoder_attn, hidden_states=x, key_value_states=encoder_hidden_states,
                        attention_mask=encoder_attention_mask, past_key_values=past_key_values, **kwargs)  # fmt: skip
        end = drop(end, self.dropout, training=self.training)
    return _mbart_feed_forward(self, end, residual)


def _opt_parts(module: nn.Module) -> tuple[str, ...]:
    norms = ("self_attn_layer_norm",) * (not module.do_layer_norm_before)
    return ("fc1", "activation_fn", "fc2", *norms, "final_layer_norm")


def _llama_calls(module: nn.Module, at: At) -> str:
    norm = at("post_attention_layernorm")
    return "bias_dropout_add_ln" if norm is not None and norm.name == "layer_norm" else "bias_dropout_add_rms_norm"


RULES = (
    Rule(
        name="gpt2_block",
        calls="bias_dropout_add_ln, bias_dropout_add",
        parts=("ln_2", "ln_cross_attn"),
        needs=needs_norm("ln_2", "ln_cross_attn"),
        methods={"forward": _gpt2_block},
        fingerprints=("8fa3acc5f683",),
        names=("GPT2Block",),
    ),
    Rule(
        name="vit_layer",  # and DeiT, AST, ViT-MAE, ViT-MSN
        calls="bias_dropout_add_ln, bias_dropout_add",
        parts=("dropout", "layernorm_after"),
        needs=needs_norm("layernorm_after"),
        methods={"forward": _vit_layer},
        fingerprints=("853f2f356c9b",),
        names=("ViTLayer", "DeiTLayer"),
    ),
    Rule(
        name="opt_layer",
        calls="bias_dropout_add_ln, bias_dropout_add",
        parts=_opt_parts,
        needs=needs_norm("final_layer_norm", "self_attn_layer_norm"),
        methods={"forward": _opt_layer},
        fingerprints=("723b1a9a74f8",),
        names=("OPTDecoderLayer",),
    ),
    Rule(
        name="clip_layer",  # and SigLIP, OWL-ViT, CLIPSeg, Idefics; text and vision
        calls="bias_dropout_add_ln, bias_dropout_add",
        parts=("layer_norm2",),
        needs=needs_norm("layer_norm2"),
        methods={"forward": _clip_layer},
        fingerprints=("d590178acce0", "1e26cac1b74b"),
        names=("CLIPEncoderLayer", "SiglipEncoderLayer"),
    ),
    Rule(
        name="gpt_neo_block",
        calls="bias_dropout_add_ln, bias_dropout_add",
        parts=("ln_2",),
        needs=needs_norm("ln_2"),
        methods={"forward": _gpt_neo_block},
        fingerprints=("58f450abb13f",),
        names=("GPTNeoBlock",),
    ),
    Rule(
        name="mbart_encoder_layer",  # and Whisper, Pegasus, M2M100, Blenderbot
        calls="bias_act, bias_dropout_add_ln, bias_dropout_add",
        parts=("fc1", "activation_fn", "fc2", "final_layer_norm"),
        needs=needs_norm("final_layer_norm"),
        methods={"forward": _mbart_encoder_layer},
        fingerprints=("55a4ab7b3ec5",),
        names=("MBartEncoderLayer", "WhisperEncoderLayer", "PegasusEncoderLayer"),
    ),
    Rule(
        name="mbart_decoder_layer",
        calls="bias_act, bias_dropout_add_ln, bias_dropout_add",
        parts=("fc1", "activation_fn", "fc2", "encoder_attn_layer_norm", "final_layer_norm"),
        needs=needs_norm("encoder_attn_layer_norm", "final_layer_norm"),
        methods={"forward": _mbart_decoder_layer},
        fingerprints=("0a2c57b2092d", "70de13187e98"),
        names=("MBartDecoderLayer", "WhisperDecoderLayer", "PegasusDecoderLayer"),
    ),
    Rule(
        name="llama_layer",  # Mistral, Qwen, Gemma, DeepSeek, and about sixty more
        calls=_llama_calls,
        parts=("post_attention_layernorm",),
        needs=needs_norm("post_attention_layernorm"),
        methods={"forward": _llama_layer},
        fingerprints=("294cf1e5f35f",),
        names=("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer",
               "GemmaDecoderLayer"),
    ),
)  # fmt: skip
