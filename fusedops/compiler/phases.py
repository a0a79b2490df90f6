"""Kernels whose programs hold rows in registers: their phases, and the lines of each.

A program holds the columns of a row, or some of them, in PARTS tiles side by side. (In the lines of
these kernels a "part" is such a tile, and not a part of a row as in `structure`.) Every phase has a
loop over the tiles, which Triton unrolls, and ends with the reductions that the next one needs::

    variance:   phase 0: loads, sum -> mean    phase 1: sum of (x - mean) ** 2    phase 2: stores

A phase keeps what it loads for a later one in a tuple of tiles::

    x_parts = ()
    for part in tl.static_range(PARTS):
        x_tile = tl.load(...)
        x_parts = x_parts + (x_tile,)

Programs that share a row exchange its sums between the first phase and the second, which is the
last: see `fusedops.core.exchange`. A program does not wait at once for the sums of the others. It
first runs the first phase of its next rows, and keeps the earlier rows in variables ``late_...``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .emitter import Emitter
from .ir import REDUCTIONS, Node, computed_of, reachable, topological
from .partials import stores_of_sums
from .passes import maximum
from .row_sums import RowSum, add_columns, row_sums
from .rows_of_programs import GROUP_LINES, MASK, partial_row_line, program_lines
from .structure import Part
from .text import indented

__all__ = ["WIDEST_TILE", "Phases", "held_body", "phases_of"]

# The most columns of rows that are one tile with every config. Longer rows may be split into tiles:
# at least three, of at least 128 columns each.
WIDEST_TILE = 256
# The most sums that programs exchange, two in each word.
_MOST_EXCHANGED = 4
_PART_LOOP = "for part in tl.static_range(PARTS):"
_PART_START = "start = first + part * BLOCK_N"
_INSIDE_PART = "inside_row({}, part < EXACT, {})"


# Values that are stored. One store writes the values of an inner tuple: one part of a row, or two.
Stored = Sequence[tuple[Node, ...]]


@dataclass(frozen=True)
class Phases:
    """The reductions of a kernel, by phase.

    Attributes:
        reductions: the reductions of each phase but the last, which has none.
        levels: for each value, the first phase that can compute it.
        carried: the values along rows and columns that a phase keeps for a later one.
        exchanged: the sums that programs sharing a row exchange; () if they cannot share one.
        loads: in a kernel without reductions, what the first phase loads for the second.
        numbers: the values with one number for each row that the last phase reads from memory.
        masks: the dropout masks that the last phase alone needs.
    """

    reductions: tuple[tuple[Node, ...], ...]
    levels: Mapping[Node, int]
    carried: frozenset[Node]
    exchanged: tuple[Node, ...]
    loads: tuple[Node, ...] = ()
    numbers: tuple[Node, ...] = ()
    masks: tuple[Node, ...] = ()

    @property
    def all_reductions(self) -> tuple[tuple[Node, ...], ...]:
        """The reductions of all phases, () for the last; there are at least two phases."""
        if not self.reductions:
            return (), ()
        return *self.reductions, ()

    @property
    def can_share(self) -> bool:
        """Whether several programs can have the columns of a row."""
        return not self.reductions or bool(self.exchanged)


def phases_of(
    stored: Stored, summed: Sequence[Node], emitter: Emitter, *, exchanges: bool
) -> Phases:
    """Return the phases of a kernel.

    Args:
        stored: the values that it stores: see `Stored`.
        summed: the values that it sums over rows.
        emitter: the emitter of the kernel.
        exchanges: whether programs may exchange sums.
    """
    roots = [*itertools.chain(*stored), *summed]
    levels, reductions = _levels(roots, emitter)
    exchanged = _exchanged(reductions, emitter) if exchanges else ()
    phases = Phases(reductions, levels, frozenset(), exchanged)
    roots_by_phase = _roots_by_phase(phases, stored, summed)
    last_roots = roots_by_phase[-1]
    last = _needed(last_roots, emitter)
    numbers = filter(emitter.is_number, reachable(last_roots, emitter.leaves.__contains__))
    phases = replace(phases, numbers=_in_order(numbers))
    if not reductions:
        # The first phase only loads, for the second one.
        roots_by_phase[0] += _in_order(filter(emitter.is_tile, last))
        carried = _carried(roots_by_phase, emitter, loads_alone=False)
        return replace(phases, carried=carried, loads=tuple(roots_by_phase[0]))
    early = set[Node]().union(*[_needed(roots, emitter) for roots in roots_by_phase[:-1]])
    masks = [node for node in last - early if node.op == "keep"]
    carried = _carried(roots_by_phase, emitter, loads_alone=bool(exchanged))
    return replace(phases, carried=carried, masks=_in_order(masks))


def _levels(
    roots: Sequence[Node], emitter: Emitter
) -> tuple[dict[Node, int], tuple[tuple[Node, ...], ...]]:
    """Return the first phase that can compute each value, and the reductions by phase."""
    levels: dict[Node, int] = {}
    by_phase: dict[int, list[Node]] = {}
    used = reachable(roots, emitter.leaves.__contains__)
    for node in filter(used.__contains__, topological(roots)):
        args = () if node in emitter.leaves else computed_of(node)
        level = max(map(levels.__getitem__, args), default=0)
        if node.op in REDUCTIONS and emitter.is_reduced(node):
            by_phase.setdefault(level, []).append(node)
            level += 1
        levels[node] = level
    return levels, tuple([tuple(by_phase[phase]) for phase in sorted(by_phase)])


def _roots_by_phase(phases: Phases, stored: Stored, summed: Sequence[Node]) -> list[list[Node]]:
    """Return the values that each phase reduces, stores or sums over rows."""
    roots_by_phase: list[list[Node]] = []
    for phase, reductions in enumerate(phases.all_reductions):
        roots = [node.args[0] for node in reductions]
        for together in stored:
            if _phase_of(together, phases) == phase:
                roots += together
        roots_by_phase.append(roots)
    roots_by_phase[-1] += summed
    return roots_by_phase


def _needed(roots: Sequence[Node], emitter: Emitter, known: Container[Node] = ()) -> set[Node]:
    """Return the values along columns that a phase computes or loads for its roots.

    Those that are ``known`` end the search, and are in the result.
    """

    def ends(node: Node) -> bool:
        return node in known or node in emitter.leaves or not emitter.has_columns(node)

    return set(filter(emitter.has_columns, reachable(roots, ends)))


def _in_order(nodes: Iterable[Node]) -> tuple[Node, ...]:
    return tuple(sorted(nodes, key=lambda node: node.number))


def _carried(
    roots_by_phase: Sequence[Sequence[Node]], emitter: Emitter, loads_alone: bool
) -> frozenset[Node]:
    """Return what a phase keeps for a later one: the values that both need.

    With ``loads_alone`` it is only what is loaded. A program that shares rows keeps two tiles of
    them at a time. Loaded values may have 16 bits, and so take fewer registers than computed ones,
    which are computed again.
    """
    computed: set[Node] = set()
    carried: set[Node] = set()
    for roots in roots_by_phase:
        needed = _needed(roots, emitter, () if loads_alone else computed)
        carried |= needed & computed
        computed |= set(filter(emitter.has_rows, needed))
    return frozenset(filter(emitter.is_tile, carried) if loads_alone else carried)


def _phase_of(nodes: Sequence[Node], phases: Phases) -> int:
    """Return the first phase that has the values of a store: the second, or a later one.

    Triton moves no load before a store: so the first phase, which loads most, stores nothing.
    """
    return max(1, *map(phases.levels.__getitem__, nodes))


def _exchanged(reductions: Sequence[Sequence[Node]], emitter: Emitter) -> tuple[Node, ...]:
    """Return the sums that programs can exchange: those of the first phase, if no later has any."""
    if len(reductions) != 1 or emitter.grouped:
        return ()
    (nodes,) = reductions
    are_sums = all((node.op, node.kind) == ("sum", "float") for node in nodes)
    return tuple(nodes) if are_sums and len(nodes) <= _MOST_EXCHANGED else ()


# --- a program ------------------------------------------------------------------------------------

# The values along columns of each store, one or two, with the function that emits it.
Stores = Sequence[tuple[tuple[Node, ...], Callable[[], None]]]
# Values that are summed over rows, each with the input and the part whose gradient the sum is.
Sums = Sequence[tuple[int, Part, Node]]

# COLUMNS programs share a row, with the same number of tiles each. The first EXACT tiles of every
# program have no column beyond the row's last. In a program that has the whole row, these are all
# the tiles that the row fills. In programs that share one they are all or none, because all of
# these programs run the same code.
_PROGRAM = (
    "COLUMNS: tl.constexpr = (N + PARTS * BLOCK_N - 1) // (PARTS * BLOCK_N)",
    "EXACT: tl.constexpr = (",
    "    N // BLOCK_N if COLUMNS == 1 else PARTS if COLUMNS * PARTS * BLOCK_N == N else 0",
    ")",
)
# Registers hold either vectors for all rows, or two sums of more than 8192 columns. With such sums,
# parameters are loaded again for each row. On an H200 in bf16, LayerNorm of 11008 columns, forward
# and backward: 116.8 us with programs that share rows, 95.5 us with this. For narrower rows the
# additional loads gain nothing.
_HOLDS = "HOLDS: tl.constexpr = SUMS < 2 or PARTS * BLOCK_N <= 8192"
_ROW_LOOP = (
    "tiles = tl.cdiv(M, ROWS).to(tl.int32)",
    "for step in tl.range(program, tiles, programs, num_stages=STAGES):",
)
# Rows of a backward go from the last to the first: the cache still holds those that were written
# last.
_TILE = "tile = tiles - 1 - step"
_TILES = {"forward": "tile = step", "backward": _TILE}
# The rows of a tile whose index may be out of range. In the additional step of `_SHARED_ROW_LOOP`
# it is negative. In the first step ``tile + ahead``, the tile before it, is beyond the last.
_SHARED_ROWS = (
    "places = rows_of(tile, ROWS)",
    "in_rows = ((places >= 0) & (places < M))[:, None]",
    "rows = places[:, None]",
)
# The elements of the buffer for two sums of a row: see `core.exchange`.
_WORDS = 'WORDS: tl.constexpr = 1 if EXCHANGE == "wait" else 2'
# Programs that post end before others read.
_UNLESS_POSTING = 'if EXCHANGE != "post":'
# A program that waits has one more step: it finishes a tile after it has posted the sums of the
# next.
_SHARED_ROW_LOOP = (
    "tiles = tl.cdiv(M, ROWS).to(tl.int32)",
    "for step in tl.range(program, tiles + ahead, programs, num_stages=STAGES):",
)


def held_body(
    emitter: Emitter,
    phases: Phases,
    stores: Stores,
    sums: Sums,
    results: Sequence[Node],
    *,
    direction: str,
) -> list[str]:
    """Return the lines of a kernel whose programs hold rows in registers.

    Args:
        emitter: the emitter of the kernel.
        phases: the phases of all values.
        stores: the stores of values along columns.
        sums: the values that are summed over rows.
        results: all values that are stored.
        direction: "forward" or "backward".
    """
    # With a loop over tiles of rows, vectors are computed before it. But a reduction of a vector
    # takes a phase, and phases are in the loop. So if there is one, vectors are in the loop too.
    reduced = itertools.chain(*phases.reductions)
    sliced = bool(emitter.addresses.sliced)
    loops = bool(sums or phases.exchanged or sliced)
    emitter.flat = not (loops and all(map(emitter.has_rows, reduced)))
    totals = row_sums(
        emitter, sums, exchanges=bool(phases.exchanged), keeps_rows=not phases.reductions
    )
    tile = _emit_tile(emitter, phases, stores, totals, results)
    body = []
    if not sliced:  # else the programs and EXACT are arguments
        body = [*_PROGRAM, *program_lines(shares=not emitter.grouped)]
    is_whole = sliced or emitter.grouped
    body.append("first = 0" if is_whole else "first = column * (PARTS * BLOCK_N)")
    if not emitter.flat:
        body += [f"SUMS: tl.constexpr = {len(sums)}", _HOLDS]
    if emitter.grouped:
        body += GROUP_LINES
    body += emitter.invariant
    body += _vector_lines(emitter)
    body += itertools.chain(*[total.begin() for total in totals])
    if phases.exchanged:
        rows = [*_SHARED_ROWS, *emitter.addresses.indices()]
        lines = [_TILE, *rows, *_exchange(emitter, phases, tile, rows)]
        early = 'EARLY: tl.constexpr = PARTS == 1 and EXCHANGE == "none"'
        body += [_WORDS, early, *_late_tiles(emitter, phases, tile.numbers)]
        body += [*_SHARED_ROW_LOOP, *indented(lines)]
        return [*body, _UNLESS_POSTING, *indented(_sums(emitter, sums, totals) or ["pass"])]
    if phases.masks:
        body.append("EARLY: tl.constexpr = PARTS == 1")
    rows = emitter.addresses.row_lines()
    if loops:
        lines = [_TILES[direction], *rows, *tile.first]
        return [*body, *_ROW_LOOP, *indented(lines), *_sums(emitter, sums, totals)]
    return [*body, "tile = program", *rows, *tile.first]


def _vector_lines(emitter: Emitter) -> list[str]:
    """Return the loop that computes tiles of vectors; the next vectors begin another loop."""
    lines = _loop_over_parts(emitter, emitter.vector_tuples, emitter.vectors)
    emitter.begin_vectors()
    return lines


def _has_early_vectors(emitter: Emitter, phases: Phases) -> bool:
    """Whether a program loads vectors before the reductions, although it needs them only later.

    With two tensors of rows the loads take long enough that vectors arrive meanwhile. With one
    tensor the vectors would only take registers. They would also cause spills where rows and
    vectors take more than three quarters of a multiprocessor's 65,536 registers.
    """
    structure = emitter.structure
    if len(emitter.read) < 2 * structure.parts_of_row or not phases.reductions:
        return False
    if emitter.addresses.sliced:  # the answer must be the same for all lengths
        return False
    nodes = list(itertools.filterfalse(emitter.has_rows, emitter.tiles))
    computed = filter(lambda node: node.op != "const", reachable(nodes))
    # A number of a group, such as the sum of its vector, is computed later.
    if not all(map(emitter.has_columns, computed)):
        return False
    taken = emitter.acc.itemsize + sum(map(emitter.itemsize_of, nodes))
    return structure.cols * structure.parts_of_row * taken <= 3 * 65536


def _sums(emitter: Emitter, sums: Sums, totals: Sequence[RowSum]) -> list[str]:
    """Return the lines that store the sums over rows of a program."""
    if not sums:
        return []
    slots = [(index, part) for index, part, _ in sums]
    ends = itertools.chain(*[total.end() for total in totals])
    lines = [partial_row_line(emitter.grouped), *ends]
    stores = stores_of_sums(emitter.addresses, slots, "[part]")
    return [*lines, *_loop_over_parts(emitter, (), stores)]


def _loop_over_parts(emitter: Emitter, tuples: Sequence[str], body: Sequence[str]) -> list[str]:
    """Return lines that empty tuples, and a loop over the tiles of a row; [] for no body."""
    if not body:
        return []
    lines = [f"{tiles} = ()" for tiles in tuples]
    loop, *first_lines = _part_loop(emitter)
    return [*lines, loop, *indented([*first_lines, *body])]


def _part_loop(emitter: Emitter) -> list[str]:
    """Return the lines that begin a loop over the tiles of a row."""
    return [_PART_LOOP, _PART_START, *emitter.column_lines(_INSIDE_PART)]


# --- programs that share rows ---------------------------------------------------------------------


def _late_tiles(emitter: Emitter, phases: Phases, numbers: Sequence[str]) -> list[str]:
    """Return the lines that set the ``late_...`` variables to zeros, for the first step."""
    lines = ["ahead = programs"]
    lines += [f"late_{name} = tl.zeros((ROWS, 1), ACC)" for name in numbers]
    for node in _in_order(phases.carried):
        tiles = f"late_{emitter.tiles[node]}"
        block = emitter.structure.block
        columns = f"BLOCK_N // {block}" if emitter.has_blocks(node) else "BLOCK_N"
        zeros = f"tl.zeros((ROWS, {columns}), {emitter.pointer_of(node)}.dtype.element_ty)"
        lines += [f"{tiles} = ()", "for part in tl.static_range(PARTS):"]
        lines.append(f"    {tiles} = {tiles} + ({zeros},)")
    return ["ahead = 0", 'if EXCHANGE == "wait":', *indented(lines)]


def _exchange(emitter: Emitter, phases: Phases, tile: _Tile, rows: Sequence[str]) -> list[str]:
    """Return the lines of a tile of rows that programs share.

    They compute the sums of this program's columns, and post them. With "wait" they then go on with
    the rows of the step before, whose sums the other programs have posted meanwhile.
    """
    moments = emitter.addresses.argument("exchange", 0, "moments")
    lines = list(tile.first)
    post: list[str] = []
    collect: list[str] = []
    for number, names in enumerate(_pairs(tile.sums)):
        address = f"{moments} + {number} * WORDS * COLUMNS * M" if number else moments
        lines.append(_sum_of_columns(names))
        is_pair = len(names) == 2
        posted = f"{address}, {names[0]}, {names[-1]}, column, places, M"
        post.append(f"post_sums({posted}, {is_pair}, EXCHANGE)")
        collected = f"collect_sums({address}, places, M, {is_pair}, EXCHANGE, COLUMNS)"
        first, second = (*names, "_")[:2]
        collect.append(f"{first}, {second} = {collected}")
    swap = ["tile += ahead", *rows]
    tiles = map(emitter.tiles.__getitem__, _in_order(phases.carried))
    for name in (*tiles, *tile.numbers):
        swap.insert(0, f"{name}, late_{name} = late_{name}, {name}")
    return [
        *lines,
        'if EXCHANGE == "wait" or EXCHANGE == "post":',
        *indented(post),
        'if EXCHANGE == "wait":',
        *indented(swap),
        'if EXCHANGE == "wait" or EXCHANGE == "read":',
        *indented(collect),
        *[f"{name} = {name}[:, None]" for name in tile.sums],
        _UNLESS_POSTING,
        *indented(tile.last),
    ]


def _sum_of_columns(names: Sequence[str]) -> str:
    """Return the line that sums one or two tiles over their columns."""
    if len(names) == 1:
        return f"{names[0]} = tl.sum({names[0]}, axis=1)"
    both = ", ".join(names)
    return f'{both} = sums_of_both({both}, EXCHANGE == "none")'


def _pairs(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[first : first + 2] for first in range(0, len(names), 2)]


# --- a tile of rows -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tile:
    """The lines of a tile of rows.

    Attributes:
        first: the lines before programs exchange sums; all lines if they do not.
        sums: the variables of the sums that they exchange.
        numbers: the variables with one number for each row, which are read before the exchange
            and needed after it.
        last: the lines after the exchange.
    """

    first: list[str]
    sums: list[str]
    numbers: list[str]
    last: list[str]


def _emit_tile(
    emitter: Emitter,
    phases: Phases,
    stores: Stores,
    totals: Sequence[RowSum],
    results: Sequence[Node],
) -> _Tile:
    """Emit the phases of a tile of rows."""
    emitter.carried = phases.carried
    numbers = {node: emitter.value(node) for node in phases.numbers}
    first: list[str] = []
    exchanged: list[str] = []
    before_reductions = 0  # the index of the first line of the reductions
    last = len(phases.all_reductions) - 1
    for phase, reductions in enumerate(phases.all_reductions):
        emitter.open_columns(full=False)
        emitter.holds_vectors = phase > 0 or not emitter.flat
        if phase == 0:
            _emit_first(emitter, phases)
        accumulators = {node: _accumulate(emitter, node) for node in reductions}
        if phase:
            _store(emitter, phases, stores, phase)
        if phase == last:
            add_columns(totals)
        _insert_vectors(emitter, phases, before_reductions)
        _close(emitter)
        if phase == 0:
            emitter.open_columns(full=False)
            _store(emitter, phases, stores, phase)
            _close(emitter)
            before_reductions = len(emitter.lines)
        if phases.exchanged and phase == 0:
            exchanged = list(accumulators.values())
            first, emitter.lines = emitter.lines, []
            emitter.forget_rows()
            emitter.named |= numbers
        else:
            _reduce(emitter, accumulators)
        for node, name in accumulators.items():
            emitter.define(node, name)
    for node in results:
        if not emitter.has_columns(node):
            emitter.value(node)
    for total in totals:
        emitter.lines += total.add_rows()
    if phases.exchanged:
        return _Tile(first, exchanged, list(numbers.values()), emitter.lines)
    return _Tile(emitter.lines, [], [], [])


def _close(emitter: Emitter) -> None:
    """End the loop of a phase over the tiles of a row."""
    if emitter.body:
        emitter.close_columns(*_part_loop(emitter), MASK)
    emitter.body = None


def _insert_vectors(emitter: Emitter, phases: Phases, before_reductions: int) -> None:
    """Insert the loop that loads a phase's vectors, unless it is before the loop over all rows.

    It is just before the phase, or, at the line ``before_reductions``, before all reductions.
    """
    if emitter.flat:
        position = len(emitter.lines)
        if _has_early_vectors(emitter, phases):
            position = before_reductions
        emitter.lines[position:position] = _vector_lines(emitter)


def _reduce(emitter: Emitter, accumulators: Mapping[Node, str]) -> None:
    """Emit the reductions that end a phase."""
    for node, name in accumulators.items():
        emitter.lines.append(f"{name} = {emitter.reduced(node, name)}")


def _phase_of_store(nodes: Sequence[Node], phases: Phases) -> int:
    """Return the phase in whose loop values are stored.

    It is 0 for values that need no reduction. They are stored in a separate loop, after the loop of
    phase 0, which loads all rows, and before the reductions of phase 0. But programs that exchange
    sums go on with other rows there, so they store in the last phase.
    """
    needs_none = not any(map(phases.levels.__getitem__, nodes))
    if needs_none and phases.reductions and not phases.exchanged:
        return 0
    return _phase_of(nodes, phases)


def _store(emitter: Emitter, phases: Phases, stores: Stores, phase: int) -> None:
    """Emit the stores of a phase."""
    for nodes, store in stores:
        if _phase_of_store(nodes, phases) == phase:
            for node in nodes:
                emitter.value(node)
            store()


def _emit_first(emitter: Emitter, phases: Phases) -> None:
    """Emit what the first phase loads for later ones, and masks where EARLY is set.

    EARLY is for a row in one tile: its mask is drawn while the row is loaded. The masks of several
    tiles would take too many registers, and are drawn one by one.
    """
    body = emitter.body
    assert body is not None
    for node in phases.loads:
        emitter.value(node)
    for node in phases.masks:
        body += ["if EARLY:", f"    {emitter.early_mask(node)}"]


def _accumulate(emitter: Emitter, node: Node) -> str:
    """Emit the lines that reduce the tiles of a row, lane by lane, and return their variable."""
    term = emitter.reducible(node)
    body = emitter.body
    assert body is not None
    is_maximum = node.op == "amax"
    name = emitter.names.free("largest" if is_maximum else "total")
    following = maximum(name, term) if is_maximum else f"{name} + {term}"
    body += ["if part == 0:", f"    {name} = {term}", "else:", f"    {name} = {following}"]
    return name
