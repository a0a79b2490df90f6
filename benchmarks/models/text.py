"""Real text to train on and to continue: the source of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["EOS", "MASK", "PAD", "TOKENS", "Text"]

PAD, EOS, MASK = 0, 1, 2
_FIRST = 3  # the token of byte 0
TOKENS = _FIRST + 256


class Text:
    """The corpus on a device.

    Windows of it are drawn by a generator of their own, whatever a model draws.
    """

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        content = b"".join(module.read_bytes() for module in modules)
        self._bytes = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        self._generator = torch.Generator().manual_seed(seed)

    def reseeded(self, seed: int) -> Text:
        """The same text, with the draws of another seed."""
        other = object.__new__(Text)
        other._bytes, other._generator = self._bytes, torch.Generator().manual_seed(seed)
        return other

    def windows(self, count: int, length: int) -> Tensor:
        """``(count, length)`` bytes, each row a random place of the text."""
        starts = torch.randint(len(self._bytes) - length, (count, 1), generator=self._generator)
        return self._bytes[
            starts.to(self._bytes.device) + torch.arange(length, device=self._bytes.device)
        ].long()

    def tokens(self, count: int, length: int) -> Tensor:
        """The same as token ids."""
        return self.windows(count, length) + _FIRST

    def chosen(self, like: Tensor, fraction: float) -> Tensor:
        """A random mask of the shape, True in about that fraction."""
        return (torch.rand(like.shape, generator=self._generator) < fraction).to(like.device)

    def noise(self, like: Tensor) -> Tensor:
        """Normally distributed numbers of the shape."""
        return torch.randn(like.shape, generator=self._generator).to(like)

    def steps(self, count: int, number: int) -> Tensor:
        """So many random ones of a number of steps."""
        return torch.randint(number, (count,), generator=self._generator).to(self._bytes.device)
