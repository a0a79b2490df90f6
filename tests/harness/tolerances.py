"""Tolerances against the fp64 oracle, and the two checks that use them.

They are derived by backward error (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
chapters 1, 3 and 4). A computed result is the exact result for slightly perturbed inputs. An
elementwise step perturbs by the unit roundoff u of its dtype. A sum of n terms perturbs by u times
the depth of its tree of additions. Both are relative to the largest element of the row.

How much such a perturbation changes the exact result is measured by `sensitivity`. It changes every
element of every input by ±h times the largest element of its row, with random signs, takes the
largest change in each row of the result, and divides it by h. The measure thus contains the
condition number of the sample (for example of a row whose mean is much larger than its deviation),
and works for every operator. The checks are

    forward    |y - oracle| <= u(y) |oracle|  +  2 (depth u(accumulator) + u(sum)) sensitivity  +  2 inside
    backward   |g - oracle| <= u(g) |oracle|  +  2 (depth u(accumulator) + u(sum) + u(y) gain) sensitivity  +  2 eager

First term: the result is rounded once, to its dtype.

Factor 2: the oracle has the same error if the accumulator is fp64, which the oracle also uses.

u(sum): an operator that normalises a sum first rounds the sum to its dtype, as eager PyTorch does.
The oracle does not round it. Without a sum this term is zero.

inside: roundings within a formula are relative to the value of the formula. If an input scales the
result, as a weight does, a perturbation of that input changes the result as much, so the
sensitivity contains these roundings. But if the function is flat at all elements of a row (GELU's
minimum, the ends of tanh), perturbations change nothing, and the steps still round: an activation
by 12 u (a power of two, a reciprocal and products; counted in `test_activations.py`), and dropout
by two more, the division and the product of its scale. So inside is, for each element,
14 u(accumulator) times max(|oracle| - sensitivity, 0). For results in 16 bits, the slices' tanh
adds its relative error of 1e-5 (also tested in `test_activations.py`). A gradient scales with its
cotangent, so the backward needs no such term.

u(y) gain: if the output is saved for the backward, the backward inverts the affine map. The
rounding of the output, which is at most u(y) (|w hat| + |b|), is then divided by |w|. If the output
is not saved, this term is zero.

eager: a norm's gradient is a difference that cancels (entirely, for one or two columns). No
perturbation of the inputs explains the error of this cancellation. The term is the larger of two
errors of eager PyTorch. Each is the largest over the whole tensor, because a single row may happen
to have none. One is its error in the sample's dtypes. The other is its error in fp32 on all
perturbed inputs, which fp64 can measure precisely. It is multiplied by the largest of the units of
roundoff above, and divided by u(fp32).

Operators that reproduce the inner roundings of another library get twice eager's error in the
forward, too. With one promised rounding (``rounding="once"``) they do not.
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
# Relative error of the slices' tanh for results in 16 bits.
_TANH_ERROR = 1e-5


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to ``dtype``."""
    return torch.finfo(dtype).eps / 2


def a_rounding_away(tensor: Tensor, draw: int) -> Tensor:
    """The tensor in fp32, randomly perturbed by about one rounding of fp32.

    PyTorch's results for it show how large the error of a result is if only the inputs are
    rounded. This error is large where sums cancel.
    """
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator().manual_seed(draw)
    return tensor.float() * (
        1 + 1e-7 * torch.randn(tensor.shape, generator=generator).to(tensor.device)
    )


def accumulator(sample: Sample) -> torch.dtype:
    """The dtype in which the operator accumulates: fp64 if any tensor has it, else fp32."""
    wide = any(t is not None and t.dtype == torch.float64 for t in sample.tensors.values())
    return torch.float64 if wide else torch.float32


def depth(terms: int) -> float:
    """The number of roundings on the longest path through a sum and the steps around it.

    At least 1024 lanes each add up their share of the terms; a tree then adds the lanes. At most
    four elementwise steps come before and after the sum.
    """
    return 4 + math.log2(max(terms, 1)) + terms / 1024


def _row_max(value: Tensor) -> Tensor:
    return value.amax(-1, keepdim=True) if value.numel() else value


def _moved(tensors: Tensors) -> Iterator[Tensors]:
    """Yields `_DRAWS` copies of the tensors with all elements perturbed.

    Each element changes by ±`_STEP` times the largest element of its row. The copies are fp64, with
    values that fp32 represents exactly.
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
    """The largest error in each tensor of ``results``."""
    errors = [(a.double() - b).abs() for a, b in zip(results, exact, strict=True)]
    return [error.max() if error.numel() else error.sum() for error in errors]


def sensitivity(
    exact: Function, tensors: Tensors, single: Function | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns how much the results of ``exact`` change per unit of relative change of its inputs.

    This is one number for each row of each result. The second list has the largest error in each
    result of ``single``, the same function in fp32, on the perturbed inputs.
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
    """Asserts that ``actual`` is ``exact`` up to ``slack`` and one rounding to its dtype.

    Args:
        actual: the result.
        exact: the oracle's result in fp64.
        slack: the allowed error beside the rounding; broadcasts to ``exact``.
        what: names the result in the message.
    """
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
    """The promoted dtype of the tensors that the operator sums; that of the rows without a sum."""
    dtype = rows_of(spec, sample).dtype
    for name in spec.promoted:
        other = sample.tensors.get(name)
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    return dtype


def output_dtypes(spec: Spec, sample: Sample) -> list[torch.dtype]:
    """The promised dtypes of the output, and of the sum and the cast output if they are returned.

    The output has the sum's dtype, with two exceptions: ``out_dtype`` sets it, and with Llama's or
    T5's rounding the last step multiplies by the weight, which may have a wider dtype.
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
    """Returns u(sum) and u(y) gain, as the module's docstring defines them."""
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
    """Checks the operator's outputs against the oracle, and returns them.

    Their number, dtypes, shapes and device are checked, too.
    """
    tensors, mask = tensors_of(spec, sample), dropout_mask(spec, sample)
    outputs = call(spec, sample)(tensors) if outputs is None else tuple(outputs)
    exactly = oracle(spec, sample, mask)
    exact = exactly(tensors)
    promised = output_dtypes(spec, sample)
    assert [output.dtype for output in outputs] == promised * (len(outputs) // len(promised))
    unit = unit_roundoff(accumulator(sample))
    perturbation = _depth(spec, sample) * unit + _roundings(spec, sample)[0]
    moves, _ = sensitivity(exactly, tensors)
    has_fast_tanh = promised[0].itemsize == 2 and spec.name.startswith("batched_layer_norm_tanh")
    tanh_error = _TANH_ERROR if has_fast_tanh else 0.0
    slack = []
    for move, want in zip(moves, exact, strict=True):
        inside = _INSIDE * unit * (want.abs() - move).clamp(min=0.0)
        slack.append(2 * (perturbation * move + inside) + tanh_error * want.abs())
    if sample.options.get("rounding", "once") != "once":
        errors = _largest(eager(spec, sample, mask)(tensors), exact)
        slack = [allowed + 2 * error for allowed, error in zip(slack, errors, strict=True)]
    for index, (output, want, allowed) in enumerate(zip(outputs, exact, slack, strict=True)):
        assert output.device == rows_of(spec, sample).device
        assert_within(output, want, allowed, f"output {index}")
    return outputs


def _backward_of(function: Function, names: Sequence[str], count: int) -> Function:
    """The gradients of ``function`` for ``names``, as a function of its tensors and cotangents.

    The ``count`` cotangents are named ``cotangent 0``, ``cotangent 1``, …
    """

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
    """Checks the operator's gradients against the oracle's, and returns them.

    Args:
        spec: the operator.
        sample: its arguments.
        cotangents: of the outputs; random by default.
        names: the tensors to differentiate for; by default all.
        values: whether to check the outputs of the same call, too.
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

    all_inputs = {
        **tensors,
        **{f"cotangent {index}": cotangent for index, cotangent in enumerate(cotangents)},
    }
    exactly = _backward_of(oracle(spec, sample, mask), names, len(cotangents))
    eagerly = _backward_of(eager(spec, sample, mask), names, len(cotangents))
    exact = exactly({name: t.double() for name, t in all_inputs.items()})
    moves, errors = sensitivity(exactly, all_inputs, eagerly)
    unit, roundings = unit_roundoff(accumulator(sample)), sum(_roundings(spec, sample))
    scale = max(unit, roundings) / unit_roundoff(torch.float32)
    eager_errors = _largest(eagerly(all_inputs), exact)
    for index, (name, want) in enumerate(zip(names, exact, strict=True)):
        assert actual[name].dtype == tensors[name].dtype
        assert actual[name].device == tensors[name].device
        eager_error = torch.maximum(eager_errors[index], scale * errors[index])
        slack = 2 * (_depth(spec, sample) * unit + roundings) * moves[index] + 2 * eager_error
        assert_within(actual[name], want, slack, f"gradient of {name}")
    return actual
