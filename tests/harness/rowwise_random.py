"""Compares random row-wise functions with themselves in fp64.

Each function is right, wrong, refused by name, or invalid, if PyTorch itself raises an error.

``TRITON_INTERPRET=1 python tests/harness/rowwise_random.py --count 2000 --seed 0`` prints how many
there are of each, and the errors of wrong ones. ``--reasons`` also prints the reasons for refusals;
``--seed N --count 1`` runs a single one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fusedops
from fusedops.core.configs.tuning_key import Config
from rowwise_writer import RandomFunction, random_function
from support import DEVICE
from tolerances import unit_roundoff

__all__ = ["check", "in_tiles", "outcome"]

# The number of perturbed inputs on which PyTorch's error is measured, since a single one does not
# show how ill-conditioned a function is.
_DRAWS = 12
# Activations whose gradients at NaN depend on the width of a CPU's vectors.
_BY_VECTORS = ("F.elu", "F.selu", "F.celu", "hardswish", "hardtanh", "relu6", "softshrink")
# A larger relative perturbation of an input: large enough that roundings within the function
# differ, and small enough that its condition changes by a part in a hundred at most.
_NEAR = 2.0**-10


@dataclass
class _Results:
    """The results of a call.

    Attributes:
        kind: the type of the returned value.
        outputs: the returned tensors.
        grads: the gradients of the inputs, None for an input without one.
        others: second derivatives, and gradients along several cotangents at once.
    """

    kind: type
    outputs: list[Tensor]
    grads: list[Tensor | None]
    others: list[Tensor]

    @property
    def tensors(self) -> list[Tensor | None]:
        """All outputs, gradients and other derivatives."""
        return [*self.outputs, *self.grads, *self.others]


def outcome(seed: int) -> tuple[str, str]:
    """Checks the function of a seed; returns the outcome and its reason.

    The outcome is "right", "wrong", "refused", or "invalid" if PyTorch itself raises an error.
    """
    random = random_function(seed)
    with in_tiles() if random.tiled else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return check(random)
        except fusedops.NotRowwiseError as error:
            is_named = str(error).startswith("function: ") and "cannot be traced" not in str(error)
            if not is_named and not _is_of_one_row(random):
                return "wrong", f"it is refused without a name: {error}\n{_described(random)}"
            return "refused", str(error)
        except Exception as error:  # noqa: BLE001 - any other error is a fault
            return "wrong", f"{type(error).__name__}: {error}\n{_described(random)}"


def _is_of_one_row(random: RandomFunction) -> bool:
    """Whether PyTorch raises an error for more rows than one."""
    sizes = dict(random.sizes[0])
    for axis in sizes.keys() & {"a", "b", "s"}:
        sizes[axis] = max(sizes[axis], 2)
    try:
        random.function(*replace(random, sizes=[sizes]).tensors(0, DEVICE))
    except Exception:  # noqa: BLE001 - shapes that PyTorch refuses
        return True
    return False


@contextlib.contextmanager
def in_tiles() -> Iterator[None]:
    """Within this context, kernels process rows in tiles of a few columns."""
    config = Config(block_n=16, rows=2, warps=1, per_sm=1)
    with (
        mock.patch("fusedops.compiler.operator.LONGEST_ROW", 8),
        mock.patch("fusedops.compiler.operator._LONGEST_ROW_16BIT", 8),
        mock.patch("fusedops.compiler.configs._of_long_rows", return_value=config),
    ):
        yield


def _described(random: RandomFunction) -> str:
    flags = [name for name in ("second", "batched", "tiled", "stored") if getattr(random, name)]
    return "\n".join(
        [
            f"seed {random.seed} {random.used} {' '.join(flags)}",
            random.source,
            *map(str, random.arguments),
            *map(str, random.sizes),
        ]
    )


def check(random: RandomFunction) -> tuple[str, str]:
    """Compares each call with PyTorch; raises if a result is wrong, or the function is refused.

    Returns:
        "right" and an empty reason; or "invalid" and PyTorch's error in the first call.
    """
    fused = fusedops.rowwise(random.function, strict=True)
    for call in range(len(random.sizes)):
        if call and random.stored:
            fused = fusedops.rowwise(random.function, strict=True)
        tensors = random.tensors(call, DEVICE)
        try:
            native, inputs = _native(random, tensors)
        except Exception as error:  # noqa: BLE001 - shapes or arguments that PyTorch refuses
            _assert_fails(random, fused, tensors, error)
            if call == 0:
                return "invalid", f"{type(error).__name__}: {error}"
            continue
        before = [tensor.clone() for tensor in tensors]
        got = _run(random, fused, tensors, native.outputs, at_once=True)
        assert all(map(_are_equal, tensors, before)), "an argument was written to"
        _compare(random, inputs, got, native)
    return "right", ""


def _native(random: RandomFunction, tensors: Sequence[Tensor]) -> tuple[_Results, Sequence[Tensor]]:
    """Returns PyTorch's results, and the arguments of that call.

    A fused function does not depend on layouts: all its arguments count as contiguous, as
    docs/rowwise.md says. If PyTorch cannot view a tensor with its strides, the call is repeated
    with contiguous copies. It raises again if the tensor is not an argument.
    """
    try:
        return _run(random, random.function, tensors), tensors
    except RuntimeError as error:
        if "view size is not compatible" not in str(error):
            raise
    copies = [tensor.contiguous() for tensor in tensors]
    return _run(random, random.function, copies), copies


def _assert_fails(
    random: RandomFunction, fused: Callable[..., Any], tensors: Sequence[Tensor], error: Exception
) -> None:
    """Asserts that the fused function raises an error if PyTorch's forward does."""
    try:
        random.function(*tensors)
    except Exception:  # noqa: BLE001
        pass
    else:  # PyTorch's error came from the backward
        return
    try:
        fused(*tensors)
    except Exception:  # noqa: BLE001
        return
    # PyTorch's gather raises an error for an index out of range. A kernel cannot, without a
    # synchronisation.
    if "gather" in random.source:
        return
    raise AssertionError(f"it has a result where PyTorch raises {type(error).__name__}: {error}")


def _are_equal(first: Tensor, second: Tensor) -> bool:
    """Whether all elements are equal; NaN equals NaN."""
    are_nan = torch.equal(first.isnan(), second.isnan())
    return are_nan and torch.equal(first.nan_to_num(), second.nan_to_num())


def _run(
    random: RandomFunction,
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    like: Sequence[Tensor] | None = None,
    *,
    at_once: bool = False,
) -> _Results:
    """Calls the function, and computes its derivatives.

    Args:
        random: says which derivatives to compute.
        function: its plain, fused or exact function.
        tensors: the arguments.
        like: outputs, to whose dtypes the cotangents are rounded; by default those of the call.
        at_once: whether gradients of several cotangents are computed in one batch.
    """
    leaves = [
        t.detach().requires_grad_(argument.differentiated)
        for t, argument in zip(tensors, random.arguments, strict=True)
    ]
    sources = [t for t in leaves if t.requires_grad]
    generator = torch.Generator().manual_seed(random.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        returned = function(*leaves)
        outputs = [returned] if isinstance(returned, Tensor) else list(returned)
        result = _Results(type(returned), outputs, [], [])
        outputs_and_cotangents = []
        for out, rounded, used in zip(outputs, like or outputs, random.used, strict=False):
            # Two cotangents for each output; the second is only for `_batched`.
            cotangents = torch.randn((2, *out.shape), generator=generator, dtype=torch.float64)
            if out.requires_grad and used:
                cotangents = cotangents.to(out.device, rounded.dtype).to(out.dtype)
                outputs_and_cotangents.append((out, cotangents))
        if not outputs_and_cotangents or not sources:
            return result
        outs, pairs = zip(*outputs_and_cotangents, strict=True)
        has_second = random.second and not random.is_harsh
        first = [cotangents[0] for cotangents in pairs]
        result.grads = list(
            torch.autograd.grad(
                outs, sources, first, allow_unused=True, create_graph=has_second, retain_graph=True
            )
        )
        if random.batched:
            result.others += _batched(outs, sources, pairs, at_once=at_once)
        if has_second:
            result.others += _second(result.grads, sources, generator)
    return result


def _batched(
    outs: Any, sources: Sequence[Tensor], pairs: Sequence[Tensor], *, at_once: bool
) -> list[Tensor]:
    """Returns the gradients of two cotangents for each output, stacked; zeros instead of None.

    With ``at_once`` autograd computes both in a batch. Without, it computes one after the other,
    because some of PyTorch's batched gradients differ.
    """
    if at_once:
        grads = torch.autograd.grad(
            outs, sources, pairs, allow_unused=True, is_grads_batched=True, retain_graph=True
        )
        return [
            t.new_zeros(2, *t.shape) if grad is None else grad
            for grad, t in zip(grads, sources, strict=True)
        ]
    first, second = [
        torch.autograd.grad(
            outs,
            sources,
            [cotangents[index] for cotangents in pairs],
            allow_unused=True,
            retain_graph=True,
        )
        for index in range(2)
    ]
    return [
        torch.stack([torch.zeros_like(t) if grad is None else grad for grad in grads])
        for t, *grads in zip(sources, first, second, strict=True)
    ]


def _second(
    grads: Sequence[Tensor | None], sources: Sequence[Tensor], generator: torch.Generator
) -> list[Tensor]:
    """Returns the gradients of a random combination of the gradients; zeros instead of None."""
    directions = [
        torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device) for t in sources
    ]
    terms = [
        (g.double() * direction).sum()
        for g, direction in zip(grads, directions, strict=True)
        if g is not None and g.requires_grad
    ]
    if not terms:
        return [torch.zeros_like(t) for t in sources]
    result = torch.autograd.grad(sum(terms), sources, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(result, sources, strict=True)]


# --- comparison -----------------------------------------------------------------------------------


def _compare(
    random: RandomFunction, tensors: Sequence[Tensor], got: _Results, native: _Results
) -> None:
    """Asserts that the results have types, dtypes, shapes, layouts and values as in PyTorch.

    Args:
        random: the function.
        tensors: the arguments of PyTorch's call.
        got: the results of the fused function.
        native: PyTorch's results.
    """
    assert got.kind is native.kind, f"{got.kind} for {native.kind}"
    assert len(got.outputs) == len(native.outputs), "another number of outputs"
    for number, (out, like) in enumerate(zip(got.outputs, native.outputs, strict=True)):
        what = f"output {number}"
        assert out.requires_grad == like.requires_grad, (
            f"{what}: requires_grad is {out.requires_grad}"
        )
        assert out.is_contiguous() or not like.is_contiguous(), (
            f"{what}: strides {out.stride()} for {like.stride()}"
        )
    names = [argument.name for argument in random.arguments if argument.differentiated]
    assert len(got.grads) == len(native.grads), "only one of the results has gradients"
    for name, grad, like in zip(names, got.grads, native.grads, strict=False):
        # If all used columns have no gradient, PyTorch's gradient is zeros, not None.
        is_left_out = grad is None and random.has_parts and like is not None and not like.any()
        assert (grad is None) == (like is None) or is_left_out, (
            f"gradient of {name}: {grad}, expected {like}"
        )
    exact = _exactly(random, tensors, native)
    # PyTorch's error on perturbed inputs is measured only if the first comparison fails.
    references = list(itertools.chain([native], _narrower(random, tensors, native)))
    errors = _errors(random, got, exact, references)
    if errors:
        references += _nearby(random, tensors, native, exact)
        errors = _errors(random, got, exact, references)
    assert not errors, "\n".join(errors)


def _exactly(random: RandomFunction, tensors: Sequence[Tensor], native: _Results) -> _Results:
    """The results in fp64."""
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    with _default_dtype(torch.float64):  # the dtype of products of integers and floats
        return _run(random, random.exact, wide, native.outputs)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _is_wide(random: RandomFunction) -> bool:
    """Whether kernels compute in fp64."""
    has_wide_argument = any(argument.dtype == torch.float64 for argument in random.arguments)
    return has_wide_argument or "double()" in random.source


def _narrower(
    random: RandomFunction, tensors: Sequence[Tensor], native: _Results
) -> Iterator[_Results]:
    """Yields PyTorch's results in fp32, if kernels compute in fp32."""
    if not _is_wide(random):
        in_fp32 = [t.float() if t.is_floating_point() else t for t in tensors]
        yield _run(random, random.function, in_fp32, native.outputs)


def _nearby(
    random: RandomFunction, tensors: Sequence[Tensor], native: _Results, exact: _Results
) -> Iterator[_Results]:
    """Yields results with the errors that PyTorch has on perturbed inputs.

    Each draw yields three results. The first is PyTorch's in the dtype of the kernels, on inputs
    that are perturbed by a rounding. The others are the exact results plus PyTorch's errors on
    inputs that are perturbed by a rounding of the coarsest dtype, and by `_NEAR`.

    `_NEAR` is needed because the steps of a formula may round alike on inputs that differ by a
    rounding. An example is the second derivative of sinc near zero, which divides x cos x - sin x
    by x^2. Its error is u / x^2 times the roundings of that difference. Inputs at a larger distance
    have other roundings, and the function is still as ill-conditioned there.
    """
    wide, acc = _is_wide(random), torch.float64 if _is_wide(random) else torch.float32
    casts = {torch.float32: "float()", torch.float16: "half()", torch.bfloat16: "bfloat16()"}
    dtypes = [dtype for dtype, cast in casts.items() if cast in random.source]
    dtypes += [argument.dtype for argument in random.arguments if argument.dtype.is_floating_point]
    coarsest = max(unit_roundoff(dtype) for dtype in (acc, *dtypes))
    for draw in range(_DRAWS):
        moved = [_moved(t, draw, acc, distance=unit_roundoff(acc)) for t in tensors]
        if wide:
            yield _exactly(random, moved, native)
        else:
            yield _run(random, random.function, moved, native.outputs)
        for distance in (coarsest, max(coarsest, _NEAR)):
            near = [_moved(t, draw, t.dtype, distance=distance) for t in tensors]
            eager = _run(random, random.function, near, native.outputs)
            exact_near = _exactly(random, near, native)
            _set_to_exact_plus_error(eager, exact_near, exact)
            yield eager


def _set_to_exact_plus_error(eager: _Results, exact_near: _Results, exact: _Results) -> None:
    """Replaces each result in ``eager`` by ``exact`` plus its difference from ``exact_near``."""
    tensors = zip(eager.tensors, exact_near.tensors, exact.tensors, strict=True)
    for result, exact_result_near, exact_result in tensors:
        if result is None or exact_result_near is None or exact_result is None:
            continue
        if result.is_floating_point():
            error = result.detach().double() - exact_result_near.detach()
            result.data = exact_result.detach() + error


def _moved(tensor: Tensor, draw: int, dtype: torch.dtype, *, distance: float) -> Tensor:
    """The tensor with random relative changes of about ``distance``; equal numbers stay equal."""
    if not tensor.is_floating_point():
        return tensor
    values, indices = tensor.double().unique(return_inverse=True)
    generator = torch.Generator().manual_seed(draw)
    noise = torch.randn(values.shape, generator=generator, dtype=torch.float64).to(tensor.device)
    return (values * (1 + distance * noise))[indices].view(tensor.shape).to(dtype)


def _errors(
    random: RandomFunction, got: _Results, exact: _Results, references: Sequence[_Results]
) -> list[str]:
    """Describes the results in ``got`` that are wrong; the list is empty if all are right.

    ``references`` are results of PyTorch: of the call, in fp32, and with errors on perturbed inputs.
    """
    descriptions = []
    # The largest exact value, at least one; faults make some values much larger.
    usual = 1.0
    for t in exact.tensors:
        if t is not None and t.numel():
            largest = t.detach().double().nan_to_num().abs().clamp(max=1e3).max().item()
            usual = max(usual, largest)
    all_tensors = [results.tensors for results in (got, exact, *references)]
    for number, (result, want, *natives) in enumerate(zip(*all_tensors, strict=True)):
        if result is None or want is None:
            continue
        what = f"result {number} of {len(got.outputs)} outputs and {len(got.grads)} gradients"
        if result.shape != want.shape or result.dtype != natives[0].dtype:
            expected = f"{natives[0].dtype} {want.shape}"
            descriptions.append(f"{what}: {result.dtype} {result.shape}, expected {expected}")
            continue
        if number >= len(got.outputs) and _has_unsettled_gradients(random, exact):
            continue
        difference = _difference(
            result.detach(),
            want.detach(),
            [native.detach() for native in natives if native is not None],
            usual,
            _units(random, got, result.dtype),
            by_row=random.is_harsh,
            is_lenient=number >= _first_lenient(random, got),
        )
        if difference:
            descriptions.append(f"{what}: {difference}")
    return descriptions


def _units(random: RandomFunction, got: _Results, dtype: torch.dtype) -> float:
    """The units of roundoff of ``dtype`` that a result of this dtype may be off."""
    units = 10.0
    if dtype == torch.float64:  # the exact result is fp64, too, so it has as many roundings
        units = 60.0 if "**" in random.source else 20.0
    # An output of a narrower dtype is rounded before the function uses it.
    if dtype.is_floating_point:
        of_outputs = [unit_roundoff(out.dtype) for out in got.outputs if out.is_floating_point()]
        units *= max([1.0, *[unit / unit_roundoff(dtype) for unit in of_outputs]])
    return units * (316.0 if random.has_short_norms else 1.0)


def _first_lenient(random: RandomFunction, got: _Results) -> int:
    """Returns the index of the first result that may be a number where PyTorch has NaN.

    These are all second derivatives, because PyTorch may have NaN at a kink. If the function leaves
    out some columns, gradients are such results, too: PyTorch multiplies the zero gradients of
    these columns by numbers that may be infinite.
    """
    return len(got.outputs) + (0 if random.has_parts else len(got.grads))


def _has_unsettled_gradients(random: RandomFunction, exact: _Results) -> bool:
    """Whether PyTorch's gradients depend on the width of the CPU's vectors.

    At NaN, the gradient of `hardtanh` and similar functions is zero or NaN in whole vectors. In
    the remaining elements it is the cotangent.
    """
    return any(name in random.source for name in _BY_VECTORS) and any(
        bool(out.isnan().any()) for out in exact.outputs
    )


def _difference(
    got: Tensor,
    exact: Tensor,
    natives: Sequence[Tensor],
    usual: float,
    units: float,
    *,
    by_row: bool,
    is_lenient: bool,
) -> str:
    """Describes how a result is wrong; returns "" if it is right.

    An infinity or NaN must also be in the exact result, rounded to the dtype, or in one of
    PyTorch's. The error of other elements is at most twice the largest of PyTorch's, plus a floor.

    The floor is ``units`` units of roundoff of the largest result, or of ``usual`` if that is
    larger. There are ten units for ten statements, and more for powers in fp64, which contain a
    logarithm. Values and cotangents are of order one. Smaller results are differences of such
    values; norms of one or two columns magnify these differences by 316.

    Args:
        got: the result.
        exact: the result in fp64.
        natives: results of PyTorch.
        usual: the usual size of a value.
        units: the allowed units of roundoff.
        by_row: whether each row has an error and a size of its own, because some rows have infinite
            or large numbers.
        is_lenient: whether a number is right where the exact result is NaN.
    """
    if not got.is_floating_point():
        # An integer is wrong only if all results of PyTorch agree with the exact one there.
        differs = (got != exact) & torch.stack([native == exact for native in natives]).all(0)
        if not differs.any():
            return ""
        return f"{got[differs][:5].tolist()}, expected {exact[differs][:5].tolist()}"
    dtype = got.dtype
    kind = _kind(got)
    kinds = [_kind(reference.to(dtype)) for reference in (exact, *natives)]
    is_expected = torch.stack([kind == expected for expected in kinds]).any(0)
    if is_lenient:
        is_expected |= (kind == 0) & exact.isnan()
    if not is_expected.all():
        return f"{got[~is_expected][:5].tolist()}, expected {exact[~is_expected][:5].tolist()}"
    exact, got = exact.double(), got.double()
    comparable = got.isfinite() & exact.isfinite()
    error, *errors = [
        torch.where(comparable & result.isfinite(), (result.double() - exact).abs(), 0.0)
        for result in (got, *natives)
    ]
    native, size = torch.stack(errors).amax(0), torch.where(comparable, exact.abs(), 0.0)
    if by_row and got.dim():
        native, size = native.amax(-1, keepdim=True), size.amax(-1, keepdim=True)
    elif got.numel():
        native, size = native.amax(), size.amax()
    allowed = (
        2 * native
        + units * unit_roundoff(dtype) * size.clamp(min=usual)
        + torch.finfo(dtype).smallest_normal
    )
    excess = error - allowed
    if not got.numel() or excess.max() <= 0:
        return ""
    worst = int(excess.argmax())
    value, expected = got.flatten()[worst], exact.flatten()[worst]
    tolerance = allowed.expand_as(error).flatten()[worst]
    return (
        f"{int((excess > 0).sum())} of {got.numel()} elements, such as {worst}: "
        f"{value:.8g}, expected {expected:.8g}, allowed {tolerance:.3g}"
    )


def _kind(tensor: Tensor) -> Tensor:
    """Returns a number for each element: 0 finite, 1 minus infinity, 2 infinity, 3 NaN."""
    return tensor.isnan() * 3 + tensor.isposinf() * 2 + tensor.isneginf()


# --- the command ----------------------------------------------------------------------------------


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many functions")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first function")
    parser.add_argument(
        "--reasons", action="store_true", help="print the reasons for refusals, with first seeds"
    )
    args = parser.parse_args()
    counts: dict[str, int] = collections.Counter()
    reasons: dict[str, list[int]] = {}
    for seed in range(args.seed, args.seed + args.count):
        result, reason = outcome(seed)
        counts[result] += 1
        if result == "wrong":
            print(f"--- wrong: {reason}\n", flush=True)
        elif result != "right":
            reasons.setdefault(reason.partition("\n")[0], []).append(seed)
    if args.reasons:
        for reason, seeds in sorted(reasons.items(), key=lambda item: -len(item[1])):
            print(f"{len(seeds):5} {reason} ({', '.join(map(str, seeds[:4]))})")
    print(
        ", ".join([f"{counts[name]} {name}" for name in ("right", "refused", "invalid", "wrong")])
    )
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    import interpreter

    interpreter.install()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new tensors with NaN
    fusedops.core.calls.operator.Operator.native_elements = 0
    sys.exit(_main())
