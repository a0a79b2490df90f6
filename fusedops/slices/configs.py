"""How the slices kernels cut their work where no table knows better: heuristics from dtype and widest slice."""

from __future__ import annotations

from dataclasses import replace

from ..core.tuning import Config

__all__ = ["backward", "candidates", "forward", "sum_partials", "widest"]


def widest(itemsize: int) -> int:
    """The widest slice whose rows a program holds whole."""
    return 4096 if itemsize < 8 else 2048


def _tile(itemsize: int, width: int, each: int, warps: int, *, equal: bool) -> Config:
    """A tile with ``each`` elements a thread.

    As many lanes as a row of threads loads with 16 bytes each: slices of ordinary width then stay within a warp, and
    slices of one width lie side by side. Slices of other widths than their neighbours' do not; fewer lanes leave fewer
    of them without a slice, and the tile has more rows instead.
    """
    vector = max(16 // itemsize, 2)
    while width > 32 * warps * each:
        warps *= 2
    lanes = 32 * vector * (warps if equal else 1)
    return Config(lanes, max(1, 32 * warps * each // lanes), warps)


def forward(itemsize: int, width: int, align: int, *, equal: bool) -> Config:
    """The forward: one tile a program.

    ``width`` is the widest slice's, ``align`` a factor that all widths have, ``equal`` whether all are the same.
    """
    each = 8 if itemsize > 2 else 32 if equal and align > 1 else 16
    return _tile(itemsize, width, each, 4, equal=equal)


def backward(itemsize: int, width: int, align: int, *, equal: bool) -> Config:
    """The backward: few programs, each with a loop over tiles.

    Slices whose widths have no common factor, which ``align`` is then, load element by element: addresses and masks
    take the registers of half a tile. A kernel for several widths has the registers of its largest part.
    """
    each = 16 if itemsize == 2 and equal and align > 1 else 8 if align > 1 else 4
    tile = _tile(itemsize, width, each, 4 if equal else 2, equal=equal)
    # Left alone, the compiler gets this one down to 128 registers by way of the stack.
    registers = 168 if tile.warps == 8 and not equal else 0
    return replace(tile, stages=3, per_sm=max(1, 16 // tile.warps), registers=registers)


def sum_partials() -> Config:
    """The reduction of the partial sums."""
    return Config(32, 64, 4)


def candidates(kernel: str, itemsize: int, width: int, *, equal: bool) -> list[Config]:
    """Configs worth trying for a kernel."""
    tiles = [_tile(itemsize, width, each, warps, equal=equal) for warps in (2, 4, 8) for each in (4, 8, 16, 32)]
    if kernel == "slices_forward":
        return [replace(tile, stages=stages, per_sm=per_sm) for tile in dict.fromkeys(tiles)
                for stages, per_sm in ((1, 0), (3, 4), (3, 8))]  # fmt: skip
    if kernel == "slices_backward":
        return [replace(tile, stages=stages, per_sm=per_sm) for tile in dict.fromkeys(tiles) for stages in (1, 2, 3)
                for per_sm in (2, 3, 4, 6, 8)]  # fmt: skip
    raise ValueError(f"no candidates for kernel {kernel!r}")
