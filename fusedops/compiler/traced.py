"""The record of a traced function: its graph, and its tensors as values of the graph."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch

from .axes import Axes, Label
from .ir import Graph, Node

__all__ = ["TWICE", "Traced", "Value", "kind_of", "twice"]


@dataclass(frozen=True, eq=False)
class Value:
    """A traced tensor.

    Attributes:
        node: the node that computes it.
        labels: one label for each of its dimensions.
        dtype: its dtype.
    """

    node: Node
    labels: tuple[Label, ...]
    dtype: torch.dtype


# A value is indexed by its set of axes: a tensor with one axis in two dimensions would be read only
# along its diagonal.
TWICE = (
    "it has one dimension twice, as an outer product of a row with itself, or a tensor beside "
    "itself in another order; pass one of the two as an argument"
)


def twice(axes: Axes, value: Value) -> bool:
    """Whether two dimensions of a tensor are the same axis."""
    leaves = axes.leaves(tuple(itertools.chain.from_iterable(value.labels)))
    return len(set(leaves)) < len(leaves)


@dataclass
class Traced:
    """The result of tracing a function.

    Attributes:
        graph: holds all nodes.
        axes: the axes of the values.
        inputs: the input tensors: first the arguments, then the captured tensors.
        outputs: the returned tensors.
        container: how they are returned: "tensor", "tuple" or "list".
        captured: for each captured tensor, its position among the tensors of the function's state,
            which `state` reads.
        drops: the drop probability of each dropout, in order.
        lines: from a node's number to the line in the user's file, for nodes that have one.
        values: the computed floating-point tensors, in the order of the trace.
        noted: all computed tensors, in the order of the trace.
        file: the user's file.
        wide: whether anything is computed in fp64.
        fixed: dimensions whose sizes are constants of the function.
    """

    graph: Graph
    axes: Axes
    inputs: list[Value]
    outputs: list[Value] = field(default_factory=list)
    container: str = "tensor"
    captured: list[int] = field(default_factory=list)
    drops: list[float] = field(default_factory=list)
    lines: dict[int, int] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    noted: list[Value] = field(default_factory=list)
    file: str = ""
    wide: bool = False
    fixed: list[Label] = field(default_factory=list)


def kind_of(dtype: torch.dtype) -> str:
    """Return "float", "int" or "bool"."""
    if dtype is torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"
