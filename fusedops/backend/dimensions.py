"""Dimensions that are one of a tensor and several of another, such as rows that are flattened.

Where their sizes are symbols, a program takes and returns such tensors with several dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from ..compiler.axes import Label
from ..compiler.errors import NotRowwiseError
from ..compiler.structure import Operand, Structure
from .regions import value_of

__all__ = ["Join", "Split", "are_joined", "join", "joins_of", "split", "split_shape", "splits_of", "take_apart"]

# A dimension, and the sizes that it is taken as: a number, one of another tensor's sizes as its place and dimension, or None
# for what is left.
Split = tuple[int, "list[int | tuple[int, int] | None]"]
# A first and a last dimension, that are one.
Join = tuple[int, int]

_FLATTEN, _UNFLATTEN = torch.ops.aten.flatten.using_ints, torch.ops.aten.unflatten.int
_SIZE = torch.ops.aten.sym_size.int


def _is_joined(label: Label, moving: Collection[int]) -> bool:
    return len(label) > 1 and any(axis in moving for axis in label)


def are_joined(structure: Structure, moving: Collection[int]) -> bool:
    """Whether a tensor has a dimension that is several axes, one of which has a size that is a symbol.

    Args:
        moving: the axes whose sizes are symbols.
    """
    operands = (*structure.inputs, *structure.outputs)
    return any(_is_joined(label, moving) for operand in operands for label in operand.labels)


def splits_of(structure: Structure, moving: Collection[int], axes: Sequence[int] = ()) -> list[list[Split]]:
    """Of each input, the dimensions that are several axes, the last first.

    Args:
        structure: of the function.
        moving: the axes whose sizes are symbols.
        axes: those whose sizes the function takes, behind its tensors.
    Raises:
        NotRowwiseError: several sizes of such a dimension are known from nowhere, or one of `axes` is no tensor's.
    """
    if not {axis for operand in structure.inputs for axis in operand.axes}.issuperset(axes):
        raise NotRowwiseError("a size is not one of its tensors'")
    alone = {axis: (len(structure.inputs) + number, 0) for number, axis in enumerate(axes)}
    alone |= {label[0]: (place, dim) for place, operand in enumerate(structure.inputs)
             for dim, label in enumerate(operand.labels) if len(label) == 1}  # fmt: skip
    found: list[list[Split]] = []
    for operand in structure.inputs:
        splits: list[Split] = [(dim, [alone.get(axis) if axis in moving else structure.sizes[axis] for axis in label])
                               for dim, label in enumerate(operand.labels) if _is_joined(label, moving)]  # fmt: skip
        if any(sizes.count(None) > 1 for _, sizes in splits):
            raise NotRowwiseError("rows that are one dimension of all its tensors, and several within it")
        found.append(splits[::-1])
    return found


def joins_of(operand: Operand, moving: Collection[int]) -> list[Join]:
    """The dimensions of a tensor that are several axes, the first first: before later ones are joined."""
    return [(dim, dim + len(label) - 1) for dim, label in enumerate(operand.labels) if _is_joined(label, moving)]


def take_apart(graph: fx.Graph, structure: Structure, places: Sequence[int], moving: Collection[int],
               axes: Sequence[int]) -> None:  # fmt: skip
    """Has a function take and return tensors whose dimensions are several where they were one.

    Args:
        graph: of the function.
        structure: of it.
        places: for each of its results, the number of the structure's output.
        moving: the axes whose sizes are symbols.
        axes: those whose sizes it has taken behind its tensors, and takes no longer.
    """
    given = graph.find_nodes(op="placeholder")
    behind, where = given[-1].next, dict[int, tuple[fx.Node, int]]()
    for node, operand in zip(given, structure.inputs, strict=False):
        parts = [part for label in operand.labels for part in
                 ([(axis,) for axis in label] if _is_joined(label, moving) else [label])]  # fmt: skip
        where |= {label[0]: (node, dim) for dim, label in enumerate(parts) if len(label) == 1}
        users = set(node.users)
        with graph.inserting_before(behind):
            whole = join(graph, node, joins_of(operand, moving))
        node.replace_all_uses_with(whole, users.__contains__)
    for node, axis in zip(given[len(structure.inputs) :], axes, strict=True):
        with graph.inserting_before(behind):
            node.replace_all_uses_with(graph.call_function(_SIZE, where[axis]))
        graph.erase_node(node)
    [output] = graph.find_nodes(op="output")
    results = list(output.args[0])
    with graph.inserting_before(output):
        for i, number in enumerate(places):
            labels = structure.outputs[number].labels
            for dim, _ in joins_of(structure.outputs[number], moving)[::-1]:
                sizes = [
                    graph.call_function(_SIZE, where[axis]) if axis in moving else structure.sizes[axis]
                    for axis in labels[dim]
                ]
                results[i] = graph.call_function(_UNFLATTEN, (results[i], dim, sizes))
    output.args = (tuple(results),)


def split_shape(place: int, splits: Sequence[Split], shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape of an input whose dimensions are several, from those of all inputs as they were."""
    shape = list(shapes[place])
    for dim, sizes in splits:
        found = [shapes[size[0]][size[1]] if isinstance(size, tuple) else size for size in sizes]
        rest = shape[dim] // math.prod([size for size in found if size is not None])
        shape[dim : dim + 1] = [rest if size is None else size for size in found]
    return tuple(shape)


def split(graph: fx.Graph, place: int, splits: Sequence[Split], nodes: Sequence[fx.Node]) -> fx.Node:
    """An input whose dimensions are several, from all inputs as they were, and sizes behind them."""
    node = nodes[place]

    def size_of(size: int | tuple[int, int] | None) -> Any:
        if not isinstance(size, tuple):
            return -1 if size is None else size
        given = nodes[size[0]]
        return given if isinstance(value_of(given), torch.SymInt) else graph.call_function(_SIZE, (given, size[1]))

    for dim, sizes in splits:
        node = graph.call_function(_UNFLATTEN, (node, dim, list(map(size_of, sizes))))
    return node


def join(graph: fx.Graph, node: fx.Node, joins: Sequence[Join]) -> fx.Node:
    """A tensor with one dimension in the place of several."""
    for first, last in joins:
        node = graph.call_function(_FLATTEN, (node, first, last))
    return node
