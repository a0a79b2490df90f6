"""The oracle of `fusedops.rowwise(...).foreach`: a loop that calls the function for each slice."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

import fusedops
from fusedops.core.launches import launch
from rowwise_checks import assert_as_good, cotangents_of
from support import OFFSET, SEED, drop_threshold, fixed_draw, keep_mask
from tolerances import a_rounding_away

__all__ = ["SliceCall", "check", "flat", "looped", "mapped", "masks", "results"]

# The random numbers of slice k begin ``k << _SLICE_BITS`` after those of slice 0, and the n-th
# dropout of a function ``n << _CALL_BITS`` after the first.
_SLICE_BITS, _CALL_BITS = 36, 48


@dataclass
class SliceCall:
    """A function and the arguments of all its slices.

    Attributes:
        function: the function of one slice.
        args: its arguments: a list of all slices' values, a tensor, or a number.
        sizes: as for `foreach`.
        captured: the tensors that the function reads as ``captured[name]``.
        parts: the number of kernels that the slices need in each direction; 0 for any number.
        sums: whether a gradient is a sum over rows so many that a kernel adds up partial sums.
    """

    function: Callable[..., Any]
    args: list[Any]
    sizes: list[int] | None = None
    captured: dict[str, Tensor] | None = None
    parts: int = 1
    sums: bool = True


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return nested lists with all floating-point tensors changed."""
    if isinstance(value, (list, tuple)):
        return [mapped(change, item) for item in value]
    return change(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def flat(value: Any) -> list[Any]:
    """Return the items of nested lists."""
    if isinstance(value, (list, tuple)):
        return list(itertools.chain(*map(flat, value)))
    return [value]


@contextmanager
def masks(k: int) -> Iterator[None]:
    """Within this context `F.dropout` uses the masks that the kernels draw for slice ``k``."""
    count = 0

    def dropout(input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
        nonlocal count
        offset = OFFSET + (k << _SLICE_BITS) + (count << _CALL_BITS)
        cols = input.shape[-1]
        keep = keep_mask(SEED, offset, input.numel() // cols, cols, p, device=input.device)
        count += 1
        # Kernels round the scale to fp32, of fp64 tensors too.
        scale = torch.tensor(1.0 / (1.0 - drop_threshold(p) / 65536), device=input.device)
        return input * (keep.view(input.shape) * scale).to(input.dtype)

    with mock.patch.object(F, "dropout", dropout):
        yield


def _split(value: Any, count: int, sizes: Sequence[int] | None, *, has_lists: bool) -> list[Any]:
    """Return an argument's value for each slice."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, Tensor) and sizes is not None and value.shape[-1] == sum(sizes):
        return list(value.split(list(sizes), -1))
    if isinstance(value, Tensor) and sizes is None and not has_lists and value.dim() > 1:
        return list(value.expand(*value.shape[:-2], count, -1).unbind(-2))
    return [value] * count


def looped(
    function: Callable[..., Any],
    args: Sequence[Any],
    sizes: Sequence[int] | None = None,
    *,
    draws: bool = False,
) -> Any:
    """Return what `foreach` should return, by a loop over the slices.

    Args:
        function: the function of one slice.
        args: as for `foreach`.
        sizes: as for `foreach`.
        draws: whether dropout uses the masks of `masks`.
    """
    lists = [value for value in args if isinstance(value, (list, tuple))]
    if sizes is not None:
        count = len(sizes)
    else:
        first = next(value for value in args if isinstance(value, Tensor)) if not lists else None
        count = len(lists[0]) if first is None else first.shape[-2]
    columns = [_split(value, count, sizes, has_lists=bool(lists)) for value in args]
    values = []
    for k, own in enumerate(zip(*columns, strict=True)):
        with masks(k) if draws else nullcontext():
            values.append(function(*own))

    def joined(slices: list[Tensor], rows: int) -> Any:
        if sizes is not None:
            return torch.cat([t if t.dim() > rows else t.unsqueeze(-1) for t in slices], -1)
        return slices if lists else torch.stack(slices, -2 if slices[0].dim() > rows else -1)

    rows = columns[0][0].dim() - 1
    if isinstance(values[0], Tensor):
        return joined(values, rows)
    return type(values[0])([joined(list(own), rows) for own in zip(*values, strict=True)])


def results(
    call: Callable[..., Any], sample: SliceCall, dtype: torch.dtype | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs, and the gradients of all floating-point tensors.

    Args:
        call: takes the sample's arguments and ``sizes``.
        sample: the sample.
        dtype: None for the sample's dtypes.
    """
    cast = (lambda t: t) if dtype is None else (lambda t: t.to(dtype))
    args = mapped(lambda t: cast(t.detach()).requires_grad_(), sample.args)
    captured = {n: cast(t.detach()).requires_grad_() for n, t in (sample.captured or {}).items()}
    with mock.patch.dict(sample.captured or {}, captured):
        outputs = flat(call(*args, sizes=sample.sizes))
    leaves = [t for t in flat([args, *captured.values()]) if isinstance(t, Tensor)]
    leaves = [t for t in leaves if t.requires_grad]
    grads = torch.autograd.grad(outputs, leaves, cotangents_of(outputs))
    return [out.detach() for out in outputs], list(grads)


def check(sample: SliceCall, call: Callable[..., Any] | None = None) -> None:
    """Check a call's values, gradients and containers against the loop in fp64, and its launches.

    The bounds are those of `rowwise_checks.check`: of a loop over the slices in the sample's
    dtypes, and of three more with perturbed inputs, the largest error counts.

    Args:
        sample: the sample.
        call: takes the sample's arguments and ``sizes``; by default `foreach`.
    """
    if call is None:
        call = fusedops.rowwise(sample.function, strict=True).foreach

    def loop(*args: Any, sizes: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return looped(sample.function, args, sizes, draws=True)

    with fixed_draw():
        expected_form = _form(loop(*sample.args, sizes=sample.sizes))
        assert _form(call(*sample.args, sizes=sample.sizes)) == expected_form
        with launch.record() as launched:
            outputs, grads = results(call, sample)
    backward = ["backward_slices", *["reduce_slices"] * sample.sums]
    parts = sample.parts or launched.count("forward_slices")
    expected = ["forward_slices"] * parts + backward * parts
    assert launched == expected, f"launches {launched}, expected {expected}"
    exact, exact_grads = results(loop, sample, torch.float64)
    eager = [results(loop, sample)]
    for draw in range(3):
        captured = None
        if sample.captured is not None:
            captured = {name: _perturbed(t, draw) for name, t in sample.captured.items()}
        moved = SliceCall(
            sample.function,
            mapped(lambda t: _perturbed(t, draw), sample.args),  # noqa: B023 - called at once
            sample.sizes,
            sample.captured,
        )
        with mock.patch.dict(sample.captured or {}, captured or {}):
            eager.append(results(loop, moved))
    for number, (got, want) in enumerate(zip(outputs, exact, strict=True)):
        assert_as_good(got, want, [outs[number] for outs, _ in eager], f"output {number}")
    for number, (got, want) in enumerate(zip(grads, exact_grads, strict=True)):
        # A vector's gradient is a sum over the rows: more roundings than an output has.
        eager_grads = [gradients[number] for _, gradients in eager]
        assert_as_good(got, want, eager_grads, f"gradient {number}", units=16.0)


def _perturbed(tensor: Tensor, draw: int) -> Tensor:
    """Return the tensor perturbed by a rounding of fp32; a tensor in fp64 by one of fp64."""
    if tensor.dtype != torch.float64:
        return a_rounding_away(tensor, draw)
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(draw))
    return tensor * (1 + torch.finfo(torch.float64).eps * noise.to(tensor))


def _form(value: Any) -> Any:
    """Return the containers, shapes and dtypes of a call's results."""
    if isinstance(value, (list, tuple)):
        return type(value), *map(_form, value)
    return value.shape, value.dtype
