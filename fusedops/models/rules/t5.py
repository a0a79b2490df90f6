"""T5's layers and blocks, pre-norm: one operator computes a layer's sum and the next layer's norm.

::

    norm | attention | dropout, add, norm | feed-forward | dropout, add
    `------- layer 0 ------------' `------------ layer 1 --------------'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..autocast import consumers
from ..hooks import can_call, has_hooks, original
from ..parts import (
    Branch,
    activate,
    activation_name,
    add,
    add_norm,
    branch,
    dropped,
    finished,
    gated,
    linear,
    normed,
    postponed_gate,
    without_last_bias,
)
from ..rule import At, Rule, has_method, named_cache
from ..tricks.casts import cast_together
from ..tricks.one_token import has_plain_weights, next_token
from ..tricks.packing import packed_to

__all__ = ["RULES"]

Method = Callable[..., Any]

# --- layers: a norm, a child, and the sum ---------------------------------------------------------


def _self_attention(
    self: Any,
    x: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Branch, tuple[Any, ...]]:
    return branch(
        self.SelfAttention,
        x,
        mask=attention_mask,
        position_bias=position_bias,
        **named_cache(past_key_values),
        **kwargs,
    )


def _cross_attention(
    self: Any,
    x: Tensor,
    key_value_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Branch, tuple[Any, ...]]:
    return branch(
        self.EncDecAttention,
        x,
        mask=attention_mask,
        key_value_states=key_value_states,
        position_bias=position_bias,
        **named_cache(past_key_values),
        **kwargs,
    )


def _feed_forward(self: Any, x: Tensor) -> tuple[Branch, tuple[Any, ...]]:
    return branch(self.DenseReluDense, x)


def _layer(child: str, call: Method) -> dict[str, Method]:
    """The methods of a layer around a child: its forward, and the steps between norm and sum."""

    def inner(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Branch, tuple[Any, ...]]:
        end, others = call(self, x, *args, **kwargs)
        return dropped(end, self.dropout), others

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = normed(self.layer_norm, hidden_states, self._modules[child])
        end, others = inner(self, x, *args, **kwargs)
        y = add(end, hidden_states)
        # An attention returns its position bias and its weights, too.
        if call is _feed_forward:
            return y
        return (y, *others)

    def consumer(self: Any) -> Any:
        return self._modules[child]

    return {"forward": forward, "_fusedops_inner": inner, "_fusedops_consumer": consumer}


# --- feed-forward parts ---------------------------------------------------------------------------


def _cast_and_multiplied(layer: Any, x: Tensor) -> Branch:
    """T5's last linear layer, whose weight may be in fp32 in a model of half precision."""
    weight = layer.weight
    # As in the original. An int8 weight is a quantized one.
    if isinstance(weight, Tensor) and weight.dtype not in (x.dtype, torch.int8):
        x = x.to(weight.dtype)
    return linear(layer, x)


def _t5_gated(self: Any, hidden_states: Tensor) -> tuple[Branch, tuple[Any, ...]]:
    gate, up, last = cast_together(self, hidden_states, self.wi_0, self.wi_1, self.wo)
    x = gated(postponed_gate(gate(hidden_states), self.act), up(hidden_states))
    return _cast_and_multiplied(last, self.dropout(x)), ()


def _t5_dense(self: Any, hidden_states: Tensor) -> tuple[Branch, tuple[Any, ...]]:
    dropout = self.dropout
    first, last = cast_together(self, hidden_states, self.wi, self.wo)
    if type(dropout) is nn.Dropout and not has_hooks(dropout):
        x = activate(linear(first, hidden_states), self.act, dropout.p, training=dropout.training)
    else:
        x = dropout(self.act(first(hidden_states)))
    return _cast_and_multiplied(last, x), ()


def _finishing(unfinished: Method) -> dict[str, Method]:
    """The methods of a module whose caller may compute the last steps.

    Args:
        unfinished: the forward without these steps.
    """

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        end, _ = unfinished(self, hidden_states)
        return finished(end)

    return {"forward": forward, "_fusedops_branch": unfinished}


def _needs_activation(name: str) -> Callable[[nn.Module, At], str]:
    def needs(module: nn.Module, at: At) -> str:
        if has_method(at(name), "_fusedops_activation"):
            return ""
        if activation_name(getattr(module, name, None)) is not None:
            return ""
        return "its activation is none of the operators'"

    return needs


# --- attention ------------------------------------------------------------------------------------

_QKV = ("q", "k", "v")


def _compute_bias(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The position bias, laid out once for this and all following layers.

    The original transposes it, with the heads innermost in memory; PyTorch's fused attention takes
    no such mask.
    """
    bias: Tensor = original(self, "compute_bias")(self, *args, **kwargs)
    return bias.contiguous()


def _attention(
    self: Any,
    hidden_states: Tensor,
    mask: Tensor | None = None,
    key_value_states: Tensor | None = None,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Branch, tuple[Any, ...]]:
    is_cross = key_value_states is not None
    # From Transformers 5.24 on the argument's name is ``cache``.
    if past_key_values is None:
        past_key_values = kwargs.pop("cache", None)
    # The fast path takes no other options.
    if not kwargs:
        token = next_token(self, hidden_states, mask, is_cross, position_bias, past_key_values)
        if token is not None:
            return token
    parts = packed_to("o", self, _QKV, hidden_states, key_value_states, past_key_values)
    return without_last_bias(
        self,
        "o",
        parts,
        hidden_states,
        mask,
        key_value_states,
        position_bias,
        past_key_values,
        **kwargs,
    )


def _attention_helps(module: Any) -> str:
    helps = []
    if "relative_attention_bias" in module._modules:
        helps.append("lays its position bias out once")
    if not has_hooks(module) and has_plain_weights(module):
        helps.append("has a fast path for one token")
    return ", and ".join(helps) or "nothing while it has hooks, or as its layers are"


# --- the block: its layers in a row ---------------------------------------------------------------


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
    first, last = self.layer[0], self.layer[-1]
    cross = self.layer[1] if self.is_decoder and encoder_hidden_states is not None else None
    layers = (first, last) if cross is None else (first, cross, last)
    # In fp16 the original clamps each layer's sum before the next norm.
    is_clamped = hidden_states.dtype == torch.float16
    if is_clamped or not all(can_call(layer, "_fusedops_inner") for layer in layers):
        return original(self, "forward")(  # type: ignore[no-any-return]
            self,
            hidden_states,
            attention_mask,
            position_bias,
            encoder_hidden_states,
            encoder_attention_mask,
            encoder_decoder_position_bias,
            **named_cache(past_key_values),
            **kwargs,
        )
    x = normed(first.layer_norm, hidden_states, first._fusedops_consumer())
    end, others = first._fusedops_inner(x, attention_mask, position_bias, past_key_values, **kwargs)
    residual, self_bias, cross_bias = hidden_states, others[0], None
    if cross is not None:
        x, residual = add_norm(end, residual, cross.layer_norm, cross._fusedops_consumer())
        end, others = cross._fusedops_inner(
            x,
            encoder_hidden_states,
            encoder_attention_mask,
            encoder_decoder_position_bias,
            past_key_values,
            **kwargs,
        )
        cross_bias = others[0]
    x, residual = add_norm(end, residual, last.layer_norm, last._fusedops_consumer())
    end, _ = last._fusedops_inner(x)
    return add(end, residual), self_bias, cross_bias


def _layer_rule(
    name: str, fingerprints: tuple[str, ...], suffix: str, child: str, call: Method
) -> Rule:
    return Rule(
        name=name,
        calls="bias_dropout_add",
        methods=_layer(child, call),
        fingerprints=fingerprints,
        names=("T5Layer" + suffix, "MT5Layer" + suffix),
    )


def _needs_layers(module: nn.Module, at: At) -> str:
    layers = module._modules.get("layer")
    names = [] if layers is None else list(layers._modules)
    paths = [f"layer.{name}" for name in names]
    is_fused = all(has_method(at(path), "_fusedops_inner") for path in paths)
    if paths and is_fused:
        return ""
    return "not all of its layers are fused"


RULES = (
    _layer_rule(
        "t5_self_attention",
        ("867f0a59cdd9", "a8ffcac48c58"),
        "SelfAttention",
        "SelfAttention",
        _self_attention,
    ),
    _layer_rule(
        "t5_cross_attention",
        ("3ace0c45d839", "8107d71a96dd"),
        "CrossAttention",
        "EncDecAttention",
        _cross_attention,
    ),
    _layer_rule("t5_feed_forward", ("493046debaeb",), "FF", "DenseReluDense", _feed_forward),
    Rule(
        name="t5_gated_dense",  # and those of MT5, UMT5, Pix2Struct
        calls="gated_act",
        parts=("act", "wo"),
        needs=_needs_activation("act"),
        methods={**_finishing(_t5_gated), **consumers("wi_0", "wi_1")},
        fingerprints=("1f778d977330",),
        names=("T5DenseGatedActDense", "MT5DenseGatedActDense", "UMT5DenseGatedActDense"),
    ),
    Rule(
        name="t5_dense",
        calls="bias_act with dropout",
        parts=("wi", "act", "dropout", "wo"),
        methods={**_finishing(_t5_dense), **consumers("wi")},
        fingerprints=("389a87093bdf",),
        names=("T5DenseActDense", "MT5DenseActDense", "UMT5DenseActDense"),
    ),
    Rule(
        name="t5_attention",  # and those of MT5, LongT5, UDOP, Switch Transformers, Pop2Piano
        helps=_attention_helps,
        methods={"compute_bias": _compute_bias, "_fusedops_branch": _attention, **consumers(*_QKV)},
        fingerprints=("12564b5b1c2f", "f4d1a173d280"),
        names=("T5Attention", "MT5Attention"),
    ),
    Rule(
        name="t5_block",
        calls="bias_dropout_add_rms_norm, bias_dropout_add",
        parts=("layer.0", "layer.1", "layer.1.layer_norm", "layer.2", "layer.2.layer_norm"),
        needs=_needs_layers,
        methods={"forward": _block},
        fingerprints=("b17f62b6035b", "0f1e24c3047e"),
        names=("T5Block", "MT5Block"),
    ),
)
