"""`fusedops.rowwise`: functions that split, join, or move parts of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from rowwise_checks import check, kernels, randn, rowwise
from rowwise_functions import SAMPLES, RowwiseFunction


def heads(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Splits a projection into query, key and value, and normalises the heads of the first two.

    The heads of the values come before their positions.
    """
    query, key, value = (part.unflatten(-1, (-1, 16)) for part in x.chunk(3, -1))
    normed = [F.rms_norm(part, (16,), weight) for part in (query, key)]
    return *normed, value.transpose(1, 2) * 2


def fewer_heads(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Splits a projection of grouped-query attention into parts of different sizes."""
    query, key, value = (part.unflatten(-1, (-1, 16)) for part in x.split((64, 32, 32), -1))
    return F.rms_norm(query, (16,), weight), F.rms_norm(key, (16,), weight), value.sigmoid()


def stacked(query: Tensor, key: Tensor) -> Tensor:
    return torch.stack((query.softmax(-1), key), 2)


def gated_channels(x: Tensor) -> Tensor:
    first, second = x.chunk(2, 1)
    return first * torch.sigmoid(second)


def joined_channels(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat((torch.tanh(x), y), 1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotary embedding that swaps the halves by a roll, with a sign by the column's index."""
    sign = torch.where(torch.arange(16, device=x.device) < 8, -1.0, 1.0)
    return x * cos + x.roll(8, -1) * (sign * sin)


_CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "heads": (heads, ((2, 5, 96), (16,))),
    "fewer heads": (fewer_heads, ((2, 5, 128), (16,))),
    "stacked": (stacked, ((2, 5, 2, 16), (2, 5, 2, 16))),
    "gated channels": (gated_channels, ((2, 8, 4, 5),)),
    "joined channels": (joined_channels, ((2, 6, 4, 5), (2, 3, 4, 5))),
    "parts in front": (lambda x: x[0].softmax(-1) * x[1], ((2, 3, 5, 16),)),
    "rotated": (rotated, ((2, 5, 3, 16), (5, 1, 16), (5, 1, 16))),
    "roll back": (lambda x: x.roll(-6, -1) * x.roll(26, 1), ((3, 24),)),
    "flip": (lambda x: x.flip(-1).softmax(-1) * x, ((3, 8),)),
    "flip of pairs": (lambda x: x.unflatten(-1, (2, -1)).flip(-2).flatten(-2) - x, ((3, 24),)),
    "pad": (lambda x: F.pad(x, (8, 24), value=0.5).softmax(-1), ((3, 24),)),
    "einsum over columns": (
        lambda x, y, w: torch.einsum("bsd, bsd, d -> sb", x, y, w),
        ((2, 3, 24), (2, 3, 24), (24,)),
    ),
    "einsum of a factor": (
        lambda x, y: torch.einsum("bsd,sb->bsd", x, y).softmax(-1),
        ((2, 3, 24), (3, 2)),
    ),
}
every = pytest.mark.parametrize("case", _CASES)


@kernels
@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_and_gradients_of_parts(case: str, dtype: torch.dtype) -> None:
    function, shapes = _CASES[case]
    sample = RowwiseFunction(case, function, lambda rows: {})
    check(
        sample,
        fusedops.rowwise(function, strict=True),
        {f"t{i}": randn(*shape, dtype=dtype) for i, shape in enumerate(shapes)},
    )


@kernels
def test_program_serves_any_number_of_heads_and_positions() -> None:
    """The heads are a separate dimension of the input."""

    def function(packed: Tensor) -> Tensor:
        query, key = packed.unbind(2)
        return query.softmax(-1) * key

    fused = fusedops.rowwise(function, strict=True)
    for batch, positions, head_count in ((2, 5, 2), (1, 4, 3), (3, 1, 1), (1, 1, 4)):
        packed = randn(batch, positions, 2, head_count, 16)
        torch.testing.assert_close(fused(packed), function(packed))
    (programs,) = fused._programs.known.values()
    assert len(programs) == 1


@kernels
def test_values_and_gradients_of_long_parts() -> None:
    sample = RowwiseFunction("stacked", stacked, lambda rows: {})
    check(
        sample,
        fusedops.rowwise(stacked, strict=True),
        {"query": randn(1, 2, 3, 16400), "key": randn(1, 2, 3, 16400)},
    )


def test_alternating_parts_are_one_load_and_one_store() -> None:
    sample = SAMPLES["interleaved_rotary"]
    source = rowwise(sample).source(*sample.tensors(torch.bfloat16).values())
    forward, backward = source.split("def backward_kernel")
    assert forward.count("split_pairs") == forward.count("join_pairs") == 1
    assert backward.count("split_pairs") == 2
    assert "cols * 2" not in source


@kernels
def test_einsum_under_autocast_is_refused() -> None:
    """PyTorch computes it there as a matrix product in half precision."""
    function = fusedops.rowwise(lambda x, y: torch.einsum("sd,d->s", x, y), strict=True)
    x = randn(3, 24)
    torch.testing.assert_close(function(x, x[0]), x @ x[0])
    with (
        torch.autocast(x.device.type, torch.bfloat16),
        pytest.raises(fusedops.NotRowwiseError, match="matrix product"),
    ):
        function(x, x[0])
