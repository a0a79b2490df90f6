"""Tensors of more than 2**31 elements, forward and backward, compared with the oracle in chunks."""

from __future__ import annotations

import fcntl
import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusedops.core.spec import Sample, Spec
from support import (
    ALL_SPECS,
    DEVICE,
    OFFSET,
    SEED,
    Mask,
    as_tuple,
    drop_threshold,
    fixed_draw,
    gradients,
    keep_mask,
    oracle,
    rows_of,
    tensors_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

LIMIT = 2**31
# Rows and columns: an ordinary width, one that is no power of two, the widest, and a single column
# of more than 2**31 rows.
SHAPES = [
    (LIMIT // 4096 + 7, 4096),
    (LIMIT // 1000 + 9, 1000),
    (LIMIT // 65536 + 3, 65536),
    (LIMIT + 5, 1),
]


@pytest.fixture(autouse=True)
def exclusive_gpu_memory() -> Iterator[None]:
    """Runs one test at a time, in all processes, since each takes tens of gigabytes.

    New memory is not filled with NaN, which would double the traffic. Memory is freed after a test.
    """
    torch.use_deterministic_algorithms(False)
    with (Path(tempfile.gettempdir()) / "fusedops-large-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


def _sample(spec: Spec, rows: int, cols: int) -> Sample:
    sample = spec.benchmark((rows, cols), torch.bfloat16, DEVICE)
    return Sample(
        sample.name, sample.tensors, {**sample.options, **({"p": 0.1} if spec.has_dropout else {})}
    )


def _blocks(rows: int, cols: int) -> Iterator[tuple[int, int]]:
    """Yields the first rows, those at which the element index exceeds 2**31, and the last ones."""
    count = min(max(4096 // cols, 2), rows)
    for middle in (0, LIMIT // cols, rows):
        first = min(max(middle - count // 2, 0), rows - count)
        yield first, first + count


def _part(spec: Spec, sample: Sample, first: int, last: int) -> tuple[dict[str, Tensor], Mask]:
    rows = rows_of(spec, sample)
    part = {
        name: t[first:last] if len(t) == len(rows) else t
        for name, t in tensors_of(spec, sample).items()
    }
    if not spec.has_dropout:
        return part, Mask()
    p = sample.p
    keep = keep_mask(SEED, OFFSET, last - first, rows.shape[1], p, first_row=first, device=DEVICE)
    return part, Mask(keep, 1.0 - drop_threshold(p) / 65536)


@pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(("rows", "cols"), SHAPES, ids=lambda n: str(n))
def test_outputs_and_gradients_beyond_32_bits(spec: Spec, rows: int, cols: int) -> None:
    sample = _sample(spec, rows, cols)
    tensors = {name: t.requires_grad_() for name, t in tensors_of(spec, sample).items()}
    with fixed_draw():
        outputs = as_tuple(spec.call(**{**sample.tensors, **tensors}, **sample.options))
    assert sum(output.numel() for output in outputs) > LIMIT
    cotangents = [torch.randn_like(output) for output in outputs]
    grads = dict(
        zip(tensors, torch.autograd.grad(outputs, list(tensors.values()), cotangents), strict=True)
    )
    outputs = tuple(output.detach() for output in outputs)

    for first, last in _blocks(rows, cols):
        part, mask = _part(spec, sample, first, last)
        exactly = oracle(spec, sample, mask)
        where = f"rows {first} to {last}"
        # At most two roundings of bf16, one of them of the saved sum: 2 · 2**-8 of the largest.
        for i, (output, want) in enumerate(zip(outputs, exactly(part), strict=True)):
            _close(output[first:last], want, f"output {i}, {where}")
        for name, want in gradients(
            exactly, part, [c[first:last].double() for c in cotangents]
        ).items():
            if want.shape[0] == last - first and want.dim() > 1 and cols > 1:
                _close(grads[name][first:last], want, f"gradient of {name}, {where}")
    _check_parameter_gradients(spec, sample, cotangents, grads)


def _close(got: Tensor, want: Tensor, what: str) -> None:
    assert torch.isfinite(got).all(), what
    tolerance = 2.0**-7 * want.abs().amax(-1, keepdim=True)
    worst = ((got.double() - want).abs() - tolerance).max()
    assert worst <= 0, f"{what}: beyond the bound by {worst:.3g}"


def _check_parameter_gradients(
    spec: Spec, sample: Sample, cotangents: list[Tensor], grads: dict[str, Tensor]
) -> None:
    """Compares gradients that are sums over all rows with sums of chunks in fp64.

    A row that is left out or added twice would be detected. Rounding errors of random sign grow as
    the square root of the number of rows, and so do these sums. So the bound is two roundings of
    bf16 of the largest column (of the saved sum and of the result), times two for their spread.
    """
    rows = len(rows_of(spec, sample))
    parameters = {name: t for name, t in tensors_of(spec, sample).items() if len(t) != rows}
    if not parameters:
        return
    totals = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in parameters.items()}
    chunk = max(2**25 // sum(c.shape[-1] for c in cotangents), 1)
    for first in range(0, rows, chunk):
        last = min(first + chunk, rows)
        part, mask = _part(spec, sample, first, last)
        part_cotangents = [c[first:last].double() for c in cotangents]
        # In fp64, because in bf16 each chunk's sum would be rounded.
        wide = {name: t.double() for name, t in part.items()}
        for name, part_sum in gradients(
            oracle(spec, sample, mask), wide, part_cotangents, list(parameters)
        ).items():
            totals[name] += part_sum
    for name, total in totals.items():
        # The sum of terms of order one and random sign is of order sqrt(rows), unless all are zero.
        worst = (grads[name].double() - total).abs().max() / max(
            float(total.abs().max()), rows**0.5
        )
        assert worst <= 4 * 2.0**-8, f"gradient of {name}: off by {worst:.3g} of the largest"
