"""How far a result may be from the fp64 oracle, and the two checks that most test files end in.

Derivation, by backward error (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
chapters 1, 3 and 4). A computed result is the exact result for inputs perturbed a little: an
elementwise step perturbs by the unit roundoff u of the dtype it is done in, a sum of n terms by u
times the depth of its tree of additions, each relative to the largest element of the row that is
summed. How much a perturbation of the inputs moves the exact result is measured rather than bounded
by hand: `sensitivity` moves every row of every input by ± its largest element times a small h, with
random signs, takes the largest change in each row of the result, and divides by h. It thus holds
the condition number of the very sample (a row whose mean dwarfs its deviation, say) and serves
every operator. So

    forward    |y - oracle| <= u(y) |oracle|  +  2 (depth u(accumulator) + u(sum)) sensitivity  +  2 inside
    backward   |g - oracle| <= u(g) |oracle|  +  2 (depth u(accumulator) + u(sum) + u(y) gain) sensitivity  +  2 eager

The first term is the one rounding of the result to its dtype. The factor 2 allows the oracle, in
fp64 also where the accumulator is, the same error. u(sum) is there where a sum is normalised, which
is first rounded to its dtype, as eager's is, while the oracle rounds nothing. Operators that
reproduce the inner roundings of another library get twice eager's error on top, forward too; where
one rounding is promised (``rounding="once"``), the forward's bound stands alone.

Inside is what no perturbation of the inputs explains: roundings within a formula, relative to its
value. Where an input scales the result, as a weight does, moving it moves the result by as much,
and the sensitivity holds them. Where all of a row lies where the function is flat (GELU's minimum,
tanh's ends), nothing moves, and the steps still round: an activation by 12 u (of a power of two, a
reciprocal and products; counted in `test_activations.py`), and dropout by two more, its scale's
division and product. So inside is 14 u(accumulator) times that part of |oracle|, element by
element, by which the sensitivity falls short of it. To that comes the relative error of the slices'
tanh for results in 16 bits, 1e-5 (tested there too). A gradient scales with its cotangent, so it
needs none.

u(y) gain is there where the output is kept for the backward, which then inverts the affine: its
rounding, of
|w hat| + |b| at most, is divided by |w|.

Eager is there because a norm's gradient is a difference that cancels (for one or two columns
entirely), which no perturbation of the inputs explains. It is eager PyTorch's error at the same
dtypes, or, if that is larger, its error in fp32, where the fp64 oracle can see all of it, scaled by
the largest of these u over u(fp32); the largest over the whole tensor and over all the moved
inputs, as one row may happen to have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fusedops.core.spec import Sample, Spec
from support import (
    Function,
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

__all__ = [
    "assert_within",
    "check_gradients",
    "check_values",
    "output_dtypes",
    "sensitivity",
    "unit_roundoff",
]

_DRAWS = 4
_STEP = 2.0**-18
# Roundings of an activation and of dropout's scale, relative to the result.
_INSIDE = 14
_NARROW = 1e-5


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def a_rounding_away(tensor: Tensor, draw: int) -> Tensor:
    """The tensor as another rounding of it would be, in fp32.

    What PyTorch makes of it shows how far results are from exact ones for the inputs' rounding
    alone: sums may cancel.
    """
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator().manual_seed(draw)
    return tensor.float() * (
        1 + 1e-7 * torch.randn(tensor.shape, generator=generator).to(tensor.device)
    )


def accumulator(sample: Sample) -> torch.dtype:
    wide = any(t is not None and t.dtype == torch.float64 for t in sample.tensors.values())
    return torch.float64 if wide else torch.float32


def depth(terms: int) -> float:
    """Additions on the longest path through a sum.

    1024 lanes at least run down the terms, then meet in a tree.

    And four elementwise steps at most before and after it.
    """
    return 4 + math.log2(max(terms, 1)) + terms / 1024


def _row_max(value: Tensor) -> Tensor:
    return value.amax(-1, keepdim=True) if value.numel() else value


def _moved(tensors: Tensors) -> Iterator[Tensors]:
    """The tensors with each row moved by ± its largest element times `_STEP`.

    In fp64, though fp32 would hold them.
    """
    generator = torch.Generator().manual_seed(3)
    for _ in range(_DRAWS):
        moved: Tensors = {}
        for name, t in tensors.items():
            if t is not None:
                signs = (
                    torch.randint(0, 2, t.shape, generator=generator).to(t.device, torch.float64)
                    * 2
                    - 1
                )
                moved[name] = (
                    (t.double() + _STEP * signs * _row_max(t.double().abs())).float().double()
                )
        yield moved


def _largest(results: Sequence[Tensor], exact: Sequence[Tensor]) -> list[Tensor]:
    """The largest error over each whole tensor."""
    errors = [(a.double() - b).abs() for a, b in zip(results, exact, strict=True)]
    return [error.max() if error.numel() else error.sum() for error in errors]


def sensitivity(
    exact: Function, tensors: Tensors, single: Function | None = None
) -> tuple[list[Tensor], list[Tensor]]:
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
            result = _largest(
                single({name: None if t is None else t.float() for name, t in moved.items()}),
                values,
            )
            errors = [torch.maximum(a, b) for a, b in zip(errors, result, strict=True)]
    return worst, errors


def assert_within(actual: Tensor, exact: Tensor, slack: Tensor, what: str) -> None:
    """``actual`` is ``exact`` rounded to its dtype, give or take ``slack`` (which broadcasts along rows)."""
    assert actual.shape == exact.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    )
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


def sum_dtype(spec: Spec, sample: Sample) -> torch.dtype:
    """PyTorch's promotion of what is summed, or the dtype of what is normalised as it is."""
    dtype = rows_of(spec, sample).dtype
    for name in spec.promoted:
        other = sample.tensors.get(name)
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    return dtype


def output_dtypes(spec: Spec, sample: Sample) -> list[torch.dtype]:
    """The dtypes that the contract promises.

    Of the output, and of the sum and the cast output if they are returned.

    The output has the sum's, unless ``out_dtype`` says otherwise or Llama's or T5's rounding
    multiplies by a wider weight last.
    """
    summed, weight = sum_dtype(spec, sample), sample.tensors.get("weight")
    output = summed
    if sample.options.get("rounding") in ("llama", "t5") and weight is not None:
        output = torch.promote_types(summed, weight.dtype)
    output = sample.options.get("out_dtype") or output
    cast = sample.options.get("cast_dtype")
    return [
        output,
        *([summed] if sample.options.get("return_sum") else []),
        *([cast] if cast else []),
    ]


def _roundings(spec: Spec, sample: Sample) -> tuple[float, float]:
    """u(sum), and u(y) gain."""
    if not spec.saved:
        return 0.0, 0.0
    of_sum = unit_roundoff(sum_dtype(spec, sample))
    if sample.options.get("save") != "output":
        return of_sum, 0.0
    weight, bias = sample.tensors.get("weight"), sample.tensors.get("ln_bias")
    size = torch.ones(1) if weight is None else weight.double().abs()
    added = 0.0 if bias is None else float(bias.double().abs().max())
    gain = (float(size.max()) + added) / float(size.min())
    return of_sum, unit_roundoff(output_dtypes(spec, sample)[0]) * gain


def _depth(spec: Spec, sample: Sample) -> float:
    """The depth of the longest sum, along a row or down the rows."""
    rows = rows_of(spec, sample)
    cols = max(rows.shape[-1], 1)
    return depth(max(cols, rows.numel() // cols))


def check_values(
    spec: Spec, sample: Sample, outputs: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """The operator's outputs, having been held to the oracle.

    Also their number, dtypes, shapes and device.
    """
    tensors, mask = tensors_of(spec, sample), dropout_mask(spec, sample)
    outputs = call(spec, sample)(tensors) if outputs is None else tuple(outputs)
    exactly = oracle(spec, sample, mask)
    exact = exactly(tensors)
    promised = output_dtypes(spec, sample)
    assert [output.dtype for output in outputs] == promised * (len(outputs) // len(promised))
    unit = unit_roundoff(accumulator(sample))
    across = _depth(spec, sample) * unit + _roundings(spec, sample)[0]
    moves, _ = sensitivity(exactly, tensors)
    narrow = (
        _NARROW
        if promised[0].itemsize == 2 and spec.name.startswith("batched_layer_norm_tanh")
        else 0.0
    )
    slack = [
        2 * (across * move + _INSIDE * unit * (want.abs() - move).clamp(min=0.0))
        + narrow * want.abs()
        for move, want in zip(moves, exact, strict=True)
    ]
    if sample.options.get("rounding", "once") != "once":
        errors = _largest(eager(spec, sample, mask)(tensors), exact)
        slack = [a + 2 * b for a, b in zip(slack, errors, strict=True)]
    for index, (output, want, room) in enumerate(zip(outputs, exact, slack, strict=True)):
        assert output.device == rows_of(spec, sample).device
        assert_within(output, want, room, f"output {index}")
    return outputs


def _along(function: Function, names: Sequence[str], count: int) -> Function:
    """``function``'s gradients for ``names`` as a function of its tensors and of ``count`` cotangents."""

    def backward(inputs: Tensors) -> tuple[Tensor, ...]:
        tensors = dict(inputs)
        cotangents = [tensors.pop(f"cotangent {index}") for index in range(count)]
        return tuple(gradients(function, tensors, cotangents, names).values())

    return backward


def check_gradients(
    spec: Spec,
    sample: Sample,
    cotangents: Sequence[Tensor] | None = None,
    names: Sequence[str] | None = None,
    *,
    values: bool = False,
) -> dict[str, Tensor]:
    """The operator's gradients for ``names`` (default: every tensor), having been held to the oracle's.

    With ``values`` also the outputs, from the same call.
    """
    tensors = tensors_of(spec, sample)
    names = list(tensors) if names is None else names
    mask = dropout_mask(spec, sample)
    leaves = {name: t.detach().requires_grad_(name in names) for name, t in tensors.items()}
    outputs = call(spec, sample)(leaves)
    if values:
        check_values(spec, sample, [output.detach() for output in outputs])
    cotangents = random_like(outputs) if cotangents is None else cotangents
    copies = [cotangent.clone() for cotangent in cotangents]
    actual = dict(
        zip(
            names,
            torch.autograd.grad(outputs, [leaves[name] for name in names], cotangents),
            strict=True,
        )
    )
    assert all(map(torch.equal, cotangents, copies)), "a cotangent was written to"

    everything = {
        **tensors,
        **{f"cotangent {index}": cotangent for index, cotangent in enumerate(cotangents)},
    }
    exactly = _along(oracle(spec, sample, mask), names, len(cotangents))
    eagerly = _along(eager(spec, sample, mask), names, len(cotangents))
    exact = exactly({name: t.double() for name, t in everything.items()})
    moves, errors = sensitivity(exactly, everything, eagerly)
    unit, roundings = unit_roundoff(accumulator(sample)), sum(_roundings(spec, sample))
    scale = max(unit, roundings) / unit_roundoff(torch.float32)
    native = _largest(eagerly(everything), exact)
    for index, (name, want) in enumerate(zip(names, exact, strict=True)):
        assert actual[name].dtype == tensors[name].dtype
        assert actual[name].device == tensors[name].device
        from_eager = torch.maximum(native[index], scale * errors[index])
        slack = 2 * (_depth(spec, sample) * unit + roundings) * moves[index] + 2 * from_eager
        assert_within(actual[name], want, slack, f"gradient of {name}")
    return actual
