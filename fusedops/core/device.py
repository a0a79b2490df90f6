"""Device functions that all families' kernels share: for rows, the keep mask and activations."""

import triton
import triton.language as tl

# Seven rounds of Philox4x32 pass BigCrush (Salmon et al. 2011, "Parallel random numbers: as easy as
# 1, 2, 3").
PHILOX_ROUNDS = tl.constexpr(7)
# A keep decision uses 16 random bits, so one Philox call of 128 bits is enough for a group of eight
# adjacent columns:
#
#     word          w0            w1            w2            w3
#     half      low    high   low    high   low    high   low    high
#     column     0      1      2      3      4      5      6      7
LANES = tl.constexpr(8)


@triton.jit
def await_predecessor(OVERLAP: tl.constexpr):
    """Waits until the predecessor in the stream has ended, and lets the successor be launched.

    It is the first statement of a kernel. With ``OVERLAP`` the kernel is launched before its
    predecessor ends, which hides the launch latency. Any kernels may precede and follow. After this
    statement the predecessor's stores are visible. Persistent kernels are not launched early: all
    their programs would run on the multiprocessors that are free first (8192x1024 fp32: 114 µs
    instead of 77).
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def place_along_rows():
    """Returns the index of this program along the rows, and the number of programs along them.

    Axis 0 of the grid is for columns, or for the groups of slices in the kernels of
    `fusedops.slices`. So programs that run at the same time access adjacent memory: with the axes
    swapped, a gated unit's forward takes 131 µs, not 125 (8192x11008 bf16).

    Axis 1 is limited to 65535 programs. `launch.Variant` folds longer grids onto axis 2; then the
    last programs may have no rows.
    """
    index = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    return index, tl.num_programs(1) * tl.num_programs(2)


@triton.jit
def rows_of(tile, ROWS: tl.constexpr):
    """Returns the indices of a tile's rows, in int64, so that products with strides fit."""
    return tl.full((ROWS,), tile, tl.int64) * ROWS + tl.arange(0, ROWS)


@triton.jit
def load_row_vector(vector, cols, N: tl.constexpr, ACC: tl.constexpr):
    """Loads a parameter of N elements, and returns it as one row; None if it is absent."""
    if vector is not None:
        return tl.load(vector + cols, mask=cols < N, other=0.0).to(ACC)[None, :]


@triton.jit
def load_seed(seed, offset):
    """Returns the random state: ``seed_words``, a tuple that begins with the seed, and the offset.

    The kernel's arguments ``seed`` and ``offset`` have three forms (`launch.SEED_TYPES`):

        arguments           seed_words      returned offset
        number, number      (seed,)         the argument
        pointer, None       (seed,)         read from memory
        pointer, pointer    eight numbers   read from memory

    In the third form, which is that of a shard, both pointers are the same. In memory, the numbers
    that locate the shard (`sharding.numbers`) follow the offset. In ``seed_words`` they follow the
    seed:

        memory        seed  offset  base  outer  outer_stride  inner  inner_stride  groups  first
        seed_words    [0]           [1]   [2]    [3]           [4]    [5]           [6]     [7]
    """
    if seed.dtype.is_ptr():
        seed_words = (tl.load(seed),)
        if offset is not None:
            for i in tl.static_range(2, 9):
                seed_words = seed_words + (tl.load(seed + i),)  # noqa: RUF005
        return seed_words, tl.load(seed + 1)
    else:
        return (seed,), offset


@triton.jit
def _global_rows(rows, seed_words):
    """Returns the indices of a shard's rows in the whole tensor.

    `sharding.numbers` has the formula; `load_seed` has the indices of its terms in ``seed_words``.
    """
    within = rows % seed_words[2]
    return (
        seed_words[1]
        + (rows // seed_words[2]) * seed_words[3]
        + (within // seed_words[4]) * seed_words[5]
        + within % seed_words[4]
    )


# The counter of Philox is the index of a group of eight columns in the whole tensor. So a tile can
# compute the counters of its elements from their position alone. With 20 columns:
#
#     row 0    group 0: columns 0 to 7    group 1: 8 to 15    group 2: 16 to 19, half unused
#     row 1    group 3                    group 4             group 5
#
# On a shard, indices are also those in the whole tensor, so that ranks draw the mask that one
# process would draw.
@triton.jit
def _groups(rows, seed_words, groups_in_row, N):
    """Returns the indices of a tile's groups of columns in the whole tensor.

    ``groups_in_row`` are their indices in a row of this shard.
    """
    if len(seed_words) > 1:
        first = _global_rows(rows, seed_words) * seed_words[6] + seed_words[7]
        return first[:, None] + groups_in_row[None, :]
    else:
        return rows[:, None] * ((N + LANES - 1) // LANES) + groups_in_row[None, :]


@triton.jit
def _philox(seed, offset, group):
    """Returns the four words of Philox4x32.

    It computes the high and the low word of a product in one instruction, ``tl.philox`` in two.
    """
    low, high = group.to(tl.uint32), (group >> 32).to(tl.uint32)
    zero = (group * 0).to(tl.uint32)
    c0, c1, c2, c3 = (
        low,
        high,
        zero + offset.to(tl.uint32),
        zero + (offset.to(tl.int64) >> 32).to(tl.uint32),
    )
    key = seed.to(tl.uint64)
    key0, key1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    for _ in tl.static_range(PHILOX_ROUNDS):
        product0, product2 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        high0, high2 = (product0 >> 32).to(tl.uint32), (product2 >> 32).to(tl.uint32)
        c0, c2 = high2 ^ c1 ^ key0, high0 ^ c3 ^ key1
        c1, c3 = product2.to(tl.uint32), product0.to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _keep_factor(bits, threshold, scale):
    """Returns an element's factor from 16 random bits: 0 if it is dropped, else ``scale``."""
    return tl.where(bits.to(tl.int32) >= threshold, scale, 0.0)


@triton.jit
def _low_factor(word, threshold, scale):
    """Returns the factor that the low half of a random word determines."""
    return _keep_factor(word & 0xFFFF, threshold, scale)


@triton.jit
def _high_factor(word, threshold, scale):
    """Returns the factor that the high half of a random word determines."""
    return _keep_factor(word >> 16, threshold, scale)


# The columns of neighbouring threads, and the calls of Philox for their bits:
#
#     VECTOR 8    thread 0: columns 0 to 7, one call      thread 1: columns 8 to 15, one call
#     VECTOR 4    thread 0: columns 0 to 3, one call      thread 1: columns 4 to 7, the same call
#
# In both cases no bits are exchanged between threads: each computes those of its own columns.
@triton.jit
def _keep_scale(
    seed_words,
    offset,
    threshold,
    rows,
    first_col,
    N,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VECTOR: tl.constexpr,
    ACC: tl.constexpr,
):
    """Returns dropout's factors for a ``(ROWS, BLOCK_N)`` tile.

    A dropped element has the factor 0. Every other element has the factor 1 / (keep probability).
    Whether an element is dropped depends only on the seed, the offset, its row and its column,
    never on tiles or shards. Eight adjacent columns share one Philox call, and each uses 16 of its
    128 bits. ``VECTOR`` is the number of adjacent columns per thread, 8 or 4. With 4, two threads
    make the same call, which is cheaper than an exchange of bits.
    """
    # The divisor is the keep probability that the threshold expresses, not ``1 - p``, so that the
    # expectation is exact. With a threshold of 65536 all elements are dropped; `maximum` avoids a
    # division by 0.
    scale = 65536.0 / tl.maximum(65536 - threshold, 1).to(ACC)
    if VECTOR == 8:
        groups_in_row = tl.arange(0, BLOCK_N // 8) + first_col // LANES
        group = _groups(rows, seed_words, groups_in_row, N)
        w0, w1, w2, w3 = _philox(seed_words[0], offset, group)
        # The column in a group is 4 * (high bit of the word's index) + 2 * (low bit of the word's
        # index) + half. Each join adds a dimension that varies faster than those before. So the
        # joins are in this order:
        #
        #     first join     high bit    w0 with w2; w1 with w3
        #     second join    low bit     the pair w0, w2 with the pair w1, w3
        #     last join      half        low halves with high halves
        low0 = tl.join(_low_factor(w0, threshold, scale), _low_factor(w2, threshold, scale))
        low1 = tl.join(_low_factor(w1, threshold, scale), _low_factor(w3, threshold, scale))
        high0 = tl.join(_high_factor(w0, threshold, scale), _high_factor(w2, threshold, scale))
        high1 = tl.join(_high_factor(w1, threshold, scale), _high_factor(w3, threshold, scale))
        lanes = tl.join(tl.join(low0, low1), tl.join(high0, high1))
    else:
        # A quad is four adjacent columns: half a group, with two of its four words.
        quads = tl.arange(0, BLOCK_N // 4)
        group = _groups(rows, seed_words, quads // 2 + first_col // LANES, N)
        w0, w1, w2, w3 = _philox(seed_words[0], offset, group)
        # The first quad of a group has the words w0 and w1, the second one w2 and w3. In each quad,
        # columns 0 and 1 are the halves of its first word, columns 2 and 3 those of its second.
        is_second = (quads % 2 == 1)[None, :]
        word0, word1 = tl.where(is_second, w2, w0), tl.where(is_second, w3, w1)
        low = tl.join(_low_factor(word0, threshold, scale), _low_factor(word1, threshold, scale))
        high = tl.join(_high_factor(word0, threshold, scale), _high_factor(word1, threshold, scale))
        lanes = tl.join(low, high)
    return tl.reshape(lanes, (ROWS, BLOCK_N))


@triton.jit
def keep_scale(
    seed_words,
    offset,
    threshold,
    rows,
    first_col,
    N,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VECTOR: tl.constexpr,
    ACC: tl.constexpr,
):
    """Returns dropout's factors for a tile, or None without dropout (``seed_words`` is None)."""
    if seed_words is not None:
        return _keep_scale(
            seed_words, offset, threshold, rows, first_col, N, ROWS, BLOCK_N, VECTOR, ACC
        )


# --- activations and their derivatives, on tiles in the accumulator's dtype -----------------------
#
# In a sum of two products, ``tl.fma`` determines which product is not rounded. Otherwise the
# compiler would choose, for each element of a tile, and an element's result would depend on its
# position.


@triton.jit
def identity(x):
    return x


@triton.jit
def identity_derivative(x):
    return tl.full(x.shape, 1.0, x.dtype)


@triton.jit
def relu(x):
    return tl.where(x < 0.0, 0.0, x)  # the comparison is False for NaN, so that NaN is returned


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
def exponential(x, SCALE: tl.constexpr):
    """Returns ``exp(SCALE * x)``.

    In fp32 it uses the instruction for powers of two, without the handling of denormal results.
    """
    if x.dtype == tl.float64:
        return tl.exp(SCALE * x)
    else:
        return tl.exp2((SCALE * 1.4426950408889634) * x)


@triton.jit
def reciprocal(x):
    """Returns ``1 / x`` for positive x.

    In fp32 it squares the reciprocal square root, in a quarter of a division's instructions. The
    error is about three units in the last place. The reciprocal of infinity is zero.
    """
    if x.dtype == tl.float64:
        return 1.0 / x
    else:
        root = tl.rsqrt(x)
        return root * root


@triton.jit
def logistic(e):
    """Returns the logistic function s of x, and ``1 - s``, from ``e = exp(-x)``.

    ``1 - s`` is computed as ``s * e``, which does not cancel for large x.
    """
    s = reciprocal(1.0 + e)
    # If e is infinite, s is 0, and ``s * e`` would be NaN: so e is limited. The second result is
    # then 0 instead of 1, which has no effect: derivatives multiply it by s.
    return s, s * tl.minimum(e, 8e307 if e.dtype == tl.float64 else 8.507059173023462e37)


@triton.jit
def sigmoid(x):
    return reciprocal(1.0 + exponential(x, -1.0))


@triton.jit
def sigmoid_derivative(x):
    s, rest = logistic(exponential(x, -1.0))
    return s * rest


@triton.jit
def silu(x):
    return x * sigmoid(x)


@triton.jit
def silu_derivative(x):
    s, rest = logistic(exponential(x, -1.0))
    return tl.fma(s, x * rest, s)


@triton.jit
def quick_gelu(x):
    return x * reciprocal(1.0 + exponential(x, -1.702))


@triton.jit
def quick_gelu_derivative(x):
    s, rest = logistic(exponential(x, -1.702))
    return tl.fma(1.702 * s, x * rest, s)


@triton.jit
def tanh(x):
    # 1 - 2 / (1 + exp(2 |x|)), with the sign of x. `tanh_derivative` has the same reciprocal: a
    # kernel with both functions computes it once.
    far = tl.fma(reciprocal(1.0 + exponential(tl.abs(x), 2.0)), -2.0, 1.0)
    far = tl.where(x < 0.0, -far, far)
    square = x * x
    if x.dtype == tl.float64:
        # Near zero, where ``far`` cancels: a Taylor series, exact to rounding.
        odd = -1.0 / 3.0 + square * (
            2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0))
        )
        return tl.where(square < 4e-4, x + x * square * odd, far)
    else:
        # Near zero, where ``far`` cancels: a minimax polynomial for |x| up to 0.55, with a relative
        # error of 1e-9.
        odd = tl.fma(square, -0.00627424, 0.02107168)
        odd = tl.fma(
            square, tl.fma(square, tl.fma(square, odd, -0.05385231), 0.13332586), -0.33333316
        )
        return tl.where(square < 0.3025, tl.fma(x * square, odd, x), far)


@triton.jit
def tanh_in_16_bits(x):
    """Returns tanh with a relative error of 1e-5, in two thirds of the instructions.

    It is for results that are rounded to 16 bits.
    """
    far = tl.fma(reciprocal(1.0 + exponential(x, 2.0)), -2.0, 1.0)
    square = x * x
    return tl.where(square < 0.0064, x * tl.fma(square, -0.3333333, 1.0), far)


@triton.jit
def tanh_derivative(x):
    # 4 r (1 - r), with r = 1 / (1 + exp(2 |x|)): it neither overflows nor cancels.
    r = reciprocal(1.0 + exponential(tl.abs(x), 2.0))
    return 4.0 * (r - r * r)


@triton.jit
def _normal(x):
    """Returns the normal distribution function of x, and ``exp(-x**2 / 2)``.

    In fp32 both are computed from one exponential: the probability of a value above ``|x|`` is
    ``exp(-x**2 / 2)`` times a polynomial of eight terms in ``1 / (1 + 0.3 |x|)``, a form of
    Hastings 1955. The error is 8e-9. The relative error in the lower tail is 4e-7: nothing cancels
    there, unlike in ``1 + erf``.
    """
    if x.dtype == tl.float64:
        return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476), tl.exp(-0.5 * x * x)
    else:
        bell = tl.exp2(x * x * -0.7213475204444817)
        t = reciprocal(tl.fma(tl.abs(x), 0.3, 1.0))
        polynomial = tl.fma(t, tl.fma(t, 0.0356486328, -0.15666908), 0.204654232)
        polynomial = tl.fma(t, tl.fma(t, polynomial, -0.0513741858), 0.126944035)
        polynomial = tl.fma(t, tl.fma(t, polynomial, 0.100518085), 0.120640732)
        polynomial = tl.fma(t, polynomial, 0.119637564)
        tail = bell * (t * polynomial)
        return tl.where(x < 0.0, tail, 1.0 - tail), bell


@triton.jit
def gelu(x):
    below, _ = _normal(x)
    return x * below


@triton.jit
def gelu_derivative(x):
    below, bell = _normal(x)
    return below + x * bell * 0.3989422804014327


@triton.jit
def gelu_tanh(x):
    # 0.5 (1 + tanh(u)) is sigmoid(2 u): one exponential, and no cancellation for negative x.
    return x * reciprocal(
        1.0 + exponential(x * (1.5957691216057308 + 0.07135481627260025 * (x * x)), -1.0)
    )


@triton.jit
def gelu_tanh_derivative(x):
    square = x * x
    s, rest = logistic(exponential(x * (1.5957691216057308 + 0.07135481627260025 * square), -1.0))
    return tl.fma(s, x * rest * (1.5957691216057308 + 0.21406444881780076 * square), s)
