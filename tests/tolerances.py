"""How far a result may be from the fp64 oracle, and the two checks that most test files end in.

Derivation, by backward error (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., chapters 1, 3 and 4).
A computed result is the exact result for inputs perturbed a little: an elementwise step perturbs by the unit roundoff
u of the dtype it is done in, a sum of n terms by u times the depth of its tree of additions, each relative to the
largest element of the row that is summed. How much a perturbation of the inputs moves the exact result is measured
rather than bounded by hand: `sensitivity` moves every row of every input by ± its largest element times a small h,
with random signs, takes the largest change in each row of the result, and divides by h. It thus holds the condition
number of the very sample (a row whose mean dwarfs its deviation, say) and serves every operator. So

    forward    |y - oracle| <= u(y) |oracle|  +  2 depth u(accumulator) sensitivity
    backward   |g - oracle| <= u(g) |oracle|  +  2 depth u(accumulator) sensitivity + 2 u(kept) sensitivity

The first term is the one rounding of the result to its dtype. The factor 2 allows the oracle, in fp64 also where the
accumulator is, the same error. The last term is there where the forward keeps a tensor for the backward and rounds it
to its dtype. Operators that reproduce the inner roundings of another library have these errors besides, and the
backward takes differences that cancel (for two columns LayerNorm's gradient is all cancellation), which no perturbation
of the inputs explains: to both is added twice the error of eager PyTorch at the same dtypes. Where one rounding is promised (``rounding="once"``), the forward's bound stands alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from fusedops.core.spec import Sample, Spec
from support import (
    Function,
    Mask,
    Tensors,
    call,
    dropout_mask,
    eager,
    gradients,
    oracle,
    random_like,
    rows_of,
    tensors_of,
)
from torch import Tensor

__all__ = ["assert_within", "check_gradients", "check_values", "output_dtypes", "sensitivity", "unit_roundoff"]

_DRAWS = 4
_STEP = 2.0**-24


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def accumulator(sample: Sample) -> torch.dtype:
    wide = any(t is not None and t.dtype == torch.float64 for t in sample.tensors.values())
    return torch.float64 if wide else torch.float32


def depth(terms: int) -> float:
    """Additions on the longest path through a sum: 1024 lanes at least run down the terms, then meet in a tree.

    And four elementwise steps at most before and after it.
    """
    return 4 + math.log2(max(terms, 1)) + terms / 1024


def _row_max(value: Tensor) -> Tensor:
    return value.amax(-1, keepdim=True) if value.numel() else value


def sensitivity(function: Function, tensors: Tensors) -> list[Tensor]:
    """The largest change of each row of ``function``'s results, per unit of relative change of its inputs' rows."""
    generator = torch.Generator().manual_seed(3)
    exact = function({name: None if t is None else t.double() for name, t in tensors.items()})
    worst = [torch.zeros_like(_row_max(value)) for value in exact]
    for _ in range(_DRAWS):
        moved: Tensors = {}
        for name, t in tensors.items():
            if t is None:
                moved[name] = None
                continue
            signs = torch.randint(0, 2, t.shape, generator=generator).to(t.device, torch.float64) * 2 - 1
            moved[name] = t.double() + _STEP * signs * _row_max(t.double().abs())
        change = [_row_max((a - b).abs()) / _STEP for a, b in zip(function(moved), exact, strict=True)]
        worst = [torch.maximum(a, b) for a, b in zip(worst, change, strict=True)]
    return worst


def assert_within(actual: Tensor, exact: Tensor, slack: Tensor, what: str) -> None:
    """``actual`` is ``exact`` rounded to its dtype, give or take ``slack`` (which broadcasts along rows)."""
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    if not actual.numel():
        return
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    info = torch.finfo(actual.dtype)
    allowed = unit_roundoff(actual.dtype) * exact.abs() + slack + info.smallest_normal * info.eps
    excess = (actual.double() - exact).abs() / allowed
    worst = int(excess.argmax())
    assert excess.flatten()[worst] <= 1.0, (
        f"{what}: {excess.flatten()[worst]:.2f} times the allowed error at {worst}: got {actual.flatten()[worst]:.8g}, "
        f"exact {exact.flatten()[worst]:.8g}, allowed {allowed.expand_as(excess).flatten()[worst]:.3g}; "
        f"{int((excess > 1).sum())} of {excess.numel()} elements are off"
    )


def output_dtypes(spec: Spec, sample: Sample) -> list[torch.dtype]:
    """The dtypes that the contract promises: of the output, and of the sum where it is returned.

    The sum has the promotion of what is summed; so has the output, unless ``out_dtype`` says otherwise or Llama's or
    T5's rounding multiplies by a wider weight last.
    """
    rows, weight = rows_of(spec, sample), sample.tensors.get("weight")
    summed = rows.dtype
    for name in ("bias", "residual") if spec.has_dropout else ():
        other = sample.tensors.get(name)
        summed = summed if other is None else torch.promote_types(summed, other.dtype)
    output = summed
    if sample.options.get("rounding") in ("llama", "t5") and weight is not None:
        output = torch.promote_types(summed, weight.dtype)
    output = sample.options.get("out_dtype") or output
    return [output, summed] if sample.options.get("return_sum") else [output]


def _eager_error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> list[Tensor]:
    """Twice eager's largest error: over the whole tensor, as a single row may happen to have none."""
    errors = [(a.double() - b).abs() for a, b in zip(results, exact, strict=True)]
    return [2 * error.max() if error.numel() else error for error in errors]


def check_values(spec: Spec, sample: Sample, mask: Mask | None = None) -> tuple[Tensor, ...]:
    """The operator's outputs, having been held to the oracle; also their number, dtypes, shapes and device."""
    tensors = tensors_of(spec, sample)
    mask = dropout_mask(spec, sample) if mask is None else mask
    outputs, exact = call(spec, sample)(tensors), oracle(spec, sample, mask)(tensors)
    assert [output.dtype for output in outputs] == output_dtypes(spec, sample)
    rows = rows_of(spec, sample)
    unit = 2 * depth(rows.shape[-1]) * unit_roundoff(accumulator(sample))
    slack = [unit * s for s in sensitivity(oracle(spec, sample, mask), tensors)]
    if sample.options.get("rounding", "once") != "once":
        errors = _eager_error(eager(spec, sample, mask)(tensors), exact)
        slack = [a + b for a, b in zip(slack, errors, strict=True)]
    for index, (output, want, room) in enumerate(zip(outputs, exact, slack, strict=True)):
        assert output.device == rows.device
        assert_within(output, want, room, f"output {index}")
    return outputs


def check_gradients(
    spec: Spec, sample: Sample, cotangents: Sequence[Tensor] | None = None, names: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """The operator's gradients for ``names`` (default: every tensor), having been held to the oracle's."""
    tensors = tensors_of(spec, sample)
    names = list(tensors) if names is None else names
    mask = dropout_mask(spec, sample)
    exactly = oracle(spec, sample, mask)
    if cotangents is None:
        cotangents = random_like([torch.empty_like(t) for t in call(spec, sample)(tensors)])
    given = [cotangent.clone() for cotangent in cotangents]
    actual = gradients(call(spec, sample), tensors, cotangents, names)
    assert all(map(torch.equal, cotangents, given)), "a cotangent was written to"

    def exact_gradients(inputs: Tensors) -> tuple[Tensor, ...]:
        along = [inputs[f"cotangent {i}"] for i in range(len(cotangents))]
        return tuple(gradients(exactly, {name: inputs[name] for name in tensors}, along, names).values())

    everything = {**tensors, **{f"cotangent {i}": cotangent for i, cotangent in enumerate(cotangents)}}
    exact = exact_gradients({name: t.double() for name, t in everything.items()})
    rows = rows_of(spec, sample)
    unit = 2 * depth(max(rows.shape[-1], rows.numel() // max(rows.shape[-1], 1))) * unit_roundoff(accumulator(sample))
    if spec.kept and sample.options.get("save") != "inputs":
        unit += 2 * unit_roundoff(output_dtypes(spec, sample)[-1])
    errors = _eager_error(list(gradients(eager(spec, sample, mask), tensors, cotangents, names).values()), exact)
    room = [unit * s + e for s, e in zip(sensitivity(exact_gradients, everything), errors, strict=True)]
    for name, want, slack in zip(names, exact, room, strict=True):
        assert actual[name].dtype == tensors[name].dtype
        assert actual[name].device == tensors[name].device
        assert_within(actual[name], want, slack, f"gradient of {name}")
    return actual
