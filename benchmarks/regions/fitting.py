"""Fits the rates of `fusedops.backend.prediction` to measured regions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, fields

import torch
from torch import Tensor

from fusedops.backend.prediction import H200, RATES, Work

from .results import Row

__all__ = ["fitted"]

# Times of one region differ by this much from run to run: smaller errors all weigh the same.
_SPREAD = 0.03
_ROUNDS = 100


def fitted(rows: Sequence[Row]) -> Work:
    """Returns the rates with the least sum of relative errors of all times, both ways.

    `Work.calls` takes time of the host, which no time of a CUDA graph has, so its rate is as it was.
    """
    samples = [
        (work, us * 1e-6)
        for row in rows
        for work, us in ((row.operator, row.operator_us), (row.compile, row.compile_us))
        if not math.isnan(us)
    ]
    terms = torch.tensor([work.on(H200) for work, _ in samples], dtype=torch.float64)
    seconds = torch.tensor([time for _, time in samples], dtype=torch.float64)
    names = [field.name for field in fields(Work)]
    free = [k for k, name in enumerate(names) if name != "calls" and bool(terms[:, k].any())]
    rates = _least_errors(terms[:, free] / seconds[:, None])
    known = dict(zip(names, astuple(RATES), strict=True))
    known |= {names[k]: float(rate) for k, rate in zip(free, rates, strict=True)}
    return Work(**known)


def _least_errors(ratios: Tensor) -> Tensor:
    """Returns rates of at least zero, with the least sum of absolute errors of ``ratios @ rates``.

    All of these products are to be one. The sum is of squares, with weights from the last round.
    """
    weights = torch.ones(len(ratios), dtype=ratios.dtype)
    for _ in range(_ROUNDS):
        rates = _least_squares(ratios * weights[:, None], weights)
        weights = (ratios @ rates - 1).abs().clamp(min=_SPREAD).rsqrt()
    return rates


def _least_squares(terms: Tensor, results: Tensor) -> Tensor:
    """Returns rates of at least zero: those that would be negative are left out."""
    # Terms differ by many orders of magnitude, as bytes and kernels do.
    scale = terms.norm(dim=0)
    used = torch.ones(len(scale), dtype=torch.bool)
    while True:
        rates = torch.zeros(len(used), dtype=terms.dtype)
        scaled = terms[:, used] / scale[used]
        rates[used] = torch.linalg.lstsq(scaled, results[:, None]).solution[:, 0]
        if bool((rates >= 0).all()):
            fitted: Tensor = rates / scale
            return fitted
        used &= rates > 0
