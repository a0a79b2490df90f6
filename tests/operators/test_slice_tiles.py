"""Which slices a tile holds, and programs that compute several tiles."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import fusedops
from fusedops.core.configs.tuning import forced
from fusedops.core.configs.tuning_key import Config
from fusedops.core.spec import Sample, Spec
from fusedops.slices.widths import Groups, Tile, widths_of
from support import ALL_SPECS, Case, cases
from tolerances import check_gradients

_SLICES = [spec for spec in ALL_SPECS if spec.samples.__module__.startswith("fusedops.slices")]


@pytest.mark.parametrize("seed", range(40))
def test_every_slice_has_a_slot_that_holds_it(seed: int) -> None:
    draw = random.Random(seed)
    step = draw.choice((1, 4, 8))
    sizes = tuple(step * draw.randint(1, 300 // step) for _ in range(draw.randint(2, 90)))
    lanes, rows, vector = draw.choice((64, 256, 1024)), draw.choice((1, 4)), draw.choice((1, step))
    widths = widths_of(sizes)
    groups = Groups.of(widths, lanes, rows, vector, warps=1)
    kinds, firsts = groups.table[: groups.count], groups.table[groups.count : 2 * groups.count]
    slots = groups.table[2 * groups.count :]
    held = []
    for kind, first in zip(kinds, firsts, strict=True):
        tile = groups.tiles[kind]
        assert tile.slots * tile.lanes * tile.parts <= max(lanes, tile.lanes * tile.parts)
        for slot in range(first, first + tile.slots):
            number, column, width = slots[3 * slot : 3 * slot + 3]
            # A slot without a slice repeats the previous slice, and stores nothing.
            is_repeated = number < 0
            slice_number = ~number if is_repeated else number
            if is_repeated:
                assert slice_number == held[-1]
            else:
                held.append(slice_number)
            is_empty = is_repeated and tile.full == 0
            assert column == widths.columns[slice_number]
            assert width == (0 if is_empty else sizes[slice_number])
            assert tile.full * tile.lanes <= width <= tile.parts * tile.lanes
    assert sorted(held) == list(range(len(sizes)))
    assert groups.shortest == min(tile.rows for tile in groups.tiles)
    assert len(groups.tiles) <= 4


def test_few_lanes_are_idle() -> None:
    """There are fewer than a quarter as many idle lanes as columns, over widths of all kinds."""
    sizes = tuple(range(33, 257))
    groups = Groups.of(widths_of(sizes), lanes=256, rows=1, vector=1, warps=1)
    tiles = [groups.tiles[kind] for kind in groups.table[: groups.count]]
    assert sum(tile.slots * tile.lanes * tile.parts for tile in tiles) < 1.25 * sum(sizes)


def _is_picked(spec: Spec, sample: Sample) -> bool:
    return sample.name.startswith(
        (
            "ten widths",
            "multiples",
            "equal 2x3x4x24",
            "equal 6x5x8",
            "concatenated",
            "shared parameters wb",
        )
    )


@pytest.mark.kernels
@cases((torch.bfloat16, torch.float32), _is_picked, _SLICES)
def test_programs_of_several_tiles(case: Case) -> None:
    """Tiles have one row, and each multiprocessor one program.

    The compiler or the loop itself loads the next tile early.
    """
    config = Config(block_n=64, rows=1, warps=1, stages=2, per_sm=1)
    with forced("slices_forward", config), forced("slices_backward", config):
        check_gradients(case.spec, case.sample(), values=True)


@pytest.mark.kernels
@pytest.mark.parametrize("spec", _SLICES, ids=lambda spec: spec.name)
def test_several_tiles_of_rows_that_the_loop_loads(spec: Spec, device: torch.device) -> None:
    """All slices have one odd width, so the compiler cannot load the next tile early.

    Some programs have one tile more than others.
    """
    separate = spec.name.endswith("sequence")
    shape = (301, 3, 5)
    tensors = {name: torch.randn(3, 5, device=device) for name in ("weight", "bias")}
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    tensors |= (
        {f"slice_{number}": part for number, part in enumerate(x.unbind(1))}
        if separate
        else {"slices": x}
    )
    config = Config(block_n=64, rows=1, warps=1, stages=2, per_sm=1)
    with forced("slices_forward", config), forced("slices_backward", config):
        check_gradients(spec, Sample("carried", tensors), values=True)


@pytest.mark.kernels
@pytest.mark.parametrize("spec", _SLICES, ids=lambda spec: spec.name)
@pytest.mark.parametrize("per_sm", [0, 1])
def test_slot_without_a_slice(spec: Spec, per_sm: int, device: torch.device) -> None:
    """Three slices are in groups of two, in tiles of one row, whose loads have no mask."""
    sizes = (24, 20, 22)
    parts = [torch.randn(6, size, device=device) for size in sizes]
    tensors = {"slices": torch.cat(parts, -1)}
    if spec.name.endswith("sequence"):
        tensors = {f"slice_{number}": part for number, part in enumerate(parts)}
    parameters = {name: torch.randn(sum(sizes), device=device) for name in ("weight", "bias")}
    sample = Sample(
        "three slices", tensors | parameters, {"sizes": sizes} if "slices" in tensors else {}
    )
    groups = Groups.of(widths_of(sizes), lanes=64, rows=1, vector=2, warps=1)
    assert groups.tiles == (Tile(2, 1, 8, 3, 2, single=False),) and groups.count == 2
    config = Config(block_n=64, rows=1, warps=1, stages=2, per_sm=per_sm)
    with forced("slices_forward", config), forced("slices_backward", replace(config, per_sm=1)):
        check_gradients(spec, sample, values=True)


@pytest.mark.kernels
def test_parameters_of_an_unused_output_have_no_gradient(device: torch.device) -> None:
    """Their gradients are zero, as in PyTorch, even if eps is 0 and one of them is NaN."""
    slices = [torch.randn(5, 6, device=device, requires_grad=True) for _ in range(3)]
    weight, bias = torch.ones(18, device=device), torch.zeros(18, device=device)
    bias[7] = float("nan")
    weight.requires_grad_()
    bias.requires_grad_()
    fusedops.batched_layer_norm_tanh(slices, weight, bias, 0.0)[0].sum().backward()
    for parameter in (weight, bias):
        assert (parameter.grad[:6] != 0.0).any()
        assert torch.equal(parameter.grad[6:], torch.zeros(12, device=device))
