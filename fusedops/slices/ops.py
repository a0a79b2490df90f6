"""The slices family's functional: checks, then the kernels under autograd, or the formula where no kernel can run."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..core import autograd, checks, launch
from ..core.activations import ACTIVATIONS
from ..core.admission import keep
from . import configs, launching, reference
from .function import SliceFunction
from .launching import Site
from .operators import operator_call
from .widths import Widths, equal_widths, widths_of

__all__ = ["ACTIVATION_NAMES", "batched_layer_norm_tanh", "check_sizes"]

_OP = "batched_layer_norm_tanh"
# Other names of activations.
_ALIASES = {"none": "identity"}
ACTIVATION_NAMES = (*ACTIVATIONS, *_ALIASES)


def batched_layer_norm_tanh(
    slices: Tensor | Sequence[Tensor],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    sizes: Sequence[int] | None = None,
    activation: str = "tanh",
    concat: bool = False,
) -> Any:
    """``tanh(layer_norm(slice))`` for many slices of features at once: one launch, and at most two for the backward.

    Args:
        slices: the K slices, fp16, bf16, fp32 or fp64, in one of three forms: one tensor ``(*, K, D)``; one tensor
            ``(*, ΣD_k)`` with ``sizes``; or a sequence of K tensors ``(*, D_k)`` of one dtype, each where it is in
            memory. Any strides.
        weight: of the norms, each slice its own: ``(ΣD_k,)``, or ``(K, D)`` where all widths are D; or one for all
            slices: ``(D,)``; or None for ones. Its dtype may differ from the slices'.
        bias: likewise, or None for zeros.
        eps: added to the variance, at least 0.
        sizes: the widths D_k of the slices of one tensor ``(*, ΣD_k)``; without it the last two dimensions are K and
            D. A tuple is looked at once, as long as it is
            the same object.
        activation: what follows the norm: "tanh", "sigmoid", "relu", "relu_squared", "gelu", "gelu_tanh",
            "quick_gelu", "silu", or "identity" ("none").
        concat: return one tensor with the slices side by side, ``(*, ΣD_k)``.
    Returns:
        The form of ``slices``: one tensor in their shape, or a tuple of K; with ``concat`` one tensor. In their dtype,
        or in fp32 under GPU autocast.
    Raises:
        ValueError: shapes or sizes do not fit, eps is negative, activation unknown; the message names the slice.
        TypeError: an argument is no floating-point tensor, or the slices' dtypes differ.
        RuntimeError: an argument is on another device.
    Numerics: statistics in fp32 (fp64 for fp64), the variance by a second pass over the row; one rounding at the end.
        Parameter gradients are summed in a fixed order.
    Kept for backward: the arguments, and nothing else.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    out_dtype = None
    if torch.is_autocast_enabled("cuda"):
        first = slices if isinstance(slices, Tensor) else next(iter(slices), None)
        out_dtype = autograd.autocast_dtype("aten::layer_norm", first) if isinstance(first, Tensor) else None
    if torch.compiler.is_compiling():
        return _observed(slices, weight, bias, eps, sizes, activation, concat, out_dtype)
    if isinstance(slices, Tensor):
        tensors: tuple[Tensor, ...] = (slices,)
    elif isinstance(slices, (tuple, list)):
        tensors = tuple(slices)
    else:
        tensors = tuple(_check_sequence(slices))
    try:
        if isinstance(slices, Tensor):
            known = sizes if sizes is None else _known_sizes(sizes)
            facts: Any = (type(slices), slices.dtype, slices.device, slices.is_neg(), known,
                          slices.shape[-1:] if sizes is not None else (slices.dim() == 2, slices.shape[-2:]))  # fmt: skip
        else:
            facts = (sizes if sizes is None else _known_sizes(sizes), *map(_FACTS, tensors))
        key = (
            facts, eps, activation, concat, out_dtype,
            None if weight is None else (type(weight), weight.dtype, weight.device, weight.shape),
            None if bias is None else (type(bias), bias.dtype, bias.device, bias.shape),
        )  # fmt: skip
        call = _admitted.get(key)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        key, call = None, None  # something is wrong, and the checks say what; or a subclass that hides its device
    if call is None or torch._C._len_torch_dispatch_stack() > 0:
        if not autograd.plain(weight, bias, *(t for t in tensors if isinstance(t, Tensor))):
            return _observed(slices, weight, bias, eps, sizes, activation, concat, out_dtype)
        call = _admit(key, slices, weight, bias, eps, sizes, activation, concat, out_dtype)
    if call.spread:
        weight, bias = _spread(weight, bias, call.widths)
    site = call.site
    first = tensors[0]
    if (
        site is None
        or first.numel() == 0
        or autograd.transforming()
        or (call.dims == 0 and any(map(Tensor.is_neg, tensors)))
    ):
        return _composite(call, tensors, weight, bias, eps, activation, concat, out_dtype)
    if torch.is_grad_enabled() and (
        any(map(_LEARNS, tensors))
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return autograd.apply(SliceFunction, site, weight, bias, *tensors)
    y, _ = launching.forward(site, tensors, weight, bias)
    return launching.apart(site, y, tensors) if site.apart else y


# --- checks -------------------------------------------------------------------------------------------------------


def _check_sequence(slices: Any) -> Sequence[Tensor]:
    if not isinstance(slices, Sequence):
        raise TypeError(f"{_OP}: slices must be a torch.Tensor or a sequence of them, got {type(slices).__name__}")
    return slices


def check_sizes(sizes: Any, op: str = _OP) -> tuple[int, ...]:
    """The widths as a tuple of ints, each at least 1."""
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence):
        raise TypeError(f"{op}: sizes must be a sequence of ints, got {type(sizes).__name__}")
    if not sizes:
        raise ValueError(f"{op}: sizes must name at least one slice, got an empty sequence")
    for k, size in enumerate(sizes):
        if not isinstance(size, int) and not hasattr(size, "__index__"):
            raise TypeError(f"{op}: sizes[{k}] must be an int, got {type(size).__name__}")
        if size < 1:
            raise ValueError(f"{op}: sizes[{k}] must be at least 1, got {size}")
    return tuple([int(size) for size in sizes])


def _check_one(x: Tensor, sizes: Sequence[int] | None, *parameters: Any) -> tuple[int, ...]:
    """The widths of the slices of one tensor."""
    checks.check_tensor(_OP, "slices", x)
    if sizes is None:
        if x.dim() < 2:
            raise ValueError(f"{_OP}: slices has shape {tuple(x.shape)}, expected (*, K, D), or (*, N) with sizes")
        count, size = x.shape[-2:]
        if count < 1 or size < 1:
            raise ValueError(f"{_OP}: slices has shape {tuple(x.shape)}, expected (*, K, D) with K and D at least 1")
        if x.dim() == 2 and any(isinstance(t, Tensor) and t.dim() == 1 and t.shape[0] == size for t in parameters):
            # Rows of slices side by side, their sizes forgotten, look like one row of slices that share a parameter.
            raise ValueError(f"{_OP}: slices has shape {tuple(x.shape)}, expected sizes with it, or (*, K, D) of three "
                             "dimensions at least")  # fmt: skip
        return (size,) * count
    widths = check_sizes(sizes)
    if x.dim() < 1 or x.shape[-1] != sum(widths):
        raise ValueError(f"{_OP}: the sizes of {len(widths)} slices add up to {sum(widths)}, but slices has shape "
                         f"{tuple(x.shape)}")  # fmt: skip
    return widths


def _check_many(slices: Any, sizes: Any) -> tuple[int, ...]:
    """The widths of slices that are tensors of their own."""
    if not len(_check_sequence(slices)):
        raise ValueError(f"{_OP}: slices must hold at least one tensor, got an empty sequence")
    wanted = None if sizes is None else check_sizes(sizes)
    if wanted is not None and len(wanted) != len(slices):
        raise ValueError(f"{_OP}: sizes names {len(wanted)} slices, but there are {len(slices)}")
    first = slices[0]
    for k, t in enumerate(slices):
        name = f"slice {k}"
        checks.check_tensor(_OP, name, t, first if k else None)
        if t.dim() < 1 or t.shape[-1] < 1:
            raise ValueError(f"{_OP}: {name} has shape {tuple(t.shape)}, expected (*, D) with D at least 1")
        if t.shape[:-1] != first.shape[:-1]:
            raise ValueError(f"{_OP}: {name} has shape {tuple(t.shape)}, but slice 0 has {tuple(first.shape)}")
        if t.dtype != first.dtype:
            raise TypeError(f"{_OP}: {name} has dtype {t.dtype}, expected {first.dtype} as slice 0")
        if wanted is not None and t.shape[-1] != wanted[k]:
            raise ValueError(f"{_OP}: {name} has shape {tuple(t.shape)}, but sizes[{k}] is {wanted[k]}")
    return tuple([t.shape[-1] for t in slices])


def _check(slices: Any, weight: Any, bias: Any, eps: Any, sizes: Any, activation: Any) -> tuple[int, ...]:
    """All that can be wrong; the widths of the slices."""
    one = isinstance(slices, Tensor)
    widths = _check_one(slices, sizes, weight, bias) if one else _check_many(slices, sizes)
    total, count, size = sum(widths), len(widths), widths[0]
    equal = all(other == size for other in widths)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            checks.check_tensor(_OP, name, value, slices if one else slices[0])
            shape = tuple(value.shape)
            if shape != (total,) and not (equal and shape in ((count, size), (size,))):
                shapes = f"({total},), ({count}, {size}) or ({size},)" if equal else f"({total},)"
                raise ValueError(f"{_OP}: {name} has shape {shape}, expected {shapes} for {count} slices")
    checks.check_eps(_OP, eps)
    checks.check_choice(_OP, "activation", activation, ACTIVATION_NAMES)
    return widths


# --- dispatch -----------------------------------------------------------------------------------------------------


class _Call:
    """What was found out about a call that was admitted.

    ``site`` is None for what the formula serves; ``spread`` says that one parameter is shared and the other is not.
    """

    __slots__ = ("dims", "shared", "site", "spread", "widths")

    def __init__(self, site: Site | None, widths: Widths, dims: int, shared: bool, spread: bool) -> None:
        self.site = site
        self.widths = widths
        self.dims = dims
        self.shared = shared
        self.spread = spread


# The calls seen to be right, by all that checks and choice of kernel depend on.
_admitted: dict[Any, _Call] = {}
# What the checks look at in a slice that is a tensor of its own.
_FACTS = attrgetter("__class__", "dtype", "device", "shape")
_LEARNS = attrgetter("requires_grad")
# Tuples of sizes by their identity, so that a call need not read a thousand numbers; each holds its tuple alive.
_seen_sizes: dict[int, tuple[tuple[int, ...], Widths]] = {}


def _known_sizes(sizes: Sequence[int]) -> Widths:
    found = _seen_sizes.get(id(sizes))
    if found is not None:
        return found[1]
    widths = widths_of(check_sizes(sizes))
    if type(sizes) is tuple:
        keep(_seen_sizes, id(sizes), (sizes, widths))
    return widths


def _is_shared(parameter: Tensor | None, widths: Sequence[int]) -> bool:
    return parameter is not None and len(widths) > 1 and parameter.dim() == 1 and parameter.shape[0] == widths[0]


def _sharing(weight: Tensor | None, bias: Tensor | None, widths: Sequence[int]) -> tuple[bool, bool]:
    """Whether the slices share their parameters; and whether one must be spread out, as the other is not shared."""
    shared = [_is_shared(p, widths) for p in (weight, bias) if p is not None]
    return any(shared) and all(shared), any(shared) and not all(shared)


def _spread(weight: Tensor | None, bias: Tensor | None,
            widths: Widths) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Both parameters with a part for each slice."""
    return tuple(  # type: ignore[return-value]
        p.expand(len(widths), -1) if p is not None and _is_shared(p, widths.sizes) else p for p in (weight, bias)
    )


def _admit(key: Any, slices: Any, weight: Tensor | None, bias: Tensor | None, eps: float, sizes: Any, activation: str,
           concat: bool, out_dtype: torch.dtype | None) -> _Call:  # fmt: skip
    checked = _check(slices, weight, bias, eps, sizes, activation)
    one = isinstance(slices, Tensor)
    first: Tensor = slices if one else slices[0]
    dims = 0 if not one else 2 if sizes is None else 1
    widths = equal_widths(len(checked), checked[0]) if dims == 2 else widths_of(checked)
    shared, spread = _sharing(weight, bias, checked)
    site = None
    # A tensor whose sign is still to be flipped (an imaginary part after conj) has other numbers in memory. The key
    # knows it of one tensor; those of a sequence are looked at in each call.
    if (
        launch.runs_kernels(first.device.type)
        and widths.widest <= configs.widest(first.dtype.itemsize)
        and not (one and first.is_neg())
    ):
        site = launching.site_of(
            widths, dims, bool(concat), float(eps), _ALIASES.get(activation, activation), shared, out_dtype,
            first.get_device(), first.dtype, *(None if p is None else p.dtype for p in (weight, bias)),
        )  # fmt: skip
    return keep(_admitted, key, _Call(site, widths, dims, shared, spread))


def _observed(slices: Any, weight: Tensor | None, bias: Tensor | None, eps: float, sizes: Any, activation: str,
              concat: bool, out_dtype: torch.dtype | None) -> Any:  # fmt: skip
    """Under torch.compile, a dispatch mode or a tensor subclass: one registered operator, which they can see."""
    widths = _check(slices, weight, bias, eps, sizes, activation)
    one = isinstance(slices, Tensor)
    tensors = (slices,) if one else tuple(slices)
    dims = 0 if not one else 2 if sizes is None else 1
    shared, spread = _sharing(weight, bias, widths)
    if spread:
        weight, bias = (
            p.expand(len(widths), -1) if p is not None and _is_shared(p, widths) else p for p in (weight, bias)
        )
    activation = _ALIASES.get(activation, activation)
    uniform = widths[0] if all(size == widths[0] for size in widths) else 0
    if not launch.runs_kernels(tensors[0].device.type) or max(widths) > configs.widest(tensors[0].dtype.itemsize):
        return reference.composite(tensors, weight, bias, widths, uniform, dims, shared, concat, eps,
                                   ACTIVATIONS[activation].formula, out_dtype)  # fmt: skip
    return operator_call(tensors, weight, bias, widths, dims, concat, eps, activation, shared, out_dtype)


def _composite(call: _Call, slices: tuple[Tensor, ...], weight: Tensor | None, bias: Tensor | None, eps: float,
               activation: str, concat: bool, out_dtype: torch.dtype | None) -> Any:  # fmt: skip
    """The formula in PyTorch's operators."""
    widths = call.widths
    formula = ACTIVATIONS[_ALIASES.get(activation, activation)].formula
    return reference.composite(slices, weight, bias, widths.sizes, widths.uniform, call.dims, call.shared, concat, eps,
                               formula, out_dtype)  # fmt: skip
