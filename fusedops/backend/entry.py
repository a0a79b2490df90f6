"""`fusedops.compile`, `fusedops.explain`, and torch.compile's backend ``fusedops``."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import fx, nn

from ..core.compat.distributed import is_dtensor
from ..core.version import __version__
from . import joint, measuring, storing
from .capture import NotCapturedError, captured
from .eager import calls_operators, runnable
from .fusing import fused
from .fx import (
    JointPass,
    casts_recorded,
    compile_by_inductor,
    contiguous_tangents,
)
from .graphs import tensors_of
from .options import EAGER, INDUCTOR, Options, check_options, options_of, with_rest
from .passes import PASSES_OF_WHOLE_GRAPHS
from .passes.padding import returns_padded
from .report import RUNNERS, CompileReport, changes_in, operators_in
from .rewrite import Rewrite

__all__ = ["backend", "compile", "explain"]

_Compiled = TypeVar("_Compiled", bound=nn.Module | Callable[..., Any])


def compile(  # noqa: A001
    model: _Compiled,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    rest: str = INDUCTOR,
) -> _Compiled:
    """A compiled model in which row-wise regions are fused operators.

    The same as ``torch.compile(model, backend="fusedops", ...)``. Between its matrix products and
    attentions a model computes functions of rows: sums with biases, dropout and residuals, norms,
    activations. Each such region that pays becomes one kernel forward and one backward, as with
    `fusedops.rowwise`; Inductor compiles the rest of the graph. On a device without kernels, such
    as a CPU, Inductor compiles everything. If a graph cannot be captured, a ``RuntimeWarning``
    names the reason, and Inductor compiles it whole.

    With ``rest="eager"`` nothing is compiled but the regions' kernels. PyTorch's eager operators
    run the rest of the graph, and a graph that cannot be captured; autograd differentiates it, so
    that derivatives of any order exist.

    Args:
        model: a module or a function.
        fullgraph: as in `torch.compile`.
        dynamic: as in `torch.compile`.
        mode: as in `torch.compile`, for Inductor. With ``"max-autotune"`` and
            ``"max-autotune-no-cudagraphs"``, each kind of region is measured as an operator and
            as kernels of Inductor, where it otherwise is predicted which is faster. The times are
            stored on disk.
        options: as in `torch.compile`, for Inductor. One more, ``"fusedops.memory"``, is for this
            backend, and selects what the backward computes again, so that the forward does not
            save it: ``"speed"`` for nothing, ``"low"`` for all results of norms and activations
            that only the gradients of weights read, and ``"auto"``, the default, for those of them
            that cost no more than they save.
        rest: what runs the rest of a graph: ``"inductor"`` or ``"eager"``. It is also the option
            ``"fusedops.rest"``. With ``"eager"``, modes, Inductor's options and
            ``"fusedops.memory"`` do not apply.
    Returns:
        The compiled model, as from `torch.compile`. `explain` reports its regions.
    Raises:
        TypeError: the model cannot be called, or options are no mapping.
        ValueError: ``"fusedops.memory"`` or ``rest`` is none of these words, another option begins
            with ``"fusedops."``, or one that does not apply comes with ``rest="eager"``.
        RuntimeError: Inductor has no such mode or option, or an option is of another type; or both
            are given.
    """
    if not callable(model):
        raise TypeError(
            f"compile: model must be a module or a function, got {type(model).__name__}"
        )
    options, mode = with_rest("compile", options, mode, rest)
    check_options("compile", mode, options)
    arguments: dict[str, Any] = {
        "fullgraph": fullgraph,
        "dynamic": dynamic,
        "mode": mode,
        "options": options,
    }
    compiled: Any = torch.compile(model, backend=backend, **arguments)
    return compiled  # type: ignore[no-any-return]


def explain(
    model: Callable[..., Any],
    *args: Any,
    rest: str = INDUCTOR,
    mode: str | None = None,
    **kwargs: Any,
) -> CompileReport:
    """Reports the row-wise regions that `fusedops.compile` finds in a call of a model.

    The report names the reasons why other regions are left, and what else is changed. The model is
    called once with the given arguments, positional and by keyword. It is traced for the sizes of
    this call, but not compiled. Call it under autocast and in the mode (training or not) in which
    it is to run.

    Args:
        model: a module or a function.
        rest: as in `compile`; it is not passed to the model.
        mode: the same. In a mode in which regions are measured, they are measured here, too.
    Returns:
        The report, for `print`.
    Raises:
        TypeError: the model cannot be called.
        ValueError: ``rest`` is no word that `compile` takes, or excludes the mode.
        RuntimeError: Inductor has no such mode.
    """
    if not callable(model):
        raise TypeError(
            f"explain: model must be a module or a function, got {type(model).__name__}"
        )
    options, mode = with_rest("explain", None, mode, rest)
    check_options("explain", mode, options)
    report = CompileReport(runner=rest)
    measures = _measures(options_of(options, mode), report)
    explained = functools.partial(_explained, report, rest=rest, measures=measures)
    traced: Any = torch.compile(_in_code_of_its_own(model), backend=explained)
    # Each graph is reported when Dynamo compiles it, and then runs as it is.
    traced(*args, **kwargs)
    return report


def _in_code_of_its_own(model: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a new code object, of a new name, that calls a model.

    Dynamo counts compilations by code object, and after eight it traces no more. By name it knows
    which sizes have changed, and would make them symbols.
    """

    def explained(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    name = f"explained_{next(_calls)}"
    code = explained.__code__.replace(co_name=name)
    return FunctionType(code, globals(), name, None, explained.__closure__)


_calls = itertools.count()  # of `explain`


def backend(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compiles a graph for torch.compile, which finds it by the entry point ``fusedops``.

    Args:
        gm: the graph, from Dynamo.
        inputs: its inputs.
        mode: Inductor's mode.
        options: Inductor's options, ``"fusedops.memory"`` and ``"fusedops.rest"``.
    """
    chosen = options_of(options, mode)
    report = CompileReport(runner=chosen.rest)
    measures = _measures(chosen, report)
    graph = _stored(gm, inputs, report, chosen.rest, measures=measures)
    for reason in report.left:
        warnings.warn(
            f"fusedops leaves a graph to {RUNNERS[report.runner]}: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    if chosen.rest == EAGER:
        # Without an operator in the place of others, the model's own calls take the least host
        # time. A graph that is left needs the caller's autocast.
        is_run = not report.left and calls_operators(graph)
        return runnable(graph) if is_run else gm.forward
    # The model returns a view of padded rows, [rows, :columns]. Its gradient comes from a loss that
    # allocates it without padding. A backward for the view's strides would copy it.
    is_padded = returns_padded(graph.graph)
    tangents = contiguous_tangents() if is_padded else nullcontext()
    joint.prepare(graph, chosen.memory)
    change = _joint_pass(inputs, chosen.memory)
    with _autocast_of(report), tangents:
        return compile_by_inductor(graph, inputs, mode, chosen.of_inductor, change)


def _measures(chosen: Options, report: CompileReport) -> bool:
    """Whether regions are measured; otherwise a report says why, if they were to be."""
    if chosen.measures:
        report.unmeasured = measuring.why_not()
    return chosen.measures and not report.unmeasured


def _joint_pass(inputs: Sequence[Any], memory: str) -> JointPass:
    """The pass over the joint graph of a graph with these inputs."""
    are_parameters = itertools.chain.from_iterable(map(_are_parameters, reversed(inputs)))
    parameters = list(itertools.compress(itertools.count(), are_parameters))
    change = functools.partial(joint.recompute, memory=memory, parameters=parameters)
    return JointPass(change, f"fusedops {__version__} {parameters} {memory}")


def _are_parameters(value: Any) -> list[bool]:
    """Whether the inputs of the joint graph that an input becomes are parameters.

    AOTAutograd replaces a DTensor by what it holds: its local tensor, and its mesh since PyTorch
    2.13.
    """
    is_parameter = isinstance(value, nn.Parameter)
    if not is_dtensor(value):
        return [is_parameter]
    return [is_parameter] * len(value.__tensor_flatten__()[0])


def _stored(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    report: CompileReport,
    rest: str = INDUCTOR,
    *,
    measures: bool = False,
) -> fx.GraphModule:
    """The graph with operators in the place of its regions, read from disk if it is stored."""
    path = storing.stored_at(gm, inputs, rest, measuring.choice(measures=measures))
    paths = [] if path is None else [path, *storing.of_rank(path, gm, inputs)]
    for stored in paths:
        graph = storing.read(stored, gm)
        if graph is not None:
            return graph
    graph = _with_operators(gm, inputs, report, rest, measures=measures)
    # A graph that is left is captured by each process, so that each warns of it.
    if not paths or report.left or report.is_provisional:
        return graph
    return storing.write(paths[storing.depends_on_rank(graph)], gm, graph, report.programs)


def _autocast_of(report: CompileReport) -> AbstractContextManager[None]:
    """The context in which a graph is compiled.

    In a captured graph casts are operators: autocast must not add others. A graph that is left to
    Inductor is cast while it is compiled.
    """
    return nullcontext() if report.left else casts_recorded()


def _explained(
    report: CompileReport,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    rest: str = INDUCTOR,
    measures: bool = False,
) -> Callable[..., Any]:
    """Reports a graph, and runs it as it is."""
    # The captured nodes get the modules and lines of Dynamo's, which `places` reads.
    with fx.traceback.preserve_node_meta():
        _with_operators(gm, inputs, report, rest, measures=measures)
    return gm.forward


def _with_operators(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    report: CompileReport,
    rest: str = INDUCTOR,
    *,
    measures: bool = False,
) -> fx.GraphModule:
    """The graph with operators in the place of its regions; unchanged if it cannot be captured."""
    # If the capture fails half-way, nothing of this graph is reported.
    report_of_graph = CompileReport()
    measurer = measuring.Measurer()

    def rewrite_body(body: fx.GraphModule) -> fx.GraphModule:
        report_of_graph.operators += operators_in(body.graph)
        fused(body, report_of_graph, rest, measurer.times if measures else None)
        return body

    report.graphs += 1
    try:
        with measurer:
            result = rewrite_body(captured(gm, inputs, rewrite_body))
        rewrite = Rewrite(result.graph, rest)
        for apply in PASSES_OF_WHOLE_GRAPHS[rest]:
            apply(rewrite)
    except Exception as error:  # noqa: BLE001 - a graph with an unknown part is left
        report.left.append(_reason_of(error))
        return gm
    if measurer.problem:
        warnings.warn(
            f"fusedops predicts the times of regions that it was to measure: {measurer.problem}",
            RuntimeWarning,
            stacklevel=2,
        )
    report.regions += report_of_graph.regions
    report.rest += report_of_graph.rest
    report.differentiated += report_of_graph.differentiated
    report.operators += report_of_graph.operators
    report.changes += changes_in(result.graph)
    report.devices.update(tensor.device.type for tensor in tensors_of(result.graph.nodes))
    return result


def _reason_of(error: Exception) -> str:
    if isinstance(error, NotCapturedError):
        return error.reason
    return f"{type(error).__name__}: {error}"
