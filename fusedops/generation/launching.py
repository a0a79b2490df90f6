"""From tensors to launches of the generation kernel: the strides, the compiled variant, and the launch.

A variant depends on dtypes, absences, alignment and device; on no size, as a generation's rows grow by a token a step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import launch
from ..core.launch import MOST_TILES, Variant, pointer_type
from ..core.operand import dense, rows, vector
from . import configs
from .reference import Rule, first_window

__all__ = ["Site", "forward", "site_of"]

_TOKENS = {torch.int32: "*i32", torch.int64: "*i64"}


@dataclass(frozen=True, eq=False)
class Site:
    """What of a call stays the same from step to step; `site_of` keeps one for each, so identity is equality.

    Attributes:
        device_index: the GPU, -1 under the interpreter.
        scores, tokens: the dtypes of the two tensors.
        allowed: whether some tokens are never banned.
        padded: whether padding is to be skipped.
        inplace: whether the scores are written to.
    """

    device_index: int
    scores: torch.dtype
    tokens: torch.dtype
    allowed: bool
    padded: bool
    inplace: bool


@functools.lru_cache(maxsize=1024)
def site_of(device_index: int, scores: torch.dtype, tokens: torch.dtype, allowed: bool, padded: bool,
            inplace: bool) -> Site:  # fmt: skip
    """The one site for these choices."""
    return Site(device_index, scores, tokens, allowed, padded, inplace)


_plans: dict[tuple[Site, bool], Variant] = {}


def forward(site: Site, scores: Tensor, input_ids: Tensor, allowed: Tensor | None, out: Tensor, rule: Rule) -> None:
    """One launch, from the scores to ``out``; in place ``out`` is the scores."""
    count, cols = scores.shape
    length = input_ids.shape[1]
    start = first_window(length, rule.window, rule.prompt_length)
    input_ids, bits = dense(input_ids)
    if allowed is not None:
        allowed, more = vector(allowed)
        bits |= more
    source, stride, aligned = None, 0, False
    if site.inplace:
        windows = length - rule.ngram_size + 1 - start
        if windows <= 0:
            return
        torch.autograd.graph.increment_version(scores)
        work = -(-windows // configs.BLOCK_L)
        tiles = -(-work // MOST_TILES)
    else:
        source, stride, more = rows(scores, cols)
        aligned = (bits | more | cols << 1) & 15 == 0
        work = -(-cols // configs.CONFIG.block_n)
        tiles = configs.tiles(count, cols, 2 * cols * scores.itemsize, (length - start) * input_ids.itemsize,
                              launch.processors(site.device_index))  # fmt: skip
    key = (site, aligned)
    variant = _plans.get(key)
    if variant is None:
        variant = _plans[key] = _plan(*key)
    ids_stride, ids_step = input_ids.stride()
    out_stride, out_step = out.stride()
    variant(count, -(-work // tiles), input_ids, source, out, allowed, rule.pad_token_id, ids_stride, ids_step, stride,
            out_stride, out_step, start, rule.ngram_size, tiles, length, cols)  # fmt: skip


def _plan(site: Site, aligned: bool) -> Variant:
    from . import kernels

    scores = pointer_type(site.scores)
    types: dict[str, str | None] = {
        "ids": _TOKENS[site.tokens], "scores": None if site.inplace else scores, "out": scores,
        "allowed": "*i1" if site.allowed else None, "pad": "i64" if site.padded else None,
    }  # fmt: skip
    # The tokens' strides have no name that `launch.build` takes for aligned: a row is as long as the generation is.
    numbers = ("ids_stride", "ids_step", "scores_stride", "out_stride", "out_step", "start", "ngram", "tiles", "L", "V")
    types |= dict.fromkeys(numbers, "i64")
    constants = {"BLOCK_L": configs.BLOCK_L}
    return launch.build(kernels.no_repeat_ngram_forward_kernel, types, constants, configs.CONFIG, acc=site.scores,
                        cols=0, device_index=site.device_index, aligned=aligned)  # fmt: skip
