"""Configs of generated kernels: heuristics from the columns and the bytes of an element, and the candidates to measure."""

from __future__ import annotations

from ..core.tuning_key import Config, TuningKey, around, block_holding, in_buckets

__all__ = ["candidates", "heuristic", "sum_partials", "valid"]

_WHOLE = 16384


def heuristic(key: TuningKey) -> Config:
    """A whole row a program; of short rows as many as make a tile of some thousand elements."""
    block = block_holding(key.cols)
    if key.cols > _WHOLE:
        return _of_long_rows(key)
    least = 2048 if key.bucket >= 2 else 512
    rows = max(1, least // block)
    warps = min(max(rows * block // 512, 1), 16)
    if key.variant[1] != "0 sums":
        return Config(
            block, rows, min(max(rows * block // 512, 4), 16), 3 if block <= 4096 else 2, 1 if block >= 2048 else 2
        )
    return Config(block, rows, warps)


def _of_long_rows(key: TuningKey) -> Config:
    """Rows that are passed over tile by tile, or a tile of columns a program."""
    if key.variant[0] == "moments":
        return Config(4096, 1, 8, 3)
    return Config(1024, 4, 4, 3, 4) if key.variant[1] != "0 sums" else Config(2048, 1, 4)


def candidates(key: TuningKey) -> list[Config]:
    """The heuristics' configs of all buckets and their neighbours."""
    found: dict[Config, None] = {}
    for config in in_buckets(heuristic, key):
        for near in around(config) if config.per_sm else _near(config):
            found[near] = None
    return list(found)


def _near(config: Config) -> list[Config]:
    tries = [(config.rows * r, config.warps * w) for r, w in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 2))]
    halves = [(config.rows, config.warps // 2), (config.rows // 2, config.warps // 2)]
    return [Config(config.block_n, rows, warps) for rows, warps in (*tries, *halves)
            if rows >= 1 and 1 <= warps <= 32]  # fmt: skip


def valid(key: TuningKey, config: Config) -> bool:
    """Whether a row is whole in the block, with few idle lanes."""
    return config.block_n == block_holding(key.cols) if key.cols <= _WHOLE else config.block_n >= 512


def sum_partials(cols: int) -> Config:
    """Of the kernel that adds the parts of sums over rows."""
    block = min(block_holding(cols), 64)
    return Config(block, 64, 4)
