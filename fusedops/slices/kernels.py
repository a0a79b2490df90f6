"""The slices family's kernels: one forward and one backward for all slices, and the table of their addresses.

A tile is ``(slots, rows, lanes)``: a slot holds one slice's rows, a row as many lanes as the next power of two of the
slice's width. Slots of one tile belong to one *width class*, that power of two; ``CLASSES`` holds for each class, four
bits each, one plus the logarithm of its number of slots, zero where the class does not occur. Axis 1 of the grid is
the *group*: as many slices as a tile has slots.

Absence is the flag: a pointer that is None takes its instructions with it. Slices that are tensors of their own come
as a table of int64 addresses; widths that differ as a table of int32: for each group its class and its first slot, and
then for each slot the number of its slice, its first column and its width, zero for none. ``total`` is the sum of the
widths. ``ALIGN`` is 0, or else all addresses are multiples of 16 bytes, and all columns, widths and distances between
rows of so many elements. The arguments ``total`` and ``…_pitch``, a distance between rows, count in these units: what
is multiplied by a constant is known to the compiler as its multiple.
"""

import triton
import triton.language as tl

from ..core.device import await_predecessor, rows_of

# Classes from 1 to 8192 lanes.
_POWERS = tl.constexpr(14)


@triton.jit
def _slots(table, group, K, S: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr):
    """For each of a group's slots its slice's number, first column and width, and whether there is such a slice."""
    if table is None:
        slots = group * S + tl.arange(0, S)
        number = slots
        column = slots.to(tl.int64) * D
        width = tl.full((S,), D, tl.int32)
        taken = slots < K
    else:
        groups = tl.num_programs(1)
        entries = table + 2 * groups + 3 * (tl.load(table + groups + group) + tl.arange(0, S))
        number = tl.load(entries)
        column = tl.load(entries + 1).to(tl.int64)
        width = tl.load(entries + 2)
        if ALIGN > 1:
            column = tl.multiple_of(column, ALIGN)
            width = tl.multiple_of(width, ALIGN)
        taken = width > 0
    return number, column, width, taken


@triton.jit
def _starts(tensor, addresses, slots, pitch, K, M, DTYPE: tl.constexpr, APART: tl.constexpr, STRIDED: tl.constexpr,
            ALIGN: tl.constexpr):  # fmt: skip
    """Where each slot's first row begins, and how far apart its rows are.

    In one tensor, ``pitch`` units apart; with ``APART`` in a buffer that holds one slice's rows after the other's; or where
    the table of addresses says, at the distances after them if ``STRIDED``.
    """
    number, column, width, taken = slots
    if addresses is not None:
        start = tl.load(addresses + number, mask=taken, other=0).to(tl.pointer_type(DTYPE))
        if ALIGN > 0:
            start = tl.multiple_of(start, 16)
        if STRIDED:
            apart = tl.load(addresses + K + number, mask=taken, other=0)
            if ALIGN > 1:
                apart = tl.multiple_of(apart, ALIGN)
        else:
            apart = width.to(tl.int64)
    elif APART:
        start = tensor + M * column
        apart = width.to(tl.int64)
    else:
        start = tensor + column
        apart = tl.full(column.shape, pitch * ALIGN if ALIGN > 1 else pitch, tl.int64)
    return start, apart


@triton.jit
def _at(starts, rows, lanes):
    """The addresses of a tile."""
    start, apart = starts
    return start[:, None, None] + (rows[None, :] * apart[:, None])[:, :, None] + lanes[None, None, :]


@triton.jit
def _inside(slots, lanes, PADDED: tl.constexpr):
    """Which lanes of which slots hold features."""
    width = slots[2]
    inside = slots[3][:, None] & (lanes >= 0)[None, :]
    if PADDED:
        inside &= lanes[None, :] < width[:, None]
    return inside


@triton.jit
def _load_parameter(vector, slots, lanes, inside, SHARED: tl.constexpr, ACC: tl.constexpr):
    """Each slot's own part of a parameter, or the one that they share; None where it is absent."""
    if vector is not None:
        column = slots[1]
        cols = (column * 0 if SHARED else column)[:, None] + lanes[None, :]
        return tl.load(vector + cols, mask=inside, other=0.0).to(ACC)[:, None, :]


@triton.jit
def _per_width(slots, ACC: tl.constexpr):
    """What a sum over a slice's lanes is multiplied by to be their mean."""
    return 1.0 / slots[2].to(ACC)[:, None]


@triton.jit
def _standardize(x, in_rows, inside, per_width, EPS: tl.constexpr, PADDED: tl.constexpr):
    """Rows with mean and scale taken out, and the reciprocal of that scale; zeros outside, whatever eps is."""
    mean = tl.sum(x, axis=2) * per_width
    x = x - mean[:, :, None]
    if PADDED:
        x = tl.where(inside[:, None, :], x, 0.0)
    rstd = tl.where(in_rows, tl.rsqrt(tl.sum(x * x, axis=2) * per_width + EPS), 0.0)
    return x * rstd[:, :, None], rstd


@triton.jit
def _affine(hat, w, b):
    if w is not None:
        hat = hat * w
    if b is not None:
        hat = hat + b
    return hat


@triton.jit
def _forward_tile(x, y, w, b, tile, taken, inside, per_width, lanes, M, EPS: tl.constexpr, VALUE: tl.constexpr,
                  PADDED: tl.constexpr, ACC: tl.constexpr, Y: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    rows = rows_of(tile, ROWS)
    in_rows = taken[:, None] & (rows < M)[None, :]
    mask = in_rows[:, :, None] & inside[:, None, :]
    h = tl.load(_at(x, rows, lanes), mask=mask, other=0.0).to(ACC)
    hat, _ = _standardize(h, in_rows, inside, per_width, EPS, PADDED)
    tl.store(_at(y, rows, lanes), VALUE(_affine(hat, w, b)).to(Y), mask=mask)


@triton.jit
def _forward_group(x, x_addresses, table, weight, bias, y, x_pitch, total, group, K, M, POWER: tl.constexpr,
                   CLASSES: tl.constexpr, EPS: tl.constexpr, VALUE: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
                   D: tl.constexpr, SHARED: tl.constexpr, APART: tl.constexpr, STRIDED: tl.constexpr,
                   ALIGN: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
                   STAGES: tl.constexpr, PERSISTENT: tl.constexpr):  # fmt: skip
    """One group's rows: a tile, or ``PERSISTENT``, tiles in a loop that takes the next rows' loads ahead."""
    depth: tl.constexpr = ((CLASSES >> (4 * POWER)) & 15) - 1
    tile_rows: tl.constexpr = (BLOCK_N * ROWS + (1 << (depth + POWER)) - 1) >> (depth + POWER)
    padded: tl.constexpr = D != 1 << POWER
    lanes = tl.arange(0, 1 << POWER)
    slots = _slots(table, group, K, 1 << depth, D, ALIGN)
    x_starts = _starts(x, x_addresses, slots, x_pitch, K, M, X, False, STRIDED, ALIGN)
    y_starts = _starts(y, None, slots, total, K, M, Y, APART, False, ALIGN)
    inside = _inside(slots, lanes, padded)
    per_width = _per_width(slots, ACC)
    w = _load_parameter(weight, slots, lanes, inside, SHARED, ACC)
    b = _load_parameter(bias, slots, lanes, inside, SHARED, ACC)
    if PERSISTENT:
        tiles = tl.cdiv(M, tile_rows).to(tl.int32)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
            _forward_tile(x_starts, y_starts, w, b, tile, slots[3], inside, per_width, lanes, M, EPS, VALUE, padded,
                          ACC, Y, tile_rows)  # fmt: skip
    else:
        _forward_tile(x_starts, y_starts, w, b, tl.program_id(0), slots[3], inside, per_width, lanes, M, EPS, VALUE,
                      padded, ACC, Y, tile_rows)  # fmt: skip


@triton.jit(do_not_specialize=["x_pitch", "total", "K", "M"])
def slices_forward_kernel(
    x,
    x_addresses,
    table,
    weight,
    bias,
    y,
    x_pitch,
    total,
    K,
    M,
    EPS: tl.constexpr,
    VALUE: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
    CLASSES: tl.constexpr,
    SHARED: tl.constexpr,
    APART: tl.constexpr,
    STRIDED: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PERSISTENT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``y = VALUE(layer_norm(x))``, slice by slice: programs share the rows along axis 0, the slices along axis 1."""
    await_predecessor(OVERLAP)
    group = tl.program_id(1)
    for power in tl.static_range(_POWERS):
        if (CLASSES >> (4 * power)) & 15 > 0:
            if table is None:
                _forward_group(x, x_addresses, table, weight, bias, y, x_pitch, total, group, K, M, power, CLASSES, EPS,
                               VALUE, X, y.dtype.element_ty, D, SHARED, APART, STRIDED, ALIGN, ACC, BLOCK_N, ROWS,
                               STAGES, PERSISTENT)  # fmt: skip
            else:
                if tl.load(table + group) == power:
                    _forward_group(x, x_addresses, table, weight, bias, y, x_pitch, total, group, K, M, power, CLASSES,
                                   EPS, VALUE, X, y.dtype.element_ty, D, SHARED, APART, STRIDED, ALIGN, ACC, BLOCK_N,
                                   ROWS, STAGES, PERSISTENT)  # fmt: skip


@triton.jit
def _store_gradient(gradient, partials, value, slot, sums, slots, lanes, inside, total, D: tl.constexpr,
                    SHARED: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """A group's sums over its rows: the gradient itself where no other program has a part in it, else a part."""
    if SHARED:
        value = tl.sum(value, axis=0)
        in_width = lanes < D
        part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        if tl.num_programs(0) * tl.num_programs(1) == 1:
            tl.store(gradient + lanes, value.to(gradient.dtype.element_ty), mask=in_width)
        else:
            tl.store(partials + (part * sums + slot) * D + lanes, value, mask=in_width)
    else:
        cols = slots[1][:, None] + lanes[None, :]
        if tl.num_programs(0) == 1:
            tl.store(gradient + cols, value.to(gradient.dtype.element_ty), mask=inside)
        else:
            part = tl.program_id(0).to(tl.int64) * sums + slot
            tl.store(partials + part * (total * ALIGN if ALIGN > 1 else total) + cols, value, mask=inside)


@triton.jit
def _backward_group(dy, dy_addresses, x, x_addresses, table, weight, bias, dx, dweight, dbias, partials, dy_pitch,
                    x_pitch, total, group, K, M, POWER: tl.constexpr, CLASSES: tl.constexpr, EPS: tl.constexpr,
                    DERIVATIVE: tl.constexpr, DY: tl.constexpr, X: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr,
                    DY_APART: tl.constexpr, DX_APART: tl.constexpr, DY_STRIDED: tl.constexpr, STRIDED: tl.constexpr,
                    ALIGN: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
                    STAGES: tl.constexpr):  # fmt: skip
    """One group's gradients; the rows come from the last to the first: the L2 cache still holds what was made last."""
    depth: tl.constexpr = ((CLASSES >> (4 * POWER)) & 15) - 1
    tile_rows: tl.constexpr = (BLOCK_N * ROWS + (1 << (depth + POWER)) - 1) >> (depth + POWER)
    padded: tl.constexpr = D != 1 << POWER
    sums: tl.constexpr = (dweight is not None) + (dbias is not None)
    lanes = tl.arange(0, 1 << POWER)
    slots = _slots(table, group, K, 1 << depth, D, ALIGN)
    taken = slots[3]
    dy_starts = _starts(dy, dy_addresses, slots, dy_pitch, K, M, DY, DY_APART, DY_STRIDED, ALIGN)
    x_starts = _starts(x, x_addresses, slots, x_pitch, K, M, X, False, STRIDED, ALIGN)
    if dx is not None:
        dx_starts = _starts(dx, None, slots, total, K, M, X, DX_APART, False, ALIGN)
    inside = _inside(slots, lanes, padded)
    if dy_addresses is not None:
        # Address zero stands for an output that nothing came of: its gradient is zero.
        given = tl.load(dy_addresses + slots[0], mask=taken, other=0) != 0
    per_width = _per_width(slots, ACC)
    w = _load_parameter(weight, slots, lanes, inside, SHARED, ACC)
    b = _load_parameter(bias, slots, lanes, inside, SHARED, ACC)
    if dweight is not None:
        dweight_sum = tl.zeros((1 << depth, 1 << POWER), ACC)
    if dbias is not None:
        dbias_sum = tl.zeros((1 << depth, 1 << POWER), ACC)

    tiles = tl.cdiv(M, tile_rows).to(tl.int32)
    for step in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rows = rows_of(tiles - 1 - step, tile_rows)
        in_rows = taken[:, None] & (rows < M)[None, :]
        mask = in_rows[:, :, None] & inside[:, None, :]
        if dy_addresses is not None:
            g = tl.load(_at(dy_starts, rows, lanes), mask=mask & given[:, None, None], other=0.0).to(ACC)
        else:
            g = tl.load(_at(dy_starts, rows, lanes), mask=mask, other=0.0).to(ACC)
        h = tl.load(_at(x_starts, rows, lanes), mask=mask, other=0.0).to(ACC)
        hat, rstd = _standardize(h, in_rows, inside, per_width, EPS, padded)
        g *= DERIVATIVE(_affine(hat, w, b))
        if dweight is not None:
            dweight_sum += tl.sum(g * hat, axis=1)
        if dbias is not None:
            dbias_sum += tl.sum(g, axis=1)
        if dx is not None:
            if w is not None:
                g *= w
            along = tl.sum(g * hat, axis=2) * per_width
            mean = tl.sum(g, axis=2) * per_width
            out = (g - mean[:, :, None] - hat * along[:, :, None]) * rstd[:, :, None]
            tl.store(_at(dx_starts, rows, lanes), out.to(X), mask=mask)

    if dweight is not None:
        _store_gradient(dweight, partials, dweight_sum, 0, sums, slots, lanes, inside, total, D, SHARED, ALIGN)
    if dbias is not None:
        _store_gradient(dbias, partials, dbias_sum, sums - 1, sums, slots, lanes, inside, total, D, SHARED, ALIGN)


@triton.jit(do_not_specialize=["dy_pitch", "x_pitch", "total", "K", "M"])
def slices_backward_kernel(
    dy,
    dy_addresses,
    x,
    x_addresses,
    table,
    weight,
    bias,
    dx,
    dweight,
    dbias,
    partials,
    dy_pitch,
    x_pitch,
    total,
    K,
    M,
    EPS: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    DY: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
    CLASSES: tl.constexpr,
    SHARED: tl.constexpr,
    DY_APART: tl.constexpr,
    DX_APART: tl.constexpr,
    DY_STRIDED: tl.constexpr,
    STRIDED: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All gradients, slice by slice, from dy and x alone; programs share the rows along axis 0, the slices along 1.

    Mean and scale are taken from x again: its rows are in registers anyway. A program sums its rows' parameter
    gradients in registers and stores them once, and takes the next rows' loads ahead.
    """
    group = tl.program_id(1)
    for power in tl.static_range(_POWERS):
        if (CLASSES >> (4 * power)) & 15 > 0:
            if table is None:
                _backward_group(dy, dy_addresses, x, x_addresses, table, weight, bias, dx, dweight, dbias, partials,
                                dy_pitch, x_pitch, total, group, K, M, power, CLASSES, EPS, DERIVATIVE, DY, X, D,
                                SHARED, DY_APART, DX_APART, DY_STRIDED, STRIDED, ALIGN, ACC, BLOCK_N, ROWS,
                                STAGES)  # fmt: skip
            else:
                if tl.load(table + group) == power:
                    _backward_group(dy, dy_addresses, x, x_addresses, table, weight, bias, dx, dweight, dbias,
                                    partials, dy_pitch, x_pitch, total, group, K, M, power, CLASSES, EPS, DERIVATIVE,
                                    DY, X, D, SHARED, DY_APART, DX_APART, DY_STRIDED, STRIDED, ALIGN, ACC, BLOCK_N,
                                    ROWS, STAGES)  # fmt: skip


@triton.jit(do_not_specialize=[f"a{i}" for i in range(32)] + ["start", "count"])
def store_addresses_kernel(addresses, start, count, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14,
                           a15, a16, a17, a18, a19, a20, a21, a22, a23, a24, a25, a26, a27, a28, a29, a30,
                           a31):  # fmt: skip
    """``addresses[start + i] = a<i>`` for ``i < count``: a table that a graph's replay makes from its own arguments."""
    values = (a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16, a17, a18, a19, a20, a21, a22,
              a23, a24, a25, a26, a27, a28, a29, a30, a31)  # fmt: skip
    for i in tl.static_range(32):
        tl.store(addresses + start + i, values[i], mask=i < count)
