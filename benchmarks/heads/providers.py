"""The providers: this package, the bare products, whole logits, Liger-Kernel and PyTorch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedops.tune.timing import events

from .. import timing
from . import functions
from .workloads import Workload

__all__ = [
    "OURS",
    "PLAIN",
    "PROVIDERS",
    "Products",
    "build",
    "gauge",
    "gradients",
    "offered",
    "results_of",
    "step",
]

# In the order of measuring. The first has the floor of the others.
PROVIDERS = ("products", "fusedops", "compile", "eager", "liger", "torch")
OURS = ("fusedops",)
PLAIN = ("products", "eager", "liger", "torch")
_WARM_UP, _ROUNDS = 2, 5
_PEERS = {"liger": functions.liger_cross_entropy, "torch": functions.torch_cross_entropy}


@dataclass(frozen=True)
class Products:
    """The matrix products that a loss cannot do without, of whole logits and nothing else."""

    workload: Workload

    def prepared(self, tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor, bool]]:
        """Returns, of each head, the rows that count and the weight in bf16, and if it is trained.

        The conversion is not part of the products.
        """
        count = 4 if self.workload.has_teacher else 2
        rows, heads = self.workload.counted, tensors[:count]
        return [
            (x.detach()[:rows].bfloat16(), weight.detach().bfloat16(), x.requires_grad)
            for x, weight in zip(heads[::2], heads[1::2], strict=True)
        ]

    def run(self, heads: Sequence[tuple[Tensor, Tensor, bool]]) -> list[Tensor]:
        """Returns products in the shapes of the gradients, of logits instead of their gradients."""
        results = []
        for x, weight, is_trained in heads:
            logits = torch.mm(x, weight.t())
            if not is_trained:
                del logits
                continue
            if self.workload.recomputes:
                torch.mm(x, weight.t(), out=logits)
            results += [torch.mm(logits, weight), torch.mm(logits.t(), x)]
            del logits
        return results


def offered(workload: Workload, wanted: Sequence[str] = PROVIDERS) -> list[str]:
    """Returns the wanted providers that have the loss."""
    return [name for name in wanted if name not in _PEERS or name in workload.peers]


def build(provider: str, workload: Workload) -> Callable[..., Any]:
    """Returns a provider's callable, which takes the workload's tensors."""
    if provider == "products":
        return Products(workload).run
    if provider == "fusedops":
        return _in_context(partial(workload.fused, chunk_mib=workload.chunk_mib), workload)
    if provider in _PEERS:
        return _in_context(_PEERS[provider], workload)
    if provider == "eager":
        return _in_context(workload.of_logits, workload)
    compiled = torch.compile(workload.of_logits, fullgraph=True, dynamic=False)
    return _in_context(compiled, workload)


def _in_context(call: Callable[..., Any], workload: Workload) -> Callable[..., Any]:
    def in_context(*tensors: Tensor) -> Any:
        with workload.context(tensors[0].device.type):
            return call(*tensors)

    return in_context


def gradients(
    outputs: tuple[Tensor, ...], tensors: Sequence[Tensor], cotangents: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Returns the gradients of a loss's results; without cotangents that of each result is one."""
    inputs = tuple([tensor for tensor in tensors if tensor.requires_grad])
    ones = [torch.ones_like(out) for out in outputs]
    return torch.autograd.grad(outputs, inputs, cotangents or ones)


def results_of(out: Any) -> tuple[Tensor, ...]:
    """Returns a loss's results as a tuple."""
    return (out,) if isinstance(out, Tensor) else tuple(out)


def step(call: Callable[..., Any], tensors: tuple[Tensor, ...]) -> Callable[[], Sequence[Tensor]]:
    """Returns a whole step of a provider's callable: a forward and a backward.

    It returns the gradients.
    """
    owner = getattr(call, "__self__", None)
    if isinstance(owner, Products):
        return partial(call, owner.prepared(tensors))
    return partial(_train, call, tensors)


def _train(call: Callable[..., Any], tensors: tuple[Tensor, ...]) -> Sequence[Tensor]:
    return gradients(results_of(call(*tensors)), tensors)


def gauge(
    call: Callable[..., Any], sets: Sequence[tuple[Tensor, ...]], mode: str
) -> tuple[float, float]:
    """Returns the microseconds of a step, and its peak memory beyond the gradients in MiB.

    A step takes milliseconds, and some providers wait for the device: it is timed by events, and
    not in a CUDA graph. The time is the median of some steps.
    """
    (tensors,) = sets
    whole = step(call, tensors)
    for _ in range(_WARM_UP):
        size = sum([gradient.nbytes for gradient in whole()])
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    peak = timing.peak_mib(whole)
    return statistics.median(events(whole, _ROUNDS)) * 1e3, peak - size / 2**20
