"""The values of a graph that have gradients, and where these come from."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from .fx import GRAD_MODES, OWN_DERIVATIVE, Opaque, leaves
from .graphs import (
    REACHED,
    aliased_inputs,
    captured_body,
    is_fixed,
    name_of,
    overlap,
    tensors_of,
    value_of,
    written,
)

__all__ = ["needs_gradients", "receives_gradients"]


def needs_gradients(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values have gradients."""
    needs: set[fx.Node] = set()
    for node, enabled in _with_grad_mode(graph):
        if not _has_gradient(node, needs, enabled=enabled):
            continue
        needs.add(node)
        # A write with gradients gives them to all values that share the memory, earlier ones too.
        changed = _written_with_gradients(node)
        if changed:
            needs |= _sharing(graph, changed)
    return needs


def _sharing(graph: fx.Graph, changed: list[Tensor]) -> set[fx.Node]:
    """The nodes whose values share memory with tensors."""
    return {node for node in graph.nodes if overlap(tensors_of([node]), changed)}


def _has_gradient(node: fx.Node, needs: set[fx.Node], *, enabled: bool) -> bool:
    """Whether a node's value has gradients: its own, or its arguments'.

    Args:
        node: a node of the graph.
        needs: the earlier nodes whose values have gradients.
        enabled: whether gradients are recorded. Where they are not, only views inherit them.
    """
    if _is_source(node):
        return True
    if _cuts_gradient(node):
        return False
    # While gradients are off, a view still requires a gradient in PyTorch if its base does. So does
    # the result of an in-place operator.
    inherited = node.all_input_nodes if enabled else aliased_inputs(node)
    return not needs.isdisjoint(inherited)


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
    # The capture marks a placeholder before it runs, since it may change its inputs.
    if node.meta.get("requires_grad"):
        return True
    return node.op == "get_attr" and bool(getattr(value_of(node), "requires_grad", False))


def _cuts_gradient(node: fx.Node) -> bool:
    """Whether a node's result has no gradient, whatever its arguments have."""
    if _reads_no_numbers(node):
        return True
    value = value_of(node)
    if not isinstance(value, Tensor):
        return False
    # Integers and truth values have none, such as a comparison of trained values. Nor has what is
    # computed from them alone.
    return not (value.is_floating_point() or value.is_complex())


def receives_gradients(graph: fx.Graph, needs: set[fx.Node]) -> set[fx.Node]:
    """The nodes to whose values the backward passes a gradient from a result of the graph.

    The others of ``needs`` are only detached or compared, and get no gradient. If one operator with
    several arguments or results replaced several of them, they would get zeros instead.

    Args:
        graph: a graph of operators.
        needs: the nodes whose values may have gradients.
    """
    receives: set[fx.Node] = set()
    # Zeros are not the same as none: an optimizer such as AdamW decays a parameter with zeros.
    # Backwards: a node's users are decided before it.
    for node in reversed(graph.nodes):
        passes_gradient = functools.partial(_passes_gradient, receives, node)
        if node in needs and any(map(passes_gradient, node.users)):
            receives.add(node)
    return receives


def _passes_gradient(receives: set[fx.Node], node: fx.Node, user: fx.Node) -> bool:
    """Whether a gradient may come from a user of a node.

    A fixed user counts, as it may write into an argument. Later nodes that read this argument are
    not users of the write, but the gradient passes from them through the write:

        y.add_(x)     add_ is a user of x, and nothing is a user of add_
        return y      the gradient of x comes from here
    """
    if user.op == "output":
        return True
    if is_fixed(user):
        return True
    # The operator of a region passes it to some of its arguments.
    reached = user.meta.get(REACHED)
    is_reached = reached is None or node in itertools.compress(leaves(user.args), reached)
    return user in receives and is_reached


def _reads_no_numbers(node: fx.Node) -> bool:
    """Whether a node detaches its argument, or creates a tensor of the argument's shape."""
    name = name_of(node)
    # `ones_like(x)` would seem to need a backward, which has nothing to compute.
    return name == "detach" or name.endswith("_like") or name.startswith("new_")


def _written_with_gradients(node: fx.Node) -> list[Tensor]:
    """The tensors into which a node writes values with gradients."""
    # A custom autograd function gives gradients to its results alone.
    if node.target is OWN_DERIVATIVE or isinstance(node.target, Opaque):
        return []
    body = captured_body(node)
    if body is None:
        return written(node)
    # In a checkpointed part, only the writes of values with gradients count.
    needs = needs_gradients(body)
    trained = filter(needs.__contains__, body.nodes)
    return list(itertools.chain.from_iterable(map(_written_with_gradients, trained)))
