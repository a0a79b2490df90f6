"""The loss after a short training on real text.

Whether a provider's model learns as eager's does.
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

_LAST = 5  # the steps at the end that are averaged
_RATE = 1e-4


@dataclass(frozen=True)
class Learned:
    """The final loss over seeds."""

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
    """Trains once a seed."""
    losses = [
        final_loss(provider, workload, text.reseeded(seed), device, seed=seed, steps=steps)
        for seed in seeds
    ]
    return Learned(statistics.fmean(losses), max(losses) - min(losses))


def final_loss(
    provider: str, workload: Workload, text: Text, device: torch.device, *, seed: int, steps: int
) -> float:
    """The mean loss of the last steps of AdamW, in bf16 autocast with dropout on.

    The seed decides the weights and, by ``text``, the batches; both are the same for every
    provider.
    """
    model = workload.build(device, seed)
    in_force = prepare(provider, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, fused=device.type == "cuda")
    losses = torch.zeros(steps, device=device)
    with in_force():
        for step in range(steps):
            batch = workload.batch(text)
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(**batch).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses[step] = loss.detach()
    return float(losses[-_LAST:].mean())
