"""How the norm kernels cut their work where no table knows better: heuristics from hidden size and register need."""

from __future__ import annotations

from ..core.tuning import Config

__all__ = ["backward", "backward_rest", "candidates", "dropout_add", "forward", "sum_partials"]

# The widest row that a forward program holds whole.
_WHOLE_FORWARD = 16384
# What a backward program keeps in registers: column sums, and bytes of the rows it takes ahead in shared memory.
_SUMS = 24576
_AHEAD_BYTES = 128 * 1024


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _block(cols: int) -> int:
    return max(_power_of_two(cols), 16)


def _warps(elements: int, each: int) -> int:
    return min(max(_power_of_two(elements // (32 * each)), 1), 16)


def forward(cols: int, itemsize: int, adds: bool) -> Config:
    """The forward: a whole row a program where it fits, tile by tile beyond.

    ``adds`` is whether a residual comes in, a second tensor in flight.
    """
    block = _block(cols)
    if block > _WHOLE_FORWARD or (itemsize == 8 and block > 4096):
        return Config(4096, 1, 8)
    if block == _WHOLE_FORWARD:
        return Config(block, 1, 32, registers=64) if adds else Config(block, 1, 16)
    rows = max(1, 1024 // block)
    return Config(block, rows, _warps(block * rows, 16))


def dropout_add(cols: int) -> Config:
    """The forward without a norm: any tile serves."""
    block = min(_block(cols), 2048)
    return Config(block, max(1, 2048 // block), 4)


def backward(cols: int, itemsize: int, sums: int, normalizes: bool) -> Config:
    """The backward: whole rows while the column sums fit in registers, else the first columns and the row means.

    ``sums`` is the number of parameter gradients, ``normalizes`` whether the member has a norm.
    """
    block = _block(cols)
    if not normalizes:
        return Config(min(block, 1024), max(1, 2048 // min(block, 1024)), 4, 3, 4)
    limit = _power_of_two(_SUMS // max(sums, 1) // 2 + 1)
    block = min(block, limit, 8192 if block <= 16384 and itemsize == 2 else 4096 if itemsize <= 4 else 2048)
    if block == 8192 and itemsize == 2:
        return Config(block, 1, 16, 3 if cols * itemsize * 4 < _AHEAD_BYTES else 2, 1)
    if block >= 2048:
        rows = 2 if itemsize == 2 else 1
        ahead = cols * itemsize * 2 * rows
        return Config(block, rows, 8, 3 if ahead * 2 <= _AHEAD_BYTES else 2 if ahead <= _AHEAD_BYTES else 1, 1)
    warps = _warps(block, 8)
    each = 32 if itemsize == 2 else 16  # elements a thread, in registers thrice: dy, the row, and their sums
    return Config(block, min(max(1, each * 32 * warps // block), 16), warps, 3, 2)


def backward_rest(itemsize: int) -> Config:
    """The columns that the backward's first launch left: short tiles, several rows at a time."""
    return Config(1024, 4 if itemsize == 2 else 2 if itemsize == 4 else 1, 4, 3, 2)


def sum_partials(rest_col: int) -> Config:
    """The reduction of the partial sums; its tiles must not straddle ``rest_col``."""
    return Config(min(32, rest_col), 64, 4)


def candidates(kernel: str, cols: int) -> list[Config]:
    """Configs worth trying for a kernel at a hidden size."""
    block = _block(cols)
    if kernel == "norm_forward":
        whole = [Config(block, rows, warps, stages, per_sm) for rows in (1, 2, 4) for warps in (1, 2, 4, 8, 16, 32)
                 for stages, per_sm in ((1, 0), (3, 1), (3, 4)) if 4 <= rows * block // (32 * warps) <= 32]  # fmt: skip
        return whole + [Config(b, 1, 8, stages) for b in (1024, 4096) for stages in (1, 3) if b < cols]
    if kernel == "norm_backward":
        tiles = [b for b in (256, 1024, 4096, 8192, block) if b <= block]
        return [Config(b, rows, warps, stages, per_sm) for b in dict.fromkeys(tiles) for rows in (1, 2, 4)
                for warps in (2, 4, 8, 16) for stages in (1, 3) for per_sm in (1, 2)
                if 8 <= rows * b // (32 * warps) <= 32]  # fmt: skip
    raise ValueError(f"no candidates for kernel {kernel!r}")
