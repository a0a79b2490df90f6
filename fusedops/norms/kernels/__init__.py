"""The norm family's kernels: one forward, with and without a norm, and one backward.

A pointer that is None is absent, and the instructions for it are not compiled. ``ACC`` is the dtype
of statistics and sums. ``N`` is a constant; M, the strides and the dropout threshold are not:
kernels do not depend on the batch size. Rows are int64 wherever they are multiplied by a stride.
"""

from .backward import norm_backward_kernel
from .forward import dropout_add_kernel, norm_forward_kernel

__all__ = ["dropout_add_kernel", "norm_backward_kernel", "norm_forward_kernel"]
