"""The report of `fusedops.explain`."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..compiler.codegen import backward_kernels, forward_kernels
from ..compiler.kernel import Kernel
from ..compiler.operator import Program
from ..core.calls.words import name_in
from ..core.launches import launch
from ..losses import registration
from .advice import next_step
from .fx import namespace
from .graphs import captured_body
from .options import EAGER, INDUCTOR
from .prediction import Times, Work, machine_of
from .programs import Source

__all__ = [
    "RUNNERS",
    "CompileReport",
    "RegionReport",
    "changes_in",
    "note_change",
    "operators_in",
]

# What runs the rest of a graph, for messages.
RUNNERS = {INDUCTOR: "Inductor", EAGER: "eager PyTorch"}
# The mark of nodes that differ from the model's, in `fx.Node.meta`: a tuple of changes.
_CHANGES = "fusedops_changes"
# The bytes of a backward, relative to those of the forward.
_BACKWARD = 2


@dataclass(frozen=True, eq=False)
class _Change:
    """A change; it is counted once, though several nodes may have it as their mark."""

    description: str


def note_change(node: fx.Node, description: str) -> None:
    """Marks a node that computes something in another way than the model, for the report."""
    node.meta[_CHANGES] = [*node.meta.get(_CHANGES, ()), _Change(description)]


def changes_in(graph: fx.Graph) -> Counter[str]:
    """The changes of the marked nodes of a graph, and of the bodies in it, and how often."""
    # A node that replaces another may have its marks.
    changes, counts = set[_Change](), Counter[str]()
    for node in graph.nodes:
        changes.update(node.meta.get(_CHANGES, ()))
        body = captured_body(node)
        if body is not None:
            counts += changes_in(body)
    return Counter([change.description for change in changes]) + counts


def operators_in(graph: fx.Graph) -> Counter[str]:
    """The operators of this library that a graph calls, and how often."""
    names = list[str]()
    for node in filter(_is_own_operator, graph.nodes):
        # The operator's name is in the text that encodes its constants.
        encoded = [arg for arg in node.args if isinstance(arg, str)]
        is_of_logits = node.target is registration.OPERATOR
        names += list(map(registration.name_in if is_of_logits else name_in, encoded))
    return Counter(names)


def _is_own_operator(node: fx.Node) -> bool:
    return namespace(node.target) == "fusedops"


@dataclass(frozen=True)
class RegionReport:
    """A row-wise region of a model.

    Attributes:
        operators: PyTorch's operators that are in it, each once, in their order.
        shape: the shape of its largest output, in the call that was traced.
        reason: why it was left; "" if it is one operator.
        border: bytes of its inputs and outputs.
        has_gradient: whether a backward follows, so whether its results have gradients.
        unfused: bytes that PyTorch's operators read and write forward, one by one.
        kernels: the kernels that they launch forward.
        rows: the rows of that operator, in the call that was traced.
        program: that operator; None if there is none.
        functions: the functions of `rowwise` that are in it.
        times: the times both ways, without neighbours; None if no kernel computes it.
        is_measured: whether these are measured, and not predicted.
        unmeasured: why they are predicted though they were to be measured; "" otherwise.
        slices: the number of regions that are one operator with it, itself included.
        lookups: the number of embeddings that the operator reads from their tables.
        of_tables: bytes of their rows that its backward reads again, and which are not saved.
        outside: why it does not read those of other embeddings.
        modules: the names of the modules whose forwards compute it, in their order.
        lines: the lines of the model's code that compute it, each as ``file:number``.
    """

    operators: tuple[str, ...]
    shape: tuple[int, ...]
    reason: str = ""
    border: int = 0
    has_gradient: bool = True
    unfused: int = 0
    kernels: int = 0
    rows: int = 0
    program: Program | None = field(default=None, repr=False)
    functions: tuple[str, ...] = ()
    times: Times | None = None
    is_measured: bool = False
    unmeasured: str = ""
    slices: int = 1
    lookups: int = 0
    of_tables: int = 0
    outside: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()

    def source(self) -> str:
        """The Triton source of its kernels, forward and backward.

        Raises:
            ValueError: it is no operator.
        """
        if self.program is None:
            raise ValueError(f"source: the region is left: {self.reason}")
        forward, backward = _kernels(self.program, self.has_gradient)
        return "\n\n".join([kernel.source for kernel in (*forward, *backward)])

    @property
    def forward(self) -> int:
        """Bytes of full tensors that its forward kernel reads and writes."""
        return self.rows * _moved_of_row(self.program, self.has_gradient)[0]

    @property
    def moved(self) -> int:
        """Bytes of full tensors that its kernels read and write, forward and backward."""
        return self.rows * sum(_moved_of_row(self.program, self.has_gradient))

    @property
    def seconds(self) -> float:
        """The time forward and backward, of the operator or of Inductor's kernels.

        A region that no kernel computes reads its inputs and writes its outputs, at the memory's
        bandwidth. Its backward, if it has one, reads and writes as much twice.
        """
        if self.times is not None:
            return self.times.inductor if self.program is None else self.times.operator
        return self._of_bytes(self.border)

    @property
    def in_turn(self) -> float:
        """The predicted time of PyTorch's operators, one by one: each takes as long as a launch."""
        launches = Work(kernels=self.kernels * (1 + self.has_gradient))
        return self._of_bytes(self.unfused) + launches.seconds(machine_of())

    def _of_bytes(self, forward: int) -> float:
        return forward * (1 + _BACKWARD * self.has_gradient) / machine_of().bandwidth

    @property
    def saved(self) -> int:
        """Bytes of full tensors that its backward needs, its outputs not counted."""
        if self.program is None or not self.has_gradient:
            return 0
        return self.rows * _saved_of_row(self.program) - self.of_tables


def _saved_of_row(program: Program) -> int:
    """Bytes of a row that are in memory for the backward alone."""
    source, plan, structure = program.function, program.plan, program.structure
    assert isinstance(source, Source)
    own = [index for index in plan.saved_inputs if index not in source.kinds.also_saved]
    operands = list(filter(structure.is_whole, map(structure.inputs.__getitem__, own)))
    if program.own and plan.intermediate_operand is not None:
        operands.append(plan.intermediate_operand)
    return sum([program.size_of_row(operand) * operand.dtype.itemsize for operand in operands])


@functools.lru_cache(maxsize=1024)
def _moved_of_row(program: Program | None, has_gradient: bool) -> tuple[int, int]:
    """Bytes that the kernels move for a row, forward and backward; 0 without a program."""
    if program is None:
        return 0, 0
    forward, backward = _kernels(program, has_gradient)
    cols = program.structure.cols
    return cols * _moved_of_column(forward), cols * _moved_of_column(backward)


def _kernels(program: Program, has_gradient: bool) -> tuple[list[Kernel], list[Kernel]]:
    """The kernels of a program, forward, and backward with all gradients if it has any."""
    plan, acc = program.plan, program.acc
    options: dict[str, Any] = {"group": (), "tiled": program.tiled}
    forward = forward_kernels(plan, acc, **options, saves=has_gradient)
    wanted = plan.differentiable if has_gradient else ()
    backward = list[Kernel]()
    if wanted:
        backward = backward_kernels(
            plan, acc, **options, cotangents=range(program.count), wanted=wanted
        )
    return forward, backward


def _moved_of_column(kernels: Sequence[Kernel]) -> int:
    """Bytes that kernels move for one column of a row."""
    moved = itertools.chain.from_iterable(kernel.moved for kernel in kernels)
    return sum([dtype.itemsize for dtype in moved])


@dataclass
class CompileReport:
    """The regions of a model, from `fusedops.explain`.

    Attributes:
        regions: the regions of all graphs.
        left: why whole graphs were left to ``runner``, one entry for each such graph.
        graphs: the number of graphs.
        devices: the types of the devices whose tensors are in the graphs.
        changes: other computations that differ from the model's, and how often each occurs.
        operators: this library's operators that the model itself calls, and how often.
        rest: bytes that the operators outside of regions read and write forward, one by one.
        differentiated: those of operators whose results have gradients.
        runner: what runs the rest of the graphs: see `options`.
        unmeasured: why no region is measured though regions were to be; "" otherwise.
    """

    regions: list[RegionReport] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    graphs: int = 0
    devices: set[str] = field(default_factory=set)
    changes: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    rest: int = 0
    differentiated: int = 0
    runner: str = INDUCTOR
    unmeasured: str = ""

    @property
    def slowest(self) -> list[RegionReport]:
        """All regions by their time, the longest first."""
        return sorted(self.regions, key=lambda region: region.seconds, reverse=True)

    @property
    def fused(self) -> list[RegionReport]:
        """The regions that are one operator each."""
        return [region for region in self.regions if not region.reason]

    @property
    def is_provisional(self) -> bool:
        """Whether a region could not be measured, so that another process may choose others."""
        return any(region.unmeasured for region in self.regions)

    @property
    def programs(self) -> list[Program]:
        """The operators of the regions, one for each name: the first, which is registered."""
        programs: dict[str, Program] = {}
        for region in self.fused:
            assert region.program is not None
            programs.setdefault(region.program.name, region.program)
        return list(programs.values())

    def __str__(self) -> str:
        """A line for each kind of region, and for each kind of change."""
        lines = [self._summary()]
        if self.unmeasured:
            lines.append(f"no region is measured: {self.unmeasured}")
        for reason, count in Counter(self.left).items():
            step = next_step(reason)
            lines.append(f"a graph is left to {RUNNERS[self.runner]}: {reason}{step} ({count} x)")
        kinds: dict[str, list[RegionReport]] = {}
        for region in self.regions:
            kinds.setdefault(_line(region), []).append(region)
        for kind, regions in kinds.items():
            lines.append(f"  {len(regions)} x {kind}")
            lines += _where(regions)
        for name, count in sorted(self.operators.items()):
            lines.append(f"  called by the model: {count} x {name}")
        for description, count in sorted(self.changes.items()):
            lines.append(f"  changed: {count} x {description}")
        if self.regions:
            lines.append(f"  {self._prediction()}")
        return "\n".join(lines)

    def _prediction(self) -> str:
        name, bandwidth, _ = machine_of()
        fused = sum([region.seconds for region in self.fused])
        instead = sum(map(self._instead, self.fused))
        left = sum([region.seconds for region in self.regions if region.reason])
        rest = (self.rest + _BACKWARD * self.differentiated) / bandwidth
        measured = sum([region.is_measured for region in self.regions])
        text = f"{measured} of {len(self.regions)} regions measured, others " if measured else ""
        return (
            f"{text}predicted at {bandwidth / 1e12:.2f} TB/s ({name}): "
            f"{_time(fused)} for operators instead of {_time(instead)}, "
            f"{_time(left)} for regions that are left, {_time(rest)} for the bytes of the rest"
        )

    def _instead(self, region: RegionReport) -> float:
        """The predicted time of a fused region, if it were not one operator."""
        if self.runner == EAGER:
            return region.in_turn
        return 0.0 if region.times is None else region.times.inductor

    def _summary(self) -> str:
        where = "1 graph" if self.graphs == 1 else f"{self.graphs} graphs"
        fused = self.fused
        if fused:
            text = f"{_bytes(sum([region.moved for region in fused]))} moved"
            if any(region.has_gradient for region in fused):
                saved = sum([region.saved for region in fused])
                text += f", {_bytes(saved)} saved for backward"
            count = round(sum([1 / region.slices for region in fused]))
            operators = "1 operator" if count == 1 else f"{count} operators"
            return (
                f"{len(fused)} of {len(self.regions)} row-wise regions are fused: {operators} in "
                f"{where}, {text}"
            )
        if self.regions:
            return f"0 of {len(self.regions)} row-wise regions are fused, in {where}"
        return f"no row-wise region was found, in {where}{self._why_none()}"

    def _why_none(self) -> str:
        """The reason why there is no region, if it is known, after a colon; else empty."""
        if not self.graphs:
            return ": nothing was traced (explain a model before it is compiled or sharded)"
        if not self.devices or any(map(launch.runs_kernels, self.devices)):
            return ": no norm, softmax, dropout or bias of a product" + next_step("no region")
        names = " and ".join(sorted(self.devices))
        step = " (set TRITON_INTERPRET=1 to see what a GPU fuses)" if "cpu" in self.devices else ""
        return f": there are no kernels for {names} tensors{step}"


def _line(region: RegionReport) -> str:
    """A region as text; regions of one kind have the same."""
    shape, names = ", ".join(map(str, region.shape)), ", ".join(region.operators)
    if region.functions:
        names += f" of {', '.join(region.functions)}"
    outcome = f"left: {region.reason}{next_step(region.reason)}"
    if not region.reason:
        forward, unfused = _bytes(region.forward), _bytes(region.unfused)
        outcome = f"{forward} moved instead of {unfused}"
        if region.has_gradient:
            outcome = f"{_bytes(region.moved)} moved, {_bytes(region.saved)} saved"
            outcome += f"; forward {forward} instead of {unfused}"
        if region.slices > 1:
            outcome += f"; one of {region.slices} slices of an operator"
        if region.lookups:
            outcome += ", which reads the rows of embeddings from their tables"
        for reason in region.outside:
            outcome += f"; an embedding is not part of it: {reason}"
    if region.is_measured and region.times is not None:
        operator, inductor = map(_time, region.times)
        outcome += f"; measured: {operator}, and {inductor} by Inductor"
    if region.unmeasured:
        outcome += f"; not measured: {region.unmeasured}"
    return f"({shape})  {names}  {outcome}"


def _where(regions: Sequence[RegionReport]) -> Iterator[str]:
    """A line with the modules and the code of the first of several regions, if they are known."""
    first = regions[0]
    numbers: dict[str, list[str]] = {}
    for line in first.lines:
        file, _, number = line.rpartition(":")
        numbers.setdefault(file, []).append(number)
    lines = [f"{file}:{', '.join(of_file)}" for file, of_file in numbers.items()]
    parts = [", ".join(names) for names in (first.modules, lines) if names]
    if parts:
        others = f", and {len(regions) - 1} more" if len(regions) > 1 else ""
        yield f"      in {' at '.join(parts)}{others}"


def _bytes(size: int) -> str:
    if size < 2**20:
        return f"{size / 2**10:.1f} KiB"
    if size < 10 * 2**20:
        return f"{size / 2**20:.1f} MiB"
    return f"{math.ceil(size / 2**20)} MiB"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
