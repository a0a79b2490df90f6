"""The passes: each rewrites a captured graph, before PyTorch differentiates it.

So a pass also decides what the backward computes. Inductor receives forward and backward
separately, when PyTorch has differentiated each operator and decided what is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..options import EAGER, INDUCTOR
from ..rewrite import Rewrite
from .attentions import fuse_attentions
from .biases import restore_biases, split_biases
from .casts import cast_together
from .channels import move_channels_last
from .cleanup import clean_up
from .complex_numbers import split_complex
from .concatenations import cast_before_concatenating
from .embeddings import sum_embedding_gradients
from .fusion import fuse_regions
from .grouped_products import share_offsets
from .layouts import restore_strides
from .linears import restore_linears
from .loss_heads import fuse_loss_heads
from .packing import pack_gradients
from .padding import pad_products
from .permutations import put_rows_back
from .products import join_products
from .recomputation import recompute_returned

__all__ = ["PASSES", "PASSES_OF_WHOLE_GRAPHS", "Pass"]

# Rewrites the graph in place.
Pass = Callable[[Rewrite], None]

# In this order, for a graph and for each captured body in it.
_PASSES: tuple[Pass, ...] = (
    move_channels_last,  # regions can then have these reductions
    split_complex,  # regions can then have them
    fuse_attentions,  # before regions have their softmaxes
    fuse_loss_heads,  # before biases are split from products, and regions have log-softmaxes
    split_biases,  # regions can then add them
    cast_before_concatenating,  # regions can then have the casts
    fuse_regions,
    restore_biases,  # those that no region adds
    restore_strides,
    pad_products,
    join_products,  # before casts are joined: these are then concatenated by the same operator
    cast_together,
    sum_embedding_gradients,
    put_rows_back,
    share_offsets,
    pack_gradients,
    restore_linears,
    clean_up,
)
# These pay only if Inductor compiles what they insert to one kernel, or partitions the graph. Where
# eager operators run the rest, eight casts of parameters would be a concatenation, a cast, a split
# and eight views, and gradients that are written in place of a copy would take two more calls of
# operators through the dispatcher.
_OF_INDUCTOR = frozenset({cast_together, pack_gradients})
# Inductor compiles products, and not linear layers.
_OF_EAGER = frozenset({restore_linears})
# By what runs the rest of a graph.
PASSES: Mapping[str, tuple[Pass, ...]] = {
    INDUCTOR: tuple([apply for apply in _PASSES if apply not in _OF_EAGER]),
    EAGER: tuple([apply for apply in _PASSES if apply not in _OF_INDUCTOR]),
}
# For a graph alone, after all bodies in it: what a body returns is no result of the model.
PASSES_OF_WHOLE_GRAPHS: Mapping[str, tuple[Pass, ...]] = {
    INDUCTOR: (recompute_returned,),
    EAGER: (),
}
