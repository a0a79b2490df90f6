"""A function of many slices as an `Operator`: one launch forward, and two backward."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter, itemgetter, mul
from typing import Any

import torch
from torch import Tensor

from ...core.calls.buffers import separated
from ...core.calls.operator import Axes, Dtypes, SequenceOperator
from ...core.calls.registration import define
from ...core.optional import without_none
from ...core.random.dropout import Dropout
from ..addresses import Sliced
from ..layouts import row_layout
from ..operator import Program, RowwiseConstants
from ..structure import Operand
from . import launching, tables
from .buffers import empty, with_zeros
from .forms import BUFFER, JOINT, LOOKUP, SEPARATE, SHARED
from .lookups import Lookup
from .rows import Rows
from .site import SliceSite
from .source import STEP_BITS, Storage
from .tiles import is_ragged

__all__ = ["LONGEST", "MOST_SLICES", "SliceGroup", "group_of", "why_not"]

# The most slices of a call: more random states would not fit beside each other.
MOST_SLICES = 4096
# The longest row of a slice: one tile holds it.
LONGEST = 4096
_registered: set[str] = set()
_registering = threading.RLock()


def why_not(program: Program) -> str:
    """Return why a program cannot be one of many slices; "" if it can."""
    structure = program.structure
    if program.is_long or program.tiled or structure.cols > LONGEST:
        return f"rows of more than {LONGEST:,} columns"
    if program.uncompiled:
        return program.uncompiled
    if structure.fixed or structure.indexed:
        return "it reads an index of rows"
    if structure.inner:
        return "it reduces over blocks of rows"
    if not all(structure.used):
        return "it has an unused input"
    operands = [*structure.inputs, *structure.outputs]
    if program.plan.intermediate_operand is not None:
        operands.append(program.plan.intermediate_operand)
    for operand in operands:
        layout = row_layout(structure, operand, ())
        rows_alone = [(axis,) for axis in structure.rows]
        is_by_row = layout == "rows" and [*operand.labels[: len(rows_alone)]] == rows_alone
        if not (is_by_row or (layout == "vector" and operand in structure.inputs)):
            return f"{operand.name} has other rows than the call"
    return ""


class SliceGroup(SequenceOperator):
    """A function traced for slices of these lengths.

    The tensors are those of each input of the function in order: one for each slice, or one if the
    slices are joint or shared. An input that is looked up has the table of each slice, and after
    them the index of each, which has one dimension. A tensor with rows has two dimensions, a vector
    has one. The outputs that the caller gets are those of each result: one for each slice, or one.
    After them comes the intermediate's buffer, if there is one.

    Slices may have rows of their own: then each tensor with rows is separate. The
    backward needs the rows of each slice, also of one without a cotangent. It takes them from a
    saved input with rows. If none is saved, the forward returns a tensor ``(rows, 0)`` of each
    slice, which takes no memory, and they are saved.

    Attributes:
        programs: the program of each slice.
        inputs: the forms of the inputs.
        results: the forms of the results.
        lookups: the inputs that are looked up, by their index.
        own_rows: whether the slices have rows of their own.
        carriers: the number of tensors that are saved for their rows.
        rows_saved: the positions of the saved tensors whose rows are those of the slices.
        starts: the position of each input's first tensor.
        lead: a program, for what is the same for all slices.
    """

    constants = RowwiseConstants
    native_elements = 0
    tensors = ("tensors",)

    def __init__(
        self,
        programs: Sequence[Program],
        inputs: Sequence[str],
        results: Sequence[str],
        lookups: Sequence[Lookup] = (),
        *,
        own_rows: bool = False,
    ) -> None:
        super().__init__()
        self.own_rows = own_rows
        self.lookups = {lookup.input: lookup for lookup in lookups}
        self.programs, self.inputs, self.results = tuple(programs), tuple(inputs), tuple(results)
        self.lead = lead = self.programs[0]
        self.op, self.p = lead.op, lead.p
        self.plans = [program.plan for program in self.programs]
        self.plan = self.plans[0]
        lengths = {program.structure.cols for program in self.programs}
        self.sliced: Sliced = "equal" if len(lengths) == 1 else "mixed"
        if is_ragged(sorted(lengths), lead.dtypes):
            self.sliced = "ragged"
        self.stats = max(map(len, map(attrgetter("stats"), self.plans)))
        self.count, self.own = lead.count, lead.own
        self.slices = len(self.programs)
        tensors_of = {SEPARATE: self.slices, LOOKUP: 2 * self.slices}
        counts = [tensors_of.get(form, 1) for form in inputs]
        self.starts = tuple(itertools.accumulate(counts, initial=0))
        self.visible = self.count + self.own  # type: ignore[misc]
        own = ["intermediate"] if self.own else []
        names = [f"out{r}" for r in range(self.count)]
        self.gradients = lead.tensors
        self.saved = ("saved_stats", "saved")  # type: ignore[misc]
        self.record = RowwiseConstants(self.op)
        self.separate = SEPARATE in self.results
        self.by_row = tuple(map(self._is_by_row, lead.structure.inputs))
        first = max(range(len(inputs)), key=lambda i: (self.by_row[i], -i))
        # A table has other rows than the call; its index has the call's.
        self.first = self.starts[first] + self.slices * (first in self.lookups)  # type: ignore[misc]
        # Without the looked-up rows, the backward needs their index for the tables' gradients.
        self.indices_saved = tuple([i for i in self.lookups if i not in self.plan.saved_inputs])
        has_saved_rows = any(map(self.by_row.__getitem__, self.plan.saved_inputs))
        self.carriers = self.slices if own_rows and not has_saved_rows else 0
        self.rows_saved = self._rows_saved()
        carriers = [f"rows{k}" for k in range(self.carriers)]
        self.outputs = (*names, *own, "stats", *carriers)  # type: ignore[misc]
        self._sources = self._sources_of()
        words = [program.digest for program in self.programs]
        words += [*self.inputs, *self.results, *map(repr, lookups), *["own rows"] * own_rows]
        digest = hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]
        self.digest = digest
        self.name = f"{lead.name.rpartition('_')[0]}_slices_{digest}"  # type: ignore[misc]
        with _registering:
            if self.name not in _registered:
                define(self)
                _registered.add(self.name)

    # --- shapes -----------------------------------------------------------------------------------

    def _is_by_row(self, operand: Operand) -> bool:
        return row_layout(self.lead.structure, operand, ()) == "rows"

    def operand(self, kind: str, index: int, k: int = 0) -> Operand:
        """Return the operand of a slice: an input, a result or the intermediate."""
        program = self.programs[k]
        if kind in ("input", "gradient"):
            return program.structure.inputs[index]
        return program.operand(index if kind != "intermediate" else self.intermediate)

    @property
    def intermediate(self) -> int:
        """The number of the result that is saved; that of an own intermediate is after all."""
        return self.count if self.own else self.plan.intermediate_output

    def sizes(self, kind: str, index: int) -> tuple[int, ...]:
        """Return the elements of a row, or of a vector, of each slice."""
        return self._sizes(kind in ("input", "gradient"), index if kind != "intermediate" else -1)

    @functools.cache  # noqa: B019 - an operator lives as long as the process
    def own_shapes(self, number: int) -> tuple[tuple[int, ...], ...]:
        """Return the sizes of the dimensions of a result after those of rows, of each slice."""
        shapes = []
        for program in self.programs:
            structure = program.structure
            labels = structure.outputs[number].labels[len(structure.rows) :]
            shapes.append(tuple(program.shape(labels, structure.sizes)))
        return tuple(shapes)

    @functools.cache  # noqa: B019 - as above
    def _sizes(self, is_input: bool, index: int) -> tuple[int, ...]:
        kind = "input" if is_input else "intermediate" if index < 0 else "output"
        pairs = [(program, self.operand(kind, index, k)) for k, program in enumerate(self.programs)]
        return tuple([program.size_of_row(operand) for program, operand in pairs])

    def _shapes(self, kind: str, index: int, rows: Rows) -> list[tuple[Any, ...]]:
        """Return the shape of each slice's tensor as the caller has it: rows, or a vector."""
        sizes = self.sizes(kind, index)
        if kind == "output" or self.by_row[index]:
            return [*zip(self.by_slice(rows), sizes, strict=True)]
        return [(size,) for size in sizes]

    def storage(self, kind: str, index: int, form: str) -> Storage:
        """Return where the slices of a tensor are, whose form is known."""
        sizes = self.sizes(kind, index)
        firsts = tuple(itertools.accumulate(sizes, initial=0))[:-1]
        return Storage(form, self._is_by_row(self.operand(kind, index)), firsts, sizes)

    def rows_of(self, tensors: Any) -> Rows:
        """Return the number of rows of all slices, or those of each."""
        if self.own_rows:
            return self._rows_of_each(tensors[self.first : self.first + self.slices])
        rows: int = tensors[self.first].shape[0]
        return rows

    @staticmethod
    def _rows_of_each(tensors: Sequence[Any]) -> tuple[int, ...]:
        return tuple([tensor.shape[0] for tensor in tensors])

    def by_slice(self, rows: Rows) -> tuple[int, ...]:
        """Return the number of rows of each slice."""
        return rows if isinstance(rows, tuple) else (rows,) * self.slices

    def _rows_saved(self) -> slice:
        """Return the positions of the saved tensors with the slices' rows: inputs, or carriers."""
        start = 1  # after the statistics of rows
        for i in self.plan.saved_inputs:
            if self.by_row[i]:
                break
            start += self.starts[i + 1] - self.starts[i]
        return slice(start, start + self.slices)

    def span(self, index: int) -> slice:
        """Return the positions of an input's tensors."""
        return slice(self.starts[index], self.starts[index + 1])

    def span_of_indices(self, index: int) -> slice:
        """Return the positions of the indices of an input that is looked up."""
        return slice(self.starts[index] + self.slices, self.starts[index + 1])

    def is_empty(self, tensors: Any) -> bool:
        """Return whether no slice has rows."""
        return not any(self.by_slice(self.rows_of(tensors)))

    # --- before a call ----------------------------------------------------------------------------

    @staticmethod
    def key(mode: int, constants: Any, tensors: Any) -> Hashable:
        """See `Operator`; `fits` checked the rest."""
        return mode, constants

    def check(self, constants: Any, tensors: Any, *, nested: bool) -> RowwiseConstants:
        """See `Operator`; it checks nothing: the tensors were compared with the programs."""
        return self.record

    def cols(self, constants: Any, tensors: Any) -> int:
        """Return the columns of the longest slice."""
        return max([program.structure.cols for program in self.programs])

    def writes(
        self, constants: Any, dtypes: Dtypes, *, dropout: bool, saves: bool
    ) -> tuple[bool, ...]:
        """See `Program.writes`."""
        own = [saves] if self.own else []
        carriers = [saves] * self.carriers
        return (*[True] * self.count, *own, saves and bool(self.stats), *carriers)

    def site(
        self,
        constants: Any,
        dtypes: Dtypes,
        cols: int,
        device_index: int,
        *,
        dropout: bool,
        saves: bool,
    ) -> SliceSite:
        """See `Operator`."""
        outs = self.writes(constants, dtypes, dropout=dropout, saves=saves)
        plan = self.plan
        spans = list(map(self.span, plan.saved_inputs))
        spans += map(self.span_of_indices, self.indices_saved)
        count = self.starts[-1]
        places = [-1] if not self.stats else [count + self.visible]
        for span in spans:
            places += range(span.start, span.stop)
        places += range(count + self.visible + 1, count + len(outs))
        if plan.intermediate:
            places.append(count + self.intermediate)

        return SliceSite(
            constants,
            device_index,
            cols,
            dtypes,
            dropout,
            saves,
            self.lead.acc,
            outs,
            self.visible,
            itemgetter(*places) if len(places) > 1 else _last,
            self,
            {},
            sources=self._sources,
            splits=self.separate or (self.own and not saves),
        )

    def _sources_of(self) -> tuple[frozenset[int], ...]:
        """Return the positions of the tensors on which each of the caller's outputs depends."""
        lead = self.lead
        every = frozenset(range(len(self.inputs)))
        sources = lead._sources or (every,) * self.visible

        def positions(inputs: frozenset[int], k: int) -> frozenset[int]:
            kinds = [(i, self.inputs[i] in (SEPARATE, LOOKUP)) for i in inputs]
            return frozenset([self.starts[i] + k * is_separate for i, is_separate in kinds])

        result = list[frozenset[int]]()
        for number in range(self.visible):
            each = [positions(sources[number], k) for k in range(self.slices)]
            is_separate = number < self.count and self.results[number] == SEPARATE
            result += each if is_separate else [frozenset().union(*each)]
        return tuple(result)

    def argument(self, constants: Any, position: int) -> str:
        """See `Operator`."""
        index = next(i for i, start in enumerate(self.starts[1:]) if position < start)
        name = self.lead.structure.inputs[index].name
        if self.inputs[index] not in (SEPARATE, LOOKUP):
            return name
        half, number = divmod(position - self.starts[index], self.slices)
        return f"{'index of ' if half else ''}{name} of slice {number}"

    def axes(self, constants: Any, tensors: Any) -> Axes:
        """Raise `NotImplementedError`: `foreach` calls the function for each slice of DTensors."""
        raise NotImplementedError(f"{self.op}: slices of DTensors have no operator")

    # --- between the caller's tensors and the kernels' --------------------------------------------

    def expose(self, constants: Any, tensors: Any, outs: Any) -> tuple[Tensor | None, ...]:
        """Return the caller's outputs: those of each result, and the intermediate."""
        rows = self.rows_of(tensors)
        exposed: list[Any] = []
        for number, form in enumerate(self.results):
            if form == SEPARATE:
                exposed += separated(outs[number], self._shapes("output", number, rows))
            else:
                exposed.append(outs[number])
        return (*exposed, *outs[self.count : self.visible])

    def saved_separately(self, site: Any, saved: Any, returned: Any) -> tuple[Tensor | None, ...]:
        """See `SequenceOperator`."""
        if not self.plan.intermediate:
            return saved  # type: ignore[no-any-return]
        return (*saved[:-1], *self.by_result(returned)[self.intermediate])

    def saved_parts(self, saved: Any) -> tuple[list[Sequence[Any]], Sequence[Any]]:
        """Return the tensors of each saved input, and those of the intermediate."""
        inputs: list[Sequence[Any]] = []
        start = 1  # after the statistics of rows
        for i in self.plan.saved_inputs:
            end = start + self.starts[i + 1] - self.starts[i]
            inputs.append(saved[start:end])
            start = end
        return inputs, saved[start + self.slices * len(self.indices_saved) + self.carriers :]

    def _saved_indices(self, saved: Any) -> dict[int, Sequence[Any]]:
        """Return the indices of each input that is looked up, by the input."""
        pairs = zip(self.plan.saved_inputs, self.saved_parts(saved)[0], strict=True)
        indices = {i: part[self.slices :] for i, part in pairs if i in self.lookups}
        start = 1 + sum([self.starts[i + 1] - self.starts[i] for i in self.plan.saved_inputs])
        for i in self.indices_saved:
            indices[i] = saved[start : start + self.slices]
            start += self.slices
        return indices

    def _of_tables(
        self, index: int, rows: Sequence[Tensor | None], saved: Any
    ) -> list[Tensor | None]:
        """Return the gradients of an input's tensors, from those of its rows if they are needed."""
        if index not in self.lookups:
            return list(rows)
        indices = self._saved_indices(saved)[index]
        tables = self.lookups[index].gradients_of_tables(rows, indices)
        return [*tables, *[None] * self.slices]

    def _of_many_tables(
        self, index: int, buffer: Tensor, needed: Sequence[bool], saved: Any
    ) -> list[Tensor | None]:
        """Return the same as `_of_tables`, from the buffer of the gradients of all rows."""
        gradients = tables.gradients_of_tables(
            self.lookups[index],
            self.sizes("gradient", index),
            buffer,
            needed[: self.slices],
            self._saved_indices(saved)[index],
        )
        return [*gradients, *[None] * self.slices]

    def by_result(self, grads: Any) -> list[list[Any]]:
        """Return the cotangents of each result: one of each slice, or one."""
        if len(grads) == self.visible:
            return [[grad] for grad in grads]
        parts, start = [], 0
        for form in (*self.results, *[JOINT] * self.own):
            end = start + (self.slices if form == SEPARATE else 1)
            parts.append(list(grads[start:end]))
            start = end
        return parts

    def rows_by(self, grads: Any, saved: Any) -> Rows:
        """Return the number of rows of all slices, or those of each, in a backward."""
        return self.rows_in(self.by_result(grads), saved)

    def rows_in(self, by_result: Sequence[Sequence[Any]], saved: Any) -> Rows:
        """Return the same from the cotangents of each result, or from what is saved."""
        if self.own_rows:
            return self._rows_of_each(saved[self.rows_saved])
        for number, parts in enumerate(by_result):
            kind = "cotangent" if number < self.count else "intermediate"
            sizes = self.sizes(kind, number)
            for grad, size in zip(parts, sizes, strict=False):
                if grad is not None:
                    elements: int = grad.numel()
                    return elements // (size if len(parts) > 1 else sum(sizes))
        raise AssertionError("no cotangent")

    def needed(self, site: Any, grads: Any, needs: Any) -> tuple[bool, ...]:
        """Return, for each input of the function, whether a slice's gradient is needed."""
        spans = [needs[self.span(i)] for i in range(len(self.inputs))]
        return tuple([w and any(span) for w, span in zip(self.lead.wanted, spans, strict=True)])

    def expose_gradients(
        self, site: Any, grads: Any, saved: Any, outs: Any, needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of the caller's tensors."""
        exposed: list[Tensor | None] = []
        rows: Rows = self.rows_by(grads, saved)
        for index, out in enumerate(outs):
            needed = needs[self.span(index)]
            if out is None:
                exposed += [None] * len(needed)
            elif self.inputs[index] == JOINT:
                exposed.append(out)
            else:
                parts = separated(out, self._shapes("gradient", index, rows))
                if index in self.lookups and sum(needed) >= tables.LEAST:
                    exposed += self._of_many_tables(index, out, needed, saved)
                elif self.inputs[index] == SHARED:
                    exposed.append(torch.stack(list(parts)).sum(0).to(self.lead.dtypes[index]))
                else:
                    pairs = zip(parts, needed, strict=False)  # without those of indices
                    own = [part if need else None for part, need in pairs]
                    exposed += self._of_tables(index, own, saved)
        return exposed

    # --- PyTorch's operators ----------------------------------------------------------------------

    def _slices(
        self, kind: str, index: int, form: str, tensors: Sequence[Any], rows: tuple[int, ...]
    ) -> list[Any]:
        """Return one tensor for each slice, with the dimensions that its program has."""
        if tensors[0] is None and len(tensors) == 1:
            return [None] * self.slices
        parts = list(tensors)
        if form == LOOKUP:
            parts = self.lookups[index].read(tensors)
        sizes = self.sizes(kind, index)
        by_row = self._is_by_row(self.operand(kind, index))
        if len(parts) == 1:
            (tensor,) = parts
            if form == SHARED:
                parts = [tensor] * self.slices
            elif form == JOINT:
                parts = list(tensor.split(list(sizes), -1))
            else:
                counts = [*map(mul, sizes, rows)] if by_row else [*sizes]
                parts = list(tensor.reshape(-1).split(counts))
        return [
            None if part is None else part.reshape(self._shape(kind, index, k, rows[k]))
            for k, part in enumerate(parts)
        ]

    def _shape(self, kind: str, index: int, k: int, rows: int) -> list[int]:
        """Return the shape of a slice's tensor: all rows are along the first row axis."""
        structure = self.programs[k].structure
        sizes = list(structure.sizes)
        for number, axis in enumerate(structure.rows):
            sizes[axis] = 1 if number else rows
        return self.programs[k].shape(self.operand(kind, index, k).labels, sizes)

    def _assembled(self, form: str, slices: Sequence[Any], *, by_row: bool) -> list[Any]:
        """Return a result's tensors, or an input's gradients, from those of all slices."""
        flat = [part.reshape(-1) for part in slices]
        if by_row:  # sizes in full, because there may be no rows
            flat = [part.reshape(part.shape[0], math.prod(part.shape[1:])) for part in slices]
        if form == SHARED:
            return [torch.stack(flat).sum(0)]
        return [torch.cat(flat, -1)] if form == JOINT else flat

    def reference(
        self, constants: Any, tensors: Any, dropout: Dropout
    ) -> tuple[Tensor | None, ...]:
        """Return the caller's outputs of the function, called for each slice."""
        rows = self.by_slice(self.rows_of(tensors))
        inputs = [
            self._slices("input", i, form, tensors[self.span(i)], rows)
            for i, form in enumerate(self.inputs)
        ]
        results = [
            program.reference(program.record, arguments, dropout)
            for program, arguments in zip(self.programs, zip(*inputs, strict=True), strict=True)
        ]
        outputs: list[Any] = []
        for form, values in zip(self.results, zip(*results, strict=True), strict=True):
            outputs += self._assembled(form, values, by_row=True)
        return tuple(outputs)

    def derivative(
        self,
        site: SliceSite,
        grads: Any,
        saved: Any,
        dropout: Callable[..., Dropout],
        needs: Sequence[bool],
    ) -> Sequence[Tensor | None]:
        """Return the gradients, computed by PyTorch's operators for each slice."""
        rows = self.by_slice(self.rows_by(grads, saved))
        cotangents = []
        for number, parts in enumerate(self.by_result(grads)):
            kind, form = self._result(number)
            cotangents.append(self._slices(kind, number, form, parts, rows))
        saved_inputs, intermediate = self.saved_parts(saved)
        inputs = [
            self._slices("input", i, self.inputs[i], part, rows)
            for i, part in zip(self.plan.saved_inputs, saved_inputs, strict=True)
        ]
        whole: list[Any] = [None] * self.slices
        if self.plan.intermediate:
            kind, form = self._result(self.intermediate)
            whole = self._slices(kind, self.intermediate, form, intermediate, rows)
        wanted = self.needed(site, grads, needs)
        by_slice: list[Sequence[Any]] = []
        for k, program in enumerate(self.programs):
            own = [values[k] for values in cotangents]
            if all(grad is None for grad in own):
                by_slice.append([None] * len(wanted))
                continue
            draw = functools.partial(_drawn, dropout, k, program.structure.cols)
            of_slice = program.site(
                program.record,
                program.dtypes,
                program.structure.cols,
                site.device_index,
                dropout=site.dropout,
                saves=True,
            )
            values = (*[tensors[k] for tensors in inputs], whole[k], None)
            by_slice.append(program.derivative(of_slice, own, values, draw, wanted))
        return self._gradients_of(by_slice, needs, rows, saved)

    def _result(self, number: int) -> tuple[str, str]:
        """Return the kind and form of a result, or of the intermediate that follows them."""
        kind = "output" if number < self.count else "intermediate"
        return kind, self.form_of_result(number)

    def form_of_result(self, number: int) -> str:
        """Return the form of a result, or of the intermediate that follows them."""
        return self.results[number] if number < self.count else BUFFER

    def _gradients_of(
        self,
        by_slice: Sequence[Sequence[Any]],
        needs: Sequence[bool],
        rows: Sequence[int],
        saved: Any,
    ) -> list[Tensor | None]:
        """Return the gradients of the caller's tensors from those of each slice's inputs."""
        gradients: list[Tensor | None] = []
        for index, values in enumerate(zip(*by_slice, strict=True)):
            needed = needs[self.span(index)]
            if not any(needed) or all(value is None for value in values):
                gradients += [None] * len(needed)
                continue
            shapes = [self._shape("gradient", index, k, rows[k]) for k in range(self.slices)]
            filled = with_zeros(values, shapes)
            whole = self._assembled(self.inputs[index], filled, by_row=self.by_row[index])
            if self.inputs[index] not in (SEPARATE, LOOKUP):
                gradients += whole
                continue
            slices = zip(whole, values, needed, strict=False)  # without the needs of indices
            own = [
                value if need and present is not None else None for value, present, need in slices
            ]
            gradients += self._of_tables(index, own, saved)
        return gradients

    # --- kernels ----------------------------------------------------------------------------------

    def allocate(self, site: SliceSite, tensors: Any) -> tuple[Tensor | None, ...]:
        """Return uninitialised tensors: a buffer of each separate result, a joint one as it is."""
        rows, like, lead = self.rows_of(tensors), tensors[self.first], self.lead
        outs: list[Tensor | None] = []
        for number in range(self.visible):
            kind, form = self._result(number)
            if number == self.count and not site.saves:
                outs.append(None)
                continue
            dtype = lead.operand(number).dtype
            outs.append(empty(like, form, rows, self.sizes(kind, number), dtype))
        stats = None
        if site.saves and self.stats:
            count = sum(self.by_slice(rows)) * self.stats
            shape = (count,) if self.own_rows else (self.slices, self.stats, rows)
            stats = like.new_empty(shape, dtype=lead.acc)
        carriers: list[Tensor | None] = [None] * self.carriers
        if site.saves and carriers:
            carriers = [like.new_empty((count, 0)) for count in self.by_slice(rows)]
        return (*outs, stats, *carriers)

    def allocate_gradients(
        self, site: SliceSite, grads: Any, saved: Any, needed: Any
    ) -> tuple[Tensor | None, ...]:
        """Return uninitialised gradients, one for each input: as `allocate` does for results."""
        like = without_none(grads)[0]
        rows = self.rows_by(grads, saved)
        outs: list[Tensor | None] = []
        for index, (form, need) in enumerate(zip(self.inputs, needed, strict=True)):
            count = rows if self.by_row[index] else None
            # The gradients of a shared tensor are added up, and rounded after.
            dtype = self.lead.acc if form == SHARED else self.lead.dtypes[index]
            sizes = self.sizes("gradient", index)
            outs.append(empty(like, form, count, sizes, dtype) if need else None)
        return tuple(outs)

    forward = staticmethod(launching.forward)
    backward = staticmethod(launching.backward)


def _last(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a call saves that has no derivative: its None."""
    return values[-1:]


_groups: dict[Any, SliceGroup] = {}


def group_of(
    programs: Sequence[Program],
    inputs: Sequence[str],
    results: Sequence[str],
    lookups: Sequence[Lookup] = (),
    *,
    own_rows: bool = False,
) -> SliceGroup:
    """Return the operator of these programs and forms, always the same for equal arguments."""
    names = tuple([program.name for program in programs])
    key = names, tuple(inputs), tuple(results), tuple(lookups), own_rows
    group = _groups.get(key)
    if group is None:
        group = SliceGroup(programs, inputs, results, lookups, own_rows=own_rows)
        _groups[key] = group
    return group


def _drawn(
    dropout: Callable[..., Dropout],
    k: int,
    cols: int,
    like: Tensor,
    steps: int = 0,
    threshold: int | None = None,
) -> Dropout:
    """Return the mask of slice ``k``, of rows of ``cols``: see `core.calls.function.mask_of`."""
    return dropout(like, steps + (k << STEP_BITS), threshold, cols)
