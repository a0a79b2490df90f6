"""The generation family's reference implementation in PyTorch's operators.

It runs on devices without kernels, where scores require a gradient, and as the tests' oracle.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Rule", "banned", "first_window", "no_repeat_ngram"]


class Rule(NamedTuple):
    """The constants of a call, as `fusedops.no_repeat_ngram` takes them."""

    ngram_size: int
    window: int | None = None
    prompt_length: int = 0
    pad_token_id: int | None = None


def first_window(length: int, window: int | None, prompt_length: int) -> int:
    """The position at which the first n-gram that counts may begin."""
    return prompt_length if window is None else max(prompt_length, length - window)


def banned(input_ids: Tensor, cols: int, allowed: Tensor | None, rule: Rule) -> Tensor | None:
    """``(B, cols)``, True for the tokens that would repeat an n-gram.

    None where the rows are too short for any.
    """
    ngram_size, window, prompt_length, pad_token_id = rule
    length = input_ids.shape[1]
    start = first_window(length, window, prompt_length)
    count = length - ngram_size + 1 - start
    if count <= 0:
        return None
    last = start + ngram_size - 1
    tokens = input_ids[:, last:].long()
    same = (tokens >= 0) & (tokens < cols)
    for behind in range(1, ngram_size):
        same = same & (input_ids[:, last - behind : length - behind] == input_ids[:, -behind, None])
    if pad_token_id is not None:
        # The sum counts the tokens up to a window's first one that are not padding. It is zero for
        # windows that begin in the leading padding.
        # PyTorch would compare int32 tokens with the lower bits alone.
        unpadded = (input_ids.long() != pad_token_id).cumsum(1)
        same = same & unpadded[:, start : start + count].bool()
    # Windows without a ban write to an extra column. So shapes do not depend on the number of bans,
    # which would have to be copied from the GPU.
    column = torch.where(same, tokens, cols)
    mask = torch.zeros(input_ids.shape[0], cols + 1, dtype=torch.bool, device=input_ids.device)
    mask = mask.scatter(1, column, True)[:, :cols]
    return mask if allowed is None else mask & ~allowed


def no_repeat_ngram(
    scores: Tensor, input_ids: Tensor, allowed: Tensor | None, rule: Rule, *, inplace: bool = False
) -> Tensor:
    """The scores with minus infinity for the banned tokens."""
    mask = banned(input_ids, scores.shape[1], allowed, rule)
    if mask is None:
        return scores if inplace else scores.clone()
    if inplace:
        return scores.masked_fill_(mask, -torch.inf)
    return scores.masked_fill(mask, -torch.inf)
