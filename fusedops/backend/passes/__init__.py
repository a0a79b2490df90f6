"""The passes: each rewrites a captured graph, before PyTorch differentiates it.

So a pass also decides what the backward computes. Inductor receives forward and backward
separately, when PyTorch has differentiated each operator and decided what is saved.
"""

from __future__ import annotations

from collections.abc import Callable

from ..rewrite import Rewrite
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
PASSES: tuple[Pass, ...] = (
    move_channels_last,  # regions can then have these reductions
    split_complex,  # regions can then have them
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
    clean_up,
)
# For a graph alone, after all bodies in it: what a body returns is no result of the model.
PASSES_OF_WHOLE_GRAPHS: tuple[Pass, ...] = (recompute_returned,)
