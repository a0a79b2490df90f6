"""Device functions that every family's kernels share: rows and parameters, the keep mask, activations."""

import triton
import triton.language as tl

# Seven rounds of Philox4x32 pass BigCrush (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
PHILOX_ROUNDS = tl.constexpr(7)
# A keep decision spends 16 random bits, so one Philox call of 128 bits serves eight neighbouring columns.
LANES = tl.constexpr(8)


@triton.jit
def await_predecessor(OVERLAP: tl.constexpr):
    """First statement of a kernel that, with ``OVERLAP``, is launched while its predecessor in the stream drains.

    Waits until that one is done and its stores are seen, then lets the successor be launched in turn. Any kernel may
    come before or after; the launch latency is what is saved. Not for persistent kernels: launched early, their
    programs pile up on the first multiprocessors that come free (8192x1024 fp32: 114 µs in place of 77).
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def rows_of(tile, ROWS: tl.constexpr):
    """The numbers of a tile's rows, in the width that products with strides need."""
    return tl.full((ROWS,), tile, tl.int64) * ROWS + tl.arange(0, ROWS)


@triton.jit
def load_row_vector(vector, cols, N: tl.constexpr, ACC: tl.constexpr):
    """A parameter of N elements as one row, or None where it is absent."""
    if vector is not None:
        return tl.load(vector + cols, mask=cols < N, other=0.0).to(ACC)[None, :]


@triton.jit
def load_seed(seed, offset):
    """The two 64-bit halves of the random state: given as scalars, or read from ``seed[0], seed[1]``."""
    if seed.dtype.is_ptr():
        return tl.load(seed), tl.load(seed + 1)
    else:
        return seed, offset


@triton.jit
def _philox(seed, offset, group):
    zero = (group * 0).to(tl.uint32)
    low, high = group.to(tl.uint32), (group >> 32).to(tl.uint32)
    offset_low, offset_high = zero + offset.to(tl.uint32), zero + (offset.to(tl.int64) >> 32).to(tl.uint32)
    return tl.philox(seed, low, high, offset_low, offset_high, PHILOX_ROUNDS)


@triton.jit
def _kept(word, HIGH: tl.constexpr, threshold, scale):
    bits = (word >> 16) if HIGH else (word & 0xFFFF)
    return tl.where(bits.to(tl.int32) >= threshold, scale, 0.0)


@triton.jit
def _keep_scale(
    seed,
    offset,
    threshold,
    rows,
    first_col,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VECTOR: tl.constexpr,
    ACC: tl.constexpr,
):
    """What dropout multiplies a ``(ROWS, BLOCK_N)`` tile by: one over the keep probability where kept, else 0.

    The decision for (row, column) depends on the seed, the offset and those two alone, never on the tiling: eight
    neighbouring columns share one Philox call, and each takes 16 of its 128 bits. ``VECTOR`` is how many neighbouring
    columns one thread holds, 8 or 4: with 4, two threads make the same call, which is cheaper than an exchange.
    """
    scale = 65536.0 / tl.maximum(65536 - threshold, 1).to(ACC)
    groups_per_row: tl.constexpr = (N + LANES - 1) // LANES
    if VECTOR == 8:
        slots = tl.arange(0, BLOCK_N // 8)
        group = rows[:, None] * groups_per_row + (slots + first_col // LANES)[None, :]
        w0, w1, w2, w3 = _philox(seed, offset, group)
        # The last dimension joined varies fastest: lane = 4 * (word's high bit) + 2 * (its low bit) + half.
        low0 = tl.join(_kept(w0, False, threshold, scale), _kept(w2, False, threshold, scale))
        low1 = tl.join(_kept(w1, False, threshold, scale), _kept(w3, False, threshold, scale))
        high0 = tl.join(_kept(w0, True, threshold, scale), _kept(w2, True, threshold, scale))
        high1 = tl.join(_kept(w1, True, threshold, scale), _kept(w3, True, threshold, scale))
        lanes = tl.join(tl.join(low0, low1), tl.join(high0, high1))
    else:
        slots = tl.arange(0, BLOCK_N // 4)
        group = rows[:, None] * groups_per_row + (slots // 2 + first_col // LANES)[None, :]
        w0, w1, w2, w3 = _philox(seed, offset, group)
        upper = (slots % 2 == 1)[None, :]
        even, odd = tl.where(upper, w2, w0), tl.where(upper, w3, w1)
        low = tl.join(_kept(even, False, threshold, scale), _kept(odd, False, threshold, scale))
        high = tl.join(_kept(even, True, threshold, scale), _kept(odd, True, threshold, scale))
        lanes = tl.join(low, high)
    return tl.reshape(lanes, (ROWS, BLOCK_N))


@triton.jit
def keep_scale(seed, offset, threshold, rows, first_col, N: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
               VECTOR: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """The tile's keep mask over its probability, or None where there is no dropout (``seed`` is None)."""
    if seed is not None:
        return _keep_scale(seed, offset, threshold, rows, first_col, N, ROWS, BLOCK_N, VECTOR, ACC)


# --- activations: a value and its derivative each, on tiles in the accumulator's dtype --------------------------------


@triton.jit
def identity(x):
    return x


@triton.jit
def identity_derivative(x):
    return x * 0.0 + 1.0


@triton.jit
def relu(x):
    return tl.where(x < 0.0, 0.0, x)  # NaN stays


@triton.jit
def relu_derivative(x):
    return tl.where(x <= 0.0, 0.0, 1.0).to(x.dtype)


@triton.jit
def relu_squared(x):
    return tl.where(x < 0.0, 0.0, x * x)


@triton.jit
def relu_squared_derivative(x):
    return tl.where(x < 0.0, 0.0, 2.0 * x)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def sigmoid_derivative(x):
    s = sigmoid(x)
    return s * (1.0 - s)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def silu_derivative(x):
    s = sigmoid(x)
    return s + x * s * (1.0 - s)


@triton.jit
def quick_gelu(x):
    return x / (1.0 + tl.exp(-1.702 * x))


@triton.jit
def quick_gelu_derivative(x):
    s = sigmoid(1.702 * x)
    return s + 1.702 * x * s * (1.0 - s)


@triton.jit
def tanh(x):
    far = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))
    square = x * x
    if x.dtype == tl.float64:
        # Taylor's series, exact to rounding where the other form cancels most.
        odd = -1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0)))
        return tl.where(square < 4e-4, x + x * square * odd, far)
    else:
        # Near zero, where the other form cancels: a least-maximum fit of relative error 1e-9 up to 0.55.
        odd = -0.33333316 + square * (0.13332586 + square * (-0.05385231 + square * (0.02107168 - 0.00627424 * square)))
        return tl.where(square < 0.3025, x + x * square * odd, far)


@triton.jit
def tanh_derivative(x):
    # 1 / cosh(x)^2 from exp(-2 |x|): it neither overflows nor cancels as 1 - tanh(x)^2 does, in a third of that's steps.
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    double = 1.0 + e
    r = 2.0 * tl.rsqrt(double * double)
    return e * r * r


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_derivative(x):
    return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327


@triton.jit
def gelu_tanh(x):
    # 0.5 (1 + tanh(u)) is sigmoid(2 u): one exponential, and no cancellation for negative x.
    return x / (1.0 + tl.exp(x * (-1.5957691216057308 - 0.07135481282553484 * x * x)))


@triton.jit
def gelu_tanh_derivative(x):
    square = x * x
    s = 1.0 / (1.0 + tl.exp(x * (-1.5957691216057308 - 0.07135481282553484 * square)))
    return s + x * s * (1.0 - s) * (1.5957691216057308 + 0.21406443847660453 * square)
