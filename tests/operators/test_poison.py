"""New memory is filled with NaN in the tests, and kernels write nothing beside their outputs.

So a test fails if a kernel leaves an element of an output unwritten, or reads an unwritten one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.activations.operator import ACTIVATION
from fusedops.core.configs.tuning import forced
from fusedops.core.configs.tuning_key import Config
from fusedops.core.launches import launch
from fusedops.norms.operator import NORM
from fusedops.slices.operator import SLICES
from support import DEVICE, DTYPES, INTERPRETED, Case, call, cases, random_like, tensors_of

ALLOCATIONS = {
    "empty": lambda like: torch.empty(40, dtype=like.dtype, device=like.device),
    "empty_like": torch.empty_like,
    "empty_strided": lambda like: torch.empty_strided(
        (4, 5), (8, 1), dtype=like.dtype, device=like.device
    ),
    "new_empty": lambda like: like.new_empty(40),
    "new_empty_strided": lambda like: like.new_empty_strided((4, 5), (5, 1)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("allocate", ALLOCATIONS.values(), ids=ALLOCATIONS)
def test_new_memory_is_poisoned(allocate, dtype: torch.dtype) -> None:
    assert allocate(torch.zeros(6, 7, dtype=dtype, device=DEVICE)).isnan().all()


# For the other samples, tests of values compare results with finite ones, so they fail at a NaN.
_PICKED = (
    "shape 7x17",
    "shape 129x40",
    "shape 2x20000",
    "equal 6x5x8",
    "sum returned",
    "save=output",
    "save=inputs",
)


@cases((torch.float32, torch.bfloat16), lambda spec, sample: sample.name in _PICKED)
def test_results_are_written_completely(case: Case) -> None:
    """The storages of outputs and gradients hold no NaN: there is no unwritten padding of rows."""
    spec, sample = case.spec, case.sample()
    leaves = {name: t.requires_grad_() for name, t in tensors_of(spec, sample).items()}
    outputs = call(spec, sample)(leaves)
    for result in (
        *outputs,
        *torch.autograd.grad(outputs, list(leaves.values()), random_like(outputs)),
    ):
        storage = torch.empty(0, dtype=result.dtype, device=result.device).set_(
            result.untyped_storage()
        )
        assert not storage.isnan().any()
        assert result.any()


# Elements before and after an output: a multiple of 16 bytes in every dtype.
_GUARD, _UNTOUCHED = 64, 1234.0


@pytest.mark.kernels
@cases((torch.float32, torch.bfloat16), lambda spec, sample: sample.name in _PICKED)
def test_nothing_is_written_beside_the_outputs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients lie within larger tensors, whose other elements stay as they are.

    Forwards have programs without rows, and kernels of slices have tiles of one row with slots
    that hold no slice.
    """
    buffers: list[Tensor] = []

    def within_guards(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        buffers.append(t.new_full((t.numel() + 2 * _GUARD,), _UNTOUCHED))
        return buffers[-1].as_strided(t.shape, t.stride(), _GUARD)

    def guarded(allocate: Any) -> Any:
        return lambda *args: tuple(within_guards(t) for t in allocate(*args))

    for op in (NORM, ACTIVATION, SLICES):
        for name in ("allocate", "allocate_gradients"):
            monkeypatch.setattr(op, name, guarded(getattr(op, name)))
    spec, sample = case.spec, case.sample()
    leaves = {name: t.requires_grad_() for name, t in tensors_of(spec, sample).items()}
    with (
        forced("slices_forward", Config(block_n=16, rows=1, warps=1)),
        forced("slices_backward", Config(block_n=16, rows=1, warps=1, per_sm=1)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(launch, "MOST_TILES", 2)
            outputs = call(spec, sample)(leaves)
        torch.autograd.grad(outputs, list(leaves.values()), random_like(outputs))
    assert buffers
    for buffer in buffers:
        assert (buffer[:_GUARD] == _UNTOUCHED).all() and (buffer[-_GUARD:] == _UNTOUCHED).all()


@pytest.mark.skipif(not INTERPRETED, reason="a GPU does not check addresses")
@pytest.mark.parametrize("access", ["load", "store"])
def test_access_outside_a_tensor_is_an_error(access: str) -> None:
    """The suite's interpreter checks each access of each kernel."""
    x = torch.zeros(8, 8, device=DEVICE)
    with pytest.raises(Exception, match=f"create_masked_{access} outside"):
        _outside[(1,)](x, torch.zeros(24, device=DEVICE), LOADS=access == "load")


@triton.jit
def _outside(x, short, LOADS: tl.constexpr):
    lanes = tl.arange(0, 32)
    if LOADS:
        tl.store(x + lanes, tl.load(short + lanes))
    else:
        tl.store(x + lanes + 40, tl.load(x + lanes))
