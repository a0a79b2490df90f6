"""Which values of a graph have gradients, and from where."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from .fx import GRAD_MODES, OWN_DERIVATIVE
from .regions import (
    aliased_inputs,
    captured_body,
    is_fixed,
    name_of,
    overlap,
    tensors_of,
    value_of,
    written,
)

__all__ = ["needs_gradients", "receives_gradients", "recorded"]


def needs_gradients(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values have gradients."""
    needs: set[fx.Node] = set()
    for node, enabled in _with_grad_mode(graph):
        if not _is_source(node) and not _inherits(node, needs, enabled=enabled):
            continue
        needs.add(node)
        # A write with gradients gives them to all values that share the memory, earlier ones too.
        changed = _written_with_gradients(node)
        if changed:
            needs.update(other for other in graph.nodes if overlap(tensors_of([other]), changed))
    return needs


def _with_grad_mode(graph: fx.Graph) -> Iterator[tuple[fx.Node, bool]]:
    """The nodes of a graph, each with whether gradients are on; without those that switch them."""
    enabled = torch.is_grad_enabled()
    for node in graph.nodes:
        if node.target in GRAD_MODES:
            enabled = bool(node.args[0])
        else:
            yield node, enabled


def _is_source(node: fx.Node) -> bool:
    """Whether a node is an input or an attribute that requires a gradient."""
    if node.meta.get("requires_grad"):
        return True
    return node.op == "get_attr" and bool(getattr(value_of(node), "requires_grad", False))


def _inherits(node: fx.Node, needs: set[fx.Node], *, enabled: bool) -> bool:
    """Whether a node's value has gradients because one of its arguments has.

    Args:
        node: of the graph.
        needs: the earlier nodes whose values have gradients.
        enabled: whether gradients are recorded. Where they are not, only views inherit them.
    """
    if _cuts_gradient(node):
        return False
    return bool(needs.intersection(node.all_input_nodes if enabled else aliased_inputs(node)))


def _cuts_gradient(node: fx.Node) -> bool:
    """Whether a node's result has no gradient, whatever its arguments have."""
    if _reads_no_numbers(node):
        return True
    value = value_of(node)
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def recorded(graph: fx.Graph) -> set[fx.Node]:
    """The nodes where gradients are recorded."""
    return {node for node, enabled in _with_grad_mode(graph) if enabled}


def receives_gradients(graph: fx.Graph, needs: set[fx.Node]) -> set[fx.Node]:
    """The nodes to whose values the backward passes a gradient from a result of the graph.

    The others of ``needs`` are only detached or compared, and get no gradient. If one operator with
    several arguments or results replaced several of them, they would get zeros instead.

    Args:
        graph: of operators.
        needs: the nodes whose values may have gradients.
    """
    receives: set[fx.Node] = set()
    # Backwards: a node's users are decided before it.
    for node in reversed(graph.nodes):
        if node in needs and any(_passes_gradient(user, receives) for user in node.users):
            receives.add(node)
    return receives


def _passes_gradient(user: fx.Node, receives: set[fx.Node]) -> bool:
    """Whether a gradient may come from a user of a node.

    A user that is fixed counts, since it may write into an argument: nodes that are not among its
    users may read what it wrote.
    """
    return user in receives or user.op == "output" or is_fixed(user)


def _reads_no_numbers(node: fx.Node) -> bool:
    """Whether a node detaches its argument, or creates a tensor of the argument's shape."""
    name = name_of(node)
    return name == "detach" or name.endswith("_like") or name.startswith("new_")


def _written_with_gradients(node: fx.Node) -> list[Tensor]:
    """The tensors into which a node writes values with gradients."""
    # A custom autograd function gives gradients to its results alone.
    if node.target is OWN_DERIVATIVE:
        return []
    body = captured_body(node)
    if body is None:
        return written(node)
    needs = needs_gradients(body)
    changed = []
    for inner in body.nodes:
        if inner in needs:
            changed += _written_with_gradients(inner)
    return changed
