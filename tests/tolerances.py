"""How far a result may be from the fp64 oracle, and the two checks that most test files end in.

Derivation, by backward error (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., chapters 1, 3 and 4).
A computed result is the exact result for inputs perturbed a little: an elementwise step perturbs by the unit roundoff
u of the dtype it is done in, a sum of n terms by u times the depth of its tree of additions, each relative to the
largest element of the row that is summed. How much a perturbation of the inputs moves the exact result is measured
rather than bounded by hand: `sensitivity` moves every row of every input by ± its largest element times a small h,
with random signs, takes the largest change in each row of the result, and divides by h. It thus holds the condition
number of the very sample (a row whose mean dwarfs its deviation, say) and serves every operator. So

    forward    |y - oracle| <= u(y) |oracle|  +  2 depth u(accumulator) sensitivity
    backward   |g - oracle| <= u(g) |oracle|  +  2 (depth u(accumulator) + u(kept) gain) sensitivity  +  2 eager

The first term is the one rounding of the result to its dtype. The factor 2 allows the oracle, in fp64 also where the
accumulator is, the same error. Operators that reproduce the inner roundings of another library get twice eager's error
on top, forward too; where one rounding is promised (``rounding="once"``), the forward's bound stands alone.

u(kept) is there where the forward keeps a tensor for the backward, rounded to its dtype. Where that is the output, the
backward inverts the affine, so its rounding, of |w hat| + |b| at most, is divided by |w|: that is ``gain``.

Eager is there because a norm's gradient is a difference that cancels (for one or two columns entirely), which no
perturbation of the inputs explains. It is eager PyTorch's error at the same dtypes, or, if that is larger, its error in
fp32, where the fp64 oracle can see all of it, scaled by u(accumulator) or u(kept) over u(fp32); the largest over the
whole tensor and over all the moved inputs, as one row may happen to have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

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
_STEP = 2.0**-18


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


def _moved(tensors: Tensors) -> Iterator[Tensors]:
    """The tensors with each row moved by ± its largest element times `_STEP`; in fp64, though fp32 would hold them."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(_DRAWS):
        moved: Tensors = {}
        for name, t in tensors.items():
            if t is not None:
                signs = torch.randint(0, 2, t.shape, generator=generator).to(t.device, torch.float64) * 2 - 1
                moved[name] = (t.double() + _STEP * signs * _row_max(t.double().abs())).float().double()
        yield moved


def _largest(results: Sequence[Tensor], exact: Sequence[Tensor]) -> list[Tensor]:
    """The largest error over each whole tensor."""
    errors = [(a.double() - b).abs() for a, b in zip(results, exact, strict=True)]
    return [error.max() if error.numel() else error.sum() for error in errors]


def sensitivity(exact: Function, tensors: Tensors, single: Function | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """How far ``exact``'s results move, by row, per unit of relative change of its inputs' rows.

    And the largest error of ``single``, the same function in fp32, on the moved inputs.
    """
    base = exact({name: None if t is None else t.double() for name, t in tensors.items()})
    worst = [torch.zeros_like(_row_max(value)) for value in base]
    errors = [value.new_zeros(()) for value in base]
    for moved in _moved(tensors):
        values = exact(moved)
        changes = [_row_max((a - b).abs()) / _STEP for a, b in zip(values, base, strict=True)]
        worst = [torch.maximum(a, b) for a, b in zip(worst, changes, strict=True)]
        if single is not None:
            found = _largest(single({name: None if t is None else t.float() for name, t in moved.items()}), values)
            errors = [torch.maximum(a, b) for a, b in zip(errors, found, strict=True)]
    return worst, errors


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


def check_values(spec: Spec, sample: Sample, mask: Mask | None = None) -> tuple[Tensor, ...]:
    """The operator's outputs, having been held to the oracle; also their number, dtypes, shapes and device."""
    tensors = tensors_of(spec, sample)
    mask = dropout_mask(spec, sample) if mask is None else mask
    outputs, exact = call(spec, sample)(tensors), oracle(spec, sample, mask)(tensors)
    assert [output.dtype for output in outputs] == output_dtypes(spec, sample)
    rows = rows_of(spec, sample)
    unit = 2 * depth(rows.shape[-1]) * unit_roundoff(accumulator(sample))
    moves, _ = sensitivity(oracle(spec, sample, mask), tensors)
    slack = [unit * move for move in moves]
    if sample.options.get("rounding", "once") != "once":
        errors = _largest(eager(spec, sample, mask)(tensors), exact)
        slack = [a + 2 * b for a, b in zip(slack, errors, strict=True)]
    for index, (output, want, room) in enumerate(zip(outputs, exact, slack, strict=True)):
        assert output.device == rows.device
        assert_within(output, want, room, f"output {index}")
    return outputs


def _kept_unit(spec: Spec, sample: Sample) -> float:
    """u(kept) times its gain: how far what is kept for the backward is from what the forward saw."""
    if not spec.kept or sample.options.get("save") == "inputs":
        return 0.0
    dtypes = output_dtypes(spec, sample)
    if sample.options.get("save") != "output":
        return unit_roundoff(dtypes[-1])
    weight = sample.tensors["weight"]
    weight = torch.ones(1) if weight is None else weight.double().abs()
    bias = sample.tensors.get("ln_bias")
    added = 0.0 if bias is None else bias.double().abs().max()
    return unit_roundoff(dtypes[0]) * float((weight.max() + added) / weight.min())


def _along(function: Function, names: Sequence[str], count: int) -> Function:
    """``function``'s gradients for ``names`` as a function of its tensors and of ``count`` cotangents."""

    def backward(inputs: Tensors) -> tuple[Tensor, ...]:
        tensors = dict(inputs)
        cotangents = [tensors.pop(f"cotangent {index}") for index in range(count)]
        return tuple(gradients(function, tensors, cotangents, names).values())

    return backward


def check_gradients(
    spec: Spec, sample: Sample, cotangents: Sequence[Tensor] | None = None, names: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """The operator's gradients for ``names`` (default: every tensor), having been held to the oracle's."""
    tensors, rows = tensors_of(spec, sample), rows_of(spec, sample)
    names = list(tensors) if names is None else names
    mask = dropout_mask(spec, sample)
    if cotangents is None:
        outputs = zip(oracle(spec, sample, mask)(tensors), output_dtypes(spec, sample), strict=True)
        cotangents = random_like([output.to(dtype) for output, dtype in outputs])
    given = [cotangent.clone() for cotangent in cotangents]
    actual = gradients(call(spec, sample), tensors, cotangents, names)
    assert all(map(torch.equal, cotangents, given)), "a cotangent was written to"

    everything = {**tensors, **{f"cotangent {index}": cotangent for index, cotangent in enumerate(cotangents)}}
    exactly = _along(oracle(spec, sample, mask), names, len(cotangents))
    eagerly = _along(eager(spec, sample, mask), names, len(cotangents))
    exact = exactly({name: t.double() for name, t in everything.items()})
    moves, errors = sensitivity(exactly, everything, eagerly)
    kept, unit = _kept_unit(spec, sample), unit_roundoff(accumulator(sample))
    scale = max(unit, kept) / unit_roundoff(torch.float32)
    native = _largest(eagerly(everything), exact)
    longest = max(rows.shape[-1], rows.numel() // max(rows.shape[-1], 1))
    for index, (name, want) in enumerate(zip(names, exact, strict=True)):
        assert actual[name].dtype == tensors[name].dtype
        assert actual[name].device == tensors[name].device
        from_eager = torch.maximum(native[index], scale * errors[index])
        slack = 2 * (depth(longest) * unit + kept) * moves[index] + 2 * from_eager
        assert_within(actual[name], want, slack, f"gradient of {name}")
    return actual
