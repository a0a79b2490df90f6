"""Compares a provider's outputs and gradients with an fp64 reference, before it is timed.

With dropout, every provider draws its own mask. The mask is recovered from the gradients: the
residual's gradient is dz, and that of x is dz times the scaled mask. With this mask the reference
must agree with the output, with every gradient, and with the forward without autograd.
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
    """The result of a comparison.

    Attributes:
        wrong: what is wrong, by mode; empty if nothing is.
        overwrites: whether the provider writes into the gradients of its outputs.
    """

    wrong: dict[str, str] = field(default_factory=dict)
    overwrites: bool = False


@dataclass
class _Results:
    """The outputs and gradients of a call."""

    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor]

    def items(self) -> list[tuple[str, Tensor]]:
        """Returns all tensors with their names for messages."""
        named = [(f"output {i}", out) for i, out in enumerate(self.outputs)]
        return named + [
            (f"gradient of {name}", gradient) for name, gradient in self.gradients.items()
        ]


class Oracle:
    """The reference for one case, and eager's error: other providers may have twice that error."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        torch.manual_seed(_SEED)
        sample = case.spec.benchmark(case.sides, case.dtype, device)
        self.tensors: dict[str, Tensor | None] = {}
        for name, tensor in sample.tensors.items():
            if tensor is not None:
                tensor = tensor.detach().requires_grad_(tensor.is_floating_point())
            self.tensors[name] = tensor
        self.options, self.p = dict(sample.options), sample.p
        if self.p and "residual" not in self.tensors:
            # The mask cannot be recovered from the gradients, so the case is compared without
            # dropout.
            self.options, self.p = self.options | {"p": 0.0}, 0.0
        outputs = _tuple(case.spec.eager(**self.tensors, **self.options))
        self.cotangents = tuple(torch.randn_like(out) for out in outputs)
        self.exact: _Results | None = None
        eager = self._run(case.spec.eager, self.cotangents)
        self.eager_dtypes = {name: tensor.dtype for name, tensor in eager.items()}
        exact = self._reference(eager, 1.0 - self.p)
        self.eager_error = {
            name: _error(tensor, expected) for name, tensor, expected in _pairs(eager, exact)
        }

    def judge(self, provider: str, call: Call, modes: Sequence[str] = MODES) -> Verdict:
        """Runs the provider as it will be timed, and compares its results.

        It is run with autograd, and without it under the same seed.
        """
        copies = tuple(cotangent.clone() for cotangent in self.cotangents)
        results = self._run(call, copies)
        is_unchanged = map(torch.equal, copies, self.cotangents)
        verdict = Verdict(overwrites=not all(is_unchanged))
        exact = self._reference(results, _keep_probability(provider, self.p, self.device))
        problem = self._keep_rate(results) or self._compare(results, exact)
        if problem:
            verdict.wrong["fwd_bwd"] = problem
        if "fwd" in modes:
            torch.manual_seed(_SEED)
            with torch.no_grad():
                forward_alone = _Results(_tuple(call(**self.tensors, **self.options)), {})
            problem = self._compare(forward_alone, exact)
            if problem:
                verdict.wrong["fwd"] = problem + " (without autograd, under the same seed)"
        return verdict

    def _run(self, call: Call, cotangents: tuple[Tensor, ...]) -> _Results:
        """Returns the outputs and gradients of a call, always with the same seed."""
        torch.manual_seed(_SEED)
        inputs = {name: t for name, t in self.tensors.items() if t is not None and t.requires_grad}
        outputs = _tuple(call(**self.tensors, **self.options))
        gradients = torch.autograd.grad(outputs, tuple(inputs.values()), cotangents)
        return _Results(
            tuple(out.detach() for out in outputs), dict(zip(inputs, gradients, strict=True))
        )

    def _reference(self, results: _Results, keep_probability: float) -> _Results:
        """Returns the fp64 results with the mask that the provider drew."""
        if not self.p:
            self.exact = self.exact or self._evaluate(None, 1.0)
            return self.exact
        dx, dz = results.gradients["x"], results.gradients["residual"]
        keep = dx != 0
        # If dz underflowed to 0, so did dx, whether the element was kept or not. The element then
        # counts as kept if this gives an output nearer to the provider's.
        unknown = (dx == 0) & (dz == 0)
        if bool(unknown.any()):
            kept = self._evaluate(keep | unknown, keep_probability)
            dropped = self._evaluate(keep & ~unknown, keep_probability)
            kept_error = (kept.outputs[0] - results.outputs[0]).abs()
            dropped_error = (dropped.outputs[0] - results.outputs[0]).abs()
            keep = torch.where(unknown, kept_error < dropped_error, keep)
        return self._evaluate(keep, keep_probability)

    def _evaluate(self, keep: Tensor | None, keep_probability: float) -> _Results:
        """Returns the fp64 results with a keep mask."""
        tensors: dict[str, Any] = {}
        for name, t in self.tensors.items():
            if t is None:
                tensors[name] = None
            else:
                tensors[name] = t.detach().double().requires_grad_(t.requires_grad)
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

    def _keep_rate(self, results: _Results) -> str:
        """Returns what is wrong with the rate of kept elements, or the empty string.

        Six standard deviations are allowed: a correct generator fails once in 10^9 cases.
        """
        if not self.p:
            return ""
        dx, dz = results.gradients["x"], results.gradients["residual"]
        known = (dx != 0) | (dz != 0)
        count = max(1, int(known.sum()))
        rate = int((dx != 0).sum()) / count
        # Some providers round p to 16 bits, which changes the rate by at most 2^-17.
        allowed = 6.0 * math.sqrt(self.p * (1.0 - self.p) / count) + 2.0**-17
        if abs(rate - (1.0 - self.p)) <= allowed:
            return ""
        return f"keeps {rate:.5f} of the elements, expected {1.0 - self.p:.5f} within {allowed:.5f}"

    def _compare(self, results: _Results, exact: _Results) -> str:
        """Returns the first result that is wrong, or the empty string.

        The allowed error is twice eager's, plus one rounding to the dtype, plus the random walk of
        the roundings of a sum in fp32.
        """
        for name, tensor, expected in _pairs(results, exact):
            if tensor.dtype != self.eager_dtypes[name] or tensor.shape != expected.shape:
                described = f"{self.eager_dtypes[name]} {tuple(expected.shape)}"
                return f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {described}"
            # The number of terms of a sum. For a tensor of rows it is a row's width, else the
            # number of elements that are summed into one, as in a parameter's gradient.
            has_rows = any(expected.shape == c.shape for c in self.cotangents)
            if has_rows:
                terms = expected.shape[-1]
            else:
                terms = self.case.elements // math.prod(expected.shape)
            accumulator = torch.promote_types(tensor.dtype, torch.float32)
            unit = _roundoff(tensor.dtype) + _roundoff(accumulator) * math.sqrt(terms)
            eager_error = self.eager_error[name]
            allowed = 2.0 * eager_error + unit * float(expected.abs().max())
            error = _error(tensor, expected)
            # Not ``>``, so that NaN fails too.
            if not error <= allowed:
                return f"{name} is off by {error:.3g}, allowed {allowed:.3g} (eager: {eager_error:.3g})"
        return ""


class ExactOracle:
    """The oracle of operators that do no arithmetic with floating-point numbers.

    Their outputs must be equal to those of the reference.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(_SEED)
        sample = case.spec.benchmark(case.sides, case.dtype, device)
        self.tensors, self.options = sample.tensors, sample.options
        self.exact = self._run(case.spec.reference)

    def judge(self, provider: str, call: Call, modes: Sequence[str] = ("fwd",)) -> Verdict:
        """Runs the provider on a copy of the inputs, as it may write to them."""
        for i, (out, exact) in enumerate(zip(self._run(call), self.exact, strict=True)):
            if out.dtype != exact.dtype or not torch.equal(out, exact):
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
    """Returns the oracle for the case's operator."""
    return ExactOracle(case, device) if case.spec.exact else Oracle(case, device)


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2.0


def _keep_probability(provider: str, p: float, device: torch.device) -> float:
    """Returns the keep probability by which the provider divides.

    The kernels of fusedops round p to a multiple of 2^-16.
    """
    runs_kernels = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    if provider == "fusedops" and runs_kernels:
        from fusedops.core.random import rng

        return rng.keep_probability(p)
    return 1.0 - p


def _pairs(results: _Results, exact: _Results) -> list[tuple[str, Tensor, Tensor]]:
    """Returns the name of each result, the result, and the exact result of that name."""
    exact_by_name = dict(exact.items())
    return [(name, tensor, exact_by_name[name]) for name, tensor in results.items()]


def _error(result: Tensor, exact: Tensor) -> float:
    """Returns the largest difference from the exact result."""
    if result.shape != exact.shape:
        return math.inf
    return float((result.double() - exact).abs().max())


def _tuple(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)
