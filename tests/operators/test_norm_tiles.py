"""Norms whose rows have several tiles, or are shared by several programs."""

from __future__ import annotations

import pytest
import torch

from fusedops.core.configs.tuning import forced
from fusedops.core.configs.tuning_key import Config, block_holding
from fusedops.core.spec import Sample, Spec
from support import ALL_SPECS, DEVICE, INTERPRETED, Case, cases
from tolerances import check_gradients, check_values
from waiting_programs import launch_twice

pytestmark = pytest.mark.kernels

_NORMS = [
    spec
    for spec in ALL_SPECS
    if spec.samples.__module__.startswith("fusedops.norms") and spec.name != "bias_dropout_add"
]
# Two to four programs share a row. The last of them may have an empty tile.
_SHARED = Config(block_n=16, rows=2, warps=1, stages=2, per_sm=1, parts=2)


def _cols(spec: Spec, sample: Sample) -> int:
    return sample.tensors[spec.tensors[0]].shape[-1]


def _is_small(spec: Spec, sample: Sample) -> bool:
    x = sample.tensors[spec.tensors[0]]
    return x.dim() > 0 and 33 <= x.shape[-1] <= 127 and x.numel() <= 1024


@cases((torch.float32,), _is_small, _NORMS)
def test_tiles_side_by_side(case: Case) -> None:
    """The last tile of a row may lie beyond the row, in part or as a whole.

    With ``per_sm=0`` a program processes two rows; otherwise it is persistent, and may process more.
    """
    sample = case.sample()
    for parts, per_sm in ((3, 0), (5, 1)):
        block = block_holding(-(-_cols(case.spec, sample) // parts))
        config = Config(block_n=block, rows=2, warps=1, stages=2, per_sm=1, parts=parts)
        with (
            forced(
                "norm_forward",
                Config(block_n=block, rows=2, warps=1, stages=2, per_sm=per_sm, parts=parts),
            ),
            forced("norm_backward", config),
        ):
            check_gradients(case.spec, sample, values=True)


@cases((torch.bfloat16, torch.float32), _is_small, _NORMS)
def test_rows_that_are_processed_tile_by_tile(case: Case) -> None:
    """Samples whose rows fill the last tile, and samples whose rows do not."""
    sample = case.sample()
    with forced("norm_forward", Config(block_n=16, rows=2, warps=1, stages=2)):
        check_gradients(case.spec, sample, values=True)


# Rows of 28671 columns are not aligned: with a residual they are read tile by tile.
@pytest.mark.parametrize("cols", [28671, 32768])
@pytest.mark.parametrize("spec", _NORMS, ids=lambda spec: spec.name)
def test_widest_rows_that_one_program_holds(spec: Spec, cols: int) -> None:
    check_values(spec, spec.benchmark((2, cols), torch.bfloat16, DEVICE))


@cases(
    (torch.float16,),
    lambda spec, sample: _is_small(spec, sample) and _cols(spec, sample) % 2 != 0,
    _NORMS,
)
def test_next_rows_in_registers(case: Case) -> None:
    """If tensors have 16-bit dtypes and odd numbers of columns, registers carry the next rows."""
    sample = case.sample()
    block = block_holding(-(-_cols(case.spec, sample) // 3))
    with forced("norm_backward", Config(block_n=block, rows=2, warps=1, per_sm=1, parts=3)):
        check_gradients(case.spec, sample)


@cases((torch.float64,), _is_small, _NORMS)
def test_rows_that_programs_share(case: Case) -> None:
    sample = case.sample()
    with forced("norm_backward", _SHARED):
        check_gradients(case.spec, sample, values=True)


@pytest.mark.skipif(not INTERPRETED, reason="tests/operators/test_waiting_programs.py is for GPUs")
@cases((torch.bfloat16,), _is_small, _NORMS)
def test_rows_whose_programs_wait(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter programs run one after another: see `launch_twice`."""
    waiting = launch_twice(monkeypatch)
    sample = case.sample()
    with forced("norm_backward", _SHARED):
        check_gradients(case.spec, sample, values=True)
    assert waiting
