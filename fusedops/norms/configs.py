"""Configs of the norm kernels: heuristics from hidden size and registers, and the candidates to measure."""

from __future__ import annotations

from ..core.tuning_key import (
    Config,
    TuningKey,
    around,
    block_holding,
    fewest_warps,
    in_buckets,
    power_of_two,
    tiles_holding,
)

__all__ = ["MORE_HELD", "MORE_HELD_MATTERS", "candidates", "heuristic", "valid"]

# The mark of a backward of wide rows of 16 bits whose registers hold more than those of most: parameters of 32 bits, or both
# parameters where the output is kept.
MORE_HELD, MORE_HELD_MATTERS = "more held", 8192

# The widest row that a forward program holds whole, and the widest in 16 bits.
_WHOLE_FORWARD = 16384
_WHOLE_FORWARD_16BIT = 32768
# The widest LayerNorm with a residual that runs in 32 warps; wider ones run in 16, which have twice the registers each.
_WITH_VECTORS = 24576
# The widest that a backward program holds whole in 16 and 32 bits.
_WHOLE_BACKWARD = 8192
# The limit of a backward program: bytes of rows loaded ahead in shared memory.
_AHEAD_BYTES = 128 * 1024
# Buckets of rows: up to 255; up to 4095; up to 65535.
_FEW, _SOME, _MANY = 1, 2, 3


def _warps(elements: int, each: int, most: int = 16) -> int:
    return min(max(power_of_two(elements // (32 * each)), 1), most)


def _forward(cols: int, itemsize: int, bucket: int, adds: bool, rms: bool) -> Config:
    """The forward: a whole row per program where it fits, tiles beyond.

    ``adds``: a residual is a second input. Few rows need short programs; with many rows and a residual a thread has more
    elements.
    """
    block, parts = _forward_tiles(cols, itemsize, adds, rms)
    if block * parts == 8192 and not (adds or rms or bucket >= _MANY):
        block, parts = 8192, 1  # few rows alone are faster in one tile
    if parts > 1:
        return _forward_of_parts(cols, block, parts, adds, rms)
    if itemsize > 2:
        return _wide_dtype_forward(block, itemsize, bucket, adds)
    if block > _WHOLE_FORWARD:
        if adds and bucket >= _SOME and not _is_unaligned(cols, itemsize):
            return Config(4096, 1, 8, 3)
        # The widest tile that leaves at most a tenth of the lanes idle.
        passes = (Config(_WHOLE_FORWARD, 1, 16), Config(8192, 1, 8), Config(4096, 1, 8))
        return next((config for config in passes if config.lanes_for(cols) <= 1.1 * cols), passes[-1])
    if block == _WHOLE_FORWARD:
        return Config(block, 1, 32, registers=64) if adds and cols == block else Config(block, 1, 16)
    if adds and bucket <= _FEW and block >= 1024:
        return Config(block, 1, _warps(block, 8 if rms else 16))
    if block >= 2048:
        few_warps = (block == 4096 and bucket >= _MANY) if adds else (block == 8192 and bucket < _MANY)
        return Config(block, 1, _warps(block, 32 if few_warps else 16))
    if adds and block <= 128:
        return Config(block, 2048 // block, 8)
    rows = max(1, (2048 if bucket >= _MANY and not adds else 1024) // block)
    if adds and bucket <= _SOME:
        rows = 1
    each = 32 if bucket >= _SOME and (block < 1024 or _is_unaligned(cols, itemsize)) else 16
    if rows == 1:
        each = 8 if block <= 512 else 16
    return Config(block, rows, _warps(block * rows, each))


def _forward_of_parts(cols: int, block: int, parts: int, adds: bool, rms: bool) -> Config:
    """Whole rows in several tiles of 16 bits."""
    if adds and not rms and cols > _WITH_VECTORS:
        return Config(4096, 1, 16, parts=-(-cols // 4096))
    width, each, most = block * parts, 24, 32
    if width <= _WHOLE_FORWARD and not _is_unaligned(cols, 2):
        most = 32 if adds else 8
        each = 56 if adds and (parts == 7 or (width <= 5120 and parts == 5)) else 24
    warps = fewest_warps(width, each, most)
    # With two inputs the compiler would take more registers, and only one program of sixteen warps be resident.
    return Config(block, 1, warps, registers=64 if warps >= 16 and adds else 0, parts=parts)


def _forward_tiles(cols: int, itemsize: int, adds: bool, rms: bool) -> tuple[int, int]:
    """The columns and the number of tiles that hold a row. Several in 16 bits alone: in fp32 they gain nothing.

    Tiles without idle lanes are loaded without a mask. In a row with idle lanes only the last tile needs one.

    The widest rows take all registers of a multiprocessor, in 32 warps. A thread has four columns of a tile; or, with a
    residual, the eight of one draw of the mask. Two inputs that are loaded element by element take too many registers.
    """
    block, parts = tiles_holding(cols)
    if itemsize > 2:
        return block_holding(cols), 1
    if _WHOLE_FORWARD < cols <= _WHOLE_FORWARD_16BIT and not (adds and _is_unaligned(cols, itemsize)):
        block = 8192 if adds else 4096
    elif block * parts > _WHOLE_FORWARD:
        return block_holding(cols), 1
    elif not _is_unaligned(cols, itemsize) and (
        (block == 8192 and not adds) or (6 * 2048 < cols <= 7 * 2048 and not (adds and rms))
    ):
        block = 2048
    return block, -(-cols // block)


def _wide_dtype_forward(block: int, itemsize: int, bucket: int, adds: bool) -> Config:
    """In fp32 and fp64: fewer elements per thread, and tiles from narrower rows on."""
    if block > _WHOLE_FORWARD or (itemsize == 8 and block > 4096):
        if adds:
            return Config(4096, 1, 8, 3) if itemsize == 4 else Config(2048, 1, 4, 3)
        return Config(_WHOLE_FORWARD, 1, 16) if itemsize == 4 else Config(8192, 1, 16)
    if block == _WHOLE_FORWARD:
        return Config(block, 1, 32, registers=64) if adds else Config(block, 1, 16)
    if bucket >= _MANY and block <= 256:
        return Config(block, 8, _warps(block * 8, 4) if adds else 4)
    if block <= 2048 and bucket <= _SOME and (adds or bucket == _SOME):
        return Config(block, 1, _warps(block, 4 if adds and block > 256 else 8))
    rows = max(1, (2048 if itemsize == 4 and bucket >= _MANY and not adds else 1024) // block)
    return Config(block, rows, _warps(block * rows, 16))


def _dropout_add(cols: int, bucket: int) -> Config:
    """The forward without a norm: any tile is correct; few rows get small tiles."""
    if block_holding(cols) <= 256:
        block = min(block_holding(cols), 128)
        return Config(block, 2048 // block, 8)
    if bucket <= _SOME:
        block = min(block_holding(cols), 1024)
        return Config(block, 1024 // block, 4)
    block = min(block_holding(cols), 2048)
    return Config(block, 2048 // block, 8 if block == 2048 else 4)


def _is_unaligned(cols: int, itemsize: int) -> bool:
    """Whether rows of 16 bits are loaded element by element.

    That takes more registers: a tile of 4096 columns spills them, and the parts of a row are to be narrower.
    """
    return itemsize == 2 and cols % 8 != 0


def _backward(cols: int, itemsize: int, bucket: int, sums: int, drops: bool, holds_more: bool) -> Config:
    """The backward: whole rows if the column sums fit in registers, else rows that programs share.

    ``sums`` is the number of parameter gradients; ``drops`` says whether a mask is drawn.
    """
    few = sums < 3 and not drops
    if (config := _aligned_backward(cols, itemsize, bucket, sums, drops, holds_more)) is not None:
        return config
    block, parts = tiles_holding(cols)
    if block * parts > (_WHOLE_BACKWARD if itemsize < 8 else _WHOLE_BACKWARD // 4):
        return _shared_backward(cols, itemsize, sums)
    if _is_unaligned(cols, itemsize) and (config := _unaligned_backward(cols, block, parts, few=few)):
        return config
    if parts > 1:
        return _backward_of_parts(cols, block, parts, itemsize, few=few)
    if itemsize > 2:
        return _wide_dtype_backward(block, itemsize, bucket, sums)
    if block == 8192:
        return Config(block, 1, 16 if sums > 2 else 8, 3, 1)
    if block == 4096 and bucket >= _MANY:
        return Config(block, 1, 4, 3, 2)
    if block == 2048 and bucket >= _MANY:
        return Config(block, 2, 4, 3, 2)
    if block >= 2048:
        rows = 2 if block == 2048 or bucket >= _SOME else 1
        return Config(block, rows, 8, _stages(cols * itemsize * rows), 1)
    warps = _warps(block, 8)
    rows = _rows(block, warps, 16 if bucket == _FEW else 32)
    crowded = (bucket > _MANY and block <= 512) or (bucket == _MANY and block == 256)
    return Config(block, rows, warps, 3, 4 if crowded else 2)


def _aligned_backward(cols: int, itemsize: int, bucket: int, sums: int, drops: bool, holds_more: bool) -> Config | None:
    """Aligned rows of 16 bits that are wider than 4096; None where the width makes no difference."""
    if itemsize > 2 or _is_unaligned(cols, itemsize) or cols <= 4096:
        return None
    # Whole rows in eight warps, as far as registers hold a row, the next one, and the sums.
    few_held = bucket >= _SOME and not (drops or holds_more)
    parts, most = -(-cols // 2048), (7, 7, 6, 0)[sums] if few_held else 4
    if 4 <= parts <= most and sums < 3 and not (drops and cols == 8192):
        return Config(2048, 1, 8, 3 if drops or parts > 4 else 4, 1, parts=parts)
    if sums > 2 and cols <= 3 * _SHARED_BY_MANY.columns and bucket >= _SOME:
        return _SHARED_BY_MANY
    return None


def _unaligned_backward(cols: int, block: int, parts: int, *, few: bool) -> Config | None:
    """Rows of 16 bits whose elements are loaded one or two at a time; None where that makes no difference."""
    if not few and block * parts > 4096:
        return Config(512, 1, 4, 1, 2, parts=3)
    if block == 8192:
        return Config(1024, 1, 8, 1, 1, parts=8)
    if block == 4096 and cols % 2:  # the next rows are held in registers
        return Config(1024, 1, 16 if few else 8, 3, 1, parts=4)
    if block == 4096:
        return Config(1024, 1, 4, 3, 2, parts=4) if few else Config(512, 1, 4, 1, 2, parts=8)
    return None


def _backward_of_parts(cols: int, block: int, parts: int, itemsize: int, *, few: bool) -> Config:
    """Whole rows in several tiles: eight warps a multiprocessor. With ``few`` registers for other things, more programs."""
    width = block * parts
    crowds = few and itemsize == 2 and parts == 5 and (width == 5120 or not _is_unaligned(cols, itemsize))
    warps = fewest_warps(width, 40 if crowds else 32)
    stages = 4 if itemsize == 2 and (parts == 5 or warps == 8) else 3
    return Config(block, 1, warps, stages, max(8 // warps, 1), parts=parts)


# Configs of programs that share rows, the widest first. Of three sums, and of the rows that wait for the others' sums,
# registers hold six thousand columns in one row, or four thousand in two.
_SHARED = {
    2: (Config(8192, 1, 8, 3, 1), Config(2048, 1, 8, 3, 1, parts=3), Config(4096, 1, 4, 3, 2), Config(1024, 1, 4, 3, 2, parts=3)),
    4: (Config(4096, 1, 8, 3, 1), Config(1024, 1, 8, 3, 1, parts=3), Config(2048, 1, 4, 3, 2)),
    8: (Config(2048, 1, 8, 1, 1), Config(1024, 1, 8, 1, 1)),
}  # fmt: skip


# Short programs, for rows in which wider ones leave too many lanes idle.
_SHARED_BY_MANY = Config(512, 1, 2, 3, 4, parts=3)
# Narrow programs were measured with at most so many that share a row.
_MOST_SHARING = 8


def _shared_backward(cols: int, itemsize: int, sums: int) -> Config:
    """Programs of as many columns as leave at most a tenth of the lanes idle; else with the fewest idle lanes.

    With three sums in 16 bits the fewest idle lanes are best; where an eighth of the lanes would be idle, many short
    programs are.
    """
    found = _SHARED[itemsize]
    if itemsize == 2 and sums > 2:
        found = (found[1], Config(4096, 2, 8, 3, 1), Config(2048, 1, 4, 3, 2), found[3])
    fewest = min(found, key=lambda config: config.lanes_for(cols))
    best = next((config for config in found if config.lanes_for(cols) <= 1.1 * cols), fewest)
    if itemsize > 2 or _is_unaligned(cols, itemsize):
        return best
    if sums > 2 and cols <= _MOST_SHARING * found[3].columns:
        best = min((found[3], found[1]), key=lambda config: config.lanes_for(cols))
    if cols <= _MOST_SHARING * _SHARED_BY_MANY.columns and 8 * best.lanes_for(cols) > 9 * cols:
        return _SHARED_BY_MANY
    return best


def _wide_dtype_backward(block: int, itemsize: int, bucket: int, sums: int) -> Config:
    """In fp32 and fp64: half as many elements per tile."""
    if block == 2048 and itemsize == 4 and bucket >= _SOME:
        return Config(block, 1, 4, 3, 2) if bucket >= _MANY else Config(block, 2, 8, 3, 1)
    if block >= 2048:
        return Config(block, 1, 8, _stages(block * itemsize) if block < 8192 else 3, 1)
    many = bucket > _MANY and block <= 512
    warps = _warps(block, 8 if many or block > 512 else 4)
    rows = _rows(block, warps, 8 if bucket == _FEW and block <= 512 else 16)
    return Config(block, rows, warps, 3, 4 if many else 1 if itemsize == 8 and block > 512 and bucket >= _SOME else 2)


def _rows(block: int, warps: int, each: int) -> int:
    """Rows of a tile with so many elements per thread, each three times in registers: dy, the row, and their sums."""
    return min(max(1, each * 32 * warps // block), 16)


def _stages(nbytes: int) -> int:
    """The pipeline's stages for two tensors' tiles of so many bytes."""
    ahead = 2 * nbytes
    return 3 if ahead * 2 <= _AHEAD_BYTES else 2 if ahead <= _AHEAD_BYTES else 1


def _backward_of_sum(cols: int, itemsize: int, bucket: int) -> Config:
    """The backward without a norm: any tile is correct."""
    block = min(block_holding(cols), 1024 if itemsize != 4 else 512)
    few = bucket <= _FEW
    if itemsize > 2:
        if few and block <= 256:
            return Config(block, 1024 // block, 2, 3, 8)
        return Config(block, 2048 // block, 4, 3, 2 if bucket == _MANY and cols <= 512 else 4)
    if block == 1024:
        return Config(block, 4 if bucket == _SOME and cols <= block else 2, 4, 3, 4)
    return Config(block, (1024 if few else 2048) // block, 2, 3, 8 if few else 4)


def heuristic(key: TuningKey) -> Config:
    """The config where no measurement exists."""
    cols, itemsize, bucket, variant = key.cols, key.itemsize, key.bucket, key.variant
    if key.kernel == "norm_forward":
        return _forward(cols, itemsize, bucket, "adds" in variant, "rms" in variant)
    if key.kernel == "dropout_add":
        return _dropout_add(cols, bucket)
    if "none" in variant:
        return _backward_of_sum(cols, itemsize, bucket)
    return _backward(cols, itemsize, bucket, _sums(key), "dropout" in variant, MORE_HELD in variant)


def _sums(key: TuningKey) -> int:
    """The number of parameter gradients of a backward."""
    return int(key.variant[2].partition(" ")[0])


def valid(key: TuningKey, config: Config) -> bool:
    """Whether the tiles are at most those that hold a row with the fewest idle lanes.

    Tiles of several rows that fill the registers are valid only without idle lanes, as they were measured, and wide
    tiles only of aligned rows. A forward reads rows of 16 bits wider than others hold either whole or in two passes.
    A backward of less than three sums reads wide rows of 16 bits in several tiles, if a single tile would leave lanes idle.
    """
    block, parts = block_holding(key.cols), 1
    if key.kernel == "norm_forward":
        block, parts = _forward_tiles(key.cols, key.itemsize, "adds" in key.variant, "rms" in key.variant)
        is_wide = key.itemsize == 2 and key.cols > _WHOLE_FORWARD
        if is_wide and (parts > 1) != (config.columns >= key.cols):
            return False
        if config.parts > 1 and config.columns < key.cols:
            return False
    elif key.kernel == "norm_backward" and "none" not in key.variant:
        block, parts = tiles_holding(key.cols)
        if key.itemsize == 2 and config.block_n == 8192 > key.cols and _sums(key) < 3:
            return False
        if config.rows > 1 and config.columns * config.rows > _WHOLE_BACKWARD and key.cols % config.columns:
            return False
        if _is_unaligned(key.cols, key.itemsize) and config.block_n >= 4096:
            return False
    return config.block_n >= 16 and config.columns <= block * parts


def candidates(key: TuningKey) -> list[Config]:
    """The heuristic's config and others to measure; the same set for any number of rows."""
    heuristics = in_buckets(heuristic, key)
    first = heuristics[_MANY]
    if key.kernel == "norm_forward":
        others = _forwards(key)
    elif key.kernel == "dropout_add":
        block = min(first.block_n, 1024)
        others = [Config(b, max(1, elements // b), warps) for b in (block // 2, block, first.block_n, 4096)
                  for elements, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8))]  # fmt: skip
    else:
        others = around(first) + _other_backwards(key.cols, key.itemsize, key.variant[0] != "none")
    return list(dict.fromkeys(c for c in (heuristics[key.bucket], *heuristics, *others) if valid(key, c)))


def _forwards(key: TuningKey) -> list[Config]:
    """Whole rows with few or many elements per thread, in one-tile and persistent programs; tiles of wide rows."""
    cols, itemsize = key.cols, key.itemsize
    block, parts = _forward_tiles(cols, itemsize, "adds" in key.variant, "rms" in key.variant)
    found = []
    if parts > 1:
        warps = fewest_warps(block * parts, 24)
        found = [Config(block, 1, w, registers=registers, parts=parts)
                 for w, registers in ((warps, 0), (warps, 64), (warps // 2, 0), (2 * warps, 0)) if 1 <= w <= 32]  # fmt: skip
        if cols > _WHOLE_FORWARD:
            tiles_of_row = ((4096, 32), (4096, 64), (8192, 64), (32768, 64))
            found += [Config(b, 1, warps, registers=registers, parts=-(-cols // b)) for b, registers in tiles_of_row]
    elif block <= _WHOLE_FORWARD // (itemsize // 2):
        once = max(1, 1024 // block)
        for rows in dict.fromkeys((once, 2 * once, 4 * once if block <= 1024 else 1, 1)):
            each = (8, 16, 32) if itemsize == 2 else (4, 8, 16)
            found += [Config(block, rows, _warps(block * rows, e, 32)) for e in each if block * rows >= e * 32]
        warps = _warps(block * once, each[1], 16)
        found += [Config(block, once, warps, 3, per_sm) for per_sm in (1, 4)]
        if block == _WHOLE_FORWARD:
            found.append(Config(block, 1, 32, registers=64))
    # Tiles that are passed over.
    tiles = ((2048, 4, 3), (4096, 8, 1), (4096, 8, 3), (8192, 16, 1), (8192, 8, 1), (16384, 16, 1))
    found += [Config(b, 1, warps, stages) for b, warps, stages in tiles if 4096 < cols > b]
    if itemsize == 2 and 4096 < cols <= _WHOLE_FORWARD:
        found += [Config(b, 1, 8, parts=-(-cols // b)) for b in (2048, 4096)]
    return found


def _other_backwards(cols: int, itemsize: int, normalizes: bool) -> list[Config]:
    """Tiles for any number of columns, and of wide rows those that programs share."""
    if not normalizes:
        return [Config(512, 4, 4, 3, 4), Config(2048, 1, 4, 3, 4), Config(2048, 1, 8, 3, 2)]
    if cols <= 4096:
        return []
    parts = -(-cols // 2048)
    whole = [Config(2048, 1, 8, stages, 1, parts=parts) for stages in (3, 4)] if itemsize == 2 and parts <= 7 else []
    return [*whole, *_SHARED[itemsize], _SHARED_BY_MANY, Config(4096, 2, 8, 3, 1)]
