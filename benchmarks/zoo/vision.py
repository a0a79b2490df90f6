"""Models of pictures and sounds, and models with a tower of pictures and one of texts.

Widths, heads and numbers of patches are those of base or large models. Reduced are the numbers of
layers, to six; in Swin, SegFormer and ConvNeXt V2 those of the third stage.
"""

from __future__ import annotations

from typing import Any

from ..models import batches as shared
from ..models.text import EOS, PAD, TOKENS
from ..models.workloads import Model
from . import batches
from .options import TINY, with_layers
from .written import DETR, Contrastive, MLPMixer, ResNet

__all__ = ["MODELS"]

_PICTURES = ((64, 3, 224, 224), (128, 3, 224, 224))
_MORE_PICTURES = ((128, 3, 224, 224), (256, 3, 224, 224))
_TINY_PICTURE = (2, 3, 32, 32)
_LABELS = {"num_labels": 256}  # the pictures' classes are bytes
_SIX = {"num_hidden_layers": 6}
_TINY_VISION = {"image_size": 32, **TINY}


def _vision(
    family: str,
    options: dict[str, Any],
    *,
    tiny: dict[str, Any] | None = None,
    cost: float = 1.0,
) -> Model:
    """Returns a classifier of pictures; the arguments are those of `Model`."""
    return Model(
        cls=f"{family}ForImageClassification",
        config=f"{family}Config",
        options=_LABELS | options,
        tiny=_TINY_VISION if tiny is None else tiny,
        batch=shared.picture,
        sizes=_PICTURES,
        tiny_sizes=_TINY_PICTURE,
        cost=cost,
    )


_CLIP_VISION = {**_SIX, "hidden_size": 768, "patch_size": 16, "image_size": 224}
_TINY_TOWERS = {
    "text_config": {"vocab_size": TOKENS, **TINY, "pad_token_id": PAD, "eos_token_id": EOS},
    "vision_config": {"image_size": 32, "patch_size": 16, **TINY},
}

MODELS = {
    "vit": with_layers("vit", num_hidden_layers=6),
    "dinov2": _vision(
        "Dinov2",
        _SIX | {"patch_size": 14, "image_size": 224, "drop_path_rate": 0.0},
        tiny={
            "image_size": 32,
            "patch_size": 16,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
    ),
    "beit": _vision(
        "Beit",
        _SIX
        | {
            "image_size": 224,
            "use_relative_position_bias": True,
            "use_shared_relative_position_bias": False,
        },
    ),
    # Swin-B.
    "swin": _vision(
        "Swin",
        {"embed_dim": 128, "depths": [2, 2, 6, 2], "num_heads": [4, 8, 16, 32]},
        tiny={
            "image_size": 32,
            "embed_dim": 8,
            "depths": [1, 2],
            "num_heads": [1, 2],
            "window_size": 4,
        },
        cost=2.5,
    ),
    # ConvNeXt V2-B.
    "convnextv2": _vision(
        "ConvNextV2",
        {"hidden_sizes": [128, 256, 512, 1024], "depths": [2, 2, 6, 2]},
        tiny={"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "image_size": 32},
        cost=1.5,
    ),
    "resnet": Model(
        cls=ResNet,
        config=None,
        options={},
        tiny={"depths": (1, 1), "width": 8},
        batch=shared.picture,
        sizes=_MORE_PICTURES,
        tiny_sizes=_TINY_PICTURE,
    ),
    # Mixer-L/16.
    "mixer": Model(
        cls=MLPMixer,
        config=None,
        options={},
        tiny={"image_size": 32, "width": 32, "token_width": 16, "depth": 2, "classes": 256},
        batch=shared.picture,
        sizes=_PICTURES,
        tiny_sizes=_TINY_PICTURE,
    ),
    "detr": Model(
        cls=DETR,
        config=None,
        options={},
        tiny={
            "image_size": 32,
            "width": 32,
            "heads": 2,
            "layers": 1,
            "feed_forward": 64,
            "queries": 5,
        },
        batch=shared.picture,
        sizes=((64, 3, 512, 512), (128, 3, 512, 512)),
        tiny_sizes=_TINY_PICTURE,
    ),
    # SegFormer-B2.
    "segformer": Model(
        cls="SegformerForSemanticSegmentation",
        config="SegformerConfig",
        options={
            "num_labels": 19,
            "hidden_sizes": [64, 128, 320, 512],
            "depths": [2, 2, 3, 2],
            "decoder_hidden_size": 768,
        },
        tiny={
            "hidden_sizes": [8, 16, 16, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16,
        },
        batch=batches.segmented,
        sizes=((8, 3, 512, 512), (32, 3, 512, 512)),
        tiny_sizes=(2, 3, 64, 64),
        cost=2.0,
    ),
    "mae": Model(
        cls="ViTMAEForPreTraining",
        config="ViTMAEConfig",
        options=_SIX | {"decoder_num_hidden_layers": 2},
        tiny={
            **_TINY_VISION,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
        },
        batch=batches.masked_patches,
        sizes=_MORE_PICTURES,
        tiny_sizes=_TINY_PICTURE,
    ),
    # CLIP B/16.
    "clip": Model(
        cls=Contrastive,
        config=None,
        options={
            "model": "CLIPModel",
            "config": "CLIPConfig",
            "text_config": {**_SIX, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": PAD},
            "vision_config": _CLIP_VISION,
        },
        tiny=_TINY_TOWERS,
        batch=batches.captioned,
        sizes=((128, 64, 3, 224, 224),),
        tiny_sizes=(2, 8, 3, 32, 32),
        cost=1.5,
    ),
    # SigLIP B/16.
    "siglip": Model(
        cls=Contrastive,
        config=None,
        options={
            "model": "SiglipModel",
            "config": "SiglipConfig",
            "text_config": {**_SIX, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": PAD},
            "vision_config": _CLIP_VISION,
        },
        tiny=_TINY_TOWERS,
        batch=batches.captioned,
        sizes=((128, 64, 3, 224, 224),),
        tiny_sizes=(2, 8, 3, 32, 32),
        cost=1.5,
    ),
    # Large widths: convolutions before each layer's norm, and a pre-norm.
    "wav2vec2": Model(
        cls="Wav2Vec2ForSequenceClassification",
        config="Wav2Vec2Config",
        options=_LABELS
        | {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 6,
            "do_stable_layer_norm": True,
            "feat_extract_norm": "layer",
            "conv_bias": True,
            "apply_spec_augment": False,
            "layerdrop": 0.0,
        },
        tiny={
            **TINY,
            "conv_dim": (8, 8),
            "conv_kernel": (10, 3),
            "conv_stride": (5, 2),
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "classifier_proj_size": 16,
        },
        batch=batches.sounds,
        sizes=((16, 160_000),),
        tiny_sizes=(2, 400),
        cost=1.5,
    ),
    "hubert": Model(
        cls="HubertForSequenceClassification",
        config="HubertConfig",
        options=_LABELS | _SIX | {"apply_spec_augment": False, "layerdrop": 0.0},
        tiny={
            **TINY,
            "conv_dim": (8, 8),
            "conv_kernel": (10, 3),
            "conv_stride": (5, 2),
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "classifier_proj_size": 16,
        },
        batch=batches.sounds,
        sizes=((16, 160_000), (32, 160_000)),
        tiny_sizes=(2, 400),
        cost=1.5,
    ),
    "ast": Model(
        cls="ASTForAudioClassification",
        config="ASTConfig",
        options=_LABELS | _SIX,
        tiny={**TINY, "num_mel_bins": 32, "max_length": 48},
        batch=batches.spectrograms,
        sizes=((16, 1024, 128), (32, 1024, 128)),
        tiny_sizes=(2, 48, 32),
    ),
}
