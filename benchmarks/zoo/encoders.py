"""Encoders of text, and models with encoder and decoder.

Widths, heads and vocabularies are the published ones. Reduced are only the numbers of layers: to six
of twelve in base models, and to three of six, or of twelve, in the stacks of an encoder-decoder.
"""

from __future__ import annotations

from ..models import batches as shared
from ..models.text import PAD, TOKENS
from ..models.workloads import Model
from . import batches
from .options import SPECIAL, tiny_text, with_layers

__all__ = ["MODELS"]

_SIX = {"num_hidden_layers": 6}
_TINY_TEXT = (2, 16)
_TINY_PAIR = (2, 16, 8)
_BART = SPECIAL | {
    "bos_token_id": PAD,
    "decoder_start_token_id": PAD,
    "forced_eos_token_id": None,
    "encoder_layers": 3,
    "decoder_layers": 3,
}
_TINY_BART = {
    "vocab_size": TOKENS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
}

MODELS = {
    "bert": with_layers("bert", **_SIX),
    "roberta": Model(
        cls="RobertaForMaskedLM",
        config="RobertaConfig",
        options=SPECIAL | _SIX | {"vocab_size": 50_265, "max_position_embeddings": 514},
        tiny=tiny_text(),
        batch=shared.masked,
        sizes=((32, 512),),
        tiny_sizes=_TINY_TEXT,
    ),
    "deberta_v2": Model(
        cls="DebertaV2ForMaskedLM",
        config="DebertaV2Config",
        options=SPECIAL
        | {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "num_hidden_layers": 4,
            "vocab_size": 128_100,
            "relative_attention": True,
            "position_buckets": 256,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "type_vocab_size": 0,
            "layer_norm_eps": 1e-7,
        },
        tiny=tiny_text(position_buckets=4),
        batch=shared.masked,
        sizes=((16, 512),),
        tiny_sizes=_TINY_TEXT,
        cost=2.0,
    ),
    "modernbert": Model(
        cls="ModernBertForMaskedLM",
        config="ModernBertConfig",
        options=SPECIAL | {"num_hidden_layers": 6, "attn_implementation": "sdpa"},
        tiny=tiny_text(local_attention=8),
        batch=shared.masked,
        sizes=((16, 1024),),
        tiny_sizes=_TINY_TEXT,
    ),
    # The sizes of ELECTRA-base.
    "electra": Model(
        cls="ElectraForPreTraining",
        config="ElectraConfig",
        options=SPECIAL
        | _SIX
        | {
            "embedding_size": 768,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
        },
        tiny=tiny_text(embedding_size=16),
        batch=batches.replaced,
        sizes=((32, 512), (64, 512)),
        tiny_sizes=_TINY_TEXT,
    ),
    # The sizes of ALBERT-large; all layers share their weights.
    "albert": Model(
        cls="AlbertForMaskedLM",
        config="AlbertConfig",
        options=SPECIAL
        | {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 6,
        },
        tiny=tiny_text(embedding_size=16),
        batch=shared.masked,
        sizes=((32, 512),),
        tiny_sizes=_TINY_TEXT,
    ),
    # The sizes of ESM-2 650M, a model of proteins: rotary positions, GELU, no token types.
    "esm": Model(
        cls="EsmForMaskedLM",
        config="EsmConfig",
        options=SPECIAL
        | {
            "vocab_size": TOKENS,
            "mask_token_id": 2,
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_attention_heads": 20,
            "num_hidden_layers": 6,
            "position_embedding_type": "rotary",
            "token_dropout": True,
            "emb_layer_norm_before": False,
        },
        tiny=tiny_text(),
        batch=shared.masked,
        sizes=((16, 512), (32, 512)),
        tiny_sizes=_TINY_TEXT,
    ),
    "mpnet": Model(
        cls="MPNetForMaskedLM",
        config="MPNetConfig",
        options=SPECIAL | _SIX | {"max_position_embeddings": 514},
        tiny=tiny_text(),
        batch=shared.masked,
        sizes=((32, 512),),
        tiny_sizes=_TINY_TEXT,
    ),
    "roformer": Model(
        cls="RoFormerForMaskedLM",
        config="RoFormerConfig",
        options=SPECIAL | _SIX | {"max_position_embeddings": 512},
        tiny=tiny_text(embedding_size=16),
        batch=shared.masked,
        sizes=((16, 512),),
        tiny_sizes=_TINY_TEXT,
    ),
    "convbert": Model(
        cls="ConvBertForMaskedLM",
        config="ConvBertConfig",
        options=SPECIAL | _SIX,
        tiny=tiny_text(embedding_size=16, num_attention_heads=4, head_ratio=2),
        batch=shared.masked,
        sizes=((16, 512),),
        tiny_sizes=_TINY_TEXT,
    ),
    "t5": with_layers("t5", (32, 512, 128), (64, 512, 128), num_layers=4),
    # The sizes of Flan-T5-large, whose feed-forward has a gate.
    "t5_gated": Model(
        cls="T5ForConditionalGeneration",
        config="T5Config",
        options=SPECIAL
        | {
            "decoder_start_token_id": PAD,
            "d_model": 1024,
            "d_ff": 2816,
            "num_layers": 3,
            "num_heads": 16,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
        },
        tiny={
            "vocab_size": TOKENS,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 2,
        },
        batch=shared.continuation,
        sizes=((16, 512, 256), (32, 512, 256)),
        tiny_sizes=_TINY_PAIR,
        decodes=True,
        cost=1.5,
    ),
    "bart": Model(
        cls="BartForConditionalGeneration",
        config="BartConfig",
        options=_BART,
        tiny=_TINY_BART,
        batch=shared.continuation,
        sizes=((16, 1024, 256),),
        tiny_sizes=_TINY_PAIR,
        decodes=True,
        cost=1.5,
    ),
    # The sizes of PEGASUS-large: pre-norm, and sinusoidal positions.
    "pegasus": Model(
        cls="PegasusForConditionalGeneration",
        config="PegasusConfig",
        options=_BART | {"vocab_size": 96_103, "max_position_embeddings": 1024},
        tiny=_TINY_BART,
        batch=shared.continuation,
        sizes=((16, 512, 256), (32, 512, 256)),
        tiny_sizes=_TINY_PAIR,
        decodes=True,
        cost=1.5,
    ),
    # The sizes of Whisper-medium.
    "whisper": Model(
        cls="WhisperForConditionalGeneration",
        config="WhisperConfig",
        options=_BART
        | {
            "d_model": 1024,
            "encoder_attention_heads": 16,
            "decoder_attention_heads": 16,
            "encoder_ffn_dim": 4096,
            "decoder_ffn_dim": 4096,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        tiny={
            "vocab_size": TOKENS,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_source_positions": 16,
            "max_target_positions": 16,
        },
        batch=batches.transcribed,
        sizes=((8, 3000, 128), (16, 3000, 128)),
        tiny_sizes=(2, 32, 8),
        decodes=True,
        cost=1.5,
    ),
}
