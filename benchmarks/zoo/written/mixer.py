"""An MLP-Mixer (Tolstikhin et al. 2021, arXiv:2105.01601) of the size of Mixer-L/16's layers."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ...models.written import Output

__all__ = ["MLPMixer"]


class MixerBlock(nn.Module):
    """An MLP over patches, on the transpose, and one over channels."""

    def __init__(self, patches: int, width: int, token_width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(
            nn.Linear(patches, token_width), nn.GELU(), nn.Linear(token_width, patches)
        )
        self.channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(batch, patches, width)`` to the same shape."""
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.channels(self.norm2(x))
        return out


class MLPMixer(nn.Module):
    """A classifier of pictures."""

    def __init__(
        self,
        image_size: int = 224,
        patch: int = 16,
        width: int = 1024,
        token_width: int = 512,
        depth: int = 6,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        patches = (image_size // patch) ** 2
        self.stem = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.ModuleList([MixerBlock(patches, width, token_width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Output:
        """Returns logits, ``(batch, classes)``, and with labels the cross-entropy."""
        x = self.stem(pixel_values).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x).mean(1))
        return Output(None if labels is None else F.cross_entropy(logits, labels), logits)
