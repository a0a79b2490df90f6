"""Random row-wise functions, each held to itself in fp64: right, refused by name, or wrong.

``TRITON_INTERPRET=1 python tests/harness/rowwise_random.py --count 2000 --seed 0`` prints how many are,
with what is wrong and why others are refused; ``--seed N --count 1`` is the way back to one of
them.
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

# Runs on numbers a rounding away, where one alone does not tell how ill-conditioned a function is.
_DRAWS = 12
# Activations whose gradients at NaN depend on the width of a CPU's vectors.
_BY_VECTORS = ("F.elu", "F.selu", "F.celu", "hardswish", "hardtanh", "relu6", "softshrink")
# Relative to an input: roundings differ, and what they are multiplied by is the same to a part in a
# hundred.
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
        """All of them."""
        return [*self.outputs, *self.grads, *self.others]


def outcome(seed: int) -> tuple[str, str]:
    """ "right", "refused", "invalid" where PyTorch itself fails, or "wrong"; and why."""
    random = random_function(seed)
    with in_tiles() if random.tiled else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return check(random)
        except fusedops.NotRowwiseError as error:
            is_named = str(error).startswith("function: ") and "cannot be traced" not in str(error)
            if not is_named and not _is_of_one_row(random):
                return "wrong", f"it is refused without a name: {error}\n{_shown(random)}"
            return "refused", str(error)
        except Exception as error:  # noqa: BLE001 - whatever else it is, the function is not right
            return "wrong", f"{type(error).__name__}: {error}\n{_shown(random)}"


def _is_of_one_row(random: RandomFunction) -> bool:
    """Whether PyTorch fails with more rows than one."""
    sizes = {
        axis: max(size, 2) if axis in "abs" else size for axis, size in random.sizes[0].items()
    }
    try:
        random.function(*replace(random, sizes=[sizes]).tensors(0, DEVICE))
    except Exception:  # noqa: BLE001 - shapes that PyTorch refuses
        return True
    return False


@contextlib.contextmanager
def in_tiles() -> Iterator[None]:
    """Within it programs hold parts of rows."""
    config = Config(block_n=16, rows=2, warps=1, per_sm=1)
    with (
        mock.patch("fusedops.compiler.operator.LONGEST_ROW", 8),
        mock.patch("fusedops.compiler.operator._LONGEST_ROW_16BIT", 8),
        mock.patch("fusedops.compiler.configs._of_long_rows", return_value=config),
    ):
        yield


def _shown(random: RandomFunction) -> str:
    how = [name for name in ("second", "batched", "tiled", "stored") if getattr(random, name)]
    return "\n".join(
        [
            f"seed {random.seed} {random.used} {' '.join(how)}",
            random.source,
            *map(str, random.given),
            *map(str, random.sizes),
        ]
    )


def check(random: RandomFunction) -> tuple[str, str]:
    """Raises where a result is wrong, or the function refused.

    "invalid" where PyTorch fails in the first call, else "right".
    """
    fused = fusedops.rowwise(random.function, strict=True)
    for call in range(len(random.sizes)):
        if call and random.stored:
            fused = fusedops.rowwise(random.function, strict=True)
        tensors = random.tensors(call, DEVICE)
        try:
            native, like = _native(random, tensors)
        except Exception as error:  # noqa: BLE001 - shapes or arguments that PyTorch refuses
            _assert_fails(random, fused, tensors, error)
            if not call:
                return "invalid", f"{type(error).__name__}: {error}"
            continue
        before = [tensor.clone() for tensor in tensors]
        got = _run(random, fused, tensors, native.outputs, at_once=True)
        assert all(map(_is_same, tensors, before)), "an argument was written to"
        _compare(random, like, got, native)
    return "right", ""


def _native(random: RandomFunction, tensors: Sequence[Tensor]) -> tuple[_Results, Sequence[Tensor]]:
    """PyTorch's results, and the tensors that they are of.

    A fused function does not depend on layouts: within it all arguments are contiguous, as
    docs/rowwise.md has it. Where PyTorch has no view of an argument's strides, the results are
    those of contiguous copies. A function that takes such a view of a tensor of its own fails for
    these, too.
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
    try:
        random.function(*tensors)
    except Exception:  # noqa: BLE001
        pass
    else:  # only the derivative fails there
        return
    try:
        fused(*tensors)
    except Exception:  # noqa: BLE001
        return
    # PyTorch's gather raises an error for an index out of range, for which the host would have to
    # wait for a kernel.
    if "gather" in random.source:
        return
    raise AssertionError(f"it has a result where PyTorch raises {type(error).__name__}: {error}")


def _is_same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(), other.nan_to_num()
    )


def _run(
    random: RandomFunction,
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    like: Sequence[Tensor] | None = None,
    *,
    at_once: bool = False,
) -> _Results:
    """A call with its derivatives.

    Cotangents are rounded to the dtypes of the outputs ``like`` them.
    """
    leaves = [
        t.detach().requires_grad_(given.differentiated)
        for t, given in zip(tensors, random.given, strict=True)
    ]
    sources = [t for t in leaves if t.requires_grad]
    generator = torch.Generator().manual_seed(random.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        returned = function(*leaves)
        outputs = [returned] if isinstance(returned, Tensor) else list(returned)
        result = _Results(type(returned), outputs, [], [])
        ends = []
        for out, rounded, used in zip(outputs, like or outputs, random.used, strict=False):
            cotangent = torch.randn((2, *out.shape), generator=generator, dtype=torch.float64)
            if out.requires_grad and used:
                ends.append((out, cotangent.to(out.device, rounded.dtype).to(out.dtype)))
        if not ends or not sources:
            return result
        outs, along = zip(*ends, strict=True)
        smooth = random.second and not random.is_harsh
        first = [cotangent[0] for cotangent in along]
        result.grads = list(
            torch.autograd.grad(
                outs, sources, first, allow_unused=True, create_graph=smooth, retain_graph=True
            )
        )
        if random.batched:
            result.others += _along_two(outs, sources, along, at_once=at_once)
        if smooth:
            result.others += _second(result.grads, sources, generator)
    return result


def _along_two(
    outs: Any, sources: Sequence[Tensor], along: Sequence[Tensor], *, at_once: bool
) -> list[Tensor]:
    """Gradients along two cotangents.

    At once, or, as some of PyTorch's differ then, one after the other.
    """
    if at_once:
        result = torch.autograd.grad(
            outs, sources, along, allow_unused=True, is_grads_batched=True, retain_graph=True
        )
        return [
            t.new_zeros(2, *t.shape) if g is None else g
            for g, t in zip(result, sources, strict=True)
        ]
    both = [
        torch.autograd.grad(
            outs,
            sources,
            [cotangent[which] for cotangent in along],
            allow_unused=True,
            retain_graph=True,
        )
        for which in range(2)
    ]
    return [
        torch.stack([torch.zeros_like(t) if g is None else g for g in one])
        for t, *one in zip(sources, *both, strict=True)
    ]


def _second(
    grads: Sequence[Tensor | None], sources: Sequence[Tensor], generator: torch.Generator
) -> list[Tensor]:
    """Gradients of gradients along random directions; zero where there are none."""
    directions = [
        torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device) for t in sources
    ]
    terms = [
        (g.double() * direction).sum()
        for g, direction in zip(grads, directions, strict=True)
        if g is not None and g.requires_grad
    ]
    result = (
        torch.autograd.grad(sum(terms), sources, allow_unused=True)
        if terms
        else [None] * len(sources)
    )
    return [torch.zeros_like(t) if g is None else g for g, t in zip(result, sources, strict=True)]


# --- comparison -----------------------------------------------------------------------------------


def _compare(
    random: RandomFunction, tensors: Sequence[Tensor], got: _Results, native: _Results
) -> None:
    """Compares kinds, dtypes, shapes, layouts, values and derivatives of two results."""
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
    names = [given.name for given in random.given if given.differentiated]
    assert len(got.grads) == len(native.grads), "gradients of one alone"
    for name, one, like in zip(names, got.grads, native.grads, strict=False):
        # Of what is left out of a row PyTorch has a gradient of zeros.
        is_nothing = one is None and random.has_parts and like is not None and not like.any()
        assert (one is None) == (like is None) or is_nothing, (
            f"gradient of {name}: {one}, expected {like}"
        )
    exact = _exactly(random, tensors, native)
    # Runs on numbers a rounding away come after a first comparison: few need them.
    others = list(itertools.chain([native], _narrower(random, tensors, native)))
    wrong = _wrong(random, got, exact, others)
    if wrong:
        wrong = _wrong(random, got, exact, [*others, *_nearby(random, tensors, native, exact)])
    assert not wrong, "\n".join(wrong)


def _exactly(random: RandomFunction, tensors: Sequence[Tensor], native: _Results) -> _Results:
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    with _default(torch.float64):  # of products of integers and numbers
        return _run(random, random.exact, wide, native.outputs)


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _is_wide(random: RandomFunction) -> bool:
    """Whether kernels compute in fp64."""
    return "double()" in random.source or any(
        given.dtype == torch.float64 for given in random.given
    )


def _narrower(
    random: RandomFunction, tensors: Sequence[Tensor], native: _Results
) -> Iterator[_Results]:
    """PyTorch's results in the dtype that kernels compute in."""
    if not _is_wide(random):
        yield _run(
            random,
            random.function,
            [t.float() if t.is_floating_point() else t for t in tensors],
            native.outputs,
        )


def _nearby(
    random: RandomFunction, tensors: Sequence[Tensor], native: _Results, exact: _Results
) -> Iterator[_Results]:
    """PyTorch's results as far from exact ones as on inputs a rounding away.

    Of these, and in the dtypes of the call.

    And on inputs `_NEAR` away: on those a rounding away the steps of a formula round alike, as x
    cos x - sin x beside zero, of which the second derivative of sinc divides what is left by x
    squared; its error is u / x^2 times what roundings come to. Those of other inputs show how much
    that is, as far as a function is as ill-conditioned there: they are that near.
    """
    wide, acc = _is_wide(random), torch.float64 if _is_wide(random) else torch.float32
    casts = {torch.float32: "float()", torch.float16: "half()", torch.bfloat16: "bfloat16()"}
    dtypes = [dtype for dtype, cast in casts.items() if cast in random.source]
    dtypes += [given.dtype for given in random.given if given.dtype.is_floating_point]
    coarsest = max(unit_roundoff(dtype) for dtype in (acc, *dtypes))
    for draw in range(_DRAWS):
        moved = [_moved(t, draw, acc, unit_roundoff(acc)) for t in tensors]
        yield (
            _exactly(random, moved, native)
            if wide
            else _run(random, random.function, moved, native.outputs)
        )
        for by in (coarsest, max(coarsest, _NEAR)):
            near = [_moved(t, draw, t.dtype, by) for t in tensors]
            eager, at_near = (
                _run(random, random.function, near, native.outputs),
                _exactly(random, near, native),
            )
            for one, there, here in zip(eager.tensors, at_near.tensors, exact.tensors, strict=True):
                if (
                    one is not None
                    and there is not None
                    and here is not None
                    and one.is_floating_point()
                ):
                    one.data = here.detach() + (one.detach().double() - there.detach())
            yield eager


def _moved(tensor: Tensor, draw: int, dtype: torch.dtype, by: float) -> Tensor:
    """The tensor with each number as another rounding of it would be; equal numbers stay equal."""
    if not tensor.is_floating_point():
        return tensor
    values, places = tensor.double().unique(return_inverse=True)
    generator = torch.Generator().manual_seed(draw)
    factors = 1 + by * torch.randn(values.shape, generator=generator, dtype=torch.float64).to(
        tensor.device
    )
    return (values * factors)[places].view(tensor.shape).to(dtype)


def _wrong(
    random: RandomFunction, got: _Results, exact: _Results, others: Sequence[_Results]
) -> list[str]:
    """The errors of results; an empty list if all are right."""
    result = []
    results = [one.tensors for one in (got, exact, *others)]
    # Of order one, whatever faults there are beside.
    usual = max(
        [
            1.0,
            *[
                t.detach().double().nan_to_num().abs().clamp(max=1e3).max().item()
                for t in exact.tensors
                if t is not None and t.numel()
            ],
        ]
    )
    for number, (one, want, *natives) in enumerate(zip(*results, strict=True)):
        if one is None or want is None:
            continue
        what = f"result {number} of {len(got.outputs)} outputs and {len(got.grads)} gradients"
        if one.shape != want.shape or one.dtype != natives[0].dtype:
            result.append(
                f"{what}: {one.dtype} {one.shape}, expected {natives[0].dtype} {want.shape}"
            )
            continue
        if number >= len(got.outputs) and _is_unsettled(random, exact):
            continue
        is_lenient = number >= _first_lenient(random, got)
        references = [native.detach() for native in natives if native is not None]
        units = 10.0
        if one.dtype == torch.float64:  # so is the exact result, and rounded as often
            units = 60.0 if "**" in random.source else 20.0
        # What is returned in a narrower dtype is used as rounded.
        returned = [unit_roundoff(out.dtype) for out in got.outputs if out.is_floating_point()]
        if one.is_floating_point():
            units *= max([1.0, *[unit / unit_roundoff(one.dtype) for unit in returned]])
        units *= 316.0 if random.has_short_norms else 1.0
        why = _difference(
            one.detach(),
            want.detach(),
            references,
            usual,
            units,
            by_row=random.is_harsh,
            is_lenient=is_lenient,
        )
        result += [f"{what}: {why}"] if why else []
    return result


def _first_lenient(random: RandomFunction, got: _Results) -> int:
    """The index of the first result that may be a number where PyTorch has NaN.

    A column that nothing is computed of has no gradient, where PyTorch multiplies zeros by what may
    be infinite; and at a kink it has no second derivative.
    """
    return len(got.outputs) + (0 if random.has_parts else len(got.grads))


def _is_unsettled(random: RandomFunction, exact: _Results) -> bool:
    """Whether PyTorch's gradients depend on the width of the CPU's vectors.

    At NaN those of `hardtanh` and of the like are zero or NaN in whole vectors, and all of the
    gradient in what is left over.
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
    """How a result is wrong; "" where it is right.

    Infinities and NaN are where the exact result has them, rounded to the dtype, or one of
    PyTorch's. Errors are at most twice the largest of PyTorch's; the floor is a unit of roundoff
    for each of ten statements (of powers in fp64, that of a logarithm), of the largest result:
    values and cotangents are of order one, and what is smaller is the difference of some that are
    not, in norms of one or two columns of some 316 times as large. With infinities and large
    numbers about, a row is held to what its own errors and results are.
    """
    if not got.is_floating_point():
        differs = (got != exact) & torch.stack([native == exact for native in natives]).all(0)
        return (
            f"{got[differs][:5].tolist()}, expected {exact[differs][:5].tolist()}"
            if differs.any()
            else ""
        )
    dtype = got.dtype
    kind = _kind(got)
    known = torch.stack([kind == _kind(one.to(dtype)) for one in (exact, *natives)]).any(0)
    if is_lenient:
        known |= (kind == 0) & exact.isnan()
    if not known.all():
        return f"{got[~known][:5].tolist()}, expected {exact[~known][:5].tolist()}"
    exact, got = exact.double(), got.double()
    comparable = got.isfinite() & exact.isfinite()
    error, *errors = [
        torch.where(comparable & one.isfinite(), (one.double() - exact).abs(), 0.0)
        for one in (got, *natives)
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
    return (
        f"{int((excess > 0).sum())} of {got.numel()} elements, such as {worst}: {got.flatten()[worst]:.8g}, expected "
        f"{exact.flatten()[worst]:.8g}, allowed {allowed.expand_as(error).flatten()[worst]:.3g}"
    )


def _kind(tensor: Tensor) -> Tensor:
    """The kind of each element: finite, one of the infinities, or NaN."""
    return tensor.isnan() * 3 + tensor.isposinf() * 2 + tensor.isneginf()


# --- the command ----------------------------------------------------------------------------------


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many functions")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument(
        "--reasons", action="store_true", help="show of each reason for a refusal the first seed"
    )
    args = parser.parse_args()
    counts: dict[str, int] = collections.Counter()
    reasons: dict[str, list[int]] = {}
    for seed in range(args.seed, args.seed + args.count):
        result, why = outcome(seed)
        counts[result] += 1
        if result == "wrong":
            print(f"--- wrong: {why}\n", flush=True)
        elif result != "right":
            reasons.setdefault(why.partition("\n")[0], []).append(seed)
    for reason, seeds in (
        sorted(reasons.items(), key=lambda item: -len(item[1])) if args.reasons else ()
    ):
        print(f"{len(seeds):5} {reason} ({', '.join(map(str, seeds[:4]))})")
    print(
        ", ".join([f"{counts[name]} {name}" for name in ("right", "refused", "invalid", "wrong")])
    )
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    import interpreter

    interpreter.install()
    torch.use_deterministic_algorithms(True, warn_only=True)  # with memory full of NaN
    fusedops.core.calls.operator.Operator.native_elements = 0
    sys.exit(_main())
