"""The activation family's kernels.

    bias_act_*     ``dropout(activation(x + bias))``, by tiles of rows and columns
    glu_*          ``activation(gate) * up``, by tiles of rows and columns
    pointwise_*    ``activation(x)`` or ``activation(x) * up``, over tensors as vectors

``VALUE`` and ``DERIVATIVE`` are an activation's device functions from `core.device`: one kernel
serves all activations. An absent tensor is None, and its loads and stores are not compiled. ``ACC``
is the dtype of the arithmetic. ``N``, the number of columns, is a constant; M, the number of rows,
is none, nor are the strides and the dropout threshold. Row indices are int64 wherever they are
multiplied by a stride.
"""

import triton
import triton.language as tl

from ..core.device import (
    await_predecessor,
    keep_scale,
    load_row_vector,
    load_seed,
    place_along_rows,
    rows_of,
)


# A bias depends on the column, and a mask on row and column, so these kernels have tiles of both:
#
#                   axis 0: columns
#     axis 1    | (0, 0) | (1, 0) | (2, 0) |    tile 0 of rows
#               | (0, 1) | (1, 1) | (2, 1) |    tile 1
#
# Neighbours along axis 0 run at the same time and access adjacent memory. Nothing is summed over a
# row, so its tiles are independent of one another.
@triton.jit(do_not_specialize=["seed", "offset", "threshold", "M"])
def bias_act_forward_kernel(
    x,
    bias,
    y,
    seed,
    offset,
    threshold,
    x_stride,
    M,
    VALUE: tl.constexpr,
    ACC: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes ``y = activation(x + bias) * keep_scale``; a program has one tile."""
    await_predecessor(OVERLAP)
    # A folded grid has more programs than tiles. The rows of the extra programs are past the end,
    # and masked.
    tile, _ = place_along_rows()
    rows = rows_of(tile, ROWS)
    first_col = tl.program_id(0) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    if seed is not None:
        seed, offset = load_seed(seed, offset)
    h = tl.load(x + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
    if bias is not None:
        h += load_row_vector(bias, cols, N, ACC)
    out = VALUE(h)
    scale = keep_scale(seed, offset, threshold, rows, first_col, N, ROWS, BLOCK_N, VECTOR, ACC)
    if scale is not None:
        out *= scale
    tl.store(y + rows[:, None] * N + cols[None, :], out.to(y.dtype.element_ty), mask=mask)


# The forward is ``y = VALUE(h) * scale`` with ``h = x + bias``. So the gradient of x is
# ``dh = dy * scale * DERIVATIVE(h)``, and the gradient of bias is the sum of dh over rows. Neither
# h nor ``scale`` is saved: h is computed again from x, and ``scale`` drawn again from the seed.
@triton.jit
def _bias_act_gradient(
    dy,
    x,
    bias_row,
    dx,
    seed,
    offset,
    threshold,
    dy_stride,
    x_stride,
    tile,
    first_col,
    M,
    DERIVATIVE: tl.constexpr,
    ACC: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Returns a tile of the gradient of ``x + bias``, and stores it unless ``dx`` is None.

    Lanes beyond the last row or column are 0.
    """
    rows = rows_of(tile, ROWS)
    cols = first_col + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    dh = tl.load(dy + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
    h = tl.load(x + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
    if bias_row is not None:
        h += bias_row
    scale = keep_scale(seed, offset, threshold, rows, first_col, N, ROWS, BLOCK_N, VECTOR, ACC)
    if scale is not None:
        dh *= scale
    dh *= DERIVATIVE(h)
    # dx is None if only the bias needs a gradient.
    if dx is not None:
        tl.store(dx + rows[:, None] * N + cols[None, :], dh.to(dx.dtype.element_ty), mask=mask)
    return dh


# With a bias gradient, a program has one tile of columns and loops over tiles of rows. For example,
# five tiles of rows and two programs along axis 1, for one tile of columns:
#
#     program 0    tiles 4, 2, 0    sums of its rows    -> line 0 of ``partials``, N wide
#     program 1    tiles 3, 1       sums of its rows    -> line 1
#
# `sum_partials_kernel` adds the lines.
@triton.jit(do_not_specialize=["seed", "offset", "threshold", "M"])
def bias_act_backward_kernel(
    dy,
    x,
    bias,
    dx,
    dbias,
    partials,
    seed,
    offset,
    threshold,
    dy_stride,
    x_stride,
    M,
    DERIVATIVE: tl.constexpr,
    ACC: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes the gradients of x and bias.

    Without a bias gradient a program processes one tile. With a bias gradient few programs share
    the rows: each sums its columns in registers, stores the sums once, and loads the next rows
    ahead. Rows are
    processed from the last to the first, because the L2 cache still holds those of dy that were
    written last.
    """
    place, programs = place_along_rows()
    first_col = tl.program_id(0) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    # A launch that overlaps with the kernel before it must wait before its first load. Only the
    # variant without a bias gradient overlaps: persistent variants are launched without overlap.
    if dbias is None:
        await_predecessor(OVERLAP)
        if seed is not None:
            seed, offset = load_seed(seed, offset)
        bias_row = load_row_vector(bias, cols, N, ACC)
        _bias_act_gradient(
            dy,
            x,
            bias_row,
            dx,
            seed,
            offset,
            threshold,
            dy_stride,
            x_stride,
            place,
            first_col,
            M,
            DERIVATIVE,
            ACC,
            N,
            BLOCK_N,
            ROWS,
            VECTOR,
        )
    else:
        if seed is not None:
            seed, offset = load_seed(seed, offset)
        bias_row = load_row_vector(bias, cols, N, ACC)
        # ``parts`` stays a tile until the end, so that no step has a reduction over rows.
        parts = tl.zeros((ROWS, BLOCK_N), ACC)
        tiles = tl.cdiv(M, ROWS).to(tl.int32)
        for step in tl.range(place, tiles, programs, num_stages=STAGES):
            parts += _bias_act_gradient(
                dy,
                x,
                bias_row,
                dx,
                seed,
                offset,
                threshold,
                dy_stride,
                x_stride,
                tiles - 1 - step,
                first_col,
                M,
                DERIVATIVE,
                ACC,
                N,
                BLOCK_N,
                ROWS,
                VECTOR,
            )
        total = tl.sum(parts, axis=0)
        # One program alone has the whole sum. Several store a row of ``partials`` each, and another
        # kernel adds the rows in a fixed order: atomics would make the bits depend on timing.
        if programs == 1:
            tl.store(dbias + cols, total.to(dbias.dtype.element_ty), mask=cols < N)
        else:
            tl.store(partials + place.to(tl.int64) * N + cols, total, mask=cols < N)


@triton.jit(do_not_specialize=["M"])
def glu_forward_kernel(
    gate,
    up,
    y,
    gate_stride,
    up_stride,
    M,
    VALUE: tl.constexpr,
    ACC: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes ``y = activation(gate) * up``; a program has one tile.

    If up is None, ``gate`` is packed: its rows have 2 N columns, the gate's half first:

        row of ``gate``   | gate, N columns | up, N columns |
    """
    await_predecessor(OVERLAP)
    tile, _ = place_along_rows()
    rows = rows_of(tile, ROWS)[:, None]
    cols = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < M) & (cols < N)
    g = tl.load(gate + rows * gate_stride + cols, mask=mask, other=0.0).to(ACC)
    if up is None:
        u = tl.load(gate + N + rows * gate_stride + cols, mask=mask, other=0.0).to(ACC)
    else:
        u = tl.load(up + rows * up_stride + cols, mask=mask, other=0.0).to(ACC)
    tl.store(y + rows * N + cols, (VALUE(g) * u).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def glu_backward_kernel(
    dy,
    gate,
    up,
    dgate,
    dup,
    dy_stride,
    gate_stride,
    up_stride,
    M,
    VALUE: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes the gradients of gate and up; a program has one tile.

    With ``PACKED`` both are stored in ``dgate``: its rows have 2 N columns, the gate's half first.
    """
    await_predecessor(OVERLAP)
    tile, _ = place_along_rows()
    rows = rows_of(tile, ROWS)[:, None]
    cols = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < M) & (cols < N)
    d = tl.load(dy + rows * dy_stride + cols, mask=mask, other=0.0).to(ACC)
    g = tl.load(gate + rows * gate_stride + cols, mask=mask, other=0.0).to(ACC)
    if dgate is not None:
        if up is None:
            u = tl.load(gate + N + rows * gate_stride + cols, mask=mask, other=0.0).to(ACC)
        else:
            u = tl.load(up + rows * up_stride + cols, mask=mask, other=0.0).to(ACC)
    if not PACKED:
        # Either gradient may be absent. Only the gate's depends on u.
        out = rows * N + cols
        if dgate is not None:
            tl.store(dgate + out, (d * u * DERIVATIVE(g)).to(dgate.dtype.element_ty), mask=mask)
        if dup is not None:
            tl.store(dup + out, (d * VALUE(g)).to(dup.dtype.element_ty), mask=mask)
    else:
        out = rows * (2 * N) + cols
        # The gradient of packed rows is packed too, so no copy has to join two halves.
        kind: tl.constexpr = dgate.dtype.element_ty
        tl.store(dgate + out, (d * u * DERIVATIVE(g)).to(kind), mask=mask)
        tl.store(dgate + out + N, (d * VALUE(g)).to(kind), mask=mask)


# The pointwise kernels read tensors as vectors, whatever their shape: the tensors are dense and
# have the same strides. ``start`` is the first element of a tile, a multiple of ``BLOCK_N``, so
# that addresses are aligned. ``places`` are the elements' positions in the tile.
@triton.jit
def _load_places(vector, start, places, mask, ACC: tl.constexpr):
    """Returns a tile of a vector; without a mask the loads are 16 bytes wide."""
    if mask is None:
        return tl.load(vector + start + places).to(ACC)
    else:
        return tl.load(vector + start + places, mask=mask, other=0.0).to(ACC)


@triton.jit
def _pointwise_tile(x, up, y, start, places, mask, VALUE: tl.constexpr, ACC: tl.constexpr):
    """Computes one tile of `pointwise_forward_kernel`."""
    h = VALUE(_load_places(x, start, places, mask, ACC))
    if up is not None:
        h *= _load_places(up, start, places, mask, ACC)
    tl.store(y + start + places, h.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def pointwise_forward_kernel(
    x,
    up,
    y,
    M,
    VALUE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes ``y = activation(x) * up`` over vectors of M elements; up may be absent.

    Only the last program has a mask: with a mask that can end at any element, the compiler makes
    loads narrower than 16 bytes.
    """
    await_predecessor(OVERLAP)
    start = tl.program_id(0).to(tl.int64) * BLOCK_N
    places = tl.arange(0, BLOCK_N)
    if start + BLOCK_N <= M:
        _pointwise_tile(x, up, y, start, places, None, VALUE, ACC)
    else:
        _pointwise_tile(x, up, y, start, places, start + places < M, VALUE, ACC)


@triton.jit
def _pointwise_gradients(
    dy,
    x,
    up,
    dx,
    dup,
    start,
    places,
    mask,
    VALUE: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    ACC: tl.constexpr,
):
    """Computes one tile of `pointwise_backward_kernel`."""
    d = _load_places(dy, start, places, mask, ACC)
    h = _load_places(x, start, places, mask, ACC)
    if up is not None and dx is not None:
        u = _load_places(up, start, places, mask, ACC)
        tl.store(dx + start + places, (d * u * DERIVATIVE(h)).to(dx.dtype.element_ty), mask=mask)
    elif dx is not None:
        tl.store(dx + start + places, (d * DERIVATIVE(h)).to(dx.dtype.element_ty), mask=mask)
    if dup is not None:
        tl.store(dup + start + places, (d * VALUE(h)).to(dup.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def pointwise_backward_kernel(
    dy,
    x,
    up,
    dx,
    dup,
    M,
    VALUE: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes the gradients of x and up over vectors of M elements; up may be absent."""
    await_predecessor(OVERLAP)
    start = tl.program_id(0).to(tl.int64) * BLOCK_N
    places = tl.arange(0, BLOCK_N)
    if start + BLOCK_N <= M:
        _pointwise_gradients(dy, x, up, dx, dup, start, places, None, VALUE, DERIVATIVE, ACC)
    else:
        _pointwise_gradients(
            dy, x, up, dx, dup, start, places, start + places < M, VALUE, DERIVATIVE, ACC
        )
