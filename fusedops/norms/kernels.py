"""The norm family's kernels: one forward, with and without a norm, and one backward.

A pointer that is None is absent, and the instructions for it are not compiled. ``ACC`` is the dtype
of statistics and sums. ``N`` is a constant; M, the strides and the dropout threshold are not:
kernels do not depend on the batch size. Rows are int64 wherever they are multiplied by a stride.
"""

import triton
import triton.language as tl

from ..core.device import (
    await_predecessor,
    keep_scale,
    load_row_vector,
    load_seed,
    place_along_rows,
    rows_of,
)


@triton.jit
def _load_weight(weight, cols, N: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, ACC: tl.constexpr):
    """The weight with its offset; None if it is absent."""
    if weight is not None:
        w = load_row_vector(weight, cols, N, ACC)
        if WEIGHT_OFFSET != 0.0:
            w += WEIGHT_OFFSET
        return w


@triton.jit
def _load_sum(
    x, bias_row, residual, scale, x_stride, residual_stride, rows, cols, mask, ACC: tl.constexpr
):
    """``(x + bias) * scale + residual`` for one tile, unrounded."""
    z = tl.load(x + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
    if bias_row is not None:
        z += bias_row
    if scale is not None:
        z *= scale
    if residual is not None:
        z += tl.load(
            residual + rows[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0
        ).to(ACC)
    return z


@triton.jit
def _store_sum(z, value, rows, cols, mask, N: tl.constexpr):
    """Stores a tile, unless ``z`` is None."""
    if z is not None:
        tl.store(z + rows[:, None] * N + cols[None, :], value.to(z.dtype.element_ty), mask=mask)


@triton.jit
def _round(value, DTYPE: tl.constexpr, ACC: tl.constexpr):
    """The value as rounded to ``DTYPE``, in the accumulator's dtype again."""
    return value.to(DTYPE).to(ACC) if DTYPE != ACC else value


@triton.jit
def _affine(z, mean, rstd, w, b, WEIGHT: tl.constexpr, HAT: tl.constexpr, ACC: tl.constexpr):
    """The normalised tile, scaled and shifted.

    ``HAT`` is the dtype to which it is rounded before the weight multiplies it. Where it is
    rounded, the weight with its offset is too, to the weight's own dtype ``WEIGHT``.
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
def _inside(in_rows, cols, EXACT: tl.constexpr, N: tl.constexpr):
    """A tile's mask; ``EXACT`` tiles do not reach beyond the last column, and mask rows only."""
    if EXACT:
        return in_rows[:, None]
    else:
        return in_rows[:, None] & (cols < N)[None, :]


@triton.jit
def _forward_sum(
    x,
    bias_row,
    residual,
    z,
    seed,
    offset,
    threshold,
    x_stride,
    residual_stride,
    rows,
    first_col,
    in_rows,
    EXACT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """A tile of the sum as rounded to its dtype, stored unless ``z`` is None."""
    cols = first_col + tl.arange(0, BLOCK_N)
    mask = _inside(in_rows, cols, EXACT, N)
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
        tl.store(
            cast + place, _round(out, y.dtype.element_ty, ACC).to(cast.dtype.element_ty), mask=mask
        )


@triton.jit
def _vectors(
    vector,
    first_col,
    OFFSET: tl.constexpr,
    ACC: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A parameter, part by part; no parts if it is absent."""
    parts = ()
    if vector is not None:
        for part in tl.static_range(PARTS):
            cols = first_col + part * BLOCK_N + tl.arange(0, BLOCK_N)
            parts = parts + (_load_weight(vector, cols, N, OFFSET, ACC),)
    return parts


@triton.jit
def _forward_rows(
    x,
    bias,
    residual,
    weight,
    ln_bias,
    vectors,
    y,
    cast,
    z,
    stats,
    seed,
    offset,
    threshold,
    x_stride,
    residual_stride,
    tile,
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
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    LOADED: tl.constexpr,
):
    """Normalises a tile of whole rows in registers: mean, centred squares, output.

    ``vectors`` are the bias, the weight and the shift, part by part, where they are ``LOADED``.
    """
    biases, ws, bs = vectors
    rows = rows_of(tile, ROWS)
    in_rows = rows < M
    parts = ()
    for part in tl.static_range(PARTS):
        if LOADED and bias is not None:
            bias_row = biases[part]
        else:
            bias_row = load_row_vector(bias, part * BLOCK_N + tl.arange(0, BLOCK_N), N, ACC)
        h = _forward_sum(
            x,
            bias_row,
            residual,
            None,
            seed,
            offset,
            threshold,
            x_stride,
            residual_stride,
            rows,
            part * BLOCK_N,
            in_rows,
            (part + 1) * BLOCK_N <= N,
            SUM,
            ACC,
            N,
            BLOCK_N,
            ROWS,
            VECTOR,
        )
        parts = parts + (h,)
    if z is not None:
        # The compiler moves no load before a store, so all parts are loaded first.
        for part in tl.static_range(PARTS):
            cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
            _store_sum(
                z, parts[part], rows, cols, _inside(in_rows, cols, (part + 1) * BLOCK_N <= N, N), N
            )
    # With a second input the rows are in registers late, so the vectors are loaded before the
    # reductions if sum and vectors fit in three quarters of the 65,536 registers, counted in
    # halves. Alone, vectors would only take registers meanwhile.
    vector_halves: tl.constexpr = (
        WEIGHT.primitive_bitwidth // 16 * ((weight is not None) + (ln_bias is not None))
    )
    halves: tl.constexpr = ROWS * PARTS * BLOCK_N * (ACC.primitive_bitwidth // 16 + vector_halves)
    early: tl.constexpr = residual is not None and halves <= 3 * 32768
    if not LOADED and early:
        ws = _vectors(weight, 0, WEIGHT_OFFSET, ACC, N, BLOCK_N, PARTS)
        bs = _vectors(ln_bias, 0, 0.0, ACC, N, BLOCK_N, PARTS)
    if KIND == "layer":
        terms = parts[0]
        for part in tl.static_range(1, PARTS):
            terms += parts[part]
        mean = tl.sum(terms, axis=1) / N
        tl.store(stats + M + rows, mean, mask=in_rows)
    else:
        mean = None
    squares = tl.zeros((ROWS, BLOCK_N), ACC)
    for part in tl.static_range(PARTS):
        centred = parts[part]
        if KIND == "layer":
            mask = _inside(
                in_rows, part * BLOCK_N + tl.arange(0, BLOCK_N), (part + 1) * BLOCK_N <= N, N
            )
            # Idle lanes hold 0, not the mean: without the mask they would add its square.
            centred = tl.where(mask, centred - mean[:, None], 0.0)
        squares += centred * centred
    rstd = tl.rsqrt(tl.sum(squares, axis=1) / N + EPS)
    tl.store(stats + rows, rstd, mask=in_rows)
    if not LOADED and not early:
        ws = _vectors(weight, 0, WEIGHT_OFFSET, ACC, N, BLOCK_N, PARTS)
        bs = _vectors(ln_bias, 0, 0.0, ACC, N, BLOCK_N, PARTS)
    for part in tl.static_range(PARTS):
        cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
        w = ws[part] if weight is not None else None
        b = bs[part] if ln_bias is not None else None
        out = _affine(parts[part], mean, rstd, w, b, WEIGHT, HAT, ACC)
        _store_output(
            y, cast, out, rows, cols, _inside(in_rows, cols, (part + 1) * BLOCK_N <= N, N), N, ACC
        )


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
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
    PERSISTENT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``y = norm(z)`` with ``z = (x + bias) * keep_scale + residual``, ROWS rows at a time.

    ``stats`` receives rstd in its first M elements and, for LayerNorm, the mean in the next M;
    ``cast`` receives the output in another dtype. ``SUM`` is the sum's dtype: the sum is normalised
    as rounded to it, so that the statistics belong to what the backward reads. ``PERSISTENT``
    programs loop over several tiles: they hold the row vectors in registers and load the next rows
    ahead. A row is whole in ``PARTS`` tiles side by side, or read twice tile by tile:

        PARTS * BLOCK_N >= N   | part 0 | part 1 | part 2 |    all in registers
        else                   | BLOCK_N | BLOCK_N | ...  |    first for statistics, then for y
    """
    await_predecessor(OVERLAP)
    if seed is not None:
        seed, offset = load_seed(seed, offset)
    tiles = tl.cdiv(M, ROWS).to(tl.int32)
    if PARTS * BLOCK_N >= N:
        if PERSISTENT:
            # The parameters are loaded once per program, and not once per tile.
            vectors = (
                _vectors(bias, 0, 0.0, ACC, N, BLOCK_N, PARTS),
                _vectors(weight, 0, WEIGHT_OFFSET, ACC, N, BLOCK_N, PARTS),
                _vectors(ln_bias, 0, 0.0, ACC, N, BLOCK_N, PARTS),
            )
            for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
                _forward_rows(
                    x,
                    bias,
                    residual,
                    weight,
                    ln_bias,
                    vectors,
                    y,
                    cast,
                    z,
                    stats,
                    seed,
                    offset,
                    threshold,
                    x_stride,
                    residual_stride,
                    tile,
                    M,
                    KIND,
                    EPS,
                    WEIGHT_OFFSET,
                    WEIGHT,
                    SUM,
                    HAT,
                    ACC,
                    N,
                    BLOCK_N,
                    PARTS,
                    ROWS,
                    VECTOR,
                    True,
                )
        else:
            _forward_rows(
                x,
                bias,
                residual,
                weight,
                ln_bias,
                ((), (), ()),
                y,
                cast,
                z,
                stats,
                seed,
                offset,
                threshold,
                x_stride,
                residual_stride,
                tl.program_id(0),
                M,
                KIND,
                EPS,
                WEIGHT_OFFSET,
                WEIGHT,
                SUM,
                HAT,
                ACC,
                N,
                BLOCK_N,
                PARTS,
                ROWS,
                VECTOR,
                False,
            )
    else:
        # Wider rows are read twice, tile by tile. The mean and the squares of a tile are merged
        # into those of the tiles before it as in Chan et al. (1979).
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            rows = rows_of(tile, ROWS)
            in_rows = rows < M
            # Of the columns before ``start``: their mean, and their squares about it.
            mean = tl.zeros((ROWS,), ACC)
            squares = tl.zeros((ROWS,), ACC)
            for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
                cols = start + tl.arange(0, BLOCK_N)
                mask = in_rows[:, None] & (cols < N)[None, :]
                bias_row = load_row_vector(bias, cols, N, ACC)
                h = _forward_sum(
                    x,
                    bias_row,
                    residual,
                    z,
                    seed,
                    offset,
                    threshold,
                    x_stride,
                    residual_stride,
                    rows,
                    start,
                    in_rows,
                    False,
                    SUM,
                    ACC,
                    N,
                    BLOCK_N,
                    ROWS,
                    VECTOR,
                )
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
            # The second pass loads elements of z that other threads have stored.
            tl.debug_barrier()
            for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
                cols = start + tl.arange(0, BLOCK_N)
                mask = in_rows[:, None] & (cols < N)[None, :]
                # A sum that is not rounded is computed again, whether z is stored or not. The
                # compiler contracts a recomputed sum with the operations that follow, and not a
                # loaded one: training and inference would differ in their last bits.
                if z is not None and SUM != ACC:
                    h = tl.load(z + rows[:, None] * N + cols[None, :], mask=mask, other=0.0).to(ACC)
                else:
                    bias_row = load_row_vector(bias, cols, N, ACC)
                    h = _forward_sum(
                        x,
                        bias_row,
                        residual,
                        None,
                        seed,
                        offset,
                        threshold,
                        x_stride,
                        residual_stride,
                        rows,
                        start,
                        in_rows,
                        False,
                        SUM,
                        ACC,
                        N,
                        BLOCK_N,
                        ROWS,
                        VECTOR,
                    )
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
    """``y = (x + bias) * keep_scale + residual``, the forward without a norm, in any tiles."""
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
def _load_rows(
    dy,
    dcast,
    kept,
    bias,
    residual,
    stats,
    seed,
    offset,
    threshold,
    dy_stride,
    dcast_stride,
    kept_stride,
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
    """The gradients and the saved values of rows, part by part, and their statistics.

    The gradient is that of the output plus that of its low-precision copy. The statistics are rstd
    and mean; RMSNorm has no mean, and returns rstd twice.
    """
    gradients, rest = (), ()
    for part in tl.static_range(PARTS):
        first = first_col + part * BLOCK_N
        cols = first + tl.arange(0, BLOCK_N)
        mask = _inside(in_rows, cols, part < exact, N)
        g = tl.load(dy + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0)
        if dcast is not None:
            # Output and copy hold the same values, whose gradient is the sum.
            copy = tl.load(
                dcast + rows[:, None] * dcast_stride + cols[None, :], mask=mask, other=0.0
            )
            g = g.to(ACC) + copy.to(ACC)
        gradients = gradients + (g,)
        if kept is not None:
            if SAVED == "inputs":
                bias_row = load_row_vector(bias, cols, N, ACC)
                scale = keep_scale(
                    seed, offset, threshold, rows, first, N, ROWS, BLOCK_N, VECTOR, ACC
                )
                k = _load_sum(
                    kept,
                    bias_row,
                    residual,
                    scale,
                    kept_stride,
                    residual_stride,
                    rows,
                    cols,
                    mask,
                    ACC,
                ).to(SUM)
            else:
                k = tl.load(
                    kept + rows[:, None] * kept_stride + cols[None, :], mask=mask, other=0.0
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
    """Normalised rows, from the saved sum or output."""
    hat = k.to(ACC)
    if SAVED == "output":
        if b is not None:
            hat -= b
        if w is not None:
            # A weight of zero has lost the normalised value; it gets no gradient, as documented.
            hat = tl.where(w == 0.0, 0.0, hat / w)
    else:
        if KIND == "layer":
            hat -= mean[:, None]
        hat *= rstd[:, None]
    return hat


@triton.jit
def _sums(along_terms, total_terms, TOGETHER: tl.constexpr):
    """Sums both terms over the columns of rows.

    ``TOGETHER`` makes them one reduction of pairs: half the barriers, for a few more registers.
    """
    if TOGETHER:
        return tl.split(tl.sum(tl.join(along_terms, total_terms), axis=1))
    else:
        return tl.sum(along_terms, axis=1), tl.sum(total_terms, axis=1)


@triton.jit
def _post(
    moments, along, total, column, rows, in_rows, M, KIND: tl.constexpr, EXCHANGE: tl.constexpr
):
    """Stores the sums over this program's columns for the programs of the rows' other columns.

    The layout of ``moments``, by program (p0, p1, ...), each part of M elements, one for a row:

        "wait"    | p0: total << 32 OR along | p1: ...                     |    64-bit words
        "post"    | p0: along   | p0: total  | p1: along   | p1: total ... |    of dtype ACC
    """
    if EXCHANGE == "wait":
        # Both sums are one word, so that one atomic store publishes them. The buffer is zero
        # before, and a word counts as written when it is not zero: sums of zero are written as -0.
        word = along.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        if KIND == "layer":
            word |= total.to(tl.int32, bitcast=True).to(tl.int64) << 32
        word = tl.where(word == 0, 0x80000000, word)
        tl.atomic_xchg(moments + column * M + rows, word, mask=in_rows, sem="relaxed")
    else:
        tl.store(moments + 2 * column * M + rows, along, mask=in_rows)
        if KIND == "layer":
            tl.store(moments + (2 * column + 1) * M + rows, total, mask=in_rows)


@triton.jit
def _await_words(places, there):
    """The words at ``places``, once they are not zero; 0 where ``there`` is False.

    It is PTX because a loop in Triton would end the pipelining of the loop around it.

    After 2^27 loads, of some 0.6 µs each and so a minute or more, the kernel ends in a trap: the
    launch raises an error and does not hang.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .pred asked, absent, late; .reg .u32 loads; "
        "setp.ne.s32 asked, $2, 0; mov.b64 $0, 0; mov.u32 loads, 0; "
        "WAIT: @asked ld.relaxed.gpu.global.b64 $0, [$1]; "
        "setp.eq.and.s64 absent, $0, 0, asked; add.u32 loads, loads, 1; "
        "setp.gt.u32 late, loads, 134217728; @late trap; @absent bra WAIT; }",
        "=&l,l,r",
        [places, there.to(tl.int32)],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _collect(
    moments, rows, in_rows, M, KIND: tl.constexpr, EXCHANGE: tl.constexpr, COLUMNS: tl.constexpr
):
    """The sums over all columns, added in the order of the programs.

    The second is used by LayerNorm only.
    """
    column = tl.arange(0, triton.next_power_of_2(COLUMNS))[:, None]
    there = (column < COLUMNS) & in_rows[None, :]
    if EXCHANGE == "wait":
        word = _await_words(moments + column * M + rows[None, :], there)
        along = word.to(tl.int32).to(tl.float32, bitcast=True)
        total = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        place = 2 * column * M + rows[None, :]
        along = tl.load(moments + place, mask=there, other=0.0)
        total = along
        if KIND == "layer":
            total = tl.load(moments + M + place, mask=there, other=0.0)
    return tl.sum(along, axis=0), tl.sum(total, axis=0)


@triton.jit
def _zeros(vector, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, ACC: tl.constexpr):
    """Zeros for a gradient's column sums, part by part; no parts if it is absent."""
    parts = ()
    if vector is not None:
        for _ in tl.static_range(PARTS):
            parts = parts + (tl.zeros((BLOCK_N,), ACC),)
    return parts


@triton.jit
def _nothing(
    dy,
    dcast,
    kept,
    SAVED: tl.constexpr,
    SUM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Zeros of the shapes and dtypes that `_load_rows` returns, for the first step of a loop."""
    gradients, rest = (), ()
    for _ in tl.static_range(PARTS):
        gradients = gradients + (
            tl.zeros((ROWS, BLOCK_N), dy.dtype.element_ty if dcast is None else ACC),
        )
        rest = rest + (
            tl.zeros((ROWS, BLOCK_N), SUM if SAVED == "inputs" else kept.dtype.element_ty),
        )
    return gradients, rest


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
    """Stores column sums: the gradient if one program has all rows, else a partial sum.

    ``partials`` is (programs, slots, N): a row of N per program and parameter gradient.
    """
    if gradient is not None:
        for part in tl.static_range(PARTS):
            cols = first_col + part * BLOCK_N + tl.arange(0, BLOCK_N)
            if tl.num_programs(1) == 1:
                tl.store(gradient + cols, sums[part].to(gradient.dtype.element_ty), mask=cols < N)
            else:
                row = tl.program_id(1).to(tl.int64) * slots + slot
                tl.store(partials + row * N + cols, sums[part], mask=cols < N)


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
    stores them once, and loads the next rows ahead: by the compiler's pipeline, or, where elements
    are loaded one at a time, in registers (``CARRIED``).

    Wider rows are shared by several programs, which need each other's sums over columns for the row
    means. ``EXCHANGE`` is how they get them. "wait": a program stores its sums in ``moments``,
    which is zero before, and waits for the others'. These are its neighbours in the grid, so that
    they start at about the same time. "post": it stores its sums and ends; a second launch, with
    "read", loads all of them. With "wait" a step is one tile ahead with its sums:

        step      store sums of tile    load sums of, and finish, tile
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
    # The number of parts, from the first, that are exact in every program.
    exact: tl.constexpr = (
        N // BLOCK_N if columns == 1 else PARTS if columns * PARTS * BLOCK_N == N else 0
    )
    first_col = tl.program_id(0) * (PARTS * BLOCK_N)
    ws = _vectors(weight, first_col, WEIGHT_OFFSET, ACC, N, BLOCK_N, PARTS)
    bs = _vectors(ln_bias, first_col, 0.0, ACC, N, BLOCK_N, PARTS)
    dbias_sums = _zeros(dbias, BLOCK_N, PARTS, ACC)
    dweight_sums = _zeros(dweight, BLOCK_N, PARTS, ACC)
    dln_bias_sums = _zeros(dln_bias, BLOCK_N, PARTS, ACC)

    normalizes: tl.constexpr = dy is not None and KIND != "none"
    ahead = 0
    if EXCHANGE == "wait":
        # One more step, as a program finishes a tile of rows after it has stored the sums of the
        # next: the other programs' sums arrive meanwhile.
        ahead = tl.num_programs(1)
        late_rstd, late_mean = tl.zeros((ROWS,), ACC), tl.zeros((ROWS,), ACC)
        late_gradients, late_kept = _nothing(dy, dcast, kept, SAVED, SUM, ROWS, BLOCK_N, PARTS, ACC)

    # With CARRIED a step loads the rows of the next step, and computes with those that the step
    # before has loaded. The first rows are loaded here.
    if CARRIED:
        first_rows = rows_of(tiles - 1 - tl.program_id(1), ROWS)
        next_gradients, next_rest, next_rstd, next_mean = _load_rows(
            dy,
            dcast,
            kept,
            bias,
            residual,
            stats,
            seed,
            offset,
            threshold,
            dy_stride,
            dcast_stride,
            kept_stride,
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
            # The mask is drawn while the rows are loaded. The masks of several tiles would take too
            # many registers, and are drawn one by one below.
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
                kept,
                bias,
                residual,
                stats,
                seed,
                offset,
                threshold,
                dy_stride,
                dcast_stride,
                kept_stride,
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
                    w = ws[part] if weight is not None else None
                    b = bs[part] if ln_bias is not None else None
                    dz = gradients[part].to(ACC)
                    if weight is not None:
                        dz *= w
                    along_term = dz * _hat_of(rest[part], mean, rstd, w, b, KIND, SAVED, ACC)
                    if part == 0:
                        along_terms, total_terms = along_term, dz
                    else:
                        along_terms += along_term
                        total_terms += dz
                # Not together in programs that share rows: these wait for one another rather than
                # for barriers, and the pairs cost registers.
                along, total = _sums(
                    along_terms, total_terms, KIND == "layer" and EXCHANGE == "none"
                )
            if EXCHANGE == "wait" or EXCHANGE == "post":
                _post(moments, along, total, tl.program_id(0), rows, in_rows, M, KIND, EXCHANGE)
            if EXCHANGE == "wait":
                # From here on the step is about the tile before: swap it with the current one.
                rows = rows_of(tiles - 1 - step + ahead, ROWS)
                in_rows = rows < M
                gradients, rest, late_gradients, late_kept = (
                    late_gradients,
                    late_kept,
                    gradients,
                    rest,
                )
                rstd, mean, late_rstd, late_mean = late_rstd, late_mean, rstd, mean
            if EXCHANGE == "wait" or EXCHANGE == "read":
                along, total = _collect(moments, rows, in_rows, M, KIND, EXCHANGE, columns)
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
                        w = ws[part] if weight is not None else None
                        b = bs[part] if ln_bias is not None else None
                        hat = _hat_of(rest[part], mean, rstd, w, b, KIND, SAVED, ACC)
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
                                # Exactly zero. A subtraction would be contracted with the product
                                # dz, unrounded, and leave the rounding error of total.
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

    # The slots of a program in partials are those gradients that are computed, in this order.
    _store_gradient(dbias, partials, dbias_sums, 0, slots, first_col, N, BLOCK_N, PARTS)
    _store_gradient(
        dweight, partials, dweight_sums, dbias is not None, slots, first_col, N, BLOCK_N, PARTS
    )
    _store_gradient(
        dln_bias, partials, dln_bias_sums, slots - 1, slots, first_col, N, BLOCK_N, PARTS
    )
