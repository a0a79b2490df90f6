"""Operators of complex tensors as operators of their real and imaginary parts.

Inductor compiles no operator of complex tensors, and regions have none. A rotary embedding of
complex tensors becomes one of real tensors, which Inductor and regions support::

    view ──▶ view_as_complex ──▶ mul ──▶ view_as_real ──▶ view
                                  ▲
                             freqs_cis                          becomes

    view ──▶ operators of pairs ──▶ view
                    ▲
             view_as_real(freqs_cis)

Other users of a complex tensor still read that tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ...compiler.complex_numbers import Pairs, of_pairs
from ..fx import recorded_graph
from ..graphs import (
    FUNCTION,
    drop_unused,
    dtype_of,
    is_tensor,
    may_be_changed,
    name_of,
    strides_of,
    value_of,
)
from ..rewrite import Rewrite

__all__ = ["split_complex"]


def split_complex(rewrite: Rewrite) -> None:
    """Replaces operators of complex tensors whose results are real ones."""
    pairs: dict[fx.Node, fx.Node] = {}
    for node in list(filter(_is_of_complex, rewrite.graph.nodes)):
        # A node that has no operators of pairs stays, and its users read the parts of its result.
        try:
            result = _by_parts(rewrite, node, pairs)
        except Exception:  # noqa: BLE001
            continue
        if FUNCTION in node.meta:
            result.meta[FUNCTION] = node.meta[FUNCTION]
        if _is_complex(node):
            pairs[node] = result
        else:
            node.replace_all_uses_with(result)
    if pairs:
        drop_unused(rewrite.graph)


def _is_of_complex(node: fx.Node) -> bool:
    """Whether a node computes one tensor, it or an argument is complex, and nothing changes it."""
    if not is_tensor(node) or not name_of(node) or may_be_changed(node):
        return False
    return any(map(_is_complex, [node, *node.all_input_nodes]))


def _is_complex(node: fx.Node) -> bool:
    return is_tensor(node) and dtype_of(node).is_complex


def _by_parts(rewrite: Rewrite, node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> fx.Node:
    """The result of a node from operators of pairs, which are added before it."""
    graph, inputs = rewrite.graph, node.all_input_nodes
    are_complex = list(map(_is_complex, inputs))

    def run(*values: Any) -> Tensor:
        arguments: dict[fx.Node, Any] = {}
        for arg, is_complex, value in zip(inputs, are_complex, values, strict=True):
            arguments[arg] = Pairs(value) if is_complex else value
        args, kwargs = map_arg((node.args, node.kwargs), arguments.__getitem__)
        return of_pairs(name_of(node), value_of(node), args, kwargs)

    with graph.inserting_before(node):
        for arg in itertools.compress(inputs, are_complex):
            if arg not in pairs:
                pairs[arg] = _inserted(graph, torch.view_as_real, [arg])
        result = _inserted(graph, run, [pairs.get(arg, arg) for arg in inputs])
    # A result that is joined from real and imaginary parts is contiguous. `restore_strides` gives
    # it the strides of the model's result.
    wanted = value_of(node)
    if _is_complex(node):
        wanted = torch.view_as_real(wanted.resolve_conj())
    if strides_of(value_of(result)) != strides_of(wanted):
        result.meta["val"] = wanted
        rewrite.results.append(result)
    return result


def _inserted(
    graph: fx.Graph, function: Callable[..., Tensor], sources: Sequence[fx.Node]
) -> fx.Node:
    """The result of a function of nodes, whose operators are added to the graph."""
    recorded = recorded_graph(function, list(map(value_of, sources))).graph
    placeholders = recorded.find_nodes(op="placeholder")
    result: Any = graph.graph_copy(recorded, dict(zip(placeholders, sources, strict=True)))
    return result  # type: ignore[no-any-return]
