"""Batches of the benchmarked models, drawn from a text."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .text import MASK, Text

__all__ = [
    "DENSE_FEATURES",
    "TABLE_ROWS",
    "Batch",
    "Sizes",
    "clicks",
    "continuation",
    "masked",
    "next_token",
    "noisy",
    "picture",
    "shifted",
]

Sizes = tuple[int, ...]
Batch = dict[str, Tensor]
DENSE_FEATURES, TABLE_ROWS = 13, 10_000  # of a recommender; 13 as in Criteo's logs
_IGNORED = -100  # the label that Transformers' losses leave out
_STEPS = 1000  # of the diffusion
_HASHED = 4  # the number of bytes that select the row of a table


def next_token(text: Text, sizes: Sizes) -> Batch:
    """Returns tokens, which are the labels too: the models shift them."""
    tokens = text.tokens(*sizes)
    return {"input_ids": tokens, "labels": tokens}


def shifted(name: str) -> Callable[[Text, Sizes], Batch]:
    """Returns a batch function for models that do not shift the labels.

    Args:
        name: the name of the model's argument for the input tokens.
    """

    def batch(text: Text, sizes: Sizes) -> Batch:
        count, length = sizes
        tokens = text.tokens(count, length + 1)
        return {name: tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    return batch


def masked(text: Text, sizes: Sizes) -> Batch:
    """Returns tokens, some of them masked; only the masked ones have labels."""
    tokens = text.tokens(*sizes)
    is_masked = text.chosen(tokens, 0.15)
    return {
        "input_ids": tokens.masked_fill(is_masked, MASK),
        "labels": tokens.masked_fill(~is_masked, _IGNORED),
    }


def continuation(text: Text, sizes: Sizes) -> Batch:
    """Returns tokens, with the tokens after them as labels."""
    count, length, target = sizes
    tokens = text.tokens(count, length + target)
    return {"input_ids": tokens[:, :length].contiguous(), "labels": tokens[:, length:].contiguous()}


def picture(text: Text, sizes: Sizes) -> Batch:
    """Returns windows of the text as pictures; the class of one is the byte after it."""
    count, *sides = sizes
    windows = text.windows(count, sides[0] * sides[1] * sides[2] + 1)
    return {
        "pixel_values": windows[:, :-1].reshape(sizes).float() / 127.5 - 1.0,
        "labels": windows[:, -1],
    }


def noisy(text: Text, sizes: Sizes) -> Batch:
    """Returns windows of the text as latents, with noise that increases with the step.

    The labels are the noise. The class of a window is the byte after it.
    """
    count, patches = sizes
    side = 2 * math.isqrt(patches)  # a patch has 2 x 2 positions
    windows = text.windows(count, 4 * side * side + 1)  # 4 channels
    latents = windows[:, :-1].reshape(count, 4, side, side).float() / 127.5 - 1.0
    noise, steps = text.noise(latents), text.steps(count, _STEPS)
    level = (steps / _STEPS).view(-1, 1, 1, 1)
    mixed = (1 - level).sqrt() * latents + level.sqrt() * noise
    return {"x": mixed, "t": steps, "y": windows[:, -1], "labels": noise}


def clicks(text: Text, sizes: Sizes) -> Batch:
    """Returns windows of the text as features of a recommender.

    The hash of four bytes selects the row of a table. As in logs, some rows are frequent. The label
    is one if the byte after the window is a letter or above, else zero.
    """
    count, tables = sizes
    windows = text.windows(count, _HASHED * tables + DENSE_FEATURES + 1)
    categories, dense, following = windows.split([_HASHED * tables, DENSE_FEATURES, 1], dim=1)
    powers = 256 ** torch.arange(_HASHED, device=windows.device)
    numbers = (categories.view(count, tables, _HASHED) * powers).sum(-1)
    return {
        "dense": dense.float() / 127.5 - 1.0,
        "sparse": numbers % TABLE_ROWS,
        "labels": (following.squeeze(1) >= ord("A")).float(),
    }
