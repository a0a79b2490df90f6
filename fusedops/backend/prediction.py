"""Predicts the times of a region: as an operator, and as kernels of Inductor.

Both read and write the same tensors. They differ in what they do beside that::

                      operator                         Inductor
    long rows         one read                         one read for each reduction
    sums over rows    in the kernel of the backward    kernels that read what they sum once more
    dropouts          masks are drawn twice            masks are drawn, written and read
    neighbours        values between are in memory     one kernel, where Inductor computes them

A time is the sum of the terms of `Work`, each by its rate. The rates are fitted to times of regions
and functions on an H200: see ``python -m benchmarks regions --predict``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

import torch
from torch import fx

from ..compiler.kernel import Kernel
from ..compiler.launching import kernels_by_pass
from ..compiler.operator import Program
from .graphs import (
    BIAS,
    COPIES,
    is_input,
    is_tensor,
    is_view,
    name_of,
    size_of,
    users_through,
    value_of,
)
from .order import aliases, bytes_of, has_kernel
from .programs import RegionProgram
from .regions import Region, reduced_dims

__all__ = [
    "H200",
    "RATES",
    "Machine",
    "Measure",
    "Times",
    "Work",
    "Works",
    "among_neighbours",
    "follows_larger_reduction",
    "machine_of",
    "of_slices",
    "works",
    "works_of",
]

# The longest row, in columns, that Inductor's kernels hold in registers.
_LONGEST_OF_INDUCTOR = 1024
# The rows from which a kernel that sums over rows takes as long as one over more: each program adds
# up its rows one after the other, and more rows have more programs.
_ROWS_OF_SUM = 1024
# A reduction of so many more elements than a region has takes longer than the region.
_LARGER = 32
# Kernels of slices take longer than others for the same bytes, by this factor at most.
_SLICED = 1.25


class Machine(NamedTuple):
    """The figures of a GPU that times depend on.

    Attributes:
        name: its name.
        bandwidth: the bytes a second of its memory.
        processors: the number of its multiprocessors.
    """

    name: str
    bandwidth: float
    processors: int


H200 = Machine("an H200, assumed", 4.8e12, 132)


@functools.lru_cache(maxsize=64)
def machine_of(index: int | None = None) -> Machine:
    """The figures of a GPU, by default of the current one.

    They are those of an H200 where there is no GPU, or one that does not report its bandwidth.
    """
    if not torch.cuda.is_available():
        return H200
    properties = torch.cuda.get_device_properties(index)
    # Kilohertz, with two transfers in each clock, of a number of bits.
    bandwidth = 2e3 * properties.memory_clock_rate * properties.memory_bus_width / 8
    if not bandwidth:
        return H200
    return Machine(properties.name, bandwidth, properties.multi_processor_count)


@dataclass(frozen=True)
class Work:
    """What the kernels of a region do in a call, forward and backward.

    Attributes:
        moved: bytes of whole tensors that they read and write.
        kernels: their number.
        calls: the number of calls of operators, which take the host longer than a kernel.
        again: bytes of long rows that they read once more, for a reduction.
        sums: the number of gradients that kernels of their own sum over rows; less if rows are few.
        summed: the bytes that these kernels read.
        drawn: the elements of the masks that Inductor draws.
        computed: instructions of Inductor's kernels beyond those that loads and stores hide.
    """

    moved: float = 0.0
    kernels: float = 0.0
    calls: float = 0.0
    again: float = 0.0
    sums: float = 0.0
    summed: float = 0.0
    drawn: float = 0.0
    computed: float = 0.0

    def plus(self, other: Work, factor: float = 1.0) -> Work:
        """The work of both, the other several times."""
        return Work(*[x + factor * y for x, y in zip(astuple(self), astuple(other), strict=True)])

    def seconds(self, machine: Machine) -> float:
        """The time that it takes."""
        terms = map(math.prod, zip(self.on(machine), astuple(RATES), strict=True))
        return sum(terms)

    def on(self, machine: Machine) -> tuple[float, ...]:
        """Its terms, by what they take on a machine: those of bytes in seconds of its bandwidth."""
        by_bytes, by_processors = 1 / machine.bandwidth, H200.processors / machine.processors
        units = (by_bytes, 1.0, 1.0, by_bytes, 1.0, by_bytes, by_processors, by_processors)
        return tuple(map(math.prod, zip(astuple(self), units, strict=True)))


# The time of each term: of bytes relative to the bandwidth, of others in seconds. All but that of
# calls fit benchmarks/results/regions_nvidia_h200.csv best: see ``benchmarks regions --predict``. A
# call takes so long that regions of 8 MiB and less, which gained nothing in a decoder, are left.
RATES = Work(
    moved=1.26,
    kernels=1.15e-6,
    calls=3e-7,
    again=0.69,
    sums=1.4e-5,
    summed=0.134,
    drawn=1.7e-12,
    computed=3.7e-14,
)


class Times(NamedTuple):
    """The predicted seconds of a region, forward and backward.

    Attributes:
        operator: as an operator.
        inductor: as kernels of Inductor.
    """

    operator: float
    inductor: float


# Measures the operator of a program and Inductor, or returns why it does not: see
# `measuring.Measurer.times`.
Measure = Callable[[RegionProgram, Collection[fx.Node], Collection[fx.Node]], Times | str]


class Works(NamedTuple):
    """The work of a region both ways, as of `Times`."""

    operator: Work
    inductor: Work

    def shared(self, count: int) -> Works:
        """The work of one of some slices, whose operator has their kernels once."""
        operator = self.operator
        kernels, calls = operator.kernels / count, operator.calls / count
        return self._replace(operator=replace(operator, kernels=kernels, calls=calls))

    def times(self, machine: Machine) -> Times:
        """The times on a machine."""
        return Times(self.operator.seconds(machine), self.inductor.seconds(machine))


# --- a region alone -------------------------------------------------------------------------------


def works_of(
    region: Region,
    program: RegionProgram,
    reached: Collection[fx.Node],
    receives: Collection[fx.Node],
) -> Works:
    """The work of a region alone.

    Args:
        region: the region.
        program: its program.
        reached: the inputs that receive gradients.
        receives: the nodes whose gradients come from a result of the graph.
    """
    alone = works(
        program.program,
        program.shapes,
        program.strides,
        program.wanted(reached),
        program.received(receives),
    )
    if not all(node.meta.get(BIAS) or name_of(node) in COPIES for node in region.nodes):
        return alone
    # A matrix product adds a bias in its own kernel. What is left is the gradient of the bias.
    _, inductor = alone
    is_summed = inductor.sums > 0
    gradient = Work(kernels=2 * is_summed, sums=inductor.sums, summed=inductor.summed)
    return alone._replace(inductor=gradient)


@functools.lru_cache(maxsize=4096)
def works(
    program: Program,
    shapes: Sequence[tuple[int, ...]],
    strides: Sequence[tuple[int, ...]],
    wanted: tuple[bool, ...],
    received: tuple[bool, ...],
) -> Works:
    """The work of a program's function.

    Args:
        program: the program.
        shapes: the shapes of its inputs.
        strides: the strides of its inputs.
        wanted: whether each input has a gradient. If none has, there is no backward.
        received: whether each output has one.
    Raises:
        NotRowwiseError: no kernel computes it.
    """
    tensors = [
        torch.empty_strided(shape, steps, dtype=dtype, device="meta")
        for shape, steps, dtype in zip(shapes, strides, program.dtypes, strict=True)
    ]
    passes = kernels_by_pass(program, tensors, wanted, received)
    structure, sizes = program.structure, program.sizes_of(tensors)
    rows = math.prod(map(sizes.__getitem__, structure.rows))
    # Kernels read columns side by side. Tensors that have them elsewhere are copied.
    copied = [tensor.nbytes for tensor in tensors if tensor.stride()[-1:] > (1,)]
    operator, inductor = Work(2.0 * sum(copied), len(copied), len(passes)), Work()
    for kernels in passes:
        operator = operator.plus(_of_operator(kernels, rows, structure.cols))
        inductor = inductor.plus(
            _of_inductor(kernels, rows, structure.cols, has_backward=len(passes) > 1)
        )
    return Works(operator, inductor)


def _of_operator(kernels: Sequence[Kernel], rows: int, cols: int) -> Work:
    """The work of an operator's forward or backward."""
    moved = rows * cols * _total(kernels, lambda kernel: _bytes(kernel.moved))
    sums = _total(kernels, lambda kernel: len(kernel.sums))
    # The caller sums gradients that are written with all rows.
    whole = _total(kernels, lambda kernel: len(kernel.written))
    read = rows * cols * torch.float32.itemsize * whole
    # One more kernel adds up the partial sums of programs.
    return Work(moved + read, len(kernels) + (sums > 0) + whole)


def _of_inductor(kernels: Sequence[Kernel], rows: int, cols: int, *, has_backward: bool) -> Work:
    """The work of Inductor's kernels for an operator's forward or backward."""
    elements = rows * cols
    read = _total(kernels, lambda kernel: _bytes(kernel.read))
    moved = _total(kernels, lambda kernel: _bytes(kernel.moved))
    whole = _total(kernels, lambda kernel: len(kernel.written))
    sums = whole + _total(kernels, lambda kernel: len(kernel.sums))
    reductions = _total(kernels, lambda kernel: kernel.reductions) * (cols > _LONGEST_OF_INDUCTOR)
    drops = bool(_total(kernels, lambda kernel: kernel.drops))
    is_forward = not _total(kernels, lambda kernel: kernel.is_backward)
    mask = torch.bool.itemsize * drops * has_backward
    return Work(
        # Gradients that the caller sums have fewer columns if they are numbers of a row.
        moved=elements * (max(0.0, moved - torch.float32.itemsize * whole) + mask),
        # A sum over rows takes two more: one for parts of the rows, and one for the sums of these.
        kernels=1 + 2 * (sums > 0),
        again=elements * read * reductions,
        sums=sums * min(1.0, rows / _ROWS_OF_SUM),
        summed=elements * read * (sums > 0),
        drawn=elements * (drops and is_forward),
        # The operator has the same instructions. They are no difference in a kernel that moves no
        # whole tensor, since all are broadcast.
        computed=elements * _total(kernels, lambda kernel: kernel.excess * bool(kernel.moved)),
    )


def _total(kernels: Iterable[Kernel], count: Callable[[Kernel], float]) -> float:
    return sum(map(count, kernels))


def _bytes(dtypes: Iterable[torch.dtype]) -> int:
    return sum([dtype.itemsize for dtype in dtypes])


# --- a region in a graph --------------------------------------------------------------------------


def among_neighbours(
    alone: Works, region: Region, needs: Collection[fx.Node], selected: Collection[fx.Node]
) -> Works:
    """The work of a region in its graph, where Inductor may fuse it with neighbours.

    Args:
        alone: the work of the region alone.
        region: the region.
        needs: the nodes whose values have gradients.
        selected: the nodes that Inductor does not fuse it with.
    """
    fusions = _of_fusions(region, set(region.nodes), needs, selected)
    return alone._replace(inductor=alone.inductor.plus(fusions, -1))


def follows_larger_reduction(region: Region, selected: Collection[fx.Node]) -> bool:
    """Whether Inductor reduces many more elements to the inputs of a region than the region has.

    The time is then that of the reduction's kernels, and what Inductor fuses with them decides it.
    With an operator behind two of them, Inductor may merge the two into a slower kernel.
    """
    most = _LARGER * max(map(size_of, region.outputs), default=0)
    todo, seen = list(filter(is_tensor, region.inputs)), set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in seen or is_input(node) or node in selected or has_kernel(node):
            continue
        seen.add(node)
        inputs = list(filter(is_tensor, node.all_input_nodes))
        sizes = list(map(size_of, inputs))
        if max(sizes, default=0) >= most and reduced_dims(node, value_of(inputs[0]).dim()):
            return True
        todo += inputs
    return False


def of_slices(
    regions: Sequence[Region], needs: Collection[fx.Node], selected: Collection[fx.Node]
) -> Works:
    """The work of regions that are one operator, or that Inductor fuses with their neighbours.

    Args:
        regions: the regions, of elements alone.
        needs: the nodes whose values have gradients.
        selected: the nodes of the regions that become operators.
    """
    members = {node for region in regions for node in region.nodes}
    # The operator reads the rows from the tables, as Inductor's kernel would.
    lookups = {node for region in regions for node in region.inputs if name_of(node) == "embedding"}
    read = {node for node in lookups if node not in needs and members.issuperset(node.users)}
    operator, inductor = Work(kernels=1, calls=1), Work()
    for region in regions:
        moved = sum(map(bytes_of, [*filter(is_tensor, region.inputs), *region.outputs]))
        operator = operator.plus(Work(moved), _SLICED)
        inductor = inductor.plus(Work(moved, kernels=1))
        inductor = inductor.plus(_of_fusions(region, members, (), read.union(selected)), -1)
    return Works(operator, inductor)


def _of_fusions(
    region: Region,
    members: set[fx.Node],
    needs: Collection[fx.Node],
    selected: Collection[fx.Node],
) -> Work:
    """The work that Inductor saves if it computes a region in the kernels of neighbours.

    It neither writes nor reads the values between, and as many gradients. What it copies for a
    convolution it does not read.
    """
    fused = _fused_values(region, members, selected)
    copied = [node for node in region.outputs if node not in fused and _is_copied(node)]
    tensors = [(2, node) for node in fused] + [(1, node) for node in copied]
    passes = [1 + (node in needs) for _, node in tensors]
    moved = [
        times * count * bytes_of(node) for count, (times, node) in zip(passes, tensors, strict=True)
    ]
    return Work(sum(moved), max(passes, default=0))


def _fused_values(
    region: Region, members: set[fx.Node], selected: Collection[fx.Node]
) -> list[fx.Node]:
    """The inputs and outputs that stay in registers if Inductor fuses a region with neighbours.

    Args:
        region: the region.
        members: the nodes of its group.
        selected: the nodes of the regions that become operators.
    """
    inputs = filter(is_tensor, region.inputs)
    fused = [node for node in inputs if not _is_computed_alone(node, selected)]
    for node in region.outputs:
        users = itertools.filterfalse(is_view, users_through(node, is_view))
        if not all(_is_read_alone(user, members, selected) for user in users):
            fused.append(node)
    return fused


def _is_copied(node: fx.Node) -> bool:
    """Whether a convolution reads a value in another order, and Inductor writes a copy for it."""
    views = [node, *filter(is_view, users_through(node, is_view))]
    return any(_is_convolved(view) and not _is_contiguous(value_of(view)) for view in views)


def _is_convolved(view: fx.Node) -> bool:
    return any(name_of(user) == "convolution" and user.args[0] is view for user in view.users)


def _is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether convolutions read a tensor as it is: contiguous, or with channels last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(tensor.dim(), torch.contiguous_format)
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=last)


def _is_computed_alone(node: fx.Node, selected: Collection[fx.Node]) -> bool:
    """Whether Inductor does not compute a value in a kernel that it generates."""
    while aliases(node) and node not in selected:
        node = node.all_input_nodes[0]
    return is_input(node) or node in selected or has_kernel(node)


def _is_read_alone(node: fx.Node, members: set[fx.Node], selected: Collection[fx.Node]) -> bool:
    """Whether Inductor does not read a value in a kernel that it generates."""
    if node.op == "output" or node in members or node in selected or has_kernel(node):
        return True
    # The operator writes results in place that are concatenated.
    return name_of(node) in ("cat", "stack") and members.issuperset(node.all_input_nodes)
