"""Gradients of every sample for random cotangents, against autograd of the formula in fp64."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
import selection
from fusedops.core.spec import Sample, Spec
from support import (
    ALL_SPECS,
    DEVICE,
    KERNEL_PATH,
    Case,
    as_tuple,
    call,
    cases,
    dropout_mask,
    eager,
    fixed_draw,
    random_like,
    tensors_of,
)
from tolerances import check_gradients, unit_roundoff


@pytest.mark.pairs("spec dtype", "sample")
@cases()
def test_gradients(case: Case) -> None:
    grads = check_gradients(case.spec, case.sample())
    assert set(grads) == set(tensors_of(case.spec, case.sample()))


def _small(spec: Spec, sample: Sample) -> bool:
    """Selects a sample with all tensors, and samples that return the sum or a cast output."""
    return sample.name in ("shape 7x17", "sum returned", "cast, sum returned")


@cases((torch.float32,), lambda spec, sample: _small(spec, sample) or sample.name == "shape 129x40")
def test_every_subset_of_inputs(case: Case, full: bool) -> None:
    """If a subset requires gradients, its tensors get the right ones, and the others None."""
    spec, sample = case.spec, case.sample()
    present = tensors_of(spec, sample)
    function = call(spec, sample)
    every = check_gradients(spec, sample)
    # Many rows have partial sums and are slow to interpret, so only few subsets of them are tested.
    counts = {0, 1, len(present) - 1} if sample.name == "shape 129x40" else range(len(present) + 1)
    subsets = [names for count in counts for names in itertools.combinations(present, count)]
    for names in subsets if full else selection.few_subsets(list(present)):
        leaves = {name: t.clone().requires_grad_(name in names) for name, t in present.items()}
        outputs = function(leaves)
        # The sum does not depend on the norm's parameters, so it may not require a gradient.
        used = {o: c for o, c in zip(outputs, random_like(outputs), strict=True) if o.requires_grad}
        assert bool(used) == bool(names)
        if not names:
            continue
        torch.autograd.backward(list(used), list(used.values()))
        assert {name for name, leaf in leaves.items() if leaf.grad is not None} == set(names)
        for name in names:
            # The terms are the same, maybe in another order: a few roundings of fp32.
            torch.testing.assert_close(
                leaves[name].grad, every[name], rtol=1e-5, atol=1e-5, msg=f"{name} of {names}"
            )


def _has_outputs(spec: Spec, sample: Sample) -> bool:
    several = not sample.options.keys().isdisjoint({"return_sum", "cast_dtype"})
    return several or ("slice_2" in sample.tensors and sample.name == "shape 7x17")


@cases((torch.float32, torch.bfloat16), _has_outputs)
@pytest.mark.parametrize("used", [0, 1, -1], ids=["first", "second", "last"])
def test_one_of_several_outputs_used(case: Case, used: int) -> None:
    """A gradient of zeros for the other outputs gives the same result as none."""
    spec, sample = case.spec, case.sample()
    tensors = tensors_of(spec, sample)
    outputs = call(spec, sample)({name: t.requires_grad_() for name, t in tensors.items()})
    cotangents = [
        c * (index == used % len(outputs)) for index, c in enumerate(random_like(outputs))
    ]
    alone = torch.autograd.grad(
        outputs[used], list(tensors.values()), cotangents[used], allow_unused=True
    )
    both = check_gradients(spec, case.sample(), cotangents)
    for (name, want), got in zip(both.items(), alone, strict=True):
        # The sum does not depend on the norm's parameters; autograd may return None for them.
        torch.testing.assert_close(torch.zeros_like(want) if got is None else got, want, msg=name)
    if used == 1 and sample.options.get("return_sum"):
        assert not any(both[name].any() for name in ("weight", "ln_bias") if name in both)


@pytest.mark.kernels
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_outputs_that_depend_on_nothing_differentiable(compiled: bool, fresh_dynamo: None) -> None:
    """They do not require a gradient, as in PyTorch.

    One is the pre-norm sum if only the parameters of the norm are trained, another is the output
    of a slice that requires no gradient.
    """
    x, residual, weight, bias = (
        torch.randn(shape, device=DEVICE) for shape in ((4, 24), (4, 24), (24,), (24,))
    )
    weight.requires_grad_()

    def add_norm(x: Tensor, weight: Tensor) -> Any:
        return fusedops.add_layer_norm(x, residual, weight, bias)

    function: Any = torch.compile(add_norm, backend="aot_eager") if compiled else add_norm
    y, z = function(x, weight)
    assert (y.requires_grad, z.requires_grad) == (True, False)
    x.requires_grad_()
    y, z = function(x, weight)
    assert (y.requires_grad, z.requires_grad) == (True, True)
    # A graph of torch.compile returns zeros if only some of its outputs are differentiated.
    if not compiled:
        assert (
            torch.autograd.grad(z.sum(), (x, weight), allow_unused=True, retain_graph=True)[1]
            is None
        )
        assert (
            torch.autograd.grad(z.sum(), (x, weight), allow_unused=True, create_graph=True)[1]
            is None
        )
        first, second = fusedops.batched_layer_norm_tanh([x, residual])
        assert first.requires_grad and not second.requires_grad


@pytest.mark.kernels
@cases((torch.float32,), lambda spec, sample: spec.saved == 0 and sample.name == "shape 7x17")
def test_change_in_place_of_an_output_that_is_not_saved(case: Case) -> None:
    """It changes neither the gradients nor the other outputs."""
    spec, sample = case.spec, case.sample()
    plain = check_gradients(spec, sample)
    leaves = {name: t.requires_grad_() for name, t in tensors_of(spec, sample).items()}
    outputs = call(spec, sample)(leaves)
    before = [output.detach().clone() for output in outputs]
    cotangents = random_like(outputs)
    outputs[0].mul_(2.0)
    assert all(map(torch.equal, outputs[1:], before[1:]))
    grads = torch.autograd.grad(
        outputs, list(leaves.values()), [cotangents[0] / 2.0, *cotangents[1:]]
    )
    for (name, want), got in zip(plain.items(), grads, strict=True):
        assert torch.equal(got, want), name


@cases((torch.float32, torch.bfloat16), _small)
@pytest.mark.parametrize("layout", ["expanded", "scalar", "transposed", "strided"])
def test_cotangent_layouts(case: Case, layout: str) -> None:
    """The layouts are those that autograd generates: by ``sum``, slices and transposes."""
    spec, sample = case.spec, case.sample()
    cotangents = []
    for cotangent in random_like(call(spec, sample)(tensors_of(spec, sample))):
        if layout == "expanded":
            cotangent = cotangent[:1].expand_as(cotangent)
        elif layout == "scalar":
            cotangent = cotangent.flatten()[:1].view(1, 1).expand_as(cotangent)
        elif layout == "transposed":
            cotangent = cotangent.t().contiguous().t()
        else:
            cotangent = torch.stack((cotangent, -cotangent), -1)[..., 0]
        assert not cotangent.is_contiguous()
        cotangents.append(cotangent)
    check_gradients(spec, sample, cotangents)


@cases((torch.float32,), _small)
def test_backward_of_a_sum(case: Case) -> None:
    """A second backward over the retained graph exactly doubles the accumulated gradients."""
    spec, sample = case.spec, case.sample()
    leaves = {name: t.requires_grad_() for name, t in tensors_of(spec, sample).items()}
    loss = sum(output.square().sum() for output in call(spec, sample)(leaves))
    loss.backward(retain_graph=True)
    once = {name: leaf.grad.clone() for name, leaf in leaves.items()}
    assert len({leaf.grad.data_ptr() for leaf in leaves.values()}) == len(leaves), (
        "two gradients share their memory"
    )
    loss.backward()
    for name, leaf in leaves.items():
        assert once[name].any(), name
        assert torch.equal(leaf.grad, 2 * once[name]), name


@cases(
    (torch.float32, torch.bfloat16),
    lambda spec, sample: sample.name in ("shape 7x17", "p=0.0", "sum returned, p=0"),
)
def test_one_tensor_as_two_arguments(case: Case) -> None:
    """A tensor that is passed twice gets the sum of both gradients."""
    spec, sample = case.spec, case.sample()
    tensors = tensors_of(spec, sample)
    for name in {"residual", "up"} & tensors.keys():
        tensors[name] = tensors[spec.tensors[0]]
    if "ln_bias" in tensors:
        tensors["ln_bias"] = tensors["weight"]
    separate = check_gradients(
        spec, dataclasses.replace(sample, tensors={**sample.tensors, **tensors})
    )
    shared: dict[int, Tensor] = {id(t): t.clone().requires_grad_() for t in tensors.values()}
    outputs = call(spec, sample)({name: shared[id(t)] for name, t in tensors.items()})
    torch.autograd.backward(outputs, random_like(outputs))
    for key, leaf in shared.items():
        parts = [separate[name] for name, t in tensors.items() if id(t) == key]
        expected = sum(parts[1:], parts[0])
        if KERNEL_PATH:
            assert torch.equal(leaf.grad, expected)
        else:
            # Autograd adds the gradients of PyTorch's operators in another order: two roundings.
            tolerance = 4 * unit_roundoff(leaf.dtype) * sum(part.abs() for part in parts)
            assert ((leaf.grad - expected).abs() <= tolerance).all()


@cases((torch.float32,), _small)
def test_input_that_changes_after_the_forward_is_detected(case: Case) -> None:
    """If the backward reads the changed input, autograd raises. If not, the gradients are right."""
    spec, sample = case.spec, case.sample()
    originals = tensors_of(spec, sample)
    unchanged = list(check_gradients(spec, sample).values())
    errors = 0
    for name in originals:
        leaves = {other: t.clone().requires_grad_() for other, t in originals.items()}
        outputs = call(spec, sample)(leaves)
        with torch.no_grad():
            leaves[name].mul_(3.0)
        try:
            got = torch.autograd.grad(outputs, list(leaves.values()), random_like(outputs))
        except RuntimeError as error:
            errors += "modified by an inplace operation" in str(error)
        else:
            assert all(map(torch.equal, got, unchanged)), f"a change of {name} went unnoticed"
    assert errors or spec.saved == 0


def test_a_narrower_residual_rounds_no_other_gradient() -> None:
    """Without dropout x and the residual have the same gradient, each in its own dtype."""
    x = torch.randn(5, 40, device=DEVICE, requires_grad=True)
    residual = torch.randn(5, 40, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    y = fusedops.bias_dropout_add(x, None, residual, p=0.0)
    cotangent = torch.randn_like(y)
    dx, dresidual = torch.autograd.grad(y, (x, residual), cotangent)
    assert torch.equal(dx, cotangent)
    assert torch.equal(dresidual, cotangent.bfloat16())


def test_gradients_are_not_all_zero() -> None:
    """Gradients of the tests' cotangents are of order one, so a backward of zeros would fail."""
    for spec in ALL_SPECS:
        sample = next(
            sample for sample in spec.samples(DEVICE, torch.float32) if sample.name == "shape 7x17"
        )
        mask = dropout_mask(spec, sample)
        leaves = {name: t.requires_grad_() for name, t in tensors_of(spec, sample).items()}
        with fixed_draw():
            outputs = as_tuple(eager(spec, sample, mask)(leaves))
        for grad in torch.autograd.grad(outputs, list(leaves.values()), random_like(outputs)):
            assert grad.square().mean() > 0.01


@cases((torch.float32,), lambda spec, sample: sample.name in ("shape 7x17", "sum returned"))
def test_cotangent_with_a_lazy_negation(case: Case) -> None:
    """The imaginary part of a conjugated tensor is such a view: its memory has the negatives."""
    sample = case.sample()
    leaves = [t.requires_grad_() for t in tensors_of(case.spec, sample).values()]
    outputs = call(case.spec, sample)(sample.tensors)
    cotangents = random_like(outputs)
    lazy = [torch._neg_view(-c) for c in cotangents]
    assert all(c.is_neg() for c in lazy)
    grads = torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True)
    for result, expected in zip(torch.autograd.grad(outputs, leaves, lazy), grads, strict=True):
        assert torch.equal(result, expected)


@pytest.mark.kernels
@pytest.mark.parametrize("save", ["sum", "output", "inputs"])
def test_gradient_of_rows_of_one_column_is_zero(save: Any) -> None:
    """It is exactly zero, also if the saved output has fewer bits than the bias."""
    x = torch.randn(4, 1).to(DEVICE, torch.bfloat16).requires_grad_()
    weight, shift = torch.ones(1, device=DEVICE), torch.full((1,), 1.003, device=DEVICE)
    y = fusedops.bias_dropout_add_ln(x, None, None, weight, shift, p=0.0, save=save)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert not gradient.any()


@pytest.mark.kernels
@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (5, 1, 33, 2, 9, 17)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradient_of_slices_of_one_column_is_zero(
    sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    """It is exactly zero, also in tiles with wider slices."""
    total, single = sum(sizes), sum(sizes[: sizes.index(1)])
    x = torch.randn(9, total).to(DEVICE, dtype).requires_grad_()
    weight, bias = torch.randn(2, total).to(DEVICE, dtype)
    y = fusedops.batched_layer_norm_act(x, weight, bias, sizes=sizes)
    (gradient,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert not gradient[:, single].any()
    assert gradient.any() or max(sizes) == 1
