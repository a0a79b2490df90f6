"""Which values of a graph have gradients, and from where."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ..core import compat
from .regions import captured_body, is_fixed, name_of, named_again, overlap, tensors_of, value_of, written

__all__ = ["needs_gradients", "receives_gradients", "recorded"]


def needs_gradients(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values have gradients."""
    found: set[fx.Node] = set()
    enabled = torch.is_grad_enabled()
    for node in graph.nodes:
        if node.target in compat.GRAD_MODES:
            enabled = bool(node.args[0])
            continue
        own = node.meta.get("requires_grad") or (
            node.op == "get_attr" and getattr(value_of(node), "requires_grad", False)
        )
        value = value_of(node)
        is_cut = _reads_no_numbers(node) or (
            isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
        )
        given = node.all_input_nodes if enabled else named_again(node)
        if own or (not is_cut and found.intersection(given)):
            found.add(node)
            changed = _written_with_gradients(node)
            found.update(other for other in graph.nodes if changed and overlap(tensors_of([other]), changed))
    return found


def recorded(graph: fx.Graph) -> set[fx.Node]:
    """The nodes where gradients are recorded."""
    found, enabled = set[fx.Node](), torch.is_grad_enabled()
    for node in graph.nodes:
        if node.target in compat.GRAD_MODES:
            enabled = bool(node.args[0])
        elif enabled:
            found.add(node)
    return found


def receives_gradients(graph: fx.Graph, needs: set[fx.Node]) -> set[fx.Node]:
    """The nodes whose values have gradients, from something that the graph returns.

    The others are only detached, or compared. An operator in their place with several arguments or results would hand on zeros.

    Args:
        graph: of operators.
        needs: the nodes whose values may have gradients.
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in needs and any(_hands_on(user, found) for user in node.users):
            found.add(node)
    return found


def _hands_on(user: fx.Node, found: set[fx.Node]) -> bool:
    """Whether a gradient may come from a node: what is written into may be read by what is not among its users."""
    return user in found or user.op == "output" or is_fixed(user)


def _reads_no_numbers(node: fx.Node) -> bool:
    """Whether a node's gradient ends there: it is detached, or made like another in nothing but its shape."""
    name = name_of(node)
    return name == "detach" or name.endswith("_like") or name.startswith("new_")


def _written_with_gradients(node: fx.Node) -> list[Tensor]:
    """The tensors into which a node writes what has gradients. A custom autograd function's have none but its results."""
    if node.target is compat.OWN_DERIVATIVE:
        return []
    body = captured_body(node)
    if body is None:
        return written(node)
    needs = needs_gradients(body)
    return [tensor for one in body.nodes if one in needs for tensor in _written_with_gradients(one)]
