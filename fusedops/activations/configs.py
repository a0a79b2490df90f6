"""Configs of the activation kernels: heuristics, and the candidates to measure."""

from __future__ import annotations

from ..core.configs.tuning_key import Config, TuningKey, around, block_holding, in_buckets

__all__ = ["VECTOR", "candidates", "heuristic", "valid"]

# Elements of a tile: sixteen per thread of four warps; half as many for few rows.
_ELEMENTS = 2048
# Buckets of rows: up to 255; from 4096 on.
_FEW, _MANY = 1, 3
# Vectors are tuned as rows of so many elements.
VECTOR = 1024

# Candidates for vectors: columns and warps.
_VECTOR_TILES = (
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


def _fitting(cols: int, itemsize: int, most: int) -> int:
    """The widest tile that is filled, or 256 columns."""
    block = min(block_holding(cols), most)
    while block > 256 and not _is_filled(cols, itemsize, block):
        block //= 2
    return block


def _is_filled(cols: int, itemsize: int, block: int) -> bool:
    """Whether few lanes of a row's tiles are idle.

    Of 16 bits that are loaded in vectors a quarter may be. On an H200 in bf16, bias-GELU, forward
    and backward, in tiles of 512 columns or less, and of 1024::

        768 columns    95.9 and 89.1 us        2560 columns    95.3 and 86.5 us
        1536 columns   95.3 and 90.4 us        3584 columns    95.6 and 85.6 us

    Else it is a sixteenth of the row's columns.
    """
    lanes = -(-cols // block) * block
    if itemsize == 2 and cols % 8 == 0:
        return lanes * 3 <= cols * 4
    return lanes * 16 <= cols * 17


def _tile(cols: int, itemsize: int, bucket: int) -> Config:
    """The config of kernels without sums: any tile is correct."""
    if itemsize == 8:
        block = _fitting(cols, itemsize, 512)
        return Config(block, max(1, 512 // block), 8)
    block = _fitting(cols, itemsize, 1024)
    elements = _ELEMENTS // 2 if bucket <= _FEW else _ELEMENTS
    return Config(block, max(1, elements // block), 4)


def _reduction(cols: int, itemsize: int, bucket: int) -> Config:
    """The config of the backward with a bias gradient.

    Tiles of columns with several rows, whose loads are pipelined.
    """
    block = _fitting(cols, itemsize, 1024)
    # Half a tile, where rows are few or an element takes two registers.
    half_rows = max(1, _ELEMENTS // 2 // block)
    if itemsize == 8:
        return Config(block, half_rows, 4, 3, 4)
    if bucket > _FEW:
        return Config(block, max(1, _ELEMENTS // block), 4, 3, 4 if block == 1024 else 2)
    if block == 1024:
        return Config(block, half_rows, 4, 3, 4)
    return Config(block, half_rows, 2, 3, 8)


def _pointwise(itemsize: int, *, backward: bool) -> Config:
    """The config of vectors: 16 elements per thread, and two in fp64.

    The backward has 8, because an element takes more registers.
    """
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
    """Whether the tile leaves few lanes idle: see `_is_filled`."""
    cols, block = key.cols, config.block_n
    if key.is_vector:
        return 16 <= block <= 8 * VECTOR and config.rows == 1
    if not 16 <= block <= block_holding(cols):
        return False
    return block <= 256 or _is_filled(cols, key.itemsize, block)


def candidates(key: TuningKey) -> list[Config]:
    """The heuristic's config and others to measure; the same set for any number of rows."""
    heuristics = in_buckets(heuristic, key)
    # The set may not depend on the bucket: `fingerprint` digests it, for all buckets of a row in a
    # table.
    first = heuristics[_MANY]
    if key.is_vector:
        return list(dict.fromkeys([first, *[Config(b, 1, warps) for b, warps in _VECTOR_TILES]]))
    others = _other_reductions(first) if "1 sums" in key.variant else _other_tiles(first)
    ordered = dict.fromkeys((heuristics[key.bucket], *heuristics, *others))
    return [config for config in ordered if valid(key, config)]


def _other_reductions(first: Config) -> list[Config]:
    """The neighbours of a persistent config, and tiles half and twice as wide."""
    block, rows = first.block_n, first.rows
    narrower = Config(block // 2, rows * 2, first.warps, 3, first.per_sm)
    wider = Config(block * 2, max(rows // 2, 1), first.warps, 3, first.per_sm)
    return [*around(first), narrower, wider]


def _other_tiles(first: Config) -> list[Config]:
    """Tiles half and twice as wide or high, with 8 to 32 elements per thread."""
    block, rows = first.block_n, first.rows
    fewer_rows = max(rows // 2, 1)
    tiles = (
        (block, rows),
        (block, rows * 2),
        (block, fewer_rows),
        (block // 2, rows * 2),
        (block * 2, fewer_rows),
    )
    return [
        Config(columns, height, warps)
        for columns, height in tiles
        for warps in (2, 4, 8)
        if 8 <= columns * height // (32 * warps) <= 32
    ]
