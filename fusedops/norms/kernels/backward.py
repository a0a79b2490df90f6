"""The norms' backward: one kernel computes all gradients, with any norm or none."""

import triton
import triton.language as tl

from ...core.device import keep_scale, load_row_vector, load_seed, rows_of
from ...core.exchange import collect_sums, post_sums, sums_of_both
from .tiles import _inside, _load_sum, _vector_part, _vectors


# The gradients are as follows, where ``hat`` is the normalised row and means are over columns:
#
#     g           dy * weight
#     dz          (g - mean(g) - hat * mean(g * hat)) * rstd + dsum; RMSNorm has no mean(g)
#     dresidual   dz
#     dx          dz * scale
#     dbias       dx, summed over rows
#     dweight     dy * hat, summed over rows
#     dln_bias    dy, summed over rows
#
# In the code ``total`` is a row's sum of g, and ``along`` its sum of g * hat; divided by N, they
# are the means. ``hat`` is computed from the tensor that the forward saved, one of three:
#
#     SAVED       tensor   hat
#     "sum"       z        (z - mean) * rstd
#     "inputs"    x        likewise; z = (x + bias) * scale + residual is computed again
#     "output"    y        (y - ln_bias) / weight
@triton.jit
def _load_rows(
    dy,
    dcast,
    source,
    bias,
    residual,
    stats,
    seed,
    offset,
    threshold,
    dy_stride,
    dcast_stride,
    source_stride,
    residual_stride,
    rows,
    in_rows,
    first_col,
    exact,
    M,
    KIND: tl.constexpr,
    SAVED: tl.constexpr,
    SUM: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    ACC: tl.constexpr,
):
    """Loads the output's gradient, the saved values and the statistics of a tile of rows.

    Gradient and saved values are tuples of parts. The copy's gradient is added to the output's. The
    statistics are rstd and mean; RMSNorm has no mean, and gets rstd twice. The first ``exact``
    parts do not reach beyond the last column.
    """
    gradients, rest = (), ()
    for part in tl.static_range(PARTS):
        first = first_col + part * BLOCK_N
        cols = first + tl.arange(0, BLOCK_N)
        mask = _inside(in_rows, cols, part < exact, N)
        # Rows past the end are 0, so that they add nothing to the sums over rows.
        g = tl.load(dy + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0)
        if dcast is not None:
            # Output and copy hold the same values, so their gradients add up.
            copy = tl.load(
                dcast + rows[:, None] * dcast_stride + cols[None, :], mask=mask, other=0.0
            )
            g = g.to(ACC) + copy.to(ACC)
        gradients = gradients + (g,)
        if source is not None:
            if SAVED == "inputs":
                bias_row = load_row_vector(bias, cols, N, ACC)
                scale = keep_scale(
                    seed, offset, threshold, rows, first, N, ROWS, BLOCK_N, VECTOR, ACC
                )
                # The sum is rounded as in the forward, which normalised the rounded sum.
                k = _load_sum(
                    source,
                    bias_row,
                    residual,
                    scale,
                    source_stride,
                    residual_stride,
                    rows,
                    cols,
                    mask,
                    ACC,
                ).to(SUM)
            else:
                k = tl.load(
                    source + rows[:, None] * source_stride + cols[None, :], mask=mask, other=0.0
                )
            rest = rest + (k,)
    rstd = tl.zeros((ROWS,), ACC)
    if stats is not None:
        rstd = tl.load(stats + rows, mask=in_rows, other=0.0)
    mean = rstd
    if KIND == "layer":
        mean = tl.load(stats + M + rows, mask=in_rows, other=0.0)
    return gradients, rest, rstd, mean


@triton.jit
def _hat_of(k, mean, rstd, w, b, KIND: tl.constexpr, SAVED: tl.constexpr, ACC: tl.constexpr):
    """Returns the normalised rows, from the saved sum or output."""
    hat = k.to(ACC)
    if SAVED == "output":
        if b is not None:
            hat -= b
        if w is not None:
            # With a weight of zero the output does not contain the normalised value. Such a weight
            # gets no gradient, as documented.
            hat = tl.where(w == 0.0, 0.0, hat / w)
    else:
        if KIND == "layer":
            hat -= mean[:, None]
        hat *= rstd[:, None]
    return hat


# Triton requires that a loop's variables have the same types before the loop as in it. So the sums
# start as zeros (`_zeros`), and so do the rows that a step takes from the step before (`_nothing`).
@triton.jit
def _zeros(vector, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, ACC: tl.constexpr):
    """Returns zeros for a gradient's column sums, by parts; an empty tuple if it is absent."""
    parts = ()
    if vector is not None:
        for _ in tl.static_range(PARTS):
            parts = parts + (tl.zeros((BLOCK_N,), ACC),)
    return parts


@triton.jit
def _nothing(
    dy,
    dcast,
    source,
    SAVED: tl.constexpr,
    SUM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Returns zeros of the shapes and dtypes of `_load_rows`, for the first step of a loop."""
    gradients, rest = (), ()
    for _ in tl.static_range(PARTS):
        gradients = gradients + (
            tl.zeros((ROWS, BLOCK_N), dy.dtype.element_ty if dcast is None else ACC),
        )
        rest = rest + (
            tl.zeros((ROWS, BLOCK_N), SUM if SAVED == "inputs" else source.dtype.element_ty),
        )
    return gradients, rest


# ``partials`` has a line for each program along the rows, and in it a slot of N numbers for each
# gradient that is computed:
#
#     program 0    | dbias, N | dweight, N | dln_bias, N |
#     program 1    | dbias, N | dweight, N | dln_bias, N |
#                       |           |             |
#                  summed over the programs, in order, by `sum_partials_kernel`
#
# Atomic additions would need no second kernel, but their order, and so the bits of the result,
# would change from run to run.
@triton.jit
def _store_gradient(
    gradient,
    partials,
    sums,
    slot,
    slots,
    first_col,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Stores column sums: as the gradient if one program has all rows, else as a partial sum.

    ``partials`` has the shape (programs, slots, N).
    """
    if gradient is not None:
        for part in tl.static_range(PARTS):
            cols = first_col + part * BLOCK_N + tl.arange(0, BLOCK_N)
            if tl.num_programs(1) == 1:
                tl.store(gradient + cols, sums[part].to(gradient.dtype.element_ty), mask=cols < N)
            else:
                row = tl.program_id(1).to(tl.int64) * slots + slot
                tl.store(partials + row * N + cols, sums[part], mask=cols < N)


# In this grid three programs share each row, and there are seven tiles of rows:
#
#                   axis 0: columns
#     axis 1        +-----------+-----------+-----------+
#     program 0     |  (0, 0)   |  (1, 0)   |  (2, 0)   |    tiles 6, 4, 2, 0
#                   +-----------+-----------+-----------+
#     program 1     |  (0, 1)   |  (1, 1)   |  (2, 1)   |    tiles 5, 3, 1
#                   +-----------+-----------+-----------+
#
# Programs side by side exchange sums over columns through ``moments``. Programs one above the other
# store sums over their own rows in ``partials``. The grid has no more programs than run at the same
# time, so that there are few partial sums.
@triton.jit(do_not_specialize=["seed", "offset", "threshold", "M"])
def norm_backward_kernel(
    dy,
    dcast,
    dsum,
    source,
    bias,
    residual,
    weight,
    ln_bias,
    stats,
    moments,
    dx,
    dresidual,
    dbias,
    dweight,
    dln_bias,
    partials,
    seed,
    offset,
    threshold,
    dy_stride,
    dcast_stride,
    dsum_stride,
    source_stride,
    residual_stride,
    M,
    KIND: tl.constexpr,
    SAVED: tl.constexpr,
    SUM: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ACC: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
    EXCHANGE: tl.constexpr,
    CARRIED: tl.constexpr,
):
    """Computes all gradients of the family.

    Programs divide the columns along axis 0 of the grid, and the rows along axis 1. A program has
    ``PARTS`` tiles of columns side by side. It sums its rows' parameter gradients in registers and
    stores them once. It loads the next rows ahead: by the compiler's pipeline or, where elements
    are loaded one at a time, in registers (``CARRIED``).

    Several programs share a wider row. For the row's means each needs the others' sums over
    columns. ``EXCHANGE`` is how it gets them. "wait": a program stores its sums in ``moments``,
    which are zero before the launch, and waits for the sums of the others. These are its neighbours
    in the grid, so they start at about the same time. "post": a program stores its sums and ends; a
    second launch, with "read", loads all of them. With "wait" a step stores the sums of the tile
    after the one that it finishes:

        step      stores sums of tile   loads sums of and finishes tile
        0         0                     -
        1         1                     0
        2         2                     1

    Rows are processed from the last to the first, because the L2 cache still holds those that the
    producer of dy wrote last.
    """
    if seed is not None:
        seed, offset = load_seed(seed, offset)
    tiles = tl.cdiv(M, ROWS).to(tl.int32)
    slots: tl.constexpr = (dbias is not None) + (dweight is not None) + (dln_bias is not None)
    columns: tl.constexpr = (N + PARTS * BLOCK_N - 1) // (PARTS * BLOCK_N)
    # The first ``exact`` parts of every program do not reach beyond the last column, and need no
    # mask of columns. If a program has the whole row, they are the parts that the row fills. If
    # programs share the row, only the last program's parts can reach beyond it; but all programs
    # run the same code, so it is all parts or none.
    exact: tl.constexpr = (
        N // BLOCK_N if columns == 1 else PARTS if columns * PARTS * BLOCK_N == N else 0
    )
    first_col = tl.program_id(0) * (PARTS * BLOCK_N)
    # Registers hold the parameters through all steps, unless a program has more than 8192 columns
    # and sums two parameter gradients.
    HOLDS: tl.constexpr = slots < 2 or PARTS * BLOCK_N <= 8192
    ws = _vectors(weight, first_col, WEIGHT_OFFSET, ACC, N, BLOCK_N, PARTS)
    bs = _vectors(ln_bias, first_col, 0.0, ACC, N, BLOCK_N, PARTS)
    dbias_sums = _zeros(dbias, BLOCK_N, PARTS, ACC)
    dweight_sums = _zeros(dweight, BLOCK_N, PARTS, ACC)
    dln_bias_sums = _zeros(dln_bias, BLOCK_N, PARTS, ACC)

    normalizes: tl.constexpr = dy is not None and KIND != "none"
    ahead = 0
    if EXCHANGE == "wait":
        # The loop has one step more: a program finishes a tile of rows after it has stored the sums
        # of the next, while the other programs' sums arrive.
        ahead = tl.num_programs(1)
        late_rstd, late_mean = tl.zeros((ROWS,), ACC), tl.zeros((ROWS,), ACC)
        late_gradients, late_source = _nothing(
            dy, dcast, source, SAVED, SUM, ROWS, BLOCK_N, PARTS, ACC
        )

    # With CARRIED a step loads the rows of the next step, and computes with the rows that the step
    # before loaded. The first rows are loaded here.
    if CARRIED:
        first_rows = rows_of(tiles - 1 - tl.program_id(1), ROWS)
        next_gradients, next_rest, next_rstd, next_mean = _load_rows(
            dy,
            dcast,
            source,
            bias,
            residual,
            stats,
            seed,
            offset,
            threshold,
            dy_stride,
            dcast_stride,
            source_stride,
            residual_stride,
            first_rows,
            first_rows < M,
            first_col,
            exact,
            M,
            KIND,
            SAVED,
            SUM,
            N,
            BLOCK_N,
            PARTS,
            ROWS,
            VECTOR,
            ACC,
        )
    for step in tl.range(
        tl.program_id(1), tiles + ahead, tl.num_programs(1), num_stages=1 if CARRIED else STAGES
    ):
        rows = rows_of(tiles - 1 - step, ROWS)
        in_rows = rows < M
        if EXCHANGE == "wait":
            in_rows &= rows >= 0
        if PARTS == 1 and EXCHANGE == "none":
            # The dropout mask is drawn while the rows are loaded. Masks of several parts would take
            # too many registers, so they are drawn one by one below.
            scale = keep_scale(
                seed, offset, threshold, rows, first_col, N, ROWS, BLOCK_N, VECTOR, ACC
            )
        if dy is not None:
            loaded, there = rows, in_rows
            if CARRIED:
                loaded = rows_of(tiles - 1 - step - tl.num_programs(1), ROWS)
                there = (loaded >= 0) & (loaded < M)
            gradients, rest, rstd, mean = _load_rows(
                dy,
                dcast,
                source,
                bias,
                residual,
                stats,
                seed,
                offset,
                threshold,
                dy_stride,
                dcast_stride,
                source_stride,
                residual_stride,
                loaded,
                there,
                first_col,
                exact,
                M,
                KIND,
                SAVED,
                SUM,
                N,
                BLOCK_N,
                PARTS,
                ROWS,
                VECTOR,
                ACC,
            )
            if CARRIED:
                gradients, rest, next_gradients, next_rest = (
                    next_gradients,
                    next_rest,
                    gradients,
                    rest,
                )
                rstd, mean, next_rstd, next_mean = next_rstd, next_mean, rstd, mean
        if normalizes:
            if EXCHANGE != "read":
                for part in tl.static_range(PARTS):
                    w = _vector_part(
                        weight, ws, part, first_col, WEIGHT_OFFSET, ACC, N, BLOCK_N, HOLDS
                    )
                    b = _vector_part(ln_bias, bs, part, first_col, 0.0, ACC, N, BLOCK_N, HOLDS)
                    dz = gradients[part].to(ACC)
                    if weight is not None:
                        dz *= w
                    along_term = dz * _hat_of(rest[part], mean, rstd, w, b, KIND, SAVED, ACC)
                    if part == 0:
                        along_terms, total_terms = along_term, dz
                    else:
                        along_terms += along_term
                        total_terms += dz
                # Both sums in one reduction need fewer barriers but more registers. Programs that
                # share rows wait for one another rather than for barriers, so they reduce the sums
                # one by one.
                along, total = sums_of_both(
                    along_terms, total_terms, KIND == "layer" and EXCHANGE == "none"
                )
            if EXCHANGE == "wait" or EXCHANGE == "post":
                post_sums(
                    moments,
                    along,
                    total,
                    tl.program_id(0),
                    rows,
                    M,
                    KIND == "layer",
                    EXCHANGE,
                )
            if EXCHANGE == "wait":
                # From here on the step processes the tile before: swap it with the current one.
                rows = rows_of(tiles - 1 - step + ahead, ROWS)
                in_rows = rows < M
                gradients, rest, late_gradients, late_source = (
                    late_gradients,
                    late_source,
                    gradients,
                    rest,
                )
                rstd, mean, late_rstd, late_mean = late_rstd, late_mean, rstd, mean
            if EXCHANGE == "wait" or EXCHANGE == "read":
                along, total = collect_sums(moments, rows, M, KIND == "layer", EXCHANGE, columns)
            along /= N
            total /= N
        if EXCHANGE != "post":
            new_dbias_sums, new_dweight_sums, new_dln_bias_sums = (), (), ()
            for part in tl.static_range(PARTS):
                first = first_col + part * BLOCK_N
                cols = first + tl.arange(0, BLOCK_N)
                mask = _inside(in_rows, cols, part < exact, N)
                if dy is not None:
                    dz = gradients[part].to(ACC)
                    if normalizes:
                        w = _vector_part(
                            weight, ws, part, first_col, WEIGHT_OFFSET, ACC, N, BLOCK_N, HOLDS
                        )
                        b = _vector_part(ln_bias, bs, part, first_col, 0.0, ACC, N, BLOCK_N, HOLDS)
                        hat = _hat_of(rest[part], mean, rstd, w, b, KIND, SAVED, ACC)
                        # A sum is one row, not a tile, so it stays in registers over all steps.
                        if dweight is not None:
                            new_dweight_sums = new_dweight_sums + (
                                dweight_sums[part] + tl.sum(dz * hat, axis=0),
                            )
                        if dln_bias is not None:
                            new_dln_bias_sums = new_dln_bias_sums + (
                                dln_bias_sums[part] + tl.sum(dz, axis=0),
                            )
                        if weight is not None:
                            dz *= w
                        if KIND == "layer":
                            if N == 1:
                                # The gradient of a row of one column is exactly zero, or NaN. hat
                                # is 0 or NaN too if it is computed from the sum; from a saved
                                # output it is the output's rounding error. ``dz - total`` is not
                                # zero: total is the rounded product dy * w, but a fused
                                # multiply-add subtracts it from the unrounded product.
                                hat *= 0.0
                                dz *= hat
                            else:
                                dz -= total[:, None]
                        dz = (dz - hat * along[:, None]) * rstd[:, None]
                    if dsum is not None:
                        dz += tl.load(
                            dsum + rows[:, None] * dsum_stride + cols[None, :], mask=mask, other=0.0
                        ).to(ACC)
                else:
                    dz = tl.load(
                        dsum + rows[:, None] * dsum_stride + cols[None, :], mask=mask, other=0.0
                    ).to(ACC)
                # The residual is added after dropout, so its gradient has no factor of dropout.
                out = rows[:, None] * N + cols[None, :]
                if dresidual is not None:
                    tl.store(dresidual + out, dz.to(dresidual.dtype.element_ty), mask=mask)
                if PARTS > 1 or EXCHANGE != "none":
                    scale = keep_scale(
                        seed, offset, threshold, rows, first, N, ROWS, BLOCK_N, VECTOR, ACC
                    )
                if scale is not None:
                    dz *= scale
                if dx is not None:
                    tl.store(dx + out, dz.to(dx.dtype.element_ty), mask=mask)
                if dbias is not None:
                    new_dbias_sums = new_dbias_sums + (dbias_sums[part] + tl.sum(dz, axis=0),)
            dbias_sums, dweight_sums, dln_bias_sums = (
                new_dbias_sums,
                new_dweight_sums,
                new_dln_bias_sums,
            )

    # A program's slots in ``partials`` are for the gradients that are computed, in this order.
    _store_gradient(dbias, partials, dbias_sums, 0, slots, first_col, N, BLOCK_N, PARTS)
    _store_gradient(
        dweight, partials, dweight_sums, dbias is not None, slots, first_col, N, BLOCK_N, PARTS
    )
    _store_gradient(
        dln_bias, partials, dln_bias_sums, slots - 1, slots, first_col, N, BLOCK_N, PARTS
    )
