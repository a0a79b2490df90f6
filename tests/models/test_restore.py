"""fuse_model changes nothing but classes, and unfuse_model gives them back.

State, hooks, copies, results.
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
    """All that a model consists of: by identity, but for the values of its state."""
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
    """The attributes' identities, and one level into the dicts that torch.nn keeps."""
    return {
        key: {k: id(v) for k, v in value.items()} if isinstance(value, dict) else id(value)
        for key, value in attributes.items()
    }


def _same(a: tuple[list[torch.Tensor], dict[str, torch.Tensor]], b: Any) -> bool:
    return (
        all(map(torch.equal, a[0], b[0]))
        and a[1].keys() == b[1].keys()
        and all(torch.equal(a[1][name], b[1][name]) for name in a[1])
    )


@every
@pytest.mark.parametrize("training", [False, True])
def test_restores_exactly(spec: ModelSpec, training: bool) -> None:
    model = build(spec).train(training)
    before, state, types = (
        run(model, inputs(spec)),
        _state(model),
        [type(m) for m in model.modules()],
    )
    values = {key: value.clone() for key, value in model.state_dict().items()}
    assert fusedops.fuse_model(model)
    assert _state(model) == state
    assert [type(m) for m in model.modules()] != types
    run(model, inputs(spec))
    fusedops.unfuse_model(model)
    assert [type(m) for m in model.modules()] == types
    assert all(torch.equal(values[key], value) for key, value in model.state_dict().items())
    assert _same(before, run(model, inputs(spec)))


@every
def test_is_still_what_it_was(spec: ModelSpec) -> None:
    """isinstance and the class's name; what is printed says "Fused"."""
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
def test_weights_load_both_ways(spec: ModelSpec) -> None:
    model, other = build(spec), build(spec)
    fusedops.fuse_model(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 1.0
    model.load_state_dict(other.state_dict())
    other.load_state_dict(model.state_dict())
    fusedops.unfuse_model(model)
    assert _same(run(model, inputs(spec)), run(other, inputs(spec)))


@every
@pytest.mark.parametrize("way", ["deepcopy", "copy", "pickle", "pickle_0", "save"])
def test_copies(spec: ModelSpec, way: str) -> None:
    model = build(spec)
    report = fusedops.fuse_model(model)
    expected = run(model, inputs(spec))
    if way == "save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = {
            "deepcopy": copy.deepcopy,
            "copy": copy.copy,
            "pickle": lambda m: pickle.loads(pickle.dumps(m)),
            "pickle_0": lambda m: pickle.loads(pickle.dumps(m, 0)),
        }[way](model)
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    assert _same(expected, run(other, inputs(spec)))
    fusedops.unfuse_model(other)
    assert len(fusedops.fuse_model(other)) == len(report)


def test_loads_in_another_process(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    fusedops.fuse_model(model)
    torch.save(model, tmp_path / "model.pt")
    code = "import torch, sys; m = torch.load(sys.argv[1], weights_only=False); print(m[1], m(torch.ones(2, 4)).shape)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model.pt")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "FusedLayerNorm" in done.stdout


def test_a_pickle_that_no_rule_fits_any_more_loads_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    fusedops.fuse_model(model)
    data = pickle.dumps(model)
    monkeypatch.setattr("fusedops.models.rules.RULES", ())
    with pytest.warns(UserWarning, match="LayerNorm was saved fused"):
        loaded = pickle.loads(data)
    assert type(loaded[0]) is nn.LayerNorm


def _recorded(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """The outputs that forward hooks on every module get."""
    seen: dict[str, list[torch.Tensor]] = {}

    def hook(name: str) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor):
                seen.setdefault(name, []).append(first.detach().clone())

        return record

    for name, module in model.named_modules():
        module.register_forward_hook(hook(name))
    return seen


@every
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_see_what_they_saw(spec: ModelSpec, when: str) -> None:
    """On every module, also on those inside fused blocks.

    Whether they came before the model was fused or after.
    """
    other, model = build(spec), build(spec)
    expected = _recorded(other)
    if when == "before":
        seen = _recorded(model)
        fusedops.fuse_model(model)
    else:
        fusedops.fuse_model(model)
        seen = _recorded(model)
    run(other, inputs(spec))
    run(model, inputs(spec))
    assert seen.keys() == expected.keys()
    for name, values in expected.items():
        assert len(values) == len(seen[name]), name
        for a, b in zip(values, seen[name], strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-5, atol=1e-5 * float(a.detach().abs().max()) if a.numel() else 0.0
            )


class _Scaled(nn.Module):
    """An adapter in a linear layer's place, as a library for fine-tuning puts one there."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.weight, self.bias = layer, layer.weight, getattr(layer, "bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * self.layer(x)


@every
def test_adapters_are_heeded(spec: ModelSpec) -> None:
    """A linear layer that is replaced in a fused model takes part as what it is then.

    One that does not halves its branch. The doubled branches make more of roundings than the
    model's own would, and on a GPU T5's attention is another kernel than the original's.
    """
    other, model = build(spec), build(spec)
    fusedops.fuse_model(model)
    for each in (other, model):
        for module in list(each.modules()):
            for name, child in list(module.named_children()):
                if original_class(child) is nn.Linear and not isinstance(
                    module, (_Scaled, nn.TransformerEncoderLayer)
                ):
                    setattr(module, name, _Scaled(child))
    expected, result = run(other, inputs(spec))[0], run(model, inputs(spec))[0]
    for a, b in zip(expected, result, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(a.detach().abs().max()))


@transformers_only
def test_tied_weights_stay_tied() -> None:
    spec = next(spec for spec in SAMPLES if spec.name == "gpt2")
    model = build(spec)
    fusedops.fuse_model(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    fusedops.unfuse_model(model)
    assert model.lm_head.weight is model.transformer.wte.weight


@every
def test_an_optimizer_goes_on(spec: ModelSpec) -> None:
    """One that holds the parameters already takes the same step, fused or not."""
    changed = []
    for fuse in (False, True):
        model = build(spec)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if fuse:
            fusedops.fuse_model(model)
        _, gradients = run(model, inputs(spec))
        for name, parameter in model.named_parameters():
            parameter.grad = gradients.get(name)
        optimizer.step()
        changed.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, value in changed[0].items():
        torch.testing.assert_close(changed[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_fusing_twice_is_fusing_once() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.GELU())
    assert len(fusedops.fuse_model(model)) == 2
    types = [type(m) for m in model.modules()]
    again = fusedops.fuse_model(model)
    assert not again
    assert [m.reason for m in again.left] == ["no rule", "fused already", "fused already"]
    assert [type(m) for m in model.modules()] == types
    fusedops.unfuse_model(model)
    fusedops.unfuse_model(model)
    assert [type(m) for m in model.modules()] == [nn.Sequential, nn.LayerNorm, nn.GELU]


def test_a_class_changed_since_is_not_lost() -> None:
    model = nn.Sequential(nn.GELU(), nn.LayerNorm(4))
    fusedops.fuse_model(model)
    torch.nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Identity())
    types = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="module '1' was changed after it was fused"):
        fusedops.unfuse_model(model)
    assert [type(m) for m in model.modules()] == types
    torch.nn.utils.parametrize.remove_parametrizations(model[1], "weight")
    fusedops.unfuse_model(model)
    assert type(model[1]) is nn.LayerNorm
