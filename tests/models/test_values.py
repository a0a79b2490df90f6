"""A fused model has the outputs and gradients of the original."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedops
from sample_models import MODELS, ModelSpec
from support import KERNEL_PATH
from tolerances import unit_roundoff
from zoo import HAS_TRANSFORMERS, SAMPLES, build, every, inputs, outputs, run

# What a model calls does not depend on the kernels, whose values the operators' own tests check.
pytestmark = pytest.mark.once

# The largest number of roundings between two uses of parameters: `_bounds` perturbs only parameters
# and inputs, so one perturbation stands for so many roundings. T5's gated unit with tanh has the
# most: eleven elementwise steps and a sum.
_ROUNDINGS = 12
_STEP = 2.0**-18  # the size of a perturbation


def _fp64_model(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double()


def _map_floats(arguments: dict[str, Any], function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Apply a function to the floating-point tensors of a model's arguments."""
    results = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            results[name] = function(value)
    return results


def _fp64_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    return _map_floats(arguments, Tensor.double)


def _by_name(result: tuple[list[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return outputs and gradients in one dict."""
    outputs, gradients = result
    return {**{f"output {index}": y for index, y in enumerate(outputs)}, **gradients}


def _errors(results: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest difference from the exact value, for each result."""
    return {
        name: float((results[name].double() - value).abs().max()) for name, value in exact.items()
    }


def _moved(
    model: nn.Module, arguments: dict[str, Any], seed: int
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a copy of the model, and its arguments, with every number moved up or down at random.

    A number moves by 2⁻¹⁸ of its size, or by a unit in the last place of a narrower dtype.
    """
    generator = torch.Generator().manual_seed(seed)

    def move(x: Tensor) -> Tensor:
        signs = torch.randint(0, 2, x.shape, generator=generator).to(x.device) * 2 - 1
        return (x.double() * (1 + max(_STEP, torch.finfo(x.dtype).eps) * signs)).to(x.dtype)

    moved_model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in moved_model.parameters():
            parameter.copy_(move(parameter))
    return moved_model, _map_floats(arguments, move)


def _bounds(
    model: nn.Module, arguments: dict[str, Any], exact: dict[str, Tensor]
) -> dict[str, float]:
    """Return the allowed error of each result of a fused model, against fp64.

    It is twice eager's error, plus `_ROUNDINGS` times the change of the result by one rounding of
    each parameter and input, plus the rounding of the result itself. Eager's error is the largest
    of the model and three moved ones: some gradients, such as that of a key's bias, are zero
    except for rounding errors, which differ from run to run and do not follow from perturbations.
    """
    parameters = list(model.parameters())
    u = unit_roundoff(parameters[0].dtype if parameters else torch.float32)
    eager_errors = _errors(_by_name(run(model, arguments)), exact)
    sensitivities = dict.fromkeys(exact, 0.0)  # changes per relative perturbation
    for seed in range(3):
        moved_model, moved_arguments = _moved(model, arguments, seed)
        moved_exact = _by_name(run(_fp64_model(moved_model), _fp64_arguments(moved_arguments)))
        moved_errors = _errors(_by_name(run(moved_model, moved_arguments)), moved_exact)
        for name, error in moved_errors.items():
            eager_errors[name] = max(eager_errors[name], error)
        for name, change in _errors(moved_exact, exact).items():
            sensitivities[name] = max(sensitivities[name], change / max(_STEP, 2 * u))
    bounds = {}
    for name, value in exact.items():
        rounding_of_result = u * float(value.abs().max())
        bounds[name] = 2 * eager_errors[name] + _ROUNDINGS * u * sensitivities[name]
        bounds[name] += rounding_of_result
    return bounds


@pytest.mark.pairs("spec")
@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_errors_of_fused_models_are_within_bounds_from_eagers(
    spec: ModelSpec, dtype: torch.dtype
) -> None:
    """Shapes and dtypes are those of the original. `_bounds` has the bounds."""
    model, arguments = build(spec, dtype), inputs(spec, dtype)
    exact = _by_name(run(_fp64_model(model), _fp64_arguments(arguments)))
    bounds = _bounds(model, arguments, exact)
    eager = _by_name(run(model, arguments))
    assert fusedops.fuse_model(model)
    result = _by_name(run(model, arguments))
    assert result.keys() == exact.keys()
    assert {name: (x.shape, x.dtype) for name, x in result.items()} == {
        n: (x.shape, x.dtype) for n, x in eager.items()
    }
    for name, error in _errors(result, exact).items():
        assert error <= bounds[name], f"{name}: off by {error:.3g}, allowed {bounds[name]:.3g}"


def _drops(model: nn.Module) -> bool:
    """Return whether a model has dropout, by a module or by a number in an attribute."""
    probabilities = [
        module.p if isinstance(module, nn.Dropout) else getattr(module, "dropout", 0)
        for module in model.modules()
    ]
    return any(isinstance(p, float) and p > 0 for p in probabilities)


@every
def test_dropout_masks_depend_on_the_seed(spec: ModelSpec) -> None:
    """A seed gives the same outputs again, and another seed gives others.

    On a CPU the masks are those of the original.
    """
    model, arguments = build(spec).train(), inputs(spec)
    eager, _ = run(model, arguments, seed=3)
    fusedops.fuse_model(model)
    (first, _), (second, _), (other, _) = [run(model, arguments, seed=s) for s in (3, 3, 4)]
    assert all(map(torch.equal, first, second))
    has_same_masks = all(map(torch.equal, first, other))
    assert has_same_masks == (not _drops(model))
    if not KERNEL_PATH:
        for fused, original in zip(first, eager, strict=True):
            atol = 1e-5 * float(original.abs().max())
            torch.testing.assert_close(fused, original, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "spec",
    [s for s in SAMPLES if s.name in ("gpt2", "bert", "t5", "t5_gated", "llama")],
    ids=lambda spec: spec.name,
)
def test_autocast_errors_are_at_most_twice_eagers(spec: ModelSpec, device: torch.device) -> None:
    """In training mode without dropout, dtypes are eager's, and errors at most twice eager's.

    Errors are distances from the fp32 results. Eight roundings are allowed in addition, because
    eager's error may be small by chance.
    """
    model, arguments = build(spec).train(), inputs(spec)
    _disable_dropout(model)
    exact = _by_name(run(model, arguments))
    results = []
    for fuse in (False, True):
        if fuse:
            fusedops.fuse_model(model)
        with torch.autocast(device.type, torch.bfloat16):
            results.append(_by_name(run(model, arguments)))
    eager, fused = results
    dtypes = {name: x.dtype for name, x in fused.items()}
    assert dtypes == {name: x.dtype for name, x in eager.items()}
    fp64_exact = {name: value.double() for name, value in exact.items()}
    errors, eager_errors = _errors(fused, fp64_exact), _errors(eager, fp64_exact)
    for name, value in exact.items():
        if name.startswith("output"):
            slack = 8 * unit_roundoff(torch.bfloat16) * float(value.abs().max())
            allowed = 2 * eager_errors[name] + slack
            assert errors[name] <= allowed, (name, errors[name], eager_errors[name])


def _disable_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):  # T5's attention
            module.dropout = 0.0


@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name in ("gpt2", "bert")], ids=lambda spec: spec.name
)
def test_checkpointed_models_with_dropout_have_the_same_gradients(spec: ModelSpec) -> None:
    """With another mask in the recomputation, all gradients would differ.

    Not in T5: its last block and the dropout after it are one region, which draws one random state,
    and two regions where the block is checkpointed.
    """
    model, arguments = build(spec).train(), inputs(spec)
    fusedops.fuse_model(model)
    _, expected = run(model, arguments, seed=3)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _, result = run(model, arguments, seed=3)
    for name, gradient in expected.items():
        atol = 1e-5 * float(gradient.abs().max())
        torch.testing.assert_close(
            result[name], gradient, rtol=0, atol=atol, msg=f"{{}}\n{name}".format
        )


# Norms, with a sample model that has each.
_ROUNDED = {
    "LlamaRMSNorm": "llama",
    "Olmo2RMSNorm": "olmo2",
    "T5LayerNorm": "t5",
    "GemmaRMSNorm": "gemma",
}


@pytest.mark.parametrize("name", _ROUNDED if HAS_TRANSFORMERS else [])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
    ids=lambda dtypes: "-".join(str(d).removeprefix("torch.") for d in dtypes),
)
def test_norms_round_where_transformers_does(
    name: str, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device
) -> None:
    """Dtypes are the same, and so are almost all bits.

    A few elements differ, because the last bit of the statistics may change a rounding.
    """
    rows_dtype, weight_dtype = dtypes
    model = build(next(s for s in MODELS if s.name == _ROUNDED[name]))
    norm = next(m for m in model.modules() if type(m).__name__ == name).to(weight_dtype)
    x = torch.randn(256, norm.weight.shape[0], device=device).to(rows_dtype)
    eager = norm(x)
    (line,) = fusedops.fuse_model(norm)
    assert line.rule == "norm"
    result = norm(x)
    assert result.dtype == eager.dtype
    if eager.dtype == torch.float32:
        torch.testing.assert_close(result, eager)
    else:
        assert float((result != eager).float().mean()) < 2e-3


# These models read the values of tokens, which tensors on the meta device do not have.
_READ_TOKENS = ("bart", "mbart", "marian")


@pytest.mark.parametrize(
    "spec", [s for s in SAMPLES if s.name not in _READ_TOKENS], ids=lambda spec: spec.name
)
def test_fused_model_on_the_meta_device_has_the_shapes_of_the_original(spec: ModelSpec) -> None:
    """Such a run computes only shapes, for example to estimate a model's memory."""
    model = build(spec).to("meta")
    # Transformers reads the values of masks.
    arguments = {
        name: value.to("meta")
        for name, value in inputs(spec).items()
        if isinstance(value, Tensor) and "mask" not in name
    }
    try:
        model(**arguments)
    except RuntimeError:
        # Without a mask the model makes its own. With eager attention no code reads its values.
        model.set_attn_implementation("eager")
    expected = [t.shape for t in outputs(model(**arguments))]
    assert fusedops.fuse_model(model)
    assert [t.shape for t in outputs(model(**arguments))] == expected
