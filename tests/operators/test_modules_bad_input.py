"""Modules refuse bad constants in their constructors, and layers and inputs that do not fit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fusedops
from fusedops.generation import FusedNoRepeatNGramLogitsProcessor
from fusedops.nn import (
    FusedAddLayerNorm,
    FusedAddRMSNorm,
    FusedBatchedLayerNormAct,
    FusedBiasAct,
    FusedBiasDropoutAdd,
    FusedBiasDropoutAddLayerNorm,
    FusedBiasDropoutAddRMSNorm,
    FusedBiasGELU,
    FusedGatedAct,
    FusedGEGLU,
    FusedGELU,
    FusedLayerNorm,
    FusedRMSNorm,
)

SIZES = (4, 17, 1, 32)


def test_bad_activations() -> None:
    for build in (FusedGatedAct, FusedBiasAct):
        with pytest.raises(
            ValueError, match=f"{build.__name__}: activation must be one of 'gelu', .*, got 'mish'"
        ):
            build("mish")
    with pytest.raises(ValueError, match=r"FusedBiasAct: p must be in \[0, 1\], got 1.5"):
        FusedBiasAct("relu", 1.5)
    with pytest.raises(ValueError, match="approximate must be one of 'none', 'tanh', got 'fast'"):
        FusedGEGLU("fast")


def test_dropout_has_no_default() -> None:
    """A default probability would add dropout to models that have none."""
    for build in (
        FusedBiasDropoutAdd,
        lambda: FusedBiasDropoutAddLayerNorm(4),
        lambda: FusedBiasDropoutAddRMSNorm(4),
    ):
        with pytest.raises(TypeError, match=r"missing 1 required .*argument: 'p'"):
            build()


@pytest.mark.parametrize("fused", [FusedBiasDropoutAddLayerNorm, FusedBiasDropoutAddRMSNorm])
def test_bad_arguments(fused: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"normalized_shape must have one dimension, got \(2, 3\)"):
        fused((2, 3), p=0.1)
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"p must be in \[0, 1\]"):
            fused(4, p=p)


NORMS: dict[type[nn.Module], dict[str, Any]] = {
    FusedBiasDropoutAddLayerNorm: {"p": 0.0},
    FusedBiasDropoutAddRMSNorm: {"p": 0.0},
    FusedAddLayerNorm: {},
    FusedAddRMSNorm: {},
}


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("fused", NORMS, ids=lambda fused: fused.__name__)
def test_input_of_another_width(fused: type[nn.Module], affine: bool) -> None:
    """The module has a fixed width, so the error names the input, and not the weight."""
    module = fused(8, elementwise_affine=affine, **NORMS[fused])
    x, residual = torch.randn(2, 4, 7)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=rf"^{fused.__name__}: x has shape \(4, 7\), expected \(\*, 8\)$"
        ):
            module(x, residual=residual)
        module(*torch.randn(1, 4, 8), residual=torch.randn(4, 8))
    with pytest.raises(ValueError, match=r"residual has shape \(4, 7\), expected \(4, 8\)"):
        module(torch.randn(4, 8), residual=residual)


X = torch.randn(2, 4)
# Pairs of a constructor and a call with the same wrong constant.
REFUSED: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (lambda: FusedLayerNorm(4, eps=-1.0), lambda: fusedops.layer_norm(X, 4, eps=-1.0)),
    (lambda: FusedLayerNorm(4, eps="1"), lambda: fusedops.layer_norm(X, 4, eps="1")),
    (lambda: FusedLayerNorm(4, eps=None), lambda: fusedops.layer_norm(X, 4, eps=None)),
    (lambda: FusedLayerNorm(()), lambda: fusedops.layer_norm(X, ())),
    *[
        (lambda s=s: FusedLayerNorm(s), lambda s=s: fusedops.layer_norm(X, s))
        for s in (4.0, "4", b"\x04", "", True)
    ],
    (lambda: FusedRMSNorm(4, eps=-1.0), lambda: fusedops.rms_norm(X, 4, eps=-1.0)),
    (lambda: FusedRMSNorm(()), lambda: fusedops.rms_norm(X, ())),
    (
        lambda: FusedRMSNorm(4, weight_offset=float("inf")),
        lambda: fusedops.rms_norm(X, 4, weight_offset=float("inf")),
    ),
    (
        lambda: FusedRMSNorm(4, weight_offset="1"),
        lambda: fusedops.rms_norm(X, 4, weight_offset="1"),
    ),
    (lambda: FusedRMSNorm(4, rounding="gpt"), lambda: fusedops.rms_norm(X, 4, rounding="gpt")),
    *[
        (
            lambda p=p: FusedBiasDropoutAdd(p),
            lambda p=p: fusedops.bias_dropout_add(X, None, None, p=p),
        )
        for p in (-0.1, 1.1, float("nan"), "0.1")
    ],
    *[
        (
            lambda o=o: FusedBiasDropoutAddLayerNorm(4, **{"p": 0.1} | o),
            lambda o=o: fusedops.bias_dropout_add_ln(X, None, None, None, None, **{"p": 0.1} | o),
        )
        for o in ({"p": 2.0}, {"eps": -1.0}, {"eps": None}, {"save": "all"})
    ],
    *[
        (
            lambda o=o: FusedBiasDropoutAddRMSNorm(4, **{"p": 0.1} | o),
            lambda o=o: fusedops.bias_dropout_add_rms_norm(X, None, None, None, **{"p": 0.1} | o),
        )
        for o in (
            {"p": "x"},
            {"eps": -1.0},
            {"save": None},
            {"rounding": "gpt"},
            {"weight_offset": float("nan")},
        )
    ],
    (lambda: FusedGELU("fast"), lambda: fusedops.gelu(X, "fast")),
    (lambda: FusedBiasGELU(None), lambda: fusedops.bias_gelu(X, None, None)),
    (lambda: FusedGEGLU("fast"), lambda: fusedops.geglu(X, X, "fast")),
    (lambda: FusedGatedAct("mish"), lambda: fusedops.gated_act(X, X, "mish")),
    (lambda: FusedBiasAct("mish"), lambda: fusedops.bias_act(X, None, "mish")),
    (lambda: FusedBiasAct("relu", -1.0), lambda: fusedops.bias_act(X, None, "relu", p=-1.0)),
    *[
        (
            lambda o=o: FusedBatchedLayerNormAct(**{"sizes": (1, 3)} | o),
            lambda o=o: fusedops.batched_layer_norm_act(X, **{"sizes": (1, 3)} | o),
        )
        for o in (
            {"sizes": (4, 0)},
            {"sizes": ()},
            {"sizes": 4},
            {"sizes": (4, 0.5)},
            {"sizes": "13"},
            {"sizes": (True, 3)},
            {"eps": -1.0},
            {"activation": "mish"},
        )
    ],
    *[
        (
            lambda o=o: FusedNoRepeatNGramLogitsProcessor(**{"ngram_size": 3} | o),
            lambda o=o: fusedops.no_repeat_ngram(X.long(), X, **{"ngram_size": 3} | o),
        )
        for o in (
            {"ngram_size": 0},
            {"ngram_size": 2.0},
            {"ngram_size": True},
            {"window": 2},
            {"window": "8"},
            {"prompt_length": -1},
            {"pad_token_id": 0.5},
        )
    ],
]


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_constants_are_refused_as_the_call_refuses_them(index: int) -> None:
    """Both errors have the same type and text, after the module's or the functional's name."""
    build, call = REFUSED[index]
    with pytest.raises((TypeError, ValueError)) as expected:
        call()
    with pytest.raises(type(expected.value)) as caught:
        build()
    name, _, words = str(caught.value).partition(": ")
    assert name.startswith("Fused") and words == str(expected.value).partition(": ")[2]


@pytest.mark.parametrize("norm", [FusedLayerNorm, FusedRMSNorm, FusedBiasDropoutAddLayerNorm])
def test_sizes_that_no_tensor_has(norm: type[nn.Module]) -> None:
    """A constructor has no tensor to compare the sizes with, so it checks the sizes alone."""
    name = norm.__name__
    norm = functools.partial(norm, p=0.1) if norm is FusedBiasDropoutAddLayerNorm else norm
    with pytest.raises(
        ValueError, match=rf"{name}: normalized_shape must hold no negative size, got \(-1,\)"
    ):
        norm(-1)
    with pytest.raises(
        TypeError, match=r"normalized_shape must be an int or a sequence of ints, got one of float"
    ):
        norm([4.0])
    assert norm([np.int64(4)]).weight.shape == norm(torch.tensor([4])).weight.shape == (4,)


def test_bad_layers() -> None:
    build = FusedBatchedLayerNormAct.from_layers
    for layers, error, match in (
        ([], ValueError, "must hold at least one"),
        (3, TypeError, "layers must be torch.nn.LayerNorm modules, got int"),
        (
            [nn.LayerNorm(3), nn.RMSNorm(3)],
            TypeError,
            "layer 1 must be a torch.nn.LayerNorm, got RMSNorm",
        ),
        ([nn.LayerNorm((2, 3))], ValueError, r"layer 0 normalises \(2, 3\)"),
        ([nn.LayerNorm(3), nn.LayerNorm(4, eps=0.1)], ValueError, "layer 1 has eps=0.1"),
        ([nn.LayerNorm(3), nn.LayerNorm(4, bias=False)], ValueError, "layer 1 has .*no bias"),
    ):
        with pytest.raises(error, match=match):
            build(layers)
    with pytest.raises(ValueError, match="activation must be one of"):
        FusedBatchedLayerNormAct(SIZES, activation="tan")
    with pytest.raises(ValueError, match=r"sizes\[1\] must be at least 1, got 0"):
        FusedBatchedLayerNormAct((2, 0))
    with pytest.raises(
        ValueError,
        match=r"slices has shape \(2, 9\), expected \(\*, 54\) for the sizes of 4 slices",
    ):
        FusedBatchedLayerNormAct(SIZES)(torch.randn(2, 9))


class _Doubled(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_layers_that_do_more_than_a_norm() -> None:
    """Layers with another forward or with hooks are refused.

    A subclass that only computes faster is accepted.
    """
    with pytest.raises(TypeError, match=r"layer 0 must be a torch\.nn\.LayerNorm, got _Doubled"):
        FusedBatchedLayerNormAct.from_layers([_Doubled(4)])
    hooked = nn.LayerNorm(4)
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(TypeError, match="layer 1 has hooks"):
        FusedBatchedLayerNormAct.from_layers([nn.LayerNorm(4), hooked])
    with pytest.raises(
        TypeError, match=r"layer 1 must be a torch\.nn\.LayerNorm, got FusedBiasDropoutAddLayerNorm"
    ):
        FusedBatchedLayerNormAct.from_layers(
            [nn.LayerNorm(4), FusedBiasDropoutAddLayerNorm(4, p=0.5)]
        )
    assert FusedBatchedLayerNormAct.from_layers([FusedLayerNorm(4), nn.LayerNorm(3)]).sizes == (
        4,
        3,
    )


def test_slices_module_refuses() -> None:
    with pytest.raises(ValueError, match="eps must be at least 0, got -1"):
        FusedBatchedLayerNormAct([4, 4], eps=-1.0)
    with pytest.raises(ValueError, match=r"slices has shape \(\), expected \(\*, 8\)"):
        FusedBatchedLayerNormAct([4, 4])(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"slice 0 must be a torch\.Tensor, got str"):
        FusedBatchedLayerNormAct([4, 4])("abc")


def _model(norms: nn.Module) -> nn.Module:
    """Returns a model with the norms, which are not those of a new one."""
    for parameter in norms.parameters():
        nn.init.normal_(parameter)
    return nn.ModuleDict({"norms": norms})


def _separate() -> nn.Module:
    return _model(nn.ModuleList(nn.LayerNorm(size) for size in SIZES))


def _outcome(model: nn.Module, checkpoint: dict[str, Any], strict: bool) -> str:
    """Loads the checkpoint, and returns the error or the keys that do not match."""
    try:
        return str(model.load_state_dict(checkpoint, strict=strict))
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {"norms.1.weight": None},
        {"norms.0.bias": None, "norms.3.bias": None},
        {"norms.2.weight": torch.randn(2)},
        {"norms.1.bias": torch.randn(1, 17)},
        {"norms.0.bias": torch.randn(())},
        {"norms.3.weight": "none"},
        {"norms.3.weight": np.ones(32, dtype=np.float32)},
        {"norms.4.weight": torch.randn(3)},
        {"norms.0.weight": torch.randn(17), "norms.1.weight": torch.randn(4), "norms.2.bias": None},
    ],
    ids=" ".join,
)
def test_bad_checkpoint_of_separate_norms_has_the_errors_of_the_norms(
    changes: dict[str, Any], strict: bool
) -> None:
    """The slices that fit are loaded, as in the separate norms, and the others stay as they are."""
    checkpoint = _separate().state_dict()
    for key, value in changes.items():
        if value is None:
            del checkpoint[key]
        else:
            checkpoint[key] = value
    separate = _separate()
    joined = nn.ModuleDict({"norms": FusedBatchedLayerNormAct.from_layers(separate["norms"])})
    expected_outcome = _outcome(separate, checkpoint, strict)
    assert any(key in expected_outcome for key in changes)
    assert _outcome(joined, checkpoint, strict) == expected_outcome
    for name, parameter in joined["norms"].named_parameters():
        expected = [getattr(layer, name) for layer in separate["norms"]]
        assert torch.equal(parameter, torch.cat(expected))


def test_checkpoint_of_other_modules() -> None:
    """A bias that the module lacks, and norms that a module without memory cannot complete."""
    checkpoint = _separate().state_dict()
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"norms\.0\.bias"'):
        _model(FusedBatchedLayerNormAct(SIZES, bias=False)).load_state_dict(checkpoint)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"norms\.0\.weight"'):
        _model(FusedBatchedLayerNormAct(SIZES)).load_state_dict(
            {**checkpoint, "norms.weight": torch.ones(54), "norms.bias": torch.ones(54)}
        )
    del checkpoint["norms.1.weight"]
    model = _model(FusedBatchedLayerNormAct(SIZES, device="meta"))
    with pytest.raises(RuntimeError, match=r'Missing key.*"norms\.1\.weight"'):
        model.load_state_dict(checkpoint, assign=True)
    assert model["norms"].weight.is_meta
    assert not model["norms"].bias.is_meta
