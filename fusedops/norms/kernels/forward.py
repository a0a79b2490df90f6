"""The norms' forward kernel, and the kernel for ``dropout(x + bias) + residual`` alone."""

import triton
import triton.language as tl

from ...core.device import (
    await_predecessor,
    keep_scale,
    load_row_vector,
    load_seed,
    place_along_rows,
    rows_of,
)
from .tiles import _inside, _load_sum, _load_weight, _vectors


@triton.jit
def _store_sum(z, value, rows, cols, mask, N: tl.constexpr):
    """Stores a tile of the sum, unless ``z`` is None."""
    if z is not None:
        tl.store(z + rows[:, None] * N + cols[None, :], value.to(z.dtype.element_ty), mask=mask)


@triton.jit
def _round(value, DTYPE: tl.constexpr, ACC: tl.constexpr):
    """Returns the value rounded to ``DTYPE`` and converted back to ``ACC``."""
    return value.to(DTYPE).to(ACC) if DTYPE != ACC else value


# `reference.NormRule.hat_dtype` documents where modules of Hugging Face round. The dtypes are
# constants, so that `_round` compiles to nothing where nothing is rounded.
@triton.jit
def _affine(z, mean, rstd, w, b, WEIGHT: tl.constexpr, HAT: tl.constexpr, ACC: tl.constexpr):
    """Returns the tile normalised, scaled by ``w`` and shifted by ``b``.

    The normalised tile is rounded to ``HAT`` before the weight multiplies it. If ``HAT`` is not
    ``ACC``, the weight plus its offset is rounded too, to the weight's own dtype ``WEIGHT``.
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
    STORES: tl.constexpr = True,
):
    """Returns a tile of the sum, rounded to ``SUM``; ``STORES`` it unless ``z`` is None."""
    cols = first_col + tl.arange(0, BLOCK_N)
    mask = _inside(in_rows, cols, EXACT, N)
    # The mask depends on seed, row and column only: a second pass over the row draws the same one.
    scale = keep_scale(seed, offset, threshold, rows, first_col, N, ROWS, BLOCK_N, VECTOR, ACC)
    h = _load_sum(x, bias_row, residual, scale, x_stride, residual_stride, rows, cols, mask, ACC)
    if STORES:
        _store_sum(z, h, rows, cols, mask, N)
    # The backward reads the stored, rounded sum, so the statistics must be those of the rounded
    # sum.
    return _round(h, SUM, ACC)


@triton.jit
def _store_output(y, cast, out, rows, cols, mask, N: tl.constexpr, ACC: tl.constexpr):
    """Stores the output, and the low-precision copy: the rounded output, rounded once more."""
    # Outputs are contiguous: their row stride is N.
    place = rows[:, None] * N + cols[None, :]
    tl.store(y + place, out.to(y.dtype.element_ty), mask=mask)
    if cast is not None:
        tl.store(
            cast + place, _round(out, y.dtype.element_ty, ACC).to(cast.dtype.element_ty), mask=mask
        )


# A row of three parts in one program. An arrow is an exchange between threads; there is one for
# each statistic, whatever the number of parts:
#
#     x          | part 0 | part 1 | part 2 |    all loads, before the first store
#     h          |   h0   |   h1   |   h2   |    (x + bias) * scale + residual, rounded to SUM
#     mean       h0 + h1 + h2             -->    sum / N
#     squares    (h0 - mean)² + ...       -->    sum / N, of h in registers
#     y          |   y0   |   y1   |   y2   |    all stores
#
# The squares are centred, so the mean is computed first. ``E[h²] - E[h]²`` would save an exchange,
# but cancels where a row's mean is large compared with its deviation. Statistics are in ``ACC``:
# fp32, for fp64 tensors fp64.
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

    ``vectors`` are bias, weight and ln_bias, each a tuple of parts. Unless ``LOADED``, they are
    empty, and the parameters are loaded here.
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
    # Weight and ln_bias are used after the reductions. With a residual they are loaded before them,
    # while the program still waits for the rows of two inputs. Without a residual an early load
    # only takes registers. Nor are they loaded early where registers would spill: sum and vectors
    # may take three quarters of a multiprocessor's 65,536 registers. The count is in halves of a
    # register: an element of the sum in fp32 takes two, an element of a vector in 16 bits one.
    vector_halves: tl.constexpr = (
        WEIGHT.primitive_bitwidth // 16 * ((weight is not None) + (ln_bias is not None))
    )
    halves: tl.constexpr = ROWS * PARTS * BLOCK_N * (ACC.primitive_bitwidth // 16 + vector_halves)
    early: tl.constexpr = residual is not None and halves <= 3 * 32768
    if not LOADED and early:
        ws = _vectors(weight, 0, WEIGHT_OFFSET, ACC, N, BLOCK_N, PARTS)
        bs = _vectors(ln_bias, 0, 0.0, ACC, N, BLOCK_N, PARTS)
    if KIND == "layer":
        # Each thread adds up its parts first, so that a row needs only one reduction.
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


# Triton specialises on integers that are 1 or multiples of 16. Without `do_not_specialize` such
# numbers of rows, seeds and thresholds would compile kernels of their own.
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
    """Computes ``y = norm(z)`` for ``z = (x + bias) * keep_scale + residual``, by tiles of rows.

    ``stats`` receives rstd in its first M elements and, for LayerNorm, the mean in the next M.
    ``cast`` receives the output in another dtype. The sum is rounded to its dtype ``SUM`` before it
    is normalised, so that the statistics are those of the tensor that the backward reads.
    ``PERSISTENT`` programs loop over several tiles: they hold the parameters in registers and load
    the next rows ahead. A program holds a row whole, in ``PARTS`` tiles side by side, or reads it
    twice, tile by tile:

        PARTS * BLOCK_N >= N   | part 0 | part 1 | part 2 |    all in registers
        else                   | BLOCK_N | BLOCK_N | ...  |    first for statistics, then for y
    """
    # The first statement, before any load: see `await_predecessor`. ``OVERLAP`` is off in
    # persistent kernels.
    await_predecessor(OVERLAP)
    if seed is not None:
        seed, offset = load_seed(seed, offset)
    tiles = tl.cdiv(M, ROWS).to(tl.int32)
    if PARTS * BLOCK_N >= N:
        if PERSISTENT:
            # The parameters are loaded once per program, not once per tile. With ``num_stages`` the
            # compiler loads the rows of later tiles before it computes with the current ones.
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
            # The mean of the columns before ``start``, and the sum of their squares about it.
            mean = tl.zeros((ROWS,), ACC)
            squares = tl.zeros((ROWS,), ACC)
            for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
                cols = start + tl.arange(0, BLOCK_N)
                mask = in_rows[:, None] & (cols < N)[None, :]
                bias_row = load_row_vector(bias, cols, N, ACC)
                # Before the second pass the residual must not change: it may have z's memory.
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
                    STORES=SUM != ACC,
                )
                if KIND == "layer":
                    # Two sets of n and m numbers have the means a and b, and the sums S and T of
                    # squares about their means. The union has:
                    #
                    #     mean    = a + (b - a) m / (n + m)
                    #     squares = S + T + (b - a)² n m / (n + m)
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
                # A rounded sum is loaded if it was stored, and else computed again, with the same
                # bits. An unrounded sum is always computed again, and stored now: the compiler
                # contracts a computed sum with the operations that follow, but not a loaded one.
                # Training stores the sum and inference does not, so their last bits would differ if
                # one loaded it.
                if z is not None and SUM != ACC:
                    h = tl.load(z + rows[:, None] * N + cols[None, :], mask=mask, other=0.0).to(ACC)
                else:
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
                w = _load_weight(weight, cols, N, WEIGHT_OFFSET, ACC)
                b = load_row_vector(ln_bias, cols, N, ACC)
                out = _affine(h, mean if KIND == "layer" else None, rstd, w, b, WEIGHT, HAT, ACC)
                _store_output(y, cast, out, rows, cols, mask, N, ACC)


# Nothing is summed over a row, so a tile need not hold a whole row. The grid is (tiles of columns,
# tiles of rows). The dropout mask does not depend on the grid.
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
    """Computes ``y = (x + bias) * keep_scale + residual``, the forward without a norm."""
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
