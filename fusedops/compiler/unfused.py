"""Calls of a program in PyTorch's operators, where Triton cannot compile its kernels: with the same masks, and saving the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..core.function import mask_of
from ..core.rng import State
from .evaluate import assembled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .ir import Node
    from .operator import RowwiseSite
    from .structure import Operand, Part

__all__ = ["backward", "forward"]


def forward(site: RowwiseSite, tensors: Any, outs: Any, state: State) -> None:
    """Writes what the kernels of a forward write."""
    program, structure, plan = site.program, site.program.structure, site.program.plan
    sizes = program.sizes_of(tensors)
    written: list[tuple[Operand, Mapping[Part, Node]]] = list(zip(structure.outputs, structure.results, strict=True))
    if program.own and site.saves:
        assert plan.intermediate_operand is not None
        written.append((plan.intermediate_operand, plan.intermediate))
    stats = plan.stats if site.saves else ()
    roots = [*[node for _, parts in written for node in parts.values()], *stats]
    with torch.no_grad():
        values = program.evaluated(roots, tensors, mask_of(site, state))
        for out, (operand, parts) in zip(outs, written, strict=False):
            found = {part: values[node] for part, node in parts.items()}
            out.copy_(assembled(structure, operand, found, out.shape))
        for place, node in enumerate(stats):
            rows = [sizes[axis] for axis in structure.rows]
            outs[-1][place].copy_(values[node].expand(*rows, *[1] * len(structure.columns)).reshape(-1))


def backward(site: RowwiseSite, grads: Any, saved: Any, outs: Any, state: State) -> None:
    """Writes what the kernels of a backward write."""
    needs = [out is not None for out in outs]
    grads, saved = [[None if t is None else t.detach() for t in given] for given in (grads, saved)]
    with torch.no_grad():
        found = site.program.derivative(site, grads, saved, mask_of(site, state), needs)
        for out, gradient in zip(outs, found, strict=True):
            if out is not None:
                out.zero_() if gradient is None else out.copy_(gradient)
