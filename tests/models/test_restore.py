"""`fuse_model` changes only classes, and `unfuse_model` restores them.

The tests compare state, hooks, copies and results.
"""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import fusedops
from fusedops.models.classes import original_class
from sample_models import ModelSpec
from zoo import SAMPLES, build, every, inputs, run, transformers_only

pytestmark = pytest.mark.once


def _state(model: nn.Module) -> dict[str, Any]:
    """Return the modules, attributes, parameters and buffers of a model, by identity."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {
        "modules": {name: id(module) for name, module in modules.items()},
        "attributes": {name: _shallow(vars(module)) for name, module in modules.items()},
        "parameters": {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "buffers": {name: id(b) for name, b in model.named_buffers(remove_duplicate=False)},
        "keys": list(model.state_dict()),
    }


def _shallow(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the identities of attributes, and of the values of attributes that are dicts."""
    identities: dict[str, Any] = {}
    for name, attribute in attributes.items():
        if isinstance(attribute, dict):
            identities[name] = {key: id(value) for key, value in attribute.items()}
        else:
            identities[name] = id(attribute)
    return identities


_Results = tuple[list[torch.Tensor], dict[str, torch.Tensor]]  # outputs, and gradients by name


def _have_same_bits(results: _Results, expected: _Results) -> bool:
    outputs, gradients = results
    expected_outputs, expected_gradients = expected
    if gradients.keys() != expected_gradients.keys():
        return False
    pairs = list(zip(outputs, expected_outputs, strict=True))
    pairs += [(gradient, expected_gradients[name]) for name, gradient in gradients.items()]
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


@every
@pytest.mark.parametrize("training", [False, True])
def test_unfuse_restores_classes_and_bits_and_fusing_keeps_the_state(
    spec: ModelSpec, training: bool
) -> None:
    model = build(spec).train(training)
    before = run(model, inputs(spec))
    state = _state(model)
    types = [type(m) for m in model.modules()]
    values = {key: value.clone() for key, value in model.state_dict().items()}
    assert fusedops.fuse_model(model)
    assert _state(model) == state
    assert [type(m) for m in model.modules()] != types
    run(model, inputs(spec))
    fusedops.unfuse_model(model)
    assert [type(m) for m in model.modules()] == types
    assert all(torch.equal(values[key], value) for key, value in model.state_dict().items())
    assert _have_same_bits(before, run(model, inputs(spec)))


@every
def test_fused_modules_are_instances_of_their_class_and_have_its_name(spec: ModelSpec) -> None:
    """Only a printed model shows "Fused"."""
    model = build(spec)
    types = [type(m) for m in model.modules()]
    report = fusedops.fuse_model(model)
    assert [m._get_name().removeprefix("Fused") for m in model.modules()] == [
        cls.__name__ for cls in types
    ]
    assert sum(m._get_name().startswith("Fused") for m in model.modules()) == len(report)
    for module, cls in zip(model.modules(), types, strict=True):
        assert isinstance(module, cls)
        assert (type(module).__name__, type(module).__module__) == (cls.__name__, cls.__module__)
        assert module.extra_repr() == cls.extra_repr(module)


@every
def test_state_dicts_load_into_fused_and_unfused_models(spec: ModelSpec) -> None:
    model, other = build(spec), build(spec)
    fusedops.fuse_model(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 1.0
    model.load_state_dict(other.state_dict())
    other.load_state_dict(model.state_dict())
    fusedops.unfuse_model(model)
    assert _have_same_bits(run(model, inputs(spec)), run(other, inputs(spec)))


@every
@pytest.mark.parametrize("method", ["deepcopy", "copy", "pickle", "pickle_0", "save"])
def test_copies_of_a_fused_model_are_fused_and_have_the_same_bits(
    spec: ModelSpec, method: str
) -> None:
    model = build(spec)
    report = fusedops.fuse_model(model)
    expected = run(model, inputs(spec))
    if method == "save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = {
            "deepcopy": copy.deepcopy,
            "copy": copy.copy,
            "pickle": lambda m: pickle.loads(pickle.dumps(m)),
            "pickle_0": lambda m: pickle.loads(pickle.dumps(m, protocol=0)),
        }[method](model)
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    assert _have_same_bits(expected, run(other, inputs(spec)))
    fusedops.unfuse_model(other)
    assert len(fusedops.fuse_model(other)) == len(report)


def test_saved_fused_model_loads_in_another_process(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    fusedops.fuse_model(model)
    torch.save(model, tmp_path / "model.pt")
    code = "import torch, sys; m = torch.load(sys.argv[1], weights_only=False); print(m[1], m(torch.ones(2, 4)).shape)"
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model.pt")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    assert "FusedLayerNorm" in process.stdout


def test_pickle_for_which_there_is_no_rule_loads_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    fusedops.fuse_model(model)
    data = pickle.dumps(model)
    monkeypatch.setattr("fusedops.models.rules.RULES", ())
    with pytest.warns(UserWarning, match="LayerNorm was saved fused"):
        loaded = pickle.loads(data)
    assert type(loaded[0]) is nn.LayerNorm


def _recorded_outputs(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Record the outputs of every module in later calls, by hooks."""
    recorded: dict[str, list[torch.Tensor]] = {}

    def hook(name: str) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor):
                recorded.setdefault(name, []).append(first.detach().clone())

        return record

    for name, module in model.named_modules():
        module.register_forward_hook(hook(name))
    return recorded


@every
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_get_the_outputs_of_the_original(spec: ModelSpec, when: str) -> None:
    """Hooks are on all modules, also inside fused blocks, and registered before or after fusing."""
    original, model = build(spec), build(spec)
    expected = _recorded_outputs(original)
    if when == "before":
        recorded = _recorded_outputs(model)
        fusedops.fuse_model(model)
    else:
        fusedops.fuse_model(model)
        recorded = _recorded_outputs(model)
    run(original, inputs(spec))
    run(model, inputs(spec))
    assert recorded.keys() == expected.keys()
    for name, expected_values in expected.items():
        assert len(recorded[name]) == len(expected_values), name
        for value, expected_value in zip(recorded[name], expected_values, strict=True):
            atol = 0.0
            if expected_value.numel():
                atol = 1e-5 * float(expected_value.abs().max())
            torch.testing.assert_close(value, expected_value, rtol=1e-5, atol=atol)


class _Scaled(nn.Module):
    """An adapter that replaces a linear layer, like those of libraries for fine-tuning."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.weight, self.bias = layer, layer.weight, getattr(layer, "bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * self.layer(x)


@every
def test_adapters_that_replace_linear_layers_of_a_fused_model_are_called(spec: ModelSpec) -> None:
    """Each adapter doubles the output of its layer. If one is not called, outputs are wrong.

    The doubled branches enlarge rounding errors, and on a GPU T5's attention is another kernel than
    the original's. So the tolerance is larger than in other tests.
    """
    original, model = build(spec), build(spec)
    fusedops.fuse_model(model)
    for changed in (original, model):
        for module in list(changed.modules()):
            if isinstance(module, (_Scaled, nn.TransformerEncoderLayer)):
                continue
            for name, child in list(module.named_children()):
                if original_class(child) is nn.Linear:
                    setattr(module, name, _Scaled(child))
    expected_outputs, _ = run(original, inputs(spec))
    results, _ = run(model, inputs(spec))
    for result, expected in zip(results, expected_outputs, strict=True):
        atol = 1e-4 * float(expected.detach().abs().max())
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=atol)


@transformers_only
def test_tied_weights_stay_tied() -> None:
    spec = next(spec for spec in SAMPLES if spec.name == "gpt2")
    model = build(spec)
    fusedops.fuse_model(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    fusedops.unfuse_model(model)
    assert model.lm_head.weight is model.transformer.wte.weight


@every
def test_optimizer_from_before_fusing_takes_the_same_step(spec: ModelSpec) -> None:
    parameters_after_step = []
    for fuse in (False, True):
        model = build(spec)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if fuse:
            fusedops.fuse_model(model)
        _, gradients = run(model, inputs(spec))
        for name, parameter in model.named_parameters():
            parameter.grad = gradients.get(name)
        optimizer.step()
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        parameters_after_step.append(values)
    original, fused = parameters_after_step
    for name, value in original.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_fusing_and_unfusing_a_second_time_change_nothing() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.GELU())
    assert len(fusedops.fuse_model(model, graph=False)) == 2
    types = [type(m) for m in model.modules()]
    again = fusedops.fuse_model(model, graph=False)
    assert not again
    assert [m.reason for m in again.left] == ["no rule", "fused already", "fused already"]
    assert [type(m) for m in model.modules()] == types
    fusedops.unfuse_model(model)
    fusedops.unfuse_model(model)
    assert [type(m) for m in model.modules()] == [nn.Sequential, nn.LayerNorm, nn.GELU]


def test_unfuse_is_an_error_if_a_class_was_changed_after_fusing() -> None:
    model = nn.Sequential(nn.GELU(), nn.LayerNorm(4))
    fusedops.fuse_model(model, graph=False)
    torch.nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Identity())
    types = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="module '1' was changed after it was fused"):
        fusedops.unfuse_model(model)
    assert [type(m) for m in model.modules()] == types
    torch.nn.utils.parametrize.remove_parametrizations(model[1], "weight")
    fusedops.unfuse_model(model)
    assert type(model[1]) is nn.LayerNorm
