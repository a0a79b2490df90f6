"""The slices' backward: one kernel computes all gradients."""

import triton
import triton.language as tl

from ...core.device import place_along_rows
from .tiles import (
    _affine,
    _inside,
    _load,
    _load_parameter,
    _mean,
    _per_width,
    _place,
    _place_of_rows,
    _slots,
    _standardize,
    _store,
)


# The lines of ``partials``, for two groups and two programs along the rows (shares). If slices have
# their own parameters, the groups write to different columns of a line. If all slices share the
# parameters, each program has a line:
#
#     own      share 0             | dweight, group 0 | dweight, group 1 | dbias, ... |
#              share 1             | dweight, group 0 | dweight, group 1 | dbias, ... |
#
#     SHARED   share 0, group 0    | dweight, D | dbias, D |
#              share 0, group 1    | dweight, D | dbias, D |
#              share 1, group 0    | dweight, D | dbias, D |
#              share 1, group 1    | dweight, D | dbias, D |
#
# `sum_partials_kernel` adds the lines in order, so the same inputs give the same bits.
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
    """Stores a program's sums over its rows: as the gradient itself, or as a partial sum.

    They are the gradient if no other program has rows of these slices or, for parameters that all
    slices share, if there is no other program. Otherwise they are stored in::

        own parameters      partials[share, slot, total]
        SHARED              partials[share * GROUPS + group, slot, D]

    ``slot`` is the index of the parameter among the ``count`` that have gradients.
    """
    for part in tl.static_range(PARTS):
        # This is the only reduction over rows: in the loop the sums are tiles.
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
    """Returns zeros for the sums over rows, by parts; an empty tuple without a gradient."""
    parts = ()
    if vector is not None:
        for _ in tl.static_range(PARTS):
            parts = parts + (tl.zeros((SLOTS, ROWS, LANES), ACC),)
    return parts


# The gradients of ``y = VALUE(hat * w + b)``, where ``hat`` is the standardized row and means are
# over its lanes:
#
#     g       = dy * VALUE'(hat * w + b)
#     dweight = sum of g * hat over rows
#     dbias   = sum of g over rows
#     dx      = (g w - mean(g w) - hat * mean(g w * hat)) * rstd
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
    SINGLE: tl.constexpr,
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
    """Computes the gradients of one group.

    Rows are processed from the last to the first: the L2 cache still holds the rows that the
    kernel before this one wrote last.
    """
    count: tl.constexpr = (dweight is not None) + (dbias is not None)
    lanes = tl.arange(0, LANES)
    slots = _slots(table, group, K, GROUPS, SLOTS, D, ALIGN)
    # A slot that repeats another one's slice stores no gradient.
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
        # The address zero stands for the gradient of an unused output, which is zero. Its slice is
        # not read, because a NaN in it must not reach a gradient.
        own &= tl.load(dy_addresses + slots[0], mask=own, other=0) != 0
    per_width = _per_width(slots, ACC)
    ws = _load_parameter(weight, slots, lanes, inside, SHARED, ACC, LANES, PARTS)
    bs = _load_parameter(bias, slots, lanes, inside, SHARED, ACC, LANES, PARTS)
    dweight_sums = _zeros(dweight, SLOTS, ROWS, LANES, PARTS, ACC)
    dbias_sums = _zeros(dbias, SLOTS, ROWS, LANES, PARTS, ACC)

    # As in the forward. But with unused outputs loads always need a mask: their address is zero.
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
            if SINGLE:
                # The gradient of a single column is zero, because the column is its own mean, or
                # NaN if g is not finite. ``g - mean`` is not zero: g is a product, and a fused
                # multiply-add subtracts the rounded mean from the unrounded product.
                rstd = tl.where(per_width == 1.0, 0.0, rstd)
            for part in tl.static_range(PARTS):
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
    """Computes all gradients of each slice, from dy and x; the grid is (groups, row shares).

    Mean and deviation are computed again from x, whose rows are in registers anyway. A program sums
    its rows' parameter gradients in registers, stores them once, and loads the next rows ahead.
    """
    group = tl.program_id(0)
    share, programs = place_along_rows()
    # See `slices_forward_kernel`.
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
                TILES[kind][5],
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
