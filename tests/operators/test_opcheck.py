"""torch.library's checks of the private operators: schema, fake tensors, autograd, dynamic shapes.

The operators are not named here. All calls that a functional dispatches are recorded and checked,
so a new family needs no edit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fusedops.core.launches import launch
from fusedops.core.spec import Sample, Spec
from support import (
    ALL_SPECS,
    Case,
    as_tuple,
    call,
    cases,
    covers_the_schema,
    random_like,
    tensors_of,
)

every = pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)

Recorded = list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]


class _Recorder(TorchDispatchMode):
    """Records the calls of the library's operators, with copies of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Recorded = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusedops":
            copies = tree_map_only(Tensor, lambda t: t.detach().clone(), args)
            self.calls.append((func, copies, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _record(spec: Spec, sample: Sample) -> Recorded:
    """Records the operators of one forward and one backward."""
    tensors = {name: t.requires_grad_() for name, t in tensors_of(spec, sample).items()}
    with _Recorder() as recorder:
        outputs = call(spec, sample)(dict(tensors))
        torch.autograd.grad(outputs, list(tensors.values()), random_like(outputs))
    return recorder.calls


def _is_backward(func: Any) -> bool:
    return "backward" in str(func)


@pytest.mark.kernels
@cases((torch.float32, torch.bfloat16), covers_the_schema)
def test_opcheck(case: Case, device: torch.device) -> None:
    calls = _record(case.spec, case.sample())
    assert [_is_backward(func) for func, _, _ in calls] == [False, True]
    for func, args, kwargs in calls:
        inputs = args
        if not _is_backward(func):
            inputs = tree_map_only(Tensor, lambda t: t.requires_grad_(t.is_floating_point()), args)
        # The test of dynamic tracing runs the operator several times, so only some samples have it.
        checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
        if case.sample().name in ("shape 7x17", "sum returned", "save=inputs", "save=output"):
            checks.append("test_aot_dispatch_dynamic")
        torch.library.opcheck(func, inputs, kwargs, test_utils=checks)


@pytest.mark.kernels
@cases((torch.float32, torch.bfloat16), covers_the_schema)
def test_fake_outputs_have_the_metadata_of_real_ones(case: Case, device: torch.device) -> None:
    """Shapes, dtypes, devices and strides of outputs and gradients are equal, without a launch."""
    sample = case.sample()
    names = list(tensors_of(case.spec, sample))

    def run(tensors: dict[str, Tensor | None]) -> list[Tensor]:
        leaves = {
            name: t if t is None else t.detach().requires_grad_() for name, t in tensors.items()
        }
        outputs = as_tuple(case.spec.call(**leaves, **sample.options))
        cotangents = [torch.ones_like(output) for output in outputs]
        return [
            *outputs,
            *torch.autograd.grad(outputs, [leaves[name] for name in names], cotangents),
        ]

    real = run(sample.tensors)
    with FakeTensorMode() as mode, launch.record() as launched:
        fake = run(
            {name: t if t is None else mode.from_tensor(t) for name, t in sample.tensors.items()}
        )
    assert launched == []
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())


@every
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(spec: Spec, mode: str, device: torch.device, kernel_path: bool) -> None:
    """A traced step has the same results. Its graph calls kernels as private operators."""
    sample = spec.benchmark((6, 40), torch.float32, device)
    tensors = [t for t in sample.tensors.values() if t is not None]
    names = [name for name, t in sample.tensors.items() if t is not None]

    def step(*values: Tensor) -> list[Tensor]:
        leaves = [value.detach().requires_grad_() for value in values]
        outputs = as_tuple(spec.call(**dict(zip(names, leaves, strict=True)), **options))
        return [
            *outputs,
            *torch.autograd.grad(outputs, leaves, [torch.ones_like(o) * 0.5 + o for o in outputs]),
        ]

    options = {**sample.options, **({"p": 0.0} if spec.has_dropout else {})}
    graph = make_fx(step, tracing_mode=mode)(*tensors)
    if kernel_path:
        targets = [str(node.target) for node in graph.graph.nodes if "fusedops" in str(node.target)]
        assert len(targets) == 2 and _is_backward(targets[1])
    for ours, theirs in zip(graph(*tensors), step(*tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def _bits(spec: Spec, sample: Sample, tensors: dict[str, Tensor]) -> list[Tensor]:
    """Outputs and gradients, with the dropout mask that all tests use."""
    outputs = call(spec, sample)(dict(tensors))
    return [*outputs, *torch.autograd.grad(outputs, list(tensors.values()), random_like(outputs))]


@pytest.mark.kernels
@cases((torch.float32,), covers_the_schema)
def test_a_dispatch_mode_changes_no_bit(case: Case, device: torch.device) -> None:
    """The registered operators and direct launches run the same kernels."""
    sample = case.sample()
    tensors = {name: t.requires_grad_() for name, t in tensors_of(case.spec, sample).items()}
    plain = _bits(case.spec, sample, tensors)
    with _Recorder() as recorder:
        observed = _bits(case.spec, sample, tensors)
    assert len(recorder.calls) == 2
    for a, b in zip(plain, observed, strict=True):
        torch.testing.assert_close(b, a, rtol=0.0, atol=0.0)


@every
def test_tensor_subclasses(spec: Spec, device: torch.device) -> None:
    """A subclass of two tensors dispatches the call, and both tensors have the right results."""
    sample = spec.benchmark((6, 40), torch.float32, device)
    sample = Sample(
        sample.name, sample.tensors, {**sample.options, **({"p": 0.0} if spec.has_dropout else {})}
    )
    first = {name: t.detach() for name, t in tensors_of(spec, sample).items()}
    second = {name: 2.0 * t + 0.5 for name, t in first.items()}
    pairs = {name: TwoTensor(first[name], second[name]).requires_grad_() for name in first}
    outputs = call(spec, sample)(dict(pairs))
    cotangents = random_like([output.a for output in outputs])
    grads = torch.autograd.grad(
        outputs, list(pairs.values()), [TwoTensor(c, c) for c in cotangents]
    )
    for attribute, tensors in (("a", first), ("b", second)):
        leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
        expected = _bits(spec, sample, leaves)
        for ours, theirs in zip((*outputs, *grads), expected, strict=True):
            assert isinstance(ours, TwoTensor)
            torch.testing.assert_close(getattr(ours, attribute), theirs, rtol=1e-5, atol=1e-5)
