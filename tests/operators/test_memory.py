"""Tensors saved for the backward: at most as many as the spec says, no mask, no more than eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops.core.spec import Sample, Spec
from support import ALL_SPECS, Case, as_tuple, call, cases, eager, random_like, rows_of, tensors_of

every = pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)


class Saved:
    """Records the storages that autograd saves."""

    def __init__(self) -> None:
        self.storages: dict[int, Tensor] = {}

    def add(self, tensor: Tensor) -> Tensor:
        self.storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def besides(self, inputs: list[Tensor]) -> list[Tensor]:
        """The saved tensors that do not share storage with ``inputs``, which the caller holds."""
        of_inputs = {t.untyped_storage().data_ptr() for t in inputs}
        return [tensor for pointer, tensor in self.storages.items() if pointer not in of_inputs]


@contextmanager
def _saved() -> Iterator[Saved]:
    saved = Saved()
    with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
        yield saved


def _run(
    function: Callable[..., Any], sample: Sample, spec: Spec
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Returns the tensors that a forward saves besides its inputs, and its outputs.

    The caller must hold the outputs while it compares pointers.
    """
    tensors = {name: t.requires_grad_() for name, t in tensors_of(spec, sample).items()}
    with _saved() as saved:
        outputs = as_tuple(function(dict(tensors)))
    return saved.besides(list(tensors.values())), outputs


def _bytes(tensors: list[Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


def _wide_enough(spec: Spec, sample: Sample) -> bool:
    """Selects samples whose statistics and parameters are much smaller than the rows."""
    rows = rows_of(spec, sample)
    return (
        rows.shape[-1] >= 24
        and rows.dim() > 1
        and rows.shape[-1] < 10000
        and rows.numel() > 2 * rows.shape[-1]
    )


@pytest.mark.kernels
@cases((torch.bfloat16, torch.float32), _wide_enough)
def test_saved_tensors_are_at_most_the_specs(case: Case, device: torch.device) -> None:
    sample = case.sample()
    spec, rows = case.spec, rows_of(case.spec, sample)
    saved, outputs = _run(call(spec, sample), sample, spec)
    large = [t for t in saved if t.numel() >= rows.numel()]
    assert len(large) <= spec.saved
    assert all(t.is_floating_point() for t in large), "a mask was saved"
    # The other saved tensors are statistics: at most two numbers of 8 bytes for each row.
    parameters = {
        t.untyped_storage().data_ptr()
        for t in sample.tensors.values()
        if t is not None and t.dim() == 1
    }
    small = [
        t
        for t in saved
        if t.numel() < rows.numel() and t.untyped_storage().data_ptr() not in parameters
    ]
    normalised = sample.options.get("normalized_shape", rows.shape[-1:])
    count = rows.numel() // torch.Size(normalised).numel()
    assert _bytes(small) <= 2 * 8 * count
    # With these options the saved tensors are outputs, which need no further memory.
    if sample.options.get("save") in ("inputs", "output") or sample.options.get("return_sum"):
        held = {output.untyped_storage().data_ptr() for output in outputs}
        assert all(t.untyped_storage().data_ptr() in held for t in large)


@pytest.mark.kernels
@cases(
    (torch.bfloat16, torch.float32),
    lambda spec, sample: _wide_enough(spec, sample) and sample.p > 0.0,
)
def test_dropout_saves_nothing_more(case: Case, device: torch.device) -> None:
    """A forward with dropout saves as many bytes as one without."""
    sample = case.sample()
    with_dropout, _alive = _run(call(case.spec, sample), sample, case.spec)
    plain = Sample(sample.name, sample.tensors, {**sample.options, "p": 0.0})
    without_dropout, _alive_too = _run(call(case.spec, plain), plain, case.spec)
    # Without dropout, bias and residual, the saved sum is x itself, and needs no memory.
    has_more_terms = any(sample.tensors.get(name) is not None for name in ("bias", "residual"))
    if has_more_terms:
        assert _bytes(with_dropout) == _bytes(without_dropout)


@every
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saved_bytes_are_at_most_eagers(
    spec: Spec, dtype: torch.dtype, device: torch.device
) -> None:
    sample = spec.benchmark((16, 256), dtype, device)
    ours, _ = _run(call(spec, sample), sample, spec)
    theirs, _ = _run(eager(spec, sample), sample, spec)
    # The operator may also save two statistics of 8 bytes for each of the 16 rows.
    assert _bytes(ours) <= _bytes(theirs) + 2 * 8 * 16


@every
def test_inference_saves_nothing(spec: Spec, device: torch.device) -> None:
    sample = spec.benchmark((16, 64), torch.float32, device)
    with _saved() as saved:
        as_tuple(spec.call(**sample.tensors, **sample.options))
        for tensor in tensors_of(spec, sample).values():
            tensor.requires_grad_()
        with torch.no_grad():
            as_tuple(spec.call(**sample.tensors, **sample.options))
    assert not saved.storages


@every
def test_backward_frees_saved_tensors(spec: Spec, device: torch.device) -> None:
    """So another backward without retain_graph is an error."""
    sample = spec.benchmark((6, 40), torch.float32, device)
    leaves = [t.requires_grad_() for t in tensors_of(spec, sample).values()]
    outputs = as_tuple(spec.call(**sample.tensors, **sample.options))
    torch.autograd.grad(outputs, leaves, random_like(outputs), retain_graph=True)
    torch.autograd.grad(outputs, leaves, random_like(outputs))
    if spec.saved:  # an operator that saves nothing has nothing to free
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(outputs, leaves, random_like(outputs))


# --- memory that the allocator counts -------------------------------------------------------------


@every
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_between_the_passes(spec: Spec, dtype: torch.dtype, device: torch.device) -> None:
    """A forward allocates the outputs, the saved tensors of the spec, and statistics of rows."""
    rows, cols = 4096, 1024
    sample = spec.benchmark((rows, cols), dtype, device)
    for tensor in tensors_of(spec, sample).values():
        tensor.requires_grad_()
    as_tuple(spec.call(**sample.tensors, **sample.options))  # loads the kernels
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    outputs = as_tuple(spec.call(**sample.tensors, **sample.options))
    grown = torch.cuda.memory_allocated(device) - before
    matrix = rows * cols * dtype.itemsize
    assert grown <= (len(outputs) + spec.saved) * matrix + 2 * 8 * rows + 4096


@every
@pytest.mark.gpu
def test_peak_of_forward_and_backward(spec: Spec, device: torch.device) -> None:
    """The peak memory of a step is at most eager's, plus partial sums of parameters' gradients.

    There are at most four partial sums, in fp32, for each multiprocessor.
    """
    sample = spec.benchmark((8192, 2048), torch.bfloat16, device)
    leaves = [t.requires_grad_() for t in tensors_of(spec, sample).values()]
    cotangents = random_like(as_tuple(spec.call(**sample.tensors, **sample.options)))

    def peak(function: Callable[..., Any]) -> int:
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            # Threads of the autograd engine may free a Python node's tensors after `grad` returns.
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.grad(
                    as_tuple(function(**sample.tensors, **sample.options)), leaves, cotangents
                )
        return torch.cuda.max_memory_allocated(device) - before

    processors = torch.cuda.get_device_properties(device).multi_processor_count
    sums = sum(t.dim() == 1 for t in leaves)
    assert peak(spec.call) <= peak(spec.eager) + 4 * processors * sums * 2048 * 4
