"""Tiles of slices: they hold all columns and rows, and programs of ragged ones run at one time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from fusedops.compiler.addresses import Argument
from fusedops.compiler.horizontal import launching
from fusedops.compiler.horizontal.kinds import members_of
from fusedops.compiler.horizontal.operator import group_of
from fusedops.compiler.horizontal.source import Kind, kernel_of_slices
from fusedops.compiler.horizontal.tiles import Tiling, is_ragged
from fusedops.compiler.kernel import Kernel
from fusedops.core.configs import tuning
from fusedops.core.configs.tuning_key import Config
from fusedops.core.launches import launch

ONE_WARP = Config(block_n=256, rows=1, warps=1)
PROGRAMS, ROWS = 4000, 65536


@pytest.mark.parametrize(
    ("lengths", "dtype", "expected"),
    [
        ((8, 64, 256), torch.bfloat16, False),
        ((8, 60), torch.bfloat16, True),
        ((4, 60), torch.float32, False),
        ((4, 62), torch.float32, True),
        ((2, 6), torch.float64, False),
        ((3,), torch.float64, True),
        ((8, 24), torch.bool, False),
    ],
)
def test_ragged_lengths_are_no_multiples_of_vectors(
    lengths: Sequence[int], dtype: torch.dtype, expected: bool
) -> None:
    assert is_ragged(lengths, [torch.float64, dtype]) == expected


@pytest.mark.parametrize(
    ("lengths", "config"),
    [
        ((1, 2, 130, 256, 65, 64, 33, 7, 190, 128), ONE_WARP),
        ((5, 5, 5), Config(block_n=16, rows=16, warps=1)),
        ((3000, 1, 70, 257, 4096, 511), Config(block_n=4096, rows=1, warps=16)),
        (tuple(range(1, 61)), ONE_WARP),
    ],
)
@pytest.mark.parametrize("least", [1, 2])
def test_tiles_hold_all_columns_and_programs_all_rows(
    lengths: Sequence[int], config: Config, least: int
) -> None:
    # Slices of one column are of another kind.
    kinds = [int(length == 1) for length in lengths]
    tiling = Tiling.of_ragged(lengths, kinds, config, PROGRAMS, ROWS, least)
    assert len(tiling.units) <= PROGRAMS
    assert len([tile for tile in tiling.tiles if tile.kind == 0]) <= 4
    tile_of, shares = {}, dict[int, list[int]]()
    for number, k, share, count in tiling.units:
        assert tile_of.setdefault(k, number) == number
        assert count == tiling.parts[k] >= least
        shares.setdefault(k, []).append(share)
    for k, length in enumerate(lengths):
        tile = tiling.tiles[tile_of[k]]
        assert tile.kind == kinds[k]
        assert shares[k] == list(range(tiling.parts[k]))
        assert tile.columns * tile.parts >= length
        # Lanes of full parts have no mask: they must all have columns.
        assert tile.columns * tile.full <= length
        assert tile.rows & (tile.rows - 1) == 0 < tile.rows
        assert (tiling.parts[k] - 1) * tile.rows < max(ROWS, tile.rows * least)


def test_long_rows_are_cut_into_parts() -> None:
    """A tile of a power of two columns would have 126 idle lanes for 130 columns."""
    (tile,) = Tiling.of_ragged([130], [0], ONE_WARP, PROGRAMS).tiles
    assert (tile.columns, tile.parts, tile.full) == (64, 3, 2)


def test_units_are_in_the_ratio_of_lanes() -> None:
    """All programs then have about as much to do. Each row takes some time besides its lanes."""
    wide, narrow = Tiling.of_ragged([256, 64], [0, 0], ONE_WARP, PROGRAMS).parts
    assert 2 < wide / narrow < 4


def test_no_slice_has_more_programs_than_tiles() -> None:
    assert Tiling.of_ragged([256], [0], ONE_WARP, PROGRAMS, rows=10).parts == (10,)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight)


@pytest.mark.parametrize(
    ("lengths", "members"),
    [
        ((7, 1, 130), [[0, 1, 2]]),
        # Slices that are not ragged keep their vector loads, in a launch of their own.
        ((16, 1, 8), [[0, 2], [1]]),
        ((16, 8), [[0, 1]]),
    ],
)
def test_slices_of_one_operator(lengths: Sequence[int], members: list[list[int]]) -> None:
    function = fusedops.rowwise(_norm)
    slices = [(torch.randn(4, length), torch.randn(length)) for length in lengths]
    programs = [function._programs.find(list(pair), autocast=False).program for pair in slices]
    assert members_of(programs, range(len(lengths))) == members


def test_functions_of_kinds_get_their_own_numbers_and_tensors() -> None:
    x, y, rows = Argument("x", "input", 0), Argument("x", "input", 1), Argument("M", "rows")
    kinds = [
        Kind(Kernel("slice", "def slice(number0, x):\n", (x, rows)), [[0.5, 0.25]]),
        Kind(Kernel("slice", "def slice(number0, x):\n", (y, rows)), [[3.0, 4.0]]),
    ]
    tiling = Tiling.of_ragged([130, 1], [0, 1], ONE_WARP, PROGRAMS)
    source = kernel_of_slices(kinds, [130, 1], {}, tiling=tiling).source
    assert " slice(number0, x, M, N, program, programs, " in source
    assert " slice_of_kind_1(number1, kind1_x, M, N, program, programs, " in source
    assert "def slice(" in source and "def slice_of_kind_1(" in source


@pytest.mark.parametrize("count", [12, 6, 5])
@pytest.mark.parametrize("programs", [0, 1, 50])
def test_tiles_of_neighbours_hold_all_slices(count: int, programs: int) -> None:
    """A tile has four slices, two or one, and half, a quarter or an eighth of the rows."""
    config = Config(block_n=128, rows=2, warps=4)
    tiling = Tiling.of_neighbours([24] * count, config, programs, ROWS)
    (tile,) = tiling.tiles
    assert (tile.columns, tile.slices) == (32, {12: 4, 6: 2, 5: 1}[count])
    assert tile.rows * tile.slices == 8 and tiling.most_rows == tile.rows
    parts = tiling.parts[0] if programs else 1
    assert tiling.parts == (parts,) * count
    units = [(first, part) for _, first, part, _ in tiling.units]
    assert units == [*itertools.product(range(0, count, tile.slices), range(parts))]
    assert programs <= 1 or 2 <= parts <= programs


def _slices_of_a_tile(
    function: Callable[..., Any], args: list[list[Any]], inputs: list[str], rows: int
) -> list[int]:
    """Return the slices of a tile of the forward and the backward."""
    fused = fusedops.rowwise(function)
    found = [fused._programs.find(list(own), autocast=False) for own in zip(*args, strict=True)]
    group = group_of([match.program for match in found], inputs, ["joint"])
    wanted = [True] * len(inputs)
    tuning.forget()
    with launch.collecting() as requests:
        launching.prepare(group, torch.device("cpu"), rows, wanted, [True])
    tuning.forget()
    tiles = [request.constants["TILES"][0] for request in requests[:2]]
    return [tile[5] for tile in tiles]


@pytest.mark.parametrize(
    ("count", "columns", "rows", "slices"),
    [
        (64, 64, 4096, 16),
        (24, 64, 4096, 8),
        # With fewer contiguous bytes, rows that are as long, few rows or in other tensors.
        (20, 64, 4096, 1),
        (64, 256, 4096, 1),
        (64, 64, 100, 1),
    ],
)
def test_short_rows_of_one_tensor_are_in_one_tile(
    count: int, columns: int, rows: int, slices: int
) -> None:
    x = torch.randn(4, columns, dtype=torch.bfloat16)
    args = [[x] * count, [x[0].clone()] * count]
    found = _slices_of_a_tile(_norm, args, ["joint", "separate"], rows)
    assert found == [slices, slices]
    assert _slices_of_a_tile(_norm, args, ["separate", "separate"], rows) == [1, 1]


@pytest.mark.parametrize(
    ("function", "values", "inputs"),
    [
        (lambda x, w: F.dropout(x) * w, [torch.randn(64)] * 16, ["joint", "separate"]),
        (lambda x, w: x.tanh() * w, [torch.randn(())] * 16, ["joint", "separate"]),
        (lambda x, scale: x.tanh() * scale, [0.31 + 0.07 * k for k in range(16)], ["joint"]),
    ],
    ids=["masks", "tensors of one number", "numbers"],
)
def test_numbers_of_a_slice_keep_it_alone(
    function: Callable[..., Any], values: list[Any], inputs: list[str]
) -> None:
    args = [[torch.randn(4, 64)] * 16, values]
    assert _slices_of_a_tile(function, args, inputs, 4096) == [1, 1]
