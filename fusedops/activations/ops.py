"""The activation family's functionals: each passes constants and tensors to `core.calls.call`."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from ..compiler.quantising import Format
from ..core.activations import ACTIVATIONS, ActivationName
from ..core.calls.call import run
from ..core.calls.checks import check_choice, check_p_off
from ..core.typevars import Returned
from .operator import ACTIVATION
from .quantised import quantised_unit
from .site import ActivationConstants, Kind

__all__ = [
    "APPROXIMATIONS",
    "Approximate",
    "bias_act",
    "bias_gelu",
    "gated_act",
    "geglu",
    "gelu",
    "swiglu",
]

# From F.gelu's ``approximate`` to names in `ACTIVATIONS`.
APPROXIMATIONS = {"none": "gelu", "tanh": "gelu_tanh"}
Approximate = Literal["none", "tanh"]


def gelu(input: Tensor, approximate: Approximate = "none") -> Tensor:
    """The Gaussian error linear unit; a drop-in for `torch.nn.functional.gelu`.

    Args:
        input: ``(*, N)``, fp16, bf16, fp32 or fp64; any strides.
        approximate: "none" for ``x Φ(x)``, "tanh" for the approximation with tanh.
    Returns:
        The input's shape and dtype.
    Raises:
        ValueError: approximate is unknown.
        TypeError: the input is not a floating-point tensor.
    Numerics: computed in fp32 (fp64 for fp64 inputs), rounded once.
    Saved for backward: the input.
    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    constants = _record("gelu", "bias", _approximation("gelu", approximate))
    return run(ACTIVATION, constants, (input, None))[0]  # type: ignore[no-any-return]


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: Approximate = "none") -> Tensor:
    """``gelu(x + bias)`` in one pass.

    Args:
        x: ``(*, N)``, fp16, bf16, fp32 or fp64; any strides.
        bias: ``(N,)``, or None; usually the bias of the linear layer before.
        approximate: as in `gelu`.
    Returns:
        x's shape, in the dtype to which PyTorch promotes the arguments.
    Raises:
        ValueError: the bias does not fit or approximate is unknown; the message names it.
        TypeError: an argument is not a floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: computed in fp32 (fp64 for fp64 inputs), rounded once. The bias gradient is summed in
        that dtype, always in the same order.
    Saved for backward: x and bias.
    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    constants = _record("bias_gelu", "bias", _approximation("bias_gelu", approximate))
    return run(ACTIVATION, constants, (x, bias))[0]  # type: ignore[no-any-return]


def bias_act(
    x: Tensor,
    bias: Tensor | None,
    activation: ActivationName = "gelu",
    *,
    p: float = 0.0,
    training: bool = True,
) -> Tensor:
    """``dropout(activation(x + bias))`` in one pass.

    These are the operations between the two linear layers of an MLP.

    Args:
        x: ``(*, N)``, fp16, bf16, fp32 or fp64; any strides.
        bias: ``(N,)``, or None; usually the bias of the linear layer before.
        activation: a name in `fusedops.core.activations.ACTIVATIONS`: "gelu", "gelu_tanh",
            "quick_gelu", "silu", "relu", "relu_squared", "tanh", "sigmoid", "identity".
        p: drop probability in [0, 1]; GPUs round it to a multiple of 2⁻¹⁶ and scale by the rounded
            keep probability.
        training: False turns dropout off.
    Returns:
        x's shape, in the dtype to which PyTorch promotes the arguments.
    Raises:
        ValueError: the bias does not fit, p is out of range or activation unknown; the message
            names it.
        TypeError: an argument is not a floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: as `bias_gelu`. The backward draws the same mask again from the seed.
    Saved for backward: x and bias.
    Source: Srivastava et al. 2014, "Dropout"; Salmon et al. 2011 for the mask's generator, Philox.
    """
    constants = _record("bias_act", "bias", activation)
    p_applied = p if training else check_p_off("bias_act", p)
    return run(ACTIVATION, constants, (x, bias), p_applied)[0]  # type: ignore[no-any-return]


def geglu(
    gate: Tensor,
    up: Tensor | None = None,
    approximate: Approximate = "none",
    *,
    quantize: Format[Returned, Any] | None = None,
) -> Returned:
    """``gelu(gate) * up`` in one pass.

    Args:
        gate: ``(*, N)``, fp16, bf16, fp32 or fp64; any strides.
        up: gate's shape; or None if ``gate`` is packed: ``(*, 2 N)``, the gate first and up second.
        approximate: as in `gelu`.
        quantize: a format of `fusedops.quant`: the result is quantised in the same pass.
    Returns:
        ``(*, N)``, in the dtype to which PyTorch promotes the arguments.
        With ``quantize``, a tuple: the values, and their scales: see `fusedops.quant`.
    Raises:
        ValueError: the shapes differ, a packed tensor's last dimension is odd, or approximate is
            unknown.
        TypeError: an argument is not a floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: computed in fp32 (fp64 for fp64 inputs), rounded once.
    Saved for backward: gate and up. If they are packed, so is their gradient.
    Source: Shazeer 2020, arXiv:2002.05202.
    """
    constants = _record(
        "geglu", "packed" if up is None else "glu", _approximation("geglu", approximate)
    )
    if quantize is not None:
        return quantised_unit(constants, gate, up, quantize)  # type: ignore[return-value]
    return run(ACTIVATION, constants, (gate, up))[0]  # type: ignore[no-any-return]


def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    quantize: Format[Returned, Any] | None = None,
) -> Returned:
    """``silu(gate) * up`` in one pass.

    Args:
        gate: ``(*, N)``, fp16, bf16, fp32 or fp64; any strides.
        up: gate's shape; or None if ``gate`` is packed: ``(*, 2 N)``, the gate first and up second.
        quantize: a format of `fusedops.quant`: the result is quantised in the same pass.
    Returns:
        ``(*, N)``, in the dtype to which PyTorch promotes the arguments.
        With ``quantize``, a tuple: the values, and their scales: see `fusedops.quant`.
    Raises:
        ValueError: the shapes differ, or a packed tensor's last dimension is odd.
        TypeError: an argument is not a floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: computed in fp32 (fp64 for fp64 inputs), rounded once.
    Saved for backward: gate and up. If they are packed, so is their gradient.
    Source: Shazeer 2020, arXiv:2002.05202.
    """
    constants = _record("swiglu", "packed" if up is None else "glu", "silu")
    if quantize is not None:
        return quantised_unit(constants, gate, up, quantize)  # type: ignore[return-value]
    return run(ACTIVATION, constants, (gate, up))[0]  # type: ignore[no-any-return]


def gated_act(
    gate: Tensor, up: Tensor | None = None, activation: ActivationName = "silu"
) -> Tensor:
    """``activation(gate) * up`` in one pass.

    It differs from `torch.nn.functional.glu`: the activation is an argument, and the first half of
    a packed tensor is the gate. If x has the halves a and b, ``F.glu(x)`` is ``gated_act(b, a,
    "sigmoid")``.

    ``gate`` and ``up`` may be views of one projection's output, in either order: they are read in
    place. If ``gate`` is the whole projection and ``up`` is None, the backward writes one gradient
    for it, without a copy.

    Args:
        gate: ``(*, N)``, fp16, bf16, fp32 or fp64; any strides.
        up: gate's shape; or None if ``gate`` is packed: ``(*, 2 N)``, the gate first and up second.
        activation: a name as in `bias_act`.
    Returns:
        ``(*, N)``, in the dtype to which PyTorch promotes the arguments.
    Raises:
        ValueError: the shapes differ, a packed tensor's last dimension is odd, or activation is
            unknown.
        TypeError: an argument is not a floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: computed in fp32 (fp64 for fp64 inputs), rounded once.
    Saved for backward: gate and up.
    Source: Dauphin et al. 2017, arXiv:1612.08083; Shazeer 2020, arXiv:2002.05202.
    """
    constants = _record("gated_act", "packed" if up is None else "glu", activation)
    return run(ACTIVATION, constants, (gate, up))[0]  # type: ignore[no-any-return]


_KINDS: dict[str, tuple[Kind, ...]] = {
    "gelu": ("bias",),
    "bias_gelu": ("bias",),
    "bias_act": ("bias",),
    "geglu": ("glu", "packed"),
    "swiglu": ("glu", "packed"),
    "gated_act": ("glu", "packed"),
}
# All possible constants of calls: none is a number, so there are few.
_RECORDS: dict[tuple[str, str, str], ActivationConstants] = {
    (op, kind, activation): ActivationConstants(op, kind, activation)
    for op, kinds in _KINDS.items()
    for kind in kinds
    for activation in ACTIVATIONS
}


def _record(op: str, kind: Kind, activation: Any) -> ActivationConstants:
    """Returns the constants of a call."""
    try:
        return _RECORDS[op, kind, activation]
    except (KeyError, TypeError):
        # The activation is unknown: the checks of the call will raise.
        return ActivationConstants(op, kind, activation)


def _approximation(op: str, approximate: Any) -> str:
    """Returns the name in `ACTIVATIONS` for `F.gelu`'s ``approximate``; raises if it is unknown."""
    name = APPROXIMATIONS.get(approximate) if isinstance(approximate, str) else None
    if name is None:
        check_choice(op, "approximate", approximate, tuple(APPROXIMATIONS))
        raise AssertionError("check_choice accepted an unknown approximation")
    return name
