"""How the slices kernels cut their work: heuristics from dtype and widest slice, and what is worth measuring."""

from __future__ import annotations

from dataclasses import replace

from ..core.question import Config, Question, around

__all__ = ["backward", "candidates", "forward", "heuristic", "sum_partials", "valid", "widest"]


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


def heuristic(question: Question) -> Config:
    """The config where nobody measured."""
    rule = forward if question.kernel == "slices_forward" else backward
    align = 2 if "vectors" in question.variant else 1
    return rule(question.itemsize, question.cols, align, equal="equal" in question.variant)


def valid(question: Question, config: Config) -> bool:
    """A tile holds a row of the widest slice."""
    return config.block_n >= 16 and config.block_n * config.rows >= 1 << (question.cols - 1).bit_length()


def candidates(question: Question) -> list[Config]:
    """The heuristic's config, and others worth measuring."""
    first = heuristic(question)
    each, equal = first.block_n * first.rows // (32 * first.warps), "equal" in question.variant
    sizes = [
        (e, warps) for e in (each // 2, each, each * 2) for warps in (first.warps // 2, first.warps, first.warps * 2)
    ]
    tiles = [_tile(question.itemsize, question.cols, e, warps, equal=equal) for e, warps in sizes if e >= 2 and warps]
    if question.kernel == "slices_forward":
        others = [*tiles, *[replace(first, stages=3, per_sm=per_sm) for per_sm in (4, 8)]]
    else:
        others = around(first, least=2) + [replace(t, stages=3, per_sm=max(1, 16 // t.warps)) for t in tiles]
    return list(dict.fromkeys(c for c in (first, *others) if c.warps <= 16 and valid(question, c)))
