"""Decoders of Transformers, dense ones and mixtures of experts, and its Mamba 2.

Widths, heads and vocabularies are those of published models, which the comments name. Reduced are
the numbers of layers, to three to six, and of experts, to eight or sixteen. A model without
comment has its config's default sizes.
"""

from __future__ import annotations

from typing import Any

from ..models import batches as shared
from ..models.batches import Sizes
from ..models.text import TOKENS
from ..models.workloads import Model
from .options import GROUPS, TINY, WITH_BOS, tiny_text, with_layers

__all__ = ["MODELS"]

_TINY_SIZES = (2, 16)


def _decoder(
    family: str,
    options: dict[str, Any],
    *,
    config: str | None = None,
    tiny: dict[str, Any] | None = None,
    sizes: tuple[Sizes, ...] = ((2, 2048),),
    cost: float = 1.0,
) -> Model:
    """Returns a decoder.

    Args:
        family: what the names of its class and config begin with.
        options: the arguments of its config.
        config: the name of its config's class, if it is another.
        tiny: the options of the tiny model; by default those of `tiny_text` with grouped heads.
        sizes: see `registry.workloads`.
        cost: see `Model`.
    """
    return Model(
        cls=f"{family}ForCausalLM",
        config=config or f"{family}Config",
        options=WITH_BOS | options,
        tiny=tiny_text(**GROUPS) if tiny is None else tiny,
        batch=shared.next_token,
        sizes=sizes,
        tiny_sizes=_TINY_SIZES,
        cost=cost,
    )


def _sized(width: int, inner: int, layers: int, heads: int, groups: int | None) -> dict[str, Any]:
    options = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return options if groups is None else options | {"num_key_value_heads": groups}


_TINY_HEADS = tiny_text(**GROUPS, head_dim=16)
_UNGROUPED = tiny_text()

MODELS = {
    "gpt2": with_layers("gpt2", (8, 1024), (16, 1024), n_layer=6),
    # GPT-J 6B at half of its width.
    "gptj": Model(
        cls="GPTJForCausalLM",
        config="GPTJConfig",
        options=WITH_BOS | {"n_embd": 2048, "n_layer": 4, "n_head": 16, "rotary_dim": 64},
        tiny={"vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8},
        batch=shared.next_token,
        sizes=((4, 1024),),
        tiny_sizes=_TINY_SIZES,
    ),
    # Pythia 1.4B.
    "gpt_neox": _decoder(
        "GPTNeoX", _sized(2048, 8192, 4, 16, None) | {"vocab_size": 50_304}, tiny=_UNGROUPED
    ),
    # OPT 1.3B.
    "opt": _decoder(
        "OPT",
        {
            "hidden_size": 2048,
            "word_embed_proj_dim": 2048,
            "ffn_dim": 8192,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
        },
        tiny={
            "vocab_size": TOKENS,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
    ),
    # BLOOM 1.1B.
    "bloom": _decoder(
        "Bloom",
        {
            "hidden_size": 1536,
            "n_layer": 4,
            "n_head": 16,
            "hidden_dropout": 0.0,
            "vocab_size": 250_880,
        },
        tiny={"vocab_size": TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 2},
    ),
    # Falcon 7B at half of its width: attention and MLP in parallel, one head of keys.
    "falcon": _decoder(
        "Falcon",
        {
            "hidden_size": 2304,
            "num_attention_heads": 36,
            "num_hidden_layers": 4,
            "multi_query": True,
            "parallel_attn": True,
            "new_decoder_architecture": False,
            "bias": False,
        },
        tiny={
            "vocab_size": TOKENS,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
        },
    ),
    "llama_1b": with_layers("llama_1b", (2, 2048), num_hidden_layers=4),
    # Mistral 7B, with a window.
    "mistral": _decoder(
        "Mistral",
        _sized(4096, 14_336, 2, 32, 8)
        | {"vocab_size": 32_768, "head_dim": 128, "sliding_window": 1024},
        tiny=_TINY_HEADS | {"sliding_window": 8},
    ),
    # Qwen 2.5 1.5B: biases of query, key and value.
    "qwen2": _decoder(
        "Qwen2",
        _sized(1536, 8960, 4, 12, 2) | {"vocab_size": 151_936, "tie_word_embeddings": True},
    ),
    # Qwen 3 1.7B.
    "qwen3": _decoder(
        "Qwen3",
        _sized(2048, 6144, 4, 16, 8)
        | {"vocab_size": 151_936, "head_dim": 128, "tie_word_embeddings": True},
        tiny=_TINY_HEADS,
    ),
    "gemma2": with_layers("gemma2", (1, 2048), (2, 2048), num_hidden_layers=4),
    # Gemma 3 1B: five layers with a window to one without.
    "gemma3": _decoder(
        "Gemma3",
        config="Gemma3TextConfig",
        options=_sized(1152, 6912, 6, 4, 1)
        | {"vocab_size": 262_144, "head_dim": 256, "sliding_window": 512},
        tiny=_TINY_HEADS | {"sliding_window": 8},
        cost=1.5,
    ),
    # Phi-3 mini: packed query, key and value, and packed gate and up.
    "phi3": _decoder(
        "Phi3",
        _sized(3072, 8192, 4, 32, 32) | {"vocab_size": 32_064, "sliding_window": 2047},
        tiny=tiny_text(**GROUPS, sliding_window=8),
    ),
    # Phi-1.5: attention and MLP in parallel, a part of each head rotated.
    "phi": _decoder(
        "Phi", _sized(2048, 8192, 4, 32, 32) | {"vocab_size": 51_200}, tiny=tiny_text(**GROUPS)
    ),
    # OLMo 2 1B: norms after attention and MLP, and of whole queries and keys.
    "olmo2": _decoder("Olmo2", _sized(2048, 8192, 4, 16, 16) | {"vocab_size": 100_352}),
    # Command R 7B at half of its width: LayerNorm without bias, and a scale of logits.
    "cohere": _decoder(
        "Cohere",
        _sized(2048, 7168, 4, 32, 8) | {"vocab_size": 256_000, "logit_scale": 0.25},
        sizes=((1, 2048), (2, 2048)),
    ),
    # StableLM 2 1.6B.
    "stablelm": _decoder(
        "StableLm",
        _sized(2048, 5632, 4, 32, 32)
        | {"vocab_size": 100_352, "use_qkv_bias": True, "partial_rotary_factor": 0.25},
    ),
    # Persimmon 8B at half of its width: squared ReLU, and LayerNorms of queries and keys.
    "persimmon": _decoder(
        "Persimmon", _sized(2048, 8192, 4, 32, None) | {"vocab_size": 65_536}, tiny=_UNGROUPED
    ),
    # Granite 3 2B: multipliers of embeddings, attention, residuals and logits.
    "granite": _decoder(
        "Granite",
        _sized(2048, 8192, 4, 32, 8)
        | {
            "vocab_size": 49_155,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    # SmolLM3 3B: every fourth layer has no positions.
    "smollm3": _decoder("SmolLM3", _sized(2048, 11_008, 4, 16, 4) | {"vocab_size": 128_256}),
    # StarCoder2 3B: LayerNorms, biases and an MLP without gate.
    "starcoder2": _decoder(
        "Starcoder2",
        _sized(3072, 12_288, 4, 24, 2) | {"vocab_size": 49_152, "sliding_window": None},
    ),
    # Nemotron 8B at half of its width: LayerNorm with weights around one, squared ReLU.
    "nemotron": _decoder(
        "Nemotron",
        _sized(2048, 8192, 4, 16, 4) | {"vocab_size": 128_000, "head_dim": 128},
        tiny=_TINY_HEADS,
    ),
    # GLM-4 9B at half of its width: four norms in a layer, interleaved rotation.
    "glm4": _decoder(
        "Glm4",
        _sized(2048, 6848, 4, 16, 2) | {"vocab_size": 151_552, "head_dim": 128},
        tiny=_TINY_HEADS,
    ),
    "mixtral": with_layers("mixtral", (4, 2048), (8, 2048), num_hidden_layers=3),
    # GPT-OSS 20B at half of its width, with eight of its 32 experts: clamped gates, and attention
    # with sinks.
    "gpt_oss": _decoder(
        "GptOss",
        _sized(1440, 1440, 3, 32, 4)
        | {
            "vocab_size": 201_088,
            "head_dim": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
        },
        tiny=_TINY_HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        cost=2.0,
    ),
    # Qwen 3 30B-A3B, with sixteen of its 128 experts.
    "qwen3_moe": _decoder(
        "Qwen3Moe",
        _sized(2048, 6144, 3, 32, 4)
        | {
            "vocab_size": 151_936,
            "head_dim": 128,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 768,
        },
        tiny=_TINY_HEADS
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        cost=2.0,
    ),
    # Mamba2 1.3B; without its CUDA kernels, Transformers computes chunks with einsum-like products.
    "mamba2": _decoder(
        "Mamba2",
        {
            "vocab_size": 50_288,
            "hidden_size": 2048,
            "num_hidden_layers": 2,
            "num_heads": 64,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 1,
            "chunk_size": 128,
        },
        tiny={
            "vocab_size": TOKENS,
            "hidden_size": TINY["hidden_size"],
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 16,
            "chunk_size": 8,
        },
        sizes=((2, 1024), (4, 1024)),
    ),
}
