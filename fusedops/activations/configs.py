"""How the activation kernels cut their work: heuristics, and what is worth measuring."""

from __future__ import annotations

from ..core.question import Config, Question, around, block_holding, in_buckets

__all__ = ["candidates", "heuristic", "sum_partials", "valid"]

# Elements of a tile: sixteen for each thread of four warps; half as many where there are few rows.
_ELEMENTS = 2048
# Buckets of rows: up to 255; from 4096 on.
_FEW, _MANY = 1, 3


def _fitting(cols: int, most: int) -> int:
    """The widest tile that leaves little of a row's last tile empty: 11,008 is 43 times 256, not 11 times 1024."""
    block = min(block_holding(cols), most)
    while block > 256 and -(-cols // block) * block * 16 > cols * 17:
        block //= 2
    return block


def _tile(cols: int, itemsize: int, bucket: int) -> Config:
    """Kernels without sums: any tile serves."""
    if itemsize == 8:
        block = _fitting(cols, 512)
        return Config(block, max(1, 512 // block), 8)
    block = _fitting(cols, 1024)
    return Config(block, max(1, (_ELEMENTS // 2 if bucket <= _FEW else _ELEMENTS) // block), 4)


def _reduction(cols: int, itemsize: int, bucket: int) -> Config:
    """The backward with a bias gradient: column tiles, several rows at a time, the next rows' loads taken ahead."""
    block = _fitting(cols, 1024)
    if bucket <= _FEW and itemsize < 8:
        return Config(block, max(1, _ELEMENTS // 2 // block), *((4, 3, 4) if block == 1024 else (2, 3, 8)))
    rows = max(1, _ELEMENTS // (2 if itemsize == 8 else 1) // block)
    return Config(block, rows, 4, 3, 4 if block == 1024 or itemsize == 8 else 2)


def sum_partials(block_n: int) -> Config:
    """The reduction of the partial sums."""
    return Config(min(32, block_n), 64, 4)


def heuristic(question: Question) -> Config:
    """The config where nobody measured."""
    rule = _reduction if "1 sums" in question.variant else _tile
    return rule(question.cols, question.itemsize, question.bucket)


def valid(question: Question, config: Config) -> bool:
    """Any tile serves that leaves little of a row's last one empty."""
    cols, block = question.cols, config.block_n
    return 16 <= block <= block_holding(cols) and (block <= 256 or -(-cols // block) * block * 16 <= cols * 17)


def candidates(question: Question) -> list[Config]:
    """The heuristic's config, and others worth measuring: the same for any number of rows."""
    heuristics = in_buckets(heuristic, question)
    first = heuristics[_MANY]
    block, rows = first.block_n, first.rows
    if "1 sums" in question.variant:
        moved = ((block // 2, rows * 2), (block * 2, max(rows // 2, 1)))
        others = around(first) + [Config(b, r, first.warps, 3, first.per_sm) for b, r in moved]
    else:
        tiles = ((block, rows), (block, rows * 2), (block, max(rows // 2, 1)), (block // 2, rows * 2),
                 (block * 2, max(rows // 2, 1)))  # fmt: skip
        others = [Config(b, r, warps) for b, r in tiles for warps in (2, 4, 8) if 8 <= b * r // (32 * warps) <= 32]
    return list(dict.fromkeys(c for c in (heuristics[question.bucket], *heuristics, *others) if valid(question, c)))
