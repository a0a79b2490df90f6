"""torch.autocast: dtypes and values of outputs as in PyTorch, gradients in the leaves' dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusedops.core.spec import Sample, Spec
from support import ALL_SPECS, DEVICE, as_tuple, eager, gradients, oracle, random_like, tensors_of

every = pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)
# On the CPU only bf16: PyTorch has fp16 autocast there only in later releases, and few use it.
low = pytest.mark.parametrize(
    "low",
    [torch.bfloat16, *([torch.float16] if DEVICE.type == "cuda" else [])],
    ids=lambda dtype: str(dtype)[6:],
)


def _sample(
    spec: Spec, device: torch.device, activations: torch.dtype, parameters: torch.dtype
) -> Sample:
    """A sample with activations of one dtype and parameters of another, without dropout."""
    wide = spec.benchmark((6, 40), torch.float32, device)
    tensors = {
        n: None if t is None else t.to(activations if t.dim() == 2 else parameters)
        for n, t in wide.tensors.items()
    }
    return Sample(wide.name, tensors, {**wide.options, **({"p": 0.0} if spec.has_dropout else {})})


def _close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Asserts a difference of at most 32 ulps of the coarsest dtype in the call.

    test_values.py and test_gradients.py test the numerics more strictly.
    """
    bound = 32 * torch.finfo(dtype).eps * max(1.0, expected.abs().max().item())
    assert (actual.double() - expected.double()).abs().max().item() <= bound


# The dtypes of activations and of parameters.
MIXTURES = [("low", "low"), ("low", "fp32"), ("fp32", "fp32"), ("fp32", "low"), ("fp64", "fp64")]


@every
@low
@pytest.mark.parametrize("activations,parameters", MIXTURES)
def test_dtypes_values_and_gradients_match_pytorch(
    spec: Spec, low: torch.dtype, activations: str, parameters: str, device: torch.device
) -> None:
    dtypes = {"low": low, "fp32": torch.float32, "fp64": torch.float64}
    sample = _sample(spec, device, dtypes[activations], dtypes[parameters])
    tensors = tensors_of(spec, sample)
    with torch.autocast(device.type, dtype=low):
        ours = as_tuple(spec.call(**sample.tensors, **sample.options))
        try:
            theirs = spec.eager(**sample.tensors, **sample.options)
        except RuntimeError:  # PyTorch's CPU norms accept only some mixtures of dtypes
            theirs = None
    if theirs is not None:
        assert [o.dtype for o in ours] == [t.dtype for t in theirs]
    coarsest = low if "low" in (activations, parameters) else dtypes[activations]
    for output, wide in zip(ours, oracle(spec, sample)(sample.tensors), strict=True):
        _close(output, wide, coarsest)

    def ours_autocast(values: dict[str, Tensor | None]) -> tuple[Tensor, ...]:
        with torch.autocast(device.type, dtype=low):
            return as_tuple(spec.call(**values, **sample.options))

    cotangents = random_like(ours)
    grads = gradients(ours_autocast, sample.tensors, cotangents)
    exact = gradients(oracle(spec, sample), sample.tensors, [c.double() for c in cotangents])
    for name, tensor in tensors.items():
        assert grads[name].dtype == tensor.dtype
        _close(grads[name], exact[name], coarsest)


@every
@low
def test_backward_outside_autocast_has_the_bits_of_one_inside(
    spec: Spec, low: torch.dtype, device: torch.device
) -> None:
    """A usual training step has the forward under autocast, and the backward after it."""
    sample = _sample(spec, device, low, torch.float32)
    leaves = [t.requires_grad_() for t in tensors_of(spec, sample).values()]
    with torch.autocast(device.type, dtype=low):
        outputs = as_tuple(spec.call(**sample.tensors, **sample.options))
        cotangents = random_like(outputs)
        inside = torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True)
    outside = torch.autograd.grad(outputs, leaves, cotangents)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@every
@low
def test_nested_disabled_autocast_equals_no_autocast(
    spec: Spec, low: torch.dtype, device: torch.device
) -> None:
    sample = _sample(spec, device, low, low)
    plain = as_tuple(spec.call(**sample.tensors, **sample.options))
    with torch.autocast(device.type, dtype=low), torch.autocast(device.type, enabled=False):
        nested = as_tuple(spec.call(**sample.tensors, **sample.options))
    for result, expected in zip(nested, plain, strict=True):
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)


@every
@low
def test_operator_after_a_linear(spec: Spec, low: torch.dtype, device: torch.device) -> None:
    """Mixed precision in a model: the output of a linear is low, parameters and residual fp32."""
    sample = _sample(spec, device, torch.float32, torch.float32)
    first = spec.tensors[0]
    width = sample.tensors[first].shape[-1]
    linear = torch.nn.Linear(width, width, device=device)

    def step(fused: bool) -> tuple[Tensor, ...]:
        with torch.autocast(device.type, dtype=low):
            rows = linear(sample.tensors[first])
            assert rows.dtype == low
            call = spec.call if fused else eager(spec, sample)
            # Slices in separate tensors must have the same dtype.
            slices = {
                name: t.to(low) for name, t in sample.tensors.items() if name.startswith("slice_")
            }
            values = {**sample.tensors, **slices, first: rows}
            return as_tuple(call(**values, **sample.options)) if fused else as_tuple(call(values))

    ours, theirs = step(fused=True), step(fused=False)
    assert [o.shape for o in ours] == [t.shape for t in theirs]
    for a, b in zip(ours, theirs, strict=True):
        _close(a, b, low)
    loss = sum(o.float().square().sum() for o in ours)
    loss.backward()
    gradient = linear.weight.grad
    assert gradient is not None
    assert gradient.dtype == torch.float32
    assert gradient.isfinite().all()
    assert gradient.any()


@low
def test_out_dtype_overrides_autocast(low: torch.dtype, device: torch.device) -> None:
    x = torch.randn(4, 16, device=device, dtype=low)
    weight = torch.randn(16, device=device)
    import fusedops

    with torch.autocast(device.type, dtype=low):
        assert fusedops.layer_norm(x, 16, weight, out_dtype=low).dtype == low
        assert fusedops.layer_norm(x, 16, weight, out_dtype=torch.float32).dtype == torch.float32
        assert (
            fusedops.layer_norm(x, 16, weight).dtype == F.layer_norm(x, (16,), weight.to(low)).dtype
        )
