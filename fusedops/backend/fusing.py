"""Puts programs in the place of regions."""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from ..compiler.errors import NotRowwiseError
from ..core import compat, operators, rng
from .casts import cast_together
from .dimensions import join, split
from .embeddings import with_summed_gradients
from .gradients import needs_gradients, receives_gradients, recorded
from .grouped import with_offsets_on_cpu
from .layouts import laid_out
from .permutations import with_rows_put_back
from .products import joined, padded
from .programs import Made, made, prepare
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
    name_of,
    overlap,
    parts_of,
    reshapes,
    size_of,
    tensors_of,
    value_of,
    written,
)
from .report import RegionReport

__all__ = ["fused"]

# Up to so many columns Inductor's kernels hold a row in registers.
_LONGEST_OF_INDUCTOR = 1024


def fused(gm: fx.GraphModule) -> list[RegionReport]:
    """Replaces the regions of a captured graph by operators, and reports each region."""
    apart = _biases_apart(gm.graph)
    needs, gradients_on = needs_gradients(gm.graph), recorded(gm.graph)
    receives = receives_gradients(gm.graph, needs)
    finder = Finder(gm.graph)
    changes = [(finder.part[node], changed) for node in gm.graph.nodes for changed in written(node)]
    todo, tried = deque(finder.found()), set[Region]()
    saved = set[fx.Node]()
    found, reports = list[tuple[Region, Made, set[fx.Node]]](), list[RegionReport]()
    replaced = dict[fx.Node, fx.Node]()
    while todo:
        region = todo.popleft()
        what = _what(region)
        functions = _functions(region)
        try:
            if reason := _why_not(region, needs):
                raise NotRowwiseError(reason)
            copies = _views_apart(gm.graph, region)
            for having in (needs, receives):
                having.update(copy for node, copy in copies.items() if node in having)
            replaced |= copies
            program = made(region, saved)
            reached = _reached(region, program, needs, receives)
            trained = {program.inputs[place] for place in program.program.plan.differentiable}
            if not reached <= trained:
                raise NotRowwiseError("a gradient of it is zero")
            later = [changed for part, changed in changes if part > finder.part[region.nodes[0]]]
            if later and reached and overlap(tensors_of(_saved(program)), later):
                raise NotRowwiseError("a tensor that it saves is changed later")
            if _is_cyclic(region, [other for other, *_ in found]):
                raise NotRowwiseError("as an operator it would be in a cycle with another region")
            prepare(program, reached, receives)
        except Exception as error:  # noqa: BLE001 - what is unknown in a region is Inductor's, with its reason
            reason = str(error) if isinstance(error, NotRowwiseError) else f"{type(error).__name__}: {error}"
            parts = [] if region in tried else finder.smaller(region)
            tried.update(parts)
            todo.extendleft(reversed(parts))
            if not parts:
                reports.append(RegionReport(*what, reason, functions=functions))
            continue
        compat.fix(program.numbers)
        saved.update(_saved(program))  # also where no backward follows: inference is to compute the same
        found.append((region, program, reached))
        reports.append(RegionReport(*what, "", _apart(region), program.rows, program.program, functions))
    reports += [RegionReport(*_what(region), CHANGING) for region in finder.changing()]
    for region, program, reached in found:
        cut = needs - reached if region.nodes[0] in gradients_on else set[fx.Node]()
        _replace(gm.graph, region, program, needs, cut, replaced, saves=bool(reached))
    _biases_back(gm.graph, apart, receives)
    laid_out(gm.graph, [replaced[old] for _, program, *_ in found for old, _ in program.outputs])
    padded(gm.graph)
    joined(gm.graph, needs, receives)
    cast_together(gm.graph, receives)
    with_summed_gradients(gm.graph, needs)
    with_rows_put_back(gm.graph, needs)
    with_offsets_on_cpu(gm.graph)
    _sort(gm.graph)
    for node in gm.graph.nodes:  # strides need not be what they were when a view was recorded
        if reshapes(node):
            node.target = torch.ops.aten.reshape.default
    drop_unused(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return reports


def _what(region: Region) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The operators of a region, each once, and the shape of its largest output."""
    return tuple(dict.fromkeys([name_of(node) for node in region.nodes if name_of(node)])), _shape(region)


def _functions(region: Region) -> tuple[str, ...]:
    """The functions of `rowwise` whose results are in a region."""
    return tuple(dict.fromkeys([node.meta[FUNCTION] for node in region.nodes if FUNCTION in node.meta]))


def _shape(region: Region) -> tuple[int, ...]:
    """Of the largest output, in the call that is traced."""
    values = [value for node in region.outputs for value in compat.leaves(value_of(node)) if isinstance(value, Tensor)]
    return max([compat.hints(value.shape) for value in values], key=math.prod, default=())


def _apart(region: Region) -> int:
    """Bytes that its operators read and write one by one; views move none."""
    moved = 0
    for node in region.nodes:
        if name_of(node) and name_of(node) not in VIEWS:
            values = [value_of(other) for other in (node, *node.all_input_nodes)]
            tensors = [value for value in compat.leaves(values) if isinstance(value, Tensor)]
            moved += sum([math.prod(compat.hints(t.shape)) * t.dtype.itemsize for t in tensors])
    return moved


# --- biases of matrix products ------------------------------------------------------------------------------------------


def _biases_apart(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Takes biases from matrix products, for regions to add: the sums, with the products.

    A product whose rows are only viewed as several dimensions has the bias added behind the view.
    """
    found, parts = {}, parts_of(graph)
    for node in list(graph.nodes):
        if name_of(node) != "addmm" or node.kwargs or value_of(node.args[0]).dim() != 1:
            continue
        bias, *factors = node.args
        users = list(node.users)
        is_viewed = len(users) == 1 and _keeps_columns(users[0]) and parts[users[0]] == parts[node]
        viewed = users[0] if is_viewed else node
        with graph.inserting_before(node):
            product = graph.call_function(torch.ops.aten.mm.default, tuple(factors))
        product.meta.update(node.meta)
        node.replace_all_uses_with(product)
        graph.erase_node(node)
        rows = product if viewed is node else viewed
        with graph.inserting_after(rows):
            total = graph.call_function(torch.ops.aten.add.Tensor, (rows, bias))
        total.meta.update(rows.meta)
        total.meta[BIAS] = True
        rows.replace_all_uses_with(total, lambda user, total=total: user is not total)  # type: ignore[misc]
        found[total] = product
    return found


def _keeps_columns(node: fx.Node) -> bool:
    if not reshapes(node):
        return False
    before, after = value_of(node.args[0]), value_of(node)  # type: ignore[arg-type]
    return type(after.shape[-1]) is int and before.shape[-1] == after.shape[-1]


def _biases_back(graph: fx.Graph, apart: dict[fx.Node, fx.Node], receives: set[fx.Node]) -> None:
    """Restores the products whose biases no region adds; and has them where the sums receive gradients."""
    for total, product in apart.items():
        if compat.is_erased(total):
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


# --- regions ------------------------------------------------------------------------------------------------------------


def _views_apart(graph: fx.Graph, region: Region) -> dict[fx.Node, fx.Node]:
    """Repeats outside the region the views that are used there, so that its outputs share no memory.

    Returns:
        a map from each view to its copy outside. Programs that were made earlier read the copy.
    """
    own, copies = set(region.nodes), dict[fx.Node, fx.Node]()
    for node in reversed(region.nodes):
        is_view = name_of(node) in VIEWS or (
            node.target is operator.getitem and name_of(node.args[0]) in VIEWS  # type: ignore[arg-type]
        )
        if is_view and any(user not in own for user in node.users):
            with graph.inserting_after(node):
                copy = graph.node_copy(node, lambda arg: arg)
            node.replace_all_uses_with(copy, lambda user, copy=copy: user not in own and user is not copy)  # type: ignore[misc]
            copies[node] = copy
    return copies


def _why_not(region: Region, needs: set[fx.Node]) -> str:
    """Why Inductor computes a region as well; "" if it does not."""
    if not all(isinstance(value_of(node), Tensor) for node in region.outputs):
        return "a part of it has several results"
    if _functions(region):
        return ""  # the user wants a kernel
    if any(name_of(node) == "native_dropout" for node in region.nodes):
        return ""  # its mask is not stored
    if max(map(columns_of, region.nodes)) > _LONGEST_OF_INDUCTOR:
        return ""  # it is read once, and not once a reduction
    full = max(map(size_of, region.nodes))
    small = [node for node in region.inputs if isinstance(value := value_of(node), Tensor) and size_of(node) < full
             and value.is_floating_point() and (node in needs or value.dim() == 1)]  # fmt: skip
    if not small:
        return "no gradient is summed over its rows, and no mask is stored"
    if all(node.meta.get(BIAS) or name_of(node) in COPIES for node in region.nodes):
        return "it adds a bias to a matrix product, and nothing more"
    return ""


def _reached(region: Region, made: Made, needs: set[fx.Node], receives: set[fx.Node]) -> set[fx.Node]:
    """The inputs that have gradients through a region, if only zeros."""
    own, found = set(region.nodes), set[fx.Node]()
    todo = [node for node in region.outputs if node in receives]
    while todo:
        new = needs.intersection(todo.pop().all_input_nodes) - found
        found |= new
        todo += own & new
    return found.intersection(made.inputs)


def _saved(made: Made) -> list[fx.Node]:
    """The inputs and outputs that are saved for the backward."""
    plan = made.program.plan
    return [*[made.inputs[place] for place in plan.saved_inputs],
            *[node for node, number in made.outputs if number == plan.intermediate_output]]  # fmt: skip


# --- the operators ------------------------------------------------------------------------------------------------------


def _replace(graph: fx.Graph, region: Region, made: Made, needs: set[fx.Node], cut: set[fx.Node],
             replaced: dict[fx.Node, fx.Node], *, saves: bool) -> None:  # fmt: skip
    """One node for the region's, before the first that uses it.

    Args:
        needs: the nodes whose values have gradients.
        cut: those of them that have none through the region, where the operator's would be zeros.
        replaced: from regions' outputs and views to the nodes that replace them.
        saves: whether a backward follows.
    """
    program, own = made.program, set(region.nodes)
    place = {node: place for place, node in enumerate(graph.nodes)}
    last = max(region.nodes, key=place.__getitem__)
    first = min([user for node in region.outputs for user in node.users if user not in own], key=place.__getitem__)
    dtypes = [value_of(node).dtype for node in made.inputs]
    constants = program.record(program.op)
    # Not beyond the last of its own, where gradients may be switched on again.
    with graph.inserting_before(first) if place[first] < place[last] else graph.inserting_before(last.next):
        seed, threshold = None, rng.threshold(program.p)
        if threshold > 0:
            seed = graph.call_function(torch.ops.fusedops.random_state.default, (value_of(made.inputs[0]).device,))
        target = getattr(torch.ops.fusedops, f"{program.name}_forward").default
        call = operators.encode(constants, tuple(dtypes), saves)
        nodes = [*[replaced.get(one, one) for one in made.inputs], *made.sizes]
        given = [split(graph, place, splits, nodes) for place, splits in enumerate(made.source.splits)]
        for number, one in enumerate(made.inputs):
            if one in cut:
                given[number] = graph.call_function(torch.ops.aten.detach.default, (given[number],))
        node = graph.call_function(target, (*given, seed, threshold, program.structure.cols, call))
        outs = [join(graph, graph.call_function(operator.getitem, (node, number)), joins)
                for number, joins in enumerate(made.source.joins)]  # fmt: skip
    taken = set[int]()
    for old, number in made.outputs:
        out = outs[number]
        if number in taken and escapes(old):  # values that are the same have memory each
            with graph.inserting_after(outs[-1]):
                out = graph.call_function(torch.ops.aten.clone.default, (out,))
        elif saves and old not in needs:  # all outputs of an operator have gradients, if one has
            with graph.inserting_after(outs[-1]):
                out = graph.call_function(torch.ops.aten.detach.default, (out,))
        taken.add(number)
        old.replace_all_uses_with(out, lambda user: user not in own)
        out.meta.setdefault("val", value_of(old))
        replaced[old] = out
    for node in reversed(region.nodes):
        graph.erase_node(node)


# --- order --------------------------------------------------------------------------------------------------------------


def _is_cyclic(region: Region, others: Sequence[Region]) -> bool:
    """Whether a region as a single node would be in a cycle; ``others`` become single nodes, too, without a cycle."""
    place = {node: place for place, node in enumerate(region.nodes[0].graph.nodes)}
    owners = {node: other for other in others for node in other.nodes}
    end = max([place[node] for node in region.nodes])
    places = [[place[node] for node in other.nodes] for other in others]
    for first, last in sorted([(min(own), max(own)) for own in places]):
        if first <= end:  # behind the end of all that overlaps no path leads back
            end = max(end, last)
    own, seen = set(region.nodes), set[fx.Node]()
    todo = [user for node in region.nodes for user in node.users if user not in own]
    while todo:
        node = todo.pop()
        if node in own:
            return True
        if node not in seen and place[node] <= end:
            reached = owners[node].nodes if node in owners else (node,)
            seen.update(reached)
            todo += [user for one in reached for user in one.users]
    return False


def _sort(graph: fx.Graph) -> None:
    """Arguments first, and otherwise as it is. Regions are where they are first used: what they use may come later."""
    for one, other in itertools.pairwise(arguments_first(graph.nodes)):
        one.append(other)
