"""Device functions of the norms' forward and backward: parameters and tiles of the sum."""

import triton
import triton.language as tl

from ...core.device import load_row_vector


@triton.jit
def _load_weight(weight, cols, N: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, ACC: tl.constexpr):
    """Returns the weight plus its offset; None if it is absent."""
    if weight is not None:
        w = load_row_vector(weight, cols, N, ACC)
        # Gemma's modules store the weight less one. The offset is added in ``ACC``: in 16 bits the
        # sum would be rounded.
        if WEIGHT_OFFSET != 0.0:
            w += WEIGHT_OFFSET
        return w


# A program holds a row in one tile or in several *parts*, a tuple of tensors. The sides of Triton's
# tensors are powers of two, which many hidden sizes are not. For 6144 columns:
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
    """Returns a parameter as a tuple of parts; an empty tuple if it is absent."""
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
    """Returns a part of a parameter: from registers if it ``HOLDS`` there, else loaded again."""
    if vector is not None:
        if HOLDS:
            value = parts[part]
        else:
            cols = first_col + part * BLOCK_N + tl.arange(0, BLOCK_N)
            value = _load_weight(vector, cols, N, OFFSET, ACC)
        return value


# This computes ``dropout(x + bias) + residual`` without a rounding in between. Dropping multiplies
# by 0: a dropped NaN stays NaN, as in `F.dropout`. Lanes beyond the last column
# are 0 in all operands, so that they add nothing to a sum over columns.
@triton.jit
def _load_sum(
    x, bias_row, residual, scale, x_stride, residual_stride, rows, cols, mask, ACC: tl.constexpr
):
    """Returns ``(x + bias) * scale + residual`` for one tile, unrounded."""
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
    """Returns a tile's mask. ``EXACT`` tiles end before column N, and need a mask of rows only."""
    if EXACT:
        # Only the last part of a row can have idle lanes, so other parts compare no columns.
        return in_rows[:, None]
    else:
        return in_rows[:, None] & (cols < N)[None, :]
