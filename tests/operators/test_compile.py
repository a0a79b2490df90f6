"""torch.compile: one graph, the right values and gradients, and no recompilation when the number of rows changes."""

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
# Inductor takes several: one operator of the elements, one of rows, one of several tensors.
_THROUGH_INDUCTOR = ("glu", "bias_dropout_add_ln", "batched_layer_norm_tanh_sequence")


def _backend(device: torch.device) -> str:
    """Inductor where it generates Triton; on the CPU the graph alone is compiled.

    One test below goes further.
    """
    return "inductor" if device.type == "cuda" else "aot_eager"


def _function(spec: Spec, sample: Sample) -> Callable[..., Any]:
    names, options = spec.tensors, sample.options

    def function(*tensors: Tensor | None) -> Any:
        return spec.call(**dict(zip(names, tensors, strict=True)), **options)

    return function


def _deterministic(spec: Spec, sample: Sample) -> bool:
    """Random draws under torch.compile are in test_rng_recorded.py.

    Here everything is kept or everything dropped.
    """
    return sample.p in (0.0, 1.0)


def _worth_a_graph(spec: Spec, sample: Sample) -> bool:
    """A graph takes a second: samples that differ in nothing but numbers are left to the tests of values.

    In half precision those count that mix dtypes or round on the way.
    """
    tensors = [t for t in sample.tensors.values() if t is not None]
    if not _deterministic(spec, sample) or any(t.shape[-1] > 10000 for t in tensors):
        return False
    if tensors[0].dtype == torch.bfloat16:
        apart = {"rounding", "out_dtype", "cast_dtype"}
        return len({t.dtype for t in tensors}) > 1 or not apart.isdisjoint(sample.options)
    few_absent = sum(t is None for t in sample.tensors.values()) in (0, 1, len(sample.tensors) - 1)
    return few_absent and sample.name.removeprefix("shape ") in (
        sample.name,
        "7x17",
        "2x3x96",
        "64",
    )


def _compare(spec: Spec, sample: Sample, compiled: Callable[..., Any]) -> None:
    tensors = {name: sample.tensors.get(name) for name in spec.tensors}
    outputs = as_tuple(compiled(*tensors.values()))
    plain = as_tuple(_function(spec, sample)(*tensors.values()))
    expected = oracle(spec, sample, dropout_mask(spec, sample))(tensors)
    cotangents = random_like(outputs)
    names = list(tensors_of(spec, sample))
    grads = gradients(lambda t: as_tuple(compiled(*t.values())), tensors, cotangents, names)
    wanted = gradients(oracle(spec, sample), tensors, [c.double() for c in cotangents], names)
    dtypes = {t.dtype for t in (*outputs, *tensors.values()) if t is not None}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    for ours, uncompiled, wide in zip(outputs, plain, expected, strict=True):
        assert ours.dtype == uncompiled.dtype and ours.shape == uncompiled.shape
        assert ours.stride() == uncompiled.stride()
        _close(ours, wide, eps)
    for name in names:
        tensor = tensors[name]
        assert tensor is not None
        assert grads[name].dtype == tensor.dtype and grads[name].shape == tensor.shape
        _close(grads[name], wanted[name], eps)


def _close(actual: Tensor, expected: Tensor, eps: float) -> None:
    """Coarse on purpose: test_values.py and test_gradients.py hold the numerics, here a wrong graph is to be seen.

    Values are of order one and sums have at most a few hundred terms: 64 ulps of the coarsest dtype
    in the call, scaled by the largest value.
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
    """All the way through Inductor, on whatever device.

    Fused with an operator before it and one after it.
    """
    sample = _kept(spec.benchmark((6, 40), torch.float32, device))
    function = _function(spec, sample)
    before = lambda *tensors: function(tensors[0] * 2.0, *tensors[1:])  # noqa: E731
    around = lambda *tensors: torch.cat(  # noqa: E731
        [output.tanh() for output in as_tuple(before(*tensors))], -1
    )
    tensors = [sample.tensors.get(name) for name in spec.tensors]
    leaves = [t.requires_grad_() for t in tensors if t is not None]
    compiled = torch.compile(around, fullgraph=True, backend="inductor")
    actual, expected = compiled(*tensors), around(*tensors)
    # The same fp32 operations in another order: a hundred ulps of numbers below eight.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    dy = torch.randn_like(actual)
    for ours, theirs in zip(
        torch.autograd.grad(actual, leaves, dy),
        torch.autograd.grad(expected, leaves, dy),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def _kept(sample: Sample) -> Sample:
    """The sample with nothing dropped."""
    return Sample(
        sample.name,
        sample.tensors,
        {**sample.options, **({"p": 0.0} if "p" in sample.options else {})},
    )


ROWS = (7, 64, 1000, 1001, 129, 8) if not INTERPRETED else (7, 16, 33)


def _run(spec: Spec, compiled: Callable[..., Any], rows: int, device: torch.device) -> None:
    sample = spec.benchmark((rows, 48), torch.float32, device)
    leaves = [t.requires_grad_() for t in sample.tensors.values() if t is not None]
    outputs = as_tuple(compiled(*(sample.tensors.get(name) for name in spec.tensors)))
    assert outputs[0].shape[0] == rows
    assert all(
        g.isfinite().all() for g in torch.autograd.grad(outputs, leaves, random_like(outputs))
    )


@of_families
@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_new_row_counts_do_not_recompile(
    spec: Spec, dynamic: bool | None, device: torch.device
) -> None:
    """With ``dynamic=True`` one graph runs for all row counts.

    By default the second row count makes the graph dynamic, for good.
    """
    counter = CompileCounterWithBackend("aot_eager")
    function = _function(spec, spec.benchmark((8, 48), torch.float32, device))
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=dynamic)
    counts = []
    for rows in ROWS:
        _run(spec, compiled, rows, device)
        counts.append(counter.frame_count)
    # Dynamo may trace a first call twice, where a float such as p turns out to be a constant.
    assert counts[0] <= 2
    assert counts[1:] == [counts[0] + (0 if dynamic else 1)] * (len(ROWS) - 1)


@of_families
def test_leading_dimensions_are_dynamic_too(spec: Spec, device: torch.device) -> None:
    """Batch and sequence length both change."""
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
def test_compiling_neither_breaks_nor_warns(
    spec: Spec, autocast: bool, device: torch.device
) -> None:
    """Dynamo warns where it guesses.

    A user's compilation must show no such warning because of this library.
    """
    sample = spec.benchmark((6, 40), torch.float32, device)
    compiled = torch.compile(_function(spec, sample), fullgraph=True, backend="eager")
    # Dynamo gives some of its warnings once a process: whichever test came first would have had
    # them.
    torch._dynamo.utils.warn_once_cache.clear()
    with warnings.catch_warnings(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        warnings.filterwarnings("error", message=".*Dynamo")
        compiled(*(sample.tensors.get(name) for name in spec.tensors))


def test_gpu_autocast_does_not_break_a_graph(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The output's dtype is traced as on a GPU, on whatever device."""
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
def test_modes_share_no_graph(spec: Spec, device: torch.device) -> None:
    """Inference under no_grad and training through the same compiled callable both come out right."""
    sample = _kept(spec.benchmark((6, 40), torch.float32, device))
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
def test_an_output_of_several_changed_in_place(device: torch.device) -> None:
    """As eagerly: a ReLU in place on one slice is no affair of the others."""

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
