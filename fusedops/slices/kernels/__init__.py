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
``total`` is the sum of the widths. ``ALIGN`` is 0, or else all addresses are multiples of 16 bytes,
and all columns, widths and distances between rows of so many elements. The arguments ``total`` and
``…_stride``, a distance between rows, count in these units: what is multiplied by a constant is
known to the compiler as its multiple. ``CARRIED``: a thread's neighbouring elements are fewer than
the four bytes that are the least to be copied asynchronously, so that the loop carries the next
rows in registers.
"""

from .addresses import store_addresses_kernel
from .backward import slices_backward_kernel
from .forward import slices_forward_kernel

__all__ = ["slices_backward_kernel", "slices_forward_kernel", "store_addresses_kernel"]
