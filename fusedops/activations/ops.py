"""The activation family's functionals: checks, then the kernels under autograd, or the formula where none can run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import autograd, checks, launch, rng
from ..core.activations import ACTIVATIONS
from ..core.admission import UNSEEN, keep
from . import launching, reference
from .function import ActivationFunction, Call, anchor, packing
from .launching import Kind, Site
from .operators import operator_call

__all__ = ["APPROXIMATIONS", "bias_act", "bias_gelu", "geglu", "gelu", "glu", "swiglu"]

# F.gelu's argument, and the table's names.
APPROXIMATIONS = {"none": "gelu", "tanh": "gelu_tanh"}


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """The Gaussian error linear unit; a drop-in for `torch.nn.functional.gelu`.

    Args:
        input: ``(*, N)``, fp16, bf16, fp32 or fp64; any strides.
        approximate: "none" for ``x Φ(x)``, "tanh" for the approximation by a hyperbolic tangent.
    Returns:
        The input's shape and dtype.
    Raises:
        ValueError: approximate is unknown.
        TypeError: the input is no floating-point tensor.
    Numerics: computed in fp32 (fp64 for fp64), rounded once.
    Kept for backward: the input.
    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    return _call("gelu", "bias", _approximation("gelu", approximate), input, None)


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str = "none") -> Tensor:
    """``gelu(x + bias)`` in one pass.

    Args:
        x: ``(*, N)``, fp16, bf16, fp32 or fp64; any strides.
        bias: ``(N,)``, or None; as a rule the bias of the linear layer that made x.
        approximate: as in `gelu`.
    Returns:
        x's shape, in PyTorch's promotion of the arguments.
    Raises:
        ValueError: the bias does not fit or approximate is unknown; the message names it.
        TypeError: an argument is no floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: computed in fp32 (fp64 for fp64), rounded once. The bias gradient is summed in that dtype, always in the
        same order.
    Kept for backward: x and bias.
    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    return _call("bias_gelu", "bias", _approximation("bias_gelu", approximate), x, bias)


def bias_act(x: Tensor, bias: Tensor | None, activation: str = "gelu", *, p: float = 0.0,
             training: bool = True) -> Tensor:  # fmt: skip
    """``dropout(activation(x + bias))`` in one pass: what stands between the two linear layers of an MLP.

    Args:
        x: ``(*, N)``, fp16, bf16, fp32 or fp64; any strides.
        bias: ``(N,)``, or None; as a rule the bias of the linear layer that made x.
        activation: a name in `fusedops.core.activations.ACTIVATIONS`: "gelu", "gelu_tanh", "quick_gelu", "silu",
            "relu", "relu_squared", "tanh", "sigmoid", "identity".
        p: drop probability in [0, 1]; on GPUs to the nearest 2⁻¹⁶, and the scale is one over what is really kept.
        training: False turns dropout off.
    Returns:
        x's shape, in PyTorch's promotion of the arguments.
    Raises:
        ValueError: the bias does not fit, p is out of range or activation unknown; the message names it.
        TypeError: an argument is no floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: as `bias_gelu`. The backward draws the same mask again from the seed.
    Kept for backward: x and bias.
    Source: Srivastava et al. 2014, "Dropout"; Salmon et al. 2011 for the mask's generator, Philox.
    """
    if not training and isinstance(p, (int, float)) and 0.0 <= p <= 1.0:
        p = 0.0  # a p out of range is an error in evaluation too
    return _call("bias_act", "bias", activation, x, bias, p)


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    """``gelu(gate) * up`` in one pass.

    Args:
        gate: ``(*, N)``, fp16, bf16, fp32 or fp64; any strides.
        up: gate's shape; or None, and ``gate`` is ``(*, 2 N)`` with the gate first and up second.
        approximate: as in `gelu`.
    Returns:
        ``(*, N)``, in PyTorch's promotion of the arguments.
    Raises:
        ValueError: the shapes differ, a packed tensor's last dimension is odd, or approximate is unknown.
        TypeError: an argument is no floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: computed in fp32 (fp64 for fp64), rounded once.
    Kept for backward: gate and up. Where they are the halves of one tensor, so are their gradients (see `glu`).
    Source: Shazeer 2020, arXiv:2002.05202.
    """
    kind: Kind = "packed" if up is None else "glu"
    return _call("geglu", kind, _approximation("geglu", approximate), gate, up)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """``silu(gate) * up`` in one pass.

    Args:
        gate: ``(*, N)``, fp16, bf16, fp32 or fp64; any strides.
        up: gate's shape; or None, and ``gate`` is ``(*, 2 N)`` with the gate first and up second.
    Returns:
        ``(*, N)``, in PyTorch's promotion of the arguments.
    Raises:
        ValueError: the shapes differ, or a packed tensor's last dimension is odd.
        TypeError: an argument is no floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: computed in fp32 (fp64 for fp64), rounded once.
    Kept for backward: gate and up. Where they are the halves of one tensor, so are their gradients (see `glu`).
    Source: Shazeer 2020, arXiv:2002.05202.
    """
    return _call("swiglu", "packed" if up is None else "glu", "silu", gate, up)


def glu(gate: Tensor, up: Tensor | None = None, activation: str = "silu") -> Tensor:
    """``activation(gate) * up`` in one pass.

    ``gate`` and ``up`` may be views of one projection's output, in either order: they are read in place. If they were
    cut from it directly (``chunk``, ``split``, slices), ``backward()`` writes one gradient for it, with no copy. With
    the projection alone as ``gate`` and up None that holds under every way to differentiate.

    Args:
        gate: ``(*, N)``, fp16, bf16, fp32 or fp64; any strides.
        up: gate's shape; or None, and ``gate`` is ``(*, 2 N)`` with the gate first and up second.
        activation: a name as in `bias_act`.
    Returns:
        ``(*, N)``, in PyTorch's promotion of the arguments.
    Raises:
        ValueError: the shapes differ, a packed tensor's last dimension is odd, or activation is unknown.
        TypeError: an argument is no floating-point tensor.
        RuntimeError: an argument is on another device.
    Numerics: computed in fp32 (fp64 for fp64), rounded once.
    Kept for backward: gate and up.
    Source: Dauphin et al. 2017, arXiv:1612.08083; Shazeer 2020, arXiv:2002.05202.
    """
    return _call("glu", "packed" if up is None else "glu", activation, gate, up)


# --- checks -------------------------------------------------------------------------------------------------------


def _approximation(op: str, approximate: Any) -> str:
    name = APPROXIMATIONS.get(approximate) if isinstance(approximate, str) else None
    if name is None:
        checks.check_choice(op, "approximate", approximate, tuple(APPROXIMATIONS))
        raise AssertionError("a choice that is none")
    return name


def _check(op: str, kind: Kind, activation: str, x: Tensor, other: Tensor | None, p: float) -> None:
    """All that can be wrong."""
    first, second = ("gate", "up") if kind != "bias" else ("input" if op == "gelu" else "x", "bias")
    checks.check_tensor(op, first, x)
    if x.dim() == 0:
        raise ValueError(f"{op}: {first} must have at least one dimension, got a scalar")
    if kind == "packed" and x.shape[-1] % 2:
        raise ValueError(f"{op}: gate has shape {tuple(x.shape)}, expected an even last dimension as up is None")
    if other is not None:
        checks.check_tensor(op, second, other, x)
        checks.check_shape(op, second, other, tuple(x.shape[-1:] if kind == "bias" else x.shape))
    checks.check_choice(op, "activation", activation, ACTIVATIONS)
    checks.check_p(op, p)


# --- dispatch -----------------------------------------------------------------------------------------------------

# The calls seen to be right, by all that checks and choice of kernel depend on; None for those the formula serves.
_admitted: dict[Any, Site | None] = {}
# An activation alone over at most so many elements is PyTorch's own on a GPU: both take a few microseconds there, and
# a native autograd node costs tens of microseconds less on the host than a Python one.
native_elements = 65536


def _call(op: str, kind: Kind, activation: str, x: Tensor, other: Tensor | None, p: float = 0.0) -> Tensor:
    """Any member of the family.

    A call whose key was admitted before is not checked again: the key holds every shape, dtype, type and device that
    the checks look at.
    """
    if torch.compiler.is_compiling():
        return _observed(op, kind, activation, x, other, p)
    try:
        key = (
            op, kind, activation, type(x), x.dtype, x.device, x.is_neg(), x.shape[-1],
            None if other is None else (type(other), other.dtype, other.device, other.is_neg(),
                                        other.shape if kind == "bias" else other.shape == x.shape),
        )  # fmt: skip
        site = _admitted.get(key, UNSEEN)
    except (AttributeError, IndexError, TypeError, RuntimeError):
        key, site = None, UNSEEN  # something is wrong, and the checks say what; or a subclass that hides its device
    if site is UNSEEN or torch._C._len_torch_dispatch_stack() > 0:
        _check(op, kind, activation, x, other, p)
        if not autograd.plain(x, other):
            return _observed(op, kind, activation, x, other, p)
        site = _admit(key, kind, activation, x, other)
    if p != 0.0 and not (type(p) is float and 0.0 <= p <= 1.0):
        checks.check_p(op, p)
    elements = x.numel()
    if site is None or elements == 0:
        return _composite(kind, activation, x, other, p)
    if elements <= native_elements and p == 0.0 and site.native:
        return F.gelu(x, approximate="none" if activation == "gelu" else "tanh")

    seed, threshold = (None, 0) if p == 0.0 else (rng.draw(x.device) if p < 1.0 else (0, 0), rng.threshold(p))
    if torch.is_grad_enabled() and (x.requires_grad or (other is not None and other.requires_grad)):
        if kind == "glu" and x._base is not None and not autograd.transforming():
            packed = packing(x, other)  # type: ignore[arg-type]
            if packed:
                return autograd.apply(ActivationFunction, x, other, x._base, anchor()[0],  # type: ignore[no-any-return]
                                      Call(site, seed, threshold, packed))  # fmt: skip
        return autograd.apply(ActivationFunction, x, other, None, None, Call(site, seed, threshold))  # type: ignore[no-any-return]
    if autograd.transforming():
        return autograd.apply(ActivationFunction, x, other, None, None, Call(site, seed, threshold))  # type: ignore[no-any-return]
    return launching.forward(site, x, other, seed, threshold)


def _cols(kind: Kind, x: Tensor) -> int:
    return x.shape[-1] // 2 if kind == "packed" else x.shape[-1]


def _admit(key: Any, kind: Kind, activation: str, x: Tensor, other: Tensor | None) -> Site | None:
    site = None
    # Tensors whose sign is still to be flipped (an imaginary part after conj) have other numbers in memory.
    lazy = x.is_neg() or (other is not None and other.is_neg())
    if launch.runs_kernels(x.device.type) and not lazy and x.shape[-1] <= launch.LONGEST_ROW:
        site = launching.site_of(kind, activation, _cols(kind, x), x.get_device(), x.dtype,
                                 None if other is None else other.dtype)  # fmt: skip
    return keep(_admitted, key, site)


def _observed(op: str, kind: Kind, activation: str, x: Tensor, other: Tensor | None, p: float) -> Tensor:
    """Under torch.compile, a dispatch mode or a tensor subclass: one registered operator, which they can see."""
    _check(op, kind, activation, x, other, p)
    if not launch.runs_kernels(x.device.type) or not 0 < x.shape[-1] <= launch.LONGEST_ROW:
        return _composite(kind, activation, x, other, p)
    seed = None if p == 0.0 else rng.draw(x.device) if p < 1.0 else (0, 0)
    return operator_call(x, other, seed, rng.threshold(p), kind, activation, _cols(kind, x))


def _composite(kind: Kind, activation: str, x: Tensor, other: Tensor | None, p: float) -> Tensor:
    """The formula in PyTorch's operators, with the keep mask that `F.dropout` would draw on the CPU."""
    formula = ACTIVATIONS[activation].formula
    if kind != "bias":
        y = reference.glu(x, other, formula)
    else:
        scale = None
        if p > 0.0:
            # The numbers that F.dropout draws for x + bias, whatever torch.func transform is in force.
            ones = torch.ones_like(x, dtype=reference.promoted(x, other))
            keep = F.dropout(ones, p) != 0 if p < 1.0 else torch.zeros_like(ones)
            scale = reference.keep_scale(keep, 1.0 - p, reference.accumulator(ones.dtype))
        y = reference.bias_act(x, other, formula, scale)
    return y.clone() if y is x else y  # as from the kernels: never the caller's own tensor
