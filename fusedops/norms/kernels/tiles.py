"""Device functions of the norms' forward and backward: parameters and tiles of the sum."""

import triton
import triton.language as tl

from ...core.device import load_row_vector


@triton.jit
def _load_weight(weight, cols, N: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, ACC: tl.constexpr):
    """The weight with its offset; None if it is absent."""
    if weight is not None:
        w = load_row_vector(weight, cols, N, ACC)
        # Gemma's modules store the weight less one. The offset is added in ``ACC``: in 16 bits the
        # sum would be rounded.
        if WEIGHT_OFFSET != 0.0:
            w += WEIGHT_OFFSET
        return w


# A program holds a row in one tile, or in several, its *parts*: a tuple of tensors. Triton's
# tensors have sides that are powers of two, and many hidden sizes are none. 6144 columns:
#
#     one part      |                8192 lanes, a quarter idle                 |
#     three parts   |    2048 lanes    |    2048 lanes    |    2048 lanes    |
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
def _vector_part(
    vector,
    parts,
    part: tl.constexpr,
    first_col,
    OFFSET: tl.constexpr,
    ACC: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HOLDS: tl.constexpr,
):
    """A part of a parameter: one of those that are held, or loaded again for each row."""
    if vector is not None:
        if HOLDS:
            value = parts[part]
        else:
            cols = first_col + part * BLOCK_N + tl.arange(0, BLOCK_N)
            value = _load_weight(vector, cols, N, OFFSET, ACC)
        return value


# The operations are those of ``dropout(x + bias) + residual``, without a rounding in between. To
# drop is to multiply by 0: a dropped NaN stays NaN, as in `F.dropout`. Lanes beyond the last column
# are 0 in all operands, so that they add nothing to a sum over columns.
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
def _inside(in_rows, cols, EXACT: tl.constexpr, N: tl.constexpr):
    """A tile's mask; ``EXACT`` tiles do not reach beyond the last column, and mask rows only."""
    if EXACT:
        # Only the last part of a row can have idle lanes: the others need no comparison of columns.
        return in_rows[:, None]
    else:
        return in_rows[:, None] & (cols < N)[None, :]
