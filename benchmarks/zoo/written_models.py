"""Models that are written by hand: language, diffusion, recommenders, graphs.

Reduced are the numbers of layers, to four or six.
"""

from __future__ import annotations

from ..models import batches as shared
from ..models.text import TOKENS
from ..models.workloads import Model
from . import batches
from .options import with_layers
from .written import DCN, S4D, GatedRecurrence, GraphTransformer, TabTransformer, UNet

__all__ = ["MODELS"]

_FEATURES = {"rows": shared.TABLE_ROWS, "dense_features": shared.DENSE_FEATURES}

MODELS = {
    "nanogpt": with_layers("nanogpt", (8, 1024), (16, 1024), n_layer=6),
    "meta_llama": with_layers("meta_llama", (2, 2048), n_layers=4),
    "gated_decoder": with_layers("gated_decoder", (8, 1024), (16, 1024), n_layers=4),
    "recurrence": Model(
        cls=GatedRecurrence,
        config=None,
        options={},
        tiny={"vocab_size": TOKENS, "width": 32, "inner": 48, "layers": 2},
        batch=shared.shifted("tokens"),
        sizes=((8, 1024), (16, 1024)),
        tiny_sizes=(2, 16),
    ),
    "s4d": Model(
        cls=S4D,
        config=None,
        options={},
        tiny={"vocab_size": TOKENS, "width": 16, "states": 4, "layers": 2},
        batch=shared.shifted("tokens"),
        sizes=((16, 1024), (32, 1024)),
        tiny_sizes=(2, 16),
    ),
    "dit": with_layers("dit", (32, 256), (64, 256), depth=6),
    "unet": Model(
        cls=UNet,
        config=None,
        options={},
        tiny={"widths": (8, 16), "heads": 2, "groups": 4},
        batch=shared.noisy,
        sizes=((16, 1024),),
        tiny_sizes=(2, 16),
        cost=1.5,
    ),
    "dlrm": with_layers("dlrm", (65_536, 26), (262_144, 26)),
    "dcn": Model(
        cls=DCN,
        config=None,
        options=_FEATURES,
        tiny={"tables": 5, "width": 8, "rank": 4, "layers": 2, "deep": (16, 8)},
        batch=shared.clicks,
        sizes=((65_536, 26), (131_072, 26)),
        tiny_sizes=(6, 5),
    ),
    "tab_transformer": Model(
        cls=TabTransformer,
        config=None,
        options=_FEATURES,
        tiny={"tables": 5, "width": 16, "heads": 2, "inner": 24, "layers": 2},
        batch=shared.clicks,
        sizes=((8192, 26), (32_768, 26)),
        tiny_sizes=(6, 5),
    ),
    "graph_transformer": Model(
        cls=GraphTransformer,
        config=None,
        options={},
        tiny={"width": 32, "heads": 2, "layers": 2},
        batch=batches.graphs,
        sizes=((128, 128), (256, 128)),
        tiny_sizes=(2, 6),
    ),
}
