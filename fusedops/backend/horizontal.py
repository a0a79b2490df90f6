"""Horizontal fusion: regions that compute the same function of different slices are one operator.

Regions form a group if their programs are one kernel (see `compiler.horizontal`), if they have
equally many rows, and if none needs another::

    the inputs of all ──▶ operator of all ──▶ the users of all

Where the model's order allows it, no member is delayed beyond what the model itself computes before
it needs a result. Otherwise the graph is reordered: see `alike`. Slices that are views of one
tensor, and results that are concatenated, are read and written in place::

    split ──▶ region 0 ─┐                 split
          ──▶ region 1 ─┼─▶ cat     x ──▶ operator ──▶ (no cat)
          ──▶ region 2 ─┘

Embeddings of which nothing else uses the rows are read from their tables: see `lookups`.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ..compiler.horizontal.forms import JOINT, LOOKUP, SEPARATE, SHARED
from ..compiler.horizontal.launching import outline_of, prepare
from ..compiler.horizontal.operator import SliceGroup, group_of, why_not
from ..compiler.layouts import row_layout
from ..core.calls.registration import defined
from ..core.compat.dispatch import without_modes
from ..core.compat.fake import hints
from ..core.configs import tuning
from ..core.launches import launch
from .alike import Former, Group
from .fx import recording_nothing
from .graphs import (
    captured_body,
    dtype_of,
    name_of,
    users_of,
    value_of,
)
from .lookups import Embeddings, divided, embeddings_of
from .order import order_with, peak_of, reorder
from .regions import DIVIDING, Region
from .replacing import call_operator, insertion_point, results_of, substitute
from .selection import Match
from .symbols import is_same

__all__ = ["Grouped", "groups_of", "replace_group"]

# The longest rows of slices that are grouped. The kernels of longer rows are as fast one by one,
# and their launches cost little beside what they compute.
_LONGEST = 512
# The estimated peak of memory may grow by this factor if groups reorder the graph. Towers of narrow
# layers add up to 1/64; those whose layers are four times as wide inside add 1/16.
_GROWTH = 1 + 1 / 64
aten = torch.ops.aten


def groups_of(
    graph: fx.Graph, matches: Sequence[Match], needs: set[fx.Node], saved: Collection[fx.Node]
) -> list[list[Match]]:
    """The groups of matches, of one member or more, in the order of their first members.

    The graph is reordered for groups whose members are not in order, unless its values would then
    take more memory: tensors of all members then exist at one time.

    Args:
        graph: the graph.
        matches: the matches.
        needs: the nodes whose values have gradients.
        saved: the nodes that the matches save for the backward.
    """

    def formed(*, layered: bool) -> list[Group[Match]]:
        former = Former[Match](graph, _region_of, _key, _have_same_rows, layered=layered)
        return former.form(matches)

    groups = formed(layered=False)
    units = list(map(_region_of, groups))
    layers = formed(layered=True) if len(units) > len(set(map(_key, matches))) else groups
    new_units = list(map(_region_of, layers))
    if len(new_units) < len(units):
        new_order = order_with(graph, new_units)
        peak = peak_of(list(graph.nodes), units, needs, saved)
        if peak_of(new_order, new_units, needs, saved) <= _GROWTH * peak:
            reorder(graph, new_order)
            groups = layers
    return list(itertools.chain.from_iterable([divided(group.members) for group in groups]))


def _region_of(owner: Match | Group[Match]) -> Region:
    return owner.region


def _key(match: Match) -> Any:
    """A key that is the same for matches that may be one group; None if this one may be in none."""
    program, region = match.program, match.program.program
    if region.structure.cols > _LONGEST or program.sizes or why_not(region):
        return None
    if match.shard or any(program.source.splits) or any(program.source.joins):
        return None
    if not all(_is_even(node, len(region.structure.rows)) for node in program.inputs):
        return None
    reached = tuple(map(match.reached.__contains__, program.inputs))
    return outline_of(region), reached, len(region.structure.rows), match.is_slice


def _is_even(node: fx.Node, rows: int) -> bool:
    """Whether a tensor's dimensions of rows can be one dimension without a copy."""
    value = value_of(node)
    shape, strides = value.shape[:rows], value.stride()[:rows]
    if value.dim() <= rows:
        return bool(value.is_contiguous())
    pairs = range(len(shape) - 1)
    return all(is_same(strides[dim], shape[dim + 1] * strides[dim + 1]) for dim in pairs)


def _have_same_rows(match: Match, other: Match) -> bool:
    """Whether two matches have the same rows in all calls, not only in the traced one."""
    pairs = zip(_rows(match), _rows(other), strict=True)
    return all(is_same(size, other_size) for size, other_size in pairs)


def _rows(match: Match) -> list[Any]:
    """The sizes of the dimensions of rows."""
    region = match.program.program
    node = match.program.inputs[region.first]
    return list(value_of(node).shape[: len(region.structure.rows)])


def groups_in(graph: fx.Graph) -> list[SliceGroup]:
    """The operators of groups that a graph calls, and the bodies in it, each once."""
    groups: dict[str, SliceGroup] = {}
    for node in graph.nodes:
        body = captured_body(node)
        called = groups_in(body) if body is not None else [_group_of(node)]
        groups |= {group.name: group for group in called if group is not None}
    return list(groups.values())


def _group_of(node: fx.Node) -> SliceGroup | None:
    """The operator of a group that a node calls; None for other nodes."""
    name = getattr(node.target, "__name__", "").split(".")[0]
    operator_of_node = defined(name.removesuffix("_call"))
    return operator_of_node if isinstance(operator_of_node, SliceGroup) else None


# --- replacement ----------------------------------------------------------------------------------


class Grouped(NamedTuple):
    """What became of a group that is one operator.

    Attributes:
        lookups: the inputs whose rows it reads from tables.
        outside: why it does not read those of other embeddings.
    """

    lookups: tuple[int, ...]
    outside: tuple[str, ...]


def replace_group(
    graph: fx.Graph,
    matches: Sequence[Match],
    replaced: dict[fx.Node, fx.Node],
    receives: Collection[fx.Node],
    left: Collection[fx.Node],
) -> Grouped | None:
    """Replaces the regions of a group by one operator, before the first node that uses a result.

    Args:
        graph: the graph of the regions.
        matches: the members.
        replaced: from regions' outputs and views to the nodes that replace them; it is extended.
        receives: the nodes to whose values the backward passes a gradient.
        left: nodes that are not replaced here, because other regions have them.
    Returns:
        What became of the group; None if Triton cannot compile the kernels.
    """
    return _Replacement(graph, matches, replaced, receives, left).run()


class _Replacement:
    def __init__(
        self,
        graph: fx.Graph,
        matches: Sequence[Match],
        replaced: dict[fx.Node, fx.Node],
        receives: Collection[fx.Node],
        left: Collection[fx.Node],
    ) -> None:
        self.graph, self.matches, self.replaced = graph, matches, replaced
        self.receives, self.left = receives, left
        self.programs = [match.program.program for match in matches]
        self.lead = self.programs[0]
        self.dims = len(self.lead.structure.rows)
        self.members = {node for match in matches for node in match.region.nodes}
        self.rows = _rows(matches[0])
        self.sized = matches[0].program.inputs[self.lead.first]  # its dimensions of rows are theirs
        self.embeddings: dict[int, Embeddings] = {}  # by the input
        self.outside: list[str] = []

    def run(self) -> Grouped | None:
        """See `replace_group`."""
        outputs = [old for match in self.matches for old in match.region.outputs]
        point = insertion_point(self.members, outputs)
        with self.graph.inserting_before(point):
            self._find_embeddings()
            inputs = list(map(self._input, range(len(self.lead.structure.inputs))))
            cats = list(map(self._cat, range(self.lead.count)))
            group = self._operator([form for form, _ in inputs], cats)
            if not self._compiles(group):
                return None
            call = self._call(group, [nodes for _, nodes in inputs])
            results = self._results(call, cats)
        self._replace_outputs(cats, results)
        self._erase_embeddings()
        return Grouped(tuple(self.embeddings), tuple(self.outside))

    def _operator(self, forms: Sequence[str], cats: Sequence[fx.Node | None]) -> SliceGroup:
        """The operator of all members, from the forms of inputs and the concatenated results."""
        of_results = [SEPARATE if cat is None else JOINT for cat in cats]
        lookups = [embeddings.lookup for embeddings in self.embeddings.values()]
        return group_of(self.programs, forms, of_results, lookups)

    def _call(self, group: SliceGroup, nodes_of_inputs: Sequence[Sequence[fx.Node]]) -> fx.Node:
        """The node that calls the operator, from the nodes of each input's tensors."""
        inputs = self.matches[0].program.inputs
        pairs = zip(nodes_of_inputs, self._wanted(), strict=True)
        reached = [is_wanted for nodes, is_wanted in pairs for _ in nodes]
        tensors = list(itertools.chain(*nodes_of_inputs))
        return call_operator(self.graph, group, [tensors], inputs, (dtype_of(inputs[0]),), reached)

    def _wanted(self) -> list[bool]:
        """For each input, whether a gradient reaches that of any member."""
        return [
            any(match.program.inputs[index] in match.reached for match in self.matches)
            for index in range(len(self.matches[0].program.inputs))
        ]

    def _results(
        self, call: fx.Node, cats: Sequence[fx.Node | None]
    ) -> dict[tuple[int, int], fx.Node]:
        """The results of a call, by the member's index and the result's number.

        A concatenated result is that of the first member, in two dimensions.
        """
        results, first = dict[tuple[int, int], fx.Node](), 0
        for number, cat in enumerate(cats):
            count = len(self.matches) if cat is None else 1
            for k, result in enumerate(results_of(self.graph, call, first, count)):
                shape = self._shape(number, k) if cat is None else ()
                results[k, number] = self._shaped(result, shape)
            first += count
        return results

    def _replace_outputs(
        self, cats: Sequence[fx.Node | None], results: dict[tuple[int, int], fx.Node]
    ) -> None:
        """Replaces the concatenations of results, and the outputs that none concatenates."""
        for number, cat in enumerate(cats):
            if cat is not None:
                self._replace_cat(number, cat, results[0, number])
        pairs = [
            (old, (k, number))
            for k, match in enumerate(self.matches)
            for old, number in match.program.outputs
            if cats[number] is None
        ]
        substitute(self.graph, pairs, results, self.members, self.replaced)

    def _erase_embeddings(self) -> None:
        """Erases the embeddings whose rows the operator reads from tables."""
        for embeddings in self.embeddings.values():
            for node in embeddings.nodes:
                self.graph.erase_node(node)

    def _compiles(self, group: SliceGroup) -> bool:
        """Compiles the kernels for the call that is traced; returns whether Triton can."""
        program = self.matches[0].program
        device = value_of(program.inputs[self.lead.first]).device
        if not launch.runs_kernels(device.type) or tuning.on_demand():  # the tuner would run them
            return True
        received = [
            any(node in self.receives for nodes in self._outputs(number) for node in nodes)
            for number in range(self.lead.count)
        ]
        rows = math.prod(hints(self.rows))
        try:
            with recording_nothing(), without_modes():
                prepare(group, device, rows, self._wanted(), received)
        except launch.NotCompiledError:
            return False
        return True

    # --- inputs -----------------------------------------------------------------------------------

    def _find_embeddings(self) -> None:
        """Finds the inputs whose rows are read from tables."""
        for index in filter(self._is_by_row, range(len(self.lead.structure.inputs))):
            embeddings = embeddings_of(index, self.matches, self.dims)
            if isinstance(embeddings, str):
                self.outside += filter(None, [embeddings])
                continue
            self.embeddings[index] = embeddings
            if index == self.lead.first:
                self.sized = embeddings.indices[0]

    def _input(self, index: int) -> tuple[str, list[fx.Node]]:
        """The form of an input, and the nodes of its tensors."""
        embeddings = self.embeddings.get(index)
        if embeddings is not None:
            indices = [self._flat(node, by_row=False) for node in embeddings.indices]
            return LOOKUP, [*embeddings.tables, *indices]
        nodes = [match.program.inputs[index] for match in self.matches]
        nodes = [self.replaced.get(node, node) for node in nodes]
        by_row = self._is_by_row(index)
        if len(set(nodes)) == 1:
            return SHARED, [self._flat(nodes[0], by_row)]
        return self._slices(index, nodes, by_row)

    def _slices(self, index: int, nodes: list[fx.Node], by_row: bool) -> tuple[str, list[fx.Node]]:
        """The form and the tensors of an input that the members do not share.

        Args:
            index: the input's.
            nodes: the input of each member.
            by_row: whether it has rows.
        """
        base = _base_of(nodes, self.dims if by_row else 0)
        sizes = [p.size_of_row(p.structure.inputs[index]) for p in self.programs]
        if base is not None and min(sizes) > 1:
            if index == self.lead.first:
                self.sized = base
            return JOINT, [self._flat(base, by_row, sum(sizes))]
        return SEPARATE, [self._flat(node, by_row) for node in nodes]

    def _is_by_row(self, index: int) -> bool:
        structure = self.lead.structure
        return row_layout(structure, structure.inputs[index], ()) == "rows"

    def _flat(self, node: fx.Node, by_row: bool, size: int = 0) -> fx.Node:
        """A tensor with rows in two dimensions, a vector or an index in one."""
        value = value_of(node)
        # Without dimensions of rows, all elements are one row.
        is_flat = value.dim() == self.dims + 1 == 2 if by_row else value.dim() == 1
        if is_flat:
            return node
        own = size or math.prod(map(int, value.shape[self.dims :]))
        shape = [-1, own] if by_row else [-1]
        return self.graph.call_function(aten.reshape.default, (node, shape))

    # --- results ----------------------------------------------------------------------------------

    def _outputs(self, number: int) -> list[list[fx.Node]]:
        """For each member, the nodes that have a result."""
        return [[o for o, n in match.program.outputs if n == number] for match in self.matches]

    def _cat(self, number: int) -> fx.Node | None:
        """The node that concatenates a result of all members, and of nothing between them."""
        outputs = self._outputs(number)
        if {*map(len, outputs)} != {1}:
            return None
        nodes = list(itertools.chain(*outputs))
        cat = _only_user(nodes)
        if cat is None or cat in self.left or not self._are_columns(number, nodes):
            return None
        is_along_columns = _argument(cat, 1) % value_of(cat).dim() == self.dims
        return cat if is_along_columns and _has_run(cat, nodes) else None

    def _are_columns(self, number: int, nodes: Sequence[fx.Node]) -> bool:
        """Whether a result has one dimension of columns, and more than one column, in all members.

        Args:
            number: the result's.
            nodes: the result of each member.
        """
        sizes = [p.size_of_row(p.structure.outputs[number]) for p in self.programs]
        dims = {value_of(node).dim() for node in nodes}
        return dims == {self.dims + 1} and min(sizes) > 1

    def _replace_cat(self, number: int, cat: fx.Node, result: fx.Node) -> None:
        """Replaces the concatenation of a result, or its part of a longer one."""
        nodes = [node for (node,) in self._outputs(number)]
        tensors = _concatenated(cat)
        rest = [node for node in tensors if node not in nodes]
        with self.graph.inserting_before(cat):
            value = value_of(cat)
            if not rest:
                shaped = self._shaped(result, value.shape)
            else:
                whole = sum(int(value_of(node).shape[-1]) for node in nodes)
                shaped = self._shaped(result, [*value.shape[:-1], whole])
                start = tensors.index(nodes[0])
                tensors[start : start + len(nodes)] = [shaped]
                shaped = self.graph.call_function(aten.cat.default, (tensors, self.dims))
        shaped.meta.setdefault("val", value)
        cat.replace_all_uses_with(shaped)
        self.replaced[cat] = shaped
        self.graph.erase_node(cat)

    def _shape(self, number: int, k: int) -> Sequence[Any]:
        """The shape of a result of a slice, in the traced call."""
        structure = self.programs[k].structure
        own = structure.outputs[number].labels[self.dims :]
        return [*self.rows, *self.programs[k].shape(own, structure.sizes)]

    def _shaped(self, result: fx.Node, shape: Sequence[Any]) -> fx.Node:
        """A result of two dimensions, rows and columns, with those of ``shape``."""
        if not shape or len(shape) == self.dims + 1 == 2:
            return result
        return self.graph.call_function(
            aten.view.default, (result, [*self._leading(), *map(int, shape[self.dims :])])
        )

    def _leading(self) -> list[Any]:
        """The sizes of the dimensions of rows: numbers, or nodes that compute them."""
        call = self.graph.call_function
        return [
            size if isinstance(size, int) else call(aten.sym_size.int, (self.sized, dim))
            for dim, size in enumerate(self.rows)
        ]


def _only_user(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """The node that concatenates or stacks these nodes, if nothing else uses them."""
    users = users_of(nodes)
    if len(users) != 1:
        return None
    (user,) = users
    return user if name_of(user) in ("cat", "stack") else None


def _has_run(cat: fx.Node, nodes: Sequence[fx.Node]) -> bool:
    """Whether a node concatenates these nodes once, one after the other, or stacks only them."""
    tensors = _concatenated(cat)
    start = tensors.index(nodes[0])
    is_run = tensors[start : start + len(nodes)] == nodes
    is_whole = len(tensors) == len(nodes)
    return is_run and (is_whole or name_of(cat) == "cat") and len({*tensors}) == len(tensors)


def _concatenated(cat: fx.Node) -> list[fx.Node]:
    """The tensors that a node concatenates."""
    tensors: Any = cat.args[0]
    return list(tensors)


def _base_of(nodes: Sequence[fx.Node], dims: int) -> fx.Node | None:
    """The tensor whose slices these nodes are, all of them in order; None for other nodes.

    Args:
        nodes: the slices.
        dims: the number of dimensions of rows, which precede the slices' own.
    """
    divided = _parts_of_split(nodes) or _selected(nodes)
    if divided is None:
        return None
    base, dim = divided
    value = value_of(base)
    return base if value.is_contiguous() and dim % value.dim() == dims else None


def _argument(node: fx.Node, position: int) -> Any:
    """The argument of a node at a position; 0, the default of dimensions, if it has fewer."""
    return node.args[position] if len(node.args) > position else 0


def _parts_of_split(nodes: Sequence[fx.Node]) -> tuple[fx.Node, int] | None:
    """The tensor and the dimension that a node splits into these, and no others."""
    split: Any = nodes[0].args[0] if nodes[0].target is operator.getitem else None
    # The operators that this pass adds have no value yet.
    if split is None or name_of(split) not in DIVIDING or value_of(split) is None:
        return None
    wanted = [(split, k) for k in range(len(value_of(split)))]
    if [node.args for node in nodes] != wanted:
        return None
    return split.args[0], _argument(split, 1 if name_of(split) == "unbind" else 2)


def _selected(nodes: Sequence[fx.Node]) -> tuple[fx.Node, int] | None:
    """The tensor and the dimension along which these nodes select each index."""
    if {*map(name_of, nodes)} != {"select"}:
        return None
    base: Any
    base, dim, _ = nodes[0].args
    if value_of(base) is None:
        return None
    wanted = [(base, dim, k) for k in range(value_of(base).shape[dim])]
    return (base, dim) if [node.args for node in nodes] == wanted else None  # type: ignore[return-value]
