"""The source of a kernel of many slices, which calls the function of one slice.

Each program finds its slice in a table, computes the slice's addresses, and calls the function::

    table        [for each unit: tile | slice | part | parts] [for each slice: length | numbers ...]
    addresses    [of each slice's first separate tensor | of the second | ... | row strides ...
                  | of each slice's index of a table | of the second | ... | their strides ...]

If slices have rows of their own, a table of these has the units, too: see `rows`.

Offsets and lengths in the table are in units of ALIGN elements, their common factor, so that the
compiler knows how many elements a load may have.
"""

from __future__ import annotations

import itertools
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

from ..addresses import Argument
from ..kernel import SLICE_ARGUMENTS, Kernel, first_lines
from ..text import indented
from .forms import BUFFER, LOOKUP, SEPARATE, SHARED
from .rows import Offsets, RowsInTable
from .tiles import Tiling

__all__ = [
    "STEP_BITS",
    "Kind",
    "SliceKernel",
    "Storage",
    "kernel_of_slices",
    "reduction_of_slices",
]

# The numbers of each unit in a table, which precede those of slices.
_OF_UNITS = 4
# How a program finds its slice: each has as many units, or the table tells.
_EVEN_UNITS = (
    "slice_tile = 0",
    "slice_shares = UNITS // SLICES",
    "slice_number = (slice_unit // slice_shares).to(tl.int64)",
    "slice_share = slice_unit % slice_shares",
)
# The same of several neighbouring slices. What is computed from a slice's number is a block, with a
# row for each of the tile's: see `codegen`.
_UNITS_OF_NEIGHBOURS = (
    "slice_shares = UNITS * TILES[0][5] // SLICES",
    "slice_lane = tl.arange(0, TILES[0][1] * TILES[0][5]) % TILES[0][5]",
    "slice_first = (slice_unit // slice_shares).to(tl.int64) * TILES[0][5]",
    "slice_number = slice_first + slice_lane[:, None]",
    "slice_share = slice_unit % slice_shares",
)
_UNITS_IN_TABLE = (
    "slice_tile = tl.load(slice_table + slice_unit)",
    "slice_number = tl.load(slice_table + UNITS + slice_unit)",
    "slice_share = tl.load(slice_table + 2 * UNITS + slice_unit).to(tl.int32)",
    "slice_shares = tl.load(slice_table + 3 * UNITS + slice_unit).to(tl.int32)",
)
# The random numbers of slice k begin ``k << STEP_BITS`` after those of slice 0. A process draws
# fewer, and the dropouts of a function are further apart: see `emitter.Emitter._keep`.
STEP_BITS = 36
# The arguments that a table of rows determines, if there is one.
_FROM_ROWS = ("rows", "stats", "partials")
_CONSTANTS = ("ACC", "VECTOR", "STAGES", "OVERLAP", "PERSISTENT")
_OF_SLICES = ("TILES", "UNITS", "SLICES", "ALIGN", "TYPES")


class Storage(NamedTuple):
    """Where the slices of a kernel's tensor are.

    Attributes:
        kind: see `forms`.
        by_row: whether the tensor has a row for each row of the slice.
        firsts: for each slice, its first column if all are side by side.
        sizes: for each slice, the elements of a row; of an index, the rows of its table.
    """

    kind: str
    by_row: bool
    firsts: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


class Kind(NamedTuple):
    """A function of one slice, for the slices that have it.

    Most calls have one kind. The function of ragged slices of one column may be another, because
    code for one column is shorter: for example, the mean of a column is the column.

    Attributes:
        function: the function: see `unifying`.
        numbers: its numbers of slices, each with a value for each slice of the call. Slices of
            other kinds have any value.
    """

    function: Kernel
    numbers: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class SliceKernel:
    """A kernel of many slices.

    Attributes:
        name: its name.
        source: its source, with those of the functions of one slice.
        functions: the functions of one slice.
        parameters: its run-time arguments in order: the name, and the argument of the function that
            it is for; None for the tables.
        separate: the tensors with addresses in the table of addresses: those with aligned ones in
            order, and then the indices of tables.
        columns: the rows of the table that follow those of units: a number of each slice, and
            whether it counts elements.
        offsets: those that it reads from the table of rows.
    """

    name: str
    source: str
    functions: tuple[Kernel, ...]
    parameters: tuple[tuple[str, Argument | None], ...]
    separate: tuple[Argument, ...]
    columns: tuple[tuple[tuple[int, ...], bool], ...]
    offsets: tuple[Offsets, ...] = ()

    @property
    def contracts(self) -> bool:
        """Whether a product and a sum may be one instruction."""
        return all(map(attrgetter("contracts"), self.functions))

    @property
    def checks(self) -> bool:
        """Whether an index out of range makes an assertion fail."""
        return any(map(attrgetter("checks"), self.functions))

    def arguments(self) -> tuple[Any, ...]:
        """Return the key of each argument: its name for a table, a stride's tensor, or its own."""
        keys: list[Any] = []
        for name, argument in self.parameters:
            if argument is None:
                keys.append(name)
            elif argument.kind == "stride":
                keys.append(("stride", (argument.of, argument.index)))
            else:
                keys.append((argument.kind, argument.index))
        return tuple(keys)

    def table(self, units: Sequence[Sequence[int]], align: int) -> tuple[int, ...]:
        """Return the table's numbers; one that is not read if there are none."""
        numbers = list(itertools.chain(*zip(*units, strict=True)))
        for values, counts_elements in self.columns:
            numbers += [value // align for value in values] if counts_elements else values
        return tuple(numbers) or (0,)

    def align(self) -> int:
        """Return the largest power of two up to 8 that divides all that counts elements."""
        align = 8
        counted = [value for values, counts in self.columns if counts for value in values]
        while any(value % align for value in counted):
            align //= 2
        return align


class _Columns:
    """The numbers of slices in a table, each list of them once.

    Attributes:
        are_blocks: whether a number is a block, with that of each row's slice.
    """

    def __init__(self, *, are_blocks: bool = False) -> None:
        self.are_blocks = are_blocks
        self.indices: dict[tuple[tuple[int, ...], bool], int] = {}

    def read(self, values: Sequence[int], *, elements: bool = False) -> str:
        """Return the expression of a slice's number: it is computed if they are evenly spaced."""
        step = values[1] - values[0] if len(values) > 1 else 0
        if all(value == values[0] + step * k for k, value in enumerate(values)):
            return f"(slice_number * {step} + {values[0]})" if step else f"{values[0]}"
        index = self.indices.setdefault((tuple(values), elements), len(self.indices))
        text = f"tl.load(slice_table + {_OF_UNITS} * UNITS + {index} * SLICES + slice_number)"
        return f"{text} * ALIGN" if elements else text

    def multiple_of(self, name: str, factor: str) -> str:
        """Return the expression of a slice's number that a factor divides."""
        return f"tl.multiple_of({name}, {f'(1, {factor})' if self.are_blocks else factor})"

    def small(self, values: Sequence[int], *, elements: bool = False) -> str:
        """Return the expression of a slice's number in 32 bits."""
        text = self.read(values, elements=elements)
        return text if text.isdigit() else f"({text}).to(tl.int32)"


def kernel_of_slices(
    kinds: Sequence[Kind],
    lengths: Sequence[int],
    storages: Mapping[tuple[str, int], Storage],
    *,
    tiling: Tiling,
    partials: Sequence[int] = (),
    own_rows: bool = False,
) -> SliceKernel:
    """Return the kernel that calls the functions of one slice.

    Args:
        kinds: the kinds of slices; each tile of the tiling has the index of one.
        lengths: the columns of each slice.
        storages: where the tensors are, by kind and index.
        tiling: the tiles and units of all slices.
        partials: where the partial sums of each slice begin; unused with ``own_rows``.
        own_rows: whether slices have rows of their own: see `rows`.
    """
    kinds = _with_own_names(kinds)
    lead = kinds[0].function
    columns = _Columns(are_blocks=tiling.tiles[0].slices > 1)
    rows = RowsInTable() if own_rows else None
    if rows is None:
        lines = [
            "slice_unit = tl.program_id(0)",
            "slice_index, places = place_along_rows()",
            *_units_of(tiling),
            "program = slice_index * slice_shares + slice_share",
            "programs = places * slice_shares",
        ]
    else:
        lines = ["slice_unit = tl.program_id(0)", *rows.slice_of_unit(len(lengths))]
        lines += [*rows.units(), "program = (slice_unit - slice_first).to(tl.int32)"]
        if len(tiling.tiles) > 1:
            lines.append(f"slice_tile = {columns.read(tiling.tile_of)}")
    call = _Call(kinds, lengths, storages, columns, partials, rows)
    lines += call.lines
    drops = any(argument.kind == "seed" for argument in lead.arguments)
    if drops:
        # Each slice has random numbers of its own: see `STEP_BITS`.
        lines.append(f"offset += slice_number << {STEP_BITS}")
    if len(tiling.tiles) == 1:
        lines.append(_called(call, 0, "TILES[0]"))
    else:
        lines += ["for slice_kind in tl.static_range(len(TILES)):"]
        lines += ["    if slice_tile == slice_kind:"]
        lines += indented(_called_by_kind(call, len(kinds)), 2)
    body = [*first_lines(drops=drops), *lines]
    name = lead.name.replace("slice", "slices")
    source = _source(name, call.parameters, [*_CONSTANTS, *_OF_SLICES], body)
    return _slice_kernel(name, source, kinds, call, columns)


def _units_of(tiling: Tiling) -> Sequence[str]:
    """Return the lines with which a program finds its slice, or its slices."""
    if tiling.tiles[0].slices > 1:
        return _UNITS_OF_NEIGHBOURS
    return _EVEN_UNITS if tiling.is_even else _UNITS_IN_TABLE


def _called_by_kind(call: _Call, count: int) -> list[str]:
    """Return the lines that call the function of a tile's kind."""
    tile = "TILES[slice_kind]"
    if count == 1:
        return [_called(call, 0, tile)]
    lines = []
    for number in range(count):
        lines.append(f"if {tile}[4] == {number}:")
        lines.append(f"    {_called(call, number, tile)}")
    return lines


def _called(call: _Call, number: int, tile: str) -> str:
    """Return the call of a kind's function for a tile."""
    function = call.kinds[number].function
    values = {"BLOCK_N": f"{tile}[0]", "ROWS": f"{tile}[1]"}
    names = ["ACC", "BLOCK_N", "ROWS", *_CONSTANTS[1:]]
    if function.held:
        values |= {"PARTS": f"{tile}[2]", "EXACT": f"{tile}[3]"}
        names += ["PARTS", "EXACT"]
    if function.joins:
        values |= {"ROWS": f"{tile}[1] * {tile}[5]", "BLOCK_K": f"{tile}[5]"}
        names.append("BLOCK_K")
    options = [f"{name}={values.get(name, name)}" for name in names]
    return f"{function.name}({', '.join([*call.passed(number), *options])})"


def _with_own_names(kinds: Sequence[Kind]) -> list[Kind]:
    """Return the kinds, whose functions have different names."""
    result = [kinds[0]]
    for number, kind in enumerate(kinds[1:], 1):
        old = kind.function.name
        name = f"{old}_of_kind_{number}"
        source = kind.function.source.replace(f"def {old}(", f"def {name}(", 1)
        result.append(Kind(replace(kind.function, name=name, source=source), kind.numbers))
    return result


def _slice_kernel(
    name: str, source: str, kinds: Sequence[Kind], call: _Call, columns: _Columns
) -> SliceKernel:
    functions, _ = zip(*kinds, strict=True)
    return SliceKernel(
        name,
        "\n\n".join([*map(attrgetter("source"), functions), source]),
        functions,
        tuple(call.parameters),
        tuple(call.separate),
        tuple(columns.indices),
        tuple(call.offsets),
    )


def reduction_of_slices(
    kind: Kind,
    lengths: Sequence[int],
    storages: Mapping[tuple[str, int], Storage],
    *,
    partials: Sequence[int],
    parts: Sequence[int],
    offsets: Sequence[Offsets] | None = None,
) -> SliceKernel:
    """Return the kernel that adds up the partial sums of all slices.

    Axis 0 of the grid is tiles of columns, axis 1 the slots of each slice.

    Args:
        kind: the function of one slice: see `partials.slice_reduction`.
        lengths: as in `kernel_of_slices`.
        storages: as in `kernel_of_slices`.
        partials: as in `kernel_of_slices`.
        parts: the units of each slice.
        offsets: those of the table of rows, which has the units then; None without a table.
    """
    columns = _Columns()
    rows = None if offsets is None else RowsInTable(offsets)
    slots = len(kind.function.sums)
    lines = [
        f"slice_number = (tl.program_id(1) // {slots}).to(tl.int64)",
        f"program = tl.program_id(1) % {slots}",
    ]
    if rows is None:
        lines.append(f"programs = {columns.small(parts)}")
    else:
        lines += rows.units()
    call = _Call([kind], lengths, storages, columns, partials, rows)
    constants = ("ACC", "BLOCK_N", "ROWS")
    options = [f"{name}={name}" for name in constants]
    lines += [*call.lines, f"{kind.function.name}({', '.join([*call.passed(0), *options])})"]
    body = [*first_lines(drops=False), *lines]
    source = _source("reduce_slices", call.parameters, [*constants, "OVERLAP", *_OF_SLICES], body)
    return _slice_kernel("reduce_slices", source, [kind], call, columns)


class _Call:
    """The calls of the functions of one slice.

    Attributes:
        kinds: the kinds of slices.
        lines: the lines that compute the functions' arguments.
        parameters: see `SliceKernel`.
        separate: likewise.
        offsets: likewise.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        lengths: Sequence[int],
        storages: Mapping[tuple[str, int], Storage],
        columns: _Columns,
        partials: Sequence[int],
        rows: RowsInTable | None,
    ) -> None:
        self.kinds = kinds
        lines = [f"N = {columns.small(lengths, elements=True)}"]
        if len(set(lengths)) == 1:
            lines = [f"N: tl.constexpr = {lengths[0]}"]
        functions, numbers = zip(*kinds, strict=True)
        for i, values in enumerate(itertools.chain(*numbers)):
            lines.append(f"number{i} = {_number(columns, values)}")
        arguments = self._arguments = _arguments_of(kinds)
        by_storage = defaultdict[str, list[Argument]](list)
        for argument in arguments.values():
            if (argument.kind, argument.index) in storages:
                by_storage[storages[argument.kind, argument.index].kind].append(argument)
        separate, looked_up = by_storage[SEPARATE], by_storage[LOOKUP]
        parameters: list[tuple[str, Argument | None]] = [("slice_table", None)]
        if separate:
            parameters.append(("slice_addresses", None))
        if rows is not None:
            parameters.append(("slice_rows", None))
        stats = max(map(attrgetter("stats"), functions))
        for argument in arguments.values():
            name = argument.name
            text, is_passed = _argument(argument, storages, separate, looked_up, columns, rows)
            if rows is not None and argument.kind in _FROM_ROWS:
                text = [_from_rows(argument, rows, lengths, stats, len(functions[0].sums))]
                is_passed = argument.kind != "rows"
            elif argument.kind == "stats":
                text = [f"{name} += slice_number * {stats} * M"]
            elif argument.kind == "partials":
                text = [f"{name} += {columns.read(partials)}"]
            lines += text
            if is_passed:
                parameters.append((name, argument))
        self.lines, self.parameters = lines, parameters
        self.separate = [*separate, *looked_up]
        self.offsets = [] if rows is None else rows.offsets

    def passed(self, number: int) -> list[str]:
        """Return the arguments that a kind's function gets at run time."""
        first = sum([len(kind.numbers) for kind in self.kinds[:number]])
        function, numbers = self.kinds[number]
        names = list(map("number{}".format, range(first, first + len(numbers))))
        keys = map(_key_of, function.arguments)
        names += [self._arguments[key].name for key in keys]
        return [*names, *SLICE_ARGUMENTS]


def _from_rows(
    argument: Argument, rows: RowsInTable, lengths: Sequence[int], stats: int, sums: int
) -> str:
    """Return the line that computes an argument from the table of rows.

    Args:
        argument: one of the kinds `_FROM_ROWS`.
        rows: the table.
        lengths: the columns of each slice.
        stats: the saved statistics of a row.
        sums: the sums over rows.
    """
    if argument.kind == "rows":
        return f"{argument.name} = {rows.rows}"
    if argument.kind == "stats":
        return f"{argument.name} += {rows.offset([stats] * len(lengths))}"
    sizes = [sums * length for length in lengths]
    return f"{argument.name} += {rows.offset(sizes, by_unit=True)}"


def _arguments_of(kinds: Sequence[Kind]) -> dict[Any, Argument]:
    """Return the arguments of all kinds' functions, each once; they have different names."""
    arguments: dict[Any, Argument] = {}
    names = set[str]()
    for number, kind in enumerate(kinds):
        for argument in kind.function.arguments:
            if _key_of(argument) in arguments:
                continue
            name = argument.name
            if name in names:
                name = f"kind{number}_{name}"
            names.add(name)
            arguments[_key_of(argument)] = replace(argument, name=name)
    return arguments


def _key_of(argument: Argument) -> tuple[str, int, str, int]:
    """Return what an argument is, whatever its name is."""
    return argument.kind, argument.index, argument.of, argument.dim


def _argument(
    argument: Argument,
    storages: Mapping[tuple[str, int], Storage],
    separate: Sequence[Argument],
    looked_up: Sequence[Argument],
    columns: _Columns,
    rows: RowsInTable | None,
) -> tuple[list[str], bool]:
    """Return the lines that compute an argument, and whether the kernel has it as a parameter."""
    name, is_stride = argument.name, argument.kind == "stride"
    key = argument.of if is_stride else argument.kind, argument.index
    if argument.kind == "limit":
        return [f"{name} = {columns.read(storages['index', argument.index].sizes)}"], False
    storage = storages.get(key)
    if storage is None:
        return [], True
    if storage.kind == LOOKUP:
        # Neither addresses nor strides of indices are aligned.
        place = [(a.kind, a.index) for a in looked_up].index(key)
        row = 2 * len(separate) + is_stride * len(looked_up) + place
        at = f"tl.load(slice_addresses + {row} * SLICES + slice_number)"
        cast = "" if is_stride else f".to(tl.pointer_type(TYPES[{len(separate) + place}]))"
        return [f"{name} = {at}{cast}"], False
    if storage.kind == SEPARATE:
        row = [(a.kind, a.index) for a in separate].index(key)
        at = f"tl.load(slice_addresses + {row + is_stride * len(separate)} * SLICES + slice_number)"
        factor = "ALIGN" if is_stride else "16"
        cast = "" if is_stride else f".to(tl.pointer_type(TYPES[{row}]))"
        hint = f"if ALIGN > 1: {name} = {columns.multiple_of(name, factor)}"
        return [f"{name} = {at}{cast}", hint], False
    if not is_stride:
        return _offset(name, storage, columns, rows), True
    if storage.kind == BUFFER:
        return [f"{name} = {columns.read(storage.sizes, elements=True)}"], False
    return [], True


def _offset(name: str, storage: Storage, columns: _Columns, rows: RowsInTable | None) -> list[str]:
    """Return the line that adds the offset of a slice to a tensor's address; none for a shared one.

    In a buffer of rows, all rows of a slice precede those of the next.
    """
    if storage.kind == SHARED:
        return []
    is_buffer_of_rows = storage.kind == BUFFER and storage.by_row
    if is_buffer_of_rows and rows is not None:
        return [f"{name} += {rows.offset(storage.sizes)}"]
    first = columns.read(storage.firsts, elements=True)
    return [f"{name} += {first} * M" if is_buffer_of_rows else f"{name} += {first}"]


def _number(columns: _Columns, values: Sequence[Any]) -> str:
    """Return the expression that reads a number of a slice; of a float the table has the bits."""
    if isinstance(values[0], float):
        bits = [struct.unpack("q", struct.pack("d", value))[0] for value in values]
        return f"{columns.read(bits)}.to(tl.float64, bitcast=True).to(ACC)"
    return columns.read(values, elements=True)


def _source(
    name: str,
    parameters: Sequence[tuple[str, Argument | None]],
    constants: Sequence[str],
    body: Sequence[str],
) -> str:
    fixed = [text for text in ("seed", "offset", "M") if text in dict(parameters)]
    lines = [f"@triton.jit(do_not_specialize={fixed!r})", f"def {name}("]
    lines += indented([f"{parameter}," for parameter, _ in parameters])
    lines += indented([f"{constant}: tl.constexpr," for constant in constants])
    return "\n".join([*lines, "):", *indented(body)]) + "\n"
