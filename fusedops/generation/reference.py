"""The generation family's reference implementation in PyTorch's operators.

It runs on devices without kernels, and for scores that require a gradient. Tests compare the kernel
with it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Rule", "banned", "first_window", "no_repeat_ngram"]


class Rule(NamedTuple):
    """The constants of a call: arguments of `fusedops.no_repeat_ngram`."""

    ngram_size: int
    window: int | None = None
    prompt_length: int = 0
    pad_token_id: int | None = None


def first_window(length: int, window: int | None, prompt_length: int) -> int:
    """Returns the first position at which an n-gram that counts may begin."""
    return prompt_length if window is None else max(prompt_length, length - window)


def banned(input_ids: Tensor, cols: int, allowed: Tensor | None, rule: Rule) -> Tensor | None:
    """Returns a mask, ``(B, cols)``, that is True for tokens that would repeat an n-gram.

    Returns None if the rows are too short for any.
    """
    ngram_size, window, prompt_length, pad_token_id = rule
    length = input_ids.shape[1]
    start = first_window(length, window, prompt_length)
    window_count = length - ngram_size + 1 - start
    if window_count <= 0:
        return None
    # A window is ``ngram_size`` adjacent tokens. A window bans its last token if its other tokens
    # are equal to the last tokens of the row. ``matches`` is True for windows that ban a token.
    last = start + ngram_size - 1  # the position of the first window's last token
    tokens = input_ids[:, last:].long()
    matches = (tokens >= 0) & (tokens < cols)
    for distance in range(1, ngram_size):
        window_tokens = input_ids[:, last - distance : length - distance]
        matches = matches & (window_tokens == input_ids[:, -distance, None])
    if pad_token_id is not None:
        # For each position, the number of tokens up to it that are not padding. It is 0 where a
        # window would begin in the leading padding. Tokens are compared as int64: for int32 tokens,
        # PyTorch would compare only the lower bits of the padding token.
        unpadded = (input_ids.long() != pad_token_id).cumsum(1)
        matches = matches & unpadded[:, start : start + window_count].bool()
    # Windows that do not match write to an extra column. So no shape depends on the number of bans,
    # which would have to be copied from the GPU.
    column = torch.where(matches, tokens, cols)
    mask = torch.zeros(input_ids.shape[0], cols + 1, dtype=torch.bool, device=input_ids.device)
    mask = mask.scatter(1, column, True)[:, :cols]
    return mask if allowed is None else mask & ~allowed


def no_repeat_ngram(
    scores: Tensor, input_ids: Tensor, allowed: Tensor | None, rule: Rule, *, inplace: bool = False
) -> Tensor:
    """Returns the scores, with minus infinity for the banned tokens."""
    mask = banned(input_ids, scores.shape[1], allowed, rule)
    if mask is None:
        return scores if inplace else scores.clone()
    if inplace:
        return scores.masked_fill_(mask, -torch.inf)
    return scores.masked_fill(mask, -torch.inf)
