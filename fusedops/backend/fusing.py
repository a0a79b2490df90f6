"""Replaces the regions of a captured graph by operators."""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..compiler.errors import NotRowwiseError
from ..core.calls import operators
from ..core.compat.fake import hints
from ..core.random import rng
from .casts import cast_together
from .dimensions import join, split
from .embeddings import with_summed_gradients
from .fx import is_erased
from .gradients import needs_gradients, receives_gradients, recorded
from .grouped import with_offsets_on_cpu
from .layouts import restore_strides
from .permutations import with_rows_put_back
from .products import join_products, pad_products
from .programs import RegionProgram, build, prepare
from .regions import (
    BIAS,
    CHANGING,
    COPIES,
    FUNCTION,
    VIEWS,
    Finder,
    Region,
    arguments_first,
    columns_of,
    drop_unused,
    escapes,
    is_view,
    name_of,
    overlap,
    parts_of,
    reshapes,
    size_of,
    tensors_of,
    users_of,
    value_of,
    written,
)
from .report import RegionReport
from .symbols import fix

__all__ = ["fused"]

# Up to so many columns Inductor's kernels hold a row in registers.
_LONGEST_OF_INDUCTOR = 1024


def fused(gm: fx.GraphModule) -> list[RegionReport]:
    """Replaces the regions of a captured graph by operators, and reports each region."""
    graph = gm.graph
    sums = _split_biases(graph)
    needs, gradients_on = needs_gradients(graph), recorded(graph)
    receives = receives_gradients(graph, needs)
    planner = _Planner(graph, needs, receives)
    planner.plan()
    for match in planner.matches:
        cut = set[fx.Node]()
        if match.region.nodes[0] in gradients_on:
            cut = needs - match.reached
        _replace(graph, match, needs, cut, planner.replaced)
    _restore_biases(graph, sums, receives)
    outputs = [old for match in planner.matches for old, _ in match.program.outputs]
    restore_strides(graph, [planner.replaced[old] for old in outputs])
    pad_products(graph)
    # Before casts are joined: these are then concatenated by the same operator.
    join_products(graph, needs, receives)
    cast_together(graph, receives)
    with_summed_gradients(graph, needs)
    with_rows_put_back(graph, needs)
    with_offsets_on_cpu(graph)
    _sort(graph)
    for node in graph.nodes:  # strides need not be what they were when a view was recorded
        if reshapes(node):
            node.target = torch.ops.aten.reshape.default
    drop_unused(graph)
    graph.lint()
    gm.recompile()
    return planner.reports


@dataclass(frozen=True)
class _Match:
    """A region that becomes one operator.

    Attributes:
        region: the region.
        program: the operator.
        reached: the inputs that have gradients through it.
    """

    region: Region
    program: RegionProgram
    reached: set[fx.Node]


class _Planner:
    """Finds the regions of a graph that become operators.

    Attributes:
        matches: these regions, in the order in which they were found.
        reports: of all regions.
        replaced: from views in regions to their copies outside.
    """

    def __init__(self, graph: fx.Graph, needs: set[fx.Node], receives: set[fx.Node]) -> None:
        self.graph, self.needs, self.receives = graph, needs, receives
        self.finder = Finder(graph)
        part = self.finder.part
        self.changes = [(part[node], tensor) for node in graph.nodes for tensor in written(node)]
        self.saved = set[fx.Node]()
        self.matches: list[_Match] = []
        self.reports: list[RegionReport] = []
        self.replaced: dict[fx.Node, fx.Node] = {}

    def plan(self) -> None:
        """Tries each region, and smaller ones in those that cannot be one kernel."""
        todo, tried = deque(self.finder.regions()), set[Region]()
        while todo:
            region = todo.popleft()
            # Before the trial, which may copy views out of the region.
            operators_, shape = _operators(region), _shape(region)
            functions = _functions(region)
            try:
                match = self._match(region)
            # Inductor compiles a region with an unknown part; the report has the reason.
            except Exception as error:  # noqa: BLE001
                parts = [] if region in tried else self.finder.smaller(region)
                tried.update(parts)
                todo.extendleft(reversed(parts))
                if not parts:
                    reason = _reason_of(error)
                    report = RegionReport(operators_, shape, reason, functions=functions)
                    self.reports.append(report)
                continue
            program = match.program
            fix(program.numbers)
            # Also where no backward follows: inference is to compute the same.
            self.saved.update(_saved(program))
            self.matches.append(match)
            unfused = _unfused_bytes(region)
            self.reports.append(
                RegionReport(
                    operators_, shape, "", unfused, program.rows, program.program, functions
                )
            )
        self.reports += [
            RegionReport(_operators(region), _shape(region), CHANGING)
            for region in self.finder.changing()
        ]

    def _match(self, region: Region) -> _Match:
        """The operator of a region.

        Raises:
            NotRowwiseError: it cannot be one, or Inductor computes the region as well.
        """
        reason = _why_not(region, self.needs)
        if reason:
            raise NotRowwiseError(reason)
        self._copy_views(region)
        program = build(region, self.saved)
        reached = self._reached(region, program)
        trained = {program.inputs[position] for position in program.program.plan.differentiable}
        if not reached <= trained:
            raise NotRowwiseError("a gradient of it is zero")
        if reached and self._saves_changed(region, program):
            raise NotRowwiseError("a tensor that it saves is changed later")
        if _is_cyclic(region, [match.region for match in self.matches]):
            raise NotRowwiseError("as an operator it would be in a cycle with another region")
        prepare(program, reached, self.receives)
        return _Match(region, program, reached)

    def _copy_views(self, region: Region) -> None:
        """Copies the views out of a region, and records what the copies replace."""
        copies = _copy_views(self.graph, region)
        for nodes in (self.needs, self.receives):
            nodes.update(copy for node, copy in copies.items() if node in nodes)
        self.replaced |= copies

    def _reached(self, region: Region, program: RegionProgram) -> set[fx.Node]:
        """The inputs that have gradients through a region, if only zeros."""
        own, reached = set(region.nodes), set[fx.Node]()
        todo = [node for node in region.outputs if node in self.receives]
        while todo:
            new = self.needs.intersection(todo.pop().all_input_nodes) - reached
            reached |= new
            todo += own & new
        return reached.intersection(program.inputs)

    def _saves_changed(self, region: Region, program: RegionProgram) -> bool:
        """Whether a later part of the graph writes into a tensor that the backward reads."""
        part = self.finder.part[region.nodes[0]]
        later = [tensor for other, tensor in self.changes if other > part]
        return bool(later) and overlap(tensors_of(_saved(program)), later)


def _reason_of(error: Exception) -> str:
    if isinstance(error, NotRowwiseError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _operators(region: Region) -> tuple[str, ...]:
    """The names of a region's operators, each once."""
    names = [name_of(node) for node in region.nodes]
    return tuple(dict.fromkeys([name for name in names if name]))


def _functions(region: Region) -> tuple[str, ...]:
    """The functions of `rowwise` whose results are in a region."""
    marked = [node.meta[FUNCTION] for node in region.nodes if FUNCTION in node.meta]
    return tuple(dict.fromkeys(marked))


def _shape(region: Region) -> tuple[int, ...]:
    """The shape of the largest output, in the call that is traced."""
    shapes = [hints(tensor.shape) for tensor in tensors_of(region.outputs)]
    return max(shapes, key=math.prod, default=())


def _unfused_bytes(region: Region) -> int:
    """The bytes that a region's operators read and write one by one; views move none."""
    moved = 0
    for node in region.nodes:
        if not name_of(node) or name_of(node) in VIEWS:
            continue
        tensors = tensors_of([node, *node.all_input_nodes])
        moved += sum([math.prod(hints(t.shape)) * t.dtype.itemsize for t in tensors])
    return moved


# --- biases of matrix products --------------------------------------------------------------------


def _split_biases(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Splits the biases from matrix products, for regions to add.

    Returns:
        A map from each sum to its product. A product whose rows are only viewed as several
        dimensions has the bias added after the view.
    """
    sums, parts = {}, parts_of(graph)
    for node in list(graph.nodes):
        if name_of(node) != "addmm" or node.kwargs or value_of(node.args[0]).dim() != 1:
            continue
        total, product = _split_bias(graph, node, parts)
        sums[total] = product
    return sums


def _split_bias(
    graph: fx.Graph, node: fx.Node, parts: Mapping[fx.Node, int]
) -> tuple[fx.Node, fx.Node]:
    """Replaces ``addmm`` by a product and a sum; returns the sum, then the product."""
    bias, *factors = node.args
    view = _only_view(node, parts)
    with graph.inserting_before(node):
        product = graph.call_function(torch.ops.aten.mm.default, tuple(factors))
    product.meta.update(node.meta)
    node.replace_all_uses_with(product)
    graph.erase_node(node)
    rows = product if view is None else view
    with graph.inserting_after(rows):
        total = graph.call_function(torch.ops.aten.add.Tensor, (rows, bias))
    total.meta.update(rows.meta)
    total.meta[BIAS] = True
    rows.replace_all_uses_with(total, lambda user: user is not total)
    return total, product


def _only_view(node: fx.Node, parts: Mapping[fx.Node, int]) -> fx.Node | None:
    """The only user of a node, if that views it with the same columns in the same part."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    return user if _keeps_columns(user) and parts[user] == parts[node] else None


def _keeps_columns(node: fx.Node) -> bool:
    if not reshapes(node):
        return False
    before, after = value_of(node.args[0]), value_of(node)  # type: ignore[arg-type]
    return type(after.shape[-1]) is int and before.shape[-1] == after.shape[-1]


def _restore_biases(
    graph: fx.Graph, sums: Mapping[fx.Node, fx.Node], receives: set[fx.Node]
) -> None:
    """Restores the products whose biases no region adds.

    Args:
        graph: with operators in the place of regions.
        sums: from `_split_biases`.
        receives: the nodes that receive gradients, to which restored products are added.
    """
    for total, product in sums.items():
        if is_erased(total):  # a region has it
            continue
        rows, bias = total.args
        assert isinstance(rows, fx.Node)
        total.replace_all_uses_with(rows)
        graph.erase_node(total)
        with graph.inserting_before(product):
            node = graph.call_function(torch.ops.aten.addmm.default, (bias, *product.args))
        node.meta.update(product.meta)
        if total in receives:
            receives.add(node)
        product.replace_all_uses_with(node)
        graph.erase_node(product)


# --- regions --------------------------------------------------------------------------------------


def _copy_views(graph: fx.Graph, region: Region) -> dict[fx.Node, fx.Node]:
    """Repeats outside a region the views that are used there: then its outputs share no memory.

    Returns:
        A map from each view to its copy outside. Programs that were built earlier read the copy.
    """
    own, copies = set(region.nodes), dict[fx.Node, fx.Node]()
    for node in reversed(region.nodes):
        if not is_view(node) or own.issuperset(node.users):
            continue
        with graph.inserting_after(node):
            copy = graph.node_copy(node, lambda arg: arg)
        node.replace_all_uses_with(
            copy,
            lambda user, copy=copy: user not in own and user is not copy,  # type: ignore[misc]
        )
        copies[node] = copy
    return copies


def _has_several_results(region: Region, needs: set[fx.Node]) -> bool:
    """Whether an output is no tensor."""
    return not all(isinstance(value_of(node), Tensor) for node in region.outputs)


def _is_of_rowwise(region: Region, needs: set[fx.Node]) -> bool:
    return bool(_functions(region))


def _has_dropout(region: Region, needs: set[fx.Node]) -> bool:
    return "native_dropout" in map(name_of, region.nodes)


def _has_long_rows(region: Region, needs: set[fx.Node]) -> bool:
    return max(map(columns_of, region.nodes)) > _LONGEST_OF_INDUCTOR


def _sums_no_gradient(region: Region, needs: set[fx.Node]) -> bool:
    """Whether no input is smaller than the region and has a gradient, as a norm's weight has."""
    full = max(map(size_of, region.nodes))
    return not any(_is_summed_over_rows(node, full, needs) for node in region.inputs)


def _is_summed_over_rows(node: fx.Node, full: int, needs: set[fx.Node]) -> bool:
    """Whether the gradient of an input is a sum over rows.

    A vector counts without a gradient, too: inference is to compute the same as training.
    """
    value = value_of(node)
    if not isinstance(value, Tensor) or size_of(node) >= full or not value.is_floating_point():
        return False
    return node in needs or value.dim() == 1


def _adds_bias_alone(region: Region, needs: set[fx.Node]) -> bool:
    return all(node.meta.get(BIAS) or name_of(node) in COPIES for node in region.nodes)


# Which regions become operators: the first rule that holds decides. Its reason leaves a region to
# Inductor; "" has it become an operator, as a region does for which no rule holds.
_RULES: tuple[tuple[Callable[[Region, set[fx.Node]], bool], str], ...] = (
    (_has_several_results, "a part of it has several results"),
    (_is_of_rowwise, ""),  # the user wants a kernel
    (_has_dropout, ""),  # its mask is not stored
    (_has_long_rows, ""),  # a row is read once, and not once a reduction
    (_sums_no_gradient, "no gradient is summed over its rows, and no mask is stored"),
    (_adds_bias_alone, "it adds a bias to a matrix product, and nothing more"),
)


def _why_not(region: Region, needs: set[fx.Node]) -> str:
    """The reason why Inductor computes a region as well; "" if it does not."""
    return next((reason for holds, reason in _RULES if holds(region, needs)), "")


def _saved(program: RegionProgram) -> list[fx.Node]:
    """The inputs and outputs that are saved for the backward."""
    plan = program.program.plan
    inputs = [program.inputs[position] for position in plan.saved_inputs]
    outputs = [node for node, number in program.outputs if number == plan.intermediate_output]
    return [*inputs, *outputs]


# --- the operators --------------------------------------------------------------------------------


def _replace(
    graph: fx.Graph,
    match: _Match,
    needs: set[fx.Node],
    cut: set[fx.Node],
    replaced: dict[fx.Node, fx.Node],
) -> None:
    """Replaces a region by one node, before the first that uses it.

    Args:
        graph: of the region.
        match: the region and its program.
        needs: the nodes whose values have gradients.
        cut: those of them that have none through the region, where the operator's would be zeros.
        replaced: from regions' outputs and views to the nodes that replace them; it is extended.
    """
    own = set(match.region.nodes)
    with graph.inserting_before(_insertion_point(graph, match.region)):
        results = _call(graph, match, cut, replaced)
    saves = bool(match.reached)
    returned = set[int]()
    for old, number in match.program.outputs:
        result = results[number]
        change = None
        if number in returned and escapes(old):
            change = torch.ops.aten.clone.default  # equal values have separate memory
        elif saves and old not in needs:
            # All outputs of an operator have gradients, if one has.
            change = torch.ops.aten.detach.default
        if change is not None:
            with graph.inserting_after(results[-1]):
                result = graph.call_function(change, (result,))
        returned.add(number)
        old.replace_all_uses_with(result, lambda user: user not in own)
        result.meta.setdefault("val", value_of(old))
        replaced[old] = result
    for node in reversed(match.region.nodes):
        graph.erase_node(node)


def _insertion_point(graph: fx.Graph, region: Region) -> fx.Node:
    """The node before which a region's operator goes."""
    position = {node: position for position, node in enumerate(graph.nodes)}
    own = set(region.nodes)
    first = min(users_of(region.outputs) - own, key=position.__getitem__)
    last = max(region.nodes, key=position.__getitem__)
    # Not after the last of its own nodes, where gradients may be switched on again.
    return first if position[first] < position[last] else last.next


def _call(
    graph: fx.Graph, match: _Match, cut: set[fx.Node], replaced: Mapping[fx.Node, fx.Node]
) -> list[fx.Node]:
    """Calls a region's operator; returns its results, in the program's order.

    Args:
        graph: of the region.
        match: the region and its program.
        cut: the inputs whose gradients end here.
        replaced: from regions' outputs and views to the nodes that replace them.
    """
    region_program = match.program
    program, inputs = region_program.program, region_program.inputs
    dtypes = [value_of(node).dtype for node in inputs]
    constants = program.record(program.op)
    seed, threshold = None, rng.threshold(program.p)
    if threshold > 0:
        device = value_of(inputs[0]).device
        seed = graph.call_function(torch.ops.fusedops.random_state.default, (device,))
    target = getattr(torch.ops.fusedops, f"{program.name}_forward").default
    encoded = operators.encode(constants, tuple(dtypes), bool(match.reached))
    nodes = [*[replaced.get(node, node) for node in inputs], *region_program.sizes]
    arguments: list[Any] = [
        split(graph, position, splits, nodes)
        for position, splits in enumerate(region_program.source.splits)
    ]
    for position, node in enumerate(inputs):
        if node in cut:
            detach = torch.ops.aten.detach.default
            arguments[position] = graph.call_function(detach, (arguments[position],))
    args = (*arguments, seed, threshold, program.structure.cols, encoded)
    call = graph.call_function(target, args)
    results = []
    for number, joins in enumerate(region_program.source.joins):
        result = graph.call_function(operator.getitem, (call, number))
        results.append(join(graph, result, joins))
    return results


# --- order ----------------------------------------------------------------------------------------


def _is_cyclic(region: Region, others: Sequence[Region]) -> bool:
    """Whether a region as a single node would be in a cycle.

    The ``others`` become single nodes, too, without a cycle: a path that enters one of them may
    leave it from any of its nodes.
    """
    position = {node: position for position, node in enumerate(region.nodes[0].graph.nodes)}
    owners: dict[fx.Node, Region] = {}
    for other in others:
        owners.update(dict.fromkeys(other.nodes, other))
    end = _end_of_overlap(region, others, position)
    own, seen = set(region.nodes), set[fx.Node]()
    todo = users_of(own) - own
    while todo:
        node = todo.pop()
        if node in own:
            return True
        if position[node] > end:
            continue
        reached = owners[node].nodes if node in owners else [node]
        seen.update(reached)
        todo |= users_of(reached) - seen
    return False


def _end_of_overlap(
    region: Region, others: Sequence[Region], position: Mapping[fx.Node, int]
) -> int:
    """The last position from which a path may lead back to a region.

    Regions that overlap in the order of the graph are joined to one span; no path leads back from
    after its end.
    """
    spans = []
    for other in others:
        positions = list(map(position.__getitem__, other.nodes))
        spans.append((min(positions), max(positions)))
    end = max(map(position.__getitem__, region.nodes))
    for first, last in sorted(spans):
        if first <= end:
            end = max(end, last)
    return end


def _sort(graph: fx.Graph) -> None:
    """Sorts a graph topologically, and otherwise leaves its order.

    Operators are before the first nodes that use them: nodes that they use may come later.
    """
    for node, following in itertools.pairwise(arguments_first(graph.nodes)):
        node.append(following)
