"""The slices family's kernels: one forward and one backward for all slices, and the table of their addresses.

A tile is ``(slots, rows, lanes)``: a slot holds one slice's rows, a row as many lanes as the next power of two of the
slice's width. Slots of one tile belong to one *width class*, that power of two; ``CLASSES`` holds for each class, four
bits each, one plus the logarithm of its number of slots, zero where the class does not occur. Axis 0 of the grid is
the *group*: as many slices as a tile has slots. The programs of a group, along axis 1, share the rows. So neighbours in
time serve the same rows of neighbouring slices, which lie side by side in memory.

Absence is the flag: a pointer that is None takes its instructions with it. Slices that are tensors of their own come
as a table of int64 addresses; widths that differ as a table of int32: for each group its class and its first slot, and
then for each slot the number of its slice, its first column and its width, zero for none. ``total`` is the sum of the
widths. ``ALIGN`` is 0, or else all addresses are multiples of 16 bytes, and all columns, widths and distances between
rows of so many elements. The arguments ``total`` and ``…_stride``, a distance between rows, count in these units: what
is multiplied by a constant is known to the compiler as its multiple.
"""

import triton
import triton.language as tl

from ..core.device import await_predecessor, place_along_rows

# Classes from 1 to 8192 lanes.
_POWERS = tl.constexpr(14)


@triton.jit
def _slots(table, group, K, GROUPS: tl.constexpr, S: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr):
    """For each of a group's slots its slice's number, first column and width, and whether there is such a slice."""
    if table is None:
        slots = group * S + tl.arange(0, S)
        number = slots
        column = slots * D
        width = tl.full((S,), D, tl.int32)
        taken = slots < K
    else:
        entries = table + 2 * GROUPS + 3 * (tl.load(table + GROUPS + group) + tl.arange(0, S))
        number = tl.load(entries)
        column = tl.load(entries + 1)
        width = tl.load(entries + 2)
        if ALIGN > 1:
            column = tl.multiple_of(column, ALIGN)
            width = tl.multiple_of(width, ALIGN)
        taken = width > 0
    return number, column, width, taken


@triton.jit
def _place(tensor, addresses, slots, stride, lanes, K, M, DTYPE: tl.constexpr, APART: tl.constexpr,
           STRIDED: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr, INDEX: tl.constexpr,
           ROWS: tl.constexpr):  # fmt: skip
    """Where a group's rows lie: the start, the distance between rows, and a tile's elements from its first row on.

    In one tensor, ``stride`` units apart; with ``APART`` in a buffer that holds one slice's rows after the other's; or
    where the table of addresses says, at the distances after them if ``STRIDED``. What is the same for all tiles is
    taken once, in the narrow dtype ``INDEX``: a tile's own part is one product.
    """
    number, column, width, taken = slots
    rows = tl.arange(0, ROWS)[None, :, None]
    if addresses is None and not APART:
        apart = stride * ALIGN if ALIGN > 1 else stride
        local = column.to(INDEX)[:, None, None] + rows * apart.to(INDEX) + lanes[None, None, :]
        return tensor, apart, local
    else:
        if addresses is not None:
            start = tl.load(addresses + number, mask=taken, other=0).to(tl.pointer_type(DTYPE))
            if ALIGN > 0:
                start = tl.multiple_of(start, 16)
        else:
            start = tensor + M * column.to(tl.int64)
        if STRIDED and addresses is not None:
            apart = tl.load(addresses + K + number, mask=taken, other=0)
            if ALIGN > 1:
                apart = tl.multiple_of(apart, ALIGN)
        elif D > 0:
            apart = tl.full((1,), D, tl.int64)
        else:
            apart = width.to(tl.int64)
        apart = apart[:, None, None]
        local = rows * apart.to(INDEX) + lanes[None, None, :]
        return start[:, None, None], apart, local


@triton.jit
def _at(place, first_row):
    """The addresses of the tile from ``first_row`` on."""
    start, apart, local = place
    return start + first_row * apart + local


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
def _forward_tile(x, y, w, b, tile, taken, inside, per_width, M, EPS: tl.constexpr, VALUE: tl.constexpr,
                  PADDED: tl.constexpr, ACC: tl.constexpr, Y: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    first_row = tile.to(tl.int64) * ROWS
    in_rows = taken[:, None] & (tl.arange(0, ROWS) < M - first_row)[None, :]
    mask = in_rows[:, :, None] & inside[:, None, :]
    h = tl.load(_at(x, first_row), mask=mask, other=0.0).to(ACC)
    hat, _ = _standardize(h, in_rows, inside, per_width, EPS, PADDED)
    tl.store(_at(y, first_row), VALUE(_affine(hat, w, b)).to(Y), mask=mask)


@triton.jit
def _forward_group(x, x_addresses, table, weight, bias, y, x_stride, total, group, part, programs, K, M,
                   POWER: tl.constexpr, GROUPS: tl.constexpr, CLASSES: tl.constexpr, EPS: tl.constexpr,
                   VALUE: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr,
                   APART: tl.constexpr, STRIDED: tl.constexpr, ALIGN: tl.constexpr, INDEX: tl.constexpr,
                   ACC: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
                   PERSISTENT: tl.constexpr):  # fmt: skip
    """One group's rows: a tile, or ``PERSISTENT``, tiles in a loop that takes the next rows' loads ahead."""
    depth: tl.constexpr = ((CLASSES >> (4 * POWER)) & 15) - 1
    tile_rows: tl.constexpr = (BLOCK_N * ROWS + (1 << (depth + POWER)) - 1) >> (depth + POWER)
    padded: tl.constexpr = D != 1 << POWER
    lanes = tl.arange(0, 1 << POWER)
    slots = _slots(table, group, K, GROUPS, 1 << depth, D, ALIGN)
    x_place = _place(x, x_addresses, slots, x_stride, lanes, K, M, X, False, STRIDED, D, ALIGN, INDEX, tile_rows)
    y_place = _place(y, None, slots, total, lanes, K, M, Y, APART, False, D, ALIGN, INDEX, tile_rows)
    inside = _inside(slots, lanes, padded)
    per_width = _per_width(slots, ACC)
    w = _load_parameter(weight, slots, lanes, inside, SHARED, ACC)
    b = _load_parameter(bias, slots, lanes, inside, SHARED, ACC)
    if PERSISTENT:
        tiles = tl.cdiv(M, tile_rows).to(tl.int32)
        for tile in tl.range(part, tiles, programs, num_stages=STAGES):
            _forward_tile(x_place, y_place, w, b, tile, slots[3], inside, per_width, M, EPS, VALUE, padded, ACC, Y,
                          tile_rows)  # fmt: skip
    else:
        _forward_tile(x_place, y_place, w, b, part, slots[3], inside, per_width, M, EPS, VALUE, padded,
                      ACC, Y, tile_rows)  # fmt: skip


@triton.jit(do_not_specialize=["x_stride", "total", "K", "M"])
def slices_forward_kernel(
    x,
    x_addresses,
    table,
    weight,
    bias,
    y,
    x_stride,
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
    INDEX: tl.constexpr,
    GROUPS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PERSISTENT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``y = VALUE(layer_norm(x))``, slice by slice: the grid is (groups of slices, shares of the rows)."""
    await_predecessor(OVERLAP)
    group = tl.program_id(0)
    part, programs = place_along_rows()
    for power in tl.static_range(_POWERS):
        if (CLASSES >> (4 * power)) & 15 > 0:
            if table is None:
                _forward_group(x, x_addresses, table, weight, bias, y, x_stride, total, group, part, programs, K, M,
                               power, GROUPS, CLASSES, EPS, VALUE, X, y.dtype.element_ty, D, SHARED, APART, STRIDED,
                               ALIGN, INDEX, ACC, BLOCK_N, ROWS, STAGES, PERSISTENT)  # fmt: skip
            else:
                if tl.load(table + group) == power:
                    _forward_group(x, x_addresses, table, weight, bias, y, x_stride, total, group, part, programs, K, M,
                                   power, GROUPS, CLASSES, EPS, VALUE, X, y.dtype.element_ty, D, SHARED, APART, STRIDED,
                                   ALIGN, INDEX, ACC, BLOCK_N, ROWS, STAGES, PERSISTENT)  # fmt: skip


@triton.jit
def _store_gradient(gradient, partials, value, slot, sums, slots, lanes, inside, total, group, part, programs,
                    GROUPS: tl.constexpr, D: tl.constexpr,
                    SHARED: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """A group's sums over its rows: the gradient itself where no other program has a part in it, else a part."""
    if SHARED:
        value = tl.sum(value, axis=0)
        in_width = lanes < D
        place = part.to(tl.int64) * GROUPS + group
        if programs * GROUPS == 1:
            tl.store(gradient + lanes, value.to(gradient.dtype.element_ty), mask=in_width)
        else:
            tl.store(partials + (place * sums + slot) * D + lanes, value, mask=in_width)
    else:
        cols = slots[1][:, None] + lanes[None, :]
        if programs == 1:
            tl.store(gradient + cols, value.to(gradient.dtype.element_ty), mask=inside)
        else:
            place = part.to(tl.int64) * sums + slot
            tl.store(partials + place * (total * ALIGN if ALIGN > 1 else total) + cols, value, mask=inside)


@triton.jit
def _backward_group(dy, dy_addresses, x, x_addresses, table, weight, bias, dx, dweight, dbias, partials, dy_stride,
                    x_stride, total, group, part, programs, K, M, POWER: tl.constexpr, GROUPS: tl.constexpr,
                    CLASSES: tl.constexpr, EPS: tl.constexpr, DERIVATIVE: tl.constexpr, DY: tl.constexpr,
                    X: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr, DY_APART: tl.constexpr,
                    DX_APART: tl.constexpr, DY_STRIDED: tl.constexpr, UNUSED: tl.constexpr, STRIDED: tl.constexpr,
                    ALIGN: tl.constexpr, INDEX: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
                    STAGES: tl.constexpr):  # fmt: skip
    """One group's gradients; the rows come from the last to the first: the L2 cache still holds what was made last."""
    depth: tl.constexpr = ((CLASSES >> (4 * POWER)) & 15) - 1
    tile_rows: tl.constexpr = (BLOCK_N * ROWS + (1 << (depth + POWER)) - 1) >> (depth + POWER)
    padded: tl.constexpr = D != 1 << POWER
    sums: tl.constexpr = (dweight is not None) + (dbias is not None)
    lanes = tl.arange(0, 1 << POWER)
    slots = _slots(table, group, K, GROUPS, 1 << depth, D, ALIGN)
    taken = slots[3]
    dy_place = _place(dy, dy_addresses, slots, dy_stride, lanes, K, M, DY, DY_APART, DY_STRIDED, D, ALIGN, INDEX,
                      tile_rows)  # fmt: skip
    x_place = _place(x, x_addresses, slots, x_stride, lanes, K, M, X, False, STRIDED, D, ALIGN, INDEX, tile_rows)
    if dx is not None:
        dx_place = _place(dx, None, slots, total, lanes, K, M, X, DX_APART, False, D, ALIGN, INDEX, tile_rows)
    inside = _inside(slots, lanes, padded)
    if UNUSED and dy_addresses is not None:
        # Address zero stands for an output that nothing came of: its gradient is zero.
        given = tl.load(dy_addresses + slots[0], mask=taken, other=0) != 0
    per_width = _per_width(slots, ACC)
    w = _load_parameter(weight, slots, lanes, inside, SHARED, ACC)
    b = _load_parameter(bias, slots, lanes, inside, SHARED, ACC)
    if dweight is not None:
        dweight_sum = tl.zeros((1 << depth, tile_rows, 1 << POWER), ACC)
    if dbias is not None:
        dbias_sum = tl.zeros((1 << depth, tile_rows, 1 << POWER), ACC)

    tiles = tl.cdiv(M, tile_rows).to(tl.int32)
    for step in tl.range(part, tiles, programs, num_stages=STAGES):
        first_row = (tiles - 1 - step).to(tl.int64) * tile_rows
        in_rows = taken[:, None] & (tl.arange(0, tile_rows) < M - first_row)[None, :]
        mask = in_rows[:, :, None] & inside[:, None, :]
        if UNUSED and dy_addresses is not None:
            # Nor is such a slice read: a NaN in it is nobody's.
            mask &= given[:, None, None]
        g = tl.load(_at(dy_place, first_row), mask=mask, other=0.0).to(ACC)
        h = tl.load(_at(x_place, first_row), mask=mask, other=0.0).to(ACC)
        hat, rstd = _standardize(h, in_rows, inside, per_width, EPS, padded)
        g *= DERIVATIVE(_affine(hat, w, b))
        if dweight is not None:
            dweight_sum += g * hat
        if dbias is not None:
            dbias_sum += g
        if dx is not None:
            if w is not None:
                g *= w
            along = tl.sum(g * hat, axis=2) * per_width
            mean = tl.sum(g, axis=2) * per_width
            if POWER == 0:
                # One column is its own mean, and nothing remains of g. The difference would be another number: g is a
                # product, which a fused multiply-add takes as it was before it was rounded, but the mean after that.
                out = g * hat
            else:
                out = (g - mean[:, :, None] - hat * along[:, :, None]) * rstd[:, :, None]
            tl.store(_at(dx_place, first_row), out.to(X), mask=mask)

    if dweight is not None:
        _store_gradient(dweight, partials, tl.sum(dweight_sum, axis=1), 0, sums, slots, lanes, inside, total, group,
                        part, programs, GROUPS, D, SHARED, ALIGN)  # fmt: skip
    if dbias is not None:
        _store_gradient(dbias, partials, tl.sum(dbias_sum, axis=1), sums - 1, sums, slots, lanes, inside, total, group,
                        part, programs, GROUPS, D, SHARED, ALIGN)  # fmt: skip


@triton.jit(do_not_specialize=["dy_stride", "x_stride", "total", "K", "M"])
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
    dy_stride,
    x_stride,
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
    UNUSED: tl.constexpr,
    STRIDED: tl.constexpr,
    ALIGN: tl.constexpr,
    INDEX: tl.constexpr,
    GROUPS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All gradients, slice by slice, from dy and x alone; the grid is (groups, shares of the rows).

    Mean and scale are taken from x again: its rows are in registers anyway. A program sums its rows' parameter
    gradients in registers and stores them once, and takes the next rows' loads ahead.
    """
    group = tl.program_id(0)
    part, programs = place_along_rows()
    for power in tl.static_range(_POWERS):
        if (CLASSES >> (4 * power)) & 15 > 0:
            if table is None:
                _backward_group(dy, dy_addresses, x, x_addresses, table, weight, bias, dx, dweight, dbias, partials,
                                dy_stride, x_stride, total, group, part, programs, K, M, power, GROUPS, CLASSES, EPS,
                                DERIVATIVE, DY, X, D, SHARED, DY_APART, DX_APART, DY_STRIDED, UNUSED, STRIDED, ALIGN,
                                INDEX, ACC, BLOCK_N, ROWS, STAGES)  # fmt: skip
            else:
                if tl.load(table + group) == power:
                    _backward_group(dy, dy_addresses, x, x_addresses, table, weight, bias, dx, dweight, dbias, partials,
                                    dy_stride, x_stride, total, group, part, programs, K, M, power, GROUPS, CLASSES, EPS,
                                    DERIVATIVE, DY, X, D, SHARED, DY_APART, DX_APART, DY_STRIDED, UNUSED, STRIDED, ALIGN,
                                    INDEX, ACC, BLOCK_N, ROWS, STAGES)  # fmt: skip


@triton.jit(do_not_specialize=[f"a{i}" for i in range(64)] + ["start", "count"])
def store_addresses_kernel(
    addresses, start, count,
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15,
    a16, a17, a18, a19, a20, a21, a22, a23, a24, a25, a26, a27, a28, a29, a30, a31,
    a32, a33, a34, a35, a36, a37, a38, a39, a40, a41, a42, a43, a44, a45, a46, a47,
    a48, a49, a50, a51, a52, a53, a54, a55, a56, a57, a58, a59, a60, a61, a62, a63,
):  # fmt: skip
    """``addresses[start + i] = a<i>`` for ``i < count``: a table that a graph's replay makes from its own arguments."""
    values = (
        a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15,
        a16, a17, a18, a19, a20, a21, a22, a23, a24, a25, a26, a27, a28, a29, a30, a31,
        a32, a33, a34, a35, a36, a37, a38, a39, a40, a41, a42, a43, a44, a45, a46, a47,
        a48, a49, a50, a51, a52, a53, a54, a55, a56, a57, a58, a59, a60, a61, a62, a63,
    )  # fmt: skip
    for i in tl.static_range(64):
        tl.store(addresses + start + i, values[i], mask=i < count)
