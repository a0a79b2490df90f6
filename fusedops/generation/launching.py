"""Builds the variants of the generation kernel, and launches them.

A variant depends on dtypes, absent arguments and the device. It depends on no size, because rows
grow by one token in each step of a generation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.launches import launch
from ..core.launches.launch import Variant, pointer_type
from ..core.launches.operand import dense, vector
from . import configs
from .reference import Rule, first_window

__all__ = ["Site", "forward", "site_of"]


@dataclass(frozen=True, eq=False)
class Site:
    """The properties of a call that stay the same from step to step.

    `site_of` returns one object for equal properties, so sites are compared by identity.

    Attributes:
        device_index: the index of the GPU; -1 under the interpreter.
        scores, tokens: the dtypes of the scores and of the tokens.
        allowed: whether there is a mask of tokens that are never banned.
        padded: whether there is a padding token.
    """

    device_index: int
    scores: torch.dtype
    tokens: torch.dtype
    allowed: bool
    padded: bool

    @functools.cached_property
    def variant(self) -> Variant:
        """The compiled kernel; it is compiled at its first use."""
        from . import kernels

        types = {
            "scores": pointer_type(self.scores),
            "ids": pointer_type(self.tokens),
            "allowed": "*i1" if self.allowed else None,
            "pad": "i64" if self.padded else None,
        }
        numbers = (
            "scores_stride",
            "scores_step",
            "ids_stride",
            "ids_step",
            "start",
            "ngram",
            "L",
            "V",
        )
        types |= dict.fromkeys(numbers, "i64")
        return launch.build(
            kernels.no_repeat_ngram_forward_kernel,
            types,
            constants={},
            config=configs.CONFIG,
            acc=self.scores,
            cols=0,
            device_index=self.device_index,
            aligned=False,
        )


@functools.lru_cache(maxsize=1024)
def site_of(
    device_index: int, scores: torch.dtype, tokens: torch.dtype, allowed: bool, padded: bool
) -> Site:
    """Returns the site of these properties, always the same object for equal ones."""
    return Site(device_index, scores, tokens, allowed, padded)


def forward(
    site: Site, scores: Tensor, input_ids: Tensor, allowed: Tensor | None, rule: Rule
) -> None:
    """Launches the kernel, which writes to the scores; not if rows are too short for any n-gram."""
    rows, cols = scores.shape
    length = input_ids.shape[1]
    start = first_window(length, rule.window, rule.prompt_length)
    windows = length - rule.ngram_size + 1 - start
    if windows <= 0:
        return
    # PyTorch does not see the kernel's writes. The version counter shows autograd that the scores
    # have changed.
    torch.autograd.graph.increment_version(scores)
    input_ids, _ = dense(input_ids)
    allowed, _ = vector(allowed)
    site.variant(
        rows,
        -(-windows // configs.CONFIG.block_n),
        scores,
        input_ids,
        allowed,
        rule.pad_token_id,
        *scores.stride(),
        *input_ids.stride(),
        start,
        rule.ngram_size,
        length,
        cols,
    )
