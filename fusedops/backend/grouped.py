"""Products of groups of rows, each group with its own matrix, as in a mixture of experts.

Where PyTorch has no grouped product that compiles, Transformers multiplies group by group, and reads at each product, forward and
backward, where the groups end: a GPU that has done its work waits meanwhile. Here the ends are read once for all products that
share them, and nothing is filled with zeros but what no product writes.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, fx

from ..core import compat, launch
from ..core.registration import implement
from .regions import changed_in, overlap, tensors_of, value_of
from .report import note_change

__all__ = ["is_grouped", "with_offsets_on_cpu"]

_REPLACED = "transformers::grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor"


def is_grouped(target: Any) -> bool:
    """Whether this is the operator of Transformers, in the form that is known."""
    return compat.schema(target) == _REPLACED


def with_offsets_on_cpu(graph: fx.Graph) -> None:
    """Replaces grouped products by ones that share a copy of their offsets on the CPU."""
    nodes = [node for node in graph.nodes if is_grouped(node.target) and _is_run(node)]
    changed = changed_in(graph) if nodes else []
    copies: dict[Any, fx.Node] = {}
    for node in nodes:
        rows, weight, offsets = node.args
        if overlap(tensors_of([offsets]), changed):
            continue
        if offsets not in copies:
            with graph.inserting_before(node):
                copies[offsets] = graph.call_function(torch.ops.fusedops.offsets_on_cpu.default, (offsets,))
        node.target, node.args = torch.ops.fusedops.grouped_mm.default, (rows, weight, copies[offsets])
        note_change(node, "a grouped product that shares its offsets with others")


def _is_run(node: fx.Node) -> bool:
    return launch.runs_kernels(value_of(node).device.type)


# --- the operators ------------------------------------------------------------------------------------------------------


def _copied(offsets: Tensor) -> Tensor:
    return offsets.to("cpu", copy=True)


def _product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    product, end = _empty_product(rows, weight, offsets), 0
    for matrix, (start, end) in zip(weight, _groups(offsets), strict=True):
        if start != end:
            torch.mm(rows[start:end], matrix, out=product[start:end])
    product[end:].zero_()
    return product


def _empty_product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


def _groups(offsets: Tensor) -> Any:
    """Where each begins and ends."""
    return itertools.pairwise([0, *offsets.tolist()])


def _gradients(grad: Tensor, rows: Tensor, weight: Tensor, offsets: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor]:
    (drows, dweight), end = _empty_gradients(grad, rows, weight, offsets, needs), 0
    for group, (start, end) in enumerate(_groups(offsets)):
        if needs[0] and start != end:
            torch.mm(grad[start:end], weight[group].T, out=drows[start:end])
        if needs[1] and start != end:
            torch.mm(rows[start:end].T, grad[start:end], out=dweight[group])
        elif needs[1]:
            dweight[group].zero_()
    drows[end:].zero_()
    return drows, dweight


def _empty_gradients(
    grad: Tensor, rows: Tensor, weight: Tensor, offsets: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    """In the memory format of what they are gradients of; with no elements where none is needed."""
    drows, dweight = [torch.empty_like(t) if n else t.new_empty(0) for t, n in zip((rows, weight), needs, strict=True)]
    return drows, dweight


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _derivative(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    needs = list(ctx.needs_input_grad[:2])
    return *torch.ops.fusedops.grouped_mm_backward(grad, *ctx.saved_tensors, needs), None


def _second_derivative(ctx: Any, *grads: Tensor) -> Any:
    raise NotImplementedError("gradients of grouped_mm have no derivative")


_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")
# A CUDA graph would keep the groups that it was recorded with.
_TAGS = (torch.Tag.cudagraph_unsafe,)
_LIBRARY.define("offsets_on_cpu(Tensor offsets) -> Tensor", tags=_TAGS)
_LIBRARY.define("grouped_mm(Tensor rows, Tensor weight, Tensor offsets) -> Tensor", tags=_TAGS)
_LIBRARY.define("grouped_mm_backward(Tensor grad, Tensor rows, Tensor weight, Tensor offsets, bool[] needs) -> (Tensor, Tensor)",
                tags=_TAGS)  # fmt: skip
implement(_LIBRARY, "offsets_on_cpu", _copied, _copied)
implement(_LIBRARY, "grouped_mm", _product, _empty_product)
implement(_LIBRARY, "grouped_mm_backward", _gradients, _empty_gradients)
torch.library.register_autograd("fusedops::grouped_mm", _derivative, setup_context=_setup, lib=_LIBRARY)
torch.library.register_autograd("fusedops::grouped_mm_backward", _second_derivative, lib=_LIBRARY)
