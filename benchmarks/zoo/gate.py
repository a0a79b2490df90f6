"""The gate before timing: whether a provider's gradients or outputs are correct.

The reference is the eager model in fp32, with the same weights and the same batch. The yardstick is
the eager model in the precision that is timed. A provider is correct if its relative distance from
the reference is at most twice the yardstick's, plus one rounding to bf16. In training the loss must
fulfil this too, by itself.

With dropout, each of them draws other masks. Gradients under two masks are about as far from each
other as under any other two, so the rule holds unchanged, but it is as wide as the masks' effect.
So where the yardstick is far from the reference, gradients and losses are means over several steps,
and a loss may also differ by four standard errors of the difference of two such means. There are as
many steps as make the yardstick narrow: a wide one would let gradients of half the size pass.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models.providers import Contender, contender
from ..models.text import Text
from ..models.workloads import Workload

__all__ = ["Reference", "Verdict", "judged", "reference_of"]

_ROUNDING = torch.finfo(torch.bfloat16).eps / 2
# Above this distance of the yardstick, which only dropout and choices of experts explain, results
# are means over several steps: the first of these numbers that makes the yardstick narrow.
_FAR, _STEPS = 0.05, (8, 32, 128, 512)
# A narrow yardstick. Let g be the gradient, and r * |g|**2 the squared noise of each mean, which is
# across g. As parts of the reference's square, (1 + r) * |g|**2, the yardstick's squared distance is
# 2 r, and that of half the gradient (1 + 5 r) / 4. Half the gradient is farther than twice the
# yardstick if r < 1/27: if the yardstick is below sqrt(2 r / (1 + r)) = 0.267.
_NARROW = 0.25
_OTHER_SEED = 1  # than that with which models are built


@dataclass(frozen=True)
class Verdict:
    """The distances from the reference, and the largest that are correct.

    Attributes:
        difference: of all gradients, or of all outputs.
        allowed: the limit of it.
        of_loss: of the loss; 0 in inference.
        allowed_of_loss: the limit of it.
    """

    difference: float
    allowed: float
    of_loss: float = 0.0
    allowed_of_loss: float = 0.0

    @property
    def wrong(self) -> str:
        """Why the results are not correct; empty if they are."""
        if self.allowed > 2 * _NARROW + _ROUNDING:
            return f"not judged: eager's bf16 itself differs so much that {self.allowed:.3g} is allowed"
        # Not ``>``, so that NaN is wrong too.
        if not self.difference <= self.allowed:
            return f"wrong: differs by {self.difference:.3g}, allowed {self.allowed:.3g}"
        if not self.of_loss <= self.allowed_of_loss:
            return f"wrong: loss differs by {self.of_loss:.3g}, allowed {self.allowed_of_loss:.3g}"
        return ""


@dataclass(frozen=True)
class Reference:
    """The results in fp32, and the yardstick's distances from them.

    Attributes:
        results: the results.
        yardstick: the distance of the yardstick's gradients or outputs.
        allowed_of_loss: the largest distance of a loss that is correct.
        steps: the number of steps over which results are means.
    """

    results: Results
    yardstick: float
    allowed_of_loss: float
    steps: int


@dataclass(frozen=True)
class Results:
    """The losses of steps with their mean gradients, or no losses and the outputs of inference."""

    losses: list[float]
    tensors: list[Tensor | None]


def reference_of(workload: Workload, device: torch.device, text: Text) -> Reference:
    """Returns the reference of a workload; the batch is drawn from ``text``."""
    reference = _reference(workload, device, text, steps=1)
    if workload.mode != "train" or reference.yardstick <= _FAR:
        return reference
    for steps in _STEPS:
        reference = _reference(workload, device, text, steps=steps)
        if reference.yardstick <= _NARROW:
            break
    return reference


def _reference(workload: Workload, device: torch.device, text: Text, *, steps: int) -> Reference:
    exact = _results(_in_fp32(workload, device, text), steps)
    eager = contender("eager", workload, device, text.reseeded(0))
    torch.manual_seed(_OTHER_SEED)  # other masks of dropout
    results = _results(eager, steps)
    allowed = 2 * _distance_of_loss(results, exact) + 4 * _error_of_means(exact) + _ROUNDING
    return Reference(exact, _distance(results, exact), allowed, steps)


def judged(built: Contender, reference: Reference) -> Verdict:
    """Runs steps of a provider's model, and compares its results."""
    with built.context():
        results = _results(built, reference.steps)
    return Verdict(
        difference=_distance(results, reference.results),
        allowed=2 * reference.yardstick + _ROUNDING,
        of_loss=_distance_of_loss(results, reference.results),
        allowed_of_loss=reference.allowed_of_loss,
    )


def _in_fp32(workload: Workload, device: torch.device, text: Text) -> Contender:
    """Returns the eager model in fp32 with a step without autocast."""
    model, batch = workload.build(device).float(), workload.batch(text.reseeded(0))
    for name, value in batch.items():
        if value.is_floating_point():
            batch[name] = value.float()

    def train() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = model(**batch).loss
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def infer() -> Any:
        return model(**batch)

    return Contender(model, nullcontext, train if workload.mode == "train" else infer)


def _results(built: Contender, steps: int) -> Results:
    """Returns the loss with the gradients, as means over the steps, or the outputs of one."""
    if not built.model.training:
        return Results([], list(_floating(built.step())))
    parameters, losses = list(built.model.parameters()), list[float]()
    sums: list[Tensor | None] = [None] * len(parameters)
    for _ in range(steps):
        loss = built.step()
        assert isinstance(loss, Tensor)
        losses.append(float(loss))
        for index, parameter in enumerate(parameters):
            gradient, before = parameter.grad, sums[index]
            sums[index] = gradient if before is None or gradient is None else before + gradient
        built.clear()
    means = [None if total is None else total / steps for total in sums]
    return Results(losses, means)


def _floating(output: Any) -> Iterator[Tensor]:
    """Yields the floating-point tensors in an output, in their order."""
    values: Sequence[Any] = ()
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        values = list(output.values())
    elif isinstance(output, list | tuple):
        values = output
    for value in values:
        yield from _floating(value)


def _distance(actual: Results, expected: Results) -> float:
    """Returns the norm of all differences, as a fraction of the norm of all expected values."""
    differences, norms = list[Tensor](), list[Tensor]()
    for ours, theirs in zip(actual.tensors, expected.tensors, strict=True):
        ours, theirs = _zeros_if_none(ours, theirs), _zeros_if_none(theirs, ours)
        if ours is not None and theirs is not None:
            differences.append(torch.linalg.vector_norm(ours.float() - theirs.float()))
            norms.append(torch.linalg.vector_norm(theirs.float()))
    return _norm(differences) / (_norm(norms) or 1.0)


def _zeros_if_none(tensor: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Returns the tensor: a parameter that is not used has no gradient, or one of zeros."""
    if tensor is None and other is not None:
        return torch.zeros_like(other)
    return tensor


def _norm(norms: list[Tensor]) -> float:
    return float(torch.stack(norms).double().norm()) if norms else 0.0


def _distance_of_loss(actual: Results, expected: Results) -> float:
    """Returns the difference of the mean losses, as a fraction of the expected mean."""
    if not expected.losses:
        return 0.0
    mean = statistics.fmean(expected.losses)
    distance = abs(statistics.fmean(actual.losses) - mean)
    return distance / (abs(mean) or 1.0) if math.isfinite(distance) else math.inf


def _error_of_means(results: Results) -> float:
    """Returns the standard error of the difference of two means, as a fraction of the mean."""
    count = len(results.losses)
    if count < 2:
        return 0.0
    mean = abs(statistics.fmean(results.losses)) or 1.0
    return statistics.stdev(results.losses) * math.sqrt(2 / count) / mean
