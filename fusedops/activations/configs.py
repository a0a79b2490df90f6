"""How the activation kernels cut their work where no table knows better."""

from __future__ import annotations

from ..core.tuning import Config

__all__ = ["candidates", "reduction", "sum_partials", "tile"]

# Elements of a tile: sixteen for each thread of four warps.
_TILE = 2048


def _block(cols: int) -> int:
    return max(1 << max(cols - 1, 0).bit_length(), 16)


def _fitting(cols: int, most: int) -> int:
    """The widest tile that leaves little of a row's last tile empty: 11,008 is 43 times 256, not 11 times 1024."""
    block = min(_block(cols), most)
    while block > 256 and -(-cols // block) * block * 16 > cols * 17:
        block //= 2
    return block


def tile(cols: int, itemsize: int) -> Config:
    """Kernels without sums: any tile serves."""
    if itemsize == 8:
        block = _fitting(cols, 512)
        return Config(block, max(1, 512 // block), 8)
    block = _fitting(cols, 1024)
    return Config(block, max(1, _TILE // block), 4)


def reduction(cols: int, itemsize: int) -> Config:
    """The backward with a bias gradient: column tiles, several rows at a time, the next rows' loads taken ahead."""
    block = _fitting(cols, 1024)
    return Config(block, max(1, _TILE // (2 if itemsize == 8 else 1) // block), 4, 3, 4)


def sum_partials(block_n: int) -> Config:
    """The reduction of the partial sums."""
    return Config(min(32, block_n), 64, 4)


def candidates(kernel: str, cols: int) -> list[Config]:
    """Configs worth trying for a kernel at a row length."""
    blocks = [b for b in (64, 256, 512, 1024, 2048) if b <= _block(cols)] or [_block(cols)]
    if kernel == "bias_act_backward":
        return [Config(b, rows, warps, stages, per_sm) for b in blocks for rows in (1, 2, 4, 8) for warps in (4, 8)
                for stages in (2, 3, 4) for per_sm in (2, 3, 4, 6) if 8 <= rows * b // (32 * warps) <= 32]  # fmt: skip
    if kernel in ("bias_act_forward", "glu_forward", "glu_backward"):
        return [Config(b, rows, warps) for b in blocks for rows in (1, 2, 4, 8, 16) for warps in (2, 4, 8)
                if 8 <= rows * b // (32 * warps) <= 32]  # fmt: skip
    raise ValueError(f"no candidates for kernel {kernel!r}")
