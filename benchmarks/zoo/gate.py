"""The gate before timing: whether a provider's gradients or outputs are correct.

The reference is the eager model in fp32, with the same weights and the same batch. The yardstick is
the eager model in the precision that is timed. A provider is correct if its relative distance from
the reference is at most twice the yardstick's, plus one rounding to bf16. In training the loss must
fulfil this too, by itself.

With dropout, each of them draws another mask. Gradients under two masks are about as far from each
other as under any other two, so the rule holds unchanged; it then is as wide as the masks' effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..models.providers import Contender, contender
from ..models.text import Text
from ..models.workloads import Workload

__all__ = ["Reference", "Verdict", "judged", "reference_of"]

_ROUNDING = torch.finfo(torch.bfloat16).eps / 2


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
        # Not ``>``, so that NaN is wrong too.
        if not self.difference <= self.allowed:
            return f"wrong: differs by {self.difference:.3g}, allowed {self.allowed:.3g}"
        if not self.of_loss <= self.allowed_of_loss:
            return f"wrong: loss differs by {self.of_loss:.3g}, allowed {self.allowed_of_loss:.3g}"
        return ""


@dataclass(frozen=True)
class Reference:
    """The results in fp32, and the yardstick's distances from them."""

    results: Results
    yardstick: float
    yardstick_of_loss: float


@dataclass(frozen=True)
class Results:
    """The loss of a step with its gradients, or no loss and the outputs of inference."""

    loss: float | None
    tensors: list[Tensor | None]


def reference_of(workload: Workload, device: torch.device, text: Text) -> Reference:
    """Returns the reference of a workload; the batch is drawn from ``text``."""
    exact = _in_fp32(workload, device, text)
    eager = contender("eager", workload, device, text.reseeded(0))
    results = _results(eager)
    return Reference(exact, _distance(results, exact), _distance_of_loss(results, exact))


def judged(built: Contender, reference: Reference) -> Verdict:
    """Runs a step of a provider's model, and compares its results."""
    with built.context():
        results = _results(built)
    return Verdict(
        difference=_distance(results, reference.results),
        allowed=2 * reference.yardstick + _ROUNDING,
        of_loss=_distance_of_loss(results, reference.results),
        allowed_of_loss=2 * reference.yardstick_of_loss + _ROUNDING,
    )


def _in_fp32(workload: Workload, device: torch.device, text: Text) -> Results:
    """Returns the results of the eager model without autocast, in fp32."""
    model, batch = workload.build(device).float(), workload.batch(text.reseeded(0))
    for name, value in batch.items():
        if value.is_floating_point():
            batch[name] = value.float()
    if workload.mode == "train":
        loss = model(**batch).loss
        loss.backward()
        return _of_training(loss.detach(), model)
    with torch.no_grad():
        return Results(None, list(_floating(model(**batch))))


def _results(built: Contender) -> Results:
    output = built.step()
    if not built.model.training:
        return Results(None, list(_floating(output)))
    assert isinstance(output, Tensor)
    results = _of_training(output, built.model)
    built.clear()
    return results


def _of_training(loss: Tensor, model: nn.Module) -> Results:
    return Results(float(loss), [parameter.grad for parameter in model.parameters()])


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
    if actual.loss is None or expected.loss is None:
        return 0.0
    distance = abs(actual.loss - expected.loss)
    return distance / (abs(expected.loss) or 1.0) if math.isfinite(distance) else math.inf
