"""Selects the regions of a captured graph that become operators.

A region becomes an operator if the compiler can build a program for it, if the operator returns the
same gradients as the model, and if it is predicted to be faster than Inductor's kernels (see
`prediction`), or measured to be (see `measuring`). Where eager operators run the rest, it becomes
one if it is several kernels of PyTorch's. Otherwise smaller regions within it are tried.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ..compiler.errors import NotRowwiseError
from ..core.compat.fake import hints
from . import places, prediction
from .alike import LEAST_ALIKE, Former, parts_alike
from .graphs import (
    BIAS,
    COPIES,
    FUNCTION,
    VIEWS,
    dtype_of,
    is_tensor,
    is_view,
    name_of,
    overlap,
    size_of,
    tensors_of,
    value_of,
    written,
)
from .options import EAGER
from .order import Units
from .prediction import H200, Machine, Measure, Times, Work, Works, machine_of
from .programs import RegionProgram, build, prepare
from .regions import CHANGING, Finder, Region
from .report import RegionReport
from .shards import numbers_of
from .symbols import fix, have_hints

__all__ = ["AS_FAST", "MEASURED_AS_FAST", "Match", "Selector"]

# Why a region is left that could be an operator.
AS_FAST = "Inductor is predicted to be as fast"
MEASURED_AS_FAST = "Inductor is measured to be as fast"
# Predictions that differ by less, relative to the other, are no reason to leave a region in
# inference that is an operator in training.
_CLOSE = 0.1


@dataclass(frozen=True, eq=False)
class Match:
    """A region that becomes one operator.

    Attributes:
        region: the region.
        program: the operator.
        reached: the inputs that receive gradients from the operator's backward.
        works: what it takes by itself, without neighbours.
        machine: the GPU for which times are predicted.
        measured: the times that are measured, without neighbours; None where they are predicted.
        is_slice: whether it pays only as one of several slices of an operator.
        shard: locates this rank's part of its dropouts' mask; () where they have the whole mask.
    """

    region: Region
    program: RegionProgram
    reached: set[fx.Node]
    works: Works
    machine: Machine
    measured: Times | None = None
    is_slice: bool = False
    shard: tuple[int, ...] = ()


class Selector:
    """Selects the regions of a graph that become operators.

    Args:
        graph: the captured graph.
        needs: the nodes whose values have gradients.
        receives: the nodes of ``needs`` whose gradients come from a result of the graph.
        runner: what runs the nodes that are in no region: see `options`.
        measure: measures regions; None to predict all times.
    Attributes:
        matches: the selected regions, in the order of their selection.
        saved: the nodes that the selected regions save for the backward.
        reports: one for each region that was selected or left to Inductor.
        replaced: a map from views in regions to their copies outside.
    """

    def __init__(
        self,
        graph: fx.Graph,
        needs: set[fx.Node],
        receives: set[fx.Node],
        runner: str,
        measure: Measure | None = None,
    ) -> None:
        self.graph, self.needs, self.receives = graph, needs, receives
        self.runner, self._measure = runner, measure
        self.finder = Finder(graph, keeps_views=runner == EAGER)
        # Pairs of a part of the graph (see `parts_of`) and a tensor that a node of it writes into.
        self.changes: list[tuple[int, Tensor]] = []
        for node in graph.nodes:
            part = self.finder.part[node]
            self.changes += [(part, tensor) for tensor in written(node)]
        # Saving these nodes once more takes no memory. The programs of later regions are planned
        # with that: in a residual stream they then recompute every other sum and save the rest.
        self.saved = set[fx.Node]()
        self.matches: list[Match] = []
        self._of_regions = set[fx.Node]()  # the nodes of all regions, also of those that are left
        self._units = Units()
        self._reported = set[fx.Node]()
        self.reports: list[RegionReport] = []
        self.replaced: dict[fx.Node, fx.Node] = {}
        self._places: dict[Match, int] = {}  # of reports
        self._left: dict[fx.Node, int] = {}  # the same, by the regions' first nodes

    def select(self) -> None:
        """Tries all regions of the graph."""
        self._select_each(self.finder.regions())
        # Inductor rarely fuses a region with another, whose rows or reductions differ.
        self._of_regions.update(self.finder.claimed)
        if self.runner == EAGER:
            # Regions without a reduction or a dropout are several kernels of PyTorch's, too.
            self._select_each(filter(_has_columns, self.finder.rest(self._selected())))
        self._select_slices()
        for region in self.finder.changing():
            self._reported.update(region.nodes)
            self.reports.append(replace(_report_of(region, self.needs), reason=CHANGING))

    def _selected(self) -> set[fx.Node]:
        """The nodes of the selected regions."""
        return {node for match in self.matches for node in match.region.nodes}

    def _select_each(self, regions: Iterable[Region]) -> None:
        """Tries each region; if one cannot be one operator, tries smaller regions within it."""
        todo = deque(regions)
        while todo:
            region = todo.popleft()
            alike = parts_alike(region)
            if alike:
                todo.extendleft(reversed(alike))
                continue
            # `_match` may copy views out of the region, so describe the region before.
            report = _report_of(region, self.needs)
            try:
                match = self._match(region)
                match, report = self._timed(match, report)
                if not self._pays(match, match.works):
                    raise NotRowwiseError(MEASURED_AS_FAST if match.measured else AS_FAST)
            # After any error the region is left to Inductor, and the report has the reason.
            except Exception as error:  # noqa: BLE001
                smaller = self.finder.smaller(region)
                todo.extendleft(reversed(smaller))
                if not smaller:
                    self._report(region, replace(report, reason=_reason_of(error)))
            else:
                self._add(match, report)

    def _select_slices(self) -> None:
        """Tries the other regions of which several are one operator."""
        selected = self._selected()
        regions = list[Region]()
        for region in self.finder.rest(selected):
            regions += parts_alike(region) or [region]
        former = Former[Region](self.graph, lambda region: region, _kind, lambda *_: True)
        for group in former.form(regions):
            if len(group.members) < LEAST_ALIKE or not _has_columns(group.region):
                continue
            works = prediction.of_slices(group.members, self.needs, selected)
            times = works.times(_machine_of(group.region))
            if times.operator >= times.inductor:
                continue
            for region in group.members:
                self._select_slice(region)

    def _select_slice(self, region: Region) -> None:
        """Tries a region of a group, which is one operator with the others."""
        report = _report_of(region, self.needs)
        try:
            match = replace(self._match(region), is_slice=True)
        # As in `select`.
        except Exception as error:  # noqa: BLE001
            self._report(region, replace(report, reason=_reason_of(error)))
        else:
            self._add(match, report)

    def _report(self, region: Region, report: RegionReport) -> int:
        """Adds the report of a region, or replaces an earlier one; returns its place."""
        self._reported.update(region.nodes)
        place = self._left.setdefault(region.nodes[0], len(self.reports))
        self.reports[place : place + 1] = [report]
        return place

    def _add(self, match: Match, report: RegionReport) -> None:
        """Adds a region that becomes an operator, and reports it."""
        program = match.program
        fix(program.constants)
        # Also if there is no backward: inference has to build the same programs as training.
        self.saved.update(_saved(program))
        self.matches.append(match)
        self._of_regions.update(match.region.nodes)
        self._units.add(match.region)
        report = replace(
            report,
            unfused=_moved_by(match.region.nodes),
            kernels=sum(map(_is_kernel, match.region.nodes)),
            rows=program.rows,
            program=program.program,
        )
        self._places[match] = self._report(match.region, report)

    def _match(self, region: Region) -> Match:
        """The operator of a region.

        Raises:
            NotRowwiseError: the region cannot be one operator.
        """
        # An output may be the several results of an operator.
        if not all(map(is_tensor, region.outputs)):
            raise NotRowwiseError("a part of it has several results")
        reason = _why_eager(region, self.needs) if self.runner == EAGER else ""
        if reason:
            raise NotRowwiseError(reason)
        self._copy_views(region)
        program = build(region, self.saved, self.needs)
        reached = self._reached(region, program)
        plan = program.program.plan
        differentiable = {program.inputs[position] for position in plan.differentiable}
        # For the other inputs PyTorch's operators return gradients of zeros, but the program
        # returns no gradient.
        if not reached <= differentiable:
            raise NotRowwiseError("a gradient of it is zero")
        # The backward would read the tensor as it is after the change.
        if reached and self._saves_changed(region, program):
            raise NotRowwiseError("a tensor that it saves is changed later")
        if self._units.are_cyclic_with(region):
            raise NotRowwiseError("as an operator it would be in a cycle with another region")
        works = prediction.works_of(region, program, reached, self.receives)
        shard = numbers_of(region, program)
        return Match(region, program, reached, works, _machine_of(region), shard=shard)

    def _timed(self, match: Match, report: RegionReport) -> tuple[Match, RegionReport]:
        """A match and its report with the times of the region alone, measured if they are to be."""
        report = replace(report, times=match.works.times(match.machine))
        # These are operators, or left, whatever their times alone.
        is_decided = bool(_functions(match.region)) or _is_of_products(match.region)
        if self._measure is None or is_decided:
            return match, report
        times = self._measure(match.program, match.reached, self.receives)
        if isinstance(times, str):
            return match, replace(report, unmeasured=times)
        report = replace(report, times=times, is_measured=True)
        return replace(match, measured=times), report

    def _times(self, match: Match, works: Works) -> Times:
        """The times of a region: measured ones, with what is only predicted.

        Args:
            match: its operator.
            works: its work, perhaps among neighbours.
        """
        predicted = works.times(match.machine)
        if match.measured is None:
            return predicted
        # Not measured is the host's time for calls, which a CUDA graph lacks, and the part of its
        # time that Inductor saves by a fusion with neighbours.
        calls = Work(calls=works.operator.calls).seconds(match.machine)
        alone = match.works.times(match.machine).inductor
        part = predicted.inductor / alone if alone > 0 else 1.0
        operator, inductor = match.measured
        return Times(operator + calls, inductor * part)

    def _pays(self, match: Match, works: Works) -> bool:
        """Whether an operator is faster than Inductor, or the user asks for it.

        Args:
            match: the operator.
            works: the work of its region.
        """
        region = match.region
        # Among eager operators `_why_eager` has decided.
        if _functions(region) or self.runner == EAGER:
            return True
        ours, inductors = self._times(match, works)
        is_final = match.measured is not None or _has_gradient(region, self.needs)
        if ours < inductors or is_final:
            return ours < inductors
        # Inference selects the regions of training, so that it computes the same bits.
        if ours > (1 + _CLOSE) * inductors:
            return False
        ours, inductors = _in_training(match).times(match.machine)
        return ours < inductors

    def rest(self) -> tuple[int, int]:
        """The bytes that operators outside of the reported regions read and write, one by one.

        The second number is of those operators whose results have gradients.
        """
        nodes = list(itertools.filterfalse(self._reported.__contains__, self.graph.nodes))
        return _moved_by(nodes), _moved_by(filter(self.needs.__contains__, nodes))

    def note_group(
        self, matches: Sequence[Match], lookups: Sequence[int], outside: Sequence[str]
    ) -> None:
        """Reports that regions are one operator.

        Args:
            matches: the regions.
            lookups: the inputs whose rows it reads from tables of embeddings.
            outside: why it does not read those of other embeddings.
        """
        for match in matches:
            place, program = self._places[match], match.program.program
            report = self.reports[place]
            operands = {index: program.structure.inputs[index] for index in lookups}
            sizes = {
                index: report.rows * program.size_of_row(operand) * operand.dtype.itemsize
                for index, operand in operands.items()
            }
            saved = [size for index, size in sizes.items() if index in program.plan.saved_inputs]
            works = match.works.shared(len(matches))
            self.reports[place] = replace(
                report,
                slices=len(matches),
                times=works.times(match.machine),
                is_measured=False,
                unmeasured="",
                # An operator of its own would read and write the rows.
                unfused=report.unfused + 2 * sum(sizes.values()),
                lookups=len(lookups),
                of_tables=sum(saved),
                outside=tuple(dict.fromkeys(outside)),
            )

    def alone(self, matches: Iterable[Match]) -> list[Match]:
        """The matches that are to be an operator each; reports why the others are not.

        Their kernels are compiled.
        """
        selected = self._selected()
        paying = [match for match in matches if self._pays_alone(match, selected)]
        programs = list(map(operator.attrgetter("program", "reached"), paying))
        reasons = prepare(programs, self.receives)
        for match, reason in zip(paying, reasons, strict=True):
            self._leave(match, reason)
        return list(itertools.compress(paying, map(operator.not_, reasons)))

    def _pays_alone(self, match: Match, selected: set[fx.Node]) -> bool:
        """Whether an operator of a match by itself pays; reports if it does not."""
        works = prediction.among_neighbours(match.works, match.region, self.needs, self._of_regions)
        pays = (
            not match.is_slice and self._pays(match, works) and not self._is_behind(match, selected)
        )
        self._leave(match, "" if pays else AS_FAST)
        return pays

    def _is_behind(self, match: Match, selected: set[fx.Node]) -> bool:
        """Whether what Inductor computes before a region, with more work, decides the time."""
        is_open = not _functions(match.region) and self.runner != EAGER
        return is_open and prediction.follows_larger_reduction(match.region, selected)

    def _leave(self, match: Match, reason: str) -> None:
        """Reports that a match is no operator, if there is a reason."""
        place = self._places[match]
        if reason:
            self.reports[place] = replace(self.reports[place], program=None, reason=reason)

    def _copy_views(self, region: Region) -> None:
        """Copies views that are used outside a region; updates the sets of nodes and `replaced`."""
        copies = _copy_views(self.graph, region)
        for nodes in (self.needs, self.receives):
            copied = nodes.intersection(copies)
            nodes.update(map(copies.__getitem__, copied))
        self.replaced |= copies

    def _reached(self, region: Region, program: RegionProgram) -> set[fx.Node]:
        """The inputs to which the backward of a region passes gradients, perhaps all zeros."""
        members, reached = set(region.nodes), set[fx.Node]()
        todo = list(self.receives.intersection(region.outputs))
        while todo:
            new = self.needs.intersection(todo.pop().all_input_nodes) - reached
            reached |= new
            todo += members & new
        return reached.intersection(program.inputs)

    def _saves_changed(self, region: Region, program: RegionProgram) -> bool:
        """Whether a later part of the graph writes into a tensor that the backward reads."""
        part = self.finder.part[region.nodes[0]]
        later = [tensor for other, tensor in self.changes if other > part]
        return overlap(tensors_of(_saved(program)), later)


def _has_columns(region: Region) -> bool:
    """Whether no result is a number of each row, such as a computed index."""
    return all(tensor.dim() > 1 for tensor in tensors_of(region.outputs))


def _kind(region: Region) -> Any:
    """What is the same for regions that may be slices of one operator."""
    return _operators_of(region), tuple(map(dtype_of, filter(is_tensor, region.inputs)))


def _operators_of(region: Region) -> tuple[str, ...]:
    return tuple(map(name_of, region.nodes))


def _report_of(region: Region, needs: set[fx.Node]) -> RegionReport:
    """The report of a region whose outcome is not known yet."""
    return RegionReport(
        _operators(region),
        _shape(region),
        border=_border(region),
        has_gradient=_has_gradient(region, needs),
        functions=_functions(region),
        modules=places.modules(region.nodes),
        lines=places.lines(region.nodes),
    )


def _reason_of(error: Exception) -> str:
    if isinstance(error, NotRowwiseError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _operators(region: Region) -> tuple[str, ...]:
    """The names of a region's operators, each once."""
    names = dict.fromkeys(map(name_of, region.nodes))
    names.pop("", None)
    return tuple(names)


def _functions(region: Region) -> tuple[str, ...]:
    """The functions of `rowwise` whose results are in a region."""
    marked = [node.meta[FUNCTION] for node in region.nodes if FUNCTION in node.meta]
    return tuple(dict.fromkeys(marked))


def _shape(region: Region) -> tuple[int, ...]:
    """The shape of the largest output, in the call that is traced."""
    shapes = [hints(tensor.shape) for tensor in tensors_of(region.outputs)]
    return max(shapes, key=math.prod, default=())


def _border(region: Region) -> int:
    """The bytes of a region's inputs and outputs."""
    return sum(map(_bytes, tensors_of([*region.inputs, *region.outputs])))


def _moved_by(nodes: Iterable[fx.Node]) -> int:
    """The bytes that operators read and write one by one; views move none."""
    moved = 0
    for node in nodes:
        name = name_of(node)
        if not name or name in VIEWS:
            continue
        tensors = tensors_of([node, *node.all_input_nodes])
        # Sizes that depend on data have no number.
        moved += sum([_bytes(tensor) for tensor in tensors if have_hints(tensor.shape)])
    return moved


def _bytes(tensor: Tensor) -> int:
    """The bytes of a tensor's elements in the traced call."""
    return math.prod(hints(tensor.shape)) * tensor.dtype.itemsize


def _copy_views(graph: fx.Graph, region: Region) -> dict[fx.Node, fx.Node]:
    """Copies the views in a region that nodes outside use. These nodes then use the copies.

    So the region's outputs share no memory: a registered operator must not return views of its
    arguments, nor two views of one tensor.

    Returns:
        A map from each view to its copy. Programs that were built before have the view among their
        inputs, and are to read the copy instead.
    """
    members, copies = set(region.nodes), dict[fx.Node, fx.Node]()
    # In reverse order: the copy of a view of a view is a user outside by the time its base is
    # visited, and is changed to read the base's copy.
    for node in filter(is_view, reversed(region.nodes)):
        if members.issuperset(node.users):
            continue
        with graph.inserting_after(node):
            copy = graph.node_copy(node, lambda arg: arg)
        _replace_outside(node, copy, members)
        copies[node] = copy
    return copies


def _replace_outside(node: fx.Node, copy: fx.Node, members: set[fx.Node]) -> None:
    """Replaces a view by its copy in its users outside a region. ``own`` are the region's nodes."""
    node.replace_all_uses_with(copy, lambda user: user not in members and user is not copy)


def _machine_of(region: Region) -> Machine:
    """The GPU of a region; an H200 if it is on another device."""
    device: torch.device = tensors_of(region.outputs)[0].device
    return machine_of(device.index) if device.type == "cuda" else H200


def _in_training(match: Match) -> Works:
    """The work if vectors, and inputs of the region's size, had gradients."""
    program = match.program
    full_size = max(map(size_of, match.region.nodes))
    inputs = [program.inputs[index] for index in program.program.plan.differentiable]
    trained = [x for x in inputs if value_of(x).dim() == 1 or size_of(x) >= full_size]
    return prediction.works_of(match.region, program, trained, match.region.outputs)


def _why_eager(region: Region, needs: set[fx.Node]) -> str:
    """The reason to leave a region to eager operators; "" if it is to become an operator."""
    if _functions(region):
        return ""
    # A matrix product adds a bias in its own kernel, at no cost.
    if _is_of_products(region):
        return "it adds a bias to a matrix product or a convolution, and nothing more"
    kernels = sum(map(_is_kernel, region.nodes))
    # The gradient of a vector, such as a norm's weight, is a sum over rows: another kernel.
    has_vector = 1 in map(Tensor.dim, tensors_of(region.inputs))
    if kernels < 2 and not has_vector:
        return "it is one operator of PyTorch"
    is_small = _border(region) < BYTES_OF_LAUNCH and not _has_gradient(region, needs)
    if is_small and kernels < _LEAST_KERNELS:
        return "it has no gradient, and the host calls it in the time of one operator"
    return ""


def _is_of_products(region: Region) -> bool:
    """Whether matrix products and convolutions add all of a region."""
    return all(map(_is_free_in_products, region.nodes))


def _is_free_in_products(node: fx.Node) -> bool:
    return bool(node.meta.get(BIAS)) or name_of(node) in COPIES


def _is_kernel(node: fx.Node) -> bool:
    """Whether PyTorch's eager operator launches a kernel: no view, and no item of a tuple."""
    return name_of(node) not in VIEWS | {""}


# Where regions are small, the host calls two of PyTorch's kernels in the time of one operator.
_LEAST_KERNELS = 3
# The bytes that a GPU moves in the time that a launch of a small kernel takes: 2 µs of an H200.
BYTES_OF_LAUNCH = 8 * 2**20


def _has_gradient(region: Region, needs: set[fx.Node]) -> bool:
    return not needs.isdisjoint(region.outputs)


def _saved(program: RegionProgram) -> list[fx.Node]:
    """The inputs and outputs that are saved for the backward."""
    plan = program.program.plan
    inputs = [program.inputs[position] for position in plan.saved_inputs]
    outputs = [node for node, number in program.outputs if number == plan.intermediate_output]
    return [*inputs, *outputs]
