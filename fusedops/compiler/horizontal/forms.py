"""How the slices of an input, a result or a kernel's tensor are in memory."""

__all__ = ["BUFFER", "JOINT", "LOOKUP", "SEPARATE", "SHARED"]

# Each slice is a tensor.
SEPARATE = "separate"
# Each slice is the rows of a table that an index selects: see `lookups`.
LOOKUP = "lookup"
# The slices are columns of one tensor, side by side.
JOINT = "joint"
# All slices have the same tensor.
SHARED = "shared"
# The slices are in one tensor of one dimension, one after the other; this package allocates it.
BUFFER = "buffer"
