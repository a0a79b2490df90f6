"""From tensors to launches of the generation kernel: the strides, the compiled variant, and the launch.

A variant depends on dtypes, absences and device; on no size, as a generation's rows grow by a token a step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import launch
from ..core.launch import Variant, pointer_type
from ..core.operand import dense, vector
from . import configs
from .reference import Rule, first_window

__all__ = ["Site", "forward", "site_of"]


@dataclass(frozen=True, eq=False)
class Site:
    """What of a call stays the same from step to step; `site_of` keeps one for each, so identity is equality.

    Attributes:
        device_index: the GPU, -1 under the interpreter.
        scores, tokens: the dtypes of the two tensors.
        allowed: whether some tokens are never banned.
        padded: whether padding is to be skipped.
    """

    device_index: int
    scores: torch.dtype
    tokens: torch.dtype
    allowed: bool
    padded: bool

    @functools.cached_property
    def variant(self) -> Variant:
        """The kernel, compiled at its first use."""
        from . import kernels

        types = {
            "scores": pointer_type(self.scores), "ids": pointer_type(self.tokens),
            "allowed": "*i1" if self.allowed else None, "pad": "i64" if self.padded else None,
        }  # fmt: skip
        numbers = ("scores_stride", "scores_step", "ids_stride", "ids_step", "start", "ngram", "L", "V")
        types |= dict.fromkeys(numbers, "i64")
        return launch.build(kernels.no_repeat_ngram_forward_kernel, types, {}, configs.CONFIG, acc=self.scores, cols=0,
                            device_index=self.device_index, aligned=False)  # fmt: skip


@functools.lru_cache(maxsize=1024)
def site_of(device_index: int, scores: torch.dtype, tokens: torch.dtype, allowed: bool, padded: bool) -> Site:
    """The one site for these choices."""
    return Site(device_index, scores, tokens, allowed, padded)


def forward(site: Site, scores: Tensor, input_ids: Tensor, allowed: Tensor | None, rule: Rule) -> None:
    """One launch that writes to the scores; none where the rows are too short for any n-gram."""
    count, cols = scores.shape
    length = input_ids.shape[1]
    start = first_window(length, rule.window, rule.prompt_length)
    windows = length - rule.ngram_size + 1 - start
    if windows <= 0:
        return
    torch.autograd.graph.increment_version(scores)
    input_ids, _ = dense(input_ids)
    allowed, _ = vector(allowed)
    site.variant(count, -(-windows // configs.CONFIG.block_n), scores, input_ids, allowed, rule.pad_token_id,
                 *scores.stride(), *input_ids.stride(), start, rule.ngram_size, length, cols)  # fmt: skip
