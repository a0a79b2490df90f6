"""Spacing of the rows of strided tensors; see `fusedops.core.launches.operand`."""

from __future__ import annotations

import itertools
import math
import operator
import random

import pytest
import torch
from torch import Tensor

from fusedops.core.launches.operand import Spacing, spacing


def _view(draw: random.Random, leading: int) -> Tensor:
    """Rows of 4, 2 x 4 or 1 elements, in leading dimensions of random order and strides."""
    row = draw.choice([(4,), (2, 4), ()])
    sizes = [draw.choice([1, 2, 3]) for _ in range(leading)]
    x = torch.zeros(*[size * draw.choice([1, 1, 2]) for size in sizes], *row)
    order = draw.sample(range(leading), leading)
    x = x[tuple(slice(size) for size in sizes)].permute(*order, *range(leading, x.dim()))
    if draw.random() < 0.2:
        x = x[:1].expand(3, *x.shape[1:])
    return x


def _row_offsets(x: Tensor, leading: int, groups: Spacing) -> list[int]:
    """Offsets of all rows, computed as in kernels: from the index of the row."""
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
    draw = random.Random(leading)
    counts = set()
    for _ in range(200):
        x = _view(draw, leading)
        groups = spacing(x, leading)
        if groups is None:  # one stride reaches all rows
            continue
        indices = itertools.product(*map(range, x.shape[:leading]))
        strides = x.stride()[:leading]
        expected = [sum(map(operator.mul, index, strides)) for index in indices]
        assert _row_offsets(x, leading, groups) == expected, (x.shape, x.stride(), groups)
        counts.add(len(groups))
    assert max(counts) == leading


def test_spacing_of_views() -> None:
    x = torch.zeros(2, 3, 5, 8)
    assert spacing(x.transpose(1, 2), 3) == ((0, 0), (1, 1), (2, 2))
    assert spacing(x[:, :2], 3) == ((0, 0), (1, 2))
    assert spacing(x[:, :, :2], 3) == ((0, 1), (2, 2))
    assert spacing(x[..., ::2], 3) is None
    assert spacing(x.transpose(2, 3), 3) is None
    assert spacing(x[..., :4], 3) is None  # evenly spaced
    assert spacing(torch._neg_view(x.transpose(1, 2)), 3) is None
    assert spacing(torch._efficientzerotensor(2, 3, 5, 8).transpose(1, 2), 3) is None
