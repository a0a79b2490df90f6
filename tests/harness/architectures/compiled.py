"""The compile backend without Inductor, which takes seconds a model to compile for a CPU.

A graph's regions are operators as they are under ``torch.compile(backend="fusedops")``, and PyTorch
differentiates and partitions the graph as it does for Inductor; then the graph is run as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

from fusedops.backend.entry import _autocast_of, _with_operators
from fusedops.backend.report import CompileReport

__all__ = ["compiled", "compiled_alone"]


def compiled(model: nn.Module, **options: Any) -> CompileReport:
    """Compiles a model in place.

    The report is filled by the first call, and again where torch.compile traces anew.
    """
    report = CompileReport()

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        made = _with_operators(gm, inputs, report)
        _raise_errors(report)
        with _autocast_of(report):
            return _aot(made, list(inputs))

    _compile(model, backend, options)
    return report


def _raise_errors(report: CompileReport) -> None:
    """A graph that is left because of an exception is a bug, if one that users need not see."""
    errors = [reason for reason in report.left if re.match(r"\w*(Error|Exception): ", reason)]
    assert not errors, errors


def compiled_alone(model: nn.Module, **options: Any) -> None:
    """The same without our operators."""
    _compile(model, lambda gm, inputs: _aot(gm, list(inputs)), options)


def _compile(model: nn.Module, backend: Callable[..., Any], options: dict[str, Any]) -> None:
    """As `nn.Module.compile`, which passes over models whose own class is PyTorch's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    torch._dynamo.reset()
    model._compiled_call_impl = torch.compile(call, backend=backend, **options)


def _nothing(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return gm.forward


_aot = aot_autograd(fw_compiler=_nothing, partition_fn=min_cut_rematerialization_partition)
