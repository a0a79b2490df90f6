"""The providers that are compared: fusedops and its alternatives.

A provider is a function that returns, for a spec, a callable that takes the sample's keywords. It
returns None if the provider has no such operator.
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
    """Returns the eager expression compiled by `fusedops.rowwise`."""
    if isinstance(spec.eager, partial):
        generated = fusedops.rowwise(spec.eager.func, strict=True)
        return partial(generated, *spec.eager.args, **spec.eager.keywords)
    return fusedops.rowwise(spec.eager, strict=True)


def _liger(spec: Spec) -> Call | None:
    return _peer("liger", spec.liger)


def _transformers(spec: Spec) -> Call | None:
    return _peer("transformers", spec.transformers)


def _peer(name: str, make: Callable[[], Call] | None) -> Call | None:
    """Returns another package's operator, or None if it has none or is not installed."""
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
    """Returns the provider's callable for an operator, or None if it has none."""
    return PROVIDERS[name](spec)


def worthwhile(name: str, case: Case, mode: str, *, named: bool) -> bool:
    """Returns whether a provider is timed on a case in a mode.

    ``named`` is whether the command line names providers. Generated kernels are timed only if they
    are named: ``python -m benchmarks generated`` has all of them. Max-autotune takes seconds to
    compile for each shape. So it is timed only in forward + backward and, unless it is named, only
    on large shapes with a target.
    """
    if name == "rowwise":
        return named
    if name != "compile_max_autotune":
        return True
    if mode != "fwd_bwd":
        return False
    if named:
        return True
    key = (case.op, case.shape, case.dtype_name)
    has_target = key in {(t.op, t.shape, t.dtype) for t in TARGETS}
    return has_target and not case.launch_bound


def fresh_compiler() -> None:
    """Resets torch.compile.

    Otherwise each call would check the guards of all earlier cases before those of its own.
    """
    torch.compiler.reset()
    # Modes, dtypes and providers share one code object. With fullgraph=True it is an error to reach
    # the limit of its compilations.
    torch._dynamo.config.recompile_limit = 64


@cache
def _warn_once(message: str) -> None:
    print(message, file=sys.stderr)
