"""Losses of matrix products for the tests: tensors, references, and checks against fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedops.losses import head
from support import DEVICE
from tolerances import unit_roundoff

__all__ = ["IGNORED", "Head", "Products", "budget", "check", "cross_entropy", "new_head"]

IGNORED = -100
CLASSES, COLS = 11, 5


class Head(NamedTuple):
    """Hidden states, the head's weight and bias, and targets, of which some are ignored."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    target: Tensor


def new_head(
    rows: int = 8, *, dtype: torch.dtype = torch.float32, classes: int = CLASSES, cols: int = COLS
) -> Head:
    """Returns a head that needs gradients. Every third target is ignored, from the second on."""
    shapes = (rows, cols), (classes, cols), (classes,)
    tensors = [torch.randn(s, device=DEVICE, dtype=dtype).requires_grad_() for s in shapes]
    target = torch.randint(classes, (rows,), device=DEVICE)
    target[1::3] = IGNORED
    return Head(*tensors, target)


def budget(rows: int, classes: int = CLASSES, dtype: torch.dtype = torch.float32) -> float:
    """Returns the ``chunk_mib`` with which chunks have at most this many rows."""
    return (rows + 0.5) * classes * dtype.itemsize / 2**20


def cross_entropy(x: Tensor, w: Tensor, b: Tensor | None, target: Tensor, **options: Any) -> Tensor:
    """Returns PyTorch's cross-entropy of whole logits, in fp32 or fp64."""
    logits = F.linear(x, w, b)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, target, **options)


def check(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    leaves: Sequence[Tensor],
    *arguments: Any,
    cancelled: float = 1.0,
    rounded: float = 0.0,
) -> None:
    """Checks results, and gradients from random cotangents, against the reference in fp64.

    An error is at most twice that of the reference at the leaves' dtype, plus 32 roundings in fp32
    and two to the result's dtype, relative to the largest element. Sums have at most 16 terms here.
    Logits are at most 16, so that a rounding of one is up to 16 of its exponential.

    Args:
        function: takes the leaves and the arguments; returns a tensor, or a tuple of them.
        reference: likewise, in PyTorch's operators.
        leaves: the tensors that need gradients.
        arguments: the rest.
        cancelled: how many times larger than a result the terms are that cancel in it.
        rounded: the sum of the logits that are rounded to the leaves' dtype elsewhere than in the
            reference, over all that enter a result. A loss changes by at most the sum of their changes.
    """
    results = _outputs(function(*leaves, *arguments))
    cotangents = [torch.randn_like(r) for r in results]
    ours = (*[r.detach() for r in results], *torch.autograd.grad(results, leaves, cotangents))
    assert not any(g.requires_grad for g in ours[len(results) :]), "a gradient has a history"

    def at(dtype: torch.dtype | None) -> tuple[Tensor, ...]:
        tensors = [t.detach().to(dtype or t.dtype).requires_grad_() for t in leaves]
        rest = [
            a.to(dtype) if dtype and isinstance(a, Tensor) and a.is_floating_point() else a
            for a in arguments
        ]
        outs = _outputs(reference(*tensors, *rest))
        grads = [c.to(out.dtype) for c, out in zip(cotangents, outs, strict=True)]
        return (*[out.detach() for out in outs], *torch.autograd.grad(outs, tensors, grads))

    names = [f"result {i}" for i in range(len(results))]
    names += [f"gradient {i}" for i in range(len(leaves))]
    for name, got, exact, eager in zip(names, ours, at(torch.float64), at(None), strict=True):
        assert got.shape == exact.shape and torch.isfinite(got).all(), name
        if not got.numel():
            continue
        largest = float(exact.abs().max())
        accumulator = torch.float64 if got.dtype == torch.float64 else torch.float32
        slack = (
            32 * cancelled * unit_roundoff(accumulator) + 2 * unit_roundoff(got.dtype)
        ) * largest
        if name.startswith("result"):
            slack += rounded * unit_roundoff(leaves[0].dtype)
        allowed = 2 * float((eager.double() - exact).abs().max()) + slack
        error = float((got.double() - exact).abs().max())
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def _outputs(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


class Products:
    """Counts the rows of logits that a block computes, and the products of gradients."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.gradients = 0

    def __enter__(self) -> Products:
        logits_of, product = head.logits_of, head.product

        def count_rows(rows: Tensor, *args: Any) -> None:
            self.rows.append(rows.shape[0])
            logits_of(rows, *args)

        def count_product(*args: Any, **kwargs: Any) -> None:
            self.gradients += 1
            product(*args, **kwargs)

        self._patches = [
            mock.patch.object(head, "logits_of", count_rows),
            mock.patch.object(head, "product", count_product),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        for patch in self._patches:
            patch.stop()
