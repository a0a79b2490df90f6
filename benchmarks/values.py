"""The gate before any timing: a provider's outputs and gradients against the fp64 reference.

With dropout on, every provider draws its own mask. It is read off the gradients: the residual's
gradient is dz and x's is dz times the scaled mask. One mask must then explain the output, every
gradient, and the forward without autograd.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .cases import MODES, Case
from .providers import Call

__all__ = ["ExactOracle", "Oracle", "Verdict", "oracle_of"]

_SEED = 2027


@dataclass
class Verdict:
    """The faults of a provider by mode, and whether it writes to the gradients of its outputs."""

    wrong: dict[str, str] = field(default_factory=dict)
    overwrites: bool = False


@dataclass
class _Results:
    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor]

    def items(self) -> list[tuple[str, Tensor]]:
        named = [(f"output {i}", out) for i, out in enumerate(self.outputs)]
        return named + [
            (f"gradient of {name}", gradient) for name, gradient in self.gradients.items()
        ]


class Oracle:
    """The reference for one case, and eager's error there, against which the others' are held."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        torch.manual_seed(_SEED)
        sample = case.spec.benchmark(case.sides, case.dtype, device)
        self.tensors = {
            name: None
            if tensor is None
            else tensor.detach().requires_grad_(tensor.is_floating_point())
            for name, tensor in sample.tensors.items()
        }
        self.options, self.p = dict(sample.options), sample.p
        if self.p and "residual" not in self.tensors:  # no gradient shows the mask
            self.options, self.p = self.options | {"p": 0.0}, 0.0
        outputs = _tuple(case.spec.eager(**self.tensors, **self.options))
        self.cotangents = tuple(torch.randn_like(out) for out in outputs)
        self.exact: _Results | None = None
        eager = self._run(case.spec.eager, self.cotangents)
        self.eager_dtypes = {name: tensor.dtype for name, tensor in eager.items()}
        exact = self._reference(eager, 1.0 - self.p)
        self.eager_error = {
            name: _error(tensor, true) for (name, tensor), (_, true) in _pairs(eager, exact)
        }

    def judge(self, provider: str, call: Call, modes: Sequence[str] = MODES) -> Verdict:
        """Runs the provider as the timing will.

        With autograd, and without it under the same seed.
        """
        passed = tuple(cotangent.clone() for cotangent in self.cotangents)
        results = self._run(call, passed)
        verdict = Verdict(
            overwrites=any(
                not torch.equal(a, b) for a, b in zip(passed, self.cotangents, strict=True)
            )
        )
        exact = self._reference(results, _keep_probability(provider, self.p, self.device))
        problem = self._keep_rate(results) or self._compare(results, exact)
        if problem:
            verdict.wrong["fwd_bwd"] = problem
        if "fwd" in modes:
            torch.manual_seed(_SEED)
            with torch.no_grad():
                alone = _Results(_tuple(call(**self.tensors, **self.options)), {})
            problem = self._compare(alone, exact)
            if problem:
                verdict.wrong["fwd"] = problem + " (without autograd, under the same seed)"
        return verdict

    def _run(self, call: Call, cotangents: tuple[Tensor, ...]) -> _Results:
        torch.manual_seed(_SEED)
        inputs = {n: t for n, t in self.tensors.items() if t is not None and t.requires_grad}
        outputs = _tuple(call(**self.tensors, **self.options))
        gradients = torch.autograd.grad(outputs, tuple(inputs.values()), cotangents)
        return _Results(
            tuple(out.detach() for out in outputs), dict(zip(inputs, gradients, strict=True))
        )

    def _reference(self, seen: _Results, keep_probability: float) -> _Results:
        """The fp64 results under the mask that the provider drew."""
        if not self.p:
            self.exact = self.exact or self._evaluate(None, 1.0)
            return self.exact
        dx, dz = seen.gradients["x"], seen.gradients["residual"]
        keep, unsure = dx != 0, (dx == 0) & (dz == 0)
        # Where dz underflowed, the mask is read off the outputs.
        if bool(unsure.any()):
            fits = [
                (self._evaluate(mask, keep_probability).outputs[0] - seen.outputs[0]).abs()
                for mask in (keep | unsure, keep & ~unsure)
            ]
            keep = torch.where(unsure, fits[0] < fits[1], keep)
        return self._evaluate(keep, keep_probability)

    def _evaluate(self, keep: Tensor | None, keep_probability: float) -> _Results:
        tensors: dict[str, Any] = {
            name: None if t is None else t.detach().double().requires_grad_(t.requires_grad)
            for name, t in self.tensors.items()
        }
        outputs = _tuple(
            self.case.spec.reference(
                **tensors, **self.options, keep=keep, keep_probability=keep_probability
            )
        )
        inputs = {name: t for name, t in tensors.items() if t is not None and t.requires_grad}
        cotangents = tuple(cotangent.double() for cotangent in self.cotangents)
        gradients = torch.autograd.grad(outputs, tuple(inputs.values()), cotangents)
        return _Results(
            tuple(out.detach() for out in outputs), dict(zip(inputs, gradients, strict=True))
        )

    def _keep_rate(self, seen: _Results) -> str:
        """Six standard deviations: a right generator fails once in 10^9 cases."""
        if not self.p:
            return ""
        dx, dz = seen.gradients["x"], seen.gradients["residual"]
        known = (dx != 0) | (dz != 0)
        count = max(1, int(known.sum()))
        rate = int((dx != 0).sum()) / count
        # p is rounded to 16 bits by some; that moves the rate by no more than 2^-17.
        allowed = 6.0 * math.sqrt(self.p * (1.0 - self.p) / count) + 2.0**-17
        if abs(rate - (1.0 - self.p)) <= allowed:
            return ""
        return f"keeps {rate:.5f} of the elements, expected {1.0 - self.p:.5f} within {allowed:.5f}"

    def _compare(self, seen: _Results, exact: _Results) -> str:
        """Twice eager's error, plus one rounding to the dtype, plus the random walk of an fp32 sum's roundings."""
        for (name, tensor), (_, true) in _pairs(seen, exact):
            if tensor.dtype != self.eager_dtypes[name] or tensor.shape != true.shape:
                wanted = f"{self.eager_dtypes[name]} {tuple(true.shape)}"
                return f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {wanted}"
            # The terms of a sum: a row's for rows, else those that are summed into each element, as
            # in a parameter's gradient.
            has_rows = any(true.shape == c.shape for c in self.cotangents)
            terms = true.shape[-1] if has_rows else self.case.elements // math.prod(true.shape)
            accumulator = torch.promote_types(tensor.dtype, torch.float32)
            unit = _roundoff(tensor.dtype) + _roundoff(accumulator) * math.sqrt(terms)
            allowed = 2.0 * self.eager_error[name] + unit * float(true.abs().max())
            error = _error(tensor, true)
            if not error <= allowed:  # so that NaN fails
                return f"{name} is off by {error:.3g}, allowed {allowed:.3g} (eager: {self.eager_error[name]:.3g})"
        return ""


class ExactOracle:
    """The oracle of operators that compute nothing with floating-point numbers.

    Outputs are the reference's, or wrong.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(_SEED)
        sample = case.spec.benchmark(case.sides, case.dtype, device)
        self.tensors, self.options = sample.tensors, sample.options
        self.exact = self._run(case.spec.reference)

    def judge(self, provider: str, call: Call, modes: Sequence[str] = ("fwd",)) -> Verdict:
        """Runs the provider on a copy of the inputs, as it may write to them."""
        for i, (seen, exact) in enumerate(zip(self._run(call), self.exact, strict=True)):
            if seen.dtype != exact.dtype or not torch.equal(seen, exact):
                return Verdict({"fwd": f"output {i} is not the reference's"})
        return Verdict()

    def _run(self, call: Call) -> tuple[Tensor, ...]:
        tensors = {
            name: None if tensor is None else tensor.clone()
            for name, tensor in self.tensors.items()
        }
        with torch.no_grad():
            return _tuple(call(**tensors, **self.options))


def oracle_of(case: Case, device: torch.device) -> Oracle | ExactOracle:
    """The oracle that suits the case's operator."""
    return ExactOracle(case, device) if case.spec.exact else Oracle(case, device)


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2.0


def _keep_probability(provider: str, p: float, device: torch.device) -> float:
    """The probability that the scale must undo: on the kernel path p is a multiple of 2^-16."""
    if provider == "fusedops" and (
        device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    ):
        from fusedops.core.random import rng

        return rng.keep_probability(p)
    return 1.0 - p


def _pairs(seen: _Results, exact: _Results) -> list[tuple[tuple[str, Tensor], tuple[str, Tensor]]]:
    """Each of the seen results beside the exact one of its name."""
    table = dict(exact.items())
    return [((name, tensor), (name, table[name])) for name, tensor in seen.items()]


def _error(seen: Tensor, exact: Tensor) -> float:
    if seen.shape != exact.shape:
        return math.inf
    return float((seen.double() - exact).abs().max())


def _tuple(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)
