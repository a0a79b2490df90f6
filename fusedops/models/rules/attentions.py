"""Attention modules whose forward ends in a linear layer: they can leave its bias, and a dropout, to their block.

Their own forward stays as it is, and is what runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import compiling
from ..autocast import consumers, narrowed, under_autocast
from ..hooks import has_hooks, is_linear, is_plain, original
from ..packing import packed, packed_to
from ..parts import Branch, branch, laid_out, replacing, without
from ..rule import Rule

__all__ = ["RULES"]


def _attention(*inputs: str, output: str, dropout: str | None = None, packs: tuple[str, ...] = (),
               scales: bool = False) -> dict[str, Any]:  # fmt: skip
    """The options of a rule for modules whose rows go to ``inputs`` only and whose forward ends in ``output`` and ``dropout``.

    ``packs`` are query, key and value, where the last two go into the attention as they are, and so does the query if it
    is not scaled first. What is only on the way to something else (a scaled query, rotary positions) packing would keep
    alive with the others.
    """

    def branch(self: Any, *args: Any, **kwargs: Any) -> tuple[Branch, tuple[Any, ...]]:
        rows = args[0] if args else kwargs["hidden_states"]
        if compiling.makes_kernels(rows):  # the mask may come by any name or position
            args, kwargs = tuple(map(laid_out, args)), {name: laid_out(value) for name, value in kwargs.items()}
        others = kwargs.get("key_value_states")
        if others is None and scales:
            others = rows  # for key and value alone
        parts = packed_to(output, self, packs, rows, others, kwargs.get("past_key_values"))
        return without(self, output, dropout, parts, *args, **kwargs)

    def helps(module: nn.Module) -> str:
        return _describe(module, _left(module, output, dropout), _all_multiply(module, inputs))

    return {"methods": {"_fusedops_branch": branch, **consumers(*inputs)}, "helps": helps}


def _left(module: nn.Module, output: str, dropout: str | None) -> list[str]:
    """What `without` then leaves to the block."""
    layer, last = module._modules.get(output), None if dropout is None else module._modules.get(dropout)
    if last is not None and (type(last) is not nn.Dropout or has_hooks(last)):
        return []
    biased = layer is not None and is_linear(layer) and not has_hooks(layer) and layer.bias is not None
    return ["its last bias"] * biased + ["its dropout"] * (last is not None)


def _multiplies(layer: nn.Module) -> bool:
    return is_linear(layer) and not has_hooks(layer) and is_plain(layer.weight)


def _all_multiply(module: nn.Module, names: tuple[str, ...]) -> bool:
    layers = [layer for name in names if (layer := module._modules.get(name)) is not None]
    return bool(layers) and all(map(_multiplies, layers))


def _describe(module: nn.Module, left: list[str], narrow: bool) -> str:
    """For the report: what the module leaves to the block. ``narrow``: whether its rows may come in another dtype."""
    if has_hooks(module):
        return "leaves nothing to the block while it has hooks"
    if left:
        return f"leaves {' and '.join(left)} to the block"
    return "takes its rows in autocast's dtype" if narrow else "leaves nothing to the block as its layers are"


def _multihead_consumers(self: Any) -> tuple[nn.Module, ...] | None:
    # Its weights are its own. PyTorch's fast path, which would not cast, is not taken under autocast.
    weights = (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
    return () if all(weight is None or is_plain(weight) for weight in weights) else None


def _multihead_helps(module: nn.Module) -> str:
    return _describe(module, _left(module, "out_proj", None), _multihead_consumers(module) is not None)


def _multihead_branch(self: Any, *args: Any, **kwargs: Any) -> tuple[Branch, tuple[Any, ...]]:
    if self.training:
        return without(self, "out_proj", None, {}, *args, **kwargs)
    result = self(*args, **kwargs)  # it may take PyTorch's fast path, which needs the bias
    return Branch(result[0]), result[1:]


_BERT_QKV = ("query", "key", "value")


def _bert_self_attention(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _bert_with_last(self, None, hidden_states, *args, **kwargs)[0]


def _bert_with_last(self: Any, last: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any,
                    **kwargs: Any) -> tuple[Any, Any]:  # fmt: skip
    """The attention's outputs, and the linear layer that is next to take them, cast with its own if these are."""
    view, attention_mask = self, laid_out(attention_mask)
    if under_autocast(hidden_states):
        # The caller keeps the rows for the residual, in their own dtype.
        hidden_states = narrowed(hidden_states, self.query, self.key, self.value)
        parts, last = packed(self, _BERT_QKV, hidden_states, last=last)
        view = replacing(self, parts)
    return original(self, "forward")(view, hidden_states, attention_mask, *args, **kwargs), last


def _bert_helps(module: nn.Module) -> str:
    return "casts its input once under autocast" if _all_multiply(module, _BERT_QKV) else "nothing as its layers are"


def _gpt_neo_helps(module: nn.Module) -> str:
    inner = module._modules.get("attention")
    return _describe(module, [], False) if inner is None or has_hooks(module) else _NEO_SELF["helps"](inner)


def _gpt_neo_branch(self: Any, hidden_states: Tensor, layer_past: Any = None, attention_mask: Tensor | None = None,
                    use_cache: bool = False, output_attentions: bool = False,
                    **kwargs: Any) -> tuple[Branch, tuple[Any, ...]]:  # fmt: skip
    return branch(self.attention, hidden_states, attention_mask=attention_mask, layer_past=layer_past,
                  use_cache=use_cache, output_attentions=output_attentions)  # fmt: skip


_QKV = ("q_proj", "k_proj", "v_proj")
_LINS = ("q_lin", "k_lin", "v_lin")
_NEO_SELF = _attention(*_QKV, output="out_proj", dropout="resid_dropout")

RULES = (
    Rule(
        name="multihead_attention",
        helps=_multihead_helps,
        methods={"_fusedops_branch": _multihead_branch, "_fusedops_consumers": _multihead_consumers},
        base=nn.MultiheadAttention,
    ),
    Rule(
        name="gpt2_attention",
        **_attention("c_attn", "q_attn", output="c_proj", dropout="resid_dropout"),
        fingerprints=("4baf42142fd2",),
        names=("GPT2Attention",),
    ),
    Rule(
        name="bart_attention",  # and MBart, Marian, Pegasus; CLIP, SigLIP
        **_attention(*_QKV, output="out_proj", packs=_QKV),
        fingerprints=("f434310b8181", "280db448c0ae", "06f537010e90"),
        names=("BartAttention", "MBartAttention", "MarianAttention", "CLIPAttention", "SiglipAttention"),
    ),
    Rule(
        name="opt_attention",  # and Whisper, which has nothing to pack: its key is without a bias
        **_attention(*_QKV, output="out_proj", packs=_QKV, scales=True),
        fingerprints=("3099567ec98b", "79e198db90db"),
        names=("OPTAttention", "WhisperAttention"),
    ),
    Rule(
        name="vit_attention",  # and DeiT, BEiT, DINOv2
        **_attention(*_QKV, output="o_proj", packs=_QKV),
        fingerprints=("9c1503232895",),
        names=("ViTAttention",),
    ),
    Rule(
        name="llama_attention",  # and Gemma, Mistral, Mixtral, Qwen 2 and 3, and about forty more
        **_attention(*_QKV, output="o_proj"),
        fingerprints=("2545ae739b8a", "3669e8161ac0", "0617b06c2aea", "0da1dc222f80"),
        names=("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "GemmaAttention"),
    ),
    Rule(
        name="gpt_neo_attention",
        helps=_gpt_neo_helps,
        methods={"_fusedops_branch": _gpt_neo_branch, **consumers("attention")},
        fingerprints=("ae0ddfa4b3f7",),
        names=("GPTNeoAttention",),
    ),
    Rule(
        name="gpt_neo_self_attention",
        **_NEO_SELF,
        fingerprints=("fa3301864d88",),
        names=("GPTNeoSelfAttention",),
    ),
    Rule(
        name="bert_self_attention",  # and that of twelve relatives
        helps=_bert_helps,
        methods={"forward": _bert_self_attention, "_fusedops_with_last": _bert_with_last},
        fingerprints=("5280870db47f",),
        names=("BertSelfAttention", "RobertaSelfAttention", "ElectraSelfAttention"),
    ),
    Rule(
        name="distilbert_attention",
        **_attention(*_LINS, output="out_lin", packs=_LINS),
        fingerprints=("7888d8c7ae34",),
        names=("DistilBertSelfAttention",),
    ),
)  # fmt: skip
