"""Device functions by which programs that share rows exchange sums over their columns."""

import triton
import triton.language as tl


@triton.jit
def sums_of_both(one, other, TOGETHER: tl.constexpr):
    """Returns the sums of two tiles over their columns.

    For such a sum, warps exchange values and wait at barriers. With ``TOGETHER`` both sums are one
    reduction of pairs: it has half the barriers, and needs a few more registers.
    """
    if TOGETHER:
        return tl.split(tl.sum(tl.join(one, other), axis=1))
    return tl.sum(one, axis=1), tl.sum(other, axis=1)


# Programs that share rows exchange one or two sums per row through memory. With EXCHANGE "wait",
# ``moments`` has one 64-bit word for each program and row. A program writes its own line and reads
# all lines:
#
#                  row 0    row 1    row 2   ...
#     program 0    [word]   [word]   [word]
#     program 1    [word]   [word]   [word]        each word: this program's part of both sums
#     program 2    [word]   [word]   [word]
#                    |        |        |
#                  added by every program, in the order of the lines
#
# A word is 0 until it is written. So the word itself shows that it is written, and no other data
# depends on it: relaxed accesses suffice, without a fence that orders them with other stores. They
# are atomic for the whole GPU, because the programs run on different multiprocessors, and the L1
# cache of one does not show the stores of another.
@triton.jit
def post_sums(moments, first, second, column, rows, M, TWO: tl.constexpr, EXCHANGE: tl.constexpr):
    """Stores the sums over this program's columns, for the programs that share the rows.

    ``column`` is this program's index among those that share the rows. This is the layout of
    ``moments`` for programs p0, p1, ... Each part has M elements, one for a row:

        "wait"    | p0: second << 32 OR first | p1: ...                      |    64-bit words
        "post"    | p0: first   | p0: second  | p1: first   | p1: second ... |    the sums' dtype

    In "post" another launch reads the sums. Without ``TWO`` there is no second sum. ``rows`` may
    contain indices below 0, or from M on: for these nothing is stored.
    """
    in_rows = (rows >= 0) & (rows < M)
    if EXCHANGE == "wait":
        # Both sums are packed into one word, so that one atomic store publishes both. A word of 0
        # would count as not written: if the sums are zero, the first is written as -0.
        word = first.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        if TWO:
            word |= second.to(tl.int32, bitcast=True).to(tl.int64) << 32
        word = tl.where(word == 0, 0x80000000, word)
        tl.atomic_xchg(moments + column * M + rows, word, mask=in_rows, sem="relaxed")
    else:
        tl.store(moments + 2 * column * M + rows, first, mask=in_rows)
        if TWO:
            tl.store(moments + (2 * column + 1) * M + rows, second, mask=in_rows)


@triton.jit
def _await_words(addresses, has_word):
    """Waits until the words at ``addresses`` are not 0, and returns them.

    Where ``has_word`` is False, it returns 0 without a load. The function is PTX, because a loop in
    Triton would prevent the pipelining of the loop around it. After 2^27 loads, which take
    more than a minute (some 0.6 µs each), the kernel traps, so that the launch raises an error and
    does not hang.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .pred asked, absent, late; .reg .u32 loads; "
        "setp.ne.s32 asked, $2, 0; mov.b64 $0, 0; mov.u32 loads, 0; "
        "WAIT: @asked ld.relaxed.gpu.global.b64 $0, [$1]; "
        "setp.eq.and.s64 absent, $0, 0, asked; add.u32 loads, loads, 1; "
        "setp.gt.u32 late, loads, 134217728; @late trap; @absent bra WAIT; }",
        "=&l,l,r",
        [addresses, has_word.to(tl.int32)],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def collect_sums(
    moments, rows, M, TWO: tl.constexpr, EXCHANGE: tl.constexpr, COLUMNS: tl.constexpr
):
    """Returns both sums over all columns of the rows, added in the order of the programs.

    ``COLUMNS`` programs share the rows: see `post_sums`. Without ``TWO`` the second sum is
    meaningless.
    """
    column = tl.arange(0, triton.next_power_of_2(COLUMNS))[:, None]
    in_rows = (rows >= 0) & (rows < M)
    # The lanes beyond the last program must not wait: no program writes their words.
    has_word = (column < COLUMNS) & in_rows[None, :]
    if EXCHANGE == "wait":
        word = _await_words(moments + column * M + rows[None, :], has_word)
        first = word.to(tl.int32).to(tl.float32, bitcast=True)
        second = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        offsets = 2 * column * M + rows[None, :]
        first = tl.load(moments + offsets, mask=has_word, other=0.0)
        second = first
        if TWO:
            second = tl.load(moments + M + offsets, mask=has_word, other=0.0)
    return tl.sum(first, axis=0), tl.sum(second, axis=0)
