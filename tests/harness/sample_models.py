"""Tiny sample models for the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "ModelSpec"]

_VOCABULARY, _WIDTH, _HEADS, _LAYERS = 61, 32, 2, 2


@dataclass(frozen=True)
class ModelSpec:
    """One sample model.

    Attributes:
        name: the name in tests.
        build: returns the model, with random weights.
        inputs: returns keyword arguments for a call.
        transformers: whether the model needs Transformers installed.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    transformers: bool = True


def _tokens(**others: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], dict[str, Any]]:
    """Returns a function that returns the inputs of a language model.

    The inputs are two rows of tokens, the second padded at its end, their mask, and ``others``,
    which are functions of the tokens.
    """

    def inputs() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(3, _VOCABULARY, (2, 9), generator=generator)
        mask = torch.ones_like(tokens)
        mask[1, -3:] = 0
        return {
            "input_ids": tokens,
            "attention_mask": mask,
            **{name: function(tokens) for name, function in others.items()},
        }

    return inputs


def _noise(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _encoded(tokens: torch.Tensor) -> torch.Tensor:
    """Random hidden states of an encoder, for a model that is only a decoder."""
    return _noise(*tokens.shape, _WIDTH)


def _hf(
    name: str,
    model: str,
    config: str,
    options: dict[str, Any],
    inputs: Callable[[], dict[str, Any]] | None = None,
) -> ModelSpec:
    """A model of Transformers, built from a config.

    Args:
        name: the name in tests.
        model: the class of the model.
        config: the class of the config.
        options: arguments of the config.
        inputs: see `ModelSpec`; by default tokens and their mask.
    """

    def build() -> nn.Module:
        import transformers

        model_class, config_class = getattr(transformers, model), getattr(transformers, config)
        return randomised(model_class(config_class(**options)))

    return ModelSpec(
        name,
        build=build,
        inputs=inputs or _tokens(),
    )


def randomised(model: nn.Module) -> nn.Module:
    """Adds noise to all parameters: errors in a weight of one or a bias of zero would not show."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


_BERT_LIKE: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "intermediate_size": 2 * _WIDTH,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
}
_BART_LIKE: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "d_model": _WIDTH,
    "encoder_layers": _LAYERS,
    "decoder_layers": _LAYERS,
    "encoder_attention_heads": _HEADS,
    "decoder_attention_heads": _HEADS,
    "encoder_ffn_dim": 2 * _WIDTH,
    "decoder_ffn_dim": 2 * _WIDTH,
    "max_position_embeddings": 32,
    "activation_dropout": 0.1,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": _WIDTH,
    "intermediate_size": 2 * _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_GPT2: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "n_embd": _WIDTH,
    "n_layer": _LAYERS,
    "n_head": _HEADS,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_T5: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "d_model": _WIDTH,
    "d_kv": 8,
    "d_ff": 2 * _WIDTH,
    "num_layers": _LAYERS,
    "num_heads": _HEADS,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_OPT: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": _WIDTH,
    "num_hidden_layers": _LAYERS,
    "ffn_dim": 2 * _WIDTH,
    "num_attention_heads": _HEADS,
    "max_position_embeddings": 32,
    "word_embed_proj_dim": _WIDTH,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


# --- models of torch.nn ---------------------------------------------------------------------------


class _Leaves(nn.Module):
    """One of each norm and activation of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 24),
            nn.LayerNorm(24),
            nn.GELU(),
            nn.LayerNorm(24, elementwise_affine=False),
            nn.RMSNorm(24, eps=1e-5),
            nn.GELU("tanh"),
            nn.LayerNorm((24,), bias=False),
            nn.Unflatten(-1, (4, 6)),
            nn.LayerNorm((4, 6)),
            nn.RMSNorm((4, 6)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


class _Transformer(nn.Module):
    """An encoder and a decoder of torch.nn."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.transformer = nn.Transformer(_WIDTH, _HEADS, _LAYERS, _LAYERS, 2 * _WIDTH, **options)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        y: torch.Tensor = self.transformer(src, tgt, tgt_mask=mask, tgt_is_causal=True)
        return y


def _sequences() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    return {
        "src": torch.randn(2, 7, _WIDTH, generator=generator),
        "tgt": torch.randn(2, 5, _WIDTH, generator=generator),
    }


def _torch(name: str, options: dict[str, Any]) -> ModelSpec:
    return ModelSpec(
        name,
        build=lambda: randomised(_Transformer(batch_first=True, **options)),
        inputs=_sequences,
        transformers=False,
    )


class _Activations(nn.Module):
    """All activations of Transformers that have a rule."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        names = (
            "gelu",
            "gelu_python",
            "gelu_new",
            "gelu_fast",
            "gelu_accurate",
            "gelu_pytorch_tanh",
            "gelu_python_tanh",
            "quick_gelu",
            "relu2",
        )
        self.layers = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(12, 12), ACT2FN[name]) for name in names}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self.layers.values()])


def _same(tokens: torch.Tensor) -> torch.Tensor:
    return tokens


_VIT: dict[str, Any] = {
    "hidden_size": _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "intermediate_size": 2 * _WIDTH,
    "image_size": 16,
    "patch_size": 8,
    "hidden_dropout_prob": 0.1,
}
_DISTILBERT: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "dim": _WIDTH,
    "n_layers": _LAYERS,
    "n_heads": _HEADS,
    "hidden_dim": 2 * _WIDTH,
    "max_position_embeddings": 32,
}
_DECODER = {"is_decoder": True, "add_cross_attention": True}
_GPT_NEO: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": _WIDTH,
    "num_layers": _LAYERS,
    "num_heads": _HEADS,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 4,
    "max_position_embeddings": 32,
    "embed_dropout": 0.1,
    "resid_dropout": 0.1,
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_GPTJ: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "n_embd": _WIDTH,
    "n_layer": _LAYERS,
    "n_head": _HEADS,
    "n_positions": 32,
    "rotary_dim": 8,
    "resid_pdrop": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_TOWER: dict[str, Any] = {
    "hidden_size": _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "intermediate_size": 2 * _WIDTH,
    "attention_dropout": 0.1,
}
_TEXT = {
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    **_TOWER,
}
_TOWERS: dict[str, Any] = {
    "text_config": _TEXT,
    "vision_config": {"image_size": 16, "patch_size": 8, **_TOWER},
}
_WHISPER: dict[str, Any] = {
    **_BART_LIKE,
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "max_target_positions": 32,
    "dropout": 0.1,
}


def _images(tokens: torch.Tensor) -> torch.Tensor:
    return _noise(len(tokens), 3, 16, 16)


def _speech() -> dict[str, Any]:
    return {"input_features": _noise(2, 8, 24), "decoder_input_ids": _tokens()()["input_ids"]}


MODELS = (
    ModelSpec(
        "leaves",
        build=lambda: randomised(_Leaves()),
        inputs=lambda: {"x": _noise(5, 12)},
        transformers=False,
    ),
    ModelSpec(
        "vocabulary",
        build=lambda: randomised(nn.Sequential(nn.Linear(12, 4099))),
        inputs=lambda: {"input": _noise(5, 12)},
        transformers=False,
    ),
    _torch(
        "torch_post_norm",
        options={},
    ),
    _torch(
        "torch_pre_norm",
        options={"norm_first": True, "activation": "gelu"},
    ),
    _torch(
        "torch_unbiased",
        options={"bias": False},
    ),
    ModelSpec(
        "activations",
        build=lambda: randomised(_Activations()),
        inputs=lambda: {"x": _noise(5, 12)},
    ),
    _hf(
        "bert",
        "BertForMaskedLM",
        "BertConfig",
        options=_BERT_LIKE,
    ),
    _hf(
        "bert_decoder",
        "BertLMHeadModel",
        "BertConfig",
        options={**_BERT_LIKE, **_DECODER},
        inputs=_tokens(encoder_hidden_states=_encoded),
    ),
    _hf(
        "roberta",
        "RobertaForMaskedLM",
        "RobertaConfig",
        options=_BERT_LIKE,
    ),
    _hf(
        "electra",
        "ElectraForPreTraining",
        "ElectraConfig",
        options={"embedding_size": 16, **_BERT_LIKE},
    ),
    _hf(
        "distilbert",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        options=_DISTILBERT,
    ),
    _hf(
        "bart",
        "BartForConditionalGeneration",
        "BartConfig",
        options=_BART_LIKE,
    ),
    _hf(
        "marian",
        "MarianMTModel",
        "MarianConfig",
        options=_BART_LIKE,
        inputs=_tokens(decoder_input_ids=_same),
    ),
    _hf(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        options=_GPT2,
    ),
    _hf(
        "gpt2_decoder",
        "GPT2LMHeadModel",
        "GPT2Config",
        options={"add_cross_attention": True, **_GPT2},
        inputs=_tokens(encoder_hidden_states=_encoded),
    ),
    _hf(
        "opt",
        "OPTForCausalLM",
        "OPTConfig",
        options=_OPT,
    ),
    _hf(
        "opt_post_norm",
        "OPTForCausalLM",
        "OPTConfig",
        options={"do_layer_norm_before": False, **_OPT},
    ),
    _hf(
        "vit",
        "ViTForImageClassification",
        "ViTConfig",
        options=_VIT,
        inputs=lambda: {"pixel_values": _noise(2, 3, 16, 16)},
    ),
    _hf(
        "mbart",
        "MBartForConditionalGeneration",
        "MBartConfig",
        options=_BART_LIKE,
    ),
    _hf(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        options=_WHISPER,
        inputs=_speech,
    ),
    _hf(
        "clip",
        "CLIPModel",
        "CLIPConfig",
        options=_TOWERS,
        inputs=_tokens(pixel_values=_images),
    ),
    _hf(
        "siglip",
        "SiglipModel",
        "SiglipConfig",
        options=_TOWERS,
        inputs=_tokens(pixel_values=_images),
    ),
    _hf(
        "gpt_neo",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        options=_GPT_NEO,
    ),
    _hf(
        "gptj",
        "GPTJForCausalLM",
        "GPTJConfig",
        options=_GPTJ,
    ),
    _hf(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        options=_T5,
        inputs=_tokens(decoder_input_ids=_same),
    ),
    _hf(
        "t5_gated",
        "T5ForConditionalGeneration",
        "T5Config",
        options={"feed_forward_proj": "gated-gelu", **_T5},
        inputs=_tokens(decoder_input_ids=_same),
    ),
    _hf(
        "llama",
        "LlamaForCausalLM",
        "LlamaConfig",
        options=_LLAMA_LIKE,
    ),
    _hf(
        "llama_biased",
        "LlamaForCausalLM",
        "LlamaConfig",
        options={"mlp_bias": True, "attention_bias": True, **_LLAMA_LIKE},
    ),
    _hf(
        "mistral",
        "MistralForCausalLM",
        "MistralConfig",
        options=_LLAMA_LIKE,
    ),
    _hf(
        "qwen2",
        "Qwen2ForCausalLM",
        "Qwen2Config",
        options=_LLAMA_LIKE,
    ),
    _hf(
        "qwen3",
        "Qwen3ForCausalLM",
        "Qwen3Config",
        options={"head_dim": 16, **_LLAMA_LIKE},
    ),
    _hf(
        "phi3",
        "Phi3ForCausalLM",
        "Phi3Config",
        options=_LLAMA_LIKE,
    ),
    _hf(
        "olmo2",
        "Olmo2ForCausalLM",
        "Olmo2Config",
        options=_LLAMA_LIKE,
    ),
    _hf(
        "gemma",
        "GemmaForCausalLM",
        "GemmaConfig",
        options={"head_dim": 16, **_LLAMA_LIKE},
    ),
)
