"""BERT and related models, whose sums and norms are in modules of their own.

A layer joins the last steps of a branch with the sum and the norm after it, across modules::

    attention.self | attention.output            | intermediate | output
    q, k, v        | dense, dropout, add, norm   | dense, act   | dense, dropout, add, norm
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import compiling
from ..autocast import consumers, narrowed, under_autocast
from ..hooks import can_call, has_hooks, is_linear, is_plain, original
from ..parts import Branch, activate, add_norm, add_norm_cast, dropped, linear, replacing
from ..rule import At, Rule, has_method, named_cache, needs_norm
from ..tricks import allowed
from ..tricks.casts import cast_together
from ..tricks.masks import laid_out
from ..tricks.packing import packed

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
    """The input of an attention's output module, and that module's linear layer.

    The layer is a replacement if it was cast together with those of the attention.
    """
    inner = self.self
    kwargs["attention_mask"] = encoder_attention_mask if self.is_cross_attention else attention_mask
    kwargs["encoder_hidden_states"] = encoder_hidden_states
    kwargs |= named_cache(past_key_values)
    if not compiling.makes_kernels(hidden_states) or not can_call(inner, "_fusedops_with_last"):
        return inner(hidden_states, **kwargs)[0], dense
    outputs, dense = inner._fusedops_with_last(dense, hidden_states, **kwargs)
    return outputs[0], dense


def _attended(
    attention: Any, modules: tuple[nn.Module, ...], hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """An attention's output after its norm, twice: see `parts.add_norm_cast`.

    The first is for ``modules`` only, under autocast in its dtype; the second is for the residual.
    Without fused methods both are the same tensor.
    """
    if can_call(attention, "_fusedops_attend"):
        output = attention.output
        if can_call(output, "_fusedops_end"):
            attended, dense = attention._fusedops_attend(
                output.dense, hidden_states, *args, **kwargs
            )
            end = output._fusedops_end(dense, attended)
            return add_norm_cast(end, hidden_states, output.LayerNorm, *modules)
    y = attention(hidden_states, *args, **kwargs)[0]
    return y, y


def _dense_act(self: Any, hidden_states: Tensor) -> Tensor:
    return _activated(self, self.dense, hidden_states)


def _activated(self: Any, dense: Any, x: Tensor) -> Tensor:
    return activate(linear(dense, x), self.intermediate_act_fn)


def _bert_feed_forward(intermediate: Any, output: Any, x: Tensor, residual: Tensor) -> Tensor:
    is_fused = compiling.makes_kernels(x) and can_call(intermediate, "_fusedops_activated")
    if not is_fused or not can_call(output, "_fusedops_end"):
        return output(intermediate(x), residual)  # type: ignore[no-any-return]
    first, second = cast_together(intermediate, x, intermediate.dense, output.dense)
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
    is_chunked = self.chunk_size_feed_forward or "feed_forward_chunk" in vars(self)
    # The original raises an error if it has no cross-attention.
    if is_chunked or (crosses and not self.add_cross_attention):
        return original(self, "forward")(  # type: ignore[no-any-return]
            self,
            hidden_states,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            **named_cache(past_key_values),
            **kwargs,
        )
    # A hook on `output` gets the residual, and may read its gradient. That is the gradient of the
    # norm's only output, which `intermediate` reads too. With a copy for `intermediate`, the
    # residual's gradient would lack the copy's.
    copy_readers = () if has_hooks(self.output) else (self.intermediate,)
    x, y = _attended(
        self.attention,
        () if crosses else copy_readers,
        hidden_states,
        attention_mask,
        **named_cache(past_key_values),
        **kwargs,
    )
    if crosses:
        x, y = _attended(
            self.crossattention,
            copy_readers,
            y,
            None,
            encoder_hidden_states,
            encoder_attention_mask,
            **named_cache(past_key_values),
            **kwargs,
        )
    return _bert_feed_forward(self.intermediate, self.output, x, y)


_BERT_QKV = ("query", "key", "value")


def _bert_self_attention(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _bert_with_last(self, None, hidden_states, *args, **kwargs)[0]


def _bert_with_last(
    self: Any,
    last: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """The attention's outputs, and ``last``, the linear layer that takes them.

    It is a replacement if it was cast together with the attention's own layers.
    """
    called = self
    if allowed(self, "masks"):
        attention_mask = laid_out(attention_mask)
    if under_autocast(hidden_states):
        # The caller still has the rows for the residual, in their own dtype.
        hidden_states = narrowed(hidden_states, self.query, self.key, self.value)
        parts, last = packed(self, _BERT_QKV, hidden_states, last=last)
        called = replacing(self, parts)
    outputs = original(self, "forward")(called, hidden_states, attention_mask, *args, **kwargs)
    return outputs, last


def _bert_helps(module: nn.Module) -> str:
    layers = list(map(module._modules.get, _BERT_QKV))
    if all(map(_is_plain_linear, layers)):
        return "casts its input once under autocast"
    return "nothing as its layers are"


def _is_plain_linear(layer: Any) -> bool:
    """Whether this is a linear layer without hooks, and its weight no tensor subclass."""
    if layer is None or not is_linear(layer):
        return False
    if has_hooks(layer):
        return False
    return is_plain(layer.weight)


def _distilbert_branch(self: Any, x: Tensor) -> tuple[Branch, None]:
    if self.chunk_size_feed_forward:
        return Branch(self(x)), None
    first, last = cast_together(self, x, self.lin1, self.lin2)
    return dropped(linear(last, activate(linear(first, x), self.activation)), self.dropout), None


def _distilbert_chunk(self: Any, input: Tensor) -> Tensor:
    return self.dropout(self.lin2(activate(linear(self.lin1, input), self.activation)))  # type: ignore[no-any-return]


def _bert_layer_needs(module: nn.Module, at: At) -> str:
    attends = has_method(at("attention"), "_fusedops_attend")
    if attends and has_method(at("attention.output"), "_fusedops_end"):
        return ""
    return "its attention does not leave its last sum and norm to it"


_CALLS = "bias_dropout_add_ln"

RULES = (
    Rule(
        name="bert_output",  # and that of about forty related models
        calls=_CALLS,
        parts=("dense", "dropout", "LayerNorm"),
        needs=needs_norm("LayerNorm"),
        methods={"forward": _bert_output, "_fusedops_end": _bert_end},
        fingerprints=("ab006922443d",),
        names=(
            "BertSelfOutput",
            "BertOutput",
            "RobertaSelfOutput",
            "RobertaOutput",
            "ElectraSelfOutput",
            "ElectraOutput",
        ),
    ),
    Rule(
        name="bert_attention",
        helps="leaves its last sum and norm to the layer",
        methods={"_fusedops_attend": _bert_attend},
        fingerprints=("f1adf76ab4fc", "e4417858409d"),
        names=("BertAttention", "RobertaAttention", "ElectraAttention"),
    ),
    Rule(
        name="bert_layer",
        calls=_CALLS,
        parts=("attention.output", "crossattention.output"),
        needs=_bert_layer_needs,
        methods={"forward": _bert_layer},
        fingerprints=("0b57e6dd92b0", "9c69a1d68095"),
        names=("BertLayer", "RobertaLayer", "ElectraLayer"),
        known=("forward", "feed_forward_chunk"),
    ),
    Rule(
        name="dense_act",  # BERT's, and that of many related models
        calls="bias_act",
        parts=("dense", "intermediate_act_fn"),
        methods={"forward": _dense_act, "_fusedops_activated": _activated, **consumers("dense")},
        fingerprints=("d6fb3cc61037",),
        names=("BertIntermediate", "RobertaIntermediate", "ElectraIntermediate"),
    ),
    Rule(
        name="bert_self_attention",  # and that of twelve related models
        helps=_bert_helps,
        methods={"forward": _bert_self_attention, "_fusedops_with_last": _bert_with_last},
        fingerprints=("5280870db47f", "2b915b004f49"),
        names=("BertSelfAttention", "RobertaSelfAttention", "ElectraSelfAttention"),
    ),
    Rule(
        name="distilbert_ffn",
        calls="bias_act",
        parts=("lin1", "activation", "lin2", "dropout"),
        methods={
            "ff_chunk": _distilbert_chunk,
            "_fusedops_branch": _distilbert_branch,
            **consumers("lin1"),
        },
        fingerprints=("6b0d1cb67a21",),
        names=("FFN",),
        known=("forward", "ff_chunk"),
    ),
)
