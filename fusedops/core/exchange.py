"""Device functions by which programs that share rows exchange the sums of their columns."""

import triton
import triton.language as tl


# A sum over columns is exchanged between warps, which wait at barriers.
@triton.jit
def sums_of_both(one, other, TOGETHER: tl.constexpr):
    """Returns the sums of two tiles over the columns of rows.

    ``TOGETHER`` makes them one reduction of pairs: half the barriers, for a few more registers.
    """
    if TOGETHER:
        return tl.split(tl.sum(tl.join(one, other), axis=1))
    return tl.sum(one, axis=1), tl.sum(other, axis=1)


# Programs that share rows exchange one or two sums per row through memory. ``moments`` has one
# 64-bit word for each program and row. A program writes its own line and reads all lines:
#
#                  row 0    row 1    row 2   ...
#     program 0    [word]   [word]   [word]
#     program 1    [word]   [word]   [word]        each word: this program's part of both sums
#     program 2    [word]   [word]   [word]
#                    |        |        |
#                  added by every program, in the order of the lines
#
# A word is 0 until it is written, so that it is its own flag, and no other data depends on it.
# Therefore relaxed accesses suffice: no fence orders them with other stores. They are atomic for
# the whole GPU, because the programs run on different multiprocessors, whose L1 caches do not see
# each other's stores.
@triton.jit
def post_sums(moments, first, second, column, rows, M, TWO: tl.constexpr, EXCHANGE: tl.constexpr):
    """Stores the sums over this program's columns for the programs of the rows' other columns.

    The layout of ``moments``, by program (p0, p1, ...), each part of M elements, one for a row:

        "wait"    | p0: second << 32 OR first | p1: ...                      |    64-bit words
        "post"    | p0: first   | p0: second  | p1: first   | p1: second ... |    of their dtype

    Without ``TWO`` there is no second. Rows that do not exist have no words: a program that waits
    has numbers of rows below 0.
    """
    in_rows = (rows >= 0) & (rows < M)
    if EXCHANGE == "wait":
        # Both sums are one word, so that one atomic store publishes them. The buffer is zero
        # before, and a word counts as written when it is not zero: sums of zero are written as -0.
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
def _await_words(places, there):
    """Returns the words at ``places``, once they are not zero; 0 where ``there`` is False.

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
def collect_sums(
    moments, rows, M, TWO: tl.constexpr, EXCHANGE: tl.constexpr, COLUMNS: tl.constexpr
):
    """Returns the sums over all columns, added in the order of the programs.

    Without ``TWO`` the second is of no use.
    """
    column = tl.arange(0, triton.next_power_of_2(COLUMNS))[:, None]
    in_rows = (rows >= 0) & (rows < M)
    # The lanes beyond the last program must not wait: no program writes their words.
    there = (column < COLUMNS) & in_rows[None, :]
    if EXCHANGE == "wait":
        word = _await_words(moments + column * M + rows[None, :], there)
        first = word.to(tl.int32).to(tl.float32, bitcast=True)
        second = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        place = 2 * column * M + rows[None, :]
        first = tl.load(moments + place, mask=there, other=0.0)
        second = first
        if TWO:
            second = tl.load(moments + M + place, mask=there, other=0.0)
    return tl.sum(first, axis=0), tl.sum(second, axis=0)
