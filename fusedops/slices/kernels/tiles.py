"""Device functions of the slices' forward and backward: slots, addresses, loads and stores."""

import triton
import triton.language as tl


# Six slices in groups of four slots. If all slices have one width, a slot has the index of its
# slice; else the table has an entry for the slot, with its slice:
#
#     slices   |  0  |  1  |  2  |  3  |  4  |  5  |     |     |
#     groups   |        group 0        |        group 1        |
#
#     table    | tile of each group | first slot of each | number, column, width of each slot |
#     from     0                    GROUPS               2 * GROUPS
@triton.jit
def _slots(
    table, group, K, GROUPS: tl.constexpr, S: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr
):
    """Returns for each slot of a group: number, first column and width of its slice, taken, own.

    ``taken`` is whether the slot has a slice, and ``own`` whether it stores the slice. A slot
    beyond the slices of its group repeats the last one and stores nothing: the table has the
    complement of the slice's number.
    """
    if table is None:
        slots = group * S + tl.arange(0, S)
        number = slots
        column = slots * D
        width = tl.full((S,), D, tl.int32)
        # The last group may have fewer slices than slots.
        taken = slots < K
        own = taken
    else:
        entries = table + 2 * GROUPS + 3 * (tl.load(table + GROUPS + group) + tl.arange(0, S))
        number = tl.load(entries)
        column = tl.load(entries + 1)
        width = tl.load(entries + 2)
        if ALIGN > 1:
            column = tl.multiple_of(column, ALIGN)
            width = tl.multiple_of(width, ALIGN)
        taken = width > 0
        own = number >= 0
        number = tl.where(own, number, -1 - number)
    return number, column, width, taken, own


# The rows of two slices, a and b, can be in memory as follows. ``start`` is the address of row 0
# and ``distance`` that from row to row:
#
#     one tensor    | a, row 0 | b, row 0 |    start: the tensor; distance: its row stride;
#                   | a, row 1 | b, row 1 |    the slice's column is added to the offsets
#                   ...
#     APART         | a, row 0 | a, row 1 | ... | b, row 0 | b, row 1 | ...
#                                              start of b: M times the columns before it
#     addresses     a and b are tensors: the table has the start of each, and perhaps the distance
@triton.jit
def _place(
    tensor,
    addresses,
    slots,
    stride,
    lanes,
    K,
    M,
    DTYPE: tl.constexpr,
    APART: tl.constexpr,
    STRIDED: tl.constexpr,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Returns where a group's rows are: start, distance between rows, and offsets within a tile.

    The rows are in one tensor, ``stride`` units from row to row; with ``APART`` in a buffer that
    holds the rows of one slice after those of another; or at the addresses of a table, which also
    has the distances if ``STRIDED``. The offsets are the same for all tiles, so they are computed
    once, in the narrow dtype ``INDEX``. For each tile only one product is added: see `_at`.
    """
    number, column, width, taken, _ = slots
    rows = tl.arange(0, ROWS)[None, :, None]
    if addresses is None and not APART:
        distance = stride * ALIGN if ALIGN > 1 else stride
        # An offset in int64 would take two registers. ``INDEX`` is int32, unless the distance
        # between rows is too large.
        local = column.to(INDEX)[:, None, None] + rows * distance.to(INDEX) + lanes[None, None, :]
        return tensor, distance, local
    else:
        if addresses is not None:
            start = tl.load(addresses + number, mask=taken, other=0).to(tl.pointer_type(DTYPE))
            if ALIGN > 0:
                start = tl.multiple_of(start, 16)
        else:
            start = tensor + M * column.to(tl.int64)
        if STRIDED and addresses is not None:
            distance = tl.load(addresses + K + number, mask=taken, other=0)
            if ALIGN > 1:
                distance = tl.multiple_of(distance, ALIGN)
        elif D > 0:
            distance = tl.full((1,), D, tl.int64)
        else:
            distance = width.to(tl.int64)
        distance = distance[:, None, None]
        local = rows * distance.to(INDEX) + lanes[None, None, :]
        return start[:, None, None], distance, local


@triton.jit
def _at(place, first_row):
    """Returns the addresses of the tile whose first row is ``first_row``."""
    start, distance, local = place
    return start + first_row * distance + local


@triton.jit
def _inside(slots, lanes, LANES: tl.constexpr, PARTS: tl.constexpr, FULL: tl.constexpr):
    """Returns for each part the mask ``(slots, lanes)`` of the lanes that hold features."""
    parts = ()
    for part in tl.static_range(PARTS):
        # The comparison is always true; it gives the mask its shape.
        inside = slots[4][:, None] & (lanes >= 0)[None, :]
        if part >= FULL:
            inside &= (part * LANES + lanes)[None, :] < slots[2][:, None]
        parts = parts + (inside,)
    return parts


@triton.jit
def _load_parameter(
    vector,
    slots,
    lanes,
    inside,
    SHARED: tl.constexpr,
    ACC: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Returns a parameter for each slot as a tuple of parts; an empty tuple if it is absent."""
    parts = ()
    if vector is not None:
        column = slots[1]
        for part in tl.static_range(PARTS):
            cols = (column * 0 if SHARED else column)[:, None] + part * LANES + lanes[None, :]
            parts = parts + (
                tl.load(vector + cols, mask=inside[part], other=0.0).to(ACC)[:, None, :],
            )
    return parts


@triton.jit
def _per_width(slots, ACC: tl.constexpr):
    """Returns the reciprocals of the widths, which turn sums over lanes into means."""
    return 1.0 / tl.maximum(slots[2], 1).to(ACC)[:, None]


@triton.jit
def _place_of_rows(tile, own, M, ROWS: tl.constexpr):
    """Returns the first row of a tile, and a mask ``(slots, rows)`` of the rows to process."""
    first_row = tl.cast(tile, tl.int64) * ROWS
    in_rows = tl.arange(0, ROWS) < M - first_row
    return first_row, own[:, None] & in_rows[None, :]


@triton.jit
def _mask(in_rows, inside, FULL: tl.constexpr, WHOLE: tl.constexpr):
    """Returns the mask of a part's elements.

    With ``WHOLE`` rows and slots need no mask, and with ``FULL`` lanes need none.
    """
    if WHOLE:
        return inside[:, None, :]
    elif FULL:
        return in_rows[:, :, None]
    else:
        return in_rows[:, :, None] & inside[:, None, :]


# Loads have no mask where all lanes and rows exist: where elements are loaded one by one, masks and
# addresses were a fourth of the loop's instructions (sm_90, widths without a common factor).
@triton.jit
def _load(
    place,
    first_row,
    in_rows,
    inside,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    FULL: tl.constexpr,
    WHOLE: tl.constexpr,
):
    parts = ()
    for part in tl.static_range(PARTS):
        at = _at(place, first_row) + part * LANES
        if WHOLE and part < FULL:
            parts = parts + (tl.load(at),)
        else:
            parts = parts + (
                tl.load(at, mask=_mask(in_rows, inside[part], part < FULL, WHOLE), other=0.0),
            )
    return parts


@triton.jit
def _store(
    place,
    first_row,
    in_rows,
    inside,
    part: tl.constexpr,
    value,
    LANES: tl.constexpr,
    FULL: tl.constexpr,
    WHOLE: tl.constexpr,
):
    at = _at(place, first_row) + part * LANES
    if WHOLE and part < FULL:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=_mask(in_rows, inside[part], part < FULL, WHOLE))


@triton.jit
def _mean(parts, per_width, ACC: tl.constexpr, PARTS: tl.constexpr):
    terms = parts[0].to(ACC)
    for part in tl.static_range(1, PARTS):
        terms += parts[part].to(ACC)
    return tl.sum(terms, axis=2) * per_width


# Statistics are in ``ACC``, fp32 or fp64. The squares are centred: ``E[x²] - E[x]²`` would cancel
# where a row's mean is large compared with its deviation. The row is in registers, so the second
# pass over it reads no memory.
@triton.jit
def _standardize(
    rows,
    in_rows,
    inside,
    per_width,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
    PARTS: tl.constexpr,
    FULL: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Returns the standardized rows, zero in idle lanes, and their reciprocal deviations.

    Idle lanes are set to zero before they are squared: after the subtraction they hold minus the
    mean, which would count.
    """
    mean = _mean(rows, per_width, ACC, PARTS)[:, :, None]
    centred, squares = (), ()
    for part in tl.static_range(PARTS):
        x = rows[part].to(ACC) - mean
        if part >= FULL:
            x = tl.where(inside[part][:, None, :], x, 0.0)
        centred = centred + (x,)
        squares = squares + (x * x,)
    rstd = tl.rsqrt(_mean(squares, per_width, ACC, PARTS) + EPS)
    if not WHOLE:
        # Rows that do not exist are zeros. With an eps of 0 their rstd would be infinite, and its
        # product with zero a NaN in the sums over rows.
        rstd = tl.where(in_rows, rstd, 0.0)
    hats = ()
    for part in tl.static_range(PARTS):
        hats = hats + (centred[part] * rstd[:, :, None],)
    return hats, rstd


@triton.jit
def _affine(hat, ws, bs, part: tl.constexpr):
    if len(ws) > 0:
        hat = hat * ws[part]
    if len(bs) > 0:
        hat = hat + bs[part]
    return hat
