"""Kernels of all families: the sum of a backward's partial sums, and dropout's factors."""

import triton
import triton.language as tl

from .device import await_predecessor, keep_scale, load_seed, place_along_rows, rows_of


@triton.jit(do_not_specialize=["programs"])
def sum_partials_kernel(
    partials,
    first,
    second,
    third,
    programs,
    ACC: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sums partial gradients of N elements over the programs that wrote them.

    ``partials`` is ``(programs, slots, N)``, with a slot for each of ``first``, ``second`` and
    ``third`` that is not None, in this order:

        program 0   slot 0 | slot 1 | slot 2
        program 1   slot 0 | slot 1 | slot 2     axis 0 of the grid: blocks of columns
        ...           |                          axis 1 of the grid: slots
                    first    second   third
    """
    # The predecessor is often the backward that writes ``partials``. After this call its stores are
    # visible.
    await_predecessor(OVERLAP)
    slots: tl.constexpr = (first is not None) + (second is not None) + (third is not None)
    slot = tl.program_id(1)
    first_col = tl.program_id(0) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    in_cols = cols < N
    # Row i of ``sums`` adds up programs i, i + ROWS, ... So the order of additions depends on the
    # config alone, and the sums are the same in every run.
    sums = tl.zeros((ROWS, BLOCK_N), ACC)
    for start in range(0, programs, ROWS):
        rows = start + tl.arange(0, ROWS)
        offsets = (rows.to(tl.int64) * slots + slot)[:, None] * N + cols[None, :]
        in_partials = (rows < programs)[:, None] & in_cols[None, :]
        sums += tl.load(partials + offsets, mask=in_partials, other=0.0)
    total = tl.sum(sums, axis=0)
    # Each program stores one gradient, that of its slot. The outer conditions are known at compile
    # time: no code is generated for an absent gradient. The inner conditions are evaluated at run
    # time.
    if first is not None:
        if slot == 0:
            tl.store(first + cols, total.to(first.dtype.element_ty), mask=in_cols)
    if second is not None:
        if slot == (first is not None):
            tl.store(second + cols, total.to(second.dtype.element_ty), mask=in_cols)
    if third is not None:
        if slot == slots - 1:
            tl.store(third + cols, total.to(third.dtype.element_ty), mask=in_cols)


@triton.jit(do_not_specialize=["seed", "offset", "threshold", "M"])
def keep_scale_kernel(
    out,
    seed,
    offset,
    threshold,
    M,
    ACC: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Writes dropout's factors for M rows of N elements; each program writes one tile.

    A dropped element has the factor 0, and every other element one over the keep probability.
    """
    await_predecessor(OVERLAP)
    tile, _ = place_along_rows()
    rows = rows_of(tile, ROWS)
    first_col = tl.program_id(0) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    seed, offset = load_seed(seed, offset)
    scale = keep_scale(seed, offset, threshold, rows, first_col, N, ROWS, BLOCK_N, VECTOR, ACC)
    tl.store(
        out + rows[:, None] * N + cols[None, :],
        scale,
        mask=(rows < M)[:, None] & (cols < N)[None, :],
    )
