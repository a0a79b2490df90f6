"""`gradcheck` and `gradgradcheck` in fp64.

First and second derivatives against finite differences.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedops.core.spec import Sample, Spec
from support import INTERPRETED, KERNEL_PATH, Case, call, cases, random_like, tensors_of

# Finite differences of all elements one by one take two calls an element: the interpreter checks
# random directions.
FAST = INTERPRETED
# Central differences with steps of 1e-6 in fp64 are right to 1e-9 or so; PyTorch's own rtol is
# 1e-3.
TIGHT = {"rtol": 1e-6, "atol": 1e-6}
_SMALL, _TINY = 700, 130
# And every tensor and option once, not every sample.
_PICKED = (
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
    return sample.name in _PICKED if INTERPRETED else _elements(spec, sample) <= _SMALL


def _smooth(spec: Spec, sample: Sample) -> bool:
    """No output is narrower than fp64.

    The steps of finite differences would drown in its roundings.
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
def test_the_low_precision_copy_has_the_outputs_tangent(case: Case) -> None:
    """In the copy's dtype."""
    names, leaves = _leaves(case)
    tensors = tuple(leaf.detach() for leaf in leaves)
    outputs, tangents = torch.func.jvp(
        _function(case, names), tensors, tuple(map(torch.randn_like, tensors))
    )
    assert torch.equal(tangents[-1], tangents[0].to(outputs[-1].dtype))


def _twice(spec: Spec, sample: Sample) -> bool:
    """Whether second derivatives are checked: kernels have none with ``save="output"``.

    A test below checks the error.
    """
    return _affordable(spec, sample) and not (
        KERNEL_PATH and sample.options.get("save") == "output"
    )


@cases((torch.float64,), lambda spec, sample: _twice(spec, sample) and _smooth(spec, sample))
def test_gradgradcheck(case: Case) -> None:
    """Cotangents require gradients too, so this also differentiates along them."""
    names, leaves = _leaves(case)
    fast = FAST or sum(leaf.numel() for leaf in leaves) > _TINY
    torch.autograd.gradgradcheck(
        _function(case, names), leaves, fast_mode=fast, gen_non_contig_grad_outputs=True
    )


@cases((torch.float64,), _twice)
def test_create_graph_changes_no_gradient(case: Case) -> None:
    """`gradgradcheck` holds the second derivative to the differentiable first one.

    This holds that to the kernels'.
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
    """In fp32, of which there are such copies: a few roundings apart."""
    names, leaves = _leaves(case)
    outputs = _function(case, names)(*leaves)
    cotangents = random_like(outputs)
    plain = torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True)
    differentiable = torch.autograd.grad(outputs, leaves, cotangents, create_graph=True)
    torch.testing.assert_close(differentiable, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.kernels
@cases((torch.float64,), lambda spec, sample: sample.name == "save=output")
def test_no_second_derivative_from_the_output(case: Case) -> None:
    """An error, not a wrong gradient."""
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
