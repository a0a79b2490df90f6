"""Small configurations of Transformers' models, with the structure of the default ones.

The name of a field decides how it shrinks, in a configuration and in those that it contains. Models
for which that is invalid have other values in `tables.OVERRIDES`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from .tables import OVERRIDES

__all__ = ["tiny_config"]

_HIDDEN, _WIDE, _HEADS, _HEAD, _VOCABULARY = 32, 64, 4, 8, 128


def _at_most(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit)


# Patterns of names, with functions of the default value. The first pattern that matches the whole
# name of a field decides.
_INTEGERS: list[tuple[re.Pattern[str], Callable[[int], int]]] = [
    (re.compile(names), small)
    for names, small in [
        (r"type_vocab_size|num_labels|num_channels|chunk_size_feed_forward", lambda value: value),
        (r".*vocab(ulary)?_size(_.*)?|codebook_size|audio_vocab_size", _at_most(_VOCABULARY)),
        (r"image_size|.*_image_size|pretrain_img_size", _at_most(32)),
        (r"(?!temporal|spatial).*patch_size", _at_most(8)),
        (
            r"window_size|sliding_window|local_attention|attention_window|sliding_window_size",
            _at_most(4),
        ),
        (r"max_source_positions|n_audio_ctx", _at_most(20)),
        (
            (
                r"(.*_)?max_position_embeddings|.*positions?|n_ctx|max_seq(uence)?_len(gth)?|model_max_length|max_.*_embeddings"
                r"|context_length|num_position_embeddings"
            ),
            _at_most(64),
        ),
        (r"max_length|max_pos_emb", _at_most(64)),
        (r"num_kv_shared_layers|num_nextn_predict_layers|num_mtp_.*", _at_most(0)),
        (r"num_feat_extract_layers|num_residual_layers|num_adapter_layers", lambda value: value),
        (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", _at_most(1)),
        (r"max_window_layers", _at_most(1)),
        (
            (
                r".*(num|n)_.*layers|n_layers?|layers|num_layers|depth|.*_depth|(encoder|decoder)_layers|num_blocks|num_.*_blocks"
                r"|.*_num_layers|\w*_layers"
            ),
            _at_most(2),
        ),
        (
            r".*(experts?|k)_per_tok(en)?|moe_topk|moe_k|num_selected_experts|num_experts_per_token|moe_top_k",
            _at_most(2),
        ),
        (r"(num|n)_shared_experts", _at_most(1)),
        (r".*(num|n)_.*experts|n_experts|num_experts", _at_most(4)),
        (r"n_group|topk_group|num_expert_group", _at_most(1)),
        (r"(qk_|.*_qk_)head_dim", _at_most(2 * _HEAD)),
        (
            (
                r".*head_(dim|size)|d_kv|d_head|dim_head|kv_channels|attention_key_size|mamba_d_head|.*dim_head|rotary_dim"
                r"|attention_head_size|head_width"
            ),
            _at_most(_HEAD),
        ),
        (r".*lora_rank|.*_rank", _at_most(16)),
        (
            r".*(key_value|kv)_.*heads?|n_kv_heads?|multi_query_group_num|.*num_query_groups",
            _at_most(2),
        ),
        (r"(.*_)?(num|n)_.*heads?|n_heads?|num_heads|.*attention_heads|.*_heads", _at_most(_HEADS)),
        (
            (
                r".*intermediate.*|.*ffn_dim|d_ff|dff|n_inner|.*ffn_hidden_size|.*mlp_dim|dim_feedforward|.*feedforward_dim"
                r"|d_inner|encoder_ffn_dim|mlp_hidden_size|feed_forward_size"
            ),
            _at_most(_WIDE),
        ),
        (r"num_mel_bins|n_mels|.*feat_per_channel", _at_most(16)),
        (
            (
                r"num_queries|num_latents|num_query_tokens|latent_query_num|.*n_latents|num_denoising|.*num_latents"
                r"|num_detection_tokens"
            ),
            _at_most(8),
        ),
        (
            (
                r".*(hidden|embed\w*|proj\w*|output|feature|model|latent|channel|channels)_(size|dim)s?|hidden_size.*|embed_dim|d_model"
                r"|n_embd|dim|emb_dim|embedding_(size|dim)|width|out_dim|output_dim|(in|out|output|latent|base)_channels"
                r"|(hidden|embed|proj|model|projection|mask|fusion|cross)_\w*(dim|size)|d_embed|pooler_output_size"
                r"|\w+_(dim|size|width)_?\w*|.*_channels"
            ),
            _at_most(_HIDDEN),
        ),
    ]
]
_TOKEN = re.compile(r".*(token|_)_?(id|index)s?|.*_token|.*_ids?")
_INDICES = re.compile(r".*(indices|indexes|idxs|layer_ids|_layers?|layers_ids|summary_idx)")


def tiny_config(model_type: str, config_class: type[Any]) -> Any:
    """Returns a small configuration of a class; the same at each call."""
    default = config_class(**OVERRIDES.get(f"{model_type}!", {}))
    return _Shrinking().of(default, model_type)


class _Shrinking:
    """Shrinks a configuration and those that it contains.

    Token ids beyond the small vocabulary are replaced. Fields with the same id get the same
    replacement.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}

    def of(self, config: Any, model_type: str) -> Any:
        """Returns a small copy of a configuration."""
        cls = type(config)
        parameters = inspect.signature(cls.__init__).parameters
        names = {attribute: name for name, attribute in getattr(cls, "attribute_map", {}).items()}
        try:
            defaults = vars(cls())
        except Exception:  # noqa: BLE001, some fields have no defaults
            defaults = {}
        layers = _number_of_layers(config)
        results: dict[str, Any] = {}
        for field, value in vars(config).items():
            name = field if field in parameters else names.get(field, field)
            if name not in parameters or field.startswith("_"):
                continue
            small = self._small(field, value, layers)
            has_own_value = bool(defaults) and (
                field not in defaults or _differ(defaults[field], value)
            )
            if small is not value or has_own_value:
                results[name] = small
        _match_heads(config, results)
        overrides = OVERRIDES.get(model_type, {})
        overrides = overrides | OVERRIDES.get(getattr(config, "model_type", ""), {})
        results |= {name: value for name, value in overrides.items() if name in parameters}
        return _built(cls, results)

    def _small(self, name: str, value: Any, layers: int | None) -> Any:
        """The small value of a field of any type; ``layers`` is the original number of layers."""
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            return self.of(value, value.model_type)
        if name == "apply_spec_augment":  # NumPy would draw masks longer than the input
            return False
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int):
            return self._integer(name, value)
        if isinstance(value, Mapping):
            return _rotary(value) if name.startswith("rope") else value
        if isinstance(value, (list, tuple)) and value:
            return self._sequence(name, value, layers)
        return value

    def _integer(self, name: str, value: int) -> int:
        if _TOKEN.fullmatch(name) and value >= _VOCABULARY:
            return self._tokens.setdefault(value, _VOCABULARY - 1 - len(self._tokens))
        small = next((small for names, small in _INTEGERS if names.fullmatch(name)), None)
        result = value if small is None else small(value)
        return value if result == value else result  # `of` compares the objects

    def _sequence(self, name: str, value: Any, layers: int | None) -> Any:
        small: list[Any]
        if not all(isinstance(part, (int, str)) and not isinstance(part, bool) for part in value):
            return value
        # A list with an entry for each layer.
        if layers is not None and len(value) == layers > 2 and "layer" in name:
            small = [value[0], value[-1]]
            return type(value)(
                [
                    self._integer(name.replace("_per_layer", ""), p) if isinstance(p, int) else p
                    for p in small
                ]
            )
        if isinstance(value[0], str):
            return value
        if name.endswith("heads") and all(part % 3 == 0 for part in value):
            return type(value)([part // 3 for part in value])
        if re.fullmatch(
            r"depths?|.*blocks_per_stage|block_sizes|num_blocks|.*numb_of_layers|num_layers|layers"
            r"|num_hidden_layers",
            name,
        ):
            small = [1] * len(value)
        elif name in ("image_size", "patch_size", "window_size") or (
            _TOKEN.fullmatch(name) and max(value) >= _VOCABULARY
        ):
            small = [self._integer(name, part) for part in value]
        elif _INDICES.fullmatch(name):
            small = [min(part, 1) for part in value]
        elif max(value) > _WIDE and re.search(r"size|dim|channel|width", name):
            small = [max(8, part * _WIDE // max(value) // 8 * 8) for part in value]
        else:
            return value
        return type(value)(small)


def _match_heads(config: Any, fields: dict[str, Any]) -> None:
    """Sets as many heads of keys as of queries, if the original configuration has as many."""
    if getattr(config, "num_key_value_heads", None) == getattr(config, "num_attention_heads", 0):
        for name in ("num_key_value_heads", "num_kv_heads"):
            if name in fields and isinstance(fields[name], int):
                fields[name] = _HEADS


def _number_of_layers(config: Any) -> int | None:
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def _rotary(value: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of rotary positions, with sections that add up to half of a small head."""
    small = dict(value)
    if "mrope_section" in small:
        small["mrope_section"] = [2, 1, 1]
    return {name: dict(_rotary(v)) if isinstance(v, Mapping) else v for name, v in small.items()}


def _differ(a: Any, b: Any) -> bool:
    try:
        return bool(a != b)
    except Exception:  # noqa: BLE001, tensors and the like
        return True


def _built(cls: type[Any], fields: dict[str, Any]) -> Any:
    """Builds a configuration. Some accept inner configurations only as dictionaries."""
    try:
        return cls(**fields)
    except Exception:  # noqa: BLE001
        plain = {
            name: value.to_dict() if hasattr(value, "to_dict") else value
            for name, value in fields.items()
        }
        return cls(**plain)
