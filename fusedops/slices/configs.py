"""How the slices kernels cut their work where no table knows better: heuristics from dtype and widest slice."""

from __future__ import annotations

from ..core.tuning import Config

__all__ = ["backward", "candidates", "forward", "sum_partials", "widest"]


def widest(itemsize: int) -> int:
    """The widest slice whose rows a program holds whole."""
    return 4096 if itemsize < 8 else 2048


def _tile(itemsize: int, width: int, each: int) -> tuple[int, int, int]:
    """Lanes, rows and warps of a tile with ``each`` elements a thread.

    As many lanes as a row of threads loads with 16 bytes each: slices of ordinary width then stay within a warp.
    """
    vector = max(16 // itemsize, 2)
    warps = 4
    while width > 32 * warps * each:
        warps *= 2
    lanes = 32 * warps * vector
    return lanes, max(1, each // vector), warps


def forward(itemsize: int, width: int) -> Config:
    """The forward: one tile a program."""
    lanes, rows, warps = _tile(itemsize, width, 32 if itemsize < 8 else 16)
    return Config(lanes, rows, warps)


def backward(itemsize: int, width: int, align: int, equal: bool) -> Config:
    """The backward: few programs, each with a loop over tiles.

    Slices whose widths have no common factor, which ``align`` is then, load element by element: addresses and masks
    take the registers of half a tile. For widths that are not ``equal`` the compiler, left alone, goes down to 128
    registers by way of the stack; three programs of 168 fit as well.
    """
    each = 16 if itemsize < 8 else 8
    lanes, rows, warps = _tile(itemsize, width, each)
    if align == 1:
        rows = max(1, rows // 2)
    if equal or width > 512 or itemsize == 8:
        return Config(lanes, rows, warps, 3, 4)
    return Config(lanes, rows, warps, 3, 3, registers=168)


def sum_partials() -> Config:
    """The reduction of the partial sums."""
    return Config(32, 64, 4)


def candidates(kernel: str, itemsize: int, width: int) -> list[Config]:
    """Configs worth trying for a kernel."""
    vector = max(16 // itemsize, 2)
    tiles = [(32 * warps * vector * times, each // vector, warps) for warps in (2, 4, 8) for times in (1, 2)
             for each in (8, 16, 32) if each >= vector and 32 * warps * each >= width]  # fmt: skip
    if kernel == "slices_forward":
        return [Config(*tile, stages, per_sm) for tile in tiles for stages, per_sm in ((1, 0), (3, 4), (3, 8))]
    if kernel == "slices_backward":
        return [Config(*tile, stages, per_sm) for tile in tiles for stages in (1, 2, 3) for per_sm in (1, 2, 3, 4)]
    raise ValueError(f"no candidates for kernel {kernel!r}")
