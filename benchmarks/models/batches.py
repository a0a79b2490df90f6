"""Batches of the benchmarked models, drawn from a text."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from .text import MASK, Text

__all__ = ["Batch", "Sizes", "continuation", "masked", "next_token", "noisy", "picture", "shifted"]

Sizes = tuple[int, ...]
Batch = dict[str, Tensor]
_IGNORED = -100  # the label that Transformers' losses leave out
_STEPS = 1000  # of the diffusion


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
