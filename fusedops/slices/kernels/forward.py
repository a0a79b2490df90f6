"""The slices' forward kernel."""

import triton
import triton.language as tl

from ...core.device import await_predecessor, place_along_rows
from .tiles import (
    _affine,
    _inside,
    _load,
    _load_parameter,
    _per_width,
    _place,
    _place_of_rows,
    _slots,
    _standardize,
    _store,
)


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


# A persistent program loops over tiles. With ``CARRIED`` a step first loads the rows of the next
# tile to registers, and then computes with the rows that the step before loaded. For three tiles:
#
#     step        0         1         2
#     loads       tile 1    tile 2    tile 2 again, unused
#     computes    tile 0    tile 1    tile 2
#
# Without ``CARRIED`` the compiler loads ahead, by asynchronous copies to shared memory. They copy
# at least four bytes, so ``CARRIED`` is for two-byte elements that a thread loads one by one.
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
    """Computes the forward of one group: one tile or, if ``PERSISTENT``, tiles in a loop.

    The loop loads the next rows while it computes: with ``CARRIED`` to registers, else by
    asynchronous copies, which the compiler inserts for ``num_stages``.
    """
    lanes = tl.arange(0, LANES)
    slots = _slots(table, group, K, GROUPS, SLOTS, D, ALIGN)
    x_place = _place(
        x, x_addresses, slots, x_stride, lanes, K, M, X, False, STRIDED, D, ALIGN, INDEX, ROWS
    )
    # The distance between output rows is ``total``, or with ``APART`` the slice's width.
    y_place = _place(y, None, slots, total, lanes, K, M, Y, APART, False, D, ALIGN, INDEX, ROWS)
    inside = _inside(slots, lanes, LANES, PARTS, FULL)
    per_width = _per_width(slots, ACC)
    ws = _load_parameter(weight, slots, lanes, inside, SHARED, ACC, LANES, PARTS)
    bs = _load_parameter(bias, slots, lanes, inside, SHARED, ACC, LANES, PARTS)
    # Whether loads (`whole`) and stores (`alone`) need no mask of rows and slots. A tile of one row
    # needs no mask of rows: the loop's bounds keep it inside. With a table, loads need no mask of
    # slots: every slot has a slice, its own or one that it repeats. But a slot that repeats a slice
    # must not store it. The masks of lanes (`inside`) exclude such a slot, but the first `FULL`
    # parts are stored without these masks. So stores need no mask of slots only if `FULL` is 0.
    whole: tl.constexpr = ROWS == 1 and (SLOTS == 1 or table is not None)
    alone: tl.constexpr = ROWS == 1 and (SLOTS == 1 or (table is not None and FULL == 0))
    _, _, _, _, own = slots  # whether a slot has a slice of its own
    tiles = tl.cdiv(M, ROWS).to(tl.int32)
    if PERSISTENT:
        # Past the end the last tile is loaded again: a load without a mask must be inside.
        if CARRIED:
            first_row, in_rows = _place_of_rows(tl.minimum(share, tiles - 1), own, M, ROWS)
            ahead = _load(x_place, first_row, in_rows, inside, LANES, PARTS, FULL, whole)
        for tile in tl.range(share, tiles, programs, num_stages=STAGES):
            first_row, in_rows = _place_of_rows(tile, own, M, ROWS)
            if CARRIED:
                rows = ahead
                next_row, in_next = _place_of_rows(
                    tl.minimum(tile + programs, tiles - 1), own, M, ROWS
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
    # Otherwise a program has one tile. A grid that was folded may have more programs than tiles.
    elif share < tiles:
        first_row, in_rows = _place_of_rows(share, own, M, ROWS)
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
    """Computes ``y = VALUE(layer_norm(x))`` for each slice; the grid is (groups, row shares)."""
    await_predecessor(OVERLAP)
    group = tl.program_id(0)
    share, programs = place_along_rows()
    # Shapes of tensors are constants, so each kind of tile has code of its own, and a program runs
    # that of its group. Slices of one width have one kind, and no branch. A kind is a
    # `widths.Tile`: ``SLOTS, ROWS, LANES, PARTS, FULL, SINGLE``. Only the backward uses the last.
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
