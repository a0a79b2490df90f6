"""Launches of kernels of many slices.

A way of a call is which gradients it has, and in which form and dtype its tensors are. For each way
there are kernels, and for each bucket of the number of rows and each alignment a plan::

    site.plans[way]  ->  _Way: kernels, storages  ->  plans[alignment, bucket]  ->  launches
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, not_
from typing import Any

import torch
from torch import Tensor

from ...core.calls.operators import site_of
from ...core.configs import tuning
from ...core.configs.tuning import BUCKET, BUCKETS, TuningKey, widths
from ...core.launches import launch
from ...core.launches.launch import (
    SEED_TYPES,
    Variant,
    pointer_type,
    triton_dtype,
    vector_width,
)
from ...core.launches.operand import rows as as_rows
from ...core.launches.operand import vector
from ...core.launches.tables import constants, gather
from ...core.optional import present_indices, without_none
from ...core.random.rng import State, seed_kind
from ..addresses import LOOKUP as LOOKED_UP
from ..addresses import Argument, Sliced, Spacings
from ..codegen import backward_kernels, forward_kernels
from ..kernel import Kernel
from ..loading import loaded
from ..partials import slice_reduction
from ..planning import Plan
from . import configs, tables
from .buffers import with_zeros
from .forms import BUFFER, JOINT, LOOKUP, SEPARATE, SHARED
from .rows import Offsets, Rows, RowTable, row_table
from .site import SliceSite
from .source import Kind, SliceKernel, Storage, kernel_of_slices, reduction_of_slices
from .tiles import Tiling
from .unifying import outline, unified

__all__ = ["backward", "family_of", "forward", "outline_of", "prepare"]

tuning.register(configs, "slices_rowwise_forward", "slices_rowwise_backward")

# The most tables of rows of a plan. At this number they are all forgotten.
_MOST_ROW_TABLES = 256
# The most slices of a tile, a power of two.
_MOST_NEIGHBOURS = 64
# The key of a forward among the ways of calls.
_FORWARD = ()
# Tensors that kernels write.
_WRITTEN = ("output", "intermediate", "gradient")
_Key = tuple[str, int]
# The tensors of a kernel's argument: one of each slice, or one.
_Tensors = dict[_Key, Sequence[Any]]


def forward(site: SliceSite, tensors: Any, outs: Any, state: State) -> None:
    """Run a forward: one launch."""
    group = site.group
    way = site.plans.get(_FORWARD) or _way_of(site, _FORWARD)
    passed: _Tensors = {("input", i): tensors[group.span(i)] for i in range(len(group.inputs))}
    _divide_lookups(group, passed)
    passed |= {("output", r): (outs[r],) for r in range(group.count)}
    intermediate, stats = outs[group.visible - 1 : group.visible + 1]
    passed |= {("intermediate", 0): (intermediate,), ("stats", 0): (stats,)}
    way.run(site, passed, group.rows_of(tensors), tensors[group.first], state)


def backward(site: SliceSite, grads: Any, saved: Any, outs: Any, state: State) -> None:
    """Run a backward: one launch, and one that adds up the sums over rows of all slices."""
    group = site.group
    passed: _Tensors = {("gradient", i): (out,) for i, out in enumerate(outs)}
    inputs, intermediate = group.saved_parts(saved)
    passed |= {("input", i): p for i, p in zip(group.plan.saved_inputs, inputs, strict=True)}
    _divide_lookups(group, passed)
    passed |= {("intermediate", 0): intermediate, ("stats", 0): saved[:1]}
    by_result = group.by_result(grads)
    rows = group.rows_in(by_result, saved)
    cotangents = [_cotangents(group, n, part, rows) for n, part in enumerate(by_result)]
    passed |= {("cotangent", number): part for number, part in enumerate(cotangents)}
    dtypes = tuple([part[0].dtype if part else None for part in cotangents])
    wanted = tuple([out is not None for out in outs])
    key = dtypes, wanted, tuple([len(part) > 1 for part in cotangents]), len(intermediate) > 1
    way = site.plans.get(key) or _way_of(site, key)
    like = next(filter(None, cotangents))[0]
    way.run(site, passed, rows, like, state)


def _divide_lookups(group: Any, passed: _Tensors) -> None:
    """Divide the tensors of inputs that are looked up into tables and indices."""
    for index in group.lookups:
        tensors = passed.get(("input", index))
        if tensors is not None:
            passed["input", index] = tensors[: group.slices]
            passed["index", index] = tensors[group.slices :]


def _cotangents(group: Any, number: int, parts: Sequence[Any], rows: Rows) -> Sequence[Any]:
    """Return the cotangents of a result, all of one dtype; () if it has none."""
    present = without_none(parts)
    if not present:
        return ()
    like = present[0]
    if len(present) == len(parts) and len({grad.dtype for grad in parts}) == 1:
        return parts
    sizes = group.sizes("cotangent", number)
    filled = with_zeros(parts, [*zip(group.by_slice(rows), sizes, strict=True)])
    return [grad.to(like.dtype) for grad in filled]


def _way_of(site: SliceSite, key: tuple[Any, ...]) -> _Way:
    """Return the kernels of a way of calls, which the site keeps.

    Args:
        site: the calls'.
        key: `_FORWARD`, or the arguments of `_backward`.
    """
    way = site.plans[key] = _backward(site, *key) if key else _forward(site)
    return way


def prepare(
    group: Any, device: torch.device, rows: int, wanted: Sequence[bool], received: Sequence[bool]
) -> None:
    """Compile the kernels of a registered operator's call.

    Args:
        group: the operator.
        device: the device of its tensors.
        rows: the number of rows of a slice.
        wanted: for each input of the function, whether the backward computes its gradient. If it
            computes none, no backward is compiled.
        received: for each result, whether the backward has its gradient.
    Raises:
        NotCompiledError: Triton cannot compile one.
    """
    index = launch.current_device() if device.type == "cuda" else -1
    lead = group.lead
    drops = bool(lead.structure.drops)
    site = site_of(
        group,
        group.record,
        lead.dtypes[:1],
        cols=group.cols(group.record, ()),
        device_index=index,
        dropout=drops,
        saves=any(wanted),
    )
    keys: list[tuple[Any, ...]] = [_FORWARD]
    if any(wanted):
        own = [None] * group.own
        outputs = zip(lead.structure.outputs, received, strict=True)
        dtypes = (*[o.dtype if has_gradient else None for o, has_gradient in outputs], *own)
        keys.append((dtypes, tuple(wanted), (False,) * len(dtypes), False))
    seeded = (1 if index < 0 else 2) * drops
    for key in keys:
        way = site.plans.get(key) or _way_of(site, key)
        way.compile(site, seeded, BUCKET[rows.bit_length()], device)
    for input_index, lookup in group.lookups.items():
        if wanted[input_index] and group.slices >= tables.LEAST:
            sizes = group.sizes("gradient", input_index)
            tables.prepare(lookup, sizes, lead.dtypes[input_index], device)


def _forward(site: SliceSite) -> _Way:
    group = site.group
    acc = group.lead.acc
    forward_of = functools.partial(_forward_of, saves=site.saves, lookups=tuple(group.lookups))
    kernels = [forward_of(plan, acc, group.sliced) for plan in group.plans]
    return _Way(site, kernels, _storages(group, kernels, (), separate=False), ())


def _backward(
    site: SliceSite,
    dtypes: tuple[torch.dtype | None, ...],
    wanted: Sequence[bool],
    separate: Sequence[bool],
    has_separate_results: bool,
) -> _Way:
    group = site.group
    cotangents = tuple(present_indices(dtypes))
    gradients = tuple([index for index, want in enumerate(wanted) if want])
    acc = group.lead.acc
    gradients_of = functools.partial(
        _backward_of, cotangents=cotangents, wanted=gradients, lookups=tuple(group.lookups)
    )
    kernels = [gradients_of(plan, acc, group.sliced) for plan in group.plans]
    storages = _storages(group, kernels, separate, separate=has_separate_results)
    return _Way(site, kernels, storages, dtypes)


@functools.lru_cache(maxsize=4096)
def _forward_of(
    plan: Plan, acc: torch.dtype, sliced: Sliced, *, saves: bool, lookups: tuple[int, ...] = ()
) -> Kernel:
    (kernel,) = forward_kernels(
        plan,
        acc,
        group=(),
        tiled=False,
        saves=saves,
        spacings=_spacings(lookups),
        sliced=sliced,
    )
    return kernel


def _spacings(lookups: tuple[int, ...]) -> Spacings:
    return {("input", index): LOOKED_UP for index in lookups}


@functools.lru_cache(maxsize=4096)
def _backward_of(
    plan: Plan,
    acc: torch.dtype,
    sliced: Sliced,
    *,
    cotangents: tuple[int, ...],
    wanted: tuple[int, ...],
    lookups: tuple[int, ...] = (),
) -> Kernel:
    (kernel,) = backward_kernels(
        plan,
        acc,
        group=(),
        tiled=False,
        cotangents=cotangents,
        wanted=wanted,
        spacings=_spacings(lookups),
        sliced=sliced,
    )
    return kernel


@functools.lru_cache(maxsize=4096)
def outline_of(program: Any) -> str:
    """Return a text that is the same for programs that may be slices of one launch."""
    plan, acc = program.plan, program.acc
    kernels = [_forward_of(plan, acc, "mixed", saves=saves) for saves in (True, False)]
    if plan.differentiable:
        kernels.append(_whole_backward(program, "mixed"))
    sources = [outline(kernel.source) for kernel in kernels]
    return "\n".join([*sources, _saved_of(program)])


def _whole_backward(program: Any, sliced: Sliced) -> Kernel:
    """Return the backward of all results and inputs."""
    wanted = tuple(itertools.compress(itertools.count(), program.wanted))
    results = tuple(range(program.count))
    return _backward_of(program.plan, program.acc, sliced, cotangents=results, wanted=wanted)


def _saved_of(program: Any) -> str:
    """Return a text of a program's dtypes, of what it saves for the backward, and of its drops."""
    plan = program.plan
    values = program.dtypes, plan.saved_inputs, plan.intermediate_output, program.acc
    return "\n".join(map(repr, (*values, program.structure.drops)))


@functools.lru_cache(maxsize=4096)
def family_of(program: Any) -> str:
    """Return a text that is the same for programs that may be kinds of one launch.

    The slices are ragged: see `source.Kind`. The kinds have the same tensors, save the same for the
    backward, and add up partial sums by the same kernel.
    """
    plan, structure = program.plan, program.structure
    operands = [*structure.inputs, *structure.outputs]
    dimensions = map(len, map(attrgetter("labels"), operands))
    parts = [str(list(dimensions)), _saved_of(program)]
    if plan.differentiable:
        backward = _whole_backward(program, "ragged")
        reduction = slice_reduction(plan, backward)
        parts.append(str(backward.written))
        parts.append(outline(reduction.source))
    return "\n".join([*parts, str(bool(plan.intermediate)), str(program.own)])


def _storages(
    group: Any, kernels: Sequence[Kernel], cotangents: Sequence[bool], *, separate: bool
) -> dict[_Key, Storage]:
    """Return where the tensors of a kernel's arguments are.

    Args:
        group: the operator.
        kernels: the kernel of each slice.
        cotangents: for each result, whether each slice has a cotangent of its own.
        separate: whether the saved results of slices are tensors of their own.
    """
    storages: dict[_Key, Storage] = {}
    distinct = dict.fromkeys(kernels)
    for argument in itertools.chain(*map(attrgetter("arguments"), distinct)):
        kind, index = argument.kind, argument.index
        if kind == "index":
            storages[kind, index] = Storage(LOOKUP, True, sizes=group.lookups[index].rows)
        if kind not in _FORMS:
            continue
        form = _FORMS[kind](group, index)
        # What this package allocates is one tensor.
        if form != JOINT and kind != "input":
            form = BUFFER
        if (kind == "cotangent" and cotangents[index]) or (kind == "input" and form == LOOKUP):
            form = SEPARATE
        if kind == "intermediate" and separate:
            form = SEPARATE
        storages[kind, index] = group.storage(kind, index, form)
    return storages


# The caller's form of each kind of argument.
_FORMS: dict[str, Callable[[Any, int], str]] = {
    "input": lambda group, index: group.inputs[index],
    "gradient": lambda group, index: group.inputs[index],
    "output": lambda group, index: group.form_of_result(index),
    "cotangent": lambda group, index: group.form_of_result(index),
    "intermediate": lambda group, index: group.form_of_result(group.intermediate),
}


@dataclass(frozen=True)
class _Plan:
    """The compiled kernels of a way, for an alignment and a bucket of the number of rows.

    Attributes:
        variant: the kernel.
        reduce: the kernel that adds up partial sums; None without any.
        arguments: the keys of the kernel's arguments among the values of a call.
        reduce_arguments: those of the reduction's.
        units: the units of all slices: see `Tiling`. Axis 0 of the grid is units.
        most_rows: the most rows of a tile; 0 if there is one place.
        partials: the number of partial sums; 0 if one program has all rows of a slice.
        table: the table of the kernel.
        reduce_table: that of the reduction.
        across: the tiles of columns of the reduction.
        tiling: the tiles of the slices.
        offsets: those that the kernels read from a table of rows.
        programs: as for `rows.row_table`.
        row_tables: the tables of rows, by the rows of the slices, if they differ.
    """

    variant: Variant
    reduce: Variant | None
    arguments: tuple[Any, ...]
    reduce_arguments: tuple[Any, ...]
    units: int
    most_rows: int
    partials: int
    table: Tensor
    reduce_table: Tensor | None
    across: int
    tiling: Tiling
    offsets: Sequence[Offsets]
    programs: int
    row_tables: dict[tuple[int, ...], RowTable]


def _kinds_of(kernels: Sequence[Kernel]) -> tuple[list[Kind], list[int]]:
    """Return the kinds of slices, the one with most slices first, and the kind of each slice.

    Args:
        kernels: the kernel of each slice; slices of one length have one kernel.
    """
    slices: dict[str, list[int]] = {}
    for k, kernel in enumerate(kernels):
        slices.setdefault(outline(kernel.source), []).append(k)
    kinds = []
    kind_of = [0] * len(kernels)
    for number, members in enumerate(sorted(slices.values(), key=len, reverse=True)):
        distinct = list(dict.fromkeys([kernels[k] for k in members]))
        function, numbers = unified(distinct)
        place_of = {kernel: place for place, kernel in enumerate(distinct)}
        places = [place_of.get(kernel, 0) for kernel in kernels]
        of_slices = [list(map(values.__getitem__, places)) for values in numbers]
        kinds.append(Kind(function, of_slices))
        for k in members:
            kind_of[k] = number
    return kinds, kind_of


class _Way:
    """The kernels of one way of calls.

    Attributes:
        group: the operator.
        kinds: the kinds of slices.
        kind_of: the index of each slice's kind.
        function: the function of most slices.
        is_ragged: whether rows are held in parts: see `tiles`.
        neighbours: the most slices that a tile may have: see `tiles`.
        reduction: adds up the partial sums of a slice; None without sums over rows.
    """

    def __init__(
        self,
        site: SliceSite,
        kernels: Sequence[Kernel],
        storages: dict[_Key, Storage],
        cotangents: Sequence[torch.dtype | None],
    ) -> None:
        self.group = site.group
        self.storages = storages
        self.cotangents = cotangents
        self.lengths = [program.structure.cols for program in self.group.programs]
        plans = dict(zip(kernels, self.group.plans, strict=True))
        self.kinds, self.kind_of = _kinds_of(kernels)
        functions, _ = zip(*self.kinds, strict=True)
        self.function = functions[0]
        self.is_ragged = self.group.sliced == "ragged"
        if len(self.kinds) > 1 and not self.is_ragged:
            raise ValueError(f"{self.group.op}: the kernels of slices differ")
        self.reduction: Kind | None = None
        if self.function.sums:
            reductions = {kernel: slice_reduction(plan, kernel) for kernel, plan in plans.items()}
            (self.reduction,), _ = _kinds_of(list(map(reductions.__getitem__, kernels)))
        self.neighbours = self._neighbours()
        self.plans: dict[Any, _Plan] = tuning.register_cache({})
        thresholds = self.group.lead.thresholds
        self.thresholds = {("threshold", n): value for n, value in enumerate(thresholds)}
        # In the order of the kernel's arguments.
        by_kind = defaultdict[str, list[_Key]](list)
        for key, storage in storages.items():
            by_kind[storage.kind].append(key)
        self.separate, self.looked_up = by_kind[SEPARATE], by_kind[LOOKUP]
        self.whole = [key for key in storages if storages[key].kind not in (SEPARATE, LOOKUP)]
        arguments = itertools.chain(*map(attrgetter("arguments"), functions))
        strides = [(a.of, a.index) for a in arguments if a.kind == "stride"]
        self.strided = set(strides).difference(self.looked_up)
        # The elements of a row of the tensors of all slices that a kernel reads by a stride.
        self.rows: dict[_Key, int] = {}
        for key in self.whole:
            storage = storages[key]
            if storage.by_row and storage.kind in (JOINT, SHARED):
                self.rows[key] = sum(storage.sizes) if storage.kind == JOINT else storage.sizes[0]

    def _neighbours(self) -> int:
        """Return the most slices that a tile may have: a power of two that divides their number.

        If it is several, the rows of all slices are side by side. And there are no random numbers,
        numbers of a slice, or vectors without columns, of which a tile has only those of one slice.
        """
        kind = self.kinds[0]
        inputs = self.group.lead.structure.inputs
        vectors = itertools.compress(inputs, map(not_, self.group.by_row))
        has_columns = all(map(self.group.lead.structure.has_columns, vectors))
        forms = {storage.kind for storage in self.storages.values() if storage.by_row}
        is_plain = not (kind.numbers or kind.function.drops)
        if not (kind.function.joins and is_plain and has_columns and forms == {JOINT}):
            return 1
        return math.gcd(self.group.slices, _MOST_NEIGHBOURS)

    def run(self, site: SliceSite, passed: _Tensors, rows: Rows, like: Any, state: State) -> None:
        """Launch the kernels."""
        values: dict[Any, Any] = {("rows", 0): rows, ("stats", 0): passed["stats", 0][0]}
        most_rows = max(rows) if isinstance(rows, tuple) else rows
        values |= self.thresholds
        copies: list[Any] = []  # alive until the launch
        bits = self._put_whole(passed, values)
        if self.separate:
            pointers, strides, more = self._separate(passed, copies)
            addresses = gather(site.device_index, like.device, pointers, strides)
            values["slice_addresses"] = addresses.table
            bits |= addresses.bits | more
        seeded = 0
        if self.function.drops:
            seed, offset, _ = state
            seeded = 0 if seed is None else seed_kind(offset)
            values |= {("seed", 0): seed, ("offset", 0): offset}
        key = (site, seeded, bits & 15 == 0, BUCKET[most_rows.bit_length()])
        plan = self.plans.get(key)
        if plan is None:
            plan = tuning.plan(self.plans, key, self._plan, like.device)
        units, partials, places = plan.units, plan.partials, 1
        if isinstance(rows, tuple):
            table = self._row_table(plan, rows)
            units, partials = table.units, table.partials if plan.reduce else 0
            numbers = gather(site.device_index, like.device, table.numbers, None)
            values["slice_rows"] = numbers.table
        elif plan.most_rows:
            places = -(-rows // plan.most_rows)
        if self.function.sums:
            # Without partial sums nothing is written to their address, so any tensor will do.
            values["partials", 0] = like
            if partials:
                values["partials", 0] = like.new_empty(partials, dtype=self.group.lead.acc)
        values["slice_table"] = plan.table
        plan.variant(units, places, *map(values.__getitem__, plan.arguments))
        if plan.reduce is not None:
            values["slice_table"] = plan.reduce_table
            slots = len(self.function.sums) * self.group.slices
            plan.reduce(plan.across, slots, *map(values.__getitem__, plan.reduce_arguments))

    def _row_table(self, plan: _Plan, rows: tuple[int, ...]) -> RowTable:
        """Return the table of the slices' rows, an earlier one if there is one."""
        table = plan.row_tables.get(rows)
        if table is None:
            if len(plan.row_tables) >= _MOST_ROW_TABLES:
                plan.row_tables.clear()
            least = 2 if self.function.sums else 1
            table = row_table(rows, plan.tiling, plan.offsets, programs=plan.programs, least=least)
            plan.row_tables[rows] = table
        return table

    def _separate(
        self, passed: _Tensors, copies: list[Any]
    ) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the addresses and row strides of separate tensors, and the bits of the strides.

        After the strides are the addresses of indices, and their strides: see `source`.

        Args:
            passed: the tensors.
            copies: gets the copies of tensors that cannot be read in place.
        """
        pointers: list[int] = []
        strides: list[int] = []
        bits = 0
        for key in self.separate:
            for t, size in zip(passed[key], self.storages[key].sizes, strict=True):
                stride = size
                if not t.is_contiguous() or t.is_neg() or not t.data_ptr():
                    if key in self.strided:
                        t, stride, _ = as_rows(t, size)
                    else:
                        t, _ = vector(t)
                    copies.append(t)
                pointers.append(t.data_ptr())
                strides.append(stride)
                bits |= stride << 1
        indices = list(itertools.chain(*map(passed.__getitem__, self.looked_up)))
        strides += [index.data_ptr() for index in indices]
        strides += [index.stride(0) for index in indices]
        return tuple(pointers), tuple(strides), bits

    def _put_whole(self, passed: _Tensors, values: dict[Any, Any]) -> int:
        """Add the tensors of all slices, with their row strides; return their bits."""
        bits = 0
        for key in self.whole:
            (t,) = passed[key]
            size = self.rows.get(key)
            if size is None:
                read, more = vector(t)
            else:
                read, values["stride", key], more = as_rows(t, size)
            if read is not t and key[0] in _WRITTEN:
                raise RuntimeError(f"{self.group.op}: {key[0]} {key[1]} is not contiguous")
            values[key] = read
            bits |= more
        return bits

    # --- plans ------------------------------------------------------------------------------------

    def compile(self, site: SliceSite, seeded: int, bucket: int, device: torch.device) -> None:
        """Compile the kernels for tensors as PyTorch allocates them."""
        sizes = [size for key in self.strided for size in self.group.sizes(*key)]
        key = (site, seeded, not any(size % 8 for size in sizes), bucket)
        if key not in self.plans:
            tuning.plan(self.plans, key, self._plan, device)

    def _tuning_key(self, bucket: int) -> TuningKey:
        function = self.function
        moved = function.moved or (self.group.lead.acc,)
        direction = "backward" if self.cotangents else "forward"
        variant = (
            f"{len(function.sums)} sums",
            f"{len(moved)} moved",
            "dropout" if function.drops else "plain",
            self._lengths_in_words(),
            "elements" if self.is_ragged else "vectors",
            self.group.lead.digest,
        )
        itemsizes = widths(*sorted({dtype.itemsize for dtype in moved}))
        return TuningKey(
            f"slices_rowwise_{direction}", variant, itemsizes, max(self.lengths), bucket
        )

    def _lengths_in_words(self) -> str:
        """Return the lengths' word in a tuning key: see `configs`."""
        if self.neighbours > 1:
            return f"{self.neighbours} neighbours"
        return "equal" if len(set(self.lengths)) == 1 else "mixed"

    def _plan(
        self, site: SliceSite, seeded: int, aligned: bool, bucket: int, device: torch.device
    ) -> _Plan:
        config = tuning.choose(self._tuning_key(bucket), site.device_index)
        has_sums = bool(self.function.sums)
        # Few rows are processed by one program of each slice, which stores the gradients itself.
        alone = has_sums and bucket == 0
        loops = has_sums or self.is_ragged
        programs = self._programs(site, config, loops=loops, alone=alone)
        tiling = self._tiling(config, bucket, programs, alone=alone)
        bases, total = self._bases(tiling)
        own_rows = self.group.own_rows
        kernel = kernel_of_slices(
            self.kinds,
            self.lengths,
            self.storages,
            tiling=tiling,
            partials=bases,
            own_rows=own_rows,
        )
        align = kernel.align() if aligned else 1
        # With rows of their own, slices have units for these: see `rows`.
        in_table = () if own_rows else tiling.units
        units = len(in_table)
        moved = self.function.moved or (self.group.lead.acc,)
        vectors = vector_width(*moved)
        elements = config.block_n * config.rows // (32 * config.warps)
        values = {
            "VECTOR": vectors if elements >= vectors else 4,
            "PERSISTENT": loops,
            "TILES": tuple(map(tuple, tiling.tiles)),
            "TYPES": self._types_of(kernel),
            "UNITS": units,
            "SLICES": self.group.slices,
            "ALIGN": align,
        }
        variant = self._variant(site, kernel, seeded, values, config, aligned)
        reduce = reduce_table = None
        reduce_arguments: tuple[Any, ...] = ()
        across = 0
        if self.reduction is not None and not alone:
            reduction = reduction_of_slices(
                self.reduction,
                self.lengths,
                self.storages,
                partials=bases,
                parts=tiling.parts,
                offsets=kernel.offsets if own_rows else None,
            )
            reduce_config = tuning.config_of_sums(max(tiling.parts), max(self.lengths))
            across = -(-max(self.lengths) // reduce_config.block_n)
            reduce_align = reduction.align() if aligned else 1
            values |= {"UNITS": 0, "ALIGN": reduce_align, "TYPES": self._types_of(reduction)}
            reduce = self._variant(site, reduction, 0, values, reduce_config, aligned)
            reduce_table = constants(reduction.table((), reduce_align), device, torch.int64)
            reduce_arguments = reduction.arguments()
        return _Plan(
            variant,
            reduce,
            kernel.arguments(),
            reduce_arguments,
            units,
            0 if loops else tiling.most_rows,
            0 if alone else total,
            constants(kernel.table(in_table, align), device, torch.int64),
            reduce_table,
            across,
            tiling,
            kernel.offsets,
            programs,
            {},
        )

    def _programs(self, site: SliceSite, config: tuning.Config, *, loops: bool, alone: bool) -> int:
        """Return the number of programs that run at a time, for `Tiling`; 0 without loops.

        Args:
            site: the calls'.
            config: the config.
            loops: whether programs loop over tiles.
            alone: whether one program has all rows of a slice.
        """
        if not loops:
            return 0
        available = launch.processors(site.device_index) * max(config.per_sm, 1)
        return 1 if alone else max(available, 2)

    def _tiling(self, config: tuning.Config, bucket: int, programs: int, *, alone: bool) -> Tiling:
        """Return the tiles and units of all slices.

        Args:
            config: the config.
            bucket: the bucket of the number of rows.
            programs: the number of programs that run at a time; 0 if they do not loop over tiles.
            alone: whether one program has all rows of a slice.
        """
        rows = 0
        if programs:
            is_last = bucket + 1 == len(BUCKETS)
            rows = 0 if is_last else BUCKETS[bucket + 1]
        if self.neighbours > 1:
            return Tiling.of_neighbours(self.lengths, config, programs, rows)
        if not self.is_ragged:
            return Tiling.of(self.lengths, config, programs, rows)
        # A slice with partial sums has two units or more: one would store the gradients itself.
        least = 2 if self.function.sums and not alone else 1
        return Tiling.of_ragged(self.lengths, self.kind_of, config, programs, rows, least)

    def _bases(self, tiling: Tiling) -> tuple[list[int], int]:
        """Return where the partial sums of each slice begin, and how many there are."""
        bases, total = [], 0
        for parts, length in zip(tiling.parts, self.lengths, strict=True):
            bases.append(total)
            total += parts * len(self.function.sums) * length
        return bases, total

    def _types_of(self, kernel: SliceKernel) -> tuple[Any, ...]:
        return tuple([triton_dtype(self._dtype(argument)) for argument in kernel.separate])

    def _dtype(self, argument: Argument) -> Any:
        """Return the dtype of a tensor argument."""
        kind, index, group = argument.kind, argument.index, self.group
        if kind == "cotangent":
            dtype = self.cotangents[index]
            assert dtype is not None
            return dtype
        if kind == "input":
            return group.lead.dtypes[index]
        if kind == "index":
            return getattr(torch, group.lookups[index].dtype)
        if kind == "gradient":
            return group.lead.acc if group.inputs[index] == SHARED else group.lead.dtypes[index]
        if kind in ("output", "intermediate"):
            return group.operand(kind, index).dtype
        return group.lead.acc

    def _variant(
        self,
        site: SliceSite,
        kernel: SliceKernel,
        seeded: int,
        values: dict[str, Any],
        config: tuning.Config,
        aligned: bool,
    ) -> Variant:
        types: dict[str, str | None] = {}
        for name, argument in kernel.parameters:
            if argument is None:
                types[name] = "*i64"
            elif argument.kind in ("seed", "offset"):
                types[name] = SEED_TYPES[seeded][argument.kind]
            elif argument.kind == "threshold":
                types[name] = "i32"
            elif argument.kind in ("stride", "rows"):
                types[name] = "i64"
            else:
                types[name] = pointer_type(self._dtype(argument))
        function = loaded(self.group.op, self.group.digest, kernel)
        return launch.build(
            function,
            types,
            values,
            config,
            device_index=site.device_index,
            acc=self.group.lead.acc,
            cols=0,
            aligned=aligned,
        )
