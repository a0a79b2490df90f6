"""Measures the loss after a short training on real text.

It shows whether a provider's model learns as the eager model does.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .providers import prepare
from .text import Text
from .workloads import Workload

__all__ = ["Learned", "final_loss", "learn"]

# The losses of this many last steps are averaged.
_LAST = 5
_LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Learned:
    """The final loss: the mean over seeds, and the range over seeds."""

    mean: float
    spread: float


def learn(
    provider: str,
    workload: Workload,
    text: Text,
    device: torch.device,
    *,
    seeds: Sequence[int],
    steps: int,
) -> Learned:
    """Trains once for each seed, and returns the final loss."""
    losses = [
        final_loss(provider, workload, text.reseeded(seed), device, seed=seed, steps=steps)
        for seed in seeds
    ]
    return Learned(statistics.fmean(losses), max(losses) - min(losses))


def final_loss(
    provider: str, workload: Workload, text: Text, device: torch.device, *, seed: int, steps: int
) -> float:
    """Returns the mean loss of the last steps of AdamW, in bf16 autocast, with dropout.

    All providers have the same weights, from ``seed``, and the same batches, from the seed of
    ``text``.
    """
    model = workload.build(device, seed)
    context = prepare(provider, model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_LEARNING_RATE, fused=device.type == "cuda"
    )
    losses = torch.zeros(steps, device=device)
    with context():
        for step in range(steps):
            batch = workload.batch(text)
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(**batch).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses[step] = loss.detach()
    return float(losses[-_LAST:].mean())
