"""The slices family's kernels: a forward and a backward for all slices.

A tile is a tensor ``(slots, rows, lanes)``: a slot holds rows of one slice. A slice is in one
*part*, or in up to seven parts side by side, a tuple of tiles::

            part 0          part 1
    slot 0  [rows, lanes]   [rows, lanes]    slice 4
    slot 1  [rows, lanes]   [rows, lanes]    slice 5, whose last lanes are idle

Slices of similar widths have tiles of one shape, a `widths.Tile`; ``TILES`` are the shapes that
occur. A *group* has at most as many slices as a tile has slots. Axis 0 of the grid is the groups;
the programs of a group, along axis 1, share the rows. So programs that run at the same time read
the same rows of neighbouring slices, which are side by side in memory.

An absent argument is None, and no code is compiled for it. Slices that are separate tensors are
passed as a table of int64 addresses. Widths that differ are passed as `Groups.table`, in int32.

``ALIGN`` is the widths' common factor (1, 2, 4 or 8) if all distances between rows are multiples of
it and all addresses multiples of 16 bytes; else it is 0. If it is not 0, the arguments ``total``,
the sum of the widths, and ``…_stride``, a distance between rows, are in units of ``ALIGN``. The
kernel multiplies them by this constant, so that the compiler can rely on the alignment.

With ``CARRIED`` the loop holds the next rows in registers. It is for slices whose elements a thread
loads by fewer than four bytes, the least that an asynchronous copy has.
"""

from .backward import slices_backward_kernel
from .forward import slices_forward_kernel

__all__ = ["slices_backward_kernel", "slices_forward_kernel"]
