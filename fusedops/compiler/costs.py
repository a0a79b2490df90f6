"""Estimates of the instructions that a GPU runs for an element of a row.

They tell whether a kernel is bound by memory or by its instructions. An H200 has 132
multiprocessors of 128 lanes at 1.75 GHz, and moves 4.8 TB/s: six instructions of a lane for each
byte, if no lane ever waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .ir import SAME_VALUE, Node

__all__ = ["excess", "instructions"]

# At this number of instructions per byte, a kernel computes as long as it reads and writes. It is
# less than six, because lanes do wait. Measured kernels are well above or below this number:
# see `excess`.
_BALANCE = 5.0

# The instructions of each operator, in fp32 on an H100 or H200. Operators that are not listed have
# one. A derivative shares most instructions with its function, so only the others are counted.
_INSTRUCTIONS = {
    **dict.fromkeys(SAME_VALUE, 0),
    "div": 2,  # mostly by a number of the row, whose reciprocal is computed once
    "div_rn": 8,
    "quotient": 8,
    "reciprocal": 8,
    "exp": 4,
    "exp2": 3,
    "log": 6,
    "log2": 5,
    "log1p": 20,
    "expm1": 20,
    "sqrt": 4,
    "rsqrt": 4,
    "root": 4,
    "pow": 60,
    "power": 60,
    "xlogy": 8,
    "fmod": 20,
    "ordinal": 4,
    "sin": 20,
    "cos": 20,
    "erf": 20,
    "keep": 25,  # its share of a call of Philox, which adjacent elements have in common
    "sigmoid": 8,
    "silu": 9,
    "quick_gelu": 10,
    "tanh": 16,
    "gelu_tanh": 20,
    "gelu": 24,
    "d:sigmoid": 3,
    "d:silu": 4,
    "d:quick_gelu": 4,
    "d:tanh": 3,
    "d:gelu_tanh": 8,
    "d:gelu": 10,
}
# The instructions of a load or a store, per element. One load is for several elements, but each
# element has a conversion, and its share of the address and the mask.
_INSTRUCTIONS_OF_ACCESS = 3


def instructions(computed: Iterable[Node], moved: Sequence[torch.dtype]) -> int:
    """The instructions of a kernel for an element.

    Args:
        computed: the values of each element.
        moved: the dtypes of the whole tensors.
    """
    count = sum([_INSTRUCTIONS.get(node.op, 1) for node in computed])
    return count + _INSTRUCTIONS_OF_ACCESS * len(moved)


def excess(count: int, moved: Sequence[torch.dtype]) -> float:
    """The instructions of a kernel beyond those that take as long as what it reads and writes.

    It is above zero if the kernel is bound by its instructions. This is the estimate of
    instructions per byte for some backwards in bf16::

        softmax                       3.8
        RMSNorm of a SwiGLU           3.9
        soft-capped softmax           7.8
        softmax with dropout          8.5

    Args:
        count: its instructions for an element.
        moved: the dtypes of the whole tensors.
    """
    return max(0.0, count - _BALANCE * sum([dtype.itemsize for dtype in moved]))
