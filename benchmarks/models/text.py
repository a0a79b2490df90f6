"""Text for training and prompts: the source of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["EOS", "MASK", "PAD", "TOKENS", "Text"]

PAD, EOS, MASK = 0, 1, 2
_FIRST = 3  # the token id of byte 0
TOKENS = _FIRST + 256


class Text:
    """The text on a device, and random draws for batches.

    The draws have a generator of their own, so they do not depend on the draws of a model.
    """

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        content = b"".join(module.read_bytes() for module in modules)
        self._bytes = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        self._generator = torch.Generator().manual_seed(seed)

    def reseeded(self, seed: int) -> Text:
        """Returns the same text with a generator of another seed."""
        other = object.__new__(Text)
        other._bytes, other._generator = self._bytes, torch.Generator().manual_seed(seed)
        return other

    def windows(self, count: int, length: int) -> Tensor:
        """Returns ``(count, length)`` bytes: windows of the text at random positions."""
        starts = torch.randint(len(self._bytes) - length, (count, 1), generator=self._generator)
        offsets = torch.arange(length, device=self._bytes.device)
        return self._bytes[starts.to(self._bytes.device) + offsets].long()

    def tokens(self, count: int, length: int) -> Tensor:
        """Returns windows of the text as token ids."""
        return self.windows(count, length) + _FIRST

    def chosen(self, like: Tensor, fraction: float) -> Tensor:
        """Returns a random mask in the shape of ``like``, True for about this fraction."""
        return (torch.rand(like.shape, generator=self._generator) < fraction).to(like.device)

    def noise(self, like: Tensor) -> Tensor:
        """Returns normally distributed numbers in the shape of ``like``."""
        return torch.randn(like.shape, generator=self._generator).to(like)

    def steps(self, count: int, bound: int) -> Tensor:
        """Returns ``count`` random integers below ``bound``."""
        return torch.randint(bound, (count,), generator=self._generator).to(self._bytes.device)
