"""Kernels that add up the gradients of looked-up rows to those of tables: see `tables`.

A unit is a part of a table's columns. For each unit, `units` has seven numbers: the index of the
table, the part, the table's columns, the columns of the tables before it in ``grads``, the position
of its gradient in ``out``, the number of its first row among the rows of all tables, and the number
of the row that gets no gradient, or -1. Columns and positions are in units of ALIGN.
"""

import triton
import triton.language as tl

from ...core.device import await_predecessor, place_along_rows, rows_of

# The numbers of a unit.
UNIT = tl.constexpr(7)


@triton.jit(do_not_specialize=["M"])
def key_lookups_kernel(
    keys,
    addresses,
    tables,
    M,
    INDEX: tl.constexpr,
    TABLES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the key of each lookup: the number of its row among the rows of all tables.

    Axis 0 of the grid is tables, and axis 1 is tiles of a table's M lookups. ``tables`` has the
    first number of each table, and then its rows. ``addresses`` has the address of each index, and
    then its stride.
    """
    await_predecessor(OVERLAP)
    table = tl.program_id(0)
    tile, _ = place_along_rows()
    lookups = rows_of(tile, BLOCK_N)
    exist = lookups < M
    index = tl.load(addresses + table).to(tl.pointer_type(INDEX))
    stride = tl.load(addresses + TABLES + table)
    first = tl.load(tables + table)
    limit = tl.load(tables + TABLES + table)
    row = tl.load(index + lookups * stride, mask=exist, other=0).to(tl.int64)
    # The forward has asserted that indices are in range.
    row = tl.where((row >= 0) & (row < limit), row, 0)
    key = (first + row).to(keys.dtype.element_ty)
    tl.store(keys + table * M + lookups, key, mask=exist)


@triton.jit
def _keys_at(keys, places, M):
    """Return a table's sorted keys at these places; -1, which is no key, for places outside."""
    return tl.load(keys + places, mask=(places >= 0) & (places < M), other=-1)


@triton.jit
def _load_rows(grads, lookups, exist, width, cols, ACC: tl.constexpr):
    """Return the gradients of these lookups' rows, zeros for those that do not exist."""
    offsets = lookups[:, None] * width + cols[None, :]
    mask = exist[:, None] & (cols < width)[None, :]
    return tl.load(grads + offsets, mask=mask, other=0.0).to(ACC)


@triton.jit
def _store_rows(out, rows, stored, width, cols, total):
    """Store the sums of complete runs to the gradients of their rows."""
    offsets = rows[:, None] * width + cols[None, :]
    mask = stored[:, None] & (cols < width)[None, :]
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "chunks"])
def sum_runs_kernel(
    grads,
    keys,
    order,
    units,
    out,
    partials,
    M,
    chunks,
    ALIGN: tl.constexpr,
    LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACC: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add up the runs of equal keys within chunks of LENGTH lookups of one table.

    Axis 0 of the grid is units. A program has ROWS chunks, one in each row of its tile, and walks
    through all of them at once. The sum of a run within a chunk is stored to the gradient. Those of
    a run that crosses borders are stored to ``partials``, ``(units, chunks, 2, BLOCK_N)``:

        keys        a a b b | b b b b | b b c c | d ...
        partials        [1]       [0]   [0]
    """
    await_predecessor(OVERLAP)
    unit = tl.program_id(0).to(tl.int64)
    numbers = units + unit * UNIT
    begin = tl.load(numbers) * M
    cols = tl.load(numbers + 1) * BLOCK_N + tl.arange(0, BLOCK_N)
    width = tl.load(numbers + 2) * ALIGN
    grads += tl.load(numbers + 3) * ALIGN * M
    out += tl.load(numbers + 4) * ALIGN
    first_key = tl.load(numbers + 5)
    padding = tl.load(numbers + 6)
    keys += begin
    order += begin

    group, _ = place_along_rows()
    chunk = rows_of(group, ROWS)
    start = chunk * LENGTH
    end = tl.minimum(start + LENGTH, M)
    lanes = chunk * 2 * BLOCK_N
    partials += unit * chunks * 2 * BLOCK_N
    partial = lanes[:, None] + tl.arange(0, BLOCK_N)[None, :]

    # Loads are ahead of their use: keys and lookups by two steps, rows by one.
    key = _keys_at(keys, start, M)
    next_key = _keys_at(keys, start + 1, M)
    # Whether the run began in an earlier chunk.
    is_inherited = _keys_at(keys, start - 1, M) == key
    lookup = tl.load(order + start, mask=start < end, other=begin) - begin
    next_lookup = tl.load(order + start + 1, mask=start + 1 < end, other=begin) - begin
    row = _load_rows(grads, lookup, start < end, width, cols, ACC)
    total = tl.zeros((ROWS, BLOCK_N), ACC)
    goes_on = key < -1
    for i in range(LENGTH):
        place = start + i
        second_key = _keys_at(keys, place + 2, M)
        second_lookup = tl.load(order + place + 2, mask=place + 2 < end, other=begin) - begin
        next_row = _load_rows(grads, next_lookup, place + 1 < end, width, cols, ACC)
        total += row
        exists = place < end
        ends = exists & (next_key != key)
        stored = ends & (key != padding) & (is_inherited == 0)
        _store_rows(out, key.to(tl.int64) - first_key, stored, width, cols, total)
        tl.store(partials + partial, total, mask=(ends & is_inherited)[:, None])
        goes_on = exists & (next_key == key)
        is_inherited = is_inherited & goes_on
        total = tl.where(goes_on[:, None], total, 0.0)
        key = next_key
        next_key = second_key
        next_lookup = second_lookup
        row = next_row
    # The last run goes on in the next chunk.
    slot = tl.where(is_inherited, 0, BLOCK_N)
    tl.store(partials + partial + slot[:, None], total, mask=goes_on[:, None])


@triton.jit(do_not_specialize=["M", "chunks"])
def sum_crossing_runs_kernel(
    keys,
    units,
    out,
    partials,
    M,
    chunks,
    ALIGN: tl.constexpr,
    LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACC: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add up the partial sums of the runs that cross borders of chunks, in the order of chunks.

    Axis 0 of the grid is units, and axis 1 is chunks. A run is stored by the program of the chunk
    in which it begins. Row i of the tile adds up the chunks i, i + ROWS, ... after that one.
    """
    await_predecessor(OVERLAP)
    unit = tl.program_id(0).to(tl.int64)
    numbers = units + unit * UNIT
    keys += tl.load(numbers) * M
    place, _ = place_along_rows()
    chunk = place.to(tl.int64)
    start = chunk * LENGTH
    end = start + LENGTH
    key = _keys_at(keys, end - 1, M)
    goes_on = (key >= 0) & (_keys_at(keys, end, M) == key)
    begins_here = _keys_at(keys, start - 1, M) != key
    if goes_on & begins_here & (key != tl.load(numbers + 6)):
        lanes = tl.arange(0, BLOCK_N)
        partials += unit * chunks * 2 * BLOCK_N
        sums = tl.zeros((ROWS, BLOCK_N), ACC)
        first = chunk + 1
        while goes_on:
            others = first + tl.arange(0, ROWS)
            same = _keys_at(keys, others * LENGTH, M) == key
            offsets = others[:, None] * 2 * BLOCK_N + lanes[None, :]
            sums += tl.load(partials + offsets, mask=same[:, None], other=0.0)
            first += ROWS
            goes_on = _keys_at(keys, first * LENGTH, M) == key
        total = tl.load(partials + chunk * 2 * BLOCK_N + BLOCK_N + lanes) + tl.sum(sums, axis=0)
        cols = tl.load(numbers + 1) * BLOCK_N + lanes
        width = tl.load(numbers + 2) * ALIGN
        offset = tl.load(numbers + 4) * ALIGN + (key.to(tl.int64) - tl.load(numbers + 5)) * width
        tl.store(out + offset + cols, total.to(out.dtype.element_ty), mask=cols < width)
