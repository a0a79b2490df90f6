"""A fused model has the outputs and gradients of the original, and calls the reported operators."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedops
from fusedops.core.launches import launch
from sample_models import MODELS, ModelSpec
from support import INTERPRETED, KERNEL_PATH
from tolerances import unit_roundoff
from zoo import HAS_TRANSFORMERS, SAMPLES, build, counted, every, inputs, outputs, run

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


@every
def test_fused_model_calls_each_operator_as_often_as_its_spec_says(spec: ModelSpec) -> None:
    """A block that silently called its modules instead would have other counts."""
    model = build(spec).train()
    fusedops.fuse_model(model)
    with counted() as calls:
        model(**inputs(spec))
    assert dict(calls) == spec.calls


@every
@pytest.mark.kernels
def test_each_call_of_an_operator_launches_one_kernel(spec: ModelSpec) -> None:
    model = build(spec).train()
    fusedops.fuse_model(model)
    with launch.record() as names, counted() as calls:
        model(**inputs(spec))
    assert len(names) == sum(calls.values())


@every
def test_report_has_the_rule_of_each_class_in_the_spec(spec: ModelSpec) -> None:
    report = fusedops.fuse_model(build(spec))
    rules_of_class: dict[str, set[str]] = {}
    for module in report.modules:
        rules_of_class.setdefault(module.type, set()).add(module.rule)
    for name, rule in spec.rules.items():
        assert rules_of_class.get(name) == {rule}, name


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


class _Output(nn.Module):
    """A module with the attributes and the code of BERT's output."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(64, 64)
        self.dropout = nn.Dropout(0.25)
        self.LayerNorm = nn.LayerNorm(64)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.LayerNorm(hidden_states + input_tensor)
        return hidden_states  # noqa: RET504, the code must equal BERT's


def test_dropout_has_the_distribution_of_the_original(device: torch.device) -> None:
    """Means and deviations over many masks agree within five standard errors.

    A seed gives one mask, and evaluation mode draws none.
    """
    draws = 400 if not INTERPRETED else 60
    module = _Output().to(device)
    x, residual = torch.randn(2, 4, 64, device=device)
    means, deviations = [], []
    for fuse in (False, True):
        if fuse:
            assert [m.rule for m in fusedops.fuse_model(module)] == ["bert_output", "layer_norm"]
        torch.manual_seed(9)
        with torch.no_grad():
            values = torch.stack([module(x, residual) for _ in range(draws)])
        assert len(values.unique(dim=0)) == draws
        torch.manual_seed(9)
        assert torch.equal(module(x, residual), values[0])
        means.append(values.mean(0))
        deviations.append(values.std(0))
    standard_error = (deviations[0].square() + deviations[1].square()).sqrt() / draws**0.5
    assert ((means[0] - means[1]).abs() <= 5 * standard_error).all()
    # The standard error of a deviation is 0.71 of the mean's for normal values. Tails are heavier
    # here, and it is at most about twice as large.
    assert ((deviations[0] - deviations[1]).abs() <= 5 * 1.5 * standard_error).all()
    module.eval()
    state = torch.get_rng_state()
    assert torch.equal(module(x, residual), module(x, residual))
    assert torch.equal(torch.get_rng_state(), state)


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
    "spec", [s for s in SAMPLES if s.name in ("gpt2", "bert", "t5")], ids=lambda spec: spec.name
)
def test_checkpointed_models_with_dropout_have_the_same_gradients(spec: ModelSpec) -> None:
    """With another mask in the recomputation, all gradients would differ.

    Checkpointing turns off T5's cache, so that it multiplies other matrices. Its results differ by
    roundings in fp32.
    """
    model, arguments = build(spec).train(), inputs(spec)
    fusedops.fuse_model(model)
    _, expected = run(model, arguments, seed=3)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _, result = run(model, arguments, seed=3)
    for name, gradient in expected.items():
        torch.testing.assert_close(
            result[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()), msg=name
        )


@pytest.mark.parametrize(
    "name, layer, part, factor, size",
    [
        ("t5_gated", "T5Block", "layer.0.SelfAttention.o", 2e3, 6e4),
        ("bart", "BartEncoderLayer", "final_layer_norm", 3e4, 1.0),
        ("mbart", "MBartEncoderLayer", "fc2", 2e3, 6e4),
    ]
    if HAS_TRANSFORMERS
    else [],
)
def test_fused_blocks_clamp_infinities_in_fp16(
    name: str, layer: str, part: str, factor: float, size: float, device: torch.device
) -> None:
    """T5's blocks, and BART's and MBart's encoder layers, clamp infinities in fp16.

    Args:
        name: the sample model.
        layer: the class of the block.
        part: the module in the block whose weight is multiplied, so that its output overflows.
        factor: the factor of the weight.
        size: the size of the inputs.
        device: the device of the block.
    """
    spec = next(s for s in MODELS if s.name == name)
    module = next(m for m in build(spec, torch.float16).modules() if type(m).__name__ == layer)
    x = (torch.randn(2, 5, 32, device=device).sign() * size).half()
    results = []
    with torch.no_grad():
        module.get_submodule(part).weight.mul_(factor)
        for fuse in (False, True):
            if fuse:
                assert any(line.name == "" for line in fusedops.fuse_model(module))
            results.append(outputs(module(x, attention_mask=None))[0])
    original, fused = results
    assert torch.isfinite(original).all()
    assert (original.abs() >= 64504).any()  # some elements are clamped
    assert original.unique().numel() > 10
    bound = 16 * torch.finfo(torch.float16).eps * 65504
    torch.testing.assert_close(fused.float(), original.float(), rtol=0, atol=bound)


_ROUNDED = ("LlamaRMSNorm", "Olmo2RMSNorm", "T5LayerNorm", "GemmaRMSNorm")


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
    model = build(next(s for s in MODELS if name in s.rules))
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


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer_takes_pytorchs_fast_path_as_before(
    norm_first: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the path in evaluation mode without gradients, also for a padded batch.

    It does not if gradients are recorded, or in training mode.
    """
    fast_calls = []
    original = torch._transformer_encoder_layer_fwd

    def recording(*args: Any) -> Tensor:
        fast_calls.append(1)
        return original(*args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", recording)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=norm_first).to(
        device
    )
    x = torch.randn(2, 5, 16, device=device)
    padding = torch.zeros(2, 5, dtype=torch.bool, device=device)
    padding[1, 3:] = True
    fast_counts, results, calls_operators = [], [], []
    for fuse in (False, True):
        if fuse:
            fusedops.fuse_model(layer)
        for training, grad in ((False, False), (False, True), (True, False)):
            layer.train(training)
            with torch.set_grad_enabled(grad), counted() as calls:
                results.append((layer(x), layer(x, src_key_padding_mask=padding)[0]))
            fast_counts.append(len(fast_calls))
            calls_operators.append(calls["bias_dropout_add_ln"] > 0)
            fast_calls.clear()
    # The original in three settings, and then the fused layer in the same three.
    assert fast_counts == [2, 0, 0, 2, 0, 0]
    assert calls_operators == [False, False, False, False, True, True]
    for before, after in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(after, before)


def test_frozen_attention_in_evaluation_mode_has_the_same_output(device: torch.device) -> None:
    """PyTorch's attention then takes a fast path of its own, which adds its last bias."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True).to(device).eval()
    layer.self_attn.requires_grad_(False)
    x = torch.randn(2, 5, 16, device=device)
    before = layer(x)
    fusedops.fuse_model(layer)
    torch.testing.assert_close(layer(x), before)


@pytest.mark.parametrize("norm_first", [False, True])
def test_bf16_residual_stream_stays_in_bf16_under_autocast(
    norm_first: bool, device: torch.device
) -> None:
    """A fused block adds an fp32 bias to it, which does not promote it to fp32."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=norm_first).to(
        device
    )
    x = torch.randn(2, 5, 16, device=device, dtype=torch.bfloat16)
    with torch.autocast(device.type, torch.bfloat16):
        original = layer(x)
        fusedops.fuse_model(layer)
        fused = layer(x)
    assert fused.dtype == original.dtype
    atol = 8 * 2.0**-8 * float(original.detach().float().abs().max())
    torch.testing.assert_close(fused, original, rtol=0, atol=atol)


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
