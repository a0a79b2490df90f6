"""Feed-forward parts: gated MLPs, and linear layers with an activation between or behind them.

The linear layers of a gated MLP are called as they are; what lies between them is one operator. Where a linear layer
has a bias, the operator of the activation behind it adds the bias, whose gradient then costs no pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...activations.ops import glu
from ..autocast import consumers
from ..casts import cast_together
from ..hooks import has_hooks
from ..parts import Branch, activate, activation_name, dropped, finished, linear
from ..rule import At, Rule, has_method

__all__ = ["RULES"]

Method = Callable[..., Any]


def _gated_unit(x: Tensor, gate_layer: Any, activation: Any, up_layer: Any) -> Tensor:
    """``activation(gate_layer(x)) * up_layer(x)``; modules that are called are called in this order."""
    name = activation_name(activation)
    gate: Tensor = gate_layer(x)
    if name is None:
        return activation(gate) * up_layer(x)  # type: ignore[no-any-return]
    up: Tensor = up_layer(x)
    return glu(gate, up, name) if gate.shape == up.shape else activation(gate) * up


def _gated(self: Any, x: Tensor) -> Any:
    return self.down_proj(_gated_unit(x, self.gate_proj, self.act_fn, self.up_proj))


def _packed(self: Any, hidden_states: Tensor) -> Any:
    both: Tensor = self.gate_up_proj(hidden_states)
    name = activation_name(self.activation_fn)
    if name is None or both.shape[-1] % 2:
        gate, up = both.chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))
    # Packed, they have one gradient, and backward does not join two halves.
    return self.down_proj(glu(both, None, name))


def _cast_and_multiplied(layer: Any, x: Tensor) -> Branch:
    """T5's last linear layer, which may be kept in fp32 in a model of half precision."""
    weight = layer.weight
    if isinstance(weight, Tensor) and x.dtype != weight.dtype and weight.dtype != torch.int8:
        x = x.to(weight.dtype)
    return linear(layer, x)


def _t5_gated(self: Any, hidden_states: Tensor) -> tuple[Branch, tuple[Any, ...]]:
    gate, up, last = cast_together(hidden_states, self.wi_0, self.wi_1, self.wo)
    x = _gated_unit(hidden_states, gate, self.act, up)
    return _cast_and_multiplied(last, self.dropout(x)), ()


def _t5_dense(self: Any, hidden_states: Tensor) -> tuple[Branch, tuple[Any, ...]]:
    dropout = self.dropout
    first, last = cast_together(hidden_states, self.wi, self.wo)
    if type(dropout) is nn.Dropout and not has_hooks(dropout):
        x = activate(linear(first, hidden_states), self.act, dropout.p, training=dropout.training)
    else:
        x = dropout(self.act(first(hidden_states)))
    return _cast_and_multiplied(last, x), ()


def _finishing(branch: Method) -> dict[str, Method]:
    """The methods of a module that leaves the end of its branch to the caller."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return finished(branch(self, hidden_states)[0])

    return {"forward": forward, "_fusedops_branch": branch}


def _dense_act(self: Any, hidden_states: Tensor) -> Tensor:
    return _activated(self, self.dense, hidden_states)


def _activated(self: Any, dense: Any, x: Tensor) -> Tensor:
    return activate(linear(dense, x), self.intermediate_act_fn)


def _two_layers(first: str, activation: str, second: str, dropout: str = "") -> dict[str, Method]:
    """The methods of linear, activation, linear, and the dropout behind them if there is one."""

    def branch(self: Any, x: Tensor) -> tuple[Branch, tuple[Any, ...]]:
        inner, last = cast_together(x, getattr(self, first), getattr(self, second))
        end = linear(last, activate(linear(inner, x), getattr(self, activation)))
        return (dropped(end, getattr(self, dropout)) if dropout else end), ()

    return {**_finishing(branch), **consumers(first)}


_distilbert = _two_layers("lin1", "activation", "lin2", "dropout")


def _distilbert_branch(self: Any, x: Tensor) -> tuple[Branch, tuple[Any, ...]]:
    if self.chunk_size_feed_forward:
        return Branch(self(x)), ()
    return _distilbert["_fusedops_branch"](self, x)  # type: ignore[no-any-return]


def _distilbert_chunk(self: Any, input: Tensor) -> Tensor:
    return _distilbert["forward"](self, input)  # type: ignore[no-any-return]


def _needs_activation(name: str) -> Callable[[nn.Module, At], str]:
    def needs(module: nn.Module, at: At) -> str:
        activation = getattr(module, name, None)
        known = has_method(at(name), "_fusedops_activation") or activation_name(activation) is not None
        return "" if known else "its activation is none of the operators'"

    return needs


RULES = (
    Rule(
        name="gated_mlp",  # Llama, Mistral, Qwen, Gemma, and about a hundred more
        calls="glu",
        parts=("act_fn",),
        needs=_needs_activation("act_fn"),
        methods={"forward": _gated, **consumers("gate_proj", "up_proj")},
        fingerprints=("87c336a18dbf",),
        names=("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "GemmaMLP", "Gemma2MLP", "Gemma3MLP", "Olmo2MLP"),
    ),
    Rule(
        name="packed_mlp",  # and GLM, Dia
        calls="glu",
        parts=("activation_fn",),
        needs=_needs_activation("activation_fn"),
        methods={"forward": _packed, **consumers("gate_up_proj")},
        fingerprints=("66129a0fb47c",),
        names=("Phi3MLP",),
    ),
    Rule(
        name="t5_gated_dense",  # and MT5, UMT5, Pix2Struct
        calls="glu",
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
        name="dense_act",  # BERT's, and that of its many relatives
        calls="bias_act",
        parts=("dense", "intermediate_act_fn"),
        methods={"forward": _dense_act, "_fusedops_activated": _activated, **consumers("dense")},
        fingerprints=("d6fb3cc61037",),
        names=("BertIntermediate", "RobertaIntermediate", "ElectraIntermediate"),
    ),
    Rule(
        name="gpt2_mlp",  # and GPT-Neo, GPTBigCode
        calls="bias_act, bias_dropout_add",
        parts=("c_fc", "act", "c_proj", "dropout"),
        methods=_two_layers("c_fc", "act", "c_proj", "dropout"),
        fingerprints=("ff86ff105b48",),
        names=("GPT2MLP", "GPTNeoMLP"),
    ),
    Rule(
        name="gptj_mlp",  # and CodeGen
        calls="bias_act, bias_dropout_add",
        parts=("fc_in", "act", "fc_out", "dropout"),
        methods=_two_layers("fc_in", "act", "fc_out", "dropout"),
        fingerprints=("e6f02c05c436",),
        names=("GPTJMLP", "CodeGenMLP"),
    ),
    Rule(
        name="vit_mlp",  # and CLIP, SigLIP, BEiT, BLIP
        calls="bias_act",
        parts=("fc1", "activation_fn", "fc2"),
        methods=_two_layers("fc1", "activation_fn", "fc2"),
        fingerprints=("c173c28fb10e",),
        names=("ViTMLP", "CLIPMLP", "SiglipMLP"),
    ),
    Rule(
        name="distilbert_ffn",
        calls="bias_act, bias_dropout_add",
        parts=("lin1", "activation", "lin2", "dropout"),
        methods={"ff_chunk": _distilbert_chunk, "_fusedops_branch": _distilbert_branch, **consumers("lin1")},
        fingerprints=("6b0d1cb67a21",),
        names=("FFN",),
        known=("forward", "ff_chunk"),
    ),
)
