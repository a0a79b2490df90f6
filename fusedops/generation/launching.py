"""From tensors to launches: builds the variant a call needs, allocates the output, launches.

A variant depends on dtypes, absences, alignment and device; on no size, as a generation's rows grow by a token a step.
This runs at every step: it counts nanoseconds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import launch
from ..core.launch import MOST_TILES, Variant, pointer_type
from ..core.layout import as_rows, empty
from . import configs
from .reference import first_window

__all__ = ["Rule", "Site", "forward", "site_of"]

# ngram_size, window, prompt_length, pad_token_id: of no tensor, so as the caller gave them.
Rule = tuple[int, int | None, int, int | None]

_TOKENS = {torch.int32: "*i32", torch.int64: "*i64"}


@dataclass(frozen=True, eq=False)
class Site:
    """What of a call stays the same from step to step; `site_of` keeps one for each, so identity is equality.

    Attributes:
        device_index: the GPU, -1 under the interpreter.
        tokens, scores: the dtypes of the two tensors.
        allowed, padded: whether some tokens are never banned, and whether padding is to be skipped.
        inplace: whether the scores are written to.
    """

    device_index: int
    tokens: torch.dtype
    scores: torch.dtype
    allowed: bool
    padded: bool
    inplace: bool


@functools.lru_cache(maxsize=1024)
def site_of(device_index: int, tokens: torch.dtype, scores: torch.dtype, allowed: bool, padded: bool,
            inplace: bool) -> Site:  # fmt: skip
    """The one site for these choices."""
    return Site(device_index, tokens, scores, allowed, padded, inplace)


_plans: dict[tuple[Site, bool], Variant] = {}


def forward(site: Site, input_ids: Tensor, scores: Tensor, allowed: Tensor | None, rule: Rule) -> Tensor:
    """The scores with the bans, from one launch; those given if ``site.inplace``."""
    if site.device_index >= 0 and site.device_index != launch.current_device():
        with torch.cuda.device(site.device_index):
            return forward(site, input_ids, scores, allowed, rule)
    ngram_size, window, prompt_length, pad = rule
    rows, cols = scores.shape
    length = input_ids.shape[1]
    start = first_window(length, window, prompt_length)
    if site.inplace:
        windows = length - ngram_size + 1 - start
        if windows <= 0:
            return scores
        torch.autograd.graph.increment_version(scores)
        out, source, stride, aligned = scores, None, 0, False
        work = -(-windows // configs.BLOCK_L)
        tiles = -(-work // MOST_TILES)
    else:
        source, stride = as_rows(scores, 1, cols)
        out = empty(scores, scores.dtype)
        bits = source.data_ptr() | (stride << 1) | (cols << 1) | input_ids.data_ptr()
        aligned = bits & 15 == 0 and (allowed is None or allowed.data_ptr() & 15 == 0)
        work = -(-cols // configs.CONFIG.block_n)
        tiles = configs.tiles(rows, cols, 2 * cols * scores.itemsize, (length - start) * input_ids.itemsize,
                              launch.processors(site.device_index))  # fmt: skip
    if allowed is not None:
        allowed = allowed.contiguous()
    key = (site, aligned)
    variant = _plans.get(key)
    if variant is None:
        variant = _plans[key] = _plan(*key)
    ids_pitch, ids_step = input_ids.stride()
    out_stride, out_step = out.stride()
    variant(rows, -(-work // tiles), input_ids, source, out, allowed, pad, ids_pitch, ids_step, stride, out_stride,
            out_step, start, ngram_size, tiles, length, cols)  # fmt: skip
    return out


def _plan(site: Site, aligned: bool) -> Variant:
    from . import kernels

    scores = pointer_type(site.scores)
    types: dict[str, str | None] = {
        "ids": _TOKENS[site.tokens], "scores": None if site.inplace else scores, "out": scores,
        "allowed": "*i1" if site.allowed else None, "pad": "i64" if site.padded else None,
    }  # fmt: skip
    # The tokens' strides have no name that `launch.build` takes for aligned: a row is as long as the generation is.
    numbers = ("ids_pitch", "ids_step", "scores_stride", "out_stride", "out_step", "start", "ngram", "tiles", "L", "V")
    types |= dict.fromkeys(numbers, "i64")
    constants = {"BLOCK_L": configs.BLOCK_L}
    return launch.build(kernels.no_repeat_ngram_forward_kernel, types, constants, configs.CONFIG, acc=site.scores,
                        cols=0, device_index=site.device_index, aligned=aligned)  # fmt: skip
