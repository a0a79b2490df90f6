"""The norm family's kernels: one forward, with and without a norm, and one backward.

An absent tensor is None, and its loads and stores are not compiled. ``ACC`` is the dtype of
statistics and sums. ``N``, the number of columns, is a constant. M, the number of rows, the strides
and the dropout threshold are arguments, so a kernel does not depend on the batch size.
Row indices are int64 wherever they are multiplied by a stride.
"""

from .backward import norm_backward_kernel
from .forward import dropout_add_kernel, norm_forward_kernel

__all__ = ["dropout_add_kernel", "norm_backward_kernel", "norm_forward_kernel"]
