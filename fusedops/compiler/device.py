"""Device functions of generated kernels, in addition to those of `fusedops.core.device`."""

import triton
import triton.language as tl


@triton.jit
def inside_row(cols, FULL: tl.constexpr, N: tl.constexpr):
    """Return which columns of a tile exist: all of a ``FULL`` one, by a constant."""
    if FULL:
        return tl.full(cols.shape, True, tl.int1)
    else:
        return cols < N


@triton.jit
def which_exist(rows, M, ALL: tl.constexpr):
    """Return which rows of a tile exist: all, by a constant, if ``ALL`` do."""
    if ALL:
        return tl.full(rows.shape, True, tl.int1)
    else:
        return rows < M


@triton.jit
def rows_of_slices(tile, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the index of the row that each row of a tile has, in int64.

    A tile of BLOCK_K slices has as many rows for each row of the slices, one of each slice in turn.
    """
    first = tl.full((ROWS,), tile, tl.int64) * (ROWS // BLOCK_K)
    return first + tl.arange(0, ROWS) // BLOCK_K


@triton.jit
def sums_of_slices(tile, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the sums over the rows of each slice of a tile: see `rows_of_slices`.

    For one slice, the result has one row. For several, it has the rows of the tile: row i has the
    sums of slice ``i % BLOCK_K``.
    """
    if BLOCK_K == 1:
        return tl.sum(tile, axis=0, keep_dims=True)
    else:
        rows: tl.constexpr = ROWS // BLOCK_K
        shape: tl.constexpr = (rows, BLOCK_K, tile.shape[1])
        sums = tl.sum(tl.reshape(tile, shape), axis=0, keep_dims=True)
        return tl.reshape(tl.broadcast_to(sums, shape), tile.shape)


@triton.jit
def split_pairs(tile):
    """Return the even and the odd columns of a tile, each of half as many."""
    return tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1] // 2, 2)))


@triton.jit
def join_pairs(even, odd, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the tile with these even and odd columns, ``COLUMNS`` of each."""
    even = tl.broadcast_to(even, (ROWS, COLUMNS))
    odd = tl.broadcast_to(odd, (ROWS, COLUMNS))
    return tl.reshape(tl.join(even, odd), (ROWS, 2 * COLUMNS))


@triton.jit
def existing_rows(value, in_rows, ALL: tl.constexpr):
    """Return a tile with zeros in rows that do not exist, unless ``ALL`` do.

    Rows beyond the last are loaded as zeros, of which a value may be anything.
    """
    if not ALL:
        value = tl.where(in_rows, value, 0)
    return value


@triton.jit
def sum_of_rows(value, in_rows, ALL: tl.constexpr):
    """Return the sum of a tile over its rows: over those that exist, unless ``ALL`` do."""
    return tl.sum(existing_rows(value, in_rows, ALL), axis=0, keep_dims=True)


@triton.jit
def row_of_table(index, limit, in_rows):
    """Return the row of a table for each row of a tile: what ``index`` points to.

    An index must be at least 0 and less than ``limit``. In kernels that check indices an assertion
    fails otherwise: see `loading`. In the others it stands for row 0.
    """
    row = tl.load(index, mask=in_rows, other=0).to(tl.int64)
    exists = (row >= 0) & (row < limit)
    tl.device_assert(exists, "an index of an embedding is out of range")
    return tl.where(exists, row, 0)


@triton.jit
def log1p(x):
    """Return the logarithm of 1 + x, exact for small x (Kahan).

    The rounding error of 1 + x is divided out.
    """
    u = 1.0 + x
    return tl.where((u == 1.0) | (u == float("inf")), x, tl.log(u) * (x / (u - 1.0)))


@triton.jit
def fmod(x, y):
    """Return C's ``fmod``, for quotients that have no more bits than the dtype.

    The GPU's remainder divides with rounding. Where that gives the next whole number, the remainder
    has the other sign, and is one divisor off.
    """
    rest = x % y
    passed = (rest != 0.0) & ((rest < 0.0) != (x < 0.0))
    rest = tl.where(passed, rest + tl.where(x < 0.0, -tl.abs(y), tl.abs(y)), rest)
    # A remainder of zero has the sign of x.
    return tl.where(rest == 0.0, x * 0.0, rest)


@triton.jit
def expm1(x):
    """Return exp(x) - 1, exact for small x (Kahan)."""
    u = tl.exp(x)
    near = (u - 1.0) * (x / tl.log(u))
    return tl.where(u == 1.0, x, tl.where(tl.abs(x) > 0.7, u - 1.0, near))


@triton.jit
def div_rn(x, y):
    """Return the quotient, correctly rounded; that of ``/`` in fp32 is off by up to two units."""
    if x.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)


@triton.jit
def rint(x):
    """Return the nearest whole numbers; of two that are equally near, the even one.

    Numbers of this size and above have no digits behind the point, so a sum with it is rounded to
    a whole number.
    """
    if x.dtype == tl.float64:
        # 2**52, as a product of what fp32 holds exactly.
        whole = tl.full((1, 1), 67108864.0, tl.float64) * 67108864.0
    else:
        whole = tl.full((1, 1), 8388608.0, tl.float32)
    size = tl.abs(x)
    rounded = (size + whole) - whole
    # The product keeps the sign of a zero.
    rounded = tl.where(rounded == 0.0, x * 0.0, tl.where(x < 0.0, -rounded, rounded))
    return tl.where(size < whole, rounded, x)


@triton.jit
def _sign_of_8_bits(bits):
    """Return the sign in the bits of fp32 numbers, at the position that it has in 8 bits."""
    return (bits >> 24) & 0x80


@triton.jit
def to_e4m3(x, SATURATES: tl.constexpr, SIGNED: tl.constexpr):
    """Return numbers as float8_e4m3fn, rounded as PyTorch rounds them.

    The instruction saturates at 448, 0x7E. Without ``SATURATES`` numbers beyond 464 are NaN, 0x7F:
    they would round to 480, which the dtype does not have.

    The instruction drops the sign of a NaN. ``SIGNED`` keeps it. GPUs compute no NaN with a sign,
    so this is for numbers that were read, and takes several instructions for each.
    """
    x = x.to(tl.float32)
    if SIGNED:
        rounded = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        marks = _sign_of_8_bits(x.to(tl.int32, bitcast=True))
        if SATURATES:
            rounded |= tl.where(x == x, 0, marks).to(tl.uint8)
        else:
            rounded |= tl.where(tl.abs(x) <= 464.0, 0, marks | 1).to(tl.uint8)
        return rounded.to(tl.float8e4nv, bitcast=True)
    else:
        if not SATURATES:
            x = tl.where(tl.abs(x) <= 464.0, x, float("nan"))
        return x.to(tl.float8e4nv)


@triton.jit
def to_e5m2(x):
    """Return numbers as float8_e5m2, rounded as PyTorch rounds them.

    Numbers that would round to 65536, from 61440 on, are infinite. This is arithmetic of integers:
    the instruction saturates, and GPUs without it round twice, or to zero.
    """
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # The 21 bits that are dropped are rounded to even. The exponent's bias is 15, not 127.
    normal = (size + 0xFFFFF + ((size >> 21) & 1) - (112 << 23)) >> 21
    # Below 2**-14: a sum with 128 is rounded to a multiple of 2**-16, which its last bits count.
    total = size.to(tl.float32, bitcast=True) + 128.0
    subnormal = total.to(tl.int32, bitcast=True) - (134 << 23)
    rounded = tl.where(size < (113 << 23), subnormal, tl.minimum(normal, 0x7C))
    rounded = tl.where(size > (255 << 23), 0x7F, rounded)
    rounded |= _sign_of_8_bits(bits)
    return rounded.to(tl.uint8).to(tl.float8e5, bitcast=True)


@triton.jit
def xlogy(x, y):
    """Return ``x log(y)``: zero for a zero x, unless y is NaN."""
    return tl.where(y != y, y, tl.where(x == 0.0, 0.0, x * tl.log(y)))


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x):
    """Return the largest element of each row; NaN if the row has one, as in PyTorch."""
    return tl.reduce(x, 1, _larger, keep_dims=True)


@triton.jit
def ordinal(x):
    """Return integers that are in the order of numbers, from the least to infinity and NaN.

    These are the numbers' bits, which for negative numbers are complemented without the sign. The
    least and the largest integer belong to no number.
    """
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        index = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
        return tl.where(x == x, index, 0x7FFFFFFFFFFFFFFE)
    else:
        bits = x.to(tl.int32, bitcast=True)
        index = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        return tl.where(x == x, index, 0x7FFFFFFE)


@triton.jit
def of_ordinal(index, WIDE: tl.constexpr):
    """Return the numbers that have these ordinals, in fp64 if ``WIDE``, else in fp32."""
    if WIDE:
        bits = index ^ ((index >> 63) & 0x7FFFFFFFFFFFFFFF)
        return bits.to(tl.float64, bitcast=True)
    else:
        bits = index.to(tl.int32)
        bits ^= (bits >> 31) & 0x7FFFFFFF
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def _in_blocks(x, BLOCK: tl.constexpr):
    """Return a tile with a dimension for the columns of each block."""
    return tl.reshape(x, (x.shape[0], x.shape[1] // BLOCK, BLOCK))


@triton.jit
def block_sum(x, BLOCK: tl.constexpr):
    """Return the sum of each block of neighbouring columns."""
    return tl.sum(_in_blocks(x, BLOCK), axis=2)


@triton.jit
def block_largest(x, BLOCK: tl.constexpr):
    """Return the largest element of each block of neighbouring columns; NaN if it has one."""
    return tl.reduce(_in_blocks(x, BLOCK), 2, _larger)


@triton.jit
def block_spread(x, BLOCK: tl.constexpr):
    """Return a tile with the number of its block in each column."""
    wide = tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], BLOCK))
    return tl.reshape(wide, (x.shape[0], x.shape[1] * BLOCK))


@triton.jit
def negative_zero(ACC: tl.constexpr):
    """Return -0.0, which cannot be a constant: Triton takes every zero for the positive one."""
    return tl.full((1, 1), 0.0, ACC) * -1.0


@triton.jit
def _power_of_positive(x, y):
    """Return ``x ** y`` of positive finite numbers, in fp32 as exact as a mantissa's logarithm.

    With ``x = mantissa * 2**exponent`` the result is ``2**(y * (exponent + log2(mantissa)))``. The
    exponent is multiplied in two parts, of which the larger is exact: rounding the whole logarithm
    would cost as many units as the result has powers of two.
    """
    if x.dtype == tl.float64:
        return tl.exp(y * tl.log(x))
    else:
        # Subnormal numbers are scaled by 2**24, to have a whole mantissa.
        small = x < 1.1754943508222875e-38
        bits = tl.where(small, x * 16777216.0, x).to(tl.int32, bitcast=True)
        # In [1, 2); from the square root of two on it is halved, so that its logarithm is small.
        mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
        high = mantissa > 1.4142135
        exponent = ((bits >> 23) - 127 + tl.where(high, 1, 0) - tl.where(small, 24, 0)).to(
            tl.float32
        )
        # Beyond this the power of any number but one is zero or infinite.
        y = tl.minimum(tl.maximum(y, -1e12), 1e12)
        # y without the last 8 of its 24 bits. Its product with the exponent, an integer of at most
        # 8 bits, has no more than 24, and is exact. The rest, y - coarse, is exact too.
        coarse = (y.to(tl.int32, bitcast=True) & -256).to(tl.float32, bitcast=True)
        product = coarse * exponent
        whole = tl.floor(product + 0.5)
        rest = (product - whole) + (
            (y - coarse) * exponent + y * tl.log2(tl.where(high, mantissa * 0.5, mantissa))
        )
        more = tl.floor(rest + 0.5)
        whole = tl.minimum(tl.maximum(whole + more, -400.0), 400.0)
        # Two factors, because 2**whole alone may be out of range where the result is not.
        half = tl.floor(whole * 0.5)
        return tl.exp2(rest - more) * tl.exp2(half) * tl.exp2(whole - half)


@triton.jit
def power(x, y):
    """Return ``x ** y``, with the special cases of C's ``pow``."""
    size = tl.abs(x)
    zero, infinite = size == 0.0, size == float("inf")
    inside = _power_of_positive(tl.where(zero | infinite, 1.0, size).to(x.dtype), y)
    result = tl.where(zero, tl.where(y > 0.0, 0.0, float("inf")), inside)
    result = tl.where(infinite, tl.where(y > 0.0, float("inf"), 0.0), result)
    # Odd powers of negative numbers, and of -0.0, are negative. Powers of negative numbers with
    # fractional exponents are NaN.
    endless = tl.abs(y) == float("inf")
    is_whole = (tl.floor(y) == y) & ~endless
    is_odd = is_whole & (tl.floor(y * 0.5) * 2.0 != y)
    negative = (x < 0.0) | (zero & (1.0 / x < 0.0))
    result = tl.where(negative & is_odd, -result, result)
    result = tl.where((x < 0.0) & ~(is_whole | endless | infinite), float("nan"), result)
    result = tl.where((size == 1.0) & endless, 1.0, result)
    result = tl.where((x != x) | (y != y), float("nan"), result)
    return tl.where((x == 1.0) | (y == 0.0), 1.0, result).to(x.dtype)
