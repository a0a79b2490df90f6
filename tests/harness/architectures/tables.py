"""Values for configurations that would be invalid if `tiny` only shrank their fields."""

from __future__ import annotations

from typing import Any

__all__ = ["OVERRIDES"]

# Rotary positions in three sections, of time, height and width, have half of a head's columns.
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_SECTIONS = {"rope_parameters": _ROTARY, "rope_scaling": _ROTARY}
_QUARTER = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [1, 1, 0],
    "partial_rotary_factor": 0.5,
}
_PARTIAL = {"rope_parameters": _QUARTER, "rope_scaling": _QUARTER}
_HEAD = {"head_dim": 8}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "num_heads": 8,
    "head_dim": 8,
    "mamba_headdim": 8,
    "n_mamba_heads": 2,
    "mamba_d_state": 16,
    "state_size": 16,
    "ssm_state_size": 16,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "mamba_ngroups": 1,
}
_SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
}

_SWIN = {
    "image_size": 64,
    "window_size": 2,
    "embed_dim": 16,
    "num_heads": [2, 2, 4, 4],
    "patch_size": 4,
}

# For each model type, the fields that do not follow the rules of `tiny`.
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "qwen2_vl_text",
            "qwen2_5_vl_text",
            "paddleocr_vl_text",
            "glm4v_text",
            "glm_ocr_text",
            "glm_image_text",
            "glm46v_text",
            "glmga_text",
        ),
        _SECTIONS,
    ),
    "glm4v_moe_text": _PARTIAL,
    **dict.fromkeys(
        (
            "hunyuan_v1_dense",
            "hunyuan_v1_moe",
            "hunyuan_vl_text",
            "ministral",
            "nemotron",
            "qwen4_exp_text",
        ),
        _HEAD,
    ),
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    "bamba": _MAMBA | {"head_dim": None, "num_heads": None, "attn_layer_indices": [1]},
    "granitemoehybrid": {k: v for k, v in _MAMBA.items() if k.startswith("mamba")}
    | {"layer_types": ["mamba", "attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "chunk_size": 8, "n_groups": 1},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "zamba": {
        "layers_block_type": ["mamba", "hybrid"],
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "n_mamba_heads": 2,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "hybrid_layer_ids": [1],
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "mamba_d_state": 16,
        "num_mem_blocks": 1,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "use_mem_rope": False,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32},
    "nemotron_h": {
        "hybrid_override_pattern": "M*-",
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "ssm_state_size": 16,
    },
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "bit": {"num_groups": 4, "embedding_size": 32},
    "bros": {
        "dim_bbox": 8,
        "dim_bbox_sinusoid_emb_2d": 8,
        "dim_bbox_projection": 8,
        "bbox_scale": 1.0,
        "hidden_size": 32,
    },
    "lilt": {"hidden_size": 48, "max_2d_position_embeddings": 64, "channel_shrink_ratio": 2},
    "esm": {"vocab_size": 128},
    "esmc": {"num_key_value_heads": 4},
    "dots1": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 4},
    "moonshine": {
        "encoder_num_key_value_heads": 4,
        "decoder_num_key_value_heads": 4,
        "num_key_value_heads": 4,
    },
    "reformer": {
        "attention_head_size": 8,
        "axial_pos_embds": False,
        "lsh_attn_chunk_length": 3,
        "local_attn_chunk_length": 3,
        "num_buckets": 2,
        "is_decoder": False,
        "hash_seed": 0,
    },
    "nystromformer": {"num_landmarks": 3, "segment_means_seq_len": 9},
    "xlstm": {"qk_dim_factor": 1.0, "v_dim_factor": 1.0, "chunk_size": 8},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    **dict.fromkeys(("swin", "donut-swin", "maskformer-swin", "swinv2"), _SWIN),
    "autoformer": _SERIES,
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "xmod": {"default_language": "en_XX"},
    "pvt": {"image_size": 64, "patch_sizes": [4, 2, 2, 2]},
    "perceiver": {
        "max_position_embeddings": 64,
        "num_latents": 8,
        "d_latents": 32,
        "d_model": 32,
        "image_size": 16,
        "num_self_attends_per_block": 2,
        "num_blocks": 1,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
        "train_size": [16, 16],
    },
    "convnext": {"hidden_sizes": [8, 16, 32, 64]},
    "bridgetower_vision_model": {"num_attention_heads": 4},
    "bridgetower": {"num_attention_heads": 4},
    "markuplm": {
        "max_xpath_tag_unit_embeddings": 256,
        "max_xpath_subs_unit_embeddings": 1024,
        "tag_pad_id": 216,
        "subs_pad_id": 1001,
    },
    "mimi": {"upsample_groups": 32},
    "mimi_decoder": {"upsample_groups": 32},
}
