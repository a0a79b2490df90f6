"""Products of groups of rows, each group with its own matrix, as in a mixture of experts.

Where PyTorch has no grouped product that compiles, Transformers multiplies group by group. At each
product, forward and backward, it reads the ends of the groups from the GPU, which waits meanwhile.
Here the ends are read once for all products that share them, and only the rows and matrices that no
product writes are filled with zeros.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, fx

from ...core.calls.registration import implement
from ...core.launches import launch
from ..fx import schema
from ..graphs import changed_in, overlap, tensors_of, value_of
from ..report import note_change
from ..rewrite import Rewrite

__all__ = ["is_grouped", "share_offsets"]

_REPLACED = "transformers::grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor"


def is_grouped(target: Any) -> bool:
    """Whether a node calls the operator of Transformers, with the schema that is replaced here."""
    return schema(target) == _REPLACED


def share_offsets(rewrite: Rewrite) -> None:
    """Replaces grouped products by ones that share a copy of their offsets on the CPU."""
    graph = rewrite.graph
    nodes = list(filter(_is_replaced, graph.nodes))
    changed = changed_in(graph) if nodes else []
    # A Mixtral of 8 layers on an H200 waited 32 times a step: the GPU was idle for 6.2 ms of 214.
    copies: dict[Any, fx.Node] = {}
    for node in nodes:
        rows, weight, offsets = node.args
        # A copy would not follow a change of the offsets.
        if overlap(tensors_of([offsets]), changed):
            continue
        if offsets not in copies:
            copies[offsets] = _copy_before(graph, node, offsets)
        node.target = torch.ops.fusedops.grouped_mm.default
        node.args = (rows, weight, copies[offsets])
        note_change(node, "a grouped product that shares its offsets with others")


def _is_replaced(node: fx.Node) -> bool:
    return is_grouped(node.target) and launch.runs_kernels(value_of(node).device.type)


def _copy_before(graph: fx.Graph, node: fx.Node, offsets: Any) -> fx.Node:
    """A copy of offsets on the CPU, before a node that reads them."""
    copy = torch.ops.fusedops.offsets_on_cpu.default
    with graph.inserting_before(node):
        return graph.call_function(copy, (offsets,))


# --- the operators --------------------------------------------------------------------------------


def _copied(offsets: Tensor) -> Tensor:
    return offsets.to("cpu", copy=True)


def _product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    product = _empty_product(rows, weight, offsets)
    end = 0
    for matrix, (start, end) in zip(weight, _groups(offsets), strict=True):
        if start != end:
            torch.mm(rows[start:end], matrix, out=product[start:end])
    product[end:].zero_()  # the rows after the last group
    return product


def _empty_product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


def _groups(offsets: Tensor) -> Any:
    """The first row of each group, and the row after its last."""
    return itertools.pairwise([0, *offsets.tolist()])


def _gradients(
    grad: Tensor, rows: Tensor, weight: Tensor, offsets: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    drows, dweight = _empty_gradients(grad, rows, weight, offsets, needs)
    end = 0
    for group, (start, end) in enumerate(_groups(offsets)):
        if start == end:
            if needs[1]:
                dweight[group].zero_()
            continue
        if needs[0]:
            torch.mm(grad[start:end], weight[group].T, out=drows[start:end])
        if needs[1]:
            torch.mm(rows[start:end].T, grad[start:end], out=dweight[group])
    drows[end:].zero_()  # the rows after the last group
    return drows, dweight


def _empty_gradients(
    grad: Tensor, rows: Tensor, weight: Tensor, offsets: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients in the memory format of the tensors; without elements where none is needed."""
    drows = torch.empty_like(rows) if needs[0] else rows.new_empty(0)
    dweight = torch.empty_like(weight) if needs[1] else weight.new_empty(0)
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
_LIBRARY.define(
    "grouped_mm_backward(Tensor grad, Tensor rows, Tensor weight, Tensor offsets, bool[] needs) "
    "-> (Tensor, Tensor)",
    tags=_TAGS,
)
implement(_LIBRARY, "offsets_on_cpu", _copied, _copied)
implement(_LIBRARY, "grouped_mm", _product, _empty_product)
implement(_LIBRARY, "grouped_mm_backward", _gradients, _empty_gradients)
torch.library.register_autograd(
    "fusedops::grouped_mm", _derivative, setup_context=_setup, lib=_LIBRARY
)
torch.library.register_autograd("fusedops::grouped_mm_backward", _second_derivative, lib=_LIBRARY)
