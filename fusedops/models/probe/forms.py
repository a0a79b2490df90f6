"""The forms of norms: which formula of the operators a forward computes, and where it rounds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ...core.compat.dispatch import without_modes
from ...norms.reference import NormRule, Rounding, normalize
from ..fingerprint import digest
from .arithmetic import Case, RefusedError, case_of
from .samples import (
    FP32,
    HALF,
    NO_NORM,
    OTHER_AUTOCAST,
    AsOnGpus,
    Probe,
    Run,
    differs,
    equal,
    run_or_none,
    runs,
)

__all__ = ["Compute", "Form", "form", "other_norm", "other_rounding", "same_code"]

# These are reasons for modules that compute a norm in fp32.
_NOT_HALF = "it does not take half precision"
_OTHER_ROUNDING = (
    "it rounds as none of the operators does; they compute in fp32, and round the result to the "
    "input's dtype"
)


class Form(NamedTuple):
    """The formula of a norm, as its fused methods need it.

    Attributes:
        kind: LayerNorm or RMSNorm.
        rounding: for RMSNorms the operators' rounding; for LayerNorms, "llama" if a wider weight
            gives a wider output.
        offset: the number added to the weight.
        eps: the name of the module's attribute, or the number; None for the operators' default.
        weight: the weight's name; None for no weight.
        bias: the bias's name, for a LayerNorm; None for no bias.
        argument: the name of the forward's argument.
        widened: whether it returns fp32 under GPU autocast, as `F.layer_norm` does.
        methods: the names of the methods that were read.
        code: the digest of these methods.
    """

    kind: Literal["layer", "rms"]
    rounding: Rounding
    offset: float
    eps: str | float | None
    weight: str | None
    bias: str | None
    argument: str
    widened: bool
    methods: tuple[str, ...]
    code: str


# Returns the output of a norm of this form, with the module's parameters.
Compute = Callable[[Form, nn.Module, Tensor], Tensor]


# --- the formula, in fp32 -------------------------------------------------------------------------


def _formulas(probe: Probe) -> Iterator[Form]:
    """Yield each formula of the operators, without an eps.

    Each of the case's vectors is tried as the weight and as the bias.
    """
    # A case has two vectors at most.
    names = [name for name, _ in probe.case.vectors]
    first, second = [*names, None, None][:2]
    kinds: tuple[Literal["rms", "layer"], ...] = ("rms", "layer")
    # Without vectors the two pairs are equal, and the dictionary keeps one.
    roles = dict.fromkeys([(first, second), (second, first)])
    for kind, (weight, bias) in itertools.product(kinds, roles):
        if kind == "rms" and bias is not None:
            continue
        # Some RMSNorms store their weight minus one.
        offsets = (0.0,) if weight is None else (0.0, 1.0)
        for offset in offsets:
            yield Form(
                kind=kind,
                rounding="once",
                offset=offset,
                eps=None,
                weight=weight,
                bias=bias,
                argument=probe.case.argument,
                widened=False,
                methods=(),
                code="",
            )


def _exact(
    probe: Probe,
    candidate: Form,
    x: Tensor,
    eps: float | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return a formula's values in fp64, for rows and weights of these dtypes."""
    eps = torch.finfo(torch.float32).eps if eps is None else eps

    def vector(name: str | None) -> Tensor | None:
        if name is None:
            return None
        return probe.weights[name].to(dtype).double()

    # In fp64 the formula's own rounding is far below the bounds of the comparisons.
    rule = NormRule(candidate.kind, eps, candidate.offset)
    return normalize(x.double(), vector(candidate.weight), vector(candidate.bias), rule)


def _with_eps(probe: Probe, candidate: Form) -> Form | None:
    """Return the formula with its eps, an attribute or else a number; None if none agrees."""
    rows = torch.cat([probe.small, probe.ordinary])
    y = probe.run(rows)

    def agrees(eps: float | None, y: Tensor) -> bool:
        return not differs(y, _exact(probe, candidate, rows, eps)).any()

    def follows(name: str, eps: float) -> bool:
        # Another attribute may have the same value as the eps. So change this one: the output
        # changes with it only if it is the eps.
        changed = probe.bare()
        setattr(changed, name, eps)
        return agrees(eps, probe.run(rows, module=changed))

    for name, value in probe.case.floats():
        if agrees(value, y) and follows(name, 3.0 * value + 1e-7):
            return candidate._replace(eps=name)
    for number in _numbers(probe.case, candidate):
        if agrees(number, y):
            return candidate._replace(eps=number)
    return None


def _numbers(case: Case, candidate: Form) -> list[float | None]:
    """Return the numbers that may be the eps; None is that of `torch.nn.RMSNorm` without one."""
    numbers: list[float | None] = [e for e in (*case.numbers, 1e-5, 0.0) if e >= 0.0]
    if candidate.kind == "rms":
        numbers.append(None)
    return numbers


def _formula(probe: Probe) -> Form:
    """Return the formula of a forward in fp32."""
    y = _output(probe)
    # Without its eps, the right formula is off by a part of about eps / (2 * variance), where the
    # variance of ordinary rows is about 1. So this bound rejects most other formulas, cheaply.
    bound = FP32 + 100 * max(probe.epsilons)
    for candidate in _formulas(probe):
        without_eps = _exact(probe, candidate, probe.ordinary, 0.0)
        if differs(y, without_eps, bound).any():
            continue
        formula = _with_eps(probe, candidate)
        if formula is not None:
            return formula
    raise RefusedError(NO_NORM)


def _output(probe: Probe) -> Tensor:
    """Return the forward's output for ordinary rows, which must not depend on their layout."""
    layouts = ((2,), (), (1, 2))
    y, *others = [run_or_none(probe, probe.ordinary, torch.float32, shape) for shape in layouts]
    # A norm over several dimensions, or of columns, depends on it.
    if y is None or not all(equal(y, other) for other in others):
        raise RefusedError(NO_NORM)
    return y


# --- the rounding, in all dtypes ------------------------------------------------------------------

_ROUNDINGS: dict[str, tuple[Rounding, ...]] = {
    "layer": ("once", "llama"),
    "rms": ("once", "llama", "t5"),
}
# The roundings by which an operator rounds its result alone.
_ROUNDS_ONCE: dict[str, tuple[Rounding, ...]] = {"layer": ("once", "llama"), "rms": ("once",)}


def _with_rounding(probe: Probe, candidate: Form, compute: Compute) -> Form:
    """Return the form with its rounding.

    A rounding that gives the same bits comes first, then one that rounds less often than the
    forward.
    """
    results = runs(probe)
    if not any(run.x.dtype in HALF for run in results):
        raise RefusedError(_NOT_HALF)
    # The first test is tried with all roundings before the second is tried with any: the second may
    # accept a rounding that is not the forward's own.
    tests = (_same_bits, _rounds_less)
    for agrees, rounding in itertools.product(tests, _ROUNDINGS[candidate.kind]):
        rounded = candidate._replace(rounding=rounding)
        if all(agrees(probe, rounded, run, compute) for run in results):
            return rounded
    raise RefusedError(_OTHER_ROUNDING)


def _same_bits(probe: Probe, candidate: Form, run: Run, compute: Compute) -> bool:
    """Whether almost all bits agree; the last bit of a sum may change a rounding."""
    ours = compute(candidate, probe.bare(run.dtype), run.x)
    if ours.dtype != run.y.dtype:
        return False
    return float(differs(ours, run.y).double().mean()) < 0.02


def _rounds_less(probe: Probe, candidate: Form, run: Run, compute: Compute) -> bool:
    """Whether the forward's error is a few roundings, and the operator rounds once."""
    x, dtype, y = run
    module = probe.bare(dtype)
    if candidate.rounding not in _ROUNDS_ONCE[candidate.kind]:
        return False
    if compute(candidate, module, x).dtype != y.dtype:
        return False
    eps = getattr(module, candidate.eps) if isinstance(candidate.eps, str) else candidate.eps
    exact = _exact(probe, candidate, x, eps, dtype)
    bound = 4 * _unit(probe, run) * _magnitude(module, candidate, exact)
    bound += FP32 * exact.abs().amax(-1, keepdim=True)
    return bool(((y.double() - exact).abs() <= bound).all())


def _magnitude(module: nn.Module, candidate: Form, exact: Tensor) -> Tensor:
    """Return the magnitude of the numbers that are rounded: ``abs(product) + abs(bias)``.

    Product and bias may cancel, so the result may be smaller than these.
    """
    if candidate.bias is None:
        return exact.abs()
    bias = module._parameters[candidate.bias]
    assert bias is not None
    wide = bias.double()
    return (exact - wide).abs() + wide.abs()


def _unit(probe: Probe, run: Run) -> float:
    """Return the largest unit roundoff of the dtypes that take part."""
    dtypes = {run.x.dtype, torch.float32}
    if probe.weights:
        dtypes.add(run.dtype)
    return max(torch.finfo(dtype).eps for dtype in dtypes) / 2


# --- autocast -------------------------------------------------------------------------------------


def _with_autocast(probe: Probe, candidate: Form, compute: Compute) -> Form:
    """Return the form with what GPU autocast changes: nothing, or the output's dtype to fp32.

    All pairs of dtypes must agree on which of the two it is.
    """
    widened = set()
    for x_dtype, dtype in itertools.product(HALF, (torch.float32, *HALF)):
        x = probe.ordinary.to(x_dtype)
        y = run_or_none(probe, x, dtype)
        with AsOnGpus():
            under_autocast = run_or_none(probe, x, dtype)
        if y is None or under_autocast is None:
            continue
        widened.add(not equal(y, under_autocast))
        # With both True and False among them, the case is refused below.
        if widened == {True}:
            # A forward that casts its rows first computes what the operator does on wide rows.
            wide = compute(candidate, probe.bare(dtype), x.float())
            _check_widened(candidate, under_autocast, wide)
    if len(widened) != 1:
        raise RefusedError(OTHER_AUTOCAST)
    return candidate._replace(widened=widened.pop())


def _check_widened(candidate: Form, under_autocast: Tensor, wide: Tensor) -> None:
    """Raise unless the output under autocast is the operator's in fp32."""
    rounds_once = candidate.rounding == "once" and under_autocast.dtype == torch.float32
    if not rounds_once or differs(under_autocast, wide).any():
        raise RefusedError(OTHER_AUTOCAST)


# --- the form -------------------------------------------------------------------------------------

_LONGEST = 2**16  # beyond, fp32 may not tell a sample's variance from the population's
_SHORTEST = 4


def _sizes(case: Case) -> tuple[int, ...]:
    """Return the row sizes to run: that of the vectors, one among the attributes, or any two."""
    if case.vectors:
        return (case.vectors[0][1],)
    for _, value in case.plain:
        match value:
            # A tuple is, for example, `normalized_shape`. A small number may be an exponent.
            case int(size) | (int(size),) if type(size) is int and size >= _SHORTEST:
                return (size,)
    # Two: the formula must not depend on the size.
    return (24, 40)


# ``compute`` is part of the cache's key, but always the same function, that of `rules.norms`.
@functools.lru_cache(maxsize=4096)
def _fitted(case: Case, compute: Compute) -> Form | str:
    """Return the form of a case, without methods and code; or why it has none."""
    sizes = _sizes(case)
    if not _SHORTEST <= min(sizes) <= max(sizes) <= _LONGEST:
        return "its vectors are too short or too long to tell"
    forms = set()
    try:
        # Whatever modes the caller is in (fake tensors, a default device, autocast), the runs
        # compute numbers on the CPU.
        with without_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            for size in sizes:
                probe = Probe(case, size)
                rounded = _with_rounding(probe, _formula(probe), compute)
                forms.add(_with_autocast(probe, rounded, compute))
    except RefusedError as refused:
        return str(refused)
    if len(forms) == 1:
        return forms.pop()
    return NO_NORM


def _form_or_reason(module: nn.Module, compute: Compute) -> Form | str:
    """Return the module's form, or why it has none; "" for modules that are no candidates."""
    if not _is_candidate(module):
        return ""
    try:
        case, methods = case_of(module)
    except RefusedError as refused:
        return str(refused)
    result = _fitted(case, compute)
    if isinstance(result, str):
        return result
    return result._replace(methods=methods, code=digest(*case.functions))


def _is_candidate(module: nn.Module) -> bool:
    """Whether this is a module without children, whose class is not PyTorch's."""
    cls = type(module)
    if cls.__module__.startswith("torch.") or not hasattr(cls, "forward"):
        return False
    return not module._modules


def form(module: nn.Module, compute: Compute) -> Form | None:
    """Return the form of a module that computes a norm as ``compute`` does; None for others.

    PyTorch's own norms have none.
    """
    result = _form_or_reason(module, compute)
    if not isinstance(result, Form):
        return None
    return result


def other_rounding(module: nn.Module, compute: Compute) -> str:
    """Return why a module that computes a norm in fp32 has no `form`; "" for other modules."""
    result = _form_or_reason(module, compute)
    if not isinstance(result, str):
        return ""
    if result in (_NOT_HALF, OTHER_AUTOCAST, _OTHER_ROUNDING):
        return result
    return ""


def other_norm(module: nn.Module, compute: Compute) -> str:
    """Return why a module whose class is named like a norm has no `form`; "" for other modules."""
    if "Norm" not in type(module).__name__:
        return ""
    result = _form_or_reason(module, compute)
    if not isinstance(result, str):
        return ""
    return result


def same_code(cls: type[nn.Module], known: Form) -> bool:
    """Whether the class still has the code from which this form was derived."""
    return digest(*[getattr(cls, name, None) for name in known.methods]) == known.code
