"""The workloads: a loss, the sizes of its head, and its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedops.losses.chunks import MIB, chunk_rows

from ..cases import dtype_name
from . import functions

__all__ = ["FULL", "FUNCTIONS", "SMALL", "TINY", "Head", "Workload", "small", "workloads"]

_IGNORED = -100
_LOGITS = torch.bfloat16  # of all workloads

# Rows, columns of hidden states, and classes.
Head = tuple[int, int, int]


@dataclass(frozen=True)
class _Sizes:
    """The sizes of all heads.

    Attributes:
        cross_entropy: of cross-entropy, the most important first.
        log_probs: of log-probabilities.
        kl_divergence: of both student and teacher.
    """

    cross_entropy: tuple[Head, ...]
    log_probs: Head
    kl_divergence: Head


FULL = _Sizes(
    cross_entropy=((8192, 4096, 128_256), (8192, 2048, 151_936), (16_384, 2048, 248_320)),
    log_probs=(8192, 4096, 131_072),
    kl_divergence=(8192, 2048, 128_256),
)
TINY = _Sizes(cross_entropy=((12, 16, 40),), log_probs=(12, 16, 40), kl_divergence=(12, 16, 40))
# The head on which errors are measured: in fp64 it fits, and takes less than a second.
SMALL: Head = (2048, 1024, 32_000)


@dataclass(frozen=True)
class Workload:
    """A loss, and the head of its logits.

    Attributes:
        name: the loss's name.
        head: the rows, the columns of hidden states, and the classes.
        whole: the loss of whole logits, of the student's and the teacher's if there is one.
        fused: the same loss of hidden states and weights, by this package.
        has_teacher: whether a second head, without gradients, comes instead of targets.
        autocast: whether hidden states and weights are in fp32, under autocast.
        ignored: the fraction of targets that are ignored.
        recomputes: whether the backward needs the logits again: the loss has a result for each row.
        peers: the providers that have this loss besides those that have all.
        chunk_mib: the budget of this package's chunks; None for the default.
    """

    name: str
    head: Head
    whole: Callable[..., Any]
    fused: Callable[..., Any]
    has_teacher: bool = False
    autocast: bool = False
    ignored: float = 0.0
    recomputes: bool = False
    peers: tuple[str, ...] = ()
    chunk_mib: float | None = None

    def tensors(self, device: torch.device) -> tuple[Tensor, ...]:
        """Returns random hidden states and weights, and the targets or the teacher's.

        Logits have a variance of one. The rows of ignored targets are random.
        """
        rows, _, classes = self.head
        first = self._hidden_and_weight(device, trained=True)
        if self.has_teacher:
            return (*first, *self._hidden_and_weight(device, trained=False))
        target = torch.randint(classes, (rows,), device=device)
        if self.ignored:
            target[torch.randperm(rows, device=device)[self.counted :]] = _IGNORED
        return (*first, target)

    def _hidden_and_weight(self, device: torch.device, *, trained: bool) -> tuple[Tensor, Tensor]:
        rows, cols, classes = self.head
        options: Any = {"device": device, "dtype": torch.float32 if self.autocast else _LOGITS}
        x = torch.randn(rows, cols, **options)
        weight = torch.randn(classes, cols, **options).mul_(1.0 / math.sqrt(cols))
        return x.requires_grad_(trained), weight.requires_grad_(trained)

    def of_logits(self, *tensors: Tensor) -> Any:
        """Returns the loss of whole logits."""
        count = 4 if self.has_teacher else 2
        heads, others = tensors[:count], tensors[count:]
        logits = [F.linear(x, w) for x, w in zip(heads[::2], heads[1::2], strict=True)]
        return self.whole(*logits, *others)

    def context(self, device_type: str) -> AbstractContextManager[Any]:
        """Returns the context of a forward."""
        return torch.autocast(device_type, _LOGITS) if self.autocast else nullcontext()

    def moved(self, mode: str) -> int:
        """Returns the bytes of inputs and gradients; the floor is the time of the products."""
        rows, cols, classes = self.head
        times = 2 if mode == "fwd_bwd" else 1
        return times * (rows + classes) * cols * (4 if self.autocast else _LOGITS.itemsize)

    @property
    def counted(self) -> int:
        """The number of rows whose targets are not ignored."""
        return round(self.head[0] * (1.0 - self.ignored))

    @property
    def row_bytes(self) -> int:
        """The bytes of a row of logits."""
        return (2 if self.has_teacher else 1) * self.head[2] * _LOGITS.itemsize

    @property
    def chunks(self) -> int:
        """The number of chunks in which this package processes the rows."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        _, cols, classes = self.head
        # Of a weight in fp32 the gradient is in fp32 anyway.
        wide_bytes = None if self.autocast else 4 * classes * cols
        budget = self.chunk_mib
        rows = chunk_rows(self.name, self.counted, self.row_bytes, budget, device, wide_bytes)
        return math.ceil(self.counted / rows)

    @property
    def shape_name(self) -> str:
        """The shape's name in the results file: rows, columns of hidden states, classes."""
        return "x".join(map(str, self.head))

    @property
    def dtype_name(self) -> str:
        """The dtype's name in the results file."""
        return "autocast" if self.autocast else dtype_name(_LOGITS)


def workloads(names: Sequence[str] = (), sizes: _Sizes = FULL) -> list[Workload]:
    """Returns the workloads of the named losses, or of all if none are named."""
    return [workload for workload in _all(sizes) if not names or workload.name in names]


def small(workload: Workload, head: Head = SMALL) -> Workload:
    """Returns a workload with a smaller head, whose rows are processed in as many chunks."""
    smaller = replace(workload, head=head)
    rows = math.ceil(smaller.counted / workload.chunks)
    return replace(smaller, chunk_mib=rows * smaller.row_bytes / MIB)


def _all(sizes: _Sizes) -> Iterator[Workload]:
    by_head = [
        Workload(
            name="cross_entropy",
            head=head,
            whole=functions.cross_entropy,
            fused=functions.fused_cross_entropy,
            peers=("liger", "torch"),
        )
        for head in sizes.cross_entropy
    ]
    yield from by_head
    (first, *_) = by_head
    # PyTorch's chunks take no part in autocast.
    yield replace(first, autocast=True, peers=("liger",))
    yield replace(first, name="cross_entropy_half_ignored", ignored=0.5)
    yield Workload(
        name="log_probs_entropy",
        head=sizes.log_probs,
        whole=functions.log_probs,
        fused=functions.fused_log_probs,
        recomputes=True,
    )
    yield Workload(
        name="kl_divergence",
        head=sizes.kl_divergence,
        whole=functions.kl_divergence,
        fused=functions.fused_kl_divergence,
        has_teacher=True,
    )


FUNCTIONS = tuple(dict.fromkeys(workload.name for workload in workloads()))
