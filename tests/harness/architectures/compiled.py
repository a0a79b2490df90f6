"""The compile backend without Inductor, which takes seconds to compile a model for a CPU.

The regions of a graph are replaced by operators as with ``torch.compile(backend="fusedops")``.
PyTorch differentiates and partitions the graph as it does for Inductor. Then the graph runs without
being compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

from fusedops.backend.entry import _autocast_of, _with_operators, backend
from fusedops.backend.report import CompileReport

__all__ = ["compiled", "compiled_alone", "compiled_with_eager_rest"]


def compiled(model: nn.Module, **options: Any) -> CompileReport:
    """Compiles a model in place, and returns its report.

    The first call adds to the report, and so does each call for which torch.compile traces again.
    """
    report = CompileReport()

    def with_operators(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graph_module = _with_operators(gm, inputs, report)
        _raise_errors(report)
        with _autocast_of(report):
            return _aot(graph_module, list(inputs))

    _compile(model, with_operators, options)
    return report


def compiled_with_eager_rest(model: nn.Module) -> None:
    """Compiles a model in place as users do, without Inductor and without AOTAutograd."""
    _compile(model, backend, {"options": {"fusedops.rest": "eager"}})


def _raise_errors(report: CompileReport) -> None:
    """Raises an error if a graph was left because of an exception: users may ignore that bug."""
    errors = [reason for reason in report.left if re.match(r"\w*(Error|Exception): ", reason)]
    assert not errors, errors


def compiled_alone(model: nn.Module, **options: Any) -> None:
    """Compiles a model in place without the operators of fusedops."""
    _compile(model, lambda gm, inputs: _aot(gm, list(inputs)), options)


def _compile(model: nn.Module, backend: Callable[..., Any], options: dict[str, Any]) -> None:
    """Like `nn.Module.compile`, which does not compile models whose class is PyTorch's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    torch._dynamo.reset()
    model._compiled_call_impl = torch.compile(call, backend=backend, **options)


def _without_compilation(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return gm.forward


_aot = aot_autograd(
    fw_compiler=_without_compilation, partition_fn=min_cut_rematerialization_partition
)
