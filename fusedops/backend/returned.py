"""Activations that a model returns, and reads again in its backward: soft-capped logits."""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .regions import COPIES, is_of_elements, name_of
from .report import note_change

__all__ = ["computed_again"]

# Activations whose derivative is one of their input, and of their result.
_OF_INPUT = frozenset({"gelu", "silu", "softplus", "elu", "mish", "hardswish", "erf"})
_OF_RESULT = frozenset({"tanh", "sigmoid", "exp"})
_COPIES = COPIES - {""}
# What else is computed of one tensor, with a number.
_LINEAR = frozenset({"add", "sub", "mul", "div", "neg"})


def computed_again(graph: fx.Graph, needs: set[fx.Node]) -> None:
    """Marks activations that are returned to be computed again where the backward reads them.

    To save what is returned costs no memory, so PyTorch saves it for a loss that reads it. But the activation's own derivative
    may read another tensor, which is saved beside it: the backward reads two tensors where one would do. For soft-capped logits of
    256,000 columns that is a third of what the loss's backward reads.

    Args:
        graph: of operators.
        needs: the nodes whose values have gradients.
    """
    for node in graph.output_node().all_input_nodes:
        if node in needs and _is_activation(node) and _is_read_by_elements(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            note_change(node, "a returned activation that is computed again in the backward")


def _is_activation(node: fx.Node) -> bool:
    """Whether it is computed of one tensor alone, element by element, and its derivative reads another tensor than itself."""
    reads = is_scaled = False
    while name_of(node) in _OF_INPUT | _OF_RESULT | _LINEAR | _COPIES and len(node.all_input_nodes) == 1:
        reads |= name_of(node) in _OF_INPUT or (name_of(node) in _OF_RESULT and is_scaled)
        is_scaled |= name_of(node) in _LINEAR
        node = node.all_input_nodes[0]
    return reads


def _is_read_by_elements(node: fx.Node) -> bool:
    """Whether something reads it here, and all that does is computed by kernels of Inductor, which can compute it on the way."""
    is_read, todo = False, list(node.users)
    while todo:
        user = todo.pop()
        if name_of(user) in _COPIES:
            todo += user.users
        elif user.op != "output":
            is_read = True
            if name_of(user) != "_log_softmax" and not is_of_elements(user):
                return False
    return is_read
