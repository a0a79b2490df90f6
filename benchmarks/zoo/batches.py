"""Batches of the zoo's models that those of `benchmarks.models.batches` do not cover."""

from __future__ import annotations

import torch

from ..models.batches import Batch, Sizes
from ..models.text import Text

__all__ = [
    "captioned",
    "graphs",
    "masked_patches",
    "replaced",
    "segmented",
    "sounds",
    "spectrograms",
    "transcribed",
]

_PATCH = 16  # of masked autoencoders
_CLASSES = 19  # of Cityscapes
_BANDS = 80  # of Whisper
_DISTANCES = 32  # of graphs


def replaced(text: Text, sizes: Sizes) -> Batch:
    """Returns tokens, some of them replaced; the labels are ones where they are."""
    tokens = text.tokens(*sizes)
    is_replaced = text.chosen(tokens, 0.15)
    others = text.tokens(*sizes)
    return {
        "input_ids": torch.where(is_replaced, others, tokens),
        "labels": is_replaced.long(),
    }


def captioned(text: Text, sizes: Sizes) -> Batch:
    """Returns windows of the text as pictures, and others as their captions."""
    count, length, *sides = sizes
    windows = text.windows(count, sides[0] * sides[1] * sides[2])
    return {
        "input_ids": text.tokens(count, length),
        "pixel_values": windows.reshape(count, *sides).float() / 127.5 - 1.0,
        "labels": torch.arange(count, device=windows.device),
    }


def masked_patches(text: Text, sizes: Sizes) -> Batch:
    """Returns windows of the text as pictures, and the noise that orders their patches.

    A masked autoencoder keeps the patches with the least noise, and draws it if there is none. Here
    the noise is a permutation of integers, which has no ties in bf16 either.
    """
    count, *sides = sizes
    windows = text.windows(count, sides[0] * sides[1] * sides[2])
    pictures = windows.reshape(sizes).float() / 127.5 - 1.0
    patches = (sides[1] // _PATCH) * (sides[2] // _PATCH)
    noise = text.noise(pictures.new_empty(count, patches)).argsort(-1)
    return {"pixel_values": pictures, "noise": noise.float()}


def segmented(text: Text, sizes: Sizes) -> Batch:
    """Returns windows of the text as pictures, and others as the classes of their positions."""
    count, *sides = sizes
    windows = text.windows(count, sides[0] * sides[1] * sides[2])
    classes = text.windows(count, sides[1] * sides[2]) % _CLASSES
    return {
        "pixel_values": windows.reshape(sizes).float() / 127.5 - 1.0,
        "labels": classes.reshape(count, *sides[1:]),
    }


def sounds(text: Text, sizes: Sizes) -> Batch:
    """Returns windows of the text as sounds; the class of one is the byte after it."""
    count, length = sizes
    windows = text.windows(count, length + 1)
    return {"input_values": windows[:, :-1].float() / 127.5 - 1.0, "labels": windows[:, -1]}


def spectrograms(text: Text, sizes: Sizes) -> Batch:
    """Returns windows of the text as spectrograms, time first, with the class of each."""
    count, length, bands = sizes
    windows = text.windows(count, length * bands + 1)
    values = windows[:, :-1].float() / 127.5 - 1.0
    return {"input_values": values.reshape(sizes), "labels": windows[:, -1]}


def transcribed(text: Text, sizes: Sizes) -> Batch:
    """Returns spectrograms of 80 bands, bands first, with tokens as labels."""
    count, length, target = sizes
    windows = text.windows(count, _BANDS * length)
    values = windows.float() / 127.5 - 1.0
    return {
        "input_features": values.reshape(count, _BANDS, length),
        "labels": text.tokens(count, target),
    }


def graphs(text: Text, sizes: Sizes) -> Batch:
    """Returns graphs whose nodes and distances are bytes of the text; the labels are numbers."""
    count, nodes = sizes
    windows = text.windows(count, 2 * nodes + nodes * nodes + 1)
    kinds, degrees, distances, last = windows.split([nodes, nodes, nodes * nodes, 1], dim=1)
    return {
        "nodes": kinds,
        "degrees": degrees,
        "distances": (distances % _DISTANCES).view(count, nodes, nodes),
        "labels": last.squeeze(1).float() / 127.5 - 1.0,
    }
