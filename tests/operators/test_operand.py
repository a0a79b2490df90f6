"""How rows of strided tensors are spaced: see `fusedops.core.launches.operand`."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from fusedops.core.launches.operand import Spacing, spacing


def _view(chance: random.Random, leading: int) -> Tensor:
    """Rows of four elements, of two by four or of one, in dimensions of any order and steps."""
    row = chance.choice([(4,), (2, 4), ()])
    sizes = [chance.choice([1, 2, 3]) for _ in range(leading)]
    x = torch.zeros(*[size * chance.choice([1, 1, 2]) for size in sizes], *row)
    order = chance.sample(range(leading), leading)
    x = x[tuple(slice(size) for size in sizes)].permute(*order, *range(leading, x.dim()))
    if chance.random() < 0.2:
        x = x[:1].expand(3, *x.shape[1:])
    return x


def _reached(x: Tensor, leading: int, groups: Spacing) -> list[int]:
    """Offsets of all rows, computed as kernels do: of the index of a row alone."""
    offsets = []
    for row in range(math.prod(x.shape[:leading])):
        offset = 0
        for first, last in groups:
            index = row // math.prod(x.shape[last + 1 : leading])
            if first != groups[0][0]:
                index %= math.prod(x.shape[first : last + 1])
            offset += index * x.stride(last)
        offsets.append(offset)
    return offsets


@pytest.mark.parametrize("leading", [1, 2, 3, 4])
def test_groups_of_dimensions_reach_all_rows(leading: int) -> None:
    chance = random.Random(leading)
    numbers = set()
    for _ in range(200):
        x = _view(chance, leading)
        groups = spacing(x, leading)
        if groups is None:  # one stride reaches all rows
            continue
        indices = itertools.product(*map(range, x.shape[:leading]))
        strides = x.stride()[:leading]
        expected = [sum(i * step for i, step in zip(at, strides, strict=True)) for at in indices]
        assert _reached(x, leading, groups) == expected, (x.shape, x.stride(), groups)
        numbers.add(len(groups))
    assert max(numbers) == leading


def test_rows_that_no_kernel_reads_in_place() -> None:
    x = torch.zeros(2, 3, 5, 8)
    assert spacing(x.transpose(1, 2), 3) == ((0, 0), (1, 1), (2, 2))
    assert spacing(x[:, :2], 3) == ((0, 0), (1, 2))
    assert spacing(x[:, :, :2], 3) == ((0, 1), (2, 2))
    assert spacing(x[..., ::2], 3) is None
    assert spacing(x.transpose(2, 3), 3) is None
    assert spacing(x[..., :4], 3) is None  # evenly spaced
    assert spacing(torch._neg_view(x.transpose(1, 2)), 3) is None
    assert spacing(torch._efficientzerotensor(2, 3, 5, 8).transpose(1, 2), 3) is None
