"""How many rows of logits are in memory at a time."""

from __future__ import annotations

import functools
import math

import torch

__all__ = ["MIB", "accumulated_in", "chunk_rows"]

MIB = 2**20
# With 128,256 words in 16 bits 512 MiB are some 2,000 rows. Products of 1,024 rows and more run at
# the speed of larger ones; those of fewer rows do not.
_MOST_BYTES = 512 * MIB
# A device with less memory has smaller chunks: a fraction of all its memory, not of what is free,
# so that the same call gives the same bits.
_PART_OF_MEMORY = 32
# The height of a matrix product's tiles.
_TILE = 128
# A weight's gradient in 16 bits is rounded once for each chunk. The error of one rounding, squared,
# is one unit. Eager PyTorch has two: of the gradient of the logits, and of the product. The sum
# after k of n chunks is about sqrt(k / n) of the whole, so n roundings are (n + 1) / 2 units. With
# that of the logits, the error is at most twice eager's up to 1 + (n + 1) / 2 = 4 * 2. For more
# chunks the sum is in fp32, and rounded once.
_MOST_ROUNDINGS = 13


def chunk_rows(
    op: str,
    rows: int,
    row_bytes: int,
    chunk_mib: float | None,
    device: torch.device,
    wide_bytes: int | None,
) -> int:
    """Returns how many rows a chunk has at most: what fits the budget, about the same in each.

    Without a budget of the caller's, chunks are larger if so the sums of weights' gradients need
    not be in fp32, and that takes less memory.

    Args:
        op: the function's name, for messages.
        rows: the number of all rows.
        row_bytes: the bytes of a row of logits, of all heads.
        chunk_mib: the budget of a chunk's logits in MiB; None for the default.
        device: where the logits are.
        wide_bytes: the bytes of these sums in fp32; None without any.
    Raises:
        ValueError: one row exceeds the budget.
    """
    budget = _default_bytes(device) if chunk_mib is None else chunk_mib * MIB
    most = int(budget // row_bytes)
    if most < 1:
        if chunk_mib is not None:
            raise ValueError(
                f"{op}: chunk_mib={chunk_mib:g} is too small: a row of logits takes "
                f"{row_bytes / MIB:.3g} MiB"
            )
        most = 1
    if chunk_mib is None and wide_bytes:
        larger = _rounded(math.ceil(rows / _MOST_ROUNDINGS))
        if most < larger and (larger - most) * row_bytes < wide_bytes:
            most = larger
    rows = max(rows, 1)
    even = math.ceil(rows / math.ceil(rows / most))
    return min(_rounded(even), most)


def _rounded(rows: int) -> int:
    """Returns the next multiple of a tile's height."""
    return math.ceil(rows / _TILE) * _TILE


@functools.cache
def _default_bytes(device: torch.device) -> int:
    """Returns the default budget of a device."""
    if device.type != "cuda":
        return _MOST_BYTES
    total = torch.cuda.get_device_properties(device).total_memory
    return min(_MOST_BYTES, total // _PART_OF_MEMORY)


def accumulated_in(dtype: torch.dtype, chunks: int) -> torch.dtype:
    """Returns the dtype in which a weight's gradient is summed over chunks.

    In fp16 a sum without its scale, which the backward multiplies by, could overflow: it is in
    fp32.
    """
    if dtype == torch.float16 or (dtype.itemsize < 4 and chunks > _MOST_ROUNDINGS):
        return torch.float32
    return dtype
