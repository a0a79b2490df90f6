"""torch.nn's transformer layers, in both norm orders.

::

    pre-norm   norm1 | attention -> dropout -> add, norm2 | linear1, act, linear2 -> dropout -> add
    post-norm  attention -> dropout -> add, norm1 | linear1, act, linear2 -> dropout -> add, norm2

An encoder layer in evaluation may take PyTorch's own fast path, one operator for the whole layer.
Where that is possible, the original forward is called, which checks the remaining conditions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..hooks import has_hooks, is_plain, original
from ..parts import (
    Branch,
    activate,
    add,
    add_norm,
    add_norm_cast,
    branch,
    dropped,
    linear,
    normed,
    without_last_bias,
)
from ..rule import Rule
from ..tricks.casts import cast_together

__all__ = ["RULES"]


def _attention(
    attention: nn.Module,
    dropout: nn.Module,
    x: Tensor,
    memory: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
) -> Branch:
    end, _ = branch(
        attention,
        x,
        memory,
        memory,
        attn_mask=mask,
        key_padding_mask=padding,
        is_causal=is_causal,
        need_weights=False,
    )
    return dropped(end, dropout)


def _multihead_consumers(self: Any) -> tuple[nn.Module, ...] | None:
    # The consumers are no linear layers: the module multiplies the rows by its own parameters, in
    # `F.multi_head_attention_forward`, where autocast casts the rows. So there is no layer to
    # check, only the parameters. PyTorch's fast path, which would not cast, is not taken under
    # autocast.
    weights = (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
    if not all(weight is None or is_plain(weight) for weight in weights):
        return None
    return ()


def _multihead_helps(module: Any) -> str:
    if has_hooks(module):
        return "leaves nothing to the block while it has hooks"
    last = module.out_proj
    if last.bias is not None and not has_hooks(last):
        return "leaves its last bias to the block"
    return "takes its rows in autocast's dtype"


def _multihead_branch(self: Any, *args: Any, **kwargs: Any) -> tuple[Branch, tuple[Any, ...]]:
    if self.training:
        return without_last_bias(self, "out_proj", {}, *args, **kwargs)
    # The module may take PyTorch's fast path, which needs the bias.
    result = self(*args, **kwargs)
    return Branch(result[0]), result[1:]


def _feed_forward(self: Any, x: Tensor, last_dropout: nn.Module) -> Branch:
    first, second = cast_together(self, x, self.linear1, self.linear2)
    inner, dropout = linear(first, x), self.dropout
    if type(dropout) is nn.Dropout and not has_hooks(dropout):
        y = activate(inner, self.activation, dropout.p, training=dropout.training)
    else:
        y = dropout(activate(inner, self.activation))
    return dropped(linear(second, y), last_dropout)


def _may_take_the_fast_path(self: Any, src: Tensor) -> bool:
    if self.training:
        return False
    if src.is_nested:
        return True
    if not torch.is_grad_enabled():
        return True
    return not _differentiates(self, src)


def _differentiates(self: Any, src: Tensor) -> bool:
    if src.requires_grad:
        return True
    return any(parameter.requires_grad for parameter in self.parameters())


def _encoder_layer(
    self: Any,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Any:
    # Decided before anything is computed: the operator of the fast path takes the whole layer.
    if _may_take_the_fast_path(self, src):
        return original(self, "forward")(self, src, src_mask, src_key_padding_mask, is_causal)
    norm_first = self.norm_first
    x = normed(self.norm1, src, self.self_attn) if norm_first else src
    end = _attention(self.self_attn, self.dropout1, x, x, src_mask, src_key_padding_mask, is_causal)
    if norm_first:
        x, residual = add_norm(end, src, self.norm2, self.linear1)
        return add(_feed_forward(self, x, self.dropout2), residual)
    x, y = add_norm_cast(end, src, self.norm1, self.linear1)
    return add_norm(_feed_forward(self, x, self.dropout2), y, self.norm2, return_sum=False)


def _decoder_layer(
    self: Any,
    tgt: Tensor,
    memory: Tensor,
    tgt_mask: Tensor | None = None,
    memory_mask: Tensor | None = None,
    tgt_key_padding_mask: Tensor | None = None,
    memory_key_padding_mask: Tensor | None = None,
    tgt_is_causal: bool = False,
    memory_is_causal: bool = False,
) -> Any:
    norm_first = self.norm_first
    x = normed(self.norm1, tgt, self.self_attn) if norm_first else tgt
    end = _attention(
        self.self_attn, self.dropout1, x, x, tgt_mask, tgt_key_padding_mask, tgt_is_causal
    )
    if norm_first:
        x, residual = add_norm(end, tgt, self.norm2, self.multihead_attn)
    else:
        x, residual = add_norm_cast(end, tgt, self.norm1, self.multihead_attn)
    end = _attention(
        self.multihead_attn,
        self.dropout2,
        x,
        memory,
        memory_mask,
        memory_key_padding_mask,
        memory_is_causal,
    )
    if norm_first:
        x, residual = add_norm(end, residual, self.norm3, self.linear1)
        return add(_feed_forward(self, x, self.dropout3), residual)
    x, y = add_norm_cast(end, residual, self.norm2, self.linear1)
    return add_norm(_feed_forward(self, x, self.dropout3), y, self.norm3, return_sum=False)


def _layer_parts(module: nn.Module) -> tuple[str, ...]:
    norms = ("norm2", "norm3") if module.norm_first else ("norm1", "norm2", "norm3")
    feed_forward = ("linear1", "activation", "dropout", "linear2")
    return (*feed_forward, "dropout1", "dropout2", "dropout3", *norms)


RULES = (
    Rule(
        name="multihead_attention",
        helps=_multihead_helps,
        methods={
            "_fusedops_branch": _multihead_branch,
            "_fusedops_consumers": _multihead_consumers,
        },
        base=nn.MultiheadAttention,
    ),
    Rule(
        name="encoder_layer",
        calls="bias_act, bias_dropout_add_ln",
        parts=_layer_parts,
        methods={"forward": _encoder_layer},
        base=nn.TransformerEncoderLayer,
        known=("forward", "_sa_block", "_ff_block"),
    ),
    Rule(
        name="decoder_layer",
        calls="bias_act, bias_dropout_add_ln",
        parts=_layer_parts,
        methods={"forward": _decoder_layer},
        base=nn.TransformerDecoderLayer,
        known=("forward", "_sa_block", "_mha_block", "_ff_block"),
    ),
)
