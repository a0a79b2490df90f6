"""The slices family's kernels: a forward and a backward for all slices, and a table of addresses.

A tile is ``(slots, rows, lanes)``: a slot holds one slice's rows. A slice is one such part, or up
to seven side by side, in a tuple::

            part 0          part 1
    slot 0  [rows, lanes]   [rows, lanes]    slice 4
    slot 1  [rows, lanes]   [rows, lanes]    slice 5, whose last lanes are idle

Slices of similar widths share a `Tile`'s shape, and ``TILES`` are the shapes that occur. Axis 0 of
the grid is the *group*: as many slices as a tile has slots. The programs of a group, along axis 1,
share the rows. So programs that run at the same time read the same rows of neighbouring slices,
which are side by side in memory.

Without an argument, which is then None, there is no code for it. Slices that are separate tensors
come as a table of int64 addresses; widths that differ as `Groups.table`, in int32.

``ALIGN`` is the widths' common factor (1, 2, 4 or 8), if all distances between rows are multiples
of it and all addresses multiples of 16 bytes; else it is 0. If it is not 0, the host divides by it
the arguments ``total``, the sum of the widths, and ``…_stride``, a distance between rows. The
kernel multiplies them by this constant, so that the compiler knows what they are multiples of.

``CARRIED`` means that the loop carries the next rows in registers. It is for slices of which a
thread's adjacent elements have fewer than four bytes, the least that an asynchronous copy has.
"""

from .addresses import store_addresses_kernel
from .backward import slices_backward_kernel
from .forward import slices_forward_kernel

__all__ = ["slices_backward_kernel", "slices_forward_kernel", "store_addresses_kernel"]
