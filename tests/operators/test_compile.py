"""torch.compile: one graph, right values and gradients, no recompilation for other rows."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fusedops
from fusedops.core.spec import Sample, Spec
from support import (
    INTERPRETED,
    Case,
    as_tuple,
    cases,
    dropout_mask,
    gradients,
    of_families,
    oracle,
    random_like,
    specs_of,
    tensors_of,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
# Inductor is slow: one elementwise operator, one of rows, and one of several tensors.
_THROUGH_INDUCTOR = ("glu", "bias_dropout_add_ln", "batched_layer_norm_tanh_sequence")


def _backend(device: torch.device) -> str:
    """Inductor on a GPU. On the CPU, graphs are traced and run without code generation.

    `test_inductor_compiles_the_operator_with_its_neighbours` uses Inductor on any device.
    """
    return "inductor" if device.type == "cuda" else "aot_eager"


def _function(spec: Spec, sample: Sample) -> Callable[..., Any]:
    names, options = spec.tensors, sample.options

    def function(*tensors: Tensor | None) -> Any:
        return spec.call(**dict(zip(names, tensors, strict=True)), **options)

    return function


def _is_deterministic(sample: Sample) -> bool:
    """Whether dropout drops nothing or all. test_rng_recorded.py tests random masks."""
    return sample.p in (0.0, 1.0)


def _worth_a_graph(spec: Spec, sample: Sample) -> bool:
    """Selects samples whose graphs differ; a graph takes a second.

    Tests of values cover samples that differ in sizes or numbers. In bf16 only samples with mixed
    dtypes or inner roundings are selected.
    """
    tensors = [t for t in sample.tensors.values() if t is not None]
    if not _is_deterministic(sample) or any(t.shape[-1] > 10000 for t in tensors):
        return False
    if tensors[0].dtype == torch.bfloat16:
        options_of_dtypes = {"rounding", "out_dtype", "cast_dtype"}
        has_mixed_dtypes = len({t.dtype for t in tensors}) > 1
        return has_mixed_dtypes or not options_of_dtypes.isdisjoint(sample.options)
    absent = sum(t is None for t in sample.tensors.values())
    if absent not in (0, 1, len(sample.tensors) - 1):
        return False
    is_shape = sample.name.startswith("shape ")
    return not is_shape or sample.name in ("shape 7x17", "shape 2x3x96", "shape 64")


def _compare(spec: Spec, sample: Sample, compiled: Callable[..., Any]) -> None:
    """Compares outputs and gradients of compiled code with eager dtypes, strides and the oracle."""
    tensors = {name: sample.tensors.get(name) for name in spec.tensors}
    outputs = as_tuple(compiled(*tensors.values()))
    plain = as_tuple(_function(spec, sample)(*tensors.values()))
    expected = oracle(spec, sample, dropout_mask(spec, sample))(tensors)
    cotangents = random_like(outputs)
    names = list(tensors_of(spec, sample))
    grads = gradients(lambda t: as_tuple(compiled(*t.values())), tensors, cotangents, names)
    exact = gradients(oracle(spec, sample), tensors, [c.double() for c in cotangents], names)
    dtypes = {t.dtype for t in (*outputs, *tensors.values()) if t is not None}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    for ours, uncompiled, wide in zip(outputs, plain, expected, strict=True):
        assert ours.dtype == uncompiled.dtype
        assert ours.shape == uncompiled.shape
        assert ours.stride() == uncompiled.stride()
        _close(ours, wide, eps)
    for name in names:
        tensor = tensors[name]
        assert tensor is not None
        assert grads[name].dtype == tensor.dtype
        assert grads[name].shape == tensor.shape
        _close(grads[name], exact[name], eps)


def _close(actual: Tensor, expected: Tensor, eps: float) -> None:
    """Asserts a difference of at most 64 ulps of the coarsest dtype, scaled by the largest value.

    Values are of order one, and sums have at most a few hundred terms. This detects a wrong graph;
    test_values.py and test_gradients.py test the numerics more strictly.
    """
    bound = 64 * eps * max(1.0, expected.abs().max().item())
    assert (actual.double() - expected).abs().max().item() <= bound


@pytest.mark.kernels
@cases((torch.float32, torch.bfloat16), _worth_a_graph)
def test_values_and_gradients(case: Case, device: torch.device) -> None:
    sample = case.sample()
    compiled = torch.compile(_function(case.spec, sample), fullgraph=True, backend=_backend(device))
    _compare(case.spec, sample, compiled)


@specs_of(_THROUGH_INDUCTOR)
@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor's CPU code needs a C++ compiler")
def test_inductor_compiles_the_operator_with_its_neighbours(
    spec: Spec, device: torch.device
) -> None:
    """The function multiplies before the operator, and takes a tanh after it."""
    sample = _without_dropout(spec.benchmark((6, 40), torch.float32, device))
    operator = _function(spec, sample)

    def function(first: Tensor, *others: Tensor | None) -> Tensor:
        outputs = as_tuple(operator(first * 2.0, *others))
        return torch.cat([output.tanh() for output in outputs], -1)

    tensors = [sample.tensors.get(name) for name in spec.tensors]
    leaves = [t.requires_grad_() for t in tensors if t is not None]
    compiled = torch.compile(function, fullgraph=True, backend="inductor")
    actual, expected = compiled(*tensors), function(*tensors)
    # The tolerance is a hundred ulps of numbers below eight: fp32 operations in another order.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    dy = torch.randn_like(actual)
    for ours, theirs in zip(
        torch.autograd.grad(actual, leaves, dy),
        torch.autograd.grad(expected, leaves, dy),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def _without_dropout(sample: Sample) -> Sample:
    """The sample with a dropout probability of zero."""
    options = dict(sample.options)
    if "p" in options:
        options["p"] = 0.0
    return Sample(sample.name, sample.tensors, options)


ROWS = (7, 64, 1000, 1001, 129, 8) if not INTERPRETED else (7, 16, 33)


def _run(spec: Spec, compiled: Callable[..., Any], rows: int, device: torch.device) -> None:
    """Runs forward and backward for this number of rows."""
    sample = spec.benchmark((rows, 48), torch.float32, device)
    leaves = [t.requires_grad_() for t in sample.tensors.values() if t is not None]
    outputs = as_tuple(compiled(*(sample.tensors.get(name) for name in spec.tensors)))
    assert outputs[0].shape[0] == rows
    for gradient in torch.autograd.grad(outputs, leaves, random_like(outputs)):
        assert gradient.isfinite().all()


@of_families
@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_other_numbers_of_rows_do_not_recompile(
    spec: Spec, dynamic: bool | None, device: torch.device
) -> None:
    """With ``dynamic=True`` one graph serves all numbers of rows.

    By default the second number of rows compiles a dynamic graph, which serves all others.
    """
    counter = CompileCounterWithBackend("aot_eager")
    function = _function(spec, spec.benchmark((8, 48), torch.float32, device))
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=dynamic)
    counts = []
    for rows in ROWS:
        _run(spec, compiled, rows, device)
        counts.append(counter.frame_count)
    # Dynamo may trace the first call twice, if a float such as p must be a constant.
    assert counts[0] <= 2
    assert counts[1:] == [counts[0] + (0 if dynamic else 1)] * (len(ROWS) - 1)


@of_families
def test_other_batch_sizes_and_lengths_do_not_recompile(spec: Spec, device: torch.device) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    function = _function(spec, spec.benchmark((8, 48), torch.float32, device))
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for batch, length in ((2, 3), (5, 7), (3, 11)):
        sample = spec.benchmark((batch * length, 48), torch.float32, device)
        wide = {
            n: t.view(batch, length, -1) if t is not None and t.dim() == 2 else t
            for n, t in sample.tensors.items()
        }
        outputs = as_tuple(compiled(*(wide.get(name) for name in spec.tensors)))
        assert all(output.shape[:-1] == (batch, length) for output in outputs)
        counts.append(counter.frame_count)
    assert counts[0] <= 2 and len(set(counts)) == 1


@of_families
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_operators_do_not_break_graphs_or_make_dynamo_warn(
    spec: Spec, autocast: bool, device: torch.device
) -> None:
    sample = spec.benchmark((6, 40), torch.float32, device)
    compiled = torch.compile(_function(spec, sample), fullgraph=True, backend="eager")
    # Dynamo gives some warnings only once in a process, and an earlier test may have had them.
    torch._dynamo.utils.warn_once_cache.clear()
    with warnings.catch_warnings(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        warnings.filterwarnings("error", message=".*Dynamo")
        compiled(*(sample.tensors.get(name) for name in spec.tensors))


def test_gpu_autocast_does_not_break_a_graph(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The test simulates a GPU: under its autocast, the output of a norm is fp32."""
    monkeypatch.setattr("fusedops.norms.operator._all_on_gpu", lambda tensors: True)
    x = torch.randn(4, 8, dtype=torch.bfloat16, device=device)
    compiled = torch.compile(
        lambda x: fusedops.layer_norm(x, (8,)), fullgraph=True, backend="eager"
    )
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        assert compiled(x).dtype == torch.float32
    finally:
        torch.set_autocast_enabled("cuda", before)
    assert compiled(x).dtype == torch.bfloat16


@of_families
def test_inference_and_training_have_separate_graphs(spec: Spec, device: torch.device) -> None:
    """The same compiled callable runs under no_grad, then with gradients."""
    sample = _without_dropout(spec.benchmark((6, 40), torch.float32, device))
    function = _function(spec, sample)
    compiled = torch.compile(function, fullgraph=True, backend=_backend(device))
    tensors = [sample.tensors.get(name) for name in spec.tensors]
    with torch.no_grad():
        inference = as_tuple(compiled(*tensors))
    _compare(spec, sample, compiled)
    assert not inference[0].requires_grad
    for ours, theirs in zip(inference, as_tuple(function(*tensors)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.kernels
def test_change_in_place_of_one_of_several_outputs(device: torch.device) -> None:
    """A ReLU in place on one slice does not change the others, as in eager PyTorch."""

    def step(*slices: Tensor) -> Tensor:
        first, second = fusedops.batched_layer_norm_tanh(slices)
        return (torch.relu_(first).sum() + (second * 2.0).sum()) * 3.0

    slices = [torch.randn(4, size, device=device, requires_grad=True) for size in (5, 8)]
    expected = torch.autograd.grad(step(*slices), slices)
    compiled = torch.autograd.grad(
        torch.compile(step, backend="aot_eager", fullgraph=True)(*slices), slices
    )
    for ours, theirs in zip(compiled, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
