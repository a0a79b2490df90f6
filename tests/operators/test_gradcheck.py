"""`gradcheck` and `gradgradcheck` in fp64: derivatives against finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedops.core.spec import Sample, Spec
from support import INTERPRETED, KERNEL_PATH, Case, call, cases, random_like, tensors_of

# Finite differences take two calls for each element. The interpreter checks random directions
# instead, since it is slow.
FAST = INTERPRETED
# Central differences with steps of 1e-6 are right to about 1e-9 in fp64. PyTorch's default rtol is
# only 1e-3.
TIGHT = {"rtol": 1e-6, "atol": 1e-6}
_SMALL, _TINY = 700, 130
# The interpreter runs only these samples. Together they have every tensor and option.
_SELECTED = (
    "shape 5x1",
    "shape 1x3",
    "shape 7x17",
    "two normalised dimensions",
    "weight offset",
    "sum returned",
    "save=output",
    "save=inputs",
    "p=1.0",
)


def _elements(spec: Spec, sample: Sample) -> int:
    return sum(t.numel() for t in tensors_of(spec, sample).values())


def _affordable(spec: Spec, sample: Sample) -> bool:
    return sample.name in _SELECTED if INTERPRETED else _elements(spec, sample) <= _SMALL


def _smooth(spec: Spec, sample: Sample) -> bool:
    """Selects samples whose outputs are all fp64.

    A narrower output would round away the steps of finite differences.
    """
    return _affordable(spec, sample) and sample.options.get("cast_dtype") in (None, torch.float64)


def _leaves(case: Case) -> tuple[list[str], list[Tensor]]:
    tensors = tensors_of(case.spec, case.sample())
    return list(tensors), [t.requires_grad_() for t in tensors.values()]


def _function(case: Case, names: list[str]):
    function = call(case.spec, case.sample())
    return lambda *tensors: function(dict(zip(names, tensors, strict=True)))


@cases((torch.float64,), _smooth)
def test_gradcheck(case: Case) -> None:
    names, leaves = _leaves(case)
    fast = FAST or sum(leaf.numel() for leaf in leaves) > _TINY
    torch.autograd.gradcheck(_function(case, names), leaves, fast_mode=fast, **TIGHT)


@cases((torch.float64,), _smooth)
def test_forward_mode(case: Case) -> None:
    names, leaves = _leaves(case)
    fast = FAST or sum(leaf.numel() for leaf in leaves) > _TINY
    function = _function(case, names)
    torch.autograd.gradcheck(
        function, leaves, fast_mode=fast, check_forward_ad=True, check_backward_ad=False, **TIGHT
    )


@cases((torch.float64,), lambda spec, sample: "cast_dtype" in sample.options)
def test_tangent_of_the_low_precision_copy_is_the_outputs(case: Case) -> None:
    """It has the dtype of the copy."""
    names, leaves = _leaves(case)
    tensors = tuple(leaf.detach() for leaf in leaves)
    outputs, tangents = torch.func.jvp(
        _function(case, names), tensors, tuple(map(torch.randn_like, tensors))
    )
    assert torch.equal(tangents[-1], tangents[0].to(outputs[-1].dtype))


def _twice(spec: Spec, sample: Sample) -> bool:
    """Selects samples with second derivatives; kernels have none with ``save="output"``.

    `test_no_second_derivative_from_the_output` checks the error.
    """
    return _affordable(spec, sample) and not (
        KERNEL_PATH and sample.options.get("save") == "output"
    )


@cases((torch.float64,), lambda spec, sample: _twice(spec, sample) and _smooth(spec, sample))
def test_gradgradcheck(case: Case) -> None:
    """Cotangents require gradients, too, so this also differentiates by them."""
    names, leaves = _leaves(case)
    fast = FAST or sum(leaf.numel() for leaf in leaves) > _TINY
    torch.autograd.gradgradcheck(
        _function(case, names), leaves, fast_mode=fast, gen_non_contig_grad_outputs=True
    )


@cases((torch.float64,), _twice)
def test_create_graph_changes_no_gradient(case: Case) -> None:
    """First derivatives with ``create_graph`` equal those of the kernels.

    `gradgradcheck` compares second derivatives with the former only.
    """
    names, leaves = _leaves(case)
    outputs = _function(case, names)(*leaves)
    cotangents = random_like(outputs)
    plain = torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True)
    differentiable = torch.autograd.grad(outputs, leaves, cotangents, create_graph=True)
    for name, got, want in zip(names, differentiable, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, msg=name)


@cases((torch.float32,), lambda spec, sample: sample.name in ("cast", "cast, sum returned"))
def test_create_graph_changes_no_gradient_of_a_low_precision_copy(case: Case) -> None:
    """They are equal up to a few roundings of fp32."""
    names, leaves = _leaves(case)
    outputs = _function(case, names)(*leaves)
    cotangents = random_like(outputs)
    plain = torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True)
    differentiable = torch.autograd.grad(outputs, leaves, cotangents, create_graph=True)
    torch.testing.assert_close(differentiable, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.kernels
@cases((torch.float64,), lambda spec, sample: sample.name == "save=output")
def test_no_second_derivative_from_the_output(case: Case) -> None:
    """The backward raises an error."""
    names, leaves = _leaves(case)
    outputs = _function(case, names)(*leaves)
    with pytest.raises(RuntimeError, match="save='output' has no double backward"):
        torch.autograd.grad(outputs, leaves, random_like(outputs), create_graph=True)


@cases((torch.float64,), lambda spec, sample: sample.name in ("shape 1x3", "sum returned, p=0"))
@pytest.mark.parametrize("frozen", [0, -1], ids=["rows", "last"])
def test_second_derivatives_with_a_frozen_input(case: Case, frozen: int) -> None:
    names, leaves = _leaves(case)
    if len(leaves) > 1:
        leaves[frozen].requires_grad_(False)
    torch.autograd.gradgradcheck(_function(case, names), leaves, fast_mode=True)
