"""A ResNet with bottlenecks (He et al. 2016, arXiv:1512.03385), in channels-last memory format."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models.written import Output

__all__ = ["ResNet"]


class Bottleneck(nn.Module):
    """Three convolutions with BatchNorm, and a shortcut."""

    def __init__(self, wide: int, narrow: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(wide, narrow, 1, bias=False)
        self.conv2 = nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(narrow, 4 * narrow, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(narrow), nn.BatchNorm2d(narrow)
        self.bn3 = nn.BatchNorm2d(4 * narrow)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or wide != 4 * narrow:
            self.shortcut = nn.Sequential(
                nn.Conv2d(wide, 4 * narrow, 1, stride, bias=False), nn.BatchNorm2d(4 * narrow)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(batch, channels, height, width)``; a stride divides height and width."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet-50; ``depths`` are the blocks of its stages."""

    def __init__(
        self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        stages: list[nn.Module] = []
        wide = width
        for stage, depth in enumerate(depths):
            narrow = width * 2**stage
            for block in range(depth):
                stride = 2 if stage and not block else 1
                stages.append(Bottleneck(wide, narrow, stride))
                wide = 4 * narrow
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(wide, classes)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Output:
        """Returns logits, ``(batch, classes)``, and with labels the cross-entropy."""
        x = pixel_values.contiguous(memory_format=torch.channels_last)
        logits = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return Output(None if labels is None else F.cross_entropy(logits, labels), logits)
