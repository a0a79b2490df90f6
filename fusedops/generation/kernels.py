"""The generation family's kernel: bans the tokens that would repeat an n-gram, on a copy of the scores or in place.

Absence is the flag: without ``scores`` the kernel works in place on ``out``. Lengths, strides and ``ngram`` are
run-time arguments, so that one compiled kernel serves every step of a generation. Whatever is multiplied by a row's
stride is int64.
"""

import triton
import triton.language as tl


@triton.jit
def _leading(ids, ids_step, pad, L, BLOCK_L: tl.constexpr):
    """How many tokens before the first that is not ``pad``; at least L if there is none."""
    lanes = tl.arange(0, BLOCK_L)
    count = 0
    searching = L > 0
    while searching:
        at = count + lanes
        tokens = tl.load(ids + at * ids_step, mask=at < L, other=pad)
        found = tl.min(tl.where((at < L) & (tokens != pad), lanes, BLOCK_L), axis=0)
        count += found
        searching = (found == BLOCK_L) & (count < L)
    return count


@triton.jit(
    do_not_specialize=["pad", "ids_stride", "ids_step", "scores_stride", "out_stride", "out_step", "start", "ngram",
                       "tiles", "L", "V"]
)  # fmt: skip
def no_repeat_ngram_forward_kernel(
    ids,
    scores,
    out,
    allowed,
    pad,
    ids_stride,
    ids_step,
    scores_stride,
    out_stride,
    out_step,
    start,
    ngram,
    tiles,
    L,
    V,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Minus infinity for every token that ends an n-gram which begins with the row's last ``ngram - 1`` tokens.

    Axis 0 of the grid is the row. With ``scores``, a program copies ``tiles`` tiles of columns and then bans tokens
    in these alone, whichever window they come from: no other program writes there. In place, a program takes ``tiles``
    tiles of windows and bans in the whole row; where two meet they write the same. N-grams begin at ``start`` or
    later, and behind leading ``pad`` tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ids += row * ids_stride
    out += row * out_stride
    windows = L - ngram + 1
    first_col, last_col = 0, V
    if scores is not None:
        scores += row * scores_stride
        first_col = part * (tiles * BLOCK_N)
        last_col = tl.minimum(first_col + tiles * BLOCK_N, V)
        for first in range(first_col, last_col, BLOCK_N):
            cols = first + tl.arange(0, BLOCK_N)
            if first + BLOCK_N <= last_col:  # with no mask the accesses are as wide as the alignment allows
                tl.store(out + cols, tl.load(scores + cols))
            else:
                tl.store(out + cols, tl.load(scores + cols, mask=cols < last_col, other=0.0), mask=cols < last_col)
        # The copies of all threads stand in memory before any thread bans.
        tl.debug_barrier()
    else:
        start += part * (tiles * BLOCK_L)
        windows = tl.minimum(start + tiles * BLOCK_L, windows)
    if pad is not None:
        start = tl.maximum(start, _leading(ids, ids_step, pad, L, BLOCK_L))
    for first in range(start, windows, BLOCK_L):
        at = first + tl.arange(0, BLOCK_L)
        same = at < windows
        for behind in range(1, ngram):
            # Backwards from the last token, as the lanes that are left over load nothing more.
            wanted = tl.load(ids + (L - behind) * ids_step)
            same = same & (tl.load(ids + (at + ngram - 1 - behind) * ids_step, mask=same, other=0) == wanted)
        token = tl.load(ids + (at + ngram - 1) * ids_step, mask=same, other=-1)
        same = same & (token >= first_col) & (token < last_col)
        if allowed is not None:
            same = same & (tl.load(allowed + token, mask=same, other=1) == 0)
        tl.store(out + token * out_step, float("-inf"), mask=same)
