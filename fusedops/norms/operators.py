"""The family's private `torch.library` operators: what torch.compile, FakeTensor and make_fx see of a call."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import autograd
from ..core.operators import NAMES, Calls, define, named, versioned
from ..core.rng import Seed
from . import launching
from .function import kept_tensors
from .launching import Site, site_of
from .reference import Kind, NormRule, Rounding

__all__ = ["operator_call"]

_LIBRARY = torch.library.Library("fusedops", "FRAGMENT")

# ``call`` is what `_call_name` makes of a call's constants, and `_site` reads.
_CALL = "int threshold, str call, float eps, float weight_offset, int cols, int dims"


@functools.lru_cache(maxsize=4096)
def rule_of(kind: Kind, eps: float, weight_offset: float, rounding: Rounding) -> NormRule:
    """The one rule object for these constants."""
    return NormRule(kind, eps, weight_offset, rounding)


def _dtype(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


class _Choices(NamedTuple):
    """What a call's string holds, a word each; dtypes by name."""

    kind: Kind
    rounding: Rounding
    save: str
    stored: str
    out_dtype: str
    twin: str
    version: str


def _choices(call: str) -> _Choices:
    return _Choices(*call.split())  # type: ignore[arg-type]


def _call_name(rule: NormRule, save: str, store_sum: bool, out_dtype: torch.dtype | None,
               twin: torch.dtype | None) -> str:  # fmt: skip
    stored = "stores" if store_sum else "drops"
    return versioned(rule.kind, rule.rounding, save, stored, NAMES[out_dtype], NAMES[twin])


def _site(constants: tuple[Any, ...], device_index: int, dtypes: tuple[torch.dtype | None, ...]) -> Site:
    """From the constants behind the threshold, and the dtypes of x, bias, residual, weight and ln_bias."""
    call, eps, weight_offset, cols, dims = constants
    choices = _choices(call)
    rule = rule_of(choices.kind, eps, weight_offset, choices.rounding)
    x, bias, residual, weight, ln_bias = dtypes
    assert x is not None
    return site_of(rule, cols, dims, choices.save, named(choices.out_dtype), device_index, x, bias, residual, weight,
                   ln_bias, named(choices.twin))  # fmt: skip


def operator_call(x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None,
                  ln_bias: Tensor | None, seed: Seed | None, threshold: int, rule: NormRule, cols: int, dims: int,
                  save: str, store_sum: bool, out_dtype: torch.dtype | None,
                  twin: torch.dtype | None) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The forward as one registered operator; ``(y, z, y in the dtype twin)``, None what is not asked for."""
    if isinstance(seed, tuple):
        seed = torch.tensor(seed, dtype=torch.int64, device=x.device)
    y, z, low, _ = torch.ops.fusedops.norm_forward(x, bias, residual, weight, ln_bias, seed, threshold,
                                                   _call_name(rule, save, store_sum, out_dtype, twin), rule.eps,
                                                   rule.weight_offset, cols, dims)  # fmt: skip
    return y, z if store_sum else None, None if twin is None else y if y.dtype is twin else low


# --- forward ------------------------------------------------------------------------------------------------------------


def _prepare_forward(device_index: int, dtypes: tuple[torch.dtype | None, ...], threshold: int,
                     *call: Any) -> tuple[Site, int]:  # fmt: skip
    return _site(call, device_index, dtypes[:5]), threshold


_forward_calls = Calls(_prepare_forward)


def _forward(x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None, ln_bias: Tensor | None,
             seed: Tensor | None, y: Tensor, z: Tensor | None, twin: Tensor | None, stats: Tensor | None,
             call: str) -> None:  # fmt: skip
    site, threshold = _forward_calls[call, x.get_device()]
    launching.forward(site, x, bias, residual, weight, ln_bias, seed, threshold, z is not None, (y, z, twin, stats))


def _outputs(x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None, ln_bias: Tensor | None,
             seed: Tensor | None, threshold: int, call: str, eps: float, weight_offset: float, cols: int,
             dims: int) -> tuple[Tensor | None, ...]:  # fmt: skip
    dtypes = (x.dtype, _dtype(bias), _dtype(residual), _dtype(weight), _dtype(ln_bias))
    site = _site((call, eps, weight_offset, cols, dims), -1, dtypes)

    def full(dtype: torch.dtype | None) -> Tensor:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)

    if not site.normalizes:
        return full(site.y), None, None, None
    stored = _choices(call).stored == "stores"
    stats = x.new_empty((2 if site.rule.kind == "layer" else 1, x.numel() // cols), dtype=site.acc)
    return full(site.y), full(site.z) if stored else None, None if site.twin is None else full(site.twin), stats


# --- backward -----------------------------------------------------------------------------------------------------------


def _needed(needs: str) -> tuple[bool, ...]:
    return tuple([digit == "1" for digit in needs])


def _inputs(dtypes: str) -> tuple[torch.dtype | None, ...]:
    return tuple([named(name) for name in dtypes.split()])


def _shared(needs: tuple[bool, ...], seed: Any, x: torch.dtype | None, residual: torch.dtype | None) -> bool:
    """Whether x and residual have one gradient; an operator returns it once, as its outputs may not alias."""
    return needs[0] and needs[2] and seed is None and x is residual


def _prepare_backward(device_index: int, dtypes: tuple[torch.dtype | None, ...], needs: str, inputs: str,
                      threshold: int, *call: Any) -> tuple[Site, int, tuple[bool, ...]]:  # fmt: skip
    return _site(call, device_index, (*_inputs(inputs), *dtypes[6:8])), threshold, _needed(needs)


_backward_calls = Calls(_prepare_backward)


def _backward(dy: Tensor | None, dsum: Tensor | None, dtwin: Tensor | None, kept: Tensor | None, bias: Tensor | None,
              residual: Tensor | None, weight: Tensor | None, ln_bias: Tensor | None, stats: Tensor | None,
              seed: Tensor | None, dx: Tensor | None, dbias: Tensor | None, dresidual: Tensor | None,
              dweight: Tensor | None, dln_bias: Tensor | None, call: str) -> None:  # fmt: skip
    given: Tensor = dy if dy is not None else dsum if dsum is not None else dtwin  # type: ignore[assignment]
    site, threshold, needs = _backward_calls[call, given.get_device()]
    launching.backward(site, dy, dsum, dtwin, kept, bias, residual, weight, ln_bias, stats, seed, threshold, needs,
                       (dx, dbias, dresidual, dweight, dln_bias))  # fmt: skip


def _gradients(dy: Tensor | None, dsum: Tensor | None, dtwin: Tensor | None, kept: Tensor | None,
               bias: Tensor | None, residual: Tensor | None, weight: Tensor | None, ln_bias: Tensor | None,
               stats: Tensor | None, seed: Tensor | None, needs: str, inputs: str, threshold: int, call: str,
               eps: float, weight_offset: float, cols: int, dims: int) -> tuple[Tensor | None, ...]:  # fmt: skip
    like = dy if dy is not None else dsum if dsum is not None else dtwin
    assert like is not None
    needed, (x_dtype, bias_dtype, residual_dtype) = _needed(needs), _inputs(inputs)

    def full(dtype: torch.dtype | None) -> Tensor:
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)

    def alike(need: bool, parameter: Tensor | None) -> Tensor | None:
        return torch.empty_like(parameter, memory_format=torch.contiguous_format) if need else None  # type: ignore[arg-type]

    return (
        full(x_dtype) if needed[0] and not _shared(needed, seed, x_dtype, residual_dtype) else None,
        like.new_empty(cols, dtype=bias_dtype) if needed[1] else None,
        full(residual_dtype) if needed[2] else None,
        alike(needed[3], weight),
        alike(needed[4], ln_bias),
    )


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, bias, residual, weight, ln_bias, seed, threshold, call, *constants = inputs
    y, z, _, stats = output
    choices = _choices(call)
    # What is absent comes back as an empty tensor, and its gradient as another.
    ctx.stored, ctx.twinned = choices.stored == "stores", named(choices.twin) not in (None, y.dtype)
    normalizes = choices.kind != "none"
    kept, *others = kept_tensors(x, bias, residual, y, z if ctx.stored else None, choices.kind, choices.save)
    ctx.save_for_backward(kept, *others, weight, ln_bias, stats if normalizes else None, seed)
    ctx.set_materialize_grads(False)
    ctx.dtypes = (x.dtype, _dtype(bias), _dtype(residual))
    ctx.call = (threshold, call, *constants)


def _autograd_backward(ctx: Any, dy: Tensor | None, dz: Tensor | None, dtwin: Tensor | None,
                       _: Tensor | None) -> tuple[Any, ...]:  # fmt: skip
    *saved, seed = ctx.saved_tensors
    rest = (None,) * 7
    dsum, dtwin = dz if ctx.stored else None, dtwin if ctx.twinned else None
    if dy is None and dsum is None and dtwin is None:
        return (None,) * 5 + rest
    needs = tuple(ctx.needs_input_grad[:5])
    if dy is None and dtwin is None:
        needs = (*needs[:3], False, False)  # only the sum has a gradient, and the norm's parameters did not make it
    names = " ".join([NAMES[dtype] for dtype in ctx.dtypes])
    digits = "".join([str(int(need)) for need in needs])
    given = (dy, dsum, dtwin, *saved, seed, digits, names, *ctx.call)
    grads = iter(autograd.once(torch.ops.fusedops.norm_backward, *given))
    x_dtype, _, residual_dtype = ctx.dtypes
    shared = _shared(needs, seed, x_dtype, residual_dtype)
    found = [next(grads) if need and not (place == 0 and shared) else None for place, need in enumerate(needs)]
    if shared:
        found[0] = found[2]
    return (*found, *rest)


define(
    _LIBRARY,
    "norm_forward",
    tensors="Tensor x, Tensor? bias, Tensor? residual, Tensor? weight, Tensor? ln_bias, Tensor? seed",
    constants=_CALL,
    outputs=("y", "z", "twin", "stats"),
    returns="(Tensor, Tensor, Tensor, Tensor)",
    allocate=_outputs,
    write=_forward,
)
define(
    _LIBRARY,
    "norm_backward",
    tensors="Tensor? dy, Tensor? dsum, Tensor? dtwin, Tensor? kept, Tensor? bias, Tensor? residual, Tensor? weight, "
    "Tensor? ln_bias, Tensor? stats, Tensor? seed",
    # ``needs`` is one digit for each gradient, 1 if it is wanted; ``inputs`` the dtypes of x, bias and residual.
    constants=f"str needs, str inputs, {_CALL}",
    outputs=("dx", "dbias", "dresidual", "dweight", "dln_bias"),
    returns="Tensor[]",
    allocate=_gradients,
    write=_backward,
)
torch.library.register_autograd(
    "fusedops::norm_forward", _autograd_backward, setup_context=_setup_context, lib=_LIBRARY
)
