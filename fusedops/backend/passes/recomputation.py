"""Activations that a model returns and reads again in its backward, such as soft-capped logits.

    x ──▶ tanh ──▶ t ──▶ mul by the cap ──▶ logits, which are returned ──▶ loss

    backward of     reads     saved without the mark     saved with the mark
    loss            logits    logits                     t, multiplied by the cap again
    tanh            t         t                          t

With the mark the backward reads one tensor, and not two.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..graphs import COPIES, name_of, users_through
from ..regions import is_of_elements
from ..report import note_change
from ..rewrite import Rewrite

__all__ = ["recompute_returned"]

# Activations whose derivative is computed from their input.
_OF_INPUT = frozenset({"gelu", "silu", "softplus", "elu", "mish", "hardswish", "erf"})
# Activations whose derivative is computed from their result.
_OF_RESULT = frozenset({"tanh", "sigmoid", "exp"})
_COPIES = COPIES - {""}  # "" is the name of any node that is no operator, such as an input
# Other functions of one tensor and a number.
_LINEAR = frozenset({"add", "sub", "mul", "div", "neg"})
_OF_ONE_TENSOR = _OF_INPUT | _OF_RESULT | _LINEAR | _COPIES


def recompute_returned(rewrite: Rewrite) -> None:
    """Marks returned activations, for the backward to compute them again where it reads them.

    To save a returned tensor costs no memory, so PyTorch saves it for a loss that reads it. But the
    activation's own derivative may read another tensor, which is saved as well: the backward
    reads two tensors where one would do. For soft-capped logits of 256,000 columns that is a third
    of what the loss's backward reads.
    """
    returned = rewrite.graph.output_node().all_input_nodes
    for node in filter(rewrite.needs.__contains__, returned):
        if _is_activation(node) and _is_read_by_elements(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            note_change(node, "a returned activation that is computed again in the backward")


def _is_activation(node: fx.Node) -> bool:
    """Whether a node is an elementwise function whose derivative reads an intermediate value.

    The walk goes from the result to the input. The derivative of an activation of `_OF_RESULT`
    reads the returned tensor itself, unless that is scaled after the activation.
    """
    # The activations whose derivative, at this point of the walk, reads an intermediate value.
    reading = _OF_INPUT
    reads_intermediate = False
    while name_of(node) in _OF_ONE_TENSOR and len(node.all_input_nodes) == 1:
        name = name_of(node)
        reads_intermediate |= name in reading
        if name in _LINEAR:
            reading = _OF_INPUT | _OF_RESULT
        node = node.all_input_nodes[0]
    return reads_intermediate


def _is_read_by_elements(node: fx.Node) -> bool:
    """Whether the graph itself reads a node, and only in Inductor's kernels of elements or rows.

    These compute it inline.
    """
    readers = list(filter(_is_reader, users_through(node, _is_copy)))
    return bool(readers) and all(map(_is_in_kernel, readers))


def _is_reader(node: fx.Node) -> bool:
    """Whether a node computes something, unlike a copy, and unlike the end of the graph."""
    return node.op != "output" and not _is_copy(node)


def _is_copy(node: fx.Node) -> bool:
    return name_of(node) in _COPIES


def _is_in_kernel(node: fx.Node) -> bool:
    """Whether Inductor computes a node in a kernel of elements or rows."""
    return name_of(node) == "_log_softmax" or is_of_elements(node)
