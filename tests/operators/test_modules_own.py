"""Modules without a counterpart in torch.nn: gated units, and layers of slices.

They are compared with their functionals, and with the layers that they replace.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import nn

import fusedops
from fusedops.nn import (
    FusedBatchedLayerNormAct,
    FusedBatchedLayerNormTanh,
    FusedBiasAct,
    FusedGatedAct,
    FusedGEGLU,
    FusedSwiGLU,
)
from modules import N, close, randomise

GATED = {
    "FusedSwiGLU": (FusedSwiGLU(), fusedops.swiglu),
    "FusedGEGLU": (FusedGEGLU(), fusedops.geglu),
    "FusedGEGLU tanh": (
        FusedGEGLU("tanh"),
        lambda *halves: fusedops.geglu(*halves, approximate="tanh"),
    ),
    "FusedGatedAct": (
        FusedGatedAct("relu"),
        lambda *halves: fusedops.gated_act(*halves, activation="relu"),
    ),
}


@pytest.mark.parametrize("name", GATED)
def test_gated_units_have_the_bits_of_their_functionals(name: str, device: torch.device) -> None:
    """The halves are two tensors or one; copies of the module have the same results."""
    module, functional = GATED[name]
    packed = torch.randn(3, 5, 2 * N, device=device)
    expected = functional(*packed.chunk(2, -1))
    assert expected.any()
    for copied in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(*packed.chunk(2, -1)), expected)
        assert torch.equal(copied(packed), expected)
        assert repr(copied) == repr(module)
    assert not module.state_dict()


def test_gated_units_differ(device: torch.device) -> None:
    packed = torch.randn(3, 2 * N, device=device)
    outputs = [module(packed) for module, _ in GATED.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[i + 1 :])


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_bias_act_calls_its_functional(activation: str, device: torch.device) -> None:
    module, x, bias = (
        FusedBiasAct(activation, 0.4),
        torch.randn(6, N, device=device),
        torch.randn(N, device=device),
    )
    torch.manual_seed(3)
    ours = module(x, bias)
    torch.manual_seed(3)
    assert torch.equal(ours, fusedops.bias_act(x, bias, activation, p=0.4))
    assert torch.equal(module.eval()(x, bias), fusedops.bias_act(x, bias, activation))


SIZES = (4, 17, 1, 32)


def _layers(sizes: tuple[int, ...] = SIZES, **options: Any) -> list[nn.LayerNorm]:
    layers = [nn.LayerNorm(size, **options) for size in sizes]
    for layer in layers:
        randomise(layer)
    return layers


@pytest.mark.parametrize(
    "options",
    [{}, {"eps": 0.25}, {"elementwise_affine": False}, {"bias": False}, {"dtype": torch.float64}],
    ids=str,
)
def test_module_of_slices_replaces_layers(options: dict[str, Any], device: torch.device) -> None:
    """It has the results of the layers for each form of input, and `to_layers` restores them."""
    layers = [layer.to(device) for layer in _layers(**options)]
    module = FusedBatchedLayerNormAct.from_layers(layers)
    slices = [torch.randn(5, size, device=device, dtype=options.get("dtype")) for size in SIZES]
    expected = [layer(x).tanh() for layer, x in zip(layers, slices, strict=True)]
    for ours, theirs in zip(module(slices), expected, strict=True):
        close(ours, theirs)
    close(module(torch.cat(slices, 1)), torch.cat(expected, 1))
    module.concat = True
    close(module(slices), torch.cat(expected, 1))
    for ours, theirs in zip(module.to_layers(), layers, strict=True):
        assert repr(ours) == repr(theirs)
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))


def test_slices_of_one_width(device: torch.device) -> None:
    layers = [layer.to(device) for layer in _layers((8,) * 3)]
    x = torch.randn(2, 5, 3, 8, device=device)
    expected = torch.stack(
        [layer(t).tanh() for layer, t in zip(layers, x.unbind(-2), strict=True)], -2
    )
    close(FusedBatchedLayerNormAct.from_layers(layers)(x), expected)
    joined = FusedBatchedLayerNormAct.from_layers(layers, activation="relu", concat=True)(x)
    separate = [layer(t).relu() for layer, t in zip(layers, x.unbind(-2), strict=True)]
    close(joined, rearrange(separate, "k b t d -> b t (k d)"))


def test_module_of_slices_has_the_mode_and_requires_grad_of_the_layers() -> None:
    layers = [layer.eval().requires_grad_(False) for layer in _layers()]
    module = FusedBatchedLayerNormAct.from_layers(layers)
    assert not module.training and not any(p.requires_grad for p in module.parameters())
    assert not any(p.requires_grad for layer in module.to_layers() for p in layer.parameters())
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(copied) == repr(module)
        assert all(map(torch.equal, copied.parameters(), module.parameters()))
    assert "4, 17, 1, 32" in repr(module) and "activation='tanh'" in repr(module)
    assert "<20 slices, 60 columns>" in repr(FusedBatchedLayerNormAct([3] * 20))
    fresh = FusedBatchedLayerNormAct(SIZES)
    assert fresh.weight.eq(1).all()
    assert fresh.bias.eq(0).all()
    assert list(fresh.state_dict()) == ["weight", "bias"]


class _Model(nn.Module):
    def __init__(self, norms: nn.Module) -> None:
        super().__init__()
        self.norms = norms
        self.linear = nn.Linear(2, 2)


@pytest.mark.parametrize(
    "options",
    [{}, {"elementwise_affine": False}, {"bias": False}, {"dtype": torch.float64}],
    ids=str,
)
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_checkpoint_of_separate_norms_loads_into_the_module(
    options: dict[str, Any], copied: Any
) -> None:
    """Both kinds of checkpoints load into the module and its copies, which can train then."""
    layers = _layers(**options)
    checkpoint = _Model(nn.ModuleList(layers)).state_dict()
    model = copied(_Model(FusedBatchedLayerNormTanh(SIZES, **options)))
    before = dict(checkpoint)
    assert str(model.load_state_dict(checkpoint)) == "<All keys matched successfully>"
    assert list(checkpoint.items()) == list(before.items())
    expected = FusedBatchedLayerNormAct.from_layers(layers).state_dict()
    again = _Model(FusedBatchedLayerNormAct(SIZES, **options))
    again.load_state_dict(model.state_dict())
    for norms in (model.norms, again.norms):
        assert norms.state_dict().keys() == expected.keys()
        assert all(map(torch.equal, norms.state_dict().values(), expected.values()))
        assert all(p.is_leaf and p.requires_grad for p in norms.parameters())
    separate = nn.ModuleList(model.norms.to_layers())
    assert separate.state_dict().keys() == nn.ModuleList(layers).state_dict().keys()
    model.norms.load_state_dict(separate.state_dict())
    assert all(map(torch.equal, model.norms.state_dict().values(), expected.values()))


def test_checkpoint_of_separate_norms_is_assigned_to_a_module_without_memory() -> None:
    layers = nn.ModuleList(_layers(dtype=torch.bfloat16))
    module = FusedBatchedLayerNormAct(SIZES, device="meta").requires_grad_(False)
    module.load_state_dict(layers.state_dict(), assign=True)
    assert torch.equal(module.weight, torch.cat([layer.weight for layer in layers]))
    assert torch.equal(module.bias, torch.cat([layer.bias for layer in layers]))
    assert module.weight.dtype == torch.bfloat16
    assert not module.weight.requires_grad


def test_slices_of_unused_outputs_get_no_gradient(device: torch.device) -> None:
    """A NaN in one of them does not propagate to other gradients."""
    slices = [torch.randn(5, size, device=device, requires_grad=True) for size in (3, 8, 4)]
    module = FusedBatchedLayerNormAct((3, 8, 4), device=device)
    with torch.no_grad():
        slices[1].fill_(float("nan"))
    module(slices)[0].square().sum().backward()
    assert slices[0].grad is not None
    assert slices[1].grad is None
    assert slices[2].grad is None
    for parameter in (module.weight, module.bias):
        assert parameter.grad.isfinite().all()
        assert parameter.grad[:3].any()
        assert not parameter.grad[3:].any()
