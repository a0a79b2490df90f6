"""Run a program by PyTorch's operators, if Triton cannot compile its kernels.

Dropout draws the same masks, and the forward saves the same tensors, so that kernels and operators
may alternate: a forward of one kind goes with a backward of the other.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.calls.function import mask_of
from ..core.random.rng import State
from .evaluate import assembled
from .site import RowwiseSite
from .structure import nodes_of

__all__ = ["backward", "forward"]


def forward(site: RowwiseSite, tensors: Any, outs: Any, state: State) -> None:
    """Write what the kernels of a forward write."""
    program = site.program
    structure = site.program.structure
    plan = site.program.plan
    sizes = program.sizes_of(tensors)
    # In the order of `outs`: the results, then the intermediate. Last are the numbers of each row.
    operands = list(structure.outputs)
    results = list(structure.results)
    if program.own and site.saves:
        assert plan.intermediate_operand is not None
        operands.append(plan.intermediate_operand)
        results.append(plan.intermediate)
    stats = plan.stats if site.saves else ()
    roots = [*nodes_of(results), *stats]
    with torch.no_grad():
        values = program.evaluated(roots, tensors, mask_of(site, state))
        for out, operand, parts in zip(outs, operands, results, strict=False):
            part_values = {part: values[node] for part, node in parts.items()}
            out.copy_(assembled(structure, operand, part_values, out.shape))
        # One line of `outs[-1]` for each number, with an element for each row.
        rows = [sizes[axis] for axis in structure.rows]
        ones = [1] * len(structure.columns)
        for i, node in enumerate(stats):
            outs[-1][i].copy_(values[node].expand(*rows, *ones).reshape(-1))


def backward(site: RowwiseSite, grads: Any, saved: Any, outs: Any, state: State) -> None:
    """Write what the kernels of a backward write."""
    needs = [out is not None for out in outs]
    grads, saved = _detached(grads), _detached(saved)
    with torch.no_grad():
        gradients = site.program.derivative(site, grads, saved, mask_of(site, state), needs)
        for out, gradient in zip(outs, gradients, strict=True):
            _write(out, gradient)


def _write(out: Any, gradient: Any) -> None:
    """Write a gradient, or zeros if it is None; nothing if it is not wanted."""
    if out is None:
        return
    if gradient is None:
        out.zero_()
    else:
        out.copy_(gradient)


def _detached(tensors: Any) -> list[Any]:
    return [None if tensor is None else tensor.detach() for tensor in tensors]
