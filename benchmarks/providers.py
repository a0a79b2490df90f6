"""The contenders: fusedops and what its users could pick instead.

A provider is a function of a spec that returns a callable with the sample's keywords, or None where
it has no such operator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

import fusedops
from fusedops.core.spec import Spec

from .cases import Case
from .targets import TARGETS

__all__ = ["PROVIDERS", "Call", "build", "fresh_compiler", "worthwhile"]

Call = Callable[..., Any]


def _fusedops(spec: Spec) -> Call:
    return spec.call


def _eager(spec: Spec) -> Call:
    return spec.eager


def _eager_combined(spec: Spec) -> Call | None:
    return spec.combined


def _compile(spec: Spec) -> Call:
    return torch.compile(spec.combined or spec.eager, fullgraph=True, dynamic=False)


def _compile_max_autotune(spec: Spec) -> Call:
    return torch.compile(
        spec.combined or spec.eager,
        fullgraph=True,
        dynamic=False,
        mode="max-autotune-no-cudagraphs",
    )


def _rowwise(spec: Spec) -> Call:
    """The composite expression as generated kernels."""
    if isinstance(spec.eager, partial):
        generated = fusedops.rowwise(spec.eager.func, strict=True)
        return partial(generated, *spec.eager.args, **spec.eager.keywords)
    return fusedops.rowwise(spec.eager, strict=True)


def _liger(spec: Spec) -> Call | None:
    return _peer("liger", spec.liger)


def _transformers(spec: Spec) -> Call | None:
    return _peer("transformers", spec.transformers)


def _peer(name: str, make: Callable[[], Call] | None) -> Call | None:
    if make is None:
        return None
    try:
        return make()
    except ImportError as error:
        _warn_once(f"{name}: left out, {error}")
        return None


PROVIDERS: dict[str, Callable[[Spec], Call | None]] = {
    "fusedops": _fusedops,
    "eager": _eager,
    "eager_combined": _eager_combined,
    "compile": _compile,
    "compile_max_autotune": _compile_max_autotune,
    "rowwise": _rowwise,
    "liger": _liger,
    "transformers": _transformers,
}


def build(name: str, spec: Spec) -> Call | None:
    """The provider's callable for an operator, or None where it has none."""
    return PROVIDERS[name](spec)


def worthwhile(name: str, case: Case, mode: str, *, named: bool) -> bool:
    """Whether a provider is timed there.

    Generated kernels only where they are named: ``python -m benchmarks generated`` has all of them.
    Max-autotune takes seconds a shape to compile, so that it runs forward + backward only, and,
    unless it was named, only on shapes with a target.
    """
    if name == "rowwise":
        return named
    if name != "compile_max_autotune":
        return True
    wanted = any(
        (t.op, t.shape, t.dtype) == (case.op, case.shape, case.dtype_name) for t in TARGETS
    )
    return mode == "fwd_bwd" and (named or (wanted and not case.launch_bound))


def fresh_compiler() -> None:
    """Forgets what torch.compile compiled.

    Else each case's guards would be searched past those of all before it.
    """
    torch.compiler.reset()
    # Modes, dtypes and providers share one code object; a limit that is hit would raise under
    # fullgraph=True.
    torch._dynamo.config.recompile_limit = 64


@cache
def _warn_once(message: str) -> None:
    print(message, file=sys.stderr)
