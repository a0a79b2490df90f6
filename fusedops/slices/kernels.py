"""The slices family's kernels: a forward and a backward for all slices, and a table of addresses.

A tile is ``(slots, rows, lanes)``: a slot holds one slice's rows. A slice is one such part, or up
to seven side by side, in a tuple::

            part 0          part 1
    slot 0  [rows, lanes]   [rows, lanes]    slice 4
    slot 1  [rows, lanes]   [rows, lanes]    slice 5, whose last lanes are idle

Slices of similar widths share a `Tile`'s shape, and ``TILES`` are the shapes that occur. Axis 0 of
the grid is the *group*: as many slices as a tile has slots. The programs of a group, along axis 1,
share the rows. So programs that run at the same time read the same rows of neighbouring slices,
which are side by side in memory.

Without an argument, which is then None, there is no code for it. Slices that are separate tensors
come as a table of int64 addresses; widths that differ as `Groups.table`, in int32.
``total`` is the sum of the widths. ``ALIGN`` is 0, or else all addresses are multiples of 16 bytes,
and all columns, widths and distances between rows of so many elements. The arguments ``total`` and
``…_stride``, a distance between rows, count in these units: what is multiplied by a constant is
known to the compiler as its multiple. ``CARRIED``: a thread's neighbouring elements are fewer than
the four bytes that are the least to be copied asynchronously, so that the loop carries the next
rows in registers.
"""

import triton
import triton.language as tl

from ..core.device import await_predecessor, place_along_rows


@triton.jit
def _slots(
    table, group, K, GROUPS: tl.constexpr, S: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr
):
    """The slices of the slots: number, first column, width, if there is one, and if to store it.

    The table is ``[kinds | first slots | (number, column, width) of each slot]``. A slot beyond the
    slices of its group repeats the last one, with the complement of its number, and stores nothing.
    """
    if table is None:
        slots = group * S + tl.arange(0, S)
        number = slots
        column = slots * D
        width = tl.full((S,), D, tl.int32)
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
    """Locates a group's rows: start, distance between rows, and offsets within a tile.

    The rows are in one tensor, ``stride`` units apart; with ``APART`` in a buffer that holds one
    slice's rows after the other's; or at the addresses of the table, with the distances behind
    these if ``STRIDED``. The offsets are the same for all tiles: they are computed once, in the
    narrow dtype ``INDEX``. A tile's own part of an address is one product.
    """
    number, column, width, taken, _ = slots
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
def _inside(slots, lanes, LANES: tl.constexpr, PARTS: tl.constexpr, FULL: tl.constexpr):
    """Masks ``(slots, lanes)`` of the lanes that hold features, part by part."""
    parts = ()
    for part in tl.static_range(PARTS):
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
    """A parameter for each slot, or the one that all share, part by part; no parts if absent."""
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
    """The factor that turns a sum over a slice's lanes into their mean."""
    return 1.0 / tl.maximum(slots[2], 1).to(ACC)[:, None]


@triton.jit
def _place_of_rows(tile, own, M, ROWS: tl.constexpr):
    """The first row of a tile, and a mask ``(slots, rows)`` of the rows that exist."""
    first_row = tl.cast(tile, tl.int64) * ROWS
    in_rows = tl.arange(0, ROWS) < M - first_row
    return first_row, own[:, None] & in_rows[None, :]


@triton.jit
def _mask(in_rows, inside, FULL: tl.constexpr, WHOLE: tl.constexpr):
    """The mask of a part's elements.

    With ``WHOLE`` all rows of all slots exist, with ``FULL`` all lanes.
    """
    if WHOLE:
        return inside[:, None, :]
    elif FULL:
        return in_rows[:, :, None]
    else:
        return in_rows[:, :, None] & inside[:, None, :]


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
    """The rows, standardized, and the reciprocal of their standard deviation; zeros outside.

    The variance is that of a second pass over the row, which is in registers. Idle lanes are set to
    zero before they are squared: the mean, subtracted from zero, would count there.
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


@triton.jit
def _forward_tile(
    rows,
    y,
    ws,
    bs,
    first_row,
    in_rows,
    inside,
    per_width,
    EPS: tl.constexpr,
    VALUE: tl.constexpr,
    ACC: tl.constexpr,
    Y: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    FULL: tl.constexpr,
    WHOLE: tl.constexpr,
    ALONE: tl.constexpr,
):
    hats, _ = _standardize(rows, in_rows, inside, per_width, EPS, ACC, PARTS, FULL, WHOLE)
    for part in tl.static_range(PARTS):
        out = VALUE(_affine(hats[part], ws, bs, part)).to(Y)
        _store(y, first_row, in_rows, inside, part, out, LANES, FULL, ALONE)


@triton.jit
def _forward_group(
    x,
    x_addresses,
    table,
    weight,
    bias,
    y,
    x_stride,
    total,
    group,
    share,
    programs,
    K,
    M,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    FULL: tl.constexpr,
    GROUPS: tl.constexpr,
    EPS: tl.constexpr,
    VALUE: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    D: tl.constexpr,
    SHARED: tl.constexpr,
    APART: tl.constexpr,
    STRIDED: tl.constexpr,
    ALIGN: tl.constexpr,
    INDEX: tl.constexpr,
    CARRIED: tl.constexpr,
    ACC: tl.constexpr,
    STAGES: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    """The forward of one group: a tile, or, if ``PERSISTENT``, tiles in a loop.

    The loop loads the next rows while it computes: with ``CARRIED`` in registers, else by
    asynchronous copies, which the compiler inserts for ``num_stages``.
    """
    lanes = tl.arange(0, LANES)
    slots = _slots(table, group, K, GROUPS, SLOTS, D, ALIGN)
    x_place = _place(
        x, x_addresses, slots, x_stride, lanes, K, M, X, False, STRIDED, D, ALIGN, INDEX, ROWS
    )
    y_place = _place(y, None, slots, total, lanes, K, M, Y, APART, False, D, ALIGN, INDEX, ROWS)
    inside = _inside(slots, lanes, LANES, PARTS, FULL)
    per_width = _per_width(slots, ACC)
    ws = _load_parameter(weight, slots, lanes, inside, SHARED, ACC, LANES, PARTS)
    bs = _load_parameter(bias, slots, lanes, inside, SHARED, ACC, LANES, PARTS)
    # Loads need no mask for rows and slots if a tile is one row, which the loop's bounds keep
    # inside, and every slot has a slice to read. Stores (`alone`) do need one where a slot may
    # repeat another's slice: with a table, if `FULL` is not 0.
    whole: tl.constexpr = ROWS == 1 and (SLOTS == 1 or table is not None)
    alone: tl.constexpr = ROWS == 1 and (SLOTS == 1 or (table is not None and FULL == 0))
    tiles = tl.cdiv(M, ROWS).to(tl.int32)
    if PERSISTENT:
        # Past the end the last tile is loaded again: without a mask a load must be inside.
        if CARRIED:
            first_row, in_rows = _place_of_rows(tl.minimum(share, tiles - 1), slots[4], M, ROWS)
            ahead = _load(x_place, first_row, in_rows, inside, LANES, PARTS, FULL, whole)
        for tile in tl.range(share, tiles, programs, num_stages=STAGES):
            first_row, in_rows = _place_of_rows(tile, slots[4], M, ROWS)
            if CARRIED:
                rows = ahead
                next_row, in_next = _place_of_rows(
                    tl.minimum(tile + programs, tiles - 1), slots[4], M, ROWS
                )
                ahead = _load(x_place, next_row, in_next, inside, LANES, PARTS, FULL, whole)
            else:
                rows = _load(x_place, first_row, in_rows, inside, LANES, PARTS, FULL, whole)
            _forward_tile(
                rows,
                y_place,
                ws,
                bs,
                first_row,
                in_rows,
                inside,
                per_width,
                EPS,
                VALUE,
                ACC,
                Y,
                LANES,
                PARTS,
                FULL,
                whole,
                alone,
            )
    elif share < tiles:
        first_row, in_rows = _place_of_rows(share, slots[4], M, ROWS)
        rows = _load(x_place, first_row, in_rows, inside, LANES, PARTS, FULL, whole)
        _forward_tile(
            rows,
            y_place,
            ws,
            bs,
            first_row,
            in_rows,
            inside,
            per_width,
            EPS,
            VALUE,
            ACC,
            Y,
            LANES,
            PARTS,
            FULL,
            whole,
            alone,
        )


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
    TILES: tl.constexpr,
    SHARED: tl.constexpr,
    APART: tl.constexpr,
    STRIDED: tl.constexpr,
    ALIGN: tl.constexpr,
    INDEX: tl.constexpr,
    CARRIED: tl.constexpr,
    GROUPS: tl.constexpr,
    ACC: tl.constexpr,
    STAGES: tl.constexpr,
    PERSISTENT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``y = VALUE(layer_norm(x))``, slice by slice; the grid is (groups, shares of the rows)."""
    await_predecessor(OVERLAP)
    group = tl.program_id(0)
    share, programs = place_along_rows()
    for kind in tl.static_range(len(TILES)):
        if table is None or tl.load(table + group) == kind:
            _forward_group(
                x,
                x_addresses,
                table,
                weight,
                bias,
                y,
                x_stride,
                total,
                group,
                share,
                programs,
                K,
                M,
                TILES[kind][0],
                TILES[kind][1],
                TILES[kind][2],
                TILES[kind][3],
                TILES[kind][4],
                GROUPS,
                EPS,
                VALUE,
                X,
                y.dtype.element_ty,
                D,
                SHARED,
                APART,
                STRIDED,
                ALIGN,
                INDEX,
                CARRIED,
                ACC,
                STAGES,
                PERSISTENT,
            )


@triton.jit
def _store_gradient(
    gradient,
    partials,
    sums,
    slot,
    count,
    slots,
    lanes,
    inside,
    total,
    group,
    share,
    programs,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    SHARED: tl.constexpr,
    ALIGN: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Stores a program's sums over its rows: the gradient itself, or a partial sum of it.

    It is the gradient where no other program has rows of these slices, or, if all slices share the
    parameter, where there is no other program at all. Otherwise::

        own parameters      partials[share, slot, total]
        SHARED              partials[share * GROUPS + group, slot, D]

    ``slot`` is 0 or 1: which parameter's sums of the ``count``.
    """
    for part in tl.static_range(PARTS):
        value = tl.sum(sums[part], axis=1)
        within = part * LANES + lanes
        if SHARED:
            value = tl.sum(value, axis=0)
            place = share.to(tl.int64) * GROUPS + group
            if programs * GROUPS == 1:
                tl.store(gradient + within, value.to(gradient.dtype.element_ty), mask=within < D)
            else:
                tl.store(partials + (place * count + slot) * D + within, value, mask=within < D)
        else:
            cols = slots[1][:, None] + within[None, :]
            if programs == 1:
                tl.store(gradient + cols, value.to(gradient.dtype.element_ty), mask=inside[part])
            else:
                place = share.to(tl.int64) * count + slot
                tl.store(
                    partials + place * (total * ALIGN if ALIGN > 1 else total) + cols,
                    value,
                    mask=inside[part],
                )


@triton.jit
def _zeros(
    vector,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Zeros for the sums over rows, part by part; no parts if the parameter needs no gradient."""
    parts = ()
    if vector is not None:
        for _ in tl.static_range(PARTS):
            parts = parts + (tl.zeros((SLOTS, ROWS, LANES), ACC),)
    return parts


@triton.jit
def _backward_group(
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
    group,
    share,
    programs,
    K,
    M,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    FULL: tl.constexpr,
    GROUPS: tl.constexpr,
    EPS: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    DY: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
    SHARED: tl.constexpr,
    DY_APART: tl.constexpr,
    DX_APART: tl.constexpr,
    DY_STRIDED: tl.constexpr,
    UNUSED: tl.constexpr,
    STRIDED: tl.constexpr,
    ALIGN: tl.constexpr,
    INDEX: tl.constexpr,
    CARRIED: tl.constexpr,
    ACC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradients of one group.

    Rows are processed from the last to the first: the L2 cache still holds the rows that the
    kernel before this one wrote last.
    """
    count: tl.constexpr = (dweight is not None) + (dbias is not None)
    lanes = tl.arange(0, LANES)
    slots = _slots(table, group, K, GROUPS, SLOTS, D, ALIGN)
    own = slots[4]
    dy_place = _place(
        dy,
        dy_addresses,
        slots,
        dy_stride,
        lanes,
        K,
        M,
        DY,
        DY_APART,
        DY_STRIDED,
        D,
        ALIGN,
        INDEX,
        ROWS,
    )
    x_place = _place(
        x, x_addresses, slots, x_stride, lanes, K, M, X, False, STRIDED, D, ALIGN, INDEX, ROWS
    )
    if dx is not None:
        dx_place = _place(
            dx, None, slots, total, lanes, K, M, X, DX_APART, False, D, ALIGN, INDEX, ROWS
        )
    inside = _inside(slots, lanes, LANES, PARTS, FULL)
    if UNUSED and dy_addresses is not None:
        # Address zero stands for an output that nobody used: its gradient is zero. Such a slice is
        # not read: a NaN in it must not reach a gradient.
        own &= tl.load(dy_addresses + slots[0], mask=own, other=0) != 0
    per_width = _per_width(slots, ACC)
    ws = _load_parameter(weight, slots, lanes, inside, SHARED, ACC, LANES, PARTS)
    bs = _load_parameter(bias, slots, lanes, inside, SHARED, ACC, LANES, PARTS)
    dweight_sums = _zeros(dweight, SLOTS, ROWS, LANES, PARTS, ACC)
    dbias_sums = _zeros(dbias, SLOTS, ROWS, LANES, PARTS, ACC)

    # As in the forward; but loads from an unused output's address, zero, always need a mask.
    used: tl.constexpr = not (UNUSED and dy_addresses is not None)
    whole: tl.constexpr = ROWS == 1 and (SLOTS == 1 or table is not None) and used
    alone: tl.constexpr = ROWS == 1 and (SLOTS == 1 or (table is not None and FULL == 0)) and used
    tiles = tl.cdiv(M, ROWS).to(tl.int32)
    if CARRIED:
        first_row, in_rows = _place_of_rows(tl.maximum(tiles - 1 - share, 0), own, M, ROWS)
        next_gs = _load(dy_place, first_row, in_rows, inside, LANES, PARTS, FULL, whole)
        next_rows = _load(x_place, first_row, in_rows, inside, LANES, PARTS, FULL, whole)
    for step in tl.range(share, tiles, programs, num_stages=STAGES):
        first_row, in_rows = _place_of_rows(tiles - 1 - step, own, M, ROWS)
        if CARRIED:
            gs, rows = next_gs, next_rows
            next_row, in_next = _place_of_rows(
                tl.maximum(tiles - 1 - step - programs, 0), own, M, ROWS
            )
            next_gs = _load(dy_place, next_row, in_next, inside, LANES, PARTS, FULL, whole)
            next_rows = _load(x_place, next_row, in_next, inside, LANES, PARTS, FULL, whole)
        else:
            gs = _load(dy_place, first_row, in_rows, inside, LANES, PARTS, FULL, whole)
            rows = _load(x_place, first_row, in_rows, inside, LANES, PARTS, FULL, whole)
        hats, rstd = _standardize(rows, in_rows, inside, per_width, EPS, ACC, PARTS, FULL, whole)
        new_dweight_sums, new_dbias_sums, terms, along_terms = (), (), (), ()
        for part in tl.static_range(PARTS):
            g, hat = gs[part].to(ACC), hats[part]
            g *= DERIVATIVE(_affine(hat, ws, bs, part))
            if UNUSED and dy_addresses is not None:
                # DERIVATIVE may be NaN for parameters that are not finite.
                g = tl.where(in_rows[:, :, None], g, 0.0)
            if dweight is not None:
                new_dweight_sums = new_dweight_sums + (dweight_sums[part] + g * hat,)
            if dbias is not None:
                new_dbias_sums = new_dbias_sums + (dbias_sums[part] + g,)
            if weight is not None:
                g *= ws[part]
            terms = terms + (g,)
            along_terms = along_terms + (g * hat,)
        dweight_sums, dbias_sums = new_dweight_sums, new_dbias_sums
        if dx is not None:
            along = _mean(along_terms, per_width, ACC, PARTS)[:, :, None]
            mean = _mean(terms, per_width, ACC, PARTS)[:, :, None]
            for part in tl.static_range(PARTS):
                if PARTS * LANES == 1:
                    # One column is its own mean, and nothing remains of g. The difference would not
                    # be zero: a fused multiply-add subtracts from the product g before its rounding
                    # the mean after its rounding.
                    out = along_terms[part]
                else:
                    out = (terms[part] - mean - hats[part] * along) * rstd[:, :, None]
                _store(dx_place, first_row, in_rows, inside, part, out.to(X), LANES, FULL, alone)

    if dweight is not None:
        _store_gradient(
            dweight,
            partials,
            dweight_sums,
            0,
            count,
            slots,
            lanes,
            inside,
            total,
            group,
            share,
            programs,
            GROUPS,
            D,
            SHARED,
            ALIGN,
            LANES,
            PARTS,
        )
    if dbias is not None:
        _store_gradient(
            dbias,
            partials,
            dbias_sums,
            count - 1,
            count,
            slots,
            lanes,
            inside,
            total,
            group,
            share,
            programs,
            GROUPS,
            D,
            SHARED,
            ALIGN,
            LANES,
            PARTS,
        )


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
    TILES: tl.constexpr,
    SHARED: tl.constexpr,
    DY_APART: tl.constexpr,
    DX_APART: tl.constexpr,
    DY_STRIDED: tl.constexpr,
    UNUSED: tl.constexpr,
    STRIDED: tl.constexpr,
    ALIGN: tl.constexpr,
    INDEX: tl.constexpr,
    CARRIED: tl.constexpr,
    GROUPS: tl.constexpr,
    ACC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All gradients, slice by slice, from dy and x alone; the grid is (groups, shares of the rows).

    Mean and scale are computed from x again: its rows are in registers anyway. A program sums its
    rows' parameter gradients in registers and stores them once, and loads the next rows ahead.
    """
    group = tl.program_id(0)
    share, programs = place_along_rows()
    for kind in tl.static_range(len(TILES)):
        if table is None or tl.load(table + group) == kind:
            _backward_group(
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
                group,
                share,
                programs,
                K,
                M,
                TILES[kind][0],
                TILES[kind][1],
                TILES[kind][2],
                TILES[kind][3],
                TILES[kind][4],
                GROUPS,
                EPS,
                DERIVATIVE,
                DY,
                X,
                D,
                SHARED,
                DY_APART,
                DX_APART,
                DY_STRIDED,
                UNUSED,
                STRIDED,
                ALIGN,
                INDEX,
                CARRIED,
                ACC,
                STAGES,
            )


@triton.jit(do_not_specialize=[f"a{i}" for i in range(64)] + ["start", "count"])
def store_addresses_kernel(
    addresses,
    start,
    count,
    a0,
    a1,
    a2,
    a3,
    a4,
    a5,
    a6,
    a7,
    a8,
    a9,
    a10,
    a11,
    a12,
    a13,
    a14,
    a15,
    a16,
    a17,
    a18,
    a19,
    a20,
    a21,
    a22,
    a23,
    a24,
    a25,
    a26,
    a27,
    a28,
    a29,
    a30,
    a31,
    a32,
    a33,
    a34,
    a35,
    a36,
    a37,
    a38,
    a39,
    a40,
    a41,
    a42,
    a43,
    a44,
    a45,
    a46,
    a47,
    a48,
    a49,
    a50,
    a51,
    a52,
    a53,
    a54,
    a55,
    a56,
    a57,
    a58,
    a59,
    a60,
    a61,
    a62,
    a63,
):
    """``addresses[start + i] = a<i>`` for ``i < count``.

    The arguments are part of a recorded launch: a graph's replay fills the table from them.
    """
    values = (
        a0,
        a1,
        a2,
        a3,
        a4,
        a5,
        a6,
        a7,
        a8,
        a9,
        a10,
        a11,
        a12,
        a13,
        a14,
        a15,
        a16,
        a17,
        a18,
        a19,
        a20,
        a21,
        a22,
        a23,
        a24,
        a25,
        a26,
        a27,
        a28,
        a29,
        a30,
        a31,
        a32,
        a33,
        a34,
        a35,
        a36,
        a37,
        a38,
        a39,
        a40,
        a41,
        a42,
        a43,
        a44,
        a45,
        a46,
        a47,
        a48,
        a49,
        a50,
        a51,
        a52,
        a53,
        a54,
        a55,
        a56,
        a57,
        a58,
        a59,
        a60,
        a61,
        a62,
        a63,
    )
    for i in tl.static_range(64):
        tl.store(addresses + start + i, values[i], mask=i < count)
