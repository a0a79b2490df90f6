"""How the norm kernels cut their work where no table knows better: heuristics from hidden size and register need."""

from __future__ import annotations

from ..core.tuning import Config

__all__ = ["backward", "backward_stats", "candidates", "dropout_add", "forward", "sum_partials"]

# The widest row that a forward program holds whole.
_WHOLE_FORWARD = 16384
# The widest row that a backward program holds whole, and the column sums it can keep in registers beside it.
_WHOLE_BACKWARD = 16384
_WHOLE_SUMS = 24576
_TILE = 1024


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _block(cols: int) -> int:
    return max(_power_of_two(cols), 16)


def _warps(elements: int, each: int) -> int:
    return min(max(_power_of_two(elements // (32 * each)), 1), 16)


def forward(cols: int, itemsize: int) -> Config:
    """The forward: a whole row a program where it fits, tile by tile beyond."""
    block = _block(cols)
    if block > _WHOLE_FORWARD:
        return Config(8192 if itemsize <= 4 else 4096, 1, 16)
    rows = max(1, 1024 // block)
    return Config(block, rows, _warps(block * rows, 16))


def dropout_add(cols: int, itemsize: int) -> Config:
    """The forward without a norm: any tile serves."""
    block = min(_block(cols), 2048)
    return Config(block, max(1, 2048 // block), 4)


def backward(cols: int, itemsize: int, sums: int, normalizes: bool) -> Config:
    """The backward: whole rows, several at a time, while the column sums fit in registers; column tiles beyond.

    ``sums`` is the number of parameter gradients, ``normalizes`` whether the member has a norm.
    """
    block = _block(cols)
    if not normalizes and block > _TILE or block > _WHOLE_BACKWARD or block * sums > _WHOLE_SUMS:
        return Config(_TILE, 4 if itemsize <= 2 else 2, 4, 3, 4)
    if block >= 8192:
        return Config(block, 1, 16, 3, 1)
    if block >= 2048:
        return Config(block, 2 if itemsize <= 2 else 1, 8, 3, 1)
    rows = min(max(1, 4096 // block), 64)
    return Config(block, rows, _warps(block, 8), 3, 2)


def backward_stats(cols: int, itemsize: int) -> Config:
    """The row means ahead of the column tiles."""
    return Config(2048, 1, 4, 3)


def sum_partials(cols: int) -> Config:
    """The reduction of the partial sums."""
    return Config(32, 64, 4)


def candidates(kernel: str, cols: int) -> list[Config]:
    """Configs worth trying for a kernel at a hidden size."""
    block = _block(cols)
    if kernel == "norm_forward":
        tiles = [b for b in (block, 1024, 4096) if b == block <= _WHOLE_FORWARD or b < cols]
        return [Config(b, rows, warps) for b in tiles for rows in (1, 4) for warps in (1, 4, 8) if rows * b <= 16384]
    if kernel == "norm_backward":
        tiles = [b for b in (block, 256, 1024) if b == block <= _WHOLE_BACKWARD or b < cols]
        return [Config(b, rows, warps, stages, 1) for b in tiles for rows in (1, 4) for warps, stages in ((4, 3), (8, 1))
                if rows * b <= 16384]  # fmt: skip
    raise ValueError(f"no candidates for kernel {kernel!r}")
