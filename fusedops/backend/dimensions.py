"""Splits and joins dimensions, such as flattened rows: one of a tensor, and several of another.

If the sizes of such dimensions are symbols, a program takes and returns the tensors with several:

    region    x [b * t, d], y [b, t, d]         program    x [b, t, d], y [b, t, d]

A *split* makes several dimensions of one, a *join* one of several.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..compiler.axes import Label
from ..compiler.errors import NotRowwiseError
from ..compiler.structure import Operand, Structure
from .graphs import value_of

__all__ = [
    "Join",
    "Split",
    "are_joined",
    "join",
    "joins_of",
    "split",
    "split_dimensions",
    "split_shape",
    "splits_of",
]

# A dimension, and the sizes of the dimensions that it is split into. A size is a number, a size of
# another tensor (its position and the dimension), or None for the quotient.
Split = tuple[int, "list[int | tuple[int, int] | None]"]
# The first and the last of the dimensions that are joined.
Join = tuple[int, int]

_FLATTEN, _UNFLATTEN = torch.ops.aten.flatten.using_ints, torch.ops.aten.unflatten.int
_SIZE = torch.ops.aten.sym_size.int


def _is_joined(label: Label, moving: Collection[int]) -> bool:
    """Whether a dimension is several axes, one of which has a size that is a symbol."""
    return len(label) > 1 and not set(label).isdisjoint(moving)


def _joined_dims(operand: Operand, moving: Collection[int]) -> list[int]:
    """The dimensions of a tensor that are several axes, one of them with a symbolic size."""
    return [dim for dim, label in enumerate(operand.labels) if _is_joined(label, moving)]


def are_joined(structure: Structure, moving: Collection[int]) -> bool:
    """Whether a tensor has a dimension that is several axes, one of them with a symbolic size.

    Args:
        structure: the structure of the function.
        moving: the axes whose sizes are symbols.
    """
    operands = (*structure.inputs, *structure.outputs)
    return any(_joined_dims(operand, moving) for operand in operands)


def splits_of(
    structure: Structure, moving: Collection[int], axes: Sequence[int] = ()
) -> list[list[Split]]:
    """The splits of each input, the last dimension first.

    Args:
        structure: the structure of the function.
        moving: the axes whose sizes are symbols.
        axes: the axes whose sizes are arguments of the function, after its tensors.
    Raises:
        NotRowwiseError: a dimension joins several axes whose sizes can be read nowhere else, or one
            of `axes` is no tensor's.
    """
    axes_of_tensors = set().union(*[operand.axes for operand in structure.inputs])
    if not axes_of_tensors.issuperset(axes):
        raise NotRowwiseError("a size is not one of its tensors'")
    locations = _locations(structure, axes)

    def size_of(axis: int) -> int | tuple[int, int] | None:
        return locations.get(axis) if axis in moving else structure.sizes[axis]

    splits_of_inputs: list[list[Split]] = []
    for operand in structure.inputs:
        splits: list[Split] = []
        # The last first: a split moves the dimensions after it.
        for dim in reversed(_joined_dims(operand, moving)):
            sizes = list(map(size_of, operand.labels[dim]))
            # One unknown size is the quotient by the others; of two only the product is known.
            if sizes.count(None) > 1:
                raise NotRowwiseError(
                    "rows that are one dimension of all its tensors, and several within it"
                )
            splits.append((dim, sizes))
        splits_of_inputs.append(splits)
    return splits_of_inputs


def _locations(structure: Structure, axes: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Where the sizes of axes can be read: the position of an argument, and a dimension of it.

    The arguments are the tensors, and after them the sizes of ``axes``. A tensor has the size of an
    axis if one of its dimensions is that axis alone. A size has dimension 0 as its location. If
    both have the size of an axis, the location is that in the tensor.
    """
    count = len(structure.inputs)
    locations = {axis: (count + number, 0) for number, axis in enumerate(axes)}
    for position, operand in enumerate(structure.inputs):
        for axis, dim in _single_axes(operand.labels).items():
            locations[axis] = (position, dim)
    return locations


def _single_axes(labels: Sequence[Label]) -> dict[int, int]:
    """The axes that are a dimension alone, and these dimensions."""
    return {label[0]: dim for dim, label in enumerate(labels) if len(label) == 1}


def joins_of(operand: Operand, moving: Collection[int]) -> list[Join]:
    """The joins of a tensor, in the order in which they apply.

    The first dimension is first: its join moves the others to where the next joins expect them.
    """
    labels = operand.labels
    return [(dim, dim + len(labels[dim]) - 1) for dim in _joined_dims(operand, moving)]


def split_dimensions(
    graph: fx.Graph,
    structure: Structure,
    output_numbers: Sequence[int],
    moving: Collection[int],
    axes: Sequence[int],
) -> None:
    """Changes a function so that the dimensions of its tensors are one axis each.

    The function joins its inputs first, and splits its results last. It no longer takes sizes as
    arguments after its tensors, but reads them from the tensors.

        before    x [b * t, d] ──▶ body ──▶ [b * t, d]
        after     x [b, t, d] ──flatten──▶ body ──unflatten──▶ [b, t, d]

    Args:
        graph: the graph of the function.
        structure: its structure.
        output_numbers: for each of its results, the number of the structure's output.
        moving: the axes whose sizes are symbols.
        axes: the axes whose sizes are arguments of the function, after its tensors.
    """
    # The program is called with split dimensions, and its body needs whole ones. In the caller's
    # graph it is the opposite: there `split` adds views before the operator, `join` after it.
    placeholders = graph.find_nodes(op="placeholder")
    body = placeholders[-1].next
    locations = dict[int, tuple[fx.Node, int]]()
    for node, operand in zip(placeholders, structure.inputs, strict=False):
        for axis, dim in _single_axes(_split_labels(operand, moving)).items():
            locations[axis] = (node, dim)
        users = set(node.users)  # not the joins, which are new
        with graph.inserting_before(body):
            whole = join(graph, node, joins_of(operand, moving))
        node.replace_all_uses_with(whole, users.__contains__)
    for node, axis in zip(placeholders[len(structure.inputs) :], axes, strict=True):
        with graph.inserting_before(body):
            node.replace_all_uses_with(graph.call_function(_SIZE, locations[axis]))
        graph.erase_node(node)
    _split_results(graph, structure, output_numbers, moving, locations)


def _split_labels(operand: Operand, moving: Collection[int]) -> list[Label]:
    """The labels of a tensor's dimensions once they are split."""
    labels: list[Label] = []
    for label in operand.labels:
        if _is_joined(label, moving):
            labels += [(axis,) for axis in label]
        else:
            labels.append(label)
    return labels


def _split_results(
    graph: fx.Graph,
    structure: Structure,
    output_numbers: Sequence[int],
    moving: Collection[int],
    locations: Mapping[int, tuple[fx.Node, int]],
) -> None:
    """Changes a function so that it returns split dimensions, see `split_dimensions`.

    Args:
        locations: for each axis, a tensor and the dimension of it that is this axis.
    """
    [output] = graph.find_nodes(op="output")
    results = list(output.args[0])

    def size_of(axis: int) -> Any:
        if axis not in moving:
            return structure.sizes[axis]
        return graph.call_function(_SIZE, locations[axis])

    with graph.inserting_before(output):
        for position, number in enumerate(output_numbers):
            operand = structure.outputs[number]
            # The last first: a split moves the dimensions after it.
            for dim in reversed(_joined_dims(operand, moving)):
                sizes = list(map(size_of, operand.labels[dim]))
                result = graph.call_function(_UNFLATTEN, (results[position], dim, sizes))
                results[position] = result
    output.args = (tuple(results),)


def split_shape(
    position: int, splits: Sequence[Split], shapes: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """The shape of an input after its splits; ``shapes`` are those of all inputs before any."""
    shape = list(shapes[position])
    for dim, sizes in splits:
        shape[dim : dim + 1] = _split_size(shape[dim], sizes, shapes)
    return tuple(shape)


def _split_size(
    whole: int,
    sizes: Sequence[int | tuple[int, int] | None],
    shapes: Sequence[Sequence[int]],
) -> list[int]:
    """The sizes into which a dimension is split; one of them is the quotient by the others."""
    numbers = list[int]()
    quotient_at = None
    for position, size in enumerate(sizes):
        if size is None:
            quotient_at = position
        elif isinstance(size, tuple):
            numbers.append(shapes[size[0]][size[1]])
        else:
            numbers.append(size)
    if quotient_at is not None:
        numbers.insert(quotient_at, whole // math.prod(numbers))
    return numbers


def split(
    graph: fx.Graph, position: int, splits: Sequence[Split], nodes: Sequence[fx.Node]
) -> fx.Node:
    """Splits an input.

    Args:
        graph: the graph of the nodes.
        position: the position of the input among the nodes.
        splits: the splits of the input.
        nodes: all inputs before their splits, and sizes after them.
    """
    node = nodes[position]

    def size_of(size: int | tuple[int, int] | None) -> Any:
        if size is None:
            return -1
        if not isinstance(size, tuple):
            return size
        source, dim = nodes[size[0]], size[1]
        if isinstance(value_of(source), torch.SymInt):
            return source
        return graph.call_function(_SIZE, (source, dim))

    for dim, sizes in splits:
        node = graph.call_function(_UNFLATTEN, (node, dim, list(map(size_of, sizes))))
    return node


def join(graph: fx.Graph, node: fx.Node, joins: Sequence[Join]) -> fx.Node:
    """Joins dimensions of a tensor."""
    for first, last in joins:
        node = graph.call_function(_FLATTEN, (node, first, last))
    return node
