"""Old names give a warning, once a call and at the caller's line, and the same results as the new ones."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedops
from fusedops import nn as fnn

Make = Callable[[], Any]

X, Y, WEIGHT = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)), torch.ones(4, 8), torch.full((8,), 0.5)
LAYERS = [nn.LayerNorm(3), nn.LayerNorm(5)]

# The old name, the new one, and a word of the warning.
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "glu": (lambda x, y, w: fusedops.glu(x, y, "relu"), lambda x, y, w: fusedops.gated_act(x, y, "relu"), "gated_act"),
    "gemma": (lambda x, y, w: fusedops.rms_norm(x, 8, w, 1e-6, rounding="gemma"),
              lambda x, y, w: fusedops.rms_norm(x, 8, w, 1e-6), "once"),
    "gemma, after a sum": (
        lambda x, y, w: fusedops.bias_dropout_add_rms_norm(x, None, y, w, p=0.0, weight_offset=1.0, rounding="gemma"),
        lambda x, y, w: fusedops.bias_dropout_add_rms_norm(x, None, y, w, p=0.0, weight_offset=1.0), "once"),
    "tanh": (lambda x, y, w: fusedops.batched_layer_norm_tanh(x, sizes=(3, 5), activation="silu"),
             lambda x, y, w: fusedops.batched_layer_norm_act(x, sizes=(3, 5), activation="silu"), "_act"),
}  # fmt: skip
MODULES: dict[str, tuple[Make, Make, str]] = {
    "FusedGLU": (lambda: fnn.FusedGLU("relu"), lambda: fnn.FusedGatedAct("relu"), "FusedGatedAct"),
    "gemma": (lambda: fnn.FusedRMSNorm(8, 1e-6, rounding="gemma"), lambda: fnn.FusedRMSNorm(8, 1e-6), "once"),
    "gemma, after a sum": (lambda: fnn.FusedBiasDropoutAddRMSNorm(8, p=0.0, rounding="gemma"),
                           lambda: fnn.FusedBiasDropoutAddRMSNorm(8, p=0.0), "once"),
    "tanh": (lambda: fnn.FusedBatchedLayerNormTanh((3, 5), activation="silu"),
             lambda: fnn.FusedBatchedLayerNormAct((3, 5), activation="silu"), "FusedBatchedLayerNormAct"),
    "tanh from layers": (lambda: fnn.FusedBatchedLayerNormTanh.from_layers(LAYERS, activation="silu"),
                         lambda: fnn.FusedBatchedLayerNormAct.from_layers(LAYERS, activation="silu"),
                         "FusedBatchedLayerNormAct"),
}  # fmt: skip


def _warned(call: Callable[[], Any], word: str) -> Any:
    with pytest.warns(DeprecationWarning, match=word) as caught:
        result = call()
    (warning,) = caught
    assert warning.filename == __file__, "a warning that the default filter does not show to the caller"
    return result


@pytest.mark.parametrize("name", FUNCTIONS)
def test_old_functionals(name: str, device: torch.device) -> None:
    old, new, word = FUNCTIONS[name]
    tensors = [t.to(device) for t in (X[0], Y, WEIGHT)]
    result = _warned(lambda: old(*tensors), word)
    assert torch.equal(result, new(*tensors)) and result.any()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            old(*tensors)
    assert len(caught) == 1


@pytest.mark.parametrize("name", MODULES)
def test_old_modules(name: str, device: torch.device) -> None:
    """The constructor warns; a call and a copy do not."""
    old, new, word = MODULES[name]
    ours, theirs = _warned(old, word).to(device), new().to(device)
    assert isinstance(ours, type(theirs))
    inputs = (X[0].to(device),) if "anh" in name else (X[0].to(device), *([Y.to(device)] if name == "FusedGLU" else []))
    expected = theirs(*inputs)
    assert expected.any()
    for module in (ours, pickle.loads(pickle.dumps(ours))):
        assert torch.equal(module(*inputs), expected)
    assert ours.extra_repr() == theirs.extra_repr()


def test_tanh_keeps_its_name(device: torch.device) -> None:
    """It warns only of an activation, and is not deprecated."""
    x = X[0].to(device)
    expected = fusedops.batched_layer_norm_act(x, sizes=(3, 5), activation="tanh")
    assert torch.equal(fusedops.batched_layer_norm_tanh(x, sizes=(3, 5)), expected)
    for module in (fnn.FusedBatchedLayerNormTanh((3, 5)), fnn.FusedBatchedLayerNormTanh.from_layers(LAYERS)):
        assert type(module) is fnn.FusedBatchedLayerNormTanh
        assert torch.equal(module.to(device)(x), expected)
    with pytest.raises(ValueError, match="batched_layer_norm_tanh: eps must be at least 0"):
        fusedops.batched_layer_norm_tanh(x, eps=-1.0, sizes=(3, 5))


def test_old_names_compile_in_one_graph(device: torch.device) -> None:
    def step(gate: Tensor, up: Tensor) -> Tensor:
        return fusedops.glu(gate, up, "relu") + 1.0

    gate, up = X[0].to(device), Y.to(device)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert torch.equal(compiled(gate, up), fusedops.gated_act(gate, up, "relu") + 1.0)
