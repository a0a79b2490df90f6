"""A user's program, to check the types of the public API by ``mypy --strict`` and pyright.

`make lint` type-checks it, and test_typing.py runs it. Each ``assert_type`` has the type that a
checker must infer. Wrong calls have a ``type: ignore``, which is an error if a checker accepts the
call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import assert_type

import fusedops
from fusedops.nn import (
    FusedAddLayerNorm,
    FusedAddRMSNorm,
    FusedBatchedLayerNormAct,
    FusedBatchedLayerNormTanh,
    FusedBiasAct,
    FusedBiasDropoutAdd,
    FusedBiasDropoutAddLayerNorm,
    FusedBiasDropoutAddRMSNorm,
    FusedGatedAct,
    FusedGELU,
    FusedLayerNorm,
    FusedRMSNorm,
    FusedSwiGLU,
)

X, W = torch.randn(4, 8), torch.ones(8)
BF16 = torch.bfloat16


def norms() -> None:
    assert_type(fusedops.layer_norm(X, 8, W), Tensor)
    assert_type(fusedops.rms_norm(X, (8,), W, rounding="llama"), Tensor)
    assert_type(fusedops.bias_dropout_add(X, W, X, p=0.1), Tensor)
    assert_type(fusedops.add_layer_norm(X, X, W, W), tuple[Tensor, Tensor])
    assert_type(fusedops.add_rms_norm(X, X, W, 1e-6), tuple[Tensor, Tensor])
    quantize = fusedops.quant.PerRow()
    assert_type(fusedops.rms_norm(X, 8, W, quantize=quantize), tuple[Tensor, Tensor])
    assert_type(fusedops.add_rms_norm(X, X, W, quantize=quantize), tuple[Tensor, Tensor, Tensor])
    assert_type(fusedops.swiglu(X, X, quantize=quantize), tuple[Tensor, Tensor])
    assert_type(fusedops.add_rms_norm(X, X, None, out=X.clone()), tuple[Tensor, Tensor])


def norms_of_sums() -> None:
    assert_type(fusedops.bias_dropout_add_ln(X, W, X, W, W, p=0.1), Tensor)
    assert_type(
        fusedops.bias_dropout_add_ln(X, W, X, W, W, p=0.1, return_sum=True), tuple[Tensor, Tensor]
    )
    assert_type(
        fusedops.bias_dropout_add_ln(X, W, X, W, W, p=0.1, cast_dtype=BF16), tuple[Tensor, Tensor]
    )
    assert_type(
        fusedops.bias_dropout_add_ln(
            X, W, X, W, W, p=0.1, save="output", return_sum=True, cast_dtype=BF16
        ),
        tuple[Tensor, Tensor, Tensor],
    )
    assert_type(fusedops.bias_dropout_add_rms_norm(X, W, X, W, p=0.1), Tensor)
    assert_type(
        fusedops.bias_dropout_add_rms_norm(X, W, X, W, p=0.1, return_sum=True),
        tuple[Tensor, Tensor],
    )
    assert_type(
        fusedops.bias_dropout_add_rms_norm(X, W, X, W, p=0.1, cast_dtype=BF16),
        tuple[Tensor, Tensor],
    )
    assert_type(
        fusedops.bias_dropout_add_rms_norm(
            X, W, X, W, p=0.1, rounding="t5", return_sum=True, cast_dtype=BF16
        ),
        tuple[Tensor, Tensor, Tensor],
    )


def activations() -> None:
    assert_type(fusedops.gelu(X, "tanh"), Tensor)
    assert_type(fusedops.bias_act(X, W, "relu_squared", p=0.1), Tensor)
    assert_type(fusedops.gated_act(X, None, "quick_gelu"), Tensor)
    assert_type(FusedGELU("tanh")(X), Tensor)
    assert_type(FusedBiasAct("relu")(X, W), Tensor)
    assert_type(FusedGatedAct("silu")(X, X), Tensor)


def slices() -> None:
    assert_type(fusedops.batched_layer_norm_tanh(X, sizes=(3, 5)), Tensor)
    assert_type(
        fusedops.batched_layer_norm_act(X, sizes=(3, 5), activation="none", concat=True), Tensor
    )
    assert_type(fusedops.batched_layer_norm_act([X, X]), tuple[Tensor, ...])
    assert_type(fusedops.batched_layer_norm_tanh([X, X], concat=True), Tensor)


def modules() -> None:
    quantize = fusedops.quant.PerBlock(8)
    assert_type(FusedLayerNorm(8, quantize=quantize)(X), tuple[Tensor, Tensor])
    assert_type(FusedRMSNorm(8, quantize=quantize)(X), tuple[Tensor, Tensor])
    assert_type(FusedAddRMSNorm(8, quantize=quantize)(X, X), tuple[Tensor, Tensor, Tensor])
    assert_type(FusedSwiGLU(quantize=quantize)(X, X), tuple[Tensor, Tensor])
    assert_type(FusedLayerNorm(8)(X), Tensor)
    assert_type(FusedRMSNorm(8)(X), Tensor)
    assert_type(FusedBiasDropoutAdd(0.1)(X, None, X), Tensor)
    assert_type(FusedAddLayerNorm(8)(X, X), tuple[Tensor, Tensor])
    assert_type(FusedAddRMSNorm(8).forward(X, X), tuple[Tensor, Tensor])
    assert_type(FusedBiasDropoutAddLayerNorm(8, p=0.1)(X, W, X), Tensor)
    assert_type(
        FusedBiasDropoutAddLayerNorm(8, p=0.1, return_sum=True)(X, W, X), tuple[Tensor, Tensor]
    )
    assert_type(FusedBiasDropoutAddRMSNorm(8, p=0.1, return_sum=False).forward(X), Tensor)
    assert_type(
        FusedBiasDropoutAddRMSNorm(8, p=0.1, return_sum=True).forward(X), tuple[Tensor, Tensor]
    )
    # Without type parameters, these are the defaults.
    norm: FusedBiasDropoutAddLayerNorm = FusedBiasDropoutAddLayerNorm(8, p=0.1)
    assert_type(norm(X), Tensor)


def modules_of_slices() -> None:
    layers = [torch.nn.LayerNorm(3), torch.nn.LayerNorm(5)]
    pieces = [X[:, :3], X[:, 3:]]
    assert_type(FusedBatchedLayerNormAct((3, 5), activation="relu")(pieces), tuple[Tensor, ...])
    assert_type(FusedBatchedLayerNormAct((3, 5))(X), Tensor)
    assert_type(FusedBatchedLayerNormTanh((3, 5), concat=True)(pieces), Tensor)
    assert_type(FusedBatchedLayerNormAct.from_layers(layers)(pieces), tuple[Tensor, ...])
    assert_type(FusedBatchedLayerNormTanh.from_layers(layers, concat=True)(pieces), Tensor)


@fusedops.rowwise
def scaled(x: Tensor, weight: Tensor, *, factor: float = 2.0) -> tuple[Tensor, Tensor]:
    return x * weight * factor, x + weight


@fusedops.rowwise(strict=True)
def doubled(x: Tensor) -> Tensor:
    return x + x


class Scale:
    @fusedops.rowwise
    def apply(self, x: Tensor) -> Tensor:
        return x * 2.0


def own_functions() -> None:
    assert_type(scaled(X, W, factor=3.0), tuple[Tensor, Tensor])
    assert_type(doubled(X), Tensor)
    assert_type(Scale().apply(X), Tensor)
    same_signature: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = scaled
    assert_type(same_signature(X, W), tuple[Tensor, Tensor])


def wrong() -> None:
    """Never called. A type checker must find an error in every line."""
    FusedBiasDropoutAddLayerNorm(8)  # type: ignore[call-overload]
    FusedBiasDropoutAdd()  # type: ignore[call-arg]
    fusedops.bias_dropout_add_ln(X, W, X, W, W)  # type: ignore[call-overload]
    fusedops.bias_act(X, W, "swish")  # type: ignore[arg-type]
    fusedops.gelu(X, "exact")  # type: ignore[arg-type]
    fusedops.rms_norm(X, 8, W, rounding="gemma")  # type: ignore[arg-type]
    fusedops.bias_dropout_add_ln(X, W, X, W, W, p=0.1, save="mask")  # type: ignore[call-overload]
    fusedops.batched_layer_norm_act([X], activation="tan")  # type: ignore[call-overload]
    scaled(X)  # type: ignore[call-arg]
    scaled(X, W, factor="3")  # type: ignore[arg-type]


CHECKS = (norms, norms_of_sums, activations, slices, modules, modules_of_slices, own_functions)
