"""The norm family's kernels: one forward, with and without a norm, and one backward.

Absence is the flag: a pointer that is None takes its instructions with it. ``ACC`` is the dtype of statistics and
sums. ``N`` is a constant; M, the strides and the dropout threshold are not: kernels do not depend on the batch size.
Rows are int64 wherever they are multiplied by a stride.
"""

import triton
import triton.language as tl

from ..core.device import await_predecessor, keep_scale, load_row_vector, load_seed, place_along_rows, rows_of


@triton.jit
def _load_weight(weight, cols, N: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, ACC: tl.constexpr):
    if weight is not None:
        w = load_row_vector(weight, cols, N, ACC)
        if WEIGHT_OFFSET != 0.0:
            w += WEIGHT_OFFSET
        return w


@triton.jit
def _load_sum(x, bias_row, residual, scale, x_stride, residual_stride, rows, cols, mask, ACC: tl.constexpr):
    """``(x + bias) * scale + residual`` for one tile, unrounded."""
    z = tl.load(x + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
    if bias_row is not None:
        z += bias_row
    if scale is not None:
        z *= scale
    if residual is not None:
        z += tl.load(residual + rows[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
    return z


@triton.jit
def _store_sum(z, value, rows, cols, mask, N: tl.constexpr):
    if z is not None:
        tl.store(z + rows[:, None] * N + cols[None, :], value.to(z.dtype.element_ty), mask=mask)


@triton.jit
def _round(value, DTYPE: tl.constexpr, ACC: tl.constexpr):
    return value.to(DTYPE).to(ACC) if DTYPE != ACC else value


@triton.jit
def _affine(z, mean, rstd, w, b, WEIGHT: tl.constexpr, HAT: tl.constexpr, ACC: tl.constexpr):
    """The normalised tile, scaled and shifted; ``HAT`` is the dtype it is rounded to before the weight multiplies.

    Where it is rounded, the weight with its offset is too, to the weight's own dtype ``WEIGHT``.
    """
    if mean is not None:
        z = z - mean[:, None]
    hat = _round(z * rstd[:, None], HAT, ACC)
    if w is not None:
        hat *= _round(w, ACC if HAT == ACC else WEIGHT, ACC)
    if b is not None:
        hat += b
    return hat


@triton.jit
def _forward_sum(x, bias_row, residual, z, seed, offset, threshold, x_stride, residual_stride, rows, first_col, M,
                 SUM: tl.constexpr, ACC: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
                 VECTOR: tl.constexpr):  # fmt: skip
    """A tile of the sum as rounded to its dtype, written out where it is kept."""
    cols = first_col + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    scale = keep_scale(seed, offset, threshold, rows, first_col, N, ROWS, BLOCK_N, VECTOR, ACC)
    h = _load_sum(x, bias_row, residual, scale, x_stride, residual_stride, rows, cols, mask, ACC)
    _store_sum(z, h, rows, cols, mask, N)
    return _round(h, SUM, ACC)


@triton.jit
def _store_output(y, cast, out, rows, cols, mask, N: tl.constexpr, ACC: tl.constexpr):
    """The output, and its low-precision copy: the output as rounded, rounded again."""
    place = rows[:, None] * N + cols[None, :]
    tl.store(y + place, out.to(y.dtype.element_ty), mask=mask)
    if cast is not None:
        tl.store(cast + place, _round(out, y.dtype.element_ty, ACC).to(cast.dtype.element_ty), mask=mask)


@triton.jit
def _forward_norm(h, w, b, y, cast, stats, tile, M, KIND: tl.constexpr, EPS: tl.constexpr, WEIGHT: tl.constexpr,
                  HAT: tl.constexpr, ACC: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr,
                  ROWS: tl.constexpr):  # fmt: skip
    """A tile of whole rows, in registers: its mean, then its centred squares, then the output."""
    rows = rows_of(tile, ROWS)
    in_rows = rows < M
    cols = tl.arange(0, BLOCK_N)
    mask = in_rows[:, None] & (cols < N)[None, :]
    if KIND == "layer":
        mean = tl.sum(h, axis=1) / N
        centred = tl.where(mask, h - mean[:, None], 0.0)
        tl.store(stats + M + rows, mean, mask=in_rows)
    else:
        mean = None
        centred = h
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / N + EPS)
    tl.store(stats + rows, rstd, mask=in_rows)
    out = _affine(h, mean, rstd, w, b, WEIGHT, HAT, ACC)
    _store_output(y, cast, out, rows, cols, mask, N, ACC)


@triton.jit(do_not_specialize=["seed", "offset", "threshold", "M"])
def norm_forward_kernel(
    x,
    bias,
    residual,
    weight,
    ln_bias,
    y,
    cast,
    z,
    stats,
    seed,
    offset,
    threshold,
    x_stride,
    residual_stride,
    M,
    KIND: tl.constexpr,
    EPS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    WEIGHT: tl.constexpr,
    SUM: tl.constexpr,
    HAT: tl.constexpr,
    ACC: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
    PERSISTENT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``y = norm(z)`` with ``z = (x + bias) * keep_scale + residual``, ROWS rows at a time.

    ``stats`` receives rstd in its first M places and, for LayerNorm, the mean in the next M, ``cast`` the output in
    another dtype. ``SUM`` is the sum's dtype: it is normalised as rounded to that, so that the statistics belong to
    what the backward sees. ``PERSISTENT`` programs take several tiles: they keep the row vectors in registers and take
    the next rows' loads ahead.
    """
    await_predecessor(OVERLAP)
    if seed is not None:
        seed, offset = load_seed(seed, offset)
    tiles = tl.cdiv(M, ROWS).to(tl.int32)
    if BLOCK_N >= N:
        cols = tl.arange(0, BLOCK_N)
        if PERSISTENT:
            bias_row = load_row_vector(bias, cols, N, ACC)
            w = _load_weight(weight, cols, N, WEIGHT_OFFSET, ACC)
            b = load_row_vector(ln_bias, cols, N, ACC)
            for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
                z_rows = _forward_sum(x, bias_row, residual, z, seed, offset, threshold, x_stride, residual_stride,
                                      rows_of(tile, ROWS), 0, M, SUM, ACC, N, BLOCK_N, ROWS, VECTOR)  # fmt: skip
                _forward_norm(z_rows, w, b, y, cast, stats, tile, M, KIND, EPS, WEIGHT, HAT, ACC, N, BLOCK_N, ROWS)
        else:
            tile = tl.program_id(0)
            bias_row = load_row_vector(bias, cols, N, ACC)
            z_rows = _forward_sum(x, bias_row, residual, z, seed, offset, threshold, x_stride, residual_stride,
                                  rows_of(tile, ROWS), 0, M, SUM, ACC, N, BLOCK_N, ROWS, VECTOR)  # fmt: skip
            w = _load_weight(weight, cols, N, WEIGHT_OFFSET, ACC)
            b = load_row_vector(ln_bias, cols, N, ACC)
            _forward_norm(z_rows, w, b, y, cast, stats, tile, M, KIND, EPS, WEIGHT, HAT, ACC, N, BLOCK_N, ROWS)
    else:
        # Wider rows pass twice, tile by tile: tile means and squares merge as in Chan et al. (1979).
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            rows = rows_of(tile, ROWS)
            in_rows = rows < M
            mean = tl.zeros((ROWS,), ACC)
            squares = tl.zeros((ROWS,), ACC)
            for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
                cols = start + tl.arange(0, BLOCK_N)
                mask = in_rows[:, None] & (cols < N)[None, :]
                bias_row = load_row_vector(bias, cols, N, ACC)
                h = _forward_sum(x, bias_row, residual, z, seed, offset, threshold, x_stride, residual_stride, rows,
                                 start, M, SUM, ACC, N, BLOCK_N, ROWS, VECTOR)  # fmt: skip
                if KIND == "layer":
                    count = tl.minimum(N - start, BLOCK_N).to(ACC)
                    tile_mean = tl.sum(h, axis=1) / count
                    delta = tile_mean - mean
                    h = tl.where(mask, h - tile_mean[:, None], 0.0)
                    mean += delta * (count / (start + count))
                    squares += delta * delta * (start * count / (start + count))
                squares += tl.sum(h * h, axis=1)
            rstd = tl.rsqrt(squares / N + EPS)
            tl.store(stats + rows, rstd, mask=in_rows)
            if KIND == "layer":
                tl.store(stats + M + rows, mean, mask=in_rows)
            for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
                cols = start + tl.arange(0, BLOCK_N)
                mask = in_rows[:, None] & (cols < N)[None, :]
                bias_row = load_row_vector(bias, cols, N, ACC)
                h = _forward_sum(x, bias_row, residual, None, seed, offset, threshold, x_stride, residual_stride, rows,
                                 start, M, SUM, ACC, N, BLOCK_N, ROWS, VECTOR)  # fmt: skip
                w = _load_weight(weight, cols, N, WEIGHT_OFFSET, ACC)
                b = load_row_vector(ln_bias, cols, N, ACC)
                out = _affine(h, mean if KIND == "layer" else None, rstd, w, b, WEIGHT, HAT, ACC)
                _store_output(y, cast, out, rows, cols, mask, N, ACC)


@triton.jit(do_not_specialize=["seed", "offset", "threshold", "M"])
def dropout_add_kernel(
    x,
    bias,
    residual,
    y,
    seed,
    offset,
    threshold,
    x_stride,
    residual_stride,
    M,
    ACC: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``y = (x + bias) * keep_scale + residual``, one tile a program: the forward of the member without a norm."""
    await_predecessor(OVERLAP)
    tile, _ = place_along_rows()
    rows = rows_of(tile, ROWS)
    first_col = tl.program_id(0) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    if seed is not None:
        seed, offset = load_seed(seed, offset)
    bias_row = load_row_vector(bias, cols, N, ACC)
    scale = keep_scale(seed, offset, threshold, rows, first_col, N, ROWS, BLOCK_N, VECTOR, ACC)
    h = _load_sum(x, bias_row, residual, scale, x_stride, residual_stride, rows, cols, mask, ACC)
    _store_sum(y, h, rows, cols, mask, N)


@triton.jit
def _load_hat(
    kept,
    bias,
    residual,
    scale,
    kept_stride,
    residual_stride,
    stats,
    w,
    b,
    rows,
    cols,
    in_rows,
    mask,
    M,
    KIND: tl.constexpr,
    SAVED: tl.constexpr,
    SUM: tl.constexpr,
    N: tl.constexpr,
    ACC: tl.constexpr,
):
    """The normalised rows and their rstd, from what the forward kept: the sum, the inputs, or the output."""
    rstd = tl.load(stats + rows, mask=in_rows, other=0.0)
    if SAVED == "output":
        hat = tl.load(kept + rows[:, None] * kept_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
        if b is not None:
            hat -= b
        if w is not None:
            hat = tl.where(w == 0.0, 0.0, hat / w)
    else:
        if SAVED == "sum":
            hat = tl.load(kept + rows[:, None] * kept_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
        else:
            bias_row = load_row_vector(bias, cols, N, ACC)
            hat = _load_sum(kept, bias_row, residual, scale, kept_stride, residual_stride, rows, cols, mask, ACC)
            hat = _round(hat, SUM, ACC)
        if KIND == "layer":
            hat -= tl.load(stats + M + rows, mask=in_rows, other=0.0)[:, None]
        hat *= rstd[:, None]
    return hat, rstd


@triton.jit
def _load_output_gradient(dy, dcast, dy_stride, dcast_stride, rows, cols, mask, ACC: tl.constexpr):
    """The gradient of the output, and of its low-precision copy with it: both hold the same numbers, whose gradient is the sum."""
    g = tl.load(dy + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
    if dcast is not None:
        g += tl.load(dcast + rows[:, None] * dcast_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
    return g


@triton.jit
def _load_weighted(
    dy,
    dcast,
    kept,
    bias,
    residual,
    weight,
    ln_bias,
    stats,
    seed,
    offset,
    threshold,
    dy_stride,
    dcast_stride,
    kept_stride,
    residual_stride,
    rows,
    first_col,
    in_rows,
    M,
    KIND: tl.constexpr,
    SAVED: tl.constexpr,
    SUM: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ACC: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """``dy * weight`` and the normalised rows of one tile, zero outside: what the row means are taken of."""
    cols = first_col + tl.arange(0, BLOCK_N)
    mask = in_rows[:, None] & (cols < N)[None, :]
    scale = keep_scale(seed if SAVED == "inputs" else None, offset, threshold, rows, first_col, N, ROWS, BLOCK_N,
                       VECTOR, ACC)  # fmt: skip
    w = _load_weight(weight, cols, N, WEIGHT_OFFSET, ACC)
    b = load_row_vector(ln_bias, cols, N, ACC)
    g = _load_output_gradient(dy, dcast, dy_stride, dcast_stride, rows, cols, mask, ACC)
    hat, _ = _load_hat(kept, bias, residual, scale, kept_stride, residual_stride, stats, w, b, rows, cols, in_rows,
                       mask, M, KIND, SAVED, SUM, N, ACC)  # fmt: skip
    if weight is not None:
        g = tl.where(mask, g * w, 0.0)
    return g, tl.where(mask, hat, 0.0)


@triton.jit
def _store_gradient(gradient, partials, value, slot, slots, cols, N: tl.constexpr):
    """A column sum: the gradient itself where this program saw all rows, else this program's part of it."""
    mask = cols < N
    if tl.num_programs(0) == 1:
        tl.store(gradient + cols, value.to(gradient.dtype.element_ty), mask=mask)
    else:
        row = tl.program_id(0).to(tl.int64) * slots + slot
        tl.store(partials + row * N + cols, value, mask=mask)


@triton.jit(do_not_specialize=["seed", "offset", "threshold", "M"])
def norm_backward_kernel(
    dy,
    dcast,
    dsum,
    kept,
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
    kept_stride,
    residual_stride,
    M,
    KIND: tl.constexpr,
    SAVED: tl.constexpr,
    SUM: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ACC: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
    FIRST_COL: tl.constexpr,
):
    """All gradients of the family; programs share the rows along axis 0 of the grid, the columns along axis 1.

    A program sums its rows' parameter gradients in registers and stores them once, and takes the next rows' loads
    ahead. Rows wider than BLOCK_N have more sums than registers, so two launches share the columns: the first takes
    the columns below BLOCK_N and reads the others too, for the row means, which it leaves in ``moments``; the second
    takes the columns from ``FIRST_COL`` > 0 in tiles along axis 1, with those means.

    The first launch takes the rows from the last to the first, the second from the first to the last: what was read
    or written last, by the producer of dy or by the first launch, is what the L2 cache still holds.
    """
    if seed is not None:
        seed, offset = load_seed(seed, offset)
    tiles = tl.cdiv(M, ROWS).to(tl.int32)
    slots: tl.constexpr = (dbias is not None) + (dweight is not None) + (dln_bias is not None)
    first_col = FIRST_COL + tl.program_id(1) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    in_cols = (cols < N)[None, :]
    w = _load_weight(weight, cols, N, WEIGHT_OFFSET, ACC)
    b = load_row_vector(ln_bias, cols, N, ACC)
    if dbias is not None:
        dbias_sum = tl.zeros((BLOCK_N,), ACC)
    if dweight is not None:
        dweight_sum = tl.zeros((BLOCK_N,), ACC)
    if dln_bias is not None:
        dln_bias_sum = tl.zeros((BLOCK_N,), ACC)

    for step in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rows = rows_of(step if FIRST_COL > 0 else tiles - 1 - step, ROWS)
        in_rows = rows < M
        mask = in_rows[:, None] & in_cols
        scale = keep_scale(seed, offset, threshold, rows, first_col, N, ROWS, BLOCK_N, VECTOR, ACC)
        if dy is not None:
            dz = _load_output_gradient(dy, dcast, dy_stride, dcast_stride, rows, cols, mask, ACC)
            if KIND != "none":
                hat, rstd = _load_hat(kept, bias, residual, scale, kept_stride, residual_stride, stats, w, b,
                                      rows, cols, in_rows, mask, M, KIND, SAVED, SUM, N, ACC)  # fmt: skip
                if dweight is not None:
                    dweight_sum += tl.sum(dz * hat, axis=0)
                if dln_bias is not None:
                    dln_bias_sum += tl.sum(dz, axis=0)
                if weight is not None:
                    dz *= w
                if FIRST_COL > 0:
                    along = tl.load(moments + rows, mask=in_rows, other=0.0)
                    if KIND == "layer":
                        total = tl.load(moments + M + rows, mask=in_rows, other=0.0)
                else:
                    along_terms = dz * hat
                    total_terms = dz
                    if N <= 4 * BLOCK_N:
                        # Unrolled, so that the loop over rows is the one whose loads are taken ahead.
                        for start in tl.static_range(BLOCK_N, N, BLOCK_N):
                            g, other_hat = _load_weighted(
                                dy, dcast, kept, bias, residual, weight, ln_bias, stats, seed, offset, threshold, dy_stride,
                                dcast_stride, kept_stride, residual_stride, rows, start, in_rows, M, KIND, SAVED, SUM,
                                WEIGHT_OFFSET, ACC, N, BLOCK_N, ROWS, VECTOR)  # fmt: skip
                            along_terms += g * other_hat
                            total_terms += g
                    else:
                        for start in tl.range(BLOCK_N, N, BLOCK_N, num_stages=STAGES):
                            g, other_hat = _load_weighted(
                                dy, dcast, kept, bias, residual, weight, ln_bias, stats, seed, offset, threshold, dy_stride,
                                dcast_stride, kept_stride, residual_stride, rows, start, in_rows, M, KIND, SAVED, SUM,
                                WEIGHT_OFFSET, ACC, N, BLOCK_N, ROWS, VECTOR)  # fmt: skip
                            along_terms += g * other_hat
                            total_terms += g
                    along = tl.sum(along_terms, axis=1) / N
                    if KIND == "layer":
                        total = tl.sum(total_terms, axis=1) / N
                    if moments is not None:
                        tl.store(moments + rows, along, mask=in_rows)
                        if KIND == "layer":
                            tl.store(moments + M + rows, total, mask=in_rows)
                if KIND == "layer":
                    if N == 1:
                        # Exactly zero: dz is a product, which a subtraction would take unrounded, and total rounded.
                        dz *= hat
                    else:
                        dz -= total[:, None]
                dz = (dz - hat * along[:, None]) * rstd[:, None]
            if dsum is not None:
                dz += tl.load(dsum + rows[:, None] * dsum_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
        else:
            dz = tl.load(dsum + rows[:, None] * dsum_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
        out = rows[:, None] * N + cols[None, :]
        if dresidual is not None:
            tl.store(dresidual + out, dz.to(dresidual.dtype.element_ty), mask=mask)
        if scale is not None:
            dz *= scale
        if dx is not None:
            tl.store(dx + out, dz.to(dx.dtype.element_ty), mask=mask)
        if dbias is not None:
            dbias_sum += tl.sum(dz, axis=0)

    if dbias is not None:
        _store_gradient(dbias, partials, dbias_sum, 0, slots, cols, N)
    if dweight is not None:
        _store_gradient(dweight, partials, dweight_sum, dbias is not None, slots, cols, N)
    if dln_bias is not None:
        _store_gradient(dln_bias, partials, dln_bias_sum, slots - 1, slots, cols, N)
