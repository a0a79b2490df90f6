"""Configs of the activation kernels: heuristics, and the candidates to measure."""

from __future__ import annotations

from ..core.tuning_key import Config, TuningKey, around, block_holding, in_buckets

__all__ = ["VECTOR", "candidates", "heuristic", "valid"]

# Elements of a tile: sixteen per thread of four warps; half as many for few rows.
_ELEMENTS = 2048
# Buckets of rows: up to 255; from 4096 on.
_FEW, _MANY = 1, 3
# Vectors are tuned as rows of so many elements.
VECTOR = 1024


def _fitting(cols: int, most: int) -> int:
    """The widest tile that leaves little of a row's last tile empty: for 11,008 columns 256 (43 tiles), not 1024."""
    block = min(block_holding(cols), most)
    while block > 256 and -(-cols // block) * block * 16 > cols * 17:
        block //= 2
    return block


def _tile(cols: int, itemsize: int, bucket: int) -> Config:
    """Kernels without sums: any tile is correct."""
    if itemsize == 8:
        block = _fitting(cols, 512)
        return Config(block, max(1, 512 // block), 8)
    block = _fitting(cols, 1024)
    return Config(block, max(1, (_ELEMENTS // 2 if bucket <= _FEW else _ELEMENTS) // block), 4)


def _reduction(cols: int, itemsize: int, bucket: int) -> Config:
    """The backward with a bias gradient: column tiles with several rows, whose loads are pipelined."""
    block = _fitting(cols, 1024)
    if bucket <= _FEW and itemsize < 8:
        return Config(block, max(1, _ELEMENTS // 2 // block), *((4, 3, 4) if block == 1024 else (2, 3, 8)))
    rows = max(1, _ELEMENTS // (2 if itemsize == 8 else 1) // block)
    return Config(block, rows, 4, 3, 4 if block == 1024 or itemsize == 8 else 2)


def _pointwise(itemsize: int, *, backward: bool) -> Config:
    """Vectors: 16 elements for each thread, 8 in the backward, which needs more registers for each; two in fp64."""
    if itemsize == 8:
        return Config(512, 1, 8)
    return Config(_ELEMENTS, 1, 8 if backward else 4)


def heuristic(key: TuningKey) -> Config:
    """The config where no measurement exists."""
    if key.is_vector:
        return _pointwise(key.itemsize, backward=key.kernel == "pointwise_backward")
    rule = _reduction if "1 sums" in key.variant else _tile
    return rule(key.cols, key.itemsize, key.bucket)


def valid(key: TuningKey, config: Config) -> bool:
    """Whether the tile leaves little of a row's last one empty."""
    cols, block = key.cols, config.block_n
    if key.is_vector:
        return 16 <= block <= 8 * VECTOR and config.rows == 1
    return 16 <= block <= block_holding(cols) and (block <= 256 or -(-cols // block) * block * 16 <= cols * 17)


def candidates(key: TuningKey) -> list[Config]:
    """The heuristic's config and others to measure; the same set for any number of rows."""
    heuristics = in_buckets(heuristic, key)
    first = heuristics[_MANY]
    block, rows = first.block_n, first.rows
    if key.is_vector:
        sizes = (
            (512, 2),
            (512, 4),
            (1024, 2),
            (1024, 4),
            (1024, 8),
            (2048, 4),
            (2048, 8),
            (2048, 16),
            (4096, 8),
            (4096, 16),
        )
        return list(dict.fromkeys([first, *[Config(b, 1, warps) for b, warps in sizes]]))
    if "1 sums" in key.variant:
        moved = ((block // 2, rows * 2), (block * 2, max(rows // 2, 1)))
        others = around(first) + [Config(b, r, first.warps, 3, first.per_sm) for b, r in moved]
    else:
        tiles = ((block, rows), (block, rows * 2), (block, max(rows // 2, 1)), (block // 2, rows * 2),
                 (block * 2, max(rows // 2, 1)))  # fmt: skip
        others = [Config(b, r, warps) for b, r in tiles for warps in (2, 4, 8) if 8 <= b * r // (32 * warps) <= 32]
    return list(dict.fromkeys(c for c in (heuristics[key.bucket], *heuristics, *others) if valid(key, c)))
