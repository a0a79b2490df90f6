"""The generation family's kernel: bans the tokens that would repeat an n-gram, in place.

Lengths, strides and ``ngram`` are run-time arguments, so that one compiled kernel is used in every
step of a generation. Factors of strides are int64.
"""

import triton
import triton.language as tl

from ..core.device import place_along_rows


@triton.jit
def _leading(ids, ids_step, pad, end, L, BLOCK_N: tl.constexpr):
    """Returns the number of ``pad`` tokens at the beginning of a row.

    It scans blocks of tokens, and stops after ``end``. If all tokens before ``end`` are ``pad``,
    the result may not be exact, but it is at least the smaller of ``end`` and L.
    """
    lanes = tl.arange(0, BLOCK_N)
    count = 0
    # A loop in Triton has no `break`.
    searching = L > 0
    while searching:
        positions = count + lanes
        in_row = positions < L
        tokens = tl.load(ids + positions * ids_step, mask=in_row, other=pad)
        # The first lane with another token; BLOCK_N if there is none.
        lane = tl.min(tl.where(in_row & (tokens != pad), lanes, BLOCK_N), axis=0)
        count += lane
        searching = (lane == BLOCK_N) & (count < tl.minimum(end, L))
    return count


@triton.jit(
    do_not_specialize=[
        "pad",
        "scores_stride",
        "scores_step",
        "ids_stride",
        "ids_step",
        "start",
        "ngram",
        "L",
        "V",
    ]
)
def no_repeat_ngram_forward_kernel(
    scores,
    ids,
    allowed,
    pad,
    scores_stride,
    scores_step,
    ids_stride,
    ids_step,
    start,
    ngram,
    L,
    V,
    BLOCK_N: tl.constexpr,
):
    """Writes minus infinity for every token that would repeat an n-gram of its row.

    A token is banned if the row's last ``ngram - 1`` tokens also occur elsewhere in the row, and
    the token follows them there. A *window* is ``ngram`` adjacent tokens. For example, with ngram
    3, the window a b c bans c:

        row   ... a b c ... a b
                  |   |     |
                  |   |     L - ngram + 1
                  |   window + ngram - 1
                  window

    Axis 0 of the grid is the row, the others are tiles of windows. Programs that ban the same token
    write the same value. Windows begin at ``start`` or later, and after leading ``pad`` tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    tile, _ = place_along_rows()
    scores += row * scores_stride
    ids += row * ids_stride
    first = start + tile.to(tl.int64) * BLOCK_N
    windows = first + tl.arange(0, BLOCK_N)
    # The mask of the windows that ban their last token, as far as they have been compared.
    matches = windows < L - ngram + 1
    if pad is not None:
        # The scan ends with the tile: padding after it does not affect the tile's windows.
        matches = matches & (windows >= _leading(ids, ids_step, pad, first + BLOCK_N, L, BLOCK_N))
    for distance in range(1, ngram):
        # Compares the row's last tokens, from the end, with those before a window's last token.
        # Lanes whose window already differs are masked, and load nothing.
        row_token = tl.load(ids + (L - distance) * ids_step)
        positions = windows + ngram - 1 - distance
        window_token = tl.load(ids + positions * ids_step, mask=matches, other=0)
        matches = matches & (window_token == row_token)
    # A token outside of the vocabulary has no score to write. Masked lanes get such a token, -1.
    token = tl.load(ids + (windows + ngram - 1) * ids_step, mask=matches, other=-1)
    matches = matches & (token >= 0) & (token < V)
    if allowed is not None:
        matches = matches & (tl.load(allowed + token, mask=matches, other=1) == 0)
    tl.store(scores + token * scores_step, float("-inf"), mask=matches)
