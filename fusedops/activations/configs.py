"""Configs of the activation kernels: heuristics, and the candidates to measure."""

from __future__ import annotations

from ..core.configs.tuning_key import Config, TuningKey, around, block_holding, in_buckets

__all__ = ["VECTOR", "candidates", "heuristic", "valid"]

# Elements of a tile, sixteen per thread of four warps. If there are few rows, it has half as many.
_ELEMENTS = 2048
# The bucket of up to 255 rows, and the bucket from 4096 rows on.
_FEW, _MANY = 1, 3
# Tuning keys count the elements of a vector as rows of so many columns.
VECTOR = 1024

# Candidates for vectors: elements of a tile, and warps.
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
    """Returns the widest block up to ``most`` that is filled (see `_is_filled`), or else 256."""
    block = min(block_holding(cols), most)
    while block > 256 and not _is_filled(cols, itemsize, block):
        block //= 2
    return block


def _is_filled(cols: int, itemsize: int, block: int) -> bool:
    """Returns whether few lanes of a row's tiles are idle.

    A quarter of the lanes may be idle if elements of 16 bits are loaded in vectors. On an H200,
    bias-GELU in bf16, forward and backward, takes with tiles of up to 512 columns, and of 1024::

        768 columns    95.9 and 89.1 us        2560 columns    95.3 and 86.5 us
        1536 columns   95.3 and 90.4 us        3584 columns    95.6 and 85.6 us

    Otherwise the tiles have at most a sixteenth more lanes than the row has columns.
    """
    lanes = -(-cols // block) * block
    if itemsize == 2 and cols % 8 == 0:
        return lanes * 3 <= cols * 4
    return lanes * 16 <= cols * 17


def _tile(cols: int, itemsize: int, bucket: int) -> Config:
    """Returns the config of kernels that sum nothing: any tile is correct."""
    if itemsize == 8:
        block = _fitting(cols, itemsize, 512)
        return Config(block, rows=max(1, 512 // block), warps=8)
    block = _fitting(cols, itemsize, 1024)
    elements = _ELEMENTS // 2 if bucket <= _FEW else _ELEMENTS
    return Config(block, rows=max(1, elements // block), warps=4)


def _reduction(cols: int, itemsize: int, bucket: int) -> Config:
    """Returns the config of the backward with a bias gradient.

    A program loops over tiles of several rows, whose loads are pipelined.
    """
    block = _fitting(cols, itemsize, 1024)
    # A tile has half the elements if there are few rows, or if an element takes two registers.
    half_rows = max(1, _ELEMENTS // 2 // block)
    if itemsize == 8:
        return Config(block, half_rows, warps=4, stages=3, per_sm=4)
    if bucket > _FEW:
        per_sm = 4 if block == 1024 else 2
        return Config(block, rows=max(1, _ELEMENTS // block), warps=4, stages=3, per_sm=per_sm)
    if block == 1024:
        return Config(block, half_rows, warps=4, stages=3, per_sm=4)
    return Config(block, half_rows, warps=2, stages=3, per_sm=8)


def _pointwise(itemsize: int, *, backward: bool) -> Config:
    """Returns the config of vectors: 16 elements per thread, and two in fp64.

    The backward has 8 elements per thread, because each takes more registers.
    """
    if itemsize == 8:
        return Config(512, rows=1, warps=8)
    return Config(_ELEMENTS, rows=1, warps=8 if backward else 4)


def heuristic(key: TuningKey) -> Config:
    """Returns the config for a key that was not measured."""
    if key.is_vector:
        return _pointwise(key.itemsize, backward=key.kernel == "pointwise_backward")
    rule = _reduction if "1 sums" in key.variant else _tile
    return rule(key.cols, key.itemsize, key.bucket)


def valid(key: TuningKey, config: Config) -> bool:
    """Returns whether a kernel may have the config: few lanes are idle, see `_is_filled`."""
    cols, block = key.cols, config.block_n
    if key.is_vector:
        return 16 <= block <= 8 * VECTOR and config.rows == 1
    if not 16 <= block <= block_holding(cols):
        return False
    return block <= 256 or _is_filled(cols, key.itemsize, block)


def candidates(key: TuningKey) -> list[Config]:
    """Returns the heuristic's config and others to measure: one set for all numbers of rows."""
    heuristics = in_buckets(heuristic, key)
    # The neighbours of this bucket's config are candidates for all buckets: a row of a table has
    # one `fingerprint` of the candidates, for all its buckets.
    center = heuristics[_MANY]
    if key.is_vector:
        tiles = [Config(block, rows=1, warps=warps) for block, warps in _VECTOR_TILES]
        return list(dict.fromkeys([center, *tiles]))
    others = _other_reductions(center) if "1 sums" in key.variant else _other_tiles(center)
    ordered = dict.fromkeys((heuristics[key.bucket], *heuristics, *others))
    return [config for config in ordered if valid(key, config)]


def _other_reductions(center: Config) -> list[Config]:
    """Returns the neighbours of a persistent config, and tiles half and twice as wide."""
    block, rows = center.block_n, center.rows
    narrower = Config(block // 2, rows * 2, center.warps, stages=3, per_sm=center.per_sm)
    wider = Config(block * 2, max(rows // 2, 1), center.warps, stages=3, per_sm=center.per_sm)
    return [*around(center), narrower, wider]


def _other_tiles(center: Config) -> list[Config]:
    """Returns tiles half and twice as wide or high, with 8 to 32 elements per thread."""
    block, rows = center.block_n, center.rows
    fewer_rows = max(rows // 2, 1)
    tiles = (
        (block, rows),
        (block, rows * 2),
        (block, fewer_rows),
        (block // 2, rows * 2),
        (block * 2, fewer_rows),
    )
    return [
        Config(tile_columns, tile_rows, warps)
        for tile_columns, tile_rows in tiles
        for warps in (2, 4, 8)
        if 8 <= tile_columns * tile_rows // (32 * warps) <= 32
    ]
