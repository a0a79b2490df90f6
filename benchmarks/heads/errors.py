"""Measures the errors of losses and gradients against fp64, on a smaller head."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..rowwise.measuring import columns
from .providers import build, gradients, offered, results_of
from .workloads import Workload

__all__ = ["PROVIDERS", "Errors", "errors", "table"]

PROVIDERS = ("fusedops", "compile", "eager", "liger", "torch")
_HEADING = (
    f"{'function':28}{'dtype':10}{'chunks':>7}  {'provider':10}{'loss':>10}{'dx':>10}{'dW':>10}"
    f"{'loss':>8}{'dx':>7}{'dW':>7}  of eager's"
)


@dataclass(frozen=True)
class Errors:
    """The relative errors of a provider, in the Frobenius norm.

    Attributes:
        workload: the loss on its smaller head.
        provider: the provider.
        of_loss: the error of the loss; of several results the largest.
        of_input: the error of the gradient of the student's hidden states.
        of_weight: the error of the gradient of the student's weight.
    """

    workload: Workload
    provider: str
    of_loss: float
    of_input: float
    of_weight: float

    @property
    def all(self) -> tuple[float, float, float]:
        """The errors of loss, input's gradient and weight's gradient."""
        return self.of_loss, self.of_input, self.of_weight


def errors(
    workload: Workload, device: torch.device, wanted: Sequence[str] = PROVIDERS
) -> Iterator[Errors]:
    """Yields the errors of each provider; one that fails is left out, with a message to stderr.

    The results of each row have random gradients, and a loss that is one number a gradient of one.
    """
    torch.manual_seed(0)
    tensors = workload.tensors(device)
    doubles = tuple(
        [
            t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
            for t in tensors
        ]
    )
    exact = results_of(workload.of_logits(*doubles))
    cotangents = [torch.randn_like(r) if r.dim() else torch.ones_like(r) for r in exact]
    exact_gradients = gradients(exact, doubles, cotangents)
    for provider in offered(workload, wanted):
        try:
            call = build(provider, workload)
            results = results_of(call(*tensors))
            in_dtype = [c.to(r.dtype) for c, r in zip(cotangents, results, strict=True)]
            d_input, d_weight = gradients(results, tensors, in_dtype)
        # Whatever a provider raises, the others must be measured.
        except Exception as error:  # noqa: BLE001
            described = f"{type(error).__name__}: {str(error).strip()[:300]}"
            print(f"  {provider}: left out, {described}", file=sys.stderr, flush=True)
            continue
        yield Errors(
            workload,
            provider,
            max([relative(r, e) for r, e in zip(results, exact, strict=True)]),
            relative(d_input, exact_gradients[0]),
            relative(d_weight, exact_gradients[1]),
        )


def relative(result: Tensor, exact: Tensor) -> float:
    """Returns the norm of the difference over the norm of the exact values."""
    exact = exact.detach()
    return float((result.detach().double() - exact).norm() / exact.norm())


def table(measured: Sequence[Errors]) -> str:
    """Returns a line for each loss and provider: the errors, and their ratios to eager's."""
    eager = {each.workload: each for each in measured if each.provider == "eager"}
    lines = [_HEADING]
    for each in measured:
        workload, base = each.workload, eager.get(each.workload)
        ratios = [math.nan] * 3
        if base is not None and each is not base:
            ratios = [a / b if b else math.nan for a, b in zip(each.all, base.all, strict=True)]
        numbers = "".join([f"{error:10.2e}" for error in each.all])
        case = f"{workload.name:28}{workload.dtype_name:10}{workload.chunks:7}  {each.provider:10}"
        lines.append(
            f"{case}{numbers}{columns([(ratios[0], 8, 2), (ratios[1], 7, 2), (ratios[2], 7, 2)])}"
        )
    return "\n".join(lines)
